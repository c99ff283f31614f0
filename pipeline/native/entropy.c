#include "entropy.h"

#include <stdlib.h>
#include <string.h>

#include <jpegint.h>

#define READ_NUMBER 32u
#define END_OF_BLOCK 64u
#define SLACK 1024 /* zero bytes after a segment: more than one block can take, so that only blocks are checked */

static _Noreturn void give_up(struct entropy *entropy, const char *why) {
    snprintf(entropy->why, JMSG_LENGTH_MAX, "%s", why);
    longjmp(*entropy->damaged, 1);
}

/* Where coefficient k of the zigzag goes; what damaged data puts after the 63rd goes there. */
static const uint8_t ORDER[128] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,
    7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46,
    53, 60, 61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
};

/* The number that `size` bits stand for (T.81, table F.1 and figure F.12). */
static inline int extend(int bits, int size) {
    return bits - (((bits >> (size - 1)) - 1) & ((1 << size) - 1));
}

/* The entry of a symbol whose code has `length` bits, its number yet to be read. */
static inline entry entry_of(uint8_t symbol, int length, bool ac) {
    uint32_t size = symbol & 15, run = symbol >> 4;
    uint32_t on = !ac ? 0 : size || run == 15 ? run + 1 : END_OF_BLOCK;
    return (uint32_t)(length + size) | (size ? READ_NUMBER : 0) | on << 8 | size << 16;
}

static void fill_looks(struct huffman *table, uint32_t code, int length, uint8_t symbol, bool ac) {
    entry plain = entry_of(symbol, length, ac);
    int size = symbol & 15, left = LOOK - length;
    for (int rest = 0; rest < 1 << left; rest++) {
        entry found = plain;
        if (size && size <= left) {
            int number = extend(rest >> (left - size), size);
            found = (plain & 0xFFFFu & ~READ_NUMBER) | (uint32_t)number << 16;
        }
        table->look[(code << left) + (uint32_t)rest] = found;
    }
}

/* From the code lengths and symbols of a JPEG's table (T.81, annex C), unless it is the last picture's. libjpeg has
 * found them to be a code. */
static void make_table(struct huffman *table, const JHUFF_TBL *from, bool ac) {
    if (table->made && !memcmp(table->made_of.bits, from->bits, sizeof from->bits) &&
        !memcmp(table->made_of.huffval, from->huffval, sizeof from->huffval))
        return;
    memcpy(&table->made_of, from, sizeof *from);
    memset(table->look, 0, sizeof table->look);
    uint32_t code = 0;
    int place = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        table->offset[length] = place - (int32_t)code;
        for (int i = 0; i < from->bits[length]; i++, code++, place++)
            if (length <= LOOK)
                fill_looks(table, code, length, from->huffval[place], ac);
        table->limit[length] = code << (16 - length);
    }
    table->made = true;
}

/* At least 56 bits, with zeros after the end. */
static inline void refill(struct stream *from) {
    uint64_t word;
    memcpy(&word, from->next, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    from->bits |= word >> from->count;
    from->next += (63 - from->count) >> 3;
    from->count |= 56;
}

/* The entry of a code of more than LOOK bits; 0 where there is no such code. */
static __attribute__((noinline)) entry look_further(uint32_t code, const struct huffman *table, bool ac) {
    for (int length = LOOK + 1; length <= 16; length++)
        if (code < table->limit[length])
            return entry_of(table->made_of.huffval[(int32_t)(code >> (16 - length)) + table->offset[length]], length, ac);
    return 0;
}

static inline entry take(struct entropy *entropy, struct stream *from, const struct huffman *table, bool ac,
                         int *number) {
    entry found = table->look[from->bits >> (64 - LOOK)];
    if (__builtin_expect(!found, 0)) {
        found = look_further((uint32_t)(from->bits >> 48), table, ac);
        if (!found)
            give_up(entropy, "Corrupt JPEG data: bad Huffman code");
    }
    int length = found & 31;
    *number = (int32_t)found >> 16;
    if (found & READ_NUMBER) {
        int size = *number;
        *number = extend((int)(from->bits << (length - size) >> (64 - size)), size);
    }
    from->bits <<= length;
    from->count -= length;
    return found;
}

static inline entry pass(struct entropy *entropy, struct stream *from, const struct huffman *table) {
    entry found = table->look[from->bits >> (64 - LOOK)];
    if (__builtin_expect(!found, 0)) {
        found = look_further((uint32_t)(from->bits >> 48), table, true);
        if (!found)
            give_up(entropy, "Corrupt JPEG data: bad Huffman code");
    }
    from->bits <<= found & 31;
    from->count -= found & 31;
    return found;
}

/* One block's numbers into 64 zeros; without a block only its end is found. */
static inline __attribute__((always_inline)) void read_block(struct entropy *entropy, struct stream *from,
                                                             const struct huffman *dc, const struct huffman *ac,
                                                             int *last, JCOEF *block) {
    int number;
    refill(from);
    take(entropy, from, dc, false, &number);
    *last += number;
    if (block)
        block[0] = (JCOEF)*last;
    for (unsigned k = 0; k < 63;) {
        refill(from);
        entry found = block ? take(entropy, from, ac, true, &number) : pass(entropy, from, ac);
        k += found >> 8 & 255;
        if (block)
            block[ORDER[k]] = (JCOEF)number;
    }
    if ((from->next - entropy->end) * 8 > from->count)
        give_up(entropy, "Corrupt JPEG data: premature end of data segment");
}

/* The next MCU of the segment, or only past it where there are no blocks to fill. */
static inline __attribute__((always_inline)) void read_mcu(struct entropy *entropy, j_decompress_ptr jpeg,
                                                           JBLOCKROW *blocks) {
    struct stream stream = entropy->stream;
    for (int b = 0; b < jpeg->blocks_in_MCU; b++) {
        int component = jpeg->MCU_membership[b];
        const jpeg_component_info *info = jpeg->cur_comp_info[component];
        const struct huffman *dc = &entropy->tables[info->dc_tbl_no];
        const struct huffman *ac = &entropy->tables[NUM_HUFF_TBLS + info->ac_tbl_no];
        read_block(entropy, &stream, dc, ac, &entropy->dc[component], blocks ? *blocks[b] : NULL);
    }
    entropy->stream = stream;
}

static __attribute__((noinline)) void skim(struct entropy *entropy, j_decompress_ptr jpeg, unsigned mcus) {
    while (mcus--)
        read_mcu(entropy, jpeg, NULL);
}

/* Where the next marker begins, stuffed bytes being none; the end of the data where there is none. */
static const uint8_t *next_marker(const uint8_t *from, const uint8_t *end) {
    while (from + 1 < end && (from = memchr(from, 0xFF, (size_t)(end - from - 1)))) {
        if (from[1] != 0 && from[1] != 0xFF)
            return from;
        from += from[1] == 0 ? 2 : 1;
    }
    return end;
}

/* Copy the present segment without its stuffed bytes, and begin to read it. */
static void open_segment(struct entropy *entropy) {
    uint8_t *to = entropy->plain;
    const uint8_t *from = entropy->segment, *end = entropy->data_end, *found;
    while (from < end && (found = memchr(from, 0xFF, (size_t)(end - from))) && found + 1 < end && found[1] == 0) {
        memcpy(to, from, (size_t)(found + 1 - from));
        to += found + 1 - from;
        from = found + 2;
    }
    const uint8_t *stop = next_marker(from, end);
    memcpy(to, from, (size_t)(stop - from));
    to += stop - from;
    memset(to, 0, SLACK);
    entropy->marker = stop;
    entropy->end = to;
    entropy->stream = (struct stream){.next = entropy->plain};
    memset(entropy->dc, 0, sizeof entropy->dc);
    entropy->opened = true;
}

static void next_segment(struct entropy *entropy, j_decompress_ptr jpeg) {
    const uint8_t *marker = entropy->marker;
    if (!entropy->opened)
        marker = next_marker(entropy->segment, entropy->data_end);
    if (marker + 2 > entropy->data_end || marker[1] != 0xD0 + entropy->restarts++ % 8)
        give_up(entropy, "Corrupt JPEG data: a restart marker is missing");
    entropy->segment = marker + 2;
    entropy->left = jpeg->restart_interval;
    entropy->opened = false;
    entropy->waiting = 0;
}

/* libjpeg's method. MCUs that the crop does not need wait, and are skimmed only where one of their segment is. */
static boolean decode_mcu(j_decompress_ptr jpeg, JBLOCKROW *blocks) {
    struct entropy *entropy = jpeg->client_data;
    const struct jpeg_decomp_master *master = jpeg->master;
    if (jpeg->restart_interval && !entropy->left)
        next_segment(entropy, jpeg);
    unsigned column = entropy->column;
    entropy->column = column + 1 == jpeg->MCUs_per_row ? 0 : column + 1;
    entropy->left--;
    if (!blocks || column < master->first_iMCU_col || column > master->last_iMCU_col) {
        entropy->waiting++;
        return TRUE;
    }
    if (!entropy->opened)
        open_segment(entropy);
    if (entropy->waiting)
        skim(entropy, jpeg, entropy->waiting);
    entropy->waiting = 0;
    read_mcu(entropy, jpeg, blocks);
    return TRUE;
}

bool entropy_takes_over(struct entropy *entropy, j_decompress_ptr jpeg) {
    if (jpeg->progressive_mode || jpeg->arith_code || jpeg->inputctl->has_multiple_scans || jpeg->comps_in_scan < 2)
        return false;
    for (int c = 0; c < jpeg->comps_in_scan; c++) {
        int dc = jpeg->cur_comp_info[c]->dc_tbl_no, ac = jpeg->cur_comp_info[c]->ac_tbl_no;
        make_table(&entropy->tables[dc], jpeg->dc_huff_tbl_ptrs[dc], false);
        make_table(&entropy->tables[NUM_HUFF_TBLS + ac], jpeg->ac_huff_tbl_ptrs[ac], true);
    }
    size_t bytes = jpeg->src->bytes_in_buffer;
    if (entropy->room < bytes + SLACK) {
        free(entropy->plain);
        entropy->room = bytes + bytes / 4 + SLACK;
        entropy->plain = malloc(entropy->room);
        if (!entropy->plain) {
            entropy->room = 0;
            give_up(entropy, "out of memory");
        }
    }
    entropy->segment = jpeg->src->next_input_byte;
    entropy->data_end = entropy->segment + bytes;
    entropy->opened = false;
    entropy->restarts = entropy->column = entropy->waiting = 0;
    entropy->left = jpeg->restart_interval;
    jpeg->client_data = entropy;
    jpeg->entropy->decode_mcu = decode_mcu;
    return true;
}
