/* Drawing cases. */
#include "grid.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "plan/agree.h"

enum { FACTORINGS = 50, OPS = 4, ROADS = 5, VARIANTS = 2 };

/* splitmix64, as in test.h. */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int64_t draw(uint64_t *state, int64_t first, int64_t last)
{
    return first + (int64_t)(next(state) % (uint64_t)(last - first + 1));
}

static bool one_in(uint64_t *state, int64_t n)
{
    return draw(state, 1, n) == 1;
}

int64_t grid_count(void)
{
    return FACTORINGS * OPS * ROADS * VARIANTS;
}

/* The factorings of 1, 2, .. 16 in order: 50 of them. */
static void factoring(int64_t index, int *ring, int *ulysses)
{
    for (int world = 1; world <= GRID_MAX_WORLD; world++) {
        for (int r = 1; r <= world; r++) {
            if (world % r == 0 && index-- == 0) {
                *ring = r;
                *ulysses = world / r;
                return;
            }
        }
    }
}

/* Lengths of all ranks: equal, a prime cut as tensor_split does, any, mostly none, all on one. */
static void draw_rows(uint64_t *state, int world, bool is_even, int64_t *rows)
{
    static const int64_t primes[] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37};
    int64_t kind = is_even ? 0 : draw(state, 0, 5);
    int64_t equal = draw(state, 1, world > 8 ? 2 : 4);
    int64_t prime = primes[draw(state, 0, 11)];
    int owner = (int)draw(state, 0, world - 1);
    for (int rank = 0; rank < world; rank++) {
        int64_t any = draw(state, 0, world > 8 ? 4 : 6);
        rows[rank] = kind == 0   ? equal
                     : kind == 1 ? cp_share(prime, world, rank).count
                     : kind == 2 ? any
                     : kind == 3 ? (one_in(state, 3) ? any : 0)
                     : kind == 4 ? (rank == owner ? 5 + any : 0)
                                 : (rank == owner ? 0 : any);
    }
}

static int64_t sum(const int64_t *rows, int world)
{
    int64_t total = 0;
    for (int rank = 0; rank < world; rank++) {
        total += rows[rank];
    }
    return total;
}

static int64_t draw_divisor(uint64_t *state, int64_t n)
{
    int64_t divisor = draw(state, 1, n);
    while (n % divisor != 0) {
        divisor = draw(state, 1, n);
    }
    return divisor;
}

static enum cp_dtype draw_dtype(uint64_t *state)
{
    static const enum cp_dtype dtypes[] = {CP_DTYPE_FLOAT32, CP_DTYPE_FLOAT32,
                                           CP_DTYPE_FLOAT64, CP_DTYPE_BFLOAT16,
                                           CP_DTYPE_FLOAT16};
    return dtypes[draw(state, 0, 4)];
}

static int64_t mask_axis(enum cp_axis_kind kind, int64_t own, int64_t whole)
{
    return kind == CP_AXIS_ONE ? 1 : kind == CP_AXIS_OWN ? own : whole;
}

static void draw_mask(uint64_t *state, struct grid_case *grid, const int64_t *q,
                      const int64_t *kv, int64_t whole_keys)
{
    struct cp_call *call = &grid->records[0].call;
    enum cp_axis_kind rows = (enum cp_axis_kind)draw(state, CP_AXIS_ONE, CP_AXIS_WHOLE);
    enum cp_axis_kind keys = (enum cp_axis_kind)draw(state, CP_AXIS_ONE, CP_AXIS_WHOLE);
    bool is_bool = one_in(state, 2);
    call->mask_kind = is_bool ? CP_MASK_BOOL : CP_MASK_ADD;
    call->mask_dtype = is_bool            ? CP_DTYPE_BOOL
                       : one_in(state, 2) ? CP_DTYPE_FLOAT32
                                          : call->dtype;
    call->mask_batch = one_in(state, 2) ? 1 : call->batch;
    call->mask_heads = one_in(state, 2) ? 1 : call->heads;
    for (int rank = 0; rank < grid->world; rank++) {
        int64_t *sizes = grid->records[rank].sizes;
        sizes[CP_SIZE_MASK_ROWS] = mask_axis(rows, q[rank], sum(q, grid->world));
        sizes[CP_SIZE_MASK_KEYS] = mask_axis(keys, kv[rank], whole_keys);
    }
}

static void draw_attention(uint64_t *state, struct grid_case *grid, bool is_even)
{
    int64_t q[GRID_MAX_WORLD] = {0};
    int64_t kv[GRID_MAX_WORLD] = {0};
    struct cp_call *call = &grid->records[0].call;
    int64_t ulysses = call->ulysses_degree;
    call->dtype = (int32_t)draw_dtype(state);
    call->batch = draw(state, 1, 2);
    call->heads = is_even ? ulysses * draw(state, 1, ulysses > 4 ? 1 : 6 / ulysses)
                          : draw(state, 1, 9);
    call->kv_heads = one_in(state, 2) ? call->heads : draw_divisor(state, call->heads);
    call->enable_gqa = call->heads != call->kv_heads;
    call->head_dim = draw(state, 1, 5);
    call->value_dim = one_in(state, 2) ? call->head_dim : draw(state, 1, 5);
    call->is_causal = one_in(state, 2);
    call->want_lse = one_in(state, 2);
    call->kv_replicated = one_in(state, 8);
    call->format = draw(state, 0, 3) == 0 ? GRID_PLAIN_KEYS : 1;
    double scale = 1.0 / sqrt((double)call->head_dim);
    memcpy(&call->scale_bits, &scale, sizeof call->scale_bits);
    draw_rows(state, grid->world, is_even && call->kv_replicated == 0, q);
    if (one_in(state, 2)) {
        memcpy(kv, q, sizeof kv);
    } else {
        draw_rows(state, grid->world, is_even, kv);
    }
    int64_t whole_keys = sum(kv, grid->world);
    int64_t chunks = one_in(state, 2) ? draw(state, 0, 1) : draw(state, 2, 5);
    for (int rank = 0; rank < grid->world; rank++) {
        grid->records[rank].sizes[CP_SIZE_HEAD_CHUNKS] = chunks;
        kv[rank] = call->kv_replicated != 0 ? whole_keys : kv[rank];
        grid->records[rank].sizes[CP_SIZE_Q_ROWS] = q[rank];
        grid->records[rank].sizes[CP_SIZE_KV_ROWS] = kv[rank];
    }
    if (one_in(state, 2)) {
        draw_mask(state, grid, q, kv, whole_keys);
    }
}

static void draw_cut(uint64_t *state, struct grid_case *grid)
{
    int64_t rows[GRID_MAX_WORLD] = {0};
    struct cp_call *call = &grid->records[0].call;
    bool is_gather = call->op == CP_OP_GATHER;
    call->dtype =
        is_gather && one_in(state, 3) ? CP_DTYPE_INT64 : (int32_t)draw_dtype(state);
    call->ndim = 3;
    call->dim = (int32_t)draw(state, 0, 2);
    for (int axis = 0; axis < call->ndim; axis++) {
        call->extent[axis] = axis == call->dim ? 0 : draw(state, 1, 3);
    }
    draw_rows(state, grid->world, false, rows);
    call->extent[call->dim] = is_gather ? 0 : sum(rows, grid->world);
    for (int rank = 0; rank < grid->world; rank++) {
        grid->records[rank].sizes[CP_SIZE_ROWS] = rows[rank];
    }
}

static void make(int ring, int ulysses, int64_t rest, int64_t number, uint64_t seed,
                 struct grid_case *out)
{
    static const enum cp_op ops[OPS] = {CP_OP_ATTENTION, CP_OP_ATTENTION_BACKWARD,
                                        CP_OP_GATHER, CP_OP_REDUCE_SCATTER};
    uint64_t state = seed ^ (uint64_t)number * 0xd1342543de82ef95u;
    int64_t road = rest / OPS % ROADS;
    /* An own row axis with an own key axis cannot be placed: draw until all ranks agree. */
    do {
        *out = (struct grid_case){
            .number = number, .seed = state, .world = ring * ulysses};
        out->transport = road == 0   ? CP_PULL
                         : road == 3 ? CP_FETCH
                         : road == 4 ? CP_PUSH
                                     : CP_TWO_SIDED;
        struct cp_call *call = &out->records[0].call;
        call->op = (int32_t)ops[rest % OPS];
        call->rotate = road == 1   ? CP_ROTATE_ALLTOALL
                       : road == 2 ? CP_ROTATE_ALLGATHER
                                   : CP_ROTATE_AUTO;
        call->variant = rest / OPS / ROADS % VARIANTS == 0 ? CP_EVEN : CP_ANYTHING;
        call->ring_degree = ring;
        call->ulysses_degree = ulysses;
        if (call->op == CP_OP_ATTENTION || call->op == CP_OP_ATTENTION_BACKWARD) {
            draw_attention(&state, out, call->variant == CP_EVEN);
        } else {
            draw_cut(&state, out);
        }
        for (int rank = 1; rank < out->world; rank++) {
            out->records[rank].call = *call;
        }
    } while (cp_agree(out->records, out->world) != CP_OK);
}

void grid_make(int64_t number, uint64_t seed, struct grid_case *out)
{
    int ring = 1;
    int ulysses = 1;
    factoring(number % FACTORINGS, &ring, &ulysses);
    make(ring, ulysses, number / FACTORINGS, number, seed, out);
}

void grid_make_like(int world, enum cp_transport transport, int64_t number,
                    uint64_t seed, struct grid_case *out)
{
    uint64_t state = seed ^ (uint64_t)number;
    int ring = (int)draw_divisor(&state, world);
    int64_t road = transport == CP_PULL    ? 0
                   : transport == CP_FETCH ? 3
                   : transport == CP_PUSH  ? 4
                                           : draw(&state, 1, 2);
    int64_t rest =
        draw(&state, 0, OPS - 1) + OPS * (road + ROADS * draw(&state, 0, VARIANTS - 1));
    make(ring, world / ring, rest, number, seed, out);
}

static int print_rows(const struct grid_case *grid, enum cp_size size, char *text,
                      size_t bytes)
{
    int used = 0;
    for (int rank = 0; rank < grid->world && used < (int)bytes; rank++) {
        used += snprintf(text + used, bytes - (size_t)used, "%s%d", rank > 0 ? "," : "",
                         (int)grid->records[rank].sizes[size]);
    }
    return used;
}

void grid_print(const struct grid_case *grid, char text[GRID_TEXT])
{
    const struct cp_call *call = &grid->records[0].call;
    bool is_cut = call->op == CP_OP_GATHER || call->op == CP_OP_REDUCE_SCATTER;
    char what[160];
    char rows[2][64];
    cp_call_print(&grid->records[0], what, sizeof what);
    (void)print_rows(grid, is_cut ? CP_SIZE_ROWS : CP_SIZE_Q_ROWS, rows[0],
                     sizeof rows[0]);
    (void)print_rows(grid, CP_SIZE_KV_ROWS, rows[1], sizeof rows[1]);
    (void)snprintf(
        text, GRID_TEXT,
        "case %lld: R=%d U=%d %s rotate %d %s, %d chunks, rows %s, keys %s, rank 0: %s",
        (long long)grid->number, (int)call->ring_degree, (int)call->ulysses_degree,
        cp_transport_name(grid->transport), (int)call->rotate,
        call->variant == CP_EVEN ? "even" : "anything",
        (int)grid->records[0].sizes[CP_SIZE_HEAD_CHUNKS], rows[0], rows[1], what);
}

struct cp_format grid_format(const struct cp_call *call)
{
    int64_t bytes = cp_dtype_bytes((enum cp_dtype)call->dtype);
    int64_t sum_bytes = cp_dtype_bytes(cp_dtype_sum((enum cp_dtype)call->dtype));
    struct cp_format format = {
        .id = call->format,
        .has_plain_keys = call->format == GRID_PLAIN_KEYS,
        .k = {.row_align = 4, .row_bytes = call->head_dim * bytes},
        .v = {.row_align = 1, .row_bytes = call->value_dim * bytes},
        .state = {.row_align = 8, .row_bytes = (call->value_dim + 2) * sum_bytes},
    };
    return format;
}

double grid_mask_value(const struct grid_case *grid, int64_t batch, int64_t head,
                       int64_t row, int64_t key)
{
    const struct cp_call *call = &grid->records[0].call;
    if (call->mask_kind == CP_MASK_NONE) {
        return 0.0;
    }
    uint64_t state = grid->seed;
    const int64_t place[] = {batch, head, row, key};
    for (int axis = 0; axis < 4; axis++) {
        state = next(&state) ^ (uint64_t)place[axis];
    }
    if (draw(&state, 0, 3) == 0) {
        return (double)-INFINITY;
    }
    /* Eighths are exact in every type. */
    return call->mask_kind == CP_MASK_BOOL ? 0.0 : (double)draw(&state, -16, 16) / 8.0;
}
