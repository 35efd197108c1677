/* DLPack descriptions from bytes: does the reader take exactly those whose elements can be addressed,
 * and say of every other what is wrong with the argument?
 *
 * An oracle in 128 bits says which code to expect and which bytes a tensor reaches. Where the reader
 * takes one whose bytes are few, they are all there is: a block of that size, every element of which
 * is read through the tensor and through the views made of it, under AddressSanitizer. The reader
 * borrows: it writes nothing in the description and calls no deleter. */
#include <dlpack/dlpack.h>

#include "fuzz.h"
#include "tensor/tensor_dlpack.h"

__extension__ typedef __int128 wide;

enum { MOST_BYTES = 1 << 16, MOST_ELEMENTS = 4096, AXES = CP_TENSOR_DIMS };

static const char name[] = "the_argument";

/* Both kinds of managed tensor; the versioned one has flags. */
struct source {
    DLManagedTensorVersioned versioned;
    DLManagedTensor plain;
    DLTensor *tensor; /* of one of the two */
    bool is_read_only;
    int64_t *shape, *strides; /* blocks of ndim elements, owned; NULL: missing */
    unsigned char *block; /* owned: what the elements lie in; NULL: no real memory */
};

/* What the description says, in numbers that do not overflow. */
struct oracle {
    enum cp_code code; /* what the reader must return */
    enum cp_dtype dtype;
    bool is_empty;
    bool is_wide;   /* `low`, `high` or `bytes` is beyond 2^100, and not to be read */
    wide bytes;     /* of all elements; of an empty one as if its empty axes had one */
    wide low, high; /* reach around element 0 */
    wide stride[AXES]; /* bytes */
};

static void no_deleter(DLManagedTensor *self)
{
    FUZZ_CHECK(self == NULL, "the deleter of a borrowed tensor was called");
}

static void no_versioned_deleter(DLManagedTensorVersioned *self)
{
    FUZZ_CHECK(self == NULL, "the deleter of a borrowed tensor was called");
}

/* ---- the description ---- */

static DLDataType read_dtype(struct fuzz_input *in)
{
    int row = (int)fuzz_range(in, 0, CP_DTYPE_COUNT + 1);
    if (row > CP_DTYPE_NONE && row < CP_DTYPE_COUNT) {
        return cp_tensor_dlpack_dtype((enum cp_dtype)row);
    }
    uint8_t code = fuzz_byte(in);
    uint8_t bits = fuzz_byte(in);
    uint16_t lanes = (uint16_t)fuzz_range(in, 0, 2);
    return (DLDataType){code, bits, lanes};
}

static int64_t *read_numbers(struct fuzz_input *in, int count)
{
    int64_t *numbers = malloc((size_t)count * sizeof *numbers + (count == 0));
    FUZZ_CHECK(numbers != NULL, "no memory");
    for (int i = 0; i < count; i++) {
        numbers[i] = fuzz_number(in);
    }
    return numbers;
}

/* Everything but the address. */
static void read_source(struct fuzz_input *in, struct source *source)
{
    uint8_t flags = fuzz_byte(in);
    int64_t ndim = fuzz_range(in, 0, AXES + 1);
    memset(source, 0, sizeof *source);
    source->versioned.flags = fuzz_byte(in) & 7u;
    source->versioned.version.major = DLPACK_MAJOR_VERSION;
    source->versioned.deleter = no_versioned_deleter;
    source->plain.deleter = no_deleter;
    source->tensor = &source->plain.dl_tensor;
    if ((flags & 1) != 0) {
        source->tensor = &source->versioned.dl_tensor;
        source->is_read_only =
            (source->versioned.flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
    }
    source->tensor->dtype = read_dtype(in);
    source->tensor->device.device_type =
        (flags & 2) != 0 ? (DLDeviceType)fuzz_range(in, 0, 20) : kDLCPU;
    source->tensor->device.device_id = (flags & 2) != 0 ? (int32_t)fuzz_number(in) : 0;
    /* Of a number of dimensions that cannot be, no array may be read. */
    source->tensor->ndim = (int32_t)(ndim > AXES ? fuzz_number(in) : ndim);
    int count = source->tensor->ndim < 0 || source->tensor->ndim > AXES
                    ? 0
                    : source->tensor->ndim;
    source->shape = (flags & 4) == 0 ? read_numbers(in, count) : NULL;
    source->strides = (flags & 8) == 0 ? read_numbers(in, count) : NULL;
    source->tensor->shape = source->shape;
    source->tensor->strides = source->strides;
    source->tensor->byte_offset = (flags & 16) != 0 ? (uint64_t)fuzz_number(in) : 0;
}

/* ---- what to expect ---- */

static wide times(struct oracle *oracle, wide a, wide b)
{
    const wide most = (wide)1 << 100;
    wide product = 0;
    if (__builtin_mul_overflow(a, b, &product) || product > most || product < -most) {
        oracle->is_wide = true;
        return 0;
    }
    return product;
}

/* The bytes that the description reaches; of an axis of fewer than two elements the stride says nothing. */
static void measure(const struct source *source, struct oracle *oracle)
{
    wide item = cp_dtype_bytes(oracle->dtype);
    oracle->bytes = item;
    oracle->high = item;
    for (int axis = source->tensor->ndim - 1; axis >= 0; axis--) {
        int64_t n = source->shape[axis];
        oracle->stride[axis] = source->strides == NULL
                                   ? oracle->bytes
                                   : times(oracle, source->strides[axis], item);
        oracle->bytes = times(oracle, oracle->bytes, n > 1 ? n : 1);
        wide reach = n > 1 ? times(oracle, n - 1, oracle->stride[axis]) : 0;
        oracle->low += reach < 0 ? reach : 0;
        oracle->high += reach > 0 ? reach : 0;
    }
}

static bool fits(const struct oracle *oracle)
{
    bool is_within = !oracle->is_wide && oracle->bytes <= INT64_MAX;
    if (oracle->is_empty) {
        return is_within;
    }
    return is_within && oracle->low >= INT64_MIN && oracle->high <= INT64_MAX &&
           oracle->high - oracle->low <= INT64_MAX;
}

/* Without the address, which is chosen by what is reached. */
static enum cp_code expect_shape(const struct source *source, struct oracle *oracle)
{
    const DLTensor *tensor = source->tensor;
    bool is_negative = false;
    oracle->dtype = cp_dtype_from_dlpack(tensor->dtype.code, tensor->dtype.bits);
    if (oracle->dtype == CP_DTYPE_NONE || tensor->dtype.lanes != 1) {
        return CP_ERR_TYPE;
    }
    if (tensor->ndim < 0 || tensor->ndim > AXES) {
        return CP_ERR_VALUE;
    }
    if (tensor->ndim > 0 && source->shape == NULL) {
        return CP_ERR_BUFFER;
    }
    for (int axis = 0; axis < tensor->ndim; axis++) {
        is_negative = is_negative || source->shape[axis] < 0;
        oracle->is_empty = oracle->is_empty || source->shape[axis] == 0;
    }
    if (is_negative) {
        return CP_ERR_VALUE;
    }
    if (oracle->is_empty) {
        /* Strides of no elements may be anything. */
        struct source packed = *source;
        packed.strides = NULL;
        measure(&packed, oracle);
    } else {
        measure(source, oracle);
    }
    return fits(oracle) ? CP_OK : CP_ERR_VALUE;
}

static enum cp_code expect_address(const struct source *source,
                                   const struct oracle *oracle)
{
    uintptr_t address = (uintptr_t)source->tensor->data;
    uint64_t offset = source->tensor->byte_offset;
    int64_t unit =
        cp_dtype_bytes(oracle->dtype) > 8 ? 8 : cp_dtype_bytes(oracle->dtype);
    if (address != 0 &&
        (offset > PTRDIFF_MAX || __builtin_add_overflow(address, offset, &address))) {
        return CP_ERR_VALUE;
    }
    if (oracle->is_empty) {
        return CP_OK;
    }
    bool is_aligned = address % (uintptr_t)unit == 0;
    for (int axis = 0; axis < source->tensor->ndim; axis++) {
        is_aligned =
            is_aligned && (source->shape[axis] < 2 || oracle->stride[axis] % unit == 0);
    }
    return address != 0 && is_aligned ? CP_OK : CP_ERR_BUFFER;
}

/* Memory of just the bytes that are reached, any number, or NULL. */
static void place(struct fuzz_input *in, struct source *source,
                  const struct oracle *oracle)
{
    DLTensor *tensor = source->tensor;
    uint8_t kind = fuzz_byte(in);
    bool is_small = oracle->code == CP_OK && !oracle->is_empty &&
                    oracle->high - oracle->low <= MOST_BYTES;
    if (kind == 0 || (kind < 128 && !is_small)) {
        tensor->data = NULL;
    } else if (kind >= 128) {
        tensor->data = (void *)(uintptr_t)fuzz_number(in);
    } else {
        size_t shift = kind > 120 ? kind - 120u : 0; /* off its alignment */
        size_t bytes = (size_t)(oracle->high - oracle->low);
        source->block = malloc(bytes + shift);
        FUZZ_CHECK(source->block != NULL, "no memory");
        for (size_t i = 0; i < bytes + shift; i++) {
            source->block[i] = (unsigned char)(i * 31 + (i >> 8));
        }
        uintptr_t first = (uintptr_t)source->block + shift - (uintptr_t)oracle->low;
        tensor->data = (void *)(first - tensor->byte_offset);
    }
}

/* ---- what was taken ---- */

static void check_fields(const struct source *source, const struct oracle *oracle,
                         const struct cp_tensor *got)
{
    const DLTensor *tensor = source->tensor;
    wide low = 0;
    wide high = cp_dtype_bytes(oracle->dtype);
    FUZZ_CHECK(got->dtype == oracle->dtype && got->ndim == tensor->ndim, "dtype %d",
               (int)got->dtype);
    FUZZ_CHECK(got->device_type == (int)tensor->device.device_type &&
                   got->device_id == tensor->device.device_id,
               "device %d:%d", got->device_type, got->device_id);
    FUZZ_CHECK(got->is_read_only == source->is_read_only, "%d", got->is_read_only);
    FUZZ_CHECK(got->data != NULL, "no address");
    for (int axis = 0; axis < got->ndim; axis++) {
        FUZZ_CHECK(got->shape[axis] == source->shape[axis], "axis %d", axis);
        if (!oracle->is_empty && got->shape[axis] > 1) {
            wide reach = (wide)(got->shape[axis] - 1) * got->stride[axis];
            low += reach < 0 ? reach : 0;
            high += reach > 0 ? reach : 0;
            FUZZ_CHECK(got->stride[axis] == oracle->stride[axis], "axis %d", axis);
        }
    }
    if (!oracle->is_empty) {
        FUZZ_CHECK((uintptr_t)got->data ==
                       (uintptr_t)tensor->data + tensor->byte_offset,
                   "another address");
        FUZZ_CHECK(low == oracle->low && high == oracle->high, "another reach");
        FUZZ_CHECK(cp_tensor_count(got) * cp_dtype_bytes(got->dtype) ==
                       (int64_t)oracle->bytes,
                   "another size");
    }
}

/* Where element `index` in row-major order lies. */
static uintptr_t address_of(const char *data, int axes, const int64_t *n,
                            const int64_t *stride, int64_t index)
{
    uintptr_t address = (uintptr_t)data;
    for (int axis = axes - 1; axis >= 0; axis--) {
        address += (uintptr_t)(index % n[axis] * stride[axis]);
        index /= n[axis];
    }
    return address;
}

/* A view has the tensor's elements in the tensor's order. */
static void check_view(const struct cp_tensor *tensor, const struct cp_view *view,
                       const char *what)
{
    int64_t count = cp_tensor_count(tensor);
    FUZZ_CHECK(cp_view_count(view) == count, "%s: %lld elements", what,
               (long long)cp_view_count(view));
    FUZZ_CHECK(view->dtype == tensor->dtype, "%s", what);
    for (int64_t i = 0; i < count; i++) {
        FUZZ_CHECK(address_of(view->data, CP_AXES, view->n, view->stride, i) ==
                       address_of(tensor->data, tensor->ndim, tensor->shape,
                                  tensor->stride, i),
                   "%s: element %lld", what, (long long)i);
    }
}

static void check_views(struct fuzz_input *in, const struct cp_tensor *tensor)
{
    struct cp_view view;
    uint8_t flags = fuzz_byte(in);
    int64_t n0 = tensor->ndim > 1 ? tensor->shape[0] : 1;
    int64_t n1 = tensor->ndim > 3 ? tensor->shape[1] : 1;
    int64_t batch = (flags & 1) != 0 ? n0 : 7;
    int64_t heads = (flags & 2) == 0 ? n1 : 5;
    bool is_mask = tensor->ndim > 0 && tensor->ndim < 5 && (n0 == 1 || n0 == batch) &&
                   (n1 == 1 || n1 == heads);
    enum cp_code code = cp_tensor_view_attention(name, tensor, &view);
    FUZZ_CHECK((code == CP_OK) == (tensor->ndim == 4), "%d axes", tensor->ndim);
    if (code == CP_OK) {
        check_view(tensor, &view, "attention");
    } else {
        fuzz_check_sentence(code, name);
    }
    code = cp_tensor_view_lse(name, tensor, &view);
    FUZZ_CHECK((code == CP_OK) == (tensor->ndim == 3), "%d axes", tensor->ndim);
    if (code == CP_OK) {
        check_view(tensor, &view, "lse");
    } else {
        fuzz_check_sentence(code, name);
    }
    code = cp_tensor_view_mask(tensor, batch, heads, &view);
    FUZZ_CHECK((code == CP_OK) == is_mask, "%d axes, batch %lld, %lld heads",
               tensor->ndim, (long long)batch, (long long)heads);
    if (code == CP_OK) {
        check_view(tensor, &view, "mask");
    } else {
        fuzz_check_sentence(code, "attn_mask");
    }
    for (int dim = 0; dim < tensor->ndim; dim++) {
        bool is_cut = cp_tensor_view_cut(tensor, dim, &view);
        FUZZ_CHECK(is_cut || !cp_tensor_is_compact(tensor), "dim %d", dim);
        if (is_cut) {
            check_view(tensor, &view, "cut");
        }
    }
}

/* Every element of the memory is read, as a whole and in a part, and compared one by one. */
static void check_copy(const struct cp_tensor *tensor)
{
    struct cp_tensor packed;
    size_t item = (size_t)cp_dtype_bytes(tensor->dtype);
    int64_t count = cp_tensor_count(tensor);
    char *copy = malloc((size_t)count * item);
    FUZZ_CHECK(copy != NULL, "no memory");
    enum cp_code code = cp_tensor_init_compact(&packed, copy, tensor->dtype,
                                               tensor->ndim, tensor->shape);
    FUZZ_CHECK(code == CP_OK && cp_tensor_is_compact(&packed), "%s",
               cp_last_error()->text);
    cp_tensor_copy(&packed, tensor);
    for (int64_t i = 0; i < count; i++) {
        uintptr_t from =
            address_of(tensor->data, tensor->ndim, tensor->shape, tensor->stride, i);
        FUZZ_CHECK(memcmp(copy + (size_t)i * item, (const void *)from, item) == 0,
                   "element %lld", (long long)i);
    }
    free(copy);
}

static void check_narrow(struct fuzz_input *in, const struct cp_tensor *tensor)
{
    if (tensor->ndim == 0) {
        return;
    }
    int dim = (int)fuzz_range(in, 0, tensor->ndim - 1);
    int64_t first = fuzz_byte(in) % tensor->shape[dim];
    int64_t count = fuzz_byte(in) % (tensor->shape[dim] - first) + 1;
    struct cp_tensor part = cp_tensor_narrow(tensor, dim, first, count);
    FUZZ_CHECK(part.shape[dim] == count, "%lld", (long long)part.shape[dim]);
    check_copy(&part);
}

static void check_texts(const struct cp_tensor *tensor)
{
    char shape[24];
    char device[16];
    (void)cp_tensor_print_shape(tensor, shape, sizeof shape);
    (void)cp_tensor_print_device(tensor, device, sizeof device);
    enum cp_code code = cp_tensor_check_device(name, tensor);
    bool is_served =
        cp_tensor_is_on_host(tensor) || tensor->device_type == (int)kDLCUDA;
    FUZZ_CHECK((code == CP_OK) == is_served, "device %d", tensor->device_type);
    if (code != CP_OK) {
        fuzz_check_sentence(code, name);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz_input in = {data, bytes};
    struct source source;
    struct oracle oracle = {0};
    struct cp_tensor got;
    read_source(&in, &source);
    oracle.code = expect_shape(&source, &oracle);
    place(&in, &source, &oracle);
    if (oracle.code == CP_OK) {
        oracle.code = expect_address(&source, &oracle);
    }
    struct source before;
    struct cp_tensor untouched;
    memcpy(&before, &source, sizeof source);
    memset(&got, 0x5a, sizeof got);
    memcpy(&untouched, &got, sizeof got);
    enum cp_code code =
        cp_tensor_from_dlpack(name, source.tensor, source.is_read_only, &got);
    FUZZ_CHECK(code == oracle.code, "%d, not %d: %s", (int)code, (int)oracle.code,
               code == CP_OK ? "taken" : cp_last_error()->text);
    FUZZ_CHECK(memcmp(&before, &source, sizeof source) == 0, "the source was written");
    if (code != CP_OK) {
        fuzz_check_sentence(code, name);
        FUZZ_CHECK(memcmp(&got, &untouched, sizeof got) == 0, "a result of a failure");
    } else {
        check_fields(&source, &oracle, &got);
        check_texts(&got);
        if (!oracle.is_empty &&
            oracle.bytes / cp_dtype_bytes(got.dtype) <= MOST_ELEMENTS) {
            check_views(&in, &got);
        }
        if (source.block != NULL && cp_tensor_count(&got) <= MOST_ELEMENTS) {
            check_copy(&got);
            check_narrow(&in, &got);
        }
    }
    free(source.block);
    free(source.shape);
    free(source.strides);
    return 0;
}
