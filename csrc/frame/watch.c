/* A version word for any dict: it changes whenever the dict does.
 *
 * CPython 3.11 keeps one in every dict (ma_version_tag). Later ones are told by a dict watcher; the words of watched dicts live in a
 * hash table, each as long as a record uses it. Once a dict is gone its word changes a last time, and stays until released.
 */
#include "frame.h"

#if !TS_WATCHES

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
const uint64_t *ts_version_acquire(PyObject *dict) { return &((PyDictObject *)dict)->ma_version_tag; }
const uint64_t *ts_version_peek(PyObject *dict) { return &((PyDictObject *)dict)->ma_version_tag; }
void ts_version_release(const uint64_t *word) {}
int ts_watch_init(void) { return 0; }

#else

typedef struct Watched { uint64_t version; PyObject *dict; int users; struct Watched *next; } Watched;
static Watched **buckets;
static size_t n_buckets, n_watched;
static uint64_t clock_; /* every change anywhere gets a number of its own */
static int watcher = -1;

static size_t slot_of(PyObject *dict, size_t n) { return (((uintptr_t)dict >> 4) * 0x9E3779B97F4A7C15ull >> 20) & (n - 1); }

static Watched *find(PyObject *dict) {
  if (!n_buckets) return NULL;
  for (Watched *w = buckets[slot_of(dict, n_buckets)]; w; w = w->next)
    if (w->dict == dict) return w;
  return NULL;
}

static void forget(Watched *w) { /* out of the table; the word itself stays for those who use it */
  for (Watched **p = &buckets[slot_of(w->dict, n_buckets)]; *p; p = &(*p)->next)
    if (*p == w) { *p = w->next; n_watched--; break; }
  w->dict = NULL;
}

static int on_event(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value) {
  Watched *w = find(dict);
  if (!w) return 0;
  w->version = ++clock_;
  if (event == PyDict_EVENT_DEALLOCATED) forget(w);
  return 0;
}

static int grow(void) {
  size_t n = n_buckets ? 2 * n_buckets : 1024;
  Watched **table = PyMem_Calloc(n, sizeof *table);
  if (!table) return -1;
  for (size_t i = 0; i < n_buckets; i++)
    for (Watched *w = buckets[i], *next; w; w = next) {
      next = w->next;
      size_t h = slot_of(w->dict, n);
      w->next = table[h], table[h] = w;
    }
  PyMem_Free(buckets);
  buckets = table, n_buckets = n;
  return 0;
}

/* 3.13.0 tells nobody about attribute stores into values that an object still shares with its __dict__ (gh-125608). A key that is no
 * string ends the sharing. */
static int end_sharing(PyObject *dict) {
#if PY_VERSION_HEX >= 0x030D0000
  if (Py_Version >= 0x030D0100 || !((PyDictObject *)dict)->ma_values) return 0;
  static PyObject *key;
  if (!key && !(key = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type))) return -1;
  if (PyDict_SetItem(dict, key, Py_None) < 0 || PyDict_DelItem(dict, key) < 0) return -1;
#endif
  return 0;
}

const uint64_t *ts_version_peek(PyObject *dict) {
  Watched *w = find(dict);
  return w ? &w->version : NULL;
}

/* NULL (no error): cannot be watched. */
const uint64_t *ts_version_acquire(PyObject *dict) {
  Watched *w = find(dict);
  if (w) { w->users++; return &w->version; }
  if (watcher < 0 || (n_watched * 2 >= n_buckets && grow() < 0) || end_sharing(dict) < 0 || PyDict_Watch(watcher, dict) < 0) { PyErr_Clear(); return NULL; }
  if (!(w = PyMem_Calloc(1, sizeof *w))) return NULL;
  w->dict = dict, w->users = 1, w->version = ++clock_;
  Watched **p = &buckets[slot_of(dict, n_buckets)];
  w->next = *p, *p = w, n_watched++;
  return &w->version;
}

void ts_version_release(const uint64_t *word) {
  Watched *w = (Watched *)((char *)word - offsetof(Watched, version));
  if (--w->users > 0) return;
  if (w->dict) {
    PyObject *dict = w->dict;
    forget(w);
    if (PyDict_Unwatch(watcher, dict) < 0) PyErr_Clear();
  }
  PyMem_Free(w);
}

int ts_watch_init(void) {
  watcher = PyDict_AddWatcher(on_event);
  if (watcher < 0) PyErr_Clear(); /* no free slot: everything is checked in full on every call */
  return 0;
}
#endif
