/* Blends an image with its grey or blurred version: base + factor (value - base), 64 values at a time.
 *
 * The change of a value depends only on its difference from the base, so it is looked up: tables uint8 [2][256] hold
 * the distance from the base after blending, for values above it and for values below it. The functions return false
 * (or 0) and do nothing on processors that cannot look up 64 values at once. */
#include <stdbool.h>

#include "tables.h"

#ifdef __AVX512VBMI__
static inline __m512i blend(__m512i values, __m512i bases, const table_lanes *above, const table_lanes *below) {
    __m512i up = look_up_64(_mm512_subs_epu8(values, bases), above),
            down = look_up_64(_mm512_subs_epu8(bases, values), below);
    return _mm512_subs_epu8(_mm512_adds_epu8(bases, up), down); /* one of the two is zero */
}

#define GROUP 48 /* bytes of 16 pixels */

/* Byte orders: from 16 pixels of three bytes to pairs (R, G) and (G, B); from one number per pixel to three bytes. */
static uint8_t red_green[64], green_blue[64], luma_to_rgb[64];

__attribute__((constructor)) static void make_shuffles(void) {
    for (int i = 0; i < 16; i++) {
        red_green[4 * i] = 3 * i;
        red_green[4 * i + 2] = green_blue[4 * i] = 3 * i + 1;
        green_blue[4 * i + 2] = 3 * i + 2;
        luma_to_rgb[3 * i] = luma_to_rgb[3 * i + 1] = luma_to_rgb[3 * i + 2] = 4 * i;
    }
}

/* Pillow's `L`, (19595 R + 38470 G + 7471 B + 2^15) >> 16. The weight of G is split in two, to fit into 16 bits. */
static inline __m512i luma(__m512i pixels) {
    const __mmask64 low = 0x5555555555555555;
    __m512i first = _mm512_maskz_permutexvar_epi8(low, _mm512_loadu_si512(red_green), pixels);
    __m512i second = _mm512_maskz_permutexvar_epi8(low, _mm512_loadu_si512(green_blue), pixels);
    first = _mm512_madd_epi16(first, _mm512_set1_epi32(19595 | 19235 << 16));
    second = _mm512_madd_epi16(second, _mm512_set1_epi32(19235 | 7471 << 16));
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(first, second), _mm512_set1_epi32(1 << 15)), 16);
}

/* The sum of the luma of all pixels; `size` is their number of bytes, values uint8 R, G, B. */
int64_t sum_luma(const uint8_t *values, int64_t size) {
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < size; i += GROUP) {
        __mmask64 group = first_bytes(size - i < GROUP ? size - i : GROUP);
        __m512i pixels = _mm512_maskz_loadu_epi8(group, values + i);
        sums = _mm512_add_epi64(sums, _mm512_sad_epu8(luma(pixels), _mm512_setzero_si512()));
    }
    return _mm512_reduce_add_epi64(sums);
}

/* 16 pixels blended with their luma. */
static inline __m512i blend_with_luma(__m512i pixels, const table_lanes *above, const table_lanes *below) {
    return blend(pixels, _mm512_permutexvar_epi8(_mm512_loadu_si512(luma_to_rgb), luma(pixels)), above, below);
}

/* Blend each pixel with its luma, in place; `size` bytes R, G, B. */
int32_t color_by_table(uint8_t *values, int64_t size, const uint8_t *tables) {
    table_lanes above = load_table(tables), below = load_table(tables + 256);
    int64_t i = 0;
    for (; i + 64 <= size; i += GROUP) { /* a masked store would delay the next load */
        __m512i made = blend_with_luma(_mm512_loadu_si512(values + i), &above, &below);
        _mm256_storeu_si256((__m256i *)(values + i), _mm512_castsi512_si256(made));
        _mm_storeu_si128((__m128i *)(values + i + 32), _mm512_extracti32x4_epi32(made, 2));
    }
    for (; i < size; i += GROUP) {
        __mmask64 group = first_bytes(size - i < GROUP ? size - i : GROUP);
        __m512i made = blend_with_luma(_mm512_maskz_loadu_epi8(group, values + i), &above, &below);
        _mm512_mask_storeu_epi8(values + i, group, made);
    }
    return true;
}

/* Sums of each value and its neighbours three bytes before and after; separately for even and odd positions. */
static void add_neighbours(const uint8_t *row, int64_t size, __m512i *sums) {
    const __m512i low = _mm512_set1_epi16(255);
    for (int64_t i = 3; i < size - 3; i += 64, sums += 2) {
        __mmask64 rest = first_bytes(size - 3 - i);
        __m512i even = _mm512_setzero_si512(), odd = even;
        for (int k = -3; k <= 3; k += 3) {
            __m512i values = _mm512_maskz_loadu_epi8(rest, row + i + k);
            even = _mm512_add_epi16(even, _mm512_and_si512(values, low));
            odd = _mm512_add_epi16(odd, _mm512_srli_epi16(values, 8));
        }
        sums[0] = even;
        sums[1] = odd;
    }
}

/* Nine values plus four times the middle one, by 13 and rounded, as Pillow's SMOOTH kernel; exact to 13 x 255. */
static inline __m512i smooth(__m512i above, __m512i here, __m512i below, __m512i middle) {
    __m512i sum =
        _mm512_add_epi16(_mm512_add_epi16(above, here), _mm512_add_epi16(below, _mm512_slli_epi16(middle, 2)));
    sum = _mm512_add_epi16(_mm512_add_epi16(sum, sum), _mm512_set1_epi16(13));
    return _mm512_srli_epi16(_mm512_mulhi_epu16(sum, _mm512_set1_epi16((short)40330)), 4);
}

/* Blend each value of picture, uint8 [height][size] with size = 3 width bytes, with the smoothed 3 x 3 pixels around
 * it, in place. The outermost pixels do not change. `scratch` holds three rows of sums, 2 size + 128 bytes each. */
int32_t sharpen_by_table(uint8_t *picture, int64_t height, int64_t size, const uint8_t *tables, uint8_t *scratch) {
    table_lanes over = load_table(tables), under = load_table(tables + 256);
    const __m512i low = _mm512_set1_epi16(255);
    scratch += 64 - (uintptr_t)scratch % 64;
    __m512i *sums[3];
    for (int k = 0; k < 3; k++)
        sums[k] = (__m512i *)(scratch + k * 2 * ((size + 63) / 64 * 64));
    add_neighbours(picture, size, sums[0]);
    add_neighbours(picture + size, size, sums[1]);
    for (int64_t y = 1; y < height - 1; y++) {
        uint8_t *row = picture + y * size;
        const __m512i *above = sums[(y - 1) % 3], *here = sums[y % 3], *below = sums[(y + 1) % 3];
        add_neighbours(row + size, size, sums[(y + 1) % 3]);
        for (int64_t i = 3; i < size - 3; i += 64, above += 2, here += 2, below += 2) {
            __mmask64 rest = first_bytes(size - 3 - i);
            __m512i values = _mm512_maskz_loadu_epi8(rest, row + i);
            __m512i even = smooth(above[0], here[0], below[0], _mm512_and_si512(values, low));
            __m512i odd = smooth(above[1], here[1], below[1], _mm512_srli_epi16(values, 8));
            __m512i means = _mm512_or_si512(even, _mm512_slli_epi16(odd, 8));
            _mm512_mask_storeu_epi8(row + i, rest, blend(values, means, &over, &under));
        }
    }
    return true;
}
#else
int64_t sum_luma(const uint8_t *values, int64_t size) {
    (void)values, (void)size;
    return 0;
}

int32_t color_by_table(uint8_t *values, int64_t size, const uint8_t *tables) {
    (void)values, (void)size, (void)tables;
    return false;
}

int32_t sharpen_by_table(uint8_t *picture, int64_t height, int64_t size, const uint8_t *tables, uint8_t *scratch) {
    (void)picture, (void)height, (void)size, (void)tables, (void)scratch;
    return false;
}
#endif
