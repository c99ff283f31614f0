/* The functions of batch_last.c for numbers of one kind: NUMBER, which LOAD takes to fp32 and STORE back. An index is
 * NULL for rows in their own order. */

typedef struct {
    const NUMBER *x;
    NUMBER *y;
    float *mean, *scale;
    const float *weight, *bias;
    const int32_t *place;
    int64_t channels, batch;
    float eps;
} NAMED(norm_arguments);

/* For some pictures of one token [C, B]: LN over the channels, written to the rows `place`. */
INLINE void NAMED(norm_lanes)(const NUMBER *restrict x, NUMBER *restrict y, float *restrict mean,
                              float *restrict scale, const int32_t *restrict place,
                              const NAMED(norm_arguments) *restrict all, const int lanes) {
    const float *restrict weight = all->weight, *restrict bias = all->bias;
    const int64_t channels = all->channels, batch = all->batch;
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
        s[l] = 1.0f / sqrtf(v[l] / channels + all->eps);
        mean[l] = m[l], scale[l] = s[l];
    }
    for (int64_t c = 0; c < channels; c++) {
        NUMBER *out = y + (place ? place[c] : c) * batch;
        for (int l = 0; l < lanes; l++)
            out[l] = STORE((LOAD(x[c * batch + l]) - m[l]) * s[l] * weight[c] + bias[c]);
    }
}

static void NAMED(norm_share)(const void *arguments, int64_t from, int64_t to, int64_t share) {
    const NAMED(norm_arguments) a = *(const NAMED(norm_arguments) *)arguments;
    const int64_t size = a.channels * a.batch;
    (void)share;
    for (int64_t t = from; t < to; t++) {
        const NUMBER *token = a.x + t * size;
        NUMBER *out = a.place ? a.y : a.y + t * size;
        const int32_t *rows = a.place ? a.place + t * a.channels : NULL;
        float *m = a.mean + t * a.batch, *s = a.scale + t * a.batch;
        int64_t b = 0;
        for (; b + LANES <= a.batch; b += LANES)
            NAMED(norm_lanes)(token + b, out + b, m + b, s + b, rows, &a, LANES);
        for (; b + FOLDED <= a.batch; b += FOLDED)
            NAMED(norm_lanes)(token + b, out + b, m + b, s + b, rows, &a, FOLDED);
        if (b < a.batch)
            NAMED(norm_lanes)(token + b, out + b, m + b, s + b, rows, &a, a.batch - b);
    }
}

/*
 * LN over the channels of x [tokens, channels, batch], of which row i is written to row place[i] of y. mean and scale
 * (one over the deviation) are [tokens, batch].
 */
void NAMED(norm)(run_team team, int threads, const NUMBER *x, NUMBER *y, float *mean, float *scale,
                 const float *weight, const float *bias, const int32_t *place, int64_t tokens, int64_t channels,
                 int64_t batch, float eps) {
    const NAMED(norm_arguments) all = {x, y, mean, scale, weight, bias, place, channels, batch, eps};
    divide((work){NAMED(norm_share), &all, tokens, 0}, team, threads);
}

/* Adds lanes numbers to their sums over every FOLDED-th. */
INLINE void NAMED(fold)(const float *restrict numbers, float *restrict sums, const int lanes) {
    const int width = lanes < FOLDED ? lanes : FOLDED;
    for (int k = 0; k < lanes; k += width)
        for (int l = 0; l < width; l++)
            sums[l] += numbers[k + l];
}

typedef struct {
    const NUMBER *g, *x;
    const float *mean, *scale, *weight;
    const int32_t *place;
    NUMBER *dx;
    float *dweight, *dbias;
    int64_t channels, batch;
} NAMED(norm_gradients);

INLINE void NAMED(norm_backward_lanes)(const NUMBER *restrict g, const NUMBER *restrict x, const float *restrict mean,
                                       const float *restrict scale, const int32_t *restrict place, NUMBER *restrict dx,
                                       float *restrict dweight, float *restrict dbias,
                                       const NAMED(norm_gradients) *restrict all, const int lanes) {
    const float *restrict weight = all->weight;
    const int64_t channels = all->channels, batch = all->batch;
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

static void NAMED(norm_backward_share)(const void *arguments, int64_t from, int64_t to, int64_t share) {
    const NAMED(norm_gradients) a = *(const NAMED(norm_gradients) *)arguments;
    const int64_t size = a.channels * a.batch;
    float *dw = a.dweight + share * a.channels * FOLDED, *db = a.dbias + share * a.channels * FOLDED;
    for (int64_t t = from; t < to; t++) {
        const NUMBER *token = a.x + t * size, *in = a.place ? a.g : a.g + t * size;
        const int32_t *rows = a.place ? a.place + t * a.channels : NULL;
        NUMBER *out = a.dx + t * size;
        const float *m = a.mean + t * a.batch, *s = a.scale + t * a.batch;
        int64_t b = 0;
        for (; b + LANES <= a.batch; b += LANES)
            NAMED(norm_backward_lanes)(in + b, token + b, m + b, s + b, rows, out + b, dw, db, &a, LANES);
        for (; b + FOLDED <= a.batch; b += FOLDED)
            NAMED(norm_backward_lanes)(in + b, token + b, m + b, s + b, rows, out + b, dw, db, &a, FOLDED);
        if (b < a.batch)
            NAMED(norm_backward_lanes)(in + b, token + b, m + b, s + b, rows, out + b, dw, db, &a, a.batch - b);
    }
}

/* The gradients of `norm` from g [m, batch], that of y. dweight and dbias [SHARES, channels, FOLDED] are added to. */
void NAMED(norm_backward)(run_team team, int threads, const NUMBER *g, const NUMBER *x, const float *mean,
                          const float *scale, const float *weight, const int32_t *place, NUMBER *dx, float *dweight,
                          float *dbias, int64_t tokens, int64_t channels, int64_t batch) {
    const NAMED(norm_gradients) all = {g, x, mean, scale, weight, place, dx, dweight, dbias, channels, batch};
    divide((work){NAMED(norm_backward_share), &all, tokens, 0}, team, threads);
}

INLINE void NAMED(activate_lanes)(const NUMBER *restrict x, NUMBER *restrict y, float bias, const int64_t lanes) {
    for (int64_t l = 0; l < lanes; l++)
        y[l] = STORE(gelu(LOAD(x[l]) + bias));
}

typedef struct {
    const NUMBER *g, *x; /* g in the backward pass alone */
    const float *bias;
    NUMBER *out;
    float *dbias;
    int64_t columns;
} NAMED(activation);

static void NAMED(activate_share)(const void *arguments, int64_t from, int64_t to, int64_t share) {
    const NAMED(activation) a = *(const NAMED(activation) *)arguments;
    (void)share;
    for (int64_t r = from; r < to; r++) {
        const NUMBER *x = a.x + r * a.columns;
        NUMBER *y = a.out + r * a.columns;
        int64_t i = 0;
        for (; i + LANES <= a.columns; i += LANES)
            NAMED(activate_lanes)(x + i, y + i, a.bias[r], LANES);
        NAMED(activate_lanes)(x + i, y + i, a.bias[r], a.columns - i);
    }
}

/* y = gelu(x + bias) of matrices [rows, columns], a bias for each row. */
void NAMED(activate)(run_team team, int threads, const NUMBER *x, NUMBER *y, const float *bias, int64_t rows,
                     int64_t columns) {
    const NAMED(activation) all = {NULL, x, bias, y, NULL, columns};
    divide((work){NAMED(activate_share), &all, rows, 0}, team, threads);
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

static void NAMED(activate_backward_share)(const void *arguments, int64_t from, int64_t to, int64_t share) {
    const NAMED(activation) a = *(const NAMED(activation) *)arguments;
    (void)share;
    for (int64_t r = from; r < to; r++) {
        const NUMBER *g = a.g + r * a.columns, *x = a.x + r * a.columns;
        NUMBER *dx = a.out + r * a.columns;
        float *sums = a.dbias + r * FOLDED;
        int64_t i = 0;
        for (; i + LANES <= a.columns; i += LANES)
            NAMED(activate_backward_lanes)(g + i, x + i, a.bias[r], dx + i, sums, LANES);
        for (; i < a.columns; i += FOLDED) {
            const int left = a.columns - i < FOLDED ? a.columns - i : FOLDED;
            NAMED(activate_backward_lanes)(g + i, x + i, a.bias[r], dx + i, sums, left);
        }
    }
}

/* The gradients of `activate` from g, that of y. dbias is [rows, FOLDED] and added to. */
void NAMED(activate_backward)(run_team team, int threads, const NUMBER *g, const NUMBER *x, const float *bias,
                              NUMBER *dx, float *dbias, int64_t rows, int64_t columns) {
    const NAMED(activation) all = {g, x, bias, dx, dbias, columns};
    divide((work){NAMED(activate_backward_share), &all, rows, 0}, team, threads);
}

typedef struct {
    const NUMBER *skip, *x; /* in the backward pass x is the gradient of the sum */
    const float *bias;
    const int32_t *index;
    NUMBER *out;
    float *dbias;
    int64_t size, batch, rows;
} NAMED(sum);

static void NAMED(add_share)(const void *arguments, int64_t from, int64_t to, int64_t share) {
    const NAMED(sum) a = *(const NAMED(sum) *)arguments;
    (void)share;
    for (int64_t i = from; i < to; i++) {
        const int64_t source = a.index ? a.index[i] : i;
        const NUMBER *restrict row = a.x + source * a.batch, *restrict base = a.skip + i * a.batch;
        NUMBER *restrict out = a.out + i * a.batch;
        const float bias = a.bias ? a.bias[source / a.rows] : 0;
        if (a.skip)
            for (int64_t b = 0; b < a.batch; b++)
                out[b] = STORE(LOAD(base[b]) + (LOAD(row[b]) + bias));
        else if (a.bias)
            for (int64_t b = 0; b < a.batch; b++)
                out[b] = STORE(LOAD(row[b]) + bias);
        else
            memcpy(out, row, a.batch * sizeof *row);
    }
}

/* out[i] = skip[i] + x[index[i]] + bias[index[i] / rows]: rows of matrices [size, batch]. skip, bias may be NULL. */
void NAMED(add)(run_team team, int threads, const NUMBER *skip, const NUMBER *x, const float *bias,
                const int32_t *index, NUMBER *out, int64_t size, int64_t batch, int64_t rows) {
    const NAMED(sum) all = {skip, x, bias, index, out, NULL, size, batch, rows};
    divide((work){NAMED(add_share), &all, size, 0}, team, threads);
}

static void NAMED(add_backward_share)(const void *arguments, int64_t from, int64_t to, int64_t share) {
    const NAMED(sum) a = *(const NAMED(sum) *)arguments;
    const int64_t folded = a.batch - a.batch % FOLDED;
    for (int64_t i = from; i < to; i++) {
        const int64_t target = a.index ? a.index[i] : i;
        const NUMBER *row = a.x + i * a.batch;
        memcpy(a.out + target * a.batch, row, a.batch * sizeof *row);
        if (a.dbias == NULL)
            continue;
        float *restrict sums = a.dbias + (share * (a.size / a.rows) + target / a.rows) * FOLDED;
        for (int64_t b = 0; b < folded; b += FOLDED)
            for (int l = 0; l < FOLDED; l++)
                sums[l] += LOAD(row[b + l]);
        for (int64_t b = folded; b < a.batch; b++)
            sums[0] += LOAD(row[b]);
    }
}

/* The gradients of `add` by x and bias from g. dbias [SHARES, size / rows, FOLDED] is added to, or NULL. */
void NAMED(add_backward)(run_team team, int threads, const NUMBER *g, const int32_t *index, NUMBER *dx, float *dbias,
                         int64_t size, int64_t batch, int64_t rows) {
    const NAMED(sum) all = {NULL, g, NULL, index, dx, dbias, size, batch, rows};
    divide((work){NAMED(add_backward_share), &all, size, 0}, team, threads);
}
