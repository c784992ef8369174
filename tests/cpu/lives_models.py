# ruff: noqa  (programs as users write them)
"""Models and training helpers in the ways that users write them, each with several calls; run by tests/cpu/test_lives.py beside lives.py."""

from __future__ import annotations

import bisect
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import heapq
import inspect
import io
import itertools
import json
import logging
import math
import operator
import random
import re
import string
import sys
import textwrap
import time
import types
import typing
import warnings
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from typing import Any, Generic, NamedTuple, Optional, TypeVar

import torch
from lives import attempt, grid, life, told
from torch import Tensor, nn
from torch.nn import functional as F


def fixed(module):
    """Parameters that do not depend on the order of draws."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.cos(torch.arange(float(p.numel())) + i).reshape(p.shape) / 2)
    return module


# ---------------------------------------------------------------- configurations and registries


@dataclasses.dataclass
class ModelConfig:
    width: int = 4
    depth: int = 2
    act: str = "relu"
    drop: float = 0.0
    norm: dict = dataclasses.field(default_factory=lambda: {"kind": "layer", "eps": 1e-5})
    heads: tuple = (2, 1)

    def __post_init__(self):
        self.inner = self.width * 2

    @property
    def head_dim(self):
        return self.width // self.heads[0]

    def replace(self, **kw):
        return dataclasses.replace(self, **kw)


REGISTRY = {}


def register(name=None, **meta):
    def inner(cls):
        key = name or cls.__name__.lower()
        if key in REGISTRY:
            raise KeyError(key)
        REGISTRY[key] = cls
        cls.meta = meta
        return cls

    return inner


@register("relu", smooth=False)
class ReluBlock(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.fc = cfg, nn.Linear(cfg.width, cfg.width)

    def forward(self, x):
        return F.relu(self.fc(x)) if not self.meta["smooth"] else x


@register(smooth=True)
class Tanh(ReluBlock):
    def forward(self, x):
        return super().forward(x) + torch.tanh(self.fc(x)) * self.cfg.head_dim


@life
def configured_models(compiled):
    class Net(nn.Module):
        def __init__(self, cfg: ModelConfig):
            super().__init__()
            self.cfg = cfg
            self.blocks = nn.ModuleList(REGISTRY[cfg.act if i % 2 == 0 else "tanh"](cfg) for i in range(cfg.depth))
            self.norm = {"layer": nn.LayerNorm, "none": lambda *a, **k: nn.Identity()}[cfg.norm["kind"]](cfg.width, eps=cfg.norm["eps"])

        def forward(self, x, **over):
            cfg = self.cfg.replace(**over) if over else self.cfg
            for i, b in enumerate(self.blocks[: cfg.depth]):
                x = b(x) + i
            return self.norm(x) * cfg.inner, cfg

    net = fixed(Net(ModelConfig()))
    f = compiled(net)
    out = [f(grid(2, 4)), f(grid(2, 4), depth=1), f(grid(3, 4), width=8, act="tanh")]
    net.cfg.depth = 1
    out.append(f(grid(2, 4)))
    net.cfg.norm["eps"] = 1.0
    return out + [f(grid(2, 4)), attempt(f, grid(2, 4), wrong=1), sorted(REGISTRY)]


@life
def config_from_json(compiled):
    text = '{"layers": [{"kind": "scale", "by": 2.5}, {"kind": "shift", "by": [1, 2]}, {"kind": "pow", "by": null}], "name": "n"}'

    @compiled
    def f(x, text):
        cfg = json.loads(text)
        for layer in cfg["layers"]:
            match layer:
                case {"kind": "scale", "by": float(by)}:
                    x = x * by
                case {"kind": "shift", "by": [first, *rest]}:
                    x = x + first - sum(rest)
                case {"kind": str(kind), **others}:
                    x = x**2
                    cfg["name"] += kind
        return x, cfg["name"], json.dumps(cfg["layers"][0])

    return [f(grid(3), text), f(grid(3), text.replace("2.5", "3.5")), attempt(f, grid(3), "{")]


@life
def frozen_config_as_key(compiled):
    @dataclasses.dataclass(frozen=True, order=True)
    class Key:
        n: int
        kind: str = "a"

    table = {Key(1): 10.0, Key(2, "b"): 20.0}
    cache = {}

    @compiled
    def f(x, k):
        if k not in cache:
            cache[k] = len(cache)
        return x * table.get(k, 1.0) + cache[k], hash(k) == hash(Key(k.n, k.kind)), k < Key(2), k in table

    return [f(grid(2), Key(1)), f(grid(2), Key(2, "b")), f(grid(2), Key(1)), f(grid(2), Key(3)), cache, attempt(lambda: setattr(Key(1), "n", 2))]


@life
def enums_switch(compiled):
    class Act(str, enum.Enum):
        RELU = "relu"
        GELU = "gelu"

        @classmethod
        def parse(cls, v):
            return v if isinstance(v, cls) else cls(v.lower())

        def fn(self):
            return {Act.RELU: F.relu, Act.GELU: F.gelu}[self]

    class Flag(enum.IntFlag):
        NORM = enum.auto()
        BIAS = enum.auto()
        BOTH = NORM | BIAS

    @compiled
    def f(x, act, flags):
        a = Act.parse(act)
        y = a.fn()(x)
        if flags & Flag.NORM:
            y = y / (y.norm() + 1)
        if Flag.BIAS in flags:
            y = y + 1
        return y, a.value, a.name, f"{a.value}-{flags.value}", a == "relu", [m.name for m in Act], flags == Flag.BOTH

    return [f(grid(3), "relu", Flag.NORM), f(grid(3), Act.GELU, Flag.BOTH), f(grid(3), "RELU", Flag(0)), attempt(f, grid(3), "swish", Flag.BIAS)]


# ---------------------------------------------------------------- walking containers of modules


@life
def module_dict_walk(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleDict({"cls": nn.Linear(3, 2), "box": nn.Linear(3, 4)})
            self.scale = nn.ParameterDict({"cls": nn.Parameter(torch.ones(2)), "box": nn.Parameter(torch.ones(4) * 2)})
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(3) * i) for i in range(3)])
            self.order = ["box", "cls"]

        def forward(self, x, only=None):
            out = {}
            for name, head in self.heads.items():
                if only and name not in only:
                    continue
                out[name] = head(x) * self.scale[name]
            for w in self.weights:
                x = x + w
            for i, w in enumerate(self.weights[1:], 1):
                x = x * (w + i)
            out["x"], out["n"] = x, len(self.weights)
            out["order"] = [k for k in self.order if k in self.heads]
            return out

    net = fixed(Net())
    f = compiled(net)
    out = [f(grid(2, 3)), f(grid(2, 3), only={"cls"}), f(grid(3, 3), only=("box",))]
    net.heads["new"] = nn.Identity()
    net.scale["new"] = nn.Parameter(torch.ones(3))
    out.append(f(grid(2, 3)))
    del net.heads["cls"]
    net.weights.append(nn.Parameter(torch.ones(3)))
    return out + [f(grid(2, 3)), list(net.heads)]


@life
def named_modules_in_forward(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())
            self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))

        def penalty(self):
            return sum(p.pow(2).sum() for n, p in self.named_parameters() if n.endswith("weight"))

        def forward(self, x):
            names = [n for n, m in self.named_modules() if isinstance(m, nn.Linear)]
            for child in self.children():
                x = child(x)
            total = sum(p.numel() for p in self.parameters() if p.requires_grad)
            return x * self.mask, self.penalty(), names, total, dict(self.named_buffers())["mask"] is self.mask, next(self.parameters()).dtype

    net = fixed(Net())
    f = compiled(net)
    out = [f(grid(2, 3))]
    net.b.add_module("2", nn.Linear(3, 3, bias=False).requires_grad_(False))
    fixed(net)
    return out + [f(grid(2, 3)), f(grid(1, 3))]


@life
def blocks_by_getattr(compiled):
    class Net(nn.Module):
        def __init__(self, n=3):
            super().__init__()
            self.n = n
            for i in range(n):
                setattr(self, f"block{i}", nn.Linear(3, 3))
                self.add_module(f"norm_{i}", nn.LayerNorm(3))
            self.get_submodule("block0").tag = "first"

        def forward(self, x, upto=None):
            for i in range(self.n if upto is None else upto):
                x = getattr(self, f"block{i}")(x)
                if hasattr(self, f"norm_{i}") and i % 2 == 0:
                    x = getattr(self, f"norm_{i}")(x)
            return x, getattr(self, "missing", None), getattr(self.block0, "tag", "?"), self.get_parameter("block0.weight").shape

    net = fixed(Net())
    f = compiled(net)
    out = [f(grid(2, 3)), f(grid(2, 3), 2), f(grid(2, 3), 1)]
    del net.norm_0
    net.missing = 5
    return out + [f(grid(2, 3)), attempt(f, grid(2, 3), 4)]


@life
def tree_of_modules(compiled):
    class Node(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.kids = nn.ModuleList([Node(depth - 1) for _ in range(2)] if depth else [])
            self.visits = 0

        def forward(self, x, path=()):
            self.visits += 1
            y = torch.tanh(self.fc(x))
            found = {path: y.sum()}
            for i, kid in enumerate(self.kids):
                z, more = kid(y, path + (i,))
                y = y + z
                found |= more
            return y, found

    net = fixed(Node(2))
    f = compiled(net)
    return [f(grid(1, 2)), f(grid(2, 2)), net.visits, net.kids[0].kids[1].visits, f(grid(1, 2))]


@life
def recursion_over_trees(compiled):
    @compiled
    def f(tree, x):
        def walk(node, depth=0):
            if node is None:
                return x
            if isinstance(node, (list, tuple)):
                return type(node)(walk(v, depth + 1) for v in node)
            if isinstance(node, dict):
                return {k: walk(v, depth + 1) for k, v in node.items()}
            if torch.is_tensor(node):
                return node * depth
            return node

        def leaves(node):
            if isinstance(node, dict):
                for v in node.values():
                    yield from leaves(v)
            elif isinstance(node, (list, tuple)):
                for v in node:
                    yield from leaves(v)
            else:
                yield node

        out = walk(tree)
        return out, sum(v.sum() for v in leaves(out) if torch.is_tensor(v)), len(list(leaves(tree)))

    return [f({"a": [grid(2), None], "b": (1, {"c": grid(2)})}, grid(2)), f([grid(2)], grid(2)), f(grid(3), grid(3)), f({"a": [grid(2), None], "b": (2, {"c": grid(2)})}, grid(2))]


# ---------------------------------------------------------------- caches, properties, decorators


@life
def property_caches(compiled):
    class Rope(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim, self._cos, self._len = dim, None, 0

        @functools.cached_property
        def inv(self):
            return 1.0 / (10.0 ** (torch.arange(0, self.dim, 2).float() / self.dim))

        @property
        def table(self):
            if self._cos is None:
                self.grow(4)
            return self._cos

        def grow(self, n):
            self._len = n
            self._cos = torch.outer(torch.arange(float(n)), self.inv).cos()

        def forward(self, x):
            n = x.shape[0]
            if n > self._len:
                self.grow(max(n, 2 * self._len))
            return x * self.table[:n], self._len

    rope = Rope(4)
    f = compiled(rope)
    return [f(grid(2, 2)), f(grid(3, 2)), f(grid(6, 2)), f(grid(9, 2)), f(grid(2, 2)), rope._cos.shape, "inv" in vars(rope)]


@life
def masks_cached_by_size(compiled):
    class Causal(nn.Module):
        cache: dict = {}

        @classmethod
        def mask(cls, n, device):
            key = (n, str(device))
            if key not in cls.cache:
                cls.cache[key] = torch.triu(torch.full((n, n), float("-inf")), 1)
            return cls.cache[key]

        def forward(self, s):
            return (s + self.mask(s.shape[-1], s.device)).softmax(-1)

    f = compiled(Causal())
    return [f(grid(2, 2)), f(grid(3, 3)), f(grid(2, 2)), sorted(Causal.cache), f(grid(4, 4)), len(Causal.cache)]


@life
def decorators_with_state(compiled):
    class counted:
        def __init__(self, fn):
            functools.update_wrapper(self, fn)
            self.fn, self.n = fn, 0

        def __call__(self, *a, **k):
            self.n += 1
            return self.fn(*a, **k)

        def __get__(self, obj, owner):
            return self if obj is None else functools.partial(self, obj)

    def memo(fn):
        store = {}

        @functools.wraps(fn)
        def inner(n, *, scale=1):
            if (n, scale) not in store:
                store[n, scale] = fn(n, scale=scale)
            return store[n, scale]

        inner.store = store
        return inner

    def retry(times):
        def deco(fn):
            @functools.wraps(fn)
            def inner(*a, **k):
                for i in range(times):
                    try:
                        return fn(*a, attempt=i, **k)
                    except ValueError:
                        if i == times - 1:
                            raise

            return inner

        return deco

    @memo
    def table(n, *, scale):
        return torch.arange(float(n)) * scale

    class Net(nn.Module):
        @counted
        def step(self, x, k=1):
            return x * k

        @retry(3)
        def flaky(self, x, need, attempt):
            if attempt < need:
                raise ValueError(attempt)
            return x + attempt

        def forward(self, x, need=1):
            return self.flaky(self.step(self.step(x), k=3), need=need) + table(x.shape[0], scale=2), Net.step.n, self.flaky.__name__

    net = Net()
    f = compiled(net)
    return [f(grid(2)), f(grid(3)), f(grid(2), need=0), Net.step.n, sorted(table.store), attempt(f, grid(2), 9), Net.step.n]


@life
def lru_caches_of_shapes(compiled):
    log = []

    @functools.lru_cache(maxsize=None)
    def spans(n, k):
        log.append((n, k))
        return tuple((i, min(i + k, n)) for i in range(0, n, k))

    class Net(nn.Module):
        @staticmethod
        @functools.lru_cache
        def factor(n):
            log.append(n)
            return math.isqrt(n)

        def forward(self, x, k):
            parts = [x[a:b].sum() for a, b in spans(x.shape[0], k)]
            return torch.stack(parts) * self.factor(x.shape[0])

    f = compiled(Net())
    return [f(grid(4), 2), f(grid(5), 2), f(grid(4), 2), f(grid(4), 3), log, spans.cache_info()[:2]]


@life
def singledispatch_on_types(compiled):
    @functools.singledispatch
    def norm(v, *, p=2):
        raise TypeError(type(v).__name__)

    @norm.register
    def _(v: Tensor, *, p=2):
        return v.abs().pow(p).sum()

    @norm.register(list)
    @norm.register(tuple)
    def _(v, *, p=2):
        return sum(norm(x, p=p) for x in v)

    @norm.register
    def _(v: dict, *, p=2):
        return {k: norm(x, p=p) for k, x in v.items()}

    f = compiled(lambda v, p=2: norm(v, p=p))
    return [f(grid(3)), f([grid(2), (grid(2), grid(1))]), f({"a": grid(2)}, 3), attempt(f, 3), f(grid(3), 1)]


# ---------------------------------------------------------------- outputs


@life
def model_output_classes(compiled):
    class ModelOutput(OrderedDict):
        def __init_subclass__(cls):
            super().__init_subclass__()

        def __post_init__(self):
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if value is not None:
                    super().__setitem__(field.name, value)

        def __getitem__(self, k):
            return super().__getitem__(k) if isinstance(k, str) else self.to_tuple()[k]

        def __setattr__(self, name, value):
            if name in self.keys() and value is not None:
                super().__setitem__(name, value)
            super().__setattr__(name, value)

        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            super().__setattr__(key, value)

        def to_tuple(self):
            return tuple(self[k] for k in self.keys())

    @dataclasses.dataclass
    class Out(ModelOutput):
        loss: Optional[Tensor] = None
        logits: Tensor = None
        hidden: Optional[tuple] = None

    class Net(nn.Module):
        def forward(self, x, y=None, return_dict=True, hidden=False):
            h = (x, x * 2) if hidden else None
            loss = None if y is None else F.mse_loss(x, y)
            if not return_dict:
                return (x,) + ((h,) if hidden else ())
            out = Out(loss=loss, logits=x + 1, hidden=h)
            out.logits = out.logits * 2
            out["extra"] = x.shape[0]
            return out

    f = compiled(Net())
    outs = [f(grid(2)), f(grid(2), grid(2) + 1), f(grid(2), hidden=True), f(grid(2), return_dict=False, hidden=True)]
    return [(list(o.items()), o[0], o.to_tuple(), o.loss, vars(o), type(o).__name__) if isinstance(o, ModelOutput) else o for o in outs]


@life
def named_tuple_outputs(compiled):
    class Out(NamedTuple):
        y: Tensor
        aux: dict = {}
        n: int = 0

        @property
        def total(self):
            return self.y.sum() + self.n

        def scaled(self, k):
            return self._replace(y=self.y * k, n=self.n + 1)

    State = collections.namedtuple("State", "h c", defaults=[None])

    @compiled
    def f(x, s=None):
        s = State(x) if s is None else s
        h, c = s
        out = Out(h + x, n=x.shape[0]).scaled(2)
        return out, State(h=out.y, c=h if c is None else c + h), out.total, out._fields, Out._field_defaults["n"], out[:1], out.index(out.n)

    out, s, *rest = f(grid(2))
    return [out, s, rest, f(grid(2), s), f(grid(3)), f(grid(2), s._replace(c=grid(2)))]


@life
def dataclass_outputs(compiled):
    @dataclasses.dataclass
    class Stats:
        mean: Tensor
        std: Tensor = None
        extra: list = dataclasses.field(default_factory=list, repr=False)
        total: float = dataclasses.field(init=False, default=0.0)

        def __add__(self, other):
            return Stats(self.mean + other.mean, extra=self.extra + other.extra)

        def __iter__(self):
            return iter((self.mean, self.std))

    @dataclasses.dataclass(slots=True)
    class Small:
        a: Tensor
        b: int = 1

    @compiled
    def f(x, prev=None):
        s = Stats(x.mean(), x.std(), extra=[x.shape[0]])
        if prev is not None:
            s = s + prev
        mean, std = s
        s.total = s.total + len(s.extra)
        return s, dataclasses.asdict(Small(mean, 2))["b"], Small(x), [f.name for f in dataclasses.fields(s)], dataclasses.is_dataclass(s), std is None

    s = f(grid(3))
    return [s, f(grid(4), s[0]), f(grid(3), s[0])]


@life
def outputs_of_custom_containers(compiled):
    class Batch(UserDict):
        def to(self, dtype):
            return Batch({k: v.to(dtype) if torch.is_tensor(v) else v for k, v in self.data.items()})

        def __getattr__(self, k):
            try:
                return self.__dict__["data"][k]
            except KeyError:
                raise AttributeError(k) from None

    class Stack(UserList):
        def top(self):
            return self[-1]

    class Attr(dict):
        __getattr__ = dict.__getitem__
        __setattr__ = dict.__setitem__

    @compiled
    def f(b):
        b2 = b.to(torch.float64)
        s = Stack([b.x, b2.x])
        s.append(b["n"])
        a = Attr(x=b.x * 2)
        a.y = a.x + 1
        return b2, s, s.top(), a, a.y, len(b2), "x" in b2, attempt(lambda: b.zz)

    return [f(Batch(x=grid(2), n=3)), f(Batch(x=grid(3), n=4)), f(Batch({"x": grid(2), "n": 5, "zz": 1}))]


# ---------------------------------------------------------------- wrappers


@life
def keyword_forwarding_wrappers(compiled):
    class Base(nn.Module):
        def forward(self, x, *args, scale=1.0, **kwargs):
            for k, v in sorted(kwargs.items()):
                x = x + v
            return x * scale, args, kwargs

    class Wrapper(nn.Module):
        def __init__(self, inner, **defaults):
            super().__init__()
            self.inner, self.defaults = inner, defaults

        def forward(self, *args, **kwargs):
            allowed = {k: v for k, v in kwargs.items() if not k.startswith("_")}
            return self.inner(*args, **{**self.defaults, **allowed})

    class Outer(Wrapper):
        def __call__(self, *args, **kwargs):
            kwargs.setdefault("b", 2)
            return super().__call__(*args, **kwargs)

    net = Outer(Wrapper(Base(), scale=3.0), a=1)
    f = compiled(net)
    out = [f(grid(2)), f(grid(2), 5, scale=2.0), f(grid(2), _x=3, c=grid(2)), attempt(f)]
    net.defaults["a"] = 10
    return out + [f(grid(2)), f(grid(2), b=0)]


@life
def getattr_forwarding_wrapper(compiled):
    class Wrapper(nn.Module):
        def __init__(self, m):
            super().__init__()
            self.m = m

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("m"), name)

        def forward(self, x):
            return self.m(x) * self.gain + self.offset()

    class Inner(nn.Linear):
        gain = 2.0

        def offset(self):
            return self.bias.sum()

    net = Wrapper(fixed(Inner(3, 2)))
    f = compiled(net)
    out = [f(grid(1, 3)), f(grid(2, 3))]
    net.m.gain = 3.0
    out.append(f(grid(1, 3)))
    net.gain = 5.0
    return out + [f(grid(1, 3)), attempt(lambda: net.nothing), net.in_features]


@life
def call_overrides(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.fc = 0, nn.Linear(2, 2)

        def __call__(self, x, **kw):
            self.calls += 1
            x = x if x.dim() > 1 else x[None]
            out = super().__call__(x, **kw)
            return out.squeeze(0)

        def forward(self, x, k=1):
            return self.fc(x) * k

    class Fn:
        def __init__(self, k):
            self.k = k

        def __call__(self, x):
            self.k += 1
            return x * self.k

    net, fn = fixed(Net()), Fn(1)
    f, g = compiled(net), compiled(lambda x: fn(net(x)))
    return [f(grid(2)), f(grid(3, 2), k=2), net.calls, g(grid(2)), g(grid(2)), fn.k, net.calls]


@life
def descriptors_of_all_kinds(compiled):
    class Typed:
        def __init__(self, kind, default=None):
            self.kind, self.default = kind, default

        def __set_name__(self, owner, name):
            self.name = name

        def __get__(self, obj, owner=None):
            if obj is None:
                return self
            return obj.__dict__.get(self.name, self.default)

        def __set__(self, obj, value):
            if not isinstance(value, self.kind):
                raise TypeError(f"{self.name} wants {self.kind.__name__}")
            obj.__dict__[self.name] = value

        def __delete__(self, obj):
            obj.__dict__.pop(self.name)

    class lazy:
        def __init__(self, fn):
            self.fn, self.name = fn, fn.__name__

        def __get__(self, obj, owner):
            value = self.fn(obj)
            setattr(obj, self.name, value)
            return value

    class classprop:
        def __init__(self, fn):
            self.fn = fn

        def __get__(self, obj, owner):
            return self.fn(owner)

    class Thing:
        n = Typed(int, 1)
        w = Typed(Tensor)

        @lazy
        def table(self):
            return torch.arange(float(self.n))

        @classprop
        def label(cls):
            return cls.__name__.lower()

    @compiled
    def f(t, x):
        before = t.n
        t.n = t.n + 1
        t.w = x * t.n
        e = attempt(setattr, t, "n", "s")
        y = t.w + t.table.sum()
        del t.n
        return before, y, e, t.n, Thing.label, type(Thing.w).__name__

    t = Thing()
    return [f(t, grid(2)), vars(t), f(t, grid(2)), f(Thing(), grid(3))]


@life
def metaclasses_register(compiled):
    class Meta(type):
        made: list = []

        def __new__(mcs, name, bases, ns, tag=None, **kw):
            cls = super().__new__(mcs, name, bases, ns, **kw)
            cls.tag = tag or name
            mcs.made.append(cls)
            return cls

        def __call__(cls, *a, **k):
            obj = super().__call__(*a, **k)
            obj.ready = True
            return obj

        def __getitem__(cls, k):
            return next(c for c in Meta.made if c.tag == k)

        @property
        def count(cls):
            return len(cls.made)

    class Op(metaclass=Meta):
        def __init__(self, k):
            self.k = k

        def __call__(self, x):
            return x * self.k

    class Add(Op, tag="add"):
        def __call__(self, x):
            return x + self.k

    @compiled
    def f(x, tag, k):
        op = Op[tag](k)
        return op(x), op.ready, Op.count, type(op).tag, isinstance(op, Op)

    return [f(grid(2), "add", 2), f(grid(2), "Op", 3), f(grid(2), "add", 4), attempt(f, grid(2), "mul", 1)]


@life
def singletons_and_borgs(compiled):
    class Single:
        _it = None

        def __new__(cls):
            if cls._it is None:
                cls._it = super().__new__(cls)
                cls._it.n = 0
            return cls._it

    class Borg:
        _shared: dict = {}

        def __init__(self):
            self.__dict__ = self._shared

    @compiled
    def f(x):
        s = Single()
        s.n += 1
        return x * s.n, s is Single()

    def g(x):
        b = Borg()
        b.n = getattr(b, "n", 0) + 1
        return x * b.n

    g = compiled(g)
    return [f(grid(2)), f(grid(2)), Single().n, g(grid(2)), g(grid(2)), Borg._shared]


# ---------------------------------------------------------------- strings


@life
def einops_like(compiled):
    def rearrange(x, pattern, **sizes):
        left, right = (re.findall(r"\([^)]*\)|\S+", side) for side in pattern.split("->"))
        names, dims = [], []
        for token, n in zip(left, x.shape):
            group = token.strip("()").split()
            unknown = [g for g in group if g not in sizes]
            if len(unknown) > 1:
                raise ValueError(f"cannot tell {unknown} of {pattern!r}")
            rest = n
            for g in group:
                if g in sizes:
                    rest //= sizes[g]
            for g in group:
                names.append(g)
                dims.append(sizes.get(g, rest))
        x = x.reshape(dims)
        flat = [g for t in right for g in t.strip("()").split()]
        x = x.permute([names.index(g) for g in flat])
        shape, k = [], 0
        for t in right:
            group = t.strip("()").split()
            shape.append(math.prod(x.shape[k : k + len(group)]))
            k += len(group)
        return x.reshape(shape)

    @compiled
    def f(x, h):
        y = rearrange(x, "b (h d) -> b h d", h=h)
        return rearrange(y, "b h d -> (b d) h"), rearrange(x, "a b -> b a")

    return [f(grid(2, 6), 2), f(grid(3, 6), 3), f(grid(2, 4), 2), attempt(compiled(lambda x: rearrange(x, "(a b) c -> a b c")), grid(4, 2))]


@life
def formats_of_numbers(compiled):
    @compiled
    def f(x, n, p, name):
        parts = [f"{n:>6d}|{p:.3f}|{p:e}|{n:#x}|{n:,}|{name!r:^9}|{n/3:5.1%}", "%s %05d %-6.2f|" % (name, n, p), f"{x.shape} {x.dtype} {len(x)} {x.device}",
                 f"{n=} {name=!s}", f"{name:*^{n}}", "{:{w}.{p}f}".format(p, w=8, p=2), string.Template("$a-$b").substitute(a=n, b=name), name.upper().center(9, "-"), ", ".join(map(str, [n, p]))]
        return x * n, parts

    return [f(grid(2), 12, 0.5, "ab"), f(grid(3), 13, 0.25, "c"), f(grid(2), 14, 1e-9, "ab"), f(grid(2), 1234567, 3.0, "xyz")]


@life
def strings_select_layers(compiled):
    class Net(nn.Module):
        def __init__(self, spec):
            super().__init__()
            self.spec = spec
            self.layers = nn.ModuleDict()
            for i, part in enumerate(spec.split("-")):
                m = re.fullmatch(r"(?P<kind>[a-z]+)(?P<n>\d*)(?:x(\d+))?", part)
                if m is None:
                    raise ValueError(part)
                if m["kind"] == "fc":
                    self.layers[f"{i}_{part}"] = nn.Linear(4, int(m["n"]))
                else:
                    self.layers[f"{i}_{part}"] = getattr(nn, {"relu": "ReLU", "tanh": "Tanh"}[m["kind"]])()

        def forward(self, x, skip=""):
            for name, layer in self.layers.items():
                index, _, kind = name.partition("_")
                if skip and kind.startswith(skip):
                    continue
                x = layer(x)
            return x, "|".join(sorted(self.layers, key=lambda s: (s[-1], s))), re.sub(r"\d+", "#", self.spec)

    f = compiled(fixed(Net("fc4-relu-fc4-tanh")))
    return [f(grid(1, 4)), f(grid(1, 4), "tanh"), f(grid(2, 4), "fc"), attempt(Net, "fc4-?")]


# ---------------------------------------------------------------- logs and warnings


@life
def loggers_in_forward(compiled):
    text = io.StringIO()
    log = logging.getLogger("lives.models")
    log.handlers, log.propagate = [logging.StreamHandler(text)], False
    log.setLevel(logging.INFO)

    class Net(nn.Module):
        def forward(self, x):
            log.debug("not shown %s", x.shape)
            log.info("shape %s of %s", tuple(x.shape), type(self).__name__)
            if log.isEnabledFor(logging.DEBUG):
                log.debug("sum %f", x.sum().item())
            y = x * 2
            log.warning("done")
            return y

    f = compiled(Net())
    out = [f(grid(2)), f(grid(3))]
    log.setLevel(logging.DEBUG)
    out.append(f(grid(2)))
    log.disabled = True
    out.append(f(grid(2)))
    log.disabled = False
    return out + [text.getvalue()]


@life
def warnings_in_forward(compiled):
    class Net(nn.Module):
        warned = False

        def forward(self, x, old=None):
            if old is not None:
                warnings.warn("old is deprecated", DeprecationWarning, stacklevel=2)
                x = x + old
            if not self.warned:
                warnings.warn(f"first call with {tuple(x.shape)}")
                self.warned = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.warn("unseen")
            return x * 2

    net = Net()
    f = compiled(net)
    return [f(grid(2)), f(grid(2), 3), f(grid(2), old=4), net.warned]


@life
def progress_and_prints(compiled):
    class Meter:
        def __init__(self, name, fmt=":.2f"):
            self.name, self.fmt = name, fmt
            self.reset()

        def reset(self):
            self.val = self.avg = self.sum = self.count = 0

        def update(self, val, n=1):
            self.val = val
            self.sum += val * n
            self.count += n
            self.avg = self.sum / self.count

        def __str__(self):
            return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)

    meter = Meter("loss")

    @compiled
    def step(x, i):
        loss = (x**2).mean()
        meter.update(loss.item(), x.shape[0])
        if i % 2 == 0:
            print(f"[{i:03d}]", str(meter), sep=" | ", end=";\n")
        return loss

    return [step(grid(2), i) for i in range(4)] + [meter.count, round(meter.avg, 4)]


# ---------------------------------------------------------------- contexts


@life
def exit_stacks(compiled):
    log = []

    @contextlib.contextmanager
    def scope(name, fail=False):
        log.append(f"+{name}")
        try:
            yield name
        except KeyError:
            log.append("caught")
        finally:
            log.append(f"-{name}")

    @compiled
    def f(x, names, error=False):
        with contextlib.ExitStack() as stack:
            got = [stack.enter_context(scope(n)) for n in names]
            stack.callback(log.append, "callback")
            if x.dim() > 1:
                stack.enter_context(torch.no_grad())
            y = x * len(got)
            if error:
                raise KeyError("k")
        return y, torch.is_grad_enabled()

    return [f(grid(2), ("a", "b")), f(grid(1, 2), ("a",)), attempt(f, grid(2), ("c",), True), f(grid(2), ()), log]


@life
def contexts_that_set_state(compiled):
    class Settings:
        train = True
        stack: list = []

        @classmethod
        @contextlib.contextmanager
        def using(cls, **kw):
            old = {k: getattr(cls, k) for k in kw}
            cls.stack.append(old)
            for k, v in kw.items():
                setattr(cls, k, v)
            try:
                yield cls
            finally:
                for k, v in cls.stack.pop().items():
                    setattr(cls, k, v)

    @contextlib.contextmanager
    def eval_mode(m):
        was = m.training
        m.eval()
        try:
            yield m
        finally:
            m.train(was)

    drop = nn.Dropout(0.5)

    @compiled
    def f(x):
        with eval_mode(drop) as d, Settings.using(train=False):
            y = d(x) * (2 if Settings.train else 3)
        return y + Settings.train, drop.training

    return [f(grid(2)), f(grid(2)), drop.training, Settings.train, Settings.stack]


@life
def context_decorators(compiled):
    log = []

    class timed(contextlib.ContextDecorator):
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            log.append(self.name)
            return self

        def __exit__(self, *exc):
            log.append(exc[0].__name__ if exc[0] else None)
            return False

    @timed("inner")
    def inner(x):
        return x * 2

    @torch.no_grad()
    def frozen(x):
        return x * 3

    @compiled
    @timed("outer")
    def f(x):
        return inner(x) + frozen(x)

    return [f(grid(2).requires_grad_()).requires_grad, f(grid(3)), log]


# ---------------------------------------------------------------- iterators and algorithms


@life
def generators_in_forward(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def states(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                cut = yield i, x
                if cut:
                    return
            yield -1, x

        def forward(self, x, stop=None):
            found, it = {}, self.states(x)
            try:
                i, h = next(it)
                while True:
                    found[i] = h
                    i, h = it.send(i == stop)
            except StopIteration as e:
                found["value"] = e.value
            return found, sum(v.sum() for v in found.values() if v is not None), [*itertools.takewhile(lambda k: k != 1, found)]

    f = compiled(fixed(Net()))
    return [f(grid(1, 2)), f(grid(1, 2), 1), f(grid(2, 2), 0)]


@life
def windows_and_groups(compiled):
    @compiled
    def f(xs, k):
        pairs = [a - b for a, b in itertools.pairwise(xs)]
        groups = {key: torch.stack(list(g)) for key, g in itertools.groupby(xs, key=lambda t: t.shape[0])}
        win = deque(maxlen=k)
        sums = []
        for x in xs:
            win.append(x)
            if len(win) == k:
                sums.append(sum(win))
        flat = list(itertools.chain.from_iterable(zip(xs, reversed(xs))))
        best = [i for i, _ in sorted(enumerate(xs), key=lambda p: (-p[0] % 3, p[0]))]
        return pairs, groups, sums, flat[:3], best, list(itertools.accumulate(xs, lambda a, b: a * b))[-1], [*itertools.islice(itertools.count(k), 0, 6, 2)], list(itertools.zip_longest("ab", [1]))

    return [f([grid(2) + i for i in range(4)], 2), f([grid(2) + i for i in range(5)], 3), f([grid(3)] * 2, 1)]


@life
def heaps_and_bisection(compiled):
    @compiled
    def f(x, scores):
        heap = []
        for i, s in enumerate(scores):
            heapq.heappush(heap, (-s, i))
        top = [heapq.heappop(heap)[1] for _ in range(2)]
        edges = sorted(scores)
        at = bisect.bisect_right(edges, 2)
        bisect.insort(edges, 2)
        return x[top[0]] + x[top[1]], top, at, edges, heapq.nlargest(2, scores), heapq.nsmallest(1, scores, key=lambda s: -s), heap

    return [f(grid(4), [3, 1, 2, 5]), f(grid(4), [1, 9, 2, 3]), f(grid(4), (4, 4, 4, 4))]


@life
def counters_and_default_dicts(compiled):
    @compiled
    def f(tokens, x):
        c = Counter(tokens)
        c.update("ab")
        by = defaultdict(list)
        for t in tokens:
            by[t].append(x * c[t])
        deep = defaultdict(lambda: defaultdict(int))
        for t, n in c.most_common(2):
            deep[t]["n"] += n
        view = ChainMap({"k": 1}, dict(c))
        return {k: torch.stack(v).sum(0) for k, v in by.items()}, dict(c), c.total(), {k: dict(v) for k, v in deep.items()}, view["k"] + view["a"], sorted(by), c - Counter("a"), by.get("zz")

    return [f("aba", grid(2)), f("bb", grid(2)), f(["x", "a"], grid(3)), f("", grid(2))]


@life
def beam_search(compiled):
    @compiled
    def step(logp, beams, k):
        cands = []
        for seq, score in beams:
            vals, idx = logp[seq[-1]].topk(k)
            for v, i in zip(vals.tolist(), idx.tolist()):
                cands.append((seq + [i], round(score + v, 4)))
        cands.sort(key=lambda c: c[1], reverse=True)
        return cands[:k]

    logp, beams = torch.sin(grid(4, 4) * 5), [([0], 0.0)]
    out = []
    for _ in range(3):
        beams = step(logp, beams, 2)
        out.append(beams)
    return out


@life
def star_unpacking(compiled):
    @compiled
    def f(*xs, k=1, **kw):
        first, *mid, last = xs
        (a, b), c, *rest = (first, last), k, *mid, *kw.values()
        shape = *first.shape[:-1], -1
        d = {**kw, "k": k, **{str(i): m for i, m in enumerate(mid)}}
        return a + b * c, rest, first.reshape(*shape), torch.cat([*xs, first]), d, max(*first.shape, k), print(*first.shape, sep="x")

    return [f(grid(2, 3), grid(2, 3)), f(grid(2, 2), grid(2, 2), grid(2, 2), k=2, z=grid(1)), attempt(f, grid(2, 2)), f(grid(1, 2), grid(1, 2), y=3)]


@life
def walrus_and_comprehensions(compiled):
    @compiled
    def f(xs, n):
        if (total := sum(x.sum() for x in xs)).dim() == 0 and (m := len(xs)) > 1:
            n += m
        kept = [y for x in xs if (y := x * n).shape[0] > 1]
        nested = [[a * b for b in range(2)] for a in range(n) if a % 2]
        table = {i: j for i, j in zip("abc", (v + n for v in range(3)))}
        while (n := n - 1) > 3:
            total = total + n
        return total, kept, nested, table, {x.shape[0] for x in xs}, y if kept else None

    return [f([grid(2), grid(3)], 3), f([grid(1)], 6), f([grid(2), grid(1), grid(4)], 2)]


@life
def match_on_everything(compiled):
    class Shape:
        __match_args__ = ("kind", "n")

        def __init__(self, kind, n):
            self.kind, self.n = kind, n

    @compiled
    def f(v, x):
        match v:
            case Tensor() as t if t.dim() == 1:
                return t * 2, "vector"
            case Tensor(shape=(a, b)):
                return v.sum() * a * b, "matrix"
            case Shape("sq", n) | Shape(n=n, kind="rect") if n > 1:
                return x * n, "shape"
            case Shape():
                return x, "other shape"
            case [Tensor() as a, *rest] if rest:
                return a + len(rest), "list"
            case {"op": "add" | "plus", "by": by, **more}:
                return x + by, sorted(more)
            case (int() | float()) as k:
                return x * k, "number"
            case str() as s if s.isidentifier():
                return x, s
            case None | [] | "":
                return x, "empty"
            case _:
                return x, type(v).__name__

    values = [grid(2), grid(2, 3), Shape("sq", 3), Shape("rect", 2), Shape("sq", 1), [grid(2), 1], {"op": "plus", "by": 2, "z": 1}, 3, 2.5, "ab", "", None, [], [1], {}, {"op": "x"}, 3]
    return [f(v, grid(2)) for v in values]


# ---------------------------------------------------------------- copies, randomness, time, counters


@life
def copies_in_forward(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.opts = nn.Linear(2, 2), {"k": [1, 2], "t": torch.ones(2)}

        def forward(self, x):
            opts = copy.deepcopy(self.opts)
            opts["k"].append(3)
            opts["t"] += 1
            shallow = copy.copy(self.opts)
            shallow["k"].append(9) if len(shallow["k"]) < 4 else None
            return self.fc(x) + opts["t"], opts["k"], shallow["t"] is self.opts["t"]

    net = fixed(Net())
    f = compiled(net)
    out = [f(grid(1, 2)), f(grid(1, 2)), f(grid(1, 2)), net.opts]
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.fc.weight.zero_()
    return out + [compiled(twin)(grid(1, 2)), f(grid(1, 2)), copy.deepcopy(f)(grid(1, 2))]


@life
def modules_copied_in_forward(compiled):
    class Ema(nn.Module):
        def __init__(self, m):
            super().__init__()
            self.m, self.shadow = m, None

        def forward(self, x):
            if self.shadow is None:
                self.shadow = copy.deepcopy(self.m)
                for p in self.shadow.parameters():
                    p.requires_grad_(False)
            with torch.no_grad():
                for a, b in zip(self.shadow.parameters(), self.m.parameters()):
                    a.mul_(0.5).add_(b, alpha=0.5)
            return self.m(x), self.shadow(x)

    ema = Ema(fixed(nn.Linear(2, 2)))
    f = compiled(ema)
    out = [f(grid(1, 2))]
    with torch.no_grad():
        ema.m.weight.add_(1)
    return out + [f(grid(1, 2)), f(grid(2, 2)), [p.requires_grad for p in ema.shadow.parameters()], ema.shadow.weight]


@life
def random_choices(compiled):
    rng = random.Random(3)

    @compiled
    def f(x, p):
        if random.random() < p:
            x = x + random.randint(1, 5)
        ops = [torch.sin, torch.cos, torch.tanh]
        random.shuffle(ops)
        y = ops[0](x) * rng.choice([1, 2, 3]) + torch.rand(2)
        return y, random.sample(range(9), 2), rng.random(), torch.randint(0, 9, (2,)), random.gauss(0, 1)

    random.seed(4)
    out = [f(grid(2), 0.5) for _ in range(4)]
    random.seed(4)
    torch.manual_seed(9)
    return out + [f(grid(2), 0.5), random.random(), torch.rand(1)]


@life
def time_is_passed(compiled):
    spent = []

    def timed(fn):
        @functools.wraps(fn)
        def inner(*a, **k):
            start = time.perf_counter()
            try:
                return fn(*a, **k)
            finally:
                spent.append((start, time.perf_counter() - start))

        return inner

    @compiled
    @timed
    def f(x):
        return x * 2

    out = [f(grid(2)), f(grid(2)), f(grid(3))]
    return out + [len(spent), all(s >= 0 for _, s in spent), len({at for at, _ in spent}) == 3]  # no clock ticks between two ends of a call


STEP = 0
SEEN = []


@life
def global_counters(compiled):
    global STEP
    STEP = 0
    SEEN.clear()

    def bump():
        global STEP
        STEP += 1
        return STEP

    @compiled
    def f(x):
        SEEN.append(x.shape[0])
        n = bump()
        return x * n + len(SEEN), STEP

    out = [f(grid(2)), f(grid(2)), f(grid(3))]
    STEP = 10
    return out + [f(grid(2)), STEP, list(SEEN)]


@life
def nonlocal_counters(compiled):
    def make():
        n, history = 0, []

        def step(x):
            nonlocal n
            n += x.dim()
            history.append(n)
            return x * n

        def reset():
            nonlocal n
            n = 0
            history.clear()

        return step, reset, lambda: (n, list(history))

    step, reset, state = make()
    f = compiled(step)
    out = [f(grid(2)), f(grid(2, 2)), state()]
    reset()
    return out + [f(grid(2)), state(), f(grid(2)), state()]


@life
def mutable_defaults(compiled):
    @compiled
    def f(x, seen=[], opts={"k": 1}, *, log=set()):
        seen.append(x.shape[0])
        opts["k"] += 1
        log.add(x.dim())
        return x * opts["k"], len(seen), sorted(log)

    return [f(grid(2)), f(grid(2)), f(grid(2), []), f(grid(2, 2)), f(grid(2), opts={"k": 5}), inspect.unwrap(f).__defaults__, inspect.unwrap(f).__kwdefaults__]


# ---------------------------------------------------------------- classes


@life
def generic_and_protocol_classes(compiled):
    T = TypeVar("T")

    @typing.runtime_checkable
    class Scales(typing.Protocol):
        def scale(self, x): ...

    class Box(Generic[T]):
        def __init__(self, v: T):
            self.v = v

        def map(self, fn) -> "Box":
            return Box(fn(self.v))

        def __class_getitem__(cls, k):
            return super().__class_getitem__(k)

    class By2:
        def scale(self, x):
            return x * 2

    @compiled
    def f(x, s):
        b = Box[int](x).map(torch.sin).map(lambda v: v + 1)
        y = s.scale(b.v) if isinstance(s, Scales) else b.v
        return y, isinstance(b, Box), typing.get_origin(Optional[int]) is typing.Union

    return [f(grid(2), By2()), f(grid(2), 3), f(grid(3), By2())]


@life
def abstract_bases_and_mixins(compiled):
    import abc

    class Base(abc.ABC, nn.Module):
        registry: dict = {}

        def __init__(self, dim, **kw):
            super().__init__(**kw)
            self.dim = dim

        def __init_subclass__(cls, key=None, **kw):
            super().__init_subclass__(**kw)
            Base.registry[key or cls.__name__] = cls

        @abc.abstractmethod
        def mix(self, x): ...

        @property
        @abc.abstractmethod
        def gain(self): ...

        def forward(self, x):
            return self.mix(x) * self.gain

    class Logs:
        def forward(self, x):
            self.count = getattr(self, "count", 0) + 1
            return super().forward(x)

    class Doubles:
        def mix(self, x):
            return super().mix(x) * 2

    class Leaf(Base):
        def mix(self, x):
            return x + self.dim

        @property
        def gain(self):
            return 3

    class Final(Logs, Doubles, Leaf, key="final"):
        pass

    m = Base.registry["final"](2)
    f = compiled(m)
    return [f(grid(2)), f(grid(2)), m.count, sorted(Base.registry), attempt(Base, 1), [c.__name__ for c in Final.__mro__[:4]]]


@life
def operators_overloaded(compiled):
    @functools.total_ordering
    class Vec:
        def __init__(self, *xs):
            self.xs = xs

        def __add__(self, o):
            if not isinstance(o, Vec):
                return NotImplemented
            return Vec(*(a + b for a, b in zip(self.xs, o.xs, strict=True)))

        def __mul__(self, k):
            return Vec(*(a * k for a in self.xs))

        __rmul__ = __mul__

        def __neg__(self):
            return self * -1

        def __iadd__(self, o):
            self.xs = tuple(a + 1 for a in self.xs)
            return self

        def __matmul__(self, o):
            return sum(a * b for a, b in zip(self.xs, o.xs))

        def __eq__(self, o):
            return isinstance(o, Vec) and len(self.xs) == len(o.xs)

        def __lt__(self, o):
            return len(self.xs) < len(o.xs)

        def __hash__(self):
            return len(self.xs)

        def __len__(self):
            return len(self.xs)

        def __getitem__(self, i):
            return Vec(*self.xs[i]) if isinstance(i, slice) else self.xs[i]

        def __contains__(self, v):
            return any(v is x for x in self.xs)

        def __bool__(self):
            return len(self.xs) > 1

        def __repr__(self):
            return f"Vec{len(self)}"

        def __call__(self, i):
            return self[i]

    @compiled
    def f(x, n):
        v = Vec(*(x + i for i in range(n)))
        w = 2 * v + -v
        w += v
        tests = v == w, v != Vec(x), Vec(x) < v, v >= Vec(x), bool(Vec(x)), v.xs[0] in v, x in v, str(v), f"{v!r:>6}", len(v[1:]), hash(v)
        return w.xs, v @ w, tests, v(0), attempt(lambda: v + 1), attempt(lambda: v < 3), [a.shape for a in v], sorted([v, Vec(x)])[0].xs, {v: 1}.get(w)

    return [f(grid(2), 2), f(grid(2), 3), f(grid(3), 2)]


@life
def setattr_overrides_in_modules(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = []
            self.fc = nn.Linear(2, 2)

        def __setattr__(self, name, value):
            if name != "log" and "log" in self.__dict__:
                self.log.append(name)
            super().__setattr__(name, value)

        def forward(self, x):
            self.last = x.shape[0]
            self.out = self.fc(x)
            if hasattr(self, "gone"):
                del self.gone
            return self.out * self.last

    m = fixed(Net())
    f = compiled(m)
    out = [f(grid(1, 2)), list(m.log), f(grid(2, 2)), m.last]
    m.gone = 3
    return out + [f(grid(2, 2)), m.log, hasattr(m, "gone"), m.out.shape]


@life
def weak_caches(compiled):
    class Owner:
        pass

    keys, values = weakref.WeakKeyDictionary(), weakref.WeakValueDictionary()
    a, b = Owner(), Owner()

    @compiled
    def f(o, x):
        if o not in keys:
            keys[o] = len(keys) + 1
        values["last"] = o
        return x * keys[o], values.get("last") is o, len(keys)

    out = [f(a, grid(2)), f(b, grid(2)), f(a, grid(2))]
    del b
    return out + [len(keys), f(a, grid(3))]


@life
def getters_and_reducers(compiled):
    class P:
        def __init__(self, x, n):
            self.x, self.n = x, n

        def times(self, k):
            return self.x * k

    @compiled
    def f(ps):
        xs = list(map(operator.attrgetter("x"), ps))
        by = sorted(ps, key=operator.attrgetter("n"), reverse=True)
        rows = [(p.n, p.x) for p in ps]
        total = functools.reduce(operator.add, map(operator.itemgetter(1), rows))
        twice = list(map(operator.methodcaller("times", 2), ps))
        order = sorted([3, 1, 2], key=functools.cmp_to_key(lambda a, b: b - a))
        return total, [p.n for p in by], twice, order, functools.reduce(lambda a, p: a + p.n, ps, 10), max(ps, key=lambda p: p.n).x is xs[-1], divmod(sum(p.n for p in ps), 2), operator.mul(xs[0], 3)

    return [f([P(grid(2), 1), P(grid(2) + 1, 2)]), f([P(grid(2), 4), P(grid(2) + 1, 5), P(grid(2), 9)]), attempt(f, [])]


# ---------------------------------------------------------------- models


@life
def mixture_of_experts(compiled):
    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3))
            self.register_buffer("load", torch.zeros(3))

        def forward(self, x, k=2):
            w, idx = self.gate(x).softmax(-1).topk(k, -1)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                rows, slot = torch.where(idx == e)
                if rows.numel() == 0:
                    continue
                out.index_add_(0, rows, expert(x[rows]) * w[rows, slot, None])
                self.load[e] += rows.numel()
            return out

    m = fixed(Moe())
    f = compiled(m)
    return [f(grid(5, 4)), f(grid(3, 4) * -1), m.load, f(grid(2, 4), k=1)]


@life
def vector_quantizer(compiled):
    class Vq(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.eye(3))
            self.register_buffer("ema", torch.ones(3))

        def forward(self, x):
            idx = torch.cdist(x, self.codes).argmin(-1)
            hot = F.one_hot(idx, 3).type_as(x)
            if self.training:
                with torch.no_grad():
                    self.ema.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                    self.codes.lerp_((hot.t() @ x) / self.ema[:, None], 0.5)
            q = self.codes[idx]
            return x + (q - x).detach(), idx, F.mse_loss(q.detach(), x)

    m = Vq()
    f = compiled(m)
    out = [f(grid(4, 3)), f(grid(4, 3) + 1), m.codes.clone(), m.ema.clone()]
    m.eval()
    return out + [f(grid(4, 3)), m.codes]


@life
def spectral_power_iteration(compiled):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(grid(3, 2))
            self.register_buffer("u", F.normalize(torch.ones(3), dim=0))
            self.steps = 1

        def forward(self, x):
            w = self.weight
            with torch.no_grad():
                u = self.u
                for _ in range(self.steps if self.training else 0):
                    v = F.normalize(w.t() @ u, dim=0)
                    u = F.normalize(w @ v, dim=0)
                self.u.copy_(u)
                v = F.normalize(w.t() @ u, dim=0)
            return x @ (w / torch.dot(u, w @ v))

    m = Spectral()
    f = compiled(m)
    out = [f(grid(1, 3)), m.u.clone(), f(grid(1, 3)), m.u.clone()]
    m.steps = 3
    out += [f(grid(1, 3)), m.u.clone()]
    m.eval()
    return out + [f(grid(2, 3)), m.u]


@life
def window_attention(compiled):
    def partition(x, w):
        b, h, wd, c = x.shape
        ph, pw = (w - h % w) % w, (w - wd % w) % w
        x = F.pad(x, (0, 0, 0, pw, 0, ph))
        hh, ww = h + ph, wd + pw
        x = x.view(b, hh // w, w, ww // w, w, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, c)
        return x, (hh, ww)

    def unpartition(win, w, padded, hw):
        (hh, ww), (h, wd) = padded, hw
        b = win.shape[0] // (hh * ww // w // w)
        x = win.view(b, hh // w, ww // w, w, w, -1).permute(0, 1, 3, 2, 4, 5).reshape(b, hh, ww, -1)
        return x[:, :h, :wd].contiguous() if hh > h or ww > wd else x

    @compiled
    def f(x, w):
        win, padded = partition(x, w)
        att = (win @ win.transpose(-1, -2)).softmax(-1) @ win
        return unpartition(att, w, padded, x.shape[1:3]), padded

    return [f(grid(1, 4, 4, 2), 2), f(grid(1, 5, 3, 2), 2), f(grid(2, 3, 3, 2), 3), f(grid(1, 4, 4, 2), 3)]


@life
def position_tables(compiled):
    class Bias(nn.Module):
        def __init__(self, buckets=8, far=16):
            super().__init__()
            self.emb, self.buckets, self.far = nn.Embedding(buckets, 2), buckets, far

        @staticmethod
        def bucket(rel, buckets, far):
            n = buckets // 2
            ret = (rel > 0).long() * n
            rel = rel.abs()
            exact = n // 2
            large = exact + (torch.log(rel.float() / exact) / math.log(far / exact) * (n - exact)).long()
            return ret + torch.where(rel < exact, rel, torch.min(large, torch.full_like(large, n - 1)))

        def forward(self, q, k=None):
            k = q if k is None else k
            rel = torch.arange(k)[None] - torch.arange(q)[:, None]
            return self.emb(self.bucket(rel, self.buckets, self.far)).permute(2, 0, 1)

    m = fixed(Bias())
    f = compiled(m)
    return [f(3), f(5), f(3, 6), f(1)]


@life
def anchors_of_pyramids(compiled):
    class Anchors(nn.Module):
        def __init__(self, sizes=((8,), (16, 32)), ratios=(0.5, 1.0)):
            super().__init__()
            self.sizes, self.cache = sizes, {}
            self.cells = [self.make(s, ratios) for s in sizes]

        def make(self, scales, ratios, dtype=torch.float32):
            s, r = torch.as_tensor(scales, dtype=dtype), torch.as_tensor(ratios, dtype=dtype).sqrt()
            w, h = (1 / r[:, None] * s[None]).view(-1), (r[:, None] * s[None]).view(-1)
            return (torch.stack([-w, -h, w, h], 1) / 2).round()

        def forward(self, image, maps):
            sizes = tuple(m.shape[-2:] for m in maps)
            strides = [(image.shape[-2] // s[0], image.shape[-1] // s[1]) for s in sizes]
            key = str((sizes, strides))
            if key in self.cache:
                return self.cache[key]
            out = []
            for (h, w), (sh, sw), cell in zip(sizes, strides, self.cells):
                y, x = torch.meshgrid(torch.arange(h) * sh, torch.arange(w) * sw, indexing="ij")
                shift = torch.stack((x, y, x, y), -1).reshape(-1, 1, 4)
                out.append((shift + cell[None]).reshape(-1, 4))
            self.cache[key] = torch.cat(out)
            return self.cache[key]

    m = Anchors()
    f = compiled(m)
    one = grid(1, 1, 8, 8), [grid(1, 1, 4, 4), grid(1, 1, 2, 2)]
    a, b = f(*one), f(*one)
    return [a, a is b, f(grid(1, 1, 16, 8), [grid(1, 1, 4, 4), grid(1, 1, 2, 2)]), len(m.cache)]


@life
def suppression_of_boxes(compiled):
    @compiled
    def nms(boxes, scores, limit):
        order, keep = scores.argsort(descending=True), []
        while order.numel() > 0:
            i = order[0]
            keep.append(i.item())
            if order.numel() == 1:
                break
            lt, rb = torch.max(boxes[i, :2], boxes[order[1:], :2]), torch.min(boxes[i, 2:], boxes[order[1:], 2:])
            inter = (rb - lt).clamp(min=0).prod(1)
            area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
            order = order[1:][inter / (area[i] + area[order[1:]] - inter) <= limit]
        return torch.tensor(keep)

    g = torch.Generator().manual_seed(0)
    a = torch.rand(12, 2, generator=g) * 4
    boxes, scores = torch.cat([a, a + 2], 1), torch.rand(12, generator=g)
    return [nms(boxes, scores, 0.3), nms(boxes[:5], scores[:5], 0.1), nms(boxes[:1], scores[:1], 0.5), nms(boxes, scores, 0.9)]


@life
def recurrent_cells_by_hand(compiled):
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.ModuleList([nn.LSTMCell(2, 3), nn.GRUCell(3, 3)])

        def forward(self, x, state=None, lengths=None):
            h, c = state[0] if state else (x.new_zeros(x.shape[1], 3),) * 2
            g = state[1] if state else torch.zeros_like(h)
            outs = []
            for t, step in enumerate(x):
                h2, c2 = self.cells[0](step, (h, c))
                if lengths is not None:
                    alive = (t < lengths)[:, None]
                    h2, c2 = torch.where(alive, h2, h), torch.where(alive, c2, c)
                h, c = h2, c2
                g = self.cells[1](h, g)
                outs.append(g)
            return torch.stack(outs), [(h, c), g]

    f = compiled(fixed(Rnn()))
    y, s = f(grid(2, 1, 2))
    return [y, s, f(grid(3, 1, 2), s), f(grid(3, 2, 2), lengths=torch.tensor([1, 3]))]


@life
def fixed_point_iteration(compiled):
    @compiled
    def solve(x, tol, limit=20):
        z, history = torch.zeros_like(x), []
        for i in range(limit):
            new = torch.tanh(z * 0.5 + x)
            gap = (new - z).norm().item()
            history.append(round(gap, 4))
            z = new
            if gap < tol:
                break
        else:
            raise RuntimeError(f"no fixed point in {limit} steps")
        return z, i, history

    return [solve(grid(3), 1e-1), solve(grid(3), 1e-2), solve(grid(2) * 2, 1e-2), attempt(solve, grid(3), 0.0, 3)]


@life
def sampling_with_filters(compiled):
    @compiled
    def sample(logits, temperature=1.0, top_k=0, top_p=1.0, seen=(), penalty=1.0):
        logits = logits.clone()
        if penalty != 1.0:
            for t in set(seen):
                logits[..., t] = logits[..., t] / penalty if logits[..., t] > 0 else logits[..., t] * penalty
        logits = logits / max(temperature, 1e-5)
        if top_k:
            logits[logits < logits.topk(min(top_k, logits.shape[-1]))[0][..., -1, None]] = -float("inf")
        if top_p < 1.0:
            s, i = logits.sort(descending=True)
            drop = s.softmax(-1).cumsum(-1) > top_p
            drop[..., 1:] = drop[..., :-1].clone()
            drop[..., 0] = False
            logits = logits.masked_fill(drop.scatter(-1, i, drop), torch.finfo(logits.dtype).min)
        return logits, torch.multinomial(logits.softmax(-1), 1).item()

    x = torch.sin(grid(6) * 9)
    return [sample(x), sample(x, 0.5, 3), sample(x, top_p=0.6), sample(x, 0.7, 2, 0.9, (1, 1, 2), 1.3), sample(x, temperature=0)]


@life
def masks_of_attention(compiled):
    @compiled
    def mask(ids, pad=0, causal=True, window=None, past=0, dtype=torch.float32):
        keep = ids.ne(pad)
        n = ids.shape[1]
        m = keep[:, None, None, :].expand(-1, 1, n, -1)
        if causal:
            m = m & torch.ones(n, n + past, dtype=torch.bool).tril(past)[:, -n:]
        if window is not None:
            d = torch.arange(n)[:, None] - torch.arange(n)
            m = m & (d < window)
        pos = (keep.long().cumsum(-1) - 1).masked_fill(~keep, 1)
        return (1.0 - m.to(dtype)) * torch.finfo(dtype).min, pos, keep.sum(-1).max().item()

    ids = torch.tensor([[0, 3, 4], [5, 6, 7]])
    return [mask(ids), mask(ids, causal=False), mask(ids[:, :2], window=1), mask(ids, dtype=torch.float64, past=1)]


@life
def losses_by_name(compiled):
    class Criterion(nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.weights = weights

        def loss_l1(self, out, target, **kw):
            return {"l1": (out["x"] - target["x"]).abs().sum() / kw["n"]}

        def loss_focal(self, out, target, gamma=2, **kw):
            p = out["p"].sigmoid()
            ce = F.binary_cross_entropy_with_logits(out["p"], target["p"], reduction="none")
            pt = p * target["p"] + (1 - p) * (1 - target["p"])
            return {"focal": (ce * (1 - pt) ** gamma).mean(), "acc": ((p > 0.5) == target["p"].bool()).float().mean()}

        def forward(self, out, target):
            n = max(sum(len(t) for t in target.values()), 1)
            losses = {}
            for name in ("l1", "focal"):
                fn = getattr(self, f"loss_{name}", None)
                assert fn is not None, f"no loss {name}"
                losses.update(fn(out, target, n=n))
            for i, aux in enumerate(out.get("aux", [])):
                losses |= {f"{k}_{i}": v for k, v in self.loss_l1(aux, target, n=n).items()}
            return sum(losses[k] * self.weights[k] for k in losses if k in self.weights), losses

    f = compiled(Criterion({"l1": 2.0, "focal": 0.5}))
    out, target = {"x": grid(3), "p": grid(4)}, {"x": grid(3) * 2, "p": torch.tensor([0.0, 1, 0, 1])}
    return [f(out, target), f({**out, "aux": [{"x": grid(3)}] * 2}, target), f({"x": grid(2), "p": grid(4)}, {**target, "x": grid(2)})]


# ---------------------------------------------------------------- training


@life
def training_loop_with_parts(compiled):
    model = fixed(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 1 / (e + 1))
    ema = {k: v.clone() for k, v in model.state_dict().items()}

    @compiled
    def loss_of(x, y):
        return F.mse_loss(model(x), y) + 1e-3 * sum(p.norm() for p in model.parameters())

    out = []
    for i in range(4):
        opt.zero_grad(set_to_none=i % 2 == 0)
        loss = loss_of(grid(2, 3) + i, grid(2, 1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        with torch.no_grad():
            for k, v in model.state_dict().items():
                ema[k].lerp_(v, 0.5)
        out += [loss.detach(), norm, sched.get_last_lr()]
    return [o.round(decimals=3) if torch.is_tensor(o) else o for o in out] + [ema["0.bias"].round(decimals=3)]


@life
def accumulation_of_gradients(compiled):
    model = fixed(nn.Linear(3, 2))

    class Trainer:
        def __init__(self, every):
            self.every, self.n, self.history = every, 0, []

        def step(self, x):
            loss = model(x).pow(2).mean() / self.every
            loss.backward()
            self.n += 1
            self.history.append(loss.detach())
            if self.n % self.every == 0:
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                        p.grad = None
            return loss.detach()

    t = Trainer(2)
    step = compiled(t.step)
    return [step(grid(2, 3)), model.weight.grad is None, step(grid(2, 3)), model.weight.grad is None, step(grid(1, 3)), t.n, len(t.history), model.weight.detach()]


@life
def autograd_function_with_state(compiled):
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, lam):
            ctx.lam = lam
            ctx.save_for_backward(x)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return -ctx.lam * g * (x > 0), None

    class Ste(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return (x > 0).type_as(x)

        @staticmethod
        def backward(ctx, g):
            return g.clamp(-0.1, 0.1)

    @compiled
    def f(x, lam):
        return (Reverse.apply(x, lam) * 3 + Ste.apply(x)).sum()

    out = []
    for lam in (0.5, 1.0, 2.0):
        x = grid(4).requires_grad_()
        y = f(x, lam)
        y.backward()
        out += [y.detach(), x.grad]
    return out


@life
def hooks_with_state(compiled):
    class Probe:
        def __init__(self):
            self.seen = defaultdict(list)

        def attach(self, m):
            return [c.register_forward_hook(functools.partial(self.hook, n)) for n, c in m.named_modules() if isinstance(c, nn.Linear)]

        def hook(self, name, mod, args, out):
            self.seen[name].append(out.detach().abs().mean())

    m = fixed(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    probe = Probe()
    handles = probe.attach(m)
    f = compiled(m)
    out = [f(grid(1, 2)), f(grid(2, 2)), dict(probe.seen)]
    for h in handles[:1]:
        h.remove()
    m[1].register_forward_pre_hook(lambda mod, args: (args[0] - 1,))
    m.register_forward_hook(lambda mod, args, kwargs, o: o * len(kwargs or [1]), with_kwargs=True)
    return out + [f(grid(1, 2)), {k: len(v) for k, v in probe.seen.items()}]


@life
def parameters_made_in_forward(compiled):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = None
            self.register_parameter("b", None)

        def forward(self, x):
            if self.w is None:
                self.w = nn.Parameter(torch.ones(x.shape[-1], 2))
            if self.b is None:
                self.b = nn.Parameter(torch.zeros(2))
            if "stat" not in self._buffers:
                self.register_buffer("stat", torch.zeros(1), persistent=False)
            self.stat += x.sum().detach()
            return x @ self.w + self.b

    m = Lazy()
    f = compiled(m)
    out = [f(grid(1, 3)), [n for n, _ in m.named_parameters()], f(grid(2, 3)), m.stat]
    f(grid(1, 3)).sum().backward()
    return out + [m.w.grad, sorted(m.state_dict())]


@life
def freezing_and_unfreezing(compiled):
    m = fixed(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.0)))
    f = compiled(m)
    out = []
    for stage in range(4):
        m[0].requires_grad_(stage % 2 == 0)
        m[1].train(stage < 2)
        m.zero_grad()
        y = f(grid(3, 2) + stage)
        y.sum().backward() if y.requires_grad else None
        out += [y.detach(), m[0].weight.grad is None, m[1].num_batches_tracked.clone(), m[1].running_mean.clone()]
    return out


@life
def schedules_as_closures(compiled):
    def warmup(steps, base):
        def lr(step):
            return base * min(1.0, (step + 1) / steps)

        return lr

    def chain(*fns):
        return lambda s: functools.reduce(lambda a, fn: a * fn(s), fns, 1.0)

    sched = chain(warmup(4, 0.5), lambda s: 0.9**s, lambda s: 0.5 * (1 + math.cos(math.pi * s / 10)))
    w = grid(3)

    @compiled
    def update(g, step):
        nonlocal w
        lr = sched(step)
        w = w - lr * g
        return w, lr

    return [update(grid(3) + 1, s) for s in range(5)] + [w]


@life
def metrics_accumulate(compiled):
    class Metric:
        def __init__(self, classes):
            self.hist = torch.zeros(classes, classes, dtype=torch.long)
            self.best, self.names = -math.inf, []

        def update(self, pred, target):
            n = len(self.hist)
            ok = (target >= 0) & (target < n)
            self.hist += torch.bincount(n * target[ok] + pred[ok], minlength=n**2).reshape(n, n)

        def compute(self):
            iou = self.hist.diag().float() / (self.hist.sum(0) + self.hist.sum(1) - self.hist.diag()).clamp(min=1)
            mean = iou.mean().item()
            if mean > self.best:
                self.best = mean
                self.names.append(f"best-{mean:.3f}")
            return {"iou": [round(v, 3) for v in iou.tolist()], "mean": mean}

    m = Metric(3)

    @compiled
    def step(logits, target):
        m.update(logits.argmax(-1), target)
        return m.compute()

    return [step(torch.sin(grid(4, 3) * k), torch.tensor([0, 1, 2, 255 if k == 2 else 1])) for k in (1, 2, 3)] + [m.hist, m.names]


# ---------------------------------------------------------------- Python's library


@life
def iteration_over_tensors(compiled):
    @compiled
    def f(x):
        rows = [r.sum() for r in x]
        first, *others = x
        (a, b), *_ = x[:, :2]
        d = dict(zip("abc", x.unbind(1)))
        total = 0
        for i, (r, s) in enumerate(zip(x, reversed(x))):
            total = total + (r * s).sum() * i
        return rows, first, len(others), a + b, d, total, x.tolist()[0][:1], list(map(torch.sum, x)), max(len(r) for r in x), [*x.shape], x.T[0] if x.shape[0] < 4 else None

    return [f(grid(2, 3)), f(grid(3, 3)), f(grid(4, 2))]


@life
def small_numbers_library(compiled):
    from decimal import Decimal
    from fractions import Fraction
    import hashlib
    import statistics

    @compiled
    def f(x, n):
        key = hashlib.md5(f"{n}".encode()).hexdigest()[:4]
        half = Fraction(n, 4)
        return x * float(half), key, statistics.mean([n, 2]), str(Decimal("0.1") * n), math.gcd(n, 12), math.comb(n, 2), n.bit_length(), int("ff", 16) + n, (n).to_bytes(2, "big"), float(f"{n}.5"), math.isclose(0.1 + 0.2, 0.3), round(-n / 2), hex(n), pow(n, 3, 7)

    return [f(grid(2), n) for n in (2, 3, 6, 100)]


@life
def environment_and_platform(compiled):
    import os
    import pathlib

    os.environ["LIVES_SCALE"] = "3"

    @compiled
    def f(x, path):
        scale = float(os.environ.get("LIVES_SCALE", 1))
        p = pathlib.PurePosixPath(path) / "a.pt"
        if sys.version_info >= (3, 8) and hasattr(torch, "sin"):
            x = torch.sin(x)
        return x * scale, p.stem, p.suffix, os.path.join(path, "b"), os.path.basename(path), torch.__version__ >= "1.0"

    out = [f(grid(2), "/x/y"), f(grid(2), "/x/z")]
    os.environ["LIVES_SCALE"] = "5"
    out.append(f(grid(2), "/x/y"))
    del os.environ["LIVES_SCALE"]
    return out + [f(grid(2), "/x/y")]


@life
def dictionary_views_and_merges(compiled):
    @compiled
    def f(a, b):
        common = a.keys() & b.keys()
        merged = a | b
        merged.update(((k, v * 2) for k, v in a.items() if k not in common), extra=1)
        popped = merged.pop("x", None)
        first = next(iter(merged.items()), None)
        inv = {id(v) == id(a.get(k)): k for k, v in merged.items()}
        by = sorted(merged.items(), key=lambda kv: (str(type(kv[1])), kv[0]))
        last = merged.popitem()
        return sorted(common), merged, popped, first, sorted(inv.values()), [k for k, _ in by], last, dict.fromkeys("ab", 0), list(reversed(merged)), merged.setdefault("q", 5), {**a}.keys() == a.keys(), a.items() <= a.items()

    return [f({"x": grid(2), "y": 2}, {"y": 3, "z": grid(1)}), f({"y": 2}, {"y": 3}), f({"k": 1, "x": 2}, {})]


@life
def slices_and_indices(compiled):
    @compiled
    def f(x, n):
        s = slice(None, -1, 2)
        sl = [slice(None)] * x.dim()
        sl[-1] = slice(n, None)
        idx = torch.arange(n)
        y = x[tuple(sl)]
        lo, hi, step = s.indices(x.shape[0])
        z = x.clone()
        z[s] = 0
        z[..., :n] += 1
        z[idx, idx] = -1
        return y, z, range(lo, hi, step), x[None, ..., None].shape, x[[0, -1]][:, [n - 1]], "abcdef"[n::2], (1, 2, 3, 4)[-n:], x[x > 0].shape[0] if n == 1 else 0, list(range(10))[n:-n:3], x[True].shape

    return [f(grid(3, 4), 1), f(grid(4, 4), 2), f(grid(3, 3), 3)]


@life
def exceptions_of_users(compiled):
    class ShapeError(ValueError):
        def __init__(self, got, want, *, where="?"):
            super().__init__(f"{where}: got {tuple(got)}, want {want}")
            self.got, self.want = got, want

        def __reduce__(self):
            return type(self), (self.got, self.want)

    def check(x, want):
        if tuple(x.shape) != want:
            raise ShapeError(x.shape, want, where="check")
        return x

    @compiled
    def f(x, how):
        try:
            check(x, (2,))
        except ShapeError as e:
            if how == "raise":
                raise RuntimeError("bad input") from e
            if how == "add":
                e.add_note("a note")
                raise
            return x.reshape(-1)[:2], str(e), e.got == x.shape, e.want
        except (TypeError, KeyError):
            return None
        else:
            x = x + 1
        finally:
            print("checked", how)
        return x

    return [f(grid(2), "x"), f(grid(3), "fix"), attempt(f, grid(3), "raise"), attempt(f, grid(2, 2), "add"), f(grid(2), "y")]


@life
def context_variables(compiled):
    import contextvars

    scale = contextvars.ContextVar("scale", default=1)

    @compiled
    def f(x):
        return x * scale.get()

    out = [f(grid(2))]
    token = scale.set(4)
    out.append(f(grid(2)))
    scale.reset(token)
    return out + [f(grid(2)), contextvars.copy_context().run(lambda: (scale.set(7), f(grid(2)))[1]), f(grid(2))]


@life
def signatures_inside(compiled):
    def accepts(fn, name):
        return name in inspect.signature(fn).parameters

    def a(x, scale=2):
        return x * scale

    def b(x, **kw):
        return x + len(kw)

    @compiled
    def f(x, fns, **opts):
        for fn in fns:
            x = fn(x, **{k: v for k, v in opts.items() if accepts(fn, k)})
        return x, [fn.__name__ for fn in fns], inspect.isfunction(fns[0]), fns[0].__code__.co_argcount

    return [f(grid(2), [a, b], scale=3), f(grid(2), [b, a]), f(grid(2), [a], bias=1)]


@life
def tables_of_functions(compiled):
    class Ops:
        table: dict = {}

        @classmethod
        def op(cls, *names):
            def inner(fn):
                for n in names:
                    cls.table[n] = fn
                return fn

            return inner

    @Ops.op("+", "add")
    def add(a, b):
        return a + b

    @Ops.op("*")
    def mul(a, b):
        return a * b

    Ops.op("neg")(torch.neg)
    Ops.table["relu"] = nn.ReLU()

    @compiled
    def rpn(program, **env):
        stack = []
        for token in program.split():
            fn = Ops.table.get(token)
            if fn is None:
                stack.append(env[token] if token in env else float(token))
            elif token in ("neg", "relu"):
                stack.append(fn(stack.pop()))
            else:
                b, a = stack.pop(), stack.pop()
                stack.append(fn(a, b))
        assert len(stack) == 1, f"{len(stack)} left"
        return stack.pop()

    return [rpn("x y + 2 *", x=grid(2), y=grid(2)), rpn("x neg relu", x=grid(3)), attempt(rpn, "x x", x=grid(1)), attempt(rpn, "x q +", x=grid(1)), rpn("x y add 3 *", x=grid(2), y=grid(2))]


@life
def memory_with_in_place_lists(compiled):
    class Memory(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.size, self.items, self.at = size, [], 0

        def push(self, x):
            if len(self.items) < self.size:
                self.items.append(None)
            self.items[self.at] = x.detach()
            self.at = (self.at + 1) % self.size

        def forward(self, x):
            self.push(x)
            return torch.stack(self.items).mean(0), self.at

        def __len__(self):
            return len(self.items)

        def __getitem__(self, i):
            return self.items[i]

        def __iter__(self):
            return iter(self.items)

    m = Memory(2)
    f = compiled(m)
    return [f(grid(2)), f(grid(2) + 1), f(grid(2) + 2), len(m), m[0], [t.sum() for t in m], m.at, f(grid(2) + 3)]


@life
def partials_all_over(compiled):
    def block(x, w, *, act, scale=1.0, bias=None):
        y = act(x @ w) * scale
        return y if bias is None else y + bias

    make = functools.partial(block, act=torch.tanh)
    stages = [functools.partial(make, scale=s) for s in (1.0, 2.0)]
    stages.append(functools.partial(functools.partial(block, act=functools.partial(F.leaky_relu, negative_slope=0.2)), bias=1))

    @compiled
    def f(x, w, **over):
        for s in stages:
            x = s(x, w, **over)
        return x, stages[1].keywords["scale"], stages[0].func.__name__, [*map(functools.partial(pow, 2), range(3))], functools.partial(lambda *a, **k: (a, sorted(k)), 1, z=2)(3, y=4)

    return [f(grid(2, 2), grid(2, 2)), f(grid(2, 2), grid(2, 2), scale=3.0), f(grid(1, 2), grid(2, 2), bias=torch.ones(2))]


@life
def text_wrapped_and_parsed(compiled):
    @compiled
    def f(x, spec):
        rows = [line.strip() for line in textwrap.dedent(spec).splitlines() if line.strip() and not line.lstrip().startswith("#")]
        for row in rows:
            op, _, arg = row.partition("=")
            op, arg = op.strip().casefold(), arg.strip()
            if op == "scale":
                x = x * float(arg)
            elif op == "roll":
                x = x.roll(int(arg))
            elif op == "view":
                x = x.view(*map(int, arg.strip("()").split(",")))
            else:
                raise ValueError(f"unknown {op!r} in line {rows.index(row) + 1}")
        return x, textwrap.shorten(" ".join(rows), 12), [r.expandtabs(2) for r in rows][-1], rows[0].translate(str.maketrans("=", ":"))

    return [f(grid(4), "\n  scale = 2\n  # no\n  ROLL=1\n"), f(grid(4), "view = (2, 2)"), attempt(f, grid(4), "scale=1\nspin=2"), f(grid(6), "scale=2.5\nview=(2,3)")]


@life
def stateful_wrappers_of_tensors(compiled):
    class Cache:
        def __init__(self):
            self.k, self.v = [], []

        def update(self, k, v, layer):
            if len(self.k) <= layer:
                self.k.append(k)
                self.v.append(v)
            else:
                self.k[layer] = torch.cat([self.k[layer], k], -2)
                self.v[layer] = torch.cat([self.v[layer], v], -2)
            return self.k[layer], self.v[layer]

        def __len__(self):
            return len(self.k)

        def __getitem__(self, i):
            return self.k[i], self.v[i]

        @property
        def length(self):
            return self.k[0].shape[-2] if self.k else 0

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 6) for _ in range(2))

        def forward(self, x, cache: Optional[Cache] = None):
            cache = Cache() if cache is None else cache
            pos = torch.arange(cache.length, cache.length + x.shape[1])
            x = x + pos[None, :, None] * 0.1
            for i, layer in enumerate(self.layers):
                q, k, v = layer(x).chunk(3, -1)
                k, v = cache.update(k, v, i)
                x = x + F.scaled_dot_product_attention(q, k, v)
            return x, cache

    f = compiled(fixed(Model()))
    x, cache = f(grid(1, 3, 2))
    out = [x, cache.length]
    for i in range(3):
        x, same = f(grid(1, 1, 2) + i, cache)
        out += [x, same is cache, cache.length]
    return out + [len(cache), cache[1]]


@life
def layers_dropped_at_random(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
            self.p = 0.5

        def forward(self, x):
            used = []
            for i, layer in enumerate(self.layers):
                if self.training and random.uniform(0, 1) < self.p:
                    continue
                x = layer(x)
                used.append(i)
            return x, used

    m = fixed(Net())
    f = compiled(m)
    random.seed(1)
    out = [f(grid(1, 2)) for _ in range(4)]
    m.eval()
    return out + [f(grid(1, 2)), random.random()]


@life
def sequences_of_many_lengths(compiled):
    @compiled
    def collate(items, pad=0.0):
        n = max(len(t) for t in items)
        out = items[0].new_full((len(items), n) + items[0].shape[1:], pad)
        mask = torch.zeros(len(items), n, dtype=torch.bool)
        for i, t in enumerate(items):
            out[i, : t.shape[0]].copy_(t)
            mask[i, : len(t)] = True
        lengths = torch.tensor([len(t) for t in items])
        return out, mask, lengths, [o[:k] for o, k in zip(out, lengths.tolist())], torch.nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=pad)

    return [collate([grid(2), grid(3)]), collate([grid(1), grid(4), grid(2)]), collate([grid(2, 2), grid(1, 2)], -1.0), collate([grid(2), grid(3)])]


@life
def diffusion_schedule(compiled):
    import numpy as np

    class Scheduler:
        def __init__(self, steps=10, start=1e-2, end=2e-1):
            self.betas = torch.linspace(start**0.5, end**0.5, steps) ** 2
            self.alphas = torch.cumprod(1 - self.betas, 0)
            self.timesteps = None

        def set_timesteps(self, n):
            ratio = len(self.betas) // n
            self.timesteps = torch.from_numpy((np.arange(0, n) * ratio).round()[::-1].copy().astype(np.int64))

        def step(self, eps, t, x, eta=0.0):
            prev = t - len(self.betas) // len(self.timesteps)
            a = self.alphas[t]
            b = self.alphas[prev] if prev >= 0 else torch.tensor(1.0)
            x0 = (x - (1 - a).sqrt() * eps) / a.sqrt()
            return b.sqrt() * x0 + (1 - b).sqrt() * eps, x0

    sched = Scheduler()
    sched.set_timesteps(5)

    @compiled
    def denoise(x, t):
        eps = torch.sin(x) * 0.1
        return sched.step(eps, t, x)

    @compiled
    def loop(x):
        for t in sched.timesteps:
            x, _ = sched.step(torch.sin(x) * 0.1, t, x)
        return x

    x, out = grid(3), []
    for t in sched.timesteps:
        x, x0 = denoise(x, t)
        out += [x, x0]
    return out + [loop(grid(3)), denoise(grid(3), 4), denoise(grid(3), 0)]


@life
def visitors_by_class_name(compiled):
    class Num:
        def __init__(self, v):
            self.v = v

    class Bin:
        def __init__(self, op, a, b):
            self.op, self.a, self.b = op, a, b

    class Visitor:
        def visit(self, node):
            fn = getattr(self, f"visit_{type(node).__name__}", self.generic)
            self.depth = getattr(self, "depth", 0) + 1
            try:
                return fn(node)
            finally:
                self.depth -= 1

        def generic(self, node):
            raise NotImplementedError(type(node).__name__)

    class Eval(Visitor):
        def __init__(self, env):
            self.env = env

        def visit_Num(self, n):
            return self.env.get(n.v, n.v)

        def visit_Bin(self, n):
            return {"+": operator.add, "*": operator.mul}[n.op](self.visit(n.a), self.visit(n.b)) + self.depth

    @compiled
    def f(tree, x):
        return Eval({"x": x}).visit(tree)

    t = Bin("+", Bin("*", Num("x"), Num(2)), Num("x"))
    return [f(t, grid(2)), f(Bin("*", t, Num(3)), grid(2)), attempt(f, Bin("+", None, Num(1)), grid(1)), f(t, grid(3))]


@life
def events_and_callbacks(compiled):
    class Emitter:
        def __init__(self):
            self._on = defaultdict(list)

        def on(self, name, fn=None):
            if fn is None:
                return lambda g: self.on(name, g)
            self._on[name].append(fn)
            return fn

        def emit(self, name, *a, **k):
            return [fn(*a, **k) for fn in self._on[name]]

    e, log = Emitter(), []

    @e.on("start")
    def started(x):
        log.append(("start", tuple(x.shape)))

    @e.on("end")
    def ended(x, *, loss):
        log.append("end")
        return loss * 2

    class Net(nn.Module):
        def forward(self, x):
            e.emit("start", x)
            loss = (x**2).sum()
            extra = e.emit("end", x, loss=loss)
            return loss + sum(extra), len(extra)

    f = compiled(Net())
    out = [f(grid(2)), f(grid(3))]
    e.on("end", lambda x, loss: x.mean())
    return out + [f(grid(2)), log, len(e.emit("other"))]


@life
def state_machines(compiled):
    class State(enum.Enum):
        IDLE = 0
        RUN = enum.auto()
        DONE = enum.auto()

        def next(self):
            members = list(type(self))
            return members[(members.index(self) + 1) % len(members)]

    class Machine(nn.Module):
        def __init__(self):
            super().__init__()
            self.state, self.handlers = State.IDLE, {State.IDLE: self.idle, State.RUN: self.run}

        def idle(self, x):
            return x

        def run(self, x):
            return x * 2

        def forward(self, x):
            y = self.handlers.get(self.state, lambda v: -v)(x)
            self.state = self.state.next()
            return y, self.state.name

    m = Machine()
    f = compiled(m)
    return [f(grid(2)) for _ in range(5)] + [m.state is State.DONE]


@life
def slices_of_work_and_chunks(compiled):
    def chunked(fn, size):
        @functools.wraps(fn)
        def inner(x, *a, **k):
            outs = [fn(x[i : i + size], *a, **k) for i in range(0, len(x), size)]
            return {k: torch.cat([o[k] for o in outs]) for k in outs[0]} if isinstance(outs[0], dict) else torch.cat(outs)

        return inner

    @compiled
    def f(x, size, w):
        net = chunked(lambda v, w: {"a": torch.relu(v @ w), "b": v.sum(-1)}, size)
        return net(x, w=w), chunked(torch.exp, size)(x)

    return [f(grid(5, 2), 2, grid(2, 2)), f(grid(4, 2), 2, grid(2, 2)), f(grid(3, 2), 4, grid(2, 2)), f(grid(7, 2), 3, grid(2, 2))]


@life
def self_modifying_objects(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.fn = self.first

        def first(self, x):
            self.fn = self.later
            self.__dict__.update(seen=1, mode="later")
            return self.fc(x)

        def later(self, x):
            object.__setattr__(self, "seen", vars(self)["seen"] + 1)
            return self.fc(x) * self.seen

        def forward(self, x):
            return self.fn(x), getattr(self, "mode", None), "seen" in self.__dict__, type(self).__name__

    m = fixed(Net())
    f = compiled(m)
    return [f(grid(1, 2)), f(grid(1, 2)), f(grid(2, 2)), m.seen, m.fn.__name__]


@life
def tied_and_shared(compiled):
    class Lm(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.emb.weight
            self.blocks = nn.ModuleList([nn.Linear(3, 3)] * 3)

        def forward(self, ids):
            x = self.emb(ids)
            for b in self.blocks:
                x = x + torch.tanh(b(x))
            return self.head(x), self.head.weight is self.emb.weight, len(set(map(id, self.blocks)))

    m = fixed(Lm())
    f = compiled(m)
    ids = torch.tensor([[0, 3]])
    out = [f(ids), f(ids[:, :1])]
    m.head.weight = nn.Parameter(m.head.weight.detach() * 2)
    out.append(f(ids))
    f(ids)[0].sum().backward()
    return out + [m.emb.weight.grad is not None, m.head.weight.grad is not None, m.blocks[0].weight.grad]
