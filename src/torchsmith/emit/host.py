"""The host program as C text, and the plain description of what its host must know (no torch).

In: Plan and the C names of its kernels. Out: `emit_host` gives include-free C that exports one `const ts_graph` (csrc/torchsmith.h);
`describe` gives the manifest: inputs, results and extern calls as JSON values.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from ..codes import Unsupported
from ..ir import dtype as dt
from ..ir.bounds import LIMITS, Ranges
from ..ir.dtype import DTYPE_ROWS, DType
from ..ir.expr import Cast, Const, Expr, Load, Op, Sym, const, walk
from ..ir.nested import every
from ..ir.plan import (
    Alloc,
    Arena,
    Call,
    Free,
    Given,
    Input,
    Launch,
    Plan,
    PlanCond,
    PlanRepeat,
    ResultPlace,
    Segment,
    State,
    Step,
    Taken,
)
from ..ir.program import (
    Bind,
    BufArg,
    Buffer,
    Check,
    Enum,
    Extern,
    ExternArg,
    Fresh,
    InputResult,
    SizeResult,
    Symbol,
    ViewResult,
    dense,
    root_of,
)
from ..ir.verify import depends_on_itself
from .host_abi import ABI_TEXT, HELPERS
from .watch import NAMES, SAVE, WATCH_TEXT, is_wanted

SYMBOL = "torchsmith_graph"
# Calls whose operands may not be copied to another address: eager's dropout deals its numbers out by it.
ADDRESSED = frozenset({"torchsmith.take_draws.default", "aten.native_dropout.default"})
SCALARS = frozenset({"scalar", "element"})  # origins of numbers that the host passes
KERNELS_OF_A_DEVICE = "extern TS_HIDDEN const ts_device_kernel {name};"


def emit_host(plan: Plan, kernel_names: Sequence[str], values: str = "0", only: str = "") -> str:
    """The whole translation unit; kernel_names[i] is the C name of plan.kernels[i]. `values`, `only`: see emit/watch.py."""
    return _Host(plan, tuple(kernel_names), values=values, only=only).text()


# ---------------------------------------------------------------- expressions

# C texts over operands a, b, c; index and integer operands are int64_t, floats double or float.
HOST_OPS: dict[str, str] = {
    "add": "({a} + {b})", "sub": "({a} - {b})", "mul": "({a} * {b})", "neg": "(-{a})", "div": "({a} / {b})",
    "truncdiv": "ts_truncdiv({a}, {b})", "floordiv": "ts_floordiv({a}, {b})", "mod": "ts_mod({a}, {b})",
    "eq": "({a} == {b})", "ne": "({a} != {b})", "lt": "({a} < {b})", "le": "({a} <= {b})", "gt": "({a} > {b})", "ge": "({a} >= {b})",
    "and": "({a} && {b})", "or": "({a} || {b})", "not": "(!{a})", "xor": "({a} ^ {b})", "where": "({a} ? {b} : {c})",
    "bitand": "({a} & {b})", "bitor": "({a} | {b})", "bitnot": "(~{a})", "shl": "({a} << {b})", "shr": "({a} >> {b})",
    "floor": "__builtin_floor({a})", "ceil": "__builtin_ceil({a})", "trunc": "__builtin_trunc({a})", "sqrt": "__builtin_sqrt({a})",
    "round": "__builtin_roundeven({a})", "isnan": "({a} != {a})", "isinf": "__builtin_isinf({a})",
    "exp": "__builtin_exp({a})", "log": "__builtin_log({a})", "pow": "__builtin_pow({a}, {b})",
}  # fmt: skip
INT_OPS = {"abs": "ts_abs({a})", "min": "ts_min({a}, {b})", "max": "ts_max({a}, {b})", "sign": "(({a} > 0) - ({a} < 0))"}
FLOAT_OPS = {
    "abs": "__builtin_fabs({a})", "min": "ts_fmin({a}, {b})", "max": "ts_fmax({a}, {b})", "sign": "(double)(({a} > 0) - ({a} < 0))",
    "floordiv": "__builtin_floor({a} / {b})", "mod": "({a} - {b} * __builtin_floor({a} / {b}))",
}  # fmt: skip


# What may be computed at the start, whether it is needed or not.
SAFE_OPS = frozenset(
    {"add", "sub", "mul", "neg", "abs", "min", "max", "sign", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "where"}
)
DIVISIONS = frozenset({"floordiv", "mod", "truncdiv"})
# Integers of the program are exact: what is not proved to fit 64 bits is computed by these, which set ts_bad (host_abi.py).
EXACT = frozenset({"add", "sub", "mul", "neg", "abs", "shl", "shr", *DIVISIONS})
BAD = "&ts_bad"
WORD = LIMITS["i64"]


def _c_name(name: str) -> str:
    return "s_" + "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in name)


def _c_const(e: Const) -> str:
    if e.dtype.is_float:
        value = float(e.value)
        if value != value:
            return '__builtin_nan("")'
        if value in (float("inf"), float("-inf")):
            return "__builtin_inf()" if value > 0 else "(-__builtin_inf())"
        return f"({value.hex()})"
    value_int = int(e.value)
    if not WORD[0] <= value_int <= WORD[1]:
        raise Unsupported("EMI101", detail=f"the integer {value_int}, which does not fit 64 bits")
    if value_int == -(2**63):
        return "(-9223372036854775807LL - 1)"
    return f"{value_int}LL" if value_int >= 0 else f"({value_int}LL)"


# ---------------------------------------------------------------- the unit


@dataclass(slots=True)
class _Host:
    plan: Plan
    names: tuple[str, ...]
    lines: list[str] = field(default_factory=list)
    tables: dict[tuple[int, ...], str] = field(default_factory=dict)  # constant int64 arrays by value
    externs: int = 0
    depth: int = 1
    values: str = "0"
    only: str = ""
    launches: int = 0  # so far; those of `prepare` are not watched
    parts: int = 0  # so far: runs of launches between the library calls of a segment
    fetched: dict[Expr, str] = field(default_factory=dict)  # what this step has read from a device: its variable
    reads: int = 0  # so far
    is_run: bool = False
    known: dict[Expr, bool] = field(default_factory=dict)  # Sym -> it is declared at the start; Op -> it can be computed there
    named: dict[Expr, str] = field(default_factory=dict)  # what is computed at the start: its variable
    early: list[str] | None = None  # the lines that compute it; None where nothing is declared at the start
    leave: str = "return ts_overflow(host);"  # what a function does with an integer that does not fit
    written: bool = False  # an input was written: from here on the call cannot be repeated
    changed: bool = False  # and what was written depends on what was there: repeated, it would be another
    is_recorded: bool = False  # inside of a segment that a device may record
    ranges: Ranges | None = None
    conditions: int = 0
    given: dict[str, int] = field(default_factory=dict)  # tensors that library calls return: their places in `g`
    taken: dict[str, int] = field(default_factory=dict)  # memory that is asked for while it runs: its places in `t`

    def __post_init__(self) -> None:
        for b, place in self.plan.places.items():
            if isinstance(place, Given | Taken) and self.plan.buffers[b].storage_of is None:
                kind = self.given if isinstance(place, Given) else self.taken
                kind[b] = len(kind)

    def text(self) -> str:
        plan = self.plan
        self.run_body()
        body, self.lines = self.lines, []
        self.depth, self.leave, self.written, self.changed = 1, "return -1;", False, False
        self.symbols(used=set(walk(plan.workspace)))
        result = self.expr(plan.workspace)
        size = [*self.lines, *(self.early or ()), f"  return ts_bad ? -1 : {result};"]
        self.lines, self.early, self.leave = [], None, "return ts_overflow(host);"
        for step in plan.prepare:
            self.step(step)
        prepare, self.lines = self.lines, []
        scalars = sum(1 for s in plan.symbols if s.origin[0] in SCALARS)
        views = sum(2 * len(r.shape) + 1 for r in plan.results if isinstance(r, ViewResult))
        syms = views + sum(isinstance(r, SizeResult) for r in plan.results)
        head = [f"/* host program of {plan.name} */", ABI_TEXT, HELPERS, *([WATCH_TEXT] if self.is_watched else [])]
        kernel = KERNELS_OF_A_DEVICE if self.is_far else "extern TS_HIDDEN void {name}(void *const *, const int64_t *, int64_t, int64_t);"
        head += [kernel.format(name=n) for n in dict.fromkeys(self.names)]
        head += [f"static const int64_t {n}[] = {{{', '.join(map(str, v))}}};" for v, n in self.tables.items()]
        head += self.images() if self.is_far else []
        return "\n".join((
            *head,
            "static int64_t ts_workspace(const ts_tensor *in, const int64_t *sc) {", "  int ts_bad = 0; (void)in; (void)sc;", *size, "}",
            "static int32_t ts_run(const ts_host *host, const ts_tensor *in, const int64_t *sc, const void *state, ts_tensor *res,",
            "                      int64_t *out) {", *body, "}",
            "static int32_t ts_prepare(const ts_host *host, const ts_tensor *in, void *state) {",
            "  int ts_bad = 0; (void)host; (void)in; (void)state; (void)ts_bad;", *memory_text("0", "0", "0", "0"), *prepare, "  return 0;", "}",
            f"TS_EXPORT const ts_graph {SYMBOL} = {{TS_ABI, {len(plan.inputs)}, {scalars}, {len(plan.results)}, {syms},",
            f"  {plan.state}, ts_workspace, ts_prepare, ts_run, {'&ts_all' if self.is_far else 0}}};", "",
        ))  # fmt: skip

    @property
    def is_far(self) -> bool:
        """Do kernels run on a device, and is that where inputs, results and the workspace lie?"""
        return self.plan.target.device != "cpu"

    def images(self) -> list[str]:
        """The table of a device's kernels."""
        segments = len(segments_of(self.plan))
        names = ", ".join(f"&{n}" for n in self.names) or "0"
        return [f"static const ts_device_kernel *const ts_kernels[] = {{{names}}};",
                f"static const ts_images ts_all = {{{len(self.names)}, {segments}, {self.parts}, ts_kernels}};"]  # fmt: skip

    def put(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)
        if BAD in line:
            late = "{ ts_overflow(host); rc = TS_ERROR_LATE; goto fail; }"  # an input was written: the call cannot be repeated eagerly
            self.lines.append("  " * self.depth + f"if (ts_bad) {late if self.written and self.is_run else self.leave}")

    @property
    def failed(self) -> str:
        """What follows a call that may fail; the rest of the host repeats the whole eagerly unless it is told that this is too late."""
        if not self.changed or not self.is_run:
            return "if (rc) goto fail;"
        runs = "if (how != TS_RECORD) " if self.is_recorded else ""  # what is recorded has not run yet
        return f"if (rc) {{ {runs}rc = TS_ERROR_LATE; goto fail; }}"

    def fits(self, e: Expr) -> bool:
        """Is it proved that this integer fits 64 bits?"""
        if self.ranges is None:
            self.ranges = Ranges({s.sym: (s.lo, s.hi) for s in self.plan.symbols if not s.sym.dtype.is_float})
        i = self.ranges.interval(e)
        return i.lo is not None and i.hi is not None and WORD[0] <= i.lo and i.hi <= WORD[1]

    # -------------------------------------------------- values

    def symbols(self, used: set[Expr] | None = None) -> None:
        """Declare the input symbols (all, or those in `used`)."""
        self.known, self.named, self.early = {}, {}, []
        scalars = sorted(int(s.origin[1]) for s in self.plan.symbols if s.origin[0] in SCALARS)  # `sc` holds them by the inputs' numbers
        for s in self.plan.symbols:
            kind, name = s.origin[0], _c_name(s.sym.name)
            wanted = used is None or s.sym in used
            if kind in SCALARS:
                number = scalars.index(int(s.origin[1]))
                value = f"ts_bits(sc[{number}])" if s.sym.dtype.is_float else f"sc[{number}]"
            elif kind in ("size", "stride"):
                value = f"in[{s.origin[1]}].{kind}s[{s.origin[2]}]"
                if len(s.origin) == 5:  # a derived dimension: size = scale * symbol + offset
                    value = f"({value} - ({s.origin[4]})) / {s.origin[3]}"
            else:
                continue
            if wanted:
                self.put(f"const {_c_type(s.sym.dtype)} {name} = {value}; (void){name};")
                self.known[s.sym] = not s.sym.dtype.is_float

    def is_known(self, e: Expr) -> bool:
        """Is this an integer of constants and the symbols declared at the start, whatever they are?"""
        if isinstance(e, Const):
            return not e.dtype.is_float
        known = self.known.get(e)
        if known is None:
            wide = e.dtype in (dt.index, dt.i64, dt.bool_)
            safe = isinstance(e, Op) and (e.name in SAFE_OPS or e.name in DIVISIONS)
            known = self.known[e] = wide and safe and all(map(self.is_known, e.args))
        return known

    def expr(self, e: Expr) -> str:
        if isinstance(e, Const):
            return _c_const(e)
        if isinstance(e, Sym):
            return _c_name(e.name)
        if isinstance(e, Load):
            return self.load(e)
        if isinstance(e, Cast):
            return self.cast(e)
        if self.early is not None and e in self.named:
            return self.named[e]
        if isinstance(e, Op):
            table = FLOAT_OPS if e.args[0].dtype.is_float else INT_OPS
            form = table.get(e.name) or HOST_OPS.get(e.name)
            if form is not None and len(e.args) <= 3:
                texts = [self.quotient(a) if e.name == "div" else self.expr(a) for a in e.args]
                got = form.format(**dict(zip("abc", texts, strict=False)))
                if e.dtype is dt.index and e.name in EXACT and not (e.name not in DIVISIONS and self.fits(e)):
                    got = f"ts_{e.name}x({', '.join(texts)}, {BAD})"
                if self.early is not None and self.is_known(e):
                    # Sizes grow out of each other: written out at every use, the text would grow exponentially.
                    name = self.named[e] = f"e{len(self.named)}"
                    if e.name in DIVISIONS:  # computed whether it is needed or not: where it is, the divisor is guarded
                        got = got if _is_not_zero(e.args[1]) else f"({texts[1]} ? {got} : 0)"
                    self.early.append(f"  const int64_t {name} = {got};")
                    return name
                narrow = (e.dtype.is_int and e.dtype.itemsize < 8) or e.dtype is dt.f32
                return f"(({e.dtype.c}){got})" if narrow else got
        raise Unsupported("EMI101", detail=f"{type(e).__name__} {getattr(e, 'name', '')} in a host expression")

    def quotient(self, e: Expr) -> str:
        """An operand of a true division: Python divides integers exactly, so they must be exact as doubles."""
        if isinstance(e, Cast) and e.dtype is dt.f64 and e.arg.dtype is dt.index:
            return f"ts_exact({self.expr(e.arg)}, {BAD})"
        return self.expr(e)

    def cast(self, e: Cast) -> str:
        arg = self.expr(e.arg)
        if e.dtype is dt.index and e.arg.dtype.is_float:
            return f"ts_index({arg}, {BAD})"
        if e.dtype is dt.bool_:
            return f"({arg} != 0)"
        if e.dtype is dt.bf16:
            raise Unsupported("EMI101", detail="a cast to bf16 in a host expression")
        return f"(({e.dtype.c}){arg})"

    def load(self, e: Load) -> str:
        buf = self.plan.buffers[e.buf]
        at = "0"
        if buf.layout is not None:
            at = self.expr(buf.layout.offset)
            for i, s in zip(e.index, buf.layout.strides, strict=True):
                at += f" + {self.expr(i)} * {self.expr(s)}"
        mask = self.expr(e.mask) if e.mask is not None else ""
        text = self.fetch(e, at, mask) if buf.device != "cpu" else f"((const {buf.dtype.c} *){self.address(e.buf)})[{at}]"
        if buf.dtype is dt.bf16:
            text = f"ts_bf16({text})"
        elif buf.dtype is dt.f16:
            text = f"(float){text}"
        if e.mask is not None and e.other is not None:
            text = f"({mask} ? {text} : {self.expr(e.other)})"
        return text if e.mask is not None else f"({text})"

    def fetch(self, e: Load, at: str, mask: str) -> str:
        """The element of a device's buffer, read before the statement that needs it."""
        name = self.fetched.get(e)
        if name is None:
            buf = self.plan.buffers[e.buf]
            name = self.fetched[e] = f"d{self.reads}"
            self.reads += 1
            self.put(f"{buf.dtype.c} {name} = 0;")
            read = f"rc = host->device->read(host->self, (const {buf.dtype.c} *){self.address(e.buf)} + {at}, &{name}, sizeof {name});"
            self.put(f"if ({mask}) {read}" if mask else read)
            self.put("if (rc) goto fail;")
        return name

    def bits(self, e: Expr) -> str:
        """A value as it travels: one int64."""
        return f"ts_pack({self.expr(e)})" if e.dtype.is_float else f"(int64_t){self.expr(e)}"

    def table(self, values: Sequence[Expr], local: str) -> str:
        """An int64 array of these: a constant table, or a local array declared here."""
        if not values:
            return "0"
        fixed = tuple(int(v.value) for v in values if isinstance(v, Const))
        if len(fixed) == len(values):
            return self.tables.setdefault(fixed, f"c{len(self.tables)}")
        self.put(f"const int64_t {local}[] = {{{', '.join(self.expr(v) for v in values)}}};")
        return local

    # -------------------------------------------------- buffers

    def tensor_of(self, buf: str) -> str | None:
        """The ts_tensor that already describes `buf`; None for arena memory."""
        place = self.plan.places[buf]
        if isinstance(place, Input):
            return f"in[{place.index}]"
        if isinstance(place, ResultPlace):
            return f"res[{place.index}]"
        if isinstance(place, Given):
            return f"g[{self.given[self.root(buf)]}]"
        return None

    def address(self, buf: str) -> str:
        place = self.plan.places[buf]
        if isinstance(place, Arena):
            return f"(ws + {self.expr(place.offset)})"
        if isinstance(place, State):
            return f"((char *)state + {self.expr(place.offset)})"
        if isinstance(place, Taken):
            return f"((char *)t[{self.taken[self.root(buf)]}].data)"
        return f"{self.tensor_of(buf)}.data"

    def place(self, buf: str, ahead: Expr | None = None) -> str:
        """The address of `buf`, `ahead` bytes further, as a ts_place; an int64 expression if sizes decide it."""
        place, offset = self.plan.places[buf], const(0) if ahead is None else ahead
        if isinstance(place, Arena | State):
            offset = place.offset + offset
            array, at = "TS_OWN", "TS_WORKSPACE" if isinstance(place, Arena) else "TS_STATE"
        elif isinstance(place, Given):
            array, at = "TS_GIVEN", str(self.given[self.root(buf)])
        elif isinstance(place, Taken):
            array, at = "TS_TAKEN", str(self.taken[self.root(buf)])
        else:
            array, at = "TS_INPUT" if isinstance(place, Input) else "TS_RESULT", str(place.index)
        return f"{{{array}, {at}, {self.expr(offset)}}}"

    def words(self, name: str, texts: Sequence[str]) -> None:
        """Declares an array of 8-byte words: ts_places, and numbers as they are."""
        if not texts:
            self.put(f"const uint64_t {name}[] = {{0}};")
            return
        fixed = [t if _FIXED_PLACE.fullmatch(t) else _NO_PLACE for t in texts]
        self.put(f"static const ts_place p{name}[] = {{{', '.join(fixed)}}};")
        self.put(f"uint64_t {name}[{len(texts)}];")
        self.put(f"ts_words({name}, m, p{name}, {len(texts)});")
        for i, (text, row) in enumerate(zip(texts, fixed, strict=True)):
            if row is not text:
                where = _PLACE.fullmatch(text)
                self.put(f"{name}[{i}] = {f'(uint64_t)m[{where[1]}][{where[2]}].data + (uint64_t){where[3]}' if where else text};")

    def root(self, buf: str) -> str:
        return root_of(self.plan.buffers, buf)

    def shape(self, buffer: Buffer, prefix: str) -> tuple[str, str]:
        """Names of the arrays with sizes and strides."""
        strides = buffer.layout.strides if buffer.layout is not None else dense(buffer.shape).strides
        return self.table(buffer.shape, prefix + "n"), self.table(strides, prefix + "s")

    # -------------------------------------------------- run

    def run_body(self) -> None:
        plan = self.plan
        self.put("int32_t rc = 0;")
        self.put("int ts_bad = 0; (void)ts_bad;")
        self.put("(void)in; (void)sc; (void)state; (void)out; (void)res;")
        self.symbols()
        for s in plan.symbols:
            if s.origin[0] == "bound":
                self.put(f"{_c_type(s.sym.dtype)} {_c_name(s.sym.name)} = 0; (void){_c_name(s.sym.name)};")
        declared = {s.sym for s in plan.symbols}
        for step in every(plan.run):  # symbols that only the body knows
            for sym in _defines(step):
                if sym not in declared:
                    declared.add(sym)
                    self.put(f"{_c_type(sym.dtype)} {_c_name(sym.name)} = 0; (void){_c_name(sym.name)};")
        start = len(self.lines)
        self.leave = "{ rc = ts_overflow(host); goto fail; }"
        if self.given:
            self.put(f"ts_tensor g[{len(self.given)}] = {{{{0, 0, 0, 0}}}};")
        if self.taken:
            self.put(f"ts_tensor t[{len(self.taken)}] = {{{{0, 0, 0, 0}}}};")
            self.put(f"int64_t taken[{len(self.taken)}] = {{0}};")
        none = isinstance(plan.workspace, Const) and plan.workspace.value == 0
        self.put(f"const int64_t bytes = {self.expr(plan.workspace)};")
        self.put("char *const ws = bytes ? (char *)host->take_workspace(host->self, bytes) : 0; (void)ws;")
        if not none:
            self.put("if (bytes && !ws) return TS_ERROR_MEMORY;")
        self.lines += memory_text("ws", "res", "g" if self.given else "0", "t" if self.taken else "0")
        if self.is_watched:
            self.put("const int64_t number = __atomic_add_fetch(&ts_runs, 1, __ATOMIC_RELAXED); (void)number;")
            self.watch_inputs()
        self.is_run = True
        for step in plan.run:
            self.step(step)
        self.is_run = False
        self.finish()
        early = self.early or []
        if any(BAD in line for line in early):
            early = [*early, "  if (ts_bad) return ts_overflow(host);"]
        self.lines[start:start] = early
        self.lines.append("fail: __attribute__((unused));")
        if self.given:
            self.put(f"for (int i = 0; i < {len(self.given)}; i++) ts_free(host, &g[i]);")
        if self.taken:
            self.put(f"for (int i = 0; i < {len(self.taken)}; i++) if (t[i].data) host->give_workspace(host->self, t[i].data, taken[i]);")
        self.put("if (ws) host->give_workspace(host->self, ws, bytes);")
        self.put("return rc;")

    def finish(self) -> None:
        """Hand over extern results, then the numbers that results need."""
        at = 0
        moved: set[str] = set()
        self.fetched = {}
        for i, r in enumerate(self.plan.results):
            if isinstance(r, Fresh) and isinstance(self.plan.places[r.buf], Given) and r.buf not in moved:
                moved.add(r.buf)
                name = self.tensor_of(r.buf)
                self.put(f"res[{i}] = {name}; {name}.handle = 0;")
            values: tuple[Expr, ...] = ()
            if isinstance(r, ViewResult):
                values = (*r.shape, *r.strides, r.offset)
            elif isinstance(r, SizeResult):
                values = (r.value,)
            for e in values:
                self.put(f"out[{at}] = {self.bits(e)};")
                at += 1

    def step(self, step: Step) -> None:
        self.fetched = {}
        STEPS[type(step)](self, step)

    def nested(self, steps: tuple[Step, ...]) -> None:
        self.depth += 1
        for s in steps:
            self.step(s)
        self.depth -= 1

    def step_alloc(self, step: Alloc) -> None:
        buffer, place = self.plan.buffers[step.buf], self.plan.places[step.buf]
        self.put("{")
        self.depth += 1
        if isinstance(place, Taken):
            k = self.taken[step.buf]
            self.put(f"taken[{k}] = {self.expr(place.size)};")
            self.put(f"t[{k}].data = host->take_workspace(host->self, taken[{k}] ? taken[{k}] : 64);")
            self.put(f"rc = t[{k}].data ? 0 : TS_ERROR_MEMORY;")
            self.put(self.failed)
        else:
            assert isinstance(place, ResultPlace)
            sizes, strides = self.shape(buffer, "a")
            row, ndim = DTYPE_ROWS[buffer.dtype.name], len(buffer.shape)
            self.put(f"rc = host->alloc_result(host->self, {place.index}, {row}, {ndim}, {sizes}, {strides}, &res[{place.index}]);")
            self.put(self.failed)
        self.depth -= 1
        self.put("}")

    def step_segment(self, step: Segment) -> None:
        """All arguments in one array, as 8-byte words: addresses, then numbers, launch by launch."""
        if any(isinstance(s, Call) for s in step.steps):
            self.recorded(step)
            return
        self.put("{")
        self.depth += 1
        words, rows = self.launches_of(step)
        go = f"host->device->launch(host->self, {step.number}, l, {rows}, w, {words})"
        if self.is_run:
            changes = any(isinstance(s, Launch) and self.changes(s) for s in step.steps[:-1])
            self.put(f"rc = {go};")
            if not changes:  # what was queued before a launch that failed can be repeated
                self.put("if (rc == TS_ERROR_LATE) rc = TS_ERROR_DEVICE;")
            self.put(self.failed)
            self.changed |= changes or (isinstance(step.steps[-1], Launch) and self.changes(step.steps[-1]))
        else:
            self.put(f"const int32_t rc = {go};")
            self.put("if (rc) return rc;")
        self.depth -= 1
        self.put("}")

    def launches_of(self, step: Segment, unknown: frozenset[str] | None = None) -> tuple[int, int]:
        """Declares arrays `w` and `l` of the launches; gives their lengths. Given `unknown` buffers, whose addresses are 0: ahead of the run."""
        words: list[str] = []
        rows: list[str] = []
        fixed = True
        for s in step.steps:
            if not isinstance(s, Launch):
                continue
            texts = [_NO_PLACE if unknown and self.root(b) in unknown else self.place(b) for b in s.bufs]
            texts += [f"(uint64_t){self.bits(e)}" for e in s.syms]
            free = len(s.bufs) + sum(1 for _ in takewhile(lambda x: x.dtype is not dt.index, self.plan.kernels[s.kernel].syms))
            rows.append(f"{{{s.kernel}, {len(words)}, {len(texts)}, {free}, {self.expr(s.grid)}}}")
            fixed &= isinstance(s.grid, Const)
            words += texts
            kernel, name = self.plan.kernels[s.kernel], self.names[s.kernel]
            params = zip(s.bufs, kernel.params, strict=True)
            self.written |= any(p.written and isinstance(self.plan.places[b], Input) for b, p in params)
            if unknown is not None or not (self.is_watched and self.is_run):
                continue
            self.launches += 1
            if self.values == NAMES and is_wanted(kernel.name, name, self.only):
                self.put(f"ts_kernel_runs(number, {self.launches}, {_c_string(f'{name} ({kernel.name})')});")
        self.words("w", words)
        self.put(f"{'static ' if fixed else ''}const ts_device_launch l[] = {{{', '.join(rows)}}};")
        return len(words), len(rows)

    def recorded(self, step: Segment) -> None:
        """Launches and library calls: replayed, or made one by one, perhaps while they are recorded."""
        calls = [s.extern for s in step.steps if isinstance(s, Call)]
        inner = frozenset(self.root(b) for e in calls for b in e.outs if b and isinstance(self.plan.places[b], Given))
        used = dict.fromkeys(b for e in calls for b in (*e.buffers, *e.outs) if b)
        fixed = [self.place(b) for b in used if self.root(b) not in inner]
        fixed += [f"(uint64_t){self.bits(x)}" for e in calls for x in e.numbers]
        self.put("{")
        self.depth += 1
        words, rows = self.launches_of(step, inner)
        self.words("f", fixed)
        self.put(f"const int32_t how = host->device->begin(host->self, {step.number}, l, {rows}, w, {words}, f, {len(fixed)});")
        failed = self.failed
        self.put(f"if (how < 0) {{ rc = -how; {failed} }}")
        self.put("if (how != TS_REPLAYED) {")
        self.is_recorded = not self.changed
        self.depth += 1
        run: list[Launch] = []
        first = len(segments_of(self.plan))
        for s in (*step.steps, None):
            if isinstance(s, Launch):
                run.append(s)
                continue
            if run:
                self.step_segment(Segment(first + self.parts, tuple(run)))
                self.parts += 1
                run = []
            if s is not None:
                self.step(s)
        self.is_recorded = False
        self.put(f"rc = host->device->end(host->self, {step.number});")
        self.put(failed)
        self.depth -= 1
        self.put("}")
        self.depth -= 1
        self.put("}")

    def step_launch(self, step: Launch) -> None:
        if self.is_far:
            self.step_segment(Segment(-1, (step,)))
            return
        bufs = ", ".join(f"(void *){self.address(b)}" for b in step.bufs) or "0"
        self.put("{")
        self.depth += 1
        if any(s.dtype.is_float for s in step.syms):
            syms = "y"
            self.put(f"const int64_t y[] = {{{', '.join(self.bits(s) for s in step.syms)}}};")
        else:
            syms = self.table(step.syms, "y")
        self.put(f"void *const b[] = {{{bufs}}};")
        kernel, name = self.plan.kernels[step.kernel], self.names[step.kernel]
        watched = self.is_watched and self.is_run
        self.launches += watched
        watched = watched and is_wanted(kernel.name, name, self.only)
        label = f"{name} ({kernel.name})"
        if watched and self.values != SAVE:
            self.put(f"ts_kernel_runs(number, {self.launches}, {_c_string(label)});")
        self.put(f"ts_go(host, {name}, b, {syms}, {self.expr(step.grid)}, {self.expr(step.grain)});")
        targets = [p.buf for b, p in zip(step.bufs, kernel.params, strict=True) if p.written and isinstance(self.plan.places[b], Input)]
        self.written |= bool(targets)
        self.changed |= self.changes(step)
        if watched and self.values != NAMES:
            for b in dict.fromkeys(b for b, p in zip(step.bufs, kernel.params, strict=True) if p.written):
                self.watch(b, b, f"{label} wrote", f"w{step.bufs.index(b)}")
        self.depth -= 1
        self.put("}")

    def changes(self, step: Launch) -> bool:
        """Does it make of an input what depends on what was there?"""
        kernel = self.plan.kernels[step.kernel]
        named = zip(step.bufs, kernel.params, strict=True)
        return any(p.written and isinstance(self.plan.places[b], Input) and depends_on_itself(kernel, p.buf) for b, p in named)

    @property
    def is_watched(self) -> bool:
        return self.values != "0" and (not self.is_far or self.values == NAMES)

    def watch_inputs(self) -> None:
        """What is given: arguments, and constants that no packing read."""
        if self.values == NAMES or self.only:
            return
        for i, b in enumerate(self.plan.inputs):
            if i not in self.plan.consts and b and b in self.plan.buffers:
                self.put("{")
                self.depth += 1
                self.watch(b, f"input{i}", "given:", "w")
                self.depth -= 1
                self.put("}")

    def watch(self, buf: str, name: str, label: str, prefix: str) -> None:
        """Print or save `buf`; `label` says what became of it, and `name` is its name in the output."""
        buffer = self.plan.buffers[buf]
        sizes, strides = self.shape(buffer, prefix)
        offset = self.expr(buffer.layout.offset) if buffer.layout is not None else "0"
        data = f"(const char *){self.address(buf)} + {buffer.dtype.itemsize} * {offset}"
        row, loc = DTYPE_ROWS[buffer.dtype.name], _c_string(buffer.loc)
        self.put(f"ts_watch({self.values}, number, {self.launches}, {_c_string(label)}, {_c_string(name)}, {loc}, {row}, {len(buffer.shape)}, {sizes}, {strides}, {data});")

    def step_call(self, step: Call) -> None:
        extern = step.extern
        number = self.externs
        self.externs += 1
        self.put("{")
        self.depth += 1
        args, exprs = extern.buffers, extern.numbers
        given = extern.returned == "as_given"
        texts = [self.operand(b, f"a{i}") for i, b in enumerate(args)]
        outs = ["{0, 0, 0, 0}" if given or not b else self.argument(b, f"o{i}") for i, b in enumerate(extern.outs)]
        fixed = "static " if all(_FIXED_OPERAND.fullmatch(t) for t in texts) else ""
        self.put(f"{fixed}const ts_operand a[] = {{{', '.join(texts) or '{' + _NO_PLACE + ', 0, 0, 0}'}}};")
        self.put(f"{'static ' if all(isinstance(e, Const) for e in exprs) else ''}const int64_t e[] = {{{', '.join(map(self.bits, exprs)) or '0'}}};")
        self.put(f"ts_tensor o[] = {{{', '.join(outs) or '{0, 0, 0, 0}'}}};")
        self.put(f"rc = ts_call(host, m, {number}, a, {len(args)}, e, o);")
        self.put(self.failed)
        if given:
            for i, b in enumerate(extern.outs):
                if b:
                    self.put(f"{self.tensor_of(b)} = o[{i}];")
                else:
                    self.put(f"host->release(host->self, &o[{i}]);")
        self.written |= any(isinstance(self.plan.places[b], Input) for b in extern.mutates)
        for sym, out, dim in extern.binds:
            self.put(f"{_c_name(sym.name)} = o[{out}].sizes[{dim}];")
        if given:
            for i, b in enumerate(extern.outs):
                if b:
                    self.conform(b, f"k{i}")
        if self.is_watched and self.values != NAMES and is_wanted(extern.op, extern.op, self.only):
            for i, b in enumerate(extern.outs):
                if b:
                    self.watch(b, b, f"{extern.op} wrote", f"w{i}")
        self.depth -= 1
        self.put("}")

    def operand(self, buf: str, prefix: str) -> str:
        """What a library call reads, as a ts_operand."""
        buffer = self.plan.buffers[buf]
        if self.tensor_of(buf) is not None and buffer.storage_of is None:
            return f"{{{self.place(buf)}, 0, 0, 1}}"
        sizes, strides = self.shape(buffer, prefix)
        ahead = buffer.layout.offset * buffer.dtype.itemsize if buffer.layout is not None else None
        return f"{{{self.place(buf, ahead)}, {sizes}, {strides}, 0}}"

    def argument(self, buf: str, prefix: str) -> str:
        whole = self.tensor_of(buf)
        if whole is not None and self.plan.buffers[buf].storage_of is None:
            return whole
        buffer = self.plan.buffers[buf]
        sizes, strides = self.shape(buffer, prefix)
        offset = self.expr(buffer.layout.offset) if buffer.layout is not None else "0"
        return f"{{(char *){self.address(buf)} + {buffer.dtype.itemsize} * {offset}, {sizes}, {strides}, 0}}"

    def conform(self, buf: str, prefix: str) -> None:
        """An as_given result must have the sizes and strides that kernels will assume; one that leaves has eager's, also where one element
        lies in a dimension."""
        buffer, name = self.plan.buffers[buf], self.tensor_of(buf)
        if buffer.layout is None or not buffer.shape:
            return
        sizes, strides = self.shape(buffer, prefix)
        n = len(buffer.shape)
        seen = int(any(isinstance(r, Fresh) and r.buf == buf for r in self.plan.results))
        self.put(f"rc = ts_conform(host, &{name}, {n}, {sizes}, {strides}, {seen});")
        self.put(self.failed)

    def step_free(self, step: Free) -> None:
        if isinstance(self.plan.places[step.buf], Taken):
            k = self.taken[step.buf]
            self.put(f"host->give_workspace(host->self, t[{k}].data, taken[{k}]); t[{k}].data = 0;")
        else:
            self.put(f"ts_free(host, &{self.tensor_of(step.buf)});")

    def step_bind(self, step: Bind) -> None:
        self.put(f"{_c_name(step.sym.name)} = {self.expr(step.value)};")

    def step_check(self, step: Check) -> None:
        text = _c_string(f"{step.kind}: {step.message}")
        self.put(f"if (!({self.condition(step.cond)})) {{")
        self.put(f"  host->error(host->self, TS_ERROR_CHECK, {text}); rc = TS_ERROR_CHECK; goto fail;")
        self.put("}")

    def condition(self, e: Expr) -> str:
        """A condition as a variable, if computing it may fail: a line that ends with a brace cannot be followed by the test."""
        text = self.expr(e)
        if BAD not in text:
            return text
        self.conditions += 1
        self.put(f"const int t{self.conditions} = {text};")
        return f"t{self.conditions}"

    def step_cond(self, step: PlanCond) -> None:
        self.put(f"if ({self.condition(step.pred)}) {{")
        self.nested(step.then)
        self.put("} else {")
        self.nested(step.orelse)
        self.put("}")

    def step_repeat(self, step: PlanRepeat) -> None:
        name = _c_name(step.sym.name)
        count = f"n{self.depth}_{name}"
        self.put(f"const int64_t {count} = {self.expr(step.count)};")
        self.put(f"for ({name} = 0; {name} < {count}; {name}++) {{")
        self.nested(step.body)
        self.put("}")


STEPS: dict[type, Any] = {
    Alloc: _Host.step_alloc, Launch: _Host.step_launch, Segment: _Host.step_segment, Call: _Host.step_call, Free: _Host.step_free, Bind: _Host.step_bind,
    Check: _Host.step_check, PlanCond: _Host.step_cond, PlanRepeat: _Host.step_repeat,
}  # fmt: skip


_NO_PLACE = "{TS_OWN, TS_NOTHING, 0LL}"
_PLACE = re.compile(r"\{(\w+), (\w+), (.*)\}")
_FIXED_PLACE = re.compile(r"\{\w+, \w+, -?\d+LL\}")
_FIXED_OPERAND = re.compile(r"\{\{\w+, \w+, -?\d+LL\}, (0|c\d+), (0|c\d+), [01]\}")  # the tables of sizes are constants


def memory_text(workspace: str, results: str, given: str, taken: str) -> list[str]:
    """Lines that tell ts_places where memory lies."""
    return [f"  ts_tensor own[] = {{{{0, 0, 0, 0}}, {{{workspace}, 0, 0, 0}}, {{(void *)state, 0, 0, 0}}}};",
            f"  ts_tensor *const m[] = {{own, (ts_tensor *)in, {results}, {given}, {taken}}}; (void)m;"]  # fmt: skip


def _is_not_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.value != 0


def _c_type(d: DType) -> str:
    return "double" if d.is_float else "int64_t"


def _c_string(text: str) -> str:
    out = []
    for byte in text.encode():
        plain = 32 <= byte < 127 and byte not in (34, 92, 63)
        out.append(chr(byte) if plain else f"\\{byte:03o}")
    return '"' + "".join(out) + '"'


def segments_of(plan: Plan) -> list[Segment]:
    return [s for s in every(plan.run) if isinstance(s, Segment)]


def _defines(step: Step) -> list[Sym]:
    if isinstance(step, Bind | PlanRepeat):
        return [step.sym]
    if isinstance(step, Call):
        return [sym for sym, _, _ in step.extern.binds]
    return []


def size_text(e: Expr) -> str:
    """C text of an expression over sizes, whose symbols are the C variables `c_name(symbol)`."""
    return _Host(_NO_PLAN, ()).expr(e)


c_name, c_string = _c_name, _c_string  # also used by emit/model.py
_NO_PLAN = Plan("", (), (), {}, {}, (), Const(dt.index, 0), (), (), ())


# ---------------------------------------------------------------- manifest


def packing_key(plan: Plan, kernel_names: Sequence[str]) -> str:
    """Digest of what `prepare` does to its constants: same key, same bytes from the same constants (kernel names are digests)."""
    if not plan.consts:
        return ""
    host = _Host(plan, tuple(kernel_names))
    for step in plan.prepare:
        host.step(step)
    place = {i: n for n, i in enumerate(plan.consts)}  # other graphs may have other inputs before them
    tables = (f"{name} {values}" for values, name in host.tables.items())  # arguments of launches are told by the name of their table
    text = re.sub(r"\b(in\[|TS_INPUT, )(\d+)", lambda m: f"const {m[1]}{place[int(m[2])]}", "\n".join((*host.lines, *tables)))
    return hashlib.sha256(f"{plan.state} {len(place)}\n{text}".encode()).hexdigest()[:32]


def describe(plan: Plan) -> dict[str, Any]:
    """What the host outside needs to know, as JSON values (runtime/manifest.py documents the fields)."""
    steps = [*every(plan.run)]
    externs = [s.extern for s in steps if isinstance(s, Call)]
    passed = {b for e in externs for b in e.buffers}
    launched = {b for s in steps if isinstance(s, Launch) for b in s.bufs}
    needed = {place.index for b in passed | launched | set(_loaded(steps)) if isinstance(place := plan.places.get(b), Input)}
    written = {b for e in externs for b in e.mutates}
    for s in steps:
        if isinstance(s, Launch):
            written |= {b for b, p in zip(s.bufs, plan.kernels[s.kernel].params, strict=True) if p.written}
    at_address = {b for e in externs if e.op in ADDRESSED for b in e.buffers}
    aligned = {place.index for b in at_address if isinstance(place := plan.places[b], Input)}
    changed = {place.index for b in written if isinstance(place := plan.places[b], Input)}
    return {
        "abi": 1,
        "device": plan.device,
        "segments": [[sum(isinstance(x, t) for x in s.steps) for t in (Launch, Call)] for s in segments_of(plan)],
        "symbol": SYMBOL,
        "name": plan.name,
        "inputs": [_describe_input(plan, i, passed, changed, needed, aligned) for i in range(len(plan.inputs))],
        "results": _describe_results(plan),
        "externs": [_describe_extern(plan, e) for e in externs],
        "kernels": len(plan.kernels),
        "consts": list(plan.consts),
        "state": plan.state,
        "peak": int(plan.workspace.value) if isinstance(plan.workspace, Const) else -1,
    }


def _loaded(steps: list[Step]) -> list[str]:
    """Buffers that host expressions read."""
    exprs = [e for s in steps for e in ((s.cond,) if isinstance(s, Check) else (s.value,) if isinstance(s, Bind) else ())]
    exprs += [s.pred for s in steps if isinstance(s, PlanCond)]
    return [e.buf for e in walk(*exprs) if isinstance(e, Load)]


def _describe_input(plan: Plan, i: int, passed: set[str], changed: set[int], needed: set[int], aligned: set[int]) -> dict[str, Any]:
    """`passed`: buffers that externs read, `changed`: inputs that something writes, `needed`: inputs that the run reads or writes,
    `aligned`: inputs of which eager's result depends on the address."""
    scalar: Symbol | None = next((s for s in plan.symbols if s.origin[0] in SCALARS and s.origin[1] == i), None)
    if scalar is not None:
        return {"kind": "number", "dtype": scalar.sym.dtype.name}
    name = plan.inputs[i]
    measured = any(s.origin[0] in ("size", "stride") and s.origin[1] == i for s in plan.symbols)
    if not name:
        return {"kind": "unused", "measured": measured}
    buffer = plan.buffers[name]
    return {
        "kind": "tensor", "dtype": buffer.dtype.name, "ndim": len(buffer.shape), "measured": measured or name in passed,
        "written": i in changed, "read": i in needed, **({"aligned": True} if i in aligned else {}),
    }  # fmt: skip


def _describe_results(plan: Plan) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    fresh: dict[str, int] = {}
    at = 0
    for i, r in enumerate(plan.results):
        if isinstance(r, Fresh):
            first = {"kind": "fresh", "dtype": plan.buffers[r.buf].dtype.name}
            out.append({"kind": "same", "of": fresh[r.buf]} if r.buf in fresh else first)
            fresh.setdefault(r.buf, i)
        elif isinstance(r, InputResult):
            out.append({"kind": "input", "of": r.index})
        elif isinstance(r, ViewResult):
            of = ["input", r.of] if isinstance(r.of, int) else ["result", fresh[r.of]] if r.of in fresh else ["later", r.of]
            out.append({"kind": "view", "of": of, "ndim": len(r.shape), "dtype": r.dtype.name, "at": at, "apart": r.apart})
            at += 2 * len(r.shape) + 1
        else:
            out.append({"kind": "number", "dtype": r.value.dtype.name, "at": at})
            at += 1
    for row in out:
        if row["kind"] == "view" and row["of"][0] == "later":
            row["of"] = ["result", fresh[row["of"][1]]]
    return out


def _describe_extern(plan: Plan, e: Extern) -> dict[str, Any]:
    counts = [0, 0]  # tensors, numbers met so far
    args = [_describe_arg(a, counts) for a in e.args]
    kwargs = {k: _describe_arg(v, counts) for k, v in e.kwargs}
    tensors = e.buffers
    return {
        "op": e.op, "args": args, "kwargs": kwargs, "returned": e.returned, "via": e.via, "loc": e.loc,
        "tensors": [[plan.buffers[b].dtype.name, len(plan.buffers[b].shape)] for b in tensors],
        "outs": [[b.dtype.name, len(b.shape), *((True,) if b.device != plan.target.device else ())] if b else None
                 for b in (plan.buffers.get(name) for name in e.outs)],
        "numbers": [x.dtype.name for x in e.numbers],
        "mutates": [tensors.index(b) for b in e.mutates],
    }  # fmt: skip


def _describe_arg(arg: ExternArg, counts: list[int]) -> Any:
    """JSON value of an argument: plain null/bool/number, or a tagged list."""
    if arg is None or isinstance(arg, bool | int | float):
        return arg
    if isinstance(arg, Const):
        return arg.value
    if isinstance(arg, BufArg):
        counts[0] += 1
        return ["tensor", counts[0] - 1]
    if isinstance(arg, Expr):
        counts[1] += 1
        return ["number", counts[1] - 1, arg.dtype.name]
    if isinstance(arg, str):
        return ["str", arg]
    if isinstance(arg, DType):
        return ["dtype", arg.name]
    if isinstance(arg, Enum):
        return ["enum", arg.kind, arg.value]
    return ["list", *(_describe_arg(a, counts) for a in arg)]
