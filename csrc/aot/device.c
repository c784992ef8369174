/* The engine's part for NVIDIA devices: where constants lie, what a call queues its work with. The driver is cuda.c's business. */
#include "aot/device.h"

#include <string.h>

enum { RECORDS = 8 }; /* of a segment */

static int32_t open(tsm_model *m, int32_t device) {
  const char *missing = cuda_connect();
  if (missing) return ts_fail(TSM_ERROR_DEVICE, "%s", missing);
  m->device = device > 0 ? device - 1 : cuda_current();
  if (m->device >= cuda_device_count())
    return ts_fail(TSM_ERROR_DEVICE, "the model was opened for cuda:%d, and there are %d devices", (int)m->device, (int)cuda_device_count());
  char text[300];
  if (!cuda_fits(torchsmith_graph.images, m->device, text, sizeof text)) return ts_fail(TSM_ERROR_DEVICE, "%s", text);
  m->far = cuda_new(torchsmith_graph.images, RECORDS);
  return m->far ? TSM_OK : ts_fail(TSM_ERROR_MEMORY, "out of memory");
}

static void close(tsm_model *m) { cuda_free(m->far); }

static int32_t launch(void *self, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words) {
  return cuda_launch(((ts_call *)self)->far, segment, launches, n, words, n_words);
}

/* Libraries' calls are recorded by torch's Python side only; here they are queued one by one. */
static int32_t segment_begin(void *self, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words,
                             const uint64_t *fixed, int32_t n_fixed) {
  return TS_PLAIN;
}
static int32_t segment_end(void *self, int32_t segment) { return TS_OK; }
static int32_t read_back(void *self, const void *from, void *to, int64_t bytes) { return cuda_read(((ts_call *)self)->far, from, to, bytes); }

static const ts_device DEVICE = {launch, segment_begin, segment_end, read_back};

static void *workspace(void *self, int64_t bytes) { return cuda_take(((ts_call *)self)->far, bytes); }
static void workspace_back(void *self, void *memory, int64_t bytes) { cuda_give(((ts_call *)self)->far, memory); }

static int32_t begin(ts_call *call, ts_cuda_call *room, void *stream, const ts_cuda_memory *memory, ts_host *host) {
  tsm_model *m = call->model;
  *room = (ts_cuda_call){.graph = m->far, .stream = stream, .device = m->device, .report = ts_report_error, .self = call,
                         .memory = memory ? memory : &CUDA_OWN_MEMORY};
  host->device = &DEVICE;
  host->take_workspace = workspace;
  host->give_workspace = workspace_back;
  if (cuda_begin(room)) return TSM_ERROR_DEVICE;
  call->far = room;
  return TSM_OK;
}

static int32_t end(ts_call *call, bool wait) {
  if (!call->far) return TSM_OK;
  int32_t rc = wait ? cuda_wait(call->far) : TS_OK;
  rc |= cuda_end(call->far);
  call->far = NULL;
  return rc ? TSM_ERROR_DEVICE : TSM_OK;
}

static int32_t turn(ts_call *call, ts_generation *now, bool done) {
  if (!torchsmith_model.writes || !now->owned_values || call->far->is_capturing) return TSM_OK;
  int32_t rc = done ? cuda_block_ready(call->far, now->owned_values) : cuda_block_wait(call->far, now->owned_values);
  return rc ? TSM_ERROR_DEVICE : TSM_OK;
}

static int32_t align(ts_call *call, ts_tensor *in) {
  const ts_model_desc *d = &torchsmith_model;
  for (int32_t i = 0; i < d->n_inputs; i++) {
    ts_tensor *t = &in[d->inputs[i].graph_input];
    int64_t span = 0;
    if (d->inputs[i].dtype < 0 || ((uintptr_t)t->data & 15) == 0) continue;
    if (!ts_span(d->inputs[i].ndim, t->sizes, t->strides, ts_itemsize(d->inputs[i].dtype), &span))
      return ts_fail(TSM_ERROR_SIZE, "input %d (%s): a copy of it would not fit 64 bits", i, d->inputs[i].name);
    if (cuda_align(call->far, &t->data, span, d->inputs[i].written)) return TSM_ERROR_DEVICE;
    t->handle = NULL; /* operators take the copy too */
  }
  return TSM_OK;
}

static int32_t move_far(void *call, void *to, const void *from, int64_t bytes) {
  return cuda_copy(((ts_call *)call)->far, to, from, bytes) ? TSM_ERROR_DEVICE : TSM_OK;
}

static int32_t copy(ts_call *call, char *to, const int64_t *into, const char *from, const int64_t *step, int32_t ndim, const int64_t *sizes, size_t item) {
  return ts_copy_runs(move_far, call, to, into, from, step, ndim, sizes, item);
}

static void *take(ts_call *call, int64_t bytes) { return cuda_take(call->far, bytes); }
static void give(void *context, void *memory) { cuda_return(memory); }

/* A call of its own, on the device's default stream. */
static int32_t alone(tsm_model *m, ts_call *call, ts_cuda_call *room) {
  ts_host unused;
  *call = (ts_call){m, NULL};
  return begin(call, room, NULL, NULL, &unused);
}

static void *block_make(tsm_model *m, int64_t bytes, void **block) {
  ts_call call;
  ts_cuda_call room;
  if (alone(m, &call, &room)) return NULL;
  void *data = cuda_block_new(&room, bytes, (ts_cuda_block **)block);
  return end(&call, false) ? NULL : data;
}

static void block_drop(void *block) { cuda_block_free(block); }

static int32_t fill(tsm_model *m, void *to, const void *from, int64_t bytes, bool is_far) {
  ts_call call;
  ts_cuda_call room;
  if (bytes <= 0) return TSM_OK;
  if (alone(m, &call, &room)) return TSM_ERROR_DEVICE;
  int32_t rc = is_far ? cuda_wait_all(&room) : TS_OK; /* other streams may still write it */
  if (!rc) rc = is_far ? cuda_copy(&room, to, from, bytes) : cuda_upload(&room, to, from, bytes);
  int32_t left = end(&call, true);
  return rc || left ? TSM_ERROR_DEVICE : TSM_OK;
}

const ts_device_services TS_CUDA_SERVICES = {open, close, begin, end, turn, align, copy, take, give, block_make, block_drop, fill};
