/* Operators of a model that only libtorch has: what a generated description says of them, and what the engine asks of operators.c.
 *
 * Only a description that has some names TS_OPERATOR_SERVICES; without one the linker leaves operators.c and what it calls out. */
#ifndef TORCHSMITH_AOT_OPERATORS_H
#define TORCHSMITH_AOT_OPERATORS_H
#include "aot/model.h"
#include "native/libtorch.h"

typedef struct {
  int32_t (*open)(const ts_operators *all); /* finds libtorch and every function; a tsm_status */
  int32_t (*call)(void *self, int32_t number, const ts_tensor *args, const int64_t *scalars, ts_tensor *outs);
  int32_t (*conform)(void *self, ts_tensor *given, int32_t ndim, const int64_t *sizes, const int64_t *strides);
  void (*release)(void *self, ts_tensor *given);
  int32_t (*copy_out)(void *self, ts_tensor *given, tsm_tensor *to); /* dense or strided memory of the same sizes; releases `given` */
} ts_operator_services;

struct ts_operators {
  int32_t n;
  ts_operator *rows; /* by their number in the graph; `fn` is filled by open */
  const char *said;  /* all of them with the user's lines */
  const ts_operator_services *services;
};

extern TS_HIDDEN const ts_operator_services TS_OPERATOR_SERVICES;
#endif
