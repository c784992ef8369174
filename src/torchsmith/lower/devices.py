"""Which machine a graph runs on: the devices of its tensors, met with the table of those that torchsmith compiles for.

In: FunctionalGraph, Options. Out: Target and torch's name of the device, or Unsupported("LOW005").

A graph runs on one device. Tensors of no dimension in the host's memory may stand beside inputs on a GPU, as in eager: they are symbols.
What is made on the host in the middle of a graph on a GPU is made on the GPU: only inputs and results have a place that others see. Drawn
numbers come from the host's generator all the same (lower/extern.py); other inputs and results there are taken out (graph/host_part.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..codes import Unsupported
from ..graph.spec import FreshOutput, FunctionalGraph, TensorSpec
from ..ir.target import LEAST_ARCH, Target, cuda
from ..options import Options
from ..runtime import toolchain


def _cuda(options: Options) -> Target:
    if 0 < options.cuda_arch < LEAST_ARCH:
        raise Unsupported("LOW005", detail=f"a GPU older than compute capability {LEAST_ARCH / 10:.1f}")
    return cuda(options.cuda_arch) if options.cuda_arch else cuda()


TARGETS: dict[str, Callable[[Options], Target]] = {"cpu": toolchain.target_of, "cuda": _cuda}


def _places(fg: FunctionalGraph) -> Iterator[tuple[str, str, TensorSpec | None]]:
    """(device, user's line, spec of an input or None) of every tensor in the graph and every device that an operator names."""
    numbers = iter(zip(fg.inputs, fg.roles, strict=True))
    for node in fg.graph.nodes:
        loc, spec = node.meta.get("loc") or "", node.meta.get("spec")
        if node.op == "placeholder":
            given, role = next(numbers)
            if isinstance(given, TensorSpec):
                yield given.device, loc, given if role != "const" else None  # data of the program goes to where the graph runs
            continue
        yield from ((s.device, loc, None) for s in (spec if isinstance(spec, (tuple, list)) else (spec,)) if isinstance(s, TensorSpec))
        named = (v for v in (*node.args, *node.kwargs.values()) if isinstance(v, torch.device))
        yield from ((str(d), loc, None) for d in named)


def _results(fg: FunctionalGraph) -> set[str]:
    """Devices of tensors that are made and given away."""
    by_name = {n.name: n for n in fg.graph.nodes}
    specs = (by_name[out.node].meta.get("spec") for out in fg.outputs if isinstance(out, FreshOutput))
    return {s.device for s in specs if isinstance(s, TensorSpec)}


def is_scalar(spec: TensorSpec, device: str) -> bool:
    """Is this an input in the host's memory that a graph on `device` takes as a symbol?"""
    return device != "cpu" and spec.device == "cpu" and not spec.shape


def scalars_written(fg: FunctionalGraph, device: str) -> tuple[int, ...]:
    """Inputs that lie in the host's memory beside a graph on `device` and take a new value: results behind the others, in this order."""
    return tuple(n for n, _ in fg.write_backs if isinstance(s := fg.inputs[n], TensorSpec) and is_scalar(s, device))


def target_of(fg: FunctionalGraph, options: Options) -> tuple[Target, str]:
    """The target and the device ("cpu", "cuda:0"). Raises Unsupported("LOW005")."""
    places = list(_places(fg))
    found = {s.device for _, _, s in places if s is not None and (s.shape or s.device != "cpu")}  # 0-d ones on the host: see is_scalar
    found = found | _results(fg) or {"cpu"}
    device = min(found)
    make = TARGETS.get(device.partition(":")[0])
    elsewhere = [(d, loc) for d, loc, _ in places if make is None or d not in (device, "cpu")]
    if len(found) > 1 or elsewhere or make is None:
        at = next((loc for d, loc in elsewhere if loc), "") or next((loc for d, loc, _ in places if loc and d != device), "")
        raise Unsupported("LOW005", at=at, detail=", ".join(sorted(found | {d for d, _ in elsewhere})))
    return make(options), device
