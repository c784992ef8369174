/* Workspaces: a call takes one block and gives it back. Blocks stay on a bounded list, because fresh pages cost 0.5 ms a MB.
 *
 * The list is shared by all graphs of the process, so that its size follows the largest graphs that run at one time, not the
 * number of graphs. A block carries its size in a 64-byte header before the address handed out. */
#include "workspace.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define KEPT 16
#define WINDOW 512 /* calls after which blocks much larger than any of them needed are freed */
#define HUGE_PAGE ((size_t)2 << 20)

typedef struct Block {
  int64_t size; /* usable bytes */
  size_t mapped; /* bytes of the mapping; 0: from aligned_alloc */
  char rest[48];
} Block;
_Static_assert(sizeof(Block) == 64, "a block header keeps the alignment");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *kept[KEPT];
static int n_kept;
static int64_t n_fresh, bytes_live;
static int64_t n_taken, largest; /* of the current window */

static void drop(Block *b) {
  __atomic_fetch_sub(&bytes_live, b->size, __ATOMIC_RELAXED);
  if (b->mapped) munmap((void *)b, b->mapped);
  else free(b);
}

__attribute__((cold)) static Block *fresh(int64_t bytes) {
  size_t total = ((size_t)bytes + sizeof(Block) + 4095) & ~(size_t)4095;
  Block *b;
  size_t mapped = 0;
  if (total >= HUGE_PAGE) {
    total = (total + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    char *raw = mmap(NULL, total + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    char *at = (char *)(((uintptr_t)raw + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    if (at > raw) munmap(raw, (size_t)(at - raw));
    if (raw + HUGE_PAGE > at) munmap(at + total, (size_t)(raw + HUGE_PAGE - at));
    madvise(at, total, MADV_HUGEPAGE);
    b = (Block *)at;
    mapped = total;
  } else {
    b = aligned_alloc(4096, total);
    if (!b) return NULL;
  }
  b->size = (int64_t)(total - sizeof(Block));
  b->mapped = mapped;
  __atomic_fetch_add(&n_fresh, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&bytes_live, b->size, __ATOMIC_RELAXED);
  return b;
}

void *workspace_take(int64_t bytes) {
  Block *found = NULL, *old = NULL;
  if (bytes < 0 || bytes > ((int64_t)1 << 46)) return NULL;
  pthread_mutex_lock(&lock);
  if (bytes > largest) largest = bytes;
  int best = -1;
  for (int i = n_kept - 1; i >= 0; i--) /* the smallest that fits; the most recent among equals */
    if (kept[i]->size >= bytes && (best < 0 || kept[i]->size < kept[best]->size)) best = i;
  if (best >= 0) {
    found = kept[best];
    kept[best] = kept[--n_kept];
  } else if (n_kept) { /* none fits: grow one instead of keeping both */
    best = 0;
    for (int i = 1; i < n_kept; i++)
      if (kept[i]->size > kept[best]->size) best = i;
    old = kept[best];
    kept[best] = kept[--n_kept];
  }
  pthread_mutex_unlock(&lock);
  if (old) drop(old);
  if (!found) found = fresh(bytes);
  return found ? (void *)(found + 1) : NULL;
}

void workspace_give(void *block) {
  Block *b = (Block *)block - 1, *out = NULL, *old[KEPT];
  int n_old = 0;
  pthread_mutex_lock(&lock);
  if (++n_taken >= WINDOW) { /* a call with a large batch, long ago, must not hold its memory for ever */
    int64_t limit = 4 * largest + (int64_t)HUGE_PAGE;
    for (int i = n_kept - 1; i >= 0; i--)
      if (kept[i]->size > limit) {
        old[n_old++] = kept[i];
        kept[i] = kept[--n_kept];
      }
    if (b->size > limit) out = b;
    n_taken = largest = 0;
  }
  if (!out && n_kept < KEPT) {
    kept[n_kept++] = b;
  } else if (!out) { /* full: the smallest goes */
    int least = 0;
    for (int i = 1; i < n_kept; i++)
      if (kept[i]->size < kept[least]->size) least = i;
    if (kept[least]->size < b->size) {
      out = kept[least];
      kept[least] = b;
    } else {
      out = b;
    }
  }
  pthread_mutex_unlock(&lock);
  if (out) drop(out);
  for (int i = 0; i < n_old; i++) drop(old[i]);
}

void workspace_trim(void) {
  Block *out[KEPT];
  pthread_mutex_lock(&lock);
  int n = n_kept;
  memcpy(out, kept, sizeof(Block *) * (size_t)n);
  n_kept = 0;
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < n; i++) drop(out[i]);
}

void workspace_stats(int64_t *fresh_blocks, int64_t *bytes, int *idle) {
  *fresh_blocks = n_fresh;
  *bytes = bytes_live;
  *idle = n_kept;
}

void *block_new(int64_t bytes) {
  Block *b = fresh(bytes);
  return b ? (void *)(b + 1) : NULL;
}

void block_free(void *block) { drop((Block *)block - 1); }

/* A child of fork must not find the list locked by a thread that it does not have. */
static void hold(void) { pthread_mutex_lock(&lock); }
static void let_go(void) { pthread_mutex_unlock(&lock); }
void workspace_init(void) { pthread_atfork(hold, let_go, let_go); }
