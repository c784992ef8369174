"""tvm: plain ATen graphs -> Relax, by TVM's own importer of exported programs -> its virtual machine, on the processor.

In: a FunctionalGraph. Out: a call; tensors enter and leave by DLPack, without copies. What the importer does not know runs in torch between
two of TVM's programs. Programs are not tuned. Options of the backend: `target` (default "llvm").
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import fx

from ..graph.spec import FunctionalGraph
from .exported import export, quietly
from .plain import PlainGraph, Run
from .runtimes import Runtime, apart, is_on_cpu

KNOWN = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@cache
def operators() -> frozenset[str]:
    """Names of the overloads that TVM's importer knows, "relu.default"."""
    importer = import_module("tvm.relax.frontend.torch.exported_program_translator").ExportedProgramImporter()
    return frozenset(k for k in importer.create_convert_map() if isinstance(k, str))


def takes(node: fx.Node) -> bool:
    known = node.target is operator.getitem or str(node.target).removeprefix("aten.") in operators()
    return known and is_on_cpu(node, KNOWN.__contains__)


RUNTIME = Runtime("tvm", takes)


def compile_tvm(
    fg: FunctionalGraph, name: str, options: Mapping[str, Any] | None = None, **keywords: Any
) -> Callable[..., tuple[Any, ...]]:
    """A call of `fg`. Raises Unsupported (BCK001, BCK002, BCK003)."""
    target = (options or {}).get("target", "llvm")
    return RUNTIME.compile(fg, name, lambda plain: program(plain, target))


def program(plain: PlainGraph, target: str) -> Run:
    """One piece as one program of the virtual machine."""
    with RUNTIME.refusing(), quietly():
        tvm = import_module("tvm")
        relax = import_module("tvm.relax")
        importer = import_module("tvm.relax.frontend.torch")
        module = importer.from_exported_program(export(plain), run_ep_decomposition=False)
        machine = relax.VirtualMachine(relax.build(module, target), tvm.cpu())
    one = threading.Lock()  # a virtual machine has one state

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        kept = [t.detach().contiguous() for t in inputs]
        with one:
            found = machine["main"](*[tvm.runtime.from_dlpack(t) for t in kept])
        values = [found] if hasattr(found, "__dlpack__") else found
        return apart(map(torch.from_dlpack, values), [t.data_ptr() for t in kept])

    return run
