#include "crop.h"

#include "planes.h"
#include "restore.h"

#define MARGIN 2 /* pixels around the crop that chroma upsampling reads */
#define ROWS 16  /* rows per call of libjpeg */

static whole_decoder *decode_whole;

void set_whole_decoder(whole_decoder *decoder) { decode_whole = decoder; }

bool lacks_scans(j_decompress_ptr jpeg) {
    int missing = 0;
    for (int c = 0; jpeg->progressive_mode && jpeg->coef_bits && c < jpeg->num_components; c++)
        for (int k = 0; k < DCTSIZE2; k++)
            missing |= jpeg->coef_bits[c][k];
    return missing;
}

static void read_until(j_decompress_ptr jpeg, JDIMENSION row, JSAMPROW unused) {
    while (jpeg->output_scanline < row)
        jpeg_read_scanlines(jpeg, &unused, 1);
}

/* Reserve `height` rows of `columns` pixels, and `slack` bytes after them. */
static uint8_t *reserve(struct scratch *scratch, size_t columns, size_t height, size_t slack, struct pixels *pixels) {
    pixels->stride = 4 * columns;
    return ensure_capacity(&scratch->pixels, height * pixels->stride + slack);
}

/* Decode the crop by libjpeg. With `judge`, it reads all that follows too, in case it warns of it. */
static bool decode_by_libjpeg(struct scratch *scratch, const struct crop *crop, bool judge, struct pixels *pixels) {
    j_decompress_ptr jpeg = &scratch->jpeg;
    int left = crop->left, height = crop->height;
    JDIMENSION start = left > MARGIN ? (JDIMENSION)(left - MARGIN) : 0, end = (JDIMENSION)(left + crop->width + MARGIN);
    JDIMENSION columns = (end < jpeg->output_width ? end : jpeg->output_width) - start;
    if (columns < jpeg->output_width)
        jpeg_crop_scanline(jpeg, &start, &columns);
    uint8_t *rows = reserve(scratch, columns, (size_t)height + 1, 0, pixels);
    if (!rows)
        return false;
    JSAMPROW unused = rows + (size_t)height * pixels->stride;
    if (crop->top)
        jpeg_skip_scanlines(jpeg, (JDIMENSION)crop->top);
    for (int done = 0; done < height;) {
        JSAMPROW targets[ROWS];
        int count = height - done < ROWS ? height - done : ROWS;
        for (int i = 0; i < count; i++)
            targets[i] = rows + (size_t)(done + i) * pixels->stride;
        done += (int)jpeg_read_scanlines(jpeg, targets, (JDIMENSION)count);
    }
    if (judge)
        read_until(jpeg, jpeg->output_height, unused);
    if (jpeg->output_scanline == jpeg->output_height)
        jpeg_finish_decompress(jpeg);
    pixels->first = rows + 4 * ((size_t)left - start);
    return true;
}

static bool decode_by_planes(struct scratch *scratch, struct coefficients *coefficients, const struct crop *crop,
                             struct pixels *pixels) {
    uint8_t *rows = reserve(scratch, (size_t)crop->width, (size_t)crop->height, PLANES_SLACK, pixels);
    pixels->first = rows;
    return rows && planes_decode(scratch, coefficients, crop, rows, pixels->stride);
}

/* Decode the whole JPEG by Pillow: libjpeg smooths the blocks of one that lacks scans, each version in its own way. */
static bool decode_by_pillow(struct scratch *scratch, const uint8_t *jpeg, size_t size, const struct crop *crop,
                             struct pixels *pixels) {
    uint8_t *rows = reserve(scratch, (size_t)crop->full_width, (size_t)crop->full_height, 0, pixels);
    if (rows && !decode_whole(jpeg, size, crop->full_height, crop->full_width, rows, scratch->message))
        longjmp(scratch->damaged, 1);
    pixels->first = rows + (size_t)crop->top * pixels->stride + 4 * (size_t)crop->left;
    return rows;
}

/* Decode the crop of a JPEG; with `coefficients`, of its header with these. With `judge`, libjpeg does.
 *
 * A separate function, because longjmp leaves local variables of the function that calls setjmp undefined. */
static void decode(struct scratch *scratch, const uint8_t *bytes, size_t size, struct coefficients *coefficients,
                   const struct crop *crop, bool judge, struct pixels *pixels) {
    j_decompress_ptr jpeg = &scratch->jpeg;
    jpeg_mem_src(jpeg, (unsigned char *)bytes, size);
    jpeg_read_header(jpeg, TRUE);
    if ((int)jpeg->image_height != crop->full_height || (int)jpeg->image_width != crop->full_width) {
        snprintf(scratch->message, sizeof scratch->message, "is of %u x %u pixels, the file's table says %d x %d",
                 jpeg->image_width, jpeg->image_height, crop->full_width, crop->full_height);
        longjmp(scratch->damaged, 1);
    }
    jpeg->out_color_space = JCS_EXT_RGBX;
    jpeg->dct_method = JDCT_ISLOW;
    jpeg_start_decompress(jpeg);
    pixels->height = crop->height;
    pixels->width = crop->width;
    const bool by_planes = !judge && planes_take(jpeg);
    if (coefficients && !by_planes)
        entropy_doubt(&scratch->entropy, "has coefficients that libjpeg has to decode");
    bool done = by_planes                            ? decode_by_planes(scratch, coefficients, crop, pixels)
                : decode_whole && lacks_scans(jpeg) ? decode_by_pillow(scratch, bytes, size, crop, pixels)
                                                     : decode_by_libjpeg(scratch, crop, judge, pixels);
    if (!done) {
        snprintf(scratch->message, sizeof scratch->message, "out of memory");
        longjmp(scratch->damaged, 1);
    }
}

static bool attempt(struct scratch *scratch, const uint8_t *jpeg, size_t size, struct coefficients *coefficients,
                    const struct crop *crop, bool judge, struct pixels *pixels) {
    bool intact = !setjmp(scratch->damaged);
    if (intact) {
        jpeg_create_decompress(&scratch->jpeg); /* anew: it would keep the last JPEG's tables for one without any */
        decode(scratch, jpeg, size, coefficients, crop, judge, pixels);
    }
    jpeg_destroy_decompress(&scratch->jpeg);
    return intact;
}

bool crop_jpeg(struct scratch *scratch, const uint8_t *jpeg, size_t size, const struct crop *crop,
               struct pixels *pixels) {
    scratch->entropy.doubtful = false;
    return attempt(scratch, jpeg, size, NULL, crop, false, pixels) ||
           (scratch->entropy.doubtful && attempt(scratch, jpeg, size, NULL, crop, true, pixels));
}

bool crop_coefficients(struct scratch *scratch, const uint8_t *bytes, size_t size, const struct crop *crop,
                       struct pixels *pixels) {
    struct coefficients coefficients = {.damaged = &scratch->damaged, .message = scratch->message};
    const uint8_t *jpeg;
    scratch->entropy.doubtful = false;
    if (!coefficients_open(&coefficients, bytes, size)) {
        snprintf(scratch->message, sizeof scratch->message, "its coefficients are damaged");
        return false;
    }
    if (attempt(scratch, coefficients.head, coefficients.head_size, &coefficients, crop, false, pixels))
        return true;
    if (!scratch->entropy.doubtful || !(size = restore(scratch, bytes, size, &jpeg)))
        return false;
    entropy_set_segments(&scratch->entropy, jpeg, NULL, 0);
    return crop_jpeg(scratch, jpeg, size, crop, pixels);
}
