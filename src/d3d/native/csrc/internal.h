/* What the C files share. */
#ifndef D3D_INTERNAL_H
#define D3D_INTERNAL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "d3d.h"

#define TILE 16   /* outputs of a packed tile */
#define BLOCK 32  /* inputs of a packed tile */
#define TILES 4   /* tiles side by side in a panel */
#define PANEL (TILE * TILES) /* outputs that are computed together: the unit of work */
#define ROWS 32   /* rows that share one decoding of a block */

static inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Zeroed memory aligned to a cache line, in huge pages where the system has them; NULL if there is
 * none. */
void *new_memory(size_t bytes);

/* pack.c */
typedef struct {
    uint8_t *data; /* [panels][blocks][TILES] tiles of tile_bytes */
    float *bias;   /* [panels * PANEL] or NULL */
    size_t tile_bytes;
    int format, rows, columns, panels, blocks;
} matrix;

int matrix_pack(matrix *m, int format, int rows, int columns, const void *data, const float *bias,
                int permuted_heads);
void matrix_free(matrix *m);
/* Weights of one block of a panel, [BLOCK][PANEL]. */
void decode_panel(const matrix *m, int panel, int block, float *out);
/* Weights of one output (a token's embedding): [columns]. */
void decode_row(const matrix *m, int row, float *out);

/* linear.c */
/* out[r][o] = sum of x[r][i] * weight[o][i] + bias for one panel and at most ROWS rows.
 * x: [rows] of x_stride floats, zero from `columns` to the block's end; out: [rows][PANEL]. */
void linear_panel(const matrix *m, int panel, const float *x, size_t x_stride, int rows,
                  float *out);

/* attention.c */
struct d3d_cache {
    float *keys;   /* [layers][kv_heads][capacity / TILE][head_dim][TILE] */
    float *values; /* [layers][kv_heads][capacity][value_size] */
    int num_layers, num_kv_heads, head_dim, value_size, capacity;
};
int cache_reserve(d3d_cache *cache, int capacity);
void cache_write(d3d_cache *cache, int layer, int kv_head, int place, const float *key,
                 const float *value);
/* One row of one head. query: [head_dim], scaled; mask: [keys] or NULL; scores: room for keys
 * rounded up to PANEL; out: [head_dim]. A row that sees nothing gives zeros. */
void attend(const d3d_cache *cache, int layer, int kv_head, const float *query, int keys,
            const uint8_t *mask, float *scores, float *out);

/* threads.c */
typedef struct pool pool;
pool *pool_new(int threads);
void pool_free(pool *p);
int pool_threads(const pool *p);
/* Call run(arg, thread) on every thread, the caller's as number 0. D3D_NO_THREADS if they can't be
 * started. `run` must end with pool_barrier. */
int pool_run(pool *p, void (*run)(void *, int), void *arg);
/* Wait for all threads; then work is counted from 0 again. */
void pool_barrier(pool *p);
/* Next unit of work of this phase; units are handed out once each, in order. */
int pool_take(pool *p);

#endif
