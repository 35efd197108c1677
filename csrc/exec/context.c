/* One rank's end of a group: the steps that every call takes. */
#include "exec/context.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/mem.h"
#include "exec/plan_cache.h"
#include "exec/side.h"
#include "kernel/kernel.h"
#include "plan/agree.h"
#include "schedule/choose.h"

enum { SIDES = CP_ON_ACCELERATOR + 1 };

struct cp_context {
    struct cp_context_config config;
    struct cp_gate gate;
    struct cp_boards boards; /* as in struct cp_context_parts */
    int rank, world;
    struct cp_side sides[SIDES];              /* by enum cp_place_kind */
    const struct cp_accelerator *accelerator; /* NULL: none was asked for yet */
    struct cp_group group;                    /* to connect by */
    void (*close_parts)(
        void *parts); /* what a joined context stands on; NULL: the caller keeps it */
    void *parts;
    struct cp_record *records; /* (world), owned: of the call under way */
    struct cp_plan_cache plans;
    struct cp_plan_entry *call; /* begun, not executed; NULL: none */
    struct cp_side *side;       /* of the call begun last */
    void *room;                 /* owned: of a run, on the host */
    size_t room_bytes;
    bool is_own_error;
    pid_t pid;           /* of the process that made it */
    atomic_flag is_busy; /* a thread is in a call */
    char operation[64];  /* for messages: "attention, call 7" */
};

static enum cp_code check_abi(const char *kind, const char *name, uint32_t got,
                              uint32_t want)
{
    return got == want ? CP_OK
                       : cp_fail(CP_ERR_INTERNAL,
                                 "the %s \"%s\" was built for version %u of its "
                                 "interface, not %u",
                                 kind, name, (unsigned)got, (unsigned)want);
}

enum cp_code cp_context_create(const struct cp_context_config *config,
                               const struct cp_context_parts *parts,
                               struct cp_context **out)
{
    void *block = NULL;
    struct cp_context *context = NULL;
    struct cp_comm *comm = parts->comm;
    const struct cp_device_ops *device = parts->device->ops;
    /* A table of another version is not even closed: its places may mean other things. */
    CP_TRY(check_abi("communicator", comm->ops->name, comm->ops->abi, CP_COMM_ABI));
    enum cp_code code = CP_OK;
    CP_TRY_GOTO(code, check_abi("device", device->name, device->abi, CP_DEVICE_ABI),
                done);
    CP_TRY_GOTO(code, cp_mem_create(sizeof *context, "a context", &block), done);
    context = block;
    context->config = *config;
    context->gate = parts->gate;
    context->boards = parts->boards;
    context->rank = comm->rank;
    context->world = comm->world;
    context->sides[CP_ON_HOST] = (struct cp_side){
        .device = parts->device, .kernels = parts->kernels, .threads = parts->threads};
    context->side = &context->sides[CP_ON_HOST];
    context->pid = getpid();
    atomic_flag_clear(&context->is_busy);
    CP_TRY_GOTO(code,
                cp_mem_create((size_t)comm->world * sizeof *context->records,
                              "a context", &block),
                done);
    context->records = block;
done:
    if (code != CP_OK) {
        cp_mem_destroy(&context);
        comm->ops->close(&comm);
        return code;
    }
    context->sides[CP_ON_HOST].comm = comm;
    *out = context;
    return CP_OK;
}

enum cp_code cp_context_use(struct cp_context *context,
                            const struct cp_accelerator *accelerator, int ordinal,
                            const struct cp_lender *lender,
                            const struct cp_package *package)
{
    struct cp_side *side = &context->sides[CP_ON_ACCELERATOR];
    if (side->comm != NULL && side->ordinal != ordinal) {
        return cp_fail(CP_ERR_VALUE,
                       "this rank is connected by its device %d; a context works on "
                       "one device",
                       side->ordinal);
    }
    if (context->accelerator == NULL) {
        CP_TRY(check_abi("accelerator", accelerator->name, accelerator->abi,
                         CP_ACCELERATOR_ABI));
        context->accelerator = accelerator;
        side->kernels = accelerator->kernels;
    }
    if (side->comm == NULL) {
        CP_TRY(accelerator->check(ordinal));
        CP_TRY(accelerator->generation(ordinal, &side->generation));
        side->ordinal = ordinal;
    }
    side->lender = *lender;
    side->package = package;
    return CP_OK;
}

bool cp_context_is_connected(const struct cp_context *context)
{
    return context->sides[CP_ON_ACCELERATOR].comm != NULL;
}

void cp_context_set_group(struct cp_context *context, const struct cp_group *group)
{
    context->group = *group;
}

void cp_context_destroy(struct cp_context **context)
{
    struct cp_context *c = *context;
    if (c == NULL) {
        return;
    }
    cp_side_close(&c->sides[CP_ON_ACCELERATOR], c->config.timeout);
    if (c->sides[CP_ON_ACCELERATOR].device != NULL) {
        c->accelerator->close(&c->sides[CP_ON_ACCELERATOR].device);
    }
    cp_side_close(&c->sides[CP_ON_HOST], c->config.timeout);
    if (c->close_parts != NULL) {
        c->close_parts(c->parts);
    }
    cp_plan_cache_clear(&c->plans);
    cp_mem_destroy(&c->room);
    cp_mem_destroy(&c->records);
    cp_mem_destroy(context);
}

void cp_context_stand_on(struct cp_context *context, void *parts,
                         void (*close_parts)(void *parts))
{
    context->parts = parts;
    context->close_parts = close_parts;
}

static enum cp_code select_kernel(const struct cp_context *context,
                                  const struct cp_call *call,
                                  const struct cp_kernel_ops **kernel,
                                  struct cp_format *format)
{
    const struct cp_kernel_list *kernels = &context->sides[call->place].kernels;
    CP_TRY(kernels->select(kernels->limit, (enum cp_backend)call->backend,
                           (enum cp_dtype)call->dtype, call->head_dim, call->value_dim,
                           kernel, format));
    return check_abi("kernel", (*kernel)->name, (*kernel)->abi, CP_KERNEL_ABI);
}

enum cp_code cp_context_describe(struct cp_context *context, struct cp_stream *stream,
                                 struct cp_record *record)
{
    struct cp_side *side = &context->sides[record->call.place];
    record->call.variant = context->config.variant;
    record->call.rotate = context->config.rotate;
    record->call.ring_degree = context->config.ring_degree;
    record->call.ulysses_degree = context->config.ulysses_degree;
    if (cp_call_is_attention(&record->call)) {
        const struct cp_kernel_ops *kernel = NULL;
        struct cp_format format;
        CP_TRY(select_kernel(context, &record->call, &kernel, &format));
        record->call.format = format.id;
        record->sizes[CP_SIZE_HEAD_CHUNKS] = context->config.head_chunks;
        record->sizes[CP_SIZE_GENERATION] = side->generation;
    }
    if (!cp_side_is_host(side)) {
        CP_TRY(cp_side_look(side, context->accelerator, stream));
    }
    record->call.is_captured = side->capture != 0;
    return CP_OK;
}

static enum cp_code check_process(const struct cp_context *context)
{
    return context->pid == getpid()
               ? CP_OK
               : cp_fail(CP_ERR_RUNTIME,
                         "this process is a fork of the one that made the context; a "
                         "context "
                         "cannot be used after fork: make a new one in the child");
}

enum cp_code cp_context_enter(struct cp_context *context)
{
    /* acquire: pairs with the release in cp_context_leave. */
    if (atomic_flag_test_and_set_explicit(&context->is_busy, memory_order_acquire)) {
        /* In a forked child, the call may be one of the parent. */
        CP_TRY(check_process(context));
        return cp_fail(CP_ERR_RUNTIME,
                       "the context is busy with another call; a context serves one "
                       "thread at a time, so give each thread its own");
    }
    return CP_OK;
}

void cp_context_leave(struct cp_context *context)
{
    /* release: pairs with the acquire in cp_context_enter. */
    atomic_flag_clear_explicit(&context->is_busy, memory_order_release);
}

/* ---- the steps of begin ---- */

enum cp_code cp_context_check(const struct cp_context *context)
{
    CP_TRY(check_process(context));
    enum cp_code code = cp_watch_check(context->gate.watch);
    if (code != CP_OK) {
        char reason[CP_STATUS_TEXT];
        memcpy(reason, cp_last_error()->text, sizeof reason);
        return cp_fail_rank(CP_ERR_COMM, cp_last_error()->rank,
                            "the context is broken and must be closed: %.900s", reason);
    }
    return CP_OK;
}

static struct cp_recorder *recorder_of(const struct cp_context *context)
{
    return context->gate.watch->recorder;
}

/* The call is over. */
static void end_call(struct cp_context *context, enum cp_code code)
{
    context->call = NULL;
    if (context->side->capture != 0) {
        cp_side_end_captured(context->side);
    }
    cp_recorder_leave(recorder_of(context), code);
}

/* What a host reads in a window its cache keeps, and it may not write there; a device reaches
 * for it anew. */
static enum cp_transport transport_of(const struct cp_side *side)
{
    return !cp_comm_has_windows(side->comm)   ? CP_TWO_SIDED
           : cp_device_is_async(side->device) ? CP_PUSH
                                              : CP_PULL;
}

/* The plan, schedule and kernel of the records at hand. */
static enum cp_code make_entry(const struct cp_context *context,
                               struct cp_plan_entry *entry)
{
    const struct cp_call *call = &context->records[0].call;
    struct cp_format format = {0};
    enum cp_transport transport = transport_of(context->side);
    if (cp_call_is_attention(call)) {
        CP_TRY(select_kernel(context, call, &entry->kernel, &format));
    }
    CP_TRY(cp_plan_create(context->records, context->world, &format, &entry->plan));
    CP_TRY(cp_schedule_choose(entry->plan, transport));
    return cp_schedule_create(entry->plan, context->rank, transport, &entry->schedule);
}

static enum cp_code grow_room(struct cp_context *context, size_t bytes)
{
    void *bigger = NULL;
    if (bytes <= context->room_bytes) {
        return CP_OK;
    }
    CP_TRY(cp_mem_create(bytes, "messages", &bigger));
    cp_mem_destroy(&context->room);
    context->room = bigger;
    context->room_bytes = bytes;
    return CP_OK;
}

/* Room for what the schedule needs. */
static enum cp_code reserve(struct cp_context *context,
                            const struct cp_schedule *schedule)
{
    int threads = context->side->threads > 1 ? context->side->threads : 1;
    CP_TRY(grow_room(context, cp_run_room_bytes(schedule)));
    return cp_side_reserve(context->side,
                           (size_t)cp_run_workspace_bytes(schedule, threads),
                           (size_t)schedule->window_bytes, context->config.timeout);
}

struct cp_context_memory cp_context_memory(const struct cp_context *context)
{
    struct cp_context_memory memory = {0, 0};
    for (int place = 0; place < SIDES; place++) {
        memory.workspace_bytes += context->sides[place].workspace.bytes;
        memory.window_bytes += context->sides[place].window_bytes;
    }
    return memory;
}

static enum cp_code agree(struct cp_context *context, const struct cp_record *mine)
{
    enum cp_code code = cp_agree(context->records, context->world);
    context->is_own_error = code != CP_OK && mine->status.code != CP_OK &&
                            cp_last_error()->rank == context->rank;
    return code;
}

static void poison(struct cp_context *context)
{
    struct cp_status reason = *cp_last_error();
    if (reason.rank < 0) {
        reason.rank = context->rank;
    }
    if (reason.code == CP_ERR_INTERRUPTED) {
        reason.code =
            CP_ERR_COMM; /* only the interrupted rank raises KeyboardInterrupt */
    }
    for (int place = 0; place < SIDES; place++) {
        struct cp_comm *comm = context->sides[place].comm;
        if (comm != NULL) {
            comm->ops->poison(comm, &reason);
        }
    }
}

static enum cp_code exchange(struct cp_context *context, const struct cp_record *mine)
{
    return cp_gate_exchange(&context->gate, mine, context->records, context->operation,
                            cp_deadline_in(context->config.timeout));
}

/* The windows that all ranks have by now come into use. */
static enum cp_code attach(struct cp_context *context)
{
    struct cp_comm *comm = context->side->comm;
    enum cp_code code = comm->ops->attach != NULL ? comm->ops->attach(comm) : CP_OK;
    if (code != CP_OK) {
        poison(context);
    }
    return code;
}

/* A signature that is new needs a plan and room, and either may fail on one rank alone.
 * A second exchange tells all ranks whether all have them; what then goes wrong breaks
 * the context, since the others go on. It is new to all alike: what a cache holds follows
 * from the calls made so far, and those are the same everywhere. A call that is captured
 * needs room of its own, also where the plan is known. */
static enum cp_code prepare(struct cp_context *context, const struct cp_record *mine,
                            struct cp_plan_entry *known)
{
    struct cp_record ready = {.call = mine->call};
    struct cp_plan_entry entry = {.plan = NULL};
    memcpy(ready.sizes, mine->sizes, sizeof ready.sizes);
    cp_recorder_begin(recorder_of(context), "plan", -1, -1);
    enum cp_code code = known == NULL ? make_entry(context, &entry) : CP_OK;
    if (code == CP_OK) {
        code = reserve(context, known == NULL ? entry.schedule : known->schedule);
    }
    cp_recorder_end(recorder_of(context));
    if (code != CP_OK) {
        ready.status = *cp_last_error();
    }
    code = exchange(context, &ready);
    if (code == CP_OK) {
        code = cp_agree(context->records, context->world);
    }
    if (code == CP_OK) {
        code = attach(context);
    }
    if (code != CP_OK) {
        cp_plan_entry_clear(&entry);
        return code;
    }
    context->call = known == NULL ? cp_plan_cache_add(&context->plans, &entry) : known;
    return CP_OK;
}

/* The same on all ranks: they have made the same calls, and agree that this one is
 * captured. */
static enum cp_code check_captured(const struct cp_context *context)
{
    if (context->side->comm == NULL) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "the first call on a GPU connects the ranks, which cannot be "
                       "captured in a graph; make one call before the capture");
    }
    return CP_OK;
}

/* An agreement and a shard need nothing of the others but that they do the same, and a
 * call on devices that are not connected has to be begun again. */
static bool is_over_at_the_gate(const struct cp_context *context,
                                const struct cp_record *mine)
{
    return mine->call.op == CP_OP_AGREE || mine->call.op == CP_OP_SHARD ||
           context->side->comm == NULL;
}

static enum cp_code begin(struct cp_context *context, const struct cp_record *mine)
{
    CP_TRY(exchange(context, mine));
    CP_TRY(agree(context, mine));
    context->side = &context->sides[mine->call.place];
    if (mine->call.is_captured != 0) {
        CP_TRY(check_captured(context));
    }
    if (is_over_at_the_gate(context, mine)) {
        return CP_OK;
    }
    struct cp_plan_entry *known =
        cp_plan_cache_find(&context->plans, context->records, context->world);
    if (known == NULL || mine->call.is_captured != 0) {
        return prepare(context, mine, known);
    }
    context->call = known;
    return CP_OK;
}

/* ---- the steps of execute ---- */

static enum cp_code run_call(struct cp_context *context,
                             const struct cp_view tensors[CP_TENSORS])
{
    const struct cp_schedule *schedule = context->call->schedule;
    struct cp_side *side = context->side;
    struct cp_run run;
    int before = 0;
    bool is_captured = side->capture != 0;
    struct cp_run_env env = {
        .comm = side->comm,
        .device = side->device,
        .kernel = context->call->kernel,
        .package = side->package,
        .pool = side->pool,
        .scratch = is_captured ? side->captured.data : side->workspace.data,
        .recorder = recorder_of(context),
        .stream = side->stream,
        .capture = side->capture,
        .seq = context->gate.seq,
        .operation = context->operation,
    };
    cp_run_init(&run, &env, schedule, tensors, context->room);
    side->may_be_forked = side->may_be_forked || is_captured;
    CP_TRY(cp_side_enter(side, &before));
    return cp_side_leave(side, before, cp_run_finish(&run, context->config.timeout));
}

static enum cp_code execute(struct cp_context *context,
                            const struct cp_view tensors[CP_TENSORS])
{
    enum cp_code code = run_call(context, tensors);
    if (code != CP_OK) {
        poison(context);
    }
    return code;
}

/* ---- the first call on the accelerator ---- */

/* All ranks' offers, by a gather on the host. `offers` NULL: there was no memory for them.
 * `is_again`: it holds those of the round before. */
static enum cp_code exchange_offers(struct cp_context *context, struct cp_offer *offers,
                                    bool is_again)
{
    const int dim = 0;
    const int ordinal = context->sides[CP_ON_ACCELERATOR].ordinal;
    struct cp_offer own;
    struct cp_view tensors[CP_TENSORS];
    struct cp_record record;
    memset(&own, 0, sizeof own);
    memset(tensors, 0, sizeof tensors);
    memset(&record, 0, sizeof record);
    record.call.op = CP_OP_GATHER;
    record.call.dtype = CP_DTYPE_UINT8;
    record.call.ndim = 2;
    record.call.dim = dim;
    record.call.extent[1] = sizeof own;
    record.sizes[CP_SIZE_ROWS] = 1;
    CP_TRY(cp_context_describe(context, NULL, &record));
    if (offers == NULL || context->accelerator->offer(
                              ordinal, context->rank, context->world, &context->group,
                              is_again ? offers : NULL, &own) != CP_OK) {
        record.status = *cp_last_error(); /* told there: the others are on their way */
    }
    CP_TRY(begin(context, &record));
    struct cp_view rows = {.dtype = CP_DTYPE_UINT8,
                           .n = {1, 1, 1, sizeof own},
                           .stride = {sizeof own, sizeof own, sizeof own, 1}};
    tensors[CP_TENSOR_SHARE] = rows;
    tensors[CP_TENSOR_SHARE].data = (char *)own.bytes;
    tensors[CP_TENSOR_WHOLE] = rows;
    tensors[CP_TENSOR_WHOLE].data = (char *)offers;
    tensors[CP_TENSOR_WHOLE].n[dim + 1] = context->world;
    return execute(context, tensors);
}

static enum cp_code connect_devices(struct cp_context *context)
{
    struct cp_side *side = &context->sides[CP_ON_ACCELERATOR];
    struct cp_device *device = NULL;
    struct cp_comm *comm = NULL;
    void *offers = NULL;
    bool has_room = cp_mem_create((size_t)context->world * sizeof(struct cp_offer),
                                  "offers", &offers) == CP_OK;
    struct cp_connect_args args = {
        .ordinal = side->ordinal,
        .offers = offers,
        .group = &context->group,
        .watch = context->gate.watch,
        .boards = context->boards,
        .timeout = context->config.timeout,
    };
    enum cp_code code = CP_AGAIN;
    for (int round = 0; code == CP_AGAIN; round++) {
        code = exchange_offers(context, has_room ? offers : NULL, round > 0);
        context->call = NULL;
        if (code == CP_OK) {
            code = context->accelerator->connect(&args, &device, &comm);
        }
    }
    cp_mem_destroy(&offers);
    CP_TRY(code);
    side->device = device;
    side->comm = comm;
    return CP_OK;
}

/* ---- the calls ---- */

enum cp_code cp_context_begin(struct cp_context *context, const struct cp_record *mine,
                              const struct cp_plan **plan)
{
    enum cp_op op = (enum cp_op)mine->call.op;
    uint64_t number = context->gate.seq + 1;
    context->is_own_error = false;
    context->call = NULL;
    CP_TRY(cp_context_check(context));
    (void)snprintf(context->operation, sizeof context->operation, "%s, call %" PRIu64,
                   cp_op_name(op), number);
    cp_recorder_enter(recorder_of(context), op, number);
    enum cp_code code = begin(context, mine);
    if (code == CP_OK && context->side->comm == NULL) {
        code = connect_devices(context);
        code = code == CP_OK ? begin(context, mine) : code;
    }
    if (code == CP_OK && plan != NULL && context->call != NULL) {
        *plan = context->call->plan;
    }
    if (code != CP_OK || context->call == NULL) {
        end_call(context, code);
    }
    return code;
}

enum cp_code cp_context_confirm(struct cp_context *context,
                                const struct cp_status *error)
{
    CP_TRY(check_process(context));
    if (context->call == NULL) {
        return cp_fail(CP_ERR_INTERNAL, "confirm without a call that was begun");
    }
    const struct cp_record *begun = &context->records[context->rank];
    struct cp_record ready = {.call = begun->call};
    memcpy(ready.sizes, begun->sizes, sizeof ready.sizes);
    if (error != NULL) {
        ready.status = *error;
    }
    enum cp_code code = exchange(context, &ready);
    if (code == CP_OK) {
        code = agree(context, &ready);
    }
    if (code != CP_OK) {
        end_call(context, code);
    }
    return code;
}

bool cp_context_error_is_own(const struct cp_context *context)
{
    return context->is_own_error;
}

enum cp_code cp_context_execute(struct cp_context *context,
                                const struct cp_view tensors[CP_TENSORS])
{
    CP_TRY(check_process(context));
    if (context->call == NULL) {
        return cp_fail(CP_ERR_INTERNAL, "execute without a call that was begun");
    }
    enum cp_code code = execute(context, tensors);
    end_call(context, code);
    return code;
}

enum cp_code cp_context_copy(struct cp_context *context, const struct cp_view *dst,
                             const struct cp_view *src)
{
    struct cp_side *side = context->side;
    int before = 0;
    CP_TRY(cp_side_enter(side, &before));
    return cp_side_leave(side, before,
                         cp_device_copy(side->device, dst, src, side->stream));
}

void cp_context_abandon(struct cp_context *context)
{
    if (context->call != NULL) {
        poison(context);
        end_call(context, (enum cp_code)cp_last_error()->code);
    }
}
