#include "planes.h"

#include <string.h>

#include <jpegint.h>

#include "colour.h"

#define COMPONENTS 3
#define PADDING 64 /* bytes before and after the planes that may be read */

/* The MCUs around a crop: columns from `left`, rows from `top`, up to and without `right` and `bottom`. */
struct mcus {
    unsigned left, top, right, bottom;
};

/* The samples of a component in these MCUs. */
struct plane {
    uint8_t *samples;
    size_t stride;
    unsigned wide, tall; /* samples of an MCU */
    int left, top;       /* place of the first sample in the image's component */
};

static bool is_grey(j_decompress_ptr jpeg) {
    return jpeg->jpeg_color_space == JCS_GRAYSCALE && jpeg->num_components == 1;
}

bool planes_take(j_decompress_ptr jpeg) {
    const jpeg_component_info *of = jpeg->comp_info;
    if (jpeg->progressive_mode || jpeg->arith_code || jpeg->inputctl->has_multiple_scans)
        return false;
    return is_grey(jpeg) ||
           (jpeg->jpeg_color_space == JCS_YCbCr && jpeg->comps_in_scan == COMPONENTS && of[0].h_samp_factor <= 2 &&
            of[0].v_samp_factor <= of[0].h_samp_factor && of[1].h_samp_factor == 1 && of[1].v_samp_factor == 1 &&
            of[2].h_samp_factor == 1 && of[2].v_samp_factor == 1 && of[1].downsampled_width > 2);
}

/* The first MCU that pixels from `from` up to `end` need along one side, and the one after the last. `halved` says
 * whether chroma has half as many samples along it, `size` how many: upsampling then reads the neighbours. */
static void reach(int from, int end, int halved, JDIMENSION size, unsigned *first, unsigned *after) {
    const int before = (from >> halved) - halved, last = ((end - 1) >> halved) + halved;
    *first = (unsigned)(before < 0 ? 0 : before) / DCTSIZE;
    *after = (unsigned)(last < (int)size ? last : (int)size - 1) / DCTSIZE + 1;
}

/* Set the planes of these MCUs, in a buffer of `scratch`. Returns false if out of memory. */
static bool make_planes(struct scratch *scratch, const struct mcus *around, struct plane *planes) {
    const jpeg_component_info *of = scratch->jpeg.comp_info;
    size_t size = PADDING, starts[COMPONENTS];
    const int components = scratch->jpeg.num_components;
    for (int c = 0; c < components; c++) {
        const unsigned wide = DCTSIZE * (unsigned)of[c].MCU_width, tall = DCTSIZE * (unsigned)of[c].MCU_height;
        const size_t stride = wide * (around->right - around->left);
        planes[c] = (struct plane){NULL, stride, wide, tall, (int)(around->left * wide), (int)(around->top * tall)};
        starts[c] = size;
        size += stride * tall * (around->bottom - around->top);
    }
    uint8_t *samples = ensure_capacity(&scratch->planes, size + PADDING);
    for (int c = 0; c < components && samples; c++)
        planes[c].samples = samples + starts[c];
    return samples;
}

/* The sample at a place of the image's component; columns just beside the plane are in the buffer, too. */
static const uint8_t *sample_at(const struct plane *plane, int x, int y) {
    return plane->samples + (ptrdiff_t)(y - plane->top) * (ptrdiff_t)plane->stride + (x - plane->left);
}

static void decode_mcus(struct scratch *scratch, struct coefficients *coefficients, const struct mcus *around,
                        const struct plane *planes) {
    j_decompress_ptr jpeg = &scratch->jpeg;
    JCOEF blocks[D_MAX_BLOCKS_IN_MCU][DCTSIZE2] __attribute__((aligned(64)));
    unsigned last[D_MAX_BLOCKS_IN_MCU];
    struct idct idct[COMPONENTS];
    const int components = jpeg->num_components;
    bool overflows = false;
    for (int c = 0; c < components; c++)
        idct_begin(&idct[c], jpeg, &jpeg->comp_info[c]);
    for (unsigned row = around->top; row < around->bottom; row++)
        for (unsigned column = around->left; column < around->right; column++) {
            const unsigned mcu = row * jpeg->MCUs_per_row + column;
            if (coefficients)
                coefficients_read(coefficients, mcu, blocks, last);
            else
                entropy_read(&scratch->entropy, mcu, blocks, last);
            for (int c = 0, b = 0; c < components; c++) {
                const struct plane *plane = &planes[c];
                uint8_t *to = plane->samples + (row - around->top) * plane->tall * plane->stride;
                to += (column - around->left) * plane->wide;
                for (unsigned y = 0; y < plane->tall; y += DCTSIZE, to += DCTSIZE * plane->stride)
                    for (unsigned x = 0; x < plane->wide; x += DCTSIZE, b++)
                        idct_block(&idct[c], blocks[b], last[b], to + x, plane->stride);
            }
        }
    for (int c = 0; c < components; c++)
        overflows |= idct[c].overflows;
    if (overflows)
        entropy_doubt(&scratch->entropy, "has coefficients beyond any image's");
}

static int within(int i, int size) { return i < 0 ? 0 : i < size ? i : size - 1; }

/* Convert the plane of a grey image to the crop's pixels. Returns false if out of memory. */
static bool convert_grey(struct scratch *scratch, const struct crop *crop, const struct plane *plane, uint8_t *rows,
                         size_t stride) {
    const size_t size = (size_t)crop->width + COLOUR_BATCH;
    uint8_t *chroma = ensure_capacity(&scratch->chroma, size);
    if (!chroma)
        return false;
    memset(chroma, 128, size);
    for (int y = crop->top; y < crop->top + crop->height; y++, rows += stride)
        colour_row(sample_at(plane, crop->left, y), chroma, chroma, crop->width, rows);
    return true;
}

/* Convert the planes to the crop's pixels. Returns false if out of memory. */
static bool convert(struct scratch *scratch, const struct crop *crop, const struct plane *planes, uint8_t *rows,
                    size_t stride) {
    const jpeg_component_info *of = scratch->jpeg.comp_info;
    const int across = of[0].h_samp_factor - 1, down = of[0].v_samp_factor - 1; /* whether chroma is halved */
    const int wide = (int)of[1].downsampled_width, tall = (int)of[1].downsampled_height;
    const int left = crop->left >> across, count = ((crop->left + crop->width - 1) >> across) - left + 1;
    const size_t line = 2 * (size_t)count + COLOUR_BATCH;
    uint16_t *sums = ensure_capacity(&scratch->chroma, sizeof *sums * ((size_t)count + 2) + 2 * line);
    if (!sums)
        return false;
    for (int y = crop->top; y < crop->top + crop->height; y++, rows += stride) {
        const int row = y >> down, second = within(down ? row - 1 + 2 * (y & 1) : row, tall);
        const uint8_t *chroma[] = {sample_at(&planes[1], left, row), sample_at(&planes[2], left, row)};
        for (int c = 0; c < 2 && across; c++) {
            const uint8_t *far = sample_at(&planes[1 + c], left, second);
            const struct chroma from = {chroma[c], far, count, down, left == 0, left + count == wide};
            uint8_t *upsampled = (uint8_t *)(sums + count + 2) + line * (size_t)c;
            upsample_row(&from, sums, upsampled);
            chroma[c] = upsampled + (crop->left & 1);
        }
        colour_row(sample_at(&planes[0], crop->left, y), chroma[0], chroma[1], crop->width, rows);
    }
    return true;
}

bool planes_decode(struct scratch *scratch, struct coefficients *coefficients, const struct crop *crop, uint8_t *rows,
                   size_t stride) {
    const jpeg_component_info *of = scratch->jpeg.comp_info, *smallest = &of[scratch->jpeg.num_components - 1];
    const int right = crop->left + crop->width, bottom = crop->top + crop->height;
    struct mcus around;
    struct plane planes[COMPONENTS];
    reach(crop->left, right, of[0].MCU_width - 1, smallest->downsampled_width, &around.left, &around.right);
    reach(crop->top, bottom, of[0].MCU_height - 1, smallest->downsampled_height, &around.top, &around.bottom);
    if (!make_planes(scratch, &around, planes))
        return false;
    if (coefficients)
        coefficients_begin(coefficients, &scratch->jpeg);
    else
        entropy_begin(&scratch->entropy, &scratch->jpeg);
    decode_mcus(scratch, coefficients, &around, planes);
    return is_grey(&scratch->jpeg) ? convert_grey(scratch, crop, planes, rows, stride)
                                   : convert(scratch, crop, planes, rows, stride);
}
