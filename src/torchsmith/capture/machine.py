"""The bytecode machine: runs a frame symbolically, records torch calls in a graph, reads the outside world under guards.

In: a Python function with its arguments. Out: Captured, or Unsupported with a code and the user's line. No statement of the user
runs natively: functions are inlined frame by frame; what changes Python state is replayed by finish after the graph has run.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import operator
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..codes import Unsupported
from ..graph import tracing
from ..graph.spec import RAISES
from . import (
    arrays,
    bytecode,
    calls,
    floats,
    iterators,
    native,
    overrides,
    policy,
    tables,  # noqa: F401  (fills the tables of rows)
    tensor_attrs,
    torch_rows,
)
from . import attributes as at
from . import protocols as pr
from .asked import Asked
from .attributes import Raised, saying
from .bytecode import VERSION
from .frame import Frame, bind, drive
from .gradients import Gradients
from .resume import Later, Loop, Unbound
from .source import Attr, Cell, FixedObject, Global, Item, Source
from .stamps import Stamps
from .state import location
from .tensors import Recorder
from .world import MISSING, NULL, PINNED_TYPES, Momentary, Ticket, Track, World, container_base, is_by_identity, is_key, put

GENERATOR = 0x20
ASYNC = 0x80 | 0x100 | 0x200  # types.coroutine marks generators
_MAX_STEPS = 200_000  # backward jumps: a loop longer than this is not worth unrolling
_READ = frozenset({"item", "tolist", "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__complex__"})
_NUMBER = frozenset({"item", "tolist", "__int__", "__float__", "__index__"})  # of a program that stands alone, symbols
_OF_A_CALL = frozenset({"__code__", "__defaults__", "__kwdefaults__"})  # what a call of a function looks at
_QUOTIENTS = frozenset({operator.floordiv, operator.mod, operator.truediv})
_LISTED = 256  # numbers that tolist may give


class Machine:
    """One capture in progress."""

    active = False  # once it is over; a generator may still ask

    def __init__(self, fn: types.FunctionType, asked: Asked, is_whole: bool) -> None:
        self.entry, self.asked = fn, asked
        self.is_whole = is_whole  # captured alone, for export: no frame to go back to
        self.splits = not is_whole and not asked.fullgraph  # where something is not captured, Python goes on between two graphs
        self.frames: list[Frame] = []
        self.recorder = Recorder(self)
        self.world = World(self.loc, self.recorder.tensor_input, self.recorder.number_input)
        self.world.growing, self.world.by_code = asked.growing, asked.by_code
        self.world.real_tensor, self.world.varies = self.recorder.real_tensor, self.recorder.varies
        self.arrays: dict[int, arrays.ArrayValue] = {}  # by the id of the array from outside
        self.world.array, self.world.array_scalar = functools.partial(arrays.given, self), functools.partial(arrays.given_scalar, self)
        self.world.walk = functools.partial(iterators.walked, self)
        self.world.attribute = functools.partial(at.load_attr, self)
        self.gradients = Gradients(self)
        self.stamps = Stamps(self)
        if not asked.stamps:
            self.stamps.stop()
        self.found: dict[tuple[type, str], Any] = {}
        self.data_types: dict[type, bool] = {}
        self.compared: set[type] = set()  # classes whose objects C compared
        self.own_names: set[tuple[type, str]] = set()  # names that an object's own attributes have: attributes.own_guard
        self.exc: BaseException | None = None
        self.raised: BaseException | None = None  # the program's last exception, and where it was raised
        self.raised_at = ""
        self.all_raised: list[BaseException] = []
        self.told: dict[int, tuple[BaseException, Any, Any, bool]] = {}  # exceptions on their way through C: cause, context, suppressed
        self.suspects: dict[int, BaseException] = {}  # exceptions that may be about what stands for the program's values
        self.active = True
        self.generators: list[weakref.ref[Any]] = []  # of the program
        self.lost: Unsupported | None = None  # why a generator could not be closed
        self.later = False  # a split frame goes on: its values may be Later
        self.bound: dict[Source, None] = {}  # of a state: what the program relies on to have a value
        self.loops: dict[int, Loop] = {}  # by the id of their iterators: those of the outermost frame, and those over iterators from outside
        self.error_mode = asked.error_mode  # a break is an error: the program says when
        self.steps = 0
        self.global_cache: dict[tuple[int, str], Any] = {}
        self.global_writes = self.world.global_writes
        self.class_writes: dict[tuple[type, str], Any] = {}  # attributes of classes from outside that were written (or DELETED)
        self.cell_sources = self.world.cell_sources
        self.cell_writes: dict[int, tuple[Any, Any]] = {}
        self.effects: list[tuple[Any, list[Any], dict[str, Any]]] = []  # calls replayed by finish
        self.calls_seen: set[int] = set()
        self.cached: dict[Any, Any] = {}  # what functions with a cache gave, and for which arguments
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
        self.classes_told = 0  # how often the program's own code asked for the class of a number that varies

    def let_go(self) -> None:
        """The capture is over. The machine and its parts refer to one another: they drop what they hold of the program, which would else
        live until Python looks for garbage."""
        self.world.let_go()
        self.recorder.let_go()
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
        torch_rows.set_grad_enabled(self, mode)

    def loc(self) -> str:
        """file:line of the innermost user frame; of the innermost one where none is the user's (torch's own modules, exported), and of the
        exported forward itself once that has returned."""
        frame = None
        for frame in reversed(self.frames):
            if not policy.is_torch_file(frame.code.code.co_filename):
                break
        if frame is not None and frame.code.code.co_filename == policy.EXPORT_FRAME:
            frame = self.frames[-1] if self.frames[-1] is not frame else None
        return f"{frame.code.code.co_filename}:{frame.ins.line}" if frame is not None else location(self.entry)

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
        raise Unsupported("CAP023", at=self.loc(), detail=f"{kind.__name__}, a value that Python computed")

    def taken_up(self, value: Any) -> Any:
        """A value of a split frame, read under guards if nothing has looked at it yet."""
        if type(value) is Later and value.is_data and isinstance(value.obj, np.generic):
            made = arrays.given_scalar(self, value.obj, value.source)
            if made is not MISSING:
                return made
        return self.world.wrap(value.obj, value.source) if type(value) is Later else value

    def has_value(self, value: Any) -> bool:
        """Whether a slot's value is one. Of what a split frame goes on with, a guard says so."""
        if type(value) is not Later:
            return value is not NULL
        if value.obj is Unbound:
            self.world.guard(value.source, "identity", Unbound)
        elif value.may_be_unbound:
            self.bound[value.source] = None
        return value.obj is not Unbound

    def opened(self, value: Later) -> tuple[Later, ...]:
        """A tuple of a split frame, of which nothing is read but how long it is."""
        self.world.guard(value.source, "type", tuple)
        self.world.guard(value.source, "length", len(value.obj))
        return value.unpacked()

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
        source = self.cell_sources.get(id(cell))
        try:
            value = cell.cell_contents
        except ValueError:
            if source is not None:  # no guard says so
                raise Unsupported("CAP011", at=self.loc(), detail="an empty cell from outside") from None
            return NULL
        return value if source is None else self.world.wrap(value, source)

    def load_cell(self, cell: Any, name: str = "?") -> Any:
        value = self.cell_value(cell)
        if value is NULL:
            raise Raised(NameError(f"cannot access free variable '{name}' where it is not associated with a value in enclosing scope", name=name))
        return value

    def store_cell(self, cell: Any, value: Any) -> None:
        if id(cell) in self.cell_sources:
            self.cell_writes[id(cell)] = (cell, value)
        elif value is NULL:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    def made(self, fn: Any) -> Any:
        """A function or class that the program has made: nothing is known of it outside."""
        self.world.fresh_pinned.add(id(fn))
        self.world.keep.append(fn)
        return fn

    # ------------------------------------------------------------ calls

    def call(self, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return calls.call(self, fn, args, kwargs)

    def inline(self, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Interpret a Python function."""
        code = fn.__code__
        if code.co_flags & ASYNC:
            raise Unsupported("CAP002", at=self.loc(), detail="async code")
        source = self.function_source(fn)
        fast = bind(self, fn, args, kwargs, source)
        given = fast[: code.co_argcount] if fn in torch_rows.AFTER else None
        frame = Frame(self, fn, fast)
        if code.co_flags & GENERATOR:
            made: Any = drive(self, frame)
            track = self.world.tracks.get(id(fn))
            written = (track.attrs if track is not None else None) or {}
            made.__name__, made.__qualname__ = written.get("__name__", fn.__name__), written.get("__qualname__", fn.__qualname__)
            self.generators.append(weakref.ref(made))
            return made
        result = frame.run()[1]
        return result if given is None else torch_rows.AFTER[fn](self, result, *given)

    def function_source(self, fn: types.FunctionType) -> Source | None:
        """Guard what a function from outside is made of; None for a function made here."""
        if id(fn) in self.world.fresh_pinned:
            return None
        track = self.world.tracks.get(id(fn))
        keywords = self.world.tracks.get(id(fn.__kwdefaults__))
        if (track is not None and track.attrs and not _OF_A_CALL.isdisjoint(track.attrs)) or (keywords is not None and keywords.dirty):
            raise Unsupported("CAP012", at=self.loc(), detail=f"a call of {fn.__qualname__} behind a write to it")
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
            self.cell_sources.setdefault(id(cell), Item(Item(Attr(base, "__closure__", "getattr"), n), "cell_contents"))
            self.world.keep.append(cell)
        return base

    def has_unfinished(self) -> bool:
        """Is there a generator of the program that stands where closing it does something (`finally`, `with`, `yield from`)?"""
        made = [g for ref in self.generators if (g := ref()) is not None and g.gi_suspended]
        return any(g.gi_frame.f_locals["frame"].may_do_something_at_end() for g in made)

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

        return policy.of_machine(run, fn)

    def leaving(self, exc: BaseException) -> BaseException:
        """An exception of the program goes through code in C as itself. Python then says that it came from what the machine was doing;
        what the program knows of its cause is put back where it arrives."""
        self.told.setdefault(id(exc), (exc, exc.__cause__, exc.__context__, exc.__suppress_context__))
        return exc

    def arrived(self) -> None:
        told, self.told = self.told, {}  # a generator that is dropped here tells of its own
        for exc, cause, context, suppress in told.values():
            exc.__cause__, exc.__context__, exc.__suppress_context__ = cause, context, suppress

    def native(self, fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], plain: bool = False, store: bool = False) -> Any:
        return native.native(self, fn, args, kwargs, plain, store)

    def settle(self, number: Momentary) -> None:
        native.settle(self, number)

    def with_numbers(self, value: Any) -> Any:
        return native.with_numbers(self, value)

    def take(self, exc: BaseException) -> None:
        """A handler of the program is going to see this exception: it has to be the program's own, not one about our stand-ins."""
        if id(exc) in self.suspects:
            raise Unsupported("CAP006", at=self.raised_at or self.loc(), detail=saying(exc))

    def symbolic(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Arithmetic on symbolic sizes. A quotient's divisor is not zero in any call: there Python raises."""
        self.recorder.facts.loc = self.loc()
        if fn in _QUOTIENTS and type(args[1]) is torch.SymInt and args[1].node.hint is not None:
            bool(args[1] != 0)
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
        values = self.listed(value if type(value) in (list, tuple, str) else itertools.islice(pr.iterate(self, value), n + 1))
        if len(values) != n:
            few = "not enough" if len(values) < n else "too many"
            got = f"expected {n}, got {len(values)}" if len(values) < n else f"expected {n}"
            raise Raised(ValueError(f"{few} values to unpack ({got})"))
        return values

    def is_key(self, key: Any) -> bool:
        """Can a dictionary from outside be asked for it? An object is the key that it is: another one is another key."""
        if type(key) is Ticket and at.is_torchs(self):
            return False  # the dictionary is read whole
        for part in key if type(key) is tuple else (key,):
            if issubclass(type(part), Momentary):
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

    def index_key(self, key: Any) -> Any:
        """What torch is given as an argument or an index: images in place of outside containers, also where lists and tuples hold them."""
        track = self.world.tracks.get(id(key))
        found = self.world.image(track) if track is not None and (container_base(type(key)) or track.image is not None) else key
        if found is not key and at.speaks_for_itself(self, type(key)):
            raise Unsupported("CAP011", at=self.loc(), detail=f"{type(key).__name__} given to a torch function")
        if not issubclass(type(found), (list, tuple)):
            return found
        items = [self.index_key(v) if issubclass(type(v), (list, tuple)) else v for v in found]
        if all(a is b for a, b in zip(items, found, strict=True)):
            return found
        return items if issubclass(type(found), list) else tuple(items)

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

    def assume(self, tensor: torch.Tensor, wanted: bool, why: str = RAISES) -> bool:
        """The truth of a tensor that is expected to be `wanted`, else the program raises. The graph checks it before it has done anything
        that can be seen; where it does not hold, the function runs as it is (entries.or_elsewhere)."""
        trace = tracing.current()
        known = trace.known_value(tensor, "__bool__")
        if known is not NotImplemented:
            return bool(known)
        late = self.recorder.has_written_inputs()  # a device has no say before it writes
        if any(type(n) is not int or n != 1 for n in tensor.shape) or (late and tracing.device_of(tensor).type != "cpu"):
            return self.tensor_truth(tensor)
        holds = self.recorder.record("method", "bool", (tensor,), {})
        if not wanted:
            holds = self.recorder.record("method", "logical_not", (holds,), {})
        self.recorder.effect(torch.ops.aten._assert_async.msg, (holds, f"{why} {self.loc()}")).meta["late"] = late
        return wanted

    def tensor_value(self, tensor: torch.Tensor, method: str, what: str, args: Any = (), kwargs: Any = None) -> Any:
        """What Python asks of a tensor's data: an answer only where the data is made of numbers of the program."""
        if method == "__index__" and (tensor.is_floating_point() or tensor.is_complex()):
            raise Raised(TypeError("only integer tensors of a single element can be converted to an index"))
        try:
            known = tracing.current().known_value(tensor, method) if method in _READ and not args and not kwargs else NotImplemented
        except (TypeError, ValueError, RuntimeError) as e:  # of a constant with more elements than one
            raise Raised(e) from None
        if known is NotImplemented and self.asked.counts and method in _NUMBER and method != "tolist":
            number = self.recorder.state_number(tensor)
            if number is not None:
                return number if method == "item" else self.call(float if method == "__float__" else int, [number], {})
        if known is NotImplemented and self.may_read_numbers() and method in _NUMBER and not (tensor.dtype is torch.bool or tensor.dtype.is_complex) and not args and not kwargs:
            if method == "tolist":
                return self.numbers_of(tensor)
            if self.asked.counts and method == "item" and self.is_in_optimizer():
                counted = self.recorder.counted(tensor)
                if counted is not None:
                    return counted
            number = self.recorder.read_number(tensor)
            if method != "item" and any(type(n) is not int for n in tensor.shape):
                self.recorder.may_be_caught = True  # of more elements than one, Python's conversions raise another exception than the graph
            return number if method == "item" else self.symbolic({"__float__": torch.sym_float}.get(method, torch.sym_int), number)
        if known is NotImplemented and self.may_read_numbers() and method == "item" and tensor.dtype is torch.bool:
            return self.symbolic(operator.ne, self.recorder.read_number(self.record("method", "to", (tensor, torch.int64), {})), 0)
        if known is NotImplemented and method == "__bool__":
            holds = self.recorder.state_holds(tensor)
            known = NotImplemented if holds is None else holds
        if known is NotImplemented:
            why = Unsupported("CAP020", at=self.loc(), detail=what)
            why.is_of_state = method in _NUMBER and self.recorder.state_number(tensor, read=False) is not None
            raise why
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
        if type(n) is torch.SymInt and n.node.hint is not None and n.node.hint <= _LISTED:
            n = floats.pinned(self, n)
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
                module = sys.modules[name]
                if hasattr(module, "__path__") and not vars(module).keys() >= set(names):  # parts of a package that are not loaded yet
                    self.native(__import__, [name, frame.globals, None, names, level], {}, plain=True)
                return self.world.wrap(module, Item(known, name))
            if top in sys.modules:
                self.world.wrap(sys.modules[name], Item(known, name))
                return self.world.wrap(sys.modules[top], Item(known, top))
        module = self.native(__import__, [name, frame.globals, None, names, level], {}, plain=True)
        if module.__name__ in sys.modules:
            self.world.guard(Item(known, module.__name__), "identity", module)
        return module

    def build_class_function(self) -> Callable[..., Any]:
        """__build_class__ whose class body is interpreted."""

        def build(fn: Any, name: str, /, *bases: Any, **keywords: Any) -> Any:
            meta = keywords.pop("metaclass", None)
            given, metas = bases, (meta or type, *map(type, bases))
            interpreted = any(at.is_users(self, t, "__mro_entries__") or at.is_users(self, t, "__prepare__") for t in metas if issubclass(type(t), type))
            run: Any = self.inline if interpreted else lambda fn, args, _: fn(*args)
            bases = run(types.resolve_bases, [bases], {})
            meta, namespace, keywords = run(types.prepare_class, [name, bases, {"metaclass": meta, **keywords} if meta else keywords], {})
            self.function_source(fn)
            inner = Frame(self, fn, [NULL] * bytecode.decode(fn.__code__).size, namespace)
            cell = inner.run()[1]
            if bases is not given:
                namespace["__orig_bases__"] = given
            cls = self.call(meta, [name, bases, namespace], keywords)
            if id(cls) not in self.world.pinned:
                self.made(cls)
            if type(cell) is types.CellType:
                cell.cell_contents = cls
            return cls

        return policy.of_machine(build, builtins.__build_class__)


