/* Finds the torch that the process has loaded. It is not opened where it is not: tensors
 * of torch bring it. */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "torch_abi.h"

static struct cp_torch found;
static bool is_found; /* both written once, by find */
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A pointer to a function has no conversion from void * in C, but the same bytes. */
static bool find_one(void *library, const char *name, void *address_of_pointer)
{
    void *symbol = dlsym(library, name);
    memcpy(address_of_pointer, &symbol, sizeof symbol);
    return symbol != NULL;
}

/* Of the copy that torch has brought: torch itself needs it, whole or not at all. */
static int64_t cudnn_version(void)
{
    void *cudnn = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
    size_t (*version)(void) = NULL;
    return cudnn != NULL && find_one(cudnn, "cudnnGetVersion", &version)
               ? (int64_t)version()
               : 0;
}

static void find(void)
{
    void *core = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    void *cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (core == NULL || cuda == NULL) {
        return;
    }
    bool is_whole = true;
#define FIND_CORE(field, name, arguments)                                              \
    is_whole = is_whole && find_one(core, #name, &found.field);
#define FIND_CUDA(field, name, arguments)                                              \
    is_whole = is_whole && find_one(cuda, #name, &found.field);
    CP_TORCH_CALLS(FIND_CORE)
    CP_TORCH_NUMBERS(FIND_CORE)
    CP_TORCH_CUDA_CALLS(FIND_CUDA)
#undef FIND_CORE
#undef FIND_CUDA
    (void)find_one(core, "torch_exception_get_what_without_backtrace",
                   &found.last_error);
    found.cudnn_version = cudnn_version();
    is_found = is_whole;
}

const struct cp_torch *cp_torch_loaded(void)
{
    (void)pthread_once(&once, find);
    return is_found ? &found : NULL;
}
