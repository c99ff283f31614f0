#include "resize.h"

#include <math.h>
#include <string.h>

#include "resize_row.h"
#include "pixels.h"

#define STRIP 64 /* values that are summed at once, in registers */

static double linear_kernel(double x) { return x < 1.0 ? 1.0 - x : 0.0; }

static double cubic_kernel(double x) { /* Keys' cubic with a = -0.5 */
    if (x < 1.0)
        return (1.5 * x - 2.5) * x * x + 1;
    return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0.0;
}

/* The weights of one axis, in exactly Pillow's arithmetic: a difference in the last place could change a pixel. */
static bool compute_weights(struct buffer *weights, struct buffer *ranges, struct buffer *doubles, int size, int side,
                            bool cubic, bool flip, struct axis *axis) {
    double scale = (double)size / side, spread = scale < 1.0 ? 1.0 : scale;
    double support = (cubic ? 2.0 : 1.0) * spread, narrow = 1.0 / spread;
    int taps = (int)ceil(support) * 2 + 1;
    int32_t *weight = ensure_capacity(weights, sizeof(int32_t) * (size_t)(side * taps));
    int32_t *range = ensure_capacity(ranges, sizeof(int32_t) * 2 * (size_t)side);
    double *real = ensure_capacity(doubles, sizeof(double) * (size_t)taps);
    if (!weight || !range || !real)
        return false;
    for (int i = 0; i < side; i++) {
        double centre = (i + 0.5) * scale, sum = 0.0;
        int first = (int)(centre - support + 0.5), end = (int)(centre + support + 0.5);
        first = first < 0 ? 0 : first;
        int count = (end > size ? size : end) - first;
        for (int t = 0; t < count; t++) {
            double x = fabs((t + first - centre + 0.5) * narrow);
            real[t] = cubic ? cubic_kernel(x) : linear_kernel(x);
            sum += real[t];
        }
        int to = flip ? side - 1 - i : i;
        int32_t *row = weight + (size_t)(to * taps);
        for (int t = 0; t < taps; t++) {
            double share = t < count ? (sum != 0.0 ? real[t] / sum : real[t]) * (1 << BITS) : 0.0;
            row[t] = share < 0 ? (int32_t)(share - 0.5) : (int32_t)(share + 0.5);
        }
        range[2 * to] = first;
        range[2 * to + 1] = count;
    }
    *axis = (struct axis){size, side, taps, weight, range};
    return true;
}

/* Output row y: the weighted sum of rows of `size` values, which is rounded up to a multiple of STRIP. */
static void sum_rows(const uint8_t *from, size_t stride, size_t size, const struct axis *axis, int y, uint8_t *to) {
    const int32_t *weights = axis->weights + (size_t)y * (size_t)axis->taps;
    const uint8_t *rows = from + (size_t)axis->ranges[2 * y] * stride;
    int count = axis->ranges[2 * y + 1];
    for (size_t x = 0; x < size; x += STRIP, to += STRIP) {
        int32_t sums[STRIP];
        for (int i = 0; i < STRIP; i++)
            sums[i] = 1 << (BITS - 1);
        for (int t = 0; t < count; t++)
            for (int i = 0; i < STRIP; i++)
                sums[i] += rows[(size_t)t * stride + x + (size_t)i] * weights[t];
        for (int i = 0; i < STRIP; i++)
            to[i] = round_sum(sums[i]);
    }
}

static size_t padded_width(int width) { return (4 * (size_t)width + STRIP - 1) / STRIP * STRIP; }

bool resize(struct scratch *scratch, struct pixels from, uint8_t *picture, int side, bool cubic, bool flip) {
    struct axis x, y;
    size_t wide = padded_width(side), tall = padded_width(from.width);
    bool down_first = from.height > side && from.height - side > 2 * (from.width - side); /* as of Pillow 13 */
    uint8_t *first_pass = down_first ? NULL : ensure_capacity(&scratch->first_pass, wide * (size_t)from.height);
    uint8_t *line = ensure_capacity(&scratch->line, wide + tall);
    if (!line || (!first_pass && !down_first) ||
        !compute_weights(&scratch->weights[0], &scratch->ranges[0], &scratch->doubles, from.width, side, cubic, flip,
                         &x) ||
        !compute_weights(&scratch->weights[1], &scratch->ranges[1], &scratch->doubles, from.height, side, cubic, false,
                         &y) ||
        !prepare_row_weights(scratch, &x))
        return false;
    uint8_t *other = line + wide;
    for (int row = 0; first_pass && row < from.height; row++)
        resize_row(scratch, &x, from.first + (size_t)row * from.stride, first_pass + (size_t)row * wide);
    for (int row = 0; row < side; row++, picture += 3 * (size_t)side) {
        if (down_first) {
            sum_rows(from.first, from.stride, 4 * (size_t)from.width, &y, row, other);
            resize_row(scratch, &x, other, line);
        } else {
            sum_rows(first_pass, wide, wide, &y, row, line);
        }
        pack_row(line, side, picture);
    }
    return true;
}
