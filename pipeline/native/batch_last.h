/* The functions of batch_last.c for numbers of one kind: NUMBER, which LOAD takes to fp32 and STORE back. An index is
 * NULL for rows in their own order. */

/* For pictures `first` to `first + lanes` of one token [C, B]: LN over the channels, written to the rows `place`. */
INLINE void NAMED(norm_lanes)(const NUMBER *restrict x, NUMBER *restrict y, float *restrict mean,
                              float *restrict scale, const float *restrict weight, const float *restrict bias,
                              const int32_t *restrict place, int64_t channels, int64_t batch, float eps,
                              const int lanes) {
    float m[LANES] = {0}, v[LANES] = {0}, s[LANES];
    for (int64_t c = 0; c < channels; c++)
        for (int l = 0; l < lanes; l++)
            m[l] += LOAD(x[c * batch + l]);
    for (int l = 0; l < lanes; l++)
        m[l] /= channels;
    for (int64_t c = 0; c < channels; c++)
        for (int l = 0; l < lanes; l++) {
            const float d = LOAD(x[c * batch + l]) - m[l];
            v[l] += d * d;
        }
    for (int l = 0; l < lanes; l++) {
        s[l] = 1.0f / sqrtf(v[l] / channels + eps);
        mean[l] = m[l], scale[l] = s[l];
    }
    for (int64_t c = 0; c < channels; c++) {
        NUMBER *out = y + (place ? place[c] : c) * batch;
        for (int l = 0; l < lanes; l++)
            out[l] = STORE((LOAD(x[c * batch + l]) - m[l]) * s[l] * weight[c] + bias[c]);
    }
}

/*
 * LN over the channels of x [tokens, channels, batch], of which row i is written to row place[i] of y. mean and scale
 * (one over the deviation) are [tokens, batch].
 */
void NAMED(norm)(const NUMBER *x, NUMBER *y, float *mean, float *scale, const float *weight, const float *bias,
                 const int32_t *place, int64_t tokens, int64_t channels, int64_t batch, float eps) {
    for (int64_t t = 0; t < tokens; t++) {
        const NUMBER *token = x + t * channels * batch;
        NUMBER *out = place ? y : y + t * channels * batch;
        const int32_t *rows = place ? place + t * channels : NULL;
        float *m = mean + t * batch, *s = scale + t * batch;
        int64_t b = 0;
        for (; b + LANES <= batch; b += LANES)
            NAMED(norm_lanes)(token + b, out + b, m + b, s + b, weight, bias, rows, channels, batch, eps, LANES);
        for (; b + FOLDED <= batch; b += FOLDED)
            NAMED(norm_lanes)(token + b, out + b, m + b, s + b, weight, bias, rows, channels, batch, eps, FOLDED);
        if (b < batch)
            NAMED(norm_lanes)(token + b, out + b, m + b, s + b, weight, bias, rows, channels, batch, eps, batch - b);
    }
}

/* Adds lanes numbers to their sums over every FOLDED-th. */
INLINE void NAMED(fold)(const float *restrict numbers, float *restrict sums, const int lanes) {
    const int width = lanes < FOLDED ? lanes : FOLDED;
    for (int k = 0; k < lanes; k += width)
        for (int l = 0; l < width; l++)
            sums[l] += numbers[k + l];
}

INLINE void NAMED(norm_backward_lanes)(const NUMBER *restrict g, const NUMBER *restrict x, const float *restrict mean,
                                       const float *restrict scale, const float *restrict weight,
                                       const int32_t *restrict place, NUMBER *restrict dx, float *restrict dweight,
                                       float *restrict dbias, int64_t channels, int64_t batch, const int lanes) {
    float m[LANES], s[LANES], sum[LANES] = {0}, along[LANES] = {0}; /* of g w, and of g w times the normed x */
    for (int l = 0; l < lanes; l++)
        m[l] = mean[l], s[l] = scale[l];
    for (int64_t c = 0; c < channels; c++) {
        const NUMBER *row = g + (place ? place[c] : c) * batch;
        float own[LANES], normed[LANES];
        for (int l = 0; l < lanes; l++) {
            own[l] = LOAD(row[l]);
            normed[l] = own[l] * ((LOAD(x[c * batch + l]) - m[l]) * s[l]);
            sum[l] += own[l] * weight[c];
            along[l] += normed[l] * weight[c];
        }
        NAMED(fold)(normed, dweight + c * FOLDED, lanes);
        NAMED(fold)(own, dbias + c * FOLDED, lanes);
    }
    for (int l = 0; l < lanes; l++)
        sum[l] /= channels, along[l] /= channels;
    for (int64_t c = 0; c < channels; c++) {
        const NUMBER *row = g + (place ? place[c] : c) * batch;
        for (int l = 0; l < lanes; l++) {
            const float normed = (LOAD(x[c * batch + l]) - m[l]) * s[l];
            dx[c * batch + l] = STORE(s[l] * (LOAD(row[l]) * weight[c] - sum[l] - normed * along[l]));
        }
    }
}

/* The gradients of `norm` from g [m, batch], that of y. dweight and dbias [channels, FOLDED] are added to. */
void NAMED(norm_backward)(const NUMBER *g, const NUMBER *x, const float *mean, const float *scale,
                          const float *weight, const int32_t *place, NUMBER *dx, float *dweight, float *dbias,
                          int64_t tokens, int64_t channels, int64_t batch) {
    for (int64_t t = 0; t < tokens; t++) {
        const NUMBER *token = x + t * channels * batch, *in = place ? g : g + t * channels * batch;
        const int32_t *rows = place ? place + t * channels : NULL;
        NUMBER *out = dx + t * channels * batch;
        const float *m = mean + t * batch, *s = scale + t * batch;
        int64_t b = 0;
        for (; b + LANES <= batch; b += LANES)
            NAMED(norm_backward_lanes)(in + b, token + b, m + b, s + b, weight, rows, out + b, dweight, dbias, channels,
                                       batch, LANES);
        for (; b + FOLDED <= batch; b += FOLDED)
            NAMED(norm_backward_lanes)(in + b, token + b, m + b, s + b, weight, rows, out + b, dweight, dbias, channels,
                                       batch, FOLDED);
        if (b < batch)
            NAMED(norm_backward_lanes)(in + b, token + b, m + b, s + b, weight, rows, out + b, dweight, dbias, channels,
                                       batch, batch - b);
    }
}

INLINE void NAMED(activate_lanes)(const NUMBER *restrict x, NUMBER *restrict y, float bias, const int64_t lanes) {
    for (int64_t l = 0; l < lanes; l++)
        y[l] = STORE(gelu(LOAD(x[l]) + bias));
}

/* y = gelu(x + bias) of matrices [rows, columns], a bias for each row. */
void NAMED(activate)(const NUMBER *x, NUMBER *y, const float *bias, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++, x += columns, y += columns) {
        int64_t i = 0;
        for (; i + LANES <= columns; i += LANES)
            NAMED(activate_lanes)(x + i, y + i, bias[r], LANES);
        NAMED(activate_lanes)(x + i, y + i, bias[r], columns - i);
    }
}

INLINE void NAMED(activate_backward_lanes)(const NUMBER *restrict g, const NUMBER *restrict x, float bias,
                                           NUMBER *restrict dx, float *restrict dbias, const int lanes) {
    float slopes[LANES];
    for (int l = 0; l < lanes; l++) {
        slopes[l] = LOAD(g[l]) * gelu_slope(LOAD(x[l]) + bias);
        dx[l] = STORE(slopes[l]);
    }
    NAMED(fold)(slopes, dbias, lanes);
}

/* The gradients of `activate` from g, that of y. dbias is [rows, FOLDED] and added to. */
void NAMED(activate_backward)(const NUMBER *g, const NUMBER *x, const float *bias, NUMBER *dx, float *dbias,
                              int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++, g += columns, x += columns, dx += columns) {
        float sums[FOLDED] = {0};
        int64_t i = 0;
        for (; i + LANES <= columns; i += LANES)
            NAMED(activate_backward_lanes)(g + i, x + i, bias[r], dx + i, sums, LANES);
        for (; i < columns; i += FOLDED) {
            const int left = columns - i < FOLDED ? columns - i : FOLDED;
            NAMED(activate_backward_lanes)(g + i, x + i, bias[r], dx + i, sums, left);
        }
        for (int l = 0; l < FOLDED; l++)
            dbias[r * FOLDED + l] += sums[l];
    }
}

/*
 * out[i] = skip[i] + y[index[i]] + bias[index[i] / rows]: rows of matrices [size, batch]. skip and bias may be NULL.
 */
void NAMED(add)(const NUMBER *restrict skip, const NUMBER *restrict y, const float *bias, const int32_t *index,
                NUMBER *restrict out, int64_t size, int64_t batch, int64_t rows) {
    for (int64_t i = 0; i < size; i++) {
        const int64_t from = index ? index[i] : i;
        const NUMBER *row = y + from * batch, *base = skip + i * batch;
        const float b = bias ? bias[from / rows] : 0;
        if (skip)
            for (int64_t l = 0; l < batch; l++)
                out[i * batch + l] = STORE(LOAD(base[l]) + (LOAD(row[l]) + b));
        else if (bias)
            for (int64_t l = 0; l < batch; l++)
                out[i * batch + l] = STORE(LOAD(row[l]) + b);
        else
            memcpy(out + i * batch, row, batch * sizeof *row);
    }
}

/* The gradients of `add` by y and bias from g [size, batch]. dbias [size / rows, FOLDED] is added to, or NULL. */
void NAMED(add_backward)(const NUMBER *restrict g, const int32_t *index, NUMBER *restrict dy, float *restrict dbias,
                         int64_t size, int64_t batch, int64_t rows) {
    for (int64_t i = 0; i < size; i++) {
        const int64_t to = index ? index[i] : i;
        const NUMBER *row = g + i * batch;
        memcpy(dy + to * batch, row, batch * sizeof *row);
        if (dbias) {
            float *sums = dbias + to / rows * FOLDED;
            const int64_t folded = batch - batch % FOLDED;
            for (int64_t b = 0; b < folded; b += FOLDED)
                for (int l = 0; l < FOLDED; l++)
                    sums[l] += LOAD(row[b + l]);
            for (int64_t b = folded; b < batch; b++)
                sums[0] += LOAD(row[b]);
        }
    }
}
