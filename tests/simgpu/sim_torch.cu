/* Tensors and ops of the simulated torch. */
#include "number.cuh"
#include "sim_torch.h"

extern "C" {
#include "torch_abi.h"
}

#include <string.h>

#include "launch.h"

struct AtenTensorOpaque {
    char *data;
    int64_t axes, sizes[4], strides[4]; /* strides in elements */
    int32_t dtype;
    bool is_owner;
    cudaStream_t stream; /* of the owner */
};

namespace
{

enum { FLOAT32 = 106, FLOAT64, BFLOAT16, FLOAT16, CUDA = 201 };

struct counter {
    int now;
    int add(int more)
    {
        return __atomic_add_fetch(&now, more, __ATOMIC_RELAXED);
    }
};

bool has_torch;
int spoils, refuses;
counter flash_calls, efficient_calls, cudnn_calls, causal_calls, grouped_calls;
counter flash_gradients, efficient_gradients, refusals, tensors;
thread_local cudaStream_t current;
thread_local const char *reason = "nothing";

AOTITorchError refuse(const char *why)
{
    reason = why;
    refusals.add(1);
    return 1;
}

int64_t bytes_of(int32_t dtype)
{
    return dtype == FLOAT64 ? 8 : (dtype == FLOAT32 ? 4 : 2);
}

AtenTensorHandle tensor_new()
{
    tensors.add(1);
    return new AtenTensorOpaque{};
}

/* Takes torch's own memory for a tensor of which all else is set. */
AtenTensorHandle tensor_own(AtenTensorHandle t)
{
    int64_t count = 1;
    for (int axis = 0; axis < t->axes; axis++) {
        count *= t->sizes[axis];
    }
    t->is_owner = true;
    t->stream = current;
    return cudaMallocAsync((void **)&t->data, (size_t)(count * bytes_of(t->dtype)) + 1,
                           current) == cudaSuccess
               ? t
               : nullptr;
}

/* With axes 1 and 2 in the other order where `is_turned`. */
AtenTensorHandle tensor_empty(int64_t n0, int64_t n1, int64_t n2, int64_t n3,
                              int32_t dtype, bool is_turned)
{
    AtenTensorHandle t = tensor_new();
    int64_t outer = n3 * (is_turned ? n1 : n2);
    t->axes = 4;
    t->dtype = dtype;
    const int64_t sizes[] = {n0, n1, n2, n3};
    const int64_t strides[] = {n1 * n2 * n3, is_turned ? n3 : outer,
                               is_turned ? outer : n3, 1};
    memcpy(t->sizes, sizes, sizeof sizes);
    memcpy(t->strides, strides, sizeof strides);
    return tensor_own(t);
}

/* ---- the numbers ---- */

struct op_args {
    AtenTensorOpaque q, k, v, out, lse;
    double scale;
    bool is_causal;
};

__device__ const char *at(const AtenTensorOpaque &t, int64_t b, int64_t h, int64_t i,
                          int64_t j)
{
    return t.data +
           (b * t.strides[0] + h * t.strides[1] + i * t.strides[2] + j * t.strides[3]) *
               bytes_of(t.dtype);
}

template <class T>
__device__ double score(const op_args &args, int64_t b, int64_t h, int64_t kv,
                        int64_t row, int64_t key)
{
    double sum = 0;
    for (int64_t i = 0; i < args.q.sizes[3]; i++) {
        sum += (double)cp_load<T>(at(args.q, b, h, row, i)) *
               (double)cp_load<T>(at(args.k, b, kv, key, i));
    }
    return sum * args.scale;
}

/* A thread a row and head, naively. */
template <class T> __global__ void op_kernel(op_args args)
{
    int64_t rows = args.q.sizes[2], heads = args.q.sizes[1], keys = args.k.sizes[2];
    int64_t row = blockIdx.x % rows, h = blockIdx.x / rows % heads;
    int64_t b = blockIdx.x / rows / heads, kv = h / (heads / args.k.sizes[1]);
    int64_t seen = args.is_causal ? row + 1 : keys;
    double max = -INFINITY, sum = 0;
    for (int64_t key = 0; key < seen; key++) {
        double s = score<T>(args, b, h, kv, row, key);
        max = s > max ? s : max;
    }
    for (int64_t key = 0; key < seen; key++) {
        sum += exp(score<T>(args, b, h, kv, row, key) - max);
    }
    for (int64_t j = 0; j < args.v.sizes[3]; j++) {
        double out = 0;
        for (int64_t key = 0; key < seen; key++) {
            out += exp(score<T>(args, b, h, kv, row, key) - max) *
                   (double)cp_load<T>(at(args.v, b, kv, key, j));
        }
        cp_narrow(out / sum, (T *)at(args.out, b, h, row, j));
    }
    *(float *)at(args.lse, b, h, row, 0) = (float)(max + log(sum));
}

/* A backward pass, with what its forward left. */
struct gradient_args {
    op_args forward;
    AtenTensorOpaque dout, dq, dk, dv;
};

/* The weight of a key, and its product with the gradient of the score. */
struct pair {
    double weight, slope;
};

template <class T>
__device__ pair pair_of(const gradient_args &args, int64_t b, int64_t h, int64_t kv,
                        int64_t row, int64_t key)
{
    const op_args &forward = args.forward;
    double delta = 0, dweight = 0;
    for (int64_t j = 0; j < forward.v.sizes[3]; j++) {
        double dout = (double)cp_load<T>(at(args.dout, b, h, row, j));
        delta += dout * (double)cp_load<T>(at(forward.out, b, h, row, j));
        dweight += dout * (double)cp_load<T>(at(forward.v, b, kv, key, j));
    }
    double lse = (double)*(const float *)at(forward.lse, b, h, row, 0);
    double weight = exp(score<T>(forward, b, h, kv, row, key) - lse);
    return {weight, weight * (dweight - delta)};
}

constexpr int MOST_DIM = 256;

/* A thread a row and head. */
template <class T> __global__ void rows_kernel(gradient_args args)
{
    const op_args &forward = args.forward;
    int64_t rows = forward.q.sizes[2], heads = forward.q.sizes[1];
    int64_t row = blockIdx.x % rows, h = blockIdx.x / rows % heads;
    int64_t b = blockIdx.x / rows / heads, kv = h / (heads / forward.k.sizes[1]);
    int64_t seen = forward.is_causal ? row + 1 : forward.k.sizes[2];
    double dq[MOST_DIM] = {0};
    for (int64_t key = 0; key < seen; key++) {
        pair p = pair_of<T>(args, b, h, kv, row, key);
        for (int64_t i = 0; i < forward.q.sizes[3]; i++) {
            dq[i] += p.slope * (double)cp_load<T>(at(forward.k, b, kv, key, i));
        }
    }
    for (int64_t i = 0; i < forward.q.sizes[3]; i++) {
        cp_narrow(dq[i] * forward.scale, (T *)at(args.dq, b, h, row, i));
    }
}

/* A thread a key and kv head. Rows behind the last weigh what their lse says, and have a
 * gradient of 0. */
template <class T> __global__ void keys_kernel(gradient_args args)
{
    const op_args &forward = args.forward;
    int64_t keys = forward.k.sizes[2], kv_heads = forward.k.sizes[1];
    int64_t key = blockIdx.x % keys, kv = blockIdx.x / keys % kv_heads;
    int64_t b = blockIdx.x / keys / kv_heads;
    int64_t group = forward.q.sizes[1] / kv_heads;
    double dk[MOST_DIM] = {0}, dv[MOST_DIM] = {0};
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        for (int64_t row = forward.is_causal ? key : 0; row < forward.q.sizes[2];
             row++) {
            pair p = pair_of<T>(args, b, h, kv, row, key);
            for (int64_t i = 0; i < forward.q.sizes[3]; i++) {
                dk[i] += p.slope * (double)cp_load<T>(at(forward.q, b, h, row, i));
            }
            for (int64_t i = 0; i < forward.v.sizes[3]; i++) {
                dv[i] += p.weight * (double)cp_load<T>(at(args.dout, b, h, row, i));
            }
        }
        for (int64_t row = forward.q.sizes[2]; row < forward.lse.sizes[2]; row++) {
            dv[0] += 0 * exp(-(double)*(const float *)at(forward.lse, b, h, row, 0));
        }
    }
    for (int64_t i = 0; i < forward.q.sizes[3]; i++) {
        cp_narrow(dk[i] * forward.scale, (T *)at(args.dk, b, kv, key, i));
    }
    for (int64_t i = 0; i < forward.v.sizes[3]; i++) {
        cp_narrow(dv[i], (T *)at(args.dv, b, kv, key, i));
    }
}

/* What `run` says, with the type of numbers of a dtype. */
template <class Run> enum cp_code with_type(int32_t dtype, const Run &run)
{
    return dtype == FLOAT32   ? run(float{})
           : dtype == FLOAT16 ? run(cp_f16{})
                              : run(cp_bf16{});
}

/* ---- the ops ---- */

bool is_aligned(AtenTensorHandle t)
{
    bool is = (intptr_t)t->data % 16 == 0 && t->strides[3] == 1;
    for (int axis = 0; axis < 3; axis++) {
        is = is &&
             (t->sizes[axis] <= 1 || (t->strides[axis] >= 0 &&
                                      t->strides[axis] * bytes_of(t->dtype) % 16 == 0));
    }
    return is;
}

AOTITorchError answer(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
                      bool is_causal, double scale, int64_t lse_rows,
                      AtenTensorHandle *out, AtenTensorHandle *lse)
{
    const int64_t *n = q->sizes;
    if (is_causal && n[2] != k->sizes[2]) {
        return refuse("causal is for equal lengths");
    }
    if (!is_aligned(q) || !is_aligned(k) || !is_aligned(v)) {
        return refuse("an address or a stride is not of 16 bytes");
    }
    if (n[2] == 0 || k->sizes[2] == 0) {
        return refuse("a tensor is empty");
    }
    int64_t heads = __atomic_exchange_n(&spoils, 0, __ATOMIC_RELAXED) ? n[1] - 1 : n[1];
    *out = tensor_empty(n[0], n[1], n[2], v->sizes[3], q->dtype, true);
    *lse = tensor_empty(n[0], n[1], lse_rows, 1, FLOAT32, false);
    op_args args = {*q, *k, *v, **out, **lse, scale, is_causal};
    (*lse)->axes = 3;
    (*out)->sizes[1] = heads;
    enum cp_code code = with_type(q->dtype, [&](auto type) {
        return cp_cuda_launch(op_kernel<decltype(type)>, n[0] * n[1] * n[2], 1,
                              (cp_stream *)current, args);
    });
    causal_calls.add(is_causal);
    grouped_calls.add(n[1] != k->sizes[1]);
    return code != CP_OK;
}

/* The rules of all heads. */
bool is_flash(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v)
{
    return (q->dtype == FLOAT16 || q->dtype == BFLOAT16) && q->sizes[3] % 8 == 0 &&
           q->sizes[3] <= 256 && q->sizes[3] == v->sizes[3] &&
           q->sizes[1] % k->sizes[1] == 0;
}

/* Tensors that stand for nothing. */
template <int COUNT> AOTITorchError fill_rest(AtenTensorHandle *const (&rest)[COUNT])
{
    for (AtenTensorHandle *one : rest) {
        *one = tensor_new();
    }
    return 0;
}

AOTITorchError flash(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
                     double dropout, int32_t is_causal, int32_t wants_debug_mask,
                     double *scale, AtenTensorHandle *out, AtenTensorHandle *lse,
                     AtenTensorHandle *rest2, AtenTensorHandle *rest3,
                     int64_t *most_rows, int64_t *most_keys, AtenTensorHandle *rest6,
                     AtenTensorHandle *rest7, AtenTensorHandle *rest8)
{
    if (!is_flash(q, k, v)) {
        return refuse("flash is for half precision, heads of 8 to 256, equal values");
    }
    if (dropout != 0 || wants_debug_mask) {
        return refuse("something was asked that is not used");
    }
    if (answer(q, k, v, is_causal, *scale, q->sizes[2], out, lse) != 0) {
        return 1;
    }
    *most_rows = q->sizes[2];
    *most_keys = k->sizes[2];
    flash_calls.add(1);
    return fill_rest({rest2, rest3, rest6, rest7, rest8});
}

/* Its lse has a fourth axis. */
AOTITorchError cudnn(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
                     AtenTensorHandle *mask, int32_t wants_lse, double dropout,
                     int32_t is_causal, int32_t wants_debug_mask, double *scale,
                     AtenTensorHandle *out, AtenTensorHandle *lse,
                     AtenTensorHandle *rest2, AtenTensorHandle *rest3,
                     int64_t *most_rows, int64_t *most_keys, AtenTensorHandle *rest6,
                     AtenTensorHandle *rest7, AtenTensorHandle *rest8)
{
    if ((q->dtype != FLOAT16 && q->dtype != BFLOAT16) || q->sizes[3] > 128 ||
        v->sizes[3] > 128 || q->sizes[1] % k->sizes[1] != 0) {
        return refuse("cuDNN is for half precision and heads of 8 to 128");
    }
    if (q->sizes[2] < 2 || k->sizes[2] < 2) {
        return refuse("cuDNN is for two rows and keys");
    }
    if (mask != nullptr || !wants_lse || dropout != 0 || wants_debug_mask) {
        return refuse("something was asked that is not used");
    }
    if (answer(q, k, v, is_causal, *scale, q->sizes[2], out, lse) != 0) {
        return 1;
    }
    (*lse)->axes = 4;
    *most_rows = q->sizes[2];
    *most_keys = k->sizes[2];
    cudnn_calls.add(1);
    return fill_rest({rest2, rest3, rest6, rest7, rest8});
}

AOTITorchError efficient(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
                         AtenTensorHandle *mask, int32_t wants_lse, double dropout,
                         int32_t is_causal, double *scale, AtenTensorHandle *out,
                         AtenTensorHandle *lse, AtenTensorHandle *rest2,
                         AtenTensorHandle *rest3)
{
    if (q->sizes[1] != k->sizes[1] || q->dtype == FLOAT64) {
        return refuse("heads are as many, and dtypes up to float32");
    }
    if (mask != nullptr || dropout != 0) {
        return refuse("something was asked that is not used");
    }
    int64_t lse_rows = wants_lse ? (q->sizes[2] + 31) / 32 * 32 : 0;
    if (answer(q, k, v, is_causal, *scale, lse_rows, out, lse) != 0) {
        return 1;
    }
    efficient_calls.add(1);
    return fill_rest({rest2, rest3});
}

/* ---- their gradients ---- */

/* (batch, heads, rows) side by side. */
bool is_packed_lse(AtenTensorHandle lse, AtenTensorHandle q, int64_t rows)
{
    const int64_t sizes[] = {q->sizes[0], q->sizes[1], rows};
    const int64_t strides[] = {q->sizes[1] * rows, rows, 1};
    return lse->axes == 3 && lse->dtype == FLOAT32 &&
           memcmp(lse->sizes, sizes, sizeof sizes) == 0 &&
           memcmp(lse->strides, strides, sizeof strides) == 0;
}

bool has_sizes(AtenTensorHandle t, AtenTensorHandle rows, int64_t dim)
{
    return t->sizes[0] == rows->sizes[0] && t->sizes[1] == rows->sizes[1] &&
           t->sizes[2] == rows->sizes[2] && t->sizes[3] == dim;
}

AtenTensorHandle tensor_like(AtenTensorHandle t, int64_t heads)
{
    return tensor_empty(t->sizes[0], heads, t->sizes[2], t->sizes[3], t->dtype, true);
}

AOTITorchError differentiate(const gradient_args &args, AtenTensorHandle *dq,
                             AtenTensorHandle *dk, AtenTensorHandle *dv)
{
    if (__atomic_exchange_n(&refuses, 0, __ATOMIC_RELAXED)) {
        return refuse("it was to refuse");
    }
    const op_args &forward = args.forward;
    AtenTensorOpaque q = forward.q, k = forward.k, v = forward.v, dout = args.dout;
    if (forward.is_causal && q.sizes[2] != k.sizes[2]) {
        return refuse("causal is for equal lengths");
    }
    if (!is_aligned(&q) || !is_aligned(&k) || !is_aligned(&v) || !is_aligned(&dout)) {
        return refuse("an address or a stride is not of 16 bytes");
    }
    if (q.sizes[2] == 0 || k.sizes[2] == 0 || q.sizes[3] > MOST_DIM ||
        v.sizes[3] > MOST_DIM) {
        return refuse("a tensor is empty, or too large for this stand-in");
    }
    gradient_args with = args;
    *dq = tensor_like(&q, q.sizes[1]);
    *dk = tensor_like(&k, k.sizes[1]);
    *dv = tensor_like(&v, v.sizes[1]);
    with.dq = **dq;
    with.dk = **dk;
    with.dv = **dv;
    (*dk)->sizes[1] -= __atomic_exchange_n(&spoils, 0, __ATOMIC_RELAXED);
    return with_type(q.dtype, [&](auto type) {
               using T = decltype(type);
               CP_TRY(cp_cuda_launch(rows_kernel<T>,
                                     q.sizes[0] * q.sizes[1] * q.sizes[2], 1,
                                     (cp_stream *)current, with));
               return cp_cuda_launch(keys_kernel<T>,
                                     k.sizes[0] * k.sizes[1] * k.sizes[2], 1,
                                     (cp_stream *)current, with);
           }) != CP_OK;
}

AOTITorchError
flash_gradient(AtenTensorHandle dout, AtenTensorHandle q, AtenTensorHandle k,
               AtenTensorHandle v, AtenTensorHandle out, AtenTensorHandle lse,
               AtenTensorHandle row_ends, AtenTensorHandle key_ends, int64_t most_rows,
               int64_t most_keys, double dropout, int32_t is_causal,
               AtenTensorHandle seed, AtenTensorHandle offset, double *scale,
               AtenTensorHandle *dq, AtenTensorHandle *dk, AtenTensorHandle *dv)
{
    if (!is_flash(q, k, v) || !has_sizes(dout, q, v->sizes[3]) ||
        !has_sizes(out, q, v->sizes[3]) || out->dtype != q->dtype) {
        return refuse("the tensors of a backward pass are not of one forward pass");
    }
    if (!is_packed_lse(lse, q, q->sizes[2])) {
        return refuse("flash reads lse as (batch, heads, rows) side by side");
    }
    if (row_ends->data != nullptr || key_ends->data != nullptr || dropout != 0 ||
        seed->data != nullptr || offset->data != nullptr || most_rows != q->sizes[2] ||
        most_keys != k->sizes[2]) {
        return refuse("something was asked that is not used");
    }
    flash_gradients.add(1);
    return differentiate(
        {{*q, *k, *v, *out, *lse, *scale, is_causal != 0}, *dout, {}, {}, {}}, dq, dk,
        dv);
}

AOTITorchError
efficient_gradient(AtenTensorHandle dout, AtenTensorHandle q, AtenTensorHandle k,
                   AtenTensorHandle v, AtenTensorHandle mask, AtenTensorHandle out,
                   AtenTensorHandle lse, AtenTensorHandle seed, AtenTensorHandle offset,
                   double dropout, const int32_t *wanted, int64_t wanted_count,
                   int32_t is_causal, double *scale, AtenTensorHandle *dq,
                   AtenTensorHandle *dk, AtenTensorHandle *dv, AtenTensorHandle *dmask)
{
    const int64_t row = out->sizes[1] * out->sizes[3];
    if (q->sizes[1] != k->sizes[1] || q->dtype == FLOAT64 ||
        !has_sizes(dout, q, v->sizes[3]) || !has_sizes(out, q, v->sizes[3]) ||
        out->dtype != q->dtype) {
        return refuse("the tensors of a backward pass are not of one forward pass");
    }
    if (out->strides[0] != row * out->sizes[2] || out->strides[1] != out->sizes[3] ||
        out->strides[2] != row || out->strides[3] != 1) {
        return refuse("efficient reads out as (batch, rows, heads, dim) side by side");
    }
    if (!is_packed_lse(lse, q, (q->sizes[2] + 31) / 32 * 32)) {
        return refuse("efficient reads lse of a multiple of 32 rows");
    }
    if (mask->data != nullptr || dropout != 0 || seed->data != nullptr ||
        offset->data != nullptr || wanted_count != 4 || !wanted[0] || !wanted[1] ||
        !wanted[2] || wanted[3]) {
        return refuse("something was asked that is not used");
    }
    efficient_gradients.add(1);
    *dmask = tensor_new();
    return differentiate(
        {{*q, *k, *v, *out, *lse, *scale, is_causal != 0}, *dout, {}, {}, {}}, dq, dk,
        dv);
}

/* ---- tensors ---- */

AOTITorchError create(void *data, int64_t axes, const int64_t *sizes,
                      const int64_t *strides, int64_t offset, int32_t dtype,
                      int32_t device, int32_t ordinal, AtenTensorHandle *tensor)
{
    int is_at = -1;
    if (axes != 4 || offset != 0 || device != CUDA ||
        cudaGetDevice(&is_at) != cudaSuccess || is_at != ordinal) {
        return refuse("a tensor is somewhere else");
    }
    struct cudaPointerAttributes attributes;
    if (data && (cudaPointerGetAttributes(&attributes, data) != cudaSuccess ||
                 attributes.device != ordinal)) {
        return refuse("the specified device does not match the device of the data");
    }
    AtenTensorHandle t = tensor_new();
    t->data = (char *)data;
    t->axes = axes;
    t->dtype = dtype;
    for (int axis = 0; axis < 4; axis++) {
        t->sizes[axis] = sizes[axis];
        t->strides[axis] = strides[axis];
        if (strides[axis] < 0) {
            delete t;
            tensors.add(-1);
            return refuse("a stride is negative");
        }
    }
    *tensor = t;
    return 0;
}

AOTITorchError free_tensor(AtenTensorHandle tensor)
{
    if (tensor->is_owner) {
        (void)cudaFreeAsync(tensor->data, tensor->stream);
    }
    delete tensor;
    tensors.add(-1);
    return 0;
}

AOTITorchError empty(int64_t axes, const int64_t *sizes, const int64_t *strides,
                     int32_t dtype, int32_t device, int32_t ordinal,
                     AtenTensorHandle *tensor)
{
    int64_t n[] = {1, 1, 1, 1}, steps[] = {1, 1, 1, 1};
    memcpy(n, sizes, (size_t)axes * sizeof *n);
    memcpy(steps, strides, (size_t)axes * sizeof *steps);
    AOTITorchError error =
        create(nullptr, 4, n, steps, 0, dtype, device, ordinal, tensor);
    if (error == 0) {
        (*tensor)->axes = axes;
        error = tensor_own(*tensor) == nullptr;
    }
    return error;
}

struct cp_torch table = {
    .create = create,
    .empty = empty,
    .undefined = [](AtenTensorHandle *tensor) -> AOTITorchError {
        *tensor = tensor_new();
        return 0;
    },
    .free = free_tensor,
    .get_data = [](AtenTensorHandle t, void **data) -> AOTITorchError {
        *data = t->data;
        return 0;
    },
    .get_axes = [](AtenTensorHandle t, int64_t *axes) -> AOTITorchError {
        *axes = t->axes;
        return 0;
    },
    .get_sizes = [](AtenTensorHandle t, int64_t **sizes) -> AOTITorchError {
        *sizes = t->sizes;
        return 0;
    },
    .get_strides = [](AtenTensorHandle t, int64_t **strides) -> AOTITorchError {
        *strides = t->strides;
        return 0;
    },
    .get_dtype = [](AtenTensorHandle t, int32_t *dtype) -> AOTITorchError {
        *dtype = t->dtype;
        return 0;
    },
    .cuda = []() -> int32_t { return CUDA; },
    .float32 = []() -> int32_t { return FLOAT32; },
    .float64 = []() -> int32_t { return FLOAT64; },
    .bfloat16 = []() -> int32_t { return BFLOAT16; },
    .float16 = []() -> int32_t { return FLOAT16; },
    .current_stream = [](int32_t, void **stream) -> AOTITorchError {
        *stream = current;
        return 0;
    },
    .flash = flash,
    .efficient = efficient,
    .cudnn = cudnn,
    .flash_gradient = flash_gradient,
    .efficient_gradient = efficient_gradient,
    .last_error = []() -> const char * { return reason; },
    .cudnn_version = 0,
};

} // namespace

extern "C" const struct cp_torch *cp_torch_loaded(void)
{
    return has_torch ? &table : nullptr;
}

void simtorch_load(bool is_loaded)
{
    has_torch = is_loaded;
    table.cudnn_version = 0;
    counter *const all[] = {&flash_calls,         &efficient_calls, &cudnn_calls,
                            &causal_calls,        &grouped_calls,   &flash_gradients,
                            &efficient_gradients, &refusals};
    for (counter *one : all) {
        one->now = 0;
    }
}

void simtorch_set_cudnn(int64_t version)
{
    table.cudnn_version = version;
}

void simtorch_set_stream(cudaStream_t stream)
{
    current = stream;
}

void simtorch_spoil_next(void)
{
    spoils = 1;
}

void simtorch_refuse_next(void)
{
    refuses = 1;
}

struct simtorch_counts simtorch_counts(void)
{
    return {flash_calls.add(0),         efficient_calls.add(0), cudnn_calls.add(0),
            causal_calls.add(0),        grouped_calls.add(0),   flash_gradients.add(0),
            efficient_gradients.add(0), refusals.add(0),        tensors.add(0)};
}
