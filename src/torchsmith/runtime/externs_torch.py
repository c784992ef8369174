"""Extern calls bound to torch: by libtorch's C shim functions where the schema allows it, else by the operator's Python callable.

In: one extern row of a manifest. Out: the spec that csrc/native/extern.c reads. With host_torch the only users of torch in this room.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import events
from ..codes import Unsupported, define
from ..ir.dtype import DTYPE_ROWS
from ..ir.operators import Number, OperatorRow, Param
from . import _native
from .draws import OWN
from .manifest import ExternRow
from .values_only import NAMESPACE, made_again

define("AOT023", "an operator of libtorch cannot be called without Python: its arguments have no place in libtorch's stable C interface",
       "replace it, or serve the module with torchsmith.compile")

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64, "i32": torch.int32,
    "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
    "c32": torch.complex32, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
}  # fmt: skip
FLOATS = frozenset({"f64", "f32", "bf16", "f16"})

# Operators whose shim function libtorch has exported unchanged since 2.11: base name, all overloads. Symbols are probed when bound.
SHIM_OPS = frozenset({
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_cdist_forward", "_embedding_bag", "_pdist_forward",
    "_scaled_dot_product_flash_attention_for_cpu", "_trilinear", "adaptive_max_pool2d", "adaptive_max_pool3d", "addbmm", "addmm",
    "addmv", "angle", "avg_pool2d", "avg_pool3d", "baddbmm", "bmm", "bucketize", "cat", "cholesky_inverse", "cholesky_solve",
    "convolution", "cummax", "cummin", "cumprod", "cumsum", "gcd", "geqrf", "grid_sampler_3d", "index", "index_put", "index_reduce",
    "kthvalue", "logcumsumexp", "masked_select", "max_pool2d_with_indices", "max_pool3d_with_indices", "max_unpool2d", "max_unpool3d",
    "median", "mm", "mode", "nanmedian", "nonzero", "ormqr", "polar", "searchsorted", "sort", "topk", "triangular_solve",
})  # fmt: skip

SLOT_TENSOR, SLOT_INT, SLOT_FLOAT, SLOT_BOOL = 0, 1, 2, 3
SLOT_KINDS = {"f64": SLOT_FLOAT, "f32": SLOT_FLOAT, "bool": SLOT_BOOL}


class _NoShim(Exception):
    """This call does not fit a shim function; it goes through Python."""


def bind(row: ExternRow, device: str = "cpu") -> tuple[Any, ...]:
    """The spec of one extern call on tensors of this device type. Raises Unsupported("RUN005") when torch has no such operator."""
    tensors = [(DTYPE_ROWS[d], n) for d, n in row.tensors]
    outs = [None if o is None else (DTYPE_ROWS[o[0]], *o[1:]) for o in row.outs]
    planned = row.returned == "planned"
    if row.op in OWN:
        return (1, row.op, OWN[row.op], [_template(a) for a in row.args], None, tensors, outs, planned)
    overload = resolve(row.op, row.loc)
    try:
        symbol, params = shim_call(row, overload, device)
        return (0, row.op, symbol, params, None, tensors, outs, planned)
    except _NoShim:
        pass
    events.emit("extern", name=row.op, via="python", loc=row.loc)
    args = [_template(a) for a in row.args] + [_template(v) for v in row.kwargs.values()]
    return (1, row.op, overload._op, args, tuple(row.kwargs) or None, tensors, outs, planned)


def resolve(op: str, at: str = "") -> Any:
    """"aten.mm.default" -> the OpOverload."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    try:
        return made_again(name) if namespace == NAMESPACE else getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (AttributeError, RuntimeError) as e:
        raise Unsupported("RUN005", at=at, detail=op) from e


# ---------------------------------------------------------------- python


def _enum(kind: str, value: str) -> Any:
    if kind == "device":
        return torch.device(value)
    if kind == "operator":
        return resolve(value)
    if kind == "generator":
        return None
    if kind == "complex":
        return complex(value)
    return getattr(torch, value)


TEMPLATES: dict[str, Callable[..., Any]] = {
    "tensor": lambda i: _native.Slot(SLOT_TENSOR, i),
    "number": lambda i, dtype: _native.Slot(SLOT_KINDS.get(dtype, SLOT_INT), i),
    "str": lambda s: s,
    "dtype": lambda name: DTYPES[name],
    "enum": _enum,
    "list": lambda *items: [_template(i) for i in items],
}


def _template(arg: Any) -> Any:
    """A manifest argument as a Python value with Slots."""
    return TEMPLATES[arg[0]](*arg[1:]) if isinstance(arg, list) else arg


# ---------------------------------------------------------------- shim

Params = Iterator[tuple[str, Any]]


def shim_call(row: ExternRow, overload: Any, device: str = "cpu") -> tuple[str, list[tuple[str, Any]]]:
    """Symbol and parameters of the C function for this call; raises _NoShim when there is none that fits."""
    namespace, base, variant = row.op.split(".") if row.op.count(".") == 2 else ("", "", "")
    if namespace != "aten" or base not in SHIM_OPS:
        raise _NoShim
    if row.returned == "planned":
        variant = "out" if variant == "default" else f"{variant}_out"
    symbol = f"aoti_torch_{device}_{base}" + ("" if variant == "default" else f"_{variant}")
    if not _native.has_symbol(symbol):
        raise _NoShim
    params: list[tuple[str, Any]] = []
    if row.returned == "planned":
        params += [("o", i) for i in range(len(row.outs))]
    for k, a in enumerate(overload._schema.arguments):
        value = row.args[k] if k < len(row.args) else row.kwargs[a.name] if a.name in row.kwargs else _default(a)
        kind = str(a.real_type)
        if kind not in SHIM_TYPES:
            raise _NoShim
        if kind == "number" and not (all(d in FLOATS for d, _ in row.tensors) or isinstance(value, float)):
            raise _NoShim  # the shim takes a double, which would promote integer tensors
        params += SHIM_TYPES[kind](value)
    if row.returned != "planned":
        if len(overload._schema.returns) != len(row.outs) or any(str(r.type) != "Tensor" for r in overload._schema.returns):
            raise _NoShim
        params += [("r", i) for i in range(len(row.outs))]
    return symbol, params


def _default(argument: Any) -> Any:
    value = argument.default_value
    return ["list", *value] if isinstance(value, (list, tuple)) else value


def _tag(value: Any, tag: str) -> Any:
    """The payload of a tagged value; _NoShim for another kind of value."""
    if not isinstance(value, list) or value[0] != tag:
        raise _NoShim
    return value[1]


def _number(value: Any) -> Any:
    if isinstance(value, list):
        _tag(value, "number")
        return _template(value)
    if not isinstance(value, (bool, int, float)):
        raise _NoShim
    return value


def _integer(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, float):
        raise _NoShim
    return value


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list) or value[0] != "list":
        raise _NoShim
    return value[1:]


def _dtype(value: Any) -> int:
    names = {str(t).removeprefix("torch."): n for n, t in DTYPES.items()}
    name = names.get(value[2], "") if isinstance(value, list) and value[0] == "enum" else _tag(value, "dtype")
    if name not in DTYPE_ROWS:
        raise _NoShim
    return int(_native.dtype_number(DTYPE_ROWS[name]))


def _tensors(value: Any) -> Params:
    items = [_tag(v, "tensor") for v in _items(value)]
    yield "L", items
    yield "i", len(items)


def _optional_tensors(value: Any) -> Params:
    items = [-1 if v is None else _tag(v, "tensor") for v in _items(value)]
    yield "M", items
    yield "i", len(items)


def _ints(letter: str) -> Callable[[Any], Params]:
    def params(value: Any) -> Params:
        if value is None:
            yield "0", 0
            yield "i", 0
            return
        items = [_integer(v) for v in _items(value)]
        yield letter, items
        yield "i", len(items)

    return params


def _one(letter: str, read: Callable[[Any], Any]) -> Callable[[Any], Params]:
    def params(value: Any) -> Params:
        if value is None:
            raise _NoShim
        yield letter, read(value)

    return params


def _maybe(letter: str, read: Callable[[Any], Any]) -> Callable[[Any], Params]:
    def params(value: Any) -> Params:
        yield ("0", 0) if value is None else (letter, read(value))

    return params


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(_tag(value, "str"))


# Schema type -> the shim's C parameters.
SHIM_TYPES: dict[str, Callable[[Any], Params]] = {
    "Tensor": _one("h", lambda v: _tag(v, "tensor")),
    "Optional[Tensor]": _maybe("H", lambda v: _tag(v, "tensor")),
    "List[Tensor]": _tensors,
    "List[Optional[Tensor]]": _optional_tensors,
    "int": _one("i", _integer),
    "SymInt": _one("i", _integer),
    "bool": _one("i", _integer),
    "float": _one("d", _number),
    "number": _one("d", _number),
    "str": _one("s", _text),
    "ScalarType": _one("i", _dtype),
    "Optional[int]": _maybe("I", _integer),
    "Optional[SymInt]": _maybe("I", _integer),
    "Optional[float]": _maybe("D", _number),
    "Optional[bool]": _maybe("B", _integer),
    "Optional[str]": _maybe("S", _text),
    "Optional[ScalarType]": _maybe("B", _dtype),
    "List[int]": _ints("a"),
    "List[SymInt]": _ints("a"),
    "List[bool]": _ints("b"),
    "Optional[List[int]]": _ints("A"),
    "Optional[List[SymInt]]": _ints("A"),
}


# ---------------------------------------------------------------- ahead of time


def operator_row(row: ExternRow) -> OperatorRow:
    """The same call as data that a model library carries: a shim function, else the dispatcher. Raises Unsupported("AOT023")."""
    overload = resolve(row.op, row.loc)
    try:
        symbol, params = shim_call(row, overload)
    except _NoShim:
        symbol, params = "", list(stable_call(row, overload))
    name, variant = overload._schema.name, overload._schema.overload_name
    tensors = tuple((d, int(n)) for d, n in row.tensors)
    outs = tuple(("f32", -1) if o is None else (str(o[0]), int(o[1])) for o in row.outs)[: len(overload._schema.returns)]
    said = f"{row.op} at {row.loc or 'an unknown line'}"
    return OperatorRow(name, variant, said, symbol, _version(), tuple(_plain(p) for p in params), tensors, outs, row.returned == "planned")


def _version() -> int:
    """TORCH_ABI_VERSION of the torch that is here."""
    major, minor, patch = (int(n) for n in re.findall(r"\d+", torch.__version__)[:3])
    return major << 56 | minor << 48 | patch << 40


def stable_call(row: ExternRow, overload: Any) -> Params:
    """The arguments for the dispatcher's stable C interface, one for each of the schema."""
    for r in overload._schema.returns:
        if str(r.type) != "Tensor":
            raise Unsupported("AOT023", at=row.loc, detail=f"{row.op} returns {r.type}")
    for k, a in enumerate(overload._schema.arguments):
        value = row.args[k] if k < len(row.args) else row.kwargs[a.name] if a.name in row.kwargs else _default(a)
        kind = str(a.real_type)
        if value is None:
            yield "0", 0
            continue
        inner = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
        try:
            letter, read = STABLE_TYPES[inner]
            yield letter.upper() if inner != kind else letter, read(value)
        except (KeyError, _NoShim):
            raise Unsupported("AOT023", at=row.loc, detail=f"{row.op}: its argument {a.name} is a {kind}") from None


def _plain(param: tuple[str, Any]) -> Param:
    """Letter and payload without Python objects: doubles by their bits, run-time numbers by their place."""
    letter, payload = param
    if letter in "sS":
        return Param(letter, (), payload)
    if letter == "0":
        return Param(letter, ())
    items = payload if isinstance(payload, list) else [payload]
    return Param(letter, tuple(_plain_number(letter, i) for i in items))


def _plain_number(letter: str, value: Any) -> Number:
    if isinstance(value, _native.Slot):
        return Number(value.kind, value.index)
    bits = struct.unpack("<q", struct.pack("<d", value))[0] if letter in "dDfF" else int(value)
    return Number(bits)


def _list_of(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda value: [read(v) for v in _items(value)]


def _enum_number(*kinds: str) -> Callable[[Any], int]:
    """An enumeration's number in libtorch's C interface."""

    def read(value: Any) -> int:
        if not isinstance(value, list) or value[0] != "enum" or value[1] not in kinds or value[2] not in STABLE_ENUMS:
            raise _NoShim
        return STABLE_ENUMS[value[2]]

    return read


# A device is its index (-1, as 32 bits) below its type.
STABLE_ENUMS = {"cpu": 0xFFFFFFFF, "strided": 0, "contiguous_format": 0, "preserve_format": 1, "channels_last": 2, "channels_last_3d": 3}

# Schema type -> letter and reader of the argument; the letter of an optional one is its capital.
STABLE_TYPES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "Tensor": ("h", lambda v: _tag(v, "tensor")),
    "List[Tensor]": ("L", _list_of(lambda v: _tag(v, "tensor"))),
    "List[Optional[Tensor]]": ("M", _list_of(lambda v: -1 if v is None else _tag(v, "tensor"))),
    "int": ("i", _integer),
    "SymInt": ("i", _integer),
    "bool": ("i", _integer),
    "float": ("d", _number),
    "str": ("s", _text),
    "ScalarType": ("i", _dtype),
    "Device": ("i", _enum_number("device")),
    "Layout": ("i", _enum_number("layout")),
    "MemoryFormat": ("i", _enum_number("memory_format")),
    "List[int]": ("a", _list_of(_integer)),
    "List[SymInt]": ("a", _list_of(_integer)),
    "List[bool]": ("a", _list_of(_integer)),
    "List[float]": ("f", _list_of(_number)),
}
