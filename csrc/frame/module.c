/* Module definition of torchsmith's frame extension. */
#include "frame.h"

PyObject *ts_suspend(PyObject *self, PyObject *arg);

/* Does a class written in C look its instances' attributes up (or set them) in its own way? */
static PyObject *own_lookup(PyObject *self, PyObject *cls) {
  if (!PyType_Check(cls)) { PyErr_SetString(PyExc_TypeError, "own_lookup takes a class"); return NULL; }
  PyTypeObject *t = (PyTypeObject *)cls;
  return PyBool_FromLong((t->tp_getattro && t->tp_getattro != PyObject_GenericGetAttr) || (t->tp_setattro && t->tp_setattro != PyObject_GenericSetAttr));
}

static PyMethodDef methods[] = {
    {"own_lookup", own_lookup, METH_O, "own_lookup(class): are attributes of its instances looked up or set by code of its own?"},
    {"clone_set", ts_clone_set, METH_O, "clone_set(set): one that iterates, grows and pops as this one does"},
    {"refill_set", ts_refill_set, METH_VARARGS, "refill_set(set, like): it holds what `like` holds, in its order"},
    {"setup_tensor", ts_setup_tensor, METH_VARARGS, "find out how this torch lays out tensors"},
    {"set_plain_reader", ts_set_plain_reader, METH_O, "what reads requires_grad of a tensor past all handlers"},
    {"set_discarded", ts_set_discarded, METH_O, "the class of parameters that exist only in packed form"},
    {"setup_state", ts_setup_state, METH_VARARGS, "find out how this torch keeps its global state"},
    {"setup_dispatch", ts_setup_dispatch, METH_O, "set the gate handler"},
    {"setup_rest", ts_setup_rest, METH_O, "setup_rest(callable): (point, function, state) -> (function, arguments) for the rest of a frame"},
    {"setup_profiled", ts_setup_profiled, METH_O, "set the profiled call"},
    {"setup_module", ts_setup_module, METH_VARARGS, "setup_module(global hook dicts, slow call)"},
    {"tensor_info", ts_tensor_info, METH_O, "(dtype, device type, device index, ndim, requires_grad, first byte, end)"},
    {"state_info", ts_state_info, METH_NOARGS, "the present global state, as C reads it"},
    {"use_raw", ts_use_raw, METH_O, "switch raw tensor fields on or off; returns the setting before"},
    {"use_state", ts_use_state, METH_O, "switch fast state readings on or off; returns the setting before"},
    {"set_gate", ts_set_gate, METH_O, "ask the gate handler at every call"},
    {"watch_stance", ts_watch_stance, METH_VARARGS, "ask the gate handler at every call while a namespace's _stance is not the given one"},
    {"suspend", ts_suspend, METH_O, "+1 or -1: this thread captures, compiled functions run as they are"},
    {NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_frame", "Dispatcher, guards and the frame hook.", -1, methods};

PyMODINIT_FUNC PyInit__frame(void) {
  if (PyType_Ready(&Entry_Type) < 0 || PyType_Ready(&Pending_Type) < 0 || ts_dispatcher_init() < 0) return NULL;
  PyObject *m = PyModule_Create(&module);
  if (!m) return NULL;
  ts_run_hooked = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type), ts_run_plain = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
  ts_go_on = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
  if (!ts_run_hooked || !ts_run_plain || !ts_go_on || PyModule_AddObjectRef(m, "RUN_HOOKED", ts_run_hooked) < 0 ||
      PyModule_AddObjectRef(m, "RUN_PLAIN", ts_run_plain) < 0 || PyModule_AddObjectRef(m, "GO_ON", ts_go_on) < 0)
    return NULL;
  ts_elsewhere = PyErr_NewException("torchsmith.capture._frame.Elsewhere", NULL, NULL);
  if (!ts_elsewhere || PyModule_AddObjectRef(m, "Elsewhere", ts_elsewhere) < 0) return NULL;
  PyObject *call = ts_module_call();
  if (PyModule_AddObjectRef(m, "Entry", (PyObject *)&Entry_Type) < 0 || PyModule_AddObjectRef(m, "Dispatcher", (PyObject *)&Dispatcher_Type) < 0 ||
      PyModule_AddObjectRef(m, "Pending", (PyObject *)&Pending_Type) < 0 || !call || PyModule_AddObjectRef(m, "module_call", call) < 0 ||
      PyModule_AddFunctions(m, ts_hook_methods) < 0 || ts_hook_init(m) < 0 || ts_watch_init() < 0)
    return NULL;
  return m;
}
