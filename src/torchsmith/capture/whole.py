"""Closing a capture that stands alone, without the Python around it: what export asks of the machine.

In: the machine after the frame returned, and its result. Out: Captured whose recipe is ("flat", row, ...), one row for each leaf of the
result: ("out", i) or ("const", value). A buffer that the program assigned becomes a write into it; a tensor kept on any other object is
refused; other effects (counters, prints) are not part of the program and are named in an event.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import events
from ..codes import Unsupported, define
from ..graph.declared import DeclaredSize
from ..graph.sizes import SymTypes
from . import dispatch, guards, start
from .asked import Asked
from .captured import Captured, Finish
from .finish import _Builder, closed
from .protocol import Machine
from .source import Attr, Source
from .world import DELETED, Track, item_of

define("CAP030", "the program keeps a tensor on an object that an exported program cannot update",
       "register it as a buffer (register_buffer) of the same shape and dtype, or return it")
define("CAP031", "a result of this type cannot leave an exported program", "return tensors, numbers, strings, None and containers of them")
define("CAP032", "an effect on Python objects is not part of the exported program", "nothing to do, if the effect is not needed when it is served")


@dataclass(frozen=True, slots=True)
class WholeGraph:
    """captured.inputs[i] had the value `values[i]`; `spec` is the result's pytree structure; `symbols`: declared name -> symbol."""

    captured: Captured
    values: tuple[Any, ...]
    spec: Any
    symbols: Mapping[str, str]


def capture_whole(fn: types.FunctionType, args: Sequence[Any], declared: Mapping[str, Mapping[int, DeclaredSize]]) -> WholeGraph:
    """Capture `fn(*args)` as one graph. declared: by source ("L['x']"), the dimensions that vary. Raises Unsupported."""
    closing = _Closing()
    with dispatch.capturing():
        captured = start.capture(fn, tuple(args), {}, Asked(dynamic=False, fullgraph=True, declared=declared), closing)
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    call = guards.Call(dict(zip(names, args, strict=True)), fn.__globals__, cells)
    values = tuple(guards.evaluate(s, call) for s in captured.inputs)
    return WholeGraph(captured, values, closing.spec, closing.symbols)


class _Closing:
    """close(machine, result) -> Captured, for start.capture."""

    def __init__(self) -> None:
        self.spec: Any = None
        self.symbols: dict[str, str] = {}

    def __call__(self, m: Machine, result: Any) -> Captured:
        flat, self.spec = pytree.tree_flatten(result)
        self.symbols = {name: value.node.expr.name for name, value in m.recorder.declared_symbols.items()}
        writes = _buffer_writes(m)
        flat = _kept_apart(m, flat, [old for old, _ in writes])
        for old, new in writes:
            m.recorder.record("method", "copy_", (old, new), {})
        b = _Builder(m)
        rows = tuple([_row(b, m, v) for v in flat])
        return closed(m, b, Finish(("flat", *rows)), keep=True)


def _row(b: _Builder, m: Machine, v: Any) -> tuple[str, Any]:
    if issubclass(type(v), torch.Tensor):
        return "out", b.out(m.recorder.info(v).node)
    if type(v) in SymTypes:
        node = m.recorder.fx(v)
        return ("out", b.out(node)) if issubclass(type(node), torch.fx.Node) else ("const", node)
    if type(v) in (int, float, complex, bool, str, type(None)):
        return "const", v
    raise Unsupported("CAP031", at=m.loc(), detail=type(v).__name__)


def _buffer_writes(m: Machine) -> list[tuple[Any, Any]]:
    """(tracing tensor of the buffer, the value assigned to it) for every assigned buffer."""
    found: list[tuple[Any, Any]] = []
    for track in m.world.changed:
        if track.dirty:
            found += _container_writes(m, track)
        for name, value in (track.attrs or {}).items():
            found += _attribute_write(m, track, name, value)
    for _, source, value in m.global_writes.values():
        if any(issubclass(type(x), torch.Tensor) for x in pytree.tree_leaves(value)):
            raise Unsupported("CAP030", at=_line(m, value), detail=_said(source))
        _note(m, _said(source))
    if m.gradients.moved:
        raise Unsupported("CAP030", at=m.loc(), detail="tensor.data = ...")
    for fn, _, _ in m.effects:
        _note(m, f"a call of {getattr(fn, '__name__', fn)}")
    return found


def _said(source: Source) -> str:
    """A place as the exported module's own code names it; it is a cell of the function that calls the module."""
    return re.sub(r"^C\['module'\]", "self", str(source))


def _line(m: Machine, value: Any) -> str:
    """Where a value that is kept was computed: the program's end says nothing of it."""
    for x in pytree.tree_leaves(value):
        if issubclass(type(x), torch.Tensor):
            try:
                loc = m.recorder.node_of(x).meta.get("loc")
            except (KeyError, Unsupported):  # a tensor that no operator made
                continue
            if loc:
                return str(loc)
    return str(m.loc())


def _container_writes(m: Machine, track: Track) -> list[tuple[Any, Any]]:
    is_buffers = issubclass(type(track.source), Attr) and track.source.name == "_buffers" and track.source.via == "instance"  # type: ignore[attr-defined]
    image = track.image.values() if issubclass(type(track.image), dict) else track.image
    if not is_buffers:
        known = {id(m.recorder.real[id(x)].tensor) for x in _real_tensors(track.obj) if id(x) in m.recorder.real}
        if any(issubclass(type(x), torch.Tensor) and id(x) not in known for x in pytree.tree_leaves(list(image))):
            raise Unsupported("CAP030", at=_line(m, list(image)), detail=_said(track.source))
        _note(m, _said(track.source))
        return []
    return [w for name, value in track.image.items() for w in _write(m, track.obj.get(name), value, item_of(track.source, name))]


def _attribute_write(m: Machine, track: Track, name: str, value: Any) -> list[tuple[Any, Any]]:
    if issubclass(type(track.obj), torch.nn.Module) and name in track.obj._buffers:
        return _write(m, track.obj._buffers[name], value, Attr(track.source, name, "buffer"))
    real = getattr(track.obj, "__dict__", {}).get(name)
    if _is_kept(m, real, value):
        return []
    is_unread = issubclass(type(real), torch.Tensor) and id(real) not in m.recorder.real  # a call's own: weight_norm's weight
    if not is_unread and value is not DELETED and any(issubclass(type(x), torch.Tensor) for x in pytree.tree_leaves(value)):
        raise Unsupported("CAP030", at=_line(m, value), detail=f"{_said(track.source)}.{name}")
    _note(m, f"{_said(track.source)}.{name}")
    return []


def _is_kept(m: Machine, real: Any, value: Any) -> bool:
    """Whether an attribute that holds the tensor `real` is assigned the same tensor: `self.table = self.table.to(x.device)`."""
    return id(real) in m.recorder.real and m.recorder.real[id(real)].tensor is value


def _write(m: Machine, real: Any, value: Any, source: Any) -> list[tuple[Any, Any]]:
    """The buffer `real` becomes `value`."""
    if not issubclass(type(value), torch.Tensor) or not issubclass(type(real), torch.Tensor):
        if value is not real:
            raise Unsupported("CAP030", at=_line(m, value), detail=_said(source))
        return []
    old = m.recorder.tensor_input(real, source)
    if old is value:
        return []
    if old.shape != value.shape or old.dtype != value.dtype:
        raise Unsupported("CAP030", at=_line(m, value), detail=f"{_said(source)}: {tuple(old.shape)} becomes {tuple(value.shape)}")
    return [(old, value)]


def _real_tensors(container: Any) -> list[Any]:
    values = list(container.values()) if issubclass(type(container), dict) else list(container)
    return [x for x in pytree.tree_leaves(values) if issubclass(type(x), torch.Tensor)]


def _kept_apart(m: Machine, flat: list[Any], written: list[Any]) -> list[Any]:
    """An assignment leaves the old tensor alone, a write does not: results that are the old one are copied before."""
    held = {t.untyped_storage()._cdata for t in written}
    return [
        m.recorder.record("method", "clone", (v,), {}) if issubclass(type(v), torch.Tensor) and v.untyped_storage()._cdata in held else v for v in flat
    ]


def _note(m: Machine, what: str) -> None:
    events.emit("fallback", code="CAP032", at=m.loc(), detail=what)
