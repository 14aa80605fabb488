/* Weights as the kernels read them: tiles of TILE outputs x BLOCK inputs, in order of use.
 *
 * A tile holds, for its 16 outputs, the scales and then the numbers, input by input:
 *   Q4 (Q4_0, Q4_1)  half scale[16], half minimum[16], byte[16][16]: input j low, j + 16 high
 *   Q4_K             half scale[16], half minimum[16], byte scale[16], byte minimum[16], as Q4
 *   Q8_0             half scale[16], int8[32][16]
 *   Q6_K             half scale[16], int8 scale[2][16] (inputs 0-15, 16-31), int8[32][16]
 *   F16, BF16, F32   number[32][16] */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "internal.h"
#include "vec.h"

#define HUGE_PAGE ((size_t)2 << 20)

void *new_memory(size_t bytes) {
    size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    void *p = NULL;
    bytes = round_up(bytes ? bytes : 1, alignment);
    if (posix_memalign(&p, alignment, bytes)) return NULL;
#ifdef MADV_HUGEPAGE
    if (alignment == HUGE_PAGE) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    memset(p, 0, bytes);
    return p;
}

/* One format: inputs and bytes of a block in the file, bytes of a packed tile. */
static const struct {
    int inputs, bytes, tile;
} FORMATS[] = {
    [D3D_F32] = {1, 4, 2048},     [D3D_F16] = {1, 2, 1024},     [D3D_BF16] = {1, 2, 1024},
    [D3D_Q4_0] = {32, 18, 320},   [D3D_Q4_1] = {32, 20, 320},   [D3D_Q8_0] = {32, 34, 544},
    [D3D_Q4_K] = {256, 144, 352}, [D3D_Q6_K] = {256, 210, 576},
};

int64_t d3d_row_bytes(int format, int columns) {
    if (format < 0 || format > D3D_Q6_K || columns < 1 || columns % FORMATS[format].inputs)
        return 0;
    return (int64_t)columns / FORMATS[format].inputs * FORMATS[format].bytes;
}

static void put16(uint8_t *at, int lane, const uint8_t *from) { memcpy(at + 2 * lane, from, 2); }

/* -8 x of a half. Returns 0 if that is beyond the largest half. */
static int minus_eight(const uint8_t *half, uint8_t *out) {
    uint16_t h;
    memcpy(&h, half, 2);
    uint16_t sign = (h & 0x8000) ^ 0x8000, exponent = (h >> 10) & 31, rest = h & 0x3ff;
    if (exponent >= 28) return 0;
    for (int i = 0; i < 3; i++) { /* doubled thrice; a denormal's fraction moves up instead */
        if (exponent) exponent++;
        else if ((rest <<= 1) & 0x400) exponent = 1, rest &= 0x3ff;
    }
    h = (uint16_t)(sign | exponent << 10 | rest);
    memcpy(out, &h, 2);
    return 1;
}

static int pack_q4(uint8_t *tile, int lane, const uint8_t *block, int format) {
    uint8_t minimum[2];
    if (format == D3D_Q4_1) memcpy(minimum, block + 2, 2);
    else if (!minus_eight(block, minimum)) return 0;
    put16(tile, lane, block);
    put16(tile + 32, lane, minimum);
    const uint8_t *numbers = block + (format == D3D_Q4_1 ? 4 : 2);
    for (int j = 0; j < 16; j++) tile[64 + j * TILE + lane] = numbers[j];
    return 1;
}

static void pack_q4_k(uint8_t *tile, int lane, const uint8_t *super, int sub) {
    const uint8_t *s = super + 4, *numbers = super + 16 + sub / 2 * 32;
    int low = sub < 4;
    int shift = sub % 2 * 4;
    put16(tile, lane, super);
    put16(tile + 32, lane, super + 2);
    tile[64 + lane] = low ? s[sub] & 63 : (s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4;
    tile[80 + lane] = low ? s[sub + 4] & 63 : s[sub + 4] >> 4 | (s[sub] >> 6) << 4;
    for (int j = 0; j < 16; j++) {
        int first = numbers[j] >> shift & 15, second = numbers[j + 16] >> shift & 15;
        tile[96 + j * TILE + lane] = (uint8_t)(first | second << 4);
    }
}

static void pack_q6_k(uint8_t *tile, int lane, const uint8_t *super, int sub) {
    int half = sub / 4, quarter = sub % 4; /* of 128 and of 32 inputs */
    const uint8_t *low = super + half * 64 + quarter % 2 * 32, *high = super + 128 + half * 32;
    put16(tile, lane, super + 208);
    for (int i = 0; i < 2; i++) tile[32 + i * TILE + lane] = super[192 + 2 * sub + i];
    for (int j = 0; j < BLOCK; j++) {
        int four = low[j] >> (quarter / 2 * 4) & 15, two = high[j] >> (2 * quarter) & 3;
        tile[64 + j * TILE + lane] = (uint8_t)(int8_t)((four | two << 4) - 32);
    }
}

static int pack_block(uint8_t *tile, int lane, int format, const uint8_t *row, int block,
                      int columns) {
    size_t size = (size_t)FORMATS[format].bytes;
    const uint8_t *super = row + (size_t)block / 8 * size;
    switch (format) {
    case D3D_Q4_0:
    case D3D_Q4_1: return pack_q4(tile, lane, row + (size_t)block * size, format);
    case D3D_Q4_K: pack_q4_k(tile, lane, super, block % 8); return 1;
    case D3D_Q6_K: pack_q6_k(tile, lane, super, block % 8); return 1;
    case D3D_Q8_0:
        put16(tile, lane, row + (size_t)block * size);
        for (int j = 0; j < BLOCK; j++)
            tile[32 + j * TILE + lane] = row[(size_t)block * size + 2 + (size_t)j];
        return 1;
    default:
        for (int j = 0; j < BLOCK && block * BLOCK + j < columns; j++)
            memcpy(tile + (size_t)(j * TILE + lane) * size,
                   row + (size_t)(block * BLOCK + j) * size, size);
        return 1;
    }
}

/* Row of the file that holds output o. llama.cpp interleaves a head's two halves. */
static int source_row(int o, int rows, int heads) {
    if (!heads) return o;
    int size = rows / heads, at = o % size, half = size / 2;
    return o - at + at % half * 2 + at / half;
}

int matrix_pack(matrix *m, int format, int rows, int columns, const void *data, const float *bias,
                int permuted_heads) {
    int64_t row_bytes = d3d_row_bytes(format, columns);
    if (!row_bytes || rows < 1) return D3D_BAD_ARGUMENT;
    if (permuted_heads && (permuted_heads < 0 || rows % (2 * permuted_heads)))
        return D3D_BAD_ARGUMENT;
    matrix n = {.format = format, .rows = rows, .columns = columns};
    n.tile_bytes = (size_t)FORMATS[format].tile;
    n.panels = (int)(round_up((size_t)rows, PANEL) / PANEL);
    n.blocks = (int)(round_up((size_t)columns, BLOCK) / BLOCK);
    n.data = new_memory((size_t)n.panels * (size_t)n.blocks * TILES * n.tile_bytes);
    if (bias) n.bias = new_memory(sizeof(float) * (size_t)n.panels * PANEL);
    if (!n.data || (bias && !n.bias)) {
        matrix_free(&n);
        return D3D_NO_MEMORY;
    }
    for (int o = 0; o < rows; o++) {
        int source = source_row(o, rows, permuted_heads);
        const uint8_t *row = (const uint8_t *)data + source * row_bytes;
        if (bias) n.bias[o] = bias[source];
        for (int b = 0; b < n.blocks; b++) {
            size_t tile = ((size_t)(o / PANEL) * (size_t)n.blocks + (size_t)b) * TILES +
                          (size_t)(o % PANEL / TILE);
            if (!pack_block(n.data + tile * n.tile_bytes, o % TILE, format, row, b, columns)) {
                matrix_free(&n);
                return D3D_BAD_ARGUMENT;
            }
        }
    }
    matrix_free(m);
    *m = n;
    return D3D_OK;
}

void matrix_free(matrix *m) {
    free(m->data);
    free(m->bias);
    m->data = NULL;
    m->bias = NULL;
}

INLINE void decode_nibbles(const uint8_t *bytes, vf scale, vf minimum, float *out, size_t stride) {
    for (size_t j = 0; j < 16; j++) {
        vi both = from_bytes(bytes + j * TILE);
        store(out + j * stride, fma_(to_float(both & 15), scale, minimum));
        store(out + (j + 16) * stride, fma_(to_float(both >> 4), scale, minimum));
    }
}

INLINE void decode_bytes(const uint8_t *bytes, vf scale, int count, float *out, size_t stride) {
    for (size_t j = 0; j < (size_t)count; j++)
        store(out + j * stride, from_signed(bytes + j * TILE) * scale);
}

/* Weights of W outputs of a tile from `lane` on: [BLOCK] of `stride`. */
INLINE void decode_lanes(int format, const uint8_t *tile, size_t lane, float *out, size_t stride) {
    vf scale = from_halves(tile + 2 * lane);
    switch (format) {
    case D3D_Q4_0:
    case D3D_Q4_1:
        decode_nibbles(tile + 64 + lane, scale, from_halves(tile + 32 + 2 * lane), out, stride);
        break;
    case D3D_Q4_K: {
        vf minimum = from_halves(tile + 32 + 2 * lane) * to_float(from_bytes(tile + 80 + lane));
        scale *= to_float(from_bytes(tile + 64 + lane));
        decode_nibbles(tile + 96 + lane, scale, -minimum, out, stride);
        break;
    }
    case D3D_Q8_0: decode_bytes(tile + 32 + lane, scale, BLOCK, out, stride); break;
    case D3D_Q6_K:
        for (size_t i = 0; i < 2; i++)
            decode_bytes(tile + 64 + lane + i * 16 * TILE,
                         scale * from_signed(tile + 32 + i * TILE + lane), 16,
                         out + i * 16 * stride, stride);
        break;
    case D3D_F16:
        for (size_t j = 0; j < BLOCK; j++)
            store(out + j * stride, from_halves(tile + 2 * (j * TILE + lane)));
        break;
    case D3D_BF16:
        for (size_t j = 0; j < BLOCK; j++)
            store(out + j * stride, from_bfloats(tile + 2 * (j * TILE + lane)));
        break;
    default:
        for (size_t j = 0; j < BLOCK; j++)
            store(out + j * stride, load((const float *)(const void *)tile + j * TILE + lane));
    }
}

static const uint8_t *tile_at(const matrix *m, int panel, int block, int tile) {
    size_t index = ((size_t)panel * (size_t)m->blocks + (size_t)block) * TILES + (size_t)tile;
    return m->data + index * m->tile_bytes;
}

void decode_panel(const matrix *m, int panel, int block, float *out) {
    for (int t = 0; t < TILES; t++) {
        const uint8_t *tile = tile_at(m, panel, block, t);
        for (size_t lane = 0; lane < TILE; lane += W)
            decode_lanes(m->format, tile, lane, out + t * TILE + lane, PANEL);
    }
}

void decode_row(const matrix *m, int row, float *out) {
    float lanes[BLOCK * W];
    size_t lane = (size_t)row % TILE;
    for (int b = 0; b < m->blocks; b++) {
        const uint8_t *tile = tile_at(m, row / PANEL, b, row % PANEL / TILE);
        decode_lanes(m->format, tile, lane / W * W, lanes, W);
        for (int j = 0; j < BLOCK && b * BLOCK + j < m->columns; j++)
            out[b * BLOCK + j] = lanes[(size_t)j * W + lane % W];
    }
}
