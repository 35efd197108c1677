/* The own kernel's backward pass: a pass by queries for dq and one by keys for dk and dv, in
 * each of which a block has the gradients of its rows in registers and goes over the other
 * side's rows, which come to shared memory tile by tile. Nobody else writes a block's rows,
 * and each is added to in the order of rows and heads, so the sums are the same in every
 * run.
 *
 * Both passes are one kernel: from own rows a (q or k) and b (dout or v) and the other
 * side's a (k or q) and b (v or dout) it makes weights p = exp(scale a . a - lse) and slopes
 * ds = p (b . b - delta), and adds ds a, and by keys also p b.
 *
 * Cost: 2 (2 D + Dv) operations a score for dq, 4 (D + Dv) for dk and dv. On tensor cores
 * the gradients of k and of v do not fit into registers together where dims are above 128,
 * and have a pass each, 2 (3 D + 2 Dv). */
#include "cuda_api.h"
#include "launch.h"
#include "own.cuh"

namespace
{

/* What a pass makes. Its gradients are those of the own rows a, or b, or both. */
struct of_q {
    static constexpr bool IS_BY_KEYS = false, HAS_A = true, HAS_B = false;
};
struct of_k {
    static constexpr bool IS_BY_KEYS = true, HAS_A = true, HAS_B = false;
};
struct of_v {
    static constexpr bool IS_BY_KEYS = true, HAS_A = false, HAS_B = true;
};
struct of_kv {
    static constexpr bool IS_BY_KEYS = true, HAS_A = true, HAS_B = true;
};

/* How many rows of each lane meet how many others, how many tiles of a and b there is room
 * for, and blocks an SM: as in the forward pass. */
template <class Product, int WIDTH> struct grad_size;
template <class T, int WIDTH> struct grad_size<cp_by_mma<T>, WIDTH> {
    static constexpr int LANE_ROWS = 2;
    static constexpr int OTHERS = WIDTH <= 128 ? 32 : 16;
    static constexpr int STAGES = 2, BLOCKS = WIDTH <= 64 ? 3 : 0;
    static constexpr bool HAS_BOTH = WIDTH <= 128; /* of_kv instead of of_k and of_v */
};
template <int WIDTH> struct grad_size<cp_by_fma, WIDTH> {
    static constexpr int LANE_ROWS = WIDTH <= 64 ? 6 : WIDTH <= 128 ? 4 : 2;
    static constexpr int OTHERS = WIDTH <= 64 ? 32 : WIDTH <= 128 ? 24 : 16;
    static constexpr int STAGES = 1, BLOCKS = 2;
    static constexpr bool HAS_BOTH = true;
};

template <class Product_, int WIDTH_, class Pass>
struct grad_shape : grad_size<Product_, WIDTH_>, Pass {
    using Product = Product_;
    using size = grad_size<Product, WIDTH_>;
    static constexpr int WIDTH = WIDTH_;
    static constexpr int WARP_ROWS = size::LANE_ROWS * 32 / Product::LANES;
    static constexpr int ROWS = WARP_ROWS * CP_TILE_WARPS;
    static constexpr int LANE_OTHERS = size::OTHERS / Product::LANES;
    static constexpr int LANE_COLUMNS = WIDTH / Product::LANES;
    static constexpr int ROW_BYTES = WIDTH * (int)sizeof(typename Product::Number);
    static constexpr int TILE = ROWS * ROW_BYTES, STAGE_TILE = size::OTHERS * ROW_BYTES;
    static constexpr int LINE = size::OTHERS * (int)sizeof(float);
    static constexpr int STAGE = 2 * STAGE_TILE + 2 * LINE; /* a, b, lse, delta */
    static constexpr int ROOM = Product::template ROOM<WARP_ROWS, size::OTHERS>;
    static constexpr int BYTES = 2 * TILE + size::STAGES * STAGE + CP_TILE_WARPS * ROOM;
    static_assert(BYTES <= CP_TILE_MOST_BYTES);
    static_assert(WARP_ROWS % 8 == 0); /* as cp_tile_at repeats itself */
};

/* A place among the other side's rows, and by keys among the query heads. */
struct walk {
    int64_t head, first;
};

/* The other side's tensors of one head. */
struct other_rows {
    cp_rows a, b, lse, delta;
};

template <class Shape>
__device__ other_rows other_rows_of(const cp_grad_args &args, int64_t batch,
                                    int64_t head)
{
    const cp_view &a = Shape::IS_BY_KEYS ? args.q : args.k;
    const cp_view &b = Shape::IS_BY_KEYS ? args.dout : args.v;
    return other_rows{cp_rows_of(a, batch, 0, head), cp_rows_of(b, batch, 0, head),
                      cp_rows_of(args.lse, batch, 0, head),
                      cp_rows_of(args.delta, batch, 0, head)};
}

/* All threads of the block: the rows on from `first`, of `all`, into a stage. */
template <class Shape>
__device__ void load_stage(char *stage, const other_rows &rows, int64_t first,
                           int64_t all, int head_dim, int value_dim)
{
    using Product = typename Shape::Product;
    cp_tile_load<Product, Shape::OTHERS, Shape::WIDTH>(stage, rows.a, first, all,
                                                       head_dim);
    cp_tile_load<Product, Shape::OTHERS, Shape::WIDTH>(stage + Shape::STAGE_TILE,
                                                       rows.b, first, all, value_dim);
    if (Shape::IS_BY_KEYS && threadIdx.x < Shape::OTHERS) {
        char *to = stage + 2 * Shape::STAGE_TILE + threadIdx.x * sizeof(float);
        int64_t row = first + threadIdx.x;
        int64_t from = row < all ? row : 0;
        cp_copy_async<4>(to, rows.lse.data + from * rows.lse.row, row < all);
        cp_copy_async<4>(to + Shape::LINE, rows.delta.data + from * rows.delta.row,
                         row < all);
    }
    cp_commit_copies();
}

/* All threads of the block: rows of a stage that saw no key have no gradient, whatever is
 * in them. They become zero, since a weight of 0 does not take infinity and NaN away. */
template <class Shape> __device__ void drop_rows(char *stage)
{
    constexpr int WORDS = Shape::ROW_BYTES / (int)sizeof(uint4); /* a row */
    static_assert(Shape::OTHERS <= 32);
    const float *lse = (const float *)(stage + 2 * Shape::STAGE_TILE);
    int lane = (int)threadIdx.x % 32;
    unsigned dropped = __ballot_sync(
        0xffffffffu, lane < Shape::OTHERS && lse[lane] == -cp_infinity<float>());
    if (dropped == 0) { /* for all warps alike */
        return;
    }
    for (int i = (int)threadIdx.x; i < 2 * Shape::OTHERS * WORDS;
         i += CP_TILE_THREADS) {
        if (dropped >> (i / WORDS % Shape::OTHERS) & 1) {
            ((uint4 *)stage)[i] = make_uint4(0, 0, 0, 0);
        }
    }
    __syncthreads();
}

/* Scores become weights, products b . b slopes. `lse` and `delta` are those of the lane's
 * own rows, which are no row's business but theirs; or, by keys, lines of the stage. */
template <class Shape>
__device__ void differentiate(float (&weight)[Shape::LANE_ROWS][Shape::LANE_OTHERS],
                              float (&slope)[Shape::LANE_ROWS][Shape::LANE_OTHERS],
                              const float *lse, const float *delta)
{
    using Product = typename Shape::Product;
    using Lanes = cp_lanes<Product::LANES, Product::SCORE_GROUP>;
    CP_CUDA_UNROLL
    for (int j = 0; j < Shape::LANE_OTHERS; j++) {
        CP_CUDA_UNROLL
        for (int i = 0; i < Shape::LANE_ROWS; i++) {
            int at = Shape::IS_BY_KEYS ? Lanes::column(j) : i;
            bool is_dropped = Shape::IS_BY_KEYS && lse[at] == -cp_infinity<float>();
            weight[i][j] = is_dropped ? 0 : Product::exp(weight[i][j] - lse[at]);
            if (Shape::HAS_A) {
                slope[i][j] = is_dropped ? 0 : weight[i][j] * (slope[i][j] - delta[at]);
            }
        }
    }
}

/* to += factor sum, in those of the lane's rows that have a gradient. The warp's first one
 * is `first`. */
template <class Shape>
__device__ void add_rows(const cp_view &to, const cp_spot &at, int64_t first,
                         const float (&sum)[Shape::LANE_ROWS][Shape::LANE_COLUMNS],
                         float factor, const float (&lse)[Shape::LANE_ROWS])
{
    using Product = typename Shape::Product;
    constexpr int GROUP = Product::SUM_GROUP;
    using Lanes = cp_lanes<Product::LANES, GROUP>;
    int dim = (int)to.n[3];
    CP_CUDA_UNROLL
    for (int i = 0; i < Shape::LANE_ROWS; i++) {
        int64_t own = first + Lanes::row(i);
        bool is_wanted = own < to.n[1] && lse[i] != -cp_infinity<float>();
        char *data =
            cp_address(to, at.batch, own, at.head) + Lanes::column(0) * to.stride[3];
        CP_CUDA_UNROLL
        for (int j = 0; j < Shape::LANE_COLUMNS;
             j += GROUP, data += Lanes::SPAN * to.stride[3]) {
            CP_CUDA_UNROLL
            for (int k = 0; k < GROUP; k++) {
                if (is_wanted && Lanes::column(j) + k < dim) {
                    *(float *)(data + k * to.stride[3]) += factor * sum[i][j + k];
                }
            }
        }
    }
}

template <class Shape>
__global__ void __launch_bounds__(CP_TILE_THREADS, Shape::BLOCKS)
    own_grad_kernel(cp_grad_args args)
{
    using Product = typename Shape::Product;
    using Lanes = cp_lanes<Product::LANES, 1>;
    constexpr bool IS_BY_KEYS = Shape::IS_BY_KEYS;
    constexpr int WIDTH = Shape::WIDTH, ROWS = Shape::ROWS, OTHERS = Shape::OTHERS;
    constexpr int LANE_ROWS = Shape::LANE_ROWS;
    const cp_view &own_a = IS_BY_KEYS ? args.k : args.q;
    const cp_view &own_b = IS_BY_KEYS ? args.v : args.dout;
    int64_t owns = own_a.n[1], others = IS_BY_KEYS ? args.q.n[1] : args.k.n[1];
    cp_spot at = cp_spot_of_block(own_a.n[2], owns, ROWS);
    /* What the block meets. */
    cp_head_span heads = {at.head, at.head + 1};
    int64_t kv_head = at.head, begin = 0, end = others;
    if constexpr (IS_BY_KEYS) {
        heads = cp_query_heads(args.place, args.q.n[2], at.head);
        begin = cp_first_query(args.place, at.row);
    } else {
        kv_head = cp_kv_head(args.place, at.head);
        int64_t last = at.row + ROWS < owns ? at.row + ROWS : owns;
        end = cp_visible(args.place, last - 1, others);
    }
    if (begin >= end || heads.first >= heads.end) {
        return;
    }
    int head_dim = (int)args.q.n[3], value_dim = (int)args.v.n[3];
    int warp = (int)threadIdx.x / 32;
    int64_t warp_first = at.row + warp * Shape::WARP_ROWS;
    char *a_tile = cp_cuda_shared(), *b_tile = a_tile + Shape::TILE;
    char *own = a_tile + warp * Shape::WARP_ROWS * Shape::ROW_BYTES;
    char *here = b_tile + Shape::TILE;
    char *next = here + (Shape::STAGES - 1) * Shape::STAGE;
    char *room = here + Shape::STAGES * Shape::STAGE + warp * Shape::ROOM;
    cp_tile_load<Product, ROWS, WIDTH>(a_tile, cp_rows_of(own_a, at.batch, 0, at.head),
                                       at.row, owns, head_dim);
    if (Shape::HAS_A) {
        cp_tile_load<Product, ROWS, WIDTH>(
            b_tile, cp_rows_of(own_b, at.batch, 0, at.head), at.row, owns, value_dim);
    }
    float lse[LANE_ROWS] = {}, delta[LANE_ROWS] = {}; /* of queries; keys have none */
    for (int i = 0; i < LANE_ROWS && !IS_BY_KEYS; i++) {
        int64_t row = warp_first + Lanes::row(i);
        if (row < owns) {
            lse[i] = cp_load<float>(cp_address(args.lse, at.batch, row, at.head));
            delta[i] = cp_load<float>(cp_address(args.delta, at.batch, row, at.head));
        }
    }
    float grad_a[LANE_ROWS][Shape::LANE_COLUMNS],
        grad_b[LANE_ROWS][Shape::LANE_COLUMNS];
    cp_clear(grad_a);
    cp_clear(grad_b);
    /* With two stages the rows at `to_come` are on their way while those at `now` are
     * computed with; a single one is free when all are done with it. */
    walk to_come = {heads.first, begin}, now = {0, -1};
    auto fetch = [&] {
        if (to_come.head < heads.end) {
            load_stage<Shape>(next,
                              other_rows_of<Shape>(args, at.batch,
                                                   IS_BY_KEYS ? to_come.head : kv_head),
                              to_come.first, end, head_dim, value_dim);
        }
    };
    while (to_come.head < heads.end || now.first >= 0) {
        cp_wait_for_copies<0>();
        __syncthreads(); /* behind it all have their share, and nobody reads `next` */
        if constexpr (Shape::STAGES > 1) {
            fetch();
        }
        if (IS_BY_KEYS && now.first >= 0) {
            drop_rows<Shape>(here);
        }
        if (now.first >= 0 && !cp_tile_is_hidden<IS_BY_KEYS, Shape::WARP_ROWS, OTHERS>(
                                  args.place, warp_first, owns, end, now.first)) {
            const char *b = here + Shape::STAGE_TILE;
            const float *line = (const float *)(b + Shape::STAGE_TILE);
            float weight[LANE_ROWS][Shape::LANE_OTHERS];
            float slope[LANE_ROWS][Shape::LANE_OTHERS];
            Product::template dots<WIDTH>(weight, own, here, head_dim);
            if (Shape::HAS_A) {
                Product::template dots<WIDTH>(slope, own + Shape::TILE, b, value_dim);
            }
            cp_mask_plane mask = cp_mask_of(args.mask, at.batch, now.head);
            CP_CUDA_UNROLL
            for (int i = 0; i < LANE_ROWS; i++) {
                cp_tile_scores<Product, IS_BY_KEYS>(
                    weight[i], args.place, mask, args.scale, warp_first + Lanes::row(i),
                    owns, end, now.first);
            }
            differentiate<Shape>(weight, slope, IS_BY_KEYS ? line : lse,
                                 IS_BY_KEYS ? line + OTHERS : delta);
            if (Shape::HAS_B) {
                Product::template add<WIDTH>(grad_b, weight, b, value_dim, room);
            }
            if (Shape::HAS_A) {
                Product::template add<WIDTH>(grad_a, slope, here, head_dim, room);
            }
        }
        if constexpr (Shape::STAGES == 1) {
            __syncthreads();
            fetch();
        }
        char *done = here;
        here = next;
        next = done;
        now = to_come.head < heads.end ? to_come : walk{0, -1};
        to_come.first += OTHERS;
        if (to_come.first >= end) {
            to_come = {to_come.head + 1, begin};
        }
    }
    if (Shape::HAS_A) {
        add_rows<Shape>(IS_BY_KEYS ? args.dk : args.dq, at, warp_first, grad_a,
                        (float)args.scale, lse);
    }
    if (Shape::HAS_B) {
        add_rows<Shape>(args.dv, at, warp_first, grad_b, 1, lse);
    }
}

template <class Product, int WIDTH, class Pass>
enum cp_code launch(const cp_grad_args &args, struct cp_stream *stream)
{
    using Shape = grad_shape<Product, WIDTH, Pass>;
    const cp_view &own = Shape::IS_BY_KEYS ? args.k : args.q;
    int64_t blocks = cp_spot_blocks(own.n[0], own.n[2], own.n[1], Shape::ROWS);
    return cp_cuda_launch_shared(own_grad_kernel<Shape>,
                                 {blocks, CP_TILE_THREADS, Shape::BYTES}, stream, args);
}

} // namespace

enum cp_code cp_cuda_own_grad(const struct cp_grad_args *args, struct cp_stream *stream)
{
    return cp_with_tile(args->q.dtype, args->q.n[3], args->v.n[3],
                        [&](auto product, auto width) {
                            using Product = decltype(product);
                            constexpr int WIDTH = decltype(width)::WIDTH;
                            CP_TRY((launch<Product, WIDTH, of_q>(*args, stream)));
                            if constexpr (grad_size<Product, WIDTH>::HAS_BOTH) {
                                return launch<Product, WIDTH, of_kv>(*args, stream);
                            } else {
                                CP_TRY((launch<Product, WIDTH, of_k>(*args, stream)));
                                return launch<Product, WIDTH, of_v>(*args, stream);
                            }
                        });
}
