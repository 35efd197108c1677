/* The plain kernel's backward pass: one thread a query row and head for dq, one a key
 * and kv head for dk and dv. Nobody else writes a thread's rows, and each thread adds
 * in the order of rows and heads, so the sums are the same in every run.
 *
 * Scores are computed twice. Cost: 2 (3 D + Dv) operations a score for dq, 4 (D + Dv)
 * for dk and dv, bound by loads, one for each multiplication. */
#include "cuda_api.h"
#include "launch.h"
#include "score.cuh"

namespace
{

/* to[i] += factor * sum of weight[j] * row j of `rows`, over the bits of `live`. */
template <class T>
__device__ void add_weighted(const cp_view &view, char *to, cp_sum<T> factor,
                             const cp_sum<T> (&weight)[CP_SCORE_BLOCK],
                             const cp_rows &rows, uint32_t live)
{
    using Sum = cp_sum<T>;
    for (int64_t i = 0; i < view.n[3]; i++) {
        const char *at = rows.data + i * rows.element;
        Sum add = 0;
        CP_CUDA_UNROLL
        for (int j = 0; j < CP_SCORE_BLOCK; j++, at += rows.row) {
            if (live >> j & 1) {
                add += weight[j] * cp_load<T>(at);
            }
        }
        *(Sum *)(to + i * view.stride[3]) += factor * add;
    }
}

template <class T>
__global__ void __launch_bounds__(CP_SCORE_THREADS) grad_q_kernel(cp_grad_args args)
{
    using Sum = cp_sum<T>;
    cp_spot at;
    if (!cp_spot_find(args.q.n[2], args.q.n[1], &at)) {
        return;
    }
    Sum lse = cp_load<Sum>(cp_address(args.lse, at.batch, at.row, at.head));
    if (lse == -cp_infinity<Sum>()) {
        return;
    }
    Sum delta = cp_load<Sum>(cp_address(args.delta, at.batch, at.row, at.head));
    int64_t keys = cp_visible(args.place, at.row, args.k.n[1]);
    int64_t kv_head = cp_kv_head(args.place, at.head);
    const char *q = cp_address(args.q, at.batch, at.row, at.head);
    const char *dout = cp_address(args.dout, at.batch, at.row, at.head);
    char *dq = cp_address(args.dq, at.batch, at.row, at.head);
    cp_rows k = cp_rows_of(args.k, at.batch, 0, kv_head);
    cp_rows v = cp_rows_of(args.v, at.batch, 0, kv_head);
    cp_mask_plane mask = cp_mask_of(args.mask, at.batch, at.head);
    for (int64_t key = 0; key < keys; key += CP_SCORE_BLOCK) {
        int count = keys - key < CP_SCORE_BLOCK ? (int)(keys - key) : CP_SCORE_BLOCK;
        Sum score[CP_SCORE_BLOCK], slope[CP_SCORE_BLOCK];
        cp_dots<T>(q, args.q.stride[3], k, count, args.q.n[3], score);
        cp_dots<T>(dout, args.dout.stride[3], v, count, args.v.n[3], slope);
        CP_CUDA_UNROLL
        for (int i = 0; i < CP_SCORE_BLOCK; i++) {
            if (i < count) {
                Sum s = cp_score<T>(score[i], args.scale, mask, at.row, key + i);
                slope[i] = cp_exp(s - lse) * (slope[i] - delta);
            }
        }
        add_weighted<T>(args.dq, dq, (Sum)args.scale, slope, k,
                        0xffffu >> (CP_SCORE_BLOCK - count));
        k.data += CP_SCORE_BLOCK * k.row;
        v.data += CP_SCORE_BLOCK * v.row;
    }
}

/* What one query head adds to dk and dv of a key. */
template <class T>
__device__ void add_head(const cp_grad_args &args, const cp_spot &at, int64_t head)
{
    using Sum = cp_sum<T>;
    int64_t rows = args.q.n[1], row = cp_first_query(args.place, at.row);
    const char *k = cp_address(args.k, at.batch, at.row, at.head);
    const char *v = cp_address(args.v, at.batch, at.row, at.head);
    cp_mask_plane mask = cp_mask_of(args.mask, at.batch, head);
    for (; row < rows; row += CP_SCORE_BLOCK) {
        int count = rows - row < CP_SCORE_BLOCK ? (int)(rows - row) : CP_SCORE_BLOCK;
        cp_rows q = cp_rows_of(args.q, at.batch, row, head);
        cp_rows dout = cp_rows_of(args.dout, at.batch, row, head);
        cp_rows lses = cp_rows_of(args.lse, at.batch, row, head);
        cp_rows deltas = cp_rows_of(args.delta, at.batch, row, head);
        uint32_t live = 0; /* rows that have a gradient */
        Sum weight[CP_SCORE_BLOCK], slope[CP_SCORE_BLOCK];
        cp_dots<T>(k, args.k.stride[3], q, count, args.q.n[3], weight);
        cp_dots<T>(v, args.v.stride[3], dout, count, args.v.n[3], slope);
        CP_CUDA_UNROLL
        for (int i = 0; i < CP_SCORE_BLOCK; i++) {
            if (i < count) {
                Sum lse = cp_load<Sum>(lses.data + i * lses.row);
                Sum delta = cp_load<Sum>(deltas.data + i * deltas.row);
                Sum s = cp_score<T>(weight[i], args.scale, mask, row + i, at.row);
                live |= lse != -cp_infinity<Sum>() ? 1u << i : 0u;
                weight[i] = cp_exp(s - lse);
                slope[i] = weight[i] * (slope[i] - delta);
            }
        }
        add_weighted<T>(args.dk, cp_address(args.dk, at.batch, at.row, at.head),
                        (Sum)args.scale, slope, q, live);
        add_weighted<T>(args.dv, cp_address(args.dv, at.batch, at.row, at.head), 1,
                        weight, dout, live);
    }
}

template <class T>
__global__ void __launch_bounds__(CP_SCORE_THREADS) grad_kv_kernel(cp_grad_args args)
{
    cp_spot at;
    if (!cp_spot_find(args.k.n[2], args.k.n[1], &at)) {
        return;
    }
    cp_head_span heads = cp_query_heads(args.place, args.q.n[2], at.head);
    for (int64_t head = heads.first; head < heads.end; head++) {
        add_head<T>(args, at, head);
    }
}

/* sum(out * dout) - dlse of one row. Added up exactly as cp_dots does in the kernels
 * above: where a row sees one key, dout . v and this cancel to the last bit, as they
 * must. */
template <class T>
__global__ void __launch_bounds__(CP_SCORE_THREADS) delta_kernel(cp_delta_args args)
{
    using Sum = cp_sum<T>;
    cp_spot at;
    if (!cp_spot_find(args.out.n[2], args.out.n[1], &at)) {
        return;
    }
    Sum delta[1];
    cp_dots<T>(cp_address(args.out, at.batch, at.row, at.head), args.out.stride[3],
               cp_rows_of(args.dout, at.batch, at.row, at.head), 1, args.out.n[3],
               delta);
    if (args.dlse.data != nullptr) {
        delta[0] -= cp_load<Sum>(cp_address(args.dlse, at.batch, at.row, at.head));
    }
    *(Sum *)cp_address(args.delta, at.batch, at.row, at.head) = delta[0];
}

} // namespace

enum cp_code cp_cuda_delta(const struct cp_delta_args *args, struct cp_stream *stream)
{
    int64_t blocks = cp_spot_blocks(args->out.n[0], args->out.n[2], args->out.n[1],
                                    CP_SCORE_THREADS);
    return cp_with_type(args->out.dtype, [&](auto type) {
        return cp_cuda_launch(delta_kernel<decltype(type)>, blocks, CP_SCORE_THREADS,
                              stream, *args);
    });
}

enum cp_code cp_cuda_grad(const struct cp_grad_args *args, struct cp_stream *stream)
{
    int64_t q_blocks =
        cp_spot_blocks(args->q.n[0], args->q.n[2], args->q.n[1], CP_SCORE_THREADS);
    int64_t kv_blocks =
        cp_spot_blocks(args->k.n[0], args->k.n[2], args->k.n[1], CP_SCORE_THREADS);
    return cp_with_type(args->q.dtype, [&](auto type) {
        using T = decltype(type);
        CP_TRY(cp_cuda_launch(grad_q_kernel<T>, q_blocks, CP_SCORE_THREADS, stream,
                              *args));
        return cp_cuda_launch(grad_kv_kernel<T>, kv_blocks, CP_SCORE_THREADS, stream,
                              *args);
    });
}
