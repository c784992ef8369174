/* The process's own threads for parallel_for (pool.h): bounded spinning, then futex sleep; pieces are taken, not given.
 *
 * A caller publishes its launch in a slot and works on it itself; helpers that are awake or get woken join. Each participant has a
 * range of its own, of which it takes the front half, then half of the rest, and so on; who has nothing left takes the back half of
 * somebody else's rest. On an idle machine this is a fixed split, so that data stay in the same core's cache from launch to launch; where
 * a helper is late or has lost its processor the others do its work, and the caller waits only for pieces that were begun.
 *
 * A slot is never freed. A helper enters it by counting itself in `inside` and then looks whether it is open; the caller closes it and
 * waits until nobody is inside: then every piece is done and the slot may be used again. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 16          /* launches at one time; more run inline */
#define CREWS 32          /* parallel regions at one time that lend their threads */
#define MOST 256          /* helpers */
#define PARTS 64          /* ranges of a launch */
#define PIECES 8          /* a range is taken in pieces of no less than 1/8 of it, */
#define STACK (8 << 20)   /* kernels keep rows on the stack */
#define SPIN_IN_CALL 1000 /* us that a helper spins for the next launch of a call that goes on, */
#define SPIN_IDLE 60      /* for the next call, */
#define SPIN_JOIN 100     /* and a caller for pieces that others have begun */

typedef struct {
  _Alignas(64) _Atomic uint64_t span; /* units left: first << 32 | end */
} Part;

typedef struct {
  _Alignas(64) _Atomic uint32_t inside; /* helpers; a futex word */
  _Atomic uint32_t waited;              /* the caller sleeps on it */
  _Alignas(64) _Atomic uint32_t open;
  _Atomic uint32_t taken; /* by a caller */
  _Atomic int32_t joined;
  int32_t threads, parts;
  uint32_t modes; /* rounding and denormals, as the caller has them */
  const ts_launch *launch;
  int64_t n, unit;
  Part part[PARTS];
} Slot;

/* Threads that help with the launches of certain slots. */
struct ts_crew {
  _Alignas(64) _Atomic uint32_t posts; /* launches so far; a futex word */
  _Alignas(64) _Atomic int32_t spinning, sleeping;
  _Atomic int32_t calls; /* that go on and will launch again */
  _Atomic bool stop;
  _Atomic uint32_t taken;
  int n_slots;
  Slot *slots;
};

static Slot own_slots[SLOTS], lent_slots[CREWS];
static ts_crew own = {.slots = own_slots, .n_slots = SLOTS}, lent[CREWS];
static struct {
  _Atomic int32_t helpers; /* of `own` */
  pthread_mutex_t lock;    /* of what follows */
  pthread_t threads[MOST];
  bool ready;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local bool is_helping; /* on a piece: launches from here run inline */

/* ---------------------------------------------------------------- the machine */

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); }
static void futex_wake(_Atomic uint32_t *word, int n) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0); }

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static uint32_t get_modes(void) {
#ifdef __SSE__
  return __builtin_ia32_stmxcsr() & ~0x3fu; /* without the sticky flags */
#else
  return 0;
#endif
}

static void set_modes(uint32_t modes) {
#ifdef __SSE__
  if (get_modes() != modes) __builtin_ia32_ldmxcsr(modes);
#endif
}

static int64_t microseconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

int32_t ts_pool_processors(void) {
  cpu_set_t set;
  int n = sched_getaffinity(0, sizeof set, &set) ? (int)sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&set);
  return n > 0 ? n : 1;
}

int32_t ts_pool_helpers(void) { return atomic_load(&pool.helpers); }

/* ---------------------------------------------------------------- pieces */

/* Units [*lo, *hi) for whoever prefers range `own`: the front of that one, else the back of another. */
static bool take(Slot *s, int own, int64_t *lo, int64_t *hi) {
  for (int i = 0; i < s->parts; i++) {
    int p = own + i < s->parts ? own + i : own + i - s->parts;
    uint64_t span = atomic_load_explicit(&s->part[p].span, memory_order_relaxed);
    for (;;) {
      uint32_t a = (uint32_t)(span >> 32), b = (uint32_t)span;
      if (a >= b) break;
      uint32_t k = (b - a + 1) / 2;
      uint64_t rest = i == 0 ? (uint64_t)(a + k) << 32 | b : (uint64_t)a << 32 | (b - k);
      if (!atomic_compare_exchange_weak_explicit(&s->part[p].span, &span, rest, memory_order_acq_rel, memory_order_relaxed)) continue;
      *lo = i == 0 ? a : b - k;
      *hi = *lo + k;
      return true;
    }
  }
  return false;
}

static void work(Slot *s, int own) {
  const ts_launch *l = s->launch;
  int64_t lo, hi;
  while (take(s, own, &lo, &hi)) {
    int64_t end = hi * s->unit;
    l->fn(l->bufs, l->syms, lo * s->unit, end < s->n ? end : s->n);
  }
}

/* ---------------------------------------------------------------- helpers */

static void leave(Slot *s) {
  if (atomic_fetch_sub(&s->inside, 1) == 1 && atomic_load(&s->waited)) futex_wake(&s->inside, 1);
}

/* Work on whatever is open; true if there was something. */
static bool help(ts_crew *c) {
  bool found = false;
  for (int i = 0; i < c->n_slots; i++) {
    Slot *s = &c->slots[i];
    if (!atomic_load_explicit(&s->open, memory_order_relaxed)) continue;
    atomic_fetch_add(&s->inside, 1);
    if (atomic_load(&s->open)) {
      int part = atomic_fetch_add(&s->joined, 1) + 1;
      if (part < s->threads) {
        set_modes(s->modes);
        work(s, part % s->parts);
        found = true;
      }
    }
    leave(s);
  }
  return found;
}

static void await_post(ts_crew *c, uint32_t seen) {
  int64_t start = microseconds();
  atomic_fetch_add(&c->spinning, 1);
  for (int i = 1; atomic_load_explicit(&c->posts, memory_order_acquire) == seen; i++) {
    relax();
    if (i % 16) continue;
    int64_t limit = atomic_load_explicit(&c->calls, memory_order_relaxed) > 0 ? SPIN_IN_CALL : SPIN_IDLE;
    if (microseconds() - start > limit) break;
  }
  atomic_fetch_sub(&c->spinning, 1);
  if (atomic_load(&c->posts) != seen) return;
  atomic_fetch_add(&c->sleeping, 1);
  futex_wait(&c->posts, seen); /* returns at once if a launch came in between */
  atomic_fetch_sub(&c->sleeping, 1);
}

/* Until the crew is told to stop. */
static void serve(ts_crew *c) {
  uint32_t modes = get_modes();
  is_helping = true;
  for (;;) {
    uint32_t seen = atomic_load(&c->posts);
    if (atomic_load(&c->stop)) break;
    if (!help(c)) await_post(c, seen);
  }
  is_helping = false;
  set_modes(modes);
}

static void stop(ts_crew *c) {
  atomic_store(&c->stop, true);
  atomic_fetch_add(&c->posts, 1);
  if (atomic_load(&c->sleeping) > 0) futex_wake(&c->posts, MOST);
}

static void *helper(void *arg) {
  serve(arg);
  return NULL;
}

static void hold(void) { pthread_mutex_lock(&pool.lock); }
static void let_go(void) { pthread_mutex_unlock(&pool.lock); }

static void clear(ts_crew *c) {
  for (int i = 0; i < c->n_slots; i++) c->slots[i].inside = c->slots[i].waited = c->slots[i].open = c->slots[i].taken = 0;
  c->spinning = c->sleeping = c->calls = 0;
}

/* A child of fork has none of the helpers, and none of the callers that held slots. */
static void forget(void) {
  clear(&own);
  for (int i = 0; i < CREWS; i++) {
    clear(&lent[i]);
    lent[i].taken = 0;
  }
  pool.helpers = 0;
  is_helping = false;
  pthread_mutex_unlock(&pool.lock);
}

/* Make sure of `wanted` helpers, as far as the system gives them. */
__attribute__((cold)) static void grow(int wanted) {
  pthread_attr_t attr;
  sigset_t all, old;
  pthread_mutex_lock(&pool.lock);
  if (!pool.ready) pthread_atfork(hold, let_go, forget);
  pool.ready = true;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &old); /* signals are for the user's threads */
  pthread_attr_init(&attr);
  pthread_attr_setstacksize(&attr, STACK);
  int have = atomic_load(&pool.helpers);
  while (have < wanted && have < MOST && !pthread_create(&pool.threads[have], &attr, helper, &own)) atomic_store(&pool.helpers, ++have);
  pthread_attr_destroy(&attr);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  pthread_mutex_unlock(&pool.lock);
}

void ts_pool_stop(void) {
  pthread_mutex_lock(&pool.lock);
  stop(&own);
  for (int i = 0; i < pool.helpers; i++) pthread_join(pool.threads[i], NULL);
  atomic_store(&pool.helpers, 0);
  atomic_store(&own.stop, false);
  pthread_mutex_unlock(&pool.lock);
}

/* ---------------------------------------------------------------- callers */

static bool claim(_Atomic uint32_t *taken) {
  uint32_t none = 0;
  return !atomic_load_explicit(taken, memory_order_relaxed) && atomic_compare_exchange_strong(taken, &none, 1);
}

static Slot *claim_slot(ts_crew *c) {
  for (int i = 0; i < c->n_slots; i++)
    if (claim(&c->slots[i].taken)) return &c->slots[i];
  return NULL;
}

static void publish(ts_crew *c, Slot *s, int helpers) {
  atomic_store(&s->open, 1);
  atomic_fetch_add(&c->posts, 1);
  int missing = helpers - atomic_load(&c->spinning), asleep = atomic_load(&c->sleeping);
  if (missing > 0 && asleep > 0) futex_wake(&c->posts, missing < asleep ? missing : asleep);
}

static void await_helpers(Slot *s) {
  int64_t start = 0;
  for (int i = 1; atomic_load_explicit(&s->inside, memory_order_acquire); i++) {
    relax();
    if (i % 16) continue;
    if (!start) start = microseconds();
    else if (microseconds() - start > SPIN_JOIN) break;
  }
  uint32_t still;
  atomic_store(&s->waited, 1);
  while ((still = atomic_load(&s->inside))) futex_wait(&s->inside, still);
  atomic_store(&s->waited, 0);
}

/* As many threads as there are shares of at least a grain. */
static int32_t useful(int64_t n, int64_t grain, int32_t threads) {
  int64_t most = n / (grain < 1 ? 1 : grain);
  if (threads > most) threads = (int32_t)most;
  return threads > MOST + 1 ? MOST + 1 : threads;
}

static void divide(Slot *s, const ts_launch *l, int64_t n, int32_t threads) {
  int64_t unit = n / ((int64_t)threads * PIECES);
  if (unit < 1) unit = 1;
  while (n / unit >= INT32_MAX) unit *= 2;
  int64_t units = (n + unit - 1) / unit;
  s->launch = l;
  s->n = n;
  s->unit = unit;
  s->threads = threads;
  s->parts = threads < PARTS ? threads : PARTS;
  s->modes = get_modes();
  for (int64_t p = 0; p < s->parts; p++)
    atomic_store_explicit(&s->part[p].span, (uint64_t)(units * p / s->parts) << 32 | (uint64_t)(units * (p + 1) / s->parts), memory_order_relaxed);
  atomic_store_explicit(&s->joined, 0, memory_order_relaxed);
}

static void launch(ts_crew *c, const ts_launch *l, int64_t n, int32_t threads) {
  Slot *s = threads < 2 || is_helping ? NULL : claim_slot(c);
  if (!s) {
    if (n > 0) l->fn(l->bufs, l->syms, 0, n);
    return;
  }
  if (c == &own && threads > atomic_load_explicit(&pool.helpers, memory_order_relaxed) + 1) grow(threads - 1);
  divide(s, l, n, threads);
  publish(c, s, threads - 1);
  is_helping = true;
  work(s, 0);
  is_helping = false;
  atomic_store(&s->open, 0);
  await_helpers(s);
  atomic_store(&s->taken, 0);
}

void ts_pool_for(const ts_launch *l, int64_t n, int64_t grain, int32_t threads) { launch(&own, l, n, useful(n, grain, threads)); }
void ts_pool_enter(void) { atomic_fetch_add_explicit(&own.calls, 1, memory_order_relaxed); }
void ts_pool_leave(void) { atomic_fetch_sub_explicit(&own.calls, 1, memory_order_relaxed); }

/* ---------------------------------------------------------------- borrowed threads */

__attribute__((cold)) ts_crew *ts_crew_open(void) {
  for (int i = 0; i < CREWS; i++) {
    ts_crew *c = &lent[i];
    if (!claim(&c->taken)) continue;
    c->slots = &lent_slots[i];
    c->n_slots = 1;
    atomic_store(&c->calls, 1);
    atomic_store(&c->stop, false);
    return c;
  }
  return NULL;
}

void ts_crew_help(ts_crew *c) { serve(c); }
void ts_crew_for(ts_crew *c, const ts_launch *l, int64_t n, int64_t grain, int32_t threads) { launch(c, l, n, useful(n, grain, threads)); }
void ts_crew_end(ts_crew *c) { stop(c); }
void ts_crew_close(ts_crew *c) { atomic_store(&c->taken, 0); }
