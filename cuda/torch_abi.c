/* Tensors of torch from views, and back. */
#include "torch_abi.h"

enum cp_code cp_torch_fail(const struct cp_torch *torch, const char *what)
{
    const char *reason = torch->last_error != NULL ? torch->last_error() : NULL;
    return cp_fail(CP_ERR_DEVICE,
                   "torch cannot %s: %.600s; CP_ATTN_CUDA_KERNEL=plain does without "
                   "torch's kernels",
                   what, reason != NULL ? reason : "this version does not say why");
}

static int32_t number_of(const struct cp_torch *torch, enum cp_dtype dtype)
{
    return dtype == CP_DTYPE_FLOAT64    ? torch->float64()
           : dtype == CP_DTYPE_BFLOAT16 ? torch->bfloat16()
           : dtype == CP_DTYPE_FLOAT16  ? torch->float16()
                                        : torch->float32();
}

static enum cp_dtype dtype_of(const struct cp_torch *torch, int32_t number)
{
    static const enum cp_dtype dtypes[] = {CP_DTYPE_FLOAT32, CP_DTYPE_FLOAT64,
                                           CP_DTYPE_BFLOAT16, CP_DTYPE_FLOAT16};
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (number_of(torch, dtypes[i]) == number) {
            return dtypes[i];
        }
    }
    return CP_DTYPE_NONE;
}

static void turn(const struct cp_view *view, int64_t sizes[CP_AXES],
                 int64_t strides[CP_AXES])
{
    static const int axis_of[CP_AXES] = {0, 2, 1, 3};
    int64_t bytes = cp_dtype_bytes(view->dtype);
    for (int axis = 0; axis < CP_AXES; axis++) {
        int64_t stride = view->stride[axis_of[axis]] / bytes;
        sizes[axis] = view->n[axis_of[axis]];
        strides[axis] = stride < 0 ? 0 : stride;
    }
}

enum cp_code cp_torch_tensor(const struct cp_torch *torch,
                             struct cp_torch_device device, const struct cp_view *view,
                             AtenTensorHandle *out)
{
    int64_t sizes[CP_AXES], strides[CP_AXES];
    turn(view, sizes, strides);
    AOTITorchError error =
        torch->create(view->data, CP_AXES, sizes, strides, 0,
                      number_of(torch, view->dtype), device.type, device.ordinal, out);
    return error == 0 ? CP_OK : cp_torch_fail(torch, "take a tensor by its address");
}

enum cp_code cp_torch_empty(const struct cp_torch *torch, struct cp_torch_device device,
                            const struct cp_view *view, int64_t axes,
                            AtenTensorHandle *out)
{
    int64_t sizes[CP_AXES], strides[CP_AXES];
    turn(view, sizes, strides);
    AOTITorchError error =
        torch->empty(axes, sizes, strides, number_of(torch, view->dtype), device.type,
                     device.ordinal, out);
    return error == 0 ? CP_OK : cp_torch_fail(torch, "make a tensor");
}

enum cp_code cp_torch_view(const struct cp_torch *torch, AtenTensorHandle tensor,
                           struct cp_view *out)
{
    void *data = NULL;
    int64_t axes = 0;
    int64_t *sizes = NULL, *strides = NULL;
    int32_t number = 0;
    if (torch->get_data(tensor, &data) != 0 || torch->get_axes(tensor, &axes) != 0 ||
        torch->get_sizes(tensor, &sizes) != 0 ||
        torch->get_strides(tensor, &strides) != 0 ||
        torch->get_dtype(tensor, &number) != 0) {
        return cp_torch_fail(torch, "describe a tensor");
    }
    enum cp_dtype dtype = dtype_of(torch, number);
    if (dtype == CP_DTYPE_NONE || axes < CP_AXES - 1 || axes > CP_AXES) {
        return cp_fail(CP_ERR_INTERNAL,
                       "torch gave a tensor of %lld axes and its dtype %d",
                       (long long)axes, (int)number);
    }
    int64_t bytes = cp_dtype_bytes(dtype);
    bool has_dim = axes == CP_AXES;
    *out = (struct cp_view){
        .data = data,
        .dtype = dtype,
        .n = {sizes[0], sizes[2], sizes[1], has_dim ? sizes[3] : 1},
        .stride = {strides[0] * bytes, strides[2] * bytes, strides[1] * bytes,
                   has_dim ? strides[3] * bytes : bytes},
    };
    return CP_OK;
}

void cp_torch_free(const struct cp_torch *torch, AtenTensorHandle *tensor)
{
    if (*tensor != NULL) {
        (void)torch->free(*tensor); /* it cannot fail on a handle of its own */
        *tensor = NULL;
    }
}
