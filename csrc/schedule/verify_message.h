/* Messages between ranks: the k-th send from one rank to another meets the k-th receive there,
 * since messages between two ranks move in the order in which they were posted.
 *
 * A send may end as soon as it is posted (the communicator may have taken a copy), so its end
 * tells the sender nothing about the receiver; but it may also last until the receive is
 * posted. A proof holds for both: it lets a send wait, and orders nothing by it. */
#ifndef CP_SCHEDULE_VERIFY_MESSAGE_H
#define CP_SCHEDULE_VERIFY_MESSAGE_H

#include "schedule/verify_content.h"

struct cp_message {
    struct cp_message *next_in_group, *next_in_queue;
    struct cp_message *mate; /* the other half, once both are posted */
    struct cp_verify_at at;
    struct cp_arg arg;    /* what is sent, where it is received */
    struct cp_arg parcel; /* of a send: its content on the way */
    struct cp_box parcel_box;
    const uint32_t *posted; /* clock of the posting */
    int process;            /* that posts, and its tick then */
    uint32_t tick;
};

/* One direction between two ranks. All-zero is the initial state. */
struct cp_channel {
    struct cp_message *waiting, *last_waiting; /* all sends, or all receives */
    struct cp_message *last[2];                /* posted last: a receive, a send */
};

static inline bool cp_message_is_send(const struct cp_message *message)
{
    return message->at.op == CP_STEP_SEND;
}

/* Posts one half. `start` is what the poster knew: the half before it must be known to it, or
 * the order in which they meet would depend on timing. */
CP_NODISCARD enum cp_code cp_channel_post(struct cp_channel *channel,
                                          struct cp_message *message,
                                          const uint32_t *start);

#endif
