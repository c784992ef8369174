"""A plain graph cut into pieces: what a runtime takes, and between them what it does not, run operator by operator or by our own compiler.

In: a PlainGraph, the question which nodes a runtime takes, an adapter for what it takes. Out: a Run of the whole graph.
Pieces are as few as the graph allows: what does not depend on a foreign piece moves in front of it. Operators that draw random numbers are
never taken (their draws are eager's) and keep their order.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from .. import events
from ..codes import Unsupported
from ..graph.eager import fitted
from ..graph.schema import draws
from ..graph.spec import TensorSpec
from ..ir.expr import const
from .indices import is_torchs, picked
from .plain import Adapter, PlainGraph, Run, by_operator, evaluator, numbers

aten = torch.ops.aten
Takes = Callable[[fx.Node], bool]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive nodes that one side runs: `inputs` and `outputs` are names of values that cross its border."""

    taken: bool
    nodes: tuple[fx.Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def is_random(node: fx.Node) -> bool:
    """Does the node draw?"""
    return isinstance(node.target, OpOverload) and draws(node.target, node.args, node.kwargs)


def is_ordered(node: fx.Node) -> bool:
    """Draws and checks keep their order."""
    return is_random(node) or (isinstance(node.target, OpOverload) and not node.target._schema.returns)


def cut(graph: fx.Graph, takes: Takes) -> list[Piece]:
    """The pieces in an order that respects every dependence."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    side: dict[fx.Node, bool] = {}
    for n in nodes:  # a piece of a result goes where the result is made; so does a tensor made of nothing where a foreign node wants it
        side[n] = side[n.args[0]] if n.target is operator.getitem else not is_ordered(n) and takes(n)  # type: ignore[index]
    for n in reversed(nodes):
        if side[n] and not n.all_input_nodes and n.users and all(not side.get(u, True) for u in n.users):
            side[n] = False
    waits: dict[fx.Node, set[fx.Node]] = {n: {a for a in n.all_input_nodes if a.op == "call_function"} for n in nodes}
    before: fx.Node | None = None
    for n in nodes:
        if is_ordered(n):
            if before is not None:
                waits[n].add(before)
            before = n
    groups: list[tuple[bool, list[fx.Node]]] = []
    done: set[fx.Node] = set()
    left, turn = nodes, False  # foreign nodes first: draws that depend on nothing
    while left:
        group: list[fx.Node] = []
        rest: list[fx.Node] = []
        for n in left:
            if side[n] == turn and waits[n] <= done:
                group.append(n)
                done.add(n)
            else:
                rest.append(n)
        if group:
            groups.append((turn, group))
        left, turn = rest, not turn
    return _pieces(graph, groups)


def _pieces(graph: fx.Graph, groups: Sequence[tuple[bool, list[fx.Node]]]) -> list[Piece]:
    wanted = {n.name for n in graph.output_node().all_input_nodes}
    pieces: list[Piece] = []
    for taken, group in groups:
        own = set(group)
        inputs = dict.fromkeys(a.name for n in group for a in n.all_input_nodes if a not in own)
        outputs = [n.name for n in group if n.name in wanted or any(u not in own for u in n.users if u.op == "call_function")]
        pieces.append(Piece(taken, tuple(group), tuple(inputs), tuple(outputs)))
    return pieces


def subgraph(whole: fx.Graph, piece: Piece, name: str) -> PlainGraph:
    """One piece as a graph of its own."""
    by_name = {n.name: n for n in whole.nodes}
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for given in piece.inputs:
        made[by_name[given]] = graph.placeholder(given)
        made[by_name[given]].meta.update(by_name[given].meta)
    for n in piece.nodes:
        made[n] = graph.node_copy(n, made.__getitem__)
    graph.output(tuple(made[by_name[result]] for result in piece.outputs))
    return PlainGraph(graph, tuple(by_name[given].meta["spec"] for given in piece.inputs), name)


def expand(plain: PlainGraph, takes: Takes, given: Mapping[Any, Callable[..., Any]] | None = None) -> PlainGraph:
    """`plain` with operators that are not taken written out by torch's decompositions, or those of a given table, where all of what that
    gives is taken."""
    table = expansions() if given is None else given
    known = [n for n in plain.graph.nodes if n.op == "call_function" and n.target in table]
    wanted = [n for n in known if not (is_ordered(n) or is_torchs(n) or takes(n))]
    if not wanted:
        return plain
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    for n in plain.graph.nodes:
        body = _written_out(n, table[n.target], given) if n in wanted else None
        if body is None or not all(takes(b) for b in body.nodes if b.op == "call_function"):
            made[n] = made[n.args[0]][n.args[1]] if isinstance(made.get(_first(n)), tuple) else graph.node_copy(n, made.__getitem__)
            continue
        inner: dict[fx.Node, Any] = dict(zip(body.nodes, (made[a] for a in n.all_input_nodes), strict=False))
        for b in body.nodes:
            if b.op == "call_function":
                inner[b] = graph.node_copy(b, inner.__getitem__)
        made[n] = fx.map_arg(body.output_node().args[0], inner.__getitem__)
        made[n] = tuple(made[n]) if isinstance(made[n], (list, tuple)) else made[n]
    return PlainGraph(graph, plain.inputs, plain.name)


def _first(n: fx.Node) -> Any:
    return n.args[0] if n.target is operator.getitem else None


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's table of core operators."""
    return dict(torch._decomp.core_aten_decompositions())


@cache
def expansions() -> dict[Any, Callable[..., Any]]:
    """torch's table, and how to write what runtimes compute otherwise at infinities."""
    own: dict[Any, Callable[..., Any]] = {
        aten.pow.Tensor_Scalar: _as_root, aten.clamp.default: _clamped, aten.clamp_min.default: _clamped,
        aten.clamp_max.default: lambda x, high: _clamped(x, None, high), **_INNER,
    }  # fmt: skip
    return {**decompositions(), **own}


def is_root(n: fx.Node) -> bool:
    """x ** 0.5, which is sqrt(x) in eager: NaN for -inf, where C's pow is inf; x ** -0.5 likewise."""
    return n.target is aten.pow.Tensor_Scalar and n.args[1] in (0.5, -0.5)


def _as_root(x: torch.Tensor, exponent: float) -> Any:
    if abs(exponent) != 0.5:
        raise NotImplementedError  # no root: it stays as it is
    return aten.sqrt.default(x) if exponent > 0 else aten.rsqrt.default(x)


def _clamped(x: torch.Tensor, low: float | None = None, high: float | None = None) -> Any:
    """With both bounds."""
    return aten.clamp.default(x, -float("inf") if low is None else low, float("inf") if high is None else high)


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """0 where a line is -inf throughout."""
    x = x if dtype is None else x.to(dtype)
    return torch.softmax(x, dim).masked_fill((x == -float("inf")).all(dim, keepdim=True), 0.0)


_INNER: dict[Any, Callable[..., Any]] = {aten._safe_softmax.default: _safe_softmax}  # attention's decomposition calls it


def _written_out(node: fx.Node, decomposition: Callable[..., Any], further: Mapping[Any, Any] | None = None) -> fx.Graph | None:
    """What a decomposition does for the operands of one node: a graph whose placeholders are node.all_input_nodes; None where it fails."""
    mode = FakeTensorMode()
    with mode:
        specs = [s for a in node.all_input_nodes for s in specs_of(a)]
        fakes = [torch.empty_strided(numbers(s.shape), numbers(s.strides), dtype=s.dtype) for s in specs]
    if len(fakes) != len(node.all_input_nodes):
        return None

    def body(*given: Any) -> Any:
        known = dict(zip(node.all_input_nodes, given, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)  # type: ignore[misc]
        return decomposition(*args, **kwargs)

    try:
        graph = make_fx(body, decomposition_table=_INNER if further is None else further, tracing_mode="fake")(*fakes).graph
    except Exception:  # a decomposition may refuse anything: the operator then runs in torch
        return None
    for b, a in zip((n for n in graph.nodes if n.op == "placeholder"), node.all_input_nodes, strict=True):
        b.meta = dict(a.meta)
    for b in graph.nodes:
        if b.op == "get_attr" or (b.op == "call_function" and "val" not in b.meta):
            return None
        if b.op == "call_function":
            b.meta = {"spec": _spec(b.meta["val"]), "loc": node.meta.get("loc", "")}
    return graph if _stands_for(graph.output_node().args[0], node) else None


def _stands_for(results: Any, node: fx.Node) -> bool:
    """Has what a decomposition gives the dtypes and shapes of what is read of the node? Of attention's second result it has not."""
    planned, several = node.meta["spec"], isinstance(node.meta["spec"], tuple)
    read: list[Any] = [u.args[1] for u in node.users] if several else []
    if several != isinstance(results, (tuple, list)):
        return False
    parts, specs = ([results[i] for i in read], [planned[i] for i in read]) if several else ([results], [planned])

    def same(part: Any, spec: Any) -> bool:
        found = part.meta["spec"] if isinstance(part, fx.Node) else None
        return isinstance(found, TensorSpec) and (found.dtype, found.shape) == (spec.dtype, spec.shape)

    return all(same(p, s) for p, s in zip(parts, specs, strict=True) if isinstance(s, TensorSpec))


def _spec(val: Any) -> Any:
    if isinstance(val, torch.Tensor):
        return TensorSpec(val.dtype, tuple(map(const, val.shape)), tuple(map(const, val.stride())), str(val.device))
    return tuple(map(_spec, val)) if isinstance(val, (tuple, list)) else None


def partitioned(plain: PlainGraph, takes: Takes, adapter: Adapter, distrusted: set[Any]) -> Run:
    """Run `plain` (see `in_pieces`), whose indices are looked at, those among its inputs first: one out of range is for torch to refuse."""
    rows = picked(plain)
    given = {n: i for i, n in enumerate(n for n in plain.graph.nodes if n.op == "placeholder")}
    computed = list(dict.fromkeys(row.of for row in rows if row.of not in given))
    run = in_pieces(giving(plain, computed) if computed else plain, takes, adapter, distrusted)
    if not rows:
        return run
    count = len(plain.results)

    def look(known: Mapping[fx.Node, Any]) -> None:
        for row in rows:
            if row.of in known and not row.holds(known[row.of]):
                raise IndexError(f"{row.of.name} picks elements that are not there")

    def looked_at(*inputs: Any) -> Sequence[Any]:
        look({n: inputs[i] for n, i in given.items()})
        results = run(*inputs)
        look(dict(zip(computed, results[count:], strict=True)))
        return results[:count]

    return looked_at


def giving(plain: PlainGraph, more: Sequence[fx.Node]) -> PlainGraph:
    """`plain` with the values of more nodes behind its results."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(plain.graph, made)
    graph.output(tuple(made[n] for n in (*plain.results, *more)))
    return PlainGraph(graph, plain.inputs, plain.name)


def in_pieces(plain: PlainGraph, takes: Takes, adapter: Adapter, distrusted: set[Any]) -> Run:
    """Run `plain`: what `takes` says by `adapter`, the rest by torch's operators one by one.

    The first results of each piece are held against torch's. Where they differ the operators at fault join `distrusted`, which the
    runtime is not given again in this process, and the piece is cut anew (BCK005). Raises Unsupported (BCK002) where nothing is taken.
    Only tensors cross borders: a tuple is taken apart on the side that makes it.
    """

    def trusts(n: fx.Node) -> bool:
        return not (is_torchs(n) or is_root(n)) and kind_of(n) not in distrusted and takes(n)

    plain = expand(plain, trusts)
    pieces = cut(plain.graph, trusts)
    if pieces and not any(p.taken for p in pieces):
        raise Unsupported("BCK002", detail=", ".join(sorted({str(n.target) for p in pieces for n in p.nodes}))[:300])
    steps: list[tuple[Run, Piece]] = []
    for k, piece in enumerate(pieces):
        part = subgraph(plain.graph, piece, f"{plain.name}_{k}")
        try:
            steps.append((checked(part, adapter, takes, distrusted) if piece.taken else by_operator(part), piece))
        except Unsupported as why:
            guilty = refused(part, adapter, distrusted)
            if not guilty:
                raise
            say(plain, guilty, why.detail)
            distrusted.update(guilty)
            return in_pieces(plain, takes, adapter, distrusted)
    names = [n.name for n in plain.graph.nodes if n.op == "placeholder"]
    results = [n.name for n in plain.results]
    if len(steps) == 1 and steps[0][1].inputs == tuple(names) and steps[0][1].outputs == tuple(results):
        return steps[0][0]

    def run(*inputs: Any) -> list[Any]:
        env = dict(zip(names, inputs, strict=True))
        for call, piece in steps:
            env.update(zip(piece.outputs, call(*[env[n] for n in piece.inputs]), strict=True))
        return [env[n] for n in results]

    return run


def kind_of(n: fx.Node) -> tuple[Any, tuple[torch.dtype, ...]]:
    """What is trusted or not: an operator on operands of these dtypes."""
    return n.target, tuple(s.dtype for a in n.all_input_nodes for s in specs_of(a) if isinstance(s, TensorSpec))


def call_of(n: fx.Node) -> Any:
    """What tells calls of one kind apart: sizes, and arguments that are no tensors."""
    rest = fx.map_arg((n.args, n.kwargs), lambda a: None)  # type: ignore[arg-type, return-value]
    return kind_of(n), tuple(numbers(s.shape) for a in n.all_input_nodes for s in specs_of(a) if isinstance(s, TensorSpec)), repr(rest)


def checked(plain: PlainGraph, adapter: Adapter, takes: Takes, distrusted: set[Any]) -> Run:
    """One piece by `adapter`, believed when its first results are torch's."""
    made = adapter(plain)
    believed: list[Run] = []

    def run(*inputs: Any) -> Sequence[Any]:
        if believed:
            return believed[0](*inputs)
        want = by_operator(plain)(*inputs)
        before = _copies(inputs)
        try:
            results = made(*inputs)
            right = agree(plain, results, want, lambda: _moved(plain, before))
        except Exception:  # a runtime may raise anything; which operators it is follows
            results, right = [], False
        if _restored(inputs, before):
            results, right = [], False
        if right:
            believed.append(made)
            return results
        guilty = culprits(plain, inputs, adapter, kind_of) or culprits(plain, inputs, adapter, call_of)
        if not guilty and results and agree(plain, results, want, lambda: _shaken(plain, inputs), STEEP, 3.0):
            believed.append(made)  # rounding that the graph makes large
            return results
        distrusted.update(guilty)
        say(plain, guilty)
        try:
            believed.append(partitioned(plain, takes, adapter, distrusted) if guilty else by_operator(plain))
        except Unsupported:
            believed.append(by_operator(plain))
        return want

    return run


CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.complex64: 1e-3, torch.complex128: 1e-6, torch.float16: 2e-2, torch.bfloat16: 5e-2}


STEEP = 0.1  # of a result's maximum, where every operator alone is right


def roughness(plain: PlainGraph) -> list[float]:
    """Per result the largest CLOSE of what it is computed through: a float32 result of bfloat16 products is no better than those."""
    rough: dict[fx.Node, float] = {}
    for n in plain.graph.nodes:
        if n.op != "output":
            own = [CLOSE.get(s.dtype, 0.0) for s in specs_of(n) if isinstance(s, TensorSpec)]
            rough[n] = 0.0 if n.op == "placeholder" else max((0.0, *own, *(rough[a] for a in n.all_input_nodes)))
    return [rough[n] for n in plain.results]


def agree(
    plain: PlainGraph, got: Sequence[Any], want: Sequence[Any], moved: Callable[[], Sequence[Any]], least: float = 0.0,
    times: float = 10.0,
) -> bool:  # fmt: skip
    """Equal up to rounding: within `roughness` (`least` at least) of the largest value of a result and, for sums that cancel,
    `times` what torch's own results move when last digits do. Integers that follow from a comparison may differ at ties."""
    rough = roughness(plain)
    others: list[Any] = []
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape or g.dtype != w.dtype:
            return False
        if not w.numel():
            continue
        if w.dtype not in CLOSE:
            if (g != w).sum() > w.numel() // 100:
                return False
            continue
        close = max(rough[i], least)
        if _near(g, w, close, 0.0):
            continue
        others = others or [moved()]
        if not _near(g, w, close, times * _distance(w, others[0][i])):
            return False
    return True


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]


def _restored(inputs: Sequence[Any], before: Sequence[Any]) -> bool:
    """Did the runtime write to what it was given? Then that is undone."""
    harmed = False
    for t, kept in zip(inputs, before, strict=True):
        if isinstance(t, torch.Tensor) and not bool(((t == kept) | (t.isnan() & kept.isnan())).all()):
            with torch.no_grad():
                t.copy_(kept)
            harmed = True
    return harmed


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    far = (a.double() - b.double()).abs() if not a.is_complex() else (a - b).abs()
    far = far[far.isfinite()]
    return float(far.max()) if far.numel() else 0.0


def _near(g: torch.Tensor, w: torch.Tensor, close: float, room: float) -> bool:
    same = (g == w) | (g.isnan() & w.isnan())
    finite = w[w.isfinite()].abs()
    room += close * (float(finite.max()) if finite.numel() else 1.0)
    return bool((same | ((g - w).abs() <= room)).all())


def _moved(plain: PlainGraph, inputs: Sequence[Any]) -> Sequence[Any]:
    """Torch's results where each input is off by a unit or two in its last place."""
    draw = torch.Generator().manual_seed(0)

    def move(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        noise = torch.randn(t.shape, generator=draw).to(t.device, t.dtype)
        return t + t * noise * torch.finfo(t.dtype).eps

    return by_operator(plain)(*map(move, inputs))


def _shaken(plain: PlainGraph, inputs: Sequence[Any]) -> Sequence[Any]:
    """Torch's results where each operator's is off by a unit or two in the last place of its terms, as another order of sums makes it."""
    draw = torch.Generator().manual_seed(0)

    def off(t: Any) -> Any:
        if isinstance(t, (tuple, list)):
            return type(t)(map(off, t))
        if not isinstance(t, torch.Tensor) or not t.is_floating_point() or not t.numel():
            return t
        noise = torch.randn(t.shape, generator=draw).to(t.device, t.dtype)
        return t + (t.abs() + t.abs().mean()) * noise * torch.finfo(t.dtype).eps

    def function_of(n: fx.Node) -> Callable[..., Any]:
        return lambda *args, **kwargs: off(fitted(n, args, kwargs, {}))

    return evaluator(plain, function_of)(*inputs)


def alone(plain: PlainGraph, n: fx.Node) -> PlainGraph:
    """One operator, with the parts of its result that are read, as a graph of its own."""
    parts = [u for u in n.users if u.target is operator.getitem]
    piece = Piece(True, (n, *parts), tuple(a.name for a in n.all_input_nodes), tuple(u.name for u in parts) or (n.name,))
    return subgraph(plain.graph, piece, plain.name)


def refused(plain: PlainGraph, adapter: Adapter, distrusted: Collection[Any]) -> set[Any]:
    """The operators that the adapter does not take alone either; none where it takes nothing (the fault is not theirs) or each."""
    calls = [n for n in plain.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    first = {kind_of(n): n for n in reversed(calls) if kind_of(n) not in distrusted}
    guilty: set[Any] = set()
    for kind, n in first.items():
        try:
            adapter(alone(plain, n))
        except Unsupported:
            guilty.add(kind)
    return guilty if len(guilty) < len(first) else set()


def say(plain: PlainGraph, guilty: Collection[Any], why: str = "") -> None:
    """Counts operators that run in torch from now on."""
    names = ", ".join(sorted(str(target) for target, _ in guilty)) or "several operators together"
    events.emit("fallback", code="BCK005", graph=plain.name, at="", detail=f"{names}: {why}" if why else names)


def culprits(plain: PlainGraph, inputs: Sequence[Any], adapter: Adapter, alike: Callable[[fx.Node], Any]) -> set[Any]:
    """The operators whose results differ from torch's when they are given torch's operands, each alone; of those `alike` the first."""
    found: set[Any] = set()
    tried: set[Any] = set()
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for n in plain.graph.nodes:
        if n.op == "placeholder":
            env[n] = next(given)
        elif n.op == "call_function":
            args, kwargs = fx.map_arg((n.args, n.kwargs), env.__getitem__)  # type: ignore[misc]
            env[n] = fitted(n, args, kwargs, {})
            if n.target is operator.getitem or alike(n) in tried:
                continue
            tried.add(alike(n))
            parts = [u for u in n.users if u.target is operator.getitem]
            want = [env[n][u.args[1]] for u in parts] if parts else [env[n]]
            single, values = alone(plain, n), [env[a] for a in n.all_input_nodes]
            before = _copies(values)
            try:
                right = agree(single, adapter(single)(*values), want, functools.partial(_moved, single, before))
            except Exception:  # a runtime may raise anything
                right = False
            right = not _restored(values, before) and right
            if not right:
                found.add(kind_of(n))
    return found


def specs_of(node: fx.Node) -> tuple[TensorSpec, ...]:
    spec = node.meta["spec"]
    return tuple(spec) if isinstance(spec, tuple) else (spec,)
