/* The transport of several hosts for world.h: each rank has a page of its own, and TCP
 * connections carry the page and the data. */
#ifndef CP_TESTS_OVER_TCP_H
#define CP_TESTS_OVER_TCP_H

#include "comm/comm_tcp.h"
#include "control/replica.h"
#include "loopback.h"
#include "world.h"

struct over_tcp_lines {
    struct loopback control, data;
};

static inline void over_tcp_open(struct world *w)
{
    struct over_tcp_lines *lines = calloc(1, sizeof *lines);
    if (lines == NULL || !loopback_open(&lines->control, w->size) ||
        !loopback_open(&lines->data, w->size)) {
        (void)fprintf(stderr, "no connections\n");
        abort();
    }
    w->shared = lines;
}

static inline void over_tcp_close(struct world *w)
{
    struct over_tcp_lines *lines = w->shared;
    loopback_close(&lines->control);
    loopback_close(&lines->data);
    free(lines);
}

static inline enum cp_code over_tcp_join(struct world *w, int rank,
                                         struct cp_context_parts *parts)
{
    const struct over_tcp_lines *lines = w->shared;
    struct cp_replica *replica = NULL;
    CP_TRY(cp_replica_open(lines->control.fd[rank], rank, w->size, &replica));
    struct cp_page *page = cp_replica_page(replica);
    struct cp_flight *flights = cp_page_flights(page, w->size);
    w->own[rank] = replica;
    w->recorder[rank].flight = &flights[rank];
    w->watch[rank].flights = flights;
    w->watch[rank].bell = cp_page_bell(page);
    w->watch[rank].poison = cp_page_poison(page);
    w->watch[rank].is_dead = cp_replica_is_dead;
    w->watch[rank].peers = replica;
    parts->gate.page = page;
    world_use_the_host(w, parts);
    return cp_comm_tcp_create(lines->data.fd[rank], &w->watch[rank], &parts->comm);
}

static inline void over_tcp_leave(struct world *w, int rank)
{
    struct cp_replica *replica = w->own[rank];
    cp_replica_close(&replica);
}

static const struct world_transport over_tcp = {
    .name = "tcp",
    .open = over_tcp_open,
    .close = over_tcp_close,
    .join = over_tcp_join,
    .leave = over_tcp_leave,
};

#endif
