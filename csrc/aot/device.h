/* Models whose kernels run on another device: what their generated description names, and what the engine and the doors ask of it.
 *
 * Only a description of such a model names TS_CUDA_SERVICES; without one the linker leaves device.c and native/cuda.c out. */
#ifndef TORCHSMITH_AOT_DEVICE_H
#define TORCHSMITH_AOT_DEVICE_H
#include "aot/model.h"
#include "native/cuda.h"

struct ts_device_services {
  /* Finds the driver, and code for this device in the library; device 0: the current one, n: number n - 1. A tsm_status. */
  int32_t (*open)(tsm_model *m, int32_t device);
  void (*close)(tsm_model *m);
  /* Between these two a call queues its work: on `stream`, with workspaces from `memory` (NULL: the driver's). `room` lives that long. */
  int32_t (*begin)(ts_call *call, ts_cuda_call *room, void *stream, const ts_cuda_memory *memory, ts_host *host);
  int32_t (*end)(ts_call *call, bool wait);
  /* Calls that write constants come one after the other on the device too: before and behind (`done`) their work. */
  int32_t (*turn)(ts_call *call, ts_generation *now, bool done);
  /* Copies of inputs at odd addresses take their place. */
  int32_t (*align)(ts_call *call, ts_tensor *in);
  /* Elements of any strides to any other, in device memory. */
  int32_t (*copy)(ts_call *call, char *to, const int64_t *into, const char *from, const int64_t *step, int32_t ndim, const int64_t *sizes, size_t item);
  /* Memory of results and of copies; what was given back is for later calls on its stream. `give` also outside of calls. */
  void *(*take)(ts_call *call, int64_t bytes);
  void (*give)(void *context, void *memory);
  /* Memory of constants, which stays until no queued call can read it; `fill` copies, from host or device, and waits. */
  void *(*block_new)(tsm_model *m, int64_t bytes, void **block);
  void (*block_free)(void *block);
  int32_t (*fill)(tsm_model *m, void *to, const void *from, int64_t bytes, bool is_far);
};

extern TS_HIDDEN const ts_device_services TS_CUDA_SERVICES;
#endif
