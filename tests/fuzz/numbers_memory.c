/* Elements, panels and rows as bytes of a rank's memory. */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "numbers_hash.h"
#include "numbers_world.h"

void *numbers_allocate(size_t count, size_t bytes)
{
    void *block = calloc(count + 1, bytes);
    FUZZ_CHECK(block != NULL, "no memory");
    return block;
}

struct place numbers_place(struct world *world, int rank, int32_t number)
{
    const struct cp_buffer *buffer = &world->ranks[rank].schedule->buffers[number];
    const struct cp_panel *panel =
        cp_schedule_panel(world->plan, (enum cp_layout)buffer->layout);
    struct rank *owner = &world->ranks[buffer->owner];
    struct place place = {
        .buffer = buffer,
        .first = buffer->offset_bytes,
        .item = panel != NULL ? cp_panel_bytes(panel, buffer->n[1])
                              : cp_dtype_bytes((enum cp_dtype)buffer->dtype),
        .is_panel = panel != NULL,
        .may_be_written = buffer->kind == CP_BUFFER_WINDOW ||
                          (buffer->owner == rank && buffer->kind != CP_BUFFER_INPUT),
    };
    memcpy(place.stride, buffer->stride_bytes, sizeof place.stride);
    if (is_tensor(buffer)) {
        const int64_t *n = buffer->n;
        place.memory = owner->tensors[buffer->kind == CP_BUFFER_OUTPUT][buffer->role];
        place.first = 0;
        place.stride[3] = place.item;
        place.stride[2] = place.stride[3] * n[3];
        place.stride[1] = place.stride[2] * n[2];
        place.stride[0] = place.stride[1] * n[1];
    } else {
        place.memory =
            buffer->kind == CP_BUFFER_WINDOW ? owner->window : owner->scratch;
    }
    return place;
}

uint64_t *numbers_at(const struct place *place, int64_t byte)
{
    FUZZ_CHECK(byte >= 0 && byte < place->memory.bytes, "byte %lld of %lld",
               (long long)byte, (long long)place->memory.bytes);
    return &place->memory.at[byte];
}

int64_t numbers_byte(const struct place *place, const struct cp_box *box,
                     const int64_t at[CP_AXES])
{
    int64_t byte = place->first;
    for (int axis = 0; axis < CP_AXES; axis++) {
        bool is_inner = place->is_panel && (axis == 1 || axis == 3);
        byte += is_inner ? 0 : (box->first[axis] + at[axis]) * place->stride[axis];
    }
    FUZZ_CHECK(byte % (place->is_panel ? CP_PANEL_ALIGN : place->item) == 0,
               "byte %lld is not aligned", (long long)byte);
    return byte;
}

void numbers_write_byte(const struct place *place, int64_t byte, uint64_t number)
{
    FUZZ_CHECK(place->may_be_written, "writes what is not its own");
    *numbers_at(place, byte) = number;
}

/* A panel has a number for each row at its start; the rest is inside. */
static int64_t panel_row(const struct place *place, const struct cp_box *box,
                         const int64_t at[CP_AXES])
{
    return numbers_byte(place, box, at) + box->first[1] + at[1];
}

static void fill_inside(const struct place *place, int64_t from, int64_t to)
{
    for (int64_t byte = from; byte < to; byte++) {
        numbers_write_byte(place, byte, numbers_inside);
    }
}

static bool is_inside(const struct place *place, int64_t from, int64_t to)
{
    bool is_whole = true;
    for (int64_t byte = from; byte < to; byte++) {
        is_whole = is_whole && *numbers_at(place, byte) == numbers_inside;
    }
    return is_whole;
}

uint64_t numbers_read(const struct place *place, const struct cp_box *box,
                      const int64_t at[CP_AXES])
{
    int64_t byte = numbers_byte(place, box, at);
    return is_inside(place, byte + 1, byte + place->item) ? *numbers_at(place, byte)
                                                          : numbers_nothing;
}

void numbers_write(const struct place *place, const struct cp_box *box,
                   const int64_t at[CP_AXES], uint64_t number)
{
    int64_t byte = numbers_byte(place, box, at);
    numbers_write_byte(place, byte, number);
    fill_inside(place, byte + 1, byte + place->item);
}

/* The number of a row, if all its elements are of one row. */
uint64_t numbers_read_row(const struct place *place, const struct cp_box *box,
                          int64_t b, int64_t i, int64_t h)
{
    int64_t at[CP_AXES] = {b, i, h, 0};
    if (place->is_panel) {
        int64_t byte = numbers_byte(place, box, at);
        bool is_whole =
            is_inside(place, byte + place->buffer->n[1], byte + place->item);
        return is_whole ? *numbers_at(place, panel_row(place, box, at))
                        : numbers_nothing;
    }
    uint64_t row = numbers_read(place, box, at);
    for (at[3] = 1; at[3] < box->n[3]; at[3]++) {
        if (numbers_read(place, box, at) != element_of(row, at[3])) {
            return numbers_nothing;
        }
    }
    return row;
}

void numbers_write_row(const struct place *place, const struct cp_box *box, int64_t b,
                       int64_t i, int64_t h, uint64_t row)
{
    int64_t at[CP_AXES] = {b, i, h, 0};
    if (place->is_panel) {
        int64_t byte = numbers_byte(place, box, at);
        numbers_write_byte(place, panel_row(place, box, at), row);
        fill_inside(place, byte + place->buffer->n[1], byte + place->item);
        return;
    }
    for (at[3] = 0; at[3] < box->n[3]; at[3]++) {
        numbers_write(place, box, at, element_of(row, at[3]));
    }
}
