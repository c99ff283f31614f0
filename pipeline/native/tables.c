/* Histograms, and lookups in tables of 256 values, either one per channel of R, G, B, R, G, B, ... or one for all. The
 * functions return whether they have done their work: `look_up_one` only does where it is fast. */
#include "tables.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512VBMI__
/* 192 values at a time: three registers, each of which begins with another channel. Returns the number of values done.
 */
static int64_t look_up_lanes(uint8_t *values, int64_t size, const uint8_t *tables) {
    const __mmask64 thirds[] = {0x9249249249249249, 0x2492492492492492, 0x4924924924924924};
    table_lanes channel[] = {load_table(tables), load_table(tables + 256), load_table(tables + 512)};
    int64_t i = 0;
    for (; i + 192 <= size; i += 192)
#pragma GCC unroll 3
        for (int part = 0; part < 3; part++) {
            __m512i taken = _mm512_loadu_si512(values + i + 64 * part), made = look_up_64(taken, &channel[part]);
            made = _mm512_mask_mov_epi8(made, thirds[1], look_up_64(taken, &channel[(part + 1) % 3]));
            made = _mm512_mask_mov_epi8(made, thirds[2], look_up_64(taken, &channel[(part + 2) % 3]));
            _mm512_storeu_si512(values + i + 64 * part, made);
        }
    return i;
}

/* Replace `size` values, in place, by those in table uint8 [256]. */
int32_t look_up_one(uint8_t *values, int64_t size, const uint8_t *table) {
    table_lanes loaded = load_table(table);
    int64_t i = 0;
    for (; i + 64 <= size; i += 64)
        _mm512_storeu_si512(values + i, look_up_64(_mm512_loadu_si512(values + i), &loaded));
    __mmask64 rest = first_bytes(size - i);
    _mm512_mask_storeu_epi8(values + i, rest, look_up_64(_mm512_maskz_loadu_epi8(rest, values + i), &loaded));
    return true;
}
#else
static int64_t look_up_lanes(uint8_t *values, int64_t size, const uint8_t *tables) {
    (void)values, (void)size, (void)tables;
    return 0;
}

int32_t look_up_one(uint8_t *values, int64_t size, const uint8_t *table) {
    (void)values, (void)size, (void)table;
    return false;
}
#endif

/* Replace `size` values, in place, by those in tables uint8 [3][256]. */
int32_t look_up(uint8_t *values, int64_t size, const uint8_t *tables) {
    for (int64_t i = look_up_lanes(values, size, tables); i < size; i++)
        values[i] = tables[256 * (i % 3) + values[i]];
    return true;
}

#define SETS 12 /* of counters: neighbours are often equal, and incrementing the same counter again would wait */

/* Count the values of each channel: `size` bytes R, G, B; counts int32 [3][256]. */
int32_t count_values(const uint8_t *values, int64_t size, int32_t *counts) {
    uint32_t seen[SETS][256] = {0};
    int64_t i = 0;
    for (; i + 24 <= size; i += 24)
#pragma GCC unroll 3
        for (int part = 0; part < 24; part += 8) {
            uint64_t eight;
            memcpy(&eight, values + i + part, sizeof eight);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++)
                seen[(part + k) % SETS][eight >> 8 * k & 255]++;
        }
    for (; i < size; i++)
        seen[i % 3][values[i]]++;
    memset(counts, 0, 3 * 256 * sizeof *counts);
    for (int set = 0; set < SETS; set++)
        for (int value = 0; value < 256; value++)
            counts[256 * (set % 3) + value] += (int32_t)seen[set][value];
    return true;
}
