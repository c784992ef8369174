/* Random calls of a linked model, right and wrong, for tests/cpu/fuzz_packages.py; compiled with sanitizers.
 *
 *     package_fuzz WEIGHTS SEED CALLS
 *
 * Two models live the same life: one is called with plain contiguous tensors, the other with the same values in any order of memory, with
 * NULLs, wrong counts, ranks, dtypes, sizes, strides and addresses, with an allocator that fails, and with the caller's own outputs. What
 * it takes has to give what the first one gives; what it refuses must change nothing: not its inputs, not its constants. The caller's memory
 * is as large as sizes and strides say and not a byte larger. Prints the number of calls taken and refused; exits with the number of mistakes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "net.h"

enum { RANK = 72, MOST = 24 };

static uint64_t state;
static int wrong, taken, refused, failing;

static unsigned draw(unsigned n) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (unsigned)(state >> 33) % n;
}

static int64_t odd(void) {
  static const int64_t rows[] = {0, 1, 2, 3, 5, -1, -2, 17, 64, 65, 95, 96, 97, 1 << 20, INT32_MAX, (int64_t)INT32_MAX + 1, (int64_t)1 << 40,
                                 (int64_t)1 << 61, (int64_t)1 << 62, INT64_MAX, INT64_MIN};
  return rows[draw(sizeof rows / sizeof *rows)];
}

static void expect(int ok, const char *what) {
  if (!ok && wrong++ < 10) printf("wrong: %s (%s)\n", what, net_last_error());
}

static size_t item(int32_t dtype) {
  static const size_t sizes[] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16, 4, 2, 4, 8};
  return dtype >= 0 && dtype < 16 ? sizes[dtype] : 1;
}

typedef struct {
  tsm_tensor t;
  int64_t sizes[RANK], strides[RANK];
  char *memory;
  int shift; /* bytes between the memory's start and the first element */
} Given;

static void dense(int32_t ndim, const int64_t *sizes, int64_t *strides) {
  int64_t step = 1;
  for (int32_t k = ndim - 1; k >= 0; k--) strides[k] = step, step *= sizes[k] > 1 ? sizes[k] : 1;
}

static int64_t count(const Given *g) {
  int64_t n = 1;
  for (int32_t k = 0; k < g->t.ndim; k++) n *= g->sizes[k];
  return n;
}

/* Memory for exactly what sizes and strides reach; 0 where that is out of reach. */
static int place(Given *g) {
  __int128 lo = 0, hi = 0, n = 1;
  for (int32_t k = 0; k < g->t.ndim && k < RANK; k++) {
    __int128 reach = (__int128)(g->sizes[k] - 1) * g->strides[k];
    n *= g->sizes[k] > 0 ? g->sizes[k] < 1 << 24 ? g->sizes[k] : 1 << 24 : 0;
    if (g->sizes[k] < 0 || n > 1 << 22) return 0;
    *(reach < 0 ? &lo : &hi) += reach;
  }
  if (n == 0) lo = 0, hi = -1;
  if (hi - lo > 1 << 22) return 0;
  free(g->memory);
  g->memory = malloc((size_t)(hi - lo + 1) * item(g->t.dtype) + (size_t)g->shift);
  g->t.data = g->memory + g->shift + (size_t)-lo * item(g->t.dtype);
  return 1;
}

static char *element(const Given *g, int64_t number) {
  char *at = g->t.data;
  for (int32_t k = g->t.ndim - 1; k >= 0; k--) {
    at += number % g->sizes[k] * g->strides[k] * (int64_t)item(g->t.dtype);
    number /= g->sizes[k];
  }
  return at;
}

static void fill(Given *g, int64_t number) {
  char *at = element(g, number);
  int v = (int)draw(4);
  float f = (float)v - 1.5f;
  double d = f;
  switch (g->t.dtype) {
  case TSM_F64: memcpy(at, &d, 8); break;
  case TSM_F32: memcpy(at, &f, 4); break;
  case TSM_BF16: memcpy(at, (char *)&f + 2, 2); break;
  case TSM_F16: memcpy(at, &(uint16_t){(uint16_t)(0x3800 + (v << 10))}, 2); break;
  default:
    memset(at, 0, item(g->t.dtype));
    *at = (char)(g->t.dtype == TSM_BOOL ? v & 1 : v);
  }
}

/* A contiguous tensor of random values. */
static void plain(Given *g, int32_t dtype, int32_t ndim, const int64_t *sizes) {
  memset(g, 0, sizeof *g);
  for (int32_t k = 0; k < RANK; k++) g->sizes[k] = g->strides[k] = 1;
  for (int32_t k = 0; k < ndim; k++) g->sizes[k] = sizes[k];
  dense(ndim, g->sizes, g->strides);
  g->t = (tsm_tensor){NULL, g->sizes, draw(2) ? g->strides : NULL, ndim, dtype, 0, 0, NULL};
  place(g);
  for (int64_t i = 0; i < count(g); i++) fill(g, i);
}

/* The same values in memory of their own, in another order. */
static void elsewhere(Given *to, const Given *from, int is_plain) {
  *to = *from;
  to->memory = NULL;
  to->t.sizes = to->sizes, to->t.strides = to->strides;
  if (is_plain) {
    place(to);
    for (int64_t i = 0; i < count(from); i++) memcpy(element(to, i), element(from, i), item(from->t.dtype));
    return;
  }
  int32_t ndim = to->t.ndim, order[RANK];
  for (int32_t k = 0; k < ndim; k++) order[k] = k;
  for (int32_t k = ndim - 1; k > 0; k--) {
    int32_t j = (int32_t)draw((unsigned)k + 1), kept = order[k];
    order[k] = order[j], order[j] = kept;
  }
  int64_t step = 1 + draw(2);
  for (int32_t k = ndim - 1; k >= 0; k--) {
    int32_t d = order[k];
    to->strides[d] = to->sizes[d] == 1 && draw(3) == 0 ? odd() % 1000 : step;
    step *= to->sizes[d] > 1 ? to->sizes[d] : 1;
    step += draw(3);
  }
  if (!place(to)) { /* too far apart */
    dense(ndim, to->sizes, to->strides);
    place(to);
  }
  for (int64_t i = 0; i < count(from); i++) memcpy(element(to, i), element(from, i), item(from->t.dtype));
}

/* One thing about it made strange. 0: a call would be the caller's mistake that nobody can notice. */
static int spoil(Given *g) {
  int32_t k = g->t.ndim ? (int32_t)draw((unsigned)g->t.ndim) : 0;
  switch (draw(10)) {
  case 0: g->t.data = NULL; return 1;
  case 1: g->t.sizes = NULL; return 1;
  case 2: g->t.ndim = (int32_t)odd(); return 1;
  case 3: g->t.dtype = (int32_t)odd(); return 1;
  case 4: g->t.device = (int32_t)odd(); return 1;
  case 5: g->t.kind = (int32_t)odd(); return 1;
  case 6: g->shift = 1; break;
  case 7: g->sizes[k] = odd(); break;
  case 8: g->strides[k] = odd(); break;
  default: g->t.ndim += draw(2) ? 1 : -1;
  }
  if (g->t.ndim < 0) return 1;
  int64_t n = 1;
  for (int32_t d = 0; d < g->t.ndim; d++) n = g->sizes[d] < 0 || n > 1 << 22 ? (int64_t)1 << 40 : n * (g->sizes[d] < 1 << 24 ? g->sizes[d] : 1 << 24);
  if (n > 1 << 22) return 1; /* sizes that no input may have */
  if (!place(g)) return 0;
  for (int64_t i = 0; i < count(g); i++) fill(g, i);
  return 2;
}

static void drop(Given *g) { free(g->memory); }

static int near(const char *a, const char *b, int32_t dtype) {
  if (!memcmp(a, b, item(dtype))) return 1;
  float x, y;
  double p, q;
  if (dtype == TSM_F32) return memcpy(&x, a, 4), memcpy(&y, b, 4), x - y <= 1e-4f && y - x <= 1e-4f;
  if (dtype == TSM_F64) return memcpy(&p, a, 8), memcpy(&q, b, 8), p - q <= 1e-9 && q - p <= 1e-9;
  return 0;
}

static int same(const tsm_tensor *a, const tsm_tensor *b) {
  if (a->kind != b->kind || a->ndim != b->ndim || a->dtype != b->dtype) return 0;
  if (a->kind == 1) return 1;
  Given x = {.t = *a}, y = {.t = *b};
  for (int32_t k = 0; k < a->ndim; k++) {
    if (a->sizes[k] != b->sizes[k]) return 0;
    x.sizes[k] = y.sizes[k] = a->sizes[k];
  }
  dense(a->ndim, x.sizes, x.strides), dense(b->ndim, y.sizes, y.strides);
  for (int32_t k = 0; k < a->ndim; k++) {
    if (a->strides) x.strides[k] = a->strides[k];
    if (b->strides) y.strides[k] = b->strides[k];
  }
  for (int64_t i = 0; i < count(&x); i++)
    if (!near(element(&x, i), element(&y, i), a->dtype)) return 0;
  return 1;
}

static void *allocate(void *context, size_t bytes) {
  if (failing && draw(3) == 0) return NULL;
  return aligned_alloc(64, bytes);
}

static void release(void *context, void *memory) { free(memory); }

static tsm_model *model, *twin;

static void release_all(tsm_tensor *out, size_t n) {
  for (size_t i = 0; i < n; i++) net_release(&out[i]);
}

static void call(void) {
  size_t n = net_input_count(model), m = net_output_count(model);
  Given good[MOST], bad[MOST], before[MOST], own[MOST];
  tsm_tensor in[MOST + 1], out[MOST + 1], want[MOST];
  int64_t batch = 1 + draw(draw(8) ? 6 : 96);
  int legal = 1, spoiled = 0, skip = 0, is_plain = draw(3) == 0;
  memset(own, 0, sizeof own), memset(want, 0, sizeof want), memset(out, 0, sizeof out);
  for (size_t i = 0; i < n; i++) {
    tsm_tensor_info info;
    int64_t sizes[RANK];
    expect(!net_input(model, i, &info), "no input");
    for (int32_t k = 0; k < info.ndim; k++) sizes[k] = info.lo[k] == info.hi[k] ? info.lo[k] : batch;
    plain(&good[i], info.dtype < 0 ? TSM_F32 : info.dtype, info.ndim < 0 ? 0 : info.ndim, sizes);
    elsewhere(&bad[i], &good[i], is_plain);
    elsewhere(&before[i], &good[i], 1);
    if (draw(4) == 0) {
      int how = spoil(&bad[i]);
      spoiled = 1, skip |= how == 0;
    }
    in[i] = good[i].t;
  }
  expect(!net_run(twin, in, n, want, m), "a right call was refused");
  for (size_t i = 0; i < m; i++) {
    if (want[i].kind == 1 || want[i].ndim > RANK || draw(3)) continue;
    plain(&own[i], want[i].dtype, want[i].ndim, want[i].sizes);
    if (want[i].strides) memcpy(own[i].strides, want[i].strides, sizeof(int64_t) * (size_t)want[i].ndim);
    own[i].t.strides = own[i].strides;
    place(&own[i]);
    if (draw(4) == 0 && spoil(&own[i]) == 0) place(&own[i]);
    out[i] = own[i].t;
    if (own[i].t.sizes) out[i].sizes = own[i].sizes;
    if (own[i].t.strides) out[i].strides = own[i].strides;
  }
  for (size_t i = 0; i < n; i++) {
    in[i] = bad[i].t;
    if (bad[i].t.sizes) in[i].sizes = bad[i].sizes;
    in[i].strides = bad[i].t.strides ? bad[i].strides : NULL;
  }
  size_t given = draw(12) ? n : draw((unsigned)n + 2), room = draw(12) ? m : draw((unsigned)m + 2);
  if (given > n) in[n] = in[0];
  failing = draw(6) == 0;
  int rc = skip ? -1 : draw(40) == 0 ? net_run(draw(2) ? NULL : model, n && draw(2) ? NULL : in, given, NULL, m ? m : 1) : net_run(model, in, given, out, room);
  failing = 0;
  legal = rc == 0;
  rc ? refused++ : taken++;
  expect(rc >= -1 && (rc <= 0 || net_last_error()[0]), "a status without a text");
  if (legal && !spoiled) {
    for (size_t i = 0; i < m; i++) {
      expect(same(&out[i], &want[i]), "another result");
      if (!same(&out[i], &want[i]) && getenv("DEBUG")) {
        printf("output %zu of %zu dtype %d ndim %d own %d kind %d:", i, m, out[i].dtype, out[i].ndim, own[i].memory != NULL, out[i].kind);
        for (int k = 0; k < out[i].ndim; k++) printf(" %lld/%lld", (long long)out[i].sizes[k], (long long)(out[i].strides ? out[i].strides[k] : -99));
        for (int k = 0; k < want[i].ndim; k++) printf(" want %lld/%lld", (long long)want[i].sizes[k], (long long)(want[i].strides ? want[i].strides[k] : -99));
        puts("");
      }
    }
    for (size_t i = 0; i < n; i++) expect(same(&bad[i].t, &good[i].t), "inputs are written otherwise");
  }
  /* sizes of outputs are known, and memory for them is asked for, when the program runs: inputs and constants may have been written */
  int is_late = !strncmp(net_last_error(), "output", 6) ? rc == TSM_ERROR_SIZE || rc == TSM_ERROR_STRIDE : rc == TSM_ERROR_MEMORY;
  if (is_late) {
    net_delete(twin), net_delete(model);
    twin = model = NULL;
  } else if (!legal && !spoiled && !skip) { /* what was refused changed nothing */
    for (size_t i = 0; i < n; i++) expect(same(&bad[i].t, &before[i].t), "a refused call wrote to its input");
  }
  if (is_late) {
  } else if (legal && spoiled) { /* other values: the twin has to see them too */
    for (size_t i = 0; i < m; i++) net_release(&want[i]);
    net_delete(twin), net_delete(model);
    twin = model = NULL;
  } else if (!legal) {
    tsm_tensor again[MOST];
    memset(again, 0, sizeof again);
    for (size_t i = 0; i < n; i++) in[i] = before[i].t, in[i].sizes = before[i].sizes, in[i].strides = before[i].strides;
    expect(!net_run(model, in, n, again, m), "a right call was refused after a wrong one");
    for (size_t i = 0; i < m; i++) expect(same(&again[i], &want[i]), "a refused call changed the model");
    release_all(again, m);
  }
  release_all(out, m), release_all(want, m);
  for (size_t i = 0; i < n; i++) drop(&good[i]), drop(&bad[i]), drop(&before[i]);
  for (size_t i = 0; i < m; i++) drop(&own[i]);
}

static void update(void) {
  size_t all = net_constant_count(model), n = 0;
  if (!all) return;
  Given good[MOST + 1], bad[MOST + 1];
  const char *names[MOST + 1], *odd_names[MOST + 1];
  tsm_tensor values[MOST + 1], odd_values[MOST + 1];
  int spoiled = 0, skip = 0;
  for (size_t i = 0; i < all && n < MOST; i++) {
    tsm_constant_info c;
    expect(!net_constant(model, i, &c), "no constant");
    if (draw(2)) continue;
    plain(&good[n], c.dtype, c.ndim, c.sizes);
    elsewhere(&bad[n], &good[n], draw(2));
    names[n] = odd_names[n] = c.name;
    if (draw(6) == 0) {
      skip |= spoil(&bad[n]) == 0;
      spoiled = 1;
    }
    values[n] = good[n].t, values[n].sizes = good[n].sizes, values[n].strides = good[n].t.strides ? good[n].strides : NULL;
    odd_values[n] = bad[n].t;
    if (bad[n].t.sizes) odd_values[n].sizes = bad[n].sizes;
    if (bad[n].t.strides) odd_values[n].strides = bad[n].strides;
    n++;
  }
  size_t count_ = n;
  if (n && draw(8) == 0) {
    spoiled = 1;
    switch (draw(4)) {
    case 0: odd_names[draw((unsigned)n)] = NULL; break;
    case 1: odd_names[draw((unsigned)n)] = "no such constant \xff\xfe%s%n"; break;
    case 2: odd_names[n] = odd_names[0], odd_values[n] = odd_values[0], count_++; break;
    default: odd_names[draw((unsigned)n)] = "";
    }
  }
  int rc = skip ? -1 : draw(30) == 0 ? net_load_constants(model, NULL, odd_values, count_ ? count_ : 1) : net_load_constants(model, odd_names, odd_values, count_);
  rc ? refused++ : taken++;
  if (rc == 0 && spoiled) {
    net_delete(twin), net_delete(model);
    twin = model = NULL;
  } else {
    if (rc) call(); /* with the old values */
    if (twin) expect(!net_load_constants(twin, names, values, n), "right constants were refused");
    if (rc && model) expect(!net_load_constants(model, names, values, n), "right constants were refused after wrong ones");
  }
  for (size_t i = 0; i < n; i++) drop(&good[i]), drop(&bad[i]);
}

static void ask(void) {
  tsm_tensor_info t;
  tsm_constant_info c;
  size_t at = (size_t)odd();
  if (at >= net_input_count(model)) expect(net_input(model, at, &t), "an input that is none");
  if (at >= net_output_count(model)) expect(net_output(model, at, &t), "an output that is none");
  if (at >= net_constant_count(model)) expect(net_constant(model, at, &c), "a constant that is none");
  expect(net_input(model, 0, NULL) && net_output(model, 0, NULL) && net_constant(model, 0, NULL), "a NULL was taken");
  net_release(NULL);
  net_delete(NULL);
  expect(net_info(model)[0] == '{', "no description");
}

static int create(const char *weights, tsm_model **out, int strange) {
  tsm_config c = {.size = sizeof c, .weights_path = weights, .threads = (int32_t)draw(3), .allocate = allocate, .release = release};
  if (strange) switch (draw(7)) {
    case 0: c.size = (uint32_t)odd(); break;
    case 1: c.threads = (int32_t)odd(); break;
    case 2: c.weights_offset = (uint64_t)odd(); break;
    case 3: c.weights_size = (uint64_t)odd(); break;
    case 4: c.weights_path = draw(2) ? "/nowhere/at all" : "/proc/self/mem"; break;
    case 5: c.device = (int32_t)odd(); break;
    default: c.weights_path = "/dev/null";
    }
  return net_create(&c, out);
}

int main(int argc, char **argv) {
  if (argc != 4) return 99;
  state = strtoull(argv[2], NULL, 10) * 7919 + 12345;
  int calls = atoi(argv[3]);
  for (int k = 0; k < calls; k++) {
    if (!model) expect(!create(argv[1], &model, 0) && !create(argv[1], &twin, 0), "the model cannot be made");
    if (!model || !twin) return 98;
    switch (draw(16)) {
    case 0: case 1: update(); break;
    case 2: ask(); break;
    case 3: {
      tsm_model *other = NULL;
      int rc = create(argv[1], &other, 1);
      expect(rc == 0 || (!other && net_last_error()[0]), "a model that was refused");
      if (!rc) net_delete(other);
      break;
    }
    default: call();
    }
  }
  if (model) net_delete(model), net_delete(twin);
  printf("%d calls: %d taken, %d refused, %d wrong\n", calls, taken, refused, wrong);
  return wrong > 90 ? 90 : wrong;
}
