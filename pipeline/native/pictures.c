/* Reads images of a .beton: reads the file, decodes the crop, resizes and flips it. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "checksum.h"
#include "crop.h"
#include "pixels.h"
#include "resize.h"

#define JPEG 0
#define RAW 1
#define MESSAGE JMSG_LENGTH_MAX
#define MISMATCH "its bytes differ from its checksum"

/* Read `size` bytes at offset `from`; returns false with `message` on an error. pread returns less if the file is
 * truncated, where access to a memory map would kill the process. */
static bool read_bytes(int file, void *to, size_t size, off_t from, char *message) {
    for (char *at = to; size;) {
        ssize_t got = pread(file, at, size, from);
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

/* A sample of a file; offsets and sizes in bytes. */
struct sample {
    int file;
    bool jpeg;
    int height, width;
    off_t offset, table;
    size_t size, table_size;
    int64_t label;
    const uint32_t *checksum; /* of the sample; NULL if it has none */
    const uint32_t *bands;    /* the checksums of its bands of rows, if it is pixels */
};

/* Whether the record of a sample, and the checksums of its `count` blocks, have the sample's checksum. */
static bool has_checksum(const struct sample *sample, const uint32_t *blocks, size_t count, char *message) {
    const int64_t record[] = {sample->jpeg ? JPEG : RAW, sample->width,          sample->height, sample->label,
                              (int64_t)sample->size,     (int64_t)sample->table_size};
    if (crc32c(crc32c(0, record, sizeof record), blocks, count * sizeof *blocks) == *sample->checksum)
        return true;
    snprintf(message, MESSAGE, MISMATCH);
    return false;
}

/* Read the rows from `top` on, of which there are `height`, of a sample of pixels, and the others of their bands. Returns
 * the first of them, or NULL with `message`. */
static const uint8_t *read_rows(struct scratch *scratch, const struct sample *sample, int top, int height,
                                char *message) {
    const size_t row = 3 * (size_t)sample->width;
    const int rows = (int)((BAND + row - 1) / row), bands = (sample->height + rows - 1) / rows;
    int first = top, end = top + height;
    if (sample->checksum) {
        first -= top % rows;
        end = end + rows - 1 - (end + rows - 1) % rows;
        end = end < sample->height ? end : sample->height;
    }
    const size_t size = row * (size_t)(end - first);
    uint8_t *bytes = ensure_capacity(&scratch->bytes, size);
    if (!bytes || !read_bytes(sample->file, bytes, size, sample->offset + (off_t)(row * (size_t)first), message))
        return NULL;
    if (sample->checksum && !has_checksum(sample, sample->bands, (size_t)bands, message))
        return NULL;
    for (int y = first; sample->checksum && y < end; y += rows) {
        const int count = end - y < rows ? end - y : rows;
        if (crc32c(0, bytes + row * (size_t)(y - first), row * (size_t)count) != sample->bands[y / rows]) {
            snprintf(message, MESSAGE, MISMATCH);
            return NULL;
        }
    }
    return bytes + row * (size_t)(top - first);
}

/* Decode a rectangle of a sample; returns false with `message` if it is damaged. */
static bool decode_crop(struct scratch *scratch, const struct sample *sample, int top, int left, int height, int width,
                        struct pixels *pixels, char *message) {
    if (sample->jpeg) {
        uint8_t *bytes = ensure_capacity(&scratch->bytes, sample->size);
        uint32_t *table = ensure_capacity(&scratch->table, sample->table_size);
        if (!bytes || !table || !read_bytes(sample->file, bytes, sample->size, sample->offset, message) ||
            !read_bytes(sample->file, table, sample->table_size, sample->table, message))
            return false;
        if (sample->checksum) {
            const uint32_t blocks[] = {crc32c(0, bytes, sample->size), crc32c(0, table, sample->table_size)};
            if (!has_checksum(sample, blocks, 2, message))
                return false;
        }
        entropy_set_segments(&scratch->entropy, bytes, table, sample->table_size / sizeof *table);
        struct crop crop = {sample->height, sample->width, top, left, height, width};
        if (crop_jpeg(scratch, bytes, sample->size, &crop, pixels))
            return true;
        snprintf(message, MESSAGE, "%s", scratch->message);
        return false;
    }
    size_t row = 3 * (size_t)sample->width;
    uint8_t *to = ensure_capacity(&scratch->pixels, 4 * (size_t)width * (size_t)height);
    const uint8_t *bytes = to ? read_rows(scratch, sample, top, height, message) : NULL;
    if (!bytes)
        return false;
    *pixels = (struct pixels){to, 4 * (size_t)width, height, width};
    for (int y = 0; y < height; y++)
        spread_row(bytes + (size_t)y * row + 3 * (size_t)left, width, to + 4 * (size_t)y * (size_t)width);
    return true;
}

/* A crop that extends beyond the image: it has the output's size, so nothing is resized, and the outside is black. */
static bool crop_with_border(struct scratch *scratch, const struct sample *sample, const int64_t *box, uint8_t *picture,
                             int side, char *message) {
    int top = (int)box[0], left = (int)box[1];
    int first = top < 0 ? 0 : top, end = top + side < sample->height ? top + side : sample->height;
    int start = left < 0 ? 0 : left, stop = left + side < sample->width ? left + side : sample->width;
    memset(picture, 0, 3 * (size_t)side * (size_t)side);
    struct pixels inside;
    if (end <= first || stop <= start)
        return true;
    if (!decode_crop(scratch, sample, first, start, end - first, stop - start, &inside, message))
        return false;
    for (int y = first; y < end; y++)
        for (int x = start; x < stop; x++) {
            int to = box[4] ? side - 1 - (x - left) : x - left;
            memcpy(picture + 3 * ((size_t)(y - top) * (size_t)side + (size_t)to),
                   inside.first + (size_t)(y - first) * inside.stride + 4 * (size_t)(x - start), 3);
        }
    return true;
}

/* Read every `chunks`-th of `count` images, beginning with number `chunk`: one thread's share of a batch.
 *
 * Tables by sample: mode (JPEG or RAW), height and width in pixels; offset and size of its data, and of its table of
 * segments, in bytes; its label; its checksum, and the index of its first band in `bands`, the checksums of bands of
 * rows. `checksum` is NULL if there are none, or they are not to be compared. For each image: the number of its sample; its box int64 [5] (top, left, height, width, flip); and
 * whether it is resized with a bicubic filter, otherwise bilinear. `file` is an open descriptor.
 *
 * Output: pictures, uint8 [count][side][side][3]; messages [count][MESSAGE], in which the error of each damaged sample
 * is written. The others are not changed. */
void read_pictures(int file, const uint8_t *mode, const int64_t *height, const int64_t *width, const int64_t *offset,
                   const int64_t *size, const int64_t *table, const int64_t *table_size, const int64_t *label,
                   const uint32_t *checksum, const int64_t *band, const uint32_t *bands, const int64_t *samples,
                   const int64_t *boxes, const uint8_t *cubic, uint8_t *pictures, char *messages, int64_t side,
                   int64_t count, int64_t chunk, int64_t chunks) {
    struct scratch *scratch = thread_scratch();
    for (int64_t b = chunk; b < count; b += chunks) {
        char *message = messages + MESSAGE * b;
        const int64_t s = samples[b], *box = boxes + 5 * b;
        uint8_t *picture = pictures + 3 * side * side * b;
        struct sample sample = {file,
                                mode[s] == JPEG,
                                (int)height[s],
                                (int)width[s],
                                offset[s],
                                table[s],
                                (size_t)size[s],
                                (size_t)table_size[s],
                                label[s],
                                checksum ? checksum + s : NULL,
                                checksum ? bands + band[s] : NULL};
        struct pixels pixels;
        bool inside = box[0] >= 0 && box[1] >= 0 && box[0] + box[2] <= height[s] && box[1] + box[3] <= width[s];
        bool done = scratch && (inside ? decode_crop(scratch, &sample, (int)box[0], (int)box[1], (int)box[2],
                                                     (int)box[3], &pixels, message) &&
                                             resize(scratch, pixels, picture, (int)side, cubic[b], box[4])
                                       : crop_with_border(scratch, &sample, box, picture, (int)side, message));
        if (!done && !*message)
            snprintf(message, MESSAGE, "out of memory");
    }
}
