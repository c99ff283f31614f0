/* Huffman encoding of a JPEG's scan: tables optimised for its symbols, and the scan's bytes. */
#ifndef HUFFMAN_ENCODE_H
#define HUFFMAN_ENCODE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

/* Numbers of the output's tables: two for DC, two for AC. */
enum { DC = 0, AC = 2, TABLES = 4, RESTART = TABLES * 256 };

/* The symbols of a scan. Each entry of `list` is table * 256 + symbol (or RESTART) in the upper 16 bits, and the bits
 * that follow the symbol in the lower 16. */
struct symbols {
    uint32_t *list;
    size_t count, capacity;
    uint32_t frequency[TABLES * 256];
};

/* For each symbol its code, shifted left by the number of bits that follow it, and the length of both in bits. */
struct codewords {
    uint32_t bits[TABLES * 256];
    uint8_t length[TABLES * 256];
};

/* Make the Huffman table that codes symbols of these frequencies, uint32 [256], in the fewest bits. Ties are resolved
 * as libjpeg does, so that its optimised tables are the same. */
void make_optimal_table(const uint32_t *frequency, JHUFF_TBL *table);

/* Fill in the codewords of table number `table` (DC, DC + 1, AC or AC + 1). */
void make_codewords(struct codewords *codewords, int table, const JHUFF_TBL *from);

/* Write the scan's bytes to `to`. Returns the position after them, or NULL if they do not fit before `end`. */
uint8_t *write_scan(const struct symbols *symbols, const struct codewords *codewords, uint8_t *to, const uint8_t *end);

#endif
