/* Dispatcher: the callable a user holds. Binds arguments, tries entries, and asks Python (on_miss) when none fits.
 *
 * A Dispatcher without a function serves the frame hook: it then belongs to a code object, and every call brings its function.
 */
#include "frame.h"
#include <structmember.h>

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *fn;       /* the user's function; NULL for the hook's dispatchers */
  PyObject *self_obj; /* bound object, or NULL */
  PyObject *code;
  PyObject *names, *free_names;
  PyObject *entries; /* tuple of Entry, replaced as a whole */
  PyObject *on_miss; /* callable(dispatcher, function, args, kwargs) -> result | RUN_HOOKED | RUN_PLAIN */
  PyObject *state;   /* whatever Python keeps here */
  PyObject *key;     /* names the settings: functions compiled by the hook under them belong together */
  PyObject *dict, *weakrefs;
  int argcount, posonly, kwonly, has_args, has_kwargs, n_params;
  int last;  /* entry that served last */
  int eager; /* 1: always run the function as it is, with the hook; 2: without */
} Dispatcher;

/* What handlers answer besides a result. */
PyObject *ts_run_hooked, *ts_run_plain, *ts_go_on, *ts_elsewhere;
static PyObject *on_gate;              /* callable(dispatcher, function, args, kwargs, reason) -> result | RUN_HOOKED | RUN_PLAIN | GO_ON */
static int gate;                       /* stance other than the default: ask on_gate first; GATE_FORCED: not for frames that the hook or a rest brings */
static PyObject *peer, *peer_name, *peer_default; /* PyTorch's own stance: a namespace, the name in it, what it holds by default */
static _Thread_local int suspended;    /* this thread is capturing or compiling: compiled functions run as they are */
enum { GATE_STANCE = 1, GATE_FOREIGN = 2, GATE_FORCED = 2 };

#define MAX_SMALL 16

static inline int gated(void) {
  return gate || (peer && PyDict_GetItem(peer, peer_name) != peer_default);
}

static void drop(PyObject **locals, int n) {
  for (int i = 0; i < n; i++) Py_CLEAR(locals[i]);
}

static int find_name(Dispatcher *d, PyObject *name, int from, int to) {
  for (int i = from; i < to; i++) if (PyTuple_GET_ITEM(d->names, i) == name) return i;
  for (int i = from; i < to; i++) {
    int r = PyUnicode_Compare(PyTuple_GET_ITEM(d->names, i), name);
    if (r == 0) return i;
    if (r == -1 && PyErr_Occurred()) PyErr_Clear();
  }
  return -1;
}

/* Bind as Python would. 1: done; 0: does not fit (the caller lets Python raise its own TypeError); -1: error. Fills `locals`
 * (zeroed, n_params long) with new references. */
static int bind(Dispatcher *d, PyObject *fn, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **locals) {
  Py_ssize_t total = nargs + (d->self_obj != NULL);
  int named = d->argcount + d->kwonly, at_args = named, at_kwargs = named + d->has_args;
  PyObject *extra = NULL;
  if (total > d->argcount && !d->has_args) return 0;
  int k = 0, rest = 0;
  PyObject *first = d->self_obj; /* goes to *args where there is no parameter for it */
  if (first && d->argcount > 0) locals[k++] = Py_NewRef(first), first = NULL;
  Py_ssize_t i = 0;
  for (; i < nargs && k < d->argcount; i++) locals[k++] = Py_NewRef(args[i]);
  if (d->has_args) {
    locals[at_args] = PyTuple_New(nargs - i + (first != NULL));
    if (!locals[at_args]) return -1;
    if (first) PyTuple_SET_ITEM(locals[at_args], rest++, Py_NewRef(first));
    for (Py_ssize_t j = i; j < nargs; j++) PyTuple_SET_ITEM(locals[at_args], rest++, Py_NewRef(args[j]));
  }
  if (d->has_kwargs && !(extra = locals[at_kwargs] = PyDict_New())) return -1;
  Py_ssize_t nkw = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t j = 0; j < nkw; j++) {
    PyObject *name = PyTuple_GET_ITEM(kwnames, j), *value = args[nargs + j];
    int at = find_name(d, name, d->posonly, named);
    if (at < 0) {
      if (!extra) return 0;
      if (PyDict_SetItem(extra, name, value) < 0) return -1;
      continue;
    }
    if (locals[at]) return 0;
    locals[at] = Py_NewRef(value);
  }
  PyObject *defaults = ((PyFunctionObject *)fn)->func_defaults, *kwdefaults = ((PyFunctionObject *)fn)->func_kwdefaults;
  Py_ssize_t n_defaults = defaults && PyTuple_Check(defaults) ? PyTuple_GET_SIZE(defaults) : 0;
  for (int j = 0; j < d->argcount; j++) {
    if (locals[j]) continue;
    Py_ssize_t at = j - (d->argcount - n_defaults);
    if (at < 0) return 0;
    locals[j] = Py_NewRef(PyTuple_GET_ITEM(defaults, at));
  }
  for (int j = d->argcount; j < named; j++) {
    if (locals[j]) continue;
    PyObject *v = kwdefaults && PyDict_Check(kwdefaults) ? PyDict_GetItemWithError(kwdefaults, PyTuple_GET_ITEM(d->names, j)) : NULL;
    if (!v) return PyErr_Occurred() ? -1 : 0;
    locals[j] = Py_NewRef(v);
  }
  return 1;
}

/* Try the entries, the last successful one first. 1: *result; 0: none fits; -1. */
static int try_entries(Dispatcher *d, Frame *f, PyObject **result) {
  PyObject *entries = Py_NewRef(d->entries);
  Py_ssize_t n = PyTuple_GET_SIZE(entries);
  int r = 0, first = d->last < n ? d->last : 0;
  for (Py_ssize_t k = 0; k < n && r == 0; k++) {
    Py_ssize_t i = k == 0 ? first : k <= first ? k - 1 : k;
    r = ts_entry_try((Entry *)PyTuple_GET_ITEM(entries, i), f, result);
    if (r == 1) d->last = (int)i;
  }
  Py_DECREF(entries);
  return r;
}

/* The arguments as (args, kwargs), self included. */
static int pack(Dispatcher *d, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **tuple, PyObject **dict) {
  int shift = d->self_obj != NULL;
  *dict = PyDict_New();
  *tuple = PyTuple_New(nargs + shift);
  if (!*tuple || !*dict) goto fail;
  if (shift) PyTuple_SET_ITEM(*tuple, 0, Py_NewRef(d->self_obj));
  for (Py_ssize_t i = 0; i < nargs; i++) PyTuple_SET_ITEM(*tuple, i + shift, Py_NewRef(args[i]));
  for (Py_ssize_t j = 0; kwnames && j < PyTuple_GET_SIZE(kwnames); j++)
    if (PyDict_SetItem(*dict, PyTuple_GET_ITEM(kwnames, j), args[nargs + j]) < 0) goto fail;
  return 0;
fail:
  Py_CLEAR(*tuple);
  Py_CLEAR(*dict);
  return -1;
}

static PyObject *run_plain(Dispatcher *d, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  if (!d->self_obj) return PyObject_Vectorcall(d->fn, args, (size_t)nargs, kwnames);
  PyObject *tuple, *dict, *result;
  if (pack(d, args, nargs, kwnames, &tuple, &dict) < 0) return NULL;
  result = PyObject_Call(d->fn, tuple, dict);
  Py_DECREF(tuple), Py_DECREF(dict);
  return result;
}

/* Run the function as it is; functions it calls may be compiled by the hook. */
static PyObject *run_eager(Dispatcher *d, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, int hook) {
  if (!hook) {
    int was = ts_hook_suspend(); /* not even the hook of a caller */
    PyObject *result = run_plain(d, args, nargs, kwnames);
    ts_hook_resume(was);
    return result;
  }
  Py_INCREF(d);
  PyObject *key = Py_NewRef(d->key);
  HookState before = ts_hook_enter(key, d->fn);
  PyObject *result = run_plain(d, args, nargs, kwnames);
  ts_hook_leave(before);
  Py_DECREF(key);
  Py_DECREF(d);
  return result;
}

static PyObject *ask(Dispatcher *d, PyObject *handler, PyObject *fn, PyObject *tuple, PyObject *dict, int reason) {
  int hook = ts_hook_suspend();
  PyObject *r, *why = PyLong_FromLong(reason), *peer = ts_peer_pause();
  r = why ? PyObject_CallFunctionObjArgs(handler, (PyObject *)d, fn, tuple, dict, reason ? why : NULL, NULL) : NULL;
  Py_XDECREF(why);
  ts_peer_resume(peer);
  ts_hook_resume(hook);
  return r;
}

static PyObject *dispatched(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
  Dispatcher *d = (Dispatcher *)self;
  Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  if (!d->fn) { PyErr_SetString(PyExc_TypeError, "this dispatcher belongs to the frame hook"); return NULL; }
  if (suspended || d->eager == 2) return run_plain(d, args, nargs, kwnames);
  State state;
  int complete = ts_state_read(&state), reason = gated() ? GATE_STANCE : complete && ts_state_is_foreign(&state) ? GATE_FOREIGN : 0;
  PyObject *tuple, *dict, *result = NULL;
  if (reason && on_gate) {
    if (pack(d, args, nargs, kwnames, &tuple, &dict) < 0) return NULL;
    result = ask(d, on_gate, d->fn, tuple, dict, reason);
    Py_DECREF(tuple), Py_DECREF(dict);
    int hooked = result == ts_run_hooked;
    if (hooked || result == ts_run_plain) {
      Py_DECREF(result);
      return run_eager(d, args, nargs, kwnames, hooked);
    }
    if (result != ts_go_on) return ts_follow(result, d->key, d->fn);
    Py_DECREF(result);
  }
  if (d->eager) return run_eager(d, args, nargs, kwnames, 1);
  PyObject *small[MAX_SMALL] = {NULL}, **locals = small;
  if (d->n_params > MAX_SMALL && !(locals = PyMem_Calloc((size_t)d->n_params, sizeof *locals))) return PyErr_NoMemory();
  int r = bind(d, d->fn, args, nargs, kwnames, locals);
  if (r == 1) {
    PyFunctionObject *fn = (PyFunctionObject *)d->fn;
    Frame f = {locals, d->n_params, fn->func_globals, fn->func_closure, &state, complete, d->names, d->free_names};
    if (fn->func_code != d->code) r = 2; /* the function's code was replaced: nothing compiled applies */
    else r = try_entries(d, &f, &result);
    drop(locals, d->n_params);
    if (locals != small) PyMem_Free(locals);
    if (r == 1) return ts_follow(result, d->key, d->fn);
    if (r < 0) return NULL;
    if (r == 3) return run_eager(d, args, nargs, kwnames, 1);
    if (pack(d, args, nargs, kwnames, &tuple, &dict) < 0) return NULL;
    result = ask(d, d->on_miss, d->fn, tuple, dict, 0);
    Py_DECREF(tuple), Py_DECREF(dict);
    int hooked = result == ts_run_hooked;
    if (!hooked && result != ts_run_plain) return ts_follow(result, d->key, d->fn);
    Py_DECREF(result);
    return run_eager(d, args, nargs, kwnames, hooked);
  }
  drop(locals, d->n_params);
  if (locals != small) PyMem_Free(locals);
  return r < 0 ? NULL : run_plain(d, args, nargs, kwnames);
}

static PyObject *dispatch(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
  PyObject *peer = ts_peer_pause(), *result = dispatched(self, args, nargsf, kwnames);
  ts_peer_resume(peer);
  return result;
}

int ts_point_handled(PyObject *self) {
  PyObject *names = ((Dispatcher *)self)->names;
  Py_ssize_t n = PyTuple_GET_SIZE(names);
  return n && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, n - 1), "handled exception") == 0;
}

/* The hook brings a frame's arguments, or ts_follow its state. 1: *result (which may be pending, or NULL with an exception); 0: run the
 * frame; -1: exception. */
int ts_dispatcher_frame(PyObject *self, PyObject **locals, PyObject *function, PyObject **result) {
  Dispatcher *d = (Dispatcher *)self;
  PyFunctionObject *fn = (PyFunctionObject *)function;
  *result = NULL;
  if (suspended || d->eager) return 0;
  State state;
  int complete = ts_state_read(&state), asks = gate != GATE_FORCED && gated(), r;
  if (complete && ts_state_is_foreign(&state)) return 0;
  Frame f = {locals, d->n_params, fn->func_globals, fn->func_closure, &state, complete, d->names, d->free_names};
  if (!asks && (r = try_entries(d, &f, result))) return r == 3 ? 0 : r;
  PyObject *tuple = NULL, *dict = NULL;
  int named = d->argcount + d->kwonly;
  Py_ssize_t more = d->has_args ? PyTuple_GET_SIZE(locals[named]) : 0;
  dict = d->has_kwargs ? PyDict_Copy(locals[named + d->has_args]) : PyDict_New();
  tuple = PyTuple_New(d->argcount + more);
  if (!tuple || !dict) goto fail;
  for (int i = 0; i < d->argcount; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(locals[i]));
  for (Py_ssize_t i = 0; i < more; i++) PyTuple_SET_ITEM(tuple, d->argcount + i, Py_NewRef(PyTuple_GET_ITEM(locals[named], i)));
  for (int i = d->argcount; i < named; i++)
    if (PyDict_SetItem(dict, PyTuple_GET_ITEM(d->names, i), locals[i]) < 0) goto fail;
  *result = asks ? ask(d, on_gate, function, tuple, dict, GATE_STANCE) : Py_NewRef(ts_go_on);
  if (*result == ts_go_on) {
    Py_CLEAR(*result);
    r = asks ? try_entries(d, &f, result) : 0;
    if (r == 3) *result = Py_NewRef(ts_run_hooked);
    if (r == 0) *result = ask(d, d->on_miss, function, tuple, dict, 0);
  }
  Py_DECREF(tuple), Py_DECREF(dict);
  if (*result != ts_run_hooked && *result != ts_run_plain) return *result ? 1 : -1;
  Py_CLEAR(*result);
  return 0;
fail:
  Py_XDECREF(tuple), Py_XDECREF(dict);
  return -1;
}

/* ------------------------------------------------------------------ the type */
static PyTypeObject BoundDispatcher_Type;

static PyObject *attribute_int(PyObject *code, const char *name, int *out) {
  PyObject *v = PyObject_GetAttrString(code, name);
  if (v) *out = (int)PyLong_AsLong(v);
  return v;
}

static PyObject *dispatcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"function", "on_miss", "bound", "code", NULL};
  PyObject *fn, *on_miss, *bound = NULL, *code = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OO", names, &fn, &on_miss, &bound, &code)) return NULL;
  if (fn != Py_None) {
    if (!PyFunction_Check(fn)) { PyErr_Format(PyExc_TypeError, "Dispatcher takes a Python function, not %.100s", Py_TYPE(fn)->tp_name); return NULL; }
    code = PyFunction_GET_CODE(fn);
  } else if (!code || !PyCode_Check(code)) { PyErr_SetString(PyExc_TypeError, "Dispatcher needs a function or a code object"); return NULL; }
  if (bound && bound != Py_None && type == &Dispatcher_Type) type = &BoundDispatcher_Type;
  Dispatcher *d = (Dispatcher *)type->tp_alloc(type, 0);
  if (!d) return NULL;
  int flags = 0;
  PyObject *a = attribute_int(code, "co_argcount", &d->argcount), *b = attribute_int(code, "co_posonlyargcount", &d->posonly);
  PyObject *c = attribute_int(code, "co_kwonlyargcount", &d->kwonly), *e = attribute_int(code, "co_flags", &flags);
  PyObject *all = PyObject_GetAttrString(code, "co_varnames"), *free_names = PyObject_GetAttrString(code, "co_freevars");
  Py_XDECREF(a), Py_XDECREF(b), Py_XDECREF(c), Py_XDECREF(e);
  d->has_args = (flags & CO_VARARGS) != 0, d->has_kwargs = (flags & CO_VARKEYWORDS) != 0;
  d->n_params = d->argcount + d->kwonly + d->has_args + d->has_kwargs;
  d->names = all ? PyTuple_GetSlice(all, 0, d->n_params) : NULL;
  d->free_names = free_names;
  Py_XDECREF(all);
  d->vectorcall = dispatch;
  d->fn = fn == Py_None ? NULL : Py_NewRef(fn);
  d->code = fn == Py_None ? NULL : Py_NewRef(code); /* the hook's dispatchers live in the code's extra slot: no cycle */
  d->self_obj = bound && bound != Py_None ? Py_NewRef(bound) : NULL;
  d->on_miss = Py_NewRef(on_miss);
  d->entries = PyTuple_New(0);
  d->state = Py_NewRef(Py_None), d->key = Py_NewRef(Py_None);
  if (!d->names || !d->free_names || !d->entries || PyErr_Occurred()) { Py_DECREF(d); return NULL; }
  return (PyObject *)d;
}

static int dispatcher_traverse(Dispatcher *d, visitproc visit, void *arg) {
  Py_VISIT(d->fn); Py_VISIT(d->self_obj); Py_VISIT(d->code); Py_VISIT(d->entries); Py_VISIT(d->on_miss); Py_VISIT(d->state); Py_VISIT(d->key); Py_VISIT(d->dict);
  return 0;
}
static int dispatcher_clear(Dispatcher *d) {
  Py_CLEAR(d->self_obj); Py_CLEAR(d->on_miss); Py_CLEAR(d->state); Py_CLEAR(d->key); Py_CLEAR(d->dict);
  Py_CLEAR(d->fn); Py_CLEAR(d->code); Py_CLEAR(d->entries);
  return 0;
}
static void dispatcher_dealloc(Dispatcher *d) {
  PyObject_GC_UnTrack(d);
  if (d->weakrefs) PyObject_ClearWeakRefs((PyObject *)d);
  dispatcher_clear(d);
  Py_CLEAR(d->names); Py_CLEAR(d->free_names);
  Py_TYPE(d)->tp_free((PyObject *)d);
}

static PyObject *dispatcher_get(PyObject *self, PyObject *obj, PyObject *type) {
  if (!obj || obj == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, obj);
}
static PyObject *bound_get(PyObject *self, PyObject *obj, PyObject *type) { return Py_NewRef(self); }

static PyObject *get_entries(Dispatcher *d, void *c) { return Py_NewRef(d->entries); }
static int set_entries(Dispatcher *d, PyObject *value, void *c) {
  if (!value || !PyTuple_CheckExact(value)) { PyErr_SetString(PyExc_TypeError, "entries: a tuple of Entry"); return -1; }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++)
    if (!Py_IS_TYPE(PyTuple_GET_ITEM(value, i), &Entry_Type)) { PyErr_SetString(PyExc_TypeError, "entries: a tuple of Entry"); return -1; }
  Py_XSETREF(d->entries, Py_NewRef(value));
  d->last = PyTuple_GET_SIZE(value) ? (int)PyTuple_GET_SIZE(value) - 1 : 0;
  return 0;
}

/* bind(args, kwargs) -> the parameters' values in order, for tests and for the Python evaluator; None where they do not fit */
static PyObject *dispatcher_bind(Dispatcher *d, PyObject *call_args) {
  PyObject *args, *kwargs, *fn = d->fn, *result = NULL;
  if (!PyArg_ParseTuple(call_args, "O!O!|O", &PyTuple_Type, &args, &PyDict_Type, &kwargs, &fn)) return NULL;
  if (!fn || !PyFunction_Check(fn)) { PyErr_SetString(PyExc_TypeError, "bind needs a function"); return NULL; }
  Py_ssize_t n = PyTuple_GET_SIZE(args), m = PyDict_GET_SIZE(kwargs), pos = 0, i = n;
  PyObject **flat = PyMem_Calloc((size_t)(n + m) + 1, sizeof *flat), **locals = PyMem_Calloc((size_t)d->n_params + 1, sizeof *locals), *k, *v;
  PyObject *names = PyTuple_New(m);
  if (!flat || !locals || !names) { PyErr_NoMemory(); goto done; }
  for (Py_ssize_t j = 0; j < n; j++) flat[j] = PyTuple_GET_ITEM(args, j);
  while (PyDict_Next(kwargs, &pos, &k, &v)) { PyTuple_SET_ITEM(names, i - n, Py_NewRef(k)); flat[i++] = v; }
  PyObject *bound = d->self_obj; /* args carry self already */
  d->self_obj = NULL;
  int r = bind(d, fn, flat, n, names, locals);
  d->self_obj = bound;
  if (r == 1) {
    result = PyTuple_New(d->n_params);
    for (int j = 0; result && j < d->n_params; j++) PyTuple_SET_ITEM(result, j, Py_NewRef(locals[j]));
  } else if (r == 0) result = Py_NewRef(Py_None);
  drop(locals, d->n_params);
done:
  PyMem_Free(flat), PyMem_Free(locals);
  Py_XDECREF(names);
  return result;
}

/* again(function, args, kwargs) -> (result,) of the entry that fits now, or None; self is in args */
static PyObject *dispatcher_again(Dispatcher *d, PyObject *call_args) {
  PyObject *fn, *result = NULL, *locals;
  if (!PyArg_ParseTuple(call_args, "O!OO", &PyFunction_Type, &fn, &(PyObject *){NULL}, &(PyObject *){NULL})) return NULL;
  PyObject *bind_args = PyTuple_Pack(3, PyTuple_GET_ITEM(call_args, 1), PyTuple_GET_ITEM(call_args, 2), fn);
  if (!bind_args) return NULL;
  locals = dispatcher_bind(d, bind_args);
  Py_DECREF(bind_args);
  if (!locals || locals == Py_None) return locals;
  PyFunctionObject *f = (PyFunctionObject *)fn;
  State state;
  int complete = ts_state_read(&state);
  Frame frame = {((PyTupleObject *)locals)->ob_item, d->n_params, f->func_globals, f->func_closure, &state, complete, d->names, d->free_names};
  int r = try_entries(d, &frame, &result);
  Py_DECREF(locals);
  if (r < 0 || (r == 1 && !result)) return NULL;
  if (r == 0) Py_RETURN_NONE;
  if (r == 3) result = Py_NewRef(ts_run_hooked);
  PyObject *one = PyTuple_Pack(1, result);
  Py_DECREF(result);
  return one;
}

static PyObject *dispatcher_repr(Dispatcher *d) {
  return PyUnicode_FromFormat("<torchsmith compiled %R>", d->fn ? d->fn : Py_None);
}

static PyObject *dispatcher_reduce(PyObject *self, PyObject *unused) { return PyObject_CallMethod(((Dispatcher *)self)->state, "reduce", "O", self); }
static PyObject *dispatcher_copy(PyObject *self, PyObject *unused) { return Py_NewRef(self); }

static PyMemberDef dispatcher_members[] = {
    {"function", T_OBJECT, offsetof(Dispatcher, fn), READONLY, "the user's function"},
    {"__self__", T_OBJECT, offsetof(Dispatcher, self_obj), READONLY, "bound object or None"},
    {"names", T_OBJECT, offsetof(Dispatcher, names), READONLY, "parameter names in order"},
    {"free_names", T_OBJECT, offsetof(Dispatcher, free_names), READONLY, "closure names in order"},
    {"on_miss", T_OBJECT, offsetof(Dispatcher, on_miss), 0, NULL},
    {"state", T_OBJECT, offsetof(Dispatcher, state), 0, "what Python keeps for this function"},
    {"key", T_OBJECT, offsetof(Dispatcher, key), 0, "hashable by identity; names the settings"},
    {"eager", T_INT, offsetof(Dispatcher, eager), 0, "1: run as it is under the hook, 2: without"},
    {NULL},
};
static PyGetSetDef dispatcher_getset[] = {
    {"entries", (getter)get_entries, (setter)set_entries, "compilations, tried in order", NULL},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};
static PyMethodDef dispatcher_methods[] = {
    {"bind", (PyCFunction)dispatcher_bind, METH_VARARGS, "bind(args, kwargs) -> parameter values or None"},
    {"again", (PyCFunction)dispatcher_again, METH_VARARGS, "again(function, args, kwargs) -> (result,) or None"},
    {"__reduce__", dispatcher_reduce, METH_NOARGS, NULL},
    {"__copy__", dispatcher_copy, METH_NOARGS, NULL},
    {"__deepcopy__", dispatcher_copy, METH_O, NULL},
    {NULL},
};

PyTypeObject Dispatcher_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "torchsmith.capture._frame.Dispatcher",
    .tp_basicsize = sizeof(Dispatcher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_doc = "Dispatcher(function, on_miss, bound=None): a compiled function.",
    .tp_new = dispatcher_new,
    .tp_dealloc = (destructor)dispatcher_dealloc,
    .tp_traverse = (traverseproc)dispatcher_traverse,
    .tp_clear = (inquiry)dispatcher_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Dispatcher, vectorcall),
    .tp_repr = (reprfunc)dispatcher_repr,
    .tp_descr_get = dispatcher_get,
    .tp_dictoffset = offsetof(Dispatcher, dict),
    .tp_weaklistoffset = offsetof(Dispatcher, weakrefs),
    .tp_members = dispatcher_members,
    .tp_getset = dispatcher_getset,
    .tp_methods = dispatcher_methods,
    .tp_getattro = PyObject_GenericGetAttr,
    .tp_setattro = PyObject_GenericSetAttr,
};

/* With a bound object it is no method descriptor: as the attribute of a class it is not bound again. */
static PyTypeObject BoundDispatcher_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "torchsmith.capture._frame.BoundDispatcher",
    .tp_base = &Dispatcher_Type,
    .tp_basicsize = sizeof(Dispatcher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "A Dispatcher with its first argument.",
    .tp_dealloc = (destructor)dispatcher_dealloc,
    .tp_traverse = (traverseproc)dispatcher_traverse,
    .tp_clear = (inquiry)dispatcher_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Dispatcher, vectorcall),
    .tp_descr_get = bound_get,
};
int ts_dispatcher_init(void) { return PyType_Ready(&Dispatcher_Type) < 0 || PyType_Ready(&BoundDispatcher_Type) < 0 ? -1 : 0; }

/* ------------------------------------------------------------------ settings */
PyObject *ts_setup_dispatch(PyObject *self, PyObject *fn) {
  Py_XSETREF(on_gate, Py_NewRef(fn));
  Py_RETURN_NONE;
}
PyObject *ts_set_gate(PyObject *self, PyObject *arg) {
  gate = (int)PyLong_AsLong(arg); /* GATE_STANCE, GATE_FORCED or 0 */
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}
/* watch_stance(namespace, default): ask the gate handler while namespace["_stance"] is another object */
PyObject *ts_watch_stance(PyObject *self, PyObject *args) {
  PyObject *space, *usual;
  if (!PyArg_ParseTuple(args, "O!O", &PyDict_Type, &space, &usual)) return NULL;
  if (!peer_name && !(peer_name = PyUnicode_InternFromString("_stance"))) return NULL;
  Py_XSETREF(peer_default, Py_NewRef(usual));
  Py_XSETREF(peer, Py_NewRef(space));
  Py_RETURN_NONE;
}
/* suspend(+1 | -1): this thread starts or ends capturing */
PyObject *ts_suspend(PyObject *self, PyObject *arg) {
  suspended += (int)PyLong_AsLong(arg);
  return PyErr_Occurred() ? NULL : PyLong_FromLong(suspended);
}
