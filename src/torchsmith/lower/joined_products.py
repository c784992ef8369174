"""Products of one left factor with several weights, on a GPU: one library call. FunctionalGraph in, FunctionalGraph out.

    q = addmm(b, x, t(u));  k = addmm(c, x, t(v))
        becomes    w = addmm(cat(b, c), x, t(cat(u, v)));  q = w[:, :n];  k = w[:, n:]

Few rows leave most of a GPU idle, and each call takes as long as a longer one. The joined weights are made once, in `prepare`. What only
views the results gets the strides that it has now, so that a call which takes strided tensors reads them where they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..graph.spec import FunctionalGraph, TensorSpec
from ..ir.expr import const
from ..options import Options
from .layout import LIBRARY_DEVICES
from .ref import constant, known
from .rewriter import Rewriter, lies

aten = torch.ops.aten
VIEWS = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.slice.Tensor, aten.select.int, aten.t.default,
})  # fmt: skip
MOST = 4e9  # multiply-adds of a joined product: what takes longer keeps the device busy by itself
BYTES = 16 << 20  # of joined weights, which are there twice


def join_products(fg: FunctionalGraph, options: Options) -> FunctionalGraph:
    """Where the left factor is a result as well, a backward graph wants it: weights change at every call there."""
    if options.libtorch == "forbid" or not any(_parts(n) for n in fg.graph.nodes):
        return fg
    rewriter = Rewriter(fg)
    groups: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in rewriter.nodes:
        parts = _parts(node)
        if parts is None or parts[0] in rewriter.kept.values():
            continue
        x, weight, bias = parts
        if weight in rewriter.constants and (bias is None or bias in rewriter.constants) and _may_move(rewriter, node):
            groups.setdefault((x, node.target, weight.meta["spec"].dtype), []).append(node)
    found = [group for group in groups.values() if len(group) > 1 and _pays(group)]
    for group in found:
        _join(rewriter, group)
    return rewriter.done() if found else fg


def _parts(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """(x, weight, bias) of x @ t(weight) + bias of known sizes on a GPU."""
    if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return None
    bias, (x, right) = (node.args[0], node.args[1:3]) if node.target is aten.addmm.default else (None, node.args[:2])
    if not isinstance(x, fx.Node) or not isinstance(right, fx.Node) or right.target is not aten.t.default or len(node.args) > 3:
        return None
    weight, spec = right.args[0], node.meta.get("spec")
    if not isinstance(weight, fx.Node) or not isinstance(spec, TensorSpec) or not (bias is None or isinstance(bias, fx.Node)):
        return None
    if spec.device.partition(":")[0] not in LIBRARY_DEVICES or None in map(known, (*spec.shape, *weight.meta["spec"].shape)):
        return None
    if bias is not None and len(bias.meta["spec"].shape) != 1:
        return None
    return x, weight, bias


def _pays(group: Sequence[fx.Node]) -> bool:
    weights = [parts[1].meta["spec"] for n in group if (parts := _parts(n)) is not None]
    elements = sum(math.prod(constant(n) for n in w.shape) for w in weights)
    rows = constant(group[0].meta["spec"].shape[0])
    return rows * elements <= MOST and elements * weights[0].dtype.itemsize <= BYTES


def _seen(node: fx.Node) -> Iterator[fx.Node]:
    """The views of `node`, and views of these, in order."""
    for user in node.users:
        if user.target in VIEWS and user.args[0] is node:
            yield user
            yield from _seen(user)


def _may_move(rewriter: Rewriter, node: fx.Node) -> bool:
    """Does nothing leave the graph that shows how the result lies?"""
    return not {node, *_seen(node)} & set(rewriter.kept.values())


def _join(rewriter: Rewriter, group: Sequence[fx.Node]) -> None:
    first, parts = group[0], [p for n in group if (p := _parts(n)) is not None]
    x, like = parts[0][0], first.meta["spec"]
    widths = [constant(n.meta["spec"].shape[1]) for n in group]
    rows, total, inner = like.shape[0], const(sum(widths)), parts[0][1].meta["spec"].shape[1]

    with rewriter.graph.inserting_before(first):
        weight = rewriter.make(aten.cat.default, ([w for _, w, _ in parts], 0), first, lies(like, (total, inner)))
        args = [x, rewriter.make(aten.t.default, (weight,), first, lies(like, (inner, total), (1, inner)))]
        if parts[0][2] is not None:
            args.insert(0, rewriter.make(aten.cat.default, ([b for *_, b in parts], 0), first, lies(like, (total,))))
        wide = rewriter.make(first.target, args, first, lies(like, (rows, total)))
        at, pieces = 0, []
        for node, width in zip(group, widths, strict=True):
            seen = lies(like, node.meta["spec"].shape, (total, 1))
            pieces.append(rewriter.make(aten.slice.Tensor, (wide, 1, at, at + width), node, seen))
            at += width
    for node, piece in zip(group, pieces, strict=True):
        rewriter.swap(node, piece)
        for view in _seen(piece):
            _lie_anew(view)


def _lie_anew(view: fx.Node) -> None:
    """The strides that a view of known sizes has, now that what it views lies otherwise; where it has to be a copy, those it had."""
    given, spec = view.args[0].meta["spec"], view.meta["spec"]  # type: ignore[union-attr]
    numbers = [known(n) for n in (*given.shape, *given.strides)]
    if None in numbers or any(isinstance(a, fx.Node) for a in view.args[1:]):
        return
    rank = len(given.shape)
    stand_in: Any = torch.empty_strided(numbers[:rank], numbers[rank:], device="meta")  # type: ignore[arg-type]
    target: Any = view.target
    try:
        made = target(stand_in, *view.args[1:], **view.kwargs)
    except RuntimeError:
        return
    view.meta["spec"] = lies(spec, spec.shape, made.stride())
