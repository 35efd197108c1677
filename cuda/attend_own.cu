/* The own kernel's forward pass, on tensor cores: a block has rows of one query head and
 * goes over the keys that they see, which two stages of shared memory take in turn.
 *
 * The outputs of a block's rows lie in registers until they are folded into the state.
 * Cost: 2 (D + Dv) operations a score, on tensor cores. */
#include "cuda_api.h"
#include "launch.h"
#include "tile.cuh"

namespace
{

/* How many rows meet how many keys, by width: the most that neither registers nor shared
 * memory overflow with. */
template <int WIDTH_> struct attend_shape {
    static constexpr int WIDTH = WIDTH_;
    static constexpr int TILES = WIDTH <= 128 ? 2 : 1; /* a warp */
    static constexpr int ROWS = 16 * TILES * CP_TILE_WARPS;
    static constexpr int KEYS = WIDTH <= 64 ? 64 : 32;
    static constexpr int STAGE = KEYS * WIDTH * 2; /* bytes, of k and of v */
    static constexpr int BYTES = ROWS * WIDTH * 2 + 4 * STAGE;
    static_assert(BYTES <= CP_TILE_MOST_BYTES);
};

/* What a lane has of its warp's rows: outputs, and of each row the maximum and this lane's
 * part of the sum. */
template <class Shape> struct rows_state {
    float out[Shape::TILES][Shape::WIDTH / 8][4];
    float max[Shape::TILES][2], sum[Shape::TILES][2];
};

template <class Shape> __device__ void begin(rows_state<Shape> &rows)
{
    CP_CUDA_UNROLL
    for (int m = 0; m < Shape::TILES; m++) {
        CP_CUDA_UNROLL
        for (int n = 0; n < Shape::WIDTH / 8; n++) {
            CP_CUDA_UNROLL
            for (int i = 0; i < 4; i++) {
                rows.out[m][n][i] = 0;
            }
        }
        rows.max[m][0] = rows.max[m][1] = -cp_infinity<float>();
        rows.sum[m][0] = rows.sum[m][1] = 0;
    }
}

/* Folds a row into its state in memory, whose maximum and sum were as given. */
template <class Shape>
__device__ void merge(const rows_state<Shape> &rows, int m, int half, float *to,
                      int dim, float old_max, float old_sum)
{
    int column = cp_lane_of_thread().column;
    float max = rows.max[m][half];
    bool is_empty = old_sum == 0; /* what lies there then counts for nothing */
    float top = is_empty ? max : fmaxf(old_max, max);
    float base = top == -cp_infinity<float>() ? 0 : top;
    float keep = is_empty ? 0 : cp_tile_exp(old_max - base);
    float weight = cp_tile_exp(max - base);
    CP_CUDA_UNROLL
    for (int i = 0; i < Shape::WIDTH / 4; i++) {
        int at = column + i / 2 * 8 + i % 2;
        if (at < dim) {
            float add = weight * rows.out[m][i / 2][2 * half + i % 2];
            to[at] = is_empty ? add : to[at] * keep + add;
        }
    }
    if (column == 0) {
        to[dim] = top;
        to[dim + 1] = old_sum * keep + weight * rows.sum[m][half];
    }
}

/* The warp's rows, which begin at `first`, are folded into the state of their head. */
template <class Shape>
__device__ void end(rows_state<Shape> &rows, const cp_view &state, float *panel,
                    int64_t first)
{
    int dim = (int)state.n[3];
    CP_CUDA_UNROLL
    for (int i = 0; i < 2 * Shape::TILES; i++) {
        int64_t row = first + 8 * i + cp_lane_of_thread().row;
        float *to = panel + row * (dim + 2);
        bool is_row = row < state.n[1];
        float old_max = is_row ? to[dim] : 0, old_sum = is_row ? to[dim + 1] : 0;
        float *sum = &rows.sum[i / 2][i % 2];
        *sum += __shfl_xor_sync(0xffffffffu, *sum, 1);
        *sum += __shfl_xor_sync(0xffffffffu, *sum, 2);
        __syncwarp(); /* all lanes have read maximum and sum */
        if (is_row) {
            merge(rows, i / 2, i % 2, to, dim, old_max, old_sum);
        }
    }
}

/* Turns the scores of 16 rows into weights, and moves maximum, sum and output on. */
template <class Shape>
__device__ void weigh(rows_state<Shape> &rows, int m,
                      float (&score)[Shape::KEYS / 8][4])
{
    CP_CUDA_UNROLL
    for (int half = 0; half < 2; half++) {
        float max = rows.max[m][half], sum = 0;
        CP_CUDA_UNROLL
        for (int n = 0; n < Shape::KEYS / 8; n++) {
            max = fmaxf(max, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
        }
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
        /* A row that has seen no key has no maximum to subtract; all its scores are -inf
         * and weigh 0. */
        float base = max == -cp_infinity<float>() ? 0 : max;
        float shrink = cp_tile_exp(rows.max[m][half] - base);
        CP_CUDA_UNROLL
        for (int n = 0; n < Shape::KEYS / 8; n++) {
            CP_CUDA_UNROLL
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                score[n][i] = cp_tile_exp(score[n][i] - base);
                sum += score[n][i];
            }
        }
        rows.max[m][half] = max;
        rows.sum[m][half] = rows.sum[m][half] * shrink + sum;
        CP_CUDA_UNROLL
        for (int n = 0; n < Shape::WIDTH / 8; n++) {
            rows.out[m][n][2 * half] *= shrink;
            rows.out[m][n][2 * half + 1] *= shrink;
        }
    }
}

template <class T, class Shape>
__global__ void __launch_bounds__(CP_TILE_THREADS)
    own_attend_kernel(cp_attend_args args)
{
    constexpr int WIDTH = Shape::WIDTH, ROWS = Shape::ROWS, KEYS = Shape::KEYS;
    cp_spot at = cp_spot_of_block(args.q.n[2], args.q.n[1], ROWS);
    int64_t all = args.q.n[1], last = at.row + ROWS < all ? at.row + ROWS : all;
    int64_t keys = cp_visible(args.place, last - 1, args.k.n[1]);
    if (keys == 0) {
        return;
    }
    int head_dim = (int)args.q.n[3], value_dim = (int)args.v.n[3];
    int64_t kv_head = cp_kv_head(args.place, at.head);
    cp_rows q = cp_rows_of(args.q, at.batch, 0, at.head);
    cp_rows k = cp_rows_of_panel<T>(args.k, at.batch, kv_head, head_dim);
    cp_rows v = cp_rows_of_panel<T>(args.v, at.batch, kv_head, value_dim);
    cp_mask_plane mask = cp_mask_of(args.mask, at.batch, at.head);
    char *q_tile = cp_cuda_shared(), *stages = q_tile + ROWS * WIDTH * 2;
    int warp_row = (int)threadIdx.x / 32 * 16 * Shape::TILES;
    int64_t warp_first = at.row + warp_row;
    rows_state<Shape> rows;
    cp_tile_load<ROWS, WIDTH>(q_tile, q, at.row, all, head_dim);
    float *panel = (float *)(args.state.data + at.batch * args.state.stride[0] +
                             at.head * args.state.stride[2]);
    begin(rows);
    /* The keys on from `first` are on their way while those before are computed with. */
    char *here = stages, *next = stages + 2 * Shape::STAGE;
    for (int64_t first = 0; first - KEYS < keys; first += KEYS) {
        cp_wait_for_copies<0>();
        __syncthreads(); /* behind it all have their share, and nobody reads `next` */
        if (first < keys) {
            cp_tile_load<KEYS, WIDTH>(next, k, first, keys, head_dim);
            cp_tile_load<KEYS, WIDTH>(next + Shape::STAGE, v, first, keys, value_dim);
            cp_commit_copies();
        }
        int64_t key = first - KEYS;
        if (key >= 0 && !cp_tile_is_hidden<false, Shape::TILES, KEYS / 8>(
                            args.place, warp_first, all, keys, key)) {
            float score[Shape::TILES][KEYS / 8][4];
            cp_tile_dots<T, WIDTH>(score, q_tile, warp_row, here, head_dim);
            CP_CUDA_UNROLL
            for (int m = 0; m < Shape::TILES; m++) {
                int64_t own = warp_first + 16 * m + cp_lane_of_thread().row;
                cp_tile_scores<T, false>(score[m], args.place, mask, args.scale, own,
                                         all, keys, key);
                weigh(rows, m, score[m]);
            }
            cp_tile_add<T, WIDTH>(rows.out, score, here + Shape::STAGE, value_dim);
        }
        char *done = here;
        here = next;
        next = done;
    }
    end(rows, args.state, panel, warp_first);
}

} // namespace

enum cp_code cp_cuda_own_attend(const struct cp_attend_args *args,
                                struct cp_stream *stream)
{
    return cp_with_tile(
        args->q.dtype, args->q.n[3], args->v.n[3], [&](auto type, auto width) {
            using Shape = attend_shape<decltype(width)::WIDTH>;
            int64_t blocks =
                cp_spot_blocks(args->q.n[0], args->q.n[2], args->q.n[1], Shape::ROWS);
            return cp_cuda_launch_shared(own_attend_kernel<decltype(type), Shape>,
                                         {blocks, CP_TILE_THREADS, Shape::BYTES},
                                         stream, *args);
        });
}
