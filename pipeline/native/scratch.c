#include "scratch.h"

#include <pthread.h>
#include <stdlib.h>

#include <jerror.h>

#define SLACK 64 /* bytes after each buffer, so that whole strips may be read at its end */

static pthread_key_t mine;
static pthread_once_t once = PTHREAD_ONCE_INIT;

void *room(struct buffer *buffer, size_t size) {
    if (!buffer->data || buffer->size < size) {
        free(buffer->data);
        buffer->size = size + size / 4;
        buffer->data = malloc(buffer->size + SLACK);
        if (!buffer->data)
            buffer->size = 0;
    }
    return buffer->data;
}

static void stop(j_common_ptr jpeg) {
    struct scratch *scratch = (struct scratch *)jpeg;
    jpeg->err->format_message(jpeg, scratch->why);
    longjmp(scratch->damaged, 1);
}

/* libjpeg goes on after a warning, with grey where it knows nothing. Of headers alone that harms no pixel. */
static void warn(j_common_ptr jpeg, int level) {
    int code = jpeg->err->msg_code;
    if (level < 0 && code != JWRN_JFIF_MAJOR && code != JWRN_ADOBE_XFORM && code != JWRN_BOGUS_ICC)
        stop(jpeg);
}

static void say_nothing(j_common_ptr jpeg) { (void)jpeg; }

static void begin_jpeg(struct scratch *scratch) {
    scratch->jpeg.err = jpeg_std_error(&scratch->errors);
    scratch->errors.error_exit = stop;
    scratch->errors.emit_message = warn;
    scratch->errors.output_message = say_nothing;
    jpeg_create_decompress(&scratch->jpeg);
    scratch->entropy.damaged = &scratch->damaged;
    scratch->entropy.why = scratch->why;
}

static void free_scratch(void *given) {
    struct scratch *scratch = given;
    jpeg_destroy_decompress(&scratch->jpeg);
    struct buffer *buffers[] = {&scratch->bytes,      &scratch->table,      &scratch->pixels,    &scratch->passed,
                                &scratch->line,       &scratch->weights[0], &scratch->weights[1], &scratch->places[0],
                                &scratch->places[1],  &scratch->reals,      &scratch->across,    &scratch->quads,
                                &scratch->sums,       &scratch->moving};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        free(buffers[i]->data);
    free(scratch->entropy.plain);
    free(scratch);
}

static void make_key(void) { pthread_key_create(&mine, free_scratch); }

struct scratch *own_scratch(void) {
    pthread_once(&once, make_key);
    struct scratch *scratch = pthread_getspecific(mine);
    if (!scratch && (scratch = calloc(1, sizeof *scratch))) {
        begin_jpeg(scratch);
        pthread_setspecific(mine, scratch);
    }
    return scratch;
}
