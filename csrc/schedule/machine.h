/* Published speeds of devices whose ranks share a host, for the cost walk. Nothing here was
 * measured by this project: each number has its source in machine.c. */
#ifndef CP_SCHEDULE_MACHINE_H
#define CP_SCHEDULE_MACHINE_H

#include "schedule/cost.h"

struct cp_machine {
    const char *name;
    int generation;            /* of the device: 90 for sm_90 */
    struct cp_speeds windows;  /* between the devices */
    struct cp_speeds messages; /* sends and receives */
};

/* The machine that stands for devices of that generation; NULL: none is known. */
const struct cp_machine *cp_machine_of(int64_t generation);

static inline const struct cp_speeds *
cp_machine_speeds(const struct cp_machine *machine, enum cp_transport transport)
{
    return transport == CP_TWO_SIDED ? &machine->messages : &machine->windows;
}

#endif
