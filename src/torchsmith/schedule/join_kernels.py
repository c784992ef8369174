"""Small kernels that do not depend on each other become one launch: Scheduled in, Scheduled out (no torch), for languages of blocks.

    kernel [x < 2048] a[x] = f(p[x]);   kernel [x < 2048] b[x] = g(q[x])
        becomes    kernel [x < 2048] a[x] = f(p[x]); b[x] = g(q[x])

A kernel that a fraction of the device computes takes as long as it takes to start one. Grouping of Stages (fusion/group.py) joins what
reads the same; here nothing needs to be shared, only the grid is, so partial stores and checks join as well.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from ..ir.expr import Axis, Expr, Fold, Var, walk
from ..ir.kernel import Kernel, Let, Loop, Scheduled, Stmt, expressions, rewrite, statements, values_first
from ..ir.program import Bind, Check, Cond, Extern, Repeat
from .deps import estimate, reads, rooted, roots_of, writes

Element = Kernel | Check | Extern | Bind | Cond | Repeat
MOST = 1 << 15  # elements of a grid with its tiles, below which a device is mostly idle
BUFFERS = 24  # of a joined kernel


@dataclass(frozen=True, slots=True)
class _Entry:
    """A kernel of a run or a call between its kernels, and the memory that it touches and writes."""

    element: Kernel | Extern
    touches: frozenset[str]
    writes: frozenset[str]
    steady: bool
    small: bool

    def meets(self, other: _Entry) -> bool:
        """Does one write what the other touches?"""
        return not (self.touches.isdisjoint(other.writes) and self.writes.isdisjoint(other.touches))


def join_kernels(scheduled: Scheduled, steady: Set[str]) -> Scheduled:
    """In runs of kernels and calls on the top level each kernel joins the first one before it that it may be computed with; past a call
    that one goes down, since what is computed later is held for a shorter time. What works on `steady` buffers alone, which are the same in
    the next call, stays apart from what does not."""
    roots = roots_of(scheduled.program.buffers)

    def entry(k: Kernel | Extern) -> _Entry:
        written = rooted(writes(k), roots)
        touches = rooted(reads(k), roots) | written
        if isinstance(k, Extern):
            return _Entry(k, touches, written, False, False)
        return _Entry(k, touches, written, all(p.buf in steady for p in k.params), is_small(k))

    out: list[Element] = []
    run: list[_Entry] = []
    for element in (*scheduled.body, None):
        if isinstance(element, Kernel | Extern):
            _take(run, entry(element), entry)
            continue
        out += [e.element for e in run]
        run = []
        if element is not None:
            out.append(element)
    return scheduled if len(out) == len(scheduled.body) else replace(scheduled, body=tuple(out))


def _take(run: list[_Entry], new: _Entry, entry: Callable[[Kernel], _Entry]) -> None:
    """Add to the run: a kernel to one of its kernels where it can pass by those behind that one, or that one by them; else at its end."""
    b = new.element
    for k, old in enumerate(run if new.small else ()):
        a = old.element
        if isinstance(a, Extern) or isinstance(b, Extern) or not old.small or old.steady != new.steady or not _fit(a, b) or old.meets(new):
            continue
        between = run[k + 1 :]
        calls = any(isinstance(e.element, Extern) for e in between)
        if not calls and not any(e.meets(new) for e in between):
            run[k] = entry(_joined(a, b))
            return
        if not (calls and (a.syms or b.syms)) and not any(e.meets(old) for e in between):
            run[k:] = [*between, entry(_joined(a, b))]
            return
    run.append(new)


def is_small(k: Kernel) -> bool:
    """Does most of the device idle while it runs?"""
    total = lanes = 1
    for _, extent in k.grid:
        total *= estimate(extent)
    for t in k.tiles:
        lanes *= t.size if t.how == "lanes" else 1
    inner = max((t.size for t in k.tiles if t.how != "lanes"), default=1)
    few = total * inner <= MOST or 4 * total <= lanes * k.target.weights.processors
    return len(k.grid) <= 1 and few and all(t.how in ("lanes", "row") for t in k.tiles) and not k.scratch


def _inner(k: Kernel) -> dict[Axis, Expr]:
    """Axes that are bound inside of the kernel, with their extents."""
    found: dict[Axis, Expr] = {}
    for s in statements(k.body):
        if isinstance(s, Loop):
            found[s.axis] = s.extent
        for e in walk(*expressions(s)):
            if isinstance(e, Fold):
                found.update(zip(e.axes, e.extents, strict=True))
    return found


def _fit(a: Kernel, b: Kernel) -> bool:
    """Have they one grid, and no inner axis that means another in each, or is the grid's of the joined kernel?"""
    if [e for _, e in a.grid] != [e for _, e in b.grid] or a.target != b.target or len({p.buf for k in (a, b) for p in k.params}) > BUFFERS:
        return False
    in_a, in_b = _inner(a), _inner(b)
    tiles = {t.axis: t for t in a.tiles}
    if any(in_a[x] is not in_b[x] for x in in_a.keys() & in_b.keys()):
        return False
    if any(x is not y and x in in_b for (x, _), (y, _) in zip(a.grid, b.grid, strict=True)):
        return False
    return all(tiles.get(t.axis, t) == t for t in b.tiles if t.how != "lanes")


def _joined(a: Kernel, b: Kernel) -> Kernel:
    table: dict[Expr, Expr] = {y: x for (x, _), (y, _) in zip(a.grid, b.grid, strict=True)}
    taken = {s.var.name for s in statements(a.body) if isinstance(s, Let)}
    body: list[Stmt] = [rewrite(s, table, {}) for s in b.body] if any(x is not y for y, x in table.items()) else list(b.body)
    renamed: dict[Expr, Expr] = {s.var: Var(_free(s.var.name, taken), s.var.dtype) for s in statements(body) if isinstance(s, Let)}
    body = [_with_vars(s, renamed) for s in body]
    lanes = [min(s, t, key=lambda x: x.size) for s in a.tiles for t in b.tiles if s.how == t.how == "lanes"]
    axis = a.grid[0][0] if a.grid else None
    if len(lanes) < max(sum(t.how == "lanes" for t in k.tiles) for k in (a, b)):  # only one of them has lanes
        lanes = []
    kept = [replace(t, axis=axis) for t in lanes] if axis is not None else []
    rows = dict.fromkeys(t for k in (a, b) for t in k.tiles if t.how != "lanes")
    params = {p.buf: p for k in (a, b) for p in k.params}
    return replace(
        a, name=f"{a.name}_{b.name}"[:80], params=tuple(params.values()), syms=values_first((*a.syms, *b.syms)),
        body=(*a.body, *body), origins=tuple(dict.fromkeys((*a.origins, *b.origins))), ranges=tuple(dict.fromkeys((*a.ranges, *b.ranges))),
        tiles=(*kept, *rows), launch=(max(a.launch[0], b.launch[0]), max(a.launch[1], b.launch[1])), kind="",
    )  # fmt: skip


def _free(name: str, taken: set[str]) -> str:
    found, k = name, 0
    while found in taken:
        found, k = f"{name}_{k}", k + 1
    taken.add(found)
    return found


def _with_vars(s: Stmt, renamed: dict[Expr, Expr]) -> Stmt:
    s = rewrite(s, renamed, {})
    if isinstance(s, Let):
        var = renamed[s.var]
        assert isinstance(var, Var)
        return replace(s, var=var)
    if isinstance(s, Loop):
        return replace(s, body=tuple(_with_vars(x, renamed) for x in s.body))
    return s
