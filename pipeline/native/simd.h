/* Vectors of TAPS pixels, each of four int32: as many as fit into a register of this machine. Compilers add and
 * multiply such vectors well, but convert bytes to them slowly. */
#ifndef SIMD_H
#define SIMD_H

#include <stdint.h>
#include <string.h>

#if defined __AVX512F__ || defined __AVX2__
#include <immintrin.h>
#elif defined __ARM_NEON
#include <arm_neon.h>
#endif

#ifdef __AVX512F__
#define TAPS 4
#elif defined __AVX2__
#define TAPS 2
#else
#define TAPS 1
#endif

typedef int32_t int_pixel __attribute__((vector_size(16)));         /* one pixel: R, G, B, unused */
typedef int32_t int_vector __attribute__((vector_size(16 * TAPS))); /* TAPS pixels */

/* TAPS pixels of four bytes as a vector. Reads at most 16 bytes. */
static inline int_vector widen(const uint8_t *pixels) {
#ifdef __AVX512F__
    return (int_vector)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)pixels));
#elif defined __AVX2__
    return (int_vector)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)pixels));
#elif defined __ARM_NEON
    uint32_t word;
    memcpy(&word, pixels, 4);
    return (int_vector)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word))));
#else
    return (int_vector){pixels[0], pixels[1], pixels[2], pixels[3]};
#endif
}

/* A vector from memory. */
static inline int_vector load(const int32_t *numbers) {
    int_vector loaded;
    memcpy(&loaded, numbers, sizeof loaded);
    return loaded;
}

/* The sum of the TAPS pixels of a vector. */
static inline int_pixel sum_of(int_vector pixels) {
    int_pixel each[TAPS];
    memcpy(each, &pixels, sizeof each);
    int_pixel sum = each[0];
    for (int i = 1; i < TAPS; i++)
        sum += each[i];
    return sum;
}

#endif
