"""Backends of ATen graphs: what `aot_autograd(fw_compiler=, bw_compiler=)` gives them.

In: a FunctionalGraph and a compiler `(GraphModule, example_inputs) -> callable`, as torch's AOT autograd calls one. Out: a call.
The compiler finds ATen calls on values, known sizes, fake tensors of one mode in meta["val"] of every node and as example inputs, and the
tracing context that torch's tools ask for. Its callable gives a tuple or list; one marked `_boxed_call` takes its inputs in one list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..codes import BackendFailed
from ..graph.spec import FunctionalGraph
from .partition import expand
from .plain import PlainGraph, Run, like, run_plain


def compile_aten(
    compiler: Callable[..., Any], table: Mapping[Any, Callable[..., Any]], fg: FunctionalGraph, name: str
) -> Callable[..., tuple[Any, ...]]:
    """A call of `fg` by `compiler`; operators of `table` are written out by its functions. Raises what that raises, BackendFailed."""

    def adapter(plain: PlainGraph) -> Run:
        return compiled(compiler, expand(plain, lambda n: n.target not in table, table) if table else plain)

    return run_plain(fg, adapter, name)


def compiled(compiler: Callable[..., Any], plain: PlainGraph) -> Run:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    gm = with_values(plain, mode)
    examples = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    with tracing(TracingContext(mode)):
        made = compiler(gm, examples)
    if not callable(made):
        raise BackendFailed(f"its compiler returned {type(made).__name__}, not a callable")
    if getattr(made, "_boxed_call", False):
        return lambda *inputs: made(list(inputs))
    return made  # type: ignore[no-any-return]


def with_values(plain: PlainGraph, mode: FakeTensorMode) -> fx.GraphModule:
    """The graph as a module whose nodes carry fake tensors of their sizes, strides and devices."""

    def fake(spec: Any) -> Any:
        return tuple(map(fake, spec)) if isinstance(spec, tuple) else like(spec)

    gm = plain.module()
    with mode:
        for n in gm.graph.nodes:
            if n.op in ("placeholder", "call_function"):
                n.meta["val"] = fake(n.meta["spec"])
    return gm
