/* A JPEG's Huffman codes, and a stream of bits to read them from (T.81, annexes C and F). */
#ifndef HUFFMAN_H
#define HUFFMAN_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

/* All zero for a table without codes. */
struct codes {
    JHUFF_TBL source_table;
    uint32_t limit[17]; /* for each length: one above its largest code, left-aligned to 16 bits */
    int32_t offset[17]; /* for each length: the index of a code's symbol, minus the code */
};

struct stream {
    const uint8_t *next;
    uint64_t bits; /* bits that were read and not used yet, left-aligned */
    int count;     /* the number of valid bits, at least */
};

/* The number that is coded by `size` bits, at least 1 (T.81, table F.1 and figure F.12). */
static inline int extend(int bits, int size) { return bits - (((bits >> (size - 1)) - 1) & ((1 << size) - 1)); }

/* Make the codes of a JPEG's table (T.81, annex C), which libjpeg has validated. Returns false if they are the same as
 * before. */
static inline bool make_codes(struct codes *codes, const JHUFF_TBL *from) {
    if (!memcmp(codes->source_table.bits, from->bits, sizeof from->bits) &&
        !memcmp(codes->source_table.huffval, from->huffval, sizeof from->huffval))
        return false;
    codes->source_table = *from;
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

/* The symbol at the start of 16 bits, and its code's length in bits; length 0 if there is no such code. */
static inline uint8_t symbol_of(const struct codes *codes, uint32_t bits, int *length) {
    for (*length = 1; *length <= 16; ++*length)
        if (bits < codes->limit[*length])
            return codes->source_table.huffval[((int32_t)(bits >> (16 - *length)) + codes->offset[*length]) & 255];
    *length = 0;
    return 0;
}

/* For each `look` bits: the length of the code at their start, 0 if it is longer, and its symbol. */
static inline void begin_codes(const struct codes *codes, int look, uint8_t *lengths, uint8_t *symbols) {
    uint32_t bits = 0;
    int place = 0;
    for (int length = 1; length <= look; length++)
        for (int i = 0; i < codes->source_table.bits[length]; i++, bits += 1u << (look - length)) {
            memset(lengths + bits, length, 1u << (look - length));
            memset(symbols + bits, codes->source_table.huffval[place++], 1u << (look - length));
        }
    memset(lengths + bits, 0, (1u << look) - bits);
    memset(symbols + bits, 0, (1u << look) - bits);
}

/* Read more bits, so that at least 56 are valid. Eight bytes after `next` must be readable. */
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

/* Remove `bits` bits from the stream. */
static inline void use(struct stream *from, int bits) {
    from->bits <<= bits;
    from->count -= bits;
}

/* Read a number of `size` bits. */
static inline int take_number(struct stream *from, int size) {
    int number = size ? extend((int)(from->bits >> (64 - size)), size) : 0;
    use(from, size);
    return number;
}

#endif
