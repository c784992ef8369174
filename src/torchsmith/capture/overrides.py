"""`__torch_function__`: of objects that are no tensors, of subclasses of Tensor, of modes, inside compiled code and around it.

In: a torch call of the machine with an argument (or under a mode) that takes it over. Out: what the handler gives; handlers are interpreted
as all Python is. Which function, types and arguments torch hands to a handler is asked of torch itself: the call is made with stand-ins
under a mode that stops it. torch's own Python (has_torch_function, handle_torch_function) is interpreted too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._mode_utils import no_dispatch

from ..codes import Unsupported, define
from . import attributes as at
from .protocol import Machine, Row
from .source import Computed
from .world import MISSING

define("CAP061", "a __torch_function__ handler cannot be followed", "nothing to do: Python runs it, between two graphs")

Tensor = torch.Tensor
C: Any = torch._C
_DISABLED = C._disabled_torch_function_impl
_DEFAULT = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
ON, NO_SUBCLASS, OFF = 0, 1, 2


class Overridden(Exception):
    """An argument has a handler; whoever records asks `dispatched`."""


# ---------------------------------------------------------------- the caller's state, while we work

_CALLER = threading.local()


def caller_modes() -> list[Any]:
    """The modes that the program is under, outermost first."""
    known = getattr(_CALLER, "modes", None)
    return known if known is not None else [C._get_function_stack_at(i) for i in range(C._len_torch_function_stack())]


def caller_level() -> int:
    """Which handlers the program's thread has switched off: none (ON), those of subclasses, or all (OFF)."""
    known = getattr(_CALLER, "level", None)
    if known is not None:
        return int(known)
    return ON if C._is_torch_function_enabled() else OFF if C._is_torch_function_all_disabled() else NO_SUBCLASS


def users(modes: list[Any]) -> list[Any]:
    """Those that are the program's own; a default device is none."""
    return [m for m in modes if not isinstance(m, DeviceContext)]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Nothing that we do with the program's tensors reaches its handlers and modes."""
    if getattr(_CALLER, "modes", None) is not None:
        yield
        return
    modes = caller_modes()
    _CALLER.level, _CALLER.modes = caller_level(), modes
    own = bool(users(modes))
    if own:
        for _ in modes:
            C._pop_torch_function_stack()
        for mode in modes:
            if isinstance(mode, DeviceContext):
                C._push_on_torch_function_stack(mode)
    try:
        with C.DisableTorchFunctionSubclass():
            yield
    finally:
        _CALLER.modes = _CALLER.level = None
        if own:
            for _ in range(C._len_torch_function_stack()):
                C._pop_torch_function_stack()
            for mode in modes:
                C._push_on_torch_function_stack(mode)


def without_handlers(call: Callable[..., Any]) -> Callable[..., Any]:
    """A graph's call whose operators reach no handler: they are in the graph already."""

    def run(*args: Any) -> Any:
        with C.DisableTorchFunction():
            return call(*[plain(a) for a in args])

    return run


def set_grad(mode: bool) -> None:
    """Grad mode as it was or will be: no step of the program, so its modes do not hear of it."""
    with C.DisableTorchFunction():
        C._set_grad_enabled(mode)


def plain(value: Any) -> Any:
    """A tensor without the handler of its class."""
    return value.as_subclass(Tensor) if isinstance(value, Tensor) and is_subclass(type(value)) else value


def as_subclass(tensor: Tensor, cls: type) -> Any:
    """For finish: the result as the program's class."""
    with C.DisableTorchFunction():
        return tensor.as_subclass(cls)  # type: ignore[type-var]


# ---------------------------------------------------------------- who takes over


def is_subclass(cls: type) -> bool:
    """A class of tensors whose instances are ordinary tensors with a handler of their own (or torch's for subclasses)."""
    return (
        cls not in (Tensor, torch.nn.Parameter)
        and issubclass(cls, Tensor)
        and not issubclass(cls, torch.nn.parameter.UninitializedTensorMixin)  # type: ignore[attr-defined]
        and getattr(cls, "__torch_dispatch__", None) is Tensor.__torch_dispatch__
        and getattr(cls, "__torch_function__", None) is not _DISABLED
        and not hasattr(cls, "_torchsmith_was")
    )


def handler_of(m: Machine, value: Any) -> bool:
    """Does torch give calls with this argument to the argument's class?"""
    t = type(value)
    if issubclass(t, Tensor):
        info = m.recorder.infos.get(id(value))
        return info is not None and is_subclass(info.cls)
    return not issubclass(t, type) and bool(t.__flags__ & 0x200) and getattr(t, "__torch_function__", _DISABLED) is not _DISABLED


def is_active(m: Machine, *values: Any) -> bool:
    """Is a call with these arguments taken over?"""
    if m.handlers_off == OFF:
        return False
    return bool(m.modes) or (m.handlers_off == ON and any(handler_of(m, v) for v in _flat(values)))


@contextlib.contextmanager
def unseen(m: Machine) -> Iterator[None]:
    """What is called here torch does in C++, where no handler hears of it."""
    before, m.handlers_off = m.handlers_off, OFF
    try:
        yield
    finally:
        m.handlers_off = before


def has_own_handler(m: Machine, tensor: Tensor) -> bool:
    """Are attributes of this tensor a call of the program's code?"""
    if m.modes and m.handlers_off != OFF:
        return True
    if m.handlers_off != ON or not handler_of(m, tensor):
        return False
    cls: Any = m.recorder.info(tensor).cls
    return getattr(cls.__torch_function__, "__func__", None) is not _DEFAULT


def _flat(values: Any) -> Iterator[Any]:
    for v in values:
        if type(v) in (list, tuple):
            yield from _flat(v)
        elif type(v) is dict:
            yield from _flat(v.values())
        else:
            yield v


# ---------------------------------------------------------------- what torch would hand over


class _Told(BaseException):
    def __init__(self, *said: Any) -> None:
        self.said = said


class _Stop(TorchFunctionMode):
    def __torch_function__(self, *said: Any) -> Any:
        raise _Told(*said)


def _tell(probe: type, *said: Any) -> Any:
    raise _Told(*said)


def _probe_class(cls: type, known: dict[type, type]) -> type:
    """A class that stands for one with a handler, and below those that stand for its bases: subclasses come first."""
    if cls not in known:
        bases = tuple(b if b is Tensor else _probe_class(b, known) for b in cls.__bases__ if hasattr(b, "__torch_function__"))
        known[cls] = type("Probe", bases, {"__torch_function__": classmethod(_tell), "was": cls})
    return known[cls]


@contextlib.contextmanager
def tracing_off() -> Iterator[None]:
    """No modes at all: those of tracing are taken off for a while."""
    modes = [C._pop_torch_function_stack() for _ in range(C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            C._push_on_torch_function_stack(mode)


class _StandIns:
    """Stand-ins for the machine's tensors and for objects with a handler, and back."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.back: dict[int, Any] = {}
        self.classes: dict[type, type] = {}
        self.keep: list[Any] = []

    def given(self, value: Any) -> Any:
        t = type(value)
        if issubclass(t, Tensor):
            cls = self.m.recorder.info(value).cls
            made: Any = torch.empty((1,) * value.dim(), dtype=value.dtype)
            if is_subclass(cls):
                made = made.as_subclass(_probe_class(cls, self.classes))
        elif t in (list, tuple):
            return t([self.given(v) for v in value])
        elif t is dict:
            return {k: self.given(v) for k, v in value.items()}
        elif t is slice:
            return slice(self.given(value.start), self.given(value.stop), self.given(value.step))
        elif handler_of(self.m, value):
            made = _probe_class(t, self.classes)()
        else:
            return value
        self.back[id(made)] = value
        self.keep.append(made)
        return made

    def taken(self, value: Any) -> Any:
        t = type(value)
        if id(value) in self.back:
            return self.back[id(value)]
        if t in (list, tuple):
            return t([self.taken(v) for v in value])
        if t is dict:
            return {k: self.taken(v) for k, v in value.items()}
        if t is slice:
            return slice(self.taken(value.start), self.taken(value.stop), self.taken(value.step))
        return getattr(value, "was", value) if issubclass(t, type) and value in self.classes.values() else value


def _told(m: Machine, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """(func, types, args[, kwargs]) as torch hands them to a handler."""
    stand = _StandIns(m)
    with C.DisableTorchFunction(), no_dispatch():
        given, named = stand.given(tuple(args)), stand.given(dict(kwargs))
    level = contextlib.nullcontext() if m.handlers_off else C._EnableTorchFunction()
    try:
        with level, no_dispatch(), _Stop() if m.modes else tracing_off():
            if kind == "method":
                getattr(given[0], target)(*given[1:], **named)
            else:
                target(*given, **named)
    except _Told as told:
        return tuple(stand.taken(x) for x in told.said)
    except Exception as e:  # torch refuses the arguments
        raise Unsupported("CAP061", at=m.loc(), detail=f"{type(e).__name__}: {str(e)[:200]}") from None
    return ()


def dispatched(m: Machine, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the handlers make of a torch call; MISSING where none takes it over."""
    if not is_active(m, *args, *kwargs.values()):
        return MISSING
    said = _told(m, kind, target, args, kwargs)
    return MISSING if not said else _handled(m, *said)


def _handled(m: Machine, func: Any, kinds: Any, *rest: Any) -> Any:
    given = [func, kinds, *rest]
    if m.modes:
        mode = m.modes.pop()
        try:
            out = m.call(at.load_attr(m, mode, "__torch_function__"), given, {})
        finally:
            m.modes.append(mode)
        if out is NotImplemented:
            raise Unsupported("CAP061", at=m.loc(), detail=f"{type(mode).__name__} returns NotImplemented")
        return out
    values = list(_flat([rest[0], rest[1] if len(rest) > 1 and rest[1] else {}]))
    for cls in kinds:
        owner = next((v for v in values if handler_of(m, v) and _class(m, v) is cls), MISSING)
        if owner is MISSING:
            continue
        out = m.call(handler(m, owner), given, {})
        if out is not NotImplemented:
            return out
    raise Unsupported("CAP061", at=m.loc(), detail="all handlers return NotImplemented")


def _class(m: Machine, value: Any) -> type:
    return m.recorder.info(value).cls if issubclass(type(value), Tensor) else type(value)  # type: ignore[no-any-return]


def handler(m: Machine, value: Any) -> Any:
    """value.__torch_function__."""
    if issubclass(type(value), Tensor):
        return at.load_attr(m, _class(m, value), "__torch_function__")
    return at.load_attr(m, value, "__torch_function__")


# ---------------------------------------------------------------- modes


def _mode_at(i: int) -> Any:
    return caller_modes()[i]


def enter(m: Machine) -> None:
    """The modes around the compiled function."""
    modes = caller_modes()
    own = users(modes)
    if not own:
        return
    if len(own) < len(modes) and any(isinstance(x, DeviceContext) for x in modes[modes.index(own[0]) :]):
        raise Unsupported("CAP061", detail="a default device inside of a mode")
    m.device_modes = len(modes) - len(own)
    m.modes = [m.world.wrap(mode, Computed(_mode_at, (modes.index(mode),), ())) for mode in own]
    m.modes_before = list(m.modes)


def changes(m: Machine) -> list[tuple[Any, list[Any], dict[str, Any]]]:
    """What brings the caller's modes to where the program left them."""
    same = 0
    while same < min(len(m.modes), len(m.modes_before)) and m.modes[same] is m.modes_before[same]:
        same += 1
    left: list[Any] = [(C._pop_torch_function_stack, [], {}) for _ in m.modes_before[same:]]
    return left + [(C._push_on_torch_function_stack, [mode], {}) for mode in m.modes[same:]]


def default_device(m: Machine, device: torch.device, method: str) -> Any:
    """`with device:` pushes torch's mode of a default device, and leaving pops; torch does both in C, past the mode's own methods."""
    if method == "__enter__":
        m.modes.append(m.call(DeviceContext, [device], {}))
        return device
    if not m.modes:
        raise Unsupported("CAP039", at=m.loc(), detail="a default device")
    m.modes.pop()
    return None


class Disabled:
    """torch._C.DisableTorchFunctionSubclass, or DisableTorchFunction, while capturing; outside it is that (finish.py)."""

    def __init__(self, level: int) -> None:
        self.level, self.before = level, 0
        self.stands_for = C.DisableTorchFunction if level == OFF else C.DisableTorchFunctionSubclass

    def __enter__(self) -> None:
        raise AssertionError("a row says what entering means")

    def __exit__(self, *exc: object) -> None:
        raise AssertionError("a row says what leaving means")


def rows(row: Callable[..., Callable[[Row], Row]]) -> None:
    """Fill torch_rows' table."""

    @row(C._push_on_torch_function_stack)
    def push(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        m.modes.append(args[0])

    @row(C._pop_torch_function_stack)
    def pop(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not m.modes:
            raise Unsupported("CAP039", at=m.loc(), detail="a mode of torch functions")
        return m.modes.pop()

    @row(C._len_torch_function_stack)
    def length(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return m.device_modes + len(m.modes)

    @row(C._get_function_stack_at)
    def stack_at(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        i = args[0] - m.device_modes
        if not 0 <= i < len(m.modes):
            raise Unsupported("CAP061", at=m.loc(), detail="a mode that is a default device")
        return m.modes[i]

    @row(C._is_torch_function_mode_enabled)
    def mode_enabled(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return bool(m.device_modes + len(m.modes)) and m.handlers_off != OFF

    @row(C._is_torch_function_enabled)
    def enabled(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return m.handlers_off == ON

    @row(C._is_torch_function_all_disabled)
    def all_disabled(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return m.handlers_off == OFF

    @row(C._has_torch_function, C._has_torch_function_unary, C._has_torch_function_variadic)
    def has(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return is_active(m, *args)

    @row(C.DisableTorchFunctionSubclass)
    def no_subclass(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return Disabled(NO_SUBCLASS)

    @row(C.DisableTorchFunction)
    def off(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return Disabled(OFF)

    def enter_disabled(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self = args[0]
        self.before, m.handlers_off = m.handlers_off, max(m.handlers_off, self.level)

    def exit_disabled(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        m.handlers_off = args[0].before
        return False

    row(Disabled.__enter__)(enter_disabled)
    row(Disabled.__exit__)(exit_disabled)


# ---------------------------------------------------------------- subclasses


def cast(m: Machine, tensor: Tensor, cls: Any) -> Tensor:
    """tensor.as_subclass(cls)."""
    if cls is not Tensor and not (isinstance(cls, type) and is_subclass(cls)):
        raise Unsupported("CAP021", at=m.loc(), detail=f"as_subclass({getattr(cls, '__name__', cls)})")
    with unseen(m):
        out: Tensor = m.record("function", torch.ops.aten.alias.default, (tensor,), {})
    m.recorder.info(out).cls = cls
    if cls is not Tensor:
        m.subclasses = True
    return out


__all__ = ["Overridden", "dispatched", "enter", "handler", "undisturbed"]
