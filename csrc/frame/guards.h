/* The inside of a guard check, shared by guards.c and entry.c. */
#ifndef TS_GUARDS_H
#define TS_GUARDS_H
#include "frame.h"

#define OP_KIND(op) ((int)((op)->a & 7))
#define OP_POINTER(op) ((void *)((op)->a & ~(uintptr_t)7))
enum { OP_DICT, OP_OBJECT_DICT, OP_TYPE, OP_TYPE_VERSION = 4, OP_TENSOR, OP_PIN, OP_GUARD };
#define OP_IS_WORD(op) (!((op)->a & 4))
enum { ST_NONE, ST_STATIC, ST_DYNAMIC, ST_PINNED };
enum { SH_CONST, SH_NODE, SH_NOT, SH_NEG, SH_ABS, SH_ADD, SH_SUB, SH_MUL, SH_FLOORDIV, SH_MOD, SH_TRUNCDIV, SH_MIN, SH_MAX, SH_EQ, SH_NE, SH_LT,
       SH_LE, SH_GT, SH_GE, SH_AND, SH_OR, SH_DIV };

/* Two words an op, because a large model has thousands: the kind stands in the low bits of `a`.
 *   one word in memory must have a value:  DICT (version word, version)  OBJECT_DICT (place of the __dict__ pointer, dict)
 *     TYPE (place of the type pointer, type)
 *   others:  TYPE_VERSION (type, tag)
 *   TENSOR (object, TensorGuard)  PIN (object, weak reference)  GUARD (-, -) */
typedef struct { uintptr_t a, b; } RecordOp;
struct Record {
  int users, n_ops, cap_ops, n_slots;
  unsigned good; /* calls it served */
  RecordOp *ops;
  int *about;        /* per op: the node it speaks of; for TENSOR and GUARD the guard's number */
  int *slot;         /* per node: place in a call's values, or -1: static */
  PyObject **values; /* per static node: the object, borrowed from whoever the witnesses watch */
};

int ts_guard_read(Entry *e, GuardOp *g, PyObject *item); /* item: (kind's name, node, value, numbers); 0, or -1 with an exception */

#define TS_SMALL 32
typedef struct {
  Entry *e;
  Frame *f;
  Record *fast, *build;
  PyObject **values;
  uint8_t *status;
  uintptr_t *seen;
  int n_values, n_seen, cap_seen, build_failed;
  PyObject *small[TS_SMALL];
} Check;

/* Checks all guards: 1, 0, -1. In every case call ts_check_end; in between ts_check_value gives borrowed values. */
int ts_check_begin(Check *c, Entry *e, Frame *f);
PyObject *ts_check_value(Check *c, int node);
void ts_check_end(Check *c);
void ts_record_free(Record *r);
#endif
