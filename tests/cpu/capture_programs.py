"""Small Python programs, one per feature: each must capture in one graph and give eager's result."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import math
import operator
import types
import typing

import pytest
import torch

X = torch.arange(6.0).reshape(2, 3) / 7 - 0.3
PROGRAMS: list[typing.Any] = []
SCALE = 3.0
TABLE = {"a": 1.5, "b": torch.full((3,), 2.0)}
NESTED = [[1, 2], [3, [4, 5]]]


def program(*args, **kwargs):
    def add(fn):
        PROGRAMS.append(pytest.param(fn, args or (X,), kwargs, id=fn.__name__))
        return fn

    return add


@program()
def arithmetic(x):
    y = -x + 2 * x - x / 3 + x**2 - 5 % (x + 10) + x // 0.5
    y += 1
    y *= 2
    return y, ~(x > 0), abs(x), +x, x @ x.T, 2**x, x.T


@program()
def comparisons(x):
    return x > 0, x <= 0.1, x == x, x != 0, (x > 0) & (x < 1) | (x == 5), (x > 0) ^ (x < 0.2)


@program()
def nested_results(x):
    return {"a": (x, [x + 1, 3, "s"]), "b": {"c": None}}, (1, 2.5), True


@program()
def if_on_shape(x):
    if x.shape[0] > 1 and x.dim() == 2 and x.size(1) == 3 and len(x) == 2:
        return x + x.numel()
    return x - 1


@program()
def loops(x):
    total = 0
    for i in range(4):
        if i == 2:
            continue
        total = total + x * i
    total = total + 100
    n = 0
    while n < 3:
        total = total * 2
        n += 1
        if n == 2:
            break
    return total


@program()
def loop_over_tensor(x):
    rows = [row.sum() for row in x]
    a, b = x
    (c, *d), e = x[0], x[1]
    return rows, a + b, c, d, e


@program()
def comprehensions(x):
    a = [x + i for i in range(3) if i != 1]
    b = {k: v for k, v in zip("abc", a)}
    c = {i % 2 for i in range(5)}
    d = sum(t.sum() for t in a)
    return a, b, c, d, [[i * j for i in range(2)] for j in range(2)]


@program()
def star_and_walrus(x):
    a, *b, c = [1, 2, 3, 4]
    if (n := len(b)) > 1:
        x = x + n
    first, *rest = (x, x + 1, x + 2)
    d = {**{"p": 1}, "q": 2}
    e = [*b, *rest[:1]]
    return x, a, b, c, first, rest, d, e


@program()
def text(x):
    name = f"{x.shape[0]:>3}|{3.14159:.2f}|{'s'!r}|{[1, 2]}"
    parts = "-".join(["a", "b"]).upper().split("-")
    return x * len(name), name, parts, "%d %s" % (3, "z"), f"{1} {2}", b"ab".hex(), "abc"[::-1], str(x.dtype), str(x.device)


def helper(x, y=2, *args, z=3, **kw):
    return x * y + z + sum(args) + sum(kw.values())


@program()
def calls(x):
    return helper(x), helper(x, 3), helper(x, 3, 4, 5), helper(x, z=1, w=2), helper(*[x, 1], **{"z": 2})


@program()
def closures(x):
    n = 0

    def add(v):
        nonlocal n
        n += 1
        return v + n

    y = add(add(x))

    def make(k):
        return lambda v: v * k + n

    fns = [make(i) for i in range(3)]
    return y, [f(x) for f in fns], n


@program()
def generators(x):
    def gen(n):
        for i in range(n):
            got = yield x + i
            if got is not None:
                yield x * got

    g = gen(3)
    first = next(g)
    sent = g.send(5)

    def outer():
        yield from gen(2)
        return 7

    return first, sent, list(g), list(outer()), sum(v.sum() for v in outer()), dict(enumerate(outer()))


@program()
def exceptions(x):
    log = []
    try:
        {}["k"]
    except KeyError as e:
        log.append(str(e))
    try:
        try:
            raise ValueError("bad")
        finally:
            log.append("finally")
    except (TypeError, ValueError) as e:
        log.append(type(e).__name__ + e.args[0])
    else:
        log.append("never")

    def f():
        try:
            return x + 1
        finally:
            log.append("returned")

    try:
        assert x.dim() == 3, "dims"
    except AssertionError as e:
        log.append(str(e))
    try:
        int("z")
    except ValueError:
        log.append("int")
    try:
        try:
            raise KeyError("a")
        except KeyError as e:
            raise RuntimeError("b") from e
    except RuntimeError as e:
        log.append(repr(e.__cause__))
    return f(), log


class Manager:
    def __init__(self, log, swallow=False):
        self.log, self.swallow = log, swallow

    def __enter__(self):
        self.log.append("in")
        return self

    def __exit__(self, kind, value, trace):
        self.log.append(kind.__name__ if kind else "out")
        return self.swallow


@contextlib.contextmanager
def managed(log, v):
    log.append("enter")
    try:
        yield v * 2
    finally:
        log.append("exit")


@program()
def with_statements(x):
    log = []
    with Manager(log) as a, Manager(log):
        x = x + len(a.log)
    with Manager(log, swallow=True):
        raise ValueError
    with managed(log, x) as y:
        x = x + y
    with contextlib.suppress(KeyError):
        {}[1]
    with contextlib.nullcontext(3) as n, contextlib.ExitStack() as stack:
        stack.enter_context(Manager(log))
        x = x + n
    return x, log


@program()
def grad_modes(x):
    p = x.clone().requires_grad_()
    with torch.no_grad():
        a = p * 2
        off = torch.is_grad_enabled()
    b = p * 3
    with torch.set_grad_enabled(False):
        c = p * 4
    with torch.enable_grad():
        d = p * 5
    return a, b, c, d, off, torch.is_grad_enabled(), a.requires_grad, b.requires_grad


@torch.no_grad()
def without_grad(x):
    return x * 2


@program(X.clone().requires_grad_())
def decorated_no_grad(x):
    return without_grad(x), x * 3


class Vec:
    count = 0

    def __init__(self, v, name="vec"):
        self.v = v
        self.name = name
        self._cache = None

    def __add__(self, other):
        return Vec(self.v + (other.v if isinstance(other, Vec) else other), self.name)

    __radd__ = __add__

    def __mul__(self, k):
        return Vec(self.v * k)

    def __getitem__(self, i):
        return self.v[i]

    def __len__(self):
        return len(self.v)

    def __iter__(self):
        return iter(self.v)

    def __call__(self, k):
        return self.v + k

    def __eq__(self, other):
        return isinstance(other, Vec) and self.name == other.name

    def __hash__(self):
        return hash(self.name)

    def __contains__(self, k):
        return k == "yes"

    def __bool__(self):
        return self.name != "empty"

    def __repr__(self):
        return f"Vec({self.name})"

    @property
    def doubled(self):
        return self.v * 2

    @doubled.setter
    def doubled(self, v):
        self.v = v / 2

    @staticmethod
    def helper(v):
        return v - 1

    @classmethod
    def zeros(cls, v):
        return cls(v * 0, "zero")

    @functools.cached_property
    def cached(self):
        return self.v.sum()


class Vec2(Vec):
    __slots__ = ("extra",)

    def __init__(self, v):
        super().__init__(v, name="vec2")
        self.extra = 5

    def __call__(self, k):
        return super().__call__(k) * self.extra


@program()
def user_class(x):
    a = Vec(x)
    b = a + a + 1
    c = 2 + b
    b.doubled = x * 6
    d = Vec2(x)
    n = 0
    for row in a:
        n = n + row.sum()
    return (b.v, c.doubled, a * 3, a[0], len(a), n, a(1), d(2), Vec.helper(x), Vec.zeros(x), a == d, "yes" in a, bool(a), repr(d), f"{d}",
            a.cached + a.cached, getattr(d, "nothing", 4), hasattr(d, "extra"), isinstance(d, Vec), Vec.count, d.__class__.__name__)


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    y: int = 2
    z: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.z.append(self.y)


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: str = "q"


@program()
def dataclass_objects(x):
    p = Point(x, 3)
    q = dataclasses.replace(p, y=5)
    f = Frozen(1)
    table = {f: 2, Frozen(2): 3}
    return p, q.x + q.y, f, table[Frozen(1)], f == Frozen(1), [f.name for f in dataclasses.fields(p)]


Pair = collections.namedtuple("Pair", ["a", "b"])


class Typed(typing.NamedTuple):
    a: torch.Tensor
    b: int = 4

    def total(self):
        return self.a + self.b


@program()
def namedtuples(x):
    p = Pair(x, 2)
    a, b = p
    t = Typed(x)
    return p, p._replace(b=5), p.a * p.b, a + b, t.total(), t, p[0], p._asdict()


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    @property
    def factor(self):
        return self.value * 2


class Size(enum.IntEnum):
    S = 1
    L = 3


@program()
def enums(x):
    c = Color.RED
    if c is Color.RED and c == Color(1) and c != Color.BLUE:
        x = x * c.factor
    return x * Size.L, c, Color["BLUE"], [m.name for m in Color], Size.S < Size.L, {Color.RED: 1}[c]


@program()
def containers(x):
    a = [3, 1, 2]
    a.append(x)
    a.insert(0, 5)
    b = a.pop()
    a.sort()
    a.extend((7, 8))
    a[1:2] = [9, 9]
    del a[0]
    d = collections.OrderedDict(k=1)
    d["z"] = x
    d.move_to_end("k")
    dd = collections.defaultdict(list)
    dd["q"].append(b)
    dd2 = collections.defaultdict(lambda: 4)
    c = collections.Counter("abca")
    q = collections.deque([1, 2], maxlen=2)
    q.append(3)
    s = {1, 2} | {3}
    s.add(9)
    s.discard(1)
    e = {"a": 1}
    e.update(b=2)
    e.setdefault("c", []).append(x)
    v = e.pop("a")
    return a, b, d, dict(dd), dd2["p"], c["a"], list(q), s, e, v, e.get("nope", 3), list(e.items()), list(reversed(a)), a.index(9), a.count(9)


@program()
def builtins_(x):
    xs = [x, x + 1]
    return (
        sum(xs), max(3, 1), min([4, 2]), max(["aa", "b"], key=len), any(v is x for v in xs), all([]), sorted([3, 1, 2], reverse=True),
        sorted("bca", key=lambda c: -ord(c)), list(zip(xs, "ab")), list(map(lambda v: v * 2, xs)), list(filter(None, [0, 1, 2])),
        [*enumerate("ab", 1)], list(reversed([1, 2])), round(2.567, 1), divmod(7, 2), pow(2, 3), abs(-3), isinstance(x, torch.Tensor),
        callable(helper), int("5"), float("1.5"), bool([]), str(5), list(range(0, 10, 3)), len("abc"), type(x) is torch.Tensor,
        issubclass(bool, int), next(iter([5])), next(iter([]), 6), hash("a") == hash("a"), chr(97), ord("a"), bin(5), hex(255), slice(1, 2),
    )  # fmt: skip


@program()
def stdlib(x):
    f = functools.partial(helper, y=5)
    return (
        f(x), functools.reduce(lambda a, b: a * b, [x, x, x]), functools.reduce(operator.add, [1, 2], 3), list(itertools.chain([1], [2])),
        list(itertools.product([1, 2], "a")), list(itertools.accumulate([1, 2, 3])), list(itertools.islice(itertools.count(), 3)),
        list(itertools.repeat(x, 2)), operator.itemgetter(1)([4, 5]), operator.attrgetter("shape")(x), operator.mul(x, 2),
        math.sqrt(2), math.pi, math.prod(x.shape), math.ceil(2.1), math.inf, [list(g) for _, g in itertools.groupby([1, 1, 2])],
        list(itertools.starmap(pow, [(2, 3)])), list(itertools.zip_longest([1], [2, 3])), list(itertools.combinations([1, 2, 3], 2)),
        list(itertools.takewhile(lambda v: v < 2, [1, 2])), operator.methodcaller("sum")(x), list(itertools.pairwise([1, 2, 3])),
    )  # fmt: skip


@functools.lru_cache
def cached(n):
    return n * 2


def repeated(times):
    def wrap(fn):
        @functools.wraps(fn)
        def inner(*args, **kwargs):
            out = None
            for _ in range(times):
                out = fn(*args, **kwargs)
            return out

        return inner

    return wrap


@repeated(2)
def wrapped(x, k=1):
    """doc"""
    return x + k


@program()
def decorators(x):
    return wrapped(x), wrapped(x, k=4), cached(4), wrapped.__name__, wrapped.__doc__


@program()
def matching(x):
    out = []
    for v in (1, "a", (1, 2), {"k": 3, "z": 4}, Point(x), [1, 2, 3], None, Color.RED):
        match v:
            case 1 | 2:
                out.append("int")
            case str(s):
                out.append(s)
            case {"k": k, **rest}:
                out.append((k, rest))
            case Point(y=yy):
                out.append(yy)
            case (a, b):
                out.append(a + b)
            case [first, *others]:
                out.append(others)
            case Color.RED:
                out.append("red")
            case None:
                out.append("none")
    return x, out


@program()
def globals_read(x):
    return x * SCALE + TABLE["a"], TABLE["b"] + 1, NESTED[1][1][0], "a" in TABLE, len(TABLE), list(TABLE), TABLE.get("zz", 3)


@program(X, [X, 2], {"k": X + 1})
def container_arguments(x, items, table):
    items[0] = items[0] + 1
    items.append(x)
    table["new"] = x * 2
    table["k"] += 1
    del items[1]
    return items, table, x


@program([1, [2, X]], {"p": {"q": X}})
def nested_arguments(items, table):
    items[1].append(items[1][1] * 2)
    table["p"]["r"] = len(items[1])
    return items[1][1] + table["p"]["q"]


@program(X, X)
def same_tensor_twice(a, b):
    return a + b, a is b


@program(X, None, 3, "mode", True, (1, (X, 2)))
def mixed_arguments(x, nothing, n, mode, flag, pair):
    if nothing is None and mode == "mode" and flag:
        return x * n + pair[1][0] * pair[1][1]
    return x


@program(X, 1, 2, k=3, j=X)
def varargs(*args, **kwargs):
    return args[0] * args[1] + args[2] + kwargs["k"] + kwargs["j"], len(args), list(kwargs), args[1:]


@program()
def indexing(x):
    i = torch.tensor([0, 1])
    y = x.clone()
    y[0] = 5
    y[:, 1] += 2
    y[..., -1] = x[..., 0]
    y[y > 4] = 0.5
    return x[0, 1], x[:, None], x[..., 1:], x[i], x[i, i], x[::1, [0, 2]], y, x[None], x[True], x[x > 0.1 if False else (slice(None), 0)]


@program()
def in_place(x):
    y = x.clone()
    y.add_(1).mul_(2)
    v = y[0]
    v.zero_()
    torch.relu_(y)
    torch.add(x, 1, out=y)
    return y, v


@program()
def tensor_attributes(x):
    return (x.shape, x.dtype, x.device, x.ndim, x.is_cuda, x.requires_grad, x.mT, x.numel(), x.stride(), x.is_contiguous(), x.size(),
            x.element_size(), x.is_floating_point(), x.layout, x.is_leaf, x.grad, x.nelement(), x.dim(), x.data + 1, x.type(), x.itemsize)  # fmt: skip


@program()
def torch_functions(x):
    return (
        torch.cat([x, x]), torch.stack((x, x), dim=1), torch.zeros(2, 3), torch.ones_like(x), torch.arange(3), torch.tensor([1.0, 2]),
        torch.where(x > 0, x, 0.0), torch.nn.functional.relu(x), torch.nn.functional.softmax(x, dim=-1), torch.einsum("ij,kj->ik", x, x),
        x.max(dim=1), torch.topk(x, 2), x.split(1), x.chunk(2), torch.finfo(x.dtype).min, torch.iinfo(torch.int32).max, x.to(torch.float64),
        x.view(3, 2), x.reshape(-1), x.permute(1, 0), x.expand(2, 2, 3), x.new_zeros(3), x.masked_fill(x > 0, -1), x.softmax(-1),
        torch.linalg.norm(x), torch.fft.fft(x).real, torch.special.expit(x), torch.broadcast_shapes((2, 1), (3,)), x.type_as(x), x.float(),
        torch.is_tensor(x), torch.is_floating_point(x), torch.get_default_dtype(), torch.promote_types(torch.float32, torch.int64),
        torch.Size([1, 2]), torch.full((2,), 3.0), torch.empty(0), torch.linspace(0, 1, 3), torch.eye(2), torch.unbind(x), torch.numel(x),
        torch.nn.functional.pad(x, (1, 1)), torch.nn.functional.layer_norm(x, (3,)), x.unflatten(1, (3, 1)), x.flatten(), x.sum(0, keepdim=True),
        torch.ops.aten.sin(x), torch.ops.aten.add.Tensor(x, x), torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij"),
    )  # fmt: skip


@program()
def is_compiling(x):
    return x + (0 if torch.compiler.is_compiling() else 0), torch.jit.is_scripting(), torch.jit.is_tracing()


class Meta(type):
    registry: typing.ClassVar = {}

    def __new__(mcs, name, bases, ns):
        cls = super().__new__(mcs, name, bases, ns)
        mcs.registry[name] = cls
        return cls


class Registered(metaclass=Meta):
    factor = 4

    def scale(self, x):
        return x * self.factor


@program()
def metaclasses(x):
    return Meta.registry["Registered"]().scale(x)


class Described:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, obj, owner=None):
        return self if obj is None else getattr(obj, self.name) + 1

    def __set__(self, obj, value):
        setattr(obj, self.name, value * 2)


class WithDescriptor:
    field = Described()

    def __getattr__(self, name):
        if name.startswith("dyn_"):
            return len(name)
        raise AttributeError(name)


@program()
def descriptors(x):
    w = WithDescriptor()
    w.field = x
    return w.field, w.dyn_abc, getattr(w, "zzz", 3), type(WithDescriptor.field).__name__


class Bag(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self[name] = value


@program()
def dict_subclass(x):
    b = Bag(a=x)
    b.c = x + 1
    return b, b.a + b.c, getattr(b, "zz", None), list(b.keys())


BAG = Bag(a=X, n=2)


@program()
def outside_dict_subclass(x):
    return x + BAG.a * BAG.n, "a" in BAG, len(BAG)


@program()
def local_class(x):
    class Local:
        k = 3

        def f(self, v):
            return v * self.k

    return Local().f(x)


@program()
def simple_namespace(x):
    n = types.SimpleNamespace(a=x, b=2)
    n.c = n.a * n.b
    return n.c


@program()
def return_function(x):
    y = x * 2
    return lambda v: v + y


@program()
def inner_import(x):
    import math as mm
    from math import pi
    from os import path

    return x * pi + mm.e, path.join("a", "b") if False else 0


class UserIterator:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n


@program()
def iterators(x):
    it = UserIterator(3)
    a = [x + i for i in it]
    return a, list(UserIterator(2)), sum(UserIterator(4)), max(UserIterator(3)), list(zip(UserIterator(2), "ab")), tuple(UserIterator(1))


@program()
def autocast_region(x):
    with torch.autocast("cpu", enabled=False):
        y = x @ x.T
    return y, x @ x.T, torch.is_autocast_enabled("cpu")


@program(X, torch.nn.Linear(3, 3))
def autocast_on(x, layer):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x) @ x.T
        z = torch.nn.functional.layer_norm(torch.cat([y, x]) if y.shape[1] == 3 else y, y.shape[-1:])
        with torch.autocast("cpu", enabled=False):
            w = x @ x.T
        a = torch.nn.functional.mse_loss(y, y * 2) + torch.softmax(y, -1).sum()
        b = torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])
        on = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return y, z, w, a, b, x @ x.T, on


@program(torch.float64, torch.device("cpu"))
def dtype_argument(dtype, device):
    return torch.ones(2, dtype=dtype, device=device) * 2


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 * x * 10


@program()
def custom_function(x):
    return Square.apply(x) + 1


@program()
def conditional_expression(x):
    a = x if x.shape[0] == 2 else None
    b = a is not None
    return (a or 0) if False else a, b, 1 < 2 < 3, None or 5, 0 and 1


@program()
def bytes_and_sets(x):
    return x, bytes([1, 2]), bytearray(b"ab").decode(), frozenset([1]) | {2}, {1, 2} & {2}, {1} <= {1, 2}, (1, 2) + (3,), [0] * 3, "ab" * 2


@program()
def string_formatting_of_values(x):
    return x, f"{Color.RED}", f"{(1, 'a')}", f"{None!s:>6}", "{}", f"{tuple(x.shape)}"


@program()
def delete_names(x):
    y = x + 1
    del y
    try:
        return y
    except UnboundLocalError:
        return x


@program()
def numpy_scalars(x):
    import numpy as np

    return x * np.float32(2.0), int(np.prod(x.shape)), x + np.pi, float(np.sqrt(4.0))


LAYOUT = types.SimpleNamespace(sizes=[1, 2], options={"a": (1, [2])}, point=Point(X, 3))


@program()
def copies(x):
    a = copy.deepcopy(LAYOUT)
    a.sizes.append(3)
    a.options["a"][1][0] = 9
    b = copy.copy(LAYOUT)
    b.extra = 1
    seen = {id(LAYOUT), id(LAYOUT.sizes)}
    return x, a.sizes, a.options, LAYOUT.sizes, b.sizes is LAYOUT.sizes, id(LAYOUT) in seen, id(b) in seen, copy.deepcopy([x, {"k": x}]), a.point.y


class Base:
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.made = True


class Mixin:
    def run(self, x):
        return self.step(x) + 1


class Child(Mixin, Base):
    table: typing.ClassVar = {"relu": torch.relu, "neg": lambda v: -v}

    def step(self, x):
        return self.table["neg"](self.table["relu"](x))

    def __setattr__(self, name, value):
        object.__setattr__(self, name, (value, name) if name == "odd" else value)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    def __iter__(self):
        yield from (1, 2)

    def __index__(self):
        return 1

    def __lt__(self, other):
        return True

    def __matmul__(self, other):
        return other * 2

    def __delitem__(self, key):
        self.deleted = key

    def __missing__(self, key):
        return key


@program()
def protocol_methods(x):
    c = Child()
    c.odd = 3
    del c[4]
    with c as d:
        y = d.run(x)
    return y, c.odd, c.deleted, list(c), [10, 20][c], c < 3, c @ x, Child.made, sorted([c, c])[0] is c, x[c]


@program()
def string_methods(x):
    s = "Layer.0.weight"
    return (x, s.split("."), s.startswith("Layer"), s.replace(".", "_"), s.partition("."), s.rsplit(".", 1), s.lower().title(), s.find("0"),
            s.encode().decode(), s.isidentifier(), "".join(c for c in s if c.isalpha()), s[::2], "0" in s, "{:>8}".format(s[:3]), "a,b".split(","),
            " x ".strip(), "%05.1f" % 2.5, s.zfill(20), "ab".center(6, "*"), "x".join(str(i) for i in range(3)), len(s), s * 2, sorted(set("abca")))


@program()
def nested_functions_and_defaults(x, scale=2.0, *, bias=None):
    def outer(a, b=[1], *args, c, d=4, **kw):  # noqa: B006
        b = b + [a]

        def inner(*, k=d):
            nonlocal a
            a = a + k
            return a

        return inner() + c, b, args, kw, a

    first = outer(x, c=1)
    second = outer(x, [5], 6, 7, c=scale, e=8)
    return first, second, bias


@program()
def early_returns(x):
    for i in range(3):
        try:
            if i == 1:
                return x + i
        finally:
            x = x + 10
    return x


@program()
def while_else_and_nested_breaks(x):
    found = []
    for i in range(3):
        for j in range(3):
            if i * j == 2:
                found.append((i, j))
                break
        else:
            found.append(i)
    n = 3
    while n:
        n -= 1
    else:
        found.append("else")
    return x * n, found


@program()
def generator_expressions_and_methods(x):
    def chain(*its):
        for it in its:
            yield from it

    def guarded():
        try:
            yield 1
            yield 2
        finally:
            done.append("closed")

    def catching():
        while True:
            try:
                yield 1
            except ValueError:
                yield 2

    done = []
    g = guarded()
    next(g)
    g.close()
    c = catching()
    next(c)
    thrown = c.throw(ValueError)
    squares = (v * v for v in (x, x + 1))
    return list(chain([1], (v for v in (2, 3)))), done, thrown, next(squares), list(squares), dict((k, v) for k, v in [("a", x)])


@program(X, torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()))
def modules_as_arguments(x, net):
    out = net(x)
    names = [n for n, _ in net.named_parameters()]
    kids = [type(m).__name__ for m in net.children()]
    sizes = {k: tuple(v.shape) for k, v in net.state_dict().items()}
    return out, names, kids, sizes, net.training, len(net), net[0].weight.sum(), isinstance(net[1], torch.nn.Tanh), list(net)[0] is net[0]


@program(X, Vec(X))
def object_argument(x, v):
    v.name = "changed"
    v.v = v.v + 1
    v.extra = [x]
    del v._cache
    return v.doubled + x, v
