/* Do all ranks ask for the same thing, and can it be done? A pure question to all
 * records: every rank asks it of the same records and gets the same answer in the same
 * words. */
#ifndef CP_PLAN_AGREE_H
#define CP_PLAN_AGREE_H

#include <stddef.h>

#include "base/record.h"

/* CP_OK, or everybody's error, the first of:
 *  1. a rank that found an error in its own arguments: that error, of the lowest such
 *     rank, with its code;
 *  2. a rank whose call differs from rank 0's: the lowest such rank, and both calls
 *     (CP_ERR_TYPE for a dtype);
 *  3. what no rank can do with these sizes: uneven rows or heads without an anything
 *     flag, seq_lens that differ from the lengths, or that a captured call has not, a mask
 *     axis that fits nothing. */
CP_NODISCARD enum cp_code cp_agree(const struct cp_record *records, int world);

/* "attention(q 1x5x4x8, k 1x5x4x8, float32, ...)" for messages; always terminated. */
void cp_call_print(const struct cp_record *record, char *text, size_t bytes);

/* The check number of lengths that the caller promised (seq_lens, kv_lens); 0 without a
 * promise. */
uint64_t cp_lengths_hash(const int64_t *q_rows, const int64_t *kv_rows, int world);

#endif
