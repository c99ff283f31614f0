/* A rotated row: coordinates in fixed point, sums in single precision. */
#include <math.h>
#include <string.h>

#include "lanes.h"
#include "move.h"

#define PLACE 20 /* bits of a coordinate's fraction */
#define BITS 11  /* of a sum's */
#define DOUBT 4  /* of its units, 0.0020: coordinates off by 2^-20 make 0.0011, single precision 0.0003 */

typedef float floats __attribute__((vector_size(16 * TAPS)));
typedef float quad __attribute__((vector_size(16)));

static const several SPREAD = {
    0, 0, 0, 0,
#if TAPS > 1
    1, 1, 1, 1,
#endif
#if TAPS > 2
    2, 2, 2, 2, 3, 3, 3, 3,
#endif
};

static inline uint32_t fixed(double number) { return (uint32_t)(int64_t)rint(number * (1 << PLACE)); }

void begin_rotation(struct move *move) {
    for (int axis = 0; axis < 2; axis++)
        for (int i = 0; i < move->width; i++)
            move->across[axis][i] = fixed(move->matrix[3 * axis] * (i + 0.5));
}

static inline void weigh(float x, float *weights) { /* Pillow's cubic has a = -1 */
    weights[0] = x * (-1 + x * (2 - x));
    weights[1] = 1 + x * x * (x - 2);
    weights[2] = x * (1 + x * (1 - x));
    weights[3] = x * x * (x - 1);
}

/* Where each column's first tap lies, and its weights: bicubic across and down, bilinear of all four taps. */
static inline __attribute__((always_inline)) void locate(const struct move *move, int row, int first, int last,
                                                         bool cubic) {
    const double *k = move->matrix;
    uint32_t start_x = fixed(k[1] * (row + 0.5) + k[2] - 0.5), start_y = fixed(k[4] * (row + 0.5) + k[5] - 0.5);
    const uint32_t *across_x = move->across[0], *across_y = move->across[1];
    float *restrict weights_x = move->weights_x, *restrict weights_y = move->weights_y, unit = 1.0f / (1 << PLACE);
    int32_t *restrict at = move->at, stride = (int32_t)move->stride, edge = EDGE - cubic, mask = (1 << PLACE) - 1;
    for (int i = first; i < last; i++) {
        int32_t place_x = (int32_t)(across_x[i] + start_x), place_y = (int32_t)(across_y[i] + start_y);
        float x = (float)(place_x & mask) * unit, y = (float)(place_y & mask) * unit;
        at[i] = ((place_y >> PLACE) + edge) * stride + 4 * ((place_x >> PLACE) + edge);
        if (cubic) {
            weigh(x, weights_x + 4 * i);
            weigh(y, weights_y + 4 * i);
        } else {
            weights_x[4 * i] = (1 - x) * (1 - y);
            weights_x[4 * i + 1] = x * (1 - y);
            weights_x[4 * i + 2] = (1 - x) * y;
            weights_x[4 * i + 3] = x * y;
        }
    }
}

static inline floats row_of(const uint8_t *pixels) { return __builtin_convertvector(widen(pixels), floats); }

/* The sum of pixels by their weights, of which there is one for each. */
static inline quad weighed(floats pixels, const float *weights) {
    floats each;
    memcpy(&each, weights, sizeof each);
    pixels *= __builtin_shuffle(each, SPREAD);
    quad parts[TAPS];
    memcpy(parts, &pixels, sizeof parts);
    quad sum = parts[0];
    for (int k = 1; k < TAPS; k++)
        sum += parts[k];
    return sum;
}

static void add_cubic(const struct move *move, int first, int last) {
    size_t stride = move->stride;
    for (int i = first; i < last; i++) {
        const uint8_t *pixel = move->padded + move->at[i];
        const float *y = move->weights_y + 4 * i;
        quad sum = {0};
        for (int t = 0; t < 4; t += TAPS, pixel += 4 * TAPS) {
            floats down = row_of(pixel) * y[0] + row_of(pixel + stride) * y[1];
            down += row_of(pixel + 2 * stride) * y[2] + row_of(pixel + 3 * stride) * y[3];
            sum += weighed(down, move->weights_x + 4 * i + t);
        }
        memcpy(move->sums + 4 * i, &sum, sizeof sum);
    }
}

static void add_linear(const struct move *move, int first, int last) {
    uint8_t *taps = (uint8_t *)move->weights_y; /* free: two pixels and the two below them */
    for (int i = first; i < last; i++) {
        memcpy(taps + 16 * i, move->padded + move->at[i], 8);
        memcpy(taps + 16 * i + 8, move->padded + move->at[i] + move->stride, 8);
    }
    for (int i = first; i < last; i++) {
        quad sum = {0};
        for (int t = 0; t < 4; t += TAPS)
            sum += weighed(row_of(taps + 16 * i + 4 * t), move->weights_x + 4 * i + t);
        memcpy(move->sums + 4 * i, &sum, sizeof sum);
    }
}

static void cut(const float *restrict sums, int count, uint8_t *restrict line, uint8_t *restrict doubt) {
    for (int i = 0; i < count; i++) {
        int32_t sum = (int32_t)(sums[i] * (1 << BITS)), value = sum >> BITS;
        value = value < 0 ? 0 : value;
        line[i] = (uint8_t)(value > 255 ? 255 : value);
        doubt[i] = ((sum + DOUBT) & ((1 << BITS) - 1)) < 2 * DOUBT;
    }
}

void rotate_row(const struct move *move, int row, int first, int last) {
    if (move->cubic) {
        locate(move, row, first, last, true);
        add_cubic(move, first, last);
    } else {
        locate(move, row, first, last, false);
        add_linear(move, first, last);
    }
    cut(move->sums + 4 * first, 4 * (last - first), move->line + 4 * first, move->doubt + 4 * first);
    for (int i = first; i < last; i++) {
        const uint8_t *doubt = move->doubt + 4 * i;
        if (doubt[0] | doubt[1] | doubt[2])
            move_exactly(move, row, i, move->line + 4 * i);
    }
}
