/* Sets in their order: what iterating over one gives depends on its table, not on its elements alone. */
#include "frame.h"

/* Give an empty set the other's table, entry by entry. */
static int copy_table(PySetObject *to, PySetObject *from) {
  size_t size = (size_t)from->mask + 1;
  setentry *table = to->smalltable;
  if (from->table != from->smalltable && !(table = PyMem_Malloc(size * sizeof *table))) { PyErr_NoMemory(); return -1; }
  memcpy(table, from->table, size * sizeof *table);
  for (size_t i = 0; i < size; i++)
    if (table[i].key && table[i].hash != -1) Py_INCREF(table[i].key); /* what was deleted is marked by a hash that no element has */
  to->table = table, to->mask = from->mask, to->fill = from->fill, to->used = from->used, to->finger = from->finger;
  return 0;
}

/* clone_set(set or frozenset): a set that iterates, grows and pops as that one does. */
PyObject *ts_clone_set(PyObject *self, PyObject *arg) {
  if (!PyAnySet_Check(arg)) { PyErr_SetString(PyExc_TypeError, "clone_set takes a set"); return NULL; }
  PyObject *to = PySet_New(NULL);
  if (to && copy_table((PySetObject *)to, (PySetObject *)arg) < 0) Py_CLEAR(to);
  return to;
}

/* refill_set(set, like): the set holds what `like` holds, in its order. */
PyObject *ts_refill_set(PyObject *self, PyObject *args) {
  PyObject *to, *from;
  if (!PyArg_ParseTuple(args, "OO!", &to, &PySet_Type, &from)) return NULL;
  if (!PySet_Check(to)) { PyErr_SetString(PyExc_TypeError, "refill_set takes a set"); return NULL; }
  if (PySet_Clear(to) < 0 || copy_table((PySetObject *)to, (PySetObject *)from) < 0) return NULL;
  Py_RETURN_NONE;
}

/* The next element at or after place *i of the table, NULL behind the last one. Free places hold NULL, emptied ones the hash -1. */
static PyObject *next_element(PyObject *set, Py_ssize_t *i) {
  PySetObject *s = (PySetObject *)set;
  while (*i <= s->mask) {
    setentry *e = &s->table[(*i)++];
    if (e->key && e->hash != -1) return e->key;
  }
  return NULL;
}

/* Are the elements the same, in the same order? 1, 0, -1 */
int ts_same_set(PyObject *a, PyObject *b, int (*same)(PyObject *, PyObject *)) {
  Py_ssize_t i = 0, j = 0;
  PyObject *x, *y;
  if (PySet_GET_SIZE(a) != PySet_GET_SIZE(b)) return 0;
  while ((x = next_element(a, &i)) && (y = next_element(b, &j))) {
    int r = same(x, y);
    if (r <= 0) return r;
  }
  return 1;
}
