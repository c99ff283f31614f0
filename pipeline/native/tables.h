/* Lookups of LANES values at once in tables of 256 bytes, on processors that can do that: with AVX-512 VBMI or AVX2. */
#ifndef TABLES_H
#define TABLES_H

#include <stdint.h>

#if defined __AVX512VBMI__
#include <immintrin.h>
#define LANES 64

typedef __m512i lanes;

/* A table uint8 [256] in registers. */
typedef struct {
    lanes quarters[4];
} table_lanes;

static inline table_lanes load_table(const uint8_t *table) {
    table_lanes loaded;
    for (int k = 0; k < 4; k++)
        loaded.quarters[k] = _mm512_loadu_si512(table + 64 * k);
    return loaded;
}

/* The table's entries for LANES values. */
static inline lanes look_up_lanes(lanes values, const table_lanes *table) {
    lanes low = _mm512_permutex2var_epi8(table->quarters[0], values, table->quarters[1]);
    lanes high = _mm512_permutex2var_epi8(table->quarters[2], values, table->quarters[3]);
    return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(values), high);
}

#elif defined __AVX2__
#include <immintrin.h>
#define LANES 32

typedef __m256i lanes;

/* A table uint8 [256] in memory: it would fill all registers. */
typedef struct {
    const uint8_t *entries;
} table_lanes;

static inline table_lanes load_table(const uint8_t *table) { return (table_lanes){table}; }

/* Entries of a quarter of a table for values of six bits; 0 for those of which the highest of the eight is set. An
 * instruction looks up four bits in a sixteenth of the table, the other two choose among four of these. */
static inline lanes look_up_quarter(lanes values, const uint8_t *entries) {
    const lanes bit_4 = _mm256_slli_epi16(values, 3), bit_5 = _mm256_slli_epi16(values, 2); /* as the highest */
    lanes found[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const __m128i sixteenth = _mm_loadu_si128((const __m128i *)entries + k);
        found[k] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(sixteenth), values);
    }
    return _mm256_blendv_epi8(_mm256_blendv_epi8(found[0], found[1], bit_4),
                              _mm256_blendv_epi8(found[2], found[3], bit_4), bit_5);
}

/* The table's entries for LANES values. */
static inline lanes look_up_lanes(lanes values, const table_lanes *table) {
    const lanes bit_6 = _mm256_slli_epi16(values, 1), flipped = values ^ _mm256_set1_epi8(-128);
    const uint8_t *low = table->entries, *high = low + 128;
    return _mm256_blendv_epi8(look_up_quarter(values, low), look_up_quarter(values, low + 64), bit_6) |
           _mm256_blendv_epi8(look_up_quarter(flipped, high), look_up_quarter(flipped, high + 64), bit_6);
}
#endif

#endif
