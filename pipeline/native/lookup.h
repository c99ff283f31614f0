/* Lookup tables from the next bits of a scan to coefficients, made from a JPEG's Huffman codes. */
#ifndef LOOKUP_H
#define LOOKUP_H

#include <stdbool.h>
#include <stdint.h>

#include "huffman.h"

#define AC_LOOKUP_BITS 10 /* bits of a table's index */
#define DC_LOOKUP_BITS 9
#define BLOCK 64u /* steps of the symbol that ends a block: beyond any coefficient */

/* The content of AC_LOOKUP_BITS bits: one or two coefficients, or the end of the block. A step is the distance, in
 * zigzag order, of a coefficient from the one before.
 *
 *     bits 0 to 5    length of both codes with their numbers
 *     bits 8 to 13   length of the first alone
 *     bits 16 to 23  steps to the first coefficient
 *     bits 24 to 31  steps from the first to the second
 *     bits 32 to 47  number of the first
 *     bits 48 to 63  number of the second
 *
 * With only one coefficient, the second is the first again, 0 steps away. With INCOMPLETE, it has more bits than these:
 * bits 0 to 5 are its code's length and 16 to 23 its symbol, or both are 0 if the code is longer. */
typedef uint64_t ac_entry;
#define INCOMPLETE 64u

struct ac {
    struct codes codes;
    ac_entry entries[1 << AC_LOOKUP_BITS];
    bool skimmable; /* whether `skim` is filled in */
    /* All whole codes in the bits: bits 0 to 7 their length with their numbers, 8 to 15 their steps, 16 and up their
     * steps without the last; 0 for a code longer than AC_LOOKUP_BITS. */
    uint32_t skim[1 << AC_LOOKUP_BITS];
};

struct dc {
    struct codes codes;
    uint8_t length[1 << DC_LOOKUP_BITS]; /* of the code; 0 if it is longer than DC_LOOKUP_BITS */
    uint8_t size[1 << DC_LOOKUP_BITS];   /* bits of the number that follows */
};

/* The steps of a symbol of AC tables. */
static inline unsigned steps_of(uint8_t symbol) {
    return symbol & 15 || symbol >> 4 == 15 ? (symbol >> 4) + 1u : BLOCK;
}

/* Make the tables of a JPEG's Huffman table; nothing is done if it equals the one before. `make_skim` fills in
 * `table->skim`, after `make_ac`. */
void make_dc(struct dc *table, const JHUFF_TBL *from);
void make_ac(struct ac *table, const JHUFF_TBL *from);
void make_skim(struct ac *table);

#endif
