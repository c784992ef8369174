"""Values behind tensors while a graph is made functional: who owns which memory, through which views, and what it holds now.

A Root is one piece of memory; its `node` is the functional value that the memory holds at this point of the program. A Value is
what one tensor object stands for: a Root and the chain of view steps from it. Reading a Value replays its steps on the root's
present node; writing one undoes the steps, so that the root and every other view see the write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from ..codes import Unsupported
from ..ir.nested import leaves
from ..ir.rows import rows
from .layout import Size, same
from .spec import TensorSpec

aten = torch.ops.aten


@dataclass(eq=False, slots=True)
class Node:
    """One line of the functional graph before it is named. args hold Nodes, numbers, Exprs and plain data.

    kind: "placeholder" | "call" | "item" (args = (node, index)); effect: kept even when unused, and run once; raises: kept
    as well, since some operands make it raise.
    """

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Any  # TensorSpec | tuple | Expr | None
    loc: str = ""
    effect: bool = False
    raises: bool = False
    view_of: Node | None = None  # the node whose memory eager would show through this one
    name: str = ""
    region: Any = None  # the checkpointed part of the program (Region) in which it stands
    again: bool | None = None  # what that says: compute it again, or keep it


def is_kept(node: Node) -> bool:
    """Does it stay although nobody reads its value?"""
    return node.raises or (node.effect and node.target is not aten.clone.default)


def inputs_of(node: Node) -> list[Node]:
    """Nodes among the arguments, one as often as it stands there."""
    return [x for x in leaves(node.args, node.kwargs) if isinstance(x, Node)]


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One view operator: `op(base, *args, **kwargs)` takes a tensor like `before` to one like `after`."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: TensorSpec
    after: TensorSpec
    loc: str


@dataclass(eq=False, slots=True)
class Root:
    """A piece of memory. `input`: the placeholder number it belongs to, if any; `tensor` keeps the tracing storage alive."""

    node: Node
    spec: TensorSpec
    tensor: torch.Tensor
    input: int | None = None
    written: bool = False
    seen: dict[tuple[Step, ...], Node] = field(default_factory=dict)  # views of the present node
    twins: list[Twins] = field(default_factory=list)  # pieces of memory that for some sizes are this one


@dataclass(eq=False, slots=True)
class Twins:
    """A piece of memory and a copy of it that for some sizes is none. `is_view`: is it none for those at hand? The answer is assumed."""

    roots: tuple[Root, Root]
    is_view: Callable[[], bool]
    loc: str

    def part(self) -> None:
        """From now on they are two, or Unsupported is raised."""
        for root in self.roots:
            root.twins.remove(self)
        if self.is_view():
            raise Unsupported("GRA006", at=self.loc, detail="a copy that is none for these sizes")


def part_twins(seen: list[Root]) -> None:
    """Pieces of memory that the program sees and writes for itself are different ones for all sizes that are admitted."""
    for root in dict.fromkeys(seen):
        for twins in list(root.twins):
            one, other = twins.roots
            met, open_ = {id(root)}, [other if one is root else one]
            while open_:
                found = open_.pop()
                if id(found) not in met:
                    met.add(id(found))
                    open_ += [r for t in found.twins for r in t.roots]
            if any(r is not root and id(r) in met for r in seen):
                twins.part()


@dataclass(eq=False, slots=True)
class Value:
    """`overlaps`: some place of the memory has two indices in the root's tensor or in a view on the way."""

    root: Root
    steps: tuple[Step, ...] = ()
    overlaps: bool = False


Emit = Callable[..., Node]  # emit(op, args, kwargs, spec, loc) -> Node


def read(emit: Emit, root: Root, steps: tuple[Step, ...]) -> Node:
    """The node that holds what a view shows now."""
    if not steps:
        return root.node
    found = root.seen.get(steps)
    if found is None:
        base = read(emit, root, steps[:-1])
        step = steps[-1]
        found = emit(step.op, (base, *step.args), step.kwargs, step.after, step.loc)
        found.view_of = base
        root.seen[steps] = found
    return found


def write(emit: Emit, value: Value, node: Node, loc: str) -> None:
    """Let the memory under a view hold `node`; every view of that memory changes with it."""
    root, steps = value.root, value.steps
    if value.overlaps:  # one element of the functional value is not all that the write changes
        raise Unsupported("GRA006", at=loc, detail="a write to a tensor whose elements share memory")
    for k in range(len(steps) - 1, -1, -1):
        step = steps[k]
        undo = INVERSES.get(step.op)
        if undo is None:
            raise Unsupported("GRA006", at=loc, detail=f"a write through {step.op}")
        node = undo(emit, step, partial(read, emit, root, steps[:k]), node, loc)
    if node.spec != root.spec:  # the memory keeps its layout whatever layout the new value was computed in
        node = emit(aten.clone.default, (node,), {}, root.spec, loc)
    root.node = node
    root.written = True
    root.seen = {}


# ---------------------------------------------------------------- undoing a view

Undo = Callable[[Emit, Step, Callable[[], Node], Node, str], Node]
INVERSES: dict[OpOverload, Undo] = {}


inverse = rows(INVERSES, "inverse")


@inverse(aten.transpose.int, aten.t.default)
def undo_transpose(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    return emit(step.op, (new, *step.args), {}, step.before, loc)


@inverse(aten.permute.default)
def undo_permute(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    n = len(step.before.shape)
    back = [0] * n
    for i, d in enumerate(step.args[0]):
        back[d % n] = i
    return emit(aten.permute.default, (new, back), {}, step.before, loc)


@inverse(aten.view.default, aten._reshape_alias.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)
def undo_view(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    return emit(aten.view.default, (new, list(step.before.shape)), {}, step.before, loc)


@inverse(aten.expand.default)
def undo_expand(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    if step.before.shape != step.after.shape:
        raise Unsupported("GRA006", at=loc, detail="a write through an expanded tensor")
    return new


@inverse(aten.slice.Tensor)
def undo_slice(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    return emit(aten.slice_scatter.default, (base(), new, *step.args), step.kwargs, step.before, loc)


@inverse(aten.select.int)
def undo_select(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    return emit(aten.select_scatter.default, (base(), new, *step.args), step.kwargs, step.before, loc)


@inverse(aten.diagonal.default)
def undo_diagonal(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    return emit(aten.diagonal_scatter.default, (base(), new, *step.args), step.kwargs, step.before, loc)


@inverse(aten.as_strided.default)
def undo_as_strided(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    return emit(aten.as_strided_scatter.default, (base(), new, *step.args), step.kwargs, step.before, loc)


@inverse(aten.unfold.default)
def undo_unfold(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    args = (base(), new, list(step.after.shape), list(step.after.strides), None)
    return emit(aten.as_strided_scatter.default, args, {}, step.before, loc)


@inverse(aten.view.dtype)
def undo_view_dtype(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    if step.before.dtype is torch.bool:
        raise Unsupported("GRA006", at=loc, detail="a write to the bytes of bools")
    return emit(aten.view.dtype, (new, step.before.dtype), {}, step.before, loc)


@inverse(aten.view_as_real.default)
def undo_view_as_real(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    return emit(aten.view_as_complex.default, (new,), {}, step.before, loc)


@inverse(aten.view_as_complex.default)
def undo_view_as_complex(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    return emit(aten.view_as_real.default, (new,), {}, step.before, loc)


@inverse(aten._conj.default, aten._neg_view.default)
def undo_sign(emit: Emit, step: Step, base: Callable[[], Node], new: Node, loc: str) -> Node:
    return emit(step.op, (new,), {}, step.before, loc)


# ---------------------------------------------------------------- who shares memory


def same_layout(shape: tuple[Size, ...], a: tuple[Size, ...], b: tuple[Size, ...]) -> bool:
    """Do strides differ only where the size is 1?"""
    return all((type(n) is int and n == 1) or same(x, y) for n, x, y in zip(shape, a, b, strict=True))
