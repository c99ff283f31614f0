/* What a thread works in: made at its first picture, kept from picture to picture, freed when the thread ends. */
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
    jmp_buf damaged;                /* where libjpeg goes when it cannot go on */
    char why[JMSG_LENGTH_MAX];      /* and what it says then */
    struct entropy entropy;
    struct buffer bytes, table;     /* the sample as it lies in the file, and where its segments are */
    struct buffer pixels;           /* R, G, B, unused: the rows of the crop */
    struct buffer passed;           /* the same after one of resizing's two passes */
    struct buffer line;             /* one row of the second */
    struct buffer weights[2];       /* across and down */
    struct buffer places[2];
    struct buffer reals;
    struct buffer across, quads;    /* the weights across as they are read, and where their outputs begin */
    struct buffer sums;             /* a row's, before they are rounded */
    struct buffer moving;           /* all of what a picture is rotated, sheared or translated in */
};

/* This thread's, made where it has none yet; NULL when there is no memory. */
struct scratch *own_scratch(void);

/* At least `size` bytes, the old ones not kept; NULL when there is no memory. */
void *room(struct buffer *buffer, size_t size);

#endif
