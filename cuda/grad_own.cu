/* The own kernel's backward pass, on tensor cores: a pass by queries for dq and one by keys
 * for dk and dv, in each of which a block has the gradients of its rows in registers and
 * goes over the other side's rows, which two stages of shared memory take in turn. Nobody
 * else writes a block's rows, and each is added to in the order of rows and heads, so the
 * sums are the same in every run.
 *
 * Both passes are one kernel: from own rows a (q or k) and b (dout or v) and the other
 * side's a (k or q) and b (v or dout) it makes weights p = exp(scale a . a - lse) and slopes
 * ds = p (b . b - delta), and adds ds a, and by keys also p b.
 *
 * Cost: 2 (2 D + Dv) operations a score for dq, 4 (D + Dv) for dk and dv. Where dims are
 * above 128 the gradients of k and of v do not fit into registers together and have a pass
 * each, 2 (3 D + 2 Dv). */
#include "cuda_api.h"
#include "launch.h"
#include "tile.cuh"

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

/* How many rows meet how many others, by width: the most that neither registers nor shared
 * memory overflow with. */
template <int WIDTH_, class Pass> struct grad_shape : Pass {
    static constexpr int WIDTH = WIDTH_;
    static constexpr int ROWS = 16 * CP_TILE_WARPS;
    static constexpr int OTHERS = WIDTH <= 128 ? 32 : 16;
    static constexpr int TILE = ROWS * WIDTH * 2, STAGE_TILE = OTHERS * WIDTH * 2;
    static constexpr int LINE = OTHERS * (int)sizeof(float);
    static constexpr int STAGE = 2 * STAGE_TILE + 2 * LINE; /* a, b, lse, delta */
    static constexpr int BYTES = 2 * TILE + 2 * STAGE;
    static_assert(BYTES <= CP_TILE_MOST_BYTES);
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
    cp_tile_load<Shape::OTHERS, Shape::WIDTH>(stage, rows.a, first, all, head_dim);
    cp_tile_load<Shape::OTHERS, Shape::WIDTH>(stage + Shape::STAGE_TILE, rows.b, first,
                                              all, value_dim);
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
    constexpr int WORDS = Shape::WIDTH * 2 / (int)sizeof(uint4); /* a row */
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
 * two own rows, which are no row's business but theirs; or, by keys, lines of the stage. */
template <class Shape>
__device__ void differentiate(float (&weight)[Shape::OTHERS / 8][4],
                              float (&slope)[Shape::OTHERS / 8][4], const float *lse,
                              const float *delta)
{
    int column = cp_lane_of_thread().column;
    CP_CUDA_UNROLL
    for (int n = 0; n < Shape::OTHERS / 8; n++) {
        CP_CUDA_UNROLL
        for (int i = 0; i < 4; i++) {
            int at = Shape::IS_BY_KEYS ? 8 * n + column + i % 2 : i / 2;
            bool is_dropped = Shape::IS_BY_KEYS && lse[at] == -cp_infinity<float>();
            weight[n][i] = is_dropped ? 0 : cp_tile_exp(weight[n][i] - lse[at]);
            if (Shape::HAS_A) {
                slope[n][i] = is_dropped ? 0 : weight[n][i] * (slope[n][i] - delta[at]);
            }
        }
    }
}

template <class Shape> __device__ void clear(float (&sum)[1][Shape::WIDTH / 8][4])
{
    CP_CUDA_UNROLL
    for (int n = 0; n < Shape::WIDTH / 8; n++) {
        sum[0][n][0] = sum[0][n][1] = sum[0][n][2] = sum[0][n][3] = 0;
    }
}

/* to += factor sum, in those of the lane's two rows that have a gradient. The first one is
 * `row`. */
template <class Shape>
__device__ void add_rows(const cp_view &to, const cp_spot &at, int64_t row,
                         const float (&sum)[1][Shape::WIDTH / 8][4], float factor,
                         const float (&lse)[2])
{
    int column = cp_lane_of_thread().column, dim = (int)to.n[3];
    CP_CUDA_UNROLL
    for (int half = 0; half < 2; half++) {
        int64_t own = row + 8 * half;
        bool is_wanted = own < to.n[1] && lse[half] != -cp_infinity<float>();
        char *data = cp_address(to, at.batch, own, at.head) + column * to.stride[3];
        CP_CUDA_UNROLL
        for (int n = 0; n < Shape::WIDTH / 8; n++, data += 8 * to.stride[3]) {
            CP_CUDA_UNROLL
            for (int i = 0; i < 2; i++) {
                if (is_wanted && 8 * n + column + i < dim) {
                    *(float *)(data + i * to.stride[3]) +=
                        factor * sum[0][n][2 * half + i];
                }
            }
        }
    }
}

template <class T, class Shape>
__global__ void __launch_bounds__(CP_TILE_THREADS) own_grad_kernel(cp_grad_args args)
{
    constexpr bool IS_BY_KEYS = Shape::IS_BY_KEYS;
    constexpr int WIDTH = Shape::WIDTH, ROWS = Shape::ROWS, OTHERS = Shape::OTHERS;
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
    int warp_row = (int)threadIdx.x / 32 * 16;
    int64_t warp_first = at.row + warp_row;
    int64_t own = warp_first + cp_lane_of_thread().row;
    char *a_tile = cp_cuda_shared(), *b_tile = a_tile + Shape::TILE;
    char *here = b_tile + Shape::TILE, *next = here + Shape::STAGE;
    cp_tile_load<ROWS, WIDTH>(a_tile, cp_rows_of(own_a, at.batch, 0, at.head), at.row,
                              owns, head_dim);
    if (Shape::HAS_A) {
        cp_tile_load<ROWS, WIDTH>(b_tile, cp_rows_of(own_b, at.batch, 0, at.head),
                                  at.row, owns, value_dim);
    }
    float lse[2] = {0, 0}, delta[2] = {0, 0}; /* of own queries; keys have none */
    for (int half = 0; half < 2 && !IS_BY_KEYS; half++) {
        if (own + 8 * half < owns) {
            lse[half] =
                cp_load<float>(cp_address(args.lse, at.batch, own + 8 * half, at.head));
            delta[half] = cp_load<float>(
                cp_address(args.delta, at.batch, own + 8 * half, at.head));
        }
    }
    float grad_a[1][WIDTH / 8][4], grad_b[1][WIDTH / 8][4];
    clear<Shape>(grad_a);
    clear<Shape>(grad_b);
    /* The rows at `to_come` are on their way while those at `now` are computed with. */
    walk to_come = {heads.first, begin}, now = {0, -1};
    while (to_come.head < heads.end || now.first >= 0) {
        cp_wait_for_copies<0>();
        __syncthreads(); /* behind it all have their share, and nobody reads `next` */
        if (to_come.head < heads.end) {
            load_stage<Shape>(next,
                              other_rows_of<Shape>(args, at.batch,
                                                   IS_BY_KEYS ? to_come.head : kv_head),
                              to_come.first, end, head_dim, value_dim);
        }
        if (IS_BY_KEYS && now.first >= 0) {
            drop_rows<Shape>(here);
        }
        if (now.first >= 0 && !cp_tile_is_hidden<IS_BY_KEYS, 1, OTHERS / 8>(
                                  args.place, warp_first, owns, end, now.first)) {
            const char *b = here + Shape::STAGE_TILE;
            const float *line = (const float *)(b + Shape::STAGE_TILE);
            float weight[1][OTHERS / 8][4], slope[1][OTHERS / 8][4];
            cp_tile_dots<T, WIDTH>(weight, a_tile, warp_row, here, head_dim);
            cp_tile_scores<T, IS_BY_KEYS>(weight[0], args.place,
                                          cp_mask_of(args.mask, at.batch, now.head),
                                          args.scale, own, owns, end, now.first);
            if (Shape::HAS_A) {
                cp_tile_dots<T, WIDTH>(slope, b_tile, warp_row, b, value_dim);
            }
            differentiate<Shape>(weight[0], slope[0], IS_BY_KEYS ? line : lse,
                                 IS_BY_KEYS ? line + OTHERS : delta);
            if (Shape::HAS_B) {
                cp_tile_add<T, WIDTH>(grad_b, weight, b, value_dim);
            }
            if (Shape::HAS_A) {
                cp_tile_add<T, WIDTH>(grad_a, slope, here, head_dim);
            }
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
        add_rows<Shape>(IS_BY_KEYS ? args.dk : args.dq, at, own, grad_a,
                        (float)args.scale, lse);
    }
    if (Shape::HAS_B) {
        add_rows<Shape>(args.dv, at, own, grad_b, 1, lse);
    }
}

template <class T, int WIDTH, class Pass>
enum cp_code launch(const cp_grad_args &args, struct cp_stream *stream)
{
    using Shape = grad_shape<WIDTH, Pass>;
    const cp_view &own = Shape::IS_BY_KEYS ? args.k : args.q;
    int64_t blocks = cp_spot_blocks(own.n[0], own.n[2], own.n[1], Shape::ROWS);
    return cp_cuda_launch_shared(own_grad_kernel<T, Shape>,
                                 {blocks, CP_TILE_THREADS, Shape::BYTES}, stream, args);
}

} // namespace

enum cp_code cp_cuda_own_grad(const struct cp_grad_args *args, struct cp_stream *stream)
{
    return cp_with_tile(args->q.dtype, args->q.n[3], args->v.n[3],
                        [&](auto type, auto width) {
                            using T = decltype(type);
                            constexpr int WIDTH = decltype(width)::WIDTH;
                            CP_TRY((launch<T, WIDTH, of_q>(*args, stream)));
                            if constexpr (WIDTH <= 128) {
                                return launch<T, WIDTH, of_kv>(*args, stream);
                            } else {
                                CP_TRY((launch<T, WIDTH, of_k>(*args, stream)));
                                return launch<T, WIDTH, of_v>(*args, stream);
                            }
                        });
}
