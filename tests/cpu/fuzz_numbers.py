"""Every number that an operator takes, as one that varies from call to call.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz_numbers.py [--only GLOB] [--dtype float32] [--rules] [--from 0] [--to 100]

Operators are those that have a shape rule. Their calls are the ones that torch's operator database makes, forward and backward; for
operators that it does not reach, calls drawn by the schema until eager takes one. Each number of a call in turn (an int, a float, an item
of a list, a default, an optional one that is left out) varies: the rule is traced with a symbol for it, and what it says of other values,
where its guards allow them, is held against eager; then a function that has it as an argument is compiled and called with several values.
Compared are acceptance, sizes, strides, dtypes, values, and the type of an exception. A process for each operator: a crash is a finding.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import mmap
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_harness import Draw
from fuzz_rules import BIG, UNFIT, Call, Recorded, copied, described, is_rounding, outcome, text
from torch.utils import _pytree as pytree

import torchsmith
from torchsmith.graph.schema import info
from torchsmith.graph.sizes import SizeFacts, expr_of
from torchsmith.graph.tracing import RULES, Tracing, tensor_like
from torchsmith.ir.number import number_of

SECONDS = 300  # of an operator
TRIES = 600  # calls drawn by the schema
NUMERIC = ("int", "float", "number")
NAMED = ("dtype", "out_dtype", "layout", "memory_format")  # which schemas call integers
MODES = ("interpolation_mode", "padding_mode")  # eager refuses no others than those that there are, and leaves memory unset then
# Eager's results hold what was in memory before.
UNSETTLED = frozenset({"_ctc_loss"})


def kind_of(argument: Any) -> str:
    """The numbers that an argument of a schema holds: "int", "float" or "number"; "" where it holds none."""
    kind = str(argument.type).removeprefix("Optional[").removeprefix("List[").rstrip("]")
    return kind if kind in NUMERIC and argument.name not in NAMED + MODES else ""


def operators() -> list[Any]:
    """Those that have a rule and take numbers."""
    with Tracing(SizeFacts()):
        pass  # fills RULES
    found = [op for op in RULES if not info(op).writes and str(op).split(".")[1] not in UNFIT | UNSETTLED]
    return sorted((op for op in found if any(kind_of(a) for a in op._schema.arguments)), key=str)


# ---------------------------------------------------------------- calls


def database_calls(dtype: torch.dtype, step: int = 1) -> dict[Any, list[Call]]:
    """By operator: calls that the operator database makes, of every `step`-th entry, and those of its derivatives."""
    from torch.testing._internal import common_methods_invocations as database

    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    found: dict[Any, list[Call]] = {}
    for op in database.op_db[::step]:
        kinds = op.supported_dtypes("cpu")
        kind = dtype if dtype in kinds else torch.int64 if torch.int64 in kinds and dtype == torch.float32 else None
        if kind is None:
            continue
        torch.manual_seed(0)
        grad = op.supports_autograd and kind.is_floating_point
        calls: list[Call] = []
        for sample in islice(op.sample_inputs("cpu", kind, requires_grad=grad), 4):
            outcome(lambda op=op, s=sample, calls=calls, grad=grad: record(calls, grad, op.op, s.input, *s.args, **s.kwargs))
        for call in calls:
            found.setdefault(call[0], []).append(call)
    for fn, shape in BESIDES[::step]:
        calls, x = [], torch.linspace(-1, 2, math.prod(shape)).reshape(shape).to(dtype).requires_grad_(dtype.is_floating_point)
        outcome(lambda fn=fn, x=x, calls=calls: record(calls, True, fn, x))  # type: ignore[misc]
        for call in calls:
            found.setdefault(call[0], []).append(call)
    return found


def record(calls: list[Call], grad: bool, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Appends the calls of fn(*args, **kwargs) and of its derivative."""
    with Recorded(calls, with_draws=True), torch.set_grad_enabled(grad):
        made = pytree.tree_leaves(fn(*args, **kwargs))
        outs = [t for t in made if isinstance(t, torch.Tensor) and t.requires_grad]
        wanted = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        if outs and wanted:
            torch.autograd.grad(outs, wanted, [torch.ones_like(t) for t in outs], allow_unused=True)


def _resized(mode: str, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.interpolate(x, scale_factor=2, mode=mode, **options)


_LONG = torch.tensor([2, 3])
# Functions of one tensor, for operators that the database does not reach.
BESIDES: tuple[tuple[Callable[[torch.Tensor], Any], tuple[int, ...]], ...] = (
    (lambda x: F.ctc_loss(x, torch.ones(2, 4, dtype=torch.int64), _LONG + 3, _LONG), (6, 2, 5)),
    (lambda x: F.ctc_loss(x, torch.ones(2, 4, dtype=torch.int64), [6, 5], [2, 3]), (6, 2, 5)),
    *((_resized(mode), (1, 2, 3, 4, 2)[:n]) for n in (3, 4, 5) for mode in ("nearest", "nearest-exact")),
    (_resized("bicubic", antialias=True), (1, 2, 3, 4)), (_resized("bilinear", antialias=True), (1, 2, 3, 4)),
    *((lambda x, m=m: F.embedding_bag(torch.tensor([1, 2, 1]), x, torch.tensor([0, 1]), mode=m), (4, 3)) for m in ("sum", "mean", "max")),
    (lambda x: F.embedding_bag(torch.tensor([1, 2]), x[:, :2], torch.tensor([0, 1]), mode="sum", per_sample_weights=x[0, :2]), (4, 3)),
    (lambda x: F.grid_sample(x, x.permute(0, 2, 3, 1)[..., :2]), (1, 2, 3, 4)), (lambda x: torch._masked_softmax(x, x > 1, 1, 0), (3, 4)),
    (lambda x: F.embedding(torch.tensor([1, 2]), x, padding_idx=1, scale_grad_by_freq=True), (4, 3)),
)  # fmt: skip
SHAPES: tuple[tuple[int, ...], ...] = ((4, 4), (3,), (2, 4, 4), (2, 3, 4, 4), (1, 2, 4, 4, 4), (4, 6), ())
POSITIONS = ("index", "indices", "offsets", "target", "targets", "input_lengths", "target_lengths", "sorter")


def drawn(op: Any, r: Draw, dtype: torch.dtype) -> Call:
    """A call by the schema: nearly all parameters given, the tensors often of one shape."""
    shape = r.choice(SHAPES)
    is_alike = r.random() < 0.7

    def tensor(name: str) -> torch.Tensor:
        sizes = shape if is_alike else r.choice(SHAPES)
        x = torch.arange(math.prod(sizes), dtype=torch.float32).reshape(sizes) % 5
        if "mask" in name:
            return x > 1
        if any(name == p for p in POSITIONS) or "indices" in name:
            return (x % 3).long()
        return (x / 2 - 0.75).to(dtype if r.random() < 0.9 else torch.int64)

    def value(name: str, kind: str) -> Any:
        if name in NAMED:
            return None
        if kind.startswith("Optional["):
            return None if r.random() < 0.4 else value(name, kind[9:-1])
        if kind.startswith("List["):
            return [value(name, kind[5:-1]) for _ in range(r.choice((1, 2, 2, 3, len(shape))))]
        if kind == "Tensor":
            return tensor(name)
        if kind == "bool":
            return r.random() < 0.5
        if kind == "int":
            return r.choice((0, 1, 1, 2, 3, 4))
        if kind == "float":
            return r.choice((0.5, 1.5))
        if kind == "number":
            return r.choice((2, 3, 0.5))
        if kind == "str":
            return r.choice(("mean", "sum", "none", "floor", "trunc", "add", "multiply"))
        return None

    wanted = [a for a in op._schema.arguments if not a.has_default_value() or (kind_of(a) and r.random() < 0.7)]
    return op, (), {a.name: value(a.name, str(a.type)) for a in wanted}


def named(call: Call) -> Call:
    """The call with all arguments by name, and with the defaults of those that hold numbers."""
    func, args, kwargs = call
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    full = {}
    for a in func._schema.arguments:
        if a.name in given:
            full[a.name] = given[a.name]
        elif a.has_default_value() and kind_of(a):
            full[a.name] = a.default_value
    return func, (), full


def calls_of(op: Any, database: dict[Any, list[Call]], dtype: torch.dtype) -> list[Call]:
    """Calls that eager takes; empty where none is found. Derivatives believe positions that a forward call made: none is made up."""
    found = [named(c) for c in database.get(op, ())]
    r = Draw(sum(map(ord, str(op))))
    believes = "_backward" in str(op) and any(a.name == "indices" for a in op._schema.arguments)
    for _ in range(0 if found or believes else TRIES):
        call = named(drawn(op, r, dtype))
        if not isinstance(eager(call), Exception):
            found.append(call)
            if len(found) == 3:
                break
    return found


# ---------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Place:
    """Leaf `leaf` of a call's arguments: the `item`-th of parameter `name`. `value`: where it begins."""

    leaf: int
    name: str
    item: int
    value: int | float

    def values(self) -> list[int | float]:
        v = self.value
        if self.name == "mode":  # others than there are lead some kernels out of memory
            return [v, 0, 1, 2, v]
        if type(v) is float:
            return [v, v + 0.25, v * 2 + 0.125, -v, v]
        return [v, v + 1, v + 2, v - 1, v] if abs(v) < 1000 else [v, 3, 5, 2, v]


def places(call: Call) -> Iterator[Place]:
    """A number where a real one is taken begins as an int and as a float."""
    kinds = {a.name: kind_of(a) for a in call[0]._schema.arguments}
    leaf = -1
    for name, given in call[2].items():
        for item, v in enumerate(pytree.tree_leaves(given)):
            leaf += 1
            if not kinds[name] or type(v) not in (int, float, type(None)):
                continue
            if kinds[name] == "int":
                yield Place(leaf, name, item, 2 if v is None else int(v))
            else:
                yield Place(leaf, name, item, 0.5 if v is None else float(v))
                yield Place(leaf, name, item, 2 if v is None or not math.isfinite(v) else int(v))


def cases(calls: list[Call]) -> Iterator[tuple[Call, Place]]:
    """Each number of an operator once: of calls that give it in the same form the first."""
    seen = set()
    for call in calls:
        for p in places(call):
            key = (p.name, type(p.value), min(p.item, 2), len(pytree.tree_leaves(call[2][p.name])), call[2][p.name] is None)
            if key not in seen and not isinstance(eager(call, p, p.value), Exception):
                seen.add(key)
                yield call, p


def filled(call: Call, place: Place | None, number: Any, tensors: Callable[[torch.Tensor], Any] = lambda t: t) -> Call:
    leaves, tree = pytree.tree_flatten(call[2])
    leaves = [tensors(v) if isinstance(v, torch.Tensor) else v for v in leaves]
    if place is not None:
        leaves[place.leaf] = number
    return call[0], (), pytree.tree_unflatten(leaves, tree)


def eager(call: Call, place: Place | None = None, number: Any = None) -> Any:
    func, _, kwargs = filled(call, place, number, copied)
    torch.manual_seed(0)
    return outcome(lambda: func(**kwargs))


def ruled(call: Call, place: Place) -> str:
    """What the rule, traced with a symbol for the number, says wrong of the number at hand or of another one; "" if nothing."""
    facts = SizeFacts()
    v = place.value
    if type(v) is float:
        symbol: Any = facts.fresh_float(v, ("in", "scalar"))
    elif v >= 2:
        symbol = facts.fresh(v, ("in", "scalar"), 2)
    else:
        return ""
    func, _, kwargs = filled(call, place, symbol, lambda t: tensor_like(t, None, facts))
    with Tracing(facts):
        found = outcome(lambda: func(**kwargs))
    if isinstance(found, Exception):  # eager then, which the compiled call tells
        return ""
    name = symbol.node.expr.name
    for w in dict.fromkeys(place.values()):
        if type(w) is int and w < 2:
            continue
        holds = [number_of(g, {name: w}) for g in (*facts.guards, *facts.late)]
        if not all(holds):
            continue
        want = eager(call, place, w)
        if isinstance(want, Exception):
            continue  # the compiled call tells whether something else refuses it
        mine = [evaluated(t, {name: w}) for t in pytree.tree_leaves(found)]
        theirs = [described(t) for t in pytree.tree_leaves(want)]
        if mine != theirs and not any(None in m[0] for m in mine if isinstance(m, tuple)):
            return f"rule for {w}: {mine} instead of {theirs}"
    return ""


def evaluated(t: Any, numbers: dict[str, Any]) -> Any:
    """`described`, with these numbers for symbols."""
    if not isinstance(t, torch.Tensor):
        return {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}.get(type(t), type(t))
    shape = tuple(number_of(expr_of(n), numbers) for n in t.shape)
    steps = tuple(number_of(expr_of(s), numbers) for s, n in zip(t.stride(), shape, strict=True) if n != 1) if 0 not in shape else ()
    return shape, steps, t.dtype


def compiled(call: Call, place: Place, doing: Callable[[str], None] = lambda s: None) -> str:
    """What differs between eager and a compiled function that is given the number; "" if nothing."""
    func, _, kwargs = call
    leaves, tree = pytree.tree_flatten(kwargs)
    at = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]

    def run(number: Any, *given: torch.Tensor) -> Any:
        now = list(leaves)
        for i, t in zip(at, given, strict=True):
            now[i] = t
        now[place.leaf] = number
        return func(**pytree.tree_unflatten(now, tree))

    torchsmith.compiler.reset()
    made = torchsmith.compile(run)
    for w in place.values():
        doing(f"eager {place} {w} {text(call)}")
        want = eager(call, place, w)
        if any(isinstance(t, torch.Tensor) and t.numel() > 4 * BIG for t in pytree.tree_leaves(want)):
            continue
        doing(f"compiled {place} {w} {text(call)}")
        torch.manual_seed(0)
        given = copied([leaves[i] for i in at])
        got = outcome(lambda w=w, given=given: made(w, *given))
        why = differ(filled(call, place, w), got, want)
        if why and not differ(filled(call, place, w), eager(call, place, w), want):  # else eager reads what it has not been given
            return f"for {w}: {why}"
    return ""


def differ(call: Call, got: Any, want: Any) -> str:
    if isinstance(want, Exception) or isinstance(got, Exception):
        said = [f"{type(v).__name__} {str(v)[:110]!r}" for v in (got, want)]
        return "" if type(want) is type(got) else f"{said[0]} instead of {said[1]}"
    mine, theirs = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if list(map(described, mine)) != list(map(described, theirs)):
        return f"{list(map(described, mine))} instead of {list(map(described, theirs))}"
    for a, b in zip(mine, theirs, strict=True):
        wide = isinstance(b, torch.Tensor) and b.dtype in (torch.float16, torch.bfloat16)
        near = {"rtol": 2e-2, "atol": 1e-2} if wide else {"rtol": 1e-4, "atol": 1e-5}
        why = outcome(lambda a=a, b=b, near=near: torch.testing.assert_close(a, b, equal_nan=True, **near))
        if isinstance(why, Exception) and not is_rounding(call, mine, theirs):
            return " ".join(str(why).split())[:200]
    return ""


def findings(
    op: Any, calls: list[Call], rules: bool = False, doing: Callable[[str], None] = lambda s: None
) -> Iterator[tuple[Call, Place, str]]:
    """Every number of `op`, with what differs ("" if nothing). rules: without compiling."""
    doing(f"eager {op}")
    for call, place in cases(calls):
        doing(f"rule {place} {text(call)}")
        why = ruled(call, place)
        if not rules and not why:
            why = compiled(call, place, doing)
        yield call, place, why


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="*")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--rules", action="store_true", help="compile nothing")
    p.add_argument("--from", dest="first", type=int, default=0, help="number of the first operator")
    p.add_argument("--to", dest="last", type=int, default=1 << 30)
    o = p.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dtype = getattr(torch, o.dtype)
    ops = [op for op in operators() if fnmatch.fnmatch(str(op), f"aten.{o.only}")][o.first : o.last]
    database = database_calls(dtype)
    print(f"{len(ops)} operators, {sum(op in database for op in ops)} of them in the database", flush=True)
    tally: Counter[str] = Counter()
    note, counts = mmap.mmap(-1, 4096), mmap.mmap(-1, 16)

    def doing(what: str) -> None:
        note[:] = what.encode()[:4096].ljust(4096, b" ")

    for op in ops:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            signal.alarm(SECONDS)
            doing(f"eager drawing {op}")
            calls, count, wrong = calls_of(op, database, dtype), 0, 0
            for call, place, why in findings(op, calls, o.rules, doing):
                count += 1
                if why:
                    wrong += 1
                    print(f"{op} {place.name}[{place.item}] = {place.value}: {why} :: {text(call)[:300]}", flush=True)
            if not calls:
                print(f"unreached {op}", flush=True)
            counts[:] = count.to_bytes(8, "little") + wrong.to_bytes(8, "little")
            sys.stdout.flush()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        said = note[:].decode(errors="replace").strip()
        if status:
            by = " by eager" if said.startswith("eager") else ""
            tally[f"crashed{by}"] += 1
            print(f"CRASH{by} {op}: status {status}: {said[:600]}", flush=True)
        else:
            n, wrong = int.from_bytes(counts[:8], "little"), int.from_bytes(counts[8:], "little")
            tally.update(operators=1, numbers=n, wrong=wrong, unreached=int(not n))
    print(dict(tally))


if __name__ == "__main__":
    main()
