/* The names of the operations. */
#include "base/record.h"

const char *cp_op_name(enum cp_op op)
{
    switch (op) {
    case CP_OP_ATTENTION:
        return "attention";
    case CP_OP_ATTENTION_BACKWARD:
        return "attention backward";
    case CP_OP_SHARD:
        return "shard";
    case CP_OP_GATHER:
        return "gather";
    case CP_OP_REDUCE_SCATTER:
        return "reduce_scatter";
    case CP_OP_AGREE:
        return "agree";
    case CP_OP_NONE:
        break;
    }
    return "no call";
}
