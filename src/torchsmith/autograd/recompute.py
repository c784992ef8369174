"""What the backward pass keeps and what it computes again: a minimum cut under a cost model.

In: the forward pass's nodes in order, which of them the backward pass reads, a budget. Out: a Choice. Every node that is read, or that
something computed again reads, is kept (its bytes) or computed again (its work); the cheapest assignment is a minimum cut. By default only
views, constants and element-wise operators are computed again, which fuse into what reads them; a budget below 1 lets the others in at a
price that falls until the bytes kept fit. Of a checkpointed part all is computed again for nothing, but what its policy keeps and what the
program goes on with behind it. Random operators and those with effects are never repeated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..codes import Unsupported
from ..graph.spec import TensorSpec
from ..graph.values import Node, inputs_of
from ..ir.expr import Const

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}  # where the left operand stands
FLOPS_PER_BYTE = 20.0  # that take as long as a byte of memory
ELEMENT = 0.25  # of its bytes: what an element-wise operator costs in the kernel that reads it
PRICES = (*(4.0**k for k in range(3, -8, -1)), 0.0)  # of work against bytes, under a budget
UNKNOWN = 64  # a size that varies
NEVER = math.inf
_REPEATS_BADLY = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True)
class Choice:
    """Ids of nodes to compute again, bytes that are kept, and bytes that would be kept if only views were made again."""

    again: frozenset[int]
    kept: int
    plain: int


def choose(
    nodes: Sequence[Node], needed: Iterable[int], free: frozenset[int], budget: float, loose: frozenset[int] = frozenset(),
    exact: frozenset[int] = frozenset(),
) -> Choice:  # fmt: skip
    """The cheapest choice whose kept bytes are at most `budget` (0 to 1) of what the default keeps, or the one that keeps least.

    needed: ids of nodes that the backward pass reads. free: ids of results, which stay alive anyway. loose: ids of inputs that eager does
    not save. Those, and results that eager does not save, may be written before the backward pass: nothing is computed again from them.
    exact: ids of nodes of which the backward pass needs the very bits, which another kernel need not give.
    """
    problem = _Problem(nodes, frozenset(needed), free, loose, exact)
    plain, best = problem.solve(NEVER, NEVER), problem.solve(ELEMENT, NEVER)
    limit = best[1] * budget
    for price in PRICES if budget < 1 else ():
        if best[1] <= limit:
            break
        best = problem.solve(price * ELEMENT, price)
        if best[1] <= limit:  # layers that are alike have one price: only as many of them as have to be
            best = problem.fewest(price, limit, best)
    return Choice(best[0], best[1], plain[1])


class _Problem:
    """The nodes that matter: what is needed and all that it is made of."""

    def __init__(
        self, nodes: Sequence[Node], needed: frozenset[int], free: frozenset[int], loose: frozenset[int], exact: frozenset[int]
    ) -> None:
        wanted, relevant = set(needed), []
        for node in reversed(nodes):
            if id(node) in wanted:
                relevant.append(node)
                wanted.update(id(a) for a in inputs_of(node))
        self.nodes, self.needed, self.free = relevant[::-1], needed, free
        self.fixed = {id(n) for n in nodes if id(n) in exact and n.again is None}  # ids of nodes that are not computed again
        views = set(loose)
        for node in nodes:
            if any(id(a) in views for a in inputs_of(node)):  # it reads what may have been written
                (self.fixed if node.view_of is None else views).add(id(node))
        self.left: set[int] = set()  # ids of results of checkpointed parts, which others read
        for node in nodes:
            self.left.update(id(a) for a in inputs_of(node) if a.region is not None and a.region is not node.region)

    def fewest(self, price: float, limit: float, best: tuple[frozenset[int], int]) -> tuple[frozenset[int], int]:
        """With this price for the first nodes only, as few as keep at most `limit` bytes; for all of them that is `best`."""
        low, high = 0, len(self.nodes)
        while high - low > max(1, len(self.nodes) // 64):
            middle = (low + high) // 2
            found = self.solve(price * ELEMENT, price, middle)
            if found[1] <= limit:
                high, best = middle, found
            else:
                low = middle
        return best

    def solve(self, element: float, work: float, first: int | None = None) -> tuple[frozenset[int], int]:
        """(nodes to compute again, bytes kept) where element-wise operators cost `element` of their bytes and others `work` of theirs;
        first: those are the prices of so many nodes, the others have the default's."""
        number = {id(n): i for i, n in enumerate(self.nodes)}
        flow = _Flow(2 * len(self.nodes) + 2)
        source, sink = 2 * len(self.nodes), 2 * len(self.nodes) + 1
        for i, node in enumerate(self.nodes):
            flow.edge(2 * i, 2 * i + 1, self._keeping(node))
            prices = (element, work) if first is None or i < first else (ELEMENT, NEVER)
            flow.edge(source, 2 * i, self._repeating(node, *prices))
            for a in inputs_of(node):
                if id(a) in number:  # others are inputs and constants: always there
                    flow.edge(2 * number[id(a)] + 1, 2 * i, NEVER)
            if id(node) in self.needed:
                flow.edge(2 * i + 1, sink, NEVER)
        reached = flow.reached(source, sink)
        again = frozenset(id(n) for i, n in enumerate(self.nodes) if not reached[2 * i])
        kept = (n for i, n in enumerate(self.nodes) if reached[2 * i] and not reached[2 * i + 1] and id(n) not in self.free)
        return again, sum(int(keeping(n)) for n in kept)

    def _keeping(self, node: Node) -> float:
        if id(node) not in self.free:
            return keeping(node)
        return 0.0 if id(node) in self.needed else NEVER

    def _repeating(self, node: Node, element: float, work: float) -> float:
        """`_repeating`, as checkpoints want it, and as what the program may write allows."""
        if id(node) in self.fixed:
            return NEVER
        cost = _repeating(node, element, work)
        if node.again is None or element == NEVER or cost == 0:
            return cost
        if not node.again or id(node) in self.left:
            return NEVER
        return 0.0 if _repeating(node, ELEMENT, 1.0) < NEVER else NEVER


def _numel(spec: TensorSpec) -> int:
    return math.prod(int(s.value) if isinstance(s, Const) else UNKNOWN for s in spec.shape)


def _nbytes(spec: Any) -> int:
    if isinstance(spec, TensorSpec):
        return _numel(spec) * spec.dtype.itemsize
    return sum(_nbytes(s) for s in spec) if isinstance(spec, (tuple, list)) else 0


def keeping(node: Node) -> float:
    """What keeping a node's value costs: its bytes; several results are kept one by one."""
    return NEVER if isinstance(node.spec, (tuple, list)) else float(max(1, _nbytes(node.spec)))


def _repeating(node: Node, element: float, work: float) -> float:
    """What computing a node again costs."""
    if node.effect:
        return NEVER
    if node.kind == "item" or node.view_of is not None:
        return 0.0
    if node.kind != "call" or not isinstance(node.target, torch._ops.OpOverload):
        return NEVER
    if node.target.namespace != "aten" or node.target._schema.is_mutable or _REPEATS_BADLY & set(node.target.tags):
        return NEVER
    if not inputs_of(node):
        return 0.0
    if torch.Tag.pointwise in node.target.tags:
        return NEVER if element == NEVER else element * _nbytes(node.spec)
    return NEVER if work == NEVER else work * _work(node)


def _work(node: Node) -> float:
    """In bytes of memory that take as long."""
    flops = 0.0
    if node.target in PRODUCTS and isinstance(node.spec, TensorSpec):
        left = node.args[PRODUCTS[node.target]]
        flops = 2.0 * _numel(node.spec) * _numel(left.spec) / max(1, _numel(_without_last(left.spec)))
    elif node.target is aten.convolution.default and isinstance(node.spec, TensorSpec):
        weight = node.args[1].spec
        first = weight.shape[0]
        flops = 2.0 * _numel(node.spec) * _numel(weight) / max(1, int(first.value) if isinstance(first, Const) else UNKNOWN)
    return _nbytes(node.spec) + sum(_nbytes(a.spec) for a in inputs_of(node)) + flops / FLOPS_PER_BYTE


def _without_last(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.dtype, spec.shape[:-1], spec.strides[:-1], spec.device)


class _Flow:
    """Dinic's maximum flow."""

    def __init__(self, n: int) -> None:
        self.out: list[list[int]] = [[] for _ in range(n)]
        self.to: list[int] = []
        self.room: list[float] = []

    def edge(self, a: int, b: int, room: float) -> None:
        for x, y, r in ((a, b, room), (b, a, 0.0)):
            self.out[x].append(len(self.to))
            self.to.append(y)
            self.room.append(r)

    def reached(self, source: int, sink: int) -> list[bool]:
        """After the maximum flow: what the source still reaches."""
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return [x >= 0 for x in level]
            at = [0] * len(self.out)
            while self._push(source, sink, level, at):
                pass

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self.out)
        level[source] = 0
        queue = deque([source])
        while queue:
            x = queue.popleft()
            for e in self.out[x]:
                y = self.to[e]
                if self.room[e] > 0 and level[y] < 0:
                    level[y] = level[x] + 1
                    queue.append(y)
        return level

    def _push(self, source: int, sink: int, level: list[int], at: list[int]) -> bool:
        """One more path of the level graph, by depth-first search without recursion."""
        path: list[int] = []
        x = source
        while x != sink:
            while at[x] < len(self.out[x]):
                e = self.out[x][at[x]]
                if self.room[e] > 0 and level[self.to[e]] == level[x] + 1:
                    break
                at[x] += 1
            else:
                if x == source:
                    return False
                level[x] = -1
                x = self.to[path.pop() ^ 1]
                continue
            path.append(e)
            x = self.to[e]
        least = min(self.room[e] for e in path)
        if least == NEVER:
            raise Unsupported("AUT004", detail="a value that can neither be kept nor computed again")
        for e in path:
            self.room[e] -= least
            self.room[e ^ 1] += least
        return True
