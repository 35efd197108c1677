/* Products of tiles on tensor cores, in bfloat16 and float16: a lane has its share of the
 * fragments of mma.cuh, in sums of rows g and g + 8 of each 16 at columns 2 t and 2 t + 1 of
 * each 8. */
#ifndef CP_CUDA_BY_MMA_CUH
#define CP_CUDA_BY_MMA_CUH

#include "tile.cuh"

/* cp_tile_at for rows and columns from multiples of 8 and 16 on, to which the lane adds
 * `lane_row` and `lane_byte`, 0 or 16. What the lane has of it is one of four numbers. */
template <int WIDTH>
__device__ inline int cp_mma_at(int row, int lane_row, int column, int lane_byte)
{
    int lane_place = lane_byte ^ (lane_row % 8 * 16), byte = 2 * column;
    return (row + lane_row) * (2 * WIDTH) + byte / 128 * 128 +
           (byte % 128 ^ lane_place);
}

/* 16 rows and 16 columns as a fragment a; transposed, as two fragments b whose rows are the
 * tile's. */
template <int WIDTH, bool IS_TRANSPOSED>
__device__ inline void cp_mma_rows(uint32_t (&to)[4], const char *tile, int row,
                                   int column)
{
    int lane = (int)threadIdx.x % 32;
    cp_load_matrices<IS_TRANSPOSED>(
        to, tile + cp_mma_at<WIDTH>(row, lane % 16, column, lane / 16 * 16));
}

/* 16 rows and 16 columns as two fragments b whose columns are the tile's rows. */
template <int WIDTH>
__device__ inline void cp_mma_columns(uint32_t (&to)[4], const char *tile, int row,
                                      int column)
{
    int lane = (int)threadIdx.x % 32;
    cp_load_matrices<false>(to, tile + cp_mma_at<WIDTH>(row, lane % 8 + lane / 16 * 8,
                                                        column, lane / 8 % 2 * 16));
}

template <class T> struct cp_by_mma {
    using Number = T;
    static constexpr int LANES = 4, SCORE_GROUP = 2, SUM_GROUP = 2, STEP = 32;

    /* Weights are in the fragments that they are wanted in. */
    template <int, int> static constexpr int ROOM = 0;

    __device__ static float exp(float x)
    {
        constexpr float LOG2_E = 1.44269504088896340736f;
        return cp_exp2(x * LOG2_E);
    }

    template <int WIDTH, int ROWS, int COLUMNS>
    __device__ static void dots(float (&to)[ROWS][COLUMNS], const char *own,
                                const char *other, int dim)
    {
        cp_clear(to);
        __syncwarp(); /* lanes may have gone apart, and the rest is for all together */
        CP_CUDA_UNROLL_BY(1)
        for (int step = 0; step < dim; step += STEP) {
            CP_CUDA_UNROLL
            for (int i = 0; i < STEP; i += 16) {
                uint32_t a[ROWS / 2][4];
                CP_CUDA_UNROLL
                for (int m = 0; m < ROWS / 2; m++) {
                    cp_mma_rows<WIDTH, false>(a[m], own, 16 * m, step + i);
                }
                CP_CUDA_UNROLL
                for (int n = 0; n < COLUMNS / 2; n += 2) {
                    uint32_t b[4];
                    cp_mma_columns<WIDTH>(b, other, 8 * n, step + i);
                    CP_CUDA_UNROLL
                    for (int m = 0; m < ROWS / 2; m++) {
                        multiply(to, m, n, a[m], b[0], b[1]);
                        multiply(to, m, n + 1, a[m], b[2], b[3]);
                    }
                }
            }
        }
    }

    /* Weights are rounded to T. */
    template <int WIDTH, int ROWS, int COLUMNS>
    __device__ static void add(float (&to)[ROWS][WIDTH / LANES],
                               const float (&weight)[ROWS][COLUMNS], const char *other,
                               int dim, char *)
    {
        uint32_t a[ROWS / 2][COLUMNS / 4][4];
        CP_CUDA_UNROLL
        for (int i = 0; i < ROWS; i++) {
            CP_CUDA_UNROLL
            for (int j = 0; j < COLUMNS; j += 2) { /* a sum's columns are half of a's */
                a[i / 2][j / 4][j / 2 % 2 * 2 + i % 2] =
                    cp_pack<T>(weight[i][j], weight[i][j + 1]);
            }
        }
        __syncwarp(); /* as in dots */
        CP_CUDA_UNROLL
        for (int step = 0; step < WIDTH; step += STEP) {
            if (step >= dim) {
                continue; /* uniform */
            }
            CP_CUDA_UNROLL
            for (int k = 0; k < COLUMNS / 4; k++) {
                CP_CUDA_UNROLL
                for (int i = 0; i < STEP; i += 16) {
                    uint32_t b[4];
                    cp_mma_rows<WIDTH, true>(b, other, 16 * k, step + i);
                    CP_CUDA_UNROLL
                    for (int m = 0; m < ROWS / 2; m++) {
                        multiply(to, m, (step + i) / 8, a[m][k], b[0], b[1]);
                        multiply(to, m, (step + i) / 8 + 1, a[m][k], b[2], b[3]);
                    }
                }
            }
        }
    }

  private:
    /* to += a b: 16 rows, of which the lane has two, and 8 columns. */
    template <int ROWS, int COLUMNS>
    __device__ static void multiply(float (&to)[ROWS][COLUMNS], int m, int n,
                                    const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
    {
        float (&upper)[COLUMNS] = to[2 * m];
        float (&lower)[COLUMNS] = to[2 * m + 1];
        float sum[4] = {upper[2 * n], upper[2 * n + 1], lower[2 * n], lower[2 * n + 1]};
        cp_mma<T>(sum, a, b0, b1);
        upper[2 * n] = sum[0];
        upper[2 * n + 1] = sum[1];
        lower[2 * n] = sum[2];
        lower[2 * n + 1] = sum[3];
    }
};

#endif
