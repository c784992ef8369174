/* The PEP 523 hook (to come): captures functions called while a frame that could not be captured runs as it is. */
#include "frame.h"

void ts_hook_enter(void) {}
void ts_hook_leave(void) {}
int ts_hook_suspend(void) { return 0; }
void ts_hook_resume(int before) {}
int ts_hook_init(PyObject *module) { return 0; }
static PyObject *hook_suspend(PyObject *self, PyObject *unused) { return PyLong_FromLong(ts_hook_suspend()); }
static PyObject *hook_resume(PyObject *self, PyObject *before) {
  ts_hook_resume((int)PyLong_AsLong(before));
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}
PyMethodDef ts_hook_methods[] = {{"hook_suspend", hook_suspend, METH_NOARGS, "switch the hook off in this thread; returns what hook_resume wants"},
                                 {"hook_resume", hook_resume, METH_O, NULL},
                                 {NULL}};
