/* What the next bits of a scan stand for, by tables that a JPEG's Huffman codes are made into. */
#ifndef LOOKUP_H
#define LOOKUP_H

#include <stdbool.h>
#include <stdint.h>

#include "huffman.h"

#define AC_LOOK 10 /* bits that one look into a table takes in */
#define DC_LOOK 9
#define BLOCK 64u /* how far the end of a block is */

/* What begins with these AC_LOOK bits: one or two coefficients, or the end of the block.
 * Bits 0 to 5 their length, 8 to 13 the first one's; 16 to 23 how far the first is from the last coefficient before,
 * 24 to 31 the second from the first; 32 to 47 and 48 to 63 their numbers. Where there is one alone, the second is
 * the first once more. With UNSEEN more bits than these belong to it: bits 0 to 5 the code's length, 16 to 23 its symbol;
 * both 0 where the code is longer. */
typedef uint64_t look;
#define UNSEEN 64u

struct ac {
    struct codes codes;
    look look[1 << AC_LOOK];
    bool skimmable;               /* whether what follows is made: */
    uint32_t skim[1 << AC_LOOK]; /* bits 0 to 5 the length of all that begins there, 8 to 15 how far it goes on, from
                                  * 16 on how far before the last of them; 0: a code longer than AC_LOOK */
};

struct dc {
    struct codes codes;
    uint8_t length[1 << DC_LOOK], size[1 << DC_LOOK]; /* of the code, 0 where it is longer; of the number behind it */
};

/* How many coefficients a symbol of AC tables goes on. */
static inline unsigned steps_of(uint8_t symbol) {
    return symbol & 15 || symbol >> 4 == 15 ? (symbol >> 4) + 1u : BLOCK;
}

/* Nothing is done where the codes are those of the picture before. */
void make_dc(struct dc *table, const JHUFF_TBL *from);
void make_ac(struct ac *table, const JHUFF_TBL *from);
void make_skim(struct ac *table);

#endif
