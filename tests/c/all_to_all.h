/* Integers between all ranks of a communicator, which must arrive exactly. */
#ifndef CP_TESTS_ALL_TO_ALL_H
#define CP_TESTS_ALL_TO_ALL_H

#include "comm/comm.h"
#include "ranks.h"
#include "test.h"

static inline uint32_t all_to_all_word(int from, int to, int round, size_t index)
{
    return (uint32_t)from << 28 | (uint32_t)to << 24 | (uint32_t)(round & 0xff) << 16 |
           (uint32_t)index;
}

static inline size_t all_to_all_bytes(int from, int to, int round)
{
    return (size_t)((from * 50 + to * 30 + round * 7) % 160); /* 0 and odd ones too */
}

/* All to all, itself included, uneven; three rounds in flight. */
static inline void all_to_all(struct cp_comm *comm, int rounds)
{
    int rank = comm->rank, world = comm->world;
    static _Thread_local uint32_t out[3][RANKS_MOST][40], in[3][RANKS_MOST][40];
    uint64_t ticket[3] = {0};
    for (int round = 0; round < rounds + 3; round++) {
        int slot = round % 3;
        if (round >= 3) {
            struct cp_comm_wait wait = {.is_ticket = true, .value = ticket[slot]};
            if (!CHECK_EQ_I64(
                    comm->ops->wait(comm, &wait, 1, "all to all", cp_deadline_in(20.0)),
                    CP_OK)) {
                return;
            }
            for (int peer = 0; peer < world; peer++) {
                uint32_t want[40];
                for (size_t i = 0; i < 40; i++) {
                    want[i] = all_to_all_word(peer, rank, round - 3, i);
                }
                CHECK_EQ_BYTES(in[slot][peer], want,
                               all_to_all_bytes(peer, rank, round - 3));
            }
        }
        struct cp_xfer xfers[2 * RANKS_MOST];
        for (int peer = 0; peer < world; peer++) {
            for (size_t i = 0; i < 40; i++) {
                out[slot][peer][i] = all_to_all_word(rank, peer, round, i);
            }
            xfers[2 * peer] =
                (struct cp_xfer){.data = out[slot][peer],
                                 .bytes = all_to_all_bytes(rank, peer, round),
                                 .peer = peer,
                                 .is_send = true};
            xfers[2 * peer + 1] =
                (struct cp_xfer){.data = in[slot][peer],
                                 .bytes = all_to_all_bytes(peer, rank, round),
                                 .peer = peer};
        }
        if (round < rounds &&
            !CHECK_EQ_I64(comm->ops->post(comm, xfers, 2 * world, NULL, &ticket[slot]),
                          CP_OK)) {
            return;
        }
    }
}

#endif
