/* Scalar conversions among the float types: round to nearest, ties to even; subnormals, infinities and NaN kept
 * (narrowing makes a NaN quiet; its sign and what fits of its payload stay). Used by devices and kernels alike. */
#ifndef CP_TENSOR_CONVERT_H
#define CP_TENSOR_CONVERT_H

#include <stdint.h>
#include <string.h>

/* nvcc compiles these for the device as well. */
#ifdef __CUDACC__
#define CP_HOST_DEVICE __host__ __device__
#else
#define CP_HOST_DEVICE
#endif

CP_HOST_DEVICE static inline uint32_t cp_f32_bits(float value)
{
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

CP_HOST_DEVICE static inline float cp_f32_from_bits(uint32_t bits)
{
    float value = 0.0f;
    memcpy(&value, &bits, sizeof value);
    return value;
}

CP_HOST_DEVICE static inline float cp_bf16_to_f32(uint16_t half)
{
    return cp_f32_from_bits((uint32_t)half << 16);
}

CP_HOST_DEVICE static inline uint16_t cp_f32_to_bf16(float value)
{
    uint32_t bits = cp_f32_bits(value);
    /* Half of the last kept place, less one where that place is even: ties go to even. A carry out of the mantissa
     * raises the exponent, which is right, up to infinity. */
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x0040u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

CP_HOST_DEVICE static inline float cp_f16_to_f32(uint16_t half)
{
    uint32_t sign = ((uint32_t)half & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)half & 0x7fffu;
    /* The exponent's bias grows by 127 - 15 = 112; once more for infinity and NaN, whose exponent is all ones. */
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t special =
        (normal + (112u << 23)) | (magnitude > 0x7c00u ? 0x00400000u : 0u);
    /* Zero and subnormals are multiples of 2^-24: exact in float32. */
    uint32_t small = cp_f32_bits((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t bits =
        magnitude >= 0x7c00u ? special : (magnitude < 0x0400u ? small : normal);
    return cp_f32_from_bits(sign | bits);
}

CP_HOST_DEVICE static inline uint16_t cp_f32_to_f16(float value)
{
    uint32_t bits = cp_f32_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t normal =
        (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    /* Below 2^-14 the result is a multiple of 2^-24, which is the last place of floats in [0.5, 1): the addition
     * rounds, and the low bits of the sum are the answer. */
    uint32_t small = cp_f32_bits(cp_f32_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
    uint32_t half = magnitude < 0x38800000u ? small : normal;
    half = magnitude >= 0x477ff000u
               ? 0x7c00u
               : half; /* 65520, halfway from the largest to the next, and above */
    half = magnitude > 0x7f800000u ? nan : half;
    return (uint16_t)(sign | half);
}

/* Rounds to odd: towards zero, then the last bit is set if anything was lost. Rounding that once more to a type with
 * at least two bits less gives what rounding the double at once would give. */
CP_HOST_DEVICE static inline float cp_f64_to_f32_odd(double value)
{
    float nearest = (float)value;
    double back = (double)nearest;
    uint32_t bits = cp_f32_bits(nearest);
    if (back < value || back > value) { /* inexact, and no NaN */
        double magnitude = value < 0.0 ? -value : value;
        double back_magnitude = back < 0.0 ? -back : back;
        bits -= back_magnitude > magnitude ? 1u : 0u;
        bits |= 1u;
    }
    return cp_f32_from_bits(bits);
}

CP_HOST_DEVICE static inline uint16_t cp_f64_to_bf16(double value)
{
    return cp_f32_to_bf16(cp_f64_to_f32_odd(value));
}

CP_HOST_DEVICE static inline uint16_t cp_f64_to_f16(double value)
{
    return cp_f32_to_f16(cp_f64_to_f32_odd(value));
}

#endif
