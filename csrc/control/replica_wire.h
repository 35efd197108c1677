/* The frames that carry one rank's part of the page to another host: its records, its
 * poison, news of its flight recorder. A frame is a head, then as many bytes as the
 * head says. Who sends them has come to the meeting, and is trusted as who shares a page
 * is: sizes are checked, contents are not. */
#ifndef CP_CONTROL_REPLICA_WIRE_H
#define CP_CONTROL_REPLICA_WIRE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/flight.h"
#include "base/record.h"

enum cp_frame_kind {
    CP_FRAME_RECORD, /* the text of a status only where there is an error */
    CP_FRAME_POISON,
    CP_FRAME_FLIGHT,
};

struct cp_frame {
    struct cp_frame_head {
        uint32_t kind;  /* enum cp_frame_kind */
        uint32_t bytes; /* of the body */
    } head;
    union {
        struct cp_record record;
        struct cp_status poison;
        struct {
            int64_t now_ns; /* on the sender's clock */
            struct cp_flight_news news;
        } flight;
    } body;
};

/* Puts kind and size before a body that is there already. */
void cp_frame_seal(struct cp_frame *frame, enum cp_frame_kind kind);
static inline size_t cp_frame_bytes(const struct cp_frame *frame)
{
    return sizeof frame->head + frame->head.bytes;
}

/* On its way over one connection; all-zero: none is. */
struct cp_frame_passing {
    struct cp_frame frame;
    size_t done; /* bytes that have gone or come */
};

enum cp_passage {
    CP_PASSED,     /* all of it; the next one may follow */
    CP_PASSING,    /* the connection takes or has no more at the moment */
    CP_PASSED_AWAY /* the connection has ended, or carries no frames */
};

/* Neither blocks. */
enum cp_passage cp_frame_send(int fd, struct cp_frame_passing *passing);
enum cp_passage cp_frame_receive(int fd, struct cp_frame_passing *passing);

#endif
