"""Run a FunctionalGraph with torch's own operators: the `aot_eager` backend, and the oracle that tests compare with.

In: FunctionalGraph. Out: a callable on real tensors that does write-backs and returns what the captured graph would.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.expr import Cast, Const, Expr, Op, Sym
from ..ir.number import number_of
from ..ir.ops import OPS
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


_PYTHON: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod, "neg": operator.neg,
    "div": operator.truediv, "min": min, "max": max, "abs": abs, "pow": pow, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "and": operator.and_, "or": operator.or_, "not": operator.not_,
    "sqrt": math.sqrt,
}  # fmt: skip  (of any other operator: the function that its row has for one number)


class _Writer:
    """A FunctionalGraph written as another graph, whose sizes are nodes: `sym_size` of a tensor, and Python's arithmetic."""

    def __init__(self, fg: FunctionalGraph) -> None:
        self.fg, self.graph = fg, fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.numbers: dict[Expr, Any] = {}
        self.shown: dict[str, tuple[fx.Node, int]] = {}  # a tensor and dimension that tell a symbol
        self.first = list(fg.graph.nodes)[: len(fg.inputs) + len(fg.consts)]
        self.origins = {s.sym.name: s.origin for s in fg.symbols if s.origin[0] != "bound"}

    def symbol(self, name: str) -> Any:
        if name not in self.origins:
            node, d = self.shown[name]
            return node if d < 0 else self.graph.call_function(aten.sym_size.int, (node, d))
        kind, number, *at = self.origins[name]
        given = self.copies[self.first[int(number)]]
        if kind not in ("size", "stride"):
            return given
        value = self.graph.call_function(aten.sym_size.int if kind == "size" else aten.sym_stride.int, (given, int(at[0])))
        for fn, n in zip((operator.sub, operator.floordiv), reversed(at[1:]), strict=False):
            value = self.graph.call_function(fn, (value, int(n)))
        return value

    def number(self, e: Expr) -> Any:
        if isinstance(e, Const):
            return e.value
        if e not in self.numbers:
            if isinstance(e, Sym):
                self.numbers[e] = self.symbol(e.name)
            else:
                if isinstance(e, Cast):
                    made: Callable[..., Any] = float if e.dtype.is_float else bool if e.dtype.name == "bool" else int
                else:
                    name = e.name if isinstance(e, Op) else ""
                    made = _PYTHON.get(name) or OPS[name].scalar
                self.numbers[e] = self.graph.call_function(made, tuple(map(self.number, e.args)))
        return self.numbers[e]

    def copied(self, v: Any) -> Any:
        if isinstance(v, (tuple, list)):
            return type(v)(map(self.copied, v))
        return self.copies[v] if isinstance(v, fx.Node) else self.number(v) if isinstance(v, Expr) else v

    def write(self, node: fx.Node, own: Mapping[Any, Any]) -> fx.Node:
        """own: what is called instead of an operator."""
        if node.op == "placeholder":
            made = self.graph.placeholder(node.name)
        else:
            args, kwargs = self.copied(node.args), {k: self.copied(v) for k, v in node.kwargs.items()}
            made = self.graph.create_node(node.op, own.get(node.target, node.target), args, kwargs, node.name)
        made.meta = dict(node.meta)
        self.copies[node] = made
        self.tell(made, node.meta.get("spec"))
        return made

    def tell(self, made: fx.Node, spec: Any) -> None:
        """The symbols that a value tells."""
        if isinstance(spec, Sym):
            self.shown.setdefault(spec.name, (made, -1))
        for d, n in enumerate(spec.shape if isinstance(spec, TensorSpec) else ()):
            if isinstance(n, Sym):
                self.shown.setdefault(n.name, (made, d))


def as_module(fg: FunctionalGraph) -> fx.GraphModule:
    """The graph as a module of ATen calls. Results may have other strides than eager's."""
    writer = _Writer(fg)
    for node in fg.graph.nodes:
        writer.write(node, {})
    return fx.GraphModule(torch.nn.Module(), writer.graph)


def as_python(fg: FunctionalGraph) -> Callable[..., Any] | None:
    """`run_functional` as a Python function `f(*inputs, *consts)` without loops over the graph, which is made for being captured; None
    where a result shows memory as another dtype."""
    writer = _Writer(fg)
    graph, by_name = writer.graph, {n.name: n for n in fg.graph.nodes}

    def laid_out(node: fx.Node, spec: Any) -> fx.Node:
        if isinstance(spec, tuple):
            parts = [laid_out(graph.call_function(operator.getitem, (node, i)), s) for i, s in enumerate(spec)]
            return graph.call_function(_listed, tuple(parts))
        if not isinstance(spec, TensorSpec):
            return node
        writer.tell(node, spec)
        fitted = graph.call_function(_laid_out, (node, tuple(map(writer.number, spec.strides))))
        fitted.meta["spec"] = spec
        return fitted

    for node in fg.graph.nodes:
        if node.op == "output":
            break
        made = writer.write(node, _ON_VALUES)
        if node.op == "call_function":
            writer.copies[node] = laid_out(made, node.meta["spec"])
    given = [writer.copies[n] for n in writer.first]
    results: list[Any] = [None] * len(fg.outputs)
    for i, out in enumerate(fg.outputs):
        if isinstance(out, FreshOutput):
            results[i] = writer.copies[by_name[out.node]]
        elif isinstance(out, InputOutput):
            results[i] = given[out.index]
        elif isinstance(out, SizeOutput):
            results[i] = writer.number(out.value)
    for number, name in fg.write_backs:
        graph.call_function(_write_back, (given[number], writer.copies[by_name[name]]))
    for i, out in enumerate(fg.outputs):
        if isinstance(out, ViewOutput):
            base, spec = given[out.of] if isinstance(out.of, int) else results[out.of[1]], out.spec
            if spec.dtype != base.meta["spec"].dtype:
                return None
            rows = [tuple(map(writer.number, row)) for row in (spec.shape, spec.strides)]
            results[i] = graph.call_function(_shown, (base, *rows, 0 if spec.offset is None else writer.number(spec.offset)))
    graph.output(tuple(results))
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<torchsmith exported program>", "exec"), namespace)
    return functools.partial(namespace["forward"], None)


def _laid_out(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The value with these strides: they mean nothing in dimensions of size 1."""
    if value.stride() == strides:
        return value
    rows = [(a, b) for n, a, b in zip(value.shape, strides, value.stride(), strict=True) if n != 1]
    if value.numel() and any(a != b for a, b in rows):
        if any(a == 0 for a, _ in rows):
            return value
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided(value.shape, strides)


def _listed(*values: Any) -> list[Any]:
    return list(values)


def _write_back(target: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        target.copy_(value)


def _shown(base: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    return base.as_strided(shape, strides, base.storage_offset() + offset)


def _strided(base: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    return base.as_strided(size, stride, base.storage_offset() + (offset or 0))


def _clone(value: Tensor, **options: Any) -> Tensor:
    return value.clone(**options)


def _scattered(base: Tensor, *args: Any) -> Tensor:
    return aten.as_strided_scatter.default(base.clone(), *args)


# On values every view of sizes exists, and what is counted from a storage's begin is counted from the operand's first element.
_ON_VALUES: dict[Any, Any] = {
    aten.view.default: aten.reshape.default, aten.clone.default: _clone, aten.as_strided.default: _strided,
    aten.as_strided_scatter.default: _scattered,
}  # fmt: skip


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
            results[i] = _view(base, out.spec, symbols)
    return tuple(results)


def origin_value(origin: tuple[str | int, ...], inputs: Sequence[Any]) -> Any:
    """What a symbol's origin (ir.program.Symbol) says of real inputs."""
    kind, number, *dim = origin
    value = inputs[int(number)]
    if kind == "size":
        scale, shift = dim[1:] or (1, 0)
        return (value.shape[int(dim[0])] - int(shift)) // int(scale)
    return value.stride(int(dim[0])) if kind == "stride" else value


def _call(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if target is aten.view.default:
        return aten.reshape.default(*args)  # on values every view of sizes exists
    if target is aten.clone.default:
        return args[0].clone(**kwargs)
    if target is aten.as_strided.default:  # counted from the operand's first element
        base, size, stride, offset = args
        return base.as_strided(size, stride, base.storage_offset() + (offset or 0))
    if target is aten.as_strided_scatter.default and len(args) > 4 and args[4] is not None:
        return target(args[0].clone(), *args[1:])
    return target(*args, **kwargs)


def fitted(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], symbols: dict[str, Any], target: Any = None) -> Any:
    """What one node (or `target` instead of its own) gives for real operands."""
    return _fit(_call(target or node.target, list(args), dict(kwargs)), node.meta["spec"], symbols)


def _view(base: torch.Tensor, spec: TensorSpec, symbols: Mapping[str, Any]) -> torch.Tensor:
    shape, strides = [number_of(s, symbols) for s in spec.shape], [number_of(s, symbols) for s in spec.strides]
    offset = 0 if spec.offset is None else number_of(spec.offset, symbols)
    if spec.dtype != base.dtype:
        flat = base.as_strided((base.untyped_storage().nbytes() // base.element_size() - base.storage_offset(),), (1,)).view(spec.dtype)
        return flat.as_strided(shape, strides, offset)
    return base.as_strided(shape, strides, base.storage_offset() + offset)


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
    strides = [number_of(s, symbols) for s in spec.strides]
    if value.numel() and any(n != 1 and a != b for n, a, b in zip(value.shape, strides, value.stride(), strict=True)):
        fitted = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
        return fitted.copy_(value) if 0 not in [s for s, n in zip(strides, value.shape, strict=True) if n != 1] else value
    if strides != list(value.stride()):
        return value.as_strided(value.shape, strides)
    return value
