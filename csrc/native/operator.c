/* Operators called through libtorch: by their C shim function, or by the dispatcher's stable C interface (libtorch.h has the letters).
 *
 * Why one C type can call every shim function: in the calling conventions of x86-64 and AArch64 on Linux, integers and pointers travel
 * in one sequence (registers, then stack slots of eight bytes), doubles in another one (eight registers, more than any shim has). So
 * f(integers..., doubles...) puts every argument where f(mixed...) reads it, and surplus arguments are harmless. */
#include <stdio.h>
#include <string.h>

#include "libtorch.h"

#define MAX_WORDS 48
#define MAX_DOUBLES 8
#define SPARE 8 /* arguments that a later libtorch may have appended: they read as None, 0 or false */

bool operator_measure(ts_operator *o) {
  int words = 0, doubles = 0;
  o->scratch = 0;
  for (int i = 0; i < o->n_params; i++) {
    *(o->params[i].letter == 'd' ? &doubles : &words) += 1;
    o->scratch += o->params[i].n + 2;
  }
  return words + doubles <= MAX_WORDS && doubles <= MAX_DOUBLES && o->scratch <= 4096;
}

/* ---------------------------------------------------------------- tensors in and out */

void libtorch_error(ts_errors to, const char *what) {
  char text[480];
  const char *why = libtorch.what ? libtorch.what() : NULL;
  snprintf(text, sizeof text, "%s: %s", what, why ? why : "failed");
  to.error(to.self, TS_ERROR_EXTERN, text);
}

/* Where the elements are; NULL for none. For a GPU torch asks the driver whose memory an address is, and that of no elements may be nobody's. */
static void *elements(const ts_spec *spec, const ts_tensor *t) {
  for (int i = 0; i < spec->ndim; i++)
    if (t->sizes[i] == 0) return NULL;
  return t->data;
}

static int32_t tensor_of(ts_errors to, const ts_spec *spec, const ts_tensor *t, Handle *out) {
  return libtorch.from_blob(elements(spec, t), spec->ndim, t->sizes, t->strides, 0, libtorch.dtypes[spec->dtype], to.device, to.index, out);
}

/* The kept tensor for this memory, made anew if it does not fit; NULL when there is none to keep. */
static Handle kept_view(ts_errors to, ts_view *v, const ts_spec *spec, const ts_tensor *t) {
  if (spec->ndim > VIEW_DIMS) return NULL;
  size_t bytes = sizeof(int64_t) * (size_t)spec->ndim;
  bool inference = libtorch.inference();
  if (v->handle && v->data == t->data && v->inference == inference && !memcmp(v->sizes, t->sizes, bytes) &&
      !memcmp(v->strides, t->strides, bytes))
    return v->handle;
  if (v->handle) libtorch.delete_tensor(v->handle);
  v->handle = NULL;
  if (tensor_of(to, spec, t, &v->handle)) {
    v->handle = NULL;
    return NULL;
  }
  v->data = t->data;
  v->inference = inference;
  memcpy(v->sizes, t->sizes, bytes);
  memcpy(v->strides, t->strides, bytes);
  return v->handle;
}

int handles_open(ts_errors to, ts_view *views, const ts_spec *specs, int n, const ts_tensor *given, Handle *out, bool *mine) {
  for (int i = 0; i < n; i++) {
    const ts_tensor *t = &given[i];
    mine[i] = t->handle == NULL;
    out[i] = t->handle;
    if (!mine[i]) continue;
    if (specs[i].ndim < 0) {
      mine[i] = false; /* a result that nobody wants */
      continue;
    }
    if (views && (out[i] = kept_view(to, &views[i], &specs[i], t))) {
      mine[i] = false;
      continue;
    }
    if (tensor_of(to, &specs[i], t, &out[i])) {
      libtorch_error(to, "from_blob");
      for (int k = 0; k < i; k++)
        if (mine[k]) libtorch.delete_tensor(out[k]);
      return -1;
    }
  }
  return 0;
}

void handles_close(int n, Handle *handles, const bool *mine) {
  for (int i = 0; i < n; i++)
    if (mine[i]) libtorch.delete_tensor(handles[i]);
}

int result_accept(ts_errors to, const ts_spec *spec, Handle h, ts_tensor *out) {
  int64_t ndim = 0;
  int32_t dtype = 0;
  if (spec->ndim < 0) { /* not wanted */
    libtorch.delete_tensor(h);
    return 0;
  }
  if (libtorch.get_dim(h, &ndim) || ndim != spec->ndim || libtorch.get_dtype(h, &dtype) || dtype != libtorch.dtypes[spec->dtype] ||
      describe_tensor(h, out, true, spec->on_host ? libtorch.cpu : to.device)) {
    libtorch.delete_tensor(h);
    out->handle = NULL;
    to.error(to.self, TS_ERROR_EXTERN, "an external operator returned another dtype or rank than was planned");
    return -1;
  }
  return 0;
}

/* Do these strides address elements alike? Dimensions of one element do not count. */
static bool is_alike(int64_t n, const int64_t *sizes, const int64_t *a, const int64_t *b) {
  for (int64_t i = 0; i < n; i++)
    if (sizes[i] != 1 && a[i] != b[i]) return false;
  return true;
}

int32_t operator_conform(ts_errors to, ts_tensor *given, int32_t ndim, const int64_t *sizes, const int64_t *strides) {
  int64_t n = 0, *have = NULL, *steps = NULL, offset = 0;
  int32_t dtype = 0;
  Handle fresh = NULL;
  if (libtorch.get_dim(given->handle, &n) || n != ndim || libtorch.get_sizes(given->handle, &have) ||
      memcmp(have, sizes, sizeof(int64_t) * (size_t)ndim) != 0) {
    to.error(to.self, TS_ERROR_EXTERN, "an external operator returned another shape than was planned");
    return TS_ERROR_EXTERN;
  }
  if (libtorch.get_strides(given->handle, &steps) == 0 && is_alike(n, sizes, steps, strides)) {
    if (libtorch.get_storage_offset(given->handle, &offset) || libtorch.reinterpret(given->handle, ndim, sizes, strides, offset, &fresh)) {
      libtorch_error(to, "reinterpret_tensor");
      return TS_ERROR_EXTERN;
    }
    libtorch.delete_tensor(given->handle);
    return describe_tensor(fresh, given, true, to.device) ? TS_ERROR_EXTERN : 0;
  }
  if (libtorch.get_dtype(given->handle, &dtype) || libtorch.empty_strided(ndim, sizes, strides, dtype, to.device, to.index, &fresh)) {
    libtorch_error(to, "empty_strided");
    return TS_ERROR_MEMORY;
  }
  if (libtorch.copy_(fresh, given->handle, 0)) {
    libtorch_error(to, "copy_");
    libtorch.delete_tensor(fresh);
    return TS_ERROR_EXTERN;
  }
  libtorch.delete_tensor(given->handle);
  return describe_tensor(fresh, given, true, to.device) ? TS_ERROR_EXTERN : 0;
}

void operator_release(ts_tensor *given) {
  if (given->handle) libtorch.delete_tensor(given->handle);
  given->handle = NULL;
}

/* ---------------------------------------------------------------- shim functions */

#define W4(i) w[i], w[i + 1], w[i + 2], w[i + 3]
#define I4 int64_t, int64_t, int64_t, int64_t
#define D8 double, double, double, double, double, double, double, double
typedef int32_t (*Few)(I4, I4, I4, D8);
typedef int32_t (*Many)(I4, I4, I4, I4, I4, I4, I4, I4, I4, I4, I4, I4, D8);

static int32_t invoke(void *fn, int words, const int64_t *w, const double *d) {
  if (words <= 12) return ((Few)fn)(W4(0), W4(4), W4(8), d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]);
  return ((Many)fn)(W4(0), W4(4), W4(8), W4(12), W4(16), W4(20), W4(24), W4(28), W4(32), W4(36), W4(40), W4(44), d[0], d[1], d[2], d[3],
                    d[4], d[5], d[6], d[7]);
}

static int64_t number(const ts_number *n, const int64_t *numbers, bool real) {
  if (n->slot < 0) return n->value;
  int64_t v = numbers[n->slot];
  if (real && n->value != SLOT_FLOAT) { /* an integer where a double is wanted */
    double d = (double)v;
    memcpy(&v, &d, sizeof d);
  }
  return v;
}

static int32_t call_shim(const ts_operator *o, Handle *handles, Handle *results, const int64_t *numbers) {
  int words = 0, doubles = 0;
  int64_t scratch[o->scratch + 1], w[MAX_WORDS] = {0}, *at = scratch;
  double d[MAX_DOUBLES] = {0};
  for (int i = 0; i < o->n_params; i++) {
    const ts_param *p = &o->params[i];
    const ts_number *n = p->numbers;
    int64_t *here = at;
    at += p->n + 2;
    switch (p->letter) {
      case 'h': w[words++] = (int64_t)handles[n->value]; break;
      case 'H': w[words++] = (int64_t)&handles[n->value]; break;
      case 'L':
        for (int k = 0; k < p->n; k++) here[k] = (int64_t)handles[n[k].value];
        w[words++] = (int64_t)here;
        break;
      case 'M':
        for (int k = 0; k < p->n; k++) here[k] = n[k].value < 0 ? 0 : (int64_t)&handles[n[k].value];
        w[words++] = (int64_t)here;
        break;
      case 'i': w[words++] = number(n, numbers, false); break;
      case 'd':
        here[0] = number(n, numbers, true);
        memcpy(&d[doubles++], here, sizeof(double));
        break;
      case 'I':
      case 'D':
        here[0] = number(n, numbers, p->letter == 'D');
        w[words++] = (int64_t)here;
        break;
      case 'B':
        ((int32_t *)here)[0] = (int32_t)number(n, numbers, false);
        w[words++] = (int64_t)here;
        break;
      case 'a':
      case 'A':
        for (int k = 0; k < p->n; k++) here[k] = number(&n[k], numbers, false);
        here[p->n] = (int64_t)here;
        w[words++] = p->letter == 'a' ? (int64_t)here : (int64_t)&here[p->n];
        break;
      case 'b':
        for (int k = 0; k < p->n; k++) ((int32_t *)here)[k] = (int32_t)number(&n[k], numbers, false);
        w[words++] = (int64_t)here;
        break;
      case 's': w[words++] = (int64_t)p->text; break;
      case 'S':
        here[0] = (int64_t)p->text;
        w[words++] = (int64_t)here;
        break;
      case 'r': w[words++] = (int64_t)&results[n->value]; break;
      case 'o': w[words++] = (int64_t)results[n->value]; break;
      default: w[words++] = 0;
    }
  }
  return invoke(o->fn, words, w, d);
}

/* ---------------------------------------------------------------- the dispatcher */

/* A stable value: numbers by their bits, everything else an object that the callee takes over. */
static int own(Handle h, uint64_t *out) {
  Handle mine = NULL;
  int bad = libtorch.new_handle(h, &mine);
  *out = (uint64_t)mine;
  return bad;
}

static int some(uint64_t *value) {
  uint64_t *box = NULL;
  if (libtorch.value_new ? libtorch.value_new(&box) : !(box = libtorch.allocate(sizeof *box))) return -1;
  *box = *value;
  *value = (uint64_t)box;
  return 0;
}

static int list(const ts_param *p, Handle *handles, const int64_t *numbers, uint64_t *out) {
  void *made = NULL;
  if (libtorch.list_new((size_t)p->n, &made)) return -1;
  *out = (uint64_t)made;
  for (int k = 0; k < p->n; k++) {
    uint64_t item = 0;
    const ts_number *n = &p->numbers[k];
    bool is_none = p->letter == 'M' && n->value < 0;
    if (!strchr("LM", p->letter)) item = (uint64_t)number(n, numbers, strchr("fF", p->letter) != NULL);
    else if (!is_none && (own(handles[n->value], &item) || (p->letter == 'M' && some(&item)))) return -1;
    if (libtorch.list_push(made, item)) return -1;
  }
  return 0;
}

static int argument(const ts_param *p, Handle *handles, const int64_t *numbers, uint64_t *out) {
  int bad = 0;
  switch (p->letter) {
    case 'h':
    case 'H': bad = own(handles[p->numbers->value], out); break;
    case 'L':
    case 'M':
    case 'a':
    case 'A':
    case 'f':
    case 'F': bad = list(p, handles, numbers, out); break;
    case 'i':
    case 'I': *out = (uint64_t)number(p->numbers, numbers, false); break;
    case 'd':
    case 'D': *out = (uint64_t)number(p->numbers, numbers, true); break;
    case 's':
    case 'S': bad = libtorch.string_new(p->text, strlen(p->text), (void **)out); break;
    default: *out = 0;
  }
  return bad || (strchr("HIDASF", p->letter) && some(out)) ? -1 : 0;
}

static int32_t call_dispatcher(const ts_operator *o, Handle *handles, Handle *results, const int64_t *numbers) {
  int room = (o->n_params > o->n_outs ? o->n_params : o->n_outs) + SPARE;
  uint64_t stack[room];
  memset(stack, 0, sizeof stack);
  for (int i = 0; i < o->n_params; i++)
    if (argument(&o->params[i], handles, numbers, &stack[i])) return 1;
  int32_t rc = libtorch.call ? libtorch.call(o->name, o->overload, stack, o->version) : libtorch.old_call(o->name, o->overload, stack);
  for (int i = 0; !rc && i < o->n_outs; i++) results[i] = (Handle)stack[i];
  return rc;
}

/* ---------------------------------------------------------------- both */

/* Results of the dispatcher, written into the memory that was planned for them. */
static int32_t copy_out(int n, const Handle *planned, Handle *results) {
  int32_t rc = 0;
  for (int i = 0; i < n; i++) {
    if (results[i] && planned[i]) rc |= libtorch.copy_(planned[i], results[i], 0);
    if (results[i]) libtorch.delete_tensor(results[i]);
  }
  return rc;
}

int32_t operator_run(ts_errors to, const ts_operator *o, ts_view *views, const ts_tensor *args, const int64_t *numbers, ts_tensor *outs) {
  int nt = o->n_tensors, no = o->n_outs;
  Handle handles[nt + 1], planned[no + 1], results[no + 1];
  bool mine[nt + 1], ours[no + 1];
  memset(planned, 0, sizeof planned);
  memset(results, 0, sizeof results);
  if (!libtorch.inference) views = NULL;
  if (handles_open(to, views, o->tensors, nt, args, handles, mine)) return TS_ERROR_EXTERN;
  if (o->is_planned && handles_open(to, views ? views + nt : NULL, o->outs, no, outs, planned, ours)) {
    handles_close(nt, handles, mine);
    return TS_ERROR_EXTERN;
  }
  int32_t rc = o->fn ? call_shim(o, handles, o->is_planned ? planned : results, numbers) : call_dispatcher(o, handles, results, numbers);
  if (!rc && o->is_planned && !o->fn) rc = copy_out(no, planned, results);
  if (rc) libtorch_error(to, o->said);
  handles_close(nt, handles, mine);
  if (o->is_planned) handles_close(no, planned, ours);
  if (rc) return TS_ERROR_EXTERN;
  for (int i = 0; !o->is_planned && i < no; i++) {
    if (!results[i] && o->outs[i].ndim < 0) continue;
    if (rc || !results[i] || result_accept(to, &o->outs[i], results[i], &outs[i])) {
      if (rc && results[i]) libtorch.delete_tensor(results[i]);
      rc = TS_ERROR_EXTERN;
    }
  }
  if (rc)
    for (int i = 0; i < no; i++) operator_release(&outs[i]);
  return rc;
}
