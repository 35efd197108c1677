/* Tensors and ops of the simulated torch. */
#include "number.cuh"
#include "sim_torch.h"

extern "C" {
#include "torch_abi.h"
}

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
int spoils;
counter flash_calls, efficient_calls, causal_calls, grouped_calls, refusals, tensors;
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

/* Of torch's own memory, with axes 1 and 2 in the other order where `is_turned`. */
AtenTensorHandle tensor_empty(int64_t n0, int64_t n1, int64_t n2, int64_t n3,
                              int32_t dtype, bool is_turned)
{
    AtenTensorHandle t = tensor_new();
    int64_t outer = n3 * (is_turned ? n1 : n2);
    *t = {nullptr,
          4,
          {n0, n1, n2, n3},
          {n1 * n2 * n3, is_turned ? n3 : outer, is_turned ? outer : n3, 1},
          dtype,
          true,
          current};
    size_t bytes = (size_t)(n0 * n1 * n2 * n3 * bytes_of(dtype));
    return cudaMallocAsync((void **)&t->data, bytes + 1, current) == cudaSuccess
               ? t
               : nullptr;
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
    int64_t blocks = n[0] * n[1] * n[2];
    enum cp_code code =
        q->dtype == FLOAT32
            ? cp_cuda_launch(op_kernel<float>, blocks, 1, (cp_stream *)current, args)
        : q->dtype == FLOAT16
            ? cp_cuda_launch(op_kernel<cp_f16>, blocks, 1, (cp_stream *)current, args)
            : cp_cuda_launch(op_kernel<cp_bf16>, blocks, 1, (cp_stream *)current, args);
    causal_calls.add(is_causal);
    grouped_calls.add(n[1] != k->sizes[1]);
    return code != CP_OK;
}

AOTITorchError flash(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
                     double dropout, int32_t is_causal, int32_t wants_debug_mask,
                     double *scale, AtenTensorHandle *out, AtenTensorHandle *lse,
                     AtenTensorHandle *rest2, AtenTensorHandle *rest3,
                     int64_t *most_rows, int64_t *most_keys, AtenTensorHandle *rest6,
                     AtenTensorHandle *rest7, AtenTensorHandle *rest8)
{
    if (q->dtype != FLOAT16 && q->dtype != BFLOAT16) {
        return refuse("flash is for half precision");
    }
    if (q->sizes[3] % 8 != 0 || q->sizes[3] > 256 || q->sizes[3] != v->sizes[3]) {
        return refuse("head dims are 8 to 256 and those of the values");
    }
    if (q->sizes[1] % k->sizes[1] != 0 || dropout != 0 || wants_debug_mask) {
        return refuse("heads do not divide, or something was asked that is not used");
    }
    if (answer(q, k, v, is_causal, *scale, q->sizes[2], out, lse) != 0) {
        return 1;
    }
    AtenTensorHandle *const rest[] = {rest2, rest3, rest6, rest7, rest8};
    for (AtenTensorHandle *one : rest) {
        *one = tensor_new();
    }
    *most_rows = q->sizes[2];
    *most_keys = k->sizes[2];
    flash_calls.add(1);
    return 0;
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
    *rest2 = tensor_new();
    *rest3 = tensor_new();
    efficient_calls.add(1);
    return 0;
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

const struct cp_torch table = {
    .create = create,
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
    .last_error = []() -> const char * { return reason; },
};

} // namespace

extern "C" const struct cp_torch *cp_torch_loaded(void)
{
    return has_torch ? &table : nullptr;
}

void simtorch_load(bool is_loaded)
{
    has_torch = is_loaded;
    flash_calls.now = efficient_calls.now = causal_calls.now = grouped_calls.now = 0;
    refusals.now = 0;
}

void simtorch_set_stream(cudaStream_t stream)
{
    current = stream;
}

void simtorch_spoil_next(void)
{
    spoils = 1;
}

struct simtorch_counts simtorch_counts(void)
{
    return {flash_calls.add(0),   efficient_calls.add(0), causal_calls.add(0),
            grouped_calls.add(0), refusals.add(0),        tensors.add(0)};
}
