# ruff: noqa: E501
"""Random Python programs over tensors, with breaks in every place: compiled calls do what eager calls do.

    python tests/cpu/fuzz_python.py [first seed] [count] [--dynamic] [--native] [--show]

Seeds from WIDE on also draw transforms of torch.func, values and sizes that data tell, iterators and dictionaries; seeds from
ODD on displays that break in their middle, stars, items that are augmented, match, classes and decorators inside; --native compiles.

In: a seed. Out: the text of a function `program(x, y, n, items, table, box)`, and whether three calls of it, eager and compiled, agree in
results, arguments changed, printed text and exceptions. A seed that fails is printed with its program.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import linecache
import random
import re
import signal
import sys
import warnings
from typing import Any

import numpy as np
import torch
from fuzz_harness import DEVICE, placed

import torchsmith

_FLOATS = re.compile(r"(-?\d+\.\d+(?:e[-+]?\d+)?)")
LONGEST = 5  # seconds that a call may take as it is, four times as many compiled
LAST_DIGIT = 1e-7  # of a float32
WIDE, ODD = 1_000_000, 2_000_000
T, N, L = ("t0", "t1", "t2"), ("n0", "n1"), ("l0", "l1")


class Quiet:
    """A context manager that notes what it sees, and may swallow exceptions."""

    def __init__(self, log: list[Any], swallow: bool) -> None:
        self.log, self.swallow = log, swallow

    def __enter__(self) -> Quiet:
        self.log.append("in")
        return self

    def __exit__(self, kind: Any, exc: Any, tb: Any) -> bool:
        self.log.append(("out", None if kind is None else kind.__name__))
        return self.swallow


class Box:
    """An object with tensors, numbers and methods."""

    def __init__(self, t: Any) -> None:
        self.t, self.n, self.log = t, 1, []

    def step(self, a: Any) -> Any:
        self.n += 1
        return a * 0.5 + self.t

    def loud(self, a: Any) -> Any:
        b = a + self.n
        print("loud", round(float(b.sum()), 2))
        self.t = self.t + 0.25
        return torch.tanh(b)

    @property
    def half(self) -> Any:
        return self.t * 0.5

    def __call__(self, a: Any) -> Any:
        return self.step(a) - self.half


@contextlib.contextmanager
def noted(log: list[Any]) -> Any:
    log.append("enter")
    try:
        yield len(log)
    finally:
        log.append("leave")


def several(a: Any, n: Any) -> Any:
    for k in range(2):
        if k == 1 and n == 2:
            print("several", n)
        yield a + k


def plain(a: Any, b: Any = 1.0) -> Any:
    return torch.sin(a) * b


def loud(a: Any, b: Any = 2) -> Any:
    c = torch.cos(a) + b
    print("c", round(float(c.mean()), 3))
    return c * 0.5


def recursive(a: Any, k: int) -> Any:
    if k <= 0:
        print("bottom")
        return a
    return recursive(a * 0.5, k - 1) + 1


class Writer:
    """Draws one program."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.wide, self.odd = seed >= WIDE, seed >= ODD
        self.lines: list[str] = []
        self.fresh = 0
        self.loops = 0
        self.inner: list[str] = []  # functions defined inside

    def pick(self, *options: Any) -> Any:
        return self.r.choice(options)

    def tensor(self, depth: int = 2) -> str:
        r = self.r
        if depth == 0 or r.random() < 0.3:
            return self.pick(*T, *T, *T, "x", "y", "box.t", "table['a']")
        a = self.tensor(depth - 1)
        if self.odd and r.random() < 0.4:
            return self.odd_tensor(a, depth)
        if self.wide and r.random() < (0.1 if self.odd else 0.35):
            return self.wide_tensor(a, depth)
        k = r.randrange(22)
        if k < 3:
            return f"({a} {self.pick('+', '-', '*')} {self.tensor(depth - 1)})"
        if k < 6:
            return f"({a} {self.pick('+', '-', '*')} {self.number(depth - 1)})"
        if k == 6:
            return f"torch.where({a} > 0, {a}, {self.tensor(depth - 1)})"
        if k == 7:
            return f"{self.pick('torch.relu', 'torch.sin', 'plain', 'box.step', 'box', 'torch.tanh')}({a})"
        if k == 8:
            return f"{self.pick('loud', 'box.loud')}({a})"
        if k == 9:
            return f"plain({a}, b={self.number(depth - 1)})"
        if k == 10:
            return f"{self.pick(*L)}[{self.pick('0', '-1', 'n % 2')}]"
        if k == 11:
            return f"{a}.clone()"
        if k == 12:
            return f"torch.from_numpy(np.tanh(({a}).detach().numpy()))"
        if k == 13:
            return f"({a} if {self.condition(depth - 1)} else {self.tensor(depth - 1)})"
        if k == 14:
            return f"sum([{self.tensor(depth - 1)}, {a}])"
        if k == 15:
            return f"sum({a} * i for i in range({self.pick('2', 'n')}))"
        if k == 16:
            return f"[{a} + i for i in range(3) if i != {self.number(0)}][-1]"
        if k == 17:
            return f"max([{a}, {self.tensor(depth - 1)}], key=lambda q: float(q.sum()))"
        if k == 18 and self.inner:
            return f"{self.pick(*self.inner)}({a})"
        if k == 19:
            return f"(lambda q, z={self.number(depth - 1)}: q * z)({a})"
        if k == 20:
            return f"next(several({a}, n))"
        if k == 21:
            return f"recursive({a}, {self.pick('1', '2', 'n')})"
        return f"torch.abs({a})"

    def wide_tensor(self, a: str, depth: int) -> str:
        b, number = self.tensor(depth - 1), self.number(0)
        return self.pick(
            f"torch.func.vmap(lambda q: q * {number} + q.sum())({a})",
            f"torch.func.vmap({self.pick('plain', 'box', 'torch.sin', 'loud')})({a})",
            f"torch.func.vmap(lambda q, r: torch.where(q > 0, r, q[0]), in_dims=(0, {self.pick('0', 'None')}))({a}, {b}[0].expand(2, 3))",
            f"torch.func.grad(lambda q: (q * q * {b}).sum() * {number})({a})",
            f"torch.func.jvp({self.pick('plain', 'torch.tanh')}, ({a},), ({b},))[1]",
            f"torch.func.vjp(lambda q: q.sin() * {number}, {a})[1]({b})[0]",
            f"({a} * {a}[{a} > 0].sum())",
            f"({a} + ({a} > {number}).nonzero().shape[0])",
            f"({a} * {a}.sum().item())",
            f"({a} - {a}.flatten()[: int({a}.abs().max().item()) % 5 + 1].sum())",
            f"({a} + {a}[{a}.sum(1).argmax()])",
            f"({a} + {a}[{a}.sum(1).argmax().item()])",
            f"torch.masked_select({a}, {b} > 0).mean().nan_to_num() * {a}",
            f"({a} * [k * v for k, v in zip(iter((1, 2)), map(float, items))][-1])",
            f"({a} + list({{{number}: 1, 'k': 2, (1, 'z'): 3}}.values())[{self.pick('0', '-1')}])",
            f"({a} * torch.unique(({a} > 0).long()).shape[0])",
            f"{a}.repeat_interleave(torch.tensor([1, 1]), dim=0)",
        )  # fmt: skip

    def odd_tensor(self, a: str, depth: int) -> str:
        """Expressions that have something half made on the stack when a part of them breaks."""
        b, number, other = self.tensor(depth - 1), self.number(0), self.number(depth - 1)
        said = self.pick(f"loud({b})", f"box.loud({b})", b, f"recursive({b}, 1)")
        return self.pick(
            f"sum([{a}, *[{number}, {other}], {said}])",
            f"({a}, *{self.pick(*L)}, {said}, {number})[{self.pick('0', '-2')}]",
            f"[*items, {said}, {a}][-1]",
            f"{{'k': {a}, **{{'l': {number}}}, 'm': {said}, **dict(z={other})}}['m']",
            f"dict(a={a}, **{{'b': {said}}}, c={number})['b']",
            f"plain(*[{said}], **{{'b': {number}}})",
            f"plain(*({a},), *({number},))",
            f"(lambda *q, **k: q[-1] * len(q) + len(k))({a}, {said}, *items, u={other})",
            f"({a} * len({{1, {number}, *items, len(str({other}))}}))",
            f"[p + w for p in ({a}, {said}) for w in (1, {number}) if w != 5][-1]",
            f"[loud(p) for p in ({a}, {b})][0]",
            f"sum(loud(p) * w for w, p in enumerate([{a}, {b}]))",
            f"{{w: loud(p) for w, p in (('a', {a}), ('b', {b}))}}['b']",
            f"({a} if 0 < {other} < len(str({said})) < 9999 else {b})",
            f"next(p for p in [{a}, {said}] if p.sum() > -1e9)",
            f"({a} + len('{{}} {{:>4}} {{}}'.format(n, {number}, len(str({said})))))",
            f"functools.reduce(lambda p, q: p + q * {number}, [{a}, {said}, {b}])",
            f"sorted([{a}, {said}], key=lambda q: float(q.sum()), reverse=True)[0]",
            f"torch.stack([{a}, {said}, *[t for t in {self.pick(*L)} if isinstance(t, torch.Tensor)]]).mean(0)",
            f"({a} and {said}) if False else ({said} if {number} else {a})",
        )  # fmt: skip

    def odd_statement(self, i: int, depth: int) -> None:
        a, b, number, v = self.tensor(1), self.tensor(1), self.number(1), self.name()
        k = self.r.randrange(14)
        if k == 0:
            self.put(i, f"items[{self.pick('0', '-1', 'n % 2')}] += {number}")
        elif k == 1:
            self.put(i, f"table['a'] += loud({a})")
        elif k == 2:
            self.put(i, f"box.t *= {number}")
            self.put(i, f"box.log += [{number}, len(str({number}))]")
        elif k == 3:
            self.put(i, f"items[1:] = [{number}, *items[:1], {number}]")
        elif k == 4:
            self.put(i, f"match {self.pick('items', f'[{number}, n]', 'table', f'({a}, {number})', number)}:")
            self.put(i + 1, self.pick("case [first, *others]:", "case {'a': first, **others}:", "case (first, others):", "case [1, first]:"))
            self.block(i + 2, 0, 1)
            self.put(i + 2, f"{self.pick(*T)} = {self.pick(*T)} + (len(others) if isinstance(others, (list, dict)) else 1)")
            self.put(i + 1, "case int() | float() as first if first:")
            self.put(i + 2, "print(first)")
            self.put(i + 1, "case _:")
            self.block(i + 2, 0, 1)
        elif k == 5:
            self.put(i, f"class {v}(Box):")
            self.put(i + 1, f"rate = {number}")
            self.put(i + 1, "def step(self, a):")
            self.put(i + 2, self.pick("return super().step(a) * self.rate", "return self.loud(a) + self.rate", "return a + type(self).rate"))
            self.put(i, f"{self.pick(*T)} = {v}({a}).step({b})")
        elif k == 6:
            self.put(i, f"def {v}(fn):")
            self.put(i + 1, "@functools.wraps(fn)")
            self.put(i + 1, "def wrapped(*q, **k):")
            self.put(i + 2, self.pick("print(fn.__name__)", "box.n += 1", "q = [p * 1 for p in q]"))
            self.put(i + 2, "return fn(*q, **k)")
            self.put(i + 1, "return wrapped")
            self.put(i, f"@{v}")
            self.put(i, f"def {v}b(q, *, w={number}): return loud(q) * w")
            self.put(i, f"{self.pick(*T)} = {v}b({a}, w={number})")
        elif k == 7:
            self.put(i, f"def {v}(q):")
            self.put(i + 1, "got = yield q")
            self.put(i + 1, self.pick("print('got', got)", "q = q + 1"))
            self.put(i + 1, f"yield from several(q, {number})")
            self.put(i + 1, "return 7")
            self.put(i, f"{v}g = {v}({a})")
            self.put(i, f"{self.pick(*T)} = next({v}g)")
            self.put(i, f"{self.pick(*L)} = [{v}g.send({number}), *{v}g]")
        elif k == 8:
            self.put(i, f"with Quiet(box.log, {self.pick('True', 'False')}) as m, contextlib.suppress(ValueError):")
            self.put(i + 1, f"{self.pick(*L)} = [{a}, loud({b})]")
            self.block(i + 1, 0, 1)
        elif k == 9:
            self.put(i, "try:")
            self.put(i + 1, f"{self.pick(*T)} = [{a}, loud({b}), {self.pick('items[50]', number, '{}[1]')}][0]")
            self.put(i, f"except {self.pick('IndexError', 'KeyError', '(IndexError, KeyError)')} as e:")
            self.put(i + 1, "print(repr(e))")
        elif k == 10:
            self.put(i, f"{v} = {{'p': [{a}], 'q': {{'r': {number}}}}}")
            self.put(i, f"{v}['q']['r'], {v}['p'][0] = len(str({number})), loud({b})")
            self.put(i, f"{self.pick(*T)} = {v}['p'].pop() * ({v}['q']['r'] != 3)")
        elif k == 11:
            self.put(i, f"{v} = iter([{a}, {b}, {number}])")
            self.put(i, f"{self.pick(*T)} = next({v})")
            self.block(i, 0, 1)
            self.put(i, f"{self.pick(*L)} = [*{v}]")
        elif k == 12:
            self.put(i, f"{v} = functools.partial(plain, b={number})")
            self.put(i, f"{self.pick(*T)} = {v}({a}) + sum(map({v}, [{b}]))")
        else:
            self.put(i, f"assert {self.condition()} or str({number}), 'never'")
            self.put(i, f"if ({v} := {number}) != 1: print('{{!r:>5}} {{}}'.format({v}, len({a})))")
            self.put(i, f"del items[{self.pick('0', '-1', ':1')}]")
            self.put(i, "items.extend([n, 2])")

    def number(self, depth: int = 1) -> str:
        if self.wide and self.r.random() < 0.2:
            t = self.tensor(0)
            return self.pick(f"{t}.sum().item()", f"({t} > 0).sum().item()", f"{t}[{t} > 0].numel()", f"{t}.argmax().item()", f"abs({t}.min().item())")
        if depth == 0 or self.r.random() < 0.4:
            return self.pick(*N, *N, "n", "1", "2", "0.5", "3", "box.n")
        k = self.r.randrange(11)
        a = self.number(depth - 1)
        if k == 0:
            return f"round({self.tensor(0)}.sum().item(), 2)"
        if k == 1:
            return f"int({self.tensor(0)}.abs().max())"
        if k == 2:
            return f"len({self.pick(*L, 'items', 'table', 'box.log')})"
        if k == 3:
            return f"({a} {self.pick('+', '-', '*')} {self.number(depth - 1)})"
        if k == 4:
            return f"min({a}, {self.number(depth - 1)})"
        if k == 5:
            return f"x.shape[{self.pick('0', '1')}]"
        if k == 6:
            return f"float({a})"
        if k == 7:
            return f"abs({a})"
        if k == 8:
            return f"len(format({a}, '.4g'))"  # not all digits: NumPy's and eager's last ones differ
        if k == 9:
            return f"({a} if {self.condition(0)} else {self.number(0)})"
        return "len(f'{n0}')"

    def condition(self, depth: int = 1) -> str:
        k = self.r.randrange(10)
        if k < 3:
            return f"{self.tensor(min(depth, 1))}.sum() {self.pick('>', '<')} {self.pick('0', '1', '-2')}"
        if k < 6:
            return f"{self.number(depth)} {self.pick('>', '<', '==', '!=')} {self.number(0)}"
        if k == 6:
            return f"'{self.pick('a', 'b', 'zz')}' {self.pick('in', 'not in')} table"
        if k == 7 and depth:
            return f"({self.condition(0)} {self.pick('and', 'or')} {self.condition(0)})"
        if k == 8:
            return f"not {self.pick(*L)}"
        return f"isinstance({self.pick(*T, *N)}, {self.pick('torch.Tensor', 'float', 'int')})"

    # ------------------------------------------------------------ statements

    def put(self, indent: int, text: str) -> None:
        self.lines.append("    " * indent + text)

    def name(self) -> str:
        self.fresh += 1
        return f"v{self.fresh}"

    def block(self, indent: int, depth: int, length: int | None = None) -> None:
        for _ in range(length or self.r.randint(1, 3)):
            self.statement(indent, depth)

    def statement(self, i: int, depth: int) -> None:
        simple = [self.assign, self.assign, self.assign, self.augment, self.say, self.store, self.append, self.attribute, self.count, self.unpack]
        nested = [self.choose, self.loop, self.loop, self.manage, self.attempt, self.define, self.repeat, self.leave, self.generate]
        odd = [self.odd_statement] * 8 if self.odd else []
        self.pick(*simple, *odd, *(nested if depth > 0 else ()))(i, depth)

    def assign(self, i: int, depth: int) -> None:
        self.put(i, f"{self.pick(*T)} = {self.tensor(3)}")

    def count(self, i: int, depth: int) -> None:
        self.put(i, f"{self.pick(*N)} {self.pick('=', '=', '+=')} {self.number(2)}")

    def augment(self, i: int, depth: int) -> None:
        self.put(i, self.pick(f"{self.pick(*T)} += {self.tensor(1)}", f"{self.pick(*T)} *= 0.5", f"{self.pick(*T, 'x')}.add_({self.number(0)})",
                              f"{self.pick(*T)}[0] = {self.number(0)}", f"{self.pick(*T)} = {self.pick(*T)}[:]"))  # fmt: skip

    def say(self, i: int, depth: int) -> None:
        self.put(i, self.pick(f"print({self.number(1)})", f"print('s', round(float({self.tensor(1)}.sum()), 2))",
                              f"print(f'{{n1}} {{n}} {{len({self.pick(*L)})}}')", "print(sorted(table), len(items))",
                              f"print(type({self.pick(*T, *N)}).__name__)", "print(box.n, box.log)"))  # fmt: skip

    def store(self, i: int, depth: int) -> None:
        key = self.pick("'a'", "'b'", "'c'", "n", f"{self.number(0)}")
        self.put(i, self.pick(f"table[{key}] = {self.tensor(1)}", f"table['a'] = table['a'] + {self.number(0)}", f"table.pop({key}, None)",
                              "del table['b']", f"items[{self.pick('0', '-1')}] = {self.number(1)}"))  # fmt: skip

    def append(self, i: int, depth: int) -> None:
        self.put(i, self.pick(f"{self.pick(*L)}.append({self.tensor(1)})", f"items.append({self.number(1)})", f"{self.pick(*L)} = [{self.tensor(1)}, {self.tensor(1)}]",
                              f"{self.pick(*L)} = {self.pick(*L)} + [{self.tensor(0)}]", "l0, l1 = l1, l0", f"{self.pick(*L)}.reverse()",
                              f"box.log.append({self.number(0)})"))  # fmt: skip

    def attribute(self, i: int, depth: int) -> None:
        self.put(i, self.pick(f"box.t = {self.tensor(1)}", f"box.n += {self.pick('1', 'n')}", f"box.extra = {self.number(1)}",
                              "t1 = getattr(box, 'missing', t1)", "box.t, t0 = t0, box.t"))  # fmt: skip

    def unpack(self, i: int, depth: int) -> None:
        self.put(i, self.pick(f"t0, t1 = {self.tensor(1)}, {self.tensor(1)}", f"n0, *rest = [{self.number(1)}, {self.number(1)}, {self.number(0)}]",
                              f"(t2, n1), = [({self.tensor(1)}, {self.number(1)})]", f"a0, b0 = {self.tensor(1)}", f"n0 = n1 = {self.number(1)}",
                              f"t2 = t1 = {self.tensor(1)}"))  # fmt: skip

    def choose(self, i: int, depth: int) -> None:
        self.put(i, f"if {self.condition()}:")
        self.block(i + 1, depth - 1)
        if self.r.random() < 0.3:
            self.put(i, f"elif {self.condition()}:")
            self.block(i + 1, depth - 1)
        if self.r.random() < 0.6:
            self.put(i, "else:")
            self.block(i + 1, depth - 1)

    def loop(self, i: int, depth: int) -> None:
        v = self.name()
        head = self.pick(f"for {v} in range({self.pick('2', '3', 'n')}):", f"for {v} in [{self.number(0)}, {self.number(0)}]:",
                         f"for {v}, q in enumerate([{self.tensor(0)}, {self.tensor(0)}]):", f"for {v}, q in zip([1, 2, 3], {self.pick(*L)}):",
                         f"for {v}, q in list(table.items())[:2]:", f"for {v} in several({self.tensor(0)}, n):", f"for {v} in {self.tensor(0)}:",
                         f"for {v} in (3, 'x', None):", f"for {v} in map(plain, {self.pick(*L)}[:2]):", f"for {v} in reversed(range(2)):")  # fmt: skip
        self.put(i, head)
        self.loops += 1
        self.block(i + 1, depth - 1)
        if "q in" in head and "table" not in head and self.r.random() < 0.5:
            self.put(i + 1, f"{self.pick(*T)} = {self.pick(*T)} + q")
        elif "range" in head and self.r.random() < 0.5:
            self.put(i + 1, f"{self.pick(*T)} = {self.pick(*T)} * {v}")
        if self.r.random() < 0.4:
            self.put(i + 1, f"if {self.condition()}:")
            self.put(i + 2, self.pick("break", "continue"))
            self.block(i + 1, depth - 1, 1)
        self.loops -= 1
        if self.r.random() < 0.2:
            self.put(i, "else:")
            self.block(i + 1, depth - 1, 1)

    def repeat(self, i: int, depth: int) -> None:
        v = self.name()
        self.put(i, f"{v} = 0")
        self.put(i, f"while {v} < {self.pick('2', '3')} and {self.condition()}:")
        self.put(i + 1, f"{v} += 1")
        self.block(i + 1, depth - 1)

    def manage(self, i: int, depth: int) -> None:
        self.put(i, self.pick("with Quiet(box.log, False):", "with Quiet(box.log, True) as m:", "with torch.no_grad():", "with noted(box.log) as m:",
                              "with Quiet(box.log, False), noted(box.log):", "with contextlib.suppress(ValueError, IndexError):"))  # fmt: skip
        self.block(i + 1, depth - 1)
        if self.r.random() < 0.2:
            self.put(i + 1, f"raise ValueError({self.number(0)})")

    def attempt(self, i: int, depth: int) -> None:
        self.put(i, "try:")
        self.block(i + 1, depth - 1)
        k = self.r.random()
        if k < 0.3:
            self.put(i + 1, f"raise {self.pick('ValueError', 'KeyError', 'TypeError')}({self.number(0)})")
        elif k < 0.5:
            self.put(i + 1, self.pick("int('no')", "items[100]", "{}['k']", "undefined", "1 / 0", "torch.zeros(2) @ torch.zeros(3)"))
        j = self.r.random()
        if j < 0.8:
            self.put(i, self.pick("except (ValueError, IndexError) as e:", "except Exception as e:", "except (KeyError, ZeroDivisionError) as e:"))
            self.block(i + 1, depth - 1, 1)
            self.put(i + 1, self.pick("print(type(e).__name__)", "box.log.append(type(e).__name__)", "pass", "pass"))
            if self.r.random() < 0.15:
                self.put(i + 1, self.pick("raise", "raise RuntimeError('again') from e", "raise KeyError('other')"))
            if self.r.random() < 0.2:
                self.put(i, "else:")
                self.block(i + 1, depth - 1, 1)
        if j >= 0.8 or self.r.random() < 0.3:
            self.put(i, "finally:")
            self.block(i + 1, depth - 1, 1)

    def define(self, i: int, depth: int) -> None:
        name = f"f{len(self.inner)}"
        shared = self.pick("t0", "n0", None, None)
        self.put(i, f"def {name}(q, w={self.number(0)}):")
        if shared:
            self.put(i + 1, f"nonlocal {shared}")
            self.put(i + 1, f"{shared} = {shared} + 1")
        self.put(i + 1, self.pick("q = q * 2", "print('inside')", "q = torch.relu(q)", "w = w + 1"))
        self.put(i + 1, self.pick("return q + w", "return loud(q)", "return q - (t1 if isinstance(t1, torch.Tensor) else 0)", "return q"))
        self.inner.append(name)
        self.put(i, f"{self.pick(*T)} = {name}({self.tensor(1)})")

    def generate(self, i: int, depth: int) -> None:
        g = self.name()
        self.put(i, f"{g} = several({self.tensor(0)}, {self.number(0)})")
        self.put(i, f"{self.pick(*T)} = next({g})")
        self.block(i, depth - 1, 1)
        self.put(i, self.pick(f"{self.pick(*T)} = next({g})", f"{self.pick(*L)} = list({g})", f"{g}.close()"))

    def leave(self, i: int, depth: int) -> None:
        if self.r.random() < 0.4:
            self.put(i, f"if {self.condition()}:")
            self.put(i + 1, self.pick(f"return {self.tensor(1)}", f"return {self.tensor(0)}, {self.number(1)}", f"raise ValueError({self.number(0)})"))
        elif self.r.random() < 0.3:
            self.put(i, f"del {self.pick(*T, *N)}")
        else:
            self.assign(i, depth)

    def text(self) -> str:
        self.put(0, "def program(x, y, n, items, table, box):")
        for t in T:
            self.put(1, f"{t} = {self.pick('x + 1', 'y * 2', 'x', 'x - y', 'torch.ones(2, 3)')}")
        self.put(1, f"n0, n1 = {self.pick('n, 1', '2, 0.5', '0, n')}")
        self.put(1, f"l0, l1 = {self.pick('[x, y], [t0]', '[t1, t2], [x, x]')}")
        self.block(1, 3, self.r.randint(3, 7))
        self.put(1, "return t0, t1, t2, n0, n1, l0, l1")
        return "\n".join(self.lines) + "\n"


_SPACE = {"torch": torch, "np": np, "contextlib": contextlib, "functools": functools, **{c.__name__: c for c in (Quiet, Box, noted, several, plain, loud, recursive)}}


def program(seed: int) -> tuple[Any, str]:
    """The function of a seed, and its text."""
    text = placed(Writer(seed).text())
    name = f"<program {seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space = dict(_SPACE, __name__="fuzzed")
    exec(compile(text, name, "exec"), space)
    return space["program"], text


def arguments(seed: int, call: int) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(1000 * seed + call)
    x, y, t, a = (torch.randn(2, 3, generator=g).to(DEVICE) for _ in range(4))
    return x, y, 2 + call % 2, [1, 2], {"a": a, "b": x}, Box(t)


def outcome(fn: Any, args: tuple[Any, ...]) -> Any:
    """Result or exception, arguments afterwards, printed text, and which objects are the same."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            result: Any = fn(*args)
        except Exception as e:
            frames, tb = [], e.__traceback__
            while tb is not None:
                frames.append((tb.tb_frame.f_code.co_name, tb.tb_lineno))
                tb = tb.tb_next
            if isinstance(e, NameError):  # eager's own line is not always right: instructions that run as one
                frames = [(name, 0) for name, _ in frames]
            result = (type(e), str(e), frames[1:], type(e.__context__), type(e.__cause__))
    whole = (result, args)
    return whole, out.getvalue(), _identities(whole)


def _flat(value: Any, seen: list[Any], known: set[int]) -> None:
    if isinstance(value, (torch.Tensor, Box, list, dict)):
        seen.append(value)
        if id(value) in known:
            return
        known.add(id(value))
    if isinstance(value, (list, tuple)):
        for v in value:
            _flat(v, seen, known)
    elif isinstance(value, dict):
        for v in value.values():
            _flat(v, seen, known)
    elif isinstance(value, Box):
        _flat(vars(value), seen, known)


def _identities(value: Any) -> list[int]:
    seen: list[Any] = []
    _flat(value, seen, set())
    first: dict[int, int] = {}
    return [first.setdefault(id(v), k) for k, v in enumerate(seen)]


def difference(a: Any, b: Any, path: str = "") -> str | None:
    """Where two outcomes differ, or None."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.requires_grad != b.requires_grad:
            return f"{path}: {tuple(a.shape)} {a.dtype} instead of {tuple(b.shape)} {b.dtype}"
        return None if torch.allclose(a.double(), b.double(), 1e-4, 1e-5, equal_nan=True) else f"{path}: {a} instead of {b}"
    if type(a) is not type(b):
        return f"{path}: {a!r} instead of {b!r}"
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{path}: {a!r} instead of {b!r}"
        return next((d for k, (x, y) in enumerate(zip(a, b, strict=True)) if (d := difference(x, y, f"{path}[{k}]"))), None)
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{path}: keys {list(a)} instead of {list(b)}"
        return next((d for k in a if (d := difference(a[k], b[k], f"{path}[{k!r}]"))), None)
    if isinstance(a, Box):
        return difference(vars(a), vars(b), f"{path}.__dict__")
    if isinstance(a, str) and a != b:  # numbers written out are numbers: NumPy's tanh and torch's round differently
        parts, others = _FLOATS.split(a), _FLOATS.split(b)
        is_same = len(parts) == len(others) and parts[::2] == others[::2] and all(
            abs(float(p) - float(q)) <= 1e-4 * abs(float(q)) + 1e-5 for p, q in zip(parts[1::2], others[1::2], strict=True))
        return None if is_same else f"{path}: {a!r} instead of {b!r}"
    if isinstance(a, float):
        return None if a == b or (a != a and b != b) or abs(a - b) <= 1e-4 * abs(b) + 1e-5 else f"{path}: {a!r} instead of {b!r}"
    return None if a == b else f"{path}: {a!r} instead of {b!r}"


_ENDLESS = object()


class _TooLong(BaseException):
    """No handler of a program takes it."""


def _interrupt(*_: Any) -> None:
    raise _TooLong


def _within(seconds: int, fn: Any, seed: int, call: int, moved: int = 0) -> Any:
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(seconds)
    args = arguments(seed, call)
    for t in (*args[:2], *args[4].values(), args[5].t) if moved else ():
        t.mul_(1 + torch.randn(t.shape, generator=torch.Generator().manual_seed(moved)).to(t.device) * LAST_DIGIT)
    try:
        return outcome(fn, args)
    except _TooLong:
        return _ENDLESS
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(seed: int, dynamic: bool | None = None, backend: Any = "eager") -> str | None:
    """None, or how compiled and eager differ for this seed."""
    fn, _ = program(seed)
    compiled = torchsmith.compile(program(seed)[0], backend=backend, dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (0, 1, 2):
            want, got = _within(LONGEST, fn, seed, call), _within(4 * LONGEST, compiled, seed, call)
            if want is _ENDLESS or got is _ENDLESS:  # some programs never end
                return None if want is _ENDLESS else f"call {call}: it does not end"
            found = difference(got, want, f"call {call}: ")
            if found is not None:
                return found
            if not torch.is_grad_enabled() or sys.exc_info() != (None, None, None):
                return f"call {call}: the state of the thread is not what it was"
    return None


def enlarges_rounding(seed: int) -> bool:
    """Does eager itself differ from eager whose inputs differ in their last digits? Then kernels that round otherwise may, too."""
    fn, _ = program(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (0, 1, 2):
            want = _within(LONGEST, fn, seed, call)
            if want is not _ENDLESS and any(difference(_within(LONGEST, fn, seed, call, k), want) for k in range(1, 9)):
                return True
    return False


def main(argv: list[str]) -> int:
    numbers = [int(a) for a in argv if a.lstrip("-").isdigit()]
    first, count = ([*numbers, 0, 100])[:2] if len(numbers) > 1 else ((numbers or [0])[0], 1 if numbers else 100)
    bad = 0
    for seed in range(first, first + count):
        if "--show" in argv:
            print(program(seed)[1])
        try:
            found = check(seed, True if "--dynamic" in argv else None, "inductor" if "--native" in argv else "eager")
        except Exception as e:  # an exception of ours
            found = f"{type(e).__name__}: {e}"
        if found is not None:
            bad += 1
            print(f"seed {seed}: {found}\n", flush=True)
        torchsmith.compiler.reset()
        copy.copy(0)
    print(f"{bad} of {count} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
