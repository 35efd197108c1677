/* A mapping goes with its last user. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mapping.h"
#include "base/mem.h"
#include "ranks.h"
#include "test.h"

enum { USERS = 6, ROUNDS = 1000 };

static void create(struct cp_mapping **out)
{
    size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    void *base =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(base != MAP_FAILED);
    REQUIRE(cp_mapping_create(base, bytes, out) == CP_OK);
}

/* msync says ENOMEM of what is not mapped. */
static bool is_mapped(void *base)
{
    return msync(base, 1, MS_ASYNC) == 0 || errno != ENOMEM;
}

TEST(the_last_user_unmaps_it)
{
    int64_t blocks = cp_mem_stats().live_blocks;
    struct cp_mapping *first = NULL;
    create(&first);
    struct cp_mapping *second = cp_mapping_share(first);
    char *base = first->base;
    cp_mapping_drop(&first);
    CHECK(first == NULL);
    CHECK(is_mapped(base));
    base[0] = 1;
    cp_mapping_drop(&second);
    CHECK(second == NULL);
    CHECK(!is_mapped(base));
    cp_mapping_drop(&second);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, blocks);
}

static void use(int rank, void *arg)
{
    struct cp_mapping *mine = arg;
    for (int round = 0; round < ROUNDS; round++) {
        struct cp_mapping *more = cp_mapping_share(mine);
        ((char *)more->base)[rank] = (char)round;
        cp_mapping_drop(&more);
    }
    cp_mapping_drop(&mine);
}

TEST(users_may_be_threads)
{
    int64_t blocks = cp_mem_stats().live_blocks;
    struct cp_mapping *mapping = NULL;
    create(&mapping);
    for (int user = 1; user < USERS; user++) {
        (void)cp_mapping_share(mapping);
    }
    ranks_as_threads(USERS, use, mapping);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, blocks);
}
