/* The plain kernel's forward pass: one thread a query row and head.
 *
 * A thread takes its keys in blocks: the scores of a block lie in registers, the output
 * stays in the state, which is read and written once a block. Cost: 2 (D + Dv)
 * operations a score, bound by the loads of k and v, one for each multiplication. */
#include "cuda_api.h"
#include "launch.h"
#include "score.cuh"

namespace
{

/* Maximum and sum of a row so far. */
template <class Sum> struct row_state {
    Sum max, sum;
};

/* Turns scores into weights and moves maximum and sum on. Returns what the output so
 * far shrinks by, since the maximum grew. */
template <class Sum>
__device__ Sum weigh(Sum (&score)[CP_SCORE_BLOCK], int count, row_state<Sum> *state)
{
    Sum max = state->max, sum = 0;
    CP_CUDA_UNROLL
    for (int i = 0; i < CP_SCORE_BLOCK; i++) {
        max = i < count && score[i] > max ? score[i] : max;
    }
    /* A row that has seen no key has no maximum to subtract; all its scores are -inf and
     * weigh 0. */
    Sum base = max == -cp_infinity<Sum>() ? 0 : max;
    Sum shrink = cp_exp(state->max - base);
    CP_CUDA_UNROLL
    for (int i = 0; i < CP_SCORE_BLOCK; i++) {
        if (i < count) {
            score[i] = cp_exp(score[i] - base);
            sum += score[i];
        }
    }
    *state = {max, state->sum * shrink + sum};
    return shrink;
}

/* The result of a row, whose outputs are at `from`: each `step`th number on from `first`, of
 * so many threads that share the row. T: what out is stored in. */
template <class T>
__device__ void write_result(const cp_view &out, const cp_view &lse, const cp_spot &at,
                             const cp_sum<T> *from, const row_state<cp_sum<T>> &state,
                             int64_t first, int64_t step)
{
    char *to = cp_address(out, at.batch, at.row, at.head);
    for (int64_t i = first; i < out.n[3]; i += step) {
        cp_narrow(cp_result(from[i], state.sum), (T *)(to + i * out.stride[3]));
    }
    if (lse.data != nullptr && first == 0) {
        *(cp_sum<T> *)cp_address(lse, at.batch, at.row, at.head) =
            cp_result_lse(state.max, state.sum);
    }
}

template <class T>
__global__ void __launch_bounds__(CP_SCORE_THREADS) attend_kernel(cp_attend_args args)
{
    using Sum = cp_sum<T>;
    cp_spot at;
    if (!cp_spot_find(args.q.n[2], args.q.n[1], &at)) {
        return;
    }
    int64_t keys = cp_visible(args.place, at.row, args.k.n[1]);
    if (keys == 0 && !cp_has_end(args)) {
        return;
    }
    int64_t head_dim = args.q.n[3], value_dim = args.v.n[3];
    int64_t kv_head = cp_kv_head(args.place, at.head);
    const char *q = cp_address(args.q, at.batch, at.row, at.head);
    cp_rows k = cp_rows_of(args.k, at.batch, 0, kv_head);
    cp_rows v = cp_rows_of(args.v, at.batch, 0, kv_head);
    cp_mask_plane mask = cp_mask_of(args.mask, at.batch, at.head);
    Sum *to = (Sum *)(args.state.data + at.batch * args.state.stride[0] +
                      at.head * args.state.stride[2]) +
              at.row * (value_dim + 2);
    row_state<Sum> state = {-cp_infinity<Sum>(), 0};
    /* What lies there then counts for nothing. */
    bool is_empty = args.is_first || to[value_dim + 1] == 0;
    if (!is_empty) {
        state = {to[value_dim], to[value_dim + 1]};
    }
    for (int64_t key = 0; key < keys; key += CP_SCORE_BLOCK) {
        int count = keys - key < CP_SCORE_BLOCK ? (int)(keys - key) : CP_SCORE_BLOCK;
        Sum score[CP_SCORE_BLOCK];
        cp_dots<T>(q, args.q.stride[3], k, count, head_dim, score);
        CP_CUDA_UNROLL
        for (int i = 0; i < CP_SCORE_BLOCK; i++) {
            if (i < count) {
                score[i] = cp_score<T>(score[i], args.scale, mask, at.row, key + i);
            }
        }
        Sum shrink = weigh(score, count, &state);
        for (int64_t j = 0; j < value_dim; j++) {
            const char *value = v.data + j * v.element;
            Sum add = 0;
            CP_CUDA_UNROLL
            for (int i = 0; i < CP_SCORE_BLOCK; i++, value += v.row) {
                if (i < count) {
                    add += score[i] * cp_load<T>(value);
                }
            }
            to[j] = is_empty ? add : to[j] * shrink + add;
        }
        is_empty = false;
        k.data += CP_SCORE_BLOCK * k.row;
        v.data += CP_SCORE_BLOCK * v.row;
    }
    if (args.out.data == nullptr) {
        to[value_dim] = state.max;
        to[value_dim + 1] = state.sum;
        return;
    }
    write_result<T>(args.out, args.lse, at, to, state, 0, 1);
}

constexpr unsigned FINISH_THREADS = 64;

/* One block of threads a row and head. T: what out is stored in. */
template <class T>
__global__ void __launch_bounds__(FINISH_THREADS) finish_kernel(cp_finish_args args)
{
    using Sum = cp_sum<T>;
    int64_t rows = args.out.n[1], heads = args.out.n[2], dim = args.out.n[3];
    int64_t outer = blockIdx.x / rows;
    cp_spot at = {outer / heads, outer % heads, blockIdx.x % rows};
    const Sum *state = (const Sum *)(args.state.data + at.batch * args.state.stride[0] +
                                     at.head * args.state.stride[2]) +
                       at.row * (dim + 2);
    write_result<T>(args.out, args.lse, at, state, {state[dim], state[dim + 1]},
                    threadIdx.x, FINISH_THREADS);
}

} // namespace

enum cp_code cp_cuda_attend(const struct cp_attend_args *args, struct cp_stream *stream)
{
    int64_t blocks =
        cp_spot_blocks(args->q.n[0], args->q.n[2], args->q.n[1], CP_SCORE_THREADS);
    return cp_with_type(args->q.dtype, [&](auto type) {
        return cp_cuda_launch(attend_kernel<decltype(type)>, blocks, CP_SCORE_THREADS,
                              stream, *args);
    });
}

enum cp_code cp_cuda_finish(const struct cp_finish_args *args, struct cp_stream *stream)
{
    int64_t blocks = args->out.n[0] * args->out.n[1] * args->out.n[2];
    return cp_with_type(args->out.dtype, [&](auto type) {
        return cp_cuda_launch(finish_kernel<decltype(type)>, blocks, FINISH_THREADS,
                              stream, *args);
    });
}
