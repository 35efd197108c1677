/* Processes become a context: a meeting, a gate and a communicator on the ground that
 * their hosts give. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/trace.h"
#include "exec/context.h"
#include "exec/ground.h"
#include "kernel/kernel_cpu.h"

#ifndef CP_VERSION
#define CP_VERSION "unknown"
#endif

/* `init` waits at least this long for all ranks to appear, whatever the timeout: they
 * import at their own pace. */
static const double shortest_meeting_s = 60.0;

const char *const cp_rotate_names[CP_ROTATES] = {
    [CP_ROTATE_AUTO] = "auto",
    [CP_ROTATE_ALLGATHER] = "allgather",
    [CP_ROTATE_ALLTOALL] = "alltoall",
};

static const char *rotate_name(int32_t rotate)
{
    return rotate >= 0 && rotate < CP_ROTATES ? cp_rotate_names[rotate] : "?";
}

static const char *variant_name(int32_t variant)
{
    return variant == CP_EVEN ? "even" : "anything";
}

/* What ranks tell each other at the meeting. */
struct hello {
    char version[32];
    int32_t ring_degree, ulysses_degree, variant, rotate;
    int32_t isa, head_chunks;
    struct cp_status error; /* code CP_OK: none */
};
_Static_assert(sizeof(struct hello) <= CP_HELLO_BYTES, "a hello must fit");

/* What a joined context stands on. */
struct parts {
    struct cp_ground *ground;
    struct cp_trace *trace; /* NULL: none is written */
    struct cp_recorder recorder;
    double debug_s;
    struct cp_watch watch;
};

static void close_parts(void *address)
{
    struct parts *parts = address;
    if (parts->ground != NULL) {
        parts->ground->ops->close(&parts->ground);
    }
    cp_trace_close(&parts->trace);
    cp_mem_destroy(&parts);
}

/* Ranks that outnumber the cores must sleep at once, or the one that all wait for does
 * not run. */
static bool may_spin(int world)
{
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 &&
           CPU_COUNT(&allowed) >= world;
}

static struct hello hello_of(const struct cp_ground *ground, int rank)
{
    struct hello hello;
    memcpy(&hello, ground->ops->hello(ground, rank)->bytes, sizeof hello);
    return hello;
}

/* The same pure decision on all ranks: do they fit together, and which kernel do all of
 * them have? */
static enum cp_code compare_hellos(const struct cp_ground *ground, int *isa)
{
    const struct hello zero = hello_of(ground, 0);
    *isa = zero.isa;
    for (int rank = 0; rank < ground->world; rank++) {
        struct hello other = hello_of(ground, rank);
        if (other.error.code != CP_OK) {
            other.error.text[CP_STATUS_TEXT - 1] = '\0';
            return cp_fail_rank((enum cp_code)other.error.code, rank, "rank %d: %s",
                                rank, other.error.text);
        }
    }
    for (int rank = 1; rank < ground->world; rank++) {
        struct hello other = hello_of(ground, rank);
        if (strncmp(other.version, zero.version, sizeof zero.version) != 0) {
            return cp_fail_rank(CP_ERR_VALUE, rank,
                                "rank %d runs cp_attn %.31s, rank 0 runs %.31s", rank,
                                other.version, zero.version);
        }
        if (other.ring_degree != zero.ring_degree ||
            other.ulysses_degree != zero.ulysses_degree ||
            other.variant != zero.variant || other.rotate != zero.rotate) {
            return cp_fail_rank(
                CP_ERR_VALUE, rank,
                "rank %d has another config than rank 0: ring_degree %d and %d, "
                "ulysses_degree %d and %d, lengths %s and %s, rotate_method %s and %s",
                rank, other.ring_degree, zero.ring_degree, other.ulysses_degree,
                zero.ulysses_degree, variant_name(other.variant),
                variant_name(zero.variant), rotate_name(other.rotate),
                rotate_name(zero.rotate));
        }
        if (other.head_chunks != zero.head_chunks) {
            return cp_fail_rank(
                CP_ERR_VALUE, rank,
                "rank %d has CP_ATTN_HEAD_CHUNKS %d and rank 0 has %d (0: not set)",
                rank, other.head_chunks, zero.head_chunks);
        }
        if (other.isa < *isa) {
            *isa = other.isa;
        }
    }
    return CP_OK;
}

/* Empty as if it were not there. */
static bool is_given(const char *value)
{
    return value != NULL && value[0] != '\0';
}

static enum cp_code parse_debug(const char *value, double *seconds)
{
    char *end = NULL;
    double got = strtod(value, &end);
    if (end == value || *end != '\0' || !(got > 0.0 && got <= 1e9)) {
        return cp_fail(
            CP_ERR_VALUE,
            "CP_ATTN_DEBUG is \"%.40s\"; it takes the number of seconds after "
            "which a rank that waits says what all ranks are doing, such as 10",
            value);
    }
    *seconds = got;
    return CP_OK;
}

static enum cp_code parse_head_chunks(const char *value, int32_t *chunks)
{
    char *end = NULL;
    long got = strtol(value, &end, 10);
    if (end == value || *end != '\0' || got < 1 || got > CP_MAX_HEAD_CHUNKS) {
        return cp_fail(CP_ERR_VALUE,
                       "CP_ATTN_HEAD_CHUNKS is \"%.40s\"; it takes the number of "
                       "chunks that attention cuts the heads in, from 1 to %d",
                       value, CP_MAX_HEAD_CHUNKS);
    }
    *chunks = (int32_t)got;
    return CP_OK;
}

/* What the environment asks for. */
static enum cp_code read_environment(const struct cp_join_args *args,
                                     struct parts *parts, struct hello *hello)
{
    CP_TRY(cp_kernel_cpu_parse(args->isa, &hello->isa));
    if (is_given(args->head_chunks)) {
        CP_TRY(parse_head_chunks(args->head_chunks, &hello->head_chunks));
    }
    if (is_given(args->debug)) {
        CP_TRY(parse_debug(args->debug, &parts->debug_s));
    }
    return is_given(args->trace) ? cp_trace_open(args->trace, args->rank, &parts->trace)
                                 : CP_OK;
}

/* `isa` and `head_chunks`: as all ranks have them. */
static enum cp_code meet(const struct cp_join_args *args, struct parts *parts, int *isa,
                         int32_t *head_chunks)
{
    struct hello hello = {
        .version = CP_VERSION,
        .ring_degree = args->config.ring_degree,
        .ulysses_degree = args->config.ulysses_degree,
        .variant = args->config.variant,
        .rotate = args->config.rotate,
    };
    double patience = shortest_meeting_s;
    if (args->error != NULL) {
        hello.error = *args->error;
    } else if (args->config.timeout > patience) {
        patience = args->config.timeout;
    }
    struct cp_meet_args meet_args = {
        .key = args->key,
        .rank = args->rank,
        .world = args->world,
        .deadline = cp_deadline_in(patience),
        .interrupt = args->interrupt,
        .interrupt_arg = args->interrupt_arg,
    };
    if (args->error == NULL && read_environment(args, parts, &hello) != CP_OK) {
        hello.error = *cp_last_error(); /* told at the meeting: nobody waits for it */
    }
    memcpy(meet_args.hello.bytes, &hello, sizeof hello);
    CP_TRY(parts->ground->ops->meet(parts->ground, &meet_args));
    *head_chunks = hello.head_chunks;
    return compare_hellos(parts->ground, isa);
}

static enum cp_code watch_init(struct parts *parts, const struct cp_join_args *args,
                               struct cp_page **page, struct cp_boards *boards)
{
    struct cp_ground *ground = parts->ground;
    parts->watch = (struct cp_watch){
        .rank = args->rank,
        .world = args->world,
        .may_spin = may_spin(args->world),
        .interrupt = args->interrupt,
        .interrupt_arg = args->interrupt_arg,
        .recorder = &parts->recorder,
        .debug_s = parts->debug_s,
    };
    CP_TRY(ground->ops->share(ground, &parts->watch, page, boards));
    struct cp_flight *flights = cp_page_flights(*page, args->world);
    parts->recorder =
        (struct cp_recorder){.flight = &flights[args->rank], .trace = parts->trace};
    parts->watch.bell = cp_page_bell(*page);
    parts->watch.poison = cp_page_poison(*page);
    parts->watch.flights = flights;
    return CP_OK;
}

static enum cp_code create_parts(const struct cp_join_args *args, struct parts **out)
{
    void *block = NULL;
    CP_TRY(cp_mem_create(sizeof **out, "a context", &block));
    struct parts *parts = block;
    enum cp_code code =
        args->root == NULL
            ? cp_ground_host_create(args->rank, args->world, &parts->ground)
            : cp_ground_hosts_create(args->rank, args->world, args->root,
                                     &parts->ground);
    if (code != CP_OK) {
        close_parts(parts);
        return code;
    }
    *out = parts;
    return CP_OK;
}

enum cp_code cp_context_join(const struct cp_join_args *args, struct cp_context **out)
{
    struct parts *parts = NULL;
    struct cp_page *page = NULL;
    struct cp_boards boards = {.of = NULL};
    struct cp_comm *comm = NULL;
    struct cp_context *context = NULL;
    struct cp_context_config config = args->config;
    int isa = 0;
    enum cp_code code = CP_OK;
    CP_TRY(create_parts(args, &parts));
    CP_TRY_GOTO(code, meet(args, parts, &isa, &config.head_chunks), done);
    CP_TRY_GOTO(code, watch_init(parts, args, &page, &boards), done);
    CP_TRY_GOTO(code, parts->ground->ops->comm(parts->ground, &parts->watch, &comm),
                done);
    struct cp_context_parts with = {
        .gate = {.page = page, .watch = &parts->watch},
        .comm = comm,
        .device = cp_device_cpu(),
        .kernels = {.select = cp_kernel_cpu_select, .limit = isa},
        .threads = args->threads,
        .boards = boards,
    };
    CP_TRY_GOTO(code, cp_context_create(&config, &with, &context), done);
    cp_context_stand_on(context, parts, close_parts);
    parts = NULL;
    *out = context;
done:
    if (parts != NULL) {
        close_parts(parts);
    }
    return code;
}
