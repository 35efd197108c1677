/* The meeting's wire: the sockets' names, and the hello that goes over a connection once
 * each way, with descriptors beside its bytes (SCM_RIGHTS). */
#ifndef CP_CONTROL_MEET_WIRE_H
#define CP_CONTROL_MEET_WIRE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "control/meet.h"

enum { CP_WIRE_FDS = 2 }; /* with a hello: the window, and from rank 0 the page */

struct cp_wire_hash {
    uint64_t word[2];
};

/* What a connection carries. */
struct cp_wire_message {
    struct cp_wire_hash hash; /* of the meeting */
    int32_t from, to;         /* ranks */
    struct cp_hello hello;
};

/* Who speaks. */
struct cp_wire {
    struct cp_wire_hash hash;
    int rank, world;
    int window_fd;
    int page_fd; /* rank 0's */
};

struct cp_wire_message cp_wire_message_to(const struct cp_wire *self, int to,
                                          const struct cp_hello *hello);
/* Has it come from another rank of this meeting, to this rank? */
bool cp_wire_is_hello(const struct cp_wire *self,
                      const struct cp_wire_message *message);

/* Names a meeting. A name and no secret: who may come in is decided by user id. */
struct cp_wire_hash cp_wire_hash_of(const char *key, int world);

/* The abstract address under which a rank listens; its length counts. */
socklen_t cp_wire_name(const struct cp_wire_hash *hash, int rank,
                       struct sockaddr_un *out);

/* A seqpacket socket: a hello comes whole or not at all. -1 and errno. */
int cp_wire_open(void);
/* Where there is one; -1 afterwards. */
void cp_wire_close(int *fd);
bool cp_wire_is_same_user(int fd);
bool cp_wire_is_hung_up(int fd);

/* The socket is new and its buffer empty: this does not block, and fails only where the
 * peer has gone. */
bool cp_wire_send(const struct cp_wire *self, int fd, int to,
                  const struct cp_hello *hello);

enum cp_wire_reading {
    CP_WIRE_HELLO,
    CP_WIRE_NOTHING_YET,
    CP_WIRE_TOO_FEW_FDS,
    CP_WIRE_GARBAGE
};

/* Does not block. On CP_WIRE_HELLO, `fds` are the caller's: the window, and from rank 0
 * the page. */
enum cp_wire_reading cp_wire_read(const struct cp_wire *self, int fd,
                                  struct cp_wire_message *message,
                                  int fds[CP_WIRE_FDS]);

#endif
