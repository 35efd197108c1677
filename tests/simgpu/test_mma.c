/* Do the wrappers of cuda/mma.cuh have the layouts that the PTX ISA writes down, and are
 * asynchronous copies there when they were waited for, and not before? */
#include "simgpu.h"
#include "tensor/convert.h"
#include "test.h"
#include "toy_mma.h"

enum { LANES = 32, ROUNDS = 40 };

#define OK(call) CHECK_EQ_I64(call, cudaSuccess)

/* Memory of the device, whose bytes the host has beside it. */
struct room {
    void *there;
    size_t bytes;
};

static struct room room_new(const void *data, size_t bytes, cudaStream_t stream)
{
    struct room room = {.bytes = bytes};
    OK(cudaMalloc(&room.there, bytes));
    if (data != NULL) {
        OK(cudaMemcpyAsync(room.there, data, bytes, cudaMemcpyHostToDevice, stream));
        OK(cudaStreamSynchronize(stream));
    }
    return room;
}

static void room_read(const struct room *room, void *data, cudaStream_t stream)
{
    OK(cudaMemcpyAsync(data, room->there, room->bytes, cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamSynchronize(stream));
}

static cudaStream_t stream_new(void)
{
    cudaStream_t stream = NULL;
    simgpu_reset();
    simgpu_seed(test_seed);
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static uint16_t narrow(bool is_bf16, float x)
{
    return is_bf16 ? cp_f32_to_bf16(x) : cp_f32_to_f16(x);
}

/* PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": element i of a
 * lane's fragment. */
static void place_a(int lane, int i, int *row, int *column)
{
    int group = lane >> 2, thread_in_group = lane % 4;
    *row = (0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8;
    *column = i < 4 ? thread_in_group * 2 + (i & 1) : thread_in_group * 2 + (i & 1) + 8;
}

static void place_b(int lane, int i, int *row, int *column)
{
    int group = lane >> 2, thread_in_group = lane % 4;
    *row = i < 2 ? thread_in_group * 2 + (i & 1) : thread_in_group * 2 + (i & 1) + 8;
    *column = group;
}

static void place_c(int lane, int i, int *row, int *column)
{
    int group = lane >> 2, thread_in_group = lane % 4;
    *row = i < 2 ? group : group + 8;
    *column = thread_in_group * 2 + (i & 1);
}

static void multiply(bool is_bf16, struct test_rng *rng, cudaStream_t stream)
{
    float a[16][16], b[16][8], c[16][8];
    uint16_t a_parts[LANES][8], b_parts[LANES][4];
    float c_parts[LANES][4], got[LANES][4];
    int row, column;
    for (int i = 0; i < 256; i++) {
        a[i / 16][i % 16] = (float)test_rng_range(rng, -9, 9);
    }
    for (int i = 0; i < 128; i++) {
        b[i / 8][i % 8] = (float)test_rng_range(rng, -9, 9);
        c[i / 8][i % 8] = (float)test_rng_range(rng, -999, 999);
    }
    for (int lane = 0; lane < LANES; lane++) {
        for (int i = 0; i < 8; i++) {
            place_a(lane, i, &row, &column);
            a_parts[lane][i] = narrow(is_bf16, a[row][column]);
        }
        for (int i = 0; i < 4; i++) {
            place_b(lane, i, &row, &column);
            b_parts[lane][i] = narrow(is_bf16, b[row][column]);
            place_c(lane, i, &row, &column);
            c_parts[lane][i] = c[row][column];
        }
    }
    struct room a_room = room_new(a_parts, sizeof a_parts, stream);
    struct room b_room = room_new(b_parts, sizeof b_parts, stream);
    struct room c_room = room_new(c_parts, sizeof c_parts, stream);
    OK(toy_mma(is_bf16, a_room.there, b_room.there, c_room.there, stream));
    room_read(&c_room, got, stream);
    for (int lane = 0; lane < LANES; lane++) {
        for (int i = 0; i < 4; i++) {
            place_c(lane, i, &row, &column);
            float want = c[row][column];
            for (int k = 0; k < 16; k++) {
                want += a[row][k] * b[k][column];
            }
            CHECK(got[lane][i] == want);
        }
    }
    OK(cudaFree(a_room.there));
    OK(cudaFree(b_room.there));
    OK(cudaFree(c_room.there));
}

TEST(products_have_the_layout_of_ptx)
{
    cudaStream_t stream = stream_new();
    struct test_rng rng = test_rng_init(1);
    for (int round = 0; round < ROUNDS; round++) {
        multiply(round % 2 == 0, &rng, stream);
    }
    OK(cudaStreamDestroy(stream));
}

/* ldmatrix: "each thread loads a fragment of a row: thread 4 r + c elements 2 c and 2 c + 1
 * of row r"; with .trans, of column r. */
TEST(matrices_are_loaded_in_the_layout_of_ptx)
{
    cudaStream_t stream = stream_new();
    uint16_t matrices[4][8][8], got[LANES][4][2];
    for (int i = 0; i < 256; i++) {
        matrices[i / 64][i / 8 % 8][i % 8] = (uint16_t)(1000 + i);
    }
    struct room in = room_new(matrices, sizeof matrices, stream);
    struct room out = room_new(NULL, sizeof got, stream);
    for (int is_transposed = 0; is_transposed < 2; is_transposed++) {
        OK(toy_load_matrices(is_transposed, in.there, out.there, 0, stream));
        room_read(&out, got, stream);
        for (int lane = 0; lane < LANES; lane++) {
            for (int m = 0; m < 4; m++) {
                for (int i = 0; i < 2; i++) {
                    int along = lane / 4, across = lane % 4 * 2 + i;
                    CHECK_EQ_I64(got[lane][m][i], is_transposed
                                                      ? matrices[m][across][along]
                                                      : matrices[m][along][across]);
                }
            }
        }
    }
    OK(cudaFree(in.there));
    OK(cudaFree(out.there));
    OK(cudaStreamDestroy(stream));
}

/* How many of `rounds` launches show the bytes that were copied: of the first group, and of
 * the second. */
static void copies_there(int bytes, int newest, int *first, int *second,
                         cudaStream_t stream)
{
    char from[LANES * 16], want[LANES * 16], got[LANES * 16], got_second[LANES * 4];
    size_t size = (size_t)(LANES * bytes);
    for (int i = 0; i < LANES * 16; i++) {
        from[i] = (char)(i * 7 + 1);
        want[i] = i / bytes % 2 == 0 ? from[i] : 0;
    }
    struct room in = room_new(from, sizeof from, stream);
    struct room out = room_new(NULL, size, stream);
    struct room out_second = room_new(NULL, sizeof got_second, stream);
    *first = *second = 0;
    for (int round = 0; round < ROUNDS; round++) {
        OK(toy_copy_async(bytes, in.there, out.there, out_second.there, newest,
                          stream));
        room_read(&out, got, stream);
        room_read(&out_second, got_second, stream);
        *first += memcmp(got, want, size) == 0;
        *second += memcmp(got_second, from, sizeof got_second) == 0;
    }
    OK(cudaFree(in.there));
    OK(cudaFree(out.there));
    OK(cudaFree(out_second.there));
}

TEST(copies_are_there_when_waited_for)
{
    cudaStream_t stream = stream_new();
    for (int bytes = 4; bytes <= 16; bytes *= 2) {
        int first = 0, second = 0;
        copies_there(bytes, 0, &first, &second, stream);
        CHECK_EQ_I64(first, ROUNDS);
        CHECK_EQ_I64(second, ROUNDS);
        copies_there(bytes, 1, &first, &second, stream);
        CHECK_EQ_I64(first, ROUNDS);
        CHECK(second < ROUNDS); /* now and then a copy is early */
        copies_there(bytes, -1, &first, &second, stream);
        CHECK(first < ROUNDS);
        CHECK(second < ROUNDS);
    }
    OK(cudaStreamDestroy(stream));
}

TEST(a_copy_between_odd_addresses_is_found)
{
    cudaStream_t stream = stream_new();
    struct room in = room_new(NULL, 1024, stream), out = room_new(NULL, 1024, stream);
    char text[SIMGPU_TEXT];
    simgpu_keep_violations(true);
    OK(toy_copy_async(16, (char *)in.there + 8, out.there, (char *)out.there + 512, 0,
                      stream));
    OK(cudaStreamSynchronize(stream));
    simgpu_violation(text);
    CHECK_STR_HAS(text, "an asynchronous copy of 16 bytes");
    simgpu_keep_violations(false);
    OK(cudaFree(in.there));
    OK(cudaFree(out.there));
    OK(cudaStreamDestroy(stream));
}

TEST(a_matrix_at_an_odd_address_is_found)
{
    cudaStream_t stream = stream_new();
    struct room in = room_new(NULL, 512, stream), out = room_new(NULL, 512, stream);
    char text[SIMGPU_TEXT];
    simgpu_keep_violations(true);
    OK(toy_load_matrices(0, in.there, out.there, 8, stream));
    OK(cudaStreamSynchronize(stream));
    simgpu_violation(text);
    CHECK_STR_HAS(text, "a row of a matrix");
    simgpu_keep_violations(false);
    OK(cudaFree(in.there));
    OK(cudaFree(out.there));
    OK(cudaStreamDestroy(stream));
}

TEST(powers_and_pairs)
{
    cudaStream_t stream = stream_new();
    float in[LANES], got[LANES];
    uint32_t bf16[LANES], f16[LANES];
    for (int i = 0; i < LANES; i++) {
        in[i] = i == 0 ? -HUGE_VALF : (float)i / 4 - 5;
    }
    struct room from = room_new(in, sizeof in, stream);
    struct room out = room_new(NULL, sizeof got, stream);
    struct room bf16_out = room_new(NULL, sizeof bf16, stream);
    struct room f16_out = room_new(NULL, sizeof f16, stream);
    OK(toy_exp2(from.there, out.there, bf16_out.there, f16_out.there, stream));
    room_read(&out, got, stream);
    room_read(&bf16_out, bf16, stream);
    room_read(&f16_out, f16, stream);
    for (int i = 0; i < LANES; i++) {
        double want = exp2((double)in[i]);
        CHECK(fabs((double)got[i] - want) <= want * 0x1p-21);
        CHECK_EQ_I64(bf16[i], cp_f32_to_bf16(in[i]) | (uint32_t)cp_f32_to_bf16(got[i])
                                                          << 16);
        CHECK_EQ_I64(f16[i], cp_f32_to_f16(in[i]) | (uint32_t)cp_f32_to_f16(got[i])
                                                        << 16);
    }
    OK(cudaFree(from.there));
    OK(cudaFree(out.there));
    OK(cudaFree(bf16_out.there));
    OK(cudaFree(f16_out.there));
    OK(cudaStreamDestroy(stream));
}
