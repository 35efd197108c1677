/* Prints what calls cost (costs.h), one JSON object a call, its numbers those of rank 0.
 * A line of the input is a call:
 *
 *     attention RING ULYSSES even bfloat16 BATCH HEADS DIM ROWS ROWS ...
 *
 * "backward" for its gradient, "anything" for the other variant, ROWS of each rank. */
#include "costs.h"

static bool read_word(char word[32])
{
    return scanf("%31s", word) == 1;
}

static bool read_number(int64_t *out)
{
    long long number = 0;
    bool is_there = scanf("%lld", &number) == 1;
    *out = number;
    return is_there;
}

static enum cp_dtype dtype_of(const char *name)
{
    for (int dtype = 0; dtype < CP_DTYPE_COUNT; dtype++) {
        if (strcmp(cp_dtype_name((enum cp_dtype)dtype), name) == 0) {
            return (enum cp_dtype)dtype;
        }
    }
    return CP_DTYPE_NONE;
}

/* Which of two words it is; false where it is neither. */
static bool read_choice(const char *zero, const char *one, int *out)
{
    char word[32];
    bool is_there = read_word(word);
    *out = is_there && strcmp(word, one) == 0;
    return is_there && (*out == 1 || strcmp(word, zero) == 0);
}

/* False at the end of the input. */
static bool read_case(struct costs_case *out)
{
    char dtype[32];
    int64_t ring = 0, ulysses = 0;
    int is_backward = 0, is_anything = 0;
    bool is_right = read_choice("attention", "backward", &is_backward);
    if (feof(stdin)) {
        return false;
    }
    is_right = is_right && read_number(&ring) && read_number(&ulysses) &&
               read_choice("even", "anything", &is_anything) && read_word(dtype) &&
               read_number(&out->batch) && read_number(&out->heads) &&
               read_number(&out->dim) && ring >= 1 && ulysses >= 1 &&
               ring * ulysses <= SIMGPU_DEVICES;
    for (int rank = 0; rank < ring * ulysses && is_right; rank++) {
        is_right = read_number(&out->rows[rank]);
    }
    out->op = is_backward ? CP_OP_ATTENTION_BACKWARD : CP_OP_ATTENTION;
    out->variant = is_anything ? CP_ANYTHING : CP_EVEN;
    out->dtype = is_right ? dtype_of(dtype) : CP_DTYPE_NONE;
    out->ring = (int)ring;
    out->ulysses = (int)ulysses;
    return CHECK(is_right);
}

static void print(const struct costs *costs)
{
    static const char *const kinds[TALLY_KINDS] = {"attend", "finish", "delta", "grad",
                                                   "copy",   "add",    "zero"};
    const struct simgpu_stats *stats = &costs->stats;
    printf("{");
    for (int kind = 0; kind < TALLY_KINDS; kind++) {
        printf("\"%s\": %llu, \"%s_bytes\": %lld, ", kinds[kind],
               (unsigned long long)costs->tally.operations[kind], kinds[kind],
               (long long)costs->tally.written_bytes[kind]);
    }
    printf("\"launches\": %llu, \"copies\": %llu, \"memsets\": %llu, ",
           (unsigned long long)stats->launches, (unsigned long long)stats->copies,
           (unsigned long long)stats->memsets);
    printf("\"groups\": %llu, \"sends\": %llu, \"sent_bytes\": %llu, ",
           (unsigned long long)stats->groups, (unsigned long long)stats->sends,
           (unsigned long long)stats->sent_bytes);
    printf("\"records\": %llu, \"awaits\": %llu, \"host_waits\": %llu, ",
           (unsigned long long)stats->records, (unsigned long long)stats->awaits,
           (unsigned long long)stats->host_waits);
    printf("\"allocations\": %llu, \"host_allocations\": %lld, \"exchanges\": %llu, ",
           (unsigned long long)stats->allocations, (long long)costs->host_allocations,
           (unsigned long long)costs->exchanges);
    printf("\"workspace_bytes\": %zu, \"window_bytes\": %zu}\n", costs->workspace_bytes,
           costs->window_bytes);
}

TEST(calls_of_the_input)
{
    struct costs_case what = {.is_executed = false};
    simgpu_set_delay(0);
    while (read_case(&what)) {
        struct costs costs[SCENE_MOST_RANKS];
        costs_play(&what, costs);
        print(&costs[0]);
    }
}
