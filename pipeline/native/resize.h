/* Resizes a rectangle of pixels to a square. */
#ifndef RESIZE_H
#define RESIZE_H

#include <stdbool.h>

#include "crop.h"

/* Resize `from` to `image`, uint8 [side][side][3] (R, G, B), with the pixels that Pillow 13 gives: antialiased,
 * bicubic if `cubic`, otherwise bilinear. Mirrored horizontally if `flip`. Returns false if out of memory. */
bool resize(struct scratch *scratch, struct pixels from, uint8_t *image, int side, bool cubic, bool flip);

#endif
