#include "scratch.h"

#include <pthread.h>
#include <stdlib.h>

#include <jerror.h>

#define SLACK 64 /* bytes after each buffer, so that code may read whole vectors at its end */

static pthread_key_t scratch_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

void *ensure_capacity(struct buffer *buffer, size_t size) {
    if (!buffer->data || buffer->size < size) {
        free(buffer->data);
        buffer->size = size + size / 4;
        buffer->data = malloc(buffer->size + SLACK);
        if (!buffer->data)
            buffer->size = 0;
    }
    return buffer->data;
}

static void raise_error(j_common_ptr jpeg) {
    struct scratch *scratch = (struct scratch *)jpeg;
    jpeg->err->format_message(jpeg, scratch->message);
    longjmp(scratch->damaged, 1);
}

/* After a warning libjpeg continues with grey pixels, so warnings are errors, except for those about headers. */
static void warn(j_common_ptr jpeg, int level) {
    int code = jpeg->err->msg_code;
    if (level < 0 && code != JWRN_JFIF_MAJOR && code != JWRN_ADOBE_XFORM && code != JWRN_BOGUS_ICC)
        raise_error(jpeg);
}

static void ignore_output(j_common_ptr jpeg) { (void)jpeg; }

static void set_up_errors(struct scratch *scratch) {
    scratch->jpeg.err = jpeg_std_error(&scratch->errors);
    scratch->errors.error_exit = raise_error;
    scratch->errors.emit_message = warn;
    scratch->errors.output_message = ignore_output;
    scratch->entropy.damaged = &scratch->damaged;
    scratch->entropy.message = scratch->message;
}

static void free_scratch(void *given) {
    struct scratch *scratch = given;
    struct buffer *buffers[] = {&scratch->bytes,     &scratch->table,      &scratch->planes,     &scratch->chroma,
                                &scratch->pixels,    &scratch->across,     &scratch->down,       &scratch->columns,
                                &scratch->sums,      &scratch->weights[0], &scratch->weights[1], &scratch->ranges[0],
                                &scratch->ranges[1], &scratch->doubles,    &scratch->move_arrays, &scratch->restored};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        free(buffers[i]->data);
    free(scratch->entropy.unstuffed);
    free(scratch);
}

static void make_key(void) { pthread_key_create(&scratch_key, free_scratch); }

struct scratch *thread_scratch(void) {
    pthread_once(&once, make_key);
    struct scratch *scratch = pthread_getspecific(scratch_key);
    if (!scratch && (scratch = calloc(1, sizeof *scratch))) {
        set_up_errors(scratch);
        pthread_setspecific(scratch_key, scratch);
    }
    return scratch;
}
