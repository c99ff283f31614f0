/* Products of small matrices with panels: ROWS rows of numbers, of LANES images each. Number i of row r of a panel is
 * its vector i * ROWS + r. Panels are `stride` vectors apart. Rows that fill up the last panel are zeros. */
#ifndef PRODUCTS_H
#define PRODUCTS_H

#include "lanes.h"

/* A tile has OUTPUTS x ROWS sums in registers, a row of the panel and one factor. */
#if LANES == 16 || defined __aarch64__ /* which have 32 registers */
enum { ROWS = 6 };
#else
enum { ROWS = 3 };
#endif
enum {
    OUTPUTS = 4,
    TILES = 12 / ROWS, /* of inputs, whose numbers stay in the first cache while all outputs are multiplied by them */
};

static int blocks_of(int numbers) { return (numbers + OUTPUTS - 1) / OUTPUTS; }

static int tiles_of(int numbers) { return (numbers + ROWS - 1) / ROWS; }

/* Vectors of a panel of rows of so many numbers, in whole blocks and tiles; odd: the panels begin in different sets of
 * the cache. */
static int stride_of(int numbers) {
    const int outputs = blocks_of(numbers) * OUTPUTS, inputs = tiles_of(numbers) * ROWS;
    return (outputs > inputs ? outputs : inputs) * ROWS | 1;
}

/* A matrix [outputs, inputs], or with `across` its transpose, as the blocks [outputs / OUTPUTS, inputs, OUTPUTS] that
 * `multiply` reads; zeros fill up the last one. */
static void pack(const float *matrix, int outputs, int inputs, int across, float *packed) {
    memset(packed, 0, sizeof(float) * blocks_of(outputs) * OUTPUTS * inputs);
    for (int o = 0; o < outputs; o++)
        for (int i = 0; i < inputs; i++)
            packed[(int64_t)(o / OUTPUTS) * inputs * OUTPUTS + i * OUTPUTS + o % OUTPUTS] =
                matrix[across ? (int64_t)i * outputs + o : (int64_t)o * inputs + i];
}

/* to = W from + bias of one panel; the bias, in whole blocks, may be NULL. Writes whole blocks. */
static __attribute__((noinline)) void multiply(const float *packed, const vec *from, int inputs, int outputs,
                                               const float *bias, vec *to) {
    for (int b = 0; b < blocks_of(outputs); b++, to += OUTPUTS * ROWS) {
        vec sum[OUTPUTS][ROWS];
        UNROLL
        for (int o = 0; o < OUTPUTS; o++)
            UNROLL
        for (int r = 0; r < ROWS; r++)
            sum[o][r] = all_of(bias ? bias[b * OUTPUTS + o] : 0.0f);
        const vec *numbers = from;
        for (int i = 0; i < inputs; i++, numbers += ROWS, packed += OUTPUTS) {
            vec row[ROWS];
            UNROLL
            for (int r = 0; r < ROWS; r++)
                row[r] = numbers[r];
            UNROLL
            for (int o = 0; o < OUTPUTS; o++) {
                const vec factor = all_of(packed[o]);
                UNROLL
                for (int r = 0; r < ROWS; r++)
                    ACCUMULATE(sum[o][r], factor, row[r]);
            }
        }
        UNROLL
        for (int o = 0; o < OUTPUTS; o++)
            UNROLL
        for (int r = 0; r < ROWS; r++)
            to[o * ROWS + r] = sum[o][r];
    }
}

/* sums[i][o] += the sum of g[o] x[i] over the rows and images of panels, for ROWS inputs and OUTPUTS outputs. */
INLINE void weight_tile(const vec *g, int g_stride, const vec *x, int x_stride, int panels, float *sums, int width) {
    vec sum[OUTPUTS][ROWS];
    UNROLL
    for (int o = 0; o < OUTPUTS; o++)
        UNROLL
    for (int i = 0; i < ROWS; i++)
        sum[o][i] = (vec){0};
    for (int p = 0; p < panels; p++, g += g_stride, x += x_stride)
        UNROLL
    for (int r = 0; r < ROWS; r++) {
        vec row[ROWS];
        UNROLL
        for (int i = 0; i < ROWS; i++)
            row[i] = x[i * ROWS + r];
        UNROLL
        for (int o = 0; o < OUTPUTS; o++) {
            const vec factor = g[o * ROWS + r];
            UNROLL
            for (int i = 0; i < ROWS; i++)
                ACCUMULATE(sum[o][i], factor, row[i]);
        }
    }
    UNROLL
    for (int i = 0; i < ROWS; i++) {
        quad columns[OUTPUTS], *to = (quad *)(sums + (int64_t)i * width);
        UNROLL
        for (int o = 0; o < OUTPUTS; o++)
            columns[o] = folded(sum[o][i]);
        transpose(columns);
        *to += (columns[0] + columns[1]) + (columns[2] + columns[3]);
    }
}

/* Adds the gradient of a matrix to sums [inputs, outputs], in whole tiles and blocks: from g, that of its products, and
 * x, its inputs. */
static void add_weight_gradient(const vec *g, int outputs, const vec *x, int inputs, int panels, float *sums) {
    const int tiles = tiles_of(inputs), blocks = blocks_of(outputs);
    for (int from = 0; from < tiles; from += TILES)
        for (int b = 0; b < blocks; b++)
            for (int t = from; t < tiles && t < from + TILES; t++)
                weight_tile(g + b * OUTPUTS * ROWS, stride_of(outputs), x + t * ROWS * ROWS, stride_of(inputs), panels,
                            sums + ((int64_t)t * ROWS * blocks + b) * OUTPUTS, blocks * OUTPUTS);
}

#endif
