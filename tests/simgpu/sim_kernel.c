/* Kernels: the checks of a launch, and how blocks, warps and barriers run.
 *
 * The blocks of a launch run one after the other, from either end. A block with barriers
 * has a fiber for each thread; those that can go on take turns, from either end too. */
#include <stdlib.h>
#include <string.h>

#include "include/simgpu_launch.h"
#include "sim.h"
#include "sim_fiber.h"
#include "sim_warp.h"

enum {
    MOST_THREADS = 1024,
    WARP = 32,
    MOST_WARPS = MOST_THREADS / WARP,
    BARRIERS = 16,
    SHARED_BYTES = 48 << 10,
    MOST_SHARED_BYTES = 227 << 10,
    ATTRIBUTES = 256
};

/* As C++ sees them: uint3 and dim3. */
__thread struct simgpu_size threadIdx, blockIdx, blockDim, gridDim;

struct kernel_op {
    struct sim_op op;
    struct simgpu_kernel kernel;
};

/* What those who meet tell each other of memory. Two clocks in turn: who comes to the next
 * meeting while others still leave this one must not tell them what it did in between. */
struct turns {
    unsigned count;
    char clocks[2];
};

enum whole_warp_op { WHOLE_WARP_MMA = SIMGPU_WARP_BALLOT + 1, WHOLE_WARP_MATRICES };

/* Lanes of one warp that do something together. */
struct meeting {
    unsigned mask, arrived; /* 0: free */
    int op;                 /* enum simgpu_warp_op or enum whole_warp_op */
    unsigned long long value[WARP];
    int source[WARP];
    void *part[WARP]; /* of what a whole warp does */
    struct turns turns;
};

struct warp {
    struct meeting meetings[WARP]; /* at most one for each lane */
};

enum thread_state { THREAD_READY, THREAD_WAITS, THREAD_ENDED };

struct thread {
    struct sim_fiber *fiber;
    struct simgpu_size index;
    enum thread_state state;
    int barrier;               /* that it waits at, -1: none */
    unsigned long long result; /* of its warp's meeting */
    struct sim_async async;
};

struct barrier {
    int arrived, wanted; /* 0 wanted: all that have not ended */
    struct turns turns;
};

/* What runs the kernels of one stream. */
struct runner {
    struct thread threads[MOST_THREADS];
    struct warp warps[MOST_WARPS];
    struct barrier barriers[BARRIERS];
    const struct simgpu_kernel *kernel;
    void *shared;
    int count, alive, current; /* current -1: no fiber runs */
    bool
        is_early; /* asynchronous copies of this block land at once, else when waited for */
    char begin, end, left; /* clocks: of the block, of those who gave their turn away */
};

static _Thread_local struct runner *runner;

static struct {
    const void *function;
    int shared_bytes;
} attributes[ATTRIBUTES]; /* locked */

void *simgpu_dynamic_shared(void)
{
    return runner->shared;
}

void simgpu_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

/* Whoever waits for another stream lets its thread run. */
void simgpu_nanosleep(unsigned ns)
{
    sim_sleep_us(1 + ns / 1000);
}

int simgpu_lane(void)
{
    unsigned linear =
        threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    return (int)(linear % WARP);
}

/* The current fiber gives its turn away until somebody makes it ready. */
static void give_turn(void)
{
    struct thread *self = &runner->threads[runner->current];
    self->state = THREAD_WAITS;
    sim_release(&runner->left);
    sim_fiber_leave(self->fiber);
}

static void open_if_complete(int number)
{
    struct barrier *barrier = &runner->barriers[number];
    int wanted = barrier->wanted ? barrier->wanted : runner->alive;
    if (barrier->arrived == 0 || barrier->arrived < wanted) {
        return;
    }
    barrier->arrived = 0;
    barrier->turns.count += 1;
    for (int i = 0; i < runner->count; i++) {
        if (runner->threads[i].barrier == number) {
            runner->threads[i].barrier = -1;
            runner->threads[i].state = THREAD_READY;
        }
    }
}

static bool has_fiber(const char *what)
{
    if (runner->current < 0) {
        sim_violate("%s in a kernel that was launched without barriers", what);
    }
    return runner->current >= 0;
}

void simgpu_barrier(int number, int threads)
{
    if (!has_fiber("a barrier")) {
        return;
    }
    struct barrier *barrier = &runner->barriers[number];
    if (barrier->arrived > 0 && barrier->wanted != threads) {
        sim_violate("barrier %d waits for %d threads, and one came for %d", number,
                    barrier->wanted, threads);
    }
    char *clock = &barrier->turns.clocks[barrier->turns.count % 2];
    barrier->wanted = threads;
    barrier->arrived += 1;
    runner->threads[runner->current].barrier = number;
    runner->threads[runner->current].state = THREAD_WAITS;
    sim_release(clock);
    open_if_complete(number);
    if (runner->threads[runner->current].state == THREAD_WAITS) {
        give_turn();
    }
    sim_acquire(clock);
}

/* All lanes of the mask are there: what each gets. */
static void resolve(struct meeting *meeting, int first)
{
    unsigned ballot = 0;
    if (meeting->op == WHOLE_WARP_MMA) {
        sim_mma(meeting->part);
    } else if (meeting->op == WHOLE_WARP_MATRICES) {
        sim_load_matrices(meeting->part);
    }
    for (int lane = 0; lane < WARP; lane++) {
        bool votes = (meeting->mask >> lane & 1) && meeting->value[lane];
        ballot |= (unsigned)votes << lane;
    }
    for (int lane = 0; lane < WARP; lane++) {
        if (!(meeting->mask >> lane & 1)) {
            continue;
        }
        int from = meeting->source[lane] < 0 ? lane : meeting->source[lane];
        struct thread *thread = &runner->threads[first + lane];
        thread->state = THREAD_READY;
        if (meeting->op == SIMGPU_WARP_BALLOT) {
            thread->result = ballot;
        } else if (meeting->mask >> from & 1) {
            thread->result = meeting->value[from];
        } else {
            thread->result = ~0ull; /* CUDA: undefined */
        }
    }
    meeting->arrived = meeting->mask = 0;
    meeting->turns.count += 1;
}

static struct meeting *meeting_of(struct warp *warp, unsigned mask)
{
    struct meeting *empty = NULL;
    for (int i = 0; i < WARP; i++) {
        if (warp->meetings[i].mask == mask) {
            return &warp->meetings[i];
        }
        if (!warp->meetings[i].mask && !empty) {
            empty = &warp->meetings[i];
        }
    }
    return empty;
}

/* The lane `self` comes to a meeting of `mask`, and leaves when all have come. */
static void meet(int op, unsigned mask, unsigned long long value, int source,
                 void *part)
{
    int self = runner->current;
    int lane = self % WARP;
    struct warp *warp = &runner->warps[self / WARP];
    if (!(mask >> lane & 1)) {
        sim_violate("lane %d does a warp's operation with mask %08x", lane, mask);
        runner->threads[self].result = value;
        return;
    }
    struct meeting *meeting = meeting_of(warp, mask);
    if (meeting->arrived && meeting->op != op) {
        sim_violate("the lanes of a warp do different operations with mask %08x", mask);
        op = SIMGPU_WARP_SHUFFLE; /* of which any lane may have a part */
    }
    char *clock = &meeting->turns.clocks[meeting->turns.count % 2];
    meeting->mask = mask;
    meeting->op = op;
    meeting->arrived |= 1u << lane;
    meeting->value[lane] = value;
    meeting->source[lane] = source;
    meeting->part[lane] = part;
    runner->threads[self].state = THREAD_WAITS;
    if (op == SIMGPU_WARP_SYNC) { /* the others order no memory */
        sim_release(clock);
    }
    if (meeting->arrived == mask) {
        resolve(meeting, self - lane);
    } else {
        give_turn();
    }
    if (op == SIMGPU_WARP_SYNC) {
        sim_acquire(clock);
    }
}

unsigned long long simgpu_warp(enum simgpu_warp_op op, unsigned mask,
                               unsigned long long value, int source)
{
    if (!has_fiber("a warp's operation")) {
        return value;
    }
    meet((int)op, mask, value, source, NULL);
    return runner->threads[runner->current].result;
}

void simgpu_mma(enum simgpu_mma_type type, float sum[4], const uint32_t a[4],
                const uint32_t b[2])
{
    struct sim_mma part = {.type = type, .sum = sum, .a = a, .b = b};
    if (has_fiber("a warp's operation")) {
        meet(WHOLE_WARP_MMA, UINT32_MAX, 0, -1, &part);
    }
}

int simgpu_is_matrix_row(const void *at)
{
    bool is_aligned = (uintptr_t)at % 16 == 0;
    if (!is_aligned) {
        sim_violate("a row of a matrix at %p, which 16 does not divide", at);
    }
    return is_aligned;
}

void simgpu_load_matrices(uint32_t to[4], const uint32_t row[4], int is_transposed)
{
    struct sim_matrices part = {.to = to, .row = row, .is_transposed = is_transposed};
    if (has_fiber("a warp's operation")) {
        meet(WHOLE_WARP_MATRICES, UINT32_MAX, 0, -1, &part);
    }
}

void simgpu_copy_async(void *to, const void *from, int bytes, int read_bytes)
{
    if (has_fiber("an asynchronous copy")) {
        sim_async_add(&runner->threads[runner->current].async, to, from, bytes,
                      read_bytes, runner->is_early);
    }
}

void simgpu_commit_copies(void)
{
    if (has_fiber("an asynchronous copy")) {
        sim_async_commit(&runner->threads[runner->current].async);
    }
}

void simgpu_wait_for_copies(int newest)
{
    if (has_fiber("an asynchronous copy")) {
        sim_async_wait(&runner->threads[runner->current].async, newest);
    }
}

/* One thread of the block, in its fiber. */
static void run_thread(void *arg)
{
    struct thread *self = arg;
    sim_acquire(&runner->begin);
    runner->kernel->run(runner->kernel->closure);
    sim_async_end(&self->async);
    sim_release(&runner->end);
    self->state = THREAD_ENDED;
    runner->alive -= 1;
    for (int number = 0; number < BARRIERS; number++) {
        open_if_complete(number);
    }
}

static void destroy_fibers(void)
{
    for (int i = 0; i < MOST_THREADS; i++) {
        if (runner->threads[i].fiber) {
            sim_fiber_destroy(runner->threads[i].fiber);
            runner->threads[i].fiber = NULL;
        }
    }
}

static void begin_block(void)
{
    for (int i = 0; i < runner->count; i++) {
        struct thread *thread = &runner->threads[i];
        unsigned linear = (unsigned)i;
        thread->state = THREAD_READY;
        thread->barrier = -1;
        thread->async.count = 0; /* of a block that did not end */
        thread->index =
            (struct simgpu_size){linear % blockDim.x, linear / blockDim.x % blockDim.y,
                                 linear / blockDim.x / blockDim.y};
        if (!thread->fiber) {
            thread->fiber = sim_fiber_create(run_thread, thread);
        }
    }
    memset(runner->warps, 0, sizeof runner->warps);
    memset(runner->barriers, 0, sizeof runner->barriers);
    runner->alive = runner->count;
    sim_release(&runner->begin);
}

static void run_block(bool is_reversed)
{
    bool has_moved = true;
    begin_block();
    while (runner->alive > 0 && has_moved) {
        has_moved = false;
        for (int i = 0; i < runner->count; i++) {
            int at = is_reversed ? runner->count - 1 - i : i;
            struct thread *thread = &runner->threads[at];
            if (thread->state == THREAD_READY) {
                threadIdx = thread->index;
                runner->current = at;
                sim_fiber_enter(thread->fiber);
                has_moved = true;
            }
        }
        is_reversed = !is_reversed;
    }
    runner->current = -1;
    if (runner->alive > 0) {
        sim_violate(
            "block (%u, %u, %u): %d threads wait for others that do not come to "
            "the same barrier, shuffle or vote",
            blockIdx.x, blockIdx.y, blockIdx.z, runner->alive);
        sim_acquire(&runner->left);
        destroy_fibers(); /* they are in the middle of the kernel */
    }
    sim_acquire(&runner->end);
}

static void run_plain_block(bool is_reversed)
{
    const struct simgpu_kernel *kernel = runner->kernel;
    struct simgpu_size size = kernel->block;
    for (unsigned i = 0; i < (unsigned)runner->count; i++) {
        unsigned linear = is_reversed ? (unsigned)runner->count - 1 - i : i;
        threadIdx = (struct simgpu_size){linear % size.x, linear / size.x % size.y,
                                         linear / size.x / size.y};
        kernel->run(kernel->closure);
    }
}

static void end_runner(void *arg)
{
    (void)arg;
    if (runner) {
        destroy_fibers();
        for (int i = 0; i < MOST_THREADS; i++) {
            sim_async_free(&runner->threads[i].async);
        }
        free(runner);
        runner = NULL;
    }
}

static pthread_key_t runner_key; /* frees the runner when its thread ends */

__attribute__((constructor)) static void make_runner_key(void)
{
    (void)pthread_key_create(&runner_key, end_runner);
}

static void run_blocks(const struct simgpu_kernel *kernel, cudaStream_t stream)
{
    struct simgpu_size grid = kernel->grid;
    uint64_t draw = sim_random(&stream->random);
    uint64_t count = (uint64_t)grid.x * grid.y * grid.z;
    if (!runner) {
        runner = SIM_ROOM(struct runner);
        (void)pthread_setspecific(runner_key, runner);
    }
    runner->kernel = kernel;
    runner->count = (int)(kernel->block.x * kernel->block.y * kernel->block.z);
    runner->current = -1;
    gridDim = grid;
    blockDim = kernel->block;
    /* Of exactly that size, for AddressSanitizer. */
    if (posix_memalign(&runner->shared, 128, kernel->shared_bytes) != 0) {
        runner->shared = NULL;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint64_t linear = draw & 1 ? count - 1 - i : i;
        blockIdx = (struct simgpu_size){(unsigned)(linear % grid.x),
                                        (unsigned)(linear / grid.x % grid.y),
                                        (unsigned)(linear / grid.x / grid.y)};
        runner->is_early = (draw >> 2 ^ i) & 1;
        if (kernel->shared_bytes) {
            memset(runner->shared, 0xff, kernel->shared_bytes);
        }
        if (kernel->has_barriers) {
            run_block(draw & 2);
        } else {
            run_plain_block(draw & 2);
        }
    }
    free(runner->shared);
}

static void run_kernel(struct sim_op *op, cudaStream_t stream)
{
    const struct simgpu_kernel *kernel = &((struct kernel_op *)op)->kernel;
    if (!sim_settings.is_dry) {
        run_blocks(kernel, stream);
    }
}

static void drop_kernel(struct sim_op *op)
{
    const struct simgpu_kernel *kernel = &((struct kernel_op *)op)->kernel;
    kernel->drop(kernel->closure);
}

static int shared_limit(const void *function)
{
    int limit = SHARED_BYTES;
    sim_lock();
    for (int i = 0; i < ATTRIBUTES && attributes[i].function; i++) {
        if (attributes[i].function == function && attributes[i].shared_bytes > limit) {
            limit = attributes[i].shared_bytes;
        }
    }
    sim_unlock();
    return limit;
}

static cudaError_t check_launch(const struct simgpu_kernel *kernel, cudaStream_t stream)
{
    struct simgpu_size grid = kernel->grid, block = kernel->block;
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (!stream || stream->device != sim_current_device()) {
        return cudaErrorInvalidResourceHandle;
    }
    if (threads == 0 || threads > MOST_THREADS || block.z > 64 || grid.x == 0 ||
        grid.y == 0 || grid.z == 0 || grid.x > INT32_MAX || grid.y > UINT16_MAX ||
        grid.z > UINT16_MAX) {
        return cudaErrorInvalidConfiguration;
    }
    if (kernel->shared_bytes > (size_t)shared_limit(kernel->function)) {
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

cudaError_t simgpu_enqueue_kernel(const struct simgpu_kernel *kernel,
                                  cudaStream_t stream)
{
    cudaError_t error = sim_enter("kernel");
    if (error == cudaSuccess) {
        stream = sim_stream(stream);
        error = check_launch(kernel, stream);
    }
    if (error != cudaSuccess) {
        kernel->drop(kernel->closure);
        return sim_error(error);
    }
    struct kernel_op *self = SIM_OP(struct kernel_op);
    self->op.name = "kernel";
    self->op.run = run_kernel;
    self->op.drop = drop_kernel;
    self->kernel = *kernel;
    sim_lock();
    sim_stats[stream->device].launches += 1;
    sim_unlock();
    sim_enqueue(stream, &self->op);
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute,
                                 int value)
{
    SIM_ENTER();
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
        return cudaSuccess;
    }
    if (value < 0 || value > MOST_SHARED_BYTES) {
        return sim_error(cudaErrorInvalidValue);
    }
    bool has_room = false;
    sim_lock();
    for (int i = 0; i < ATTRIBUTES && !has_room; i++) {
        has_room = !attributes[i].function || attributes[i].function == kernel;
        if (has_room) {
            attributes[i].function = kernel;
            attributes[i].shared_bytes = value;
        }
    }
    sim_unlock();
    return sim_error(has_room ? cudaSuccess : cudaErrorUnknown);
}
