#include <stdio.h>

#include <jpeglib.h>

#define TEXT(name) #name
#define TEXT_OF(macro) TEXT(macro)

/* The name and version of the JPEG library that this was compiled for, as text. */
const char *jpeg_library(void) {
#ifdef LIBJPEG_TURBO_VERSION
    return "libjpeg-turbo " TEXT_OF(LIBJPEG_TURBO_VERSION);
#else
    return "libjpeg " TEXT_OF(JPEG_LIB_VERSION);
#endif
}
