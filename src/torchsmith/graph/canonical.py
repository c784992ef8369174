"""From recorded nodes to a FunctionalGraph: dead nodes dropped, equal pure nodes merged, names by position, the key text.

In: a Recording and its Outputs. Out: FunctionalGraph; equal key texts mean equal meaning, in any process.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._ops import OpOverload

from ..ir.expr import Expr, Sym, walk
from .outputs import FreshNode, InputNumber, Number, Outputs, ViewOf
from .schema import info
from .sizes import SizeFacts, print_condition
from .spec import FreshOutput, FunctionalGraph, InputOutput, Output, SizeOutput, TensorSpec, ViewOutput, add_node
from .values import Node, inputs_of, is_kept

if TYPE_CHECKING:
    from .functionalise import Recording


def emit_graph(rec: Recording, outputs: Outputs, passing: tuple[int, ...] = ()) -> FunctionalGraph:
    """`passing`: numbers of results that are let go before the next call, as spec.py says."""
    live = _live(rec, outputs)
    for node in live if rec.facts.symbols else ():
        if node.kind != "placeholder":
            _write_numbers(node, rec.facts)
    merged = _merge(live, _returned(outputs))
    graph = fx.Graph()
    lines: list[str] = []
    made: dict[int, fx.Node] = {}

    def final(n: Node) -> Node:
        while n in merged:
            n = merged[n]
        return n

    def lower(v: Any) -> Any:
        if isinstance(v, Node):
            return made[id(final(v))]
        if isinstance(v, (list, tuple)):
            return [lower(x) for x in v]
        return v

    used = {id(final(a)) for n in live for a in inputs_of(n)} | {id(final(n)) for _, n in outputs.write_backs}
    # written and viewed inputs too: whoever makes the result must know what they are
    used |= {id(rec.placeholders[number]) for number, _ in outputs.write_backs}
    used |= {id(rec.placeholders[o.of]) for o in outputs.results if isinstance(o, ViewOf) and isinstance(o.of, int)}
    roles = (*rec.roles, *("const" for _ in rec.const_nodes))
    for node, role in zip((*rec.placeholders, *rec.const_nodes), roles, strict=True):
        node.name = node.target
        made[id(node)] = _meta(graph.placeholder(node.name), node)
        lines.append(f"{node.name}: {role if id(node) in used else 'unused'} {print_spec(node.spec)}")
    count = 0
    for node in live:
        if node in merged or node.kind == "placeholder":
            continue
        node.name = f"n{count}"
        count += 1
        args, kwargs = tuple(lower(a) for a in node.args), {k: lower(v) for k, v in node.kwargs.items()}
        target = operator.getitem if node.kind == "item" else node.target
        made[id(node)] = _meta(add_node(graph, "call_function", target, args, kwargs, node.name), node)
        lines.append(_line(node, final))
    results = tuple(_output(o, final) for o in outputs.results)
    write_backs = tuple((number, final(n).name) for number, n in outputs.write_backs)
    graph.output(tuple(made[id(final(o.node))] for o in outputs.results if isinstance(o, FreshNode)))
    symbols = tuple(rec.facts.symbols[name] for name in sorted(_symbols(rec, live, outputs)))
    lines += [f"symbol {s.sym.name} {s.origin} {s.lo} {s.hi}" for s in symbols]
    names = {s.sym.name for s in symbols}
    assumed = tuple(c for c in (*rec.facts.guards, *rec.facts.late) if {e.name for e in walk(c) if isinstance(e, Sym)} <= names)
    hints = tuple((n, h) for n in sorted(names) if (h := rec.facts.hints.get(n)) is not None and type(h) is int)
    lines += [f"assumed {print_condition(c)}" for c in assumed]
    lines += [f"out {_print_output(o)}" for o in results]
    lines += [f"write in{number} = {name}" for number, name in write_backs]
    lines += [f"passing {number}" for number in passing]
    specs = tuple(
        spec if id(p) in used or not isinstance(spec, TensorSpec) else None
        for p, spec in zip(rec.placeholders, rec.input_specs, strict=True)
    )
    specs += tuple(n.spec for n in rec.const_nodes)
    text = "\n".join(lines)
    consts = tuple(rec.consts)
    return FunctionalGraph(graph, specs, results, write_backs, symbols, text, consts, roles, assumed, hints, _writes(rec), passing)


def _writes(rec: Recording) -> tuple[int, ...]:
    return tuple(t._version if isinstance(t, torch.Tensor) else 0 for t in getattr(rec, "inputs", ()))


def _write_numbers(node: Node, facts: SizeFacts) -> None:
    """Sizes that can be one number only are written as it: whoever lowers must see which dimensions the operators broadcast."""

    def fix(v: Any) -> Any:
        if isinstance(v, Expr):
            return facts.number(v)
        if isinstance(v, TensorSpec):
            return replace(v, shape=fix(v.shape), strides=fix(v.strides))
        return type(v)(map(fix, v)) if type(v) in (tuple, list) else v

    node.spec, node.args, node.kwargs = fix(node.spec), fix(node.args), {k: fix(v) for k, v in node.kwargs.items()}


def _meta(made: fx.Node, node: Node) -> fx.Node:
    made.meta["spec"] = node.spec
    made.meta["loc"] = node.loc
    return made


def _live(rec: Recording, outputs: Outputs) -> list[Node]:
    """Nodes that an output, a write-back or an effect needs, in program order; and those that tell a size which data tell."""
    needed = {id(n.node) for n in outputs.results if isinstance(n, FreshNode)} | {id(n) for _, n in outputs.write_backs}
    told = {name for name, row in rec.facts.symbols.items() if row.origin == ("bound",)}
    while True:
        kept: list[Node] = []
        for node in reversed(rec.nodes):
            if id(node) in needed or is_kept(node):
                kept.append(node)
                needed.update(id(a) for a in inputs_of(node))
        kept.reverse()
        missing = _symbols(rec, kept, outputs) & told if told else set()
        for node in kept if missing else ():
            missing -= _first_told(node)
        tells = {id(n) for name in missing for n in rec.nodes if name in _first_told(n)} if missing else set()
        first = next((id(n) for n in rec.nodes if id(n) in tells), None)
        if first is None:
            return kept
        needed.add(first)


def _first_told(node: Node) -> set[str]:
    """Symbols that the node's results have and that nothing it is given has."""
    given = [node.args, tuple(node.kwargs.values()), *(a.spec for a in inputs_of(node))]
    return _names(node.spec) - set().union(*map(_names, given))


def _returned(outputs: Outputs) -> set[int]:
    """Nodes whose memory is a result, or that make it among others: two equal results are still two tensors."""
    found: set[int] = set()
    for o in outputs.results:
        node: Node | None = o.node if isinstance(o, FreshNode) else None
        while node is not None:
            found.add(id(node))
            node = node.args[0] if node.kind == "item" else node.view_of
    return found


def _merge(live: list[Node], returned: set[int]) -> dict[Node, Node]:
    """Equal pure nodes -> the first of them."""
    seen: dict[Any, Node] = {}
    merged: dict[Node, Node] = {}

    def key(v: Any) -> Any:
        if isinstance(v, Node):
            return id(merged.get(v, v))
        if isinstance(v, (list, tuple)):
            return tuple(key(x) for x in v)
        return (type(v), v) if not isinstance(v, float) else (float, v.hex())

    for node in live:
        if node.effect or id(node) in returned or (isinstance(node.target, OpOverload) and info(node.target).is_random):
            continue
        try:
            k = (node.target, key(node.args), tuple((n, key(v)) for n, v in sorted(node.kwargs.items())), node.spec)
            first = seen.setdefault(k, node)
        except TypeError:  # an unhashable argument (a generator, say): not merged
            continue
        if first is not node:
            merged[node] = first
    return merged


def _output(o: FreshNode | InputNumber | ViewOf | Number, final: Any) -> Output:
    if isinstance(o, FreshNode):
        return FreshOutput(final(o.node).name)
    if isinstance(o, InputNumber):
        return InputOutput(o.index)
    return ViewOutput(o.of, o.spec, o.apart) if isinstance(o, ViewOf) else SizeOutput(o.value)


def _symbols(rec: Recording, live: list[Node], outputs: Outputs) -> set[str]:
    if not rec.facts.symbols:
        return set()
    shown = [o.spec if isinstance(o, ViewOf) else o.value for o in outputs.results if isinstance(o, (ViewOf, Number))]
    nodes = [(n.spec, n.args, tuple(n.kwargs.values())) for n in (*rec.placeholders, *live)]
    return {name for name in _names((nodes, shown)) if name in rec.facts.symbols}


def _names(value: Any) -> set[str]:
    """Names of the symbols in sizes, strides, offsets and numbers."""
    exprs: list[Expr] = []

    def look(v: Any) -> None:
        if isinstance(v, Expr):
            exprs.append(v)
        elif isinstance(v, TensorSpec):
            exprs.extend((*v.shape, *v.strides))
            look(v.offset)
        elif isinstance(v, (list, tuple)):
            for x in v:
                look(x)

    look(value)
    return {e.name for e in walk(*exprs) if isinstance(e, Sym)}


# ---------------------------------------------------------------- text


def print_spec(spec: Any) -> str:
    if isinstance(spec, TensorSpec):
        sizes = ",".join(print_condition(s) for s in spec.shape)
        strides = ",".join(print_condition(s) for s in spec.strides)
        offset = "" if spec.offset is None else f"+{print_condition(spec.offset)}"
        return f"{str(spec.dtype)[6:]}[{sizes}]({strides}){offset}@{spec.device}"
    if isinstance(spec, Expr):
        return f"{spec.dtype.name} {print_condition(spec)}"
    if isinstance(spec, (tuple, list)):
        return f"({', '.join(print_spec(s) for s in spec)})"
    return "none"


def _print_arg(v: Any, final: Any) -> str:
    if isinstance(v, Node):
        return final(v).name
    if isinstance(v, (list, tuple)):
        return f"[{', '.join(_print_arg(x, final) for x in v)}]"
    if isinstance(v, Expr):
        return print_condition(v)
    if isinstance(v, float):
        return v.hex()
    if isinstance(v, torch.Generator):
        return f"<generator {id(v)}>"  # never equal in another process, as it must be
    return repr(v)


def _line(node: Node, final: Any) -> str:
    args = [_print_arg(a, final) for a in node.args] + [f"{k}={_print_arg(v, final)}" for k, v in node.kwargs.items()]
    name = "getitem" if node.kind == "item" else str(node.target)
    return f"{node.name} = {name}({', '.join(args)}): {print_spec(node.spec)}"


def _print_output(o: Output) -> str:
    if isinstance(o, FreshOutput):
        return f"fresh {o.node}"
    if isinstance(o, InputOutput):
        return f"input {o.index}"
    if isinstance(o, ViewOutput):
        return f"{'part' if o.apart else 'view'} of {o.of} {print_spec(o.spec)}"
    return f"number {print_spec(o.value)}"
