#include "across.h"

#include <string.h>

#include "lanes.h"

#if defined __AVX512VNNI__ && defined __AVX512BW__

/* Four outputs at a time: a register's quarter each, with a sum for each channel. One instruction adds up four taps,
 * of bytes; so a weight is three digits of base 256, from -128 to 127, and the sum is put together of three. */
#define DIGITS 3
#define QUARTER 16

/* Of four outputs: at which byte each begins to read, and how many times four taps. */
struct quad {
    int32_t first[4], groups;
};

static int quads(const struct axis *axis) { return (axis->side + 3) / 4; }

/* The weights of four taps from `tap` on, whose digits go one below the other, repeated for each channel. */
static void store_digits(const int32_t *weights, int tap, int count, uint8_t *to) {
    uint8_t digits[DIGITS][4];
    for (int k = 0; k < 4; k++) {
        int32_t weight = tap + k >= 0 && tap + k < count ? weights[tap + k] : 0;
        for (int d = 0; d < DIGITS; d++) {
            digits[d][k] = (uint8_t)weight;
            weight = (weight - (int8_t)weight) >> 8;
        }
    }
    for (int d = 0; d < DIGITS; d++)
        for (int channel = 0; channel < 4; channel++)
            memcpy(to + 4 * QUARTER * d + 4 * channel, digits[d], 4);
}

bool begin_across(struct scratch *scratch, const struct axis *axis) {
    size_t count = (size_t)quads(axis), most = (size_t)(axis->taps + 3) / 4;
    struct quad *quad = room(&scratch->quads, count * sizeof *quad);
    uint8_t *weights = room(&scratch->across, count * most * DIGITS * 4 * QUARTER);
    if (!quad || !weights)
        return false;
    for (int x = 0; x < axis->side; x += 4, quad++) {
        int outputs = axis->side - x < 4 ? axis->side - x : 4, longest = 0;
        const int32_t *places = axis->places + 2 * x;
        for (int j = 0; j < outputs; j++)
            longest = places[2 * j + 1] > longest ? places[2 * j + 1] : longest;
        int groups = (longest + 3) / 4, latest = axis->size - 4 * groups; /* else it would read behind the row */
        latest = latest < 0 ? 0 : latest;
        *quad = (struct quad){.groups = groups};
        memset(weights, 0, (size_t)groups * DIGITS * 4 * QUARTER);
        for (int j = 0; j < outputs; j++) {
            int first = places[2 * j] < latest ? places[2 * j] : latest, ahead = places[2 * j] - first;
            quad->first[j] = 4 * first;
            for (int g = 0; g < groups; g++)
                store_digits(axis->weights + (size_t)(x + j) * (size_t)axis->taps, 4 * g - ahead, places[2 * j + 1],
                             weights + (g * DIGITS * 4 + j) * QUARTER);
        }
        weights += groups * DIGITS * 4 * QUARTER;
    }
    return true;
}

void across_row(const struct scratch *scratch, const struct axis *axis, const uint8_t *from, uint8_t *to) {
    const __m512i by_channel = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const uint8_t *weights = scratch->across.data;
    const struct quad *quad = scratch->quads.data, *end = quad + quads(axis);
    for (; quad < end; quad++, to += QUARTER) {
        const uint8_t *a = from + quad->first[0], *b = from + quad->first[1];
        const uint8_t *c = from + quad->first[2], *d = from + quad->first[3];
        __m512i low = _mm512_set1_epi32(1 << (BITS - 1)), middle = _mm512_setzero_si512(), high = middle;
        for (int g = 0; g < quad->groups; g++, weights += DIGITS * 4 * QUARTER) {
            __m512i taps = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(a + QUARTER * g)));
            taps = _mm512_inserti32x4(taps, _mm_loadu_si128((const __m128i *)(b + QUARTER * g)), 1);
            taps = _mm512_inserti32x4(taps, _mm_loadu_si128((const __m128i *)(c + QUARTER * g)), 2);
            taps = _mm512_inserti32x4(taps, _mm_loadu_si128((const __m128i *)(d + QUARTER * g)), 3);
            taps = _mm512_shuffle_epi8(taps, by_channel);
            low = _mm512_dpbusd_epi32(low, taps, _mm512_loadu_si512(weights));
            middle = _mm512_dpbusd_epi32(middle, taps, _mm512_loadu_si512(weights + 4 * QUARTER));
            high = _mm512_dpbusd_epi32(high, taps, _mm512_loadu_si512(weights + 8 * QUARTER));
        }
        low = _mm512_add_epi32(low, _mm512_slli_epi32(middle, 8));
        low = _mm512_srai_epi32(_mm512_add_epi32(low, _mm512_slli_epi32(high, 16)), BITS);
        _mm_storeu_si128((__m128i *)to, _mm512_cvtusepi32_epi8(_mm512_max_epi32(low, _mm512_setzero_si512())));
    }
}

#else

/* Each weight four times, once a channel, and rows of weights as long as registers. */
static int padded_taps(const struct axis *axis) { return (axis->taps + TAPS - 1) / TAPS * TAPS; }

bool begin_across(struct scratch *scratch, const struct axis *axis) {
    int taps = padded_taps(axis);
    int32_t *weight = room(&scratch->across, 4 * sizeof *weight * (size_t)(axis->side * taps));
    if (!weight || !room(&scratch->sums, 4 * sizeof *weight * (size_t)axis->side))
        return false;
    for (int x = 0; x < axis->side; x++)
        for (int t = 0; t < taps; t++, weight += 4)
            for (int channel = 0; channel < 4; channel++)
                weight[channel] = t < axis->taps ? axis->weights[x * axis->taps + t] : 0;
    return true;
}

void across_row(const struct scratch *scratch, const struct axis *axis, const uint8_t *from, uint8_t *to) {
    const int32_t *weights = scratch->across.data;
    int32_t *sums = scratch->sums.data;
    int side = axis->side, taps = padded_taps(axis);
    for (int x = 0; x < side; x++, weights += 4 * taps, sums += 4) {
        const uint8_t *pixel = from + 4 * (size_t)axis->places[2 * x];
        several sum = {0};
        for (int t = 0, count = axis->places[2 * x + 1]; t < count; t += TAPS)
            sum += widen(pixel + 4 * t) * load(weights + 4 * t);
        one total = sum_of(sum) + (1 << (BITS - 1));
        memcpy(sums, &total, sizeof total);
    }
    sums -= 4 * side;
    for (int i = 0; i < 4 * side; i++)
        to[i] = rounded(sums[i]);
}

#endif
