"""Shape rules of element-wise operators: broadcast sizes, propagated strides, promoted dtype."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from ..layout import broadcast, contiguous_strides, float_dtype, is_dense, propagate_strides, require, result_dtype
from ..schema import info, overloads
from ..sizes import SymTypes
from ..tracing import RULES, device_of, fresh, make, rule

aten = torch.ops.aten
Dtype = Callable[[tuple[Any, ...], tuple[torch.Tensor, ...]], torch.dtype]  # (operands, tensors) -> dtype of the result


def _promoted(operands: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> torch.dtype:
    return result_dtype(*operands)


def _float(operands: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> torch.dtype:
    return float_dtype(result_dtype(*operands))


def _bool(operands: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> torch.dtype:
    return torch.bool


def _first(operands: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> torch.dtype:
    return tensors[0].dtype


def _abs(operands: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> torch.dtype:
    return tensors[0].dtype.to_real() if tensors[0].dtype.is_complex else tensors[0].dtype


POINTWISE: dict[Dtype, str] = {
    _promoted: """add sub rsub mul remainder fmod floor_divide minimum maximum fmin fmax bitwise_and bitwise_or bitwise_xor
        bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __and__ __or__ __xor__ gcd lcm hypot nextafter clamp clamp_min
        clamp_max addcmul heaviside logaddexp logaddexp2 pow xlogy_""",
    _float: """true_divide atan2 copysign float_power_ xlogy special_xlog1py special_zeta arctan2
        sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sigmoid
        erf erfc erfinv lgamma digamma logit sinc special_i0e special_i1 special_i1e special_entr special_ndtri special_log_ndtr
        special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx special_modified_bessel_i0
        special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_airy_ai i0 polygamma deg2rad rad2deg
        special_ndtr special_polygamma special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_hermite_polynomial_h
        special_hermite_polynomial_he special_laguerre_polynomial_l special_chebyshev_polynomial_v special_chebyshev_polynomial_w
        special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w special_legendre_polynomial_p igamma igammac""",
    _bool: """eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isneginf isposinf isfinite signbit
        isreal not_equal less less_equal greater greater_equal""",
    _first: """neg floor ceil round trunc frac sign sgn bitwise_not relu relu6 silu gelu mish hardswish hardsigmoid hardtanh elu celu
        selu leaky_relu softplus hardshrink softshrink threshold log_sigmoid nan_to_num positive conj_physical square
        gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward""",
    _abs: "abs",
}
# Scalars among these arguments take part in type promotion; others (alpha, negative_slope, ...) do not.
PROMOTING = frozenset({"self", "other", "exponent", "min", "max", "x", "n"})


# Their numbers are the kernel's own; those of other operators eager makes tensors first.
_KEEPING = frozenset({"pow", "clamp", "clamp_min", "clamp_max"})
# Eager makes the results of these like their operand, and then writes them.
_FILLED = frozenset({"hardtanh", "relu6", "nan_to_num", "deg2rad", "rad2deg"})
# Their numbers become elements of the dtype that they compute in, and must lie in its range.
CONVERTING = frozenset("clamp clamp_min clamp_max threshold logit hardtanh hardshrink softshrink".split())  # noqa: SIM905


def _check_clamp(x: torch.Tensor, *bounds: Any) -> None:
    if all(v is None for v in bounds):
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")


def _check_width(x: torch.Tensor, lambd: Any = None) -> None:
    if lambd is not None and not lambd >= 0:
        raise RuntimeError(f"lambda must be in range [0, inf), but found {lambd}")


def _check_gelu(x: torch.Tensor, approximate: str | None = None) -> None:
    if approximate not in (None, "none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")


def _check_limits(x: torch.Tensor, low: Any = None, high: Any = None) -> None:
    if x.dtype is torch.uint8 and not all(v > -1 for v in (0 if low is None else low, 0 if high is None else high)):
        raise RuntimeError("cannot do hardtanh on an unsigned type with negative limits")


NUMBERS: dict[str, Callable[..., None]] = {
    "clamp": _check_clamp, "softshrink": _check_width, "gelu": _check_gelu, "hardtanh": _check_limits,
}  # fmt: skip


def pointwise(op: OpOverload, dtype: Dtype) -> Callable[..., torch.Tensor]:
    """The rule of one element-wise operator."""
    row = info(op)
    arguments = op._schema.arguments
    tensor_at = tuple(i for i, a in enumerate(arguments) if "Tensor" in str(a.type))
    operand_at = tuple(i for i, a in enumerate(arguments) if i in tensor_at or (a.name in PROMOTING and "number" in str(a.type)))
    names = row.params

    checks = NUMBERS.get(op._schema.name.removeprefix("aten::"))
    same_kind = op._schema.name == "aten::heaviside"
    converts = op._schema.name.removeprefix("aten::") in CONVERTING
    wraps, fills = op._schema.name.removeprefix("aten::") not in _KEEPING, op._schema.name.removeprefix("aten::") in _FILLED
    subtracts, scaled = op._schema.name in ("aten::sub", "aten::rsub"), "alpha" in names

    def shape_of(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            values = {**dict(zip(names, args, strict=False)), **kwargs}
            given = tuple(values.get(n) for n in names)
        else:
            given = args
        count = len(given)
        operands = tuple(given[i] for i in operand_at if i < count and given[i] is not None)
        tensors = tuple(x for x in operands if isinstance(x, torch.Tensor))
        if subtracts and any(is_bool(x) for x in operands):
            raise RuntimeError("Subtraction, the `-` operator, with a bool tensor is not supported.")
        if same_kind and len({t.dtype for t in tensors}) > 1:
            raise RuntimeError(f"{names} of different dtypes: {[t.dtype for t in tensors]}")
        if checks is not None:
            checks(*given)
        if converts:
            for x in (*given, *kwargs.values()):
                if isinstance(x, (int, float)):
                    check_number(x, dtype(operands, tensors))
        if scaled:
            check_alpha(result_dtype(*operands), kwargs.get("alpha", given[2] if count > 2 else 1))
        if fills:
            return filled(tensors[0], dtype(operands, tensors))
        return elementwise(tensors, dtype(operands, tensors), with_number=wraps and len(tensors) < len(operands))

    return shape_of


def is_bool(x: Any) -> bool:
    return x.dtype is torch.bool if isinstance(x, torch.Tensor) else isinstance(x, (bool, torch.SymBool))


def check_alpha(dtype: torch.dtype, alpha: Any) -> None:
    """The factor of the second operand is of the result's kind."""
    if isinstance(alpha, (bool, torch.SymBool)) and dtype is not torch.bool:
        raise RuntimeError("Boolean alpha only supported for Boolean results.")
    if isinstance(alpha, (float, torch.SymFloat, complex)) and not dtype.is_floating_point and not dtype.is_complex:
        raise RuntimeError("For integral input tensors, argument alpha must not be a floating point number.")
    if isinstance(alpha, complex) and not dtype.is_complex:
        raise RuntimeError("For non-complex input tensors, argument alpha must not be a complex number.")


def check_number(v: Any, dtype: torch.dtype) -> None:
    """A number that becomes an element of `dtype` lies in its range; negative ones wrap in unsigned dtypes."""
    if isinstance(v, (bool, complex, torch.SymBool, torch.Tensor)) or v is None or dtype is torch.bool or dtype.is_complex:
        return
    if dtype.is_floating_point:
        span = torch.finfo(dtype)
        fits = isinstance(v, SymTypes) or v != v or abs(v) == math.inf or -span.max <= v <= span.max
    else:
        whole = torch.iinfo(dtype)
        low = whole.min if whole.min or isinstance(v, (float, torch.SymFloat)) else -whole.max
        fits = v == v and require(v <= whole.max) and require(v >= low)
    if not fits:
        raise RuntimeError(f"value cannot be converted to type {dtype} without overflow")


def elementwise(tensors: tuple[torch.Tensor, ...], dtype: torch.dtype, *, with_number: bool = False) -> torch.Tensor:
    """The result of an element-wise kernel over `tensors`, and a number that eager makes a tensor."""
    first = tensors[0]
    shape = tuple(first.shape) if len(tensors) == 1 else broadcast(*(t.shape for t in tensors))
    return make(shape, propagate_strides(shape, tensors, with_number=with_number), dtype)


def filled(self: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A result that eager makes like its operand, and then writes."""
    shape = tuple(self.shape)
    return make(shape, tuple(self.stride()) if is_dense(self) else propagate_strides(shape, (self,)), dtype)


def _fill() -> None:
    for dtype, names in POINTWISE.items():
        for name in names.split():
            for op in overloads("aten", name):
                if op in RULES or not op._schema.returns or info(op).writes or info(op).is_composite or len(op._schema.returns) != 1:
                    continue
                if str(op._schema.returns[0].type) == "Tensor" and any("Tensor" in str(a.type) for a in op._schema.arguments):
                    rule(op)(pointwise(op, dtype))


@rule(aten.pow.Scalar)
def pow_of_number(self: Any, exponent: torch.Tensor) -> torch.Tensor:
    """Eager makes the result in row-major order, whatever that of the exponents is."""
    return make(exponent.shape, contiguous_strides(tuple(exponent.shape)), result_dtype(self, exponent))


_fill()


@rule(aten.div.Tensor, aten.div.Scalar)
def div(self: torch.Tensor, other: Any) -> torch.Tensor:
    tensors = _tensors(self, other)
    return elementwise(tensors, float_dtype(result_dtype(self, other)), with_number=len(tensors) < 2)


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(self: torch.Tensor, other: Any, *, rounding_mode: str | None) -> torch.Tensor:
    dtype = result_dtype(self, other)
    if rounding_mode not in (None, "trunc", "floor"):
        raise RuntimeError(f"div expected rounding_mode to be one of None, 'trunc', or 'floor' but found '{rounding_mode}'")
    tensors = _tensors(self, other)
    return elementwise(tensors, float_dtype(dtype) if rounding_mode is None else dtype, with_number=len(tensors) < 2)


def _tensors(*values: Any) -> tuple[torch.Tensor, ...]:
    return tuple(v for v in values if isinstance(v, torch.Tensor))


@rule(aten.addcdiv.default)
def addcdiv(self: torch.Tensor, tensor1: torch.Tensor, tensor2: torch.Tensor, *, value: Any = 1) -> torch.Tensor:
    return elementwise((self, tensor1, tensor2), result_dtype(self, tensor1, tensor2))


@rule(aten.lerp.Tensor, aten.lerp.Scalar)
def lerp(self: torch.Tensor, end: torch.Tensor, weight: Any) -> torch.Tensor:
    tensors = _tensors(self, end, weight)
    is_scalar = not isinstance(weight, torch.Tensor) or not weight.dim()
    if end.dtype != self.dtype or (not is_scalar and weight.dtype != self.dtype):
        raise RuntimeError(f"expected dtype {self.dtype} for `end` and `weight` but got {[t.dtype for t in tensors[1:]]}")
    return elementwise(tensors, self.dtype)


@rule(aten.where.self)
def where(condition: torch.Tensor, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if condition.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"where expected condition to be a boolean tensor, but got a tensor with dtype {condition.dtype}")
    return elementwise((condition, self, other), result_dtype(self, other))


@rule(aten.float_power.Tensor_Tensor, aten.float_power.Tensor_Scalar, aten.float_power.Scalar)
def float_power(self: Any, exponent: Any) -> torch.Tensor:
    dtype = torch.complex128 if result_dtype(self, exponent).is_complex else torch.float64
    if not isinstance(self, torch.Tensor):
        return make(exponent.shape, contiguous_strides(tuple(exponent.shape)), dtype)
    return elementwise(_tensors(self, exponent), dtype)


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(self: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    """Eager clones self, expanded to the common shape, in row-major order and fills that in place."""
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"masked_fill_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    if isinstance(value, torch.Tensor) and value.dim():
        raise RuntimeError(f"masked_fill_ only supports a 0-dimensional value tensor, but got tensor with {value.dim()} dimension(s).")
    shape = broadcast(self.shape, mask.shape)
    check_number(value, self.dtype)
    return fresh(shape, self.dtype)


@rule(aten.fill.Scalar, aten.fill.Tensor)
def fill(self: torch.Tensor, value: Any) -> torch.Tensor:
    check_number(value, self.dtype)
    return filled(self, self.dtype)


@rule(aten.rrelu_with_noise_functional.default)
def rrelu(self: torch.Tensor, noise: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return make(self.shape, contiguous_strides(tuple(self.shape)), self.dtype), make(noise.shape, noise.stride(), noise.dtype)


@rule(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if device_of(self).type != "cpu":  # a GPU's kernel keeps the order in memory, and nothing for its gradient
        return elementwise((self,), self.dtype), make((0,), (1,), self.dtype)
    strides = contiguous_strides(tuple(self.shape))
    return make(self.shape, strides, self.dtype), make(self.shape, strides, self.dtype)


@rule(aten.ldexp.Tensor)
def ldexp(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return elementwise((self, other), _dtype_of_ldexp(self.dtype, other.dtype, self.dim() > 0, other.dim() > 0))


@functools.cache
def _dtype_of_ldexp(a: torch.dtype, b: torch.dtype, *lines: bool) -> torch.dtype:
    """Versions of torch differ in what whole exponents make of half floats: eager is asked, of no elements or one."""
    with torch._C.DisableTorchFunction(), no_dispatch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager warns of a result that it resizes
        x, n = (torch.ones((0,) if line else (), dtype=d) for d, line in zip((a, b), lines, strict=True))
        return torch.ldexp(x, n).dtype


@rule(aten._conj_physical.default)
def conj_physical(self: torch.Tensor) -> torch.Tensor:
    return filled(self, self.dtype)


@rule(aten.frexp.Tensor)
def frexp(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return elementwise((self,), self.dtype), elementwise((self,), torch.int32)


@rule(aten.complex.default, aten.polar.default)
def complex_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype != b.dtype:
        raise RuntimeError(f"Expected object of scalar type {a.dtype} but got scalar type {b.dtype} for second argument")
    return elementwise((a, b), {torch.float32: torch.complex64, torch.float64: torch.complex128}.get(a.dtype, torch.complex32))


@rule(aten.angle.default)
def angle(self: torch.Tensor) -> torch.Tensor:
    """Of complex numbers eager's result is in row-major order, unlike that of abs."""
    return fresh(self.shape, self.dtype.to_real()) if self.dtype.is_complex else elementwise((self,), float_dtype(self.dtype))


@rule(aten.bernoulli.default, aten.bernoulli.p, aten.poisson.default)
def bernoulli(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return make(self.shape, contiguous_strides(tuple(self.shape)), self.dtype)


@rule(aten.mvlgamma.default)
def mvlgamma(self: torch.Tensor, p: int) -> torch.Tensor:
    if p < 1:
        raise RuntimeError("p has to be greater than or equal to 1")
    return make(self.shape, contiguous_strides(tuple(self.shape)), float_dtype(self.dtype))


def register_random() -> None:
    """Random results have the layout of their operand."""
    names = """bernoulli.Tensor uniform.default normal_functional.default exponential.default
        random.default random.from random.to cauchy.default log_normal.default geometric.default"""
    for name in names.split():
        packet, overload = name.split(".")
        op = getattr(getattr(aten, packet), overload)
        if op not in RULES:
            rule(op)(_like)


def _like(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return make(self.shape, propagate_strides(tuple(self.shape), (self,)), self.dtype)


register_random()


@rule(aten.native_dropout.default)
def native_dropout(input: torch.Tensor, p: float, train: bool | None) -> Any:
    if any(type(n) is int and n == 0 for n in input.shape):
        return NotImplemented  # the mask's dtype is the kernel's choice
    return tuple(make(input.shape, propagate_strides(tuple(input.shape), (input,)), d) for d in (input.dtype, torch.bool))
