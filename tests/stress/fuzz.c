/* Damaged and intact JPEGs through the C code, and through libjpeg alone, which has to find the same.
 *
 *     fuzz SEED FIRST COUNT [FILE]
 *
 * Case number n depends on (SEED, n) only. It makes a JPEG, mostly damages it, and compares
 *   crop_jpeg of the whole image: fails if and only if libjpeg fails or warns, and otherwise has its pixels (it also
 *     fails for a bad Huffman code, of which libjpeg-turbo warns near the end of the data alone);
 *   crop_jpeg of a rectangle: succeeds and has libjpeg's pixels if libjpeg has no error_message of the whole image;
 *   restart_jpeg: reports a warning or failure if and only if libjpeg does, and otherwise keeps all pixels;
 *   crop_jpeg of what restart_jpeg wrote, with its table of segments, one of the two damaged: the pixels or an error;
 *   pack_jpeg: where it succeeds, libjpeg does too, restore_jpeg has the JPEG's bytes, and crop_coefficients libjpeg's
 *     pixels, of the whole and of a rectangle; of damaged coefficients both return;
 *   shrink_jpeg, into too little memory too: returns.
 * Prints the first case that differs, writes its JPEG to FILE, and exits with 1. Built with sanitizers, it stops at any invalid access or leak. */
#include <stdlib.h>
#include <string.h>

#include <jerror.h>

#include "../../pipeline/native/coefficients.h"
#include "../../pipeline/native/crop.h"
#include "../../pipeline/native/jpeg_error.h"

#define MOST 150000  /* bytes of a JPEG, at most */
#define SIDE 140     /* pixels of a side, at most */
#define INTERVAL 3   /* MCUs per segment of restart_jpeg's output, where a row is a multiple of it */
#define SEGMENTS 400 /* at most */

int restart_jpeg(const uint8_t *, int64_t, int, uint8_t *, int64_t, int64_t *, char *);
int pack_jpeg(const uint8_t *, int64_t, uint8_t *, int64_t, int64_t *, char *);
int restore_jpeg(const uint8_t *, int64_t, uint8_t *, int64_t, int64_t *, char *);
int shrink_jpeg(const uint8_t *, int64_t, int, int, int, int, uint8_t *, int64_t, int64_t *, char *);

static uint64_t state;

/* SplitMix64. */
static uint32_t below(uint32_t limit) {
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return (uint32_t)((z ^ (z >> 31)) >> 32) % limit;
}

struct jpeg {
    uint8_t data[MOST];
    size_t size;
    int height, width;
};

/* What libjpeg makes of a JPEG. */
struct reference {
    uint8_t pixels[4 * SIDE * SIDE];
    bool other_size;  /* than `height` and `width` of the JPEG */
    bool error_message;   /* an error, or a warning of other things than the header */
    bool any_warning; /* or of the header */
    bool progressive; /* whose coding prep keeps */
    char text[JMSG_LENGTH_MAX];
};

struct judge {
    struct jpeg_error_mgr manager;
    jmp_buf escape;
    struct reference *reference;
};

static void note(j_common_ptr jpeg, int level) {
    struct reference *reference = ((struct judge *)jpeg->err)->reference;
    int code = jpeg->err->msg_code;
    if (level >= 0)
        return;
    if (!reference->text[0])
        jpeg->err->format_message(jpeg, reference->text);
    reference->any_warning = true;
    reference->error_message |= code != JWRN_JFIF_MAJOR && code != JWRN_ADOBE_XFORM && code != JWRN_BOGUS_ICC;
}

static void stop(j_common_ptr jpeg) {
    note(jpeg, -1);
    ((struct judge *)jpeg->err)->reference->error_message = true;
    longjmp(((struct judge *)jpeg->err)->escape, 1);
}

static void decode(const struct jpeg *from, struct reference *reference) {
    struct jpeg_decompress_struct jpeg;
    struct judge judge = {.reference = reference};
    jpeg.err = jpeg_std_error(&judge.manager);
    judge.manager.error_exit = stop;
    judge.manager.emit_message = note;
    reference->error_message = reference->any_warning = reference->other_size = reference->progressive = false;
    reference->text[0] = 0;
    if (!setjmp(judge.escape)) {
        jpeg_create_decompress(&jpeg);
        jpeg_mem_src(&jpeg, (unsigned char *)from->data, from->size);
        jpeg_read_header(&jpeg, TRUE);
        reference->other_size = (int)jpeg.image_height != from->height || (int)jpeg.image_width != from->width;
        reference->progressive = jpeg.progressive_mode;
        jpeg.out_color_space = JCS_EXT_RGBX;
        jpeg.dct_method = JDCT_ISLOW;
        if (!reference->other_size) {
            jpeg_start_decompress(&jpeg);
            while (jpeg.output_scanline < jpeg.output_height) {
                JSAMPROW row = reference->pixels + 4 * (size_t)jpeg.output_scanline * (size_t)from->width;
                jpeg_read_scanlines(&jpeg, &row, 1);
            }
            jpeg_finish_decompress(&jpeg);
        }
    }
    jpeg_destroy_decompress(&jpeg);
}

/* An image of soft colours, edges and noise, in any coding that libjpeg writes. */
static void make(struct jpeg *to) {
    static const int factors[][2] = {{1, 1}, {2, 1}, {2, 2}, {1, 2}, {4, 1}, {4, 2}};
    struct jpeg_compress_struct jpeg;
    struct jpeg_error_mgr errors;
    unsigned char *written = to->data;
    unsigned long size = MOST;
    uint8_t row[3 * SIDE];
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_compress(&jpeg);
    jpeg_mem_dest(&jpeg, &written, &size);
    to->width = (int)(jpeg.image_width = 1 + below(SIDE));
    to->height = (int)(jpeg.image_height = 1 + below(SIDE));
    bool grey = !below(12);
    jpeg.input_components = grey ? 1 : 3;
    jpeg.in_color_space = grey ? JCS_GRAYSCALE : JCS_RGB;
    jpeg_set_defaults(&jpeg);
    if (!grey && !below(10))
        jpeg_set_colorspace(&jpeg, JCS_RGB);
    jpeg_set_quality(&jpeg, (int)(below(4) ? 60 + below(41) : 1 + below(60)), TRUE);
    const int *factor = factors[below(sizeof factors / sizeof *factors)];
    jpeg.comp_info[0].h_samp_factor = factor[0];
    jpeg.comp_info[0].v_samp_factor = factor[1];
    jpeg.optimize_coding = !below(3);
    if (!below(3))
        jpeg.restart_interval = 1 + below(20);
    if (!below(10))
        jpeg_simple_progression(&jpeg);
    jpeg_start_compress(&jpeg, TRUE);
    int noise = (int)below(60), slope = (int)below(9), edge = 1 + (int)below(40);
    for (int y = 0; y < to->height; y++) {
        for (int x = 0; x < 3 * to->width; x++)
            row[x] = (uint8_t)(100 + slope * (x / 3 + y) / 9 + ((x / 3 + y) / edge % 2) * 50 + (x % 3) * 20 +
                               (int)below((uint32_t)noise + 1));
        JSAMPROW rows = row;
        jpeg_write_scanlines(&jpeg, &rows, 1);
    }
    jpeg_finish_compress(&jpeg);
    jpeg_destroy_compress(&jpeg);
    to->size = size;
    if (written != to->data)
        abort(); /* MOST is too small */
}

/* Replace `removed` bytes at `at` by `count` others. */
static void splice(struct jpeg *jpeg, size_t at, size_t removed, const uint8_t *bytes, size_t count) {
    removed = at + removed > jpeg->size ? jpeg->size - at : removed;
    if (jpeg->size - removed + count > MOST)
        return;
    memmove(jpeg->data + at + count, jpeg->data + at + removed, jpeg->size - at - removed);
    memcpy(jpeg->data + at, bytes, count);
    jpeg->size += count - removed;
}

/* The first byte after the header of the first scan. */
static size_t scan_of(const struct jpeg *jpeg) {
    for (size_t at = 2; at + 4 < jpeg->size; at += 2 + (size_t)(jpeg->data[at + 2] << 8 | jpeg->data[at + 3]))
        if (jpeg->data[at + 1] == 0xDA)
            return at + 2 + (size_t)(jpeg->data[at + 2] << 8 | jpeg->data[at + 3]);
    return 0;
}

static void damage(struct jpeg *jpeg) {
    static const uint8_t markers[][4] = {{0xFF, 0, 0, 0},       {0xFF, 0xFF, 0, 0},    {0xFF, 0xFF, 0xFF, 0},
                                         {0xFF, 0xD0, 0, 0},    {0xFF, 0xD9, 0, 0},    {0xFF, 0xFF, 0xD1, 0},
                                         {0xFF, 0xD9, 0xFF, 0}, {0xFF, 0xC4, 0, 0x13}, {0, 0, 0, 0}};
    size_t scan = scan_of(jpeg);
    for (uint32_t times = 1 + (below(3) ? 0 : below(4)); times; times--) {
        size_t from = below(8) ? scan : 0;
        if (from >= jpeg->size)
            return;
        size_t at = from + below((uint32_t)(jpeg->size - from));
        at = below(10) ? at : jpeg->size - 1 - below(jpeg->size > 12 ? 12 : (uint32_t)jpeg->size); /* near the end */
        uint8_t byte = (uint8_t)below(256), part[30];
        const uint8_t *marker = markers[below(sizeof markers / sizeof *markers)];
        switch (below(8)) {
        case 0: jpeg->data[at] ^= (uint8_t)(1 << below(8)); break;
        case 1: jpeg->data[at] = byte; break;
        case 2: splice(jpeg, at, 1 + below(3), &byte, 0); break;
        case 3: splice(jpeg, at, 0, &byte, 1); break;
        case 4: splice(jpeg, at, below(3), marker, 1 + below(4)); break;
        case 5: memcpy(part, jpeg->data, sizeof part), splice(jpeg, at, 0, part, below(sizeof part)); break;
        case 6: jpeg->size = below(6) ? jpeg->size : at; break;
        default: { /* fill bytes before a stuffed zero or a marker */
            uint8_t *found = memchr(jpeg->data + from, 0xFF, jpeg->size - from), fill[] = {0xFF, 0xFF, 0xFF};
            for (uint32_t n = below(40); n && found; n--) {
                size_t next = (size_t)(found - jpeg->data) + 1;
                uint8_t *later = memchr(jpeg->data + next, 0xFF, jpeg->size - next);
                found = later ? later : found;
            }
            if (found)
                splice(jpeg, (size_t)(found - jpeg->data), 0, fill, 1 + below(3));
        }
        }
    }
}

/* The table of segments of a JPEG that restart_jpeg wrote (pipeline/formats/beton.py); returns its numbers. */
static size_t segments_of(const struct jpeg *jpeg, int across, int down, uint32_t *table) {
    size_t count = 3;
    table[0] = INTERVAL, table[1] = (uint32_t)across, table[2] = (uint32_t)down;
    table[count++] = (uint32_t)scan_of(jpeg);
    for (size_t at = scan_of(jpeg); at + 1 < jpeg->size; at++)
        if (jpeg->data[at] == 0xFF && jpeg->data[at + 1] >= 0xD0 && jpeg->data[at + 1] <= 0xD7)
            table[count++] = (uint32_t)at + 2;
    table[count++] = (uint32_t)jpeg->size - 2;
    return count;
}

static uint64_t number;
static struct jpeg current;
static const char *dump;

static void differs(const char *what, const struct reference *reference, const char *message) {
    printf("case %lu: %s; libjpeg: %s; ours: %s\n", (unsigned long)number, what,
           reference->text[0] ? reference->text : "no error_message", message[0] ? message : "no error_message");
    FILE *file = dump ? fopen(dump, "wb") : NULL;
    if (file) {
        fwrite(current.data, 1, current.size, file);
        fclose(file);
    }
    exit(1);
}

/* What Python gives for those that lack scans: the same as the reference. */
static bool decode_as_reference(const uint8_t *bytes, size_t size, int height, int width, uint8_t *rows, char *message) {
    static struct jpeg jpeg;
    static struct reference found;
    jpeg.size = size, jpeg.height = height, jpeg.width = width;
    memcpy(jpeg.data, bytes, size);
    decode(&jpeg, &found);
    memcpy(rows, found.pixels, 4 * (size_t)height * (size_t)width);
    snprintf(message, JMSG_LENGTH_MAX, "%s", found.text);
    return !found.error_message;
}

/* Decode a rectangle of a JPEG, from a copy that ends where it does; `whole` compares failures too. */
static void check_crop(const struct jpeg *jpeg, const struct reference *reference, struct crop crop, const uint32_t *table,
                       size_t numbers, bool whole, const char *what) {
    struct scratch *scratch = thread_scratch();
    struct pixels pixels;
    uint8_t *copy = malloc(jpeg->size ? jpeg->size : 1);
    memcpy(copy, jpeg->data, jpeg->size);
    scratch->message[0] = 0;
    entropy_set_segments(&scratch->entropy, copy, table, numbers);
    bool intact = crop_jpeg(scratch, copy, jpeg->size, &crop, &pixels);
    bool fails = reference->error_message || reference->other_size;
    bool stricter = (table && !whole) || strstr(scratch->message, "bad Huffman code");
    if ((whole && intact && fails) || (!intact && !fails && !stricter))
        differs(what, reference, scratch->message);
    for (int y = 0; intact && !fails && y < crop.height; y++)
        for (int x = 0; x < crop.width; x++)
            if (memcmp(pixels.first + (size_t)y * pixels.stride + 4 * (size_t)x,
                       reference->pixels + 4 * ((size_t)(crop.top + y) * (size_t)jpeg->width + (size_t)(crop.left + x)),
                       3))
                differs(what, reference, "other pixels");
    free(copy);
}

static struct crop rectangle(const struct jpeg *jpeg) {
    struct crop crop = {jpeg->height, jpeg->width, 0, 0, 0, 0};
    crop.top = (int)below((uint32_t)jpeg->height);
    crop.left = (int)below((uint32_t)jpeg->width);
    crop.height = 1 + (int)below((uint32_t)(jpeg->height - crop.top));
    crop.width = 1 + (int)below((uint32_t)(jpeg->width - crop.left));
    return crop;
}

/* restart_jpeg, then crops of what it wrote; `factors` are the MCU's pixels across and down, or 0 where unknown. */
static void check_restart(const struct jpeg *jpeg, const struct reference *reference) {
    static struct jpeg marked;
    static struct reference after;
    char text[JMSG_LENGTH_MAX];
    int64_t size = 0;
    int64_t room = below(8) ? MOST : 1 + below((uint32_t)jpeg->size + 1);
    uint8_t *copy = malloc(jpeg->size ? jpeg->size : 1), *out = malloc((size_t)room);
    memcpy(copy, jpeg->data, jpeg->size);
    int outcome = restart_jpeg(copy, (int64_t)jpeg->size, INTERVAL, out, room, &size, text);
    if (outcome == 0 || outcome == 1)
        memcpy(marked.data, out, marked.size = (size_t)size);
    free(copy);
    free(out);
    bool warns = reference->error_message || reference->any_warning;
    bool unwritable = strstr(text, "out of range"); /* a coefficient that can be read, and not be written */
    bool incomplete = outcome == 4 && reference->progressive; /* of which libjpeg may or may not warn */
    if (!reference->other_size && outcome != 3 && (outcome == 0) == warns && !unwritable && !incomplete)
        differs("restart_jpeg", reference, text);
    if (reference->other_size || reference->progressive || outcome)
        return;
    marked.height = jpeg->height;
    marked.width = jpeg->width;
    decode(&marked, &after);
    if (after.error_message || memcmp(after.pixels, reference->pixels, 4 * (size_t)(jpeg->height * jpeg->width)))
        differs("the pixels of restart_jpeg", reference, after.text);
    uint32_t table[SEGMENTS + 4] = {0};
    size_t frame = 2;
    while (marked.data[frame + 1] < 0xC0 || marked.data[frame + 1] > 0xC2)
        frame += 2 + (size_t)(marked.data[frame + 2] << 8 | marked.data[frame + 3]);
    int across = 8 * (marked.data[frame + 11] >> 4), down = 8 * (marked.data[frame + 11] & 15);
    if (marked.data[frame + 9] != 3 || (jpeg->width + across - 1) / across % INTERVAL)
        return; /* grey, or a row that is no multiple of the interval: prep gives it no table */
    size_t numbers = segments_of(&marked, across, down, table);
    check_crop(&marked, &after, rectangle(&marked), table, numbers, false, "a crop by segments");
    check_crop(&marked, &after, (struct crop){jpeg->height, jpeg->width, 0, 0, jpeg->height, jpeg->width}, table,
               numbers, true, "the whole by segments");
    if (below(2)) {
        table[below((uint32_t)numbers)] = below(2) ? below(MOST) : (uint32_t)-1 >> below(32);
    } else {
        damage(&marked);
        decode(&marked, &after);
    }
    check_crop(&marked, &after, rectangle(&marked), table, numbers, false, "a crop by damaged segments");
}

/* Crops of a container, from a copy with no more than CONTAINER_SLACK bytes after it; `reference` is NULL if it is damaged. */
static void check_packed_crop(const uint8_t *packed, size_t size, const struct jpeg *jpeg,
                              const struct reference *reference, struct crop crop) {
    struct scratch *scratch = thread_scratch();
    struct pixels pixels;
    uint8_t *copy = malloc(size + CONTAINER_SLACK);
    memcpy(copy, packed, size);
    scratch->message[0] = 0;
    bool intact = crop_coefficients(scratch, copy, size, &crop, &pixels);
    if (reference && !intact)
        differs("coefficients", reference, scratch->message);
    for (int y = 0; reference && y < crop.height; y++)
        for (int x = 0; x < crop.width; x++)
            if (memcmp(pixels.first + (size_t)y * pixels.stride + 4 * (size_t)x,
                       reference->pixels + 4 * ((size_t)(crop.top + y) * (size_t)jpeg->width + (size_t)(crop.left + x)),
                       3))
                differs("coefficients", reference, "other pixels");
    free(copy);
}

/* Change some bytes of a container, mostly of its numbers and of the sizes of its segments; returns its size. */
static size_t damage_packed(uint8_t *packed, size_t size) {
    for (uint32_t times = 1 + below(4); times; times--) {
        const uint32_t most = below(3) ? (uint32_t)size : size < 100 ? (uint32_t)size : 100;
        const size_t at = below(most);
        packed[at] = below(2) ? (uint8_t)below(256) : (uint8_t)(packed[at] ^ 1 << below(8));
    }
    return below(8) ? size : below((uint32_t)size + 1);
}

static void check_coefficients(const struct jpeg *jpeg, const struct reference *reference) {
    char text[JMSG_LENGTH_MAX] = "";
    int64_t size = 0, restored = 0;
    const int64_t room = CONTAINER_SLACK + (below(8) ? 2 * MOST : 1 + below((uint32_t)jpeg->size + 1));
    uint8_t *copy = malloc(jpeg->size ? jpeg->size : 1), *packed = malloc((size_t)room), *again = malloc(MOST);
    memcpy(copy, jpeg->data, jpeg->size);
    if (pack_jpeg(copy, (int64_t)jpeg->size, packed, room, &size, text) == 0) {
        const struct crop whole = {jpeg->height, jpeg->width, 0, 0, jpeg->height, jpeg->width};
        if (reference->error_message)
            differs("pack_jpeg", reference, "taken");
        if (restore_jpeg(packed, size, again, MOST, &restored, text) || (size_t)restored != jpeg->size ||
            memcmp(again, jpeg->data, jpeg->size))
            differs("restore_jpeg", reference, text);
        if (!reference->other_size) {
            check_packed_crop(packed, (size_t)size, jpeg, reference, whole);
            check_packed_crop(packed, (size_t)size, jpeg, reference, rectangle(jpeg));
            for (int i = 0; i < 3 && size; i++) {
                size = (int64_t)damage_packed(packed, (size_t)size);
                check_packed_crop(packed, (size_t)size, jpeg, NULL, rectangle(jpeg));
                restore_jpeg(packed, size, again, MOST, &restored, text);
            }
        }
    }
    free(copy);
    free(packed);
    free(again);
}

static void run_case(uint64_t seed) {
    static struct reference reference;
    struct jpeg *jpeg = &current;
    state = seed << 32 ^ number;
    make(jpeg);
    if (below(2)) {
        decode(jpeg, &reference);
        check_coefficients(jpeg, &reference);
    }
    if (below(10))
        damage(jpeg);
    decode(jpeg, &reference);
    struct crop whole = {jpeg->height, jpeg->width, 0, 0, jpeg->height, jpeg->width};
    check_crop(jpeg, &reference, whole, NULL, 0, true, "the whole");
    check_crop(jpeg, &reference, rectangle(jpeg), NULL, 0, false, "a crop");
    check_restart(jpeg, &reference);
    check_coefficients(jpeg, &reference);
    if (!below(4) && !reference.other_size) {
        uint8_t out[2000];
        int64_t size = 0;
        char text[JMSG_LENGTH_MAX];
        shrink_jpeg(jpeg->data, (int64_t)jpeg->size, 1 + (int)below((uint32_t)jpeg->width),
                    1 + (int)below((uint32_t)jpeg->height), 90, (int)below(3), out, 1 + below(sizeof out), &size, text);
    }
}

int main(int count, char **words) {
    if (count < 4)
        return 2;
    set_whole_decoder(decode_as_reference);
    dump = count > 4 ? words[4] : NULL;
    uint64_t first = strtoull(words[2], NULL, 10), end = first + strtoull(words[3], NULL, 10);
    for (number = first; number < end; number++)
        run_case(strtoull(words[1], NULL, 10));
    return 0;
}
