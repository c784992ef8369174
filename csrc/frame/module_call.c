/* How compiled modules are called: straight to the Dispatcher of their forward when no hook is set. */
#include "frame.h"

static PyObject *names[6];    /* the four hook dictionaries of a module, "forward", the cache's name */
static PyObject *global_hooks; /* tuple of torch's dictionaries of global hooks */
static PyObject *slow_call;    /* callable(compiled, *args, **kwargs) for everything else */

/* setup_module(global hook dicts, slow call) */
PyObject *ts_setup_module(PyObject *self, PyObject *args) {
  PyObject *hooks, *slow;
  static const char *texts[6] = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward", "_torchsmith_forward"};
  if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &hooks, &slow)) return NULL;
  for (int i = 0; i < 6; i++)
    if (!names[i] && !(names[i] = PyUnicode_InternFromString(texts[i]))) return NULL;
  Py_XSETREF(global_hooks, Py_NewRef(hooks));
  Py_XSETREF(slow_call, Py_NewRef(slow));
  Py_RETURN_NONE;
}

static int has_hooks(PyObject *own) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(global_hooks); i++) {
    PyObject *d = PyTuple_GET_ITEM(global_hooks, i);
    if (!PyDict_Check(d) || PyDict_GET_SIZE(d)) return 1;
  }
  for (int i = 0; i < 4; i++) {
    PyObject *d = PyDict_GetItemWithError(own, names[i]);
    if (!d || !PyDict_Check(d) || PyDict_GET_SIZE(d)) return 1;
  }
  return 0;
}

/* _torchsmith_forward is (the module's class, its forward, the Dispatcher of that, the module): good while the module is of that class, and
   the class still has that function. */
static PyObject *module_call(PyObject *self, PyObject *args, PyObject *kwargs) {
  PyObject **slot = slow_call ? _PyObject_GetDictPtr(self) : NULL, *own = slot ? *slot : NULL;
  if (!slow_call) { PyErr_SetString(PyExc_TypeError, "compiled modules are not set up"); return NULL; }
  if (own && PyDict_Check(own) && !has_hooks(own) && !PyDict_GetItemWithError(own, names[4])) {
    PyObject *cache = _PyType_Lookup(Py_TYPE(self), names[5]);
    if (cache && PyTuple_CheckExact(cache) && PyTuple_GET_SIZE(cache) == 4) {
      PyObject *type = PyTuple_GET_ITEM(cache, 0), *fn = PyTuple_GET_ITEM(cache, 1), *d = PyTuple_GET_ITEM(cache, 2);
      if ((PyObject *)Py_TYPE(PyTuple_GET_ITEM(cache, 3)) == type && _PyType_Lookup((PyTypeObject *)type, names[4]) == fn) {
        Py_INCREF(d);
        PyObject *r = PyObject_VectorcallDict(d, ((PyTupleObject *)args)->ob_item, (size_t)PyTuple_GET_SIZE(args), kwargs);
        Py_DECREF(d);
        return r;
      }
    }
  }
  if (PyErr_Occurred()) return NULL;
  Py_ssize_t n = PyTuple_GET_SIZE(args);
  PyObject *all = PyTuple_New(n + 1), *r;
  if (!all) return NULL;
  PyTuple_SET_ITEM(all, 0, Py_NewRef(self));
  for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(all, i + 1, Py_NewRef(PyTuple_GET_ITEM(args, i)));
  PyObject *peer = ts_peer_pause();
  r = PyObject_Call(slow_call, all, kwargs);
  ts_peer_resume(peer);
  Py_DECREF(all);
  return r;
}

static PyTypeObject Holder_Type = {PyVarObject_HEAD_INIT(NULL, 0).tp_name = "torchsmith.capture._frame.Call", .tp_basicsize = sizeof(PyObject), .tp_call = module_call};

/* `__call__` for any class: one that has it in its dictionary is called by module_call without a detour. It brings no layout of its own, so
   that an object's `__class__` can be exchanged for a class that derives from its class and others (as fully_shard does). */
PyObject *ts_module_call(void) {
  if (PyType_Ready(&Holder_Type) < 0) return NULL;
  PyObject *own = PyDict_GetItemString(Holder_Type.tp_dict, "__call__");
  if (!own) { PyErr_SetString(PyExc_SystemError, "no __call__"); return NULL; }
  return PyDescr_NewWrapper(&PyBaseObject_Type, ((PyWrapperDescrObject *)own)->d_base, (void *)module_call);
}
