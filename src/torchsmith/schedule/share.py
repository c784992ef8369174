"""Kernels that differ in numbers only become one kernel with the numbers as arguments: Plan in, Plan out.

    for i < 56: for j < 56: y[i * 56 + j] ..       for i < n0: for j < n0: y[i * n0 + j] ..      launched with n0 = 56
    for i < 28: for j < 28: y[i * 28 + j] ..   ->                                                launched with n0 = 28

Two kernels are alike when their skeletons are equal: everything but the open numbers. Of alike kernels the least general generalisation is
taken: a number that is the same in all of them stays a number, numbers that vary together are one argument, and what a symbolic program
computes from its sizes (s0 * 49) is an argument computed by the host, once per launch. A kernel without a like stays as it is.

What is open is a question of speed. In contractions (where a tile does thousands of steps between two looks at a number) and in what
runs in `prepare`: every extent, stride and offset. In other loops: extents of the grid, and strides that the vector axis does not follow.
Outside of the grid 0, 1 and -1 are never open, nor is a divisor: they are structure. The exception are addresses and bounds of padding in a
contraction: there each is the sum of all axes in scope, times a coefficient each, and all coefficients but the lanes' are open, 0 and 1 as
well, so that a convolution with stride 2 or over rows of another number of axes is the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace

from ..ir import dtype as dt
from ..ir.blocks import Banded, Contract
from ..ir.bounds import Ranges
from ..ir.expr import Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, const, op, substitute, walk
from ..ir.kernel import Block, Kernel, Let, Loop, Param, Stmt, StoreStmt, expressions, own_expressions, rewrite, statements
from ..ir.linear import Linear, conjuncts, const_of, is_invariant, linear
from ..ir.nested import every
from ..ir.plan import Launch, Plan, PlanCond, PlanRepeat, Step
from ..ir.program import Layout
from ..options import Options
from .access import flat

Leaf = Callable[[Expr], Expr]
DIVISIONS = frozenset({"floordiv", "mod"})
SHORT = 16  # padded sums with an inner loop of so few steps are printed otherwise
FEW = 64  # loops of other kernels: smaller numbers are worth unrolling


def share_kernels(plan: Plan, options: Options) -> Plan:
    """The whole pass. Kernels of blocks keep their numbers: what divides a size or a stride decides how wide their loads are."""
    if plan.target.language != "c":
        return plan
    plan = replace(plan, kernels=tuple(_straighten(k) for k in plan.kernels))
    preparing, fuel = {s.kernel for s in every(plan.prepare) if isinstance(s, Launch)}, options.fuel
    groups: dict[tuple[object, ...], list[int]] = {}
    leaves: list[tuple[Expr, ...]] = []
    for i, kernel in enumerate(plan.kernels):
        found: list[Expr] = []
        walker = _Walker(kernel, i in preparing, lambda e, to=found: (to.append(e), e)[1])  # type: ignore[misc]
        walker.kernel()
        leaves.append(tuple(found))
        key: tuple[object, ...] = (i in preparing, kernel.choice, *walker.skeleton)
        if key in groups and fuel == 0:
            key = (i, *key)
        elif key in groups:
            fuel -= 1
        groups.setdefault(key, []).append(i)
    number: dict[int, int] = {}
    arguments: dict[int, tuple[Expr, ...]] = {}
    kernels: list[Kernel] = []
    spans = Ranges({s.sym: (s.lo, s.hi) for s in plan.symbols})
    for members in groups.values():
        kernel, given = _generalise([plan.kernels[i] for i in members], [leaves[i] for i in members], members[0] in preparing, spans)
        for i, values in zip(members, given, strict=True):
            number[i], arguments[i] = len(kernels), values
        kernels.append(kernel)

    def renumber(steps: Iterable[Step]) -> tuple[Step, ...]:
        out: list[Step] = []
        for s in steps:
            if isinstance(s, Launch):
                s = replace(s, kernel=number[s.kernel], syms=arguments[s.kernel])
            elif isinstance(s, PlanCond):
                s = replace(s, then=renumber(s.then), orelse=renumber(s.orelse))
            elif isinstance(s, PlanRepeat):
                s = replace(s, body=renumber(s.body))
            out.append(s)
        return tuple(out)

    return replace(plan, kernels=tuple(kernels), prepare=renumber(plan.prepare), run=renumber(plan.run))


def _generalise(
    kernels: list[Kernel], leaves: list[tuple[Expr, ...]], preparing: bool, spans: Ranges
) -> tuple[Kernel, list[tuple[Expr, ...]]]:
    """Alike kernels -> (the one kernel, each one's arguments)."""
    rows = list(zip(*leaves, strict=True))  # per leaf: its value in each kernel
    symbols: dict[tuple[Expr, ...], Sym] = {}
    names = iter(range(1 << 30))
    for row in rows:
        if row not in symbols and not (isinstance(row[0], Const) and all(v is row[0] for v in row)):
            symbols[row] = Sym(f"n{next(names)}", row[0].dtype)
    turn = iter(rows)

    def put(e: Expr) -> Expr:
        row = next(turn)
        found: Expr = symbols.get(row, row[0])
        return found

    kernel = _Walker(kernels[0], preparing, put).kernel()
    ranges = tuple((s, *_span(row, spans)) for row, s in symbols.items() if s.dtype is dt.index)
    origins = tuple(dict.fromkeys(o for k in kernels for o in k.origins))
    kernel = replace(kernel, syms=tuple(symbols.values()), ranges=ranges, origins=origins)
    return kernel, [tuple(row[i] for row in symbols) for i in range(len(kernels))]


def _span(values: tuple[Expr, ...], spans: Ranges) -> tuple[int, int | None]:
    """The least and the greatest value."""
    found = [spans.interval(v) for v in values]
    his = [f.hi for f in found]
    return min(-(1 << 63) if f.lo is None else f.lo for f in found), None if None in his else max(h for h in his if h is not None)


class _Walker:
    """Rebuilds a kernel, each open number replaced by `leaf(number)`; what it met on the way is `skeleton`.

    Names of axes, variables and buffers do not count: the skeleton numbers them. Nodes are rebuilt as they are, never simplified.
    """

    def __init__(self, kernel: Kernel, preparing: bool, leaf: Leaf) -> None:
        self.source, self.leaf = kernel, leaf
        self.skeleton: list[object] = []
        self.memo: dict[tuple[Expr, bool], tuple[int, Expr]] = {}
        self.numbers: dict[object, int] = {}
        self.preparing = preparing
        self.loose = preparing or any(isinstance(s, Block) for s in statements(kernel.body))
        self.rigid = any(isinstance(s, Block) and not s.STRIDED for s in kernel.body)
        grouped = {a for s in kernel.body if isinstance(s, Banded) for a in (s.c, s.g, s.lane)}
        self.vectors = grouped if self.loose else grouped.union(_vector_axes(kernel.body))
        self.flat = _flat_buffers(kernel)
        self.around = [a for a, _ in kernel.grid]
        self.lanes = set(_lane_axes(kernel.body)) if self.flat else set()
        self.along: dict[str, set[int]] = {}  # buffer -> dimensions whose index follows an axis that the printer wants constant steps of
        for buf, index in dict.fromkeys(_accesses(kernel.body)):
            self.along.setdefault(buf, set()).update(d for d, i in enumerate(index) if not self.vectors.isdisjoint(walk(i)))

    def note(self, *tokens: object) -> None:
        self.skeleton.extend(tokens)

    def name(self, thing: object) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))

    def kernel(self) -> Kernel:
        k = self.source
        params = tuple(self.param(p) for p in k.params)
        for s in k.scratch:
            self.note("scratch", self.name(s.name), s.dtype, s.size)
        grid = tuple((self.axis(a), self.extent(e)) for a, e in k.grid)
        return replace(k, params=params, grid=grid, body=self.block(k.body))

    def param(self, p: Param) -> Param:
        if p.buf in self.flat:
            self.note("flat", self.name(p.buf), p.dtype, p.written)
            return replace(p, shape=(const(1),), layout=Layout((const(1),), const(0)))
        self.note("param", self.name(p.buf), p.dtype, p.written, p.layout.splits, p.layout.pad, p.layout.fill, len(p.shape))
        fixed = self.along.get(p.buf, set())
        strides = tuple(self.expr(e, self.rigid or d in fixed) for d, e in enumerate(p.layout.strides))
        layout = replace(p.layout, strides=strides, offset=self.expr(p.layout.offset))
        return replace(p, layout=layout)

    # ------------------------------------------------------------ statements
    def block(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        self.note("{")
        out = tuple(self.statement(s) for s in body)
        self.note("}")
        return out

    def statement(self, s: Stmt) -> Stmt:
        self.note(type(s).__name__)
        if isinstance(s, Loop):
            self.note(s.kind, len(s.carry))
            axis, extent = self.axis(s.axis), self.size(s.extent) if self.flat else self.expr(s.extent, not self.preparing)
            carry = tuple((self.var(v), self.expr(a), self.expr(b)) for v, a, b in s.carry)
            return replace(s, axis=axis, extent=extent, body=self.block(s.body), carry=carry)  # type: ignore[arg-type]
        if isinstance(s, Let):
            value = self.expr(s.value)
            return replace(s, var=self.var(s.var), value=value)  # type: ignore[arg-type]
        if isinstance(s, StoreStmt):
            self.note(self.name(s.buf), s.mode, s.mask is None)
            index = (self.sum(self.flat[s.buf][s.index]),) if s.buf in self.flat else tuple(self.expr(e) for e in s.index)
            return replace(s, index=index, value=self.expr(s.value), mask=None if s.mask is None else self.expr(s.mask))
        assert isinstance(s, Block)
        return self.contract(s) if isinstance(s, Contract) and self.flat else self.whole(s)

    def contract(self, s: Contract) -> Stmt:
        """A Contract, its addresses and bounds as sums over all axes in scope."""
        self.note(s.rows, s.vectors, s.prefetch is None, s.prefetch_vectors, len(s.taps), self.name(s.acc), s.wide is None, s.add, s.tails)
        self.note(s.parts, s.rest, s.vector_bytes)
        self.axis(s.m)
        taps = tuple((self.axis(x), self.expr(e)) for x, e in s.taps)
        self.axis(s.k)
        extent, live, first = self.expr(s.extent), self.size(s.live), self.expr(s.first)
        rows, share = self.leaf(s.prefetch_rows), self.leaf(s.prefetch_share)
        wide = None if s.wide is None else self.size(s.wide)
        outside, inside = [*self.around], [x for x, _ in s.taps]
        self.lanes.add(s.k)
        self.around = [*outside, s.m, *inside, s.k]
        self.note("load", self.name(s.a.buf), s.a.dtype, s.a.mask is None)
        index = (self.sum(self.flat[s.a.buf][s.a.index]),)
        a = Load(s.a.buf, s.a.dtype, index)
        if s.a.mask is not None and s.a.other is not None:
            masks = [self.bound(e) for e in conjuncts(s.a.mask)]
            mask: Expr = masks[0]
            for e in masks[1:]:
                mask = Op("and", mask.dtype, (mask, e))
            a = Load(s.a.buf, s.a.dtype, index, mask, self.expr(s.a.other))
        self.around = [*outside, *inside]
        prefetch = None if s.prefetch is None else self.sum(linear(s.prefetch))
        self.lanes.discard(s.k)
        self.around = [*outside, s.m]
        self.axis(s.n)
        b = self.expr(s.b)
        assert isinstance(b, Load)
        return replace(
            s, taps=taps, extent=extent, live=live, a=a, b=b, wide=wide, first=first,
            prefetch=prefetch, prefetch_share=share, prefetch_rows=rows,
        )  # fmt: skip

    def size(self, e: Expr) -> Expr:
        """Of a tile: a constant is one that always holds."""
        return self.expr(e, const_of(e) is not None)

    def bound(self, e: Expr) -> Expr:
        """One bound of a mask."""
        assert isinstance(e, Op)
        self.note(e.name)
        return Op(e.name, e.dtype, tuple(self.sum(linear(x)) for x in e.args))

    def sum(self, lin: Linear) -> Expr:
        """Over the axes in scope and what else occurs (a minimum of such sums)."""
        terms: dict[Expr, Expr] = {}
        for axis in self.around:
            terms[axis] = self.coefficient(axis, lin.terms.get(axis, const(0)))
        for x, c in lin.terms.items():
            if isinstance(x, Op):
                self.note(x.name)
                made = Op(x.name, x.dtype, tuple(self.sum(linear(e)) for e in x.args))
                terms[made] = self.expr(c)
            elif x not in terms:
                assert isinstance(x, Axis)
                terms[self.axis(x)] = self.coefficient(x, c)
        return Linear({x: c for x, c in terms.items() if const_of(c) != 0}, self.offset(lin.const)).expr()

    def coefficient(self, x: Expr, c: Expr) -> Expr:
        if x in self.lanes:
            return self.expr(c)
        negative = (const_of(c) or 0) < 0
        self.note("-" if negative else "?")
        return op("mul", self.leaf(op("mul", c, const(-1))), const(-1)) if negative else self.leaf(c)

    def offset(self, c: Expr) -> Expr:
        """Padding is subtracted; none at all is of that kind too."""
        known = const_of(c)
        negative = known is not None and known <= 0
        self.note("-" if negative else "?")
        return op("mul", self.leaf(const(-(known or 0))), const(-1)) if negative else self.leaf(c)

    def whole(self, s: Block) -> Stmt:
        """A block, field by field."""
        new: dict[str, object] = {}
        for field in fields(s):
            value, fixed = getattr(s, field.name), field.name not in s.OPEN
            if isinstance(value, str):
                self.note(self.name(value))
            elif isinstance(value, Axis):
                self.axis(value)
            elif isinstance(value, Expr):
                new[field.name] = self.expr(value, fixed)
            elif isinstance(value, tuple) and all(isinstance(v, tuple) for v in value):  # axes with their extents
                self.note(len(value))
                new[field.name] = tuple((self.axis(a), self.expr(e, fixed)) for a, e in value)
            else:
                self.note(value)
        return replace(s, **new)  # type: ignore[arg-type]

    # ------------------------------------------------------------ expressions
    def axis(self, a: Axis) -> Axis:
        self.note("axis", self.name(a))
        return a

    def var(self, v: Var) -> Var:
        self.note("var", self.name(v), v.dtype)
        return v

    def expr(self, e: Expr, fixed: bool = False) -> Expr:
        """`fixed`: constants stay as they are."""
        if isinstance(e, Const):
            return self.constant(e, fixed)
        if isinstance(e, Sym) or (e.dtype is dt.index and is_invariant(e)):
            self.note("?", e.dtype)
            return self.leaf(e)
        if isinstance(e, Axis):
            return self.axis(e)
        if isinstance(e, Var):
            return self.var(e)
        known = self.memo.get((e, fixed))
        if known is not None:
            self.note("=", known[0])
            return known[1]
        made = self.node(e, fixed)
        self.memo[e, fixed] = (len(self.memo), made)
        return made

    def extent(self, e: Expr) -> Expr:
        """Of a grid axis: open, whatever it is."""
        self.note("extent")
        return self.leaf(e)

    def constant(self, e: Const, fixed: bool) -> Expr:
        if e.dtype is not dt.index or fixed or abs(int(e.value)) <= 1:
            self.note("const", e)
            return e
        if int(e.value) < 0:  # arguments are never negative
            self.note("-")
            put = self.open(const(-int(e.value)))
            return const(-int(put.value)) if isinstance(put, Const) else Op("mul", dt.index, (put, const(-1)))
        return self.open(e)

    def open(self, e: Const) -> Expr:
        if not self.loose and int(e.value) <= FEW:
            self.note("const", e)
            return e
        self.note("?", dt.index)
        return self.leaf(e)

    def node(self, e: Expr, fixed: bool) -> Expr:
        if isinstance(e, Op):
            self.note(e.name, e.dtype, len(e.args))
            args = [self.expr(a, fixed or (k == 1 and e.name in DIVISIONS)) for k, a in enumerate(e.args)]
            return Op(e.name, e.dtype, tuple(args))
        if isinstance(e, Cast):
            self.note("cast", e.dtype)
            return Cast(e.dtype, self.expr(e.args[0], fixed))
        if isinstance(e, Load) and e.buf in self.flat:
            self.note("load", self.name(e.buf), e.dtype)
            return Load(e.buf, e.dtype, (self.sum(self.flat[e.buf][e.index]),))
        if isinstance(e, Load):
            self.note("load", self.name(e.buf), e.dtype, len(e.index), e.mask is None)
            index = tuple(self.expr(i, fixed) for i in e.index)
            if e.mask is None or e.other is None:
                return Load(e.buf, e.dtype, index)
            return Load(e.buf, e.dtype, index, self.expr(e.mask, fixed), self.expr(e.other, fixed))
        assert isinstance(e, Fold)
        self.note("fold", e.order, e.pick, len(e.axes), len(e.init), len(e.combine))
        axes = tuple((self.axis(a), self.expr(n, fixed or not self.loose)) for a, n in zip(e.axes, e.extents, strict=True))
        for i in range(len(e.init)):
            self.note(*(self.name(e.state(i, side)) for side in "ab"))
        init, update, combine = (tuple(self.expr(x, fixed) for x in part) for part in (e.init, e.update, e.combine))
        return Fold(axes, init, update, combine, e.order, e.pick, e.prefix)


def _straighten(kernel: Kernel) -> Kernel:
    """Places whose divisions cancel are written as sums: x[(16 i + j // 4) // n, (16 i + j // 4) % n, j % 4] -> x[64 i + j].

    They cancel as long as strides and divisors are the program's own numbers and sizes: as arguments they would have nothing in common."""
    accesses = list(dict.fromkeys(_accesses(kernel.body)))
    places: dict[str, dict[tuple[Expr, ...], tuple[Expr, ...]]] = {}
    for p in kernel.params:
        indices = [index for buf, index in accesses if buf == p.buf]
        if p.layout.splits or p.layout.pad or not any(isinstance(e, Op) and e.name in DIVISIONS for i in indices for e in walk(*i)):
            continue
        sums = [flat(p.layout, i) for i in indices]
        if all(isinstance(x, Axis) for place in sums for x in place.terms):
            places[p.buf] = {i: (place.expr(),) for i, place in zip(indices, sums, strict=True)}
    if not places:
        return kernel
    table: dict[Expr, Expr] = {}
    for e in walk(*(e for s in kernel.body for e in expressions(s))):
        if isinstance(e, Load) and e.buf in places:
            other = (None, None) if e.mask is None or e.other is None else (substitute(e.mask, table), substitute(e.other, table))
            table[e] = Load(e.buf, e.dtype, places[e.buf][e.index], *other)

    def stores(s: Stmt) -> Stmt:
        if isinstance(s, Loop):
            return replace(s, body=tuple(stores(inner) for inner in s.body))
        return replace(s, index=places[s.buf][s.index]) if isinstance(s, StoreStmt) and s.buf in places else s

    plain = Layout((const(1),), const(0))
    params = tuple(replace(p, shape=(const(1),), layout=plain) if p.buf in places else p for p in kernel.params)
    return replace(kernel, params=params, body=tuple(rewrite(stores(s), table, {}) for s in kernel.body))


def _flat_buffers(kernel: Kernel) -> dict[str, dict[tuple[Expr, ...], Linear]]:
    """The buffers of a contraction (but the packed one) as memory without dimensions: for each its indices, as places. {}: some index is no
    sum of axes, or the kernel is printed for its very sizes."""
    products = [s for s in kernel.body if isinstance(s, Contract)]
    if len(products) != 1 or any(isinstance(s, Block) and s is not products[0] for s in kernel.body):
        return {}
    product = products[0]
    if product.a.mask is not None and (const_of(product.extent) or SHORT) <= SHORT:
        return {}
    params = {p.buf: p.layout for p in kernel.params if p.buf != product.b.buf}
    found: dict[str, dict[tuple[Expr, ...], Linear]] = {}
    loads = [e for s in kernel.body for e in walk(*expressions(s)) if isinstance(e, Load)]
    if product.where is not None or any(e.mask is not None and e is not product.a for e in loads):
        return {}
    sums = [linear(x) for e in conjuncts(product.a.mask) for x in e.args]
    for buf, index in _accesses(kernel.body):
        if buf in params:
            layout = params[buf]
            if layout.splits or layout.pad:
                return {}
            place = flat(layout, index)
            found.setdefault(buf, {})[index] = place
            sums.append(place)
    return found if product.a.buf in found and all(isinstance(x, Axis) for lin in sums for x in lin.terms) else {}


def _lane_axes(body: Iterable[Stmt]) -> Iterable[Axis]:
    return (s.axis for s in statements(body) if isinstance(s, Loop) and s.kind == "vector")


def _vector_axes(body: Iterable[Stmt]) -> Iterable[Axis]:
    """Axes that run over lanes: of vector loops, and the innermost of folds outside of them."""
    for s in statements(body):
        if not isinstance(s, Loop):
            yield from (f.axes[-1] for f in walk(*own_expressions(s)) if isinstance(f, Fold))
        elif s.kind == "vector":
            yield s.axis


def _accesses(body: Iterable[Stmt]) -> Iterable[tuple[str, tuple[Expr, ...]]]:
    """(buffer, index) of every load and store below."""
    for s in statements(body):
        if isinstance(s, StoreStmt):
            yield s.buf, s.index
        yield from ((e.buf, e.index) for e in walk(*own_expressions(s)) if isinstance(e, Load))
