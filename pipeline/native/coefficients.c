#include "coefficients.h"

#define MOST_GROWTH 256 /* of a block's bits when they become codes, a safe bound for what is allocated */

static size_t number_at(const uint8_t *from, int bytes) {
    size_t number = 0;
    for (int i = 0; i < bytes; i++)
        number |= (size_t)from[i] << 8 * i;
    return number;
}

static _Noreturn void fail(struct coefficients *coefficients) {
    snprintf(coefficients->message, JMSG_LENGTH_MAX, "its coefficients are damaged");
    longjmp(*coefficients->damaged, 1);
}

bool coefficients_open(struct coefficients *coefficients, const uint8_t *bytes, size_t size) {
    if (size < CONTAINER_HEAD || number_at(bytes, 4) != CONTAINER_MAGIC)
        return false;
    struct coefficients *to = coefficients;
    to->jpeg_size = number_at(bytes + 4, 4);
    to->head_size = number_at(bytes + 8, 4);
    to->end_size = number_at(bytes + 12, 4);
    to->interval = (unsigned)number_at(bytes + 16, 2);
    to->ones = bytes[18];
    to->segments = number_at(bytes + 20, 4);
    to->sizes = bytes + CONTAINER_HEAD;
    size_t left = size - CONTAINER_HEAD, data = 0;
    if (to->segments > left / 2 || !to->interval || to->head_size > to->jpeg_size || to->jpeg_size / MOST_GROWTH > size)
        return false;
    left -= 2 * to->segments;
    if (to->head_size > left || to->end_size > left - to->head_size)
        return false;
    left -= to->head_size + to->end_size;
    for (size_t i = 0; i < to->segments; i++)
        data += number_at(to->sizes + 2 * i, 2);
    to->head = to->sizes + 2 * to->segments;
    to->end = to->head + to->head_size;
    to->data = to->end + to->end_size;
    return data == left;
}

unsigned coefficients_interval(j_decompress_ptr jpeg) {
    const unsigned wide = DCTSIZE * (unsigned)(jpeg->comps_in_scan > 1 ? jpeg->max_h_samp_factor : 1);
    return (SEGMENT_WIDTH + wide - 1) / wide;
}

/* Go to a segment, which is not before the current one. */
static void find_segment(struct coefficients *coefficients, size_t segment) {
    struct coefficients *of = coefficients;
    if (segment >= of->segments)
        fail(of);
    for (; of->segment < segment; of->segment++)
        of->from += number_at(of->sizes + 2 * of->segment, 2);
    const unsigned row = (unsigned)segment / of->row_segments, first = (unsigned)segment % of->row_segments;
    const unsigned start = first * of->interval, rest = of->row_mcus - start;
    of->at = 0;
    of->bits = 8 * number_at(of->sizes + 2 * segment, 2);
    of->next = row * of->row_mcus + start;
    of->segment_end = of->next + (rest < of->interval ? rest : of->interval);
}

void coefficients_begin(struct coefficients *coefficients, j_decompress_ptr jpeg) {
    struct coefficients *of = coefficients;
    of->row_mcus = jpeg->MCUs_per_row;
    of->row_segments = (of->row_mcus + of->interval - 1) / of->interval;
    of->block_count = jpeg->blocks_in_MCU;
    of->order = block_order();
    of->segment = 0;
    of->from = of->data;
    if (of->segments != (size_t)of->row_segments * jpeg->MCU_rows_in_scan)
        fail(of);
    find_segment(of, 0);
}

/* Read the next MCU of the segment. */
static inline __attribute__((always_inline)) void read_mcu(struct coefficients *coefficients,
                                                           JCOEF (*blocks)[DCTSIZE2], unsigned *last) {
    const uint8_t *from = coefficients->from;
    const size_t bits = coefficients->bits;
    size_t at = coefficients->at;
    for (int b = 0; b < coefficients->block_count; b++) {
        last[b] = read_block(from, &at, &coefficients->order, blocks[b]);
        if (at > bits)
            fail(coefficients);
    }
    coefficients->at = at;
    coefficients->next++;
}

/* Skip MCUs by reading them. */
static __attribute__((noinline)) void read_past(struct coefficients *coefficients, unsigned mcus) {
    JCOEF blocks[D_MAX_BLOCKS_IN_MCU][DCTSIZE2] __attribute__((aligned(64)));
    unsigned last[D_MAX_BLOCKS_IN_MCU];
    while (mcus--)
        read_mcu(coefficients, blocks, last);
}

void coefficients_read(struct coefficients *coefficients, unsigned mcu, JCOEF (*blocks)[DCTSIZE2], unsigned *last) {
    struct coefficients *of = coefficients;
    if (mcu >= of->segment_end)
        find_segment(of, (size_t)(mcu / of->row_mcus) * of->row_segments + mcu % of->row_mcus / of->interval);
    if (mcu > of->next)
        read_past(of, mcu - of->next);
    read_mcu(of, blocks, last);
    if (of->next == of->segment_end && of->bits - of->at >= 8)
        fail(of);
}
