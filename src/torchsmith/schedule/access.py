"""Memory accesses of loop bodies: flat addresses as linear forms, which axes are used in other ways, simplified indices.

In: expressions, layouts, extents of axes. Out: simplified expressions, Access records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..ir import dtype as dt
from ..ir import memo
from ..ir.bounds import Interval, Ranges, simplify_index
from ..ir.expr import Axis, Const, Expr, Fold, Load, Op, const, op, rewrite, walk
from ..ir.kernel import StoreStmt
from ..ir.linear import Linear, const_of, linear
from ..ir.program import Buffer, Layout
from .deps import free_axes


def _lt(a: Interval, b: Interval) -> bool | None:
    """a < b for certain, or not for certain."""
    if a.hi is not None and b.lo is not None and a.hi < b.lo:
        return True
    return False if a.lo is not None and b.hi is not None and a.lo >= b.hi else None


def _not(x: bool | None) -> bool | None:
    return None if x is None else not x


COMPARE: dict[str, Callable[[Interval, Interval], bool | None]] = {
    "lt": _lt, "ge": lambda a, b: _not(_lt(a, b)), "gt": lambda a, b: _lt(b, a), "le": lambda a, b: _not(_lt(b, a)),
}  # fmt: skip
TRUE, FALSE = Const(dt.bool_, True), Const(dt.bool_, False)


def simplify(e: Expr, extents: Mapping[Axis, Expr], memo: dict[Expr, Expr] | None = None) -> Expr:
    """Index arithmetic and the masks made of it, given how far the axes run: masks that always hold disappear."""
    return _simplify(e, Ranges(extents=extents, sizes=True), {} if memo is None else memo)


def _simplify(e: Expr, ranges: Ranges, memo: dict[Expr, Expr]) -> Expr:
    done = memo.get(e)
    if done is not None:
        return done
    if not e.args:
        return e
    out = e.rebuild(tuple(_simplify(a, ranges, memo) for a in e.args))
    if isinstance(out, Op):
        if out.dtype is dt.index:
            out = simplify_index(out, ranges)
        elif out.name in COMPARE and out.args[0].dtype is dt.index:
            known = COMPARE[out.name](ranges.interval(out.args[0]), ranges.interval(out.args[1]))
            out = out if known is None else TRUE if known else FALSE
        elif out.name == "and":
            a, b = out.args
            out = b if a is TRUE or a is b else a if b is TRUE else FALSE if FALSE in (a, b) else out
        elif out.name == "or":
            a, b = out.args
            out = b if a is FALSE else a if b is FALSE else TRUE if TRUE in (a, b) else out
        elif out.name == "where" and out.args[0] in (TRUE, FALSE):
            out = out.args[1] if out.args[0] is TRUE else out.args[2]
    elif isinstance(out, Load) and out.mask is not None and out.mask in (TRUE, FALSE):
        assert out.other is not None
        out = Load(out.buf, out.dtype, out.index) if out.mask is TRUE else out.other
    memo[e] = out
    return out


@dataclass(slots=True)
class Access:
    """One load or store: the coefficient of every axis in its flat address; `rough`: axes it depends on in other ways."""

    buf: str
    coefs: dict[Axis, Expr]
    rough: frozenset[Axis]
    store: bool
    itemsize: int

    def stride(self, axis: Axis) -> int | None:
        """Elements per step of `axis`; None when it is not affine or not constant."""
        if axis in self.rough:
            return None
        c = self.coefs.get(axis)
        return 0 if c is None else int(c.value) if isinstance(c, Const) else None

    def axes(self) -> frozenset[Axis]:
        return frozenset(self.coefs) | self.rough


@dataclass(slots=True)
class Accesses:
    """All accesses of some expressions; `impure`: axes used outside of linear addresses (masks, values, div and mod)."""

    items: list[Access] = field(default_factory=list)
    impure: set[Axis] = field(default_factory=set)


def is_plain(e: Expr) -> bool:
    return not any(isinstance(x, Load) for x in walk(e))


_FLAT: dict[tuple[Expr | tuple[Expr, ...], ...], Linear] = memo.table({})


def flat(layout: Layout, index: tuple[Expr, ...]) -> Linear:
    """The element number of an index; not to be changed."""
    key = (layout.strides, layout.offset, index)
    found = _FLAT.get(key)
    if found is None:
        total = Linear(None, layout.offset)
        for i, stride in zip(index, layout.strides, strict=True):
            total = total.plus(linear(i), stride)
        found = _FLAT[key] = linear(total.expr())
    return found


def collect(roots: Iterable[Expr], stores: Iterable[StoreStmt], buffers: Mapping[str, Buffer]) -> Accesses:
    """Accesses of value expressions and of stores (whose indices, values and masks are among the roots' concerns too)."""
    found = _Collector(buffers)
    for r in roots:
        found.visit(r)
    for s in stores:
        found.address(s.buf, s.index, True, buffers[s.buf].dtype)
        found.visit(s.value)
        if s.mask is not None:
            found.visit(s.mask)
    return found.out


class _Collector:
    """No functions inside of `collect`, which call each other: they and all that they hold would be a cycle for each call."""

    __slots__ = ("buffers", "out", "seen")

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        self.buffers, self.out, self.seen = buffers, Accesses(), set[Expr]()

    def address(self, buf: str, index: tuple[Expr, ...], store: bool, dtype: dt.DType) -> None:
        layout = self.buffers[buf].layout
        assert layout is not None
        if not layout.pad and not layout.splits:  # in a dimension of size 1 the only index is 0: nothing steps through it
            sizes = self.buffers[buf].shape
            index = tuple(const(0) if const_of(n) == 1 and is_plain(i) else i for n, i in zip(sizes, index, strict=True))
        lin = flat(layout, index)
        coefs: dict[Axis, Expr] = {}
        rough: frozenset[Axis] = frozenset()
        for atom, coef in lin.terms.items():
            if isinstance(atom, Axis):
                coefs[atom] = coef
            else:
                rough |= free_axes(atom)
                self.nested(atom)
        self.out.impure.update(rough)
        self.out.items.append(Access(buf, coefs, rough, store, dtype.itemsize))

    def nested(self, e: Expr) -> None:
        """Loads inside an address."""
        if isinstance(e, Load):
            self.visit(e)
        else:
            for a in e.args:
                self.nested(a)

    def visit(self, e: Expr) -> None:
        if e in self.seen:
            return
        self.seen.add(e)
        if isinstance(e, Axis):
            self.out.impure.add(e)
        elif isinstance(e, Load):
            self.address(e.buf, e.index, False, e.dtype)
            if e.mask is not None and e.other is not None:
                self.visit(e.mask)
                self.visit(e.other)
        else:
            for a in e.args:
                self.visit(a)


def chains(axes: list[tuple[Axis, Expr]], accesses: Accesses) -> list[list[tuple[Axis, Expr]]]:
    """Groups of axes (outermost first) that every access treats as one: coef(a) = coef(b) * extent(b)."""
    pure = [(a, e) for a, e in axes if a not in accesses.impure]
    follows: dict[Axis, tuple[Axis, Expr]] = {}
    taken: set[Axis] = set()
    zero = const(0)
    for a, _ in pure:
        for b, extent in pure:
            if a is b or b in taken or a in follows:
                continue
            if all(x.coefs.get(a, zero) is op("mul", x.coefs.get(b, zero), extent) for x in accesses.items):
                follows[a] = (b, extent)
                taken.add(b)
    extents = dict(axes)
    out: list[list[tuple[Axis, Expr]]] = []
    used: set[Axis] = set()
    for a, e in axes:
        if a in taken or a in used:
            continue
        chain = [(a, e)]
        while chain[-1][0] in follows and follows[chain[-1][0]][0] not in used:
            b = follows[chain[-1][0]][0]
            if b in {x for x, _ in chain}:
                break
            chain.append((b, extents[b]))
        used |= {x for x, _ in chain}
        out.append(chain)
    out += [[(a, e)] for a, e in axes if a not in used]  # a cycle cannot be, but an axis must not be lost
    return out


def merge_table(chain: list[tuple[Axis, Expr]], merged: Axis) -> dict[Expr, Expr]:
    """axis -> its part of the merged axis: f // P, (f // P) % E, ..."""
    table: dict[Expr, Expr] = {}
    step: Expr = const(1)
    for k in range(len(chain) - 1, -1, -1):
        a, e = chain[k]
        part = op("floordiv", merged, step)
        table[a] = part if k == 0 else op("mod", part, e)
        step = op("mul", step, e)
    return table


def splits(axes: Iterable[tuple[Axis, Expr]], roots: Iterable[Expr]) -> dict[Axis, int]:
    """Axes that occur as a // d and a % d with d dividing their constant extent: the least such d > 1."""
    want = {a: int(e.value) for a, e in axes if isinstance(e, Const)}
    out: dict[Axis, int] = {}
    seen: set[Expr] = set()
    stack = list(roots)
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen.add(e)
        stack.extend(e.args)
        if isinstance(e, Op) and e.name in ("floordiv", "mod") and isinstance(e.args[0], Axis) and isinstance(e.args[1], Const):
            a, d = e.args[0], int(e.args[1].value)
            n = want.get(a)
            if n is not None and 1 < d < n and n % d == 0:
                out[a] = min(out.get(a, d), d)
    return out


def map_folds(e: Expr, fn: Callable[[Fold], Expr], memo: dict[Expr, Expr]) -> Expr:
    """Rebuild `e` with every Fold (innermost first) replaced by fn(fold)."""
    return rewrite(e, lambda x: fn(x) if isinstance(x, Fold) else x, memo)
