/* The own kernel's forward pass: a block has rows of one query head and goes over the keys
 * that they see, which come to shared memory tile by tile.
 *
 * The outputs of a block's rows lie in registers until they are folded into the state, or, of
 * the last keys, with it into the result.
 * Cost: 2 (D + Dv) operations a score, on tensor cores in bfloat16 and float16, by fused
 * multiply-adds in float32. */
#include "cuda_api.h"
#include "launch.h"
#include "own.cuh"

namespace
{

/* How many rows of each lane meet how many keys, and how many tiles of k and v there is room
 * for: the most that neither registers nor shared memory overflow with. Registers are bound
 * by how many blocks an SM is to have at a time; 0: the compiler decides. */
template <class Product, int WIDTH> struct attend_size;
template <class T, int WIDTH> struct attend_size<cp_by_mma<T>, WIDTH> {
    static constexpr int LANE_ROWS = WIDTH <= 128 ? 4 : 2;
    static constexpr int KEYS = WIDTH <= 64 ? 64 : 32;
    static constexpr int STAGES = 2, BLOCKS = 0;
};
/* A tile takes so many multiply-adds that waiting for the next one counts less than the
 * reads of shared memory that a larger one saves. */
template <int WIDTH> struct attend_size<cp_by_fma, WIDTH> {
    static constexpr int LANE_ROWS = WIDTH <= 128 ? 6 : 2;
    static constexpr int KEYS = WIDTH <= 64 ? 64 : WIDTH <= 128 ? 32 : 24;
    static constexpr int STAGES = 1, BLOCKS = 2;
};

template <class Product_, int WIDTH_>
struct attend_shape : attend_size<Product_, WIDTH_> {
    using Product = Product_;
    using size = attend_size<Product, WIDTH_>;
    static constexpr int WIDTH = WIDTH_;
    static constexpr int WARP_ROWS = size::LANE_ROWS * 32 / Product::LANES;
    static constexpr int ROWS = WARP_ROWS * CP_TILE_WARPS;
    static constexpr int LANE_KEYS = size::KEYS / Product::LANES;
    static constexpr int LANE_COLUMNS = WIDTH / Product::LANES;
    static constexpr int ROW_BYTES = WIDTH * (int)sizeof(typename Product::Number);
    static constexpr int TILE = size::KEYS * ROW_BYTES; /* of k and of v */
    static constexpr int STAGE = 2 * TILE;
    static constexpr int ROOM = Product::template ROOM<WARP_ROWS, size::KEYS>;
    static constexpr int BYTES =
        ROWS * ROW_BYTES + size::STAGES * STAGE + CP_TILE_WARPS * ROOM;
    static_assert(BYTES <= CP_TILE_MOST_BYTES);
    static_assert(WARP_ROWS % 8 == 0); /* as cp_tile_at repeats itself */
};

/* What a lane has of its warp's rows: outputs, and of each row the maximum and this lane's
 * part of the sum. */
template <class Shape> struct rows_state {
    float out[Shape::LANE_ROWS][Shape::LANE_COLUMNS];
    float max[Shape::LANE_ROWS], sum[Shape::LANE_ROWS];
};

template <class Shape> __device__ void begin(rows_state<Shape> &rows)
{
    cp_clear(rows.out);
    CP_CUDA_UNROLL
    for (int i = 0; i < Shape::LANE_ROWS; i++) {
        rows.max[i] = -cp_infinity<float>();
        rows.sum[i] = 0;
    }
}

/* Folds row i of the lane into its state in memory, whose maximum and sum were as given, or
 * both into the result. */
template <class Shape>
__device__ void merge(const rows_state<Shape> &rows, int i, const cp_attend_args &args,
                      const cp_spot &at, float *to, int dim, float old_max,
                      float old_sum)
{
    using Product = typename Shape::Product;
    using Number = typename Product::Number;
    using Lanes = cp_lanes<Product::LANES, Product::SUM_GROUP>;
    float max = rows.max[i];
    bool is_empty = old_sum == 0; /* what lies there then counts for nothing */
    float top = is_empty ? max : fmaxf(old_max, max);
    float base = top == -cp_infinity<float>() ? 0 : top;
    float keep = is_empty ? 0 : Product::exp(old_max - base);
    float weight = Product::exp(max - base);
    float total = old_sum * keep + weight * rows.sum[i];
    bool is_last = args.out.data != nullptr;
    char *out = is_last ? cp_address(args.out, at.batch, at.row, at.head) : nullptr;
    CP_CUDA_UNROLL
    for (int j = 0; j < Shape::LANE_COLUMNS; j++) {
        int column = Lanes::column(j);
        if (column < dim) {
            float add = weight * rows.out[i][j];
            float value = is_empty ? add : to[column] * keep + add;
            if (is_last) {
                cp_narrow(cp_result(value, total),
                          (Number *)(out + column * args.out.stride[3]));
            } else {
                to[column] = value;
            }
        }
    }
    if (Lanes::column(0) != 0) {
        return;
    }
    if (!is_last) {
        to[dim] = top;
        to[dim + 1] = total;
    } else if (args.lse.data != nullptr) {
        *(float *)cp_address(args.lse, at.batch, at.row, at.head) =
            cp_result_lse(top, total);
    }
}

/* `number` of all lanes that share a row, folded by `fold`. */
template <class Product, class Fold>
__device__ float over_lanes(float number, const Fold &fold)
{
    CP_CUDA_UNROLL
    for (int lanes = 1; lanes < Product::LANES; lanes *= 2) {
        number = fold(number, __shfl_xor_sync(0xffffffffu, number, lanes));
    }
    return number;
}

/* The warp's rows, the first of which is given, end: in the state or in the result. Where those
 * lie is found here, behind the loop over keys: kept over it, it would spill. */
template <class Shape>
__device__ void end(rows_state<Shape> &rows, const cp_attend_args &args,
                    const cp_spot &first)
{
    using Product = typename Shape::Product;
    int dim = (int)args.state.n[3];
    float *panel = (float *)(args.state.data + first.batch * args.state.stride[0] +
                             first.head * args.state.stride[2]);
    CP_CUDA_UNROLL
    for (int i = 0; i < Shape::LANE_ROWS; i++) {
        cp_spot at = first;
        at.row += cp_lanes<Product::LANES, 1>::row(i);
        float *to = panel + at.row * (dim + 2);
        bool is_row = at.row < args.q.n[1], is_old = is_row && !args.is_first;
        float old_max = is_old ? to[dim] : 0, old_sum = is_old ? to[dim + 1] : 0;
        rows.sum[i] =
            over_lanes<Product>(rows.sum[i], [](float a, float b) { return a + b; });
        __syncwarp(); /* all lanes have read maximum and sum */
        if (is_row) {
            merge(rows, i, args, at, to, dim, old_max, old_sum);
        }
    }
}

/* Turns the scores of row i into weights, and moves maximum, sum and output on. */
template <class Shape>
__device__ void weigh(rows_state<Shape> &rows, int i, float (&score)[Shape::LANE_KEYS])
{
    using Product = typename Shape::Product;
    float max = rows.max[i], sum = 0;
    CP_CUDA_UNROLL
    for (int j = 0; j < Shape::LANE_KEYS; j++) {
        max = fmaxf(max, score[j]);
    }
    max = over_lanes<Product>(max, [](float a, float b) { return fmaxf(a, b); });
    /* A row that has seen no key has no maximum to subtract; all its scores are -inf and
     * weigh 0. */
    float base = max == -cp_infinity<float>() ? 0 : max;
    float shrink = Product::exp(rows.max[i] - base);
    CP_CUDA_UNROLL
    for (int j = 0; j < Shape::LANE_KEYS; j++) {
        score[j] = Product::exp(score[j] - base);
        sum += score[j];
    }
    rows.max[i] = max;
    rows.sum[i] = rows.sum[i] * shrink + sum;
    CP_CUDA_UNROLL
    for (int j = 0; j < Shape::LANE_COLUMNS; j++) {
        rows.out[i][j] *= shrink;
    }
}

template <class Shape>
__global__ void __launch_bounds__(CP_TILE_THREADS, Shape::BLOCKS)
    own_attend_kernel(cp_attend_args args)
{
    using Product = typename Shape::Product;
    constexpr int WIDTH = Shape::WIDTH, ROWS = Shape::ROWS, KEYS = Shape::KEYS;
    cp_spot at = cp_spot_of_block(args.q.n[2], args.q.n[1], ROWS);
    int64_t all = args.q.n[1], last = at.row + ROWS < all ? at.row + ROWS : all;
    int64_t keys = cp_visible(args.place, last - 1, args.k.n[1]);
    if (keys == 0 && !cp_has_end(args)) {
        return;
    }
    int head_dim = (int)args.q.n[3], value_dim = (int)args.v.n[3];
    int64_t kv_head = cp_kv_head(args.place, at.head);
    cp_rows q = cp_rows_of(args.q, at.batch, 0, at.head);
    cp_rows k = cp_rows_of(args.k, at.batch, 0, kv_head);
    cp_rows v = cp_rows_of(args.v, at.batch, 0, kv_head);
    cp_mask_plane mask = cp_mask_of(args.mask, at.batch, at.head);
    int warp = (int)threadIdx.x / 32;
    char *q_tile = cp_cuda_shared(), *stages = q_tile + ROWS * Shape::ROW_BYTES;
    char *own = q_tile + warp * Shape::WARP_ROWS * Shape::ROW_BYTES;
    char *room = stages + Shape::STAGES * Shape::STAGE + warp * Shape::ROOM;
    int64_t warp_first = at.row + warp * Shape::WARP_ROWS;
    rows_state<Shape> rows;
    cp_tile_load<Product, ROWS, WIDTH>(q_tile, q, at.row, all, head_dim);
    begin(rows);
    /* With two stages the keys on from `first` are on their way while those before are
     * computed with; a single one is free when all are done with it. */
    char *here = stages, *next = stages + (Shape::STAGES - 1) * Shape::STAGE;
    auto fetch = [&](int64_t first) {
        if (first < keys) {
            cp_tile_load<Product, KEYS, WIDTH>(next, k, first, keys, head_dim);
            cp_tile_load<Product, KEYS, WIDTH>(next + Shape::TILE, v, first, keys,
                                               value_dim);
            cp_commit_copies();
        }
    };
    for (int64_t first = 0; first - KEYS < keys; first += KEYS) {
        cp_wait_for_copies<0>();
        __syncthreads(); /* behind it all have their share, and nobody reads `next` */
        if constexpr (Shape::STAGES > 1) {
            fetch(first);
        }
        int64_t key = first - KEYS;
        if (key >= 0 && !cp_tile_is_hidden<false, Shape::WARP_ROWS, KEYS>(
                            args.place, warp_first, all, keys, key)) {
            float score[Shape::LANE_ROWS][Shape::LANE_KEYS];
            Product::template dots<WIDTH>(score, own, here, head_dim);
            CP_CUDA_UNROLL
            for (int i = 0; i < Shape::LANE_ROWS; i++) {
                int64_t row = warp_first + cp_lanes<Product::LANES, 1>::row(i);
                cp_tile_scores<Product, false>(score[i], args.place, mask, args.scale,
                                               row, all, keys, key);
                weigh(rows, i, score[i]);
            }
            Product::template add<WIDTH>(rows.out, score, here + Shape::TILE, value_dim,
                                         room);
        }
        if constexpr (Shape::STAGES == 1) {
            __syncthreads();
            fetch(first);
        }
        char *done = here;
        here = next;
        next = done;
    }
    end(rows, args, {at.batch, at.head, warp_first});
}

} // namespace

enum cp_code cp_cuda_own_attend(const struct cp_attend_args *args,
                                struct cp_stream *stream)
{
    return cp_with_tile(
        args->q.dtype, args->q.n[3], args->v.n[3], [&](auto product, auto width) {
            using Shape = attend_shape<decltype(product), decltype(width)::WIDTH>;
            int64_t blocks =
                cp_spot_blocks(args->q.n[0], args->q.n[2], args->q.n[1], Shape::ROWS);
            return cp_cuda_launch_shared(own_attend_kernel<Shape>,
                                         {blocks, CP_TILE_THREADS, Shape::BYTES},
                                         stream, *args);
        });
}
