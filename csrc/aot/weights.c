/* Where a model's weights are: the file its user names, the model library itself, or a file beside it. Mapped, never read. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "model.h"

static int32_t check_header(const char *data, const char *path) {
  const ts_model_desc *d = &torchsmith_model;
  const ts_weights_header *h = (const ts_weights_header *)(const void *)data;
  if (memcmp(h->magic, TS_WEIGHTS_MAGIC, sizeof h->magic) != 0) return ts_fail(TSM_ERROR_FORMAT, "%s holds no weights", path);
  if (h->version != 1) return ts_fail(TSM_ERROR_VERSION, "%s: weights of format %u, which a newer torchsmith made", path, h->version);
  if (memcmp(h->id, d->weights_id, sizeof h->id) != 0 || h->size != (uint64_t)d->weights_size)
    return ts_fail(TSM_ERROR_WEIGHTS, "%s holds the weights of another model", path);
  return TSM_OK;
}

/* Map [offset, offset + size) of an open file and see that it holds this model's weights. */
static int32_t map_range(tsm_model *m, int fd, const char *path, uint64_t offset, uint64_t size) {
  const ts_model_desc *d = &torchsmith_model;
  off_t end = lseek(fd, 0, SEEK_END); /* fstat would need a new libc */
  if (end < 0) return ts_fail(TSM_ERROR_FILE, "%s: %s", path, strerror(errno));
  uint64_t have = (uint64_t)end;
  if (offset > have || (size && size > have - offset)) return ts_fail(TSM_ERROR_FORMAT, "%s is truncated", path);
  if (!size) size = have - offset;
  if (size < (uint64_t)d->weights_size) return ts_fail(TSM_ERROR_FORMAT, "%s is truncated: %llu bytes of weights are needed", path, (unsigned long long)d->weights_size);
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), start = offset & ~(page - 1);
  size_t length = (size_t)(offset - start + (uint64_t)d->weights_size);
  char *base = mmap(NULL, length, PROT_READ, MAP_PRIVATE, fd, (off_t)start);
  if (base == MAP_FAILED) return ts_fail(TSM_ERROR_FILE, "%s cannot be mapped: %s", path, strerror(errno));
  m->map_base = base;
  m->map_size = length;
  m->map = base + (offset - start);
  return check_header(m->map, path);
}

static int32_t map_path(tsm_model *m, const char *path, uint64_t offset, uint64_t size) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ts_fail(errno == ENOENT ? TSM_ERROR_WEIGHTS : TSM_ERROR_FILE, "weights %s: %s", path, strerror(errno));
  int32_t rc = map_range(m, fd, path, offset, size);
  close(fd);
  return rc;
}

/* The library's own file: weights at its end? -1: it carries none. */
static int32_t map_own(tsm_model *m, const char *path) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  ts_tail tail;
  off_t end = lseek(fd, 0, SEEK_END);
  int32_t rc = -1;
  if (end > (off_t)sizeof tail && pread(fd, &tail, sizeof tail, end - (off_t)sizeof tail) == (ssize_t)sizeof tail &&
      !memcmp(tail.magic, TS_TAIL_MAGIC, sizeof tail.magic) && tail.weights_size)
    rc = map_range(m, fd, path, tail.weights_offset, tail.weights_size);
  close(fd);
  return rc;
}

int32_t ts_map_weights(tsm_model *m, const tsm_config *config) {
  if (config && config->weights_data) {
    if ((uintptr_t)config->weights_data % 64) return ts_fail(TSM_ERROR_ALIGNMENT, "weights in memory must start at a multiple of 64");
    if (config->weights_size < (uint64_t)torchsmith_model.weights_size) return ts_fail(TSM_ERROR_FORMAT, "the weights in memory are truncated");
    m->map = config->weights_data;
    return check_header(m->map, "the memory given");
  }
  if (config && config->weights_path) return map_path(m, config->weights_path, config->weights_offset, config->weights_size);
#ifdef TS_LINKED
  return ts_fail(TSM_ERROR_WEIGHTS, "a model that is linked into a program must be told where its weights are: weights_path or weights_data");
#else
  Dl_info self;
  if (!dladdr(&torchsmith_model, &self) || !self.dli_fname) return ts_fail(TSM_ERROR_WEIGHTS, "the model does not know where its weights are: name their file");
  int32_t rc = map_own(m, self.dli_fname);
  if (rc >= 0) return rc;
  size_t n = strlen(self.dli_fname);
  char *beside = malloc(n + sizeof ".weights");
  if (!beside) return ts_fail(TSM_ERROR_MEMORY, "out of memory");
  memcpy(beside, self.dli_fname, n + 1);
  if (n > 3 && !strcmp(beside + n - 3, ".so")) n -= 3;
  strcpy(beside + n, ".weights");
  rc = map_path(m, beside, 0, 0);
  free(beside);
  return rc;
#endif
}
