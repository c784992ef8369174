"""Iterators from outside: read where they stand, walked through as copies, moved on when the graph has run.

In: an iterator of Python's own (over a list, tuple, text, range, dictionary or set; enumerate, zip, map, filter, count, repeat) and where it
came from. Out: an iterator in the same place over what stands for its parts, under guards. finish moves the true one as far as the
copy went.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..codes import Unsupported
from .iteration_rows import interpreted, predicate
from .protocol import Machine
from .source import PartOf, Source
from .world import _IMAGE, Track, container_base

_SEQUENCES = frozenset({type(iter([])), type(iter(())), type(iter("")), type(iter("\u0101")), type(iter(b"")), type(reversed([])), reversed})
_RANGES = frozenset({type(iter(range(0)))})
TABLES: frozenset[type] = frozenset({type(iter({})), type(iter({}.values())), type(iter({}.items())), type(iter(set()))})
_NESTS = frozenset({enumerate, zip, map, filter})  # they walk through other iterators
_NUMBERS = frozenset({itertools.count, itertools.repeat}) if sys.version_info < (3, 14) else frozenset()
TYPES: frozenset[Any] = _SEQUENCES | _RANGES | TABLES | _NESTS | _NUMBERS
CHANGED = -1  # the place of an iterator whose dictionary or set has another size than when it was made
LONGEST = 64  # of an iterator that a split frame goes on with: a longer loop is left to Python, turn by turn


@functools.cache
def _part(k: int) -> Callable[[tuple[Any, ...]], Any]:
    """What reads the k-th thing that an iterator is made of."""
    return lambda base: base[0].__reduce__()[1][k]


def held(base: tuple[Any, ...]) -> Any:
    """The dictionary or set that an iterator walks through; None where it is at its end."""
    return next((x for x in gc.get_referents(base[0]) if isinstance(x, (dict, set, frozenset))), None)


def _place(base: tuple[Any, ...]) -> Any:
    """Where an iterator stands, as a constant; None: it has told its end."""
    it = base[0]
    t = type(it)
    if t in _RANGES:
        left = operator.length_hint(it)
        numbers = it.__reduce__()[1][0]
        return numbers[len(numbers) - left :] if left else None
    if t in TABLES:
        table, left = held(base), operator.length_hint(it)
        if table is None:
            return None
        try:
            if left == 0 < len(table):  # at the end, or its table has another size
                it.__reduce__()
        except RuntimeError:
            return CHANGED
        return left
    _, args, *state = it.__reduce__()
    if t in _SEQUENCES:
        return state[0] if state else None
    if t is enumerate or t is itertools.count:
        return args[1:] if t is enumerate else args
    if t is itertools.repeat:
        return args[1:]
    return len(args), *state  # zip: strict or not


def place_of(it: Any) -> Any:
    return _place((it,))


def walked(m: Machine, track: Track) -> Any:
    """The copy of an iterator from outside, over what stands for its parts. Raises Unsupported("CAP011") where there can be none."""
    it, source, world = track.obj, track.source, m.world
    t = type(it)
    if m.later and not (m.asked.walks and operator.length_hint(it) <= LONGEST):
        raise _refused(m, it)
    place = place_of(it)
    world.guard(PartOf(source, "place", _place), "equals", place)

    def part(k: int) -> Any:
        return _read(m, _part(k)((it,)), PartOf(source, str(k), _part(k)))

    image: Any
    if t in _RANGES:
        image = iter(range(0) if place is None else place)
    elif place is None:
        image = iter(())
    elif t in _SEQUENCES:
        make, (over,), _ = it.__reduce__()
        if type(over) not in (list, tuple, str, bytes, range):
            raise _refused(m, it)
        image = make(part(0))
        image.__setstate__(place)
    elif t in TABLES:
        image = _walk_table(m, it, place, PartOf(source, "over", held))
    elif t is enumerate:
        image = enumerate(_inner(m, part(0)), *place)
        if _calls(image):  # the true one could not be moved without
            raise _refused(m, it)
    elif t is zip:
        image = zip(*(_inner(m, part(k)) for k in range(place[0])), strict=len(place) > 1)
    elif t is map:
        image = map(interpreted(m, part(0)), *(_inner(m, part(k)) for k in range(1, place[0])))
    elif t is filter:
        image = filter(predicate(m, part(0)), _inner(m, part(1)))
    elif t is itertools.count:
        image = itertools.count(*place)
    else:
        image = itertools.repeat(part(0), *place)
    world.walks.append(track)
    return image


def _refused(m: Machine, it: Any) -> Unsupported:
    return Unsupported("CAP011", at=m.loc(), detail=f"an iterator from outside ({type(it).__name__})")


def _read(m: Machine, value: Any, source: Source) -> Any:
    """A part of an iterator: the image of what has one."""
    made = m.world.wrap(value, source)
    track = m.world.of(made)
    return m.world.image(track) if track is not None and (container_base(type(made)) or type(made) in TYPES) else made


def _inner(m: Machine, it: Any) -> Any:
    """An iterator that another one walks through: no code of the program may run below it."""
    if all(track.image is not it for track in m.world.walks):
        raise _refused(m, it)
    return it


def _walk_table(m: Machine, it: Any, left: int, source: Source) -> Any:
    table = held((it,))
    if left == CHANGED:
        raise _refused(m, it)
    body = _read(m, table, source)
    how = way(it)
    image = iter(getattr(body, how[1:-2])() if how else body)
    move_to(image, left)
    return image


def way(it: Any) -> str:
    """How such an iterator is made of a dictionary, as text behind its name."""
    how = type(it).__name__
    return ".values()" if "value" in how else ".items()" if "item" in how else ""


def is_over_modules(it: Any) -> bool:
    """Does it give modules, of which each is different code?"""
    t = type(it)
    if t in _NESTS:
        return any(map(is_over_modules, _below(it)))
    if t in TABLES:
        over: Any = held((it,))
        some = list(over.values())[:1] if isinstance(over, dict) and way(it) == ".values()" else ()
    else:
        some = it.__reduce__()[1][0][:1] if t in _SEQUENCES and place_of(it) is not None else ()
    return any(isinstance(x, torch.nn.Module) for x in some)


def guard_place(m: Machine, later: Any) -> None:
    """What follows holds for an iterator in this place."""
    m.world.guard(PartOf(later.source, "place", _place), "equals", place_of(later.obj))


# ---------------------------------------------------------------- the end of a capture


def move_to(it: Any, place: Any) -> None:
    """Move an iterator on until it stands at `place`."""
    if place is None:
        for _ in it:
            pass
    elif type(it) in _SEQUENCES:
        it.__setstate__(place)
    else:
        left = len(place) if type(it) in _RANGES else place
        while operator.length_hint(it) > left:
            next(it)


def places(m: Machine) -> list[Any]:
    """Where the copies stand."""
    return [place_of(track.image) for track in m.world.walks]


def step(it: Any, n: int) -> None:
    """Take n things from an iterator."""
    for _ in range(n):
        next(it)


def moves(m: Machine) -> list[tuple[Callable[..., None], Track, Any]]:
    """What moves the true iterators to where their copies are: (function, of which iterator, argument). Numbers that they count first:
    that moves the iterators below them too. Raises Unsupported("CAP015") for the iterator of what was changed."""
    counted: list[tuple[Callable[..., None], Track, Any]] = []
    placed: list[tuple[Callable[..., None], Track, Any]] = []
    for track in m.world.walks:
        it, image = track.obj, track.image
        t, was = type(it), place_of(it)
        if t in (enumerate, itertools.count, itertools.repeat):
            n = _taken(t, was, place_of(image))
            if n and not (t is enumerate and _is_over(image)):
                counted.append((step, track, n))
        elif t not in _NESTS:
            now = place_of(image) if type(image) is t else None
            if type(now) is not type(was) or now != was:
                over = m.world.tracks.get(id(held((it,)))) if t in TABLES else None
                if over is not None and over.dirty:
                    raise Unsupported("CAP015", at=m.loc(), detail=f"an iterator of a {type(over.obj).__name__} that was changed")
                placed.append((move_to, track, now))
    return counted + placed


def _taken(t: type, was: Any, now: Any) -> int:
    """How many things were taken from an iterator that counts; repeat counts down, if it does."""
    if not was:
        return 0
    return round((now[0] - was[0]) / (was[1] if len(was) > 1 else 1)) * (-1 if t is itertools.repeat else 1)


def _below(it: Any) -> tuple[Any, ...]:
    return it.__reduce__()[1] if type(it) in _NESTS else ()


def _calls(it: Any) -> bool:
    return type(it) in (map, filter) or any(map(_calls, _below(it)))


def _is_over(it: Any) -> bool:
    """Has one of the iterators that it walks through told its end?"""
    if type(it) in _NESTS:
        return any(_is_over(x) for x in _below(it) if type(x) in TYPES)
    return type(it) in TYPES and place_of(it) is None


for _t in TYPES:
    _IMAGE[_t] = lambda world, track: world.walk(track)
