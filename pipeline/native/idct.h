/* Inverse DCT of blocks of 8 x 8 coefficients, with the numbers of libjpeg-turbo's JDCT_ISLOW. Without AVX2, libjpeg's
 * own is called. */
#ifndef IDCT_H
#define IDCT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#define BLOCK_STEPS 128u /* in zigzag order, of the symbol that ends a block: beyond any coefficient */

/* Where a block has the coefficient of each place of the zigzag order. Damaged data may have places after the 63rd,
 * which are there too; at BLOCK_STEPS and later ones nothing but zeros are written. */
extern const uint8_t idct_places[BLOCK_STEPS + DCTSIZE2 + 16];

/* The place in the zigzag order of each coefficient of a block. */
extern const uint8_t zigzag_places[DCTSIZE2];

/* What turns the coefficients of a component into samples. */
struct idct {
    int16_t multipliers[DCTSIZE2] __attribute__((aligned(32))); /* in the order of `idct_places` */
    j_decompress_ptr jpeg;
    jpeg_component_info *component;
    bool overflows; /* set where libjpeg-turbo's 16 bits may overflow, which no encoder does: its samples differ then */
};

/* Begin with a component, after jpeg_start_decompress. */
void idct_begin(struct idct *idct, j_decompress_ptr jpeg, jpeg_component_info *component);

/* Write the samples of a block, which is aligned to 32 bytes, to 8 rows of 8 that are `stride` bytes apart. All
 * coefficients after the place `last` are 0. */
void idct_block(struct idct *idct, const JCOEF *block, unsigned last, uint8_t *to, size_t stride);

#endif
