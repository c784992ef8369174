/* Prepared constants: packed weights and the like, computed once and kept while their inputs stay the same.
 *
 * Before every run each constant input is compared with what was seen when the state was prepared: the same tensor object's
 * implementation, data pointer and version counter, and those of its aliases (aliases.c). Writes from outside of torch move no counter:
 * small tensors are compared whole with a copy, large ones by words spread over their memory, or whole where NumPy has their memory; what
 * lies on a device is not looked at. Any difference prepares again; calls that still run keep the old block by their reference. Several
 * modules of one class may share a graph, so a graph keeps one state for each set of tensors, as long as those live. */
#include <string.h>

#include "native.h"

#define WORDS 16
#define WHOLE 16384     /* bytes of a tensor that is compared whole, */
#define BUDGET (1 << 18) /* and of all of them together: the comparison must stay small beside the run */
#define MOST 256 /* states of one graph */

typedef struct {
  void *impl, *data;
  const void *base; /* where its storage starts */
  int64_t version; /* -1: an inference tensor */
  int64_t span;    /* bytes from the first to the last element */
  char *copy; /* of all of them, or NULL */
  uint64_t words[WORDS];
} Snapshot;

static int64_t generation; /* states of an earlier one are prepared anew */

struct State {
  int refs, n;
  int64_t generation;
  void *block;
  ts_cuda_block *far; /* whose memory `block` is, on a device */
  PyObject *alive; /* weak reference to the first constant's storage: one to the tensor itself would forbid torch.utils.swap_tensors */
  Snapshot snaps[];
};

const void *state_memory(const State *s) { return s->block; }
ts_cuda_block *state_block(const State *s) { return s->far; }

void state_close(State *s) {
  if (!s || --s->refs) return;
  if (s->far) cuda_block_free(s->far);
  else if (s->block) block_free(s->block);
  for (int i = 0; i < s->n; i++) PyMem_Free(s->snaps[i].copy);
  Py_XDECREF(s->alive);
  PyMem_Free(s);
}

void states_clear(StateList *list) {
  State **old = list->states;
  int n = list->n;
  list->states = NULL;
  list->n = 0;
  for (int i = 0; i < n; i++) state_close(old[i]);
  PyMem_Free(old);
}

static StateList *lists;

int consts_join(Consts *c, const char *key) {
  if (!c->n) return 0;
  for (StateList *l = lists; *key && l; l = l->next)
    if (strcmp(l->key, key) == 0) {
      l->graphs++;
      c->list = l;
      return 0;
    }
  StateList *l = PyMem_Calloc(1, sizeof *l + strlen(key) + 1);
  if (!l) {
    PyErr_NoMemory();
    return -1;
  }
  l->key = strcpy((char *)(l + 1), key);
  l->graphs = 1;
  l->next = lists;
  lists = c->list = l;
  return 0;
}

void consts_leave(Consts *c) {
  StateList *l = c->list, **at = &lists;
  c->list = NULL;
  if (!l || --l->graphs) return;
  while (*at != l) at = &(*at)->next;
  *at = l->next;
  states_clear(l);
  PyMem_Free(l);
}

/* The same tensor objects, whatever they hold. */
static bool is_of(const Consts *c, const State *s, const ts_tensor *tensors) {
  for (int i = 0; i < c->n; i++)
    if (s->snaps[i].impl != *(void **)tensors[c->inputs[i]].handle) return false;
  return true;
}

static void remove_state(StateList *l, int i) {
  State *s = l->states[i];
  memmove(&l->states[i], &l->states[i + 1], sizeof(State *) * (size_t)(--l->n - i));
  state_close(s);
}

/* Put `s` first; takes over the reference. */
static int keep_state(StateList *l, State *s) {
  for (int i = l->n - 1; i >= 0; i--)
    if (l->states[i]->alive && PyWeakref_GetObject(l->states[i]->alive) == Py_None) remove_state(l, i);
  while (l->n >= MOST) remove_state(l, l->n - 1);
  State **more = PyMem_Realloc(l->states, sizeof(State *) * (size_t)(l->n + 1));
  if (!more) {
    PyErr_NoMemory();
    return -1;
  }
  l->states = more;
  memmove(&more[1], more, sizeof(State *) * (size_t)l->n);
  more[0] = s;
  l->n++;
  return 0;
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

int64_t version_of(PyObject *tensor) {
  PyObject *v = torch.version(tensor, torch.version_closure);
  int64_t n = v ? PyLong_AsLongLong(v) : -1;
  Py_XDECREF(v);
  PyErr_Clear(); /* inference tensors have no counter and say so */
  return n;
}

static bool is_discarded(PyObject *tensor) { return Py_TYPE(tensor) == torch.discarded; }

static bool is_same(const Consts *c, const State *s, PyObject *const *args, const ts_tensor *tensors) {
  for (int i = 0; i < c->n; i++) {
    const Snapshot *snap = &s->snaps[i];
    int k = c->inputs[i];
    if (is_discarded(args[k])) continue; /* there is nothing left that could differ */
    if (snap->data != tensors[k].data || snap->impl != *(void **)tensors[k].handle) return false;
    if (snap->version < 0 ? !c->trust : snap->version != version_of(args[k])) return false;
  }
  if (c->is_far) return true;
  bool same = true;
  for (int i = 0; i < c->n; i++) { /* a loop of its own: the cache misses overlap */
    const Snapshot *snap = &s->snaps[i];
    uint64_t words[WORDS];
    if (is_discarded(args[c->inputs[i]])) continue;
    if (snap->copy) {
      same &= memcmp(snap->copy, snap->data, (size_t)snap->span) == 0;
      continue;
    }
    sample(snap, words);
    same &= memcmp(words, snap->words, sizeof words) == 0;
  }
  return same;
}

/* Bytes from the first to the last element; negative where it cannot be told. */
static int64_t span_of(const ts_tensor *t) {
  int64_t ndim = 0, *sizes = NULL, *strides = NULL, last = 0;
  int32_t dtype = 0;
  if (libtorch.get_dim(t->handle, &ndim) || libtorch.get_sizes(t->handle, &sizes) || libtorch.get_strides(t->handle, &strides) ||
      libtorch.get_dtype(t->handle, &dtype))
    return -1;
  for (int64_t d = 0; d < ndim; d++) {
    if (sizes[d] == 0) return 0;
    last += (sizes[d] - 1) * strides[d];
  }
  return (last + 1) * (int64_t)libtorch.element_size(dtype);
}

/* States that have a constant which `concerns` says yes to are prepared anew at their next call. */
static void outdate(bool (*concerns)(const Snapshot *, const void *), const void *what) {
  for (StateList *l = lists; l; l = l->next)
    for (int i = 0; i < l->n; i++)
      for (int k = 0; k < l->states[i]->n; k++)
        if (concerns(&l->states[i]->snaps[k], what)) l->states[i]->generation = -1;
}

typedef struct {
  const char *from, *to;
} Extent;

static bool overlaps(const Snapshot *s, const void *extent) {
  const Extent *e = extent;
  return (const char *)s->data < e->to && e->from < (const char *)s->data + s->span;
}

static bool starts_at(const Snapshot *s, const void *base) { return s->base == base; }
static bool is_tensors(const Snapshot *s, const void *impl) { return s->impl == impl; }

void states_written(const ts_tensor *t) {
  Extent written = {t->data, (const char *)t->data + span_of(t)};
  outdate(overlaps, &written);
}

void states_changed(const void *base) { outdate(starts_at, base); }

/* Nothing was written through aliases of the constants since the state was prepared. */
static bool is_untouched(const State *s, int64_t current, bool is_far) {
  for (int i = 0; i < s->n; i++)
    if (aliases_look(s->snaps[i].base) && (is_far || !s->snaps[i].copy)) return false;
  return s->generation == current;
}

static int take_snapshot(Snapshot *snap, PyObject *tensor, const ts_tensor *t, int64_t *budget, bool is_far) {
  int64_t span = span_of(t);
  if (span < 0) {
    PyErr_SetString(torch.error, "a constant input cannot be read");
    return -1;
  }
  snap->impl = *(void **)t->handle;
  snap->data = t->data;
  snap->base = memory_of(t->handle);
  snap->version = version_of(tensor);
  snap->span = span;
  PyMem_Free(snap->copy);
  snap->copy = NULL;
  if (is_far) return 0;
  bool is_whole = aliases_look(snap->base);
  if (snap->span > (int64_t)sizeof snap->words && (is_whole || (snap->span <= WHOLE && snap->span <= *budget))) {
    if (!(snap->copy = PyMem_Malloc((size_t)snap->span))) {
      PyErr_NoMemory();
      return -1;
    }
    memcpy(snap->copy, t->data, (size_t)snap->span);
    if (!is_whole) *budget -= snap->span;
  } else {
    sample(snap, snap->words);
  }
  return 0;
}

/* Free what only `prepare` read. */
static int discard(const Consts *c, PyObject *const *args) {
  int n = 0;
  PyObject **chosen = PyMem_Malloc(sizeof(PyObject *) * (size_t)c->n), *done;
  if (!chosen) {
    PyErr_NoMemory();
    return -1;
  }
  for (int i = 0; i < c->n; i++)
    if (c->prepared_only[i]) chosen[n++] = args[c->inputs[i]];
  done = PyObject_Vectorcall(torch.discard, chosen, (size_t)n, NULL);
  PyMem_Free(chosen);
  Py_XDECREF(done);
  return done ? 0 : -1;
}

State *state_open(Consts *c, const ts_graph *entry, const ts_host *host, PyObject *name, PyObject *const *args, const ts_tensor *tensors) {
  State *s = NULL;
  StateList *l = c->list;
  for (int i = 0; i < l->n && !s; i++) {
    if (!is_of(c, l->states[i], tensors)) continue;
    s = l->states[i];
    memmove(&l->states[1], l->states, sizeof(State *) * (size_t)i);
    l->states[0] = s;
    if (is_untouched(s, generation, c->is_far) && is_same(c, s, args, tensors)) {
      s->refs++;
      return s;
    }
    s->refs++; /* changed: out of the list, and used again if no call runs on it */
    remove_state(l, 0);
    if (s->refs > 1 || s->far) { /* calls that are queued on a device may still read it */
      state_close(s);
      s = NULL;
      break;
    }
  }
  for (int i = 0; i < c->n; i++)
    if (is_discarded(args[c->inputs[i]])) {
      state_close(s);
      return (State *)PyErr_Format(torch.error, "weights cannot be packed for %S: the memory of input %d was discarded when it was packed before "
                                   "(options freezing_discard_parameters); give the parameter new values first, for instance by "
                                   "load_state_dict(..., assign=True)", name, c->inputs[i]);
    }
  if (!s) {
    s = PyMem_Calloc(1, sizeof(State) + sizeof(Snapshot) * (size_t)c->n);
    if (!s) return (State *)PyErr_NoMemory();
    s->refs = 1;
    s->n = c->n;
    if (c->is_far) {
      s->block = cuda_block_new(&((Call *)host->self)->cuda, entry->state_bytes, &s->far);
      if (!s->block) PyErr_SetString(torch.error, "no device memory for prepared constants");
    } else {
      s->block = block_new(entry->state_bytes);
      if (!s->block) PyErr_NoMemory();
    }
  }
  Py_XSETREF(s->alive, s->block ? PyObject_CallOneArg(torch.storage_ref, args[c->inputs[0]]) : NULL); /* an address may belong to a new tensor */
  bool bad = s->alive == NULL;
  s->generation = generation;
  int64_t budget = BUDGET;
  for (int i = 0; !bad && i < c->n; i++) bad = take_snapshot(&s->snaps[i], args[c->inputs[i]], &tensors[c->inputs[i]], &budget, c->is_far) < 0;
  if (!bad && call_prepare(host, tensors, s->block, s->far)) {
    PyErr_SetString(torch.error, "constants could not be prepared");
    bad = true;
  }
  if (!bad) {
    long long original = 0;
    for (int i = 0; i < c->n; i++) original += s->snaps[i].span;
    PyObject *told = PyObject_CallFunction(torch.on_prepare, "OLL", name, (long long)entry->state_bytes, original);
    bad = told == NULL || keep_state(l, s) < 0 || (c->discard && discard(c, args) < 0);
    Py_XDECREF(told);
  }
  if (bad) {
    state_close(s);
    return NULL;
  }
  s->refs++; /* the list's and the caller's */
  return s;
}

PyObject *refreeze(PyObject *module, PyObject *tensors) {
  if (PyTuple_GET_SIZE(tensors) == 0) generation++;
  for (Py_ssize_t t = 0; t < PyTuple_GET_SIZE(tensors); t++) {
    PyObject *tensor = PyTuple_GET_ITEM(tensors, t);
    if (!torch.ready) break;
    if (!is_tensor(tensor)) return PyErr_Format(PyExc_TypeError, "refreeze takes tensors, not %s", Py_TYPE(tensor)->tp_name);
    outdate(is_tensors, *(void **)handle_of(tensor));
  }
  Py_RETURN_NONE;
}
