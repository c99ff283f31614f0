/* Lookups of 64 values at once in tables of 256 bytes, on processors that can do that (AVX-512 VBMI). */
#ifndef TABLES_H
#define TABLES_H

#include <stdint.h>

#ifdef __AVX512VBMI__
#include <immintrin.h>

typedef struct {
    __m512i quarters[4];
} table_lanes;

/* A table uint8 [256] in registers. */
static inline table_lanes load_table(const uint8_t *table) {
    table_lanes loaded;
    for (int k = 0; k < 4; k++)
        loaded.quarters[k] = _mm512_loadu_si512(table + 64 * k);
    return loaded;
}

/* The table's entries for 64 values. */
static inline __m512i look_up_64(__m512i values, const table_lanes *table) {
    __m512i low = _mm512_permutex2var_epi8(table->quarters[0], values, table->quarters[1]);
    __m512i high = _mm512_permutex2var_epi8(table->quarters[2], values, table->quarters[3]);
    return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(values), high);
}

/* A mask of the first `count` bytes of a register, of all for 64 and more. */
static inline __mmask64 first_bytes(int64_t count) { return count < 64 ? (1ULL << count) - 1 : ~0ULL; }
#endif

#endif
