/* Reads images of a .beton: reads the file, decodes the crop, resizes and flips it. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "crop.h"
#include "pixels.h"
#include "resize.h"

#define JPEG 0
#define MESSAGE JMSG_LENGTH_MAX

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

/* A sample of a file; offsets and sizes in bytes. */
struct sample {
    int file;
    bool jpeg;
    int height, width;
    off_t offset, table;
    size_t size, table_size;
};

/* Decode a rectangle of a sample; returns false with `message` if it is damaged. */
static bool decode_crop(struct scratch *scratch, const struct sample *sample, int top, int left, int height, int width,
                        struct pixels *pixels, char *message) {
    if (sample->jpeg) {
        uint8_t *bytes = ensure_capacity(&scratch->bytes, sample->size);
        uint32_t *table = ensure_capacity(&scratch->table, sample->table_size);
        if (!bytes || !table || !read_bytes(sample->file, bytes, sample->size, sample->offset, message) ||
            !read_bytes(sample->file, table, sample->table_size, sample->table, message))
            return false;
        entropy_set_segments(&scratch->entropy, bytes, table, sample->table_size / sizeof *table);
        if (crop_jpeg(scratch, bytes, sample->size, sample->height, sample->width, top, left, height, width, pixels))
            return true;
        snprintf(message, MESSAGE, "%s", scratch->message);
        return false;
    }
    size_t row = 3 * (size_t)sample->width;
    uint8_t *bytes = ensure_capacity(&scratch->bytes, row * (size_t)height);
    uint8_t *to = ensure_capacity(&scratch->pixels, 4 * (size_t)width * (size_t)height);
    if (!bytes || !to ||
        !read_bytes(sample->file, bytes, row * (size_t)height, sample->offset + (off_t)(row * (size_t)top), message))
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
 * segments, in bytes. For each image: the number of its sample; its box int64 [5] (top, left, height, width, flip); and
 * whether it is resized with a bicubic filter, otherwise bilinear. `file` is an open descriptor.
 *
 * Output: pictures, uint8 [count][side][side][3]; messages [count][MESSAGE], in which the error of each damaged sample
 * is written. The others are not changed. */
void read_pictures(int file, const uint8_t *mode, const int64_t *height, const int64_t *width, const int64_t *offset,
                   const int64_t *size, const int64_t *table, const int64_t *table_size, const int64_t *samples,
                   const int64_t *boxes, const uint8_t *cubic, uint8_t *pictures, char *messages, int64_t side,
                   int64_t count, int64_t chunk, int64_t chunks) {
    struct scratch *scratch = thread_scratch();
    for (int64_t b = chunk; b < count; b += chunks) {
        char *message = messages + MESSAGE * b;
        const int64_t s = samples[b], *box = boxes + 5 * b;
        uint8_t *picture = pictures + 3 * side * side * b;
        struct sample sample = {file,      mode[s] == JPEG, (int)height[s],  (int)width[s],
                                offset[s], table[s],        (size_t)size[s], (size_t)table_size[s]};
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
