/* Histograms, and lookups in tables of 256 values, either one per channel of R, G, B, R, G, B, ... or one for all. The
 * functions return whether they have done their work: `look_up_one` only does where it is fast. */
#include "tables.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef LANES
/* A third of the bytes of each of three registers, so that each place is taken once. */
static inline lanes take_thirds(const lanes from[3], const lanes thirds[3], int first, int step) {
    return (from[0] & thirds[first % 3]) | (from[1] & thirds[(first + step) % 3]) |
           (from[2] & thirds[(first + 2 * step) % 3]);
}

/* 3 LANES values at a time, in three registers that each begin with another channel: their bytes are exchanged so that
 * each register has one channel, and afterwards back. Returns the number of values done. */
static int64_t look_up_channels(uint8_t *values, int64_t size, const uint8_t *tables) {
    const table_lanes channel[] = {load_table(tables), load_table(tables + 256), load_table(tables + 512)};
    uint8_t bytes[3][LANES];
    lanes thirds[3], parts[3], made[3]; /* thirds[k]: every third byte from byte k on */
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < LANES; i++)
            bytes[k][i] = i % 3 == k ? 255 : 0;
    memcpy(thirds, bytes, sizeof thirds);
    int64_t i = 0;
    for (; i + 3 * LANES <= size; i += 3 * LANES) {
#pragma GCC unroll 3
        for (int k = 0; k < 3; k++)
            memcpy(parts + k, values + i + k * LANES, LANES);
#pragma GCC unroll 3
        for (int c = 0; c < 3; c++)
            made[c] = look_up_lanes(take_thirds(parts, thirds, c, 2 * LANES), channel + c);
#pragma GCC unroll 3
        for (int k = 0; k < 3; k++) {
            const lanes part = take_thirds(made, thirds, 2 * k * LANES, 1);
            memcpy(values + i + k * LANES, &part, LANES);
        }
    }
    return i;
}

/* Replace `size` values, in place, by those in table uint8 [256]. */
int32_t look_up_one(uint8_t *values, int64_t size, const uint8_t *table) {
    const table_lanes loaded = load_table(table);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        lanes part;
        memcpy(&part, values + i, sizeof part);
        part = look_up_lanes(part, &loaded);
        memcpy(values + i, &part, sizeof part);
    }
    for (; i < size; i++)
        values[i] = table[values[i]];
    return true;
}
#else
static int64_t look_up_channels(uint8_t *values, int64_t size, const uint8_t *tables) {
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
    for (int64_t i = look_up_channels(values, size, tables); i < size; i++)
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
