/* Element types: one row each, everything else follows. */
#ifndef CP_TENSOR_DTYPE_H
#define CP_TENSOR_DTYPE_H

#include <stdbool.h>
#include <stdint.h>

/* name, printed as, bytes, DLPack type code, bits, can attention compute in it */
#define CP_DTYPE_MAP(X)                                                                \
    X(CP_DTYPE_FLOAT32, "float32", 4, 2, 32, true)                                     \
    X(CP_DTYPE_FLOAT64, "float64", 8, 2, 64, true)                                     \
    X(CP_DTYPE_BFLOAT16, "bfloat16", 2, 4, 16, true)                                   \
    X(CP_DTYPE_FLOAT16, "float16", 2, 2, 16, true)                                     \
    X(CP_DTYPE_BOOL, "bool", 1, 6, 8, false)                                           \
    X(CP_DTYPE_UINT8, "uint8", 1, 1, 8, false)                                         \
    X(CP_DTYPE_INT8, "int8", 1, 0, 8, false)                                           \
    X(CP_DTYPE_INT16, "int16", 2, 0, 16, false)                                        \
    X(CP_DTYPE_INT32, "int32", 4, 0, 32, false)                                        \
    X(CP_DTYPE_INT64, "int64", 8, 0, 64, false)                                        \
    X(CP_DTYPE_COMPLEX64, "complex64", 8, 5, 64, false)                                \
    X(CP_DTYPE_COMPLEX128, "complex128", 16, 5, 128, false)

enum cp_dtype {
    CP_DTYPE_NONE,
#define CP_DTYPE_ENUM(dtype, name, bytes, code, bits, attends) dtype,
    CP_DTYPE_MAP(CP_DTYPE_ENUM)
#undef CP_DTYPE_ENUM
        CP_DTYPE_COUNT
};

#ifdef __cplusplus
extern "C" {
#endif

int64_t cp_dtype_bytes(enum cp_dtype dtype);    /* 0 for CP_DTYPE_NONE */
const char *cp_dtype_name(enum cp_dtype dtype); /* never NULL */
bool cp_dtype_attends(enum cp_dtype dtype);
/* CP_DTYPE_NONE where no row has this DLPack code and width. */
enum cp_dtype cp_dtype_from_dlpack(int code, int bits);
/* What sums are kept in: float64 for float64, float32 for the other float types. */
enum cp_dtype cp_dtype_sum(enum cp_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
