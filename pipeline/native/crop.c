#include "crop.h"

#define MARGIN 2 /* pixels around the crop that chroma upsampling reads */
#define ROWS 16  /* rows per call of libjpeg */

/* A separate function, because longjmp leaves local variables of the function that calls setjmp undefined. */
static void decode(struct scratch *scratch, int full_height, int full_width, int top, int left, int height, int width,
                   struct pixels *pixels) {
    j_decompress_ptr jpeg = &scratch->jpeg;
    jpeg_read_header(jpeg, TRUE);
    if ((int)jpeg->image_height != full_height || (int)jpeg->image_width != full_width) {
        snprintf(scratch->message, sizeof scratch->message, "is of %u x %u pixels, the file's table says %d x %d",
                 jpeg->image_width, jpeg->image_height, full_width, full_height);
        longjmp(scratch->damaged, 1);
    }
    jpeg->out_color_space = JCS_EXT_RGBX;
    jpeg->dct_method = JDCT_ISLOW;
    jpeg_start_decompress(jpeg);
    entropy_attach(&scratch->entropy, jpeg);

    JDIMENSION start = left > MARGIN ? (JDIMENSION)(left - MARGIN) : 0, end = (JDIMENSION)(left + width + MARGIN);
    JDIMENSION columns = (end < jpeg->output_width ? end : jpeg->output_width) - start;
    if (columns < jpeg->output_width)
        jpeg_crop_scanline(jpeg, &start, &columns);
    pixels->stride = 4 * (size_t)columns;
    uint8_t *rows = ensure_capacity(&scratch->pixels, (size_t)height * pixels->stride);
    if (!rows) {
        snprintf(scratch->message, sizeof scratch->message, "out of memory");
        longjmp(scratch->damaged, 1);
    }
    if (top)
        jpeg_skip_scanlines(jpeg, (JDIMENSION)top);
    for (int done = 0; done < height;) {
        JSAMPROW targets[ROWS];
        int count = height - done < ROWS ? height - done : ROWS;
        for (int i = 0; i < count; i++)
            targets[i] = rows + (size_t)(done + i) * pixels->stride;
        done += (int)jpeg_read_scanlines(jpeg, targets, (JDIMENSION)count);
    }
    pixels->first = rows + 4 * ((size_t)left - start);
    pixels->height = height;
    pixels->width = width;
}

bool crop_jpeg(struct scratch *scratch, const uint8_t *jpeg, size_t size, int full_height, int full_width, int top,
               int left, int height, int width, struct pixels *pixels) {
    bool intact = !setjmp(scratch->damaged);
    if (intact) {
        jpeg_mem_src(&scratch->jpeg, (unsigned char *)jpeg, size);
        decode(scratch, full_height, full_width, top, left, height, width, pixels);
    }
    jpeg_abort_decompress(&scratch->jpeg);
    return intact;
}
