"""How much of a call is captured: the whole frame or its beginning, with sizes and numbers that vary or without.

In: a compiled function's State and a call. Out: Captured, or Unsupported with the reason of the first attempt.
"""

from __future__ import annotations

import threading
import types
from dataclasses import dataclass
from typing import Any

from .. import events
from ..codes import Forbidden, Unsupported
from ..graph.sizes import print_condition
from ..ir.expr import walk
from . import resume
from .asked import Asked
from .source import ITSELF, Source, TensorProperty
from .state import COMPILED, ConstraintViolation, State, family_of, location


class _Errors(threading.local):
    def __init__(self) -> None:
        self.on = False  # compiler.error_on_graph_break(True) is entered


_ERRORS = _Errors()


def set_error_mode(on: bool) -> bool:
    """Whether breaks are errors from now on in this thread; gives what was before."""
    before, _ERRORS.on = _ERRORS.on, bool(on)
    return before


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a compiled function that no entry fits."""

    state: State
    fn: types.FunctionType
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def capture(self, **asked: Any) -> Any:
        """One attempt: fields of Asked that differ from what the function's state says."""
        from .start import capture  # the machine's tables take a while to build: not before the first miss

        state = self.state
        whole_loops = state.family is not None and state.family.has_walked
        by_code = (state if state.family is None else state.family.root).hooked
        return capture(self.fn, self.args, self.kwargs, Asked(
            at=state.point, walks=state.may_walk, whole_loops=whole_loops, least=state.least_number, by_code=by_code, error_mode=_ERRORS.on,
            marked=state.marked, unbacked=state.unbacked, **asked,
        ))  # fmt: skip


# Reasons for which a frame is not split: the frame as a whole, or too much of it.
_NOT_SPLIT = frozenset({"CAP003", "CAP005", "CAP013", "CAP027"})
_TRIES = 6  # stops that are tried, earlier and earlier


def capture_or_split(d: Any, state: State, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole frame, or as much of it as can be captured: up to the instruction that cannot, or to one before it where the frame's
    state can be handed over."""
    call, settings = _Call(state, fn, args, kwargs), state.settings
    state.reads = settings.fullgraph
    try:
        return _capture_with_retry(call)
    except Unsupported as error:
        why = error
    if why.code == "GRA004" and not state.counts:
        state.counts = True
        try:
            return _capture_with_retry(call)
        except Unsupported:
            state.counts = False
    chosen = settings.backend  # others are given graphs without numbers of their own
    takes = getattr(chosen, "dialect", "native") == "native" or getattr(chosen, "name", "") == "eager"
    if why.code in _READS and state.may_read and takes and not settings.fullgraph:
        captured = _capture_reading(call, why.is_of_state)
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
            captured = _capture_with_retry(call, stop)
        except Unsupported as error:
            if error.code == "CAP027":
                raise
            if error.code in _NOT_SPLIT or stop == 0:
                raise first from error
            stop = error.step if 0 <= error.step < stop else _earlier(call, stop)
            continue
        events.emit("graph_break", code=first.code, loc=first.at or location(fn), detail=first.detail, name=state.label)
        first.__traceback__ = first.__cause__ = first.__context__ = None  # they hold what the frame held, user's objects too
        family.has_walked = family.has_walked or first.in_loop
        if family.why is None:
            family.why, family.others = first, COMPILED[0]
        return captured
    raise first


_READS = frozenset({"CAP020", "GRA003"})  # Python, or torch itself, asks for the value of a tensor


def _capture_reading(call: _Call, of_state: bool) -> Any:
    """The whole frame as one graph in which tensors' values are numbers known only when it runs; None where something needs to know more
    of them than the program itself checks. of_state: those of modules may be read when the call begins, where that does not do."""
    state = call.state
    state.reads, before = True, state.counts
    for state.counts in dict.fromkeys((before, before or of_state)):
        try:
            captured = _capture_with_retry(call)
        except Unsupported:
            continue
        if not captured.facts.needed:
            return captured
    state.reads, state.may_read, state.counts = False, False, before
    return None


def _earlier(call: _Call, stop: int) -> int:
    """The last instruction before `stop` in front of which all that the frame holds can be handed over."""
    try:
        call.capture(dynamic=False, stop=stop, probe=True)
    except Unsupported as why:
        return why.step if 0 <= why.step < stop else stop // 2
    return stop // 2


def _capture_with_retry(call: _Call, stop: int | None = None) -> Any:
    """Capture with the dimensions found to vary; without them where that is not supported. stop: not beyond this instruction."""
    state, settings = call.state, call.state.settings
    dims = {k: set(v) for k, v in state.dynamic_dims.items()} if state.may_be_dynamic else {}
    try:
        return _capture_pinned(call, dims, stop)
    except Unsupported as why:
        if state.unbacked and why.code == "GRA004":
            raise ConstraintViolation(f"torchsmith: {why}") from why
        if not dims and not settings.dynamic:
            raise
        if any(ITSELF in d for d in dims.values()):
            if (stop is None or why.code == "GRA015") and why.step >= 0 and not settings.fullgraph and why.code not in _NOT_SPLIT:
                raise  # the frame is split there
            if stop is not None and _fails_alike(call, dims, stop, why):
                raise
            state.forget_numbers(why)
            return _capture_with_retry(call, stop)
        try:
            captured = call.capture(dynamic=False, dynamic_dims={}, fullgraph=settings.fullgraph, stop=stop, reads=state.reads, counts=state.counts)
        except Unsupported as static:
            if static.step <= why.step:  # the sizes were not in the way: they stay dynamic where the frame is split
                raise why from None
            state.may_be_dynamic = False
            raise
        state.may_be_dynamic = False
        events.emit("fallback", code=why.code, at=why.at or location(call.fn), detail=f"sizes stay static: {why.detail}")
        return captured


def _fails_alike(call: _Call, dims: dict[str, set[int]], stop: int, why: Unsupported) -> bool:
    """Does a capture up to `stop` fail in the same way where numbers are constants? (What the frame holds there cannot be handed over.)"""
    try:
        _capture_pinned(call, {place: d - {ITSELF} for place, d in dims.items()}, stop)
    except Unsupported as error:
        return error.code == why.code and error.step <= why.step
    return False


def _capture_pinned(call: _Call, dims: dict[str, set[int]], stop: int | None) -> Any:
    """Capture until no symbol stands for one size only (kernels know constants); sizes of 1 are numbers where as symbols they are in the way."""
    state, settings = call.state, call.state.settings
    static: dict[str, set[int]] = {}
    ones = bool(settings.dynamic or dims)
    varying: set[str] = set()  # numbers of which another value is compiled already: where one is needed as a constant, the call is left out
    while True:
        try:
            captured = call.capture(
                dynamic=settings.dynamic, dynamic_dims=dims, static_dims=static, ones=ones,
                fullgraph=settings.fullgraph, stop=stop, reads=state.reads, counts=state.counts, loose=frozenset(varying),
                growing=state.growing,
            )  # fmt: skip
        except Unsupported as why:
            if not ones or why.code == "GRA015":
                raise
            ones = False
            continue
        pinned = _pinned(state, captured)
        if all(d in static.get(source, ()) for source, d in pinned):  # nothing, or nothing that could be told the machine
            if not settings.fullgraph:  # a derivative that needs one of them as a constant would be compiled for each value
                captured.facts.loose = captured.facts.floats()
            return captured
        needed = {str(captured.facts.sources[n]) for n in captured.facts.fixed if n in captured.facts.sources}
        needed |= {source for source, d in pinned if d == ITSELF and (source in state.counted or (stop is not None and not state.may_pin))}
        if not settings.fullgraph and not needed <= varying:
            varying |= needed
            continue
        for source, d in pinned:
            static.setdefault(source, set()).add(d)


def _pinned(state: State, captured: Any) -> list[tuple[str, int]]:
    """Dynamic dimensions (input, number) that the captured program is for one size of."""
    facts = captured.facts
    found: list[tuple[str, int]] = []
    for name, value in (dict.fromkeys(facts.fixed, "a constant") | facts.pinned()).items():
        source: Source | None = facts.sources.get(name)
        if source is None:
            continue
        place = (str(source.base), source.dim) if isinstance(source, TensorProperty) else (str(source), ITSELF)
        if place in state.marked:
            why = next((g for g in facts.guards if any(x is facts.symbols[name].sym for x in walk(g))), None)
            raise ConstraintViolation(
                f"torchsmith: dimension {place[1]} of {place[0]} is marked dynamic, but the program makes {value} of it"
                f" ({facts.locs.get(why, '?')}: {'' if why is None else print_condition(why)}). Mend the program, or use maybe_mark_dynamic."
            )
        found.append(place)
    return found
