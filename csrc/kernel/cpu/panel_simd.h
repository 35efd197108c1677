/* Template: the packed panels and the state of the vector kernels. Included by one file per ISA (tile_simd.h says
 * what that file defines).
 *
 * A panel holds 32-bit words: WORD = 1 float32 element each, or WORD = 2 neighbouring half-width elements for the
 * dot-product instructions. The words that one step of the inner loop broadcasts lie side by side, so a panel is
 * read front to back and no two rows meet in the same L1 set:
 *
 *   K   for 8 keys:          [depth][8 keys]                         depth = D / WORD, a word is WORD dims
 *   V   for 8 * WORD keys:   [values / 8][8][8 dims] and one line    values = Dv rounded up to 8, a word is WORD keys
 *   state, QUERIES rows:     out[values][QUERIES], max[QUERIES], total[QUERIES]
 *
 * The line (64 bytes) that ends each group of V keeps groups of D = 128, 4096 bytes, from repeating the same sets. */
#ifndef CP_KERNEL_CPU_PANEL_SIMD_H
#define CP_KERNEL_CPU_PANEL_SIMD_H

#include "kernel/cpu/lanes8.h"
#include "kernel/cpu/tile_simd.h"
#include "tensor/view.h"

enum {
    GROUP = 8, /* rows of words that lie together; also the width of lanes8.h */
    V_KEYS = GROUP * WORD, /* keys in a group of V */
    V_PAD = 64 / 4,        /* words */
    /* Rows that packing fetches ahead: heads lie far apart, so the hardware does not. */
    AHEAD = 2 * GROUP,
};

/* Eight words that begin with element `dim` of `from`, a row of `dims`. */
CP_INLINE __m256 load_words(enum cp_dtype dtype, const char *from, int64_t stride,
                            int64_t dim, int64_t dims)
{
    const char *first = from + dim * stride;
    return WORD == 1 ? lanes8_load(dtype, first, stride, dims - dim)
                     : lanes8_load_pairs(first, stride, dims - dim);
}

static inline void pack_k_group(float *to, int64_t depth, const struct cp_view *src,
                                const char *from, int64_t keys)
{
    for (int64_t d = 0; d < depth; d += GROUP) {
        __m256 row[GROUP];
        for (int64_t i = 0; i < GROUP; i++) {
            lanes8_prefetch(from + (i + AHEAD) * src->stride[1] +
                            d * WORD * src->stride[3]);
            row[i] = i < keys ? load_words(src->dtype, from + i * src->stride[1],
                                           src->stride[3], d * WORD, src->n[3])
                              : _mm256_setzero_ps();
        }
        lanes8_transpose(row);
        for (int64_t i = 0; i < GROUP && d + i < depth; i++) {
            _mm256_storeu_ps(to + (d + i) * GROUP, row[i]);
        }
    }
}

/* WORD rows from `key` on as words, eight dims from `dim` on; rows past the last are 0. `from` points to row 0. */
CP_INLINE __m256 load_values(const struct cp_view *src, const char *from, int64_t key,
                             int64_t dim)
{
    int64_t dims = src->n[3] - dim, stride = src->stride[3];
    const char *first = from + key * src->stride[1] + dim * stride;
    if (key >= src->n[1]) {
        return _mm256_setzero_ps();
    }
    if (WORD == 1) {
        return lanes8_load(src->dtype, first, stride, dims);
    }
    __m128i even = lanes8_load_halves(first, stride, dims), odd = _mm_setzero_si128();
    if (key + 1 < src->n[1]) {
        odd = lanes8_load_halves(first + src->stride[1], stride, dims);
    }
    __m256i words = _mm256_castsi128_si256(_mm_unpacklo_epi16(even, odd));
    return _mm256_castsi256_ps(
        _mm256_inserti128_si256(words, _mm_unpackhi_epi16(even, odd), 1));
}

/* V_KEYS rows from `key` on, `values` dims. `from` points to row 0. */
static inline void pack_v_group(float *to, int64_t values, const struct cp_view *src,
                                const char *from, int64_t key)
{
    for (int64_t i = 0; i < GROUP; i++) {
        const char *ahead = from + (key + i * WORD + AHEAD) * src->stride[1];
        for (int64_t d = 0; d < values; d += GROUP) {
            lanes8_prefetch(ahead + d * src->stride[3]);
            _mm256_storeu_ps(to + (d + i) * GROUP,
                             load_values(src, from, key + i * WORD, d));
        }
    }
}

/* sum + the products of the elements of eight words: as vec_dot, lane by lane. */
CP_INLINE __m256 dot_words(__m256 sum, __m256 a, __m256 b)
{
#if WORD == 1
    return _mm256_fmadd_ps(a, b, sum);
#else
    return _mm256_dpbf16_ps(sum, (__m256bh)a, (__m256bh)b);
#endif
}

#endif
