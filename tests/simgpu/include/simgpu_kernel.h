/* Kernels on the host: CUDA's words for C++, and the launch.
 *
 * simgpu_launch: threads that do not wait for each other; they run one after the other.
 * simgpu_launch_block: threads with barriers and shuffles, each a fiber. Static
 * __shared__ memory belongs to the thread that runs a stream, and one block of it runs
 * at a time; dynamic shared memory is simgpu_dynamic_shared(), since `extern
 * __shared__` has no translation. */
#ifndef SIMGPU_KERNEL_H
#define SIMGPU_KERNEL_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "simgpu_launch.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1)
        : x(x_), y(y_), z(z_)
    {
    }
};

extern "C" {
extern __thread uint3 threadIdx, blockIdx;
extern constinit thread_local dim3 blockDim, gridDim;
}
constexpr int warpSize = 32;

#define SIMGPU_VECTOR_2(name, type, align)                                             \
    struct alignas(align) name##2                                                      \
    {                                                                                  \
        type x, y;                                                                     \
    };                                                                                 \
    constexpr name##2 make_##name##2(type x, type y)                                   \
    {                                                                                  \
        return {x, y};                                                                 \
    }
#define SIMGPU_VECTOR_4(name, type, align)                                             \
    struct alignas(align) name##4                                                      \
    {                                                                                  \
        type x, y, z, w;                                                               \
    };                                                                                 \
    constexpr name##4 make_##name##4(type x, type y, type z, type w)                   \
    {                                                                                  \
        return {x, y, z, w};                                                           \
    }
SIMGPU_VECTOR_2(int, int, 8)
SIMGPU_VECTOR_4(int, int, 16)
SIMGPU_VECTOR_2(uint, unsigned, 8)
SIMGPU_VECTOR_4(uint, unsigned, 16)
SIMGPU_VECTOR_2(float, float, 8)
SIMGPU_VECTOR_4(float, float, 16)
SIMGPU_VECTOR_2(double, double, 16)
SIMGPU_VECTOR_2(ulonglong, unsigned long long, 16)
#undef SIMGPU_VECTOR_2
#undef SIMGPU_VECTOR_4

inline void __syncthreads()
{
    simgpu_barrier(0, 0);
}

inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    simgpu_warp(SIMGPU_WARP_SYNC, mask, 0, -1);
}

inline void __threadfence()
{
    simgpu_fence();
}

inline void __threadfence_block()
{
    simgpu_fence();
}

inline void __nanosleep(unsigned ns)
{
    simgpu_nanosleep(ns);
}

namespace simgpu
{

template <class T> T shuffle(unsigned mask, T value, int source)
{
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
    unsigned long long bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = simgpu_warp(SIMGPU_WARP_SHUFFLE, mask, bits, source);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

} // namespace simgpu

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize)
{
    int first = simgpu_lane() & ~(width - 1);
    return simgpu::shuffle(mask, value, first + (source & (width - 1)));
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize)
{
    int first = simgpu_lane() & ~(width - 1);
    int source = simgpu_lane() - (int)delta;
    return simgpu::shuffle(mask, value, source < first ? -1 : source);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize)
{
    int end = (simgpu_lane() & ~(width - 1)) + width;
    int source = simgpu_lane() + (int)delta;
    return simgpu::shuffle(mask, value, source >= end ? -1 : source);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize)
{
    int end = (simgpu_lane() & ~(width - 1)) + width;
    int source = simgpu_lane() ^ lane_mask;
    return simgpu::shuffle(mask, value, source >= end ? -1 : source);
}

inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    return (unsigned)simgpu_warp(SIMGPU_WARP_BALLOT, mask, predicate != 0, -1);
}

inline int __any_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}

inline int __all_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) == mask;
}

/* Relaxed, as on the device. */
template <class T> T atomicAdd(T *data, T value)
{
    if constexpr (std::is_integral_v<T>) {
        return __atomic_fetch_add(data, value, __ATOMIC_RELAXED);
    } else {
        T old, sum;
        __atomic_load(data, &old, __ATOMIC_RELAXED);
        do {
            sum = old + value;
        } while (!__atomic_compare_exchange(data, &old, &sum, false, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED));
        return old;
    }
}

template <class T> T atomicMax(T *data, T value)
{
    T old = __atomic_load_n(data, __ATOMIC_RELAXED);
    while (old < value &&
           !__atomic_compare_exchange_n(data, &old, value, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    return old;
}

template <class T> T atomicExch(T *data, T value)
{
    return __atomic_exchange_n(data, value, __ATOMIC_RELAXED);
}

template <class T> T atomicCAS(T *data, T expected, T value)
{
    __atomic_compare_exchange_n(data, &expected, value, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return expected;
}

/* Device functions that libm does not have by these names. */
inline float __expf(float x)
{
    return std::exp(x);
}

inline float __logf(float x)
{
    return std::log(x);
}

inline float __fdividef(float x, float y)
{
    return x / y;
}

inline float rsqrtf(float x)
{
    return 1.0f / std::sqrt(x);
}

template <class T> T __ldg(const T *data)
{
    return *data;
}

template <class To, class From> To simgpu_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float __int_as_float(int x)
{
    return simgpu_bits<float>(x);
}

inline int __float_as_int(float x)
{
    return simgpu_bits<int>(x);
}

inline float __uint_as_float(unsigned x)
{
    return simgpu_bits<float>(x);
}

inline unsigned __float_as_uint(float x)
{
    return simgpu_bits<unsigned>(x);
}

namespace simgpu
{

/* A launch's arguments, converted to the kernel's own types as CUDA does. */
template <class... Params> struct closure {
    void (*kernel)(Params...);
    std::tuple<Params...> args;

    static void run(void *self)
    {
        auto *me = static_cast<closure *>(self);
        std::apply(me->kernel, me->args);
    }

    static void drop(void *self)
    {
        delete static_cast<closure *>(self);
    }
};

template <class... Params, class... Args>
cudaError_t launch(int has_barriers, size_t shared_bytes, void (*kernel)(Params...),
                   dim3 grid, dim3 block, cudaStream_t stream, const Args &...args)
{
    static_assert(!(std::is_reference_v<Params> || ...), "arguments go by value");
    using taken = closure<Params...>;
    simgpu_kernel record{};
    record.function = reinterpret_cast<const void *>(kernel);
    record.run = taken::run;
    record.drop = taken::drop;
    record.closure =
        new taken{kernel, std::tuple<Params...>(static_cast<Params>(args)...)};
    record.grid = {grid.x, grid.y, grid.z};
    record.block = {block.x, block.y, block.z};
    record.shared_bytes = shared_bytes;
    record.has_barriers = has_barriers;
    return simgpu_enqueue_kernel(&record, stream);
}

} // namespace simgpu

template <class... Params, class... Args>
cudaError_t simgpu_launch(void (*kernel)(Params...), dim3 grid, dim3 block,
                          cudaStream_t stream, const Args &...args)
{
    return simgpu::launch(0, 0, kernel, grid, block, stream, args...);
}

template <class... Params, class... Args>
cudaError_t simgpu_launch_block(void (*kernel)(Params...), dim3 grid, dim3 block,
                                size_t shared_bytes, cudaStream_t stream,
                                const Args &...args)
{
    return simgpu::launch(1, shared_bytes, kernel, grid, block, stream, args...);
}

template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...),
                                 enum cudaFuncAttribute attribute, int value)
{
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute,
                                value);
}

#endif
