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

#include "lookup.h"

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

/* Before the picture is begun: where its segments lie in it, as `prep` wrote it (pipeline/formats/segments.py), or none. */
void entropy_knows(struct entropy *entropy, const uint8_t *jpeg, const uint32_t *table, size_t numbers);

/* Put this decoder in the place of libjpeg's, whose decompression has been started; false where it does not know how
 * (progressive, several scans, ...). Then libjpeg's own goes on. */
bool entropy_takes_over(struct entropy *entropy, j_decompress_ptr jpeg);

#endif
