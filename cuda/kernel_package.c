/* A block is cut into parts that packages take (causal_cut.h, group_run.h); each is answered
 * and merged into the plain kernel's state or the result, or its gradients added to the
 * sums. */
#include "kernel_package.h"

#include "base/checked.h"
#include "causal_cut.h"
#include "cuda_api.h"
#include "group_run.h"
#include "kernel/package.h"
#include "kernel_cuda.h"
#include "kernel_own.h"

static bool is_available(void)
{
    return cp_kernel_cuda_plain_ops.is_available();
}

static enum cp_code describe(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                             struct cp_format *out)
{
    return cp_kernel_cuda_plain_ops.describe(dtype, head_dim, value_dim, out);
}

/* Rows that see all keys, or the diagonal, by heads in even groups. */
struct part {
    struct cp_piece piece;
    struct cp_group_run run;
};

enum { MOST_PARTS = CP_MOST_PIECES * CP_MOST_RUNS };

/* Their number; none where q or k are empty. `has_blind`: as of cp_causal_cut. */
static int cut(const struct cp_place *place, const struct cp_view *q,
               const struct cp_view *k, bool has_blind, struct part parts[MOST_PARTS])
{
    struct cp_piece pieces[CP_MOST_PIECES];
    bool is_empty = cp_view_count(q) == 0 || cp_view_count(k) == 0;
    int pieces_count =
        is_empty ? 0 : cp_causal_cut(place, q->n[1], k->n[1], has_blind, pieces);
    int count = 0;
    for (int i = 0; i < pieces_count; i++) {
        for (int64_t head = 0; head < q->n[2]; count++) {
            parts[count] = (struct part){
                .piece = pieces[i],
                .run = cp_group_run_at(place, q->n[2], head),
            };
            head += parts[count].run.heads;
        }
    }
    return count;
}

static struct cp_view cut_rows(const struct cp_view *view, const struct part *part)
{
    const int64_t first[CP_AXES] = {0, part->piece.row, part->run.head, 0};
    const int64_t n[CP_AXES] = {view->n[0], part->piece.rows, part->run.heads,
                                view->n[3]};
    return cp_view_box(view, first, n);
}

static struct cp_view cut_keys(const struct cp_view *view, const struct part *part)
{
    const int64_t first[CP_AXES] = {0, part->piece.key, part->run.kv_head, 0};
    const int64_t n[CP_AXES] = {view->n[0], part->piece.keys, part->run.kv_heads,
                                view->n[3]};
    return cp_view_box(view, first, n);
}

/* ---- attend ---- */

/* A part of the block as one of its own. */
static struct cp_attend_args attend_args(const struct cp_attend_args *args,
                                         const struct part *part)
{
    struct cp_attend_args own = *args;
    own.q = cut_rows(&args->q, part);
    own.k = cut_keys(&args->k, part);
    own.v = cut_keys(&args->v, part);
    own.state = cp_kernel_cuda_state(&args->state, part->piece.row, part->run.head);
    own.state.n[1] = part->piece.rows;
    own.state.n[2] = part->run.heads;
    own.out = cut_rows(&args->out, part);
    own.lse = cut_rows(&args->lse, part);
    own.place.q_first += part->piece.row;
    own.place.k_first += part->piece.key;
    own.place.head_first += part->run.head;
    own.place.kv_head_first += part->run.kv_head;
    cp_piece_ends(&own, &part->piece);
    return own;
}

/* Of the part alone. */
static enum cp_code answer_and_merge(const struct cp_attend_args *args,
                                     bool is_diagonal, struct cp_stream *stream)
{
    const struct cp_package *package = args->package;
    const struct cp_package_block block = {
        .q = args->q,
        .k = args->k,
        .v = args->v,
        .scale = args->scale,
        .is_causal = is_diagonal,
    };
    struct cp_package_answer answer;
    CP_TRY(package->answer(package, &block, &answer));
    const struct cp_merge_args merge = {
        .out = answer.out,
        .lse = answer.lse,
        .state = args->state,
        .is_first = args->is_first,
        .result = args->out,
        .result_lse = args->lse,
    };
    enum cp_code code = cp_cuda_merge(&merge, stream);
    package->release(package, &answer.held);
    return code;
}

static enum cp_code attend(const struct cp_attend_args *args, struct cp_stream *stream)
{
    struct part parts[MOST_PARTS];
    bool has_blind = cp_piece_wants_blind(args);
    int count = cut(&args->place, &args->q, &args->k, has_blind, parts);
    if (count == 0 && has_blind) {
        return cp_kernel_own_attend(args, stream);
    }
    for (int i = 0; i < count; i++) {
        const struct cp_attend_args part = attend_args(args, &parts[i]);
        CP_TRY(parts[i].piece.keys == 0
                   ? cp_kernel_own_attend(&part, stream)
                   : answer_and_merge(&part, parts[i].piece.is_diagonal, stream));
    }
    return CP_OK;
}

/* ---- grad ---- */

/* A part's gradients, in the call's dtype, go into the sums. */
static enum cp_code add_grads(const struct cp_grad_args *args, const struct part *part,
                              const struct cp_package_grads *grads,
                              struct cp_stream *stream)
{
    struct cp_view dq = cut_rows(&args->dq, part);
    struct cp_view dk = cut_keys(&args->dk, part);
    struct cp_view dv = cut_keys(&args->dv, part);
    CP_TRY(cp_cuda_add(&dq, &grads->dq, stream));
    CP_TRY(cp_cuda_add(&dk, &grads->dk, stream));
    return cp_cuda_add(&dv, &grads->dv, stream);
}

static enum cp_code grad_part(const struct cp_grad_args *args, const struct part *part,
                              const struct cp_package_outcome *whole,
                              struct cp_stream *stream)
{
    const struct cp_package *package = args->package;
    const struct cp_package_block block = {
        .q = cut_rows(&args->q, part),
        .k = cut_keys(&args->k, part),
        .v = cut_keys(&args->v, part),
        .scale = args->scale,
        .is_causal = part->piece.is_diagonal,
    };
    const struct cp_package_outcome outcome = {
        .dout = cut_rows(&whole->dout, part),
        .out = cut_rows(&whole->out, part),
        .lse = cut_rows(&whole->lse, part),
    };
    struct cp_package_grads grads;
    CP_TRY(package->gradient(package, &block, &outcome, &grads));
    enum cp_code code = add_grads(args, part, &grads, stream);
    package->release(package, &grads.held);
    return code;
}

/* The stand-in for out, and behind it the lse as packages have it, (B, heads, rows). */
static void place_outcome(const struct cp_grad_args *args, char *room,
                          int64_t out_bytes, struct cp_package_outcome *outcome)
{
    const int64_t *n = args->dout.n;
    struct cp_view lse =
        cp_view_compact(room + out_bytes, args->lse.dtype, n[0], n[2], n[1], 1);
    *outcome = (struct cp_package_outcome){
        .dout = args->dout,
        .out = cp_view_compact(room, args->dout.dtype, n[0], n[1], n[2], n[3]),
        .lse = lse,
    };
    outcome->lse.n[1] = lse.n[2];
    outcome->lse.n[2] = lse.n[1];
    outcome->lse.stride[1] = lse.stride[2];
    outcome->lse.stride[2] = lse.stride[1];
}

static enum cp_code grad_parts(const struct cp_grad_args *args,
                               const struct part *parts, int count,
                               const struct cp_package_outcome *whole,
                               struct cp_stream *stream)
{
    const struct cp_stand_in_args stand_in = {
        .dout = args->dout,
        .lse = args->lse,
        .delta = args->delta,
        .out = whole->out,
        .lse_out = whole->lse,
    };
    CP_TRY(cp_cuda_stand_in(&stand_in, stream));
    for (int i = 0; i < count; i++) {
        CP_TRY(grad_part(args, &parts[i], whole, stream));
    }
    return CP_OK;
}

/* Where the lse has a gradient, delta has a part that no `out` can stand for: our own
 * kernels' gradient then. */
static enum cp_code grad(const struct cp_grad_args *args, struct cp_stream *stream)
{
    const struct cp_package *package = args->package;
    int64_t out_bytes = cp_round_up(
        cp_view_count(&args->dout) * cp_dtype_bytes(args->dout.dtype), CP_PANEL_ALIGN);
    int64_t lse_bytes = cp_view_count(&args->lse) * cp_dtype_bytes(args->lse.dtype);
    struct cp_package_outcome outcome;
    struct part parts[MOST_PARTS];
    int count = cut(&args->place, &args->q, &args->k, false, parts);
    char *room = NULL;
    void *held = NULL;
    if (args->has_dlse || count == 0) {
        return cp_kernel_own_grad(args, stream);
    }
    CP_TRY(package->room(package, out_bytes + lse_bytes, &room, &held));
    place_outcome(args, room, out_bytes, &outcome);
    enum cp_code code = grad_parts(args, parts, count, &outcome, stream);
    package->release(package, &held);
    return code;
}

const struct cp_kernel_ops cp_kernel_package_ops = {
    .name = "cuda_package",
    .abi = CP_KERNEL_ABI,
    .is_available = is_available,
    .describe = describe,
    .attend = attend,
    .finish = cp_cuda_finish,
    .delta = cp_cuda_delta,
    .grad = grad,
};
