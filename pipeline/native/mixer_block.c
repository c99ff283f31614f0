/* A Mixer's block, forward and backward: LANES images at a time through both mixings (mixing.h), whose features stay in
 * the second-level cache. Computed in fp32. */
#include <stdlib.h>

#include "block_layout.h"
#include "index.h"

enum { DONE = 0, OUT_OF_RANGE = 1, NO_MEMORY = 2 };

/* GOMP_parallel: calls a function on each of so many threads and waits for them. */
typedef void (*run_team)(void (*function)(void *), void *data, unsigned threads, unsigned flags);

/* Bytes of what a backward pass needs of a forward pass. */
int64_t mixer_block_kept(const mixing_shape *shapes, const float *const *parameters, int64_t batch) {
    const block b = block_of(shapes, parameters, batch);
    return b.groups * b.kept_size * (int64_t)sizeof(vec);
}

static vec scale_of(const float *scales, int64_t first, int images) {
    vec scale = {0};
    for (int l = 0; l < images; l++)
        scale[l] = scales ? scales[first + l] : 1.0f;
    return scale;
}

static void compute_group(const block *b, const worker *w, int64_t group) {
    const int64_t first = group * LANES, left = b->batch - first;
    const int images = left < LANES ? left : LANES, width = b->kind == FP32 ? 4 : 2;
    const mixing *m = b->mixings, *last = m + MIXINGS - 1;
    const int64_t size_in = b->backward ? last->size_out : m->size_in,
                  size_out = b->backward ? m->size_in : last->size_out;
    vec *numbers = w->features[0], *kept = b->kept ? b->kept + group * b->kept_size : w->kept;
    load_images(b->from + first * size_in * width, size_in, images, numbers, b->kind);
    for (int k = 0; k < MIXINGS; k++) {
        const int i = b->backward ? MIXINGS - 1 - k : k;
        const vec scale = scale_of(b->scales[i], first, images);
        numbers = b->backward ? mix_backward(m + i, w, numbers, scale, kept + m[i].kept)
                              : mix_forward(m + i, w, numbers, scale, kept + m[i].kept);
    }
    store_images(numbers, size_out, images, b->to + first * size_out * width, b->kind);
}

/* From here on numbers below 1.2e-38 are zeros. The slope of GELU far below zero gives many of these, with which an x86
 * computes much more slowly (docs/notes/steps.md). Returns what stop_flushing takes. */
static unsigned start_flushing(void) {
#ifdef __SSE2__
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON | 0x40); /* of results, and of operands */
    return before;
#else
    return 0;
#endif
}

static void stop_flushing(unsigned before) {
#ifdef __SSE2__
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

static void compute_shares(void *data) {
    block *b = data;
    const unsigned before = start_flushing();
    worker *w = b->workers + __atomic_fetch_add(&b->next_worker, 1, __ATOMIC_RELAXED);
    for (;;) {
        const int64_t share = __atomic_fetch_add(&b->next_share, 1, __ATOMIC_RELAXED);
        if (share >= b->shares)
            break;
        w->sums = b->sums + share * b->sums_size;
        if (b->backward)
            memset(w->sums, 0, b->sums_size * sizeof(vec));
        for (int64_t g = b->groups * share / b->shares; g < b->groups * (share + 1) / b->shares; g++)
            compute_group(b, w, g);
    }
    stop_flushing(before);
}

static void unpack(const layer *l, const vec *sums, float *weight, float *bias) {
    const float *of = (const float *)(sums + l->weight_sums);
    for (int64_t o = 0; o < l->outputs; o++)
        for (int64_t i = 0; i < l->inputs; i++)
            weight[o * l->inputs + i] = of[i * blocks_of(l->outputs) * OUTPUTS + o];
    for (int o = 0; bias && o < l->outputs; o++)
        bias[o] = total(sums[l->bias_sums + o]);
}

static void unpack_norm(const vec *sums, int channels, float *weight, float *bias) {
    for (int c = 0; weight && c < channels; c++)
        weight[c] = total(sums[c]), bias[c] = total(sums[channels + c]);
}

static void unpack_sums(const block *b, float *const *gradients) {
    for (int64_t s = 1; s < b->shares; s++)
        for (int64_t i = 0; i < b->sums_size; i++)
            b->sums[i] += b->sums[s * b->sums_size + i];
    for (int i = 0; i < MIXINGS; i++, gradients += PARAMETERS) {
        const mixing *m = b->mixings + i;
        unpack(&m->first, b->sums, gradients[WEIGHT_1], gradients[BIAS_1]);
        unpack(&m->second, b->sums, gradients[WEIGHT_2], gradients[BIAS_2]);
        unpack(&m->skip, b->sums, gradients[SKIP_WEIGHT], NULL);
        unpack_norm(b->sums + m->norm_sums, m->shape.channels, gradients[NORM_WEIGHT], gradients[NORM_BIAS]);
        unpack_norm(b->sums + m->skip_norm_sums, m->shape.channels, gradients[SKIP_NORM_WEIGHT],
                    gradients[SKIP_NORM_BIAS]);
    }
}

/*
 * y [batch, tokens, channels] of a block from x, or with gradients, one for each parameter, the gradient by x in `to`
 * from that by y. kept is what mixer_block_kept says, and written by a forward pass unless NULL. scales has for each
 * mixing one number for each image, or NULL. Numbers are fp32, or bf16 if `half`.
 */
int mixer_block(run_team team, int threads, const mixing_shape *shapes, const float *const *parameters,
                const float *const *scales, const void *from, void *to, void *kept, float *const *gradients,
                int64_t batch, int half) {
    block b = block_of(shapes, parameters, batch);
    b.scales = scales, b.from = from, b.to = to, b.kept = kept;
    b.backward = gradients, b.kind = half ? BF16 : FP32;
    for (int i = 0; i < MIXINGS; i++) {
        const mixing *m = b.mixings + i;
        if (!all_in_range(shapes[i].inward, m->size_in) || !all_in_range(shapes[i].outward, m->size_out) ||
            !all_in_range(shapes[i].skip, m->size_in) ||
            !all_in_range(shapes[i].middle, (int64_t)shapes[i].rows * shapes[i].hidden))
            return OUT_OF_RANGE;
    }
    threads = team == NULL || threads < 1 ? 1 : threads < b.shares ? threads : b.shares;
    arena all = {NULL, 0};
    lay_out(&b, threads, &all);
    void *memory = NULL;
    if (posix_memalign(&memory, 64, all.used))
        return NO_MEMORY;
    all = (arena){memory, 0};
    lay_out(&b, threads, &all);
    for (int i = 0; i < MIXINGS; i++) {
        const mixing *m = b.mixings + i;
        index_places(m);
        pack_layer(&m->first, m->parameters[WEIGHT_1], m->parameters[BIAS_1], b.backward);
        pack_layer(&m->second, m->parameters[WEIGHT_2], m->parameters[BIAS_2], b.backward);
        pack_layer(&m->skip, m->parameters[SKIP_WEIGHT], NULL, b.backward);
    }
    if (threads > 1)
        team(compute_shares, &b, threads, 0);
    else
        compute_shares(&b);
    if (b.backward)
        unpack_sums(&b, gradients);
    free(memory);
    return DONE;
}
