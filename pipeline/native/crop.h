#ifndef CROP_H
#define CROP_H

#include <stdbool.h>

#include "scratch.h"

struct pixels {
    const uint8_t *first; /* R, G, B, unused */
    size_t stride;        /* bytes from row to row */
    int height, width;
};

/* The rows and columns [top, top + height), [left, left + width) of a JPEG of full_height x full_width pixels, the
 * very pixels that decoding it whole gives. False, with `why`, where the data are damaged. */
bool crop_jpeg(struct scratch *scratch, const uint8_t *jpeg, size_t size, int full_height, int full_width, int top,
               int left, int height, int width, struct pixels *pixels);

#endif
