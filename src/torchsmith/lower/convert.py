"""Type conversion. In: a Ref and a dtype; out: one casting stage, or the Ref itself where nothing changes."""

from __future__ import annotations

from typing import Any

from .core import Builder
from .numerics import cast
from .ref import Ref
from .table import lowers
from .views import lower_clone


def convert_ref(cx: Builder, x: Ref) -> Ref:
    """The value in the node's dtype and strides."""
    d = cx.dtype
    if x.dtype is d:
        return lower_clone(cx, x)
    return cx.stage(lambda i: cast(x.load(i), d))


@lowers(
    "aten._to_copy.default",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.device",
    "aten.to.other",
    "aten.type_as.default",
    "aten._autocast_to_reduced_precision.default",
    "aten._autocast_to_full_precision.default",
)
def lower_to(cx: Builder, x: Ref, *_: Any) -> Ref:
    return convert_ref(cx, x)
