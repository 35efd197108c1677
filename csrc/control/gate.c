/* Exchanges the ranks' records through the shared page. docs/architecture.md numbers the lines of the protocol. */
#include "control/gate.h"

#include <string.h>

#include "base/point.h"

enum { LINE = 64 }; /* a cache line: what different ranks write never shares one */

struct place {
    _Alignas(LINE) struct cp_record record[2]; /* by parity of the sequence number */
};

struct cp_page {
    _Alignas(LINE) struct cp_bell bell;
    _Alignas(LINE) struct cp_poison poison;
    struct place rank[];
};

size_t cp_page_bytes(int world)
{
    return sizeof(struct cp_page) +
           (size_t)world * (sizeof(struct place) + sizeof(struct cp_flight) +
                            sizeof(struct cp_board));
}

struct cp_bell *cp_page_bell(struct cp_page *page)
{
    return &page->bell;
}

struct cp_poison *cp_page_poison(struct cp_page *page)
{
    return &page->poison;
}

struct cp_flight *cp_page_flights(struct cp_page *page, int world)
{
    return (struct cp_flight *)&page->rank[world];
}

struct cp_board *cp_page_boards(struct cp_page *page, int world)
{
    return (struct cp_board *)(cp_page_flights(page, world) + world);
}

static struct cp_record *record_at(struct cp_page *page, int rank, uint64_t seq)
{
    return &page->rank[rank].record[seq % 2];
}

bool cp_page_has(struct cp_page *page, int rank, uint64_t seq)
{
    /* acquire: pairs with the release in cp_page_write. */
    return atomic_load_explicit(&record_at(page, rank, seq)->seq,
                                memory_order_acquire) == seq;
}

static bool has_come(const struct cp_gate *gate, int rank)
{
    return cp_page_has(gate->page, rank, gate->seq);
}

static bool all_have_come(const void *arg)
{
    const struct cp_gate *gate = arg;
    for (int rank = 0; rank < gate->watch->world; rank++) {
        if (!has_come(gate, rank)) {
            return false;
        }
    }
    return true;
}

static bool is_missing(const void *arg, int rank)
{
    return !has_come(arg, rank);
}

/* All but the sequence number. A text is half a kilobyte that only an error needs. */
static void copy_record(struct cp_record *to, const struct cp_record *from)
{
    to->call = from->call;
    memcpy(to->sizes, from->sizes, sizeof to->sizes);
    to->status.code = from->status.code;
    to->status.rank = from->status.rank;
    if (from->status.code != CP_OK) {
        memcpy(to->status.text, from->status.text, sizeof to->status.text);
        to->status.text[CP_STATUS_TEXT - 1] = '\0';
    }
}

void cp_page_write(struct cp_page *page, int rank, uint64_t seq,
                   const struct cp_record *record)
{
    struct cp_record *place = record_at(page, rank, seq);
    CP_POINT("gate: before writing");
    copy_record(place, record);
    CP_POINT("gate: before seq");
    /* release: pairs with the acquire in cp_page_has. Says two things: the record is whole, and its rank has read
     * all records of the exchange before, whose places may be written again once all have said so. */
    atomic_store_explicit(&place->seq, seq, memory_order_release);
    CP_POINT("gate: before ringing");
    cp_bell_ring(&page->bell);
}

void cp_page_read(struct cp_page *page, int rank, uint64_t seq,
                  struct cp_record *record)
{
    copy_record(record, record_at(page, rank, seq));
    /* relaxed: `record` is the caller's own. */
    atomic_store_explicit(&record->seq, seq, memory_order_relaxed);
}

enum cp_code cp_gate_exchange(struct cp_gate *gate, const struct cp_record *mine,
                              struct cp_record *all, const char *operation,
                              struct cp_deadline deadline)
{
    struct cp_wait wait = {
        .is_ready = all_have_come,
        .needs = is_missing,
        .arg = gate,
        .operation = operation,
    };
    /* A broken context takes no new call, even where all records would come: a late rank learns here that the
     * others have given up on it. */
    CP_TRY(cp_watch_check(gate->watch));
    gate->seq++;
    cp_page_write(gate->page, gate->watch->rank, gate->seq, mine);
    CP_TRY(cp_watch_wait(gate->watch, &wait, deadline));
    CP_POINT("gate: before reading");
    for (int rank = 0; rank < gate->watch->world; rank++) {
        CP_POINT("gate: reading");
        cp_page_read(gate->page, rank, gate->seq, &all[rank]);
    }
    return CP_OK;
}
