/* Huffman decoding of a baseline JPEG's single scan: only of the MCUs that a crop needs. MCUs before them are skipped
 * without storing coefficients; with restart markers, whole segments are not even read. */
#ifndef ENTROPY_H
#define ENTROPY_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#include "idct.h"
#include "lookup.h"

/* A block of an MCU. */
struct entropy_block {
    int component;
    struct dc *dc;
    struct ac *ac;
};

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
    unsigned mcus;        /* of the image */
    unsigned interval;    /* MCUs of a segment */
    unsigned next;        /* number of the MCU that follows */
    unsigned segment_end; /* number of the first MCU after the segment */
    int block_count;      /* of an MCU */
    struct entropy_block blocks[D_MAX_BLOCKS_IN_MCU];
    bool doubtful;    /* with an error: libjpeg's own decoder has to decide whether it is one */
    jmp_buf *damaged; /* where errors jump to */
    char *message;    /* JMSG_LENGTH_MAX bytes: the error */
};

/* Set the table of segments of the JPEG that is decoded next: `numbers` uint32 (pipeline/formats/beton.py), or 0
 * numbers for none. Both must stay valid while it is decoded. */
void entropy_set_segments(struct entropy *entropy, const uint8_t *jpeg, const uint32_t *table, size_t numbers);

/* Begin with the scan that follows jpeg_start_decompress, of a sequential JPEG with a single scan of several
 * components. Jumps to `damaged` if out of memory. */
void entropy_begin(struct entropy *entropy, j_decompress_ptr jpeg);

/* Decode MCU number `mcu`, in the order of the scan and not before the last one that was read, into `blocks`, whose
 * coefficients are at `idct_places`; all those after the place in `last` are 0. Jumps to `damaged` if the data are
 * damaged, with `doubtful` set where libjpeg may think otherwise. */
void entropy_read(struct entropy *entropy, unsigned mcu, JCOEF (*blocks)[DCTSIZE2], unsigned *last);

/* Leave it to libjpeg whether there is an error: set `doubtful` and jump to `damaged`. */
_Noreturn void entropy_doubt(struct entropy *entropy, const char *message);

#endif
