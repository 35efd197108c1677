/* What a communicator of the stand-in is: between the calls (sim_nccl.c) and what its
 * streams do (sim_nccl_run.c). All locked. */
#ifndef SIM_COMM_H
#define SIM_COMM_H

#include "sim.h"
#include "sim_nccl.h"

enum { SIM_RANKS = 16, SIM_COMM = 0x636f6d6d, SIM_HUB_TEXT = 1600 };

struct transfer {
    unsigned char *data;
    size_t bytes;
    int peer;
    bool is_send, is_done;
    uint64_t number;        /* among those of the pair and direction */
    unsigned char *staging; /* of a receive: what the sender gave, or NULL */
};

/* What one rank does at once. */
struct group {
    struct sim_op op;
    struct ncclComm *comm;
    cudaGraph_t graph;  /* that it was posted into; NULL: none */
    uint64_t number;    /* of the communicator on this rank, from 1; 0: of a graph */
    struct group *next; /* that its device was given, whatever the communicator */
    bool has_begun, is_stuck, is_in_circle;
    int count;
    struct transfer transfers[];
};

/* What the ranks of one communicator share. */
struct hub {
    char id[CP_NCCL_ID_BYTES];
    int number; /* in the id; the communicator's name in reports */
    int world, come;
    struct ncclComm *comms[SIM_RANKS];
    int64_t ready_at_ns; /* when it is made, once all have come */
    ncclResult_t result; /* of making it; later the error of all ranks */
    char text[SIM_HUB_TEXT];
    struct sim_cond changed;
    struct hub *next;
};

enum comm_state { COMM_CREATING, COMM_READY, COMM_FINALIZING, COMM_FINALIZED };

struct ncclComm {
    uint32_t magic;
    enum comm_state state;
    struct hub *hub;
    int rank, device;
    bool is_blocking, is_aborted;
    ncclResult_t error; /* asynchronous */
    char text[400];
    pthread_t user; /* while uses > 0: the thread in a call or a group */
    int uses;
    uint64_t posted, ended; /* groups */
    int captured;           /* groups in graphs that are alive */
    uint64_t sent[SIM_RANKS], received[SIM_RANKS];
    struct group *running;  /* NULL: none */
    struct group *deferred; /* posted by ncclGroupEnd, not yet given to its stream */
    cudaStream_t deferred_stream;
    int deferred_polls;
    int splits;               /* begun */
    struct ncclComm *child;   /* that a split makes; NULL: none */
    struct ncclComm **handle; /* where it goes */
    struct ncclComm *next;
};

/* Locked: numbers the group and its transfers. */
void sim_group_number(struct group *group);

/* struct sim_op's entries for a group: it takes its place among those of its device when
 * it is given to its stream. */
void sim_group_run(struct sim_op *op, cudaStream_t stream);
void sim_group_launch(struct sim_op *op, cudaStream_t stream);
void sim_group_drop(struct sim_op *op);
void sim_group_describe(const struct sim_op *op, char *text, size_t bytes);

#endif
