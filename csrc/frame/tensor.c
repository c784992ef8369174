/* Metadata of a torch.Tensor without torch's headers: libtorch's exported C functions, and raw fields where a probe agrees. */
#include "frame.h"
#include <dlfcn.h>
#include <malloc.h>

typedef int32_t (*get_i64p)(void *, int64_t **);
typedef int32_t (*get_i64)(void *, int64_t *);
typedef int32_t (*get_i32)(void *, int32_t *);
typedef int32_t (*get_ptr)(void *, void **);

static struct {
  int ready;
  PyTypeObject *base;         /* torch._C.TensorBase */
  PyTypeObject *discarded;    /* a parameter that exists only in packed form stays what it was for guards */
  Py_ssize_t cdata;           /* offset of the at::Tensor in the Python object */
  get_i64p sizes, strides;
  get_i64 dim, offset;
  get_i32 dtype, device_type, device_index;
  get_ptr data;
  PyObject *requires_grad;    /* getset descriptor */
  PyObject *dispatch_keys;    /* callable(t) -> raw key set, the slow reading */
  int itemsize[64];
  /* raw fields of TensorImpl; valid only when raw is 1 */
  int raw, raw_grad;
  int o_keys, o_dims, o_dtype, o_device, o_autograd, o_requires, o_grad_fn;
  void *autograd_vtable;
} T;

static inline void *handle_of(PyObject *obj) { return (char *)obj + T.cdata; }
static inline char *impl_of(PyObject *obj) { return *(char **)handle_of(obj); }

int ts_is_tensor(PyObject *obj) { return T.ready && PyType_IsSubtype(Py_TYPE(obj), T.base); }

static PyObject *plain_reader; /* callable(t) -> bool that reaches no __torch_function__ handler, as torch's own getter would */

PyObject *ts_set_plain_reader(PyObject *self, PyObject *fn) {
  Py_XSETREF(plain_reader, Py_NewRef(fn));
  Py_RETURN_NONE;
}

static int requires_grad_slow(PyObject *obj) {
  if (plain_reader && ((Py_TYPE(obj)->tp_flags & Py_TPFLAGS_HEAPTYPE && Py_TYPE(obj)->tp_base != T.base) || ts_under_modes())) {
    PyObject *answer = PyObject_CallOneArg(plain_reader, obj);
    if (!answer) return -1;
    Py_DECREF(answer);
    return answer == Py_True;
  }
  PyGetSetDescrObject *d = (PyGetSetDescrObject *)T.requires_grad;
  PyObject *r = d->d_getset->get(obj, d->d_getset->closure);
  if (!r) return -1;
  int v = r == Py_True;
  Py_DECREF(r);
  return v;
}

static inline int requires_grad(PyObject *obj) {
  if (T.raw && T.raw_grad) {
    char *meta = *(char **)(impl_of(obj) + T.o_autograd);
    if (!meta) return 0;
    /* views carry another class, whose answer also depends on the base: ask it */
    if (*(void **)meta == T.autograd_vtable) return *(uint8_t *)(meta + T.o_requires) || *(void **)(meta + T.o_grad_fn);
  }
  return requires_grad_slow(obj);
}

static int keys_slow(PyObject *obj, uint64_t *out) {
  PyObject *r = PyObject_CallOneArg(T.dispatch_keys, obj);
  if (!r) return -1;
  *out = PyLong_AsUnsignedLongLongMask(r);
  Py_DECREF(r);
  return PyErr_Occurred() ? -1 : 0;
}

static inline const int64_t *raw_dims(char *impl, int64_t ndim, int strides) {
  char *p = impl + T.o_dims;
  if (ndim <= 5) return (int64_t *)(p + 8) + (strides ? 5 : 0);
  return *(int64_t **)(p + 8) + (strides ? ndim : 0);
}

int ts_tensor_dims(PyObject *obj, int *ndim, const int64_t **sizes, const int64_t **strides) {
  if (T.raw) {
    char *impl = impl_of(obj);
    int64_t n = *(int64_t *)(impl + T.o_dims);
    *ndim = (int)n;
    *sizes = raw_dims(impl, n, 0);
    *strides = raw_dims(impl, n, 1);
    return 0;
  }
  int64_t n, *a, *b;
  void *h = handle_of(obj);
  if (T.dim(h, &n) || T.sizes(h, &a) || T.strides(h, &b)) {
    PyErr_SetString(PyExc_RuntimeError, "torchsmith: cannot read the sizes of this tensor");
    return -1;
  }
  *ndim = (int)n, *sizes = a, *strides = b;
  return 0;
}

int ts_tensor_offset(PyObject *obj, int64_t *out) { return T.offset(handle_of(obj), out) ? -1 : 0; }

/* As below, from raw fields. A large model has hundreds of parameters that are compared on every call. */
static inline int raw_check(const TensorGuard *g, PyObject *obj) {
  char *impl = impl_of(obj);
  const int64_t *want = g->dims, *sizes = raw_dims(impl, g->ndim, 0), *strides = raw_dims(impl, g->ndim, 1);
  uint16_t device = (uint16_t)((uint8_t)g->device_type | (uint16_t)(uint8_t)g->device_index << 8);
  if (*(uint64_t *)(impl + T.o_keys) != g->keys || *(uint16_t *)(impl + T.o_dtype) != (uint16_t)g->dtype ||
      *(uint16_t *)(impl + T.o_device) != device || *(int64_t *)(impl + T.o_dims) != g->ndim)
    return 0;
  for (int i = 0; i < g->ndim; i++)
    if ((sizes[i] != want[i] && want[i] != TS_ANY) || (strides[i] != want[g->ndim + i] && want[g->ndim + i] != TS_ANY)) return 0;
  return 1;
}

int ts_tensor_check(const TensorGuard *g, PyObject *obj) {
  if (Py_TYPE(obj) != g->type && !(T.discarded && Py_TYPE(obj) == T.discarded && g->type == T.discarded->tp_base)) return 0;
  if (T.raw) {
    if (!raw_check(g, obj)) return 0;
  } else {
    uint64_t keys;
    int32_t dtype, type, index;
    void *h = handle_of(obj);
    if (T.dtype(h, &dtype) || T.device_type(h, &type) || T.device_index(h, &index)) return 0;
    if (dtype != g->dtype || type != g->device_type || index != g->device_index) return 0;
    if (keys_slow(obj, &keys) < 0) return -1;
    if (keys != g->keys) return 0;
    int n;
    const int64_t *sizes, *strides;
    if (ts_tensor_dims(obj, &n, &sizes, &strides) < 0) { PyErr_Clear(); return 0; }
    if (n != g->ndim) return 0;
    for (int i = 0; i < n; i++) {
      if (sizes[i] != g->dims[i] && g->dims[i] != TS_ANY) return 0;
      if (strides[i] != g->dims[n + i] && g->dims[n + i] != TS_ANY) return 0;
    }
  }
  int r = requires_grad(obj);
  return r < 0 ? -1 : r == g->requires_grad;
}

/* [first byte, past the last byte) of the elements a tensor reaches; empty: lo == hi. */
int ts_tensor_range(PyObject *obj, uintptr_t *lo, uintptr_t *hi) {
  int n;
  const int64_t *sizes, *strides;
  int32_t dtype;
  void *data = NULL;
  if (ts_tensor_dims(obj, &n, &sizes, &strides) < 0) return -1;
  if (T.dtype(handle_of(obj), &dtype) || T.data(handle_of(obj), &data)) {
    PyErr_SetString(PyExc_RuntimeError, "torchsmith: cannot read the memory of this tensor");
    return -1;
  }
  int64_t last = 0, item = dtype >= 0 && dtype < 64 && T.itemsize[dtype] ? T.itemsize[dtype] : 16;
  for (int i = 0; i < n; i++) {
    if (sizes[i] == 0) { *lo = *hi = (uintptr_t)data; return 0; }
    last += (sizes[i] - 1) * strides[i];
  }
  *lo = (uintptr_t)data;
  *hi = data ? *lo + (uintptr_t)((last + 1) * item) : *lo;
  return 0;
}

/* torch.dtype and torch.device objects hold their C value right after the object head (the probe checks it). */
static int code_of(PyObject *obj) { return *(int8_t *)((char *)obj + sizeof(PyObject)); }

static int fill_dims(PyObject *seq, int64_t *out) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(seq); i++) {
    PyObject *v = PyTuple_GET_ITEM(seq, i);
    out[i] = v == Py_None ? TS_ANY : PyLong_AsLongLong(v);
    if (out[i] == -1 && PyErr_Occurred()) return -1;
  }
  return 0;
}

TensorGuard *ts_tensor_guard_new(PyObject *value) {
  TensorGuard *g = PyMem_Calloc(1, sizeof *g);
  PyObject *type = NULL, *dtype = NULL, *device = NULL, *grad = NULL, *sizes = NULL, *strides = NULL, *keys = NULL;
  if (!g) { PyErr_NoMemory(); return NULL; }
  if (!(type = PyObject_GetAttrString(value, "type")) || !(dtype = PyObject_GetAttrString(value, "dtype")) ||
      !(device = PyObject_GetAttrString(value, "device")) || !(grad = PyObject_GetAttrString(value, "requires_grad")) ||
      !(sizes = PyObject_GetAttrString(value, "sizes")) || !(strides = PyObject_GetAttrString(value, "strides")) ||
      !(keys = PyObject_GetAttrString(value, "dispatch_keys")))
    goto fail;
  if (!T.ready) { PyErr_SetString(PyExc_RuntimeError, "torchsmith: setup_tensor has not been called"); goto fail; }
  if (!PyType_Check(type) || !PyTuple_Check(sizes) || !PyTuple_Check(strides) || PyTuple_GET_SIZE(sizes) != PyTuple_GET_SIZE(strides)) {
    PyErr_SetString(PyExc_TypeError, "TensorGuard: type must be a class, sizes and strides tuples of one length");
    goto fail;
  }
  g->type = (PyTypeObject *)Py_NewRef(type);
  g->dtype = code_of(dtype);
  g->device_type = code_of(device);
  g->device_index = *((int8_t *)device + sizeof(PyObject) + 1);
  g->requires_grad = PyObject_IsTrue(grad);
  g->keys = PyLong_AsUnsignedLongLongMask(keys);
  if (PyErr_Occurred()) goto fail;
  g->ndim = (int)PyTuple_GET_SIZE(sizes);
  g->dims = PyMem_Calloc(2 * (size_t)g->ndim + 1, sizeof(int64_t));
  if (!g->dims) { PyErr_NoMemory(); goto fail; }
  if (fill_dims(sizes, g->dims) < 0 || fill_dims(strides, g->dims + g->ndim) < 0) goto fail;
  goto done;
fail:
  ts_tensor_guard_free(g);
  g = NULL;
done:
  Py_XDECREF(type), Py_XDECREF(dtype), Py_XDECREF(device), Py_XDECREF(grad), Py_XDECREF(sizes), Py_XDECREF(strides), Py_XDECREF(keys);
  return g;
}

void ts_tensor_guard_free(TensorGuard *g) {
  if (!g) return;
  Py_XDECREF(g->type);
  PyMem_Free(g->dims);
  PyMem_Free(g);
}

/* ---- the probe: each raw field must be found at exactly one place that agrees for every example */
typedef struct { PyObject *obj; char *impl; size_t size; uint64_t keys; int dtype, device; int64_t ndim; const int64_t *sizes, *strides; int grad, view; } Example;

static int unique(int (*ok)(Example *, int), Example *ex, int n, int step) {
  int found = -1;
  size_t limit = SIZE_MAX;
  for (int i = 0; i < n; i++) if (ex[i].size < limit) limit = ex[i].size;
  if (limit == SIZE_MAX || limit > 512) limit = 512;
  for (int o = 8; o + 8 <= (int)limit; o += step) {
    int good = 1;
    for (int i = 0; good && i < n; i++) good = ok(&ex[i], o);
    if (good) { if (found >= 0) return -1; found = o; }
  }
  return found;
}
static int keys_at(Example *e, int o) { return *(uint64_t *)(e->impl + o) == e->keys; }
static int dtype_at(Example *e, int o) { return *(uint16_t *)(e->impl + o) == (uint16_t)e->dtype; }
static int device_at(Example *e, int o) { return *(uint16_t *)(e->impl + o) == (uint16_t)e->device; }
static int autograd_at(Example *e, int o) { uint64_t p = *(uint64_t *)(e->impl + o); return e->view ? 1 : e->grad ? p > 4096 && p % 8 == 0 : p == 0; }
static int dims_at(Example *e, int o) {
  if ((size_t)o + 88 > e->size || *(int64_t *)(e->impl + o) != e->ndim) return 0;
  const int64_t *p = (int64_t *)(e->impl + o + 8), *q = p + 5;
  if (e->ndim > 5) {
    p = *(const int64_t **)p;
    if ((uintptr_t)p < 4096 || (uintptr_t)p % 8 || malloc_usable_size((void *)p) < (size_t)e->ndim * 16) return 0;
    q = p + e->ndim;
  }
  return !memcmp(p, e->sizes, (size_t)e->ndim * 8) && !memcmp(q, e->strides, (size_t)e->ndim * 8);
}

/* requires_grad: the one byte that follows requires_grad_(True/False) on plain leaves, and the pointer that only non-leaves have.
 * leaves: (on, off, nonleaf) triples; several, because padding bytes hold anything. */
static void probe_grad(PyObject *leaves) {
  Py_ssize_t n = PyTuple_GET_SIZE(leaves);
  char *m[48];
  size_t size = 512;
  if (n < 3 || n % 3 || n > 48) return;
  for (Py_ssize_t i = 0; i < n; i++) {
    m[i] = *(char **)(impl_of(PyTuple_GET_ITEM(leaves, i)) + T.o_autograd);
    if (!m[i] || *(void **)m[i] != *(void **)m[0]) return;
    size_t s = malloc_usable_size(m[i]);
    if (s < size) size = s;
  }
  int byte = -1, fn = -1;
  for (size_t o = 8; o < size; o++) {
    int good = 1;
    for (Py_ssize_t i = 0; good && i < n; i++) good = m[i][o] == (i % 3 == 0);
    if (good) { if (byte >= 0) return; byte = (int)o; }
  }
  for (size_t o = 8; o + 8 <= size; o += 8) {
    int good = 1;
    for (Py_ssize_t i = 0; good && i < n; i++) good = i % 3 == 2 ? *(uintptr_t *)(m[i] + o) > 4096 : !*(void **)(m[i] + o);
    if (!good || (fn >= 0 && o == (size_t)fn + 8)) continue; /* before torch 2.12 a std::shared_ptr: the object, then its counts */
    if (fn >= 0) return;
    fn = (int)o;
  }
  if (byte < 0 || fn < 0) return;
  T.o_requires = byte, T.o_grad_fn = fn, T.autograd_vtable = *(void **)m[0];
  T.raw_grad = 1;
}

static void *symbol(void *lib, const char *name) { return lib ? dlsym(lib, name) : NULL; }

PyObject *ts_set_discarded(PyObject *self, PyObject *cls) {
  if (!PyType_Check(cls)) return PyErr_Format(PyExc_TypeError, "set_discarded takes a class");
  T.discarded = (PyTypeObject *)Py_NewRef(cls);
  Py_RETURN_NONE;
}

/* setup_tensor(libtorch_path, TensorBase, requires_grad_getset, dispatch_keys, examples, itemsizes {code: bytes}, (on, off, nonleaf, on, ...)) -> dict */
PyObject *ts_setup_tensor(PyObject *self, PyObject *args) {
  const char *path;
  PyObject *base, *grad, *keys, *examples, *itemsizes, *leaves, *k, *v;
  if (!PyArg_ParseTuple(args, "sOOOO!O!O!", &path, &base, &grad, &keys, &PyList_Type, &examples, &PyDict_Type, &itemsizes, &PyTuple_Type, &leaves)) return NULL;
  if (!PyType_Check(base) || !Py_IS_TYPE(grad, &PyGetSetDescr_Type)) {
    PyErr_SetString(PyExc_TypeError, "setup_tensor: unexpected torch internals");
    return NULL;
  }
  void *lib = dlopen(path, RTLD_NOLOAD | RTLD_LAZY);
  T.sizes = symbol(lib, "aoti_torch_get_sizes"), T.strides = symbol(lib, "aoti_torch_get_strides");
  T.dim = symbol(lib, "aoti_torch_get_dim"), T.offset = symbol(lib, "aoti_torch_get_storage_offset");
  T.dtype = symbol(lib, "aoti_torch_get_dtype"), T.device_type = symbol(lib, "aoti_torch_get_device_type");
  T.device_index = symbol(lib, "aoti_torch_get_device_index"), T.data = symbol(lib, "aoti_torch_get_data_ptr");
  if (!T.sizes || !T.strides || !T.dim || !T.offset || !T.dtype || !T.device_type || !T.device_index || !T.data) {
    PyErr_SetString(PyExc_ImportError, "torchsmith: this torch does not export the C functions of its shim (torch >= 2.11 is needed)");
    return NULL;
  }
  T.base = (PyTypeObject *)Py_NewRef(base), T.requires_grad = Py_NewRef(grad), T.dispatch_keys = Py_NewRef(keys);
  T.cdata = -1;
  for (Py_ssize_t o = sizeof(PyObject); T.cdata < 0 && o + 8 <= T.base->tp_basicsize; o += 8) {
    int good = PyList_GET_SIZE(examples) > 0;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(examples); i++) {
      PyObject *t = PyList_GET_ITEM(examples, i), *c = PyObject_GetAttrString(t, "_cdata");
      if (!c) return NULL;
      good = *(uintptr_t *)((char *)t + o) == (uintptr_t)PyLong_AsUnsignedLongLongMask(c);
      Py_DECREF(c);
    }
    if (good) T.cdata = o;
  }
  if (T.cdata < 0) { PyErr_SetString(PyExc_ImportError, "torchsmith: cannot find the tensor inside torch.Tensor objects"); return NULL; }
  Py_ssize_t pos = 0;
  while (PyDict_Next(itemsizes, &pos, &k, &v)) {
    int code = code_of(k);
    if (code >= 0 && code < 64) T.itemsize[code] = (int)PyLong_AsLong(v);
  }
  int n = (int)PyList_GET_SIZE(examples);
  Example *ex = PyMem_Calloc((size_t)n, sizeof *ex);
  if (!ex) return PyErr_NoMemory();
  int ok = 1;
  for (int i = 0; i < n && ok; i++) {
    PyObject *t = PyList_GET_ITEM(examples, i), *dt = PyObject_GetAttrString(t, "dtype"), *dev = PyObject_GetAttrString(t, "device");
    int32_t type = 0, index = 0, dtype = 0;
    int64_t *a = NULL, *b = NULL;
    void *h = handle_of(t);
    T.device_type(h, &type), T.device_index(h, &index), T.dtype(h, &dtype);
    T.dim(h, &ex[i].ndim), T.sizes(h, &a), T.strides(h, &b);
    ex[i].obj = t, ex[i].impl = impl_of(t), ex[i].size = malloc_usable_size(ex[i].impl);
    ex[i].sizes = a, ex[i].strides = b, ex[i].dtype = dtype;
    ex[i].device = (uint8_t)(int8_t)type | (uint8_t)(int8_t)index << 8;
    ex[i].grad = requires_grad_slow(t);
    PyObject *view = PyObject_CallMethod(t, "_is_view", NULL); /* a view has autograd data even without requires_grad */
    ex[i].view = view == Py_True;
    Py_XDECREF(view);
    ok = view && dt && dev && keys_slow(t, &ex[i].keys) == 0 && code_of(dt) == dtype && code_of(dev) == type && *((int8_t *)dev + sizeof(PyObject) + 1) == index;
    Py_XDECREF(dt), Py_XDECREF(dev);
  }
  if (!ok) {
    PyMem_Free(ex);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ImportError, "torchsmith: unexpected layout of torch.dtype or torch.device");
    return NULL;
  }
  T.ready = 1;
  T.o_keys = unique(keys_at, ex, n, 8), T.o_dims = unique(dims_at, ex, n, 8);
  T.o_dtype = unique(dtype_at, ex, n, 2), T.o_device = unique(device_at, ex, n, 2), T.o_autograd = unique(autograd_at, ex, n, 8);
  T.raw = T.o_keys > 0 && T.o_dims > 0 && T.o_dtype > 0 && T.o_device > 0;
  if (T.raw && T.o_autograd > 0) probe_grad(leaves);
  PyMem_Free(ex);
  return Py_BuildValue("{s:n,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i}", "cdata", T.cdata, "raw", T.raw, "raw_grad", T.raw_grad, "keys", T.o_keys,
                       "dims", T.o_dims, "dtype", T.o_dtype, "device", T.o_device, "autograd", T.o_autograd, "requires", T.o_requires,
                       "grad_fn", T.o_grad_fn);
}

/* use_raw(flag): switch the raw fields off (tests compare both readings). */
PyObject *ts_use_raw(PyObject *self, PyObject *flag) {
  int before = T.raw, on = PyObject_IsTrue(flag);
  T.raw = on && T.o_keys > 0 && T.o_dims > 0 && T.o_dtype > 0 && T.o_device > 0;
  return PyBool_FromLong(before);
}

/* tensor_info(t) -> (dtype code, device type, device index, ndim, requires_grad, first byte, past the last byte) */
PyObject *ts_tensor_info(PyObject *self, PyObject *obj) {
  int32_t dtype, type, index;
  int64_t n;
  uintptr_t lo = 0, hi = 0;
  if (!ts_is_tensor(obj)) { PyErr_SetString(PyExc_TypeError, "not a tensor"); return NULL; }
  void *h = handle_of(obj);
  if (T.dtype(h, &dtype) || T.device_type(h, &type) || T.device_index(h, &index) || T.dim(h, &n)) {
    PyErr_SetString(PyExc_RuntimeError, "torchsmith: cannot read this tensor");
    return NULL;
  }
  int r = requires_grad(obj);
  if (r < 0 || ts_tensor_range(obj, &lo, &hi) < 0) return NULL;
  return Py_BuildValue("(iiiLiKK)", dtype, type, index, (long long)n, r, (unsigned long long)lo, (unsigned long long)hi);
}
