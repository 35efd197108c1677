/* The table that a module for devices fills (cp_attn._cuda), so that contexts can have
 * calls on them. A context uses one accelerator, and one device of it. */
#ifndef CP_EXEC_ACCELERATOR_H
#define CP_EXEC_ACCELERATOR_H

#include "base/board.h"
#include "base/watch.h"
#include "comm/comm.h"
#include "device/device.h"
#include "kernel/kernel.h"

enum { CP_ACCELERATOR_ABI = 6, CP_OFFER_BYTES = 768 };

/* What a rank tells the others before they connect: bytes that only the accelerator reads.
 */
struct cp_offer {
    unsigned char bytes[CP_OFFER_BYTES];
};

/* A communicator that the caller's framework has among the same ranks, by which an
 * accelerator may connect them. All zero: none. Borrowed until they are connected. */
struct cp_group {
    void *communicator;
    const void *library; /* the function by which its library makes another from it */
    char name[64];       /* on all ranks the same, and no other group's */
    int32_t settings[3]; /* how it was made, as far as the accelerator wants to know */
};

struct cp_connect_args {
    int ordinal;                   /* of the own device */
    const struct cp_offer *offers; /* (world), borrowed for the call */
    const struct cp_group *group;  /* the one that was offered */
    struct cp_watch *watch;        /* borrowed; must outlive the communicator */
    struct cp_boards boards; /* (optional) borrowed likewise, but for what is shared */
    double timeout;          /* seconds */
};

/* Whose memory a context uses on a device: a framework's, which would otherwise keep for
 * itself what it does not use. All zero: the device's own. */
struct cp_lender {
    /* `loan` is handed to give_back, once all work on `out` has been done. May be called
     * from any thread. */
    enum cp_code (*lend)(const struct cp_lender *lender, int ordinal, size_t bytes,
                         const char *what, void **out, void **loan);
    void (*give_back)(void *loan);
    const void *framework; /* the lender's own */
    /* For as long as the context wants it; and for a call that is captured: what is lent
     * on a stream that is being captured, and given back before the capture ends, stays
     * the graph's. */
    bool serves_contexts, serves_captures;
};

struct cp_accelerator {
    const char *name; /* "cuda" */
    uint32_t abi;     /* CP_ACCELERATOR_ABI */
    struct cp_kernel_list kernels;
    /* CP_ERR_VALUE where this process has no device of that number. */
    enum cp_code (*check)(int ordinal);
    /* Of what kind it is: 80 for sm_80. */
    enum cp_code (*generation)(int ordinal, int *out);
    /* Of rank `rank` of `world`, with that device. Waits for nobody. `before`: (world) what
     * all have offered before, where they are asked once more, or NULL. */
    enum cp_code (*offer)(int ordinal, int rank, int world,
                          const struct cp_group *group, const struct cp_offer *before,
                          struct cp_offer *out);
    /* All ranks call it with the same offers. CP_AGAIN: what follows from them takes
     * another round of offers. What they show to be wrong is the same error
     * on all ranks, and the context stays usable; what fails later breaks it. The device is
     * given back to `close`, after its communicator has been closed. */
    enum cp_code (*connect)(const struct cp_connect_args *args,
                            struct cp_device **device, struct cp_comm **comm);
    void (*close)(struct cp_device **device);

    /* Memory outside of any context: as the entries of struct cp_device_ops. */
    enum cp_code (*alloc)(int ordinal, size_t bytes, const char *what, void **out);
    void (*free)(int ordinal, void *address_of_pointer);
    /* As in struct cp_device_ops, before there is a device. */
    enum cp_code (*capture)(int ordinal, struct cp_stream *stream, uint64_t *capture);
    /* `stream` goes on behind what `before` has been given by now. */
    enum cp_code (*follow)(int ordinal, struct cp_stream *stream,
                           struct cp_stream *before);
};

#endif
