#include "resize.h"

#include <math.h>
#include <string.h>

#include "pixels.h"
#include "simd.h"

#define BITS 22 /* fractional bits of a weight, as in Pillow's Resample.c: 32 - 8 for the values - 2 for headroom */
#define ROWS (VECTOR / 4) /* that are resized horizontally at once: a vector has a pixel of each */

typedef uint32_t four __attribute__((vector_size(16))); /* pixels of four bytes */

/* The weights of one axis: output i is the weighted sum of `count` inputs, beginning with number `first`. */
struct axis {
    int side;               /* number of outputs */
    int taps;               /* length of a row of weights, of which the first `count` are used; the others are 0 */
    int longest;            /* the largest count */
    const int32_t *weights; /* [side][taps] */
    const int32_t *ranges;  /* [side][2]: first, count */
};

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
    int taps = (int)ceil(support) * 2 + 1, longest = 0;
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
            double fraction = t < count ? (sum != 0.0 ? real[t] / sum : real[t]) * (1 << BITS) : 0.0;
            row[t] = fraction < 0 ? (int32_t)(fraction - 0.5) : (int32_t)(fraction + 0.5);
        }
        range[2 * to] = first;
        range[2 * to + 1] = count;
        longest = count > longest ? count : longest;
    }
    *axis = (struct axis){side, taps, longest, weight, range};
    return true;
}

/* VECTOR values: the weighted sum of `count` times as many, which are `stride` bytes apart. Compilers multiply and add
 * well, but convert bytes to integers and back slowly. */
static inline void weighted_sum(const uint8_t *from, size_t stride, const int32_t *weights, int count, uint8_t *to) {
#ifdef SIMD
    const vector zero = {0};
    vector values;
    int_vector sums[4];
    for (int k = 0; k < 4; k++)
        sums[k] = (int_vector){0} + (1 << (BITS - 1));
    for (int t = 0; t < count; t++, from += stride) {
        memcpy(&values, from, VECTOR);
        const vector low = SIMD(unpacklo_epi8)(values, zero), high = SIMD(unpackhi_epi8)(values, zero);
        sums[0] += (int_vector)SIMD(unpacklo_epi16)(low, zero) * weights[t];
        sums[1] += (int_vector)SIMD(unpackhi_epi16)(low, zero) * weights[t];
        sums[2] += (int_vector)SIMD(unpacklo_epi16)(high, zero) * weights[t];
        sums[3] += (int_vector)SIMD(unpackhi_epi16)(high, zero) * weights[t];
    }
    for (int k = 0; k < 4; k++)
        sums[k] >>= BITS;
    const vector low = SIMD(packs_epi32)((vector)sums[0], (vector)sums[1]);
    values = SIMD(packus_epi16)(low, SIMD(packs_epi32)((vector)sums[2], (vector)sums[3]));
    memcpy(to, &values, VECTOR);
#else
    int32_t sums[VECTOR];
    for (int i = 0; i < VECTOR; i++)
        sums[i] = 1 << (BITS - 1);
    for (int t = 0; t < count; t++, from += stride)
        for (int i = 0; i < VECTOR; i++)
            sums[i] += from[i] * weights[t];
    for (int i = 0; i < VECTOR; i++) {
        int32_t value = sums[i] >> BITS;
        to[i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
#endif
}

/* Output row y, of `size` values rounded up to whole vectors. */
static void resize_down(const uint8_t *from, size_t stride, size_t size, const struct axis *axis, int y, uint8_t *to) {
    const uint8_t *rows = from + (size_t)axis->ranges[2 * y] * stride;
    for (size_t x = 0; x < size; x += VECTOR)
        weighted_sum(rows + x, stride, axis->weights + y * axis->taps, axis->ranges[2 * y + 1], to + x);
}

/* Exchanges rows and columns of 4 x 4 pixels of four bytes. */
static inline void transpose(const uint8_t *const rows[4], size_t at, four columns[4]) {
    four row[4];
    for (int k = 0; k < 4; k++)
        memcpy(row + k, rows[k] + at, sizeof *row);
    const four a = SHUFFLE(four, row[0], row[1], 0, 4, 1, 5), b = SHUFFLE(four, row[2], row[3], 0, 4, 1, 5);
    const four c = SHUFFLE(four, row[0], row[1], 2, 6, 3, 7), d = SHUFFLE(four, row[2], row[3], 2, 6, 3, 7);
    columns[0] = SHUFFLE(four, a, b, 0, 1, 4, 5);
    columns[1] = SHUFFLE(four, a, b, 2, 3, 6, 7);
    columns[2] = SHUFFLE(four, c, d, 0, 1, 4, 5);
    columns[3] = SHUFFLE(four, c, d, 2, 3, 6, 7);
}

/* Resize `count` rows of pixels of four bytes, at most ROWS, to ROWS rows of pixels of three bytes, `to_stride` apart.
 * They are made columns first: what is next to each other then has the same weight. */
static void resize_across(struct scratch *scratch, const uint8_t *from, size_t stride, int count, int width,
                          const struct axis *axis, uint8_t *to, size_t to_stride) {
    uint8_t *columns = scratch->columns.data, *sums = scratch->sums.data;
    four pixels[4];
    for (int r = 0; r < ROWS; r += 4) {
        const uint8_t *rows[4];
        for (int k = 0; k < 4; k++) /* the last row again in place of missing ones */
            rows[k] = from + stride * (size_t)(r + k < count ? r + k : count - 1);
        for (int x = 0; x < width; x += 4) {
            transpose(rows, 4 * (size_t)x, pixels);
            for (int k = 0; k < 4; k++)
                memcpy(columns + VECTOR * (x + k) + 4 * r, pixels + k, sizeof *pixels);
        }
    }
    for (int x = 0; x < axis->side; x++) /* as many taps for all of them: the end of the loop is then predicted */
        weighted_sum(columns + VECTOR * axis->ranges[2 * x], VECTOR, axis->weights + x * axis->taps, axis->longest,
                     sums + VECTOR * x);
    const uint8_t *rows[] = {sums, sums + VECTOR, sums + 2 * VECTOR, sums + 3 * VECTOR};
    for (int r = 0; r < ROWS; r += 4)
        for (int x = 0; x < axis->side; x += 4) {
            transpose(rows, (size_t)(VECTOR * x + 4 * r), pixels);
            for (int k = 0; k < 4; k++) {
                const sixteen packed = pack_four((sixteen)pixels[k]);
                memcpy(to + (size_t)(r + k) * to_stride + 3 * (size_t)x, &packed, sizeof packed);
            }
        }
}

static size_t padded(size_t size) { return (size + VECTOR - 1) / VECTOR * VECTOR; }

bool resize(struct scratch *scratch, struct pixels from, uint8_t *image, int side, bool cubic, bool flip) {
    struct axis x, y;
    const size_t row = 3 * (size_t)side, narrow = padded(row + 16), wide = padded(4 * (size_t)from.width);
    const int tall = (from.height + ROWS - 1) / ROWS * ROWS;
    const bool down_first = from.height > side && from.height - side > 2 * (from.width - side); /* as of Pillow 13 */
    if (!compute_weights(&scratch->weights[0], &scratch->ranges[0], &scratch->doubles, from.width, side, cubic, flip,
                         &x) ||
        !compute_weights(&scratch->weights[1], &scratch->ranges[1], &scratch->doubles, from.height, side, cubic, false,
                         &y))
        return false;
    uint8_t *across = ensure_capacity(&scratch->across, narrow * (size_t)(down_first ? ROWS : tall));
    uint8_t *down = ensure_capacity(&scratch->down, down_first ? wide * ROWS : narrow);
    if (!across || !down || !ensure_capacity(&scratch->columns, VECTOR * (size_t)(from.width + x.longest + 3)) ||
        !ensure_capacity(&scratch->sums, VECTOR * (size_t)(side + 3)))
        return false;
    if (down_first)
        for (int r = 0; r < side; r += ROWS) {
            const int count = side - r < ROWS ? side - r : ROWS;
            for (int k = 0; k < count; k++)
                resize_down(from.first, from.stride, 4 * (size_t)from.width, &y, r + k, down + (size_t)k * wide);
            resize_across(scratch, down, wide, count, from.width, &x, across, narrow);
            for (int k = 0; k < count; k++)
                memcpy(image + (size_t)(r + k) * row, across + (size_t)k * narrow, row);
        }
    else {
        for (int r = 0; r < from.height; r += ROWS)
            resize_across(scratch, from.first + (size_t)r * from.stride, from.stride, from.height - r, from.width, &x,
                          across + (size_t)r * narrow, narrow);
        for (int r = 0; r < side; r++) {
            resize_down(across, narrow, row, &y, r, down);
            memcpy(image + (size_t)r * row, down, row);
        }
    }
    return true;
}
