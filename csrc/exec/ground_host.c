/* Ranks of one host: windows of shared memory, and the page that the meeting brings. */
#include <unistd.h>

#include "base/mem.h"
#include "comm/comm_shm.h"
#include "exec/ground.h"

struct ground_host {
    struct cp_ground head;
    struct cp_meeting *meeting;
    struct cp_window *windows; /* (world), owned */
};

static struct ground_host *host_of(struct cp_ground *ground)
{
    return (struct ground_host *)ground;
}

/* Address space that a window reserves: sparse, so that it costs nothing, and with room
 * for all of the host's memory. */
static size_t window_reserved(void)
{
    const size_t least = (size_t)1 << 30; /* where the system does not say */
    size_t pages = (size_t)sysconf(_SC_PHYS_PAGES);
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    size_t bytes = 0;
    bool is_known = !__builtin_mul_overflow(pages, page_bytes, &bytes);
    return is_known && bytes > least ? (bytes / least + 1) * least : least;
}

static enum cp_code host_meet(struct cp_ground *ground, struct cp_meet_args *args)
{
    struct ground_host *host = host_of(ground);
    args->window_fd = host->windows[ground->rank].fd;
    return cp_meet(args, &host->meeting);
}

static const struct cp_hello *host_hello(const struct cp_ground *ground, int rank)
{
    return cp_meeting_hello(((const struct ground_host *)ground)->meeting, rank);
}

static enum cp_code host_share(struct cp_ground *ground, struct cp_watch *watch,
                               struct cp_page **page, struct cp_boards *boards)
{
    struct ground_host *host = host_of(ground);
    for (int rank = 0; rank < ground->world; rank++) {
        if (rank != ground->rank) {
            CP_TRY(cp_window_map(cp_meeting_window_fd(host->meeting, rank),
                                 &host->windows[rank]));
        }
    }
    watch->is_dead = cp_meeting_is_dead;
    watch->peers = host->meeting;
    struct cp_mapping *mapping = cp_meeting_page(host->meeting);
    *page = mapping->base;
    *boards =
        (struct cp_boards){.of = cp_page_boards(*page, ground->world), .in = mapping};
    return CP_OK;
}

static enum cp_code host_comm(struct cp_ground *ground, struct cp_watch *watch,
                              struct cp_comm **out)
{
    return cp_comm_shm_create(host_of(ground)->windows, watch, out);
}

static void host_close(struct cp_ground **ground)
{
    struct ground_host *host = host_of(*ground);
    if (host == NULL) {
        return;
    }
    for (int rank = 0; rank < host->head.world && host->windows != NULL; rank++) {
        cp_window_close(&host->windows[rank]);
    }
    cp_meeting_close(&host->meeting);
    cp_mem_destroy(&host->windows);
    cp_mem_destroy(ground);
}

static const struct cp_ground_ops host_ops = {
    .meet = host_meet,
    .hello = host_hello,
    .share = host_share,
    .comm = host_comm,
    .close = host_close,
};

enum cp_code cp_ground_host_create(int rank, int world, struct cp_ground **out)
{
    void *block = NULL;
    CP_TRY(cp_mem_create(sizeof(struct ground_host), "a context", &block));
    struct ground_host *host = block;
    struct cp_ground *ground = &host->head;
    *ground = (struct cp_ground){.ops = &host_ops, .rank = rank, .world = world};
    enum cp_code code =
        cp_mem_create((size_t)world * sizeof *host->windows, "a context", &block);
    if (code == CP_OK) {
        host->windows = block;
        for (int other = 0; other < world; other++) {
            host->windows[other].fd = -1;
        }
        code = cp_window_create(window_reserved(), &host->windows[rank]);
    }
    if (code != CP_OK) {
        host_close(&ground);
        return code;
    }
    *out = ground;
    return CP_OK;
}
