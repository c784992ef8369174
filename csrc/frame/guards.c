/* A guard program run against one call: the full check, and the record that makes the next check cheap.
 *
 * Nodes say where values come from (a Source, flattened); guards say what must hold of them, in order. The full check evaluates
 * everything. While it passes it writes a Record: an ordered list of cheap witnesses ("this dict has version v", "this object's
 * __dict__ is still that dict", "this argument is still that object") which together imply that every value reached through
 * dictionaries of attributes is the same object as before. What witnesses cannot see (tensor metadata, lists, cells, globals) is
 * evaluated on every call. An op may rely on the ops before it: an object is only touched after its holder was verified.
 */
#include "frame.h"
#include "guards.h"
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* dict versions and borrowed weak references: known and wanted */

/* The kinds of guards, and what capture/guards.py calls them. */
#define GUARD_ROWS(ROW) \
  ROW(TENSOR, "tensor") ROW(IDENTITY, "identity") ROW(WEAK_IDENTITY, "weak_identity") ROW(TYPE, "type") ROW(EQUALS, "equals") \
  ROW(LENGTH, "length") ROW(DICT_KEYS, "dict_keys") ROW(MISSING, "missing") ROW(STATE, "global_state") ROW(NO_OVERLAP, "no_overlap") \
  ROW(SHAPE, "shape") ROW(FLOATS, "floats") ROW(PYTHON, "python") ROW(ALIAS, "alias") ROW(FUNCTION, "function") ROW(DISTINCT, "distinct")
#define NUMBER(id, name) GUARD_##id,
#define NAME(id, name) name,
enum { GUARD_ROWS(NUMBER) GUARD_KINDS };
static const char *const guard_names[] = {GUARD_ROWS(NAME)};

#define UNSTABLE 4 /* a node whose record broke this often is evaluated on every call instead */
#define RARELY 16  /* a record that served more calls than this was worth making again (train and eval alternating by the epoch) */

void ts_record_free(Record *r) {
  if (!r || --r->users > 0) return;
  for (int i = 0; i < r->n_ops; i++)
    if (OP_KIND(&r->ops[i]) == OP_PIN) Py_XDECREF((PyObject *)r->ops[i].b);
    else if (OP_KIND(&r->ops[i]) == OP_DICT) ts_version_release(OP_POINTER(&r->ops[i]));
    else if (OP_KIND(&r->ops[i]) == OP_TYPE_VERSION) Py_XDECREF((PyObject *)OP_POINTER(&r->ops[i]));
  PyMem_Free(r->ops);
  PyMem_Free(r->about);
  PyMem_Free(r->slot);
  PyMem_Free(r->values);
  PyMem_Free(r);
}

/* ------------------------------------------------------------------ building a record */
static int push_op(Check *c, int kind, int about, void *a, uintptr_t b) {
  Record *r = c->build;
  if (r->n_ops == r->cap_ops) {
    int cap = r->cap_ops ? 2 * r->cap_ops : 64;
    RecordOp *ops = PyMem_Realloc(r->ops, (size_t)cap * sizeof *ops);
    if (ops) r->ops = ops;
    int *abouts = PyMem_Realloc(r->about, (size_t)cap * sizeof *abouts);
    if (abouts) r->about = abouts;
    if (!ops || !abouts) { c->build_failed = 1; return 0; }
    r->cap_ops = cap;
  }
  r->about[r->n_ops] = about;
  r->ops[r->n_ops++] = (RecordOp){(uintptr_t)a | (uintptr_t)kind, b};
  return 1;
}

/* Was this (kind, pointer) noted already? Remembers it if not. */
static int seen(Check *c, int kind, void *p) {
  if (c->n_seen * 2 >= c->cap_seen) {
    int cap = c->cap_seen ? 2 * c->cap_seen : 256;
    uintptr_t *table = PyMem_Calloc((size_t)cap, sizeof *table);
    if (!table) { c->build_failed = 1; return 1; }
    for (int i = 0; i < c->cap_seen; i++) {
      uintptr_t k = c->seen[i];
      if (!k) continue;
      uint32_t h = (uint32_t)((k >> 3) * 2654435761u) & (uint32_t)(cap - 1);
      while (table[h]) h = (h + 1) & (uint32_t)(cap - 1);
      table[h] = k;
    }
    PyMem_Free(c->seen);
    c->seen = table, c->cap_seen = cap;
  }
  uintptr_t k = (uintptr_t)p + (uintptr_t)kind; /* objects are 8-aligned, kinds are < 8 */
  uint32_t h = (uint32_t)((k >> 3) * 2654435761u) & (uint32_t)(c->cap_seen - 1);
  while (c->seen[h]) {
    if (c->seen[h] == k) return 1;
    h = (h + 1) & (uint32_t)(c->cap_seen - 1);
  }
  c->seen[h] = k;
  c->n_seen++;
  return 0;
}

static void note_dict(Check *c, int node, PyObject *dict) {
  if (!c->build || seen(c, 1, dict)) return;
  const uint64_t *word = ts_version_acquire(dict);
  if (!word) c->build_failed = 1;
  else if (!push_op(c, OP_DICT, node, (void *)word, *word)) ts_version_release(word);
}
static void note_object_dict(Check *c, int node, PyObject *obj, PyObject **slot, PyObject *dict) {
  if (c->build && !seen(c, 2, obj)) push_op(c, OP_OBJECT_DICT, node, slot, (uintptr_t)dict);
}
static void note_type(Check *c, int node, PyObject *obj) {
  if (c->build && (Py_TYPE(obj)->tp_flags & Py_TPFLAGS_HEAPTYPE) && !seen(c, 3, obj)) push_op(c, OP_TYPE, node, &obj->ob_type, (uintptr_t)Py_TYPE(obj));
}
static inline int has_version(PyTypeObject *type) {
  return (PY_VERSION_HEX >= 0x030C0000 || type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG) && type->tp_version_tag;
}
/* 1: noted (or known); 0: this type has no version, look it up each time */
static int note_type_version(Check *c, int node, PyTypeObject *type) {
  if (!c->build) return 0;
  if (!has_version(type)) return 0;
  if (!seen(c, 4, type)) push_op(c, OP_TYPE_VERSION, node, Py_NewRef(type), type->tp_version_tag);
  return 1;
}

/* May values reached through node b be called static? Pins a dynamic node to its present object. */
static int static_base(Check *c, int b) {
  if (!c->build || c->e->unstable[b] >= UNSTABLE) return 0;
  if (c->status[b] == ST_STATIC || c->status[b] == ST_PINNED) return 1;
  PyObject *v = c->values[b];
  if (!PyType_SUPPORTS_WEAKREFS(Py_TYPE(v)) || ts_is_tensor(v)) return 0;
  PyObject *ref = PyWeakref_NewRef(v, NULL);
  if (!ref) { PyErr_Clear(); return 0; }
  if (!push_op(c, OP_PIN, b, v, (uintptr_t)ref)) { Py_DECREF(ref); return 0; }
  c->status[b] = ST_PINNED;
  return 1;
}

/* ------------------------------------------------------------------ evaluating nodes */
/* The attribute `key` in obj's own __dict__; borrowed. NULL without an error: absent. */
static PyObject *own_attribute(Check *c, int base, PyObject *obj, PyObject *key, int note) {
  PyObject **slot = _PyObject_GetDictPtr(obj);
  if (!slot) return NULL; /* this type of object has no __dict__ */
  if (note) note_object_dict(c, base, obj, slot, *slot); /* also where there is none yet: one may come */
  if (!*slot || !PyDict_Check(*slot)) return NULL;
  if (note) note_dict(c, base, *slot);
  return PyDict_GetItemWithError(*slot, key);
}

static PyObject *lookup_type(PyTypeObject *type, PyObject *name) { return _PyType_Lookup(type, name); /* borrowed */ }

static PyObject *node_get(Check *c, int i);

static PyObject *read_property(PyObject *t, PyObject *name, int dim) {
  int n;
  const int64_t *sizes, *strides;
  int64_t value;
  const char *what = PyUnicode_AsUTF8(name);
  if (!what) return NULL;
  if (!ts_is_tensor(t)) return NULL;
  if (!strcmp(what, "item")) {
    PyObject *number = PyObject_CallMethod(t, "item", NULL);
    if (!number) PyErr_Clear(); /* no longer one element */
    return number;
  }
  if (!strcmp(what, "item")) return PyObject_CallMethod(t, "item", NULL);
  if (!strcmp(what, "storage_offset")) return ts_tensor_offset(t, &value) < 0 ? NULL : PyLong_FromLongLong(value);
  if (ts_tensor_dims(t, &n, &sizes, &strides) < 0) { PyErr_Clear(); return NULL; }
  if (dim < 0 || dim >= n) return NULL;
  return PyLong_FromLongLong(!strcmp(what, "size") ? sizes[dim] : strides[dim]);
}

/* Is this an attribute of which an object never gets another one? */
static int is_part(PyObject *obj, PyObject *name) {
  if (PyFunction_Check(obj)) return PyUnicode_CompareWithASCIIString(name, "__closure__") == 0;
  if (Py_IS_TYPE(obj, &PyProperty_Type)) return PyUnicode_ReadChar(name, 0) == 'f'; /* fget, fset, fdel */
  return (Py_IS_TYPE(obj, &PyStaticMethod_Type) || Py_IS_TYPE(obj, &PyClassMethod_Type)) && PyUnicode_CompareWithASCIIString(name, "__func__") == 0;
}

/* What a pure function gives for the values of other nodes; where it raises there is no value, and the program itself shall raise it. */
static int take_first(PyObject *held, void *out) {
  if (!*(PyObject **)out) *(PyObject **)out = held;
  return 0;
}

static PyObject *compute(Check *c, const Node *n) {
  Py_ssize_t size = PyTuple_GET_SIZE(n->extra);
  PyObject *numbers = PyTuple_New(size), *v;
  for (Py_ssize_t i = 0; numbers && i < size; i++) {
    if (!(v = node_get(c, (int)PyLong_AsLong(PyTuple_GET_ITEM(n->extra, i))))) { Py_DECREF(numbers); return NULL; }
    PyTuple_SET_ITEM(numbers, i, Py_NewRef(v));
  }
  if (!numbers) return NULL;
  v = PyObject_CallOneArg(n->key, numbers);
  Py_DECREF(numbers);
  if (!v && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
  return v;
}

/* New reference; NULL without an error: no such value. *is_static says that witnesses were noted for it. */
/* A tensor as a dictionary's key is held weakly and found by its identity, which is what it hashes to; NULL: it is gone. */
static PyObject *dict_item_of(PyObject *dict, PyObject *key) {
  if (!PyWeakref_CheckRef(key)) return PyDict_GetItemWithError(dict, key);
  PyObject *tensor = PyWeakref_GET_OBJECT(key);
  return tensor == Py_None ? NULL : _PyDict_GetItem_KnownHash(dict, tensor, (Py_hash_t)tensor);
}

static int same_key(PyObject *have, PyObject *want) {
  if (PyWeakref_CheckRef(want) && have != want) return have != Py_None && PyWeakref_GET_OBJECT(want) == have;
  return 2; /* no tensor: compared as constants are */
}

static PyObject *node_eval(Check *c, int i, int *is_static) {
  const Node *n = &c->e->nodes[i];
  Frame *f = c->f;
  PyObject *base = NULL, *v = NULL;
  int keep = 0;
  *is_static = 0;
  if (n->base >= 0) {
    base = node_get(c, n->base);
    if (!base) return NULL;
  }
  switch (n->kind) {
  case NODE_LOCAL: return n->arg < f->n_locals ? Py_XNewRef(f->locals[n->arg]) : NULL;
  case NODE_FIXED: *is_static = 1; return Py_NewRef(n->key);
  case NODE_GLOBAL:
  case NODE_GLOBAL_IN: {
    PyObject *d = n->kind == NODE_GLOBAL ? f->globals : PyModule_Check(n->extra) ? PyModule_GetDict(n->extra) : n->extra;
    if (!PyDict_Check(d)) return NULL;
    /* a call under other globals never gets this far: the entry is for one namespace */
    keep = c->build && c->e->unstable[i] < UNSTABLE && (n->kind == NODE_GLOBAL_IN || c->e->globals == d);
    if (keep) note_dict(c, i, d);
    v = PyDict_GetItemWithError(d, n->key);
    if (v || PyErr_Occurred()) break;
    PyObject *b = PyDict_GetItemString(d, "__builtins__");
    if (b && PyModule_Check(b)) b = PyModule_GetDict(b);
    if (!b || !PyDict_Check(b)) return NULL;
    if (keep) note_dict(c, i, b);
    v = PyDict_GetItemWithError(b, n->key);
    break;
  }
  case NODE_CELL:
    if (!f->closure || n->arg >= PyTuple_GET_SIZE(f->closure)) return NULL;
    return Py_XNewRef(PyCell_GET(PyTuple_GET_ITEM(f->closure, n->arg)));
  case NODE_CELL_CONTENTS:
    if (PyCell_Check(base)) return Py_XNewRef(PyCell_GET(base));
    goto dict_item;
  case NODE_INSTANCE:
    keep = static_base(c, n->base);
    v = own_attribute(c, n->base, base, n->key, keep);
    break;
  case NODE_OWN_DICT: {
    PyObject **slot = _PyObject_GetDictPtr(base);
    if (!slot || !*slot) return NULL;
    keep = static_base(c, n->base);
    if (keep) note_object_dict(c, n->base, base, slot, *slot);
    v = *slot;
    break;
  }
  case NODE_MODULE_DICT: {
    keep = static_base(c, n->base);
    PyObject *d = own_attribute(c, n->base, base, n->extra, keep);
    if (!d || !PyDict_Check(d) || own_attribute(c, n->base, base, n->key, 0)) return NULL; /* the object's own is asked first */
    if (keep) note_dict(c, n->base, d);
    v = PyDict_GetItemWithError(d, n->key);
    break;
  }
  case NODE_TYPE_ATTR: {
    PyTypeObject *t = PyType_Check(base) ? (PyTypeObject *)base : Py_TYPE(base);
    v = lookup_type(t, n->key);
    if (v && static_base(c, n->base)) {
      if (!PyType_Check(base)) note_type(c, n->base, base);
      keep = note_type_version(c, n->base, t);
    }
    break;
  }
  case NODE_TYPE_OF:
    v = (PyObject *)Py_TYPE(base);
    keep = static_base(c, n->base);
    if (keep) note_type(c, n->base, base);
    break;
  case NODE_ITEM_SEQ: {
    if (PyDict_Check(base)) goto dict_item; /* an integer key */
    if (!strcmp(Py_TYPE(base)->tp_name, "collections.deque")) {
      if (!(v = PySequence_GetItem(base, n->arg)) && PyErr_ExceptionMatches(PyExc_IndexError)) PyErr_Clear();
      return v;
    }
    Py_ssize_t k = n->arg, size = PyList_Check(base) ? PyList_GET_SIZE(base) : PyTuple_Check(base) ? PyTuple_GET_SIZE(base) : -1;
    if (k < 0) k += size;
    if (k < 0 || k >= size) return NULL;
    v = PyList_Check(base) ? PyList_GET_ITEM(base, k) : PyTuple_GET_ITEM(base, k);
    keep = PyTuple_Check(base) && c->build && (c->status[n->base] == ST_STATIC);
    break;
  }
  case NODE_ITEM_DICT:
  dict_item:
    if (Py_IS_TYPE(base, &PyDictProxy_Type)) { /* of a class */
      v = PyObject_GetItem(base, n->key);
      if (!v && PyErr_ExceptionMatches(PyExc_KeyError)) PyErr_Clear();
      return v;
    }
    if (!PyDict_Check(base)) return NULL;
    keep = c->build && c->status[n->base] == ST_STATIC && c->e->unstable[n->base] < UNSTABLE;
    if (keep) note_dict(c, n->base, base);
    v = dict_item_of(base, n->key);
    break;
  case NODE_GETATTR:
    v = PyObject_GetAttr(base, n->key);
    if (!v && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    *is_static = v && is_part(base, n->key) && static_base(c, n->base);
    return v;
  case NODE_TENSOR_PROPERTY: return read_property(base, n->key, n->arg);
  case NODE_COMPUTED: return compute(c, n);
  case NODE_REFERENT:
    if (PyDictViewSet_Check(base) || PyDictValues_Check(base)) {
      Py_TYPE(base)->tp_traverse(base, take_first, &v); /* a view refers to nothing else */
      return Py_XNewRef(v);
    }
    return PyWeakref_CheckRef(base) ? Py_NewRef(PyWeakref_GET_OBJECT(base)) : NULL;
  default: break;
  }
  *is_static = keep && v != NULL;
  return Py_XNewRef(v);
}

static PyObject *node_get(Check *c, int i) {
  int is_static;
  if (c->fast) { /* values of static nodes are vouched for by the witnesses checked so far */
    int s = c->fast->slot[i];
    if (s < 0) return c->fast->values[i];
    if (!c->values[s]) c->values[s] = node_eval(c, i, &is_static);
    return c->values[s];
  }
  if (!c->values[i]) {
    c->values[i] = node_eval(c, i, &is_static);
    if (c->values[i]) c->status[i] = is_static ? ST_STATIC : ST_DYNAMIC;
  }
  return c->values[i];
}

PyObject *ts_check_value(Check *c, int node) { return node_get(c, node); }

/* ------------------------------------------------------------------ guards */
static int same_constant(PyObject *a, PyObject *b) {
  if (a == b) return 1;
  if (Py_TYPE(a) != Py_TYPE(b)) return 0;
  if (PyFloat_CheckExact(a)) return !memcmp(&((PyFloatObject *)a)->ob_fval, &((PyFloatObject *)b)->ob_fval, sizeof(double));
  if (PyComplex_CheckExact(a)) return !memcmp(&((PyComplexObject *)a)->cval, &((PyComplexObject *)b)->cval, sizeof(Py_complex));
  if (PyTuple_CheckExact(a)) {
    if (PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); i++) {
      int r = same_constant(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i));
      if (r <= 0) return r;
    }
    return 1;
  }
  if (PyAnySet_CheckExact(a)) return ts_same_set(a, b, same_constant);
  return PyObject_RichCompareBool(a, b, Py_EQ);
}

static Py_ssize_t length_of(PyObject *v) {
  if (PyDict_Check(v)) return PyDict_GET_SIZE(v);
  if (PyList_Check(v)) return PyList_GET_SIZE(v);
  if (PyTuple_Check(v)) return PyTuple_GET_SIZE(v);
  Py_ssize_t n = PyObject_Size(v);
  if (n < 0) PyErr_Clear();
  return n;
}

static int same_keys(PyObject *dict, PyObject *keys) {
  if (Py_IS_TYPE(dict, &PyDictProxy_Type)) {
    PyObject *list = PyMapping_Keys(dict), *have = list ? PySequence_Tuple(list) : NULL;
    int same = have ? same_constant(have, keys) : 0;
    Py_XDECREF(list), Py_XDECREF(have);
    if (PyErr_Occurred()) PyErr_Clear();
    return same > 0;
  }
  if (!PyDict_Check(dict) || PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(keys)) return 0;
  if (PyDict_CheckExact(dict)) {
    PyObject *k, *v;
    Py_ssize_t pos = 0, i = 0;
    while (PyDict_Next(dict, &pos, &k, &v)) {
      PyObject *want = PyTuple_GET_ITEM(keys, i++);
      if (k == want) continue;
      int r = same_key(k, want);
      if (r == 2) r = same_constant(k, want);
      if (r <= 0) return r;
    }
    return 1;
  }
  PyObject *list = PySequence_List(dict); /* OrderedDict keeps its own order */
  if (!list) { PyErr_Clear(); return 0; }
  int r = 1;
  for (Py_ssize_t i = 0; r > 0 && i < PyTuple_GET_SIZE(keys); i++) {
    PyObject *want = PyTuple_GET_ITEM(keys, i);
    r = i < PyList_GET_SIZE(list) ? same_key(PyList_GET_ITEM(list, i), want) : 0;
    if (r == 2) r = same_constant(PyList_GET_ITEM(list, i), want);
  }
  Py_DECREF(list);
  return r;
}

static int is_missing(Check *c, const GuardOp *g, PyObject *v, int *is_static) {
  PyObject *name = g->value;
  int r;
  *is_static = 0;
  if (PyDict_Check(v)) {
    *is_static = c->build && c->status[g->node] == ST_STATIC && static_base(c, g->node);
    if (*is_static) note_dict(c, g->node, v);
    if (PyWeakref_CheckRef(name)) return !dict_item_of(v, name) && !PyErr_Occurred();
    return (r = PyDict_Contains(v, name)) < 0 ? -1 : !r;
  }
  if (PyType_Check(v)) {
    PyObject *found = lookup_type((PyTypeObject *)v, name);
    if (!found && static_base(c, g->node)) *is_static = note_type_version(c, g->node, (PyTypeObject *)v);
    return !found;
  }
  *is_static = static_base(c, g->node);
  if (own_attribute(c, g->node, v, name, *is_static)) return 0;
  if (PyErr_Occurred()) return -1;
  static PyObject *dicts[3];
  if (!dicts[0]) {
    dicts[0] = PyUnicode_InternFromString("_parameters"), dicts[1] = PyUnicode_InternFromString("_buffers");
    dicts[2] = PyUnicode_InternFromString("_modules");
  }
  for (int k = 0; k < 3; k++) {
    PyObject *d = own_attribute(c, g->node, v, dicts[k], 0);
    if (!d || !PyDict_Check(d)) continue;
    if (*is_static) note_dict(c, g->node, d);
    if ((r = PyDict_Contains(d, name))) return r < 0 ? -1 : 0;
  }
  return 1;
}

/* Is a default value the one that was seen? Held weakly where guards.py could: by a class of its own, so that a user's reference is itself. */
static int same_default(PyObject *want, PyObject *have) {
  if (have == want) return 1;
  return PyWeakref_CheckRef(want) && !PyWeakref_CheckRefExact(want) && have != Py_None && PyWeakref_GET_OBJECT(want) == have;
}

/* value: (code, defaults | None, kwdefaults | None). The function is known, and never gets another closure. */
static int same_function(PyObject *want, PyObject *v) {
  if (!PyFunction_Check(v)) return 0;
  PyFunctionObject *f = (PyFunctionObject *)v;
  PyObject *code = PyTuple_GET_ITEM(want, 0), *need = PyTuple_GET_ITEM(want, 1), *kw = PyTuple_GET_ITEM(want, 2), *have = f->func_defaults;
  if (f->func_code != code) return 0;
  Py_ssize_t size = have && have != Py_None ? PyTuple_GET_SIZE(have) : 0;
  if (size != (need == Py_None ? 0 : PyTuple_GET_SIZE(need))) return 0;
  for (Py_ssize_t i = 0; i < size; i++)
    if (!same_default(PyTuple_GET_ITEM(need, i), PyTuple_GET_ITEM(have, i))) return 0;
  PyObject *k, *x;
  have = f->func_kwdefaults;
  if (!have || have == Py_None) return kw == Py_None || PyDict_GET_SIZE(kw) == 0;
  if (kw == Py_None) return PyDict_GET_SIZE(have) == 0;
  if (PyDict_GET_SIZE(have) != PyDict_GET_SIZE(kw)) return 0;
  Py_ssize_t pos = 0;
  while (PyDict_Next(kw, &pos, &k, &x)) {
    PyObject *other = PyDict_GetItemWithError(have, k);
    if (!other || !same_default(x, other)) { PyErr_Clear(); return 0; }
  }
  return 1;
}

static int no_overlap(Check *c, const GuardOp *g, PyObject *v) {
  uintptr_t lo, hi, lo2, hi2;
  if (!ts_is_tensor(v)) return 0;
  if (ts_tensor_range(v, &lo, &hi) < 0) { PyErr_Clear(); return 0; }
  for (int k = 0; k < g->n; k++) {
    PyObject *o = node_get(c, g->nodes[k]);
    if (!o) return PyErr_Occurred() ? -1 : 0;
    if (g->nodes[k] == g->node) continue;
    if (!ts_is_tensor(o)) return 0;
    if (ts_tensor_range(o, &lo2, &hi2) < 0) { PyErr_Clear(); return 0; }
    if (lo < hi2 && lo2 < hi) return 0;
  }
  return 1;
}

static int by_address(const void *a, const void *b) {
  uintptr_t x = *(const uintptr_t *)a, y = *(const uintptr_t *)b;
  return x < y ? -1 : x > y;
}

/* Are the values of the first `told` nodes different objects, and none of the values of the others? */
static int distinct(Check *c, const GuardOp *g, int *is_static) {
  uintptr_t few[16], *told = g->told <= 16 ? few : PyMem_Malloc((size_t)g->told * sizeof *told);
  int ok = 1;
  if (!told) { PyErr_NoMemory(); return -1; }
  *is_static = c->build != NULL;
  for (int k = 0; ok > 0 && k < g->n; k++) {
    PyObject *v = node_get(c, g->nodes[k]);
    if (!v) { ok = PyErr_Occurred() ? -1 : 0; break; }
    if (c->build && c->status[g->nodes[k]] != ST_STATIC) *is_static = 0;
    if (k < g->told) told[k] = (uintptr_t)v;
    if (k == g->told - 1 && g->told > 1) {
      qsort(told, (size_t)g->told, sizeof *told, by_address);
      for (int i = 1; ok && i < g->told; i++) ok = told[i] != told[i - 1];
    }
    if (k < g->told) continue;
    uintptr_t key = (uintptr_t)v;
    ok = g->told == 1 ? key != told[0] : !bsearch(&key, told, (size_t)g->told, sizeof *told, by_address);
  }
  if (told != few) PyMem_Free(told);
  return ok;
}

/* Postfix program over 64-bit integers; what overflows or divides by zero does not hold. */
static int shape_holds(Check *c, const GuardOp *g) {
  int64_t st[64], r;
  int sp = 0;
  const int64_t *p = g->code, *end = p + g->n;
  while (p < end) {
    int64_t op = *p++;
    if (op == SH_CONST) { if (sp >= 64) return 0; st[sp++] = *p++; continue; }
    if (op == SH_NODE) {
      PyObject *v = node_get(c, (int)*p++);
      if (!v) return PyErr_Occurred() ? -1 : 0;
      if (!PyLong_Check(v) || sp >= 64) return 0;
      st[sp] = PyLong_AsLongLong(v);
      if (st[sp] == -1 && PyErr_Occurred()) { PyErr_Clear(); return 0; }
      sp++;
      continue;
    }
    if (op == SH_NOT || op == SH_NEG || op == SH_ABS) {
      if (sp < 1) return 0;
      if (op == SH_NOT) st[sp - 1] = !st[sp - 1];
      else if (st[sp - 1] == INT64_MIN) return 0;
      else if (op == SH_NEG || st[sp - 1] < 0) st[sp - 1] = -st[sp - 1];
      continue;
    }
    if (sp < 2) return 0;
    int64_t b = st[--sp], a = st[sp - 1];
    switch (op) {
    case SH_ADD: if (__builtin_add_overflow(a, b, &r)) return 0; break;
    case SH_SUB: if (__builtin_sub_overflow(a, b, &r)) return 0; break;
    case SH_MUL: if (__builtin_mul_overflow(a, b, &r)) return 0; break;
    case SH_FLOORDIV: case SH_MOD: case SH_TRUNCDIV: {
      if (b == 0 || (b == -1 && a == INT64_MIN)) return 0;
      int64_t q = a / b, m = a % b;
      if (op == SH_TRUNCDIV) { r = q; break; }
      if (m && ((m < 0) != (b < 0))) q--, m += b;
      r = op == SH_FLOORDIV ? q : m;
      break;
    }
    case SH_MIN: r = a < b ? a : b; break;
    case SH_MAX: r = a > b ? a : b; break;
    case SH_EQ: r = a == b; break;
    case SH_NE: r = a != b; break;
    case SH_LT: r = a < b; break;
    case SH_LE: r = a <= b; break;
    case SH_GT: r = a > b; break;
    case SH_GE: r = a >= b; break;
    case SH_AND: r = a && b; break;
    case SH_OR: r = a || b; break;
    default: return 0;
    }
    st[sp - 1] = r;
  }
  return sp == 1 && st[0] != 0;
}

/* The same over doubles: conditions on floats of the program. A constant is a double's bits. */
static int floats_hold(Check *c, const GuardOp *g) {
  double st[32], r;
  int sp = 0;
  const int64_t *p = g->code, *end = p + g->n;
  while (p < end) {
    int64_t op = *p++;
    if (op == SH_CONST || op == SH_NODE) {
      if (sp >= 32) return 0;
      if (op == SH_CONST) { memcpy(&st[sp++], p++, sizeof *st); continue; }
      PyObject *v = node_get(c, (int)*p++);
      if (!v) return PyErr_Occurred() ? -1 : 0;
      if (!PyFloat_CheckExact(v) && !PyLong_CheckExact(v)) return 0;
      st[sp] = PyFloat_AsDouble(v);
      if (st[sp] == -1.0 && PyErr_Occurred()) { PyErr_Clear(); return 0; }
      sp++;
      continue;
    }
    if (op == SH_NOT || op == SH_NEG || op == SH_ABS) {
      if (sp < 1) return 0;
      st[sp - 1] = op == SH_NOT ? !st[sp - 1] : op == SH_NEG ? -st[sp - 1] : st[sp - 1] < 0 ? -st[sp - 1] : st[sp - 1];
      continue;
    }
    if (sp < 2) return 0;
    double b = st[--sp], a = st[sp - 1];
    switch (op) {
    case SH_ADD: r = a + b; break;
    case SH_SUB: r = a - b; break;
    case SH_MUL: r = a * b; break;
    case SH_DIV: if (b == 0) return 0; r = a / b; break;
    case SH_EQ: r = a == b; break;
    case SH_NE: r = a != b; break;
    case SH_LT: r = a < b; break;
    case SH_LE: r = a <= b; break;
    case SH_GT: r = a > b; break;
    case SH_GE: r = a >= b; break;
    case SH_AND: r = a && b; break;
    case SH_OR: r = a || b; break;
    default: return 0;
    }
    st[sp - 1] = r;
  }
  return sp == 1 && st[0] != 0;
}

static int truth_of(PyObject *r) {
  if (!r) return -1;
  int t = PyObject_IsTrue(r);
  Py_DECREF(r);
  return t;
}

/* value(*values of the nodes): what C has no words for */
static int python_holds(Check *c, const GuardOp *g) {
  PyObject *args = PyTuple_New(g->n), *v;
  for (int i = 0; args && i < g->n; i++) {
    if (!(v = node_get(c, g->nodes[i]))) { Py_DECREF(args); return PyErr_Occurred() ? -1 : 0; }
    PyTuple_SET_ITEM(args, i, Py_NewRef(v));
  }
  if (!args) return -1;
  int t = truth_of(PyObject_CallObject(g->value, args));
  Py_DECREF(args);
  return t;
}

static int state_holds(Check *c, const GuardOp *g) {
  Entry *e = c->e;
  if (c->f->state_complete && e->state_known && !memcmp(&e->state, c->f->state, sizeof(State))) return 1;
  int t = truth_of(PyObject_CallNoArgs(g->value)); /* the meaning: guards.py compares the whole GlobalState */
  if (t == 1 && c->f->state_complete && c->f->state->function_modes >> 8 == 0) e->state = *c->f->state, e->state_known = 1;
  return t;
}

/* Values of these types never change, so a witness for the object is a witness for equality. */
static int is_immutable(PyObject *v) {
  if (v == Py_None || PyLong_CheckExact(v) || PyBool_Check(v) || PyFloat_CheckExact(v) || PyUnicode_CheckExact(v) || PyBytes_CheckExact(v) || PyComplex_CheckExact(v))
    return 1;
  if (!PyTuple_CheckExact(v)) return 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(v); i++)
    if (!is_immutable(PyTuple_GET_ITEM(v, i))) return 0;
  return 1;
}

/* 1, 0, -1; *is_static: nothing needs checking while the witnesses hold. */
static int guard_holds(Check *c, const GuardOp *g, int *is_static) {
  *is_static = 0;
  if (g->kind == GUARD_STATE) return state_holds(c, g);
  if (g->kind == GUARD_SHAPE) return shape_holds(c, g);
  if (g->kind == GUARD_PYTHON) return python_holds(c, g);
  if (g->kind == GUARD_FLOATS) return floats_hold(c, g);
  PyObject *v = node_get(c, g->node);
  if (!v) return PyErr_Occurred() ? -1 : 0;
  int on_static = c->build && c->status[g->node] == ST_STATIC;
  switch (g->kind) {
  case GUARD_TENSOR: return ts_is_tensor(v) ? ts_tensor_check(g->tensor, v) : 0;
  case GUARD_IDENTITY: *is_static = on_static; return v == g->value;
  case GUARD_WEAK_IDENTITY: *is_static = on_static; return v != Py_None && PyWeakref_GET_OBJECT(g->value) == v;
  case GUARD_TYPE:
    if (c->build && (on_static || c->status[g->node] == ST_PINNED)) note_type(c, g->node, v), *is_static = 1;
    return (PyObject *)Py_TYPE(v) == g->value;
  case GUARD_EQUALS: *is_static = on_static && is_immutable(v); return same_constant(v, g->value);
  case GUARD_LENGTH:
    if (on_static && PyDict_Check(v) && static_base(c, g->node)) note_dict(c, g->node, v), *is_static = 1;
    else if (on_static && PyTuple_Check(v)) *is_static = 1;
    return length_of(v) == (Py_ssize_t)g->n;
  case GUARD_DICT_KEYS:
    if (on_static && PyDict_CheckExact(v) && static_base(c, g->node)) note_dict(c, g->node, v), *is_static = 1;
    return same_keys(v, g->value);
  case GUARD_MISSING: return is_missing(c, g, v, is_static);
  case GUARD_NO_OVERLAP: return no_overlap(c, g, v);
  case GUARD_ALIAS: {
    PyObject *o = node_get(c, g->n);
    if (!o) return PyErr_Occurred() ? -1 : 0;
    *is_static = on_static && c->status[g->n] == ST_STATIC;
    return o == v;
  }
  case GUARD_DISTINCT: return distinct(c, g, is_static);
  case GUARD_FUNCTION: return same_function(g->value, v);
  default: return 0;
  }
}

/* ------------------------------------------------------------------ reading them */
static int read_ints(Entry *e, GuardOp *g, PyObject *list) {
  Py_ssize_t n = PyTuple_GET_SIZE(list);
  int wide = g->kind == GUARD_SHAPE || g->kind == GUARD_FLOATS;
  g->n = (int)n;
  if (wide) g->code = PyMem_Calloc((size_t)n + 1, sizeof(int64_t));
  else g->nodes = PyMem_Calloc((size_t)n + 1, sizeof(int));
  if (!g->code && !g->nodes) { PyErr_NoMemory(); return -1; }
  for (Py_ssize_t i = 0; i < n; i++) {
    int64_t v = PyLong_AsLongLong(PyTuple_GET_ITEM(list, i));
    if (v == -1 && PyErr_Occurred()) return -1;
    if (wide) g->code[i] = v;
    else if (v < 0 || v >= e->n_nodes) { PyErr_SetString(PyExc_ValueError, "Entry: bad node in a guard"); return -1; }
    else g->nodes[i] = (int)v;
  }
  return 0;
}

int ts_guard_read(Entry *e, GuardOp *g, PyObject *item) {
  PyObject *value, *ints;
  const char *name;
  if (!PyArg_ParseTuple(item, "siOO!", &name, &g->node, &value, &PyTuple_Type, &ints)) return -1;
  g->value = Py_NewRef(value);
  for (g->kind = 0; g->kind < GUARD_KINDS && strcmp(name, guard_names[g->kind]);) g->kind++;
  if (g->kind == GUARD_KINDS || g->node < 0 || g->node >= e->n_nodes) { PyErr_SetString(PyExc_ValueError, "Entry: bad guard"); return -1; }
  if (g->kind == GUARD_TENSOR && !(g->tensor = ts_tensor_guard_new(value))) return -1;
  if (g->kind == GUARD_SHAPE || g->kind == GUARD_FLOATS || g->kind == GUARD_NO_OVERLAP || g->kind == GUARD_PYTHON)
    return read_ints(e, g, ints);
  if (g->kind == GUARD_DISTINCT) {
    g->told = (int)PyLong_AsLong(value);
    if (read_ints(e, g, ints) < 0) return -1;
    if (g->told < 1 || g->told > g->n) { PyErr_SetString(PyExc_ValueError, "Entry: bad count of objects"); return -1; }
    return 0;
  }
  if (g->kind == GUARD_LENGTH) g->n = (int)PyLong_AsLong(value);
  if (g->kind == GUARD_ALIAS) {
    g->n = (int)PyLong_AsLong(value);
    if (g->n < 0 || g->n >= e->n_nodes) { PyErr_SetString(PyExc_ValueError, "Entry: bad alias"); return -1; }
  }
  if (g->kind == GUARD_DICT_KEYS && !PyTuple_Check(value)) { PyErr_SetString(PyExc_TypeError, "dict_keys takes a tuple"); return -1; }
  if (g->kind == GUARD_FUNCTION && (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != 3)) {
    PyErr_SetString(PyExc_TypeError, "function guard takes (code, defaults, kwdefaults)");
    return -1;
  }
  return PyErr_Occurred() ? -1 : 0;
}

/* ------------------------------------------------------------------ the two checks */
/* What was recorded about this op is not so any more: after a few times its node is evaluated on every call instead. */
static void note_unstable(Check *c, const RecordOp *op) {
  Entry *e = c->e;
  int node = c->fast->about[op - c->fast->ops];
  if (c->fast->good > RARELY) return;
  if (e->unstable[node] < UNSTABLE) e->unstable[node]++;
  if (OP_KIND(op) != OP_DICT) return;
  for (int i = 0; i < e->n_nodes; i++) { /* every global read from a namespace that keeps changing */
    const Node *n = &e->nodes[i];
    if (i == node || (n->kind != NODE_GLOBAL && n->kind != NODE_GLOBAL_IN)) continue;
    PyObject *d = n->kind == NODE_GLOBAL ? c->f->globals : PyModule_Check(n->extra) ? PyModule_GetDict(n->extra) : n->extra;
    if (ts_version_peek(d) == OP_POINTER(op) && e->unstable[i] < UNSTABLE) e->unstable[i]++;
  }
}

static int check_fast(Check *c) {
  Record *r = c->fast;
  int ignored, ok;
  for (const RecordOp *op = r->ops, *end = op + r->n_ops; op < end; op++) {
    if (OP_IS_WORD(op)) { /* nine of ten */
      if (*(const uint64_t *)OP_POINTER(op) != op->b) goto changed;
      continue;
    }
    switch (OP_KIND(op)) {
    case OP_TYPE_VERSION: {
      PyTypeObject *t = OP_POINTER(op);
      if (!has_version(t) || t->tp_version_tag != (unsigned)op->b) goto changed;
      break;
    }
    case OP_TENSOR: /* a parameter: same object, is its metadata still the same? */
      ok = ts_tensor_check((TensorGuard *)op->b, OP_POINTER(op));
      if (ok <= 0) { c->e->failed = r->about[op - r->ops]; return ok; }
      break;
    case OP_PIN: {
      PyObject *v = node_get(c, r->about[op - r->ops]);
      if (!v && PyErr_Occurred()) return -1;
      if (v != OP_POINTER(op) || PyWeakref_GET_OBJECT((PyObject *)op->b) != v) goto changed;
      break;
    }
    case OP_GUARD:
      ok = guard_holds(c, &c->e->guards[r->about[op - r->ops]], &ignored);
      if (ok <= 0) { c->e->failed = r->about[op - r->ops]; return ok; }
      break;
    default: return 0;
    }
    continue;
  changed:
    note_unstable(c, op);
    return 2;
  }
  r->good++;
  return 1;
}

static int check_full(Check *c) {
  Entry *e = c->e;
  for (int i = 0; i < e->n_guards; i++) {
    int is_static, ok = guard_holds(c, &e->guards[i], &is_static);
    if (ok <= 0) { e->failed = i; return ok; }
    if (!c->build || is_static) continue;
    const GuardOp *g = &e->guards[i];
    if (g->kind == GUARD_TENSOR && c->status[g->node] == ST_STATIC) push_op(c, OP_TENSOR, i, c->values[g->node], (uintptr_t)g->tensor);
    else push_op(c, OP_GUARD, i, NULL, 0);
  }
  return 1;
}

static Record *record_new(int n_nodes) {
  Record *r = PyMem_Calloc(1, sizeof *r);
  if (r) r->users = 1;
  return r;
}

/* Turn what the full check saw into the entry's record. */
static void install_record(Check *c) {
  Record *r = c->build;
  int n = c->e->n_nodes;
  r->slot = PyMem_Calloc((size_t)n + 1, sizeof *r->slot);
  r->values = PyMem_Calloc((size_t)n + 1, sizeof *r->values);
  if (c->build_failed || !r->slot || !r->values) { ts_record_free(r); c->build = NULL; return; }
  for (int i = 0; i < n; i++) {
    if (c->status[i] == ST_STATIC) r->slot[i] = -1, r->values[i] = c->values[i];
    else r->slot[i] = r->n_slots++;
  }
  Record *old = c->e->record;
  c->e->record = r;
  c->build = NULL;
  ts_record_free(old);
}

int ts_check_begin(Check *c, Entry *e, Frame *f) {
  memset(c, 0, sizeof *c);
  c->e = e, c->f = f;
  if (e->record) {
    c->fast = e->record;
    c->fast->users++;
    c->n_values = c->fast->n_slots;
    c->values = c->n_values <= TS_SMALL ? c->small : PyMem_Malloc((size_t)c->n_values * sizeof(PyObject *));
    if (!c->values) { PyErr_NoMemory(); return -1; }
    memset(c->values, 0, (size_t)c->n_values * sizeof(PyObject *));
    int r = check_fast(c);
    if (r != 2) return r;
    ts_check_end(c);
    memset(c, 0, offsetof(Check, small));
    c->e = e, c->f = f;
  }
  c->n_values = e->n_nodes;
  c->values = PyMem_Calloc((size_t)e->n_nodes + 1, sizeof(PyObject *));
  c->status = PyMem_Calloc((size_t)e->n_nodes + 1, 1);
  c->build = record_new(e->n_nodes);
  if (!c->values || !c->status || !c->build) { PyErr_NoMemory(); return -1; }
  int r = check_full(c);
  if (r != 1) { ts_record_free(c->build); c->build = NULL; return r; }
  /* inputs and results may name nodes that no guard touched: evaluate them now, so that they are recorded too */
  for (int i = 0; i < e->n_inputs; i++)
    if (!node_get(c, e->inputs[i])) {
      ts_record_free(c->build);
      c->build = NULL;
      e->failed = -1;
      return PyErr_Occurred() ? -1 : 0;
    }
  install_record(c);
  return 1;
}

void ts_check_end(Check *c) {
  if (c->build) ts_record_free(c->build);
  if (c->values) {
    for (int i = 0; i < c->n_values; i++) Py_XDECREF(c->values[i]);
    if (c->values != c->small) PyMem_Free(c->values);
  }
  PyMem_Free(c->status);
  PyMem_Free(c->seen);
  ts_record_free(c->fast);
}
