#include "resize.h"

#include <math.h>
#include <string.h>

#include "across.h"
#include "pixels.h"

#define STRIP 64 /* values that are summed up side by side, in registers */

static double triangle(double x) { return x < 1.0 ? 1.0 - x : 0.0; }

static double keys(double x) { /* with a = -0.5 */
    if (x < 1.0)
        return (1.5 * x - 2.5) * x * x + 1;
    return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0.0;
}

/* Pillow's arithmetic step by step, since one unit of the last place may move a pixel. */
static bool weigh(struct buffer *weights, struct buffer *places, struct buffer *reals, int size, int side, bool cubic,
                  bool flip, struct axis *axis) {
    double scale = (double)size / side, spread = scale < 1.0 ? 1.0 : scale;
    double support = (cubic ? 2.0 : 1.0) * spread, narrow = 1.0 / spread;
    int taps = (int)ceil(support) * 2 + 1;
    int32_t *weight = room(weights, sizeof(int32_t) * (size_t)(side * taps));
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
        int32_t *row = weight + (size_t)(to * taps);
        for (int t = 0; t < taps; t++) {
            double share = t < count ? (sum != 0.0 ? real[t] / sum : real[t]) * (1 << BITS) : 0.0;
            row[t] = share < 0 ? (int32_t)(share - 0.5) : (int32_t)(share + 0.5);
        }
        place[2 * to] = first;
        place[2 * to + 1] = count;
    }
    *axis = (struct axis){size, side, taps, weight, place};
    return true;
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
    if (!line || (!passed && !down_first) ||
        !weigh(&scratch->weights[0], &scratch->places[0], &scratch->reals, from.width, side, cubic, flip, &x) ||
        !weigh(&scratch->weights[1], &scratch->places[1], &scratch->reals, from.height, side, cubic, false, &y) ||
        !begin_across(scratch, &x))
        return false;
    uint8_t *other = line + wide;
    for (int row = 0; passed && row < from.height; row++)
        across_row(scratch, &x, from.first + (size_t)row * from.stride, passed + (size_t)row * wide);
    for (int row = 0; row < side; row++, picture += 3 * (size_t)side) {
        if (down_first) {
            down(from.first, from.stride, 4 * (size_t)from.width, &y, row, other);
            across_row(scratch, &x, other, line);
        } else {
            down(passed, wide, wide, &y, row, line);
        }
        pack_row(line, side, picture);
    }
    return true;
}
