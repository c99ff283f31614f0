/* Rows of pixels resized: one sum of weighted neighbours for each pixel of the output. */
#ifndef ACROSS_H
#define ACROSS_H

#include <stdbool.h>

#include "scratch.h"

#define BITS 22 /* of a weight's fraction; Pillow's Resample.c: 32 less 8 of the values less 2 of headroom */

/* The weights of one axis: output place i is a sum of `count` inputs from `first` on. */
struct axis {
    int size, side;         /* how many inputs and outputs there are */
    int taps;               /* in a row of the weights; what `count` leaves of it is 0 */
    const int32_t *weights; /* [side][taps] */
    const int32_t *places;  /* [side][2]: first, count */
};

/* The weights of the axis across as `across_row` reads them. False where there is no memory. */
bool begin_across(struct scratch *scratch, const struct axis *axis);

/* A row of `size` pixels R, G, B, unused to one of `side`, or up to 16 bytes more. */
void across_row(const struct scratch *scratch, const struct axis *axis, const uint8_t *from, uint8_t *to);

static inline uint8_t rounded(int32_t sum) {
    int32_t value = sum >> BITS;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

#endif
