/* Extern calls (first form: through Python). */
#include "native.h"

struct Extern { PyObject *spec; };

Extern *extern_new(PyObject *spec) {
  Extern *e = PyMem_Calloc(1, sizeof *e);
  if (!e) { PyErr_NoMemory(); return NULL; }
  e->spec = Py_NewRef(spec);
  return e;
}
void extern_free(Extern *e) { Py_XDECREF(e->spec); PyMem_Free(e); }
int extern_visit(Extern *e, visitproc visit, void *arg) { Py_VISIT(e->spec); return 0; }
int32_t extern_run(Call *call, Extern *e, const ts_tensor *args, const int64_t *numbers, ts_tensor *outs) {
  call_error(call, TS_ERROR_EXTERN, "externs are not there yet");
  return TS_ERROR_EXTERN;
}
PyTypeObject SlotType = {PyVarObject_HEAD_INIT(NULL, 0).tp_name = "torchsmith.runtime._native.Slot", .tp_basicsize = sizeof(PyObject)};
