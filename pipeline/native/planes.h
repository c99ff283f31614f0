/* Decodes a rectangle of a common JPEG: sequential, of one scan, grey, or with chroma of all columns and rows, or of every
 * other column, or of every other column and row. */
#ifndef PLANES_H
#define PLANES_H

#include "coefficients.h"
#include "colour.h"
#include "crop.h"

#define PLANES_SLACK (4 * COLOUR_BATCH) /* bytes */

/* Whether `planes_decode` can decode this JPEG, after jpeg_start_decompress. */
bool planes_take(j_decompress_ptr jpeg);

/* Decode the crop, from the scan or, unless NULL, from `coefficients`, to `rows`, R, G, B, unused, which are `stride`
 * bytes apart, with PLANES_SLACK more after the last one. The pixels are libjpeg-turbo's. Jumps to `scratch->damaged` as
 * `entropy_read`, and in doubt where numbers overflow. Returns false if out of memory. */
bool planes_decode(struct scratch *scratch, struct coefficients *coefficients, const struct crop *crop, uint8_t *rows,
                   size_t stride);

#endif
