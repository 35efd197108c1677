/* Lookups in the list of element types. */
#include "tensor/dtype.h"

#include <stddef.h>

static const struct {
    const char *name;
    int64_t bytes;
    int code, bits;
    bool attends;
} rows[CP_DTYPE_COUNT] = {[CP_DTYPE_NONE] = {"none", 0, -1, 0, false},
#define CP_DTYPE_ROW(dtype, name, bytes, code, bits, attends)                          \
    [dtype] = {name, bytes, code, bits, attends},
                          CP_DTYPE_MAP(CP_DTYPE_ROW)
#undef CP_DTYPE_ROW
};

static enum cp_dtype known(enum cp_dtype dtype)
{
    return dtype > CP_DTYPE_NONE && dtype < CP_DTYPE_COUNT ? dtype : CP_DTYPE_NONE;
}

int64_t cp_dtype_bytes(enum cp_dtype dtype)
{
    return rows[known(dtype)].bytes;
}

const char *cp_dtype_name(enum cp_dtype dtype)
{
    return rows[known(dtype)].name;
}

bool cp_dtype_attends(enum cp_dtype dtype)
{
    return rows[known(dtype)].attends;
}

enum cp_dtype cp_dtype_from_dlpack(int code, int bits)
{
    for (int dtype = CP_DTYPE_NONE + 1; dtype < CP_DTYPE_COUNT; dtype++) {
        if (rows[dtype].code == code && rows[dtype].bits == bits) {
            return (enum cp_dtype)dtype;
        }
    }
    return CP_DTYPE_NONE;
}

enum cp_dtype cp_dtype_sum(enum cp_dtype dtype)
{
    return dtype == CP_DTYPE_FLOAT64 ? CP_DTYPE_FLOAT64 : CP_DTYPE_FLOAT32;
}
