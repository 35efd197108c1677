/* What a tensor core does for a warp, and copies that land later: by the layouts and rules
 * of the PTX ISA (mma.m16n8k16, ldmatrix, cp.async). */
#include "sim_warp.h"

#include <stdlib.h>
#include <string.h>

#include "sim.h"
#include "tensor/convert.h"

enum { WARP = 32, QUAD = 4 };

static float number_of(enum simgpu_mma_type type, uint32_t pair, int i)
{
    uint16_t bits = (uint16_t)(i ? pair >> 16 : pair);
    return type == SIMGPU_MMA_BF16 ? cp_bf16_to_f32(bits) : cp_f16_to_f32(bits);
}

/* Lane 4 g + t holds of a the rows g and g + 8 at columns 2 t, 2 t + 1 and eight further,
 * of b the column g at rows 2 t, 2 t + 1 and eight further, of the sum the rows g and g + 8
 * at columns 2 t and 2 t + 1. */
void sim_mma(void *const lanes[])
{
    float a[16][16], b[16][8];
    for (int lane = 0; lane < WARP; lane++) {
        const struct sim_mma *part = lanes[lane];
        int g = lane / QUAD, t = lane % QUAD;
        for (int i = 0; i < 2; i++) {
            a[g][2 * t + i] = number_of(part->type, part->a[0], i);
            a[g + 8][2 * t + i] = number_of(part->type, part->a[1], i);
            a[g][2 * t + 8 + i] = number_of(part->type, part->a[2], i);
            a[g + 8][2 * t + 8 + i] = number_of(part->type, part->a[3], i);
            b[2 * t + i][g] = number_of(part->type, part->b[0], i);
            b[2 * t + 8 + i][g] = number_of(part->type, part->b[1], i);
        }
    }
    float sum[16][8] = {{0}};
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
            for (int column = 0; column < 8; column++) {
                sum[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for (int lane = 0; lane < WARP; lane++) {
        const struct sim_mma *part = lanes[lane];
        int g = lane / QUAD, t = lane % QUAD;
        for (int i = 0; i < 4; i++) {
            part->sum[i] += sum[g + 8 * (i / 2)][2 * t + i % 2];
        }
    }
}

/* Lane 8 m + r brings row r of matrix m. Lane 4 g + t gets of each matrix row g at columns
 * 2 t and 2 t + 1; transposed, column g at these rows. */
void sim_load_matrices(void *const lanes[])
{
    for (int lane = 0; lane < WARP; lane++) {
        const struct sim_matrices *self = lanes[lane];
        int g = lane / QUAD, t = lane % QUAD;
        for (int matrix = 0; matrix < 4; matrix++) {
            uint32_t pair = 0;
            for (int i = 0; i < 2; i++) {
                int row = self->is_transposed ? 2 * t + i : g;
                int column = self->is_transposed ? g : 2 * t + i;
                const struct sim_matrices *from = lanes[8 * matrix + row];
                uint32_t number = from->row[column / 2] >> (column % 2 * 16) & 0xffffu;
                pair |= number << (16 * i);
            }
            self->to[matrix] = pair;
        }
    }
}

/* ---- copies ---- */

struct sim_copy {
    char *to;
    const char *from;
    int bytes, read_bytes;
    uint64_t group;
};

static void land(const struct sim_copy *copy)
{
    memcpy(copy->to, copy->from, (size_t)copy->read_bytes);
    memset(copy->to + copy->read_bytes, 0, (size_t)(copy->bytes - copy->read_bytes));
}

void sim_async_add(struct sim_async *async, void *to, const void *from, int bytes,
                   int read_bytes, bool is_early)
{
    const struct sim_copy copy = {to, from, bytes, read_bytes, async->groups};
    if ((bytes != 4 && bytes != 8 && bytes != 16) || read_bytes < 0 ||
        read_bytes > bytes || (uintptr_t)to % (unsigned)bytes != 0 ||
        (read_bytes > 0 && (uintptr_t)from % (unsigned)bytes != 0)) {
        sim_violate("an asynchronous copy of %d bytes, %d of them read, from %p to %p: "
                    "it takes 4, 8 or 16 bytes between addresses that they divide",
                    bytes, read_bytes, from, to);
        return;
    }
    if (is_early) {
        land(&copy);
        return;
    }
    if (async->count == async->room) {
        async->room = async->room ? 2 * async->room : 64;
        async->copies =
            realloc(async->copies, (size_t)async->room * sizeof *async->copies);
        if (!async->copies) {
            abort();
        }
    }
    memset(to, 0xff, (size_t)bytes); /* nobody reads it until the copy is waited for */
    async->copies[async->count++] = copy;
}

void sim_async_commit(struct sim_async *async)
{
    async->groups += 1;
}

void sim_async_wait(struct sim_async *async, int newest)
{
    int kept = 0;
    for (int i = 0; i < async->count; i++) {
        const struct sim_copy copy = async->copies[i];
        if (copy.group + (uint64_t)newest < async->groups) {
            land(&copy);
        } else {
            async->copies[kept++] = copy;
        }
    }
    async->count = kept;
}

void sim_async_end(struct sim_async *async)
{
    for (int i = 0; i < async->count; i++) {
        land(&async->copies[i]);
    }
    async->count = 0;
}

void sim_async_free(struct sim_async *async)
{
    free(async->copies);
    *async = (struct sim_async){0};
}
