/* One CUDA device as a table: memory, strided copies, lanes as streams, order as
 * events. */
#ifndef CP_CUDA_DEVICE_CUDA_H
#define CP_CUDA_DEVICE_CUDA_H

#include "cuda_api.h"
#include "device/device.h"

/* The device with that number, with streams and events of its own. The current device
 * of the calling thread stays what it is, here and in all entries of the table. */
CP_NODISCARD enum cp_code cp_device_cuda_create(int ordinal, struct cp_device **out);
/* Accepts NULL, leaves NULL. Waits for nothing: what has been enqueued still runs. */
void cp_device_cuda_destroy(struct cp_device **device);

/* In the place of what follows from its links: for tests and trials. Copied. */
void cp_device_cuda_set_engine(struct cp_device *device,
                               const struct cp_copy_engine *engine);

/* That device becomes the thread's current one; `before`: which one was. */
CP_NODISCARD enum cp_code cp_cuda_enter(int ordinal, int *before);
/* And back. `code`: of what was done in between, which goes before a failure here. */
enum cp_code cp_cuda_leave(int ordinal, int before, enum cp_code code);

/* 80 for sm_80. */
CP_NODISCARD enum cp_code cp_cuda_generation(int ordinal, int *out);
/* CP_ERR_VALUE where this process does not see a device of that number. */
CP_NODISCARD enum cp_code cp_cuda_check_ordinal(int ordinal);

/* Memory of that device, as the entries of the table. */
CP_NODISCARD enum cp_code cp_cuda_alloc(int ordinal, size_t bytes, const char *what,
                                        void **out);
void cp_cuda_free(int ordinal, void *address_of_pointer);

#endif
