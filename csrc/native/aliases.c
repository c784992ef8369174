/* Aliases of tensors whose writes move no version counter that a compiled graph looks at: what `Tensor.data` and `Tensor.numpy` return.
 *
 * `t.data` has a counter of its own: writes through it, and through views of it, move that one. So the getter is replaced by one that
 * remembers each alias by a weak reference and its counter, under the address of its memory. A dead alias may have been written before it
 * died. What `numpy` returns has no counter: while it lives its memory has to be compared whole. Torch's own objects stay in place
 * (descriptors point to a copy of their definition), so Python sees no difference. All with the GIL. */
#include "native.h"

typedef struct Alias {
  struct Alias *next;
  const void *base;
  PyObject *ref;   /* weak */
  int64_t version; /* -1: writes move no counter */
} Alias;

static Alias **buckets;
static size_t n_buckets, n_aliases;

static size_t place_of(const void *base, size_t n) { return (size_t)(((uintptr_t)base >> 4) * 0x9E3779B97F4A7C15u >> 20) & (n - 1); }

static bool is_dead(const Alias *a) { return PyWeakref_GetObject(a->ref) == Py_None; }

static void unlink_alias(Alias **at) {
  Alias *a = *at;
  *at = a->next;
  n_aliases--;
  Py_DECREF(a->ref);
  PyMem_Free(a);
}

/* Twice as many buckets; without memory for them the lists only grow longer. */
static void grow(void) {
  size_t n = n_buckets ? 2 * n_buckets : 256;
  Alias **more = PyMem_Calloc(n, sizeof *more);
  if (!more) return;
  for (size_t i = 0; i < n_buckets; i++)
    for (Alias *a = buckets[i], *next; a; a = next) {
      size_t k = place_of(a->base, n);
      next = a->next;
      a->next = more[k];
      more[k] = a;
    }
  PyMem_Free(buckets);
  buckets = more;
  n_buckets = n;
}

const void *memory_of(Handle tensor) {
  void *data = NULL;
  int64_t offset = 0;
  int32_t dtype = 0;
  if (libtorch.get_data_ptr(tensor, &data) || libtorch.get_storage_offset(tensor, &offset) || libtorch.get_dtype(tensor, &dtype)) return NULL;
  return (char *)data - offset * (int64_t)libtorch.element_size(dtype);
}

/* Remember `alias`, of the memory of `tensor`. What cannot be remembered is no error: the sample still watches it. */
static void remember(PyObject *tensor, PyObject *alias, bool counts) {
  PyObject *told = PyObject_CallOneArg(torch.counter, tensor); /* unheard by modes of torch functions; raises where there is no memory */
  int64_t version = told && counts ? PyLong_AsLongLong(told) : -1;
  const void *base = told ? memory_of(handle_of(tensor)) : NULL;
  Py_XDECREF(told);
  Alias *a = base ? PyMem_Calloc(1, sizeof *a) : NULL;
  if (a && (a->ref = PyWeakref_NewRef(alias, NULL))) {
    if (n_aliases >= n_buckets) grow();
    if (n_buckets) {
      Alias **at = &buckets[place_of(base, n_buckets)];
      while (*at)
        if (is_dead(*at)) {
          states_changed((*at)->base);
          unlink_alias(at);
        } else at = &(*at)->next;
      *at = a;
      a->base = base;
      a->version = version;
      n_aliases++;
      a = NULL;
    }
  }
  if (a) Py_XDECREF(a->ref);
  PyMem_Free(a);
  PyErr_Clear();
}

bool aliases_look(const void *base) {
  bool is_blind = false;
  if (!n_aliases) return false;
  for (Alias **at = &buckets[place_of(base, n_buckets)]; *at;) {
    Alias *a = *at;
    if (a->base != base) {
      at = &a->next;
    } else if (is_dead(a)) {
      states_changed(base);
      unlink_alias(at);
    } else {
      int64_t now = a->version < 0 ? -1 : version_of(PyWeakref_GetObject(a->ref));
      if (now != a->version) states_changed(base);
      a->version = now;
      is_blind |= now < 0;
      at = &a->next;
    }
  }
  return is_blind;
}

static PyGetSetDef data, *torchs_data;
static PyMethodDef numpy, *torchs_numpy;

/* Subclasses may compute anything; tensors of functorch have no memory, and `data_ptr` says so. */
static bool is_plain(PyObject *tensor) { return Py_TYPE(tensor) == torch.plain || Py_TYPE(tensor) == torch.parameter; }

static PyObject *get_data(PyObject *self, void *closure) {
  PyObject *alias = torchs_data->get(self, closure);
  if (alias && is_plain(self) && is_plain(alias)) remember(alias, alias, true);
  return alias;
}

static PyObject *call_numpy(PyObject *self, PyObject *args, PyObject *kwargs) {
  PyObject *array = ((PyCFunctionWithKeywords)(void (*)(void))torchs_numpy->ml_meth)(self, args, kwargs);
  if (array && is_plain(self)) remember(self, array, false);
  return array;
}

void aliases_setup(PyObject *type) {
  PyObject *getter = PyObject_GetAttrString(type, "data"), *method = PyObject_GetAttrString(type, "numpy");
  if (getter && Py_IS_TYPE(getter, &PyGetSetDescr_Type)) {
    PyGetSetDescrObject *d = (PyGetSetDescrObject *)getter;
    torchs_data = d->d_getset;
    data = *torchs_data;
    data.get = get_data;
    d->d_getset = &data;
  }
  if (method && Py_IS_TYPE(method, &PyMethodDescr_Type)) {
    PyMethodDescrObject *d = (PyMethodDescrObject *)method;
    if (d->d_method->ml_flags == (METH_VARARGS | METH_KEYWORDS)) {
      torchs_numpy = d->d_method;
      numpy = *torchs_numpy;
      numpy.ml_meth = (PyCFunction)(void (*)(void))call_numpy;
      d->d_method = &numpy;
    }
  }
  Py_XDECREF(getter); /* the type keeps them alive */
  Py_XDECREF(method);
  PyErr_Clear();
}
