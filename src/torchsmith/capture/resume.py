"""Where a frame that was split goes on: the points of a function, each with compilations of its own.

In: a capture that stopped at an instruction (`Stop`) and the State of its function. Out: a site, the data that csrc/frame/resume.c
follows: the instruction as code, the points behind it, where an exception goes. A point is a Dispatcher whose parameters are what the
frame holds there.
"""

from __future__ import annotations

import types
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..codes import Unsupported
from . import assemble, bytecode
from .source import Item, Source

MAX_POINTS = 256  # of one function; where more would be needed the rest of the frame runs as it is


class Unbound:
    """Stands in a state for a variable that has no value: on whichever way a frame comes to a point, its state has the same variables."""


class Later:
    """A value that a frame was given in its middle and nothing has looked at yet: no guard says anything of it. may_be_unbound: on another
    way to the point it may be Unbound."""

    __slots__ = ("is_computed", "is_data", "may_be_unbound", "obj", "source")

    def __init__(self, obj: Any, source: Source, is_computed: bool = False, may_be_unbound: bool = False) -> None:
        self.obj, self.source, self.is_computed, self.may_be_unbound = obj, source, is_computed, may_be_unbound
        self.is_data = is_computed and is_data(obj)  # a number, text ... that Python computed behind a break: not to be made a constant of

    def unpacked(self) -> tuple[Later, ...]:
        """The items of a tuple, which nothing has looked at either."""
        return tuple([Later(v, Item(self.source, i), self.is_computed) for i, v in enumerate(self.obj)])


@dataclass(slots=True)
class Loop:
    """A `for` loop that was begun: at which step of the outermost frame, whether it is that frame's own, how often it went around."""

    step: int
    is_own: bool
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a capture stopped, and the shape of the state that it hands over: slots in order, the stack (False: null), handled exception."""

    code: types.CodeType
    index: int
    slots: tuple[int, ...]
    stack: tuple[bool, ...]
    handled: bool
    kw_names: int | None
    data: tuple[bool, ...]  # which of the state's values Python computed behind a break
    varying: tuple[bool, ...] = ()  # which of them are numbers that vary from call to call


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the middle of a code object where a frame can go on."""

    code: types.CodeType
    index: int
    slots: tuple[int, ...]
    stack: tuple[bool, ...]
    handled: bool
    data: tuple[bool, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return assemble.state_names(self.code, self.slots, self.stack, self.handled)

    @property
    def line(self) -> int:
        return bytecode.decode(self.code).instrs[self.index].line

    @property
    def loop(self) -> int:
        """The FOR_ITER of the innermost loop around the point; a negative number of the point's own: there is none."""
        return max((i.index for i in bytecode.decode(self.code).instrs if i.name == "FOR_ITER" and i.index <= self.index < i.value), default=~self.index)

    @property
    def counters(self) -> set[str]:
        """Names of the values that a loop around the point counts with."""
        counted = assemble.counters(self.code)[self.index]
        return {bytecode.decode(self.code).names[s] for s in self.slots if s in counted}


@dataclass(slots=True)
class Family:
    """What the points of one function (under one set of options) share."""

    root: Any  # its State
    key: Any
    points: dict[Point, Any] = field(default_factory=dict)
    operators: int = 0  # in all graphs so far
    by_turns: set[int] = field(default_factory=set)  # loops whose iterators are left to Python: too many of their places were compiled for
    has_walked: bool = False  # turns of a loop up to its next break were captured as one: from now on a loop is captured to its end, or turn by turn
    why: Unsupported | None = None  # why the function was split first
    others: int = 0  # operators that were compiled by then, in all functions


_DATA = frozenset({int, float, complex, str, bytes, range, slice})


def is_data(value: Any) -> bool:
    """Values that differ from call to call when they come out of a break."""
    return type(value) in _DATA or isinstance(value, np.generic) or (type(value) is tuple and bool(value) and all(is_data(v) for v in value))


def can_be_missed(t: type) -> bool:
    """Are these objects whose end a program may be told of?"""
    return bool(t.__flags__ & 0x200) and t.__weakrefoffset__ != 0 and not issubclass(t, (torch.Tensor, torch.nn.Module, type))


def is_missed(obj: Any) -> bool:
    """Can the program see that the frame lets this object go?"""
    t = type(obj)
    if issubclass(t, types.GeneratorType):
        return bool(obj.gi_suspended)  # it is closed then, and what stands in its `finally` runs
    if issubclass(t, weakref.ref):
        return obj.__callback__ is not None  # which is not called any more
    if not t.__flags__ & 0x200 or issubclass(t, (torch.Tensor, torch.nn.Module, type)):
        return False
    return any("__del__" in vars(c) for c in t.__mro__) or (can_be_missed(t) and weakref.getweakrefcount(obj) > 0)


def next_index(code: types.CodeType, index: int) -> int:
    """Where running goes on, past instructions that do nothing."""
    instrs = bytecode.decode(code).instrs
    while instrs[index].name in ("NOP", "CACHE", "JUMP_FORWARD"):
        index = instrs[index].value if instrs[index].name == "JUMP_FORWARD" else index + 1
    return index


def make_site(family: Family, stop: Stop, space: dict[str, Any], make_point: Any) -> tuple[Any, ...]:
    """(step, points by exit, handler, free, handled): what is done at a stop and where it leads. handler: None or (point, positions, raising offset)."""
    code, slots, stack = stop.code, stop.slots, stop.stack
    c = bytecode.decode(code)
    ins = c.instrs[stop.index]
    n = assemble.touches(ins)
    assert n is not None
    alive = assemble.live(code)
    below = stack[: len(stack) - n]
    targets: list[tuple[int, tuple[bool, ...]]] = []
    if ins.name not in ("RAISE_VARARGS", "RERAISE"):
        targets.append((next_index(code, stop.index + 1), (*below, *assemble.pushes(ins, jumps=False))))
        if ins.name in assemble._JUMPS:
            skipped = assemble.AFTER_LOOP if ins.name == "FOR_ITER" else 0
            targets.append((next_index(code, ins.value + skipped), (*below, *assemble.pushes(ins, jumps=True))))
    was = dict(zip(slots, stop.data))
    under = stop.data[len(slots) : len(slots) + sum(below)]
    last = stop.data[len(stop.data) - stop.handled :]
    held = {s for s in slots if s not in alive[stop.index]}
    kept = [tuple(s for s in slots if s in alive[index] or s in held) for index, _ in targets]
    exits = []
    for own, (index, shape) in zip(kept, targets):
        data = (*(was[s] for s in own), *under, *(True,) * (sum(shape) - len(under)), *last)
        exits.append(_marked(make_point(family, Point(code, index, own, shape, stop.handled, data)), stop, len(below)))
    body = assemble.step(code, ins, slots, stack, stop.handled, kept[0] if kept else (), stop.kw_names, kept[-1] if kept else ())
    step = types.FunctionType(body, space, code.co_name, None, (types.CellType(),) if body.co_freevars else None)
    step.__qualname__ = code.co_qualname
    return step, tuple(exits), _handler(family, stop, make_point), free_variable(code, ins), stop.handled


def _marked(point: Any, stop: Stop, depth: int) -> Any:
    """The point, told which of the slots and of the `depth` lowest values on the stack are numbers that vary."""
    names = assemble.state_names(stop.code, stop.slots, stop.stack[:depth], False)
    point.state.varying.update(name for name, varies in zip(names, stop.varying) if varies)
    return point


def free_variable(code: types.CodeType, ins: bytecode.Instr) -> int:
    """Which free variable the instruction works on: its number in the function's closure, or -1."""
    if assemble.may_be_super(code, ins):
        return code.co_freevars.index("__class__")
    free = bytecode.decode(code).size - len(code.co_freevars)
    return ins.arg - free if ins.name in assemble._SLOT and ins.arg >= free else -1


def _handler(family: Family, stop: Stop, make_point: Any) -> tuple[Any, ...] | None:
    """Where an exception of the stop's instruction goes: (point, positions of the state's values, offset or None)."""
    c = bytecode.decode(stop.code)
    row = c.handlers[stop.index]
    if row is None:
        return None
    target, depth, lasti = row
    alive, before = assemble.live(stop.code)[target], assemble.live(stop.code)[stop.index]
    kept = tuple(s for s in stop.slots if s in alive or s not in before)
    positions = [k for k, s in enumerate(stop.slots) if s in kept]
    positions += [len(stop.slots) + k for k in range(sum(stop.stack[:depth]))]
    shape = (*stop.stack[:depth], *((True,) if lasti else ()), True)
    data = (*(stop.data[k] for k in positions), *((False,) * (1 + lasti + stop.handled)))
    point = Point(stop.code, target, kept, shape, stop.handled, data)
    return _marked(make_point(family, point), stop, depth), tuple(positions), (c.instrs[stop.index].offset // 2 if lasti else None)


def rest_of(point: Point, fn: types.FunctionType, state: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """A function that runs the frame from the point to its end, and its arguments."""
    n = len(point.slots)
    on_stack = iter(state[n:])
    stack = [next(on_stack) if real else Unbound for real in point.stack]
    slots = [s for s, v in zip(point.slots, state) if v is not Unbound]
    values = [v for v in stack if v is not Unbound]
    body = assemble.rest(point.code, point.index, slots, [v is not Unbound for v in stack], values)
    run = types.FunctionType(body, fn.__globals__, fn.__name__, None, fn.__closure__)
    run.__qualname__ = fn.__qualname__
    given: list[Any] = [None] * (bytecode.decode(point.code).size - len(point.code.co_freevars))
    for s, v in zip(point.slots, state):
        given[s] = v
    return run, given
