/* The plain C ABI between generated code and whoever hosts it: one table of services in, one entry point out.
 *
 * A compiled graph is one shared library that exports `ts_graph` (below). It needs libc only. All that it sees of the outside
 * is a ts_host, given at every call. Sizes and strides are in elements. Return 0 is success; otherwise the host has been told
 * why through `error`. Nothing here needs Python or torch headers.
 */
#ifndef TORCHSMITH_H
#define TORCHSMITH_H
#include <stdint.h>

#define TS_ABI 3

typedef struct ts_tensor {
  void *data;             /* address of the first element (storage offset applied) */
  const int64_t *sizes;   /* may be NULL where the callee knows them */
  const int64_t *strides;
  void *handle;           /* the host's own name for it (an AtenTensorHandle inside torch), may be NULL */
} ts_tensor;

typedef void (*ts_kernel)(void *const *bufs, const int64_t *syms, int64_t lo, int64_t hi);
typedef struct ts_launch { ts_kernel fn; void *const *bufs; const int64_t *syms; } ts_launch;

enum { TS_OK = 0, TS_ERROR_CHECK = 1, TS_ERROR_EXTERN = 2, TS_ERROR_MEMORY = 3, TS_ERROR_ABI = 4, TS_ERROR_DEVICE = 5, TS_ERROR_LATE = 6 };

/* One launch on another device: kernel number `kernel` of the library, `grid` blocks, arguments words[first, first + n), of which the
 * first `n_free` are addresses and values: all but sizes. */
typedef struct ts_device_launch {
  int32_t kernel, first, n, n_free;
  int64_t grid;
} ts_device_launch;

enum { TS_REPLAYED = 0, TS_PLAIN = 1, TS_RECORD = 2 };

/* What a host offers to graphs whose kernels run on another device. Everything is queued on the call's stream. */
typedef struct ts_device {
  /* Segment number `segment` of the library (-1: one that is not repeated): these launches, in order. Numbers from n_segments on are parts:
   * the launches between two library calls of a segment, which are recorded for themselves where the segment is not. */
  int32_t (*launch)(void *self, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words);
  /* Segment number `segment` with library calls among its launches. TS_REPLAYED: all of it was queued. TS_PLAIN, TS_RECORD: the caller
   * makes its launches (as parts) and calls now, and says `end`. Less than 0: an error. Words that only those calls tell are 0.
   * `fixed`: what library calls get, addresses and numbers; a record is for these alone. */
  int32_t (*begin)(void *self, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words,
                   const uint64_t *fixed, int32_t n_fixed);
  int32_t (*end)(void *self, int32_t segment);
  /* Waits for what was queued, then copies from the device. */
  int32_t (*read)(void *self, const void *from, void *to, int64_t bytes);
} ts_device;

typedef struct ts_host {
  uint32_t abi;
  void *self;
  /* Result number `index` with this shape, these strides; fills *out. dtype is the ir name's row number (ts_dtype). */
  int32_t (*alloc_result)(void *self, int32_t index, int32_t dtype, int32_t ndim, const int64_t *sizes,
                          const int64_t *strides, ts_tensor *out);
  void *(*take_workspace)(void *self, int64_t bytes);            /* 64-byte aligned; NULL: out of memory */
  void (*give_workspace)(void *self, void *workspace, int64_t bytes);
  void (*parallel_for)(void *self, const ts_launch *launch, int64_t n, int64_t grain);
  /* Extern number `call` of the manifest. args are its tensor arguments in order, outs its results: "planned" outs come in
   * filled, "as_given" outs are filled by the host and released by `release`. scalars are its Expr arguments, in order. */
  int32_t (*extern_call)(void *self, int32_t call, const ts_tensor *args, const int64_t *scalars, ts_tensor *outs);
  /* Makes an as_given tensor have these sizes and strides, copying it when it has others. Called only when they differ. */
  int32_t (*conform)(void *self, ts_tensor *given, int32_t ndim, const int64_t *sizes, const int64_t *strides);
  void (*release)(void *self, ts_tensor *given);
  void (*error)(void *self, int32_t kind, const char *text);
  const ts_device *device; /* NULL: kernels run on the processor */
} ts_host;

enum ts_dtype { TS_F64, TS_F32, TS_BF16, TS_F16, TS_I64, TS_I32, TS_I16, TS_I8, TS_U8, TS_BOOL, TS_C64, TS_C128, TS_C32, TS_U16,
                TS_U32, TS_U64 };

/* A kernel's machine code for one architecture (90: sm_90), or text that the driver compiles. `waits`: it touches no memory before it has
 * waited for the kernels that were launched before it, so it may be launched while the last of them runs. */
typedef struct ts_image {
  int32_t arch, is_text, threads, shared, waits; /* threads of a block; bytes of shared memory */
  const char *data;
  int64_t size;
} ts_image;

typedef struct ts_device_kernel {
  const char *name, *symbol; /* for messages; in the image */
  const ts_image *images;
  int32_t n_images;
} ts_device_kernel;

typedef struct ts_images {
  int32_t n_kernels, n_segments, n_parts;
  const ts_device_kernel *const *kernels;
} ts_images;

typedef struct ts_graph {
  uint32_t abi;
  int32_t n_inputs, n_scalars, n_results, n_result_syms;
  int64_t state_bytes;
  int64_t (*workspace)(const ts_tensor *inputs, const int64_t *scalars);
  int32_t (*prepare)(const ts_host *host, const ts_tensor *inputs, void *state);
  /* prepare fills `state` (state_bytes, 64-byte aligned) from those inputs that the manifest calls consts; run only reads it, and
   * prepare has to run again, into other memory while old runs last, when one of them changes.
   * inputs[i] is zero for an input that is no tensor. scalars: the number inputs in call order (f64 by its bits).
   * results[i] (zero on entry) is filled for fresh results only, also on failure: the host then releases what is there.
   * result_syms: shape, strides and offset of each view result and the value of each size result, in result order. */
  int32_t (*run)(const ts_host *host, const ts_tensor *inputs, const int64_t *scalars, const void *state, ts_tensor *results,
                 int64_t *result_syms);
  const ts_images *images; /* of kernels for another device; NULL: there are none */
} ts_graph;

#endif
