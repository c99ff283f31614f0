/* Lookup tables from the next bits of a scan to coefficients, made from a JPEG's Huffman codes. */
#ifndef LOOKUP_H
#define LOOKUP_H

#include <stdbool.h>
#include <stdint.h>

#include "huffman.h"
#include "idct.h"

#define AC_LOOKUP_BITS 10 /* bits of a table's index */
#define DC_LOOKUP_BITS 9

/* The content of AC_LOOKUP_BITS bits: one or two coefficients, or the end of the block. Steps are places in zigzag
 * order from the coefficient before. With only one coefficient, the second is the first again. Fields of their own
 * instead of bits of one word: a load takes less than a shift and a mask.
 *
 * If the code has more bits than these, or with its number has, `length` is 0: `first_length` is then that of the code
 * and `first_steps` its symbol, or both are 0 if the code itself is longer. */
struct ac_entry {
    uint8_t length;                    /* bits of all codes and numbers */
    uint8_t first_length;              /* of the first alone */
    uint8_t first_steps, second_steps; /* to the first, and to the second */
    int16_t first_number, second_number;
};

struct ac {
    struct codes codes;
    struct ac_entry entries[1 << AC_LOOKUP_BITS];
    bool skimmable; /* whether `skim` is filled in */
    /* All whole codes in the bits: bits 0 to 7 their length with their numbers, 8 to 15 their steps, 16 and up their
     * steps without the last; 0 for a code longer than AC_LOOKUP_BITS. */
    uint32_t skim[1 << AC_LOOKUP_BITS];
};

/* The content of DC_LOOKUP_BITS bits: the size of a number. `length` is 0 if the code is longer. */
struct dc_entry {
    uint8_t length;      /* bits of the code and the number */
    uint8_t code_length; /* of the code alone */
    uint8_t size;        /* of the number */
};

struct dc {
    struct codes codes;
    struct dc_entry entries[1 << DC_LOOKUP_BITS];
};

/* The steps of a symbol of AC tables. */
static inline unsigned steps_of(uint8_t symbol) {
    return symbol & 15 || symbol >> 4 == 15 ? (symbol >> 4) + 1u : BLOCK_STEPS;
}

/* Make the tables of a JPEG's Huffman table; nothing is done if it equals the one before. `make_skim` fills in
 * `table->skim`, after `make_ac`. */
void make_dc(struct dc *table, const JHUFF_TBL *from);
void make_ac(struct ac *table, const JHUFF_TBL *from);
void make_skim(struct ac *table);

#endif
