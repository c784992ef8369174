/* A stress of a linked model for tests/cpu/test_aot_robust.py: net(x [n, 10]) -> [n, 4], 1 <= n <= MOST, called by many threads while its
 * weights are replaced. Each thread takes another size every time; every result must be that of the old weights or of the new ones.
 *
 *     model_stress WEIGHTS THREADS CALLS
 *
 * Prints what was wrong and the growth of the memory in use over the last nine tenths of the calls; exits with the number of mistakes. */
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "net.h"

enum { MOST = 96, SETS = 2, MODEL_CONSTANTS = 64 };

static tsm_model *model;
static float x[MOST * 10], want[SETS][MOST * 4];
static int calls;
static int wrong, going, warm;

static void expect(int ok, const char *what) {
  if (ok) return;
  if (__atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED) < 10) fprintf(stderr, "wrong: %s (%s)\n", what, net_last_error());
}

/* All constants, with values that follow from `set`. */
static int load(int set) {
  static const float levels[SETS] = {0.03125f, -0.0625f};
  size_t n = net_constant_count(model);
  const char *names[MODEL_CONSTANTS];
  tsm_tensor values[MODEL_CONSTANTS];
  int rc = n > MODEL_CONSTANTS;
  for (size_t i = 0; i < n && !rc; i++) {
    tsm_constant_info c;
    rc = net_constant(model, i, &c);
    float *data = malloc(c.bytes);
    for (uint64_t k = 0; k < c.bytes / 4; k++) data[k] = levels[set] * (float)(1 + k % 3);
    names[i] = c.name;
    values[i] = (tsm_tensor){data, c.sizes, c.strides, c.ndim, c.dtype, 0, 0, NULL};
  }
  if (!rc) rc = net_load_constants(model, names, values, n);
  for (size_t i = 0; i < n; i++) free(values[i].data);
  return rc;
}

static int near(const float *got, const float *all, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (!(fabsf(got[i] - all[i]) <= 1e-5f * (1 + fabsf(all[i])))) return 0;
  return 1;
}

static int call(int64_t n, float *own) {
  int64_t sizes[] = {n, 10}, made[] = {n, 4};
  tsm_tensor in = {x, sizes, NULL, 2, TSM_F32, 0, 0, NULL}, out = {0};
  if (own) out = (tsm_tensor){own, made, NULL, 2, TSM_F32, 0, 0, NULL};
  if (net_run(model, &in, 1, &out, 1)) return 0;
  int good = near(out.data, want[0], n * 4) || near(out.data, want[1], n * 4);
  net_release(&out);
  return good;
}

static void *work(void *arg) {
  unsigned state = (unsigned)(size_t)arg * 2654435761u + 1;
  float own[MOST * 4];
  for (int k = 0; k < calls; k++) {
    state = state * 1664525u + 1013904223u;
    expect(call(1 + (int64_t)(state >> 16) % MOST, k % 2 ? own : NULL), "a result of no set of weights");
    if (k % 97 == 0) { /* an error in between, and its text stays with this thread */
      int64_t sizes[] = {MOST + 1, 10};
      tsm_tensor in = {x, sizes, NULL, 2, TSM_F32, 0, 0, NULL}, out = {0};
      expect(net_run(model, &in, 1, &out, 1) == TSM_ERROR_SIZE && strstr(net_last_error(), "between 1 and"), "a size outside of the range was taken");
    }
    if (k == calls / 10) __atomic_fetch_add(&warm, 1, __ATOMIC_RELAXED);
  }
  __atomic_fetch_sub(&going, 1, __ATOMIC_RELEASE);
  return NULL;
}

static long held(void) { /* KB that malloc has given out */
  struct mallinfo2 now = mallinfo2();
  return (long)((now.uordblks + now.hblkhd) >> 10);
}

int main(int argc, char **argv) {
  if (argc != 4) return 99;
  tsm_config c = {.size = sizeof c, .weights_path = argv[1]};
  if (net_create(&c, &model)) return puts(net_last_error()), 98;
  for (int i = 0; i < MOST * 10; i++) x[i] = (float)((i * 7) % 19) / 19 - 0.5f;
  int n = atoi(argv[2]), sets = 0;
  calls = atoi(argv[3]);
  for (int set = 0; set < SETS; set++) {
    int64_t sizes[] = {MOST, 10}, made[] = {MOST, 4};
    tsm_tensor in = {x, sizes, NULL, 2, TSM_F32, 0, 0, NULL}, out = {want[set], made, NULL, 2, TSM_F32, 0, 0, NULL};
    expect(!load(set) && !net_run(model, &in, 1, &out, 1), "the expected results");
  }
  expect(!near(want[0], want[1], 4), "both sets give the same");
  pthread_t threads[64];
  going = n;
  for (long i = 0; i < n; i++) pthread_create(&threads[i], NULL, work, (void *)i);
  long before = 0;
  while (__atomic_load_n(&going, __ATOMIC_ACQUIRE) > 0) {
    expect(!load(sets++ % SETS), "new weights were refused");
    if (!before && __atomic_load_n(&warm, __ATOMIC_RELAXED) == n) before = held();
    usleep(300);
  }
  for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
  long growth = before ? held() - before : 0;
  net_delete(model);
  printf("%d threads, %d calls each, %d sets of weights, growth %ld KB\n", n, calls, sets, growth);
  return wrong > 90 ? 90 : wrong;
}
