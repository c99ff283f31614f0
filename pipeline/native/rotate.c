/* A rotated row: coordinates in double precision, sums in single. */
#include <math.h>
#include <string.h>

#include "lanes.h"
#include "move.h"

#define BITS 16        /* of a sum's fraction: what single precision has for 255 */
#define DOUBT 4        /* of its units: seven roundings, each by half of one at most */
#define CUBIC_DOUBT 32 /* weights, products and sums come to 28: values up to 382, sums of weights up to 1.5 */
#define COLORS 0xffffff

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

void begin_rotation(struct move *move) {
    for (int axis = 0; axis < 2; axis++)
        for (int i = 0; i < move->width; i++)
            move->across[axis][i] = move->matrix[3 * axis] * (i + 0.5);
}

/* Where each column's first tap lies, and how far to the next one across (x) and down (y) its point is. */
static void locate(const struct move *move, int row, int first, int last) {
    const double *k = move->matrix, end_x = k[2], end_y = k[5];
    const double start_x = k[1] * (row + 0.5), start_y = k[4] * (row + 0.5);
    const double *restrict across_x = move->across[0], *restrict across_y = move->across[1];
    float *restrict x = move->x, *restrict y = move->y;
    int32_t *restrict at = move->at, stride = (int32_t)move->stride, edge = EDGE - move->cubic;
    for (int i = first; i < last; i++) { /* in the order of Pillow's sums */
        double place_x = across_x[i] + start_x + end_x - 0.5, place_y = across_y[i] + start_y + end_y - 0.5;
        int32_t left = (int32_t)(place_x + 1) - 1, top = (int32_t)(place_y + 1) - 1; /* floor, from -1 on */
        x[i] = (float)(place_x - left);
        y[i] = (float)(place_y - top);
        at[i] = (top + edge) * stride + 4 * (left + edge);
    }
}

/* From here on with fused multiply-adds, which round less: a value in doubt is made again in Pillow's arithmetic. */
#pragma GCC optimize("fp-contract=fast")

static inline void weigh(float x, float *weights) { /* Pillow's cubic has a = -1 */
    weights[0] = x * (-1 + x * (2 - x));
    weights[1] = 1 + x * x * (x - 2);
    weights[2] = x * (1 + x * (1 - x));
    weights[3] = x * x * (x - 1);
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
        weigh(move->x[i], move->weights_x + 4 * i);
        weigh(move->y[i], move->weights_y + 4 * i);
    }
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

static void cut(const float *restrict sums, int count, uint8_t *restrict line, uint8_t *restrict doubt) {
    for (int i = 0; i < count; i++) {
        int32_t sum = (int32_t)(sums[i] * (1 << BITS)), value = sum >> BITS;
        value = value < 0 ? 0 : value;
        line[i] = (uint8_t)(value > 255 ? 255 : value);
        doubt[i] = ((sum + CUBIC_DOUBT) & ((1 << BITS) - 1)) < 2 * CUBIC_DOUBT;
    }
}

/* Two pixels of a row and the two below them for each column, side by side. */
static void gather(const struct move *move, int first, int last) {
    const uint8_t *restrict padded = move->padded, *restrict next = padded + move->stride;
    const int32_t *restrict at = move->at;
    uint32_t *restrict above = move->above, *restrict below = move->below;
    for (int i = first; i < last; i++) {
        memcpy(above + 2 * i, padded + at[i], 8);
        memcpy(below + 2 * i, next + at[i], 8);
    }
}

static inline float channel(uint32_t pixel, int shift) { return (float)(int32_t)(pixel >> shift & 255); }

static void add_linear(const struct move *move, int first, int last) {
    const uint32_t *restrict above = move->above, *restrict below = move->below;
    const float *restrict x = move->x, *restrict y = move->y;
    uint32_t *restrict line = (uint32_t *)move->line, *restrict doubt = (uint32_t *)move->doubt;
    for (int i = first; i < last; i++) {
        uint32_t a = above[2 * i], b = above[2 * i + 1], c = below[2 * i], d = below[2 * i + 1], pixel = 0, unsure = 0;
        uint32_t change = (a ^ b) | (c ^ d) | (a ^ c); /* no change, no doubt: of four equal values it is exact */
#pragma GCC unroll 3
        for (int shift = 0; shift < 24; shift += 8) {
            float up = channel(a, shift), low = channel(c, shift);
            up += (channel(b, shift) - up) * x[i];
            low += (channel(d, shift) - low) * x[i];
            uint32_t sum = (uint32_t)(int32_t)((up + (low - up) * y[i]) * (1 << BITS));
            pixel |= sum >> BITS << shift;
            unsure |= ((sum + DOUBT) & ((1 << BITS) - 1)) < 2 * DOUBT ? change & 255U << shift : 0;
        }
        line[i] = pixel;
        doubt[i] = unsure;
    }
}

void rotate_row(const struct move *move, int row, int first, int last) {
    locate(move, row, first, last);
    if (move->cubic) {
        add_cubic(move, first, last);
        cut(move->sums + 4 * first, 4 * (last - first), move->line + 4 * first, move->doubt + 4 * first);
    } else {
        gather(move, first, last);
        add_linear(move, first, last);
    }
    for (int i = first; i < last; i++) {
        uint32_t doubt;
        memcpy(&doubt, move->doubt + 4 * i, sizeof doubt);
        if (doubt & COLORS)
            move_exactly(move, row, i, move->line + 4 * i);
    }
}
