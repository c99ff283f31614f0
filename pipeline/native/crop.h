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

/* A rectangle of an image, in pixels. */
struct crop {
    int full_height, full_width; /* of the image */
    int top, left, height, width;
};

/* Decode a rectangle of a JPEG of `size` bytes. The pixels equal those of decoding the whole image. `pixels` points into
 * `scratch`, and is valid until its next use. Returns false, with the reason in `scratch->message`, if the JPEG is of
 * another size than `crop` says, or if its data are damaged: if libjpeg would fail, or warn of what was read. */
bool crop_jpeg(struct scratch *scratch, const uint8_t *jpeg, size_t size, const struct crop *crop,
               struct pixels *pixels);

#endif
