/* cuda/torch_*.c on the torch of this process, which has no CUDA: CPU tensors with
 * numbers, by an op of the CPU, and meta tensors without, by the ops of CUDA. Those of
 * which only CUDA's library has the entries are called through Python (probe_set_entry).
 *
 * What torch hands out is kept in a list, so that a handle that stays or that goes twice
 * is seen. */
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_api.h"
#include "torch_run.h"

#define EXPORT __attribute__((visibility("default")))

enum { ROOM = 64 };

/* A block, with the state that it goes into or the gradients that it adds to. */
struct probe_block {
    char *q;            /* (B, rows, heads, D), packed */
    char *k, *v;        /* (B, keys, kv heads, D) and (..., Dv) */
    float *state;       /* (B, heads, rows, Dv + 2); float64 for float64 */
    char *dout;         /* (B, rows, heads, Dv) */
    char *lse, *delta;  /* (B, rows, heads), dtype of sums */
    char *dq, *dk, *dv; /* as q, k and v, dtype of sums */
    int64_t batch, rows, keys, heads, kv_heads, dim, value_dim;
    double scale;
    int32_t dtype, is_causal;
    int32_t is_first; /* `state` means nothing before */
    char *out,
        *lse_out; /* of the last keys the result; NULL: more follow, not wanted */
};

EXPORT bool probe_open(void);
EXPORT bool probe_loaded(void);
EXPORT int probe_alive(void);
EXPORT const char *probe_error(void);
EXPORT int probe_attend(const struct probe_block *block);
EXPORT int probe_finish(const struct probe_block *block, char *out, char *lse);
EXPORT int probe_gradient(const struct probe_block *block);
EXPORT int probe_meta(const struct probe_block *block, int generation, int cudnn,
                      bool is_gradient, char name[128]);
EXPORT void probe_born(AtenTensorHandle tensor);
EXPORT bool probe_set_entry(const char *field, void *entry);
EXPORT int64_t probe_cudnn(void);

static struct cp_torch real, counted;
static AtenTensorHandle alive[ROOM];
static int strange; /* handles freed that were not alive */
static struct cp_torch_device cpu, meta;

static AOTITorchError (*flash_on_cpu)(AtenTensorHandle q, AtenTensorHandle k,
                                      AtenTensorHandle v, double dropout,
                                      int32_t is_causal, AtenTensorHandle *mask,
                                      double *scale, AtenTensorHandle *out,
                                      AtenTensorHandle *lse);
static AOTITorchError (*gradient_of_flash_on_cpu)(
    AtenTensorHandle dout, AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
    AtenTensorHandle out, AtenTensorHandle lse, double dropout, int32_t is_causal,
    AtenTensorHandle *mask, double *scale, AtenTensorHandle *dq, AtenTensorHandle *dk,
    AtenTensorHandle *dv);

/* ---- counting ---- */

void probe_born(AtenTensorHandle tensor)
{
    for (int i = 0; i < ROOM; i++) {
        if (alive[i] == NULL) {
            alive[i] = tensor;
            return;
        }
    }
    abort();
}

int probe_alive(void)
{
    int count = strange * ROOM;
    for (int i = 0; i < ROOM; i++) {
        count += alive[i] != NULL;
    }
    return count;
}

static AOTITorchError counted_free(AtenTensorHandle tensor)
{
    for (int i = 0; i < ROOM; i++) {
        if (alive[i] == tensor) {
            alive[i] = NULL;
            return real.free(tensor);
        }
    }
    strange++;
    return 1;
}

/* Meta tensors have no memory, and torch takes none for them. */
static AOTITorchError counted_create(void *data, int64_t axes, const int64_t *sizes,
                                     const int64_t *strides, int64_t offset,
                                     int32_t dtype, int32_t device, int32_t ordinal,
                                     AtenTensorHandle *tensor)
{
    AOTITorchError error =
        device == meta.type
            ? real.empty(axes, sizes, strides, dtype, device, ordinal, tensor)
            : real.create(data, axes, sizes, strides, offset, dtype, device, ordinal,
                          tensor);
    if (error == 0) {
        probe_born(*tensor);
    }
    return error;
}

static AOTITorchError counted_empty(int64_t axes, const int64_t *sizes,
                                    const int64_t *strides, int32_t dtype,
                                    int32_t device, int32_t ordinal,
                                    AtenTensorHandle *tensor)
{
    AOTITorchError error =
        real.empty(axes, sizes, strides, dtype, device, ordinal, tensor);
    if (error == 0) {
        probe_born(*tensor);
    }
    return error;
}

static AOTITorchError counted_undefined(AtenTensorHandle *tensor)
{
    AOTITorchError error = real.undefined(tensor);
    if (error == 0) {
        probe_born(*tensor);
    }
    return error;
}

static AOTITorchError counted_flash(AtenTensorHandle q, AtenTensorHandle k,
                                    AtenTensorHandle v, double dropout,
                                    int32_t is_causal, int32_t wants_debug_mask,
                                    double *scale, AtenTensorHandle *out,
                                    AtenTensorHandle *lse, AtenTensorHandle *rest2,
                                    AtenTensorHandle *rest3, int64_t *most_rows,
                                    int64_t *most_keys, AtenTensorHandle *rest6,
                                    AtenTensorHandle *rest7, AtenTensorHandle *rest8)
{
    AOTITorchError error =
        real.flash(q, k, v, dropout, is_causal, wants_debug_mask, scale, out, lse,
                   rest2, rest3, most_rows, most_keys, rest6, rest7, rest8);
    AtenTensorHandle *const results[] = {out, lse, rest2, rest3, rest6, rest7, rest8};
    for (int i = 0; i < 7 && error == 0; i++) {
        probe_born(*results[i]);
    }
    return error;
}

static AOTITorchError counted_efficient(AtenTensorHandle q, AtenTensorHandle k,
                                        AtenTensorHandle v, AtenTensorHandle *mask,
                                        int32_t wants_lse, double dropout,
                                        int32_t is_causal, double *scale,
                                        AtenTensorHandle *out, AtenTensorHandle *lse,
                                        AtenTensorHandle *rest2,
                                        AtenTensorHandle *rest3)
{
    AOTITorchError error = real.efficient(q, k, v, mask, wants_lse, dropout, is_causal,
                                          scale, out, lse, rest2, rest3);
    AtenTensorHandle *const results[] = {out, lse, rest2, rest3};
    for (int i = 0; i < 4 && error == 0; i++) {
        probe_born(*results[i]);
    }
    return error;
}

static AOTITorchError run_on_cpu(const struct cp_torch *torch,
                                 const AtenTensorHandle qkv[3], bool is_causal,
                                 double scale, AtenTensorHandle held[CP_TORCH_RESULTS])
{
    (void)torch;
    AOTITorchError error = flash_on_cpu(qkv[0], qkv[1], qkv[2], 0, is_causal, NULL,
                                        &scale, &held[0], &held[1]);
    for (int i = 0; i < 2 && error == 0; i++) {
        probe_born(held[i]);
    }
    return error;
}

static AOTITorchError gradient_on_cpu(const struct cp_torch *torch,
                                      const AtenTensorHandle *given,
                                      const struct cp_grad_args *args, bool is_causal,
                                      AtenTensorHandle held[CP_TORCH_GRADS])
{
    (void)torch;
    double scale = args->scale;
    AOTITorchError error = gradient_of_flash_on_cpu(
        given[CP_TORCH_DOUT], given[CP_TORCH_Q], given[CP_TORCH_K], given[CP_TORCH_V],
        given[CP_TORCH_OUT], given[CP_TORCH_LSE], 0, is_causal, NULL, &scale, &held[0],
        &held[1], &held[2]);
    for (int i = 0; i < 3 && error == 0; i++) {
        probe_born(held[i]);
    }
    return error;
}

static const struct cp_torch_op cpu_op = {
    .name = "_scaled_dot_product_flash_attention_for_cpu",
    .grad_lse_multiple = 1,
    .run = run_on_cpu,
    .gradient = gradient_on_cpu,
};

/* ---- opening ---- */

static bool find(void *library, const char *name, void *address_of_pointer)
{
    void *symbol = dlsym(library, name);
    memcpy(address_of_pointer, &symbol, sizeof symbol);
    return symbol != NULL;
}

/* The entries of CUDA's library are its own; older ones in torch's core have the same
 * arguments and serve any device. */
bool probe_open(void)
{
    void *core = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    int32_t (*number)(void) = NULL;
    bool is_whole = core != NULL;
#define FIND(field, name, arguments)                                                   \
    is_whole = is_whole && find(core, #name, &real.field);
    CP_TORCH_CALLS(FIND)
    CP_TORCH_NUMBERS(FIND)
#undef FIND
    is_whole =
        is_whole &&
        find(core, "aoti_torch__scaled_dot_product_flash_attention_v2", &real.flash) &&
        find(core, "aoti_torch__scaled_dot_product_efficient_attention",
             &real.efficient) &&
        find(core, "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu",
             &flash_on_cpu) &&
        find(core,
             "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward",
             &gradient_of_flash_on_cpu) &&
        find(core, "torch_exception_get_what_without_backtrace", &real.last_error) &&
        find(core, "aoti_torch_device_type_cpu", &number);
    if (is_whole) {
        cpu = (struct cp_torch_device){.type = number(), .ordinal = 0};
        is_whole = find(core, "aoti_torch_device_type_meta", &number);
        meta = (struct cp_torch_device){.type = number(), .ordinal = -1};
    }
    counted = real;
    counted.create = counted_create;
    counted.empty = counted_empty;
    counted.undefined = counted_undefined;
    counted.free = counted_free;
    counted.flash = counted_flash;
    counted.efficient = counted_efficient;
    return is_whole;
}

/* An entry of CUDA's library, made of something else, which tells probe_born of what it
 * hands out. */
bool probe_set_entry(const char *field, void *entry)
{
    if (strcmp(field, "cudnn") == 0) {
        memcpy(&counted.cudnn, &entry, sizeof entry);
    } else if (strcmp(field, "flash_gradient") == 0) {
        memcpy(&counted.flash_gradient, &entry, sizeof entry);
    } else if (strcmp(field, "efficient_gradient") == 0) {
        memcpy(&counted.efficient_gradient, &entry, sizeof entry);
    } else {
        return false;
    }
    return true;
}

/* As cuda/ itself looks for torch, and for its cuDNN. */
bool probe_loaded(void)
{
    return cp_torch_loaded() != NULL;
}

int64_t probe_cudnn(void)
{
    return cp_torch_loaded() != NULL ? cp_torch_loaded()->cudnn_version : -1;
}

const char *probe_error(void)
{
    return cp_last_error()->text;
}

/* ---- one block ---- */

static struct cp_view state_of(const struct probe_block *b)
{
    enum cp_dtype sum = cp_dtype_sum((enum cp_dtype)b->dtype);
    int64_t bytes = b->rows * (b->value_dim + 2) * cp_dtype_bytes(sum);
    return (struct cp_view){.data = (char *)b->state,
                            .n = {b->batch, b->rows, b->heads, b->value_dim},
                            .stride = {bytes * b->heads, 0, bytes, 0},
                            .dtype = sum};
}

static struct cp_attend_args args_of(const struct probe_block *b)
{
    enum cp_dtype dtype = (enum cp_dtype)b->dtype;
    return (struct cp_attend_args){
        .q = cp_view_compact(b->q, dtype, b->batch, b->rows, b->heads, b->dim),
        .k = cp_view_compact(b->k, dtype, b->batch, b->keys, b->kv_heads, b->dim),
        .v = cp_view_compact(b->v, dtype, b->batch, b->keys, b->kv_heads, b->value_dim),
        .state = state_of(b),
        .is_first = b->is_first != 0,
        .out =
            cp_view_compact(b->out, dtype, b->batch, b->rows, b->heads, b->value_dim),
        .lse = cp_view_compact(b->lse_out, cp_dtype_sum(dtype), b->batch, b->rows,
                               b->heads, 1),
        .place = {.heads_per_kv = b->heads / b->kv_heads},
        .scale = b->scale,
    };
}

/* Has torch answer on the CPU, merges, waits. */
int probe_attend(const struct probe_block *block)
{
    struct cp_attend_args args = args_of(block);
    struct cp_torch_answer answer;
    CP_TRY(
        cp_torch_op_run(&counted, &cpu_op, cpu, &args, block->is_causal != 0, &answer));
    struct cp_merge_args merge = {
        .out = answer.out,
        .lse = answer.lse,
        .state = args.state,
        .is_first = args.is_first,
        .result = args.out,
        .result_lse = args.lse,
    };
    enum cp_code code = cp_cuda_merge(&merge, NULL);
    (void)cudaDeviceSynchronize(); /* the CPU's allocator follows no stream */
    cp_torch_answer_free(&counted, &answer);
    return (int)code;
}

/* out (B, rows, heads, Dv) in the call's dtype, lse (B, rows, heads) in that of sums. */
int probe_finish(const struct probe_block *block, char *out, char *lse)
{
    enum cp_dtype dtype = (enum cp_dtype)block->dtype;
    struct cp_finish_args args = {
        .state = state_of(block),
        .out = cp_view_compact(out, dtype, block->batch, block->rows, block->heads,
                               block->value_dim),
        .lse = cp_view_compact(lse, cp_dtype_sum(dtype), block->batch, block->rows,
                               block->heads, 1),
    };
    enum cp_code code = cp_cuda_finish(&args, NULL);
    (void)cudaDeviceSynchronize();
    return (int)code;
}

static struct cp_grad_args grad_args_of(const struct probe_block *b)
{
    enum cp_dtype dtype = (enum cp_dtype)b->dtype, sum = cp_dtype_sum(dtype);
    const int64_t batch = b->batch, rows = b->rows, keys = b->keys;
    return (struct cp_grad_args){
        .q = cp_view_compact(b->q, dtype, batch, rows, b->heads, b->dim),
        .k = cp_view_compact(b->k, dtype, batch, keys, b->kv_heads, b->dim),
        .v = cp_view_compact(b->v, dtype, batch, keys, b->kv_heads, b->value_dim),
        .dout = cp_view_compact(b->dout, dtype, batch, rows, b->heads, b->value_dim),
        .lse = cp_view_compact(b->lse, sum, batch, rows, b->heads, 1),
        .delta = cp_view_compact(b->delta, sum, batch, rows, b->heads, 1),
        .dq = cp_view_compact(b->dq, sum, batch, rows, b->heads, b->dim),
        .dk = cp_view_compact(b->dk, sum, batch, keys, b->kv_heads, b->dim),
        .dv = cp_view_compact(b->dv, sum, batch, keys, b->kv_heads, b->value_dim),
        .place = {.heads_per_kv = b->heads / b->kv_heads},
        .scale = b->scale,
    };
}

static enum cp_code add_gradients(const struct probe_block *block,
                                  const struct cp_grad_args *args,
                                  struct cp_torch_gradient *gradient)
{
    CP_TRY(cp_torch_gradient_begin(&counted, &cpu_op, cpu, args, gradient));
    CP_TRY(cp_cuda_stand_in(&gradient->stand_in, NULL));
    (void)cudaDeviceSynchronize(); /* the CPU's op follows no stream */
    CP_TRY(cp_torch_gradient_run(&counted, &cpu_op, args, block->is_causal != 0,
                                 gradient));
    CP_TRY(cp_cuda_add(&args->dq, &gradient->dq, NULL));
    CP_TRY(cp_cuda_add(&args->dk, &gradient->dk, NULL));
    return cp_cuda_add(&args->dv, &gradient->dv, NULL);
}

/* Has torch make the gradients on the CPU, adds them, waits. */
int probe_gradient(const struct probe_block *block)
{
    struct cp_grad_args args = grad_args_of(block);
    struct cp_torch_gradient gradient;
    enum cp_code code = add_gradients(block, &args, &gradient);
    (void)cudaDeviceSynchronize();
    cp_torch_gradient_free(&counted, &gradient);
    return (int)code;
}

static enum cp_code run_meta(const struct cp_torch_op *op, const struct probe_block *b)
{
    struct cp_attend_args args = args_of(b);
    struct cp_torch_answer answer;
    CP_TRY(cp_torch_op_run(&counted, op, meta, &args, b->is_causal != 0, &answer));
    cp_torch_answer_free(&counted, &answer);
    return CP_OK;
}

static enum cp_code gradient_meta(const struct cp_torch_op *op,
                                  const struct probe_block *b)
{
    struct cp_grad_args args = grad_args_of(b);
    struct cp_torch_gradient gradient;
    enum cp_code code = cp_torch_gradient_begin(&counted, op, meta, &args, &gradient);
    if (code == CP_OK) {
        code = cp_torch_gradient_run(&counted, op, &args, b->is_causal != 0, &gradient);
    }
    cp_torch_gradient_free(&counted, &gradient);
    return code;
}

/* What the table chooses for such a block on a GPU of that generation with that cuDNN,
 * run without numbers; the name of the op, or "". */
int probe_meta(const struct probe_block *b, int generation, int cudnn, bool is_gradient,
               char name[128])
{
    struct cp_torch_block block = {
        .dtype = (enum cp_dtype)b->dtype,
        .head_dim = b->dim,
        .value_dim = b->value_dim,
        .rows = b->rows,
        .keys = b->keys,
        .group = b->heads / b->kv_heads,
        .generation = generation,
        .cudnn_version = cudnn,
        .is_aligned = true,
        .is_gradient = is_gradient,
    };
    const struct cp_torch_op *op = cp_torch_op_choose(&block, NULL, 0);
    name[0] = '\0';
    if (op == NULL) {
        return CP_OK;
    }
    strncat(name, op->name, 127);
    return (int)(is_gradient ? gradient_meta(op, b) : run_meta(op, b));
}
