/* Key-value cache of a sequence, and attention over it.
 *
 * Keys lie in tiles of 16, so that 16 scores are computed at once without adding up lanes; values
 * lie row by row. Places are never cleared: what a row does not see is never multiplied. */
#include <stdlib.h>

#include "internal.h"
#include "vec.h"

#define VECTORS_OF_TILE (TILE / W)

static size_t key_floats(const d3d_cache *c, int capacity) {
    return (size_t)capacity * (size_t)c->head_dim;
}

static size_t value_floats(const d3d_cache *c, int capacity) {
    return (size_t)capacity * (size_t)c->value_size;
}

int cache_reserve(d3d_cache *c, int capacity) {
    if (capacity <= c->capacity) return D3D_OK;
    int grown = c->capacity + c->capacity / 2;
    int room = (int)round_up((size_t)(capacity > grown ? capacity : grown), PANEL);
    size_t planes = (size_t)c->num_layers * (size_t)c->num_kv_heads;
    float *keys = new_memory(sizeof(float) * planes * key_floats(c, room));
    float *values = new_memory(sizeof(float) * planes * value_floats(c, room));
    if (!keys || !values) {
        free(keys);
        free(values);
        return D3D_NO_MEMORY;
    }
    for (size_t i = 0; i < planes && c->capacity; i++) {
        size_t k = key_floats(c, c->capacity), v = value_floats(c, c->capacity);
        memcpy(keys + i * key_floats(c, room), c->keys + i * k, sizeof(float) * k);
        memcpy(values + i * value_floats(c, room), c->values + i * v, sizeof(float) * v);
    }
    free(c->keys);
    free(c->values);
    c->keys = keys;
    c->values = values;
    c->capacity = room;
    return D3D_OK;
}

void d3d_cache_free(d3d_cache *c) {
    if (!c) return;
    free(c->keys);
    free(c->values);
    free(c);
}

static float *keys_of(const d3d_cache *c, int layer, int kv_head) {
    size_t plane = (size_t)layer * (size_t)c->num_kv_heads + (size_t)kv_head;
    return c->keys + plane * key_floats(c, c->capacity);
}

static float *values_of(const d3d_cache *c, int layer, int kv_head) {
    size_t plane = (size_t)layer * (size_t)c->num_kv_heads + (size_t)kv_head;
    return c->values + plane * value_floats(c, c->capacity);
}

/* A place's key: head_dim floats, TILE apart. */
static float *key_at(const d3d_cache *c, float *keys, int place) {
    return keys + (size_t)(place / TILE * TILE) * (size_t)c->head_dim + place % TILE;
}

void cache_write(d3d_cache *c, int layer, int kv_head, int place, const float *key,
                 const float *value) {
    float *to = key_at(c, keys_of(c, layer, kv_head), place);
    for (int d = 0; d < c->head_dim; d++) to[d * TILE] = key[d];
    to = values_of(c, layer, kv_head) + value_floats(c, place);
    memcpy(to, value, sizeof(float) * (size_t)c->head_dim);
}

int d3d_cache_move(d3d_cache *c, int first, int count, const int32_t *source) {
    if (first < 0 || count < 0) return D3D_BAD_ARGUMENT;
    for (int i = 0; i < count; i++)
        if (source[i] < first + i || source[i] >= c->capacity || (i && source[i] <= source[i - 1]))
            return D3D_BAD_ARGUMENT;
    for (int layer = 0; layer < c->num_layers; layer++)
        for (int h = 0; h < c->num_kv_heads; h++) {
            float *keys = keys_of(c, layer, h), *values = values_of(c, layer, h);
            for (int i = 0; i < count; i++) {
                float *to = key_at(c, keys, first + i), *from = key_at(c, keys, source[i]);
                for (int d = 0; d < c->head_dim; d++) to[d * TILE] = from[d * TILE];
                memmove(values + value_floats(c, first + i), values + value_floats(c, source[i]),
                        sizeof(float) * (size_t)c->head_dim);
            }
        }
    return D3D_OK;
}

/* Scores of PANEL keys. */
INLINE void score(const float *keys, const float *query, size_t head_dim, float *scores) {
    vf sum[VECTORS_OF_TILE * TILES];
    for (int i = 0; i < VECTORS_OF_TILE * TILES; i++) sum[i] = splat(0);
    for (size_t d = 0; d < head_dim; d++) {
        vf q = splat(query[d]);
#pragma GCC unroll 16
        for (size_t i = 0; i < VECTORS_OF_TILE * TILES; i++) {
            size_t tile = i / VECTORS_OF_TILE, lane = i % VECTORS_OF_TILE * W;
            sum[i] = fma_(load(keys + (tile * head_dim + d) * TILE + lane), q, sum[i]);
        }
    }
    for (size_t i = 0; i < VECTORS_OF_TILE * TILES; i++) store(scores + i * W, sum[i]);
}

/* Turn scores into weights before division by their sum. Returns 0 if no key is visible. */
static int soften(float *scores, int keys, const uint8_t *mask) {
    int end = (int)round_up((size_t)keys, PANEL);
    for (int k = keys; k < end; k++) scores[k] = -INFINITY;
    for (int k = 0; mask && k < keys; k++) scores[k] = mask[k] ? scores[k] : -INFINITY;
    vf top = splat(-INFINITY);
    for (int k = 0; k < end; k += W) top = larger(load(scores + k), top);
    float best = max_lanes(top);
    if (best == -INFINITY) return 0;
    for (int k = 0; k < end; k += W) store(scores + k, exp_(load(scores + k) - best));
    return 1;
}

/* Values and weights are summed key by key, over visible keys only: a row's bits do not depend on
 * hidden keys between its own, as a tree's branches have them. */
void attend(const d3d_cache *c, int layer, int kv_head, const float *query, int keys,
            const uint8_t *mask, float *scores, float *out) {
    const float *k = keys_of(c, layer, kv_head), *v = values_of(c, layer, kv_head);
    size_t head_dim = (size_t)c->head_dim;
    for (int first = 0; first < keys; first += PANEL)
        score(k + (size_t)first * head_dim, query, head_dim, scores + first);
    int sees = soften(scores, keys, mask);
    for (size_t d = 0; d < head_dim; d += 4 * W) {
        _Alignas(64) float part[4 * W];
        vf total[4] = {{0}}, sum = splat(0);
        for (int i = 0; sees && i < keys; i++) {
            if (mask && !mask[i]) continue;
            vf weight = splat(scores[i]);
            sum += weight;
            const float *value = v + value_floats(c, i) + d;
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) total[n] = fma_(load(value + n * W), weight, total[n]);
        }
        for (int n = 0; n < 4; n++) store(part + n * W, sees ? total[n] / sum : total[n]);
        memcpy(out + d, part, sizeof(float) * (head_dim - d < 4 * W ? head_dim - d : 4 * W));
    }
}
