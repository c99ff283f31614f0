/* Rewrites a JPEG with restart markers and optimised Huffman tables, from its symbols or else its coefficients. */
#include <stdint.h>
#include <stdlib.h>

#include "crop.h"
#include "jpeg_error.h"
#include "recode.h"

enum { WRITTEN = 0, WARNED = 1, FAILED = 2, TOO_LARGE = 3, NOT_TAKEN = 4 };

/* Returns false, having written nothing, if the source lacks scans: decoders smooth it, and not what would be written. */
static bool write_coefficients(j_decompress_ptr source, j_compress_ptr target, int interval) {
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(source);
    if (lacks_scans(source))
        return false;
    jpeg_copy_critical_parameters(source, target);
    target->optimize_coding = TRUE;
    target->restart_interval = (unsigned)interval;
    jpeg_write_coefficients(target, coefficients);
    jpeg_finish_compress(target);
    jpeg_finish_decompress(source);
    return true;
}

/*
 * Write the JPEG of `size` bytes to `out`, of `capacity` bytes, with a restart marker every `interval` MCUs and without
 * comments and metadata. The pixels do not change. Returns
 *   WRITTEN, with the number of bytes in `*out_size`;
 *   WARNED if libjpeg warns of the entropy-coded data, or FAILED if it cannot read them, with its message in `text`, of
 *   JMSG_LENGTH_MAX (200) bytes;
 *   TOO_LARGE if the result does not fit into `out`;
 *   NOT_TAKEN if the JPEG is progressive and lacks scans, with libjpeg's warning, if there is one, in `text`.
 */
int restart_jpeg(const uint8_t *data, int64_t size, int interval, uint8_t *out, int64_t capacity, int64_t *out_size,
                 char *text) {
    struct jpeg_decompress_struct source = {0};
    struct jpeg_compress_struct target = {0};
    struct jpeg_error jpeg_error;
    struct symbols symbols = {0};
    unsigned char *written = out; /* libjpeg allocates memory itself if that is too small */
    unsigned long written_size = (unsigned long)capacity;
    volatile int outcome = FAILED;

    source.err = target.err = jpeg_error_init(&jpeg_error, text);
    if (setjmp(jpeg_error.escape) == 0) {
        jpeg_create_decompress(&source);
        jpeg_create_compress(&target);
        jpeg_mem_src(&source, (unsigned char *)data, (unsigned long)size);
        jpeg_mem_dest(&target, &written, &written_size);
        jpeg_read_header(&source, TRUE);
        bool fits = true, taken = true;
        if (text[0] || !recode(&source, &target, interval, &symbols, &fits))
            taken = write_coefficients(&source, &target, interval);
        outcome = !taken ? NOT_TAKEN : written != out || !fits ? TOO_LARGE : text[0] ? WARNED : WRITTEN;
        *out_size = (int64_t)written_size;
    }
    free(symbols.list);
    free_target(&target, &written, out);
    jpeg_destroy_compress(&target);
    jpeg_destroy_decompress(&source);
    return outcome;
}

/*
 * Read the JPEG of `size` bytes, of any kind that libjpeg reads. Returns WRITTEN; WARNED if libjpeg warns of it, or FAILED
 * if it cannot read it, with its message in `text`, of JMSG_LENGTH_MAX (200) bytes.
 */
int check_jpeg(const uint8_t *data, int64_t size, char *text) {
    struct jpeg_decompress_struct source = {0};
    struct jpeg_error jpeg_error;
    volatile int outcome = FAILED;

    source.err = jpeg_error_init(&jpeg_error, text);
    if (setjmp(jpeg_error.escape) == 0) {
        jpeg_create_decompress(&source);
        jpeg_mem_src(&source, (unsigned char *)data, (unsigned long)size);
        jpeg_read_header(&source, TRUE);
        source.scale_denom = 8 * source.scale_num; /* all symbols are read, and few pixels made */
        source.out_color_space = source.jpeg_color_space;
        source.do_fancy_upsampling = FALSE;
        jpeg_start_decompress(&source);
        JSAMPARRAY row = source.mem->alloc_sarray((j_common_ptr)&source, JPOOL_IMAGE,
                                                  source.output_width * (JDIMENSION)source.output_components, 1);
        while (source.output_scanline < source.output_height)
            jpeg_read_scanlines(&source, row, 1);
        jpeg_finish_decompress(&source);
        outcome = text[0] ? WARNED : WRITTEN;
    }
    jpeg_destroy_decompress(&source);
    return outcome;
}
