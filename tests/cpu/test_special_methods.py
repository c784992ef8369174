"""Special methods that C functions ask for: what they answer may change between calls, and every call has to give what eager gives."""

from __future__ import annotations

import array
import bisect
import collections
import contextlib
import copy
import fractions
import functools
import heapq
import io
import itertools
import json
import math
import operator
import os
import re
import string
import struct
import sys
import textwrap
from typing import Any

import pytest
import torch

import torchsmith

ANSWER = [True]


def _says(one: Any, other: Any) -> Any:
    return lambda self, *rest: one if ANSWER[0] else other


class Asked:
    """Answers every question in one of two ways."""

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> Any:
        return iter([1, 2] if ANSWER[0] else [1])

    def __reversed__(self) -> Any:
        return iter([1, 2] if ANSWER[0] else [1])


for _name in ("eq", "lt", "le", "bool", "contains"):
    setattr(Asked, f"__{_name}__", _says(True, False))
for _name in ("ne", "gt", "ge"):
    setattr(Asked, f"__{_name}__", _says(False, True))
for _name in ("add", "radd", "mul", "neg", "abs", "int", "getitem", "call", "round", "floor", "ceil", "trunc"):
    setattr(Asked, f"__{_name}__", _says(5, 6))
for _name in ("pow", "matmul", "invert", "sizeof"):
    setattr(Asked, f"__{_name}__", _says(5, 6))
for _name in ("str", "repr", "format", "fspath"):
    setattr(Asked, f"__{_name}__", _says("a", "bb"))
for _name, _one, _other in (
    ("hash", 1, 1), ("len", 3, 1), ("index", 1, 0), ("float", 5.0, 6.0), ("complex", 5j, 6j), ("divmod", (1, 2), (3, 4)),
    ("bytes", b"a", b"bb"), ("length_hint", 2, 3), ("dir", ["a"], ["b", "c"]),
):  # fmt: skip
    setattr(Asked, f"__{_name}__", _says(_one, _other))

def written(items: Any, key: Any) -> Any:
    items[key] = [7]
    return items


def deleted(items: Any, key: Any) -> Any:
    del items[key]
    return items


def inserted(items: Any, key: Any) -> Any:
    items.insert(key, 7)
    return list(items)


PAIR = Asked(), Asked()
SPACE = {
    "torch": torch, "Asked": Asked, "PAIR": PAIR, "array": array, "bisect": bisect, "collections": collections, "copy": copy, "math": math,
    "fractions": fractions, "functools": functools, "heapq": heapq, "itertools": itertools, "json": json, "operator": operator, "os": os,
    "re": re, "string": string, "struct": struct, "sys": sys, "textwrap": textwrap,
    "written": written, "deleted": deleted, "inserted": inserted,
}  # fmt: skip
QUESTIONS = [
    "next(iter(lambda:A,B),7)", "list(iter(iter([A,B]).__next__,B))", "[len(list(g)) for _,g in itertools.groupby([1,2],lambda v:A)]",
    "[k for k,g in itertools.groupby([1,1,2])]", "list(itertools.compress(data='ab',selectors=[A,0]))",
    "list(itertools.islice([1,2,3],0,None,A)) if A.__index__() else 0", "[len(list(g)) for _,g in itertools.groupby([A,B])]",
    "list(map(len,[A,B]))", "list(map(bool,[A,B]))", "list(map(int,[A,B]))", "list(map(str,[A,B]))", "list(map(operator.eq,[A],[B]))",
    "list(map(operator.index,[A]))", "list(map(operator.neg,[A]))", "list(map(abs,[A]))", "len(list(filter(bool,[A,B])))",
    "len(list(filter(None,iter([A,B]))))", "len(list(itertools.filterfalse(None,[A,B])))", "len(list(itertools.takewhile(bool,[A,B])))",
    "len(list(itertools.dropwhile(bool,[A,B])))", "len(list(itertools.compress('ab',[A,B])))",
    "list(itertools.accumulate([A,B],operator.add))[-1]", "list(itertools.accumulate([A,B]))[-1]",
    "list(itertools.starmap(operator.add,[(A,B)]))", "functools.reduce(operator.add,[A,B])", "sum([A,B])", "sum(iter([A,B]),0)",
    "max(iter([A,B])) is A", "max([A,B]) is A", "min(A,B) is A", "sorted(iter([A,B]))[0] is A", "sorted([1,2],key=lambda v:A) and 1",
    "max([1,2],key=lambda v:(A,v))", "[A,B].index(B)", "[A,B].count(B)", "collections.deque([A,B]).count(B)",
    "collections.deque([A,B]).index(B)", "B in collections.deque([A])", "B in (A,3)", "B in {A:1}", "B in {A:1}.values()",
    "(0,B) in {0:A}.items()", "[A]==[B]", "(A,1)<(B,2)", "{1:A}=={1:B}", "{A}=={B}", "len({A,B})", "len({A:1,B:2})",
    "len(dict.fromkeys([A,B]))", "len(frozenset([A,B]))", "{A:1}.get(B,7)", "{A:1}.setdefault(B,7)", "len(dict(zip([A,B],[1,2])))",
    "len(set(iter([A,B])))", "len(collections.Counter([A,B]))", "len(collections.OrderedDict([(A,1),(B,2)]))", "heapq.heapify([A,B])",
    "heapq.nlargest(1,[A,B])[0] is A", "heapq.nsmallest(1,[(A,1),(B,2)])[0][1]", "bisect.bisect([A,B],A)", "'%s'%A", "'%s %s'%(A,B)",
    "'%d'%A", "'{}'.format(A)", "'{0!r:>3}'.format(A)", "f'{A}{A!r}{A:>5}'", "str([A])", "repr({1:A})", "f'{[A]}'",
    "''.join(map(str,[A]))", "'ab'[A]", "[1,2][A]", "(1,2)[A]", "range(5)[A]", "[1,2,3][A:]", "[0]*A", "list(range(A))", "hex(A)",
    "bin(A)", "chr(A)", "round(A)", "round(2.567,A)", "math.floor(A)", "math.ceil(A)", "math.trunc(A)", "math.sqrt(A)", "math.gcd(A,4)",
    "math.isclose(A,5.0)", "math.fsum([A,B])", "math.prod([A,B])", "math.prod([2,A])", "math.hypot(A,1.0)", "math.pow(A,2)", "int(A)",
    "float(A)", "complex(A)", "bool(A)", "bytes(A)", "abs(A)", "divmod(A,2)", "pow(A,2)", "pow(2,A)", "-A", "~A", "A@1", "A[0]",
    "3 in A", "list(A)", "[*A]", "list(reversed(A))", "len(A)", "A()", "any([A,0])", "all([A,1])", "any(iter([A]))", "not A", "A and 1",
    "A or 1", "1 if A else 2", "dir(A)", "sys.getsizeof(A)", "os.fspath(A)", "operator.length_hint(A)", "operator.index(A)",
    "operator.truth(A)", "operator.not_(A)", "operator.concat([1],[A])[1] is A", "operator.countOf([A],B)", "operator.indexOf([A],B)",
    "operator.contains([A],B)", "operator.itemgetter(A)([1,2])", "operator.itemgetter(0)(A)", "operator.eq(A,B)", "operator.add(A,1)",
    "operator.getitem([1,2],A)", "list(itertools.islice([1,2,3],A))", "list(itertools.repeat(1,A))",
    "list(itertools.combinations([1,2],A))", "list(itertools.islice(itertools.count(A),1))[0] is A",
    "list(itertools.product([1],repeat=A))", "list(itertools.chain(A,[3]))", "list(itertools.chain.from_iterable([A]))",
    "list(zip(A,A))", "list(enumerate(A))", "list(enumerate([1],A))", "list(map(lambda v:v,A))", "list(itertools.pairwise(A))",
    "tuple(A)", "set(A)", "dict([A]) if len([*A])==2 else 0", "[1,2,3].pop(A)", "[1].insert(A,2)", "[1,2,3].__getitem__(A)",
    "'abc'.find('c',A)", "'abc'.startswith('b',A)", "'abc'.zfill(A)", "'abc'.center(A)", "'a'*A", "'a b'.split(' ',A)",
    "'aaa'.replace('a','b',A)", "(5).to_bytes(A,'big') if A.__index__() else 0", "(300).to_bytes(2,'big').hex(':',A)",
    "slice(A).indices(5)", "slice(None,A)==slice(None,B)", "isinstance(A,K)", "functools.partial(max,A)(B) is A",
    "functools.cmp_to_key(lambda a,b:-1 if A else 1)(1)<functools.cmp_to_key(lambda a,b:-1 if A else 1)(2)", "torch.tensor(float(A))",
    "torch.zeros(A)", "torch.full((2,),int(A))", "x[A]", "x[A:]", "x.reshape(-1,A) if A.__index__() else 0", "x*float(A)",
    "x.view(A,-1) if A.__index__() else 0", "x.repeat(A)", "x.narrow(0,0,A)", "x.unsqueeze(A)", "x.add(1,alpha=A)", "x.roll(A)",
    "x.eq(int(A))", "torch.ones(2,3).sum(dim=A)", "torch.arange(A)", "torch.stack([x,x],dim=A)", "torch.cat([x,x])[A]",
    "struct.pack('b',A)", "array.array('b',[A])[0]", "bytearray([A])", "memoryview(b'abc')[A]", "json.dumps({'a':int(A)})",
    "copy.copy([A])[0] is A", "string.Formatter().format('{}',A)", "textwrap.fill(str(A))", "fractions.Fraction(int(A))",
    "re.sub('a',str(A),'cac')", "re.match('a',str(A)) is None", "ord(str(A)[0])", "max(str(A),'c')", "str.join('-',map(str,[A,B]))",
    "str.__mod__('%s',A)", "int.__add__(1,A)", "list.__mul__([0],A)", "list.index([A],B)", "dict.get({A:1},B)",
    "set.__contains__({A},B)", "tuple.__eq__((A,),(B,))", "tuple.__lt__((A,1),(B,2))", "object.__eq__(A,B)", "type(A).__len__(A)",
    "K.__add__(A,1)", "getattr(A,'n')", "vars(A)", "hash(A)", "callable(A)",
]


def _plain(v: Any) -> Any:
    if isinstance(v, torch.Tensor):
        return v.tolist()
    if isinstance(v, (list, tuple, set, frozenset)):
        return type(v), [_plain(x) for x in v]
    return "asked" if isinstance(v, Asked) else len(v) if isinstance(v, dict) else (type(v), str(v))


BESIDE_TENSORS = [
    "[A, x].index(A), [A, x].count(A)", "A in [3, A, x]", "(x, A) == (x, B)", "{A: x, B: x}.get(A, 3)", "len({A: x, B: x})",
    "dict([(A, x)])[B]", "sorted([(A, x), (B, x * 2)])[0][1]", "max([(A, x), (B, x * 2)])[1]", "[x, x * 2].pop(A)", "(x, x * 2)[A]",
    "written([x, x * 2], A)", "written([x, x * 2], slice(A, 2))", "written([1, 2, 3], slice(A))", "deleted([x, x * 2], A)",
    "deleted([1, 2, 3], slice(A))", "inserted([x, x], A)", "inserted(collections.deque([x, x]), A)",
    "list(itertools.compress([x, x], [A, A]))",
]  # fmt: skip
PROGRAMS = [*itertools.product(QUESTIONS, ["Asked(), Asked()", "PAIR"]), *((question, "PAIR") for question in BESIDE_TENSORS)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("question", "made"), PROGRAMS)
def test_what_c_functions_ask(question: str, made: str) -> None:
    program = "def fn(x):\n  A, B = %s\n  try: r = %s\n  except Exception as e: r = type(e).__name__, str(e)\n  return x + 1, r"
    space: dict[str, Any] = dict(SPACE)
    exec(compile(program % (made, question), __file__, "exec"), space)
    compiled = torchsmith.compile(space["fn"], backend="eager", options={"warn_eager": False})
    for answer in (True, True, False):
        ANSWER[0] = answer
        seen = []
        for call in (space["fn"], compiled):
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                seen.append((_plain(call(torch.ones(2))[1]), text.getvalue()))
        assert seen[0] == seen[1]


class Row(list):  # type: ignore[type-arg]
    """Says to hold other things than it does; C asks it."""

    def __iter__(self) -> Any:
        return iter([9, 8] if ANSWER[0] else [7])

    def __len__(self) -> int:
        return 2 if ANSWER[0] else 1


class Like(list):  # type: ignore[type-arg]
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return ANSWER[0]


class Shape(tuple):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter((4,) if ANSWER[0] else (2,))

    def __len__(self) -> int:
        return 1


class Names(dict):  # type: ignore[type-arg]
    def keys(self) -> Any:
        return ["z"] if ANSWER[0] else ["y"]

    def __getitem__(self, key: Any) -> Any:
        return 5

    def __iter__(self) -> Any:
        return iter(["z"])


Pair = collections.namedtuple("Pair", "a b")
OF_CONTAINERS = [
    "json.dumps(row)", "collections.Counter(row)", "bytes(row)", "bisect.bisect(row, 2)", "torch.tensor(row)", "sum(row)", "max(row)",
    "list(row)", "sorted(row)", "set(row)", "[*row]", "9 in row", "','.join(map(str, row))", "[like].index([3])", "dict(names)",
    "sorted(names)", "tuple(torch.zeros(shape).shape)", "tuple(x.new_zeros(shape).shape)", "x[shape]",
    "torch.broadcast_shapes(shape, (1,))", "torch.cat(pair)",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("question", OF_CONTAINERS)
def test_what_c_functions_ask_of_containers_that_speak_for_themselves(question: str) -> None:
    program = "def fn(x, row, like, shape, names, pair):\n  try: r = %s\n  except Exception as e: r = type(e).__name__\n  return x + 1, r"
    space: dict[str, Any] = dict(SPACE)
    exec(compile(program % question, __file__, "exec"), space)
    compiled = torchsmith.compile(space["fn"], backend="eager", options={"warn_eager": False})
    for answer in (True, True, False):
        ANSWER[0] = answer
        given = Row([1, 2, 3]), Like([1]), Shape((2, 3)), Names(a=1), Pair(torch.ones(1), torch.zeros(2))
        seen = [_plain(call(torch.ones(6), *given)[1]) for call in (space["fn"], compiled)]
        assert seen[0] == seen[1]
