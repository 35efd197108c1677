/* Ranks of several hosts: two connections for each pair, and a page that one of them
 * keeps equal. */
#include "base/mem.h"
#include "comm/comm_tcp.h"
#include "control/meet_hosts.h"
#include "control/replica.h"
#include "exec/ground.h"

struct ground_hosts {
    struct cp_ground head;
    const struct cp_root *root; /* borrowed */
    struct cp_hosts *hosts;
    struct cp_replica *replica;
};

static struct ground_hosts *hosts_of(struct cp_ground *ground)
{
    return (struct ground_hosts *)ground;
}

static enum cp_code hosts_meet(struct cp_ground *ground, struct cp_meet_args *args)
{
    struct ground_hosts *self = hosts_of(ground);
    args->window_fd = -1;
    return cp_meet_hosts(args, self->root, &self->hosts);
}

static const struct cp_hello *hosts_hello(const struct cp_ground *ground, int rank)
{
    return cp_hosts_hello(((const struct ground_hosts *)ground)->hosts, rank);
}

static enum cp_code hosts_share(struct cp_ground *ground, struct cp_watch *watch,
                                struct cp_page **page, struct cp_boards *boards)
{
    struct ground_hosts *self = hosts_of(ground);
    CP_TRY(cp_replica_open(cp_hosts_line(self->hosts, CP_LINE_CONTROL), ground->rank,
                           ground->world, &self->replica));
    watch->is_dead = cp_replica_is_dead;
    watch->peers = self->replica;
    *page = cp_replica_page(self->replica);
    *boards = (struct cp_boards){.of = NULL};
    return CP_OK;
}

static enum cp_code hosts_comm(struct cp_ground *ground, struct cp_watch *watch,
                               struct cp_comm **out)
{
    return cp_comm_tcp_create(cp_hosts_line(hosts_of(ground)->hosts, CP_LINE_DATA),
                              watch, out);
}

static void hosts_close(struct cp_ground **ground)
{
    struct ground_hosts *self = hosts_of(*ground);
    if (self == NULL) {
        return;
    }
    cp_replica_close(&self->replica);
    cp_hosts_close(&self->hosts);
    cp_mem_destroy(ground);
}

static const struct cp_ground_ops hosts_ops = {
    .meet = hosts_meet,
    .hello = hosts_hello,
    .share = hosts_share,
    .comm = hosts_comm,
    .close = hosts_close,
};

enum cp_code cp_ground_hosts_create(int rank, int world, const struct cp_root *root,
                                    struct cp_ground **out)
{
    void *block = NULL;
    CP_TRY(cp_mem_create(sizeof(struct ground_hosts), "a context", &block));
    struct ground_hosts *self = block;
    self->head = (struct cp_ground){.ops = &hosts_ops, .rank = rank, .world = world};
    self->root = root;
    *out = &self->head;
    return CP_OK;
}
