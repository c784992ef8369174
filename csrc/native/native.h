/* What the files of the native host share: torch's C functions found by name, workspaces, externs, the Graph type. */
#ifndef TORCHSMITH_NATIVE_H
#define TORCHSMITH_NATIVE_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "cuda.h"
#include "libtorch.h"
#include "pool.h"
#include "torchsmith.h"
#include "workspace.h"

/* ---- torch.c: Python callables given by runtime/host_torch.py */
typedef struct {
  bool ready;
  Py_ssize_t offset;     /* from a Python tensor to its at::Tensor */
  PyTypeObject *tensor;  /* torch._C.TensorBase */
  PyTypeObject *plain, *parameter; /* torch.Tensor, torch.nn.Parameter */
  PyObject *steal;       /* capsule of at::Tensor* -> Python tensor */
  PyObject *as_strided, *view, *increment_version, *counter;
  PyObject *is_autocast, *disable_autocast;
  PyObject *record_begin, *record_end; /* device -> (token, stream); token -> graph */
  PyObject *modes;       /* () -> number that stands for the state that libraries' calls look at */
  PyObject *on_prepare;  /* (graph name, bytes prepared, bytes of the constants), after constants were prepared */
  PyObject *discard;     /* (tensors...): free their memory */
  PyObject *storage_ref; /* tensor -> weak reference to its storage */
  PyTypeObject *discarded; /* the class of those */
  getter version;        /* Tensor._version */
  void *version_closure;
  PyObject *error;       /* torchsmith.runtime.load.NativeError */
  PyObject *(*wrap)(Handle); /* at::Tensor& -> Python tensor; optional */
} Torch;

extern Torch torch;

PyObject *torch_setup(PyObject *module, PyObject *settings);
/* New reference; steals the handle also on failure. */
PyObject *wrap_handle(Handle h);
static inline Handle handle_of(PyObject *tensor) { return (char *)tensor + torch.offset; }
static inline bool is_tensor(PyObject *o) { return PyObject_TypeCheck(o, torch.tensor); }

/* ---- extern.c: calls into torch */
typedef struct Extern Extern;
typedef struct Call Call;
typedef struct Views Views; /* tensors over arena memory, kept from call to call; one call uses it at a time */
Extern *extern_new(PyObject *spec, int *slots); /* NULL with an exception; counts the tensors of all externs in *slots */
Views *views_new(int slots);
void views_free(Views *v);
void extern_free(Extern *e);
int extern_visit(Extern *e, visitproc visit, void *arg);
int32_t extern_run(Call *call, Extern *e, const ts_tensor *args, const int64_t *numbers, ts_tensor *outs);
extern PyTypeObject SlotType;

/* ---- state.c: what `prepare` computed from inputs that stay the same between calls */
typedef struct State State;
/* Graphs whose `prepare` does the same to its constants share what it computed: one list for each key. With the GIL. */
typedef struct StateList {
  struct StateList *next;
  char *key; /* "": of one graph alone */
  int graphs;
  State **states; /* one per set of constants that was met (several modules may share one graph), the latest used first */
  int n;
} StateList;
typedef struct {
  int n;
  int *inputs;
  bool *prepared_only; /* is this one read by `prepare` and by nothing else? */
  bool trust; /* inference tensors, which have no version counter, count as constant too */
  bool is_far;  /* on a device: the host cannot look at their values */
  bool discard; /* free the memory of prepared_only parameters once they are prepared */
  StateList *list;
} Consts;
/* The state that belongs to these inputs, prepared if need be; a new reference, or NULL with an exception. All with the GIL. */
State *state_open(Consts *c, const ts_graph *entry, const ts_host *host, PyObject *name, PyObject *const *args, const ts_tensor *tensors);
void state_close(State *s);
int consts_join(Consts *c, const char *key);
void consts_leave(Consts *c);
void states_clear(StateList *list);
void states_written(const ts_tensor *t); /* what was prepared of this memory is out of date */
void states_changed(const void *base);   /* the same, by the address where a storage starts */
int64_t version_of(PyObject *tensor);    /* -1: it has no counter */
PyObject *refreeze(PyObject *module, PyObject *tensors);
const void *state_memory(const State *s);
ts_cuda_block *state_block(const State *s); /* of graphs on a device */

/* ---- aliases.c: what Tensor.data and Tensor.numpy gave away */
void aliases_setup(PyObject *tensor_type);
const void *memory_of(Handle tensor); /* where its storage starts; NULL: nowhere */
/* Tell the states of what was written through aliases of this memory since; true: one lives whose writes move no counter. */
bool aliases_look(const void *base);

/* ---- graph.c */
extern PyTypeObject GraphType;
void graph_init(void);
PyObject *native_last_error(PyObject *module, PyObject *none);
struct Call {
  PyThreadState *thread; /* saved while the GIL is released */
  int32_t kind, threads;
  int launches;
  ts_crew *crew; /* or NULL */
  char text[512];
  PyObject *exc_type, *exc_value, *exc_trace; /* of a Python extern */
  void *graph;
  Views *views; /* or NULL */
  ts_cuda_call cuda; /* of graphs on a device */
  PyObject *recording; /* what torch records a segment with */
  void *user_stream;
};
/* `prepare` into `block`; its launches run as those of a call do. `far`: device memory, which holds the result afterwards. */
int32_t call_prepare(const ts_host *host, const ts_tensor *inputs, void *block, ts_cuda_block *far);
void call_error(Call *call, int32_t kind, const char *text);
ts_errors errors_of(Call *call);
#endif
