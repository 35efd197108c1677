/* Element types in device code: how they lie in memory, what they are summed in. */
#ifndef CP_CUDA_NUMBER_CUH
#define CP_CUDA_NUMBER_CUH

#include <cuda_runtime.h>
#include <math.h>

#include "base/status.h"
#include "tensor/convert.h"
#include "tensor/dtype.h"

struct cp_bf16 {
    uint16_t bits;
};

struct cp_f16 {
    uint16_t bits;
};

/* The type of sums over numbers of type T. */
template <class T> struct cp_sum_of {
    using type = float;
};
template <> struct cp_sum_of<double> {
    using type = double;
};
template <class T> using cp_sum = typename cp_sum_of<T>::type;

__device__ inline float cp_widen(float x)
{
    return x;
}

__device__ inline double cp_widen(double x)
{
    return x;
}

__device__ inline float cp_widen(cp_bf16 x)
{
    return cp_bf16_to_f32(x.bits);
}

/* The device has an instruction for it, which counts where every load is a conversion. */
__device__ inline float cp_widen(cp_f16 x)
{
#ifdef __CUDA_ARCH__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
#else
    return cp_f16_to_f32(x.bits);
#endif
}

/* The other way, rounding once. */
__device__ inline void cp_narrow(float x, float *to)
{
    *to = x;
}

__device__ inline void cp_narrow(double x, float *to)
{
    *to = (float)x;
}

__device__ inline void cp_narrow(float x, double *to)
{
    *to = (double)x;
}

__device__ inline void cp_narrow(double x, double *to)
{
    *to = x;
}

__device__ inline void cp_narrow(float x, cp_bf16 *to)
{
    to->bits = cp_f32_to_bf16(x);
}

__device__ inline void cp_narrow(double x, cp_bf16 *to)
{
    to->bits = cp_f64_to_bf16(x);
}

__device__ inline void cp_narrow(float x, cp_f16 *to)
{
    to->bits = cp_f32_to_f16(x);
}

__device__ inline void cp_narrow(double x, cp_f16 *to)
{
    to->bits = cp_f64_to_f16(x);
}

/* The number at an address; elements are aligned to their size. */
template <class T> __device__ inline cp_sum<T> cp_load(const char *from)
{
    return cp_widen(*(const T *)from);
}

__device__ inline float cp_exp(float x)
{
    return expf(x);
}

__device__ inline double cp_exp(double x)
{
    return exp(x);
}

__device__ inline float cp_log(float x)
{
    return logf(x);
}

__device__ inline double cp_log(double x)
{
    return log(x);
}

template <class T> __device__ inline T cp_infinity()
{
    return (T)INFINITY;
}

/* What `run(T{})` says, with the type of a dtype that attends. */
template <class Run> enum cp_code cp_with_type(enum cp_dtype dtype, const Run &run)
{
    switch (dtype) {
    case CP_DTYPE_FLOAT32:
        return run(float{});
    case CP_DTYPE_FLOAT64:
        return run(double{});
    case CP_DTYPE_BFLOAT16:
        return run(cp_bf16{});
    case CP_DTYPE_FLOAT16:
        return run(cp_f16{});
    default:
        return cp_fail(CP_ERR_INTERNAL, "no CUDA kernel computes in %s",
                       cp_dtype_name(dtype));
    }
}

#endif
