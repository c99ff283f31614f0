#include "entropy.h"

#include <stdlib.h>
#include <string.h>

#define EOI 0xD9             /* the marker at the end */
#define HEAD 3               /* numbers before the offsets in a table of segments */
#define LOOKUPS_PER_REFILL 3 /* that 56 bits suffice for, if the last finds a code of 16 bits with 15 more */
#define SLACK 320 /* zero bytes after a segment: more than a block uses (64 x 31 bits), so the end is checked after it */

static _Noreturn void fail(struct entropy *entropy, const char *message) {
    snprintf(entropy->message, JMSG_LENGTH_MAX, "%s", message);
    longjmp(*entropy->damaged, 1);
}

/* A symbol whose code is longer than the index of the tables. */
static __attribute__((noinline)) uint8_t long_symbol(struct entropy *entropy, uint64_t bits, const struct codes *codes,
                                                     int *length) {
    uint8_t symbol = symbol_of(codes, (uint32_t)(bits >> 48), length);
    if (!*length)
        fail(entropy, "Corrupt JPEG data: bad Huffman code");
    return symbol;
}

static inline int take_dc(struct entropy *entropy, struct stream *from, const struct dc *table) {
    const struct dc_entry *entry = &table->entries[from->bits >> (64 - DC_LOOKUP_BITS)];
    if (__builtin_expect(!entry->length, 0)) {
        int length, size = long_symbol(entropy, from->bits, &table->codes, &length) & 15;
        use(from, length);
        return take_number(from, size);
    }
    const uint64_t rest = from->bits << entry->code_length;
    const int size = entry->size, ones = (1 << size) - 1;
    use(from, entry->length);
    /* As `extend`, and 0 of no bits. No branch: signs can't be predicted. */
    return (int)(rest >> 1 >> (63 - size)) - (((int)(rest >> 63) - 1) & ones);
}

static inline void check_end(struct entropy *entropy, const struct stream *from) {
    if ((from->next - entropy->end) * 8 > from->count)
        fail(entropy, "Corrupt JPEG data: premature end of data segment");
}

/* Decode the coefficient of an entry without a length, which follows coefficient k; returns its steps. */
static inline unsigned read_long(struct entropy *entropy, struct stream *from, const struct ac_entry *entry,
                                 const struct ac *ac, size_t k, JCOEF *block) {
    int length = entry->first_length;
    uint8_t symbol = entry->first_steps;
    if (!length)
        symbol = long_symbol(entropy, from->bits, &ac->codes, &length);
    use(from, length);
    const int number = take_number(from, symbol & 15);
    block[idct_places[k + steps_of(symbol)]] = (JCOEF)number;
    return steps_of(symbol);
}

/* Decode a block into `block`, which is zero. Returns a place in zigzag order after which all coefficients are 0. */
static inline __attribute__((always_inline)) unsigned read_block(struct entropy *entropy, struct stream *from,
                                                                 const struct dc *dc, const struct ac *ac, int *level,
                                                                 JCOEF *block) {
    refill(from);
    *level += take_dc(entropy, from, dc);
    block[0] = (JCOEF)*level;
    size_t k = 0;
    do {
        refill(from);
        for (int looks = 0; looks < LOOKUPS_PER_REFILL; looks++) {
            const struct ac_entry *entry = &ac->entries[from->bits >> (64 - AC_LOOKUP_BITS)];
            const int length = entry->length; /* read once, early: the next look-up waits for it */
            if (__builtin_expect(!length, 0)) {
                k += read_long(entropy, from, entry, ac, k, block);
                break;
            }
            const size_t first = k + entry->first_steps, second = k + entry->second_steps;
            block[idct_places[second]] = entry->second_number;
            block[idct_places[first]] = entry->first_number;
            if (second >= 63) {
                const bool alone = first >= 63; /* the second belongs to the next block */
                k = alone ? first : second;
                use(from, alone ? entry->first_length : length);
                break;
            }
            k = second;
            use(from, length);
        }
    } while (k < 63);
    check_end(entropy, from);
    return k < BLOCK_STEPS ? 63 : (unsigned)k - BLOCK_STEPS;
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

/* Decode the next MCU of the segment into `blocks`, one after the other, and where each ends into `last`. */
static inline __attribute__((always_inline)) void read_mcu(struct entropy *entropy, JCOEF (*blocks)[DCTSIZE2],
                                                           unsigned *last) {
    struct stream stream = entropy->stream;
    memset(blocks, 0, sizeof *blocks * (size_t)entropy->block_count);
    for (int b = 0; b < entropy->block_count; b++) {
        const struct entropy_block *of = &entropy->blocks[b];
        last[b] = read_block(entropy, &stream, of->dc, of->ac, &entropy->level[of->component], blocks[b]);
    }
    entropy->stream = stream;
}

/* Skip MCUs by decoding them: for the few in a short segment, that is less work than making the tables of `skim`. */
static __attribute__((noinline)) void read_past(struct entropy *entropy, unsigned mcus) {
    JCOEF blocks[D_MAX_BLOCKS_IN_MCU][DCTSIZE2];
    unsigned last[D_MAX_BLOCKS_IN_MCU];
    while (mcus--)
        read_mcu(entropy, blocks, last);
}

/* Skip MCUs. */
static __attribute__((noinline)) void skim(struct entropy *entropy, unsigned mcus) {
    struct stream stream = entropy->stream;
    for (int b = 0; b < entropy->block_count; b++)
        make_skim(entropy->blocks[b].ac);
    while (mcus--)
        for (int b = 0; b < entropy->block_count; b++) {
            const struct entropy_block *of = &entropy->blocks[b];
            skim_block(entropy, &stream, of->dc, of->ac, &entropy->level[of->component]);
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

_Noreturn void entropy_doubt(struct entropy *entropy, const char *message) {
    entropy->doubtful = true;
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

static void begin_segment(struct entropy *entropy, unsigned number, const uint8_t *start) {
    const unsigned first = number * entropy->interval, rest = entropy->mcus - first;
    entropy->number = number;
    entropy->segment = start;
    entropy->is_open = false;
    entropy->next = first;
    entropy->segment_end = first + (rest < entropy->interval ? rest : entropy->interval);
}

/* Go on to segment number `number`. */
static void find_segment(struct entropy *entropy, unsigned number) {
    while (entropy->number < number) {
        unsigned next = entropy->number + 1;
        const uint8_t *marker = entropy->marker;
        if (entropy->segment_offsets) {
            if (number >= entropy->segment_count)
                fail(entropy, "has fewer segments than MCUs to fill");
            next = number;
            marker = entropy->file_start + entropy->segment_offsets[next] - 2;
        } else if (!entropy->is_open) {
            marker = next_marker(entropy->segment, entropy->data_end);
        }
        if (marker < entropy->segment || marker + 2 > entropy->data_end || marker[0] != 0xFF ||
            marker[1] != 0xD0 + (next - 1) % 8)
            fail(entropy, "Corrupt JPEG data: a restart marker is missing");
        begin_segment(entropy, next, marker + 2);
    }
}

/* After the last MCU of a segment: fail unless all bytes were read, and an end marker follows the last segment. */
static void check_all_read(struct entropy *entropy) {
    bool ends =
        entropy->segment_end < entropy->mcus || (entropy->marker + 2 <= entropy->data_end && entropy->marker[1] == EOI);
    if (unread(entropy) >= 8 || !ends)
        fail_in_doubt(entropy, "Corrupt JPEG data: extraneous bytes in a segment");
}

void entropy_read(struct entropy *entropy, unsigned mcu, JCOEF (*blocks)[DCTSIZE2], unsigned *last) {
    if (mcu >= entropy->segment_end)
        find_segment(entropy, mcu / entropy->interval);
    if (!entropy->is_open)
        open_segment(entropy);
    if (mcu > entropy->next)
        (entropy->segment_offsets ? read_past : skim)(entropy, mcu - entropy->next);
    read_mcu(entropy, blocks, last);
    entropy->next = mcu + 1;
    if (entropy->next == entropy->segment_end)
        check_all_read(entropy);
}

void entropy_set_segments(struct entropy *entropy, const uint8_t *jpeg, const uint32_t *table, size_t numbers) {
    bool known = numbers > HEAD + 1 && table[0];
    entropy->file_start = jpeg;
    entropy->segment_offsets = known ? table + HEAD : NULL;
    entropy->segment_count = known ? (unsigned)(numbers - HEAD - 1) : 0;
}

/* The blocks of an MCU, and their tables. */
static void begin_blocks(struct entropy *entropy, j_decompress_ptr jpeg) {
    entropy->block_count = jpeg->blocks_in_MCU;
    for (int b = 0; b < jpeg->blocks_in_MCU; b++) {
        int component = jpeg->MCU_membership[b];
        const jpeg_component_info *info = jpeg->cur_comp_info[component];
        struct dc *dc = &entropy->dc[info->dc_tbl_no];
        struct ac *ac = &entropy->ac[info->ac_tbl_no];
        make_dc(dc, jpeg->dc_huff_tbl_ptrs[info->dc_tbl_no]);
        make_ac(ac, jpeg->ac_huff_tbl_ptrs[info->ac_tbl_no]);
        entropy->blocks[b] = (struct entropy_block){component, dc, ac};
    }
}

void entropy_begin(struct entropy *entropy, j_decompress_ptr jpeg) {
    begin_blocks(entropy, jpeg);
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
    if (entropy->segment_offsets && entropy->file_start + entropy->segment_offsets[0] != start)
        entropy->segment_offsets = NULL;
    entropy->mcus = jpeg->MCUs_per_row * jpeg->MCU_rows_in_scan;
    entropy->interval = jpeg->restart_interval ? jpeg->restart_interval : entropy->mcus;
    begin_segment(entropy, 0, start);
}
