"""Shape rules of matrix factorisations and what is computed by them: LAPACK leaves matrices column by column, in a dense batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...codes import Unsupported
from ..layout import Size, Sizes, are_equal, broadcast, contiguous_strides, is_zero
from ..tracing import Tracing, current, device_of, fresh, function_rule, make, rule
from .functions import is_watched

aten = torch.ops.aten
Tensor = torch.Tensor


def _columns(shape: Sequence[Size], dtype: torch.dtype) -> Tensor:
    """(..., n, m) with n fastest; a vector is dense."""
    if len(shape) < 2:
        return fresh(shape, dtype)
    *lead, n, m = shape
    *outer, step, one = contiguous_strides((*lead, m, n))
    return make(shape, (*outer, one, step), dtype)


def _matrix(self: Tensor, square: bool = True) -> tuple[Sizes, Size, Size]:
    """(batch, rows, columns)"""
    if self.dim() < 2:
        raise RuntimeError(f"The input tensor A must have at least 2 dimensions but has {self.dim()}")
    *batch, n, m = self.shape
    if square and n != m:
        raise RuntimeError(f"A must be batches of square matrices, but they are {n} by {m} matrices")
    return tuple(batch), n, m


@rule(aten.linalg_inv_ex.default, aten.linalg_cholesky_ex.default)
def square(self: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    batch, _, _ = _matrix(self)
    return _columns(self.shape, self.dtype), fresh(batch, torch.int32)


@rule(aten._linalg_det.default)
def determinant(self: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, _ = _matrix(self)
    return fresh(batch, self.dtype), _columns(self.shape, self.dtype), fresh((*batch, n), torch.int32)


@rule(aten._linalg_slogdet.default)
def log_determinant(self: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, _, _ = _matrix(self)
    real = self.dtype.to_real() if self.dtype.is_complex else self.dtype
    return (fresh(batch, self.dtype), fresh(batch, real), *determinant(self)[1:])


@rule(aten._linalg_solve_ex.default)
def solve(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, n, _ = _matrix(A)
    is_vector = B.dim() == 1 or (B.dim() == A.dim() - 1 and all(a == b for a, b in zip(B.shape, A.shape, strict=False)))
    if is_vector:
        shape: Sizes = (*broadcast(batch, B.shape[:-1]), B.shape[-1])
    else:
        shape = (*broadcast(batch, B.shape[:-2]), *B.shape[-2:])
    if B.shape[-1 if is_vector or not left else -2] != n:
        raise RuntimeError(f"linalg.solve: Incompatible shapes of A and B for the equation AX = B ({list(A.shape)} and {list(B.shape)})")
    result = _columns(shape, A.dtype) if left else fresh(shape, A.dtype)
    return result, _columns(A.shape, A.dtype), fresh((*batch, n), torch.int32), fresh(batch, torch.int32)


@rule(aten._linalg_svd.default)
def singular_values(
    self: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, m = _matrix(self, square=False)
    k = torch.sym_min(n, m)
    values = fresh((*batch, k), self.dtype.to_real() if self.dtype.is_complex else self.dtype)
    if not compute_uv:
        return fresh((0,), self.dtype), values, fresh((0,), self.dtype)
    left, right = (n, m) if full_matrices else (k, k)
    rows = _columns if device_of(self).type == "cpu" else fresh  # cuSOLVER leaves them row by row
    return _columns((*batch, n, left), self.dtype), values, rows((*batch, right, m), self.dtype)


@rule(aten._linalg_eigh.default)
def eigen_hermitian(self: Tensor, UPLO: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    batch, n, _ = _matrix(self)
    values = fresh((*batch, n), self.dtype.to_real() if self.dtype.is_complex else self.dtype)
    return values, _columns(self.shape, self.dtype) if compute_v else fresh((0,), self.dtype)


@rule(aten.linalg_qr.default)
def qr(self: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    batch, n, m = _matrix(self, square=False)
    k = n if mode == "complete" else torch.sym_min(n, m)
    right = _columns((*batch, k, m), self.dtype)
    return (fresh((0,), self.dtype) if mode == "r" else _columns((*batch, n, k), self.dtype)), right


@rule(aten.cholesky_inverse.default, aten.linalg_householder_product.default)
def columns(self: Tensor, *rest: Any) -> Tensor:
    _matrix(self, square=False)
    return _columns(self.shape, self.dtype)


@rule(aten.cholesky.default)
def cholesky(self: Tensor, upper: bool = False) -> Tensor:
    _matrix(self)
    return fresh(self.shape, self.dtype) if any(map(is_zero, self.shape)) else _columns(self.shape, self.dtype)


@rule(aten.linalg_pinv.atol_rtol_tensor)
def pinv(self: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False) -> Tensor:
    """A product of matrices."""
    batch, n, m = _matrix(self, square=hermitian)
    return fresh((*batch, m, n), self.dtype)


@rule(aten.geqrf.default)
def reflections(self: Tensor) -> tuple[Tensor, Tensor]:
    batch, n, m = _matrix(self, square=False)
    return _columns(self.shape, self.dtype), fresh((*batch, torch.sym_min(n, m)), self.dtype)


@rule(aten.linalg_ldl_factor_ex.default)
def ldl_factor(self: Tensor, *, hermitian: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, _ = _matrix(self)
    return _columns(self.shape, self.dtype), fresh((*batch, n), torch.int32), fresh(batch, torch.int32)


@rule(aten.linalg_ldl_solve.default)
def ldl_solve(LD: Tensor, pivots: Tensor, B: Tensor, *, hermitian: bool = False) -> Tensor:
    return _columns(_solved(LD, B), B.dtype)


@rule(aten.triangular_solve.default)
def solve_triangles(
    self: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """The solution, and A in a batch as large."""
    solved = _solved(A, self)
    return _columns(solved, self.dtype), _columns((*solved[:-2], *A.shape[-2:]), A.dtype)


@rule(aten.linalg_matrix_exp.default)
def exponential(self: Tensor) -> Tensor:
    _matrix(self)
    return fresh(self.shape, self.dtype)


def _solved(A: Tensor, B: Tensor, left: bool = True) -> Sizes:
    """Sizes of what solves A X = B, or X A = B."""
    batch, n, _ = _matrix(A)
    others, rows, columns = _matrix(B, square=False)
    if (rows if left else columns) != n:
        raise RuntimeError(f"Incompatible shapes of A and B: {list(A.shape)} and {list(B.shape)}")
    return (*broadcast(batch, others), rows, columns)


@rule(aten.cholesky_solve.default, aten._cholesky_solve_helper.default)
def cholesky_solve(B: Tensor, A: Tensor, upper: bool = False) -> Tensor:
    return _columns(_solved(A, B), B.dtype)


@rule(aten.linalg_solve_triangular.default)
def solve_triangular(A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    return _columns(_solved(A, B, left), B.dtype)


@rule(aten.linalg_lu_factor_ex.default)
def lu_factor(A: Tensor, *, pivot: bool = True, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, m = _matrix(A, square=False)
    least = n if n <= m else m
    return _columns(A.shape, A.dtype), fresh((*batch, least), torch.int32), fresh(batch, torch.int32)


@rule(aten.linalg_lu.default)
def lu(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, m = _matrix(A, square=False)
    least = n if n <= m else m
    moved = fresh((*batch, n, n) if pivot else (0,), A.dtype)
    return moved, fresh((*batch, n, least), A.dtype), fresh((*batch, least, m), A.dtype)


@rule(aten.lu_unpack.default)
def lu_unpack(LU_data: Tensor, LU_pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, m = _matrix(LU_data, square=False)
    least, kind = n if n <= m else m, LU_data.dtype
    moved = fresh((*batch, n, n) if unpack_pivots else (0,), kind)
    lower, upper = ((*batch, n, least), (*batch, least, m)) if unpack_data else ((0,), (0,))
    return moved, fresh(lower, kind), fresh(upper, kind)


@rule(aten.linalg_eig.default)
def eig(self: Tensor) -> tuple[Tensor, Tensor]:
    batch, n, _ = _matrix(self)
    kind = self.dtype if self.is_complex() else self.dtype.to_complex()
    lying = _columns if device_of(self).type == "cpu" else fresh
    return fresh((*batch, n), kind), lying(self.shape, kind)


@rule(aten._linalg_eigvals.default)
def eigvals(self: Tensor) -> Tensor:
    return eig(self)[0]


@function_rule(torch.linalg.eigvals)
def eigvals_alone(trace: Tracing, call: Any, A: Tensor, **kwargs: Any) -> Tensor:
    """Where anything watches, tracing too, torch's composite computes vectors and drops them, which rounds otherwise."""
    return call(A, **kwargs) if kwargs or is_watched(A) else aten._linalg_eigvals.default(A)  # type: ignore[no-any-return]


@rule(aten.linalg_lu_solve.default)
def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    return (_columns if left else fresh)(_solved(LU, B, left), B.dtype)


@rule(aten.ormqr.default)
def ormqr(self: Tensor, input2: Tensor, input3: Tensor, left: bool = True, transpose: bool = False) -> Tensor:
    """The product of a factorisation's Q, of `self` and `input2`, and `input3`."""
    batch, n, m = _matrix(self, square=False)
    least = n if n <= m else m
    fits = self.dim() == input3.dim() == input2.dim() + 1 and self.dtype == input2.dtype == input3.dtype
    sides = (*input3.shape[:-2], input3.shape[-2 if left else -1]) if fits else ()
    if not fits or not are_equal((*batch, least), input2.shape) or not are_equal((*batch, n), sides):
        raise RuntimeError(f"torch.ormqr: {list(self.shape)}, {list(input2.shape)} and {list(input3.shape)} do not fit")
    return _columns(input3.shape, input3.dtype)


@function_rule(torch.ormqr, Tensor.ormqr, torch.linalg.householder_product, torch.orgqr, Tensor.orgqr)
def by_reflections(trace: Tracing, call: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Traced, torch puts the gradient of the reflections together column by column; eager writes it into memory like theirs."""
    if is_watched(input) and not input._has_symbolic_sizes_strides:
        shown, like = input.view_as(input), torch.empty_like(input, requires_grad=False)
        shown.register_hook(lambda grad: torch.empty_like(like).copy_(grad))
        input = shown
    return call(input, *args, **kwargs)  # type: ignore[no-any-return]


@rule(aten.linalg_lstsq.default)
def least_squares(self: Tensor, b: Tensor, rcond: Any = None, *, driver: str | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The solution is the upper part of what b was. "gelsy" gives no residuals, "gels" (a GPU's) those of tall matrices and no ranks; the
    other drivers give them for full ranks only."""
    on_host = device_of(self).type == "cpu"
    driver = driver or ("gelsy" if on_host else "gels")
    if not on_host and driver != "gels":
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")
    if driver not in ("gelsy", "gels"):
        raise Unsupported("GRA009", at=current().facts.loc, detail="residuals of linalg.lstsq")
    batch, n, m = _matrix(self, square=False)
    is_vector = self.dim() == b.dim() + 1
    columns = 1 if is_vector else b.shape[-1]
    outer = b.shape[:-1] if is_vector else b.shape[:-2]
    if b.dim() not in (self.dim(), self.dim() - 1) or b.shape[-1 if is_vector else -2] != n:
        raise RuntimeError(f"torch.linalg.lstsq: {list(self.shape)} and {list(b.shape)} do not fit")
    lead, height = broadcast(batch, outer), torch.sym_max(n, m)
    *steps, step, one = contiguous_strides((*lead, columns, height))
    shape, strides = ((*lead, m), (*steps, one)) if is_vector else ((*lead, m, columns), (*steps, one, step))
    real = self.dtype.to_real() if self.dtype.is_complex else self.dtype
    is_tall = driver == "gels" and bool(n > m)
    residuals = fresh((*lead, columns) if is_tall else (0,), real)
    return make(shape, strides, self.dtype), residuals, fresh((0,) if driver == "gels" else lead, torch.int64), fresh((0,), real)


@rule(aten._linalg_check_errors.default)
def check_errors(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """Raises when run."""
