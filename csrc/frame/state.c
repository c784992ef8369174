/* Process and thread state a graph depends on, read through libtorch's exported functions: about 15 ns a reading. */
#include "frame.h"
#include <dlfcn.h>

static struct {
  int complete;
  uint64_t foreign;    /* bits of `included` (after undoing the default) that mean: another tracer is at work */
  uint64_t included_default;
  const char *tls_symbol;
  void *lib_c10;
  unsigned char (*grad)(void), (*inference)(void);
  int8_t (*default_dtype)(void);
  int64_t (*modes)(void);
  int (*disabled)(void);
  void *(*context)(void);
  int n_switches, n_precisions;
  unsigned char (*switches[32])(const void *); /* readers of at::Context: booleans, or enumerations of three values */
  int (*precision)(const void *, int, int);    /* at::Context::float32Precision(backend, operation) */
  int precisions[16][2];
  int8_t (*autocast_dtype)(int8_t);
  unsigned char (*autocast_cache)(void);
  unsigned char (*profiling)(void);
  const unsigned char *anomaly; /* torch::autograd::AnomalyMode */
  PyObject *forward_ad, *level_name, *no_level; /* torch.autograd.forward_ad's globals, its `_current_level`, and -1 */
} S;

static _Thread_local uint64_t *tls_keys; /* this thread's {included, excluded} */

static inline uint64_t *local_keys(void) {
  if (!tls_keys) tls_keys = dlsym(S.lib_c10, S.tls_symbol); /* dlsym on a thread-local gives the calling thread's address */
  return tls_keys;
}

int ts_state_read(State *out) {
  if (!S.complete) { memset(out, 0, sizeof *out); return 0; }
  uint64_t *keys = local_keys();
  const void *context = S.context();
  out->included = keys[0], out->excluded = keys[1];
  out->autograd = (S.grad() != 0) | (S.inference() != 0) << 1;
  out->default_dtype = S.default_dtype();
  out->switches = out->precisions = 0;
  for (int i = 0; i < S.n_switches; i++) out->switches = out->switches << 2 | (S.switches[i](context) & 3);
  for (int i = 0; i < S.n_precisions; i++)
    out->precisions = out->precisions << 4 | (S.precision(context, S.precisions[i][0], S.precisions[i][1]) & 15);
  out->function_modes = S.modes() << 8 | (S.disabled() & 0xff);
  out->autocast = (uint8_t)S.autocast_dtype(0) | (int64_t)(uint8_t)S.autocast_dtype(1) << 8 | (int64_t)S.autocast_cache() << 16;
  return 1;
}

int ts_under_modes(void) { return S.modes && S.modes() > 0; }

static int derives_forwards(void) {
  PyObject *level = S.forward_ad ? PyDict_GetItemWithError(S.forward_ad, S.level_name) : NULL;
  return level && level != S.no_level;
}

int ts_state_is_foreign(const State *s) {
  if (!S.complete) return 0;
  return ((s->included ^ S.included_default) & S.foreign) != 0 || (S.anomaly && *S.anomaly) || derives_forwards();
}

int ts_profiling(void) { return S.profiling && S.profiling(); }

/* The readers of at::Context by symbol, and the pairs that float32Precision is asked for; 0 where one is missing, -1 with an exception. */
static int find_switches(void *lib, PyObject *symbols, PyObject *pairs) {
  S.n_switches = S.n_precisions = 0;
  if (PyTuple_GET_SIZE(symbols) > 32 || PyTuple_GET_SIZE(pairs) > 16) return 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(symbols); i++) {
    const char *name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(symbols, i));
    if (!name) return -1;
    if (!(S.switches[S.n_switches++] = dlsym(lib, name))) return 0;
  }
  S.precision = dlsym(lib, "_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++, S.n_precisions++)
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pairs, i), "ii", &S.precisions[i][0], &S.precisions[i][1])) return -1;
  return S.precision || !S.n_precisions;
}

/* setup_state(libtorch_cpu, libc10, included_now, excluded_now, foreign_bits, globals of forward_ad, symbols of switches,
 * (backend, operation) pairs of precisions) -> bool: readings are complete */
PyObject *ts_setup_state(PyObject *self, PyObject *args) {
  const char *cpu, *c10;
  unsigned long long included, excluded, foreign;
  PyObject *forward_ad, *symbols, *pairs;
  if (!PyArg_ParseTuple(args, "ssKKKO!O!O!", &cpu, &c10, &included, &excluded, &foreign, &PyDict_Type, &forward_ad, &PyTuple_Type, &symbols,
                        &PyTuple_Type, &pairs))
    return NULL;
  void *lib = dlopen(cpu, RTLD_NOLOAD | RTLD_LAZY), *core = dlopen(c10, RTLD_NOLOAD | RTLD_LAZY);
  if (!lib || !core) Py_RETURN_FALSE;
  S.lib_c10 = core, S.tls_symbol = "_ZN3c104impl26raw_local_dispatch_key_setE";
  S.grad = dlsym(core, "_ZN3c108GradMode10is_enabledEv");
  S.inference = dlsym(core, "_ZN3c1013InferenceMode10is_enabledEv");
  S.default_dtype = dlsym(core, "_ZN3c1031get_default_dtype_as_scalartypeEv");
  S.modes = dlsym(lib, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv");
  S.disabled = dlsym(lib, "_ZN2at4impl22PythonTorchFunctionTLS18get_disabled_stateEv");
  S.context = dlsym(lib, "_ZN2at13globalContextEv");
  int switches = find_switches(lib, symbols, pairs);
  if (switches < 0) return NULL;
  S.autocast_dtype = dlsym(lib, "_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE");
  S.autocast_cache = dlsym(lib, "_ZN2at8autocast25is_autocast_cache_enabledEv");
  S.profiling = dlsym(lib, "_ZN5torch8profiler4impl15profilerEnabledEv");
  S.anomaly = dlsym(lib, "_ZN5torch8autograd11AnomalyMode8_enabledE");
  if (!S.level_name && !((S.level_name = PyUnicode_InternFromString("_current_level")) && (S.no_level = PyLong_FromLong(-1)))) return NULL;
  Py_XSETREF(S.forward_ad, Py_NewRef(forward_ad));
  uint64_t *keys = dlsym(core, S.tls_symbol);
  S.complete = keys && S.grad && S.inference && S.default_dtype && S.modes && S.disabled && S.context && switches &&
               S.autocast_dtype && S.autocast_cache;
  if (S.complete) {
    S.included_default = keys[0] ^ included;
    S.foreign = foreign;
  }
  return PyBool_FromLong(S.complete);
}

/* use_state(flag): switch the fast readings off (tests compare both). */
PyObject *ts_use_state(PyObject *self, PyObject *flag) {
  int before = S.complete;
  S.complete = PyObject_IsTrue(flag) && S.profiling && S.grad && S.context;
  return PyBool_FromLong(before);
}

PyObject *ts_state_info(PyObject *self, PyObject *unused) {
  State s;
  int complete = ts_state_read(&s);
  return Py_BuildValue("{s:i,s:K,s:K,s:L,s:L,s:K,s:K,s:L,s:L,s:i}", "complete", complete, "included", (unsigned long long)(s.included ^ S.included_default),
                       "excluded", (unsigned long long)s.excluded, "autograd", (long long)s.autograd, "default_dtype", (long long)s.default_dtype,
                       "switches", (unsigned long long)s.switches, "precisions", (unsigned long long)s.precisions, "function_modes", (long long)s.function_modes, "autocast", (long long)s.autocast,
                       "foreign", ts_state_is_foreign(&s));
}
