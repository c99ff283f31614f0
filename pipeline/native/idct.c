#include "idct.h"

#include <jpegint.h>

#ifdef __AVX2__
/* Rows whose numbers are multiplied together are interleaved: 0 and 4, 2 and 6, 1 and 7, 3 and 5, all of them with
 * their columns in the order 0 2 1 3 4 6 7 5. Of the second pass, whose pairs are of columns, one half then lies across
 * from the other. */
#define PAIR(i) ((i) % 4 == 0 ? 0 : (i) % 4 == 2 ? 1 : (i) == 1 || (i) == 7 ? 2 : 3)
#define P(row, column) (16 * PAIR(row) + ((row) > 3) + 2 * (PAIR(column) + ((column) > 3 ? 4 : 0)))
#else
#define P(row, column) (8 * (row) + (column))
#endif

/* Place in zigzag order, row and column of each coefficient. */
#define ZIGZAG(X)                                                                                   \
    X(0, 0, 0) X(1, 0, 1) X(2, 1, 0) X(3, 2, 0) X(4, 1, 1) X(5, 0, 2) X(6, 0, 3) X(7, 1, 2)         \
    X(8, 2, 1) X(9, 3, 0) X(10, 4, 0) X(11, 3, 1) X(12, 2, 2) X(13, 1, 3) X(14, 0, 4) X(15, 0, 5)   \
    X(16, 1, 4) X(17, 2, 3) X(18, 3, 2) X(19, 4, 1) X(20, 5, 0) X(21, 6, 0) X(22, 5, 1) X(23, 4, 2) \
    X(24, 3, 3) X(25, 2, 4) X(26, 1, 5) X(27, 0, 6) X(28, 0, 7) X(29, 1, 6) X(30, 2, 5) X(31, 3, 4) \
    X(32, 4, 3) X(33, 5, 2) X(34, 6, 1) X(35, 7, 0) X(36, 7, 1) X(37, 6, 2) X(38, 5, 3) X(39, 4, 4) \
    X(40, 3, 5) X(41, 2, 6) X(42, 1, 7) X(43, 2, 7) X(44, 3, 6) X(45, 4, 5) X(46, 5, 4) X(47, 6, 3) \
    X(48, 7, 2) X(49, 7, 3) X(50, 6, 4) X(51, 5, 5) X(52, 4, 6) X(53, 3, 7) X(54, 4, 7) X(55, 5, 6) \
    X(56, 6, 5) X(57, 7, 4) X(58, 7, 5) X(59, 6, 6) X(60, 5, 7) X(61, 6, 7) X(62, 7, 6) X(63, 7, 7)
#define PLACE(k, row, column) [k] = P(row, column),
#define ZIGZAG_PLACE(k, row, column) [P(row, column)] = k,

const uint8_t idct_places[BLOCK_STEPS + DCTSIZE2 + 16] = {
    ZIGZAG(PLACE)[DCTSIZE2 ... BLOCK_STEPS + DCTSIZE2 + 15] = P(7, 7),
};

const uint8_t zigzag_places[DCTSIZE2] = {ZIGZAG(ZIGZAG_PLACE)};

void idct_begin(struct idct *idct, j_decompress_ptr jpeg, jpeg_component_info *component) {
    *idct = (struct idct){.jpeg = jpeg, .component = component};
    for (int row = 0; row < DCTSIZE; row++)
        for (int column = 0; column < DCTSIZE; column++)
            idct->multipliers[P(row, column)] = (int16_t)component->quant_table->quantval[DCTSIZE * row + column];
}

#ifdef __AVX2__
#include <immintrin.h>

#define KEPT 2 /* bits after the point that the first pass keeps, of the 13 that constants have */

/* Sums of products of each pair with the constants a and b. */
#define SUMS(pair, a, b) _mm256_madd_epi16(pair, _mm256_set1_epi32((int)((uint16_t)(a) | (uint32_t)(b) << 16)))

/* Eight transforms of 8 numbers, the pairs (0, 4), (2, 6), (1, 7), (3, 5), without the last `shift` bits of the
 * results. The algorithm of Loeffler, Ligtenberg and Moschytz (1989) as libjpeg rounds it, with its constants
 * multiplied out. */
static inline __attribute__((always_inline)) void transform(const __m256i pairs[4], int shift, __m256i out[8]) {
    const __m256i half = _mm256_set1_epi32(1 << (shift - 1));
    const __m256i sum = _mm256_add_epi32(SUMS(pairs[0], 8192, 8192), half);
    const __m256i difference = _mm256_add_epi32(SUMS(pairs[0], 8192, -8192), half);
    const __m256i outer = SUMS(pairs[1], 10703, 4433), inner = SUMS(pairs[1], 4433, -10704);
    const __m256i even[4] = {
        _mm256_add_epi32(sum, outer),
        _mm256_add_epi32(difference, inner),
        _mm256_sub_epi32(difference, inner),
        _mm256_sub_epi32(sum, outer),
    };
    const __m256i odd[4] = {
        _mm256_add_epi32(SUMS(pairs[2], 11363, 2260), SUMS(pairs[3], 9633, 6437)),
        _mm256_add_epi32(SUMS(pairs[2], 9633, -6436), SUMS(pairs[3], -2259, -11362)),
        _mm256_add_epi32(SUMS(pairs[2], 6437, 9633), SUMS(pairs[3], -11362, 2261)),
        _mm256_add_epi32(SUMS(pairs[2], 2260, -11363), SUMS(pairs[3], -6436, 9633)),
    };
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_srai_epi32(_mm256_add_epi32(even[i], odd[i]), shift);
        out[7 - i] = _mm256_srai_epi32(_mm256_sub_epi32(even[i], odd[i]), shift);
    }
}

/* The results of the first pass as the pairs of the second, in which rows have the order 0 1 4 5 2 3 6 7. */
static inline __attribute__((always_inline)) void exchange(const __m256i rows[4], __m256i pairs[4]) {
    __m256i two[4]; /* rows 0 and 2, 1 and 3, 4 and 6, 5 and 7: the four pairs of each */
    for (int i = 0; i < 4; i += 2) {
        const __m256i low = _mm256_permute2x128_si256(rows[i], rows[i + 1], 0x20);
        const __m256i high = _mm256_permute2x128_si256(rows[i], rows[i + 1], 0x31);
        two[i] = _mm256_unpacklo_epi16(low, high);
        two[i + 1] = _mm256_unpackhi_epi16(low, high);
    }
    const __m256i a = _mm256_unpacklo_epi32(two[0], two[1]), b = _mm256_unpacklo_epi32(two[2], two[3]);
    const __m256i c = _mm256_unpackhi_epi32(two[0], two[1]), d = _mm256_unpackhi_epi32(two[2], two[3]);
    pairs[0] = _mm256_unpacklo_epi64(a, b);
    pairs[1] = _mm256_unpackhi_epi64(a, b);
    pairs[2] = _mm256_unpacklo_epi64(c, d);
    pairs[3] = _mm256_unpackhi_epi64(c, d);
}

static inline void store_two(__m128i rows, uint8_t *to, size_t stride) {
    _mm_storel_epi64((__m128i *)to, rows);
    _mm_storeh_pd((double *)(to + stride), _mm_castsi128_pd(rows));
}

void idct_block(struct idct *idct, const JCOEF *block, unsigned last, uint8_t *to, size_t stride) {
    const __m256i grey = _mm256_set1_epi8(-128);
    if (!last) {
        const int first = (int16_t)(block[0] * idct->multipliers[0]) * (1 << KEPT), sample = (first + 16) >> 5;
        idct->overflows |= (unsigned)(first + 16384) > 32767;
        const __m128i all = _mm_set1_epi8((char)(sample < -128 ? 0 : sample > 127 ? 255 : sample + 128));
        for (int row = 0; row < DCTSIZE; row += 2)
            store_two(all, to + stride * (size_t)row, stride);
        return;
    }
    __m256i pairs[4], out[8], rows[4], outside = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++)
        pairs[i] = _mm256_mullo_epi16(((const __m256i *)block)[i], ((const __m256i *)idct->multipliers)[i]);
    transform(pairs, 13 - KEPT, out);
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_packs_epi32(out[2 * i], out[2 * i + 1]);
        outside = _mm256_or_si256(outside, _mm256_xor_si256(rows[i], _mm256_add_epi16(rows[i], rows[i])));
    }
    idct->overflows |=
        (_mm256_movemask_epi8(outside) & 0xAAAAAAAA) != 0; /* two numbers of 15 bits add up to one of 16 */
    exchange(rows, pairs);
    transform(pairs, 13 + KEPT + 3, out);
    for (int i = 0; i < 4; i++)
        rows[i] = _mm256_packs_epi32(out[2 * i], out[2 * i + 1]);
    const __m256i by_row = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9,
                                            13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i left = _mm256_shuffle_epi8(_mm256_packs_epi16(rows[0], rows[1]), by_row);
    const __m256i right = _mm256_shuffle_epi8(_mm256_packs_epi16(rows[2], rows[3]), by_row);
    const __m256i upper = _mm256_xor_si256(_mm256_unpacklo_epi32(left, right), grey); /* rows 0 1, 2 3 */
    const __m256i lower = _mm256_xor_si256(_mm256_unpackhi_epi32(left, right), grey); /* rows 4 5, 6 7 */
    store_two(_mm256_castsi256_si128(upper), to, stride);
    store_two(_mm256_extracti128_si256(upper, 1), to + 2 * stride, stride);
    store_two(_mm256_castsi256_si128(lower), to + 4 * stride, stride);
    store_two(_mm256_extracti128_si256(lower, 1), to + 6 * stride, stride);
}

#else

void idct_block(struct idct *idct, const JCOEF *block, unsigned last, uint8_t *to, size_t stride) {
    (void)last;
    JSAMPROW rows[DCTSIZE];
    for (int row = 0; row < DCTSIZE; row++)
        rows[row] = to + stride * (size_t)row;
    idct->jpeg->idct->inverse_DCT[idct->component->component_index](idct->jpeg, idct->component, (JCOEFPTR)block, rows,
                                                                    0);
}

#endif
