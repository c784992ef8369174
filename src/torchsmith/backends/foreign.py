"""Graphs that another capture made, read as ours: a torch.fx.GraphModule with fake values -> a captured graph and its size facts.

In: a GraphModule whose placeholders carry fake tensors and symbolic numbers (meta["val"], or examples given beside it), as PyTorch's
capture and its AOT autograd hand to backends, and as servers bring it. Out: (GraphModule, SizeFacts) in the captured dialect
(graph/spec.py), and how to tell the other capture what was assumed of its symbols.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ..codes import Unsupported
from ..graph.sizes import SizeFacts
from ..graph.tracing import make_unseen, refuse_kind, remember_device
from ..ir.expr import Expr
from ..ir.number import number_of
from .regions import copied, write_out

LARGE = 1 << 62  # bounds of the other capture beyond it mean none


class Foreign:
    """One graph being read."""

    def __init__(self, gm: fx.GraphModule, examples: Sequence[Any], constant: Collection[int] = (), prefer_examples: bool = False) -> None:
        """`examples`: per placeholder a fake or real tensor or a number, used where its meta["val"] says nothing, or always; `constant`:
        numbers of those that are parameters or buffers."""
        self.facts = SizeFacts()
        self.facts.reads_data = self.facts.is_promise = True
        self.theirs: dict[str, Any] = {}  # our symbol -> the other capture's number
        self.ours: dict[Any, Any] = {}  # their expression -> our number
        graph = copied(gm.graph)
        every = [n for n in graph.nodes if n.op == "placeholder"]
        if len(every) != len(examples):
            raise ValueError(f"the graph has {len(every)} inputs ({', '.join(n.name for n in every)}), {len(examples)} examples were given")
        tokens = without_tokens(graph)
        write_out(graph, gm)
        self.names = tuple(n.name for n in every)
        self.reads = reads = [i for i, n in enumerate(every) if n not in tokens]  # of what the other capture passes
        constant = {k for k, i in enumerate(reads) if i in constant}
        self.module = fx.GraphModule(gm, graph)
        nodes = [every[i] for i in reads]
        self.values = [examples[i] if prefer_examples else _value(every[i], examples[i]) for i in reads]
        for number, value in enumerate(self.values):
            self._declare(number, value)
        for number, (node, value) in enumerate(zip(nodes, self.values, strict=True)):
            node.meta["val"] = self._traced(value)
            node.meta["role"] = "param" if number in constant else "input" if isinstance(value, torch.Tensor) else "scalar"
        for node in self.module.graph.nodes:
            node.meta["loc"] = location(node)
        self.results = self._results()

    def _results(self) -> list[Any]:
        """Per result its number among those that are computed, or the constant it is (None: a gradient nobody asked for)."""
        end = self.module.graph.output_node()
        flat = list(end.args[0]) if isinstance(end.args[0], (list, tuple)) else [end.args[0]]  # type: ignore[arg-type]
        nested = [r for r in flat if isinstance(r, (list, tuple, dict))]
        if nested:
            raise TypeError(f"a graph gives a flat list of results; {nested[0]} is a {type(nested[0]).__name__}")
        nodes = [r for r in flat if isinstance(r, fx.Node)]
        end.args = (tuple(nodes),)
        count = iter(range(len(nodes)))
        return [(next(count), None) if isinstance(r, fx.Node) else (None, r) for r in flat]

    def around(self, call: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """`call` of the other capture's inputs: with the constants among the results, without memory that they only show parts of."""
        reads, results, count = self.reads, self.results, len(self.results)
        if len(reads) == len(self.names) and all(at is not None for at, _ in results):
            return lambda *inputs: call(*inputs)[:count]

        def run(*inputs: Any) -> list[Any]:
            found = call(*[inputs[i] for i in reads])
            return [value if at is None else found[at] for at, value in results]

        return run

    def _declare(self, number: int, value: Any) -> None:
        """Symbols that an input tells: it is one, or a dimension of it is."""
        if isinstance(value, torch.SymInt):
            self._symbol(value, ("scalar", number))
        elif isinstance(value, torch.Tensor):
            for d, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    self._symbol(size, ("size", number, d))

    def _symbol(self, value: torch.SymInt, origin: tuple[str | int, ...]) -> None:
        node = value.node
        if node.expr.is_Symbol and node.expr not in self.ours:
            ranges = node.shape_env.bound_sympy(node.expr)
            lo = int(ranges.lower) if ranges.lower.is_Integer and ranges.lower > -LARGE else 0
            hi = int(ranges.upper) if ranges.upper.is_Integer and ranges.upper < LARGE else None
            made = self.facts.fresh(int(node.hint) if node.has_hint() else None, origin, max(lo, 0), hi)
            self.ours[node.expr] = made
            self.theirs[str(made.node.expr.name)] = value

    def _traced(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return self.number(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise Unsupported("BCK004", detail=str(value))
        if not isinstance(value, torch.Tensor):
            return value
        refuse_kind(value, self.facts)
        made = make_unseen([self.number(n) for n in value.shape], [self.number(n) for n in value.stride()], value.dtype)
        return remember_device(made, value.device)

    def number(self, value: Any) -> Any:
        """A size of theirs as one of ours. Raises Unsupported (BCK004) for what no input tells."""
        if not isinstance(value, torch.SymInt):
            return value
        return evaluate(value.node.expr, self.ours)

    def tell(self, conditions: Sequence[Expr]) -> None:
        """The other capture guards what was assumed of its symbols. Raises Unsupported (BCK004) for a condition on other numbers."""
        for condition in conditions:
            holds = number_of(condition, self.theirs)
            if holds is None or not bool(holds):
                raise Unsupported("BCK004", detail=str(condition))


class Meaning(PythonReferenceAnalysis):
    """What the other capture's functions of numbers are on ours, where torch's table leaves one out."""

    int_truediv = staticmethod(lambda a, b: a / b)
    identity = staticmethod(lambda a: a)
    where = staticmethod(lambda c, a, b: a if c else b)
    modular_indexing = staticmethod(lambda a, b, c: a // b % c)
    trunc_to_int = staticmethod(lambda a, _: torch.sym_int(a))


def evaluate(e: Any, ours: Mapping[Any, Any]) -> Any:
    """A number or a condition of the other capture (a sympy expression) on our numbers: `ours`, by its symbols. Raises Unsupported
    (BCK004) for what no input tells."""
    try:
        return ours[e] if e in ours else sympy_interp(Meaning, dict(ours), e)
    except (KeyError, AttributeError, NotImplementedError, AssertionError, TypeError, ValueError) as error:
        raise Unsupported("BCK004", detail=str(e)) from error


def without_tokens(graph: fx.Graph) -> set[fx.Node]:
    """Calls that the other capture orders by tokens become calls in the order of the graph, their tokens None; the placeholders that were
    tokens, erased."""
    tokens: set[fx.Node] = set()
    for n in list(graph.nodes):
        if n.target is not torch.ops.higher_order.with_effects:
            continue
        if isinstance(n.args[0], fx.Node) and n.args[0].op == "placeholder":
            tokens.add(n.args[0])
        called: Any = n.args[1]
        with graph.inserting_before(n):
            made = graph.call_function(called, tuple(n.args[2:]), dict(n.kwargs))
        made.meta = {k: v for k, v in n.meta.items() if k != "val"}
        results = len(called._schema.returns)
        for part in list(n.users):
            number = part.args[1]
            if number == 0:
                _replace(part, None)
            elif results < 2:
                part.replace_all_uses_with(made)
            else:
                with graph.inserting_before(part):
                    part.replace_all_uses_with(graph.call_function(operator.getitem, (made, number - 1)))
            graph.erase_node(part)
        graph.erase_node(n)
    for token in tokens:
        _replace(token, None)
        graph.erase_node(token)
    return tokens


def _replace(node: fx.Node, value: Any) -> None:
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda a: value if a is node else a)  # type: ignore[assignment]


def _value(node: fx.Node, example: Any) -> Any:
    for key in ("val", "example_value"):
        if node.meta.get(key) is not None:
            return node.meta[key]
    return example


def location(node: fx.Node) -> str:
    """The user's line that made a node, as PyTorch's capture notes it."""
    text = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return str(node.meta.get("loc") or "")
    file, line, *_ = lines[-1].removeprefix("File ").split(", ")
    return f"{file.strip(chr(34))}:{line.removeprefix('line ')}"
