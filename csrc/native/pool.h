/* Threads for parallel_for: one pool for the process, plain C, no torch, no Python, no OpenMP.
 *
 * Any thread may call ts_pool_for at any time, also several at once and also inside a kernel (it then runs inline). The split of
 * [0, n) into pieces follows from n, grain and threads alone; which thread takes a piece is decided while running. */
#ifndef TORCHSMITH_POOL_H
#define TORCHSMITH_POOL_H
#include "torchsmith.h"

/* launch->fn over [0, n) on at most `threads` threads, the caller being one of them; returns when all of it is done. Ranges shorter
 * than 2 * grain run inline. Missing helpers are started here; where none can be started the caller does everything. */
void ts_pool_for(const ts_launch *launch, int64_t n, int64_t grain, int32_t threads);
/* Bracket a call that will launch several times: helpers wait longer for its next launch before they sleep. May be omitted. */
void ts_pool_enter(void);
void ts_pool_leave(void);
/* How many processors this process may run on. */
int32_t ts_pool_processors(void);
int32_t ts_pool_helpers(void);
/* End and join all helpers; the next ts_pool_for starts new ones. Nobody may be inside ts_pool_for. For unloading and leak checkers. */
void ts_pool_stop(void);

/* Borrowed threads: where another pool owns the threads (PyTorch's), one parallel region of that pool spans a whole call. Its first
 * thread leads: it runs the call, launches with ts_crew_for and says ts_crew_end; the others help until then. Helpers that come late
 * or not at all cost speed only. */
typedef struct ts_crew ts_crew;
ts_crew *ts_crew_open(void); /* NULL: too many at one time */
void ts_crew_help(ts_crew *crew);
void ts_crew_for(ts_crew *crew, const ts_launch *launch, int64_t n, int64_t grain, int32_t threads);
void ts_crew_end(ts_crew *crew);
void ts_crew_close(ts_crew *crew); /* after the region: nobody is inside */
#endif
