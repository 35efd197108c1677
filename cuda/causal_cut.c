/* Row i sees keys 0 to i + lead. Above come rows that see none, then a stair of rows that
 * see one key more each, in front of which lie the keys that all of them see, then rows
 * that see all keys:
 *
 *     . . . . .      lead -1, 7 rows, 5 keys        x x . . .   lead 1, 3 rows, 5 keys
 *     x . . . .  \                                  x x x . .   the first key is seen by
 *     x x . . .   |                                 x x x x .   all, the stair begins
 *     x x x . .   |  the stair                                  behind it
 *     x x x x .   |
 *     x x x x x  /
 *     x x x x x      all
 */
#include "causal_cut.h"

int cp_causal_cut(const struct cp_place *place, int64_t rows, int64_t keys,
                  bool has_blind, struct cp_piece pieces[CP_MOST_PIECES])
{
    int64_t lead = place->q_first - place->k_first;
    int count = 0;
    if (!place->is_causal || lead >= keys - 1) {
        pieces[0] = (struct cp_piece){
            .rows = rows, .keys = keys, .is_first = true, .is_last = true};
        return 1;
    }
    int64_t first = lead < 0 ? -lead : 0; /* row of the stair */
    int64_t end = keys - lead < rows ? keys - lead : rows;
    int64_t before = first + lead; /* keys in front of the stair */
    if (has_blind && first > 0) {
        pieces[count++] = (struct cp_piece){
            .rows = first < rows ? first : rows, .is_first = true, .is_last = true};
    }
    if (first >= rows) {
        return count;
    }
    if (before > 0) {
        pieces[count++] = (struct cp_piece){
            .row = first, .rows = end - first, .keys = before, .is_first = true};
    }
    pieces[count++] = (struct cp_piece){.row = first,
                                        .rows = end - first,
                                        .key = before,
                                        .keys = end - first,
                                        .is_diagonal = true,
                                        .is_first = before == 0,
                                        .is_last = true};
    if (end < rows) {
        pieces[count++] = (struct cp_piece){.row = end,
                                            .rows = rows - end,
                                            .keys = keys,
                                            .is_first = true,
                                            .is_last = true};
    }
    return count;
}

bool cp_piece_wants_blind(const struct cp_attend_args *args)
{
    return args->is_first || args->out.data != NULL;
}

void cp_piece_ends(struct cp_attend_args *part, const struct cp_piece *piece)
{
    part->is_first = part->is_first && piece->is_first;
    if (!piece->is_last) {
        part->out.data = NULL;
        part->lse.data = NULL;
    }
}
