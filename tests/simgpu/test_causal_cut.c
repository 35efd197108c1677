/* Pieces of causal blocks: what a row sees is in one of them, once, and nothing else. */
#include "causal_cut.h"
#include "test.h"

enum { MOST = 12 };

static bool sees(const struct cp_piece *piece, int64_t row, int64_t key)
{
    int64_t i = row - piece->row, j = key - piece->key;
    return i >= 0 && i < piece->rows && j >= 0 && j < piece->keys &&
           (!piece->is_diagonal || j <= i);
}

static void check_cut(const struct cp_place *place, int64_t rows, int64_t keys)
{
    struct cp_piece pieces[CP_MOST_PIECES];
    int count = cp_causal_cut(place, rows, keys, false, pieces);
    TEST_CONTEXT("%d rows from %d, %d keys from %d%s", (int)rows, (int)place->q_first,
                 (int)keys, (int)place->k_first, place->is_causal ? ", causal" : "");
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t key = 0; key < keys; key++) {
            bool is_seen =
                !place->is_causal || place->k_first + key <= place->q_first + row;
            int times = 0;
            for (int i = 0; i < count; i++) {
                times += sees(&pieces[i], row, key);
            }
            CHECK_EQ_I64(times, is_seen);
        }
    }
    for (int i = 0; i < count; i++) {
        const struct cp_piece *p = &pieces[i];
        CHECK(p->rows > 0 && p->row >= 0 && p->row + p->rows <= rows);
        CHECK(p->keys > 0 && p->key >= 0 && p->key + p->keys <= keys);
        CHECK(!p->is_diagonal || p->rows == p->keys);
    }
}

static bool is_same(const struct cp_piece *a, const struct cp_piece *b)
{
    return a->row == b->row && a->rows == b->rows && a->key == b->key &&
           a->keys == b->keys && a->is_diagonal == b->is_diagonal &&
           a->is_first == b->is_first && a->is_last == b->is_last;
}

/* Each row is begun by its first piece and ended by its last one, and, if it is asked for, a row
 * that sees no key has one too. */
static void check_ends(const struct cp_place *place, int64_t rows, int64_t keys)
{
    struct cp_piece seen[CP_MOST_PIECES], all[CP_MOST_PIECES];
    int seen_count = cp_causal_cut(place, rows, keys, false, seen);
    int count = cp_causal_cut(place, rows, keys, true, all);
    CHECK(count <= CP_MOST_PIECES);
    for (int64_t row = 0; row < rows; row++) {
        bool is_begun = false, is_ended = false;
        for (int i = 0; i < count; i++) {
            if (row >= all[i].row && row < all[i].row + all[i].rows) {
                CHECK(all[i].is_first == !is_begun && !is_ended);
                is_begun = true;
                is_ended = all[i].is_last;
            }
        }
        CHECK(is_begun && is_ended);
    }
    int blind = count - seen_count;
    CHECK(blind == 0 || (blind == 1 && all[0].keys == 0 && all[0].rows > 0));
    for (int i = 0; i < seen_count; i++) {
        CHECK(is_same(&seen[i], &all[i + blind]));
    }
}

TEST(what_is_seen_is_in_one_piece)
{
    for (int64_t rows = 1; rows <= MOST; rows++) {
        for (int64_t keys = 1; keys <= MOST; keys++) {
            for (int64_t lead = -MOST - 1; lead <= MOST + 1; lead++) {
                struct cp_place place = {
                    .q_first = 20 + lead, .k_first = 20, .is_causal = true};
                check_cut(&place, rows, keys);
                check_ends(&place, rows, keys);
                place.is_causal = false;
                check_cut(&place, rows, keys);
                check_ends(&place, rows, keys);
            }
        }
    }
}

TEST(whole_blocks_stay_whole)
{
    struct cp_piece pieces[CP_MOST_PIECES];
    struct cp_place place = {.q_first = 7, .k_first = 7, .is_causal = true};
    CHECK_EQ_I64(cp_causal_cut(&place, 5, 5, false, pieces), 1);
    CHECK(pieces[0].is_diagonal && pieces[0].rows == 5);
    place.k_first = 3; /* the first row sees keys 3 to 7 */
    CHECK_EQ_I64(cp_causal_cut(&place, 5, 5, false, pieces), 1);
    CHECK(!pieces[0].is_diagonal && pieces[0].rows == 5 && pieces[0].keys == 5);
    place.k_first = 12; /* the last row is 11 */
    CHECK_EQ_I64(cp_causal_cut(&place, 5, 5, false, pieces), 0);
}
