"""Stages -> Kernels: layouts, grouping, then one Kernel per group.

In: a Program (after vertical fusion). Out: Scheduled. A group that a template recognises is made by its row in FORMS, others by
plain loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..ir.expr import Sym
from ..ir.kernel import Kernel, Scheduled
from ..ir.program import Buffer, Check, Cond, Element, Program, Repeat, Stage
from ..options import Options
from . import deps
from .fusion.group import Group, Grouper
from .fusion.repack import repack_constants
from .fusion.split import split_reductions
from .loops.single import group_kernel, stage_kernel
from .memory.layouts import choose_layouts
from .templates.attention import Attention
from .templates.attention_kernel import form_attention
from .templates.contraction import Contraction
from .templates.gated import Gated, form_gated
from .templates.products import Product, product_kernels
from .templates.table import recognised

__all__ = ["choose_layouts", "form_kernels", "stage_kernel"]

Decisions = Mapping[str, str]
NOTHING: Decisions = MappingProxyType({})
Ready = Callable[[Kernel], None]


def nobody(kernel: Kernel) -> None:
    """Nobody wants to know that a kernel is ready."""


@dataclass(frozen=True, slots=True)
class Forming:
    """What forming the kernels of one Program has at hand. Templates enter the buffers they make in `buffers`."""

    program: Program
    buffers: dict[str, Buffer]
    lasting: set[str]
    options: Options
    decided: Decisions


def _attention(stage: Stage, a: Attention, f: Forming) -> tuple[Kernel, ...]:
    return (form_attention(a, f.buffers, f.program.target),)


def _contraction(stage: Stage, c: Contraction, f: Forming) -> tuple[Kernel, ...]:
    return product_kernels(Product(stage, replace(c, target=f.program.target), f.buffers, f.lasting, f.options, f.decided))


def _gated(stage: Stage, g: Gated, f: Forming) -> tuple[Kernel, ...]:
    packing, packed, kernel = form_gated(replace(g, c=replace(g.c, target=f.program.target)), f.buffers)
    f.buffers[packed.name] = packed
    return stage_kernel(packing, f.buffers), kernel


# What schedule/templates/table.py recognises -> its kernels.
FORMS: dict[str, Callable[[Stage, Any, Forming], tuple[Kernel, ...]]] = {
    "attention": _attention, "contraction": _contraction, "gated": _gated,
}  # fmt: skip


def hoist(body: Sequence[object], sym: Sym, buffers: Mapping[str, Buffer]) -> tuple[list[Kernel], list[object]]:
    """Kernels of a Repeat's body that compute the same in every iteration (packing weights), and the rest of it."""
    kernels = [e for e in body if isinstance(e, Kernel) and all(buffers[b].role == "temp" for b in deps.writes(e))]
    defined = {sym, *(s for e in body for s in deps.defines(e))}
    while True:  # a kernel that stays keeps those that read what it writes
        others = [e for e in body if all(e is not k for k in kernels)]
        written = frozenset[str]().union(*(deps.writes(e) for e in others)) if others else frozenset()
        again = [k for k in kernels if defined.isdisjoint(k.syms) and not (deps.reads(k) | deps.writes(k)) & written]
        if len(again) == len(kernels):
            break
        kernels = again
    return kernels, others


Own = Callable[[], set[str]]  # the temporaries that only this group uses


def formed(
    program: Program, buffers: Mapping[str, Buffer], group: Callable[[Sequence[Element], bool], Sequence[Any]],
    kernels_of: Callable[[Group, Own, bool], Sequence[Kernel]], check: Callable[[Check], Check | Kernel] = lambda c: c,
) -> Scheduled:  # fmt: skip
    """The program with its stages grouped by `group` and each Group made kernels by `kernels_of`, in branches and loops too; `check` says
    what asks a Check's question."""
    keep = deps.pinned(program)

    def form(body: Sequence[Element], nested: bool) -> tuple[Element, ...]:
        items = group(body, nested)
        readers: dict[str, int] = {}
        for item in items:
            for b in item.reads if isinstance(item, Group) else deps.reads(item):
                readers[b] = readers.get(b, 0) + 1
        out: list[Element] = []
        for item in items:
            if isinstance(item, Group):

                def own(g: Group = item) -> set[str]:
                    return set() if nested else {b for b in g.writes if b not in keep and readers.get(b, 0) <= (b in g.reads)}

                out += kernels_of(item, own, nested)  # type: ignore[arg-type]
            elif isinstance(item, Cond):
                out.append(Cond(item.pred, form(item.then, True), form(item.orelse, True)))
            elif isinstance(item, Repeat):
                before, inner = hoist(form(item.body, True), item.sym, buffers)
                out += [*before, Repeat(item.sym, item.count, tuple(inner))]  # type: ignore[list-item, arg-type]
            else:
                out.append(check(item) if isinstance(item, Check) else item)  # type: ignore[arg-type]
        return tuple(out)

    body = form(program.body, False)
    used = keep.union(*(deps.reads(e) | deps.writes(e) for e in body)) if body else keep
    return Scheduled(replace(program, buffers={n: b for n, b in buffers.items() if n in used}), body)  # type: ignore[arg-type]


def form_kernels(program: Program, options: Options, decided: Decisions = NOTHING, ready: Ready = nobody) -> Scheduled:
    """Group stages into kernels. `decided`: for the keys of Choices that were measured, the candidate to take. `ready` may be told of
    kernels that will stay as they are, so that compiling them can begin; none of these does."""
    program = split_reductions(program)
    buffers = choose_layouts(program)
    program = repack_constants(program, buffers)
    forming = Forming(program, buffers, deps.lasting(program), options, decided)

    def kernels_of(group: Group, own: Own, nested: bool) -> Sequence[Kernel]:
        found = recognised(group.stages[0], nested) if group.closed else None
        if found is not None:
            return FORMS[found[0]](group.stages[0], found[1], forming)
        return (group_kernel(group, buffers, own()),)

    return formed(program, buffers, lambda body, nested: Grouper(buffers, options).grouped(tuple(body)), kernels_of)
