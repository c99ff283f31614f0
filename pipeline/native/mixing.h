/* A mixing of a Mixer's block, forward and backward, for LANES images:
 *
 *     y = skip(x) + scale J_out mix(J_in norm(x))
 *
 * x and y are features in rows of channels, mix multiplies rows of numbers with one matrix, or two. The rows lie in
 * panels (products.h). An index says for each place from where its feature comes. */
#ifndef MIXING_H
#define MIXING_H

#include "products.h"

/* Its parameters: NULL where it has none. */
enum {
    NORM_WEIGHT,
    NORM_BIAS,
    WEIGHT_1,
    BIAS_1,
    WEIGHT_2,
    BIAS_2,
    SKIP_WEIGHT,
    SKIP_NORM_WEIGHT,
    SKIP_NORM_BIAS,
    PARAMETERS
};

/* As by_c.py fills it in. hidden: 0 for one matrix. Indices may be NULL: middle, and skip. */
typedef struct {
    int32_t rows, inputs, hidden, outputs, channels, activation;
    float eps, skip_eps;
    const int32_t *inward, *middle, *outward, *skip;
} mixing_shape;

typedef struct {
    int inputs, outputs;
    float *packed, *bias; /* W in a forward pass, W^T in a backward pass */
    int64_t weight_sums, bias_sums;
} layer;

typedef struct {
    mixing_shape shape;
    const float *const *parameters;
    layer first, second, skip;
    int panels;
    int64_t tokens_in, tokens, size_in, size_out;
    /* From the rows: the place in the panels of each feature, and the feature, or place of a hidden number, at each
     * place of panels without gaps; one more for those that fill up the last panel. */
    int32_t *place, *in, *middle, *out;
    /* Where what the backward pass needs lies, in vectors: the normed features and one over the deviations; of one
     * layer the activation's slopes, of two its inputs; those of the skip. */
    int64_t scales, hidden, skip_x, skip_normed, skip_scales, kept;
    int64_t norm_sums, skip_norm_sums; /* in the sums, of weights, then of biases */
} mixing;

/* What a thread computes with. */
typedef struct {
    vec *features[2];                     /* of the images, or their gradients, between mixings */
    vec *normed;                          /* gradients of normed features */
    vec *panels;                          /* inputs of the first layer */
    vec *gradients, *activated, *outputs; /* some panels: gradients of the first layer's products, inputs of the
                                           * second, gradients of its products */
    vec *hidden; /* a panel of activated numbers; in a backward pass gradients of all hidden ones */
    vec *panel;  /* products */
    vec *kept, *sums;
} worker;

/* Four sums at a time of numbers i < count, so that no addition waits for the one before. */
#define SUM(total, count, number) \
    vec total = {0}; \
    { \
        vec sums_[4] = {{0}, {0}, {0}, {0}}; \
        int64_t i = 0; \
        for (; i + 4 <= count; i += 4) \
            UNROLL \
        for (int64_t k_ = i, j_ = 0; j_ < 4; j_++, k_++) { \
            const int64_t i = k_; \
            sums_[j_] += number; \
        } \
        for (; i < count; i++) \
            total += number; \
        total += (sums_[0] + sums_[1]) + (sums_[2] + sums_[3]); \
    }

/* The features of one token without mean and with a deviation of one; returns one over its deviation. */
INLINE vec norm_token(const vec *x, int64_t channels, float eps, vec *normed) {
    const vec part = all_of(1.0f / channels);
    SUM(sum, channels, x[i])
    const vec rough = sum * part;
    vec left_out[2] = {{0}, {0}}, squares[2] = {{0}, {0}}; /* left_out: of the mean by rounding */
    int64_t i = 0;
    for (; i + 2 <= channels; i += 2)
        UNROLL
    for (int k = 0; k < 2; k++) {
        const vec apart = x[i + k] - rough;
        left_out[k] += apart, squares[k] = multiply_add(apart, apart, squares[k]);
    }
    if (i < channels)
        left_out[0] += x[i] - rough, squares[0] += (x[i] - rough) * (x[i] - rough);
    const vec rest = (left_out[0] + left_out[1]) * part, mean = rough + rest;
    const vec variance = larger((squares[0] + squares[1]) * part - rest * rest, (vec){0});
    const vec scale = all_of(1.0f) / square_root(variance + all_of(eps));
    for (int64_t c = 0; c < channels; c++)
        normed[c] = (x[c] - mean) * scale;
    return scale;
}

/* Zeros in the rows that fill up the last panel. */
static void blank_rows(const mixing *m, vec *last_panel, int numbers) {
    for (int i = 0; m->shape.rows % ROWS && i < numbers; i++)
        for (int r = m->shape.rows % ROWS; r < ROWS; r++)
            last_panel[i * ROWS + r] = (vec){0};
}

/* The panels, from the features of one token with or without a mean and deviation of their own. */
INLINE void spread_token(const mixing *m, const vec *normed, const int32_t *place, vec *panels) {
    const float *weight = m->parameters[NORM_WEIGHT], *bias = m->parameters[NORM_BIAS];
    if (weight == NULL)
        for (int c = 0; c < m->shape.channels; c++)
            panels[place[c]] = normed[c];
    else
        for (int c = 0; c < m->shape.channels; c++)
            panels[place[c]] = multiply_add(normed[c], all_of(weight[c]), all_of(bias[c]));
}

static void norm_forward(const mixing *m, const vec *x, vec *kept, vec *panels) {
    const int64_t channels = m->shape.channels;
    for (int64_t t = 0; t < m->tokens_in; t++) {
        vec *normed = kept + t * channels;
        if (m->parameters[NORM_WEIGHT])
            kept[m->scales + t] = norm_token(x + t * channels, channels, m->shape.eps, normed);
        else
            memcpy(normed, x + t * channels, channels * sizeof *x);
        spread_token(m, normed, m->place + t * channels, panels);
    }
    blank_rows(m, panels + (int64_t)(m->panels - 1) * stride_of(m->first.inputs), m->first.inputs);
}

/* Panels whose rows are the tokens of each channel. */
static void tokens_to_panels(const vec *x, int tokens, int channels, vec *panels) {
    for (int t = 0; t < tokens; t++)
        for (int c = 0; c < tiles_of(channels) * ROWS; c++)
            panels[c / ROWS * stride_of(tokens) + t * ROWS + c % ROWS] = c < channels ? x[t * channels + c] : (vec){0};
}

/* to [outputs, channels] = W from, by panels of from's tokens. */
static void multiply_tokens(const layer *l, int channels, const vec *panels, vec *panel, vec *to) {
    for (int c = 0; c < channels; c += ROWS) {
        multiply(l->packed, panels + c / ROWS * stride_of(l->inputs), l->inputs, l->outputs, NULL, panel);
        for (int t = 0; t < l->outputs; t++)
            memcpy(to + t * channels + c, panel + t * ROWS, (channels - c < ROWS ? channels - c : ROWS) * sizeof *to);
    }
}

/* skip(x): in `other`, or x itself. */
static vec *skip_forward(const mixing *m, const worker *w, vec *x, vec *other, vec *kept) {
    const int channels = m->shape.channels;
    if (m->shape.skip)
        for (int64_t f = 0; f < m->size_out; f++)
            other[f] = x[m->shape.skip[f]];
    if (m->parameters[SKIP_WEIGHT] == NULL)
        return m->shape.skip ? other : x;
    memcpy(kept + m->skip_x, x, m->size_in * sizeof *x);
    tokens_to_panels(x, m->skip.inputs, channels, w->panels);
    multiply_tokens(&m->skip, channels, w->panels, w->panel, other);
    const float *weight = m->parameters[SKIP_NORM_WEIGHT], *bias = m->parameters[SKIP_NORM_BIAS];
    for (int64_t t = 0; weight && t < m->tokens; t++) {
        vec *normed = kept + m->skip_normed + t * channels, *y = other + t * channels;
        kept[m->skip_scales + t] = norm_token(y, channels, m->shape.skip_eps, normed);
        for (int c = 0; c < channels; c++)
            y[c] = multiply_add(normed[c], all_of(weight[c]), all_of(bias[c]));
    }
    return other;
}

/* Of panel p: y += scale J_out of what the last layer gives. */
INLINE void add_outputs(const mixing *m, int p, const vec *numbers, vec scale, vec *y) {
    const int width = m->shape.outputs * ROWS;
    const int32_t *out = m->out + (int64_t)p * width;
    for (int i = 0; i < width; i++)
        y[out[i]] = multiply_add(numbers[i], scale, y[out[i]]);
}

/* A single layer of panel p, of whose activation the slope is kept. */
INLINE void forward_single(const mixing *m, const worker *w, int p, vec scale, vec *slopes, vec *y,
                           const activation_kind kind) {
    for (int i = 0; i < m->first.outputs * ROWS; i++)
        activate(w->panel[i], w->panel + i, slopes + i, kind);
    add_outputs(m, p, w->panel, scale, y);
}

/* The second layer of panel p, from the hidden numbers before the activation. */
INLINE void forward_second(const mixing *m, const worker *w, int p, vec scale, const vec *hidden, vec *y,
                           const activation_kind kind) {
    vec slope;
    for (int i = 0; i < m->second.inputs * ROWS; i++)
        activate(hidden[i], w->hidden + i, &slope, kind);
    multiply(m->second.packed, w->hidden, m->second.inputs, m->second.outputs, m->second.bias, w->panel);
    add_outputs(m, p, w->panel, scale, y);
}

INLINE void forward_panels(const mixing *m, const worker *w, vec scale, vec *kept, vec *y, const activation_kind kind) {
    const int width = m->first.outputs * ROWS;
    vec *const hidden = kept + m->hidden;
    for (int p = 0; p < m->panels; p++) {
        const int64_t at = (int64_t)p * width;
        multiply(m->first.packed, w->panels + (int64_t)p * stride_of(m->first.inputs), m->first.inputs,
                 m->first.outputs, m->first.bias, w->panel);
        if (m->shape.hidden == 0)
            forward_single(m, w, p, scale, hidden + at, y, kind);
        else if (m->shape.middle)
            for (int i = 0; i < width; i++)
                hidden[m->middle[at + i]] = w->panel[i];
        else
            forward_second(m, w, p, scale, memcpy(hidden + at, w->panel, width * sizeof(vec)), y, kind);
    }
    if (m->shape.middle == NULL)
        return;
    blank_rows(m, hidden + (int64_t)(m->panels - 1) * width, m->first.outputs);
    for (int p = 0; p < m->panels; p++)
        forward_second(m, w, p, scale, hidden + (int64_t)p * width, y, kind);
}

/* y in one of w->features, of which x is the other or the same. */
static vec *mix_forward(const mixing *m, const worker *w, vec *x, vec scale, vec *kept) {
    vec *y = skip_forward(m, w, x, w->features[x == w->features[0]], kept);
    norm_forward(m, x, kept, w->panels);
    if (m->shape.activation == GELU)
        forward_panels(m, w, scale, kept, y, GELU);
    else if (m->shape.activation == GELU_TANH)
        forward_panels(m, w, scale, kept, y, GELU_TANH);
    else
        forward_panels(m, w, scale, kept, y, SQUARE);
    return y;
}

#endif
