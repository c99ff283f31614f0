/* Resizes a row of pixels: each output pixel is a weighted sum of neighbouring input pixels. */
#ifndef RESIZE_ROW_H
#define RESIZE_ROW_H

#include <stdbool.h>

#include "scratch.h"

#define BITS 22 /* fractional bits of a weight, as in Pillow's Resample.c: 32 - 8 for the values - 2 for headroom */

/* The weights of one axis: output i is the weighted sum of `count` inputs, beginning with number `first`. */
struct axis {
    int size, side;         /* number of inputs and of outputs, pixels */
    int taps;               /* length of a row of weights, of which the first `count` are used; the others are 0 */
    const int32_t *weights; /* [side][taps] */
    const int32_t *ranges;  /* [side][2]: first, count */
};

/* Arrange the weights of the horizontal axis in `scratch`, as `resize_row` reads them. Returns false if out of
 * memory. */
bool prepare_row_weights(struct scratch *scratch, const struct axis *axis);

/* Resize a row of `axis->size` pixels to `axis->side` pixels, both R, G, B, unused. `prepare_row_weights` must have
 * been called with this axis. May write up to 16 bytes more. */
void resize_row(const struct scratch *scratch, const struct axis *axis, const uint8_t *from, uint8_t *to);

/* A sum of values times weights, rounded to 0 to 255; the sum includes half of 2 ** BITS. */
static inline uint8_t round_sum(int32_t sum) {
    int32_t value = sum >> BITS;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

#endif
