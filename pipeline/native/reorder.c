/* Permutes the columns of a matrix. Four or eight rows move as one: their numbers of a column are packed next to each
 * other, so that one access at a random place moves them all. */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "index.h"
#include "shuffle.h"

enum { DONE = 0, NO_MEMORY = 1, OUT_OF_RANGE = 2 };

#define CACHED 49152 /* columns of 16 bytes that the second level of common caches holds */

typedef uint64_t packed_16; /* four numbers of 16 bits, the first lowest */
typedef struct {
    uint64_t low, high;
} packed_32; /* four of 32 */

static inline packed_16 pack_16(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return a | b << 16 | c << 32 | d << 48;
}

static inline packed_32 pack_32(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return (packed_32){a | b << 32, c | d << 32};
}

#define UNPACK_16(packed, out, i, size)                                                                                \
    (out[i] = (uint16_t)packed, out[i + size] = (uint16_t)(packed >> 16), out[i + 2 * size] = (uint16_t)(packed >> 32), \
     out[i + 3 * size] = (uint16_t)(packed >> 48))

#define UNPACK_32(packed, out, i, size)                                                                                \
    (out[i] = (uint32_t)packed.low, out[i + size] = (uint32_t)(packed.low >> 32),                                      \
     out[i + 2 * size] = (uint32_t)packed.high, out[i + 3 * size] = (uint32_t)(packed.high >> 32))

#define DEFINE_REORDER(BITS)                                                                                           \
    static void gather_##BITS(const uint##BITS##_t *restrict in, uint##BITS##_t *restrict out,                         \
                              const int32_t *restrict index, int64_t size, packed_##BITS *restrict packed) {           \
        for (int64_t i = 0; i < size; i++)                                                                             \
            packed[i] = pack_##BITS(in[i], in[i + size], in[i + 2 * size], in[i + 3 * size]);                          \
        for (int64_t i = 0; i < size; i++)                                                                             \
            UNPACK_##BITS(packed[index[i]], out, i, size);                                                             \
    }                                                                                                                  \
                                                                                                                       \
    static void scatter_##BITS(const uint##BITS##_t *restrict in, uint##BITS##_t *restrict out,                        \
                               const int32_t *restrict index, int64_t size, packed_##BITS *restrict packed) {          \
        for (int64_t i = 0; i < size; i++)                                                                             \
            packed[index[i]] = pack_##BITS(in[i], in[i + size], in[i + 2 * size], in[i + 3 * size]);                   \
        for (int64_t i = 0; i < size; i++)                                                                             \
            UNPACK_##BITS(packed[i], out, i, size);                                                                    \
    }                                                                                                                  \
                                                                                                                       \
    static int by_four_##BITS(const uint##BITS##_t *in, uint##BITS##_t *out, const int32_t *index, int64_t rows,       \
                              int64_t size, int back) {                                                                \
        packed_##BITS *packed = rows < 4 ? NULL : calloc((size_t)size, sizeof *packed);                                \
        if (rows >= 4 && packed == NULL)                                                                               \
            return NO_MEMORY;                                                                                          \
        for (; rows >= 4; rows -= 4, in += 4 * size, out += 4 * size)                                                  \
            (back ? scatter_##BITS : gather_##BITS)(in, out, index, size, packed);                                     \
        free(packed);                                                                                                  \
        for (; rows > 0; rows--, in += size, out += size)                                                              \
            for (int64_t i = 0; i < size; i++)                                                                         \
                out[back ? index[i] : i] = in[back ? i : index[i]];                                                    \
        return DONE;                                                                                                   \
    }

DEFINE_REORDER(16)
DEFINE_REORDER(32)

typedef uint16_t eight __attribute__((vector_size(16))); /* eight numbers of 16 bits: a column of eight rows */
typedef uint32_t pairs __attribute__((vector_size(16)));
typedef uint64_t halves __attribute__((vector_size(16)));

/* Transpose 8 x 8 numbers: single ones of two rows in turns, then pairs, then halves. */
static inline __attribute__((always_inline)) void transpose(eight tile[8]) {
    eight by_one[8];
    pairs by_two[8];
    for (int i = 0; i < 8; i += 2) {
        by_one[i] = SHUFFLE(eight, tile[i], tile[i + 1], 0, 8, 1, 9, 2, 10, 3, 11);
        by_one[i + 1] = SHUFFLE(eight, tile[i], tile[i + 1], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            by_two[i + 2 * j] = SHUFFLE(pairs, by_one[i + j], by_one[i + j + 2], 0, 4, 1, 5);
            by_two[i + 2 * j + 1] = SHUFFLE(pairs, by_one[i + j], by_one[i + j + 2], 2, 6, 3, 7);
        }
    for (int i = 0; i < 4; i++) {
        tile[2 * i] = (eight)SHUFFLE(halves, by_two[i], by_two[i + 4], 0, 2);
        tile[2 * i + 1] = (eight)SHUFFLE(halves, by_two[i], by_two[i + 4], 1, 3);
    }
}

/* Eight rows: the columns are packed in the order of `to` and taken in the order of `from`, NULL for their own. */
static inline __attribute__((always_inline)) void move_columns(const uint16_t *in, uint16_t *out, const int32_t *to,
                                                               const int32_t *from, int64_t size, eight *packed) {
    const int64_t tiled = size - size % 8;
    for (int64_t i = 0; i < tiled; i += 8) {
        eight tile[8];
        for (int r = 0; r < 8; r++)
            memcpy(tile + r, in + i + r * size, sizeof *tile);
        transpose(tile);
        for (int k = 0; k < 8; k++)
            packed[to ? to[i + k] : i + k] = tile[k];
    }
    for (int64_t i = tiled; i < size; i++)
        for (int r = 0; r < 8; r++)
            packed[to ? to[i] : i][r] = in[i + r * size];
    for (int64_t i = 0; i < tiled; i += 8) {
        eight tile[8];
        for (int k = 0; k < 8; k++)
            tile[k] = packed[from ? from[i + k] : i + k];
        transpose(tile);
        for (int r = 0; r < 8; r++)
            memcpy(out + i + r * size, tile + r, sizeof *tile);
    }
    for (int64_t i = tiled; i < size; i++)
        for (int r = 0; r < 8; r++)
            out[i + r * size] = packed[from ? from[i] : i][r];
}

static int reorder_16(const uint16_t *in, uint16_t *out, const int32_t *index, int64_t rows, int64_t size, bool back) {
    eight *packed = rows < 8 || size > CACHED ? NULL : calloc((size_t)size, sizeof *packed);
    for (; packed && rows >= 8; rows -= 8, in += 8 * size, out += 8 * size)
        move_columns(in, out, back ? index : NULL, back ? NULL : index, size, packed);
    free(packed);
    return by_four_16(in, out, index, rows, size, back);
}

/*
 * For each row of [rows, size] numbers of 2 or 4 `bytes`: out[i] = in[index[i]], or with `back` the reverse of it,
 * out[index[i]] = in[i]. `index` is a permutation of 0 ... size - 1. Returns DONE, NO_MEMORY, or OUT_OF_RANGE, and has
 * written nothing then.
 */
int reorder_columns(const void *in, void *out, const int32_t *index, int64_t rows, int64_t size, int bytes, int back) {
    if (!all_in_range(index, size))
        return OUT_OF_RANGE;
    return bytes == 2 ? reorder_16(in, out, index, rows, size, back) : by_four_32(in, out, index, rows, size, back);
}
