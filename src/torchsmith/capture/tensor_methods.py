"""Methods of tensors: a row where a call is something else than one node of the graph.

In: the machine, a tracing tensor, a method's name and arguments. Out: what the call gives. Attributes are in tensor_attrs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..codes import Unsupported
from ..graph import tracing
from ..ir.rows import rows
from . import arrays, overrides, tensor_attrs
from . import protocols as pr
from .protocol import Args, Kwargs, Machine
from .world import MISSING

Tensor = torch.Tensor
TENSOR_METHODS: dict[str, Callable[[Any, Any, Args, Kwargs], Any]] = {}
tensor_method = rows(TENSOR_METHODS, "row")  # what methods of these names mean; MISSING: what other methods do

_VALUES = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero", "equal",
                     "__format__", "__repr__", "__str__", "allclose"})  # fmt: skip
_STATE = frozenset({"backward", "register_hook", "retain_grad", "data_ptr", "storage", "untyped_storage", "share_memory_", "pin_memory",
                    "set_", "resize_as_", "record_stream", "__dlpack__", "apply_", "map_", "map2_", "_typed_storage", "cpu_",
                    "register_post_accumulate_grad_hook", "__reduce_ex__", "__deepcopy__", "to_dense", "module_load",
                    "is_set_to", "is_pinned", "is_shared", "const_data_ptr", "__getstate__"})  # fmt: skip
_ALONE = frozenset({"__len__", "__iter__", "get_device", "__hash__", "is_inference", "is_shared"})  # their rows look at no arguments


def call_method(m: Machine, t: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    """A method of a tensor: a node, a Python value known while capturing, or refused."""
    if m.modes or m.subclasses:
        out = overrides.dispatched(m, "method", name, (t, *args), kwargs)
        if out is not MISSING:
            return out
    found = TENSOR_METHODS.get(name)
    if found is not None and not ((args or kwargs) and name in _ALONE):
        out = found(m, t, args, kwargs)
        if out is not MISSING:
            return out
    if name in _VALUES:
        return m.tensor_value(t, name, f"tensor.{name}()", args, kwargs)
    if name in _STATE:
        raise Unsupported("CAP026", at=m.loc(), detail=f"tensor.{name}()")
    if m.world.tracks:
        args = [m.index_key(a) for a in args]
        kwargs = {k: m.index_key(v) for k, v in kwargs.items()}
    if name == "__getitem__":
        return pr.getitem(m, t, args[0])
    if name == "__setitem__":
        return pr.setitem(m, t, args[0], args[1])
    return m.record("method", name, (t, *args), kwargs)


@tensor_method("numpy")
def _numpy(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    if args or kwargs.keys() - {"force"}:
        return MISSING
    return arrays.numpy_of(m, t, m.truth(kwargs.get("force", False)))


@tensor_method("__array__")
def _array(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    return MISSING if args or kwargs else arrays.numpy_of(m, t)


@tensor_method("as_subclass")
def _as_subclass(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    return overrides.cast(m, t, args[0] if args else kwargs.get("cls"))


@tensor_method("requires_grad_")
def _requires_grad_(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    value = bool(args[0] if args else kwargs.get("requires_grad", True))
    if m.recorder.info(t).requires_grad != value:
        tensor_attrs.set_requires_grad(m, t, value)
    return t


@tensor_method("new")
def _new(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of a torch.Size it makes that many elements, of another sequence a tensor of its numbers; in the graph both are tuples."""
    sizes = args[0] if len(args) == 1 else kwargs.get("size")
    if type(sizes) is not torch.Size:
        return MISSING
    return m.record("method", "new_empty", (t, sizes), {k: v for k, v in kwargs.items() if k != "size"})


@tensor_method("__len__")
def _len(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    return pr.length(m, t)


@tensor_method("__iter__")
def _iter(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    return pr.iterate(m, t)


@tensor_method("get_device")
def _get_device(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    device = tracing.device_of(t)
    return -1 if device.type == "cpu" else device.index or 0


@tensor_method("__hash__")
def _hash(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    return m.call(id, [t], {})


@tensor_method("is_set_to")
def _is_set_to(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    """The same memory, seen in the same way? Of two inputs, which may share theirs in one call and not in another, nothing is said."""
    other: Any = args[0] if args else kwargs.get("tensor")
    if not issubclass(type(other), Tensor):
        return MISSING
    if tracing.storage(t) != tracing.storage(other):
        if m.recorder.info(t).real is not None and m.recorder.info(other).real is not None:
            raise Unsupported("CAP026", at=m.loc(), detail="tensor.is_set_to()")
        return False
    places = [(x.storage_offset(), tuple(x.shape), x.stride()) for x in (t, other)]
    return pr.truth(m, pr.compare(m, "==", *places))


@tensor_method("is_inference")
def _is_inference(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    return m.recorder.is_inference(t)


@tensor_method("is_pinned", "is_shared")
def _is_special_memory(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    """Not what the program makes; what comes from outside may be so in one call and not in another."""
    return MISSING if m.recorder.inputs_in({tracing.storage(t)}) else False


@tensor_method("type")
def _type(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1 and not kwargs and type(args[0]) is type(torch.FloatTensor) and not args[0].is_cuda and args[0].layout is torch.strided:
        return m.record("method", "type", (t, args[0].dtype), {}) if tracing.device_of(t).type == "cpu" else MISSING
    if args or kwargs:
        return MISSING
    return _TYPE_NAMES.get(t.dtype, MISSING)


_TYPE_NAMES = {
    torch.float32: "torch.FloatTensor", torch.float64: "torch.DoubleTensor", torch.float16: "torch.HalfTensor",
    torch.bfloat16: "torch.BFloat16Tensor", torch.int64: "torch.LongTensor", torch.int32: "torch.IntTensor", torch.int16: "torch.ShortTensor",
    torch.int8: "torch.CharTensor", torch.uint8: "torch.ByteTensor", torch.bool: "torch.BoolTensor",
}  # fmt: skip


@tensor_method("__deepcopy__", "__copy__")
def _copy(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    return MISSING
