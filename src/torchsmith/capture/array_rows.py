"""What functions of NumPy are on tensors. A row takes `want` (what NumPy gives, `arrays.Want`) and NumPy's own parameters, those that it knows:
a call with others breaks. dtypes, shapes and views are held against NumPy's answer by arrays.settled; here only values matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from . import arrays as ar
from .arrays import METHODS, TABLE, UFUNCS, NotExact, as_dtype

Tensor = torch.Tensor


def _function(*functions: Any, methods: str = "", spread: bool = False) -> Callable[[Any], Any]:
    """What these functions, and the methods of arrays of these names, are on tensors. spread: asked with unit matrices, not with ones."""

    def add(row: Any) -> Any:
        row.spread = spread
        for f in functions:
            if f in TABLE:
                raise ValueError(f"{f} has two rows")
            TABLE[f] = row
        for name in methods.split():
            if name in METHODS:
                raise ValueError(f"the method {name} has two rows")
            METHODS[name] = row
        return row

    return add


def _tensor(value: Any, want: Any = None) -> Tensor:
    """An array-like as a tensor: numbers and lists have NumPy's dtypes."""
    if issubclass(type(value), Tensor):
        return value  # type: ignore[no-any-return]
    if ar.holds(value):
        raise NotExact("a list of arrays")
    made = np.asarray(value)
    return as_dtype(value, ar.DTYPES[made.dtype])


def _axes(a: Tensor, axis: Any) -> list[int]:
    if axis is None:
        return list(range(a.ndim))
    return [x % a.ndim for x in (axis if type(axis) in (tuple, list) else [axis])] if a.ndim else []


def _flat(a: Tensor, axis: Any) -> tuple[Tensor, Any]:
    """Along no axis: along the only one of the flat array."""
    return (a.reshape(-1), 0) if axis is None else (a, axis)


def _shape(shape: Any) -> tuple[Any, ...]:
    return tuple(shape) if type(shape) in (tuple, list, torch.Size) else (shape,)


# ---------------------------------------------------------------- element by element


def _plain(fn: Any) -> Any:
    return lambda kinds, *xs: fn(*xs)


def _of_floats(fn: Any) -> Any:
    def run(kinds: Any, *xs: Any) -> Any:
        if not all(k.is_floating_point for k in kinds):
            raise NotExact("integers or complex numbers")
        return fn(*xs)

    return run


def _of_floats_in(fn: Any) -> Any:
    return lambda kinds, *xs: _of_floats(fn)(kinds[:-1], *xs)


def _real(fn: Any) -> Any:
    """Not for complex numbers: orders, rounding at branch cuts and infinities are torch's own."""

    def run(kinds: Any, *xs: Any) -> Any:
        if any(k.is_complex for k in kinds):
            raise NotExact("complex numbers")
        return fn(*xs)

    return run


def _division(of_floats: Any, of_integers: Any, by_minus_one: Any) -> Any:
    """Of integers NumPy gives 0 where it divides by zero, and wraps where it divides the smallest by -1."""

    def run(kinds: Any, a: Tensor, b: Tensor) -> Tensor:
        if kinds[-1].is_complex:
            raise NotExact("complex numbers")
        if kinds[-1].is_floating_point:
            return of_floats(a, b)  # type: ignore[no-any-return]
        zero = torch.zeros_like(b)
        special = (b == 0) | (b == -1) if b.dtype.is_signed else b == 0
        out = of_integers(a, torch.where(special, zero + 1, b))
        out = torch.where(b == 0, zero, out)
        return torch.where(b == -1, by_minus_one(a), out) if b.dtype.is_signed else out

    return run


def _power(kinds: Any, a: Tensor, b: Tensor) -> Tensor:
    if kinds[-1].is_complex:
        raise NotExact("complex powers")
    if not kinds[-1].is_floating_point and b.ndim:
        raise NotExact("integer powers that the data tell: NumPy refuses negative ones")
    return torch.pow(a, b)


def _sign(a: Tensor) -> Tensor:
    return torch.where(a != a, a, torch.sign(a)) if a.dtype.is_floating_point else torch.sign(a)


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    out = torch.remainder(a, b)
    return torch.where(out == 0, torch.copysign(torch.zeros_like(out), b), out)


def _heaviside(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a != a, a, torch.heaviside(a, b))


def _shift(fn: Any, fill: bool) -> Any:
    """Past the number of bits NumPy gives 0, or the sign."""

    def run(kinds: Any, a: Tensor, b: Tensor) -> Tensor:
        bits = a.dtype.itemsize * 8
        out = fn(a, b.clamp(0, bits - 1))
        past = (b < 0) | (b >= bits)
        rest = torch.where(a < 0, -1, 0).to(a.dtype) if fill and a.dtype.is_signed else torch.zeros_like(a)
        return torch.where(past, rest, out)

    return run


_UFUNC_ROWS: dict[str, Any] = {
    "add": _plain(torch.add), "subtract": _plain(torch.sub), "multiply": _plain(torch.mul), "true_divide": _real(torch.true_divide),
    "floor_divide": _division(torch.floor_divide, torch.floor_divide, torch.neg),
    "remainder": _division(_remainder, torch.remainder, torch.zeros_like), "fmod": _division(torch.fmod, torch.fmod, torch.zeros_like), "power": _power,
    "float_power": _of_floats(torch.pow), "negative": _plain(torch.neg), "positive": _plain(torch.clone), "absolute": _plain(lambda a: a.clone() if a.dtype is torch.bool else torch.abs(a)), "fabs": _of_floats(torch.abs),
    "sign": _real(_sign), "rint": _of_floats(torch.round), "floor": _real(torch.floor), "ceil": _real(torch.ceil), "trunc": _real(torch.trunc),
    "sqrt": _of_floats(torch.sqrt), "square": _plain(torch.square), "reciprocal": _of_floats(torch.reciprocal), "exp": _of_floats(torch.exp),
    "exp2": _of_floats(torch.exp2), "expm1": _of_floats(torch.expm1), "log": _of_floats(torch.log), "log2": _of_floats(torch.log2),
    "log10": _of_floats(torch.log10), "log1p": _of_floats(torch.log1p), "sin": _of_floats(torch.sin), "cos": _of_floats(torch.cos),
    "tan": _of_floats(torch.tan), "arcsin": _of_floats(torch.asin), "arccos": _of_floats(torch.acos), "arctan": _of_floats(torch.atan),
    "arctan2": _of_floats(torch.atan2), "hypot": _of_floats(torch.hypot), "sinh": _of_floats(torch.sinh), "cosh": _of_floats(torch.cosh),
    "tanh": _of_floats(torch.tanh), "arcsinh": _of_floats(torch.asinh), "arccosh": _of_floats(torch.acosh), "arctanh": _of_floats(torch.atanh),
    "logaddexp": _of_floats(torch.logaddexp),
    "logaddexp2": _of_floats(torch.logaddexp2), "maximum": _real(torch.maximum), "minimum": _real(torch.minimum), "fmax": _real(torch.fmax),
    "fmin": _real(torch.fmin), "greater": _real(torch.gt), "greater_equal": _real(torch.ge), "less": _real(torch.lt), "less_equal": _real(torch.le),
    "equal": _plain(torch.eq), "not_equal": _plain(torch.ne), "logical_and": _plain(torch.logical_and), "logical_or": _plain(torch.logical_or),
    "logical_xor": _plain(torch.logical_xor), "logical_not": _plain(torch.logical_not), "bitwise_and": _plain(torch.bitwise_and),
    "bitwise_or": _plain(torch.bitwise_or), "bitwise_xor": _plain(torch.bitwise_xor), "invert": _plain(torch.bitwise_not),
    "left_shift": _shift(torch.bitwise_left_shift, False), "right_shift": _shift(torch.bitwise_right_shift, True), "isnan": _plain(torch.isnan),
    "isinf": _plain(torch.isinf), "isfinite": _plain(torch.isfinite), "signbit": _of_floats_in(torch.signbit),
    "copysign": _of_floats(torch.copysign), "heaviside": _of_floats(_heaviside), "nextafter": _of_floats(torch.nextafter),
    "gcd": _plain(torch.gcd), "conjugate": _plain(torch.conj_physical), "matmul": _real(torch.matmul),
}  # fmt: skip


def _scaled(scale: float) -> Any:
    def run(kinds: Any, a: Tensor) -> Tensor:
        if not kinds[-1].is_floating_point:
            raise NotExact("complex numbers")
        return a * ar.number(scale, kinds[-1])

    return run


_UFUNC_ROWS["deg2rad"] = _UFUNC_ROWS["radians"] = _scaled(math.pi / 180)
_UFUNC_ROWS["rad2deg"] = _UFUNC_ROWS["degrees"] = _scaled(180 / math.pi)


for _name, _row in _UFUNC_ROWS.items():
    UFUNCS[getattr(np, _name)] = _row


# ---------------------------------------------------------------- sums and the like


@_function(np.sum, methods="sum")
def _sum(want: Any, a: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Tensor:
    a = as_dtype(_tensor(a), want.dtype)
    return a.clone() if not a.ndim else torch.sum(a, _axes(a, axis), keepdim=keepdims, dtype=want.dtype) if _axes(a, axis) else a.clone()


@_function(np.prod, methods="prod")
def _prod(want: Any, a: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Tensor:
    a = as_dtype(_tensor(a), want.dtype)
    for d in sorted(_axes(a, axis), reverse=True):
        a = torch.prod(a, d, keepdim=keepdims, dtype=want.dtype)
    return a


@_function(np.mean, methods="mean")
def _mean(want: Any, a: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Tensor:
    a = as_dtype(_tensor(a), want.dtype)
    return torch.mean(a, _axes(a, axis), keepdim=keepdims) if _axes(a, axis) else a.clone()


def _spread(fn: Any) -> Any:
    def run(want: Any, a: Any, axis: Any = None, dtype: Any = None, ddof: Any = 0, keepdims: bool = False) -> Tensor:
        a = _tensor(a)
        if a.dtype.is_complex or a.dtype is torch.float16:
            raise NotExact("complex or half-precision numbers")
        a = as_dtype(a, want.dtype)
        n = 1
        for d in _axes(a, axis):
            n = n * a.shape[d]
        if not _axes(a, axis) or type(n) is not int or n - ddof <= 0:
            raise NotExact("no degrees of freedom")
        return fn(a, _axes(a, axis), correction=ddof, keepdim=keepdims)  # type: ignore[no-any-return]

    return run


_function(np.var, methods="var")(_spread(torch.var))
_function(np.std, methods="std")(_spread(torch.std))


def _extreme(fn: Any) -> Any:
    def run(want: Any, a: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
        a = _tensor(a)
        if a.dtype.is_complex:
            raise NotExact("complex numbers")
        return fn(a, _axes(a, axis), keepdim=keepdims) if _axes(a, axis) else a.clone()  # type: ignore[no-any-return]

    return run


_function(np.max, methods="max")(_extreme(torch.amax))
_function(np.min, methods="min")(_extreme(torch.amin))


@_function(np.ptp)
def _ptp(want: Any, a: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    a = _tensor(a)
    if a.dtype.is_complex or a.dtype is torch.bool:
        raise NotExact("complex numbers")
    return torch.amax(a, _axes(a, axis), keepdim=keepdims) - torch.amin(a, _axes(a, axis), keepdim=keepdims)


def _truths(fn: Any) -> Any:
    def run(want: Any, a: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
        a = _tensor(a) != 0
        for d in sorted(_axes(a, axis), reverse=True):
            a = fn(a, d, keepdim=keepdims)
        return a

    return run


_function(np.all, methods="all")(_truths(torch.all))
_function(np.any, methods="any")(_truths(torch.any))


@_function(np.count_nonzero)
def _count_nonzero(want: Any, a: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    if axis is None:
        raise NotExact("a number of Python")
    a = _tensor(a) != 0
    return torch.sum(a, _axes(a, axis), keepdim=keepdims)


def _position(fn: Any) -> Any:
    def run(want: Any, a: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
        a = _tensor(a)
        if a.dtype.is_complex or (keepdims and axis is None):
            raise NotExact("complex numbers")
        a = a.to(torch.uint8) if a.dtype is torch.bool else a
        return fn(a.reshape(-1), 0) if axis is None else fn(a, axis, keepdim=keepdims)  # type: ignore[no-any-return]

    return run


_function(np.argmax, methods="argmax")(_position(torch.argmax))
_function(np.argmin, methods="argmin")(_position(torch.argmin))


def _running(fn: Any) -> Any:
    def run(want: Any, a: Any, axis: Any = None, dtype: Any = None) -> Tensor:
        a, axis = _flat(_tensor(a), axis)
        return fn(as_dtype(a, want.dtype), axis, dtype=want.dtype)  # type: ignore[no-any-return]

    return run


_function(np.cumsum, methods="cumsum")(_running(torch.cumsum))
_function(np.cumprod, methods="cumprod")(_running(torch.cumprod))


@_function(np.nansum)
def _nansum(want: Any, a: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    a = _tensor(a)
    return _sum(want, torch.where(a != a, torch.zeros_like(a), a), axis, keepdims=keepdims)  # type: ignore[no-any-return]


@_function(np.average)
def _average(want: Any, a: Any, axis: Any = None, weights: Any = None, keepdims: bool = False) -> Tensor:
    if weights is None:
        return _mean(want, a, axis, keepdims=keepdims)  # type: ignore[no-any-return]
    a, w = as_dtype(_tensor(a), want.dtype), as_dtype(_tensor(weights), want.dtype)
    if tuple(a.shape) != tuple(w.shape):
        raise NotExact("weights of another shape")
    return torch.sum(a * w, _axes(a, axis), keepdim=keepdims) / torch.sum(w, _axes(a, axis), keepdim=keepdims)


@_function(np.median)
def _median(want: Any, a: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    a = _tensor(a)
    if a.dtype.is_complex or type(axis) is tuple or (keepdims and axis is None) or a.dtype is torch.float16:
        raise NotExact("several axes, complex or half-precision numbers")
    a, axis = _flat(a, axis)
    n = a.shape[axis]
    if type(n) is not int:
        raise NotExact("a size that varies")
    s = torch.sort(a, axis).values
    both = torch.stack([s.select(axis, (n - 1) // 2), s.select(axis, n // 2)])
    out = torch.mean(as_dtype(both, want.dtype), 0)
    if a.dtype.is_floating_point:
        last = s.select(axis, n - 1)  # where one is NaN, the last is
        out = torch.where(last != last, last, out)
    return out.unsqueeze(axis) if keepdims else out


@_function(np.diff)
def _diff(want: Any, a: Any, n: int = 1, axis: int = -1) -> Tensor:
    a = _tensor(a)
    if a.dtype is torch.bool:
        raise NotExact("booleans")
    return torch.diff(a, n, axis)


@_function(np.trace, methods="trace")
def _trace(want: Any, a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Tensor:
    return torch.sum(torch.diagonal(as_dtype(_tensor(a), want.dtype), offset, axis1, axis2), -1)


# ---------------------------------------------------------------- shapes


@_function(np.reshape)
def _reshape(want: Any, a: Any, shape: Any, order: str = "C") -> Tensor:
    if order != "C":
        raise NotExact("another order than C")
    return torch.reshape(_tensor(a), _shape(shape))


@_function(methods="reshape")
def _reshape_method(want: Any, a: Any, *shape: Any, order: str = "C") -> Tensor:
    if order != "C":
        raise NotExact("another order than C")
    return torch.reshape(a, _shape(shape[0]) if len(shape) == 1 else shape)


@_function(np.ravel, methods="ravel")
def _ravel(want: Any, a: Any, order: str = "C") -> Tensor:
    if order != "C":
        raise NotExact("another order than C")
    return torch.reshape(_tensor(a), (-1,))


@_function(methods="flatten")
def _flatten(want: Any, a: Any, order: str = "C") -> Tensor:
    return _ravel(want, a, order).clone()  # type: ignore[no-any-return]


@_function(np.transpose)
def _transpose(want: Any, a: Any, axes: Any = None) -> Tensor:
    a = _tensor(a)
    return torch.permute(a, tuple(axes) if axes is not None else tuple(range(a.ndim))[::-1])


@_function(methods="transpose")
def _transpose_method(want: Any, a: Any, *axes: Any) -> Tensor:
    return _transpose(want, a, (axes[0] if len(axes) == 1 and type(axes[0]) in (tuple, list) else axes) if axes and axes != (None,) else None)  # type: ignore[no-any-return]


@_function(np.swapaxes, methods="swapaxes")
def _swapaxes(want: Any, a: Any, axis1: int, axis2: int) -> Tensor:
    return torch.swapaxes(_tensor(a), axis1, axis2)


@_function(np.moveaxis)
def _moveaxis(want: Any, a: Any, source: Any, destination: Any) -> Tensor:
    return torch.movedim(_tensor(a), source, destination)


@_function(np.squeeze, methods="squeeze")
def _squeeze(want: Any, a: Any, axis: Any = None) -> Tensor:
    a = _tensor(a)
    return a.squeeze() if axis is None else a.squeeze(tuple(_axes(a, axis)))


@_function(np.expand_dims)
def _expand_dims(want: Any, a: Any, axis: Any) -> Tensor:
    a = _tensor(a)
    rank = a.ndim + (len(axis) if type(axis) in (tuple, list) else 1)
    for d in sorted(x % rank for x in (axis if type(axis) in (tuple, list) else [axis])):
        a = a.unsqueeze(d)
    return a


@_function(np.atleast_1d)
def _atleast_1d(want: Any, a: Any) -> Tensor:
    return torch.atleast_1d(_tensor(a))


@_function(np.atleast_2d)
def _atleast_2d(want: Any, a: Any) -> Tensor:
    return torch.atleast_2d(_tensor(a))


@_function(np.diagonal)
def _diagonal(want: Any, a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    return torch.diagonal(_tensor(a), offset, axis1, axis2)


@_function(np.diag)
def _diag(want: Any, a: Any, k: int = 0) -> Tensor:
    a = _tensor(a)
    return torch.diag(a, k) if a.ndim == 1 else torch.diagonal(a, k)


@_function(np.tril)
def _tril(want: Any, a: Any, k: int = 0) -> Tensor:
    return torch.tril(_tensor(a), k)


@_function(np.triu)
def _triu(want: Any, a: Any, k: int = 0) -> Tensor:
    return torch.triu(_tensor(a), k)


@_function(np.broadcast_to)
def _broadcast_to(want: Any, array: Any, shape: Any) -> Tensor:
    return torch.broadcast_to(_tensor(array), _shape(shape))


@_function(np.roll)
def _roll(want: Any, a: Any, shift: Any, axis: Any = None) -> Tensor:
    return torch.roll(_tensor(a), shift, axis)


@_function(np.flip)
def _flip(want: Any, a: Any, axis: Any = None) -> Tensor:
    a = _tensor(a)
    return torch.flip(a, _axes(a, axis))


@_function(np.tile)
def _tile(want: Any, a: Any, reps: Any) -> Tensor:
    return torch.tile(_tensor(a), _shape(reps))


@_function(np.repeat, methods="repeat")
def _repeat(want: Any, a: Any, repeats: Any, axis: Any = None) -> Tensor:
    a, axis = _flat(_tensor(a), axis)
    if type(repeats) is not int:
        raise NotExact("repeats that differ")
    return torch.repeat_interleave(a, repeats, axis)


@_function(np.take, methods="take")
def _take(want: Any, a: Any, indices: Any, axis: Any = None) -> Tensor:
    a, axis = _flat(_tensor(a), axis)
    i = as_dtype(_tensor(indices), torch.int64)
    axis = axis % a.ndim
    return a[(*(slice(None),) * axis, i.reshape(-1))].reshape((*a.shape[:axis], *i.shape, *a.shape[axis + 1 :]))


@_function(np.take_along_axis)
def _take_along_axis(want: Any, arr: Any, indices: Any, axis: Any = -1) -> Tensor:
    arr, axis = _flat(_tensor(arr), axis)
    n = arr.shape[axis]
    i = as_dtype(_tensor(indices), torch.int64)
    if tuple(s for d, s in enumerate(i.shape) if d != axis % arr.ndim) != tuple(s for d, s in enumerate(arr.shape) if d != axis % arr.ndim):
        raise NotExact("indices that are broadcast")
    return torch.take_along_dim(arr, torch.where(i < 0, i + n, i), axis)


# ---------------------------------------------------------------- joining


def _parts(want: Any, parts: Any) -> list[Tensor]:
    return [as_dtype(p, want.dtype) if not issubclass(type(p), Tensor) and type(p) not in (list, tuple) else as_dtype(_tensor(p), want.dtype) for p in parts]


@_function(np.concatenate)
def _concatenate(want: Any, arrays: Any, axis: Any = 0) -> Tensor:
    parts = _parts(want, arrays)
    return torch.cat([p.reshape(-1) for p in parts]) if axis is None else torch.cat(parts, axis)


@_function(np.stack)
def _stack(want: Any, arrays: Any, axis: int = 0) -> Tensor:
    return torch.stack(_parts(want, arrays), axis)


@_function(np.vstack)
def _vstack(want: Any, tup: Any) -> Tensor:
    return torch.vstack(_parts(want, tup))


@_function(np.hstack)
def _hstack(want: Any, tup: Any) -> Tensor:
    return torch.hstack(_parts(want, tup))


@_function(np.dstack)
def _dstack(want: Any, tup: Any) -> Tensor:
    return torch.dstack(_parts(want, tup))


@_function(np.column_stack)
def _column_stack(want: Any, tup: Any) -> Tensor:
    return torch.column_stack(_parts(want, tup))


@_function(np.split, np.array_split)
def _split(want: Any, ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    if type(indices_or_sections) not in (int, list, tuple):
        raise NotExact("sections that the data tell")
    return list(torch.tensor_split(ary, indices_or_sections if type(indices_or_sections) is int else list(indices_or_sections), axis))


@_function(np.meshgrid)
def _meshgrid(want: Any, *xi: Any, indexing: str = "xy") -> Any:
    return tuple(t.clone() for t in torch.meshgrid(*(_tensor(x).reshape(-1) for x in xi), indexing=indexing))


@_function(np.pad)
def _pad(want: Any, array: Any, pad_width: Any, mode: Any = "constant", constant_values: Any = 0) -> Tensor:
    a = _tensor(array)
    known = [pad_width] if type(pad_width) is int else [w for p in pad_width for w in (p if type(p) in (tuple, list) else (p,))]
    if type(mode) is not str or any(type(w) is not int for w in known) or type(constant_values) not in (bool, int, float):
        raise NotExact("widths or values that are no numbers, or a function")
    widths = np.broadcast_to(pad_width, (a.ndim, 2)).tolist()
    if mode == "constant":
        return F.pad(a, [w for pair in reversed(widths) for w in pair], value=torch.tensor(constant_values).to(a.dtype).item())
    if mode not in ("edge", "reflect", "symmetric", "wrap") or any(type(n) is not int for n in a.shape):
        raise NotExact(f"the mode {mode}, or sizes that vary")
    for d, pair in enumerate(widths):
        if any(pair):
            a = a.index_select(d, torch.tensor(np.pad(np.arange(a.shape[d]), pair, mode=mode).tolist()))  # type: ignore[call-overload]
    return a.contiguous() if any(map(any, widths)) else a.clone()


# ---------------------------------------------------------------- making


@_function(np.array, np.asarray, np.asanyarray, np.ascontiguousarray, np.copy)
def _array(want: Any, a: Any, dtype: Any = None, order: Any = None, copy: Any = None, subok: bool = False, ndmin: int = 0) -> Tensor:
    if order not in (None, "C", "K"):
        raise NotExact("another order than C")
    made = as_dtype(a, want.dtype)
    return made[(None,) * (ndmin - made.ndim)] if issubclass(type(made), Tensor) and ndmin > made.ndim else made  # type: ignore[no-any-return]


@_function(methods="copy")
def _copy(want: Any, a: Any, order: str = "C") -> Tensor:
    if order != "C":
        raise NotExact("another order than C")
    return a.clone(memory_format=torch.contiguous_format)


@_function(methods="astype")
def _astype(want: Any, a: Any, dtype: Any, copy: bool = True) -> Tensor:
    if a.dtype.is_complex and not want.dtype.is_complex:
        raise NotExact("complex numbers: NumPy warns")
    return as_dtype(a, want.dtype)


@_function(methods="fill")
def _fill(want: Any, a: Any, value: Any) -> None:
    a.copy_(as_dtype(value, a.dtype))


@_function(np.zeros_like)
def _zeros_like(want: Any, a: Any, dtype: Any = None) -> Tensor:
    return torch.zeros_like(_tensor(a), dtype=want.dtype)


@_function(np.ones_like)
def _ones_like(want: Any, a: Any, dtype: Any = None) -> Tensor:
    return torch.ones_like(_tensor(a), dtype=want.dtype)


@_function(np.empty_like)
def _empty_like(want: Any, a: Any, dtype: Any = None) -> Tensor:
    return torch.empty_like(_tensor(a), dtype=want.dtype)


@_function(np.full_like)
def _full_like(want: Any, a: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    return torch.zeros_like(_tensor(a), dtype=want.dtype) + as_dtype(fill_value, want.dtype)


@_function(np.zeros, np.empty)
def _zeros(want: Any, shape: Any, dtype: Any = float) -> Tensor:
    return torch.zeros(_shape(shape), dtype=want.dtype, device="cpu")


@_function(np.ones)
def _ones(want: Any, shape: Any, dtype: Any = None) -> Tensor:
    return torch.ones(_shape(shape), dtype=want.dtype, device="cpu")


@_function(np.full)
def _full(want: Any, shape: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    return torch.zeros(_shape(shape), dtype=want.dtype, device="cpu") + as_dtype(fill_value, want.dtype)


@_function(np.arange)
def _arange(want: Any, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Tensor:
    if any(type(v) not in (int, torch.SymInt, type(None)) for v in (start, stop, step)) or want.dtype is not torch.int64:
        raise NotExact("numbers that are no integers")
    return torch.arange(0 if stop is None else start, start if stop is None else stop, step, dtype=torch.int64, device="cpu")


@_function(np.eye, np.identity)
def _eye(want: Any, n: Any, M: Any = None, dtype: Any = float) -> Tensor:
    return torch.eye(n, n if M is None else M, dtype=want.dtype, device="cpu")


# ---------------------------------------------------------------- choosing


@_function(np.where)
def _where(want: Any, condition: Any, x: Any, y: Any) -> Tensor:
    return torch.where(_tensor(condition) != 0, as_dtype(x, want.dtype), as_dtype(y, want.dtype))


@_function(np.clip, methods="clip")
def _clip(want: Any, a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Tensor:
    lo, hi = a_min if min is None else min, a_max if max is None else max
    a = as_dtype(_tensor(a), want.dtype)
    if a.dtype.is_complex or (lo is None and hi is None):
        raise NotExact("complex numbers")
    if lo is not None:
        a = torch.maximum(a, as_dtype(lo, want.dtype))
    return a if hi is None else torch.minimum(a, as_dtype(hi, want.dtype))


@_function(np.sort)
def _sort(want: Any, a: Any, axis: Any = -1, kind: Any = None) -> Tensor:
    a, axis = _flat(_tensor(a), axis)
    if a.dtype.is_complex:
        raise NotExact("complex numbers")
    return torch.sort(a, axis).values


@_function(methods="sort")
def _sort_method(want: Any, a: Any, axis: int = -1, kind: Any = None) -> None:
    a.copy_(_sort(want, a, axis))


@_function(np.argsort, methods="argsort")
def _argsort(want: Any, a: Any, axis: Any = -1, kind: Any = None, *, stable: Any = None) -> Tensor:
    a, axis = _flat(_tensor(a), axis)
    if a.dtype.is_complex or not (stable or kind in ("stable", "mergesort")):
        raise NotExact("an order of equals that is NumPy's own")
    return torch.argsort(a, dim=axis, stable=True)


@_function(np.searchsorted)
def _searchsorted(want: Any, a: Any, v: Any, side: str = "left") -> Tensor:
    both = np.result_type(*(ar.NUMPY_DTYPES[x.dtype] if issubclass(type(x), Tensor) else type(x) for x in (a, v)))
    kind = ar.DTYPES[both]
    a, v = as_dtype(a, kind), as_dtype(v, kind)
    if a.ndim != 1 or kind.is_complex or kind in (torch.bool, torch.float16):
        raise NotExact("complex or half-precision numbers")
    return torch.searchsorted(a.contiguous(), v.contiguous(), side=side)


@_function(*{np.round, np.around}, methods="round")
def _round(want: Any, a: Any, decimals: int = 0) -> Tensor:
    a = _tensor(a)
    if type(decimals) is not int or a.dtype.is_complex:
        raise NotExact("complex numbers")
    if not a.dtype.is_floating_point:
        if decimals < 0 or a.dtype is torch.bool:
            raise NotExact("tens of integers")
        return a.clone()
    if not decimals:
        return torch.round(a)
    scale = ar.number(10.0 ** abs(decimals), a.dtype)
    return torch.round(a * scale) / scale if decimals > 0 else torch.round(a / scale) * scale


@_function(np.nan_to_num)
def _nan_to_num(want: Any, x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Tensor:
    x = _tensor(x)
    if not x.dtype.is_floating_point or not copy:
        raise NotExact("integers or complex numbers")
    return torch.nan_to_num(x, nan, posinf, neginf)


@_function(np.isclose)
def _isclose(want: Any, a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    a, b = _tensor(a), _tensor(b)
    if a.dtype is not b.dtype or a.dtype not in (torch.float32, torch.float64):
        raise NotExact("other dtypes than float32 and float64")
    close = (torch.abs(a - b) <= ar.number(atol, a.dtype) + ar.number(rtol, a.dtype) * torch.abs(b)) & torch.isfinite(b) | (a == b)
    return close | ((a != a) & (b != b)) if equal_nan else close


# ---------------------------------------------------------------- matrices


def _product(fn: Any) -> Any:
    def run(want: Any, a: Any, b: Any) -> Tensor:
        if want.dtype in (torch.bool, torch.float16) or want.dtype.is_complex:
            raise NotExact("booleans, half-precision or complex numbers")
        return fn(as_dtype(_tensor(a), want.dtype), as_dtype(_tensor(b), want.dtype))  # type: ignore[no-any-return]

    return run


def _dot_of(a: Tensor, b: Tensor) -> Tensor:
    if not a.ndim or not b.ndim:
        return a * b
    return torch.tensordot(a, b, ([a.ndim - 1], [max(b.ndim - 2, 0)])) if a.ndim > 2 or b.ndim > 2 else torch.matmul(a, b)


_function(np.dot, methods="dot")(_product(_dot_of))
_function(np.vdot)(_product(lambda a, b: torch.sum(a.reshape(-1) * b.reshape(-1), dtype=a.dtype)))
_function(np.inner)(_product(lambda a, b: a * b if not a.ndim or not b.ndim else torch.tensordot(a, b, ([a.ndim - 1], [b.ndim - 1]))))
_function(np.outer)(_product(lambda a, b: a.reshape(-1, 1) * b.reshape(1, -1)))
_function(np.kron)(_product(torch.kron))


@_function(np.tensordot)
def _tensordot(want: Any, a: Any, b: Any, axes: Any = 2) -> Tensor:
    return _product(lambda x, y: torch.tensordot(x, y, axes))(want, a, b)  # type: ignore[no-any-return]


@_function(np.einsum)
def _einsum(want: Any, subscripts: Any, *operands: Any) -> Tensor:
    if type(subscripts) is not str or want.dtype in (torch.bool, torch.float16) or want.dtype.is_complex:
        raise NotExact("booleans, half-precision or complex numbers")
    return torch.einsum(subscripts, *(as_dtype(_tensor(o), want.dtype) for o in operands))


@_function(np.cross)
def _cross(want: Any, a: Any, b: Any, axis: Any = None) -> Tensor:
    a, b = as_dtype(_tensor(a), want.dtype), as_dtype(_tensor(b), want.dtype)
    if a.dtype is torch.bool or a.shape[-1 if axis is None else axis] != 3 or b.shape[-1 if axis is None else axis] != 3:
        raise NotExact("vectors of other lengths than 3")
    return torch.linalg.cross(a, b, dim=-1 if axis is None else axis)


@_function(np.linalg.norm)
def _norm(want: Any, x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Tensor:
    x = as_dtype(_tensor(x), want.dtype)
    if not x.dtype.is_floating_point or x.dtype is torch.float16:
        raise NotExact("complex or half-precision numbers")
    if ord is None or (ord == 2 and type(axis) is int):
        return torch.sqrt(torch.sum(x * x, _axes(x, axis), keepdim=keepdims))
    one = axis if type(axis) is int else 0 if axis is None and x.ndim == 1 else None
    if one is None:
        raise NotExact("norms of matrices")
    size = torch.abs(x)
    if ord == np.inf:
        return torch.amax(size, one, keepdim=keepdims)
    if ord == -np.inf:
        return torch.amin(size, one, keepdim=keepdims)
    if ord == 1:
        return torch.sum(size, one, keepdim=keepdims)
    if ord == 2:
        return torch.sqrt(torch.sum(x * x, one, keepdim=keepdims))
    raise NotExact("other norms")


def _matrix(fn: Any) -> Any:
    def run(want: Any, a: Any) -> Tensor:
        if not want.dtype.is_floating_point:
            raise NotExact("complex numbers")
        return fn(as_dtype(_tensor(a), want.dtype)).contiguous()  # type: ignore[no-any-return]

    return run


_function(np.linalg.inv, spread=True)(_matrix(torch.linalg.inv))
_function(np.linalg.det, spread=True)(_matrix(torch.linalg.det))
_function(np.linalg.cholesky, spread=True)(_matrix(torch.linalg.cholesky))


@_function(np.linalg.slogdet, spread=True)
def _slogdet(want: Any, a: Any) -> Any:
    return tuple(torch.linalg.slogdet(as_dtype(_tensor(a), want[0].dtype)))


@_function(np.linalg.solve, spread=True)
def _solve(want: Any, a: Any, b: Any) -> Tensor:
    a, b = as_dtype(_tensor(a), want.dtype), as_dtype(_tensor(b), want.dtype)
    if not want.dtype.is_floating_point or b.ndim not in (1, a.ndim):
        raise NotExact("complex numbers")
    return torch.linalg.solve(a, b).contiguous() if b.ndim > 1 else torch.linalg.solve(a, b.unsqueeze(-1)).squeeze(-1)


# ---------------------------------------------------------------- Fourier transforms


def _numbers(want: Any, a: Any) -> Tensor:
    """The operand in the precision of the result: NumPy transforms integers as float64."""
    a = _tensor(a)
    if a.dtype is torch.float16 or not a.is_contiguous():
        raise NotExact("half-precision numbers, or a layout that the result takes over")
    wide = want.dtype in (torch.float64, torch.complex128)
    kinds = (torch.complex128, torch.float64) if wide else (torch.complex64, torch.float32)
    return as_dtype(a, kinds[0] if a.dtype.is_complex else kinds[1])


def _fourier(fn: Any) -> Any:
    return lambda want, a, n=None, axis=-1, norm=None: fn(_numbers(want, a), n, axis, norm).resolve_conj().contiguous()


def _fourier_of_axes(fn: Any, last: tuple[int, ...] | None) -> Any:
    def run(want: Any, a: Any, s: Any = None, axes: Any = last, norm: Any = None) -> Tensor:
        if s is not None and axes is None:
            raise NotExact("sizes without axes")
        return fn(_numbers(want, a), s, axes, norm).resolve_conj().contiguous()  # type: ignore[no-any-return]

    return run


for _one in ("fft", "ifft", "rfft", "irfft"):
    _function(getattr(np.fft, _one))(_fourier(getattr(torch.fft, _one)))
    _function(getattr(np.fft, _one + "2"))(_fourier_of_axes(getattr(torch.fft, _one + "2"), (-2, -1)))
    _function(getattr(np.fft, _one + "n"))(_fourier_of_axes(getattr(torch.fft, _one + "n"), None))


@_function(np.fft.fftshift)
def _fftshift(want: Any, x: Any, axes: Any = None) -> Tensor:
    return torch.fft.fftshift(_tensor(x), axes)


@_function(np.fft.ifftshift)
def _ifftshift(want: Any, x: Any, axes: Any = None) -> Tensor:
    return torch.fft.ifftshift(_tensor(x), axes)


# ---------------------------------------------------------------- questions about kinds


@_function(np.shape)
def _shape_of(want: Any, a: Any) -> Any:
    if not issubclass(type(a), Tensor):
        return want
    return a.shape if type(want) is torch.Size else tuple(a.shape)


@_function(np.ndim)
def _ndim(want: Any, a: Any) -> Any:
    return want


@_function(np.size)
def _size(want: Any, a: Any, axis: Any = None) -> Any:
    if not issubclass(type(a), Tensor):
        return want
    return a.numel() if axis is None else a.shape[axis]


@_function(np.result_type, np.can_cast, np.isscalar, np.iscomplexobj, np.isrealobj)
def _of_kinds(want: Any, *operands: Any) -> Any:
    return want


@_function(np.real)
def _real_part(want: Any, val: Any) -> Tensor:
    if val.dtype.is_complex:
        raise NotExact("complex numbers")
    return val  # type: ignore[no-any-return]


@_function(np.imag)
def _imaginary_part(want: Any, val: Any) -> Tensor:
    if val.dtype.is_complex:
        raise NotExact("complex numbers")
    return torch.zeros_like(val)


__all__ = ["TABLE"]
