/* torchsmith.runtime._native: loads compiled graphs and hosts them inside PyTorch. */
#include "native.h"
#include "package.h"

static PyObject *trim(PyObject *module, PyObject *none) {
  workspace_trim();
  cuda_trim(-1);
  Py_RETURN_NONE;
}

static PyObject *stats(PyObject *module, PyObject *none) {
  int64_t fresh = 0, bytes = 0;
  int kept = 0;
  workspace_stats(&fresh, &bytes, &kept);
  return Py_BuildValue("{s:L,s:L,s:i}", "fresh", (long long)fresh, "bytes", (long long)bytes, "kept", kept);
}

static PyObject *has_symbol(PyObject *module, PyObject *name);

static PyObject *arch_of(PyObject *module, PyObject *device) {
  long i = PyLong_AsLong(device);
  if (i == -1 && PyErr_Occurred()) return NULL;
  const char *missing = cuda_connect();
  if (missing) return PyErr_Format(PyExc_ImportError, "%s", missing);
  return PyLong_FromLong(cuda_arch((int32_t)i));
}

static PyObject *device_stats(PyObject *module, PyObject *none) {
  int64_t bytes = 0;
  int32_t blocks = 0;
  cuda_memory_stats(&bytes, &blocks);
  return Py_BuildValue("{s:L,s:i}", "bytes", (long long)bytes, "blocks", (int)blocks);
}

static PyObject *dtype_number(PyObject *module, PyObject *row) {
  long i = PyLong_AsLong(row);
  if (i < 0 || i >= TS_DTYPES) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_IndexError, "no such dtype row");
  const char *missing = libtorch_connect();
  if (missing) return PyErr_Format(PyExc_ImportError, "libtorch_cpu.so is not loaded, or lacks %s", missing);
  return PyLong_FromLong(libtorch.dtypes[i]);
}

static PyMethodDef methods[] = {
    {"setup", torch_setup, METH_O, "Find torch's functions; takes a dict of Python callables and samples."},
    {"setup_packages", package_setup, METH_O, "The exception that packages raise: called with text and status."},
    {"has_symbol", has_symbol, METH_O, "True when libtorch_cpu exports this name."},
    {"dtype_number", dtype_number, METH_O, "torch's number of a dtype row."},
    {"refreeze", refreeze, METH_VARARGS, "Graphs prepare these constants (none given: all) anew at their next call."},
    {"last_error", native_last_error, METH_NOARGS, "What native code said when a call was last repeated eagerly."},
    {"cuda_arch", arch_of, METH_O, "Compute capability of a CUDA device (90: 9.0); ImportError where there is no usable driver."},
    {"device_stats", device_stats, METH_NOARGS, "Bytes and blocks of device memory held for workspaces and prepared constants."},
    {"workspace_stats", stats, METH_NOARGS, "Blocks made, bytes held, blocks kept."},
    {"workspace_trim", trim, METH_NOARGS, "Free every idle workspace."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods};

static PyObject *has_symbol(PyObject *module, PyObject *name) {
  const char *text = PyUnicode_AsUTF8(name);
  if (!text) return NULL;
  return PyBool_FromLong(!libtorch_connect() && libtorch_find(text));
}

PyMODINIT_FUNC PyInit__native(void) {
  if (PyType_Ready(&GraphType) < 0 || PyType_Ready(&SlotType) < 0 || package_ready() < 0) return NULL;
  workspace_init();
  graph_init();
  PyObject *m = PyModule_Create(&module);
  if (!m) return NULL;
  if (PyModule_AddObjectRef(m, "Graph", (PyObject *)&GraphType) < 0 || PyModule_AddObjectRef(m, "Slot", (PyObject *)&SlotType) < 0 ||
      PyModule_AddObjectRef(m, "Package", (PyObject *)&PackageType) < 0) {
    Py_DECREF(m);
    return NULL;
  }
  return m;
}
