/* A baseline JPEG's Huffman symbols, read once and written again under codes made for them, with other restart markers.
 * Coefficients are neither unpacked nor kept: AC symbols stay what they are, DC differences but for those after a marker. */
#ifndef RECODE_H
#define RECODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

/* From a source whose header has been read to a target with a destination in memory, with a marker every `interval`
 * MCUs. False, and nothing is written, for all that is not one sound baseline scan of three components: libjpeg, which
 * can then read the source on, knows what to say of it. `*fits` is false where the destination is too small. */
bool recode(j_decompress_ptr source, j_compress_ptr target, int interval, bool *fits);

#endif
