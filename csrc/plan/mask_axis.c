/* Reading a mask's axes: own, whole, one, in this order. */
#include "plan/mask_axis.h"

#include "base/checked.h"

/* One axis: where its lengths stand in a record, and what to call it. */
struct axis {
    const char *name;
    enum cp_size given, own;
    int64_t whole;
};

enum { FITS_OWN = 1, FITS_WHOLE = 2, FITS_ONE = 4 };

static int fits(const struct axis *axis, const struct cp_record *record)
{
    int64_t given = record->sizes[axis->given];
    return (given == record->sizes[axis->own] ? FITS_OWN : 0) |
           (given == axis->whole ? FITS_WHOLE : 0) | (given == 1 ? FITS_ONE : 0);
}

static enum cp_code fail_axis(const struct axis *axis, const struct cp_record *records,
                              int rank)
{
    return cp_fail_rank(CP_ERR_VALUE, rank,
                        "attn_mask: its %s axis has length %lld on rank %d; all ranks "
                        "must give their own %s "
                        "(%lld there), or all of them (%lld), or 1",
                        axis->name, (long long)records[rank].sizes[axis->given], rank,
                        axis->name, (long long)records[rank].sizes[axis->own],
                        (long long)axis->whole);
}

/* All readings that fit every rank. */
static enum cp_code read_axis(const struct axis *axis, const struct cp_record *records,
                              int world, int *readings)
{
    int common = FITS_OWN | FITS_WHOLE | FITS_ONE;
    for (int rank = 0; rank < world; rank++) {
        int here = fits(axis, &records[rank]);
        if ((common & here) == 0) {
            return fail_axis(axis, records, rank);
        }
        common &= here;
    }
    *readings = common;
    return CP_OK;
}

static enum cp_axis_kind first_of(int readings)
{
    return (readings & FITS_OWN) != 0     ? CP_AXIS_OWN
           : (readings & FITS_WHOLE) != 0 ? CP_AXIS_WHOLE
                                          : CP_AXIS_ONE;
}

static enum cp_code sum_of(const struct cp_record *records, int world,
                           enum cp_size which, const char *name, int64_t *out)
{
    int64_t sum = 0;
    for (int rank = 0; rank < world; rank++) {
        if (!cp_add_i64(sum, records[rank].sizes[which], &sum)) {
            return cp_fail_rank(CP_ERR_VALUE, rank,
                                "attn_mask: the %s of the ranks up to rank %d are more "
                                "than can be counted",
                                name, rank);
        }
    }
    *out = sum;
    return CP_OK;
}

enum cp_code cp_mask_read(const struct cp_record *records, int world,
                          enum cp_axis_kind *rows, enum cp_axis_kind *keys)
{
    bool is_replicated = records[0].call.kv_replicated != 0;
    struct axis row_axis = {"rows", CP_SIZE_MASK_ROWS, CP_SIZE_Q_ROWS, 0};
    struct axis key_axis = {"keys", CP_SIZE_MASK_KEYS, CP_SIZE_KV_ROWS,
                            records[0].sizes[CP_SIZE_KV_ROWS]};
    CP_TRY(sum_of(records, world, CP_SIZE_Q_ROWS, row_axis.name, &row_axis.whole));
    if (!is_replicated) {
        CP_TRY(sum_of(records, world, CP_SIZE_KV_ROWS, key_axis.name, &key_axis.whole));
    }
    int row_readings = 0;
    int key_readings = 0;
    CP_TRY(read_axis(&row_axis, records, world, &row_readings));
    CP_TRY(read_axis(&key_axis, records, world, &key_readings));
    enum cp_axis_kind row_kind = first_of(row_readings);
    enum cp_axis_kind key_kind = first_of(key_readings);
    /* Replicated keys are all keys; where there are no keys at all, readings coincide.
     */
    if ((is_replicated || key_axis.whole == 0) && key_kind == CP_AXIS_OWN) {
        key_kind = CP_AXIS_WHOLE;
    }
    /* A mask of own keys cannot be of own rows too: another reading of its rows is the
     * one meant. */
    if (row_kind == CP_AXIS_OWN && key_kind == CP_AXIS_OWN &&
        (row_readings & ~FITS_OWN) != 0) {
        row_kind = first_of(row_readings & ~FITS_OWN);
    }
    if (row_kind == CP_AXIS_OWN && key_kind == CP_AXIS_OWN && world > 1) {
        return cp_fail(
            CP_ERR_VALUE,
            "attn_mask: it has the rank's own rows and the rank's own keys, so nothing "
            "says how "
            "its rows meet the keys of other ranks; give all keys, or all rows");
    }
    *rows = row_kind;
    *keys = key_kind;
    return CP_OK;
}
