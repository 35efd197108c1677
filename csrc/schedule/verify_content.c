/* Cells, tokens and sets. */
#include "schedule/verify_content.h"

#include <stdio.h>

static const char *const role_names[CP_TENSORS] = {
    [CP_TENSOR_Q] = "q",         [CP_TENSOR_K] = "k",
    [CP_TENSOR_V] = "v",         [CP_TENSOR_MASK] = "mask",
    [CP_TENSOR_OUT] = "out",     [CP_TENSOR_LSE] = "lse",
    [CP_TENSOR_DOUT] = "dout",   [CP_TENSOR_DLSE] = "dlse",
    [CP_TENSOR_DQ] = "dq",       [CP_TENSOR_DK] = "dk",
    [CP_TENSOR_DV] = "dv",       [CP_TENSOR_DELTA] = "delta",
    [CP_TENSOR_WHOLE] = "whole", [CP_TENSOR_SHARE] = "share",
};

const char *cp_token_print(cp_token token, char text[CP_TOKEN_TEXT])
{
    int mark = cp_token_mark(token);
    int role = mark - CP_MARK_ROLE;
    int call = (int)(token >> 5 & 15);
    const char *name = role >= 0 ? role_names[role] : "a state";
    if (mark == CP_MARK_NONE || mark == CP_MARK_ZERO) {
        (void)snprintf(text, CP_TOKEN_TEXT, "%s",
                       mark == CP_MARK_NONE ? "nothing that may be read" : "zeroes");
    } else if (cp_token_a(token) == CP_TOKEN_NO_ROW) {
        (void)snprintf(text, CP_TOKEN_TEXT, "%s of a row without keys", name);
    } else if (role == CP_TENSOR_MASK) {
        (void)snprintf(text, CP_TOKEN_TEXT,
                       "mask of head %d, row %d, key %d (batch %d, call %d)",
                       (int)cp_token_a(token), (int)cp_token_b(token),
                       (int)(token >> 49), (int)cp_token_batch(token), call);
    } else {
        (void)snprintf(text, CP_TOKEN_TEXT, "%s of row %d, head %d (batch %d, call %d)",
                       name, (int)cp_token_a(token), (int)cp_token_b(token),
                       (int)cp_token_batch(token), call);
    }
    return text;
}

static int64_t cell_count(const struct cp_content *content)
{
    return content->cells[0] * content->cells[1] * content->cells[2] *
           content->cells[3];
}

static enum cp_code create_content(struct cp_memory *memory,
                                   const struct cp_shape *shape,
                                   const int64_t n[CP_AXES], struct cp_content **out)
{
    void *block = NULL;
    CP_TRY(cp_pool_take(memory->pool, 1, sizeof(struct cp_content), &block));
    struct cp_content *content = block;
    content->shape = *shape;
    for (int axis = 0; axis < CP_AXES; axis++) {
        content->cells[axis] = n[axis];
    }
    if (shape->buffer.role != CP_TENSOR_MASK) {
        content->cells[3] = 1;
    }
    CP_TRY(cp_pool_take(memory->pool, cell_count(content), sizeof *content->tokens,
                        &block));
    content->tokens = block;
    *out = content;
    return CP_OK;
}

enum cp_code cp_memory_content(struct cp_memory *memory, int arena,
                               const struct cp_shape *shape, struct cp_content **out)
{
    for (struct cp_content *it = memory->arenas[arena]; it != NULL; it = it->next) {
        if (cp_verify_same_shape(&it->shape.buffer, &shape->buffer)) {
            *out = it;
            return CP_OK;
        }
    }
    CP_TRY(create_content(memory, shape, shape->buffer.n, out));
    (*out)->next = memory->arenas[arena];
    memory->arenas[arena] = *out;
    return CP_OK;
}

enum cp_code cp_memory_parcel(struct cp_memory *memory, const struct cp_shape *shape,
                              const struct cp_box *box, struct cp_content **out)
{
    return create_content(memory, shape, box->n, out);
}

int64_t cp_content_cell(const struct cp_arg *arg, int64_t i0, int64_t i1, int64_t i2,
                        int64_t i3)
{
    const struct cp_content *content = arg->content;
    const int64_t *first = arg->box->first;
    int64_t last = content->shape.buffer.role == CP_TENSOR_MASK ? first[3] + i3 : 0;
    int64_t row = (first[0] + i0) * content->cells[1] + first[1] + i1;
    return (row * content->cells[2] + first[2] + i2) * content->cells[3] + last;
}

/* The bytes of one cell of a content. */
static struct cp_extent cell_extent(const struct cp_content *content,
                                    const int64_t at[CP_AXES])
{
    const int64_t *n = content->shape.buffer.n;
    struct cp_box cell = {.first = {at[0], at[1], at[2], at[3]},
                          .n = {1, 1, 1, content->cells[3] == n[3] ? 1 : n[3]}};
    return cp_verify_extent(&content->shape, &cell);
}

static void forget(struct cp_content *content, struct cp_extent written)
{
    const int64_t *cells = content->cells;
    int64_t cell = 0;
    int64_t at[CP_AXES];
    for (at[0] = 0; at[0] < cells[0]; at[0]++) {
        for (at[1] = 0; at[1] < cells[1]; at[1]++) {
            for (at[2] = 0; at[2] < cells[2]; at[2]++) {
                for (at[3] = 0; at[3] < cells[3]; at[3]++, cell++) {
                    struct cp_extent own = cell_extent(content, at);
                    if (own.lo < written.hi && written.lo < own.hi) {
                        content->tokens[cell] = CP_MARK_NONE;
                    }
                }
            }
        }
    }
}

void cp_memory_wrote(struct cp_memory *memory, int arena, const struct cp_arg *arg)
{
    struct cp_extent written = cp_verify_extent(&arg->content->shape, arg->box);
    for (struct cp_content *it = memory->arenas[arena]; it != NULL; it = it->next) {
        const struct cp_buffer *buffer = &it->shape.buffer;
        if (it != arg->content && buffer->offset_bytes < written.hi &&
            written.lo < buffer->offset_bytes + buffer->bytes) {
            forget(it, written);
        }
    }
}

enum cp_code cp_content_need_sets(const struct cp_memory *memory,
                                  struct cp_content *content)
{
    void *block = NULL;
    if (content->sets == NULL) {
        CP_TRY(cp_pool_take(memory->pool, cell_count(content) * memory->set_words,
                            sizeof *content->sets, &block));
        content->sets = block;
    }
    return CP_OK;
}

uint64_t *cp_content_set(const struct cp_memory *memory,
                         const struct cp_content *content, int64_t cell)
{
    return content->sets + cell * memory->set_words;
}

/* The bits first .. last of the word that starts at bit `base`. */
static uint64_t word_bits(int64_t base, int64_t first, int64_t last)
{
    uint64_t from = first > base ? ~UINT64_C(0) << (first - base) : ~UINT64_C(0);
    uint64_t to =
        last < base + 63 ? ~UINT64_C(0) >> (63 - (last - base)) : ~UINT64_C(0);
    return from & to;
}

int64_t cp_set_add(uint64_t *set, int64_t first, int64_t last)
{
    for (int64_t base = first / 64 * 64; base <= last; base += 64) {
        uint64_t bits = word_bits(base, first, last);
        uint64_t twice = set[base / 64] & bits;
        if (twice != 0) {
            return base + __builtin_ctzll(twice);
        }
        set[base / 64] |= bits;
    }
    return -1;
}

int64_t cp_set_count(const uint64_t *set, int64_t first, int64_t last)
{
    int64_t count = 0;
    for (int64_t base = first / 64 * 64; base <= last; base += 64) {
        count += __builtin_popcountll(set[base / 64] & word_bits(base, first, last));
    }
    return count;
}
