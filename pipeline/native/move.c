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

#include "scratch.h"

typedef double four __attribute__((vector_size(32)));
typedef uint8_t sixteen __attribute__((vector_size(16)));

static inline four reals(const uint8_t *pixel) { return (four){pixel[0], pixel[1], pixel[2], pixel[3]}; }

static inline four cubic_of(four v0, four v1, four v2, four v3, double x) {
    four p2 = -v0 + v2, p3 = 2 * (v0 - v1) + v2 - v3, p4 = -v0 + v1 - v2 + v3;
    return v1 + x * (p2 + x * (p3 + x * p4));
}

static inline uint8_t cut(double value) { return (uint8_t)(value <= 0.0 ? 0 : value >= 255.0 ? 255 : (int)value); }

/* All taps are the same pixel, as in an overexposed sky: what they give is known. */
static bool flat(const uint8_t *pixel, size_t stride, int taps) {
    for (int row = 0; row < taps; row++, pixel += stride)
        if (memcmp(pixel, pixel + 4, 4 * (size_t)(taps - 1)) || (row && memcmp(pixel, pixel - stride, 4)))
            return false;
    return true;
}

void move_exactly(const struct move *move, int row, int column, uint8_t *to) {
    double x = place(move, 0, row, column), y = place(move, 1, row, column), left = floor(x), top = floor(y);
    const uint8_t *pixel = pixel_at(move, (int)top - move->cubic, (int)left - move->cubic);
    size_t stride = move->stride;
    if (flat(pixel, stride, move->cubic ? 4 : 2)) {
        memcpy(to, pixel, 4);
        return;
    }
    x -= left;
    y -= top;
    four made;
    if (move->cubic) {
        four rows[4];
        for (int r = 0; r < 4; r++, pixel += stride)
            rows[r] = cubic_of(reals(pixel), reals(pixel + 4), reals(pixel + 8), reals(pixel + 12), x);
        made = cubic_of(rows[0], rows[1], rows[2], rows[3], y);
    } else {
        four a = reals(pixel), b = reals(pixel + 4), c = reals(pixel + stride), d = reals(pixel + stride + 4);
        four above = a + (b - a) * x, below = c + (d - c) * x;
        made = above + (below - above) * y;
    }
    for (int c = 0; c < 4; c++)
        to[c] = cut(made[c]);
}

static bool inside(const struct move *move, int row, int column) {
    const double *k = move->matrix, across = column + 0.5, centre = row + 0.5;
    double x = k[0] * across + k[1] * centre + k[2], y = k[3] * across + k[4] * centre + k[5];
    return x >= 0.0 && x < move->width && y >= 0.0 && y < move->height;
}

/* The columns that read from inside: one run of a row, since coordinates rise or fall along it, rounded or not. */
static void span(const struct move *move, int row, int *first, int *last) {
    double low = 0.0, high = move->width;
    for (int axis = 0; axis < 2; axis++) {
        const double *k = move->matrix + 3 * axis;
        double rest = k[1] * (row + 0.5) + k[2], size = axis ? move->height : move->width;
        if (k[0] != 0.0) {
            double one = -rest / k[0], other = (size - rest) / k[0];
            low = fmax(low, fmin(one, other));
            high = fmin(high, fmax(one, other));
        } else if (!(rest >= 0.0 && rest < size)) {
            high = 0.0;
        }
    }
    int begin = (int)fmin(low, move->width), end = (int)fmin(fmax(begin, high), move->width);
    while (begin > 0 && inside(move, row, begin - 1)) /* the divisions were rounded */
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
    const sixteen order = {0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11};
    int width = move->width, height = move->height;
    for (int y = 0; y < height; y++, picture += 3 * (size_t)width) {
        uint8_t *row = pixel_at(move, y, 0);
        int x = 0;
        for (; x + 6 <= width; x += 4) {
            sixteen bytes;
            memcpy(&bytes, picture + 3 * x, sizeof bytes);
            bytes = __builtin_shuffle(bytes, order);
            memcpy(row + 4 * x, &bytes, sizeof bytes);
        }
        for (; x < width; x++) {
            memcpy(row + 4 * x, picture + 3 * x, 3);
            row[4 * x + 3] = 0;
        }
        for (int k = 1; k <= EDGE; k++) {
            memcpy(row - 4 * k, row, 4);
            memcpy(row + 4 * (width - 1 + k), row + 4 * (width - 1), 4);
        }
    }
    for (int k = 1; k <= EDGE; k++) {
        memcpy(pixel_at(move, -k, -EDGE), pixel_at(move, 0, -EDGE), move->stride);
        memcpy(pixel_at(move, height - 1 + k, -EDGE), pixel_at(move, height - 1, -EDGE), move->stride);
    }
}

static void fill_line(const struct move *move, int first, int last, uint32_t fill) {
    for (int x = first; x < last; x++)
        memcpy(move->line + 4 * x, &fill, sizeof fill);
}

static void unpack(const uint8_t *line, int width, uint8_t *row) {
    const sixteen order = {0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 15, 15, 15, 15};
    int x = 0;
    for (; x + 6 <= width; x += 4) {
        sixteen bytes;
        memcpy(&bytes, line + 4 * x, sizeof bytes);
        bytes = __builtin_shuffle(bytes, order);
        memcpy(row + 3 * x, &bytes, sizeof bytes);
    }
    for (; x < width; x++)
        memcpy(row + 3 * x, line + 4 * x, 3);
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
        {&move->doubt, 4 * width},
        {&move->across[0], 4 * width},
        {&move->across[1], 4 * width},
        {&move->at, 4 * width},
        {&move->weights_x, 16 * width},
        {&move->weights_y, 16 * width},
        {&move->sums, 16 * width},
        {&move->weights[0], 16 * width},
        {&move->weights[1], 16 * width},
        {&move->weights[2], 16 * width},
        {&move->shift, 32 * width},
        {&move->shifted[0], 4 * width},
        {&move->shifted[1], 4 * width},
        {&move->shifted[2], 4 * width},
        {&move->shifted[3], 4 * width},
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
    move.stride = 4 * ((size_t)width + 2 * EDGE);
    struct scratch *scratch = own_scratch();
    if (!scratch || !lay_out(&move, &scratch->moving))
        return false;
    bool slide = a == 1.0 && e == 1.0 && (d == 0.0 && f == 0.0 ? true : b == 0.0 && c == 0.0);
    bool large = height > LARGEST || width > LARGEST;
    pad(&move, picture);
    if (!large)
        (slide ? begin_slide : begin_rotation)(&move);
    for (int row = 0; row < height; row++, picture += 3 * (size_t)width) {
        int first, last;
        span(&move, row, &first, &last);
        if (!large)
            (slide ? slide_row : rotate_row)(&move, row, first, last);
        for (int x = first; large && x < last; x++)
            move_exactly(&move, row, x, move.line + 4 * x);
        fill_line(&move, 0, first, (uint32_t)fill);
        fill_line(&move, last, (int)width, (uint32_t)fill);
        unpack(move.line, (int)width, picture);
    }
    return true;
}
