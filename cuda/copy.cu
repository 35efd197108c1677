/* Strided copies, conversions and sums: one thread a unit, an element or a few that lie
 * side by side. Bound by memory; units are 16 bytes wide where alignment and strides
 * allow it. */
#include "cuda_api.h"
#include "launch.h"
#include "number.cuh"
#include "tensor/nest.h"

namespace
{

constexpr unsigned THREADS = 256;
/* Positions of units are 32 bits wide, since 64-bit division is slow; longer moves are
 * cut. */
constexpr int64_t LONGEST = INT32_MAX;
constexpr int64_t WIDEST_MOVE = 16; /* bytes */
constexpr int64_t WIDEST = 4;       /* elements that are converted or added */

/* N elements, as wide and as aligned as they are long. */
template <class T, int N> struct alignas(sizeof(T) * N) unit {
    T element[N];
};

/* Where unit number `at` lies on both sides. */
__device__ inline void find(const cp_nest &nest, uint32_t at, char *&dst,
                            const char *&src)
{
    dst = nest.dst;
    src = nest.src;
    for (int i = 0; i < nest.count; i++) {
        uint32_t n = (uint32_t)nest.axis[i].n;
        uint32_t along = i + 1 < nest.count ? at % n : at;
        at /= n;
        dst += along * nest.axis[i].dst;
        src += along * nest.axis[i].src;
    }
}

/* What is done with a unit. */
template <class Unit> struct move_unit {
    static __device__ void apply(char *dst, const char *src)
    {
        *(Unit *)dst = *(const Unit *)src;
    }
};

template <class Dst, class Src, int N> struct convert_unit {
    static __device__ void apply(char *dst, const char *src)
    {
        unit<Src, N> from = *(const unit<Src, N> *)src;
        unit<Dst, N> to;
        for (int i = 0; i < N; i++) {
            cp_narrow(cp_widen(from.element[i]), &to.element[i]);
        }
        *(unit<Dst, N> *)dst = to;
    }
};

template <class Src, int N> struct add_unit {
    static __device__ void apply(char *dst, const char *src)
    {
        unit<Src, N> from = *(const unit<Src, N> *)src;
        unit<cp_sum<Src>, N> to = *(unit<cp_sum<Src>, N> *)dst;
        for (int i = 0; i < N; i++) {
            to.element[i] += cp_widen(from.element[i]);
        }
        *(unit<cp_sum<Src>, N> *)dst = to;
    }
};

template <class Op>
__global__ void __launch_bounds__(THREADS) each_kernel(cp_nest nest, uint32_t count)
{
    uint32_t at = blockIdx.x * THREADS + threadIdx.x;
    if (at < count) {
        char *dst;
        const char *src;
        find(nest, at, dst, src);
        Op::apply(dst, src);
    }
}

using nest_kernel = void (*)(cp_nest, uint32_t);

enum cp_code launch(nest_kernel kernel, const cp_nest &nest, cp_stream *stream)
{
    int64_t count = cp_nest_count(&nest);
    if (count > LONGEST) {
        cp_nest halves[2];
        cp_nest_halve(&nest, halves);
        CP_TRY(launch(kernel, halves[0], stream));
        return launch(kernel, halves[1], stream);
    }
    return cp_cuda_launch(kernel, (count + THREADS - 1) / THREADS, THREADS, stream,
                          nest, (uint32_t)count);
}

enum cp_code move(const cp_nest &nest, cp_stream *stream)
{
    int64_t bytes = 0;
    cp_nest by_byte = cp_nest_of_bytes(&nest);
    if (by_byte.count == 1) {
        return cp_cuda_check(
            cudaMemcpyAsync(nest.dst, nest.src, (size_t)by_byte.axis[0].n,
                            cudaMemcpyDeviceToDevice, (cudaStream_t)stream),
            "cudaMemcpyAsync");
    }
    cp_nest wide = cp_nest_widen(&by_byte, WIDEST_MOVE, &bytes);
    switch (bytes) {
    case 16:
        return launch(each_kernel<move_unit<unit<uint64_t, 2>>>, wide, stream);
    case 8:
        return launch(each_kernel<move_unit<uint64_t>>, wide, stream);
    case 4:
        return launch(each_kernel<move_unit<uint32_t>>, wide, stream);
    case 2:
        return launch(each_kernel<move_unit<uint16_t>>, wide, stream);
    default:
        return launch(each_kernel<move_unit<uint8_t>>, wide, stream);
    }
}

/* `Wide` where units can be of WIDEST elements, else `One`. */
template <class Wide, class One>
enum cp_code launch_widest(const cp_nest &nest, cp_stream *stream)
{
    int64_t width = 0;
    cp_nest wide = cp_nest_widen(&nest, WIDEST, &width);
    return width == WIDEST ? launch(each_kernel<Wide>, wide, stream)
                           : launch(each_kernel<One>, nest, stream);
}

template <class Dst, class Src>
enum cp_code convert(const cp_nest &nest, cp_stream *stream)
{
    return launch_widest<convert_unit<Dst, Src, WIDEST>, convert_unit<Dst, Src, 1>>(
        nest, stream);
}

enum cp_code check_alignment(const cp_nest &nest, const char *verb)
{
    return cp_nest_is_aligned(&nest)
               ? CP_OK
               : cp_fail(CP_ERR_INTERNAL,
                         "%s of elements that are not aligned to their size", verb);
}

} // namespace

enum cp_code cp_cuda_copy(const struct cp_view *dst, const struct cp_view *src,
                          struct cp_stream *stream)
{
    CP_TRY(cp_view_check_same(dst, src, "copy"));
    bool is_move = dst->dtype == src->dtype && cp_dtype_bytes(dst->dtype) > 0;
    if (!is_move && !(cp_dtype_attends(dst->dtype) && cp_dtype_attends(src->dtype))) {
        return cp_fail(CP_ERR_INTERNAL, "no conversion from %s to %s",
                       cp_dtype_name(src->dtype), cp_dtype_name(dst->dtype));
    }
    if (cp_view_count(dst) == 0) {
        return CP_OK;
    }
    cp_nest nest = cp_nest_init(dst, src);
    if (is_move) {
        return move(nest, stream);
    }
    CP_TRY(check_alignment(nest, "conversion"));
    return cp_with_type(dst->dtype, [&](auto to) {
        return cp_with_type(src->dtype, [&](auto from) {
            return convert<decltype(to), decltype(from)>(nest, stream);
        });
    });
}

enum cp_code cp_cuda_add(const struct cp_view *dst, const struct cp_view *src,
                         struct cp_stream *stream)
{
    CP_TRY(cp_view_check_same(dst, src, "add"));
    if (!cp_dtype_attends(src->dtype) || dst->dtype != cp_dtype_sum(src->dtype)) {
        return cp_fail(CP_ERR_INTERNAL, "cannot add %s to %s",
                       cp_dtype_name(src->dtype), cp_dtype_name(dst->dtype));
    }
    if (cp_view_count(dst) == 0) {
        return CP_OK;
    }
    cp_nest nest = cp_nest_init(dst, src);
    CP_TRY(check_alignment(nest, "sum"));
    return cp_with_type(src->dtype, [&](auto type) {
        using Src = decltype(type);
        return launch_widest<add_unit<Src, WIDEST>, add_unit<Src, 1>>(nest, stream);
    });
}
