/* Permutes the columns of a matrix. Four rows move as one: their numbers of a column are packed next to each other, so
 * that one access at a random place moves all four. */
#include <stdint.h>
#include <stdlib.h>

enum { DONE = 0, NO_MEMORY = 1, OUT_OF_RANGE = 2 };

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
    static int reorder_##BITS(const uint##BITS##_t *in, uint##BITS##_t *out, const int32_t *index, int64_t rows,       \
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

/*
 * For each row of [rows, size] numbers of 2 or 4 `bytes`: out[i] = in[index[i]], or with `back` the reverse of it,
 * out[index[i]] = in[i]. `index` is a permutation of 0 ... size - 1. Returns DONE, NO_MEMORY, or OUT_OF_RANGE, and has
 * written nothing then.
 */
int reorder_columns(const void *in, void *out, const int32_t *index, int64_t rows, int64_t size, int bytes, int back) {
    uint32_t largest = 0; /* a negative index is large too */
    for (int64_t i = 0; i < size; i++)
        largest = (uint32_t)index[i] > largest ? (uint32_t)index[i] : largest;
    if (size > 0 && largest >= size)
        return OUT_OF_RANGE;
    return bytes == 2 ? reorder_16(in, out, index, rows, size, back) : reorder_32(in, out, index, rows, size, back);
}
