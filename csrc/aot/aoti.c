/* The door for PyTorch's own loaders: AOTInductor's container interface, versions 2.11 to 2.15.
 *
 * libtorch is not linked. Its C functions are looked up when a container is made, in whatever libtorch the process has loaded, so the same
 * library also opens where there is none. Input handles belong to us: each is deleted and its slot cleared, on errors too. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "aot/device.h"
#include "native/libtorch.h"

static int32_t torch_type; /* of the device on which the model's tensors lie, as torch numbers them */

static int32_t connect(void) {
  const char *missing = libtorch_connect(), *type = torchsmith_model.device_type;
  if (missing) return ts_fail(TSM_ERROR_OPERATOR, "this process has no libtorch that offers %s", missing);
  torch_type = !strcmp(type, "cuda") ? libtorch.cuda : libtorch.cpu;
  if (torch_type < 0 || (torchsmith_model.device && !libtorch.get_device_index))
    return ts_fail(TSM_ERROR_OPERATOR, "the libtorch of this process knows no tensors on %s", type);
  if (torchsmith_model.device && !libtorch.cuda_stream) libtorch.cuda_stream = (int32_t(*)(int32_t, void **))libtorch_find("aoti_torch_get_current_cuda_stream");
  return TSM_OK;
}

static int32_t row_of(int32_t number) {
  for (int32_t i = 0; i < TS_DTYPES; i++)
    if (libtorch.dtypes[i] == number) return i;
  return -1;
}

/* ---------------------------------------------------------------- errors */

/* 2.11 and 2.12 do not ask for the text, so it is also written to stderr, as their own models do. */
static int32_t answer(int32_t status) {
  if (status) fprintf(stderr, "Error: %s\n", ts_error_text());
  return status != 0;
}

static int32_t refuse(const char *what) {
  ts_error_clear();
  ts_fail(TSM_ERROR_ARGUMENT, "%s is not offered by torchsmith's models", what);
  return 1;
}

TS_EXPORT int32_t AOTInductorGetLastError(const char **text) {
  *text = ts_error_text();
  return 0;
}

/* ---------------------------------------------------------------- life */

TS_EXPORT int32_t AOTInductorModelContainerCreateWithDevice(void **out, size_t n, const char *device, const char *folder) {
  ts_error_clear();
  const char *type = torchsmith_model.device_type;
  size_t length = strlen(type);
  if (device && (strncmp(device, type, length) != 0 || (device[length] && device[length] != ':')))
    return answer(ts_fail(TSM_ERROR_DEVICE, "the model was compiled for %s, not for %s", strcmp(type, "cpu") ? type : "the CPU", device));
  int32_t rc = connect(), index = device && device[length] && torchsmith_model.device ? atoi(device + length + 1) + 1 : 0;
  tsm_config config = {.size = sizeof config, .device = index};
  return answer(rc ? rc : ts_model_open(&config, (tsm_model **)out));
}

TS_EXPORT int32_t AOTInductorModelContainerCreate(void **out, size_t n, bool is_cpu, const char *folder) {
  return AOTInductorModelContainerCreateWithDevice(out, n, is_cpu ? "cpu" : "cuda", folder);
}

TS_EXPORT int32_t AOTInductorModelContainerDelete(void *m) {
  ts_model_close(m);
  return 0;
}

/* ---------------------------------------------------------------- run */

/* torch's number of the model's device, of which there is one on the processor. */
static int32_t torch_index(const tsm_model *m) { return torchsmith_model.device ? m->device : -1; }

/* Workspaces of a model on a device: torch's memory. */
static void *memory_take(void *self, int32_t device, void *stream, int64_t bytes, void **handle) {
  int64_t one = 1;
  void *data = NULL;
  *handle = NULL;
  if (libtorch.empty_strided(1, &bytes, &one, libtorch.dtypes[TS_U8], torch_type, device, handle)) return NULL;
  return libtorch.get_data_ptr(*handle, &data) ? NULL : data;
}

static void memory_give(void *self, int32_t device, void *stream, void *data, void *handle) { libtorch.delete_tensor(handle); }
static const ts_cuda_memory MEMORY = {memory_take, memory_give, NULL};

static int32_t alloc_result(void *self, int32_t index, int32_t dtype, int32_t ndim, const int64_t *sizes, const int64_t *strides, ts_tensor *out) {
  Handle h = NULL;
  const tsm_model *m = ((ts_call *)self)->model;
  if (libtorch.empty_strided(ndim, sizes, strides, libtorch.dtypes[dtype], torch_type, torch_index(m), &h)) {
    ts_fail(0, "libtorch could not allocate output %d", (int)index);
    return TS_ERROR_MEMORY;
  }
  out->handle = h;
  out->sizes = out->strides = NULL;
  return libtorch.get_data_ptr(h, &out->data) ? TS_ERROR_MEMORY : 0;
}

static void run_range(int64_t lo, int64_t hi, void *launch) {
  const ts_launch *l = launch;
  l->fn(l->bufs, l->syms, lo, hi);
}

static void parallel(void *self, const ts_launch *l, int64_t n, int64_t grain) {
  if (n <= grain || !libtorch.parallel_for || libtorch.parallel_for(0, n, grain, run_range, (void *)l)) l->fn(l->bufs, l->syms, 0, n);
}

/* Why a model cannot read a tensor; NULL: it can. */
static const char *describe(Handle h, ts_tensor *t, int32_t *dtype, int32_t *ndim, int32_t *device) {
  int64_t n = 0, *sizes = NULL, *strides = NULL;
  t->handle = h;
  if (libtorch.get_device_type(h, device) || libtorch.get_dtype(h, dtype) || libtorch.get_dim(h, &n) || libtorch.get_sizes(h, &sizes) ||
      libtorch.get_strides(h, &strides) || libtorch.get_data_ptr(h, &t->data))
    return "a tensor without memory or sizes (a sparse one, say)";
  if ((libtorch.is_neg && libtorch.is_neg(h)) || (libtorch.is_conj && libtorch.is_conj(h)))
    return "its memory holds negated or conjugated values (a view that imag or conj made): call resolve_neg() or resolve_conj()";
  t->sizes = sizes;
  t->strides = strides;
  *dtype = row_of(*dtype);
  *ndim = (int32_t)n;
  int32_t index = 0;
  if (torchsmith_model.device && *device == torch_type) {
    if (libtorch.get_device_index(t->handle, &index)) return "a tensor without a device";
    *device = index < 0 ? 1 : index + 1; /* as tsm_tensor has it */
  } else {
    *device = *device == libtorch.cpu ? 0 : -1 - *device;
  }
  return NULL;
}

static int32_t read_inputs(const tsm_model *m, Handle *handles, ts_tensor *in) {
  const ts_model_desc *d = &torchsmith_model;
  for (int32_t i = 0; i < d->n_inputs; i++) {
    ts_tensor *t = &in[d->inputs[i].graph_input];
    int32_t dtype = -1, ndim = 0, device = 0;
    if (!handles[i]) return ts_fail(TSM_ERROR_ARGUMENT, "input %d (%s) is NULL", i, d->inputs[i].name);
    const char *why = describe(handles[i], t, &dtype, &ndim, &device);
    if (why) return ts_fail(TSM_ERROR_ARGUMENT, "input %d (%s): %s", i, d->inputs[i].name, why);
    int32_t rc = ts_check_input(m, i, t, dtype, ndim, device);
    if (rc) return rc;
  }
  return ts_check_all(in);
}

static int32_t view_of(Handle base, const ts_output_desc *d, const int64_t *syms, Handle *out) {
  const int64_t *sizes = syms + d->at, *strides = sizes + d->ndim;
  int32_t dtype = -1;
  if (libtorch.get_dtype(base, &dtype) || dtype != libtorch.dtypes[d->dtype]) return ts_fail(TSM_ERROR_OPERATOR, "an output views another dtype");
  if (libtorch.reinterpret(base, d->ndim, sizes, strides, sizes[2 * d->ndim], out)) /* counted from the base's first element */
    return ts_fail(TSM_ERROR_OPERATOR, "libtorch could not make a view");
  return TSM_OK;
}

/* A constant that is returned or viewed, as a tensor over the model's memory: valid while the model is. */
static int32_t constant_handle(const tsm_model *m, int32_t graph_input, const ts_tensor *t, Handle *out) {
  for (int32_t i = 0; i < torchsmith_model.n_constants; i++) {
    const ts_constant_desc *c = &torchsmith_model.constants[i];
    if (c->graph_input != graph_input) continue;
    if (libtorch.from_blob(t->data, c->ndim, c->sizes, c->strides, 0, libtorch.dtypes[c->dtype], torch_type, torch_index(m), out)) break;
    return TSM_OK;
  }
  return ts_fail(TSM_ERROR_OPERATOR, "an output is a constant that libtorch cannot show");
}

static int32_t number_output(const ts_output_desc *d, const int64_t *syms, Handle *out) {
  static const int64_t none[1] = {0};
  void *data = NULL;
  if (libtorch.empty_strided(0, none, none, libtorch.dtypes[d->dtype], libtorch.cpu, -1, out) || libtorch.get_data_ptr(*out, &data))
    return ts_fail(TSM_ERROR_MEMORY, "libtorch could not allocate an output");
  if (d->dtype == TSM_BOOL) *(uint8_t *)data = syms[d->at] != 0;
  else memcpy(data, &syms[d->at], 8);
  return TSM_OK;
}

static int32_t finish_output(const tsm_model *m, int32_t i, const ts_tensor *in, ts_tensor *results, const int64_t *syms, Handle *outs) {
  const ts_output_desc *d = &torchsmith_model.outputs[i];
  Handle base = NULL, mine = NULL;
  int32_t rc = TSM_OK;
  switch (d->kind) {
    case TS_OUT_FRESH:
      outs[i] = results[d->result].handle;
      results[d->result].handle = NULL;
      return TSM_OK;
    case TS_OUT_NONE: return libtorch.nothing(&outs[i]) ? ts_fail(TSM_ERROR_MEMORY, "out of memory") : TSM_OK;
    case TS_OUT_NUMBER: return number_output(d, syms, &outs[i]);
    case TS_OUT_INPUT:
    case TS_OUT_VIEW_INPUT:
      base = in[d->of].handle;
      if (!base && (rc = constant_handle(m, d->of, &in[d->of], &mine)) != 0) return rc;
      if (mine) base = mine;
      break;
    default: /* a result: an output before or after this one */
      for (int32_t k = 0; k < torchsmith_model.n_outputs && !base; k++)
        if (torchsmith_model.outputs[k].kind == TS_OUT_FRESH && torchsmith_model.outputs[k].result == d->of) base = outs[k];
      if (!base) base = results[d->of].handle;
  }
  bool is_view = d->kind == TS_OUT_VIEW_INPUT || d->kind == TS_OUT_VIEW_RESULT;
  rc = is_view ? view_of(base, d, syms, &outs[i]) : libtorch.new_handle(base, &outs[i]) ? ts_fail(TSM_ERROR_MEMORY, "out of memory") : TSM_OK;
  if (mine) libtorch.delete_tensor(mine);
  return rc;
}

/* `stream`: on which the work is queued; NULL: the default one. */
static int32_t run(tsm_model *m, Handle *inputs, Handle *outputs, void *stream) {
  const ts_model_desc *d = &torchsmith_model;
  const ts_graph *g = &torchsmith_graph;
  ts_tensor in[g->n_inputs + 1], given[g->n_inputs + 1], results[g->n_results + 1]; /* given: before copies take their place */
  int32_t dims = 1;
  for (int32_t i = 0; d->wanted && i < d->n_inputs; i++) dims += d->inputs[i].ndim > 0 ? d->inputs[i].ndim : 0;
  int64_t syms[g->n_result_syms + 1], strides[dims];
  void *copies[d->n_inputs + 1];
  memset(copies, 0, sizeof copies);
  ts_generation *now = ts_hold(m);
  memcpy(in, now->inputs, sizeof(ts_tensor) * (size_t)g->n_inputs);
  memset(results, 0, sizeof results);
  ts_host host = ts_host_services();
  ts_call call = {m, NULL};
  ts_cuda_call room;
  host.self = &call;
  host.alloc_result = alloc_result;
  host.parallel_for = parallel;
  int32_t rc = read_inputs(m, inputs, in);
  memcpy(given, in, sizeof given);
  if (!rc && d->device) rc = d->device->begin(&call, &room, stream, &MEMORY, &host);
  if (!rc && d->device) rc = d->device->turn(&call, now, false);
  if (!rc && d->wanted) rc = ts_copy_inputs(&call, in, copies, strides);
  if (!rc && d->device) rc = d->device->align(&call, in);
  if (!rc && (rc = g->run(&host, in, NULL, now->state, results, syms)) != 0) rc = ts_run_status(rc);
  for (int32_t i = 0; i < d->n_outputs; i++) outputs[i] = NULL;
  for (int pass = 0; pass < 2; pass++) /* views of results after the results */
    for (int32_t i = 0; !rc && i < d->n_outputs; i++)
      if ((d->outputs[i].kind == TS_OUT_VIEW_RESULT || d->outputs[i].kind == TS_OUT_SAME) == pass) rc = finish_output(m, i, given, results, syms, outputs);
  if (!rc && d->device) rc = d->device->turn(&call, now, true);
  if (d->device && d->device->end(&call, false) && !rc) rc = TSM_ERROR_DEVICE;
  ts_let_go(m, now);
  ts_copies_end(copies);
  for (int32_t i = 0; i < g->n_results; i++)
    if (results[i].handle) libtorch.delete_tensor(results[i].handle);
  for (int32_t i = 0; rc && i < d->n_outputs; i++) {
    if (outputs[i]) libtorch.delete_tensor(outputs[i]);
    outputs[i] = NULL;
  }
  return rc;
}

static int32_t run_torch(tsm_model *m, Handle *inputs, size_t n_in, Handle *outputs, size_t n_out, void **stream) {
  ts_error_clear();
  void *current = NULL;
  const ts_model_desc *d = &torchsmith_model;
  int32_t rc = libtorch.ready ? TSM_OK : connect();
  if (rc) return rc; /* nothing can be deleted either */
  if (!m || (n_in && !inputs) || (n_out && !outputs)) rc = ts_fail(TSM_ERROR_ARGUMENT, "an argument is NULL");
  else if (n_in != (size_t)d->n_inputs) rc = ts_fail(TSM_ERROR_COUNT, "%d inputs expected, got %zu", (int)d->n_inputs, n_in);
  else if (n_out != (size_t)d->n_outputs) rc = ts_fail(TSM_ERROR_COUNT, "room for %d outputs expected, got %zu", (int)d->n_outputs, n_out);
  else if (d->device && !stream && libtorch.cuda_stream && libtorch.cuda_stream(m->device, &current)) rc = ts_fail(TSM_ERROR_DEVICE, "torch's current stream cannot be read");
  else rc = run(m, inputs, outputs, stream ? *stream : current);
  for (size_t i = 0; inputs && i < n_in; i++) {
    if (inputs[i]) libtorch.delete_tensor(inputs[i]);
    inputs[i] = NULL; /* 2.15 frees what it finds here */
  }
  return rc;
}

/* torchsmith's own loader in Python calls this one: a status, and nothing on stderr; work is queued on torch's current stream. */
TS_EXPORT int32_t tsm_run_torch(tsm_model *m, Handle *inputs, size_t n_in, Handle *outputs, size_t n_out) {
  return run_torch(m, inputs, n_in, outputs, n_out, NULL);
}

TS_EXPORT int32_t AOTInductorModelContainerRun(void *m, Handle *inputs, size_t n_in, Handle *outputs, size_t n_out, void *stream, void *proxy) {
  return answer(run_torch(m, inputs, n_in, outputs, n_out, &stream));
}

TS_EXPORT int32_t AOTInductorModelContainerRunSingleThreaded(void *m, Handle *inputs, size_t n_in, Handle *outputs, size_t n_out, void *stream, void *proxy) {
  return AOTInductorModelContainerRun(m, inputs, n_in, outputs, n_out, stream, proxy);
}

/* ---------------------------------------------------------------- what the model is */

TS_EXPORT int32_t AOTInductorModelContainerGetNumInputs(void *m, size_t *n) { return *n = (size_t)torchsmith_model.n_inputs, 0; }
TS_EXPORT int32_t AOTInductorModelContainerGetNumOutputs(void *m, size_t *n) { return *n = (size_t)torchsmith_model.n_outputs, 0; }
TS_EXPORT int32_t AOTInductorModelContainerGetNumConstants(void *m, size_t *n) { return *n = (size_t)torchsmith_model.n_constants, 0; }

TS_EXPORT int32_t AOTInductorModelContainerGetInputName(void *m, size_t i, const char **name) {
  if (i >= (size_t)torchsmith_model.n_inputs) return refuse("an input of this number");
  return *name = torchsmith_model.inputs[i].name, 0;
}

TS_EXPORT int32_t AOTInductorModelContainerGetOutputName(void *m, size_t i, const char **name) {
  if (i >= (size_t)torchsmith_model.n_outputs) return refuse("an output of this number");
  return *name = "output", 0;
}

TS_EXPORT int32_t AOTInductorModelContainerGetCallSpec(void *m, const char **in, const char **out) {
  *in = torchsmith_model.in_spec;
  *out = torchsmith_model.out_spec;
  return 0;
}

static const ts_constant_desc *constant(size_t i) {
  return i < (size_t)torchsmith_model.n_constants ? &torchsmith_model.constants[i] : NULL;
}

#define CONSTANT_GETTER(suffix, type, value) \
  TS_EXPORT int32_t AOTInductorModelContainerGetConstant##suffix(void *m, size_t i, type *out) { \
    const ts_constant_desc *c = constant(i); \
    if (!c) return refuse("a constant of this number"); \
    *out = value; \
    return 0; \
  }
CONSTANT_GETTER(Name, const char *, c->name)
CONSTANT_GETTER(OriginalFQN, const char *, c->fqn)
CONSTANT_GETTER(FromFolded, bool, false)
CONSTANT_GETTER(Type, int32_t, c->type)
CONSTANT_GETTER(Dtype, int32_t, libtorch.dtypes[c->dtype])
CONSTANT_GETTER(DataSize, size_t, (size_t)c->bytes)

/* ---------------------------------------------------------------- new constants */

typedef struct { const char *name; Handle handle; } Entry; /* AOTInductorConstantMapEntry */

static int32_t update(tsm_model *m, const Entry *entries, size_t n, bool is_next, bool is_full) {
  ts_error_clear();
  ts_given *given = malloc((sizeof(ts_given) + sizeof(tsm_tensor)) * (n + 1));
  if (!given) return answer(ts_fail(TSM_ERROR_MEMORY, "out of memory"));
  tsm_tensor *values = (tsm_tensor *)(given + n + 1);
  int32_t rc = TSM_OK;
  for (size_t i = 0; i < n && !rc; i++) {
    ts_tensor t;
    int32_t dtype = -1, ndim = 0, device = 0;
    const char *why = entries[i].handle && entries[i].name ? describe(entries[i].handle, &t, &dtype, &ndim, &device) : NULL;
    if (!entries[i].handle || !entries[i].name) rc = ts_fail(TSM_ERROR_ARGUMENT, "the name or the value of constant number %zu is NULL", i);
    else if (why) rc = ts_fail(TSM_ERROR_ARGUMENT, "constant %s: %s", entries[i].name, why);
    if (rc) break;
    values[i] = (tsm_tensor){t.data, t.sizes, t.strides, ndim, dtype, device, 0, NULL};
    given[i] = (ts_given){entries[i].name, &values[i]};
  }
  if (!rc) rc = ts_update(m, given, n, is_next, is_full);
  free(given);
  return answer(rc);
}

/* std::unordered_map<std::string, at::Tensor*> of libstdc++ (the C++11 ABI, frozen since GCC 5): a list of nodes, read only. */
typedef struct Node {
  struct Node *next;
  const char *text;
  size_t length;
  char small[16];
  Handle handle;
} Node;
typedef struct { void *buckets; size_t n_buckets; Node *first; size_t count; } Map;

static int32_t update_map(tsm_model *m, const Map *map, bool is_next, bool is_full) {
  Entry *entries = malloc(sizeof(Entry) * (map->count + 1));
  if (!entries) return answer(ts_fail(TSM_ERROR_MEMORY, "out of memory"));
  size_t n = 0;
  for (const Node *node = map->first; node && n < map->count; node = node->next) entries[n++] = (Entry){node->text, node->handle};
  int32_t rc = update(m, entries, n, is_next, is_full);
  free(entries);
  return rc;
}

#define KEPT "keeping the caller's own constants (user_managed)"
TS_EXPORT int32_t AOTInductorModelContainerUpdateConstantBuffer(void *m, const void *map, bool inactive, bool full) { return update_map(m, map, inactive, full); }
TS_EXPORT int32_t AOTInductorModelContainerUpdateConstantBufferFromCpu(void *m, const void *map, bool inactive, bool full) { return update_map(m, map, inactive, full); }
TS_EXPORT int32_t AOTInductorModelContainerUpdateUserManagedConstantBuffer(void *m, const void *map, bool inactive, bool full) { return refuse(KEPT); }
TS_EXPORT int32_t AOTInductorModelContainerUpdateInactiveConstantBuffer(void *m, const void *map) { return update_map(m, map, true, false); }
TS_EXPORT int32_t AOTInductorModelContainerUpdateConstantBufferPairs(void *m, const Entry *pairs, size_t n, bool inactive, bool full) { return update(m, pairs, n, inactive, full); }
TS_EXPORT int32_t AOTInductorModelContainerUpdateConstantBufferFromCpuPairs(void *m, const Entry *pairs, size_t n, bool inactive, bool full) { return update(m, pairs, n, inactive, full); }
TS_EXPORT int32_t AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(void *m, const Entry *pairs, size_t n, bool inactive, bool full) { return refuse(KEPT); }
TS_EXPORT int32_t AOTInductorModelContainerUpdateInactiveConstantBufferPairs(void *m, const Entry *pairs, size_t n) { return update(m, pairs, n, true, false); }

TS_EXPORT int32_t AOTInductorModelContainerSwapConstantBuffer(void *m) {
  ts_error_clear();
  return answer(ts_swap(m));
}

/* An update prepares its constants at once: there is nothing left to fold. */
TS_EXPORT int32_t AOTInductorModelContainerRunConstantFolding(void *m, bool inactive, void *stream, void *proxy) { return 0; }
TS_EXPORT int32_t AOTInductorModelContainerFreeInactiveConstantBuffer(void *m) { return ts_forget_next(m), 0; }
TS_EXPORT int32_t AOTInductorModelContainerDidCallLoadConstants(void *m, bool *out) { return *out = true, 0; }
TS_EXPORT int32_t AOTInductorModelContainerSetUseStreamAffinity(void *m, bool use) { return 0; }

TS_EXPORT int32_t AOTInductorModelContainerGetConstantsBlobSize(void *m, uint64_t *size) { return *size = 0, 0; }
TS_EXPORT int32_t AOTInductorModelUpdateConstantsFromBlob(void *m, const uint8_t *blob) { return refuse("loading weights from a blob"); }
TS_EXPORT int32_t AOTInductorModelContainerExtractConstantsMap(void *m, void *map, bool inactive) { return refuse("extracting constants"); }
TS_EXPORT int32_t AOTInductorModelContainerExtractConstantsMapEntries(void *m, const Entry **entries, size_t *n, bool inactive) { return refuse("extracting constants"); }
TS_EXPORT int32_t AOTInductorModelContainerCreateWithExternalConstants(void **out, size_t n, const char *device, const char *folder, const void *map) { return refuse("a container over constants from outside"); }
