/* NVIDIA devices through libcuda.so.1: kernels, launches, recorded segments, workspaces. In: ts_images and launches. Out: queued work.
 *
 * A segment is a run of launches that the host program hands over together. Launched one by one, each costs the host about 3 us; recorded
 * as a CUDA graph they cost 1.1 us in all, be they one or many. A record is made from the launches themselves (one node for each, nothing is
 * captured), and what differs in a later call (addresses of results and inputs, sizes, grids) is set in its nodes before it is launched, 0.2
 * us for each node. So results are the caller's own tensors, and one record serves all sizes; several are kept, for the (stream, sizes) that
 * return.
 *
 * A kernel that begins with a wait for those before it (ts_image.waits) is launched while the last of them still runs: its blocks come to
 * their places meanwhile, which saves 0.2 to 0.5 us on the device. The wait ends when the kernel before has ended, and that one has waited in
 * its turn or was launched after the end of what came before it: so the order is the stream's. All other work (library calls, copies) begins
 * after the end of our kernels, as ever.
 *
 * Numbers of enumerations and layouts of structures are those of the CUDA driver API's documentation, version 12. */
#include "cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t Result; /* CUresult */
typedef void *Handle_;  /* CUcontext, CUstream, ... are addresses */
typedef uint64_t Address; /* CUdeviceptr */

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };
enum { MAJOR = 75, MINOR = 76 };       /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_* */
enum { MAX_DYNAMIC_SHARED = 8 };       /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
enum { RELAXED = 2 };                  /* CU_STREAM_CAPTURE_MODE_RELAXED */
enum { NO_TIMING = 2, NON_BLOCKING = 1 }; /* CU_EVENT_DISABLE_TIMING, CU_STREAM_NON_BLOCKING */
enum { PROGRAMMATIC_SERIALIZATION = 6 }; /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */

typedef struct { /* CUDA_KERNEL_NODE_PARAMS_v2 */
  Handle_ func;
  unsigned grid[3], block[3], shared;
  void **params, **extra;
  Handle_ kernel, context;
} NodeParams;

typedef struct { /* CUlaunchAttribute */
  int32_t id, unused;
  union {
    int32_t is_on;
    char all[64];
  } value;
} Attribute;

typedef struct { /* CUlaunchConfig */
  unsigned grid[3], block[3], shared;
  Handle_ stream;
  Attribute *attributes;
  unsigned n;
} LaunchConfig;

typedef struct { /* CUgraphEdgeData */
  unsigned char from_port, to_port, type, reserved[5];
} EdgeData;
static const EdgeData EARLY = {1, 0, 1, {0}}; /* CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC */

typedef struct {
  Result (*init)(unsigned);
  Result (*device_count)(int *);
  Result (*device_get)(int *, int);
  Result (*device_attribute)(int *, int, int);
  Result (*primary)(Handle_ *, int);
  Result (*current)(Handle_ *);
  Result (*current_device)(int *);
  Result (*push)(Handle_);
  Result (*pop)(Handle_ *);
  Result (*synchronize)(void);
  Result (*library_load)(Handle_ *, const void *, void *, void *, unsigned, void *, void *, unsigned);
  Result (*library_unload)(Handle_);
  Result (*library_kernel)(Handle_ *, Handle_, const char *);
  Result (*kernel_attribute)(int, int, Handle_, int);
  Result (*kernel_function)(Handle_ *, Handle_);
  Result (*launch)(Handle_, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle_, void **, void **);
  Result (*capturing)(Handle_, int *);
  Result (*exchange_mode)(int *);
  Result (*stream_synchronize)(Handle_);
  Result (*stream_new)(Handle_ *, unsigned);
  Result (*stream_free)(Handle_);
  Result (*stream_wait)(Handle_, Handle_, unsigned);
  Result (*event_new)(Handle_ *, unsigned);
  Result (*event_record)(Handle_, Handle_);
  Result (*event_free)(Handle_);
  Result (*memory_new)(Address *, size_t);
  Result (*memory_free)(Address);
  Result (*to_host)(void *, Address, size_t, Handle_);
  Result (*to_device)(Address, const void *, size_t, Handle_);
  Result (*copy)(Address, Address, size_t, Handle_);
  Result (*graph_new)(Handle_ *, unsigned);
  Result (*graph_free)(Handle_);
  Result (*graph_add)(Handle_ *, Handle_, const Handle_ *, size_t, const NodeParams *);
  Result (*graph_instantiate)(Handle_ *, Handle_, unsigned long long);
  Result (*graph_set)(Handle_, Handle_, const NodeParams *);
  Result (*graph_enable)(Handle_, Handle_, unsigned);
  Result (*graph_launch)(Handle_, Handle_);
  Result (*exec_free)(Handle_);
  Result (*error_text)(Result, const char **);
  /* What follows may be NULL. */
  Result (*stream_id)(Handle_, unsigned long long *);
  Result (*capture_info)(Handle_, int *, uint64_t *, Handle_ *, const Handle_ **, size_t *);
  Result (*launch_with)(const LaunchConfig *, Handle_, void **, void **);
  Result (*graph_edge)(Handle_, const Handle_ *, const Handle_ *, const EdgeData *, size_t);
} Driver;

static Driver cu;

static const struct {
  const char *name;
  void **where;
  bool needed;
} SYMBOLS[] = {
#define NEED(name, field) {name, (void **)&cu.field, true}
    NEED("cuInit", init),
    NEED("cuDeviceGetCount", device_count),
    NEED("cuDeviceGet", device_get),
    NEED("cuDeviceGetAttribute", device_attribute),
    NEED("cuDevicePrimaryCtxRetain", primary),
    NEED("cuCtxGetCurrent", current),
    NEED("cuCtxGetDevice", current_device),
    NEED("cuCtxPushCurrent_v2", push),
    NEED("cuCtxPopCurrent_v2", pop),
    NEED("cuCtxSynchronize", synchronize),
    NEED("cuLibraryLoadData", library_load),
    NEED("cuLibraryUnload", library_unload),
    NEED("cuLibraryGetKernel", library_kernel),
    NEED("cuKernelSetAttribute", kernel_attribute),
    NEED("cuKernelGetFunction", kernel_function),
    NEED("cuLaunchKernel", launch),
    NEED("cuStreamIsCapturing", capturing),
    NEED("cuThreadExchangeStreamCaptureMode", exchange_mode),
    NEED("cuStreamSynchronize", stream_synchronize),
    NEED("cuStreamCreate", stream_new),
    NEED("cuStreamDestroy_v2", stream_free),
    NEED("cuStreamWaitEvent", stream_wait),
    NEED("cuEventCreate", event_new),
    NEED("cuEventRecord", event_record),
    NEED("cuEventDestroy_v2", event_free),
    NEED("cuMemAlloc_v2", memory_new),
    NEED("cuMemFree_v2", memory_free),
    NEED("cuMemcpyDtoHAsync_v2", to_host),
    NEED("cuMemcpyHtoDAsync_v2", to_device),
    NEED("cuMemcpyDtoDAsync_v2", copy),
    NEED("cuGraphCreate", graph_new),
    NEED("cuGraphDestroy", graph_free),
    NEED("cuGraphAddKernelNode_v2", graph_add),
    NEED("cuGraphInstantiateWithFlags", graph_instantiate),
    NEED("cuGraphExecKernelNodeSetParams_v2", graph_set),
    NEED("cuGraphNodeSetEnabled", graph_enable),
    NEED("cuGraphLaunch", graph_launch),
    NEED("cuGraphExecDestroy", exec_free),
    NEED("cuGetErrorString", error_text),
    {"cuStreamGetId", (void **)&cu.stream_id, false},
    {"cuStreamGetCaptureInfo_v2", (void **)&cu.capture_info, false},
    {"cuLaunchKernelEx", (void **)&cu.launch_with, false},
    {"cuGraphAddDependencies_v2", (void **)&cu.graph_edge, false},
};

enum { MOST_DEVICES = 64 };
static Handle_ contexts[MOST_DEVICES]; /* primary ones, kept until the process ends */
static int32_t archs[MOST_DEVICES];
static int n_devices;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of connecting, contexts and workspaces */

static const char *connect(void) {
  static char text[256];
  void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib) return "libcuda.so.1, the library of NVIDIA's driver, is not there";
  for (size_t i = 0; i < sizeof SYMBOLS / sizeof *SYMBOLS; i++) {
    *SYMBOLS[i].where = dlsym(lib, SYMBOLS[i].name);
    if (!*SYMBOLS[i].where && SYMBOLS[i].needed) {
      snprintf(text, sizeof text, "libcuda.so.1 lacks %s: the driver is older than CUDA 12", SYMBOLS[i].name);
      return text;
    }
  }
  const char *why = NULL;
  Result rc = cu.init(0);
  if (!rc) rc = cu.device_count(&n_devices);
  if (rc) {
    cu.error_text(rc, &why);
    snprintf(text, sizeof text, "the driver does not start: %s", why ? why : "unknown error");
    return text;
  }
  if (n_devices > MOST_DEVICES) n_devices = MOST_DEVICES;
  for (int i = 0; i < n_devices; i++) {
    int device = 0, major = 0, minor = 0;
    if (!cu.device_get(&device, i) && !cu.device_attribute(&major, MAJOR, device) && !cu.device_attribute(&minor, MINOR, device))
      archs[i] = major * 10 + minor;
  }
  return n_devices ? NULL : "the driver sees no device";
}

const char *cuda_connect(void) {
  static const char *missing;
  static bool done;
  pthread_mutex_lock(&lock);
  if (!done) missing = connect();
  done = true;
  pthread_mutex_unlock(&lock);
  return missing;
}

int32_t cuda_device_count(void) { return cuda_connect() ? 0 : n_devices; }
int32_t cuda_arch(int32_t device) { return cuda_connect() || device < 0 || device >= n_devices ? 0 : archs[device]; }

int32_t cuda_current(void) {
  Handle_ now = NULL;
  int device = 0, k;
  if (cuda_connect() || cu.current(&now) || !now || cu.current_device(&device)) return 0;
  for (int i = 0; i < n_devices; i++)
    if (!cu.device_get(&k, i) && k == device) return i;
  return 0;
}

static int32_t failed(ts_cuda_call *c, Result rc, const char *doing) {
  char text[400];
  const char *why = NULL;
  cu.error_text(rc, &why);
  snprintf(text, sizeof text, "CUDA error %d while %s on cuda:%d: %s", (int)rc, doing, (int)c->device, why ? why : "unknown");
  int32_t kind = rc == OUT_OF_MEMORY ? TS_ERROR_MEMORY : TS_ERROR_DEVICE;
  c->report(c->self, kind, text);
  return kind;
}

/* ---------------------------------------------------------------- graphs */

typedef struct {
  Handle_ library, function; /* in the device's primary context */
  unsigned threads, shared;
  bool waits;
} Loaded;

/* One segment, recorded. */
typedef struct ts_cuda_record {
  struct ts_cuda_record *next; /* used less lately */
  uint64_t stream, sizes; /* what it was made for */
  int32_t device, n, n_words;
  bool is_early; /* some nodes begin before the end of the one before: none of them may be left out */
  Handle_ graph, exec;
  Handle_ *nodes;
  ts_device_launch *launches; /* as its nodes are set */
  uint64_t *words;  /* as its nodes are set, */
  uint64_t *given;  /* and as the caller gave them: those that library calls tell are 0 here */
  uint64_t *fixed;  /* of library calls; n_fixed -1: there are none */
  int32_t n_fixed, done, segment; /* done: launches that were captured so far */
  void *owner;
  void (*release)(void *);
} Record;

enum { SEEN = 16, TRIES = 32, FAILURES = 3 }; /* TRIES: records of library calls that are made before replays must pay for them */
typedef struct {
  pthread_mutex_t lock; /* a thread that finds it taken launches one by one */
  Record *records;
  uint64_t seen[SEEN]; /* what was launched before without a record of its own */
  int at, failures;
  bool is_recording;
  ts_cuda_counts counts;
  const char *why; /* it was last launched one by one */
} Segment;

struct ts_cuda {
  const ts_images *images;
  int32_t most;
  bool refuses_early; /* the driver does: no kernel begins before the end of the one before it */
  pthread_mutex_t lock; /* of `loaded` */
  Loaded *loaded[MOST_DEVICES]; /* by kernel */
  Segment segments[]; /* and their parts */
};

static int32_t n_all(const ts_images *images) { return images->n_segments + images->n_parts; }

ts_cuda *cuda_new(const ts_images *images, int32_t most) {
  ts_cuda *g = calloc(1, sizeof *g + sizeof(Segment) * (size_t)n_all(images));
  if (!g) return NULL;
  g->images = images;
  g->most = most;
  pthread_mutex_init(&g->lock, NULL);
  for (int32_t i = 0; i < n_all(images); i++) pthread_mutex_init(&g->segments[i].lock, NULL);
  return g;
}

/* What work that is queued may still use: freed when the device has come to its end, and not while a caller records, which waiting
 * for the device would break. */
typedef struct Dead {
  struct Dead *next;
  Handle_ library;
  ts_cuda_block *block;
  int device;
} Dead;
enum { MANY_DEAD = 64 };
static Dead *dead; /* with `lock` */
static int n_dead, n_dead_blocks;

static void bury(Handle_ library, ts_cuda_block *block, int device) {
  Dead *d = malloc(sizeof *d);
  if (!d) return; /* it stays for ever */
  pthread_mutex_lock(&lock);
  *d = (Dead){dead, library, block, device};
  dead = d;
  n_dead++;
  n_dead_blocks += block != NULL;
  pthread_mutex_unlock(&lock);
}

static void block_drop(ts_cuda_block *b);

static void free_dead(void) {
  Handle_ old;
  int done = -1;
  pthread_mutex_lock(&lock);
  Dead *all = dead;
  dead = NULL;
  n_dead = n_dead_blocks = 0;
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < n_devices; i++) {
    for (Dead *d = all; d; d = d->next) {
      if (d->device != i || cu.push(contexts[i])) continue;
      if (done != i) cu.synchronize();
      done = i;
      if (d->library) cu.library_unload(d->library);
      if (d->block) block_drop(d->block);
      cu.pop(&old);
    }
  }
  for (Dead *next; all; all = next) {
    next = all->next;
    free(all);
  }
}

static void record_free(Record *r) {
  if (!r) return;
  if (r->exec) cu.exec_free(r->exec);
  if (r->release) r->release(r->owner);
  else if (r->graph) cu.graph_free(r->graph);
  free(r->nodes);
  free(r->launches);
  free(r->words);
  free(r->given);
  free(r->fixed);
  free(r);
}

void cuda_free(ts_cuda *g) {
  if (!g) return;
  for (int32_t i = 0; i < n_all(g->images); i++) {
    for (Record *r = g->segments[i].records, *next; r; r = next) {
      next = r->next;
      record_free(r);
    }
    pthread_mutex_destroy(&g->segments[i].lock);
  }
  for (int d = 0; d < MOST_DEVICES; d++) {
    for (int32_t k = 0; g->loaded[d] && k < g->images->n_kernels; k++)
      if (g->loaded[d][k].library) bury(g->loaded[d][k].library, NULL, d);
    free(g->loaded[d]);
  }
  pthread_mutex_destroy(&g->lock);
  free(g);
}

ts_cuda_counts cuda_counts(ts_cuda *g, int32_t segment) {
  Segment *s = &g->segments[segment];
  pthread_mutex_lock(&s->lock);
  ts_cuda_counts counts = s->counts;
  counts.records = 0;
  for (Record *r = s->records; r; r = r->next) counts.records++;
  pthread_mutex_unlock(&s->lock);
  return counts;
}

const char *cuda_why_plain(ts_cuda *g, int32_t segment) { return g->segments[segment].why; }

/* ---------------------------------------------------------------- calls */

int32_t cuda_begin(ts_cuda_call *c) {
  c->is_pushed = c->is_capturing = false;
  c->staged = NULL;
  c->record = NULL;
  if (c->device < 0 || c->device >= n_devices) {
    c->report(c->self, TS_ERROR_DEVICE, "there is no such CUDA device");
    return TS_ERROR_DEVICE;
  }
  Handle_ now = NULL, *context = &contexts[c->device];
  if (!*context) {
    int device = 0;
    pthread_mutex_lock(&lock);
    Result rc = *context ? SUCCESS : cu.device_get(&device, c->device);
    if (!rc && !*context) rc = cu.primary(context, device);
    pthread_mutex_unlock(&lock);
    if (rc) return failed(c, rc, "making a context");
  }
  Result rc = cu.current(&now);
  if (!rc && now != *context) {
    rc = cu.push(*context);
    c->is_pushed = !rc;
  }
  int captures = 0;
  unsigned long long id = 1;
  if (!rc && c->stream) { /* the legacy stream cannot be captured, and there is one for each device */
    if (!cu.capturing(c->stream, &captures)) c->is_capturing = captures != 0;
    if (c->is_capturing || !cu.stream_id || cu.stream_id(c->stream, &id)) id = (unsigned long long)(uintptr_t)c->stream;
  }
  c->stream_id = id;
  if (!rc && !c->is_capturing && (n_dead_blocks || n_dead > MANY_DEAD)) free_dead();
  return rc ? failed(c, rc, "taking a context") : TS_OK;
}

struct ts_cuda_staged {
  struct ts_cuda_staged *next;
  void *original, *copy;
  int64_t span;
  bool written;
};

int32_t cuda_unstage(ts_cuda_call *c) {
  int32_t bad = TS_OK;
  for (struct ts_cuda_staged *s = c->staged, *next; s; s = next) {
    next = s->next;
    if (s->written) {
      Result rc = cu.copy((Address)(uintptr_t)s->original, (Address)(uintptr_t)s->copy, (size_t)s->span, c->stream);
      if (rc) bad = failed(c, rc, "copying an input back");
    }
    cuda_give(c, s->copy);
    free(s);
  }
  c->staged = NULL;
  return bad;
}

int32_t cuda_end(ts_cuda_call *c) {
  int32_t bad = cuda_unstage(c);
  Handle_ old;
  if (c->is_pushed) cu.pop(&old);
  c->is_pushed = false;
  return bad;
}

int32_t cuda_wait(ts_cuda_call *c) {
  Result rc = cu.stream_synchronize(c->stream);
  return rc ? failed(c, rc, "waiting for a stream") : TS_OK;
}

int32_t cuda_wait_all(ts_cuda_call *c) {
  Result rc = cu.synchronize();
  return rc ? failed(c, rc, "waiting for the device") : TS_OK;
}

int32_t cuda_copy(ts_cuda_call *c, void *to, const void *from, int64_t bytes) {
  Result rc = bytes > 0 ? cu.copy((Address)(uintptr_t)to, (Address)(uintptr_t)from, (size_t)bytes, c->stream) : SUCCESS;
  return rc ? failed(c, rc, "copying") : TS_OK;
}

int32_t cuda_upload(ts_cuda_call *c, void *to, const void *from, int64_t bytes) {
  Result rc = bytes > 0 ? cu.to_device((Address)(uintptr_t)to, from, (size_t)bytes, c->stream) : SUCCESS;
  return rc ? failed(c, rc, "copying to the device") : TS_OK;
}

int32_t cuda_align(ts_cuda_call *c, void **data, int64_t span, bool written) {
  if (((uintptr_t)*data & 15) == 0 || span <= 0) return TS_OK;
  struct ts_cuda_staged *s = malloc(sizeof *s);
  void *copy = s ? cuda_take(c, span) : NULL;
  if (!copy) {
    free(s);
    return TS_ERROR_MEMORY;
  }
  Result rc = cu.copy((Address)(uintptr_t)copy, (Address)(uintptr_t)*data, (size_t)span, c->stream);
  if (rc) {
    cuda_give(c, copy);
    free(s);
    return failed(c, rc, "copying an input");
  }
  *s = (struct ts_cuda_staged){c->staged, *data, copy, span, written};
  c->staged = s;
  *data = copy;
  return TS_OK;
}

int32_t cuda_read(ts_cuda_call *c, const void *from, void *to, int64_t bytes) {
  if (c->is_capturing) {
    c->report(c->self, TS_ERROR_DEVICE, "a value is needed on the host while the stream is being captured");
    return TS_ERROR_DEVICE;
  }
  Result rc = cu.to_host(to, (Address)(uintptr_t)from, (size_t)bytes, c->stream);
  if (!rc) rc = cu.stream_synchronize(c->stream);
  return rc ? failed(c, rc, "reading a value") : TS_OK;
}

/* ---------------------------------------------------------------- kernels */

/* The image for a device: machine code of its generation and at most its revision, else text. */
static const ts_image *choose(const ts_device_kernel *k, int32_t arch) {
  const ts_image *best = NULL;
  for (int32_t i = 0; i < k->n_images; i++) {
    const ts_image *m = &k->images[i];
    bool fits = m->is_text ? m->arch <= arch : m->arch / 10 == arch / 10 && m->arch <= arch;
    if (fits && (!best || (best->is_text && !m->is_text) || (best->is_text == m->is_text && m->arch > best->arch))) best = m;
  }
  return best;
}

static void refuse(const ts_device_kernel *k, int32_t device, char *text, size_t room) {
  int n = snprintf(text, room, "this library has no code for sm_%d (cuda:%d), only for", (int)archs[device], (int)device);
  for (int32_t i = 0; i < k->n_images && n < (int)room; i++) n += snprintf(text + n, room - (size_t)n, " sm_%d", (int)k->images[i].arch);
}

bool cuda_fits(const ts_images *images, int32_t device, char *text, size_t room) {
  for (int32_t i = 0; i < images->n_kernels; i++)
    if (!choose(images->kernels[i], archs[device])) {
      refuse(images->kernels[i], device, text, room);
      return false;
    }
  return true;
}

static int32_t load(ts_cuda_call *c, int32_t number, Loaded *out) {
  const ts_device_kernel *k = c->graph->images->kernels[number];
  const ts_image *image = choose(k, archs[c->device]);
  char text[300];
  if (!image) {
    refuse(k, c->device, text, sizeof text);
    c->report(c->self, TS_ERROR_DEVICE, text);
    return TS_ERROR_DEVICE;
  }
  int mode = RELAXED, device = 0;
  cu.exchange_mode(&mode); /* loading is allowed while another stream is captured */
  Handle_ kernel = NULL;
  Result rc = cu.device_get(&device, c->device);
  if (!rc) rc = cu.library_load(&out->library, image->data, NULL, NULL, 0, NULL, NULL, 0);
  if (!rc) rc = cu.library_kernel(&kernel, out->library, k->symbol);
  if (!rc && image->shared > 48 * 1024) rc = cu.kernel_attribute(MAX_DYNAMIC_SHARED, image->shared, kernel, device);
  if (!rc) rc = cu.kernel_function(&out->function, kernel); /* now, not at the first launch: that may be inside of a capture */
  cu.exchange_mode(&mode);
  if (rc) {
    if (out->library) cu.library_unload(out->library);
    memset(out, 0, sizeof *out);
    snprintf(text, sizeof text, "loading kernel %.200s", k->name);
    return failed(c, rc, text);
  }
  out->threads = (unsigned)image->threads;
  out->shared = (unsigned)image->shared;
  out->waits = image->waits;
  return TS_OK;
}

/* The kernels of this graph on the call's device; those in `launches` are loaded. */
static Loaded *kernels(ts_cuda_call *c, const ts_device_launch *launches, int32_t n) {
  ts_cuda *g = c->graph;
  Loaded *all = __atomic_load_n(&g->loaded[c->device], __ATOMIC_ACQUIRE);
  bool missing = !all;
  for (int32_t i = 0; !missing && i < n; i++) missing = !__atomic_load_n(&all[launches[i].kernel].function, __ATOMIC_ACQUIRE);
  if (!missing) return all;
  pthread_mutex_lock(&g->lock);
  int32_t rc = TS_OK;
  all = g->loaded[c->device];
  if (!all) {
    all = calloc((size_t)g->images->n_kernels + 1, sizeof *all);
    if (!all) c->report(c->self, rc = TS_ERROR_MEMORY, "no memory for the kernels of a graph");
    __atomic_store_n(&g->loaded[c->device], all, __ATOMIC_RELEASE);
  }
  for (int32_t i = 0; !rc && i < n; i++) {
    Loaded *k = &all[launches[i].kernel], fresh = {0};
    if (k->function || (rc = load(c, launches[i].kernel, &fresh))) continue;
    k->library = fresh.library, k->threads = fresh.threads, k->shared = fresh.shared, k->waits = fresh.waits;
    __atomic_store_n(&k->function, fresh.function, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&g->lock);
  return rc ? NULL : all;
}

/* ---------------------------------------------------------------- launches */

/* Addresses of a launch's arguments; behind them come the two scratch areas of Triton's kernels, which ours do not use. */
static void arguments(const ts_device_launch *l, const uint64_t *words, void **params) {
  static const uint64_t none;
  for (int32_t i = 0; i < l->n; i++) params[i] = (void *)&words[l->first + i];
  params[l->n] = params[l->n + 1] = (void *)&none;
}

static int32_t most_arguments(const ts_device_launch *launches, int32_t n) {
  int32_t most = 0;
  for (int32_t i = 0; i < n; i++) most = launches[i].n > most ? launches[i].n : most;
  return most + 2;
}

static int32_t grid_is_too_large(ts_cuda_call *c) {
  c->report(c->self, TS_ERROR_DEVICE, "a kernel needs more than 2147483647 blocks");
  return TS_ERROR_DEVICE;
}

static bool is_refused(Result rc) { return rc == INVALID_VALUE || rc == NOT_SUPPORTED; }

/* Queues one launch, `early`: it may begin before the end of what is queued before it, if the kernel waits for that. */
static Result launch(ts_cuda_call *c, const Loaded *k, unsigned grid, bool early, void **params) {
  if (early && k->waits && cu.launch_with && !c->graph->refuses_early) {
    Attribute a = {PROGRAMMATIC_SERIALIZATION, 0, {1}};
    LaunchConfig config = {{grid, 1, 1}, {k->threads, 1, 1}, k->shared, c->stream, &a, 1};
    Result rc = cu.launch_with(&config, k->function, params, NULL);
    if (!is_refused(rc)) return rc;
    c->graph->refuses_early = true;
  }
  return cu.launch(k->function, grid, 1, 1, k->threads, 1, 1, k->shared, c->stream, params, NULL);
}

/* The node that a captured launch became, and its arguments. */
static Result note_node(ts_cuda_call *c, const ts_device_launch *l, const uint64_t *words) {
  Record *r = c->record;
  int status = 0;
  uint64_t id = 0;
  size_t n = 0;
  Handle_ graph = NULL;
  const Handle_ *last = NULL;
  Result rc = cu.capture_info(c->stream, &status, &id, &graph, &last, &n);
  if (rc || n != 1 || r->done >= r->n) return rc ? rc : 1;
  while (r->launches[r->done].grid <= 0) r->done++; /* not launched */
  memcpy(&r->words[r->launches[r->done].first], &words[l->first], sizeof *words * (size_t)l->n);
  r->nodes[r->done++] = last[0];
  return SUCCESS;
}

static int32_t launch_plainly(ts_cuda_call *c, const Loaded *all, const ts_device_launch *launches, int32_t n, const uint64_t *words) {
  void *params[most_arguments(launches, n)];
  bool queued = false; /* some launches: what they write is written */
  for (int32_t i = 0; i < n; i++) {
    const ts_device_launch *l = &launches[i];
    const Loaded *k = &all[l->kernel];
    if (l->grid <= 0) continue;
    if (l->grid > INT32_MAX) return grid_is_too_large(c);
    arguments(l, words, params);
    Result rc = launch(c, k, (unsigned)l->grid, c->record || queued, params); /* the first one of a call follows what we do not know */
    if (!rc && c->record) rc = note_node(c, l, words);
    if (rc) {
      char text[300];
      snprintf(text, sizeof text, "launching %.200s", c->graph->images->kernels[l->kernel]->name);
      int32_t kind = failed(c, rc, text);
      return queued && !c->record ? TS_ERROR_LATE : kind;
    }
    queued = true;
  }
  return TS_OK;
}

static NodeParams node_of(ts_cuda_call *c, const Loaded *all, const ts_device_launch *l, void **params) {
  const Loaded *k = &all[l->kernel];
  unsigned grid = l->grid > 0 ? (unsigned)l->grid : 1;
  return (NodeParams){k->function, {grid, 1, 1}, {k->threads, 1, 1}, k->shared, params, NULL, NULL, NULL};
}

/* What a record is kept for: stream, grids and sizes, not addresses and values. */
static uint64_t sizes_of(const ts_device_launch *launches, int32_t n, const uint64_t *words) {
  uint64_t h = 1469598103934665603u;
  for (int32_t i = 0; i < n; i++) {
    h = (h ^ (uint64_t)launches[i].grid) * 1099511628211u;
    for (int32_t k = launches[i].n_free; k < launches[i].n; k++) h = (h ^ words[launches[i].first + k]) * 1099511628211u;
  }
  return h;
}

/* The node of launch i of a record, behind that of the launch before it; `early`: before the end of that one, where this is possible. A node
 * that is left out does not wait: it begins and ends in its turn. */
static Result add_node(ts_cuda_call *c, const Loaded *all, Record *r, int32_t i, bool early, const NodeParams *p) {
  bool is_early = early && i && all[r->launches[i].kernel].waits && r->launches[i].grid > 0 && r->launches[i - 1].grid > 0;
  if (!is_early) return cu.graph_add(&r->nodes[i], r->graph, i ? &r->nodes[i - 1] : NULL, i > 0, p);
  r->is_early = true;
  Result rc = cu.graph_add(&r->nodes[i], r->graph, NULL, 0, p);
  return rc ? rc : cu.graph_edge(r->graph, &r->nodes[i - 1], &r->nodes[i], &EARLY, 1);
}

/* A chain of nodes, one for each launch; NULL with the driver's answer in *rc. */
static Record *chain(ts_cuda_call *c, const Loaded *all, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words,
                     bool early, Result *rc) {
  void *params[most_arguments(launches, n)];
  Record *r = calloc(1, sizeof *r);
  *rc = OUT_OF_MEMORY;
  if (!r) return NULL;
  r->nodes = calloc((size_t)n, sizeof *r->nodes);
  r->launches = malloc(sizeof *launches * (size_t)n);
  r->words = malloc(sizeof *words * (size_t)n_words + 1);
  r->given = malloc(sizeof *words * (size_t)n_words + 1);
  r->n_fixed = -1;
  if (r->nodes && r->launches && r->words && r->given) {
    memcpy(r->launches, launches, sizeof *launches * (size_t)n);
    memcpy(r->words, words, sizeof *words * (size_t)n_words);
    memcpy(r->given, words, sizeof *words * (size_t)n_words);
    *rc = cu.graph_new(&r->graph, 0);
  }
  for (int32_t i = 0; !*rc && i < n; i++) {
    arguments(&launches[i], words, params);
    NodeParams p = node_of(c, all, &launches[i], params);
    *rc = add_node(c, all, r, i, early, &p);
  }
  if (!*rc) *rc = cu.graph_instantiate(&r->exec, r->graph, 0);
  for (int32_t i = 0; !*rc && i < n; i++)
    if (launches[i].grid <= 0) *rc = cu.graph_enable(r->exec, r->nodes[i], 0);
  if (*rc) {
    record_free(r);
    return NULL;
  }
  r->device = c->device;
  r->n = n;
  r->n_words = n_words;
  return r;
}

static Record *record(ts_cuda_call *c, const Loaded *all, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words,
                      Result *rc) {
  Record *r = NULL;
  *rc = NOT_SUPPORTED;
  if (cu.graph_edge && !c->graph->refuses_early) r = chain(c, all, launches, n, words, n_words, true, rc);
  if (r || !is_refused(*rc)) return r;
  c->graph->refuses_early = true;
  return chain(c, all, launches, n, words, n_words, false, rc);
}

/* Would the record have to leave out other nodes than it does? */
static bool turns(const Record *r, const ts_device_launch *launches) {
  for (int32_t i = 0; i < r->n; i++)
    if ((r->launches[i].grid > 0) != (launches[i].grid > 0)) return true;
  return false;
}

/* Sets what differs; *patched counts the nodes. */
static Result patch(ts_cuda_call *c, const Loaded *all, Record *r, const ts_device_launch *launches, const uint64_t *words, int64_t *patched) {
  if (!memcmp(r->given, words, sizeof *words * (size_t)r->n_words) && !memcmp(r->launches, launches, sizeof *launches * (size_t)r->n)) return SUCCESS;
  void *params[most_arguments(launches, r->n)];
  for (int32_t i = 0; i < r->n; i++) {
    const ts_device_launch *l = &launches[i];
    ts_device_launch *old = &r->launches[i];
    bool same = old->grid == l->grid && !memcmp(&r->given[l->first], &words[l->first], sizeof *words * (size_t)l->n);
    if (same || (old->grid <= 0 && l->grid <= 0)) continue; /* what was captured has no node of a launch that was none */
    if (r->is_early && (old->grid > 0) != (l->grid > 0)) return 1;
    for (int32_t k = l->first; k < l->first + l->n; k++)
      if (r->given[k] != words[k]) r->given[k] = r->words[k] = words[k];
    arguments(l, r->words, params);
    NodeParams p = node_of(c, all, l, params);
    Result rc = cu.graph_set(r->exec, r->nodes[i], &p);
    if (!rc && (old->grid > 0) != (l->grid > 0)) rc = cu.graph_enable(r->exec, r->nodes[i], l->grid > 0);
    if (rc) return rc;
    old->grid = l->grid;
    ++*patched;
  }
  return SUCCESS;
}

static bool was_seen(Segment *s, uint64_t key) {
  for (int i = 0; i < SEEN; i++)
    if (s->seen[i] == key) return true;
  s->seen[s->at++ % SEEN] = key;
  return false;
}

/* A segment of fewer launches than FEW has one record for each of so many streams: its one or two nodes are set anew for other sizes. The
 * launches between library calls, most of which are single, have none where they are so few. */
enum { FEW = 3, STREAMS = 2 };

/* The record to launch: made for this stream and these sizes, or made now, or the one used longest ago. NULL: launch one by one. */
static Record *find(ts_cuda_call *c, Segment *s, const Loaded *all, const ts_device_launch *launches, int32_t n, const uint64_t *words,
                    int32_t n_words) {
  uint64_t sizes = sizes_of(launches, n, words);
  Record **at = &s->records, **last = NULL, *r;
  bool few = n < FEW;
  int count = 0;
  for (; (r = *at); at = &r->next, count++) {
    if (r->device != c->device || r->n != n || r->n_words != n_words || r->n_fixed >= 0) continue;
    if (r->stream == c->stream_id && r->sizes == sizes) break;
    if ((!few || r->stream == c->stream_id) && (!r->is_early || !turns(r, launches))) last = at;
  }
  bool again = !r && was_seen(s, sizes ^ (c->stream_id * 0x9e3779b97f4a7c15u + (uint64_t)c->device + 1));
  bool more = count < (few && c->graph->most > STREAMS ? STREAMS : c->graph->most) && s->failures < FAILURES && !(few && last);
  if (!r && more && (again || (!last && s->at > 1))) { /* the second time that these sizes come, or any do */
    Result rc;
    r = record(c, all, launches, n, words, n_words, &rc);
    if (!r) s->why = "the driver could not make a graph of it", s->failures++;
    else s->counts.recorded++;
  } else if (r || last) {
    at = r ? at : last;
    r = *at;
    *at = r->next;
  } else if (s->failures < FAILURES) {
    s->why = more ? "it was the first call" : "other streams have its records";
  }
  if (!r) return NULL;
  r->next = s->records;
  s->records = r;
  r->stream = c->stream_id;
  r->sizes = sizes;
  return r;
}

static void forget(Segment *s, Record *r) {
  s->records = r->next;
  s->counts.dropped++;
  record_free(r);
}

int32_t cuda_launch(ts_cuda_call *c, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words) {
  Loaded *all = kernels(c, launches, n);
  if (!all) return TS_ERROR_DEVICE;
  Segment *s = segment >= 0 && segment < n_all(c->graph->images) ? &c->graph->segments[segment] : NULL;
  if (!s) return launch_plainly(c, all, launches, n, words);
  const char *why = !c->graph->most ? "recording is switched off" : c->record ? "the segment around it was recorded"
                    : n < FEW && segment >= c->graph->images->n_segments ? "it has too few launches"
                    : c->is_capturing ? "the caller was recording the stream" : NULL;
  if (!why && pthread_mutex_trylock(&s->lock)) why = "another thread was using the record";
  if (why) {
    __atomic_add_fetch(&s->counts.plain, 1, __ATOMIC_RELAXED);
    s->counts.launches = n;
    s->why = why;
    return launch_plainly(c, all, launches, n, words);
  }
  s->counts.launches = n;
  for (int32_t i = 0; i < n; i++)
    if (launches[i].grid > INT32_MAX) {
      pthread_mutex_unlock(&s->lock);
      return grid_is_too_large(c);
    }
  Record *r = find(c, s, all, launches, n, words, n_words);
  int32_t rc = TS_OK;
  if (r) {
    Result got = patch(c, all, r, launches, words, &s->counts.patched);
    if (got) { /* nothing was queued: its nodes may be half set, so it goes */
      forget(s, r);
      s->why = "the driver could not change the graph";
      r = NULL;
    } else {
      got = cu.graph_launch(r->exec, c->stream);
      s->counts.replayed++;
      if (got) {
        forget(s, r);
        rc = failed(c, got, "launching a recorded segment");
      }
    }
  }
  if (!r) __atomic_add_fetch(&s->counts.plain, 1, __ATOMIC_RELAXED);
  pthread_mutex_unlock(&s->lock);
  return r ? rc : launch_plainly(c, all, launches, n, words);
}

static uint64_t mixed(uint64_t h, const uint64_t *words, int32_t n) {
  for (int32_t i = 0; i < n; i++) h = (h ^ words[i]) * 1099511628211u;
  return h;
}

/* Takes the last of the list out where there are more than may be. */
static Record *surplus(Segment *s, int32_t most) {
  Record **at = &s->records, *r;
  for (int32_t i = 0; *at && i < most; i++) at = &(*at)->next;
  r = *at;
  *at = NULL;
  for (Record *k = r; k; k = k->next) s->counts.dropped++;
  return r;
}

static void all_free(Record *r) {
  for (Record *next; r; r = next) {
    next = r->next;
    record_free(r);
  }
}

int32_t cuda_segment_begin(ts_cuda_call *c, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words,
                           const uint64_t *fixed, int32_t n_fixed) {
  Loaded *all = kernels(c, launches, n);
  if (!all) return -TS_ERROR_DEVICE;
  Segment *s = &c->graph->segments[segment];
  const char *why = !c->graph->most ? "recording is switched off" : !cu.capture_info ? "the driver is too old"
                    : c->is_capturing ? "the caller was recording the stream" : NULL;
  if (!why && pthread_mutex_trylock(&s->lock)) why = "another thread was using the record";
  s->counts.launches = n;
  if (why) {
    __atomic_add_fetch(&s->counts.plain, 1, __ATOMIC_RELAXED);
    s->why = why;
    return TS_PLAIN;
  }
  uint64_t sizes = mixed(mixed(sizes_of(launches, n, words), fixed, n_fixed), &c->modes, 1);
  Record **at = &s->records, *r, *old = NULL;
  int32_t rc = TS_PLAIN;
  for (; (r = *at); at = &r->next)
    if (r->device == c->device && r->stream == c->stream_id && r->sizes == sizes && r->n_fixed == n_fixed &&
        !memcmp(r->fixed, fixed, sizeof *fixed * (size_t)n_fixed))
      break;
  if (r) {
    *at = r->next;
    r->next = s->records;
    s->records = r;
    Result got = patch(c, all, r, launches, words, &s->counts.patched);
    if (!got) got = cu.graph_launch(r->exec, c->stream);
    rc = got ? -failed(c, got, "launching a recorded segment") : TS_REPLAYED;
    if (got) {
      s->records = r->next;
      r->next = NULL;
      old = r;
    } else {
      s->counts.replayed++;
    }
  } else if (s->failures >= FAILURES || s->is_recording) {
    if (s->is_recording) s->why = "another thread was recording it";
  } else if (s->counts.recorded > TRIES + s->counts.replayed / 16) {
    s->why = "addresses of library calls change too often";
  } else if (!was_seen(s, sizes ^ (c->stream_id * 0x9e3779b97f4a7c15u + (uint64_t)c->device + 1))) {
    s->why = "it was the first call with these sizes and constants";
  } else if ((r = calloc(1, sizeof *r))) {
    r->nodes = calloc((size_t)n + 1, sizeof *r->nodes);
    r->launches = malloc(sizeof *launches * (size_t)n + 1);
    r->words = malloc(sizeof *words * (size_t)n_words + 1);
    r->given = malloc(sizeof *words * (size_t)n_words + 1);
    r->fixed = malloc(sizeof *fixed * (size_t)n_fixed + 1);
    if (r->nodes && r->launches && r->words && r->given && r->fixed) {
      memcpy(r->launches, launches, sizeof *launches * (size_t)n);
      memcpy(r->words, words, sizeof *words * (size_t)n_words);
      memcpy(r->given, words, sizeof *words * (size_t)n_words);
      memcpy(r->fixed, fixed, sizeof *fixed * (size_t)n_fixed);
      r->n = n, r->n_words = n_words, r->n_fixed = n_fixed, r->segment = segment;
      r->stream = c->stream_id, r->device = c->device, r->sizes = sizes;
      c->record = r;
      s->is_recording = true;
      rc = TS_RECORD;
    } else {
      record_free(r);
    }
  }
  if (rc == TS_PLAIN) s->counts.plain++;
  pthread_mutex_unlock(&s->lock);
  record_free(old);
  return rc;
}

void cuda_segment_abort(ts_cuda_call *c, const char *why) {
  Record *r = c->record;
  if (!r) return;
  Segment *s = &c->graph->segments[r->segment];
  pthread_mutex_lock(&s->lock);
  s->is_recording = false;
  s->failures = FAILURES;
  s->why = why;
  pthread_mutex_unlock(&s->lock);
  c->record = NULL;
  record_free(r);
}

int32_t cuda_segment_end(ts_cuda_call *c, int32_t segment, void *graph, void *owner, void (*release)(void *owner)) {
  Record *r = c->record, *old = NULL;
  if (!r) return TS_OK;
  Segment *s = &c->graph->segments[segment];
  r->graph = graph, r->owner = owner, r->release = release;
  while (r->done < r->n && r->launches[r->done].grid <= 0) r->done++;
  Result rc = r->done == r->n ? cu.graph_instantiate(&r->exec, graph, 0) : 1;
  if (!rc) rc = cu.graph_launch(r->exec, c->stream);
  if (rc) {
    cuda_segment_abort(c, "the driver could not make a graph of it");
    return failed(c, rc, "recording a segment");
  }
  c->record = NULL;
  pthread_mutex_lock(&s->lock);
  s->is_recording = false;
  s->counts.recorded++;
  s->counts.replayed++;
  r->next = s->records;
  s->records = r;
  old = surplus(s, c->graph->most);
  pthread_mutex_unlock(&s->lock);
  all_free(old);
  return TS_OK;
}

/* ---------------------------------------------------------------- workspaces */

struct ts_cuda_block {
  ts_cuda_block *next;
  uint64_t stream_id;
  void *stream, *data, *handle;
  int32_t device;
  int64_t bytes;
  const ts_cuda_memory *memory;
  Handle_ event; /* of prepared constants: when they are ready */
};

static ts_cuda_block *idle, *busy; /* with `lock` */
static int64_t bytes_held;
static int32_t blocks_held;

static void block_drop(ts_cuda_block *b) {
  __atomic_fetch_sub(&bytes_held, b->bytes, __ATOMIC_RELAXED);
  __atomic_fetch_sub(&blocks_held, 1, __ATOMIC_RELAXED);
  if (b->event) cu.event_free(b->event);
  b->memory->give(b->memory->self, b->device, b->stream, b->data, b->handle);
  free(b);
}

static ts_cuda_block *block_fresh(ts_cuda_call *c, int64_t bytes) {
  ts_cuda_block *b = calloc(1, sizeof *b);
  if (!b) return NULL;
  b->data = c->memory->take(c->memory->self, c->device, c->stream, bytes, &b->handle);
  if (!b->data && cuda_trim(c->device)) b->data = c->memory->take(c->memory->self, c->device, c->stream, bytes, &b->handle);
  if (!b->data) {
    free(b);
    return NULL;
  }
  b->stream = c->stream;
  b->stream_id = c->stream_id;
  b->device = c->device;
  b->bytes = bytes;
  b->memory = c->memory;
  __atomic_fetch_add(&bytes_held, bytes, __ATOMIC_RELAXED);
  __atomic_fetch_add(&blocks_held, 1, __ATOMIC_RELAXED);
  return b;
}

/* Of idle blocks of this stream the smallest that fits; where none fits the largest goes, so that one grows instead of many. */
void *cuda_take(ts_cuda_call *c, int64_t bytes) {
  ts_cuda_block *found = NULL, *out = NULL, **at, **best = NULL, **largest = NULL;
  bytes = bytes < 512 ? 512 : (bytes + 511) & ~(int64_t)511;
  pthread_mutex_lock(&lock);
  for (at = &idle; !c->is_capturing && *at; at = &(*at)->next) {
    ts_cuda_block *b = *at;
    if (b->device != c->device || b->stream_id != c->stream_id || b->memory != c->memory) continue;
    if (b->bytes >= bytes && (!best || b->bytes < (*best)->bytes)) best = at;
    if (!largest || b->bytes > (*largest)->bytes) largest = at;
  }
  if ((at = best ? best : largest)) {
    ts_cuda_block *b = *at;
    *at = b->next;
    if (best) found = b;
    else out = b;
  }
  pthread_mutex_unlock(&lock);
  if (out) block_drop(out);
  if (!found) found = block_fresh(c, bytes);
  if (!found) {
    c->report(c->self, TS_ERROR_MEMORY, "no device memory for the workspace");
    return NULL;
  }
  pthread_mutex_lock(&lock);
  found->next = busy;
  busy = found;
  pthread_mutex_unlock(&lock);
  return found->data;
}

/* What was queued still uses it; the next call on this stream comes after that. Memory that a captured graph uses is the caller's
 * pool's: it goes back at once, as every tensor that dies in a capture does. */
static void give_back(void *workspace, bool is_kept) {
  ts_cuda_block **at = &busy, *b;
  pthread_mutex_lock(&lock);
  while ((b = *at) && b->data != workspace) at = &b->next;
  if (b) *at = b->next;
  if (b && is_kept) {
    b->next = idle;
    idle = b;
    b = NULL;
  }
  pthread_mutex_unlock(&lock);
  if (b) block_drop(b);
}

void cuda_give(ts_cuda_call *c, void *workspace) { give_back(workspace, !c->is_capturing); }
void cuda_return(void *workspace) { give_back(workspace, true); }

bool cuda_trim(int32_t device) {
  ts_cuda_block *out = NULL;
  pthread_mutex_lock(&lock);
  for (ts_cuda_block **at = &idle, *b; (b = *at);) {
    if (device >= 0 && b->device != device) {
      at = &b->next;
      continue;
    }
    *at = b->next;
    b->next = out;
    out = b;
  }
  pthread_mutex_unlock(&lock);
  bool some = out != NULL;
  for (ts_cuda_block *b = out, *next; b; b = next) {
    next = b->next;
    block_drop(b);
  }
  return some;
}

void cuda_memory_stats(int64_t *bytes, int32_t *blocks) {
  *bytes = bytes_held;
  *blocks = blocks_held;
}

/* ---------------------------------------------------------------- prepared constants */

void *cuda_block_new(ts_cuda_call *c, int64_t bytes, ts_cuda_block **block) {
  *block = block_fresh(c, bytes < 512 ? 512 : bytes);
  if (!*block) c->report(c->self, TS_ERROR_MEMORY, "no device memory for prepared constants");
  return *block ? (*block)->data : NULL;
}

void cuda_block_free(ts_cuda_block *b) {
  if (b) bury(NULL, b, b->device);
}

int32_t cuda_block_ready(ts_cuda_call *c, ts_cuda_block *b) {
  Result rc = b->event ? SUCCESS : cu.event_new(&b->event, NO_TIMING);
  if (!rc) rc = cu.event_record(b->event, c->stream);
  b->stream_id = c->stream_id;
  return rc ? failed(c, rc, "marking prepared constants") : TS_OK;
}

int32_t cuda_block_wait(ts_cuda_call *c, ts_cuda_block *b) {
  if (!b || !b->event || b->stream_id == c->stream_id) return TS_OK;
  if (c->is_capturing) return TS_OK; /* cuda_apart has waited */
  Result rc = cu.stream_wait(c->stream, b->event, 0);
  return rc ? failed(c, rc, "waiting for prepared constants") : TS_OK;
}

int32_t cuda_apart(ts_cuda_call *c, ts_cuda_call *apart) {
  Handle_ stream = NULL;
  int mode = RELAXED;
  cu.exchange_mode(&mode);
  Result rc = cu.stream_new(&stream, NON_BLOCKING);
  if (rc) {
    cu.exchange_mode(&mode);
    return failed(c, rc, "making a stream");
  }
  *apart = *c;
  apart->is_pushed = apart->is_capturing = false;
  apart->stream = stream;
  apart->staged = NULL;
  apart->mode = mode;
  return TS_OK;
}

int32_t cuda_apart_end(ts_cuda_call *apart) {
  Result rc = cu.stream_synchronize(apart->stream);
  cu.stream_free(apart->stream);
  cu.exchange_mode(&apart->mode);
  return rc ? failed(apart, rc, "preparing constants") : TS_OK;
}

/* ---------------------------------------------------------------- the driver's memory */

static void *own_take(void *self, int32_t device, void *stream, int64_t bytes, void **handle) {
  Address at = 0;
  *handle = NULL;
  return cu.memory_new(&at, (size_t)bytes) ? NULL : (void *)(uintptr_t)at;
}

static void own_give(void *self, int32_t device, void *stream, void *data, void *handle) {
  cu.memory_free((Address)(uintptr_t)data); /* waits for the device */
}

const ts_cuda_memory CUDA_OWN_MEMORY = {own_take, own_give, NULL};
