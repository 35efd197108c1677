/* Records that tell whose they are and of which round. */
#ifndef CP_TESTS_RECORDS_H
#define CP_TESTS_RECORDS_H

#include "base/record.h"
#include "test.h"

/* Every number of a record follows from rank and round. One record in five carries an
 * error. */
static inline struct cp_record record_of(int rank, uint64_t round)
{
    struct cp_record record = {.call = {.batch = (int64_t)round * 100 + rank}};
    unsigned char *bytes = (unsigned char *)&record.call;
    for (size_t i = sizeof record.call.batch; i < sizeof record.call; i++) {
        bytes[i] = (unsigned char)(round * 31 + (uint64_t)rank * 7 + i);
    }
    for (int i = 0; i < CP_SIZE_COUNT; i++) {
        record.sizes[i] = (int64_t)round * 1000 + rank * 10 + i;
    }
    record.status.rank = rank;
    if ((round + (uint64_t)rank) % 5 == 0) {
        record.status.code = CP_ERR_VALUE;
        (void)snprintf(record.status.text, sizeof record.status.text,
                       "rank %d dislikes round %llu", rank, (unsigned long long)round);
    }
    return record;
}

static inline bool is_record_of(const struct cp_record *record, int rank,
                                uint64_t round)
{
    struct cp_record want = record_of(rank, round);
    return CHECK_EQ_U64(atomic_load(&record->seq), round) &&
           CHECK_EQ_BYTES(&record->call, &want.call, sizeof want.call) &&
           CHECK_EQ_BYTES(record->sizes, want.sizes, sizeof want.sizes) &&
           CHECK_EQ_I64(record->status.code, want.status.code) &&
           CHECK_EQ_I64(record->status.rank, rank) &&
           (want.status.code == CP_OK ||
            CHECK_EQ_STR(record->status.text, want.status.text));
}

#endif
