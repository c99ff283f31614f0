/*
 * Shrinks a JPEG plane by plane: luma and chroma as they are stored, without conversion to RGB and back.
 *
 * That avoids upsampling, converting and downsampling the chroma, and halves the data to resize. The filter is Lanczos
 * with three lobes, as Pillow's, in 16-bit integers, so that the result is the same on every machine.
 */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "crop.h"
#include "jpeg_error.h"

enum { WRITTEN = 0, WARNED = 1, FAILED = 2, TOO_LARGE = 3, NOT_TAKEN = 4 };

#define LOBES 3
#define STEPS 1024 /* entries of the table per lobe; linear interpolation between them has an error of 1e-6 */
#define FRACTION 6 /* fractional bits of a level in vertical sums; their inputs have one more */
#define WHITE (255 << FRACTION)
#define WEIGHT 14   /* fractional bits of a weight; at an edge weights exceed 1 */
#define LANES 32    /* values that are summed at once */
#define TAPS 16     /* inputs of a sum that are added at once */
#define MIN_SCALE 2 /* DCT scaling leaves at least this many times the final width and height */

static double lanczos[LOBES * STEPS + 2];

__attribute__((constructor)) static void fill_lanczos(void) {
    lanczos[0] = 1.0;
    for (int i = 1; i < LOBES * STEPS; i++) {
        double x = M_PI * i / STEPS;
        lanczos[i] = LOBES * sin(x) * sin(x / LOBES) / (x * x);
    }
}

struct levels { /* a decoded plane; levels times 2 ** (FRACTION + 1) */
    int16_t *first;
    int width, height; /* pixels of the image */
    size_t stride;
};

struct plane {
    uint8_t *first;
    int width, height; /* pixels of the image; rows are padded to `stride` bytes */
    size_t stride;
};

struct axis {
    int taps, row;   /* inputs per output; the same padded with zeros to a multiple of TAPS */
    int *first;      /* [side] */
    int16_t *weight; /* [side][row] */
};

static void *allocate(j_decompress_ptr jpeg, size_t size) {
    return jpeg->mem->alloc_large((j_common_ptr)jpeg, JPOOL_IMAGE, size);
}

static double weight_at(double x) {
    double step = fabs(x) * STEPS;
    int i = (int)step;
    return i < LOBES * STEPS ? lanczos[i] + (step - i) * (lanczos[i + 1] - lanczos[i]) : 0.0;
}

/* The weights of `side` outputs from `size` inputs; outputs are `scale` inputs apart. Integers with sum 2 ** WEIGHT. */
static struct axis compute_weights(j_decompress_ptr jpeg, int size, int side, double scale) {
    double spread = scale < 1.0 ? 1.0 : scale;
    int taps = (int)ceil(2 * LOBES * spread) + 1;
    taps = taps < size ? taps : size;
    struct axis axis = {.taps = taps, .row = (taps + TAPS - 1) / TAPS * TAPS};
    axis.first = allocate(jpeg, sizeof(int) * (size_t)side);
    axis.weight = allocate(jpeg, sizeof(int16_t) * (size_t)side * (size_t)axis.row);
    memset(axis.weight, 0, sizeof(int16_t) * (size_t)side * (size_t)axis.row);
    double *real = allocate(jpeg, sizeof(double) * (size_t)taps);
    for (int i = 0; i < side; i++) {
        double centre = (i + 0.5) * scale, sum = 0.0;
        int first = (int)floor(centre - LOBES * spread + 0.5), left = 1 << WEIGHT, most = 0;
        first = first < 0 ? 0 : first > size - taps ? size - taps : first;
        int16_t *weight = axis.weight + (size_t)i * (size_t)axis.row;
        for (int t = 0; t < taps; t++)
            sum += real[t] = weight_at((first + t + 0.5 - centre) / spread);
        for (int t = 0; t < taps; t++) {
            left -= weight[t] = (int16_t)lrint(real[t] / sum * (1 << WEIGHT));
            most = weight[t] > weight[most] ? t : most;
        }
        weight[most] = (int16_t)(weight[most] + left);
        axis.first[i] = first;
    }
    return axis;
}

/* The weighted sum of `taps` rows. `stride` is a multiple of LANES. */
static void down(const int16_t *rows, size_t stride, const int16_t *weight, int taps, int16_t *line) {
    for (size_t x = 0; x < stride; x += LANES) {
        int16_t sum[LANES] = {0};
        for (int t = 0; t < taps; t++) {
            const int16_t *row = rows + (size_t)t * stride + x;
            int16_t w = weight[t];
            for (int i = 0; i < LANES; i++) /* x86 and ARM have an instruction for this product */
                sum[i] = (int16_t)(sum[i] + (int16_t)(((row[i] * w >> 14) + 1) >> 1));
        }
        for (int i = 0; i < LANES; i++)
            line[x + (size_t)i] = sum[i] < 0 ? 0 : sum[i] > WHITE ? WHITE : sum[i];
    }
}

static void across(const int16_t *line, const struct axis *axis, int width, uint8_t *to) {
    for (int x = 0; x < width; x++) {
        const int16_t *level = line + axis->first[x], *weight = axis->weight + (size_t)x * (size_t)axis->row;
        int sum = 1 << (FRACTION + WEIGHT - 1),
            taps = axis->row / TAPS * TAPS; /* tells the compiler that it is a multiple */
        for (int t = 0; t < taps; t++)
            sum += level[t] * weight[t];
        sum >>= FRACTION + WEIGHT;
        to[x] = (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
    }
}

static void resize(j_decompress_ptr jpeg, struct levels from, double scale_x, double scale_y, struct plane to) {
    struct axis x = compute_weights(jpeg, from.width, to.width, scale_x),
                y = compute_weights(jpeg, from.height, to.height, scale_y);
    int16_t *line = allocate(jpeg, sizeof(int16_t) * (from.stride + TAPS));
    memset(line + from.stride, 0, sizeof(int16_t) * TAPS);
    for (int row = 0; row < to.height; row++) {
        down(from.first + (size_t)y.first[row] * from.stride, from.stride, y.weight + (size_t)row * (size_t)y.row,
             y.taps, line);
        across(line, &x, to.width, to.first + (size_t)row * to.stride);
    }
}

/* Fill the padding, which is encoded too, with the last column and row. */
static void pad(struct plane plane, int rows) {
    for (int y = 0; y < plane.height; y++) {
        uint8_t *row = plane.first + (size_t)y * plane.stride;
        memset(row + plane.width, row[plane.width - 1], plane.stride - (size_t)plane.width);
    }
    for (int y = plane.height; y < rows; y++)
        memcpy(plane.first + (size_t)y * plane.stride, plane.first + (size_t)(y - 1) * plane.stride, plane.stride);
}

static int rounded_up(int number, int step) { return (number + step - 1) / step * step; }

/* Decode all planes, as they are stored. */
static void decode(j_decompress_ptr jpeg, struct levels planes[3]) {
    JSAMPROW rows[3][MAX_SAMP_FACTOR * DCTSIZE];
    JSAMPARRAY asked[3] = {rows[0], rows[1], rows[2]};
    for (int c = 0; c < 3; c++) {
        jpeg_component_info *info = jpeg->comp_info + c;
        int unit = info->v_samp_factor * info->DCT_scaled_size;
        size_t stride = (size_t)rounded_up((int)info->width_in_blocks * info->DCT_scaled_size, LANES);
        planes[c].width = (int)info->downsampled_width;
        planes[c].height = (int)info->downsampled_height;
        planes[c].stride = stride;
        planes[c].first = allocate(jpeg, sizeof(int16_t) * stride * (size_t)unit * jpeg->total_iMCU_rows);
        uint8_t *strip = allocate(jpeg, stride * (size_t)unit);
        memset(strip, 0, stride * (size_t)unit);
        for (int y = 0; y < unit; y++)
            rows[c][y] = strip + (size_t)y * stride;
    }
    for (size_t line = 0; jpeg->output_scanline < jpeg->output_height; line++) {
        jpeg_read_raw_data(jpeg, asked, (JDIMENSION)(jpeg->max_v_samp_factor * jpeg->min_DCT_scaled_size));
        for (int c = 0; c < 3; c++) {
            size_t size =
                planes[c].stride * (size_t)(jpeg->comp_info[c].v_samp_factor * jpeg->comp_info[c].DCT_scaled_size);
            for (size_t i = 0; i < size; i++)
                planes[c].first[line * size + i] = (int16_t)(rows[c][0][i] << (FRACTION + 1));
        }
    }
}

static void encode(j_compress_ptr jpeg, const struct plane planes[3]) {
    JSAMPROW rows[3][2 * DCTSIZE];
    JSAMPARRAY given[3] = {rows[0], rows[1], rows[2]};
    jpeg_start_compress(jpeg, TRUE);
    for (int line = 0; jpeg->next_scanline < jpeg->image_height; line++) {
        for (int c = 0; c < 3; c++)
            for (int y = 0, unit = c ? DCTSIZE : 2 * DCTSIZE; y < unit; y++)
                rows[c][y] = planes[c].first + (size_t)(line * unit + y) * planes[c].stride;
        jpeg_write_raw_data(jpeg, given, 2 * DCTSIZE);
    }
    jpeg_finish_compress(jpeg);
}

/* The strongest scaling of the inverse DCT, in eighths (8, 4, 2, 1), that leaves MIN_SCALE times the final size. None
 * for a few rows or columns, since scaling would mix padding into them. */
static int dct_eighths(j_decompress_ptr jpeg, int width, int height) {
    int eighths = 8;
    while (width >= DCTSIZE && height >= DCTSIZE && eighths > 1 &&
           (int)jpeg->image_width * eighths / 2 >= 8 * MIN_SCALE * width &&
           (int)jpeg->image_height * eighths / 2 >= 8 * MIN_SCALE * height)
        eighths /= 2;
    return eighths;
}

static bool shrink_planes(j_decompress_ptr source, j_compress_ptr target, const uint8_t *data, int64_t size, int width,
                          int height) {
    struct levels from[3];
    struct plane to[3];
    jpeg_mem_src(source, (unsigned char *)data, (unsigned long)size);
    jpeg_read_header(source, TRUE);
    if (source->num_components != 3 || source->jpeg_color_space != JCS_YCbCr)
        return false;
    source->raw_data_out = TRUE;
    source->scale_num = (unsigned)dct_eighths(source, width, height);
    source->scale_denom = 8;
    jpeg_start_decompress(source);
    if (lacks_scans(source)) /* versions of libjpeg smooth it in different ways */
        return false;
    decode(source, from);
    for (int c = 0; c < 3; c++) {
        jpeg_component_info *info = source->comp_info + c;
        int step = c ? 2 : 1, rows = rounded_up(height, 2 * DCTSIZE) / step; /* 4:2:0 */
        double across = (double)info->h_samp_factor * info->DCT_scaled_size / (source->max_h_samp_factor * DCTSIZE);
        double down = (double)info->v_samp_factor * info->DCT_scaled_size / (source->max_v_samp_factor * DCTSIZE);
        to[c] = (struct plane){NULL, (width + step - 1) / step, (height + step - 1) / step,
                               (size_t)(rounded_up(width, 2 * DCTSIZE) / step)};
        to[c].first = allocate(source, to[c].stride * (size_t)rows);
        resize(source, from[c], across * step * source->image_width / width,
               down * step * source->image_height / height, to[c]);
        pad(to[c], rows);
    }
    encode(target, to);
    jpeg_finish_decompress(source);
    return true;
}

/*
 * Shrink the JPEG of `size` bytes to `width` x `height` pixels, neither larger than before, and write it to `out`, of
 * `capacity` bytes, with 4:2:0 at `quality` (1 to 100) and a restart marker every `interval` MCUs (0: none). Returns
 *   WRITTEN, with the number of bytes in `*out_size`;
 *   WARNED, the same if libjpeg warns of the JPEG, with its message in `text`, of JMSG_LENGTH_MAX (200) bytes;
 *   FAILED, with its message, if the JPEG cannot be read;
 *   TOO_LARGE if the result does not fit into `out`;
 *   NOT_TAKEN if the JPEG does not have three components Y, Cb and Cr, or lacks scans.
 */
int shrink_jpeg(const uint8_t *data, int64_t size, int width, int height, int quality, int interval, uint8_t *out,
                int64_t capacity, int64_t *out_size, char *text) {
    struct jpeg_decompress_struct source = {0};
    struct jpeg_compress_struct target = {0};
    struct jpeg_error jpeg_error;
    unsigned char *written = out; /* libjpeg allocates memory itself if that is too small */
    unsigned long written_size = (unsigned long)capacity;
    volatile int outcome = FAILED;

    source.err = target.err = jpeg_error_init(&jpeg_error, text);
    if (setjmp(jpeg_error.escape) == 0) {
        jpeg_create_decompress(&source);
        jpeg_create_compress(&target);
        jpeg_mem_dest(&target, &written, &written_size);
        target.image_width = (JDIMENSION)width;
        target.image_height = (JDIMENSION)height;
        target.input_components = 3;
        target.in_color_space = JCS_YCbCr;
        jpeg_set_defaults(&target); /* 4:2:0 */
        jpeg_set_quality(&target, quality, TRUE);
        target.raw_data_in = TRUE;
        target.restart_interval = (unsigned)interval;
        if (!shrink_planes(&source, &target, data, size, width, height))
            outcome = NOT_TAKEN;
        else
            outcome = written != out ? TOO_LARGE : text[0] ? WARNED : WRITTEN;
        *out_size = (int64_t)written_size;
    }
    free_target(&target, &written, out);
    jpeg_destroy_compress(&target);
    jpeg_destroy_decompress(&source);
    return outcome;
}
