/* Rows of a shear or translation. The fraction along the other axis is exactly zero, so that four taps along one axis
 * suffice, and neighbouring pixels read neighbouring pixels. If y shifts by another amount in each column, rows with
 * each column shifted by whole pixels are made first. Sums are integers; a piece of the row with an uncertain value is
 * recomputed in Pillow's double precision. */
#include <math.h>
#include <string.h>

#include "move.h"

#define BITS 22 /* fractional bits of a weight: 32 - 8 for the values - 1 for the sign - 1 for headroom */
/* In units of 2 ** -BITS: up to 255 levels, times half a unit for each of three weights or one. */
#define TOLERANCE(cubic) ((cubic) ? 400 : 130)
#define PIECE (RGB_BYTES * 64) /* values that are recomputed at once */
#define SMALL 1e-6             /* fractions this close to a whole pixel: rounding may lead to the next one */

static bool near_whole(double shift) { return shift < SMALL || shift > 1 - SMALL; }

static void compute_weights(const struct move *move, int first, int last) {
    const double *restrict shift = move->shift, unit = 1 << BITS;
    int32_t *restrict after = move->weights[0], *restrict before = move->weights[1],
                      *restrict beyond = move->weights[2];
    for (int i = first; i < last; i++) {
        double x = shift[i];
        after[i] = (int32_t)rint((move->cubic ? x * (1 + x * (1 - x)) : x) * unit);
        before[i] = (int32_t)rint(x * (-1 + x * (2 - x)) * unit);
        beyond[i] = (int32_t)rint(x * x * (x - 1) * unit);
    }
}

/* The fraction of a pixel by which each column is shifted in this row. */
static void find_shifts(const struct move *move, int axis, int row, int first, int last) {
    for (int i = first; i < last; i++) {
        double at = place(move, axis, row, i), shift = at - floor(at);
        for (int c = 0; c < RGB_BYTES; c++)
            move->shift[RGB_BYTES * i + c] = shift;
    }
}

static bool shears_y(const struct move *move) { return move->matrix[3] != 0.0; }

void begin_shear(struct move *move) {
    move->run_count = 0;
    move->near_whole = false;
    if (!shears_y(move))
        return;
    find_shifts(move, 1, 0, 0, move->width);
    compute_weights(move, 0, RGB_BYTES * move->width);
    for (int i = 0; i < move->width; i++) {
        int whole = (int)floor(place(move, 1, 0, i)), n = move->run_count;
        move->near_whole |= near_whole(move->shift[RGB_BYTES * i]);
        if (!n || whole != move->runs[1][n - 1]) {
            move->runs[0][n] = i;
            move->runs[1][n] = whole;
            move->run_count++;
        }
    }
    move->runs[0][move->run_count] = move->width;
}

/* Row y with each column shifted by whole pixels only. It is computed if `make`. */
static const uint8_t *shifted(const struct move *move, int y, bool make) {
    uint8_t *to = move->shifted[y & 3];
    for (int n = 0; make && n < move->run_count; n++) {
        int begin = move->runs[0][n], end = move->runs[0][n + 1], from = y + move->runs[1][n];
        from = from < -EDGE ? -EDGE : from > move->height + EDGE - 1 ? move->height + EDGE - 1 : from;
        const uint8_t *pixel = pixel_at(move, from, begin);
        for (int i = RGB_BYTES * begin; i < RGB_BYTES * end; i += 16, pixel += 16)
            memcpy(to + i, pixel, 16); /* the next range overwrites the excess */
    }
    return to;
}

/* Interpolate values of `line` between rows[1] and its neighbours; returns whether one of them is uncertain. `each` is
 * 1 if every value has its own weights, and 0 if all share the first. */
static inline __attribute__((always_inline)) bool interpolate(const struct move *move, const uint8_t *const rows[4],
                                                              bool cubic, int each, int first, int last) {
    const uint8_t *restrict before = rows[0], *restrict here = rows[1], *restrict after = rows[2];
    const uint8_t *restrict beyond = rows[3];
    const int32_t *restrict weight = move->weights[0], *restrict weight_back = move->weights[1];
    const int32_t *restrict weight_far = move->weights[2], mask = (1 << BITS) - 1;
    uint8_t *restrict line = move->line;
    int32_t uncertain = 0;
    for (int i = first; i < last; i++) {
        int32_t value = here[i], change = after[i] - value, sum = weight[i * each] * change;
        if (cubic) {
            int32_t back = before[i] - value, far = beyond[i] - value;
            sum += weight_back[i * each] * back + weight_far[i * each] * far;
            change |= back | far;
        }
        uncertain |= ((sum + TOLERANCE(cubic)) & mask) < 2 * TOLERANCE(cubic) ? change : 0; /* equal values are exact */
        value += sum >> BITS;
        if (cubic)
            value = value < 0 ? 0 : value > 255 ? 255 : value;
        line[i] = (uint8_t)value;
    }
    return uncertain != 0;
}

static void interpolate_exactly(const struct move *move, const uint8_t *const rows[4], int first, int last) {
    const uint8_t *restrict before = rows[0], *restrict here = rows[1], *restrict after = rows[2];
    const uint8_t *restrict beyond = rows[3];
    const double *restrict shift = move->shift;
    uint8_t *restrict line = move->line;
    bool cubic = move->cubic;
    for (int i = first; i < last; i++) {
        int v0 = before[i], v1 = here[i], v2 = after[i], v3 = beyond[i];
        double x = shift[i], p3 = 2 * (v0 - v1) + v2 - v3, p4 = -v0 + v1 - v2 + v3;
        double value = cubic ? v1 + x * ((v2 - v0) + x * (p3 + x * p4)) : v1 + (v2 - v1) * x;
        int32_t whole = (int32_t)value;
        whole = whole < 0 ? 0 : whole;
        line[i] = (uint8_t)(whole > 255 ? 255 : whole);
    }
}

void shear_row(const struct move *move, int row, int first, int last) {
    const uint8_t *rows[4];
    bool sheared = shears_y(move), along_x = !sheared && move->matrix[5] == 0.0, uncertain;
    int axis = !along_x, begin = RGB_BYTES * first, end = RGB_BYTES * last;
    bool certain = !move->near_whole;
    if (sheared) {
        for (int k = 0; k < 4; k++)
            rows[k] = shifted(move, row - 1 + k, row == 0 || k == 3);
    } else if (first < last) {
        double at = place(move, axis, row, first), whole = floor(at), shift = at - whole;
        certain = !near_whole(shift) ||
                  (shift == 0.0 && move->matrix[1] == 0.0); /* the latter is a translation by whole pixels */
        move->shift[0] = shift;
        compute_weights(move, 0, 1);
        for (int k = 0; k < 4; k++)
            rows[k] = along_x ? pixel_at(move, row, (int)whole - 1 + k - first) : pixel_at(move, (int)whole - 1 + k, 0);
    }
    if (first >= last)
        return;
    if (!certain) {
        for (int i = first; i < last; i++)
            move_exactly(move, row, i, move->line + RGB_BYTES * i);
        return;
    }
    for (int from = begin, to; from < end; from = to) {
        to = end - from < PIECE ? end : from + PIECE;
        if (sheared)
            uncertain =
                move->cubic ? interpolate(move, rows, true, 1, from, to) : interpolate(move, rows, false, 1, from, to);
        else
            uncertain =
                move->cubic ? interpolate(move, rows, true, 0, from, to) : interpolate(move, rows, false, 0, from, to);
        if (uncertain) {
            find_shifts(move, axis, row, from / RGB_BYTES, to / RGB_BYTES);
            interpolate_exactly(move, rows, from, to);
        }
    }
}
