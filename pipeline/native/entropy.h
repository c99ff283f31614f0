/* Huffman decoding of a baseline JPEG's single scan, in place of libjpeg's decoder: only of the MCUs that a crop needs.
 * MCUs before them are skipped without storing coefficients; with restart markers, whole segments are not even read. */
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
    uint8_t *unstuffed;                /* the current segment, without stuffed bytes */
    size_t capacity;                   /* bytes of `unstuffed` */
    const uint8_t *end;                /* of the segment in `unstuffed` */
    struct stream stream;              /* the position in it */
    int level[MAX_COMPS_IN_SCAN];      /* last DC coefficient of each component */
    const uint8_t *segment, *data_end; /* in the file: start of the current segment, end of all */
    bool is_open;                      /* whether the segment is in `unstuffed`; it then ends at `marker` */
    const uint8_t *marker;
    unsigned number;                 /* of the current segment */
    const uint8_t *file_start;       /* from which `segment_offsets` count */
    const uint32_t *segment_offsets; /* starts of the segments and the end of the last; NULL: search for markers */
    unsigned segment_count;
    unsigned column;       /* of the current MCU in its row */
    unsigned left;         /* MCUs of the segment that follow */
    unsigned after;        /* MCUs of the segments after it */
    unsigned mcus_skipped; /* MCUs of the segment that were not read */
    bool doubtful;         /* with an error: libjpeg's own decoder has to decide whether it is one */
    jmp_buf *damaged;      /* where errors jump to */
    char *message;         /* JMSG_LENGTH_MAX bytes: the error */
};

/* Set the table of segments of the JPEG that is decoded next: `numbers` uint32 (pipeline/formats/segments.py), or 0
 * numbers for none. Both must stay valid while it is decoded. */
void entropy_set_segments(struct entropy *entropy, const uint8_t *jpeg, const uint32_t *table, size_t numbers);

/* Replace libjpeg's entropy decoder, after jpeg_start_decompress. Returns false, and changes nothing, for a JPEG that
 * this decoder does not support (progressive, several scans, ...). Jumps to `damaged` if out of memory; so does
 * decoding for damaged data, with `doubtful` set where libjpeg may think otherwise. */
bool entropy_attach(struct entropy *entropy, j_decompress_ptr jpeg);

#endif
