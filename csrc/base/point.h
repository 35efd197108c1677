/* Named places in a protocol where a test delays or ends a rank. Nothing in the library itself.
 *
 * A test defines CP_TEST_POINTS, cp_test_point, and includes the .c file under test. */
#ifndef CP_BASE_POINT_H
#define CP_BASE_POINT_H

#ifdef CP_TEST_POINTS
void cp_test_point(const char *name);
#define CP_POINT(name) cp_test_point(name)
#else
#define CP_POINT(name) ((void)0)
#endif

#endif
