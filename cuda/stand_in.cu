/* What a backward pass that asks for `out` is given where there is none: a warp a row and
 * head, its lanes side by side along the numbers of the row.
 *
 * Such a pass needs of `out` only delta = sum(out * dout). The multiple of dout that has
 * the same delta serves; it is the shortest one, no longer than `out` itself, so rounding
 * it costs delta no more than rounding `out` does.
 *
 * Cost: reads dout three times, writes out once; bound by memory. */
#include "cuda_api.h"
#include "launch.h"
#include "number.cuh"
#include "score.cuh"

namespace
{

constexpr unsigned LANES = 32, WARPS = 4, ALL = 0xffffffffu;

template <class Sum> __device__ Sum warp_max(Sum x)
{
    for (unsigned step = LANES / 2; step > 0; step /= 2) {
        Sum other = __shfl_xor_sync(ALL, x, (int)step);
        x = other > x ? other : x;
    }
    return x;
}

template <class Sum> __device__ Sum warp_sum(Sum x)
{
    for (unsigned step = LANES / 2; step > 0; step /= 2) {
        x += __shfl_xor_sync(ALL, x, (int)step);
    }
    return x;
}

/* dout is divided by its largest number, so that no square leaves the range. */
template <class T>
__device__ void stand_in_row(const cp_stand_in_args &args, int64_t batch, int64_t row,
                             int64_t head, unsigned lane, bool has_keys)
{
    using Sum = cp_sum<T>;
    const char *dout = cp_address(args.dout, batch, row, head);
    char *out = cp_address(args.out, batch, row, head);
    Sum delta = cp_load<Sum>(cp_address(args.delta, batch, row, head));
    Sum top = 0, squares = 0;
    for (int64_t i = lane; i < args.dout.n[3]; i += LANES) {
        Sum x = cp_load<T>(dout + i * args.dout.stride[3]);
        x = x < 0 ? -x : x;
        top = x > top ? x : top;
    }
    top = warp_max(top);
    top = top > 0 ? top : 1;
    for (int64_t i = lane; i < args.dout.n[3]; i += LANES) {
        Sum x = cp_load<T>(dout + i * args.dout.stride[3]) / top;
        squares += x * x;
    }
    squares = warp_sum(squares);
    Sum factor = has_keys && squares != 0 ? delta / top / squares : 0;
    for (int64_t i = lane; i < args.dout.n[3]; i += LANES) {
        Sum x = cp_load<T>(dout + i * args.dout.stride[3]) / top;
        cp_narrow(factor * x, (T *)(out + i * args.out.stride[3]));
    }
}

template <class T>
__global__ void __launch_bounds__(LANES *WARPS) stand_in_kernel(cp_stand_in_args args)
{
    using Sum = cp_sum<T>;
    int64_t rows = args.lse_out.n[1], heads = args.lse_out.n[2];
    int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES;
    int64_t row = at % rows, head = at / rows % heads, batch = at / rows / heads;
    unsigned lane = threadIdx.x % LANES;
    if (batch >= args.lse_out.n[0]) {
        return;
    }
    bool is_padding = row >= args.dout.n[1];
    Sum lse = is_padding ? -cp_infinity<Sum>()
                         : cp_load<Sum>(cp_address(args.lse, batch, row, head));
    bool has_keys = lse != -cp_infinity<Sum>();
    if (lane == 0) {
        *(Sum *)cp_address(args.lse_out, batch, row, head) =
            has_keys ? lse : cp_infinity<Sum>();
    }
    if (!is_padding) {
        stand_in_row<T>(args, batch, row, head, lane, has_keys);
    }
}

} // namespace

enum cp_code cp_cuda_stand_in(const struct cp_stand_in_args *args,
                              struct cp_stream *stream)
{
    const int64_t *n = args->lse_out.n;
    int64_t blocks = (n[0] * n[1] * n[2] + WARPS - 1) / WARPS;
    return cp_with_type(args->dout.dtype, [&](auto type) {
        return cp_cuda_launch_waiting(stand_in_kernel<decltype(type)>, blocks,
                                      LANES * WARPS, stream, *args);
    });
}
