"""Higher-order operators of graphs that another capture made, written out: a call of plain functions instead.

In: a graph and the module whose attributes are the regions' bodies. Out: the same graph; nodes call what computes the operator by torch's
functions. Bodies are ATen on values. Raises Unsupported (BCK006) for one that has no such form; what depends on values is decided while
the graph is traced: a branch that draws or may raise is refused (GRA012).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from ..codes import Unsupported
from ..graph import tracing

LONGEST = 256  # steps that a loop is written out for


def _functionalized(op: Any, **kwargs: Any) -> Any:
    """Copies of what an operator writes to, the operator on them. Torch's own words, but for the copies."""
    torchs = import_module("torch._higher_order_ops.auto_functionalize")
    names, _ = torchs.get_mutable_args(op)
    return torchs.auto_functionalized_dense(op, _only_clone_these_tensors=(), **kwargs | {n: _copy(kwargs[n]) for n in names})


def _functionalized_views(op: Any, _all_bases: Sequence[Any] = (), **kwargs: Any) -> Any:
    torchs = import_module("torch._higher_order_ops.auto_functionalize")
    return torchs.auto_functionalized_v2_dense(op, _only_clone_these_bases=(), _all_bases=list(map(_copy, _all_bases)), **kwargs)


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return list(map(_copy, value)) if isinstance(value, (list, tuple)) else value
    made = value.clone()
    if made.stride() != value.stride():
        raise NotImplementedError("a custom operator writes to a tensor with gaps in its memory")
    return made


def _call(body: Callable[..., Any], *operands: Any) -> Any:
    return body(*operands)


def _named(body: Callable[..., Any], identifier: Any, *operands: Any) -> Any:
    return body(*operands)


def _cond(pred: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    if not isinstance(pred, torch.Tensor):
        return (yes if pred else no)(*operands)
    trace = tracing.active()
    if trace is None:
        return (yes if bool(pred) else no)(*operands)
    before = trace.draws + trace.harms + len(trace.writes)
    ways = [body(*operands) for body in (yes, no)]
    if trace.draws + trace.harms + len(trace.writes) != before:
        raise NotImplementedError("a branch of cond draws random numbers, or may raise on values")
    return tuple(a if a is None else torch.where(pred, a, b) for a, b in zip(*ways, strict=True))


def _steps(xs: Sequence[Any]) -> range:
    n = xs[0].shape[0]
    if not 0 < int(n) <= LONGEST:
        raise NotImplementedError(f"a loop over {n} elements; loops are written out from 1 to {LONGEST}")
    return range(int(n))


def _stacked(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


def _map(body: Callable[..., Any], xs: Sequence[Any], operands: Sequence[Any]) -> Any:
    return _stacked([body(*[x.select(0, i) for x in xs], *operands) for i in _steps(xs)])


def _scan(body: Callable[..., Any], carry: Sequence[Any], xs: Sequence[Any], operands: Sequence[Any] = ()) -> Any:
    rows = []
    for i in _steps(xs):
        found = body(*carry, *[x.select(0, i) for x in xs], *operands)
        carry, row = found[: len(carry)], found[len(carry) :]
        rows.append(row)
    return [*carry, *_stacked(rows)]


ROWS: dict[str, Callable[..., Any]] = {
    "auto_functionalized": _functionalized, "auto_functionalized_v2": _functionalized_views,
    "cond": _cond, "map_impl": _map, "scan": _scan, "invoke_subgraph": _named, "wrap": _call,
}  # fmt: skip


def copied(graph: fx.Graph) -> fx.Graph:
    """The same graph; a node's meta is a dict of its own."""
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    return made


def write_out(graph: fx.Graph, owner: fx.GraphModule) -> None:
    """In place. Bodies are attributes of `owner`."""
    bodies: dict[fx.Node, Any] = {}
    for n in graph.nodes:
        if n.op == "get_attr":
            found: Any = functools.reduce(getattr, str(n.target).split("."), owner)
            if isinstance(found, fx.GraphModule):
                body = copied(found.graph)
                write_out(body, found)
                bodies[n] = fx.GraphModule(found, body)
    for n in graph.nodes:
        if n.op != "call_function" or not isinstance(n.target, HigherOrderOperator):
            continue
        row = ROWS.get(n.target.name())
        if row is None:
            raise Unsupported("BCK006", detail=n.target.name())
        places = {i: bodies[a] for i, a in enumerate(n.args) if isinstance(a, fx.Node) and a in bodies}
        n.args = tuple(a for i, a in enumerate(n.args) if i not in places)
        n.target = _bound(row, places)
    for n in bodies:
        if not n.users:
            graph.erase_node(n)


def _bound(row: Callable[..., Any], places: dict[int, Any]) -> Callable[..., Any]:
    """`row` with its bodies given: fx hands tensors and numbers only."""

    def written_out(*args: Any, **kwargs: Any) -> Any:
        rest = iter(args)
        return row(*[places[i] if i in places else next(rest) for i in range(len(args) + len(places))], **kwargs)

    return written_out
