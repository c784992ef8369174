/* The PEP 523 hook: while a frame that could not be captured runs as it is, functions it calls are captured.
 *
 * Installed only as long as somebody asks (ts_hook_enter .. ts_hook_leave), active only in the threads that asked; whatever
 * evaluator was there before is called for every frame that is not ours and is put back afterwards. What is known of a code
 * object stands in its extra slot: a dict {settings key: Dispatcher | None (skip)}.
 */
#define Py_BUILD_CORE 1
#include "frame.h"
#undef _PyGC_FINALIZED /* defined again by the internal headers of 3.11 */
#include "internal/pycore_frame.h"
#include <pthread.h>

#if PY_VERSION_HEX < 0x030C0000
#define FRAME_CODE(f) ((f)->f_code)
#define FRAME_FUNCTION(f) ((PyObject *)(f)->f_func)
#define RequestIndex _PyEval_RequestCodeExtraIndex
#define GetExtra _PyCode_GetExtra
#define SetExtra _PyCode_SetExtra
#else
#define RequestIndex PyUnstable_Eval_RequestCodeExtraIndex
#define GetExtra PyUnstable_Code_GetExtra
#define SetExtra PyUnstable_Code_SetExtra
#define FRAME_FUNCTION(f) ((f)->f_funcobj)
#if PY_VERSION_HEX < 0x030D0000
#define FRAME_CODE(f) ((f)->f_code)
#else
#define FRAME_CODE(f) ((PyCodeObject *)(f)->f_executable)
#endif
#endif

typedef struct _PyInterpreterFrame RawFrame;

static Py_ssize_t extra_index = -1;
static PyObject *on_frame;          /* callable(key, function) -> Dispatcher | None: first time a code object is met under a key */
static _PyFrameEvalFunction before; /* evaluator that was installed when we came */
static int users;                   /* enters without leave, over all threads */
static int buried;                  /* somebody installed another evaluator on top of ours: we stay where we are */
static _Thread_local int active, depth;
static _Thread_local PyCodeObject *entering; /* code of the function that is being run as it is: not its own first frame */
static _Thread_local PyObject *key; /* whose settings apply; borrowed from the dispatcher being run */

static PyObject *hook(PyThreadState *ts, RawFrame *frame, int throwflag);

static _Thread_local RawFrame *passed; /* the frame that was last handed to the evaluator below ours */

/* The evaluator that was there before us; one that was put on top of ours in the meantime hands the frame back to us. */
static PyObject *evaluate(PyThreadState *ts, RawFrame *frame, int throwflag) {
  if (!before || frame == passed) return _PyEval_EvalFrameDefault(ts, frame, throwflag);
  RawFrame *outer = passed;
  passed = frame;
  PyObject *result = before(ts, frame, throwflag);
  passed = outer;
  return result;
}

/* ------------------------------------------------------------------ torch.compile around us */
static PyObject *set_callback; /* torch's: gives its evaluator another callback in this thread (None: frames run as they are), returns the one before */

/* What torch.compile's evaluator did in this thread: while we are called it must not look into our own frames. NULL: it does nothing. */
PyObject *ts_peer_pause(void) {
  _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get());
  if (now == _PyEval_EvalFrameDefault || now == hook || !set_callback) return NULL;
  PyObject *was = PyObject_CallOneArg(set_callback, Py_None);
  if (!was) PyErr_Clear();
  if (was == Py_None) Py_CLEAR(was);
  return was;
}

void ts_peer_resume(PyObject *was) {
  if (!was) return;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject *r = PyObject_CallOneArg(set_callback, was);
  Py_DECREF(was);
  if (!r) PyErr_Clear();
  Py_XDECREF(r);
  PyErr_Restore(type, value, trace);
}

/* ------------------------------------------------------------------ leaving a frame that we did not run */
#if PY_VERSION_HEX >= 0x030C0000
static PyCodeObject *stub; /* `def stub(): return None`: running it makes the interpreter clear and pop the frame */

static void retire(PyThreadState *ts, RawFrame *frame) {
  PyObject *error = PyErr_GetRaisedException();
  PyCodeObject *code = FRAME_CODE(frame);
  for (int i = 0; i < code->co_nlocalsplus; i++) Py_CLEAR(frame->localsplus[i]);
#if PY_VERSION_HEX < 0x030D0000
  frame->f_code = (PyCodeObject *)Py_NewRef(stub);
  frame->prev_instr = _PyCode_CODE(stub) - 1;
#else
  frame->f_executable = Py_NewRef(stub);
  frame->instr_ptr = _PyCode_CODE(stub);
#endif
  frame->stacktop = stub->co_nlocalsplus;
  Py_DECREF(code);
  PyObject *none = _PyEval_EvalFrameDefault(ts, frame, 0);
  Py_XDECREF(none);
  PyErr_SetRaisedException(error);
}
#else
static void retire(PyThreadState *ts, RawFrame *frame) {} /* 3.11: the caller clears and pops */
#endif

/* ------------------------------------------------------------------ the hook */
/* Borrowed Dispatcher for this code under the present key; NULL: skip (or an error, cleared: a broken policy must not break programs). */
static PyObject *known(PyCodeObject *code, PyObject *function) {
  void *slot = NULL;
  if (GetExtra((PyObject *)code, extra_index, &slot) < 0) { PyErr_Clear(); return NULL; }
  PyObject *table = slot, *found;
  if (table && (found = PyDict_GetItemWithError(table, key))) return found == Py_None ? NULL : found;
  if (PyErr_Occurred()) { PyErr_Clear(); return NULL; }
  int was = ts_hook_suspend();
  PyObject *peer = ts_peer_pause();
  found = on_frame ? PyObject_CallFunctionObjArgs(on_frame, key, function, NULL) : Py_NewRef(Py_None);
  ts_peer_resume(peer);
  ts_hook_resume(was);
  if (!found) { PyErr_WriteUnraisable(function); return NULL; }
  if (GetExtra((PyObject *)code, extra_index, &slot) == 0 && slot) table = slot; /* the callback may have come here itself */
  else if (!(table = PyDict_New()) || SetExtra((PyObject *)code, extra_index, table) < 0) { Py_XDECREF(table); table = NULL; }
  if (!table || PyDict_SetItem(table, key, found) < 0) PyErr_Clear(), table = NULL;
  Py_DECREF(found);
  if (!table || found == Py_None) return NULL;
  return found; /* the table holds it */
}

static PyObject *hook(PyThreadState *ts, RawFrame *frame, int throwflag) {
  if (!active || throwflag || frame == passed || frame->owner != FRAME_OWNED_BY_THREAD) return evaluate(ts, frame, throwflag);
  PyCodeObject *code = FRAME_CODE(frame);
  int flags = code->co_flags;
  PyObject *function = FRAME_FUNCTION(frame);
  PyCodeObject *first = entering;
  entering = NULL;
  if (code == first || !(flags & CO_OPTIMIZED) || flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR) || !function || !PyFunction_Check(function))
    return evaluate(ts, frame, throwflag);
  PyObject *dispatcher = known(code, function), *result = NULL;
  if (dispatcher == ts_run_plain) { /* marked: neither it nor what it calls */
    int was = ts_hook_suspend();
    result = evaluate(ts, frame, throwflag);
    ts_hook_resume(was);
    return result;
  }
  if (!dispatcher || !Py_IS_TYPE(dispatcher, &Dispatcher_Type)) return evaluate(ts, frame, throwflag);
  Py_INCREF(dispatcher);
  int r = ts_dispatcher_frame(dispatcher, frame->localsplus, function, &result);
  if (r > 0) result = ts_follow(result, key, function);
  Py_DECREF(dispatcher);
  if (r == 0) return evaluate(ts, frame, throwflag);
  retire(ts, frame);
  return r < 0 ? NULL : result;
}

/* ------------------------------------------------------------------ switching on and off */
HookState ts_hook_enter(PyObject *new_key, PyObject *function) {
  HookState s = {active, key};
  PyInterpreterState *interp = PyInterpreterState_Get();
  _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interp);
  if (now == hook) buried = 0;
  else if (!(buried && users)) {
    before = now == _PyEval_EvalFrameDefault ? NULL : now;
    buried = 0;
    _PyInterpreterState_SetEvalFrameFunc(interp, hook);
  }
  users++, depth++;
  active = 1;
  key = new_key;
  entering = PyFunction_Check(function) ? (PyCodeObject *)PyFunction_GET_CODE(function) : NULL;
  return s;
}

void ts_hook_leave(HookState s) {
  active = s.active, key = s.key, entering = NULL;
  depth--;
  if (--users > 0) return;
  PyInterpreterState *interp = PyInterpreterState_Get();
  _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interp);
  if (now == hook) _PyInterpreterState_SetEvalFrameFunc(interp, before ? before : _PyEval_EvalFrameDefault);
  else buried = now != _PyEval_EvalFrameDefault && now != before;
}

int ts_hook_suspend(void) {
  int was = active;
  active = 0;
  return was;
}
void ts_hook_resume(int was) { active = was; }

static void after_fork(void) { users = depth; } /* only the forking thread lives on */

/* ------------------------------------------------------------------ module */
static void free_table(void *table) { Py_XDECREF((PyObject *)table); }

static PyObject *py_suspend(PyObject *self, PyObject *unused) { return PyLong_FromLong(ts_hook_suspend()); }
static PyObject *py_resume(PyObject *self, PyObject *was) {
  ts_hook_resume((int)PyLong_AsLong(was));
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}
static PyObject *py_setup(PyObject *self, PyObject *fn) {
  Py_XSETREF(on_frame, Py_NewRef(fn));
  Py_RETURN_NONE;
}
static PyObject *py_installed(PyObject *self, PyObject *unused) {
  return PyBool_FromLong(_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) == hook);
}
/* run_hooked(key, function, *args): call with the hook on, as a Dispatcher does for a function that cannot be captured */
static PyObject *py_run(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  if (n < 2) { PyErr_SetString(PyExc_TypeError, "run_hooked(key, function, *args)"); return NULL; }
  HookState s = ts_hook_enter(args[0], args[1]);
  PyObject *result = PyObject_Vectorcall(args[1], args + 2, (size_t)(n - 2), NULL);
  ts_hook_leave(s);
  return result;
}
static PyObject *py_setup_peer(PyObject *self, PyObject *fn) {
  Py_XSETREF(set_callback, Py_NewRef(fn));
  Py_RETURN_NONE;
}
/* forget(function): what the hook knows of its code */
static PyObject *py_forget(PyObject *self, PyObject *function) {
  if (!PyFunction_Check(function)) { PyErr_SetString(PyExc_TypeError, "forget takes a function"); return NULL; }
  if (SetExtra(PyFunction_GET_CODE(function), extra_index, NULL) < 0) return NULL;
  Py_RETURN_NONE;
}

PyMethodDef ts_hook_methods[] = {
    {"hook_suspend", py_suspend, METH_NOARGS, "switch the hook off in this thread; returns what hook_resume wants"},
    {"hook_resume", py_resume, METH_O, NULL},
    {"hook_installed", py_installed, METH_NOARGS, "is our evaluator the interpreter's present one?"},
    {"setup_hook", py_setup, METH_O, "set the callback (key, function) -> Dispatcher | None"},
    {"setup_peer", py_setup_peer, METH_O, "torch's function that sets what its frame evaluator does"},
    {"run_hooked", (PyCFunction)(void (*)(void))py_run, METH_FASTCALL, "run_hooked(key, function, *args)"},
    {"forget", py_forget, METH_O, "forget(function): drop what the hook knows of its code"},
    {NULL},
};

int ts_hook_init(PyObject *module) {
  extra_index = RequestIndex(free_table);
  if (extra_index < 0) { PyErr_SetString(PyExc_ImportError, "torchsmith: no free extra slot in code objects"); return -1; }
  pthread_atfork(NULL, NULL, after_fork);
#if PY_VERSION_HEX >= 0x030C0000
  PyObject *ns = PyDict_New(), *r;
  if (!ns) return -1;
  PyDict_SetItemString(ns, "__builtins__", PyEval_GetBuiltins());
  r = PyRun_String("def stub(): return None", Py_file_input, ns, ns);
  PyObject *fn = r ? PyDict_GetItemString(ns, "stub") : NULL;
  if (fn) stub = (PyCodeObject *)Py_NewRef(PyFunction_GET_CODE(fn));
  Py_XDECREF(r), Py_DECREF(ns);
  if (!stub) return -1;
#endif
  return 0;
}
