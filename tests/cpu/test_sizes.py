"""Sizes as symbols: one compilation for every size, marks, sizes that turn out to vary, guards only where the program asks."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import torchsmith
from torchsmith import events
from torchsmith.graph.sizes import print_condition
from torchsmith.ir.expr import Sym, op


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(5)
    with torch.no_grad():
        yield


def compiles(fn: Any, calls: Sequence[tuple[torch.Tensor, ...]], tolerance: float = 2e-5, **settings: Any) -> int:
    """Compare compiled with eager on each call; how many graphs were compiled. All must run natively."""
    c = torchsmith.compile(fn, **{"dynamic": True, **settings})
    with events.recording() as got:
        for args in calls:
            torch.testing.assert_close(c(*args), fn(*args), rtol=tolerance, atol=tolerance)
    graphs = [e.fields["report"] for e in got if e.kind == "graph"]
    assert all(r.road == "native" for r in graphs), [(r.road, r.code) for r in graphs]
    assert not [e for e in got if e.kind == "graph_break"]
    return len(graphs)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 20, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(20)
        self.depth = nn.Conv2d(20, 20, 3, padding=1, groups=20)
        self.last = nn.Conv2d(20, 20, 1)
        self.head = nn.Linear(20, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.max_pool2d(torch.relu(self.norm(self.first(x))), 3, 2, 1)
        y = torch.relu(y + self.last(self.depth(y)))
        z = torch.cat([y, nn.functional.avg_pool2d(y, 1)], 1)[:, 10:30]
        return self.head(nn.functional.adaptive_avg_pool2d(z, 1).flatten(1))


class Decoder(nn.Module):
    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, width), nn.Embedding(64, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width))
        self.heads = heads

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        b, t = ids.shape
        x = self.words(ids) + self.places(torch.arange(t))
        q, k, v = self.qkv(self.one(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        return (x + self.feed(self.two(x))).softmax(-1)


def images(*sizes: tuple[int, int, int]) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(n, 3, h, w),) for n, h, w in sizes]


def tokens(*sizes: tuple[int, int]) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randint(50, s),) for s in sizes]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[tuple[torch.Tensor, ...]]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(24, 50), nn.ReLU(), nn.Linear(50, 33), nn.GELU(), nn.Linear(33, 10)),
        [(torch.randn(n, 24),) for n in (5, 1, 2, 4, 7, 14, 16, 28, 29, 100)],
    ),
    "convolutions": (Residual, images((3, 32, 32), (1, 32, 32), (2, 33, 47), (5, 64, 16), (1, 7, 9), (16, 8, 8))),
    "decoder": (Decoder, tokens((3, 10), (1, 10), (2, 1), (1, 1), (5, 33), (2, 64))),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(24, 3, 40, batch_first=True),
        [(torch.randn(*s, 24),) for s in ((3, 10), (1, 10), (2, 1), (1, 1), (5, 33))],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_compilation_serves_every_size(name: str) -> None:
    make, calls = MODELS[name]
    assert compiles(make().eval(), calls) == 1


class Layer(nn.Module):
    """As encoders are written: three projections, heads split and joined by views, the norms behind."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.heads, -1)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.one(x + self.out(y.transpose(1, 2).reshape(*x.shape[:-1], -1)))
        return self.two(x + self.feed(x))


def test_views_of_varying_sizes_are_read_as_views_of_fixed_ones() -> None:
    """Rows that a view splits by a symbol are rows of a product: nothing that changes is packed, and attention is one kernel."""
    layer, calls = Layer().eval(), [(torch.randn(*s, 32),) for s in ((2, 40), (1, 7), (3, 1), (1, 1), (1, 130))]
    assert compiles(layer, calls) == 1
    kernels = {}
    for dynamic in (True, False):
        with events.recording() as got:
            torchsmith.compile(layer, dynamic=dynamic)(*calls[0])
        kernels[dynamic] = next(e.fields["report"].kernels for e in got if e.kind == "graph")
    assert kernels[True] == kernels[False]


@pytest.mark.parametrize("first", [1, 2, 9])
def test_the_first_size_does_not_matter(first: int) -> None:
    make, _ = MODELS["mlp"]
    assert compiles(make().eval(), [(torch.randn(n, 24),) for n in (first, 1, 3, 8)]) == 1


def test_a_constant_of_the_program_is_one_of_the_kernels() -> None:
    """Channels are a number although dynamic=True asked for a symbol; another number of channels is another program."""
    conv = nn.Conv2d(3, 16, 3)
    c = torchsmith.compile(conv, dynamic=True)
    with events.recording() as got:
        c(torch.randn(2, 3, 9, 9))
    (guards,) = [e.fields["list"] for e in got if e.kind == "guards"]
    (row,) = [g for g in guards if g.startswith("L['input']: Tensor")]
    assert "[?, 3, ?, ?]" in row
    with pytest.raises(RuntimeError, match="channels"):
        c(torch.randn(2, 4, 9, 9))


DERIVED: list[Callable[..., torch.Tensor]] = [
    lambda x, y: torch.cat([x, y, x], 0) @ torch.ones(6, 5),
    lambda x, y: nn.functional.pad(x, (0, 0, 1, 0))[1:] * 2,
    lambda x, y: nn.functional.avg_pool1d(torch.cat([x, y], 0).t()[None], 2)[0].sum(0),
    lambda x, y: torch.arange(x.shape[0] * 2 + 1).float()[:, None] + y.sum(),
    lambda x, y: x.unsqueeze(1).expand(-1, y.shape[0], -1).reshape(-1, 6).softmax(0),
    lambda x, y: torch.einsum("ik,jk->ij", x, y).mean(1),
    lambda x, y: x.repeat(2, 1).view(x.shape[0], -1).cumsum(1),
    lambda x, y: nn.functional.pad(x @ torch.ones(6, 6), (0, 0, 1, 0)).t().contiguous().t().view(x.shape[0] + 1, -1, 3).sum(1) + y.sum(),
    lambda x, y: nn.functional.interpolate(x.t()[None], scale_factor=1.5).flip(-1)[0] + y.sum(),
]


@pytest.mark.parametrize("k", range(len(DERIVED)))
def test_derived_sizes(k: int) -> None:
    calls = [(torch.randn(n, 6), torch.randn(m, 6)) for n, m in ((3, 5), (1, 2), (2, 1), (1, 1), (4, 4), (16, 31), (33, 2))]
    assert compiles(DERIVED[k], calls) <= 2  # equal sizes may be a case of their own


TABLE = torch.randn(10, 4)


def definite(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT / x.shape[-1] + torch.eye(x.shape[-2])


WINDOW, TURN = torch.hann_window(8), torch.polar(torch.ones(3), torch.arange(3.0))
OPERATORS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], tuple[int, ...], tuple[int, ...], Any]] = [
    ("max_pool, last window", lambda x: nn.functional.max_pool2d(x, 3, 2, ceil_mode=True), (1, 2, 9, 10), (2, 3), (2, None)),
    ("max_pool, last window, padded", lambda x: nn.functional.max_pool2d(x, 3, 2, 1, ceil_mode=True), (1, 2, 9, 10), (2, 3), (1, None)),
    ("avg_pool, last window", lambda x: nn.functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (1, 2, 9, 10), (2, 3), (1, None)),
    ("avg_pool1d", lambda x: nn.functional.avg_pool1d(x, 3), (2, 3, 9), (2,), (3, None)),
    ("avg_pool3d", lambda x: nn.functional.avg_pool3d(x, 2), (1, 2, 9, 8, 4), (2, 3), (2, None)),
    ("unfold", lambda x: nn.functional.unfold(x, 2), (1, 2, 5, 5), (2, 3), (2, None)),
    ("reflected", lambda x: nn.functional.pad(x, (3, 3), mode="reflect") * 2, (2, 3, 9), (2,), (4, None)),
    ("two chunks", lambda x: x.chunk(2)[1] * 2, (7, 6), (0,), (2, None)),
    ("three chunks", lambda x: x.chunk(3)[2] * 2, (8, 6), (0,), (5, None)),
    ("parts of four", lambda x: x.split(4)[1] * 2, (7, 6), (0,), (5, 8)),
    ("rotation", lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 3, 2)) * TURN).flatten(1), (7, 6), (0,), (1, None)),
    ("rfft", lambda x: torch.fft.rfft(x).abs(), (3, 16), (0, 1), (1, None)),
    ("filter", lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 0.5, s=x.shape[-2:]), (2, 6, 5), (0, 1, 2), (1, None)),
    ("hfft", torch.fft.hfft, (2, 8), (1,), (2, None)),
    ("stft", lambda x: torch.stft(x, 8, 2, window=WINDOW, return_complex=True).abs(), (2, 40), (0, 1), (5, None)),
    ("stft, short window", lambda x: torch.view_as_real(torch.stft(x, 8, 3, 6, WINDOW[:6], False, normalized=True, return_complex=True)),
     (40,), (0,), (8, None)),
    ("scaled", lambda x: nn.functional.interpolate(x, scale_factor=1.7), (2, 3, 8), (0, 2), (1, None)),
    ("narrow", lambda x: x.narrow(0, 2, 3) * 2, (8, 3), (0,), (5, None)),
    ("bags", lambda x: nn.functional.embedding_bag((x * 0).long(), TABLE), (5, 3), (0, 1), (1, None)),
    ("bags, mean", lambda x: nn.functional.embedding_bag((x * 0).long(), TABLE, mode="mean"), (5, 3), (0, 1), (1, None)),
    ("zeros in place", lambda x: (x + 1).zero_() + x, (5, 3), (0, 1), (1, None)),
    ("the largest", lambda x: torch.take_along_dim(x, x.argmax(1, keepdim=True), dim=1), (5, 3, 4), (0, 1, 2), (1, None)),
    ("least of two", lambda x: x.topk(min(4, x.shape[0]), 0)[0], (6, 3), (0,), (1, None)),
    ("grid", lambda x: nn.functional.grid_sample(x, nn.functional.affine_grid(torch.eye(2, 3).expand(x.shape[0], 2, 3), x.shape,
     align_corners=False), align_corners=False), (2, 2, 6, 7), (0, 2, 3), (1, None)),
    ("folded", lambda x: nn.functional.fold(nn.functional.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1), (2, 2, 6, 7), (0, 2, 3),
     (1, None)),
    ("distances", lambda x: torch.cdist(x, x + 1), (5, 6), (0,), (1, None)),
    ("distances of many", lambda x: torch.cdist(x, x + 1), (30, 6), (0,), (1, None)),
    ("pairs", nn.functional.pdist, (5, 6), (0,), (1, None)),
    ("steps", lambda x: torch.linspace(0, 1, x.shape[0])[:, None] * x, (6, 3), (0, 1), (1, None)),
    ("kron", lambda x: torch.kron(x, TABLE[:2, :3]), (5, 3), (0, 1), (1, None)),
    ("cross", lambda x: torch.cross(x, x.flip(0) * 2, dim=1), (5, 3), (0,), (1, None)),
    ("bilinear", lambda x: nn.functional.bilinear(x, x, torch.ones(2, 3, 3)), (5, 3), (0,), (1, None)),
    ("diagonal of blocks", lambda x: torch.block_diag(x, x), (5, 3), (0, 1), (1, None)),
    ("loss of logits", lambda x: nn.functional.binary_cross_entropy_with_logits(x, x.sigmoid()), (5, 7), (0, 1), (1, None)),
    ("statistics of a batch", lambda x: nn.functional.batch_norm(x, None, None, training=True), (4, 3, 7), (0, 2), (2, None)),
    ("inverse", lambda x: torch.linalg.inv(definite(x)), (5, 3, 4), (0, 2), (1, None)),
    ("solution", lambda x: torch.linalg.solve(definite(x), x), (5, 3, 4), (0, 2), (1, None)),
    ("triangle", lambda x: torch.linalg.cholesky(definite(x)), (3, 4), (0,), (1, None)),
    ("determinant", lambda x: torch.linalg.slogdet(definite(x))[1], (5, 3, 4), (0, 1), (1, None)),
    ("least squares", lambda x: torch.linalg.lstsq(x, x[:, :2] + 1).solution, (5, 3), (0,), (1, None)),
    ("singular values", torch.linalg.svdvals, (5, 3, 4), (0, 1), (1, None)),
    ("eigenvalues", lambda x: torch.linalg.eigvalsh(definite(x)), (5, 3, 4), (0, 1), (1, None)),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "shape", "varying", "bounds"), [row[1:] for row in OPERATORS], ids=[row[0] for row in OPERATORS])
def test_operators_of_unknown_sizes(fn: Any, shape: tuple[int, ...], varying: tuple[int, ...], bounds: tuple[int, int | None]) -> None:
    """One program for all sizes that give as many results; an export says which sizes those are."""
    low, high = bounds
    sizes = [low, low + 1, low + 2, low + 3] if high is not None else [low, low + 1, low + 6, 23, 40]
    calls = [(torch.randn([sizes[(k + d) % len(sizes)] if d in varying else n for d, n in enumerate(shape)]),) for k in range(len(sizes))]
    assert compiles(fn, [(torch.randn(shape),), *calls]) == 1

    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fn(x)

    program = torchsmith.export(Whole(), (torch.randn(shape),), dynamic_shapes=(dict.fromkeys(varying, torchsmith.export.Dim.AUTO),))
    ranges = [str(r) for r in program.range_constraints.values()]
    assert len(ranges) == len(varying) and f"[{low}, {high or 'inf'}]" in ranges
    for (x,) in calls:
        torch.testing.assert_close(program.module()(x), fn(x))


def test_a_question_about_a_size_is_a_guard() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x.sum(0, keepdim=True)

    assert compiles(f, [(torch.randn(n, 3),) for n in (6, 5, 4, 3, 1, 9)]) == 2


def test_broadcasting_is_not_assumed_away() -> None:
    calls = [(torch.randn(n, 3), torch.randn(m, 3)) for n, m in ((4, 4), (1, 1), (5, 1), (1, 5), (7, 7))]
    assert compiles(lambda x, y: x + y, calls) <= 3


def test_empty_tensors() -> None:
    assert compiles(lambda x: (x @ torch.ones(3, 4)).relu().sum(1), [(torch.randn(n, 3),) for n in (4, 0, 1)]) <= 2


def test_sizes_that_vary_become_symbols_and_the_recompile_is_explained() -> None:
    lin = nn.Linear(8, 4)
    c = torchsmith.compile(lin)
    with events.recording() as got:
        for n in (5, 7, 1, 30):
            x = torch.randn(n, 8)
            torch.testing.assert_close(c(x), lin(x))
    (again,) = [e for e in got if e.kind == "recompile"]
    assert "size of dimension 0 was 5, is 7" in again.fields["guard"] and "L['input']" in again.fields["guard"]


def test_one_first_then_any() -> None:
    c = [0]

    def count(gm: Any, inputs: Any) -> Any:
        c[0] += 1
        return gm.forward

    f = torchsmith.compile(lambda x: x @ x.t(), backend=count)
    for n in (1, 4, 9, 1, 3):
        f(torch.randn(n, 3))
    assert c[0] == 2


# ---------------------------------------------------------------- marks


def marked(fn: Any, mark: Callable[[torch.Tensor], None], sizes: Sequence[int]) -> int:
    def calls() -> Iterator[tuple[torch.Tensor]]:
        for n in sizes:
            x = torch.randn(n, 3)
            mark(x)
            yield (x,)

    c = torchsmith.compile(fn)
    with events.recording() as got:
        for args in calls():
            torch.testing.assert_close(c(*args), fn(*args))
    return sum(e.kind == "graph" for e in got)


def test_marks() -> None:
    assert marked(lambda x: x + 1, lambda x: torchsmith.mark_dynamic(x, 0), (4, 1, 7)) == 1
    assert marked(lambda x: x + 1, lambda x: torchsmith.maybe_mark_dynamic(x, [0]), (4, 1, 7)) == 1
    assert marked(lambda x: x + 1, torchsmith.mark_static, (4, 1, 7)) == 3
    assert marked(lambda x: x + 1, lambda x: torchsmith.mark_dynamic(x, 0, min=2, max=8), (4, 8, 2)) == 1
    with pytest.raises(torchsmith.ConstraintViolation, match="between 2 and 8, but it is 9"):
        marked(lambda x: x + 1, lambda x: torchsmith.mark_dynamic(x, 0, min=2, max=8), (4, 9))
    assert marked(lambda x: x + torch.ones(4, 3), lambda x: torchsmith.maybe_mark_dynamic(x, 0), (4,)) == 1


def test_marked_dimensions_must_stay_open() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(4, 3)

    with pytest.raises(torchsmith.ConstraintViolation, match=r"dimension 0 of L\['x'\].*makes 4 of it.*test_sizes.py"):
        marked(f, lambda x: torchsmith.mark_dynamic(x, 0), (4,))
    with pytest.raises(IndexError):
        torchsmith.mark_dynamic(torch.randn(2), 1)
    with pytest.raises(ValueError, match="no size"):
        torchsmith.mark_dynamic(torch.randn(2), 0, min=3, max=2)


def test_order_of_sizes_in_memory() -> None:
    """Channels-last inputs, slices and transposes: another memory order is another program, a batch of one is not."""
    conv = nn.Conv2d(4, 8, 3)
    calls = [(torch.randn(n, 4, 6, 7).to(memory_format=torch.channels_last),) for n in (2, 1, 5)]
    assert compiles(conv, calls) == 1
    for a, b in itertools.pairwise([torch.randn(5, 6), torch.randn(6, 5).t(), torch.randn(5, 12)[:, ::2], torch.randn(10, 6)[::2]]):
        assert compiles(lambda x: (x @ torch.ones(6, 3)).relu(), [(a,), (b,)]) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("channels", "kernel", "how"), [
    (16, 3, {"padding": 1}), (3, 7, {"padding": 3, "stride": 2}), (3, 5, {"padding": 4, "dilation": 2}), (8, (1, 3), {"padding": (0, 2)}),
    (20, 3, {"padding": 1, "stride": 2}), (32, 5, {"padding": 2, "groups": 2}),
])  # fmt: skip
def test_padded_convolutions_of_any_width(channels: int, kernel: object, how: dict[str, object], dtype: torch.dtype) -> None:
    """Partial tiles of every number of rows, first, last and only ones, one compilation for all."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(channels, 32, kernel, **how).to(dtype).eval()
    exact = torch.nn.Conv2d(channels, 32, kernel, **how).double().eval()
    exact.load_state_dict(conv.state_dict())
    c = torchsmith.compile(lambda x: torch.relu(conv(x)), dynamic=True)
    with torch.no_grad(), events.recording() as got:
        for width in (11, *range(2, 41)):
            x = torch.randn(1, channels, 5 + width % 3, width).to(dtype)
            want, ours, eager = torch.relu(exact(x.double())), c(x), torch.relu(conv(x))
            assert ours.shape == want.shape and ours.dtype == dtype
            error, bar = ((t.double() - want).abs().max().item() for t in (ours, eager))
            ulps = 64 if dtype is torch.float64 else 4  # of float64 there is no better one to compare with
            assert error <= max(2 * bar, ulps * torch.finfo(dtype).eps * want.abs().max().item()), width
    assert sum(e.kind == "graph" for e in got) == 1
    assert all(e.fields["report"].road == "native" for e in got if e.kind == "graph")


def test_names_of_symbols_in_text() -> None:
    """Each symbol by its own name: s1 is no part of s10, nor of what another is called."""
    text = print_condition(op("lt", Sym("s1") + Sym("s10"), Sym("s2")), {"s1": "rows", "s2": "s1"})
    assert text == "((rows + s10) < s1)"


@pytest.mark.parametrize("expr", ["1 // (n % 3)", "n / (n - 4)", "9 % (n % 4)", "divmod(1, n % 3)", "operator.floordiv(n, n - 3)"])
def test_a_division_by_zero_raises_in_each_call(expr):
    """Whether the quotient is used or not: a number that varies is no zero in the calls that one compilation is for."""
    space = {"operator": operator}
    exec(f"def fn(x, n):\n  try:\n    {expr}\n    return x + 1\n  except ZeroDivisionError:\n    return x - 1", space)
    compiled = torchsmith.compile(space["fn"], backend="eager")
    for n in (5, 7, 6, 4, 3, 8):
        assert torch.equal(compiled(torch.ones(2), n), space["fn"](torch.ones(2), n))
