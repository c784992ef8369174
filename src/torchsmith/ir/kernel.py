"""Kernel: one fused loop nest with its tiling decisions taken; what emit prints (no torch).

    Kernel = (name, params, syms, axes, scratch, body, grid, grain, origins)
    Stmt   = Loop(axis, extent, kind, body, carry) | Let(var, value) | StoreStmt(buf, index, value, mode, mask)
           | Require(cond, message)                         of a device
           | Block(...)                                     a tile with a `meaning()` in the others: ir/blocks.py
    kind   = grid | thread | block | serial | vector | unroll | scan

The CPU calling convention of a printed kernel is fixed (emit/ prints it, emit/host.py calls it):

    void TS_KERNEL(void *const *bufs, const int64_t *syms, int64_t lo, int64_t hi);

bufs[i] is the base address of params[i] (offset 0), syms[j] the value of syms[j]; [lo, hi) is a range of the flattened `grid`.
Calls on disjoint ranges are independent and may run in any order on any thread. A kernel never fails and never allocates: rows it
must keep live in `scratch`, fixed-size arrays on its own stack.

Folds stay expressions: the emitter prints each as a loop at the outermost place where its operands are known, shares it between
components that differ in `pick`, and vectorises its innermost axis where it stands outside a `vector` loop (order "any" only: `init`
is then an identity of `combine`). Statements run in order; a Load of a buffer that the kernel itself writes sees the stores before it.

Invariants: params lists every buffer read or written, once, and memory that is written under one name (of two names for it nothing would
say which loads see the stores); an Axis is bound by exactly one enclosing Loop; at most one `vector`
loop on a path (serial and scan loops may stand inside: all lanes run them together); `grid` axes come first and are flattened
row-major into [lo, hi).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from . import dtype as dt
from .dtype import DType
from .expr import Axis, Expr, Fold, Load, Sym, Var, const, op, substitute, walk
from .program import Bind, Check, Cond, Extern, Layout, Program, Repeat, StoreMode
from .target import CPU, Target

AxisKind = Literal["grid", "thread", "block", "serial", "vector", "unroll", "scan"]


ZERO = const(0)


@dataclass(frozen=True, slots=True)
class Param:
    """A buffer as the kernel sees it: element (i, j, ...) lies at layout.offset + sum(i * stride). `shape` is for reports: in a kernel
    that several launches share it is the first one's."""

    buf: str
    dtype: DType
    shape: tuple[Expr, ...]
    layout: Layout
    written: bool


@dataclass(frozen=True, slots=True)
class Scratch:
    """A stack array of `size` elements (a constant), indexed by one Expr through a Load/Store of its name."""

    name: str
    dtype: DType
    size: int


@dataclass(frozen=True, slots=True)
class Let:
    """Bind `var` for the rest of the enclosing block, evaluated here."""

    var: Var
    value: Expr


@dataclass(frozen=True, slots=True)
class StoreStmt:
    """`buf[index] mode= value` where mask holds; buf is a Param or a Scratch."""

    buf: str
    index: tuple[Expr, ...]
    value: Expr
    mode: StoreMode = "set"
    mask: Expr | None = None


Message = str  # for people; no buffer's name


@dataclass(frozen=True, slots=True)
class Require:
    """`cond` must hold, else a device stops with `message`, and whoever uses it next is told: a Check that nobody waits for. Only
    languages of devices print it."""

    cond: Expr
    message: Message


@dataclass(frozen=True, slots=True)
class Loop:
    """for axis in [0, extent): body. A `scan` loop runs in order and carries `carry` = ((Var, init, next), ...): after each
    iteration the Vars take the values of `next` all at once; stores in the body see the values before. The emitter runs a `vector`
    loop many iterations at a time, so its body must be free of order."""

    axis: Axis
    extent: Expr
    kind: AxisKind
    body: tuple[Stmt, ...]
    carry: tuple[tuple[Var, Expr, Expr], ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """A statement that stands for a nest of the others, its `meaning()`: a tile with a text of its own (ir/blocks.py)."""

    OPEN: ClassVar[frozenset[str]] = frozenset()  # fields in which numbers may become arguments (schedule/share.py)
    STRIDED: ClassVar[bool] = True  # is it printed for any strides?

    def meaning(self) -> Loop:
        """The same in plain statements: what the verifier checks and the interpreter runs."""
        raise NotImplementedError


Stmt = Loop | Let | StoreStmt | Require | Block


@dataclass(frozen=True, slots=True)
class Part:
    """How a field holds expressions: `read(value)` gives them, `put(value, f)` the value with f of each."""

    read: Callable[[Any], Iterable[Expr]]
    put: Callable[[Any, Callable[[Expr], Expr]], Any]


_ONE = Part(lambda v: (v,), lambda v, f: f(v))
# A statement's expressions are declared by its fields' annotations; every walker reads this table.
PARTS: dict[str, Part] = {
    "Expr": _ONE,
    "Load": _ONE,
    "Expr | None": Part(lambda v: () if v is None else (v,), lambda v, f: None if v is None else f(v)),
    "tuple[Expr, ...]": Part(lambda v: v, lambda v, f: tuple(f(e) for e in v)),
    "tuple[tuple[Axis, Expr], ...]": Part(lambda v: (e for _, e in v), lambda v, f: tuple((a, f(e)) for a, e in v)),
    "tuple[tuple[Var, Expr, Expr], ...]": Part(
        lambda v: (e for _, a, b in v for e in (a, b)), lambda v, f: tuple((x, f(a), f(b)) for x, a, b in v)
    ),
}
BUFFER, BODY = "str", "tuple[Stmt, ...]"  # of a field that names a stored buffer, and of one that holds statements
OTHER = frozenset({"Var", "Axis", "int", "bool", "tuple[int, ...]", "StoreMode", "AxisKind", "Message"})  # others hold none


_FOUND: dict[type[Stmt], tuple[tuple[str, str], ...]] = {}


def parts_of(s: Stmt) -> tuple[tuple[str, str], ...]:
    """(field, annotation) of what a statement of this kind holds to walk. Raises TypeError for an annotation nobody knows."""
    found = _FOUND.get(type(s))
    if found is None:
        every = [(f.name, str(f.type)) for f in fields(s)]
        for name, kind in every:
            if kind not in PARTS and kind not in (BUFFER, BODY) and kind not in OTHER:
                raise TypeError(f"{type(s).__name__}.{name}: say in PARTS how {kind} holds expressions")
        found = _FOUND[type(s)] = tuple((n, kind) for n, kind in every if kind not in OTHER)
    return found


def own_expressions(s: Stmt) -> tuple[Expr, ...]:
    """Every expression in a statement itself, in the order of its fields."""
    return tuple(e for name, kind in parts_of(s) if kind in PARTS for e in PARTS[kind].read(getattr(s, name)))


def expressions(s: Stmt) -> tuple[Expr, ...]:
    """Every expression in a statement and the statements it holds."""
    return tuple(e for x in statements((s,)) for e in own_expressions(x))


def rewrite(s: Stmt, table: dict[Expr, Expr], rename: dict[str, str]) -> Stmt:
    """The statement, and those it holds, with expressions replaced by `table` and stored buffers by `rename`."""

    def put(kind: str, value: Any) -> Any:
        if kind == BUFFER:
            return rename.get(value, value)
        return tuple(rewrite(x, table, rename) for x in value) if kind == BODY else PARTS[kind].put(value, lambda e: substitute(e, table))

    return replace(s, **{name: put(kind, getattr(s, name)) for name, kind in parts_of(s)})


def statements(body: Iterable[Stmt]) -> Iterator[Stmt]:
    """Every statement, loops before what they hold."""
    for s in body:
        yield s
        if isinstance(s, Loop):
            yield from statements(s.body)


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision of speed that may be taken by measuring: `options` name the candidates, the default first; equal keys, equal decision.
    `what` is for people."""

    key: str
    options: tuple[str, ...]
    what: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """A hint without meaning, for languages that compute on blocks: `size` (a power of two) values of `axis` are there at once.

    how: "lanes" of a grid axis, which a program takes `size` of; "row": all of an inner axis (a Fold's, a Loop's), whose extent is at most
    `size`; "steps" of an inner axis, one behind the other; "dot": the same of a Fold that adds products up (ir/folds.py:multiply_add), as
    products of matrices whose rows and columns are the last two grid axes. Axes without a tile are walked one value at a time.
    """

    axis: Axis
    size: int
    how: Literal["lanes", "row", "steps", "dot"]


def values_first(syms: Iterable[Sym]) -> tuple[Sym, ...]:
    """The symbols of a kernel in the order of its arguments: values, which differ from call to call, before sizes."""
    return tuple(sorted(dict.fromkeys(syms), key=lambda s: s.dtype is dt.index))


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch. `grid` extents multiply to the flattened range; `grain` is the least number of grid items worth a thread.

    tiles, launch: hints for languages that compute on blocks; launch = (warps of a program, stages of its pipelined loops).
    """

    name: str
    params: tuple[Param, ...]
    syms: tuple[Sym, ...]
    grid: tuple[tuple[Axis, Expr], ...]
    grain: Expr
    scratch: tuple[Scratch, ...]
    body: tuple[Stmt, ...]
    target: Target = CPU
    origins: tuple[str, ...] = ()  # operator names and user lines, for reports
    choice: Choice | None = None
    ranges: tuple[tuple[Sym, int, int | None], ...] = ()  # what is known of `syms`: least and greatest value
    kind: str = ""  # the template that made it, for reports
    tiles: tuple[Tile, ...] = ()
    launch: tuple[int, int] = (4, 2)

    @property
    def programs(self) -> Expr:
        """How many programs run, each on one block of the grid."""
        sizes = {t.axis: t.size for t in self.tiles if t.how == "lanes"}
        total: Expr = const(1)
        for axis, extent in self.grid:
            size = sizes.get(axis, 1)
            total = total * (extent if size == 1 else op("floordiv", extent + (size - 1), const(size)))
        return total


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A Program whose stages have become kernels. `program` carries symbols, inputs, buffers (layouts now chosen), results and
    write-backs; `body` replaces program.body, in order."""

    program: Program
    body: tuple[Kernel | Check | Extern | Bind | Cond | Repeat, ...]


def kind_of(kernel: Kernel) -> str:
    """What a kernel is, for reports."""
    if kernel.kind:
        return kernel.kind
    if any(isinstance(e, Fold) for s in kernel.body for root in expressions(s) for e in walk(root)):
        return "reduction"
    stores = [s for s in statements(kernel.body) if isinstance(s, StoreStmt)]
    return "copy" if stores and all(isinstance(s.value, Load) for s in stores) else "pointwise"
