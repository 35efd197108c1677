/* Copies of keys and values. */
#include "near.h"

#include "base/checked.h"
#include "cuda_api.h"
#include "cuda_check.h"

enum { ALIGNMENT = 256 };

static int64_t bytes_of(const struct cp_view *view)
{
    return cp_round_up(cp_view_count(view) * cp_dtype_bytes(view->dtype), ALIGNMENT);
}

enum cp_code cp_near_bytes(const struct cp_view *k, const struct cp_view *v,
                           int64_t *out)
{
    struct cudaPointerAttributes attributes;
    int current = 0;
    CP_TRY(cp_cuda_check(cudaGetDevice(&current), "cudaGetDevice"));
    CP_TRY(cp_cuda_check(cudaPointerGetAttributes(&attributes, k->data),
                         "cudaPointerGetAttributes"));
    bool is_near =
        attributes.type != cudaMemoryTypeDevice || attributes.device == current;
    *out = is_near ? 0 : bytes_of(k) + bytes_of(v);
    return CP_OK;
}

/* (batch, row, head, dim), with the rows of a head side by side. */
static struct cp_view by_heads(char *room, const struct cp_view *like)
{
    const int64_t *n = like->n;
    struct cp_view view = cp_view_compact(room, like->dtype, n[0], n[2], n[1], n[3]);
    int64_t head = view.stride[1];
    view.n[1] = n[1];
    view.n[2] = n[2];
    view.stride[1] = view.stride[2];
    view.stride[2] = head;
    return view;
}

enum cp_code cp_near_bring(char *room, struct cp_view *k, struct cp_view *v,
                           struct cp_stream *stream)
{
    const struct cp_copy copies[2] = {
        {.dst = by_heads(room, k), .src = *k},
        {.dst = by_heads(room + bytes_of(k), v), .src = *v},
    };
    CP_TRY(cp_cuda_copy(copies, 2, stream));
    *k = copies[0].dst;
    *v = copies[1].dst;
    return CP_OK;
}
