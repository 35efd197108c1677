/* The attention kernels that run on a CUDA device. */
#ifndef CP_CUDA_KERNEL_CUDA_H
#define CP_CUDA_KERNEL_CUDA_H

#include "kernel/kernel.h"

/* The first format id of each kernel; its layouts, one per dtype, count up from it. All
 * are above those of the CPU kernels (kernel/kernel_cpu.h). */
enum cp_cuda_format_family {
    CP_FORMAT_CUDA_PLAIN = 0x10000,
};

/* The readable one: any dtype that attends, any dims up to 65,536, any argument. The
 * yardstick of the others, and what takes the calls that they do not. Streams are those
 * of the current device. */
extern const struct cp_kernel_ops cp_kernel_cuda_plain_ops;

/* The plain kernel's state from that row and head on. */
struct cp_view cp_kernel_cuda_state(const struct cp_view *state, int64_t row,
                                    int64_t head);

/* As struct cp_kernel_list.select: the best that is available and takes the call, or the
 * one that CP_ATTN_CUDA_KERNEL names. */
CP_NODISCARD enum cp_code cp_kernel_cuda_select(int limit, enum cp_backend backend,
                                                enum cp_dtype dtype, int64_t head_dim,
                                                int64_t value_dim,
                                                const struct cp_kernel_ops **out,
                                                struct cp_format *format);

#endif
