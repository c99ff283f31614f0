/* A row of a shear or a translation: the fraction along the other axis is exactly zero, so four taps along one are
 * enough, and neighbours read neighbours. Where y moves by another amount in each column, rows are made first of which
 * each column has moved by whole pixels. Sums are whole numbers; where a value is in doubt, the piece of the row around
 * it is made again in Pillow's double precision. */
#include <math.h>
#include <string.h>

#include "move.h"

#define BITS 22   /* of a weight's fraction: int32 less 8 of the values, the sign and 1 of headroom */
#define DOUBT(cubic) ((cubic) ? 400 : 130) /* of its units: three weights or one, off by half of one, for 255 levels */
#define PIECE (SLID * 64) /* values that are made again together */
#define SMALL 1e-6 /* a fraction so near to a whole pixel that rounding may lead to the next one */

static bool uneven(double shift) { return shift < SMALL || shift > 1 - SMALL; }

static void weigh(const struct move *move, int first, int last) {
    const double *restrict shift = move->shift, unit = 1 << BITS;
    int32_t *restrict after = move->weights[0], *restrict before = move->weights[1], *restrict beyond = move->weights[2];
    for (int i = first; i < last; i++) {
        double x = shift[i];
        after[i] = (int32_t)rint((move->cubic ? x * (1 + x * (1 - x)) : x) * unit);
        before[i] = (int32_t)rint(x * (-1 + x * (2 - x)) * unit);
        beyond[i] = (int32_t)rint(x * x * (x - 1) * unit);
    }
}

/* Each column's fraction of a pixel in this row. */
static void find_shifts(const struct move *move, int axis, int row, int first, int last) {
    for (int i = first; i < last; i++) {
        double at = place(move, axis, row, i), shift = at - floor(at);
        for (int c = 0; c < SLID; c++)
            move->shift[SLID * i + c] = shift;
    }
}

static bool shears_y(const struct move *move) { return move->matrix[3] != 0.0; }

void begin_slide(struct move *move) {
    move->run_count = 0;
    move->uneven = false;
    if (!shears_y(move))
        return;
    find_shifts(move, 1, 0, 0, move->width);
    weigh(move, 0, SLID * move->width);
    for (int i = 0; i < move->width; i++) {
        int whole = (int)floor(place(move, 1, 0, i)), n = move->run_count;
        move->uneven |= uneven(move->shift[SLID * i]);
        if (!n || whole != move->runs[1][n - 1]) {
            move->runs[0][n] = i;
            move->runs[1][n] = whole;
            move->run_count++;
        }
    }
    move->runs[0][move->run_count] = move->width;
}

/* Row y as it would be if every column had moved by its whole pixels alone. */
static const uint8_t *shifted(const struct move *move, int y, bool make) {
    uint8_t *to = move->shifted[y & 3];
    for (int n = 0; make && n < move->run_count; n++) {
        int begin = move->runs[0][n], end = move->runs[0][n + 1], from = y + move->runs[1][n];
        from = from < -EDGE ? -EDGE : from > move->height + EDGE - 1 ? move->height + EDGE - 1 : from;
        const uint8_t *pixel = pixel_at(move, from, begin);
        for (int i = SLID * begin; i < SLID * end; i += 16, pixel += 16)
            memcpy(to + i, pixel, 16); /* what is too much the next run overwrites */
    }
    return to;
}

/* Values of `line` between those of rows[1] and their neighbours; whether one of them is in doubt. `each`: every value
 * has weights of its own. */
static inline __attribute__((always_inline)) bool between(const struct move *move, const uint8_t *const rows[4],
                                                          bool cubic, int each, int first, int last) {
    const uint8_t *restrict before = rows[0], *restrict here = rows[1], *restrict after = rows[2];
    const uint8_t *restrict beyond = rows[3];
    const int32_t *restrict weight = move->weights[0], *restrict weight_back = move->weights[1];
    const int32_t *restrict weight_far = move->weights[2], mask = (1 << BITS) - 1;
    uint8_t *restrict line = move->line;
    int32_t doubt = 0;
    for (int i = first; i < last; i++) {
        int32_t value = here[i], change = after[i] - value, sum = weight[i * each] * change;
        if (cubic) {
            int32_t back = before[i] - value, far = beyond[i] - value;
            sum += weight_back[i * each] * back + weight_far[i * each] * far;
            change |= back | far;
        }
        doubt |= ((sum + DOUBT(cubic)) & mask) < 2 * DOUBT(cubic) ? change : 0; /* no change, no doubt */
        value += sum >> BITS;
        if (cubic)
            value = value < 0 ? 0 : value > 255 ? 255 : value;
        line[i] = (uint8_t)value;
    }
    return doubt != 0;
}

static void between_exactly(const struct move *move, const uint8_t *const rows[4], int first, int last) {
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

void slide_row(const struct move *move, int row, int first, int last) {
    const uint8_t *rows[4];
    bool sheared = shears_y(move), along_x = !sheared && move->matrix[5] == 0.0, doubt;
    int axis = !along_x, begin = SLID * first, end = SLID * last;
    bool sure = !move->uneven;
    if (sheared) {
        for (int k = 0; k < 4; k++)
            rows[k] = shifted(move, row - 1 + k, row == 0 || k == 3);
    } else if (first < last) {
        double at = place(move, axis, row, first), whole = floor(at), shift = at - whole;
        sure = !uneven(shift) || (shift == 0.0 && move->matrix[1] == 0.0); /* else a translation by whole pixels */
        move->shift[0] = shift;
        weigh(move, 0, 1);
        for (int k = 0; k < 4; k++)
            rows[k] = along_x ? pixel_at(move, row, (int)whole - 1 + k - first) : pixel_at(move, (int)whole - 1 + k, 0);
    }
    if (first >= last)
        return;
    if (!sure) {
        for (int i = first; i < last; i++)
            move_exactly(move, row, i, move->line + SLID * i);
        return;
    }
    for (int from = begin, to; from < end; from = to) {
        to = end - from < PIECE ? end : from + PIECE;
        if (sheared)
            doubt = move->cubic ? between(move, rows, true, 1, from, to) : between(move, rows, false, 1, from, to);
        else
            doubt = move->cubic ? between(move, rows, true, 0, from, to) : between(move, rows, false, 0, from, to);
        if (doubt) {
            find_shifts(move, axis, row, from / SLID, to / SLID);
            between_exactly(move, rows, from, to);
        }
    }
}
