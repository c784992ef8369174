/* Extern calls: libtorch's C shim functions by their schema, or Python operators with the GIL taken.
 *
 * A spec (made by runtime/host_torch.py) is a tuple (kind, name, target, args, kwnames, tensors, outs, planned):
 *   kind     0 shim: target is the symbol's name, args the shim's parameters in order as (letter, payload)
 *            1 python: target is a callable, args a list of templates, kwnames names the last ones
 *   tensors  [(dtype row, ndim)] per tensor argument; outs [(dtype row, ndim) or None]
 *   planned  the outs are memory of the caller
 *
 * Shim parameters, by letter; a "number" is an int n (constant) or a Slot (the n-th run-time number)
 *   h i     tensor i                        H i     AtenTensorHandle* of tensor i
 *   L [i]   AtenTensorHandle[]              M [i]   AtenTensorHandle*[], -1 for none
 *   i n     integer or bool by value        d n     double by value
 *   I n     int64_t*    D n  double*        B n     int32_t*
 *   a [n]   int64_t[]   A [n] int64_t**     b [n]   int32_t[]
 *   s text  char*       S text char**       0       NULL
 *   r i     where result i goes             o i     planned result i
 *
 * Why one C type can call them all: in the calling conventions of x86-64 and AArch64 on Linux, integers and pointers travel in one
 * sequence (registers, then stack slots of eight bytes), doubles in another one (eight registers, more than any shim has). So
 * f(integers..., doubles...) puts every argument where f(mixed...) reads it, and surplus arguments are harmless. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#define MAX_WORDS 48
#define MAX_DOUBLES 8

enum { SLOT_TENSOR, SLOT_INT, SLOT_FLOAT, SLOT_BOOL };

typedef struct {
  PyObject_HEAD
  int kind, index;
} Slot;

typedef struct {
  int64_t value; /* a constant, or a double's bits */
  int32_t slot;  /* run-time number, or -1 */
} Number;

typedef struct {
  char letter;
  int n;
  Number *numbers; /* n of them; tensor and result indices are constants here too */
  const char *text;
} Param;

typedef struct {
  int16_t dtype, ndim;
} Spec;

/* A tensor object over memory that we own costs 0.6 us to make and free, so the shims' ones are kept and used again while address,
 * sizes, strides and inference mode are the same (which block of the workspace list a call gets is mostly the same). */
#define VIEW_DIMS 6
typedef struct {
  Handle handle;
  void *data;
  int64_t sizes[VIEW_DIMS], strides[VIEW_DIMS];
  bool inference;
} View;
struct Views {
  int n;
  View slots[];
};

struct Extern {
  int first_slot; /* of n_tensors + n_outs in Views */
  int kind, n_params, n_tensors, n_outs, n_args, planned, scratch;
  PyObject *name, *target, *args, *kwnames, *keep;
  void *fn;
  Param *params;
  Spec *tensors, *outs;
};

/* ---------------------------------------------------------------- slots */

static PyObject *slot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  int kind, index;
  if (!PyArg_ParseTuple(args, "ii", &kind, &index)) return NULL;
  Slot *s = (Slot *)type->tp_alloc(type, 0);
  if (s) s->kind = kind, s->index = index;
  return (PyObject *)s;
}

PyTypeObject SlotType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "torchsmith.runtime._native.Slot",
    .tp_doc = "Slot(kind, index): a place in an extern's arguments, filled at every call. kind 0 tensor, 1 int, 2 float, 3 bool.",
    .tp_basicsize = sizeof(Slot),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = slot_new,
};

/* ---------------------------------------------------------------- making */

static int read_number(PyObject *o, bool as_double, Number *out) {
  out->slot = -1;
  if (Py_TYPE(o) == &SlotType) {
    out->slot = ((Slot *)o)->index;
    out->value = ((Slot *)o)->kind;
    return 0;
  }
  if (as_double) {
    double d = PyFloat_AsDouble(o);
    memcpy(&out->value, &d, sizeof d);
  } else {
    out->value = PyLong_AsLongLong(o);
  }
  return PyErr_Occurred() ? -1 : 0;
}

static int read_param(Param *p, PyObject *row) {
  const char *letter;
  PyObject *payload;
  if (!PyArg_ParseTuple(row, "sO", &letter, &payload)) return -1;
  p->letter = *letter;
  if (strchr("sS", p->letter)) {
    p->text = PyUnicode_AsUTF8(payload); /* the spec keeps it alive */
    return p->text ? 0 : -1;
  }
  if (p->letter == '0') return 0;
  bool list = strchr("LMaAb", p->letter) != NULL, real = strchr("dD", p->letter) != NULL;
  p->n = list ? (int)PySequence_Size(payload) : 1;
  p->numbers = PyMem_Calloc((size_t)p->n + 1, sizeof(Number));
  if (p->n < 0 || !p->numbers) return -1;
  for (int i = 0; i < p->n; i++) {
    PyObject *o = list ? PySequence_GetItem(payload, i) : Py_NewRef(payload);
    int bad = !o || read_number(o, real, &p->numbers[i]);
    Py_XDECREF(o);
    if (bad) return -1;
  }
  return 0;
}

static Spec *read_specs(PyObject *rows, int *n) {
  *n = (int)PyList_GET_SIZE(rows);
  Spec *out = PyMem_Calloc((size_t)*n + 1, sizeof(Spec));
  for (int i = 0; out && i < *n; i++) {
    PyObject *row = PyList_GET_ITEM(rows, i);
    int dtype = -1, ndim = -1;
    if (row != Py_None && !PyArg_ParseTuple(row, "ii", &dtype, &ndim)) {
      PyMem_Free(out);
      return NULL;
    }
    out[i] = (Spec){(int16_t)dtype, (int16_t)ndim};
  }
  return out;
}

static int read_shim(Extern *e) {
#if !(defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__)))
  PyErr_SetString(PyExc_NotImplementedError, "shim calls need a known calling convention");
  return -1;
#endif
  int words = 0, doubles = 0;
  e->fn = dlsym(torch.lib, PyUnicode_AsUTF8(e->target));
  if (!e->fn) {
    PyErr_Format(PyExc_LookupError, "libtorch_cpu lacks %U", e->target);
    return -1;
  }
  e->n_params = (int)PyList_GET_SIZE(e->args);
  e->params = PyMem_Calloc((size_t)e->n_params + 1, sizeof(Param));
  if (!e->params) return -1;
  for (int i = 0; i < e->n_params; i++) {
    Param *p = &e->params[i];
    if (read_param(p, PyList_GET_ITEM(e->args, i)) < 0) return -1;
    *(p->letter == 'd' ? &doubles : &words) += 1;
    e->scratch += p->n + 2;
    bool tensor = strchr("hHLM", p->letter) != NULL, out = strchr("ro", p->letter) != NULL;
    for (int k = 0; k < p->n && (tensor || out); k++)
      if (p->numbers[k].value >= (tensor ? e->n_tensors : e->n_outs) || p->numbers[k].value < (p->letter == 'M' ? -1 : 0)) {
        PyErr_SetString(PyExc_ValueError, "a tensor index of an extern is out of range");
        return -1;
      }
  }
  if (words > MAX_WORDS || doubles > MAX_DOUBLES || e->scratch > 4096) {
    PyErr_SetString(PyExc_NotImplementedError, "an extern has too many arguments");
    return -1;
  }
  return 0;
}

Views *views_new(int slots) {
  Views *v = calloc(1, sizeof(Views) + sizeof(View) * (size_t)slots);
  if (v) v->n = slots;
  return v;
}

void views_free(Views *v) {
  for (int i = 0; v && i < v->n; i++)
    if (v->slots[i].handle) torch.delete_tensor(v->slots[i].handle);
  free(v);
}

Extern *extern_new(PyObject *spec, int *slots) {
  PyObject *name, *target, *args, *kwnames, *tensors, *outs;
  int kind, planned;
  if (!PyArg_ParseTuple(spec, "iOOO!OO!O!p", &kind, &name, &target, &PyList_Type, &args, &kwnames, &PyList_Type, &tensors, &PyList_Type,
                        &outs, &planned))
    return NULL;
  Extern *e = PyMem_Calloc(1, sizeof *e);
  if (!e) return (Extern *)PyErr_NoMemory();
  e->kind = kind;
  e->planned = planned;
  e->keep = Py_NewRef(spec);
  e->name = name, e->target = target, e->args = args;
  e->kwnames = kwnames == Py_None ? NULL : kwnames;
  e->n_args = (int)PyList_GET_SIZE(args);
  e->tensors = read_specs(tensors, &e->n_tensors);
  e->outs = read_specs(outs, &e->n_outs);
  if (!e->tensors || !e->outs || (kind == 0 && read_shim(e) < 0)) {
    extern_free(e);
    return NULL;
  }
  e->first_slot = *slots;
  *slots += kind == 0 ? e->n_tensors + e->n_outs : 0;
  return e;
}

void extern_free(Extern *e) {
  for (int i = 0; e->params && i < e->n_params; i++) PyMem_Free(e->params[i].numbers);
  PyMem_Free(e->params);
  PyMem_Free(e->tensors);
  PyMem_Free(e->outs);
  Py_XDECREF(e->keep);
  PyMem_Free(e);
}

int extern_visit(Extern *e, visitproc visit, void *arg) {
  Py_VISIT(e->keep);
  return 0;
}

/* ---------------------------------------------------------------- tensors in and out */

/* The kept tensor for this memory, made anew if it does not fit; NULL when there is none to keep. */
static Handle kept_view(View *v, const Spec *spec, const ts_tensor *t) {
  if (spec->ndim > VIEW_DIMS) return NULL;
  size_t bytes = sizeof(int64_t) * (size_t)spec->ndim;
  bool inference = torch.inference();
  if (v->handle && v->data == t->data && v->inference == inference && !memcmp(v->sizes, t->sizes, bytes) &&
      !memcmp(v->strides, t->strides, bytes))
    return v->handle;
  if (v->handle) torch.delete_tensor(v->handle);
  v->handle = NULL;
  if (torch.from_blob(t->data, spec->ndim, t->sizes, t->strides, 0, torch.dtypes[spec->dtype], torch.cpu, -1, &v->handle)) {
    v->handle = NULL;
    return NULL;
  }
  v->data = t->data;
  v->inference = inference;
  memcpy(v->sizes, t->sizes, bytes);
  memcpy(v->strides, t->strides, bytes);
  return v->handle;
}

/* An owned or borrowed handle for each tensor; those that we made are marked in `mine`. `views`: kept ones, or NULL. */
static int open_handles(Call *call, View *views, const Spec *specs, int n, const ts_tensor *given, Handle *out, bool *mine) {
  for (int i = 0; i < n; i++) {
    const ts_tensor *t = &given[i];
    mine[i] = t->handle == NULL;
    out[i] = t->handle;
    if (!mine[i]) continue;
    if (specs[i].ndim < 0) {
      mine[i] = false; /* a result that nobody wants */
      continue;
    }
    if (views && (out[i] = kept_view(&views[i], &specs[i], t))) {
      mine[i] = false;
      continue;
    }
    if (torch.from_blob(t->data, specs[i].ndim, t->sizes, t->strides, 0, torch.dtypes[specs[i].dtype], torch.cpu, -1, &out[i])) {
      call_torch_error(call, "from_blob");
      for (int k = 0; k < i; k++)
        if (mine[k]) torch.delete_tensor(out[k]);
      return -1;
    }
  }
  return 0;
}

static void close_handles(int n, Handle *handles, const bool *mine) {
  for (int i = 0; i < n; i++)
    if (mine[i]) torch.delete_tensor(handles[i]);
}

/* Take over an as_given result: kernels trust its dtype and rank, so they are checked here. Steals the handle. */
static int accept(Call *call, Extern *e, int i, Handle h, ts_tensor *out) {
  int64_t ndim = 0;
  int32_t dtype = 0;
  if (e->outs[i].ndim < 0) { /* not wanted */
    torch.delete_tensor(h);
    return 0;
  }
  if (torch.get_dim(h, &ndim) || ndim != e->outs[i].ndim || torch.get_dtype(h, &dtype) || dtype != torch.dtypes[e->outs[i].dtype] ||
      describe_tensor(h, out, true)) {
    torch.delete_tensor(h);
    out->handle = NULL;
    call_error(call, TS_ERROR_EXTERN, "an external operator returned another dtype or rank than was planned");
    return -1;
  }
  return 0;
}

/* ---------------------------------------------------------------- shim */

#define W4(i) w[i], w[i + 1], w[i + 2], w[i + 3]
#define I4 int64_t, int64_t, int64_t, int64_t
#define D8 double, double, double, double, double, double, double, double
typedef int32_t (*Few)(I4, I4, I4, D8);
typedef int32_t (*Many)(I4, I4, I4, I4, I4, I4, I4, I4, I4, I4, I4, I4, D8);

static int32_t invoke(void *fn, int words, const int64_t *w, const double *d) {
  if (words <= 12) return ((Few)fn)(W4(0), W4(4), W4(8), d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]);
  return ((Many)fn)(W4(0), W4(4), W4(8), W4(12), W4(16), W4(20), W4(24), W4(28), W4(32), W4(36), W4(40), W4(44), d[0], d[1], d[2], d[3],
                    d[4], d[5], d[6], d[7]);
}

static int64_t number(const Number *n, const int64_t *numbers, bool real) {
  if (n->slot < 0) return n->value;
  int64_t v = numbers[n->slot];
  if (real && n->value != SLOT_FLOAT) { /* an integer where the shim takes a double */
    double d = (double)v;
    memcpy(&v, &d, sizeof d);
  }
  return v;
}

static int32_t run_shim(Call *call, Extern *e, const ts_tensor *args, const int64_t *numbers, ts_tensor *outs) {
  int nt = e->n_tensors, no = e->n_outs, words = 0, doubles = 0;
  Handle handles[nt + 1], results[no + 1];
  bool mine[nt + 1], ours[no + 1];
  int64_t scratch[e->scratch + 1], w[MAX_WORDS] = {0}, *at = scratch;
  double d[MAX_DOUBLES] = {0};
  View *views = call->views ? call->views->slots + e->first_slot : NULL;
  if (open_handles(call, views, e->tensors, nt, args, handles, mine)) return TS_ERROR_EXTERN;
  memset(results, 0, sizeof results);
  if (e->planned && open_handles(call, views ? views + nt : NULL, e->outs, no, outs, results, ours)) {
    close_handles(nt, handles, mine);
    return TS_ERROR_EXTERN;
  }
  for (int i = 0; i < e->n_params; i++) {
    const Param *p = &e->params[i];
    const Number *n = p->numbers;
    int64_t *here = at;
    at += p->n + 2;
    switch (p->letter) {
      case 'h': w[words++] = (int64_t)handles[n->value]; break;
      case 'H': w[words++] = (int64_t)&handles[n->value]; break;
      case 'L':
        for (int k = 0; k < p->n; k++) here[k] = (int64_t)handles[n[k].value];
        w[words++] = (int64_t)here;
        break;
      case 'M':
        for (int k = 0; k < p->n; k++) here[k] = n[k].value < 0 ? 0 : (int64_t)&handles[n[k].value];
        w[words++] = (int64_t)here;
        break;
      case 'i': w[words++] = number(n, numbers, false); break;
      case 'd':
        here[0] = number(n, numbers, true);
        memcpy(&d[doubles++], here, sizeof(double));
        break;
      case 'I':
      case 'D':
        here[0] = number(n, numbers, p->letter == 'D');
        w[words++] = (int64_t)here;
        break;
      case 'B':
        ((int32_t *)here)[0] = (int32_t)number(n, numbers, false);
        w[words++] = (int64_t)here;
        break;
      case 'a':
      case 'A':
        for (int k = 0; k < p->n; k++) here[k] = number(&n[k], numbers, false);
        here[p->n] = (int64_t)here;
        w[words++] = p->letter == 'a' ? (int64_t)here : (int64_t)&here[p->n];
        break;
      case 'b':
        for (int k = 0; k < p->n; k++) ((int32_t *)here)[k] = (int32_t)number(&n[k], numbers, false);
        w[words++] = (int64_t)here;
        break;
      case 's': w[words++] = (int64_t)p->text; break;
      case 'S':
        here[0] = (int64_t)p->text;
        w[words++] = (int64_t)here;
        break;
      case 'r': w[words++] = (int64_t)&results[n->value]; break;
      case 'o': w[words++] = (int64_t)results[n->value]; break;
      default: w[words++] = 0;
    }
  }
  int32_t rc = invoke(e->fn, words, w, d);
  close_handles(nt, handles, mine);
  if (e->planned) close_handles(no, results, ours);
  if (rc) {
    call_torch_error(call, PyUnicode_AsUTF8(e->name)); /* cached UTF-8: no allocation, no GIL needed */
    return TS_ERROR_EXTERN;
  }
  for (int i = 0; !e->planned && i < no; i++) {
    if (!results[i] && e->outs[i].ndim < 0) continue;
    if (rc || !results[i] || accept(call, e, i, results[i], &outs[i])) {
      if (rc && results[i]) torch.delete_tensor(results[i]);
      rc = TS_ERROR_EXTERN;
    }
  }
  if (rc)
    for (int i = 0; i < no; i++)
      if (outs[i].handle) torch.delete_tensor(outs[i].handle), outs[i].handle = NULL;
  return rc;
}

/* ---------------------------------------------------------------- python */

static PyObject *fill(PyObject *template, PyObject *const *tensors, const int64_t *numbers) {
  if (Py_TYPE(template) == &SlotType) {
    const Slot *s = (Slot *)template;
    double d;
    switch (s->kind) {
      case SLOT_TENSOR: return Py_NewRef(tensors[s->index]);
      case SLOT_INT: return PyLong_FromLongLong(numbers[s->index]);
      case SLOT_FLOAT: memcpy(&d, &numbers[s->index], sizeof d); return PyFloat_FromDouble(d);
      default: return PyBool_FromLong(numbers[s->index] != 0);
    }
  }
  if (!PyList_CheckExact(template)) return Py_NewRef(template);
  Py_ssize_t n = PyList_GET_SIZE(template);
  PyObject *out = PyList_New(n);
  for (Py_ssize_t i = 0; out && i < n; i++) {
    PyObject *item = fill(PyList_GET_ITEM(template, i), tensors, numbers);
    if (!item) Py_CLEAR(out);
    else PyList_SET_ITEM(out, i, item);
  }
  return out;
}

static PyObject *borrow_as_tensor(Handle h) {
  Handle own = NULL;
  if (torch.wrap) return torch.wrap(h);
  if (torch.new_handle(h, &own)) return PyErr_Format(torch.error, "new_tensor_handle failed");
  return wrap_handle(own);
}

/* The tensors in a result, in order, nested sequences flattened; None and numbers count as a result without a tensor. */
static int flatten(PyObject *result, PyObject **out, int n, int at) {
  if (PyTuple_Check(result) || PyList_Check(result)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(result); i++)
      at = flatten(PySequence_Fast_GET_ITEM(result, i), out, n, at);
    return at;
  }
  if (at < n) out[at] = is_tensor(result) ? result : NULL;
  return at + 1;
}

static int take_results(Call *call, Extern *e, PyObject *result, const Handle *planned, ts_tensor *outs) {
  int no = e->n_outs;
  PyObject *found[no + 1];
  memset(found, 0, sizeof found);
  int n = flatten(result, found, no, 0);
  if (n != no && !(no == 0)) {
    PyErr_Format(torch.error, "%U returned %d results, not %d", e->name, n, no);
    return -1;
  }
  for (int i = 0; i < no; i++) {
    Handle own = NULL;
    if (e->outs[i].ndim < 0) continue;
    if (!found[i]) {
      PyErr_Format(torch.error, "%U returned no tensor as result %d", e->name, i);
      return -1;
    }
    if (e->planned) {
      if (torch.copy_(planned[i], handle_of(found[i]), 0)) {
        PyErr_Format(torch.error, "%U: its result does not fit", e->name);
        return -1;
      }
    } else if (torch.new_handle(handle_of(found[i]), &own) || accept(call, e, i, own, &outs[i])) {
      PyErr_Format(torch.error, "%U returned another dtype or rank than was planned", e->name);
      return -1;
    }
  }
  return 0;
}

static int32_t run_python(Call *call, Extern *e, const ts_tensor *args, const int64_t *numbers, ts_tensor *outs) {
  int nt = e->n_tensors, no = e->n_outs, na = e->n_args, bad = 1;
  Handle handles[nt + 1], results[no + 1];
  bool mine[nt + 1], ours[no + 1];
  if (open_handles(call, NULL, e->tensors, nt, args, handles, mine)) return TS_ERROR_EXTERN;
  if (e->planned && open_handles(call, NULL, e->outs, no, outs, results, ours)) {
    close_handles(nt, handles, mine);
    return TS_ERROR_EXTERN;
  }
  PyEval_RestoreThread(call->thread);
  PyObject *tensors[nt + 1], *values[na + 1];
  memset(tensors, 0, sizeof tensors);
  memset(values, 0, sizeof values);
  int made = 0;
  for (; made < nt; made++)
    if (!(tensors[made] = borrow_as_tensor(handles[made]))) break;
  int filled = 0;
  for (; made == nt && filled < na; filled++)
    if (!(values[filled] = fill(PyList_GET_ITEM(e->args, filled), tensors, numbers))) break;
  if (made == nt && filled == na) {
    size_t positional = (size_t)(na - (e->kwnames ? (int)PyTuple_GET_SIZE(e->kwnames) : 0));
    PyObject *result = PyObject_Vectorcall(e->target, values, positional, e->kwnames);
    if (result) bad = take_results(call, e, result, results, outs);
    Py_XDECREF(result);
  }
  if (bad) {
    if (PyErr_Occurred()) PyErr_Fetch(&call->exc_type, &call->exc_value, &call->exc_trace);
    call_error(call, TS_ERROR_EXTERN, "a Python operator raised");
    for (int i = 0; !e->planned && i < no; i++)
      if (outs[i].handle) torch.delete_tensor(outs[i].handle), outs[i].handle = NULL;
  }
  close_handles(nt, handles, mine); /* before the Python tensors, which then free what is left */
  if (e->planned) close_handles(no, results, ours);
  for (int i = 0; i < filled; i++) Py_DECREF(values[i]);
  for (int i = 0; i < made; i++) Py_DECREF(tensors[i]);
  call->thread = PyEval_SaveThread();
  return bad ? TS_ERROR_EXTERN : 0;
}

int32_t extern_run(Call *call, Extern *e, const ts_tensor *args, const int64_t *numbers, ts_tensor *outs) {
  return (e->kind == 0 ? run_shim : run_python)(call, e, args, numbers, outs);
}
