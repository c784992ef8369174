"""openxla: plain ATen graphs -> one XLA program each, through JAX.

In: a FunctionalGraph. Out: a call that hands tensors to XLA and back by DLPack, without copies. What an operator means in JAX is told by
torchax's table (kept by the XLA team) and, where that has no row or another meaning, by ours (xla_rows.py). What neither has runs in torch,
between two XLA programs. Programs are compiled for fixed sizes and kept on disk by JAX's own cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import fx

from ..graph.layout import is_lazy
from ..graph.spec import FunctionalGraph, TensorSpec
from ..runtime import store
from . import xla_rows
from .partition import specs_of
from .plain import PlainGraph, Run, evaluator, numbers
from .runtimes import Runtime, apart

RUNTIME = Runtime("openxla", lambda n: xla_rows.kernel_of(n.target) is not None)


@cache
def jax() -> Any:
    """The package, with its programs kept beside ours."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU's memory is torch's too
    module = import_module("jax")
    if module.config.jax_compilation_cache_dir is None:
        module.config.update("jax_compilation_cache_dir", str(store.folder("xla")))
        module.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return module


def compile_xla(fg: FunctionalGraph, name: str, **keywords: Any) -> Callable[..., tuple[Any, ...]]:
    """A call of `fg`. Raises Unsupported (BCK001, BCK002)."""
    return RUNTIME.compile(fg, name, program)


def in_jax(node: fx.Node) -> Callable[..., Any]:
    """What computes one node on JAX arrays."""
    kernel = xla_rows.kernel_of(node.target)
    assert kernel is not None

    def compute(*args: Any, **kwargs: Any) -> Any:
        with jax().default_matmul_precision(precision(node.target)):
            return xla_rows.as_planned(kernel(*args, **kwargs), node.meta["spec"])

    return compute


def precision(target: Any) -> str:
    """How exact XLA's products of float32 are on a GPU, where its own default is TF32: as torch's, which asks a switch for convolutions and
    another one for the rest."""
    asked = torch._C._get_fp32_precision_getter("cuda", "conv" if "convolution" in str(target) else "matmul")
    return "tensorfloat32" if asked == "tf32" else "float32"


def program(plain: PlainGraph) -> Run:
    """One piece as one XLA program, compiled now, so that what XLA refuses is known here."""
    j = jax()
    with RUNTIME.refusing():
        device = place(plain)
    with j.enable_x64(True), j.default_device(device):
        shapes = [j.ShapeDtypeStruct(numbers(s.shape), xla_rows.dtype_of(s.dtype)) for s in plain.inputs]
        with RUNTIME.refusing():
            compiled = j.jit(evaluator(plain, in_jax), keep_unused=True).lower(*shapes).compile()

    hand_over = handing(plain, device.platform != "cpu")

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        with j.enable_x64(True), j.default_device(device):
            given = hand_over(inputs)
            results = [to_torch(a) for a in compiled(*given)]
        return apart(results, [a.unsafe_buffer_pointer() for a in given])

    return run


def handing(plain: PlainGraph, ordered: bool) -> Callable[[Sequence[torch.Tensor]], list[Any]]:
    """Tensors to arrays. Weights whose memory is where it was at the last call are handed over once: their arrays see what is written
    there since. `ordered`: a program waits for what torch's stream has to do through its inputs, so one of them is always new."""
    stay = [n.meta.get("role") in ("param", "buffer", "const") for n in plain.graph.nodes if n.op == "placeholder"]
    if ordered and stay and all(stay):
        stay[0] = False
    kept: dict[int, tuple[Any, Any]] = {}  # number of the input -> its address and strides, and its array

    def hand_over(inputs: Sequence[torch.Tensor]) -> list[Any]:
        given = []
        for i, (t, stays) in enumerate(zip(inputs, stay, strict=True)):
            at = (t.data_ptr(), t.stride()) if stays else None
            found = kept.get(i)
            if found is None or found[0] != at:
                array = to_jax(t)
                found = (at, array)
                if stays and array.unsafe_buffer_pointer() == t.data_ptr():  # else a copy, which sees no writes
                    kept[i] = found
            given.append(found[1])
        return given

    return hand_over


def place(plain: PlainGraph) -> Any:
    """JAX's device for a piece. Raises where there is none, or the piece lies on several."""
    specs = [*plain.inputs, *(s for n in plain.graph.nodes if n.op != "output" for s in specs_of(n))]
    names = sorted({s.device for s in specs if isinstance(s, TensorSpec)})
    if len(names) > 1:
        raise ValueError(f"one program on {' and '.join(names)}")
    at = torch.device(names[0] if names else "cpu")
    return jax().devices(at.type)[at.index or 0]


def to_jax(t: torch.Tensor) -> Any:
    """The tensor's own memory as a JAX array; a copy where XLA wants another layout or alignment."""
    t = t.detach()
    if not t.is_contiguous() or is_lazy(t):
        t = t.resolve_conj().resolve_neg().contiguous()
    plain = torch.empty(t.shape, device="meta").stride() if 1 in t.shape else t.stride()
    if t.stride() != plain:  # of a dimension of one element any stride is contiguous to torch, and tells JAX the order of dimensions
        t = t.as_strided(t.shape, plain)
    return jax().dlpack.from_dlpack(t)


def to_torch(array: Any) -> torch.Tensor:
    """The array's own memory as a tensor, when XLA has written it: on a GPU torch's stream waits for that, not the host."""
    if array.device.platform == "cpu":
        array.block_until_ready()
    return torch.from_dlpack(array)
