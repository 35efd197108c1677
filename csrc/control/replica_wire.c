/* Frames in pieces, as a stream gives and takes them. */
#include "control/replica_wire.h"

#include <errno.h>
#include <sys/socket.h>

static const size_t shortest_record = offsetof(struct cp_record, status.text);

void cp_frame_seal(struct cp_frame *frame, enum cp_frame_kind kind)
{
    size_t bytes = 0;
    switch (kind) {
    case CP_FRAME_RECORD:
        bytes = frame->body.record.status.code == CP_OK ? shortest_record
                                                        : sizeof frame->body.record;
        break;
    case CP_FRAME_POISON:
        bytes = sizeof frame->body.poison;
        break;
    case CP_FRAME_FLIGHT:
        bytes = sizeof frame->body.flight;
        break;
    }
    frame->head =
        (struct cp_frame_head){.kind = (uint32_t)kind, .bytes = (uint32_t)bytes};
}

static bool is_head(const struct cp_frame_head *head)
{
    switch ((enum cp_frame_kind)head->kind) {
    case CP_FRAME_RECORD:
        return head->bytes == shortest_record ||
               head->bytes == sizeof(struct cp_record);
    case CP_FRAME_POISON:
        return head->bytes == sizeof(struct cp_status);
    case CP_FRAME_FLIGHT:
        return head->bytes == sizeof((struct cp_frame *)0)->body.flight;
    }
    return false;
}

/* What a call on a socket that moved nothing means. */
static enum cp_passage passage_of_error(void)
{
    return errno == EAGAIN || errno == EINTR ? CP_PASSING : CP_PASSED_AWAY;
}

enum cp_passage cp_frame_send(int fd, struct cp_frame_passing *passing)
{
    size_t bytes = cp_frame_bytes(&passing->frame);
    const char *data = (const char *)&passing->frame;
    while (passing->done < bytes) {
        ssize_t sent = send(fd, data + passing->done, bytes - passing->done,
                            MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            return passage_of_error();
        }
        passing->done += (size_t)sent;
    }
    passing->done = 0;
    return CP_PASSED;
}

enum cp_passage cp_frame_receive(int fd, struct cp_frame_passing *passing)
{
    const size_t head_bytes = sizeof passing->frame.head;
    char *data = (char *)&passing->frame;
    for (;;) {
        bool has_head = passing->done >= head_bytes;
        size_t bytes = has_head ? cp_frame_bytes(&passing->frame) : head_bytes;
        ssize_t got =
            recv(fd, data + passing->done, bytes - passing->done, MSG_DONTWAIT);
        if (got <= 0) {
            return got < 0 ? passage_of_error() : CP_PASSED_AWAY;
        }
        passing->done += (size_t)got;
        if (passing->done < bytes) {
            continue;
        }
        if (has_head) {
            passing->done = 0;
            return CP_PASSED;
        }
        if (!is_head(&passing->frame.head)) {
            return CP_PASSED_AWAY;
        }
    }
}
