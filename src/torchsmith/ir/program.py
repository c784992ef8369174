"""Program: what lowering makes of one functional graph, before any scheduling decision (no torch).

    Program  = (name, symbols, inputs, consts, buffers, body, write_backs, results)
    body     = (Stage | Check | Extern | Bind | Cond | Repeat)*            in program order
    Stage    = (axes: parallel* scan?, lets*, stores*)                     one loop nest; several stores: multi-output
    Store    = (buf, index, value, mode: set | add | mul | min | max, unique, mask?)
    Result   = Fresh(buf) | InputResult(i) | ViewResult(of, shape, strides, offset) | SizeResult(value)

Invariants (ir/verify.py holds them)
- A temp or output buffer is written by exactly one body element before anything reads it; "state" buffers and inputs may be
  written only by `write_backs`, which come after the last Check.
- What a Stage writes it touches under one name: no view of it is read there.
- Every Axis in a Stage is bound by its `axes` or by a Fold that contains it; every Var by `lets` (in order) or by a Fold.
- Indices are logical: one index Expr per dimension, in range wherever the mask holds.
- A `set` store without `unique` runs in index order, as eager does. `add|mul|min|max` stores accumulate into a buffer that an
  earlier element of the same Stage list has initialised: the only exception to single writing (`Stage.updates` names it).
- `loc` is the user's "file:line" and survives every pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .dtype import DType
from .expr import Axis, Const, Expr, Sym, Var, const, op
from .nested import leaves
from .target import CPU, Target

Role = Literal["input", "const", "temp", "output", "state"]
StoreMode = Literal["set", "add", "mul", "min", "max"]
Via = Literal["shim", "dispatcher", "python"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where element `index` of a buffer lies: offset + sum(index[i] * strides[i]), in elements.

    `splits` (axis, factor) come first and turn axis a into (a // f, a % f); `strides` then has one entry per split axis, in
    order, the inner halves last. `pad` is (lo, hi) per logical axis; `fill` names the value that padding holds.
    """

    strides: tuple[Expr, ...]
    offset: Expr
    splits: tuple[tuple[int, int], ...] = ()
    pad: tuple[tuple[int, int], ...] = ()
    fill: float | None = None


def point_number(parts: Iterable[tuple[Expr, Expr]]) -> Expr:
    """The row-major number of a point, of which each index is given with its extent."""
    total: Expr = const(0)
    for index, extent in parts:
        total = total * extent + index
    return total


def root_of(buffers: Mapping[str, Buffer], name: str) -> str:
    """The buffer whose memory this one is seen in."""
    while (base := buffers[name].storage_of) is not None:
        name = base
    return name


def dense(shape: tuple[Expr, ...], order: tuple[int, ...] | None = None) -> Layout:
    """Strides without gaps; `order` lists the dimensions from outermost to innermost (default: row-major)."""
    strides: list[Expr] = [const(1)] * len(shape)
    step: Expr = const(1)
    for d in reversed(order or range(len(shape))):
        strides[d] = step
        step = op("mul", step, shape[d])
    return Layout(tuple(strides), const(0))


@dataclass(frozen=True, slots=True)
class Buffer:
    """One array. `layout` None: the schedule chooses; given: this exact layout is required (inputs, results, extern arguments)."""

    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    layout: Layout | None
    role: Role
    storage_of: str | None = None
    loc: str = ""
    device: str = "cpu"  # device type of its memory


@dataclass(frozen=True, slots=True)
class Store:
    """`buf[index] mode= value` where mask holds. `unique`: no two iterations write one element."""

    buf: str
    index: tuple[Expr, ...]
    value: Expr
    mode: StoreMode = "set"
    unique: bool = True
    mask: Expr | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A loop nest over `axes` (outermost first). `scan`: the last axis is carried in order (cumsum).

    For a scan stage, `carry` names the state: ((Var, init), ...) and `carry_next` its value after the iteration; the stores see
    the value before `carry_next` is applied through the Vars and may use the `carry_next` expressions themselves.
    """

    axes: tuple[tuple[Axis, Expr], ...]
    stores: tuple[Store, ...]
    lets: tuple[tuple[Var, Expr], ...] = ()
    scan: bool = False
    carry: tuple[tuple[Var, Expr], ...] = ()
    carry_next: tuple[Expr, ...] = ()
    loc: str = ""
    origin: str = ""  # the operator's name, for reports only

    @property
    def place(self) -> str:
        """Operator and user's line, for reports."""
        return f"{self.origin} {self.loc}".strip()


@dataclass(frozen=True, slots=True)
class Check:
    """`cond` (a host expression; it may Load 0-d buffers) must hold, else the call reports `kind` with `message`."""

    cond: Expr
    kind: str
    message: str
    loc: str = ""


@dataclass(frozen=True, slots=True)
class BufArg:
    """A tensor argument of an Extern: the buffer by name."""

    buf: str


@dataclass(frozen=True, slots=True)
class Enum:
    """An argument of an Extern that is no tensor and no real number: kind in {"dtype", "layout", "device", "memory_format",
    "generator", "complex"}."""

    kind: str
    value: str


ExternArg = None | bool | int | float | str | Expr | DType | BufArg | Enum | tuple["ExternArg", ...]


@dataclass(frozen=True, slots=True)
class Extern:
    """A call into the host: `op` is the full overload name ("aten.convolution.default").

    args, kwargs follow the operator's schema. outs are buffer names, one per tensor result. `returned` "planned": outs are
    written in the memory and layout we planned (an out= variant); "as_given": the operator allocates, and the layouts of the
    outs are what it returns (checked against the buffers' layouts). `mutates`: argument buffers it writes. `binds`: index
    symbols it defines, each the size (out, dim) of a result: the only way a data-dependent size enters a program.
    """

    op: str
    args: tuple[ExternArg, ...]
    kwargs: tuple[tuple[str, ExternArg], ...]
    outs: tuple[str, ...]
    mutates: tuple[str, ...] = ()
    binds: tuple[tuple[Sym, int, int], ...] = ()
    returned: Literal["planned", "as_given"] = "as_given"
    via: Via = "python"
    loc: str = ""

    @property
    def leaves(self) -> list[Any]:
        """What the arguments hold, in order, sequences opened."""
        return leaves(self.args, [v for _, v in self.kwargs])

    @property
    def buffers(self) -> list[str]:
        """The tensors among the arguments."""
        return [a.buf for a in self.leaves if isinstance(a, BufArg)]

    @property
    def numbers(self) -> list[Expr]:
        """The arguments that are computed when it is called."""
        return [a for a in self.leaves if isinstance(a, Expr) and not isinstance(a, Const)]


@dataclass(frozen=True, slots=True)
class Bind:
    """Define a symbol from others (a derived size) or from a 0-d buffer (Load)."""

    sym: Sym
    value: Expr


@dataclass(frozen=True, slots=True)
class Cond:
    """Host branch on a 0-d bool: both sides write the same outs."""

    pred: Expr
    then: tuple[Element, ...]
    orelse: tuple[Element, ...]

    @property
    def inner(self) -> tuple[Element, ...]:
        return (*self.then, *self.orelse)


@dataclass(frozen=True, slots=True)
class Repeat:
    """Host loop: `body` runs `count` times with `sym` = 0, 1, ...; carried buffers are of role "state"."""

    sym: Sym
    count: Expr
    body: tuple[Element, ...]

    @property
    def inner(self) -> tuple[Element, ...]:
        return self.body


Element = Stage | Check | Extern | Bind | Cond | Repeat


@dataclass(frozen=True, slots=True)
class Fresh:
    """A result in its own new storage."""

    buf: str


@dataclass(frozen=True, slots=True)
class InputResult:
    """The result is input number `index` itself (same object in Python)."""

    index: int


@dataclass(frozen=True, slots=True)
class ViewResult:
    """The result views the storage of input `of` (an index) or of fresh result `of` (a buffer name).

    `offset` counts elements from the first element of `of` (an input's own storage offset comes on top). apart: it shares no element with
    a result that anybody sees, so it may be another tensor over the memory of `of` instead of a view that autograd knows.
    """

    of: int | str
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    offset: Expr
    dtype: DType
    apart: bool = False


@dataclass(frozen=True, slots=True)
class SizeResult:
    """A Python number: `value` of dtype index or i64 (int), f64 (float) or bool; it may Load a 0-d buffer."""

    value: Expr


Result = Fresh | InputResult | ViewResult | SizeResult


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size or scalar input: where the value comes from, and the range it was assumed to lie in (hi None: unbounded).

    origin: ("size", input, dim) | ("stride", input, dim) | ("scalar", input) | ("element", input): the value of a 0-d tensor in the host's
    memory, beside inputs on another device | ("bound",) for Bind/Extern.binds; or
    ("size", input, dim, scale, shift), where that size is scale * symbol + shift.
    """

    sym: Sym
    origin: tuple[str | int, ...]
    lo: int = 0
    hi: int | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """One graph, lowered. `inputs` name buffers in call order ("" for an unused input or a scalar)."""

    name: str
    symbols: tuple[Symbol, ...]
    inputs: tuple[str, ...]
    buffers: dict[str, Buffer]
    body: tuple[Element, ...]
    results: tuple[Result, ...]
    write_backs: tuple[tuple[str, str], ...] = ()  # (input buffer, buffer whose final value it takes), run last
    consts: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())  # reason codes met while lowering, for explain
    target: Target = CPU
    device: str = "cpu"  # where results go that no input gives a device, as torch writes it: "cuda:0"
    steady: tuple[str, ...] = ()  # inputs and results expected at the same address in the next call: constants, what is written in place,
    # gradients, and what forward hands to backward
