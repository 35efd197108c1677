/* A causal block in pieces that know no positions: kernels that are causal along the
 * diagonal of equal lengths alone can take them. */
#ifndef CP_CUDA_CAUSAL_CUT_H
#define CP_CUDA_CAUSAL_CUT_H

#include "kernel/kernel.h"

/* Rows and keys of the block. */
struct cp_piece {
    int64_t row, rows, key, keys;
    bool
        is_diagonal; /* rows = keys, row i sees keys 0 to i; else all rows see all keys */
    /* No piece before it, none behind it has its rows; two pieces have the same or none. */
    bool is_first, is_last;
};

enum { CP_MOST_PIECES = 4 };

/* The pieces, no two of which share a row and a key, that hold what the rows see; their
 * number. None is empty where the block is not, but for one of the rows that see no key,
 * which comes if `has_blind`. */
int cp_causal_cut(const struct cp_place *place, int64_t rows, int64_t keys,
                  bool has_blind, struct cp_piece pieces[CP_MOST_PIECES]);

/* Whether rows that see no key get an answer too. */
bool cp_piece_wants_blind(const struct cp_attend_args *args);

/* Of a block's ends, in `part`, leaves those that this piece of it has too. */
void cp_piece_ends(struct cp_attend_args *part, const struct cp_piece *piece);

#endif
