/* Template: sum over Dv of out * dout, less dlse. Included by one file per ISA.
 *
 * Added up exactly as tile_simd.h adds up dout . v: where a row sees one key, so that out is v, the two cancel to the
 * last bit, as they must. */
#ifndef CP_KERNEL_CPU_DELTA_SIMD_H
#define CP_KERNEL_CPU_DELTA_SIMD_H

#include "kernel/cpu/panel_simd.h"
#include "kernel/kernel.h"

/* GROUP words of up to GROUP rows, one row a lane; what is not there is 0. */
CP_INLINE void load_lanes(const struct cp_view *view, const char *from, int64_t rows,
                          int64_t d, __m256 lanes[GROUP])
{
    for (int64_t i = 0; i < GROUP; i++) {
        lanes[i] = i < rows ? load_words(view->dtype, from + i * view->stride[1],
                                         view->stride[3], d * WORD, view->n[3])
                            : _mm256_setzero_ps();
    }
    lanes8_transpose(lanes);
}

static __m256 delta_lanes(const struct cp_delta_args *args, const char *out,
                          const char *dout, int64_t rows)
{
    int64_t words = (args->out.n[3] + WORD - 1) / WORD;
    __m256 sum = _mm256_setzero_ps();
    for (int64_t first = 0; first < words; first += CHUNK) {
        __m256 part = _mm256_setzero_ps();
        int64_t end = words - first < CHUNK ? words : first + CHUNK;
        for (int64_t d = first; d < end; d += GROUP) {
            __m256 x[GROUP], y[GROUP];
            load_lanes(&args->out, out, rows, d, x);
            load_lanes(&args->dout, dout, rows, d, y);
            for (int64_t i = 0; i < GROUP; i++) {
                part = dot_words(part, x[i], y[i]);
            }
        }
        sum = first > 0 ? _mm256_add_ps(part, sum) : part;
    }
    return sum;
}

static void delta(const struct cp_delta_args *args)
{
    const struct cp_view *out = &args->out, *dout = &args->dout, *dlse = &args->dlse,
                         *to = &args->delta;
    for (int64_t b = 0; b < out->n[0]; b++) {
        for (int64_t h = 0; h < out->n[2]; h++) {
            for (int64_t row = 0; row < out->n[1]; row += GROUP) {
                int64_t rows = out->n[1] - row < GROUP ? out->n[1] - row : GROUP;
                const char *x = out->data + b * out->stride[0] + row * out->stride[1] +
                                h * out->stride[2];
                const char *y = dout->data + b * dout->stride[0] +
                                row * dout->stride[1] + h * dout->stride[2];
                __m256 sum = delta_lanes(args, x, y, rows);
                if (dlse->data) {
                    const char *from = dlse->data + b * dlse->stride[0] +
                                       row * dlse->stride[1] + h * dlse->stride[2];
                    sum = _mm256_sub_ps(sum, lanes8_load(CP_DTYPE_FLOAT32, from,
                                                         dlse->stride[1], rows));
                }
                lanes8_store(CP_DTYPE_FLOAT32,
                             to->data + b * to->stride[0] + row * to->stride[1] +
                                 h * to->stride[2],
                             to->stride[1], rows, sum);
            }
        }
    }
}

#endif
