"""Shape rules of matrix products."""

from __future__ import annotations

from typing import Any

import torch

from ..layout import Sizes, are_equal, broadcast, broadcasts_to, result_dtype
from ..tracing import device_of, fresh, rule
from .pointwise import elementwise
from .views import axis, unsqueeze

aten = torch.ops.aten
Tensor = torch.Tensor


def product(shape: Sizes, like: Tensor) -> Tensor:
    return fresh(shape, like.dtype)


def _match(a: Any, b: Any, what: str) -> None:
    if not are_equal((a,), (b,)):
        raise RuntimeError(f"{what} ({a} and {b})")


def _same_dtype(a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype:
        raise RuntimeError(f"expected m1 and m2 to have the same dtype, but got: {a.dtype} != {b.dtype}")


def _multiplied(a: Tensor) -> None:
    """No kernel of a GPU multiplies matrices or vectors of integers."""
    if device_of(a).type == "cuda" and not (a.is_floating_point() or a.is_complex()):
        raise RuntimeError(f"products of {a.dtype} are not implemented for CUDA")


@rule(aten.mm.default)
def mm(self: Tensor, mat2: Tensor) -> Tensor:
    if self.dim() != 2 or mat2.dim() != 2:
        raise RuntimeError("mat1 and mat2 must be matrices")
    _same_dtype(self, mat2)
    _match(self.shape[1], mat2.shape[0], "mat1 and mat2 shapes cannot be multiplied")
    return product((self.shape[0], mat2.shape[1]), self)


def _added(self: Tensor, result: Tensor) -> Tensor:
    """The first operand of addmm and its relatives broadcasts to the product."""
    _same_dtype(self, result)
    if not broadcasts_to(self.shape, result.shape):
        raise RuntimeError(f"The expanded size of the tensor {list(result.shape)} must match the existing size {list(self.shape)}")
    return result


@rule(aten.addmm.default, aten._addmm_activation.default)
def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False) -> Tensor:
    return _added(self, mm(mat1, mat2))


@rule(aten.bmm.default)
def bmm(self: Tensor, mat2: Tensor) -> Tensor:
    if self.dim() != 3 or mat2.dim() != 3:
        raise RuntimeError("batch1 and batch2 must be 3D tensors")
    _same_dtype(self, mat2)
    _match(self.shape[0], mat2.shape[0], "batch1 and batch2 must have same number of batches")
    _match(self.shape[2], mat2.shape[1], "Expected size for first two dimensions of batch2 tensor")
    return product((self.shape[0], self.shape[1], mat2.shape[2]), self)


@rule(aten.baddbmm.default)
def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _added(self, bmm(batch1, batch2))


@rule(aten.addbmm.default)
def addbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    whole = bmm(batch1, batch2)
    return _added(self, product(tuple(whole.shape[1:]), batch1))


@rule(aten.mv.default)
def mv(self: Tensor, vec: Tensor) -> Tensor:
    if self.dim() != 2 or vec.dim() != 1:
        raise RuntimeError("vector + matrix @ vector expected")
    _same_dtype(self, vec)
    _multiplied(self)
    _match(self.shape[1], vec.shape[0], "size mismatch")
    return product((self.shape[0],), self)


@rule(aten.addmv.default)
def addmv(self: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _added(self, mv(mat, vec))


@rule(aten.dot.default, aten.vdot.default)
def dot(self: Tensor, other: Tensor) -> Tensor:
    if self.dim() != 1 or other.dim() != 1:
        raise RuntimeError(f"1D tensors expected, but got {self.dim()}D and {other.dim()}D tensors")
    _same_dtype(self, other)
    _multiplied(self)
    _match(self.shape[0], other.shape[0], "inconsistent tensor size")
    return product((), self)


@rule(aten.addr.default)
def addr(self: Tensor, vec1: Tensor, vec2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if vec1.dim() != 1 or vec2.dim() != 1 or not broadcasts_to(self.shape, (vec1.shape[0], vec2.shape[0])):
        raise RuntimeError(f"addr: {list(self.shape)} does not broadcast to the product of {list(vec1.shape)} and {list(vec2.shape)}")
    operands = ((self,) if beta else ()) + (unsqueeze(vec1, 1), unsqueeze(vec2, 0))
    return elementwise(operands, result_dtype(*operands))


@rule(aten._trilinear.default)
def trilinear(
    i1: Tensor, i2: Tensor, i3: Tensor, expand1: list[int], expand2: list[int], expand3: list[int], sumdim: list[int], unroll_dim: int = 1
) -> Tensor:
    """A product of three, each with new dimensions at its `expand`, summed over `sumdim`."""
    _multiplied(i1)
    shapes = []
    for t, new in ((i1, expand1), (i2, expand2), (i3, expand3)):
        sizes = list(t.shape)
        for d in new:
            sizes.insert(d, 1)
        shapes.append(sizes)
    whole = broadcast(*shapes)
    summed = {axis(d, len(whole)) for d in sumdim}
    return product(tuple(s for d, s in enumerate(whole) if d not in summed), i1)


@rule(aten.linalg_cross.default)
def cross(self: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    _same_dtype(self, other)
    shape = broadcast(self.shape, other.shape)
    if self.dim() != other.dim() or shape[dim] != 3 or self.shape[dim] != 3 or other.shape[dim] != 3:
        raise RuntimeError(f"linalg.cross: inputs dimension {dim} must have length 3. Got {self.shape} and {other.shape}")
    return product(shape, self)
