/* Worker threads: they spin while a pass runs and sleep between passes, so that they don't disturb
 * whatever runs then (torch's own threads above all). */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "internal.h"

#define SPINS 4000 /* before a waiting thread lets others run: some microseconds */

typedef struct {
    pool *owner;
    int number;
} seat;

struct pool {
    int threads;
    pid_t process; /* whose threads they are: a forked child has none; 0: not started */
    pthread_t *workers;
    seat *seats;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    unsigned pass; /* under lock */
    int stopping;  /* under lock */
    void (*run)(void *, int);
    void *arg;
    /* on lines of their own: written by all threads */
    _Alignas(64) atomic_int next;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_uint phase;
};

/* Arithmetic must not depend on the thread: the caller may have asked for flushed denormals. */
static unsigned plain_arithmetic(void) {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return before;
#else
    return 0;
#endif
}

static void restore_arithmetic(unsigned before) {
#if defined(__x86_64__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

static void *work(void *arg) {
    seat *own = arg;
    pool *p = own->owner;
    unsigned seen = 0;
    plain_arithmetic();
    for (;;) {
        pthread_mutex_lock(&p->lock);
        while (p->pass == seen && !p->stopping) pthread_cond_wait(&p->wake, &p->lock);
        int stopping = p->stopping;
        seen = p->pass;
        pthread_mutex_unlock(&p->lock);
        if (stopping) return NULL;
        p->run(p->arg, own->number);
    }
}

static void stop(pool *p, int started) {
    pthread_mutex_lock(&p->lock);
    p->stopping = 1;
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 1; i < started; i++) pthread_join(p->workers[i], NULL);
    p->process = 0;
}

static int start(pool *p) {
    p->pass = 0;
    p->stopping = 0;
    atomic_store(&p->next, 0);
    atomic_store(&p->arrived, 0);
    atomic_store(&p->phase, 0);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    for (int i = 1; i < p->threads; i++) {
        p->seats[i] = (seat){p, i};
        if (pthread_create(&p->workers[i], NULL, work, &p->seats[i])) {
            stop(p, i);
            return D3D_NO_THREADS;
        }
    }
    p->process = getpid();
    return D3D_OK;
}

pool *pool_new(int threads) {
    pool *p = new_memory(sizeof *p);
    if (!p) return NULL;
    p->threads = threads;
    p->workers = calloc((size_t)threads, sizeof *p->workers);
    p->seats = calloc((size_t)threads, sizeof *p->seats);
    if (p->workers && p->seats) return p;
    pool_free(p);
    return NULL;
}

void pool_free(pool *p) {
    if (!p) return;
    if (p->process == getpid()) stop(p, p->threads);
    free(p->workers);
    free(p->seats);
    free(p);
}

int pool_threads(const pool *p) { return p->threads; }

int pool_run(pool *p, void (*run)(void *, int), void *arg) {
    if (p->process != getpid()) {
        int status = start(p);
        if (status) return status;
    }
    unsigned before = plain_arithmetic();
    pthread_mutex_lock(&p->lock);
    p->run = run;
    p->arg = arg;
    p->pass++;
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    run(arg, 0);
    restore_arithmetic(before);
    return D3D_OK;
}

static inline void pause_(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void pool_barrier(pool *p) {
    unsigned phase = atomic_load_explicit(&p->phase, memory_order_acquire);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) == p->threads - 1) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&p->next, 0, memory_order_relaxed);
        atomic_store_explicit(&p->phase, phase + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&p->phase, memory_order_acquire) == phase; spins++) {
        if (spins < SPINS) pause_();
        else sched_yield();
    }
}

int pool_take(pool *p) { return atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed); }
