/* The buffers of a schedule: are they what the plan says, do they lie where they may, and
 * which bytes does a box of one take? */
#ifndef CP_SCHEDULE_VERIFY_BUFFER_H
#define CP_SCHEDULE_VERIFY_BUFFER_H

#include "schedule/verify_at.h"

/* A buffer with its strides worked out: those of the caller's tensors as if they were packed,
 * since no schedule may depend on them; those of a panel's rows and dims 0. */
struct cp_shape {
    struct cp_buffer buffer;
    int64_t unit_bytes; /* an element, or a panel */
};

/* Bytes from `lo` on, before `hi`. */
struct cp_extent {
    int64_t lo, hi;
};

/* Does a call of this plan have the caller's tensor `role`, read (INPUT) or written (OUTPUT)?
 * Then its shape and type on this rank. */
bool cp_verify_tensor(const struct cp_plan *plan, int rank, enum cp_buffer_kind kind,
                      enum cp_tensor_role role, int64_t n[CP_AXES],
                      enum cp_dtype *dtype);

struct cp_shape cp_verify_shape(const struct cp_plan *plan,
                                const struct cp_buffer *buffer);

/* Are both the same bytes, read in the same way? */
bool cp_verify_same_shape(const struct cp_buffer *a, const struct cp_buffer *b);

bool cp_verify_box_is_empty(const struct cp_box *box);
/* From the first byte of a box that is not empty to its last. */
struct cp_extent cp_verify_extent(const struct cp_shape *shape,
                                  const struct cp_box *box);
/* The bytes that a box has, without those between its parts. */
int64_t cp_verify_box_bytes(const struct cp_shape *shape, const struct cp_box *box);

/* Checks all buffers of `of_call[rank]`; `of_call` holds the schedules of all ranks. */
CP_NODISCARD enum cp_code cp_verify_buffers(const struct cp_schedule *const *of_call,
                                            int call, int rank);

#endif
