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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import events
from ..codes import BackendFailed, Forbidden, Unsupported, define
from ..graph.sizes import expr_of, print_condition
from ..graph.spec import ASSUMED, assumes
from ..graph.tracing import plain_autograd
from ..ir.expr import Const, Expr, Sym, const, op
from ..ir.expr import walk as walk_expr
from ..options import Options
from . import _frame, assemble, background, guards, overrides, peers, resume
from .guards import Call
from .source import ITSELF, Attr, FixedObject, Guard, Item, Local, Source, TensorGuard, TensorProperty

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


class RecompileLimitHit(RuntimeError):
    """fullgraph=True and one more compilation than recompile_limit would be needed."""


class ConstraintViolation(RuntimeError):
    """A dimension marked by mark_dynamic, of which the program makes a constant."""


class _NothingToCompile(Unsupported):
    """A function met by the hook does nothing with tensors: no entry, and no break to report."""


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """What one `torchsmith.compile` call asked for; compared by identity. `compile_graph` has pipeline.compile_graph's signature."""

    compile_graph: Callable[..., Any]
    options: Options = field(default_factory=Options)
    backend: Any = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None
    recompile_limit: int = 8
    name: str | None = None
    shapes: Mapping[str, Any] | None = None
    again: Callable[..., Any] | None = None  # (callable, *pickled()) -> compiled; a module-level function, for pickle

    def pickled(self) -> tuple[Any, ...]:
        return self.options, self.backend, self.fullgraph, self.dynamic, self.recompile_limit, self.name


@dataclass(slots=True)
class Installed:
    """What Python knows of one entry: guards to explain a miss, the compiler's report, the graph."""

    guards: tuple[Guard, ...]
    symbols: Mapping[str, Source]
    report: Any
    graph: Any
    name: str
    holders: Mapping[str, weakref.ref[torch.nn.Module]] = field(default_factory=dict)  # by source: the module that a number was read from


@dataclass(frozen=True, slots=True)
class Nothing:
    """In place of a compilation, where between two points of a frame there are no tensor operations."""

    call: Any
    guards: tuple[Expr, ...]
    report: Any
    code: None = None


@dataclass(slots=True)
class State:
    """One compiled function's history."""

    settings: Settings
    label: str
    hooked: bool = False  # found by the frame hook, not compiled by the user
    broken: dict[Any, int] = field(default_factory=dict)  # signatures of calls that cannot be captured -> calls
    dynamic_dims: dict[str, set[int]] = field(default_factory=dict)
    marked: dict[tuple[str, int], tuple[int, int | None]] = field(default_factory=dict)  # by mark_dynamic: (input, dimension) -> range
    unbacked: set[tuple[str, int]] = field(default_factory=set)  # by mark_unbacked: the size at hand answers no question
    may_be_dynamic: bool = True
    may_have: dict[type, bool] = field(default_factory=lambda: {int: True, float: True})  # numbers that vary may become symbols
    numbers: dict[str, type] = field(default_factory=dict)  # those that were seen to vary
    reads: bool = False  # item() is a number that the graph tells when it runs; else it is a break
    may_read: bool = True  # ... which was not refused yet
    counts: bool = False  # what optimizers count in tensors is read before the graph runs, because they choose by it
    pending: set[Any] = field(default_factory=set)  # signatures of calls that are being compiled in the background
    failed: dict[Any, BaseException] = field(default_factory=dict)  # what compiling them raised, for the next such call
    warned: bool = False
    point: resume.Point | None = None  # not a function's beginning, but where a split frame goes on
    family: resume.Family | None = None

    def forget_numbers(self, why: Unsupported) -> bool:
        """Numbers stay constants: with symbols for them the function cannot be compiled. Integers first: they decide shapes. Out: were there
        any? Numbers that tensors told before the frame was split are none of these."""
        kind = int if int in (self.numbers.get(place) for place, dims in self.dynamic_dims.items() if ITSELF in dims) else float
        self.may_have[kind] = False
        before = self.dynamic_dims
        self.dynamic_dims = {place: dims for place, dims in before.items() if ITSELF not in dims or self.numbers.get(place) is not kind}
        if len(self.dynamic_dims) == len(before):
            return False
        events.emit("fallback", code=why.code, at=why.at, detail=f"{'integers' if kind is int else 'floats'} stay constants: {why.detail}")
        return True

    def reduce(self, dispatcher: Any) -> Any:
        """For pickle: by name, as functions are; where the name means something else, the original compiled again."""
        original = dispatcher.__wrapped__
        found: Any = sys.modules.get(dispatcher.__module__)
        for part in dispatcher.__qualname__.split("."):
            found = getattr(found, part, None)
        return dispatcher.__qualname__ if found is dispatcher else (self.settings.again, (original, *self.settings.pickled()))


YOUNG = 1_000_000  # objects made and not dropped: what a compilation makes lives until its end, looking for cycles in it finds nothing
ALL: weakref.WeakSet[Any] = weakref.WeakSet()  # every Dispatcher, for reset()
_LOCK = threading.RLock()  # one capture at a time; a forked child starts with a free one
os.register_at_fork(after_in_child=_LOCK._at_fork_reinit)  # type: ignore[attr-defined]


class _Errors(threading.local):
    def __init__(self) -> None:
        self.on = False  # compiler.error_on_graph_break(True) is entered


_ERRORS = _Errors()


def set_error_mode(on: bool) -> bool:
    """Whether breaks are errors from now on in this thread; gives what was before."""
    before, _ERRORS.on = _ERRORS.on, bool(on)
    return before


def _ask_again() -> None:
    """A forked child has no thread that compiles what was asked for."""
    for d in list(ALL):
        d.state.pending.clear()


os.register_at_fork(after_in_child=_ask_again)


def _capture(*args: Any, **kwargs: Any) -> Any:
    kwargs["error_mode"] = _ERRORS.on
    from .start import capture  # the machine's tables take a while to build: not before the first miss

    return capture(*args, **kwargs)


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
    """Values reachable through containers; methods of a program's class are not called for it."""
    if depth and isinstance(value, (list, tuple)):
        for x in _items(value):
            yield from walk(x, depth - 1)
    elif depth and isinstance(value, dict):
        for x in dict.values(value):
            yield from walk(x, depth - 1)
    else:
        yield value


def _items(value: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    return list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)


_PLAIN_TENSORS: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def _is_foreign(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        plain = type(value) in _PLAIN_TENSORS or isinstance(value, torch.nn.Parameter) or overrides.is_subclass(type(value))
        return not plain or torch._C._functorch.is_functorch_wrapped_tensor(value)
    return isinstance(value, torch.fx.Proxy)


def _describe_foreign(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    return next((type(v).__name__ for v in walk((args, kwargs), 4) if _is_foreign(v)), None)


def _has_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(v, (torch.Tensor, torch.nn.Module)) for v in walk((args, kwargs), 4))


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What distinguishes calls of which one could be captured and another not."""
    return (torch.is_grad_enabled(), *map(_kind, args), *((k, _kind(v)) for k, v in kwargs.items()))


def _kind(v: Any) -> Any:
    if isinstance(v, torch.Tensor):
        return type(v), v.dtype, v.dim(), v.requires_grad, v.device.type
    if v is None or isinstance(v, (bool, str)):
        return v
    if isinstance(v, (list, tuple)):
        return type(v), *map(_kind, itertools.islice(_items(v), 8))
    return (type(v), id(v)) if isinstance(v, (torch.nn.Module, types.FunctionType)) else type(v)


# ---------------------------------------------------------------- the miss


# Our exceptions, and PyTorch's of the same meaning, by module and name.
_PEERS: dict[type, tuple[str, str]] = {
    Unsupported: ("torch._dynamo.exc", "Unsupported"), BackendFailed: ("torch._dynamo.exc", "BackendCompilerFailed"),
    RecompileLimitHit: ("torch._dynamo.exc", "FailOnRecompileLimitHit"),
    ConstraintViolation: ("torch.fx.experimental.symbolic_shapes", "ConstraintViolationError"),
}  # fmt: skip
_NAMED = (Unsupported, BackendFailed, RecompileLimitHit, ConstraintViolation)
_BOTH: dict[tuple[type, type], type] = {}


def _by_both_names(error: BaseException) -> None:
    """Let programs that catch PyTorch's class of this meaning catch ours: who names it has loaded its module."""
    kind = type(error)
    where, name = next((row for own, row in _PEERS.items() if issubclass(kind, own)), ("", ""))
    peer = getattr(sys.modules.get(where), name, None)
    if not isinstance(peer, type) or issubclass(kind, peer):
        return
    both = _BOTH.get((kind, peer))
    if both is None:
        both = _BOTH[kind, peer] = type(kind.__name__, (kind, peer), {"__module__": kind.__module__, "__init__": kind.__init__})
    with contextlib.suppress(TypeError):  # layouts that differ
        error.__class__ = both


def on_miss(dispatcher: Any, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """No entry fits this call."""
    try:
        return _on_miss(dispatcher, fn, args, kwargs)
    except _NAMED as error:
        _by_both_names(error)
        if isinstance(error, Unsupported):
            raise error.with_traceback(None) from None  # the program's frames, not ours
        raise


def _on_miss(dispatcher: Any, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    state: State = dispatcher.state
    with overrides.undisturbed():
        key = signature(args, kwargs)
        if key in state.broken or (state.hooked and state.point is None and not _has_tensor(args, kwargs)):
            return _run_broken(dispatcher, state, key)
        foreign = _describe_foreign(args, kwargs)
    if foreign is not None:
        events.emit("fallback", code="API002", at=location(fn), detail=foreign)
        return _frame.RUN_PLAIN
    peers.rearm()
    if state.settings.options.background:
        return _run_meanwhile(dispatcher, state, fn, args, kwargs, key)
    before = dispatcher.entries
    with _LOCK:
        if dispatcher.entries is not before:  # another thread compiled meanwhile
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
    d.entries = tuple(e for e in d.entries if not _is_dead(e))
    if d.entries:
        verdict = _note_recompile(d, state, fn, call, key)
        if verdict is not None:
            return verdict
    _read_marks(state, call)
    try:
        with capturing():
            entry = _make(d, state, fn, args, kwargs, call)
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
            _warn_eager(state, why)
        state.broken[key] = 1
        return _frame.RUN_HOOKED
    d.entries = (*d.entries, entry)
    return _Made(entry, call)


def _warn_eager(state: State, why: Unsupported) -> None:
    """Once for each function that was asked to be compiled: it runs eagerly, which is right but no faster."""
    asked = not state.hooked and state.point is None
    if asked and not state.warned and state.settings.options.warn_eager and why.code != "CAP006":
        state.warned = True
        what = f"torchsmith: {state.label} runs eagerly. {why}"
        events.warn(f"{what} (options={{'warn_eager': False}} or TORCHSMITH_WARN_EAGER=0 silences this.)")


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
    code = fn.__code__
    if "_torchdynamo_disable" in fn.__dict__ and "_torchdynamo_orig_callable" in fn.__dict__:
        return _frame.RUN_PLAIN  # PyTorch's own compiler.disable: nor what it calls
    if not is_entry_file(code.co_filename) or (code.co_name.startswith("<") and code.co_name != "<lambda>"):
        return None
    if getattr(fn, "_torchsmith_disabled", False) or getattr(fn, "_torchdynamo_disable", False) or code.co_name in ("__init__", "__new__", "__repr__", "__del__", "__getattr__"):
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


def location(fn: types.FunctionType) -> str:
    return f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}"


# ---------------------------------------------------------------- capture and compile


def _make(d: Any, state: State, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
    settings = state.settings
    name = _graph_name(state.label)
    try:
        with events.timed("capture", graph=name):
            captured = _capture_or_split(d, state, fn, args, kwargs)
        if state.hooked and state.point is None and captured.stop is None and not any(n.op.startswith("call") for n in captured.graph.graph.nodes):
            raise _NothingToCompile("API007", at=location(fn))
        try:
            compiled = _compile(state, captured, call, name)
            if compiled.report.code not in (None, "AUT001") and state.reads and not settings.fullgraph:
                raise Unsupported(compiled.report.code, at=location(fn))
        except Unsupported:
            if not state.reads or settings.fullgraph:
                raise
            state.may_read = False  # split where the value is read
            return _make(d, state, fn, args, kwargs, call)
        _count_operators(state, captured)
        reason = compiled.report.code
        numbers = reason not in (None, "AUT001") and any(r.origin[0] == "scalar" for r in captured.facts.symbols.values())
        if numbers and state.forget_numbers(Unsupported(reason or "", at=location(fn))):
            return _make(d, state, fn, args, kwargs, call)
        return _install(d, state, fn, captured, compiled, name, call)
    except (Unsupported, BackendFailed, ConstraintViolation):
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


_COMPILED = [0]  # operators, in all functions of this process


def _count_operators(state: State, captured: Any) -> None:
    """A function that is split says so if it comes to its end and nothing of it, nor of what it called, was compiled."""
    n, family = sum(n.op.startswith("call") for n in captured.graph.graph.nodes), state.family
    _COMPILED[0] += n
    if family is None:
        return
    family.operators += n
    if captured.stop is None and family.why is not None and family.others == _COMPILED[0]:
        _warn_eager(family.root, family.why)


# Reasons for which a frame is not split: the frame as a whole, or too much of it.
_NOT_SPLIT = frozenset({"CAP003", "CAP005", "CAP013", "CAP027"})
_TRIES = 6  # stops that are tried, earlier and earlier


def _capture_or_split(d: Any, state: State, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole frame, or as much of it as can be captured: up to the instruction that cannot, or to one before it where the frame's
    state can be handed over."""
    settings = state.settings
    state.reads = settings.fullgraph
    try:
        return _capture_with_retry(state, fn, args, kwargs)
    except Unsupported as error:
        why = error
    if why.code == "GRA004" and not state.counts:
        state.counts = True
        try:
            return _capture_with_retry(state, fn, args, kwargs)
        except Unsupported:
            state.counts = False
    chosen = settings.backend  # others are given graphs without numbers of their own
    takes = getattr(chosen, "dialect", "native") == "native" or getattr(chosen, "name", "") == "eager"
    if why.code in _READS and state.may_read and takes and not settings.fullgraph:
        captured = _capture_reading(state, fn, args, kwargs)
        if captured is not None:
            return captured
    if settings.fullgraph or isinstance(why, Forbidden) or why.is_error or why.code in _NOT_SPLIT or why.step < 0:
        raise why
    family = family_of(d, state)
    if len(family.points) >= resume.MAX_POINTS:
        raise why
    stop, first = why.step, why
    for _ in range(_TRIES):
        try:
            captured = _capture_with_retry(state, fn, args, kwargs, stop)
        except Unsupported as error:
            if error.code == "CAP027":
                raise
            if error.code in _NOT_SPLIT or stop == 0:
                raise first from error
            stop = error.step if 0 <= error.step < stop else _earlier(state, fn, args, kwargs, stop)
            continue
        events.emit("graph_break", code=first.code, loc=first.at or location(fn), detail=first.detail, name=state.label)
        if family.why is None:
            first.__traceback__ = first.__cause__ = first.__context__ = None  # they hold what the frame held, user's objects too
            family.why, family.others = first, _COMPILED[0]
        return captured
    raise first


_READS = frozenset({"CAP020", "GRA003"})  # Python, or torch itself, asks for the value of a tensor


def _capture_reading(state: State, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole frame as one graph in which tensors' values are numbers known only when it runs; None where something needs to know more
    of them than the program itself checks."""
    state.reads = True
    try:
        captured = _capture_with_retry(state, fn, args, kwargs)
    except Unsupported:
        captured = None
    if captured is None or captured.facts.needed:
        state.reads = state.may_read = False
        return None
    return captured


def _earlier(state: State, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], stop: int) -> int:
    """The last instruction before `stop` in front of which all that the frame holds can be handed over."""
    try:
        _capture(fn, args, kwargs, dynamic=False, at=state.point, stop=stop, probe=True)
    except Unsupported as why:
        return why.step if 0 <= why.step < stop else stop // 2
    return stop // 2


def family_of(d: Any, state: State) -> resume.Family:
    if state.family is None:
        state.family = resume.Family(state, d.key)
    return state.family


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


def _capture_with_retry(state: State, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], stop: int | None = None) -> Any:
    """Capture with the dimensions found to vary; without them where that is not supported. stop: not beyond this instruction."""
    dims = {k: set(v) for k, v in state.dynamic_dims.items()} if state.may_be_dynamic else {}
    settings = state.settings
    try:
        return _capture_pinned(state, fn, args, kwargs, dims, stop)
    except Unsupported as why:
        if state.unbacked and why.code == "GRA004":
            raise ConstraintViolation(f"torchsmith: {why}") from why
        if not dims and not settings.dynamic:
            raise
        if any(ITSELF in d for d in dims.values()):
            if stop is None and why.step >= 0 and not settings.fullgraph and why.code not in _NOT_SPLIT:
                raise  # the frame is split there
            state.forget_numbers(why)
            return _capture_with_retry(state, fn, args, kwargs, stop)
        try:
            captured = _capture(fn, args, kwargs, dynamic=False, dynamic_dims={}, fullgraph=settings.fullgraph, at=state.point, stop=stop, reads=state.reads, counts=state.counts)
        except Unsupported as static:
            if static.step <= why.step:  # the sizes were not in the way: they stay dynamic where the frame is split
                raise why from None
            state.may_be_dynamic = False
            raise
        state.may_be_dynamic = False
        events.emit("fallback", code=why.code, at=why.at or location(fn), detail=f"sizes stay static: {why.detail}")
        return captured


def _capture_pinned(state: State, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], dims: dict[str, set[int]], stop: int | None = None) -> Any:
    """Capture until no symbol stands for one size only (kernels know constants); sizes of 1 are numbers where as symbols they are in the way."""
    settings = state.settings
    static: dict[str, set[int]] = {}
    ones = bool(settings.dynamic or dims)
    varying: set[str] = set()  # floats of which another value is compiled already: where one is needed as a constant, the call is left out
    while True:
        try:
            captured = _capture(
                fn, args, kwargs, dynamic=settings.dynamic, dynamic_dims=dims, static_dims=static, ones=ones,
                declared=state.marked, unbacked=state.unbacked, fullgraph=settings.fullgraph, at=state.point, stop=stop, reads=state.reads,
                counts=state.counts,
                loose=frozenset(varying),
            )  # fmt: skip
        except Unsupported as why:
            if not ones or why.code == "GRA015":
                raise
            ones = False
            continue
        pinned = _pinned(state, captured)
        if all(d in static.get(source, ()) for source, d in pinned):  # nothing, or nothing that could be told the machine
            return captured
        floats = {str(captured.facts.sources[n]) for n, v in captured.facts.pinned().items() if type(v) is float and n in captured.facts.sources}
        if not settings.fullgraph and not floats <= varying:
            varying |= floats
            continue
        for source, d in pinned:
            static.setdefault(source, set()).add(d)


def _pinned(state: State, captured: Any) -> list[tuple[str, int]]:
    """Dynamic dimensions (input, number) that the captured program is for one size of."""
    facts = captured.facts
    found: list[tuple[str, int]] = []
    for name, value in facts.pinned().items():
        source: Source | None = facts.sources.get(name)
        if source is None:
            continue
        place = (str(source.base), source.dim) if isinstance(source, TensorProperty) else (str(source), ITSELF)
        if place in state.marked:
            why = next((g for g in facts.guards if any(x is facts.symbols[name].sym for x in walk_expr(g))), None)
            raise ConstraintViolation(
                f"torchsmith: dimension {place[1]} of {place[0]} is marked dynamic, but the program makes {value} of it"
                f" ({facts.locs.get(why, '?')}: {'' if why is None else print_condition(why)}). Mend the program, or use maybe_mark_dynamic."
            )
        found.append(place)
    return found


def _nothing(*args: Any) -> tuple[Any, ...]:
    return ()


def _compile(state: State, captured: Any, call: Call, name: str) -> Any:
    settings = state.settings
    nodes = captured.graph.graph.nodes
    if captured.stop is not None or state.point is not None:
        output = next(n for n in nodes if n.op == "output")
        if not any(n.op.startswith("call") for n in nodes) and not output.all_input_nodes:
            return Nothing(_nothing, tuple(captured.facts.guards), Nothing(None, (), None))
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


def _install(d: Any, state: State, fn: types.FunctionType, captured: Any, compiled: Any, name: str, call: Call) -> Any:
    symbols: dict[str, Source] = dict(captured.facts.sources)
    sizes = [Guard(FixedObject(None), "shape", e) for e in (*compiled.guards, *_layout_conditions(captured, symbols))]
    known = {g.value for g in captured.guards if g.kind == "shape"}
    all_guards = [*captured.guards, *(g for g in sizes if g.value not in known)]
    keep = state.settings.options.guard_filter_fn
    if keep is not None:
        all_guards = _filter(keep, all_guards)
    all_guards = [guards.weaken(g) for g in all_guards]
    finish = captured.finish
    run = or_elsewhere(captured.graph, compiled.call, getattr(compiled.report, "road", ""))
    if overrides.users(overrides.caller_modes()) or any(g.kind == "tensor" and overrides.is_subclass(g.value.type) for g in captured.guards):
        run = overrides.without_handlers(run)
    entry = guards.make_entry(
        all_guards,
        captured.inputs,
        finish.recipe if finish.text is None else None,
        _make_finish(finish, name) if finish.text is not None else None,
        run,
        names=d.names,
        free_names=d.free_names,
        globals=fn.__globals__,
        symbols=symbols,
        name=name,
        source=Installed(tuple(all_guards), symbols, compiled.report, captured.graph, name, _holders(all_guards, call)),
        may_be_caught=captured.may_be_caught,
        resume=None if captured.stop is None else resume.make_site(family_of(d, state), captured.stop, fn.__globals__, _point),
    )
    events.emit("guards", name=name, list=[guards.print_guard(g) for g in all_guards])
    return entry


def _holders(rows: Sequence[Guard], call: Call) -> dict[str, weakref.ref[torch.nn.Module]]:
    numbers = [g.source for g in rows if g.kind == "equals" and type(g.value) in (int, float)]
    found = {str(s): _holder(s, call) for s in numbers}
    return {place: weakref.ref(module) for place, module in found.items() if module is not None}


def or_elsewhere(graph: torch.fx.GraphModule, call: Callable[..., Any], road: str) -> Callable[..., Any]:
    """`call`; where it finds that a way is taken that only raises, as if it had not been called: the dispatcher runs the function itself.
    After an exception modes that the graph had entered by then are left."""
    if road != "native" and any(n.op == "call_function" and n.target in _MODES for n in graph.graph.nodes):
        call = _leaving_modes(call)
    if not assumes(graph):
        return call

    def checked(*args: Any) -> Any:
        random = torch.get_rng_state()
        try:
            return call(*args)
        except RuntimeError as error:
            if not str(error).startswith(ASSUMED):
                raise
            if road != "native":  # the native road has counted it
                events.emit("fallback", code="RUN004", at="", detail=str(error))
        torch.set_rng_state(random)
        raise _frame.Elsewhere

    return checked


_MODES = (torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast)


def _leaving_modes(call: Callable[..., Any]) -> Callable[..., Any]:
    def left(*args: Any) -> Any:
        before = modes()
        try:
            return call(*args)
        except BaseException:
            set_modes(before)
            raise

    return left


def modes() -> tuple[Any, ...]:
    """What a graph may leave otherwise than it found it: gradients, autocast per device, how deep in autocast."""
    deep = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return torch.is_grad_enabled(), {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}, deep


def set_modes(known: tuple[Any, ...]) -> None:
    """As `modes` found them."""
    grad, autocast, deep = known
    torch._C._set_grad_enabled(grad)
    for device, (on, dtype) in autocast.items():
        torch.set_autocast_enabled(device, on)
        torch.set_autocast_dtype(device, dtype)
    for _ in range(modes()[2] - deep):
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _layout_conditions(captured: Any, symbols: dict[str, Source]) -> list[Expr]:
    """What the graph takes for granted of dynamic inputs: each symbol's range, and strides that follow from the sizes."""
    conditions: list[Expr] = []
    for name, row in getattr(captured.facts, "symbols", {}).items():
        if name in symbols and not row.sym.dtype.is_float:
            conditions.append(op("ge", row.sym, const(row.lo)))
            if row.hi is not None:
                conditions.append(op("le", row.sym, const(row.hi)))
    rows = {g.source: g.value for g in captured.guards if g.kind == "tensor"}
    placeholders = [n for n in captured.graph.graph.nodes if n.op == "placeholder"]
    for node, source in zip(placeholders, captured.inputs, strict=True):
        guard: TensorGuard | None = rows.get(source)
        val = node.meta.get("val")
        if guard is None or None not in guard.strides or not isinstance(val, torch.Tensor):
            continue
        for d, (known, stride) in enumerate(zip(guard.strides, val.stride(), strict=True)):
            if known is None:
                symbol = f"{source}.stride({d})"
                symbols[symbol] = TensorProperty(source, "stride", d)
                condition = op("eq", Sym(symbol), expr_of(stride))
                size = expr_of(val.shape[d])  # the stride of a dimension of size 1 means nothing
                conditions.append(condition if isinstance(size, Const) and size.value != 1 else op("or", condition, op("eq", size, const(1))))
    return [c for c in conditions if not isinstance(c, Const)]


def _filter(keep: Callable[..., Any], rows: Sequence[Guard]) -> list[Guard]:
    """options["guard_filter_fn"]: a list of truths, one for each guard."""
    try:
        wanted = list(keep(rows))
    except Exception as error:  # the user's function may raise anything
        raise Forbidden("API011", detail=f"{type(error).__name__}: {error}") from error
    if len(wanted) != len(rows):
        raise Forbidden("API011", detail=f"it returned {len(wanted)} answers for {len(rows)} guards")
    return [g for g, w in zip(rows, wanted, strict=True) if w]


def _make_finish(finish: Any, name: str) -> Callable[..., Any]:
    namespace = dict(finish.namespace)
    exec(compile(finish.text, f"<torchsmith finish of {name}>", "exec"), namespace)
    return namespace["finish"]  # type: ignore[no-any-return]


_GRAPHS: Counter[str] = Counter()


def _graph_name(label: str) -> str:
    """A name that no other graph of this process has."""
    safe = _safe(label)
    _GRAPHS[safe] += 1
    return f"{safe}_{_GRAPHS[safe] - 1}"


def _safe(label: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in label.replace("<locals>.", "").replace("<lambda>", "lambda"))


# ---------------------------------------------------------------- recompiles


def _is_dead(entry: Any) -> bool:
    """An entry whose guarded object is gone can never be right again."""
    known: Installed = entry.source
    return bool(entry.dead) or any(isinstance(g.value, weakref.ref) and g.value() is None for g in known.guards if g.kind == "identity")


def _note_recompile(d: Any, state: State, fn: types.FunctionType, call: Call, key: Any) -> Any:
    """Say why; at the limit warn once and run as it is. Learns which dimensions vary."""
    latest: Installed = d.entries[-1].source
    failed = _failed_guard(d.entries[-1], call)
    why = guards.explain(failed, call, latest.symbols) if failed is not None else "its guards hold now, but did not when they were checked"
    loc = (failed.loc if failed is not None else "") or location(fn)
    settings = state.settings
    if len(d.entries) >= settings.recompile_limit:
        times = f"{len(d.entries)} times (recompile_limit={settings.recompile_limit})"
        message = f"torchsmith: {state.label} was compiled {times}; last reason: {why} ({loc}){_cure(failed)}"
        if settings.fullgraph:
            raise RecompileLimitHit(message)
        if not state.warned:
            state.warned = True
            events.warn(message + ". It runs as it is from now on where no compilation fits.")
        events.emit("graph_break", code="API003", loc=loc, detail=why, name=state.label)
        state.broken[key] = 1
        return _frame.RUN_HOOKED
    events.emit("recompile", name=state.label, guard=why, loc=loc)
    if settings.dynamic is not False:
        for e in d.entries:
            _learn_dynamic(state, e.source, call)
    return None


def _cure(failed: Guard | None) -> str:
    """What a user can do about a number that changes and cannot be a symbol."""
    if failed is None or failed.kind not in ("equals", "shape"):
        return ""
    if failed.kind == "equals" and type(failed.value) in (int, float):
        return f". {failed.source} is a{'n int' if type(failed.value) is int else ' float'} that changes; pass it as a tensor: torch.tensor(...)"
    return ". Pass dynamic=True if sizes change on every call" if failed.kind == "shape" else ""


def missed(d: Any, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why no entry fits this call, in words."""
    values = d.bind(args, kwargs, fn)
    if not d.entries or values is None:
        return f"nothing was compiled yet ({location(fn)})"
    closure = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    call = Call(dict(zip(d.names, values, strict=True)), fn.__globals__, closure)
    failed = _failed_guard(d.entries[-1], call)
    return f"{guards.explain(failed, call, d.entries[-1].source.symbols)} ({failed.loc or location(fn)})" if failed is not None else location(fn)


def _failed_guard(entry: Any, call: Call) -> Guard | None:
    """The guard that C found false, or, where the world changed since, the first that is false now."""
    known: Installed = entry.source
    if 0 <= entry.failed < len(known.guards) and not guards.holds(known.guards[entry.failed], call, known.symbols):
        return known.guards[entry.failed]
    return guards.first_failure(known.guards, call, known.symbols)


def _learn_dynamic(state: State, known: Installed, call: Call) -> None:
    """Dimensions in which this call differs from an entry become dynamic in the next capture."""
    for g in known.guards:
        if g.kind == "equals" and state.may_have.get(type(g.value)):
            n = guards.evaluate(g.source, call)
            if type(n) is type(g.value) and n != g.value and (type(n) is float or n > 1) and not _is_another_module(g.source, known, call):
                state.dynamic_dims.setdefault(str(g.source), set()).add(ITSELF)
                state.numbers[str(g.source)] = type(n)
        if g.kind != "tensor":
            continue
        want: TensorGuard = g.value
        v = guards.evaluate(g.source, call)
        if not isinstance(v, torch.Tensor) or isinstance(v, torch.nn.Parameter) or v.dim() != len(want.sizes) or v.dtype != want.dtype:
            continue
        varying = {i for i, (was, now) in enumerate(zip(want.sizes, v.shape, strict=True)) if was is not None and was != now}
        if varying:
            state.dynamic_dims.setdefault(str(g.source), set()).update(varying)


def _holder(source: Source, call: Call) -> torch.nn.Module | None:
    """The module that a number is an attribute of."""
    holder = getattr(source, "base", None)
    if isinstance(holder, Attr) and holder.name == "__dict__":
        holder = holder.base
    found = None if holder is None else guards.evaluate(holder, call)
    return found if isinstance(found, torch.nn.Module) else None


def _is_another_module(source: Source, known: Installed, call: Call) -> bool:
    """An attribute of a module is part of what the module is: it varies only where it differs in one and the same module."""
    module = _holder(source, call)
    if module is None:
        return False
    was = known.holders.get(str(source))
    return was is None or was() is not module


def _read_marks(state: State, call: Call) -> None:
    """mark_dynamic / mark_static on the call's tensors. Raises IndexError for a dimension of shapes_spec that a tensor does not have."""
    for place, dims in (state.settings.shapes or {}).items():
        t = call.locals.get(place[3:-2])  # L['x']
        if isinstance(t, torch.Tensor) and dims and max(dims) >= t.dim():
            raise IndexError(f"shapes_spec[{place[3:-2]!r}] names dimension {max(dims)} of a tensor with {t.dim()} dimensions")
    for name, value in call.locals.items():
        for source, t in _sources(Local(name), value):
            marked = dict.fromkeys(getattr(t, "_dynamo_dynamic_indices", ()), (1, None)) | dict(getattr(t, "_torchsmith_dynamic", {}))
            bounds = getattr(t, "_dynamo_unbacked_bounds", {})
            theirs = {d: (bounds.get(d, (None, None))[0] or 0, bounds.get(d, (None, None))[1]) for d in getattr(t, "_dynamo_unbacked_indices", ())}
            marked |= theirs
            for d, (low, high) in marked.items():
                if (low > 1 and t.shape[d] < low) or (high is not None and t.shape[d] > high):
                    raise ConstraintViolation(
                        f"torchsmith: dimension {d} of {source} is marked to lie between {low} and {'infinity' if high is None else high},"
                        f" but it is {t.shape[d]}. Give it such a size, or mark it with another range."
                    )
            state.unbacked.update((str(source), d) for d in {*getattr(t, "_torchsmith_unbacked", ()), *theirs})
            state.marked.update({(str(source), d): span for d, span in marked.items()})
            dynamic = {*marked, *getattr(t, "_torchsmith_maybe_dynamic", ()), *getattr(t, "_dynamo_weak_dynamic_indices", ())}
            static = {*getattr(t, "_torchsmith_static", ()), *getattr(t, "_dynamo_static_indices", ())}
            if dynamic:
                state.dynamic_dims.setdefault(str(source), set()).update(dynamic)
            if static and str(source) in state.dynamic_dims:
                state.dynamic_dims[str(source)] -= static


def _sources(source: Source, value: Any, depth: int = 3) -> Iterator[tuple[Source, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield source, value
    elif depth and isinstance(value, (list, tuple)):
        for i, x in enumerate(_items(value)):
            yield from _sources(Item(source, i), x, depth - 1)
    elif depth and isinstance(value, dict):
        for k, x in dict.items(value):
            yield from _sources(Item(source, k), x, depth - 1)


def reset() -> None:
    """Forget every compilation."""
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
__all__ = ["ALL", "BackendFailed", "RecompileLimitHit", "Settings", "State", "make_dispatcher", "on_miss", "reset"]
