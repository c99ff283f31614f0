/* A block's coefficients as bits that vectors can read: a mask of those that are not 0, their signs, and planes of their
 * magnitudes.
 *
 * The n-th bit of a mask is for the n-th place in zigzag order; the size of a number is its bits, as in T.81: 1 for 1, 2 for
 * 2 and 3, 3 for 4 to 7 ... The bits of a block, from the lowest of each byte on:
 *
 *     6  the place of the last coefficient other than 0, or 0 if there is only DC
 *     2  the number of levels, below, that the largest needs: 1 up to size 4, 2 up to 7, 3 up to 10
 *    12  DC, in two's complement
 *   and unless there is only DC:
 *     one for each place from 1 up to the last, without it: whether the coefficient is not 0; these are a mask
 *     one for each coefficient of the mask: whether it is negative
 *   and for each level, 0 to 2, of the coefficients of the mask, whose size is at least s = 3 level + 1:
 *     one for each: the lower bit of the smaller of size - s and 3; then one for each: the higher bit
 *     one for each of size s + 1 and more: bit s - 1 of its magnitude
 *     one for each of size s + 2 and more: bit s
 *     one for each of size s + 3 and more: bit s + 1; these are the mask of the next level
 *
 * A plane is a bit of all magnitudes: those above, and the highest bit of the coefficients of one size. Nothing is read
 * symbol by symbol: one instruction (pdep) deals a field's bits out to the places of a mask, and a plane is added to all
 * coefficients at once. What has to be awaited is the number of ones in a mask, two or three times in a block. */
#ifndef BLOCK_BITS_H
#define BLOCK_BITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "idct.h"

#if defined __AVX2__ && defined __BMI2__
#define BY_PLANES /* all coefficients of a block at once */
#include <immintrin.h>
#endif

#define MOST_LEVELS 3
#define MOST_SIZE (3 * MOST_LEVELS + 1) /* of an AC coefficient, bits; baseline coding has no larger ones */
#define HEAD_BITS 20
#define DC_LIMIT 2048 /* DC is at least -2048, and below 2048 */
#define LEVELS_OF_BYTES 2 /* whose coefficients fit into bytes */
#define BLOCK_BYTES 256   /* more than a block has, with what is read beyond it */

static inline uint64_t load_word(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

#define FEW 57 /* bits of a word that begin within its first byte */

/* The bits from bit `at` on: 64, or at least FEW if `few`. */
static inline uint64_t bits_at(const uint8_t *from, size_t at, bool few) {
    const unsigned shift = at & 7;
    const uint64_t bits = load_word(from + (at >> 3)) >> shift;
    return few ? bits : bits | (uint64_t)from[(at >> 3) + 8] << 1 << (63 - shift);
}

#ifdef BY_PLANES
/* The coefficients of a block, a byte each. */
typedef struct {
    __m256i half[2];
} block_bytes;

/* Where a plane's bit for each coefficient is: the byte, and the bit in it. */
struct block_order {
    block_bytes byte, bit;
};

static inline struct block_order block_order(void) {
    const __m256i powers = _mm256_set1_epi64x((long long)0x8040201008040201), seven = _mm256_set1_epi8(7);
    struct block_order order;
    for (int h = 0; h < 2; h++) {
        const __m256i place = _mm256_loadu_si256((const __m256i *)(zigzag_places + 32 * h));
        order.byte.half[h] = _mm256_and_si256(_mm256_srli_epi16(place, 3), seven);
        order.bit.half[h] = _mm256_shuffle_epi8(powers, _mm256_and_si256(place, seven));
    }
    return order;
}

/* -1 for each coefficient whose bit is set, otherwise 0. */
static inline __m256i spread_half(uint64_t plane, const struct block_order *order, int h) {
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi64x((long long)plane), order->byte.half[h]);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, order->bit.half[h]), order->bit.half[h]);
}

static inline void add_plane(block_bytes *sums, uint64_t plane, __m256i weight, const struct block_order *order) {
    for (int h = 0; h < 2; h++)
        sums->half[h] = _mm256_or_si256(sums->half[h], _mm256_and_si256(spread_half(plane, order, h), weight));
}

/* Store coefficients from their magnitudes, signs and DC. */
static inline void store_block(const block_bytes *sums, uint64_t signs, int dc, const struct block_order *order,
                               JCOEF *block) {
    for (int h = 0; h < 2; h++) {
        const __m256i negative = spread_half(signs, order, h);
        const __m256i value = _mm256_sub_epi8(_mm256_xor_si256(sums->half[h], negative), negative);
        __m256i low = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(value));
        if (h == 0)
            low = _mm256_insert_epi16(low, (short)dc, 0);
        _mm256_store_si256((__m256i *)(block + 32 * h), low);
        _mm256_store_si256((__m256i *)(block + 32 * h + 16), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(value, 1)));
    }
}

/* Add bit number `bit` of the magnitudes of these coefficients to a block. */
static inline void add_bits(JCOEF *block, uint64_t plane, uint64_t signs, unsigned bit) {
    for (; plane; plane &= plane - 1) {
        const int k = __builtin_ctzll(plane), value = 1 << bit;
        JCOEF *at = &block[idct_places[k]];
        *at = (JCOEF)(*at + (signs >> k & 1 ? -value : value));
    }
}

/* The planes of a level and, returned, the mask of the next. `at` moves past the level's fields. */
static inline __attribute__((always_inline)) uint64_t read_level(const uint8_t *from, size_t *at, uint64_t mask,
                                                                 bool few, uint64_t planes[3]) {
    const size_t count = (size_t)__builtin_popcountll(mask);
    const uint64_t low = _pdep_u64(bits_at(from, *at, few), mask);
    const uint64_t high = _pdep_u64(bits_at(from, *at + count, few), mask); /* of size s + 2 and more */
    const uint64_t two = low | high, four = low & high;                     /* of size s + 1, s + 3 and more */
    const size_t first = *at + 2 * count, second = first + (size_t)__builtin_popcountll(two);
    const size_t third = second + (size_t)__builtin_popcountll(high);
    *at = third + (size_t)__builtin_popcountll(four);
    planes[0] = (mask ^ two) | _pdep_u64(bits_at(from, first, few), two);
    planes[1] = (two ^ high) | _pdep_u64(bits_at(from, second, few), high);
    planes[2] = (high ^ four) | _pdep_u64(bits_at(from, third, few), four);
    return four;
}

/* Read the coefficients of a mask but DC, and store the block; returns the position after them. */
static inline __attribute__((always_inline)) size_t read_levels(const uint8_t *from, size_t at, uint64_t mask,
                                                                unsigned levels, bool few, int dc,
                                                                const struct block_order *order, JCOEF *block) {
    const uint64_t signs = _pdep_u64(bits_at(from, at, few), mask);
    uint64_t planes[3];
    unsigned level = 0;
    __m256i weight = _mm256_set1_epi8(1);
    block_bytes sums = {{_mm256_setzero_si256(), _mm256_setzero_si256()}};
    at += (size_t)__builtin_popcountll(mask);
    do {
        mask = read_level(from, &at, mask, few, planes);
        for (int i = 0; i < 3; i++, weight = _mm256_add_epi8(weight, weight))
            add_plane(&sums, planes[i], weight, order);
    } while (++level < levels && level < LEVELS_OF_BYTES);
    if (__builtin_expect(levels <= LEVELS_OF_BYTES, 1)) {
        add_plane(&sums, mask, weight, order);
        store_block(&sums, signs, dc, order, block);
        return at;
    }
    store_block(&sums, signs, dc, order, block);
    mask = read_level(from, &at, mask, few, planes);
    for (unsigned i = 0; i < 3; i++)
        add_bits(block, planes[i], signs, 3 * level + i);
    add_bits(block, mask, signs, 3 * level + 3);
    return at;
}
#else
struct block_order {
    int unused;
};

static inline struct block_order block_order(void) { return (struct block_order){0}; }

/* As above, one by one. */
static inline size_t read_levels(const uint8_t *from, size_t at, uint64_t mask, unsigned levels, bool few, int dc,
                                 const struct block_order *order, JCOEF *block) {
    uint8_t places[DCTSIZE2]; /* of the level's coefficients */
    unsigned count = 0, level = 0;
    (void)order, (void)few;
    block[0] = (JCOEF)dc;
    for (; mask; mask &= mask - 1)
        places[count++] = idct_places[__builtin_ctzll(mask)];
    uint64_t signs = bits_at(from, at, false);
    at += count;
    do {
        uint64_t low = bits_at(from, at, false), high = bits_at(from, at + count, false), next_signs = 0;
        const uint64_t all = count < 64 ? (1ull << count) - 1 : ~0ull;
        const size_t first = at + 2 * count, second = first + (size_t)__builtin_popcountll((low | high) & all);
        const size_t third = second + (size_t)__builtin_popcountll(high & all);
        uint64_t bit_0 = bits_at(from, first, false), bit_1 = bits_at(from, second, false);
        uint64_t bit_2 = bits_at(from, third, false);
        const unsigned final = level + 1 == levels;
        unsigned next = 0;
        at = third + (size_t)__builtin_popcountll(low & high & all);
        for (unsigned i = 0; i < count; i++, low >>= 1, high >>= 1, signs >>= 1) {
            const unsigned two = (low | high) & 1, three = high & 1, four = low & high & 1, place = places[i];
            const unsigned bits = ((bit_0 & two) | (two ^ 1)) | ((bit_1 & three) | (two ^ three)) << 1 |
                                  ((bit_2 & four) | (three ^ four)) << 2 | (four & final) << 3;
            const int value = (int)(bits << 3 * level), sign = -(int)(signs & 1);
            block[place] = (JCOEF)(block[place] + ((value ^ sign) - sign));
            next_signs |= (signs & four) << next;
            places[next] = (uint8_t)place; /* not beyond i */
            next += four;
            bit_0 >>= two, bit_1 >>= three, bit_2 >>= four;
        }
        count = next;
        signs = next_signs;
    } while (++level < levels);
    return at;
}
#endif

/* Read a block from bit `*position` on, which then is that after it. At most BLOCK_BYTES are read. Returns the place of
 * the last coefficient, after which all are 0; if it is 0, `idct_block` needs only DC. */
static inline __attribute__((always_inline)) unsigned read_block(const uint8_t *from, size_t *position,
                                                                 const struct block_order *order, JCOEF *block) {
    const uint64_t head = bits_at(from, *position, true);
    const unsigned last = head & 63, levels = head >> 6 & 3;
    const int dc = (int)((uint32_t)head << (32 - HEAD_BITS)) >> (32 - HEAD_BITS + 8);
    const size_t at = *position + HEAD_BITS;
#ifndef BY_PLANES
    memset(block, 0, DCTSIZE2 * sizeof *block); /* libjpeg's inverse DCT reads all */
#endif
    if (!last) {
        block[0] = (JCOEF)dc;
        *position = at;
        return 0;
    }
    const uint64_t end = 1ull << (last - 1), mask = ((bits_at(from, at, false) & (end - 1)) | end) << 1;
    if (__builtin_expect(__builtin_popcountll(mask) <= FEW, 1))
        *position = read_levels(from, at + last - 1, mask, levels, true, dc, order, block);
    else
        *position = read_levels(from, at + last - 1, mask, levels, false, dc, order, block);
    return last;
}

#endif
