/* Strided copies, conversions and sums: one thread a unit, an element or a few that lie
 * side by side. Bound by memory; units are 16 bytes wide where alignment and strides
 * allow it. Several copies are one launch, as long as one kernel does them. */
#include "cuda_api.h"
#include "launch.h"
#include "number.cuh"
#include "tensor/nest.h"

namespace
{

constexpr unsigned THREADS = 256;
/* Positions of units are 32 bits wide, since 64-bit division is slow; longer moves are
 * cut. */
constexpr int64_t LONGEST = INT32_MAX;
constexpr int64_t WIDEST_MOVE = 16; /* bytes */
constexpr int64_t WIDEST = 4;       /* elements that are converted or added */

/* N elements, as wide and as aligned as they are long. */
template <class T, int N> struct alignas(sizeof(T) * N) unit {
    T element[N];
};

/* Where unit number `at` lies on both sides. */
__device__ inline void find(const cp_nest &nest, uint32_t at, char *&dst,
                            const char *&src)
{
    dst = nest.dst;
    src = nest.src;
    for (int i = 0; i < nest.count; i++) {
        uint32_t n = (uint32_t)nest.axis[i].n;
        uint32_t along = i + 1 < nest.count ? at % n : at;
        at /= n;
        dst += along * nest.axis[i].dst;
        src += along * nest.axis[i].src;
    }
}

/* What is done with a unit. */
template <class Unit> __device__ inline void move_one(char *dst, const char *src)
{
    *(Unit *)dst = *(const Unit *)src;
}

/* Of any width, so that all moves are of one kernel. */
struct move_unit {
    static __device__ void apply(int64_t bytes, char *dst, const char *src)
    {
        switch (bytes) {
        case 16:
            return move_one<unit<uint64_t, 2>>(dst, src);
        case 8:
            return move_one<uint64_t>(dst, src);
        case 4:
            return move_one<uint32_t>(dst, src);
        case 2:
            return move_one<uint16_t>(dst, src);
        default:
            return move_one<uint8_t>(dst, src);
        }
    }
};

template <class Dst, class Src, int N> struct convert_unit {
    static __device__ void apply(int64_t, char *dst, const char *src)
    {
        unit<Src, N> from = *(const unit<Src, N> *)src;
        unit<Dst, N> to;
        for (int i = 0; i < N; i++) {
            cp_narrow(cp_widen(from.element[i]), &to.element[i]);
        }
        *(unit<Dst, N> *)dst = to;
    }
};

template <class Src, int N> struct add_unit {
    static __device__ void apply(int64_t, char *dst, const char *src)
    {
        unit<Src, N> from = *(const unit<Src, N> *)src;
        unit<cp_sum<Src>, N> to = *(unit<cp_sum<Src>, N> *)dst;
        for (int i = 0; i < N; i++) {
            to.element[i] += cp_widen(from.element[i]);
        }
        *(unit<cp_sum<Src>, N> *)dst = to;
    }
};

/* Nests that one launch does, each with blocks of its own. */
constexpr int MOST = 24; /* below 32 */
struct nests {
    cp_nest nest[MOST];
    uint32_t units[MOST];
    uint32_t end[MOST]; /* blocks of this one and all before it; no nest: UINT32_MAX */
};
static_assert(sizeof(nests) <= 4096,
              "what every driver takes as a kernel's parameters");

template <class Op> __global__ void __launch_bounds__(THREADS) each_kernel(nests all)
{
    int mine = 0; /* how many nests end before this block */
    CP_CUDA_UNROLL
    for (int more = 16; more > 0; more /= 2) {
        int here = mine + more;
        mine = here <= MOST && all.end[here - 1] <= blockIdx.x ? here : mine;
    }
    uint32_t first = mine > 0 ? all.end[mine - 1] : 0;
    uint32_t at = (blockIdx.x - first) * THREADS + threadIdx.x;
    if (at < all.units[mine]) {
        const cp_nest &nest = all.nest[mine];
        char *dst;
        const char *src;
        find(nest, at, dst, src);
        Op::apply(nest.dst_bytes, dst, src);
    }
}

using nests_kernel = void (*)(nests);

/* What is launched next: nests of one kernel. */
struct queue {
    cp_stream *stream;
    const cp_copy_engine *engine = nullptr;
    nests_kernel kernel = nullptr;
    nests all = {};
    int count = 0;
    uint32_t blocks = 0;
};

enum cp_code move_run(char *dst, const char *src, int64_t bytes, cp_stream *stream)
{
    return cp_cuda_check(cudaMemcpyAsync(dst, src, (size_t)bytes,
                                         cudaMemcpyDeviceToDevice,
                                         (cudaStream_t)stream),
                         "cudaMemcpyAsync");
}

/* One move without gaps needs no kernel of ours. */
bool is_run(const queue &next)
{
    const cp_nest &nest = next.all.nest[0];
    return next.kernel == each_kernel<move_unit> && next.count == 1 &&
           nest.count == 1 && nest.axis[0].dst == nest.dst_bytes &&
           nest.axis[0].src == nest.src_bytes;
}

enum cp_code flush(queue &next)
{
    enum cp_code code = CP_OK;
    if (is_run(next)) {
        const cp_nest &run = next.all.nest[0];
        code = move_run(run.dst, run.src, run.axis[0].n * run.dst_bytes, next.stream);
    } else {
        code = cp_cuda_launch(next.kernel, next.blocks, THREADS, next.stream, next.all);
    }
    next.count = 0;
    next.blocks = 0;
    return code;
}

/* Queues it, behind a launch of what is queued where the two cannot be one. */
enum cp_code put(queue &next, nests_kernel kernel, const cp_nest &nest)
{
    int64_t units = cp_nest_count(&nest);
    if (units > LONGEST) {
        cp_nest halves[2];
        cp_nest_halve(&nest, halves);
        CP_TRY(put(next, kernel, halves[0]));
        return put(next, kernel, halves[1]);
    }
    if (next.count == MOST || next.kernel != kernel) {
        CP_TRY(flush(next));
    }
    if (next.count == 0) {
        next.kernel = kernel;
        for (int i = 0; i < MOST; i++) {
            next.all.end[i] = UINT32_MAX;
        }
    }
    next.blocks += (uint32_t)((units + THREADS - 1) / THREADS);
    next.all.nest[next.count] = nest;
    next.all.units[next.count] = (uint32_t)units;
    next.all.end[next.count] = next.blocks;
    next.count += 1;
    return CP_OK;
}

constexpr int64_t LONGEST_PITCH = INT32_MAX; /* of cudaMemcpy2D */

/* Rows of bytes of one length: planes of rows, where a nest has more loops. */
bool is_for_engine(const cp_copy_engine &engine, const cp_nest &by_byte)
{
    const cp_nest_axis &row = by_byte.axis[0];
    if (by_byte.count == 1) {
        return row.n >= engine.least_piece;
    }
    const cp_nest_axis &rows = by_byte.axis[1];
    return row.dst == 1 && row.src == 1 && row.n >= engine.least_row &&
           rows.n >= engine.least_plane / row.n && rows.dst >= row.n &&
           rows.src >= row.n && rows.dst <= LONGEST_PITCH && rows.src <= LONGEST_PITCH;
}

enum cp_code move_by_engine(const queue &next, const cp_nest &by_byte)
{
    const cp_nest_axis &row = by_byte.axis[0], &rows = by_byte.axis[1];
    const cp_nest_axis &outermost = by_byte.axis[by_byte.count - 1];
    if (by_byte.count == 1) {
        return move_run(by_byte.dst, by_byte.src, row.n, next.stream);
    }
    if (by_byte.count == 2) {
        return cp_cuda_check(
            cudaMemcpy2DAsync(by_byte.dst, (size_t)rows.dst, by_byte.src,
                              (size_t)rows.src, (size_t)row.n, (size_t)rows.n,
                              cudaMemcpyDeviceToDevice, (cudaStream_t)next.stream),
            "cudaMemcpy2DAsync");
    }
    for (int64_t i = 0; i < outermost.n; i++) {
        cp_nest plane = by_byte;
        plane.count -= 1;
        plane.dst += i * outermost.dst;
        plane.src += i * outermost.src;
        CP_TRY(move_by_engine(next, plane));
    }
    return CP_OK;
}

enum cp_code move(queue &next, const cp_nest &nest, bool is_with_peer)
{
    int64_t bytes = 0;
    cp_nest by_byte = cp_nest_of_bytes(&nest);
    if (is_with_peer && next.engine != nullptr &&
        is_for_engine(*next.engine, by_byte)) {
        return move_by_engine(next, by_byte);
    }
    return put(next, each_kernel<move_unit>,
               cp_nest_widen(&by_byte, WIDEST_MOVE, &bytes));
}

/* `Wide` where units can be of WIDEST elements, else `One`. */
template <class Wide, class One>
enum cp_code put_widest(queue &next, const cp_nest &nest)
{
    int64_t width = 0;
    cp_nest wide = cp_nest_widen(&nest, WIDEST, &width);
    return width == WIDEST ? put(next, each_kernel<Wide>, wide)
                           : put(next, each_kernel<One>, nest);
}

template <class Dst, class Src> enum cp_code convert(queue &next, const cp_nest &nest)
{
    return put_widest<convert_unit<Dst, Src, WIDEST>, convert_unit<Dst, Src, 1>>(next,
                                                                                 nest);
}

enum cp_code check_alignment(const cp_nest &nest, const char *verb)
{
    return cp_nest_is_aligned(&nest)
               ? CP_OK
               : cp_fail(CP_ERR_INTERNAL,
                         "%s of elements that are not aligned to their size", verb);
}

enum cp_code copy(queue &next, const cp_copy &what)
{
    const cp_view *dst = &what.dst, *src = &what.src;
    CP_TRY(cp_view_check_same(dst, src, "copy"));
    bool is_move = dst->dtype == src->dtype && cp_dtype_bytes(dst->dtype) > 0;
    if (!is_move && !(cp_dtype_attends(dst->dtype) && cp_dtype_attends(src->dtype))) {
        return cp_fail(CP_ERR_INTERNAL, "no conversion from %s to %s",
                       cp_dtype_name(src->dtype), cp_dtype_name(dst->dtype));
    }
    if (cp_view_count(dst) == 0) {
        return CP_OK;
    }
    cp_nest nest = cp_nest_init(dst, src);
    if (is_move) {
        return move(next, nest, what.is_with_peer);
    }
    CP_TRY(check_alignment(nest, "conversion"));
    return cp_with_type(dst->dtype, [&](auto to) {
        return cp_with_type(src->dtype, [&](auto from) {
            return convert<decltype(to), decltype(from)>(next, nest);
        });
    });
}

} // namespace

enum cp_code cp_cuda_copy(const struct cp_copy *copies, int count,
                          const struct cp_copy_engine *engine, struct cp_stream *stream)
{
    queue next = {.stream = stream, .engine = engine};
    for (int i = 0; i < count; i++) {
        CP_TRY(copy(next, copies[i]));
    }
    return flush(next);
}

enum cp_code cp_cuda_add(const struct cp_view *dst, const struct cp_view *src,
                         struct cp_stream *stream)
{
    CP_TRY(cp_view_check_same(dst, src, "add"));
    if (!cp_dtype_attends(src->dtype) || dst->dtype != cp_dtype_sum(src->dtype)) {
        return cp_fail(CP_ERR_INTERNAL, "cannot add %s to %s",
                       cp_dtype_name(src->dtype), cp_dtype_name(dst->dtype));
    }
    if (cp_view_count(dst) == 0) {
        return CP_OK;
    }
    cp_nest nest = cp_nest_init(dst, src);
    CP_TRY(check_alignment(nest, "sum"));
    queue next = {.stream = stream};
    CP_TRY(cp_with_type(src->dtype, [&](auto type) {
        using Src = decltype(type);
        return put_widest<add_unit<Src, WIDEST>, add_unit<Src, 1>>(next, nest);
    }));
    return flush(next);
}
