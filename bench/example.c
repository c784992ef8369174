/* The example model from C: `example MODEL` loads and runs it once, `example MODEL CALLS` times that many calls, at batch 1.
 * Out, one a line, nanoseconds on the monotonic clock: main's start, the loaded model, the first result; then the peak of memory in KB;
 * or ns per call, the output the caller's; the same, the output the model's; ns of a call that is refused at the last of its checks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <torchsmith/package.h>

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int fail(const char *text) {
  fprintf(stderr, "%s\n", text);
  return 1;
}

int main(int argc, char **argv) {
  int64_t began = now();
  torchsmith_model *model;
  torchsmith_options one = {sizeof one, 1, 0, NULL, NULL, NULL};
  if (argc < 2 || torchsmith_load(argv[1], NULL, &one, &model)) return fail(torchsmith_error());
  int64_t loaded = now();
  float data[10], result[1];
  for (int i = 0; i < 10; i++) data[i] = 0.01f * (float)i;
  int64_t sizes[] = {1, 10}, wrong[] = {1, 11}, shape[] = {1, 1};
  tsm_tensor x = {data, sizes, NULL, 2, TSM_F32, 0, 0, NULL}, y = {result, shape, NULL, 2, TSM_F32, 0, 0, NULL};
  if (torchsmith_run(model, &x, 1, &y, 1)) return fail(torchsmith_model_error(model));
  int64_t first = now();
  if (argc < 3) {
    char line[256];
    FILE *status = fopen("/proc/self/status", "r");
    printf("%lld\n%lld\n%lld\n", (long long)began, (long long)loaded, (long long)first);
    while (status && fgets(line, sizeof line, status))
      if (!strncmp(line, "VmHWM:", 6)) printf("%lld\n", atoll(line + 6));
    return 0;
  }
  long calls = atol(argv[2]);
  for (int kind = 0; kind < 3; kind++) {
    if (kind == 2) x.sizes = wrong;
    int64_t start = now();
    for (long i = 0; i < calls; i++) {
      tsm_tensor z = {0};
      if ((torchsmith_run(model, &x, 1, kind == 1 ? &z : &y, 1) == 0) != (kind < 2)) return fail(torchsmith_model_error(model));
      if (kind == 1) torchsmith_release(model, &z);
    }
    printf("%.2f\n", (double)(now() - start) / (double)calls);
  }
  return 0;
}
