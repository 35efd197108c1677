/* The steps of all ranks done with numbers: do the outputs come to what the call asks for?
 *
 * The verifier's question answered in another way, to compare the two. A row of a tensor is a number, an
 * attended pair a hash of the numbers of its rows, a sum of pairs their sum modulo 2^64, so that a pair too
 * many, too few or of other rows shows in the output. Numbers lie in memory as the bytes of the elements
 * would, windows and workspaces overlap as they do, and what is expected is computed from the call and the
 * ranks' sizes alone. Lanes take turns in an order drawn from `seed`. */
#ifndef CP_TESTS_FUZZ_NUMBERS_H
#define CP_TESTS_FUZZ_NUMBERS_H

#include "schedule/schedule.h"

enum { NUMBERS_TEXT = 120 };

/* For one call that the verifier took. Otherwise false, and `text` says where. True, too, where windows or
 * workspaces are too large to try. */
bool numbers_are_right(const struct cp_schedule *const *of_call, int world,
                       uint64_t seed, char text[NUMBERS_TEXT]);

#endif
