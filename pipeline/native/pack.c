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

/* A stream of bits that are written. */
struct bit_writer {
    uint8_t *next;
    uint64_t bits; /* the last `count` of them are not written yet */
    unsigned count;
};

/* Write `count` bits, of which the others are 0. */
static void write_bits(struct bit_writer *to, uint64_t bits, unsigned count) {
    for (unsigned part; count; bits >>= part, count -= part) {
        part = count < 32 ? count : 32;
        to->bits |= (bits & ((1ull << part) - 1)) << to->count;
        for (to->count += part; to->count >= 8; to->count -= 8, to->bits >>= 8)
            *to->next++ = (uint8_t)to->bits;
    }
}

/* The bits of `from` that are at the places of the mask's ones, next to each other. */
static uint64_t extract(uint64_t from, uint64_t mask) {
    uint64_t to = 0;
    for (int n = 0; mask; mask &= mask - 1, n++)
        to |= (uint64_t)((from & mask & -mask) != 0) << n;
    return to;
}

/* Write the bits of `bits` at the places of the mask's ones. */
static void write_field(struct bit_writer *to, uint64_t bits, uint64_t mask) {
    write_bits(to, extract(bits, mask), (unsigned)__builtin_popcountll(mask));
}

/* Write a block, in at most BLOCK_BYTES. Returns false if a coefficient is too large. */
static bool write_block(struct bit_writer *to, const JCOEF *block) {
    uint64_t masks[MOST_SIZE + 3] = {0}, planes[MOST_SIZE + 2] = {0}, signs = 0; /* by size; by bit */
    unsigned last = 0, levels = 0;
    if (block[0] < -DC_LIMIT || block[0] >= DC_LIMIT)
        return false;
    for (unsigned k = 1; k < DCTSIZE2; k++) {
        const int value = block[idct_places[k]];
        const unsigned magnitude = (unsigned)abs(value);
        const unsigned size = magnitude ? 32 - (unsigned)__builtin_clz(magnitude) : 0;
        if (!size)
            continue;
        if (size > MOST_SIZE)
            return false;
        const unsigned needed = size < 2 ? 1 : (size + 1) / 3;
        last = k;
        levels = needed > levels ? needed : levels;
        signs |= (uint64_t)(value < 0) << k;
        for (unsigned s = 1; s <= size; s++) {
            masks[s] |= 1ull << k;
            planes[s - 1] |= (uint64_t)(magnitude >> (s - 1) & 1) << k;
        }
    }
    write_bits(to, last | levels << 6 | ((uint64_t)block[0] & (2 * DC_LIMIT - 1)) << 8, HEAD_BITS);
    if (!last)
        return true;
    write_bits(to, masks[1] >> 1, last - 1);
    write_field(to, signs, masks[1]);
    for (unsigned level = 0; level < levels; level++) {
        const uint64_t *of = masks + 3 * level + 1; /* of size s and more, s + 1 and more, ... */
        write_field(to, (of[1] ^ of[2]) | of[3], of[0]);
        write_field(to, of[2], of[0]);
        for (int i = 0; i < 3; i++)
            write_field(to, planes[3 * level + i], of[i + 1]);
    }
    return true;
}

/* Whether libjpeg would take one of the standard's tables, which are not in the file. */
static bool lacks_tables(j_decompress_ptr jpeg) {
    for (int c = 0; c < jpeg->comps_in_scan; c++) {
        const int dc = jpeg->cur_comp_info[c]->dc_tbl_no, ac = jpeg->cur_comp_info[c]->ac_tbl_no;
        if (dc >= NUM_HUFF_TBLS || ac >= NUM_HUFF_TBLS || !jpeg->dc_huff_tbl_ptrs[dc] || !jpeg->ac_huff_tbl_ptrs[ac])
            return true;
    }
    return false;
}

/* Why a JPEG whose header has been read stays one, or NULL. */
static const char *refused(j_decompress_ptr jpeg) {
    if (jpeg->progressive_mode)
        return "progressive";
    if (jpeg->arith_code)
        return "arithmetic coding";
    if (jpeg->data_precision != 8)
        return "not of 8 bits";
    if (lacks_tables(jpeg))
        return "without one of its Huffman tables";
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
