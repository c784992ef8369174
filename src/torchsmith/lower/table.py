"""LOWERINGS: which function lowers which ATen overload. In: overload names at import; out: the table that core.py reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ir.rows import rows

Rule = Callable[..., Any]

# OpOverload -> rule(cx, *arguments in schema order, defaults filled in) -> Ref | tuple of Refs and None
LOWERINGS: dict[Any, Rule] = {}
# The same for complex operands or results, as Pairs (complex.py).
PAIR_LOWERINGS: dict[Any, Rule] = {}


def overload(name: str) -> Any:
    """The OpOverload called "aten.add.Tensor"; None where this torch has no such overload."""
    namespace, packet, variant = name.split(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return None if found is None else getattr(found, variant, None)


# Overloads that some supported torch lacks; every other unknown name is an error.
OPTIONAL = frozenset({"aten._fused_rms_norm.default", "aten._assert_tensor_metadata.default", "aten.expand_copy.default"})


# Rules of other libraries' operators, by name: the operator is made when its library is imported.
NAMED: dict[str, Rule] = {}


def rule_of(op: Any) -> Rule | None:
    """The rule of an OpOverload, if it has one."""
    found = LOWERINGS.get(op)
    return found if found is not None or op.namespace == "aten" else NAMED.get(str(op))


# Views that mean the same memory whatever the elements are.
PLAIN_VIEWS = frozenset(
    overload(f"aten.{name}")
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "permute.default", "transpose.int", "t.default", "expand.default",
        "slice.Tensor", "select.int", "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "diagonal.default",
        "unfold.default", "as_strided.default", "alias.default", "detach.default", "_reshape_alias.default",
    )
)  # fmt: skip


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Enter the decorated rule for these overloads; a duplicate or an unknown name is an error."""
    return _enter(LOWERINGS, names)


def lowers_pairs(*names: str) -> Callable[[Rule], Rule]:
    """The same for the rules of complex operands and results."""
    return _enter(PAIR_LOWERINGS, names)


def _enter(table: dict[Any, Rule], names: tuple[str, ...]) -> Callable[[Rule], Rule]:

    def add(rule: Rule) -> Rule:
        for name in names:
            op = overload(name)
            if op is None:
                if name in OPTIONAL:
                    continue
                raise ValueError(f"no operator {name}")
            if op in table:
                raise ValueError(f"{name} has two lowerings")
            table[op] = rule
        return rule

    return add


lowers_foreign = rows(NAMED, "lowering")  # by name: "transformers.grouped_mm_fallback.default"
