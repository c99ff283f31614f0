/* A JPEG's coefficients in the form of coefficients.h, and back: the JPEG byte for byte, or nothing. */
#include "planes.h"
#include "restore.h"

#include <stdlib.h>

#include <jpegint.h>

enum { WRITTEN = 0, FAILED = 2, NOT_TAKEN = 4 };

static void write_number(uint8_t *to, size_t number, int bytes) {
    for (int i = 0; i < bytes; i++)
        to[i] = (uint8_t)(number >> 8 * i);
}

/* Why a JPEG whose header has been read stays one, or NULL. */
static const char *refused(j_decompress_ptr jpeg) {
    if (jpeg->progressive_mode)
        return "progressive";
    if (jpeg->arith_code)
        return "arithmetic coding";
    if (jpeg->data_precision != 8)
        return "not of 8 bits";
    return jpeg->inputctl->has_multiple_scans ? "several scans" : NULL;
}

/* Write the segments. Returns the position after them, or NULL if they do not fit before `stop`, or a coefficient is too
 * large; jumps to `damaged` if the JPEG is. */
static uint8_t *write_segments(struct scratch *scratch, uint8_t *sizes, unsigned interval, uint8_t *to,
                               const uint8_t *stop) {
    j_decompress_ptr jpeg = &scratch->jpeg;
    JCOEF blocks[D_MAX_BLOCKS_IN_MCU][DCTSIZE2];
    unsigned last[D_MAX_BLOCKS_IN_MCU];
    for (unsigned row = 0; row < jpeg->MCU_rows_in_scan; row++)
        for (unsigned first = 0; first < jpeg->MCUs_per_row; first += interval, sizes += 2) {
            struct bit_writer writer = {.next = to};
            for (unsigned column = first; column < first + interval && column < jpeg->MCUs_per_row; column++) {
                entropy_read(&scratch->entropy, row * jpeg->MCUs_per_row + column, blocks, last);
                if (stop - writer.next < D_MAX_BLOCKS_IN_MCU * BLOCK_BYTES)
                    return NULL;
                for (int b = 0; b < jpeg->blocks_in_MCU; b++)
                    if (!write_block(&writer, blocks[b]))
                        return NULL;
            }
            write_bits(&writer, 0, 7);
            write_number(sizes, (size_t)(writer.next - to), 2);
            to = writer.next;
        }
    return to;
}

/* Write the container, of `*out_size` bytes, to `out`. Returns why it is not, or NULL. */
static const char *pack(struct scratch *scratch, const uint8_t *data, size_t size, uint8_t *out, size_t capacity,
                        size_t *out_size) {
    j_decompress_ptr jpeg = &scratch->jpeg;
    jpeg_create_decompress(jpeg);
    jpeg_mem_src(jpeg, (unsigned char *)data, size);
    jpeg_read_header(jpeg, TRUE);
    const char *reason = refused(jpeg);
    if (reason)
        return reason;
    jpeg->out_color_space = JCS_EXT_RGBX;
    jpeg_start_decompress(jpeg);
    if (!planes_take(jpeg))
        return "of a sampling or colours that the decoder leaves to libjpeg";
    entropy_set_segments(&scratch->entropy, data, NULL, 0);
    entropy_begin(&scratch->entropy, jpeg);
    const uint8_t *scan = jpeg->src->next_input_byte;
    const unsigned interval = coefficients_interval(jpeg);
    const size_t segments = (size_t)jpeg->MCU_rows_in_scan * ((jpeg->MCUs_per_row + interval - 1) / interval);
    const size_t head = (size_t)(scan - data);
    if (capacity < CONTAINER_HEAD + 2 * segments + size)
        return "larger as coefficients";
    uint8_t *sizes = out + CONTAINER_HEAD, *parts = sizes + 2 * segments;
    /* The end is known after the scan has been read, and is as long as what is left then. */
    uint8_t *from = parts + head, *to = write_segments(scratch, sizes, interval, from, out + capacity);
    if (!to)
        return "of coefficients beyond baseline coding";
    const uint8_t *end = scratch->entropy.marker;
    const size_t end_size = size - (size_t)(end - data);
    if (end_size > (size_t)(out + capacity - to))
        return "larger as coefficients";
    memmove(from + end_size, from, (size_t)(to - from));
    memcpy(parts, data, head);
    memcpy(parts + head, end, end_size);
    write_number(out, CONTAINER_MAGIC, 4);
    write_number(out + 4, size, 4);
    write_number(out + 8, head, 4);
    write_number(out + 12, end_size, 4);
    write_number(out + 16, interval, 2);
    write_number(out + 18, 1, 2);
    write_number(out + 20, segments, 4);
    *out_size = (size_t)(to - out) + end_size;
    return NULL;
}

/* Whether the container in `out`, with bytes filled up with ones or else zeros, restores the JPEG. */
static bool restores(struct scratch *scratch, uint8_t *out, size_t out_size, const uint8_t *data, size_t size) {
    for (int ones = 1; ones >= 0; ones--) {
        const uint8_t *restored;
        out[18] = (uint8_t)ones;
        if (restore(scratch, out, out_size, &restored) == size && !memcmp(restored, data, size))
            return true;
    }
    return false;
}

/* Write the coefficients of the JPEG of `size` bytes to `out`, of `capacity` bytes. Returns
 *   WRITTEN, with the number of bytes in `*out_size`: the JPEG can be restored from them;
 *   NOT_TAKEN, with the reason in `text`, of JMSG_LENGTH_MAX (200) bytes, if it cannot;
 *   FAILED if out of memory. */
int pack_jpeg(const uint8_t *data, int64_t size, uint8_t *out, int64_t capacity, int64_t *out_size, char *text) {
    struct scratch *scratch = thread_scratch();
    size_t written = 0;
    const char *reason = NULL;
    text[0] = '\0';
    if (!scratch)
        return FAILED;
    scratch->message[0] = '\0';
    if (!setjmp(scratch->damaged))
        reason = pack(scratch, data, (size_t)size, out, (size_t)capacity - CONTAINER_SLACK, &written);
    else
        reason = scratch->message;
    jpeg_destroy_decompress(&scratch->jpeg);
    if (!reason && !restores(scratch, out, written, data, (size_t)size))
        reason = "coded in another way than its tables ask for";
    if (reason) {
        snprintf(text, JMSG_LENGTH_MAX, "%s", reason);
        return NOT_TAKEN;
    }
    *out_size = (int64_t)written;
    return WRITTEN;
}

/* Write the JPEG of a container of `size` bytes to `out`, of `capacity` bytes. Returns as `pack_jpeg`; the reason is that
 * the container is damaged. */
int restore_jpeg(const uint8_t *data, int64_t size, uint8_t *out, int64_t capacity, int64_t *out_size, char *text) {
    struct scratch *scratch = thread_scratch();
    const uint8_t *restored;
    uint8_t *bytes = scratch ? ensure_capacity(&scratch->bytes, (size_t)size + CONTAINER_SLACK) : NULL;
    if (!bytes)
        return FAILED;
    memcpy(bytes, data, (size_t)size);
    const size_t written = restore(scratch, bytes, (size_t)size, &restored);
    if (!written || written > (size_t)capacity) {
        snprintf(text, JMSG_LENGTH_MAX, "%s", written ? "larger than its header says" : scratch->message);
        return NOT_TAKEN;
    }
    memcpy(out, restored, written);
    *out_size = (int64_t)written;
    return WRITTEN;
}
