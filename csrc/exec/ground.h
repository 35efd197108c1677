/* What a joined context stands on: how its ranks met, and what they share since. One
 * table for the ranks of one host, one for those of several. */
#ifndef CP_EXEC_GROUND_H
#define CP_EXEC_GROUND_H

#include "comm/comm.h"
#include "control/gate.h"
#include "control/meet.h"

struct cp_root;
struct cp_ground;

struct cp_ground_ops {
    /* Meets the other ranks; once. `window_fd` of the arguments is filled in here. */
    enum cp_code (*meet)(struct cp_ground *ground, struct cp_meet_args *args);
    /* What that rank told at the meeting. */
    const struct cp_hello *(*hello)(const struct cp_ground *ground, int rank);
    /* The page and the boards, and in `watch` who says which ranks are dead. After the
     * meeting; once. */
    enum cp_code (*share)(struct cp_ground *ground, struct cp_watch *watch,
                          struct cp_page **page, struct cp_boards *boards);
    /* A communicator of the host's memory. `watch` must outlive it, as the ground must. */
    enum cp_code (*comm)(struct cp_ground *ground, struct cp_watch *watch,
                         struct cp_comm **out);
    /* Accepts NULL, leaves NULL; waits for nobody. */
    void (*close)(struct cp_ground **ground);
};

/* The head of both. */
struct cp_ground {
    const struct cp_ground_ops *ops;
    int rank, world;
};

/* Ranks that are all on this host: a window each, a shared page. */
CP_NODISCARD enum cp_code cp_ground_host_create(int rank, int world,
                                                struct cp_ground **out);
/* Ranks on several hosts: connections, a page each. `root` is borrowed until they have
 * met. */
CP_NODISCARD enum cp_code cp_ground_hosts_create(int rank, int world,
                                                 const struct cp_root *root,
                                                 struct cp_ground **out);

#endif
