/* Which writer makes the schedule of a plan. Apart from schedule.c, on which the writers
 * stand. */
#include "schedule/write.h"

/* Is the exchange in the group better written than read? The sums of a ring are read from who
 * made them, by the writer that has slots for that. */
static bool is_exchanged(const struct cp_plan *plan, enum cp_transport transport)
{
    bool is_forward = plan->signature.call.op == CP_OP_ATTENTION;
    return transport == CP_TWO_SIDED || (transport == CP_PUSH && plan->ulysses > 1 &&
                                         (is_forward || plan->ring == 1));
}

static enum cp_code write_attention(const struct cp_plan *plan, int rank,
                                    enum cp_transport transport,
                                    struct cp_schedule **out)
{
    bool is_forward = plan->signature.call.op == CP_OP_ATTENTION;
    if (plan->signature.call.kv_replicated != 0) {
        return is_forward ? cp_write_replicated_forward(plan, rank, out)
                          : cp_write_replicated_backward(plan, rank, out);
    }
    if (is_exchanged(plan, transport)) {
        return is_forward ? cp_write_exchange_forward(plan, rank, transport, out)
                          : cp_write_exchange_backward(plan, rank, transport, out);
    }
    return is_forward ? cp_write_pull_forward(plan, rank, transport, out)
                      : cp_write_pull_backward(plan, rank, transport, out);
}

static enum cp_code write_any(const struct cp_plan *plan, int rank,
                              enum cp_transport transport, struct cp_schedule **out)
{
    switch ((enum cp_op)plan->signature.call.op) {
    case CP_OP_ATTENTION:
    case CP_OP_ATTENTION_BACKWARD:
        return write_attention(plan, rank, transport, out);
    case CP_OP_GATHER:
        return transport == CP_TWO_SIDED ? cp_write_gather_two_sided(plan, rank, out)
                                         : cp_write_gather_pull(plan, rank, out);
    case CP_OP_REDUCE_SCATTER:
        return transport == CP_TWO_SIDED
                   ? cp_write_reduce_scatter_two_sided(plan, rank, out)
                   : cp_write_reduce_scatter_pull(plan, rank, out);
    case CP_OP_SHARD:
    case CP_OP_AGREE:
    case CP_OP_NONE:
        break;
    }
    return cp_fail(CP_ERR_INTERNAL, "operation %d has no schedule",
                   (int)plan->signature.call.op);
}

enum cp_code cp_schedule_create(const struct cp_plan *plan, int rank,
                                enum cp_transport transport, struct cp_schedule **out)
{
    CP_TRY(write_any(plan, rank, transport, out));
    (*out)->transport = transport;
    return CP_OK;
}
