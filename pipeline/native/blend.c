/* Blends an image with its grey or blurred version: base + factor (value - base), clipped and truncated, in single
 * precision as Pillow does.
 *
 * The result depends only on the base and the difference from it. Processors that look up 64 values at once (AVX-512
 * VBMI) do that instead of the arithmetic: tables uint8 [2][256] hold the distance from the base after blending, for
 * values above it and for values below it. */
#include <stdbool.h>

#include "pixels.h"
#include "tables.h"

#define PART 256        /* pixels that are converted at once */
#define LARGEST 0x1p20f /* factor: it leaves only 0, 255 and the base, as larger ones do */

/* All loops are over words of four bytes: compilers use wide registers for these, and convert single bytes slowly. */
static inline uint32_t blend_value(uint32_t value, uint32_t base, float factor) {
    const float start = (float)(int32_t)base, end = (float)(int32_t)value;
    const int32_t made = (int32_t)(start + factor * (end - start)), least = made < 0 ? 0 : made;
    return (uint32_t)(least > 255 ? 255 : least);
}

static inline float limited(float factor) { return factor > LARGEST ? LARGEST : factor < -LARGEST ? -LARGEST : factor; }

/* Blend `size` values with one base each, in place. */
static void blend_values(uint8_t *restrict values, const uint8_t *restrict bases, int64_t size, float factor) {
    int64_t i = 0;
    for (; i + 4 <= size; i += 4) {
        uint32_t word, base, made = 0;
        memcpy(&word, values + i, 4);
        memcpy(&base, bases + i, 4);
#pragma GCC unroll 4
        for (int shift = 0; shift < 32; shift += 8)
            made |= blend_value(word >> shift & 255, base >> shift & 255, factor) << shift;
        memcpy(values + i, &made, 4);
    }
    for (; i < size; i++)
        values[i] = (uint8_t)blend_value(values[i], bases[i], factor);
}

/* Pillow's `L` of a pixel R, G, B, unused. */
static inline uint32_t luma_of(uint32_t pixel) {
    return ((pixel & 255) * 19595 + (pixel >> 8 & 255) * 38470 + (pixel >> 16 & 255) * 7471 + (1 << 15)) >> 16;
}

#ifdef __AVX512VBMI__
static inline __m512i blend(__m512i values, __m512i bases, const table_lanes *above, const table_lanes *below) {
    __m512i up = look_up_lanes(_mm512_subs_epu8(values, bases), above),
            down = look_up_lanes(_mm512_subs_epu8(bases, values), below);
    return _mm512_subs_epu8(_mm512_adds_epu8(bases, up), down); /* one of the two is zero */
}

/* A mask of the first `count` bytes of a register, of all for 64 and more. */
static inline __mmask64 first_bytes(int64_t count) { return count < 64 ? (1ULL << count) - 1 : ~0ULL; }

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
static inline __m512i blend_pixels(__m512i pixels, const table_lanes *above, const table_lanes *below) {
    return blend(pixels, _mm512_permutexvar_epi8(_mm512_loadu_si512(luma_to_rgb), luma(pixels)), above, below);
}

/* Blend each pixel with its luma, in place. */
static void blend_by_table(uint8_t *values, int64_t size, const uint8_t *tables) {
    table_lanes above = load_table(tables), below = load_table(tables + 256);
    int64_t i = 0;
    for (; i + 64 <= size; i += GROUP) { /* a masked store would delay the next load */
        __m512i made = blend_pixels(_mm512_loadu_si512(values + i), &above, &below);
        _mm256_storeu_si256((__m256i *)(values + i), _mm512_castsi512_si256(made));
        _mm_storeu_si128((__m128i *)(values + i + 32), _mm512_extracti32x4_epi32(made, 2));
    }
    for (; i < size; i += GROUP) {
        __mmask64 group = first_bytes(size - i < GROUP ? size - i : GROUP);
        __m512i made = blend_pixels(_mm512_maskz_loadu_epi8(group, values + i), &above, &below);
        _mm512_mask_storeu_epi8(values + i, group, made);
    }
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

/* `sharpen`, with three rows of sums in `scratch`. */
static void sharpen_by_table(uint8_t *image, int64_t height, int64_t size, const uint8_t *tables, uint8_t *scratch) {
    table_lanes over = load_table(tables), under = load_table(tables + 256);
    const __m512i low = _mm512_set1_epi16(255);
    scratch += 64 - (uintptr_t)scratch % 64;
    __m512i *sums[3];
    for (int k = 0; k < 3; k++)
        sums[k] = (__m512i *)(scratch + k * 2 * ((size + 63) / 64 * 64));
    add_neighbours(image, size, sums[0]);
    add_neighbours(image + size, size, sums[1]);
    for (int64_t y = 1; y < height - 1; y++) {
        uint8_t *row = image + y * size;
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
}
#else
int64_t sum_luma(const uint8_t *values, int64_t size) {
    uint32_t pixels[PART];
    int64_t sum = 0;
    for (int64_t i = 0; i < size; i += 3 * PART) {
        const int count = size - i < 3 * PART ? (int)(size - i) / 3 : PART;
        uint32_t part = 0;
        spread_row(values + i, count, (uint8_t *)pixels);
        for (int k = 0; k < count; k++)
            part += luma_of(pixels[k]);
        sum += part;
    }
    return sum;
}
#endif

/* Blend each pixel with its luma, in place; `size` bytes R, G, B. `tables` is NULL if they are not exact. */
int32_t blend_with_luma(uint8_t *values, int64_t size, float factor, const uint8_t *tables) {
#ifdef __AVX512VBMI__
    if (tables) {
        blend_by_table(values, size, tables);
        return true;
    }
#endif
    (void)tables;
    uint32_t pixels[PART];
    factor = limited(factor);
    for (int64_t i = 0; i < size; i += 3 * PART) {
        const int count = size - i < 3 * PART ? (int)(size - i) / 3 : PART;
        spread_row(values + i, count, (uint8_t *)pixels);
        for (int k = 0; k < count; k++) {
            const uint32_t pixel = pixels[k], base = luma_of(pixel);
            pixels[k] = blend_value(pixel & 255, base, factor) | blend_value(pixel >> 8 & 255, base, factor) << 8 |
                        blend_value(pixel >> 16 & 255, base, factor) << 16;
        }
        pack_row((uint8_t *)pixels, count, values + i);
    }
    return true;
}

/* Pillow's SMOOTH kernel: nine values plus four times the middle one, by 13 and rounded; exact to 13 x 255. */
static void average(const uint16_t *restrict sums, const uint8_t *restrict middle, int64_t size,
                    uint8_t *restrict means) {
    for (int64_t i = 0; i < size; i++) {
        const uint16_t twice = (uint16_t)(2 * (sums[i] + sums[i + 3] + sums[i + 6] + 4 * middle[i]) + 13);
        means[i] = (uint8_t)((uint16_t)(twice * 40330u >> 16) >> 4);
    }
}

static void add_rows(const uint8_t *restrict above, const uint8_t *restrict here, const uint8_t *restrict below,
                     int64_t size, uint16_t *restrict sums) {
    for (int64_t i = 0; i < size; i++)
        sums[i] = (uint16_t)(above[i] + here[i] + below[i]);
}

/* Blend each value of image, uint8 [height][size] with size = 3 width bytes, with the smoothed 3 x 3 pixels around
 * it, in place. The outermost pixels do not change. `scratch` holds 6 size + 448 bytes, aligned to 2. */
int32_t sharpen(uint8_t *image, int64_t height, int64_t size, float factor, const uint8_t *tables, uint8_t *scratch) {
#ifdef __AVX512VBMI__
    if (tables) {
        sharpen_by_table(image, height, size, tables, scratch);
        return true;
    }
#endif
    (void)tables;
    uint16_t *sums = (uint16_t *)scratch;
    uint8_t *means = scratch + 2 * size, *before[] = {means + size, means + 2 * size}; /* rows as they were */
    factor = limited(factor);
    memcpy(before[0], image, (size_t)size);
    for (int64_t y = 1; y < height - 1; y++) {
        uint8_t *row = image + y * size;
        memcpy(before[y & 1], row, (size_t)size);
        add_rows(before[~y & 1], row, row + size, size, sums);
        average(sums, row + 3, size - 6, means);
        blend_values(row + 3, means, size - 6, factor);
    }
    return true;
}
