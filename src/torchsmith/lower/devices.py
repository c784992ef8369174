"""Which machine a graph runs on: the devices of its tensors, met with the table of those that torchsmith compiles for.

In: FunctionalGraph, Options. Out: Target and torch's name of the device, or Unsupported("LOW005").

A graph runs on one device. Tensors of no dimension in the host's memory may stand beside inputs on a GPU, as in eager: they are symbols.
What is made on the host in the middle of a graph on a GPU is made on the GPU: only inputs and results have a place that others see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..codes import Unsupported
from ..graph.spec import FreshOutput, FunctionalGraph, TensorSpec
from ..ir.target import CPU, LEAST_ARCH, Target, cuda
from ..options import Options


def _cuda(options: Options) -> Target:
    if 0 < options.cuda_arch < LEAST_ARCH:
        raise Unsupported("LOW005", detail=f"a GPU older than compute capability {LEAST_ARCH / 10:.1f}")
    return cuda(options.cuda_arch) if options.cuda_arch else cuda()


TARGETS: dict[str, Callable[[Options], Target]] = {"cpu": lambda options: CPU, "cuda": _cuda}


def _results(fg: FunctionalGraph) -> Iterator[tuple[str, str]]:
    """(device, user's line) of every tensor that is made and given away."""
    by_name = {n.name: n for n in fg.graph.nodes}
    for out in fg.outputs:
        node = by_name[out.node] if isinstance(out, FreshOutput) else None
        spec = node.meta.get("spec") if node is not None else None
        if node is not None and isinstance(spec, TensorSpec):
            yield spec.device, node.meta.get("loc", "")


def is_scalar(spec: TensorSpec, device: str) -> bool:
    """Is this an input in the host's memory that a graph on `device` takes as a symbol?"""
    return device != "cpu" and spec.device == "cpu" and not spec.shape


def target_of(fg: FunctionalGraph, options: Options) -> tuple[Target, str]:
    """The target and the device ("cpu", "cuda:0"). Raises Unsupported("LOW005")."""
    placed = [(s, "") for s in fg.inputs if isinstance(s, TensorSpec)]
    found = {s.device for s, _ in placed if s.shape} | {d for d, _ in _results(fg)}
    found |= {s.device for s, _ in placed if s.device != "cpu"}  # 0-d inputs on the host are symbols beside a GPU
    found = found or {"cpu"}
    device = min(found)
    make = TARGETS.get(device.partition(":")[0])
    if len(found) > 1 or make is None:
        at = next((loc for d, loc in _results(fg) if d != device or make is None), "")
        raise Unsupported("LOW005", at=at, detail=", ".join(sorted(found)))
    written = {number for number, _ in fg.write_backs}
    if any(is_scalar(s, device) for i, s in enumerate(fg.inputs) if i in written and isinstance(s, TensorSpec)):
        raise Unsupported("LOW005", detail=f"a write into a tensor on cpu beside tensors on {device}")
    return make(options), device
