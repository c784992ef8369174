"""What happens when no entry of a compiled function fits: capture, compile, install; or decide to run the function as it is.

In: a call that missed (function, args, kwargs) and the function's State. Out: the call's result, or one of `_frame.RUN_HOOKED`,
`_frame.RUN_PLAIN`. Owns the entries, the recompile limit and automatic dynamic sizes; wired to the compiler by `Settings.compile_graph`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import sysconfig
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import events
from ..codes import BackendFailed, Forbidden, Unsupported, define
from ..graph.sizes import SymTypes
from ..graph.spec import UNEXPECTED
from ..graph.tracing import plain_autograd
from . import _frame, assemble, background, guards, overrides, peers, policy, resume
from .attempts import capture_or_split
from .entries import graph_name, install, is_dead, items, note_recompile, read_marks
from .guards import Call
from .replaced import replaced
from .source import ITSELF
from .state import ConstraintViolation, Installed, Nothing, RecompileLimitHit, Settings, State, count_operators, location, warn_eager

define("API001", "called under another tracer, functorch transform, dispatch mode, anomaly mode or forward derivative", "compile the outermost function instead, and leave the mode")
define("API002", "called with a tensor subclass, a fake tensor or a tracer's proxy", "pass plain tensors")
define("API003", "the recompile limit was reached",
       "raise recompile_limit; pass dynamic=True if sizes change on every call, and a tensor for a number that does")  # fmt: skip
define("API004", "guards fail right after capture",
       "keep sizes in the range that mark_dynamic names; inputs that share memory or change while they are read cannot be guarded")  # fmt: skip
define("API005", "an internal error of torchsmith", "please report it; the function runs as it is")
define("API007", "nothing to compile", "no tensor operation was found")
define("API008", "the backend raised an error, which suppress_errors hides", "set suppress_errors to False to see it")
define("API009", "a guard needs a size that is known only while the graph runs", "check the size outside of the compiled function")
define("API010", "a TorchScript module runs as it is", "compile the module that it was made of")
define("API011", "guard_filter_fn failed", "give a function that takes the list of guards and returns a truth for each")
define("API006", "compilation was switched off by set_stance or an environment variable", "set the stance back to default")


class _Outdated(Exception):
    """What was captured fits no later call, as it is the call that makes its guards false: it is run as it is."""


class _NothingToCompile(Unsupported):
    """A function met by the hook does nothing with tensors: no entry, and no break to report."""


YOUNG = 1_000_000  # objects made and not dropped: what a compilation makes lives until its end, looking for cycles in it finds nothing
ALL: weakref.WeakSet[Any] = weakref.WeakSet()  # every Dispatcher, for reset()
_LOCK = threading.RLock()  # one capture at a time; a forked child starts with a free one
os.register_at_fork(after_in_child=_LOCK._at_fork_reinit)  # type: ignore[attr-defined]


def _ask_again() -> None:
    """A forked child has no thread that compiles what was asked for."""
    for d in list(ALL):
        d.state.pending.clear()


os.register_at_fork(after_in_child=_ask_again)


def make_dispatcher(fn: types.FunctionType | None, settings: Settings, *, bound: Any = None, code: types.CodeType | None = None) -> Any:
    """The compiled callable of a Python function (or, for the hook, of a code object)."""
    label = settings.name or (fn.__qualname__ if fn is not None else code.co_qualname if code is not None else "function")
    d = _frame.Dispatcher(fn, on_miss, bound, code)
    d.state = State(settings, label, hooked=fn is None)
    d.key = settings
    d.state.dynamic_dims = {k: set(v) for k, v in (settings.shapes or {}).items()}
    ALL.add(d)
    return d


# ---------------------------------------------------------------- calls that are not ours


def walk(value: Any, depth: int = 3) -> Iterator[Any]:
    """Values reachable through containers; methods of a program's class are not called for it, nor is `__class__` asked for (isinstance would)."""
    if depth and issubclass(type(value), (list, tuple)):
        for x in items(value):
            yield from walk(x, depth - 1)
    elif depth and issubclass(type(value), dict):
        for x in dict.values(value):
            yield from walk(x, depth - 1)
    else:
        yield value


_PLAIN_TENSORS: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def _is_foreign(value: Any) -> bool:
    if issubclass(type(value), torch.Tensor):
        plain = type(value) in _PLAIN_TENSORS or isinstance(value, torch.nn.Parameter) or overrides.is_subclass(type(value))
        return not plain or torch._C._functorch.is_functorch_wrapped_tensor(value)
    return issubclass(type(value), torch.fx.Proxy)


def _describe_foreign(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    return next((type(v).__name__ for v in walk((args, kwargs), 4) if _is_foreign(v)), None)


def _has_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(issubclass(type(v), (torch.Tensor, torch.nn.Module)) for v in walk((args, kwargs), 4))


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What distinguishes calls of which one could be captured and another not."""
    return (torch.is_grad_enabled(), *map(_kind, args), *((k, _kind(v)) for k, v in kwargs.items()))


def _kind(v: Any, depth: int = 4) -> Any:
    if issubclass(type(v), torch.Tensor):
        return type(v), v.dtype, v.dim(), v.requires_grad, v.device.type
    if v is None or issubclass(type(v), (bool, str)):
        return v
    if issubclass(type(v), (list, tuple)) and depth:  # a list may hold itself
        return type(v), *(_kind(x, depth - 1) for x in itertools.islice(items(v), 8))
    return (type(v), id(v)) if issubclass(type(v), (torch.nn.Module, types.FunctionType)) else type(v)


def can_be_compiled(state: State, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any = None) -> bool:
    """Whether a call that no entry fits is worth an attempt: none failed, and a function that the hook met has tensors."""
    if (signature(args, kwargs) if key is None else key) in state.broken:
        return False
    return not state.hooked or state.point is not None or _has_tensor(args, kwargs)


# ---------------------------------------------------------------- the miss


# Our exceptions, and PyTorch's of the same meaning, by module and name.
_PEERS: dict[type, tuple[str, str]] = {
    Unsupported: ("torch._dynamo.exc", "Unsupported"), BackendFailed: ("torch._dynamo.exc", "BackendCompilerFailed"),
    RecompileLimitHit: ("torch._dynamo.exc", "FailOnRecompileLimitHit"),
    ConstraintViolation: ("torch.fx.experimental.symbolic_shapes", "ConstraintViolationError"),
}  # fmt: skip
_USERS = {"GRA004": "UserError", "CAP020": "UserError", "CAP023": "UserError", "CAP034": "UncapturedHigherOrderOpError"}  # by code, a second class
_NAMED = (Unsupported, BackendFailed, RecompileLimitHit, ConstraintViolation)
_BOTH: dict[tuple[type, tuple[type, ...]], type] = {}


def _by_both_names(error: BaseException) -> None:
    """Let programs that catch PyTorch's class of this meaning catch ours: who names it has loaded its module."""
    kind = type(error)
    where, name = next((row for own, row in _PEERS.items() if issubclass(kind, own)), ("", ""))
    named = (getattr(sys.modules.get(where), n, None) for n in (name, _USERS.get(getattr(error, "code", ""), "")))
    found = [t for t in named if isinstance(t, type) and not issubclass(kind, t)]
    theirs = tuple(t for t in found if not any(u is not t and issubclass(u, t) for u in found))  # some releases derive one from the other
    if not theirs:
        return
    both = _BOTH.get((kind, theirs))
    if both is None:
        both = _BOTH[kind, theirs] = type(kind.__name__, (kind, *theirs), {"__module__": kind.__module__, "__init__": kind.__init__})
    with contextlib.suppress(TypeError):  # layouts that differ
        error.__class__ = both


def on_miss(dispatcher: Any, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """No entry fits this call."""
    if name := replaced():
        return _run_without(dispatcher.state, fn, name)
    try:
        return _on_miss(dispatcher, fn, args, kwargs)
    except _NAMED as error:
        _by_both_names(error)
        if isinstance(error, Unsupported):
            raise error.with_traceback(None) from None  # the program's frames, not ours
        raise


def _run_without(state: State, fn: types.FunctionType, name: str) -> Any:
    """Nothing is captured while `name` is not what it was; nor can it be relied on that this is said."""
    why = Unsupported("CAP040", at=location(fn), detail=name)
    if state.settings.fullgraph:
        raise why
    with contextlib.suppress(Exception):
        events.emit("fallback", code=why.code, at=why.at, detail=why.detail)
        warn_eager(state, why)
    return _frame.RUN_PLAIN


def _on_miss(dispatcher: Any, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    state: State = dispatcher.state
    with overrides.undisturbed():
        key = signature(args, kwargs)
        if not can_be_compiled(state, args, kwargs, key):
            return _run_broken(dispatcher, state, key)
        foreign = _describe_foreign(args, kwargs)
    if foreign is not None:
        events.emit("fallback", code="API002", at=location(fn), detail=foreign)
        return _frame.RUN_PLAIN
    peers.rearm()
    if state.settings.options.background:
        return _run_meanwhile(dispatcher, state, fn, args, kwargs, key)
    with _LOCK:
        if dispatcher.entries:  # another thread may have compiled since they were asked
            done = dispatcher.again(fn, args, kwargs)
            if done is not None:
                return done[0]
        done = _compile_and_run(dispatcher, state, fn, args, kwargs, key)
    if isinstance(done, Unsupported):
        fn(*args, **kwargs)  # raises what its capture has shown
        raise done.with_traceback(None) from None
    return done


def _run_meanwhile(d: Any, state: State, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
    """Run the function as it is, and ask for its compilation once it has returned. What an earlier one raised is raised here."""
    error = state.failed.pop(key, None)
    if error is not None:
        raise error
    modes = background.modes()
    if key in state.pending or modes is None:
        return _frame.RUN_PLAIN
    state.pending.add(key)

    def compile_it() -> None:
        try:
            with _LOCK, modes():
                made = _compile_call(d, state, fn, args, kwargs, key)
            if isinstance(made, Unsupported):
                state.broken[key] = 1  # the call raises whenever it is made
        except BaseException as error:  # the user's: it belongs into a call of the function
            state.failed[key] = error
        finally:
            state.pending.discard(key)

    if state.point is not None:  # the rest of a frame: its caller runs it
        background.submit(compile_it)
        return _frame.RUN_PLAIN
    before = _frame.hook_suspend()
    try:
        result = fn(*args, **kwargs)
    except BaseException:
        state.pending.discard(key)
        raise
    finally:
        _frame.hook_resume(before)
    background.submit(compile_it)
    return result


def _run_broken(dispatcher: Any, state: State, key: Any) -> Any:
    state.broken[key] = state.broken.get(key, 0) + 1
    if not dispatcher.entries and (len(state.broken) > 4 or state.broken[key] > 32):
        dispatcher.eager = 1  # it never could be captured: do not ask again
    return _frame.RUN_HOOKED


def _compile_and_run(d: Any, state: State, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
    with overrides.undisturbed():
        made = _compile_call(d, state, fn, args, kwargs, key)
    if not isinstance(made, _Made):
        return made
    done = d.again(fn, args, kwargs)
    if done is not None:
        return done[0]
    return _refuse_entry(d, state, made.entry, made.call, key, fn)


@dataclass(frozen=True, slots=True)
class _Made:
    """A new entry, and the call that it was captured from."""

    entry: Any
    call: Call


def _compile_call(d: Any, state: State, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
    """Capture, compile, install: a _Made; else what the call does instead."""
    settings = state.settings
    values = d.bind(args, kwargs, fn)
    if values is None:
        return _frame.RUN_PLAIN  # Python raises its own TypeError
    call = Call(
        dict(zip(d.names, values, strict=True)), fn.__globals__, dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    )
    d.entries = tuple(e for e in d.entries if not is_dead(e))
    if d.entries:
        verdict = note_recompile(d, state, fn, call, key)
        if verdict is not None:
            return verdict
    read_marks(state, call)
    state.expect_numbers(call.locals)
    try:
        with capturing():
            entry = _make(d, state, fn, args, kwargs, call)
    except _Outdated:
        events.emit("outdated", name=state.label)
        return _frame.RUN_PLAIN
    except BackendFailed as error:
        if settings.fullgraph or not settings.options.suppress_errors:
            raise
        events.emit("fallback", code="API008", at=location(fn), detail=str(error))
        state.broken[key] = 1
        return _frame.RUN_PLAIN
    except Unsupported as why:
        if why.code == "CAP038" and settings.fullgraph:
            events.emit("fallback", code=why.code, at=why.at, detail=why.detail)
            return _frame.RUN_PLAIN
        if settings.fullgraph or isinstance(why, Forbidden) or why.is_error:
            if why.code in ("CAP006", "CAP025"):
                return why  # the program raises: under fullgraph too that is the user's own exception
            raise why.with_traceback(None) from None
        if not isinstance(why, _NothingToCompile):
            events.emit("graph_break", code=why.code, loc=why.at or location(fn), detail=why.detail, name=state.label)
            warn_eager(state, why)
        state.broken[key] = 1
        return _frame.RUN_HOOKED
    d.entries = (*d.entries, entry)
    return _Made(entry, call)


def _refuse_entry(d: Any, state: State, entry: Any, call: Call, key: Any, fn: types.FunctionType) -> Any:
    """The guards of a fresh entry do not hold for the very call it was captured from."""
    d.entries = tuple(e for e in d.entries if e is not entry)
    known: Installed = entry.source
    failed = known.guards[entry.failed] if 0 <= entry.failed < len(known.guards) else None
    detail = guards.explain(failed, call, known.symbols) if failed is not None else "an input is missing"
    if state.settings.fullgraph:
        raise Unsupported("API004", at=location(fn), detail=detail)
    events.emit("graph_break", code="API004", loc=(failed.loc if failed else "") or location(fn), detail=detail, name=state.label)
    state.broken[key] = 1
    return _frame.RUN_HOOKED


# ---------------------------------------------------------------- functions met by the frame hook

_LIBRARIES = (str(sysconfig.get_paths()["stdlib"]) + os.sep, *(os.path.dirname(m.__file__ or "") + os.sep for m in (torch,)))
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


def is_entry_file(filename: str) -> bool:
    """Whether functions of this file may be compiled when the hook meets them; torch, the standard library and we ourselves may not."""
    if filename.startswith(("<frozen", "<torchsmith")) or filename.startswith(_OWN) or filename.startswith(_LIBRARIES[1:]):
        return False
    if os.sep + "torchinductor_" in filename:  # what torch.compile wrote
        return False
    return not filename.startswith(_LIBRARIES[0]) or "site-packages" in filename


def on_frame(settings: Settings, fn: types.FunctionType) -> Any:
    """The Dispatcher for a code object that the hook meets for the first time, None: never compile it, or RUN_PLAIN: nor what it calls."""
    code, name = fn.__code__, fn.__code__.co_name
    if peers.is_marked(fn):
        is_theirs = "_torchdynamo_orig_callable" in fn.__dict__
        return _frame.RUN_PLAIN if is_theirs and not policy.skips_itself_alone(code) else None
    if code in policy.SKIPPED or not is_entry_file(code.co_filename):
        return None
    if (name.startswith("<") and name != "<lambda>") or name in ("__init__", "__new__", "__repr__", "__del__", "__getattr__"):
        return None
    return make_dispatcher(None, replace(settings, fullgraph=False, name=None), code=code)


_frame.setup_hook(on_frame)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Run our own machinery, one capture at a time: compiled functions met on the way run as they are."""
    with _LOCK, plain_autograd():
        _frame.suspend(1)
        before = gc.get_threshold()
        rarer = (max(YOUNG, before[0]) if before[0] else 0, *before[1:])
        gc.set_threshold(*rarer)
        try:
            yield
        finally:
            if gc.get_threshold() == rarer:  # nobody else set it meanwhile
                gc.set_threshold(*before)
            _frame.suspend(-1)


# ---------------------------------------------------------------- capture and compile


def _make(d: Any, state: State, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
    settings = state.settings
    name = graph_name(state.label)
    try:
        with events.timed("capture", graph=name):
            captured = capture_or_split(d, state, fn, args, kwargs)
        if state.hooked and state.point is None and captured.stop is None and not any(n.op.startswith("call") for n in captured.graph.graph.nodes):
            raise _NothingToCompile("API007", at=location(fn))
        ours = getattr(settings.backend, "dialect", "native") == "native"  # who brings a backend may count on its being called
        if captured.graph.meta["outdated"] and captured.stop is None and ours and not (state.outdated or settings.at_once):
            state.outdated = True  # another such call is compiled: its dictionary may be new each time
            raise _Outdated
        try:
            compiled = _compile(state, captured, call, name)
            if compiled.report.code not in (None, "AUT001") and state.reads and not settings.fullgraph:
                raise Unsupported(compiled.report.code, at=location(fn))
        except Unsupported:
            if not state.reads or settings.fullgraph:
                raise
            state.may_read = False  # split where the value is read
            return _make(d, state, fn, args, kwargs, call)
        count_operators(state, captured)
        reason = compiled.report.code
        numbers = reason not in (None, "AUT001", "GRA015") and any(r.origin[0] == "scalar" for r in captured.facts.symbols.values())
        if numbers and state.forget_numbers(Unsupported(reason or "", at=location(fn))):
            return _make(d, state, fn, args, kwargs, call)
        return install(d, state, fn, captured, compiled, name, call, _point)
    except (Unsupported, BackendFailed, ConstraintViolation, _Outdated):
        raise
    except Exception as error:  # a bug of ours must not take the user's program down; it is counted and shown
        if any(ITSELF in dims for dims in state.dynamic_dims.values()):
            state.forget_numbers(Unsupported("API005", at=location(fn), detail=f"{type(error).__name__}: {error}"))
            return _make(d, state, fn, args, kwargs, call)
        if settings.fullgraph:
            raise
        text = "".join(traceback.format_exception(error))
        events.emit("fallback", code="API005", graph=name, at=location(fn), detail=f"{type(error).__name__}: {error}", traceback=text)
        if not state.warned:
            state.warned = True
            what = f"{type(error).__name__}: {error}"
            events.warn(f"torchsmith: internal error while compiling {state.label}; it runs as it is. {what}")
        raise Unsupported("API005", at=location(fn), detail=f"{type(error).__name__}: {error}") from error


def _point(family: resume.Family, place: resume.Point) -> Any:
    """The Dispatcher of a point."""
    known = family.points.get(place)
    if known is None:
        root: State = family.root
        known = _frame.Dispatcher(None, on_miss, None, assemble.bare(place.code, place.names))
        settings = replace(root.settings, fullgraph=False, shapes=None)
        known.state = State(settings, f"{root.label} (from line {place.line})", point=place, family=family)
        known.key = family.key
        family.points[place] = known
        ALL.add(known)
    return known


def _rest(d: Any, fn: types.FunctionType, state: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """What runs a split frame to its end as it is: (function, arguments)."""
    return resume.rest_of(d.state.point, fn, state)


_frame.setup_rest(_rest)


def _nothing(*args: Any) -> tuple[Any, ...]:
    return ()


def _compile(state: State, captured: Any, call: Call, name: str) -> Any:
    settings = state.settings
    nodes = captured.graph.graph.nodes
    if captured.stop is not None or state.point is not None:
        output = next(n for n in nodes if n.op == "output")
        calls = [n for n in nodes if n.op.startswith("call")]
        if not calls and not output.all_input_nodes:
            return Nothing(_nothing, tuple(captured.facts.guards), Nothing(None, (), None))
        if all(type(n.meta.get("val")) in SymTypes for n in (*calls, *output.all_input_nodes)):  # Python counts by itself
            return Nothing(captured.graph.forward, tuple(captured.facts.guards), Nothing(None, (), None))
    inputs = [guards.evaluate(s, call) for s in captured.inputs]
    try:
        return settings.compile_graph(
            captured.graph, captured.facts, inputs, options=settings.options, backend=settings.backend, needs_grad=captured.needs_grad, name=name,
            fullgraph=settings.fullgraph,
        )  # fmt: skip
    except (Unsupported, BackendFailed):
        raise
    except Exception as error:  # a user's backend may raise anything
        if getattr(settings.backend, "dialect", "native") != "native":
            who = settings.backend.name
            raise BackendFailed(f"backend {who!r} raised {type(error).__name__}: {error}") from error
        raise


def reset() -> None:
    """Forget every compilation, and what failed."""
    UNEXPECTED.clear()
    for d in list(ALL):
        state: State = d.state
        with _LOCK:
            d.entries = ()
            d.eager = 0
            d.state = State(state.settings, state.label, hooked=state.hooked, point=state.point, family=state.family)


# ---------------------------------------------------------------- profiler


def profiled(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """One compiled call, named in the profile."""
    with torch.profiler.record_function(f"torchsmith: {name}"):
        return call(*args)


_frame.setup_profiled(profiled)
