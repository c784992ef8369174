"""The bytecode machine: runs a frame symbolically, records torch calls in a graph, reads the outside world under guards.

In: a Python function with its arguments. Out: Captured, or Unsupported with a code and the user's line. No statement of the user
runs natively: functions are inlined frame by frame; what changes Python state is replayed by finish after the graph has run.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch

from ..codes import Unsupported
from ..graph import tracing
from ..graph.spec import ASSUMED
from . import (
    arrays,
    assemble,
    bytecode,
    calls,
    finish,
    floats,
    opcodes,
    overrides,
    policy,
    tables,  # noqa: F401  (fills the tables of rows)
    tensor_attrs,
    torch_rows,
    transforms,
)
from . import attributes as at
from . import protocols as pr
from .attributes import Raised
from .bytecode import VERSION
from .captured import Captured
from .gradients import Gradients
from .guards import global_state
from .opcodes import NULL, RETURN
from .resume import Later, Point, is_data
from .source import Attr, Cell, Computed, FixedObject, Global, Item, Local, Source
from .stamps import Again, Stamps
from .tensors import Recorder
from .world import CONTAINERS, MISSING, PINNED_TYPES, SCALARS, Identity, Track, World, container_base, is_by_identity, is_key, item_of, put

_GENERATOR = 0x20
_ASYNC = 0x80 | 0x200
_MAX_STEPS = 200_000  # backward jumps: a loop longer than this is not worth unrolling
_MAX_DEPTH = 200
_VALUES = (int, float, complex, str, bytes, tuple)  # objects of a program's class derived from these are looked into like these
_READ = frozenset({"item", "tolist", "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__complex__"})
_NUMBER = frozenset({"item", "tolist", "__int__", "__float__", "__index__"})  # of a program that stands alone, symbols
_OF_KINDS = (TypeError, AttributeError, ValueError, RuntimeError, AssertionError, SystemError, BufferError)  # about what kind a value is
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LISTED = 64  # numbers that tolist may give


class Frame:
    """One Python frame being interpreted."""

    __slots__ = ("clean", "code", "exc", "fast", "fn", "globals", "index", "ins", "kw_names", "lasti", "machine", "names", "stack", "steps")

    def __init__(self, machine: Machine, fn: types.FunctionType, fast: list[Any], names: dict[str, Any] | None = None) -> None:
        self.machine, self.fn, self.fast, self.names = machine, fn, fast, names
        self.code = bytecode.decode(fn.__code__)
        self.globals = fn.__globals__
        self.stack: list[Any] = []
        self.index = 0
        self.kw_names: tuple[str, ...] = ()
        self.ins = self.code.instrs[0]
        self.lasti = 0
        self.exc: Any = None
        self.clean = 0
        self.steps = 0  # instructions begun, of the outermost frame

    def run(self, stop: int | None = None) -> tuple[str, Any]:
        """Interpret until the frame returns or yields; Raised if an exception leaves it. stop: of the outermost frame, how many
        instructions at most; such a frame is counted, and takes arguments up only where something looks at them."""
        m = self.machine
        frames = m.frames
        frames.append(self)
        if len(frames) > _MAX_DEPTH:
            raise Unsupported("CAP004", at=m.loc())
        instrs = self.code.instrs
        saved = m.exc
        try:
            while stop is not None:
                if self.steps >= stop:
                    return STOP, None
                ins = self.ins = instrs[self.index]
                if m.probing and finish.can_hand_over(m, self):
                    self.clean = self.steps
                self.steps += 1
                if m.later:
                    self._take_up(ins)
                self.index += 1
                try:
                    out = ins.handler(self, ins)
                except Raised as r:
                    self._raise_to_handler(r.exc)
                    continue
                if out is not None:
                    return out  # type: ignore[no-any-return]
            while True:
                ins = self.ins = instrs[self.index]
                self.index += 1
                try:
                    out = ins.handler(self, ins)
                except Raised as r:
                    self._raise_to_handler(r.exc)
                    continue
                if out is not None:
                    return out  # type: ignore[no-any-return]
        except (Raised, Unsupported):
            raise
        except RecursionError:
            raise Unsupported("CAP004", at=m.loc()) from None
        except Exception as e:  # a mistake in the machine itself: never wrong, only not captured
            raise Unsupported("CAP099", at=m.loc(), detail=f"{self.ins!r}: {type(e).__name__}: {e}") from e
        finally:
            if stop is None:
                m.exc = saved
                frames.pop()

    def _take_up(self, ins: bytecode.Instr) -> None:
        """What the instruction looks at is read from outside now, under guards."""
        if ins.name in _PASSING:
            return
        n = assemble.touches(ins)
        stack = self.stack
        for k in range(0 if n is None else max(len(stack) - n, 0), len(stack)):
            if type(stack[k]) is Later:
                if stack[k].is_data:
                    self.machine.use_data(self, ins, stack[k])
                stack[k] = self.machine.taken_up(stack[k])

    def _raise_to_handler(self, exc: BaseException) -> None:
        m = self.machine
        if m.raised is not exc:
            m.raised, m.raised_at = exc, m.loc()
            if self.ins.name != "RERAISE":
                m.all_raised.append(exc)
        if m.exc is not None and m.exc is not exc and exc.__context__ is None:
            if id(exc) in m.world.tracks:
                raise Unsupported("CAP012", at=m.loc(), detail="__context__ of an exception from outside")
            exc.__context__ = m.exc
        row = self.code.handlers[self.ins.index]
        if row is None:
            raise Raised(exc)
        m.take(exc)
        target, depth, lasti = row
        del self.stack[depth:]
        if lasti:
            self.stack.append(self.ins.offset // 2)
        self.stack.append(exc)
        self.index = target


STOP = "stop"
_PASSING = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "STORE_FAST", "DELETE_FAST", "POP_TOP", "COPY", "SWAP", "NOP", "RESUME", "PRECALL", "KW_NAMES",
                      "PUSH_NULL", "LOAD_CONST", "JUMP_FORWARD", "JUMP_BACKWARD", "LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST",
                      "STORE_FAST_STORE_FAST", "LOAD_FAST_AND_CLEAR"})  # fmt: skip


def drive(m: Machine, frame: Frame) -> Iterator[Any]:
    """A real generator that interprets a generator frame."""
    kind, value = _outside(m, frame.run)
    while kind != RETURN:
        try:
            sent = yield value
        except BaseException as e:
            if not m.active:
                raise
            frame.exc = e
            kind, value = _outside(m, lambda: _resume_raising(frame))
        else:
            frame.stack.append(sent)
            kind, value = _outside(m, frame.run)
    return value


def _resume_raising(frame: Frame) -> tuple[str, Any]:
    exc, frame.exc = frame.exc, None
    frame._raise_to_handler(exc)
    return frame.run()


def _outside(m: Machine, step: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
    """Let the program's exceptions leave as themselves: native code above a generator must see them."""
    try:
        return step()
    except Raised as r:
        raise m.leaving(r.exc) from None


_TEXT = frozenset({repr, str, format, ascii})
_TEXT_METHODS = frozenset({"__repr__", "__str__", "__format__", "__mod__", "__rmod__", "format_map"})
# C functions that ask of an object what it is, and nothing of what it holds
_BY_IDENTITY = frozenset({operator.is_, operator.is_not, operator.eq, operator.ne, operator.contains, operator.setitem, tuple, list, set, dict, bool, None})


def _makes_text(fn: Any, args: list[Any]) -> bool:
    """Does this C function write its arguments out?"""
    if fn in _TEXT:
        return True
    if fn in (operator.mod, operator.imod):
        return type(args[0]) in (str, bytes)
    return getattr(fn, "__name__", "") in _TEXT_METHODS and not isinstance(getattr(fn, "__self__", None), (int, float, complex))


def _keys(fn: Any, args: list[Any]) -> Any:
    """What a call of a C function puts into a set or a dictionary, or looks up there."""
    if fn in (set, frozenset, set.update):
        return args[-1] if args and type(args[-1]) in (list, tuple, set, frozenset, dict) else ()
    holder = getattr(fn, "__self__", None)
    if fn in (set.add, operator.setitem, operator.getitem, operator.delitem, operator.contains):
        holder, args = args[0], args[1:2]
    return args if issubclass(type(holder), (set, frozenset, dict)) else ()


def _is_of_container(fn: Any) -> bool:
    return container_base(type(getattr(fn, "__self__", None))) is not None


@functools.cache
def _has_state_in_c(t: type) -> bool:
    """Does a class in C keep something in these objects (exceptions, iterators, matches), of which no guard tells?"""
    return next(base for base in t.__mro__ if not base.__flags__ & 0x200) is not object


_OPERATORS_THAT_WRITE = frozenset({"setitem", "delitem"} | {n for n in dir(operator) if n.startswith("i") and "__i" + n[1:] + "__" in dir(operator)})


def _may_write_arguments(fn: Any) -> bool:
    """Is this a function of a module in C that may change a container it is given (heapq.heapify, operator.setitem)? Methods say so
    themselves (policy.MUTATING)."""
    if type(fn) is not types.BuiltinFunctionType or not isinstance(fn.__self__, types.ModuleType | None):
        return False
    return fn.__name__ in _OPERATORS_THAT_WRITE if fn.__module__ == "_operator" else fn.__module__ != "builtins"


def _holds_symbols(value: Any) -> bool:
    return type(value) in _SYMBOLS or (type(value) in (tuple, list) and any(map(_holds_symbols, value)))


def _contents(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*dict.keys(container), *dict.values(container)]
    return list(container) if isinstance(container, (list, set)) else []


class Machine:
    """One capture in progress."""

    active = False  # once it is over; a generator may still ask

    def __init__(self, fn: types.FunctionType) -> None:
        self.entry = fn
        self.frames: list[Frame] = []
        self.recorder = Recorder(self)
        self.world = World(self.loc, self.recorder.tensor_input, self.recorder.number_input)
        self.world.real_tensor = self.recorder.real_tensor
        self.arrays: dict[int, arrays.ArrayValue] = {}  # by the id of the array from outside
        self.world.array = functools.partial(arrays.given, self)
        self.gradients = Gradients(self)
        self.stamps = Stamps(self)
        self.found: dict[tuple[type, str], Any] = {}
        self.data_types: dict[type, bool] = {}
        self.exc: BaseException | None = None
        self.raised: BaseException | None = None  # the program's last exception, and where it was raised
        self.raised_at = ""
        self.all_raised: list[BaseException] = []
        self.told: dict[int, tuple[BaseException, Any, Any, bool]] = {}  # exceptions on their way through C: cause, context, suppressed
        self.suspects: dict[int, BaseException] = {}  # exceptions that may be about what stands for the program's values
        self.active = True
        self.probing = False  # looks for an instruction in front of which the frame's state can be handed over
        self.counts = False  # optimizers' counters are numbers read when the call begins
        self.later = False  # a split frame goes on: its values may be Later
        self.error_mode = False  # compiler.error_on_graph_break(True) is entered
        self.is_whole = False  # captured alone, for export: no frame to go back to
        self.splits = True  # where something is not captured, Python goes on between two graphs
        self.steps = 0
        self.global_cache: dict[tuple[int, str], Any] = {}
        self.global_writes = self.world.global_writes
        self.class_writes: dict[tuple[type, str], Any] = {}  # attributes of classes from outside that were written (or DELETED)
        self.cell_sources: dict[int, Source] = {}
        self.cell_writes: dict[int, tuple[Any, Any]] = {}
        self.effects: list[tuple[Any, list[Any], dict[str, Any]]] = []  # calls replayed by finish
        self.calls_seen: set[int] = set()
        self.device_modes = len(overrides.caller_modes())
        self.modes: list[Any] = []  # modes of torch functions that the program is under, outermost first
        self.modes_before: list[Any] = []  # those of them that it was called under
        self.handlers_off = self.handlers_before = overrides.caller_level()
        self.shown: set[int] = set()  # objects whose __repr__ runs
        self.subclasses = False  # tensors of classes with a __torch_function__ are about
        self.grad_before = torch.is_grad_enabled()
        self.inference = self.entered_inference = torch.is_inference_mode_enabled()
        self.autocast: dict[str, tuple[bool, Any]] = {
            d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)
        }
        self.contexts: list[tuple[Any, Any, Any, Any]] = []  # inference mode and autocast regions that are open
        self.context_writes: dict[int, tuple[Any, Any]] = {}
        self.tensor_attrs: dict[tuple[int, str], Any] = {}
        self.found_tensor: dict[tuple[type, str], Any] = {}
        self.global_hooks_guarded = False

    def let_go(self) -> None:
        """The capture is over. The machine and its parts refer to one another: they drop what they hold of the program, which would else
        live until Python looks for garbage."""
        self.world.let_go()
        vars(self).clear()

    # ------------------------------------------------------------ places

    @property
    def grad(self) -> bool:
        """Grad mode where the program is now: autograd watches tracing tensors as it would the program's own."""
        return torch.is_grad_enabled()

    @grad.setter
    def grad(self, mode: bool) -> None:
        torch._C._set_grad_enabled(mode)

    @property
    def grad_mode(self) -> bool:
        return self.grad

    @grad_mode.setter
    def grad_mode(self, mode: bool) -> None:
        """As the program sets it: in the graph too."""
        torch_rows.set_grad_enabled(self, [mode], {})

    def loc(self) -> str:
        """file:line of the innermost user frame; of the innermost one where none is the user's (torch's own modules, exported)."""
        frame = None
        for frame in reversed(self.frames):
            if not policy.is_torch_file(frame.code.code.co_filename):
                break
        if frame is not None and frame.code.code.co_filename == policy.EXPORT_FRAME:
            frame = self.frames[-1]
        return f"{frame.code.code.co_filename}:{frame.ins.line}" if frame is not None else _where(self.entry)

    def is_in_optimizer(self) -> bool:
        """Is the code that runs now, or what called it, torch.optim's?"""
        return any(f.code.code.co_filename.startswith(policy.OPTIMIZERS) for f in self.frames)

    def use_data(self, frame: Frame, ins: bytecode.Instr, value: Later) -> None:
        """The instruction is about to look at what Python computed behind a break: as a number in tensor code it is one of the graph's
        inputs; everything else is left to Python."""
        kind, stack, n = type(value.obj), frame.stack, ins.arg
        if issubclass(kind, np.generic):
            return
        if kind in (int, float):
            if ins.name in ("BUILD_SLICE", "BUILD_TUPLE", "BUILD_LIST"):
                fits = True
            elif ins.name == "CALL":
                first, second = stack[-n - 2], stack[-n - 1]
                fn = second if first is NULL or VERSION >= (3, 13) else first
                fits = calls.takes_numbers(first if VERSION >= (3, 13) else fn)
            else:
                fits = ins.name in ("BINARY_OP", "BINARY_SUBSCR", "STORE_SUBSCR") and any(
                    issubclass(type(v.obj if type(v) is Later else v), torch.Tensor) for v in stack[-3 if ins.name == "STORE_SUBSCR" else -2 :]
                )
            if fits:
                self.recorder.data.add(str(value.source))
                return
        raise Unsupported("CAP023", at=self.loc(), detail=f"a {kind.__name__} that Python computed")

    def taken_up(self, value: Any) -> Any:
        """A value of a split frame, read under guards if nothing has looked at it yet."""
        if type(value) is Later and value.is_data and isinstance(value.obj, np.generic):
            made = arrays.given_scalar(self, value.obj, value.source)
            if made is not MISSING:
                return made
        return self.world.wrap(value.obj, value.source) if type(value) is Later else value

    def tick(self) -> None:
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise Unsupported("CAP005", at=self.loc())

    # ------------------------------------------------------------ variables

    def load_global(self, frame: Frame, name: str) -> Any:
        """A global name, or else a builtin: whichever it is, a guard notices when it is another."""
        g = frame.globals
        key = (id(g), name)
        got = self.global_cache.get(key, NULL)
        if got is not NULL:
            return got
        written = self.global_writes.get(key)
        if written is not None and written[2] is not NULL:
            return written[2]
        if written is None and name in g:
            value = self.world.wrap(g[name], self.global_source(g, name))
        else:
            builtins = g.get("__builtins__", __builtins__)
            builtins = vars(builtins) if issubclass(type(builtins), types.ModuleType) else builtins
            if name not in builtins:
                if written is None:
                    self.world.guard(FixedObject(g, f"globals({g.get('__name__', '?')})"), "missing", name)
                raise Raised(NameError(f"name '{name}' is not defined", name=name))
            if written is not None:  # deleted by this call
                return self.world.wrap(builtins[name], Item(FixedObject(builtins, "builtins"), name))
            value = self.world.wrap(builtins[name], self.global_source(g, name))
        self.global_cache[key] = value
        return value

    def global_source(self, g: dict[str, Any], name: str) -> Source:
        if g is self.entry.__globals__:
            return Global(name)
        return Global(name, FixedObject(g, f"globals({g.get('__name__', '?')})"))

    def store_global(self, g: dict[str, Any], name: str, value: Any) -> None:
        """A global name (attribute of a module) is written, or deleted (NULL): one place, whoever reads it."""
        key = (id(g), name)
        self.global_cache.pop(key, None)
        self.global_writes[key] = (g, self.global_source(g, name), value)
        self.world.keep.append(g)
        track = self.world.tracks.get(id(g))
        if track is not None and track.image is not None:  # globals() or vars(module) was read whole
            put(track.image, name, value)

    def is_namespace(self, track: Track) -> bool:
        """Is this dictionary the globals of a module?"""
        g = track.obj
        return type(g) is dict and ("__builtins__" in g or getattr(sys.modules.get(g.get("__name__", "")), "__dict__", None) is g)

    def cell_value(self, cell: Any) -> Any:
        """What a cell holds now; NULL: nothing."""
        written = self.cell_writes.get(id(cell))
        if written is not None:
            return written[1]
        try:
            value = cell.cell_contents
        except ValueError:
            return NULL
        source = self.cell_sources.get(id(cell))
        return value if source is None else self.world.wrap(value, source)

    def load_cell(self, cell: Any, name: str = "?") -> Any:
        value = self.cell_value(cell)
        if value is NULL:
            raise Raised(NameError(f"cannot access free variable '{name}' where it is not associated with a value in enclosing scope"))
        return value

    def store_cell(self, cell: Any, value: Any) -> None:
        if id(cell) in self.cell_sources:
            self.cell_writes[id(cell)] = (cell, value)
        elif value is NULL:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    def made_function(self, fn: types.FunctionType) -> None:
        self.world.fresh_pinned.add(id(fn))
        self.world.keep.append(fn)

    # ------------------------------------------------------------ calls

    def call(self, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return calls.call(self, fn, args, kwargs)

    def inline(self, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Interpret a Python function."""
        code = fn.__code__
        if code.co_flags & _ASYNC:
            raise Unsupported("CAP002", at=self.loc(), detail="async code")
        source = self.function_source(fn)
        fast = self._bind(fn, args, kwargs, source)
        given = fast[: code.co_argcount] if fn in torch_rows.AFTER else None
        frame = Frame(self, fn, fast)
        if code.co_flags & _GENERATOR:
            return drive(self, frame)
        result = frame.run()[1]
        return result if given is None else torch_rows.AFTER[fn](self, result, *given)

    def function_source(self, fn: types.FunctionType) -> Source | None:
        """Guard what a function from outside is made of; None for a function made here."""
        if id(fn) in self.world.fresh_pinned:
            return None
        track = self.world.tracks.get(id(fn))
        pinned = self.world.pinned.get(id(fn)) if track is None else track.source  # where it was found, and is guarded to be
        base: Source = pinned or FixedObject(fn, fn.__qualname__)
        if id(fn) in self.calls_seen:
            return base
        self.calls_seen.add(id(fn))
        if fn is self.entry:
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
                self.cell_sources.setdefault(id(cell), Cell(name))
            return base
        if track is not None:
            self.world.use(track)
            self.world.guard(Attr(base, "__code__", "getattr"), "identity", fn.__code__)
        elif not policy.is_trusted(str(fn.__globals__.get("__name__", ""))):
            self.world.guard(base, "function", (fn.__code__, fn.__defaults__, fn.__kwdefaults__))
        for n, cell in enumerate(fn.__closure__ or ()):
            if pinned is not None:
                self.cell_sources.setdefault(id(cell), Item(Item(Attr(base, "__closure__", "getattr"), n), "cell_contents"))
            else:
                self.cell_sources.setdefault(id(cell), Item(FixedObject(cell, f"{fn.__qualname__}.{fn.__code__.co_freevars[n]}"), "cell_contents"))
            self.world.keep.append(cell)
        return base

    def _bind(self, fn: types.FunctionType, args: list[Any], kwargs: dict[str, Any], source: Source | None) -> list[Any]:
        """Arguments to fast slots, as CPython does."""
        code = fn.__code__
        npos, nkw = code.co_argcount, code.co_kwonlyargcount
        names = code.co_varnames
        fast = [NULL] * bytecode.decode(code).size
        given = len(args)
        n = min(given, npos)
        fast[:n] = args[:n]
        at_end = npos + nkw
        if code.co_flags & 4:
            fast[at_end] = tuple(args[npos:])
            at_end += 1
        elif given > npos:
            raise Raised(_binding_error(fn, args, kwargs))
        if kwargs:
            self._bind_keywords(fn, fast, args, kwargs, at_end)
        elif code.co_flags & 8:
            fast[at_end] = {}
        if n < npos and any(v is NULL for v in fast[n:npos]):  # `in` would ask arrays for their truth
            defaults = fn.__defaults__ or ()
            first = npos - len(defaults)
            for k in range(n, npos):
                if fast[k] is NULL:
                    if k < first:
                        raise Raised(_binding_error(fn, args, kwargs))
                    fast[k] = self._default(fn, defaults[k - first], source, "__defaults__", k - first)
        for k in range(npos, npos + nkw):
            if fast[k] is NULL:
                name, keywords = names[k], fn.__kwdefaults__ or {}
                if name not in keywords:
                    raise Raised(_binding_error(fn, args, kwargs))
                fast[k] = self._default(fn, keywords[name], source, "__kwdefaults__", name)
        return fast

    def _bind_keywords(self, fn: types.FunctionType, fast: list[Any], args: list[Any], kwargs: dict[str, Any], at_end: int) -> None:
        code = fn.__code__
        positional = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        rest: dict[str, Any] = {}
        for name, value in kwargs.items():
            k = positional.index(name) if name in positional else -1
            if k < code.co_posonlyargcount:
                if not code.co_flags & 8:
                    raise Raised(_binding_error(fn, args, kwargs))
                rest[name] = value
            elif fast[k] is not NULL:
                raise Raised(_binding_error(fn, args, kwargs))
            else:
                fast[k] = value
        if code.co_flags & 8:
            fast[at_end] = rest

    def _default(self, fn: Any, value: Any, source: Source | None, which: str, key: Any) -> Any:
        if source is None or (id(fn) not in self.world.tracks and (type(value) in SCALARS or issubclass(type(value), PINNED_TYPES))):
            return value  # a function that is always the same one has a guard on its defaults
        return self.world.wrap(value, Item(Attr(source, which, "getattr"), key))

    def changes(self) -> tuple[int, int, int, int]:
        """How many Python objects, globals, cells and memories of tensors the program has changed so far."""
        return len(self.world.changed), len(self.global_writes), len(self.cell_writes), self.gradients.moves

    def callback(self, fn: Any) -> Any:
        """A native callable that interprets `fn`: for C functions that call back."""
        if fn is None or (issubclass(type(fn), (type, types.BuiltinFunctionType)) and not calls.is_python_class(fn)):
            return fn

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return self.call(fn, list(args), kwargs)
            except Raised as r:
                raise self.leaving(r.exc) from None

        run.__dict__["_torchsmith_interprets"] = fn
        return run

    def leaving(self, exc: BaseException) -> BaseException:
        """An exception of the program goes through code in C as itself. Python then says that it came from what the machine was doing;
        what the program knows of its cause is put back where it arrives."""
        self.told.setdefault(id(exc), (exc, exc.__cause__, exc.__context__, exc.__suppress_context__))
        return exc

    def arrived(self) -> None:
        for exc, cause, context, suppress in self.told.values():
            exc.__cause__, exc.__context__, exc.__suppress_context__ = cause, context, suppress
        self.told.clear()

    def native(self, fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], plain: bool = False, store: bool = False) -> Any:
        """Run a C function now. plain: arguments are used as they are; store: they are only kept, not looked into."""
        risky = tensors = False
        lent: list[tuple[Track, list[Any]]] = []  # images that a C function may write, and what they held
        if not plain:
            if not store:
                for k, a in enumerate(args):
                    t = type(a)
                    if t in SCALARS:
                        continue
                    if t is Identity and self._tells_identity(fn, args):
                        self.settle(a)
                    args[k] = self._native_argument(a, t, fn)
                kwargs = {k: a if type(a) in SCALARS else self._native_argument(a, type(a), fn) for k, a in kwargs.items()}
                if _makes_text(fn, args) and any(self._shows_outside(a) for a in (*args, *kwargs.values())):
                    raise Unsupported("CAP011", at=self.loc(), detail="text of an object from outside")
            for a in (*args, *kwargs.values()) if kwargs else args:
                t = type(a)
                if t in SCALARS:
                    continue
                if issubclass(type(a), torch.Tensor) or (t in (list, tuple, dict) and _has_tensor(a)):
                    tensors = True
                elif t is types.FunctionType or t is types.MethodType or t.__flags__ & 0x200:
                    risky = risky or not store
            if not store and _may_write_arguments(fn):
                known = [(self.world.tracks.get(id(a)), a) for a in args]
                lent = [(track, _contents(a)) for track, a in known if track is not None and a is track.image and not track.dirty]
        for key in _keys(fn, args):
            if type(key) not in SCALARS:
                self.world.tell_apart(key)
        facts = self.recorder.facts
        if not store and any(type(a) is torch.SymFloat for a in args):
            args = floats.for_native(self, fn, args)
        spoken, facts.spoken = facts.spoken, True
        try:
            if tensors:
                with torch_rows.Recording(self):
                    return fn(*args, **kwargs)
            if risky:
                with _no_python(self):
                    return fn(*args, **kwargs)
            return fn(*args, **kwargs)
        except (Unsupported, Raised):
            raise
        except Exception as e:  # the program's exception: a handler of the program may take it
            if any(map(_holds_symbols, (*args, *kwargs.values()))):  # or the symbol's: it cannot be hashed, for one
                args = [self.with_numbers(a) for a in args]
                return self.native(fn, args, {k: self.with_numbers(v) for k, v in kwargs.items()}, plain, store)
            e.__traceback__ = None
            if id(e) not in self.told:  # made in C: its context is the machine's
                inner = e.__context__
                if inner is not None and id(inner) not in self.told:
                    e.__context__ = None
            self.arrived()
            if isinstance(e, (RuntimeError, ValueError, IndexError)) and (tensors or any(map(_holds_symbols, args))):
                facts.confirm()
            if e is not self.raised and isinstance(e, _OF_KINDS) and any(map(self._stands_for, (*args, *kwargs.values()))):
                self.suspects[id(e)] = e
            raise Raised(e) from None
        finally:
            facts.spoken = spoken
            for track, before in lent:
                now = _contents(track.image)
                if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                    self.world.change(track)

    def with_numbers(self, value: Any) -> Any:
        """The numbers at hand in the place of symbols, in tuples and lists too."""
        if type(value) in _SYMBOLS:
            return floats.pinned(self, value)
        return type(value)(map(self.with_numbers, value)) if _holds_symbols(value) else value

    def _stands_for(self, value: Any) -> bool:
        """Is this what stands for something of the program, and not the thing itself?"""
        t = type(value)
        if t in SCALARS:
            return False
        if t in (list, tuple):
            return any(map(self._stands_for, value))
        if t in at.NUMBERS or t in (tensor_attrs.TensorMethod, arrays.ArrayValue, arrays.ArrayMethod) or issubclass(t, torch.Tensor):
            return True
        return id(value) in self.world.tracks and container_base(t) is None

    def take(self, exc: BaseException) -> None:
        """A handler of the program is going to see this exception: it has to be the program's own, not one about our stand-ins."""
        if id(exc) in self.suspects:
            raise Unsupported("CAP006", at=self.raised_at or self.loc(), detail=f"{type(exc).__name__}: {exc}")

    def _native_argument(self, a: Any, t: type, fn: Any) -> Any:
        """What a C function may look into: images of outside containers; never an outside object."""
        track = self.world.tracks.get(id(a))
        if track is None:
            if t in (list, tuple) and self.world.tracks:
                return self._with_images(a, t)
            if t is slice and self.world.tracks:
                return slice(*(self._native_argument(x, type(x), fn) for x in (a.start, a.stop, a.step)))
            return a
        if container_base(t) or track.image is not None or t is types.MappingProxyType:
            return self.world.image(track)
        if t is types.FunctionType or t is types.MethodType or issubclass(type(a), PINNED_TYPES) or t is types.CellType:
            return a
        if t.__hash__ is object.__hash__ and t.__eq__ is object.__eq__ and (not _has_state_in_c(t) or fn in _BY_IDENTITY or _is_of_container(fn)):
            self.world.tell_apart(a)
            return a  # compared by identity only; anything Python it might run is caught
        raise Unsupported("CAP011", at=self.loc(), detail=f"{t.__name__} from {track.source} given to a C function")

    def _tells_identity(self, fn: Any, args: list[Any]) -> bool:
        """Is a number that id() gave more here than a name for an object among others of this capture?"""
        holder = args[0]
        if container_base(type(holder)) or type(holder) in (tuple, frozenset):
            return id(holder) in self.world.tracks or any(type(x) is int for x in holder)
        return fn not in (operator.eq, operator.ne) or any(type(a) is not Identity for a in args)

    def settle(self, number: Identity) -> None:
        """What follows from this number of id() holds for this very object: in a call with another one it is another number."""
        obj, source = number.of, None
        if issubclass(type(obj), torch.Tensor):
            info = self.recorder.info(obj)
            obj, source = info.real, info.source
        elif (track := self.world.tracks.get(id(obj))) is not None:
            obj, source = track.obj, track.source
        if source is not None and not isinstance(source, FixedObject):
            self.world.guard(source, "identity", obj)

    def _with_images(self, a: Any, t: type) -> Any:
        for x in a:
            if container_base(type(x)) or (type(x) not in SCALARS and issubclass(type(x), _VALUES)):
                track = self.world.tracks.get(id(x))
                if track is not None and x is not track.image:
                    if t is list:
                        return [self._native_argument(y, type(y), None) for y in a]
                    return tuple([self._native_argument(y, type(y), None) for y in a])
        return a

    def _shows_outside(self, a: Any, depth: int = 4) -> bool:
        """Would the text of this value say what no guard knows: the address or the inner state of an object from outside?"""
        t = type(a)
        if t in SCALARS:
            return False
        base = tuple if issubclass(t, tuple) else container_base(t) or t
        if base in CONTAINERS or base in (tuple, frozenset):
            if depth == 0:
                return True
            inside = (*dict.keys(a), *dict.values(a)) if issubclass(base, dict) else list(base.__iter__(a))  # type: ignore[attr-defined]
            return any(self._shows_outside(x, depth - 1) for x in inside)
        return id(a) in self.world.tracks or issubclass(t, torch.Tensor)

    def symbolic(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Arithmetic on symbolic sizes."""
        self.recorder.facts.loc = self.loc()
        return self.native(fn, list(args), {}, plain=True)

    # ------------------------------------------------------------ shapes of values

    def listed(self, value: Any) -> list[Any]:
        """list(value), iterating as Python would."""
        if type(value) in (list, tuple) and id(value) not in self.world.tracks:
            return list(value)
        return self.native(list, [pr.iterate(self, value)], {}, plain=True)  # type: ignore[no-any-return]

    def mapped(self, value: Any) -> dict[Any, Any]:
        """A plain dict of a mapping, as ** does."""
        track = self.world.tracks.get(id(value))
        t = type(value)
        own = () if not issubclass(t, dict) else ("__iter__", "keys", "__getitem__") if issubclass(t, OrderedDict) else ("__iter__",)
        if own and not any(pr.special(self, t, name) for name in own):  # what Python asks of a dictionary before it takes it as it is
            return value if t is dict and track is None else dict(self.world.image(track) if track is not None else value)
        keys = self.call(at.load_attr(self, value, "keys"), [], {})
        return {k: pr.getitem(self, value, k) for k in self.listed(keys)}

    def unpack(self, value: Any, n: int) -> list[Any]:
        values = self.listed(value)
        if len(values) != n:
            few = "not enough" if len(values) < n else "too many"
            got = f"expected {n}, got {len(values)}" if len(values) < n else f"expected {n}"
            raise Raised(ValueError(f"{few} values to unpack ({got})"))
        return values

    def is_key(self, key: Any) -> bool:
        """Can a dictionary from outside be asked for it? An object is the key that it is: another one is another key."""
        for part in key if type(key) is tuple else (key,):
            if type(part) is Identity:
                self.settle(part)
            track = self.world.tracks.get(id(part))
            if track is not None and is_by_identity(part) and not isinstance(track.source, FixedObject):
                self.world.guard(track.source, "identity", track.obj)
        return is_key(key)

    def has_key(self, track: Track, key: Any) -> None:
        """The outside dictionary contains this key: implied by a guard on its value, else guarded by its keys."""
        value = dict.get(track.obj, key)
        known = self.world.tracks.get(id(value))
        if known is not None:
            self.world.note("use", value, known.source)
        if known is not None and not known.used:
            self.world.use(known)
        elif known is None and issubclass(type(track.source), FixedObject) and issubclass(type(value), PINNED_TYPES):
            return
        _ = item_of

    def index_key(self, key: Any) -> Any:
        """A tensor index with images in place of outside lists."""
        track = self.world.tracks.get(id(key))
        return self.world.image(track) if track is not None and (container_base(type(key)) or track.image is not None) else key

    def special_method(self, obj: Any, name: str) -> Any:
        """type(obj).name bound to obj, as `with` looks it up."""
        t = type(obj)
        f = at.find(self, t, name)
        if f is MISSING:
            raise Raised(TypeError(f"'{t.__name__}' object does not support the context manager protocol"))
        if issubclass(type(f), types.FunctionType):
            at.class_guard(self, t, name, f)
            return types.MethodType(f, obj)
        return f.__get__(obj, t)

    # ------------------------------------------------------------ rows that need the machine

    def record(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.recorder.record(kind, target, args, kwargs)

    def attr(self, obj: Any, name: str) -> Any:
        return at.load_attr(self, obj, name)

    def truth(self, value: Any) -> bool:
        return pr.truth(self, value)

    def tensor_attr(self, tensor: torch.Tensor, name: str) -> Any:
        return tensor_attrs.load(self, tensor, name)

    def tensor_setattr(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        tensor_attrs.store(self, tensor, name, value)

    def tensor_setitem(self, tensor: torch.Tensor, key: Any, value: Any) -> None:
        if pr.has_varying(key):
            tensor, key = pr.getitem(self, tensor, key), Ellipsis
        tensor_attrs.setitem(self, tensor, pr.numbered(self, self.index_key(key)), value)

    def tensor_truth(self, tensor: torch.Tensor) -> bool:
        return bool(self.tensor_value(tensor, "__bool__", "if on a tensor's value"))

    def assume(self, tensor: torch.Tensor, wanted: bool) -> bool:
        """The truth of a tensor that is expected to be `wanted`, else the program raises. The graph checks it before it has done anything
        that can be seen; where it does not hold, the function runs as it is (dispatch.or_elsewhere)."""
        trace = tracing.current()
        known = trace.known_value(tensor, "__bool__")
        if known is not NotImplemented:
            return bool(known)
        if any(type(n) is not int or n != 1 for n in tensor.shape) or self.recorder.has_written_inputs():
            return self.tensor_truth(tensor)
        holds = self.recorder.record("method", "bool", (tensor,), {})
        if not wanted:
            holds = self.recorder.record("method", "logical_not", (holds,), {})
        self.recorder.effect(torch.ops.aten._assert_async.msg, (holds, f"{ASSUMED} {self.loc()}"))
        return wanted

    def tensor_value(self, tensor: torch.Tensor, method: str, what: str, args: Any = (), kwargs: Any = None) -> Any:
        """What Python asks of a tensor's data: an answer only where the data is made of numbers of the program."""
        known = tracing.current().known_value(tensor, method) if method in _READ and not args and not kwargs else NotImplemented
        if known is NotImplemented and self.may_read_numbers() and method in _NUMBER and not (tensor.dtype is torch.bool or tensor.dtype.is_complex) and not args and not kwargs:
            if method == "tolist":
                return self.numbers_of(tensor)
            if self.counts and method == "item" and self.is_in_optimizer():
                counted = self.recorder.counted(tensor)
                if counted is not None:
                    return counted
            number = self.recorder.read_number(tensor)
            return number if method == "item" else self.symbolic({"__float__": torch.sym_float}.get(method, torch.sym_int), number)
        if known is NotImplemented and method == "__bool__":
            holds = self.recorder.state_holds(tensor)
            known = NotImplemented if holds is None else holds
        if known is NotImplemented:
            raise Unsupported("CAP020", at=self.loc(), detail=what)
        return known

    def may_read_numbers(self) -> bool:
        """Whether item() is a symbol, known when the graph runs: in a program that stands alone, and in a training step, where optimizers
        count with it and the loss is reported."""
        facts = self.recorder.facts
        facts.reads_data = facts.reads_data or bool(self.gradients.spent) or self.is_in_optimizer()
        return facts.reads_data

    def numbers_of(self, tensor: torch.Tensor) -> Any:
        """tolist(): each element as a symbol."""
        n = tensor.shape[0] if tensor.dim() else 1
        if type(n) is not int or n > _LISTED:
            raise Unsupported("CAP020", at=self.loc(), detail="tensor.tolist() of a dimension that varies or is long")
        if not tensor.dim():
            return self.recorder.read_number(tensor)
        return [self.numbers_of(self.record("method", "select", (tensor, 0, i), {})) for i in range(n)]

    def import_name(self, frame: Frame, name: str, names: Any, level: int) -> Any:
        """import: what is loaded is read from sys.modules; what is not is loaded, as eager would, once."""
        known = FixedObject(sys.modules, "sys.modules")
        if level == 0 and name in sys.modules:
            top = name.partition(".")[0]
            if names:
                return self.world.wrap(sys.modules[name], Item(known, name))
            if top in sys.modules:
                self.world.wrap(sys.modules[name], Item(known, name))
                return self.world.wrap(sys.modules[top], Item(known, top))
        module = self.native(__import__, [name, frame.globals, None, names, level], {}, plain=True)
        if module.__name__ in sys.modules:
            self.world.guard(Item(known, module.__name__), "identity", module)
        return module

    def build_class_function(self, frame: Frame) -> Callable[..., Any]:
        """__build_class__ whose class body is interpreted."""

        def build(fn: Any, name: str, *bases: Any, **keywords: Any) -> Any:
            meta = keywords.pop("metaclass", None)
            bases = types.resolve_bases(bases)
            meta, namespace, keywords = types.prepare_class(name, bases, {"metaclass": meta, **keywords} if meta else keywords)
            self.function_source(fn)
            inner = Frame(self, fn, [NULL] * bytecode.decode(fn.__code__).size, namespace)
            cell = inner.run()[1]
            cls = meta(name, bases, namespace, **keywords)
            if type(cell) is types.CellType:
                cell.cell_contents = cls
            self.world.fresh_pinned.add(id(cls))
            self.world.keep.append(cls)
            return cls

        transforms.MACHINE_FUNCTIONS.add(build)
        return build


def _binding_error(fn: types.FunctionType, args: list[Any], kwargs: dict[str, Any]) -> TypeError:
    """What CPython says of arguments that do not fit `fn`: an empty function of the same signature is called with them."""
    code = fn.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)]
    empty = (lambda: None).__code__.replace(
        co_argcount=code.co_argcount, co_posonlyargcount=code.co_posonlyargcount, co_kwonlyargcount=code.co_kwonlyargcount,
        co_varnames=names, co_nlocals=len(names), co_flags=3 | code.co_flags & 12, co_name=code.co_name, co_qualname=fn.__qualname__,
    )  # fmt: skip
    twin = types.FunctionType(empty, {}, fn.__name__, (None,) * len(fn.__defaults__ or ()))
    twin.__qualname__ = fn.__qualname__
    twin.__kwdefaults__ = dict.fromkeys(fn.__kwdefaults__ or ())
    try:
        twin(*(None for _ in args), **dict.fromkeys(kwargs))
    except TypeError as e:
        return e.with_traceback(None)
    raise AssertionError(f"{fn.__qualname__} takes its arguments after all")


def _has_tensor(value: Any) -> bool:
    for x in value.values() if type(value) is dict else value:
        if issubclass(type(x), torch.Tensor) or (type(x) in (list, tuple, dict) and _has_tensor(x)):
            return True
    return False


def _where(fn: types.FunctionType) -> str:
    return f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}"


def _is_importing(frame: Any) -> bool:
    """Does the import system stand above it? What a library imports at first use is its own affair."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def _no_python(m: Machine) -> Iterator[None]:
    """Refuse Python code of the user below a C function; the standard library, torch and the machine may run."""
    previous = sys.getprofile()
    if previous is not None and not callable(previous):  # a C profiler, which Python cannot put back
        yield
        return

    def watch(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and not policy.is_library_file(frame.f_code.co_filename) and not _is_importing(frame):
            raise Unsupported("CAP010", at=m.loc(), detail=f"{frame.f_code.co_qualname} called from C")

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(previous)


def capture(
    fn: types.FunctionType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic: bool | None = None,
    dynamic_dims: Mapping[str, set[int]] | None = None,
    static_dims: Mapping[str, set[int]] | None = None,
    ones: bool = True,
    loose: frozenset[str] = frozenset(),
    declared: Mapping[tuple[str, int], tuple[int, int | None]] | None = None,
    unbacked: Set[tuple[str, int]] = frozenset(),
    fullgraph: bool = False,
    given: Mapping[str, Mapping[int, Any]] | None = None,
    close: Callable[[Machine, Any], Captured] = finish.finished,
    at: Point | None = None,
    stop: int | None = None,
    probe: bool = False,
    reads: bool = False,
    error_mode: bool = False,
    counts: bool = False,
    stamps: bool = True,
) -> Captured:
    """Capture one call of a Python function. Dimensions by input: symbols (`dynamic_dims`), numbers whatever else is asked
    (`static_dims`), and the ranges `declared` for symbols; of those `unbacked` no size is at hand. `ones`: a size of 1 may be a symbol too. `loose`: floats, by input, of which no
    value is assumed: what needs one as a constant is Unsupported("GRA015"). `given`: sizes that export declares, by
    input; `close` turns the machine and the frame's result into what is captured. `at`: the frame goes on there, and `args` is its state.
    `stop`: how many instructions of the frame are captured; what follows is told by `Captured.stop`. Unsupported.step is the
    instruction's number (from 0) that could not be captured. `probe`: only raises Unsupported, whose step is the last one before `stop`
    in front of which the frame's state can be handed over. `reads`: the values of tensors may be numbers known only at run time.
    `counts`: what optimizers count in tensors is read when the call begins. `stamps`: equal modules are interpreted once."""
    given_all = dict(locals())
    with _no_collection():
        try:
            return _capture(**given_all)
        except Again:
            return _capture(**{**given_all, "stamps": False})


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What a capture makes stays until it ends: looking for garbage would only find that, again and again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _capture(
    fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic: bool | None, dynamic_dims: Any, static_dims: Any, ones: bool,
    loose: frozenset[str], declared: Any, unbacked: Set[tuple[str, int]], fullgraph: bool, given: Any, close: Callable[[Machine, Any], Captured],
    at: Point | None, stop: int | None, probe: bool, reads: bool, error_mode: bool, counts: bool, stamps: bool,
) -> Captured:  # fmt: skip
    m = Machine(fn)
    if not stamps:
        m.stamps.stop()
    m.probing, m.error_mode = probe, error_mode
    m.is_whole = close is not finish.finished
    m.splits = not m.is_whole and not fullgraph
    m.recorder.facts.reads_data = m.is_whole or reads
    m.recorder.facts.is_promise = m.is_whole
    m.counts = counts
    m.recorder.given = given or {}
    m.recorder.dynamic = dynamic
    m.recorder.dynamic_dims = dict(dynamic_dims or {})
    m.recorder.static_dims = dict(static_dims or {})
    m.recorder.ones = ones
    m.recorder.facts.loose = loose
    m.recorder.declared = dict(declared or {})
    m.recorder.unbacked = unbacked
    m.world.guard(FixedObject(None), "global_state", global_state())
    m.recorder.facts.when_asked = lambda fn, value: m.world.guard(Computed(fn, (), ()), "equals", value)
    overrides.enter(m)
    frame = None
    values = _arguments(m, fn, args, kwargs) if at is None else []
    with torch_rows.preserved_state(), m.recorder.tracing():
        try:
            frame = Frame(m, fn, values)
            m.function_source(fn)
            if at is not None:
                _enter_middle(m, frame, at, args)
            if fn.__code__.co_flags & (_GENERATOR | _ASYNC):
                raise Unsupported("CAP003", at=_where(fn))
            given_values = values[: fn.__code__.co_argcount]
            kind, result = frame.run(_ALL if stop is None else stop)
            if kind == STOP and probe:
                raise Unsupported("CAP028", at=m.loc())
            if kind == STOP:
                frame.steps += 1  # the instruction in front of which the state is handed over
                return finish.stopped(m, frame)
            if fn in torch_rows.AFTER and at is None:
                result = torch_rows.AFTER[fn](m, result, *given_values)
            return close(m, result)
        except Raised as r:
            detail = f"{type(r.exc).__name__}: {r.exc}"
            why = Unsupported("CAP006", at=m.raised_at, detail=detail)
            why.step = frame.steps - 1 if frame is not None else -1
            raise why from r.exc
        except Unsupported as why:
            why.is_error = why.is_error or m.error_mode
            if why.step < 0 and frame is not None:
                why.step = frame.clean if probe else frame.steps - 1
            raise
        finally:
            m.active = False
            m.recorder.facts.when_asked = None  # the facts live on
            m.frames.clear()
            torch_rows.leave_regions(m)
            m.let_go()


_ALL = 1 << 62


def _enter_middle(m: Machine, frame: Frame, point: Point, values: tuple[Any, ...]) -> None:
    """The frame as it stands at a point; its values are taken up where something looks at them."""
    m.later = True
    n = len(point.slots)
    later = [Later(v, Local(name), d and is_data(v)) for v, name, d in zip(values, point.names, point.data, strict=True)]
    free = frame.code.size - len(frame.code.code.co_freevars)
    frame.fast = [NULL] * free + list(frame.fn.__closure__ or ())
    for slot, value in zip(point.slots, later):
        if type(value.obj) is types.CellType and frame.code.names[slot] in frame.code.code.co_cellvars:
            m.cell_sources[id(value.obj)] = Item(value.source, "cell_contents")
            m.world.track(value.obj, value.source)
            frame.fast[slot] = value.obj
        else:
            frame.fast[slot] = value
    rest = iter(later[n:])
    frame.stack = [next(rest) if real else NULL for real in point.stack]
    if point.handled:
        handled = next(rest)
        m.exc = m.world.wrap(handled.obj, handled.source)
    frame.index = point.index
    frame.kw_names = ()


def _arguments(m: Machine, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The entry frame's slots: each parameter read from its Local source, *args and **kwargs piece by piece."""
    code = fn.__code__
    fast = m._bind(fn, list(args), dict(kwargs), None)
    n = code.co_argcount + code.co_kwonlyargcount
    flags = code.co_flags
    with m.recorder.tracing():
        for k in range(n):
            fast[k] = m.world.wrap(fast[k], Local(code.co_varnames[k]))
        if flags & 4:
            fast[n] = _rest(m, fast[n], Local(code.co_varnames[n]))
            n += 1
        if flags & 8:
            source = Local(code.co_varnames[n])
            m.world.guard(source, "dict_keys", tuple(fast[n]))
            fast[n] = {k: m.world.wrap(v, Item(source, k)) for k, v in fast[n].items()}
    return fast


def _rest(m: Machine, rest: tuple[Any, ...], source: Source) -> tuple[Any, ...]:
    m.world.guard(source, "length", len(rest))
    return tuple([m.world.wrap(x, Item(source, i)) for i, x in enumerate(rest)])


__all__ = ["Captured", "Frame", "Machine", "capture", "opcodes", "operator"]
