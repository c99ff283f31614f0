/* Writes the JPEG of a container of coefficients again. */
#ifndef RESTORE_H
#define RESTORE_H

#include "scratch.h"

/* Restore the JPEG of a container of `size` bytes, with CONTAINER_SLACK more, into a buffer of `scratch`, which is valid
 * until its next use. Returns its bytes; 0, with the reason in `scratch->message`, if the container is damaged. */
size_t restore(struct scratch *scratch, const uint8_t *container, size_t size, const uint8_t **jpeg);

#endif
