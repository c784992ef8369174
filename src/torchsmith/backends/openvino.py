"""openvino: plain ATen graphs -> OpenVINO's model, by its own reader of exported programs -> a compiled model.

In: a FunctionalGraph. Out: a call; OpenVINO reads inputs from the tensors' memory and writes results to that of new ones. What it cannot
take runs in torch between two of its models. Options of the backend: `device` (default "CPU") and `config` (a dict for compile_model).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import fx

from ..codes import Unsupported
from ..graph.spec import FunctionalGraph, TensorSpec
from .exported import export, quietly
from .partition import partitioned, specs_of
from .plain import PlainGraph, Run, numbers, run_plain

OURS = (torch.ops.aten.reshape.default,)  # known to the reader, absent from its list
DISTRUSTED: set[Any] = set()  # operators that were seen to fail or differ in this process (partition.kind_of)
UNKNOWN = (torch.bfloat16, torch.complex64, torch.complex128)


@cache
def core() -> Any:
    return import_module("openvino").Core()


@cache
def operators() -> frozenset[str]:
    """Names of the overloads that OpenVINO's reader knows."""
    support = import_module("openvino.frontend.pytorch.torchdynamo.op_support")
    return frozenset(support.OperatorSupport({})._support_dict)


def takes(node: fx.Node) -> bool:
    if node.target is not operator.getitem and node.target not in OURS and f"torch.ops.{node.target}" not in operators():
        return False
    specs = [s for n in (node, *node.all_input_nodes) for s in specs_of(n)]
    return all(s.dtype not in UNKNOWN and s.device == "cpu" for s in specs if isinstance(s, TensorSpec))


def compile_openvino(
    fg: FunctionalGraph, name: str, options: Mapping[str, Any] | None = None, **keywords: Any
) -> Callable[..., tuple[Any, ...]]:
    """A call of `fg`. Raises Unsupported (BCK001, BCK002, BCK003)."""
    given = dict(options or {})
    device = given.get("device", "CPU")
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()} if device == "CPU" else {}
    if not isinstance(given.get("config", {}), Mapping):
        raise TypeError(f"option 'config' is a dict, not {given['config']!r}")
    config = {"INFERENCE_PRECISION_HINT": "f32", **threads, **given.get("config", {})}
    return run_plain(fg, lambda plain: partitioned(plain, takes, lambda piece: model(piece, device, config), DISTRUSTED), name)


def model(plain: PlainGraph, device: str, config: Mapping[str, Any]) -> Run:
    """One piece as one compiled model."""
    vino = import_module("openvino")
    shapes = [list(numbers(s.shape)) for s in plain.inputs]
    try:
        with quietly():
            made = vino.convert_model(export(plain))
            made.reshape({port: vino.PartialShape(shape) for port, shape in zip(made.inputs, shapes, strict=True)})
            compiled = core().compile_model(made, device, dict(config))
    except Exception as error:
        raise Unsupported("BCK003", detail=f"openvino: {type(error).__name__}: {error}".replace("\n", " ")[:300]) from error

    made_of = [n.meta["spec"] for n in plain.results]
    free: list[Any] = []  # requests that no call is using

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        kept = [t.detach().contiguous() for t in inputs]
        results = [torch.empty(numbers(s.shape), dtype=s.dtype) for s in made_of]
        try:
            request = free.pop()
        except IndexError:
            request = compiled.create_infer_request()
        for i, t in enumerate(kept):
            request.set_input_tensor(i, vino.Tensor(t.numpy(), shared_memory=True))
        for i, t in enumerate(results):
            request.set_output_tensor(i, vino.Tensor(t.numpy(), shared_memory=True))
        request.infer()
        free.append(request)
        return results

    return run
