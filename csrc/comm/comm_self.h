/* One rank alone, as a communicator with windows: the smallest one there is. */
#ifndef CP_COMM_COMM_SELF_H
#define CP_COMM_COMM_SELF_H

#include "comm/comm.h"

CP_NODISCARD enum cp_code cp_comm_self_create(struct cp_comm **out);

#endif
