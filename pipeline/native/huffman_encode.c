#include "huffman_encode.h"

#include <string.h>

/* Code lengths by Huffman's algorithm, then none above 16 (T.81, figures K.1 to K.4). */
void make_optimal_table(const uint32_t *frequency, JHUFF_TBL *table) {
    uint64_t weight[257]; /* of the trees that are not joined yet, in symbol order */
    int symbol[257], tree[257], lengths[257] = {0}, trees = 0, leaves, count[258] = {0};
    for (int s = 0; s < 256; s++)
        if (frequency[s])
            weight[trees] = frequency[s], symbol[trees++] = s;
    weight[trees] = 1; /* a dummy symbol, so that no code is all ones */
    symbol[trees++] = 256;
    leaves = trees;
    for (int i = 0; i < leaves; i++)
        tree[i] = i;
    for (; trees > 1; trees--) {
        int least = -1, second = -1;
        for (int i = 0; i < leaves; i++) {
            if (!weight[i])
                continue;
            if (least < 0 || weight[i] <= weight[least])
                second = least, least = i;
            else if (second < 0 || weight[i] <= weight[second])
                second = i;
        }
        weight[least] += weight[second];
        weight[second] = 0;
        for (int i = 0; i < leaves; i++)
            if (tree[i] == least || tree[i] == second)
                tree[i] = least, lengths[i]++;
    }
    for (int i = 0; i < leaves; i++)
        count[lengths[i]]++;
    for (int length = 257; length > 16; length--)
        while (count[length]) {
            int shorter = length - 2;
            while (!count[shorter])
                shorter--;
            count[length] -= 2, count[length - 1]++;
            count[shorter]--, count[shorter + 1] += 2;
        }
    int longest = 16;
    while (!count[longest])
        longest--;
    count[longest]--; /* the dummy symbol */
    int place = 0;
    for (int length = 1; length < 258; length++)
        for (int i = 0; i < leaves - 1; i++)
            if (lengths[i] == length)
                table->huffval[place++] = (UINT8)symbol[i];
    table->bits[0] = 0;
    for (int length = 1; length <= 16; length++)
        table->bits[length] = (UINT8)count[length];
    table->sent_table = FALSE;
}

void make_codewords(struct codewords *codewords, int table, const JHUFF_TBL *from) {
    uint32_t code = 0;
    int place = 0;
    for (int length = 1; length <= 16; length++, code <<= 1)
        for (int i = 0; i < from->bits[length]; i++) {
            int symbol = from->huffval[place++], which = table * 256 + symbol;
            codewords->bits[which] = code++ << (symbol & 15);
            codewords->length[which] = (uint8_t)(length + (symbol & 15));
        }
}

/* Write the first `bytes` (at most four) bytes of a word, with a 0 after each 0xFF. */
static inline uint8_t *write_stuffed(uint8_t *to, uint32_t word, int bytes) {
    for (int shift = 24; bytes--; shift -= 8)
        if ((*to++ = (uint8_t)(word >> shift)) == 0xFF)
            *to++ = 0;
    return to;
}

uint8_t *write_scan(const struct symbols *symbols, const struct codewords *codewords, uint8_t *to, const uint8_t *end) {
    uint64_t bits = 0; /* the last `count` of them are not written yet */
    int count = 0, markers = 0;
    for (size_t i = 0; i <= symbols->count; i++) {
        uint32_t which = i < symbols->count ? symbols->list[i] >> 16 : RESTART;
        if (end - to < 16)
            return NULL;
        if (which == RESTART) { /* or the end of the scan: the last byte is filled up with ones */
            int bytes = (count + 7) / 8;
            bits = ~(~bits << (8 * bytes - count));
            to = write_stuffed(to, (uint32_t)(bits << (32 - 8 * bytes)), bytes);
            bits = 0, count = 0;
            if (i < symbols->count)
                *to++ = 0xFF, *to++ = (uint8_t)(0xD0 + markers++ % 8);
            continue;
        }
        bits = bits << codewords->length[which] | codewords->bits[which] | (symbols->list[i] & 0xFFFF);
        count += codewords->length[which];
        if (count >= 32) {
            count -= 32;
            uint32_t word = (uint32_t)(bits >> count);
            if (__builtin_expect((~word - 0x01010101u) & word & 0x80808080u, 0)) { /* one byte is 0xFF */
                to = write_stuffed(to, word, 4);
                continue;
            }
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
            word = __builtin_bswap32(word);
#endif
            memcpy(to, &word, 4);
            to += 4;
        }
    }
    return to;
}
