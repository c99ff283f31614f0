#include "resize.h"

#include <math.h>
#include <string.h>

#include "lanes.h"
#include "pixels.h"

#define BITS 22 /* of a weight's fraction; Pillow's Resample.c: 32 less 8 of the values less 2 of headroom */

#define STRIP 64 /* values that are summed up side by side, in registers */

/* The weights of one axis: output place i is a sum of `count` inputs from `first` on. */
struct axis {
    int taps;               /* in a row of the weights; what `count` leaves of it is 0 */
    const int32_t *weights; /* [side][taps][copies] */
    const int32_t *places;  /* [side][2]: first, count */
};

static double triangle(double x) { return x < 1.0 ? 1.0 - x : 0.0; }

static double keys(double x) { /* with a = -0.5 */
    if (x < 1.0)
        return (1.5 * x - 2.5) * x * x + 1;
    return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0.0;
}

/* Pillow's arithmetic step by step, since one unit of the last place may move a pixel. */
static bool weigh(struct buffer *weights, struct buffer *places, struct buffer *reals, int size, int side, bool cubic,
                  bool flip, int copies, struct axis *axis) {
    double scale = (double)size / side, spread = scale < 1.0 ? 1.0 : scale;
    double support = (cubic ? 2.0 : 1.0) * spread, narrow = 1.0 / spread;
    int taps = ((int)ceil(support) * 2 + 1 + TAPS - 1) / TAPS * TAPS;
    int32_t *weight = room(weights, sizeof(int32_t) * (size_t)(side * taps * copies));
    int32_t *place = room(places, sizeof(int32_t) * 2 * (size_t)side);
    double *real = room(reals, sizeof(double) * (size_t)taps);
    if (!weight || !place || !real)
        return false;
    for (int i = 0; i < side; i++) {
        double centre = (i + 0.5) * scale, sum = 0.0;
        int first = (int)(centre - support + 0.5), end = (int)(centre + support + 0.5);
        first = first < 0 ? 0 : first;
        int count = (end > size ? size : end) - first;
        for (int t = 0; t < count; t++) {
            double x = fabs((t + first - centre + 0.5) * narrow);
            real[t] = cubic ? keys(x) : triangle(x);
            sum += real[t];
        }
        int to = flip ? side - 1 - i : i;
        int32_t *row = weight + (size_t)(to * taps * copies);
        for (int t = 0; t < taps; t++, row += copies) {
            double share = t < count ? (sum != 0.0 ? real[t] / sum : real[t]) * (1 << BITS) : 0.0;
            for (int c = 0; c < copies; c++)
                row[c] = share < 0 ? (int32_t)(share - 0.5) : (int32_t)(share + 0.5);
        }
        place[2 * to] = first;
        place[2 * to + 1] = count;
    }
    *axis = (struct axis){taps, weight, place};
    return true;
}

static inline uint8_t rounded(int32_t sum) {
    int32_t value = sum >> BITS;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

/* One row of pixels to one of `side`, by way of their sums. */
static void across(const uint8_t *from, const struct axis *axis, int side, int32_t *sums, uint8_t *to) {
    const int32_t *weights = axis->weights;
    for (int x = 0; x < side; x++, weights += 4 * axis->taps, sums += 4) {
        const uint8_t *pixel = from + 4 * (size_t)axis->places[2 * x];
        several sum = {0};
        for (int t = 0, count = axis->places[2 * x + 1]; t < count; t += TAPS)
            sum += widen(pixel + 4 * t) * load(weights + 4 * t);
        one total = sum_of(sum) + (1 << (BITS - 1));
        memcpy(sums, &total, sizeof total);
    }
    sums -= 4 * side;
    for (int i = 0; i < 4 * side; i++)
        to[i] = rounded(sums[i]);
}

/* Output row y of `size` values, rounded up to whole strips. */
static void down(const uint8_t *from, size_t stride, size_t size, const struct axis *axis, int y, uint8_t *to) {
    const int32_t *weights = axis->weights + (size_t)y * (size_t)axis->taps;
    const uint8_t *rows = from + (size_t)axis->places[2 * y] * stride;
    int count = axis->places[2 * y + 1];
    for (size_t x = 0; x < size; x += STRIP, to += STRIP) {
        int32_t sums[STRIP];
        for (int i = 0; i < STRIP; i++)
            sums[i] = 1 << (BITS - 1);
        for (int t = 0; t < count; t++)
            for (int i = 0; i < STRIP; i++)
                sums[i] += rows[(size_t)t * stride + x + (size_t)i] * weights[t];
        for (int i = 0; i < STRIP; i++)
            to[i] = rounded(sums[i]);
    }
}

static size_t strips(int width) { return (4 * (size_t)width + STRIP - 1) / STRIP * STRIP; }

bool resize(struct scratch *scratch, struct pixels from, uint8_t *picture, int side, bool cubic, bool flip) {
    struct axis x, y;
    size_t wide = strips(side), tall = strips(from.width);
    bool down_first = from.height > side && from.height - side > 2 * (from.width - side); /* as of Pillow 13 */
    uint8_t *passed = down_first ? NULL : room(&scratch->passed, wide * (size_t)from.height);
    uint8_t *line = room(&scratch->line, wide + tall);
    int32_t *sums = room(&scratch->sums, sizeof(int32_t) * 4 * (size_t)side);
    if (!line || !sums || (!passed && !down_first) ||
        !weigh(&scratch->weights[0], &scratch->places[0], &scratch->reals, from.width, side, cubic, flip, 4, &x) ||
        !weigh(&scratch->weights[1], &scratch->places[1], &scratch->reals, from.height, side, cubic, false, 1, &y))
        return false;
    uint8_t *other = line + wide;
    for (int row = 0; passed && row < from.height; row++)
        across(from.first + (size_t)row * from.stride, &x, side, sums, passed + (size_t)row * wide);
    for (int row = 0; row < side; row++, picture += 3 * (size_t)side) {
        if (down_first) {
            down(from.first, from.stride, 4 * (size_t)from.width, &y, row, other);
            across(other, &x, side, sums, line);
        } else {
            down(passed, wide, wide, &y, row, line);
        }
        pack_row(line, side, picture);
    }
    return true;
}
