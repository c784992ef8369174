/* NVIDIA devices through the driver's C interface, found by name at run time: used by the host inside Python and by model libraries.
 *
 * No CUDA header is read and nothing is linked. A ts_cuda is one compiled graph on the devices of this process: its kernels and what
 * was recorded of its segments. A ts_cuda_call is one call of it: device, stream, workspace. */
#ifndef TORCHSMITH_CUDA_H
#define TORCHSMITH_CUDA_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "torchsmith.h"

typedef void (*ts_cuda_report)(void *self, int32_t kind, const char *text);

/* Device memory that stays with a stream between calls. */
typedef struct ts_cuda_block ts_cuda_block;

/* Who gives memory: torch's allocator inside PyTorch, the driver elsewhere. NULL where there is none left. `stream` is the call's. */
typedef struct ts_cuda_memory {
  void *(*take)(void *self, int32_t device, void *stream, int64_t bytes, void **handle);
  void (*give)(void *self, int32_t device, void *stream, void *data, void *handle);
  void *self;
} ts_cuda_memory;

typedef struct ts_cuda ts_cuda;

typedef struct ts_cuda_call {
  ts_cuda *graph;
  void *stream;
  uint64_t stream_id;
  int32_t device;
  bool is_capturing; /* the caller records this stream */
  bool is_pushed;
  int mode; /* of captures by this thread, before cuda_apart */
  uint64_t modes; /* what library calls look at besides their arguments: a recorded one is for these */
  ts_cuda_report report;
  void *self; /* what `report` is called with */
  const ts_cuda_memory *memory;
  struct ts_cuda_staged *staged; /* inputs that were copied */
  struct ts_cuda_record *record; /* being made by this call */
} ts_cuda_call;

/* What became of one segment: for explain. */
typedef struct ts_cuda_counts {
  int64_t plain, replayed, patched, recorded, dropped;
  int32_t launches, records; /* of the latest call; alive */
} ts_cuda_counts;

#pragma GCC visibility push(hidden)
/* Finds the driver, once; NULL, or in words what is missing. */
const char *cuda_connect(void);
int32_t cuda_device_count(void);
/* 90 for compute capability 9.0; 0 for no such device. */
int32_t cuda_arch(int32_t device);
/* The device whose context is current in this thread, else 0. */
int32_t cuda_current(void);
/* Is there code for this device in every kernel? If not, `text` says so. */
bool cuda_fits(const ts_images *images, int32_t device, char *text, size_t room);

/* NULL: no memory. `most`: records kept of a segment, 0 for none. */
ts_cuda *cuda_new(const ts_images *images, int32_t most);
void cuda_free(ts_cuda *g);
ts_cuda_counts cuda_counts(ts_cuda *g, int32_t segment);
const char *cuda_why_plain(ts_cuda *g, int32_t segment);

/* Makes the device's context current (cuda_end puts the old one back) and asks the stream whether it is being captured.
 * The caller has filled graph, stream, device, report, self and memory. */
int32_t cuda_begin(ts_cuda_call *c);
int32_t cuda_end(ts_cuda_call *c);
/* Until what was queued on the call's stream, or on any stream of its device, is done. */
int32_t cuda_wait(ts_cuda_call *c);
int32_t cuda_wait_all(ts_cuda_call *c);
/* Queued copies inside of the device's memory, and to it: the host's memory may be written again after cuda_wait. */
int32_t cuda_copy(ts_cuda_call *c, void *to, const void *from, int64_t bytes);
int32_t cuda_upload(ts_cuda_call *c, void *to, const void *from, int64_t bytes);

int32_t cuda_launch(ts_cuda_call *c, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words);
/* Segments with library calls: csrc/torchsmith.h says what begin answers. While a record is made, the call's stream is one that is being
 * captured; `graph` is what came of it, kept alive by `owner`, which `release` lets go. */
int32_t cuda_segment_begin(ts_cuda_call *c, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words,
                           const uint64_t *fixed, int32_t n_fixed);
int32_t cuda_segment_end(ts_cuda_call *c, int32_t segment, void *graph, void *owner, void (*release)(void *owner));
/* No record, and never again one of this segment, for this reason. */
void cuda_segment_abort(ts_cuda_call *c, const char *why);
int32_t cuda_read(ts_cuda_call *c, const void *from, void *to, int64_t bytes);
/* An address that is no multiple of 16 is replaced by that of a copy; `span` bytes are copied, and copied back by cuda_end if `written`. */
int32_t cuda_align(ts_cuda_call *c, void **data, int64_t span, bool written);
/* What cuda_end does with the copies, now. */
int32_t cuda_unstage(ts_cuda_call *c);

/* The workspace of a call, and its return: to be had by the next call on this stream. */
void *cuda_take(ts_cuda_call *c, int64_t bytes);
void cuda_give(ts_cuda_call *c, void *workspace);
void cuda_return(void *workspace); /* the same, outside of a call */
/* Frees workspaces that nobody uses: of this device, or of all (-1). True: there were some. */
bool cuda_trim(int32_t device);
void cuda_memory_stats(int64_t *bytes, int32_t *blocks);

/* Memory that outlives calls: prepared constants. It is freed by a later call, when the device has come to the end of what is queued. */
void *cuda_block_new(ts_cuda_call *c, int64_t bytes, ts_cuda_block **block);
void cuda_block_free(ts_cuda_block *block);
/* Marks what was queued so far; the block's readers on other streams wait for it. */
int32_t cuda_block_ready(ts_cuda_call *c, ts_cuda_block *block);
int32_t cuda_block_wait(ts_cuda_call *c, ts_cuda_block *block);
/* While a caller records, work that must happen now goes to a stream of its own: begins and ends that. */
int32_t cuda_apart(ts_cuda_call *c, ts_cuda_call *apart);
int32_t cuda_apart_end(ts_cuda_call *apart);

extern const ts_cuda_memory CUDA_OWN_MEMORY; /* the driver's */
#pragma GCC visibility pop
#endif
