"""tvm: plain ATen graphs -> Relax, by TVM's own importer of exported programs -> its virtual machine, on the processor.

In: a FunctionalGraph. Out: a call; tensors enter and leave by DLPack, without copies. What the importer does not know runs in torch between
two of TVM's programs. Programs are not tuned. Options of the backend: `target` (default "llvm").
"""

from __future__ import annotations

import operator
import threading
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
from .plain import PlainGraph, Run, run_plain

DISTRUSTED: set[Any] = set()  # operators that were seen to fail or differ in this process (partition.kind_of)
KNOWN = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@cache
def operators() -> frozenset[str]:
    """Names of the overloads that TVM's importer knows, "relu.default"."""
    importer = import_module("tvm.relax.frontend.torch.exported_program_translator").ExportedProgramImporter()
    return frozenset(k for k in importer.create_convert_map() if isinstance(k, str))


def takes(node: fx.Node) -> bool:
    if node.target is not operator.getitem and str(node.target).removeprefix("aten.") not in operators():
        return False
    specs = [s for n in (node, *node.all_input_nodes) for s in specs_of(n)]
    return all(s.dtype in KNOWN and s.device == "cpu" for s in specs if isinstance(s, TensorSpec))


def compile_tvm(
    fg: FunctionalGraph, name: str, options: Mapping[str, Any] | None = None, **keywords: Any
) -> Callable[..., tuple[Any, ...]]:
    """A call of `fg`. Raises Unsupported (BCK001, BCK002, BCK003)."""
    target = (options or {}).get("target", "llvm")
    return run_plain(fg, lambda plain: partitioned(plain, takes, lambda piece: program(piece, target), DISTRUSTED), name)


def program(plain: PlainGraph, target: str) -> Run:
    """One piece as one program of the virtual machine."""
    try:
        with quietly():
            tvm = import_module("tvm")
            relax = import_module("tvm.relax")
            importer = import_module("tvm.relax.frontend.torch")
            module = importer.from_exported_program(export(plain), run_ep_decomposition=False)
            machine = relax.VirtualMachine(relax.build(module, target), tvm.cpu())
    except Exception as error:
        raise Unsupported("BCK003", detail=f"tvm: {type(error).__name__}: {error}".replace("\n", " ")[:300]) from error
    one = threading.Lock()  # a virtual machine has one state

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        kept = [t.detach().contiguous() for t in inputs]
        with one:
            found = machine["main"](*[tvm.runtime.from_dlpack(t) for t in kept])
        seen = {t.data_ptr() for t in kept}
        results = []
        for value in [found] if hasattr(found, "__dlpack__") else found:
            t = torch.from_dlpack(value)
            results.append(t.clone() if t.data_ptr() in seen and t.numel() else t)
            seen.add(t.data_ptr())
        return results

    return run
