/* The naive method. Slow and obvious on purpose. */
#include "oracle.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Nearest multiple of the last place; ties to even by rint. Narrow exponent ranges end
 * at `smallest`. */
static double round_bits(double x, int bits, int smallest)
{
    if (x == 0 || !isfinite(x)) {
        return x;
    }
    int exponent = 0;
    (void)frexp(x, &exponent);
    exponent = exponent < smallest ? smallest : exponent;
    return ldexp(rint(ldexp(x, bits - exponent)), exponent - bits);
}

double oracle_round(double x, enum oracle_type type)
{
    if (type == ORACLE_F32) {
        return (double)(float)x;
    }
    if (type == ORACLE_BF16) {
        return round_bits(x, 8, -125);
    }
    if (type == ORACLE_F16) {
        double y = round_bits(x, 11, -13);
        return fabs(y) > 65504 ? copysign(HUGE_VAL, y) : y;
    }
    return x;
}

static double dot(const double *a, int64_t a_step, const double *b, int64_t b_step,
                  int64_t n, enum oracle_type sums)
{
    if (sums == ORACLE_F64) {
        double sum = 0;
        for (int64_t i = 0; i < n; i++) {
            sum += a[i * a_step] * b[i * b_step];
        }
        return sum;
    }
    float sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += (float)a[i * a_step] * (float)b[i * b_step];
    }
    return (double)sum;
}

struct head {
    const struct oracle_input *in;
    struct oracle_output *out;
    enum oracle_type sums, tensors;
    int64_t b, h, kv;
    double *p, *ds; /* (rows, keys) */
};

static const double *key_row(const struct head *head, const double *data, int64_t j,
                             int64_t dim)
{
    const struct oracle_input *in = head->in;
    return data + ((head->b * in->keys + j) * in->kv_heads + head->kv) * dim;
}

static int64_t row_at(const struct head *head, int64_t i)
{
    return (head->b * head->in->rows + i) * head->in->heads + head->h;
}

static double score(const struct head *head, int64_t i, int64_t j)
{
    const struct oracle_input *in = head->in;
    if (in->is_causal && in->k_first + j > in->q_first + i) {
        return -HUGE_VAL;
    }
    double s = dot(in->q + row_at(head, i) * in->dim, 1,
                   key_row(head, in->k, j, in->dim), 1, in->dim, head->sums);
    s = oracle_round(oracle_round(s, head->tensors) * in->scale, head->tensors);
    if (in->mask != NULL) {
        double add =
            in->mask[((head->b * in->heads + head->h) * in->rows + i) * in->keys + j];
        s = oracle_round(s + add, head->tensors);
    }
    return s;
}

static void forward_row(const struct head *head, int64_t i)
{
    const struct oracle_input *in = head->in;
    double *p = head->p + i * in->keys, max = -HUGE_VAL, sum = 0;
    for (int64_t j = 0; j < in->keys; j++) {
        p[j] = score(head, i, j);
        max = p[j] > max ? p[j] : max;
        bool is_largest = isfinite(p[j]) && fabs(p[j]) > head->out->score_size;
        head->out->score_size = is_largest ? fabs(p[j]) : head->out->score_size;
    }
    bool is_dead = max == -HUGE_VAL; /* no key at all */
    for (int64_t j = 0; j < in->keys; j++) {
        p[j] = is_dead ? 0
                       : oracle_round(exp(oracle_round(p[j] - max, head->sums)),
                                      head->sums);
        sum = oracle_round(sum + p[j], head->sums);
    }
    for (int64_t j = 0; j < in->keys; j++) {
        p[j] = is_dead ? 0 : oracle_round(p[j] / sum, head->tensors);
    }
    head->out->lse[row_at(head, i)] =
        is_dead ? -HUGE_VAL
                : oracle_round(max + oracle_round(log(sum), head->sums), head->sums);
    for (int64_t d = 0; d < in->value_dim; d++) {
        double x = dot(p, 1, key_row(head, in->v, 0, in->value_dim) + d,
                       in->kv_heads * in->value_dim, in->keys, head->sums);
        head->out->out[row_at(head, i) * in->value_dim + d] =
            oracle_round(x, head->tensors);
    }
}

static void backward_row(const struct head *head, int64_t i)
{
    const struct oracle_input *in = head->in;
    const double *p = head->p + i * in->keys,
                 *dout = in->dout + row_at(head, i) * in->value_dim;
    double *ds = head->ds + i * in->keys;
    for (int64_t j = 0; j < in->keys; j++) {
        double dp = dot(dout, 1, key_row(head, in->v, j, in->value_dim), 1,
                        in->value_dim, head->sums);
        ds[j] = oracle_round(dp, head->tensors);
    }
    double delta = dot(p, 1, ds, 1, in->keys, head->sums);
    bool is_dead = head->out->lse[row_at(head, i)] == -HUGE_VAL;
    double dlse = in->dlse != NULL && !is_dead ? in->dlse[row_at(head, i)] : 0;
    for (int64_t j = 0; j < in->keys; j++) {
        double size = p[j] * (fabs(ds[j]) + fabs(delta) + fabs(dlse));
        head->out->ds_size = size > head->out->ds_size ? size : head->out->ds_size;
        double inner =
            oracle_round(oracle_round(ds[j] - delta, head->sums) + dlse, head->sums);
        ds[j] = oracle_round(p[j] * inner, head->tensors);
    }
    for (int64_t d = 0; d < in->dim; d++) {
        double x = dot(ds, 1, key_row(head, in->k, 0, in->dim) + d,
                       in->kv_heads * in->dim, in->keys, head->sums);
        head->out->dq[row_at(head, i) * in->dim + d] =
            oracle_round(oracle_round(x, head->tensors) * in->scale, head->tensors);
    }
}

/* to (keys, kv heads, dim) += factor * weight^T rows, over one head's queries */
static void backward_keys(const struct head *head, const double *weight,
                          const double *rows, int64_t dim, double factor, double *to)
{
    const struct oracle_input *in = head->in;
    for (int64_t j = 0; j < in->keys; j++) {
        double *row = to + ((head->b * in->keys + j) * in->kv_heads + head->kv) * dim;
        for (int64_t d = 0; d < dim; d++) {
            double x = dot(weight + j, in->keys, rows + row_at(head, 0) * dim + d,
                           in->heads * dim, in->rows, head->sums);
            row[d] = oracle_round(row[d] + oracle_round(x * factor, head->tensors),
                                  head->tensors);
        }
    }
}

void oracle_run(const struct oracle_input *in, enum oracle_type sums,
                enum oracle_type tensors, struct oracle_output *out)
{
    size_t count = (size_t)(in->rows * in->keys) + 1;
    struct head head = {.in = in, .out = out, .sums = sums, .tensors = tensors};
    head.p = calloc(count, sizeof(double));
    head.ds = calloc(count, sizeof(double));
    if (head.p == NULL || head.ds == NULL) {
        abort();
    }
    out->score_size = out->ds_size = 0;
    if (out->dk != NULL) {
        size_t keys = (size_t)(in->batch * in->keys * in->kv_heads);
        memset(out->dk, 0, keys * (size_t)in->dim * sizeof(double));
        memset(out->dv, 0, keys * (size_t)in->value_dim * sizeof(double));
    }
    for (head.b = 0; head.b < in->batch; head.b++) {
        for (head.h = 0; head.h < in->heads; head.h++) {
            head.kv = head.h / (in->heads / in->kv_heads);
            for (int64_t i = 0; i < in->rows; i++) {
                forward_row(&head, i);
                if (out->dk != NULL) {
                    backward_row(&head, i);
                }
            }
            if (out->dk != NULL && in->rows > 0) {
                backward_keys(&head, head.ds, in->q, in->dim, in->scale, out->dk);
                backward_keys(&head, head.p, in->dout, in->value_dim, 1, out->dv);
            }
        }
    }
    free(head.p);
    free(head.ds);
}
