/* Reads images of a .beton: reads the file, decodes the crop, resizes and flips it. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "checksum.h"
#include "coefficients.h"
#include "crop.h"
#include "pixels.h"
#include "resize.h"

#define JPEG 0
#define RAW 1
#define COEFFICIENTS 2
#define MESSAGE JMSG_LENGTH_MAX
#define MISMATCH "its bytes differ from its checksum"

/* A sample of a file; offsets and sizes in bytes. */
struct sample {
    int file;
    int mode; /* JPEG, RAW or COEFFICIENTS */
    int height, width;
    off_t offset, table;
    size_t size, table_size;
    int64_t label;
    const uint32_t *checksum; /* of the sample; NULL if it has none */
    const uint32_t *bands;    /* the checksums of its bands of rows, if it is pixels */
    const uint8_t *memory;    /* where its bytes are, or NULL if they are read from the file; then its offset is 0 */
};

/* Read `size` bytes at offset `from`; returns false with `message` on an error. pread returns less if the file is
 * truncated, where access to a memory map would kill the process. */
static bool read_bytes(const struct sample *sample, void *to, size_t size, off_t from, char *message) {
    if (sample->memory) { /* copied, because what decodes them may read beyond their end */
        memcpy(to, sample->memory + from, size);
        return true;
    }
    for (char *at = to; size;) {
        ssize_t got = pread(sample->file, at, size, from);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            snprintf(message, MESSAGE, "%s", got ? strerror(errno) : "the file ends before it; it was cut short");
            return false;
        }
        at += got;
        from += got;
        size -= (size_t)got;
    }
    return true;
}

#define BAND 16384 /* bytes, see pipeline/formats/checksums.py */

/* Whether the record of a sample, and the checksums of its `count` blocks, have the sample's checksum. */
static bool has_checksum(const struct sample *sample, const uint32_t *blocks, size_t count, char *message) {
    const int64_t record[] = {sample->mode,  sample->width,         sample->height,
                              sample->label, (int64_t)sample->size, (int64_t)sample->table_size};
    if (crc32c(crc32c(0, record, sizeof record), blocks, count * sizeof *blocks) == *sample->checksum)
        return true;
    snprintf(message, MESSAGE, MISMATCH);
    return false;
}

/* Read a rectangle of a sample of pixels, and the rest of the bands of rows that it lies in. A band is checked just before
 * its pixels are used, while it is in the cache. Returns false with `message` if it is damaged. */
static bool read_pixels(struct scratch *scratch, const struct sample *sample, int top, int left, int height, int width,
                        struct pixels *pixels, char *message) {
    const size_t row = 3 * (size_t)sample->width, stride = 4 * (size_t)width;
    const int rows = (int)((BAND + row - 1) / row), bands = (sample->height + rows - 1) / rows;
    int first = top, end = top + height;
    if (sample->checksum) {
        first -= top % rows;
        end = end + rows - 1 - (end + rows - 1) % rows;
        end = end < sample->height ? end : sample->height;
    }
    const size_t size = row * (size_t)(end - first);
    uint8_t *to = ensure_capacity(&scratch->pixels, stride * (size_t)height);
    uint8_t *bytes = ensure_capacity(&scratch->bytes, size);
    if (!to || !bytes || !read_bytes(sample, bytes, size, sample->offset + (off_t)(row * (size_t)first), message))
        return false;
    if (sample->checksum && !has_checksum(sample, sample->bands, (size_t)bands, message))
        return false;
    *pixels = (struct pixels){to, stride, height, width};
    for (int y = first, stop; y < end; y = stop) {
        stop = sample->checksum && end - y > rows ? y + rows : end;
        const uint8_t *band = bytes + row * (size_t)(y - first);
        if (sample->checksum && crc32c(0, band, row * (size_t)(stop - y)) != sample->bands[y / rows]) {
            snprintf(message, MESSAGE, MISMATCH);
            return false;
        }
        for (int r = y > top ? y : top; r < stop && r < top + height; r++)
            spread_row(band + row * (size_t)(r - y) + 3 * (size_t)left, width, to + stride * (size_t)(r - top));
    }
    return true;
}

/* Decode a rectangle of a sample; returns false with `message` if it is damaged. */
static bool decode_crop(struct scratch *scratch, const struct sample *sample, int top, int left, int height, int width,
                        struct pixels *pixels, char *message) {
    if (sample->mode != RAW) {
        uint8_t *bytes = ensure_capacity(&scratch->bytes, sample->size + CONTAINER_SLACK);
        uint32_t *table = ensure_capacity(&scratch->table, sample->table_size);
        if (!bytes || !table || !read_bytes(sample, bytes, sample->size, sample->offset, message) ||
            !read_bytes(sample, table, sample->table_size, sample->table, message))
            return false;
        if (sample->checksum) {
            const uint32_t blocks[] = {crc32c(0, bytes, sample->size), crc32c(0, table, sample->table_size)};
            if (!has_checksum(sample, blocks, 2, message))
                return false;
        }
        entropy_set_segments(&scratch->entropy, bytes, table, sample->table_size / sizeof *table);
        struct crop crop = {sample->height, sample->width, top, left, height, width};
        if (sample->mode == JPEG ? crop_jpeg(scratch, bytes, sample->size, &crop, pixels)
                                 : crop_coefficients(scratch, bytes, sample->size, &crop, pixels))
            return true;
        snprintf(message, MESSAGE, "%s", scratch->message);
        return false;
    }
    return read_pixels(scratch, sample, top, left, height, width, pixels, message);
}

/* A rectangle of pixels of an image: rows from `top` up to `bottom`, columns from `left` up to `right`. */
struct rectangle {
    int top, left, bottom, right;
};

static int least(int64_t a, int64_t b) { return (int)(a < b ? a : b); }
static int greatest(int64_t a, int64_t b) { return (int)(a > b ? a : b); }

/* The part of a box that is within the image; bottom <= top, or right <= left, if there is none. */
static struct rectangle part_inside(const int64_t *box, const struct sample *sample) {
    return (struct rectangle){greatest(box[0], 0), greatest(box[1], 0), least(box[0] + box[2], sample->height),
                              least(box[1] + box[3], sample->width)};
}

static bool is_empty(struct rectangle part) { return part.bottom <= part.top || part.right <= part.left; }

/* The smallest rectangle with the parts of all boxes in it; empty if all of these are. */
static struct rectangle surround(const int64_t *boxes, int64_t count, const struct sample *sample) {
    struct rectangle all = {sample->height, sample->width, 0, 0};
    for (int64_t k = 0; k < count; k++) {
        const struct rectangle part = part_inside(boxes + 5 * k, sample);
        if (!is_empty(part))
            all = (struct rectangle){least(all.top, part.top), least(all.left, part.left),
                                     greatest(all.bottom, part.bottom), greatest(all.right, part.right)};
    }
    return all;
}

/* A box that extends beyond the image: it has the output's size, so nothing is resized, and the outside is black.
 * `inside` are the pixels of its part. */
static void copy_with_border(struct pixels inside, struct rectangle part, const int64_t *box, uint8_t *image,
                             int side) {
    memset(image, 0, 3 * (size_t)side * (size_t)side);
    for (int y = part.top; y < part.bottom; y++)
        for (int x = part.left; x < part.right; x++) {
            int to = box[4] ? side - 1 - (x - (int)box[1]) : x - (int)box[1];
            memcpy(image + 3 * ((size_t)(y - box[0]) * (size_t)side + (size_t)to),
                   inside.first + (size_t)(y - part.top) * inside.stride + 4 * (size_t)(x - part.left), 3);
        }
}

/* One box of decoded pixels, which `around` says the place of, resized and flipped. */
static bool take_box(struct scratch *scratch, const struct sample *sample, struct pixels pixels,
                     struct rectangle around, const int64_t *box, bool cubic, uint8_t *image, int side) {
    const struct rectangle part = part_inside(box, sample);
    const bool whole = part.bottom - part.top == box[2] && part.right - part.left == box[3];
    if (!is_empty(part))
        pixels = (struct pixels){pixels.first + (size_t)(part.top - around.top) * pixels.stride +
                                     4 * (size_t)(part.left - around.left),
                                 pixels.stride, part.bottom - part.top, part.right - part.left};
    if (whole)
        return resize(scratch, pixels, image, side, cubic, box[4]);
    copy_with_border(pixels, part, box, image, side);
    return true;
}

/* Read every `chunks`-th of `count` samples, beginning with number `chunk`: one thread's share of a batch. Each is
 * decoded once, and gives one image in each of `views`.
 *
 * Tables by sample: mode (JPEG, RAW or COEFFICIENTS), height and width in pixels; offset and size of its data, and of its
 * table of segments, in bytes; its label; its checksum, and the index of its first band in `bands`, the checksums of bands of
 * rows. `checksum` is NULL if there are none, or they are not to be compared. For each sample: its number; for each of
 * its views the box int64 [5] (top, left, height, width, flip), and whether it is resized with a bicubic filter,
 * otherwise bilinear. `file` is an open descriptor.
 *
 * Output: for each view uint8 [count][side][side][3] at the address in `images`, with the view's side in `sides`;
 * messages [count][MESSAGE], in which the error of each damaged sample is written. The others are not changed. */
void read_images(int file, const uint8_t *mode, const int64_t *height, const int64_t *width, const int64_t *offset,
                   const int64_t *size, const int64_t *table, const int64_t *table_size, const int64_t *label,
                   const uint32_t *checksum, const int64_t *band, const uint32_t *bands, const int64_t *samples,
                   const int64_t *boxes, const uint8_t *cubic, uint8_t *const *images, const int64_t *sides,
                   char *messages, int64_t views, int64_t count, int64_t chunk, int64_t chunks) {
    struct scratch *scratch = thread_scratch();
    for (int64_t b = chunk; b < count; b += chunks) {
        char *message = messages + MESSAGE * b;
        const int64_t s = samples[b];
        struct sample sample = {file,
                                mode[s],
                                (int)height[s],
                                (int)width[s],
                                offset[s],
                                table[s],
                                (size_t)size[s],
                                (size_t)table_size[s],
                                label[s],
                                checksum ? checksum + s : NULL,
                                checksum ? bands + band[s] : NULL,
                                NULL};
        struct pixels pixels = {0};
        const struct rectangle around = surround(boxes + 5 * views * b, views, &sample);
        bool done = scratch && (is_empty(around) || decode_crop(scratch, &sample, around.top, around.left,
                                                                around.bottom - around.top, around.right - around.left,
                                                                &pixels, message));
        for (int64_t k = views * b; done && k < views * (b + 1); k++) {
            const int64_t side = sides[k % views];
            done = take_box(scratch, &sample, pixels, around, boxes + 5 * k, cubic[k],
                            images[k % views] + 3 * side * side * b, (int)side);
        }
        if (!done && !*message)
            snprintf(message, MESSAGE, "out of memory");
    }
}

/* Decode a box int64 [5] of one sample, whose bytes are in memory, to an image uint8 [side][side][3]. A damaged one is
 * black, with a line on the standard error output: FFCV, which calls this, does not take errors. */
void decode_from_memory(const uint8_t *bytes, int64_t size, int64_t mode, int64_t height, int64_t width,
                        const int64_t *box, int64_t cubic, uint8_t *image, int64_t side, int64_t number) {
    struct scratch *scratch = thread_scratch();
    char message[MESSAGE] = "out of memory";
    struct sample sample = {.mode = (int)mode,
                            .height = (int)height,
                            .width = (int)width,
                            .size = (size_t)size,
                            .memory = bytes};
    struct pixels pixels = {0};
    const struct rectangle part = part_inside(box, &sample);
    if (mode == RAW && size != 3 * height * width)
        snprintf(message, MESSAGE, "has %lld bytes, its pixels %lld", (long long)size, (long long)(3 * height * width));
    else if (scratch &&
             decode_crop(scratch, &sample, part.top, part.left, part.bottom - part.top, part.right - part.left, &pixels,
                         message) &&
             take_box(scratch, &sample, pixels, part, box, cubic, image, (int)side))
        return;
    memset(image, 0, 3 * (size_t)side * (size_t)side);
    fprintf(stderr, "warning: sample %lld is damaged (%s); its image is black\n", (long long)number, message);
}

/* The number at an address. Compiled Python treats the elements of an array of its closure as constants. */
int64_t read_number(const volatile int64_t *at) { return *at; }
