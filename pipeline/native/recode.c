#include "recode.h"

#include <stdlib.h>
#include <string.h>

#include <jpegint.h>

#include "huffman.h"

#define LOOKUP_BITS 10 /* bits of a table's index */
#define SLACK 1024     /* zero bytes after a segment: more than a block can use, so the end is checked per block */
#define DC_BITS 11     /* of the largest values in baseline coding (T.81, tables F.1 and F.2) */
#define AC_BITS 10
#define END_OF_BLOCK 0x00 /* symbols of AC tables */
#define SIXTEEN_ZEROS 0xF0
#define COMPONENTS 3

/* For each LOOKUP_BITS bits: the length of the code that they begin with, times 256, plus its symbol; 0 for a longer
 * code. */
struct table {
    struct codes codes;
    uint16_t look[1 << LOOKUP_BITS];
};

struct reader {
    struct table dc[NUM_HUFF_TBLS], ac[NUM_HUFF_TBLS];
    struct stream stream;
    uint8_t *unstuffed;             /* the current segment without stuffed bytes, */
    const uint8_t *end;             /* and its end */
    const uint8_t *next, *data_end; /* in the file: the data after it, and their end */
    int level[COMPONENTS];          /* each component's last DC coefficient, */
    int predicted[COMPONENTS];      /* and the one from which the next difference is written */
};

/* Returns false for a table that libjpeg would refuse. */
static bool make_table(struct table *table, const JHUFF_TBL *from, int greatest) {
    uint32_t code = 0, count = 0;
    for (int length = 1; from && length <= 16; length++) {
        code = code * 2 + from->bits[length];
        count += from->bits[length];
        if (code >= 1u << length || count > 256)
            return false;
    }
    for (uint32_t i = 0; i < count; i++)
        if (from->huffval[i] > greatest)
            return false;
    if (!from || !make_codes(&table->codes, from))
        return from != NULL;
    uint8_t lengths[1 << LOOKUP_BITS], symbols[1 << LOOKUP_BITS];
    begin_codes(&table->codes, LOOKUP_BITS, lengths, symbols);
    for (uint32_t bits = 0; bits < 1 << LOOKUP_BITS; bits++)
        table->look[bits] = (uint16_t)(lengths[bits] << 8 | symbols[bits]);
    return true;
}

/* The next symbol, or -1 if there is no such code. */
static inline int take_symbol(struct stream *from, const struct table *table) {
    int seen = table->look[from->bits >> (64 - LOOKUP_BITS)], length = seen >> 8, symbol = seen & 255;
    if (__builtin_expect(!seen, 0)) {
        symbol = symbol_of(&table->codes, (uint32_t)(from->bits >> 48), &length);
        if (!length)
            return -1;
    }
    use(from, length);
    return symbol;
}

static inline void put(struct symbols *symbols, int table, int symbol, uint32_t number) {
    uint32_t which = (uint32_t)(table * 256 + symbol);
    symbols->list[symbols->count++] = which << 16 | number;
    symbols->frequency[which]++;
}

/* Make sure that one more block and a marker fit. Returns false if out of memory. */
static bool reserve(struct symbols *symbols) {
    if (symbols->count + DCTSIZE2 + 1 < symbols->capacity)
        return true;
    size_t capacity = 2 * symbols->capacity + (1 << 16);
    uint32_t *list = realloc(symbols->list, capacity * sizeof *list);
    if (!list)
        return false;
    symbols->list = list;
    symbols->capacity = capacity;
    return true;
}

/* Returns false for data that are not a block, or one that libjpeg would write differently. */
static inline __attribute__((always_inline)) bool read_block(struct reader *reader, struct stream *from, int component,
                                                             const struct table *dc, const struct table *ac,
                                                             int dc_target, int ac_target, struct symbols *symbols) {
    refill(from);
    int symbol = take_symbol(from, dc);
    if (symbol < 0 || symbol > DC_BITS)
        return false;
    int level = reader->level[component] += take_number(from, symbol);
    int change = level - reader->predicted[component];
    int size = change ? 32 - __builtin_clz((unsigned)abs(change)) : 0;
    if (abs(level) > 32767 || size > DC_BITS)
        return false;
    reader->predicted[component] = level;
    put(symbols, dc_target, size, (uint32_t)(change - (change < 0)) & ((1u << size) - 1));
    for (int k = 1; k < DCTSIZE2; k++) {
        if (from->count < 32)
            refill(from);
        symbol = take_symbol(from, ac);
        if (symbol == END_OF_BLOCK) {
            put(symbols, ac_target, symbol, 0);
            break;
        }
        size = symbol & 15;
        k += symbol >> 4;
        if (symbol < 0 || k >= DCTSIZE2 || size > AC_BITS || (size == 0 && symbol != SIXTEEN_ZEROS))
            return false;
        put(symbols, ac_target, symbol, size ? (uint32_t)(from->bits >> (64 - size)) : 0);
        use(from, size);
    }
    return (from->next - reader->end) * 8 <= from->count;
}

/* Copy the data up to the next marker without stuffed bytes, and start to read them. */
static void open_segment(struct reader *reader) {
    const uint8_t *from = reader->next, *end = reader->data_end, *marker;
    uint8_t *to = reader->unstuffed;
    while ((marker = memchr(from, 0xFF, (size_t)(end - from))) && marker + 1 < end && marker[1] == 0) {
        memcpy(to, from, (size_t)(marker + 1 - from));
        to += marker + 1 - from;
        from = marker + 2;
    }
    size_t left = (size_t)((marker ? marker : end) - from);
    memcpy(to, from, left);
    memset(to + left, 0, SLACK);
    reader->next = from + left;
    reader->end = to + left;
    reader->stream = (struct stream){.next = reader->unstuffed};
    memset(reader->level, 0, sizeof reader->level);
}

/* Whether the segment has been read completely, and is followed by this marker. */
static bool ends_with(struct reader *reader, int marker) {
    bool all = (reader->end - reader->stream.next) * 8 + reader->stream.count < 8;
    bool there = reader->data_end - reader->next >= 2 && reader->next[0] == 0xFF && reader->next[1] == marker;
    reader->next += there ? 2 : 0;
    return all && there;
}

static bool read_mcu(struct reader *reader, j_decompress_ptr source, j_compress_ptr target, struct symbols *symbols) {
    struct stream stream = reader->stream;
    for (int c = 0; c < COMPONENTS; c++) {
        const jpeg_component_info *info = &source->comp_info[c], *to = &target->comp_info[c];
        const struct table *dc = &reader->dc[info->dc_tbl_no], *ac = &reader->ac[info->ac_tbl_no];
        for (int b = 0; b < info->h_samp_factor * info->v_samp_factor; b++)
            if (!reserve(symbols) ||
                !read_block(reader, &stream, c, dc, ac, DC + to->dc_tbl_no, AC + to->ac_tbl_no, symbols))
                return false;
    }
    reader->stream = stream;
    return true;
}

static bool read_scan(struct reader *reader, j_decompress_ptr source, j_compress_ptr target, unsigned interval,
                      struct symbols *symbols) {
    unsigned across = DCTSIZE * (unsigned)source->max_h_samp_factor,
             down = DCTSIZE * (unsigned)source->max_v_samp_factor;
    size_t mcus = (size_t)((source->image_width + across - 1) / across) * ((source->image_height + down - 1) / down);
    unsigned until_marker = interval, until_source_marker = source->restart_interval;
    int markers_read = 0;
    open_segment(reader);
    for (size_t n = 0; n < mcus; n++, until_marker--, until_source_marker--) {
        if (n && !until_marker) {
            until_marker = interval;
            symbols->list[symbols->count++] = (uint32_t)RESTART << 16;
            memset(reader->predicted, 0, sizeof reader->predicted);
        }
        if (n && source->restart_interval && !until_source_marker) {
            until_source_marker = source->restart_interval;
            if (!ends_with(reader, 0xD0 + markers_read++ % 8))
                return false;
            open_segment(reader);
        }
        if (!read_mcu(reader, source, target, symbols))
            return false;
    }
    return ends_with(reader, 0xD9);
}

/* libjpeg writes the header, `write_scan` the scan. */
static bool write_target(const struct symbols *symbols, j_compress_ptr target) {
    struct codewords codewords;
    for (int t = 0; t < 2; t++) {
        JHUFF_TBL *pair[2] = {target->dc_huff_tbl_ptrs[t], target->ac_huff_tbl_ptrs[t]};
        for (int kind = 0; kind < 2; kind++) {
            int table = kind * AC + t;
            make_optimal_table(symbols->frequency + 256 * table, pair[kind]);
            make_codewords(&codewords, table, pair[kind]);
        }
    }
    target->optimize_coding = FALSE;
    jpeg_write_coefficients(target, NULL); /* only starts: it needs coefficients when it finishes */
    target->master->prepare_for_pass(target);
    struct jpeg_destination_mgr *out = target->dest;
    uint8_t *end = write_scan(symbols, &codewords, out->next_output_byte, out->next_output_byte + out->free_in_buffer);
    if (!end)
        return false;
    out->free_in_buffer -= (size_t)(end - out->next_output_byte);
    out->next_output_byte = end;
    target->marker->write_file_trailer(target);
    out->term_destination(target);
    return true;
}

static bool is_baseline(j_decompress_ptr source) {
    bool baseline = !source->progressive_mode && !source->arith_code && source->num_components == COMPONENTS &&
                    source->comps_in_scan == COMPONENTS && source->Ss == 0 && source->Se == DCTSIZE2 - 1 &&
                    source->Ah == 0 && source->Al == 0;
    for (int c = 0; baseline && c < COMPONENTS; c++) {
        const jpeg_component_info *info = &source->comp_info[c];
        baseline =
            source->cur_comp_info[c] == info && info->dc_tbl_no < NUM_HUFF_TBLS && info->ac_tbl_no < NUM_HUFF_TBLS;
    }
    return baseline;
}

static bool make_tables(struct reader *reader, j_decompress_ptr source) {
    for (int c = 0; c < COMPONENTS; c++) {
        int dc = source->comp_info[c].dc_tbl_no, ac = source->comp_info[c].ac_tbl_no;
        if (!make_table(&reader->dc[dc], source->dc_huff_tbl_ptrs[dc], 15) ||
            !make_table(&reader->ac[ac], source->ac_huff_tbl_ptrs[ac], 255))
            return false;
    }
    return true;
}

bool recode(j_decompress_ptr source, j_compress_ptr target, int interval, struct symbols *symbols, bool *fits) {
    if (!is_baseline(source))
        return false;
    jpeg_copy_critical_parameters(source, target);
    target->restart_interval = (unsigned)interval;
    struct reader *reader = calloc(1, sizeof *reader + source->src->bytes_in_buffer + SLACK);
    if (!reader)
        return false;
    reader->unstuffed = (uint8_t *)(reader + 1);
    reader->next = source->src->next_input_byte;
    reader->data_end = reader->next + source->src->bytes_in_buffer;
    bool sound = make_tables(reader, source) && read_scan(reader, source, target, (unsigned)interval, symbols);
    free(reader);
    *fits = !sound || write_target(symbols, target);
    return sound;
}
