/* Strings that grow until their room is over. */
#include "base/text.h"
#include "test.h"

TEST(parts_follow_each_other)
{
    char text[32] = "";
    cp_text_append(text, sizeof text, "%s", "ranks");
    cp_text_append(text, sizeof text, " %d, %d", 1, 3);
    cp_text_append(text, sizeof text, "%s", "");
    CHECK_EQ_STR(text, "ranks 1, 3");
}

TEST(what_does_not_fit_is_cut)
{
    char text[12];
    memset(text, 'x', sizeof text);
    text[0] = '\0';
    for (int i = 0; i < 5; i++) {
        cp_text_append(text, 10, "%s", "1234");
    }
    CHECK_EQ_STR(text, "123412341");
    CHECK_EQ_I64(text[10], 'x');
    CHECK_EQ_I64(text[11], 'x');
}

TEST(no_room_is_no_string)
{
    char text[4] = "xyz";
    cp_text_append(text, 0, "%s", "more");
    cp_text_append(text, 2, "%s", "more"); /* nothing terminates it within its room */
    CHECK_EQ_STR(text, "xyz");
}
