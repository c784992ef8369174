"""The order of a body that writes inputs: what can fail comes early, last values of inputs right behind what they need (no torch).

In: Scheduled, whose program lists (input, source) pairs. Out: the same nodes in another legal order.

    k(.. -> g1); k(.. -> g2); check; k(g1, x1 -> t1); check; k(g2, x2 -> t2); x1 := t1; x2 := t2
    becomes   check; check; k(.. -> g1); k(g1, x1 -> t1); k(.. -> g2); k(g2, x2 -> t2); ...

Then sources can be written into their inputs at once (write_back.py), and gradients die where they are used instead of all at the end.
A kernel never moves ahead of a Check: it may rely on it. Checks move with the small kernels and Binds that they need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...ir.expr import Const, Expr, Sym, walk
from ...ir.kernel import Kernel, Scheduled
from ...ir.program import Bind, Buffer, Check, Cond, Extern, Program, Repeat
from ..deps import defines, numel, reads, rooted, roots_of, writes

Node = Kernel | Check | Extern | Bind | Cond | Repeat

DEPTH = 2  # a sum in parts, the sum with the new momentum, the parameter
SMALL = 64  # elements that a kernel in front of a Check may write: counters, flags

# Operators that fail only for want of memory, their operands having the shapes and dtypes of the plan. What has written an input then
# raises instead of being repeated.
SURE = frozenset({
    "aten.convolution.default", "aten.convolution_backward.default", "aten.mm.default", "aten.bmm.default", "aten.addmm.default",
    "aten.baddbmm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
})  # fmt: skip


def can_fail(node: object) -> bool:
    """May running this end the call? Kernels do not fail."""
    if isinstance(node, Extern):
        return node.op not in SURE or bool(node.binds) or bool(node.mutates)
    if isinstance(node, Cond | Repeat):
        return any(map(can_fail, node.inner))
    return isinstance(node, Check)


def order(scheduled: Scheduled) -> tuple[Node, ...]:
    """The whole pass."""
    program, body = scheduled.program, scheduled.body
    if not program.write_backs or program.target.language != "c":
        return body
    return _updates_early(scheduled, _checks_early(program.buffers, body))


class _Links:
    """Which nodes each node of a body must stay behind."""

    def __init__(self, buffers: Mapping[str, Buffer], body: Sequence[Node]) -> None:
        roots = roots_of(buffers)
        self.reads = [rooted(reads(n), roots) for n in body]
        self.writes = [rooted(writes(n), roots) for n in body]
        self.behind: list[set[int]] = []
        writer: dict[str, int] = {}
        readers: dict[str, list[int]] = {}
        made: dict[Sym, int] = {}
        for i, node in enumerate(body):
            found = {writer[b] for b in self.reads[i] | self.writes[i] if b in writer}
            found.update(j for b in self.writes[i] for j in readers.get(b, ()))
            named = self.reads[i] | self.writes[i]
            found.update(made[s] for s in _symbols(node, [buffers[b] for b in named if b in buffers]) if s in made)
            self.behind.append(found)
            for b in self.writes[i]:
                writer[b] = i
                readers[b] = []
            for b in self.reads[i] - self.writes[i]:
                readers.setdefault(b, []).append(i)
            made.update(dict.fromkeys(defines(node), i))


def _symbols(node: object, buffers: Sequence[Buffer]) -> Iterator[Sym]:
    """Every symbol that a node may need, those of its buffers' sizes included."""
    es: list[object] = [e for b in buffers for e in b.shape]
    es += [e for b in buffers if b.layout is not None for e in (*b.layout.strides, b.layout.offset)]
    if isinstance(node, Kernel):
        yield from node.syms
        es += [node.grain, *(e for _, e in node.grid)]
    elif isinstance(node, Extern):
        es += node.leaves
    elif isinstance(node, Check | Bind):
        es.append(node.cond if isinstance(node, Check) else node.value)
    elif isinstance(node, Cond | Repeat):
        es.append(node.pred if isinstance(node, Cond) else node.count)
        for inner in node.inner:
            yield from _symbols(inner, ())
    yield from (n for n in walk(*(e for e in es if isinstance(e, Expr))) if isinstance(n, Sym))


def _checks_early(buffers: Mapping[str, Buffer], body: tuple[Node, ...]) -> tuple[Node, ...]:
    """Checks of counters and arguments before what does not serve them; others stay, and nothing passes them."""
    links = _Links(buffers, body)
    light = [_is_light(buffers, n) for n in body]
    needs: dict[int, set[int]] = {}
    start, out = 0, list[Node]()
    for i in range(len(body) + 1):
        if i < len(body) and not can_fail(body[i]):
            continue
        if i < len(body) and isinstance(body[i], Check):
            needs[i] = _needed(links, i, start)
            if all(light[j] for j in needs[i]):
                continue
            del needs[i]
        elif i < len(body) and isinstance(body[i], Extern):
            continue  # a Check may come before it: the call then fails earlier
        early = set(needs).union(*needs.values())
        out += [body[j] for j in range(start, i) if j in early]
        out += [body[j] for j in range(start, min(i + 1, len(body))) if j not in early]
        start, needs = i + 1, {}
    return tuple(out)


def _needed(links: _Links, i: int, start: int) -> set[int]:
    """The nodes from `start` on that node i stands on."""
    found: set[int] = set()
    stack = [i]
    while stack:
        for j in links.behind[stack.pop()]:
            if j >= start and j not in found:
                found.add(j)
                stack.append(j)
    return found


def _is_light(buffers: Mapping[str, Buffer], node: Node) -> bool:
    if isinstance(node, Kernel):
        made = [buffers[b].shape for b in writes(node)]
        return all(isinstance(e, Const) for shape in made for e in shape) and all(numel(shape) <= SMALL for shape in made)
    return isinstance(node, Bind | Check)


def _updates_early(scheduled: Scheduled, body: tuple[Node, ...]) -> tuple[Node, ...]:
    """What leads to last values and to results, each kernel right behind what it reads and the last reader of the old values: updates
    alone, or the sums and products too that only serve them, whichever needs less memory."""
    program = scheduled.program
    links = _Links(program.buffers, body)
    found = [_moved(program, body, links, depth) for depth in (0, DEPTH)]
    return min(found, key=lambda b: _peak(program.buffers, b))


def _moved(program: Program, body: tuple[Node, ...], links: _Links, depth: int) -> tuple[Node, ...]:
    """Kernels from which at most `depth` others lead to the last one that depends on them."""
    inputs: dict[str, list[str]] = {}
    for dst, src in program.write_backs:
        inputs.setdefault(src, []).append(dst)
    users: dict[str, list[int]] = {}
    for i in range(len(body)):
        for b in links.reads[i] | links.writes[i]:
            users.setdefault(b, []).append(i)
    level = [0 if isinstance(n, Kernel) else depth + 1 for n in body]
    for i in reversed(range(len(body))):
        for j in links.behind[i]:
            level[j] = max(level[j], level[i] + 1)
    first = max((i for i, n in enumerate(body) if can_fail(n)), default=-1)
    place: list[int] = []  # of each node: the one that does not move and that it stands at or behind
    after: dict[int, list[Node]] = {}
    for i, node in enumerate(body):
        if i <= first or level[i] > depth:
            place.append(i)
            continue
        old = (j for b in links.writes[i] for dst in inputs.get(b, ()) for j in users.get(dst, ()) if j < i)
        place.append(max((first, *(place[j] for j in links.behind[i]), *(place[j] for j in old))))
        after.setdefault(place[i], []).append(node)
    out = list(after.get(-1, ()))
    for i, node in enumerate(body):
        out += [node] if place[i] == i else []
        out += after.get(i, ())
    return tuple(out)


def _peak(buffers: Mapping[str, Buffer], body: tuple[Node, ...]) -> int:
    """The most bytes of temporaries that are alive at once, about."""
    roots = roots_of(buffers)
    names = [{b for b in rooted(reads(n) | writes(n), roots) if b in buffers and buffers[b].role == "temp"} for n in body]
    last = {b: i for i, found in enumerate(names) for b in found}
    size = {b: numel(buffers[b].shape) * buffers[b].dtype.itemsize for b in last}
    alive = peak = 0
    seen = set[str]()
    for i, found in enumerate(names):
        alive += sum(size[b] for b in found - seen)
        seen |= found
        peak = max(peak, alive)
        alive -= sum(size[b] for b in found if last[b] == i)
    return peak
