"""Run a FunctionalGraph with torch's own operators: the `aot_eager` backend, and the oracle that tests compare with.

In: FunctionalGraph. Out: a callable on real tensors that does write-backs and returns what the captured graph would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.expr import Expr, Sym
from ..ir.number import number_of
from .spec import FreshOutput, FunctionalGraph, InputOutput, SizeOutput, TensorSpec, ViewOutput

aten = torch.ops.aten


def eager_callable(fg: FunctionalGraph) -> Callable[..., tuple[Any, ...]]:
    """`call(*inputs)` over real tensors."""

    def call(*inputs: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            return _run(fg, (*inputs, *fg.consts))

    return call


def run_functional(fg: FunctionalGraph, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """One run on `inputs` (without fg.consts) under the grad mode of the caller; write-backs are not recorded by autograd."""
    return _run(fg, (*inputs, *fg.consts))


def _run(fg: FunctionalGraph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    symbols = symbol_values(fg, inputs)
    env: dict[fx.Node, Any] = {}
    by_name: dict[str, Any] = {}
    given = iter(inputs)

    def real(v: Any) -> Any:
        if isinstance(v, fx.Node):
            return env[v]
        if isinstance(v, Expr):
            return number_of(v, symbols)
        return type(v)(real(x) for x in v) if isinstance(v, (list, tuple)) else v

    for node in fg.graph.nodes:
        if node.op == "placeholder":
            env[node] = by_name[node.name] = next(given)
        elif node.op == "call_function":
            args, kwargs = [real(a) for a in node.args], {k: real(v) for k, v in node.kwargs.items()}
            env[node] = by_name[node.name] = _fit(_call(node.target, args, kwargs), node.meta["spec"], symbols)
    return deliver(fg, inputs, by_name, symbols)


def symbol_values(fg: FunctionalGraph, inputs: Sequence[Any]) -> dict[str, Any]:
    """The numbers that real inputs (fg.consts included) give the symbols; those that only running tells are left out."""
    return {s.sym.name: origin_value(s.origin, inputs) for s in fg.symbols if s.origin[0] != "bound"}


def asked(fg: FunctionalGraph) -> tuple[str, ...]:
    """Names of the nodes whose values results and write-backs need."""
    fresh = [o.node for o in fg.outputs if isinstance(o, FreshOutput)]
    return tuple(dict.fromkeys((*fresh, *(name for _, name in fg.write_backs))))


def deliver(fg: FunctionalGraph, inputs: Sequence[Any], by_name: Mapping[str, Any], symbols: Mapping[str, Any]) -> tuple[Any, ...]:
    """Write-backs done, results put together from the values of the nodes that `asked` names (whose strides may be any)."""
    results: list[Any] = [None] * len(fg.outputs)
    specs = {n.name: n.meta["spec"] for n in fg.graph.nodes if n.op != "output"}
    for i, out in enumerate(fg.outputs):
        if isinstance(out, FreshOutput):
            results[i] = _fit(by_name[out.node], specs[out.node], dict(symbols))
        elif isinstance(out, InputOutput):
            results[i] = inputs[out.index]
        elif isinstance(out, SizeOutput):
            results[i] = number_of(out.value, symbols)
    for number, name in fg.write_backs:
        with torch.no_grad():
            inputs[number].copy_(by_name[name])
    for i, out in enumerate(fg.outputs):
        if isinstance(out, ViewOutput):
            base = inputs[out.of] if isinstance(out.of, int) else results[out.of[1]]
            results[i] = view_of(base, out.spec, symbols)
    return tuple(results)


def origin_value(origin: tuple[str | int, ...], inputs: Sequence[Any]) -> Any:
    """What a symbol's origin (ir.program.Symbol) says of real inputs."""
    kind, number, *dim = origin
    value = inputs[int(number)]
    if kind == "size":
        scale, shift = dim[1:] or (1, 0)
        return (value.shape[int(dim[0])] - int(shift)) // int(scale)
    return value.stride(int(dim[0])) if kind == "stride" else value


def strided(base: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    return base.as_strided(size, stride, base.storage_offset() + (offset or 0))


def _clone(value: Tensor, **options: Any) -> Tensor:
    return value.clone(**options)


def _scattered(base: Tensor, *args: Any) -> Tensor:
    is_counted = len(args) > 3 and args[3] is not None  # an offset, which is one from the storage's begin
    return aten.as_strided_scatter.default(base.clone() if is_counted else base, *args)


# On values every view of sizes exists, and what is counted from a storage's begin is counted from the operand's first element.
ON_VALUES: dict[Any, Any] = {
    aten.view.default: aten.reshape.default, aten.clone.default: _clone, aten.as_strided.default: strided,
    aten.as_strided_scatter.default: _scattered,
}  # fmt: skip


def _call(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return ON_VALUES.get(target, target)(*args, **kwargs)


def fitted(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], symbols: dict[str, Any], target: Any = None) -> Any:
    """What one node (or `target` instead of its own) gives for real operands."""
    return _fit(_call(target or node.target, list(args), dict(kwargs)), node.meta["spec"], symbols)


def view_of(base: torch.Tensor, spec: TensorSpec, symbols: Mapping[str, Any]) -> torch.Tensor:
    shape, strides = [number_of(s, symbols) for s in spec.shape], [number_of(s, symbols) for s in spec.strides]
    offset = 0 if spec.offset is None else number_of(spec.offset, symbols)
    if spec.dtype != base.dtype:
        flat = base.as_strided((base.untyped_storage().nbytes() // base.element_size() - base.storage_offset(),), (1,)).view(spec.dtype)
        return flat.as_strided(shape, strides, offset)
    return strided(base, shape, strides, offset)


def laid_out(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The value with these strides: they mean nothing in dimensions of size 1."""
    if value.stride() == strides:
        return value
    rows = [(a, b) for n, a, b in zip(value.shape, strides, value.stride(), strict=True) if n != 1]
    if value.numel() and any(a != b for a, b in rows):
        if any(a == 0 for a, _ in rows):
            return value
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided(value.shape, strides)


def _fit(value: Any, spec: Any, symbols: dict[str, Any]) -> Any:
    """The value in the layout its spec promises; sizes known only now bind their symbols."""
    if isinstance(spec, tuple):
        return [_fit(v, s, symbols) for v, s in zip(value, spec, strict=True)]
    if isinstance(spec, Expr):
        if isinstance(spec, Sym):
            symbols.setdefault(spec.name, value)
        return value
    if not isinstance(spec, TensorSpec) or not isinstance(value, torch.Tensor):
        return value
    for e, n in zip(spec.shape, value.shape, strict=True):
        if isinstance(e, Sym):
            symbols.setdefault(e.name, n)
    return laid_out(value, tuple(number_of(s, symbols) for s in spec.strides))
