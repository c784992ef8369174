"""What ATen has for a contraction: every operator that can compute it, weights packed beforehand where one can.

In: a Shape and a dtype. Out: an Operation: inputs, the module that torchsmith compiles, and ATen's candidates by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from shapes import Shape
from torch import Tensor, nn
from torch.nn import functional as F

Candidate = Callable[[], Tensor]
CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
DENSE = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True, slots=True)
class Operation:
    module: nn.Module
    inputs: tuple[Tensor, ...]
    reference: Tensor  # float64
    candidates: dict[str, Candidate]


class Contraction(nn.Module):
    """The shape as a layer: weight and bias are parameters; a product of two activations has none."""

    def __init__(self, shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        if shape.kind != "bmm":
            fan = math.prod(shape.w[1:]) if not shape.transposed else shape.w[0] * math.prod(shape.w[2:])
            self.weight = nn.Parameter((torch.randn(shape.w, generator=generator) / math.sqrt(fan)).to(dtype))
            self.bias = nn.Parameter(torch.randn(shape.outputs if shape.kind == "conv" else shape.w[0], generator=generator).to(dtype))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        s = self.shape
        if s.kind == "bmm":
            return torch.matmul(x, others[0])
        return _apply(s, x, self.weight, self.bias)


def _apply(s: Shape, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    if s.kind == "linear":
        return F.linear(x, w, b)
    rank = len(s.x) - 2
    if s.transposed:
        return TRANSPOSED[rank](x, w, b, s.stride, s.padding, s.output_padding, s.groups, s.dilation)  # type: ignore[no-any-return,operator]
    return CONVS[rank](x, w, b, s.stride, s.padding, s.dilation, s.groups)  # type: ignore[no-any-return,operator]


def operation(s: Shape, dtype: torch.dtype, seed: int = 0) -> Operation:
    generator = torch.Generator().manual_seed(seed)
    module = Contraction(s, dtype, generator).eval()
    x = torch.randn(s.x, generator=generator).to(dtype)
    inputs: tuple[Tensor, ...] = (x,)
    if s.kind == "bmm":
        w = torch.randn(s.w, generator=generator).to(dtype)
        inputs = (x, w.mT.contiguous().mT if s.transposed else w)
        a, b = inputs
        return Operation(module, inputs, torch.matmul(a.double(), b.double()), {"matmul": lambda: torch.matmul(a, b)})
    w, b = module.weight.detach(), module.bias.detach()
    if s.kind == "conv" and x.dim() in DENSE:
        inputs = (x.contiguous(memory_format=DENSE[x.dim()]),)
    reference = _apply(s, x.double(), w.double(), b.double())
    table = _linears(x, w, b) if s.kind == "linear" else _convs(s, x, inputs[0], w, b)
    candidates = {}
    for name, make in table.items():
        try:
            call = make()
            call()
        except (RuntimeError, NotImplementedError, AttributeError):
            continue  # this build of ATen cannot: one candidate less
        candidates[name] = call
    return Operation(module, inputs, reference, candidates)


def _linears(x: Tensor, w: Tensor, b: Tensor) -> dict[str, Callable[[], Candidate]]:
    def onednn() -> Candidate:
        packed = torch.ops.mkldnn._reorder_linear_weight(w, x.shape[0])
        return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, b, "none", [], "")

    def mkl() -> Candidate:
        packed = torch.ops.mkl._mkl_reorder_linear_weight(w, x.shape[0])
        return lambda: torch.ops.mkl._mkl_linear(x, packed, w, b, x.shape[0])

    return {"linear": lambda: lambda: F.linear(x, w, b), "onednn packed": onednn, "mkl packed": mkl}


def _convs(s: Shape, x: Tensor, last: Tensor, w: Tensor, b: Tensor) -> dict[str, Callable[[], Candidate]]:
    """Row-major and channels-last activations, plain and packed weights."""
    attributes: tuple[Any, ...] = (list(s.padding), list(s.stride), list(s.dilation), s.groups)

    def packed(x: Tensor) -> Candidate:
        if s.transposed:
            before = (list(s.padding), list(s.output_padding), list(s.stride), list(s.dilation), s.groups)
            ready = torch.ops.mkldnn._reorder_convolution_transpose_weight(w, *before, list(x.shape))
            return lambda: torch.ops.mkldnn._convolution_transpose_pointwise(x, ready, b, *before, "none", [], "")
        ready = torch.ops.mkldnn._reorder_convolution_weight(w, *attributes, list(x.shape))
        return lambda: torch.ops.mkldnn._convolution_pointwise(x, ready, b, *attributes, "none", [], "")

    table = {"conv": lambda: lambda: _apply(s, x, w, b), "onednn packed": lambda: packed(x)}
    if last is not x:
        wl = w.contiguous(memory_format=DENSE[w.dim()])
        table |= {"conv channels-last": lambda: lambda: _apply(s, last, wl, b), "onednn packed channels-last": lambda: packed(last)}
    return table
