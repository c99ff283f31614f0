#include "lookup.h"

void make_dc(struct dc *table, const JHUFF_TBL *from) {
    if (!make_codes(&table->codes, from))
        return;
    begin_codes(&table->codes, DC_LOOK, table->length, table->size);
    for (uint32_t bits = 0; bits < 1 << DC_LOOK; bits++)
        table->size[bits] &= 15;
}

/* One coefficient for each beginning, then a second after the first. */
void make_ac(struct ac *table, const JHUFF_TBL *from) {
    if (!make_codes(&table->codes, from))
        return;
    table->skimmable = false;
    uint8_t lengths[1 << AC_LOOK], symbols[1 << AC_LOOK];
    begin_codes(&table->codes, AC_LOOK, lengths, symbols);
    look first[1 << AC_LOOK];
    for (uint32_t bits = 0; bits < 1 << AC_LOOK; bits++) {
        int32_t size = symbols[bits] & 15, left = AC_LOOK - lengths[bits] - size, ones = (1 << size) - 1;
        int32_t number = (int32_t)bits >> (left < 0 ? 0 : left) & ones;
        number -= number <= ones >> 1 ? ones : 0; /* as `extend` */
        look value = (uint16_t)number, used = lengths[bits] + (look)size;
        look seen = used | used << 8 | (look)steps_of(symbols[bits]) << 16 | value << 32 | value << 48;
        first[bits] = lengths[bits] && left >= 0 ? seen : UNSEEN | lengths[bits] | (look)symbols[bits] << 16;
    }
    for (look bits = 0; bits < 1 << AC_LOOK; bits++) {
        look one = first[bits], used = one & 63, two = first[bits << used & ((1 << AC_LOOK) - 1)];
        bool both = !((one | two) & UNSEEN) & ((one >> 16 & 255) < BLOCK) & (used + (two & 63) <= AC_LOOK);
        look numbers = (one & 0xFFFF00000000) | two >> 48 << 48, steps = (one & 0xFF0000) | (two & 0xFF0000) << 8;
        table->look[bits] = both ? (used + (two & 63)) | used << 8 | steps | numbers : one;
    }
}

/* The whole codes in AC_LOOK bits one after the other, their numbers passed over. */
void make_skim(struct ac *table) {
    if (table->skimmable)
        return;
    table->skimmable = true;
    uint8_t lengths[1 << AC_LOOK], symbols[1 << AC_LOOK];
    begin_codes(&table->codes, AC_LOOK, lengths, symbols);
    for (uint32_t bits = 0; bits < 1 << AC_LOOK; bits++) {
        uint32_t used = 0, before = 0, steps = 0;
        for (uint32_t rest = bits; used < AC_LOOK && steps < 63; rest = bits << used & ((1 << AC_LOOK) - 1)) {
            if (!lengths[rest] || used + lengths[rest] > AC_LOOK)
                break;
            before = steps;
            steps += steps_of(symbols[rest]);
            used += lengths[rest] + (symbols[rest] & 15u);
        }
        table->skim[bits] = used | steps << 8 | before << 16;
    }
}
