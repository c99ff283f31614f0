/* What a block computes with: the sizes of all parts, their places in memory, packed weights and indices. */
#ifndef BLOCK_LAYOUT_H
#define BLOCK_LAYOUT_H

#include <stdbool.h>

#include "mixing_backward.h"

enum {
    MIXINGS = 2,
    SHARES = 16, /* of the images at most, each with sums of its own: their order does not depend on the threads */
    MOST_SUMS = 256 << 20, /* bytes of all shares' sums, from which on there are fewer */
};

typedef struct {
    mixing mixings[MIXINGS];
    const float *const *scales; /* [MIXINGS][batch], or NULL */
    const char *from;           /* x, or the gradient by y */
    char *to;
    vec *kept, *sums;
    worker *workers;
    number_kind kind;
    bool backward;
    int64_t batch, groups, kept_size, sums_size;
    int64_t shares, next_share, next_worker;
} block;

/* Parts of one piece of memory; of none, with the size counted, where `base` is NULL. */
typedef struct {
    char *base;
    int64_t used;
} arena;

static void *take(arena *all, int64_t bytes) {
    void *part = all->base ? all->base + all->used : NULL;
    all->used += (bytes + 127) & -64; /* a line more: parts begin in different sets of the cache */
    return part;
}

static int64_t reserve(int64_t *used, int64_t size) { return *used += size, *used - size; }

static layer layer_of(int inputs, int outputs, int64_t *sums) {
    const int64_t weights = (int64_t)tiles_of(inputs) * ROWS * blocks_of(outputs) * OUTPUTS;
    const int64_t at = reserve(sums, (weights + LANES - 1) / LANES);
    return (layer){inputs, outputs, NULL, NULL, at, reserve(sums, outputs)};
}

/* The sizes of mixing number i. */
static void measure(block *b, int i, const mixing_shape *shape, const float *const *parameters) {
    mixing *m = b->mixings + i;
    const int64_t channels = shape->channels;
    const bool has_skip = parameters[SKIP_WEIGHT], has_skip_norm = parameters[SKIP_NORM_WEIGHT];
    m->shape = *shape, m->parameters = parameters;
    m->panels = tiles_of(shape->rows);
    m->size_in = (int64_t)shape->rows * shape->inputs, m->size_out = (int64_t)shape->rows * shape->outputs;
    m->tokens_in = m->size_in / channels, m->tokens = m->size_out / channels;
    m->first = layer_of(shape->inputs, shape->hidden ? shape->hidden : shape->outputs, &b->sums_size);
    m->second = shape->hidden ? layer_of(shape->hidden, shape->outputs, &b->sums_size) : (layer){0};
    m->skip = has_skip ? layer_of(m->tokens_in, m->tokens, &b->sums_size) : (layer){0};
    m->norm_sums = reserve(&b->sums_size, 2 * channels);
    m->skip_norm_sums = reserve(&b->sums_size, has_skip_norm ? 2 * channels : 0);
    m->kept = reserve(&b->kept_size, m->size_in);
    int64_t used = m->size_in;
    m->scales = reserve(&used, m->tokens_in);
    m->hidden = reserve(&used, (int64_t)m->panels * m->first.outputs * ROWS + 1);
    m->skip_x = reserve(&used, has_skip ? m->size_in : 0);
    m->skip_normed = reserve(&used, has_skip_norm ? m->size_out : 0);
    m->skip_scales = reserve(&used, has_skip_norm ? m->tokens : 0);
    b->kept_size += used - m->size_in;
}

static block block_of(const mixing_shape *shapes, const float *const *parameters, int64_t batch) {
    block b = {.batch = batch, .groups = (batch + LANES - 1) / LANES};
    for (int i = 0; i < MIXINGS; i++)
        measure(&b, i, shapes + i, parameters + i * PARAMETERS);
    const int64_t fitting = MOST_SUMS / (b.sums_size * (int64_t)sizeof(vec));
    b.shares = b.groups < SHARES ? b.groups : SHARES;
    b.shares = fitting < b.shares ? fitting : b.shares;
    b.shares = b.shares < 1 ? 1 : b.shares;
    return b;
}

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

static void lay_out_layer(layer *l, arena *all) {
    const int most = larger_of(l->inputs, l->outputs), least = l->inputs + l->outputs - most;
    l->packed = take(all, sizeof(float) * blocks_of(most) * OUTPUTS * (blocks_of(least) * OUTPUTS));
    l->bias = take(all, sizeof(float) * blocks_of(l->outputs) * OUTPUTS);
}

static void lay_out_worker(const block *b, worker *w, arena *all) {
    int64_t features = 0, panels = 0, gradients = 0, activated = 0, outputs = 0, hidden = 0, panel = 0;
    for (int i = 0; i < MIXINGS; i++) {
        const mixing *m = b->mixings + i;
        const int64_t chunk = chunk_of(m), skip_panels = tiles_of(m->shape.channels);
        const int64_t widest = larger_of(larger_of(stride_of(m->first.inputs), stride_of(m->first.outputs)),
                                         larger_of(stride_of(m->skip.inputs), stride_of(m->skip.outputs)));
        features = larger_of(features, larger_of(m->size_in, m->size_out) + 1);
        panels = larger_of(panels, (int64_t)m->panels * stride_of(m->first.inputs));
        panels = larger_of(panels, skip_panels * stride_of(m->skip.inputs));
        gradients = larger_of(gradients, chunk * stride_of(m->first.outputs));
        activated = larger_of(activated, chunk * stride_of(m->second.inputs));
        outputs = larger_of(outputs,
                            larger_of(chunk * stride_of(m->second.outputs), skip_panels * stride_of(m->skip.outputs)));
        hidden =
            larger_of(hidden, (b->backward && m->shape.middle ? m->panels : 1) * (int64_t)m->first.outputs * ROWS + 1);
        panel = larger_of(panel, larger_of(widest, stride_of(m->second.outputs)));
    }
    vec **parts[] = {w->features,   w->features + 1, &w->normed, &w->panels, &w->gradients,
                     &w->activated, &w->outputs,     &w->hidden, &w->panel};
    const int64_t sizes[] = {features, features, features, panels, gradients, activated, outputs, hidden, panel};
    for (int i = 0; i < (int)(sizeof sizes / sizeof *sizes); i++)
        *parts[i] = take(all, sizes[i] * sizeof(vec));
    w->kept = take(all, b->kept || b->backward ? 0 : b->kept_size * sizeof(vec));
}

static void lay_out(block *b, int threads, arena *all) {
    for (int i = 0; i < MIXINGS; i++) {
        mixing *m = b->mixings + i;
        const int64_t rows = (int64_t)m->panels * ROWS;
        m->place = take(all, sizeof(int32_t) * m->size_in), m->in = take(all, sizeof(int32_t) * rows * m->shape.inputs);
        m->out = take(all, sizeof(int32_t) * rows * m->shape.outputs);
        m->middle = m->shape.middle ? take(all, sizeof(int32_t) * rows * m->shape.hidden) : NULL;
        lay_out_layer(&m->first, all), lay_out_layer(&m->second, all), lay_out_layer(&m->skip, all);
    }
    b->sums = take(all, b->backward ? b->shares * b->sums_size * sizeof(vec) : 0);
    b->workers = take(all, threads * sizeof *b->workers);
    for (int i = 0; i < threads; i++)
        if (all->base)
            lay_out_worker(b, b->workers + i, all);
        else
            lay_out_worker(b, &(worker){0}, all);
}

/* The place of number p of rows in panels `stride` vectors apart. */
static int64_t place_of(int64_t p, int numbers, int64_t stride) {
    return p / numbers / ROWS * stride + p % numbers * ROWS + p / numbers % ROWS;
}

static void fill(int32_t *places, int64_t size, int32_t number) {
    for (int64_t i = 0; i < size; i++)
        places[i] = number;
}

static void index_places(const mixing *m) {
    const mixing_shape *s = &m->shape;
    const int64_t rows = (int64_t)m->panels * ROWS;
    fill(m->place, m->size_in, 0);
    fill(m->in, rows * s->inputs, m->size_in), fill(m->out, rows * s->outputs, m->size_out);
    for (int64_t p = 0; p < m->size_in; p++) {
        m->place[s->inward[p]] = place_of(p, s->inputs, stride_of(s->inputs));
        m->in[place_of(p, s->inputs, (int64_t)s->inputs * ROWS)] = s->inward[p];
    }
    for (int64_t f = 0; f < m->size_out; f++)
        m->out[place_of(s->outward[f], s->outputs, (int64_t)s->outputs * ROWS)] = f;
    const int64_t width = (int64_t)s->hidden * ROWS;
    if (s->middle)
        fill(m->middle, rows * s->hidden, m->panels * width);
    for (int64_t p = 0; s->middle && p < (int64_t)s->rows * s->hidden; p++)
        m->middle[place_of(s->middle[p], s->hidden, width)] = place_of(p, s->hidden, width);
}

static void pack_layer(const layer *l, const float *weight, const float *bias, bool backward) {
    if (l->inputs == 0)
        return;
    if (backward)
        pack(weight, l->inputs, l->outputs, true, l->packed);
    else
        pack(weight, l->outputs, l->inputs, false, l->packed);
    memset(l->bias, 0, sizeof(float) * blocks_of(l->outputs) * OUTPUTS);
    if (bias)
        memcpy(l->bias, bias, sizeof(float) * l->outputs);
}

#endif
