/* The table of backends. */
#include "base/backend.h"

#include <string.h>

#include "base/text.h"

static const struct {
    const char *name;
    bool is_on_host, is_package;
} backends[CP_BACKEND_COUNT] = {
#define CP_BACKEND_ROW(constant, name, is_on_host, is_package)                         \
    [constant] = {name, is_on_host, is_package},
    CP_BACKENDS(CP_BACKEND_ROW)
#undef CP_BACKEND_ROW
};

static bool is_known(enum cp_backend backend)
{
    return (unsigned)backend < CP_BACKEND_COUNT;
}

const char *cp_backend_name(enum cp_backend backend)
{
    return is_known(backend) ? backends[backend].name : "unknown";
}

bool cp_backend_is_on_host(enum cp_backend backend)
{
    return is_known(backend) && backends[backend].is_on_host;
}

bool cp_backend_is_package(enum cp_backend backend)
{
    return is_known(backend) && backends[backend].is_package;
}

enum cp_backend cp_backend_find(const char *name)
{
    int backend = 0;
    while (backend < CP_BACKEND_COUNT && strcmp(name, backends[backend].name) != 0) {
        backend++;
    }
    return (enum cp_backend)backend;
}

const char *cp_backend_print(bool on_host, char *text, size_t bytes)
{
    text[0] = '\0';
    for (int i = 0; i < CP_BACKEND_COUNT; i++) {
        if (!on_host || backends[i].is_on_host) {
            cp_text_append(text, bytes, "%s%s", text[0] != '\0' ? ", " : "",
                           backends[i].name);
        }
    }
    return text;
}
