/* Prepared constants: packed weights and the like, computed once and kept while their inputs stay the same.
 *
 * Before every run each constant input is compared with what was seen when the state was prepared: the same tensor object's
 * implementation, data pointer and version counter, and eight words spread over its memory (writes through .data or NumPy move no
 * counter). Any difference prepares again into fresh memory; calls that still run keep the old block by their reference. */
#include <string.h>

#include "native.h"

#define WORDS 8

typedef struct {
  void *impl, *data;
  int64_t version; /* -1: an inference tensor */
  int64_t span;    /* bytes from the first to the last element */
  uint64_t words[WORDS];
} Snapshot;

struct State {
  int refs;
  void *block;
  Snapshot snaps[];
};

const void *state_memory(const State *s) { return s->block; }

void state_close(State *s) {
  if (!s || --s->refs) return;
  if (s->block) block_free(s->block);
  PyMem_Free(s);
}

static void sample(const Snapshot *s, uint64_t *words) {
  memset(words, 0, sizeof(uint64_t) * WORDS);
  if (s->span <= (int64_t)sizeof(uint64_t) * WORDS) {
    if (s->span > 0) memcpy(words, s->data, (size_t)s->span);
    return;
  }
  int64_t step = (s->span - (int64_t)sizeof(uint64_t)) / (WORDS - 1);
  for (int i = 0; i < WORDS; i++) memcpy(&words[i], (const char *)s->data + i * step, sizeof(uint64_t));
}

static int64_t version_of(PyObject *tensor) {
  PyObject *v = torch.version(tensor, torch.version_closure);
  int64_t n = v ? PyLong_AsLongLong(v) : -1;
  Py_XDECREF(v);
  PyErr_Clear(); /* inference tensors have no counter and say so */
  return n;
}

static bool is_same(const Consts *c, const State *s, PyObject *const *args, const ts_tensor *tensors) {
  for (int i = 0; i < c->n; i++) {
    const Snapshot *snap = &s->snaps[i];
    int k = c->inputs[i];
    if (snap->data != tensors[k].data || snap->impl != *(void **)tensors[k].handle) return false;
    if (snap->version < 0 ? !c->trust : snap->version != version_of(args[k])) return false;
  }
  bool same = true;
  for (int i = 0; i < c->n; i++) { /* a loop of its own: the cache misses overlap */
    uint64_t words[WORDS];
    sample(&s->snaps[i], words);
    same &= memcmp(words, s->snaps[i].words, sizeof words) == 0;
  }
  return same;
}

static int take_snapshot(Snapshot *snap, PyObject *tensor, const ts_tensor *t) {
  int64_t ndim = 0, *sizes = NULL, *strides = NULL, last = 0;
  int32_t dtype = 0;
  if (torch.get_dim(t->handle, &ndim) || torch.get_sizes(t->handle, &sizes) || torch.get_strides(t->handle, &strides) ||
      torch.get_dtype(t->handle, &dtype)) {
    PyErr_SetString(torch.error, "a constant input cannot be read");
    return -1;
  }
  for (int64_t d = 0; d < ndim; d++) {
    last += (sizes[d] - 1) * strides[d];
    if (sizes[d] == 0) last = INT64_MIN / 4;
  }
  snap->impl = *(void **)t->handle;
  snap->data = t->data;
  snap->version = version_of(tensor);
  snap->span = last < 0 ? 0 : (last + 1) * (int64_t)torch.element_size(dtype);
  sample(snap, snap->words);
  return 0;
}

State *state_open(Consts *c, const ts_graph *entry, const ts_host *host, PyObject *name, PyObject *const *args, const ts_tensor *tensors) {
  State *s = c->state;
  if (s && is_same(c, s, args, tensors)) {
    s->refs++;
    return s;
  }
  c->state = NULL;
  if (s && s->refs > 1) { /* calls still run on it */
    state_close(s);
    s = NULL;
  }
  if (!s) {
    s = PyMem_Calloc(1, sizeof(State) + sizeof(Snapshot) * (size_t)c->n);
    if (!s) return (State *)PyErr_NoMemory();
    s->block = block_new(entry->state_bytes);
  }
  s->refs = 2; /* the graph's and the caller's */
  bool bad = s->block == NULL;
  if (bad) PyErr_NoMemory();
  for (int i = 0; !bad && i < c->n; i++) bad = take_snapshot(&s->snaps[i], args[c->inputs[i]], &tensors[c->inputs[i]]) < 0;
  if (!bad && entry->prepare(host, tensors, s->block)) {
    PyErr_SetString(torch.error, "constants could not be prepared");
    bad = true;
  }
  if (!bad) {
    PyObject *told = PyObject_CallFunction(torch.on_prepare, "OL", name, (long long)entry->state_bytes);
    bad = told == NULL;
    Py_XDECREF(told);
  }
  if (bad) {
    s->refs = 1;
    state_close(s);
    return NULL;
  }
  State *old = c->state; /* the callback may have let another thread in: the last one wins */
  c->state = s;
  state_close(old);
  return s;
}
