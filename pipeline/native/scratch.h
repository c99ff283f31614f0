/* Buffers of a thread: allocated at its first image, reused for the next ones, freed when the thread ends. */
#ifndef SCRATCH_H
#define SCRATCH_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#include "entropy.h"

struct buffer {
    void *data;
    size_t size;
};

struct scratch {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jmp_buf damaged;               /* where libjpeg jumps after an error */
    char message[JMSG_LENGTH_MAX]; /* the error, as text */
    struct entropy entropy;
    struct buffer bytes, table;  /* the sample's bytes, and its table of segments */
    struct buffer restored;      /* a JPEG, written again from its coefficients */
    struct buffer planes;        /* the samples of the MCUs around the crop, by component */
    struct buffer chroma;        /* rows of chroma on their way to full resolution */
    struct buffer pixels;        /* the rows of the crop: R, G, B, unused */
    struct buffer across, down;  /* rows after either pass of resizing */
    struct buffer columns, sums; /* some rows as columns, before and after their pass */
    struct buffer weights[2];    /* horizontal, vertical */
    struct buffer ranges[2];
    struct buffer doubles;
    struct buffer move_arrays; /* all arrays of `struct move` */
};

/* The buffers of the calling thread. Returns NULL if out of memory. */
struct scratch *thread_scratch(void);

/* Make the buffer at least `size` bytes large and return its data; the old content is lost. Returns NULL if out of
 * memory. */
void *ensure_capacity(struct buffer *buffer, size_t size);

#endif
