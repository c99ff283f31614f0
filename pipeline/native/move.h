/* The state of an affine transform of an image, which is computed row by row. */
#ifndef MOVE_H
#define MOVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EDGE 2       /* repeated pixels on each side */
#define RGB_BYTES 3  /* bytes of a pixel in a shear or translation, where all values are treated alike */
#define RGBX_BYTES 4 /* bytes of a pixel in a rotation, where a pixel is a vector: R, G, B, unused */

struct move {
    int height, width;
    const double *matrix; /* output (x, y) reads from (ax + by + c, dx + ey + f) */
    double inverse[2];    /* 1 / a and 1 / d; infinite for 0 */
    bool cubic;
    int depth;       /* bytes of a pixel */
    uint8_t *padded; /* the input with repeated edges */
    size_t stride;
    uint8_t *line;  /* a row of output */
    uint8_t *blank; /* a row of the fill colour */
    /* In a rotation, for each column: */
    double *across[2];            /* ax and dx */
    int32_t *at;                  /* offset of the first tap in `padded`, bytes */
    float *x, *y;                 /* distance of the source point from the pixel before it, 0 to 1 */
    uint32_t *above, *below;      /* [2 width]: bilinear, the four pixels around the point */
    float *weights_x, *weights_y; /* [4 width]: bicubic */
    float *sums;                  /* [4 width]: bicubic */
    uint8_t *uncertain;           /* [4 width]: nonzero for values that depend on rounding */
    /* In a shear or translation: */
    int32_t *weights[3]; /* [3 width]: of the differences of the other taps from the second */
    double *shift;       /* [3 width]: fractions of a pixel */
    uint8_t *shifted[4]; /* [3 width]: rows with each column shifted by whole pixels */
    int32_t *runs[2];    /* ranges of columns with the same whole shift: first column, shift */
    int run_count;
    bool near_whole; /* whether rounding could change the whole shift of a column */
};

/* The pixel in `padded`; x and y may be up to EDGE outside of the image. */
static inline uint8_t *pixel_at(const struct move *move, int y, int x) {
    return move->padded + (ptrdiff_t)(y + EDGE) * (ptrdiff_t)move->stride + move->depth * (x + EDGE);
}

/* The source coordinate x (axis 0) or y (1) of a pixel, rounded as by Pillow. Pixel centres are whole numbers. */
static inline double place(const struct move *move, int axis, int row, int column) {
    const double *k = move->matrix + 3 * axis;
    return k[0] * (column + 0.5) + k[1] * (row + 0.5) + k[2] - 0.5;
}

/* Compute one pixel in Pillow's arithmetic. */
void move_exactly(const struct move *move, int row, int column, uint8_t *to);

/* Compute the columns [first, last) of `line`, whose sources are all inside. */
void rotate_row(const struct move *move, int row, int first, int last);
void shear_row(const struct move *move, int row, int first, int last);

/* Fill in what all rows share. */
void begin_rotation(struct move *move);
void begin_shear(struct move *move);

#endif
