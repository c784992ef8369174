"""Operators called with arguments that fit and that do not: what eager takes is described as by eager, what it refuses is refused.

    python tests/cpu/fuzz_rules.py --seed 0 --count 2000 [--only GLOB] [--dtype float32] [--strict]

Calls of ATen operators are recorded while the samples of torch's operator database run; each is then changed in one or two places: a size,
a dimension more or less, a dtype, the order in memory, a number, a missing tensor. The shape rule (on plain sizes, and with every size and
some numbers as symbols) is held against eager's own kernel: acceptance, sizes, strides, dtype, offset of views. Where eager refuses and
the rule does not, the compiled call has to: running also checks. Everything runs in children, since a crash is a finding.
"""

from __future__ import annotations

import argparse
import fnmatch
import mmap
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fuzz_harness import DEVICE, Draw
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import torchsmith
from torchsmith.codes import Unsupported
from torchsmith.graph.layout import hint_of
from torchsmith.graph.schema import info
from torchsmith.graph.sizes import SizeFacts
from torchsmith.graph.tracing import RULES, Tracing, tensor_like

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
# Values that are anything; and the transforms' kernels, which do not check their dimensions: eager's crash is no finding.
_UNFIT = """empty empty_like empty_strided empty_permuted new_empty new_empty_strided _local_scalar_dense resize sym_size
    _fft_r2c _fft_c2r _fft_c2c"""
UNFIT = frozenset(_UNFIT.split())
BIG = 4096  # elements of an operand or a result


class Recorded(TorchDispatchMode):
    """Keeps calls of operators that have a rule; of those that draw, where asked for."""

    def __init__(self, calls: list[Call], with_draws: bool = False) -> None:
        super().__init__()
        self.calls, self.with_draws = calls, with_draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        row = info(func)
        if func in RULES and not row.writes and (self.with_draws or not row.is_random) and row.name.split(".")[1] not in UNFIT:
            leaves = pytree.tree_leaves((args, kwargs))
            if all(t.layout is torch.strided and t.numel() <= BIG and not t.is_conj() for t in leaves if isinstance(t, torch.Tensor)):
                self.calls.append((func, *pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), (args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def corpus(dtype: torch.dtype, only: str, draw: Draw, entries: int | None = None) -> list[Call]:
    """Calls that the operator database makes: of all entries, or of some."""
    from torch.testing._internal import common_methods_invocations as database

    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    with Tracing(SizeFacts()):
        pass  # fills RULES
    found: dict[Any, list[Call]] = {}
    ops = [op for op in database.op_db if dtype in op.supported_dtypes("cpu")]
    if entries is not None:
        ops = [draw.choice(ops) for _ in range(entries)]
    for op in ops:
        calls: list[Call] = []
        for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
            if number == 4:
                break
            try:
                with Recorded(calls), torch.no_grad():
                    op.op(sample.input, *sample.args, **sample.kwargs)
            except Exception:  # the database holds samples that eager refuses
                continue
        for call in calls:
            if fnmatch.fnmatch(str(call[0]), f"aten.{only}") and len(found.setdefault(call[0], [])) < 12:
                found[call[0]].append(call)
    return [c for calls in found.values() for c in calls]


# ---------------------------------------------------------------- changes


def change_tensor(r: Draw, t: torch.Tensor) -> Any:
    how = r.randrange(9)
    if how == 0:
        return t.to(r.choice(DTYPES))
    if how == 1:
        return t.unsqueeze(r.randrange(t.dim() + 1))
    if not t.dim():
        return t.reshape(1)
    d = r.randrange(t.dim())
    if how == 2 and t.shape[d]:
        return t.select(d, 0)
    if how in (3, 4):
        return t.narrow(d, 0, min(1, t.shape[d]))
    if how == 5:
        return t.narrow(d, 0, 0)
    if how == 6:
        return torch.cat([t, t.narrow(d, 0, min(1, t.shape[d]))], d)
    if how == 7:
        return t.transpose(d, r.randrange(t.dim()))
    return t.transpose(d, -1).contiguous().transpose(d, -1)


NUMBERS: tuple[Any, ...] = (-3, -2, -1, 0, 1, 2, 3, 5)
FLOATS: tuple[Any, ...] = (-1.5, 0.0, 0.5, 2.0, float("nan"), float("inf"), 1e39)


def change(r: Draw, v: Any, kind: str) -> Any:
    """Another value for one argument of the schema's type `kind`."""
    if isinstance(v, torch.Tensor):
        return None if kind.startswith("Optional") and r.random() < 0.2 else change_tensor(r, v)
    if isinstance(v, (list, tuple)):
        items = list(v)
        at = r.randrange(len(items)) if items else 0
        how = r.random()
        if how < 0.15 or not items:
            return [*items, items[0] if items else 1]
        if how < 0.3:
            return items[:at] + items[at + 1 :]
        items[at] = change(r, items[at], kind)
        return items
    if isinstance(v, bool):
        return not v if r.random() < 0.8 or "number" not in kind else 2
    if isinstance(v, int):
        return r.choice(FLOATS[:4]) if "number" in kind and r.random() < 0.3 else r.choice((*NUMBERS, v + 1, v - 1))
    if isinstance(v, float):
        return r.choice(FLOATS) if r.random() < 0.8 else r.choice(NUMBERS)
    if isinstance(v, torch.dtype):
        return r.choice(DTYPES)
    if isinstance(v, str):
        return r.choice((v, "sum", "mean", "none", "floor", "what"))
    if v is None and ("int" in kind or "float" in kind or "number" in kind) and "dtype" not in kind:
        return r.choice(NUMBERS)
    return v


def changed(r: Draw, call: Call) -> Call:
    func, args, kwargs = call
    given, named = list(args), dict(kwargs)
    schema = {a.name: str(a.type) for a in func._schema.arguments}
    names = [a.name for a in func._schema.arguments]
    for _ in range(r.randrange(0, 3)):
        places = [*range(len(given)), *(k for k in named if k not in ("device", "layout", "pin_memory", "generator", "memory_format"))]
        if not places:
            break
        at = r.choice(places)
        if isinstance(at, int):
            given[at] = change(r, given[at], schema[names[at]])
        else:
            named[at] = change(r, named[at], schema[at])
    return func, tuple(given), named


# ---------------------------------------------------------------- what is compared


def outcome(fn: Callable[[], Any]) -> Any:
    try:
        return fn()
    except Exception as e:  # the exception is what is compared
        return e


def copied(value: Any, device: str | None = None) -> Any:
    """The same tensors in other memory, with the same strides."""

    def copy(t: torch.Tensor) -> torch.Tensor:
        size = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        flat = torch.as_strided(t, (size,), (1,)).clone().to(device or t.device)
        return flat.as_strided(t.shape, t.stride())

    return pytree.tree_map_only(torch.Tensor, copy, value)


def moved(call: Call) -> Call:
    """The call with its tensors on DEVICE."""
    args, kwargs = pytree.tree_map_only(torch.device, lambda d: torch.device(DEVICE), copied(call[1:], DEVICE))
    return call[0], args, kwargs


def traced(call: Call, r: Draw | None) -> Any:
    """The rule's result; with `r` sizes are symbols, and some of the numbers above 1. Once more where some symbol is left one value."""
    func, args, kwargs = call
    facts = SizeFacts()
    pinned: set[int] = set()  # which symbols, in the order in which they are made
    chance = 0 if r is None else r.randrange(1 << 20)

    def fresh(n: int, *rest: Any) -> Any:
        order.append(n)
        return n if len(order) in pinned else facts.fresh(n, *rest)

    def tracing(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            sizes = None if r is None else tuple(fresh(n, ("in", "size", 0)) if n else n for n in v.shape)
            return tensor_like(v, sizes, facts)
        if type(v) is int and r is not None and 2 <= v < 1000 and (v + chance) % 3 == 0:
            return fresh(v, ("in", "scalar"), 2)
        return v

    while True:
        order: list[int] = []
        made = facts = SizeFacts()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Tracing(facts):
                found = func(*pytree.tree_map(tracing, args), **pytree.tree_map(tracing, kwargs))
        free = [k for k in range(1, len(order) + 1) if k not in pinned]
        more = {free[int(name[1:])] for name in made.pinned() if name[0] == "s"}
        if not more:
            return found
        pinned |= more


def described(t: Any) -> Any:
    if not isinstance(t, torch.Tensor):
        return type(t)
    shape = tuple(hint_of(n) for n in t.shape)
    steps = tuple(hint_of(s) for s, n in zip(t.stride(), shape, strict=True) if n > 1) if 0 not in shape else ()
    return shape, steps, t.dtype


def told(value: Any) -> bool:
    """Are all sizes known before running?"""
    return all(hint_of(n) < 1 << 30 for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) for n in t.shape)


def compiled_like(call: Call, want: Any, dynamic: bool) -> str:
    """What differs between eager and the compiled call, "" if nothing."""
    func, args, kwargs = call
    leaves, tree = pytree.tree_flatten((args, kwargs))
    at = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]

    def run(*given: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, t in zip(at, given, strict=True):
            filled[i] = t
        args, kwargs = pytree.tree_unflatten(filled, tree)
        return func(*args, **kwargs)

    torchsmith.compiler.reset()
    got = outcome(lambda: torchsmith.compile(run, dynamic=dynamic)(*copied([leaves[i] for i in at])))
    if isinstance(want, Exception) or isinstance(got, Exception):
        same = type(want) is type(got)
        return "" if same else f"compiled: {type(got).__name__} {str(got)[:90]!r} instead of {type(want).__name__} {str(want)[:90]!r}"
    mine, theirs = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if list(map(described, mine)) != list(map(described, theirs)):
        return f"compiled: {list(map(described, mine))} instead of {list(map(described, theirs))}"
    for a, b in zip(mine, theirs, strict=True):
        try:
            wide = b.dtype in (torch.float16, torch.bfloat16) if isinstance(b, torch.Tensor) else False
            torch.testing.assert_close(a, b, equal_nan=True, **({"rtol": 2e-2, "atol": 1e-2} if wide else {"rtol": 1e-4, "atol": 1e-5}))
        except AssertionError as e:
            if not is_rounding(call, mine, theirs):
                return f"compiled: {' '.join(str(e).split())[:200]}"
    return ""


def is_rounding(call: Call, mine: list[Any], theirs: list[Any]) -> bool:
    """Is every result no farther from a run in float64 than twice eager's?"""
    func, args, kwargs = call

    def wide(v: Any) -> Any:
        return v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else torch.float64 if isinstance(v, torch.dtype) else v

    exact = outcome(lambda: pytree.tree_leaves(func(*pytree.tree_map(wide, args), **pytree.tree_map(wide, kwargs))))
    if isinstance(exact, Exception) or not all(t.is_floating_point() for t in (*exact, *mine, *theirs)):
        return False
    for e, g, w in zip(exact, mine, theirs, strict=True):
        if not torch.equal(g.isfinite(), w.isfinite()):
            return False
        ours, eagers = ((t.double() - e).abs().nan_to_num(0.0, 0.0) for t in (g, w))
        if ours.numel() and not ours.max() <= 2 * eagers.max():
            return False
    return True


def text(call: Call) -> str:
    said = [f"{tuple(v.shape)}{str(v.dtype)[6:]}{'' if v.is_contiguous() else v.stride()}" if isinstance(v, torch.Tensor) else repr(v)
            for v in pytree.tree_leaves((call[1], call[2]))]  # fmt: skip
    return f"{call[0]}({', '.join(said)})"


def check(call: Call, r: Draw, values: float = 0.0, strict: bool = False, doing: Callable[[str], None] = lambda s: None) -> str:
    """ "" or what differs. `values`: how often the compiled call's values are compared although the rule agrees. `strict`: also what the
    rule refuses and eager does not, which then runs eagerly."""
    doing(f"eager {text(call)}")
    if DEVICE != "cpu":
        if isinstance(outcome(lambda: call[0](*copied(call[1]), **copied(call[2]))), Exception):
            return ""  # a wrong index would stop the device
        call = moved(call)
    func, args, kwargs = call
    want = outcome(lambda: func(*copied(args), **copied(kwargs)))
    if any(isinstance(t, torch.Tensor) and (t.numel() > BIG or t.layout is not torch.strided) for t in pytree.tree_leaves(want)):
        return ""
    if isinstance(want, NotImplementedError):
        return ""
    for symbols in (None, r):
        doing(f"{'plain' if symbols is None else 'symbols'} {text(call)}")
        got = outcome(lambda s=symbols: traced(call, s))
        if isinstance(got, Unsupported):
            continue
        if isinstance(want, Exception):
            if isinstance(got, Exception):
                continue
            why = compiled_like(call, want, symbols is not None)
        elif isinstance(got, Exception):
            return f"refused{'' if symbols is None else ' (symbols)'}: {type(got).__name__}: {str(got)[:120]}" if strict else ""
        elif not told(got):
            why = ""
        else:
            a, b = (list(map(described, pytree.tree_leaves(x))) for x in (got, want))
            why = "" if a == b else f"rule{'' if symbols is None else ' (symbols)'}: {a} instead of {b}"
            if not why and r.random() < values:
                why = compiled_like(call, want, symbols is not None)
        if why:
            return why
    return ""


def findings(
    calls: list[Call], seed: int, count: int, values: float = 0.0, strict: bool = False, doing: Callable[[str], None] = lambda s: None
) -> Iterator[tuple[Call, str]]:
    """`doing` hears what is about to run: the parent reads it there when this process dies."""
    r = Draw(seed)
    for _ in range(count):
        call = outcome(lambda: changed(r, r.choice(calls)))
        if isinstance(call, Exception):
            continue
        doing(text(call))
        why = check(call, r, values, strict, doing)
        if why:
            yield call, why


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--count", type=int, default=2000)
    p.add_argument("--batch", type=int, default=100)
    p.add_argument("--first", type=int, default=0, help="number of the first batch")
    p.add_argument("--only", default="*")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--values", type=float, default=0.02)
    p.add_argument("--strict", action="store_true", help="list what a rule refuses although eager does not")
    options = p.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    calls = corpus(getattr(torch, options.dtype), options.only, Draw(options.seed))
    print(f"{len(calls)} calls of {len({c[0] for c in calls})} operators", flush=True)
    tally: Counter[str] = Counter()
    note = mmap.mmap(-1, 4096)

    def doing(what: str) -> None:
        note[:] = what.encode()[:4096].ljust(4096, b" ")

    for number in range(options.first, options.first - (-options.count // options.batch)):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            for call, why in findings(calls, options.seed * 1000 + number, options.batch, options.values, options.strict, doing):
                print(f"{why.split(':')[0]:18} {text(call)[:200]} :: {why}", flush=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        tally["crashed by eager" if status and note[:5] == b"eager" else "crashed" if status else "fine"] += 1
        if status:
            print(f"CRASH in batch {number}: status {status}: {note[:].decode(errors='replace').strip()[:600]}", flush=True)
    print(dict(tally))


if __name__ == "__main__":
    main()
