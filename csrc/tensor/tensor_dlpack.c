/* DLPack's fields, one by one. */
#include "tensor/tensor_dlpack.h"

#include <limits.h>
#include <stdio.h>

#include "base/checked.h"

static const struct {
    DLDeviceType type;
    const char *name;
} devices[] = {
    {kDLCPU, "cpu"},
    {kDLCUDA, "cuda"},
    {kDLCUDAHost, "cuda_host"},
    {kDLOpenCL, "opencl"},
    {kDLVulkan, "vulkan"},
    {kDLMetal, "metal"},
    {kDLVPI, "vpi"},
    {kDLROCM, "rocm"},
    {kDLROCMHost, "rocm_host"},
    {kDLExtDev, "ext_dev"},
    {kDLCUDAManaged, "cuda_managed"},
    {kDLOneAPI, "oneapi"},
    {kDLWebGPU, "webgpu"},
    {kDLHexagon, "hexagon"},
    {kDLMAIA, "maia"},
    {kDLTrn, "trn"},
};

const char *cp_tensor_print_device(const struct cp_tensor *tensor, char *text,
                                   size_t bytes)
{
    const char *name = NULL;
    for (size_t row = 0; row < sizeof devices / sizeof devices[0]; row++) {
        if ((int)devices[row].type == tensor->device_type) {
            name = devices[row].name;
        }
    }
    if (name == NULL) {
        (void)snprintf(text, bytes, "device type %d:%d", tensor->device_type,
                       tensor->device_id);
    } else if (tensor->device_type == (int)kDLCPU) {
        (void)snprintf(text, bytes, "%s", name);
    } else {
        (void)snprintf(text, bytes, "%s:%d", name, tensor->device_id);
    }
    return text;
}

bool cp_tensor_is_on_host(const struct cp_tensor *tensor)
{
    return tensor->device_type == (int)kDLCPU ||
           tensor->device_type == (int)kDLCUDAHost ||
           tensor->device_type == (int)kDLROCMHost;
}

enum cp_code cp_tensor_check_device(const char *name, const struct cp_tensor *tensor)
{
    char device[48];
    if (cp_tensor_is_on_host(tensor) || tensor->device_type == (int)kDLCUDA) {
        return CP_OK;
    }
    return cp_fail(CP_ERR_VALUE, "%s is on %s; allowed: cpu, cuda", name,
                   cp_tensor_print_device(tensor, device, sizeof device));
}

bool cp_tensor_are_together(const struct cp_tensor *a, const struct cp_tensor *b)
{
    return (cp_tensor_is_on_host(a) && cp_tensor_is_on_host(b)) ||
           (a->device_type == b->device_type && a->device_id == b->device_id);
}

static enum cp_code read_dtype(const char *name, DLDataType source, enum cp_dtype *out)
{
    enum cp_dtype dtype = cp_dtype_from_dlpack(source.code, source.bits);
    if (dtype == CP_DTYPE_NONE || source.lanes != 1) {
        return cp_fail(CP_ERR_TYPE,
                       "%s has an element type that is not supported: DLPack code %d, "
                       "bits %d, lanes %d",
                       name, (int)source.code, (int)source.bits, (int)source.lanes);
    }
    *out = dtype;
    return CP_OK;
}

/* Elements to bytes; false where it overflows and matters. */
static bool read_strides(const DLTensor *source, struct cp_tensor *tensor)
{
    int64_t item_bytes = cp_dtype_bytes(tensor->dtype);
    int64_t packed = item_bytes;
    for (int axis = tensor->ndim - 1; axis >= 0; axis--) {
        int64_t n = tensor->shape[axis];
        bool is_idle = n < 2;
        int64_t stride = packed;
        if (source->strides != NULL && !is_idle &&
            !cp_mul_i64(source->strides[axis], item_bytes, &stride)) {
            return false;
        }
        tensor->stride[axis] = stride;
        /* Read only where strides are missing: then an overflow here is one of the size. */
        if (source->strides == NULL && !is_idle && !cp_mul_i64(packed, n, &packed)) {
            return false;
        }
    }
    return true;
}

enum cp_code cp_tensor_from_dlpack(const char *name, const DLTensor *source,
                                   bool is_read_only, struct cp_tensor *out)
{
    struct cp_tensor tensor = {
        .device_type = (int)source->device.device_type,
        .device_id = source->device.device_id,
        .ndim = source->ndim,
        .is_read_only = is_read_only,
    };
    CP_TRY(read_dtype(name, source->dtype, &tensor.dtype));
    if (source->ndim < 0 || source->ndim > CP_TENSOR_DIMS) {
        return cp_tensor_normalize(name, &tensor);
    }
    if (source->ndim > 0 && source->shape == NULL) {
        return cp_fail(CP_ERR_BUFFER, "%s has %d dimensions and no shape", name,
                       (int)source->ndim);
    }
    bool is_empty = false;
    for (int axis = 0; axis < source->ndim; axis++) {
        tensor.shape[axis] = source->shape[axis];
        is_empty = is_empty || source->shape[axis] == 0;
    }
    if (!is_empty && !read_strides(source, &tensor)) {
        return cp_fail(CP_ERR_VALUE,
                       "%s has strides or a shape beyond what can be addressed", name);
    }
    if (source->data != NULL) {
        uintptr_t address = 0;
        if (source->byte_offset > (uint64_t)PTRDIFF_MAX ||
            __builtin_add_overflow((uintptr_t)source->data, source->byte_offset,
                                   &address)) {
            return cp_fail(CP_ERR_VALUE,
                           "%s has byte_offset %llu, beyond what can be addressed",
                           name, (unsigned long long)source->byte_offset);
        }
        tensor.data = (char *)address;
    }
    CP_TRY(cp_tensor_normalize(name, &tensor));
    *out = tensor;
    return CP_OK;
}

DLDataType cp_tensor_dlpack_dtype(enum cp_dtype dtype)
{
    switch (dtype) {
#define DTYPE_CASE(dtype, name, bytes, code, bits, attends)                            \
    case dtype:                                                                        \
        return (DLDataType){(uint8_t)(code), (uint8_t)(bits), 1};
        CP_DTYPE_MAP(DTYPE_CASE)
#undef DTYPE_CASE
    case CP_DTYPE_NONE:
    case CP_DTYPE_COUNT:
        break;
    }
    return (DLDataType){0, 0, 0};
}

DLTensor cp_tensor_prototype(enum cp_dtype dtype, DLDevice device, int ndim,
                             int64_t *shape)
{
    return (DLTensor){
        .device = device,
        .ndim = ndim,
        .dtype = cp_tensor_dlpack_dtype(dtype),
        .shape = shape,
    };
}
