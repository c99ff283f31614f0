/* A picture on its way through an affine transform: what its rows are made of and made in. */
#ifndef MOVE_H
#define MOVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EDGE 2    /* pixels repeated on every side */
#define SLID 3    /* bytes of a pixel of a shear or translation, whose values are all alike */
#define ROTATED 4 /* and of a rotation, where a pixel is a vector: R, G, B, unused */

struct move {
    int height, width;
    const double *matrix; /* output (x, y) reads from (ax + by + c, dx + ey + f) */
    double inverse[2];    /* 1 / a and 1 / d, infinite where these are 0 */
    bool cubic;
    int depth;       /* bytes of a pixel */
    uint8_t *padded; /* the picture before, its edges repeated */
    size_t stride;
    uint8_t *line;  /* a row of output */
    uint8_t *blank; /* a row of the colour that fills */
    /* Of a rotation, for each column. */
    double *across[2];            /* ax and dx */
    int32_t *at;                  /* where in `padded` a row's first tap lies */
    float *x, *y;                 /* how far its point is from the pixel before it to the next */
    uint32_t *above, *below;      /* [2 width]: linear, the four pixels around it */
    float *weights_x, *weights_y; /* [4 width]: cubic, as are the sums */
    float *sums;                  /* [4 width] */
    uint8_t *doubt;               /* [4 width]: which values rounding decides */
    /* Of a shear or translation. */
    int32_t *weights[3]; /* [3 width]: of the differences that the other taps make */
    double *shift;       /* [3 width]: fractions of a pixel */
    uint8_t *shifted[4]; /* [3 width]: rows of which each column has moved by whole pixels */
    int32_t *runs[2];    /* of columns that move alike: where they begin, and how far */
    int run_count;
    bool uneven; /* a column's fraction is so small that whole pixels are not sure */
};

static inline uint8_t *pixel_at(const struct move *move, int y, int x) {
    return move->padded + (ptrdiff_t)(y + EDGE) * (ptrdiff_t)move->stride + move->depth * (x + EDGE);
}

/* A column's source along x (0) or y (1), as Pillow rounds it; pixel centres are whole numbers. */
static inline double place(const struct move *move, int axis, int row, int column) {
    const double *k = move->matrix + 3 * axis;
    return k[0] * (column + 0.5) + k[1] * (row + 0.5) + k[2] - 0.5;
}

/* One pixel, in Pillow's own arithmetic. */
void move_exactly(const struct move *move, int row, int column, uint8_t *to);

/* Fill the columns [first, last) of `line`, all of which read from inside. */
void rotate_row(const struct move *move, int row, int first, int last);
void slide_row(const struct move *move, int row, int first, int last);

void begin_rotation(struct move *move);
void begin_slide(struct move *move);

#endif
