"""A product, a softmax of it, and a second product become one Stage, whatever operators wrote them: Program in, Program out.

    s[i, j] = f(Fold_e q[i, e] * k[j, e]);  m[i] = Fold_j max s;  l[i] = Fold_j exp(s - m);  p[i, j] = exp(s - m) / l
    out[i, d] = Fold_j p[i, j] * v[j, d]
      ->   out[i, d] = Fold_j (exp(s - Fold_j' max s) / Fold_j'' exp(s - ..)) * v[j, d]      s = f(Fold_e q[i, e] * k[j, e])

Runs before `fuse`, while each operator is a Stage of its own. Legal where nobody else reads what lies between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir import dtype as dt
from ...ir.expr import Cast, Const, Expr, Fold, Load, Op, const, op, substitute, walk
from ...ir.program import Buffer, Element, Program, Stage
from ...options import Options
from .. import deps
from ..access import simplify
from ..templates.attention import DOT, is_wide, outer_product, recognise_attention
from .fold_shapes import factor, multiply_add
from .fuse import can_inline, drop_unit_axes, inline_value

CHAIN = 24  # stages between the two products
CHEAP = 12  # operations of a mask that are dearer to load than to make again


def merge_attention(program: Program, options: Options) -> Program:
    """Replace each second product by the whole of its attention; what only it needed has no reader left and goes in `fuse`."""
    if program.target.language != "c":
        return program
    merger = _Merger(program, options.fuel)
    body = tuple(merger.merge(p, e) if isinstance(e, Stage) else e for p, e in enumerate(program.body))
    return program if all(a is b for a, b in zip(body, program.body, strict=True)) else replace(program, body=body)


class _Merger:
    def __init__(self, program: Program, fuel: int) -> None:
        self.program, self.fuel = program, fuel
        self.pinned = deps.pinned(program)
        self.roots = deps.roots_of(program.buffers)
        self.written = deps.writers(program.body, self.roots)
        self.readers = _live_readers(program, self.pinned)

    def producer(self, load: Load) -> tuple[int, Stage] | None:
        """The Stage whose value may stand in place of `load`."""
        at = self.written.get(load.buf, [])
        stage = self.program.body[at[0]] if len(at) == 1 else None
        if not isinstance(stage, Stage) or load.mask is not None or self.program.buffers[load.buf].storage_of is not None:
            return None
        return None if can_inline(stage) is not None else (at[0], stage)

    def merge(self, p: int, stage: Stage) -> Stage:
        if stage.scan or stage.lets or len(stage.stores) != 1 or stage.stores[0].mode != "set":
            return stage
        outer = outer_product(stage.stores[0].value)
        if outer is None:
            return stage
        plain = drop_unit_axes(stage)  # else one element has two indices: 0, and an axis of extent 1
        outer = outer_product(plain.stores[0].value)
        for f in (outer and multiply_add(outer)) or ():
            load = factor(f)
            if load is not None and self.leads_to_softmax(load):
                merged = _Expansion(self, p, plain).run(load)
                if merged is not None and self.fuel:
                    self.fuel -= 1
                    return merged
        return stage

    def leads_to_softmax(self, load: Load) -> bool:
        """Does a chain of element-wise Stages lead from `load` back to a division of exponentials?"""
        for _ in range(4):
            found = self.producer(load)
            if found is None:
                return False
            value = found[1].stores[0].value
            if any(isinstance(x, Op) and x.name == "exp" for x in walk(value)):
                return True
            loads = deps.loads_in(value)
            big = max((len(x.index) for x in loads), default=0)
            loads = tuple(x for x in loads if len(x.index) == big)
            if not loads or any(isinstance(x, Fold) for x in walk(value)):
                return False
            load = loads[0]
        return False


def _live_readers(program: Program, pinned: set[str]) -> dict[str, set[int]]:
    """buffer -> positions that read it, those left out that nobody needs."""
    readers: dict[str, set[int]] = {}
    for p in range(len(program.body) - 1, -1, -1):
        e: Element = program.body[p]
        if isinstance(e, Stage) and not any(s.buf in pinned or readers.get(s.buf) for s in e.stores):
            continue
        for b in deps.reads(e):
            readers.setdefault(b, set()).add(p)
    return readers


class _Expansion:
    """One attempt: the loads of a product's weights replaced by what was stored, back to the first product."""

    def __init__(self, merger: _Merger, p: int, stage: Stage) -> None:
        self.m, self.p, self.stage = merger, p, stage
        self.inlined: dict[int, Stage] = {}  # chain of the scores: nobody else may read what these store
        self.copied: dict[int, Stage] = {}  # cheap masks, made again
        self.memo: dict[Expr, Expr] = {}
        self.reach: dict[str, bool] = {}

    def run(self, weights: Load) -> Stage | None:
        store = self.stage.stores[0]
        value = substitute(store.value, {weights: self.expand(weights)})
        outer = outer_product(value)
        loads = [x for f in (outer and multiply_add(outer)) or () if (x := factor(f)) is not None]
        value = substitute(value, {x: self.uncopied(x) for x in loads})
        if not self.inlined or len(self.inlined) > CHAIN:
            return None
        extents = dict(self.stage.axes) | deps.fold_extents(value)
        merged = replace(self.stage, stores=(replace(store, value=simplify(value, extents)),), origin="attention")
        if recognise_attention(merged) is None or not self.is_legal():
            return None
        return merged

    def is_legal(self) -> bool:
        """Scores have no other reader, and nothing that is read now is written between its old readers and here."""
        here = {*self.inlined, self.p}
        for stage in self.inlined.values():
            buf = stage.stores[0].buf
            if buf in self.m.pinned or self.m.readers.get(buf, set()) - here:
                return False
        for at, stage in {**self.inlined, **self.copied}.items():
            for b in deps.rooted(deps.reads(stage), self.m.roots):
                if any(at < w < self.p for w in self.m.written.get(b, ())):
                    return False
        return True

    def leads(self, buf: str, load: Load) -> bool:
        """Does a chain of inlinable Stages lead from `buf` to a product?"""
        known = self.reach.get(buf)
        if known is None:
            self.reach[buf] = False
            found = self.m.producer(load)
            if found is not None:
                value = found[1].stores[0].value
                self.reach[buf] = _dot(value) is not None or any(self.leads(x.buf, x) for x in deps.loads_in(value))
            known = self.reach[buf]
        return known

    def expand(self, load: Load) -> Expr:
        done = self.memo.get(load)
        if done is None:
            done = self.memo[load] = self._expand(load)
        return done

    def _expand(self, load: Load) -> Expr:
        found = self.m.producer(load)
        if found is None or len(self.inlined) > CHAIN:
            return load
        p, stage = found
        value = inline_value(stage, load)
        value = simplify(value, dict(self.stage.axes) | deps.fold_extents(value))
        dot = _dot(value)
        if dot is not None:
            self.inlined[p] = stage
            rest = deps.loads_in(substitute(value, {dot: DOT}))
            return substitute(value, {dot: self.unscaled(dot), **{x: self.expand(x) for x in rest}})
        if self.leads(load.buf, load):
            self.inlined[p] = stage
            return substitute(value, {x: self.expand(x) for x in deps.loads_in(value)})
        if operations(value) > CHEAP:
            return load
        whole = substitute(value, {x: self.expand(x) for x in deps.loads_in(value)})
        matrices = [x for x in deps.loads_in(whole) if not _is_vector(x, self.m.program.buffers)]
        if operations(whole) > CHEAP or len(matrices) > 1 or is_wide(whole):
            return load  # a mask that is cheaper to load than to make again
        self.copied[p] = stage
        return whole

    def unscaled(self, dot: Fold) -> Expr:
        """Fold (q c)(k c') -> c c' Fold q k, where an operand is stored multiplied by a constant."""
        factors = multiply_add(dot)
        assert factors is not None
        plain, scale = [], 1.0
        for f in factors:
            stored = factor(f)
            x = f if stored is None else substitute(f, {stored: self.uncopied(stored)})
            found = self.m.producer(x) if isinstance(x, Load) else None
            if found is not None and isinstance(x, Load):
                value = inline_value(found[1], x)
                if isinstance(value, Op) and value.name == "mul" and value.dtype is dt.f32 and isinstance(value.args[0], Load):
                    c = value.args[1]
                    if isinstance(c, Const):
                        self.copied[found[0]] = found[1]
                        x, scale = self.uncopied(value.args[0]), scale * float(c.value)
            plain.append(x)
        update = op("add", dot.state(0), op("mul", *plain))
        axes = tuple(zip(dot.axes, dot.extents, strict=True))
        whole = Fold(axes, dot.init, (update,), dot.combine, dot.order, 0, dot.prefix)
        return whole if scale == 1.0 else op("mul", whole, Const(dt.f32, scale))


    def uncopied(self, load: Load) -> Load:
        """What `load` is a copy of: an operand is read where it lies."""
        for _ in range(4):
            found = self.m.producer(load)
            value = inline_value(found[1], load) if found is not None else None
            if found is None or not isinstance(value, Load) or value.mask is not None:
                break
            self.copied[found[0]] = found[1]
            extents = dict(self.stage.axes) | deps.fold_extents(self.stage.stores[0].value)
            simple = simplify(value, extents)
            assert isinstance(simple, Load)
            load = simple
        return load


def _dot(value: Expr) -> Fold | None:
    """The value's only Fold, if it is a product of two operands."""
    folds = [x for x in walk(value) if isinstance(x, Fold)]
    factors = multiply_add(folds[0]) if len(folds) == 1 else None
    return folds[0] if factors is not None and all(factor(f) is not None for f in factors) else None


def operations(value: Expr) -> int:
    """Operations of one element; a Fold is beyond every limit."""
    return sum(1 << 20 if isinstance(x, Fold) else isinstance(x, Op | Cast) and x.dtype is not dt.index for x in walk(value))


def _is_vector(load: Load, buffers: Mapping[str, Buffer]) -> bool:
    """Does at most one of the innermost two dimensions move (a dimension that was expanded does not)?"""
    layout = buffers[load.buf].layout
    steps = layout.strides if layout is not None else load.index
    return sum(bool(deps.free_axes(i)) and s is not const(0) for i, s in list(zip(load.index, steps, strict=True))[-2:]) <= 1
