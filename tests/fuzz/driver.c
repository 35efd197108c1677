/* Stands in for libFuzzer: gives a target every file that is named, once. Works with any compiler, so
 * that every machine replays the corpus and what a fuzzer has found. A name is printed before its file
 * is read: the last one is that of the input that ended the process. */
#include <stdio.h>
#include <stdlib.h>

#include "fuzz.h"

/* In a block of just its size, so that AddressSanitizer sees a read behind it. */
static void replay(const char *name)
{
    FILE *file = fopen(name, "rb");
    FUZZ_CHECK(file != NULL && fseek(file, 0, SEEK_END) == 0, "cannot open %s", name);
    long bytes = ftell(file);
    FUZZ_CHECK(bytes >= 0 && fseek(file, 0, SEEK_SET) == 0, "cannot read %s", name);
    uint8_t *data = malloc(bytes > 0 ? (size_t)bytes : 1);
    FUZZ_CHECK(data != NULL, "no memory for %s", name);
    FUZZ_CHECK(fread(data, 1, (size_t)bytes, file) == (size_t)bytes, "cannot read %s",
               name);
    (void)fclose(file);
    (void)LLVMFuzzerTestOneInput(data, (size_t)bytes);
    free(data);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        (void)fprintf(stderr, "usage: %s FILE...\n", *argv);
        return 2;
    }
    for (int i = 1; i < argc; i++) {
        (void)puts(argv[i]);
        (void)fflush(stdout);
        replay(argv[i]);
    }
    printf("%d files replayed\n", argc - 1);
    return 0;
}
