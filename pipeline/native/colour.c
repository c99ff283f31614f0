#include "colour.h"

#ifdef __AVX2__
#include <immintrin.h>

/* 16 samples of 16 bits to colours: y + 1.402 cr, y - 0.34414 cb - 0.71414 cr, y + 1.772 cb, each rounded as libjpeg
 * does. Constants have 16 bits after the point; what does not fit into 16 bits is added in whole. */
static inline void convert(__m256i y, __m256i cb, __m256i cr, __m256i rgb[3]) {
    const __m256i zero = _mm256_set1_epi16(128), one = _mm256_set1_epi16(1), half = _mm256_set1_epi32(1 << 15);
    cb = _mm256_sub_epi16(cb, zero);
    cr = _mm256_sub_epi16(cr, zero);
    const __m256i two_cb = _mm256_add_epi16(cb, cb), two_cr = _mm256_add_epi16(cr, cr);
    const __m256i red = _mm256_mulhi_epi16(two_cr, _mm256_set1_epi16(26345));                   /* 2 x 0.402 cr */
    const __m256i blue = _mm256_mulhi_epi16(two_cb, _mm256_set1_epi16(-14942));                 /* 2 x -0.228 cb */
    const __m256i weights = _mm256_set1_epi32((int)((uint16_t)-22554 | (uint32_t)18734 << 16)); /* -0.34414, 0.28586 */
    __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(cb, cr), weights);
    __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(cb, cr), weights);
    low = _mm256_srai_epi32(_mm256_add_epi32(low, half), 16);
    high = _mm256_srai_epi32(_mm256_add_epi32(high, half), 16);
    rgb[0] = _mm256_add_epi16(_mm256_add_epi16(y, cr), _mm256_srai_epi16(_mm256_add_epi16(red, one), 1));
    rgb[1] = _mm256_add_epi16(_mm256_sub_epi16(y, cr), _mm256_packs_epi32(low, high));
    rgb[2] = _mm256_add_epi16(_mm256_add_epi16(y, two_cb), _mm256_srai_epi16(_mm256_add_epi16(blue, one), 1));
}

static inline __m256i load(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }

/* Store 16 pixels, of which `a` and `b` have four, of the first half of a batch, and four, of the second, each. */
static inline void store(uint8_t *to, __m256i a, __m256i b) {
    _mm256_storeu_si256((__m256i *)to, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i *)(to + 2 * COLOUR_BATCH), _mm256_permute2x128_si256(a, b, 0x31));
}

void colour_row(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int width, uint8_t *to) {
    const __m256i zero = _mm256_setzero_si256();
    for (int x = 0; x < width; x += COLOUR_BATCH, to += 4 * COLOUR_BATCH) {
        const __m256i luma = load(y + x), blue = load(cb + x), red = load(cr + x);
        __m256i low[3], high[3], bytes[3];
        convert(_mm256_unpacklo_epi8(luma, zero), _mm256_unpacklo_epi8(blue, zero), _mm256_unpacklo_epi8(red, zero),
                low);
        convert(_mm256_unpackhi_epi8(luma, zero), _mm256_unpackhi_epi8(blue, zero), _mm256_unpackhi_epi8(red, zero),
                high);
        for (int c = 0; c < 3; c++)
            bytes[c] = _mm256_packus_epi16(low[c], high[c]);
        __m256i rg = _mm256_unpacklo_epi8(bytes[0], bytes[1]), b = _mm256_unpacklo_epi8(bytes[2], zero);
        store(to, _mm256_unpacklo_epi16(rg, b), _mm256_unpackhi_epi16(rg, b));
        rg = _mm256_unpackhi_epi8(bytes[0], bytes[1]), b = _mm256_unpackhi_epi8(bytes[2], zero);
        store(to + COLOUR_BATCH, _mm256_unpacklo_epi16(rg, b), _mm256_unpackhi_epi16(rg, b));
    }
}

#else

static uint8_t limit(int value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

void colour_row(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int width, uint8_t *to) {
    for (int x = 0; x < width; x++, to += 4) {
        const int blue = cb[x] - 128, red = cr[x] - 128;
        to[0] = limit(y[x] + ((91881 * red + 32768) >> 16));
        to[1] = limit(y[x] + ((-22554 * blue - 46802 * red + 32768) >> 16));
        to[2] = limit(y[x] + ((116130 * blue + 32768) >> 16));
        to[3] = 0;
    }
}

#endif

void upsample_row(const struct chroma *from, uint16_t *sums, uint8_t *to) {
    const int count = from->count, even = from->halved ? 8 : 4, odd = from->halved ? 7 : 8;
    for (int i = 0; i < count + 2; i++)
        sums[i] = (uint16_t)(3 * from->nearest[i - 1] + from->second[i - 1]);
    sums[0] = from->first ? sums[1] : sums[0];
    sums[count + 1] = from->final ? sums[count] : sums[count + 1];
    for (int i = 0; i < count; i++) {
        to[2 * i] = (uint8_t)((3 * sums[i + 1] + sums[i] + even) >> 4);
        to[2 * i + 1] = (uint8_t)((3 * sums[i + 1] + sums[i + 2] + odd) >> 4);
    }
}
