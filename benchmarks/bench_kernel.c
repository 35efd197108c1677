/* How near the CPU kernels come to the peak of the core that they run on.
 *
 *   bench_kernel ROWS KEYS HEADS DIM DTYPE REPEATS PANELS [KERNEL]
 *
 * PANELS says where packed keys and values lie: "private", the library's own memory, as with one rank, or "shared", a
 * file in memory as the window of a rank among several is. One JSON line per kernel of the list that takes the dtype
 * (or for KERNEL alone): medians over REPEATS of
 *
 *   gflops   4 * ROWS * KEYS * HEADS * DIM / (pack K and V + attend + finish)
 *   pack, finish   their shares of that time
 *   backward 10 * ROWS * KEYS * HEADS * DIM / (delta + grad), in GFLOP/s
 *   times    (delta + grad) / (pack K and V + attend + finish)
 *   peak     what the core's multiply-adds reach in the kernel's instruction set, measured before each repeat:
 *            fused multiply-adds (or bf16 dot products) on registers, one loop, as many independent sums as hide
 *            their latency
 *   share    median of gflops / peak, each pair taken within one repeat: other users of the machine hit both
 *
 * Pin it to one core; benchmarks/kernels.py does, and alternates it with torch. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "kernel/kernel_cpu.h"
#include "tensor/convert.h"

enum { REPEATS_MAX = 1000 };

struct probe {
    const char *kernel;         /* whose instructions these are */
    double operations;          /* of one turn */
    void (*run)(int64_t turns); /* registers only */
};

#ifdef __x86_64__
/* The probes are assembly, so that no compiler flag decides what they measure. Every number in them is 1.002 (and
 * so is each half of it as a bfloat16, nearly): no subnormals, no overflow. */
#define PROBE(name, setup, steps, cleanup)                                             \
    static void name(int64_t turns)                                                    \
    {                                                                                  \
        const uint32_t one = 0x3f803f80u;                                              \
        __asm__ volatile(setup "1:\n" steps "dec %0\n jnz 1b\n" cleanup                \
                         : "+r"(turns)                                                 \
                         : "r"(one)                                                    \
                         : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5",       \
                           "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",  \
                           "xmm13", "xmm14", "xmm15");                                 \
    }
#define TWELVE(step)                                                                   \
    step("0") step("1") step("2") step("3") step("4") step("5") step("6") step("7")    \
        step("8") step("9") step("10") step("11")
#define SSE_STEP(i) "mulps %%xmm15, %%xmm" i "\n addps %%xmm15, %%xmm" i "\n"
#define YMM_STEP(i) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" i "\n"
#define ZMM_STEP(i) "vfmadd231ps %%zmm14, %%zmm15, %%zmm" i "\n"
#define DOT_STEP(i) "vdpbf16ps %%zmm14, %%zmm15, %%zmm" i "\n"
#define VEX_SETUP(reg)                                                                 \
    "vmovd %1, %%xmm15\n vpbroadcastd %%xmm15, %%" reg "15\n vmovaps %%" reg           \
    "15, %%" reg "14\n"

PROBE(probe_sse, "movd %1, %%xmm15\n shufps $0, %%xmm15, %%xmm15\n", TWELVE(SSE_STEP),
      "")
PROBE(probe_avx2, VEX_SETUP("ymm"), TWELVE(YMM_STEP), "vzeroupper\n")
PROBE(probe_avx512, VEX_SETUP("zmm"), TWELVE(ZMM_STEP), "vzeroupper\n")
PROBE(probe_avx512bf16, VEX_SETUP("zmm"), TWELVE(DOT_STEP), "vzeroupper\n")

static const struct probe probes[] = {
    {.kernel = "generic", .operations = 12 * 2 * 4, .run = probe_sse},
    {.kernel = "avx2", .operations = 12 * 2 * 8, .run = probe_avx2},
    {.kernel = "avx512", .operations = 12 * 2 * 16, .run = probe_avx512},
    {.kernel = "avx512bf16", .operations = 12 * 2 * 32, .run = probe_avx512bf16},
};
enum { PROBES = sizeof probes / sizeof probes[0] };
#else
static const struct probe probes[1];
enum { PROBES = 0 };
#endif

/* CPU time of this thread: what other processes take from the core is left out. */
static double cpu_seconds(void)
{
    struct timespec now = {0};
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* GFLOP/s; 0 where there is no probe for the kernel. About 10 ms. */
static double peak_of(const char *kernel)
{
    const int64_t turns = 2000000;
    for (int i = 0; i < PROBES; i++) {
        if (strcmp(probes[i].kernel, kernel) == 0) {
            double start = cpu_seconds();
            probes[i].run(turns);
            return probes[i].operations * (double)turns / (cpu_seconds() - start) *
                   1e-9;
        }
    }
    return 0.0;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, compare);
    return count % 2 ? values[count / 2]
                     : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

static void *allocate(int64_t bytes)
{
    void *block = NULL;
    if (cp_mem_create((size_t)bytes, "benchmark", &block) != CP_OK) {
        (void)fprintf(stderr, "%s\n", cp_last_error()->text);
        exit(1);
    }
    return block;
}

/* As csrc/comm makes a window: a file in memory, with pages from the start, huge ones where that can be had. */
static void *allocate_shared(int64_t bytes)
{
    const size_t huge = (size_t)2 << 20,
                 whole = ((size_t)bytes + huge - 1) / huge * huge;
    int fd = memfd_create("bench_kernel", MFD_CLOEXEC);
    char *base = MAP_FAILED, *room = mmap(NULL, whole + huge, PROT_NONE,
                                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fd >= 0 && room != MAP_FAILED && ftruncate(fd, (off_t)whole) == 0) {
        room += (huge - (uintptr_t)room % huge) % huge;
        base = mmap(room, whole, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_POPULATE | MAP_FIXED, fd, 0);
    }
    if (base == MAP_FAILED) {
        perror("shared memory");
        exit(1);
    }
    (void)madvise(base, whole, 25); /* MADV_COLLAPSE, which older headers lack */
    (void)close(fd);
    return base;
}

/* (1, rows, heads, dim) of numbers in [-1.7, 1.7): variance 1. */
static struct cp_view random_view(enum cp_dtype dtype, int64_t rows, int64_t heads,
                                  int64_t dim)
{
    static uint32_t state = 1;
    int64_t count = rows * heads * dim;
    struct cp_view view = cp_view_compact(allocate(count * cp_dtype_bytes(dtype)),
                                          dtype, 1, rows, heads, dim);
    for (int64_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        float value = ((float)(state >> 8) * 0x1p-23f - 1.0f) * 1.7320508f;
        uint16_t half =
            dtype == CP_DTYPE_BFLOAT16 ? cp_f32_to_bf16(value) : cp_f32_to_f16(value);
        if (dtype == CP_DTYPE_FLOAT32) {
            memcpy(view.data + i * 4, &value, 4);
        } else {
            memcpy(view.data + i * 2, &half, 2);
        }
    }
    return view;
}

/* Panels for what `like` holds. */
static struct cp_view panel_view(const struct cp_panel *panel,
                                 const struct cp_view *like, bool is_shared)
{
    int64_t bytes = cp_panel_bytes(panel, like->n[1]);
    struct cp_view view = *like;
    view.data =
        is_shared ? allocate_shared(bytes * like->n[2]) : allocate(bytes * like->n[2]);
    view.stride[0] = bytes * like->n[2];
    view.stride[1] = view.stride[3] = 0;
    view.stride[2] = bytes;
    return view;
}

/* Which keys a query sees. */
enum sight {
    SEES_ALL,
    SEES_CAUSAL, /* the last query all */
    SEES_KEYS,   /* bool, one row for all queries: three keys of four */
    SEES_BOOL,   /* bool, a row for each query */
    SEES_BIAS,   /* float32, a row for each query */
    SEES_MASK,   /* as causal, by a bool mask */
    SIGHTS
};

static const char *const sight_names[SIGHTS] = {"all",  "causal", "keys",
                                                "bool", "bias",   "mask"};

struct shape {
    int64_t rows, keys, heads, dim;
    enum cp_dtype dtype;
    enum sight sight;
    int repeats;
    bool is_shared;
};

/* (1, 1, rows or 1, keys). */
static struct cp_view mask_of(const struct shape *shape)
{
    struct cp_view none = {.data = NULL};
    if (shape->sight < SEES_KEYS) {
        return none;
    }
    enum cp_dtype dtype = shape->sight == SEES_BIAS ? CP_DTYPE_FLOAT32 : CP_DTYPE_BOOL;
    int64_t rows = shape->sight == SEES_KEYS ? 1 : shape->rows;
    struct cp_view mask =
        cp_view_compact(allocate(rows * shape->keys * cp_dtype_bytes(dtype)), dtype, 1,
                        1, rows, shape->keys);
    for (int64_t i = 0; i < rows * shape->keys; i++) {
        float bias = (float)(i * 7 % 13) * 0.125f - 0.75f;
        int64_t row = i / shape->keys, key = i % shape->keys;
        bool is_seen = shape->sight == SEES_MASK
                           ? key <= shape->keys - shape->rows + row
                           : key % 4 != 1;
        if (dtype == CP_DTYPE_BOOL) {
            memcpy(mask.data + i, &is_seen, 1);
        } else {
            memcpy(mask.data + i * 4, &bias, 4);
        }
    }
    return mask;
}

/* Pairs of query and key that count: where a mask may forbid any of them, all do. */
static double pairs_of(const struct shape *shape)
{
    double pairs = 0;
    if (shape->sight != SEES_CAUSAL && shape->sight != SEES_MASK) {
        return (double)shape->rows * (double)shape->keys;
    }
    for (int64_t row = 0; row < shape->rows; row++) {
        int64_t seen = shape->keys - shape->rows + row + 1;
        pairs += (double)(seen > 0 ? seen : 0);
    }
    return pairs;
}

struct times {
    double pack, attend, finish;
};

static struct times forward(const struct cp_kernel_ops *ops,
                            const struct cp_attend_args *args, const struct cp_view *k,
                            const struct cp_view *v, const struct cp_view *out)
{
    struct times times;
    const struct cp_finish_args finish = {.state = args->state, .out = *out};
    memset(args->state.data, 0, (size_t)args->state.stride[0]);
    double start = cpu_seconds();
    (void)ops->pack_k(&args->k, k, NULL);
    (void)ops->pack_v(&args->v, v, NULL);
    times.pack = cpu_seconds() - start;
    start = cpu_seconds();
    (void)ops->attend(args, NULL);
    times.attend = cpu_seconds() - start;
    start = cpu_seconds();
    (void)ops->finish(&finish, NULL);
    times.finish = cpu_seconds() - start;
    return times;
}

static struct cp_view zeros(const struct cp_view *like, enum cp_dtype dtype,
                            int64_t dim)
{
    void *data = allocate(like->n[1] * like->n[2] * dim * cp_dtype_bytes(dtype));
    return cp_view_compact(data, dtype, 1, like->n[1], like->n[2], dim);
}

/* What a forward pass leaves to the backward one. */
static struct cp_grad_args grad_args(const struct cp_kernel_ops *ops,
                                     const struct cp_format *format,
                                     const struct cp_attend_args *forward,
                                     const struct cp_view *k, const struct cp_view *v,
                                     const struct cp_view *out)
{
    const struct cp_view *q = &forward->q;
    struct cp_grad_args args = {
        .q = *q,
        .k = *k,
        .v = *v,
        .dout = *q, /* as good as any */
        .lse = zeros(q, CP_DTYPE_FLOAT32, 1),
        .delta = zeros(q, CP_DTYPE_FLOAT32, 1),
        .dq = zeros(q, CP_DTYPE_FLOAT32, q->n[3]),
        .dk = zeros(k, CP_DTYPE_FLOAT32, k->n[3]),
        .dv = zeros(v, CP_DTYPE_FLOAT32, v->n[3]),
        .mask = forward->mask,
        .place = forward->place,
        .scale = forward->scale,
        .scratch = allocate(format->grad_scratch_bytes),
    };
    const struct cp_finish_args finish = {
        .state = forward->state, .out = *out, .lse = args.lse};
    (void)ops->finish(&finish, NULL);
    return args;
}

static double backward(const struct cp_kernel_ops *ops, const struct cp_grad_args *args,
                       const struct cp_view *out)
{
    const struct cp_delta_args delta = {
        .out = *out, .dout = args->dout, .delta = args->delta};
    double start = cpu_seconds();
    (void)ops->delta(&delta, NULL);
    (void)ops->grad(args, NULL);
    return cpu_seconds() - start;
}

static void measure(const struct cp_kernel_ops *ops, const struct shape *shape,
                    const struct cp_view qkvo[4])
{
    static double gflops[REPEATS_MAX], peaks[REPEATS_MAX], shares[REPEATS_MAX],
        packs[REPEATS_MAX], finishes[REPEATS_MAX], backwards[REPEATS_MAX],
        times_forward[REPEATS_MAX];
    struct cp_format format;
    if (!ops->is_available() ||
        ops->describe(shape->dtype, shape->dim, shape->dim, &format) != CP_OK) {
        return;
    }
    const struct cp_view *q = &qkvo[0], *k = &qkvo[1], *v = &qkvo[2], *out = &qkvo[3];
    struct cp_attend_args args = {
        .q = *q,
        .k = panel_view(&format.k, k, shape->is_shared),
        .v = panel_view(&format.v, v, shape->is_shared),
        .state = panel_view(&format.state, q, false),
        .mask = mask_of(shape),
        .place = {.q_first = shape->keys - shape->rows,
                  .heads_per_kv = 1,
                  .is_causal = shape->sight == SEES_CAUSAL},
        .scale = 1.0 / sqrt((double)shape->dim),
        .scratch = allocate(format.scratch_bytes),
    };
    const double operations =
        4.0 * pairs_of(shape) * (double)shape->heads * (double)shape->dim;
    (void)forward(ops, &args, k, v, out); /* touches every page */
    struct cp_grad_args grad = grad_args(ops, &format, &args, k, v, out);
    (void)backward(ops, &grad, out);
    for (int i = 0; i < shape->repeats; i++) {
        peaks[i] = peak_of(ops->name);
        struct times times = forward(ops, &args, k, v, out);
        double total = times.pack + times.attend + times.finish;
        double back = backward(ops, &grad, out);
        gflops[i] = operations / total * 1e-9;
        shares[i] = peaks[i] > 0.0 ? gflops[i] / peaks[i] : 0.0;
        packs[i] = times.pack / total;
        finishes[i] = times.finish / total;
        backwards[i] = 2.5 * operations / back * 1e-9;
        times_forward[i] = back / total;
    }
    printf("{\"kernel\": \"%s\", \"dtype\": \"%s\", \"rows\": %lld, \"keys\": %lld, "
           "\"heads\": %lld, \"dim\": %lld, \"panels\": \"%s\", "
           "\"sight\": \"%s\", \"repeats\": %d, \"gflops\": %.2f, \"peak\": %.2f, "
           "\"share\": %.4f, "
           "\"pack\": %.4f, \"finish\": %.4f, \"backward\": %.2f, \"times\": %.3f}\n",
           ops->name, cp_dtype_name(shape->dtype), (long long)shape->rows,
           (long long)shape->keys, (long long)shape->heads, (long long)shape->dim,
           shape->is_shared ? "shared" : "private", sight_names[shape->sight],
           shape->repeats, median(gflops, shape->repeats),
           median(peaks, shape->repeats), median(shares, shape->repeats),
           median(packs, shape->repeats), median(finishes, shape->repeats),
           median(backwards, shape->repeats), median(times_forward, shape->repeats));
    (void)fflush(stdout);
    if (!shape->is_shared) { /* what is shared goes with the process */
        cp_mem_destroy(&args.k.data);
        cp_mem_destroy(&args.v.data);
    }
    void *blocks[] = {args.state.data, args.scratch,    args.mask.data,
                      grad.lse.data,   grad.delta.data, grad.dq.data,
                      grad.dk.data,    grad.dv.data,    grad.scratch};
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        cp_mem_destroy(&blocks[i]);
    }
}

static bool parse(char **argv, struct shape *shape)
{
    shape->rows = strtoll(argv[1], NULL, 10);
    shape->keys = strtoll(argv[2], NULL, 10);
    shape->heads = strtoll(argv[3], NULL, 10);
    shape->dim = strtoll(argv[4], NULL, 10);
    shape->repeats = (int)strtol(argv[6], NULL, 10);
    for (int i = 1; i < CP_DTYPE_COUNT; i++) {
        if (strcmp(argv[5], cp_dtype_name((enum cp_dtype)i)) == 0) {
            shape->dtype = (enum cp_dtype)i;
        }
    }
    while (shape->sight < SIGHTS && strcmp(argv[8], sight_names[shape->sight]) != 0) {
        shape->sight++;
    }
    shape->is_shared = strcmp(argv[7], "shared") == 0;
    bool is_panels = shape->is_shared || strcmp(argv[7], "private") == 0;
    bool is_dtype = shape->dtype == CP_DTYPE_FLOAT32 ||
                    shape->dtype == CP_DTYPE_BFLOAT16 ||
                    shape->dtype == CP_DTYPE_FLOAT16;
    return is_dtype && is_panels && shape->sight < SIGHTS && shape->rows > 0 &&
           shape->keys > 0 && shape->heads > 0 && shape->dim > 0 &&
           shape->repeats > 0 && shape->repeats <= REPEATS_MAX;
}

int main(int argc, char **argv)
{
    struct shape shape = {.dtype = CP_DTYPE_NONE};
    if (argc < 9 || argc > 10 || !parse(argv, &shape)) {
        (void)fprintf(
            stderr,
            "usage: %s ROWS KEYS HEADS DIM float32|bfloat16|float16 REPEATS "
            "(1 to %d) private|shared all|causal|keys|bool|bias|mask [KERNEL]\n",
            argv[0], REPEATS_MAX);
        return 2;
    }
    struct cp_view qkvo[4];
    for (int i = 0; i < 4; i++) {
        qkvo[i] = random_view(shape.dtype, i == 1 || i == 2 ? shape.keys : shape.rows,
                              shape.heads, shape.dim);
    }
    for (int isa = 0; cp_kernel_cpu_at(isa) != NULL; isa++) {
        const struct cp_kernel_ops *ops = cp_kernel_cpu_at(isa);
        if (argc == 9 || strcmp(argv[9], ops->name) == 0) {
            measure(ops, &shape, qkvo);
        }
    }
    for (int i = 0; i < 4; i++) {
        cp_mem_destroy(&qkvo[i].data);
    }
    return 0;
}
