/* Tiles of rows in shared memory, and what tensor cores make of two of them: what the
 * passes of the own kernel share.
 *
 * In each pass a block of threads has rows of one side, its own, and goes over the rows of
 * the other: attend and the gradient of q have queries and go over keys, the gradients of k
 * and v have keys and go over queries. A warp has 16 rows for each of its TILES. In shared
 * memory a row has WIDTH columns, 64, 128 or 256; what a tensor lacks of columns and rows
 * is zero there, and columns are computed with up to the next multiple of CP_TILE_STEP. */
#ifndef CP_CUDA_TILE_CUH
#define CP_CUDA_TILE_CUH

#include "launch.h"
#include "mma.cuh"
#include "score.cuh"

enum {
    CP_TILE_WARPS = 4,
    CP_TILE_THREADS = 32 * CP_TILE_WARPS,
    CP_TILE_STEP = 32,
    CP_TILE_MOST_BYTES = 99
        << 10, /* of shared memory a block: all architectures have it */
};

/* A lane's share of a fragment (mma.cuh). */
struct cp_lane {
    int row, column; /* g and 2 t */
};

__device__ inline cp_lane cp_lane_of_thread()
{
    int lane = (int)threadIdx.x % 32;
    return cp_lane{lane / 4, lane % 4 * 2};
}

/* ---- memory ---- */

/* Where a byte of a row lies: 16 bytes stay together, and those at the same place of eight
 * rows that follow each other are in different banks. */
template <int WIDTH> __device__ inline int cp_tile_at(int row, int byte)
{
    return row * (2 * WIDTH) + (byte ^ ((row & 7) << 4));
}

/* The longest word that rows of `dim` numbers can be read in. */
__device__ inline int cp_tile_word(const cp_rows &from, int dim)
{
    uint64_t bits = (uint64_t)from.data | (uint64_t)from.row | 2 * (uint64_t)dim;
    return from.element != 2 ? 2
           : bits % 16 == 0  ? 16
           : bits % 8 == 0   ? 8
           : bits % 4 == 0   ? 4
                             : 2;
}

template <int WORD, int ROWS, int WIDTH>
__device__ inline void cp_tile_load_words(char *tile, const cp_rows &from, int count,
                                          int dim)
{
    constexpr int WORDS = 2 * WIDTH / WORD; /* a row */
    int bytes = 2 * dim,
        end = 2 * ((dim + CP_TILE_STEP - 1) / CP_TILE_STEP * CP_TILE_STEP);
    CP_CUDA_UNROLL_BY(1) /* addresses of more would not fit into registers */
    for (int i = (int)threadIdx.x; i < ROWS * WORDS; i += CP_TILE_THREADS) {
        int row = i / WORDS, byte = i % WORDS * WORD;
        bool is_there = row < count && byte < bytes;
        char *to = tile + cp_tile_at<WIDTH>(row, byte);
        if (byte >= end) {
            continue;
        }
        if constexpr (WORD == 2) { /* apart from each other, or too small for a copy */
            const char *at = from.data + row * from.row + byte / 2 * from.element;
            *(uint16_t *)to = is_there ? *(const uint16_t *)at : (uint16_t)0;
        } else {
            cp_copy_async<WORD>(to, from.data + (is_there ? row * from.row + byte : 0),
                                is_there);
        }
    }
}

/* All threads of the block: fills a tile from the rows on from `first`, of `all`. */
template <int ROWS, int WIDTH>
__device__ inline void cp_tile_load(char *tile, const cp_rows &rows, int64_t first,
                                    int64_t all, int dim)
{
    const cp_rows from = {rows.data + first * rows.row, rows.row, rows.element};
    int count = all - first < ROWS ? (int)(all - first) : ROWS;
    switch (cp_tile_word(from, dim)) {
    case 16:
        return cp_tile_load_words<16, ROWS, WIDTH>(tile, from, count, dim);
    case 8:
        return cp_tile_load_words<8, ROWS, WIDTH>(tile, from, count, dim);
    case 4:
        return cp_tile_load_words<4, ROWS, WIDTH>(tile, from, count, dim);
    default:
        return cp_tile_load_words<2, ROWS, WIDTH>(tile, from, count, dim);
    }
}

/* ---- products ---- */

/* cp_tile_at for rows and columns from multiples of 8 and 16 on, to which the lane adds
 * `lane_row` and `lane_byte`, 0 or 16. What the lane has of it is one of four numbers. */
template <int WIDTH>
__device__ inline int cp_tile_lane_at(int row, int lane_row, int column, int lane_byte)
{
    int lane_place = lane_byte ^ (lane_row % 8 * 16), byte = 2 * column;
    return (row + lane_row) * (2 * WIDTH) + byte / 128 * 128 +
           (byte % 128 ^ lane_place);
}

/* 16 rows and 16 columns as a fragment a; transposed, as two fragments b whose rows are the
 * tile's. */
template <int WIDTH, bool IS_TRANSPOSED>
__device__ inline void cp_tile_fragment(uint32_t (&to)[4], const char *tile, int row,
                                        int column)
{
    int lane = (int)threadIdx.x % 32;
    cp_load_matrices<IS_TRANSPOSED>(
        to, tile + cp_tile_lane_at<WIDTH>(row, lane % 16, column, lane / 16 * 16));
}

/* 16 rows and 16 columns as two fragments b whose columns are the tile's rows. */
template <int WIDTH>
__device__ inline void cp_tile_columns(uint32_t (&to)[4], const char *tile, int row,
                                       int column)
{
    int lane = (int)threadIdx.x % 32;
    cp_load_matrices<false>(to,
                            tile + cp_tile_lane_at<WIDTH>(row, lane % 8 + lane / 16 * 8,
                                                          column, lane / 8 % 2 * 16));
}

/* to = own . other over `dim` columns: the warp's rows of `own`, from `own_row` on, with
 * the 8 N rows of `other`. */
template <class T, int WIDTH, int TILES, int N>
__device__ inline void cp_tile_dots(float (&to)[TILES][N][4], const char *own,
                                    int own_row, const char *other, int dim)
{
    CP_CUDA_UNROLL
    for (int m = 0; m < TILES; m++) {
        CP_CUDA_UNROLL
        for (int n = 0; n < N; n++) {
            to[m][n][0] = to[m][n][1] = to[m][n][2] = to[m][n][3] = 0;
        }
    }
    __syncwarp(); /* lanes may have gone apart, and the rest is for all together */
    CP_CUDA_UNROLL_BY(1)
    for (int step = 0; step < dim; step += CP_TILE_STEP) {
        CP_CUDA_UNROLL
        for (int i = 0; i < CP_TILE_STEP; i += 16) {
            uint32_t a[TILES][4];
            CP_CUDA_UNROLL
            for (int m = 0; m < TILES; m++) {
                cp_tile_fragment<WIDTH, false>(a[m], own, own_row + 16 * m, step + i);
            }
            CP_CUDA_UNROLL
            for (int n = 0; n < N; n += 2) {
                uint32_t b[4];
                cp_tile_columns<WIDTH>(b, other, 8 * n, step + i);
                CP_CUDA_UNROLL
                for (int m = 0; m < TILES; m++) {
                    cp_mma<T>(to[m][n], a[m], b[0], b[1]);
                    cp_mma<T>(to[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
}

/* to += weight other, over `dim` columns; weights are rounded to T. */
template <class T, int WIDTH, int TILES, int N>
__device__ inline void cp_tile_add(float (&to)[TILES][WIDTH / 8][4],
                                   const float (&weight)[TILES][N][4],
                                   const char *other, int dim)
{
    uint32_t a[TILES][N / 2][4];
    CP_CUDA_UNROLL
    for (int m = 0; m < TILES; m++) {
        CP_CUDA_UNROLL
        for (int n = 0; n < N; n++) { /* a sum's columns are half of a's */
            a[m][n / 2][n % 2 * 2] = cp_pack<T>(weight[m][n][0], weight[m][n][1]);
            a[m][n / 2][n % 2 * 2 + 1] = cp_pack<T>(weight[m][n][2], weight[m][n][3]);
        }
    }
    __syncwarp(); /* as in cp_tile_dots */
    CP_CUDA_UNROLL
    for (int step = 0; step < WIDTH; step += CP_TILE_STEP) {
        if (step >= dim) {
            continue; /* uniform */
        }
        CP_CUDA_UNROLL
        for (int k = 0; k < N / 2; k++) {
            CP_CUDA_UNROLL
            for (int i = 0; i < CP_TILE_STEP; i += 16) {
                uint32_t b[4];
                cp_tile_fragment<WIDTH, true>(b, other, 16 * k, step + i);
                CP_CUDA_UNROLL
                for (int m = 0; m < TILES; m++) {
                    cp_mma<T>(to[m][(step + i) / 8], a[m][k], b[0], b[1]);
                    cp_mma<T>(to[m][(step + i) / 8 + 1], a[m][k], b[2], b[3]);
                }
            }
        }
    }
}

/* ---- scores ---- */

/* The other side's rows that one of the own rows meets, counted in a tile: from `first` up
 * to `end`. */
struct cp_span {
    int first, end;
};

__device__ inline int cp_tile_row(int64_t row)
{
    constexpr int64_t FAR = 1 << 20; /* more rows than any tile has */
    return (int)(row < -FAR ? -FAR : row > FAR ? FAR : row);
}

/* `others` rows has the other side, the tile's first is `first`. */
template <bool IS_BY_KEYS>
__device__ inline cp_span cp_span_of(const cp_place &place, int64_t own, int64_t others,
                                     int64_t first)
{
    if constexpr (IS_BY_KEYS) {
        return cp_span{cp_tile_row(cp_first_query(place, own) - first),
                       cp_tile_row(others - first)};
    } else {
        return cp_span{0, cp_tile_row(cp_visible(place, own, others) - first)};
    }
}

/* Does none of the warp's rows, which begin at `own`, meet any of the tile's? */
template <bool IS_BY_KEYS, int TILES, int N>
__device__ inline bool cp_tile_is_hidden(const cp_place &place, int64_t own,
                                         int64_t owns, int64_t others, int64_t first)
{
    /* A later query sees more, an earlier key is seen by more. */
    int64_t widest = IS_BY_KEYS ? own : own + 16 * TILES - 1;
    cp_span span = cp_span_of<IS_BY_KEYS>(place, widest, others, first);
    return own >= owns || span.end <= 0 || span.first >= 8 * N;
}

/* Dot products of 16 own rows, of which this lane's first is `own`, become scores; -inf
 * where two rows do not meet, as the rows behind the last of `owns` meet none. */
template <class T, bool IS_BY_KEYS, int N>
__device__ inline void
cp_tile_scores(float (&score)[N][4], const cp_place &place, const cp_mask_plane &mask,
               double scale, int64_t own, int64_t owns, int64_t others, int64_t first)
{
    int column = cp_lane_of_thread().column;
    int64_t by_own = IS_BY_KEYS ? mask.key : mask.row;
    int64_t by_other = IS_BY_KEYS ? mask.row : mask.key;
    CP_CUDA_UNROLL
    for (int half = 0; half < 2; half++) {
        cp_span span = cp_span_of<IS_BY_KEYS>(place, own + 8 * half, others, first);
        span.end = own + 8 * half < owns ? span.end : 0;
        bool is_plain = mask.data == nullptr && span.first <= 0 && span.end >= 8 * N;
        /* The mask from these numbers on: one address that moves, where one for each
         * number would not fit into registers. */
        cp_mask_plane at = mask;
        at.data += (own + 8 * half) * by_own + (first + column) * by_other;
        CP_CUDA_UNROLL
        for (int n = 0; n < N; n++, at.data += 8 * by_other) {
            CP_CUDA_UNROLL
            for (int i = 0; i < 2; i++) {
                float *to = &score[n][2 * half + i];
                int other = 8 * n + column + i;
                if (is_plain) {
                    *to *= (float)scale;
                } else if (other < span.first || other >= span.end) {
                    *to = -cp_infinity<float>();
                } else {
                    *to = cp_score<T>(*to, scale, at, IS_BY_KEYS ? i : 0,
                                      IS_BY_KEYS ? 0 : i);
                }
            }
        }
    }
}

/* e^x, where x is a difference of scores. */
__device__ inline float cp_tile_exp(float x)
{
    constexpr float LOG2_E = 1.44269504088896340736f;
    return cp_exp2(x * LOG2_E);
}

/* ---- the choice ---- */

template <int WIDTH_> struct cp_tile_width {
    static constexpr int WIDTH = WIDTH_;
};

/* What `run(T{}, cp_tile_width<WIDTH>{})` says, with the type of the dtype and the least
 * width that has both dims. */
template <class Run>
enum cp_code cp_with_tile(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                          const Run &run)
{
    int64_t dim = head_dim > value_dim ? head_dim : value_dim;
    auto with = [&](auto type) {
        return dim <= 64    ? run(type, cp_tile_width<64>{})
               : dim <= 128 ? run(type, cp_tile_width<128>{})
                            : run(type, cp_tile_width<256>{});
    };
    return dtype == CP_DTYPE_BFLOAT16 ? with(cp_bf16{}) : with(cp_f16{});
}

#endif
