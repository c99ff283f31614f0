/* Processors have an instruction for CRC-32C of 8 bytes. Its result takes 3 cycles, but one can begin in each cycle:
 * three thirds of a block are computed side by side, and joined by tables that append zeros to a checksum.
 *
 * Those with AVX-512's carry-less products of vectors are four times as fast with these: 256 bytes are folded onto the
 * next 256, to which they are congruent after multiplication by a power of x (Gopal et al. 2009, Intel). */
#include "checksum.h"

#include <string.h>

#if defined __VPCLMULQDQ__ && defined __AVX512F__ && defined __SSE4_2__
#define FOLDING
#include <immintrin.h>
#elif defined __SSE4_2__
#include <nmmintrin.h>
#elif defined __ARM_FEATURE_CRC32
#include <arm_acle.h>
#endif

#define POLYNOMIAL 0x82F63B78u /* x^32 is left out; bit 31 is x^0 */
#define LONG 4096u             /* bytes of a third of a block */
#define SHORT 256u

static uint32_t bytes[8][256];       /* [k][b]: the checksum, without inversions, of byte b and k zeros */
static uint32_t after_long[4][256];  /* [k][b]: the checksum b << 8 k after LONG zeros */
static uint32_t after_short[4][256]; /* the same with SHORT zeros */

static uint32_t append_zeros(uint32_t crc, size_t count) {
    while (count--)
        crc = crc >> 8 ^ bytes[0][crc & 255];
    return crc;
}

/* Appending zeros is linear: the bytes' results are made from those of single bits. */
static void fill(uint32_t table[4][256], size_t zeros) {
    for (int k = 0; k < 4; k++)
        for (uint32_t b = 1; b < 256; b++) {
            uint32_t rest = b & (b - 1);
            table[k][b] = rest ? table[k][rest] ^ table[k][b ^ rest] : append_zeros(b << 8 * k, zeros);
        }
}

#ifdef FOLDING
#define VECTORS 4 /* of 64 bytes, folded side by side */

/* By which the two halves of 16 bytes are multiplied to move them on, so many bytes, within a message. */
static __m128i on_by_16, on_by_32, on_by_48, on_by_64, on_by_256;

/* x^n modulo the polynomial; bit 31 is x^0. */
static uint32_t power(size_t n) {
    uint32_t crc = 1u << 31;
    while (n--)
        crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
    return crc;
}

/* A product of two words with their bits in this order is too low by one, and a factor of 32 bits too high by 32. */
static __m128i on_by(size_t count) {
    return _mm_set_epi64x(power(8 * count - 33), power(8 * count + 31));
}
#endif

__attribute__((constructor)) static void fill_tables(void) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        bytes[0][b] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int b = 0; b < 256; b++)
            bytes[k][b] = append_zeros(bytes[k - 1][b], 1);
    fill(after_long, LONG);
    fill(after_short, SHORT);
#ifdef FOLDING
    on_by_16 = on_by(16), on_by_32 = on_by(32), on_by_48 = on_by(48), on_by_64 = on_by(64), on_by_256 = on_by(256);
#endif
}

static inline uint64_t load(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

static inline uint32_t add_byte(uint32_t crc, uint8_t byte) {
    return crc >> 8 ^ bytes[0][(crc ^ byte) & 255];
}

#if defined __SSE4_2__
#define add_word(crc, word) (uint32_t)_mm_crc32_u64(crc, word)
#elif defined __ARM_FEATURE_CRC32
#define add_word(crc, word) __crc32cd(crc, word)
#else
static inline uint32_t add_word(uint32_t crc, uint64_t word) {
    word ^= crc; /* little-endian, as all the formats here */
    crc = 0;
    for (int k = 0; k < 8; k++)
        crc ^= bytes[7 - k][word >> 8 * k & 255];
    return crc;
}
#endif

static inline uint32_t followed(uint32_t table[4][256], uint32_t crc) {
    return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^ table[3][crc >> 24];
}

/* Add the whole blocks of three times `third` bytes; returns how many bytes that were. */
static inline size_t add_blocks(uint32_t *crc, const uint8_t *data, size_t size, size_t third, uint32_t table[4][256]) {
    size_t done = 0;
    for (; size - done >= 3 * third; done += 3 * third) {
        const uint8_t *at = data + done;
        uint32_t first = *crc, second = 0, last = 0;
        for (size_t i = 0; i < third; i += 8) {
            first = add_word(first, load(at + i));
            second = add_word(second, load(at + third + i));
            last = add_word(last, load(at + 2 * third + i));
        }
        *crc = followed(table, followed(table, first) ^ second) ^ last;
    }
    return done;
}

#ifdef FOLDING
static inline __m512i fold(__m512i from, __m512i by, __m512i onto) {
    const __m512i first = _mm512_clmulepi64_epi128(from, by, 0x00), second = _mm512_clmulepi64_epi128(from, by, 0x11);
    return _mm512_ternarylogic_epi64(first, second, onto, 0x96); /* the sum of all three */
}

static inline __m128i fold_lane(__m128i from, __m128i by, __m128i onto) {
    const __m128i products = _mm_xor_si128(_mm_clmulepi64_si128(from, by, 0x00), _mm_clmulepi64_si128(from, by, 0x11));
    return _mm_xor_si128(products, onto);
}

/* Add the whole 256 bytes, of which there are some; returns how many bytes that were. */
static inline size_t add_folded(uint32_t *crc, const uint8_t *data, size_t size) {
    const __m512i by = _mm512_broadcast_i32x4(on_by_256), by_next = _mm512_broadcast_i32x4(on_by_64);
    __m512i sum[VECTORS];
    for (int v = 0; v < VECTORS; v++)
        sum[v] = _mm512_loadu_si512(data + 64 * v);
    sum[0] = _mm512_xor_si512(sum[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)*crc)));
    size_t done = 64 * VECTORS;
    for (; size - done >= 64 * VECTORS; done += 64 * VECTORS)
        for (int v = 0; v < VECTORS; v++)
            sum[v] = fold(sum[v], by, _mm512_loadu_si512(data + done + 64 * v));
    for (int v = 1; v < VECTORS; v++)
        sum[v] = fold(sum[v - 1], by_next, sum[v]);
    const __m512i last = sum[VECTORS - 1];
    __m128i rest = fold_lane(_mm512_extracti32x4_epi32(last, 0), on_by_48, _mm512_extracti32x4_epi32(last, 3));
    rest = fold_lane(_mm512_extracti32x4_epi32(last, 1), on_by_32, rest);
    rest = fold_lane(_mm512_extracti32x4_epi32(last, 2), on_by_16, rest);
    const uint32_t first = add_word(0, (uint64_t)_mm_extract_epi64(rest, 0));
    *crc = add_word(first, (uint64_t)_mm_extract_epi64(rest, 1));
    return done;
}
#endif

uint32_t crc32c(uint32_t before, const void *data, size_t size) {
    const uint8_t *at = data, *end = at + size;
    uint32_t crc = ~before;
#ifdef FOLDING
    if (end - at >= 64 * VECTORS)
        at += add_folded(&crc, at, (size_t)(end - at));
#endif
    at += add_blocks(&crc, at, (size_t)(end - at), LONG, after_long);
    at += add_blocks(&crc, at, (size_t)(end - at), SHORT, after_short);
    for (; end - at >= 8; at += 8)
        crc = add_word(crc, load(at));
    for (; at < end; at++)
        crc = add_byte(crc, *at);
    return ~crc;
}

void crc32c_bands(const uint8_t *data, int64_t size, int64_t band, uint32_t *checksums) {
    for (int64_t at = 0; at < size; at += band)
        *checksums++ = crc32c(0, data + at, (size_t)(size - at < band ? size - at : band));
}
