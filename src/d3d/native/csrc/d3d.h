/* A decoder's whole forward pass on a CPU, one call a pass.
 *
 * Batch-invariant by construction: every output of a linear layer, every norm and every attention
 * row is summed in one order, whatever else is in the pass, however many threads run it, and
 * however a prompt is cut into passes. So a row's bits never depend on its company.
 *
 * Plain C with pointers and sizes only; d3d.native.library declares the same structs for ctypes. */
#ifndef D3D_H
#define D3D_H

#include <stdint.h>

#define D3D_API __attribute__((visibility("default")))
#define D3D_VERSION 1

enum d3d_status { D3D_OK, D3D_NO_MEMORY, D3D_BAD_ARGUMENT, D3D_NO_THREADS };

/* Stored formats. A matrix is given in its file's layout, row by row. */
enum d3d_format { D3D_F32, D3D_F16, D3D_BF16, D3D_Q4_0, D3D_Q4_1, D3D_Q8_0, D3D_Q4_K, D3D_Q6_K };

/* Matrices of a layer, then those of the model (layer -1). HEAD may be absent: it is EMBEDDING. */
enum d3d_matrix { D3D_Q, D3D_K, D3D_V, D3D_OUT, D3D_GATE, D3D_UP, D3D_DOWN, D3D_LAYER_MATRICES };
enum { D3D_EMBEDDING = D3D_LAYER_MATRICES, D3D_HEAD };

/* Norm weights of a layer, then the model's. Q_NORM and K_NORM may be absent. */
enum d3d_norm { D3D_ATTENTION_NORM, D3D_MLP_NORM, D3D_Q_NORM, D3D_K_NORM, D3D_LAYER_NORMS };
enum { D3D_FINAL_NORM = D3D_LAYER_NORMS };

typedef struct {
    int32_t version; /* D3D_VERSION */
    int32_t vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads;
    int32_t head_dim; /* even, at most 512 */
    int32_t num_tokens; /* ids that can be chosen: the first of the vocabulary */
    float norm_eps, rope_scale;
    const float *inv_freq; /* [head_dim / 2] */
} d3d_shape;

typedef struct d3d_model d3d_model;
typedef struct d3d_cache d3d_cache; /* keys and values of one sequence */

/* One pass over rows of one or more sequences. Sequence s owns rows first_rows[s] to
 * first_rows[s + 1]; they are stored in its cache from place past[s] on. */
typedef struct {
    int32_t version;
    int32_t num_rows, num_sequences, num_wanted;
    const int32_t *token_ids, *positions;   /* [num_rows] */
    d3d_cache *const *caches;               /* [num_sequences], all different */
    const int32_t *first_rows;              /* [num_sequences + 1] */
    const int32_t *past;                    /* [num_sequences] */
    const uint8_t *const *masks;            /* NULL: causal; else per sequence NULL or
                                               [rows][past + rows], 1 = visible */
    const int32_t *wanted;                  /* [num_wanted] rows whose logits are computed */
    float *logits;                          /* [num_wanted][logits_stride], or NULL */
    int64_t logits_stride;                  /* at least vocab_size rounded up to 64 */
    int32_t *argmax;                        /* [num_wanted]: of ids below num_tokens, the
                                               lowest among equals */
    uint8_t *finite;                        /* [num_wanted]: 1 if their logits are finite */
} d3d_pass;

D3D_API int d3d_version(void);
D3D_API const char *d3d_level(void);
/* NULL on failure; *status says why. */
D3D_API d3d_model *d3d_model_new(const d3d_shape *shape, int threads, int *status);
D3D_API void d3d_model_free(d3d_model *model);
/* Pack a copy of a matrix [rows][columns]. bias: [rows] or NULL. permuted_heads: number of heads
 * whose rows llama.cpp's converter has interleaved for its own rotary layout, else 0. */
D3D_API int d3d_set_matrix(d3d_model *model, int layer, int which, int format, int rows,
                           int columns, const void *data, const float *bias, int permuted_heads);
D3D_API int d3d_set_norm(d3d_model *model, int layer, int which, int size, const float *weight);
/* Bytes of one row in its file's layout, or 0 if the format can't have this many columns. */
D3D_API int64_t d3d_row_bytes(int format, int columns);

D3D_API d3d_cache *d3d_cache_new(const d3d_model *model, int capacity);
D3D_API void d3d_cache_free(d3d_cache *cache);
/* Move the places source[i] to first + i; source ascends and source[i] >= first + i. */
D3D_API int d3d_cache_move(d3d_cache *cache, int first, int count, const int32_t *source);

/* Not to be called twice at a time for one model. Nothing but scratch memory and the cache places
 * after `past` has changed if it fails. */
D3D_API int d3d_run(d3d_model *model, const d3d_pass *pass);
/* The next pass starts that many threads, the caller counted; so does one after a fork. */
D3D_API int d3d_set_threads(d3d_model *model, int threads);

#endif
