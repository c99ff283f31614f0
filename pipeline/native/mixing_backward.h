/* The backward pass of a mixing for LANES images, from what the forward pass kept (mixing.h). */
#ifndef MIXING_BACKWARD_H
#define MIXING_BACKWARD_H

#include "mixing.h"

/* Panels at a time of which weights' gradients are summed: enough that their sums stay in registers for long, few
 * enough for the cache. */
static int chunk_of(const mixing *m) {
    const int widths = stride_of(m->first.inputs) + stride_of(m->first.outputs) + 2 * stride_of(m->second.inputs);
    const int fitting = (256 << 10) / (widths * (int)sizeof(vec)), most = 48 / ROWS;
    return fitting < 4 ? 4 : fitting > most ? most : fitting;
}

/* dx += the gradient by a norm's inputs, and sums += those by its weight and bias, from g. */
static void norm_backward(const float *weight, int64_t tokens, int64_t channels, const vec *g, const vec *normed,
                          const vec *scales, vec *dx, vec *sums) {
    for (int64_t t = 0; t < tokens; t++, g += channels, normed += channels, dx += channels) {
        SUM(sum, channels, g[i] * weight[i])
        SUM(along, channels, g[i] * weight[i] * normed[i])
        const vec part = all_of(1.0f / channels), mean = sum * part, slope = along * part;
        for (int64_t c = 0; c < channels; c++) {
            const vec own = g[c];
            dx[c] += scales[t] * (own * weight[c] - mean - normed[c] * slope);
            sums[c] = multiply_add(own, normed[c], sums[c]);
            sums[channels + c] += own;
        }
    }
}

/* The gradient by x of the skip, from g: in `other`, or g itself. */
static vec *skip_backward(const mixing *m, const worker *w, vec *g, vec *other, const vec *kept) {
    const int channels = m->shape.channels;
    if (m->shape.skip)
        for (int64_t f = 0; f < m->size_out; f++)
            other[m->shape.skip[f]] = g[f];
    if (m->parameters[SKIP_WEIGHT] == NULL)
        return m->shape.skip ? other : g;
    if (m->parameters[SKIP_NORM_WEIGHT]) {
        memset(other, 0, m->size_out * sizeof *g);
        norm_backward(m->parameters[SKIP_NORM_WEIGHT], m->tokens, channels, g, kept + m->skip_normed,
                      kept + m->skip_scales, other, w->sums + m->skip_norm_sums);
        g = other;
    }
    tokens_to_panels(g, m->skip.outputs, channels, w->outputs);
    tokens_to_panels(kept + m->skip_x, m->skip.inputs, channels, w->panels);
    add_weight_gradient(w->outputs, m->skip.outputs, w->panels, m->skip.inputs, tiles_of(channels),
                        (float *)(w->sums + m->skip.weight_sums));
    const layer back = {m->skip.outputs, m->skip.inputs, m->skip.packed, NULL, 0, 0};
    multiply_tokens(&back, channels, w->outputs, w->panel, other);
    return other;
}

/* Adds what the numbers of a panel's rows are to their sums over rows. */
INLINE void add_bias_gradient(const vec *panel, int numbers, vec *sums) {
    for (int o = 0; o < numbers; o++)
        UNROLL
    for (int r = 0; r < ROWS; r++)
        sums[o] += panel[o * ROWS + r];
}

/* The gradients of the last layer's products in panel p, from g of y, in which the last number is zero. */
INLINE void gather_outputs(const mixing *m, int p, const vec *g, vec scale, vec *to) {
    const int width = m->shape.outputs * ROWS;
    const int32_t *out = m->out + (int64_t)p * width;
    for (int i = 0; i < width; i++)
        to[i] = g[out[i]] * scale;
}

/* The gradients of the hidden numbers of some panels, in their places after the first layer unless there is a middle
 * permutation; and those of the second layer. */
INLINE void backward_second(const mixing *m, const worker *w, int from, int panels, const vec *g, vec scale,
                            const vec *kept, const activation_kind kind) {
    const layer *l = &m->second;
    for (int p = 0; p < panels; p++) {
        const int64_t at = (int64_t)(from + p) * l->inputs * ROWS;
        vec *own = w->outputs + p * stride_of(l->outputs), *inputs = w->activated + p * stride_of(l->inputs);
        vec *to = m->shape.middle ? w->hidden + at : w->gradients + p * stride_of(l->inputs);
        gather_outputs(m, from + p, g, scale, own);
        add_bias_gradient(own, l->outputs, w->sums + l->bias_sums);
        multiply(l->packed, own, l->outputs, l->inputs, NULL, w->panel);
        for (int i = 0; i < l->inputs * ROWS; i++) {
            vec slope;
            activate(kept[m->hidden + at + i], inputs + i, &slope, kind);
            to[i] = w->panel[i] * slope;
        }
    }
    add_weight_gradient(w->outputs, l->outputs, w->activated, l->inputs, panels, (float *)(w->sums + l->weight_sums));
}

/* The gradients of the normed features from those of the first layer's products in some panels; and those of that
 * layer. */
static void backward_first(const mixing *m, const worker *w, int from, int panels) {
    const layer *l = &m->first;
    const vec *inputs = w->panels + (int64_t)from * stride_of(l->inputs);
    for (int p = 0; p < panels; p++) {
        const int32_t *in = m->in + (int64_t)(from + p) * l->inputs * ROWS;
        vec *own = w->gradients + p * stride_of(l->outputs);
        for (int i = 0; m->shape.middle && i < l->outputs * ROWS; i++)
            own[i] = w->hidden[m->middle[(int64_t)(from + p) * l->outputs * ROWS + i]];
        add_bias_gradient(own, l->outputs, w->sums + l->bias_sums);
        multiply(l->packed, own, l->outputs, l->inputs, NULL, w->panel);
        for (int i = 0; i < l->inputs * ROWS; i++)
            w->normed[in[i]] = w->panel[i];
    }
    add_weight_gradient(w->gradients, l->outputs, inputs, l->inputs, panels, (float *)(w->sums + l->weight_sums));
}

INLINE void backward_panels(const mixing *m, const worker *w, const vec *g, vec scale, const vec *kept,
                            const activation_kind kind) {
    const int chunk = chunk_of(m), width = m->first.outputs * ROWS;
    for (int from = 0; from < m->panels; from += chunk) {
        const int panels = m->panels - from < chunk ? m->panels - from : chunk;
        if (m->shape.hidden)
            backward_second(m, w, from, panels, g, scale, kept, kind);
        for (int p = 0; m->shape.hidden == 0 && p < panels; p++) {
            const vec *slopes = kept + m->hidden + (int64_t)(from + p) * width;
            vec *own = w->gradients + p * stride_of(m->first.outputs);
            gather_outputs(m, from + p, g, scale, own);
            for (int i = 0; i < width; i++)
                own[i] *= slopes[i];
        }
        if (m->shape.middle == NULL)
            backward_first(m, w, from, panels);
    }
    if (m->shape.middle == NULL)
        return;
    w->hidden[(int64_t)m->panels * width] = (vec){0}; /* for the rows that fill up the last panel */
    for (int from = 0; from < m->panels; from += chunk)
        backward_first(m, w, from, m->panels - from < chunk ? m->panels - from : chunk);
}

/* The gradient by x, in one of w->features as g, that by y, is. */
static vec *mix_backward(const mixing *m, const worker *w, vec *g, vec scale, const vec *kept) {
    g[m->size_out] = (vec){0};
    for (int64_t t = 0; t < m->tokens_in; t++)
        spread_token(m, kept + t * m->shape.channels, m->place + t * m->shape.channels, w->panels);
    blank_rows(m, w->panels + (int64_t)(m->panels - 1) * stride_of(m->first.inputs), m->first.inputs);
    if (m->shape.activation == GELU)
        backward_panels(m, w, g, scale, kept, GELU);
    else if (m->shape.activation == GELU_TANH)
        backward_panels(m, w, g, scale, kept, GELU_TANH);
    else
        backward_panels(m, w, g, scale, kept, SQUARE);
    vec *dx = skip_backward(m, w, g, w->features[g == w->features[0]], kept);
    if (m->parameters[NORM_WEIGHT])
        norm_backward(m->parameters[NORM_WEIGHT], m->tokens_in, m->shape.channels, w->normed, kept, kept + m->scales,
                      dx, w->sums + m->norm_sums);
    for (int64_t f = 0; m->parameters[NORM_WEIGHT] == NULL && f < m->size_in; f++)
        dx[f] += w->normed[f];
    return dx;
}

#endif
