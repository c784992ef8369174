/* Workspaces and blocks of memory: used by the host inside Python and by model libraries (libc only). */
#ifndef TORCHSMITH_WORKSPACE_H
#define TORCHSMITH_WORKSPACE_H
#include <stdint.h>

#pragma GCC visibility push(hidden)
void *workspace_take(int64_t bytes); /* 64-byte aligned; NULL: no memory */
void workspace_give(void *block);
void workspace_trim(void);
void workspace_init(void);
void workspace_stats(int64_t *fresh_blocks, int64_t *bytes, int *idle);
void *block_new(int64_t bytes); /* not on the list */
void block_free(void *block);
#pragma GCC visibility pop
#endif
