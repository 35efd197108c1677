/* Template: the way into packed panels and out of the state (panel_simd.h has the picture). Included by one file per
 * ISA. */
#ifndef CP_KERNEL_CPU_PACK_SIMD_H
#define CP_KERNEL_CPU_PACK_SIMD_H

#include <math.h>

#include "base/status.h"
#include "kernel/cpu/panel_simd.h"
#include "kernel/kernel_cpu.h"

/* In words; panel_simd.h has the picture. */
struct layout {
    int64_t depth;
    int64_t values;
    int64_t k_group, v_group, state_group;
};

static struct layout layout_of(int64_t head_dim, int64_t value_dim)
{
    struct layout layout = {
        .depth = (head_dim + WORD - 1) / WORD,
        .values = cp_round_up(value_dim, GROUP),
    };
    layout.k_group = layout.depth * GROUP;
    layout.v_group = layout.values * GROUP + V_PAD;
    layout.state_group = (layout.values + 2) * QUERIES;
    return layout;
}

static void panels_of(const struct layout *layout, struct cp_format *format)
{
    format->k =
        (struct cp_panel){.row_align = GROUP, .row_bytes = layout->k_group * 4 / GROUP};
    format->v = (struct cp_panel){.row_align = V_KEYS,
                                  .row_bytes = layout->v_group * 4 / V_KEYS};
    format->state = (struct cp_panel){.row_align = QUERIES,
                                      .row_bytes = layout->state_group * 4 / QUERIES};
}

static enum cp_code pack_k(const struct cp_view *dst, const struct cp_view *src,
                           struct cp_stream *stream)
{
    (void)stream;
    struct layout layout = layout_of(src->n[3], 1);
    for (int64_t b = 0; b < src->n[0]; b++) {
        for (int64_t h = 0; h < src->n[2]; h++) {
            const char *from = src->data + b * src->stride[0] + h * src->stride[2];
            float *to =
                (float *)(void *)(dst->data + b * dst->stride[0] + h * dst->stride[2]);
            for (int64_t key = 0; key < src->n[1]; key += GROUP) {
                pack_k_group(to, layout.depth, src, from + key * src->stride[1],
                             src->n[1] - key);
                to += layout.k_group;
            }
        }
    }
    return CP_OK;
}

static enum cp_code pack_v(const struct cp_view *dst, const struct cp_view *src,
                           struct cp_stream *stream)
{
    (void)stream;
    struct layout layout = layout_of(1, src->n[3]);
    for (int64_t b = 0; b < src->n[0]; b++) {
        for (int64_t h = 0; h < src->n[2]; h++) {
            const char *from = src->data + b * src->stride[0] + h * src->stride[2];
            float *to =
                (float *)(void *)(dst->data + b * dst->stride[0] + h * dst->stride[2]);
            for (int64_t key = 0; key < src->n[1];
                 key += V_KEYS, to += layout.v_group) {
                pack_v_group(to, layout.values, src, from, key);
                memset(to + layout.v_group - V_PAD, 0, V_PAD * sizeof(float));
            }
        }
    }
    return CP_OK;
}

/* Rows of one state group, eight at a time: out / total to `out`, rounded to its dtype. */
static inline void finish_rows(const float *state, const struct layout *layout,
                               const struct cp_view *out, char *to, int64_t first,
                               int64_t rows)
{
    const float *total = state + (layout->values + 1) * QUERIES + first;
    __m256 totals = _mm256_loadu_ps(total), zero = _mm256_setzero_ps();
    /* Ordered: a NaN total is no empty row. */
    __m256 is_empty = _mm256_cmp_ps(totals, zero, _CMP_EQ_OQ);
    for (int64_t d = 0; d < out->n[3]; d += GROUP) {
        __m256 row[GROUP];
        for (int64_t i = 0; i < GROUP; i++) {
            __m256 sum = _mm256_loadu_ps(state + (d + i) * QUERIES + first);
            row[i] = _mm256_blendv_ps(_mm256_div_ps(sum, totals), zero, is_empty);
        }
        lanes8_transpose(row);
        for (int64_t i = 0; i < GROUP && i < rows; i++) {
            lanes8_store(out->dtype, to + i * out->stride[1] + d * out->stride[3],
                         out->stride[3], out->n[3] - d, row[i]);
        }
    }
}

static void finish_lse(const float *state, const struct layout *layout, char *to,
                       int64_t stride, int64_t rows)
{
    const float *max = state + layout->values * QUERIES, *total = max + QUERIES;
    for (int64_t i = 0; i < rows; i++) {
        float lse = total[i] == 0.0f ? -INFINITY
                                     : (float)((double)max[i] + log((double)total[i]));
        memcpy(to + i * stride, &lse, sizeof lse);
    }
}

/* The `rows` rows of one state group, which begin at `row` of the views. lse.data NULL: not wanted. */
static void finish_group(const float *state, const struct layout *layout,
                         const struct cp_view *out, const struct cp_view *lse,
                         int64_t b, int64_t row, int64_t rows, int64_t h)
{
    char *to =
        out->data + b * out->stride[0] + row * out->stride[1] + h * out->stride[2];
    for (int64_t first = 0; first < rows; first += GROUP) {
        finish_rows(state, layout, out, to + first * out->stride[1], first,
                    rows - first);
    }
    if (lse->data) {
        finish_lse(state, layout,
                   lse->data + b * lse->stride[0] + row * lse->stride[1] +
                       h * lse->stride[2],
                   lse->stride[1], rows);
    }
}

static enum cp_code finish(const struct cp_finish_args *args, struct cp_stream *stream)
{
    (void)stream;
    const struct cp_view *out = &args->out;
    struct layout layout = layout_of(1, out->n[3]);
    for (int64_t b = 0; b < out->n[0]; b++) {
        for (int64_t h = 0; h < out->n[2]; h++) {
            const char *panel = args->state.data + b * args->state.stride[0] +
                                h * args->state.stride[2];
            for (int64_t row = 0; row < out->n[1]; row += QUERIES) {
                const float *state = (const float *)(const void *)panel +
                                     row / QUERIES * layout.state_group;
                int64_t rows = out->n[1] - row < QUERIES ? out->n[1] - row : QUERIES;
                finish_group(state, &layout, out, &args->lse, b, row, rows, h);
            }
        }
    }
    return CP_OK;
}

#endif
