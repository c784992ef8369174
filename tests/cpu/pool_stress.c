/* A stress of csrc/native/pool.c for tests/cpu/test_pool.py: prints what was wrong, exits with the number of mistakes. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "native/pool.h"

static int rounds;
static _Atomic int wrong;

static void expect(int ok, const char *what) {
  if (ok) return;
  wrong++;
  fprintf(stderr, "wrong: %s\n", what);
}

static void add_one(void *const *bufs, const int64_t *syms, int64_t lo, int64_t hi) {
  int *x = bufs[0];
  for (int64_t i = lo; i < hi; i++) x[i] += 1;
}

static void nested(void *const *bufs, const int64_t *syms, int64_t lo, int64_t hi) {
  for (int64_t i = lo; i < hi; i++) {
    void *row[] = {(int *)bufs[0] + i * 64};
    ts_launch l = {add_one, row, NULL};
    ts_pool_for(&l, 64, 1, 4);
  }
}

static int all(const int *x, int64_t n, int want) {
  for (int64_t i = 0; i < n; i++)
    if (x[i] != want) return 0;
  return 1;
}

static void launches(unsigned seed) {
  enum { MOST = 1 << 13 };
  int *x = calloc(MOST + 1, sizeof *x);
  void *bufs[] = {x};
  for (int r = 0; r < rounds; r++) {
    int64_t n = rand_r(&seed) % MOST, grain = 1 + rand_r(&seed) % 600;
    int threads = 1 + rand_r(&seed) % 6, times = 1 + rand_r(&seed) % 4;
    ts_launch l = {r % 3 ? add_one : nested, bufs, NULL};
    int64_t items = r % 3 ? n : n / 64;
    memset(x, 0, MOST * sizeof *x);
    for (int t = 0; t < times; t++) ts_pool_for(&l, items, grain, threads);
    expect(all(x, r % 3 ? n : n / 64 * 64, times), "an item was left out or done twice");
    expect(x[MOST] == 0, "an item past the end");
  }
  free(x);
}

static void *thread_of(void *arg) {
  launches((unsigned)(uintptr_t)arg);
  return NULL;
}

static void together(int n) {
  pthread_t threads[16];
  for (int i = 0; i < n; i++) pthread_create(&threads[i], NULL, thread_of, (void *)(uintptr_t)(i + 1));
  for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
}

static void *lend(void *crew) {
  ts_crew_help(crew);
  return NULL;
}

static void borrowed(void) {
  int x[512];
  void *bufs[] = {x};
  ts_launch l = {add_one, bufs, NULL};
  for (int r = 0; r < rounds; r++) {
    pthread_t helpers[2];
    ts_crew *crew = ts_crew_open();
    memset(x, 0, sizeof x);
    for (int i = 0; i < 2; i++) pthread_create(&helpers[i], NULL, lend, crew);
    for (int t = 0; t < 5; t++) ts_crew_for(crew, &l, 512, 8, 3);
    ts_crew_end(crew);
    for (int i = 0; i < 2; i++) pthread_join(helpers[i], NULL);
    ts_crew_close(crew);
    expect(all(x, 512, 5), "borrowed threads");
  }
}

static void forked(void) {
  pid_t child = fork();
  if (child == 0) {
    expect(ts_pool_helpers() == 0, "a child with helpers");
    launches(7);
    expect(ts_pool_helpers() > 0, "a child without helpers");
    _exit(wrong != 0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  expect(status == 0, "the child of fork");
}

int main(int argc, char **argv) {
  rounds = atoi(argv[1]);
  launches(1);
  together(8);
  together(16);
  borrowed();
  if (argc > 2) forked();
  together(3);
  ts_pool_stop();
  expect(ts_pool_helpers() == 0, "helpers after stop");
  together(2);
  ts_pool_stop();
  return wrong != 0;
}
