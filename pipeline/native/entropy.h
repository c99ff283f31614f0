/* Huffman decoding of a baseline JPEG's single scan, in libjpeg's place: of the MCUs that a crop needs and of no
 * others. What lies before them is only skimmed for its length, or with restart markers not even looked at. */
#ifndef ENTROPY_H
#define ENTROPY_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#include "huffman.h"

#define AC_LOOK 10 /* bits that one look into a table takes in */
#define DC_LOOK 9

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

struct entropy {
    struct ac ac[NUM_HUFF_TBLS];
    struct dc dc[NUM_HUFF_TBLS];
    uint8_t *plain;                           /* the segment that is being decoded, stuffed bytes taken out */
    size_t room;
    const uint8_t *end;                       /* of it */
    struct stream stream;                     /* in it */
    int level[MAX_COMPS_IN_SCAN];             /* each component's last DC coefficient */
    const uint8_t *segment, *data_end;        /* in the file: where the present restart segment begins */
    bool opened;                              /* whether its bytes are in `plain`, and it ends at: */
    const uint8_t *marker;
    unsigned number;                          /* the present segment's */
    const uint8_t *start;                     /* of the file, from which is counted where the segments begin, */
    const uint32_t *places;                   /* and where the last one ends; NULL where the markers must be sought */
    unsigned segments;
    unsigned column, left, waiting;           /* MCUs: done in the row, to come in the segment, passed over unread */
    jmp_buf *damaged;
    char *why;
};

/* Before the picture is begun: where its segments lie in it, as `prep` wrote it (data_prep/restart.py), or none. */
void entropy_knows(struct entropy *entropy, const uint8_t *jpeg, const uint32_t *table, size_t numbers);

/* Put this decoder in the place of libjpeg's, whose decompression has been started; false where it does not know how
 * (progressive, several scans, ...). Then libjpeg's own goes on. */
bool entropy_takes_over(struct entropy *entropy, j_decompress_ptr jpeg);

#endif
