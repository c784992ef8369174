"""Attributes of tensors: what is known while capturing is a Python value, what is a tensor becomes a node, the rest is refused."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from ..codes import Unsupported
from ..graph import tracing
from ..ir.rows import rows
from . import attributes as at
from . import overrides, policy
from .attributes import Raised
from .protocol import Machine
from .source import Attr, FixedObject
from .world import MISSING

Row = Callable[[Machine, torch.Tensor], Any]
_TENSORS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data", "grad"})  # attributes that are tensors
ROWS: dict[str, Row] = {}


row = rows(ROWS, "row")


def _plain(name: str) -> Row:
    return lambda m, t: getattr(t, name)


for _n in ("dtype", "ndim", "itemsize", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_sparse_csr", "names", "output_nr", "layout",
           "is_vulkan", "is_ort"):  # fmt: skip
    ROWS[_n] = _plain(_n)
for _n in ("T", "mT", "H", "mH", "real", "imag"):
    ROWS[_n] = (lambda name: lambda m, t: m.record("function", getattr, (t, name), {}))(_n)


@row("shape")
def shape(m: Machine, t: torch.Tensor) -> Any:
    s = t.shape
    return s


@row("data")
def data(m: Machine, t: torch.Tensor) -> Any:
    return m.record("function", getattr, (t, "data"), {})  # unlike detach() it has a version counter of its own


@row("nbytes")
def nbytes(m: Machine, t: torch.Tensor) -> Any:
    return t.numel() * t.element_size()


@row("device")
def device(m: Machine, t: torch.Tensor) -> Any:
    return tracing.device_of(t)


def _is_device(kind: str) -> Row:
    return lambda m, t: tracing.device_of(t).type == kind


for _n, _k in (("is_cuda", "cuda"), ("is_cpu", "cpu"), ("is_meta", "meta"), ("is_mps", "mps"), ("is_xla", "xla"), ("is_xpu", "xpu"),
               ("is_ipu", "ipu"), ("is_hpu", "hpu"), ("is_mtia", "mtia"), ("is_maia", "maia")):  # fmt: skip
    ROWS[_n] = _is_device(_k)


@row("requires_grad")
def requires_grad(m: Machine, t: torch.Tensor) -> Any:
    return m.recorder.info(t).requires_grad


@row("is_leaf")
def is_leaf(m: Machine, t: torch.Tensor) -> Any:
    return m.recorder.info(t).leaf


@row("grad_fn")
def grad_fn(m: Machine, t: torch.Tensor) -> Any:
    info = m.recorder.info(t)
    if not info.requires_grad or info.leaf:
        return None
    raise Unsupported("CAP026", at=m.loc(), detail="grad_fn")


@row("grad")
def grad(m: Machine, t: torch.Tensor) -> Any:
    return m.gradients.read(t)


@row("__class__")
def class_(m: Machine, t: torch.Tensor) -> Any:
    return m.recorder.info(t).cls


@row("_backward_hooks")
def backward_hooks(m: Machine, t: torch.Tensor) -> Any:
    return m.gradients.hooks(t, "_backward_hooks")


@row("_post_accumulate_grad_hooks")
def accumulate_hooks(m: Machine, t: torch.Tensor) -> Any:
    return m.gradients.hooks(t, "_post_accumulate_grad_hooks")


@row("__dict__")
def dict_(m: Machine, t: torch.Tensor) -> Any:
    raise Unsupported("CAP011", at=m.loc(), detail="a tensor's __dict__")


@row("_version", "_cdata", "_base", "_is_view")
def internal(m: Machine, t: torch.Tensor) -> Any:
    raise Unsupported("CAP011", at=m.loc(), detail="internals of a tensor")


def load(m: Machine, t: torch.Tensor, name: str) -> Any:
    """`tensor.name`."""
    if name == "__torch_function__":
        return at.load_attr(m, m.recorder.info(t).cls, name)
    if (m.modes or m.subclasses) and overrides.is_active(m, t):
        cls = m.recorder.info(t).cls
        if issubclass(type(getattr(torch.Tensor, name, None)), types.GetSetDescriptorType) and (name not in ROWS or overrides.has_own_handler(m, t) or name in _TENSORS):
            found = overrides.dispatched(m, "function", operator.attrgetter(name), (t,), {})
            if found is not MISSING:
                return found
    cattr = class_attribute(m, m.recorder.info(t).cls, name)
    own = _users(cattr)
    is_torchs = own is None and (not overrides.is_subclass(m.recorder.info(t).cls) or cattr is class_attribute(m, torch.Tensor, name))
    found = ROWS.get(name) if is_torchs else None
    if found is not None:
        return found(m, t)
    written = m.tensor_attrs.get((id(t), name), MISSING)
    if written is not MISSING:
        return written
    if cattr is None:
        return _own_attribute(m, t, name)
    if not hasattr(type(cattr), "__get__"):
        return _value_of_class(m, t, name, cattr)
    if own is not None:
        return types.MethodType(own, t)
    if issubclass(type(cattr), (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return TensorMethod(t, name)
    if issubclass(type(cattr), staticmethod):
        return cattr.__func__
    cls = m.recorder.info(t).cls
    if issubclass(type(cattr), property) and overrides.is_subclass(cls):
        return m.call(cattr.fget, [t], {})
    if issubclass(type(cattr), classmethod) and overrides.is_subclass(cls):
        return at.load_attr(m, cls, name)
    if issubclass(type(cattr), (classmethod, types.BuiltinFunctionType, type)) and hasattr(torch.Tensor, name):
        return getattr(torch.Tensor, name)
    raise Unsupported("CAP011", at=m.loc(), detail=f"tensor attribute {name}")


class TensorMethod:
    """A method bound to a tracing tensor."""

    __slots__ = ("__name__", "__self__")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.__self__, self.__name__ = tensor, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported("CAP010", detail=f"a tensor's {self.__name__}")  # by a function in C


def class_attribute(m: Machine, cls: type, name: str) -> Any:
    """What the class of a tensor says a name is (None: nothing); a guard notices when a program changes it."""
    cattr = m.found_tensor.get((cls, name), MISSING)
    if cattr is MISSING:
        cattr = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)
        m.found_tensor[cls, name] = cattr
        source = FixedObject(cls, cls.__qualname__)
        if cattr is None:
            m.world.guard(source, "missing", name)
        else:
            m.world.guard(Attr(source, name, "type"), "identity", cattr)
    return cattr


def _users(cattr: Any) -> Any:
    """A method that a program gave to tensors, else None."""
    return cattr if type(cattr) is types.FunctionType and not policy.is_torch_file(cattr.__code__.co_filename) else None


def users_method(m: Machine, t: torch.Tensor, name: str) -> Any:
    """The program's own method of this name (`torch.Tensor.__add__ = ...`), else None."""
    return _users(class_attribute(m, m.recorder.info(t).cls, name))


def _own_attribute(m: Machine, t: torch.Tensor, name: str) -> Any:
    """An attribute the user put on a tensor from outside, or one of a Parameter's class."""
    info = m.recorder.info(t)
    if info.real is not None and info.source is not None:
        d = info.real.__dict__
        if name in d:
            return m.world.wrap(d[name], Attr(info.source, name, "instance"))
        m.world.guard(info.source, "missing", name)
    raise Raised(AttributeError(f"'{info.cls.__name__}' object has no attribute '{name}'"))


def _value_of_class(m: Machine, t: torch.Tensor, name: str, value: Any) -> Any:
    """What a class gives for a name, where the tensor has no attribute of its own."""
    info = m.recorder.info(t)
    if info.real is not None and info.source is not None and name in info.real.__dict__:
        return m.world.wrap(info.real.__dict__[name], Attr(info.source, name, "instance"))
    if info.real is not None and info.source is not None:
        m.world.guard(info.source, "missing", name)
    return m.world.wrap(value, Attr(FixedObject(info.cls, info.cls.__qualname__), name, "type"))


def store(m: Machine, t: torch.Tensor, name: str, value: Any) -> None:
    """`tensor.name = value`."""
    if (m.modes or m.subclasses) and overrides.is_active(m, t) and issubclass(type(getattr(torch.Tensor, name, None)), types.GetSetDescriptorType):
        raise Unsupported("CAP061", at=m.loc(), detail=f"tensor.{name} = ... of a tensor with a handler")
    info = m.recorder.info(t)
    if name == "requires_grad":
        if bool(value) != info.requires_grad:
            set_requires_grad(m, t, bool(value))
        return
    if name == "grad":
        m.gradients.write(t, value)
        return
    if name == "data":
        m.gradients.set_data(t, value)
        return
    if name in ("names", "_grad", "__class__") or name in ROWS:
        raise Unsupported("CAP026", at=m.loc(), detail=f"tensor.{name} = ...")
    m.tensor_attrs[id(t), name] = value
    m.effects.append((setattr, [t, name, value], {}))


def set_requires_grad(m: Machine, t: torch.Tensor, value: bool) -> None:
    info = m.recorder.info(t)
    if value and t._is_view() and not t.requires_grad:
        raise Unsupported("CAP026", at=m.loc(), detail="requires_grad of a view")
    if info.real is not None:
        m.gradients.switch(info)
    try:
        t.requires_grad_(value)
    except RuntimeError as e:
        raise Unsupported("CAP025", at=m.loc(), detail=f"requires_grad_: {e}") from e
    m.recorder.effect_method("requires_grad_", t, (value,))


def setitem(m: Machine, t: torch.Tensor, key: Any, value: Any) -> None:
    """`tensor[key] = value`."""
    r = m.recorder
    if (m.modes or m.subclasses) and overrides.dispatched(m, "function", operator.setitem, (t, key, value), {}) is not MISSING:
        return
    key = m.index_key(key)
    loc = m.loc()
    r.facts.loc = loc
    fx_args = (r.node_of(t), r.fx(key), r.fx(value))
    writes = len(tracing.current().writes)
    try:
        t[key] = value
        r.refuse_inference(writes)
    except Unsupported:
        raise
    except Exception as e:  # eager shall raise it
        raise Unsupported("CAP025", at=loc, detail=f"setitem: {e}") from e
    node = r.graph.call_function(operator.setitem, fx_args)
    node.meta.update(loc=loc, val=None)
