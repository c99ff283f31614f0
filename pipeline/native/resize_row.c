#include "resize_row.h"

#include <string.h>

#include "simd.h"

#if defined __AVX512VNNI__ && defined __AVX512BW__

/* Four outputs at a time, each in a quarter of a register with one sum per channel. One instruction adds up four taps
 * with weights of one byte. A weight is therefore split into three digits of base 256, from -128 to 127, with a sum for
 * each. */
#define DIGITS 3
#define QUARTER 16

/* Four outputs: the first byte that each reads, and the number of times that four taps are added. */
struct group {
    int32_t first[4], groups;
};

static int group_count(const struct axis *axis) { return (axis->side + 3) / 4; }

/* Store the digits of the weights of four taps from `tap` on, once per channel. */
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

bool prepare_row_weights(struct scratch *scratch, const struct axis *axis) {
    size_t count = (size_t)group_count(axis), most = (size_t)(axis->taps + 3) / 4;
    struct group *group = ensure_capacity(&scratch->row_groups, count * sizeof *group);
    uint8_t *weights = ensure_capacity(&scratch->row_weights, count * most * DIGITS * 4 * QUARTER);
    if (!group || !weights)
        return false;
    for (int x = 0; x < axis->side; x += 4, group++) {
        int outputs = axis->side - x < 4 ? axis->side - x : 4, longest = 0;
        const int32_t *ranges = axis->ranges + 2 * x;
        for (int j = 0; j < outputs; j++)
            longest = ranges[2 * j + 1] > longest ? ranges[2 * j + 1] : longest;
        int groups = (longest + 3) / 4, latest = axis->size - 4 * groups; /* so that it does not read beyond the row */
        latest = latest < 0 ? 0 : latest;
        *group = (struct group){.groups = groups};
        memset(weights, 0, (size_t)groups * DIGITS * 4 * QUARTER);
        for (int j = 0; j < outputs; j++) {
            int first = ranges[2 * j] < latest ? ranges[2 * j] : latest, ahead = ranges[2 * j] - first;
            group->first[j] = 4 * first;
            for (int g = 0; g < groups; g++)
                store_digits(axis->weights + (size_t)(x + j) * (size_t)axis->taps, 4 * g - ahead, ranges[2 * j + 1],
                             weights + (g * DIGITS * 4 + j) * QUARTER);
        }
        weights += groups * DIGITS * 4 * QUARTER;
    }
    return true;
}

void resize_row(const struct scratch *scratch, const struct axis *axis, const uint8_t *from, uint8_t *to) {
    const __m512i by_channel =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const uint8_t *weights = scratch->row_weights.data;
    const struct group *group = scratch->row_groups.data, *end = group + group_count(axis);
    for (; group < end; group++, to += QUARTER) {
        const uint8_t *a = from + group->first[0], *b = from + group->first[1];
        const uint8_t *c = from + group->first[2], *d = from + group->first[3];
        __m512i low = _mm512_set1_epi32(1 << (BITS - 1)), middle = _mm512_setzero_si512(), high = middle;
        for (int g = 0; g < group->groups; g++, weights += DIGITS * 4 * QUARTER) {
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

/* Each weight is stored once per channel, and rows of weights are padded to whole registers. */
static int padded_taps(const struct axis *axis) { return (axis->taps + TAPS - 1) / TAPS * TAPS; }

bool prepare_row_weights(struct scratch *scratch, const struct axis *axis) {
    int taps = padded_taps(axis);
    int32_t *weight = ensure_capacity(&scratch->row_weights, 4 * sizeof *weight * (size_t)(axis->side * taps));
    if (!weight || !ensure_capacity(&scratch->row_sums, 4 * sizeof *weight * (size_t)axis->side))
        return false;
    for (int x = 0; x < axis->side; x++)
        for (int t = 0; t < taps; t++, weight += 4)
            for (int channel = 0; channel < 4; channel++)
                weight[channel] = t < axis->taps ? axis->weights[x * axis->taps + t] : 0;
    return true;
}

void resize_row(const struct scratch *scratch, const struct axis *axis, const uint8_t *from, uint8_t *to) {
    const int32_t *weights = scratch->row_weights.data;
    int32_t *sums = scratch->row_sums.data;
    int side = axis->side, taps = padded_taps(axis);
    for (int x = 0; x < side; x++, weights += 4 * taps, sums += 4) {
        const uint8_t *pixel = from + 4 * (size_t)axis->ranges[2 * x];
        int_vector sum = {0};
        for (int t = 0, count = axis->ranges[2 * x + 1]; t < count; t += TAPS)
            sum += widen(pixel + 4 * t) * load(weights + 4 * t);
        int_pixel total = sum_of(sum) + (1 << (BITS - 1));
        memcpy(sums, &total, sizeof total);
    }
    sums -= 4 * side;
    for (int i = 0; i < 4 * side; i++)
        to[i] = round_sum(sums[i]);
}

#endif
