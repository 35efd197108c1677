/* Products of tiles in exact float32, as a matrix product of registers: a lane has a few
 * rows and columns and reads each number of shared memory once for all of them.
 *
 * The warp's lanes lie 4 rows by 8 columns. Of a tile's rows a lane reads 16 bytes, those
 * that are read together are in different banks (cp_tile_at). Sums are made of partial ones,
 * of CP_SCORE_CHUNK terms in a dot product, just as those of the plain kernel and of delta,
 * with which they have to cancel where a row sees one key; of a tile's rows in add. */
#ifndef CP_CUDA_BY_FMA_CUH
#define CP_CUDA_BY_FMA_CUH

#include "tile.cuh"

struct cp_by_fma {
    using Number = float;
    static constexpr int LANES = 8, SCORE_GROUP = 1, SUM_GROUP = 4, STEP = 64;

    /* Numbers of a row of weights in the room: the rows of a lane's column begin in different
     * banks, but for 16 of a row, where two share one. */
    template <int OTHERS>
    static constexpr int PITCH = OTHERS % 32 == 0 ? OTHERS + 8 : OTHERS;
    template <int ROWS, int OTHERS>
    static constexpr int ROOM = ROWS * PITCH<OTHERS> * (int)sizeof(float);

    __device__ static float exp(float x)
    {
        return cp_exp(x);
    }

    template <int WIDTH, int ROWS, int COLUMNS>
    __device__ static void dots(float (&to)[ROWS][COLUMNS], const char *own,
                                const char *other, int dim)
    {
        using Lanes = cp_lanes<LANES, SCORE_GROUP>;
        cp_clear(to);
        CP_CUDA_UNROLL_BY(1)
        for (int first = 0; first < dim; first += CP_SCORE_CHUNK) {
            float part[ROWS][COLUMNS];
            cp_clear(part);
            /* More of a and b at a time hide reading behind multiplying, as far as registers
             * go. */
            CP_CUDA_UNROLL_BY(ROWS * COLUMNS > 16 ? 1 : 4)
            for (int k = first; k < first + CP_SCORE_CHUNK; k += 4) {
                float4 b[COLUMNS];
                CP_CUDA_UNROLL
                for (int j = 0; j < COLUMNS; j++) {
                    b[j] =
                        numbers<WIDTH>(other, j * Lanes::SPAN, Lanes::column(0), 4 * k);
                }
                CP_CUDA_UNROLL
                for (int i = 0; i < ROWS; i++) {
                    float4 a =
                        numbers<WIDTH>(own, i * Lanes::ROWS, Lanes::row(0), 4 * k);
                    CP_CUDA_UNROLL
                    for (int j = 0; j < COLUMNS; j++) {
                        part[i][j] += a.x * b[j].x;
                        part[i][j] += a.y * b[j].y;
                        part[i][j] += a.z * b[j].z;
                        part[i][j] += a.w * b[j].w;
                    }
                }
            }
            CP_CUDA_UNROLL
            for (int i = 0; i < ROWS; i++) {
                CP_CUDA_UNROLL
                for (int j = 0; j < COLUMNS; j++) {
                    to[i][j] += part[i][j];
                }
            }
        }
    }

    /* A lane needs the weights of its rows, which eight lanes have: by way of the room. */
    template <int WIDTH, int ROWS, int COLUMNS>
    __device__ static void add(float (&to)[ROWS][WIDTH / LANES],
                               const float (&weight)[ROWS][COLUMNS], const char *other,
                               int dim, char *room)
    {
        constexpr int OTHERS = COLUMNS * LANES;
        using Lanes = cp_lanes<LANES, SCORE_GROUP>;
        float *weights = (float *)room;
        __syncwarp(); /* all lanes are done with what lies there */
        CP_CUDA_UNROLL
        for (int i = 0; i < ROWS; i++) {
            CP_CUDA_UNROLL
            for (int j = 0; j < COLUMNS; j++) {
                weights[Lanes::row(i) * PITCH<OTHERS> + Lanes::column(j)] =
                    weight[i][j];
            }
        }
        __syncwarp();
        CP_CUDA_UNROLL
        for (int step = 0; step < WIDTH; step += STEP) {
            if (step < dim) {
                add_step<WIDTH, OTHERS>(to, weights, other, step);
            }
        }
    }

  private:
    /* Four numbers of the row `row` + `lane_row`, which have no bit in common. */
    template <int WIDTH>
    __device__ static float4 numbers(const char *tile, int row, int lane_row, int byte)
    {
        constexpr int ROW_BYTES = WIDTH * (int)sizeof(float);
        int place = byte ^ (lane_row << 4);
        return *(const float4 *)(tile + lane_row * ROW_BYTES + row * ROW_BYTES +
                                 (place ^ ((row & 7) << 4)));
    }

    /* Of the columns on from `step`, STEP. */
    template <int WIDTH, int OTHERS, int ROWS>
    __device__ static void add_step(float (&to)[ROWS][WIDTH / LANES],
                                    const float *weights, const char *other, int step)
    {
        constexpr int COLUMNS = STEP / LANES;
        using Lanes = cp_lanes<LANES, SUM_GROUP>;
        float part[ROWS][COLUMNS];
        cp_clear(part);
        CP_CUDA_UNROLL_BY(1)
        for (int first = 0; first < OTHERS; first += 4) {
            float weight[ROWS][4];
            CP_CUDA_UNROLL
            for (int i = 0; i < ROWS; i++) {
                float4 four =
                    *(const float4 *)&weights[Lanes::row(i) * PITCH<OTHERS> + first];
                weight[i][0] = four.x;
                weight[i][1] = four.y;
                weight[i][2] = four.z;
                weight[i][3] = four.w;
            }
            CP_CUDA_UNROLL
            for (int k = 0; k < 4; k++) {
                CP_CUDA_UNROLL
                for (int j = 0; j < COLUMNS; j += SUM_GROUP) {
                    float4 b = numbers<WIDTH>(other, first + k, 0,
                                              4 * (step + Lanes::column(j)));
                    CP_CUDA_UNROLL
                    for (int i = 0; i < ROWS; i++) {
                        part[i][j] += weight[i][k] * b.x;
                        part[i][j + 1] += weight[i][k] * b.y;
                        part[i][j + 2] += weight[i][k] * b.z;
                        part[i][j + 3] += weight[i][k] * b.w;
                    }
                }
            }
        }
        CP_CUDA_UNROLL
        for (int i = 0; i < ROWS; i++) {
            CP_CUDA_UNROLL
            for (int j = 0; j < COLUMNS; j++) {
                to[i][step / LANES + j] += part[i][j];
            }
        }
    }
};

#endif
