"""onnxrt: plain ATen graphs -> ONNX, by torch's own exporter -> sessions of ONNX Runtime.

In: a FunctionalGraph. Out: a call; tensors enter and leave as NumPy arrays over the same memory. Operators without an ONNX form, and dtypes
that NumPy does not know, run in torch between two sessions. Options of the backend: `providers` (execution providers of ONNX Runtime).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import fx

from ..codes import Unsupported
from ..graph.spec import FunctionalGraph, TensorSpec
from .exported import export, quietly
from .partition import partitioned, specs_of
from .plain import PlainGraph, Run, run_plain

DISTRUSTED: set[Any] = set()  # operators that were seen to fail or differ in this process (partition.kind_of)
UNKNOWN = (torch.bfloat16, torch.complex64, torch.complex128)  # dtypes of which NumPy or ONNX Runtime's kernels know nothing
PROVIDERS = ("CPUExecutionProvider",)


@cache
def registry() -> Any:
    """torch's table of operators with an ONNX form."""
    with quietly():
        return import_module("torch.onnx._internal.exporter._registration").ONNXRegistry.from_torchlib()


def takes(node: fx.Node) -> bool:
    if node.target is not operator.getitem and not registry().is_registered(node.target):
        return False
    specs = [s for n in (node, *node.all_input_nodes) for s in specs_of(n)]
    return all(s.dtype not in UNKNOWN and s.device == "cpu" for s in specs if isinstance(s, TensorSpec))


def compile_onnxrt(
    fg: FunctionalGraph, name: str, options: Mapping[str, Any] | None = None, **keywords: Any
) -> Callable[..., tuple[Any, ...]]:
    """A call of `fg`. Raises Unsupported (BCK001, BCK002, BCK003)."""
    providers = list((options or {}).get("providers", PROVIDERS))
    return run_plain(fg, lambda plain: partitioned(plain, takes, lambda piece: session(piece, providers), DISTRUSTED), name)


def session(plain: PlainGraph, providers: Sequence[Any]) -> Run:
    """One piece as one session."""
    runtime = import_module("onnxruntime")
    try:
        with quietly():
            program = import_module("torch.onnx").export(export(plain), dynamo=True, verbose=False)
            settings = runtime.SessionOptions()
            settings.log_severity_level = 3
            settings.intra_op_num_threads = torch.get_num_threads()
            made = runtime.InferenceSession(program.model_proto.SerializeToString(), settings, providers=providers)
    except Exception as error:
        raise Unsupported("BCK003", detail=f"onnxrt: {type(error).__name__}: {error}".split("\n", 1)[0][:300]) from error
    wanted = {i.name for i in made.get_inputs()}  # those that nothing reads are dropped by the exporter
    names = [n.name for n in plain.graph.nodes if n.op == "placeholder"]
    results = [o.name for o in made.get_outputs()]

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        feed = {n: t.detach().contiguous().numpy() for n, t in zip(names, inputs, strict=True) if n in wanted}
        seen = {a.ctypes.data for a in feed.values()}
        out: list[torch.Tensor] = []
        for array in made.run(results, feed):
            t = torch.as_tensor(array)
            out.append(t.clone() if t.data_ptr() in seen else t)
            seen.add(t.data_ptr())
        return out

    return run
