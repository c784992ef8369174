"""Backends written for torch.compile, called under our capture: they receive what PyTorch's own capture would hand them.

In: a backend `(GraphModule, example_inputs, **keywords) -> callable`. Out: the same signature for our captured graphs. A partner finds fake
tensors of one mode in meta["example_value"] of every node, PyTorch's symbols where sizes vary, lifted parameters as inputs, and the tracing
context that torch's tools ask for.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ..codes import Unsupported
from ..ir.expr import Sym
from ..ir.number import number_of
from .foreign import LARGE, evaluate
from .plain import LIMIT

Backend = Callable[..., Any]


def as_partner(backend: Backend) -> Backend:
    """`backend` with the surroundings that it expects. What it assumes of symbolic sizes becomes our guards; where that cannot be said in
    our words it is called once for each set of sizes."""

    def call(gm: torch.fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        if not any(isinstance(size, torch.SymInt) for n in nodes for size in _sizes(n)):
            return _call(backend, gm, inputs, keywords, Theirs())
        theirs = Theirs()
        try:
            theirs.see(nodes, inputs)
            made = _call(backend, gm, inputs, keywords, theirs)
            theirs.tell()
        except Unsupported:
            return _by_sizes(backend, gm, keywords)
        return made

    call.__name__ = getattr(backend, "__name__", type(backend).__name__)
    return call


class Theirs:
    """PyTorch's symbols for ours: fake inputs whose sizes they are, and what the partner assumed of them."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.env)
        self.values: dict[str, Any] = {}  # our symbol -> their number
        self.ours: dict[Any, Any] = {}  # their symbol -> our number
        self.inputs: list[Any] = []
        self.pinned: list[tuple[Any, int]] = []  # our number, and the constant that they took it for

    def see(self, nodes: Sequence[torch.fx.Node], inputs: Sequence[Any]) -> None:
        """Inputs as they shall be seen. Raises Unsupported (BCK004) for numbers that are not integers."""
        later: list[tuple[Any, Any]] = []
        for n, value in zip(nodes, inputs, strict=True):
            sizes = _sizes(n)
            if not isinstance(value, torch.Tensor):
                if isinstance(n.meta["val"], torch.SymFloat):
                    raise Unsupported("BCK004", detail=f"{n.name} is a float that varies")
                # a number has a symbol as a size has
                self.inputs.append(self._dynamic(torch.empty(max(value, 0)), (True,)).shape[0] if sizes and value > 0 else value)
                found: Sequence[Any] = [self.inputs[-1]] if sizes else []
            else:
                varies = tuple(isinstance(size, torch.SymInt) for size in sizes)
                self.inputs.append(self._dynamic(value, varies) if any(varies) else self.mode.from_tensor(value, static_shapes=True))
                found = self.inputs[-1].shape
            for ours, made in zip(sizes, found, strict=True):
                if isinstance(ours, torch.SymInt):
                    self._bind(ours, made, later)
        for ours, made in later:  # sizes that follow from others
            wanted = number_of(ours.node.expr, self.values)
            if wanted is not None:
                torch._check(made == wanted)

    def _dynamic(self, value: torch.Tensor, varies: tuple[bool, ...]) -> torch.Tensor:
        sizes = [DimDynamic.DYNAMIC if v else DimDynamic.STATIC for v in varies]
        return self.mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    def _bind(self, ours: torch.SymInt, made: Any, later: list[tuple[Any, Any]]) -> None:
        expr = ours.node.expr
        if not isinstance(made, torch.SymInt):
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


def _call(backend: Backend, gm: torch.fx.GraphModule, inputs: Sequence[Any], keywords: Mapping[str, Any], theirs: Theirs) -> Any:
    fakes = theirs.inputs or [theirs.mode.from_tensor(v, static_shapes=True) if isinstance(v, torch.Tensor) else v for v in inputs]
    shown = [fake if isinstance(fake, torch.SymInt) else value for fake, value in zip(fakes, inputs, strict=True)]
    made = with_examples(gm, fakes, theirs.mode)
    with tracing(TracingContext(theirs.mode)):
        return backend(made, shown, **keywords)


def _by_sizes(backend: Backend, gm: torch.fx.GraphModule, keywords: Mapping[str, Any]) -> Callable[..., Any]:
    """A call that asks the backend once for each set of sizes."""
    kept: OrderedDict[Any, Any] = OrderedDict()
    lock = threading.Lock()

    def run(*inputs: Any) -> Any:
        key = tuple([(v.shape, v.stride()) if isinstance(v, torch.Tensor) else v for v in inputs])
        with lock:
            made = kept.get(key)
            if made is None:
                made = kept[key] = _call(backend, gm, inputs, keywords, Theirs())
                if len(kept) > LIMIT:
                    kept.popitem(last=False)
        return made(*inputs)

    return run


def _sizes(n: torch.fx.Node) -> list[Any]:
    """Sizes of an input, or the number that it is, if that varies."""
    value = n.meta.get("val")
    return list(value.shape) if isinstance(value, torch.Tensor) else [value] if isinstance(value, torch.SymInt) else []


def with_examples(gm: torch.fx.GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> torch.fx.GraphModule:
    """A copy of the captured graph whose nodes carry meta["example_value"]."""
    made = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    made.meta = dict(gm.meta)
    given = iter(fakes)

    class Examples(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = next(given) if n.op == "placeholder" else super().run_node(n)
            n.meta["example_value"] = value
            return value

    with mode, torch.no_grad() if not torch.is_grad_enabled() else torch.enable_grad():
        Examples(made).run(*fakes)
    return made


def _dynamo(name: str, package: str) -> Backend:
    """A backend that `package` registers with PyTorch's compiler when it is imported."""
    import_module(package)
    registry = import_module("torch._dynamo.backends.registry")
    found: Backend = registry.lookup_backend(name)
    return as_partner(found)


def ipex(gm: torch.fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
    return _dynamo("ipex", "intel_extension_for_pytorch")(gm, inputs, **keywords)


def tensorrt(gm: torch.fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
    return _dynamo("tensorrt", "torch_tensorrt")(gm, inputs, **keywords)
