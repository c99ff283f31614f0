/* One table of 256 values a channel, looked up for R, G, B, R, G, B, ... */
#include <stdint.h>

#ifdef __AVX512VBMI__
#include <immintrin.h>

typedef struct {
    __m512i quarters[4];
} table_lanes;

static inline table_lanes load_table(const uint8_t *table) {
    table_lanes loaded;
    for (int k = 0; k < 4; k++)
        loaded.quarters[k] = _mm512_loadu_si512(table + 64 * k);
    return loaded;
}

static inline __m512i found(__m512i values, const table_lanes *table) {
    __m512i low = _mm512_permutex2var_epi8(table->quarters[0], values, table->quarters[1]);
    __m512i high = _mm512_permutex2var_epi8(table->quarters[2], values, table->quarters[3]);
    return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(values), high);
}

/* 192 values at a time, three registers, each of which begins with another channel. */
static int64_t look_up_lanes(uint8_t *values, int64_t size, const uint8_t *tables) {
    const __mmask64 thirds[] = {0x9249249249249249, 0x2492492492492492, 0x4924924924924924};
    table_lanes channel[] = {load_table(tables), load_table(tables + 256), load_table(tables + 512)};
    int64_t i = 0;
    for (; i + 192 <= size; i += 192)
#pragma GCC unroll 3
        for (int part = 0; part < 3; part++) {
            __m512i taken = _mm512_loadu_si512(values + i + 64 * part), made = found(taken, &channel[part]);
            made = _mm512_mask_mov_epi8(made, thirds[1], found(taken, &channel[(part + 1) % 3]));
            made = _mm512_mask_mov_epi8(made, thirds[2], found(taken, &channel[(part + 2) % 3]));
            _mm512_storeu_si512(values + i + 64 * part, made);
        }
    return i;
}
#else
static int64_t look_up_lanes(uint8_t *values, int64_t size, const uint8_t *tables) {
    (void)values, (void)size, (void)tables;
    return 0;
}
#endif

/* `size` values, in place; tables uint8 [3][256]. */
void look_up_values(uint8_t *values, int64_t size, const uint8_t *tables) {
    for (int64_t i = look_up_lanes(values, size, tables); i < size; i++)
        values[i] = tables[256 * (i % 3) + values[i]];
}
