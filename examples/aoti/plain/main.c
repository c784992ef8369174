/* Run model.pt2 (or model.so) with libc alone. */
#include <stdio.h>
#include <torchsmith/package.h>

static int run(torchsmith_model *model, int64_t batch) {
  float data[80];
  for (int i = 0; i < 80; i++) data[i] = 0.01f * (float)i;
  int64_t sizes[] = {batch, 10};
  tsm_tensor x = {data, sizes, NULL, 2, TSM_F32, 0, 0, NULL}, y = {0};
  if (torchsmith_run(model, &x, 1, &y, 1)) {
    fprintf(stderr, "%s\n", torchsmith_model_error(model));
    return 1;
  }
  for (int64_t i = 0; i < y.sizes[0]; i++) printf("%.4f\n", (double)((float *)y.data)[i]);
  torchsmith_release(model, &y);
  return 0;
}

int main(int argc, char **argv) {
  torchsmith_model *model;
  if (torchsmith_load(argc > 1 ? argv[1] : "model.pt2", NULL, NULL, &model)) {
    fprintf(stderr, "%s\n", torchsmith_error());
    return 1;
  }
  puts("Result from the first inference:");
  int failed = run(model, 8);
  puts("Result from the second inference:");
  failed |= run(model, 1);
  torchsmith_free(model);
  return failed;
}
