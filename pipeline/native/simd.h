/* The vectors of this machine, VECTOR bytes long. */
#ifndef SIMD_H
#define SIMD_H

#include <stdint.h>
#include <string.h>

/* SIMD(name) is the instruction of that name for whole vectors; it is undefined if there are none. */
#if defined __AVX512BW__
#define VECTOR 64
#define SIMD(name) _mm512_##name
#elif defined __AVX2__
#define VECTOR 32
#define SIMD(name) _mm256_##name
#else
#define VECTOR 16
#ifdef __SSE4_1__
#define SIMD(name) _mm_##name
#elif defined __ARM_NEON
#include <arm_neon.h>
#endif
#endif
#ifdef SIMD
#include <immintrin.h>
#endif

#define TAPS (VECTOR / 16) /* pixels of four int32 or float in a vector */

typedef long long vector __attribute__((vector_size(VECTOR))); /* what SIMD(name) takes */
typedef int32_t int_vector __attribute__((vector_size(VECTOR)));

/* TAPS pixels of four bytes as a vector. Reads at most 16 bytes. */
static inline int_vector widen(const uint8_t *pixels) {
#if VECTOR == 64
    return (int_vector)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)pixels));
#elif VECTOR == 32
    return (int_vector)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)pixels));
#elif defined __ARM_NEON
    uint32_t word;
    memcpy(&word, pixels, 4);
    return (int_vector)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word))));
#else
    return (int_vector){pixels[0], pixels[1], pixels[2], pixels[3]};
#endif
}

#endif
