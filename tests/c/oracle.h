/* Attention written down as the formula reads, over whole sequences, forward and
 * backward: the truth in float64, and, rounding after every step, the plain method in a
 * narrower type, whose error is the yardstick for kernels.
 *
 * Shares no code with csrc/. All arrays are dense doubles: q (B, rows, heads, D), k (B,
 * keys, kv heads, D), v (..., Dv), out and dout (B, rows, heads, Dv), lse and dlse (B,
 * rows, heads), mask (B, heads, rows, keys). */
#ifndef CP_TESTS_ORACLE_H
#define CP_TESTS_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

enum oracle_type { ORACLE_F64, ORACLE_F32, ORACLE_BF16, ORACLE_F16 };

struct oracle_input {
    int64_t batch, rows, keys, heads, kv_heads, dim, value_dim;
    double scale;
    bool is_causal;
    int64_t q_first, k_first; /* global positions, for causal */
    const double *q, *k, *v;
    const double *mask;        /* added to scores; -inf: hidden; NULL: none */
    const double *dout, *dlse; /* dlse NULL: zeros */
};

struct oracle_output {
    double *out, *lse;
    double *dq, *dk, *dv; /* NULL: no backward */
    double score_size;    /* largest finite |score|: its rounding is an error of every
                             weight */
    double ds_size; /* largest p (|dp| + |delta|): what the gradient of a score is a
                       difference of */
};

/* The nearest number of that type, as a double. */
double oracle_round(double x, enum oracle_type type);

/* Sums are kept in `sums`, float64 or float32; whatever is a tensor of its own is
 * rounded to `tensors`. */
void oracle_run(const struct oracle_input *in, enum oracle_type sums,
                enum oracle_type tensors, struct oracle_output *out);

#endif
