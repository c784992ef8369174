/* Shared declarations of the frame extension: tensor metadata, global state, guard programs, entries, dispatcher, hook. */
#ifndef TS_FRAME_H
#define TS_FRAME_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stddef.h>
#include <string.h>

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030E0000
#error "torchsmith's frame extension knows CPython 3.11, 3.12 and 3.13 only"
#endif
#ifdef Py_GIL_DISABLED
#error "torchsmith's frame extension needs the GIL"
#endif
#ifndef TS_WATCHES /* dicts tell us of changes (3.12 on); before, they carry a version */
#define TS_WATCHES (PY_VERSION_HEX >= 0x030C0000)
#endif

/* ---- tensor.c: metadata of a torch.Tensor without torch's headers */
typedef struct {
  PyTypeObject *type; /* strong */
  uint64_t keys;
  int32_t dtype, device_type, device_index;
  int32_t requires_grad;
  int32_t ndim;
  int64_t *dims; /* sizes then strides; TS_ANY: not checked */
} TensorGuard;
#define TS_ANY INT64_MIN

int ts_is_tensor(PyObject *obj);
TensorGuard *ts_tensor_guard_new(PyObject *value); /* a TensorGuard of capture/source.py */
void ts_tensor_guard_free(TensorGuard *g);
int ts_tensor_check(const TensorGuard *g, PyObject *obj); /* 1, 0, -1 */
int ts_tensor_dims(PyObject *obj, int *ndim, const int64_t **sizes, const int64_t **strides);
int ts_tensor_range(PyObject *obj, uintptr_t *lo, uintptr_t *hi); /* 0 ok, -1 error */
int ts_tensor_offset(PyObject *obj, int64_t *out);
PyObject *ts_clone_set(PyObject *self, PyObject *arg);
PyObject *ts_refill_set(PyObject *self, PyObject *args);
int ts_same_set(PyObject *a, PyObject *b, int (*same)(PyObject *, PyObject *));
PyObject *ts_setup_tensor(PyObject *self, PyObject *args);
PyObject *ts_set_discarded(PyObject *self, PyObject *cls);
PyObject *ts_set_plain_reader(PyObject *self, PyObject *fn);
PyObject *ts_tensor_info(PyObject *self, PyObject *obj);

/* ---- state.c: process and thread state a graph depends on */
typedef struct {
  uint64_t included, excluded;   /* torch's thread-local dispatch keys, raw */
  uint64_t switches, precisions; /* of at::Context: SWITCHES and PRECISIONS of runtime/host_torch.py */
  int64_t autograd, default_dtype, function_modes, autocast;
} State;
int ts_state_read(State *out); /* 1: complete; 0: this torch needs the Python reading */
int ts_state_is_foreign(const State *s); /* under a dispatch mode, functorch, anomaly mode or a forward derivative */
int ts_profiling(void);
int ts_under_modes(void); /* is a mode of torch functions on the stack? */
PyObject *ts_setup_state(PyObject *self, PyObject *args);
PyObject *ts_state_info(PyObject *self, PyObject *unused);

/* ---- watch.c: a word that changes whenever the dict does */
const uint64_t *ts_version_acquire(PyObject *dict); /* NULL without an error: not to be had */
const uint64_t *ts_version_peek(PyObject *dict);    /* the word if somebody has acquired it */
void ts_version_release(const uint64_t *word);
int ts_watch_init(void);

/* ---- guards.c: a guard program, run against one call */
enum { NODE_LOCAL, NODE_GLOBAL, NODE_GLOBAL_IN, NODE_CELL, NODE_FIXED, NODE_INSTANCE, NODE_MODULE_DICT, NODE_TYPE_ATTR, NODE_GETATTR,
       NODE_ITEM_SEQ, NODE_ITEM_DICT, NODE_CELL_CONTENTS, NODE_TYPE_OF, NODE_TENSOR_PROPERTY, NODE_OWN_DICT, NODE_COMPUTED, NODE_REFERENT, NODE_KINDS };

typedef struct { int kind, base, arg; PyObject *key, *extra; } Node;
typedef struct { int kind, node; PyObject *value; TensorGuard *tensor; int n, told; int *nodes; int64_t *code; } GuardOp;
typedef struct Record Record;

typedef struct {
  PyObject_HEAD
  int n_nodes, n_guards, n_inputs, n_graph; /* inputs past n_graph are for the recipe */
  Node *nodes;
  GuardOp *guards;
  int *inputs;
  uint8_t *unstable; /* per node: how often what was recorded about it turned out changed */
  Record *record;
  PyObject *call, *finish, *recipe, *name, *source, *globals;
  PyObject *resume; /* None, or the site at which this compilation ends: its result is the frame's state there */
  PyObject *anew; /* where the graph raises, run the function itself, as the program could see the difference: True, False, or whom to ask */
  State state;
  int state_known; /* 1 while `state` is a reading under which the state guard held */
  uint64_t hits;
  int failed; /* guard that failed last, for tests */
  int dead;
} Entry;
extern PyTypeObject Entry_Type;

typedef struct {
  PyObject **locals;
  int n_locals;
  PyObject *globals, *closure; /* borrowed; closure may be NULL */
  const State *state;
  int state_complete;
  PyObject *names, *free_names; /* borrowed: parameter names, closure names; only `finish` needs them */
} Frame;

/* 1: all guards hold and the inputs are gathered and the graph has run: *result is new or NULL with an exception.
 * 0: a guard failed. -1: exception while checking. */
int ts_entry_try(Entry *e, Frame *f, PyObject **result);

PyObject *ts_setup_profiled(PyObject *self, PyObject *fn);
PyObject *ts_use_raw(PyObject *self, PyObject *flag);
PyObject *ts_use_state(PyObject *self, PyObject *flag);

/* ---- dispatcher.c */
extern PyTypeObject Dispatcher_Type;
int ts_dispatcher_init(void);
extern PyObject *ts_run_hooked, *ts_run_plain, *ts_go_on;
extern PyObject *ts_elsewhere; /* exception of a graph: the program takes another way than was captured, and nothing was done yet */
int ts_dispatcher_frame(PyObject *dispatcher, PyObject **locals, PyObject *function, PyObject **result);
PyObject *ts_setup_dispatch(PyObject *self, PyObject *args);
PyObject *ts_set_gate(PyObject *self, PyObject *arg);
PyObject *ts_watch_stance(PyObject *self, PyObject *args);

int ts_point_handled(PyObject *dispatcher); /* does its state end with the exception that is being handled? */

/* ---- resume.c */
extern PyTypeObject Pending_Type;
PyObject *ts_pending(PyObject *site, PyObject *state);
PyObject *ts_follow(PyObject *result, PyObject *key, PyObject *fn);
PyObject *ts_setup_rest(PyObject *self, PyObject *fn);

/* ---- module_call.c */
PyObject *ts_module_call(void); /* the `__call__` of compiled modules' classes */
PyObject *ts_setup_module(PyObject *self, PyObject *args);

/* ---- hook.c */
int ts_hook_init(PyObject *module);
typedef struct { int active; PyObject *key; } HookState;
HookState ts_hook_enter(PyObject *key, PyObject *function); /* this thread runs a function as it is; both are borrowed until leave */
void ts_hook_leave(HookState before);
PyObject *ts_peer_pause(void);
void ts_peer_resume(PyObject *was);
int ts_hook_suspend(void); /* returns what ts_hook_resume wants back */
void ts_hook_resume(int before);
extern PyMethodDef ts_hook_methods[];

#endif
