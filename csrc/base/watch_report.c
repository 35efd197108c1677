/* What every rank is doing, in one sentence. */
#include "base/watch_report.h"

#include <string.h>

#include "base/text.h"

enum { MOST = 64 }; /* ranks that one sentence can hold */

/* What a rank was doing, and for how long. */
struct doing {
    char phrase[CP_FLIGHT_PHRASE];
    double seconds;
};

static struct doing doing_of(const struct cp_watch *watch, int rank, int64_t now_ns)
{
    struct doing doing = {.phrase = "gone"};
    if (rank == watch->rank || !watch->is_dead(watch->peers, rank)) {
        cp_flight_phrase(&watch->flights[rank], now_ns, doing.phrase, &doing.seconds);
    }
    return doing;
}

/* The ranks that do what `first` does, `first` included; they are told by then. */
static void name_all_like(const struct doing *doing, bool *is_told, int world,
                          int first, char *text, size_t size)
{
    int count = 0;
    text[0] = '\0';
    for (int rank = first; rank < world; rank++) {
        if (strcmp(doing[rank].phrase, doing[first].phrase) == 0) {
            is_told[rank] = true;
            cp_text_append(text, size, "%s%d", count > 0 ? ", " : "", rank);
            count++;
        }
    }
}

void cp_watch_report(const struct cp_watch *watch, char *text, size_t size)
{
    struct doing doing[MOST];
    bool is_told[MOST] = {false};
    int world = watch->world < MOST ? watch->world : MOST;
    int64_t now_ns = cp_now_ns();
    const char *before = ". Meanwhile ";
    text[0] = '\0';
    if (watch->flights == NULL) {
        return;
    }
    for (int rank = 0; rank < world; rank++) {
        doing[rank] = doing_of(watch, rank, now_ns);
    }
    for (int rank = 0; rank < world; rank++) {
        char names[256];
        if (is_told[rank]) {
            continue;
        }
        name_all_like(doing, is_told, world, rank, names, sizeof names);
        cp_text_append(text, size, "%srank%s %s: %s (%.1f s)", before,
                       strchr(names, ',') != NULL ? "s" : "", names, doing[rank].phrase,
                       doing[rank].seconds);
        before = "; ";
    }
}

void cp_watch_name_others(const struct cp_watch *watch, const bool *is_named,
                          char *text, size_t size)
{
    char list[240] = "";
    int count = 0;
    text[0] = '\0';
    for (int rank = 0; rank < watch->world; rank++) {
        if (rank != watch->rank && is_named[rank]) {
            cp_text_append(list, sizeof list, "%s%d", count > 0 ? ", " : "", rank);
            count++;
        }
    }
    if (count > 0) {
        cp_text_append(text, size, "%s %s", count > 1 ? "ranks" : "rank", list);
    }
}

enum cp_code cp_watch_fail_device_late(const struct cp_watch *watch, double seconds,
                                       const char *whom, uint64_t call,
                                       const char *where)
{
    char name[64], all[CP_STATUS_TEXT];
    cp_flight_name_call(call, name, sizeof name);
    cp_watch_report(watch, all, sizeof all);
    return cp_fail_rank(CP_ERR_TIMEOUT, watch->rank,
                        "rank %d waited more than %.1f s for %s in %s (%s)%s",
                        watch->rank, seconds, whom, name, where, all);
}

enum cp_code cp_watch_fail_device_gone(const struct cp_watch *watch, int dead,
                                       uint64_t call, const char *where)
{
    char name[64];
    cp_flight_name_call(call, name, sizeof name);
    return cp_fail_rank(CP_ERR_COMM, dead,
                        "rank %d is gone (its process ended or it closed its context) "
                        "while rank %d waited for it in %s (%s)",
                        dead, watch->rank, name, where);
}
