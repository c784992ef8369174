/* Package: a model of a package or a model library, run from Python with torch tensors or with anything that offers its memory.
 *
 * Package(path, name, threads, verify, device)   device: n + 1 for number n, 0 for the current one
 *   run(sequence) -> list     buffers or DLPack in, Array objects (or None) out; needs no torch
 *   run_torch(sequence) -> list  torch tensors in and out, through the model's door for libtorch; call setup first
 */
#include "package.h"

#include <stddef.h>

#include "native.h"

enum { MOST_DIMS = 64 };

typedef struct {
  PyObject_HEAD
  torchsmith_model *m;
  int32_t (*run_torch)(tsm_model *, Handle *, size_t, Handle *, size_t);
  Py_ssize_t n_written;
  char *written; /* per input: does the model write it? */
} Package;

typedef struct {
  PyObject_HEAD
  Package *owner; /* keeps the code of release loaded */
  tsm_tensor t;
} Array;

static PyTypeObject ArrayType;
static PyObject *error_type; /* torchsmith.runtime.package.PackageError(text, status) */

static PyObject *raise_status(int32_t status, const char *text) {
  PyObject *e = error_type ? PyObject_CallFunction(error_type, "si", text, (int)status) : NULL;
  if (e) {
    PyErr_SetObject(error_type, e);
    Py_DECREF(e);
  } else if (!PyErr_Occurred()) {
    PyErr_SetString(PyExc_RuntimeError, text);
  }
  return NULL;
}

PyObject *package_setup(PyObject *module, PyObject *type) {
  Py_XSETREF(error_type, Py_NewRef(type));
  Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- arrays */

static const struct { const char *format; int size, code; } ROWS[] = { /* by tsm_dtype: struct format, bytes, DLPack type code */
    {"d", 8, 2}, {"f", 4, 2}, {"H", 2, 4}, {"e", 2, 2}, {"q", 8, 0}, {"i", 4, 0}, {"h", 2, 0}, {"b", 1, 0},
    {"B", 1, 1}, {"?", 1, 6}, {"Zf", 8, 5}, {"Zd", 16, 5}, {NULL, 4, 5}, {"H", 2, 1}, {"I", 4, 1}, {"Q", 8, 1}};
enum { N_ROWS = sizeof ROWS / sizeof *ROWS };

static void array_dealloc(PyObject *self) {
  Array *a = (Array *)self;
  if (a->owner && a->t.block) a->owner->m->release(&a->t);
  Py_XDECREF(a->owner);
  Py_TYPE(self)->tp_free(self);
}

static int array_buffer(PyObject *self, Py_buffer *view, int flags) {
  Array *a = (Array *)self;
  if (a->t.device) {
    PyErr_SetString(PyExc_BufferError, "this output lies in a device's memory: take it through DLPack");
    return -1;
  }
  int n = a->t.ndim;
  const char *format = ROWS[a->t.dtype].format;
  if (!format) {
    PyErr_SetString(PyExc_BufferError, "this dtype has no buffer format");
    return -1;
  }
  Py_ssize_t *numbers = PyMem_Malloc(sizeof(Py_ssize_t) * 2 * (size_t)(n + 1)), count = 1, back = 1;
  if (!numbers) return PyErr_NoMemory(), -1;
  bool rows = true, columns = true; /* is memory order that of C, or of Fortran? */
  for (int k = n - 1; k >= 0; k--) {
    rows &= a->t.sizes[k] <= 1 || a->t.strides[k] == count;
    columns &= a->t.sizes[n - 1 - k] <= 1 || a->t.strides[n - 1 - k] == back;
    count *= (Py_ssize_t)a->t.sizes[k];
    back *= (Py_ssize_t)a->t.sizes[n - 1 - k];
  }
  rows |= count == 0;
  columns |= count == 0;
  bool strided = (flags & PyBUF_STRIDES) == PyBUF_STRIDES;
  bool want_rows = !strided || (flags & PyBUF_C_CONTIGUOUS) == PyBUF_C_CONTIGUOUS;
  bool want_columns = (flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS, want_any = (flags & PyBUF_ANY_CONTIGUOUS) == PyBUF_ANY_CONTIGUOUS;
  if ((want_rows && !rows) || (want_columns && !columns) || (want_any && !rows && !columns)) {
    PyMem_Free(numbers);
    PyErr_SetString(PyExc_BufferError, "this output does not lie in the order that is asked for: copy it, with numpy.ascontiguousarray for example");
    return -1;
  }
  for (int k = 0; k < n; k++) {
    numbers[k] = (Py_ssize_t)a->t.sizes[k];
    numbers[n + k] = (Py_ssize_t)a->t.strides[k] * ROWS[a->t.dtype].size;
  }
  *view = (Py_buffer){.buf = a->t.data, .obj = Py_NewRef(self), .len = count * ROWS[a->t.dtype].size, .itemsize = ROWS[a->t.dtype].size,
                      .readonly = 0, .ndim = n, .format = flags & PyBUF_FORMAT ? (char *)format : NULL,
                      .shape = flags & PyBUF_ND ? numbers : NULL, .strides = strided ? numbers + n : NULL, .internal = numbers};
  return 0;
}

static void array_release(PyObject *self, Py_buffer *view) { PyMem_Free(view->internal); }

enum { KDLCPU = 1, KDLCUDA = 2 };
typedef struct { int32_t type, id; } Device;
typedef struct { void *data; Device device; int32_t ndim; struct { uint8_t code, bits; uint16_t lanes; } dtype; int64_t *shape, *strides; uint64_t offset; } DLTensor;
typedef struct Managed { DLTensor t; void *context; void (*deleter)(struct Managed *); } Managed;

static void forget(Managed *m) {
  PyGILState_STATE held = PyGILState_Ensure();
  Py_DECREF((PyObject *)m->context);
  PyGILState_Release(held);
  free(m);
}

static void capsule_end(PyObject *capsule) {
  Managed *m = PyCapsule_GetPointer(capsule, "dltensor");
  if (m) m->deleter(m);
  else PyErr_Clear(); /* renamed: somebody took it over */
}

static Device dlpack_device(const Array *a) { return a->t.device ? (Device){KDLCUDA, a->t.device - 1} : (Device){KDLCPU, 0}; }

static PyObject *array_dlpack(PyObject *self, PyObject *args, PyObject *kwargs) {
  Array *a = (Array *)self;
  Managed *m = calloc(1, sizeof *m);
  if (!m) return PyErr_NoMemory();
  m->t = (DLTensor){a->t.data, dlpack_device(a), a->t.ndim, {(uint8_t)ROWS[a->t.dtype].code, (uint8_t)(8 * ROWS[a->t.dtype].size), 1},
                    (int64_t *)a->t.sizes, (int64_t *)a->t.strides, 0};
  m->context = Py_NewRef(self);
  m->deleter = forget;
  PyObject *capsule = PyCapsule_New(m, "dltensor", capsule_end);
  if (!capsule) forget(m);
  return capsule;
}

static PyObject *array_device(PyObject *self, PyObject *none) {
  Device d = dlpack_device((Array *)self);
  return Py_BuildValue("ii", (int)d.type, (int)d.id);
}

static PyObject *array_shape(PyObject *self, void *closure) {
  Array *a = (Array *)self;
  PyObject *t = PyTuple_New(a->t.ndim);
  for (int k = 0; t && k < a->t.ndim; k++) {
    PyObject *n = PyLong_FromLongLong(a->t.sizes[k]);
    if (!n) Py_CLEAR(t);
    else PyTuple_SET_ITEM(t, k, n);
  }
  return t;
}

static PyObject *array_dtype(PyObject *self, void *closure) { return PyLong_FromLong(((Array *)self)->t.dtype); }

static PyBufferProcs array_buffers = {array_buffer, array_release};
static PyMethodDef array_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))array_dlpack, METH_VARARGS | METH_KEYWORDS, "A DLPack capsule over this memory."},
    {"__dlpack_device__", array_device, METH_NOARGS, "The type and the number of the device, as DLPack counts them."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef array_fields[] = {{"shape", array_shape, NULL, "Sizes.", NULL}, {"dtype", array_dtype, NULL, "Row number of the dtype.", NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyTypeObject ArrayType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "torchsmith.runtime._native.Array",
    .tp_doc = "A model's output: memory with a shape, readable through the buffer protocol and DLPack.",
    .tp_basicsize = sizeof(Array),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = array_dealloc,
    .tp_as_buffer = &array_buffers,
    .tp_methods = array_methods,
    .tp_getset = array_fields,
};

/* ---------------------------------------------------------------- arguments without torch */

typedef struct {
  Py_buffer view; /* view.obj NULL: not a buffer */
  PyObject *capsule;
  int64_t numbers[2 * MOST_DIMS];
} Holder;

static int dtype_of_format(const char *format, Py_ssize_t size) {
  static const char *const KINDS[] = {"d", "f", "", "e", "qln", "il", "h", "b", "B", "?", "Zf", "Zd", "", "H", "IL", "QLN"};
  if (!format) format = "B";
  if (*format == '<' || *format == '=' || *format == '@' || *format == '|') format++;
  for (int i = 0; i < N_ROWS; i++) {
    if (ROWS[i].size != size) continue;
    if (format[0] == 'Z' ? !strcmp(KINDS[i], format) : KINDS[i][0] != 'Z' && format[1] == 0 && strchr(KINDS[i], format[0]) != NULL && KINDS[i][0]) return i;
  }
  return -1;
}

static int read_buffer(PyObject *o, Holder *h, tsm_tensor *t, bool written) {
  if (PyObject_GetBuffer(o, &h->view, PyBUF_STRIDES | PyBUF_FORMAT) < 0) return -1;
  if (written && h->view.readonly) {
    PyErr_SetString(PyExc_ValueError, "the model writes into this input, and its memory is read-only: give a copy");
    return -1;
  }
  Py_buffer *v = &h->view;
  int dtype = dtype_of_format(v->format, v->itemsize);
  if (dtype < 0 || v->ndim > MOST_DIMS) {
    PyErr_Format(PyExc_TypeError, "an array of format %s cannot be given to a model", v->format ? v->format : "?");
    return -1;
  }
  for (int k = 0; k < v->ndim; k++) {
    h->numbers[k] = v->shape[k];
    h->numbers[v->ndim + k] = v->strides[k] / v->itemsize;
    if (v->strides[k] % v->itemsize && v->shape[k] > 1) {
      PyErr_SetString(PyExc_ValueError, "an array whose elements do not lie at multiples of their size");
      return -1;
    }
  }
  *t = (tsm_tensor){v->buf, h->numbers, h->numbers + v->ndim, v->ndim, dtype, 0, 0, NULL};
  return 0;
}

static int read_dlpack(PyObject *o, Holder *h, tsm_tensor *t) {
  h->capsule = PyObject_CallMethod(o, "__dlpack__", NULL);
  if (!h->capsule) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Format(PyExc_TypeError, "%s is no array: it offers neither a buffer nor __dlpack__", Py_TYPE(o)->tp_name);
    return -1;
  }
  Managed *m = PyCapsule_GetPointer(h->capsule, "dltensor");
  if (!m) return -1;
  int dtype = -1;
  for (int i = 0; i < N_ROWS && dtype < 0; i++)
    if (ROWS[i].code == m->t.dtype.code && 8 * ROWS[i].size == m->t.dtype.bits && m->t.dtype.lanes == 1) dtype = i;
  if (dtype < 0) {
    PyErr_SetString(PyExc_TypeError, "an array of an unknown dtype");
    return -1;
  }
  *t = (tsm_tensor){(char *)m->t.data + m->t.offset, m->t.shape, m->t.strides, m->t.ndim, dtype, m->t.device.type == KDLCPU ? 0 : m->t.device.type == KDLCUDA ? m->t.device.id + 1 : -1, 0, NULL};
  return 0;
}

static void let_go(Holder *h, Py_ssize_t n) {
  for (Py_ssize_t i = 0; i < n; i++) {
    if (h[i].view.obj) PyBuffer_Release(&h[i].view);
    Py_XDECREF(h[i].capsule);
  }
  PyMem_Free(h);
}

/* The error that is set says which argument it is of: input i, or the constant of this name. */
static void name_argument(const Package *p, Py_ssize_t i, const char *constant) {
  PyObject *kind, *value, *trace;
  tsm_tensor_info info = {0};
  if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_BufferError)) return;
  PyErr_Fetch(&kind, &value, &trace);
  if (constant) PyErr_Format(kind, "constant %s: %S", constant, value);
  else if (p->m->input(p->m->model, (size_t)i, &info) == TSM_OK) PyErr_Format(kind, "input %zd (%s): %S", i, info.name, value);
  else PyErr_Format(kind, "input %zd: %S", i, value);
  Py_XDECREF(kind);
  Py_XDECREF(value);
  Py_XDECREF(trace);
}

/* Constants by `names`, else inputs; of those p->written says which are written. */
static int read_all(const Package *p, PyObject *const *items, Py_ssize_t n, Holder *h, tsm_tensor *t, const char *const *names) {
  for (Py_ssize_t i = 0; i < n; i++) {
    bool written = !names && i < p->n_written && p->written[i];
    if ((PyObject_CheckBuffer(items[i]) ? read_buffer(items[i], &h[i], &t[i], written) : read_dlpack(items[i], &h[i], &t[i])) < 0) {
      name_argument(p, i, names ? names[i] : NULL);
      return -1;
    }
  }
  return 0;
}

static PyObject *package_run(PyObject *self, PyObject *given) {
  Package *p = (Package *)self;
  PyObject *fast = PySequence_Fast(given, "run takes a sequence of arrays"), *out = NULL;
  if (!fast) return NULL;
  Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), k = (Py_ssize_t)p->m->output_count(p->m->model);
  Holder *h = PyMem_Calloc((size_t)n + 1, sizeof *h);
  tsm_tensor *t = PyMem_Calloc((size_t)(n + k) + 1, sizeof *t);
  if (!h || !t) {
    PyErr_NoMemory();
  } else if (read_all(p, PySequence_Fast_ITEMS(fast), n, h, t, NULL) == 0) {
    int32_t rc;
    Py_BEGIN_ALLOW_THREADS
    rc = p->m->run(p->m->model, t, (size_t)n, t + n, (size_t)k);
    Py_END_ALLOW_THREADS
    if (rc) raise_status(rc, p->m->last_error());
    else out = PyList_New(k);
  }
  for (Py_ssize_t i = 0; out && i < k; i++) {
    if (t[n + i].kind) {
      PyList_SET_ITEM(out, i, Py_NewRef(Py_None));
      continue;
    }
    Array *a = PyObject_New(Array, &ArrayType);
    if (!a) {
      Py_CLEAR(out);
      break;
    }
    a->owner = (Package *)Py_NewRef(self);
    a->t = t[n + i];
    t[n + i].block = NULL;
    PyList_SET_ITEM(out, i, (PyObject *)a);
  }
  for (Py_ssize_t i = 0; t && i < k; i++) p->m->release(&t[n + i]);
  if (h) let_go(h, n);
  PyMem_Free(t);
  Py_DECREF(fast);
  return out;
}

static PyObject *package_load_constants(PyObject *self, PyObject *given) {
  Package *p = (Package *)self;
  if (!PyDict_Check(given)) return PyErr_Format(PyExc_TypeError, "load_constants takes a dictionary of names and arrays");
  PyObject *keys = PyDict_Keys(given), *values = PyDict_Values(given), *out = NULL;
  Py_ssize_t n = keys ? PyList_GET_SIZE(keys) : 0;
  Holder *h = PyMem_Calloc((size_t)n + 1, sizeof *h);
  tsm_tensor *t = PyMem_Calloc((size_t)n + 1, sizeof *t);
  const char **names = PyMem_Calloc((size_t)n + 1, sizeof *names);
  bool good = keys && values && h && t && names;
  for (Py_ssize_t i = 0; good && i < n; i++) good = (names[i] = PyUnicode_AsUTF8(PyList_GET_ITEM(keys, i))) != NULL;
  if (good && read_all(p, ((PyListObject *)values)->ob_item, n, h, t, names) == 0) {
    int32_t rc;
    Py_BEGIN_ALLOW_THREADS
    rc = p->m->load_constants(p->m->model, names, t, (size_t)n);
    Py_END_ALLOW_THREADS
    out = rc ? raise_status(rc, p->m->last_error()) : Py_NewRef(Py_None);
  } else if (!PyErr_Occurred()) {
    PyErr_NoMemory();
  }
  if (h) let_go(h, n);
  PyMem_Free(t);
  PyMem_Free(names);
  Py_XDECREF(keys);
  Py_XDECREF(values);
  return out;
}

/* ---------------------------------------------------------------- torch tensors */

static PyObject *package_run_torch(PyObject *self, PyObject *given) {
  Package *p = (Package *)self;
  if (!torch.ready) return PyErr_Format(PyExc_RuntimeError, "call setup first");
  if (!p->run_torch) return raise_status(TSM_ERROR_FORMAT, "the library has no door for PyTorch");
  PyObject *fast = PySequence_Fast(given, "run_torch takes a sequence of tensors"), *out = NULL;
  if (!fast) return NULL;
  Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), k = (Py_ssize_t)p->m->output_count(p->m->model), made = 0;
  Handle few[64], *handles = n + k <= 64 ? few : PyMem_Malloc(sizeof(Handle) * (size_t)(n + k));
  if (!handles) {
    Py_DECREF(fast);
    return PyErr_NoMemory();
  }
  for (; made < n; made++) {
    PyObject *o = PySequence_Fast_GET_ITEM(fast, made);
    if (!is_tensor(o)) PyErr_Format(PyExc_TypeError, "input %zd must be a tensor, not %s", made, Py_TYPE(o)->tp_name);
    else if (libtorch.new_handle(handle_of(o), &handles[made])) PyErr_SetString(torch.error, "a tensor that cannot be read");
    if (PyErr_Occurred()) break;
  }
  if (made < n) {
    for (Py_ssize_t i = 0; i < made; i++) libtorch.delete_tensor(handles[i]);
  } else {
    int32_t rc;
    Py_BEGIN_ALLOW_THREADS
    rc = p->run_torch(p->m->model, handles, (size_t)n, handles + n, (size_t)k);
    Py_END_ALLOW_THREADS
    if (rc) raise_status(rc, p->m->last_error());
    else out = PyList_New(k);
    for (Py_ssize_t i = 0; !rc && i < k; i++) {
      PyObject *o = wrap_handle(handles[n + i]);
      if (!o || !out) {
        Py_XDECREF(o);
        Py_CLEAR(out);
      } else {
        PyList_SET_ITEM(out, i, o);
      }
    }
  }
  if (handles != few) PyMem_Free(handles);
  Py_DECREF(fast);
  return out;
}

/* ---------------------------------------------------------------- life */

static PyObject *package_info(PyObject *self, PyObject *none) {
  Package *p = (Package *)self;
  return PyUnicode_FromString(p->m->info(p->m->model));
}

static PyObject *package_writes(PyObject *self, PyObject *flags) {
  Package *p = (Package *)self;
  PyObject *fast = PySequence_Fast(flags, "writes takes a sequence of flags");
  if (!fast) return NULL;
  Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
  char *made = PyMem_Calloc((size_t)n + 1, 1);
  for (Py_ssize_t i = 0; made && i < n; i++) made[i] = PyObject_IsTrue(PySequence_Fast_GET_ITEM(fast, i)) == 1;
  Py_DECREF(fast);
  if (!made) return PyErr_NoMemory();
  PyMem_Free(p->written);
  p->written = made;
  p->n_written = n;
  Py_RETURN_NONE;
}

static void package_dealloc(PyObject *self) {
  PyMem_Free(((Package *)self)->written);
  torchsmith_free(((Package *)self)->m);
  Py_TYPE(self)->tp_free(self);
}

static PyObject *package_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  const char *name;
  PyObject *path; /* bytes, as the file system has them */
  int threads, verify, device;
  if (!PyArg_ParseTuple(args, "O&sipi", PyUnicode_FSConverter, &path, &name, &threads, &verify, &device)) return NULL;
  Package *p = (Package *)type->tp_alloc(type, 0);
  if (!p) {
    Py_DECREF(path);
    return NULL;
  }
  torchsmith_options o = {.size = sizeof o, .threads = threads, .verify = verify, .device = device};
  int32_t rc;
  Py_BEGIN_ALLOW_THREADS
  rc = torchsmith_load(PyBytes_AS_STRING(path), name, &o, &p->m);
  Py_END_ALLOW_THREADS
  Py_DECREF(path);
  if (rc) {
    raise_status(rc, torchsmith_error());
    Py_DECREF(p);
    return NULL;
  }
  *(void **)&p->run_torch = dlsym(p->m->library, "tsm_run_torch");
  return (PyObject *)p;
}

static PyMethodDef package_methods[] = {
    {"run", package_run, METH_O, "Arrays in, arrays out."},
    {"run_torch", package_run_torch, METH_O, "Torch tensors in, torch tensors out."},
    {"load_constants", package_load_constants, METH_O, "New values for constants, by name."},
    {"writes", package_writes, METH_O, "Which inputs the model writes, as flags; called once, before the first run."},
    {"info", package_info, METH_NOARGS, "JSON text that describes the model."},
    {NULL, NULL, 0, NULL}};

PyTypeObject PackageType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "torchsmith.runtime._native.Package",
    .tp_doc = "A compiled model from a file.",
    .tp_basicsize = sizeof(Package),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = package_new,
    .tp_dealloc = package_dealloc,
    .tp_methods = package_methods,
};

int package_ready(void) { return PyType_Ready(&PackageType) < 0 || PyType_Ready(&ArrayType) < 0 ? -1 : 0; }
