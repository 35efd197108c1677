/* Ranks of one host: windows of shared memory that peers read in place.
 *
 * A window is a memfd with a large reservation, made once, whose owner adds pages as it
 * needs them; it cannot shrink, so what a peer reads never vanishes, not even with its
 * owner:
 *
 *     window: counters (one page) | what a call publishes
 *
 * Ranks are processes, each with its own mapping, or threads of one process over the
 * same mappings. */
#ifndef CP_COMM_COMM_SHM_H
#define CP_COMM_COMM_SHM_H

#include "base/watch.h"
#include "comm/comm.h"

/* A window as one process sees it. */
struct cp_window {
    int fd;          /* owned; -1 for a peer's window */
    int owner_pid;   /* a forked child has no mapping to close */
    char *base;      /* mapping, owned; NULL: no window */
    size_t reserved; /* bytes of the mapping */
};

/* Reserves address space; no memory is used yet. */
CP_NODISCARD enum cp_code cp_window_create(size_t reserved, struct cp_window *out);
/* Maps a peer's window, whose descriptor stays the caller's, for reading. */
CP_NODISCARD enum cp_code cp_window_map(int fd, struct cp_window *out);
/* Accepts an all-zero struct and leaves one. */
void cp_window_close(struct cp_window *window);

/* `windows` (world of them, in rank order) and `watch` are borrowed; must outlive the
 * communicator. */
CP_NODISCARD enum cp_code cp_comm_shm_create(const struct cp_window *windows,
                                             struct cp_watch *watch,
                                             struct cp_comm **out);

#endif
