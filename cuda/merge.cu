/* Folds the answer of another kernel into the plain kernel's state: a warp a row and
 * head, its lanes side by side along the numbers of the row.
 *
 * Cost: reads the answer once, reads and writes the state once; bound by memory. */
#include "cuda_api.h"
#include "launch.h"
#include "number.cuh"
#include "score.cuh"

namespace
{

constexpr unsigned LANES = 32, WARPS = 4;

template <class T>
__global__ void __launch_bounds__(LANES *WARPS) merge_kernel(cp_merge_args args)
{
    using Sum = cp_sum<T>;
    int64_t rows = args.out.n[1], heads = args.out.n[2], dim = args.out.n[3];
    int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES;
    int64_t row = at % rows, head = at / rows % heads, batch = at / rows / heads;
    unsigned lane = threadIdx.x % LANES;
    if (batch >= args.out.n[0]) {
        return;
    }
    Sum lse = cp_load<Sum>(cp_address(args.lse, batch, row, head));
    if (lse == -cp_infinity<Sum>()) {
        return;
    }
    const char *out = cp_address(args.out, batch, row, head);
    Sum *state = (Sum *)(args.state.data + batch * args.state.stride[0] +
                         head * args.state.stride[2]) +
                 row * (dim + 2);
    Sum max = state[dim], sum = state[dim + 1];
    bool is_empty = sum == 0; /* what lies there then counts for nothing */
    Sum top = is_empty || lse > max ? lse : max;
    Sum shrink = is_empty ? 0 : cp_exp(max - top), weight = cp_exp(lse - top);
    for (int64_t i = lane; i < dim; i += LANES) {
        Sum add = weight * cp_load<T>(out + i * args.out.stride[3]);
        state[i] = is_empty ? add : state[i] * shrink + add;
    }
    __syncwarp(); /* all lanes have read maximum and sum */
    if (lane == 0) {
        state[dim] = top;
        state[dim + 1] = is_empty ? weight : sum * shrink + weight;
    }
}

} // namespace

enum cp_code cp_cuda_merge(const struct cp_merge_args *args, struct cp_stream *stream)
{
    int64_t count = args->out.n[0] * args->out.n[1] * args->out.n[2];
    return cp_with_type(args->out.dtype, [&](auto type) {
        return cp_cuda_launch_waiting(merge_kernel<decltype(type)>,
                                      (count + WARPS - 1) / WARPS, LANES * WARPS,
                                      stream, *args);
    });
}
