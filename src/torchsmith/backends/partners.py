"""Backends written for torch.compile, called under our capture: they receive what PyTorch's own capture would hand them.

In: a backend `(GraphModule, example_inputs, **keywords) -> callable`. Out: the same signature for our captured graphs. A partner finds fake
tensors of one mode in meta["example_value"] of every node, symbolic sizes as the example's numbers, lifted parameters as inputs, and the
tracing context that torch's tools ask for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Backend = Callable[..., Any]


def as_partner(backend: Backend) -> Backend:
    """`backend` with the surroundings that it expects."""

    def call(gm: torch.fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        theirs = with_examples(gm, inputs, mode)
        with tracing(TracingContext(mode)):
            return backend(theirs, list(inputs), **keywords)

    call.__name__ = getattr(backend, "__name__", type(backend).__name__)
    return call


def with_examples(gm: torch.fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode) -> torch.fx.GraphModule:
    """A copy of the captured graph whose nodes carry meta["example_value"]."""
    made = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    made.meta = dict(gm.meta)
    given = iter(inputs)

    class Examples(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            if n.op == "placeholder":
                value = next(given)
                value = mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value
            else:
                value = super().run_node(n)
            n.meta["example_value"] = value
            return value

    with mode, torch.no_grad() if not torch.is_grad_enabled() else torch.enable_grad():
        Examples(made).run(*inputs)
    return made


def _dynamo(name: str, package: str) -> Backend:
    """A backend that `package` registers with PyTorch's compiler when it is imported."""
    import_module(package)
    registry = import_module("torch._dynamo.backends.registry")
    found: Backend = registry.lookup_backend(name)
    return as_partner(found)


def tvm(gm: torch.fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
    return _dynamo("tvm", "tvm")(gm, inputs, **keywords)


def ipex(gm: torch.fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
    return _dynamo("ipex", "intel_extension_for_pytorch")(gm, inputs, **keywords)


def tensorrt(gm: torch.fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
    return _dynamo("tensorrt", "torch_tensorrt")(gm, inputs, **keywords)
