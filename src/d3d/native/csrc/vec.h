/* Vectors of W floats: AVX-512, AVX2 with FMA, NEON, or whatever the compiler makes of 4 floats. */
#ifndef D3D_VEC_H
#define D3D_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define W 16
#define LEVEL "avx512"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define W 8
#define LEVEL "avx2"
#elif defined(__aarch64__)
#include <arm_neon.h>
#define W 4
#define LEVEL "neon"
#else
#define W 4
#define LEVEL "generic"
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vsb __attribute__((vector_size(W)));

INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - (vf){0}; } /* minus: x + 0 is an operation, x - 0 none */
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }

/* a * b + c. Never left to the compiler (-ffp-contract=off): it might fuse in one copy of a loop
 * and not in another, and a row's bits would depend on its company. */
INLINE vf fma_(vf a, vf b, vf c) {
#if W == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif W == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Widening loads: gcc takes __builtin_convertvector of bytes apart, lane by lane. */
INLINE vi from_shorts(const void *p) {
#if W == 16
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
#elif W == 8
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128(p));
#else
    vh h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, vi);
#endif
}

INLINE vi from_bytes(const void *p) {
#if W == 16
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(p));
#elif W == 8
    return (vi)_mm256_cvtepu8_epi32(_mm_loadu_si64(p));
#else
    vb b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, vi);
#endif
}

INLINE vi from_signed_bytes(const void *p) {
#if W == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(p));
#elif W == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_loadu_si64(p));
#else
    vsb b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, vi);
#endif
}

INLINE vf from_halves(const void *p) {
#if W == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif W == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
#else
    vi bits = from_shorts(p);
    vi sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
    vf value = (vf)(rest << 13) * splat(0x1p112f); /* rebias the exponent; exact */
    vi special = rest >= 0x7c00;                   /* infinity or not a number */
    return (vf)(sign | (vi)pick(special, (vf)((rest << 13) | 0x7f800000), value));
#endif
}

INLINE vf from_bfloats(const void *p) { return (vf)(from_shorts(p) << 16); }
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vf from_signed(const void *p) { return to_float(from_signed_bytes(p)); }

/* Lanes added up in one fixed order. */
INLINE float sum_lanes(vf v) {
    float lane[W];
    store(lane, v);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; i++) lane[i] += lane[i + n];
    return lane[0];
}

INLINE float max_lanes(vf v) {
    float lane[W], best;
    store(lane, v);
    best = lane[0];
    for (int i = 1; i < W; i++) best = lane[i] > best ? lane[i] : best;
    return best;
}

/* e^x, relative error about 1e-7; 0 below -87, capped at x = 88. */
INLINE vf exp_(vf x) {
    const vf magic = splat(0x1.8p23f); /* adding it rounds to an integer */
    vi tiny = x < splat(-87.0f);
    x = pick(tiny, splat(-87.0f), pick(x > splat(88.0f), splat(88.0f), x));
    vf n = fma_(x, splat(0x1.715476p0f), magic);
    vi exponent = ((vi)n - (vi)magic) << 23;
    n -= magic;
    vf r = fma_(n, splat(-0x1.62e4p-1f), x);
    r = fma_(n, splat(-0x1.7f7d1cp-20f), r);
    vf p = splat(0x1.6c16c2p-10f);
    p = fma_(p, r, splat(0x1.111112p-7f));
    p = fma_(p, r, splat(0x1.555556p-5f));
    p = fma_(p, r, splat(0x1.555556p-3f));
    p = fma_(p, r, splat(0.5f));
    p = fma_(p, r, splat(1.0f));
    p = fma_(p, r, splat(1.0f));
    return pick(tiny, splat(0.0f), p * (vf)(exponent + 0x3f800000));
}

#endif
