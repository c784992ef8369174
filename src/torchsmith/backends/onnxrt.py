"""onnxrt: plain ATen graphs -> ONNX, by torch's own exporter -> sessions of ONNX Runtime.

In: a FunctionalGraph. Out: a call; ONNX Runtime reads inputs from the tensors' memory and writes results to that of new ones. Operators
without an ONNX form, and dtypes that its kernels do not know, run in torch between two sessions. Options of the backend: `providers`
(execution providers of ONNX Runtime).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import fx

from ..graph.spec import FunctionalGraph
from .exported import export, quietly
from .partition import specs_of
from .plain import PlainGraph, Run, numbers
from .runtimes import Runtime, is_on_cpu

ONNX = {  # its numbers of dtypes
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.uint16: 4, torch.int16: 5, torch.int32: 6, torch.int64: 7, torch.bool: 9,
    torch.float16: 10, torch.float64: 11, torch.uint32: 12, torch.uint64: 13,
}  # fmt: skip
SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)
WRONG = frozenset({  # in their ONNX forms for some values: large ones, NaN, negative zeros
    torch.ops.aten.logaddexp.default, torch.ops.aten.atan2.default, torch.ops.aten.sign.default, torch.ops.aten.sgn.default,
    torch.ops.aten.xlogy.Tensor, torch.ops.aten.heaviside.default, torch.ops.aten.signbit.default,
    torch.ops.aten.sort.default, torch.ops.aten.sort.stable, torch.ops.aten.topk.default, torch.ops.aten.max.dim, torch.ops.aten.min.dim,
    torch.ops.aten.amax.default, torch.ops.aten.amin.default, torch.ops.aten.argmax.default, torch.ops.aten.argmin.default,
    torch.ops.aten.max.default, torch.ops.aten.min.default, torch.ops.aten.logsumexp.default,
    torch.ops.aten.logcumsumexp.default, torch.ops.aten.logit.default,
})  # fmt: skip
CLAMPS = frozenset({torch.ops.aten.clamp.default, torch.ops.aten.clamp_min.default, torch.ops.aten.clamp_max.default})
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
PROVIDERS = ("CPUExecutionProvider",)


@cache
def registry() -> Any:
    """torch's table of operators with an ONNX form."""
    with quietly():
        return import_module("torch.onnx._internal.exporter._registration").ONNXRegistry.from_torchlib()


def takes(node: fx.Node) -> bool:
    if node.target in SUMS and not any(s.dtype.is_floating_point or s.dtype is torch.bool for s in specs_of(node.all_input_nodes[0])):
        return False  # rounded as floats
    if node.target in WRONG or (node.target in CLAMPS and cuts_infinities(node)):
        return False
    if node.target is ATTENTION and node.kwargs.get("attn_mask") is not None:
        return False  # NaN where a line is masked out as a whole; written out it is right
    return (node.target is operator.getitem or registry().is_registered(node.target)) and is_on_cpu(node, ONNX.__contains__)


def cuts_infinities(node: fx.Node) -> bool:
    """Without the other bound Clip takes the largest finite number for it."""
    bounds = [b for b in (*node.args[1:], *node.kwargs.values()) if b is not None]
    return len(bounds) < 2 and specs_of(node)[0].dtype.is_floating_point


RUNTIME = Runtime("onnxrt", takes)


def compile_onnxrt(
    fg: FunctionalGraph, name: str, options: Mapping[str, Any] | None = None, **keywords: Any
) -> Callable[..., tuple[Any, ...]]:
    """A call of `fg`. Raises Unsupported (BCK001, BCK002, BCK003), TypeError, ValueError."""
    providers = (options or {}).get("providers", PROVIDERS)
    if isinstance(providers, str) or not isinstance(providers, Sequence):
        raise TypeError(f"option 'providers' is a list of names, not {providers!r}")
    known = import_module("onnxruntime").get_available_providers()  # the runtime itself goes on without one that it does not know
    for provider in providers:
        name_of = provider[0] if isinstance(provider, tuple) else provider
        if name_of not in known:
            raise ValueError(f"no provider {name_of!r}; this onnxruntime has {', '.join(known)}")
    return RUNTIME.compile(fg, name, lambda plain: session(plain, providers))


def session(plain: PlainGraph, providers: Sequence[Any]) -> Run:
    """One piece as one session."""
    runtime = import_module("onnxruntime")
    with RUNTIME.refusing(), quietly():
        program = import_module("torch.onnx").export(export(plain), dynamo=True, verbose=False)
        settings = runtime.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = torch.get_num_threads()
        made = runtime.InferenceSession(program.model_proto.SerializeToString(), settings, providers=providers)
    wanted = {i.name for i in made.get_inputs()}  # those that nothing reads are dropped by the exporter
    names = [n.name for n in plain.graph.nodes if n.op == "placeholder"]
    outs = [(o.name, n.meta["spec"]) for o, n in zip(made.get_outputs(), plain.results, strict=True)]

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        given = [(name, t.detach().contiguous()) for name, t in zip(names, inputs, strict=True) if name in wanted]
        results = [torch.empty(numbers(s.shape), dtype=s.dtype) for _, s in outs]
        if not all(t.numel() for t in (*results, *(t for _, t in given))):  # no memory to bind
            found = made.run([name for name, _ in outs], {name: t.numpy() for name, t in given})
            return [torch.as_tensor(array).clone() for array in found]
        binding = made.io_binding()
        for name, t in given:
            binding.bind_input(name, "cpu", 0, ONNX[t.dtype], t.shape, t.data_ptr())
        for (name, _), t in zip(outs, results, strict=True):
            binding.bind_output(name, "cpu", 0, ONNX[t.dtype], t.shape, t.data_ptr())
        made.run_with_iobinding(binding)
        return results

    return run
