/* Looking at schedules, and freeing them. */
#include "schedule/schedule.h"

#include <inttypes.h>

#include "base/mem.h"

static const char *const step_names[CP_STEP_OPS] = {
    [CP_STEP_COPY] = "COPY",       [CP_STEP_REDUCE] = "REDUCE",
    [CP_STEP_ZERO] = "ZERO",       [CP_STEP_PACK] = "PACK",
    [CP_STEP_PUBLISH] = "PUBLISH", [CP_STEP_AWAIT] = "AWAIT",
    [CP_STEP_SEND] = "SEND",       [CP_STEP_RECV] = "RECV",
    [CP_STEP_ATTEND] = "ATTEND",   [CP_STEP_FINISH] = "FINISH",
    [CP_STEP_DELTA] = "DELTA",     [CP_STEP_GRAD] = "GRAD",
};
static const char *const lane_names[CP_LANES] = {"in", "compute", "out"};
static const char *const kind_names[] = {"input", "output", "window", "scratch"};
static const char *const layout_names[] = {"plain", "packed k", "packed v", "state"};
static const char *const role_names[CP_TENSORS] = {
    "q",    "k",  "v",  "mask", "out",   "lse",   "dout",
    "dlse", "dq", "dk", "dv",   "delta", "whole", "share"};

const char *cp_transport_name(enum cp_transport transport)
{
    static const char *const names[] = {[CP_PULL] = "pull",
                                        [CP_FETCH] = "fetch",
                                        [CP_PUSH] = "push",
                                        [CP_TWO_SIDED] = "two-sided"};
    return transport <= CP_TWO_SIDED ? names[transport] : "?";
}

const char *cp_step_name(enum cp_step_op op)
{
    return op < CP_STEP_OPS ? step_names[op] : "?";
}

const struct cp_panel *cp_schedule_panel(const struct cp_plan *plan,
                                         enum cp_layout layout)
{
    switch (layout) {
    case CP_LAYOUT_K:
        return &plan->format.k;
    case CP_LAYOUT_V:
        return &plan->format.v;
    case CP_LAYOUT_STATE:
        return &plan->format.state;
    case CP_LAYOUT_PLAIN:
        break;
    }
    return NULL;
}

int64_t cp_box_bytes(const struct cp_schedule *schedule, const struct cp_box *box)
{
    if (box->buffer == CP_NO_BUFFER) {
        return 0;
    }
    const struct cp_buffer *buffer = &schedule->buffers[box->buffer];
    return buffer->layout == CP_LAYOUT_PLAIN
               ? box->n[0] * box->n[1] * box->n[2] * box->n[3] *
                     cp_dtype_bytes((enum cp_dtype)buffer->dtype)
               : buffer->stride_bytes[2] * box->n[2] * box->n[0];
}

void cp_schedule_destroy(struct cp_schedule **schedule)
{
    if (*schedule != NULL) {
        cp_mem_destroy(&(*schedule)->buffers);
        cp_mem_destroy(&(*schedule)->steps);
        cp_mem_destroy(schedule);
    }
}

static void print_buffer(const struct cp_buffer *buffer, int32_t number, FILE *file)
{
    fprintf(file,
            "buffer %d: %s of rank %d, %s, %s %s, %" PRId64 "x%" PRId64 "x%" PRId64
            "x%" PRId64,
            number, kind_names[buffer->kind], buffer->owner, role_names[buffer->role],
            cp_dtype_name((enum cp_dtype)buffer->dtype), layout_names[buffer->layout],
            buffer->n[0], buffer->n[1], buffer->n[2], buffer->n[3]);
    if (buffer->kind == CP_BUFFER_WINDOW || buffer->kind == CP_BUFFER_SCRATCH) {
        fprintf(file, ", bytes %" PRId64 " to %" PRId64, buffer->offset_bytes,
                buffer->offset_bytes + buffer->bytes);
    }
    fputc('\n', file);
}

static void print_box(const struct cp_box *box, FILE *file)
{
    fprintf(file, " %d[", box->buffer);
    for (int axis = 0; axis < CP_AXES; axis++) {
        fprintf(file, "%s%" PRId64 "+%" PRId64, axis > 0 ? ", " : "", box->first[axis],
                box->n[axis]);
    }
    fputc(']', file);
}

static void print_step(const struct cp_step *step, int32_t number, FILE *file)
{
    fprintf(file, "step %d: %s %s", number, lane_names[step->lane],
            cp_step_name((enum cp_step_op)step->op));
    for (int lane = 0; lane < CP_LANES; lane++) {
        if (step->after[lane] > 0) {
            fprintf(file, " after %s %d", lane_names[lane], step->after[lane]);
        }
    }
    switch ((enum cp_step_op)step->op) {
    case CP_STEP_PUBLISH:
        fprintf(file, " signal %d value %u", step->signal, step->value);
        break;
    case CP_STEP_AWAIT:
        fprintf(file, " rank %d signal %d value %u", step->peer, step->signal,
                step->value);
        break;
    case CP_STEP_SEND:
    case CP_STEP_RECV:
        fprintf(file, " rank %d group %d", step->peer, step->group);
        break;
    case CP_STEP_ATTEND:
    case CP_STEP_GRAD:
        fprintf(file,
                " rows from %" PRId64 ", keys from %" PRId64 ", heads from %" PRId64
                ", kv heads from %" PRId64 "%s%s",
                step->q_first, step->k_first, step->head_first, step->kv_head_first,
                step->is_causal ? ", causal" : "", step->is_first ? ", first" : "");
        break;
    case CP_STEP_COPY:
    case CP_STEP_REDUCE:
    case CP_STEP_ZERO:
    case CP_STEP_PACK:
    case CP_STEP_FINISH:
    case CP_STEP_DELTA:
    case CP_STEP_OPS:
        break;
    }
    for (int arg = 0; arg < CP_STEP_ARGS; arg++) {
        if (step->arg[arg].buffer != CP_NO_BUFFER) {
            print_box(&step->arg[arg], file);
        }
    }
    fputc('\n', file);
}

void cp_schedule_print(const struct cp_schedule *schedule, FILE *file)
{
    fprintf(file,
            "schedule of rank %d: window %" PRId64 " bytes, workspace %" PRId64
            " bytes\n",
            schedule->rank, schedule->window_bytes, schedule->scratch_bytes);
    for (int32_t number = 0; number < schedule->buffer_count; number++) {
        print_buffer(&schedule->buffers[number], number, file);
    }
    for (int32_t number = 0; number < schedule->step_count; number++) {
        print_step(&schedule->steps[number], number, file);
    }
}
