/* A JPEG's Huffman codes, and the bits that they are read from (T.81, annexes C and F). */
#ifndef HUFFMAN_H
#define HUFFMAN_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

struct codes {
    JHUFF_TBL made_of;
    bool made;
    uint32_t limit[17]; /* one above the codes of up to this many bits, as 16 bits from the left */
    int32_t offset[17]; /* from a code of this length to its place in the symbols */
};

struct stream {
    const uint8_t *next;
    uint64_t bits; /* what was taken and not yet used, from the left */
    int count;     /* at least so many of them */
};

/* The number that `size` bits, at least one, stand for (T.81, table F.1 and figure F.12). */
static inline int extend(int bits, int size) {
    return bits - (((bits >> (size - 1)) - 1) & ((1 << size) - 1));
}

/* The code lengths and symbols of a JPEG's table (T.81, annex C), which libjpeg has found to be a code. False where
 * they are those of the picture before. */
static inline bool make_codes(struct codes *codes, const JHUFF_TBL *from) {
    if (codes->made && !memcmp(codes->made_of.bits, from->bits, sizeof from->bits) &&
        !memcmp(codes->made_of.huffval, from->huffval, sizeof from->huffval))
        return false;
    codes->made_of = *from;
    codes->made = true;
    uint32_t code = 0;
    int place = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        codes->offset[length] = place - (int32_t)code;
        code += from->bits[length];
        place += from->bits[length];
        codes->limit[length] = code << (16 - length);
    }
    return true;
}

/* The symbol that 16 bits begin with, and its length; 0 bits where there is no such code. */
static inline uint8_t symbol_of(const struct codes *codes, uint32_t bits, int *length) {
    for (*length = 1; *length <= 16; ++*length)
        if (bits < codes->limit[*length])
            return codes->made_of.huffval[((int32_t)(bits >> (16 - *length)) + codes->offset[*length]) & 255];
    *length = 0;
    return 0;
}

/* What each `look` bits begin with: the code's length, 0 where it is longer than these bits, and its symbol. */
static inline void begin_codes(const struct codes *codes, int look, uint8_t *lengths, uint8_t *symbols) {
    uint32_t bits = 0;
    int place = 0;
    for (int length = 1; length <= look; length++)
        for (int i = 0; i < codes->made_of.bits[length]; i++, bits += 1u << (look - length)) {
            memset(lengths + bits, length, 1u << (look - length));
            memset(symbols + bits, codes->made_of.huffval[place++], 1u << (look - length));
        }
    memset(lengths + bits, 0, (1u << look) - bits);
    memset(symbols + bits, 0, (1u << look) - bits);
}

/* At least 56 bits, with zeros after the end. */
static inline void refill(struct stream *from) {
    uint64_t word;
    memcpy(&word, from->next, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    from->bits |= word >> from->count;
    from->next += (63 - from->count) >> 3;
    from->count |= 56;
}

static inline void use(struct stream *from, int bits) {
    from->bits <<= bits;
    from->count -= bits;
}

static inline int take_number(struct stream *from, int size) {
    int number = size ? extend((int)(from->bits >> (64 - size)), size) : 0;
    use(from, size);
    return number;
}

#endif
