/* The TCP sockets of a meeting of several hosts: addresses, options, and messages that
 * come and go whole. */
#ifndef CP_CONTROL_MEET_TCP_H
#define CP_CONTROL_MEET_TCP_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "control/meet_wire.h"

union cp_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

enum { CP_ADDRESS_TEXT = 80 };

/* Both are numbers: "10.0.0.1", "fd00::1"; "29501". CP_ERR_VALUE. */
CP_NODISCARD enum cp_code cp_address_parse(const char *host, const char *port,
                                           union cp_address *out);
/* "10.0.0.1 port 29501", in `text`. */
const char *cp_address_print(const union cp_address *address,
                             char text[CP_ADDRESS_TEXT]);
socklen_t cp_address_bytes(const union cp_address *address);
/* In network order. */
in_port_t *cp_address_port(union cp_address *address);
bool cp_address_is_loopback(const union cp_address *address);

/* Small messages go at once; what a peer's kernel does not take is seen here; and a
 * connection that is idle for long is kept, or found to be gone. Non-blocking from here
 * on. False and errno. */
bool cp_tcp_prepare(int fd);

/* Reads a whole message (CP_WIRE_HELLO) or nothing. */
enum cp_wire_reading cp_tcp_read(int fd, void *message, int bytes);
/* For a new socket, whose buffer has room for all that a meeting says: false only where
 * the peer has gone. */
bool cp_tcp_send(int fd, const void *message, size_t bytes);

#endif
