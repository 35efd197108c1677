/* A rank's board: bytes in the page that the ranks of one host share. A communicator of
 * devices writes there what its peers have to know of it, by rules of its own
 * (cuda/comm_ipc.h); nobody else reads them. All-zero at first. */
#ifndef CP_BASE_BOARD_H
#define CP_BASE_BOARD_H

#include "base/mapping.h"

enum { CP_BOARD_BYTES = 512 };

struct cp_board {
    _Alignas(64) unsigned char bytes[CP_BOARD_BYTES];
};

/* Those of all ranks; all NULL: they share no page. */
struct cp_boards {
    struct cp_board *of;   /* (world) */
    struct cp_mapping *in; /* what the boards are in, for who outlives the context */
};

#endif
