"""The `torchsmith.compiler` namespace: switches and questions around compilation, with torch.compiler's meaning."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from . import events
from .backends.registry import DEFAULT, aot_autograd, list_backends, lookup_backend, register_backend, resolve_backend
from .capture import _frame, attempts, background, dispatch, entries, peers, policy
from .capture.state import location
from .compiled_module import disabled_module
from .debug.logs import LOGS, show_logs
from .options import CONFIG, TEXT_LOGS, logs
from .runtime import _native, artifacts
from .runtime.discarded import DiscardedParameter

__all__ = [
    "allow_in_graph", "aot_autograd", "assume_constant_result", "config", "cudagraph_mark_step_begin", "disable",
    "error_on_graph_break", "get_default_backend", "graph_break", "is_compiling", "is_dynamo_compiling", "is_exporting",
    "keep_portable_guards_unsafe", "keep_tensor_guards_unsafe", "list_backends", "load_cache_artifacts", "load_compiled_function",
    "lookup_backend", "nested_compile_region", "nonstrict_trace", "refreeze", "register_backend", "reset", "save_cache_artifacts",
    "set_default_backend", "set_logs", "set_stance", "skip_all_guards_unsafe", "skip_guard_on_all_nn_modules_unsafe",
    "skip_guard_on_globals_unsafe", "skip_guard_on_inbuilt_nn_modules_unsafe", "substitute_in_graph", "wait_for_background",
    "wrap_numpy",
]  # fmt: skip


config = CONFIG

# Names of torch.compiler and torch._dynamo that are not here -> what does it instead.
_ELSEWHERE = {
    **{name: f"torchsmith.{name}" for name in (
        "compile", "explain", "mark_dynamic", "maybe_mark_dynamic", "mark_static", "mark_static_address", "mark_unbacked",
        "standalone_compile",
    )},
    "set_enable_guard_collectives": "processes compile and recompile each for itself",
    "precompile": "torchsmith.export.export and torchsmith.aot.compile_and_package",
    "export": "torchsmith.export.export",
    "optimize": "torchsmith.compile(backend=...)",
    "optimize_assert": "torchsmith.compile(backend=..., fullgraph=True)",
    "run": 'torchsmith.compiler.set_stance("eager_on_recompile")',
    "disallow_in_graph": "torchsmith.compiler.disable",
    "forbid_in_graph": "torchsmith.compiler.disable",
    "skip_frame": "torchsmith.compiler.disable(recursive=False)",
    "step_unsupported": "torchsmith.compiler.graph_break",
    "leaf_function": "torchsmith.compiler.nonstrict_trace, torch.library.custom_op",
    "patch_dynamo_config": "torchsmith.compiler.config.patch",
    "override_cudagraphs": 'options={"triton.cudagraphs": False}',
    "cudagraph_mark_warmup_incomplete": "nothing has to be marked",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    told = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    near = [] if told else difflib.get_close_matches(name, (*__all__, *_ELSEWHERE), 1, 0.75)
    raise AttributeError(f"torchsmith.compiler has no {name!r}{told}" + (f"; did you mean {near[0]!r}?" if near else ""))


def reset() -> None:
    """Forget all compilations of this process; what is on disk stays."""
    dispatch.reset()


def wait_for_background(timeout: float | None = None) -> bool:
    """Until everything that options={"background": True} compiles is there. False: `timeout` seconds were not enough.

    Functions that hold breaks are compiled in parts, each when a call first comes to it: call again and wait again.
    """
    if not isinstance(timeout, int | float | None):
        raise TypeError(f"timeout is a number of seconds, not {timeout!r}")
    return background.wait(timeout)


def refreeze(model: torch.nn.Module | None = None) -> None:
    """Compiled graphs compute anew, at their next call, what they keep of the parameters and buffers of `model` (packed weights, folded
    constants); without an argument, of all models.

    Ordinary changes of parameters are noticed without it. Needed only after a write into the middle of a large parameter that moves
    no version counter: through `.data`, NumPy or another process.
    """
    if model is None:
        _native.refreeze()
        return
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"refreeze takes an nn.Module, not {type(model).__name__}")
    tensors = [*model.parameters(), *model.buffers()]
    if any(isinstance(t, DiscardedParameter) for t in tensors):
        raise RuntimeError("refreeze: parameters of this model were discarded after packing (options freezing_discard_parameters)")
    if tensors:
        _native.refreeze(*tensors)


def is_compiling() -> bool:
    """True in code that is being captured (capture answers it), False when it runs."""
    return False


def is_dynamo_compiling() -> bool:
    """As is_compiling."""
    return False


def is_exporting() -> bool:
    """True while a program is exported ahead of time."""
    return False


def disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """Run `fn` as it is: never captured, neither inlined nor by the hook (`recursive`: nor what it calls).

    Of a module: an object of its class that shares all it has. A class is changed: calls of its instances are meant.
    """
    likewise = functools.partial(disable, recursive=recursive, reason=reason)
    if fn is None:
        return likewise
    if isinstance(fn, _frame.Dispatcher):
        fn = fn.__wrapped__
    if isinstance(fn, type):
        call = getattr(fn, "__call__", None)  # noqa: B004  (the function itself is wanted)
        if isinstance(call, types.FunctionType):
            fn.__call__ = likewise(call)  # type: ignore[method-assign]
            fn.__call__.__qualname__ = fn.__qualname__  # what messages call it
        return fn
    if isinstance(fn, torch.nn.Module):
        return disabled_module(fn, likewise)
    if not callable(fn):
        raise TypeError(f"disable takes a callable, not {type(fn).__name__}")
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if not recursive and code is not None:
        policy.SKIPPED.add(code)

    @functools.wraps(fn)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        before = _frame.hook_suspend() if recursive else None
        try:
            return fn(*args, **kwargs)
        finally:
            if before is not None:
                _frame.hook_resume(before)

    disabled._torchsmith_disabled = True  # type: ignore[attr-defined]
    disabled._torchsmith_reason = reason  # type: ignore[attr-defined]
    disabled._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile leaves it alone as well
    return disabled


def allow_in_graph(fn: Any) -> Any:
    """Calls of `fn` become one node of the captured graph, not looked into. Where sizes vary, it meets torch.SymInt instead of int."""
    if isinstance(fn, (list, tuple)):
        return [allow_in_graph(f) for f in fn]
    if not callable(fn):
        raise TypeError(f"allow_in_graph takes a callable, not {type(fn).__name__}")
    ALLOWED.add(fn)
    return fn


def nonstrict_trace(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` is traced by what it does to tensors, not by its Python: containers of tensors and constants in and out, no write to an input.

    Raises TypeError for what cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"nonstrict_trace takes a callable, not {type(fn).__name__}")
    return allow_in_graph(fn)  # type: ignore[no-any-return]


def assume_constant_result(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What `fn` returns during capture is a constant of the graph."""
    if not isinstance(fn, types.FunctionType):
        raise TypeError(f"assume_constant_result takes a Python function, not {type(fn).__name__}")
    fn._torchsmith_constant = True  # type: ignore[attr-defined]
    return fn


ALLOWED: set[Any] = set()


def graph_break(msg: str = "") -> None:
    """In a compiled function: the graph ends here, and another one begins. Elsewhere nothing happens. Under fullgraph=True an error."""


class error_on_graph_break:
    """While it is entered (or in a function that it decorates), a graph break in compiled code is an error (True) or none (False).

    Breaks at `with error_on_graph_break(True):` raise what fullgraph=True raises; fullgraph=True itself is not lifted by False.
    """

    def __init__(self, error: bool) -> None:
        self.error, self.before = error, False

    def __enter__(self) -> None:
        self.before = attempts.set_error_mode(self.error)

    def __exit__(self, *exc: Any) -> None:
        attempts.set_error_mode(self.before)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        error = self.error

        @functools.wraps(fn)
        def under(*args: Any, **kwargs: Any) -> Any:
            before = attempts.set_error_mode(error)
            try:
                return fn(*args, **kwargs)
            finally:
                attempts.set_error_mode(before)

        return under


def save_cache_artifacts() -> tuple[bytes, artifacts.CacheInfo] | None:
    """What this process compiled (or found compiled), as bytes, and their names by kind; None where nothing was compiled."""
    return artifacts.save()


def load_cache_artifacts(serialized_artifacts: bytes) -> artifacts.CacheInfo:
    """Put what save_cache_artifacts gave into this machine's cache: equal programs are then loaded, not compiled. It is code: load only
    what comes from somebody you trust. Raises ValueError for other or damaged bytes."""
    if not isinstance(serialized_artifacts, bytes):
        raise TypeError(f"artifacts are bytes, not {type(serialized_artifacts).__name__}")
    return artifacts.load(serialized_artifacts)


def load_compiled_function(file: Any, *, f_globals: Mapping[str, Any] | None = None, external_data: Any = None) -> Any:
    """What `compiled.aot_compile(...)` gave and save_compiled_function wrote: of a path, or of a file object. It is code: load only what
    comes from somebody you trust. f_globals, external_data: accepted; a package holds all that it needs. Raises PackageError."""
    from .aot.functions import load_function

    return load_function(file)


def set_logs(**artifacts: bool) -> None:
    """Print on stderr, from now on, the artifacts that are True here, and no others: `set_logs(recompiles=True, graph_breaks=True)`.
    Without arguments: what the environment names. Raises ValueError for other names than TORCHSMITH_LOGS takes."""
    for name in artifacts:
        if name not in LOGS:
            near = difflib.get_close_matches(name, LOGS, 1)
            raise ValueError(f"no artifact {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(LOGS)}"))
    wanted = {name for name, on in artifacts.items() if on} if artifacts else logs() & LOGS.keys()
    if not TEXT_LOGS.keys().isdisjoint(wanted):
        config.trace_enabled = True  # passes tell their texts
    show_logs(wanted)


def nested_compile_region(
    fn: Any = None, *, options: Any = None, max_reuse_entries: int = 8, reuse_hash_fn: Callable[..., Any] | None = None
) -> Any:
    """Marks a block that is called many times. Equal blocks share their kernels whether they are marked or not: nothing follows from the
    arguments."""
    if fn is not None and not callable(fn):
        raise TypeError(f"nested_compile_region takes a callable, not {type(fn).__name__}")
    return fn if fn is not None else nested_compile_region


def wrap_numpy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of NumPy arrays as one of tensors: arguments become arrays, arrays in its result tensors."""
    if not callable(fn):
        raise TypeError(f"wrap_numpy takes a callable, not {type(fn).__name__}")

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.numpy(), (args, kwargs))
        return pytree.tree_map_only(numpy.ndarray, torch.as_tensor, fn(*args, **kwargs))

    return wrapped


def substitute_in_graph(
    original_fn: Callable[..., Any], *, can_constant_fold_through: bool = False, skip_signature_check: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: in compiled functions calls of `original_fn`, typically a C function, are calls of the decorated Python function.

    Raises TypeError if `original_fn` is no function, or if the signatures differ.
    """
    if not callable(original_fn) or isinstance(original_fn, type):
        raise TypeError(f"substitute_in_graph expects a function but got {type(original_fn)!r}")

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(fn, types.FunctionType):
            raise TypeError(f"@substitute_in_graph(...) expects a function but got {type(fn)!r}")
        if not skip_signature_check:
            _same_signature(original_fn, fn)
        policy.SUBSTITUTED[original_fn] = fn
        return fn

    return add


def _same_signature(original: Callable[..., Any], fn: Callable[..., Any]) -> None:
    try:
        want = inspect.signature(original)
    except (TypeError, ValueError):  # many C functions tell none
        return
    got = inspect.signature(fn)
    if [(p.name, p.kind) for p in want.parameters.values()] != [(p.name, p.kind) for p in got.parameters.values()]:
        raise TypeError(f"Signature mismatch between {original} and {fn}: {want} vs {got}")




# ---------------------------------------------------------------- filters for options={"guard_filter_fn": ...}


def skip_all_guards_unsafe(guards: list[Any]) -> list[bool]:
    """No guard at all: right only where nothing ever changes."""
    return [False] * len(guards)


def skip_guard_on_globals_unsafe(guards: list[Any]) -> list[bool]:
    """No guards on global variables."""
    return [not g.is_global for g in guards]


def keep_tensor_guards_unsafe(guards: list[Any], keep_parameters: bool = False) -> list[bool]:
    """Only guards on tensors (of parameters too: keep_parameters) and on sizes."""
    kept = [g.kind == "tensor" and (keep_parameters or not issubclass(g.value.type, torch.nn.Parameter)) for g in guards]
    return [k or g.kind == "shape" for k, g in zip(kept, guards, strict=True)]


def keep_portable_guards_unsafe(guards: list[Any]) -> list[bool]:
    """Only guards on tensors that are no globals, on sizes and on global state: those that another process could check."""
    return [g.kind in ("shape", "global_state") or (g.kind == "tensor" and not g.is_global) for g in guards]


def skip_guard_on_all_nn_modules_unsafe(guards: list[Any]) -> list[bool]:
    """No guards on what modules hold."""
    return [not g.source.is_unspecialized_nn_module() for g in guards]


skip_guard_on_inbuilt_nn_modules_unsafe = skip_guard_on_all_nn_modules_unsafe


# ---------------------------------------------------------------- stances

STANCES = ("default", "force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile", "aot_eager_then_compile")
_stance: dict[str, Any] = {"stance": "default", "skip_guard_eval_unsafe": False, "force_backend": None}


class set_stance:
    """How compiled functions behave from now on; as `with set_stance(...)` or decorator for a while.

    stance: "default"; "force_eager": all run as they are; "eager_on_recompile": so does what would be compiled anew;
    "fail_on_recompile": that raises RuntimeError; "eager_then_compile", "aot_eager_then_compile": the first call of each kind runs eagerly.
    force_backend: under the stance "default" all of them run by this backend instead of their own, which tells whose fault a failure is;
    what was compiled before is kept aside. Raises RuntimeError for an unknown stance or another one beside force_backend, InvalidBackend.
    """

    def __init__(self, stance: str = "default", *, skip_guard_eval_unsafe: bool = False, force_backend: Any = None) -> None:
        if stance not in STANCES:
            near = difflib.get_close_matches(str(stance), STANCES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(STANCES)}"
            raise RuntimeError(f"unknown stance {stance!r}; {hint}")
        if force_backend is not None and stance != "default":
            raise RuntimeError(f"force_backend goes with the stance 'default', not with {stance!r}")
        forced = None if force_backend is None else resolve_backend(force_backend)
        self.before = dict(_stance)
        self._set(stance=stance, skip_guard_eval_unsafe=skip_guard_eval_unsafe, force_backend=forced)  # guards are checked all the same
        self.now = dict(_stance)

    @staticmethod
    @functools.partial(disable, reason="a stance is set outside of compiled functions")
    def _set(**values: Any) -> None:
        _stance.update(values)
        _frame.set_gate(2 if _stance["force_backend"] is not None else int(_stance["stance"] != "default"))

    def __enter__(self) -> None:
        self._set(**self.now)

    def __exit__(self, *exc: Any) -> None:
        self._set(**self.before)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        self._set(**self.before)
        now = self.now

        @functools.wraps(fn)
        def under_stance(*args: Any, **kwargs: Any) -> Any:
            before = dict(_stance)
            self._set(**now)
            try:
                return fn(*args, **kwargs)
            finally:
                self._set(**before)

        return under_stance


def _what_traces() -> str:
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch.is_anomaly_enabled():
        return "autograd's anomaly mode"
    return "a forward derivative" if torch.autograd.forward_ad._current_level >= 0 else ""


def _on_gate(dispatcher: Any, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], reason: int) -> Any:
    """Asked by C before a call under a stance (1) or under another tracer (2)."""
    if reason == 2:
        events.emit("fallback", code="API001", at=location(fn), detail=_what_traces())
        return _frame.RUN_PLAIN
    forced = _stance["force_backend"] or peers.forced_backend()
    if forced is not None:
        return _by_backend(dispatcher, fn, args, kwargs, resolve_backend(forced))
    stance = _stance["stance"] if _stance["stance"] != "default" else peers.stance()
    if stance == "force_eager":
        events.emit("fallback", code="API006", at=location(fn), detail='set_stance("force_eager")')
        return _frame.RUN_PLAIN
    if stance in ("eager_on_recompile", "fail_on_recompile"):
        return _only_compiled(dispatcher, fn, args, kwargs, fail=stance == "fail_on_recompile")
    if stance in ("eager_then_compile", "aot_eager_then_compile") and not dispatcher.entries:
        key = dispatch.signature(args, kwargs)
        seen = dispatcher.__dict__.setdefault("_torchsmith_seen", set())
        if key not in seen:
            seen.add(key)
            return _frame.RUN_PLAIN
    return _frame.GO_ON


def _by_backend(dispatcher: Any, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], backend: Any) -> Any:
    """A call by another backend than the function was compiled with: by a second dispatcher, kept for the next one."""
    settings = dispatcher.state.settings
    if settings.backend in (backend, backend.name):
        return _frame.GO_ON
    kept = dispatcher.__dict__.setdefault("_torchsmith_forced", {})
    if backend not in kept:
        kept.setdefault(backend, dispatch.make_dispatcher(fn, dataclasses.replace(settings, backend=backend)))
    return kept[backend](*args, **kwargs)


def _only_compiled(dispatcher: Any, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], *, fail: bool) -> Any:
    if dispatcher.eager:  # nothing will ever be compiled
        return _frame.GO_ON
    done = dispatcher.again(fn, args, kwargs)
    if done is not None:
        return done[0]
    if fail and dispatch.can_be_compiled(dispatcher.state, args, kwargs):
        why = entries.missed(dispatcher, fn, args, kwargs)
        raise RuntimeError(f"{dispatcher.state.label} needs a recompilation, but the stance is fail_on_recompile: {why}")
    return _frame.RUN_HOOKED  # what it calls may be compiled


_frame.setup_dispatch(_on_gate)
_frame.set_discarded(DiscardedParameter)
peers.watch(reset)

# ---------------------------------------------------------------- defaults



def get_default_backend() -> Any:
    """What `compile` uses where no backend is given."""
    return DEFAULT[0]


def set_default_backend(backend: Any) -> None:
    """Make `backend` the default of later `compile` calls; None: inductor, torchsmith's own."""
    if backend is not None:
        resolve_backend(backend)
    DEFAULT[0] = "inductor" if backend is None else backend


def cudagraph_mark_step_begin() -> None:
    """A new iteration begins (for recorded device graphs; nothing to do on the CPU)."""
