/* CRC-32C, the checksum of samples (Castagnoli's polynomial, as in iSCSI: RFC 3720, B.4). */
#ifndef CHECKSUM_H
#define CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of data whose first part has the checksum `before`, and whose rest are these `size` bytes. The checksum
 * of no data is 0. */
uint32_t crc32c(uint32_t before, const void *data, size_t size);

/* The checksums of every `band` bytes of the data, of which the last may be fewer, in order. */
void crc32c_bands(const uint8_t *data, int64_t size, int64_t band, uint32_t *checksums);

#endif
