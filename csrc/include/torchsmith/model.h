/* What a compiled model offers: the plain C interface of a torchsmith model, with no libtorch, no Python and no C++ runtime.
 *
 * Every model library (model.so, a model inside a package, or a model linked statically) exports these functions. Load a library or
 * a package with <torchsmith/package.h>, or link the model and call tsm_create directly. Every function that can fail returns a
 * tsm_status; tsm_last_error() then has the text, per thread. Nothing aborts, and nothing throws.
 *
 * A model may be used by many threads at once. Sizes and strides are in elements.
 */
#ifndef TORCHSMITH_MODEL_H
#define TORCHSMITH_MODEL_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TSM_ABI_VERSION 1

typedef enum tsm_status {
  TSM_OK = 0,
  TSM_ERROR_ARGUMENT = 1,  /* a NULL or a number that makes no sense */
  TSM_ERROR_COUNT = 2,     /* too few or too many inputs or outputs */
  TSM_ERROR_DTYPE = 3,
  TSM_ERROR_RANK = 4,
  TSM_ERROR_SIZE = 5,      /* a size differs, or lies outside of the range that was declared */
  TSM_ERROR_STRIDE = 6,
  TSM_ERROR_DEVICE = 7,
  TSM_ERROR_ALIGNMENT = 8,
  TSM_ERROR_MEMORY = 9,
  TSM_ERROR_CPU = 10,      /* this processor lacks instructions the model was compiled for */
  TSM_ERROR_FILE = 11,     /* a file cannot be opened, read or mapped */
  TSM_ERROR_FORMAT = 12,   /* a file is truncated, damaged or not a package */
  TSM_ERROR_VERSION = 13,  /* made by a newer torchsmith */
  TSM_ERROR_WEIGHTS = 14,  /* weights are missing, do not belong to the model, or do not fit */
  TSM_ERROR_NAME = 15,     /* no model or constant has this name */
  TSM_ERROR_CHECK = 16,    /* a check of the program itself failed (an index out of range, say) */
  TSM_ERROR_OPERATOR = 17  /* an operator that only libtorch has */
} tsm_status;

typedef enum tsm_dtype {
  TSM_F64, TSM_F32, TSM_BF16, TSM_F16, TSM_I64, TSM_I32, TSM_I16, TSM_I8, TSM_U8, TSM_BOOL, TSM_C64, TSM_C128, TSM_C32, TSM_U16,
  TSM_U32, TSM_U64
} tsm_dtype;

/* One tensor. As an input: whatever the caller has; strides NULL means contiguous. As an output: all zero asks the model to allocate
 * it (give it back with tsm_release); with `data` set, ndim, sizes and strides say what it has room for, and the result is written
 * there if that is exactly its shape. */
typedef struct tsm_tensor {
  void *data;
  const int64_t *sizes;
  const int64_t *strides;
  int32_t ndim;
  int32_t dtype;  /* tsm_dtype */
  int32_t device; /* 0: the CPU; n: CUDA device n - 1 */
  int32_t kind;   /* of an output: 0 a tensor, 1 nothing (None) */
  void *block;    /* the model's own; zero for the caller's memory */
} tsm_tensor;

/* Where the weights are, and how the model runs. Zero is a good value for every field. */
typedef struct tsm_config {
  uint32_t size;             /* sizeof(tsm_config) */
  int32_t threads;           /* of one call; 0: one per core, 1: only the calling thread */
  const char *weights_path;  /* file that holds the weights; NULL: beside or inside the model library */
  uint64_t weights_offset;   /* where they start in that file */
  uint64_t weights_size;     /* 0: to its end */
  void *(*allocate)(void *context, size_t bytes); /* 64-byte aligned memory for outputs; NULL: the model's own */
  void (*release)(void *context, void *memory);
  void *context;
  const void *weights_data;  /* the weights in memory (64-byte aligned, not copied; weights_size says how many bytes), instead of a file */
  int32_t device;            /* of a model for CUDA: n for device n - 1; 0: the one whose context is current, else device 0 */
} tsm_config;

typedef struct tsm_model tsm_model;

typedef struct tsm_tensor_info {
  const char *name;
  int32_t dtype, ndim, kind;  /* kind of an output: 0 a tensor, 1 nothing (None); ndim -1: not known ahead */
  const int64_t *lo, *hi;     /* smallest and largest size per dimension; hi -1: no limit */
} tsm_tensor_info;

typedef struct tsm_constant_info {
  const char *name; /* as in the module: "fc1.weight" */
  int32_t dtype, ndim;
  const int64_t *sizes, *strides;
  uint64_t bytes;
} tsm_constant_info;

#if defined(TSM_NO_PROTOTYPES)
#else
uint32_t tsm_abi_version(void);
/* The library has to stay where it is while `config` is read; it is not needed afterwards. */
int32_t tsm_create(const tsm_config *config, tsm_model **out);
void tsm_delete(tsm_model *model);
int32_t tsm_run(tsm_model *model, const tsm_tensor *inputs, size_t n_inputs, tsm_tensor *outputs, size_t n_outputs);
/* The same on a CUstream (cudaStream_t) of the model's device; tsm_run takes the default stream. Work is queued: outputs are there when the
 * stream has come to it. `allocate` of the configuration gives device memory. A model for the CPU takes NULL only. */
int32_t tsm_run_on(tsm_model *model, const tsm_tensor *inputs, size_t n_inputs, tsm_tensor *outputs, size_t n_outputs, void *stream);
/* Give an output's memory back. Harmless for the caller's own memory and for zeroed tensors. Device memory may be given to the next call on
 * the stream of the call that made it: work on other streams that still reads it must have been waited for. */
void tsm_release(tsm_tensor *output);
/* Text of the last error of this thread; never NULL. */
const char *tsm_last_error(void);

size_t tsm_input_count(const tsm_model *model);
size_t tsm_output_count(const tsm_model *model);
size_t tsm_constant_count(const tsm_model *model);
int32_t tsm_input(const tsm_model *model, size_t index, tsm_tensor_info *out);
int32_t tsm_output(const tsm_model *model, size_t index, tsm_tensor_info *out);
int32_t tsm_constant(const tsm_model *model, size_t index, tsm_constant_info *out);
/* JSON text: names, shapes, ranges, kernels, origins of the model. */
const char *tsm_info(const tsm_model *model);
/* New values for constants, by name; data is copied. Calls that run meanwhile see all old values or all new ones. */
int32_t tsm_load_constants(tsm_model *model, const char *const *names, const tsm_tensor *values, size_t count);
#endif

#ifdef __cplusplus
}
#endif
#endif
