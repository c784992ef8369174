/* Calls of operators that only libtorch has, from a model library: libtorch is looked up when a model is made, never linked. */
#include "operators.h"

#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int32_t refuse(const ts_operators *all, const char *why, const char *what) {
  return ts_fail(TSM_ERROR_OPERATOR, "%s%s: the model was compiled with libtorch='allow' and calls %s", why, what, all->said);
}

static int32_t find_all(const ts_operators *all) {
  for (int32_t i = 0; i < all->n; i++) {
    ts_operator *o = &all->rows[i];
    if (!operator_measure(o)) return refuse(all, "too many arguments for ", o->name);
    if (o->symbol && !(o->fn = libtorch_find(o->symbol))) return refuse(all, "the libtorch of this process lacks ", o->symbol);
    if (o->symbol) continue;
    bool is_whole = (libtorch.call || libtorch.old_call) && libtorch.list_new && libtorch.list_push && libtorch.string_new &&
                    (libtorch.value_new || libtorch.allocate);
    if (!is_whole) return refuse(all, "the libtorch of this process lacks the stable dispatcher (2.10) for ", o->name);
  }
  return TSM_OK;
}

static int32_t open(const ts_operators *all) {
  const char *missing = libtorch_connect();
  if (missing) return refuse(all, "libtorch is not loaded in this process (in Python: import torch first)", "");
  pthread_mutex_lock(&lock);
  int32_t rc = find_all(all);
  pthread_mutex_unlock(&lock);
  return rc;
}

static void report(void *self, int32_t kind, const char *text) { ts_report_error(self, kind, text); }

/* Where the model's tensors lie, as torch says it. */
static ts_errors errors(void *self) {
  const ts_call *c = self;
  bool is_far = c->far != NULL;
  return (ts_errors){report, self, !strcmp(torchsmith_model.device_type, "cuda") ? libtorch.cuda : libtorch.cpu, is_far ? c->model->device : -1};
}

/* Gradients are off inside, whatever the caller's mode. */
static int32_t call(void *self, int32_t number, const ts_tensor *args, const int64_t *scalars, ts_tensor *outs) {
  bool grad = libtorch.grad_enabled();
  if (grad) libtorch.set_grad(false);
  int32_t rc = operator_run(errors(self), &torchsmith_model.operators->rows[number], NULL, args, scalars, outs);
  if (grad) libtorch.set_grad(true);
  return rc;
}

static int32_t conform(void *self, ts_tensor *given, int32_t ndim, const int64_t *sizes, const int64_t *strides) {
  return operator_conform(errors(self), given, ndim, sizes, strides);
}

static void release(void *self, ts_tensor *given) { operator_release(given); }

static int32_t copy_out(void *self, ts_tensor *given, tsm_tensor *to) {
  Handle mine = NULL;
  int32_t rc = libtorch.from_blob(to->data, to->ndim, to->sizes, to->strides, 0, libtorch.dtypes[to->dtype], errors(self).device, errors(self).index, &mine);
  if (!rc) {
    rc = libtorch.copy_(mine, given->handle, 0);
    libtorch.delete_tensor(mine);
  }
  operator_release(given);
  return rc ? ts_fail(TSM_ERROR_OPERATOR, "libtorch could not copy an output") : TSM_OK;
}

const ts_operator_services TS_OPERATOR_SERVICES = {open, call, conform, release, copy_out};
