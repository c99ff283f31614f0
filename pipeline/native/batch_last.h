/* The functions of batch_last.c for numbers of one kind: NUMBER, which LOAD takes to fp32 and STORE back. An index is
 * NULL for rows in their own order. They return DONE, or OUT_OF_RANGE, and have written nothing then. */

typedef struct {
    const NUMBER *x;
    NUMBER *y;
    float *mean, *scale;
    const float *weight, *bias;
    const int32_t *place;
    int64_t channels, batch;
    float eps;
} NAMED(norm_arguments);

/* For `count` pictures of one token [C, B]: LN over the channels, written to the rows `place`. */
INLINE void NAMED(norm_vectors)(const NUMBER *restrict x, NUMBER *restrict y, float *restrict mean,
                                float *restrict scale, const int32_t *restrict place,
                                const NAMED(norm_arguments) *restrict all, const int vectors, const int64_t count) {
    const int64_t channels = all->channels, batch = all->batch;
    vector m[MOST_VECTORS] = {0}, v[MOST_VECTORS] = {0}, rest[MOST_VECTORS] = {0};
    for (int64_t c = 0; c < channels; c++)
        for (int k = 0; k < vectors; k++)
            m[k] += LOAD_VECTOR(x + c * batch + k * FOLDED, count);
    for (int k = 0; k < vectors; k++)
        m[k] /= vector_of(channels);
    for (int64_t c = 0; c < channels; c++)
        for (int k = 0; k < vectors; k++) {
            const vector d = LOAD_VECTOR(x + c * batch + k * FOLDED, count) - m[k];
            v[k] += d * d, rest[k] += d;
        }
    for (int k = 0; k < vectors; k++) {
        rest[k] /= vector_of(channels); /* what rounding has left out of the mean */
        m[k] += rest[k], v[k] -= rest[k] * rest[k] * vector_of(channels);
        for (int l = 0; l < FOLDED; l++)
            v[k][l] = 1.0f / sqrtf((v[k][l] < 0 ? 0 : v[k][l]) / channels + all->eps);
        store_vector_fp32(mean + k * FOLDED, m[k], count);
        store_vector_fp32(scale + k * FOLDED, v[k], count);
    }
    for (int64_t c = 0; c < channels; c++) {
        NUMBER *out = y + (place ? place[c] : c) * batch;
        if (place && c + AHEAD < channels)
            fetch(y + place[c + AHEAD] * batch, vectors * FOLDED * sizeof *y, 1);
        for (int k = 0; k < vectors; k++) {
            const vector d = LOAD_VECTOR(x + c * batch + k * FOLDED, count) - m[k];
            STORE_VECTOR(out + k * FOLDED, d * v[k] * all->weight[c] + all->bias[c], count);
        }
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
        for (; b + 4 * FOLDED <= a.batch; b += 4 * FOLDED)
            NAMED(norm_vectors)(token + b, out + b, m + b, s + b, rows, &a, 4, FOLDED);
        for (; b + 2 * FOLDED <= a.batch; b += 2 * FOLDED)
            NAMED(norm_vectors)(token + b, out + b, m + b, s + b, rows, &a, 2, FOLDED);
        for (; b + FOLDED <= a.batch; b += FOLDED)
            NAMED(norm_vectors)(token + b, out + b, m + b, s + b, rows, &a, 1, FOLDED);
        if (b < a.batch && b > 0) { /* the last ones, of which some are done again */
            b = a.batch - FOLDED;
            NAMED(norm_vectors)(token + b, out + b, m + b, s + b, rows, &a, 1, FOLDED);
        } else if (b < a.batch)
            NAMED(norm_vectors)(token, out, m, s, rows, &a, 1, a.batch);
    }
}

/*
 * LN over the channels of x [tokens, channels, batch], of which row i is written to row place[i] of y. mean and scale
 * (one over the deviation) are [tokens, batch].
 */
int NAMED(norm)(run_team team, int threads, const NUMBER *x, NUMBER *y, float *mean, float *scale,
                 const float *weight, const float *bias, const int32_t *place, int64_t tokens, int64_t channels,
                 int64_t batch, float eps) {
    if (!all_in_range(place, tokens * channels))
        return OUT_OF_RANGE;
    const NAMED(norm_arguments) all = {x, y, mean, scale, weight, bias, place, channels, batch, eps};
    divide((work){NAMED(norm_share), &all, tokens, 0}, team, threads);
    return DONE;
}

typedef struct {
    const NUMBER *g, *x;
    const float *mean, *scale, *weight;
    const int32_t *place;
    NUMBER *dx;
    vector *dweight, *dbias;
    int64_t channels, batch;
} NAMED(norm_gradients);

/* Of the pictures the last `counted` are those whose gradients of weight and bias are not yet in the sums. */
INLINE void NAMED(norm_backward_vectors)(const NUMBER *restrict g, const NUMBER *restrict x,
                                         const float *restrict mean, const float *restrict scale,
                                         const int32_t *restrict place, NUMBER *restrict dx, vector *restrict dweight,
                                         vector *restrict dbias, const NAMED(norm_gradients) *restrict all,
                                         const int vectors, const int64_t count, const int64_t counted) {
    const int64_t channels = all->channels, batch = all->batch;
    vector m[MOST_VECTORS], s[MOST_VECTORS];
    vector sum[MOST_VECTORS] = {0}, along[MOST_VECTORS] = {0}; /* of g w, and of g w times the normed x */
    for (int k = 0; k < vectors; k++)
        m[k] = load_vector_fp32(mean + k * FOLDED, count), s[k] = load_vector_fp32(scale + k * FOLDED, count);
    for (int64_t c = 0; c < channels; c++) {
        const NUMBER *row = g + (place ? place[c] : c) * batch;
        if (place && c + AHEAD < channels)
            fetch(g + place[c + AHEAD] * batch, vectors * FOLDED * sizeof *g, 0);
        vector for_weight = {0}, for_bias = {0};
        for (int k = 0; k < vectors; k++) {
            const vector own = LOAD_VECTOR(row + k * FOLDED, count);
            const vector normed = (LOAD_VECTOR(x + c * batch + k * FOLDED, count) - m[k]) * s[k];
            sum[k] += own * all->weight[c];
            along[k] += own * normed * all->weight[c];
            for_weight += own * normed;
            for_bias += own;
        }
        dweight[c] += counted < FOLDED ? last(for_weight, counted) : for_weight;
        dbias[c] += counted < FOLDED ? last(for_bias, counted) : for_bias;
    }
    for (int k = 0; k < vectors; k++)
        sum[k] /= vector_of(channels), along[k] /= vector_of(channels);
    for (int64_t c = 0; c < channels; c++) {
        const NUMBER *row = g + (place ? place[c] : c) * batch;
        for (int k = 0; k < vectors; k++) {
            const vector own = LOAD_VECTOR(row + k * FOLDED, count);
            const vector normed = (LOAD_VECTOR(x + c * batch + k * FOLDED, count) - m[k]) * s[k];
            STORE_VECTOR(dx + c * batch + k * FOLDED, s[k] * (own * all->weight[c] - sum[k] - normed * along[k]), count);
        }
    }
}

static void NAMED(norm_backward_share)(const void *arguments, int64_t from, int64_t to, int64_t share) {
    const NAMED(norm_gradients) a = *(const NAMED(norm_gradients) *)arguments;
    const int64_t size = a.channels * a.batch;
    vector *dw = a.dweight + share * a.channels, *db = a.dbias + share * a.channels;
    for (int64_t t = from; t < to; t++) {
        const NUMBER *token = a.x + t * size, *in = a.place ? a.g : a.g + t * size;
        const int32_t *rows = a.place ? a.place + t * a.channels : NULL;
        NUMBER *out = a.dx + t * size;
        const float *m = a.mean + t * a.batch, *s = a.scale + t * a.batch;
        int64_t b = 0;
        for (; b + 4 * FOLDED <= a.batch; b += 4 * FOLDED)
            NAMED(norm_backward_vectors)(in + b, token + b, m + b, s + b, rows, out + b, dw, db, &a, 4, FOLDED, FOLDED);
        for (; b + 2 * FOLDED <= a.batch; b += 2 * FOLDED)
            NAMED(norm_backward_vectors)(in + b, token + b, m + b, s + b, rows, out + b, dw, db, &a, 2, FOLDED, FOLDED);
        for (; b + FOLDED <= a.batch; b += FOLDED)
            NAMED(norm_backward_vectors)(in + b, token + b, m + b, s + b, rows, out + b, dw, db, &a, 1, FOLDED, FOLDED);
        const int64_t left = a.batch - b;
        if (left && b > 0) {
            b = a.batch - FOLDED;
            NAMED(norm_backward_vectors)(in + b, token + b, m + b, s + b, rows, out + b, dw, db, &a, 1, FOLDED, left);
        } else if (left)
            NAMED(norm_backward_vectors)(in, token, m, s, rows, out, dw, db, &a, 1, left, FOLDED);
    }
}

/* The gradients of `norm` from g [m, batch], that of y. dweight and dbias [SHARES, channels, FOLDED] are added to. */
int NAMED(norm_backward)(run_team team, int threads, const NUMBER *g, const NUMBER *x, const float *mean,
                          const float *scale, const float *weight, const int32_t *place, NUMBER *dx, vector *dweight,
                          vector *dbias, int64_t tokens, int64_t channels, int64_t batch) {
    if (!all_in_range(place, tokens * channels))
        return OUT_OF_RANGE;
    const NAMED(norm_gradients) all = {g, x, mean, scale, weight, place, dx, dweight, dbias, channels, batch};
    divide((work){NAMED(norm_backward_share), &all, tokens, 0}, team, threads);
    return DONE;
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
int NAMED(activate)(run_team team, int threads, const NUMBER *x, NUMBER *y, const float *bias, int64_t rows,
                     int64_t columns) {
    const NAMED(activation) all = {NULL, x, bias, y, NULL, columns};
    divide((work){NAMED(activate_share), &all, rows, 0}, team, threads);
    return DONE;
}

/* Adds lanes numbers to their sums over every FOLDED-th. */
INLINE void NAMED(fold)(const float *restrict numbers, float *restrict sums, const int lanes) {
    const int width = lanes < FOLDED ? lanes : FOLDED;
    for (int k = 0; k < lanes; k += width)
        for (int l = 0; l < width; l++)
            sums[l] += numbers[k + l];
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
int NAMED(activate_backward)(run_team team, int threads, const NUMBER *g, const NUMBER *x, const float *bias,
                              NUMBER *dx, float *dbias, int64_t rows, int64_t columns) {
    const NAMED(activation) all = {g, x, bias, dx, dbias, columns};
    divide((work){NAMED(activate_backward_share), &all, rows, 0}, team, threads);
    return DONE;
}

typedef struct {
    const NUMBER *skip, *x; /* in the backward pass x is the gradient of the sum */
    const float *bias;
    const int32_t *index;
    NUMBER *out;
    vector *dbias;
    int64_t size, batch, rows;
} NAMED(sum);

static void NAMED(add_share)(const void *arguments, int64_t from, int64_t to, int64_t share) {
    const NAMED(sum) a = *(const NAMED(sum) *)arguments;
    (void)share;
    for (int64_t i = from; i < to; i++) {
        const int64_t source = a.index ? a.index[i] : i;
        const NUMBER *restrict row = a.x + source * a.batch, *restrict base = a.skip + i * a.batch;
        if (a.index && i + AHEAD < to)
            fetch(a.x + a.index[i + AHEAD] * a.batch, a.batch * sizeof *row, 0);
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
int NAMED(add)(run_team team, int threads, const NUMBER *skip, const NUMBER *x, const float *bias,
                const int32_t *index, NUMBER *out, int64_t size, int64_t batch, int64_t rows) {
    if (!all_in_range(index, size))
        return OUT_OF_RANGE;
    const NAMED(sum) all = {skip, x, bias, index, out, NULL, size, batch, rows};
    divide((work){NAMED(add_share), &all, size, 0}, team, threads);
    return DONE;
}

static void NAMED(add_backward_share)(const void *arguments, int64_t from, int64_t to, int64_t share) {
    const NAMED(sum) a = *(const NAMED(sum) *)arguments;
    for (int64_t i = from; i < to; i++) {
        const int64_t target = a.index ? a.index[i] : i;
        const NUMBER *row = a.x + i * a.batch;
        if (a.index && i + AHEAD < to)
            fetch(a.out + a.index[i + AHEAD] * a.batch, a.batch * sizeof *row, 1);
        memcpy(a.out + target * a.batch, row, a.batch * sizeof *row);
        if (a.dbias == NULL)
            continue;
        vector sums = {0};
        int64_t b = 0;
        for (; b + FOLDED <= a.batch; b += FOLDED)
            sums += LOAD_VECTOR(row + b, FOLDED);
        if (b < a.batch)
            sums += b ? last(LOAD_VECTOR(row + a.batch - FOLDED, FOLDED), a.batch - b) : LOAD_VECTOR(row, a.batch);
        a.dbias[share * (a.size / a.rows) + target / a.rows] += sums;
    }
}

/* The gradients of `add` by x and bias from g. dbias [SHARES, size / rows, FOLDED] is added to, or NULL. */
int NAMED(add_backward)(run_team team, int threads, const NUMBER *g, const int32_t *index, NUMBER *dx, vector *dbias,
                         int64_t size, int64_t batch, int64_t rows) {
    if (!all_in_range(index, size))
        return OUT_OF_RANGE;
    const NAMED(sum) all = {NULL, g, NULL, index, dx, dbias, size, batch, rows};
    divide((work){NAMED(add_backward_share), &all, size, 0}, team, threads);
    return DONE;
}
