/* Rows of a rotation: coordinates in double precision, sums in single precision. */
#include <math.h>
#include <string.h>

#include "shuffle.h"
#include "simd.h"
#include "move.h"

#define BITS 16            /* fractional bits of a sum: what single precision has for 255 */
#define TOLERANCE 4        /* in units of 2 ** -BITS: seven roundings of at most half a unit */
#define CUBIC_TOLERANCE 32 /* rounding adds up to 28: values up to 382, sums of weights up to 1.5 */
#define COLORS 0xffffff
#define BLOCK 16 /* pixels that are checked at once */

typedef float floats __attribute__((vector_size(VECTOR)));
typedef uint32_t pixels __attribute__((vector_size(16)));
typedef float float_pixel __attribute__((vector_size(16)));

#if TAPS == 4
#define SPREAD 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3
#define LOW 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define EVEN 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#elif TAPS == 2
#define SPREAD 0, 0, 0, 0, 1, 1, 1, 1
#else
#define SPREAD 0, 0, 0, 0
#endif

void begin_rotation(struct move *move) {
    for (int axis = 0; axis < 2; axis++)
        for (int i = 0; i < move->width; i++)
            move->across[axis][i] = move->matrix[3 * axis] * (i + 0.5);
}

/* The offset of each column's first tap, and the fractions x and y of its source point. */
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

/* From here on with fused multiply-adds, which round less: uncertain values are recomputed in Pillow's arithmetic. */
#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

static inline void compute_weights(float x, float *weights) { /* Pillow's cubic has a = -1 */
    weights[0] = x * (-1 + x * (2 - x));
    weights[1] = 1 + x * x * (x - 2);
    weights[2] = x * (1 + x * (1 - x));
    weights[3] = x * x * (x - 1);
}

static inline floats row_of(const uint8_t *pixels) { return __builtin_convertvector(widen(pixels), floats); }

/* Each pixel times its weight. */
static inline floats weighed(floats pixels, const float *weights) {
    floats each;
    memcpy(&each, weights, sizeof each);
    return pixels * (floats)SHUFFLE(int_vector, each, each, SPREAD);
}

/* The weighted sum of a column's taps; the TAPS pixels of the result are not added up yet. */
static inline floats taps(const struct move *move, int column) {
    const uint8_t *pixel = move->padded + move->at[column];
    const float *x = move->weights_x + 4 * column, *y = move->weights_y + 4 * column;
    size_t stride = move->stride;
    floats sum = {0};
    for (int t = 0; t < 4; t += TAPS, pixel += 4 * TAPS) {
        floats down = row_of(pixel) * y[0] + row_of(pixel + stride) * y[1];
        down += row_of(pixel + 2 * stride) * y[2] + row_of(pixel + 3 * stride) * y[3];
        sum += weighed(down, x + t);
    }
    return sum;
}

#if TAPS == 4
/* The sums of four columns' taps: adds halves of two columns at a time, twice. */
static inline floats sums_of(floats a, floats b, floats c, floats d) {
    floats ab = (floats)SHUFFLE(int_vector, a, b, LOW) + (floats)SHUFFLE(int_vector, a, b, HIGH);
    floats cd = (floats)SHUFFLE(int_vector, c, d, LOW) + (floats)SHUFFLE(int_vector, c, d, HIGH);
    return (floats)SHUFFLE(int_vector, ab, cd, EVEN) + (floats)SHUFFLE(int_vector, ab, cd, ODD);
}
#endif

static void add_cubic(const struct move *move, int first, int last) {
    for (int i = first; i < last; i++) {
        compute_weights(move->x[i], move->weights_x + 4 * i);
        compute_weights(move->y[i], move->weights_y + 4 * i);
    }
    int i = first;
#if TAPS == 4
    for (; i + 4 <= last; i += 4) {
        floats sums = sums_of(taps(move, i), taps(move, i + 1), taps(move, i + 2), taps(move, i + 3));
        memcpy(move->sums + 4 * i, &sums, sizeof sums);
    }
#endif
    for (; i < last; i++) {
        floats made = taps(move, i);
        float_pixel parts[TAPS];
        memcpy(parts, &made, sizeof parts);
        float_pixel sum = parts[0];
        for (int k = 1; k < TAPS; k++)
            sum += parts[k];
        memcpy(move->sums + 4 * i, &sum, sizeof sum);
    }
}

static void clip(const float *restrict sums, int count, uint8_t *restrict line, uint8_t *restrict uncertain) {
    for (int i = 0; i < count; i++) {
        int32_t sum = (int32_t)(sums[i] * (1 << BITS)), value = sum >> BITS;
        value = value < 0 ? 0 : value;
        line[i] = (uint8_t)(value > 255 ? 255 : value);
        bool near = ((sum + CUBIC_TOLERANCE) & ((1 << BITS) - 1)) < 2 * CUBIC_TOLERANCE;
        bool shown = (uint32_t)(sum - CUBIC_TOLERANCE) < 255U << BITS; /* below it is clipped to 0, above it to 255 */
        uncertain[i] = near & shown;
    }
}

/* For each column, two pixels of a row and the two below them. */
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
    uint32_t *restrict line = (uint32_t *)move->line, *restrict uncertain = (uint32_t *)move->uncertain;
    for (int i = first; i < last; i++) {
        uint32_t a = above[2 * i], b = above[2 * i + 1], c = below[2 * i], d = below[2 * i + 1], pixel = 0,
                 uncertain_bits = 0;
        uint32_t change = (a ^ b) | (c ^ d) | (a ^ c); /* four equal values are exact */
#pragma GCC unroll 3
        for (int shift = 0; shift < 24; shift += 8) {
            float up = channel(a, shift), low = channel(c, shift);
            up += (channel(b, shift) - up) * x[i];
            low += (channel(d, shift) - low) * x[i];
            uint32_t sum = (uint32_t)(int32_t)((up + (low - up) * y[i]) * (1 << BITS));
            pixel |= sum >> BITS << shift;
            uncertain_bits |= ((sum + TOLERANCE) & ((1 << BITS) - 1)) < 2 * TOLERANCE ? change & 255U << shift : 0;
        }
        line[i] = pixel;
        uncertain[i] = uncertain_bits;
    }
}

/* Whether all 16 taps are the same pixel, as in an overexposed sky: then it is the result. */
static bool is_flat(const uint8_t *pixel, size_t stride) {
    pixels first, row, change = {0};
    memcpy(&first, pixel, sizeof first);
    first = (pixels){first[0], first[0], first[0], first[0]};
    for (int r = 0; r < 4; r++, pixel += stride) {
        memcpy(&row, pixel, sizeof row);
        change |= row ^ first;
    }
    return !((change[0] | change[1] | change[2] | change[3]) & COLORS);
}

static void recompute_pixel(const struct move *move, int row, int column) {
    const uint8_t *pixel = move->padded + move->at[column];
    uint8_t *to = move->line + 4 * column;
    if (move->cubic && is_flat(pixel, move->stride))
        memcpy(to, pixel, 4);
    else
        move_exactly(move, row, column, to);
}

static bool any_uncertain(const struct move *move, int first, int last) {
    uint32_t any = 0;
    for (int i = first; i < last; i++) {
        uint32_t uncertain;
        memcpy(&uncertain, move->uncertain + 4 * i, sizeof uncertain);
        any |= uncertain;
    }
    return any & COLORS;
}

void rotate_row(const struct move *move, int row, int first, int last) {
    locate(move, row, first, last);
    if (move->cubic) {
        add_cubic(move, first, last);
        clip(move->sums + 4 * first, 4 * (last - first), move->line + 4 * first, move->uncertain + 4 * first);
    } else {
        gather(move, first, last);
        add_linear(move, first, last);
    }
    for (int i = first; i < last; i += BLOCK) {
        int end = last - i < BLOCK ? last : i + BLOCK;
        if (any_uncertain(move, i, end))
            for (int k = i; k < end; k++)
                if (any_uncertain(move, k, k + 1))
                    recompute_pixel(move, row, k);
    }
}
