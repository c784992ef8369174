"""One Python frame interpreted: its slots, its stack, its handlers of exceptions; arguments bound to parameters; generators."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from ..codes import Unsupported
from . import assemble, bytecode, finish
from .attributes import Raised, attr_or
from .call_opcodes import YIELD
from .opcodes import RETURN
from .resume import Later
from .source import Attr, Item, Source
from .world import NULL, PINNED_TYPES, SCALARS

if TYPE_CHECKING:
    from .machine import Machine

_MAX_DEPTH = 200


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
                if m.asked.probe and finish.can_hand_over(m, self):
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
                    return out
            while True:
                ins = self.ins = instrs[self.index]
                self.index += 1
                try:
                    out = ins.handler(self, ins)
                except Raised as r:
                    self._raise_to_handler(r.exc)
                    continue
                if out is not None:
                    return out
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

    def leave(self) -> None:
        """The outermost frame returns: what it alone held goes, so that its generators run what stands in `finally`."""
        m = self.machine
        if m.has_unfinished():
            self.stack.clear()
            for k in range(len(self.fast)):
                self.fast[k] = NULL
            if m.has_unfinished():  # the machine itself holds on to it
                raise Unsupported("CAP028", at=m.loc(), detail="a generator that has begun")

    def may_do_something_at_end(self) -> bool:
        """Of a generator that was left at a `yield`: is there a handler of the program around it, or an inner object with `close`?"""
        row, ahead = self.code.handlers[self.index - 1], self.code.instrs[self.index]
        if ahead.name == "RESUME" and ahead.arg & 3 == _IN_YIELD_FROM and type(self.stack[-1]) is not types.GeneratorType:
            return hasattr(type(self.stack[-1]), "close")
        return row is not None and self.code.instrs[row[0]].name not in ("CALL_INTRINSIC_1", "CLEANUP_THROW")

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
                unpacks = ins.name == "UNPACK_SEQUENCE" and type(stack[k].obj) is tuple
                stack[k] = self.machine.opened(stack[k]) if unpacks else self.machine.taken_up(stack[k])

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
_IN_YIELD_FROM = 2  # RESUME's argument, but for a flag
_PASSING = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "STORE_FAST", "DELETE_FAST", "POP_TOP", "COPY", "SWAP", "NOP", "RESUME", "PRECALL", "KW_NAMES",
                      "PUSH_NULL", "LOAD_CONST", "JUMP_FORWARD", "JUMP_BACKWARD", "LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST",
                      "STORE_FAST_STORE_FAST", "LOAD_FAST_AND_CLEAR"})  # fmt: skip


def drive(m: Machine, frame: Frame) -> Generator[Any, Any, Any]:
    """A real generator that interprets a generator frame."""
    try:
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
    except Unsupported as why:
        if not isinstance(frame.exc, GeneratorExit):
            raise
        why.step = m.frames[0].steps - 1 if why.step < 0 else why.step  # one that is dropped has nobody to tell
        m.lost = m.lost or why
    finally:
        frame.fast, frame.stack, frame.exc = [], [], None  # exceptions hold on to the frame


def _resume_raising(frame: Frame) -> tuple[str, Any]:
    """Go on with an exception; in `yield from` it is the inner iterator's first."""
    exc = frame.exc
    m, instrs, index = frame.machine, frame.code.instrs, frame.index
    if instrs[index].name == "RESUME" and instrs[index].arg & 3 == _IN_YIELD_FROM:
        inner = frame.stack[-1]
        leaves = isinstance(exc, GeneratorExit)
        try:
            method = attr_or(m, inner, "close" if leaves else "throw", None)
            value = None if method is None else m.call(method, [] if leaves else [exc], {})
            if method is not None and not leaves:
                return YIELD, value
        except Raised as r:
            exc = r.exc
            if isinstance(exc, StopIteration) and not leaves and bytecode.VERSION < (3, 12):  # later ones have an instruction for it
                frame.stack[-1] = exc.value
                frame.index = instrs[instrs[index + 1].value].value
                return frame.run()
    frame._raise_to_handler(exc)
    return frame.run()


def _outside(m: Machine, step: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
    """Let the program's exceptions leave as themselves: native code above a generator must see them."""
    try:
        return step()
    except Raised as r:
        raise m.leaving(r.exc) from None


def bind(m: Machine, fn: types.FunctionType, args: list[Any], kwargs: dict[str, Any], source: Source | None) -> list[Any]:
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
        _bind_keywords(fn, fast, args, kwargs, at_end)
    elif code.co_flags & 8:
        fast[at_end] = {}
    if n < npos and any(v is NULL for v in fast[n:npos]):  # `in` would ask arrays for their truth
        defaults = fn.__defaults__ or ()
        first = npos - len(defaults)
        for k in range(n, npos):
            if fast[k] is NULL:
                if k < first:
                    raise Raised(_binding_error(fn, args, kwargs))
                fast[k] = _default(m, fn, defaults[k - first], source, "__defaults__", k - first)
    for k in range(npos, npos + nkw):
        if fast[k] is NULL:
            name, keywords = names[k], fn.__kwdefaults__ or {}
            if name not in keywords:
                raise Raised(_binding_error(fn, args, kwargs))
            fast[k] = _default(m, fn, keywords[name], source, "__kwdefaults__", name)
    return fast


def _bind_keywords(fn: types.FunctionType, fast: list[Any], args: list[Any], kwargs: dict[str, Any], at_end: int) -> None:
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


def _default(m: Machine, fn: Any, value: Any, source: Source | None, which: str, key: Any) -> Any:
    if source is None or (id(fn) not in m.world.tracks and (type(value) in SCALARS or issubclass(type(value), PINNED_TYPES))):
        return value  # a function that is always the same one has a guard on its defaults
    return m.world.wrap(value, Item(Attr(source, which, "getattr"), key))


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
