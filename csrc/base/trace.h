/* A file of spans in the Trace Event Format of Chrome, which chrome://tracing and
 * ui.perfetto.dev show: one line a span, all ranks of a host in one file.
 *
 * The ranks append whole lines, so the array that the format wants is begun by who
 * creates the file and never closed, as the format allows. A file that exists is added
 * to. Format: "Trace Event Format", Google, the JSON array format. */
#ifndef CP_BASE_TRACE_H
#define CP_BASE_TRACE_H

#include "base/flight.h"

/* CP_ERR_VALUE where the file cannot be opened or created. */
CP_NODISCARD enum cp_code cp_trace_open(const char *path, int rank,
                                        struct cp_trace **out);

/* A span that is over. Kept back for a moment; `code` other than CP_OK is an outcome
 * worth showing, and is written at once. */
void cp_trace_add(struct cp_trace *trace, const struct cp_span *span,
                  enum cp_code code);
void cp_trace_flush(struct cp_trace *trace);

/* Writes what is left and closes; in a forked child it only closes. Accepts NULL in it,
 * leaves NULL. */
void cp_trace_close(struct cp_trace **trace);

#endif
