"""Which object is which: objects that are told apart or written to are different ones in every call; id() is of this object; what is
built inside comes out as the program made it."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchsmith


class Thing:
    def __init__(self, a: Any = None, b: Any = None) -> None:
        self.a, self.b = a, b


class Pair(tuple[Any, ...]):
    pass


class Number(int):
    pass


class Name(str):
    pass


class Names(frozenset[Any]):
    pass


def _compiled(f: Callable[..., Any]) -> Any:
    return torchsmith.compile(f, backend="eager", fullgraph=True)


def _written(o: Any, p: Any, x: torch.Tensor) -> Any:
    o.a, p.a = 1, 2
    return x + o.a


def _named(o: Any, p: Any, x: torch.Tensor) -> Any:
    vars(o)["more"] = 1
    return x + hasattr(p, "more")


def _appended(o: Any, p: Any, x: torch.Tensor) -> Any:
    o.append(1)
    p.append(2)
    return x + len(o)


def _two(make: Callable[[], Any]) -> Callable[[bool], tuple[Any, ...]]:
    def call(is_one: bool) -> tuple[Any, ...]:
        first = make()
        return first, first if is_one else make(), torch.ones(2)

    return call


def _views(t: torch.Tensor, is_one: bool) -> tuple[torch.Tensor, ...]:
    return t, t if is_one else t[:], t.view(2)


def _inside(is_one: bool) -> tuple[Any, ...]:
    a = Thing()
    return Thing(a, a if is_one else Thing()), None, torch.ones(2)


APART: dict[str, tuple[Callable[..., Any], Callable[[bool], tuple[Any, ...]]]] = {
    "is": (lambda o, p, x: x + (1 if o is p else 2), _two(Thing)),
    "equal": (lambda o, p, x: x + (1 if o == p else 2), _two(Thing)),
    "in a list": (lambda o, p, x: x + (1 if o in [p] else 2), _two(Thing)),
    "set": (lambda o, p, x: x + len({o, p}), _two(Thing)),
    "dictionary": (lambda o, p, x: x + len({o: 1, p: 2}), _two(Thing)),
    "id": (lambda o, p, x: x + len({id(o), id(p)}), _two(Thing)),
    "lists": (lambda o, p, x: x + (1 if o is p else 2), _two(lambda: [1])),
    "attributes": (lambda o, p, x: x + (1 if o.a is o.b else 2), _inside),
    "written": (_written, _two(Thing)),
    "appended": (_appended, _two(list)),
    "written through the dictionary": (_named, _two(Thing)),
    "modules": (lambda o, p, x: x + len({o, p}), _two(torch.nn.ReLU)),
    "tensors": (lambda o, p, x: x + len({o, p}), _two(lambda: torch.ones(2))),
    "views": (lambda o, p, x: x + (1 if o is p else 2) + (1 if o is not x else 2), lambda is_one: _views(torch.ones(2), is_one)),
}


@pytest.mark.parametrize("name", APART)
def test_what_was_two_objects_may_become_one(name: str) -> None:
    f, arguments = APART[name]
    compiled = _compiled(f)
    for is_one in (False, True, False):
        assert torch.equal(compiled(*arguments(is_one)), f(*arguments(is_one)))


def test_different_objects_share_a_compilation() -> None:
    seen = []
    compiled = torchsmith.compile(APART["is"][0], backend=lambda gm, inputs: seen.append(gm) or gm.forward)
    for _ in range(3):
        compiled(Thing(), Thing(), torch.ones(2))
    assert len(seen) == 1
    assert "different objects" in str(torchsmith.explain(compiled)(Thing(), Thing(), torch.ones(2)))


def test_values_of_dictionaries_are_not_told_apart() -> None:
    def f(model: Any, x: torch.Tensor) -> torch.Tensor:
        found: dict[str, Any] = {}
        found.__setitem__("y", model(x))
        return found.setdefault("y", x) + found.get("z", x)

    model = torch.nn.Linear(2, 2)
    said = str(torchsmith.explain(f)(model, torch.ones(2)))
    assert "different objects" not in said and "breaks: 0" in said


def test_one_object_told_from_many_leaves_these_free() -> None:
    x = torch.ones(2)

    def g(o: Any, many: list[Any], x: torch.Tensor) -> torch.Tensor:
        return x + sum(o is other for other in many) + len([m.a for m in many])

    compiled = _compiled(g)
    one, other = Thing(1), Thing(1)
    for many in ([other, Thing(1)], [other, other], [one, other], [other, one]):
        assert torch.equal(compiled(one, many, x), g(one, many, x))


def test_a_number_of_id_is_this_object() -> None:
    def f(o: Any, number: int, x: torch.Tensor) -> Any:
        return (x + 1, number == id(o), str(id(o)), type(id(o)) is int)

    compiled = _compiled(f)
    a, b, x = Thing(), Thing(), torch.ones(2)
    for o, of in ((a, a), (b, a), (b, b), (x, x), (torch.ones(2), x)):
        assert compiled(o, id(of), x)[1:] == f(o, id(of), x)[1:]


def test_torch_is_given_the_number_of_this_object() -> None:
    def f(o: Any, x: torch.Tensor) -> Any:
        return x * id(o), torch.full((2,), id(o)), x + [id(o)][0], id(o).bit_length(), id(o).__add__(1)

    compiled = _compiled(f)
    a, b, x = Thing(), Thing(), torch.ones(2, dtype=torch.float64)
    for o in (a, b, a):
        assert str(compiled(o, x)) == str(f(o, x))


def test_an_object_that_id_was_asked_of_is_not_kept() -> None:
    compiled = _compiled(lambda o, number, x: x + 1 if id(o) == number else x)
    thing = Thing()
    compiled(thing, id(thing), torch.ones(2))
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None


MADE: dict[str, Callable[[], Any]] = {
    "tuple": lambda: Pair([1, 2]), "int": lambda: Number(4), "str": lambda: Name("a"), "frozenset": lambda: Names([1]),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_attributes_of_values_come_out(name: str) -> None:
    def f(x: torch.Tensor) -> Any:
        made = MADE[name]()
        made.more = x * 2
        return made

    made = _compiled(f)(torch.ones(2))
    want = MADE[name]()
    assert made == want and type(made) is type(want) and made.more.tolist() == [2, 2]


def test_functions_that_lead_back_to_themselves() -> None:
    def f(x: torch.Tensor) -> Any:
        def again() -> Any:
            return again

        def even(n: int) -> bool:
            return n == 0 or odd(n - 1)

        def odd(n: int) -> bool:
            return n != 0 and even(n - 1)

        return x + 1, again, even, odd

    _, again, even, odd = _compiled(f)(torch.ones(2))
    assert again() is again and even(4) and odd(3) and not even(3)
    assert even.__closure__[0].cell_contents is odd


LAZY: dict[str, Callable[[torch.Tensor], Any]] = {
    "map": lambda x: map(operator.add, [1, 2], [x, x]), "filter": lambda x: filter(lambda k: k < 2, [1, 2]),
    "filterfalse": lambda x: itertools.filterfalse(None, [0, 1]), "starmap": lambda x: itertools.starmap(operator.add, [(1, x), (2, x)]),
    "takewhile": lambda x: itertools.takewhile(lambda k: k < 2, [1, 2, 1]),
    "dropwhile": lambda x: itertools.dropwhile(lambda k: k < 2, [1, 2, 1]), "accumulate": lambda x: itertools.accumulate([x, x]),
    "accumulate by": lambda x: itertools.accumulate([x, x], lambda a, b: a * b + 1, initial=x),
    "compress": lambda x: itertools.compress([x, x + 1], [0, 1]), "zip_longest": lambda x: itertools.zip_longest([1, 2], [x], fillvalue=x),
}  # fmt: skip


@pytest.mark.parametrize("name", LAZY)
def test_iterators_come_out(name: str) -> None:
    x = torch.tensor([2.0])
    got, want = torchsmith.compile(LAZY[name], backend="eager")(x), LAZY[name](x)
    assert type(got) is type(want) and repr(list(got)) == repr(list(want))


def test_an_iterator_that_is_half_read_comes_out() -> None:
    def f(x: torch.Tensor) -> Any:
        it = map(operator.mul, [1, 2, 3], itertools.repeat(x))
        return next(it), it

    first, rest = torchsmith.compile(f, backend="eager")(torch.ones(1))
    assert [first.item(), *(t.item() for t in rest)] == [1, 2, 3]


def test_lists_of_tensors_that_are_changed_in_place_are_returned() -> None:
    def f(xs: list[torch.Tensor]) -> Any:
        torch._foreach_add_(self=xs, other=torch._foreach_pow(self=xs, exponent=2.0))
        return torch._foreach_add_(xs, 1.0) is xs, torch._foreach_mul_(xs, 2.0), torch._foreach_lerp_(xs, xs, 0.5)

    got, want = [torch.ones(2), torch.zeros(2)], [torch.ones(2), torch.zeros(2)]
    is_same, *lists = _compiled(f)(got)
    assert is_same and all(made is got for made in lists)
    f(want)
    assert [t.tolist() for t in got] == [t.tolist() for t in want]


WRONG: list[Callable[[Any], Any]] = [
    lambda x: isinstance(x, torch.Tensor, strict=True), lambda x: len(x, 3), lambda x: abs(x, 1), lambda x: any([1], [2]),
    lambda x: sorted([1], [2]), lambda x: list([], []), lambda x: tuple(values=1), lambda x: sum(["a"], ""), lambda x: dict([], []),
    lambda x: list(map(abs, [1], by=True)), lambda x: functools.reduce(min, [1], 2, 3), lambda x: max(1, 2, by=3), lambda x: hash(1, 2),
]  # fmt: skip


@pytest.mark.parametrize("n", range(len(WRONG)))
def test_builtins_count_their_arguments(n: int) -> None:
    with pytest.raises(TypeError) as want:
        WRONG[n](torch.ones(2))
    with pytest.raises(TypeError) as got:
        torchsmith.compile(WRONG[n], backend="eager")(torch.ones(2))
    assert str(got.value) == str(want.value)


def _grown(*less: str) -> set[str]:
    """A set whose table is larger than a copy's: the copy has another order."""
    found: set[str] = set()
    for i in range(40):
        found.add(f"k{i * 37}")
    for i in range(7, 40):
        found.discard(f"k{i * 37}")
    return found - set(less) if less else found


def test_sets_from_outside_keep_their_order() -> None:
    def f(x: torch.Tensor, s: set[Any]) -> Any:
        return x + len(s), list(s), [*s], ",".join(map(str, s)), sorted(s, key=len) if "k0" in s else 0, dict.fromkeys(s)

    compiled = _compiled(f)
    for s in (_grown(), {8, 0}, {0, 8}, {8, 0}, set()):
        assert repr(compiled(torch.ones(2), s)) == repr(f(torch.ones(2), s))


def test_sets_that_are_changed_keep_their_order() -> None:
    def f(x: torch.Tensor, s: set[str]) -> Any:
        s.add("new")
        s.discard("k37")
        made = {k + "!" for k in s}
        made.discard("new!")
        return x, list(s), made

    one, other = _grown(), _grown()
    want, got = f(torch.ones(2), one), _compiled(f)(torch.ones(2), other)
    assert list(one) == list(other) and got[1] == want[1] and list(got[2]) == list(want[2])
    one.add("more"), other.add("more")
    assert list(one) == list(other) and one.pop() == other.pop()


class Swapping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.Tanh()])
        self.register_buffer("seen", torch.ones(2))

    def forward(self, x: torch.Tensor) -> Any:
        self.both[0], self.both[1] = self.both[1], self.both[0]
        self.seen = self.seen + x
        names = [type(m).__name__ for m in self.both]
        return self.both[0](x - 1), [b * 1 for b in self.buffers()], names, dict(self.named_buffers())["seen"] is self.seen


def test_a_modules_dictionaries_hold_what_was_written() -> None:
    mine, other = Swapping(), Swapping()
    compiled = torchsmith.compile(mine, backend="eager", fullgraph=True)
    for n in range(1, 4):
        x = torch.full((2,), float(n))
        assert repr(compiled(x)) == repr(other(x)) and repr(mine) == repr(other)


def _made(x: torch.Tensor) -> Any:
    one = Thing()
    return one, id(one), x


def _hashed(x: torch.Tensor) -> Any:
    one = Thing()
    return {one: 1}, one, hash(one), object.__hash__(one), hash((one, 1)) == hash((one, 1)), x


def _written(x: torch.Tensor) -> Any:
    one, two = Thing(), lambda: 0
    return one, two, repr(one), str(two), f"{one}", [repr([one]), repr({"k": (one,)})], str(ValueError(one)), hex(id(one)), x


@pytest.mark.parametrize(
    ("fn", "again"),
    [
        (_made, lambda r: [id(r[0])] == [r[1]]),
        (_hashed, lambda r: r[0][r[1]] == 1 and hash(r[1]) == r[2] == r[3] and r[4]),
        (_written, lambda r: [*r[2:5], *r[6:8]] == [repr(r[0]), str(r[1]), *[str(r[0])] * 2, hex(id(r[0]))] and r[5][0] == f"[{r[0]}]"),
    ],
)  # fmt: skip
def test_an_address_is_that_of_the_object_that_comes_out(fn: Callable[..., Any], again: Callable[..., bool]) -> None:
    compiled, kept = torchsmith.compile(fn, backend="eager"), []
    for _ in range(3):
        kept.append(compiled(torch.ones(2)))
        assert again(kept[-1]) and again(fn(torch.ones(2)))


def test_a_hash_by_address_of_an_object_from_outside_is_of_that_object() -> None:
    compiled = torchsmith.compile(lambda x, a: (object.__hash__(a), a.__hash__(), x), backend="eager")
    for _ in range(3):
        one = Thing()
        assert compiled(torch.ones(2), one)[:2] == (hash(one),) * 2


def _copies_apart(x: torch.Tensor) -> Any:
    whole, other = x * 1, [x * 2]
    parts, twice = copy.deepcopy([whole[:1], whole[1:], whole]), copy.deepcopy([other, other])
    parts[2].zero_()
    twice[0][0].zero_()
    return parts, [t.storage_offset() for t in parts], twice


def _copies_of_outside(x: torch.Tensor, given: list[torch.Tensor]) -> Any:
    made = copy.deepcopy(given)
    made[0].zero_()
    return made, x + 1


def _copies_of_strides(x: torch.Tensor) -> Any:
    return [t.stride() for t in (copy.deepcopy(x.expand(2, 2)), copy.deepcopy(x.repeat(2)[::2]))], x


def test_deep_copies_share_memory_where_what_was_copied_does() -> None:
    v = torch.ones(4)
    for fn, calls in (
        (_copies_apart, [()]), (_copies_of_strides, [()]),
        (_copies_of_outside, [([torch.ones(2), torch.ones(2)],), ([v[:2], v],), ([v[:2], v[2:]],), ([v, v],), ([torch.ones(4), v],)]),
    ):  # fmt: skip
        compiled = torchsmith.compile(fn, backend="eager")
        for args in (*calls, *calls):
            assert repr(compiled(torch.ones(2), *args)) == repr(fn(torch.ones(2), *args))
    assert v.tolist() == [1, 1, 1, 1]
