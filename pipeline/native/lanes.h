/* Pixels of four bytes as four numbers, as many pixels at once as a register of this machine has room for. Compilers
 * add and multiply such vectors by themselves, but widen bytes badly. */
#ifndef LANES_H
#define LANES_H

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

typedef int32_t one __attribute__((vector_size(16)));           /* R, G, B, unused */
typedef int32_t several __attribute__((vector_size(16 * TAPS))); /* of TAPS pixels */

/* Reads 16 bytes at most. */
static inline several widen(const uint8_t *pixels) {
#ifdef __AVX512F__
    return (several)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)pixels));
#elif defined __AVX2__
    return (several)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)pixels));
#elif defined __ARM_NEON
    uint32_t word;
    memcpy(&word, pixels, 4);
    return (several)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word))));
#else
    return (several){pixels[0], pixels[1], pixels[2], pixels[3]};
#endif
}

static inline several load(const int32_t *numbers) {
    several loaded;
    memcpy(&loaded, numbers, sizeof loaded);
    return loaded;
}

static inline one sum_of(several pixels) {
    one each[TAPS];
    memcpy(each, &pixels, sizeof each);
    one sum = each[0];
    for (int i = 1; i < TAPS; i++)
        sum += each[i];
    return sum;
}

#endif
