/* Between a generated model and the fixed sources around it (no torch, libc only).
 *
 * The generated unit defines one `ts_model_desc torchsmith_model`: everything a door has to know besides the ts_graph. The engine
 * (engine.c) makes models from it; plain.c and aoti.c are doors, which differ only in how tensors come in and go out.
 */
#ifndef TORCHSMITH_AOT_MODEL_H
#define TORCHSMITH_AOT_MODEL_H
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "torchsmith.h"
#include "torchsmith/model.h"

#define TS_SELDOM __attribute__((cold)) /* of loading and of errors, not of calls: small rather than quick */

#define TS_MODEL_ABI 3
#define TS_HIDDEN __attribute__((visibility("hidden")))
#define TS_EXPORT __attribute__((visibility("default")))

/* ---- the description */

typedef struct {
  const char *name;
  int16_t dtype, ndim;
  int32_t graph_input;    /* its number among the graph's inputs */
  const int64_t *lo, *hi; /* per dimension; hi -1: no limit */
  int32_t written;        /* does the graph write it? */
} ts_input_desc;

enum { TS_OUT_FRESH, TS_OUT_SAME, TS_OUT_INPUT, TS_OUT_VIEW_INPUT, TS_OUT_VIEW_RESULT, TS_OUT_NUMBER, TS_OUT_NONE };

typedef struct {
  int16_t kind, dtype, ndim; /* ndim of views; dtype of numbers and views */
  int32_t of;                /* graph input or result that is viewed */
  int32_t at;                /* first of its numbers in result_syms */
  int32_t result;            /* its number among the graph's results; -1 for nothing */
} ts_output_desc;

enum { TS_CONST_PREPARED = 1, TS_CONST_READ = 2, TS_CONST_WRITTEN = 4 };

typedef struct {
  const char *name, *fqn;
  int16_t dtype, ndim;
  int16_t flags, type;  /* type: 1 parameter, 2 buffer, 3 tensor constant, as PyTorch numbers them */
  int32_t graph_input;  /* constants that are tied share it */
  const int64_t *sizes, *strides;
  int64_t bytes;
  int64_t offset; /* in the weights; -1: not stored, because only what was prepared from it is needed */
} ts_constant_desc;

typedef struct { /* a condition on sizes and strides; `limit` texts name the input */
  int32_t status; /* tsm_status */
  const char *text;
} ts_condition;

typedef struct ts_operators ts_operators; /* operators.h; NULL: the model needs no libtorch */
typedef struct ts_device_services ts_device_services; /* device.h; NULL: kernels run on the processor */

typedef struct {
  uint32_t abi;
  const char *name, *in_spec, *out_spec, *info;
  const char *cpu; /* features it needs, as /proc/cpuinfo names them, separated by blanks */
  int32_t n_inputs, n_outputs, n_constants;
  const ts_input_desc *inputs;
  const ts_output_desc *outputs;
  const ts_constant_desc *constants;
  const ts_condition *conditions;
  int32_t (*check)(const ts_tensor *in, int64_t *found); /* number of the condition that fails, or -1 */
  void (*wanted)(const ts_tensor *in, int64_t *strides); /* NULL, or: other strides are copied; writes each input's, in order */
  uint8_t weights_id[16];
  int64_t weights_size;
  int64_t state_offset; /* of what prepare computed, in the weights; -1: not stored */
  int32_t writes;       /* the graph writes constants (buffers): its calls go one after the other */
  const ts_operators *operators;
  const char *device_type; /* torch's word for where inputs, constants and outputs lie: "cpu", "cuda" */
  const ts_device_services *device;
} ts_model_desc;

extern TS_HIDDEN const ts_model_desc torchsmith_model;
extern const ts_graph torchsmith_graph;

/* ---- sizes
 * What the engine computes of sizes and strides that others give goes through these: false where 64 bits do not hold it. */

static inline bool ts_multiply(int64_t *value, int64_t by) { return !__builtin_mul_overflow(*value, by, value); }
static inline bool ts_increase(int64_t *value, int64_t by) { return !__builtin_add_overflow(*value, by, value); }
/* Bytes from the first element to behind the last one, at most 2^62: 0 where there is none. false also for a negative stride. */
TS_HIDDEN bool ts_span(int32_t ndim, const int64_t *sizes, const int64_t *strides, size_t item, int64_t *bytes);
/* Row-major strides into `strides`; *count (or NULL): elements. */
TS_HIDDEN bool ts_dense(int32_t ndim, const int64_t *sizes, int64_t *strides, int64_t *count);
/* Copies elements of `item` bytes between two layouts, `move` a run that lies without gaps on both sides at a time. Sizes and strides in elements. */
typedef int32_t ts_move(void *context, void *to, const void *from, int64_t bytes);
TS_HIDDEN int32_t ts_copy_runs(
    ts_move *move, void *context, char *to, const int64_t *into, const char *from, const int64_t *step, int32_t ndim, const int64_t *sizes, size_t item
);
/* Elements of any strides into memory of any other: what ts_span found for `into` has room. */
TS_HIDDEN void ts_copy(char *to, const int64_t *into, const char *from, const int64_t *step, int32_t ndim, const int64_t *sizes, size_t item);

/* ---- the weights in a file: this header, then blocks at the offsets that the description names */

#define TS_WEIGHTS_MAGIC "TSWEIGHT"
typedef struct {
  char magic[8];
  uint32_t version, reserved;
  uint64_t size; /* header included */
  uint8_t id[16];
  uint32_t has_crc, crc; /* of what follows the header; 0: an older file, which has none */
  uint8_t rest[16];
} ts_weights_header;

/* At the end of a model library that carries its weights. */
#define TS_TAIL_MAGIC "TSMODEL1"
typedef struct {
  uint64_t code_size; /* bytes of the ELF file */
  uint64_t weights_offset, weights_size;
  uint32_t code_crc, reserved;
  char magic[8];
} ts_tail;

/* ---- the engine */

typedef struct ts_generation ts_generation;
struct ts_generation { /* one set of constant values; calls hold a reference while they run */
  int64_t refs;
  const void *state;
  void *owned_state, *owned_values; /* memory; of a model on a device, blocks of its memory */
  ts_generation *parent; /* whose state this one uses, because nothing changed that is prepared */
  bool *is_given;        /* per constant, in sets that were loaded: buffers that calls write and nobody gave follow those in use */
  ts_tensor inputs[]; /* one per graph input; those that the caller gives are zero */
};

struct tsm_model {
  const char *map; /* the weights, or NULL */
  size_t map_size;
  void *map_base;
  pthread_mutex_t lock; /* of `now` and `next` */
  pthread_mutex_t turn; /* of calls, where they write constants */
  pthread_mutex_t updating; /* taken first: one update, swap or release of a set at a time */
  ts_generation *now, *next;
  int32_t threads; /* of a call, 1 or more */
  void *(*allocate)(void *, size_t);
  void (*release)(void *, void *);
  void *context;
  int32_t device;     /* number of the device that kernels run on */
  struct ts_cuda *far; /* kernels there; NULL: they run on the processor */
};

typedef struct { /* what every service gets as `self` starts with this */
  tsm_model *model;
  struct ts_cuda_call *far; /* of a call on a device */
} ts_call;

/* As tsm_tensor has it: 0 the processor, n device n - 1. */
static inline int32_t ts_place(const tsm_model *m) { return torchsmith_model.device ? m->device + 1 : 0; }

typedef struct { const char *name; const tsm_tensor *value; } ts_given;

TS_HIDDEN int32_t ts_fail(int32_t status, const char *format, ...) __attribute__((format(printf, 2, 3)));
TS_HIDDEN const char *ts_error_text(void);
TS_HIDDEN void ts_error_clear(void);
TS_HIDDEN int32_t ts_model_open(const tsm_config *config, tsm_model **out);
TS_HIDDEN void ts_model_close(tsm_model *m);
/* Checks one input; `seen` has the caller's dtype, rank and device. */
TS_HIDDEN int32_t ts_check_input(const tsm_model *m, int32_t index, const ts_tensor *t, int32_t dtype, int32_t ndim, int32_t device);
TS_HIDDEN int32_t ts_check_all(const ts_tensor *in);
/* Copies inputs whose strides are not those that were compiled for.
 * `copies` has a place for each input, zero at first; `strides` one for each dimension of each input. */
TS_HIDDEN int32_t ts_copy_inputs(ts_call *call, ts_tensor *in, void **copies, int64_t *strides);
TS_HIDDEN void ts_copies_end(void **copies);
TS_HIDDEN ts_generation *ts_hold(tsm_model *m);
TS_HIDDEN void ts_let_go(tsm_model *m, ts_generation *g);
/* A new set of constants: `given` over those that hold now; is_next keeps it aside until ts_swap. */
TS_HIDDEN int32_t ts_update(tsm_model *m, const ts_given *given, size_t n, bool is_next, bool is_full);
TS_HIDDEN int32_t ts_swap(tsm_model *m);
TS_HIDDEN void ts_forget_next(tsm_model *m);
TS_HIDDEN int32_t ts_pack(const ts_given *given, size_t n, void *state);
TS_HIDDEN int32_t ts_run_status(int32_t rc);
TS_HIDDEN void ts_report_error(void *self, int32_t kind, const char *text); /* ts_host.error */
TS_HIDDEN ts_host ts_host_services(void); /* everything but results and their owner */
TS_HIDDEN size_t ts_itemsize(int32_t dtype);
TS_HIDDEN const char *ts_dtype_name(int32_t dtype);

/* ---- cpu.c, weights.c */
TS_HIDDEN int32_t ts_check_cpu(const char *needed);
TS_HIDDEN int32_t ts_map_weights(tsm_model *m, const tsm_config *config);
#endif
