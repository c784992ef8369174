"""Who reads and writes what: the buffers of every element, the pinned buffers of a Program, sizes as estimates.

In: elements of a Program's body. Out: sets of buffer names, estimated trip counts.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from ..ir import memo
from ..ir.expr import Axis, Const, Expr, Fold, Load, Op, Sym, const, op, walk
from ..ir.kernel import Kernel, Param
from ..ir.program import Bind, Buffer, Check, Cond, Element, Extern, Fresh, Program, Repeat, Stage, ViewResult, root_of

SYMBOL_GUESS = 97  # what an unknown size is taken for in estimates (never in code)


def stage_exprs(s: Stage) -> list[Expr]:
    """Every expression of a Stage."""
    out = [e for _, e in s.axes] + [e for _, e in s.lets] + [e for _, e in s.carry] + list(s.carry_next)
    for t in s.stores:
        out += [*t.index, t.value]
        if t.mask is not None:
            out.append(t.mask)
    return out


def loads_in(*roots: Expr) -> tuple[Load, ...]:
    """Distinct Loads."""
    return tuple(e for e in walk(*roots) if isinstance(e, Load))


@memo.by_identity
def stage_loads(s: Stage) -> tuple[Load, ...]:
    return loads_in(*stage_exprs(s))


def reads(e: object) -> frozenset[str]:
    """Buffers that a body element reads (accumulating stores read too)."""
    return _rw(e)[0]


def writes(e: object) -> frozenset[str]:
    """Buffers that a body element writes."""
    return _rw(e)[1]


@memo.by_identity
def _rw(e: object) -> tuple[frozenset[str], frozenset[str]]:
    if isinstance(e, Stage):
        got = {x.buf for x in stage_loads(e)} | {s.buf for s in e.stores if s.mode != "set" or not s.unique or s.mask is not None}
        return frozenset(got), frozenset(s.buf for s in e.stores)
    if isinstance(e, Kernel):
        return frozenset(p.buf for p in e.params), frozenset(p.buf for p in e.params if p.written)
    if isinstance(e, Extern):
        got = {*e.buffers, *e.mutates, *(x.buf for x in loads_in(*e.numbers))}
        return frozenset(got), frozenset((*e.outs, *e.mutates))
    if isinstance(e, Check):
        return frozenset(x.buf for x in loads_in(e.cond)), frozenset()
    if isinstance(e, Bind):
        return frozenset(x.buf for x in loads_in(e.value)), frozenset()
    if isinstance(e, Cond):
        head = frozenset(x.buf for x in loads_in(e.pred))
        return head.union(*map(reads, e.inner)), frozenset().union(*map(writes, e.inner))
    if isinstance(e, Repeat):
        return frozenset().union(*map(reads, e.inner)), frozenset().union(*map(writes, e.inner))
    raise TypeError(f"not a body element: {e!r}")


def defines(e: object) -> tuple[Sym, ...]:
    """Symbols that no element before this one may use."""
    if isinstance(e, Extern):
        return tuple(sym for sym, _, _ in e.binds)
    return (e.sym,) if isinstance(e, Bind) else ()


def roots_of(buffers: Mapping[str, Buffer]) -> dict[str, str]:
    """buffer -> the buffer whose storage it lies in, for views."""
    return {n: root_of(buffers, n) for n, b in buffers.items() if b.storage_of is not None}


def rooted(names: frozenset[str], roots: Mapping[str, str]) -> frozenset[str]:
    """The storages behind `names`."""
    return names if roots.keys().isdisjoint(names) else frozenset(roots.get(n, n) for n in names)


def pinned(program: Program) -> set[str]:
    """Buffers that must exist in memory whatever the Stages do: results, write-backs, whatever is not a temp, what hosts and views see."""
    out = {n for n, b in program.buffers.items() if b.role != "temp" or b.storage_of is not None}
    out |= {b.storage_of for b in program.buffers.values() if b.storage_of is not None}
    for r in program.results:
        if isinstance(r, Fresh):
            out.add(r.buf)
        elif isinstance(r, ViewResult):
            if isinstance(r.of, str):
                out.add(r.of)
        else:
            value = getattr(r, "value", None)
            if isinstance(value, Expr):
                out |= {x.buf for x in loads_in(value)}
    for pair in program.write_backs:
        out |= set(pair)
    for e in program.body:
        if not isinstance(e, Stage):
            out |= reads(e) | writes(e)
    return out


def writers(body: tuple[Element, ...], roots: Mapping[str, str]) -> dict[str, list[int]]:
    """Positions at which each storage is written."""
    out: dict[str, list[int]] = {}
    for i, e in enumerate(body):
        for b in rooted(writes(e), roots):
            out.setdefault(b, []).append(i)
    return out


Work = Mapping[tuple[Expr, ...], int]  # operations, by the sizes that vary and for each combination of which they are done


def repeated(work: Work, extents: Iterable[Expr]) -> Work:
    """`work` for each combination of `extents`."""
    sizes = tuple(extents)
    varying, known = tuple(e for e in sizes if not isinstance(e, Const)), numel(e for e in sizes if isinstance(e, Const))
    return {(*k, *varying): n * known for k, n in work.items()}


def together(works: Iterable[Work]) -> Work:
    """All of `works`, one after the other."""
    total: dict[tuple[Expr, ...], int] = {}
    for work in works:
        for k, n in work.items():
            total[k] = total.get(k, 0) + n
    return total


def parameters(
    names: Iterable[str], buffers: Mapping[str, Buffer], written: Container[str], nodes: list[Expr]
) -> tuple[tuple[Param, ...], tuple[Sym, ...]]:
    """Parameters of a kernel for these buffers, and every symbol among its nodes and the layouts."""
    params = []
    for name in names:
        b = buffers[name]
        assert b.layout is not None
        params.append(Param(name, b.dtype, b.shape, b.layout, name in written))
        nodes = [*nodes, *walk(b.layout.offset, *b.layout.strides)]
    return tuple(params), tuple(dict.fromkeys(n for n in nodes if isinstance(n, Sym)))


def operations(work: Work) -> int:
    """How many, with guesses for sizes that vary."""
    return sum(n * numel(k) for k, n in work.items())


def grain(budget: int, work: Work) -> Expr:
    """The least items of a grid that are worth a thread, if an item does `work` and `budget` is worth one. Sizes that vary count as they
    are at the call: a guess that is ten times too small leaves a long loop to one thread."""
    each: Expr = const(0)
    for sizes, n in work.items():
        term: Expr = const(n)
        for size in sizes:
            term = term * (const(max(1, estimate(size))) if any(isinstance(x, Axis) for x in walk(size)) else op("max", size, const(1)))
        each = each + term
    return op("max", op("floordiv", const(budget), op("max", each, const(1))), const(1))


def estimate(e: Expr) -> int:
    """A size as a number: exact where constant, a guess where symbolic."""
    if isinstance(e, Const):
        return int(e.value)
    if isinstance(e, Sym | Axis):
        return SYMBOL_GUESS
    if isinstance(e, Op) and e.args:
        a = [estimate(x) for x in e.args]
        rules = {"add": sum, "mul": _product, "sub": lambda v: v[0] - v[1], "min": min, "max": max, "neg": lambda v: -v[0],
                 "floordiv": lambda v: v[0] // v[1] if v[1] else 0, "mod": lambda v: v[0] % v[1] if v[1] else 0}  # fmt: skip
        rule = rules.get(e.name)
        if rule is not None:
            return int(rule(a))  # type: ignore[operator]
    return SYMBOL_GUESS


def _product(v: Iterable[int]) -> int:
    n = 1
    for x in v:
        n *= x
    return n


def numel(extents: Iterable[Expr]) -> int:
    return _product(max(0, estimate(e)) for e in extents)


_FOLDS: dict[tuple[Expr, ...], dict[Axis, Expr]] = memo.table({})


def fold_extents(*roots: Expr) -> dict[Axis, Expr]:
    """Extents of all Fold axes under `roots`; not to be changed."""
    out = _FOLDS.get(roots)
    if out is None:
        out = {a: n for e in walk(*roots) if isinstance(e, Fold) for a, n in zip(e.axes, e.extents, strict=True)}
        _FOLDS[roots] = out
    return out


_DEPTH: dict[Expr, int] = memo.table({})


def depth(e: Expr) -> int:
    """Levels of an expression: what recursive walks over it need of the stack."""
    found = _DEPTH.get(e)
    if found is None:
        levels: dict[Expr, int] = {}
        for node in walk(e):
            levels[node] = _DEPTH.get(node) or 1 + max((levels[a] for a in node.args), default=0)
        _DEPTH.update(levels)
        found = levels[e]
    return found


_FREE: dict[Expr, frozenset[Axis]] = memo.table({})


def free_axes(e: Expr) -> frozenset[Axis]:
    """Axes that occur in `e` and are not bound by a Fold inside it."""
    done = _FREE.get(e)
    if done is None:
        if isinstance(e, Axis):
            done = frozenset((e,))
        else:
            done = frozenset().union(*(free_axes(a) for a in e.args)) if e.args else frozenset()
            if isinstance(e, Fold):
                done -= frozenset(e.axes)
        _FREE[e] = done
    return done


def lasting(program: Program) -> set[str]:
    """Buffers that hold the same from call to call: constants, and what is computed of nothing else."""
    found = set(program.consts)
    for e in program.body:
        if isinstance(e, Stage) and reads(e) and reads(e) <= found:
            found |= writes(e)
    return found
