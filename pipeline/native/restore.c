#include "restore.h"

#include <stdlib.h>

#include <jpegint.h>

#include "coefficients.h"

#define BLOCK_CODES 512 /* bytes of a block's codes, at most: 64 of 26 bits or 63 of 16 with 11 more, each stuffed */

/* The codes of a table by symbol; those of length 0 are not in it. */
struct code_table {
    uint32_t code[256];
    uint8_t length[256];
};

/* Where the scan is written. */
struct scan {
    uint8_t *next;
    uint64_t bits; /* the last `count` of them are not written yet */
    unsigned count;
    bool complete; /* whether all symbols have had codes */
    int level[MAX_COMPS_IN_SCAN];
    struct code_table dc[NUM_HUFF_TBLS], ac[NUM_HUFF_TBLS];
};

static _Noreturn void fail(struct scratch *scratch, const char *message) {
    snprintf(scratch->message, sizeof scratch->message, "%s", message);
    longjmp(scratch->damaged, 1);
}

/* The codes of a table (T.81, annex C), which libjpeg has validated. */
static void make_codes_of(struct code_table *to, const JHUFF_TBL *from) {
    memset(to, 0, sizeof *to);
    uint32_t code = 0;
    for (int length = 1, place = 0; from && length <= 16; length++, code <<= 1)
        for (int i = 0; i < from->bits[length] && place < 256; i++, code++, place++) {
            to->code[from->huffval[place]] = code;
            to->length[from->huffval[place]] = (uint8_t)length;
        }
}

/* Write a symbol's code and the `size` bits of a number. */
static inline void write_symbol(struct scan *to, const struct code_table *table, unsigned symbol, uint32_t number,
                                unsigned size) {
    const unsigned length = table->length[symbol];
    to->complete &= length != 0;
    to->bits = to->bits << (length + size) | (uint64_t)table->code[symbol] << size | (number & ((1u << size) - 1));
    for (to->count += length + size; to->count >= 8; to->count -= 8)
        if ((*to->next++ = (uint8_t)(to->bits >> (to->count - 8))) == 0xFF)
            *to->next++ = 0;
}

/* The number's size in bits, and the bits that follow its symbol (T.81, F.1.2). */
static inline unsigned size_of(int number, uint32_t *bits) {
    const unsigned magnitude = (unsigned)abs(number);
    *bits = (uint32_t)(number - (number < 0));
    return magnitude ? 32 - (unsigned)__builtin_clz(magnitude) : 0;
}

static void encode_block(struct scan *to, const JCOEF *block, unsigned last, int *level, const struct code_table *dc,
                         const struct code_table *ac) {
    uint32_t bits;
    unsigned size = size_of(block[0] - *level, &bits), zeros = 0;
    *level = block[0];
    write_symbol(to, dc, size, bits, size);
    for (unsigned k = 1; k <= last; k++) {
        const int number = block[idct_places[k]];
        if (!number) {
            zeros++;
            continue;
        }
        for (; zeros >= 16; zeros -= 16)
            write_symbol(to, ac, 0xF0, 0, 0);
        size = size_of(number, &bits);
        write_symbol(to, ac, (zeros << 4 | size) & 255, bits, size);
        zeros = 0;
    }
    if (last < 63)
        write_symbol(to, ac, 0, 0, 0);
}

/* Fill up the last byte. */
static void end_segment(struct scan *to, bool ones) {
    if (to->count) {
        const unsigned left = 8 - to->count;
        if ((*to->next++ = (uint8_t)(to->bits << left | (ones ? (1u << left) - 1 : 0))) == 0xFF)
            *to->next++ = 0;
    }
    to->count = 0;
    memset(to->level, 0, sizeof to->level);
}

/* Write the scan to `to`, before `stop`; returns the position after it. */
static uint8_t *encode_scan(struct scratch *scratch, struct coefficients *from, uint8_t *to, const uint8_t *stop) {
    j_decompress_ptr jpeg = &scratch->jpeg;
    JCOEF blocks[D_MAX_BLOCKS_IN_MCU][DCTSIZE2] __attribute__((aligned(64)));
    unsigned last[D_MAX_BLOCKS_IN_MCU], markers = 0;
    const unsigned mcus = jpeg->MCUs_per_row * jpeg->MCU_rows_in_scan, interval = jpeg->restart_interval;
    struct scan *scan = ensure_capacity(&scratch->planes, sizeof *scan);
    if (!scan)
        fail(scratch, "out of memory");
    *scan = (struct scan){.next = to, .complete = true};
    for (int c = 0; c < jpeg->comps_in_scan; c++) {
        const jpeg_component_info *of = jpeg->cur_comp_info[c];
        make_codes_of(&scan->dc[of->dc_tbl_no], jpeg->dc_huff_tbl_ptrs[of->dc_tbl_no]);
        make_codes_of(&scan->ac[of->ac_tbl_no], jpeg->ac_huff_tbl_ptrs[of->ac_tbl_no]);
    }
    for (unsigned mcu = 0; mcu < mcus; mcu++) {
        if (mcu && interval && mcu % interval == 0) {
            end_segment(scan, from->ones);
            *scan->next++ = 0xFF;
            *scan->next++ = (uint8_t)(0xD0 + markers++ % 8);
        }
        coefficients_read(from, mcu, blocks, last);
        if (stop - scan->next < D_MAX_BLOCKS_IN_MCU * BLOCK_CODES)
            fail(scratch, "its coefficients are damaged");
        for (int b = 0; b < jpeg->blocks_in_MCU; b++) {
            const int component = jpeg->MCU_membership[b];
            const jpeg_component_info *of = jpeg->cur_comp_info[component];
            encode_block(scan, blocks[b], last[b], &scan->level[component], &scan->dc[of->dc_tbl_no],
                         &scan->ac[of->ac_tbl_no]);
        }
    }
    end_segment(scan, from->ones);
    if (!scan->complete)
        fail(scratch, "its coefficients are damaged");
    return scan->next;
}

/* A separate function, because longjmp leaves local variables of the function that calls setjmp undefined. */
static void restore_to(struct scratch *scratch, struct coefficients *from) {
    j_decompress_ptr jpeg = &scratch->jpeg;
    const size_t slack = (D_MAX_BLOCKS_IN_MCU + 1) * BLOCK_CODES; /* checked before each MCU, and for the last bytes */
    uint8_t *out = ensure_capacity(&scratch->restored, from->jpeg_size + slack);
    if (!out)
        fail(scratch, "out of memory");
    jpeg_mem_src(jpeg, (unsigned char *)from->head, from->head_size);
    jpeg_read_header(jpeg, TRUE);
    if (jpeg->progressive_mode || jpeg->arith_code || jpeg->inputctl->has_multiple_scans)
        fail(scratch, "its header is damaged");
    jpeg_start_decompress(jpeg);
    coefficients_begin(from, jpeg);
    memcpy(out, from->head, from->head_size);
    uint8_t *to = encode_scan(scratch, from, out + from->head_size, out + from->jpeg_size + slack - BLOCK_CODES);
    if ((size_t)(to - out) + from->end_size != from->jpeg_size)
        fail(scratch, "its coefficients are damaged");
    memcpy(to, from->end, from->end_size);
}

size_t restore(struct scratch *scratch, const uint8_t *container, size_t size, const uint8_t **jpeg) {
    struct coefficients coefficients = {.damaged = &scratch->damaged, .message = scratch->message};
    if (!coefficients_open(&coefficients, container, size)) {
        snprintf(scratch->message, sizeof scratch->message, "its coefficients are damaged");
        return 0;
    }
    const bool intact = !setjmp(scratch->damaged);
    if (intact) {
        jpeg_create_decompress(&scratch->jpeg);
        restore_to(scratch, &coefficients);
    }
    jpeg_destroy_decompress(&scratch->jpeg);
    *jpeg = scratch->restored.data;
    return intact ? coefficients.jpeg_size : 0;
}
