"""What is kept of one compiled function: what was asked for, what its calls have shown, what Python knows of its entries."""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import events
from ..codes import Unsupported
from ..ir.expr import Expr
from ..options import Options
from . import resume
from .policy import EXPORT_FRAME
from .source import ITSELF, Guard, Local, Source


class RecompileLimitHit(RuntimeError):
    """fullgraph=True and one more compilation than recompile_limit would be needed."""


class ConstraintViolation(RuntimeError):
    """A dimension marked by mark_dynamic, of which the program makes a constant."""


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
    at_once: bool = False  # compile also what a call outdates
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
    may_have: dict[type, bool] = field(default_factory=lambda: {int: True, np.number: True, float: True})  # numbers that vary may become symbols
    numbers: dict[str, type] = field(default_factory=dict)  # those that were seen to vary
    counted: set[str] = field(default_factory=set)  # those that take a value a turn, none of which is assumed
    growing: set[str] = field(default_factory=set)  # dictionaries that no call finds as another left them: what they hold is not assumed
    varying: set[str] = field(default_factory=set)  # of a point: names of numbers that vary, as the frame's beginning knows
    reads: bool = False  # item() is a number that the graph tells when it runs; else it is a break
    may_read: bool = True  # ... which was not refused yet
    may_pin: bool = True  # numbers that vary may become constants in front of a break, one compilation for each; else what needs one is left to Python
    counts: bool = False  # what optimizers and modules count in tensors is read before the graph runs, because they choose by it
    pending: set[Any] = field(default_factory=set)  # signatures of calls that are being compiled in the background
    failed: dict[Any, BaseException] = field(default_factory=dict)  # what compiling them raised, for the next such call
    warned: bool = False
    outdated: bool = False  # a call was left to Python because it would have outdated its own compilation
    point: resume.Point | None = None  # not a function's beginning, but where a split frame goes on
    family: resume.Family | None = None

    def forget_numbers(self, why: Unsupported) -> bool:
        """Numbers stay constants: with symbols for them the function cannot be compiled. Integers first: they decide shapes. Out: were there
        any? Numbers that tensors told before the frame was split are none of these."""
        kinds = {self.numbers.get(place) for place, dims in self.dynamic_dims.items() if ITSELF in dims}
        kind = next((k for k in self.may_have if k in kinds), float)
        self.may_have[kind] = False
        before = self.dynamic_dims
        self.dynamic_dims = {place: dims for place, dims in before.items() if ITSELF not in dims or self.numbers.get(place) is not kind}
        if len(self.dynamic_dims) == len(before):
            return False
        events.emit("fallback", code=why.code, at=why.at, detail=f"{'integers' if kind is int else 'floats'} stay constants: {why.detail}")
        return True

    def expect_numbers(self, values: Mapping[str, Any]) -> None:
        """Numbers at a point that are known to vary before a second value was seen: counters of loops, and what the beginning computed."""
        counters = set() if self.point is None or self.settings.dynamic is False else self.point.counters
        for name in counters | self.varying:
            kind, place = type(values.get(name)), str(Local(name))
            if self.may_have.get(kind):
                self.dynamic_dims.setdefault(place, set()).add(ITSELF)
                self.numbers[place] = kind
                self.counted.update({place} if name in counters else ())

    @property
    def may_walk(self) -> bool:
        """Whether iterators in a split frame may become constants."""
        return self.point is None or self.family is None or self.point.loop not in self.family.by_turns

    @property
    def least_number(self) -> int:
        """The least integer that may be a symbol. A function's 0 and 1 have graphs of their own, as sizes have; what a loop of a split frame
        counts has one, there and in what the loop calls."""
        return 2 if self.point is None and not self.hooked else 0

    def reduce(self, dispatcher: Any) -> Any:
        """For pickle: by name, as functions are; where the name means something else, the original compiled again."""
        original = dispatcher.__wrapped__
        found: Any = sys.modules.get(dispatcher.__module__)
        for part in dispatcher.__qualname__.split("."):
            found = getattr(found, part, None)
        return dispatcher.__qualname__ if found is dispatcher else (self.settings.again, (original, *self.settings.pickled()))


def location(fn: types.FunctionType) -> str:
    """Where a function begins; of the one that calls an exported module, where that one's forward does."""
    code = getattr(inspect.unwrap(fn) if fn.__code__.co_filename == EXPORT_FRAME else fn, "__code__", fn.__code__)
    return f"{code.co_filename}:{code.co_firstlineno}"


def family_of(d: Any, state: State) -> resume.Family:
    if state.family is None:
        state.family = resume.Family(state, d.key)
    return state.family


def warn_eager(state: State, why: Unsupported) -> None:
    """Once for each function that was asked to be compiled: it runs eagerly, which is right but no faster."""
    asked = not state.hooked and state.point is None
    if asked and not state.warned and state.settings.options.warn_eager and why.code != "CAP006":
        state.warned = True
        what = f"torchsmith: {state.label} runs eagerly. {why}"
        events.warn(f"{what} (options={{'warn_eager': False}} or TORCHSMITH_WARN_EAGER=0 silences this.)")


COMPILED = [0]  # operators, in all functions of this process


def count_operators(state: State, captured: Any) -> None:
    """A function that is split says so if it comes to its end and nothing of it, nor of what it called, was compiled."""
    n, family = sum(n.op.startswith("call") for n in captured.graph.graph.nodes), state.family
    COMPILED[0] += n
    if family is None:
        return
    family.operators += n
    if captured.stop is None and family.why is not None and family.others == COMPILED[0]:
        warn_eager(family.root, family.why)
