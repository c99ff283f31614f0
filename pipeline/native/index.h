/* A check of the places that code is to move numbers to. */
#ifndef INDEX_H
#define INDEX_H

#include <stdbool.h>
#include <stdint.h>

/* Whether all of `size` places are among 0 ... size - 1; NULL are their own. */
static inline bool all_in_range(const int32_t *index, int64_t size) {
    uint32_t largest = 0; /* a negative index is large too */
    for (int64_t i = 0; index && i < size; i++)
        largest = (uint32_t)index[i] > largest ? (uint32_t)index[i] : largest;
    return size == 0 || largest < size;
}

#endif
