/* The table that a device fills: memory, strided copies, order between lanes.
 *
 * Work for an asynchronous device is enqueued on streams, and events order them. The
 * host is not one: the optional entries are NULL and every `stream` is NULL. */
#ifndef CP_DEVICE_DEVICE_H
#define CP_DEVICE_DEVICE_H

#include "base/clock.h"
#include "base/status.h"
#include "tensor/view.h"

enum { CP_DEVICE_ABI = 6, CP_DEVICE_LANES = 3, CP_DEVICE_EVENTS = 256 };

/* The event behind all work of the call before, but for those captured; and the one that a
 * captured call begins with, which means nothing outside of its capture. */
enum { CP_DEVICE_EVENT_CALL = 0, CP_DEVICE_EVENT_CAPTURED = 1 };

struct cp_stream;
struct cp_device;

struct cp_device_ops {
    const char *name;
    uint32_t abi; /* CP_DEVICE_ABI */
    /* Memory for workspaces, aligned to CP_ALIGNMENT. */
    enum cp_code (*alloc)(struct cp_device *device, size_t bytes, const char *what,
                          void **out);
    void (*free)(struct cp_device *device, void *address_of_pointer);
    /* dst = src, converted where the dtypes differ (float types only). Equal n. Several
     * are done in any order: none writes what another reads or writes. That one is from
     * a peer's memory, or into it, only says how it may best be done. */
    enum cp_code (*copy)(struct cp_device *device, const struct cp_copy *copies,
                         int count, struct cp_stream *stream);
    /* dst += src, both in dst's dtype (float32 or float64). Equal n. */
    enum cp_code (*add)(struct cp_device *device, const struct cp_view *dst,
                        const struct cp_view *src, struct cp_stream *stream);
    enum cp_code (*zero)(struct cp_device *device, void *data, size_t bytes,
                         struct cp_stream *stream);
    /* (optional) Makes it the thread's current device, and the one from before again: around
     * all that is enqueued. */
    enum cp_code (*enter)(struct cp_device *device, int *before);
    enum cp_code (*leave)(struct cp_device *device, int before);
    /* Returns once what the last record of this event stands for has happened; CP_AGAIN:
     * it had not by the deadline. An error of the device: nothing is under way there. */
    enum cp_code (*wait)(struct cp_device *device, int event,
                         struct cp_deadline deadline);
    /* (optional) The own stream of lane 0 to CP_DEVICE_LANES - 1; orders: `record` notes
     * what `stream` has been given so far as event 0 to CP_DEVICE_EVENTS - 1, `await`
     * makes `stream` wait for what was noted last, if anything. */
    struct cp_stream *(*lane)(struct cp_device *device, int lane);
    enum cp_code (*record)(struct cp_device *device, struct cp_stream *stream,
                           int event);
    enum cp_code (*await)(struct cp_device *device, struct cp_stream *stream,
                          int event);
    /* (optional) What the stream is given may be recorded in a graph, to be done whenever
     * that is launched: the number of the capture that it is part of, which no other has;
     * 0: of none. While it is, streams that await what it records become part of it,
     * `wait` and `free` are not for it, and its memory is that of `alloc_in_order`, which
     * has to be freed in it. */
    enum cp_code (*capture)(struct cp_device *device, struct cp_stream *stream,
                            uint64_t *capture);
    enum cp_code (*alloc_in_order)(struct cp_device *device, size_t bytes,
                                   const char *what, struct cp_stream *stream,
                                   void **out);
    void (*free_in_order)(struct cp_device *device, void *address_of_pointer,
                          struct cp_stream *stream);
};

/* The head of every device's own struct. */
struct cp_device {
    const struct cp_device_ops *ops;
};

static inline bool cp_device_is_async(const struct cp_device *device)
{
    return device->ops->lane != NULL;
}

/* One copy. */
CP_NODISCARD static inline enum cp_code cp_device_copy(struct cp_device *device,
                                                       const struct cp_view *dst,
                                                       const struct cp_view *src,
                                                       struct cp_stream *stream)
{
    const struct cp_copy copy = {.dst = *dst, .src = *src};
    return device->ops->copy(device, &copy, 1, stream);
}

/* The host: stateless, never closed. */
struct cp_device *cp_device_cpu(void);

#endif
