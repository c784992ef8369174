"""Corners of Python and of torch's classes: each program gives what eager gives, whole or in pieces."""

from __future__ import annotations

import abc
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import inspect
import io
import itertools
import keyword
import operator
import pathlib
import re
import string
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import numpy as np
import pytest
import torch

import torchsmith
from torchsmith.events import recording

Held = TypeVar("Held")


class Adds:
    """A descriptor that only writes."""

    def __set__(self, obj: Any, value: int) -> None:
        obj.__dict__["field"] += value * 2


class Summed:
    field = Adds()

    def __init__(self) -> None:
        self.__dict__["field"] = 0


class Falls:
    def __getattribute__(self, name: str) -> Any:
        if name == "absent":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        return 5


class Guarded(list[int]):
    def __contains__(self, v: object) -> bool:
        self.asked = True
        return super().__contains__(v)

    def __getitem__(self, i: Any) -> Any:
        raise RuntimeError("nobody asks for items")

    def __iter__(self) -> Any:
        raise RuntimeError("nobody iterates")


class Row(TypedDict):
    a: torch.Tensor


class Ranked(torch.Tensor):
    @property
    def ndim(self) -> int:
        return 10


class Answers(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return 100

    def __len__(self) -> int:
        return 42


class Counted(list[Any]):
    def __len__(self) -> int:
        return 42


def _classes(x: torch.Tensor) -> Any:
    class Made:
        a: int
        b: int = 3

    class Fields(NamedTuple):
        a: Any
        b: int = 3

    pair = collections.namedtuple("pair", ["first", "second"], defaults=[7])
    return list(Made.__annotations__), Fields(x).a + Fields(x).b, pair(x).second, pair(1, 2)._replace(first=5).first


def _multiplied(x: torch.Tensor, values: list[int]) -> Any:
    try:
        values *= 2
    except TypeError:
        return x
    return x + len(values)


def _deleted(x: torch.Tensor, o: Any) -> Any:
    del o.a
    return x + hasattr(o, "a"), hasattr(o, "b")


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _set(x: torch.Tensor, o: Any) -> Any:
    o.field = 10
    return x + o.field, dict(o.__dict__)


def _contained(x: torch.Tensor, values: Any) -> Any:
    y = x + 1 if 3 in values else x - 1
    values.append(4)
    return y, list.__len__(values), values.asked


def _queue(x: torch.Tensor, q: Any) -> Any:
    for i in range(4):
        q.append(x + i)
    return q.popleft(), len(q), q.maxlen, q


def _row(x: torch.Tensor) -> Any:
    row = Row(a=x)
    row["a"] = row["a"] * 2
    return row, type(row) is dict


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int8, torch.int16)
KINDS = (torch.FloatTensor, torch.DoubleTensor, torch.BFloat16Tensor, torch.ByteTensor, torch.CharTensor, torch.ShortTensor)
FUNCTIONS = frozenset({torch.sin, len, list})
WHOLE: dict[str, tuple[Callable[..., Any], tuple[Callable[[], Any], ...]]] = {
    "a descriptor that only writes": (_set, (Summed,)),
    "attributes that fall back": (lambda x, o: x * o.absent, (Falls,)),
    "methods that are not called": (_contained, (lambda: Guarded([1, 2, 3]),)),
    "queues of tensors": (_queue, (lambda: collections.deque([torch.ones(2)], maxlen=3),)),
    "typed dictionaries": (_row, ()),
    "sets of functions": (lambda x, f: x + (f in FUNCTIONS) + (list in FUNCTIONS), (lambda: torch.sin,)),
    "dictionaries with a __getitem__": (lambda x: (dict(Answers(a=x)), {**Answers(a=1)}, Answers(a=2).get("a")), ()),
    "lists with a __len__": (lambda x, v: (v.append(x), v[0], v.__class__), (lambda: Counted([1, 2]),)),
    "classes made inside": (_classes, ()),
    "lists multiplied in place": (_multiplied, (lambda: [1, 2],)),
    "attributes that are deleted": (_deleted, (lambda: types.SimpleNamespace(a=1, b=2),)),
    "callers of methods": (lambda x: operator.methodcaller("add", x, alpha=2)(x), ()),
    "generic classes": (lambda x: (list[int]([1, 2]), dict[str, Any](a=x)), ()),
    "scripted functions": (lambda x: scripted(x) * 2, ()),
    "keywords": (lambda x: x + keyword.iskeyword("for"), ()),
    "matches": (lambda x: x + int(re.match(r"(\d+)\.(\d+)", "12.3").group(2)), ()),  # type: ignore[union-attr]
    "types of tensors": (lambda x: [isinstance(torch.empty(2, dtype=d), k) for d in DTYPES for k in KINDS], ()),
    "buffers": (lambda x, b: (isinstance(b, torch.nn.Buffer), isinstance(x, torch.nn.Buffer)), (lambda: torch.nn.Buffer(torch.ones(2)),)),
    "a keyword of Python's": (lambda x: x.clone().fill_(0).random_(**{"from": 3, "to": 4}), ()),
    "properties of a subclass": (lambda x, t: (x + t.ndim, t.dim()), (lambda: torch.ones(2).as_subclass(Ranked),)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole(name: str) -> None:
    f, more = WHOLE[name]
    compiled = torchsmith.compile(f, backend="eager", fullgraph=True)
    for _ in range(2):
        assert repr(compiled(torch.ones(2), *[make() for make in more])) == repr(f(torch.ones(2), *[make() for make in more]))


class Adding(torch.Tensor):
    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return super().sum(*args, **kwargs).as_subclass(Adding)


@pytest.mark.filterwarnings("ignore:torchsmith")
def test_super_of_a_tensor() -> None:
    def f(x: torch.Tensor) -> Any:
        return x.as_subclass(Adding).sum(dim=0) + 1

    got = torchsmith.compile(f, backend="eager")(torch.ones(2, 3))
    assert type(got) is Adding and got.tolist() == [3, 3, 3]


class Handled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.add:
            return torch.full((2,), 7.0)
        return super().__torch_function__(func, types, args, kwargs or {})


class Everywhere(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.zeros(2) if func is torch.add else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.filterwarnings("ignore:torchsmith")
def test_handlers_are_switched_off_by_degrees(breaks: bool) -> None:
    def f(x: torch.Tensor) -> Any:
        y = torch.add(x, 3)
        if breaks:
            print(end="")
        return y.tolist(), torch.add(x, 3).tolist(), torch._C._is_torch_function_enabled(), torch._C._is_torch_function_all_disabled()

    def inside(x: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            if breaks:
                print(end="")
            return torch.add(x, 3).tolist(), torch._C._is_torch_function_all_disabled()

    for fn in (f, inside):
        compiled = torchsmith.compile(fn, backend="eager")
        for level in (torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction):
            x = torch.ones(2).as_subclass(Handled)
            with Everywhere(), level():
                assert compiled(x) == fn(x)
            assert compiled(x) == fn(x)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_results_that_are_views_may_be_written_to(backend: str) -> None:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        return y.view(-1), y[0]

    grads = []
    for fn in (f, torchsmith.compile(f, backend=backend)):
        x = torch.ones(2, 2, requires_grad=True)
        flat, first = fn(x)
        flat.mul_(3)
        (flat.sum() + first.sum()).backward()
        grads.append((flat.tolist(), first.tolist(), x.grad.tolist()))  # type: ignore[union-attr]
    assert grads[0] == grads[1]


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.filterwarnings("ignore:torchsmith")
def test_lazy_modules_are_compiled_once_they_have_shapes(fullgraph: bool) -> None:
    seen: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(sum(n.op == "call_function" for n in gm.graph.nodes))
        return gm.forward

    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.ReLU(), torch.nn.LazyLinear(2))
    compiled = torchsmith.compile(model, backend=backend, fullgraph=fullgraph)
    for _ in range(3):
        got = compiled(torch.ones(2, 4))
    assert torch.equal(got, model(torch.ones(2, 4))) and seen[-1] == 3


class Late(torch.nn.modules.lazy.LazyModuleMixin, torch.nn.Module):
    def initialize_parameters(self, parts: list[torch.Tensor]) -> None:
        torchsmith.compiler.graph_break()
        self.weight = torch.nn.Parameter(torch.full_like(parts[0], 0.5))

    def forward(self, parts: list[torch.Tensor]) -> Any:
        return sum(part * self.weight for part in parts)


def test_a_lazy_module_that_makes_its_parameters_as_it_likes() -> None:
    model = Late()
    compiled = torchsmith.compile(lambda parts: model(parts) + 1, fullgraph=True, backend="eager")
    for _ in range(2):
        assert compiled([torch.ones(2)] * 2).tolist() == [2.0, 2.0]


class Larger(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 10


class Growing(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.__class__ = Larger  # type: ignore[assignment]
        return y


class Incremented(torch.nn.Module):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + 1  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class IncrementedMore(Incremented):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def test_a_module_that_gets_another_class_and_what_compile_made_of_it() -> None:
    """Set by forward, on the original, or on what compile returned, as lazy modules' hooks do."""
    x, model = torch.ones(2, 3), Growing(3, 3)
    eager, compiled = copy.deepcopy(model), torchsmith.compile(model, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), eager(x)) and type(model) is type(eager)
    assert isinstance(compiled, Larger) and not isinstance(compiled, Growing)
    other = Incremented()
    compiled = torchsmith.compile(other, backend="eager")
    assert compiled(x)[0, 0] == 3
    other.__class__ = IncrementedMore  # type: ignore[assignment]
    assert compiled(x)[0, 0] == 4
    compiled.__class__ = Incremented  # type: ignore[assignment]
    assert compiled(x)[0, 0] == 3 and type(other) is Incremented
    lazy = torch.nn.LazyLinear(2)
    compiled = torchsmith.compile(lazy, backend="eager")
    compiled(x)
    with recording() as got:
        assert torch.equal(compiled(x), lazy(x))
    assert type(lazy) is torch.nn.Linear and isinstance(compiled, torch.nn.Linear) and any(e.kind == "graph" for e in got)


def test_what_may_be_a_number_is_not_returned_as_a_tensor() -> None:
    with pytest.raises(torchsmith.Unsupported, match="CAP020"):
        torchsmith.compile(lambda x: max(x.sum(), 0), fullgraph=True)(torch.ones(2))
    assert torchsmith.compile(lambda x: max(x.sum(), 0), backend="eager")(-torch.ones(2)) is 0  # noqa: F632


def test_classes_in_results_are_made_anew_by_each_call() -> None:
    x = torch.ones(2)
    compiled = torchsmith.compile(_classes_in_results, fullgraph=True, backend="eager")
    (pair, held, leaf, part), others, (_, want, _, _) = compiled(x), compiled(x), _classes_in_results(x)
    assert repr((pair, held, part)) == repr((others[0], others[1], others[3])) and repr(held) == repr(want)
    assert all(type(a) is not type(b) for a, b in zip((pair, held, leaf, part), others, strict=True))
    assert repr(pair._replace(b=1)) == "pair(a=tensor([2., 2.]), b=1)" and type(pair)(0) == (0, 3) and type(part).__name__ == "Part"
    assert held.scaled().tolist() == [5.0, 5.0] and dataclasses.asdict(held)["scale"] == 2 and type(held)(0) == type(held)(0)
    assert leaf.itself() is type(leaf) and leaf.doubled.tolist() == [2.0, 2.0] and not hasattr(leaf, "__dict__")


@pytest.mark.parametrize("compile_", [torch.compile, torchsmith.compile])
def test_a_function_compiled_inside_is_part_of_the_graph(compile_: Any) -> None:
    def fn(x: torch.Tensor) -> Any:
        @compile_(fullgraph=True, backend="eager")
        def inner(y: torch.Tensor, scale: int = 2) -> torch.Tensor:
            return y * scale + x

        return inner(x + 1), compile_(inner, backend="eager")(x, scale=4), inner.__name__

    x = torch.ones(2)
    assert repr(torchsmith.compile(fn, fullgraph=True, backend="eager")(x)) == repr((x * 5, x * 5, "inner"))
    made = torchsmith.compile(lambda x: (x + 1, compile_(scaled, backend="eager")), backend="eager")(x)[1]
    assert made is not scaled and made.__wrapped__ is scaled


OLD_CONSTRUCTORS = {
    "of the default type": lambda x, n: x + torch.Tensor([1e10, n]).expand(3, 2),
    "nested": lambda x, n: torch.FloatTensor([[1, 2], [n, 4]]) @ x.T,
    "an index": lambda x, n: x[torch.LongTensor([0, 2])] + n,
    "a mask": lambda x, n: x[torch.BoolTensor([True, False, True])],
    "of nothing": lambda x, n: (torch.Tensor([]), torch.DoubleTensor(())),
    "of a size": lambda x, n: (x.new(x.shape).fill_(n), x.new(torch.Size([n])).zero_(), x.new(size=x.shape).fill_(1), x.new(n, 2).zero_()),
    "of a tuple": lambda x, n: (x.new((n, 2)), x.new(list(x.shape))),
    "a number copied": lambda x, n: (x.clone().copy_(n), x.to(torch.int32).copy_(2.9), x.clone().copy_(True)),
}


@pytest.mark.parametrize("name", OLD_CONSTRUCTORS)
def test_old_constructors_of_lists(name: str) -> None:
    fn, x = OLD_CONSTRUCTORS[name], torch.arange(6.0).view(3, 2)
    whole = torchsmith.compile(fn, fullgraph=True)
    for n in (3, 4, 5):
        torch.testing.assert_close(whole(x, n), fn(x, n), rtol=0, atol=0)
    assert torchsmith.compile(lambda: torch.LongTensor([1.5]))().tolist() == torch.LongTensor([1.5]).tolist()
    assert torchsmith.compile(lambda: torch.Tensor(2, 3))().shape == (2, 3)


def test_where_a_tensor_lies_is_asked_of_the_tensor_itself() -> None:
    for fn in (
        lambda x: (x.is_shared(), x[1:].is_shared(), (x + 1).is_shared()), lambda x: (x + 1).is_pinned(), lambda x: x.__getstate__(),
        lambda x: x.const_data_ptr() == x.data_ptr(), lambda x: x[1:].const_data_ptr() - x.data_ptr(),
    ):  # fmt: skip
        compiled = torchsmith.compile(fn)
        for x in (torch.ones(3), torch.ones(3).share_memory_(), torch.ones(3)):
            assert compiled(x) == fn(x)
    for name in ("__len__", "__iter__", "get_device", "__hash__", "is_inference", "is_shared"):
        with pytest.raises(TypeError, match="argument"):
            torchsmith.compile(lambda x, name=name: getattr(x, name)(3))(torch.ones(3))


class Numbered(enum.IntEnum):
    ONE = 1


class Marks(type):
    def __call__(cls, *args: Any) -> Any:
        made = super().__call__(*args)
        made.marked = True
        return made


class Marked(metaclass=Marks):
    def __init__(self, n: int) -> None:
        self.n = n


class Typed(Generic[Held]):
    def __init__(self, held: Held) -> None:
        self.held = held


@dataclasses.dataclass
class Setting:
    width: int
    inner: Any = None


def _nested_text() -> str:
    setting = Setting(3)
    setting.inner = setting
    return f"{setting} {setting!r:>40}"


def _ordered() -> Any:
    @functools.total_ordering
    class Ordered:
        def __init__(self, n: int) -> None:
            self.n = n

        def __eq__(self, other: Any) -> bool:
            return bool(self.n == other.n)

        def __hash__(self) -> int:
            return self.n

        def __lt__(self, other: Any) -> bool:
            return bool(self.n < other.n)

    return Ordered(1) <= Ordered(2), Ordered(3) >= Ordered(4), Ordered(3) > Ordered(1)


def _said(x: torch.Tensor) -> torch.Tensor:
    try:
        raise KeyError("width")
    except KeyError as e:
        print("no", e, type(e).__name__)
    return x + 1


class Shadowed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = torch.nn.ReLU()
        self.scale = 2.0

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def scale(self) -> float:
        return 5.0


def _autocast_by_old_names(x: torch.Tensor) -> Any:
    def asked() -> Any:
        return torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype(), torch.get_autocast_gpu_dtype()

    with torch.autocast("cpu", torch.float16):
        return x + 1, asked()


@torch.autograd.graph.disable_saved_tensors_hooks("not here")
def _without_hooks(x: torch.Tensor) -> Any:
    return x + 1, torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()


def _classes_in_results(x: torch.Tensor) -> Any:
    pair = collections.namedtuple("pair", ["a", "b"], defaults=(3,))

    @dataclasses.dataclass
    class Held:
        x: torch.Tensor
        scale: int = 2

        def scaled(self) -> torch.Tensor:
            return self.x * self.scale + x

    class Base(abc.ABC):
        __slots__ = ("n",)

        def __init__(self, n: Any) -> None:
            self.n = n

        @abc.abstractmethod
        def itself(self) -> type:
            raise NotImplementedError

        @property
        def doubled(self) -> Any:
            return self.n * 2

    class Leaf(Base):
        __slots__ = ()

        def itself(self) -> type:
            return Leaf

    class Part(torch.Tensor):
        pass

    return pair(x + 1), Held(x * 2), Leaf(x), Part(x + 3)


SHADOWED = Shadowed()
JOINED, TOLD, PLACE = ", ".join, "{}-{}".format, (1, 2, 3).index
EVERYDAY = {
    "methods in C of constants, kept outside": lambda x: (x * PLACE(2), JOINED(["a", "b"]), TOLD(1, 2), pathlib.PurePath("a") / "b"),
    "a method hidden by a submodule, and one by an attribute": lambda x: SHADOWED.act(x) * SHADOWED.scale,  # type: ignore[operator]
    "autocast, asked by its old names": _autocast_by_old_names,
    "hooks of saved tensors switched off": lambda x: (_without_hooks(x), torch._C._autograd._saved_tensors_hooks_is_enabled()),
    "a tensor of a known value as an index": lambda x: [x, x + 1, x + 2][torch.as_tensor(2)],
    "the type of a tensor by its old class": lambda x: (x.type(torch.HalfTensor), x.type(x.type(torch.DoubleTensor).type())),
    "real and imaginary parts of arrays": lambda x: (x.numpy().imag + 1, np.imag(x.numpy()), np.real(x.numpy())),
    "a grid of arrays that have axes": lambda x: np.meshgrid(x.view(3, 1).numpy(), x.numpy()),
    "the larger of tensors": lambda x: (max(x.sum(), 2) * x, min(1, max(0, x.mean())) * x, max(x.sum(), x.mean())),
    "the text of an enumeration's number": lambda x: (x + 1, str(Numbered.ONE), f"{Numbered.ONE}", repr(Numbered.ONE)),
    "super().__call__ of a metaclass": lambda x: (x * Marked(2).n, Marked(3).marked),
    "a generic class with its argument": lambda x: (Typed[int](2).held * x, Typed[int](x).__orig_class__ == Typed[int]),
    "a dataclass that holds itself": lambda x: (x + 1, _nested_text()),
    "a class that completes its comparisons": lambda x: (x + 1, _ordered()),
    "a caught exception printed": _said,
    "cmp_to_key": lambda x: (x + 1, sorted([3, 1, 2], key=functools.cmp_to_key(lambda a, b: b - a))),
    "views that are returned": lambda x: (x + 1, {"a": 2}.keys(), collections.OrderedDict(b=3).items(), {"c": 4}.values()),
}


@pytest.mark.parametrize("name", EVERYDAY)
def test_everyday_python_is_one_graph(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    fn, x = EVERYDAY[name], torch.ones(3)
    compiled = torchsmith.compile(fn, fullgraph=True, backend="eager")
    for _ in range(2):
        want, told = fn(x), capsys.readouterr().out
        assert repr(compiled(x)) == repr(want)
        assert capsys.readouterr().out == told


def test_views_of_dictionaries_as_arguments() -> None:
    def fn(x: torch.Tensor, held: dict[str, Any], keys: Any, values: Any, items: Any) -> Any:
        held["new"] = x + 1
        return sum(values), list(keys), {k: v * 2 for k, v in items}, len(keys), "a" in keys, keys & {"a"}, keys, values

    def call(fn: Any, kind: Any, **held: Any) -> Any:
        d = kind(**held)
        keys, values = d.keys(), d.values()
        out = fn(torch.ones(2), d, keys, values, d.items())
        assert out[-2] is keys and out[-1] is values
        return out, d

    compiled = torchsmith.compile(fn, fullgraph=True, backend="eager")
    for kind in (dict, collections.OrderedDict):
        for held in ({"a": torch.ones(2)}, {"b": torch.ones(2), "a": torch.zeros(2)}):
            assert repr(call(compiled, kind, **held)) == repr(call(fn, kind, **held))


def test_format_counts_in_one_way() -> None:
    for text in ("{} {0}", "{0} {}"):
        compiled = torchsmith.compile(lambda x, text=text: (x, text.format(Setting(1), 2)))
        with pytest.raises(ValueError, match="cannot switch from ") as ours:
            compiled(torch.ones(2))
        with pytest.raises(ValueError) as theirs:
            text.format(Setting(1), 2)
        assert str(ours.value) == str(theirs.value)


def test_printing_where_output_is_redirected() -> None:
    def fn(x: torch.Tensor) -> Any:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            print("inside")
        return x + 1, out.getvalue()

    assert torchsmith.compile(fn, backend="eager")(torch.ones(2))[1] == "inside\n"


def test_complex_numbers_keep_their_signs_in_every_backend() -> None:
    """repr(complex(-0.0, 0.0)) reads as another number, that of an infinite one not at all: graphs are text in between."""
    numbers = [complex(a, b) for a in (0.0, -0.0, float("inf"), float("nan")) for b in (-0.0, 0.0, -float("inf"))]

    def fn(x: torch.Tensor) -> Any:
        return [x * n for n in numbers], [torch.tensor(n) for n in numbers], torch.full((2,), numbers[3])

    x = torch.tensor([1.0, -2.0])
    for backend in ("eager", "aot_eager"):
        assert repr(torchsmith.compile(fn, fullgraph=True, backend=backend)(x)) == repr(fn(x))


def test_allowed_functions_are_not_looked_into() -> None:
    def inner(x: torch.Tensor) -> Any:
        torchsmith.compiler.graph_break()
        return x.sin() + 1

    def asks(x: torch.Tensor) -> Any:
        return x.sin() if x.sum() > 0 else x

    def fn(x: torch.Tensor) -> Any:
        return inner(x) * 2

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(torchsmith.Unsupported, match="CAP018"):
        torchsmith.compile(fn, fullgraph=True, backend="eager")(x)
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            torchsmith.compiler.graph_break()
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad * 3

    torchsmith.compiler.allow_in_graph([inner, asks, Doubled])
    torchsmith.compile(Doubled.apply, fullgraph=True, backend="eager")(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0] * 3
    for backend in ("eager", "aot_eager", "inductor"):
        torch.testing.assert_close(torchsmith.compile(fn, fullgraph=True, backend=backend)(x), fn(x))
        for value in (x, -x):  # no truth of its tensors is guessed
            torch.testing.assert_close(torchsmith.compile(lambda x: asks(x) + 1, backend=backend)(value), asks(value) + 1)


def test_a_size_outside_of_its_mark_is_refused() -> None:
    for n, low, high in ((4, 6, None), (9, 2, 8)):
        x = torch.ones(n, 3)
        torchsmith.mark_dynamic(x, 0, min=low, max=high)
        with pytest.raises(torchsmith.api.ConstraintViolation, match=f"is marked to lie between {low} and .* but it is {n}"):
            torchsmith.compile(lambda x: x * 2, backend="eager")(x)


@functools.singledispatch
def scaled(value: Any) -> Any:
    return "object"


@scaled.register
def _(value: int) -> Any:
    return value * 2


@scaled.register(torch.Tensor)
def _(value: torch.Tensor) -> Any:
    return value * 3


@scaled.register(list)
def _(value: list[Any]) -> Any:
    return [scaled(v) for v in value]


class Scales:
    @functools.singledispatchmethod
    def scaled(self, value: Any) -> Any:
        return "object"

    @scaled.register
    def _(self, value: torch.Tensor) -> Any:
        return value * 4


def test_single_dispatch() -> None:
    def fn(x: torch.Tensor) -> Any:
        return scaled([x, 1, "a", True]), Scales().scaled(x), Scales().scaled(1)

    x = torch.ones(2)
    compiled = torchsmith.compile(fn, fullgraph=True, backend="eager")
    for _ in range(2):
        assert repr(compiled(x)) == repr(fn(x))
    scaled.register(str, lambda value: "text")
    assert repr(compiled(x)) == repr(fn(x)) and compiled(x)[0][2] == "text"


@functools.lru_cache
def table(n: int) -> torch.Tensor:
    return torch.arange(float(n))


def test_a_cached_function_of_a_size_that_varies_gives_one_object() -> None:
    def fn(x: torch.Tensor) -> Any:
        return x + table(x.shape[0]), table(x.shape[0]) is table(x.shape[0])

    compiled = torchsmith.compile(fn, backend="eager", dynamic=True)
    for n in (3, 5):
        got, same_object = compiled(torch.ones(n))
        assert same_object and torch.equal(got, torch.ones(n) + torch.arange(float(n)))


THREADS = threading.local()


class Bag(collections.abc.MutableMapping, torch.nn.Module):  # type: ignore[type-arg, misc]
    """A module without parameters that is a mapping too."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.held = held

    def __getitem__(self, key: Any) -> Any:
        return self.held[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.held[key]

    def __iter__(self) -> Any:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    __hash__ = torch.nn.Module.__hash__  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: torch.Tensor
    scales: list[int] = dataclasses.field(default_factory=lambda: [5])


@torchsmith.compiler.allow_in_graph
def joined(pair: Pair) -> torch.Tensor:
    return pair.left + pair.right * pair.scales[0]


def bound_arguments(x: torch.Tensor) -> Any:
    bound = inspect.signature(lambda a, *rest, key=10, **more: None).bind(1, 2, 3, other=x)
    bound.apply_defaults()
    return bound.args, bound.kwargs, bound.arguments, dict(bound.signature.parameters)


def thread_local(x: torch.Tensor) -> Any:
    THREADS.written = THREADS.read + x
    return THREADS.written * 2


def recorded_warnings(x: torch.Tensor) -> Any:
    with warnings.catch_warnings(record=True):
        warnings.warn("nobody hears it", UserWarning, stacklevel=1)
        return x * 2


def parameter_inside(x: torch.Tensor) -> Any:
    weight = torch.nn.Parameter(x * 3, requires_grad=False)
    return isinstance(weight, torch.nn.Parameter), (weight * x).sum(), weight.requires_grad


ONE_GRAPH: list[Callable[[torch.Tensor], Any]] = [
    lambda x: (bool(x.sum().item()), bool((x == 0).all()), bool(x.sum() > 2), (x > 9).any().item()),
    lambda x: bool(x[0].item()) is True,
    lambda x: (torch._shape_as_tensor(x)[0] + 1, torch.LongTensor([np.int64(3), x.shape[0]])),
    lambda x: sorted(Bag(a=x, b=2).items(), key=operator.itemgetter(0)),
    lambda x: joined(Pair(x, x + 1)),
    bound_arguments, thread_local, recorded_warnings, parameter_inside,
]  # fmt: skip


@pytest.mark.parametrize("fn", ONE_GRAPH)
def test_one_graph_has_it(fn: Any) -> None:
    THREADS.read = torch.ones(3)
    compiled = torchsmith.compile(fn, backend="eager", fullgraph=True)
    for x in (torch.ones(3), torch.zeros(3)):
        try:
            got = compiled(x)
        except torchsmith.Unsupported as why:
            assert fn is ONE_GRAPH[1] and why.code == "GRA004"  # `is` needs the value
            continue
        assert repr(got) == repr(fn(x))


def test_a_module_and_a_thread_local_are_made_and_written() -> None:
    bag = torchsmith.compile(lambda x: Bag(x=x + 1), backend="eager", fullgraph=True)(torch.ones(2))
    assert type(bag) is Bag and bag.training and torch.equal(bag["x"], torch.full((2,), 2.0))
    compiled = torchsmith.compile(thread_local, backend="eager", fullgraph=True)
    for value in (1.0, 2.0):
        THREADS.read = torch.full((2,), value)
        compiled(torch.ones(2))
        assert torch.equal(THREADS.written, torch.full((2,), value + 1))


def test_a_flag_of_sizes_is_one_of_two_objects() -> None:
    compiled = torchsmith.compile(lambda x: x * 2 if (x.shape[0] > 3) is True else x, backend="eager", dynamic=True)
    for n in (2, 5):
        assert torch.equal(compiled(torch.ones(n)), torch.ones(n) * (2 if n > 3 else 1))


def test_what_is_known_of_sizes() -> None:
    from torch.fx.experimental import symbolic_shapes as sizes

    def fn(x: torch.Tensor, n: torch.Tensor) -> Any:
        before = sizes.statically_known_true(x.shape[0] > 9)
        torch._check(x.shape[0] >= 10)
        a, b = n.tolist()
        torch._check(sizes.sym_and(a >= 3, a <= 10, b == 2))
        known = (sizes.guard_or_false(a > 5), sizes.guard_or_true(a > 5), sizes.has_static_value(a), sizes.has_static_value(b), a >= 2)
        return before, sizes.statically_known_true(x.shape[0] > 9), known, x * a

    compiled = torchsmith.compile(fn, backend="eager", fullgraph=True, dynamic=True)
    for n in (10, 12):
        before, after, known, got = compiled(torch.ones(n), torch.tensor([4, 2]))
        assert (before, after, known) == (False, True, (False, True, False, True, True)) and torch.equal(got, torch.full((n,), 4.0))
    with pytest.raises(RuntimeError):
        compiled(torch.ones(10), torch.tensor([11, 2]))


def test_an_operator_that_is_looked_up_inside() -> None:
    with torch.library._scoped_library("corners", "FRAGMENT") as lib:
        lib.define("twice(Tensor x) -> Tensor")
        lib.impl("twice", torchsmith.compile(lambda y: y * 2, backend="eager"), "CompositeExplicitAutograd")
        compiled = torchsmith.compile(lambda x: torch.ops.corners.twice.default(x) + 1, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))


def test_a_module_goes_with_its_compilation() -> None:
    """One round of the collector finds what only a compilation holds."""

    def run() -> weakref.ref[Any]:
        inner = torch.nn.Linear(2, 2)

        class Outer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner(x)  # type: ignore[no-any-return]

        torchsmith.compile(Outer(), backend="eager")(torch.ones(1, 2))
        return weakref.ref(inner)

    found = run()
    gc.collect()
    assert found() is None


def test_an_argument_goes_when_the_caller_drops_it() -> None:
    """No round of the collector is needed: what a capture held of it is gone with the capture."""
    x = torch.ones(2)
    found = weakref.ref(x)
    gc.disable()
    try:
        torchsmith.compile(lambda y: y + 1, backend="eager")(x)
        del x
        assert found() is None
    finally:
        gc.enable()


class Shown:
    """Its text is that of what it holds."""

    held: Any = None

    def __repr__(self) -> str:
        return repr(self.held)


def _in_itself(kind: Callable[[list[Any]], Any]) -> str:
    inner = Shown()
    made = kind([inner])
    inner.held = made
    return repr(made)


def _made_again(x: set[int], y: list[int], z: dict[int, int]) -> Any:
    x.__init__({7})  # type: ignore[misc]
    y.__init__("ab")  # type: ignore[misc]
    z.__init__([(3, 4)])  # type: ignore[misc]
    return sorted(x), list(y), dict(z)


def _without(values: set[int], *more: int) -> set[int]:
    for n in more:
        values.discard(n)
    return values


def _orders(x: set[int]) -> Any:
    made = _without({3, 65, 129, 8, 193, 1, 72}, 65, 1)
    return list(set(x)), list(set(made)), list(frozenset(made)), list(made | {9})


def _renamed(fn: Any) -> Any:
    fn.__name__, fn.__qualname__ = "other", "Other.other"
    made = fn()
    return made.__name__, made.__qualname__


def _ends(values: set[int], lines: Any) -> str:
    try:
        values.symmetric_difference_update(lines)
    except ZeroDivisionError:
        return "ended"
    return "went on"


def _leaves() -> Any:
    try:
        sys.exit(3)
    except SystemExit as e:
        return e.code


def _failing() -> Any:
    yield 1 // 0


def _counted() -> Any:
    def run() -> Any:
        yield 1

    return run


class Recent(collections.OrderedDict[str, int]):
    pass


class Filled(collections.defaultdict[str, Any]):
    pass


class Ordered(collections.OrderedDict[str, Any]):
    pass


class Table(dict[str, Any]):
    pass


class Cells(tuple[Any, ...]):
    pass


class Labelled(tuple[Any, ...]):
    def __init__(self, items: Any, label: str = "") -> None:
        self.label = label


def _made_with(*args: Any, **kwargs: Any) -> list[Any]:
    """What classes that extend Python's containers make of these arguments."""
    said: list[Any] = []
    for cls in (Filled, Ordered, Table, Cells, Labelled):
        try:
            said.append(cls(*args, **kwargs))
        except TypeError as e:
            said.append(str(e))
    return said


def _factory_changed(x: Any) -> Any:
    x.default_factory = list
    other = x.copy()
    return other["q"], x["z"], x.default_factory


def _season() -> Any:
    class Season(enum.Enum):
        SPRING = 1

        def said(self) -> str:
            return "spring"

    return Season


def _unsaid(cls: Any) -> bool:
    del cls.said
    return hasattr(cls, "said")


def _named() -> Any:
    class Named:
        __name__ = property(lambda self: "named")  # type: ignore[assignment]
        __class__ = property(lambda self: int)  # type: ignore[assignment]

    torchsmith.compiler.graph_break()
    return Named().__name__, isinstance(Named(), int)


class Field(property):
    pass


class Doubles:
    _held = 1

    @Field
    def held(self) -> int:
        return self._held

    @held.setter
    def held(self, value: int) -> None:
        self._held = value * 2

    @Field
    def fixed(self) -> int:
        return 7

    def __repr__(self) -> str:
        return "Doubles"


def _doubled(x: Any) -> Any:
    x.held = 4
    found = x.held
    try:
        x.fixed = 3
    except AttributeError as e:
        return found, x._held, x.fixed, str(e)


def _taken_apart() -> Any:
    group = ExceptionGroup("group", [ValueError(1), OSError(2)])
    torchsmith.compiler.graph_break()
    try:
        try:
            raise group
        except* OSError:
            raise TypeError(3)  # noqa: B904
    except ExceptionGroup as e:
        return repr(e), repr(e.exceptions[0].__context__)


def _alone() -> Any:
    try:
        raise ValueError(1)
    except* ValueError as e:
        found = repr(e)
    return found


class Wrapped:
    @classmethod
    @classmethod
    def made(cls) -> Any:
        return cls


def _copies(x: Any) -> Any:
    inner = Shown()
    held = {inner}
    own = inner.__repr__
    looped: Any = ([],)
    looped[0].append(looped)
    again = copy.deepcopy(looped)
    others = copy.deepcopy(own).__self__ is inner, inner in copy.deepcopy(held), inner in copy.copy(held)  # type: ignore[attr-defined]
    return copy.copy(x) is x, copy.deepcopy(x) is x, again[0][0] is again, others


def _proxied(proxy: Any, table: dict[str, int]) -> Any:
    before = proxy["a"]
    table["a"], table["b"] = 5, 6
    return before, proxy["a"], "b" in proxy, len(proxy)


def _table() -> tuple[Any, ...]:
    table = {"a": 1}
    return types.MappingProxyType(table), table


class Stands:
    def __init__(self, obj: Any) -> None:
        object.__setattr__(self, "held", obj)

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "held"), name)


class General:
    def __new__(cls, kind: str) -> Any:
        return object.__new__(Special if kind == "special" else cls)


class Special(General):
    def __init__(self, kind: str) -> None:
        self.kind = kind


class Says:
    def __init__(self) -> None:
        return 3  # type: ignore[return-value]  # noqa: PLE0101


class Property:
    @property
    def held(self) -> int:
        return 1


class Asks(Property):
    @classmethod
    def asked(cls) -> bool:
        return super().held is Property.held  # type: ignore[misc]


def _made(x: Any) -> Any:
    try:
        Says()
        told = ""
    except TypeError as e:
        told = str(e)
    kinds = General("special").kind, hasattr(General("general"), "kind")
    return isinstance(x, Property), isinstance(Stands(3), int), kinds, Asks.asked(), told


def _moved(kind: Callable[..., Any]) -> Any:
    made = kind(a=1, b=2, c=3)
    made.move_to_end("a")
    return made


def _in_order(x: Any, y: Any) -> Any:
    made = _moved(Recent)
    return list(x), list(y.items()), copy.deepcopy(x), copy.deepcopy(made), made, {**x}


def _too_many() -> Any:
    try:
        return collections.OrderedDict([("a", 1)], None)  # type: ignore[call-overload]
    except TypeError:
        return "refused"


def _seen_to_change(kind: Callable[[Any], Any]) -> str:
    table = {1: 1}
    it = iter(kind(table))
    next(it)
    torchsmith.compiler.graph_break()
    table[2] = 2
    try:
        return f"went on to {next(it, None)}"
    except RuntimeError as e:
        return str(e)


def _proxy() -> Any:
    table: dict[int, int] = {}
    proxy = types.MappingProxyType(table)
    torchsmith.compiler.graph_break()
    table[1] = 2
    return proxy


def _saying() -> Any:
    def inner(a: int) -> float:
        "Says what it is."
        return a

    outer = functools.wraps(inner)(lambda a: inner(a + 1))
    torchsmith.compiler.graph_break()
    return [(f.__doc__, f.__module__, f.__annotations__, f.__name__) for f in (inner, outer)]


def _of_itself() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "a set in itself": (lambda: _in_itself(set), tuple),
    "a deque in itself": (lambda: _in_itself(collections.deque), tuple),
    "filled anew": (_made_again, lambda: ({1, 2}, [1], {1: 2})),
    "sets in order": (_orders, lambda: (_without({3, 65, 129, 8, 193, 1, 72}, 65, 1),)),
    "the same object": (lambda x, y: (frozenset(x) is x, tuple(y) is y, list(y) is y), lambda: (frozenset({1}), (1, 2))),
    "a renamed generator": (_renamed, lambda: (_counted(),)),
    "ordered": (_in_order, lambda: (_moved(collections.OrderedDict), _moved(Recent))),
    "another of its class": (lambda x: type(x | {"z": 1}).__name__, lambda: (_moved(Recent),)),
    "too many arguments": (_too_many, tuple),
    "keys that change": (lambda: _seen_to_change(dict.keys), tuple),
    "items that change": (lambda: _seen_to_change(dict.items), tuple),
    "what functions say": (_saying, tuple),
    "found in a file": (lambda f: ("a\n" in f, f.tell()), lambda: (io.StringIO("a\nb\n"),)),
    "three-argument pow": (lambda: (pow(2, 6, mod=10), functools.partial(pow, mod=10)(3, 5), pow(base=2, exp=3)), tuple),
    "where a class is made": (lambda: type("Made", (), {}).__module__, tuple),
    "an exit": (_leaves, tuple),
    "a class with two arguments": (lambda: _made_with([("a", 1)], None), tuple),
    "a class with a factory": (lambda: _made_with(list, [("a", 1)]), tuple),
    "a class with a factory and more": (lambda: _made_with(list, [("a", 1)], 2), tuple),
    "a class with a label": (lambda: (_made_with(None, label="x"), Labelled([1], label="x").label), tuple),
    "a factory that changes": (_factory_changed, lambda: (collections.defaultdict(None, a=1),)),
    "a method that goes": (_unsaid, lambda: (_season(),)),
    "properties with names of Python's": (_named, tuple),
    "a property of its own class": (_doubled, lambda: (Doubles(),)),
    "a group from before a break": (_taken_apart, tuple),
    "a group of one": (_alone, tuple),
    "a class method of one": (lambda x: x.made() is type(x), lambda: (Wrapped(),)),
    "copies": (_copies, lambda: ((1, [2]),)),
    "a proxy of what changes": (_proxied, _table),
    "a proxy of layers": (lambda x: (x.copy(), x["a"]), lambda: (types.MappingProxyType(collections.ChainMap({"a": 1}, {"b": 2})),)),
    "what is made": (_made, lambda: (Stands(Property()),)),
    "text of its own class": (lambda x: (repr(x), str(x), f"{x}"), lambda: (_moved(Recent),)),
    "copies of a default": (lambda x: (copy.copy(x), copy.deepcopy(x), Filled(list, a=1)), lambda: (Filled(list, a=[1]),)),
    "copies of a deque": (lambda x: (copy.copy(x), copy.deepcopy(x)), lambda: (collections.deque([1, 2], 3),)),
    "order of a frozen set": (lambda: list(frozenset([3, 1, 2]) ^ {1, 9}), tuple),
    "a list of itself": (lambda x: (len(x), x[1] is x), lambda: (_of_itself(),)),
    "a proxy": (_proxy, tuple),
    "a generator that fails": (_ends, lambda: ({1}, _failing())),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.filterwarnings("ignore:torchsmith")
def test_containers_as_python_has_them(name: str) -> None:
    fn, make = CONTAINERS[name]
    compiled = torchsmith.compile(fn, backend="eager")
    expected, given = make(), make()
    assert repr(compiled(*given)) == repr(fn(*expected))
    if name == "filled anew":
        assert given == expected


NO_NUMBERS: list[Callable[[torch.Tensor], Any]] = [
    round,
    lambda x: round(x, 1),
    lambda x: x[0].__index__(),
    lambda x: torch.tensor(1.5).__index__(),
    lambda x: torch.tensor([1, 2]).item(),
    lambda x: int(torch.tensor([1, 2])),
    lambda x: bool(torch.tensor([1, 2])),
]


@pytest.mark.parametrize("fn", NO_NUMBERS)
def test_tensors_that_are_no_numbers_raise_as_in_eager(fn: Callable[[torch.Tensor], Any]) -> None:
    """Tensors have no __round__, floats no __index__, and more elements than one are no number; a handler catches what they raise."""

    def caught(x: torch.Tensor) -> Any:
        try:
            return fn(x)
        except (TypeError, ValueError, RuntimeError) as e:
            return type(e).__name__, str(e)

    x = torch.tensor([1.5, 2.5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an internal error warns
        assert torchsmith.compile(caught, backend="eager")(x) == caught(x)


GIVEN: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "itemgetter": (lambda f, x: (f([5, 6, 7]), x + 1), operator.itemgetter(1), operator.itemgetter(2, 0)),
    "attrgetter": (lambda f, x: (f(3j), x + 1), operator.attrgetter("imag"), operator.attrgetter("real")),
    "methodcaller": (lambda f, x: (f("aBc"), x + 1), operator.methodcaller("upper"), operator.methodcaller("replace", "a", "z")),
    "a template": (lambda f, x: (f.substitute(a=1), x + 1), string.Template("$a"), string.Template("$a$a")),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_given_may_be_another_one(name: str) -> None:
    fn, *given = GIVEN[name]
    compiled = torchsmith.compile(fn, backend="eager", fullgraph=True)
    for f in given:
        assert repr(compiled(f, torch.ones(1))) == repr(fn(f, torch.ones(1)))


def _kept(a: list[int]) -> list[int]:
    kept = [0] * 4
    kept.__setitem__(slice(1, 3), a)
    return kept


# What C functions make of a list or a dictionary: none of them may be remembered without what it holds
TAKEN: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "names of a class": (lambda d: type("T", (), d).x, ({"x": 1}, {"x": "b"}, {"x": 2})),
    "bases of a class": (lambda b: type("T", b, {}).__mro__[1:], ((int,), (str,))),
    "an enumeration": (lambda d: [(type(e.value), e.value) for e in enum.Enum("E", d)], ({"x": 1}, {"x": 2}, {"x": 3})),
    "selectors": (lambda a: list(itertools.compress("abc", a)), ([1, 0, 1], [0, 0, 1])),
    "named selectors": (lambda a: list(itertools.compress(data="abc", selectors=a)), ([1, 0, 1], [0, 0, 1])),
    "defaults of a named tuple": (lambda a: collections.namedtuple("N", ["x"], defaults=a)(), ([1], [2])),  # type: ignore[misc]
    "exceptions of a group": (lambda a: [str(e) for e in ExceptionGroup("g", a).exceptions], ([KeyError(1)], [ValueError(2), KeyError(3)])),
    "a part of a list": (_kept, ([7, 2], [9, 1])),
    "text of an exception": (lambda a: (str(ValueError(a)), repr(KeyError(1, a)), f"{ValueError([a])}"), ([1], [2])),
    "arguments of an exception": (lambda a: ValueError(a).args == ([1],), ([1], [2])),
    "text of a partial": (lambda a: repr(functools.partial(len, a)), ([1], [2])),
    "a namespace": (lambda a: (repr(types.SimpleNamespace(x=a)), types.SimpleNamespace(x=a) == types.SimpleNamespace(x=[1])), ([1], [2])),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.filterwarnings("ignore:torchsmith")
def test_what_c_functions_are_given_may_hold_other_things(name: str) -> None:
    fn, given = TAKEN[name]
    compiled = torchsmith.compile(lambda a, x: (fn(a), x + 1), backend="eager")
    for a in given:
        assert repr(compiled(a, torch.ones(1))[0]) == repr(fn(a))


def test_an_enumeration_that_is_made_inside_is_another_one_in_each_call() -> None:
    compiled = torchsmith.compile(lambda d, x: (enum.Enum("E", d), x + 1), backend="eager")
    made = [compiled({"x": n}, torch.ones(1))[0] for n in (1, 2, 3)]
    assert [type(e.x.value) for e in made] == [int] * 3
    assert [e.x.value for e in made] == [1, 2, 3]


class Place:
    __match_args__ = ("x", "y")
    x, y = 1, 2


class Twice:
    __match_args__ = ("a", "a")
    a = 1


class Unordered:
    __match_args__ = (1,)


class Missing(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 5


def _matched(v: Any) -> Any:
    match v:
        case {"k": k, **rest}:
            return "mapping", k, rest
        case Place(x, y=y):
            return "place", x, y
        case Twice(a, b):
            return "twice", a, b
        case Unordered(a):
            return "unordered", a
        case bool(b) | int(b):
            return "number", b
        case [a, *b]:
            return "sequence", a, b
        case int(a, b):
            return "never", a, b
        case object(a):
            return "never", a


MATCHED: list[Callable[[], Any]] = [
    lambda: {"k": 1, "j": 2}, Missing, lambda: collections.UserDict(k=1), Place, Twice, Unordered, lambda: True, lambda: range(3),
    lambda: collections.deque([1, 2]), lambda: "ab", lambda: bytearray(b"ab"), lambda: torch.Size([1, 2]),
]  # fmt: skip


@pytest.mark.parametrize("make", MATCHED)
def test_patterns(make: Callable[[], Any]) -> None:
    def found(fn: Callable[[Any], Any]) -> Any:
        try:
            return fn(make())
        except TypeError as e:
            return str(e)

    assert found(torchsmith.compile(_matched, backend="eager", fullgraph=True)) == found(_matched)
