/* How each step is cut.
 *
 *   attend, finish   batch x query head x rows        in whole groups of rows of the state
 *   pack             batch x key/value head x keys    in whole groups of keys of the panel
 *   grad             batch x key/value head, each as n x n boxes of rows and keys: dq belongs to rows, dk and dv to
 *                    keys, so n boxes that share neither go together, then the next n
 *   delta, copy, add the longest axis but the last
 *   zero             bytes
 *
 * Sums that attend makes do not depend on the number of threads; those of grad are taken in another order where n is
 * another. */
#include "exec/spread.h"

#include "base/checked.h"

/* What a thread is woken for, at least: some 20 us of work. */
static const double piece_operations = 2e6;
static const int64_t piece_bytes = 128 * 1024;

enum {
    /* Pieces a thread, so that one that comes late leaves little to wait for. */
    PIECES = 8,
    MEMORY_PIECES = 4,
    /* Tiles of a kernel, so that a piece is not all edge. */
    LEAST_ROWS = 96,
    MOST_CUTS = 8, /* of the rows and keys of a gradient */
};

/* ---- cutting ---- */

struct range {
    int64_t first, n;
};

/* Part `i` of `count`, as even as whole granules allow; may be empty. */
static struct range part_of(int64_t length, int64_t granule, int64_t count, int64_t i)
{
    int64_t granules = (length + granule - 1) / granule;
    int64_t first = granules * i / count * granule;
    int64_t end = granules * (i + 1) / count * granule;
    end = end < length ? end : length;
    return (struct range){first, end > first ? end - first : 0};
}

/* An axis of length 1 stands for all places: it is the whole axis, or a mask's. */
static void cut(struct cp_view *view, int axis, struct range range)
{
    if (view->data != NULL && view->n[axis] != 1) {
        view->data += range.first * view->stride[axis];
        view->n[axis] = range.n;
    }
}

static void cut_panels(struct cp_view *view, const struct cp_panel *panel,
                       struct range rows)
{
    view->data += rows.first * panel->row_bytes;
    view->n[1] = rows.n;
}

static struct range one(int64_t first)
{
    return (struct range){first, 1};
}

static int64_t at_most(int64_t count, int64_t most)
{
    most = most < 1 ? 1 : most;
    return count < most ? count : most;
}

/* Parts of an axis of `length` in each of `units`, so that there are `wanted` pieces; each
 * with `least` of the axis. */
static int64_t parts_for(int64_t wanted, int64_t units, int64_t length, int64_t least)
{
    int64_t parts = units > 0 ? (wanted + units - 1) / units : 1;
    return at_most(parts, length / least);
}

static int64_t wanted_pieces(const struct cp_spread *spread, double operations)
{
    int64_t wanted = (int64_t)cp_pool_threads(spread->pool) * PIECES;
    return at_most(wanted, (int64_t)(operations / piece_operations));
}

static int64_t wanted_of_bytes(const struct cp_spread *spread,
                               const struct cp_view *view)
{
    int64_t wanted = (int64_t)cp_pool_threads(spread->pool) * MEMORY_PIECES;
    int64_t bytes = cp_view_count(view) * cp_dtype_bytes(view->dtype);
    return at_most(wanted, bytes / piece_bytes);
}

/* Of (batch, rows, heads): the last axis is what kernels and copies go along. */
static int longest_axis(const struct cp_view *view)
{
    int longest = 0;
    for (int axis = 1; axis < CP_AXES - 1; axis++) {
        longest = view->n[axis] > view->n[longest] ? axis : longest;
    }
    return longest;
}

static bool is_alone(const struct cp_spread *spread)
{
    return cp_pool_threads(spread->pool) == 1;
}

static double operations_of(const struct cp_view *q, const struct cp_view *k,
                            const struct cp_view *v)
{
    return 2.0 * (double)q->n[0] * (double)q->n[1] * (double)q->n[2] * (double)k->n[1] *
           (double)(k->n[3] + v->n[3]);
}

static void *scratch_of(const struct cp_spread *spread, void *scratch, int worker)
{
    return (char *)scratch + worker * spread->scratch_bytes;
}

/* ---- attend and finish ---- */

/* Piece numbers as (batch, head, part of the rows). */
struct rows_job {
    const struct cp_spread *spread;
    const void *args;
    struct cp_stream *stream;
    int64_t heads, rows, granule, parts;
};

struct place_of_rows {
    int64_t batch, head;
    struct range rows;
};

static struct place_of_rows rows_of(const struct rows_job *job, int64_t piece)
{
    return (struct place_of_rows){
        .batch = piece / job->parts / job->heads,
        .head = piece / job->parts % job->heads,
        .rows = part_of(job->rows, job->granule, job->parts, piece % job->parts),
    };
}

static void cut_state(const struct cp_spread *spread, struct cp_view *state,
                      const struct place_of_rows *at)
{
    cut(state, 0, one(at->batch));
    cut(state, 2, one(at->head));
    cut_panels(state, &spread->format->state, at->rows);
}

/* (batch, rows, heads, ...) */
static void cut_rows(struct cp_view *view, const struct place_of_rows *at)
{
    cut(view, 0, one(at->batch));
    cut(view, 1, at->rows);
    cut(view, 2, one(at->head));
}

static enum cp_code attend_piece(void *arg, int64_t piece, int worker)
{
    const struct rows_job *job = arg;
    struct cp_attend_args args = *(const struct cp_attend_args *)job->args;
    struct cp_place *place = &args.place;
    struct place_of_rows at = rows_of(job, piece);
    int64_t kv_head = cp_place_kv_head(place, at.head);
    if (at.rows.n == 0) {
        return CP_OK;
    }
    cut_rows(&args.q, &at);
    cut_rows(&args.out, &at);
    cut_rows(&args.lse, &at);
    cut_state(job->spread, &args.state, &at);
    for (int i = 0; i < 2; i++) {
        struct cp_view *view = i == 0 ? &args.k : &args.v;
        cut(view, 0, one(at.batch));
        cut(view, 2, one(kv_head));
    }
    cut(&args.mask, 0, one(at.batch));
    cut(&args.mask, 1, one(at.head));
    cut(&args.mask, 2, at.rows);
    place->q_first += at.rows.first;
    place->head_first += at.head;
    place->kv_head_first += kv_head;
    args.scratch = scratch_of(job->spread, args.scratch, worker);
    return job->spread->kernel->attend(&args, job->stream);
}

enum cp_code cp_spread_attend(const struct cp_spread *spread,
                              const struct cp_attend_args *args,
                              struct cp_stream *stream)
{
    const struct cp_view *q = &args->q;
    double operations = operations_of(q, &args->k, &args->v);
    if (is_alone(spread) || operations < 2 * piece_operations) {
        return spread->kernel->attend(args, stream);
    }
    struct rows_job job = {.spread = spread,
                           .args = args,
                           .stream = stream,
                           .heads = q->n[2],
                           .rows = q->n[1],
                           .granule = spread->format->state.row_align};
    job.parts = parts_for(wanted_pieces(spread, operations), q->n[0] * q->n[2], q->n[1],
                          LEAST_ROWS);
    return cp_pool_run(spread->pool, q->n[0] * q->n[2] * job.parts, attend_piece, &job);
}

static enum cp_code finish_piece(void *arg, int64_t piece, int worker)
{
    const struct rows_job *job = arg;
    struct cp_finish_args args = *(const struct cp_finish_args *)job->args;
    struct place_of_rows at = rows_of(job, piece);
    (void)worker;
    if (at.rows.n == 0) {
        return CP_OK;
    }
    cut_state(job->spread, &args.state, &at);
    cut_rows(&args.out, &at);
    cut_rows(&args.lse, &at);
    return job->spread->kernel->finish(&args, job->stream);
}

enum cp_code cp_spread_finish(const struct cp_spread *spread,
                              const struct cp_finish_args *args,
                              struct cp_stream *stream)
{
    const struct cp_view *out = &args->out;
    int64_t wanted = wanted_of_bytes(spread, out);
    if (is_alone(spread) || wanted == 1) {
        return spread->kernel->finish(args, stream);
    }
    struct rows_job job = {.spread = spread,
                           .args = args,
                           .stream = stream,
                           .heads = out->n[2],
                           .rows = out->n[1],
                           .granule = spread->format->state.row_align};
    job.parts = parts_for(wanted, out->n[0] * out->n[2], out->n[1], LEAST_ROWS);
    return cp_pool_run(spread->pool, out->n[0] * out->n[2] * job.parts, finish_piece,
                       &job);
}

/* ---- delta ---- */

struct delta_job {
    const struct cp_spread *spread;
    const struct cp_delta_args *args;
    struct cp_stream *stream;
    int axis;
    int64_t parts;
};

static enum cp_code delta_piece(void *arg, int64_t piece, int worker)
{
    const struct delta_job *job = arg;
    struct cp_delta_args args = *job->args;
    struct range range = part_of(args.out.n[job->axis], 1, job->parts, piece);
    (void)worker;
    cut(&args.out, job->axis, range);
    cut(&args.dout, job->axis, range);
    cut(&args.dlse, job->axis, range);
    cut(&args.delta, job->axis, range);
    return job->spread->kernel->delta(&args, job->stream);
}

enum cp_code cp_spread_delta(const struct cp_spread *spread,
                             const struct cp_delta_args *args, struct cp_stream *stream)
{
    struct delta_job job = {.spread = spread,
                            .args = args,
                            .stream = stream,
                            .axis = longest_axis(&args->out)};
    job.parts = at_most(wanted_of_bytes(spread, &args->out), args->out.n[job.axis]);
    return is_alone(spread) || job.parts == 1
               ? spread->kernel->delta(args, stream)
               : cp_pool_run(spread->pool, job.parts, delta_piece, &job);
}

/* ---- grad ---- */

struct grad_job {
    const struct cp_spread *spread;
    const struct cp_grad_args *args;
    struct cp_stream *stream;
    int64_t cuts; /* of the rows, and of the keys */
    int64_t turn; /* from 0 to cuts - 1 */
};

static enum cp_code grad_piece(void *arg, int64_t piece, int worker)
{
    const struct grad_job *job = arg;
    struct cp_grad_args args = *job->args;
    int64_t unit = piece / job->cuts, i = piece % job->cuts;
    int64_t batch = unit / args.k.n[2], kv_head = unit % args.k.n[2];
    int64_t granule = job->spread->format->state.row_align;
    int64_t head = 0;
    int64_t heads_end = cp_place_heads(&args.place, args.q.n[2], kv_head, &head);
    const struct range heads = {head, heads_end - head};
    struct range rows = part_of(args.q.n[1], granule, job->cuts, i);
    struct range keys = part_of(args.k.n[1], job->spread->format->k.row_align,
                                job->cuts, (i + job->turn) % job->cuts);
    struct cp_view *const of_rows[] = {&args.q, &args.dout, &args.lse, &args.delta,
                                       &args.dq};
    struct cp_view *const of_keys[] = {&args.k, &args.v, &args.dk, &args.dv};
    if (heads.n <= 0 || rows.n == 0 || keys.n == 0) {
        return CP_OK;
    }
    for (size_t j = 0; j < sizeof of_rows / sizeof of_rows[0]; j++) {
        cut(of_rows[j], 0, one(batch));
        cut(of_rows[j], 1, rows);
        cut(of_rows[j], 2, heads);
    }
    for (size_t j = 0; j < sizeof of_keys / sizeof of_keys[0]; j++) {
        cut(of_keys[j], 0, one(batch));
        cut(of_keys[j], 1, keys);
        cut(of_keys[j], 2, one(kv_head));
    }
    cut(&args.mask, 0, one(batch));
    cut(&args.mask, 1, heads);
    cut(&args.mask, 2, rows);
    cut(&args.mask, 3, keys);
    args.place.q_first += rows.first;
    args.place.k_first += keys.first;
    args.place.head_first += heads.first;
    args.place.kv_head_first += kv_head;
    args.scratch = scratch_of(job->spread, args.scratch, worker);
    return job->spread->kernel->grad(&args, job->stream);
}

/* The fewest cuts that keep nearly all threads busy: each one packs rows and keys anew. */
static int64_t cuts_for(const struct cp_spread *spread, const struct cp_grad_args *args,
                        double operations)
{
    int64_t threads = cp_pool_threads(spread->pool);
    int64_t units = args->k.n[0] * args->k.n[2];
    int64_t rows = args->q.n[1], keys = args->k.n[1];
    int64_t shorter = rows < keys ? rows : keys;
    int64_t most = at_most(MOST_CUTS, shorter / LEAST_ROWS);
    int64_t best = 1;
    double best_share = 0.0;
    for (int64_t cuts = 1; cuts <= most; cuts++) {
        int64_t pieces = units * cuts;
        int64_t rounds = (pieces + threads - 1) / threads;
        double share = (double)pieces / (double)(rounds * threads);
        bool is_worth_it = operations / (double)(pieces * cuts) >= piece_operations;
        if (share > best_share + 0.05 && (cuts == 1 || is_worth_it)) {
            best = cuts;
            best_share = share;
        }
    }
    return best;
}

enum cp_code cp_spread_grad(const struct cp_spread *spread,
                            const struct cp_grad_args *args, struct cp_stream *stream)
{
    double operations = 2.5 * operations_of(&args->q, &args->k, &args->v);
    if (is_alone(spread) || operations < 2 * piece_operations) {
        return spread->kernel->grad(args, stream);
    }
    struct grad_job job = {.spread = spread,
                           .args = args,
                           .stream = stream,
                           .cuts = cuts_for(spread, args, operations)};
    for (; job.turn < job.cuts; job.turn++) {
        CP_TRY(cp_pool_run(spread->pool, args->k.n[0] * args->k.n[2] * job.cuts,
                           grad_piece, &job));
    }
    return CP_OK;
}

/* ---- pack ---- */

struct pack_job {
    enum cp_code (*pack)(const struct cp_view *dst, const struct cp_view *src,
                         struct cp_stream *stream);
    const struct cp_panel *panel;
    const struct cp_view *dst, *src;
    struct cp_stream *stream;
    int64_t parts;
};

static enum cp_code pack_piece(void *arg, int64_t piece, int worker)
{
    const struct pack_job *job = arg;
    struct cp_view dst = *job->dst, src = *job->src;
    int64_t unit = piece / job->parts, heads = src.n[2];
    struct range keys =
        part_of(src.n[1], job->panel->row_align, job->parts, piece % job->parts);
    (void)worker;
    if (keys.n == 0) {
        return CP_OK;
    }
    cut(&src, 0, one(unit / heads));
    cut(&src, 1, keys);
    cut(&src, 2, one(unit % heads));
    cut(&dst, 0, one(unit / heads));
    cut(&dst, 2, one(unit % heads));
    cut_panels(&dst, job->panel, keys);
    return job->pack(&dst, &src, job->stream);
}

enum cp_code cp_spread_pack(const struct cp_spread *spread, bool is_key,
                            const struct cp_view *dst, const struct cp_view *src,
                            struct cp_stream *stream)
{
    struct pack_job job = {
        .pack = is_key ? spread->kernel->pack_k : spread->kernel->pack_v,
        .panel = is_key ? &spread->format->k : &spread->format->v,
        .dst = dst,
        .src = src,
        .stream = stream,
    };
    int64_t wanted = wanted_of_bytes(spread, src);
    if (is_alone(spread) || wanted == 1) {
        return job.pack(dst, src, stream);
    }
    job.parts = parts_for(wanted, src->n[0] * src->n[2], src->n[1], LEAST_ROWS);
    return cp_pool_run(spread->pool, src->n[0] * src->n[2] * job.parts, pack_piece,
                       &job);
}

/* ---- memory ---- */

struct move_job {
    enum cp_code (*move)(struct cp_device *device, const struct cp_view *dst,
                         const struct cp_view *src, struct cp_stream *stream);
    struct cp_device *device;
    const struct cp_view *dst, *src;
    struct cp_stream *stream;
    int axis;
    int64_t parts;
};

static enum cp_code move_piece(void *arg, int64_t piece, int worker)
{
    const struct move_job *job = arg;
    struct cp_view dst = *job->dst, src = *job->src;
    struct range range = part_of(dst.n[job->axis], 1, job->parts, piece);
    (void)worker;
    cut(&dst, job->axis, range);
    cut(&src, job->axis, range);
    return job->move(job->device, &dst, &src, job->stream);
}

static enum cp_code spread_move(const struct cp_spread *spread, struct move_job *job)
{
    const struct cp_view *dst = job->dst;
    job->axis = longest_axis(dst);
    job->parts = at_most(wanted_of_bytes(spread, dst), dst->n[job->axis]);
    if (is_alone(spread) || job->parts == 1) {
        return job->move(job->device, dst, job->src, job->stream);
    }
    return cp_pool_run(spread->pool, job->parts, move_piece, job);
}

enum cp_code cp_spread_copy(const struct cp_spread *spread,
                            const struct cp_copy *copies, int count,
                            struct cp_stream *stream)
{
    if (is_alone(spread)) {
        return spread->device->ops->copy(spread->device, copies, count, stream);
    }
    for (int i = 0; i < count; i++) {
        struct move_job job = {.move = cp_device_copy,
                               .device = spread->device,
                               .dst = &copies[i].dst,
                               .src = &copies[i].src,
                               .stream = stream};
        CP_TRY(spread_move(spread, &job));
    }
    return CP_OK;
}

enum cp_code cp_spread_add(const struct cp_spread *spread, const struct cp_view *dst,
                           const struct cp_view *src, struct cp_stream *stream)
{
    struct move_job job = {.move = spread->device->ops->add,
                           .device = spread->device,
                           .dst = dst,
                           .src = src,
                           .stream = stream};
    return spread_move(spread, &job);
}

struct zero_job {
    struct cp_device *device;
    char *data;
    int64_t bytes;
    struct cp_stream *stream;
    int64_t parts;
};

static enum cp_code zero_piece(void *arg, int64_t piece, int worker)
{
    const struct zero_job *job = arg;
    struct range range = part_of(job->bytes, CP_PANEL_ALIGN, job->parts, piece);
    (void)worker;
    return job->device->ops->zero(job->device, job->data + range.first, (size_t)range.n,
                                  job->stream);
}

enum cp_code cp_spread_zero(const struct cp_spread *spread, void *data, int64_t bytes,
                            struct cp_stream *stream)
{
    struct zero_job job = {
        .device = spread->device, .data = data, .bytes = bytes, .stream = stream};
    job.parts = at_most((int64_t)cp_pool_threads(spread->pool) * MEMORY_PIECES,
                        bytes / piece_bytes);
    return is_alone(spread)
               ? spread->device->ops->zero(spread->device, data, (size_t)bytes, stream)
               : cp_pool_run(spread->pool, job.parts, zero_piece, &job);
}
