/* Decodes a rectangle of a JPEG. */
#ifndef CROP_H
#define CROP_H

#include <stdbool.h>

#include "scratch.h"

/* A rectangle of pixels in memory. */
struct pixels {
    const uint8_t *first; /* R, G, B, unused */
    size_t stride;        /* bytes between the starts of two rows */
    int height, width;    /* pixels */
};

/* Decode the rows [top, top + height) and the columns [left, left + width) of a JPEG, which has `size` bytes and
 * full_height x full_width pixels. The pixels equal those of decoding the whole image. `pixels` points into `scratch`,
 * and is valid until its next use. Returns false, with the reason in `scratch->message`, for damaged data. */
bool crop_jpeg(struct scratch *scratch, const uint8_t *jpeg, size_t size, int full_height, int full_width, int top,
               int left, int height, int width, struct pixels *pixels);

#endif
