/* GPU memory that the ranks of one host show each other: each its inbox
 * (cuda/ipc_signal.h), made once, and its window, of which there is a new and larger one
 * whenever a call needs more. The old ones stay until close, since a GPU may be in a call
 * that uses them.
 *
 * What a rank has it says in its notice, on the page that all share. Ranks that are
 * threads of one process use each other's addresses; other processes map the memory by
 * CUDA's handles. A notice is read between the gate's second exchange and the first of the
 * next call, and its owner writes it before the former, so neither needs an order of its
 * own. Words that say who still uses whose memory have one.
 *
 * Memory that somebody else has mapped must not be freed: its owner says that it closes,
 * and the others let go of it (cuda/ipc_watcher.h). That may take longer than the owner's
 * context and its page live, so the notices can be kept.
 *
 * All of it is memory of the current device, and not for two threads at once. */
#ifndef CP_CUDA_IPC_MEMORY_H
#define CP_CUDA_IPC_MEMORY_H

#include <cuda_runtime.h>
#include <stdatomic.h>

#include "base/board.h"
#include "base/watch.h"
#include "ipc_signal.h"

/* Each window is at least twice as long as the one before. */
enum { CP_IPC_WINDOWS = 40 };

/* What a rank tells the others of itself: its board. */
struct cp_ipc_notice {
    cudaIpcMemHandle_t inbox_handle, window_handle;
    void *inbox, *window;        /* where they lie in its process */
    uint64_t windows;            /* how many it has made: `window` is the last */
    _Atomic uint32_t is_closing; /* its memory is wanted back; stored and loaded in one
                                    order with `uses`, which all agree on */
    _Atomic uint32_t uses[CP_IPC_RANKS]; /* by rank: whose memory this rank may touch */
    _Atomic uint32_t
        is_kept; /* it has closed its context, but not let go of all memory */
};
_Static_assert(sizeof(struct cp_ipc_notice) <= CP_BOARD_BYTES, "a notice fits a board");

/* What is known of a rank before it is connected. */
struct cp_ipc_peer {
    int device;    /* its ordinal, in its own process */
    bool is_local; /* a thread of this process, or this rank itself */
};

struct cp_ipc_memory {
    const struct cp_watch *watch; /* borrowed; NULL once kept */
    struct cp_boards boards;      /* the notices; borrowed, shared once kept */
    int rank, world;
    struct cp_ipc_inbox *own_inbox;   /* owned */
    void *own_window[CP_IPC_WINDOWS]; /* owned; the last is in use once attached */
    int own_windows;
    size_t own_bytes; /* of the last */
    struct cp_ipc_peer peer[CP_IPC_RANKS];
    struct cp_ipc_inbox *inbox[CP_IPC_RANKS]; /* by rank; NULL: not attached yet */
    void *window[CP_IPC_RANKS];               /* by rank: the one in use */
    uint64_t attached[CP_IPC_RANKS]; /* by rank: its `windows` when that was told */
    void *mapped[CP_IPC_RANKS][1 + CP_IPC_WINDOWS]; /* to be unmapped */
    int mappings[CP_IPC_RANKS];
    bool
        is_left[CP_IPC_RANKS]; /* by rank: not used here any more, whatever is mapped */
};

/* An inbox, told. `peers` has a place for each rank. The struct is the caller's. After a
 * failure there is nothing to destroy. */
CP_NODISCARD enum cp_code cp_ipc_memory_init(struct cp_ipc_memory *memory,
                                             const struct cp_watch *watch,
                                             struct cp_boards boards,
                                             const struct cp_ipc_peer *peers);

/* A window of at least that size, told. CP_ERR_NO_MEMORY leaves what there was. */
CP_NODISCARD enum cp_code cp_ipc_memory_reserve(struct cp_ipc_memory *memory,
                                                size_t bytes);

/* What all ranks have told comes into use here. */
CP_NODISCARD enum cp_code cp_ipc_memory_attach(struct cp_ipc_memory *memory);

/* This rank will not touch that one's memory any more: nor will what its GPU was given. */
void cp_ipc_memory_let_go(struct cp_ipc_memory *memory, int rank);

/* Does this rank use that one's memory, and does it want that back? Then it is not used
 * from now on, and is to be let go of, which may be done beside all others of these. */
bool cp_ipc_memory_leave(struct cp_ipc_memory *memory, int rank);
/* May this rank touch that one's memory? */
bool cp_ipc_memory_uses(const struct cp_ipc_memory *memory, int rank);

/* Has that rank closed its context, but graphs, or work, that may touch others' memory? */
bool cp_ipc_memory_is_kept(const struct cp_ipc_memory *memory, int rank);

/* From now on the watch is not touched, and the page stays until the end. */
void cp_ipc_memory_keep(struct cp_ipc_memory *memory);

/* The end, after all others' memory has been let go: asks for the own back; says whether
 * anybody still uses it; and frees it, or leaves what is used to the end of the process. */
void cp_ipc_memory_ask_back(struct cp_ipc_memory *memory);
bool cp_ipc_memory_is_used(const struct cp_ipc_memory *memory);
void cp_ipc_memory_fini(struct cp_ipc_memory *memory);
/* Frees it before that, where nobody uses it: which takes as long as the GPU works at
 * anything. Touches nothing that cp_ipc_memory_keep does. */
void cp_ipc_memory_free(struct cp_ipc_memory *memory);

#endif
