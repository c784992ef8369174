"""C text of the value printer: what a host program of a debugging compilation says of each launch (no torch).

In: Options.debug_values: "1" saves what kernels wrote as .npy files, "2" prints it, "3" prints the names of kernels before they run; and
Options.debug_kernels: names, separated by commas, of the kernels wanted (all, if empty). Out: include-free C that needs libc only; other
compilations hold none of it.

Lines go to stderr, whole. Files go to the folder that the environment variable TORCHSMITH_VALUES_DIR names, or torchsmith_values_PID in the
current one; bfloat16 is saved by its bits.
"""

from __future__ import annotations

SAVE, PRINT, NAMES = "1", "2", "3"


def is_wanted(kernel: str, c_name: str, only: str) -> bool:
    """Does the filter name this kernel: by its C name, or by a part of its readable one?"""
    words = [w.strip() for w in only.split(",") if w.strip()]
    return not words or any(w == c_name or w in kernel for w in words)


WATCH_TEXT = r"""
extern int snprintf(char *, __SIZE_TYPE__, const char *, ...);
extern __INTPTR_TYPE__ write(int, const void *, __SIZE_TYPE__);
extern int open(const char *, int, ...);
extern int close(int);
extern int mkdir(const char *, unsigned);
extern int getpid(void);
extern char *getenv(const char *);
static int64_t ts_runs;
static const char *const ts_names[] = {"f64", "f32", "bf16", "f16", "i64", "i32", "i16", "i8", "u8", "bool", "c64", "c128", "c32", "u16", "u32", "u64"};
static const char *const ts_codes[] = {"<f8", "<f4", "<u2", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1", "<c8", "<c16", "<u4", "<u2", "<u4", "<u8"};
static const int ts_sizes[] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16, 4, 2, 4, 8};
TS_MAYBE double ts_value(int dtype, const char *p) {
  switch (dtype) {
    case 0: case 11: return *(const double *)p;
    case 1: case 10: return *(const float *)p;
    case 2: return ts_bf16(*(const uint16_t *)p);
    case 3: case 12: {
      uint16_t h = *(const uint16_t *)p;
      int e = (h >> 10) & 31, m = h & 1023;
      double v = e == 31 ? (m ? __builtin_nan("") : __builtin_inf()) : e ? (m + 1024) * 0x1p-25 : m * 0x1p-24;
      for (int k = e == 31 ? 0 : e; k > 0; k--) v *= 2;
      return h >> 15 ? -v : v;
    }
    case 4: return (double)*(const int64_t *)p;
    case 5: return *(const int32_t *)p;
    case 6: return *(const int16_t *)p;
    case 7: return *(const int8_t *)p;
    case 8: return *(const uint8_t *)p;
    case 9: return *(const uint8_t *)p != 0;
    case 13: return *(const uint16_t *)p;
    case 14: return *(const uint32_t *)p;
    default: return (double)*(const uint64_t *)p;
  }
}
typedef struct { char text[2048]; int n; } ts_line;
#define TS_SAY(l, ...) do { if ((l)->n < 2000) (l)->n += snprintf((l)->text + (l)->n, 2000 - (__SIZE_TYPE__)(l)->n, __VA_ARGS__); if ((l)->n > 1999) (l)->n = 1999; } while (0)
TS_MAYBE void ts_out(ts_line *l) {
  l->text[l->n] = '\n';
  if (write(2, l->text, (__SIZE_TYPE__)l->n + 1)) {}
}
TS_MAYBE void ts_shape(ts_line *l, int ndim, const int64_t *n, int is_python) {
  for (int k = 0; k < ndim; k++) TS_SAY(l, "%s%lld", k ? ", " : "", (long long)n[k]);
  if (is_python && ndim == 1) TS_SAY(l, ",");
}
TS_MAYBE void ts_kernel_runs(int64_t run, int launch, const char *kernel) {
  ts_line l = {{0}, 0};
  TS_SAY(&l, "torchsmith: run %lld, launch %d: %s", (long long)run, launch, kernel);
  ts_out(&l);
}
/* The next element's address: strides counted up like an odometer. */
TS_MAYBE const char *ts_next(const char *p, int ndim, const int64_t *n, const int64_t *s, int64_t *at, int size) {
  for (int k = ndim - 1; k >= 0; k--) {
    p += s[k] * size;
    if (++at[k] < n[k]) return p;
    p -= s[k] * n[k] * size;
    at[k] = 0;
  }
  return p;
}
TS_MAYBE void ts_save(int64_t run, int launch, const char *buffer, int dtype, int ndim, const int64_t *n, const int64_t *s, const char *p, int64_t total) {
  char folder[1024], path[1280], block[4096];
  const char *given = getenv("TORCHSMITH_VALUES_DIR");
  int64_t at[64] = {0};
  int size = ts_sizes[dtype], used = 0;
  if (given && *given) snprintf(folder, sizeof folder, "%s", given);
  else snprintf(folder, sizeof folder, "torchsmith_values_%d", getpid());
  mkdir(folder, 0700);
  snprintf(path, sizeof path, "%s/run%lld_launch%d_%s%s.npy", folder, (long long)run, launch, buffer, dtype == 2 ? ".bf16" : "");
  int file = open(path, 577, 0600);
  ts_line l = {{0}, 0};
  if (file < 0) { TS_SAY(&l, "torchsmith: cannot write %s", path); ts_out(&l); return; }
  TS_SAY(&l, "%cNUMPY%c%c%c%c{'descr': '%s', 'fortran_order': False, 'shape': (", 0x93, 1, 1, 1, 1, ts_codes[dtype]);
  ts_shape(&l, ndim, n, 1);
  TS_SAY(&l, "), }");
  while ((l.n + 1) % 64) TS_SAY(&l, " ");
  l.text[l.n++] = '\n';
  l.text[7] = 0; l.text[8] = (char)((l.n - 10) & 255); l.text[9] = (char)((l.n - 10) >> 8);
  if (write(file, l.text, (__SIZE_TYPE__)l.n)) {}
  for (int64_t i = 0; i < total; i++) {
    __builtin_memcpy(block + used, p, (__SIZE_TYPE__)size);
    used += size;
    if (used > 4080) { if (write(file, block, (__SIZE_TYPE__)used)) {} used = 0; }
    p = ts_next(p, ndim, n, s, at, size);
  }
  if (used && write(file, block, (__SIZE_TYPE__)used)) {}
  close(file);
}
TS_MAYBE void ts_watch(int level, int64_t run, int launch, const char *kernel, const char *buffer, const char *loc, int dtype, int ndim,
                       const int64_t *n, const int64_t *s, const void *data) {
  const char *p = (const char *)data;
  int64_t total = 1, at[64] = {0}, nans = 0, infs = 0, finite = 0;
  double low = 0, high = 0, sum = 0;
  ts_line first = {{0}, 0}, l = {{0}, 0};
  if (!p || ndim > 64) return;
  for (int k = 0; k < ndim; k++) total *= n[k];
  if (level == 1) { ts_save(run, launch, buffer, dtype, ndim, n, s, p, total); return; }
  int parts = dtype >= 10 && dtype <= 12 ? 2 : 1, size = ts_sizes[dtype];
  for (int64_t i = 0; i < total; i++) {
    for (int c = 0; c < parts; c++) {
      double v = ts_value(dtype, p + c * (size / 2));
      if (i < 6) TS_SAY(&first, c ? "%+.6gi" : " %.6g", v);
      if (v != v) { nans++; continue; }
      if (v - v != 0) { infs++; continue; }
      if (!finite || v < low) low = v;
      if (!finite || v > high) high = v;
      sum += v;
      finite++;
    }
    p = ts_next(p, ndim, n, s, at, size);
  }
  TS_SAY(&l, "torchsmith: run %lld, launch %d: %s %s %s[", (long long)run, launch, kernel, buffer, ts_names[dtype]);
  ts_shape(&l, ndim, n, 0);
  TS_SAY(&l, "]%s%s: ", *loc ? " at " : "", loc);
  if (finite) TS_SAY(&l, "min %.6g, max %.6g, mean %.6g, ", low, high, sum / (double)finite);
  TS_SAY(&l, "%lld nan, %lld inf; first%s", (long long)nans, (long long)infs, first.text);
  ts_out(&l);
}
"""
