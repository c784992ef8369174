"""Backends written for torch.compile, called under our capture: they receive what PyTorch's own capture would hand them.

In: a backend `(GraphModule, example_inputs, **keywords) -> callable`. Out: the same signature for our captured graphs. A partner finds a
graph of its own, fake tensors of one mode in meta["example_value"] of its nodes, PyTorch's symbols where sizes vary (those that the graph
reads are inputs, in front), floats that vary as tensors whose item() it reads, lifted parameters as inputs, and the tracing context that
torch's tools ask for.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import fx
from torch._guards import GuardSource, Source, TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ..codes import Unsupported
from ..graph.readable import note_stack
from ..ir.expr import Sym
from ..ir.number import number_of
from .foreign import LARGE, evaluate
from .inplace import as_they_were, written_through
from .plain import LIMIT
from .regions import copied

Backend = Callable[..., Any]


def as_partner(backend: Backend) -> Backend:
    """`backend` with the surroundings that it expects. What it assumes of symbolic sizes becomes our guards; where that cannot be said in
    our words, or it wants no symbols, it is called once for each set of sizes. Raises what it raises."""

    def call(gm: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        if not any(isinstance(number, torch.SymInt | torch.SymFloat) for n in nodes for number in (n.meta.get("val"), *_sizes(n))):
            return _call(backend, gm, inputs, keywords, Theirs())
        theirs = Theirs()
        try:
            theirs.see(nodes, inputs)
            made = _call(backend, gm, inputs, keywords, theirs)
            theirs.tell()
        except Unsupported:
            return BySizes(backend, gm, keywords)
        except Exception:  # as with tracers that know numbers only
            again = BySizes(backend, gm, keywords)
            again.of(inputs)
            return again
        return made

    return call


def _as_in_source(name: str, read: Callable[[Any], Any]) -> Any:
    """An attribute or a method, as torch's Source has it: it was a method in older versions."""
    return read if inspect.isfunction(vars(Source)[name]) else property(read)


@dataclass(frozen=True)
class _Placeholder(Source):
    """Where PyTorch is told that a number comes from."""

    text: str
    name = _as_in_source("name", lambda self: self.text)
    guard_source = _as_in_source("guard_source", lambda self: GuardSource.CONSTANT)


class Theirs:
    """PyTorch's symbols for ours: fake inputs whose sizes they are, and what the partner assumed of them."""

    def __init__(self) -> None:
        self.env = ShapeEnv(tracked_fakes=[])  # torch.export asks for them
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.env)
        self.values: dict[str, Any] = {}  # our symbol -> their number
        self.ours: dict[Any, Any] = {}  # their symbol -> our number
        self.inputs: list[Any] = []
        self.floats: dict[int, torch.Tensor] = {}  # by number of the input: a tensor of the float
        self.pinned: list[tuple[Any, int]] = []  # our number, and the constant that they took it for

    def see(self, nodes: Sequence[fx.Node], inputs: Sequence[Any]) -> None:
        """Inputs as they shall be seen."""
        later: list[tuple[Any, Any]] = []
        for n, value in zip(nodes, inputs, strict=True):
            sizes = _sizes(n)
            if not isinstance(value, torch.Tensor):
                if isinstance(n.meta["val"], torch.SymFloat) and not n.users:  # Python has computed another number of it
                    self.inputs.append(value)
                    continue
                if isinstance(n.meta["val"], torch.SymFloat):
                    real = torch.tensor(value, dtype=torch.float64)
                    self.inputs.append(self.mode.from_tensor(real, source=_Placeholder(n.name)))
                    self.floats[len(self.inputs) - 1] = real
                    with self.mode:
                        self._bind(n.meta["val"], self.inputs[-1].item(), later)
                    continue
                self.inputs.append(self._number(n.name, value) if sizes else value)
                found: Sequence[Any] = [self.inputs[-1]] if sizes else []
            else:
                varies = tuple(isinstance(size, torch.SymInt) for size in sizes)
                self.inputs.append(self._dynamic(value, varies) if any(varies) else self.known(value))
                found = self.inputs[-1].shape
            for ours, made in zip(sizes, found, strict=True):
                if isinstance(ours, torch.SymInt):
                    self._bind(ours, made, later)
        for ours, made in later:  # sizes that follow from others
            wanted = number_of(ours.node.expr, self.values)
            if wanted is not None:
                torch._check(made == wanted)

    def known(self, value: Any) -> Any:
        """An input whose sizes do not vary."""
        return self.mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value

    def _dynamic(self, value: torch.Tensor, varies: tuple[bool, ...]) -> torch.Tensor:
        sizes = [DimDynamic.DYNAMIC if v else DimDynamic.STATIC for v in varies]
        return self.mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    def _number(self, name: str, value: int) -> int | torch.SymInt:
        """A symbol for an integer that is no size: 0 and 1 are numbers as all others."""
        return self.env.create_unspecified_symint_and_symbol(value, _Placeholder(name), DimDynamic.DYNAMIC)

    def _bind(self, ours: torch.SymInt | torch.SymFloat, made: Any, later: list[tuple[Any, Any]]) -> None:
        expr = ours.node.expr
        if not isinstance(made, torch.SymInt | torch.SymFloat):
            self.pinned.append((ours, made))
        elif isinstance(expr, Sym) and expr.name not in self.values:
            self.values[expr.name] = made
            self.ours[made.node.expr] = ours
        else:
            self.ours.setdefault(made.node.expr, ours)
            later.append((ours, made))

    def tell(self) -> None:
        """Our guards for what the partner assumed. Raises Unsupported (BCK004) where our words do not say it."""
        holds = [ours == number for ours, number in self.pinned]
        holds += [evaluate(guard.expr, self.ours) for guard in self.env.guards]
        holds += [evaluate(symbol, self.ours) == evaluate(other, self.ours) for symbol, other in self.env.replacements.items()]
        for symbol, ours in self.ours.items():
            ranges = self.env.var_to_range.get(symbol)
            if ranges is not None:
                holds += [ours >= int(ranges.lower)] if ranges.lower.is_Integer and ranges.lower > -LARGE else []
                holds += [ours <= int(ranges.upper)] if ranges.upper.is_Integer and ranges.upper < LARGE else []
        if not all(bool(h) for h in holds):  # each question becomes a guard
            raise Unsupported("BCK004", detail="what a backend assumed does not hold")


def _call(backend: Backend, gm: fx.GraphModule, inputs: Sequence[Any], keywords: Mapping[str, Any], theirs: Theirs) -> Any:
    """What the backend makes of `gm`, as a call of the inputs of `gm`."""
    fakes = theirs.inputs or [theirs.known(v) for v in inputs]
    graph = copied(gm.graph)
    read_floats(graph, theirs.floats)
    places = lift_sizes(graph) if theirs.inputs else []
    sizes = [fakes[i].shape[d] for i, d in places]
    given = [fake if isinstance(fake, torch.SymInt) else value for fake, value in zip(fakes, inputs, strict=True)]
    for i, real in theirs.floats.items():
        given[i] = real
    select_varying(graph)
    written_through(graph)
    with_examples(graph, gm, [*sizes, *fakes], theirs.mode)
    own = fx.GraphModule(gm, graph)
    own.meta = dict(gm.meta)
    with tracing(TracingContext(theirs.mode)), as_they_were([inputs[i] for i in gm.meta["written"]]):
        made = backend(own, [*sizes, *given], **keywords)
    if not callable(made) or not (places or theirs.floats):
        return made
    numbers = frozenset(theirs.floats)

    def call(*args: Any) -> Any:
        given = [torch.tensor(a, dtype=torch.float64) if i in numbers else a for i, a in enumerate(args)]
        return made(*[args[i].shape[d] for i, d in places], *given)

    return call


def read_floats(graph: fx.Graph, numbers: Collection[int]) -> None:
    """The inputs of these numbers are tensors, whose item() the graph reads: of a number itself who traces the graph makes a constant."""
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for i in numbers:
        node = nodes[i]
        if node.users:
            with graph.inserting_before(first):
                item = graph.call_method("item", (node,))
            node.replace_all_uses_with(item, delete_user_cb=lambda user, item=item: user is not item)


def lift_sizes(graph: fx.Graph) -> list[tuple[int, int]]:
    """Sizes that vary and that the graph reads of its inputs become inputs in front, so that who traces it with the inputs at hand does not
    take one for a constant. Out: of each the input and the dimension."""
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    made: dict[Any, fx.Node] = {}
    places: list[tuple[int, int]] = []
    for i, given in enumerate(nodes):
        for n in [u for u in given.users if u.op == "call_method" and u.target == "size" and len(u.args) == 2]:
            d: Any = n.args[1]
            size = _sizes(given)[d]
            if not isinstance(size, torch.SymInt):
                continue
            if size.node.expr not in made:
                places.append((i, d))
                with graph.inserting_before(nodes[0]):
                    made[size.node.expr] = graph.placeholder(f"s{len(made)}")
            n.replace_all_uses_with(made[size.node.expr])
            graph.erase_node(n)
    return places


def select_varying(graph: fx.Graph) -> None:
    """Numbers that vary in indices, `x[:, n]`, by `select`: torch's own indexing makes constants of them."""
    for node in list(graph.nodes):
        if node.target is not operator.getitem or not isinstance(node.args[0].meta.get("val"), torch.Tensor):
            continue
        keys = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        varying = [k for k in keys if isinstance(k, fx.Node)]
        if not varying or not all(isinstance(k.meta.get("val"), torch.SymInt) for k in varying):
            continue
        made, d = node.args[0], 0
        rest = made.meta["val"].dim() - sum(k is not None and k is not Ellipsis for k in keys)  # dimensions that `...` stands for
        with graph.inserting_before(node):
            for k in keys:
                if isinstance(k, fx.Node | int):
                    made = graph.call_method("select", (made, d, k))
                    continue
                if k is None:
                    made = graph.call_method("unsqueeze", (made, d))
                elif k is not Ellipsis and k != slice(None):
                    made = graph.call_function(operator.getitem, (made, (*(slice(None),) * d, k)))
                d += rest if k is Ellipsis else 1
        node.replace_all_uses_with(made, propagate_meta=made is not node.args[0])
        graph.erase_node(node)


class BySizes:
    """A call that asks the backend once for each set of sizes; LIMIT of them are kept."""

    def __init__(self, backend: Backend, gm: fx.GraphModule, keywords: Mapping[str, Any]) -> None:
        self.backend, self.gm, self.keywords = backend, gm, keywords
        self.kept: OrderedDict[Any, Any] = OrderedDict()
        self.lock = threading.Lock()

    def of(self, inputs: Sequence[Any]) -> Any:
        key = tuple([(v.shape, v.stride()) if isinstance(v, torch.Tensor) else v for v in inputs])
        with self.lock:
            made = self.kept.get(key)
            if made is None:
                made = self.kept[key] = _call(self.backend, self.gm, inputs, self.keywords, Theirs())
                if len(self.kept) > LIMIT:
                    self.kept.popitem(last=False)
        return made

    def __call__(self, *inputs: Any) -> Any:
        return self.of(inputs)(*inputs)


def _sizes(n: fx.Node) -> list[Any]:
    """Sizes of an input, or the number that it is, if that varies."""
    value = n.meta.get("val")
    return list(value.shape) if isinstance(value, torch.Tensor) else [value] if isinstance(value, torch.SymInt) else []


def with_examples(graph: fx.Graph, owner: fx.GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> None:
    """Every node's meta["example_value"], as far as torch has fake forms of the operators, and meta["stack_trace"]."""
    given = iter(fakes)

    class Examples(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = next(given) if n.op == "placeholder" else super().run_node(n)
            if n.op != "output":
                n.meta["example_value"] = value
            return value

    for n in graph.nodes:
        note_stack(n)

    with mode, contextlib.suppress(Exception):
        Examples(owner, graph=graph).run(*fakes)


def _dynamo(name: str, package: str) -> Backend:
    """A backend that `package` registers with PyTorch's compiler when it is imported."""
    import_module(package)
    registry = import_module("torch._dynamo.backends.registry")
    found: Backend = registry.lookup_backend(name)
    return found


def ipex(gm: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
    return _dynamo("ipex", "intel_extension_for_pytorch")(gm, inputs, **keywords)


def tensorrt(gm: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
    return _dynamo("tensorrt", "torch_tensorrt")(gm, inputs, **keywords)
