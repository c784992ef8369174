// Every kind of wrong input to a package, in C++ and (compiled as C) in C: each is an error with its own status, and the model works on.
//     bad_inputs PACKAGE     one line for each case: its name, the status
// The model: x f32 [n, 10], 1 <= n <= 1024.
#ifdef __cplusplus
#include <torchsmith/package.hpp>
#else
#include <torchsmith/package.h>
#endif
#include <stdio.h>
#include <string.h>

static float data[1025 * 10 + 1];

#ifdef __cplusplus
template <class F> static void say(const char *name, F call) {
  int status = 0;
  try {
    call();
  } catch (const torchsmith::Error &e) {
    status = e.what()[0] ? e.status : -1;
  }
  printf("%s %d\n", name, status);
}

int main(int argc, char **argv) {
  using torchsmith::View;
  using torchsmith::view;
  if (argc > 2) {
    say("load", [&] { torchsmith::Model(argv[1], "model", 0, true); });
    return 0;
  }
  torchsmith::Model model(argv[1]);
  double wide[10] = {};
  say("dtype", [&] { model.run({view(wide, {1, 10})}); });
  say("rank", [&] { model.run({view(data, {10})}); });
  say("size", [&] { model.run({view(data, {1, 9})}); });
  say("above", [&] { model.run({view(data, {1025, 10})}); });
  say("below", [&] { model.run({view(data, {0, 10})}); });
  say("null", [&] { model.run({view(static_cast<float *>(nullptr), {1, 10})}); });
  say("few", [&] { model.run({}); });
  say("many", [&] { model.run({view(data, {1, 10}), view(data, {1, 10})}); });
  say("stride", [&] { model.run({view(data, {4, 10}, {20, 1})}); });
  say("alignment", [&] { model.run({View{reinterpret_cast<char *>(data) + 1, TSM_F32, {1, 10}, {}}}); });
  say("unknown", [&] { model.run({View{data, 77, {1, 10}, {}}}); });
  say("name", [&] { model.load_constants({{"absent", view(data, {1})}}); });
  say("constant", [&] { model.load_constants({{"fc1.bias", view(data, {3})}}); });
  say("good", [&] { model.run({view(data, {1024, 10})}); });
  return 0;
}
#else
static torchsmith_model *model;

static void say(const char *name, int64_t ndim, int64_t n, int64_t m, const int64_t *strides, void *at, int32_t dtype, int32_t device, size_t count) {
  int64_t sizes[] = {n, m};
  tsm_tensor in[2] = {{at, sizes, strides, (int32_t)ndim, dtype, device, 0, NULL}}, out = {0};
  in[1] = in[0];
  int status = torchsmith_run(model, in, count, &out, 1);
  printf("%s %d\n", name, status && !torchsmith_model_error(model)[0] ? -1 : status);
  torchsmith_release(model, &out);
}

int main(int argc, char **argv) {
  torchsmith_options options = {.size = sizeof options, .verify = argc > 2};
  int status = torchsmith_load(argv[1], NULL, &options, &model);
  if (argc > 2) return printf("load %d\n", status && !torchsmith_error()[0] ? -1 : status), 0;
  if (status) return puts(torchsmith_error()), 1;
  int64_t apart[] = {20, 1}, one[] = {1, 10};
  say("dtype", 2, 1, 10, NULL, data, TSM_F64, 0, 1);
  say("rank", 1, 10, 0, NULL, data, TSM_F32, 0, 1);
  say("size", 2, 1, 9, NULL, data, TSM_F32, 0, 1);
  say("above", 2, 1025, 10, NULL, data, TSM_F32, 0, 1);
  say("below", 2, 0, 10, NULL, data, TSM_F32, 0, 1);
  say("null", 2, 1, 10, NULL, NULL, TSM_F32, 0, 1);
  say("few", 2, 1, 10, NULL, data, TSM_F32, 0, 0);
  say("many", 2, 1, 10, NULL, data, TSM_F32, 0, 2);
  say("stride", 2, 4, 10, apart, data, TSM_F32, 0, 1);
  say("alignment", 2, 1, 10, NULL, (char *)data + 1, TSM_F32, 0, 1);
  say("unknown", 2, 1, 10, NULL, data, 77, 0, 1);
  say("device", 2, 1, 10, NULL, data, TSM_F32, 2, 1);
  say("negative", -1, 1, 10, NULL, data, TSM_F32, 0, 1);
  tsm_tensor in = {data, NULL, NULL, 2, TSM_F32, 0, 0, NULL}, out = {0};
  printf("sizes %d\n", (int)torchsmith_run(model, &in, 1, &out, 1));
  in.sizes = one;
  printf("inputs %d\n", (int)torchsmith_run(model, NULL, 1, &out, 1));
  printf("outputs %d\n", (int)torchsmith_run(model, &in, 1, NULL, 1));
  tsm_tensor small = {data, one, NULL, 2, TSM_F32, 0, 0, NULL};
  printf("output %d\n", (int)torchsmith_run(model, &in, 1, &small, 1));
  say("good", 2, 1024, 10, NULL, data, TSM_F32, 0, 1);
  torchsmith_free(model);
  return 0;
}
#endif
