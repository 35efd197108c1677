/* The names of the operations. */
#include "base/record.h"
#include "test.h"

TEST(every_operation_has_a_name_of_its_own)
{
    for (int op = CP_OP_NONE; op <= CP_OP_AGREE; op++) {
        CHECK(strlen(cp_op_name((enum cp_op)op)) > 0);
        for (int other = CP_OP_NONE; other < op; other++) {
            CHECK(strcmp(cp_op_name((enum cp_op)op), cp_op_name((enum cp_op)other)) !=
                  0);
        }
    }
    CHECK_EQ_STR(cp_op_name(CP_OP_ATTENTION_BACKWARD), "attention backward");
}
