"""Starts the machine on one call of a function: its arguments read from outside, its frame run, what came out closed.

In: a Python function with its arguments. Out: Captured, or Unsupported with a code and the user's line.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..codes import Unsupported
from . import assemble, finish, iterators, overrides, torch_rows
from .asked import FIRST, Asked
from .attributes import Raised, saying
from .captured import Captured
from .frame import STOP, Frame, bind
from .guards import global_state
from .machine import ASYNC, GENERATOR, Machine
from .resume import Later, Point
from .source import Computed, FixedObject, Item, Local, Source
from .stamps import Again
from .state import location
from .world import NULL


def capture(
    fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked = FIRST,
    close: Callable[[Machine, Any], Captured] = finish.finished,
) -> Captured:  # fmt: skip
    """Capture one call of a Python function. close(machine, the frame's result) makes what is captured: another one than `finished` makes a
    graph that stands alone. Unsupported.step is the number (from 0) of the instruction that could not be captured; under `asked.probe` that of
    the last one in front of which the frame's state can be handed over, and nothing else comes back."""
    with _no_collection():
        try:
            return _capture(fn, args, kwargs, asked, close)
        except Again:
            return _capture(fn, args, kwargs, replace(asked, stamps=False), close)


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
    fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked, close: Callable[[Machine, Any], Captured]
) -> Captured:
    m, at, stop = Machine(fn, asked, is_whole=close is not finish.finished), asked.at, asked.stop
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
            if fn.__code__.co_flags & (GENERATOR | ASYNC):
                raise Unsupported("CAP003", at=location(fn))
            given_values = values[: fn.__code__.co_argcount]
            kind, result = frame.run(_ALL if stop is None else stop)
            if kind != STOP:
                frame.leave()
            if m.lost is not None:
                raise m.lost
            if kind == STOP and asked.probe:
                raise Unsupported("CAP028", at=m.loc())
            if kind == STOP:
                frame.steps += 1  # the instruction in front of which the state is handed over
                _stops_at_loop(m, frame)
                return finish.stopped(m, frame)
            if fn in torch_rows.AFTER and at is None:
                result = torch_rows.AFTER[fn](m, result, *given_values)
            return close(m, result)
        except Raised as r:
            why = Unsupported("CAP006", at=m.raised_at, detail=saying(r.exc))
            why.step = frame.steps - 1 if frame is not None else -1
            raise why from r.exc
        except Unsupported as why:
            why.is_error = why.is_error or m.error_mode
            if why.step < 0 and frame is not None:
                why.step = frame.clean if asked.probe else frame.steps - 1
            if stop is None and m.splits and frame is not None:
                _turn_by_turn(m, frame, why)
            raise
        finally:
            m.active = False
            m.recorder.facts.when_asked = None  # the facts live on
            m.frames.clear()
            torch_rows.leave_regions(m)
            m.let_go()


_ALL = 1 << 62


def _turn_by_turn(m: Machine, frame: Frame, why: Unsupported) -> None:
    """A loop that breaks in the first turn of a capture breaks in each turn: Python moves its iterator, and all turns are compiled as one."""
    open_loops = {id(v) for v in frame.stack}
    for key, loop in m.loops.items():
        if loop.step < 0 or (loop.is_own and key not in open_loops):
            continue
        goes_on = loop.turns > 1 and m.later and loop.is_own and key in m.world.tracks and not iterators.is_over_modules(m.world.tracks[key].obj)
        why.in_loop = why.in_loop or goes_on
        if loop.turns == 1 or (goes_on and m.asked.whole_loops):
            why.step = min(why.step, loop.step)


def _stops_at_loop(m: Machine, frame: Frame) -> None:
    """In front of a loop over modules that is left to Python: other turns may go further."""
    ins = frame.code.instrs[frame.index]
    top = frame.stack[-1] if frame.stack else None
    if ins.name == "FOR_ITER" and m.asked.walks and type(top) is Later and type(top.obj) in iterators.TYPES and iterators.is_over_modules(top.obj):
        iterators.guard_place(m, top)


def _enter_middle(m: Machine, frame: Frame, point: Point, values: tuple[Any, ...]) -> None:
    """The frame as it stands at a point; its values are taken up where something looks at them."""
    m.later = True
    n = len(point.slots)
    unbound = assemble.unbound(point.code)[point.index]
    clears = any(i.name == "LOAD_FAST_AND_CLEAR" for i in frame.code.instrs)  # puts what a variable holds, or nothing, on the stack
    doubts = [s in unbound for s in point.slots] + [clears] * (len(values) - n)
    later = [Later(v, Local(name), d, doubt) for v, name, d, doubt in zip(values, point.names, point.data, doubts, strict=True)]
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
    fast = bind(m, fn, list(args), dict(kwargs), None)
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
