#include "recode.h"

#include <stdlib.h>
#include <string.h>

#include <jpegint.h>

#include "coded.h"
#include "huffman.h"

#define LOOK 10           /* bits that one look into a table takes in */
#define SLACK 1024        /* zero bytes after a segment: more than one block can take, so that only blocks are checked */
#define DC_BITS 11        /* of the largest numbers that baseline coding has (T.81, tables F.1 and F.2) */
#define AC_BITS 10
#define END_OF_BLOCK 0x00 /* symbols of AC tables */
#define SIXTEEN_ZEROS 0xF0
#define COMPONENTS 3

/* A code's length in bits 8 and up and its symbol, for all that begins with LOOK bits; 0 where the code is longer. */
struct table {
    struct codes codes;
    uint16_t look[1 << LOOK];
};

struct reader {
    struct table dc[NUM_HUFF_TBLS], ac[NUM_HUFF_TBLS];
    struct stream stream;
    uint8_t *plain;                       /* the segment that is being read, stuffed bytes taken out, */
    const uint8_t *end;                   /* and its end */
    const uint8_t *next, *data_end;       /* in the file: what comes after it */
    int level[COMPONENTS];                /* each component's last DC coefficient, */
    int predicted[COMPONENTS];            /* and what the next one's difference will be taken from */
};

/* False for one that libjpeg would refuse. */
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
    uint8_t lengths[1 << LOOK], symbols[1 << LOOK];
    begin_codes(&table->codes, LOOK, lengths, symbols);
    for (uint32_t bits = 0; bits < 1 << LOOK; bits++)
        table->look[bits] = (uint16_t)(lengths[bits] << 8 | symbols[bits]);
    return true;
}

/* The next symbol; -1 where there is no such code. */
static inline int take_symbol(struct stream *from, const struct table *table) {
    int seen = table->look[from->bits >> (64 - LOOK)], length = seen >> 8, symbol = seen & 255;
    if (__builtin_expect(!seen, 0)) {
        symbol = symbol_of(&table->codes, (uint32_t)(from->bits >> 48), &length);
        if (!length)
            return -1;
    }
    use(from, length);
    return symbol;
}

static inline void put(struct symbols *found, int table, int symbol, uint32_t number) {
    uint32_t which = (uint32_t)(table * 256 + symbol);
    found->list[found->count++] = which << 16 | number;
    found->frequency[which]++;
}

/* Room for one block more, and a marker. */
static bool reserve(struct symbols *found) {
    if (found->count + DCTSIZE2 + 1 < found->room)
        return true;
    size_t room = 2 * found->room + (1 << 16);
    uint32_t *list = realloc(found->list, room * sizeof *list);
    if (!list)
        return false;
    found->list = list;
    found->room = room;
    return true;
}

/* False for what is no block, and for one that libjpeg would not write so. */
static inline __attribute__((always_inline)) bool read_block(struct reader *reader, struct stream *from, int component,
                                                             const struct table *dc, const struct table *ac,
                                                             int dc_target, int ac_target, struct symbols *found) {
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
    put(found, dc_target, size, (uint32_t)(change - (change < 0)) & ((1u << size) - 1));
    for (int k = 1; k < DCTSIZE2; k++) {
        if (from->count < 32)
            refill(from);
        symbol = take_symbol(from, ac);
        if (symbol == END_OF_BLOCK) {
            put(found, ac_target, symbol, 0);
            break;
        }
        size = symbol & 15;
        k += symbol >> 4;
        if (symbol < 0 || k >= DCTSIZE2 || size > AC_BITS || (size == 0 && symbol != SIXTEEN_ZEROS))
            return false;
        put(found, ac_target, symbol, size ? (uint32_t)(from->bits >> (64 - size)) : 0);
        use(from, size);
    }
    return (from->next - reader->end) * 8 <= from->count;
}

/* Copy what comes up to the next marker without its stuffed bytes, and begin to read it. */
static void open_segment(struct reader *reader) {
    const uint8_t *from = reader->next, *end = reader->data_end, *found;
    uint8_t *to = reader->plain;
    while ((found = memchr(from, 0xFF, (size_t)(end - from))) && found + 1 < end && found[1] == 0) {
        memcpy(to, from, (size_t)(found + 1 - from));
        to += found + 1 - from;
        from = found + 2;
    }
    size_t left = (size_t)((found ? found : end) - from);
    memcpy(to, from, left);
    memset(to + left, 0, SLACK);
    reader->next = from + left;
    reader->end = to + left;
    reader->stream = (struct stream){.next = reader->plain};
    memset(reader->level, 0, sizeof reader->level);
}

/* Whether the segment has been read to its last byte, and this marker follows. */
static bool ends_in(struct reader *reader, int marker) {
    bool all = (reader->end - reader->stream.next) * 8 + reader->stream.count < 8;
    bool there = reader->data_end - reader->next >= 2 && reader->next[0] == 0xFF && reader->next[1] == marker;
    reader->next += there ? 2 : 0;
    return all && there;
}

static bool read_mcu(struct reader *reader, j_decompress_ptr source, j_compress_ptr target, struct symbols *found) {
    struct stream stream = reader->stream;
    for (int c = 0; c < COMPONENTS; c++) {
        const jpeg_component_info *info = &source->comp_info[c], *to = &target->comp_info[c];
        const struct table *dc = &reader->dc[info->dc_tbl_no], *ac = &reader->ac[info->ac_tbl_no];
        for (int b = 0; b < info->h_samp_factor * info->v_samp_factor; b++)
            if (!reserve(found) ||
                !read_block(reader, &stream, c, dc, ac, DC + to->dc_tbl_no, AC + to->ac_tbl_no, found))
                return false;
    }
    reader->stream = stream;
    return true;
}

static bool read_scan(struct reader *reader, j_decompress_ptr source, j_compress_ptr target, unsigned interval,
                      struct symbols *found) {
    unsigned across = DCTSIZE * (unsigned)source->max_h_samp_factor, down = DCTSIZE * (unsigned)source->max_v_samp_factor;
    size_t mcus = (size_t)((source->image_width + across - 1) / across) * ((source->image_height + down - 1) / down);
    unsigned until_marker = interval, until_theirs = source->restart_interval;
    int theirs = 0;
    open_segment(reader);
    for (size_t n = 0; n < mcus; n++, until_marker--, until_theirs--) {
        if (n && !until_marker) {
            until_marker = interval;
            found->list[found->count++] = (uint32_t)RESTART << 16;
            memset(reader->predicted, 0, sizeof reader->predicted);
        }
        if (n && source->restart_interval && !until_theirs) {
            until_theirs = source->restart_interval;
            if (!ends_in(reader, 0xD0 + theirs++ % 8))
                return false;
            open_segment(reader);
        }
        if (!read_mcu(reader, source, target, found))
            return false;
    }
    return ends_in(reader, 0xD9);
}

/* Header by libjpeg, scan by us. */
static bool write_anew(const struct symbols *found, j_compress_ptr target) {
    struct words words;
    for (int t = 0; t < 2; t++) {
        JHUFF_TBL *pair[2] = {target->dc_huff_tbl_ptrs[t], target->ac_huff_tbl_ptrs[t]};
        for (int kind = 0; kind < 2; kind++) {
            int table = kind * AC + t;
            make_best(found->frequency + 256 * table, pair[kind]);
            make_words(&words, table, pair[kind]);
        }
    }
    target->optimize_coding = FALSE;
    jpeg_write_coefficients(target, NULL); /* begins; it would ask for coefficients only when it ends */
    target->master->prepare_for_pass(target);
    struct jpeg_destination_mgr *out = target->dest;
    uint8_t *end = write_scan(found, &words, out->next_output_byte, out->next_output_byte + out->free_in_buffer);
    if (!end)
        return false;
    out->free_in_buffer -= (size_t)(end - out->next_output_byte);
    out->next_output_byte = end;
    target->marker->write_file_trailer(target);
    out->term_destination(target);
    return true;
}

static bool is_plain(j_decompress_ptr source) {
    bool ours = !source->progressive_mode && !source->arith_code && source->num_components == COMPONENTS &&
                source->comps_in_scan == COMPONENTS && source->Ss == 0 && source->Se == DCTSIZE2 - 1 &&
                source->Ah == 0 && source->Al == 0;
    for (int c = 0; ours && c < COMPONENTS; c++) {
        const jpeg_component_info *info = &source->comp_info[c];
        ours = source->cur_comp_info[c] == info && info->dc_tbl_no < NUM_HUFF_TBLS && info->ac_tbl_no < NUM_HUFF_TBLS;
    }
    return ours;
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

bool recode(j_decompress_ptr source, j_compress_ptr target, int interval, bool *fits) {
    if (!is_plain(source))
        return false;
    jpeg_copy_critical_parameters(source, target);
    target->restart_interval = (unsigned)interval;
    struct symbols found = {0};
    struct reader *reader = calloc(1, sizeof *reader + source->src->bytes_in_buffer + SLACK);
    if (!reader)
        return false;
    reader->plain = (uint8_t *)(reader + 1);
    reader->next = source->src->next_input_byte;
    reader->data_end = reader->next + source->src->bytes_in_buffer;
    bool sound = make_tables(reader, source) && read_scan(reader, source, target, (unsigned)interval, &found);
    free(reader);
    *fits = !sound || write_anew(&found, target);
    free(found.list);
    return sound;
}
