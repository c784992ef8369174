/* libtorch's exported C functions, found by name at set-up; tensors to Python and back. No torch header is read. */
#include <dlfcn.h>

#include "native.h"

Torch torch;

typedef struct {
  const char *name;
  void **where;
  bool needed;
} Symbol;

#define NEED(name, field) {name, (void **)&torch.field, true}
#define MAY(name, field) {name, (void **)&torch.field, false}

static const Symbol SYMBOLS[] = {
    NEED("aoti_torch_get_data_ptr", get_data_ptr),
    NEED("aoti_torch_get_sizes", get_sizes),
    NEED("aoti_torch_get_strides", get_strides),
    NEED("aoti_torch_get_dim", get_dim),
    NEED("aoti_torch_get_dtype", get_dtype),
    NEED("aoti_torch_dtype_element_size", element_size),
    NEED("aoti_torch_get_storage_offset", get_storage_offset),
    NEED("aoti_torch_empty_strided", empty_strided),
    NEED("aoti_torch_create_tensor_from_blob", from_blob),
    NEED("aoti_torch_delete_tensor_object", delete_tensor),
    NEED("aoti_torch_new_tensor_handle", new_handle),
    NEED("aoti_torch_copy_", copy_),
    NEED("aoti_torch_grad_mode_is_enabled", grad_enabled),
    NEED("aoti_torch_grad_mode_set_enabled", set_grad),
    MAY("torch_parallel_for", parallel_for),
    MAY("torch_get_num_threads", num_threads),
    MAY("torch_exception_get_what_without_backtrace", what),
};

static const char *DTYPES[TS_DTYPES] = {"float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
                                       "complex64", "complex128", "complex32", "uint16", "uint32", "uint64"};

static PyObject *take(PyObject *settings, const char *key) {
  PyObject *v = PyDict_GetItemString(settings, key);
  if (!v) PyErr_Format(PyExc_KeyError, "setup needs %s", key);
  Py_XINCREF(v);
  return v;
}

/* The word `offset` bytes into each Python tensor must be the TensorImpl address that Python shows as _cdata. */
static int probe_offset(PyObject *samples) {
  static const Py_ssize_t CANDIDATES[] = {sizeof(PyObject), sizeof(PyObject) + 8};
  for (size_t c = 0; c < 2; c++) {
    bool good = PyList_GET_SIZE(samples) > 0;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(samples); i++) {
      PyObject *t = PyList_GET_ITEM(samples, i), *n = PyObject_GetAttrString(t, "_cdata");
      if (!n) return -1;
      good = PyLong_AsUnsignedLongLong(n) == *(unsigned long long *)((char *)t + CANDIDATES[c]);
      Py_DECREF(n);
      if (PyErr_Occurred()) return -1;
    }
    if (good) {
      torch.offset = CANDIDATES[c];
      return 0;
    }
  }
  PyErr_SetString(PyExc_ImportError, "this torch keeps tensors in an unknown layout");
  return -1;
}

PyObject *torch_setup(PyObject *module, PyObject *settings) {
  if (torch.ready) Py_RETURN_NONE;
  PyObject *samples = PyDict_GetItemString(settings, "samples"), *type = take(settings, "tensor");
  if (!samples || !type) return NULL;
  torch.tensor = (PyTypeObject *)type;
  if (probe_offset(samples) < 0) return NULL;
  torch.lib = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  if (!torch.lib) return PyErr_Format(PyExc_ImportError, "libtorch_cpu.so is not loaded");
  for (size_t i = 0; i < sizeof SYMBOLS / sizeof *SYMBOLS; i++) {
    *SYMBOLS[i].where = dlsym(torch.lib, SYMBOLS[i].name);
    if (!*SYMBOLS[i].where && SYMBOLS[i].needed) return PyErr_Format(PyExc_ImportError, "libtorch_cpu.so lacks %s", SYMBOLS[i].name);
  }
  for (int i = 0; i < TS_DTYPES; i++) {
    char name[64];
    snprintf(name, sizeof name, "aoti_torch_dtype_%s", DTYPES[i]);
    int32_t (*fn)(void) = (int32_t(*)(void))dlsym(torch.lib, name);
    if (!fn) return PyErr_Format(PyExc_ImportError, "libtorch_cpu.so lacks %s", name);
    torch.dtypes[i] = fn();
  }
  int32_t (*cpu)(void) = (int32_t(*)(void))dlsym(torch.lib, "aoti_torch_device_type_cpu");
  if (!cpu) return PyErr_Format(PyExc_ImportError, "libtorch_cpu.so lacks aoti_torch_device_type_cpu");
  torch.cpu = cpu();
  if (!(torch.steal = take(settings, "steal")) || !(torch.as_strided = take(settings, "as_strided")) ||
      !(torch.view = take(settings, "view")) || !(torch.increment_version = take(settings, "increment_version")) ||
      !(torch.is_autocast = take(settings, "is_autocast")) || !(torch.disable_autocast = take(settings, "disable_autocast")) ||
      !(torch.on_prepare = take(settings, "on_prepare")) || !(torch.discard = take(settings, "discard")) ||
      !(torch.discarded = (PyTypeObject *)take(settings, "discarded")) || !(torch.error = take(settings, "error")))
    return NULL;
  PyObject *version = PyObject_GetAttrString(type, "_version");
  if (!version) return NULL;
  if (!Py_IS_TYPE(version, &PyGetSetDescr_Type)) return PyErr_Format(PyExc_ImportError, "Tensor._version is no getter");
  torch.version = ((PyGetSetDescrObject *)version)->d_getset->get; /* the type keeps the descriptor alive */
  torch.version_closure = ((PyGetSetDescrObject *)version)->d_getset->closure;
  Py_DECREF(version);
  /* Optional and quicker than `steal`: PyObject* THPVariable_Wrap(const at::TensorBase&). */
  void *python = dlopen("libtorch_python.so", RTLD_NOLOAD | RTLD_LAZY);
  if (python) {
    PyObject *(*wrap)(Handle) = (PyObject * (*)(Handle)) dlsym(python, "_Z16THPVariable_WrapRKN2at10TensorBaseE");
    bool good = wrap != NULL;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(samples); i++) {
      PyObject *t = PyList_GET_ITEM(samples, i), *back = wrap(handle_of(t));
      good = back == t;
      Py_XDECREF(back);
    }
    torch.wrap = good ? wrap : NULL;
  }
  void *c10 = dlopen("libc10.so", RTLD_NOLOAD | RTLD_LAZY);
  if (c10) torch.inference = (bool (*)(void))dlsym(c10, "_ZN3c1013InferenceMode10is_enabledEv");
  torch.ready = true;
  Py_RETURN_NONE;
}

PyObject *wrap_handle(Handle h) {
  if (torch.wrap) {
    PyObject *got = torch.wrap(h);
    torch.delete_tensor(h);
    return got;
  }
  PyObject *capsule = PyCapsule_New(h, NULL, NULL);
  if (!capsule) {
    torch.delete_tensor(h);
    return NULL;
  }
  PyObject *got = PyObject_CallOneArg(torch.steal, capsule);
  Py_DECREF(capsule);
  return got;
}

int describe_tensor(Handle h, ts_tensor *out, bool with_sizes) {
  int64_t *sizes = NULL, *strides = NULL;
  out->handle = h;
  if (torch.get_data_ptr(h, &out->data)) return -1;
  if (with_sizes && (torch.get_sizes(h, &sizes) || torch.get_strides(h, &strides))) return -1;
  out->sizes = sizes;
  out->strides = strides;
  return 0;
}
