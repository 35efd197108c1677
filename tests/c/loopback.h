/* TCP connections of this host between ranks that are threads: one for each pair. */
#ifndef CP_TESTS_LOOPBACK_H
#define CP_TESTS_LOOPBACK_H

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "ranks.h"

/* fd[rank][peer]: the rank's end; -1 on the diagonal and once closed. */
struct loopback {
    int world;
    int fd[RANKS_MOST][RANKS_MOST];
};

static inline bool loopback_pair(int *one, int *other)
{
    const int yes = 1;
    struct sockaddr_in name = {.sin_family = AF_INET,
                               .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof name;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    *one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool is_good = bind(listener, (struct sockaddr *)&name, size) == 0 &&
                   listen(listener, 1) == 0 &&
                   getsockname(listener, (struct sockaddr *)&name, &size) == 0 &&
                   connect(*one, (struct sockaddr *)&name, size) == 0;
    *other = accept(listener, NULL, NULL);
    (void)close(listener);
    for (int i = 0; i < 2 && is_good; i++) {
        int fd = i == 0 ? *one : *other;
        is_good = fd >= 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0 &&
                  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) == 0;
    }
    return CHECK(is_good);
}

static inline bool loopback_open(struct loopback *loopback, int world)
{
    loopback->world = world;
    for (int rank = 0; rank < world; rank++) {
        loopback->fd[rank][rank] = -1;
        for (int peer = 0; peer < rank; peer++) {
            if (!loopback_pair(&loopback->fd[rank][peer], &loopback->fd[peer][rank])) {
                return false;
            }
        }
    }
    return true;
}

/* Closes all that a rank has, as its death does. */
static inline void loopback_leave(struct loopback *loopback, int rank)
{
    for (int peer = 0; peer < loopback->world; peer++) {
        if (loopback->fd[rank][peer] >= 0) {
            (void)close(loopback->fd[rank][peer]);
            loopback->fd[rank][peer] = -1;
        }
    }
}

static inline void loopback_close(struct loopback *loopback)
{
    for (int rank = 0; rank < loopback->world; rank++) {
        loopback_leave(loopback, rank);
    }
}

#endif
