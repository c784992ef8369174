"""The description of a model library as C text: inputs with their checks, outputs, constants, what loaders ask for (no torch).

In: Description. Out: one small translation unit that defines `torchsmith_model` (csrc/aot/model.h documents the fields); the engine and
the doors around it are fixed sources.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ir.dtype import DTYPE_ROWS
from ..ir.expr import Const, Expr, Op, Sym
from ..ir.operators import OperatorRow
from ..ir.program import Symbol
from .host import BAD, DIVISIONS, c_name, c_string, size_text
from .host_abi import NUMBERS

PREPARED, READ, WRITTEN = 1, 2, 4  # flags of a constant: what prepare reads, what run reads, what run writes
OUT_KINDS = {"fresh": 0, "same": 1, "input": 2, "view input": 3, "view result": 4, "number": 5, "none": 6}
UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class InputRow:
    """One tensor that the caller gives: sizes and strides as Exprs over the symbols. dtype "": unused, so not checked."""

    name: str
    dtype: str
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    graph_input: int
    written: bool = False


@dataclass(frozen=True, slots=True)
class ConstantRow:
    """One weight or buffer under one of its names; tied ones share graph_input and offset."""

    fqn: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int
    graph_input: int
    flags: int
    type: int
    offset: int = -1


def unique_names(fqns: Sequence[str]) -> list[str]:
    """For each name in the module one of letters, digits and `_`, no two alike: `a.b` and `a_b` become `a_b_1` and `a_b`."""
    plain = ["".join(c if c.isalnum() else "_" for c in f) for f in fqns]
    taken = {p for p, f in zip(plain, fqns, strict=True) if p == f}
    names = []
    for f, p in zip(fqns, plain, strict=True):
        name, n = p, 0
        while name != f and name in taken:
            n += 1
            name = f"{p}_{n}"
        taken.add(name)
        names.append(name)
    return names


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One leaf of what the model returns."""

    kind: str
    dtype: str = "f32"
    ndim: int = -1
    of: int = -1
    at: int = 0
    result: int = -1


@dataclass(frozen=True, slots=True)
class Description:
    """Everything about a model that is not code."""

    name: str
    inputs: tuple[InputRow, ...]
    outputs: tuple[OutputRow, ...]
    constants: tuple[ConstantRow, ...]
    symbols: tuple[Symbol, ...]
    conditions: tuple[tuple[Expr, str], ...]  # (must hold, how to say it)
    in_spec: str
    out_spec: str
    info: str
    cpu: tuple[str, ...]
    weights_id: bytes = bytes(16)
    weights_size: int = 0
    state_offset: int = -1
    labels: dict[str, str] = field(default_factory=dict)  # symbol -> the name the user gave it
    copies: bool = False  # inputs with other strides are copied instead of refused
    operators: tuple[OperatorRow, ...] = ()  # what the graph calls libtorch for, by number
    device: str = "cpu"  # torch's word for the type of device on which tensors lie
    services: str = ""  # of csrc/aot/device.h; "": kernels run on the processor


def emit_model(d: Description) -> str:
    """The whole unit; it includes nothing but csrc/aot/model.h."""
    return _Model(d).text()


PROTOTYPES = (
    "uint32_t {n}_abi_version(void);", "int32_t {n}_create(const tsm_config *config, tsm_model **out);", "void {n}_delete(tsm_model *model);",
    "int32_t {n}_run(tsm_model *model, const tsm_tensor *inputs, size_t n_inputs, tsm_tensor *outputs, size_t n_outputs);",
    "int32_t {n}_run_on(tsm_model *model, const tsm_tensor *inputs, size_t n_inputs, tsm_tensor *outputs, size_t n_outputs, void *stream);",
    "void {n}_release(tsm_tensor *output);", "const char *{n}_last_error(void);", "size_t {n}_input_count(const tsm_model *model);",
    "size_t {n}_output_count(const tsm_model *model);", "size_t {n}_constant_count(const tsm_model *model);",
    "int32_t {n}_input(const tsm_model *model, size_t index, tsm_tensor_info *out);",
    "int32_t {n}_output(const tsm_model *model, size_t index, tsm_tensor_info *out);",
    "int32_t {n}_constant(const tsm_model *model, size_t index, tsm_constant_info *out);", "const char *{n}_info(const tsm_model *model);",
    "int32_t {n}_load_constants(tsm_model *model, const char *const *names, const tsm_tensor *values, size_t count);",
)  # fmt: skip


def emit_header(name: str) -> str:
    """The C header of a model that is linked into a program: the functions of <torchsmith/model.h> under the model's own name."""
    rows = "\n".join(p.format(n=name) for p in PROTOTYPES)
    guard = f"TORCHSMITH_MODEL_{name.upper()}_H"
    return (
        f"/* The model {name}: what each function does is said in torchsmith/model.h. Weights: config.weights_path or weights_data. */\n"
        f"#ifndef {guard}\n#define {guard}\n#ifndef TSM_NO_PROTOTYPES\n#define TSM_NO_PROTOTYPES\n#endif\n#include <torchsmith/model.h>\n"
        f'#ifdef __cplusplus\nextern "C" {{\n#endif\n{rows}\n#ifdef __cplusplus\n}}\n#endif\n#endif\n'
    )


def output_rows(results: Sequence[dict[str, Any]], leaves: Sequence[int | None], dtypes: Sequence[tuple[str, int]]) -> tuple[OutputRow, ...]:
    """Rows for the returned leaves: a result's number (as manifest.results describes it), or None for nothing.

    `dtypes` has (dtype, rank) per result.
    """
    rows: list[OutputRow] = []
    first: dict[int, int] = {}  # result -> leaf that owns it
    for leaf in leaves:
        if leaf is None:
            rows.append(OutputRow("none"))
            continue
        row, (dtype, ndim) = results[leaf], dtypes[leaf]
        kind, at = row["kind"], row.get("at", 0)
        if kind == "fresh":
            owned = leaf in first
            rows.append(OutputRow("same", dtype, ndim, of=leaf) if owned else OutputRow("fresh", dtype, ndim, result=leaf))
            first.setdefault(leaf, len(rows) - 1)
        elif kind == "view":
            where, of = row["of"]
            rows.append(OutputRow(f"view {where}", row["dtype"], row["ndim"], of, at))
        elif kind == "number":
            rows.append(OutputRow("number", {"index": "i64", "i32": "i64", "f32": "f64"}.get(row["dtype"], row["dtype"]), 0, at=at))
        else:
            rows.append(OutputRow(kind, dtype, ndim, row["of"]))
    return tuple(rows)


def operator_texts(rows: Sequence[OperatorRow]) -> list[str]:
    """The tables of csrc/aot/operators.h."""
    if not rows:
        return []
    tables: list[str] = []
    operators: list[str] = []
    for i, o in enumerate(rows):
        params = []
        for k, p in enumerate(o.params):
            if p.numbers:
                tables.append(f"static const ts_number o{i}n{k}[] = {{{', '.join(f'{{{_int(n.value)}, {n.slot}}}' for n in p.numbers)}}};")
            params.append(f"{{'{p.letter}', {len(p.numbers)}, {f'o{i}n{k}' if p.numbers else '0'}, {c_string(p.text)}}}")
        specs = {"t": o.tensors, "r": o.outs}
        tables.append(f"static const ts_param o{i}p[] = {{{', '.join(params) or '{0}'}}};")
        for letter, given in specs.items():
            tables.append(f"static const ts_spec o{i}{letter}[] = {{{', '.join(f'{{{DTYPE_ROWS[d]}, {n}}}' for d, n in given) or '{0}'}}};")
        operators.append(
            f"{{{c_string(o.name)}, {c_string(o.overload)}, {c_string(o.said)}, {c_string(o.symbol) if o.symbol else '0'}, {o.version}ULL, "
            f"{len(o.params)}, {len(o.tensors)}, {len(o.outs)}, {int(o.is_planned)}, o{i}p, o{i}t, o{i}r}}"
        )
    said = "; ".join(dict.fromkeys(o.said for o in rows))
    return [
        *tables, f"static ts_operator rows[] = {{{', '.join(operators)}}};",
        f"static const ts_operators operators = {{{len(rows)}, rows, {c_string(said)}, &TS_OPERATOR_SERVICES}};",
    ]  # fmt: skip


def divisors(e: Expr) -> list[Expr]:
    """What integers are divided by in `e` that is no number, the innermost first."""
    found = [d for a in e.args for d in divisors(a)]
    if isinstance(e, Op) and e.name in DIVISIONS and not e.dtype.is_float and not isinstance(e.args[1], Const):
        found.append(e.args[1])
    return list(dict.fromkeys(found))


@dataclass(slots=True)
class _Model:
    d: Description
    tables: dict[tuple[int, ...], str] = field(default_factory=dict)
    texts: list[tuple[str, str]] = field(default_factory=list)  # (status, text) of each condition
    checks: list[str] = field(default_factory=list)

    def text(self) -> str:
        d = self.d
        inputs = [self.input(i, row) for i, row in enumerate(d.inputs)]
        self.ranges()
        for cond, said in d.conditions:
            divided = [f"{size_text(d)} != 0" for d in divisors(cond)]  # a size of zero fails the condition instead of the process
            self.condition(f"!({' && '.join([*divided, size_text(cond)])})", "TSM_ERROR_SIZE", said, "0", "0")
        outputs = [f"{{{OUT_KINDS[o.kind]}, {DTYPE_ROWS[o.dtype]}, {o.ndim}, {o.of}, {o.at}, {o.result}}}" for o in d.outputs]
        constants = [self.constant(c, name) for c, name in zip(d.constants, unique_names([c.fqn for c in d.constants]), strict=True)]
        symbols = [self.symbol(s) for s in d.symbols]
        writes = int(any(c.flags & WRITTEN for c in d.constants))
        weights_id = ", ".join(map(str, d.weights_id))
        asked = "".join((*self.checks, *self.wanted(symbols)))
        return "\n".join((
            f"/* description of {d.name.replace('*/', '* /')} */", f'#include "aot/{"operators" if d.operators else "model"}.h"', *(['#include "aot/device.h"'] if d.services else []),
            *(f"static const int64_t {n}[] = {{{', '.join(_int(x) for x in v)}}};" for v, n in self.tables.items()),
            f"static const ts_input_desc inputs[] = {{{', '.join(inputs) or '{0}'}}};",
            f"static const ts_output_desc outputs[] = {{{', '.join(outputs) or '{0}'}}};",
            f"static const ts_constant_desc constants[] = {{{', '.join(constants) or '{0}'}}};",
            f"static const ts_condition conditions[] = {{{', '.join(f'{{{s}, {c_string(t)}}}' for s, t in self.texts) or '{0}'}}};",
            *([NUMBERS] if re.search(r"\bts_\w+\(", asked) else ()),
            "static int32_t check(const ts_tensor *in, int64_t *found) {", "  int ts_bad = 0; (void)in; (void)found; (void)ts_bad;", *symbols, *self.checks,
            "  return -1;", "}", *self.wanted(symbols), *operator_texts(d.operators),
            f"const ts_model_desc torchsmith_model = {{TS_MODEL_ABI, {c_string(d.name)}, {c_string(d.in_spec)},",
            f"  {c_string(d.out_spec)},", f"  {c_string(d.info)},", f"  {c_string(' '.join(d.cpu))},",
            f"  {len(d.inputs)}, {len(d.outputs)}, {len(d.constants)}, inputs, outputs, constants, conditions, check, {'wanted' if d.copies else '0'},",
            f"  {{{weights_id}}}, {_int(d.weights_size)}, {_int(d.state_offset)}, {writes}, {'&operators' if d.operators else '0'},",
            f"  {c_string(d.device)}, {f'&{d.services}' if d.services else '0'}}};", "",
        ))  # fmt: skip

    def wanted(self, symbols: Sequence[str]) -> list[str]:
        """The function that says which strides each input must have."""
        if not self.d.copies:
            return []
        strides = [e for row in self.d.inputs for e in row.strides]
        rows = [f"  out[{k}] = {size_text(e)};" for k, e in enumerate(strides)]
        return ["static void wanted(const ts_tensor *in, int64_t *out) {", "  int ts_bad = 0; (void)in; (void)out; (void)ts_bad;", *symbols, *rows, "}"]

    def table(self, values: Sequence[int]) -> str:
        return self.tables.setdefault(tuple(values), f"t{len(self.tables)}") if values else "0"

    def constant(self, c: ConstantRow, name: str) -> str:
        shape = f"{self.table(c.sizes)}, {self.table(c.strides)}"
        return (
            f"{{{c_string(name)}, {c_string(c.fqn)}, {DTYPE_ROWS[c.dtype]}, {len(c.sizes)}, {c.flags}, {c.type}, {c.graph_input}, "
            f"{shape}, {_int(c.nbytes)}, {_int(c.offset)}}}"
        )

    # -------------------------------------------------- checks

    def symbol(self, s: Symbol) -> str:
        kind, *rest = s.origin
        if kind not in ("size", "stride"):
            return ""
        value = f"in[{rest[0]}].{kind}s[{rest[1]}]"
        if len(rest) == 4:  # a derived dimension: size = scale * symbol + offset
            value = f"({value} - ({rest[3]})) / {rest[2]}"
        name = c_name(s.sym.name)
        return f"  const int64_t {name} = {value}; (void){name};"

    def condition(self, fails: str, status: str, said: str, found: str, wanted: str) -> None:
        number = len(self.texts)
        self.texts.append((status, said))
        self.checks.append(f"  if ({fails}{' || ts_bad' if BAD in fails + found + wanted else ''}) {{ found[0] = {found}; found[1] = {wanted}; return {number}; }}")

    def input(self, i: int, row: InputRow) -> str:
        """The input's table row; what the table cannot say becomes a condition."""
        if not row.dtype:
            return f"{{{c_string(row.name)}, -1, -1, {row.graph_input}, 0, 0}}"
        lo: list[int] = []
        hi: list[int] = []
        ranges = {s.origin: s for s in self.d.symbols}
        label = f"input {i} ({row.name})"
        for k, (size, stride) in enumerate(zip(row.shape, row.strides, strict=True)):
            own = ranges.get(("size", row.graph_input, k))
            if isinstance(size, Const):
                lo.append(int(size.value))
                hi.append(int(size.value))
            elif own is not None and own.sym is size:
                lo.append(own.lo)
                hi.append(UNLIMITED if own.hi is None else own.hi)
            else:
                lo.append(0)
                hi.append(UNLIMITED)
                have, want = f"in[{row.graph_input}].sizes[{k}]", size_text(size)
                said = f"{label}: size at dimension {k} must be {self.describe(size)}"
                self.condition(f"{have} != {want}", "TSM_ERROR_SIZE", said, have, want)
            if self.d.copies or (isinstance(size, Const) and int(size.value) <= 1):
                continue
            have, want = f"in[{row.graph_input}].strides[{k}]", size_text(stride)
            skip = "" if isinstance(size, Const) else f"in[{row.graph_input}].sizes[{k}] > 1 && "
            said = f"{label}: stride at dimension {k} differs from the one that was exported (a copy with that layout is needed)"
            self.condition(f"{skip}{have} != {want}", "TSM_ERROR_STRIDE", said, have, want)
        return f"{{{c_string(row.name)}, {DTYPE_ROWS[row.dtype]}, {len(row.shape)}, {row.graph_input}, {self.table(lo)}, {self.table(hi)}, {int(row.written)}}}"

    def ranges(self) -> None:
        """Symbols that are no size of their own are checked here."""
        for s in self.d.symbols:
            if s.origin[0] == "size" and len(s.origin) == 3:
                continue
            name, said = c_name(s.sym.name), f"the size {self.describe(s.sym)} is outside of its range"
            self.condition(f"{name} < {s.lo}", "TSM_ERROR_SIZE", said, name, str(s.lo))
            if s.hi is not None:
                self.condition(f"{name} > {s.hi}", "TSM_ERROR_SIZE", said, name, str(s.hi))

    def describe(self, e: Expr) -> str:
        """A size in the user's words."""
        said = self.part(e)
        return said[1:-1] if said.startswith("(") else said

    def part(self, e: Expr) -> str:
        if isinstance(e, Sym):
            return self.d.labels.get(e.name, e.name)
        if isinstance(e, Const):
            return str(e.value)
        args = [self.part(a) for a in getattr(e, "args", ())]
        sign = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}.get(getattr(e, "name", ""))
        return f"({f' {sign} '.join(args)})" if sign else f"{getattr(e, 'name', '?')}({', '.join(args)})"


def _int(value: int) -> str:
    return f"{value}LL"
