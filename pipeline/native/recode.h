/* Re-encodes a baseline JPEG's Huffman symbols, with optimised tables and other restart markers. Coefficients are not
 * decoded: AC symbols do not change, nor do DC differences, except those after a marker. */
#ifndef RECODE_H
#define RECODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#include "huffman_encode.h"

/* Re-encode `source`, whose header has been read, to `target`, whose destination is in memory, with a restart marker
 * every `interval` MCUs. Returns false, having written nothing, unless the source is one intact baseline scan of three
 * components; libjpeg can then continue with the source, and reports what is wrong with it. Sets `*fits` to false if
 * the destination is too small. `symbols` is zero, and the caller frees its list, since libjpeg's errors jump past. */
bool recode(j_decompress_ptr source, j_compress_ptr target, int interval, struct symbols *symbols, bool *fits);

#endif
