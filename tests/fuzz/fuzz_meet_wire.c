/* What arrives at a meeting, from bytes: is a hello of the meeting taken, anything else dropped, and is
 * no descriptor lost or kept?
 *
 * One case either reads messages one by one from a pair of sockets, where it is known what each must
 * be taken for, or lets a rank meet peers that say and do what the input says, inside the rank's own
 * waiting (the interruption that it asks for), until the input is over or all have met. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "control/gate.h"
#include "control/meet_wire.h"
#include "fuzz.h"

enum {
    MOST_WORLD = 4,
    MOST_FDS = 5,
    MOST_BYTES = 2000,
    MOST_TALKS = 6,
    MOST_TURNS = 40
};

/* What a descriptor that is sent may be of: made once. */
enum file { FILE_WINDOW, FILE_PAGE, FILE_SMALL_PAGE, FILE_OPEN_PAGE, FILES };

/* A message as the input has it: all bytes that are sent, in a block of their number. */
struct draft {
    struct cp_wire_message message;
    bool is_foreign; /* of a meeting with another key, or of another world */
    size_t bytes;
    int fd_count;
    enum file files[MOST_FDS];
};

static int files[FILES];
static char key[32];                       /* of this process's meetings */
static const unsigned char page_mark = 77; /* how FILE_PAGE begins */
static const useconds_t nap_us = 300;

static int create_file(size_t bytes, int seals)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    FUZZ_CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 &&
                   fcntl(fd, F_ADD_SEALS, seals) == 0,
               "%s", strerror(errno));
    return fd;
}

static void create_files(void)
{
    static bool is_done;
    if (!is_done) {
        size_t page = cp_page_bytes(MOST_WORLD);
        files[FILE_WINDOW] = create_file(1, F_SEAL_SHRINK);
        files[FILE_PAGE] = create_file(page, F_SEAL_SHRINK);
        FUZZ_CHECK(pwrite(files[FILE_PAGE], &page_mark, 1, 0) == 1, "%s",
                   strerror(errno));
        files[FILE_SMALL_PAGE] = create_file(1, F_SEAL_SHRINK);
        files[FILE_OPEN_PAGE] = create_file(page, 0);
        (void)snprintf(key, sizeof key, "fuzz %d", (int)getpid());
        is_done = true;
    }
}

/* Which numbers are descriptors: one that was lost is another one, one closed by mistake is missing. */
static uint64_t open_files(void)
{
    uint64_t open = 0;
    for (int fd = 0; fd < 64; fd++) {
        open |= (uint64_t)(fcntl(fd, F_GETFD) >= 0) << fd;
    }
    return open;
}

static bool is_file(int fd, enum file file)
{
    struct stat got;
    struct stat want;
    return fstat(fd, &got) == 0 && fstat(files[file], &want) == 0 &&
           got.st_ino == want.st_ino && got.st_dev == want.st_dev;
}

/* ---- messages ---- */

/* A right hello from `from` to `to`, and then what the input changes in it. */
static void read_draft(struct fuzz_input *in, const struct cp_wire *self, int from,
                       struct draft *out)
{
    uint8_t changes = fuzz_byte(in);
    struct cp_wire_message *message = &out->message;
    memset(out, 0, sizeof *out);
    message->hash = self->hash;
    message->from = from;
    message->to = self->rank;
    out->bytes = sizeof *message;
    out->fd_count = from == 0 ? 2 : 1;
    out->files[1] = FILE_PAGE;
    if ((changes & 1) != 0) {
        message->from = (int32_t)fuzz_number(in);
    }
    if ((changes & 2) != 0) {
        message->to = (int32_t)fuzz_number(in);
    }
    if ((changes & 4) != 0) {
        uint64_t flips = fuzz_word(in);
        message->hash.word[fuzz_flag(in)] ^= flips;
    }
    if ((changes & 8) != 0) {
        out->bytes = (size_t)fuzz_word(in) % MOST_BYTES;
    }
    if ((changes & 16) != 0) {
        out->fd_count = (int)fuzz_range(in, 0, MOST_FDS);
    }
    if ((changes & 64) != 0) {
        bool is_same_key = fuzz_flag(in);
        message->hash =
            cp_wire_hash_of(is_same_key ? key : "another", self->world + is_same_key);
        out->is_foreign = true;
    }
    if ((changes & 32) != 0) {
        for (int i = 0; i < MOST_FDS; i++) {
            out->files[i] = (enum file)fuzz_range(in, 0, FILES - 1);
        }
    }
    /* By which it is known whose hello was taken. */
    memset(message->hello.bytes, message->from, sizeof message->hello.bytes);
}

/* False where the socket does not take it. */
static bool send_draft(int fd, const struct draft *draft)
{
    unsigned char bytes[MOST_BYTES] = {0};
    int fds[MOST_FDS];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(MOST_FDS * sizeof(int))];
    } control = {.bytes = {0}};
    struct iovec part = {.iov_base = bytes, .iov_len = draft->bytes};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    memcpy(bytes, &draft->message, sizeof draft->message);
    for (int i = 0; i < draft->fd_count; i++) {
        fds[i] = files[draft->files[i]];
    }
    if (draft->fd_count > 0) {
        size_t fds_bytes = (size_t)draft->fd_count * sizeof *fds;
        header.msg_control = control.bytes;
        header.msg_controllen = CMSG_SPACE(fds_bytes);
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(fds_bytes);
        memcpy(CMSG_DATA(rights), fds, fds_bytes);
    }
    return sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)draft->bytes;
}

static enum cp_wire_reading expect(const struct cp_wire *self,
                                   const struct draft *draft)
{
    const struct cp_wire_message *message = &draft->message;
    bool is_hello = draft->bytes == sizeof *message && !draft->is_foreign &&
                    memcmp(&message->hash, &self->hash, sizeof self->hash) == 0 &&
                    message->to == self->rank && message->from != self->rank &&
                    message->from >= 0 && message->from < self->world;
    int fd_count = message->from == 0 ? 2 : 1;
    return !is_hello                     ? CP_WIRE_GARBAGE
           : draft->fd_count == fd_count ? CP_WIRE_HELLO
                                         : CP_WIRE_TOO_FEW_FDS;
}

/* ---- message by message ---- */

static void read_one(const struct cp_wire *self, int fd, enum cp_wire_reading want,
                     const struct draft *draft)
{
    int fds[CP_WIRE_FDS] = {-1, -1};
    struct cp_wire_message *message = malloc(sizeof *message);
    FUZZ_CHECK(message != NULL, "no memory");
    enum cp_wire_reading reading = cp_wire_read(self, fd, message, fds);
    FUZZ_CHECK(reading == want, "%d, not %d", (int)reading, (int)want);
    if (reading == CP_WIRE_HELLO) {
        FUZZ_CHECK(memcmp(message, &draft->message, sizeof *message) == 0,
                   "another message");
        for (int i = 0; i < draft->fd_count; i++) {
            FUZZ_CHECK(is_file(fds[i], draft->files[i]), "another file %d", i);
            cp_wire_close(&fds[i]);
        }
    }
    FUZZ_CHECK(fds[0] == -1 && fds[1] == -1, "%d, %d", fds[0], fds[1]);
    free(message);
}

static void read_messages(struct fuzz_input *in, const struct cp_wire *self)
{
    int pair[2];
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0, "%s",
               strerror(errno));
    while (in->left > 0) {
        struct draft draft;
        int from = (int)fuzz_range(in, 0, self->world - 1);
        read_one(self, pair[0], CP_WIRE_NOTHING_YET, NULL);
        read_draft(in, self, from, &draft);
        FUZZ_CHECK(send_draft(pair[1], &draft), "%s", strerror(errno));
        read_one(self, pair[0], expect(self, &draft), &draft);
    }
    FUZZ_CHECK(!cp_wire_is_hung_up(pair[0]), "it is open");
    (void)close(pair[1]);
    FUZZ_CHECK(cp_wire_is_hung_up(pair[0]), "it is closed");
    read_one(self, pair[0], CP_WIRE_GARBAGE, NULL);
    (void)close(pair[0]);
}

/* ---- a meeting ---- */

/* All that the rank's peers, and strangers, have open. */
struct crowd {
    struct fuzz_input in;
    struct cp_wire self;
    int listeners[MOST_WORLD]; /* of lower ranks */
    int talks[MOST_TALKS];     /* connections, either way */
    bool is_new[MOST_TALKS];   /* to the rank's own listener, and nothing said yet */
    int of_rank[MOST_WORLD];   /* the talk of a higher rank that has met, or -1 */
    int turns;
};

static void close_talk(struct crowd *crowd, int talk)
{
    cp_wire_close(&crowd->talks[talk]);
    for (int rank = 0; rank < MOST_WORLD; rank++) {
        crowd->of_rank[rank] = crowd->of_rank[rank] == talk ? -1 : crowd->of_rank[rank];
    }
}

/* Where nothing is free, the first one goes. */
static void keep_talk(struct crowd *crowd, int fd, bool is_new)
{
    int talk = 0;
    while (talk < MOST_TALKS && crowd->talks[talk] >= 0) {
        talk += 1;
    }
    talk %= MOST_TALKS;
    close_talk(crowd, talk);
    crowd->talks[talk] = fd;
    crowd->is_new[talk] = is_new;
}

static int connect_to(const struct cp_wire *self)
{
    struct sockaddr_un address;
    socklen_t size = cp_wire_name(&self->hash, self->rank, &address);
    int fd = cp_wire_open();
    FUZZ_CHECK(fd >= 0, "%s", strerror(errno));
    if (connect(fd, (struct sockaddr *)&address, size) != 0) {
        cp_wire_close(&fd);
    }
    return fd;
}

static int listen_as(const struct cp_wire *self, int rank)
{
    struct sockaddr_un address;
    socklen_t size = cp_wire_name(&self->hash, rank, &address);
    int fd = cp_wire_open();
    FUZZ_CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, size) == 0 &&
                   listen(fd, MOST_TALKS) == 0,
               "%s", strerror(errno));
    return fd;
}

/* Listens, the first time. The nap is longer than the rank pauses at first before it tries again, so
 * that what comes of it does not hang on the clock. */
static void accept_as(struct crowd *crowd, int rank)
{
    if (crowd->listeners[rank] < 0) {
        crowd->listeners[rank] = listen_as(&crowd->self, rank);
        (void)usleep(nap_us);
        return;
    }
    int fd = accept4(crowd->listeners[rank], NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
        keep_talk(crowd, fd, false);
    } else {
        (void)usleep(nap_us);
    }
}

/* A right hello, the first on its connection, of a higher rank that is not there, is taken. */
static void say(struct crowd *crowd, int talk, const struct draft *draft)
{
    int from = draft->message.from;
    if (crowd->talks[talk] < 0) {
        return;
    }
    if (send_draft(crowd->talks[talk], draft) && crowd->is_new[talk] &&
        expect(&crowd->self, draft) == CP_WIRE_HELLO && from > crowd->self.rank &&
        crowd->of_rank[from] < 0) {
        crowd->of_rank[from] = talk;
    }
    crowd->is_new[talk] = false;
}

/* Nobody takes the place of a rank that has met and is there. */
static void check_places(const struct crowd *crowd)
{
    for (int rank = 0; rank < MOST_WORLD; rank++) {
        int talk = crowd->of_rank[rank];
        FUZZ_CHECK(talk < 0 || !cp_wire_is_hung_up(crowd->talks[talk]),
                   "rank %d was dropped", rank);
    }
}

static void act(struct crowd *crowd)
{
    struct fuzz_input *in = &crowd->in;
    int rank = (int)fuzz_range(in, 0, crowd->self.world - 1);
    int talk = (int)fuzz_range(in, 0, MOST_TALKS - 1);
    struct draft draft;
    switch (fuzz_range(in, 0, 3)) {
    case 0:
        keep_talk(crowd, connect_to(&crowd->self), true);
        break;
    case 1:
        if (rank < crowd->self.rank) {
            accept_as(crowd, rank);
        }
        break;
    case 2:
        close_talk(crowd, talk);
        break;
    default:
        read_draft(in, &crowd->self, rank, &draft);
        say(crowd, talk, &draft);
        break;
    }
}

/* Asked by the rank at every turn of its waiting. That somebody comes and goes wakes it at once. */
static enum cp_code take_turn(void *arg)
{
    struct crowd *crowd = arg;
    check_places(crowd);
    if (crowd->in.left == 0 || crowd->turns == MOST_TURNS) {
        return CP_ERR_INTERRUPTED;
    }
    crowd->turns += 1;
    act(crowd);
    int passer_by = connect_to(&crowd->self);
    cp_wire_close(&passer_by);
    return CP_OK;
}

/* Who has met has said its own hello, and the page is rank 0's and no other file. */
static void check_meeting(const struct cp_wire *self, struct cp_meeting *meeting)
{
    const unsigned char *page = cp_meeting_page(meeting)->base;
    FUZZ_CHECK(page != NULL, "no page");
    for (int rank = 0; rank < self->world; rank++) {
        const struct cp_hello *hello = cp_meeting_hello(meeting, rank);
        FUZZ_CHECK(hello->bytes[0] == rank && hello->bytes[CP_HELLO_BYTES - 1] == rank,
                   "rank %d said %d", rank, hello->bytes[0]);
        FUZZ_CHECK((cp_meeting_window_fd(meeting, rank) >= 0) == (rank != self->rank),
                   "window of rank %d", rank);
        (void)cp_meeting_is_dead(meeting, rank);
    }
    FUZZ_CHECK(page[0] == (self->rank == 0 ? 0 : page_mark), "it begins with %d",
               page[0]);
}

static void meet(struct fuzz_input *in, const struct cp_wire *self)
{
    struct crowd crowd = {.in = *in, .self = *self};
    struct cp_meeting *meeting = NULL;
    struct cp_meet_args args = {
        .key = key,
        .rank = self->rank,
        .world = self->world,
        .window_fd = files[FILE_WINDOW],
        .deadline = cp_deadline_in(60.0),
        .interrupt = take_turn,
        .interrupt_arg = &crowd,
    };
    memset(args.hello.bytes, self->rank, sizeof args.hello.bytes);
    memset(crowd.talks, -1, sizeof crowd.talks);
    memset(crowd.listeners, -1, sizeof crowd.listeners);
    memset(crowd.of_rank, -1, sizeof crowd.of_rank);
    enum cp_code code = cp_meet(&args, &meeting);
    if (code == CP_OK) {
        check_meeting(self, meeting);
        check_places(&crowd);
    } else {
        char who[24];
        (void)snprintf(who, sizeof who, "rank %d ", self->rank);
        fuzz_check_sentence(code, who);
        FUZZ_CHECK(code == CP_ERR_INTERRUPTED || code == CP_ERR_RUNTIME, "%s",
                   cp_last_error()->text);
    }
    cp_meeting_close(&meeting);
    for (int i = 0; i < MOST_TALKS; i++) {
        cp_wire_close(&crowd.talks[i]);
    }
    for (int rank = 0; rank < self->world; rank++) {
        cp_wire_close(&crowd.listeners[rank]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz_input in = {data, bytes};
    struct cp_wire self = {.window_fd = -1, .page_fd = -1};
    create_files();
    uint64_t open_before = open_files();
    int64_t live_before = cp_mem_stats().live_blocks;
    bool is_meeting = fuzz_flag(&in);
    self.world = (int)fuzz_range(&in, 1 + is_meeting, MOST_WORLD);
    self.rank = (int)fuzz_range(&in, 0, self.world - 1);
    self.hash = cp_wire_hash_of(key, self.world);
    if (is_meeting) {
        meet(&in, &self);
    } else {
        read_messages(&in, &self);
    }
    FUZZ_CHECK(open_files() == open_before, "descriptors lost or closed");
    FUZZ_CHECK(cp_mem_stats().live_blocks == live_before, "memory lost");
    return 0;
}
