/* Extern calls: libtorch's C shim functions by their schema, or Python operators with the GIL taken.
 *
 * A spec (made by runtime/host_torch.py) is a tuple (kind, name, target, args, kwnames, tensors, outs, planned):
 *   kind     0 shim: target is the symbol's name, args the shim's parameters in order as (letter, payload), libtorch.h says which
 *            1 python: target is a callable, args a list of templates, kwnames names the last ones
 *   tensors  [(dtype row, ndim)] per tensor argument; outs [(dtype row, ndim, is it in the host's memory?) or None]
 *   planned  the outs are memory of the caller
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#include <structmember.h>

typedef struct {
  PyObject_HEAD
  int kind, index;
} Slot;

struct Views {
  int n;
  ts_view slots[];
};

struct Extern {
  int first_slot; /* of n_tensors + n_outs in Views */
  int kind, n_args;
  PyObject *name, *target, *args, *kwnames, *keep;
  ts_operator o;
  ts_param *params; /* o.params and o.tensors, o.outs, to be freed */
  ts_spec *tensors, *outs;
};

/* ---------------------------------------------------------------- slots */

static PyObject *slot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  int kind, index;
  if (!PyArg_ParseTuple(args, "ii", &kind, &index)) return NULL;
  Slot *s = (Slot *)type->tp_alloc(type, 0);
  if (s) s->kind = kind, s->index = index;
  return (PyObject *)s;
}

static PyMemberDef slot_members[] = {{"kind", T_INT, offsetof(Slot, kind), READONLY, NULL}, {"index", T_INT, offsetof(Slot, index), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

PyTypeObject SlotType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "torchsmith.runtime._native.Slot",
    .tp_doc = "Slot(kind, index): a place in an extern's arguments, filled at every call. kind 0 tensor, 1 int, 2 float, 3 bool.",
    .tp_basicsize = sizeof(Slot),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = slot_new,
    .tp_members = slot_members,
};

/* ---------------------------------------------------------------- making */

static int read_number(PyObject *o, bool as_double, ts_number *out) {
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

static int read_param(ts_param *p, PyObject *row) {
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
  p->n = list ? (int16_t)PySequence_Size(payload) : 1;
  ts_number *numbers = PyMem_Calloc((size_t)(p->n < 0 ? 0 : p->n) + 1, sizeof(ts_number));
  p->numbers = numbers;
  if (p->n < 0 || !numbers) return -1;
  for (int i = 0; i < p->n; i++) {
    PyObject *o = list ? PySequence_GetItem(payload, i) : Py_NewRef(payload);
    int bad = !o || read_number(o, real, &numbers[i]);
    Py_XDECREF(o);
    if (bad) return -1;
  }
  return 0;
}

static ts_spec *read_specs(PyObject *rows, int *n) {
  *n = (int)PyList_GET_SIZE(rows);
  ts_spec *out = PyMem_Calloc((size_t)*n + 1, sizeof(ts_spec));
  for (int i = 0; out && i < *n; i++) {
    PyObject *row = PyList_GET_ITEM(rows, i);
    int dtype = -1, ndim = -1, on_host = 0;
    if (row != Py_None && !PyArg_ParseTuple(row, "ii|p", &dtype, &ndim, &on_host)) {
      PyMem_Free(out);
      return NULL;
    }
    out[i] = (ts_spec){(int16_t)dtype, (int16_t)ndim, (int16_t)on_host};
  }
  return out;
}

static int read_shim(Extern *e) {
#if !(defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__)))
  PyErr_SetString(PyExc_NotImplementedError, "shim calls need a known calling convention");
  return -1;
#endif
  e->o.fn = libtorch_find(PyUnicode_AsUTF8(e->target));
  if (!e->o.fn) {
    PyErr_Format(PyExc_LookupError, "libtorch_cpu lacks %U", e->target);
    return -1;
  }
  e->o.n_params = (int)PyList_GET_SIZE(e->args);
  e->o.params = e->params = PyMem_Calloc((size_t)e->o.n_params + 1, sizeof(ts_param));
  if (!e->params) return -1;
  for (int i = 0; i < e->o.n_params; i++) {
    ts_param *p = &e->params[i];
    if (read_param(p, PyList_GET_ITEM(e->args, i)) < 0) return -1;
    bool tensor = strchr("hHLM", p->letter) != NULL, out = strchr("ro", p->letter) != NULL;
    for (int k = 0; k < p->n && (tensor || out); k++)
      if (p->numbers[k].value >= (tensor ? e->o.n_tensors : e->o.n_outs) || p->numbers[k].value < (p->letter == 'M' ? -1 : 0)) {
        PyErr_SetString(PyExc_ValueError, "a tensor index of an extern is out of range");
        return -1;
      }
  }
  if (!operator_measure(&e->o)) {
    PyErr_SetString(PyExc_NotImplementedError, "an extern has too many arguments");
    return -1;
  }
  return 0;
}

Views *views_new(int slots) {
  Views *v = calloc(1, sizeof(Views) + sizeof(ts_view) * (size_t)slots);
  if (v) v->n = slots;
  return v;
}

void views_free(Views *v) {
  for (int i = 0; v && i < v->n; i++)
    if (v->slots[i].handle) libtorch.delete_tensor(v->slots[i].handle);
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
  e->o.is_planned = planned;
  e->keep = Py_NewRef(spec);
  e->name = name, e->target = target, e->args = args;
  e->kwnames = kwnames == Py_None ? NULL : kwnames;
  e->n_args = (int)PyList_GET_SIZE(args);
  e->o.said = PyUnicode_AsUTF8(name); /* cached UTF-8: the spec keeps it alive */
  e->o.tensors = e->tensors = read_specs(tensors, &e->o.n_tensors);
  e->o.outs = e->outs = read_specs(outs, &e->o.n_outs);
  if (!e->o.said || !e->tensors || !e->outs || (kind == 0 && read_shim(e) < 0)) {
    extern_free(e);
    return NULL;
  }
  e->first_slot = *slots;
  *slots += kind == 0 ? e->o.n_tensors + e->o.n_outs : 0;
  return e;
}

void extern_free(Extern *e) {
  for (int i = 0; e->params && i < e->o.n_params; i++) PyMem_Free((void *)e->params[i].numbers);
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
  if (libtorch.new_handle(h, &own)) return PyErr_Format(torch.error, "new_tensor_handle failed");
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
  int no = e->o.n_outs;
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
    if (e->o.is_planned) {
      if (libtorch.copy_(planned[i], handle_of(found[i]), 0)) {
        PyErr_Format(torch.error, "%U: its result does not fit", e->name);
        return -1;
      }
    } else if (libtorch.new_handle(handle_of(found[i]), &own) || result_accept(errors_of(call), &e->outs[i], own, &outs[i])) {
      PyErr_Format(torch.error, "%U returned another dtype or rank than was planned", e->name);
      return -1;
    }
  }
  return 0;
}

static int32_t run_python(Call *call, Extern *e, const ts_tensor *args, const int64_t *numbers, ts_tensor *outs) {
  int nt = e->o.n_tensors, no = e->o.n_outs, na = e->n_args, bad = 1;
  Handle handles[nt + 1], results[no + 1];
  bool mine[nt + 1], ours[no + 1];
  if (handles_open(errors_of(call), NULL, e->tensors, nt, args, handles, mine)) return TS_ERROR_EXTERN;
  if (e->o.is_planned && handles_open(errors_of(call), NULL, e->outs, no, outs, results, ours)) {
    handles_close(nt, handles, mine);
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
    for (int i = 0; !e->o.is_planned && i < no; i++)
      if (outs[i].handle) libtorch.delete_tensor(outs[i].handle), outs[i].handle = NULL;
  }
  handles_close(nt, handles, mine); /* before the Python tensors, which then free what is left */
  if (e->o.is_planned) handles_close(no, results, ours);
  for (int i = 0; i < filled; i++) Py_DECREF(values[i]);
  for (int i = 0; i < made; i++) Py_DECREF(tensors[i]);
  call->thread = PyEval_SaveThread();
  return bad ? TS_ERROR_EXTERN : 0;
}

int32_t extern_run(Call *call, Extern *e, const ts_tensor *args, const int64_t *numbers, ts_tensor *outs) {
  if (e->kind) return run_python(call, e, args, numbers, outs);
  return operator_run(errors_of(call), &e->o, call->views ? call->views->slots + e->first_slot : NULL, args, numbers, outs);
}
