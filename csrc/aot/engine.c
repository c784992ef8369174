/* The engine of a model library: models, their sets of constants, input checks, the services that generated code calls.
 *
 * In: torchsmith_model and torchsmith_graph, which are generated. Out: what plain.c and aoti.c need to be doors. libc only. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "aot/device.h"
#include "operators.h"
#include "native/workspace.h"
#include "native/pool.h"

/* ---------------------------------------------------------------- errors */

static __thread char error_text[1024];
static __thread int32_t error_kind; /* reported by generated code during a call */

TS_SELDOM int32_t ts_fail(int32_t status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(error_text, sizeof error_text, format, args);
  va_end(args);
  return status;
}

const char *ts_error_text(void) { return error_text; }

void ts_error_clear(void) {
  error_text[0] = 0;
  error_kind = 0;
}

int32_t ts_run_status(int32_t rc) {
  if (!error_text[0]) ts_fail(0, rc == TS_ERROR_MEMORY ? "out of memory" : "compiled code reported error %d", (int)rc);
  return rc == TS_ERROR_CHECK ? TSM_ERROR_CHECK : rc == TS_ERROR_MEMORY ? TSM_ERROR_MEMORY : rc == TS_ERROR_EXTERN ? TSM_ERROR_OPERATOR
         : rc == TS_ERROR_DEVICE ? TSM_ERROR_DEVICE : TSM_ERROR_CHECK;
}

/* ---------------------------------------------------------------- services */

static void *take(void *self, int64_t bytes) { return workspace_take(bytes); }
static void give(void *self, void *block, int64_t bytes) { workspace_give(block); }
static void parallel(void *self, const ts_launch *l, int64_t n, int64_t grain) { ts_pool_for(l, n, grain, ts_pool_processors()); }

static int32_t no_extern(void *self, int32_t call, const ts_tensor *args, const int64_t *scalars, ts_tensor *outs) {
  ts_fail(0, "operator number %d needs libtorch", (int)call);
  return TS_ERROR_EXTERN;
}

static int32_t no_conform(void *self, ts_tensor *given, int32_t ndim, const int64_t *sizes, const int64_t *strides) { return TS_ERROR_EXTERN; }
static void no_release(void *self, ts_tensor *given) { given->handle = NULL; }

void ts_report_error(void *self, int32_t kind, const char *text) {
  if (error_kind) return; /* the first one is the cause */
  error_kind = kind;
  ts_fail(0, "%s", text);
}

ts_host ts_host_services(void) {
  ts_host host = {TS_ABI, NULL, NULL, take, give, parallel, no_extern, no_conform, no_release, ts_report_error, NULL};
  const ts_operators *o = torchsmith_model.operators;
  if (o) {
    host.extern_call = o->services->call;
    host.conform = o->services->conform;
    host.release = o->services->release;
  }
  return host;
}

/* ---------------------------------------------------------------- dtypes */

static const struct { const char *name; size_t size; } DTYPES[] = {
    {"float64", 8}, {"float32", 4}, {"bfloat16", 2}, {"float16", 2}, {"int64", 8}, {"int32", 4}, {"int16", 2}, {"int8", 1},
    {"uint8", 1}, {"bool", 1}, {"complex64", 8}, {"complex128", 16}, {"complex32", 4}, {"uint16", 2}, {"uint32", 4}, {"uint64", 8}};
#define N_DTYPES ((int32_t)(sizeof DTYPES / sizeof *DTYPES))

size_t ts_itemsize(int32_t dtype) { return dtype >= 0 && dtype < N_DTYPES ? DTYPES[dtype].size : 0; }
const char *ts_dtype_name(int32_t dtype) { return dtype >= 0 && dtype < N_DTYPES ? DTYPES[dtype].name : "an unknown dtype"; }

/* ---------------------------------------------------------------- sizes */

bool ts_span(int32_t ndim, const int64_t *sizes, const int64_t *strides, size_t item, int64_t *bytes) {
  int64_t last = 0;
  *bytes = 0;
  for (int32_t k = 0; k < ndim; k++)
    if (sizes[k] == 0) return true;
  for (int32_t k = 0; k < ndim; k++) {
    int64_t reach = sizes[k] - 1;
    if (strides[k] < 0 || reach < 0 || !ts_multiply(&reach, strides[k]) || !ts_increase(&last, reach)) return false;
  }
  if (!ts_increase(&last, 1) || !ts_multiply(&last, (int64_t)item) || last > (int64_t)1 << 62) return false;
  *bytes = last;
  return true;
}

bool ts_dense(int32_t ndim, const int64_t *sizes, int64_t *strides, int64_t *count) {
  int64_t step = 1;
  bool is_empty = false, fits = true;
  for (int32_t k = ndim - 1; k >= 0; k--) {
    strides[k] = step;
    is_empty |= sizes[k] == 0;
    if (sizes[k] > 1) fits &= ts_multiply(&step, sizes[k]);
  }
  if (count) *count = is_empty ? 0 : step;
  return fits || is_empty;
}

int32_t ts_copy_runs(
    ts_move *move, void *context, char *to, const int64_t *into, const char *from, const int64_t *step, int32_t ndim, const int64_t *sizes, size_t item
) {
  int64_t at[ndim + 1], run = 1;
  int32_t outer = ndim; /* dimensions before those that lie without gaps on both sides */
  for (int32_t k = 0; k < ndim; k++) {
    if (sizes[k] == 0) return TSM_OK;
    at[k] = 0;
  }
  while (outer && (sizes[outer - 1] == 1 || (step[outer - 1] == run && into[outer - 1] == run))) run *= sizes[--outer];
  for (;;) {
    int32_t rc = move(context, to, from, run * (int64_t)item);
    if (rc) return rc;
    int32_t k = outer - 1;
    for (; k >= 0; k--) {
      if (++at[k] < sizes[k]) { /* strides of dimensions of one element may be any number: they are not walked */
        from += step[k] * (int64_t)item;
        to += into[k] * (int64_t)item;
        break;
      }
      from -= step[k] * (sizes[k] - 1) * (int64_t)item;
      to -= into[k] * (sizes[k] - 1) * (int64_t)item;
      at[k] = 0;
    }
    if (k < 0) return TSM_OK;
  }
}

static int32_t move_here(void *context, void *to, const void *from, int64_t bytes) {
  (void)context;
  memcpy(to, from, (size_t)bytes);
  return TSM_OK;
}

void ts_copy(char *to, const int64_t *into, const char *from, const int64_t *step, int32_t ndim, const int64_t *sizes, size_t item) {
  ts_copy_runs(move_here, NULL, to, into, from, step, ndim, sizes, item);
}

/* ---------------------------------------------------------------- checks */

int32_t ts_check_input(const tsm_model *m, int32_t index, const ts_tensor *t, int32_t dtype, int32_t ndim, int32_t device) {
  const ts_input_desc *d = &torchsmith_model.inputs[index];
  if (d->dtype < 0) return TSM_OK; /* the graph does not use it */
  if (dtype != d->dtype)
    return ts_fail(TSM_ERROR_DTYPE, "input %d (%s): dtype %s expected, got %s", index, d->name, ts_dtype_name(d->dtype), ts_dtype_name(dtype));
  if (device != ts_place(m)) {
    if (!torchsmith_model.device) return ts_fail(TSM_ERROR_DEVICE, "input %d (%s): a tensor on the CPU expected", index, d->name);
    return ts_fail(TSM_ERROR_DEVICE, "input %d (%s): a tensor on %s:%d expected", index, d->name, torchsmith_model.device_type, (int)m->device);
  }
  if (ndim != d->ndim)
    return ts_fail(TSM_ERROR_RANK, "input %d (%s): %d dimensions expected, got %d", index, d->name, (int)d->ndim, (int)ndim);
  bool is_empty = false;
  for (int32_t k = 0; k < ndim; k++) {
    int64_t n = t->sizes[k];
    is_empty |= n == 0;
    if (n >= d->lo[k] && (n <= d->hi[k] || d->hi[k] < 0)) continue;
    if (d->lo[k] == d->hi[k])
      return ts_fail(TSM_ERROR_SIZE, "input %d (%s): size %lld expected at dimension %d, got %lld", index, d->name, (long long)d->lo[k], (int)k, (long long)n);
    return ts_fail(TSM_ERROR_SIZE, "input %d (%s): size at dimension %d must be between %lld and %lld, got %lld", index, d->name, (int)k,
                   (long long)d->lo[k], (long long)d->hi[k], (long long)n);
  }
  if (!is_empty && !t->data) return ts_fail(TSM_ERROR_ARGUMENT, "input %d (%s): its data is NULL", index, d->name);
  size_t item = DTYPES[d->dtype].size;
  if (((uintptr_t)t->data & ((item > 8 ? 8 : item) - 1)) != 0)
    return ts_fail(TSM_ERROR_ALIGNMENT, "input %d (%s): its address is not a multiple of the element size %d", index, d->name, (int)item);
  return TSM_OK;
}

int32_t ts_check_all(const ts_tensor *in) {
  int64_t found[2] = {0, 0};
  int32_t bad = torchsmith_model.check(in, found);
  if (bad < 0) return TSM_OK;
  const ts_condition *c = &torchsmith_model.conditions[bad];
  if (found[0] == found[1]) return ts_fail(c->status, "%s", c->text);
  return ts_fail(c->status, "%s: got %lld where %lld was expected", c->text, (long long)found[0], (long long)found[1]);
}

TS_SELDOM int32_t ts_copy_inputs(ts_call *call, ts_tensor *in, void **copies, int64_t *strides) {
  const ts_model_desc *d = &torchsmith_model;
  const ts_device_services *far = d->device;
  d->wanted(in, strides);
  for (int32_t i = 0; i < d->n_inputs; i++) {
    int32_t ndim = d->inputs[i].ndim < 0 ? 0 : d->inputs[i].ndim;
    ts_tensor *t = &in[d->inputs[i].graph_input];
    bool same = true;
    for (int32_t k = 0; k < ndim; k++) same &= t->sizes[k] <= 1 || t->strides[k] == strides[k];
    int64_t bytes = 0;
    if (!same) {
      size_t item = ts_itemsize(d->inputs[i].dtype);
      if (!ts_span(ndim, t->sizes, strides, item, &bytes))
        return ts_fail(TSM_ERROR_SIZE, "input %d (%s): a copy of it would not fit 64 bits", i, d->inputs[i].name);
      char *to = copies[i] = !bytes ? NULL : far ? far->take(call, bytes) : workspace_take(bytes);
      if (bytes && !to) return ts_fail(TSM_ERROR_MEMORY, "no memory for a copy of input %d (%s)", i, d->inputs[i].name);
      if (bytes && !far) ts_copy(to, strides, t->data, t->strides, ndim, t->sizes, item);
      else if (bytes && far->copy(call, to, strides, t->data, t->strides, ndim, t->sizes, item)) return TSM_ERROR_DEVICE;
      t->handle = NULL; /* operators take the copy too */
      if (bytes) t->data = to;
      t->strides = strides;
    }
    strides += ndim;
  }
  return TSM_OK;
}

void ts_copies_end(void **copies) {
  for (int32_t i = 0; i < torchsmith_model.n_inputs; i++)
    if (copies[i] && torchsmith_model.device) torchsmith_model.device->give(NULL, copies[i]);
    else if (copies[i]) workspace_give(copies[i]);
}

/* ---------------------------------------------------------------- sets of constants */

static size_t padded(int64_t bytes) { return ((size_t)bytes + 63) & ~(size_t)63; }

static ts_generation *generation_new(void) {
  size_t bytes = sizeof(ts_generation) + sizeof(ts_tensor) * (size_t)torchsmith_graph.n_inputs;
  ts_generation *g = calloc(1, bytes);
  if (g) g->refs = 1;
  return g;
}

static void generation_free(ts_generation *g) {
  if (!g) return;
  const ts_device_services *far = torchsmith_model.device;
  if (far && g->owned_values) far->block_free(g->owned_values);
  else free(g->owned_values);
  free(g->is_given);
  if (far && g->owned_state) far->block_free(g->owned_state);
  else if (g->owned_state) block_free(g->owned_state);
  free(g);
}

/* Memory of constants, which `owner` frees, and copies to it: from the host, or from where the model's kernels run (`is_far`). */
static void *values_new(tsm_model *m, size_t bytes, void **owner) {
  if (torchsmith_model.device) return torchsmith_model.device->block_new(m, (int64_t)bytes, owner);
  return *owner = aligned_alloc(64, bytes);
}

static int32_t values_copy(tsm_model *m, void *to, const void *from, size_t bytes, bool is_far) {
  if (torchsmith_model.device) return torchsmith_model.device->fill(m, to, from, (int64_t)bytes, is_far);
  memcpy(to, from, bytes);
  return TSM_OK;
}

/* Where calls write constants the turn comes first: who waited for it gets the set that is in use then. */
ts_generation *ts_hold(tsm_model *m) {
  if (torchsmith_model.writes) pthread_mutex_lock(&m->turn);
  pthread_mutex_lock(&m->lock);
  ts_generation *g = m->now;
  g->refs++;
  pthread_mutex_unlock(&m->lock);
  return g;
}

TS_SELDOM static void drop(tsm_model *m, ts_generation *g) {
  while (g) {
    pthread_mutex_lock(&m->lock);
    bool last = --g->refs == 0;
    ts_generation *parent = g->parent; /* who is not the last must not touch g after this lock */
    pthread_mutex_unlock(&m->lock);
    if (!last) return;
    generation_free(g);
    g = parent;
  }
}

void ts_let_go(tsm_model *m, ts_generation *g) {
  if (torchsmith_model.writes) pthread_mutex_unlock(&m->turn);
  drop(m, g);
}

/* What prepare computes from g's values: from the file, or computed now. */
TS_SELDOM static int32_t prepare(tsm_model *m, ts_generation *g) {
  const ts_device_services *far = torchsmith_model.device;
  if (g->state || !torchsmith_graph.state_bytes) return TSM_OK;
  void *state = g->owned_state = far ? NULL : block_new(torchsmith_graph.state_bytes);
  if (far) state = far->block_new(m, torchsmith_graph.state_bytes, &g->owned_state);
  if (!state) return ts_fail(TSM_ERROR_MEMORY, "no memory for %lld bytes of prepared weights", (long long)torchsmith_graph.state_bytes);
  g->state = state;
  ts_host host = ts_host_services();
  ts_call call = {m, NULL};
  ts_cuda_call room;
  host.self = &call;
  if (far && far->begin(&call, &room, NULL, NULL, &host)) return TSM_ERROR_DEVICE;
  int32_t rc = torchsmith_graph.prepare(&host, g->inputs, state);
  if (far && far->end(&call, true) && !rc) rc = TS_ERROR_DEVICE;
  return rc ? ts_run_status(rc) : TSM_OK;
}

static void describe_constant(ts_tensor *t, const ts_constant_desc *c, void *data) {
  t->data = data;
  t->sizes = c->sizes;
  t->strides = c->strides;
  t->handle = NULL;
}

/* The values that the file holds. */
static int32_t first_generation(tsm_model *m) {
  const ts_model_desc *d = &torchsmith_model;
  const bool is_far = d->device != NULL; /* then nothing that the file holds is used where it lies */
  ts_generation *g = m->now = generation_new();
  if (!g) return ts_fail(TSM_ERROR_MEMORY, "out of memory");
  size_t bytes = 0;
  for (int32_t i = 0; i < d->n_constants; i++)
    if (d->constants[i].flags & TS_CONST_WRITTEN || (is_far && d->constants[i].offset >= 0)) bytes += padded(d->constants[i].bytes);
  char *room = bytes ? values_new(m, bytes, &g->owned_values) : NULL;
  if (bytes && !room) return ts_fail(TSM_ERROR_MEMORY, "no memory for %llu bytes of buffers", (unsigned long long)bytes);
  for (int32_t i = 0; i < d->n_constants; i++) {
    const ts_constant_desc *c = &d->constants[i];
    if (c->offset < 0) continue;
    char *data = (char *)m->map + c->offset;
    if (c->flags & TS_CONST_WRITTEN || is_far) { /* a buffer that calls write: the model's own memory */
      if (values_copy(m, room, data, (size_t)c->bytes, false)) return TSM_ERROR_DEVICE;
      data = room;
      room += padded(c->bytes);
    }
    describe_constant(&g->inputs[c->graph_input], c, data);
  }
  if (d->state_offset >= 0) {
    g->state = m->map + d->state_offset;
    return TSM_OK;
  }
  return prepare(m, g);
}

/* By the name in the module; else by the one made of it for PyTorch, in which other characters than letters and digits are `_`. */
TS_SELDOM static const ts_constant_desc *find_constant(const char *name) {
  const ts_constant_desc *first = torchsmith_model.constants, *end = first + torchsmith_model.n_constants;
  for (const ts_constant_desc *c = first; c < end; c++)
    if (!strcmp(c->fqn, name)) return c;
  for (const ts_constant_desc *c = first; c < end; c++)
    if (!strcmp(c->name, name)) return c;
  return NULL;
}

static int32_t check_given(const tsm_model *m, const ts_constant_desc *c, const tsm_tensor *v) {
  if (!v) return ts_fail(TSM_ERROR_ARGUMENT, "constant %s: its value is NULL", c->fqn);
  if (v->dtype != c->dtype)
    return ts_fail(TSM_ERROR_DTYPE, "constant %s: dtype %s expected, got %s", c->fqn, ts_dtype_name(c->dtype), ts_dtype_name(v->dtype));
  if (v->ndim != c->ndim) return ts_fail(TSM_ERROR_RANK, "constant %s: %d dimensions expected, got %d", c->fqn, (int)c->ndim, (int)v->ndim);
  if (c->ndim && !v->sizes) return ts_fail(TSM_ERROR_ARGUMENT, "constant %s: its sizes are NULL", c->fqn);
  for (int32_t k = 0; k < c->ndim; k++)
    if (v->sizes[k] != c->sizes[k])
      return ts_fail(TSM_ERROR_SIZE, "constant %s: size %lld expected at dimension %d, got %lld", c->fqn, (long long)c->sizes[k], (int)k, (long long)v->sizes[k]);
  if (v->device != 0 && (!m || v->device != ts_place(m))) return ts_fail(TSM_ERROR_DEVICE, "constant %s: a tensor on the CPU%s expected", c->fqn, torchsmith_model.device ? ", or on the model's device," : "");
  if (c->bytes && !v->data) return ts_fail(TSM_ERROR_ARGUMENT, "constant %s: its data is NULL", c->fqn);
  return TSM_OK;
}

/* Copy v, whatever its strides, into the layout of c. */
static int32_t copy_constant(tsm_model *m, const ts_constant_desc *c, const tsm_tensor *v, char *to) {
  int64_t dense[c->ndim + 1];
  const int64_t *step = v->strides;
  if (!step) {
    ts_dense(c->ndim, c->sizes, dense, NULL);
    step = dense;
  }
  bool same = true;
  for (int32_t k = 0; k < c->ndim; k++) same &= c->sizes[k] == 1 || step[k] == c->strides[k];
  if (!c->bytes) return TSM_OK;
  if (same) return values_copy(m, to, v->data, (size_t)c->bytes, v->device != 0);
  const ts_device_services *far = torchsmith_model.device;
  if (far && v->device) {
    ts_call call = {m, NULL};
    ts_cuda_call room;
    ts_host unused;
    if (far->begin(&call, &room, NULL, NULL, &unused)) return TSM_ERROR_DEVICE;
    int32_t rc = far->copy(&call, to, c->strides, v->data, step, c->ndim, c->sizes, ts_itemsize(c->dtype));
    return far->end(&call, true) || rc ? TSM_ERROR_DEVICE : TSM_OK;
  }
  char *dense_copy = far ? malloc((size_t)c->bytes) : to;
  if (!dense_copy) return ts_fail(TSM_ERROR_MEMORY, "no memory for a copy of constant %s", c->fqn);
  ts_copy(dense_copy, c->strides, v->data, step, c->ndim, c->sizes, ts_itemsize(c->dtype));
  int32_t rc = far ? values_copy(m, to, dense_copy, (size_t)c->bytes, false) : TSM_OK;
  if (far) free(dense_copy);
  return rc;
}

static bool touches_prepared(const ts_given *given, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const ts_constant_desc *c = given[i].name ? find_constant(given[i].name) : NULL;
    if (c && c->flags & TS_CONST_PREPARED) return true;
  }
  return false;
}

/* Fill g with `given` over the values of `base`. */
TS_SELDOM static int32_t fill(tsm_model *m, ts_generation *g, const ts_generation *base, const ts_given *given, size_t n, bool is_full) {
  const ts_model_desc *d = &torchsmith_model;
  size_t bytes = 64;
  for (int32_t i = 0; i < d->n_constants; i++) bytes += padded(d->constants[i].bytes);
  bool is_packed_anew = !base || touches_prepared(given, n);
  if (!is_packed_anew) g->state = base->state;
  char *room = values_new(m, bytes, &g->owned_values); /* each constant takes its place in it once */
  g->is_given = calloc((size_t)d->n_constants + 1, sizeof(bool));
  if (!room || !g->is_given) return ts_fail(TSM_ERROR_MEMORY, "no memory for %llu bytes of constants", (unsigned long long)bytes);
  for (size_t i = 0; i < n; i++) {
    if (!given[i].name) return ts_fail(TSM_ERROR_ARGUMENT, "the name of constant number %zu is NULL", i);
    const ts_constant_desc *c = find_constant(given[i].name);
    if (!c) return ts_fail(TSM_ERROR_NAME, "the model has no constant named %s", given[i].name);
    int32_t rc = check_given(m, c, given[i].value);
    if (rc) return rc;
    if (g->is_given[c - d->constants]) return ts_fail(TSM_ERROR_NAME, "constant %s is given twice", c->fqn);
    g->is_given[c - d->constants] = true;
    if ((rc = copy_constant(m, c, given[i].value, room)) != 0) return rc;
    describe_constant(&g->inputs[c->graph_input], c, room);
    room += padded(c->bytes);
  }
  for (int32_t i = 0; i < d->n_constants; i++) {
    const ts_constant_desc *c = &d->constants[i];
    ts_tensor *t = &g->inputs[c->graph_input];
    if (t->data || !c->bytes || !(c->flags & (TS_CONST_PREPARED | TS_CONST_READ | TS_CONST_WRITTEN))) continue;
    if (is_full) return ts_fail(TSM_ERROR_WEIGHTS, "constant %s is missing, and all of them are needed for a full update", c->fqn);
    const ts_tensor *old = &base->inputs[c->graph_input];
    if (!old->data && !(c->flags & (TS_CONST_READ | TS_CONST_WRITTEN)) && !is_packed_anew) continue; /* what was prepared stays */
    if (!old->data)
      return ts_fail(TSM_ERROR_WEIGHTS, "constant %s is missing: the package holds it in packed form only, so it must be loaded with those it was packed with "
                     "(or compile with options={'keep_constants': True})", c->fqn);
    if (values_copy(m, room, old->data, (size_t)c->bytes, true)) return TSM_ERROR_DEVICE;
    describe_constant(t, c, room);
    room += padded(c->bytes);
  }
  return prepare(m, g);
}

/* What a new set starts from: the set in use; of an inactive one the inactive one that there is, so that updates add up. */
TS_SELDOM static ts_generation *hold_base(tsm_model *m, bool is_next) {
  ts_generation *base = ts_hold(m);
  if (!is_next) return base;
  pthread_mutex_lock(&m->lock);
  ts_generation *next = m->next;
  if (next) {
    next->refs++;
    base->refs--; /* the model itself still holds it */
  }
  pthread_mutex_unlock(&m->lock);
  return next ? next : base;
}

/* Updates one after the other: while calls write buffers, none runs between reading those buffers and putting the new set in place. */
TS_SELDOM int32_t ts_update(tsm_model *m, const ts_given *given, size_t n, bool is_next, bool is_full) {
  ts_generation *g = generation_new();
  if (!g) return ts_fail(TSM_ERROR_MEMORY, "out of memory");
  pthread_mutex_lock(&m->updating);
  ts_generation *base = hold_base(m, is_next), *old = NULL;
  int32_t rc = fill(m, g, base, given, n, is_full);
  if (!rc) {
    if (base == m->next && base->is_given)
      for (int32_t i = 0; i < torchsmith_model.n_constants; i++) g->is_given[i] |= base->is_given[i];
    pthread_mutex_lock(&m->lock);
    if (g->state && g->state == base->state) {
      base->refs++;
      g->parent = base;
    }
    ts_generation **place = is_next ? &m->next : &m->now;
    old = *place;
    *place = g;
    pthread_mutex_unlock(&m->lock);
  }
  ts_let_go(m, base);
  pthread_mutex_unlock(&m->updating);
  if (rc) generation_free(g);
  else drop(m, old);
  return rc;
}

int32_t ts_swap(tsm_model *m) {
  pthread_mutex_lock(&m->updating);
  ts_generation *now = ts_hold(m), *next = m->next; /* nobody else replaces it meanwhile */
  int32_t rc = TSM_OK;
  for (int32_t i = 0; next && i < torchsmith_model.n_constants; i++) {
    const ts_constant_desc *c = &torchsmith_model.constants[i];
    if (!(c->flags & TS_CONST_WRITTEN) || !c->bytes) continue;
    if (!next->is_given || !next->is_given[i]) rc |= values_copy(m, next->inputs[c->graph_input].data, now->inputs[c->graph_input].data, (size_t)c->bytes, true);
    else next->is_given[i] = false; /* from here on calls write it */
  }
  if (next && !rc) {
    pthread_mutex_lock(&m->lock);
    m->next = m->now;
    m->now = next;
    pthread_mutex_unlock(&m->lock);
  }
  ts_let_go(m, now);
  pthread_mutex_unlock(&m->updating);
  return next ? rc : ts_fail(TSM_ERROR_WEIGHTS, "there are no other constants to swap in: update the inactive ones first");
}

void ts_forget_next(tsm_model *m) {
  pthread_mutex_lock(&m->updating);
  pthread_mutex_lock(&m->lock);
  ts_generation *next = m->next;
  m->next = NULL;
  pthread_mutex_unlock(&m->lock);
  pthread_mutex_unlock(&m->updating);
  drop(m, next);
}

TS_SELDOM int32_t ts_pack(const ts_given *given, size_t n, void *state) {
  const ts_operators *o = torchsmith_model.operators;
  if (torchsmith_model.device) return ts_fail(TSM_ERROR_DEVICE, "weights of a model on a device are prepared when it is opened");
  int32_t rc = ts_check_cpu(torchsmith_model.cpu);
  if (!rc && o) rc = o->services->open(o);
  ts_generation *g = rc ? NULL : generation_new();
  if (!g) return rc ? rc : ts_fail(TSM_ERROR_MEMORY, "out of memory");
  rc = fill(NULL, g, NULL, given, n, true);
  if (!rc) memcpy(state, g->state, (size_t)torchsmith_graph.state_bytes);
  generation_free(g);
  return rc;
}

/* ---------------------------------------------------------------- models */

static int32_t n_models; /* alive: the last one that goes takes the threads along, so that the library can be unloaded */

TS_SELDOM int32_t ts_model_open(const tsm_config *config, tsm_model **out) {
  const ts_model_desc *d = &torchsmith_model;
  *out = NULL;
  if (d->abi != TS_MODEL_ABI || torchsmith_graph.abi != TS_ABI) return ts_fail(TSM_ERROR_VERSION, "the parts of this library do not belong together");
  if (!d->device && config && config->device > 0)
    return ts_fail(TSM_ERROR_DEVICE, "the model was compiled for the CPU, not for device %d", (int)config->device - 1);
  int32_t rc = ts_check_cpu(d->cpu);
  if (!rc && d->operators) rc = d->operators->services->open(d->operators);
  if (rc) return rc;
  tsm_model *m = calloc(1, sizeof *m);
  if (!m) return ts_fail(TSM_ERROR_MEMORY, "out of memory");
  __atomic_add_fetch(&n_models, 1, __ATOMIC_ACQ_REL);
  pthread_mutex_init(&m->lock, NULL);
  pthread_mutex_init(&m->turn, NULL);
  pthread_mutex_init(&m->updating, NULL);
  m->threads = config && config->threads > 0 ? config->threads : ts_pool_processors();
  if (config) {
    m->allocate = config->allocate;
    m->release = config->release;
    m->context = config->context;
  }
  if (d->device && (rc = d->device->open(m, config ? config->device : 0)) != 0) {
    ts_model_close(m);
    return rc;
  }
  if (d->weights_size && (rc = ts_map_weights(m, config)) != 0) {
    ts_model_close(m);
    return rc;
  }
  if ((rc = first_generation(m)) != 0) {
    ts_model_close(m);
    return rc;
  }
  *out = m;
  return TSM_OK;
}

void ts_model_close(tsm_model *m) {
  if (!m) return;
  drop(m, m->next);
  drop(m, m->now);
  if (m->map_base) munmap(m->map_base, m->map_size);
  if (m->far) torchsmith_model.device->close(m);
  pthread_mutex_destroy(&m->lock);
  pthread_mutex_destroy(&m->turn);
  pthread_mutex_destroy(&m->updating);
  free(m);
  if (__atomic_sub_fetch(&n_models, 1, __ATOMIC_ACQ_REL)) return;
  ts_pool_stop();
  workspace_trim();
}
