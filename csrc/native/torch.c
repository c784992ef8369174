/* torch's Python side, given at set-up; tensors to Python and back. No torch header is read. */
#include <dlfcn.h>

#include "native.h"

Torch torch;

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
  const char *missing = libtorch_connect();
  if (missing) return PyErr_Format(PyExc_ImportError, "libtorch_cpu.so is not loaded, or lacks %s", missing);
  if (!(torch.steal = take(settings, "steal")) || !(torch.as_strided = take(settings, "as_strided")) ||
      !(torch.view = take(settings, "view")) || !(torch.increment_version = take(settings, "increment_version")) ||
      !(torch.is_autocast = take(settings, "is_autocast")) || !(torch.disable_autocast = take(settings, "disable_autocast")) ||
      !(torch.record_begin = take(settings, "record_begin")) || !(torch.record_end = take(settings, "record_end")) ||
      !(torch.modes = take(settings, "modes")) || !(torch.on_prepare = take(settings, "on_prepare")) || !(torch.discard = take(settings, "discard")) ||
      !(torch.storage_ref = take(settings, "storage_ref")) || !(torch.counter = take(settings, "counter")) ||
      !(torch.discarded = (PyTypeObject *)take(settings, "discarded")) || !(torch.plain = (PyTypeObject *)take(settings, "plain")) ||
      !(torch.parameter = (PyTypeObject *)take(settings, "parameter")) || !(torch.error = take(settings, "error")))
    return NULL;
  PyObject *version = PyObject_GetAttrString(type, "_version");
  if (!version) return NULL;
  if (!Py_IS_TYPE(version, &PyGetSetDescr_Type)) return PyErr_Format(PyExc_ImportError, "Tensor._version is no getter");
  torch.version = ((PyGetSetDescrObject *)version)->d_getset->get; /* the type keeps the descriptor alive */
  torch.version_closure = ((PyGetSetDescrObject *)version)->d_getset->closure;
  Py_DECREF(version);
  aliases_setup(type);
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
  torch.ready = true;
  Py_RETURN_NONE;
}

PyObject *wrap_handle(Handle h) {
  if (torch.wrap) {
    PyObject *got = torch.wrap(h);
    libtorch.delete_tensor(h);
    return got;
  }
  PyObject *capsule = PyCapsule_New(h, NULL, NULL);
  if (!capsule) {
    libtorch.delete_tensor(h);
    return NULL;
  }
  PyObject *got = PyObject_CallOneArg(torch.steal, capsule);
  Py_DECREF(capsule);
  return got;
}
