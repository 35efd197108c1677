/* From DLPack's description of a tensor to ours: what can be checked without Python. */
#ifndef CP_TENSOR_TENSOR_DLPACK_H
#define CP_TENSOR_TENSOR_DLPACK_H

#include <dlpack/dlpack.h>

#include "tensor/tensor.h"

/* NULL strides mean packed; strides of axes with fewer than two elements mean nothing. CP_ERR_TYPE for an element
 * type that is not in tensor/dtype.h, with DLPack's code, bits and lanes; otherwise as cp_tensor_normalize. The
 * device is noted, not judged. `out` borrows the memory of `source`, nothing else of it. */
CP_NODISCARD enum cp_code cp_tensor_from_dlpack(const char *name,
                                                const DLTensor *source,
                                                bool is_read_only,
                                                struct cp_tensor *out);

/* DLPack's description of a packed tensor on that device: for asking a framework to make one. `shape` is borrowed by
 * the result. */
DLTensor cp_tensor_prototype(enum cp_dtype dtype, DLDevice device, int ndim,
                             int64_t *shape);
DLDataType cp_tensor_dlpack_dtype(enum cp_dtype dtype);

/* Memory that this machine's processor reads directly: CPU, and pinned. */
bool cp_tensor_is_on_host(const struct cp_tensor *tensor);
/* CP_ERR_VALUE, naming the device, for memory that neither the processor reads nor CUDA's kernels. */
CP_NODISCARD enum cp_code cp_tensor_check_device(const char *name,
                                                 const struct cp_tensor *tensor);
/* One device, or the host both. */
bool cp_tensor_are_together(const struct cp_tensor *a, const struct cp_tensor *b);

/* "cpu", "cuda:0", ...: for messages; returns `text`. */
const char *cp_tensor_print_device(const struct cp_tensor *tensor, char *text,
                                   size_t bytes);

#endif
