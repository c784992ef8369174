/* Frames that were split: a graph ran, the frame's state is at hand, one instruction is run by the interpreter, and the rest goes on at
 * a point that has compilations of its own.
 *
 * A site is the tuple (step, points, handler, free, handled): `step(*state)` runs the instruction and returns the state behind it, a tuple, or a
 * list where it jumped; points[jumped] is the Dispatcher that goes on. handler: None, or (point, positions, offset): where an exception
 * goes, which of the state's values stay, and the offset to push (or None). free: which of the function's closure cells
 * step has as its only one, or -1. handled: whether the state ends with the exception that is being handled. A loop around all this, not a call within a call: a thousand iterations take no deeper stack than one.
 */
#include "frame.h"
#include <structmember.h>

typedef struct {
  PyObject_HEAD
  PyObject *site, *state;
} Pending;

static PyObject *on_rest; /* callable(point, function, state) -> (function, arguments): the frame's rest as it is */

static void pending_dealloc(Pending *p) {
  PyObject_GC_UnTrack(p);
  Py_CLEAR(p->site);
  Py_CLEAR(p->state);
  PyObject_GC_Del(p);
}
static int pending_traverse(Pending *p, visitproc visit, void *arg) {
  Py_VISIT(p->site);
  Py_VISIT(p->state);
  return 0;
}
static int pending_clear(Pending *p) {
  Py_CLEAR(p->site);
  Py_CLEAR(p->state);
  return 0;
}
static PyMemberDef pending_members[] = {
    {"site", T_OBJECT, offsetof(Pending, site), READONLY, NULL}, {"state", T_OBJECT, offsetof(Pending, state), READONLY, NULL}, {NULL}};

PyTypeObject Pending_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "torchsmith.capture._frame.Pending",
    .tp_basicsize = sizeof(Pending),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A call that ran up to an instruction that was not captured.",
    .tp_dealloc = (destructor)pending_dealloc,
    .tp_traverse = (traverseproc)pending_traverse,
    .tp_clear = (inquiry)pending_clear,
    .tp_members = pending_members,
};

/* Takes `state` over. */
PyObject *ts_pending(PyObject *site, PyObject *state) {
  if (!state) return NULL;
  if (!PyTuple_CheckExact(state)) { Py_DECREF(state); PyErr_SetString(PyExc_SystemError, "torchsmith: a state is a tuple"); return NULL; }
  Pending *p = PyObject_GC_New(Pending, &Pending_Type);
  if (!p) { Py_DECREF(state); return NULL; }
  p->site = Py_NewRef(site), p->state = state;
  PyObject_GC_Track(p);
  return (PyObject *)p;
}

/* ------------------------------------------------------------------ exceptions */
static PyObject *fetch(void) { /* the exception that is set, cleared; with its traceback */
#if PY_VERSION_HEX >= 0x030C0000
  return PyErr_GetRaisedException();
#else
  PyObject *t, *v, *tb;
  PyErr_Fetch(&t, &v, &tb);
  PyErr_NormalizeException(&t, &v, &tb);
  if (v && tb) PyException_SetTraceback(v, tb);
  Py_XDECREF(t), Py_XDECREF(tb);
  return v;
#endif
}

static PyObject **items(PyObject *seq, Py_ssize_t *n) {
  *n = Py_SIZE(seq);
  return PyList_CheckExact(seq) ? ((PyListObject *)seq)->ob_item : ((PyTupleObject *)seq)->ob_item;
}

/* The state at the handler of the exception that is set. NULL: no handler, or out of memory; an exception is set then. */
static PyObject *at_handler(PyObject *site, PyObject *state, PyObject *handled) {
  PyObject *row = PyTuple_GET_ITEM(site, 2);
  if (row == Py_None) return NULL;
  PyObject *exc = fetch(), *positions = PyTuple_GET_ITEM(row, 1), *offset = PyTuple_GET_ITEM(row, 2);
  Py_ssize_t n = PyTuple_GET_SIZE(positions), size = n + (offset != Py_None) + 1 + (handled != NULL), k = 0;
  PyObject *out = PyTuple_New(size);
  if (!out) { Py_XDECREF(exc); return NULL; }
  for (; k < n; k++) PyTuple_SET_ITEM(out, k, Py_NewRef(PyTuple_GET_ITEM(state, PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, k)))));
  if (offset != Py_None) PyTuple_SET_ITEM(out, k++, Py_NewRef(offset));
  PyTuple_SET_ITEM(out, k++, exc);
  if (handled) PyTuple_SET_ITEM(out, k++, Py_NewRef(handled));
  return out;
}

/* ------------------------------------------------------------------ the loop */
static PyObject *call_hooked(PyObject *key, PyObject *fn, PyObject **args, Py_ssize_t n) {
  HookState before = ts_hook_enter(key, fn);
  PyObject *out = PyObject_Vectorcall(fn, args, (size_t)n, NULL);
  ts_hook_leave(before);
  return out;
}

static PyObject *run_rest(PyObject *point, PyObject *key, PyObject *fn, PyObject *state) {
  int hook = ts_hook_suspend();
  PyObject *pair = on_rest ? PyObject_CallFunctionObjArgs(on_rest, point, fn, state, NULL) : NULL, *out = NULL;
  ts_hook_resume(hook);
  if (pair && PyTuple_CheckExact(pair) && PyTuple_GET_SIZE(pair) == 2 && PyList_CheckExact(PyTuple_GET_ITEM(pair, 1))) {
    PyObject *run = Py_NewRef(PyTuple_GET_ITEM(pair, 0)), *args = Py_NewRef(PyTuple_GET_ITEM(pair, 1));
    Py_DECREF(pair);
    Py_ssize_t n;
    PyObject **values = items(args, &n);
    out = call_hooked(key, run, values, n);
    Py_DECREF(run), Py_DECREF(args);
    return out;
  }
  Py_XDECREF(pair);
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "torchsmith: no way to run the rest of a frame");
  return NULL;
}

/* Follow a call to its end. Takes `result` over, which may be any result; key: names the settings; fn: the function that was called. */
PyObject *ts_follow(PyObject *result, PyObject *key, PyObject *fn) {
  if (!result || !Py_IS_TYPE(result, &Pending_Type)) return result;
  PyObject **being_handled = &PyThreadState_Get()->exc_info->exc_value, *outer = Py_XNewRef(*being_handled);
  Py_INCREF(key), Py_INCREF(fn);
  while (result && Py_IS_TYPE(result, &Pending_Type)) {
    Pending *p = (Pending *)result;
    PyObject *site = Py_NewRef(p->site), *state = Py_NewRef(p->state), *step = PyTuple_GET_ITEM(site, 0), *now, *point;
    Py_CLEAR(result);
    Py_ssize_t n, free = PyLong_AsSsize_t(PyTuple_GET_ITEM(site, 3));
    int has_handled = PyObject_IsTrue(PyTuple_GET_ITEM(site, 4)) == 1;
    PyObject **values = items(state, &n), *handled = has_handled && n ? values[n - 1] : NULL;
    if (has_handled) Py_XSETREF(*being_handled, Py_XNewRef(handled));
    if (free >= 0) { /* rare: an instruction that works on a free variable */
      PyObject *cell = PyTuple_GetItem(((PyFunctionObject *)fn)->func_closure, free), *closure = cell ? PyTuple_Pack(1, cell) : NULL;
      PyObject *own = closure ? PyFunction_New(PyFunction_GET_CODE(step), PyFunction_GET_GLOBALS(step)) : NULL;
      now = own && PyFunction_SetClosure(own, closure) == 0 ? call_hooked(key, own, values, n) : NULL;
      Py_XDECREF(own), Py_XDECREF(closure);
    } else now = call_hooked(key, step, values, n);
    if (has_handled) Py_XSETREF(*being_handled, Py_XNewRef(outer));
    if (now) point = PyTuple_GetItem(PyTuple_GET_ITEM(site, 1), PyList_CheckExact(now));
    else if ((now = at_handler(site, state, handled))) point = PyTuple_GET_ITEM(PyTuple_GET_ITEM(site, 2), 0);
    else point = NULL;
    Py_XINCREF(point);
    Py_DECREF(state), Py_DECREF(site);
    if (now && PyList_CheckExact(now)) Py_SETREF(now, PyList_AsTuple(now));
    if (!now || !point) { Py_XDECREF(now); Py_XDECREF(point); break; }
    values = items(now, &n);
    int r = ts_dispatcher_frame(point, values, fn, &result);
    if (r == 0) {
      if (ts_point_handled(point)) { Py_XSETREF(*being_handled, Py_XNewRef(values[n - 1])); }
      result = run_rest(point, key, fn, now);
      Py_XSETREF(*being_handled, Py_XNewRef(outer));
    } else if (r < 0) Py_CLEAR(result);
    Py_DECREF(now), Py_DECREF(point);
  }
  Py_XDECREF(outer);
  Py_DECREF(key), Py_DECREF(fn);
  return result;
}

PyObject *ts_setup_rest(PyObject *self, PyObject *fn) {
  Py_XSETREF(on_rest, Py_NewRef(fn));
  Py_RETURN_NONE;
}
