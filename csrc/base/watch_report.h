/* What every rank is doing, for the messages of a wait. */
#ifndef CP_BASE_WATCH_REPORT_H
#define CP_BASE_WATCH_REPORT_H

#include <stddef.h>

#include "base/watch.h"

/* ". Meanwhile ranks 0, 2: waiting for rank 1 in attention, call 7 (600.0 s); rank 1:
 * outside, after attention, call 6 (612.3 s)": ranks that do the same are named once. Empty
 * where the watch has no flight recorders; what does not fit is cut. */
void cp_watch_report(const struct cp_watch *watch, char *text, size_t size);

#endif
