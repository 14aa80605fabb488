/* Products: a block of weights is decoded once, into the first-level cache, and used for all rows.
 *
 * Whatever the number of rows, an output is one chain of multiply-adds over its inputs in order.
 * Rows and vectors only decide how many such chains run side by side. */
#include "internal.h"
#include "vec.h"

#define VECTORS (PANEL / W)
#define MOST 4 /* rows of one group */

/* `vectors` at a time, so that accumulators and weights stay in registers: 32 of them with AVX-512,
 * else 16. */
INLINE void multiply(const int rows, const int vectors, const float *weights, const float *x,
                     size_t x_stride, float *out) {
    for (int first = 0; first < VECTORS; first += vectors) {
        vf sum[MOST][8];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sum[r][v] = load(out + r * PANEL + (first + v) * W);
        for (int j = 0; j < BLOCK; j++) {
            vf weight[8];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                weight[v] = load(weights + j * PANEL + (first + v) * W);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vf factor = splat(x[(size_t)r * x_stride + (size_t)j]);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) sum[r][v] = fma_(weight[v], factor, sum[r][v]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) store(out + r * PANEL + (first + v) * W, sum[r][v]);
    }
}

void linear_panel(const matrix *m, int panel, const float *x, size_t x_stride, int rows,
                  float *out) {
    _Alignas(64) float weights[BLOCK * PANEL];
    for (int r = 0; r < rows; r++) {
        float *row = out + r * PANEL;
        if (m->bias) memcpy(row, m->bias + (size_t)panel * PANEL, PANEL * sizeof(float));
        else memset(row, 0, PANEL * sizeof(float));
    }
    for (int b = 0; b < m->blocks; b++) {
        decode_panel(m, panel, b, weights);
        const float *inputs = x + (size_t)b * BLOCK;
        for (int r = 0; r < rows; r += MOST) {
            const float *group = inputs + (size_t)r * x_stride;
            float *sums = out + r * PANEL;
            switch (rows - r) {
            case 1: multiply(1, W == 16 ? 4 : 8, weights, group, x_stride, sums); break;
            case 2: multiply(2, 4, weights, group, x_stride, sums); break;
            case 3: multiply(3, W == 16 ? 4 : 2, weights, group, x_stride, sums); break;
            default: multiply(4, W == 16 ? 4 : 2, weights, group, x_stride, sums);
            }
        }
    }
}
