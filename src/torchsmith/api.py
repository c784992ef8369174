"""The front door: `compile` for functions, methods, modules, classes and other callables; `explain`, dynamic marks.

In: a callable and torch.compile's arguments. Out: a callable that looks like it. Wires the rooms, does nothing itself.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from . import compiler as _compiler  # noqa: F401  (sets what C asks under a stance, under other tracers, of discarded parameters)
from .backends.registry import resolve_backend
from .capture import _frame, peers
from .capture.dispatch import make_dispatcher
from .capture.state import ConstraintViolation, RecompileLimitHit, Settings
from .codes import BackendFailed, Unsupported
from .compiled_module import CompiledModule, as_it_is, compile_module, marked
from .debug.folders import start_folders
from .options import CONFIG, for_backend, from_environment, from_user, is_disabled, wants_folders
from .runtime.toolchain import features_of

__all__ = [
    "BackendFailed", "ConstraintViolation", "RecompileLimitHit", "Unsupported", "compile", "explain", "mark_dynamic", "mark_static",
    "mark_static_address", "mark_unbacked", "maybe_mark_dynamic",
]  # fmt: skip


def compile(
    model: Any = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    disable: bool = False,
    recompile_limit: int | None = None,
    isolate_recompiles: bool = False,
    shapes_spec: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a function, method, nn.Module, class or other callable; without `model` a decorator.

    fullgraph: raise `Unsupported` instead of running what cannot be captured as it is.
    dynamic: True: sizes of inputs are symbols from the start; False: never; None: those that change.
    backend: "inductor" (torchsmith's own compiler), "eager", "aot_eager", a registered name, or a callable
        `(GraphModule, example_inputs) -> callable`; None: what compiler.set_default_backend chose, else "inductor".
    mode, options: see torchsmith.options; not both.
    name: what logs and profiles call it.
    disable: return `model` as it is.
    recompile_limit: compilations kept for one callable (None: compiler.config's, 8); then it runs as it is (fullgraph: RecompileLimitHit).
    isolate_recompiles: accepted; each `compile` call has compilations of its own in any case.
    shapes_spec: parameter name -> dimensions (an int, or an iterable of ints) that are dynamic from the start.
    """
    if model is None:
        return lambda m: compile(
            m, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options, name=name, disable=disable,
            recompile_limit=recompile_limit, isolate_recompiles=isolate_recompiles, shapes_spec=shapes_spec,
        )  # fmt: skip
    if mode is not None and options is not None:
        raise RuntimeError("Either mode or options can be specified, but both can't be specified at the same time.")
    for said, value in (("fullgraph", fullgraph), ("disable", disable), ("isolate_recompiles", isolate_recompiles)):
        if not isinstance(value, bool):
            raise TypeError(f"{said} is True or False, not {value!r}")
    if dynamic is not None and not isinstance(dynamic, bool):
        raise TypeError(f"dynamic is True, False or None, not {dynamic!r}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a string, not {name!r}")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict, not {type(options).__name__}")
    if not callable(model) and not isinstance(model, classmethod):
        raise TypeError(f"torchsmith.compile takes a callable, not {type(model).__name__}")
    ours, theirs = for_backend(options or {})
    chosen = resolve_backend(backend, mode, theirs)
    settings = Settings(
        compile_graph=_compile_graph,
        options=from_user(mode, options) if chosen.dialect == "native" else from_user(None, ours),
        backend=chosen,
        fullgraph=fullgraph,
        dynamic=_default_dynamic() if dynamic is None else dynamic,
        recompile_limit=_checked_limit(CONFIG.recompile_limit if recompile_limit is None else recompile_limit),
        name=name,
        shapes=_checked_spec(shapes_spec, model),
        again=_compile_pickled,
    )
    if settings.options.trace_enabled and "trace.enabled" in (options or {}):
        start_folders()
    features_of(settings.options)  # a processor that nobody knows is an error here, not a reason to run eagerly
    if disable or is_disabled():
        return model
    return _compile_with(model, settings)


def _compile_with(model: Any, settings: Settings) -> Any:
    return next(make for holds, make in _KINDS if holds(model))(model, settings)


def _compile_pickled(
    model: Any, options: Any, backend: Any, fullgraph: bool, dynamic: bool | None, recompile_limit: int, name: str | None
) -> Any:
    """What unpickling a compiled callable calls: the original, compiled here."""
    settings = Settings(_compile_graph, options, backend, fullgraph, dynamic, recompile_limit, name, again=_compile_pickled)
    return _compile_with(model, settings)


def _compile_graph(*args: Any, **kwargs: Any) -> Any:
    """The pipeline, looked up when it is needed: `import torchsmith.api` stays light."""
    from . import pipeline

    return pipeline.compile_graph(*args, **kwargs)


def _default_dynamic() -> bool | None:
    """What compiler.config says of sizes."""
    return True if not CONFIG.assume_static_by_default else None if CONFIG.automatic_dynamic_shapes else False


def _checked_limit(limit: int) -> int:
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"recompile_limit must be a positive integer, not {limit!r}")
    return limit


def _checked_spec(spec: Mapping[str, Any] | None, model: Any) -> dict[str, set[int]] | None:
    if spec is None:
        return None
    if not isinstance(spec, Mapping):
        raise TypeError(f"shapes_spec is a dict from parameter names to dynamic dimensions, not {type(spec).__name__}")
    code = getattr(_python_function(model), "__code__", None)
    if code is not None:
        known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        unknown = [k for k in spec if k not in known]
        if unknown:
            raise ValueError(f"shapes_spec names {unknown[0]!r}; the parameters are {', '.join(known)}")
    dims = {k: {v} if isinstance(v, int) else v for k, v in spec.items()}
    for k, v in dims.items():
        if not isinstance(v, Iterable) or not all(isinstance(d, int) and d >= 0 for d in v):
            raise TypeError(f"shapes_spec[{k!r}] is a dimension (0, 1, ...) or several, not {spec[k]!r}")
    return {f"L['{k}']": set(v) for k, v in dims.items()}


def _python_function(model: Any) -> Any:
    """The function that is compiled for `model`, where it is one."""
    found = model.forward if isinstance(model, torch.nn.Module) else model
    return getattr(found, "__func__", found)


# ---------------------------------------------------------------- one row for each kind of callable


def _dress(d: Any, like: Any) -> Any:
    """Name, docs, signature, code (which torch.export reads) and attributes of what was compiled."""
    functools.update_wrapper(d, like)
    if hasattr(like, "__code__"):
        d.__code__ = like.__code__
    if "__name__" not in d.__dict__:
        d.__name__ = d.__qualname__ = type(like).__name__
    return d


def _ahead(d: Any, like: Any, settings: Settings) -> Any:
    """`d.aot_compile((args, kwargs))` compiles one kind of call ahead of time."""
    d.aot_compile = functools.partial(_compile_ahead, like, settings)
    return d


def _compile_ahead(fn: Any, settings: Settings, example_inputs: Any) -> Any:
    """`fn` for calls like the example, (args, kwargs): an object that `save_compiled_function(path)` writes as a package, and
    compiler.load_compiled_function reads."""
    from .aot.functions import compile_function

    if getattr(settings.backend, "dialect", "native") != "native":
        raise RuntimeError("aot_compile writes packages, which torchsmith's own compiler makes: compile with backend='inductor'")
    return compile_function(fn, settings.options, settings.dynamic, example_inputs)


def _original(fn: Any) -> Any:
    """What torch.compile or compiler.disable wrapped: what was asked for last holds. `fn` itself where neither did."""
    if not isinstance(fn, types.FunctionType):
        return fn
    return fn.__wrapped__ if fn.__dict__.get("_torchsmith_disabled") else peers.original(fn)  # type: ignore[attr-defined]


def _is_row(fn: Any) -> bool:
    """A function of torch, or class method (autograd.Function's apply), that capture knows by a row: what is compiled is a call of it."""
    fn = fn.__func__ if isinstance(fn, types.MethodType) and isinstance(fn.__self__, type) else fn
    if not isinstance(fn, types.FunctionType) or str(fn.__globals__.get("__name__", "")).partition(".")[0] != "torch":
        return False
    from .capture import tables  # noqa: F401
    from .capture.calls import has_row

    return has_row(fn)


def _function_of(method: Any) -> Any:
    fn = getattr(method, "__func__", None)
    return fn.function if isinstance(fn, _frame.Dispatcher) else fn


def _is_method(model: Any) -> bool:
    return isinstance(model, types.MethodType) and isinstance(_function_of(model), types.FunctionType)


def _compile_wrapped(wrapped: Any, settings: Settings) -> Any:
    """staticmethod and classmethod objects, met in a class body."""
    return type(wrapped)(_compile_with(wrapped.__func__, settings))


def _compile_again(d: Any, settings: Settings) -> Any:
    """A compiled function compiled again: the original, under the new settings."""
    return _dress(make_dispatcher(d.function, settings, bound=getattr(d, "__self__", None)), d.__wrapped__)


def _compile_class(cls: type, settings: Settings) -> type:
    """Calls of its instances are compiled (the class itself is changed, as torch.compile does)."""
    attr = "forward" if issubclass(cls, torch.nn.Module) else "__call__"
    fn = getattr(cls, attr, None)
    if isinstance(fn, types.FunctionType):
        setattr(cls, attr, _compile_with(fn, settings))
    return cls


def _compile_object(obj: Any, settings: Settings) -> Any:
    """Any other callable: its Python __call__, or a small function around it (builtins, partials, operators of torch.ops)."""
    call = getattr(type(obj), "__call__", None)  # noqa: B004  (the function itself is wanted)
    if peers.is_disabled(call):
        return as_it_is(obj, settings, marked(call))
    if isinstance(call, types.FunctionType) and not isinstance(obj, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _dress(make_dispatcher(call, settings, bound=obj), obj)

    def calling(*args: Any, **kwargs: Any) -> Any:
        return obj(*args, **kwargs)

    return _dress(make_dispatcher(calling, settings), obj)  # type: ignore[arg-type]


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda model: isinstance(model, kinds)


# The first question with the answer yes says how a callable is compiled.
_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any, Settings], Any]], ...] = (
    (lambda fn: _original(fn) is not fn, lambda fn, s: _compile_with(_original(fn), s)),
    (_is_row, _compile_object),
    (_is(types.FunctionType), lambda fn, s: _ahead(_dress(make_dispatcher(fn, s), fn), fn, s)),
    (lambda m: _is_method(m) and peers.is_disabled(_function_of(m)), lambda m, s: as_it_is(m, s, marked(_function_of(m)))),
    (_is_method, lambda m, s: _ahead(_dress(make_dispatcher(_function_of(m), s, bound=m.__self__), m), m, s)),
    (_is(_frame.Dispatcher), _compile_again),
    (_is(torch.nn.Module), compile_module),
    (_is(type), _compile_class),
    (_is(staticmethod, classmethod), _compile_wrapped),
    (_is(object), _compile_object),
)


# ---------------------------------------------------------------- dynamic marks


def _dims(t: torch.Tensor, index: int | Iterable[int]) -> frozenset[int]:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"a tensor's dimensions are marked, not those of {type(t).__name__}")
    dims = set(index) if isinstance(index, Iterable) else {index}
    if not all(isinstance(d, int) for d in dims):
        raise TypeError(f"dimensions are integers, not {index!r}")
    if not all(-t.dim() <= d < t.dim() for d in dims):
        wrong = next(d for d in sorted(dims) if not -t.dim() <= d < t.dim())
        raise IndexError(f"a tensor of {t.dim()} dimensions ({tuple(t.shape)}) has no dimension {wrong}")
    return frozenset(d % t.dim() for d in dims)


def mark_dynamic(
    t: torch.Tensor,
    index: int | Iterable[int],
    *,
    hint_override: int | None = None,
    min: int | None = None,
    max: int | None = None,
    specialize_on: Iterable[Callable[[Any], bool]] | None = None,
) -> None:
    """The size of these dimensions is a symbol when a call with `t` is captured, good for every size (from `min` to `max`).

    A program that makes a constant of such a size raises ConstraintViolation; `maybe_mark_dynamic` lets it.
    hint_override, specialize_on: torch.compile's hints for speed; nothing follows from them here.
    """
    dims = _dims(t, index)
    if not all(n is None or isinstance(n, int) for n in (min, max)):
        raise TypeError(f"min and max are integers, not {min!r}, {max!r}")
    low = 1 if min is None else min
    if low < 0 or (max is not None and max < low):
        raise ValueError(f"no size lies between min={min} and max={max}")
    t._torchsmith_dynamic = {**getattr(t, "_torchsmith_dynamic", {}), **dict.fromkeys(dims, (low, max))}  # type: ignore[attr-defined]


def mark_unbacked(t: torch.Tensor, index: int | Iterable[int], *, min: int | None = None, max: int | None = None) -> None:
    """As mark_dynamic, and the size at hand answers no question: the graph is for all sizes (from `min`, 0, to `max`), 0 and 1 included.

    A program that asks about such a size raises ConstraintViolation: `torch._check` states what may be taken for granted.
    """
    mark_dynamic(t, index, min=0 if min is None else min, max=max)
    t._torchsmith_unbacked = getattr(t, "_torchsmith_unbacked", frozenset()) | _dims(t, index)  # type: ignore[attr-defined]


def maybe_mark_dynamic(t: torch.Tensor, index: int | Iterable[int]) -> None:
    """The size of these dimensions is a symbol when a call with `t` is captured, unless the program makes a constant of it."""
    t._torchsmith_maybe_dynamic = getattr(t, "_torchsmith_maybe_dynamic", frozenset()) | _dims(t, index)  # type: ignore[attr-defined]


def mark_static(t: torch.Tensor, index: int | Iterable[int] | None = None) -> None:
    """The size of these dimensions (None: of all) stays a number even if it changes."""
    every = range(t.dim()) if isinstance(t, torch.Tensor) else ()
    dims = _dims(t, every if index is None else index)
    t._torchsmith_static = getattr(t, "_torchsmith_static", frozenset()) | dims  # type: ignore[attr-defined]


def mark_static_address(t: torch.Tensor, guard: bool = False) -> None:
    """torch.compile's word that `t` stays at its address. Nothing has to be done: compiled calls take addresses as they come."""
    _dims(t, ())


def explain(fn: Any, **settings: Any) -> Any:
    """`explain(fn)(*args)`: what one call captured, compiled and left outside (debug/explain.py).

    A compiled `fn` is explained under its own settings, unless others are given; breaks are shown also where fullgraph would raise.
    """
    from .debug.explain import explained

    original = fn._orig_mod if isinstance(fn, CompiledModule) else fn
    if not callable(original):
        raise TypeError(f"explain takes a callable, not {type(original).__name__}")
    own = None if settings else _settings_of(fn)
    chosen = own or _settings_of(compile(original, **settings))
    if chosen is None:  # compile returned its argument
        return explained(original)
    fullgraph = chosen.fullgraph and own is None
    at_once = dataclasses.replace(chosen.options, background=False)  # else there is nothing to tell yet
    return explained(_compile_with(original, dataclasses.replace(chosen, fullgraph=fullgraph, options=at_once, at_once=True)))


def _settings_of(fn: Any) -> Settings | None:
    """What a compiled callable was compiled with."""
    found = fn._torchsmith_settings if isinstance(fn, CompiledModule) else getattr(getattr(fn, "state", None), "settings", None)
    return found if isinstance(found, Settings) else None


def _start_debug() -> None:
    """Logs and debug folders listen to events as the environment asks; a terminal sees how far max-autotune is."""
    from .debug.logs import start_logs
    from .debug.progress import start_progress
    from .debug.traces import start_trace

    from_environment()  # variables with wrong values are an error now
    start_logs()
    if wants_folders():
        start_folders()
    start_trace()
    start_progress()


_start_debug()
