"""The contractions that the suites measure: as found in the ten models, transformer linears, attention products, and seeded random ones.

In: nothing, or a seed. Out: Shape values in a fixed order; equal shapes once. Models are traced on the meta device: no weights are made.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from models import FACTORIES, MODELS, _vision, inputs_of

Ints = tuple[int, ...]
Fields = dict[str, Any]
RANDOM = 60
ROWS = (1, 16, 128, 1024)
# (inputs, outputs) of linears: BERT-base, ViT-S, a decoder of width 1024 and one of width 4096
LINEARS = (
    (768, 768), (768, 3072), (3072, 768), (384, 1152), (384, 1536), (1536, 384), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """kind "conv": x (N, C, *sizes), w (O, C / groups, *taps), or for a transposed one (C, O / groups, *taps).
    kind "linear": x (M, K), w (N, K). kind "bmm": x (B.., M, K), w (B.., K, N), both change from call to call; `transposed`: k is
    contiguous in w."""

    kind: str
    x: Ints
    w: Ints
    stride: Ints = ()
    padding: Ints = ()
    dilation: Ints = ()
    groups: int = 1
    transposed: bool = False
    output_padding: Ints = ()
    origin: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.kind, self.x, self.w, self.stride, self.padding, self.dilation, self.groups, self.transposed, self.output_padding)

    @property
    def name(self) -> str:
        if self.kind == "linear":
            return f"linear {self.x[0]}x{self.x[1]}x{self.w[0]}"
        if self.kind == "bmm":
            return f"bmm {math.prod(self.x[:-2])}x{self.x[-2]}x{self.x[-1]}x{self.w[-1]}{' k contiguous' if self.transposed else ''}"
        grouped = "depthwise " if self.is_depthwise else f"grouped({self.groups}) " if self.groups > 1 else ""
        form = "transposed " if self.transposed else grouped
        parts = [f"{form}conv{len(self.x) - 2}d", f"n{self.x[0]}", f"{self.x[1]}-{self.outputs}"]
        parts += ["@" + _sizes(self.x[2:]), "k" + _sizes(self.w[2:])]
        marks = (("s", self.stride, 1), ("p", self.padding, 0), ("d", self.dilation, 1), ("op", self.output_padding, 0))
        parts += [letter + _sizes(values) for letter, values, usual in marks if any(v != usual for v in values)]
        return " ".join(parts)

    @property
    def outputs(self) -> int:
        return self.w[1] * self.groups if self.transposed else self.w[0]

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.x[1] and not self.transposed

    @property
    def result(self) -> Ints:
        """Sizes of the result."""
        if self.kind == "linear":
            return (self.x[0], self.w[0])
        if self.kind == "bmm":
            return (*self.x[:-1], self.w[-1])
        extra = self.output_padding or (0,) * len(self.stride)
        rows = zip(self.x[2:], self.w[2:], self.stride, self.padding, self.dilation, extra, strict=True)
        if self.transposed:
            sizes = tuple((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in rows)
        else:
            sizes = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in rows)
        return (self.x[0], self.outputs, *sizes)

    @property
    def flops(self) -> int:
        """Two per multiply-add; products with padding count, as everywhere."""
        if self.kind != "conv":
            return 2 * math.prod(self.result) * self.x[-1]
        return 2 * math.prod(self.x if self.transposed else self.result) * math.prod(self.w[1:])

    @property
    def bytes(self) -> int:
        """Least float32 traffic: both operands and the result once."""
        return 4 * (math.prod(self.x) + math.prod(self.w) + math.prod(self.result))


def _sizes(values: Ints) -> str:
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


# ---------------------------------------------------------------- found in models
class Tracer(TorchFunctionMode):
    """Writes down the contractions that a model calls."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin, self.found = origin, list[Shape]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        row = TRACED.get(getattr(func, "__name__", ""))
        if row is not None and isinstance(result, Tensor):
            self.found += (Shape(**fields, origin=self.origin) for fields in row(result, *args, **(kwargs or {})))
        return result


def _conv(
    out: Tensor, x: Tensor, w: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Iterator[Fields]:
    rank = x.dim() - 2

    def each(v: Any) -> Ints:
        return (v,) * rank if isinstance(v, int) else tuple(v)

    stride, dilation = each(stride), each(dilation)
    if isinstance(padding, str):
        padding = tuple(d * (k - 1) // 2 if padding == "same" else 0 for k, d in zip(w.shape[2:], dilation, strict=True))
    where = {"stride": stride, "padding": each(padding), "dilation": dilation, "groups": groups}
    yield {"kind": "conv", "x": tuple(x.shape), "w": tuple(w.shape), **where}


def _linear(out: Tensor, x: Tensor, w: Tensor, bias: Any = None) -> Iterator[Fields]:
    yield {"kind": "linear", "x": (x.numel() // x.shape[-1], x.shape[-1]), "w": tuple(w.shape)}


def _matmul(out: Tensor, x: Tensor, y: Tensor) -> Iterator[Fields]:
    if x.dim() > 2 and y.dim() == x.dim():
        yield {"kind": "bmm", "x": tuple(x.shape), "w": tuple(y.shape)}


def _attention(out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Iterator[Fields]:
    batch = (math.prod(q.shape[:-2]),)
    yield {"kind": "bmm", "x": (*batch, *q.shape[-2:]), "w": (*batch, k.shape[-1], k.shape[-2])}
    yield {"kind": "bmm", "x": (*batch, q.shape[-2], k.shape[-2]), "w": (*batch, *v.shape[-2:])}


TRACED = {
    "conv1d": _conv, "conv2d": _conv, "conv3d": _conv, "linear": _linear, "matmul": _matmul, "bmm": _matmul,
    "scaled_dot_product_attention": _attention,
}  # fmt: skip


def of_model(name: str, batch: int = 1) -> list[Shape]:
    """The contractions of one model in the order in which it runs them, repeats included."""
    with torch.device("meta"), torch.no_grad():
        model = (FACTORIES[name]() if name in FACTORIES else _vision(name)).eval()
    inputs = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in inputs_of(name, batch)]
    tracer = Tracer(name)
    with torch.no_grad(), tracer:
        model(*inputs)
    return tracer.found


def distinct(shapes: list[Shape]) -> list[Shape]:
    return list({s.key: s for s in reversed(shapes)}.values())[::-1]


def of_models(batches: tuple[int, ...] = (1,)) -> list[Shape]:
    return distinct([s for batch in batches for name in MODELS for s in of_model(name, batch)])


def of_transformers() -> list[Shape]:
    return [Shape("linear", (m, k), (n, k), origin="transformer") for m in ROWS for k, n in LINEARS]


# (B, M, K, N) of products of two operands that change: squares, few rows, weights that are not frozen, attention's two products
CHANGING = (
    *((1, n, n, n) for n in (8, 16, 33, 64, 100, 128, 256, 512, 1024)), (1, 1, 1024, 1024), (1, 1, 64, 1000), (1, 4, 1024, 1024),
    (1, 8, 512, 512), (1, 16, 768, 3072), (1, 128, 768, 768), (1, 1000, 70, 130), (1, 512, 64, 10), (64, 16, 16, 16), (12, 128, 64, 128),
    (12, 197, 64, 197), (12, 197, 197, 64), (8, 1, 64, 300),
)  # fmt: skip


def of_changing() -> list[Shape]:
    """Products whose right-hand operand changes, with n and with k contiguous in it."""
    return [Shape("bmm", (b, m, k), (b, k, n), transposed=t, origin="changing") for b, m, k, n in CHANGING for t in (False, True)]


# ---------------------------------------------------------------- random
def at_random(count: int = RANDOM, seed: int = 2026) -> list[Shape]:
    """Contractions that no tuner has seen: a third products, the rest convolutions of every form; 1 to 300 million multiply-adds' work."""
    rng, shapes = random.Random(seed), list[Shape]()
    while len(shapes) < count:
        shape = (_random_product if len(shapes) % 3 == 0 else _random_conv)(rng)
        if min(shape.result) > 0 and 1e6 < shape.flops < 3e8 and shape.bytes < 64 << 20:
            shapes.append(shape)
    return shapes


def _size(rng: random.Random, low: int, high: int) -> int:
    """Log-uniform, half of the time a multiple of 8."""
    n = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    return max(8, n // 8 * 8) if rng.random() < 0.5 and high >= 8 else n


def _random_product(rng: random.Random) -> Shape:
    m, k, n = (_size(rng, 1, 1500) for _ in range(3))
    if rng.random() < 0.25:
        b = rng.choice((2, 3, 8, 12))
        return Shape("bmm", (b, m, k), (b, k, n), origin="random")
    return Shape("linear", (m, k), (n, k), origin="random")


def _random_conv(rng: random.Random) -> Shape:
    rank = rng.choice((1, 2, 2, 2, 3))
    form = rng.choice(("dense", "dense", "dense", "depthwise", "grouped", "transposed"))
    groups = rng.choice((2, 3, 4, 8, 16)) if form == "grouped" else 1
    c, o = (groups * _size(rng, 1, 320 // groups) for _ in range(2))
    if form == "depthwise":
        groups = o = c = _size(rng, 8, 700)
    side = {1: 2000, 2: 90, 3: 24}[rank]
    sizes = tuple(_size(rng, 4, side) for _ in range(rank))
    taps = tuple(rng.choice((1, 2, 3, 3, 3, 5, 7)) for _ in range(rank)) if rng.random() < 0.3 else (rng.choice((1, 1, 3, 3, 5)),) * rank
    stride = (rng.choice((1, 1, 1, 2, 3)),) * rank
    dilation = (rng.choice((1, 1, 1, 2)) if form != "transposed" else 1,) * rank
    padding = tuple(rng.choice((0, k // 2)) * d for k, d in zip(taps, dilation, strict=True))
    x = (rng.choice((1, 1, 1, 2, 5)), c, *sizes)
    if form == "transposed":
        extra = tuple(rng.randrange(s) for s in stride)
        return Shape("conv", x, (c, o, *taps), stride, padding, dilation, 1, True, extra, origin="random")
    return Shape("conv", x, (o, c // groups, *taps), stride, padding, dilation, groups, origin="random")
