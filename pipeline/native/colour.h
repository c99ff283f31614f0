/* Rows of Y, Cb and Cr to pixels, with libjpeg's numbers. */
#ifndef COLOUR_H
#define COLOUR_H

#include <stdbool.h>
#include <stdint.h>

#define COLOUR_BATCH 32 /* pixels; rows may be read and written up to a multiple of these */

/* Convert a row of samples to R, G, B, unused. */
void colour_row(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int width, uint8_t *to);

/* Samples of chroma that lie next to each other, of a component with half as many columns as luma. */
struct chroma {
    const uint8_t *nearest, *second; /* the rows that are nearest; the same if there are as many rows as of luma */
    int count;
    bool halved;       /* whether there are half as many rows, too */
    bool first, final; /* whether they begin and end with the first and the last column of the image */
};

/* Make them twice as many (libjpeg's "fancy" upsampling). One sample before and after them is read. `sums` has room for
 * count + 2 numbers, `to` for 2 count. */
void upsample_row(const struct chroma *from, uint16_t *sums, uint8_t *to);

#endif
