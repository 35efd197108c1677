/* Folds the answer of another kernel into the plain kernel's state, or with it into the
 * result: a warp a row and head, its lanes side by side along the numbers of the row.
 *
 * Cost: reads the answer once, reads the state where there is one and writes it or the
 * result; bound by memory. */
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
    bool is_last = args.result.data != nullptr;
    bool is_seen = lse != -cp_infinity<Sum>(); /* else `out` counts for nothing */
    if (!is_seen && !args.is_first && !is_last) {
        return;
    }
    const char *out = cp_address(args.out, batch, row, head);
    Sum *state = (Sum *)(args.state.data + batch * args.state.stride[0] +
                         head * args.state.stride[2]) +
                 row * (dim + 2);
    Sum max = args.is_first ? 0 : state[dim], sum = args.is_first ? 0 : state[dim + 1];
    bool is_empty = sum == 0; /* what lies there then counts for nothing */
    Sum top = is_empty || lse > max ? lse : max;
    Sum shrink = is_empty ? 0 : cp_exp(max - top);
    Sum weight = is_seen ? cp_exp(lse - top) : 0;
    Sum total = is_empty ? weight : sum * shrink + weight;
    char *result = is_last ? cp_address(args.result, batch, row, head) : nullptr;
    for (int64_t i = lane; i < dim; i += LANES) {
        Sum add = is_seen ? weight * cp_load<T>(out + i * args.out.stride[3]) : 0;
        Sum value = is_empty ? add : state[i] * shrink + add;
        if (is_last) {
            cp_narrow(cp_result(value, total),
                      (T *)(result + i * args.result.stride[3]));
        } else {
            state[i] = value;
        }
    }
    __syncwarp(); /* all lanes have read maximum and sum */
    if (lane != 0) {
        return;
    }
    if (!is_last) {
        state[dim] = top;
        state[dim + 1] = total;
    } else if (args.result_lse.data != nullptr) {
        *(Sum *)cp_address(args.result_lse, batch, row, head) =
            cp_result_lse(top, total);
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
