/* What writers of schedules build with: buffers placed one after the other, steps
 * appended to lanes.
 *
 * Errors are sticky: after one every call does nothing, and `cp_builder_take` returns
 * it. So a writer reads as the list of steps that it is. */
#ifndef CP_SCHEDULE_BUILDER_H
#define CP_SCHEDULE_BUILDER_H

#include "schedule/schedule.h"

struct cp_builder {
    struct cp_schedule *schedule; /* owned until taken */
    int32_t buffer_capacity, step_capacity;
    int32_t lane_steps[CP_LANES]; /* steps on each lane so far: what `after` counts */
    /* [lane][other]: for how many steps of the other lane all steps of the lane wait from
     * now on */
    int32_t floor[CP_LANES][CP_LANES];
    enum cp_code code;
    struct cp_status error;
    struct cp_step spare; /* where a failed builder's steps go */
};

/* A run of memory that buffers are placed in: a window or the workspace. Setting `bytes`
 * back to what it was gives what was placed since to others. */
struct cp_arena {
    enum cp_buffer_kind kind;
    int owner;
    int64_t bytes; /* where the next buffer goes */
    int64_t most;  /* that `bytes` has been */
};

void cp_builder_init(struct cp_builder *builder, const struct cp_plan *plan, int rank);
/* Ends the builder. `window` and `scratch` are the own arenas. */
CP_NODISCARD enum cp_code cp_builder_take(struct cp_builder *builder,
                                          const struct cp_arena *window,
                                          const struct cp_arena *scratch,
                                          struct cp_schedule **out);

/* A tensor of the caller. */
int32_t cp_build_tensor(struct cp_builder *builder, enum cp_buffer_kind kind,
                        enum cp_tensor_role role, enum cp_dtype dtype,
                        const int64_t n[CP_AXES]);
/* A buffer at the end of the arena. Plain buffers are stored head by head (axis order
 * 0, 2, 1, 3), so that the rows of a head lie together. */
int32_t cp_build_buffer(struct cp_builder *builder, struct cp_arena *arena,
                        enum cp_layout layout, enum cp_tensor_role role,
                        enum cp_dtype dtype, const int64_t n[CP_AXES]);
/* The same, plain, with `axis` outside the others: a part along it is one run of bytes. */
int32_t cp_build_runs(struct cp_builder *builder, struct cp_arena *arena, int axis,
                      enum cp_tensor_role role, enum cp_dtype dtype,
                      const int64_t n[CP_AXES]);

/* All of a buffer, or no box for CP_NO_BUFFER; a part of a box along one axis. */
struct cp_box cp_box_all(const struct cp_builder *builder, int32_t buffer);
struct cp_box cp_box_part(struct cp_box box, int axis, int64_t first, int64_t count);
struct cp_box cp_box_none(void);
bool cp_box_is_empty(const struct cp_box *box);

/* A step at the end of the lane, waiting for no more than the floor; the caller fills in the
 * rest before the next one is made. */
struct cp_step *cp_build_step(struct cp_builder *builder, enum cp_step_op op,
                              enum cp_lane lane);
/* The step waits for all that the other lane has so far. */
void cp_build_after(struct cp_builder *builder, struct cp_step *step,
                    enum cp_lane other);

/* COPY, REDUCE, PACK, SEND, RECV and ZERO do nothing where the box is empty; what `move`
 * or `zero` returns is then no step. */
struct cp_step *cp_build_move(struct cp_builder *builder, enum cp_step_op op,
                              enum cp_lane lane, struct cp_box dst, struct cp_box src);
struct cp_step *cp_build_zero(struct cp_builder *builder, enum cp_lane lane,
                              int32_t buffer);
void cp_build_publish(struct cp_builder *builder, enum cp_lane lane, int signal,
                      uint32_t value);
void cp_build_await(struct cp_builder *builder, enum cp_lane lane, int peer, int signal,
                    uint32_t value);
void cp_build_send(struct cp_builder *builder, enum cp_lane lane, int group, int peer,
                   struct cp_box src);
void cp_build_recv(struct cp_builder *builder, enum cp_lane lane, int group, int peer,
                   struct cp_box dst);

#endif
