/* The pass: Llama, Qwen2 and Qwen3 decoders.
 *
 * Every thread runs `run_phases`; between two barriers, units of work (a panel of outputs, a row, a
 * row's head) are taken from a counter, so a thread that is not scheduled costs only its unit. */
#include <math.h>
#include <stdlib.h>

#include "internal.h"
#include "vec.h"

#define MAX_HEAD_DIM 512

typedef struct {
    matrix matrices[D3D_LAYER_MATRICES];
    float *norms[D3D_LAYER_NORMS];
} layer;

struct d3d_model {
    d3d_shape shape;
    float *inv_freq;
    layer *layers;
    matrix embedding, head;
    float *final_norm;
    pool *pool;
    size_t hidden_size, inner_size, heads_size;  /* row sizes, rounded up to PANEL */
    size_t key_start, value_start, qkv_size;     /* columns of queries, keys and values */
    /* of the pass that runs */
    const d3d_pass *pass;
    size_t scratch_bytes, score_room;
    void *scratch;
    float *x, *normed, *qkv, *heads, *inner, *cos, *sin, *scores, *logits;
    int32_t *sequence; /* of each row */
};

int d3d_version(void) { return D3D_VERSION; }
const char *d3d_level(void) { return LEVEL; }

static size_t padded(int n) { return round_up((size_t)n, PANEL); }

d3d_model *d3d_model_new(const d3d_shape *s, int threads, int *status) {
    *status = D3D_BAD_ARGUMENT;
    if (s->version != D3D_VERSION || threads < 1 || s->num_layers < 1 || s->num_tokens < 1 ||
        s->num_tokens > s->vocab_size ||
        s->hidden_size < 1 || s->intermediate_size < 1 || s->head_dim < 2 || s->head_dim % 2 ||
        s->head_dim > MAX_HEAD_DIM || s->num_kv_heads < 1 || s->num_heads < 1 ||
        s->num_heads % s->num_kv_heads)
        return NULL;
    *status = D3D_NO_MEMORY;
    d3d_model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->shape = *s;
    m->hidden_size = padded(s->hidden_size);
    m->inner_size = padded(s->intermediate_size);
    m->heads_size = padded(s->num_heads * s->head_dim);
    m->key_start = m->heads_size;
    m->value_start = m->key_start + padded(s->num_kv_heads * s->head_dim);
    m->qkv_size = m->value_start + padded(s->num_kv_heads * s->head_dim);
    m->layers = calloc((size_t)s->num_layers, sizeof *m->layers);
    m->inv_freq = calloc((size_t)s->head_dim / 2, sizeof(float));
    m->pool = pool_new(threads);
    if (!m->layers || !m->inv_freq || !m->pool) {
        d3d_model_free(m);
        return NULL;
    }
    memcpy(m->inv_freq, s->inv_freq, sizeof(float) * (size_t)s->head_dim / 2);
    m->shape.inv_freq = m->inv_freq;
    *status = D3D_OK;
    return m;
}

void d3d_model_free(d3d_model *m) {
    if (!m) return;
    pool_free(m->pool);
    for (int i = 0; m->layers && i < m->shape.num_layers; i++) {
        for (int j = 0; j < D3D_LAYER_MATRICES; j++) matrix_free(&m->layers[i].matrices[j]);
        for (int j = 0; j < D3D_LAYER_NORMS; j++) free(m->layers[i].norms[j]);
    }
    matrix_free(&m->embedding);
    matrix_free(&m->head);
    free(m->layers);
    free(m->inv_freq);
    free(m->final_norm);
    free(m->scratch);
    free(m);
}

int d3d_set_threads(d3d_model *m, int threads) {
    if (threads < 1) return D3D_BAD_ARGUMENT;
    pool *p = pool_new(threads);
    if (!p) return D3D_NO_MEMORY;
    pool_free(m->pool);
    m->pool = p;
    m->scratch_bytes = 0; /* laid out anew: scores are per thread */
    return D3D_OK;
}

/* Place of a matrix, and the size that the shape asks of it; NULL if there is none. */
static matrix *matrix_of(d3d_model *m, int index, int which, int *rows, int *columns) {
    const d3d_shape *s = &m->shape;
    int queries = s->num_heads * s->head_dim, keys = s->num_kv_heads * s->head_dim;
    *columns = which == D3D_OUT ? queries : which == D3D_DOWN ? s->intermediate_size
                                                             : s->hidden_size;
    *rows = s->vocab_size;
    if (index == -1)
        return which == D3D_EMBEDDING ? &m->embedding : which == D3D_HEAD ? &m->head : NULL;
    if (index < 0 || index >= s->num_layers || which < 0 || which >= D3D_LAYER_MATRICES)
        return NULL;
    switch (which) {
    case D3D_Q: *rows = queries; break;
    case D3D_K:
    case D3D_V: *rows = keys; break;
    case D3D_GATE:
    case D3D_UP: *rows = s->intermediate_size; break;
    default: *rows = s->hidden_size;
    }
    return &m->layers[index].matrices[which];
}

int d3d_set_matrix(d3d_model *m, int index, int which, int format, int rows, int columns,
                   const void *data, const float *bias, int permuted_heads) {
    int want_rows, want_columns;
    matrix *to = matrix_of(m, index, which, &want_rows, &want_columns);
    if (!to || rows != want_rows || columns != want_columns) return D3D_BAD_ARGUMENT;
    return matrix_pack(to, format, rows, columns, data, bias, permuted_heads);
}

int d3d_set_norm(d3d_model *m, int index, int which, int size, const float *weight) {
    int is_final = index == -1 && which == D3D_FINAL_NORM;
    int is_layers = index >= 0 && index < m->shape.num_layers && which >= 0 &&
                    which < D3D_LAYER_NORMS;
    int is_heads = which == D3D_Q_NORM || which == D3D_K_NORM;
    if ((!is_final && !is_layers) || size != (is_heads ? m->shape.head_dim : m->shape.hidden_size))
        return D3D_BAD_ARGUMENT;
    float **to = is_final ? &m->final_norm : &m->layers[index].norms[which];
    float *copy = new_memory(sizeof(float) * padded(size));
    if (!copy) return D3D_NO_MEMORY;
    memcpy(copy, weight, sizeof(float) * (size_t)size);
    free(*to);
    *to = copy;
    return D3D_OK;
}

static int is_complete(const d3d_model *m) {
    if (!m->final_norm || !m->embedding.data) return 0;
    for (int i = 0; i < m->shape.num_layers; i++) {
        for (int j = 0; j < D3D_LAYER_MATRICES; j++)
            if (!m->layers[i].matrices[j].data) return 0;
        if (!m->layers[i].norms[D3D_ATTENTION_NORM] || !m->layers[i].norms[D3D_MLP_NORM]) return 0;
    }
    return 1;
}

d3d_cache *d3d_cache_new(const d3d_model *m, int capacity) {
    d3d_cache *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->num_layers = m->shape.num_layers;
    c->num_kv_heads = m->shape.num_kv_heads;
    c->head_dim = m->shape.head_dim;
    c->value_size = (int)padded(c->head_dim);
    if (cache_reserve(c, capacity > 0 ? capacity : 1) == D3D_OK) return c;
    free(c);
    return NULL;
}

/* Root-mean-square norm; out may be x. */
static void norm(const float *x, const float *weight, float eps, int size, float *out) {
    vf sums = splat(0);
    int i = 0;
    for (; i + W <= size; i += W) sums = fma_(load(x + i), load(x + i), sums);
    float sum = sum_lanes(sums);
    for (; i < size; i++) sum += x[i] * x[i];
    float scale = 1 / sqrtf(sum / (float)size + eps);
    for (i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

/* Normed if the family does so, then rotated; out may be x. */
static void turn_head(const d3d_model *m, const float *x, const float *weight, int row, float scale,
                      float *out) {
    int size = m->shape.head_dim, half = size / 2;
    const float *cosine = m->cos + (size_t)row * (size_t)half;
    const float *sine = m->sin + (size_t)row * (size_t)half;
    if (weight) norm(x, weight, m->shape.norm_eps, size, out);
    else if (out != x) memcpy(out, x, sizeof(float) * (size_t)size);
    for (int d = 0; d < half; d++) {
        float a = out[d], b = out[d + half];
        out[d] = (a * cosine[d] - b * sine[d]) * scale;
        out[d + half] = (b * cosine[d] + a * sine[d]) * scale;
    }
}

/* One row's embedding and angles. */
static void begin_row(d3d_model *m, int row) {
    size_t half = (size_t)m->shape.head_dim / 2;
    decode_row(&m->embedding, m->pass->token_ids[row], m->x + (size_t)row * m->hidden_size);
    for (size_t d = 0; d < half; d++) {
        float angle = (float)m->pass->positions[row] * m->inv_freq[d];
        m->cos[(size_t)row * half + d] = cosf(angle) * m->shape.rope_scale;
        m->sin[(size_t)row * half + d] = sinf(angle) * m->shape.rope_scale;
    }
}

/* One panel of queries, keys or values. */
static void qkv_panel(d3d_model *m, const layer *l, int unit, int first, int rows) {
    _Alignas(64) float out[ROWS * PANEL];
    int which = D3D_Q;
    size_t column = 0;
    while (unit >= l->matrices[which].panels) {
        unit -= l->matrices[which].panels;
        which++;
        column = which == D3D_K ? m->key_start : m->value_start;
    }
    linear_panel(&l->matrices[which], unit, m->normed + (size_t)first * m->hidden_size,
                 m->hidden_size, rows, out);
    for (int r = 0; r < rows; r++)
        memcpy(m->qkv + (size_t)(first + r) * m->qkv_size + column + (size_t)unit * PANEL,
               out + r * PANEL, sizeof(float) * PANEL);
}

/* One key-value head of one row, into the cache. */
static void store_head(d3d_model *m, const layer *l, int index, int unit) {
    int kv_heads = m->shape.num_kv_heads, row = unit / kv_heads, head = unit % kv_heads;
    int sequence = m->sequence[row];
    size_t at = (size_t)head * (size_t)m->shape.head_dim;
    float *key = m->qkv + (size_t)row * m->qkv_size + m->key_start + at;
    turn_head(m, key, l->norms[D3D_K_NORM], row, 1, key);
    cache_write(m->pass->caches[sequence], index, head,
                m->pass->past[sequence] + row - m->pass->first_rows[sequence], key,
                m->qkv + (size_t)row * m->qkv_size + m->value_start + at);
}

/* One head of one row. */
static void attend_head(d3d_model *m, const layer *l, int index, int unit, float *scores) {
    const d3d_pass *p = m->pass;
    int heads = m->shape.num_heads, row = unit / heads, head = unit % heads;
    int sequence = m->sequence[row], first = p->first_rows[sequence];
    int rows = p->first_rows[sequence + 1] - first, keys = p->past[sequence] + row - first + 1;
    const uint8_t *mask = p->masks ? p->masks[sequence] : NULL;
    if (mask) {
        keys = p->past[sequence] + rows;
        mask += (size_t)(row - first) * (size_t)keys;
    }
    float query[MAX_HEAD_DIM];
    size_t at = (size_t)head * (size_t)m->shape.head_dim;
    turn_head(m, m->qkv + (size_t)row * m->qkv_size + at, l->norms[D3D_Q_NORM], row,
              1 / sqrtf((float)m->shape.head_dim), query);
    attend(p->caches[sequence], index, head / (heads / m->shape.num_kv_heads), query, keys, mask,
           scores, m->heads + (size_t)row * m->heads_size + at);
}

/* Add one panel of a matrix's product to the hidden states. */
static void add_panel(d3d_model *m, const matrix *w, const float *input, size_t input_size,
                      int unit, int first, int rows) {
    _Alignas(64) float out[ROWS * PANEL];
    linear_panel(w, unit, input + (size_t)first * input_size, input_size, rows, out);
    for (int r = 0; r < rows; r++) {
        float *x = m->x + (size_t)(first + r) * m->hidden_size + (size_t)unit * PANEL;
        for (int i = 0; i < PANEL; i += W) store(x + i, load(x + i) + load(out + r * PANEL + i));
    }
}

/* One panel of gate and up, and what they make together. */
static void inner_panel(d3d_model *m, const layer *l, int unit, int first, int rows) {
    _Alignas(64) float gate[ROWS * PANEL], up[ROWS * PANEL];
    const float *x = m->normed + (size_t)first * m->hidden_size;
    linear_panel(&l->matrices[D3D_GATE], unit, x, m->hidden_size, rows, gate);
    linear_panel(&l->matrices[D3D_UP], unit, x, m->hidden_size, rows, up);
    for (int r = 0; r < rows; r++) {
        float *out = m->inner + (size_t)(first + r) * m->inner_size + (size_t)unit * PANEL;
        for (int i = 0; i < PANEL; i += W) {
            vf g = load(gate + r * PANEL + i);
            store(out + i, g / (1 + exp_(-g)) * load(up + r * PANEL + i));
        }
    }
}

static void head_panel(d3d_model *m, const matrix *head, int unit, int first, int rows) {
    _Alignas(64) float out[ROWS * PANEL];
    size_t stride = (size_t)m->pass->logits_stride;
    linear_panel(head, unit, m->normed + (size_t)first * m->hidden_size, m->hidden_size, rows, out);
    for (int r = 0; r < rows; r++)
        memcpy(m->logits + (size_t)(first + r) * stride + (size_t)unit * PANEL, out + r * PANEL,
               sizeof(float) * PANEL);
}

/* Best id and finiteness of one row of logits. */
static void judge(d3d_model *m, int row) {
    const float *logits = m->logits + (size_t)row * (size_t)m->pass->logits_stride;
    int size = m->shape.num_tokens, i = 0, best = 0;
    vf top = splat(-INFINITY), odd = splat(0); /* 0 * x is not a number unless x is finite */
    for (; i + W <= size; i += W) {
        vf x = load(logits + i);
        top = larger(x, top);
        odd += x * 0.0f;
    }
    float most = max_lanes(top), faults = sum_lanes(odd);
    for (; i < size; i++) {
        most = logits[i] > most ? logits[i] : most;
        faults += logits[i] * 0.0f;
    }
    while (best < size - 1 && logits[best] != most) best++;
    m->pass->argmax[row] = best;
    m->pass->finite[row] = faults == 0;
}

/* Units of work of this phase; each is done by one thread, whichever is free. */
#define EACH(unit, count) for (int unit; (unit = pool_take(m->pool)) < (count);)

/* Every panel, for all rows of the pass, ROWS at a time. */
#define EACH_PANEL(panels, count)                                                          \
    EACH(unit, (panels))                                                                   \
        for (int first = 0, rows; rows = (count) - first < ROWS ? (count) - first : ROWS, \
                 first < (count); first += ROWS)

static void norm_rows(d3d_model *m, const float *weight, const int32_t *which, int count) {
    EACH(unit, count) {
        size_t row = (size_t)(which ? which[unit] : unit);
        norm(m->x + row * m->hidden_size, weight, m->shape.norm_eps, m->shape.hidden_size,
             m->normed + (size_t)unit * m->hidden_size);
    }
    pool_barrier(m->pool);
}

static void run_layer(d3d_model *m, int index, float *scores) {
    layer *l = &m->layers[index];
    int rows_of_pass = m->pass->num_rows;
    norm_rows(m, l->norms[D3D_ATTENTION_NORM], NULL, rows_of_pass);
    EACH_PANEL(l->matrices[D3D_Q].panels + l->matrices[D3D_K].panels + l->matrices[D3D_V].panels,
               rows_of_pass)
        qkv_panel(m, l, unit, first, rows);
    pool_barrier(m->pool);
    EACH(unit, rows_of_pass * m->shape.num_kv_heads) store_head(m, l, index, unit);
    pool_barrier(m->pool);
    EACH(unit, rows_of_pass * m->shape.num_heads) attend_head(m, l, index, unit, scores);
    pool_barrier(m->pool);
    EACH_PANEL(l->matrices[D3D_OUT].panels, rows_of_pass)
        add_panel(m, &l->matrices[D3D_OUT], m->heads, m->heads_size, unit, first, rows);
    pool_barrier(m->pool);
    norm_rows(m, l->norms[D3D_MLP_NORM], NULL, rows_of_pass);
    EACH_PANEL(l->matrices[D3D_GATE].panels, rows_of_pass) inner_panel(m, l, unit, first, rows);
    pool_barrier(m->pool);
    EACH_PANEL(l->matrices[D3D_DOWN].panels, rows_of_pass)
        add_panel(m, &l->matrices[D3D_DOWN], m->inner, m->inner_size, unit, first, rows);
    pool_barrier(m->pool);
}

static void run_phases(void *arg, int thread) {
    d3d_model *m = arg;
    const matrix *head = m->head.data ? &m->head : &m->embedding;
    float *scores = m->scores + (size_t)thread * m->score_room;
    EACH(unit, m->pass->num_rows) begin_row(m, unit);
    pool_barrier(m->pool);
    for (int i = 0; i < m->shape.num_layers; i++) run_layer(m, i, scores);
    norm_rows(m, m->final_norm, m->pass->wanted, m->pass->num_wanted);
    EACH_PANEL(head->panels, m->pass->num_wanted) head_panel(m, head, unit, first, rows);
    pool_barrier(m->pool);
    EACH(unit, m->pass->num_wanted) judge(m, unit);
    pool_barrier(m->pool);
}

static int is_valid(const d3d_model *m, const d3d_pass *p) {
    if (p->version != D3D_VERSION || p->num_rows < 1 || p->num_sequences < 1 || p->num_wanted < 0 ||
        p->num_rows > (1 << 20) || p->first_rows[0] != 0 ||
        p->first_rows[p->num_sequences] != p->num_rows || !is_complete(m))
        return 0;
    for (int r = 0; r < p->num_rows; r++)
        if (p->token_ids[r] < 0 || p->token_ids[r] >= m->shape.vocab_size || p->positions[r] < 0)
            return 0;
    for (int s = 0; s < p->num_sequences; s++)
        if (p->past[s] < 0 || p->past[s] > (1 << 28) || p->first_rows[s + 1] < p->first_rows[s])
            return 0;
    for (int w = 0; w < p->num_wanted; w++)
        if (p->wanted[w] < 0 || p->wanted[w] >= p->num_rows) return 0;
    return !p->logits || p->logits_stride >= (int64_t)padded(m->shape.vocab_size);
}

/* Divide scratch memory among the arrays of a pass; it grows, and is kept. */
static int make_scratch(d3d_model *m, size_t rows, size_t longest, size_t wanted) {
    size_t half = (size_t)m->shape.head_dim / 2, room = round_up(longest, PANEL);
    float **arrays[] = {&m->x,   &m->normed, &m->qkv,    &m->heads, &m->inner,
                        &m->cos, &m->sin,    &m->scores, &m->logits};
    size_t sizes[] = {rows * m->hidden_size, rows * m->hidden_size, rows * m->qkv_size,
                      rows * m->heads_size,  rows * m->inner_size,  rows * half,
                      rows * half,           (size_t)pool_threads(m->pool) * room,
                      wanted * padded(m->shape.vocab_size)};
    size_t count = sizeof sizes / sizeof *sizes, bytes = round_up(rows * sizeof(int32_t), 64);
    for (size_t i = 0; i < count; i++) bytes += round_up(sizes[i] * sizeof(float), 64);
    if (bytes > m->scratch_bytes) {
        free(m->scratch);
        m->scratch_bytes = 0;
        m->scratch = new_memory(bytes);
        if (!m->scratch) return D3D_NO_MEMORY;
        m->scratch_bytes = bytes;
    }
    char *at = m->scratch;
    for (size_t i = 0; i < count; i++) {
        *arrays[i] = (float *)(void *)at;
        at += round_up(sizes[i] * sizeof(float), 64);
    }
    m->sequence = (int32_t *)(void *)at;
    m->score_room = room;
    /* Products read rows to a block's end, where weights are 0 and 0 times garbage may not be. */
    memset(m->x, 0, rows * m->hidden_size * sizeof(float));
    memset(m->normed, 0, rows * m->hidden_size * sizeof(float));
    memset(m->heads, 0, rows * m->heads_size * sizeof(float));
    return D3D_OK;
}

int d3d_run(d3d_model *m, const d3d_pass *given) {
    if (!is_valid(m, given)) return D3D_BAD_ARGUMENT;
    d3d_pass pass = *given;
    int longest = 0, status;
    for (int s = 0; s < pass.num_sequences; s++) {
        int keys = pass.past[s] + pass.first_rows[s + 1] - pass.first_rows[s];
        if ((status = cache_reserve(pass.caches[s], keys))) return status;
        longest = keys > longest ? keys : longest;
    }
    status = make_scratch(m, (size_t)pass.num_rows, (size_t)longest,
                          pass.logits ? 0 : (size_t)pass.num_wanted);
    if (status) return status;
    for (int s = 0; s < pass.num_sequences; s++)
        for (int r = pass.first_rows[s]; r < pass.first_rows[s + 1]; r++) m->sequence[r] = s;
    if (pass.logits) m->logits = pass.logits;
    else pass.logits_stride = (int64_t)padded(m->shape.vocab_size);
    m->pass = &pass;
    status = pool_run(m->pool, run_phases, m);
    m->pass = NULL;
    return status;
}
