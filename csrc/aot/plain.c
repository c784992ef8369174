/* The plain door: the functions of <torchsmith/model.h>. */
#include <stdlib.h>
#include <string.h>

#include "aot/device.h"
#include "operators.h"
#include "native/pool.h"
#include "native/workspace.h"

/* Memory of an output: this header, then sizes and strides, then (64-byte aligned) the data, unless the user's allocator gave it.
 * From malloc: aligned_alloc takes five times as long for small blocks. */
typedef struct {
  void (*release)(void *, void *);
  void *context, *memory;
} Block;

typedef struct {
  ts_call call;
  tsm_tensor *outputs;
  const int16_t *output_of; /* per result of the graph: the output it becomes, or -1 */
  tsm_tensor *others; /* results that are no outputs themselves */
  int32_t refused; /* why an output could not be placed */
  bool is_parallel; /* the pool knows of this call */
  bool is_used; /* `few`: a small workspace needs no lock */
  char few[4096] __attribute__((aligned(64)));
} Run;

static void *take(void *self, int64_t bytes) {
  Run *r = self;
  if (r->is_used || bytes > (int64_t)sizeof r->few) return workspace_take(bytes);
  r->is_used = true;
  return r->few;
}

static void give(void *self, void *block, int64_t bytes) {
  Run *r = self;
  if (block == r->few) r->is_used = false;
  else workspace_give(block);
}

/* A tensor of these sizes in memory of its own. */
static int32_t allocate(const Run *r, tsm_tensor *out, int32_t dtype, int32_t ndim, const int64_t *sizes, const int64_t *strides) {
  tsm_model *m = r->call.model;
  const ts_device_services *far = r->call.far ? torchsmith_model.device : NULL;
  size_t head = sizeof(Block) + 2 * sizeof(int64_t) * (size_t)ndim;
  int64_t span = 0;
  if (!ts_span(ndim, sizes, strides, ts_itemsize(dtype), &span)) return ts_fail(TSM_ERROR_MEMORY, "an output would not fit 64 bits of memory");
  size_t bytes = ((size_t)span + 63) & ~(size_t)63;
  Block *b = malloc(head + (m->allocate || far ? 0 : bytes + 63));
  if (!b) return ts_fail(TSM_ERROR_MEMORY, "no memory for an output");
  int64_t *numbers = (int64_t *)(b + 1);
  *b = (Block){m->release, m->context, NULL};
  if (m->allocate && !(b->memory = m->allocate(m->context, bytes ? bytes : 64))) {
    free(b);
    return ts_fail(TSM_ERROR_MEMORY, "the allocator gave no memory for an output");
  }
  if (far && !m->allocate) {
    b->release = far->give;
    if (!(b->memory = far->take((ts_call *)&r->call, bytes ? (int64_t)bytes : 64))) {
      free(b);
      return ts_fail(TSM_ERROR_MEMORY, "no device memory for an output");
    }
  }
  for (int32_t k = 0; k < ndim; k++) {
    numbers[k] = sizes[k];
    numbers[ndim + k] = strides[k];
  }
  char *behind = (char *)(((uintptr_t)b + head + 63) & ~(uintptr_t)63);
  *out = (tsm_tensor){b->memory ? b->memory : behind, numbers, numbers + ndim, ndim, dtype, far ? ts_place(m) : 0, 0, b};
  return TSM_OK;
}

TS_EXPORT void tsm_release(tsm_tensor *output) {
  if (!output || !output->block) return;
  Block *b = output->block;
  if (b->memory && b->release) b->release(b->context, b->memory);
  free(b);
  memset(output, 0, sizeof *output);
}

/* What can be said about the caller's memory before the sizes are known. */
static int32_t check_given(const tsm_tensor *out, int32_t index, int32_t dtype, int32_t ndim) {
  if (out->dtype != dtype) return ts_fail(TSM_ERROR_DTYPE, "output %d: dtype %s is made, not %s", index, ts_dtype_name(dtype), ts_dtype_name(out->dtype));
  if (out->ndim != ndim) return ts_fail(TSM_ERROR_RANK, "output %d has %d dimensions, not %d", index, (int)ndim, (int)out->ndim);
  if (ndim > 0 && !out->sizes) return ts_fail(TSM_ERROR_ARGUMENT, "output %d: its sizes are NULL", index);
  size_t item = ts_itemsize(dtype);
  if (((uintptr_t)out->data & ((item > 8 ? 8 : item) - 1)) != 0)
    return ts_fail(TSM_ERROR_ALIGNMENT, "output %d: its address is not a multiple of the element size %d", index, (int)item);
  return TSM_OK;
}

/* The caller's memory, if the result fits it exactly. */
static int32_t use_given(tsm_tensor *out, int32_t index, int32_t dtype, int32_t ndim, const int64_t *sizes, const int64_t *strides) {
  int64_t dense[ndim + 1];
  int32_t rc = check_given(out, index, dtype, ndim);
  if (rc) return rc;
  for (int32_t k = 0; k < ndim; k++)
    if (out->sizes[k] != sizes[k])
      return ts_fail(TSM_ERROR_SIZE, "output %d: size %lld is made at dimension %d, not %lld", index, (long long)sizes[k], (int)k, (long long)out->sizes[k]);
  if (!ts_dense(ndim, sizes, dense, NULL)) return ts_fail(TSM_ERROR_SIZE, "output %d has more elements than 64 bits count", index);
  for (int32_t k = 0; k < ndim; k++) {
    int64_t step = out->strides ? out->strides[k] : dense[k];
    if (sizes[k] > 1 && step != strides[k])
      return ts_fail(TSM_ERROR_STRIDE, "output %d: stride %lld is made at dimension %d, not %lld", index, (long long)strides[k], (int)k, (long long)step);
  }
  out->kind = 0;
  return TSM_OK;
}

static int32_t alloc_result(void *self, int32_t index, int32_t dtype, int32_t ndim, const int64_t *sizes, const int64_t *strides, ts_tensor *t) {
  Run *r = self;
  int32_t number = r->output_of[index];
  tsm_tensor *out = number >= 0 ? &r->outputs[number] : &r->others[index];
  int32_t rc = out->data ? use_given(out, number, dtype, ndim, sizes, strides) : allocate(r, out, dtype, ndim, sizes, strides);
  if ((r->refused = rc) != 0) return TS_ERROR_MEMORY;
  *t = (ts_tensor){out->data, NULL, NULL, NULL};
  return 0;
}

/* Results that libtorch's operators made become outputs like the others; those that are only viewed stay libtorch's until the call ends. */
static int32_t adopt(Run *r, ts_tensor *results) {
  const ts_operators *o = torchsmith_model.operators;
  for (int32_t i = 0; o && i < torchsmith_graph.n_results; i++) {
    int32_t number = r->output_of[i];
    ts_tensor *t = &results[i];
    if (!t->handle || number < 0) continue;
    const ts_output_desc *d = &torchsmith_model.outputs[number];
    tsm_tensor *out = &r->outputs[number];
    int32_t rc = out->data ? use_given(out, number, d->dtype, d->ndim, t->sizes, t->strides) : allocate(r, out, d->dtype, d->ndim, t->sizes, t->strides);
    if (!rc) rc = o->services->copy_out(r, t, out);
    if (rc) return rc;
    *t = (ts_tensor){out->data, NULL, NULL, NULL};
  }
  return TSM_OK;
}

/* Outputs that are no fresh results: views and inputs are copied out, numbers become 0-d tensors, nothing stays nothing. */
static int32_t finish_output(Run *r, int32_t i, const ts_tensor *in, const ts_tensor *results, const int64_t *syms) {
  const ts_output_desc *d = &torchsmith_model.outputs[i];
  tsm_tensor *outs = r->outputs;
  static const int64_t none[1] = {0};
  const char *from = NULL;
  int32_t ndim = d->ndim, dtype = d->dtype;
  if (d->kind == TS_OUT_FRESH) return TSM_OK;
  if (d->kind == TS_OUT_NONE) {
    outs[i].kind = 1;
    return TSM_OK;
  }
  if (d->kind == TS_OUT_NUMBER) {
    double value;
    memcpy(&value, &syms[d->at], sizeof value);
    Run here; /* numbers lie in the host's memory, also those of a model on a device */
    here.call = (ts_call){r->call.model, NULL};
    if (r->call.far && r->call.model->allocate && !outs[i].data) return ts_fail(TSM_ERROR_ARGUMENT, "output %d is a number: give memory of the host for it", (int)i);
    int32_t rc = outs[i].data ? use_given(&outs[i], i, dtype, 0, none, none) : allocate(&here, &outs[i], dtype, 0, none, none);
    if (rc) return rc;
    if (dtype == TSM_F64) *(double *)outs[i].data = value;
    else if (dtype == TSM_BOOL) *(uint8_t *)outs[i].data = syms[d->at] != 0;
    else *(int64_t *)outs[i].data = syms[d->at];
    return TSM_OK;
  }
  const int64_t *sizes, *strides;
  if (d->kind == TS_OUT_INPUT) {
    const ts_tensor *t = &in[d->of];
    sizes = t->sizes;
    strides = t->strides;
    from = t->data;
  } else if (d->kind == TS_OUT_SAME) {
    const tsm_tensor *base = r->output_of[d->of] >= 0 ? &outs[r->output_of[d->of]] : &r->others[d->of];
    ndim = base->ndim;
    sizes = base->sizes;
    strides = base->strides;
    from = base->data;
  } else {
    sizes = syms + d->at;
    strides = syms + d->at + ndim;
    const char *base = d->kind == TS_OUT_VIEW_INPUT ? in[d->of].data : results[d->of].data;
    from = base + syms[d->at + 2 * ndim] * (int64_t)ts_itemsize(dtype);
  }
  int64_t dense[ndim + 1], count = 0;
  if (!ts_dense(ndim, sizes, dense, &count)) return ts_fail(TSM_ERROR_MEMORY, "output %d would not fit 64 bits of memory", (int)i);
  int32_t rc = outs[i].data ? use_given(&outs[i], i, dtype, ndim, sizes, dense) : allocate(r, &outs[i], dtype, ndim, sizes, dense);
  if (rc) return rc;
  if (count && r->call.far) return torchsmith_model.device->copy(&r->call, outs[i].data, dense, from, strides, ndim, sizes, ts_itemsize(dtype));
  if (count) ts_copy(outs[i].data, dense, from, strides, ndim, sizes, ts_itemsize(dtype));
  return TSM_OK;
}

static int32_t read_inputs(const tsm_model *m, const tsm_tensor *inputs, ts_tensor *in, int64_t *dense) {
  const ts_model_desc *d = &torchsmith_model;
  for (int32_t i = 0; i < d->n_inputs; i++) {
    const tsm_tensor *u = &inputs[i];
    const int64_t *strides = u->strides;
    if (u->ndim < 0 || u->ndim > 64) return ts_fail(TSM_ERROR_RANK, "input %d (%s): %d dimensions", i, d->inputs[i].name, (int)u->ndim);
    if (u->ndim > 0 && !u->sizes) return ts_fail(TSM_ERROR_ARGUMENT, "input %d (%s): its sizes are NULL", i, d->inputs[i].name);
    ts_tensor *t = &in[d->inputs[i].graph_input];
    *t = (ts_tensor){u->data, u->sizes, strides, NULL};
    int32_t rc = ts_check_input(m, i, t, u->dtype, u->ndim, u->device);
    if (rc) return rc;
    if (!strides) {
      if (!ts_dense(u->ndim, u->sizes, dense, NULL)) return ts_fail(TSM_ERROR_SIZE, "input %d (%s) has more elements than 64 bits count", i, d->inputs[i].name);
      t->strides = dense;
      dense += u->ndim;
    }
  }
  return ts_check_all(in);
}

static void parallel(void *self, const ts_launch *l, int64_t n, int64_t grain) {
  Run *r = self;
  if (!r->is_parallel && r->call.model->threads > 1) {
    r->is_parallel = true;
    ts_pool_enter();
  }
  ts_pool_for(l, n, grain, r->call.model->threads);
}

static int32_t run(tsm_model *m, const tsm_tensor *inputs, tsm_tensor *outputs, void *stream) {
  const ts_model_desc *d = &torchsmith_model;
  const ts_graph *g = &torchsmith_graph;
  int32_t dims = 1;
  for (int32_t i = 0; i < d->n_inputs; i++) dims += inputs[i].ndim > 0 && inputs[i].ndim <= 64 ? inputs[i].ndim : 0;
  ts_tensor in[g->n_inputs + 1], results[g->n_results + 1];
  int64_t syms[g->n_result_syms + 1], dense[dims], strides[d->wanted ? dims : 1];
  void *copies[d->n_inputs + 1];
  int16_t output_of[g->n_results + 1];
  tsm_tensor others[g->n_results + 1];
  ts_generation *now = ts_hold(m);
  memcpy(in, now->inputs, sizeof(ts_tensor) * (size_t)g->n_inputs);
  memset(results, 0, sizeof results);
  memset(others, 0, sizeof others);
  memset(copies, 0, sizeof copies);
  memset(output_of, -1, sizeof output_of);
  for (int32_t i = 0; i < d->n_outputs; i++)
    if (d->outputs[i].kind == TS_OUT_FRESH) output_of[d->outputs[i].result] = (int16_t)i;
  Run r; /* not initialised as a whole: `few` is large */
  r.call = (ts_call){m, NULL};
  r.outputs = outputs;
  r.output_of = output_of;
  r.others = others;
  r.refused = 0;
  r.is_parallel = r.is_used = false;
  ts_host host = ts_host_services();
  host.self = &r;
  host.alloc_result = alloc_result;
  host.parallel_for = parallel;
  host.take_workspace = take;
  host.give_workspace = give;
  ts_cuda_call room;
  int32_t rc = read_inputs(m, inputs, in, dense);
  for (int32_t i = 0; !rc && i < d->n_outputs; i++) /* before anything is written */
    if (outputs[i].data && d->outputs[i].kind != TS_OUT_NONE && d->outputs[i].ndim >= 0) rc = check_given(&outputs[i], i, d->outputs[i].dtype, d->outputs[i].ndim);
  if (!rc && d->device) rc = d->device->begin(&r.call, &room, stream, NULL, &host);
  if (!rc && d->device) rc = d->device->turn(&r.call, now, false);
  if (!rc && d->wanted) rc = ts_copy_inputs(&r.call, in, copies, strides);
  if (!rc && d->device) rc = d->device->align(&r.call, in);
  if (!rc && (rc = g->run(&host, in, NULL, now->state, results, syms)) != 0) rc = r.refused ? r.refused : ts_run_status(rc);
  if (r.is_parallel) ts_pool_leave();
  if (!rc) rc = adopt(&r, results);
  for (int32_t i = 0; !rc && i < d->n_outputs; i++) rc = finish_output(&r, i, in, results, syms);
  if (!rc && d->device) rc = d->device->turn(&r.call, now, true);
  if (d->device && d->device->end(&r.call, false) && !rc) rc = TSM_ERROR_DEVICE;
  ts_let_go(m, now);
  ts_copies_end(copies);
  for (int32_t i = 0; i < g->n_results; i++) {
    tsm_release(&others[i]);
    if (results[i].handle) d->operators->services->release(&r, &results[i]);
  }
  if (rc)
    for (int32_t i = 0; i < d->n_outputs; i++) tsm_release(&outputs[i]);
  return rc;
}

TS_EXPORT int32_t tsm_run_on(tsm_model *model, const tsm_tensor *inputs, size_t n_inputs, tsm_tensor *outputs, size_t n_outputs, void *stream) {
  ts_error_clear();
  const ts_model_desc *d = &torchsmith_model;
  if (!model || (n_inputs && !inputs) || (n_outputs && !outputs)) return ts_fail(TSM_ERROR_ARGUMENT, "tsm_run: an argument is NULL");
  if (n_inputs != (size_t)d->n_inputs) return ts_fail(TSM_ERROR_COUNT, "%d inputs expected, got %zu", (int)d->n_inputs, n_inputs);
  if (n_outputs != (size_t)d->n_outputs) return ts_fail(TSM_ERROR_COUNT, "room for %d outputs expected, got %zu", (int)d->n_outputs, n_outputs);
  if (stream && !d->device) return ts_fail(TSM_ERROR_ARGUMENT, "tsm_run_on: the model runs on the CPU, which has no streams");
  return run(model, inputs, outputs, stream);
}

TS_EXPORT int32_t tsm_run(tsm_model *model, const tsm_tensor *inputs, size_t n_inputs, tsm_tensor *outputs, size_t n_outputs) {
  return tsm_run_on(model, inputs, n_inputs, outputs, n_outputs, NULL);
}

TS_EXPORT uint32_t tsm_abi_version(void) { return TSM_ABI_VERSION; }
TS_EXPORT const char *tsm_last_error(void) { return ts_error_text(); }

TS_EXPORT TS_SELDOM int32_t tsm_create(const tsm_config *config, tsm_model **out) {
  ts_error_clear();
  if (!out) return ts_fail(TSM_ERROR_ARGUMENT, "tsm_create: an argument is NULL");
  tsm_config mine;
  memset(&mine, 0, sizeof mine);
  if (config) memcpy(&mine, config, config->size < sizeof mine ? config->size : sizeof mine);
  return ts_model_open(&mine, out);
}

TS_EXPORT void tsm_delete(tsm_model *model) { ts_model_close(model); }

TS_EXPORT TS_SELDOM int32_t tsm_load_constants(tsm_model *model, const char *const *names, const tsm_tensor *values, size_t count) {
  ts_error_clear();
  if (!model || (count && (!names || !values))) return ts_fail(TSM_ERROR_ARGUMENT, "tsm_load_constants: an argument is NULL");
  ts_given *given = malloc(sizeof(ts_given) * (count + 1));
  if (!given) return ts_fail(TSM_ERROR_MEMORY, "out of memory");
  for (size_t i = 0; i < count; i++) given[i] = (ts_given){names[i], &values[i]};
  int32_t rc = ts_update(model, given, count, false, false);
  free(given);
  return rc;
}

TS_EXPORT size_t tsm_input_count(const tsm_model *model) { return (size_t)torchsmith_model.n_inputs; }
TS_EXPORT size_t tsm_output_count(const tsm_model *model) { return (size_t)torchsmith_model.n_outputs; }
TS_EXPORT size_t tsm_constant_count(const tsm_model *model) { return (size_t)torchsmith_model.n_constants; }
TS_EXPORT const char *tsm_info(const tsm_model *model) { return torchsmith_model.info; }

TS_EXPORT TS_SELDOM int32_t tsm_input(const tsm_model *model, size_t index, tsm_tensor_info *out) {
  if (!out || index >= (size_t)torchsmith_model.n_inputs) return ts_fail(TSM_ERROR_ARGUMENT, "tsm_input: no input has this number");
  const ts_input_desc *d = &torchsmith_model.inputs[index];
  *out = (tsm_tensor_info){d->name, d->dtype, d->ndim, 0, d->lo, d->hi};
  return TSM_OK;
}

TS_EXPORT TS_SELDOM int32_t tsm_output(const tsm_model *model, size_t index, tsm_tensor_info *out) {
  if (!out || index >= (size_t)torchsmith_model.n_outputs) return ts_fail(TSM_ERROR_ARGUMENT, "tsm_output: no output has this number");
  const ts_output_desc *d = &torchsmith_model.outputs[index];
  *out = (tsm_tensor_info){"", d->dtype, d->ndim, d->kind == TS_OUT_NONE, NULL, NULL};
  return TSM_OK;
}

TS_EXPORT TS_SELDOM int32_t tsm_constant(const tsm_model *model, size_t index, tsm_constant_info *out) {
  if (!out || index >= (size_t)torchsmith_model.n_constants) return ts_fail(TSM_ERROR_ARGUMENT, "tsm_constant: no constant has this number");
  const ts_constant_desc *c = &torchsmith_model.constants[index];
  *out = (tsm_constant_info){c->fqn, c->dtype, c->ndim, c->sizes, c->strides, (uint64_t)c->bytes};
  return TSM_OK;
}

/* For those who make packages: what prepare computes from these values, to be stored beside the model. */
TS_EXPORT TS_SELDOM int32_t tsm_pack(const char *const *names, const tsm_tensor *values, size_t count, void *state) {
  ts_error_clear();
  if (count && (!names || !values)) return ts_fail(TSM_ERROR_ARGUMENT, "tsm_pack: an argument is NULL");
  ts_given *given = malloc(sizeof(ts_given) * (count + 1));
  if (!given) return ts_fail(TSM_ERROR_MEMORY, "out of memory");
  for (size_t i = 0; i < count; i++) given[i] = (ts_given){names[i], &values[i]};
  int32_t rc = ts_pack(given, count, state);
  free(given);
  return rc;
}
