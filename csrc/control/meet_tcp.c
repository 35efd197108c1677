/* Sockets of one meeting, as the system gives them. */
#include "control/meet_tcp.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>

#include "base/text.h"

socklen_t cp_address_bytes(const union cp_address *address)
{
    return address->any.sa_family == AF_INET6 ? sizeof address->v6 : sizeof address->v4;
}

in_port_t *cp_address_port(union cp_address *address)
{
    return address->any.sa_family == AF_INET6 ? &address->v6.sin6_port
                                              : &address->v4.sin_port;
}

const char *cp_address_print(const union cp_address *address,
                             char text[CP_ADDRESS_TEXT])
{
    char host[64] = "?", port[8] = "?";
    (void)getnameinfo(&address->any, cp_address_bytes(address), host, sizeof host, port,
                      sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
    text[0] = '\0';
    cp_text_append(text, CP_ADDRESS_TEXT, "%s port %s", host, port);
    return text;
}

bool cp_address_is_loopback(const union cp_address *address)
{
    return address->any.sa_family == AF_INET6
               ? IN6_IS_ADDR_LOOPBACK(&address->v6.sin6_addr)
               : ntohl(address->v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

enum cp_code cp_address_parse(const char *host, const char *port, union cp_address *out)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    int error = getaddrinfo(host, port, &hints, &found);
    if (error != 0 || found->ai_addrlen > sizeof *out) {
        return cp_fail(CP_ERR_VALUE, "%.100s port %.20s is no address of a host: %s",
                       host, port, gai_strerror(error));
    }
    memcpy(out, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    return CP_OK;
}

bool cp_tcp_prepare(int fd)
{
    static const struct {
        int level, name, value;
    } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},    {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, 30},  /* seconds until the first question, */
        {IPPROTO_TCP, TCP_KEEPINTVL, 10}, /* to the next, */
        {IPPROTO_TCP, TCP_KEEPCNT, 6},    /* and how many stay without an answer */
    };
    int flags = fcntl(fd, F_GETFL);
    bool is_good = flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        is_good = is_good && setsockopt(fd, options[i].level, options[i].name,
                                        &options[i].value, sizeof(int)) == 0;
    }
    return is_good;
}

/* Until it is whole it stays in the socket, which tells poll that there is nothing to
 * read. */
enum cp_wire_reading cp_tcp_read(int fd, void *message, int bytes)
{
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
    ssize_t got = recv(fd, message, (size_t)bytes, MSG_PEEK | MSG_DONTWAIT);
    if (got == bytes) {
        const int one = 1;
        (void)setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof one);
        return recv(fd, message, (size_t)bytes, MSG_DONTWAIT) == bytes
                   ? CP_WIRE_HELLO
                   : CP_WIRE_GARBAGE;
    }
    bool is_early = got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
    return is_early && !cp_wire_is_hung_up(fd) ? CP_WIRE_NOTHING_YET : CP_WIRE_GARBAGE;
}

bool cp_tcp_send(int fd, const void *message, size_t bytes)
{
    return send(fd, message, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes;
}
