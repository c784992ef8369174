"""What eager would return and leave behind: outputs as fresh tensors, inputs, views of either; and the values inputs end with.

In: a finished Recording and the captured graph's flat outputs. Out: Outputs, whose nodes are the roots of what must be computed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..codes import Unsupported
from ..ir.expr import Expr, const
from ..ir.number import number_of
from .layout import SymTypes, hint_of, is_dense
from .sizes import expr_of
from .spec import TensorSpec
from .tracing import spec_of
from .values import Node, extent, read

if TYPE_CHECKING:
    from .functionalise import Recording

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class FreshNode:
    node: Node


@dataclass(frozen=True, slots=True)
class InputNumber:
    index: int


@dataclass(frozen=True, slots=True)
class ViewOf:
    of: int | tuple[str, int]
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Number:
    value: Expr


@dataclass(frozen=True, slots=True)
class Outputs:
    results: tuple[FreshNode | InputNumber | ViewOf | Number, ...]
    write_backs: tuple[tuple[int, Node], ...]


def describe_outputs(rec: Recording, outs: list[Any]) -> Outputs:
    results: list[Any] = [None] * len(outs)
    groups: dict[int, list[int]] = defaultdict(list)
    for i, out in enumerate(outs):
        if isinstance(out, torch.Tensor):
            root = rec.value_of(out).root
            if root.input is not None:
                results[i] = _of_input(rec, out, root.input)
            else:
                groups[id(root)].append(i)
        elif isinstance(out, (*SymTypes, int, float)):
            results[i] = Number(expr_of(out))
        else:
            raise Unsupported("GRA006", at=rec.facts.loc, detail=f"a result of type {type(out).__name__}")
    taken: set[Node] = set()
    for members in groups.values():
        _of_memory(rec, outs, members, results, taken)
    return Outputs(tuple(results), _write_backs(rec))


def _of_input(rec: Recording, out: torch.Tensor, number: int) -> InputNumber | ViewOf:
    given = rec.inputs[number]
    if out is given:
        return InputNumber(number)
    _refuse_lazy(rec, out)
    return ViewOf(number, replace(spec_of(out), offset=expr_of(out.storage_offset() - given.storage_offset())))


def _of_memory(rec: Recording, outs: list[Any], members: list[int], results: list[Any], taken: set[Node]) -> None:
    """Results that share one fresh piece of memory: the one that contains the others is fresh, they are views of it."""

    def hint(e: Expr) -> int:
        v = number_of(e, rec.facts.hints)
        return 1 << 20 if v is None else v

    def offset(i: int) -> int:
        return hint(expr_of(outs[i].storage_offset()))

    spans = {i: extent(spec_of(outs[i]), offset(i), hint) for i in members}
    leader = next((i for i in members if is_dense(outs[i]) and all(_contains(spans[i], spans[j]) for j in members)), None)
    if leader is None and len({id(outs[i]) for i in members}) > 1 and _overlap(outs, members, spans):
        raise Unsupported("GRA007", at=rec.facts.loc)
    first: dict[int, int] = {}  # tensor object -> the output that already returned it
    for i in members if leader is None else [leader, *(j for j in members if j != leader)]:
        out = outs[i]
        same = first.setdefault(id(out), i)
        if same != i:
            results[i] = results[same]
        elif leader is None or i == leader:
            results[i] = FreshNode(_fresh(rec, out, taken))
        else:
            _refuse_lazy(rec, out)
            away = out.storage_offset() - outs[leader].storage_offset()
            results[i] = ViewOf(("out", leader), replace(spec_of(out), offset=expr_of(away)))


def _refuse_lazy(rec: Recording, out: torch.Tensor) -> None:
    """A view whose elements are to be conjugated or negated when read is no plain view of memory."""
    for step in rec.value_of(out).steps:
        if step.op in (aten._conj.default, aten._neg_view.default):
            raise Unsupported("GRA006", at=step.loc, detail="a conjugate view as a result")


def _contains(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] <= b[0] and b[1] <= a[1]


def _overlap(outs: list[Any], members: list[int], spans: dict[int, tuple[int, int]]) -> bool:
    """Do two of these tensors share an element? Exact up to a million elements (varying sizes at their hints), else by their spans."""
    for k, i in enumerate(members):
        for j in members[:k]:
            a, b = spans[i], spans[j]
            if outs[i] is outs[j] or a[1] <= b[0] or b[1] <= a[0]:
                continue
            if max(a[1], b[1]) > 1 << 20 or _elements(outs[i]) & _elements(outs[j]):
                return True
    return False


def _elements(t: torch.Tensor) -> set[int]:
    """Storage positions of a tensor's elements."""
    at = {hint_of(t.storage_offset())}
    for n, s in zip(t.shape, t.stride(), strict=True):
        step = hint_of(s)
        at = {p + k * step for p in at for k in range(hint_of(n))}
    return at


def _owner(node: Node) -> Node:
    while node.view_of is not None:
        node = node.view_of
    return node


def _fresh(rec: Recording, out: torch.Tensor, taken: set[Node]) -> Node:
    """A node whose memory nothing else returned shows, with eager's strides; a copy where there is none."""
    value = rec.value_of(out)
    node, spec = read(rec.emit, value.root, value.steps), spec_of(out)
    owner = _owner(node)
    if owner.kind == "placeholder" or owner in taken or node.spec != spec:
        node = owner = rec.emit(aten.clone.default, (node,), {}, spec, node.loc)
        node.effect = True  # a copy in its own right: never merged with another
    taken.add(owner)
    return node


def _write_backs(rec: Recording) -> tuple[tuple[int, Node], ...]:
    """What written inputs hold in the end; a value that is (a view of) an input is copied first, for that input may be written too."""
    found = []
    for number, t in enumerate(rec.inputs):
        if not isinstance(t, torch.Tensor):
            continue
        root = rec.value_of(t).root
        if spec_of(t) != root.spec or rec.value_of(t).steps:
            raise Unsupported("GRA006", detail="an input's own sizes or strides are changed")
        if root.node is rec.placeholders[number]:
            continue
        node = root.node
        if _owner(node).kind == "placeholder":
            node = rec.emit(aten.clone.default, (node,), {}, root.spec, node.loc)
            node.effect = True
        found.append((number, node))
    return tuple(found)


__all__ = ["FreshNode", "InputNumber", "Number", "Outputs", "ViewOf", "const", "describe_outputs"]
