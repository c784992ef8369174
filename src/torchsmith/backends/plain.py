"""FunctionalGraph -> plain ATen graphs of one set of numbers, for runtimes that compile for fixed sizes.

In: a FunctionalGraph and an adapter that turns a PlainGraph into a callable. Out: `call(*inputs)` with write-backs, aliases and results as
eager's; a set of sizes that was not seen yet is compiled when it is met, at most LIMIT of them are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..codes import BackendFailed, Unsupported
from ..graph.eager import asked, deliver, fitted, symbol_values
from ..graph.sizes import print_condition
from ..graph.spec import FunctionalGraph, TensorSpec
from ..ir.expr import Const, Expr, const
from ..ir.number import number_of
from .watch import Undone, difference, of_spec

aten = torch.ops.aten
LIMIT = 64  # sets of sizes per graph


def numbers(sizes: Any) -> tuple[int, ...]:
    """Known sizes as Python numbers."""
    return tuple(int(s.value) if isinstance(s, Const) else int(s) for s in sizes)


def like(spec: Any) -> Any:
    """A tensor with nothing in it where a spec says what it is; anything else as it is."""
    if not isinstance(spec, TensorSpec):
        return spec
    return torch.empty_strided(numbers(spec.shape), numbers(spec.strides), dtype=spec.dtype, device=spec.device)


@dataclass(frozen=True, slots=True)
class PlainGraph:
    """ATen calls on values: placeholders, call_function nodes (operators, operator.getitem), and an output with a tuple of nodes.

    Every tensor node has meta["spec"] with known sizes, the graph's own placeholders meta["role"] as in graph/spec.py; every argument that
    is a number is a Python number.
    """

    graph: fx.Graph
    inputs: tuple[TensorSpec, ...]
    name: str

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), self.graph)


Run = Callable[..., Sequence[Any]]
Adapter = Callable[[PlainGraph], Run]


def evaluator(plain: PlainGraph, function_of: Callable[[fx.Node], Callable[..., Any]]) -> Run:
    """The graph as a call: every node by the function that `function_of` gives for it, asked once. Values go after their last use."""
    given = [n for n in plain.graph.nodes if n.op == "placeholder"]
    steps = [(n, function_of(n)) for n in plain.graph.nodes if n.op == "call_function"]
    results = plain.results
    last = {a: n for n, _ in steps for a in n.all_input_nodes} | {n: n for n, _ in steps if not n.users}
    dead: dict[fx.Node, list[fx.Node]] = {}
    for value, at in last.items():
        if value not in results:
            dead.setdefault(at, []).append(value)

    def run(*inputs: Any) -> list[Any]:
        env: dict[fx.Node, Any] = dict(zip(given, inputs, strict=True))
        for n, fn in steps:
            args, kwargs = fx.map_arg((n.args, n.kwargs), env.__getitem__)  # type: ignore[misc]
            env[n] = fn(*args, **kwargs)
            for value in dead.get(n, ()):
                del env[value]
        return [env[n] for n in results]

    return run


def by_operator(plain: PlainGraph, instead: Callable[[fx.Node], Any] | None = None) -> Run:
    """The graph by torch's own operators, or by what `instead` gives for a node."""

    def function_of(n: fx.Node) -> Callable[..., Any]:
        target = n.target if instead is None else instead(n)
        return lambda *args, **kwargs: fitted(n, args, kwargs, {}, target)

    return evaluator(plain, function_of)


def run_plain(fg: FunctionalGraph, adapter: Adapter, name: str) -> Callable[..., tuple[Any, ...]]:
    """The call that an adapter's code gives for `fg`. Raises Unsupported where sizes depend on the data (BCK001), and what the adapter
    raises where sizes are known. The call raises Undone where the adapter, or what it made, fails or gives other results than planned: by
    then nothing was written."""
    if any(s.origin[0] == "bound" for s in fg.symbols):
        raise Unsupported("BCK001", detail=", ".join(s.sym.name for s in fg.symbols if s.origin[0] == "bound"))
    names = asked(fg)
    kept: OrderedDict[tuple[Any, ...], Run] = OrderedDict()
    lock = threading.Lock()

    def compiled(symbols: Mapping[str, Any]) -> Run:
        key = tuple((k, type(v), v) for k, v in sorted(symbols.items()))
        with lock:
            run = kept.get(key)
            if run is not None:
                kept.move_to_end(key)
                return run
            plain = instantiate(fg, names, symbols, name)
            run = kept[key] = _looked_at(adapter(plain), [of_spec(n.meta["spec"]) for n in plain.results])
            if len(kept) > LIMIT:
                kept.popitem(last=False)
            return run

    takes = tuple(i for i, spec in enumerate(fg.inputs) if isinstance(spec, TensorSpec))

    def call(*inputs: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            given = (*inputs, *fg.consts)
            try:
                symbols = symbol_values(fg, given)
                values = compiled(symbols)(*[given[i] for i in takes])
            except Undone:
                raise
            except Exception as error:  # a backend may raise anything
                raise Undone(str(error)) from error
            return deliver(fg, given, dict(zip(names, values, strict=True)), symbols)

    if not fg.symbols:
        compiled({})  # what cannot be compiled is known before the first call
    return call


def _looked_at(run: Any, expected: Any) -> Run:
    """`run`, whose first results are held against what is planned."""
    if not callable(run):
        raise BackendFailed(f"it returned {type(run).__name__}, not a callable")
    right: list[bool] = []

    def call(*inputs: Any) -> Sequence[Any]:
        values: Sequence[Any] = run(*inputs)
        if not right:
            wrong = difference(values, expected)
            if wrong:
                raise Undone(wrong)
            right.append(True)
        return values

    return call


def instantiate(fg: FunctionalGraph, names: Sequence[str], symbols: Mapping[str, Any], name: str) -> PlainGraph:
    """`fg` with numbers for its symbols, giving the values of the nodes `names`."""
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    specs = iter(zip(fg.inputs, fg.roles, strict=True))
    inputs: list[TensorSpec] = []

    def plain(v: Any) -> Any:
        if isinstance(v, fx.Node):
            return made[v.name]
        if isinstance(v, Expr):
            number = number_of(v, symbols)
            if number is None:
                raise Unsupported("BCK001", detail=print_condition(v))
            return number
        if isinstance(v, TensorSpec):
            return TensorSpec(v.dtype, known(v.shape), known(v.strides), v.device)
        if isinstance(v, (list, tuple)):
            return type(v)(plain(x) for x in v)
        return v

    def known(sizes: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(const(plain(s)) for s in sizes)

    for node in fg.graph.nodes:
        if node.op == "placeholder":
            spec, role = next(specs)
            if isinstance(spec, TensorSpec):
                inputs.append(plain(spec))
                made[node.name] = graph.placeholder(node.name)
                made[node.name].meta.update(spec=inputs[-1], loc="", role=role)
        elif node.op == "call_function":
            target = aten.reshape.default if node.target is aten.view.default else node.target  # on values every view of sizes exists
            new = graph.create_node("call_function", target, tuple(map(plain, node.args)), {k: plain(v) for k, v in node.kwargs.items()},
                                    name=node.name)  # fmt: skip
            new.meta.update(spec=plain(node.meta["spec"]), loc=node.meta.get("loc") or "")
            made[node.name] = new
    graph.output(tuple(made[n] for n in names))
    return PlainGraph(graph, tuple(inputs), name)
