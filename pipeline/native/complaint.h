/* libjpeg's errors as a jump out of the work, and the first of its warnings (else its error) as words. */
#ifndef COMPLAINT_H
#define COMPLAINT_H

#include <setjmp.h>
#include <stdio.h>

#include <jpeglib.h>

struct complaint {
    struct jpeg_error_mgr manager;
    jmp_buf escape;
    char *text; /* JMSG_LENGTH_MAX (200) bytes; empty where there is none */
};

static void complain_fail(j_common_ptr codec) {
    struct complaint *complaint = (struct complaint *)codec->err;
    codec->err->format_message(codec, complaint->text);
    longjmp(complaint->escape, 1);
}

static void complain_remark(j_common_ptr codec, int level) {
    struct complaint *complaint = (struct complaint *)codec->err;
    if (level < 0 && complaint->text[0] == '\0') /* traces are not below 0; libjpeg's own count starts anew on the way */
        codec->err->format_message(codec, complaint->text);
}

static inline struct jpeg_error_mgr *complain_to(struct complaint *complaint, char *text) {
    complaint->text = text;
    text[0] = '\0';
    jpeg_std_error(&complaint->manager);
    complaint->manager.error_exit = complain_fail;
    complaint->manager.emit_message = complain_remark;
    return &complaint->manager;
}

#endif
