"""State that a program shares with others: locks, thread-local storage, globals of several modules, patches between calls."""

from __future__ import annotations

import abc
import builtins
import copy
import functools
import gc
import importlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import torchsmith
from torchsmith.capture import call_opcodes

X = torch.arange(6.0)
SILU = torch.nn.SiLU()
Make = Callable[[], Callable[[Tensor], Any]]


def plain(v: Any) -> Any:
    if isinstance(v, Tensor):
        return v.dtype, tuple(v.shape), [round(q, 3) for q in v.tolist()]
    return tuple(map(plain, v)) if isinstance(v, (list, tuple)) else v


def results(fn: Callable[[Tensor], Any], between: Any = (None,)) -> list[Any]:
    """What a call, and then one after each of `between`, gives."""
    out: list[Any] = []
    for change in (None, *between):
        if change is not None:
            change()
        try:
            out.append(plain(fn(X)))
        except Exception as e:
            out.append((type(e), str(e)))
    return out


def agree(make: Make, between: Any = (None,)) -> None:
    """`make` gives a function with state of its own: the compiled one must see and leave what the function itself does."""
    want = results(make(), between)
    assert results(torchsmith.compile(make()), between) == want


# ---------------------------------------------------------------- locks, thread-local storage


def test_locks_are_taken() -> None:
    def held() -> Any:
        lock = threading.Lock()
        return lambda x: (x + 1, lock.acquire(blocking=False), lock.locked())

    def entered() -> Any:
        lock, other = threading.Lock(), threading.RLock()

        def fn(x: Tensor) -> Any:
            with lock, other:
                y, inside = x + 1, lock.locked()
            return y, inside, lock.locked()

        return fn

    agree(held)
    agree(entered)


def test_thread_local_storage() -> None:
    def read() -> Any:
        lock, local = threading.Lock(), threading.local()
        local.v = torch.full((6,), 3.0)

        def fn(x: Tensor) -> Any:
            with lock:
                x = x + local.v
            return x

        return fn

    def written() -> Any:
        class Mine(threading.local):
            step = 0

        local = Mine()

        def fn(x: Tensor) -> Any:
            local.x = x * 2
            local.step += 1
            return local.x + local.step, hasattr(local, "y")

        return fn

    agree(read)
    agree(written)


def test_weak_proxies() -> None:
    class Held:
        v = 2

    def make() -> Any:
        held = Held()
        held.v = 5
        proxy = weakref.proxy(held)
        return lambda x, keep=held: x * proxy.v

    agree(make)


# ---------------------------------------------------------------- one place for a thing

OTHER = types.ModuleType("state_other")
TEXT = """
COUNT = 0
def bump():
    global COUNT
    COUNT += 1
def read():
    return COUNT
def drop():
    global COUNT
    del COUNT
"""
exec(TEXT, OTHER.__dict__)
sys.modules["state_other"] = OTHER


def test_globals_of_another_module() -> None:
    def by_function(x: Tensor) -> Any:
        OTHER.bump()
        first = OTHER.COUNT
        OTHER.COUNT = 7
        seen = OTHER.read(), OTHER.__dict__["COUNT"], vars(OTHER)["COUNT"], OTHER.COUNT
        OTHER.__dict__["COUNT"] = 9
        seen += OTHER.read(), OTHER.COUNT, vars(OTHER).get("COUNT"), "COUNT" in vars(OTHER)
        OTHER.bump()
        return x + OTHER.COUNT, first, seen

    def deleted(x: Tensor) -> Any:
        OTHER.drop()
        gone = hasattr(OTHER, "COUNT"), "COUNT" in OTHER.__dict__
        OTHER.COUNT = 1
        del OTHER.__dict__["COUNT"]
        gone += (getattr(OTHER, "COUNT", None),)
        OTHER.__dict__["COUNT"] = 3
        return x, gone, OTHER.read()

    for fn in (by_function, deleted):
        OTHER.COUNT = 0
        want = results(fn), OTHER.COUNT
        OTHER.COUNT = 0
        assert (results(torchsmith.compile(fn)), OTHER.COUNT) == want


def test_attributes_and_their_dictionary() -> None:
    class Plain:
        pass

    def make() -> Any:
        o = Plain()
        o.a = 1

        def fn(x: Tensor) -> Any:
            o.__dict__["a"] = 5
            seen = [o.a]
            o.a = 6
            seen.append(o.__dict__["a"])
            o.__dict__["a"] = 7
            o.__dict__.update(b=3)
            seen += [o.a, o.b, *sorted(vars(o))]
            del o.b
            seen += ["b" in o.__dict__, getattr(o, "zz", None)]
            return x, seen

        return lambda x: (*fn(x), o)[:2] if o is None else (fn(x), sorted(vars(o).items()))

    agree(make)


def test_attributes_of_classes() -> None:
    def make() -> Any:
        class Base:
            count, name = 0, "base"

        class Derived(Base):
            pass

        def fn(x: Tensor) -> Any:
            Base.count += 1
            d = Derived()
            seen = d.count, Derived.count, Base.__dict__["count"] if False else Base.count
            Derived.count = 10
            Base.twice = lambda self: self.count * 2
            return x, seen, d.count, Base.count, d.twice()

        return fn

    agree(make)


def test_equal_tuples_stay_two() -> None:
    def make() -> Any:
        calls: list[Any] = []

        def fn(x: Tensor) -> Any:
            calls.append(("t", len(x)))
            calls.append(("t", len(x)))
            return x, len(calls), calls[0] is calls[1]

        return fn

    agree(make)


# ---------------------------------------------------------------- guards notice what Python would


@contextmanager
def restored(*places: tuple[Any, str]) -> Iterator[None]:
    before = [(o, n, o.__dict__[n] if n in vars(o) else None, n in vars(o)) for o, n in places]
    try:
        yield
    finally:
        for o, n, value, was in before:
            if was:
                setattr(o, n, value)
            elif n in vars(o):
                delattr(o, n)


def patched(make: Make, owner: Any, name: str, *values: Any) -> None:
    """Patched between calls, the function gives what eager gives."""
    outcomes = []
    for wrap in (lambda f: f, torchsmith.compile):
        with restored((owner, name)):
            outcomes.append(results(wrap(make()), [None, *((lambda v=v: setattr(owner, name, v)) for v in values)]))
    assert outcomes[0] == outcomes[1]


def added(x: Tensor) -> Tensor:
    y = x * 1
    y += x
    y[0] = 5.0
    return y


class Bare:
    pass


class Passes(torch.nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, getattr(self, "more", 0)


class Data:
    def __get__(self, obj: Any, owner: Any) -> int:
        return 55

    def __set__(self, obj: Any, value: Any) -> None:
        pass


class Named(type):
    pass


class Holds(metaclass=Named):
    kept = 2

    def __init__(self) -> None:
        self.own, self.kept = 1, 3


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.inner, self.n = torch.nn.Parameter(torch.ones(6)), torch.nn.Identity(), 2.0

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * self.w * self.n


class Cached:
    own = functools.cached_property(lambda self: 5)


BARE, HOLDS = Bare(), Holds()


def with_own() -> Callable[[Tensor], Any]:
    held = Holds()

    def fn(x: Tensor) -> Any:
        held.own = held.own + 1
        made = Holds()
        return x, held.own, made.own, sorted(vars(made))

    return fn


def unpacked(x: Tensor) -> Any:
    try:
        return x, dict(**BARE)  # type: ignore[arg-type]
    except TypeError as e:
        return x, str(e).rpartition(" argument")[2]


def with_attribute(x: Tensor) -> Any:
    made = Bare()
    made.own = 1
    return x, vars(made)


PATCHES: dict[str, tuple[Make, Any, str, tuple[Any, ...]]] = {
    "builtin": (lambda: lambda x: (x, abs(-3)), builtins, "abs", (lambda v: 7,)),
    "builtin that takes less": (lambda: lambda x: x * dict(zip([2], [3]))[2], builtins, "zip", (lambda *v: [(2, 7)],)),  # noqa: B905
    "builtin that lies": (lambda: lambda x: x * sum(i for i, _ in enumerate([4])), builtins, "enumerate", (lambda v: [(5, 5)],)),
    "function of torch": (lambda: lambda x: torch.sin(x), torch, "sin", (lambda v: v + 100,)),  # noqa: PLW0108
    "torch.nn.functional": (lambda: lambda x: F.relu(x), F, "relu", (lambda v, *a, **k: v + 100,)),  # noqa: PLW0108
    "inside a module": (torch.nn.SiLU, F, "silu", (lambda v, *a, **k: v + 100,)),
    "method of tensors": (lambda: lambda x: x.sin(), torch.Tensor, "sin", (lambda v: v + 100,)),
    "operator of tensors": (lambda: lambda x: x + x, torch.Tensor, "__add__", (lambda v, w: v * 100,)),
    "unary operator": (lambda: lambda x: -x, torch.Tensor, "__neg__", (lambda v: v + 100,)),
    "operator in place": (lambda: added, torch.Tensor, "__iadd__", (lambda v, w: v * 100,)),
    "index of tensors": (lambda: lambda x: x[0], torch.Tensor, "__getitem__", (lambda v, k: v + 100 + k,)),
    "item of tensors": (lambda: added, torch.Tensor, "__setitem__", (lambda v, k, w: v.add_(100) and None,)),
    "length of tensors": (lambda: lambda x: x * len(x), torch.Tensor, "__len__", (lambda v: 9,)),
    "iterator of tensors": (lambda: lambda x: next(iter(x)), torch.Tensor, "__iter__", (lambda v: iter([v + 5, v]),)),
    "calls of modules": (lambda: lambda x: SILU(x), torch.nn.Module, "__call__", (lambda self, v: v - 1,)),  # noqa: PLW0108
    "new method": (lambda: lambda x: x.foo() if hasattr(x, "foo") else x, torch.Tensor, "foo", (lambda v: v + 1, lambda v: v + 2)),
    "attribute of tensors": (lambda: lambda x: x.ndim, torch.Tensor, "ndim", (property(lambda v: 17),)),
    "forward of a class of torch": (torch.nn.ReLU, torch.nn.ReLU, "forward", (lambda self, v: v - 1,)),
    "new attribute of a class": (lambda: lambda x: (x, getattr(BARE, "more", 0), hasattr(Bare(), "more")), Bare, "more", (1,)),
    "new way to look up": (lambda: lambda x: (x, getattr(BARE, "more", 0)), Bare, "__getattr__", (lambda self, name: name,)),
    "new attribute of modules": (Passes, Passes, "more", (1,)),
    "new truth of objects": (lambda: lambda x: x + 1 if BARE else x - 1, Bare, "__bool__", (lambda self: False,)),
    "new length of objects": (lambda: lambda x: x + 1 if BARE else x - 1, Bare, "__len__", (lambda self: 0,)),
    "new equality": (lambda: lambda x: (x, BARE == 3, BARE != 3), Bare, "__eq__", (lambda self, other: True,)),
    "new equality, asked by C": (lambda: lambda x: (x, [BARE].count(3), BARE in [3]), Bare, "__eq__", (lambda self, o: True,)),
    "new hash": (lambda: lambda x: (x, len({BARE: 1, Bare(): 2})), Bare, "__hash__", (None,)),
    "new way to make objects": (lambda: lambda x: (x, type(Bare())), Bare, "__new__", (staticmethod(lambda cls: 7),)),
    "new way to initialise": (lambda: lambda x: (x, vars(Bare())), Bare, "__init__", (lambda self: setattr(self, "v", 1),)),
    "new way to set": (lambda: with_attribute, Bare, "__setattr__", (lambda self, name, value: None,)),
    "property over an attribute": (lambda: lambda x: (x, HOLDS.own), Holds, "own", (property(lambda self: 44),)),
    "descriptor over an attribute": (lambda: lambda x: (x, HOLDS.own, HOLDS.kept), Holds, "own", (7, Data())),
    "descriptor over both": (lambda: lambda x: (x, HOLDS.own, HOLDS.kept), Holds, "kept", (7, Data())),
    "descriptor over what is written": (with_own, Holds, "own", (7, Data())),
    "property over a parameter": (Layer, Layer, "w", (3.0, property(lambda self: 44.0))),
    "property over a submodule": (Layer, Layer, "inner", (property(lambda self: torch.sin),)),
    "property over a module's number": (Layer, Layer, "n", (3.0, property(lambda self: 44.0))),
    "new way to be called": (lambda: lambda x: (x, BARE(x)), Bare, "__call__", (lambda self, x: 4,)),  # type: ignore[operator]
    "another cached property": (lambda: lambda x: (x, Cached().own), Cached, "own", (Data(), 3)),
    "cached property without a name": (lambda: lambda x: (x, getattr(Bare(), "own", 0)), Bare, "own", (functools.cached_property(len),)),
    "attribute of the metaclass": (lambda: lambda x: (x, Holds.kept, getattr(Holds, "more", 0)), Named, "more", (5,)),
    "descriptor of the metaclass": (lambda: lambda x: (x, Holds.kept), Named, "kept", (5, Data())),
    "way of the metaclass to look up": (lambda: lambda x: (x, getattr(Holds, "more", 0)), Named, "__getattr__", (lambda cls, name: name,)),
    "new way to be unpacked": (lambda: unpacked, Bare, "keys", (lambda self: [],)),
    "new way to make copies": (lambda: lambda x: (x, type(copy.copy(BARE))), Bare, "__new__", (staticmethod(lambda cls: 7),)),
    "math": (lambda: lambda x: x * sys.modules["math"].pi, sys.modules["math"], "pi", (3.0,)),
}


@pytest.mark.parametrize("what", PATCHES)
def test_patches_between_calls(what: str) -> None:
    make, owner, name, values = PATCHES[what]
    patched(make, owner, name, *values)


@pytest.mark.parametrize(("name", "value"), [("w", 3.0), ("inner", torch.sin)])
def test_an_attribute_over_what_a_module_registers(name: str, value: Any) -> None:
    made: list[Layer] = []

    def make() -> Layer:
        made[:] = [Layer()]
        return made[0]

    agree(make, [None, lambda: vars(made[0]).update({name: value})])


def test_attributes_looked_up_in_another_way() -> None:
    kinds: list[type] = []

    def own(self: Any, name: str) -> float:
        return 11.0

    def make() -> Any:
        class Kind:
            k = 2.0

        kinds[:] = [Kind]
        thing = Kind()
        return lambda x: x * thing.k

    agree(make, [None, lambda: setattr(kinds[0], "__getattribute__", own), lambda: delattr(kinds[0], "__getattribute__")])


def test_a_global_that_shadows_a_builtin() -> None:
    for wrap in (lambda f: f, torchsmith.compile):
        space: dict[str, Any] = {}
        exec("def fn(x):\n    return x * len(x)", space)
        fn = wrap(space["fn"])
        assert fn(X)[1] == 6
        space["len"] = lambda v: 100
        assert fn(X)[1] == 100
        del space["len"]
        assert fn(X)[1] == 6


def test_classes_registered_later() -> None:
    made: list[Any] = []

    def make() -> Any:
        class Kind(abc.ABC):  # noqa: B024
            pass

        class One:
            pass

        one = One()
        made[:] = [Kind, One]
        return lambda x: (x, isinstance(one, Kind), issubclass(One, Kind), isinstance(one, (int, Kind)))

    agree(make, [None, lambda: made[0].register(made[1])])


@pytest.mark.parametrize("how", ["import", "import_module", "__import__", "a part"])
def test_modules_replaced(how: str) -> None:
    first, second = types.ModuleType("state_zm"), types.ModuleType("state_zm")
    first.v, second.v = 1, 2  # type: ignore[attr-defined]

    def make() -> Any:
        sys.modules["state_zm"] = first

        def fn(x: Tensor) -> Any:
            import state_zm  # type: ignore[import-not-found]

            return x + state_zm.v

        return others.get(how, fn)

    others: dict[str, Any] = {
        "import_module": lambda x: x + importlib.import_module("state_zm").v,
        "__import__": lambda x: x + __import__("state_zm").v,
        "a part": lambda x: x + __import__("state_zm", fromlist=("v",)).v,
    }

    agree(make, [None, lambda: sys.modules.update(state_zm=second), lambda: sys.modules.pop("state_zm")])


@pytest.mark.filterwarnings("ignore")  # that functions run eagerly
@pytest.mark.parametrize("which", range(4))
def test_calls_of_cached_functions_are_counted(which: int) -> None:
    """A program that looks at cache_info() sees the counts of eager's calls: in its frame, beside a break, of a function called, behind."""

    def make() -> Any:
        @functools.cache
        def scale(n: int) -> float:
            return n * 2.0

        def beside(x: Tensor, n: int) -> Any:
            return x * scale(n) + scale.cache_info().hits

        def broken(x: Tensor, n: int) -> Any:
            x = x + 1
            torchsmith.compiler.graph_break()
            y = x * scale(n)
            return y + scale.cache_info().hits

        def inner(x: Tensor, n: int) -> Any:
            return x * scale(n)

        def below(x: Tensor, n: int) -> Any:
            y = inner(x, n)
            return y + scale.cache_info().misses

        def behind(x: Tensor, n: int) -> Any:
            return x + scale.cache_info().hits * scale(n)

        return (beside, broken, below, behind)[which]

    fn, compiled = make(), torchsmith.compile(make(), backend=lambda graph, inputs: graph.forward)
    x = torch.ones(1)
    assert [compiled(x, n).item() for n in (3, 3, 4, 3)] == [fn(x, n).item() for n in (3, 3, 4, 3)]


@pytest.mark.parametrize("loaded", [False, True])
def test_parts_of_packages_are_loaded(loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import inside loads what is not loaded yet, of a package that is or is not; what cannot be found raises."""
    name = f"state_zp{loaded:d}"
    (tmp_path / name).mkdir()
    for part, text in {"__init__": "", "one": "v = 1", "two": "v = 2"}.items():
        (tmp_path / name / f"{part}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    space: dict[str, Any] = {}
    exec(f"""def fn(x):
    from {name} import one
    two = __import__("{name}", fromlist=("two",)).two
    try:
        x = x * __import__("{name}.three").v
    except ImportError:
        x = x + 4
    return x + one.v + two.v
""", space)
    if loaded:
        importlib.import_module(name)
    compiled = torchsmith.compile(space["fn"], backend=lambda graph, inputs: graph.forward)
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [8.0, 8.0]


def test_switches_of_the_process() -> None:
    def fn(x: Tensor) -> Any:
        state = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled
        return x, state, torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()

    def change() -> Iterator[None]:
        threads, precision, tf32 = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
        try:
            torch.set_num_threads(threads + 1)
            yield
            torch.set_float32_matmul_precision("high")
            yield
            torch.backends.mkldnn.set_flags(False)
            yield
            torch.backends.cuda.matmul.allow_tf32 = not tf32
            yield
            torch.use_deterministic_algorithms(True)
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            torch.backends.mkldnn.set_flags(True)
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.use_deterministic_algorithms(False)
            for backend in ("cuda", "mkldnn"):  # which the old names leave at "ieee"
                torch._C._set_fp32_precision_setter(backend, "matmul", "none")

    compiled = torchsmith.compile(fn, recompile_limit=20)
    assert plain(compiled(X)) == plain(fn(X))
    for _ in change():
        assert plain(compiled(X)) == plain(fn(X))


def test_settings_that_are_read() -> None:
    def fn(x: Tensor) -> Any:
        with torch.device("meta"):
            inside = torch.get_default_device()
        return x, sys.getrecursionlimit(), torch.get_autocast_dtype("cpu"), torch.get_default_device(), inside

    def change() -> Iterator[None]:
        limit, dtype = sys.getrecursionlimit(), torch.get_autocast_dtype("cpu")
        try:
            sys.setrecursionlimit(limit + 7)
            yield
            torch.set_autocast_dtype("cpu", torch.float16)
            yield
            torch.set_default_device("meta")
            yield
        finally:
            sys.setrecursionlimit(limit)
            torch.set_autocast_dtype("cpu", dtype)
            torch.set_default_device(None)

    compiled = torchsmith.compile(fn, backend="eager")
    assert plain(compiled(X)) == plain(fn(X))
    for _ in change():
        assert compiled(X)[1:] == fn(X)[1:]


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_are_counted_without_ours() -> None:
    fn = torchsmith.compile(lambda x: (x + 1, torch._C._len_torch_function_stack(), torch._C._is_torch_function_mode_enabled()))
    assert fn(X)[1:] == (0, False)
    with Mode():
        assert fn(X)[1:] == (1, True)


# ---------------------------------------------------------------- attributes of functions, keys of dictionaries


def _with_attributes() -> Callable[[Tensor], Any]:
    def other() -> None:
        pass

    other.was = 3  # type: ignore[attr-defined]

    def fn(x: Tensor) -> Any:
        o: Any = other
        o.calls = getattr(o, "calls", 0) + 1
        o.__dict__["w"] = o.calls
        o.u = 1
        seen = [sorted(o.__dict__), o.w, vars(o)["was"]]
        o.__dict__.pop("u")
        o.__dict__.update(q=5)
        seen += [hasattr(o, "u"), o.q, dict(vars(o))]
        del o.q
        return x * o.calls, seen, hasattr(o, "q"), o.__name__

    return fn


def test_attributes_of_functions_are_their_dictionary() -> None:
    agree(_with_attributes, [None, None])


@pytest.mark.filterwarnings("ignore:torchsmith")
def test_keys_are_asked_for_their_hash_as_often_as_in_eager() -> None:
    def make() -> Callable[[Tensor], Any]:
        asked: list[Any] = []

        class Key:
            def __init__(self, v: int) -> None:
                self.v = v

            def __hash__(self) -> int:
                asked.append(self.v)
                return self.v % 2

            def __eq__(self, other: object) -> bool:
                asked.append((self.v, other.v))  # type: ignore[attr-defined]
                return self.v == other.v  # type: ignore[attr-defined]

        def fn(x: Tensor) -> Any:
            named, kept = {Key(0): x, Key(2): x * 2}, {Key(1), Key(3)}
            print(end="")
            return x + len(named) + len(kept), Key(0) in named, list(asked)

        return fn

    agree(make)


# ---------------------------------------------------------------- what an entry keeps


def test_a_weak_reference_stays_weak() -> None:
    class Held:
        v = 2

    held = Held()
    ref = weakref.ref(held)

    def fn(x: Tensor) -> Any:
        o = ref()
        return x * 0 if o is None else x * o.v

    compiled = torchsmith.compile(fn)
    assert plain(compiled(X)) == plain(fn(X))
    del held
    gc.collect()
    assert ref() is None
    assert plain(compiled(X)) == plain(fn(X))


def _with_a_class(x: Tensor) -> Tensor:
    class Twice:
        def of(self, y: Tensor) -> Tensor:
            return y * 2

    return Twice().of(x)


def _with_transforms(x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: (y * y).sum())(x) + torch.func.vmap(torch.sin)(x)


def _with_callbacks(x: Tensor) -> Tensor:
    return x * max([1, 2], key=lambda n: -n) * sum(map(abs, (1, -2)))


@pytest.mark.parametrize("program", [_with_a_class, _with_transforms, _with_callbacks])
def test_a_capture_keeps_nothing_of_its_call(program: Any) -> None:
    fn, x = types.FunctionType(program.__code__, globals()), torch.ones(3)
    seen = weakref.ref(fn), weakref.ref(x)
    assert plain(torchsmith.compile(fn, backend="eager", fullgraph=True)(x)) == plain(fn(x))
    del fn, x
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    assert call_opcodes._TRACEBACK.tb_frame.f_back is None  # what `__exit__` is given holds no stack of the first compilation's


def test_a_class_of_autograd_functions_goes_with_what_uses_it() -> None:
    def used() -> Any:
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                return y * 2

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * 2

        x = torch.ones(3, requires_grad=True)
        torchsmith.compile(lambda x: Twice.apply(x.sin()), backend="eager", fullgraph=True)(x).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, 2 * x.detach().cos())
        return weakref.ref(Twice)

    seen = used()
    gc.collect()
    assert seen() is None


def test_functions_that_pytorchs_own_compiler_leaves_out() -> None:
    @torch.compiler.disable
    def inner(x: Tensor) -> Tensor:
        def deeper(x: Tensor) -> Tensor:
            return x + (1 if torch.compiler.is_compiling() else 2)

        return deeper(x)

    agree(lambda: lambda x: inner(x) * 2)
    with pytest.raises(torchsmith.Unsupported, match=r"inner is marked with compiler.disable \(.*test_state.py:\d+\)"):
        torchsmith.compile(lambda x: inner(x) + 1, fullgraph=True)(X)


# ---------------------------------------------------------------- inference mode


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("write", [lambda t: t.add_(1), lambda t: t[1:].mul_(2), lambda t: t.__setitem__(0, 1)])
def test_inference_tensors_are_not_written_outside(write: Any, inside: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        if inside:
            with torch.inference_mode():
                x = x + 1
        write(x)
        return x

    with torch.inference_mode():
        x = torch.ones(3)
    for call in (fn, torchsmith.compile(fn, backend="eager")):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            call(x)


def test_results_of_inference_regions() -> None:
    @torch.inference_mode()
    def decorated(x: Tensor) -> Tensor:
        return x + 1

    def all_inside(x: Tensor) -> Any:
        a = decorated(x)
        with torch.inference_mode():
            b = x * 2
            c = b.view(2, 3)
        return a, b, c, a.is_inference(), torch.is_inference(b), x.is_inference(), x.view(2, 3)

    def mixed(x: Tensor) -> Any:
        return decorated(x), x * 2

    def left(x: Tensor) -> Any:
        with torch.inference_mode(False):
            return x * 2

    for mode in (False, True):
        for fn in (all_inside, mixed, left):
            compiled = torchsmith.compile(fn)
            with torch.inference_mode(mode):
                got, want = compiled(X), fn(X)
            one = isinstance(got, Tensor)
            pairs = [(got, want)] if one else zip(got, want, strict=True)
            for g, w in pairs:
                assert g == w if isinstance(g, bool) else (torch.equal(g, w) and g.is_inference() == w.is_inference())
    fn = torchsmith.compile(all_inside, fullgraph=True)
    assert fn(X)[0].is_inference()


def test_exceptions_about_our_own_values_are_not_the_programs() -> None:
    def fn(x: Tensor, n: int) -> Any:
        seen = [hasattr(n, "node"), hasattr(n, "bit_length")]
        try:
            text = "abc".center(n)
        except TypeError:
            text = "no number"
        return x * n, text, seen

    compiled = torchsmith.compile(fn)
    for n in (4, 5, 6):
        assert plain(compiled(X, n)) == plain(fn(X, n))


def test_bound_methods_of_what_the_caller_gets() -> None:
    def fn(x: Tensor) -> Any:
        made: list[Any] = []
        return x, made, made.append, {"put": made.extend}

    for f in (fn, torchsmith.compile(fn)):
        _, made, put, more = f(X)
        put(1)
        more["put"]([2])
        assert made == [1, 2]


def test_dictionaries_of_classes() -> None:
    def make() -> Any:
        class Kind:
            a = 1

        fn = lambda x: (x, Kind.__dict__.get("a"), Kind.__dict__.get("b"), "a" in Kind.__dict__)
        fn.kind = Kind  # type: ignore[attr-defined]
        made[:] = [Kind]
        return fn

    made: list[Any] = []
    agree(make, [None, lambda: setattr(made[0], "a", 5), lambda: setattr(made[0], "b", 6)])


def test_a_write_of_what_happened_to_be_there() -> None:
    class Plain:
        n = 0

    def make() -> Any:
        o = Plain()
        o.n = 1

        def fn(x: Tensor) -> Any:
            o.__dict__["n"] = 10
            return x + 1, o.n

        made[:] = [o]
        return lambda x: (*fn(x), made[0].__dict__["n"])

    made: list[Any] = []
    agree(make, [None, lambda: setattr(made[0], "n", 4), lambda: setattr(made[0], "n", 5)])


def test_counters_of_a_class_and_its_base() -> None:
    def make() -> Any:
        class Base:
            count = 0

            @classmethod
            def total(cls) -> int:
                cls.count += 1
                return cls.count

        class Derived(Base):
            pass

        return lambda x: (x + 1, Base.total(), Derived.total())

    agree(make, [None] * 5)


def test_cells_of_functions_from_outside() -> None:
    def make() -> Any:
        def scale(n: Any) -> Any:
            def by(x: Tensor) -> Tensor:
                return x * n

            return by

        two, other = scale(2), scale(X + 1)
        made[:] = [two.__closure__[0]]

        def fn(x: Tensor) -> Any:
            cell, held = two.__closure__[0], other.__closure__[0].cell_contents
            before = cell.cell_contents
            cell.cell_contents = before + 1
            return two(x), before, held + x, held is other.__closure__[0].cell_contents

        return fn

    made: list[Any] = []
    agree(make, [None, lambda: setattr(made[0], "cell_contents", 10), None])


def test_a_cell_that_is_empty_is_asked_again() -> None:
    def make() -> Any:
        def later(fill: bool) -> Any:
            def read() -> int:
                return n

            def write(value: int) -> None:
                nonlocal n
                n = value

            if fill:
                n = 0
            return read, write

        read, write = later(False)
        made[:] = [write]

        def fn(x: Tensor) -> Any:
            try:
                return x + read(), read.__closure__[0].cell_contents
            except NameError as e:
                return x - 1, str(e)

        return fn

    made: list[Any] = []
    agree(make, [None, lambda: made[0](3), lambda: made[0](4)])
