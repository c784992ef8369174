"""Random operators of a GPU as stages that compute eager's own numbers: Philox4x32-10 of the generator's seed and offset.

Eager's kernels have B blocks of 256 threads, as many as the device runs at once and no more than there are elements. Thread t of them takes
words of subsequence t, four (one "turn") for each step of the counter, which begins at a quarter of the generator's offset:
- distributions and dropout of what is not aligned: element e belongs to thread e % (256 B), and takes its words in order;
- dropout of aligned memory: vectors of V elements are dealt out to the threads, and a vector takes V / 4 turns.

The host takes the numbers once for a graph, before anything runs (runtime/draws.py): kernels get them as arguments, so that a recorded
segment is replayed with new ones. Nothing of this is promised by torch: what it draws is compared once in a process with what is computed
here (`known_draws`), and operators that differ stay calls of torch (LOW009).

In: `options.cuda_blocks`, the most blocks of the device at hand (0: the rows decline), and `options.cuda_draws`, which operators are known.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .. import events
from ..graph.spec import FunctionalGraph
from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, Load, Sym, const, convert, op, walk
from ..ir.ops import OPS
from ..ir.program import Bind, BufArg, Check, Enum, Extern
from ..options import Options
from ..runtime.draws import TAKE, generator_of
from .core import Builder
from .extern import is_random
from .numerics import cast, scalar
from .ref import ZERO, Index, Ref, constant, contiguous_strides, known, product, same_strides
from .table import lowers

KINDS = tuple(Options().cuda_draws.split())
BLOCK, WORDS = 256, 4  # threads of a block; words of a turn
ALIGNED = 16  # bytes of the longest vector
MOST = 1 << 31  # bytes from which on eager cuts a tensor into several kernels


def threads(n: Expr, blocks: int) -> Expr:
    return op("mul", op("min", const(blocks), op("floordiv", n + (BLOCK - 1), const(BLOCK))), const(BLOCK))


def turns(n: Expr, each: int, blocks: int) -> Expr:
    """Steps by which eager moves the counter for n elements of which a turn serves `each`."""
    return op("floordiv", n - 1, op("mul", threads(n, blocks), const(each))) + 1


def place(e: Expr, n: Expr, vector: int, each: int, blocks: int) -> tuple[Expr, Expr, Expr]:
    """(thread, turn, which of the turn's `each` numbers) of element e of n. vector: 1, or how many elements are dealt out together."""
    t = threads(n, blocks)
    q = op("floordiv", e, const(vector))
    total, lanes = known(n), known(t)
    first = total is not None and lanes is not None and total <= vector * lanes  # every thread has one vector at most
    thread, step = (q, ZERO) if first else (op("mod", q, t), op("floordiv", q, t))
    if vector == 1:
        return thread, op("floordiv", step, const(each)), op("mod", step, const(each))
    part = op("mod", e, const(vector))
    turn = op("mul", step, const(max(vector // each, 1)))
    return thread, turn + op("floordiv", part, const(each)), op("mod", part, const(each))


# ---------------------------------------------------------------- numbers of one operator


class Draw:
    """The numbers of one operator on `n` elements: `word(e, k)` is word k of element e."""

    def __init__(self, cx: Builder, n: Expr, vector: int = 1, each: int = WORDS, aligned: Sequence[str] = ()) -> None:
        self.n, self.vector, self.each, self.blocks = n, vector, each, cx.options.cuda_blocks
        self.seed, self.first = _take(cx, turns(n, each if vector == 1 else WORDS, self.blocks), aligned)

    def word(self, e: Expr, k: int = 0) -> Expr:
        thread, turn, which = place(e, self.n, self.vector, self.each, self.blocks)
        wide = WORDS // self.each
        lane = which if wide == 1 else op("mul", which, const(wide)) + k
        return op("philox", self.seed, op("add", self.first, convert(turn, dt.i64)), convert(thread, dt.i64), convert(lane, dt.i64))

    def unit(self, e: Expr, d: DType) -> Expr:
        """In (0, 1]: f32 of one word, f64 of two."""
        if d is dt.f64 and self.each == 2:
            bits = op("xor", self.word(e), op("shl", self.word(e, 1), Const(dt.i64, 53 - 32)))
            return _scaled(cast(bits, dt.f64), 53)
        return cast(_scaled(cast(self.word(e), dt.f32), 32), d)


def _scaled(x: Expr, bits: int) -> Expr:
    return op("add", op("mul", x, Const(x.dtype, 2.0**-bits)), Const(x.dtype, 2.0 ** -(bits + 1)))


def _take(cx: Builder, steps: Expr, aligned: Sequence[str]) -> tuple[Sym, Sym]:
    """(seed, where the counter stands) for an operator that moves it by `steps`. All operators between two that torch draws for share one
    call of the host, which stands where nothing has run yet, or right behind torch's."""
    given = {s.sym for s in cx.symbols if s.origin[0] != "bound"}
    early = {x for x in walk(steps) if isinstance(x, Sym)} <= given
    call = cx.draws
    if call is None or not early:
        at = cx.draws_from if early else len(cx.top)
        names = tuple(cx.buffer(dt.i64, (), required=True) for _ in range(2))
        cx.on_host.update(names)
        call = Extern(TAKE, (ZERO, Enum("device", cx.device), ()), (), names, loc=cx.loc)
        binds = [Bind(Sym(f"{n}_drawn", dt.i64), Load(n, dt.i64, ())) for n in names]
        cx.top[at:at] = [call, *binds]
        cx.bound.update(b.sym for b in binds)
    at = next(k for k, e in enumerate(cx.top) if e is call)
    so_far, device, needed = call.args
    assert isinstance(so_far, Expr) and isinstance(needed, tuple)
    more = tuple(BufArg(b) for b in aligned if BufArg(b) not in needed)
    cx.draws = cx.top[at] = replace(call, args=(op("add", so_far, steps), device, (*needed, *more)))
    seed, first = (b.sym for b in cx.top[at + 1 : at + 3] if isinstance(b, Bind))
    if known(so_far) == 0:
        return seed, first
    here = Sym(f"{cx.fresh('d')}_first", dt.i64)  # an argument of its own: kernels that are alike but for it are one text
    cx.top.insert(at + 3, Bind(here, op("add", first, convert(so_far, dt.i64))))
    cx.bound.add(here)
    return seed, here


def is_ours(cx: Builder, kind: str, n: Expr, d: DType) -> bool:
    """Are torch's numbers known for operators of this kind here? What is made in the host's memory draws from another generator."""
    count, there = known(n), cx.out.device == cx.device
    few = count is None or 0 < count * d.itemsize < MOST
    told = bool(cx.options.cuda_blocks) and kind in cx.options.cuda_draws.split()
    return told and there and few and not cx.is_alone and cx.body is cx.top


# ---------------------------------------------------------------- dropout


def dropped(spec: Any, width: int, offset: Expr) -> tuple[int, Callable[[Index], Expr]] | None:
    """How many elements a vector of eager's kernel has for an operand of these sizes and strides, and the order that it counts elements in:
    that of memory if there are vectors, else of indices. None: only running tells."""
    shape, strides = spec.shape, spec.strides
    n = product(shape)
    rows = contiguous_strides(shape)
    by_index = functools.partial(_dot, strides=rows)
    if not same_strides(shape, strides, rows):
        sizes, steps = [known(x) for x in shape], [known(x) for x in strides]
        if None in sizes or None in steps:
            return None
        if not _is_dense(sizes, steps):
            return 1, by_index
    vector = min(ALIGNED // width, 8)
    while vector > 1:
        whole = known(op("mod", n, const(vector)))
        straight = known(op("mod", offset, const(vector)))
        if whole is None or straight is None:
            return None
        if whole == straight == 0:
            return vector, functools.partial(_dot, strides=strides)
        vector //= 2
    return 1, by_index


def _is_dense(sizes: Sequence[Any], steps: Sequence[Any]) -> bool:
    """Do the elements fill their memory, each a place of its own?"""
    inner = 1
    for step, size in sorted((s, n) for s, n in zip(steps, sizes, strict=True) if n != 1):
        if step != inner:
            return False
        inner *= size
    return True


def _dot(index: Index, strides: Sequence[Expr]) -> Expr:
    total: Expr = ZERO
    for i, s in zip(index, strides, strict=True):
        total = op("add", total, op("mul", i, s))
    return total


def _is_view(node: fx.Node) -> bool:
    """Does eager give memory of an operand?"""
    source = node.args[0] if node.target is operator.getitem else node
    schema = getattr(getattr(source, "target", None), "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _memory(cx: Builder, node: Any, x: Ref) -> tuple[Expr, tuple[str, ...]] | None:
    """How far behind an aligned address the operand begins, in elements, and the inputs whose address must be one. None: nobody knows."""
    if not isinstance(node, fx.Node) or (node.op != "placeholder" and not _is_view(node)):
        return ZERO, ()
    if x.strided is None:
        return None
    return x.strided.offset, (x.strided.root,) if cx.buffers[x.strided.root].role in ("input", "const") else ()


@lowers("aten.native_dropout.default")
def lower_dropout(cx: Builder, x: Ref, p: Any, train: Any) -> Any:
    """Both results in the operand's dtype and order of memory: x * mask / (1 - p), the mask of numbers below 1 - p."""
    operand = cx.node.args[0]
    n = product(x.shape)
    if train is False or not isinstance(p, int | float) or not 0 < p < 1 or not is_ours(cx, "dropout", n, x.dtype):
        return NotImplemented
    memory = _memory(cx, operand, x)
    found = None if memory is None else dropped(operand.meta["spec"], x.dtype.itemsize, memory[0])
    if memory is None or found is None:
        return NotImplemented
    vector, order = found
    draw = Draw(cx, n, vector, WORDS, memory[1] if vector > 1 else ())
    d = dt.f64 if x.dtype is dt.f64 else dt.f32
    kept = torch.tensor(1.0 - p, dtype=torch.float64 if d is dt.f64 else torch.float32).item()
    scale = Const(d, 1.0 / kept)

    def kept_at(i: Index) -> Expr:
        return op("lt", draw.unit(order(i), d), Const(d, kept))

    out, spec = cx.spec
    mask = cx.stage(kept_at, spec.shape, dt.bool_, spec.strides) if 1 in cx.read else Ref(dt.bool_, x.shape, kept_at)

    def value(i: Index) -> Expr:
        return cast(op("mul", op("mul", cast(x.load(i), d), convert(mask.load(i), d)), scale), x.dtype)

    return cx.stage(value, out.shape, x.dtype, out.strides), mask


# ---------------------------------------------------------------- distributions


def _drawn(cx: Builder, kind: str, value: Callable[[Draw, Expr], Expr], each: int = WORDS) -> Any:
    """One number for each element of the result, in the order of memory."""
    spec, d = cx.out, cx.dtype
    n = product(spec.shape)
    straight = same_strides(spec.shape, spec.strides, contiguous_strides(spec.shape))
    sizes, steps = [known(x) for x in spec.shape], [known(x) for x in spec.strides]
    if not is_ours(cx, kind, n, d) or not (straight or (None not in (*sizes, *steps) and _is_dense(sizes, steps))):
        return NotImplemented
    draw = Draw(cx, n, 1, each)
    if known(n) is None:
        fits = op("lt", op("mul", n, const(d.itemsize)), const(MOST))
        cx.top.insert(cx.top.index(cx.draws), Check(fits, "sizes", "eager cuts a tensor of so many bytes into several kernels", cx.loc))  # type: ignore[arg-type]
    return cx.stage(lambda i: value(draw, _dot(i, spec.strides)))


def _uniform(cx: Builder, low: Any, high: Any) -> Any:
    d, torchs = cx.dtype, cx.out.dtype
    if not d.is_float or not all(isinstance(v, int | float) for v in (low, high)):
        return NotImplemented
    exact = dt.f64 if d is dt.f64 else dt.f32
    first, last = (torch.tensor(v, dtype=torchs) for v in (low, high))
    wide = Const(exact, (last - first).item())
    least, most = (Const(d, v.item()) for v in (first, last))

    def value(draw: Draw, e: Expr) -> Expr:
        got = cast(op("fma", draw.unit(e, exact), wide, Const(exact, first.item())), d)
        return op("where", op("eq", got, most), least, got)  # of (0, 1] eager makes [0, 1)

    return _drawn(cx, "rand", value, 2 if d is dt.f64 else WORDS)


@lowers("aten.rand.default")
def lower_rand(cx: Builder, *_: Any) -> Any:
    return _uniform(cx, 0.0, 1.0)


@lowers("aten.rand_like.default")
def lower_rand_like(cx: Builder, x: Ref, *_: Any) -> Any:
    return _uniform(cx, 0.0, 1.0)


@lowers("aten.uniform.default")
def lower_uniform(cx: Builder, x: Ref, low: Any = 0.0, high: Any = 1.0, generator: Any = None) -> Any:
    return _uniform(cx, low, high) if generator is None else NotImplemented


@lowers("aten.bernoulli.p")
def lower_bernoulli(cx: Builder, x: Ref, p: Any, generator: Any = None) -> Any:
    d = cx.dtype
    if generator is not None or not isinstance(p, int | float):
        return NotImplemented
    exact = dt.f64 if d is dt.f64 else dt.f32
    bound = float(p)
    if exact is dt.f32:  # the number is one of float32, p is not: below p is below the next float32
        near = torch.tensor(bound, dtype=torch.float32)
        bound = (near if near.item() >= bound else torch.nextafter(near, torch.tensor(math.inf))).item()

    def value(draw: Draw, e: Expr) -> Expr:
        return cast(op("lt", draw.unit(e, exact), Const(exact, bound)), d)

    return _drawn(cx, "bernoulli", value, 2 if d is dt.f64 else WORDS)


SHORT = 1 << 28  # from so many values on a number takes two words


@lowers("aten.randint.low")
def lower_randint(cx: Builder, low: Any, high: Any, *_: Any) -> Any:
    return _integers(cx, known(low), known(high))


@lowers("aten.randint.default")
def lower_randint_below(cx: Builder, high: Any, *_: Any) -> Any:
    return _integers(cx, 0, known(high))


def _integers(cx: Builder, low: int | None, high: int | None) -> Any:
    """A word, or two, modulo how many values there are."""
    d = cx.dtype
    if low is None or high is None or d.is_float or d is dt.bool_:
        return NotImplemented
    many = high - low
    if many >= SHORT and many & (many - 1):  # a division of unsigned numbers of 64 bits
        return NotImplemented

    def value(draw: Draw, e: Expr) -> Expr:
        if many < SHORT:
            got = op("mod", draw.word(e), Const(dt.i64, many))
        else:
            got = op("bitor", op("shl", draw.word(e), Const(dt.i64, 32)), draw.word(e, 1))
            got = op("bitand", got, scalar(many - 1, dt.i64))
        return cast(op("add", got, Const(dt.i64, low)), d)

    return _drawn(cx, "randint", value, WORDS if many < SHORT else 2)


# ---------------------------------------------------------------- is it what this torch draws?


def draws_any(fg: FunctionalGraph) -> bool:
    """Does a graph draw?"""
    return any(isinstance(n.target, torch._ops.OpOverload) and is_random(n.target) for n in fg.graph.nodes)


def known_draws(device: str) -> tuple[int, tuple[str, ...]]:
    """The most blocks of eager's random kernels on this device, and the kinds of operators whose numbers are those computed here."""
    if torch.cuda.is_current_stream_capturing():
        return 0, ()  # nothing can be compared now
    return _compared(device)


@functools.cache
def _compared(device: str) -> tuple[int, tuple[str, ...]]:
    wrong: dict[str, str] = {}
    blocks = 0
    with torch.no_grad(), torch.cuda.device(device):
        generator = generator_of(torch.device(device))
        before = generator.get_state()
        try:
            found = torch.cuda.get_device_properties(device)
            blocks = int(found.multi_processor_count * (found.max_threads_per_multi_processor // BLOCK))
            for kind, said in compare(torch.device(device), blocks):
                wrong.setdefault(kind, said)
        except Exception as e:  # a torch that lacks what is asked here
            wrong = dict.fromkeys(KINDS, f"{type(e).__name__}: {e}")
        finally:
            generator.set_state(before)
    for kind, said in wrong.items():
        events.emit("draws", code="LOW009", detail=f"{kind}: {said}")
    return blocks, tuple(k for k in KINDS if k not in wrong)


SEED, START = 0x1234567890ABCDEF, 4 << 20


def compare(device: torch.device, blocks: int) -> Iterator[tuple[str, str]]:
    """What torch draws otherwise than this file: the kind of operator, and in words for which dtype, size and element."""
    generator = generator_of(device)
    long = blocks * BLOCK
    cases: list[tuple[str, torch.dtype, int, int, int]] = [
        (kind, d, n, vector, each)
        for kind, d, vector, each in (
            ("dropout", torch.float32, 4, 4), ("dropout", torch.float32, 2, 4), ("dropout", torch.float32, 1, 4),
            ("dropout", torch.bfloat16, 8, 4), ("dropout", torch.float64, 2, 4),
            ("rand", torch.float32, 1, 4), ("rand", torch.float64, 1, 2), ("bernoulli", torch.float32, 1, 4),
            ("randint", torch.int64, 1, 4), ("randint32", torch.int64, 1, 2), ("randint64", torch.int64, 1, 2),
        )
        for n in (5 * vector, long * max(vector, each) + 3 * vector)
    ]  # fmt: skip
    for kind, d, n, vector, each in cases:
        n += 2 if vector == 2 and d is torch.float32 and n % 4 == 0 else 0
        n += 1 if vector == 1 and kind == "dropout" and n % 2 == 0 else 0
        family = kind.rstrip("0123456789")
        generator.manual_seed(SEED)
        generator.set_offset(START)
        got = _EAGER[kind](n, d, device)
        moved = WORDS * constant(turns(const(n), each if vector == 1 else WORDS, blocks))
        if generator.get_offset() != START + moved:
            yield family, f"{n} {d} move the generator by {generator.get_offset() - START}, not {moved}"
        points = sorted({0, 1, n // 2, n - 2, n - 1, *(k * n // 37 for k in range(37))})
        values = got[torch.tensor(points, device=device)].tolist()
        for e, value in zip(points, values, strict=True):
            if value != _expected(kind, e, n, vector, each, blocks):
                yield family, f"element {e} of {n} {d}: {value}"


_EAGER: dict[str, Callable[[int, torch.dtype, torch.device], torch.Tensor]] = {
    "dropout": lambda n, d, device: torch.native_dropout(torch.ones(n, dtype=d, device=device), 0.375, True)[1],
    "rand": lambda n, d, device: torch.rand(n, dtype=d, device=device),
    "randint": lambda n, d, device: torch.randint(-7, 1000, (n,), dtype=d, device=device),
    "randint32": lambda n, d, device: torch.randint(0, SHORT, (n,), dtype=d, device=device),
    "randint64": lambda n, d, device: torch.randint(-(1 << 62), 1 << 62, (n,), dtype=d, device=device),
    "bernoulli": lambda n, d, device: torch.empty(n, dtype=d, device=device).bernoulli_(0.3),
}


def _expected(kind: str, e: int, n: int, vector: int, each: int, blocks: int) -> Any:
    thread, turn, which = (known(x) for x in place(const(e), const(n), vector, each, blocks))
    assert thread is not None and turn is not None and which is not None

    def word(k: int) -> int:
        return int(OPS["philox"].scalar(SEED, START // WORDS + turn, thread, which * (WORDS // each) + k))

    def unit(x: int) -> float:
        return float(torch.tensor(x, dtype=torch.float64).float() * 2.0**-32 + 2.0**-33)

    if kind == "randint":
        return word(0) % 1007 - 7
    if kind == "randint32":
        return (word(0) << 32 | word(1)) & (SHORT - 1)
    if kind == "randint64":
        return ((word(0) << 32 | word(1)) & ((1 << 63) - 1)) - (1 << 62)
    if kind == "rand" and each == 2:
        got = float(word(0) ^ word(1) << 21) * 2.0**-53 + 2.0**-54
        return 0.0 if got == 1 else got
    if kind == "rand":
        got = unit(word(0))
        return 0.0 if got == 1 else got
    return unit(word(0)) < (0.625 if kind == "dropout" else 0.3)

