#include "lookup.h"

void make_dc(struct dc *table, const JHUFF_TBL *from) {
    if (!make_codes(&table->codes, from))
        return;
    begin_codes(&table->codes, DC_LOOKUP_BITS, table->length, table->size);
    for (uint32_t bits = 0; bits < 1 << DC_LOOKUP_BITS; bits++)
        table->size[bits] &= 15;
}

/* First one coefficient per entry, then a second one where it fits. */
void make_ac(struct ac *table, const JHUFF_TBL *from) {
    if (!make_codes(&table->codes, from))
        return;
    table->skimmable = false;
    uint8_t lengths[1 << AC_LOOKUP_BITS], symbols[1 << AC_LOOKUP_BITS];
    begin_codes(&table->codes, AC_LOOKUP_BITS, lengths, symbols);
    ac_entry first[1 << AC_LOOKUP_BITS];
    for (uint32_t bits = 0; bits < 1 << AC_LOOKUP_BITS; bits++) {
        int32_t size = symbols[bits] & 15, left = AC_LOOKUP_BITS - lengths[bits] - size, ones = (1 << size) - 1;
        int32_t number = (int32_t)bits >> (left < 0 ? 0 : left) & ones;
        number -= number <= ones >> 1 ? ones : 0; /* as `extend` */
        ac_entry value = (uint16_t)number, used = lengths[bits] + (ac_entry)size;
        ac_entry entry = used | used << 8 | (ac_entry)steps_of(symbols[bits]) << 16 | value << 32 | value << 48;
        first[bits] = lengths[bits] && left >= 0 ? entry : INCOMPLETE | lengths[bits] | (ac_entry)symbols[bits] << 16;
    }
    for (ac_entry bits = 0; bits < 1 << AC_LOOKUP_BITS; bits++) {
        ac_entry one = first[bits], used = one & 63, two = first[bits << used & ((1 << AC_LOOKUP_BITS) - 1)];
        bool both = !((one | two) & INCOMPLETE) & ((one >> 16 & 255) < BLOCK) & (used + (two & 63) <= AC_LOOKUP_BITS);
        ac_entry numbers = (one & 0xFFFF00000000) | two >> 48 << 48, steps = (one & 0xFF0000) | (two & 0xFF0000) << 8;
        table->entries[bits] = both ? (used + (two & 63)) | used << 8 | steps | numbers : one;
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
