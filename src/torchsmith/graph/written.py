"""A FunctionalGraph written in other forms: a module of ATen calls, and a Python function that is made for being captured.

In: FunctionalGraph. Out: the module or function, in which sizes are Python's arithmetic on the inputs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.expr import Cast, Const, Expr, Op, Sym
from ..ir.ops import OPS
from .eager import ON_VALUES, laid_out, strided
from .spec import FreshOutput, FunctionalGraph, InputOutput, SizeOutput, TensorSpec, ViewOutput

aten = torch.ops.aten

# Python's functions for operators on numbers; of any other the function that its row has for one number.
_PYTHON: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod, "neg": operator.neg,
    "div": operator.truediv, "min": min, "max": max, "abs": abs, "pow": pow, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "and": operator.and_, "or": operator.or_, "not": operator.not_,
    "sqrt": math.sqrt,
}  # fmt: skip


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

    def fitted(node: fx.Node, spec: Any) -> fx.Node:
        if isinstance(spec, tuple):
            parts = [fitted(graph.call_function(operator.getitem, (node, i)), s) for i, s in enumerate(spec)]
            return graph.call_function(_listed, tuple(parts))
        if not isinstance(spec, TensorSpec):
            return node
        writer.tell(node, spec)
        made = graph.call_function(laid_out, (node, tuple(map(writer.number, spec.strides))))
        made.meta["spec"] = spec
        return made

    for node in fg.graph.nodes:
        if node.op == "output":
            break
        made = writer.write(node, ON_VALUES)
        if node.op == "call_function":
            writer.copies[node] = fitted(made, node.meta["spec"])
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
            results[i] = graph.call_function(strided, (base, *rows, 0 if spec.offset is None else writer.number(spec.offset)))
    graph.output(tuple(results))
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<torchsmith exported program>", "exec"), namespace)
    return functools.partial(namespace["forward"], None)


def _listed(*values: Any) -> list[Any]:
    return list(values)


def _write_back(target: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        target.copy_(value)
