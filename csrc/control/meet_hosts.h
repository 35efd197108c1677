/* The meeting place of ranks on several hosts: TCP connections, two for each pair.
 *
 * Rank 0 listens at an address that all know. Who comes to it says at which port it
 * listens itself; rank 0 passes that on, so that every rank knows who has come, and
 * connects to all lower ranks as on one host (control/meet.h). A connection carries the
 * same hello each way. Its hash stands for the key, and so for the secret that is a part
 * of it: whoever does not know the key is dropped, and disturbs nobody. That keeps
 * strangers and other jobs out, not those who can read the network.
 *
 * A rank that ends while others still meet is not replaced by one started anew: the
 * deadline, or the first call, names it. */
#ifndef CP_CONTROL_MEET_HOSTS_H
#define CP_CONTROL_MEET_HOSTS_H

#include "control/meet.h"

/* What a pair of ranks has a connection for. */
enum cp_line {
    CP_LINE_CONTROL, /* control/replica.h */
    CP_LINE_DATA,    /* comm/comm_tcp.h */
    CP_LINES
};

/* Where rank 0 is. */
struct cp_root {
    const char *host; /* a number: "10.0.0.1", "fd00::1" */
    const char *port;
    int listener; /* on rank 0: a socket that listens there, borrowed; elsewhere -1 */
};

/* The outcome. Its connections are non-blocking, carry nothing yet, and are closed in a
 * forked child. */
struct cp_hosts;

/* As cp_meet; `window_fd` counts for nothing. CP_ERR_VALUE where `root` is no address.
 * CP_ERR_TIMEOUT names the ranks that did not appear, or that this one cannot reach. */
CP_NODISCARD enum cp_code cp_meet_hosts(const struct cp_meet_args *args,
                                        const struct cp_root *root,
                                        struct cp_hosts **out);
/* Accepts NULL in it, leaves NULL; waits for nobody. */
void cp_hosts_close(struct cp_hosts **hosts);

const struct cp_hello *cp_hosts_hello(const struct cp_hosts *hosts, int rank);
/* (world) One to each peer, -1 for the own rank; owned by `hosts`. */
const int *cp_hosts_line(const struct cp_hosts *hosts, enum cp_line line);

#endif
