/* libtorch's exported C functions, found by name in whatever libtorch the process has loaded, and operators called through them.
 *
 * No torch header is read and nothing is linked: the same file serves the host inside Python and model libraries. */
#ifndef TORCHSMITH_LIBTORCH_H
#define TORCHSMITH_LIBTORCH_H
#include <stdbool.h>
#include <stddef.h>

#include "torchsmith.h"

#define TS_DTYPES 16 /* rows of ts_dtype */

typedef void *Handle; /* AtenTensorHandle: an at::Tensor* */

typedef struct {
  bool ready;
  int32_t dtypes[TS_DTYPES]; /* torch's number by ts_dtype; -1 where it has none */
  int32_t cpu, cuda; /* numbers of device types; cuda is -1 where torch has none */
  int32_t (*get_data_ptr)(Handle, void **);
  int32_t (*get_sizes)(Handle, int64_t **);
  int32_t (*get_strides)(Handle, int64_t **);
  int32_t (*get_dim)(Handle, int64_t *);
  int32_t (*get_dtype)(Handle, int32_t *);
  int32_t (*get_device_type)(Handle, int32_t *);
  size_t (*element_size)(int32_t);
  int32_t (*get_storage_offset)(Handle, int64_t *);
  int32_t (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Handle *);
  int32_t (*from_blob)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, Handle *);
  int32_t (*reinterpret)(Handle, int64_t, const int64_t *, const int64_t *, int64_t, Handle *);
  int32_t (*delete_tensor)(Handle);
  int32_t (*new_handle)(Handle, Handle *);
  int32_t (*nothing)(Handle *);
  int32_t (*copy_)(Handle, Handle, int32_t);
  bool (*grad_enabled)(void);
  void (*set_grad)(bool);
  /* What follows may be NULL. */
  int32_t (*parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *);
  int32_t (*num_threads)(uint32_t *);
  bool (*inference)(void);
  bool (*is_neg)(Handle); /* a handle is an at::Tensor * */
  bool (*is_conj)(Handle);
  int32_t (*get_device_index)(Handle, int32_t *);
  int32_t (*cuda_stream)(int32_t, void **); /* the current one of a device */
  const char *(*what)(void);
  int32_t (*call)(const char *, const char *, uint64_t *, uint64_t);     /* the dispatcher */
  int32_t (*old_call)(const char *, const char *, uint64_t *);
  int32_t (*list_new)(size_t, void **);
  int32_t (*list_push)(void *, uint64_t);
  int32_t (*string_new)(const char *, size_t, void **);
  int32_t (*value_new)(uint64_t **);
  void *(*allocate)(size_t); /* operator new(size_t): what value_new does where it is missing */
} Libtorch;

extern __attribute__((visibility("hidden"))) Libtorch libtorch;

/* Finds them all, once; NULL, or the name of one that is needed and missing. */
__attribute__((visibility("hidden"))) const char *libtorch_connect(void);
__attribute__((visibility("hidden"))) void *libtorch_find(const char *name);
/* Address and, if wanted, sizes of a tensor in the CPU's memory; -1 for any other. */
__attribute__((visibility("hidden"))) int describe_tensor(Handle h, ts_tensor *out, bool with_sizes, int32_t device);
/* Sizes alone, of a tensor anywhere. */
__attribute__((visibility("hidden"))) int describe_sizes(Handle h, ts_tensor *out);

/* ---- operator.c: calls of operators
 *
 * Parameters of a shim function (`fn` is set), in its order, by letter; a "number" is a constant or the n-th run-time number:
 *   h i     tensor i                        H i     AtenTensorHandle* of tensor i
 *   L [i]   AtenTensorHandle[]              M [i]   AtenTensorHandle*[], -1 for none
 *   i n     integer or bool by value        d n     double by value
 *   I n     int64_t*    D n  double*        B n     int32_t*
 *   a [n]   int64_t[]   A [n] int64_t**     b [n]   int32_t[]
 *   s text  char*       S text char**       0       NULL
 *   r i     where result i goes             o i     planned result i
 * The arguments of an operator that is called through the dispatcher, one for each of its schema, have the letters
 *   h L M i d a s   as above, lists with their own length; f [n] a list of doubles
 *   H I D A S F     the optional ones of h i d a s f, given;  0 None */
enum { SLOT_TENSOR, SLOT_INT, SLOT_FLOAT, SLOT_BOOL };

typedef struct {
  int64_t value; /* a constant or a double's bits; of a run-time number its SLOT kind */
  int32_t slot;  /* run-time number, or -1 */
} ts_number;

typedef struct {
  char letter;
  int16_t n;
  const ts_number *numbers; /* n of them; tensor and result indices are constants here too */
  const char *text;
} ts_param;

typedef struct {
  int16_t dtype, ndim, on_host;
} ts_spec; /* ndim -1: nothing, or not wanted; on_host: a result in the host's memory */

typedef struct {
  const char *name, *overload; /* "aten::sort", "default" is "" */
  const char *said;            /* what errors call it */
  const char *symbol;          /* of the shim function, or NULL: the dispatcher */
  uint64_t version;            /* of the torch whose schema these arguments follow */
  int32_t n_params, n_tensors, n_outs, is_planned;
  const ts_param *params;
  const ts_spec *tensors, *outs;
  int32_t scratch; /* words of room that the parameters need */
  void *fn;        /* the shim function */
} ts_operator;

/* A tensor object over memory that we own costs 0.6 us to make and free, so the shims' ones are kept and used again while address,
 * sizes, strides and inference mode are the same (which block of the workspace list a call gets is mostly the same). */
#define VIEW_DIMS 6
typedef struct {
  Handle handle;
  void *data;
  int64_t sizes[VIEW_DIMS], strides[VIEW_DIMS];
  bool inference;
} ts_view;

typedef void (*ts_report)(void *self, int32_t kind, const char *text);
/* Who calls operators: where errors go, and the device on which its memory lies. */
typedef struct {
  ts_report error;
  void *self;
  int32_t device, index;
} ts_errors;

#define TS_LOCAL __attribute__((visibility("hidden")))
/* Room and limits of an operator's parameters; false: too many arguments. */
TS_LOCAL bool operator_measure(ts_operator *o);
/* An owned or borrowed handle for each tensor; those that were made are marked in `mine`. `views`: kept ones, or NULL. */
TS_LOCAL int handles_open(ts_errors to, ts_view *views, const ts_spec *specs, int n, const ts_tensor *given, Handle *out, bool *mine);
TS_LOCAL void handles_close(int n, Handle *handles, const bool *mine);
/* Take over an as_given result: kernels trust its dtype and rank, so they are checked here. Steals the handle. */
TS_LOCAL int result_accept(ts_errors to, const ts_spec *spec, Handle h, ts_tensor *out);
/* `views`: kept tensors, or NULL. */
TS_LOCAL int32_t operator_run(ts_errors to, const ts_operator *o, ts_view *views, const ts_tensor *args, const int64_t *numbers, ts_tensor *outs);
/* Copies an as_given tensor that has other strides; ts_host documents it. */
TS_LOCAL int32_t operator_conform(ts_errors to, ts_tensor *given, int32_t ndim, const int64_t *sizes, const int64_t *strides);
TS_LOCAL void operator_release(ts_tensor *given);
TS_LOCAL void libtorch_error(ts_errors to, const char *what);
#endif
