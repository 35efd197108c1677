/* The names of backends. */
#include "base/backend.h"
#include "test.h"

TEST(every_backend_is_found_by_its_name)
{
    for (int i = 0; i < CP_BACKEND_COUNT; i++) {
        CHECK_EQ_I64(cp_backend_find(cp_backend_name((enum cp_backend)i)), i);
    }
    CHECK_EQ_I64(cp_backend_find("flex"), CP_BACKEND_COUNT);
    CHECK_EQ_I64(cp_backend_find(""), CP_BACKEND_COUNT);
    CHECK_EQ_I64(cp_backend_find("native"), 0); /* what a record of zeros says */
}

TEST(what_is_no_backend_is_nowhere)
{
    for (int i = -1; i <= CP_BACKEND_COUNT; i += CP_BACKEND_COUNT + 1) {
        CHECK_EQ_STR(cp_backend_name((enum cp_backend)i), "unknown");
        CHECK(!cp_backend_is_on_host((enum cp_backend)i));
        CHECK(!cp_backend_is_package((enum cp_backend)i));
    }
}

TEST(the_host_has_no_packages)
{
    char text[256];
    CHECK_EQ_STR(cp_backend_print(true, text, sizeof text),
                 "native, _native_math, _native_flash");
    CHECK_STR_HAS(cp_backend_print(false, text, sizeof text), "flash_varlen_hub, ");
    CHECK_STR_HAS(text, ", sage_hub");
    for (int i = 0; i < CP_BACKEND_COUNT; i++) {
        CHECK(!cp_backend_is_on_host((enum cp_backend)i) ||
              !cp_backend_is_package((enum cp_backend)i));
    }
}
