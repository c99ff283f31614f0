/* Pictures from a .beton: read, decode the crop, resize, flip. One call does a thread's share of a batch. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "crop.h"
#include "pixels.h"
#include "resize.h"

#define JPEG 0
#define MESSAGE JMSG_LENGTH_MAX

/* pread instead of a mapping: of a file that was cut short it returns less, where a mapping ends the process. */
static bool read_bytes(int file, void *to, size_t size, off_t from, char *why) {
    for (char *at = to; size;) {
        ssize_t got = pread(file, at, size, from);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            snprintf(why, MESSAGE, "%s", got ? strerror(errno) : "the file ends before it; it was cut short");
            return false;
        }
        at += got;
        from += got;
        size -= (size_t)got;
    }
    return true;
}

/* What a box asks for of a file's sample. */
struct sample {
    int file;
    bool jpeg;
    int height, width;
    off_t offset, table;
    size_t size, table_size;
};

/* The rows and columns of a sample; false with `why` where it is damaged. */
static bool pixels_of(struct scratch *scratch, const struct sample *sample, int top, int left, int height, int width,
                      struct pixels *pixels, char *why) {
    if (sample->jpeg) {
        uint8_t *bytes = room(&scratch->bytes, sample->size);
        uint32_t *table = room(&scratch->table, sample->table_size);
        if (!bytes || !table || !read_bytes(sample->file, bytes, sample->size, sample->offset, why) ||
            !read_bytes(sample->file, table, sample->table_size, sample->table, why))
            return false;
        entropy_knows(&scratch->entropy, bytes, table, sample->table_size / sizeof *table);
        if (crop_jpeg(scratch, bytes, sample->size, sample->height, sample->width, top, left, height, width, pixels))
            return true;
        snprintf(why, MESSAGE, "%s", scratch->why);
        return false;
    }
    size_t row = 3 * (size_t)sample->width;
    uint8_t *bytes = room(&scratch->bytes, row * (size_t)height);
    uint8_t *to = room(&scratch->pixels, 4 * (size_t)width * (size_t)height);
    if (!bytes || !to ||
        !read_bytes(sample->file, bytes, row * (size_t)height, sample->offset + (off_t)(row * (size_t)top), why))
        return false;
    *pixels = (struct pixels){to, 4 * (size_t)width, height, width};
    for (int y = 0; y < height; y++)
        spread_row(bytes + (size_t)y * row + 3 * (size_t)left, width, to + 4 * (size_t)y * (size_t)width);
    return true;
}

/* A box that reaches out of the picture has the picture's size: nothing is resized, and what lies outside is black. */
static bool bordered(struct scratch *scratch, const struct sample *sample, const int64_t *box, uint8_t *picture,
                     int side, char *why) {
    int top = (int)box[0], left = (int)box[1];
    int first = top < 0 ? 0 : top, end = top + side < sample->height ? top + side : sample->height;
    int start = left < 0 ? 0 : left, stop = left + side < sample->width ? left + side : sample->width;
    memset(picture, 0, 3 * (size_t)side * (size_t)side);
    struct pixels inside;
    if (end <= first || stop <= start)
        return true;
    if (!pixels_of(scratch, sample, first, start, end - first, stop - start, &inside, why))
        return false;
    for (int y = first; y < end; y++)
        for (int x = start; x < stop; x++) {
            int to = box[4] ? side - 1 - (x - left) : x - left;
            memcpy(picture + 3 * ((size_t)(y - top) * (size_t)side + (size_t)to),
                   inside.first + (size_t)(y - first) * inside.stride + 4 * (size_t)(x - start), 3);
        }
    return true;
}

/* Every `chunks`-th of `count` pictures, uint8 [count][side][side][3], from `chunk` on. Tables by sample: its mode,
 * height and width; where it lies, offset and size; and where its table of segments does. Of each picture: its sample,
 * its box (top, left, height, width, flip) and whether it is cubic. `messages` [count][MESSAGE] stay empty but for a
 * damaged sample's. */
void read_pictures(int file, const uint8_t *mode, const int64_t *height, const int64_t *width, const int64_t *offset,
                   const int64_t *size, const int64_t *table, const int64_t *table_size, const int64_t *samples,
                   const int64_t *boxes, const uint8_t *cubic, uint8_t *pictures, char *messages, int64_t side,
                   int64_t count, int64_t chunk, int64_t chunks) {
    struct scratch *scratch = own_scratch();
    for (int64_t b = chunk; b < count; b += chunks) {
        char *why = messages + MESSAGE * b;
        const int64_t s = samples[b], *box = boxes + 5 * b;
        uint8_t *picture = pictures + 3 * side * side * b;
        struct sample sample = {file,      mode[s] == JPEG, (int)height[s],  (int)width[s],
                                offset[s], table[s],        (size_t)size[s], (size_t)table_size[s]};
        struct pixels pixels;
        bool inside = box[0] >= 0 && box[1] >= 0 && box[0] + box[2] <= height[s] && box[1] + box[3] <= width[s];
        bool done = scratch && (inside ? pixels_of(scratch, &sample, (int)box[0], (int)box[1], (int)box[2],
                                                   (int)box[3], &pixels, why) &&
                                             resize(scratch, pixels, picture, (int)side, cubic[b], box[4])
                                       : bordered(scratch, &sample, box, picture, (int)side, why));
        if (!done && !*why)
            snprintf(why, MESSAGE, "out of memory");
    }
}
