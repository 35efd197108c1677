/* Facts of a rank, and what follows from those of all. */
#include "transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_check.h"
#include "device_cuda.h"
#include "ipc_signal.h"

/* ---- the own facts ---- */

static const struct {
    const char *word; /* of CP_ATTN_TRANSPORT */
    enum cp_transport_kind kind;
} words[] = {
    {"auto", CP_TRANSPORT_AUTO},
    {"ipc", CP_TRANSPORT_IPC},
    {"nccl", CP_TRANSPORT_NCCL},
};

enum { WORDS = sizeof words / sizeof words[0] };

enum cp_code cp_transport_wish(enum cp_transport_kind *out)
{
    const char *text = getenv("CP_ATTN_TRANSPORT");
    if (text == NULL || text[0] == '\0') {
        *out = CP_TRANSPORT_AUTO;
        return CP_OK;
    }
    for (int i = 0; i < WORDS; i++) {
        if (strcmp(text, words[i].word) == 0) {
            *out = words[i].kind;
            return CP_OK;
        }
    }
    return cp_fail(
        CP_ERR_VALUE,
        "CP_ATTN_TRANSPORT is \"%.40s\"; allowed: ipc, nccl, auto, or not set", text);
}

static const char *word_of(int32_t kind)
{
    return kind >= 0 && kind < WORDS ? words[kind].word : "unknown";
}

static uint64_t namespace_of(const char *path)
{
    struct stat file;
    return stat(path, &file) == 0 ? (uint64_t)file.st_ino : 0;
}

static void describe_process(struct cp_transport_facts *facts)
{
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file != NULL) {
        if (fgets(facts->boot, sizeof facts->boot, file) == NULL) {
            facts->boot[0] = '\0';
        }
        (void)fclose(file);
    }
    facts->ipc_space = namespace_of("/proc/self/ns/ipc");
    facts->pid_space = namespace_of("/proc/self/ns/pid");
    facts->pid = (uint64_t)getpid();
}

/* Those that do not fit count as not reached. */
static enum cp_code describe_reach(int ordinal, struct cp_transport_facts *facts)
{
    int count = 0;
    CP_TRY(cp_cuda_check(cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
    for (int peer = 0; peer < count && facts->reached_count < CP_REACHED; peer++) {
        struct cudaDeviceProp properties;
        int can = 0;
        if (peer == ordinal) {
            continue;
        }
        CP_TRY(cp_cuda_check(cudaDeviceCanAccessPeer(&can, ordinal, peer),
                             "cudaDeviceCanAccessPeer"));
        if (can == 0) {
            continue;
        }
        CP_TRY(cp_cuda_check(cudaGetDeviceProperties(&properties, peer),
                             "cudaGetDeviceProperties"));
        memcpy(facts->reached[facts->reached_count], properties.uuid.bytes, CP_GPU_ID);
        facts->reached_count += 1;
    }
    return CP_OK;
}

enum cp_code cp_transport_describe(int ordinal, struct cp_transport_facts *out)
{
    struct cudaDeviceProp properties;
    enum cp_transport_kind wish = CP_TRANSPORT_AUTO;
    memset(out, 0, sizeof *out);
    CP_TRY(cp_transport_wish(&wish));
    CP_TRY(cp_cuda_check_ordinal(ordinal));
    CP_TRY(cp_cuda_check(cudaGetDeviceProperties(&properties, ordinal),
                         "cudaGetDeviceProperties"));
    out->wish = (int32_t)wish;
    out->ordinal = ordinal;
    memcpy(out->gpu, properties.uuid.bytes, sizeof out->gpu);
    (void)snprintf(out->name, sizeof out->name, "%.79s", properties.name);
    describe_process(out);
    return describe_reach(ordinal, out);
}

/* ---- the choice ---- */

bool cp_transport_is_local(const struct cp_transport_facts *one,
                           const struct cp_transport_facts *other)
{
    return one->boot[0] != '\0' && strcmp(one->boot, other->boot) == 0 &&
           one->pid_space == other->pid_space && one->pid == other->pid;
}

static bool are_together(const struct cp_transport_facts *one,
                         const struct cp_transport_facts *other)
{
    return one->boot[0] != '\0' && strcmp(one->boot, other->boot) == 0 &&
           one->ipc_space == other->ipc_space && one->pid_space == other->pid_space;
}

static bool is_one_gpu(const struct cp_transport_facts *one,
                       const struct cp_transport_facts *other)
{
    return memcmp(one->gpu, other->gpu, CP_GPU_ID) == 0;
}

static bool reaches(const struct cp_transport_facts *one,
                    const struct cp_transport_facts *other)
{
    bool is_reached = is_one_gpu(one, other);
    for (int i = 0; i < one->reached_count && i < CP_REACHED; i++) {
        is_reached = is_reached || memcmp(one->reached[i], other->gpu, CP_GPU_ID) == 0;
    }
    return is_reached;
}

/* Why windows between this pair cannot be; false where they can. */
static bool has_obstacle(const struct cp_transport_facts *facts, int rank, int other,
                         char *text, size_t size)
{
    const struct cp_transport_facts *one = &facts[rank], *two = &facts[other];
    if (!are_together(one, two)) {
        (void)snprintf(text, size,
                       "ranks %d and %d are on different hosts, or in containers that "
                       "do not share their namespaces of processes and IPC",
                       other, rank);
        return true;
    }
    /* They would have one CUDA context, in which whatever waits for the device (a free, the
     * loading of a kernel) waits for the other's kernels too, which wait for its own. */
    if (cp_transport_is_local(one, two) && is_one_gpu(one, two)) {
        (void)snprintf(
            text, size,
            "ranks %d and %d are threads of one process on one GPU (cuda:%d, "
            "%s); ranks that share a GPU have to be processes",
            other, rank, (int)one->ordinal, one->name);
        return true;
    }
    if (!reaches(one, two)) {
        (void)snprintf(text, size,
                       "the GPU of rank %d (cuda:%d, %s) has no peer access to that of "
                       "rank %d, as far as the process of rank %d sees it",
                       rank, (int)one->ordinal, one->name, other, rank);
        return true;
    }
    return false;
}

static bool find_obstacle(const struct cp_transport_facts *facts, int world,
                          bool have_boards, char *text, size_t size)
{
    if (world > CP_IPC_RANKS) {
        (void)snprintf(text, size, "there are %d ranks; at most %d can have windows",
                       world, (int)CP_IPC_RANKS);
        return true;
    }
    if (!have_boards) {
        (void)snprintf(
            text, size,
            "the ranks have met over the network, as those of several hosts");
        return true;
    }
    for (int rank = 0; rank < world; rank++) {
        for (int other = 0; other < world; other++) {
            if (other != rank && has_obstacle(facts, rank, other, text, size)) {
                return true;
            }
        }
    }
    return false;
}

enum cp_code cp_transport_choose(const struct cp_transport_facts *facts, int world,
                                 bool have_boards, enum cp_transport_kind *out)
{
    char obstacle[400] = "";
    for (int rank = 1; rank < world; rank++) {
        if (facts[rank].wish != facts[0].wish) {
            return cp_fail_rank(
                CP_ERR_VALUE, rank,
                "CP_ATTN_TRANSPORT must be the same on all ranks: it is %s on rank 0 "
                "and %s on rank %d",
                word_of(facts[0].wish), word_of(facts[rank].wish), rank);
        }
    }
    if (facts[0].wish == CP_TRANSPORT_NCCL) {
        *out = CP_TRANSPORT_NCCL;
        return CP_OK;
    }
    bool is_barred =
        find_obstacle(facts, world, have_boards, obstacle, sizeof obstacle);
    if (is_barred && facts[0].wish == CP_TRANSPORT_IPC) {
        return cp_fail(CP_ERR_VALUE,
                       "CP_ATTN_TRANSPORT is ipc, which cannot be used here: %s",
                       obstacle);
    }
    *out = is_barred ? CP_TRANSPORT_NCCL : CP_TRANSPORT_IPC;
    return CP_OK;
}
