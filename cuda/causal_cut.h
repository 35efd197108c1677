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
};

enum { CP_MOST_PIECES = 3 };

/* The pieces, no two of which share a row and a key, that hold what the rows see; their
 * number. None is empty where the block is not. */
int cp_causal_cut(const struct cp_place *place, int64_t rows, int64_t keys,
                  struct cp_piece pieces[CP_MOST_PIECES]);

#endif
