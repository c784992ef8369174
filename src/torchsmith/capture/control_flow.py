"""torch.cond, map, scan and while_loop in a graph without regions: both branches and a choice, or one copy of the body for each element.

In: the machine and such a call's arguments. Out: its result as machine values. Just in time torch.cond computes both branches only where
the one that is not taken can do no harm: it raises nothing, draws nothing, and sends no gradient back. Else the frame runs it eagerly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..codes import Unsupported, define
from ..graph import tracing
from ..graph.spec import is_expected
from .protocol import Machine
from .source import Computed

define("CAP034", "a branch of torch.cond may do harm where it is not taken", "the call runs eagerly; torchsmith.export takes it")
define("CAP033", "a control-flow operator has no form without branches and loops", "see the detail")

_ANSWERS = {"isfinite": True, "isinf": False, "isnan": False}  # of values that are finite


def where_finite(m: Machine, test: torch.Tensor) -> bool | None:
    """What this test of values says where all are finite, if it is such a test (`isfinite(x).all()`) and that may be expected.

    The graph checks it, and where it does not hold the function runs as it is: values, memory and gradients are eager's on both ways. A
    place where that happens again and again is a break, as any other branch on a tensor's value."""
    if m.is_whole:  # a program that is exported has no other way
        return None
    said = _said(m.recorder.node_of(test))
    place = m.loc()
    if said is None or not is_expected(place):
        return None
    m.world.guard(Computed(is_expected, (place,), ()), "equals", True)
    return said


def _said(node: Any) -> bool | None:
    if not isinstance(node, torch.fx.Node) or not node.args:
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in _ANSWERS:
        return _ANSWERS[name]
    inner = _said(node.args[0])
    if inner is None:
        return None
    if name in ("logical_not", "invert", "bitwise_not", "__invert__"):
        return not inner
    if name in ("all", "any", "bool"):
        return inner
    if name in ("logical_or", "logical_and", "or_", "and_", "bitwise_or", "bitwise_and", "__or__", "__and__") and len(node.args) == 2:
        return inner if _said(node.args[1]) == inner else None
    return None


LONGEST = 256  # elements that a loop is written out for


def _arguments(spelt: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments in the order of the names."""
    names = spelt.split()
    parameters = [inspect.Parameter(n.partition("=")[0], inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for n in names]
    bound = inspect.Signature(parameters).bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())


def _flat(m: Machine, tree: Any) -> tuple[list[Any], Any]:
    """The leaves of what the program gives, read as the program would read them."""
    if issubclass(type(tree), torch.Tensor):
        return pytree.tree_flatten(tree)
    leaves, spec = m.call(pytree.tree_flatten, [tree], {})
    return list(leaves), spec


def _run(m: Machine, fn: Callable[..., Any], operands: Any) -> tuple[list[Any], Any]:
    """What `fn` returns, flat. It must write to nothing but what it makes: it may be the branch that is not taken."""
    known, trace = set(m.recorder.graph.nodes), tracing.current()
    before, trace.statistics = trace.statistics, set()
    try:
        flat, spec = pytree.tree_flatten(m.call(fn, list(operands), {}))
        if trace.statistics:
            raise Unsupported("CAP033", at=m.loc(), detail="running statistics are written inside of it")
    finally:
        trace.statistics = before
    inside = [n for n in m.recorder.graph.nodes if n not in known and n.op not in ("placeholder", "get_attr")]
    for node in inside:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name == "setitem" or "out" in node.kwargs or (name.endswith("_") and not name.endswith("__")):
            written: list[Any] = [n.meta.get("val") for n in ([node.kwargs["out"]] if "out" in node.kwargs else node.args[:1]) if isinstance(n, torch.fx.Node)]
            memory = {tracing.storage(t) for t in written if issubclass(type(t), torch.Tensor)}
            others: Iterable[Any] = (n.meta.get("val") for n in m.recorder.graph.nodes if n not in inside)
            if not memory or any(issubclass(type(t), torch.Tensor) and tracing.storage(t) in memory for t in others):
                raise Unsupported("CAP033", at=node.meta.get("loc") or m.loc(), detail=f"{name} writes to a tensor inside of it")
    return flat, spec


def cond(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """cond(p, f, g, x) -> where(p, f(x), g(x)): both are computed."""
    pred, true_fn, false_fn, operands = _arguments("pred true_fn false_fn operands", args, kwargs)
    if not issubclass(type(pred), torch.Tensor):
        return m.call(true_fn if m.truth(pred) else false_fn, list(operands or ()), {})
    trace = tracing.current()
    before = trace.draws + trace.harms
    operands = operands or ()
    yes, spec = _branch(m, pred, true_fn, operands, True)
    no, other = _branch(m, pred, false_fn, operands, False)
    if not m.is_whole and trace.draws + trace.harms != before:
        raise Unsupported("CAP034", at=m.loc(), detail="it draws random numbers, or may raise on values")
    if spec != other:
        raise Unsupported("CAP033", at=m.loc(), detail="the branches of torch.cond return different structures")
    return pytree.tree_unflatten([_chosen(m, pred, a, b) for a, b in zip(yes, no, strict=True)], spec)


def _branch(m: Machine, pred: Any, fn: Any, operands: Any, taken: bool) -> tuple[list[Any], Any]:
    """What a branch returns, flat. A gradient goes back from it only where it is taken: the other one's may be NaN."""
    if m.is_whole or not torch.is_grad_enabled():
        return _run(m, fn, operands)
    given = pytree.tree_map(lambda x: _gate(m, pred, x, taken), operands)
    mark = m.recorder.last_node()
    out = _run(m, fn, given)
    nodes = list(m.recorder.graph.nodes)
    inside = nodes[nodes.index(mark) + 1 :] if mark is not None else [n for n in nodes if n.op != "placeholder"]
    gates = {n for x in pytree.tree_leaves(given) if issubclass(type(x), torch.Tensor) for n in (m.recorder.node_of(x),)}
    around = dict.fromkeys(n for node in inside for n in node.all_input_nodes if n not in inside and n not in gates)
    for node in around:  # what the branch reads of its closure
        x = node.meta.get("val")
        if issubclass(type(x), torch.Tensor) and x.requires_grad:
            gate = m.recorder.node_of(_gate(m, pred, x, taken))
            inside[0].prepend(gate.args[1 if not taken else 2])
            inside[0].prepend(gate)
            for user in inside:
                user.replace_input_with(node, gate)
    return out


def _gate(m: Machine, pred: Any, x: Any, taken: bool) -> Any:
    if not issubclass(type(x), torch.Tensor) or not x.requires_grad:
        return x
    cut = m.recorder.record("method", "detach", (x,), {})
    return m.recorder.record("function", torch.where, (pred, x, cut) if taken else (pred, cut, x), {})


def _chosen(m: Machine, pred: Any, a: Any, b: Any) -> Any:
    if not issubclass(type(a), torch.Tensor) or not issubclass(type(b), torch.Tensor):
        if type(a) is type(b) and a == b:
            return a
        raise Unsupported("CAP033", at=m.loc(), detail="the branches of torch.cond return different numbers: return tensors")
    if a.dtype != b.dtype or a.dim() != b.dim() or any(x != y for x, y in zip(a.shape, b.shape, strict=True)):
        both = f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        raise Unsupported("CAP033", at=m.loc(), detail=f"the branches of torch.cond return different tensors: {both}")
    return m.recorder.record("function", torch.where, (pred, a, b), {})


def while_loop(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A loop whose count follows from the program's own numbers (a counter that starts at torch.tensor(0)), written out."""
    cond_fn, body_fn, carried = _arguments("cond_fn body_fn carried_inputs", args, kwargs)
    for _ in range(LONGEST + 1):
        test = m.call(cond_fn, list(carried), {})
        goes_on = tracing.current().known_value(test, "__bool__") if issubclass(type(test), torch.Tensor) else m.truth(test)
        if goes_on is NotImplemented:
            raise Unsupported("CAP033", at=m.loc(), detail="a while_loop runs as often as the data tell: use a fixed number of steps")
        if not goes_on:
            return carried
        carried = pytree.tree_unflatten(*_run(m, body_fn, carried))
    raise Unsupported("CAP033", at=m.loc(), detail=f"a while_loop of more than {LONGEST} steps; loops are written out up to that")


def _steps(m: Machine, xs: list[Any], dim: int, name: str) -> int:
    n = xs[0].shape[dim] if xs else 0
    if type(n) is not int:
        raise Unsupported(
            "CAP033", at=m.loc(), detail=f"{name} over a dimension that varies: declare it static, or write it with whole tensors"
        )
    if n > LONGEST:
        raise Unsupported("CAP033", at=m.loc(), detail=f"{name} over {n} elements; loops are written out up to {LONGEST}")
    if n < 1:
        raise Unsupported("CAP033", at=m.loc(), detail=f"{name} over nothing")
    return n


def _select(m: Machine, x: Any, dim: int, i: int) -> Any:
    return m.recorder.record("method", "select", (x, dim, i), {})


def _stacked(m: Machine, rows: list[list[Any]], dim: int) -> list[Any]:
    """One tensor for each leaf, stacked along the first dimension, which is then shown as `dim` where there are so many."""
    leaves = [m.recorder.record("function", torch.stack, (list(parts), 0), {}) for parts in zip(*rows, strict=True)]
    return [m.recorder.record("method", "movedim", (x, 0, dim), {}) if 0 < dim < x.dim() else x for x in leaves]


def map_(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """map(f, xs, *args) -> stack([f(xs[0], *args), f(xs[1], *args), ...])"""
    fn, xs, *rest = args
    flat, spec = _flat(m, xs)
    rows: list[list[Any]] = []
    made: Any = None
    for i in range(_steps(m, flat, 0, "map")):
        row, made = _run(m, fn, (pytree.tree_unflatten([_select(m, x, 0, i) for x in flat], spec), *rest))
        rows.append(row)
    return pytree.tree_unflatten(_stacked(m, rows, 0), made)


def map_flat(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """map_impl(f, xs, args): the operator, whose f takes the elements of all xs one by one."""
    fn, xs, rest = _arguments("f xs pos_args", args, kwargs)
    rows = [_run(m, fn, (*(_select(m, x, 0, i) for x in xs), *rest))[0] for i in range(_steps(m, list(xs), 0, "map"))]
    return tuple(_stacked(m, rows, 0))


def scan(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """scan(f, init, xs) -> the carry after the last element, and what f returned beside it, stacked."""
    options = {"dim": 0, "reverse": False} | {k: kwargs.pop(k) for k in ("dim", "reverse") if k in kwargs}
    fn, carry, xs = _arguments("combine_fn init xs", args, kwargs)
    flat, spec = _flat(m, xs)
    if not flat:
        return carry, []
    dim = options["dim"] % flat[0].dim()
    steps = range(_steps(m, flat, dim, "scan"))
    rows: list[list[Any]] = []
    made: Any = None
    for i in reversed(steps) if options["reverse"] else steps:
        out, both = _run(m, fn, (carry, pytree.tree_unflatten([_select(m, x, dim, i) for x in flat], spec)))
        carry, row = pytree.tree_unflatten(out, both)
        kept, made = pytree.tree_flatten(row)
        rows.append(kept)
    stacked = _stacked(m, rows[::-1] if options["reverse"] else rows, dim)
    return carry, pytree.tree_unflatten(stacked, made)


_ELEMENTWISE = frozenset({
    "add", "sub", "mul", "truediv", "div", "neg", "abs", "exp", "log", "sqrt", "square", "pow", "sigmoid", "tanh", "maximum", "minimum", "where",
    "logaddexp", "to", "float",
})  # fmt: skip


def _doubling(combine: Any, xs: Any, dim: int, reverse: bool) -> Any:
    """Inclusive scan in log2(n) steps of whole tensors: after each, every place holds what twice as many before it give."""
    single = isinstance(xs, torch.Tensor)
    parts = [x.movedim(dim, 0) for x in ([xs] if single else xs)]
    if reverse:
        parts = [x.flip(0) for x in parts]
    shift = 1
    while shift < parts[0].shape[0]:
        left, right = [x[:-shift] for x in parts], [x[shift:] for x in parts]
        new = combine(left[0], right[0]) if single else combine(type(xs)(left), type(xs)(right))
        parts = [torch.cat([x[:shift], y]) for x, y in zip(parts, [new] if single else new, strict=True)]
        shift *= 2
    if reverse:
        parts = [x.flip(0) for x in parts]
    parts = [x.movedim(0, dim) for x in parts]
    return parts[0] if single else type(xs)(parts)


def associative_scan(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """torch maps combine_fn over the scanned dimension: an elementwise one takes whole tensors as they are, others go element by element."""
    combine, xs, dim, reverse, _ = _arguments("combine_fn xs dim reverse combine_mode", args, kwargs)
    flat, spec = _flat(m, xs)
    if not flat or not all(issubclass(type(x), torch.Tensor) and x.dim() for x in flat):
        raise Unsupported("CAP033", at=m.loc(), detail="associative_scan of what are no tensors")
    dim = dim % flat[0].dim()

    def element(i: int) -> Any:
        return pytree.tree_unflatten([_select(m, x, dim, i) for x in flat], spec)

    known, mark = set(m.recorder.graph.nodes), m.recorder.last_node()
    _run(m, combine, (element(0), element(0)))
    names = {getattr(n.target, "__name__", n.target) for n in m.recorder.graph.nodes if n not in known and n.op != "placeholder"}
    m.recorder.take_back(mark)
    if names - {"select"} <= _ELEMENTWISE and (issubclass(type(xs), torch.Tensor) or (type(xs) in (tuple, list) and len(xs) == len(flat))):
        return m.inline(_doubling, [combine, xs, dim, bool(reverse)], {})
    steps = range(_steps(m, flat, dim, "associative_scan"))

    def combined(a: list[Any], b: list[Any]) -> list[Any]:
        row, made = _run(m, combine, [pytree.tree_unflatten(x, spec) for x in (a, b)])
        if made != spec:
            raise Unsupported("CAP033", at=m.loc(), detail="what associative_scan combines has another structure than its elements")
        return row

    rows = _in_pairs(combined, [pytree.tree_leaves(element(i)) for i in (reversed(steps) if reverse else steps)])
    return pytree.tree_unflatten(_stacked(m, rows[::-1] if reverse else rows, dim), spec)


def _in_pairs(combine: Callable[[Any, Any], Any], rows: list[Any]) -> list[Any]:
    """Inclusive scan in the order in which torch combines: the scan of neighbours' pairs gives every second place."""
    if len(rows) < 2:
        return rows
    odd = _in_pairs(combine, [combine(a, b) for a, b in zip(rows[::2], rows[1::2], strict=False)])
    even = [rows[0], *(combine(a, b) for a, b in zip(odd, rows[2::2], strict=False))]
    return [row for pair in zip_longest(even, odd) for row in pair if row is not None]
