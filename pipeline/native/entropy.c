#include "entropy.h"

#include <stdlib.h>
#include <string.h>

#include <jpegint.h>

#define EOI 0xD9             /* the marker at the end */
#define HEAD 3               /* numbers before the offsets in a table of segments */
#define LOOKUPS_PER_REFILL 3 /* that 56 bits suffice for, if the last finds a code of 16 bits with 15 more */
#define SLACK 1024 /* zero bytes after a segment: more than a block can use, so the end is checked per block */

static _Noreturn void fail(struct entropy *entropy, const char *message) {
    snprintf(entropy->message, JMSG_LENGTH_MAX, "%s", message);
    longjmp(*entropy->damaged, 1);
}

/* The position of coefficient k of the zigzag order. Those that damaged data have after the 63rd go there too. */
static const uint8_t ORDER[BLOCK + 80] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,
    14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60,
    61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
};

/* A symbol whose code is longer than the index of the tables. */
static __attribute__((noinline)) uint8_t long_symbol(struct entropy *entropy, uint64_t bits, const struct codes *codes,
                                                     int *length) {
    uint8_t symbol = symbol_of(codes, (uint32_t)(bits >> 48), length);
    if (!*length)
        fail(entropy, "Corrupt JPEG data: bad Huffman code");
    return symbol;
}

static inline int take_dc(struct entropy *entropy, struct stream *from, const struct dc *table) {
    uint32_t bits = (uint32_t)(from->bits >> (64 - DC_LOOKUP_BITS));
    int length = table->length[bits], size = table->size[bits];
    if (!length)
        size = long_symbol(entropy, from->bits, &table->codes, &length) & 15;
    use(from, length);
    return take_number(from, size);
}

static inline void check_end(struct entropy *entropy, const struct stream *from) {
    if ((from->next - entropy->end) * 8 > from->count)
        fail(entropy, "Corrupt JPEG data: premature end of data segment");
}

/* Decode a block into `block`, which is zero. */
static inline __attribute__((always_inline)) void read_block(struct entropy *entropy, struct stream *from,
                                                             const struct dc *dc, const struct ac *ac, int *level,
                                                             JCOEF *block) {
    refill(from);
    *level += take_dc(entropy, from, dc);
    block[0] = (JCOEF)*level;
    for (unsigned k = 0; k < 63;) {
        refill(from);
        for (int looks = 0; looks < LOOKUPS_PER_REFILL && k < 63; looks++) {
            ac_entry entry = ac->entries[from->bits >> (64 - AC_LOOKUP_BITS)];
            if (__builtin_expect(entry & INCOMPLETE, 0)) {
                int length = entry & 63;
                uint8_t symbol = (uint8_t)(entry >> 16);
                if (!length)
                    symbol = long_symbol(entropy, from->bits, &ac->codes, &length);
                use(from, length);
                int number = take_number(from, symbol & 15);
                k += steps_of(symbol);
                block[ORDER[k]] = (JCOEF)number;
                break;
            }
            unsigned first = k + (entry >> 16 & 255);
            block[ORDER[first]] = (JCOEF)(entry >> 32);
            k = first + (entry >> 24 & 255);
            block[ORDER[k]] = (JCOEF)(entry >> 48);
            if (k >= 63 && first >= 63) { /* the second coefficient belongs to the next block */
                block[63] = (JCOEF)(entry >> 32);
                use(from, entry >> 8 & 63);
                break;
            }
            use(from, entry & 63);
        }
    }
    check_end(entropy, from);
}

/* The same without storing the coefficients. */
static inline __attribute__((always_inline)) void skim_block(struct entropy *entropy, struct stream *from,
                                                             const struct dc *dc, const struct ac *ac, int *level) {
    refill(from);
    *level += take_dc(entropy, from, dc);
    for (unsigned k = 0; k < 63;) {
        if (from->count < 32)
            refill(from);
        uint32_t entry = ac->skim[from->bits >> (64 - AC_LOOKUP_BITS)];
        if (__builtin_expect(entry && k + (entry >> 16) < 63, 1)) {
            use(from, entry & 63);
            k += entry >> 8 & 255;
            continue;
        }
        int length; /* a long code, or the block may end within this entry */
        uint8_t symbol = long_symbol(entropy, from->bits, &ac->codes, &length);
        use(from, length + (symbol & 15));
        k += steps_of(symbol);
    }
    check_end(entropy, from);
}

/* Decode the next MCU of the segment. */
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

/* Skip MCUs by decoding them: for the few in a short segment, that is less work than making the tables of `skim`. */
static __attribute__((noinline)) void read_past(struct entropy *entropy, j_decompress_ptr jpeg, unsigned mcus) {
    JBLOCK block;
    JBLOCKROW blocks[D_MAX_BLOCKS_IN_MCU];
    for (int b = 0; b < jpeg->blocks_in_MCU; b++)
        blocks[b] = &block;
    while (mcus--)
        read_mcu(entropy, jpeg, blocks);
}

/* Skip MCUs. */
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

/* Unread bits of the segment; negative if more were read than there are. */
static ptrdiff_t unread(const struct entropy *entropy) {
    return (entropy->end - entropy->stream.next) * 8 + entropy->stream.count;
}

/* The position of the next marker, or the end of the data. */
static const uint8_t *next_marker(const uint8_t *from, const uint8_t *end) {
    while (from + 1 < end && (from = memchr(from, 0xFF, (size_t)(end - from - 1)))) {
        if (from[1] != 0 && from[1] != 0xFF)
            return from;
        from += from[1] == 0 ? 2 : 1;
    }
    return end;
}

/* Fail with what libjpeg takes in its own way, which depends on how many bytes it has buffered: it has to decide. Prep
 * writes no such thing, so that in a file with a table of segments it is damage. */
static _Noreturn void fail_in_doubt(struct entropy *entropy, const char *message) {
    entropy->doubtful = !entropy->segment_offsets;
    fail(entropy, message);
}

/* Copy the current segment without stuffed bytes, and start to read it. A marker may have fill bytes 0xFF before it; at
 * the end of the data they belong to a marker that is cut off. */
static void open_segment(struct entropy *entropy) {
    uint8_t *to = entropy->unstuffed;
    const uint8_t *from = entropy->segment, *end = entropy->data_end, *found;
    entropy->marker = end;
    while (from < end) {
        found = memchr(from, 0xFF, (size_t)(end - from));
        size_t plain = (size_t)((found ? found : end) - from);
        memcpy(to, from, plain);
        to += plain;
        from += plain;
        const uint8_t *code = from;
        while (code < end && *code == 0xFF)
            code++;
        if (code == end)
            break;
        if (*code) {
            entropy->marker = code - 1;
            break;
        }
        if (code > from + 1)
            fail_in_doubt(entropy, "Corrupt JPEG data: fill bytes before a stuffed zero");
        *to++ = 0xFF;
        from = code + 1;
    }
    memset(to, 0, SLACK);
    entropy->end = to;
    entropy->stream = (struct stream){.next = entropy->unstuffed};
    memset(entropy->level, 0, sizeof entropy->level);
    entropy->is_open = true;
}

static void begin_segment(struct entropy *entropy, j_decompress_ptr jpeg, const uint8_t *start) {
    unsigned interval = jpeg->restart_interval;
    entropy->segment = start;
    entropy->left = interval && interval < entropy->after ? interval : entropy->after;
    entropy->after -= entropy->left;
    entropy->is_open = false;
    entropy->mcus_skipped = 0;
}

static void next_segment(struct entropy *entropy, j_decompress_ptr jpeg) {
    const uint8_t *marker = entropy->marker;
    if (entropy->segment_offsets) {
        if (entropy->number + 1 >= entropy->segment_count)
            fail(entropy, "has fewer segments than MCUs to fill");
        marker = entropy->file_start + entropy->segment_offsets[entropy->number + 1] - 2;
    } else if (!entropy->is_open) {
        marker = next_marker(entropy->segment, entropy->data_end);
    }
    if (marker < entropy->segment || marker + 2 > entropy->data_end || marker[0] != 0xFF ||
        marker[1] != 0xD0 + entropy->number++ % 8)
        fail(entropy, "Corrupt JPEG data: a restart marker is missing");
    begin_segment(entropy, jpeg, marker + 2);
}

/* After the last MCU of a segment: fail unless all of its bytes were read, and an end marker follows the last segment. */
static void check_all_read(struct entropy *entropy) {
    bool ends = entropy->after || (entropy->marker + 2 <= entropy->data_end && entropy->marker[1] == EOI);
    if (unread(entropy) >= 8 || !ends)
        fail_in_doubt(entropy, "Corrupt JPEG data: extraneous bytes in a segment");
}

/* libjpeg's method. MCUs that the crop does not need are only counted, until one of their segment is needed. */
static boolean decode_mcu(j_decompress_ptr jpeg, JBLOCKROW *blocks) {
    struct entropy *entropy = jpeg->client_data;
    const struct jpeg_decomp_master *master = jpeg->master;
    if (!entropy->left)
        next_segment(entropy, jpeg);
    unsigned column = entropy->column;
    entropy->column = column + 1 == jpeg->MCUs_per_row ? 0 : column + 1;
    entropy->left--;
    if (!blocks || column < master->first_iMCU_col || column > master->last_iMCU_col) {
        entropy->mcus_skipped++;
        return TRUE;
    }
    if (!entropy->is_open)
        open_segment(entropy);
    if (entropy->mcus_skipped)
        (entropy->segment_offsets ? read_past : skim)(entropy, jpeg, entropy->mcus_skipped);
    entropy->mcus_skipped = 0;
    read_mcu(entropy, jpeg, blocks);
    if (!entropy->left)
        check_all_read(entropy);
    return TRUE;
}

void entropy_set_segments(struct entropy *entropy, const uint8_t *jpeg, const uint32_t *table, size_t numbers) {
    bool known = numbers > HEAD + 1 && table[0];
    entropy->file_start = jpeg;
    entropy->segment_offsets = known ? table + HEAD : NULL;
    entropy->segment_count = known ? (unsigned)(numbers - HEAD - 1) : 0;
}

bool entropy_attach(struct entropy *entropy, j_decompress_ptr jpeg) {
    if (jpeg->progressive_mode || jpeg->arith_code || jpeg->inputctl->has_multiple_scans || jpeg->comps_in_scan < 2)
        return false;
    for (int c = 0; c < jpeg->comps_in_scan; c++) {
        int dc = jpeg->cur_comp_info[c]->dc_tbl_no, ac = jpeg->cur_comp_info[c]->ac_tbl_no;
        make_dc(&entropy->dc[dc], jpeg->dc_huff_tbl_ptrs[dc]);
        make_ac(&entropy->ac[ac], jpeg->ac_huff_tbl_ptrs[ac]);
    }
    size_t bytes = jpeg->src->bytes_in_buffer;
    if (entropy->capacity < bytes + SLACK) {
        free(entropy->unstuffed);
        entropy->capacity = bytes + bytes / 4 + SLACK;
        entropy->unstuffed = malloc(entropy->capacity);
        if (!entropy->unstuffed) {
            entropy->capacity = 0;
            fail(entropy, "out of memory");
        }
    }
    const uint8_t *start = jpeg->src->next_input_byte;
    entropy->data_end = start + bytes;
    entropy->number = entropy->column = 0;
    if (entropy->segment_offsets && entropy->file_start + entropy->segment_offsets[0] != start)
        entropy->segment_offsets = NULL;
    entropy->after = jpeg->MCUs_per_row * jpeg->MCU_rows_in_scan;
    begin_segment(entropy, jpeg, start);
    jpeg->client_data = entropy;
    jpeg->entropy->decode_mcu = decode_mcu;
    return true;
}
