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

#define LOOK 11 /* bits that one look into a table takes in */

/* What begins with these LOOK bits: bits 0 to 4 its length with the number behind the code, bit 5 whether that
 * number is still to be read, bits 8 to 15 coefficients to go on, bits 16 to 31 the number, or its length. 0: a
 * code of more than LOOK bits. */
typedef uint32_t entry;

struct huffman {
    JHUFF_TBL made_of;
    bool made;
    entry look[1 << LOOK];
    uint32_t limit[17]; /* one above the codes of up to this many bits, as 16 bits from the left */
    int32_t offset[17]; /* from a code of this length to its place in the values */
};

struct stream {
    const uint8_t *next;
    uint64_t bits; /* what was taken and not yet used, from the left */
    int count;     /* at least so many of them */
};

struct entropy {
    struct huffman tables[2 * NUM_HUFF_TBLS]; /* DC, then AC */
    uint8_t *plain;                           /* the segment that is being decoded, stuffed bytes taken out */
    size_t room;
    const uint8_t *end;                       /* of it */
    struct stream stream;                     /* in it */
    int dc[MAX_COMPS_IN_SCAN];
    const uint8_t *segment, *data_end;        /* in the file: where the present restart segment begins */
    bool opened;                              /* whether its bytes are in `plain`, and it ends at: */
    const uint8_t *marker;
    unsigned restarts;
    unsigned column, left, waiting;           /* MCUs: done in the row, to come in the segment, passed over unread */
    jmp_buf *damaged;
    char *why;
};

/* Put this decoder in the place of libjpeg's, whose decompression has been started; false where it does not know how
 * (progressive, several scans, ...). Then libjpeg's own goes on. */
bool entropy_takes_over(struct entropy *entropy, j_decompress_ptr jpeg);

#endif
