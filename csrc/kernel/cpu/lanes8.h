/* Eight elements at a time between tensors of any dtype and float32 registers, and 8 x 8 transposes.
 *
 * Everything here is AVX2, which the AVX-512 files have as well: moving data in and out of tiles is a few per cent
 * of the work, and one width keeps it readable. "Words" are the 32-bit cells of a packed panel: one float32, or two
 * half-width elements for the dot-product instructions. */
#ifndef CP_KERNEL_CPU_LANES8_H
#define CP_KERNEL_CPU_LANES8_H

#include <immintrin.h>
#include <string.h>

#include "tensor/dtype.h"

#define CP_INLINE static inline __attribute__((always_inline))

/* For a loop whose count is a constant (at most 16) and must not be left as one: arrays of vectors live in registers
 * only then. CP_UNROLL_SOME is for loops of any length. */
#if defined(__clang__)
#define CP_UNROLL CP_PRAGMA(clang loop unroll(full))
#define CP_UNROLL_SOME(count) CP_PRAGMA(clang loop unroll_count(count))
#else
#define CP_UNROLL CP_PRAGMA(GCC unroll 16)
#define CP_UNROLL_SOME(count) CP_PRAGMA(GCC unroll count)
#endif
#define CP_PRAGMA(words) _Pragma(#words)

/* A hint; may point anywhere. */
CP_INLINE void lanes8_prefetch(const void *at)
{
    _mm_prefetch((const char *)at, _MM_HINT_T0);
}

/* The same for what is needed later than the first cache would keep it. */
CP_INLINE void lanes8_prefetch_far(const void *at)
{
    _mm_prefetch((const char *)at, _MM_HINT_T1);
}

/* The element type's bytes; bool and the float types that these kernels take. */
CP_INLINE int64_t lanes8_bytes(enum cp_dtype dtype)
{
    return dtype == CP_DTYPE_FLOAT32 ? 4 : dtype == CP_DTYPE_BOOL ? 1 : 2;
}

/* Elements of `bytes` each, `stride` bytes apart, side by side in `to`; `count` of them, then zeros up to `room`. */
static inline const char *lanes8_collect(char *to, int64_t room, const char *from,
                                         int64_t stride, int64_t bytes, int64_t count)
{
    memset(to, 0, (size_t)(room * bytes));
    for (int64_t i = 0; i < count; i++) {
        memcpy(to + i * bytes, from + i * stride, (size_t)bytes);
    }
    return to;
}

CP_INLINE __m256 lanes8_from_bf16(__m128i halves)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* Round to nearest even, as cp_f32_to_bf16 does it. */
CP_INLINE __m128i lanes8_to_bf16(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i high = _mm256_srli_epi32(bits, 16);
    __m256i is_odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i words = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(words),
                            _mm256_extracti128_si256(words, 1));
}

/* The F16C instructions, also in their AVX-512 VL form: -mavx512f alone does not switch F16C on. */
CP_INLINE __m256 lanes8_from_f16(__m128i halves)
{
#ifdef __AVX512VL__
    return _mm256_maskz_cvtph_ps(0xff, halves);
#else
    return _mm256_cvtph_ps(halves);
#endif
}

CP_INLINE __m128i lanes8_to_f16(__m256 x)
{
#ifdef __AVX512VL__
    return _mm256_maskz_cvtps_ph(0xff, x, _MM_FROUND_TO_NEAREST_INT);
#else
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#endif
}

/* Eight elements as float32, those from `count` on 0. bool: 1 or 0. */
CP_INLINE __m256 lanes8_load(enum cp_dtype dtype, const char *from, int64_t stride,
                             int64_t count)
{
    char few[8 * 4];
    int64_t bytes = lanes8_bytes(dtype);
    if (stride != bytes || count < 8) {
        from = lanes8_collect(few, 8, from, stride, bytes, count < 8 ? count : 8);
    }
    if (dtype == CP_DTYPE_FLOAT32) {
        return _mm256_loadu_ps((const float *)(const void *)from);
    }
    if (dtype == CP_DTYPE_BOOL) {
        __m256i wide =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
        return _mm256_min_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(1.0f));
    }
    __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)from);
    return dtype == CP_DTYPE_BFLOAT16 ? lanes8_from_bf16(halves)
                                      : lanes8_from_f16(halves);
}

/* Eight half-width elements as they are. Those from `count` on are 0. */
CP_INLINE __m128i lanes8_load_halves(const char *from, int64_t stride, int64_t count)
{
    char few[8 * 2];
    if (stride != 2 || count < 8) {
        from = lanes8_collect(few, 8, from, stride, 2, count < 8 ? count : 8);
    }
    return _mm_loadu_si128((const __m128i *)(const void *)from);
}

/* Sixteen half-width elements as they are: eight words. Those from `count` on are 0. */
CP_INLINE __m256 lanes8_load_pairs(const char *from, int64_t stride, int64_t count)
{
    char few[16 * 2];
    if (stride != 2 || count < 16) {
        from = lanes8_collect(few, 16, from, stride, 2, count < 16 ? count : 16);
    }
    return _mm256_loadu_ps((const float *)(const void *)from);
}

/* Rounds to the dtype; the first `count` of the eight are written. */
CP_INLINE void lanes8_store(enum cp_dtype dtype, char *to, int64_t stride,
                            int64_t count, __m256 x)
{
    char eight[8 * 4];
    int64_t bytes = lanes8_bytes(dtype);
    bool is_direct = stride == bytes && count >= 8;
    char *place = is_direct ? to : eight;
    if (dtype == CP_DTYPE_FLOAT32) {
        _mm256_storeu_ps((float *)(void *)place, x);
    } else {
        __m128i halves =
            dtype == CP_DTYPE_BFLOAT16 ? lanes8_to_bf16(x) : lanes8_to_f16(x);
        _mm_storeu_si128((__m128i *)(void *)place, halves);
    }
    for (int64_t i = 0; !is_direct && i < count && i < 8; i++) {
        memcpy(to + i * stride, eight + i * bytes, (size_t)bytes);
    }
}

/* row[i] lane j <-> row[j] lane i */
CP_INLINE void lanes8_transpose(__m256 row[8])
{
    __m256 pair[8], quad[8];
    CP_UNROLL
    for (int i = 0; i < 4; i++) {
        pair[2 * i] = _mm256_unpacklo_ps(row[2 * i], row[2 * i + 1]);
        pair[2 * i + 1] = _mm256_unpackhi_ps(row[2 * i], row[2 * i + 1]);
    }
    CP_UNROLL
    for (int i = 0; i < 8; i += 4) {
        quad[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
        quad[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xee);
        quad[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
        quad[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
    }
    CP_UNROLL
    for (int i = 0; i < 4; i++) {
        row[i] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20);
        row[i + 4] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31);
    }
}

/* The same of 8 x 8 bytes, row[i] in its first eight: column[i] has columns 2 * i and 2 * i + 1. */
CP_INLINE void lanes8_transpose_bytes(const __m128i row[8], __m128i column[4])
{
    __m128i pair[4];
    CP_UNROLL
    for (int i = 0; i < 4; i++) {
        pair[i] = _mm_unpacklo_epi8(row[2 * i], row[2 * i + 1]);
    }
    __m128i above[2] = {_mm_unpacklo_epi16(pair[0], pair[1]),
                        _mm_unpackhi_epi16(pair[0], pair[1])};
    __m128i below[2] = {_mm_unpacklo_epi16(pair[2], pair[3]),
                        _mm_unpackhi_epi16(pair[2], pair[3])};
    CP_UNROLL
    for (int i = 0; i < 2; i++) {
        column[2 * i] = _mm_unpacklo_epi32(above[i], below[i]);
        column[2 * i + 1] = _mm_unpackhi_epi32(above[i], below[i]);
    }
}

#endif
