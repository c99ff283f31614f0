#include "lookup.h"

void make_dc(struct dc *table, const JHUFF_TBL *from) {
    if (!make_codes(&table->codes, from))
        return;
    uint8_t lengths[1 << DC_LOOKUP_BITS], symbols[1 << DC_LOOKUP_BITS];
    begin_codes(&table->codes, DC_LOOKUP_BITS, lengths, symbols);
    for (uint32_t bits = 0; bits < 1 << DC_LOOKUP_BITS; bits++) {
        uint8_t size = symbols[bits] & 15, length = lengths[bits];
        table->entries[bits] = (struct dc_entry){length ? length + size : 0, length, size};
    }
}

/* First one coefficient per entry, then a second one where it fits. */
void make_ac(struct ac *table, const JHUFF_TBL *from) {
    if (!make_codes(&table->codes, from))
        return;
    table->skimmable = false;
    uint8_t lengths[1 << AC_LOOKUP_BITS], symbols[1 << AC_LOOKUP_BITS];
    begin_codes(&table->codes, AC_LOOKUP_BITS, lengths, symbols);
    struct ac_entry single[1 << AC_LOOKUP_BITS];
    for (uint32_t bits = 0; bits < 1 << AC_LOOKUP_BITS; bits++) {
        int size = symbols[bits] & 15, left = AC_LOOKUP_BITS - lengths[bits] - size, ones = (1 << size) - 1;
        int number = (int)bits >> (left < 0 ? 0 : left) & ones;
        number -= number <= ones >> 1 ? ones : 0; /* as `extend` */
        const bool whole = lengths[bits] && left >= 0;
        const uint8_t steps = (uint8_t)steps_of(symbols[bits]);
        single[bits].length = (uint8_t)(whole ? lengths[bits] + size : 0);
        single[bits].first_length = (uint8_t)(whole ? lengths[bits] + size : lengths[bits]);
        single[bits].first_steps = whole ? steps : symbols[bits];
        single[bits].first_number = (int16_t)number;
    }
    for (uint32_t bits = 0; bits < 1 << AC_LOOKUP_BITS; bits++) {
        const struct ac_entry *one = &single[bits], *next = &single[bits << one->length & ((1 << AC_LOOKUP_BITS) - 1)];
        struct ac_entry *entry = &table->entries[bits];
        const int length = one->length + next->length; /* no branches: what follows can't be predicted */
        const bool both =
            (one->length != 0) & (next->length != 0) & (one->first_steps < BLOCK_STEPS) & (length <= AC_LOOKUP_BITS);
        entry->length = (uint8_t)(both ? length : one->length);
        entry->first_length = one->first_length;
        entry->first_steps = one->first_steps;
        entry->second_steps = (uint8_t)(one->first_steps + (both ? next->first_steps : 0));
        entry->first_number = one->first_number;
        entry->second_number = both ? next->first_number : one->first_number;
    }
}

/* Add up the whole codes in each AC_LOOKUP_BITS bits. */
void make_skim(struct ac *table) {
    if (table->skimmable)
        return;
    table->skimmable = true;
    uint8_t lengths[1 << AC_LOOKUP_BITS], symbols[1 << AC_LOOKUP_BITS];
    begin_codes(&table->codes, AC_LOOKUP_BITS, lengths, symbols);
    for (uint32_t bits = 0; bits < 1 << AC_LOOKUP_BITS; bits++) {
        uint32_t used = 0, before = 0, steps = 0;
        for (uint32_t rest = bits; used < AC_LOOKUP_BITS && steps < 63;
             rest = bits << used & ((1 << AC_LOOKUP_BITS) - 1)) {
            if (!lengths[rest] || used + lengths[rest] > AC_LOOKUP_BITS)
                break;
            before = steps;
            steps += steps_of(symbols[rest]);
            used += lengths[rest] + (symbols[rest] & 15u);
        }
        table->skim[bits] = used | steps << 8 | before << 16;
    }
}
