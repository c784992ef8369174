"""What eager would return and leave behind: outputs as fresh tensors, inputs, views of either; and the values inputs end with.

In: a finished Recording and the captured graph's flat outputs. Out: Outputs, whose nodes are the roots of what must be computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..codes import Unsupported
from ..ir.expr import Const, Expr, const
from .layout import hint_of, is_dense, is_lazy
from .sizes import SymTypes, expr_of
from .spec import TensorSpec
from .tracing import spec_of
from .values import Node, read

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
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Number:
    value: Expr


@dataclass(frozen=True, slots=True)
class Outputs:
    results: tuple[FreshNode | InputNumber | ViewOf | Number, ...]
    write_backs: tuple[tuple[int, Node], ...]
    homes: tuple[torch.Tensor, ...] = ()  # the last of the results, behind those that were asked for


def _groups(rec: Recording, outs: list[Any]) -> dict[int, list[int]]:
    """The numbers of results that share a fresh piece of memory."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, out in enumerate(outs):
        if isinstance(out, torch.Tensor) and (root := rec.value_of(out).root).input is None:
            groups[id(root)].append(i)
    return groups


def describe_outputs(rec: Recording, outs: list[Any], homes: bool = False, lone: bool = False) -> Outputs:
    """homes: memory that several of `outs` show parts of, and none of them shows whole, becomes a result too, of which those are views.
    Without, parts that do not overlap become tensors with memory of their own. lone: so does memory that one of them shows a part of: the
    program goes on, and may reach the rest of it (as_strided, set_)."""
    asked, outs = len(outs), list(outs)
    results: list[Any] = [None] * len(outs)
    groups = _groups(rec, outs)
    for i, out in enumerate(outs):
        if isinstance(out, torch.Tensor):
            number = rec.value_of(out).root.input
            if number is not None:
                results[i] = _of_input(rec, out, number)
        elif isinstance(out, (*SymTypes, int, float)):
            results[i] = Number(expr_of(out))
        else:
            raise Unsupported("GRA006", at=rec.facts.loc, detail=f"a result of type {type(out).__name__}")
    taken: set[Node] = set()
    for members in groups.values():
        _of_memory(rec, outs, members, results, taken, homes, lone)
    return Outputs(tuple(results), _write_backs(rec), tuple(outs[asked:]))


def _of_input(rec: Recording, out: torch.Tensor, number: int) -> InputNumber | ViewOf:
    given = rec.inputs[number]
    if out is given:
        return InputNumber(number)
    _refuse_lazy(rec, out)
    return ViewOf(number, replace(spec_of(out), offset=_away(out, given)))


def _away(out: torch.Tensor, base: torch.Tensor) -> Expr:
    """How many of its elements a view begins behind the first of `base`."""
    start = base.storage_offset()
    if out.element_size() != base.element_size():
        start = start * base.element_size() // out.element_size()
    return expr_of(out.storage_offset() - start)


def _of_memory(
    rec: Recording, outs: list[Any], members: list[int], results: list[Any], taken: set[Node], homes: bool, lone: bool
) -> None:
    """Results that share one fresh piece of memory: the one that contains the others is fresh, they are views of it."""
    parts, leader, apart = list({id(outs[i]): outs[i] for i in members}.values()), _leader(rec, outs, members), False
    memory = rec.value_of(parts[0]).root.tensor
    if (len(parts) > 1 or (lone and not _shows_all(parts[0], memory))) and (leader is None or not _is_whole(rec, outs[leader])):
        apart = not _overlap(rec, parts)
        # parts that autograd knows are roots of its graph, each for itself: a write to one is nothing to the others
        if homes and is_dense(memory) and (apart or not any(t.requires_grad for t in parts)):
            leader, members = len(outs), [*members, len(outs)]
            outs.append(memory.detach())
            results.append(None)
        elif leader is None and not apart:
            raise Unsupported("GRA007", at=rec.facts.loc)
        else:
            apart = False
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
            results[i] = ViewOf(("out", leader), replace(spec_of(out), offset=_away(out, outs[leader])), apart)


def _refuse_lazy(rec: Recording, out: torch.Tensor) -> None:
    """A view whose elements are to be conjugated or negated when read is no plain view of memory."""
    if is_lazy(out):
        raise Unsupported("GRA006", at=rec.facts.loc, detail="a conjugate view as a result")


def _shows_all(out: torch.Tensor, memory: torch.Tensor) -> bool:
    """Does it hold all elements of its memory, in whatever order?"""
    return is_dense(out) and _reach(out) == _reach(memory)


def _is_whole(rec: Recording, out: torch.Tensor) -> bool:
    """Is this the memory itself and no part of it?"""
    return not rec.value_of(out).steps and is_dense(out)


def _leader(rec: Recording, outs: list[Any], members: list[int]) -> int | None:
    """The result that shows all that the others show, for all sizes that are admitted."""
    whole = [i for i in members if _is_whole(rec, outs[i])]
    if whole:
        return next((i for i in whole if rec.value_of(outs[i]).root.tensor is outs[i]), whole[0])  # what is no view in eager
    reach = {i: _reach(outs[i]) for i in members}
    at_most = rec.facts.at_most
    for i in members:
        low, high = reach[i]
        if is_dense(outs[i]) and all(j == i or (at_most(low, reach[j][0]) and at_most(reach[j][1], high)) for j in members):
            return i
    return None


def _reach(t: torch.Tensor) -> tuple[Expr, Expr]:
    """First and one-past-last byte of its storage that a tensor can reach."""
    size = t.element_size()
    last: Any = t.storage_offset()
    if not any(type(n) is int and n == 0 for n in t.shape):
        last = last + 1
        for n, s in zip(t.shape, t.stride(), strict=True):
            last = last + (n - 1) * s
    return expr_of(t.storage_offset() * size), expr_of(last * size)


def _overlap(rec: Recording, tensors: list[torch.Tensor]) -> bool:
    """May two of these tensors of one memory share an element, at any of the sizes that are admitted?"""
    distinct = list({id(t): t for t in tensors}.values())
    return any(not _is_apart(rec, a, b) for k, a in enumerate(distinct) for b in distinct[:k])


def _is_apart(rec: Recording, a: torch.Tensor, b: torch.Tensor) -> bool:
    (low, high), (other_low, other_high) = _reach(a), _reach(b)
    at_most = rec.facts.at_most
    if any(type(n) is int and n == 0 for n in (*a.shape, *b.shape)):
        return True
    if at_most(high, other_low) or at_most(other_high, low) or _takes_apart(rec, a, b):
        return True
    reaches = (low, high, other_low, other_high)
    if a.dtype != b.dtype or not all(isinstance(e, Const) and e.value <= 1 << 23 for e in reaches):
        return False
    return not _elements(a) & _elements(b)


def _takes_apart(rec: Recording, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do both begin with the same views, and go on with different parts of one dimension?"""
    first, second = rec.value_of(a), rec.value_of(b)
    pairs = zip(first.steps, second.steps, strict=False)
    ways = next(((x, y) for x, y in pairs if (x.op, x.args, x.kwargs) != (y.op, y.args, y.kwargs)), None)
    if ways is None or first.overlaps or second.overlaps or any(len(w.args) < 2 or w.op not in _PARTS for w in ways):
        return False
    if ways[0].args[0] != ways[1].args[0]:
        return False
    (low, high), (other_low, other_high) = (_PARTS[w.op](*map(_index, w.args)) for w in ways)
    return rec.facts.at_most(high, other_low) or rec.facts.at_most(other_high, low)


def _index(v: Any) -> Expr:
    return v if isinstance(v, Expr) else const(v)


_PARTS: dict[Any, Callable[..., tuple[Expr, Expr]]] = {  # views as functionalise spells them -> first and one-past-last index they take
    aten.slice.Tensor: lambda dim, start, end, step: (start, end),
    aten.select.int: lambda dim, index: (index, index + 1),
}


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


__all__ = ["FreshNode", "InputNumber", "Number", "Outputs", "ViewOf", "describe_outputs"]
