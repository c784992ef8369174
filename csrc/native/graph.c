/* Graph: one compiled library, callable with the graph's inputs; gives a tuple of results.
 *
 * Graph(path, symbol, inputs, results, externs, eager, consts, name, trust, tail, threads, pool, packing, discard, device, index, records)
 *   inputs   [(kind, dtype row, ndim, flags, writes)]  kind 0 unused, 1 tensor, 2 int, 3 float, 4 bool; flags 1 sizes wanted, 2 written,
 *            4 read by `run`
 *   results  [(kind, of, ndim, at, row, dtype)] kind 0 fresh, 1 same result, 2 input, 3 view of input, 4 view of result,
 *                                              5 int, 6 float, 7 bool, 8 part of result; a view's dtype row and torch.dtype
 *   externs  specs for extern_new
 *   eager    called with the inputs when native code reports an error; None: NativeError is raised
 *   consts   inputs that `prepare` reads; trust: believe that inference tensors among them do not change
 *   tail     tuple of objects that always are the last inputs; threads: at most so many, 0 for as many as torch uses
 *   pool     whose threads: 0 torch's, 1 our own (pool.h)
 *   device   torch's number of the type of device that kernels run on; index: of the device, where no input says it;
 *            records: kept of a segment, 0 for none
 *   packing  names what `prepare` computes: graphs of one name share it; discard: free the memory of parameters that only it reads
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

#include "native.h"

enum { IN_UNUSED, IN_TENSOR, IN_INT, IN_FLOAT, IN_BOOL };
enum { OUT_FRESH, OUT_SAME, OUT_INPUT, OUT_VIEW_INPUT, OUT_VIEW_RESULT, OUT_INT, OUT_FLOAT, OUT_BOOL, OUT_PART_RESULT };
enum { WANT_SIZES = 1, WRITTEN = 2, READ = 4, ALIGNED = 8 };

typedef struct {
  int8_t kind, flags;
  int16_t dtype, ndim;
  int32_t writes; /* how often eager moves the input's version counter: by writes of what it holds already, too */
} InputSpec;

typedef struct {
  int32_t kind, of, ndim, at, row;
  PyObject *dtype;
} ResultSpec;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  void *lib;
  const ts_graph *entry;
  int n_inputs, n_results, n_externs;
  InputSpec *inputs;
  ResultSpec *results;
  Extern **externs;
  PyObject *eager, *name, *tail;
  Consts consts;
  Views *views; /* idle one: a call takes it and brings it back (with the GIL) */
  int n_views, threads, pool;
  int launches; /* of the latest call that were large enough for several threads */
  bool writes;
  int device, index;
  ts_cuda *cuda; /* NULL: kernels run on the processor */
  double *times; /* while `profile` runs: seconds of each launch, in order */
  int n_times;
} Graph;

enum { MOST_TIMES = 1 << 16, POOL_TORCH = 0, POOL_OWN = 1 };

/* ---------------------------------------------------------------- services */

static int32_t host_alloc_result(void *self, int32_t index, int32_t dtype, int32_t ndim, const int64_t *sizes, const int64_t *strides,
                                 ts_tensor *out) {
  Handle h = NULL;
  ts_errors at = errors_of(self);
  if (libtorch.empty_strided(ndim, sizes, strides, libtorch.dtypes[dtype], at.device, at.index, &h)) {
    libtorch_error(at, "empty_strided");
    return TS_ERROR_MEMORY;
  }
  out->handle = h;
  out->sizes = out->strides = NULL;
  return libtorch.get_data_ptr(h, &out->data) ? TS_ERROR_MEMORY : 0;
}

static void *host_take(void *self, int64_t bytes) {
  void *got = workspace_take(bytes);
  if (!got) call_error(self, TS_ERROR_MEMORY, "no memory for the workspace");
  return got;
}

static void host_give(void *self, void *block, int64_t bytes) { workspace_give(block); }

/* torch's allocator: statistics, trying again when memory is short and the user's captures are then as in eager. */
static void *memory_take(void *self, int32_t device, void *stream, int64_t bytes, void **handle) {
  const int64_t one = 1;
  void *data = NULL;
  *handle = NULL;
  if (libtorch.empty_strided(1, &bytes, &one, libtorch.dtypes[TS_U8], *(const int32_t *)self, device, handle)) return NULL;
  return libtorch.get_data_ptr(*handle, &data) ? NULL : data;
}

static void memory_give(void *self, int32_t device, void *stream, void *data, void *handle) { libtorch.delete_tensor(handle); }

static int32_t memory_type; /* of device, as torch numbers them */
static const ts_cuda_memory MEMORY = {memory_take, memory_give, &memory_type};

static int32_t device_launch(void *self, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words) {
  return cuda_launch(&((Call *)self)->cuda, segment, launches, n, words, n_words);
}

static int32_t device_read(void *self, const void *from, void *to, int64_t bytes) { return cuda_read(&((Call *)self)->cuda, from, to, bytes); }

/* torch captures what its libraries queue: on a stream of its own, with memory that belongs to the capture. */
static bool capture_begin(Call *call) {
  unsigned long long stream = 0;
  PyEval_RestoreThread(call->thread);
  PyObject *got = PyObject_CallFunction(torch.record_begin, "i", (int)call->cuda.device), *token = NULL;
  if (got && PyArg_ParseTuple(got, "OK", &token, &stream)) call->recording = Py_NewRef(token);
  Py_XDECREF(got);
  PyErr_Clear();
  call->thread = PyEval_SaveThread();
  if (!call->recording) return false;
  call->user_stream = call->cuda.stream;
  call->cuda.stream = (void *)(uintptr_t)stream;
  return true;
}

/* The graph, or NULL; `call->recording` keeps it alive. */
static void *capture_end(Call *call) {
  PyEval_RestoreThread(call->thread);
  PyObject *got = PyObject_CallOneArg(torch.record_end, call->recording);
  unsigned long long graph = got ? PyLong_AsUnsignedLongLong(got) : 0;
  Py_XDECREF(got);
  if (PyErr_Occurred()) graph = 0;
  PyErr_Clear();
  call->thread = PyEval_SaveThread();
  call->cuda.stream = call->user_stream;
  return (void *)(uintptr_t)graph;
}

static void let_go(void *owner) {
  PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF((PyObject *)owner);
  PyGILState_Release(state);
}

static int32_t device_begin(void *self, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words,
                            const uint64_t *fixed, int32_t n_fixed) {
  Call *call = self;
  int32_t how = cuda_segment_begin(&call->cuda, segment, launches, n, words, n_words, fixed, n_fixed);
  if (how != TS_RECORD || capture_begin(call)) return how;
  cuda_segment_abort(&call->cuda, "torch could not begin to record");
  return TS_PLAIN;
}

static int32_t device_end(void *self, int32_t segment) {
  Call *call = self;
  if (!call->cuda.record) return TS_OK;
  void *graph = capture_end(call), *owner = call->recording;
  call->recording = NULL;
  if (graph) return cuda_segment_end(&call->cuda, segment, graph, owner, let_go);
  cuda_segment_abort(&call->cuda, "a library call cannot be recorded");
  let_go(owner);
  call_error(call, TS_ERROR_DEVICE, "a library call cannot be recorded");
  return TS_ERROR_DEVICE;
}

/* A run that ended in the middle of a recording. */
static void device_stop(Call *call) {
  if (!call->cuda.record) return;
  capture_end(call);
  cuda_segment_abort(&call->cuda, "a library call failed while it was recorded");
  if (call->recording) let_go(call->recording);
  call->recording = NULL;
}

static const ts_device DEVICE = {device_launch, device_begin, device_end, device_read};

static void *far_take(void *self, int64_t bytes) { return cuda_take(&((Call *)self)->cuda, bytes); }
static void far_give(void *self, void *block, int64_t bytes) { cuda_give(&((Call *)self)->cuda, block); }

static void run_range(int64_t lo, int64_t hi, void *ctx) {
  const ts_launch *l = ctx;
  l->fn(l->bufs, l->syms, lo, hi);
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int32_t threads_of(const Graph *g) {
  uint32_t most = 0;
  if (!libtorch.num_threads || libtorch.num_threads(&most) || !most) most = (uint32_t)ts_pool_processors();
  return g->threads > 0 && (uint32_t)g->threads < most ? g->threads : (int32_t)most;
}

/* In a child of fork OpenMP waits for threads that exist no more; our own pool starts new ones. */
static bool is_child;
static void in_child(void) { is_child = true; }
void graph_init(void) { pthread_atfork(NULL, NULL, in_child); }

static bool is_own(const Graph *g) { return g->pool == POOL_OWN || is_child || !libtorch.parallel_for; }

static void host_parallel(void *self, const ts_launch *l, int64_t n, int64_t grain) {
  Call *call = self;
  Graph *g = call->graph;
  double start = g->times ? seconds() : 0;
  if (n >= 2 * grain) call->launches++;
  if (call->crew) {
    ts_crew_for(call->crew, l, n, grain, call->threads);
  } else if (is_own(g)) {
    ts_pool_for(l, n, grain, call->threads);
  } else {
    int64_t share = (n + call->threads - 1) / call->threads;
    if (grain < share) grain = share;
    if (n <= grain || libtorch.parallel_for(0, n, grain, run_range, (void *)l)) l->fn(l->bufs, l->syms, 0, n);
  }
  if (g->times && g->n_times < MOST_TIMES) g->times[g->n_times++] = seconds() - start;
}

typedef struct {
  Call *call;
  const ts_host *host;
  const ts_tensor *inputs;
  const int64_t *scalars;
  const void *state;
  ts_tensor *results;
  int64_t *syms;
  void *prepares; /* NULL: run */
  int32_t rc;
} Run;

static int32_t run_entry(const Run *r) {
  const ts_graph *entry = ((Graph *)r->call->graph)->entry;
  if (r->prepares) return entry->prepare(r->host, r->inputs, r->prepares);
  return entry->run(r->host, r->inputs, r->scalars, r->state, r->results, r->syms);
}

static void run_member(int64_t lo, int64_t hi, void *ctx) {
  Run *r = ctx;
  if (lo > 0) {
    ts_crew_help(r->call->crew);
    return;
  }
  r->rc = run_entry(r);
  ts_crew_end(r->call->crew);
}

/* The native run, without the GIL. A graph that launches several times does so from inside one parallel region of torch's pool: its
 * threads then wait for our launches, not for torch's, which would spin while one of us has a page of fresh memory cleared. Not so
 * where externs run: torch does not nest its regions; `prepare` has none. */
static int32_t run_native(Run *r) {
  Call *call = r->call;
  Graph *g = call->graph;
  call->launches = 0;
  call->crew = NULL;
  if (g->cuda) {
    r->rc = run_entry(r);
    device_stop(call);
    return r->rc;
  }
  bool ours = is_own(g);
  bool several = r->prepares || (g->launches > 1 && !g->n_externs);
  if (!ours && several && call->threads > 1) call->crew = ts_crew_open();
  if (call->crew) {
    if (libtorch.parallel_for(0, call->threads, 1, run_member, r)) call_error(call, r->rc = TS_ERROR_EXTERN, "no parallel region");
    ts_crew_close(call->crew);
  } else {
    if (ours) ts_pool_enter();
    r->rc = run_entry(r);
    if (ours) ts_pool_leave();
  }
  call->crew = NULL;
  if (!r->prepares) g->launches = call->launches;
  return r->rc;
}

/* Kernels for a device take addresses that are multiples of 16: another input is copied. */
static int32_t align_input(const InputSpec *s, ts_tensor *t, ts_cuda_call *c) {
  if (s->kind != IN_TENSOR || ((uintptr_t)t->data & 15) == 0) return TS_OK;
  if (s->flags & ALIGNED) {
    c->report(c->self, TS_ERROR_EXTERN, "eager's kernel looks at the address of an input, which is no multiple of 16");
    return TS_ERROR_EXTERN;
  }
  int64_t n = 0, *sizes = NULL, *strides = NULL, last = 0;
  int32_t dtype = 0;
  if (libtorch.get_dim(t->handle, &n) || libtorch.get_sizes(t->handle, &sizes) || libtorch.get_strides(t->handle, &strides) ||
      libtorch.get_dtype(t->handle, &dtype))
    return TS_ERROR_EXTERN;
  bool empty = false;
  for (int64_t d = 0; d < n; d++) last += (sizes[d] - 1) * strides[d], empty |= sizes[d] == 0;
  int64_t span = empty ? 0 : (last + 1) * (int64_t)libtorch.element_size(dtype);
  int32_t rc = cuda_align(c, &t->data, span, s->flags & WRITTEN);
  t->handle = NULL; /* externs take the copy too */
  t->sizes = sizes;
  t->strides = strides;
  return rc;
}

/* Those that `run` reads or writes; of the rest `prepare` has made copies of its own. */
static int32_t align_inputs(Graph *g, ts_tensor *tensors, ts_cuda_call *c) {
  int32_t rc = TS_OK;
  for (int i = 0; !rc && i < g->n_inputs; i++)
    if (g->inputs[i].flags & (READ | WRITTEN)) rc = align_input(&g->inputs[i], &tensors[i], c);
  return rc;
}

/* The constants as `prepare` gets them. */
static int32_t align_consts(Graph *g, ts_tensor *tensors, ts_cuda_call *c) {
  int32_t rc = TS_OK;
  for (int i = 0; !rc && i < g->consts.n; i++) rc = align_input(&g->inputs[g->consts.inputs[i]], &tensors[g->consts.inputs[i]], c);
  return rc;
}

int32_t call_prepare(const ts_host *host, const ts_tensor *inputs, void *block, ts_cuda_block *far) {
  Call *call = host->self;
  Run r = {.call = call, .host = host, .inputs = inputs, .prepares = block};
  if (!far) return run_native(&r);
  Graph *g = call->graph;
  ts_cuda_call *c = &call->cuda, user = *c;
  ts_tensor *near = malloc(sizeof *near * (size_t)g->n_inputs + 1);
  if (!near || (user.is_capturing && cuda_apart(&user, c))) { /* recorded, it would run whenever the caller's graph does */
    free(near);
    return TS_ERROR_DEVICE;
  }
  memcpy(near, inputs, sizeof *near * (size_t)g->n_inputs);
  r.inputs = near;
  int32_t rc = align_consts(g, near, c);
  if (!rc) rc = run_native(&r);
  if (cuda_unstage(c)) rc = TS_ERROR_DEVICE;
  free(near);
  if (!rc) rc = cuda_block_ready(c, far);
  if (user.is_capturing) {
    if (cuda_apart_end(c)) rc = TS_ERROR_DEVICE;
    *c = user;
  }
  return rc;
}

static int32_t host_extern(void *self, int32_t number, const ts_tensor *args, const int64_t *numbers, ts_tensor *outs) {
  Call *call = self;
  Graph *g = call->graph;
  return extern_run(call, g->externs[number], args, numbers, outs);
}

static int32_t host_conform(void *self, ts_tensor *given, int32_t ndim, const int64_t *sizes, const int64_t *strides) {
  return operator_conform(errors_of(self), given, ndim, sizes, strides);
}

static void host_release(void *self, ts_tensor *given) { operator_release(given); }

void call_error(Call *call, int32_t kind, const char *text) {
  if (call->kind) return; /* the first one is the cause */
  call->kind = kind;
  snprintf(call->text, sizeof call->text, "%s", text);
}

static void host_error(void *self, int32_t kind, const char *text) { call_error(self, kind, text); }

ts_errors errors_of(Call *call) {
  const Graph *g = call->graph;
  return (ts_errors){host_error, call, g->device, g->cuda ? call->cuda.device : -1};
}

static const ts_host HOST = {TS_ABI,      NULL,         host_alloc_result, host_take,  host_give, host_parallel,
                             host_extern, host_conform, host_release,      host_error, NULL};

/* ---------------------------------------------------------------- results */

static PyObject *ints(const int64_t *values, int n) {
  PyObject *t = PyTuple_New(n);
  for (int i = 0; t && i < n; i++) {
    PyObject *v = PyLong_FromLongLong(values[i]);
    if (!v) Py_CLEAR(t);
    else PyTuple_SET_ITEM(t, i, v);
  }
  return t;
}

static PyObject *view_of(PyObject *base, const ResultSpec *r, const int64_t *syms) {
  int64_t offset = 0;
  int32_t dtype = 0;
  PyObject *typed = NULL;
  if (libtorch.get_dtype(handle_of(base), &dtype)) return PyErr_Format(torch.error, "the base of a view cannot be read");
  if (dtype != libtorch.dtypes[r->row]) {
    typed = PyObject_CallFunctionObjArgs(torch.view, base, r->dtype, NULL);
    if (!typed) return NULL;
    base = typed;
    int64_t n = 0, *have = NULL, *steps = NULL;
    if (syms[r->at + 2 * r->ndim] == 0 && !libtorch.get_dim(handle_of(base), &n) && n == r->ndim && !libtorch.get_sizes(handle_of(base), &have) &&
        !libtorch.get_strides(handle_of(base), &steps) && !memcmp(have, syms + r->at, sizeof(int64_t) * (size_t)n) &&
        !memcmp(steps, syms + r->at + n, sizeof(int64_t) * (size_t)n))
      return typed;
  }
  PyObject *got = NULL, *sizes = ints(syms + r->at, r->ndim), *strides = ints(syms + r->at + r->ndim, r->ndim);
  if (libtorch.get_storage_offset(handle_of(base), &offset) == 0 && sizes && strides) {
    PyObject *at = PyLong_FromLongLong(offset + syms[r->at + 2 * r->ndim]);
    PyObject *args[4] = {base, sizes, strides, at};
    if (at) got = PyObject_Vectorcall(torch.as_strided, args, 4, NULL);
    Py_XDECREF(at);
  }
  Py_XDECREF(sizes);
  Py_XDECREF(strides);
  Py_XDECREF(typed);
  return got;
}

/* Another tensor over the memory of `base`, with a version counter of its own. */
static PyObject *part_of(PyObject *base, const ResultSpec *r, const int64_t *syms) {
  const int64_t *sizes = syms + r->at, *strides = sizes + r->ndim;
  int32_t dtype = 0;
  Handle fresh = NULL;
  if (libtorch.get_dtype(handle_of(base), &dtype) || dtype != libtorch.dtypes[r->row]) return view_of(base, r, syms);
  if (libtorch.reinterpret(handle_of(base), r->ndim, sizes, strides, strides[r->ndim], &fresh)) return view_of(base, r, syms);
  return wrap_handle(fresh);
}

static PyObject *finish(Graph *g, PyObject *const *args, ts_tensor *results, const int64_t *syms) {
  PyObject *out = PyTuple_New(g->n_results);
  if (!out) return NULL;
  for (int pass = 0; pass < 2; pass++) /* a view may come before the result it views */
    for (int i = 0; i < g->n_results; i++) {
      const ResultSpec *r = &g->results[i];
      PyObject *got = NULL;
      double d;
      if ((r->kind == OUT_VIEW_RESULT || r->kind == OUT_PART_RESULT) != pass) continue;
      switch (r->kind) {
        case OUT_FRESH:
          got = wrap_handle(results[i].handle);
          results[i].handle = NULL;
          break;
        case OUT_SAME: got = Py_NewRef(PyTuple_GET_ITEM(out, r->of)); break;
        case OUT_INPUT: got = Py_NewRef(args[r->of]); break;
        case OUT_VIEW_INPUT: got = view_of(args[r->of], r, syms); break;
        case OUT_VIEW_RESULT: got = view_of(PyTuple_GET_ITEM(out, r->of), r, syms); break;
        case OUT_PART_RESULT: got = part_of(PyTuple_GET_ITEM(out, r->of), r, syms); break;
        case OUT_INT: got = PyLong_FromLongLong(syms[r->at]); break;
        case OUT_FLOAT:
          memcpy(&d, &syms[r->at], sizeof d);
          got = PyFloat_FromDouble(d);
          break;
        default: got = PyBool_FromLong(syms[r->at] != 0);
      }
      if (!got) {
        Py_DECREF(out);
        return NULL;
      }
      PyTuple_SET_ITEM(out, i, got);
    }
  return out;
}

/* ---------------------------------------------------------------- call */

/* The device of a call is that of its inputs; all of them lie there. */
static int place_call(Graph *g, const ts_tensor *tensors, ts_host *host, Call *call) {
  int32_t device = -1;
  for (int i = 0; i < g->n_inputs; i++) {
    const InputSpec *s = &g->inputs[i];
    if (s->kind != IN_TENSOR) continue;
    int32_t index = 0; /* of a device of the graph's type: read_inputs has looked */
    bool unknown = libtorch.get_device_index(tensors[i].handle, &index);
    if (g->device == libtorch.cpu || index < 0) index = 0;
    if (device < 0) device = index;
    if (unknown || index != device) {
      PyErr_Format(torch.error, "input %d lies on another device than the graph was compiled for, or than the other inputs", i);
      return -1;
    }
  }
  ts_cuda_call *c = &call->cuda;
  *c = (ts_cuda_call){.graph = g->cuda, .device = device < 0 ? g->index : device, .report = host_error, .self = call, .memory = &MEMORY};
  host->device = &DEVICE;
  host->take_workspace = far_take;
  host->give_workspace = far_give;
  if (libtorch.cuda_stream && libtorch.cuda_stream(c->device, &c->stream)) {
    PyErr_SetString(torch.error, "torch's current stream cannot be read");
    return -1;
  }
  if (cuda_begin(c)) {
    PyErr_SetString(torch.error, call->text);
    return -1;
  }
  return 0;
}

static int read_inputs(Graph *g, PyObject *const *args, ts_tensor *tensors, int64_t *scalars) {
  int k = 0;
  for (int i = 0; i < g->n_inputs; i++) {
    const InputSpec *s = &g->inputs[i];
    PyObject *o = args[i];
    double d;
    switch (s->kind) { /* a 0-d tensor of the processor counts as a number: Python asks it for its value */
      case IN_TENSOR:
        if (!is_tensor(o)) {
          PyErr_Format(PyExc_TypeError, "input %d must be a tensor, not %s", i, Py_TYPE(o)->tp_name);
          return -1;
        }
        if (describe_tensor(handle_of(o), &tensors[i], s->flags & WANT_SIZES, g->device)) {
          PyErr_Format(torch.error, "input %d has no memory that the graph can read: it runs on the %s", i, g->device ? "GPU" : "CPU");
          return -1;
        }
        break;
      case IN_INT:
        scalars[k] = PyLong_AsLongLong(o);
        if (scalars[k++] == -1 && PyErr_Occurred()) return -1;
        break;
      case IN_FLOAT:
        d = PyFloat_AsDouble(o);
        if (d == -1.0 && PyErr_Occurred()) return -1;
        memcpy(&scalars[k++], &d, sizeof d);
        break;
      case IN_BOOL: {
        int b = PyObject_IsTrue(o);
        if (b < 0) return -1;
        scalars[k++] = b;
        break;
      }
      default: /* unused, but its sizes may be read */
        if (s->flags & WANT_SIZES && (!is_tensor(o) || describe_sizes(handle_of(o), &tensors[i]))) {
          PyErr_Format(PyExc_TypeError, "input %d must be a tensor with sizes, not %s", i, Py_TYPE(o)->tp_name);
          return -1;
        }
    }
  }
  return 0;
}

static char last_error[512]; /* with the GIL */

PyObject *native_last_error(PyObject *module, PyObject *none) { return PyUnicode_DecodeUTF8(last_error, (Py_ssize_t)strlen(last_error), "replace"); }

static PyObject *fail(Graph *g, PyObject *const *args, Call *call, int32_t rc) {
  memcpy(last_error, call->text, sizeof last_error);
  if (g->eager != Py_None && rc != TS_ERROR_LATE) {
    Py_XDECREF(call->exc_type);
    Py_XDECREF(call->exc_value);
    Py_XDECREF(call->exc_trace);
    return PyObject_Vectorcall(g->eager, args, (size_t)(g->n_inputs - PyTuple_GET_SIZE(g->tail)), NULL);
  }
  if (call->exc_type) {
    PyErr_Restore(call->exc_type, call->exc_value, call->exc_trace);
    return NULL;
  }
  return PyErr_Format(torch.error, "%s", call->text[0] ? call->text : "native code reported an error");
}

/* Nothing has happened yet: a call that cannot begin runs eagerly. NULL where the exception that is set is for the caller. */
static PyObject *not_begun(Graph *g, PyObject *const *args, Call *call) {
  if (g->eager == Py_None || !PyErr_ExceptionMatches(torch.error)) return NULL;
  PyObject *type, *value, *trace, *said;
  PyErr_Fetch(&type, &value, &trace);
  said = value ? PyObject_Str(value) : NULL;
  const char *text = said ? PyUnicode_AsUTF8(said) : NULL;
  if (text) call_error(call, TS_ERROR_EXTERN, text); /* unless there is a cause that was told before */
  PyErr_Clear();
  Py_XDECREF(said), Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
  return fail(g, args, call, TS_ERROR_EXTERN);
}

static int count_writes(PyObject *tensor, int32_t n) {
  PyObject *number = PyLong_FromLong(n), *done = number ? PyObject_CallFunctionObjArgs(torch.increment_version, tensor, number, NULL) : NULL;
  Py_XDECREF(number);
  Py_XDECREF(done);
  return done ? 0 : -1;
}

static PyObject *graph_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
  Graph *g = (Graph *)self;
  const ts_graph *entry = g->entry;
  int n_tail = (int)PyTuple_GET_SIZE(g->tail), n_given = g->n_inputs - n_tail;
  if (PyVectorcall_NARGS(nargsf) != n_given || (kwnames && PyTuple_GET_SIZE(kwnames)))
    return PyErr_Format(PyExc_TypeError, "the graph takes %d inputs, not %zd", n_given, PyVectorcall_NARGS(nargsf));
  size_t words = (size_t)g->n_inputs * 5 + (size_t)g->n_results * 4 + (size_t)entry->n_scalars + (size_t)entry->n_result_syms + 1;
  int64_t few[256], *room = few;
  if (words > 256 && !(room = PyMem_Malloc(words * 8))) return PyErr_NoMemory();
  ts_tensor *tensors = (ts_tensor *)room, *results = tensors + g->n_inputs;
  int64_t *scalars = (int64_t *)(results + g->n_results), *syms = scalars + entry->n_scalars;
  if (n_tail) {
    PyObject **all = (PyObject **)(syms + entry->n_result_syms);
    memcpy(all, args, sizeof(PyObject *) * (size_t)n_given);
    memcpy(all + n_given, &PyTuple_GET_ITEM(g->tail, 0), sizeof(PyObject *) * (size_t)n_tail);
    args = all;
  }
  memset(results, 0, sizeof(ts_tensor) * (size_t)g->n_results);
  PyObject *out = NULL;
  Call call;
  call.kind = 0;
  call.text[0] = 0;
  call.exc_type = call.exc_value = call.exc_trace = NULL;
  call.graph = g;
  call.crew = NULL;
  call.recording = NULL;
  call.views = g->views;
  g->views = NULL;
  if (!call.views && g->n_views) call.views = views_new(g->n_views);
  ts_host host = HOST;
  host.self = &call;
  call.threads = g->cuda ? 1 : threads_of(g);
  if (read_inputs(g, args, tensors, scalars) < 0 || (g->cuda && place_call(g, tensors, &host, &call) < 0)) {
    out = not_begun(g, args, &call);
    goto done;
  }
  if (g->cuda && g->n_externs) {
    PyObject *modes = PyObject_CallNoArgs(torch.modes);
    if (modes) call.cuda.modes = PyLong_AsUnsignedLongLongMask(modes);
    Py_XDECREF(modes);
    if (PyErr_Occurred()) {
      cuda_end(&call.cuda);
      goto done;
    }
  }
  State *state = NULL;
  if (g->consts.n && !(state = state_open(&g->consts, entry, &host, g->name, args, tensors))) {
    if (g->cuda) cuda_end(&call.cuda);
    if (call.kind) out = not_begun(g, args, &call); /* memory or the device; else the program is told why */
    goto done;
  }
  bool grad = g->n_externs && libtorch.grad_enabled();
  PyObject *guard = NULL;
  if (g->n_externs) {
    PyObject *on = PyObject_CallNoArgs(torch.is_autocast);
    if (!on || (on == Py_True && !(guard = PyObject_CallNoArgs(torch.disable_autocast)))) {
      Py_XDECREF(on);
      state_close(state);
      if (g->cuda) cuda_end(&call.cuda);
      goto done;
    }
    Py_DECREF(on);
  }
  call.thread = PyEval_SaveThread();
  if (grad) libtorch.set_grad(false);
  Run run = {&call, &host, tensors, scalars, state ? state_memory(state) : NULL, results, syms, NULL, 0};
  int32_t rc = TS_OK;
  if (g->cuda) rc = (state && cuda_block_wait(&call.cuda, state_block(state))) || align_inputs(g, tensors, &call.cuda) ? TS_ERROR_DEVICE : TS_OK;
  if (!rc) rc = run_native(&run);
  if (g->cuda) {
    if (cuda_end(&call.cuda) && !rc) rc = TS_ERROR_LATE; /* inputs were written, so the call cannot be repeated */
  }
  if (grad) libtorch.set_grad(true);
  PyEval_RestoreThread(call.thread);
  state_close(state);
  if (guard) {
    PyObject *left = PyObject_CallMethod(guard, "__exit__", "OOO", Py_None, Py_None, Py_None);
    if (!left) PyErr_Clear(); /* leaving a guard does not fail */
    Py_XDECREF(left);
    Py_DECREF(guard);
  }
  if (rc == 0) {
    out = finish(g, args, results, syms);
    for (int i = 0; out && g->writes && i < g->n_inputs; i++) {
      if (g->inputs[i].writes && count_writes(args[i], g->inputs[i].writes)) Py_CLEAR(out);
      if ((g->inputs[i].flags & WRITTEN) && !g->inputs[i].writes) states_written(&tensors[i]); /* through .data: no counter tells of it */
    }
  }
  for (int i = 0; i < g->n_results; i++)
    if (results[i].handle) libtorch.delete_tensor(results[i].handle);
  if (rc) out = fail(g, args, &call, rc);
done:
  if (call.views) {
    if (g->views) views_free(call.views); /* another thread was quicker */
    else g->views = call.views;
  }
  if (room != few) PyMem_Free(room);
  return out;
}

/* ---------------------------------------------------------------- life */

static int n_graphs; /* alive; with the GIL */

static int read_specs(Graph *g, PyObject *inputs, PyObject *results, PyObject *externs) {
  g->n_inputs = (int)PyList_GET_SIZE(inputs);
  g->n_results = (int)PyList_GET_SIZE(results);
  g->inputs = PyMem_Calloc((size_t)g->n_inputs + 1, sizeof *g->inputs);
  g->results = PyMem_Calloc((size_t)g->n_results + 1, sizeof *g->results);
  g->externs = PyMem_Calloc((size_t)PyList_GET_SIZE(externs) + 1, sizeof *g->externs);
  if (!g->inputs || !g->results || !g->externs) {
    PyErr_NoMemory();
    return -1;
  }
  for (int i = 0; i < g->n_inputs; i++) {
    int kind, dtype, ndim, flags, writes;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(inputs, i), "iiiii", &kind, &dtype, &ndim, &flags, &writes)) return -1;
    g->inputs[i] = (InputSpec){(int8_t)kind, (int8_t)flags, (int16_t)dtype, (int16_t)ndim, writes};
    g->writes |= (flags & WRITTEN) || writes;
  }
  for (int i = 0; i < g->n_results; i++) {
    ResultSpec *r = &g->results[i];
    if (!PyArg_ParseTuple(PyList_GET_ITEM(results, i), "iiiiiO", &r->kind, &r->of, &r->ndim, &r->at, &r->row, &r->dtype)) return -1;
    Py_INCREF(r->dtype);
    bool of_result = r->kind == OUT_SAME || r->kind == OUT_VIEW_RESULT || r->kind == OUT_PART_RESULT, of_input = r->kind == OUT_INPUT || r->kind == OUT_VIEW_INPUT;
    int limit = of_result ? g->n_results : of_input ? g->n_inputs : 1;
    int need = r->kind == OUT_VIEW_INPUT || r->kind == OUT_VIEW_RESULT || r->kind == OUT_PART_RESULT ? 2 * r->ndim + 1 : r->kind >= OUT_INT;
    if (r->row < 0 || r->row >= (int)(sizeof libtorch.dtypes / sizeof *libtorch.dtypes) || r->of < 0 || r->of >= limit || r->at < 0 || r->at + need > g->entry->n_result_syms) {
      PyErr_SetString(PyExc_ValueError, "a result of the manifest is out of range");
      return -1;
    }
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(externs); i++) {
    if (!(g->externs[i] = extern_new(PyList_GET_ITEM(externs, i), &g->n_views))) return -1;
    g->n_externs++;
  }
  if (!libtorch.inference) g->n_views = 0; /* kept tensors must not cross inference mode */
  return 0;
}

static int read_consts(Graph *g, PyObject *consts) {
  int n = (int)PyList_GET_SIZE(consts);
  g->consts.inputs = PyMem_Calloc((size_t)n + 1, sizeof(int));
  g->consts.prepared_only = PyMem_Calloc((size_t)n + 1, sizeof(bool));
  if (!g->consts.inputs || !g->consts.prepared_only) return -1;
  for (int i = 0; i < n; i++) {
    long k = PyLong_AsLong(PyList_GET_ITEM(consts, i));
    if (k < 0 || k >= g->n_inputs || g->inputs[k].kind != IN_TENSOR) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a constant of the manifest is no tensor input");
      return -1;
    }
    g->consts.inputs[i] = (int)k;
    g->consts.prepared_only[i] = !(g->inputs[k].flags & (READ | WRITTEN));
  }
  g->consts.n = n;
  return 0;
}

static PyObject *graph_refreeze(PyObject *self, PyObject *none) {
  Graph *g = (Graph *)self;
  if (g->consts.list) states_clear(g->consts.list);
  Py_RETURN_NONE;
}

static PyObject *graph_profile(PyObject *self, PyObject *args) {
  Graph *g = (Graph *)self;
  if (g->times) return PyErr_Format(PyExc_RuntimeError, "another call of this graph is being profiled");
  double *times = PyMem_Calloc(MOST_TIMES, sizeof(double));
  if (!times) return PyErr_NoMemory();
  g->times = times;
  g->n_times = 0;
  PyObject *result = PyObject_Call(self, args, NULL), *list = result ? PyList_New(0) : NULL;
  g->times = NULL;
  for (int i = 0; list && i < g->n_times; i++) {
    PyObject *t = PyFloat_FromDouble(times[i]);
    if (!t || PyList_Append(list, t) < 0) Py_CLEAR(list);
    Py_XDECREF(t);
  }
  PyMem_Free(times);
  Py_XDECREF(result);
  return list;
}

static PyObject *graph_segments(PyObject *self, PyObject *none) {
  Graph *g = (Graph *)self;
  PyObject *out = PyList_New(0);
  for (int i = 0; out && g->cuda && i < g->entry->images->n_segments; i++) {
    ts_cuda_counts n = cuda_counts(g->cuda, i);
    PyObject *row = Py_BuildValue("{s:i,s:i,s:L,s:L,s:L,s:L,s:L,s:z}", "launches", n.launches, "records", n.records, "plain", (long long)n.plain,
                                  "replayed", (long long)n.replayed, "patched", (long long)n.patched, "recorded", (long long)n.recorded,
                                  "dropped", (long long)n.dropped, "why", cuda_why_plain(g->cuda, i));
    if (!row || PyList_Append(out, row) < 0) Py_CLEAR(out);
    Py_XDECREF(row);
  }
  return out;
}

static PyMethodDef graph_methods[] = {
    {"segments", graph_segments, METH_NOARGS, "What became of each segment of launches on a device: recorded, replayed, and why not."},
    {"profile", graph_profile, METH_VARARGS, "Run the graph on these inputs alone; the seconds that each kernel launch took, in order."},
    {"refreeze", graph_refreeze, METH_NOARGS, "Forget what was prepared from constant inputs; the next call prepares anew."},
    {NULL, NULL, 0, NULL},
};

static PyObject *graph_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  const char *symbol, *packing;
  PyObject *file = NULL, *inputs, *results, *externs, *eager, *consts, *name, *tail;
  int trust, threads, pool, discard, device, index, records;
  if (!PyArg_ParseTuple(args, "O&sO!O!O!OO!OpO!iispiii", PyUnicode_FSConverter, &file, &symbol, &PyList_Type, &inputs, &PyList_Type, &results, &PyList_Type, &externs,
                        &eager, &PyList_Type, &consts, &name, &trust, &PyTuple_Type, &tail, &threads, &pool,
                        &packing, &discard, &device, &index, &records))
    return NULL;
  Graph *g = torch.ready ? (Graph *)type->tp_alloc(type, 0) : (PyErr_Format(PyExc_RuntimeError, "call setup first"), NULL);
  if (!g) {
    Py_DECREF(file);
    return NULL;
  }
  n_graphs++;
  g->vectorcall = graph_call;
  g->eager = Py_NewRef(eager);
  g->name = Py_NewRef(name);
  g->tail = Py_NewRef(tail);
  g->consts.trust = trust;
  g->threads = threads;
  g->pool = pool;
  g->consts.discard = discard;
  g->device = device;
  g->index = index < 0 ? 0 : index;
  g->lib = dlopen(PyBytes_AS_STRING(file), RTLD_NOW | RTLD_LOCAL);
  if (!g->lib) {
    PyErr_Format(PyExc_OSError, "%s", dlerror());
    goto bad;
  }
  g->entry = dlsym(g->lib, symbol);
  if (!g->entry || g->entry->abi != TS_ABI) {
    PyErr_Format(PyExc_OSError, "%s is not a torchsmith library of this version", PyBytes_AS_STRING(file));
    goto bad;
  }
  if (g->entry->images) {
    const char *missing = cuda_connect();
    if (!libtorch.cuda_stream) libtorch.cuda_stream = (int32_t(*)(int32_t, void **))libtorch_find("aoti_torch_get_current_cuda_stream");
    if (missing || !libtorch.get_device_index) {
      PyErr_Format(PyExc_ImportError, "%s", missing ? missing : "libtorch lacks aoti_torch_get_device_index");
      goto bad;
    }
    if (!(g->cuda = cuda_new(g->entry->images, records))) {
      PyErr_NoMemory();
      goto bad;
    }
    g->consts.is_far = true;
    memory_type = device;
  }
  if (read_specs(g, inputs, results, externs) < 0 || read_consts(g, consts) < 0 || consts_join(&g->consts, packing) < 0) goto bad;
  int scalars = 0;
  for (int i = 0; i < g->n_inputs; i++) scalars += g->inputs[i].kind >= IN_INT;
  if (g->entry->n_inputs != g->n_inputs || PyTuple_GET_SIZE(tail) > g->n_inputs || g->entry->n_results != g->n_results || g->entry->n_scalars != scalars) {
    PyErr_SetString(PyExc_ValueError, "manifest and library do not belong together");
    goto bad;
  }
  Py_DECREF(file);
  return (PyObject *)g;
bad:
  Py_DECREF(file);
  Py_DECREF(g);
  return NULL;
}

static int graph_traverse(PyObject *self, visitproc visit, void *arg) {
  Graph *g = (Graph *)self;
  Py_VISIT(g->eager);
  Py_VISIT(g->tail);
  for (int i = 0; i < g->n_externs; i++) {
    int r = extern_visit(g->externs[i], visit, arg);
    if (r) return r;
  }
  return 0;
}

static int graph_clear(PyObject *self) {
  Graph *g = (Graph *)self;
  PyObject *old = g->eager;
  g->eager = Py_NewRef(Py_None);
  Py_XDECREF(old);
  return 0;
}

static void graph_dealloc(PyObject *self) {
  Graph *g = (Graph *)self;
  PyObject_GC_UnTrack(self);
  Py_CLEAR(g->eager);
  for (int i = 0; i < g->n_externs; i++) extern_free(g->externs[i]);
  for (int i = 0; g->results && i < g->n_results; i++) Py_XDECREF(g->results[i].dtype);
  PyMem_Free(g->externs);
  PyMem_Free(g->results);
  PyMem_Free(g->inputs);
  views_free(g->views);
  consts_leave(&g->consts);
  PyMem_Free(g->consts.inputs);
  PyMem_Free(g->consts.prepared_only);
  Py_CLEAR(g->name);
  Py_CLEAR(g->tail);
  cuda_free(g->cuda);
  if (g->lib) dlclose(g->lib);
  if (--n_graphs == 0) {
    workspace_trim();
    cuda_trim(-1);
  }
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject GraphType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "torchsmith.runtime._native.Graph",
    .tp_doc = "A compiled graph: call it with the graph's inputs.",
    .tp_basicsize = sizeof(Graph),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC,
    .tp_vectorcall_offset = offsetof(Graph, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = graph_new,
    .tp_methods = graph_methods,
    .tp_dealloc = graph_dealloc,
    .tp_traverse = graph_traverse,
    .tp_clear = graph_clear,
};
