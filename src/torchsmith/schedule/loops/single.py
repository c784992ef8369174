"""One group of Stages -> one Kernel without a template: plain loops.

In: a Group, or a Stage that is one. Out: a Kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.kernel import Kernel
from ...ir.program import Buffer, Stage
from ...options import Options
from ..fusion.fuse import simple_axes
from ..fusion.group import Group, Grouper
from .build import build
from .special import build_special


def stage_kernel(stage: Stage, buffers: Mapping[str, Buffer]) -> Kernel:
    """One stage, one kernel."""
    return group_kernel(Grouper(buffers, Options()).single(stage), buffers, set())


def group_kernel(group: Group, buffers: Mapping[str, Buffer], own: set[str]) -> Kernel:
    """One group, one kernel."""
    name = "_".join(dict.fromkeys(w for s in group.stages for w in (s.origin or "stage").split(",")))[:80]
    return build_special(group, buffers, name) if group.closed else build(group, buffers, own, name)


def plain_kernel(stage: Stage, buffers: Mapping[str, Buffer]) -> Kernel:
    """The loops as they stand, without a template."""
    group = Grouper(buffers, Options()).single(stage)
    if simple_axes(stage, stage.stores[0]) is None:
        return build_special(group, buffers, stage.origin)
    return build(replace(group, closed=False), buffers, set(), stage.origin)
