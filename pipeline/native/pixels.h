/* Conversion between rows of three-byte pixels (R, G, B) and four-byte pixels (R, G, B, unused). */
#ifndef PIXELS_H
#define PIXELS_H

#include <stdint.h>
#include <string.h>

#include "shuffle.h"

typedef uint8_t sixteen __attribute__((vector_size(16)));

/* Convert `width` pixels of three bytes to four bytes. Four at a time, while 16 bytes fit into both rows. */
static inline void spread_row(const uint8_t *from, int width, uint8_t *to) {
    int x = 0;
    for (; x + 6 <= width; x += 4) {
        sixteen bytes;
        memcpy(&bytes, from + 3 * x, sizeof bytes);
        bytes = SHUFFLE(sixteen, bytes, bytes, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11);
        memcpy(to + 4 * x, &bytes, sizeof bytes);
    }
    for (; x < width; x++) {
        memcpy(to + 4 * x, from + 3 * x, 3);
        to[4 * x + 3] = 0;
    }
}

/* Four pixels of four bytes as 12 bytes, and four more. */
static inline sixteen pack_four(sixteen pixels) {
    return SHUFFLE(sixteen, pixels, pixels, 0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 15, 15, 15, 15);
}

/* Convert `width` pixels of four bytes to three bytes. */
static inline void pack_row(const uint8_t *from, int width, uint8_t *to) {
    int x = 0;
    for (; x + 6 <= width; x += 4) {
        sixteen bytes;
        memcpy(&bytes, from + 4 * x, sizeof bytes);
        bytes = pack_four(bytes);
        memcpy(to + 3 * x, &bytes, sizeof bytes);
    }
    for (; x < width; x++)
        memcpy(to + 3 * x, from + 4 * x, 3);
}

#endif
