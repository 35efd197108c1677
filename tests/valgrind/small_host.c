/* Preloaded: says that the host has little memory. A window reserves as much address space as the host has memory, and
 * valgrind has no room for some windows of a large host, since it keeps its own notes of every page. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

long sysconf(int name)
{
    long (*next)(int) = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_PHYS_PAGES ? 1 : next(name);
}
