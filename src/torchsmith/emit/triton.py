"""Kernel -> Triton text: one module with one `@triton.jit` function, the same text for the same kernel.

In: a Kernel whose target prints Triton: plain statements, tiles as hints. Out: Python text whose first line is a comment with what the
compiler must be told: {"name", "args": [[name, type], ...], "warps", "stages"}. The function is named for what it computes. Names are canonical (p0, s0, v0), so that equal kernels give equal
text whatever their buffers are called.

How: every axis with a tile is one dimension of blocks: grid axes first, the inner axis ("row" or "steps") last; blocks have size 1 in
dimensions that a value does not vary along, and broadcast. Every other inner axis is a scalar loop. Expressions are printed once each, in
the outermost open block where their operands are known, as in emit/c.py. A Fold over a tiled axis is one tl.reduce at its end, with
accumulators as wide as the tile where the axis is walked in steps; any other Fold is a scalar loop over blocks of states.
Masks: what lies beyond an axis's extent is neither loaded nor stored, and does not change a Fold's state.

A kernel may store into a buffer that it loads (in place) only at the index of that load; a barrier stands between.

A thread waits for what it stores before it goes on, so stores come last: what they wait for is on its way at the same time.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ..codes import Unsupported
from ..ir import dtype as dt
from ..ir.bounds import Ranges
from ..ir.dtype import DType
from ..ir.expr import Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, const, op, substitute, walk
from ..ir.folds import multiply_add
from ..ir.kernel import Kernel, Let, Loop, Param, Require, Stmt, StoreStmt, Tile, expressions, own_expressions
from ..ir.linear import const_of, linear
from .triton_ops import TYPES, spell
from .values import power

POINTERS = {"f64": "*fp64", "f32": "*fp32", "bf16": "*bf16", "f16": "*fp16", "i64": "*i64", "i32": "*i32", "i16": "*i16", "i8": "*i8",
            "u8": "*u8", "bool": "*i1"}  # fmt: skip
APART = 400  # nodes of a body up to which it is printed twice
SHORT = 32  # trips of a Fold that are written out
LATER, EACH = 64, 16  # registers of a thread for values whose stores come last: of all of them, of each
# The first statement of a kernel, on architectures that have it: from here on what the kernels before this one wrote can be read, and what
# they read can be written (csrc/native/cuda.c launches it while the last of them runs).
ENTRY = "griddepcontrol.wait;"
WORD = 2**31


@dataclass(frozen=True, slots=True)
class Val:
    """A printed value: its text (a name or a literal), dtype, the tiled axes that it varies along; `wide`: an index held in 64 bits."""

    text: str
    dtype: DType
    axes: frozenset[Axis] = frozenset()
    wide: bool = False


@dataclass
class Scope:
    """An open block: what it has printed, what is bound in it, the conditions under which its iterations exist."""

    lines: list[str] = field(default_factory=list)
    memo: dict[Expr, Val] = field(default_factory=dict)
    folds: dict[Expr, list[Val]] = field(default_factory=dict)
    halves: dict[str, str] = field(default_factory=dict)
    bound: list[Expr] = field(default_factory=list)


class Emitter:
    """State of printing one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.tiles: dict[Axis, Tile] = {t.axis: t for t in kernel.tiles}
        grid = [a for a, _ in kernel.grid if a in self.tiles and self.tiles[a].size > 1]
        inner = [t.axis for t in kernel.tiles if t.how not in ("lanes", "dot")]
        self.slots: dict[Axis, int] = {a: k for k, a in enumerate(grid)} | dict.fromkeys(inner, len(grid))
        self.rank = len(grid) + bool(inner)
        self.ranges = Ranges({s: (min(lo, 0), hi) for s, lo, hi in kernel.ranges}, sizes=True)
        self.params: dict[str, tuple[str, Param]] = {p.buf: (f"p{i}", p) for i, p in enumerate(kernel.params)}
        self.written = {p.buf for p in kernel.params if p.written}
        self.functions: dict[str, str] = {}
        self.scopes: list[Scope] = [Scope()]
        self.level: dict[Expr, int] = {}
        self.masks: dict[Axis, Val] = {}  # of axes whose tiles reach beyond their extent
        self.names: dict[str, itertools.count[int]] = {}
        self.free_memo: dict[Expr, frozenset[Expr]] = {}
        self.axes_memo: dict[Expr, frozenset[Axis]] = {}
        self.var_axes: dict[Expr, frozenset[Axis]] = {}
        self.loaded: set[str] | None = None
        self.later: list[tuple[str, str, int]] = []  # stores of the open block that come last: buffer, text, registers of a thread
        self.edge: tuple[Axis, Expr, str, int, bool] | None = None  # the axis of blocks, where full ones are printed apart
        # of 16-bit numbers 11 bits are kept: the device's own approximations are exact enough
        self.fast = not any(p.dtype in (dt.f32, dt.f64) for p in kernel.params)

    # ------------------------------------------------------------ text
    def fresh(self, kind: str = "v") -> str:
        return f"{kind}{next(self.names.setdefault(kind, itertools.count()))}"

    def line(self, text: str, at: int | None = None) -> None:
        self.scopes[-1 if at is None else at].lines.append(text)

    def define(self, text: str, v: Val, at: int) -> Val:
        name = self.fresh()
        self.line(f"{name} = {text}", at)
        return Val(name, v.dtype, v.axes, v.wide)

    def open(self, head: str, bound: Iterable[Expr] = ()) -> None:
        self.scopes.append(Scope([head], bound=list(bound)))
        for b in self.scopes[-1].bound:
            self.level[b] = len(self.scopes) - 1

    def bind(self, e: Expr, v: Val) -> None:
        """`e` is known from here to the end of the open block."""
        self.scopes[-1].memo[e] = v
        self.scopes[-1].bound.append(e)
        self.level[e] = len(self.scopes) - 1

    def close(self, inline: bool = False) -> None:
        """End the open block; inline: it was none in the text, what was bound in it is forgotten all the same."""
        scope = self.scopes.pop()
        for b in scope.bound:
            self.level.pop(b, None)
            if isinstance(b, Axis):
                self.masks.pop(b, None)
        if inline:
            self.scopes[-1].lines.extend(scope.lines[1:])
            return
        body = scope.lines[1:] or ["pass"]
        self.scopes[-1].lines.append(scope.lines[0])
        self.scopes[-1].lines.extend("  " + text for text in body)

    # ------------------------------------------------------------ what an expression needs
    def free(self, e: Expr) -> frozenset[Expr]:
        """Axes, Vars and loads of what the kernel writes below `e` that are bound outside of it."""
        done = self.free_memo.get(e)
        if done is None:
            if isinstance(e, Axis | Var):
                done = frozenset((e,))
            else:
                done = frozenset[Expr]().union(*(self.free(a) for a in e.args)) if e.args else frozenset()
                if isinstance(e, Load) and e.buf in self.written:
                    done |= {e}
                if isinstance(e, Fold):
                    done -= {*e.axes, *(e.state(i, s) for i in range(len(e.init)) for s in "ab")}
            self.free_memo[e] = done
        return done

    def home(self, e: Expr) -> int:
        """The outermost open block where `e` can be printed."""
        here = 0
        for leaf in self.free(e):
            here = max(here, len(self.scopes) - 1 if isinstance(leaf, Load) else self.level.get(leaf, 0))
        return here

    def axes_of(self, e: Expr) -> frozenset[Axis]:
        """The tiled axes that `e` varies along."""
        found = set[Axis]()
        for leaf in self.free(e):
            if isinstance(leaf, Axis) and leaf in self.slots:
                found.add(leaf)
            elif isinstance(leaf, Var):
                found |= self.var_axes.get(leaf, frozenset())
            elif isinstance(leaf, Load):
                for a in leaf.args:
                    found |= self.axes_of(a)
        return frozenset(found)

    def shape(self, axes: Iterable[Axis]) -> str:
        sizes = ["1"] * self.rank
        for a in axes:
            sizes[self.slots[a]] = str(self.tiles[a].size)
        return f"[{', '.join(sizes)}]"

    def index_fits(self, e: Expr) -> bool:
        """Do an index expression and all index expressions below it lie within 32 bits?"""
        lo, hi = self.ranges.interval(e)
        if lo is None or hi is None or lo < -WORD or hi >= WORD:
            return False
        return all(self.index_fits(a) for a in e.args if a.dtype is dt.index and not isinstance(a, Load))

    # ------------------------------------------------------------ values
    def emit(self, e: Expr) -> Val:
        if isinstance(e, Const):
            return Val(literal(e), e.dtype)
        at = self.home(e)
        found = self.scopes[at].memo.get(e)
        if found is None:
            found = self.scopes[at].memo[e] = PRINTERS[type(e)](self, e, at)
        return found

    def single(self, v: Val, at: int | None = None) -> str:
        """float16 and bfloat16 as float32; anything else, and literals, as they are."""
        if v.dtype not in dt.HALF or is_literal(v.text):
            return v.text
        for scope in self.scopes:
            if v.text in scope.halves:
                return scope.halves[v.text]
        name = f"{v.text}s"
        where = len(self.scopes) - 1 if at is None else at
        self.line(f"{name} = {v.text}.to(tl.float32)", where)
        self.scopes[where].halves[v.text] = name
        return name

    def widen(self, v: Val) -> str:
        return v.text if v.wide or is_literal(v.text) else f"tl.cast({v.text}, tl.int64)"

    def as_block(self, v: Val, axes: frozenset[Axis], dtype: DType | None = None) -> str:
        """`v` with the full shape of `axes`; of no axes a value of rank 0."""
        dtype = dtype or v.dtype
        kind = "tl.int64" if dtype is dt.index else TYPES[dtype.name]
        if is_literal(v.text):
            return f"tl.full({self.shape(axes) if axes else '[]'}, {v.text}, {kind})"
        text = self.widen(v) if dtype is dt.index else v.text
        return f"tl.broadcast_to({text}, {self.shape(axes)})" if axes and v.axes != axes else text

    def call(self, name: str, t: str, args: tuple[str, ...], small: str = "") -> str:
        """small: the 16-bit dtype whose numbers the operands are."""
        found = spell(name, t, args, self.fast, small if self.fast else "")
        if found is None:
            raise Unsupported("EMI001", detail=f"operator {name} on {t}")
        self.functions.update(found.functions)
        return found.text

    def forget(self, buf: str) -> None:
        """A store to `buf`: what was read from it before is stale."""
        for scope in self.scopes:
            for e in [e for e in scope.memo if any(isinstance(x, Load) and x.buf == buf for x in self.free(e))]:
                if not isinstance(e, Var):
                    del scope.memo[e]

    # ------------------------------------------------------------ masks
    def mask(self, axes: Iterable[Axis], *more: Val | None) -> tuple[str, frozenset[Axis]]:
        """The condition that lanes along `axes` exist and `more` holds ("" for always), and the axes it varies along."""
        parts = [self.masks[a] for a in sorted(axes, key=lambda a: (self.slots[a], a.name)) if a in self.masks]
        parts += [m for m in more if m is not None and m.text != "True"]
        return " & ".join(p.text for p in parts), frozenset[Axis]().union(*(p.axes for p in parts)) if parts else frozenset()

    def is_loaded(self, buf: str) -> bool:
        """Does the kernel load what it stores?"""
        if self.loaded is None:
            self.loaded = {x.buf for s in self.kernel.body for root in expressions(s) for x in walk(root) if isinstance(x, Load)}
        return buf in self.loaded

    def address(self, buf: str, index: tuple[Expr, ...]) -> tuple[str, frozenset[Axis]]:
        """(pointer text, axes) of an element."""
        name, p = self.params[buf]
        total = linear(p.layout.offset)
        for i, stride in zip(index, p.layout.strides, strict=True):
            if const_of(i) != 0:
                total = total.plus(linear(i), stride)
        flat = linear(total.expr()).expr()
        if const_of(flat) == 0:
            return name, frozenset()
        v = self.emit(flat)
        return f"{name} + {v.text}", v.axes

    # ------------------------------------------------------------ axes
    def declare(self, axis: Axis, extent: Expr, start: str, size: int, wide: bool) -> None:
        """Bind a tiled axis: start + arange along its own dimension, and its mask."""
        self.ranges.bind(axis, extent)
        slot = self.slots[axis]
        lanes = f"tl.arange(0, {size})"
        if self.rank > 1:
            lanes += f"[{', '.join(':' if k == slot else 'None' for k in range(self.rank))}]"
        name = self.fresh("i")
        self.line(f"{name} = {f'{start} + {lanes}' if start else lanes}")
        self.bind(axis, Val(name, dt.index, frozenset((axis,)), wide))
        n = const_of(extent)
        if not n or n % size:  # of no elements one lane is there, and does nothing
            bound = self.emit(extent)
            mask = self.fresh("m")
            self.line(f"{mask} = {name} < {bound.text}")
            self.masks[axis] = Val(mask, dt.bool_, bound.axes | {axis})

    def grid(self) -> None:
        axes = self.kernel.grid
        if not axes:
            return
        hi = self.ranges.interval(self.kernel.programs).hi
        wide = hi is None or hi >= WORD
        self.line("g = tl.program_id(0)")
        rest = "g"
        for k in range(len(axes) - 1, -1, -1):
            axis, extent = axes[k]
            tile = self.tiles.get(axis)
            size = tile.size if tile is not None else 1
            blocks = self.emit(extent if size == 1 else op("floordiv", extent + (size - 1), const(size)))
            if k == 0:
                part = rest
            else:
                part = self.fresh("g")
                self.line(f"{part} = {rest} % {blocks.text}")
                up = self.fresh("g")
                self.line(f"{up} = {rest} // {blocks.text}")
                rest = up
            far = self.ranges.interval(extent).hi
            is_wide = wide or far is None or far + size >= WORD
            start = f"{part}.to(tl.int64)" if is_wide else part
            self.ranges.bind(axis, extent)
            if size == 1:
                name = self.fresh("i")
                self.line(f"{name} = {start}")
                self.bind(axis, Val(name, dt.index, frozenset(), is_wide))
            elif self.is_apart(axis, extent, size):
                self.edge = (axis, extent, f"{start} * {size}", size, is_wide)
            else:
                self.declare(axis, extent, f"{start} * {size}", size, is_wide)

    def is_apart(self, axis: Axis, extent: Expr, size: int) -> bool:
        """Do programs that are full have a text of their own? Where elements are mapped one by one masks cost the wide loads and stores."""
        n = const_of(extent)
        lonely = all(t.axis is axis or t.size == 1 for t in self.kernel.tiles)
        nodes = sum(1 for s in self.kernel.body for _ in walk(*expressions(s)))
        return lonely and (not n or n > size) and not (n and n % size == 0) and nodes <= APART and not any(
            isinstance(s, Loop) or (isinstance(s, StoreStmt) and s.mode != "set") for s in self.kernel.body
        )

    def both(self) -> None:
        """The body for programs that are full, and for the last one."""
        assert self.edge is not None
        axis, extent, start, size, wide = self.edge
        bound = self.emit(extent)
        for head in (f"if {start} + {size} <= {bound.text}:", "else:"):
            self.open(head)
            self.declare(axis, extent, start, size, wide)
            if head != "else:":
                self.masks.pop(axis, None)
            self.ahead()
            self.block(self.kernel.body)
            self.store(last=True)
            self.close()

    # ------------------------------------------------------------ statements
    def block(self, body: tuple[Stmt, ...]) -> None:
        for k, stmt in enumerate(body):
            printer = STATEMENTS.get(type(stmt))
            if printer is None:
                raise Unsupported("EMI001", detail=f"{type(stmt).__name__} in Triton")
            waiting = {buf for buf, _, _ in self.later if self.is_loaded(buf)}
            if waiting and any(isinstance(x, Load) and x.buf in waiting for x in walk(*expressions(stmt))):
                self.store()
            if isinstance(stmt, Let) and isinstance(stmt.value, Fold):
                self.ask_ahead(stmt, body[k + 1 :])
            printer(self, stmt)

    def registers(self, axes: Iterable[Axis], dtype: DType) -> int:
        """Of one thread, for a value that varies along `axes`."""
        elements = math.prod(self.tiles[a].size for a in axes)
        return -(-elements // (32 * self.kernel.launch[0])) * max(1, dtype.itemsize // 4)

    def ahead(self) -> None:
        """Loads beside Folds come first: behind a Fold, whose threads wait for each other, they would be waited for once more."""
        body = list(taken(self.kernel.body))
        if not any(isinstance(x, Fold) for s in body for x in walk(*own_expressions(s))):
            return
        left, stored = LATER, set[str]()
        for s in itertools.takewhile(lambda s: not isinstance(s, Require), body):
            for x in beside_folds(own_expressions(s)):
                known = all(a in self.level or a is x for a in self.free(x))
                size = self.registers(self.axes_of(x), x.dtype) if known and x.buf not in stored else LATER + 1
                if size <= min(EACH, left):
                    left -= size
                    self.emit(x)
            stored |= {s.buf} if isinstance(s, StoreStmt) else set()

    def store(self, last: bool = False) -> None:
        """Print the stores that wait; last: nothing comes behind them."""
        barrier = any(self.is_loaded(buf) for buf, _, _ in self.later)
        if barrier:
            self.line("tl.debug_barrier()")
        for _, text, _ in self.later:
            self.line(text)
        if barrier and not last:
            self.line("tl.debug_barrier()")
        self.later = []

    def store_later(self, buf: str, text: str, axes: frozenset[Axis]) -> None:
        """A store, at the end of the open block where its value fits beside those that wait as well, else here."""
        registers, waiting = self.registers(axes, self.params[buf][1].dtype), self.later
        if registers > EACH and all(other != buf for other, _, _ in waiting):
            self.later = [(buf, text, registers)]
            self.store()
            self.later = waiting
            return
        if registers + sum(n for _, _, n in waiting) > LATER:
            self.store()
        self.later.append((buf, text, registers))

    def ask_ahead(self, let: Let, later: tuple[Stmt, ...]) -> None:
        """Before a row's Fold: the loads of a later Fold along this row that reads its value. They need not wait for it."""
        for stmt in later:
            fold = stmt.value if isinstance(stmt, Let) else None
            if not isinstance(fold, Fold) or len(fold.axes) != 1 or let.var not in set(walk(*fold.update)):
                continue
            (axis,), (extent,) = fold.axes, fold.extents
            tile = self.tiles.get(axis)
            if tile is None or tile.how != "row" or fold.order != "any" or not fold.combine or const_of(extent) in (None, 0):
                continue
            if axis not in self.level:
                self.declare(axis, extent, "", tile.size, False)
            for x in walk(*fold.update):
                if not isinstance(x, Load) or x.mask is not None or x.buf in self.written or any(isinstance(i, Load) for i in walk(*x.index)):
                    continue
                if axis in self.free(x) and all(leaf in self.level for leaf in self.free(x)):
                    self.emit(x)

    def text(self) -> str:
        k = self.kernel
        args = [[f"p{i}", POINTERS[p.dtype.name]] for i, p in enumerate(k.params)]
        for i, s in enumerate(k.syms):
            lo, hi = self.ranges.interval(s) if s.dtype is dt.index else (None, None)
            wide = hi is None or lo is None or hi >= WORD or lo < -WORD
            args.append([f"s{i}", "fp64" if s.dtype is dt.f64 else "i64" if wide else "i32"])
            self.scopes[0].memo[s] = Val(f"s{i}", s.dtype, wide=wide)
            if s.dtype is dt.bool_:
                self.line(f"b{i} = s{i} != 0")
                self.scopes[0].memo[s] = Val(f"b{i}", s.dtype)
            elif s.dtype not in (dt.f64, dt.i64, dt.index):
                self.line(f"b{i} = s{i}.to({TYPES[s.dtype.name]})")
                self.scopes[0].memo[s] = Val(f"b{i}", s.dtype)
        self.grid()
        if self.edge is None:
            self.ahead()
            self.block(k.body)
            self.store(last=True)
        else:
            self.both()
        name = function_name(k)
        head = json.dumps({"name": name, "args": args, "warps": k.launch[0], "stages": k.launch[1]})
        body = "\n".join("  " + text for text in self.scopes[0].lines or ["pass"])
        names = ", ".join(name for name, _ in args)
        before = "".join(f"\n\n{text.rstrip()}\n" for text in self.functions.values())
        wait = f'  if WAITS:\n    tl.inline_asm_elementwise("{ENTRY}", "=r", [], tl.int32, False, 1)\n' if ENTRY else ""
        return (f"# {head}\nimport triton\nimport triton.language as tl\n\nWAITS = tl.constexpr(False)\n{before}\n\n@triton.jit\n"
                f"def {name}({names}):\n{wait}{body}\n")  # fmt: skip


PLAIN = frozenset({"add", "sub", "mul", "div", "where", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"})  # of nearly every kernel
FOLDED = {"add": "sum", "mul": "prod"}
MOST_WORDS = 5


def function_name(kernel: Kernel) -> str:
    """What profilers show: "tsk", what is folded, and the operators on values of tensors, rare ones first. Equal kernels, equal names:
    nothing is asked but what the text says."""
    products = {t.axis for t in kernel.tiles if t.how == "dot"}
    computing = [s for s in kernel.body if not isinstance(s, Require)]
    nodes = list(walk(*(e for s in computing for e in expressions(s))))
    updates = {u for e in nodes if isinstance(e, Fold) for u in (*e.update, *e.combine)}
    folds: set[str] = set()
    operators: set[str] = set()
    for e in nodes:
        if isinstance(e, Fold):
            update = e.update[e.pick]
            word = FOLDED.get(update.name, update.name) if isinstance(update, Op) else "fold"
            folds.add("dot" if products.intersection(e.axes) else word)
        elif isinstance(e, Op) and e not in updates and any(a.dtype is not dt.index for a in e.args):
            operators.add(e.name)
    words = [*sorted(folds), *sorted(operators - folds, key=lambda name: (name in PLAIN, name))]
    return "_".join(["tsk", *(words[:MOST_WORDS] or ["copy" if computing else "check"])])


# ---------------------------------------------------------------- expressions


def taken(body: Iterable[Stmt]) -> Iterator[Stmt]:
    """The statements that surely run: those of no loop, and of loops with known trips."""
    for s in body:
        if not isinstance(s, Loop):
            yield s
        elif const_of(s.extent):
            yield from taken(s.body)


def beside_folds(roots: Iterable[Expr]) -> list[Load]:
    """The Loads that no Fold holds, each once, those in indices first."""
    seen: dict[Expr, None] = {}
    for e in roots:
        _see(e, seen)
    return [e for e in seen if isinstance(e, Load)]


def _see(e: Expr, seen: dict[Expr, None]) -> None:
    if e not in seen and not isinstance(e, Fold):
        for a in e.args:
            _see(a, seen)
        seen[e] = None


def is_literal(text: str) -> bool:
    """A number of Python's, which takes the type of what it meets."""
    return not text[0].isalpha() or text in ("True", "False") or text.startswith("float(")


def literal(e: Const) -> str:
    v = e.value
    if e.dtype is dt.bool_:
        return "True" if v else "False"
    if e.dtype.is_float:
        if v != v:
            return 'float("nan")'
        if math.isinf(v) or (e.dtype is dt.f32 and abs(v) > 3.4028235677973366e38):
            return 'float("inf")' if v > 0 else 'float("-inf")'
        text = repr(float(v))
        if text == "-0.0":  # to Triton 3.6 it is as good as 0.0
            bits, kind = (64, "tl.float64") if e.dtype is dt.f64 else (32, "tl.float32")
            return f"tl.full([], {-(1 << (bits - 1))}, tl.int{bits}).to({kind}, bitcast=True)"
        if e.dtype is dt.f64:
            return f"tl.full([], {text}, tl.float64)"
        return f"({text})" if text[0] == "-" else text
    return f"({int(v)})" if v < 0 else str(int(v))


def _print_sym(self: Emitter, e: Expr, at: int) -> Val:
    raise KeyError(f"kernel does not list the symbol {e}")


def _print_leaf(self: Emitter, e: Expr, at: int) -> Val:
    raise KeyError(f"{e} is not bound")


def convert_text(source: DType, target: DType, a: str) -> str:
    """`a` of `source` as `target`: small floats through float32, floats to small integers through int32 (what is out of range wraps)."""
    s, t = (d.name if d is not dt.index else "i64" for d in (source, target))
    if s == t:
        return a
    if t == "bool":
        return f"({convert_text(source, dt.f32, a)} != 0)" if source in dt.HALF else f"({a} != 0)"
    if source in dt.HALF and target is not dt.f32:
        return convert_text(dt.f32, target, f"{a}.to(tl.float32)")
    if target in dt.HALF and source is not dt.f32:
        return f"{convert_text(source, dt.f32, a)}.to({TYPES[t]})"
    if source.is_float and t in ("i16", "i8"):
        return f"{a}.to(tl.int32).to({TYPES[t]})"
    if source.is_float and t == "u8":
        return f"{a}.to(tl.int64).to(tl.uint8)"
    return f"tl.cast({a}, {TYPES[t]})" if source is dt.index else f"{a}.to({TYPES[t]})"  # a loop's variable may be a number of Python's


def _print_cast(self: Emitter, e: Expr, at: int) -> Val:
    v = self.emit(e.args[0])
    target, text = e.dtype, v.text
    if is_literal(text):
        text = self.as_block(v, frozenset())
    if target is dt.index:
        fits = self.index_fits(e) and v.dtype.name in ("i32", "i16", "i8", "u8", "bool", "f32")
        return self.define(f"{text}.to({'tl.int32' if fits else 'tl.int64'})", Val("", target, v.axes, not fits), at)
    if v.dtype is dt.index and not v.wide and target is dt.i64:
        return self.define(f"tl.cast({text}, tl.int64)", Val("", target, v.axes), at)
    return self.define(convert_text(v.dtype, target, text), Val("", target, v.axes), at)


def _print_op(self: Emitter, e: Expr, at: int) -> Val:
    assert isinstance(e, Op)
    special = SPECIAL.get(e.name)
    if special is not None:
        return special(self, e, at)
    kind = e.args[-1].dtype  # what is computed on
    if kind is dt.index:
        return _index_op(self, e, at)
    vals = [self.emit(a) for a in e.args]
    axes = frozenset[Axis]().union(*(v.axes for v in vals))
    if kind in dt.HALF and e.name != "where":
        texts = [self.single(v, at) for v in vals]
        if e.name not in INFIX or all(map(is_literal, texts)):
            texts = [self.as_block(Val(x, dt.f32), frozenset()) if is_literal(x) else x for x in texts]
        text = self.call(e.name, "f32", tuple(texts))
        if e.dtype in dt.HALF:
            text = f"({text}).to({TYPES[e.dtype.name]})"
        return self.define(text, Val("", e.dtype, axes), at)
    if e.name == "where":
        texts = [v.text for v in vals]
        if all(isinstance(a, Const) for a in e.args[1:]) or kind in dt.HALF:  # literals have no type of their own
            texts[1:] = [self.as_block(v, frozenset()) if isinstance(a, Const) else v.text for v, a in zip(vals[1:], e.args[1:], strict=True)]
        return self.define(self.call("where", kind.name, tuple(texts)), Val("", e.dtype, axes), at)
    if e.name not in INFIX or all(isinstance(a, Const) for a in e.args):
        texts = [self.as_block(v, frozenset()) if isinstance(a, Const) else v.text for v, a in zip(vals, e.args, strict=True)]
    else:
        texts = [v.text for v in vals]
    if kind is dt.bool_ and e.name in ("lt", "le", "gt", "ge"):  # a bit is no sign
        texts = [f"{x}.to(tl.int32)" for x in texts]
    sources = {a.arg.dtype for a in e.args if isinstance(a, Cast)}
    small = sources.pop().name if len(sources) == 1 and all(isinstance(a, Cast) and a.arg.dtype in dt.HALF for a in e.args) else ""
    return self.define(self.call(e.name, kind.name, tuple(texts), small), Val("", e.dtype, axes), at)


# operators between whose operands a literal may stand
INFIX = frozenset({"add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "bitand", "bitor"})


def _index_op(self: Emitter, e: Op, at: int) -> Val:
    """Indices: 32 bits where all that is computed fits."""
    vals = [self.emit(a) for a in e.args]
    axes = frozenset[Axis]().union(*(v.axes for v in vals))
    wide = not all(self.index_fits(a) for a in e.args if a.dtype is dt.index) or (e.dtype is dt.index and not self.index_fits(e))
    texts = [self.widen(v) if wide and v.dtype is dt.index else v.text for v in vals]
    if e.name in ("floordiv", "mod") and const_of(e.args[1]) == 0:
        texts[1] = "1"  # an empty dimension's size: this never runs, and Triton's passes fail on it
    if wide and all(isinstance(a, Const) for a in e.args):
        texts[0] = f"tl.full([], {texts[0]}, tl.int64)"
    if e.name in ("floordiv", "mod"):
        lo, least = self.ranges.interval(e.args[0]).lo, self.ranges.interval(e.args[1]).lo
        if lo is not None and lo >= 0 and least is not None and least >= 0:
            text = f"({texts[0]} {'//' if e.name == 'floordiv' else '%'} {texts[1]})"
        else:
            text = self.call(e.name, "i64" if wide else "i32", tuple(texts))
    else:
        text = self.call(e.name, "i64" if wide else "i32", tuple(texts))
    if all(map(is_literal, texts)):
        text = f"tl.full([], {text}, {'tl.int64' if wide else 'tl.int32'})"
    return self.define(text, Val("", e.dtype, axes, wide and e.dtype is dt.index), at)


def _print_powi(self: Emitter, e: Op, at: int) -> Val:
    v, n, result = power(self, e, at)
    if not result:
        return self.define(self.as_block(Val("1.0" if v.dtype.is_float else "1", v.dtype), v.axes), v, at)
    if n < 0:
        result = self.call("div" if v.dtype.is_float else "truncdiv", v.dtype.name, (self.as_block(Val("1", v.dtype), frozenset()), result))
    return self.define(result, v, at)


def _print_bitcast(self: Emitter, e: Op, at: int) -> Val:
    v = self.emit(e.args[0])
    if e.dtype.itemsize != v.dtype.itemsize or dt.bool_ in (e.dtype, v.dtype):
        raise Unsupported("EMI001", detail="bitcast between sizes")
    text = self.as_block(v, frozenset()) if isinstance(e.args[0], Const) else v.text
    return self.define(f"{text}.to({TYPES[e.dtype.name]}, bitcast=True)", Val("", e.dtype, v.axes), at)


def _print_ldexp(self: Emitter, e: Op, at: int) -> Val:
    a, b = (self.emit(x) for x in e.args)
    if a.dtype not in (dt.f32, dt.f64):
        raise Unsupported("EMI001", detail="ldexp on half floats")
    found = self.call("ldexp", a.dtype.name, (self.as_block(a, frozenset()), self.as_block(b, frozenset())))
    return self.define(found, Val("", e.dtype, a.axes | b.axes), at)


SPECIAL: dict[str, Callable[[Emitter, Op, int], Val]] = {"powi": _print_powi, "bitcast": _print_bitcast, "ldexp": _print_ldexp}


def _print_load(self: Emitter, e: Expr, at: int) -> Val:
    assert isinstance(e, Load)
    wanted = self.emit(e.mask) if e.mask is not None else None
    other = self.emit(e.other) if e.other is not None else None
    pointer, along = self.address(e.buf, e.index)
    mask, axes = self.mask(along if wanted is None else along | wanted.axes, wanted)
    axes |= along
    if axes != along:
        pointer = f"tl.broadcast_to({pointer}, {self.shape(axes)})"
    if not mask:
        return self.define(f"tl.load({pointer})", Val("", e.dtype, axes), at)
    direct = isinstance(e.other, Const) and e.dtype is not dt.bool_
    filled = other.text if direct and other is not None else "0.0" if e.dtype.is_float else "0"
    out = self.define(f"tl.load({pointer}, {mask}, {filled})", Val("", e.dtype, axes), at)
    if wanted is None or other is None or direct:
        return out
    rest = self.as_block(other, frozenset()) if isinstance(e.other, Const) else other.text
    return self.define(f"tl.where({wanted.text}, {out.text}, {rest})", Val("", e.dtype, axes | other.axes), at)


def _print_fold(self: Emitter, e: Expr, at: int) -> Val:
    """Where its operands are known: blocks that were opened since are set aside meanwhile."""
    assert isinstance(e, Fold)
    idle = any(const_of(n) == 0 for n in e.extents)  # what it would read is not there
    if idle or all(u is e.state(i) for i, u in enumerate(e.update)):  # nothing is folded in; Triton 3.6's passes fail on reduced constants
        return Val(self.as_block(self.emit(e.init[e.pick]), frozenset()), e.dtype)
    key = e.picking(0)
    found = self.scopes[at].folds.get(key)
    if found is None:
        aside = self.scopes[at + 1 :]
        del self.scopes[at + 1 :]
        tile = self.tiles.get(e.axes[0]) if len(e.axes) == 1 and e.order == "any" and e.combine else None
        how = FOLDS["serial" if tile is None else tile.how]
        found = self.scopes[at].folds[key] = how(self, e)
        self.scopes += aside
    return found[e.pick]


def _bind_states(self: Emitter, e: Fold, states: list[Val]) -> None:
    for i, s in enumerate(states):
        self.var_axes[e.state(i)] = s.axes
        self.bind(e.state(i), s)


def _state_axes(self: Emitter, e: Fold, more: frozenset[Axis]) -> list[frozenset[Axis]]:
    """The axes that each state varies along once it was updated."""
    axes = [self.axes_of(x) | more for x in e.init]
    while True:
        for i, a in enumerate(axes):
            self.var_axes[e.state(i)] = a
        new = [a | self.axes_of(u) for a, u in zip(axes, e.update, strict=True)]
        if new == axes:
            return axes
        axes = new


def _declared(self: Emitter, e: Fold, axes: list[frozenset[Axis]]) -> list[Val]:
    """Loop-carried states that hold `init`."""
    states = []
    for init, along in zip(e.init, axes, strict=True):
        name = self.fresh("a")
        self.line(f"{name} = {self.as_block(self.emit(init), along, init.dtype)}")
        states.append(Val(name, init.dtype, along, init.dtype is dt.index))
    return states


def _assign(self: Emitter, values: Iterable[Expr], states: list[Val], mask: str = "") -> None:
    """All states take their new values at once."""
    news = []
    for value, s in zip(values, states, strict=True):
        text = self.as_block(self.emit(value), s.axes, s.dtype)
        news.append(self.define(f"tl.where({mask}, {text}, {s.text})" if mask else text, s, len(self.scopes) - 1))
    for new, s in zip(news, states, strict=True):
        self.line(f"{s.text} = {new.text}")


def _row_fold(self: Emitter, e: Fold) -> list[Val]:
    """All of the axis is there at once."""
    (axis,), (extent,) = e.axes, e.extents
    tile = self.tiles[axis]
    if axis not in self.level:
        self.declare(axis, extent, "", tile.size, False)
    inits = [self.emit(x) for x in e.init]
    self.open("")
    _bind_states(self, e, inits)
    news = [self.emit(u) for u in e.update]
    mask, along = self.mask([axis])
    full = frozenset((axis,)) | along
    parts = []
    for new, init, first in zip(news, inits, e.init, strict=True):
        axes = full | new.axes
        text = self.as_block(new, axes, first.dtype)
        if mask:
            text = f"tl.where({mask}, {text}, {self.as_block(init, frozenset(), first.dtype)})"
        parts.append(self.define(text, Val("", first.dtype, axes, True), len(self.scopes) - 1))
    self.close(inline=True)
    return _reduced(self, e, axis, parts)


def _steps_fold(self: Emitter, e: Fold) -> list[Val]:
    """Accumulators as wide as the tile, merged at the end."""
    (axis,), (extent,) = e.axes, e.extents
    states = _declared(self, e, _state_axes(self, e, frozenset((axis,)) | self.axes_of(extent)))
    _open_steps(self, axis, extent)
    _bind_states(self, e, states)
    _assign(self, e.update, states, self.mask([axis])[0])
    self.close()
    return _reduced(self, e, axis, states)


def _open_steps(self: Emitter, axis: Axis, extent: Expr) -> None:
    size = self.tiles[axis].size
    name = self.fresh("r")
    n = self.emit(extent)
    last = f"tl.max({n.text})" if n.axes else n.text
    wide = not self.index_fits(extent + size)
    self.open(f"for {name} in range(0, {last}, {size}):")
    self.declare(axis, extent, f"tl.cast({name}, tl.int64)" if wide and not n.wide else name, size, wide)


def _reduced(self: Emitter, e: Fold, axis: Axis, parts: list[Val]) -> list[Val]:
    """One value of each lane state along `axis`."""
    axes = frozenset[Axis]().union(*(p.axes for p in parts))
    left = axes - {axis}
    texts = []
    for p in parts:
        text = self.as_block(p, axes, p.dtype) if p.axes != axes else p.text
        if not left and self.rank > 1:
            text = f"tl.reshape({text}, [{self.tiles[axis].size}])"
        texts.append(f"{text}.to(tl.int32)" if p.dtype is dt.bool_ else text)
    slot = self.slots[axis] if left else 0
    how = f"axis={slot}, keep_dims={bool(left)}"
    one = e.combine[0]
    is_sum = len(parts) == 1 and isinstance(one, Op) and one.name == "add" and set(one.args) == {e.state(0), e.state(0, "b")}
    names = [self.fresh() for _ in parts]
    if is_sum and parts[0].dtype in (dt.f32, dt.f64, dt.i64, dt.i32, dt.index):
        self.line(f"{names[0]} = tl.sum({texts[0]}, {how})")
    else:
        operand = texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
        self.line(f"{', '.join(names)} = tl.reduce({operand}, combine_fn={_combine(self, e)}, {how})")
    out = []
    for name, p in zip(names, parts, strict=True):
        v = Val(name, p.dtype, left, p.dtype is dt.index)
        out.append(self.define(f"{name} != 0", v, len(self.scopes) - 1) if p.dtype is dt.bool_ else v)
    return out


def _combine(self: Emitter, e: Fold) -> str:
    """The function that merges two states; booleans travel as int32."""
    inner = Emitter(Kernel("combine", (), (), (), const(1), (), ()))
    inner.fast = self.fast
    names = []
    for side in "ab":
        for i, init in enumerate(e.init):
            name = f"{side}{i}"
            names.append(name)
            if init.dtype is dt.bool_:
                inner.line(f"{name}_ = {name} != 0")
            inner.bind(e.state(i, side), Val(f"{name}_" if init.dtype is dt.bool_ else name, init.dtype, wide=True))
    results = []
    for value in e.combine:
        v = inner.emit(value)
        results.append(f"{v.text}.to(tl.int32)" if v.dtype is dt.bool_ else v.text)
    body = "".join(f"  {x}\n" for x in (*inner.scopes[0].lines, f"return {', '.join(results)}"))
    self.functions.update(inner.functions)
    text = f"({', '.join(names)}):\n{body}"
    for name, known in self.functions.items():
        if known.partition(name)[2] == text:
            return name
    name = self.fresh("combine")
    self.functions[name] = f"@triton.jit\ndef {name}{text}"
    return name


def _serial_fold(self: Emitter, e: Fold) -> list[Val]:
    """Scalar loops over blocks of states; few trips are written out."""
    trips = [const_of(n) for n in e.extents]
    nodes = sum(1 for u in e.update for x in walk(u) if x.dtype is not dt.index)
    if None not in trips and math.prod(n or 0 for n in trips) * max(1, nodes // 8) <= SHORT:
        return _written_out(self, e)
    states = _declared(self, e, _state_axes(self, e, frozenset()))
    tests: list[Val] = []
    for axis, extent in zip(e.axes, e.extents, strict=True):
        test = _open_loop(self, axis, extent)
        if test is not None:
            tests.append(test)
    _bind_states(self, e, states)
    _assign(self, e.update, states, self.mask((), *tests)[0])
    for _ in e.axes:
        self.close()
    return states


def _written_out(self: Emitter, e: Fold) -> list[Val]:
    """Every trip as text."""
    state: list[Expr] = list(e.init)
    for point in itertools.product(*(range(const_of(n) or 0) for n in e.extents)):
        table: dict[Expr, Expr] = {a: const(i) for a, i in zip(e.axes, point, strict=True)}
        table |= {e.state(i): s for i, s in enumerate(state)}
        state = [substitute(u, table) for u in e.update]
    return [self.emit(s) if not isinstance(s, Const) else Val(self.as_block(self.emit(s), frozenset()), s.dtype) for s in state]


def _open_loop(self: Emitter, axis: Axis, extent: Expr) -> Val | None:
    """A scalar loop; the condition that an iteration exists, where that differs between lanes."""
    self.ranges.bind(axis, extent)
    n = self.emit(extent)
    name = self.fresh("r")
    self.open(f"for {name} in range(0, {f'tl.max({n.text})' if n.axes else n.text}):")
    wide = not self.index_fits(extent)
    self.bind(axis, Val(name, dt.index, frozenset(), wide and n.wide))
    return self.define(f"{name} < {n.text}", Val("", dt.bool_, n.axes), len(self.scopes) - 1) if n.axes else None


def _dot_fold(self: Emitter, e: Fold) -> list[Val]:
    """Products of tiles: the rows of one factor and the columns of the other are the grid's two blocks, the Fold's axis lies between them.

    A factor has two dimensions, as everything in such a kernel: the axis takes the place of the one along which the factor does not vary.
    """
    (axis,), (extent,) = e.axes, e.extents
    factors = multiply_add(e)
    blocks = sorted((a for a in self.slots if self.tiles[a].how == "lanes"), key=self.slots.__getitem__)
    if factors is None or len(blocks) != 2 or any(set(blocks) <= self.axes_of(f) for f in factors):
        return _serial_fold(self, e)
    if blocks[0] not in self.axes_of(factors[0]):
        factors = factors[::-1]
    halves = [f.arg if isinstance(f, Cast) and f.arg.dtype in dt.HALF else f for f in factors]
    if len({f.dtype for f in halves}) > 1:
        halves = list(factors)
    size = self.tiles[axis].size
    acc, name = self.fresh("a"), self.fresh("r")
    self.line(f"{acc} = tl.zeros({self.shape(blocks)}, tl.float32)")
    wide = not self.index_fits(extent + size)
    n = self.emit(extent)
    self.open(f"for {name} in range(0, {n.text}, {size}):")
    start = f"tl.cast({name}, tl.int64)" if wide and not n.wide else name
    tiles = []
    for factor, block, slot in zip(halves, blocks, (1, 0), strict=True):
        self.open("")
        self.slots[axis] = slot
        self.declare(axis, extent, start, size, wide)
        v = self.emit(factor)
        axes = frozenset((block, axis))
        text = self.as_block(v, axes)
        mask, _ = self.mask([axis])
        if mask and not _is_zero_outside(factor):
            text = f"tl.where({mask}, {text}, 0.0).to({TYPES[v.dtype.name]})"
        tiles.append(self.define(text, Val("", v.dtype, axes), len(self.scopes) - 1).text)
        self.close(inline=True)
        self.axes_memo.clear()
    del self.slots[axis]
    how = "" if halves[0].dtype in dt.HALF else ', input_precision="ieee"'
    self.line(f"{acc} = tl.dot({', '.join(tiles)}, {acc}{how})")
    self.close()
    return [Val(acc, e.dtype, frozenset(blocks))]


def _is_zero_outside(e: Expr) -> bool:
    """Is this a load, which gives 0 where its axes end?"""
    while isinstance(e, Cast):
        e = e.arg
    return isinstance(e, Load) and (e.other is None or (isinstance(e.other, Const) and e.other.value == 0))


FOLDS: dict[str, Callable[[Emitter, Fold], list[Val]]] = {
    "row": _row_fold, "steps": _steps_fold, "serial": _serial_fold, "dot": _dot_fold,
}  # fmt: skip
PRINTERS: dict[type, Callable[[Emitter, Expr, int], Val]] = {
    Sym: _print_sym, Axis: _print_leaf, Var: _print_leaf, Cast: _print_cast, Op: _print_op, Load: _print_load, Fold: _print_fold
}  # fmt: skip


# ---------------------------------------------------------------- statements


def _print_let(self: Emitter, s: Stmt) -> None:
    assert isinstance(s, Let)
    v = self.emit(s.value)
    self.var_axes[s.var] = v.axes
    self.bind(s.var, v)


ATOMICS = {"add": "tl.atomic_add", "min": "tl.atomic_min", "max": "tl.atomic_max"}


def _print_store(self: Emitter, s: Stmt) -> None:
    assert isinstance(s, StoreStmt)
    value = self.emit(s.value)
    wanted = self.emit(s.mask) if s.mask is not None else None
    pointer, along = self.address(s.buf, s.index)
    mask, axes = self.mask(along | value.axes | (wanted.axes if wanted is not None else frozenset()), wanted)
    axes |= along | value.axes
    if axes != along:
        pointer = f"tl.broadcast_to({pointer}, {self.shape(axes)})"
    text = self.as_block(value, frozenset()) if isinstance(s.value, Const) else value.text
    tail = f", {mask}" if mask else ""
    if s.mode != "set":
        self.store()
        self.line(f"{ATOMICS[s.mode]}({pointer}, {self.as_block(value, axes)}{f', mask={mask}' if mask else ''}, sem='relaxed')")
    else:
        self.store_later(s.buf, f"tl.store({pointer}, {text}{tail})", axes)
    self.forget(s.buf)


def _print_require(self: Emitter, s: Stmt) -> None:
    assert isinstance(s, Require)
    self.line(f"tl.device_assert({self.emit(s.cond).text}, {s.message!r})")


def _print_loop(self: Emitter, s: Stmt) -> None:
    assert isinstance(s, Loop)
    tile = self.tiles.get(s.axis)
    if const_of(s.extent) == 0:  # an element of an empty tensor has an address: printed, a load or store that needs no axis would touch it
        return
    if tile is not None and not s.carry:
        if tile.how == "steps":
            self.store()
            _open_steps(self, s.axis, s.extent)
            self.block(s.body)
            self.store()
            self.close()
            return
        if s.axis not in self.level:
            self.declare(s.axis, s.extent, "", tile.size, False)
        self.block(s.body)
        return
    states = []
    if s.carry:
        axes = {v: self.axes_of(init) for v, init, _ in s.carry}
        while True:
            for v, along in axes.items():
                self.var_axes[v] = along
            for inner in s.body:
                if isinstance(inner, Let):
                    self.var_axes[inner.var] = self.axes_of(inner.value)
            new = {v: axes[v] | self.axes_of(after) for v, _, after in s.carry}
            if new == axes:
                break
            axes = new
        for v, init, _ in s.carry:
            name = self.fresh("a")
            self.line(f"{name} = {self.as_block(self.emit(init), axes[v], v.dtype)}")
            states.append(Val(name, v.dtype, axes[v], v.dtype is dt.index))
    self.store()
    _open_loop(self, s.axis, s.extent)
    for (v, _, _), state in zip(s.carry, states, strict=True):
        self.bind(v, state)
    self.block(s.body)
    self.store()
    _assign(self, (after for _, _, after in s.carry), states)
    self.close()


STATEMENTS: dict[type, Callable[[Emitter, Stmt], None]] = {Let: _print_let, StoreStmt: _print_store, Loop: _print_loop, Require: _print_require}


def print_triton(kernel: Kernel) -> str:
    """The whole text."""
    return Emitter(kernel).text()
