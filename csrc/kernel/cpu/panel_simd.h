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

#endif
