/* An error manager for libjpeg: an error jumps to `escape`; the first warning, or else the error, becomes `text`. */
#ifndef JPEG_ERROR_H
#define JPEG_ERROR_H

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>

struct jpeg_error {
    struct jpeg_error_mgr manager;
    jmp_buf escape;
    char *text; /* JMSG_LENGTH_MAX (200) bytes; empty without a warning or error */
};

static void jpeg_error_exit(j_common_ptr codec) {
    struct jpeg_error *jpeg_error = (struct jpeg_error *)codec->err;
    codec->err->format_message(codec, jpeg_error->text);
    longjmp(jpeg_error->escape, 1);
}

static void jpeg_error_message(j_common_ptr codec, int level) {
    struct jpeg_error *jpeg_error = (struct jpeg_error *)codec->err;
    if (level < 0 && jpeg_error->text[0] == '\0') /* traces are 0 or above; libjpeg resets its own count of warnings */
        codec->err->format_message(codec, jpeg_error->text);
}

/* Set up the manager, which writes to `text`, and return it for a codec's field `err`. The caller sets `escape`. */
static inline struct jpeg_error_mgr *jpeg_error_init(struct jpeg_error *jpeg_error, char *text) {
    jpeg_error->text = text;
    text[0] = '\0';
    jpeg_std_error(&jpeg_error->manager);
    jpeg_error->manager.error_exit = jpeg_error_exit;
    jpeg_error->manager.emit_message = jpeg_error_message;
    return &jpeg_error->manager;
}

/* Free what libjpeg has allocated in place of `out`, where that was too small for jpeg_mem_dest(target, written, ...);
 * also after an error, when only libjpeg has its address until its destination is terminated. */
static inline void free_target(j_compress_ptr target, unsigned char **written, const unsigned char *out) {
    if (target->dest)
        target->dest->term_destination(target);
    if (*written != out)
        free(*written);
}

#endif
