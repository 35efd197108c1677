/* Where the library's state lives: this module has none of its own. */
#ifndef CP_CUDA_CORE_H
#define CP_CUDA_CORE_H

#include "base/core.h"

/* Before anything else of this module is called. CP_ERR_INTERNAL, without a sentence, for
 * another version of the table. `core` is borrowed for the life of the process. */
enum cp_code cp_core_set(const struct cp_core *core);

#endif
