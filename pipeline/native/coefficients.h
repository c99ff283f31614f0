/* The coefficients of a JPEG in a form that is read by vectors, from which its file can be written again byte for byte.
 *
 *     CONTAINER_HEAD bytes, numbers from the lowest byte on:
 *         4  CONTAINER_MAGIC
 *         4  bytes of the JPEG
 *         4  bytes of its header, up to the entropy-coded data
 *         4  bytes of its end, from the end marker on
 *         2  MCUs of a segment
 *         2  whether the last byte before a marker is filled up with ones
 *         4  the number of segments
 *     2 for each segment: its bytes
 *     the header and the end, as they are
 *     the segments: MCUs of a row, SEGMENT_WIDTH pixels or what is left of the row, with the blocks in the order of the
 *     JPEG's scan, of which block_bits.h says how they are stored; filled up to whole bytes
 *
 * A crop reads the segments that it touches. */
#ifndef COEFFICIENTS_H
#define COEFFICIENTS_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#include "block_bits.h"

#define CONTAINER_MAGIC 0x31434D57u /* "WMC1" */
#define CONTAINER_HEAD 24
#define CONTAINER_SLACK BLOCK_BYTES /* bytes after a container that must be readable */
#define SEGMENT_WIDTH 64            /* pixels */

/* A container, and the position in it. */
struct coefficients {
    const uint8_t *head, *end; /* of the JPEG */
    size_t jpeg_size, head_size, end_size;
    const uint8_t *sizes; /* of the segments */
    size_t segments;
    unsigned interval; /* MCUs of a segment */
    bool ones;         /* whether bytes are filled up with ones */
    const uint8_t *data;
    /* Set by `coefficients_begin`: */
    unsigned row_mcus, row_segments; /* of a row */
    int block_count;                 /* of an MCU */
    struct block_order order;
    unsigned next, segment_end; /* number of the MCU that follows, and of the first after its segment */
    size_t segment;             /* number of the segment */
    const uint8_t *from;        /* its start */
    size_t at, bits;            /* the position in it, and its end */
    jmp_buf *damaged;           /* where errors jump to */
    char *message;              /* JMSG_LENGTH_MAX bytes: the error */
};

/* Open a container of `size` bytes. Returns false if it is none. */
bool coefficients_open(struct coefficients *coefficients, const uint8_t *bytes, size_t size);

/* Begin with the first MCU, after jpeg_start_decompress of the header. Jumps to `damaged` if there are too few segments. */
void coefficients_begin(struct coefficients *coefficients, j_decompress_ptr jpeg);

/* Read MCU number `mcu`, as `entropy_read` does. `blocks` are aligned to 32 bytes. */
void coefficients_read(struct coefficients *coefficients, unsigned mcu, JCOEF (*blocks)[DCTSIZE2], unsigned *last);

/* MCUs of a segment. */
unsigned coefficients_interval(j_decompress_ptr jpeg);

#endif
