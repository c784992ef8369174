/* A libcuda.so.1 for tests, on the processor: memory is malloc's, streams run at once, graphs are lists of launches.
 *
 * A "cubin" is a shared object that exports, under the kernel's name, void f(void **params, unsigned grid), and under that name followed
 * by _params the number of its parameters: as the real driver, this one copies parameters when a node is made or set. By _pointers it says
 * how many of them are addresses, which come first, by _waits whether it begins with a wait for the kernels before it. What a test asks or
 * orders is at the end (fake_*). Everything that real code would get wrong silently (no context, a foreign address of a handle, a grid of
 * zero, an address that is no multiple of 16, a call that a capture forbids, a kernel that begins early and does not wait, a node without
 * an edge, one that is left out between early ones) is an error here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_CONTEXT = 201, NO_BINARY = 209, NOT_FOUND = 500, MISALIGNED = 716,
       CAPTURE_UNSUPPORTED = 900 };
enum { DEVICES = 4, MOST = 64 };

typedef void (*Kernel)(void **, unsigned);
typedef struct { Kernel run; int n, shared; char name[32]; int pointers, waits; } Function;
typedef struct { void *dl; Function f; } Library;
/* `linked`: it has an edge from the node before it; `early`: from or to one of its edges does not wait for an end */
typedef struct Node { struct Node *next; Function *f; unsigned grid, block, shared, enabled; int after, linked, early; uint64_t *words; } Node;
typedef struct { int magic, n; Node *first, *last; } Graph;
typedef struct Stream { int magic, device, capturing; uint64_t id; Graph *into; } Stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int n_devices = 2, arch = 90, contexts[DEVICES];
static __thread void *stack[MOST];
static __thread int depth;
static __thread int mode; /* of captures, as this thread sees them: 0 global, 1 of this thread, 2 relaxed */
static int capturing_global; /* streams that are being captured in global mode */
static Stream none[DEVICES + 1];
static uint64_t ids = 100;
static __thread Stream *current_stream;
static int64_t bytes_live;
static int n_memory;

/* ---- the log, and errors to order */
static struct { char name[48]; int64_t calls, fail_at; int code; } seen[128];
static int n_seen;
static int note(const char *name) {
  pthread_mutex_lock(&lock);
  int i = 0, code = OK;
  while (i < n_seen && strcmp(seen[i].name, name)) i++;
  if (i == n_seen) snprintf(seen[n_seen++].name, sizeof seen[0].name, "%s", name);
  if (++seen[i].calls == seen[i].fail_at) code = seen[i].code;
  pthread_mutex_unlock(&lock);
  return code;
}
#define CALL(name) do { int code_ = note(name); if (code_) return code_; } while (0)
/* What the documentation calls potentially unsafe: an error while a capture is under way that could be disturbed, and its end. */
#define UNSAFE if (capturing_global && mode != 2) return CAPTURE_UNSUPPORTED
#define REFUSE return note("refused"), INVALID /* tests ask: callers that are refused take another road */
#define NEED_CONTEXT if (!depth) return NO_CONTEXT

static int device_now(void) { return (int)((int *)stack[depth - 1] - contexts); }
static Stream *stream_of(void *s) {
  if (s) return s;
  none[depth ? device_now() : DEVICES].id = 1;
  return &none[depth ? device_now() : DEVICES];
}

/* ---- devices and contexts */
EXPORT int cuInit(unsigned flags) { CALL("cuInit"); return OK; }
EXPORT int cuDeviceGetCount(int *n) { CALL("cuDeviceGetCount"); *n = n_devices; return OK; }
EXPORT int cuDeviceGet(int *d, int i) { CALL("cuDeviceGet"); if (i >= n_devices) return INVALID; *d = i; return OK; }
EXPORT int cuDeviceGetAttribute(int *v, int what, int d) { *v = what == 75 ? arch / 10 : what == 76 ? arch % 10 : 0; return OK; }
EXPORT int cuDevicePrimaryCtxRetain(void **c, int d) { CALL("cuDevicePrimaryCtxRetain"); *c = &contexts[d]; return OK; }
EXPORT int cuCtxGetCurrent(void **c) { *c = depth ? stack[depth - 1] : NULL; return OK; }
EXPORT int cuCtxGetDevice(int *d) { NEED_CONTEXT; *d = device_now(); return OK; }
EXPORT int cuCtxPushCurrent_v2(void *c) { CALL("cuCtxPushCurrent"); stack[depth++] = c; return OK; }
EXPORT int cuCtxPopCurrent_v2(void **c) { CALL("cuCtxPopCurrent"); NEED_CONTEXT; *c = stack[--depth]; return OK; }
EXPORT int cuCtxSynchronize(void) { CALL("cuCtxSynchronize"); UNSAFE; NEED_CONTEXT; return OK; }
EXPORT int cuGetErrorString(int code, const char **text) {
  *text = code == NO_MEMORY ? "out of memory" : code == NO_CONTEXT ? "invalid device context" : code == NO_BINARY ? "no kernel image is available" : "an injected or invalid call";
  return OK;
}

/* ---- libraries */
EXPORT int cuLibraryLoadData(void **out, const void *code, void *jo, void *jv, unsigned nj, void *lo, void *lv, unsigned nl) {
  CALL("cuLibraryLoadData"); UNSAFE;
  const Elf64_Ehdr *e = code;
  if (memcmp(e->e_ident, ELFMAG, SELFMAG)) return NO_BINARY;
  size_t size = e->e_shoff + (size_t)e->e_shnum * e->e_shentsize;
  char path[64];
  int fd = memfd_create("cubin", 0);
  if (fd < 0 || write(fd, code, size) != (ssize_t)size) return INVALID;
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  Library *l = calloc(1, sizeof *l);
  l->dl = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* which tells libraries apart by name: the descriptor stays open */
  if (!l->dl) { fprintf(stderr, "%s\n", dlerror()); free(l); return NO_BINARY; }
  *out = l;
  return OK;
}
EXPORT int cuLibraryUnload(void *l) { CALL("cuLibraryUnload"); UNSAFE; dlclose(((Library *)l)->dl); free(l); return OK; }
EXPORT int cuLibraryGetKernel(void **out, void *library, const char *name) {
  CALL("cuLibraryGetKernel");
  Library *l = library;
  char text[64];
  l->f.run = (Kernel)dlsym(l->dl, name);
  snprintf(text, sizeof text, "%s_params", name);
  const int *n = dlsym(l->dl, text);
  if (!l->f.run || !n) return NOT_FOUND;
  l->f.n = *n;
  snprintf(text, sizeof text, "%s_pointers", name);
  if ((n = dlsym(l->dl, text))) l->f.pointers = *n;
  snprintf(text, sizeof text, "%s_waits", name);
  if ((n = dlsym(l->dl, text))) l->f.waits = *n;
  *out = &l->f;
  return OK;
}
EXPORT int cuKernelGetFunction(void **f, void *kernel) { CALL("cuKernelGetFunction"); NEED_CONTEXT; *f = kernel; return OK; }
EXPORT int cuKernelSetAttribute(int what, int value, void *kernel, int device) { CALL("cuKernelSetAttribute"); ((Function *)kernel)->shared = value; return OK; }

/* ---- launches */
static int is_valid(const Function *f, unsigned grid, unsigned block, unsigned shared, void **params) {
  if (!f || !grid || grid > 0x7fffffffu || !block || block > 1024 || block % 32) return INVALID;
  for (int i = 0; i < f->pointers; i++)
    if (*(uintptr_t *)params[i] & 15) return MISALIGNED;
  return shared > 48 * 1024 && (int)shared > f->shared ? INVALID : OK;
}
static Node *node_new(Graph *g, Function *f, unsigned grid, unsigned block, unsigned shared, void **params) {
  Node *n = calloc(1, sizeof *n);
  *n = (Node){NULL, f, grid, block, shared, 1, g->n++, !g->last, 0, malloc(8 * (size_t)f->n + 8)};
  for (int i = 0; i < f->n; i++) memcpy(&n->words[i], params[i], 8);
  if (g->last) g->last->next = n;
  else g->first = n;
  return g->last = n;
}
static void run(Function *f, unsigned grid, uint64_t *words) {
  void *params[f->n + 1];
  for (int i = 0; i < f->n; i++) params[i] = &words[i];
  f->run(params, grid);
}
static int launch(void *kernel, unsigned gx, unsigned bx, unsigned shared, void *stream, void **params, int early) {
  NEED_CONTEXT;
  Function *f = kernel;
  Stream *s = stream_of(stream);
  int rc = is_valid(f, gx, bx, shared, params);
  if (rc || (stream && s->device != device_now())) return rc ? rc : INVALID;
  if (s->capturing) {
    Node *before = s->into->last, *n = node_new(s->into, f, gx, bx, shared, params);
    n->linked = 1;
    if (early && before) before->early = n->early = 1;
    return OK;
  }
  uint64_t words[f->n + 1];
  for (int i = 0; i < f->n; i++) memcpy(&words[i], params[i], 8);
  run(f, gx, words);
  return OK;
}
EXPORT int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                          void **params, void **extra) {
  CALL("cuLaunchKernel");
  return launch(kernel, gx, bx, shared, stream, params, 0);
}
typedef struct { int id; char pad[4]; union { int on; char all[64]; } value; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; void *stream; Attribute *attributes; unsigned n; } Config;
EXPORT int cuLaunchKernelEx(const Config *c, void *kernel, void **params, void **extra) {
  CALL("cuLaunchKernel");
  CALL("cuLaunchKernelEx");
  int early = 0;
  for (unsigned i = 0; i < c->n; i++) {
    if (c->attributes[i].id != 6) return INVALID; /* programmatic stream serialization */
    early = c->attributes[i].value.on;
  }
  if (early && !((Function *)kernel)->waits) REFUSE;
  return launch(kernel, c->grid[0], c->block[0], c->shared, c->stream, params, early);
}

/* ---- streams and events */
EXPORT int cuStreamCreate(void **out, unsigned flags) {
  CALL("cuStreamCreate");
  NEED_CONTEXT;
  Stream *s = calloc(1, sizeof *s);
  s->device = device_now();
  s->id = __atomic_add_fetch(&ids, 1, __ATOMIC_RELAXED);
  *out = s;
  return OK;
}
EXPORT int cuStreamDestroy_v2(void *s) { CALL("cuStreamDestroy"); free(s); return OK; }
EXPORT int cuStreamSynchronize(void *s) { CALL("cuStreamSynchronize"); UNSAFE; NEED_CONTEXT; return stream_of(s)->capturing ? CAPTURE_UNSUPPORTED : OK; }
EXPORT int cuStreamIsCapturing(void *s, int *status) { *status = stream_of(s)->capturing; return OK; }
EXPORT int cuStreamGetId(void *s, unsigned long long *id) { *id = stream_of(s)->id; return OK; }
EXPORT int cuStreamWaitEvent(void *s, void *e, unsigned flags) { CALL("cuStreamWaitEvent"); return OK; }
EXPORT int cuThreadExchangeStreamCaptureMode(int *m) { int old = mode; mode = *m; *m = old; return OK; }
EXPORT int cuEventCreate(void **e, unsigned flags) { CALL("cuEventCreate"); UNSAFE; *e = malloc(1); return OK; }
EXPORT int cuEventRecord(void *e, void *s) { CALL("cuEventRecord"); return OK; }
EXPORT int cuEventDestroy_v2(void *e) { free(e); return OK; }

/* ---- memory */
EXPORT int cuMemAlloc_v2(uint64_t *at, size_t n) {
  CALL("cuMemAlloc"); UNSAFE;
  NEED_CONTEXT;
  char *p = aligned_alloc(512, (n + 512 + 511) & ~(size_t)511);
  if (!p) return NO_MEMORY;
  memcpy(p, &n, sizeof n);
  memset(p + 512, 0xcd, n);
  __atomic_add_fetch(&bytes_live, (int64_t)n, __ATOMIC_RELAXED);
  __atomic_add_fetch(&n_memory, 1, __ATOMIC_RELAXED);
  *at = (uint64_t)(p + 512);
  return OK;
}
EXPORT int cuMemFree_v2(uint64_t at) {
  CALL("cuMemFree"); UNSAFE;
  NEED_CONTEXT;
  size_t n;
  memcpy(&n, (char *)at - 512, sizeof n);
  __atomic_sub_fetch(&bytes_live, (int64_t)n, __ATOMIC_RELAXED);
  __atomic_sub_fetch(&n_memory, 1, __ATOMIC_RELAXED);
  free((char *)at - 512);
  return OK;
}
EXPORT int cuMemAllocAsync(uint64_t *at, size_t n, void *s) { return cuMemAlloc_v2(at, n); }
EXPORT int cuMemFreeAsync(uint64_t at, void *s) { return cuMemFree_v2(at); }
EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *s) { CALL("cuMemcpyDtoHAsync"); if (stream_of(s)->capturing) return CAPTURE_UNSUPPORTED; memcpy(to, (void *)from, n); return OK; }
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *s) { CALL("cuMemcpyHtoDAsync"); memcpy((void *)to, from, n); return OK; }
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, void *s) { CALL("cuMemcpyDtoDAsync"); memcpy((void *)to, (void *)from, n); return OK; }

/* ---- graphs */
typedef struct { void *func; unsigned grid[3], block[3], shared; void **params, **extra; void *kernel, *context; } NodeParams;
EXPORT int cuGraphCreate(void **out, unsigned flags) { CALL("cuGraphCreate"); *out = calloc(1, sizeof(Graph)); return OK; }
EXPORT int cuGraphAddKernelNode_v2(void **out, void *graph, void *const *deps, size_t n, const NodeParams *p) {
  CALL("cuGraphAddKernelNode");
  Graph *g = graph;
  int rc = is_valid(p->func, p->grid[0], p->block[0], p->shared, p->params);
  if (rc || (n && (n != 1 || deps[0] != g->last))) return rc ? rc : INVALID;
  Node *made = *out = node_new(g, p->func, p->grid[0], p->block[0], p->shared, p->params);
  made->linked |= n == 1;
  return OK;
}
typedef struct { unsigned char from, to, type, reserved[5]; } Edge;
EXPORT int cuGraphAddDependencies_v2(void *graph, void *const *from, void *const *to, const Edge *edges, size_t n) {
  CALL("cuGraphAddDependencies");
  static const Edge early = {1, 0, 1, {0}};
  Node *a = *from, *b = *to;
  if (n != 1 || a->next != b || b->linked || memcmp(edges, &early, sizeof early) || !b->f->waits) REFUSE;
  a->early = b->early = b->linked = 1;
  return OK;
}
/* The executable shares the nodes: nobody changes a graph after that. */
EXPORT int cuGraphInstantiateWithFlags(void **out, void *graph, unsigned long long flags) {
  CALL("cuGraphInstantiate");
  for (Node *n = ((Graph *)graph)->first; n; n = n->next)
    if (!n->linked) REFUSE;
  *out = graph;
  return OK;
}
EXPORT int cuGraphExecKernelNodeSetParams_v2(void *exec, void *node, const NodeParams *p) {
  CALL("cuGraphExecKernelNodeSetParams");
  Node *n = node;
  if (!n || p->func != n->f) return INVALID;
  int rc = is_valid(n->f, p->grid[0], p->block[0], p->shared, p->params);
  if (rc) return rc;
  n->grid = p->grid[0];
  for (int i = 0; i < n->f->n; i++) memcpy(&n->words[i], p->params[i], 8);
  return OK;
}
EXPORT int cuGraphNodeSetEnabled(void *exec, void *node, unsigned on) {
  CALL("cuGraphNodeSetEnabled");
  if (((Node *)node)->early) REFUSE; /* the one behind it would not wait for the one before it */
  ((Node *)node)->enabled = on;
  return OK;
}
EXPORT int cuGraphLaunch(void *exec, void *stream) {
  CALL("cuGraphLaunch");
  NEED_CONTEXT;
  if (stream_of(stream)->capturing) return CAPTURE_UNSUPPORTED;
  for (Node *n = ((Graph *)exec)->first; n; n = n->next)
    if (n->enabled) run(n->f, n->grid, n->words);
  return OK;
}
EXPORT int cuGraphExecDestroy(void *exec) { CALL("cuGraphExecDestroy"); return OK; }
EXPORT int cuGraphDestroy(void *graph) {
  CALL("cuGraphDestroy");
  for (Node *n = ((Graph *)graph)->first, *next; n; n = next) {
    next = n->next;
    free(n->words);
    free(n);
  }
  free(graph);
  return OK;
}

EXPORT int cuStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *id, void **graph, void *const **deps, size_t *n) {
  Stream *s = stream_of(stream);
  *status = s->capturing;
  if (!s->capturing) return OK;
  *graph = s->into;
  *deps = (void *const *)&s->into->last;
  *n = s->into->last != NULL;
  return OK;
}

/* ---- library calls: torch's C functions, queued on the current stream */
static struct {
  int (*data)(void *, void **), (*sizes)(void *, int64_t **), (*strides)(void *, int64_t **), (*dtype)(void *, int *);
  int (*empty)(int64_t, const int64_t *, const int64_t *, int, int, int, void **), (*again)(void *, void **);
} torch;
static void torch_find(void) {
  void *lib = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  *(void **)&torch.data = dlsym(lib, "aoti_torch_get_data_ptr");
  *(void **)&torch.sizes = dlsym(lib, "aoti_torch_get_sizes");
  *(void **)&torch.strides = dlsym(lib, "aoti_torch_get_strides");
  *(void **)&torch.dtype = dlsym(lib, "aoti_torch_get_dtype");
  *(void **)&torch.empty = dlsym(lib, "aoti_torch_empty_strided");
  *(void **)&torch.again = dlsym(lib, "aoti_torch_new_tensor_handle");
}
enum { M_OUT, M_A, M_B, M_C, M_M, M_K, M_N, M_AM, M_AK, M_BK, M_BN, M_CM, M_CN, M_WORDS };
/* out[m, n] = c[m, n] + sum a[m, k] * b[k, n], with any strides; out is contiguous */
static void multiply(void **p, unsigned grid) {
  int64_t w[M_WORDS];
  for (int i = 0; i < M_WORDS; i++) w[i] = *(int64_t *)p[i];
  for (int64_t m = 0; m < w[M_M]; m++)
    for (int64_t n = 0; n < w[M_N]; n++) {
      float sum = w[M_C] ? ((float *)w[M_C])[m * w[M_CM] + n * w[M_CN]] : 0;
      for (int64_t k = 0; k < w[M_K]; k++) sum += ((float *)w[M_A])[m * w[M_AM] + k * w[M_AK]] * ((float *)w[M_B])[k * w[M_BK] + n * w[M_BN]];
      ((float *)w[M_OUT])[m * w[M_N] + n] = sum;
    }
}
static Function multiply_function = {multiply, M_WORDS, 0, "multiply"};
static int queue(Function *f, int64_t *words) {
  void *params[f->n + 1];
  for (int i = 0; i < f->n; i++) params[i] = &words[i];
  Stream *s = stream_of(current_stream);
  if (s->capturing) node_new(s->into, f, 1, 32, 0, params)->linked = 1;
  else run(f, 1, (uint64_t *)words);
  return OK;
}
EXPORT int aoti_torch_cuda_addmm_out(void *out, void *c, void *a, void *b, double beta, double alpha) {
  CALL("addmm");
  int64_t *as, *at, *bs, *bt, *cs, *ct, w[M_WORDS] = {0};
  int32_t kind;
  torch_find();
  torch.dtype(a, &kind);
  if (kind != 6) return 1; /* only float32 is multiplied here: the call is repeated eagerly */
  torch.data(out, (void **)&w[M_OUT]), torch.data(a, (void **)&w[M_A]), torch.data(b, (void **)&w[M_B]);
  torch.sizes(a, &as), torch.strides(a, &at), torch.sizes(b, &bs), torch.strides(b, &bt);
  w[M_M] = as[0], w[M_K] = as[1], w[M_N] = bs[1];
  w[M_AM] = at[0], w[M_AK] = at[1], w[M_BK] = bt[0], w[M_BN] = bt[1];
  if (c) { /* a row, or one for each row */
    torch.data(c, (void **)&w[M_C]), torch.sizes(c, &cs), torch.strides(c, &ct);
    w[M_CN] = ct[0];
  }
  return queue(&multiply_function, w);
}
EXPORT int aoti_torch_cuda_mm_out(void *out, void *a, void *b) { return aoti_torch_cuda_addmm_out(out, NULL, a, b, 0, 1); }
enum { V_OUT, V_X, V_W, V_B, V_XS, V_XT = V_XS + 4, V_WS = V_XT + 4, V_WT = V_WS + 4, V_OS = V_WT + 4, V_OT = V_OS + 4, V_S = V_OT + 4, V_P = V_S + 2, V_D = V_P + 2,
       V_GROUPS = V_D + 2, V_WORDS };
static void convolve(void **p, unsigned grid) {
  int64_t w[V_WORDS];
  for (int i = 0; i < V_WORDS; i++) w[i] = *(int64_t *)p[i];
  int64_t *xs = w + V_XS, *xt = w + V_XT, *ws = w + V_WS, *wt = w + V_WT, *os = w + V_OS, *ot = w + V_OT, per = os[1] / w[V_GROUPS];
  const float *x = (float *)w[V_X], *weight = (float *)w[V_W];
  for (int64_t n = 0; n < os[0]; n++)
    for (int64_t o = 0; o < os[1]; o++)
      for (int64_t i = 0; i < os[2] * os[3]; i++) {
        float sum = w[V_B] ? ((float *)w[V_B])[o] : 0;
        for (int64_t c = 0; c < ws[1]; c++)
          for (int64_t k = 0; k < ws[2] * ws[3]; k++) {
            int64_t kh = k / ws[3], kw = k % ws[3], h = i / os[3] * w[V_S] - w[V_P] + kh * w[V_D], v = i % os[3] * w[V_S + 1] - w[V_P + 1] + kw * w[V_D + 1];
            if (h < 0 || v < 0 || h >= xs[2] || v >= xs[3]) continue;
            sum += x[n * xt[0] + (o / per * ws[1] + c) * xt[1] + h * xt[2] + v * xt[3]] * weight[o * wt[0] + c * wt[1] + kh * wt[2] + kw * wt[3]];
          }
        ((float *)w[V_OUT])[n * ot[0] + o * ot[1] + i / os[3] * ot[2] + i % os[3] * ot[3]] = sum;
      }
}
static Function convolve_function = {convolve, V_WORDS, 0, "convolve"};
/* The result lies in memory as the image does, channels last or first. */
EXPORT int aoti_torch_cuda_convolution(void *x, void *weight, void **bias, const int64_t *stride, int64_t ns, const int64_t *padding, int64_t np,
                                       const int64_t *dilation, int64_t nd, int transposed, const int64_t *output_padding, int64_t no, int64_t groups,
                                       void **out) {
  CALL("convolution");
  int64_t *sizes[2], *strides[2], w[V_WORDS] = {0};
  int dtype;
  void *keep;
  torch_find();
  for (int i = 0; i < 2; i++) {
    torch.sizes(i ? weight : x, &sizes[i]), torch.strides(i ? weight : x, &strides[i]);
    memcpy(&w[i ? V_WS : V_XS], sizes[i], 32), memcpy(&w[i ? V_WT : V_XT], strides[i], 32);
  }
  torch.dtype(x, &dtype);
  int64_t *os = w + V_OS, *ot = w + V_OT;
  os[0] = sizes[0][0], os[1] = sizes[1][0];
  for (int d = 0; d < 2; d++) {
    w[V_S + d] = stride[d], w[V_P + d] = padding[d], w[V_D + d] = dilation[d];
    os[2 + d] = (sizes[0][2 + d] + 2 * padding[d] - dilation[d] * (sizes[1][2 + d] - 1) - 1) / stride[d] + 1;
  }
  int last = strides[0][1] == 1 && sizes[0][1] > 1;
  ot[0] = os[1] * os[2] * os[3], ot[1] = last ? 1 : os[2] * os[3], ot[2] = os[3] * (last ? os[1] : 1), ot[3] = last ? os[1] : 1;
  w[V_GROUPS] = groups;
  if (torch.empty(4, os, ot, dtype, 0, -1, out)) return 1;
  if (stream_of(current_stream)->capturing) torch.again(*out, &keep); /* memory of a capture is not given to others */
  torch.data(*out, (void **)&w[V_OUT]), torch.data(weight, (void **)&w[V_W]), torch.data(x, (void **)&w[V_X]);
  if (bias && *bias) torch.data(*bias, (void **)&w[V_B]);
  return queue(&convolve_function, w);
}

/* ---- torch's part */
EXPORT int aoti_torch_get_current_cuda_stream(int device, void **out) { *out = current_stream; return OK; }

/* ---- for tests */
EXPORT int64_t fake_calls(const char *name) {
  for (int i = 0; i < n_seen; i++)
    if (!strcmp(seen[i].name, name)) return seen[i].calls;
  return 0;
}
EXPORT void fake_reset(void) {
  for (int i = 0; i < n_seen; i++) seen[i].calls = seen[i].fail_at = 0;
}
/* The n-th call of `name` from now on returns `code`. */
EXPORT void fake_fail(const char *name, int64_t n, int code) {
  note(name);
  for (int i = 0; i < n_seen; i++)
    if (!strcmp(seen[i].name, name)) seen[i].calls--, seen[i].fail_at = seen[i].calls + n, seen[i].code = code;
}
EXPORT void fake_devices(int n, int cc) { n_devices = n; arch = cc; }
EXPORT void *fake_stream(int device) {
  Stream *s = calloc(1, sizeof *s);
  s->device = device;
  s->id = __atomic_add_fetch(&ids, 1, __ATOMIC_RELAXED);
  return s;
}
EXPORT void fake_set_stream(void *s) { current_stream = s; }
EXPORT void *fake_get_stream(void) { return current_stream; }
/* As torch.cuda.graph: in global mode. */
EXPORT void fake_begin_global_capture(void *s) { capturing_global++; ((Stream *)s)->capturing = 1; ((Stream *)s)->into = calloc(1, sizeof(Graph)); }
EXPORT void *fake_end_global_capture(void *s) { capturing_global--; ((Stream *)s)->capturing = 0; return ((Stream *)s)->into; }
EXPORT void fake_begin_capture(void *s) { ((Stream *)s)->capturing = 1; ((Stream *)s)->into = calloc(1, sizeof(Graph)); }
EXPORT void *fake_end_capture(void *s) { ((Stream *)s)->capturing = 0; return ((Stream *)s)->into; }
EXPORT int fake_replay(void *graph) { return cuGraphLaunch(graph, NULL); }
EXPORT int64_t fake_bytes(void) { return bytes_live; }
EXPORT int fake_depth(void) { return depth; }
