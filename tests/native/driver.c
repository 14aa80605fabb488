/* Runs the library under sanitizers (make native-check): every format, odd sizes, threads, grown
 * and moved caches, masks; rows must have equal bits in every company. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "d3d.h"

enum { VOCAB = 131, HIDDEN = 256, INNER = 512, LAYERS = 2, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 20 };
enum { LENGTH = 75, STRIDE = 192 };

#define CHECK(what)                                                        \
    do {                                                                   \
        if (!(what)) {                                                     \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what); \
            exit(1);                                                       \
        }                                                                  \
    } while (0)

static uint32_t state = 1;
static uint32_t any(void) { return (state = state * 1664525 + 1013904223) >> 8; }

/* Random bytes that are small finite numbers in every format: no exponent is large. */
static uint8_t *random_rows(int64_t bytes) {
    uint8_t *data = malloc((size_t)bytes);
    CHECK(data);
    for (int64_t i = 0; i < bytes; i++) data[i] = (uint8_t)(any() & (i % 2 ? 0x1f : 0xff));
    return data;
}

static void set(d3d_model *m, int layer, int which, int format, int rows, int columns) {
    uint8_t *data = random_rows(rows * d3d_row_bytes(format, columns));
    float *bias = calloc((size_t)rows, sizeof *bias);
    CHECK(bias);
    bias[0] = 0.5f;
    CHECK(d3d_set_matrix(m, layer, which, format, rows, columns, data, bias,
                         which == D3D_Q && layer >= 0 ? HEADS : 0) == D3D_OK);
    CHECK(d3d_set_matrix(m, layer, which, format, rows + 1, columns, data, bias, 0) != D3D_OK);
    free(data);
    free(bias);
}

static d3d_model *make(int format, int threads) {
    float inv_freq[HEAD_DIM / 2], ones[HIDDEN];
    int status, queries = HEADS * HEAD_DIM, keys = KV_HEADS * HEAD_DIM;
    int odd = d3d_row_bytes(format, queries) ? format : D3D_F32;
    for (int i = 0; i < HEAD_DIM / 2; i++) inv_freq[i] = 1.0f / (float)(1 + i * i);
    for (int i = 0; i < HIDDEN; i++) ones[i] = 1;
    d3d_shape shape = {D3D_VERSION, VOCAB,    HIDDEN,   INNER, LAYERS, HEADS,
                       KV_HEADS,    HEAD_DIM, VOCAB,  1e-5f, 1,     inv_freq};
    d3d_model *m = d3d_model_new(&shape, threads, &status);
    CHECK(m && status == D3D_OK);
    state = 1;
    set(m, -1, D3D_EMBEDDING, format, VOCAB, HIDDEN);
    CHECK(d3d_set_norm(m, -1, D3D_FINAL_NORM, HIDDEN, ones) == D3D_OK);
    for (int i = 0; i < LAYERS; i++) {
        set(m, i, D3D_Q, format, queries, HIDDEN);
        set(m, i, D3D_K, format, keys, HIDDEN);
        set(m, i, D3D_V, format, keys, HIDDEN);
        set(m, i, D3D_OUT, odd, HIDDEN, queries);
        set(m, i, D3D_GATE, format, INNER, HIDDEN);
        set(m, i, D3D_UP, format, INNER, HIDDEN);
        set(m, i, D3D_DOWN, format, HIDDEN, INNER);
        CHECK(d3d_set_norm(m, i, D3D_ATTENTION_NORM, HIDDEN, ones) == D3D_OK);
        CHECK(d3d_set_norm(m, i, D3D_MLP_NORM, HIDDEN, ones) == D3D_OK);
        CHECK(d3d_set_norm(m, i, D3D_Q_NORM, HEAD_DIM, ones) == D3D_OK);
        CHECK(d3d_set_norm(m, i, D3D_K_NORM, HEAD_DIM, ones) == D3D_OK);
    }
    return m;
}

/* One pass of `rows` tokens over a sequence, next to one token of another; logits of the first. */
static void pass(d3d_model *m, d3d_cache *cache, int past, int rows, int masked, float *logits) {
    int32_t ids[LENGTH + 1], positions[LENGTH + 1], wanted[LENGTH], best[LENGTH];
    int32_t first_rows[3] = {0, rows, rows + 1}, pasts[2] = {past, 0};
    uint8_t finite[LENGTH], *mask = calloc((size_t)rows, (size_t)(past + rows));
    CHECK(mask);
    for (int i = 0; i < rows; i++) {
        ids[i] = (past + i) * 7 % VOCAB;
        positions[i] = past + i;
        wanted[i] = i;
        memset(mask + (size_t)i * (size_t)(past + rows), 1, (size_t)(past + i + 1));
    }
    ids[rows] = VOCAB - 1;
    positions[rows] = 0;
    d3d_cache *other = d3d_cache_new(m, 1), *caches[2] = {cache, other};
    const uint8_t *masks[2] = {mask, NULL};
    d3d_pass p = {.version = D3D_VERSION, .num_rows = rows + 1, .num_sequences = 2,
                  .num_wanted = rows, .token_ids = ids, .positions = positions, .caches = caches,
                  .first_rows = first_rows, .past = pasts, .masks = masked ? masks : NULL,
                  .wanted = wanted, .logits = logits, .logits_stride = STRIDE, .argmax = best,
                  .finite = finite};
    CHECK(d3d_run(m, &p) == D3D_OK);
    for (int i = 0; i < rows; i++) CHECK(best[i] >= 0 && best[i] < VOCAB && finite[i]);
    ids[0] = VOCAB;
    CHECK(d3d_run(m, &p) == D3D_BAD_ARGUMENT);
    d3d_cache_free(other);
    free(mask);
}

static void read_all(d3d_model *m, int width, int masked, float *logits) {
    d3d_cache *cache = d3d_cache_new(m, 1);
    CHECK(cache);
    for (int past = 0; past < LENGTH; past += width) {
        int rows = LENGTH - past < width ? LENGTH - past : width;
        pass(m, cache, past, rows, masked, logits + past * STRIDE);
    }
    int32_t places[3] = {3, 5, LENGTH - 1};
    CHECK(d3d_cache_move(cache, 2, 3, places) == D3D_OK);
    CHECK(d3d_cache_move(cache, 4, 3, places) == D3D_BAD_ARGUMENT);
    d3d_cache_free(cache);
}

int main(void) {
    static float whole[LENGTH * STRIDE], parts[LENGTH * STRIDE];
    for (int format = D3D_F32; format <= D3D_Q6_K; format++) {
        d3d_model *m = make(format, 1);
        read_all(m, LENGTH, 0, whole);
        for (int threads = 1; threads <= 4; threads += 1) {
            CHECK(d3d_set_threads(m, threads) == D3D_OK);
            read_all(m, threads == 1 ? 1 : 5 * threads, threads % 2, parts);
            for (int i = 0; i < LENGTH; i++)
                CHECK(!memcmp(whole + i * STRIDE, parts + i * STRIDE, VOCAB * sizeof(float)));
        }
        d3d_model_free(m);
    }
    printf("%s: every format, equal bits\n", d3d_level());
    return 0;
}
