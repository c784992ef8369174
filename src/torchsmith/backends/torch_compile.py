"""torchsmith under PyTorch: `torch.compile(model, backend="torchsmith")`, found through the entry point of that name.

In: what torch.compile hands to a backend. Out: a callable. PyTorch's capture and AOT autograd stay in charge: they give forward and
backward as ATen graphs, which take the same road, options and caches as torchsmith.compile. What has no native code runs as the given
graph, eagerly, and is counted. This file alone imports torch._dynamo and torch._functorch: it is called by them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from .. import events
from ..codes import Unsupported
from ..graph.spec import TensorSpec
from ..ir.expr import const
from ..options import Options, from_user
from ..pipeline import compile_native
from .expected import Expected
from .foreign import Foreign

_COUNT = [0]


def torchsmith(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Any = None) -> Any:
    """The backend that torch.compile calls; mode and options as of torchsmith.compile."""
    chosen = from_user(mode, options)

    def compile_one(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return make_boxed_func(compile_aten(graph, inputs, chosen, _static()))

    def compile_plain(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return make_boxed_func(compile_aten(graph, inputs, chosen, ()))

    wrapped = aot_autograd(
        fw_compiler=compile_one, bw_compiler=compile_plain, inference_compiler=compile_one,
        partition_fn=partition, keep_inference_input_mutations=True,
    )  # fmt: skip
    return wrapped(gm, example_inputs)


def partition(joint: torch.fx.GraphModule, *args: Any, **keywords: Any) -> Any:
    """Forward and backward of a joint graph. What is computed of an input that forward writes is kept for backward: computed again there,
    it would be of the new value."""
    copy = torch.ops.aten.copy_.default
    todo = [n.args[0] for n in joint.graph.nodes if n.target is copy and isinstance(n.args[0], torch.fx.Node)]
    for source in todo:
        for user in source.users:
            if isinstance(user.target, torch._ops.OpOverload) and user.target.is_view:
                todo.append(user)
            elif user.target is not copy and user.op == "call_function":
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(joint, *args, **keywords)


def _static() -> Sequence[int]:
    """Numbers of the inputs that are parameters and buffers, as AOT autograd tells them."""
    context = TracingContext.try_get()
    meta = getattr(context, "fw_metadata", None)
    return tuple(getattr(meta, "static_input_indices", None) or ())


def compile_aten(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, constant: Sequence[int] = ()
) -> Callable[..., Sequence[Any]]:
    """One ATen graph compiled natively; `gm` itself where that cannot be."""
    name = f"aten_{_COUNT[0]}"
    _COUNT[0] += 1
    try:
        with _disable_current_modes():  # AOT autograd's fake mode is on
            foreign = Foreign(gm, inputs, constant)
            made = compile_native(foreign.module, foreign.facts, options, name)
        foreign.tell(made.guards)
    except Unsupported as why:
        events.emit("fallback", code=why.code, graph=name, at=why.at, detail=why.detail)
        warnings.warn(f"torchsmith: {why}. This graph runs eagerly.", stacklevel=2)
        return gm.forward
    events.emit("graph", name=name, report=made.report, module=foreign.module)
    return held(foreign.around(made.call), gm.forward, foreign, constant, name)


def held(call: Callable[..., Any], eager: Callable[..., Any], foreign: Foreign, constant: Sequence[int], name: str) -> Callable[..., Any]:
    """`call` for inputs of the sizes and strides that the graph was made for, `eager` for others (BCK007). Inputs that share memory and are
    written come as one tensor, which PyTorch does not guard: the next call's can be smaller."""
    rows: list[TensorSpec | None] = [None] * len(foreign.names)
    for i, t in zip(foreign.reads, foreign.values, strict=True):
        if i not in constant and isinstance(t, torch.Tensor) and all(isinstance(n, int) for n in (*t.shape, *t.stride())):
            rows[i] = TensorSpec(t.dtype, tuple(map(const, t.shape)), tuple(map(const, t.stride())), str(t.device))
    if not any(rows):
        return call
    expected = Expected(foreign.names, tuple(rows), (), ())

    def run(*inputs: Any) -> Any:
        try:
            expected.check(inputs)
        except (TypeError, ValueError) as why:
            events.emit("fallback", code="BCK007", graph=name, at="", detail=str(why))
            warnings.warn(f"torchsmith: [BCK007] PyTorch had the graph made for others: {why}. This call runs eagerly.", stacklevel=2)
            return eager(*inputs)
        return call(*inputs)

    return run


__all__: tuple[str, ...] = ("compile_aten", "torchsmith")
