/* A context: one rank's end of a group that computes together. It owns the
 * communicator, the gate, the plans and the workspace, and takes every call through the
 * same steps: gate, agreement, plan and room, run.
 *
 * A call is three functions, or four where an output's size depends on all ranks, so
 * that it can be made in between:
 *
 *     cp_context_describe  on which stream, and what the context knows of the call
 *     cp_context_begin     all ranks agree, or all get the same error and may go on
 *     cp_context_confirm   (gather) all ranks have their output, or the same again
 *     cp_context_execute   data moves; an error breaks the context
 *
 * After a successful begin or confirm, the next one or cp_context_abandon must follow.
 * One thread at a time: a second one gets CP_ERR_RUNTIME. In a forked child every
 * function but destroy gives CP_ERR_RUNTIME. */
#ifndef CP_EXEC_CONTEXT_H
#define CP_EXEC_CONTEXT_H

#include "base/record.h"
#include "comm/comm.h"
#include "control/gate.h"
#include "exec/accelerator.h"
#include "exec/run.h"

/* How a config spells enum cp_rotate. */
enum { CP_ROTATES = CP_ROTATE_ALLTOALL + 1 };
extern const char *const cp_rotate_names[CP_ROTATES];

/* What a context is about; equal on all ranks. */
struct cp_context_config {
    int ring_degree, ulysses_degree;
    int32_t variant;     /* enum cp_variant */
    int32_t rotate;      /* enum cp_rotate */
    int32_t head_chunks; /* in which attention cuts the heads; 0: as many as pay */
    double timeout;      /* seconds: the longest wait for a living peer */
};

struct cp_context;
struct cp_root;

/* Joins the other ranks: processes that call with the same key. Waits at least 60 s for
 * them. */
struct cp_join_args {
    struct cp_context_config config;
    const char *key; /* names the job, the members and which of their contexts it is */
    int rank, world;
    /* (optional) Where ranks of several hosts meet (control/meet_hosts.h). NULL: all are
     * on this one. Equal on all ranks. */
    const struct cp_root *root;
    int threads;     /* that calls on the host may use, from 1 to CP_POOL_MOST */
    const char *isa; /* value of CP_ATTN_ISA, or NULL */
    const char *head_chunks; /* of CP_ATTN_HEAD_CHUNKS: a number, see the config's */
    const char *trace; /* of CP_ATTN_TRACE: the file that gets this rank's spans */
    const char *debug; /* of CP_ATTN_DEBUG: seconds, see cp_watch.debug_s */
    /* (optional) What this rank found wrong already: all ranks get it, as they get a
     * difference between their configs. `config` then counts for nothing. */
    const struct cp_status *error;
    enum cp_code (*interrupt)(void *arg); /* (optional) see base/watch.h */
    void *interrupt_arg;
};
CP_NODISCARD enum cp_code cp_context_join(const struct cp_join_args *args,
                                          struct cp_context **out);

/* What a context works with, on the host. */
struct cp_context_parts {
    struct cp_gate gate;
    struct cp_comm *comm;
    struct cp_device *device;
    struct cp_kernel_list kernels;
    int threads;             /* that calls may use, the caller's with them; 0: one */
    struct cp_boards boards; /* (optional) */
};

/* The same from parts that exist already, for ranks that are threads. `comm` is taken,
 * unless its table is of another version; what else the parts refer to must outlive the
 * context. */
CP_NODISCARD enum cp_code cp_context_create(const struct cp_context_config *config,
                                            const struct cp_context_parts *parts,
                                            struct cp_context **out);

/* From now on calls may be on that device too (record.call.place); the first of them
 * connects the ranks' devices. CP_ERR_VALUE where there is no such device, or the context works on another one already.
 * `accelerator` is borrowed and must outlive the context; what the next call lacks comes from `lender`, and what it
 * computes from `package`, which may be NULL and must outlive the call. Between enter and leave. */
CP_NODISCARD enum cp_code cp_context_use(struct cp_context *context,
                                         const struct cp_accelerator *accelerator,
                                         int ordinal, const struct cp_lender *lender,
                                         const struct cp_package *package);

/* Are the ranks' devices connected? */
bool cp_context_is_connected(const struct cp_context *context);

/* By what they may be connected, until they are; at first by nothing. As for use. */
void cp_context_set_group(struct cp_context *context, const struct cp_group *group);

/* Hands the context something to close after its communicator. */
void cp_context_stand_on(struct cp_context *context, void *parts,
                         void (*close_parts)(void *parts));

/* Closes; accepts NULL in it, leaves NULL; waits for nobody, and for a device that does not
 * come to an end no longer than seconds. */
void cp_context_destroy(struct cp_context **context);

/* A caller with several threads holds the context from enter to leave, around describe,
 * begin, execute and abandon, and enters before destroy. CP_ERR_RUNTIME where another
 * call holds it. */
CP_NODISCARD enum cp_code cp_context_enter(struct cp_context *context);
void cp_context_leave(struct cp_context *context);

/* A call on `stream`, the caller's on an asynchronous device, where all that the call does
 * is enqueued; NULL on the host. `place` must be set. Fills the fields of a record that
 * the context knows (variant, degrees, rotation), whether the stream is being captured and,
 * for attention, the packed format of the kernel for `place`, `backend`, `dtype`,
 * `head_dim`, `value_dim`, which must be set. Errors as struct cp_kernel_list. */
CP_NODISCARD enum cp_code cp_context_describe(struct cp_context *context,
                                              struct cp_stream *stream,
                                              struct cp_record *record);

/* The gate and all that follows until data moves. `mine->status` may carry an error
 * that this rank found in its own arguments; it comes back on all ranks. On success
 * `plan` (optional) is what was agreed on: borrowed, valid until the call ends.
 * CP_OP_AGREE and CP_OP_SHARD end here: no execute follows. */
CP_NODISCARD enum cp_code cp_context_begin(struct cp_context *context,
                                           const struct cp_record *mine,
                                           const struct cp_plan **plan);

/* After begin, where more memory is needed than could be reserved before it, by all
 * ranks alike. `error`: why this rank has not got it, or NULL; it comes back on all
 * ranks, and the call is over. */
CP_NODISCARD enum cp_code cp_context_confirm(struct cp_context *context,
                                             const struct cp_status *error);

/* True when the error that begin or confirm just returned is the one that this rank
 * itself brought. */
bool cp_context_error_is_own(const struct cp_context *context);

/* Moves and computes, on the stream that was described. `tensors` by role, data NULL
 * where the call has none. */
CP_NODISCARD enum cp_code cp_context_execute(struct cp_context *context,
                                             const struct cp_view tensors[CP_TENSORS]);

/* dst = src on the device of the call that was begun last, for a shard; there is one. */
CP_NODISCARD enum cp_code cp_context_copy(struct cp_context *context,
                                          const struct cp_view *dst,
                                          const struct cp_view *src);

/* Gives a begun call up: the context is broken on all ranks, with the calling thread's
 * last error. */
void cp_context_abandon(struct cp_context *context);

/* What the context holds for its calls, wherever they are, but for what is the graphs' that
 * calls were captured in. It has grown to what the largest call so far needs, and stays
 * until the context goes. */
struct cp_context_memory {
    size_t workspace_bytes; /* private */
    size_t window_bytes;    /* what others may read */
};
struct cp_context_memory cp_context_memory(const struct cp_context *context);

/* CP_OK, or why the context is broken. */
CP_NODISCARD enum cp_code cp_context_check(const struct cp_context *context);

#endif
