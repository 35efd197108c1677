/* Opens NCCL at run time and turns its errors into sentences. */
#include "nccl_dl.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

#include "base/mem.h"

static const char file_name[] = "libnccl.so.2";

/* What the loader said last. */
static const char *loader_error(void)
{
    const char *reason = dlerror();
    return reason != NULL ? reason : "unknown reason";
}

/* A pointer to a function has no conversion from void * in C, but the same bytes. */
static bool find(void *library, const char *name, void *address_of_pointer)
{
    void *symbol = dlsym(library, name);
    memcpy(address_of_pointer, &symbol, sizeof symbol);
    return symbol != NULL;
}

static enum cp_code fill(void *library, struct cp_nccl *nccl)
{
#define FIND(field, name, arguments)                                                   \
    if (!find(library, #name, &nccl->field)) {                                         \
        return cp_fail(CP_ERR_UNSUPPORTED,                                             \
                       "%s has no " #name ": install NCCL 2.18 or later", file_name);  \
    }
    CP_NCCL_CALLS(FIND)
    CP_NCCL_TEXTS(FIND)
#undef FIND
    return CP_OK;
}

static enum cp_code check_version(const struct cp_nccl *nccl)
{
    int version = 0;
    ncclResult_t result = nccl->get_version(&version);
    if (result != ncclSuccess) {
        return cp_fail(CP_ERR_UNSUPPORTED, "NCCL does not tell its version: %s",
                       nccl->get_error_string(result));
    }
    if (version < CP_NCCL_OLDEST) {
        /* Versions before 2.9 had one digit less: 2804 is 2.8.4. */
        int major = version < 10000 ? version / 1000 : version / 10000;
        int minor = version < 10000 ? version / 100 % 10 : version / 100 % 100;
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "NCCL is version %d.%d.%d; install 2.18 or later", major, minor,
                       version % 100);
    }
    return CP_OK;
}

enum cp_code cp_nccl_open(const struct cp_nccl **out)
{
    struct cp_nccl *nccl = NULL;
    void *block = NULL;
    /* First the copy that is there already: two in one process would each hold their
     * own buffers on the device. */
    void *library = dlopen(file_name, RTLD_NOW | RTLD_NOLOAD);
    if (library == NULL) {
        library = dlopen(file_name, RTLD_NOW);
    }
    if (library == NULL) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "cannot open NCCL (%s): import a framework that brings it first "
                       "(torch does), or install NCCL 2.18 or later where the loader "
                       "finds it (package libnccl2, or pip install nvidia-nccl-cu13 "
                       "and its folder in LD_LIBRARY_PATH)",
                       loader_error());
    }
    CP_TRY(cp_mem_create(sizeof *nccl, "the table of NCCL", &block));
    nccl = block;
    enum cp_code code = fill(library, nccl);
    if (code == CP_OK) {
        code = check_version(nccl);
    }
    if (code != CP_OK) {
        cp_mem_destroy(&nccl);
        return code;
    }
    *out = nccl;
    return CP_OK;
}

void cp_nccl_close(const struct cp_nccl **nccl)
{
    cp_mem_destroy(nccl);
}

ncclConfig_t cp_nccl_config(void)
{
    return (ncclConfig_t){
        .size = sizeof(ncclConfig_t),
        .magic = CP_NCCL_MAGIC,
        .version = CP_NCCL_OLDEST, /* of the struct, not of the library */
        .blocking = 0,
        .cgaClusterSize = CP_NCCL_UNDEFINED,
        .minCTAs = CP_NCCL_UNDEFINED,
        .maxCTAs = CP_NCCL_UNDEFINED,
        .netName = NULL,
        .splitShare = CP_NCCL_UNDEFINED,
    };
}

static enum cp_code code_of(ncclResult_t result)
{
    return result == ncclUnhandledCudaError ? CP_ERR_DEVICE : CP_ERR_COMM;
}

enum cp_code cp_nccl_fail(const struct cp_nccl *nccl, ncclComm_t comm,
                          ncclResult_t result, int rank, const char *what)
{
    const char *last = nccl->get_last_error(comm);
    bool has_last = last != NULL && last[0] != '\0';
    return cp_fail_rank(code_of(result), rank,
                        "rank %d: cannot %s: NCCL says \"%s\"%s%.700s", rank, what,
                        nccl->get_error_string(result), has_last ? ": " : "",
                        has_last ? last : "");
}
