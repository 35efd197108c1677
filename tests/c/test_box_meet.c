/* Boxes that may share memory: by the places in one tensor, by the bytes of two buffers. */
#include "schedule/box_meet.h"
#include "test.h"

/* Two rows apart in one buffer, a buffer over the end of another, one in another window,
 * and the caller's tensors under several numbers. */
enum { FIRST, OVER, BEHIND, WINDOW, PEERS, INPUT, AGAIN, OTHER, BUFFERS };

static struct cp_buffer buffers[BUFFERS] = {
    [FIRST] = {.kind = CP_BUFFER_SCRATCH, .offset_bytes = 0, .bytes = 64},
    [OVER] = {.kind = CP_BUFFER_SCRATCH, .offset_bytes = 63, .bytes = 64},
    [BEHIND] = {.kind = CP_BUFFER_SCRATCH, .offset_bytes = 64, .bytes = 64},
    [WINDOW] = {.kind = CP_BUFFER_WINDOW, .offset_bytes = 0, .bytes = 64},
    [PEERS] = {.kind = CP_BUFFER_WINDOW, .owner = 1, .offset_bytes = 0, .bytes = 64},
    [INPUT] = {.kind = CP_BUFFER_INPUT, .role = CP_TENSOR_DK},
    [AGAIN] = {.kind = CP_BUFFER_OUTPUT, .role = CP_TENSOR_DK},
    [OTHER] = {.kind = CP_BUFFER_OUTPUT, .role = CP_TENSOR_DV},
};
static const struct cp_schedule schedule = {.buffers = buffers,
                                            .buffer_count = BUFFERS};

static struct cp_box box(int32_t buffer, int64_t row, int64_t head)
{
    return (struct cp_box){
        .buffer = buffer, .first = {0, row, head, 0}, .n = {1, 2, 2, 4}};
}

static bool meets(struct cp_box a, struct cp_box b)
{
    bool is_there = cp_box_meets(&schedule, &a, &b);
    CHECK_EQ_I64(cp_box_meets(&schedule, &b, &a), is_there);
    return is_there;
}

TEST(boxes_of_one_buffer_meet_where_all_axes_do)
{
    CHECK(meets(box(FIRST, 0, 0), box(FIRST, 0, 0)));
    CHECK(meets(box(FIRST, 0, 0), box(FIRST, 1, 1)));
    CHECK(!meets(box(FIRST, 0, 0), box(FIRST, 2, 0)));
    CHECK(!meets(box(FIRST, 0, 0), box(FIRST, 1, 2)));
    struct cp_box none = box(FIRST, 0, 0);
    none.n[3] = 0;
    CHECK(!meets(none, box(FIRST, 0, 0)));
    none.buffer = CP_NO_BUFFER;
    CHECK(!meets(none, box(FIRST, 0, 0)));
}

TEST(buffers_meet_where_their_bytes_do)
{
    CHECK(meets(box(FIRST, 0, 0), box(OVER, 8, 8)));
    CHECK(meets(box(OVER, 0, 0), box(BEHIND, 0, 0)));
    CHECK(!meets(box(FIRST, 0, 0), box(BEHIND, 0, 0)));
    CHECK(!meets(box(FIRST, 0, 0), box(WINDOW, 0, 0)));
    CHECK(!meets(box(WINDOW, 0, 0), box(PEERS, 0, 0)));
    CHECK(!meets(box(FIRST, 0, 0), box(INPUT, 0, 0)));
}

TEST(a_tensor_of_the_caller_is_one_under_any_number)
{
    CHECK(meets(box(INPUT, 0, 0), box(AGAIN, 1, 0)));
    CHECK(!meets(box(INPUT, 0, 0), box(AGAIN, 2, 0)));
    CHECK(!meets(box(AGAIN, 0, 0), box(OTHER, 0, 0)));
}

static bool are_free(int32_t dst, int32_t src, int32_t later_dst, int32_t later_src)
{
    struct cp_step a = {.arg = {box(dst, 0, 0), box(src, 0, 0)}};
    struct cp_step b = {.arg = {box(later_dst, 0, 0), box(later_src, 0, 0)}};
    return cp_copies_are_free(&schedule, &a, &b);
}

TEST(copies_are_free_unless_one_writes_what_the_other_touches)
{
    CHECK(are_free(FIRST, INPUT, BEHIND, INPUT));
    CHECK(are_free(FIRST, WINDOW, BEHIND, WINDOW));
    CHECK(!are_free(FIRST, INPUT, FIRST, WINDOW));
    CHECK(!are_free(FIRST, INPUT, OTHER, FIRST));
    CHECK(!are_free(WINDOW, FIRST, FIRST, PEERS));
    CHECK(!are_free(WINDOW, FIRST, OVER, PEERS));
}
