"""A compiled nn.Module: an object of a subclass of the module's own class that shares the module's `__dict__`.

In: a module and Settings. Out: the look-alike. Because parameters, buffers, submodules, hooks and plain attributes are the
module's own dictionaries, everything nn.Module does (state_dict, .to, .train, hooks, functional_call, indexing) works on the
original; only calling goes another way.

    compiled(x):  no hooks -> the Dispatcher of the module's forward;  hooks -> nn.Module.__call__, which calls that Dispatcher
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from . import events
from .capture import _frame, peers
from .capture.dispatch import make_dispatcher
from .capture.state import Settings
from .codes import Unsupported

_GLOBAL_HOOKS = (
    torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks,
)  # fmt: skip
_SET_CLASS = object.__dict__["__class__"].__set__
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class LookAlike:
    """First base of the class of an object that stands for a module."""

    _torchsmith_original: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Made for one object: the module class's own __init_subclass__ is not told."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `type(self)(...)`, as slicing a Sequential does, makes an ordinary module
        return type(cls._torchsmith_original)(*args, **kwargs)

    @property
    def _orig_mod(self) -> Any:
        return type(self)._torchsmith_original

    @property
    def __class__(self) -> Any:
        return type(self)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        """What this becomes, as lazy modules do, the original becomes. A class that derives from this object's own is for it alone."""
        if not issubclass(cls, LookAlike):
            original = self._orig_mod
            original.__class__ = cls
            cls = type(self)._torchsmith_class_for(original)
        _SET_CLASS(self, cls)

    @classmethod
    def _torchsmith_class_for(cls, original: Any) -> type:
        """The class of an object that stands for `original` in the way of this class."""
        raise NotImplementedError


class DisabledModule(LookAlike):
    """What compiler.disable makes of a module: calls of it run as they are."""

    _torchsmith_disable: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self)._torchsmith_disable, (self._orig_mod,)

    @classmethod
    def _torchsmith_class_for(cls, original: Any) -> type:
        return _disabled_class(original, cls._torchsmith_disable)


class CompiledModule(LookAlike):
    """First base of every compiled module's class."""

    __call__ = _frame.module_call
    _torchsmith_settings: Any = None
    _torchsmith_calls: dict[Any, Any]

    @property
    def forward(self) -> Any:
        return _forward_of(type(self))

    @forward.setter
    def forward(self, value: Any) -> None:
        self.__dict__["forward"] = value

    @forward.deleter
    def forward(self) -> None:
        del self.__dict__["forward"]

    @classmethod
    def _torchsmith_class_for(cls, original: Any) -> type:
        return _compiled_class(original, cls._torchsmith_settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        cls = type(self)
        made = compile_module(copy.deepcopy(cls._torchsmith_original, memo), cls._torchsmith_settings)
        memo[id(self)] = made
        return made

    def __copy__(self) -> Any:
        cls = type(self)
        return compile_module(copy.copy(cls._torchsmith_original), cls._torchsmith_settings)

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = type(self)
        s: Settings = cls._torchsmith_settings
        return s.again, (cls._torchsmith_original, *s.pickled())


def _call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
    """Every call that C does not serve directly: the first one, hooks, a forward of the module's own."""
    own, cls = compiled.__dict__, _followed(compiled)
    if any(own[name] for name in _HOOKS) or any(_GLOBAL_HOOKS):
        return torch.nn.Module.__call__(compiled, *args, **kwargs)
    d = _forward_of(cls)
    if "forward" not in own and isinstance(d, _frame.Dispatcher):
        original = cls._torchsmith_original
        cls._torchsmith_forward = (type(original), type(original).forward, d, original)
    return d(*args, **kwargs)


def _followed(compiled: Any) -> Any:
    """The class of `compiled`: another one by now where its original has got another class, as a forward may give it."""
    cls = type(compiled)
    if "_torchsmith_original" in cls.__dict__ and type(cls._torchsmith_original) is not cls.__bases__[1]:
        cls = cls._torchsmith_class_for(cls._torchsmith_original)
        _SET_CLASS(compiled, cls)
    return cls


def _forward_of(cls: Any) -> Any:
    """The Dispatcher of what the original's `forward` is now (an instance may carry its own)."""
    original = cls._torchsmith_original
    fn = original.__dict__.get("forward") or getattr(type(original), "forward", None)
    found = cls._torchsmith_calls.get(fn)
    if found is None:
        made = _dispatcher(original, fn, cls._torchsmith_settings)
        found = cls._torchsmith_calls.setdefault(fn, made)  # another thread may have been first
    return found


def _dispatcher(original: Any, fn: Any, settings: Settings) -> Any:
    bound = original if "forward" not in original.__dict__ else None
    while bound is None and peers.is_disabled(fn):  # this object is marked, not its class
        fn = fn.__dict__.get("_torchdynamo_orig_callable") or fn.__wrapped__
    fn = None if fn is None else peers.original(fn)
    if isinstance(fn, types.MethodType):
        fn, bound = fn.__func__, fn.__self__
    if not isinstance(fn, types.FunctionType):  # TorchScript's modules have no Python code, a traced one's class not even `forward`
        return as_it_is(original.forward, settings, Unsupported("API010", detail=type(original).__name__))
    if peers.is_disabled(fn):
        return as_it_is(original.forward, settings, marked(fn))
    d = make_dispatcher(fn, settings, bound=bound)
    if settings.name is None:
        d.state.label = type(original).__name__
    d.__code__ = fn.__code__  # torch.export reads it
    return functools.update_wrapper(d, fn if bound is None else types.MethodType(fn, bound))  # its signature has no self


def marked(fn: Any) -> Unsupported:
    """Why a function that its class marks is not compiled."""
    return Unsupported("CAP018", detail=f"{fn.__qualname__} is marked with compiler.disable")


def as_it_is(fn: Any, settings: Settings, why: Unsupported) -> Any:
    """`fn`, which runs eagerly; raises `why` under fullgraph."""
    if settings.fullgraph:
        raise why
    events.emit("fallback", code=why.code, at="", detail=why.detail)
    if settings.options.warn_eager:
        events.warn(f"torchsmith: {why} (options={{'warn_eager': False}} or TORCHSMITH_WARN_EAGER=0 silences this.)")
    return fn


def compile_module(module: Any, settings: Settings) -> Any:
    """The compiled look-alike of `module`."""
    if isinstance(module, LookAlike):
        module = module._orig_mod
    return _look_alike(module, _compiled_class(module, settings))


def disabled_module(module: Any, disable: functools.partial[Any]) -> Any:
    """The look-alike of `module` whose calls `disable` keeps from being compiled."""
    if isinstance(module, LookAlike):
        module = module._orig_mod
    return _look_alike(module, _disabled_class(module, disable))


def _compiled_class(module: Any, settings: Settings) -> Any:
    names: dict[str, Any] = {"_torchsmith_settings": settings, "_torchsmith_calls": {}}
    call: Any = type(module).__call__
    if call is not torch.nn.Module.__call__:  # the class has its own idea of a call: compile that one
        names["__call__"] = _own_call(module, call, settings)
    return _class(module, CompiledModule, names)


def _disabled_class(module: Any, disable: functools.partial[Any]) -> Any:
    call = disable(type(module).__call__)
    call.__qualname__ = type(module).__qualname__  # what messages call it
    return _class(module, DisabledModule, {"_torchsmith_disable": disable, "__call__": call})


def _class(module: Any, kind: type, names: dict[str, Any]) -> Any:
    base: Any = type(module)
    names |= {"_torchsmith_original": module, "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base)(base.__name__, (kind, base), names)


def _look_alike(module: Any, cls: Any) -> Any:
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", module.__dict__)
    return made


def _own_call(module: Any, fn: Any, settings: Settings) -> Any:
    if peers.is_disabled(fn):
        as_it_is(fn, settings, marked(fn))
    if peers.is_disabled(fn) or not isinstance(fn, types.FunctionType):
        return lambda self, *args, **kwargs: module(*args, **kwargs)
    d, base = make_dispatcher(fn, settings, bound=module), type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        old = type(self)
        if type(module) is not base and _followed(self) is not old:
            return self(*args, **kwargs)
        return d(*args, **kwargs)

    return call


_frame.setup_module(_GLOBAL_HOOKS, _call)
