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

/* Whether a progressive JPEG, of which decompression has been started, lacks scans. */
bool lacks_scans(j_decompress_ptr jpeg);

/* Decodes a whole JPEG of `size` bytes to `rows` of R, G, B, unused. Returns false, with the reason in `message` of
 * JMSG_LENGTH_MAX (200) bytes, if it is damaged. */
typedef bool whole_decoder(const uint8_t *jpeg, size_t size, int height, int width, uint8_t *rows, char *message);

/* Set what decodes JPEGs that lack scans, instead of libjpeg. */
void set_whole_decoder(whole_decoder *decoder);

/* Decode a rectangle of a JPEG of `size` bytes. The pixels equal those of decoding the whole image. `pixels` points into
 * `scratch`, and is valid until its next use. Returns false, with the reason in `scratch->message`, if the JPEG is of
 * another size than `crop` says, or if its data are damaged: if libjpeg would fail, or warn of what was read. */
bool crop_jpeg(struct scratch *scratch, const uint8_t *jpeg, size_t size, const struct crop *crop,
               struct pixels *pixels);

/* The same of a JPEG's coefficients (coefficients.h), after which CONTAINER_SLACK bytes can be read. */
bool crop_coefficients(struct scratch *scratch, const uint8_t *bytes, size_t size, const struct crop *crop,
                       struct pixels *pixels);

#endif
