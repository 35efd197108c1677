/* What every rank is doing, for the messages of a wait. */
#ifndef CP_BASE_WATCH_REPORT_H
#define CP_BASE_WATCH_REPORT_H

#include <stddef.h>

#include "base/watch.h"

/* ". Meanwhile ranks 0, 2: waiting for rank 1 in attention, call 7 (600.0 s); rank 1:
 * outside, after attention, call 6 (612.3 s)": ranks that do the same are named once. Empty
 * where the watch has no flight recorders; what does not fit is cut. */
void cp_watch_report(const struct cp_watch *watch, char *text, size_t size);

/* "rank 2", "ranks 1, 3": all but the own one that `is_named` (world); empty for none.
 * What does not fit is cut. */
void cp_watch_name_others(const struct cp_watch *watch, const bool *is_named,
                          char *text, size_t size);

/* The errors of a thread that watches what a device waits for in `call` (cp_recorder_call):
 * CP_ERR_TIMEOUT, `whom` as above, and CP_ERR_COMM. `where`: "on its GPU". */
enum cp_code cp_watch_fail_device_late(const struct cp_watch *watch, double seconds,
                                       const char *whom, uint64_t call,
                                       const char *where);
enum cp_code cp_watch_fail_device_gone(const struct cp_watch *watch, int dead,
                                       uint64_t call, const char *where);

#endif
