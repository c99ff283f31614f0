/* The parts of a Mixer's block between its products, on features whose last dimension is the picture: a row is one
 * feature of all pictures, and any permutation of the features moves whole rows. Computed in fp32. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "index.h"

#ifdef __AVX512F__
#define FOLDED 16 /* numbers of a vector, and partial sums over pictures */
#elif defined __AVX2__
#define FOLDED 8
#else
#define FOLDED 4
#endif
#define MOST_VECTORS 4
#define LANES 64  /* numbers at a time, where the compiler makes the vectors */
#define AHEAD 8   /* rows at random places that are asked for before they are needed */
#define SHARES 16 /* of the work, each with partial sums of its own: their order does not depend on the threads */
#define INLINE static inline __attribute__((always_inline))

INLINE float from_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE uint32_t to_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

typedef float vector __attribute__((vector_size(4 * FOLDED)));
typedef uint32_t words __attribute__((vector_size(4 * FOLDED)));
typedef uint16_t halves __attribute__((vector_size(2 * FOLDED)));

INLINE vector vector_of(float number) { return (vector){0} + number; }

/* Ask for so many bytes of memory, to read or to write. */
INLINE void fetch(const void *from, int64_t bytes, const int writes) {
    for (int64_t i = 0; i < bytes; i += 64)
        writes ? __builtin_prefetch((const char *)from + i, 1) : __builtin_prefetch((const char *)from + i);
}

/* The last `count` numbers, and zeros before them. */
INLINE vector last(vector numbers, int64_t count) {
    words kept;
    for (int l = 0; l < FOLDED; l++)
        kept[l] = l >= FOLDED - count ? 0xffffffff : 0;
    return (vector)((words)numbers & kept);
}

/* `count` numbers from memory, FOLDED or fewer, then zeros. */
INLINE vector load_vector_fp32(const float *numbers, int64_t count) {
    vector loaded = {0};
    memcpy(&loaded, numbers, (count < FOLDED ? count : FOLDED) * sizeof *numbers);
    return loaded;
}

INLINE void store_vector_fp32(float *numbers, vector from, int64_t count) {
    memcpy(numbers, &from, (count < FOLDED ? count : FOLDED) * sizeof *numbers);
}

INLINE float load_fp32(float number) { return number; }
INLINE float store_fp32(float number) { return number; }
INLINE float load_bf16(uint16_t number) { return from_bits((uint32_t)number << 16); }

/* Rounded to the nearest, ties to even. */
INLINE uint16_t store_bf16(float number) {
    const uint32_t bits = to_bits(number), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(number == number ? rounded : 0x7fc0);
}

INLINE vector load_vector_bf16(const uint16_t *numbers, int64_t count) {
    halves loaded = {0};
    memcpy(&loaded, numbers, (count < FOLDED ? count : FOLDED) * sizeof *numbers);
    return (vector)(__builtin_convertvector(loaded, words) << 16);
}

INLINE void store_vector_bf16(uint16_t *numbers, vector from, int64_t count) {
    const words bits = (words)from, is_number = (words)(from == from);
    const words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const halves stored = __builtin_convertvector((rounded & is_number) | (0x7fc0 & ~is_number), halves);
    memcpy(numbers, &stored, (count < FOLDED ? count : FOLDED) * sizeof *numbers);
}

/* a b + c, which compilers round once only where they are asked to. */
INLINE float multiply_add(float a, float b, float c) {
#if defined __FMA__ || defined __ARM_FEATURE_FMA
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* exp(-a^2 / 2): 2 to an integer, times a polynomial for 2 to the rest, of relative error 9e-8. */
INLINE float bell(float a) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to an integer */
    float power = a * a * -0.721347520f;
    power = power > -127.0f ? power : -127.0f; /* then the result is zero */
    const float whole = (power + shift) - shift, rest = power - whole;
    float sum = 0.00132647269f;
    sum = multiply_add(sum, rest, 0.00967151266f);
    sum = multiply_add(sum, rest, 0.0555073374f);
    sum = multiply_add(sum, rest, 0.240222421f);
    sum = multiply_add(sum, rest, 0.693146978f);
    sum = multiply_add(sum, rest, 1.0f);
    return sum * from_bits((uint32_t)((int32_t)whole + 127) << 23);
}

/* The normal distribution below -a, for a >= 0, from bell(a), times a polynomial in 1 / (1 + 0.36 a); a times its
 * error is at most 5.3e-8. */
INLINE float lower_tail(float a, float bell_of_a) {
    const float t = 1.0f / multiply_add(0.36f, a, 1.0f);
    float sum = 0.0530900266f;
    sum = multiply_add(sum, t, -0.307224732f);
    sum = multiply_add(sum, t, 0.588911123f);
    sum = multiply_add(sum, t, -0.244974262f);
    sum = multiply_add(sum, t, 0.298170311f);
    sum = multiply_add(sum, t, 0.108693291f);
    sum = multiply_add(sum, t, 0.0033342373f);
    return sum * bell_of_a;
}

/* x Phi(x). */
INLINE float gelu(float x) {
    const float a = fabsf(x), tail = lower_tail(a, bell(a));
    return x * (x < 0 ? tail : 1.0f - tail);
}

/* Phi(x) + x phi(x). */
INLINE float gelu_slope(float x) {
    const float a = fabsf(x), density = bell(a), tail = lower_tail(a, density);
    return (x < 0 ? tail : 1.0f - tail) + x * density * 0.398942280f;
}

enum { DONE = 0, OUT_OF_RANGE = 1 };

/* FOLDED of this machine. */
int batch_last_folded(void) { return FOLDED; }

/* GOMP_parallel: calls a function on each of so many threads and waits for them. */
typedef void (*run_team)(void (*function)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    void (*compute)(const void *arguments, int64_t from, int64_t to, int64_t share);
    const void *arguments;
    int64_t items, next_share;
} work;

static void compute_shares(void *data) {
    work *all = data;
    for (;;) {
        const int64_t share = __atomic_fetch_add(&all->next_share, 1, __ATOMIC_RELAXED);
        if (share >= SHARES)
            return;
        all->compute(all->arguments, all->items * share / SHARES, all->items * (share + 1) / SHARES, share);
    }
}

/* Computes items 0 ... items - 1 on PyTorch's own threads; on this one where there is one, or no team. */
static void divide(work all, run_team team, int threads) {
    if (team == NULL || threads < 2)
        compute_shares(&all);
    else
        team(compute_shares, &all, threads < SHARES ? threads : SHARES, 0);
}

#define NUMBER float
#define NAMED(name) name##_fp32
#define LOAD load_fp32
#define STORE store_fp32
#define LOAD_VECTOR load_vector_fp32
#define STORE_VECTOR store_vector_fp32
#include "batch_last.h"
#undef NUMBER
#undef NAMED
#undef LOAD
#undef STORE
#undef LOAD_VECTOR
#undef STORE_VECTOR

#define NUMBER uint16_t
#define NAMED(name) name##_bf16
#define LOAD load_bf16
#define STORE store_bf16
#define LOAD_VECTOR load_vector_bf16
#define STORE_VECTOR store_vector_bf16
#include "batch_last.h"
