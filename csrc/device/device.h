/* The table that a device fills: memory, strided copies, order between lanes.
 *
 * Lanes of the host are not asynchronous: `lane`, `record` and `await` are NULL and
 * every `stream` is NULL. */
#ifndef CP_DEVICE_DEVICE_H
#define CP_DEVICE_DEVICE_H

#include "base/status.h"
#include "tensor/view.h"

enum { CP_DEVICE_ABI = 1 };

struct cp_stream;
struct cp_device;

struct cp_device_ops {
    const char *name;
    uint32_t abi; /* CP_DEVICE_ABI */
    /* Memory for workspaces, aligned to CP_ALIGNMENT. */
    enum cp_code (*alloc)(struct cp_device *device, size_t bytes, const char *what,
                          void **out);
    void (*free)(struct cp_device *device, void *address_of_pointer);
    /* dst = src, converted where the dtypes differ (float types only). Equal n. */
    enum cp_code (*copy)(struct cp_device *device, const struct cp_view *dst,
                         const struct cp_view *src, struct cp_stream *stream);
    /* dst += src, both in dst's dtype (float32 or float64). Equal n. */
    enum cp_code (*add)(struct cp_device *device, const struct cp_view *dst,
                        const struct cp_view *src, struct cp_stream *stream);
    enum cp_code (*zero)(struct cp_device *device, void *data, size_t bytes,
                         struct cp_stream *stream);
    /* (optional) The stream of a lane; orders: `record` notes what `stream` has been
     * given so far as event number `event`, `await` makes `stream` wait for it. */
    struct cp_stream *(*lane)(struct cp_device *device, int lane);
    enum cp_code (*record)(struct cp_device *device, struct cp_stream *stream,
                           int event);
    enum cp_code (*await)(struct cp_device *device, struct cp_stream *stream,
                          int event);
};

/* The head of every device's own struct. */
struct cp_device {
    const struct cp_device_ops *ops;
};

/* The host: stateless, never closed. */
struct cp_device *cp_device_cpu(void);

#endif
