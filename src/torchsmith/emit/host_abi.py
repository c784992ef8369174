"""C text that every host program starts with: the ABI of csrc/torchsmith.h without includes, and integer helpers.

A test holds ABI_TEXT equal to the header, token by token.
"""

ABI_TEXT = """\
typedef __INT64_TYPE__ int64_t; typedef __INT32_TYPE__ int32_t; typedef __INT16_TYPE__ int16_t; typedef __INT8_TYPE__ int8_t;
typedef __UINT64_TYPE__ uint64_t; typedef __UINT32_TYPE__ uint32_t; typedef __UINT16_TYPE__ uint16_t; typedef __UINT8_TYPE__ uint8_t;
#define TS_ABI 3
typedef struct ts_tensor { void *data; const int64_t *sizes; const int64_t *strides; void *handle; } ts_tensor;
typedef void (*ts_kernel)(void *const *bufs, const int64_t *syms, int64_t lo, int64_t hi);
typedef struct ts_launch { ts_kernel fn; void *const *bufs; const int64_t *syms; } ts_launch;
enum { TS_OK = 0, TS_ERROR_CHECK = 1, TS_ERROR_EXTERN = 2, TS_ERROR_MEMORY = 3, TS_ERROR_ABI = 4, TS_ERROR_DEVICE = 5, TS_ERROR_LATE = 6 };
typedef struct ts_device_launch {
  int32_t kernel, first, n, n_free;
  int64_t grid;
} ts_device_launch;
enum { TS_REPLAYED = 0, TS_PLAIN = 1, TS_RECORD = 2 };
typedef struct ts_device {
  int32_t (*launch)(void *self, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words);
  int32_t (*begin)(void *self, int32_t segment, const ts_device_launch *launches, int32_t n, const uint64_t *words, int32_t n_words,
                   const uint64_t *fixed, int32_t n_fixed);
  int32_t (*end)(void *self, int32_t segment);
  int32_t (*read)(void *self, const void *from, void *to, int64_t bytes);
} ts_device;
typedef struct ts_host {
  uint32_t abi;
  void *self;
  int32_t (*alloc_result)(void *self, int32_t index, int32_t dtype, int32_t ndim, const int64_t *sizes,
                          const int64_t *strides, ts_tensor *out);
  void *(*take_workspace)(void *self, int64_t bytes);
  void (*give_workspace)(void *self, void *workspace, int64_t bytes);
  void (*parallel_for)(void *self, const ts_launch *launch, int64_t n, int64_t grain);
  int32_t (*extern_call)(void *self, int32_t call, const ts_tensor *args, const int64_t *scalars, ts_tensor *outs);
  int32_t (*conform)(void *self, ts_tensor *given, int32_t ndim, const int64_t *sizes, const int64_t *strides);
  void (*release)(void *self, ts_tensor *given);
  void (*error)(void *self, int32_t kind, const char *text);
  const ts_device *device;
} ts_host;
enum ts_dtype { TS_F64, TS_F32, TS_BF16, TS_F16, TS_I64, TS_I32, TS_I16, TS_I8, TS_U8, TS_BOOL, TS_C64, TS_C128, TS_C32, TS_U16,
                TS_U32, TS_U64 };
typedef struct ts_image {
  int32_t arch, is_text, threads, shared, waits;
  const char *data;
  int64_t size;
} ts_image;
typedef struct ts_device_kernel {
  const char *name, *symbol;
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
  int32_t (*run)(const ts_host *host, const ts_tensor *inputs, const int64_t *scalars, const void *state, ts_tensor *results,
                 int64_t *result_syms);
  const ts_images *images;
} ts_graph;
"""

# Arithmetic on sizes: also what the checks of a package's inputs call. Those that end in x are exact, or set *bad and give 0.
NUMBERS = """\
#define TS_MAYBE static inline __attribute__((unused))
TS_MAYBE int64_t ts_truncdiv(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? (int64_t)(0 - (uint64_t)a) : a / b; }
TS_MAYBE int64_t ts_floordiv(int64_t a, int64_t b) {
  int64_t q = ts_truncdiv(a, b);
  return q - (b != 0 && b != -1 && a % b != 0 && (a < 0) != (b < 0));
}
TS_MAYBE int64_t ts_mod(int64_t a, int64_t b) {
  int64_t r = b == 0 || b == -1 ? 0 : a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
TS_MAYBE int64_t ts_abs(int64_t a) { return a < 0 ? (int64_t)(0 - (uint64_t)a) : a; }
TS_MAYBE int64_t ts_min(int64_t a, int64_t b) { return a < b ? a : b; }
TS_MAYBE int64_t ts_max(int64_t a, int64_t b) { return a > b ? a : b; }
TS_MAYBE int64_t ts_addx(int64_t a, int64_t b, int *bad) { int64_t r; if (!__builtin_add_overflow(a, b, &r)) return r; *bad = 1; return 0; }
TS_MAYBE int64_t ts_subx(int64_t a, int64_t b, int *bad) { int64_t r; if (!__builtin_sub_overflow(a, b, &r)) return r; *bad = 1; return 0; }
TS_MAYBE int64_t ts_mulx(int64_t a, int64_t b, int *bad) { int64_t r; if (!__builtin_mul_overflow(a, b, &r)) return r; *bad = 1; return 0; }
TS_MAYBE int64_t ts_negx(int64_t a, int *bad) { return ts_subx(0, a, bad); }
TS_MAYBE int64_t ts_absx(int64_t a, int *bad) { return a < 0 ? ts_negx(a, bad) : a; }
TS_MAYBE int64_t ts_truncdivx(int64_t a, int64_t b, int *bad) { *bad |= b == 0; return b == -1 ? ts_negx(a, bad) : ts_truncdiv(a, b); }
TS_MAYBE int64_t ts_floordivx(int64_t a, int64_t b, int *bad) { *bad |= b == 0; return b == -1 ? ts_negx(a, bad) : ts_floordiv(a, b); }
TS_MAYBE int64_t ts_modx(int64_t a, int64_t b, int *bad) { *bad |= b == 0; return ts_mod(a, b); }
TS_MAYBE int64_t ts_shlx(int64_t a, int64_t b, int *bad) {
  if (a == 0 && b >= 0) return 0;
  if (b >= 0 && b < 63) return ts_mulx(a, (int64_t)1 << b, bad);
  *bad = 1;
  return 0;
}
TS_MAYBE int64_t ts_shrx(int64_t a, int64_t b, int *bad) { *bad |= b < 0; return a >> (b < 0 ? 0 : b > 63 ? 63 : b); }
TS_MAYBE int64_t ts_index(double a, int *bad) {
  if (a >= -0x1p63 && a < 0x1p63) return (int64_t)a;
  *bad = 1;
  return 0;
}
TS_MAYBE double ts_exact(int64_t a, int *bad) { *bad |= a > (1LL << 53) || a < -(1LL << 53); return (double)a; }
"""

HELPERS = NUMBERS + """\
#define TS_HIDDEN __attribute__((visibility("hidden")))
#define TS_EXPORT __attribute__((visibility("default")))
TS_MAYBE double ts_fmin(double a, double b) { return a != a || a < b ? a : b; }
TS_MAYBE double ts_fmax(double a, double b) { return a != a || a > b ? a : b; }
TS_MAYBE double ts_bits(int64_t a) { union { int64_t i; double d; } u; u.i = a; return u.d; }
TS_MAYBE int64_t ts_pack(double a) { union { int64_t i; double d; } u; u.d = a; return u.i; }
TS_MAYBE float ts_bf16(uint16_t a) { union { uint32_t i; float f; } u; u.i = (uint32_t)a << 16; return u.f; }
TS_MAYBE int32_t ts_overflow(const ts_host *host) {
  host->error(host->self, TS_ERROR_CHECK, "OverflowError: a size or an integer of this call does not fit 64 bits");
  return TS_ERROR_CHECK;
}
TS_MAYBE void ts_go(const ts_host *host, ts_kernel fn, void *const *b, const int64_t *y, int64_t n, int64_t grain) {
  if (n <= 0) return;
  if (n <= grain) { fn(b, y, 0, n); return; }
  ts_launch l = {fn, b, y};
  host->parallel_for(host->self, &l, n, grain);
}
#define TS_APART static __attribute__((noinline, unused))
/* An address: `offset` behind that of a tensor in one of the arrays that memory is told by. Tables of them take a compiler no time. */
enum { TS_OWN, TS_INPUT, TS_RESULT, TS_GIVEN, TS_TAKEN };
enum { TS_NOTHING, TS_WORKSPACE, TS_STATE }; /* of TS_OWN */
typedef struct ts_place { int32_t array, at; int64_t offset; } ts_place;
typedef struct ts_operand { ts_place place; const int64_t *sizes, *strides; int whole; } ts_operand; /* whole: the tensor that lies there */
TS_APART void ts_words(uint64_t *out, ts_tensor *const *m, const ts_place *p, int n) {
  for (int i = 0; i < n; i++) out[i] = (uint64_t)m[p[i].array][p[i].at].data + (uint64_t)p[i].offset;
}
TS_APART int32_t ts_call(const ts_host *host, ts_tensor *const *m, int32_t call, const ts_operand *a, int n, const int64_t *e, ts_tensor *o) {
  ts_tensor args[n + 1];
  for (int i = 0; i < n; i++) {
    const ts_tensor *t = &m[a[i].place.array][a[i].place.at];
    if (a[i].whole) args[i] = *t;
    else args[i] = (ts_tensor){(char *)t->data + a[i].place.offset, a[i].sizes, a[i].strides, 0};
  }
  return host->extern_call(host->self, call, args, e, o);
}
TS_APART void ts_free(const ts_host *host, ts_tensor *given) {
  if (given->handle) host->release(host->self, given);
  given->handle = 0;
}
TS_APART int ts_same(int n, const int64_t *sizes, const int64_t *strides, const int64_t *want, const int64_t *steps, int seen) {
  int same = 1, some = 1;
  for (int i = 0; i < n; i++) { same &= sizes[i] == want[i]; some &= want[i] != 0; }
  if (!same) return 0;
  for (int i = 0; i < n; i++) same &= (!seen && want[i] == 1) || strides[i] == steps[i];
  return same || !some;
}
TS_APART int32_t ts_conform(const ts_host *host, ts_tensor *given, int n, const int64_t *want, const int64_t *steps, int seen) {
  return ts_same(n, given->sizes, given->strides, want, steps, seen) ? 0 : host->conform(host->self, given, n, want, steps);
}
"""
