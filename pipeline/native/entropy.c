#include "entropy.h"

#include <stdlib.h>
#include <string.h>

#include <jpegint.h>

#define HEAD 3     /* numbers of a table of segments before the places */
#define LOOKS 3    /* that 56 bits are enough for, when the last finds a code of 16 with 15 more */
#define SLACK 1024 /* zero bytes after a segment: more than one block can take, so that only blocks are checked */

static _Noreturn void give_up(struct entropy *entropy, const char *why) {
    snprintf(entropy->why, JMSG_LENGTH_MAX, "%s", why);
    longjmp(*entropy->damaged, 1);
}

/* Where coefficient k of the zigzag goes; what damaged data puts after the 63rd goes there. */
static const uint8_t ORDER[BLOCK + 80] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,
    7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46,
    53, 60, 61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63,
};

/* A symbol too long for the tables. */
static __attribute__((noinline)) uint8_t long_symbol(struct entropy *entropy, uint64_t bits, const struct codes *codes,
                                                     int *length) {
    uint8_t symbol = symbol_of(codes, (uint32_t)(bits >> 48), length);
    if (!*length)
        give_up(entropy, "Corrupt JPEG data: bad Huffman code");
    return symbol;
}

static inline int take_dc(struct entropy *entropy, struct stream *from, const struct dc *table) {
    uint32_t bits = (uint32_t)(from->bits >> (64 - DC_LOOK));
    int length = table->length[bits], size = table->size[bits];
    if (!length)
        size = long_symbol(entropy, from->bits, &table->codes, &length) & 15;
    use(from, length);
    return take_number(from, size);
}

static inline void check_end(struct entropy *entropy, const struct stream *from) {
    if ((from->next - entropy->end) * 8 > from->count)
        give_up(entropy, "Corrupt JPEG data: premature end of data segment");
}

/* One block's numbers into 64 zeros. */
static inline __attribute__((always_inline)) void read_block(struct entropy *entropy, struct stream *from,
                                                             const struct dc *dc, const struct ac *ac, int *level,
                                                             JCOEF *block) {
    refill(from);
    *level += take_dc(entropy, from, dc);
    block[0] = (JCOEF)*level;
    for (unsigned k = 0; k < 63;) {
        refill(from);
        for (int looks = 0; looks < LOOKS && k < 63; looks++) {
            look seen = ac->look[from->bits >> (64 - AC_LOOK)];
            if (__builtin_expect(seen & UNSEEN, 0)) {
                int length = seen & 63;
                uint8_t symbol = (uint8_t)(seen >> 16);
                if (!length)
                    symbol = long_symbol(entropy, from->bits, &ac->codes, &length);
                use(from, length);
                int number = take_number(from, symbol & 15);
                k += steps_of(symbol);
                block[ORDER[k]] = (JCOEF)number;
                break;
            }
            unsigned first = k + (seen >> 16 & 255);
            block[ORDER[first]] = (JCOEF)(seen >> 32);
            k = first + (seen >> 24 & 255);
            block[ORDER[k]] = (JCOEF)(seen >> 48);
            if (k >= 63 && first >= 63) { /* what follows is the next block's */
                block[63] = (JCOEF)(seen >> 32);
                use(from, seen >> 8 & 63);
                break;
            }
            use(from, seen & 63);
        }
    }
    check_end(entropy, from);
}

/* The same without a block: only its end is found. */
static inline __attribute__((always_inline)) void skim_block(struct entropy *entropy, struct stream *from,
                                                             const struct dc *dc, const struct ac *ac, int *level) {
    refill(from);
    *level += take_dc(entropy, from, dc);
    for (unsigned k = 0; k < 63;) {
        if (from->count < 32)
            refill(from);
        uint32_t seen = ac->skim[from->bits >> (64 - AC_LOOK)];
        if (__builtin_expect(seen && k + (seen >> 16) < 63, 1)) {
            use(from, seen & 63);
            k += seen >> 8 & 255;
            continue;
        }
        int length; /* a long code, or the block may end before the last of these */
        uint8_t symbol = long_symbol(entropy, from->bits, &ac->codes, &length);
        use(from, length + (symbol & 15));
        k += steps_of(symbol);
    }
    check_end(entropy, from);
}

/* The next MCU of the segment. */
static void read_mcu(struct entropy *entropy, j_decompress_ptr jpeg, JBLOCKROW *blocks) {
    struct stream stream = entropy->stream;
    for (int b = 0; b < jpeg->blocks_in_MCU; b++) {
        int component = jpeg->MCU_membership[b];
        const jpeg_component_info *info = jpeg->cur_comp_info[component];
        read_block(entropy, &stream, &entropy->dc[info->dc_tbl_no], &entropy->ac[info->ac_tbl_no],
                   &entropy->level[component], *blocks[b]);
    }
    entropy->stream = stream;
}

/* Past the few MCUs of a short segment that come before a crop: less work than the tables that `skim` looks into. */
static __attribute__((noinline)) void read_past(struct entropy *entropy, j_decompress_ptr jpeg, unsigned mcus) {
    JBLOCK block;
    JBLOCKROW blocks[D_MAX_BLOCKS_IN_MCU];
    for (int b = 0; b < jpeg->blocks_in_MCU; b++)
        blocks[b] = &block;
    while (mcus--)
        read_mcu(entropy, jpeg, blocks);
}

/* Past the next MCUs. */
static __attribute__((noinline)) void skim(struct entropy *entropy, j_decompress_ptr jpeg, unsigned mcus) {
    struct stream stream = entropy->stream;
    for (int c = 0; c < jpeg->comps_in_scan; c++)
        make_skim(&entropy->ac[jpeg->cur_comp_info[c]->ac_tbl_no]);
    while (mcus--)
        for (int b = 0; b < jpeg->blocks_in_MCU; b++) {
            int component = jpeg->MCU_membership[b];
            const jpeg_component_info *info = jpeg->cur_comp_info[component];
            skim_block(entropy, &stream, &entropy->dc[info->dc_tbl_no], &entropy->ac[info->ac_tbl_no],
                       &entropy->level[component]);
        }
    entropy->stream = stream;
}

/* Bits of the segment that are yet to come; below zero where more were taken than there are. */
static ptrdiff_t unread(const struct entropy *entropy) {
    return (entropy->end - entropy->stream.next) * 8 + entropy->stream.count;
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
    memset(entropy->level, 0, sizeof entropy->level);
    entropy->opened = true;
}

static void next_segment(struct entropy *entropy, j_decompress_ptr jpeg) {
    const uint8_t *marker = entropy->marker;
    if (entropy->places) {
        if (entropy->number + 1 >= entropy->segments)
            give_up(entropy, "has fewer segments than MCUs to fill");
        marker = entropy->start + entropy->places[entropy->number + 1] - 2;
    } else if (!entropy->opened) {
        marker = next_marker(entropy->segment, entropy->data_end);
    }
    if (marker < entropy->segment || marker + 2 > entropy->data_end || marker[0] != 0xFF ||
        marker[1] != 0xD0 + entropy->number++ % 8)
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
        (entropy->places ? read_past : skim)(entropy, jpeg, entropy->waiting);
    entropy->waiting = 0;
    read_mcu(entropy, jpeg, blocks);
    if (entropy->places && !entropy->left && unread(entropy) >= 8)
        give_up(entropy, "Corrupt JPEG data: extraneous bytes in a segment");
    return TRUE;
}

void entropy_knows(struct entropy *entropy, const uint8_t *jpeg, const uint32_t *table, size_t numbers) {
    bool known = numbers > HEAD + 1 && table[0];
    entropy->start = jpeg;
    entropy->places = known ? table + HEAD : NULL;
    entropy->segments = known ? (unsigned)(numbers - HEAD - 1) : 0;
}

bool entropy_takes_over(struct entropy *entropy, j_decompress_ptr jpeg) {
    if (jpeg->progressive_mode || jpeg->arith_code || jpeg->inputctl->has_multiple_scans || jpeg->comps_in_scan < 2)
        return false;
    for (int c = 0; c < jpeg->comps_in_scan; c++) {
        int dc = jpeg->cur_comp_info[c]->dc_tbl_no, ac = jpeg->cur_comp_info[c]->ac_tbl_no;
        make_dc(&entropy->dc[dc], jpeg->dc_huff_tbl_ptrs[dc]);
        make_ac(&entropy->ac[ac], jpeg->ac_huff_tbl_ptrs[ac]);
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
    entropy->number = entropy->column = entropy->waiting = 0;
    if (entropy->places && entropy->start + entropy->places[0] != entropy->segment)
        entropy->places = NULL;
    entropy->left = jpeg->restart_interval;
    jpeg->client_data = entropy;
    jpeg->entropy->decode_mcu = decode_mcu;
    return true;
}
