/* Keys and values that lie in the memory of another GPU, brought to this one: for kernels
 * that read them many times, or want to be told that all their tensors are on one device. */
#ifndef CP_CUDA_NEAR_H
#define CP_CUDA_NEAR_H

#include "base/status.h"
#include "tensor/view.h"

struct cp_stream;

/* How much room the keys and values of a block take on the current device; 0 where they
 * are there already. Both lie in the memory of one device. */
CP_NODISCARD enum cp_code cp_near_bytes(const struct cp_view *k,
                                        const struct cp_view *v, int64_t *out);

/* Enqueues a copy of both to `room`, of the current device and aligned to 256, and has the
 * views tell of it: rows side by side, head by head, as panels of plain rows. */
CP_NODISCARD enum cp_code cp_near_bring(char *room, struct cp_view *k,
                                        struct cp_view *v, struct cp_stream *stream);

#endif
