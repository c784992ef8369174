/* One compilation of a function: its guards, where the graph's inputs come from, what to call, how the result looks. */
#include "frame.h"
#include "guards.h"
#include <structmember.h>

enum { REC_OUT, REC_CONST, REC_SOURCE, REC_TUPLE, REC_LIST, REC_DICT };
static PyObject *profiled; /* callable(name, call, args): runs the call inside record_function */

PyObject *ts_setup_profiled(PyObject *self, PyObject *fn) {
  Py_XSETREF(profiled, Py_NewRef(fn));
  Py_RETURN_NONE;
}

/* ------------------------------------------------------------------ construction */
static int read_nodes(Entry *e, PyObject *nodes) {
  e->n_nodes = (int)PyTuple_GET_SIZE(nodes);
  e->nodes = PyMem_Calloc((size_t)e->n_nodes + 1, sizeof(Node));
  e->unstable = PyMem_Calloc((size_t)e->n_nodes + 1, 1);
  if (!e->nodes || !e->unstable) { PyErr_NoMemory(); return -1; }
  for (int i = 0; i < e->n_nodes; i++) {
    Node *n = &e->nodes[i];
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(nodes, i), "iiiOO", &n->kind, &n->base, &n->arg, &n->key, &n->extra)) {
      n->key = n->extra = NULL;
      return -1;
    }
    Py_INCREF(n->key), Py_INCREF(n->extra);
    if (n->kind < 0 || n->kind >= NODE_KINDS || n->base >= i) { PyErr_SetString(PyExc_ValueError, "Entry: bad node"); return -1; }
    if (n->kind != NODE_COMPUTED) continue;
    for (Py_ssize_t k = 0, size = PyTuple_Check(n->extra) ? PyTuple_GET_SIZE(n->extra) : -1; k < size || size < 0; k++) {
      long of = size < 0 ? -1 : PyLong_AsLong(PyTuple_GET_ITEM(n->extra, k));
      if (of < 0 || of >= i) { if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "Entry: bad computed node"); return -1; }
    }
  }
  return 0;
}

static PyObject *entry_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"nodes", "guards", "inputs", "n_graph_inputs", "call", "recipe", "finish", "name", "source", "globals", "resume", "anew", NULL};
  PyObject *nodes, *guards, *inputs, *call, *recipe, *finish, *name, *source, *globals, *resume = Py_None, *anew = Py_False;
  int n_graph;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!iOOOOOO|OO", names, &PyTuple_Type, &nodes, &PyTuple_Type, &guards, &PyTuple_Type, &inputs,
                                   &n_graph, &call, &recipe, &finish, &name, &source, &globals, &resume, &anew))
    return NULL;
  Entry *e = (Entry *)type->tp_alloc(type, 0);
  if (!e) return NULL;
  e->failed = -1;
  e->call = Py_NewRef(call), e->recipe = Py_NewRef(recipe), e->finish = Py_NewRef(finish), e->name = Py_NewRef(name), e->source = Py_NewRef(source);
  e->globals = Py_NewRef(globals), e->resume = Py_NewRef(resume), e->anew = Py_NewRef(anew);
  if (read_nodes(e, nodes) < 0) goto fail;
  e->n_guards = (int)PyTuple_GET_SIZE(guards);
  e->guards = PyMem_Calloc((size_t)e->n_guards + 1, sizeof(GuardOp));
  e->n_inputs = (int)PyTuple_GET_SIZE(inputs);
  e->n_graph = n_graph;
  e->inputs = PyMem_Calloc((size_t)e->n_inputs + 1, sizeof(int));
  if (!e->guards || !e->inputs) { PyErr_NoMemory(); goto fail; }
  for (int i = 0; i < e->n_guards; i++)
    if (ts_guard_read(e, &e->guards[i], PyTuple_GET_ITEM(guards, i)) < 0) goto fail;
  for (int i = 0; i < e->n_inputs; i++) {
    e->inputs[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(inputs, i));
    if (PyErr_Occurred() || e->inputs[i] < 0 || e->inputs[i] >= e->n_nodes) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "Entry: bad input");
      goto fail;
    }
  }
  if (n_graph < 0 || n_graph > e->n_inputs) { PyErr_SetString(PyExc_ValueError, "Entry: bad n_graph_inputs"); goto fail; }
  return (PyObject *)e;
fail:
  Py_DECREF(e);
  return NULL;
}

static int entry_traverse(Entry *e, visitproc visit, void *arg) {
  for (int i = 0; e->nodes && i < e->n_nodes; i++) { Py_VISIT(e->nodes[i].key); Py_VISIT(e->nodes[i].extra); }
  for (int i = 0; e->guards && i < e->n_guards; i++) {
    Py_VISIT(e->guards[i].value);
    if (e->guards[i].tensor) Py_VISIT(e->guards[i].tensor->type);
  }
  for (int i = 0; e->record && i < e->record->n_ops; i++) {
    const RecordOp *op = &e->record->ops[i];
    if (OP_KIND(op) == OP_PIN) Py_VISIT((PyObject *)op->b);
    else if (OP_KIND(op) == OP_TYPE_VERSION) Py_VISIT((PyObject *)OP_POINTER(op));
  }
  Py_VISIT(e->call); Py_VISIT(e->finish); Py_VISIT(e->recipe); Py_VISIT(e->name); Py_VISIT(e->source); Py_VISIT(e->globals); Py_VISIT(e->resume); Py_VISIT(e->anew);
  return 0;
}

static int entry_clear(Entry *e) {
  Record *r = e->record;
  e->record = NULL;
  e->dead = 1;
  ts_record_free(r);
  for (int i = 0; e->nodes && i < e->n_nodes; i++) { Py_CLEAR(e->nodes[i].key); Py_CLEAR(e->nodes[i].extra); }
  for (int i = 0; e->guards && i < e->n_guards; i++) {
    Py_CLEAR(e->guards[i].value);
    if (e->guards[i].tensor) Py_CLEAR(e->guards[i].tensor->type);
  }
  Py_CLEAR(e->call); Py_CLEAR(e->finish); Py_CLEAR(e->recipe); Py_CLEAR(e->name); Py_CLEAR(e->source); Py_CLEAR(e->globals); Py_CLEAR(e->resume); Py_CLEAR(e->anew);
  return 0;
}

static void entry_dealloc(Entry *e) {
  PyObject_GC_UnTrack(e);
  entry_clear(e);
  for (int i = 0; e->guards && i < e->n_guards; i++) {
    ts_tensor_guard_free(e->guards[i].tensor);
    PyMem_Free(e->guards[i].nodes);
    PyMem_Free(e->guards[i].code);
  }
  PyMem_Free(e->nodes), PyMem_Free(e->guards), PyMem_Free(e->inputs), PyMem_Free(e->unstable);
  Py_TYPE(e)->tp_free((PyObject *)e);
}

/* ------------------------------------------------------------------ running */
static PyObject *build(PyObject *recipe, PyObject *outs, PyObject **extra) {
  long tag = PyLong_AsLong(PyTuple_GET_ITEM(recipe, 0));
  PyObject *arg = PyTuple_GET_ITEM(recipe, 1), *made, *sub;
  switch (tag) {
  case REC_OUT: {
    Py_ssize_t i = PyLong_AsSsize_t(arg);
    if (i < 0 || i >= PyTuple_GET_SIZE(outs)) { PyErr_SetString(PyExc_SystemError, "torchsmith: the graph returned too few results"); return NULL; }
    return Py_NewRef(PyTuple_GET_ITEM(outs, i));
  }
  case REC_CONST: return Py_NewRef(arg);
  case REC_SOURCE: return Py_NewRef(extra[PyLong_AsSsize_t(arg)]);
  case REC_TUPLE:
  case REC_LIST: {
    Py_ssize_t n = PyTuple_GET_SIZE(arg);
    made = tag == REC_TUPLE ? PyTuple_New(n) : PyList_New(n);
    for (Py_ssize_t i = 0; made && i < n; i++) {
      if (!(sub = build(PyTuple_GET_ITEM(arg, i), outs, extra))) { Py_DECREF(made); return NULL; }
      if (tag == REC_TUPLE) PyTuple_SET_ITEM(made, i, sub);
      else PyList_SET_ITEM(made, i, sub);
    }
    return made;
  }
  case REC_DICT:
    made = PyDict_New();
    for (Py_ssize_t i = 0; made && i < PyTuple_GET_SIZE(arg); i++) {
      PyObject *pair = PyTuple_GET_ITEM(arg, i);
      sub = build(PyTuple_GET_ITEM(pair, 1), outs, extra);
      if (!sub || PyDict_SetItem(made, PyTuple_GET_ITEM(pair, 0), sub) < 0) Py_CLEAR(made);
      Py_XDECREF(sub);
    }
    return made;
  default: PyErr_SetString(PyExc_SystemError, "torchsmith: bad recipe"); return NULL;
  }
}

/* finish(outs, L, G, C): what cannot be said as a recipe. */
static PyObject *call_finish(Entry *e, Frame *f, PyObject *outs) {
  PyObject *L = PyDict_New(), *C = PyDict_New(), *result = NULL;
  if (!L || !C) goto done;
  for (int i = 0; i < f->n_locals; i++)
    if (f->locals[i] && PyDict_SetItem(L, PyTuple_GET_ITEM(f->names, i), f->locals[i]) < 0) goto done;
  for (Py_ssize_t i = 0; f->closure && f->free_names && i < PyTuple_GET_SIZE(f->closure) && i < PyTuple_GET_SIZE(f->free_names); i++)
    if (PyDict_SetItem(C, PyTuple_GET_ITEM(f->free_names, i), PyTuple_GET_ITEM(f->closure, i)) < 0) goto done;
  PyObject *args[] = {outs, L, f->globals, C};
  result = PyObject_Vectorcall(e->finish, args, 4, NULL);
done:
  Py_XDECREF(L), Py_XDECREF(C);
  return result;
}

static PyObject *run_graph(Entry *e, PyObject **args, int n) {
  if (profiled && ts_profiling()) {
    PyObject *tuple = PyTuple_New(n), *outs;
    if (!tuple) return NULL;
    for (int i = 0; i < n; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    outs = PyObject_CallFunctionObjArgs(profiled, e->name, e->call, tuple, NULL);
    Py_DECREF(tuple);
    return outs;
  }
  return PyObject_Vectorcall(e->call, args, (size_t)n | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* Does the exception that is set mean that the function itself is to be run? It is cleared then. */
static int is_run_anew(Entry *e) {
  int anew = PyErr_ExceptionMatches(ts_elsewhere) || (e->anew == Py_True && PyErr_ExceptionMatches(PyExc_Exception));
  if (!anew && e->anew != Py_True && e->anew != Py_False && PyErr_ExceptionMatches(PyExc_Exception)) {
    PyObject *type, *error, *trace, *answer;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    answer = PyObject_CallOneArg(e->anew, error);
    anew = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (anew) Py_XDECREF(type), Py_XDECREF(error), Py_XDECREF(trace);
    else PyErr_Restore(type, error, trace);
    return anew > 0;
  }
  if (anew) PyErr_Clear();
  return anew;
}

#define SMALL_INPUTS 24
int ts_entry_try(Entry *e, Frame *f, PyObject **result) {
  *result = NULL;
  if (e->dead || (e->globals != Py_None && e->globals != f->globals)) return 0;
  Check c;
  PyObject *small[SMALL_INPUTS + 1], **args = small;
  int r = ts_check_begin(&c, e, f), n = e->n_inputs;
  if (r != 1) { ts_check_end(&c); return r; }
  if (n > SMALL_INPUTS && !(args = PyMem_Malloc(((size_t)n + 1) * sizeof *args))) { ts_check_end(&c); PyErr_NoMemory(); return -1; }
  args[0] = NULL, args++;
  for (int i = 0; i < n; i++) {
    PyObject *v = ts_check_value(&c, e->inputs[i]);
    if (!v) {
      while (i--) Py_DECREF(args[i]);
      ts_check_end(&c);
      if (args - 1 != small) PyMem_Free(args - 1);
      return PyErr_Occurred() ? -1 : 0;
    }
    args[i] = Py_NewRef(v);
  }
  ts_check_end(&c);
  Py_INCREF(e);
  e->hits++;
  int hook = ts_hook_suspend();
  PyObject *outs = run_graph(e, args, e->n_graph);
  if (outs && !PyTuple_CheckExact(outs)) {
    PyObject *t = PySequence_Check(outs) && !ts_is_tensor(outs) ? PySequence_Tuple(outs) : PyTuple_Pack(1, outs);
    Py_SETREF(outs, t);
  }
  r = 1;
  if (outs) *result = e->finish != Py_None ? call_finish(e, f, outs) : build(e->recipe, outs, args + e->n_graph);
  else if (is_run_anew(e)) r = 3;
  if (*result && e->resume != Py_None) *result = ts_pending(e->resume, *result);
  ts_hook_resume(hook);
  Py_XDECREF(outs);
  for (int i = 0; i < n; i++) Py_DECREF(args[i]);
  if (args - 1 != small) PyMem_Free(args - 1);
  Py_DECREF(e);
  return r;
}

static PyMemberDef entry_members[] = {
    {"call", T_OBJECT, offsetof(Entry, call), READONLY, "the compiled graph"},
    {"name", T_OBJECT, offsetof(Entry, name), READONLY, NULL},
    {"source", T_OBJECT, offsetof(Entry, source), READONLY, "what Python knows of this entry"},
    {"resume", T_OBJECT, offsetof(Entry, resume), READONLY, "the site at which it ends, or None"},
    {"hits", T_ULONGLONG, offsetof(Entry, hits), READONLY, "calls served"},
    {"failed", T_INT, offsetof(Entry, failed), READONLY, "number of the guard that failed last"},
    {"dead", T_INT, offsetof(Entry, dead), 0, "set to drop the entry"},
    {NULL},
};

static PyObject *entry_recorded(Entry *e, void *closure) {
  if (!e->record) Py_RETURN_NONE;
  int counts[8] = {0};
  for (int i = 0; i < e->record->n_ops; i++) counts[OP_KIND(&e->record->ops[i])]++;
  return Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:i,s:i}", "dict", counts[OP_DICT], "object_dict", counts[OP_OBJECT_DICT], "type", counts[OP_TYPE],
                       "type_version", counts[OP_TYPE_VERSION], "tensor", counts[OP_TENSOR], "pin", counts[OP_PIN], "guard", counts[OP_GUARD]);
}

/* check(locals, globals, closure) -> bool: the guards alone, for tests and measurements */
static PyObject *entry_check(Entry *e, PyObject *args) {
  PyObject *locals, *globals, *closure;
  if (!PyArg_ParseTuple(args, "O!O!O", &PyTuple_Type, &locals, &PyDict_Type, &globals, &closure)) return NULL;
  State state;
  Frame f = {((PyTupleObject *)locals)->ob_item, (int)PyTuple_GET_SIZE(locals), globals, closure == Py_None ? NULL : closure, &state, 0, NULL, NULL};
  f.state_complete = ts_state_read(&state);
  Check c;
  int r = ts_check_begin(&c, e, &f);
  ts_check_end(&c);
  if (r < 0) return NULL;
  return PyBool_FromLong(r);
}

/* Numbers of the guards that the record does not cover: evaluated on every call. */
static PyObject *entry_evaluated(Entry *e, void *closure) {
  PyObject *list = PyList_New(0);
  for (int i = 0; list && e->record && i < e->record->n_ops; i++) {
    if (OP_KIND(&e->record->ops[i]) != OP_GUARD) continue;
    PyObject *n = PyLong_FromLong(e->record->about[i]);
    if (!n || PyList_Append(list, n) < 0) Py_CLEAR(list);
    Py_XDECREF(n);
  }
  return list;
}

static PyGetSetDef entry_getset[] = {{"evaluated", (getter)entry_evaluated, NULL, "numbers of the guards evaluated on every call", NULL},
                                     {"recorded", (getter)entry_recorded, NULL, "how many witnesses of each kind", NULL}, {NULL}};
static PyMethodDef entry_methods[] = {{"check", (PyCFunction)entry_check, METH_VARARGS, "check(locals, globals, closure) -> bool"}, {NULL}};

PyTypeObject Entry_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "torchsmith.capture._frame.Entry",
    .tp_basicsize = sizeof(Entry),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "One compilation: guards, inputs, call, recipe.",
    .tp_new = entry_new,
    .tp_dealloc = (destructor)entry_dealloc,
    .tp_traverse = (traverseproc)entry_traverse,
    .tp_clear = (inquiry)entry_clear,
    .tp_members = entry_members,
    .tp_getset = entry_getset,
    .tp_methods = entry_methods,
};
