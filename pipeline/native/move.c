/* Rotates, shears and translates an image in place, with the same bits as Pillow 13 (Geometry.c).
 *
 * Pillow computes the source point of each output pixel's centre in double precision, fills pixels whose source is
 * outside, interpolates with repeated edges, clips, and truncates to whole numbers. Because only the whole part
 * remains, less precise sums suffice (rotate.c, shear.c), except where they are close to a whole number: those pixels
 * are recomputed in Pillow's arithmetic.
 */
#include "move.h"

#include <math.h>
#include <string.h>

#include "pixels.h"
#include "scratch.h"

typedef double four __attribute__((vector_size(32)));

static inline four doubles(const uint8_t *pixel) { return (four){pixel[0], pixel[1], pixel[2], pixel[3]}; }

static inline four cubic_of(four v0, four v1, four v2, four v3, double x) {
    four p2 = -v0 + v2, p3 = 2 * (v0 - v1) + v2 - v3, p4 = -v0 + v1 - v2 + v3;
    return v1 + x * (p2 + x * (p3 + x * p4));
}

static inline uint8_t clip(double value) { return (uint8_t)(value <= 0.0 ? 0 : value >= 255.0 ? 255 : (int)value); }

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
            rows[r] = cubic_of(doubles(pixel), doubles(pixel + depth), doubles(pixel + 2 * depth),
                               doubles(pixel + 3 * depth), x);
        made = cubic_of(rows[0], rows[1], rows[2], rows[3], y);
    } else {
        four a = doubles(pixel), b = doubles(pixel + depth), c = doubles(pixel + stride),
             d = doubles(pixel + stride + depth);
        four above = a + (b - a) * x, below = c + (d - c) * x;
        made = above + (below - above) * y;
    }
    for (int c = 0; c < 3; c++)
        to[c] = clip(made[c]);
}

static bool inside(const struct move *move, int row, int column) {
    const double *k = move->matrix, across = column + 0.5, centre = row + 0.5;
    double x = k[0] * across + k[1] * centre + k[2], y = k[3] * across + k[4] * centre + k[5];
    return x >= 0.0 && x < move->width && y >= 0.0 && y < move->height;
}

static inline double lower_of(double one, double other) { return one < other ? one : other; }
static inline double higher_of(double one, double other) { return one > other ? one : other; }

/* The columns whose source is inside: one range, because coordinates are monotonic along a row, even when rounded. */
static void source_columns(const struct move *move, int row, int *first, int *last) {
    double low = 0.0, high = move->width;
    for (int axis = 0; axis < 2; axis++) {
        const double *k = move->matrix + 3 * axis;
        double rest = k[1] * (row + 0.5) + k[2], size = axis ? move->height : move->width;
        if (k[0] != 0.0) {
            double one = -rest * move->inverse[axis], other = (size - rest) * move->inverse[axis];
            low = higher_of(low, lower_of(one, other));
            high = lower_of(high, higher_of(one, other));
        } else if (!(rest >= 0.0 && rest < size)) {
            high = 0.0;
        }
    }
    int begin = (int)lower_of(low, move->width), end = (int)lower_of(higher_of(begin, high), move->width);
    while (begin > 0 && inside(move, row, begin - 1)) /* corrects for rounding above */
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

static void pad(const struct move *move, const uint8_t *image) {
    int width = move->width, height = move->height, depth = move->depth;
    for (int y = 0; y < height; y++, image += 3 * (size_t)width) {
        uint8_t *row = pixel_at(move, y, 0), *last = pixel_at(move, y, width - 1);
        if (depth == RGB_BYTES)
            memcpy(row, image, 3 * (size_t)width);
        else
            spread_row(image, width, row);
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

/* Place the arrays of `struct move` in `buffer`, each followed by space for whole vectors. Returns false if out of
 * memory. */
static bool allocate_arrays(struct move *move, struct buffer *buffer) {
    size_t width = (size_t)move->width;
    struct {
        void *array;
        size_t size;
    } parts[] = {
        {&move->padded, ((size_t)move->height + 2 * EDGE) * move->stride},
        {&move->line, 4 * width},
        {&move->blank, 4 * width},
        {&move->uncertain, 4 * width},
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
    uint8_t *free = ensure_capacity(buffer, total);
    if (!free)
        return false;
    free += 64 - (uintptr_t)free % 64;
    for (size_t i = 0; i < count; i++) {
        memcpy(parts[i].array, &free, sizeof free);
        free += (parts[i].size + 127) / 64 * 64;
    }
    return true;
}

/* Transform image, uint8 [height][width][3], in place. Output (x, y) reads from (ax + by + c, dx + ey + f), in
 * pixels; bicubic if `cubic`, otherwise bilinear. Pixels whose source is outside become `fill`, R | G << 8 | B << 16.
 * Returns false if out of memory. */
int32_t move_pixels(uint8_t *image, int64_t height, int64_t width, double a, double b, double c, double d, double e,
                    double f, int64_t cubic, int64_t fill) {
    const double matrix[] = {a, b, c, d, e, f};
    struct move move = {.height = (int)height, .width = (int)width, .matrix = matrix, .cubic = cubic};
    bool shear = a == 1.0 && e == 1.0 && (d == 0.0 && f == 0.0 ? true : b == 0.0 && c == 0.0);
    move.inverse[0] = 1 / a;
    move.inverse[1] = 1 / d;
    move.depth = shear ? RGB_BYTES : RGBX_BYTES;
    move.stride = (size_t)move.depth * ((size_t)width + 2 * EDGE);
    struct scratch *scratch = thread_scratch();
    if (!scratch || !allocate_arrays(&move, &scratch->move_arrays))
        return false;
    bool large = ((size_t)height + 2 * EDGE) * move.stride > INT32_MAX;
    uint8_t *line = move.line;
    for (int x = 0; x < width; x++)
        memcpy(move.blank + move.depth * x, &fill, (size_t)move.depth);
    pad(&move, image);
    (shear ? begin_shear : begin_rotation)(&move);
    for (int row = 0; row < height; row++, image += 3 * (size_t)width) {
        int first, last;
        source_columns(&move, row, &first, &last);
        move.line = shear ? image : line;
        if (!large)
            (shear ? shear_row : rotate_row)(&move, row, first, last);
        for (int x = first; large && x < last; x++)
            move_exactly(&move, row, x, move.line + move.depth * x);
        fill_line(&move, 0, first);
        fill_line(&move, last, (int)width);
        if (!shear)
            pack_row(line, (int)width, image);
    }
    return true;
}
