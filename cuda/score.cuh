/* Where rows, heads and masks are, who sees whom and how a row ends, which all kernels share; and, for the
 * plain kernel, dot products of one row with a block of rows.
 *
 * A thread of the plain kernel has one row a; the rows b of a block are the same for all
 * threads of a warp that belong to the same head, so that they come from the cache as one
 * broadcast. */
#ifndef CP_CUDA_SCORE_CUH
#define CP_CUDA_SCORE_CUH

#include "kernel/kernel.h"
#include "launch.h"
#include "number.cuh"

enum {
    CP_SCORE_BLOCK = 16, /* rows whose scores exist at a time; also the terms of one
                            partial sum over rows */
    CP_SCORE_CHUNK = 16, /* terms of one partial dot product */
    CP_SCORE_THREADS = 128,
};

/* Rows in memory, strides in bytes. */
struct cp_rows {
    const char *data;
    int64_t row, element;
};

__device__ inline cp_rows cp_rows_of(const cp_view &view, int64_t batch, int64_t first,
                                     int64_t head)
{
    return cp_rows{view.data + batch * view.stride[0] + first * view.stride[1] +
                       head * view.stride[2],
                   view.stride[1], view.stride[3]};
}

__device__ inline char *cp_address(const cp_view &view, int64_t batch, int64_t row,
                                   int64_t head)
{
    return view.data + batch * view.stride[0] + row * view.stride[1] +
           head * view.stride[2];
}

/* One of (batch, heads, rows), rows side by side. */
struct cp_spot {
    int64_t batch, head, row;
};

/* Blocks of threads that have `each` rows of one head. */
static inline int64_t cp_spot_blocks(int64_t batch, int64_t heads, int64_t rows,
                                     int64_t each)
{
    return batch * heads * ((rows + each - 1) / each);
}

/* The first row that a block has. */
__device__ inline cp_spot cp_spot_of_block(int64_t heads, int64_t rows, int64_t each)
{
    int64_t blocks = (rows + each - 1) / each;
    int64_t outer = blockIdx.x / blocks;
    return cp_spot{outer / heads, outer % heads, (blockIdx.x - outer * blocks) * each};
}

/* The row that a thread has, of CP_SCORE_THREADS a block; false where it has none. */
__device__ inline bool cp_spot_find(int64_t heads, int64_t rows, cp_spot *spot)
{
    *spot = cp_spot_of_block(heads, rows, CP_SCORE_THREADS);
    spot->row += threadIdx.x;
    return spot->row < rows;
}

/* Key and value head, counted in the k and v views, of a head of the q view. */
__device__ inline int64_t cp_kv_head(const cp_place &place, int64_t head)
{
    return (place.head_first + head) / place.heads_per_kv - place.kv_head_first;
}

/* The query heads, counted in the q view, of a head of the k and v views: from `first` up
 * to `end`. */
struct cp_head_span {
    int64_t first, end;
};

__device__ inline cp_head_span cp_query_heads(const cp_place &place, int64_t heads,
                                              int64_t kv_head)
{
    int64_t first =
        (place.kv_head_first + kv_head) * place.heads_per_kv - place.head_first;
    int64_t end = first + place.heads_per_kv;
    return cp_head_span{first < 0 ? 0 : first, end < heads ? end : heads};
}

/* How many of the first `keys` keys a query can see. */
__device__ inline int64_t cp_visible(const cp_place &place, int64_t query, int64_t keys)
{
    if (!place.is_causal) {
        return keys;
    }
    int64_t seen = place.q_first + query + 1 - place.k_first;
    return seen < 0 ? 0 : (seen < keys ? seen : keys);
}

/* Whether a row that sees none of the keys gets an answer nevertheless. */
__device__ inline bool cp_has_end(const cp_attend_args &args)
{
    return args.is_first || args.out.data != nullptr;
}

/* The result of a row with that maximum and sum, when no key follows: a number of its output,
 * and its lse. */
template <class Sum> __device__ inline Sum cp_result(Sum output, Sum sum)
{
    return sum == 0 ? (Sum)0 : output / sum;
}

template <class Sum> __device__ inline Sum cp_result_lse(Sum max, Sum sum)
{
    return sum == 0 ? -cp_infinity<Sum>() : max + cp_log(sum);
}

/* The first query that can see a key. */
__device__ inline int64_t cp_first_query(const cp_place &place, int64_t key)
{
    int64_t query = place.is_causal ? place.k_first + key - place.q_first : 0;
    return query < 0 ? 0 : query;
}

/* to[i] = a . row i of b. Each sum is made of sums over CP_SCORE_CHUNK terms: sums of
 * hundreds of numbers of either sign would lose another digit, which the backward pass,
 * a difference of two of them, cannot spare. */
template <class T, int COUNT>
__device__ inline void cp_dots(const char *a, int64_t a_element, const cp_rows &b,
                               int count, int64_t dim, cp_sum<T> (&to)[COUNT])
{
    using Sum = cp_sum<T>;
    CP_CUDA_UNROLL
    for (int i = 0; i < COUNT; i++) {
        to[i] = 0;
    }
    for (int64_t first = 0; first < dim; first += CP_SCORE_CHUNK) {
        const char *row = b.data + first * b.element;
        bool is_whole = dim - first >= CP_SCORE_CHUNK;
        int n = is_whole ? (int)CP_SCORE_CHUNK : (int)(dim - first);
        Sum x[CP_SCORE_CHUNK];
        CP_CUDA_UNROLL
        for (int j = 0; j < CP_SCORE_CHUNK; j++) {
            x[j] = j < n ? cp_load<T>(a + (first + j) * a_element) : (Sum)0;
        }
        CP_CUDA_UNROLL
        for (int i = 0; i < COUNT; i++, row += b.row) {
            if (i < count) {
                Sum part = 0;
                CP_CUDA_UNROLL
                for (int j = 0; j < CP_SCORE_CHUNK; j++) {
                    if (j < n) {
                        part += x[j] * cp_load<T>(row + j * b.element);
                    }
                }
                to[i] += part;
            }
        }
    }
}

/* The mask of one batch and head; data NULL where there is none. */
struct cp_mask_plane {
    const char *data;
    int64_t row,
        key; /* strides in bytes, 0 along an axis that the mask does not have */
    enum cp_dtype dtype;
};

__device__ inline cp_mask_plane cp_mask_of(const cp_view &mask, int64_t batch,
                                           int64_t head)
{
    cp_mask_plane plane = {mask.data, 0, 0, mask.dtype};
    if (mask.data != nullptr) {
        plane.data += mask.n[0] > 1 ? batch * mask.stride[0] : 0;
        plane.data += mask.n[1] > 1 ? head * mask.stride[1] : 0;
        plane.row = mask.n[2] > 1 ? mask.stride[2] : 0;
        plane.key = mask.n[3] > 1 ? mask.stride[3] : 0;
    }
    return plane;
}

/* scale * dot + mask; -inf in the mask wins over whatever the product is. */
template <class T>
__device__ inline cp_sum<T> cp_score(cp_sum<T> dot, double scale,
                                     const cp_mask_plane &mask, int64_t row,
                                     int64_t key)
{
    using Sum = cp_sum<T>;
    Sum score = dot * (Sum)scale;
    if (mask.data == nullptr) {
        return score;
    }
    const char *at = mask.data + row * mask.row + key * mask.key;
    Sum add;
    if (mask.dtype == CP_DTYPE_BOOL) {
        add = *at != 0 ? (Sum)0 : -cp_infinity<Sum>();
    } else if (mask.dtype == CP_DTYPE_FLOAT32) {
        add = (Sum)cp_load<float>(at);
    } else {
        add = cp_load<T>(at);
    }
    return add == -cp_infinity<Sum>() ? add : score + add;
}

#endif
