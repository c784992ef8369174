"""NumPy arrays while capturing: each is a tracing tensor with its elements, and a call of NumPy is a few nodes.

In: NumPy's callables, methods and operators with the machine's values. Out: arrays (ArrayValue), NumPy's scalars, or a break (CAP060).
What a call gives (dtype, shape, array or scalar, view or copy) is asked of NumPy itself, on arrays of ones of the same dtypes, sizes
and strides; a row that gives anything else breaks. Errors are NumPy's own: a call that NumPy refuses breaks, and NumPy raises it.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

from ..codes import Unsupported, define
from ..graph import tracing
from ..graph.layout import is_lazy
from . import guards as gd
from . import overrides, tensor_attrs, torch_rows
from .attributes import ATTR_ROWS, SEALED, Raised
from .protocol import Machine
from .source import Computed, FixedObject, Source, TensorOf
from .world import MISSING

define("CAP060", "a use of NumPy has no exact counterpart in tensor code", "nothing to do: NumPy runs it, between two graphs")

Tensor = torch.Tensor
DTYPES: dict[Any, torch.dtype] = {
    np.dtype(n): getattr(torch, n)
    for n in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128")
}
NUMPY_DTYPES = {t: n for n, t in DTYPES.items()}
LONGEST = 4096  # elements of an array that becomes a constant of the graph, and of those that NumPy is asked with
FUNCTION_TYPE: Any = type(np.sum)  # of the functions that NumPy dispatches by their arguments' types
Number = (bool, int, float, complex)
_SYMBOLS: dict[type, Any] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
TABLE: dict[Any, Callable[..., Any]] = {}  # function of NumPy -> the same on tensors; its parameters are those that it knows
UFUNCS: dict[Any, Callable[..., Any]] = {}  # ufunc -> the same on tensors of a loop's dtypes
METHODS: dict[str, Callable[..., Any]] = {}


def _refuse_value(*args: Any, **kwargs: Any) -> Any:
    raise Unsupported("CAP060", detail="a C function looks into an array")


class ArrayValue:
    """An array while capturing; is_scalar: one of NumPy's scalars, which nobody can change; is_fixed: read-only. source: where it came from."""

    __slots__ = ("is_fixed", "is_scalar", "source", "tensor")
    __hash__ = __bool__ = __len__ = __iter__ = __repr__ = __str__ = __format__ = __array__ = _refuse_value
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = __complex__ = _refuse_value

    def __init__(self, tensor: Tensor, is_scalar: bool = False, source: Source | None = None, is_fixed: bool = False) -> None:
        self.tensor, self.is_scalar, self.source, self.is_fixed = tensor, is_scalar, source, is_fixed

    @property
    def dtype(self) -> Any:
        return NUMPY_DTYPES[self.tensor.dtype]

    @property
    def cls(self) -> type:
        return self.dtype.type if self.is_scalar else np.ndarray  # type: ignore[no-any-return]


class ArrayMethod:
    """A method bound to an array."""

    __slots__ = ("__name__", "__self__")

    def __init__(self, array: ArrayValue, name: str) -> None:
        self.__self__, self.__name__ = array, name


def refuse(m: Machine, detail: str) -> Unsupported:
    return Unsupported("CAP060", at=m.loc(), detail=detail)


# ---------------------------------------------------------------- entering and leaving


def tensor_of(values: tuple[Any, ...]) -> Tensor:
    """The tensor over the memory of an array. Raises ValueError where there is none."""
    (array,) = values
    if not _is_captured(array):
        raise ValueError("an array without a tensor")
    return torch.from_numpy(array)


def _is_captured(array: Any) -> bool:
    flags = array.flags
    return array.dtype in DTYPES and bool(flags.writeable) and bool(flags.aligned) and all(s >= 0 and s % array.itemsize == 0 for s in array.strides)


@contextlib.contextmanager
def really() -> Iterator[None]:
    """Torch's functions run, and are not traced."""
    with torch._C.DisableTorchFunction(), no_dispatch():
        yield


@contextlib.contextmanager
def work(m: Machine) -> Iterator[None]:
    """Tensor code that stands for NumPy's: recorded, and no handler or mode of the program's sees it."""
    before, m.handlers_off = m.handlers_off, overrides.OFF
    try:
        with torch_rows.Recording(m):
            yield
    finally:
        m.handlers_off = before


def given(m: Machine, array: Any, source: Source) -> Any:
    """What stands for an array from outside; MISSING for one that no tensor can share its memory with."""
    known = m.arrays.get(id(array))
    if known is not None:
        if known.source != source:
            m.world.guard(source, "alias", known.source)
        return known
    if not _is_captured(array):
        return MISSING
    m.world.guard(source, "type", np.ndarray)
    with really():
        real = tensor_of((array,))
    value = ArrayValue(m.recorder.tensor_input(real, TensorOf(source, tensor_of)), False, source)
    m.arrays[id(array)] = value
    m.world.keep.append(array)
    return value


def given_scalar(m: Machine, scalar: Any, source: Source) -> Any:
    """What stands for a scalar of NumPy that differs from call to call."""
    if scalar.dtype not in DTYPES:
        return MISSING
    m.world.guard(source, "type", type(scalar))
    with really():
        real = scalar_tensor((scalar,))
    return ArrayValue(m.recorder.tensor_input(real, TensorOf(source, scalar_tensor)), True, source)


def scalar_tensor(values: tuple[Any, ...]) -> Tensor:
    """A tensor without dimensions that holds a scalar of NumPy."""
    return torch.from_numpy(np.array(values[0]))


def array_of(tensor: Tensor) -> Any:
    """The array over a tensor's memory, as the program has it. No mode of the program's sees that it is made."""
    with torch._C.DisableTorchFunction():
        return tensor.numpy()


def fixed_of(tensor: Tensor) -> Any:
    """The same, read-only."""
    array = array_of(tensor)
    array.flags.writeable = False
    return array


def scalar_of(tensor: Tensor) -> Any:
    """The scalar that a tensor without dimensions holds."""
    return array_of(tensor)[()]


def numpy_of(m: Machine, tensor: Tensor, force: bool = False) -> ArrayValue:
    """tensor.numpy()."""
    info = m.recorder.info(tensor)
    if overrides.is_active(m, tensor):
        raise refuse(m, "tensor.numpy() of a tensor with a handler")
    if any(b.wraps for b in m.recorder.bodies):
        raise refuse(m, "tensor.numpy() inside of a transform of torch.func")
    if tracing.device_of(tensor).type != "cpu" and not force:
        raise refuse(m, "tensor.numpy() of a tensor on a device")
    if (info.requires_grad and not force) or tensor.dtype not in NUMPY_DTYPES or is_lazy(tensor):
        raise refuse(m, "tensor.numpy() of a tensor that NumPy cannot share memory with")
    with work(m):
        out = tensor.detach()
        return ArrayValue(out.cpu() if tracing.device_of(tensor).type != "cpu" else out)


def tensor_from(m: Machine, array: ArrayValue) -> Tensor:
    """torch.from_numpy(array)."""
    with work(m):
        return array.tensor.detach()


def constant(m: Machine, array: Any) -> Any:
    """A new array that NumPy made of constants: one that the graph makes in each call."""
    if isinstance(array, np.ndarray):
        if m.world.of(array) is not None:
            raise refuse(m, "an array from outside that tensors cannot share memory with")
        dtype = DTYPES.get(array.dtype)
        if type(array) is not np.ndarray or dtype is None or not array.flags.c_contiguous:
            raise refuse(m, f"an array of {array.dtype}" if dtype is None else "an array of a special kind")
        flat = array.ravel()
        shape = tuple(array.shape)
        with work(m):
            if not array.size:
                return ArrayValue(torch.zeros(shape, dtype=dtype, device="cpu"))
            if flat[:1].tobytes() * array.size == flat.tobytes():
                return ArrayValue(torch.full(shape, flat[0].item(), dtype=dtype, device="cpu"))
            if array.size > LONGEST:
                raise refuse(m, f"a constant array of {array.size} elements")
            return ArrayValue(torch.tensor(array.tolist(), dtype=dtype, device="cpu"))
    if type(array) in (list, tuple):
        return type(array)([constant(m, x) for x in array])
    return array


# ---------------------------------------------------------------- asking NumPy


@dataclass(frozen=True, slots=True)
class Want:
    """What NumPy gives: dtype, shape, scalar or array; same: it is the given array of this number; shares: it lies in the memory of those."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_scalar: bool
    same: int = -1
    shares: frozenset[int] = frozenset()
    is_fixed: bool = False


def hint(size: Any) -> Any:
    """A number that stands for one that varies; None where only running tells."""
    return size if type(size) not in _SYMBOLS else size.node.hint


class _Asked:
    """One question: the arrays of ones, and the machine's arrays that they stand for."""

    def __init__(self, m: Machine, spread: bool) -> None:
        self.m, self.spread = m, spread  # spread: matrices are unit matrices, which can be inverted
        self.ones: list[Any] = []
        self.stand_for: list[ArrayValue] = []

    def made(self, value: Any) -> Any:
        t = type(value)
        if t is ArrayValue:
            for k, known in enumerate(self.stand_for):
                if known is value:
                    return self.ones[k]
            return self._array(value)
        if issubclass(t, Tensor):
            return self._tensor(value)
        if t in _SYMBOLS:
            now = hint(value)
            if now is None:
                raise refuse(self.m, "a number that only running tells")
            return _SYMBOLS[t](now)
        if t in (list, tuple, torch.Size):
            return (list if t is list else tuple)([self.made(v) for v in value])
        if t is slice:
            return slice(self.made(value.start), self.made(value.stop), self.made(value.step))
        if t is dict:
            return {k: self.made(v) for k, v in value.items()}
        return value

    def _tensor(self, t: Tensor) -> Any:
        if self.m.recorder.info(t).requires_grad or t.dtype not in NUMPY_DTYPES or tracing.device_of(t).type != "cpu":
            raise refuse(self.m, "a tensor that NumPy cannot share memory with")
        return torch.empty_strided(_numbers(self.m, t.shape), _numbers(self.m, t.stride()), dtype=t.dtype, device="cpu").fill_(1)

    def _array(self, value: ArrayValue) -> Any:
        t = value.tensor
        shape = _numbers(self.m, t.shape)
        n = 1
        for s in shape:
            n *= s
        if n > (1 << 20):
            raise refuse(self.m, "an array of more than a million elements")  # a question must not cost what the answer does
        ones: Any = torch.empty_strided(shape, _numbers(self.m, t.stride()), dtype=t.dtype, device="cpu").fill_(1).numpy()
        if self.spread and ones.ndim >= 2 and ones.shape[-1] == ones.shape[-2]:
            ones[...] = np.eye(ones.shape[-1], dtype=ones.dtype)
        if value.is_fixed:
            ones.flags.writeable = False
        self.ones.append(ones[()] if value.is_scalar else ones)
        self.stand_for.append(value)
        return self.ones[-1]

    def want(self, out: Any) -> Any:
        if isinstance(out, (np.ndarray, np.generic)):
            dtype = DTYPES.get(out.dtype)
            if dtype is None or (isinstance(out, np.ndarray) and type(out) is not np.ndarray):
                raise refuse(self.m, f"a result of {out.dtype}")
            if isinstance(out, np.generic):
                return Want(dtype, (), True)
            same = next((k for k, a in enumerate(self.ones) if a is out), -1)
            shares = frozenset(k for k, a in enumerate(self.ones) if isinstance(a, np.ndarray) and np.may_share_memory(a, out) and _one_memory(a, out))
            return Want(dtype, out.shape, False, same, shares, not out.flags.writeable)
        if isinstance(out, (tuple, list)):
            return out.__class__(*map(self.want, out)) if hasattr(out, "_fields") else out.__class__(map(self.want, out))
        if isinstance(out, Tensor):
            raise refuse(self.m, "a function of NumPy that gives a tensor")
        return out


def _one_memory(a: Any, b: Any) -> bool:
    while isinstance(a.base, np.ndarray):
        a = a.base
    while isinstance(b.base, np.ndarray):
        b = b.base
    return a is b or (a.base is not None and a.base is b.base) or bool(np.shares_memory(a, b))


def _numbers(m: Machine, sizes: Sequence[Any]) -> list[int]:
    found = [hint(s) for s in sizes]
    if None in found:
        raise refuse(m, "a size that only running tells")
    return found


def _raises() -> bool:
    """Does NumPy raise, call or log where the program divides by zero or overflows?"""
    return any(v not in ("ignore", "warn", "print") for v in np.geterr().values())


def ask(m: Machine, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], spread: bool = False) -> tuple[Any, list[ArrayValue]]:
    """What NumPy gives for these arguments, and the arrays among them."""
    if m.modes:
        raise refuse(m, "NumPy under a mode of torch functions")
    guard = Computed(_raises, (), ())
    if _raises():
        raise refuse(m, "numpy.errstate that raises")
    m.world.guard(guard, "equals", False)
    m.recorder.may_be_caught = True  # what the data make NumPy refuse (an index, a singular matrix) it shall refuse in its own words
    asked = _Asked(m, spread)
    with really(), warnings.catch_warnings(record=True) as said, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        given = [asked.made(a) for a in args]
        named = {k: asked.made(v) for k, v in kwargs.items()}
        try:
            want = asked.want(fn(*given, **named))
        except Unsupported:
            raise
        except Exception as e:  # NumPy shall raise it
            raise refuse(m, f"{type(e).__name__}: {e}") from None
    if any(not issubclass(w.category, RuntimeWarning) for w in said):
        raise refuse(m, f"NumPy warns: {said[0].message}")
    return want, asked.stand_for


# ---------------------------------------------------------------- calls


def holds(value: Any) -> bool:
    """Is this, or does it hold, what stands for an array, a tensor or a number that varies?"""
    t = type(value)
    if t is ArrayValue or t in _SYMBOLS or issubclass(t, (Tensor, np.ndarray)):
        return True
    if t in (list, tuple, torch.Size):
        return any(map(holds, value))
    return t is slice and holds((value.start, value.stop, value.step))


def holds_array(value: Any) -> bool:
    return type(value) is ArrayValue or (type(value) in (list, tuple) and any(map(holds_array, value)))


def call(m: Machine, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A function, ufunc or class of NumPy."""
    args, kwargs = [m.index_key(a) for a in args], {k: m.index_key(v) for k, v in kwargs.items()}
    if not any(map(holds, (*args, *kwargs.values()))):
        return constant(m, m.native(fn, args, kwargs))
    name = f"numpy.{getattr(fn, '__name__', fn)}"
    if isinstance(fn, np.ufunc):
        return ufunc(m, fn, args, kwargs)
    if isinstance(fn, type) and issubclass(fn, np.generic) and len(args) == 1 and type(args[0]) is ArrayValue and not kwargs:
        return apply(m, fn, _cast, args, kwargs, name)
    row = TABLE.get(fn)
    if row is None:
        if any(map(holds_array, (*args, *kwargs.values()))) or any(issubclass(type(a), Tensor) for a in args):
            return _look_into(m, getattr(fn, "_implementation", fn), args, kwargs, name)
        return constant(m, m.native(fn, [m.with_numbers(a) for a in args], {k: m.with_numbers(v) for k, v in kwargs.items()}))
    return apply(m, fn, row, args, kwargs, name)


def _look_into(m: Machine, fn: Any, args: list[Any], kwargs: dict[str, Any], name: str) -> Any:
    """A function of NumPy that is written in Python of functions that have rows."""
    if type(fn) is not types.FunctionType:
        raise refuse(m, name)
    try:
        return m.inline(fn, args, kwargs)
    except Raised as r:  # NumPy shall raise it
        raise refuse(m, f"{name}: {r.exc}") from None
    except Unsupported as why:
        raise refuse(m, why.detail if why.detail.startswith("numpy") else f"{name}: {why.detail}") from None


def apply(m: Machine, fn: Callable[..., Any], row: Any, args: list[Any], kwargs: dict[str, Any], name: str) -> Any:
    """A call whose row says what it is on tensors."""
    args = [_as_array(m, a) for a in args]
    kwargs = {k: _as_array(m, v) for k, v in kwargs.items()}
    out = kwargs.pop("out", None)
    if type(out) is tuple and len(out) == 1:
        out = out[0]
    given_out = {} if out is None else {"out": out}
    try:
        bound = inspect.signature(row).bind(None, *args, **kwargs)
    except TypeError as e:
        raise refuse(m, f"{name}: {e}") from None
    want, arrays = ask(m, fn, args, kwargs, spread=getattr(row, "spread", False))
    m.recorder.facts.loc = m.loc()
    values = [tensors(m, v) for v in bound.args[1:]]
    named = {k: tensors(m, v) for k, v in bound.kwargs.items()}
    with work(m):
        try:
            got = row(want, *values, **named)
        except NotExact as e:
            raise refuse(m, f"{name}: {e}") from None
        except (TypeError, OverflowError, ValueError, NotImplementedError, AttributeError, IndexError) as e:
            raise refuse(m, f"{name}: {type(e).__name__}: {e}") from None
        except Raised as r:
            raise refuse(m, f"{name}: {r.exc}") from None
    result = settled(m, want, got, arrays, name)
    if given_out:
        if type(out) is not ArrayValue or type(result) is not ArrayValue:
            raise refuse(m, f"{name} with out=")
        if not isinstance(fn, np.ufunc) and out.tensor.dtype is not result.tensor.dtype:
            raise refuse(m, f"{name} with out= of another dtype")
        ask(m, fn, args, {**kwargs, **given_out})
        with work(m):
            out.tensor.copy_(result.tensor)
        return out
    return result


class NotExact(Exception):
    """What a row cannot do as NumPy does it."""


def _as_array(m: Machine, value: Any) -> Any:
    """Arrays in place of plain ones, and lists in place of images."""
    if issubclass(type(value), np.ndarray):
        return constant(m, value)
    if type(value) in (list, tuple) and any(issubclass(type(v), np.ndarray) for v in value):
        return type(value)([_as_array(m, v) for v in value])
    return value


def tensors(m: Machine, value: Any) -> Any:
    """Tensors in place of arrays, also in lists and tuples."""
    t = type(value)
    if t is ArrayValue:
        return value.tensor
    if issubclass(t, Tensor):
        return numpy_of(m, value).tensor
    if t in (list, tuple) and holds(value):
        return t([tensors(m, v) for v in value])
    return value


def settled(m: Machine, want: Any, got: Any, arrays: list[ArrayValue], name: str) -> Any:
    """The result as NumPy has it; a row that differs from NumPy's answer breaks."""
    if type(want) is Want:
        if not issubclass(type(got), Tensor):
            raise refuse(m, f"{name}: no tensor")
        if got.dtype is not want.dtype or not _same_shape(got.shape, want.shape):
            raise refuse(m, f"{name}: NumPy gives {want.dtype} of shape {want.shape}, tensor code {got.dtype} of {tuple(got.shape)}")
        if want.same >= 0:
            return arrays[want.same]
        memory = tracing.storage(got)
        inside = {k for k, a in enumerate(arrays) if tracing.storage(a.tensor) == memory}
        if not want.shares <= inside:
            raise refuse(m, f"{name}: a view of an array that tensor code would copy")
        if inside and not want.shares:
            with work(m):
                got = got.clone()
        return ArrayValue(got, want.is_scalar, is_fixed=want.is_fixed)
    if isinstance(want, (tuple, list)) and isinstance(got, (tuple, list)) and any(type(w) in (Want, list, tuple) for w in want):
        if len(want) != len(got):
            raise refuse(m, f"{name}: {len(want)} results")
        items = [settled(m, w, g, arrays, name) for w, g in zip(want, got, strict=True)]
        return want.__class__(*items) if hasattr(want, "_fields") else want.__class__(items)
    if _SYMBOLS.get(type(got), type(got)) is not type(want):  # np.size of a tensor is its method
        raise refuse(m, f"{name}: NumPy gives a {type(want).__name__}")
    return got


def _same_shape(got: Sequence[Any], want: Sequence[int]) -> bool:
    return len(got) == len(want) and all(hint(g) in (None, w) for g, w in zip(got, want, strict=True))


# ---------------------------------------------------------------- element-wise functions


def number(value: Any, dtype: torch.dtype) -> Tensor:
    """A number of the program as a tensor without dimensions, converted as NumPy does. Raises OverflowError where it does not fit."""
    if type(value) in _SYMBOLS:
        if dtype not in (torch.int64, torch.float64):
            raise NotExact("a number that varies, in a narrow dtype")
        return torch.full((), value, dtype=dtype, device="cpu")
    array = np.asarray(value)
    if type(value) in Number:
        array = np.array(value, NUMPY_DTYPES[dtype]) if not (type(value) in (float, complex) and not dtype.is_floating_point and not dtype.is_complex) else array
    with np.errstate(invalid="raise", over="ignore"):
        try:
            made = array.astype(NUMPY_DTYPES[dtype])
        except FloatingPointError as e:
            raise NotExact(str(e)) from None
    return torch.full((), made.item(), dtype=dtype, device="cpu")


def as_dtype(value: Any, dtype: torch.dtype) -> Tensor:
    """A tensor, a number or a nested list of both, converted to a dtype."""
    if issubclass(type(value), Tensor):
        return value if value.dtype is dtype else value.to(dtype)
    if type(value) in (list, tuple):
        if holds(value):
            return torch.stack([as_dtype(v, dtype) for v in value])
        made = np.asarray(value)
        if made.size > LONGEST or not made.size:
            raise NotExact("a long list")
        return torch.tensor(made.astype(NUMPY_DTYPES[dtype]).tolist(), dtype=dtype, device="cpu")
    return number(value, dtype)


def operand_type(m: Machine, value: Any) -> Any:
    """An operand's dtype; Python's numbers have none of their own (NEP 50) and are their types."""
    t = type(value)
    if t is ArrayValue:
        return value.dtype
    if issubclass(t, Tensor):
        return NUMPY_DTYPES.get(value.dtype) or np.dtype(object)
    if isinstance(value, np.generic):
        return value.dtype
    if t is bool or t is torch.SymBool:
        return np.dtype(bool)
    if t in (int, float, complex):
        return t
    if t in _SYMBOLS:
        return _SYMBOLS[t]
    if t in (list, tuple) and not any(issubclass(type(v), Tensor) for v in value):
        want, _ = ask(m, np.asarray, [value], {})
        return NUMPY_DTYPES[want.dtype]
    raise refuse(m, f"an operand of type {t.__name__}")


def ufunc(m: Machine, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A ufunc: operands are converted to the dtypes of the loop that NumPy picks."""
    name = f"numpy.{fn.__name__}"
    row = UFUNCS.get(fn)
    if row is None or len(args) < fn.nin:
        raise refuse(m, name)
    if fn is np.power and _is_half(m, *args[:2]):
        row = lambda kinds, x, half: UFUNCS[np.sqrt](kinds[:1], x)  # NumPy's own way there
    if len(args) == fn.nin + 1 and "out" not in kwargs and fn.nout == 1:
        kwargs = {**kwargs, "out": args[-1]}
        args = args[:-1]
    args = [_as_array(m, a) for a in args]
    asked = kwargs.get("dtype")
    try:
        loop = fn.resolve_dtypes((*(operand_type(m, a) for a in args), *(None,) * fn.nout), **({} if asked is None else {"signature": (None,) * fn.nin + (np.dtype(asked),)}))
        kinds = [DTYPES[d] for d in loop]
    except (TypeError, KeyError) as e:
        raise refuse(m, f"{name}: {e}") from None

    def run(want: Any, *operands: Any, dtype: Any = None) -> Any:
        return row(kinds, *(as_dtype(x, k) for x, k in zip(operands, kinds, strict=False)))

    return apply(m, fn, run, args, kwargs, name)


def _is_half(m: Machine, base: Any, exponent: Any) -> bool:
    """NumPy looks at exponents that are one number: some have a way of their own, which is another one for scalars."""
    if type(exponent) is ArrayValue and not exponent.tensor.dim() and exponent.tensor.is_floating_point():
        raise refuse(m, "a power whose exponent only running tells")
    if type(base) is ArrayValue and base.tensor.dtype is torch.bool:
        raise refuse(m, "a power of booleans")
    if type(exponent) in (ArrayValue, list, tuple) or type(exponent) in _SYMBOLS or isinstance(exponent, np.ndarray) or exponent != 0.5:
        return False
    if type(base) is not ArrayValue or base.is_scalar:
        raise refuse(m, "the root of a scalar")
    if base.tensor.dtype is torch.float16:
        raise refuse(m, "the root of half-precision numbers")
    return base.tensor.is_floating_point() or base.tensor.is_complex()


_BINARY: dict[str, Any] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": np.true_divide, "//": np.floor_divide, "%": np.remainder, "**": np.power, "@": np.matmul,
    "<<": np.left_shift, ">>": np.right_shift, "&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor,
    "<": np.less, "<=": np.less_equal, "==": np.equal, "!=": np.not_equal, ">": np.greater, ">=": np.greater_equal,
}  # fmt: skip
_UNARY: dict[str, Any] = {"-": np.negative, "+": np.positive, "~": np.invert}


def binary(m: Machine, sign: str, a: Any, b: Any) -> Any:
    """`a sign b` where one of them is an array, also in place and for comparisons."""
    in_place = sign not in _BINARY
    fn = _BINARY[sign.removesuffix("=") if in_place else sign]
    a, b = m.index_key(a), m.index_key(b)
    for x in (a, b):
        if type(x) is not ArrayValue and not (type(x) in (*Number, list, tuple) or type(x) in _SYMBOLS or isinstance(x, (np.generic, np.ndarray))):
            raise refuse(m, f"an array {sign} {type(x).__name__}")
    if in_place and type(a) is ArrayValue and not a.is_scalar:
        return call(m, fn, [a, b], {"out": a})
    return call(m, fn, [a, b], {})


def unary(m: Machine, sign: str, a: ArrayValue) -> Any:
    return call(m, _UNARY[sign], [a], {})


# ---------------------------------------------------------------- items


def index(m: Machine, a: ArrayValue, key: Any) -> Any:
    """An array's key as torch's."""
    items = list(key) if type(key) is tuple else [key]
    out: list[Any] = []
    advanced: list[int] = []
    arrays = integers = 0
    for k, item in enumerate(items):
        item = m.index_key(item)
        t = type(item)
        if isinstance(item, (list, np.ndarray)):
            item = call(m, np.asarray, [item], {})
            t = type(item)
        if isinstance(item, np.integer):
            item, t = int(item), int
        if t is ArrayValue:
            tensor = item.tensor
            if not tensor.dim() and (len(items) > 1 or a.tensor.dim() != 1 or tensor.dtype is torch.bool):
                raise refuse(m, "an array without axes as an index")
            if tensor.dtype is not torch.bool:
                with work(m):
                    tensor = as_dtype(tensor, torch.int64)
            out.append(tensor)
            arrays += 1
            advanced.append(k)
        elif t in (int, torch.SymInt):
            out.append(item)
            integers += 1
            advanced.append(k)
        elif t is slice:
            parts = [int(p) if isinstance(p, np.integer) else p for p in (item.start, item.stop, item.step)]
            if any(type(p) not in (int, torch.SymInt, type(None)) for p in parts) or (type(parts[2]) is int and parts[2] < 0):
                raise refuse(m, "a slice that goes backwards" if type(parts[2]) is int else "a slice of arrays")
            out.append(slice(*parts))
        elif item is None or item is Ellipsis:
            out.append(item)
        else:
            raise refuse(m, f"a {t.__name__} as an index")
    if arrays and integers and advanced != list(range(advanced[0], advanced[-1] + 1)):
        raise refuse(m, "integers and arrays as indices, apart from each other")
    return tuple(out) if type(key) is tuple else out[0]


def getitem(m: Machine, a: ArrayValue, key: Any) -> Any:
    """`array[key]`."""
    if a.is_scalar and key != ():
        raise refuse(m, "an index of a scalar")
    keys = index(m, a, key)
    want, arrays = ask(m, operator.getitem, [a, key if type(key) is not list else list(key)], {})
    if type(keys) is torch.Tensor and not keys.dim():
        with work(m):
            got = a.tensor[keys.reshape(1)].reshape(())
    else:
        got = m.record("function", operator.getitem, (a.tensor, keys), {})
    return settled(m, want, got, list(arrays), "an index")


def setitem(m: Machine, a: ArrayValue, key: Any, value: Any) -> None:
    """`array[key] = value`."""
    if a.is_scalar:
        raise refuse(m, "an item of a scalar")
    value = _as_array(m, m.index_key(value))
    if not holds(value) and type(value) not in (*Number, list, tuple) and not isinstance(value, np.generic):
        raise refuse(m, f"a {type(value).__name__} as an item")
    keys = index(m, a, key)
    ask(m, operator.setitem, [a, key, value], {})
    with work(m):
        try:
            new = as_dtype(tensors(m, value), a.tensor.dtype)
        except (NotExact, OverflowError, TypeError, ValueError) as e:
            raise refuse(m, f"an item: {e}") from None
    if tracing.storage(new) == tracing.storage(a.tensor):  # NumPy reads all of it before it writes
        new = m.record("method", "clone", (new,), {})
    tensor_attrs.setitem(m, a.tensor, keys, new)


def length(m: Machine, a: ArrayValue) -> Any:
    if not a.tensor.dim():
        raise refuse(m, "len() of an array without axes")
    return a.tensor.shape[0]


def iterate(m: Machine, a: ArrayValue) -> Iterator[Any]:
    n = length(m, a)
    if type(n) is not int:
        m.recorder.facts.loc = m.loc()
        n = int(n)
    return iter([getitem(m, a, i) for i in range(n)])


def value_of(m: Machine, a: ArrayValue, method: str) -> Any:
    """What Python asks of an array's elements: as of a tensor's."""
    if m.modes:
        raise refuse(m, "NumPy under a mode of torch functions")
    return m.tensor_value(a.tensor, method, f"the value of an array ({method})")


# ---------------------------------------------------------------- attributes and methods


ATTRIBUTES: dict[str, Callable[[Any, ArrayValue], Any]] = {
    "shape": lambda m, a: tuple(a.tensor.shape), "dtype": lambda m, a: a.dtype, "ndim": lambda m, a: a.tensor.dim(),
    "size": lambda m, a: a.tensor.numel(), "itemsize": lambda m, a: a.dtype.itemsize,
    "nbytes": lambda m, a: a.tensor.numel() * a.dtype.itemsize, "strides": lambda m, a: tuple(s * a.dtype.itemsize for s in a.tensor.stride()),
    "__class__": lambda m, a: a.cls,
}  # fmt: skip


def _part(t: torch.Tensor, name: str) -> torch.Tensor:
    return torch.zeros_like(t) if name == "imag" and not t.is_complex() else getattr(t, name)


def load_attr(m: Machine, a: ArrayValue, name: str) -> Any:
    """`array.name`."""
    found = ATTRIBUTES.get(name)
    if found is not None:
        return found(m, a)
    if name == "T":
        return method(m, a, "transpose", [], {})
    if name in ("real", "imag", "mT"):
        return apply(m, operator.attrgetter(name), lambda want, t: _part(t, name), [a], {}, name)
    if not hasattr(a.cls, name):
        raise Raised(AttributeError(f"'{'numpy.' if not a.is_scalar else ''}{a.cls.__name__}' object has no attribute '{name}'"))
    if callable(getattr(a.cls, name)):
        return ArrayMethod(a, name)
    raise refuse(m, f"an array's {name}")


_SIGNS = {f"__{n}__": s for n, s in (
    ("add", "+"), ("sub", "-"), ("mul", "*"), ("truediv", "/"), ("floordiv", "//"), ("mod", "%"), ("pow", "**"), ("matmul", "@"), ("lshift", "<<"),
    ("rshift", ">>"), ("and", "&"), ("or", "|"), ("xor", "^"), ("lt", "<"), ("le", "<="), ("eq", "=="), ("ne", "!="), ("gt", ">"), ("ge", ">="),
    ("iadd", "+="), ("isub", "-="), ("imul", "*="), ("itruediv", "/="))}  # fmt: skip


def method(m: Machine, a: ArrayValue, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`array.name(...)`."""
    if name in ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__complex__") and not args and not kwargs:
        return value_of(m, a, name)
    if name == "__getitem__":
        return getitem(m, a, *args)
    if name == "__setitem__":
        return setitem(m, a, *args)
    if name == "__len__":
        return length(m, a)
    if name == "__iter__":
        return iterate(m, a)
    if name in _SIGNS and len(args) == 1:
        return binary(m, _SIGNS[name], a, args[0])
    row = METHODS.get(name)
    if row is None or (name in _WRITES and a.is_scalar):
        raise refuse(m, f"{name}() of an array")
    args, kwargs = [m.index_key(x) for x in args], {k: m.index_key(v) for k, v in kwargs.items()}
    fn = operator.methodcaller  # the name, called on what stands for the array

    def ask_method(array: Any, *rest: Any, **named: Any) -> Any:
        return fn(name, *rest, **named)(array)

    return apply(m, ask_method, row, [a, *args], kwargs, f"{name}() of an array")


_WRITES = frozenset({"fill", "sort", "put", "partition", "resize", "setfield", "setflags", "itemset"})


def _cast(want: Any, a: Any) -> Any:
    return as_dtype(a, want.dtype)


# ---------------------------------------------------------------- between torch and NumPy


def _given_to_torch(fn: Any, shares: bool) -> None:
    """torch.from_numpy and the like: of an array a tensor over its memory, or with a copy of it."""

    def run(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        args = [m.index_key(a) for a in args]
        data = args[0] if args else None
        if data is not None and issubclass(type(data), np.ndarray):
            args[0] = data = constant(m, data)
        if type(data) is ArrayValue:
            if fn is torch.from_numpy and data.is_scalar:
                raise refuse(m, "torch.from_numpy() of a scalar")
            tensor = tensor_from(m, data)
            if fn is torch.from_numpy:
                return tensor
            if overrides.is_active(m, args, kwargs):
                raise refuse(m, f"torch.{fn.__name__}() of an array under a mode of torch functions")
            if fn is torch.asarray and (kwargs.keys() - {"dtype"} or data.is_scalar):
                raise refuse(m, "torch.asarray() with options")
            if shares and data.is_scalar:
                with work(m):
                    tensor = tensor.clone()
            if fn is torch.asarray:
                fn_now, args[0] = torch.as_tensor, tensor
                return m.record("function", fn_now, tuple(args), kwargs)
            if fn is torch.tensor:
                return _copied(m, tensor, *args[1:], **kwargs)
            args[0] = tensor
        elif fn in (torch.tensor, torch.as_tensor) and args and type(args[0]) is deque and m.world.of(args[0]) is None:
            args[0] = list(args[0])
        elif any(map(holds_array, args)):
            raise refuse(m, f"{fn.__name__}() of a list of arrays")
        if fn is torch.from_numpy:
            raise refuse(m, "torch.from_numpy() of something else than an array")
        if fn is torch.asarray and issubclass(type(data), torch.Tensor) and kwargs.get("requires_grad") is not None:
            wanted = m.truth(kwargs["requires_grad"])
            out = m.record("function", fn, tuple(args), {k: v for k, v in kwargs.items() if k != "requires_grad"})
            if not wanted and m.recorder.info(out).requires_grad and not m.attr(out, "is_leaf"):
                return m.call(m.attr(out, "detach"), [], {})
            return m.call(m.attr(out, "requires_grad_"), [wanted], {})
        if len(args) < 2 and kwargs.get("dtype") is None:
            kwargs = kwargs | _dtype_of_scalars(args[0] if args else kwargs.get("data"))
        return m.record("function", fn, tuple(args), kwargs)

    torch_rows.row(fn)(run)


def _dtype_of_scalars(data: Any) -> dict[str, torch.dtype]:
    """The dtype that torch.tensor() gives numbers of which some are NumPy's, as its keyword; empty for Python's alone."""

    def has(data: Any, kind: type) -> bool:
        return any(has(v, kind) for v in data) if isinstance(data, (list, tuple)) else isinstance(data, kind)

    def plain(data: Any) -> Any:
        return [plain(v) for v in data] if isinstance(data, (list, tuple)) else _SYMBOLS.get(type(data), lambda: data)()

    if not has(data, np.generic) or has(data, Tensor):
        return {}
    try:
        with really():
            return {"dtype": torch.tensor(plain(data), device="cpu").dtype}
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch's, when the call is recorded
        return {}


@torch_rows.row(np.errstate)
def _errstate(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Compiled code never warns of floating-point numbers."""
    if args or any(v not in ("ignore", "warn", "print") for v in kwargs.values()):
        raise refuse(m, "numpy.errstate that raises")
    return m.call(contextlib.nullcontext, [], {})


@torch_rows.row(np.geterr)
def _geterr(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise refuse(m, "numpy.geterr()")  # what is set may change between two calls


def _copied(m: Machine, tensor: Tensor, *args: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False) -> Tensor:
    """torch.tensor(array)."""
    if args or pin_memory:
        raise refuse(m, "torch.tensor() with options")
    with work(m):
        out = tensor.to(dtype=dtype or tensor.dtype, device=device or gd.default_device() or "cpu", copy=True, memory_format=torch.contiguous_format)
        return out.requires_grad_() if requires_grad else out


_given_to_torch(torch.from_numpy, True)
_given_to_torch(torch.as_tensor, True)
_given_to_torch(torch.asarray, True)
_given_to_torch(torch.tensor, False)

ATTR_ROWS[ArrayValue] = load_attr
ATTR_ROWS[ArrayMethod] = lambda m, method, name: method.__name__ if name == "__name__" else _no_attribute(m, name)
SEALED.update((ArrayValue, ArrayMethod))


def _no_attribute(m: Machine, name: str) -> Any:
    raise refuse(m, f"{name} of a method of an array")


__all__ = ["ArrayMethod", "ArrayValue", "FixedObject", "ask", "call", "method"]
