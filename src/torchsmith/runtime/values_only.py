"""Operators of other libraries that write to their arguments, as operators on values: copies are written to, and given back.

In: an OpOverload whose schema says that it writes. Out: another one in the namespace "torchsmith_values", whose results are those of the
first and then one per written argument; None where a schema cannot say so (lists and optional tensors that are written, results that are
views). Torch's own operators have forms of their own (graph/schema.py).
"""

from __future__ import annotations

import functools
import re
from functools import cache
from typing import Any

import torch
from torch._library import simple_registry
from torch._ops import OpOverload

NAMESPACE = "torchsmith_values"
TORCHS = frozenset({
    "aten", "prims", "prim", "quantized", "_quantized", "c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp", "symm_mem",
    "inductor", "onednn", "mkldnn", "mkl", "mkldnn_prepacked", "profiler", "rngprims", "streams", "debugprims", "sparse", "static_runtime",
    "_dtensor", "torchbind", "xnnpack", "prepacked", "cuda", "torch_attn", "higher_order",
})  # fmt: skip


def registered_fake(func: OpOverload) -> Any:
    """The function that `torch.library.register_fake` was given for an operator, or None."""
    holder = simple_registry.singleton.find(func._schema.name).fake_impl
    return None if holder.kernel is None else holder.kernel.func


_LIBRARIES: dict[str, torch.library.Library] = {}  # by the operator's name; each holds one


def library(name: str) -> torch.library.Library:
    """A new library for the operator of this name. One of that name before goes: its original was removed and registered anew."""
    before = _LIBRARIES.pop(name, None)
    if before is not None:
        before._destroy()
    return _LIBRARIES.setdefault(name, torch.library.Library(NAMESPACE, "FRAGMENT"))


def name_of(op: OpOverload) -> str:
    """A name that `made_again` reads: how long the namespace and the name are, and all three parts."""
    namespace, name = op._schema.name.split("::")
    return f"n{len(namespace)}_{len(name)}_{namespace}_{name}_{op._overloadname}"


def made_again(name: str) -> OpOverload:
    """The operator of this name where it was not traced in this process. Raises AttributeError where torch does not know its original."""
    long, longer, rest = name.removeprefix("n").split("_", 2)
    namespace, rest = rest[: int(long)], rest[int(long) + 1 :]
    found = values_only(getattr(getattr(getattr(torch.ops, namespace), rest[: int(longer)]), rest[int(longer) + 1 :]))
    if found is None:
        raise AttributeError(name)
    return found


@cache
def values_only(op: OpOverload) -> OpOverload | None:
    schema = op._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    fresh = [r for r in schema.returns if r.alias_info is None]
    if op.namespace in TORCHS or any(str(a.type) != "Tensor" for a in written) or schema.returns[: len(fresh)] != fresh:
        return None
    text = re.sub(r"Tensor\([^)]*\)", "Tensor", str(schema))  # without the marks of what is written
    arguments, results = text.split("(", 1)[1].rsplit(") -> ", 1)
    kinds = [k for k in results.strip("()").split(", ") if k][: len(fresh)] + ["Tensor"] * len(written)
    name = name_of(op)
    home = library(name)
    home.define(f"{name}({arguments}) -> ({', '.join(kinds)})", tags=tuple(op.tags))
    names = [a.name for a in schema.arguments]
    places = [names.index(a.name) for a in written]

    keyword = next((i for i, a in enumerate(schema.arguments) if a.kwarg_only), len(names))

    def run(copy: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs.get(a.name, a.default_value) for a in schema.arguments[len(args) :])]
        for i in places:
            given[i] = copy(given[i])
        made = call(*given[:keyword], **dict(zip(names[keyword:], given[keyword:], strict=True)))
        made = made if isinstance(made, (tuple, list)) else () if made is None else (made,)
        found = (*made[: len(fresh)], *(given[i] for i in places))
        return found[0] if len(found) == 1 else found

    home.impl(name, functools.partial(run, _copy, op), "CompositeExplicitAutograd")
    fake = registered_fake(op) if fresh else _nothing
    if fake is not None:
        torch.library.register_fake(f"{NAMESPACE}::{name}", functools.partial(run, _alike, fake), lib=home)
    return getattr(getattr(torch.ops, NAMESPACE), name).default  # type: ignore[no-any-return]


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _copy(t: torch.Tensor) -> torch.Tensor:
    return _alike(t).copy_(t)


def _alike(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
