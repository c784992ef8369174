"""Gradients of weights in TF32, on a GPU: factors are turned so that their sums run along memory. FunctionalGraph in, FunctionalGraph out.

    mm(t(g), x)    g: (rows, out), x: (rows, in)        becomes    mm(t(g), t(copy of t(x)))    or    mm(copy of t(g), x)

Matrix units take TF32 numbers only along the sum, so the library turns what lies across it piece by piece, for each tile again. On an H200
(2048, 768)^T (2048, 3072) takes 65 us, with either factor turned 46 to 52, with both 40; a turned copy, read by all products of that
factor, takes 5 us for 768 columns. Where a copy costs as much as it gives, nothing is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from ..graph.spec import FunctionalGraph, TensorSpec
from ..options import Options
from .layout import LIBRARY_DEVICES
from .ref import known
from .rewriter import Rewriter, lies

aten = torch.ops.aten
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
RATE = 6e13  # multiply-adds a second of a product whose factors both lie across the sum
SAVED = 0.22  # of its time, with one of them turned
BANDWIDTH, START = 3.2e12, 1.5e-6  # bytes a second of a turning copy, read and written, and seconds that a kernel takes beside them
LEAST = 1e-6  # seconds that must be gained


@dataclass(slots=True)
class _Factor:
    """A matrix (k, n), row by row, and the products that sum over its rows: (node, which argument of it, seconds of it)."""

    matrix: fx.Node
    rows: int
    columns: int
    products: list[tuple[fx.Node, int, float]] = field(default_factory=list)

    def gain(self, done: set[fx.Node]) -> float:
        saved = sum(SAVED * seconds for node, _, seconds in self.products if node not in done)
        return saved - 8 * self.rows * self.columns / BANDWIDTH - START


def is_allowed() -> bool:
    """May products of float32 be computed in TF32 now? Whatever is compiled is for the present setting."""
    return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


def turn_factors(fg: FunctionalGraph, options: Options) -> FunctionalGraph:
    """Of each product at most one factor, that which gains most first."""
    if options.libtorch == "forbid" or not any(map(_sizes, fg.graph.nodes)) or not is_allowed():
        return fg
    rewriter = Rewriter(fg)
    factors: dict[tuple[fx.Node, int, int], _Factor] = {}
    for node in rewriter.nodes:
        sizes = _sizes(node)
        if sizes is None:
            continue
        m, k, n = sizes
        seconds = m * k * n / RATE
        for at, columns in ((0, m), (1, n)):
            matrix = _of_rows(node.args[at], at)  # type: ignore[arg-type]
            if matrix is not None:
                factor = factors.setdefault((_source(matrix), k, columns), _Factor(matrix, k, columns))
                factor.products.append((node, at, seconds))
    done: set[fx.Node] = set()
    for factor in sorted(factors.values(), key=lambda f: -f.gain(set())):
        if factor.gain(done) >= LEAST:
            _turn(rewriter, factor, done)
    return rewriter.done() if done else fg


def _sizes(node: fx.Node) -> tuple[int, int, int] | None:
    """(m, k, n) of a product of float32 on a GPU whose factors both lie across the sum."""
    if node.op != "call_function" or node.target is not aten.mm.default or len(node.args) != 2:
        return None
    a, b = (x.meta.get("spec") if isinstance(x, fx.Node) else None for x in node.args)
    if not isinstance(a, TensorSpec) or not isinstance(b, TensorSpec) or a.dtype is not torch.float32:
        return None
    if a.device.partition(":")[0] not in LIBRARY_DEVICES:
        return None
    m, k, n = (known(x) for x in (*a.shape, b.shape[1]))
    if m is None or k is None or n is None or min(m, k, n) < 2:
        return None
    across = [known(s) for s in (*a.strides, *b.strides)] == [1, m, n, 1]
    return (m, k, n) if across else None


def _of_rows(x: fx.Node, at: int) -> fx.Node | None:
    """The matrix (k, columns) that is factor number `at` of a product, or that this one shows turned."""
    if at == 1:
        return x
    return x.args[0] if x.target is aten.t.default and isinstance(x.args[0], fx.Node) else None


def _source(x: fx.Node) -> fx.Node:
    while x.target in VIEWS and isinstance(x.args[0], fx.Node):
        x = x.args[0]
    return x


def _turn(rewriter: Rewriter, factor: _Factor, done: set[fx.Node]) -> None:
    products = [(node, at) for node, at, _ in factor.products if node not in done]
    first, k, n = products[0][0], factor.rows, factor.columns
    like = first.meta["spec"]
    with rewriter.graph.inserting_before(first):
        seen = rewriter.make(aten.t.default, (factor.matrix,), first, lies(like, (n, k), (1, n)))
        turned = rewriter.make(aten.clone.default, (seen,), first, lies(like, (n, k)), memory_format=torch.contiguous_format)
        back = rewriter.make(aten.t.default, (turned,), first, lies(like, (k, n), (1, k)))
    for node, at in products:
        node.update_arg(at, turned if at == 0 else back)
        done.add(node)
