/* Rotate, shear and translate in place as Pillow 13 does (Geometry.c), bit for bit.
 *
 * Pillow takes the source point of each output pixel's centre in double precision, fills where it lies outside,
 * interpolates with edges repeated, clips, and cuts the fraction off. Since only the whole part shows, less precise
 * sums will do (rotate.c, slide.c), unless they come so close to a whole number that rounding decides: then the pixel
 * is made once more in Pillow's arithmetic.
 */
#include "move.h"

#include <math.h>
#include <string.h>

#include "pixels.h"
#include "scratch.h"

typedef double four __attribute__((vector_size(32)));

static inline four reals(const uint8_t *pixel) { return (four){pixel[0], pixel[1], pixel[2], pixel[3]}; }

static inline four cubic_of(four v0, four v1, four v2, four v3, double x) {
    four p2 = -v0 + v2, p3 = 2 * (v0 - v1) + v2 - v3, p4 = -v0 + v1 - v2 + v3;
    return v1 + x * (p2 + x * (p3 + x * p4));
}

static inline uint8_t cut(double value) { return (uint8_t)(value <= 0.0 ? 0 : value >= 255.0 ? 255 : (int)value); }

void move_exactly(const struct move *move, int row, int column, uint8_t *to) {
    double x = place(move, 0, row, column), y = place(move, 1, row, column), left = floor(x), top = floor(y);
    const uint8_t *pixel = pixel_at(move, (int)top - move->cubic, (int)left - move->cubic);
    size_t stride = move->stride, depth = (size_t)move->depth;
    x -= left;
    y -= top;
    four made;
    if (move->cubic) {
        four rows[4];
        for (int r = 0; r < 4; r++, pixel += stride)
            rows[r] = cubic_of(reals(pixel), reals(pixel + depth), reals(pixel + 2 * depth),
                               reals(pixel + 3 * depth), x);
        made = cubic_of(rows[0], rows[1], rows[2], rows[3], y);
    } else {
        four a = reals(pixel), b = reals(pixel + depth), c = reals(pixel + stride), d = reals(pixel + stride + depth);
        four above = a + (b - a) * x, below = c + (d - c) * x;
        made = above + (below - above) * y;
    }
    for (int c = 0; c < 3; c++)
        to[c] = cut(made[c]);
}

static bool inside(const struct move *move, int row, int column) {
    const double *k = move->matrix, across = column + 0.5, centre = row + 0.5;
    double x = k[0] * across + k[1] * centre + k[2], y = k[3] * across + k[4] * centre + k[5];
    return x >= 0.0 && x < move->width && y >= 0.0 && y < move->height;
}

static inline double lesser(double one, double other) { return one < other ? one : other; }
static inline double greater(double one, double other) { return one > other ? one : other; }

/* The columns that read from inside: one run of a row, since coordinates rise or fall along it, rounded or not. */
static void span(const struct move *move, int row, int *first, int *last) {
    double low = 0.0, high = move->width;
    for (int axis = 0; axis < 2; axis++) {
        const double *k = move->matrix + 3 * axis;
        double rest = k[1] * (row + 0.5) + k[2], size = axis ? move->height : move->width;
        if (k[0] != 0.0) {
            double one = -rest * move->inverse[axis], other = (size - rest) * move->inverse[axis];
            low = greater(low, lesser(one, other));
            high = lesser(high, greater(one, other));
        } else if (!(rest >= 0.0 && rest < size)) {
            high = 0.0;
        }
    }
    int begin = (int)lesser(low, move->width), end = (int)lesser(greater(begin, high), move->width);
    while (begin > 0 && inside(move, row, begin - 1)) /* what was computed above is rounded */
        begin--;
    while (begin < end && !inside(move, row, begin))
        begin++;
    while (end < move->width && inside(move, row, end))
        end++;
    while (end > begin && !inside(move, row, end - 1))
        end--;
    *first = begin;
    *last = end;
}

static void pad(const struct move *move, const uint8_t *picture) {
    int width = move->width, height = move->height, depth = move->depth;
    for (int y = 0; y < height; y++, picture += 3 * (size_t)width) {
        uint8_t *row = pixel_at(move, y, 0), *last = pixel_at(move, y, width - 1);
        if (depth == SLID)
            memcpy(row, picture, 3 * (size_t)width);
        else
            spread_row(picture, width, row);
        for (int k = 1; k <= EDGE; k++) {
            memcpy(row - depth * k, row, (size_t)depth);
            memcpy(last + depth * k, last, (size_t)depth);
        }
    }
    for (int k = 1; k <= EDGE; k++) {
        memcpy(pixel_at(move, -k, -EDGE), pixel_at(move, 0, -EDGE), move->stride);
        memcpy(pixel_at(move, height - 1 + k, -EDGE), pixel_at(move, height - 1, -EDGE), move->stride);
    }
}

static void fill_line(const struct move *move, int first, int last) {
    if (first < last)
        memcpy(move->line + move->depth * first, move->blank, (size_t)(move->depth * (last - first)));
}

/* Cut `buffer` into the arrays of a move, each with room to read and write whole vectors at its end. */
static bool lay_out(struct move *move, struct buffer *buffer) {
    size_t width = (size_t)move->width;
    struct {
        void *array;
        size_t size;
    } parts[] = {
        {&move->padded, ((size_t)move->height + 2 * EDGE) * move->stride},
        {&move->line, 4 * width},
        {&move->blank, 4 * width},
        {&move->doubt, 4 * width},
        {&move->across[0], 8 * width},
        {&move->across[1], 8 * width},
        {&move->at, 4 * width},
        {&move->x, 4 * width},
        {&move->y, 4 * width},
        {&move->above, 8 * width},
        {&move->below, 8 * width},
        {&move->weights_x, 16 * width},
        {&move->weights_y, 16 * width},
        {&move->sums, 16 * width},
        {&move->weights[0], 12 * width},
        {&move->weights[1], 12 * width},
        {&move->weights[2], 12 * width},
        {&move->shift, 24 * width},
        {&move->shifted[0], 3 * width},
        {&move->shifted[1], 3 * width},
        {&move->shifted[2], 3 * width},
        {&move->shifted[3], 3 * width},
        {&move->runs[0], 4 * width + 4},
        {&move->runs[1], 4 * width + 4},
    };
    size_t count = sizeof parts / sizeof *parts, total = 64;
    for (size_t i = 0; i < count; i++)
        total += (parts[i].size + 127) / 64 * 64;
    uint8_t *free = room(buffer, total);
    if (!free)
        return false;
    free += 64 - (uintptr_t)free % 64;
    for (size_t i = 0; i < count; i++) {
        memcpy(parts[i].array, &free, sizeof free);
        free += (parts[i].size + 127) / 64 * 64;
    }
    return true;
}

/* Move picture [height, width, 3] by a matrix (a, b, c, d, e, f), bicubic or bilinear; `fill` is R | G << 8 | B << 16.
 * False when there is no memory. */
int32_t move_pixels(uint8_t *picture, int64_t height, int64_t width, double a, double b, double c, double d, double e,
                    double f, int64_t cubic, int64_t fill) {
    const double matrix[] = {a, b, c, d, e, f};
    struct move move = {.height = (int)height, .width = (int)width, .matrix = matrix, .cubic = cubic};
    bool slide = a == 1.0 && e == 1.0 && (d == 0.0 && f == 0.0 ? true : b == 0.0 && c == 0.0);
    move.inverse[0] = 1 / a;
    move.inverse[1] = 1 / d;
    move.depth = slide ? SLID : ROTATED;
    move.stride = (size_t)move.depth * ((size_t)width + 2 * EDGE);
    struct scratch *scratch = own_scratch();
    if (!scratch || !lay_out(&move, &scratch->moving))
        return false;
    bool large = ((size_t)height + 2 * EDGE) * move.stride > INT32_MAX;
    uint8_t *line = move.line;
    for (int x = 0; x < width; x++)
        memcpy(move.blank + move.depth * x, &fill, (size_t)move.depth);
    pad(&move, picture);
    (slide ? begin_slide : begin_rotation)(&move);
    for (int row = 0; row < height; row++, picture += 3 * (size_t)width) {
        int first, last;
        span(&move, row, &first, &last);
        move.line = slide ? picture : line;
        if (!large)
            (slide ? slide_row : rotate_row)(&move, row, first, last);
        for (int x = first; large && x < last; x++)
            move_exactly(&move, row, x, move.line + move.depth * x);
        fill_line(&move, 0, first);
        fill_line(&move, last, (int)width);
        if (!slide)
            pack_row(line, (int)width, picture);
    }
    return true;
}
