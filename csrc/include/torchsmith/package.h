/* Load and run torchsmith packages (.pt2) and model libraries (.so) from C or C++: this header, libc and -ldl are all that is needed.
 *
 *     torchsmith_model *model;
 *     if (torchsmith_load("model.pt2", NULL, NULL, &model)) { puts(torchsmith_error()); return 1; }
 *     tsm_tensor x = {data, sizes, NULL, 2, TSM_F32, 0, 0, NULL}, y = {0};
 *     if (torchsmith_run(model, &x, 1, &y, 1)) puts(torchsmith_model_error(model));
 *     torchsmith_release(model, &y);
 *     torchsmith_free(model);
 *
 * Nothing is unpacked: code goes to an anonymous file in memory, weights are mapped from inside the package. The directory, sizes, the
 * manifest and the code are verified on every load (CRC-32); the weights too with `verify`. A package is read as data: no name in it is
 * used as a path. Define TORCHSMITH_STATIC before including to keep every function static (the default is static inline).
 */
#ifndef TORCHSMITH_PACKAGE_H
#define TORCHSMITH_PACKAGE_H
#define TSM_NO_PROTOTYPES
#include "model.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TORCHSMITH_FORMAT 2 /* newest package format this header reads */

typedef struct torchsmith_options {
  uint32_t size;   /* sizeof(torchsmith_options) */
  int32_t threads; /* as in tsm_config */
  int32_t verify;  /* not 0: weights are verified too, which reads all of them */
  void *(*allocate)(void *context, size_t bytes);
  void (*release)(void *context, void *memory);
  void *context;
  int32_t device;  /* as in tsm_config: of a model for CUDA, n for device n - 1; 0: the current one */
} torchsmith_options;

typedef struct torchsmith_model {
  void *library;
  int fd; /* of the code in memory, or -1 */
  tsm_model *model;
  uint32_t (*abi_version)(void);
  int32_t (*create)(const tsm_config *, tsm_model **);
  void (*destroy)(tsm_model *);
  int32_t (*run)(tsm_model *, const tsm_tensor *, size_t, tsm_tensor *, size_t);
  void (*release)(tsm_tensor *);
  const char *(*last_error)(void);
  size_t (*input_count)(const tsm_model *);
  size_t (*output_count)(const tsm_model *);
  size_t (*constant_count)(const tsm_model *);
  int32_t (*input)(const tsm_model *, size_t, tsm_tensor_info *);
  int32_t (*output)(const tsm_model *, size_t, tsm_tensor_info *);
  int32_t (*constant)(const tsm_model *, size_t, tsm_constant_info *);
  const char *(*info)(const tsm_model *);
  int32_t (*load_constants)(tsm_model *, const char *const *, const tsm_tensor *, size_t);
  int32_t (*run_on)(tsm_model *, const tsm_tensor *, size_t, tsm_tensor *, size_t, void *); /* NULL in libraries of an older torchsmith */
} torchsmith_model;

#if defined(__GNUC__)
#define TSP_FN static inline __attribute__((unused))
#else
#define TSP_FN static inline
#endif

/* ---------------------------------------------------------------- errors of loading */

TSP_FN char *tsp_text(void) {
  static __thread char text[512];
  return text;
}

/* Why the last torchsmith_load of this thread failed; never NULL. */
TSP_FN const char *torchsmith_error(void) { return tsp_text(); }

TSP_FN int32_t tsp_fail(int32_t status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(tsp_text(), 512, format, args);
  va_end(args);
  return status;
}

/* ---------------------------------------------------------------- files */

typedef struct { uint32_t rows[8][256]; } tsp_crc;

TSP_FN void tsp_crc_init(tsp_crc *t) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0xedb88320u : c >> 1;
    t->rows[0][i] = c;
  }
  for (int r = 1; r < 8; r++)
    for (int i = 0; i < 256; i++) t->rows[r][i] = t->rows[r - 1][i] >> 8 ^ t->rows[0][t->rows[r - 1][i] & 255];
}

TSP_FN uint32_t tsp_crc_of(const tsp_crc *t, uint32_t crc, const unsigned char *p, size_t n) {
  crc = ~crc;
  for (; n >= 8; n -= 8, p += 8) {
    uint32_t a = crc ^ (p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
    crc = t->rows[7][a & 255] ^ t->rows[6][a >> 8 & 255] ^ t->rows[5][a >> 16 & 255] ^ t->rows[4][a >> 24] ^ t->rows[3][p[4]] ^
          t->rows[2][p[5]] ^ t->rows[1][p[6]] ^ t->rows[0][p[7]];
  }
  for (; n; n--, p++) crc = crc >> 8 ^ t->rows[0][(crc ^ *p) & 255];
  return ~crc;
}

typedef struct {
  const char *path;
  int fd;
  uint64_t size;
  unsigned char *directory; /* the central directory */
  uint64_t directory_size;
  tsp_crc crc;
} tsp_file;

typedef struct {
  const char *name; /* not terminated */
  size_t length;
  uint64_t offset, size; /* of the data */
  uint64_t header;       /* of the local header */
  uint32_t crc, method;
} tsp_member;

TSP_FN uint64_t tsp_number(const unsigned char *p, int bytes) {
  uint64_t v = 0;
  for (int i = bytes - 1; i >= 0; i--) v = v << 8 | p[i];
  return v;
}

TSP_FN int32_t tsp_read(const tsp_file *f, uint64_t offset, void *to, uint64_t size) {
  char *at = (char *)to;
  if (offset > f->size || size > f->size - offset) return tsp_fail(TSM_ERROR_FORMAT, "%s is truncated", f->path);
  while (size) {
    ssize_t n = pread(f->fd, at, size > (1u << 30) ? (1u << 30) : (size_t)size, (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return tsp_fail(TSM_ERROR_FILE, "%s cannot be read: %s", f->path, n ? strerror(errno) : "it became shorter");
    at += n;
    offset += (uint64_t)n;
    size -= (uint64_t)n;
  }
  return TSM_OK;
}

/* Find and read the zip's central directory. */
TSP_FN int32_t tsp_directory(tsp_file *f) {
  unsigned char end[22 + 65535], wide[56];
  uint64_t tail = f->size < sizeof end ? f->size : sizeof end, at = 0, offset = 0;
  int32_t rc = tsp_read(f, f->size - tail, end, tail);
  if (rc) return rc;
  int64_t i = (int64_t)tail - 22;
  while (i >= 0 && tsp_number(end + i, 4) != 0x06054b50u) i--;
  if (i < 0) return tsp_fail(TSM_ERROR_FORMAT, "%s is truncated, or neither a package nor a model library", f->path);
  f->directory_size = tsp_number(end + i + 12, 4);
  offset = tsp_number(end + i + 16, 4);
  if (offset == 0xffffffffu || f->directory_size == 0xffffffffu) {
    if (i < 20 || tsp_number(end + i - 20, 4) != 0x07064b50u) return tsp_fail(TSM_ERROR_FORMAT, "%s: a damaged zip directory", f->path);
    at = tsp_number(end + i - 12, 8);
    if ((rc = tsp_read(f, at, wide, sizeof wide)) != 0) return rc;
    if (tsp_number(wide, 4) != 0x06064b50u) return tsp_fail(TSM_ERROR_FORMAT, "%s: a damaged zip directory", f->path);
    f->directory_size = tsp_number(wide + 40, 8);
    offset = tsp_number(wide + 48, 8);
  }
  if (f->directory_size > f->size || f->directory_size > (64u << 20)) return tsp_fail(TSM_ERROR_FORMAT, "%s: a damaged zip directory", f->path);
  f->directory = (unsigned char *)malloc((size_t)f->directory_size + 1);
  if (!f->directory) return tsp_fail(TSM_ERROR_MEMORY, "out of memory");
  return tsp_read(f, offset, f->directory, f->directory_size);
}

/* The next member of the directory; *at moves on. 1: there is one, 0: the end, -1: an error (text set). */
TSP_FN int tsp_next(const tsp_file *f, uint64_t *at, tsp_member *out) {
  const unsigned char *p = f->directory + *at;
  if (*at == f->directory_size) return 0;
  uint64_t left = f->directory_size - *at, n, extra, comment;
  if (left < 46 || tsp_number(p, 4) != 0x02014b50u) return tsp_fail(-1, "%s: a damaged zip directory", f->path);
  n = tsp_number(p + 28, 2);
  extra = tsp_number(p + 30, 2);
  comment = tsp_number(p + 32, 2);
  if (46 + n + extra + comment > left) return tsp_fail(-1, "%s: a damaged zip directory", f->path);
  out->name = (const char *)p + 46;
  out->length = (size_t)n;
  out->method = (uint32_t)tsp_number(p + 10, 2);
  out->crc = (uint32_t)tsp_number(p + 16, 4);
  out->size = tsp_number(p + 24, 4);
  out->header = tsp_number(p + 42, 4);
  for (uint64_t x = 46 + n; x + 4 <= 46 + n + extra;) { /* sizes beyond 4 GB */
    uint64_t id = tsp_number(p + x, 2), size = tsp_number(p + x + 2, 2), y = x + 4;
    if (y + size > 46 + n + extra) return tsp_fail(-1, "%s: a damaged zip directory", f->path);
    if (id == 1) {
      if (out->size == 0xffffffffu && y + 8 <= x + 4 + size) out->size = tsp_number(p + y, 8), y += 8;
      if (tsp_number(p + 20, 4) == 0xffffffffu && y + 8 <= x + 4 + size) y += 8;
      if (out->header == 0xffffffffu && y + 8 <= x + 4 + size) out->header = tsp_number(p + y, 8);
    }
    x += 4 + size;
  }
  for (size_t i = 0; i < out->length; i++) {
    int is_start = i == 0 || out->name[i - 1] == '/';
    if ((is_start && i + 1 < out->length && out->name[i] == '.' && out->name[i + 1] == '.' && (i + 2 == out->length || out->name[i + 2] == '/')) ||
        (i == 0 && out->name[0] == '/') || out->name[i] == '\\' || out->name[i] == 0)
      return tsp_fail(-1, "%s holds a member whose name leads out of the package: %.*s", f->path, (int)out->length, out->name);
  }
  *at += 46 + n + extra + comment;
  return 1;
}

/* Where the member's data starts, and that it lies inside the file, stored as it is. */
TSP_FN int32_t tsp_locate(const tsp_file *f, tsp_member *m) {
  unsigned char head[30];
  if (m->method != 0) return tsp_fail(TSM_ERROR_FORMAT, "%s: %.*s is compressed; packages store their members as they are", f->path, (int)m->length, m->name);
  int32_t rc = tsp_read(f, m->header, head, sizeof head);
  if (rc) return rc;
  if (tsp_number(head, 4) != 0x04034b50u) return tsp_fail(TSM_ERROR_FORMAT, "%s: a damaged member header", f->path);
  m->offset = m->header + 30 + tsp_number(head + 26, 2) + tsp_number(head + 28, 2);
  if (m->offset > f->size || m->size > f->size - m->offset) return tsp_fail(TSM_ERROR_FORMAT, "%s is truncated", f->path);
  return TSM_OK;
}

/* The member's content in fresh memory, verified. */
TSP_FN int32_t tsp_content(const tsp_file *f, const tsp_member *m, unsigned char **out) {
  *out = m->size < (1ull << 32) ? (unsigned char *)malloc((size_t)m->size + 1) : NULL;
  if (!*out) return tsp_fail(TSM_ERROR_MEMORY, "no memory for %llu bytes of %s", (unsigned long long)m->size, f->path);
  int32_t rc = tsp_read(f, m->offset, *out, m->size);
  if (!rc && tsp_crc_of(&f->crc, 0, *out, (size_t)m->size) != m->crc)
    rc = tsp_fail(TSM_ERROR_FORMAT, "%s is damaged: %.*s has another checksum", f->path, (int)m->length, m->name);
  if (rc) {
    free(*out);
    *out = NULL;
  } else {
    (*out)[m->size] = 0;
  }
  return rc;
}

TSP_FN int32_t tsp_verify(const tsp_file *f, uint64_t offset, uint64_t size, uint32_t crc) {
  unsigned char *part = (unsigned char *)malloc(1 << 20);
  uint32_t got = 0;
  int32_t rc = part ? TSM_OK : tsp_fail(TSM_ERROR_MEMORY, "out of memory");
  while (size && !rc) {
    uint64_t n = size < (1 << 20) ? size : (1 << 20);
    rc = tsp_read(f, offset, part, n);
    if (!rc) got = tsp_crc_of(&f->crc, got, part, (size_t)n);
    offset += n;
    size -= n;
  }
  free(part);
  if (!rc && got != crc) return tsp_fail(TSM_ERROR_FORMAT, "%s is damaged: its weights have another checksum", f->path);
  return rc;
}

/* Weights outside of a package: their header (aot/model.h: ts_weights_header) has the checksum, unless an older torchsmith wrote them. */
TSP_FN int32_t tsp_verify_weights(const tsp_file *f, uint64_t offset) {
  unsigned char head[64];
  int32_t rc = tsp_read(f, offset, head, sizeof head);
  if (rc) return rc;
  uint64_t size = tsp_number(head + 16, 8);
  if (memcmp(head, "TSWEIGHT", 8) != 0 || size < sizeof head) return tsp_fail(TSM_ERROR_FORMAT, "%s holds no weights", f->path);
  return tsp_number(head + 40, 4) ? tsp_verify(f, offset + sizeof head, size - sizeof head, (uint32_t)tsp_number(head + 44, 4)) : TSM_OK;
}

/* ---------------------------------------------------------------- libraries */

TSP_FN int32_t tsp_bind(torchsmith_model *m, const char *path) {
  m->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!m->library) return tsp_fail(TSM_ERROR_FORMAT, "the model library cannot be opened: %s", dlerror());
  const struct { const char *name; void *where; } rows[] = {
      {"tsm_abi_version", &m->abi_version}, {"tsm_create", &m->create}, {"tsm_delete", &m->destroy}, {"tsm_run", &m->run},
      {"tsm_release", &m->release}, {"tsm_last_error", &m->last_error}, {"tsm_input_count", &m->input_count},
      {"tsm_output_count", &m->output_count}, {"tsm_constant_count", &m->constant_count}, {"tsm_input", &m->input},
      {"tsm_output", &m->output}, {"tsm_constant", &m->constant}, {"tsm_info", &m->info}, {"tsm_load_constants", &m->load_constants}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    void *found = dlsym(m->library, rows[i].name);
    if (!found) return tsp_fail(TSM_ERROR_FORMAT, "%s is no model of torchsmith: it lacks %s", path, rows[i].name);
    memcpy(rows[i].where, &found, sizeof found);
  }
  void *streams = dlsym(m->library, "tsm_run_on");
  memcpy(&m->run_on, &streams, sizeof streams);
  if (m->abi_version() != TSM_ABI_VERSION)
    return tsp_fail(TSM_ERROR_VERSION, "the model has interface version %u, this program has %u", m->abi_version(), (unsigned)TSM_ABI_VERSION);
  return TSM_OK;
}

TSP_FN void tsp_unbind(torchsmith_model *m) {
  if (m->library) dlclose(m->library);
  if (m->fd >= 0) close(m->fd);
  m->library = NULL;
  m->fd = -1;
}

/* A path of this descriptor that no other call gives. dlopen knows libraries by their paths: were the descriptor closed behind our back and
 * its number used again, the next model would be taken for this one. "/" and "/." spell 64 bits: a counter and this counter's address. */
TSP_FN void tsp_descriptor_path(char *path, int fd) {
  static uint32_t count;
  uint64_t number = (uint64_t)(uintptr_t)&count << 16 ^ __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
  char *at = path + sprintf(path, "/proc/self");
  for (int i = 0; i < 64; i++) at += sprintf(at, "%s", number >> i & 1 ? "/." : "/");
  sprintf(at, "/fd/%d", fd);
}

/* Open code that is in memory: through an anonymous file, or a temporary one that is unlinked at once. */
TSP_FN int32_t tsp_bind_content(torchsmith_model *m, const unsigned char *content, uint64_t size) {
  char path[256];
  uint64_t done = 0;
  int is_named = 0;
#ifdef SYS_memfd_create
  m->fd = (int)syscall(SYS_memfd_create, "torchsmith-model", 1u /* MFD_CLOEXEC */);
#else
  m->fd = -1;
#endif
  if (m->fd >= 0) {
    tsp_descriptor_path(path, m->fd);
    is_named = access(path, R_OK) != 0;
    if (is_named) close(m->fd);
  }
  if (m->fd < 0 || is_named) {
    strcpy(path, "/tmp/torchsmith-XXXXXX");
    m->fd = mkstemp(path);
    is_named = 1;
    if (m->fd < 0) return tsp_fail(TSM_ERROR_FILE, "no place for the model's code: %s", strerror(errno));
  }
  while (done < size) {
    ssize_t n = write(m->fd, content + done, (size_t)(size - done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += (uint64_t)n;
  }
  int32_t rc = done == size ? tsp_bind(m, path) : tsp_fail(TSM_ERROR_FILE, "no place for the model's code: %s", strerror(errno));
  if (is_named) unlink(path);
  return rc; /* the descriptor stays open with the library: debuggers read it */
}

TSP_FN int32_t tsp_create(torchsmith_model *m, const torchsmith_options *o, const char *weights, uint64_t offset, uint64_t size) {
  tsm_config c;
  memset(&c, 0, sizeof c);
  c.size = sizeof c;
  c.threads = o->threads;
  c.allocate = o->allocate;
  c.release = o->release;
  c.context = o->context;
  c.device = o->device;
  c.weights_path = weights;
  c.weights_offset = offset;
  c.weights_size = size;
  int32_t rc = m->create(&c, &m->model);
  return rc ? tsp_fail(rc, "%s", m->last_error()) : TSM_OK;
}

/* ---------------------------------------------------------------- packages */

TSP_FN int tsp_ends(const tsp_member *m, const char *with) {
  size_t n = strlen(with);
  return m->length >= n && !memcmp(m->name + m->length - n, with, n);
}

/* Is the member <root>/<folder>/<model>/<file>, with no further folder? */
TSP_FN int tsp_is_in(const tsp_member *m, const char *folder, const char *model) {
  const char *end = m->name + m->length, *at = (const char *)memchr(m->name, '/', m->length);
  size_t n = strlen(folder), k = strlen(model);
  if (!at || (size_t)(end - ++at) < n + k + 2 || memcmp(at, folder, n) != 0 || at[n] != '/') return 0;
  at += n + 1;
  return !memcmp(at, model, k) && at[k] == '/' && !memchr(at + k + 1, '/', (size_t)(end - at) - k - 1);
}

/* The manifest's format version; every package of ours has it. */
TSP_FN int32_t tsp_check_format(const tsp_file *f, tsp_member *m) {
  unsigned char *text = NULL;
  int32_t rc = tsp_locate(f, m);
  if (!rc) rc = tsp_content(f, m, &text);
  if (rc) return rc;
  const char *at = strstr((const char *)text, "\"format\":");
  long version = at ? strtol(at + 9, NULL, 10) : 0;
  free(text);
  if (version < 1) return tsp_fail(TSM_ERROR_FORMAT, "%s: the manifest names no format", f->path);
  if (version > TORCHSMITH_FORMAT)
    return tsp_fail(TSM_ERROR_VERSION, "%s has package format %ld, made by a newer torchsmith; this program reads up to %d", f->path, version, TORCHSMITH_FORMAT);
  return TSM_OK;
}

TSP_FN int32_t tsp_open_member(torchsmith_model *m, const tsp_file *f, tsp_member *code, const tsp_member *weights, const torchsmith_options *o) {
  unsigned char *content = NULL;
  int32_t rc = tsp_locate(f, code);
  if (!rc) rc = tsp_content(f, code, &content);
  if (!rc) rc = tsp_bind_content(m, content, code->size);
  free(content);
  if (!rc) rc = tsp_create(m, o, weights->length ? f->path : NULL, weights->offset, weights->size);
  if (rc) tsp_unbind(m);
  return rc;
}

TSP_FN int32_t tsp_open_package(torchsmith_model *m, tsp_file *f, const char *model, const torchsmith_options *o) {
  tsp_member x, main, weights, manifest, others[16], own[16];
  char names[256] = "";
  int n_others = 0, n_own = 0, more = 0;
  size_t used = 0;
  uint64_t at = 0;
  memset(&main, 0, sizeof main);
  memset(&weights, 0, sizeof weights);
  memset(&manifest, 0, sizeof manifest);
  int32_t rc = tsp_directory(f);
  if (rc) return rc;
  while ((more = tsp_next(f, &at, &x)) > 0) {
    if (tsp_ends(&x, "/extra/torchsmith.json")) manifest = x;
    else if (tsp_is_in(&x, "data/torchsmith", model) && tsp_ends(&x, ".so") && n_others < 16) others[n_others++] = x;
    else if (tsp_is_in(&x, "data/torchsmith", model) && tsp_ends(&x, ".weights") && n_own < 16) own[n_own++] = x;
    else if (tsp_is_in(&x, "data/aotinductor", model) && tsp_ends(&x, ".wrapper.so")) main = x;
    else if (tsp_is_in(&x, "data/aotinductor", model) && tsp_ends(&x, ".weights")) weights = x;
    else if (tsp_ends(&x, ".wrapper.so") && used + x.length + 2 < sizeof names) { /* for the message: <root>/data/aotinductor/NAME/file */
      const char *a = (const char *)memchr(x.name, '/', x.length), *b = x.name + x.length;
      while (b > x.name && *--b != '/') {}
      if (a && b > a + 18) used += (size_t)snprintf(names + used, sizeof names - used, " %.*s", (int)(b - a - 18), a + 18);
    }
  }
  if (more < 0) return TSM_ERROR_FORMAT;
  if (!manifest.length) return tsp_fail(TSM_ERROR_FORMAT, "%s is no package of torchsmith: it has no extra/torchsmith.json", f->path);
  if ((rc = tsp_check_format(f, &manifest)) != 0) return rc;
  if (!main.length) return tsp_fail(TSM_ERROR_NAME, "%s has no model named %s; it has:%s", f->path, model, used ? names : " none");
  if (weights.length && (rc = tsp_locate(f, &weights)) != 0) return rc;
  if (weights.length && o->verify && (rc = tsp_verify(f, weights.offset, weights.size, weights.crc)) != 0) return rc;
  for (int i = 0; i < n_others; i++) { /* best first; one that this processor cannot run is passed over */
    const tsp_member *w = &weights;
    for (int j = 0; j < n_own; j++) { /* packed for this processor: n.cpu.weights beside n.cpu.so */
      size_t n = others[i].length - 3;
      if (own[j].length != n + 8 || memcmp(own[j].name, others[i].name, n) != 0) continue;
      if ((rc = tsp_locate(f, &own[j])) != 0) return rc;
      if (o->verify && (rc = tsp_verify(f, own[j].offset, own[j].size, own[j].crc)) != 0) return rc;
      w = &own[j];
    }
    rc = tsp_open_member(m, f, &others[i], w, o);
    if (rc != TSM_ERROR_CPU) return rc;
  }
  return tsp_open_member(m, f, &main, &weights, o);
}

/* A bare library: what follows its code says how long it is and what its checksum is. */
TSP_FN int32_t tsp_open_library(torchsmith_model *m, tsp_file *f, const torchsmith_options *o) {
  unsigned char tail[40], *code = NULL;
  char *path = NULL;
  int32_t rc = f->size >= sizeof tail ? tsp_read(f, f->size - sizeof tail, tail, sizeof tail) : tsp_fail(TSM_ERROR_FORMAT, "%s is truncated", f->path);
  if (rc) return rc;
  if (memcmp(tail + 32, "TSMODEL1", 8) != 0) return tsp_fail(TSM_ERROR_FORMAT, "%s is truncated, or no model library of torchsmith", f->path);
  tsp_member m_code;
  memset(&m_code, 0, sizeof m_code);
  m_code.name = "its code";
  m_code.length = 8;
  m_code.size = tsp_number(tail, 8);
  m_code.crc = (uint32_t)tsp_number(tail + 24, 4);
  if (m_code.size > f->size) return tsp_fail(TSM_ERROR_FORMAT, "%s is truncated", f->path);
  if ((rc = tsp_content(f, &m_code, &code)) != 0) return rc;
  free(code);
  path = (char *)malloc(strlen(f->path) + sizeof ".weights" + 3);
  if (!path) return tsp_fail(TSM_ERROR_MEMORY, "out of memory");
  if (o->verify && tsp_number(tail + 16, 8)) {
    rc = tsp_verify_weights(f, tsp_number(tail + 8, 8));
  } else if (o->verify) { /* in a file beside the library, if it has any */
    size_t n = strlen(f->path);
    tsp_file beside = *f;
    sprintf(path, "%.*s.weights", (int)(n > 3 && !strcmp(f->path + n - 3, ".so") ? n - 3 : n), f->path);
    beside.path = path;
    beside.fd = open(path, O_RDONLY | O_CLOEXEC);
    off_t size = beside.fd < 0 ? -1 : lseek(beside.fd, 0, SEEK_END);
    beside.size = size > 0 ? (uint64_t)size : 0;
    if (size >= 0) rc = tsp_verify_weights(&beside, 0);
    if (beside.fd >= 0) close(beside.fd);
  }
  if (rc) {
    free(path);
    return rc;
  }
  sprintf(path, "%s%s", strchr(f->path, '/') ? "" : "./", f->path); /* without a slash dlopen would search its own folders */
  rc = tsp_bind(m, path);
  if (!rc) rc = tsp_create(m, o, NULL, 0, 0);
  free(path);
  return rc;
}

TSP_FN void torchsmith_free(torchsmith_model *m) {
  if (!m) return;
  if (m->model) m->destroy(m->model);
  tsp_unbind(m);
  free(m);
}

/* path: a package or a model library. model: the name inside the package; NULL: "model". options: NULL for none. */
TSP_FN int32_t torchsmith_load(const char *path, const char *model, const torchsmith_options *options, torchsmith_model **out) {
  torchsmith_options mine;
  tsp_file *f;
  unsigned char magic[4] = {0, 0, 0, 0};
  if (!path || !out) return tsp_fail(TSM_ERROR_ARGUMENT, "torchsmith_load: an argument is NULL");
  *out = NULL;
  tsp_text()[0] = 0;
  memset(&mine, 0, sizeof mine);
  if (options) memcpy(&mine, options, options->size < sizeof mine ? options->size : sizeof mine);
  torchsmith_model *m = (torchsmith_model *)calloc(1, sizeof *m);
  f = (tsp_file *)calloc(1, sizeof *f);
  if (!m || !f) {
    free(m);
    free(f);
    return tsp_fail(TSM_ERROR_MEMORY, "out of memory");
  }
  m->fd = -1;
  f->path = path;
  f->fd = open(path, O_RDONLY | O_CLOEXEC);
  int32_t rc = TSM_OK;
  if (f->fd < 0) {
    rc = tsp_fail(TSM_ERROR_FILE, "%s: %s", path, strerror(errno));
  } else {
    off_t size = lseek(f->fd, 0, SEEK_END);
    f->size = size > 0 ? (uint64_t)size : 0;
    tsp_crc_init(&f->crc);
    if (f->size < 4) rc = tsp_fail(TSM_ERROR_FORMAT, "%s is truncated, or neither a package nor a model library", path);
    else rc = tsp_read(f, 0, magic, 4);
    if (!rc) rc = memcmp(magic, "\177ELF", 4) == 0 ? tsp_open_library(m, f, &mine) : tsp_open_package(m, f, model ? model : "model", &mine);
    close(f->fd);
  }
  free(f->directory);
  free(f);
  if (rc) torchsmith_free(m);
  else *out = m;
  return rc;
}

TSP_FN int32_t torchsmith_run(torchsmith_model *m, const tsm_tensor *inputs, size_t n_inputs, tsm_tensor *outputs, size_t n_outputs) {
  return m->run(m->model, inputs, n_inputs, outputs, n_outputs);
}
/* The same on a CUstream; see tsm_run_on. */
TSP_FN int32_t torchsmith_run_on(torchsmith_model *m, const tsm_tensor *inputs, size_t n_inputs, tsm_tensor *outputs, size_t n_outputs, void *stream) {
  return m->run_on ? m->run_on(m->model, inputs, n_inputs, outputs, n_outputs, stream) : tsp_fail(TSM_ERROR_VERSION, "the model was made before there were streams");
}
/* Text of the model's last error in this thread. */
TSP_FN const char *torchsmith_model_error(const torchsmith_model *m) { return m->last_error(); }
TSP_FN void torchsmith_release(const torchsmith_model *m, tsm_tensor *output) { m->release(output); }
TSP_FN size_t torchsmith_input_count(const torchsmith_model *m) { return m->input_count(m->model); }
TSP_FN size_t torchsmith_output_count(const torchsmith_model *m) { return m->output_count(m->model); }
TSP_FN size_t torchsmith_constant_count(const torchsmith_model *m) { return m->constant_count(m->model); }
TSP_FN int32_t torchsmith_input(const torchsmith_model *m, size_t i, tsm_tensor_info *out) { return m->input(m->model, i, out); }
TSP_FN int32_t torchsmith_output(const torchsmith_model *m, size_t i, tsm_tensor_info *out) { return m->output(m->model, i, out); }
TSP_FN int32_t torchsmith_constant(const torchsmith_model *m, size_t i, tsm_constant_info *out) { return m->constant(m->model, i, out); }
TSP_FN const char *torchsmith_info(const torchsmith_model *m) { return m->info(m->model); }
TSP_FN int32_t torchsmith_load_constants(torchsmith_model *m, const char *const *names, const tsm_tensor *values, size_t n) {
  return m->load_constants(m->model, names, values, n);
}

#ifdef __cplusplus
}
#endif
#endif
