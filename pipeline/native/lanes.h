/* Vectors that hold one number of each of LANES images, so that any permutation of features moves whole vectors. */
#ifndef LANES_H
#define LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined __SSE2__
#include <immintrin.h>
#elif defined __ARM_NEON
#include <arm_neon.h>
#endif

#ifdef __AVX512F__
#define NATIVE_LANES 16
#elif defined __AVX2__
#define NATIVE_LANES 8
#else
#define NATIVE_LANES 4
#endif
#ifndef LANES /* the tests compile others too */
#define LANES NATIVE_LANES
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), may_alias));
typedef float quad __attribute__((vector_size(16), may_alias)); /* four numbers of one image, or of four */
typedef int32_t iquad __attribute__((vector_size(16), may_alias));
typedef uint16_t halves __attribute__((vector_size(8)));

/* multiply_add(a, b, c) is a b + c, rounded once where the machine can. */
#if LANES == 16 && defined __AVX512F__
#define multiply_add(a, b, c) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define larger(a, b) ((vec)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define smaller(a, b) ((vec)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define square_root(a) ((vec)_mm512_sqrt_ps((__m512)(a)))
#elif LANES == 8 && defined __AVX2__ && defined __FMA__
#define multiply_add(a, b, c) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define larger(a, b) ((vec)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define smaller(a, b) ((vec)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define square_root(a) ((vec)_mm256_sqrt_ps((__m256)(a)))
#else
#if LANES == 4 && defined __aarch64__
#define multiply_add(a, b, c) ((vec)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define multiply_add(a, b, c) ((a) * (b) + (c))
#endif
INLINE vec chosen(ivec where, vec a, vec b) { return (vec)(((ivec)a & where) | ((ivec)b & ~where)); }
#define larger(a, b) chosen((ivec)((a) > (b)), a, b)
#define smaller(a, b) chosen((ivec)((a) < (b)), a, b)
INLINE vec square_root(vec a) {
    for (int l = 0; l < LANES; l++)
        a[l] = sqrtf(a[l]);
    return a;
}
#endif

INLINE vec all_of(float number) { return number - (vec){0}; } /* which, unlike a sum with zeros, changes no number */

/* sum += a b in registers. GCC would load `a` anew for each product of a tile, or copy and spill the sums. */
#if LANES == NATIVE_LANES && LANES > 4 && defined __FMA__
#define ACCUMULATE(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
#else
#define ACCUMULATE(sum, a, b) (sum) = multiply_add(a, b, sum)
#endif

/* Rows i of four numbers become columns. */
INLINE void transpose(quad rows[4]) {
#ifdef __SSE2__
    _MM_TRANSPOSE4_PS(*(__m128 *)&rows[0], *(__m128 *)&rows[1], *(__m128 *)&rows[2], *(__m128 *)&rows[3]);
#else
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++) {
            const float number = rows[i][j];
            rows[i][j] = rows[j][i], rows[j][i] = number;
        }
#endif
}

/* The sums over images, as the mean of pairs and their pairs; always in the same order. */
INLINE quad folded(vec numbers) {
#if LANES == 16 && defined __AVX512F__
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)numbers),
                                      _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)numbers, 1)));
    return (quad)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif LANES == 8 && defined __AVX2__
    return (quad)_mm_add_ps(_mm256_castps256_ps128((__m256)numbers), _mm256_extractf128_ps((__m256)numbers, 1));
#else
    quad sum = {0};
    for (int k = 0; k < LANES; k += 4)
        sum += (quad){numbers[k], numbers[k + 1], numbers[k + 2], numbers[k + 3]};
    return sum;
#endif
}

INLINE float total(vec numbers) {
    const quad sum = folded(numbers);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

typedef enum { FP32, BF16 } number_kind;

INLINE quad load_quad(const char *from, const number_kind kind) {
    quad numbers;
    if (kind == FP32)
        memcpy(&numbers, from, sizeof numbers);
    else {
        halves upper;
        memcpy(&upper, from, sizeof upper);
        numbers = (quad)(__builtin_convertvector(upper, iquad) << 16);
    }
    return numbers;
}

/* bf16 is rounded to the nearest, ties to even. */
INLINE void store_quad(char *to, quad numbers, const number_kind kind) {
    if (kind == FP32)
        memcpy(to, &numbers, sizeof numbers);
    else {
        typedef uint32_t words __attribute__((vector_size(16)));
        const words bits = (words)numbers, is_number = (words)(numbers == numbers);
        const words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        const halves upper = __builtin_convertvector((rounded & is_number) | (0x7fc0 & ~is_number), halves);
        memcpy(to, &upper, sizeof upper);
    }
}

/* `count` numbers or fewer of an image, then zeros. */
INLINE quad load_part(const char *from, int64_t count, const number_kind kind) {
    char numbers[16] = {0};
    return load_quad(count < 4 ? memcpy(numbers, from, count * (kind == FP32 ? 4 : 2)) : from, kind);
}

INLINE void store_part(char *to, quad numbers, int64_t count, const number_kind kind) {
    char part[16];
    store_quad(count < 4 ? part : to, numbers, kind);
    if (count < 4)
        memcpy(to, part, count * (kind == FP32 ? 4 : 2));
}

/* Four features or fewer of `images` images, and zeros for others. */
INLINE void load_features(const char *from, int64_t size, int64_t count, const int images, vec *to,
                          const number_kind kind) {
    for (int first = 0; first < LANES; first += 4) {
        quad rows[4] = {{0}, {0}, {0}, {0}};
        UNROLL
        for (int i = 0; i < 4; i++)
            if (first + i < images)
                rows[i] = load_part(from + (first + i) * size * (kind == FP32 ? 4 : 2), count, kind);
        transpose(rows);
        UNROLL
        for (int j = 0; j < 4; j++)
            if (j < count)
                memcpy((float *)(to + j) + first, rows + j, sizeof *rows);
    }
}

INLINE void store_features(const vec *from, int64_t size, int64_t count, const int images, char *to,
                           const number_kind kind) {
    for (int first = 0; first < images; first += 4) {
        quad rows[4] = {{0}, {0}, {0}, {0}};
        UNROLL
        for (int j = 0; j < 4; j++)
            if (j < count)
                memcpy(rows + j, (float *)(from + j) + first, sizeof *rows);
        transpose(rows);
        UNROLL
        for (int i = 0; i < 4; i++)
            if (first + i < images)
                store_part(to + (first + i) * size * (kind == FP32 ? 4 : 2), rows[i], count, kind);
    }
}

INLINE void load_all(const char *from, int64_t size, const int images, vec *to, const number_kind kind) {
    int64_t f = 0;
    for (; f + 4 <= size; f += 4)
        load_features(from + f * (kind == FP32 ? 4 : 2), size, 4, images, to + f, kind);
    load_features(from + f * (kind == FP32 ? 4 : 2), size, size - f, images, to + f, kind);
}

INLINE void store_all(const vec *from, int64_t size, const int images, char *to, const number_kind kind) {
    int64_t f = 0;
    for (; f + 4 <= size; f += 4)
        store_features(from + f, size, 4, images, to + f * (kind == FP32 ? 4 : 2), kind);
    store_features(from + f, size, size - f, images, to + f * (kind == FP32 ? 4 : 2), kind);
}

/* to[f] is feature f of `images` <= LANES images [images, size], then zeros. */
static void load_images(const char *from, int64_t size, int images, vec *to, number_kind kind) {
    if (kind == BF16)
        load_all(from, size, images, to, BF16);
    else if (images < LANES)
        load_all(from, size, images, to, FP32);
    else
        load_all(from, size, LANES, to, FP32);
}

static void store_images(const vec *from, int64_t size, int images, char *to, number_kind kind) {
    if (kind == BF16)
        store_all(from, size, images, to, BF16);
    else if (images < LANES)
        store_all(from, size, images, to, FP32);
    else
        store_all(from, size, LANES, to, FP32);
}

/* 2^power for a power of -126 ... 128, whose power is infinite: 2 to an integer, times a polynomial for the rest, of
 * relative error 9e-8. */
INLINE vec exponential(vec power) {
    const vec shift = all_of(12582912.0f); /* 1.5 * 2^23: what is added to it is rounded to an integer */
    const vec shifted = power + shift, rest = power - (shifted - shift);
    vec sum = all_of(0.00132647269f);
    sum = multiply_add(sum, rest, all_of(0.00967151266f));
    sum = multiply_add(sum, rest, all_of(0.0555073374f));
    sum = multiply_add(sum, rest, all_of(0.240222421f));
    sum = multiply_add(sum, rest, all_of(0.693146978f));
    sum = multiply_add(sum, rest, all_of(1.0f));
    return (vec)((ivec)sum + ((ivec)shifted << 23));
}

typedef enum { GELU, GELU_TANH, SQUARE } activation_kind;

/* x Phi(x) and its slope Phi(x) + x phi(x), which share exp(-x^2 / 2). Phi(-a) is that, times a polynomial in
 * 1 / (1 + 0.36 a); a times its error is at most 5.3e-8. */
INLINE void gelu(vec x, vec *y, vec *slope) {
    const ivec sign = (ivec)x & INT32_MIN;
    const vec a = (vec)((ivec)x & INT32_MAX);
    const vec bell = exponential(larger(a * a * all_of(-0.721347520f), all_of(-126.0f)));
    const vec t = all_of(1.0f) / multiply_add(a, all_of(0.36f), all_of(1.0f));
    vec sum = all_of(0.0530900266f);
    sum = multiply_add(sum, t, all_of(-0.307224732f));
    sum = multiply_add(sum, t, all_of(0.588911123f));
    sum = multiply_add(sum, t, all_of(-0.244974262f));
    sum = multiply_add(sum, t, all_of(0.298170311f));
    sum = multiply_add(sum, t, all_of(0.108693291f));
    sum = multiply_add(sum, t, all_of(0.0033342373f));
    const vec below = (vec)((ivec)(all_of(0.5f) - sum * bell) | sign) + all_of(0.5f);
    *y = x * below;
    *slope = multiply_add(x * bell, all_of(0.398942280f), below);
}

/* x s(2 u) with the logistic function s and u = sqrt(2 / pi) (x + 0.044715 x^3), and its slope. */
INLINE void gelu_tanh(vec x, vec *y, vec *slope) {
    const vec square = x * x, twice = all_of(1.59576912f);
    const vec inner = twice * multiply_add(square, all_of(0.044715f), all_of(1.0f));
    const vec power = x * inner * all_of(-1.44269504f);
    const vec s = all_of(1.0f) / (exponential(smaller(larger(power, all_of(-126.0f)), all_of(128.0f))) + 1.0f);
    const vec steep = twice * multiply_add(square, all_of(3 * 0.044715f), all_of(1.0f));
    *y = x * s;
    *slope = multiply_add(x * s * (all_of(1.0f) - s), steep, s);
}

INLINE void activate(vec x, vec *y, vec *slope, const activation_kind kind) {
    if (kind == GELU)
        gelu(x, y, slope);
    else if (kind == GELU_TANH)
        gelu_tanh(x, y, slope);
    else
        *y = x * x, *slope = x + x;
}

#endif
