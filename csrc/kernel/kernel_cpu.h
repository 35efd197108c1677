/* The attention kernels of this host's CPU, and which of them a call uses.
 *
 * Kernels are numbered in ascending order of what they need from the CPU: an ISA is a place in that list, 0 is the
 * plain C one that runs everywhere. Every kernel gives the same answers within rounding, so the number decides speed
 * only; but packed panels differ, and ranks compare their format's id. */
#ifndef CP_KERNEL_KERNEL_CPU_H
#define CP_KERNEL_KERNEL_CPU_H

#include "kernel/kernel.h"

/* The first format id of each kernel; its layouts, such as one per sum type, count up from it. */
enum cp_format_family {
    CP_FORMAT_GENERIC = 0x100,
    CP_FORMAT_AVX2 = 0x200,
    CP_FORMAT_AVX512 = 0x300,
    CP_FORMAT_AVX512BF16 = 0x400,
};

/* The readable reference: any dtype that attends, any dims up to 65,536, any argument. */
extern const struct cp_kernel_ops cp_kernel_generic_ops;
#ifdef CP_HAVE_X86
extern const struct cp_kernel_ops cp_kernel_avx2_ops;
extern const struct cp_kernel_ops cp_kernel_avx512_ops;
extern const struct cp_kernel_ops cp_kernel_avx512bf16_ops; /* bfloat16 alone */

/* Their `is_available`, here because their own files are compiled for what may be missing: does the CPU have it, and
 * does the system save its registers? */
bool cp_kernel_cpu_has_avx2(void);   /* AVX2, FMA, F16C */
bool cp_kernel_cpu_has_avx512(void); /* AVX-512 F, BW, VL, DQ, and the above */
bool cp_kernel_cpu_has_avx512bf16(void);

/* Their backward passes, and the scratch that these need. */
enum cp_code cp_kernel_avx2_delta(const struct cp_delta_args *args,
                                  struct cp_stream *stream);
enum cp_code cp_kernel_avx2_grad(const struct cp_grad_args *args,
                                 struct cp_stream *stream);
int64_t cp_kernel_avx2_grad_bytes(int64_t head_dim, int64_t value_dim);
enum cp_code cp_kernel_avx512_delta(const struct cp_delta_args *args,
                                    struct cp_stream *stream);
enum cp_code cp_kernel_avx512_grad(const struct cp_grad_args *args,
                                   struct cp_stream *stream);
int64_t cp_kernel_avx512_grad_bytes(int64_t head_dim, int64_t value_dim);
enum cp_code cp_kernel_avx512bf16_delta(const struct cp_delta_args *args,
                                        struct cp_stream *stream);
enum cp_code cp_kernel_avx512bf16_grad(const struct cp_grad_args *args,
                                       struct cp_stream *stream);
int64_t cp_kernel_avx512bf16_grad_bytes(int64_t head_dim, int64_t value_dim);
#endif

/* Entries that other kernels may take over as they are: no packed panel is involved. */
enum cp_code cp_kernel_generic_delta(const struct cp_delta_args *args,
                                     struct cp_stream *stream);
enum cp_code cp_kernel_generic_grad(const struct cp_grad_args *args,
                                    struct cp_stream *stream);
/* What the latter needs as format.grad_scratch_bytes. */
int64_t cp_kernel_generic_grad_bytes(enum cp_dtype dtype, int64_t head_dim,
                                     int64_t value_dim);

/* The kernel at a place of the list, available or not; NULL past its end. */
const struct cp_kernel_ops *cp_kernel_cpu_at(int isa);
/* The last available place. */
int cp_kernel_cpu_best(void);
/* "generic", "avx2", ...; "unknown" past the end. */
const char *cp_kernel_cpu_name(int isa);
/* The value of CP_ATTN_ISA as a place; NULL and "" mean the best. CP_ERR_VALUE with the names allowed here for one
 * that is unknown or not available. */
CP_NODISCARD enum cp_code cp_kernel_cpu_parse(const char *text, int *isa);
/* The best available kernel at or below `isa_limit` that takes the call; otherwise the generic one's refusal. */
CP_NODISCARD enum cp_code cp_kernel_cpu_select(int isa_limit, enum cp_backend backend,
                                               enum cp_dtype dtype, int64_t head_dim,
                                               int64_t value_dim,
                                               const struct cp_kernel_ops **out,
                                               struct cp_format *format);

#endif
