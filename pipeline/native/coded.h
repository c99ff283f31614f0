/* The symbols of a JPEG's scan on their way out: codes made for them, and the bytes that they become. */
#ifndef CODED_H
#define CODED_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

enum { DC = 0, AC = 2, TABLES = 4, RESTART = TABLES * 256 }; /* of the target: two tables of each kind */

/* In the order of the scan: table * 256 + symbol (or RESTART) in bits 16 and up, below the number that follows it. */
struct symbols {
    uint32_t *list;
    size_t count, room;
    uint32_t frequency[TABLES * 256];
};

/* For each symbol its code, moved left by the number's bits, and the length of both. */
struct words {
    uint32_t bits[TABLES * 256];
    uint8_t length[TABLES * 256];
};

/* The table with which symbols of these frequencies [256] take the fewest bits: libjpeg's own, to the choice among
 * equals. */
void make_best(const uint32_t *frequency, JHUFF_TBL *table);

/* The words of table number `table` of those above. */
void make_words(struct words *words, int table, const JHUFF_TBL *from);

/* The scan's bytes; their end, or NULL where there is no room for them before `end`. */
uint8_t *write_scan(const struct symbols *found, const struct words *words, uint8_t *to, const uint8_t *end);

#endif
