#ifndef RESIZE_H
#define RESIZE_H

#include <stdbool.h>

#include "crop.h"

/* Resize to side x side, R, G, B, as Pillow 13 does (antialiased, bilinear or bicubic), mirrored where `flip`. False
 * where there is no memory. */
bool resize(struct scratch *scratch, struct pixels from, uint8_t *picture, int side, bool cubic, bool flip);

#endif
