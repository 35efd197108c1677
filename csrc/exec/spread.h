/* Spreads a step over the threads of a rank: its tensors are cut into boxes that no two
 * threads write to, and each box is one call of the kernel's or the device's table.
 *
 * Kernels and devices know nothing of threads. On an asynchronous device there are none to
 * spread over, and each step is one call. */
#ifndef CP_EXEC_SPREAD_H
#define CP_EXEC_SPREAD_H

#include "base/pool.h"
#include "device/device.h"
#include "kernel/kernel.h"

/* Borrowed, all of it. */
struct cp_spread {
    struct cp_pool *pool; /* NULL: the caller's thread alone */
    struct cp_device *device;
    const struct cp_kernel_ops *kernel; /* NULL for shard and gather */
    const struct cp_format *format;     /* of the kernel */
    int64_t scratch_bytes; /* from one thread's kernel scratch to the next one's */
};

/* As the entries of struct cp_kernel_ops; args->scratch is the first thread's. */
CP_NODISCARD enum cp_code cp_spread_attend(const struct cp_spread *spread,
                                           const struct cp_attend_args *args,
                                           struct cp_stream *stream);
CP_NODISCARD enum cp_code cp_spread_finish(const struct cp_spread *spread,
                                           const struct cp_finish_args *args,
                                           struct cp_stream *stream);
CP_NODISCARD enum cp_code cp_spread_delta(const struct cp_spread *spread,
                                          const struct cp_delta_args *args,
                                          struct cp_stream *stream);
CP_NODISCARD enum cp_code cp_spread_grad(const struct cp_spread *spread,
                                         const struct cp_grad_args *args,
                                         struct cp_stream *stream);
CP_NODISCARD enum cp_code cp_spread_pack(const struct cp_spread *spread, bool is_key,
                                         const struct cp_view *dst,
                                         const struct cp_view *src,
                                         struct cp_stream *stream);

/* As those of struct cp_device_ops. */
CP_NODISCARD enum cp_code cp_spread_copy(const struct cp_spread *spread,
                                         const struct cp_copy *copies, int count,
                                         struct cp_stream *stream);
CP_NODISCARD enum cp_code cp_spread_add(const struct cp_spread *spread,
                                        const struct cp_view *dst,
                                        const struct cp_view *src,
                                        struct cp_stream *stream);
CP_NODISCARD enum cp_code cp_spread_zero(const struct cp_spread *spread, void *data,
                                         int64_t bytes, struct cp_stream *stream);

#endif
