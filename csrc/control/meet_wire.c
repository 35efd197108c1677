/* Writes and reads hellos, and names the sockets they go through. */
#include "control/meet_wire.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"

/* Changes with the wire form. Goes into the name, so that different versions do not even meet. */
static const char protocol[] = "cp_attn meeting 1";

/* Twice with different starts, each mixed once more (splitmix64's finaliser). */
static void hash_bytes(struct cp_wire_hash *hash, const void *data, size_t bytes)
{
    for (int w = 0; w < 2; w++) {
        hash->word[w] = cp_hash(hash->word[w], data, bytes);
    }
}

struct cp_wire_hash cp_wire_hash_of(const char *key, int world)
{
    struct cp_wire_hash hash = {{CP_HASH_START, 0x84222325cbf29ce4u}};
    int64_t numbers[] = {(int64_t)geteuid(), world,
                         (int64_t)sizeof(struct cp_wire_message)};
    hash_bytes(&hash, protocol, sizeof protocol);
    hash_bytes(&hash, numbers, sizeof numbers);
    hash_bytes(&hash, key, strlen(key));
    for (int w = 0; w < 2; w++) {
        uint64_t z = hash.word[w];
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        hash.word[w] = z ^ (z >> 31);
    }
    return hash;
}

/* A zero byte, then the text. */
socklen_t cp_wire_name(const struct cp_wire_hash *hash, int rank,
                       struct sockaddr_un *out)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    int length = snprintf(
        out->sun_path + 1, sizeof out->sun_path - 1, "cp_attn-%016llx%016llx-%d",
        (unsigned long long)hash->word[0], (unsigned long long)hash->word[1], rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

bool cp_wire_is_same_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
           peer.uid == geteuid();
}

int cp_wire_open(void)
{
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

void cp_wire_close(int *fd)
{
    if (*fd >= 0) {
        (void)close(*fd);
        *fd = -1;
    }
}

struct cp_wire_message cp_wire_message_to(const struct cp_wire *self, int to,
                                          const struct cp_hello *hello)
{
    return (struct cp_wire_message){
        .hash = self->hash, .from = self->rank, .to = to, .hello = *hello};
}

bool cp_wire_send(const struct cp_wire *self, int fd, int to,
                  const struct cp_hello *hello)
{
    struct cp_wire_message message = cp_wire_message_to(self, to, hello);
    struct iovec part = {.iov_base = &message, .iov_len = sizeof message};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(CP_WIRE_FDS * sizeof(int))];
    } control = {.bytes = {0}};
    int fds[CP_WIRE_FDS] = {self->window_fd, self->page_fd};
    size_t fds_bytes = (self->rank == 0 ? 2 : 1) * sizeof(int);
    struct msghdr header = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = CMSG_SPACE(fds_bytes),
    };
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds_bytes);
    memcpy(CMSG_DATA(rights), fds, fds_bytes);
    return sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof message;
}

/* Takes the descriptors out of a received header; those that are too many are closed. */
static int take_fds(struct msghdr *header, int fds[CP_WIRE_FDS])
{
    int count = 0;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(header); part != NULL;
         part = CMSG_NXTHDR(header, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t here = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < here; i++) {
            int fd = -1;
            memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
            if (count < CP_WIRE_FDS) {
                fds[count++] = fd;
            } else {
                (void)close(fd);
            }
        }
    }
    return count;
}

bool cp_wire_is_hello(const struct cp_wire *self, const struct cp_wire_message *message)
{
    return message->to == self->rank &&
           memcmp(&message->hash, &self->hash, sizeof message->hash) == 0 &&
           message->from >= 0 && message->from < self->world &&
           message->from != self->rank;
}

enum cp_wire_reading cp_wire_read(const struct cp_wire *self, int fd,
                                  struct cp_wire_message *message, int fds[CP_WIRE_FDS])
{
    struct iovec part = {.iov_base = message, .iov_len = sizeof *message};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(CP_WIRE_FDS * sizeof(int))];
    } control;
    struct msghdr header = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof control.bytes,
    };
    ssize_t got = recvmsg(fd, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0) {
        return errno == EAGAIN || errno == EINTR ? CP_WIRE_NOTHING_YET
                                                 : CP_WIRE_GARBAGE;
    }
    int count = take_fds(&header, fds);
    enum cp_wire_reading reading = CP_WIRE_GARBAGE;
    if (got == (ssize_t)sizeof *message && (header.msg_flags & MSG_TRUNC) == 0 &&
        cp_wire_is_hello(self, message)) {
        bool is_whole = count == (message->from == 0 ? 2 : 1) &&
                        (header.msg_flags & MSG_CTRUNC) == 0;
        reading = is_whole ? CP_WIRE_HELLO : CP_WIRE_TOO_FEW_FDS;
    }
    if (reading != CP_WIRE_HELLO) {
        for (int i = 0; i < count; i++) {
            cp_wire_close(&fds[i]);
        }
    }
    return reading;
}

bool cp_wire_is_hung_up(int fd)
{
    struct pollfd poller = {.fd = fd, .events = POLLRDHUP};
    return fd < 0 ||
           (poll(&poller, 1, 0) > 0 &&
            (poller.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0);
}
