/* Time that only goes forward. */
#include "base/clock.h"
#include "test.h"

TEST(time_goes_forward)
{
    int64_t last = cp_now_ns();
    for (int i = 0; i < 100000; i++) {
        int64_t now = cp_now_ns();
        if (now < last) {
            CHECK_EQ_I64(now, last);
            return;
        }
        last = now;
    }
}

TEST(deadlines)
{
    struct cp_deadline past = cp_deadline_in(0.0), soon = cp_deadline_in(0.02),
                       never = cp_deadline_in(1e300);
    CHECK(cp_deadline_passed(past));
    CHECK(!cp_deadline_passed(soon));
    CHECK(!cp_deadline_passed(never));
    CHECK(cp_deadline_passed(cp_deadline_in(-1.0)));
    CHECK(!cp_deadline_passed(cp_deadline_in((double)INFINITY)));
    CHECK_NEAR(never.seconds, 1e300, 0.0);
    int64_t start = cp_now_ns();
    while (!cp_deadline_passed(soon)) {
    }
    CHECK(cp_now_ns() - start > 10000000);
    CHECK(cp_now_ns() >= soon.at_ns);
    CHECK_NEAR(soon.seconds, 0.02, 0.0);
}
