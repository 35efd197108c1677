/* Tiles of rows in shared memory, and the scores of two of them: what the passes of the own
 * kernel share.
 *
 * In each pass a block of threads has rows of one side, its own, and goes over the rows of
 * the other: attend and the gradient of q have queries and go over keys, the gradients of k
 * and v have keys and go over queries. In shared memory a row has WIDTH columns, 64, 128 or
 * 256; what a tensor lacks of rows, and of columns up to the next multiple of a product's
 * STEP, is zero there.
 *
 * How two tiles are multiplied is a product's business (by_mma.cuh, by_fma.cuh):
 *   Number                the type of what is multiplied
 *   LANES                 how many lanes of a warp share a row (struct cp_lanes)
 *   SCORE_GROUP,
 *   SUM_GROUP             columns that a lane has side by side, of scores and of sums over
 *                         rows
 *   STEP                  columns are computed with up to the next multiple
 *   dots<WIDTH>           to = own . other: a warp's own rows with all rows of `other`
 *   add<WIDTH>            to += weight other
 *   ROOM                  bytes of shared memory that a warp needs for add
 *   exp                   e^x, where x is a difference of scores */
#ifndef CP_CUDA_TILE_CUH
#define CP_CUDA_TILE_CUH

#include "launch.h"
#include "mma.cuh"
#include "score.cuh"

enum {
    CP_TILE_WARPS = 4,
    CP_TILE_THREADS = 32 * CP_TILE_WARPS,
    CP_TILE_MOST_BYTES = 99
        << 10, /* of shared memory a block: all architectures have it */
};

/* How the lanes of a warp lie over rows and columns of numbers: LANES side by side, each
 * with GROUP columns together, and as often as there are columns; then the next row. What a
 * lane has is an array of rows of columns, counted by itself. */
template <int LANES, int GROUP> struct cp_lanes {
    static constexpr int ROWS = 32 / LANES;    /* from one row of a lane to its next */
    static constexpr int SPAN = LANES * GROUP; /* from one group to the next */

    __device__ static int row(int i)
    {
        return i * ROWS + (int)threadIdx.x % 32 / LANES;
    }

    __device__ static int column(int j)
    {
        return j / GROUP * SPAN + (int)threadIdx.x % LANES * GROUP + j % GROUP;
    }
};

template <int ROWS, int COLUMNS>
__device__ inline void cp_clear(float (&numbers)[ROWS][COLUMNS])
{
    CP_CUDA_UNROLL
    for (int i = 0; i < ROWS; i++) {
        CP_CUDA_UNROLL
        for (int j = 0; j < COLUMNS; j++) {
            numbers[i][j] = 0;
        }
    }
}

/* ---- memory ---- */

/* Where a byte of a row lies: 16 bytes stay together, and those at the same place of eight
 * rows that follow each other are in different banks. */
template <int ROW_BYTES> __device__ inline int cp_tile_at(int row, int byte)
{
    return row * ROW_BYTES + (byte ^ ((row & 7) << 4));
}

/* The longest word that rows of `dim` numbers of T can be read in. */
template <class T> __device__ inline int cp_tile_word(const cp_rows &from, int dim)
{
    uint64_t bits =
        (uint64_t)from.data | (uint64_t)from.row | sizeof(T) * (uint64_t)dim;
    return from.element != sizeof(T) ? (int)sizeof(T)
           : bits % 16 == 0          ? 16
           : bits % 8 == 0           ? 8
           : bits % 4 == 0           ? 4
                                     : (int)sizeof(T);
}

template <class Product, int WORD, int ROWS, int WIDTH>
__device__ inline void cp_tile_load_words(char *tile, const cp_rows &from, int count,
                                          int dim)
{
    constexpr int NUMBER = sizeof(typename Product::Number), STEP = Product::STEP;
    constexpr int WORDS = NUMBER * WIDTH / WORD; /* a row */
    int bytes = NUMBER * dim, end = NUMBER * ((dim + STEP - 1) / STEP * STEP);
    CP_CUDA_UNROLL_BY(1) /* addresses of more would not fit into registers */
    for (int i = (int)threadIdx.x; i < ROWS * WORDS; i += CP_TILE_THREADS) {
        int row = i / WORDS, byte = i % WORDS * WORD;
        bool is_there = row < count && byte < bytes;
        char *to = tile + cp_tile_at<NUMBER * WIDTH>(row, byte);
        if (byte >= end) {
            continue;
        }
        /* Numbers alone may lie apart from each other. */
        int64_t at = row * from.row +
                     (WORD == NUMBER ? byte / NUMBER * from.element : (int64_t)byte);
        if constexpr (WORD < 4) { /* too small for a copy */
            *(uint16_t *)to =
                is_there ? *(const uint16_t *)(from.data + at) : (uint16_t)0;
        } else {
            cp_copy_async<WORD>(to, from.data + (is_there ? at : 0), is_there);
        }
    }
}

/* All threads of the block: fills a tile from the rows on from `first`, of `all`. */
template <class Product, int ROWS, int WIDTH>
__device__ inline void cp_tile_load(char *tile, const cp_rows &rows, int64_t first,
                                    int64_t all, int dim)
{
    using Number = typename Product::Number;
    const cp_rows from = {rows.data + first * rows.row, rows.row, rows.element};
    int count = all - first < ROWS ? (int)(all - first) : ROWS;
    switch (cp_tile_word<Number>(from, dim)) {
    case 16:
        return cp_tile_load_words<Product, 16, ROWS, WIDTH>(tile, from, count, dim);
    case 8:
        return cp_tile_load_words<Product, 8, ROWS, WIDTH>(tile, from, count, dim);
    case 4:
        return cp_tile_load_words<Product, 4, ROWS, WIDTH>(tile, from, count, dim);
    default:
        return cp_tile_load_words<Product, sizeof(Number), ROWS, WIDTH>(tile, from,
                                                                        count, dim);
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

/* Does none of the warp's ROWS rows, which begin at `own`, meet any of the tile's OTHERS? */
template <bool IS_BY_KEYS, int ROWS, int OTHERS>
__device__ inline bool cp_tile_is_hidden(const cp_place &place, int64_t own,
                                         int64_t owns, int64_t others, int64_t first)
{
    /* A later query sees more, an earlier key is seen by more. */
    int64_t widest = IS_BY_KEYS ? own : own + ROWS - 1;
    cp_span span = cp_span_of<IS_BY_KEYS>(place, widest, others, first);
    return own >= owns || span.end <= 0 || span.first >= OTHERS;
}

/* Dot products of the own row `own` become scores; -inf where two rows do not meet, as the
 * rows behind the last of `owns` meet none. */
template <class Product, bool IS_BY_KEYS, int COLUMNS>
__device__ inline void cp_tile_scores(float (&score)[COLUMNS], const cp_place &place,
                                      const cp_mask_plane &mask, double scale,
                                      int64_t own, int64_t owns, int64_t others,
                                      int64_t first)
{
    constexpr int GROUP = Product::SCORE_GROUP;
    using Lanes = cp_lanes<Product::LANES, GROUP>;
    int64_t by_own = IS_BY_KEYS ? mask.key : mask.row;
    int64_t by_other = IS_BY_KEYS ? mask.row : mask.key;
    cp_span span = cp_span_of<IS_BY_KEYS>(place, own, others, first);
    span.end = own < owns ? span.end : 0;
    bool is_plain =
        mask.data == nullptr && span.first <= 0 && span.end >= COLUMNS * Product::LANES;
    /* The mask from these numbers on: one address that moves, where one for each number
     * would not fit into registers. */
    cp_mask_plane at = mask;
    at.data += own * by_own + (first + Lanes::column(0)) * by_other;
    CP_CUDA_UNROLL
    for (int j = 0; j < COLUMNS; j += GROUP, at.data += Lanes::SPAN * by_other) {
        CP_CUDA_UNROLL
        for (int i = 0; i < GROUP; i++) {
            float *to = &score[j + i];
            int other = Lanes::column(j) + i;
            if (is_plain) {
                *to *= (float)scale;
            } else if (other < span.first || other >= span.end) {
                *to = -cp_infinity<float>();
            } else {
                *to = cp_score<typename Product::Number>(
                    *to, scale, at, IS_BY_KEYS ? i : 0, IS_BY_KEYS ? 0 : i);
            }
        }
    }
}

#endif
