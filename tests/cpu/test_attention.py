"""Attention: every form of scaled_dot_product_attention, and attention that a user wrote out, as one native kernel as exact as eager's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from graph_harness import captured
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchsmith
from software_tiles import in_software
from torchsmith.emit.c import emit_kernel
from torchsmith.emit.printers import PRINTERS
from torchsmith.events import recording
from torchsmith.graph.functionalise import functionalise
from torchsmith.graph.rules import attention
from torchsmith.graph.sizes import SizeFacts
from torchsmith.ir.kernel import Kernel
from torchsmith.options import Options
from torchsmith.pipeline import compile_graph, compile_source

sdpa = torch.nn.functional.scaled_dot_product_attention
OPTIONS = Options()


def heads(b: int, n: int, h: int, d: int) -> torch.Tensor:
    """[b, h, n, d] as a projection of [b, n, h * d] gives it."""
    return torch.randn(b, n, h, d).transpose(1, 2)


def check(fn: Callable[..., torch.Tensor], *args: torch.Tensor, kernels: int | None = 1, options: Options = OPTIONS) -> None:
    """Compiled without an extern call; as near to float64 as eager, and NaN and 0 where eager has them."""
    facts = SizeFacts()
    done = compile_graph(captured(fn, args, facts), facts.freeze(), args, options=options)
    assert done.report.road == "native"
    assert not done.report.externs
    assert kernels is None or done.report.kernels == kernels
    (got,), want = done.call(*args), fn(*args)
    reference = fn(*(a.double() if a.is_floating_point() else a for a in args))
    assert got.stride() == want.stride()
    assert got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())

    def error(x: torch.Tensor) -> float:
        return float((x.double() - reference).abs().nan_to_num(0).max())

    eps = torch.finfo(got.dtype).eps
    assert error(got) <= max(2 * error(want), 4 * eps * float(reference.abs().nan_to_num(0).max()))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, is_causal=True)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, attn_mask=m)


def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A mask made of positions, which are 64-bit integers."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return sdpa(q, k, v, attn_mask=(i >= 0) & (i - j < 20) & (j - i <= 7))


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, enable_gqa=True, scale=0.3)


FORMS: dict[str, tuple[Any, Callable[[], tuple[torch.Tensor, ...]]]] = {
    "bert": (plain, lambda: (heads(1, 128, 12, 64), heads(1, 128, 12, 64), heads(1, 128, 12, 64))),
    "197 queries": (plain, lambda: (heads(2, 197, 2, 64), heads(2, 197, 2, 64), heads(2, 197, 2, 64))),
    "causal": (causal, lambda: (heads(2, 150, 3, 64), heads(2, 150, 3, 64), heads(2, 150, 3, 64))),
    "causal, more keys, width 40": (causal, lambda: (heads(2, 150, 3, 40), heads(2, 190, 3, 40), heads(2, 190, 3, 40))),
    "window": (window, lambda: (heads(2, 70, 3, 32), heads(2, 70, 3, 32), heads(2, 70, 3, 32))),
    "one query": (plain, lambda: (heads(2, 1, 3, 80), heads(2, 1000, 3, 80), heads(2, 1000, 3, 80))),
    "two queries, masked": (masked, lambda: (*(heads(1, n, 3, 24) for n in (2, 300, 300)), torch.randn(3, 2, 300)[None] > 0)),
    "three queries, causal": (causal, lambda: tuple(heads(2, 3, 2, 64) for _ in range(3))),
    "heads are the rows": (grouped, lambda: (heads(1, 1, 8, 32), heads(1, 500, 2, 32), heads(1, 500, 2, 32))),
    "width 300, many keys": (causal, lambda: (heads(1, 100, 1, 300), heads(1, 1100, 1, 300), heads(1, 1100, 1, 300))),
    "one of all": (plain, lambda: (heads(1, 1, 1, 1), heads(1, 1, 1, 1), heads(1, 1, 1, 1))),
    "grouped heads": (grouped, lambda: (heads(2, 33, 8, 16), heads(2, 70, 2, 16), heads(2, 70, 2, 16))),
    "mask": (masked, lambda: (heads(2, 33, 8, 16), heads(2, 70, 8, 16), heads(2, 70, 8, 16), torch.randn(2, 1, 33, 70))),
    "turned mask": (masked, lambda: (heads(2, 33, 2, 8), heads(2, 70, 2, 8), heads(2, 70, 2, 8), torch.randn(70, 33).t())),
    "keys left out": (masked, lambda: (heads(2, 33, 2, 8), heads(2, 70, 2, 8), heads(2, 70, 2, 8), torch.randn(2, 1, 1, 70) > 0)),
    "expanded": (masked, lambda: (*(heads(2, n, 2, 8) for n in (33, 70, 70)), torch.randn(2, 1, 1, 70).expand(2, 1, 33, 70))),
    "contiguous, wide": (plain, lambda: (torch.randn(1, 2, 20, 200), torch.randn(1, 2, 40, 200), torch.randn(1, 2, 40, 200))),
    "three dimensions": (plain, lambda: (torch.randn(8, 33, 16), torch.randn(8, 70, 16), torch.randn(8, 70, 16))),
    "two widths": (masked, lambda: (heads(1, 70, 2, 80), heads(1, 333, 2, 80), heads(1, 333, 2, 33), torch.randn(70, 333))),
    "odd width, many keys": (masked, lambda: (heads(1, 70, 2, 35), heads(1, 333, 2, 35), heads(1, 333, 2, 35), torch.randn(70, 333))),
    "float16": (plain, lambda: tuple(heads(1, 90, 2, 24).half() for _ in range(3))),
}  # fmt: skip


STORED = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def stored(args: Iterable[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Those of float32 in another dtype, as they lie."""
    return [x.to(dtype) if x.dtype is torch.float32 else x for x in args]


@STORED
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fn, make = FORMS[name]
    unfused = dtype is torch.bfloat16 and name in ("three dimensions", "two widths")  # nor has eager a kernel: it rounds between
    check(fn, *stored(make(), dtype), kernels=None if unfused else 1)


def test_pairs_make_bfloat16() -> None:
    """Both products take the instructions of pairs, under a mask too."""
    args = (*(heads(1, n, 2, 64).bfloat16() for n in (90, 300, 300)), torch.randn(90, 300).bfloat16())
    facts = SizeFacts()
    source = compile_source(functionalise(captured(masked, args, facts), facts.freeze()), Options(), "attention")
    assert sum(line.strip().startswith("pairs_") or " : pairs_" in line for text in source.kernels for line in text.splitlines()) == 2


@pytest.mark.parametrize("name", ["causal, more keys, width 40", "grouped heads", "odd width, many keys"])
def test_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products share the configuration of the tiles, whatever rows and depth each has."""
    torch.manual_seed(0)
    fn, make = FORMS[name]
    texts: list[str] = []

    def emit(kernel: Kernel) -> str:
        texts.append(in_software(emit_kernel(kernel)))
        return texts[-1]

    monkeypatch.setitem(PRINTERS, "c", emit)
    check(fn, *stored(make(), torch.bfloat16), options=Options(force_disable_caches=True))
    assert any("tile_product" in t for t in texts)


@STORED
def test_rows_without_a_key_are_zero_and_odd_values_spread_as_in_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = stored((heads(2, 33, 4, 16), heads(2, 70, 4, 16), heads(2, 70, 4, 16)), dtype)
    mask = torch.randn(33, 70) > 0
    mask[3] = False
    check(masked, q, k, v, mask)
    k[0, 2, 7], v[1, 2, 8, 1], q[0, 0, 0, 0] = float("inf"), float("nan"), float("nan")
    if dtype is torch.float32:  # in bfloat16 eager gives 0 where a score overflows
        k[1, 0, 5, 2], q[1, 0, :, 2] = 1e30, 1e10
    check(masked, q, k, v, mask)


@STORED
def test_rows_without_a_key_have_gradients_of_zero(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_() for x in stored((heads(1, 5, 2, 16), heads(1, 9, 2, 16), heads(1, 9, 2, 16)), dtype))
    mask = torch.randn(5, 9) > 0
    mask[3] = False

    def gradients(fn: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(fn(q, k, v, mask).float().square().sum(), (q, k, v))

    got, want = gradients(torchsmith.compile(masked)), gradients(masked)
    assert (want[0][:, :, 3] == 0).all()
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=2e-2 if dtype is torch.bfloat16 else 1e-5)


@STORED
def test_masks_that_are_learned(dtype: torch.dtype) -> None:
    """Biases as T5's: eager's flash kernel takes no mask that requires a gradient, and neither does ours, wanted or not."""
    torch.manual_seed(0)
    given = heads(2, 5, 3, 16), heads(2, 9, 3, 16), heads(2, 9, 3, 16), torch.randn(1, 3, 5, 9)
    q, k, v, mask = (x.requires_grad_() for x in stored(given, dtype))

    def gradients(fn: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = fn(q, k, v, mask)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v, mask))

    compiled = torchsmith.compile(masked, fullgraph=True)
    with torch.no_grad():
        tail = [(compiled(q, k, v, mask), masked(q, k, v, mask))]
    for g, w in [*zip(gradients(compiled), gradients(masked), strict=True), *tail]:
        torch.testing.assert_close(g, w, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_dropout_is_not_ours() -> None:
    q = heads(1, 8, 1, 8)
    facts = SizeFacts()
    gm = captured(lambda q: sdpa(q, q, q, dropout_p=0.5), (q,), facts)
    report = compile_graph(gm, facts.freeze(), (q,), options=Options()).report
    assert report.road != "native" or report.externs


@STORED
@pytest.mark.parametrize("seed", range(6))
def test_random_forms(seed: int, dtype: torch.dtype) -> None:
    """Sizes, masks and layouts nobody picked by hand."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    b, shared, group = r.randint(1, 3), r.randint(1, 3), r.choice((1, 1, 2, 3))
    n, keys, d = r.choice((1, 2, 7, 50, 100)), r.choice((1, 3, 64, 65, 130)), r.choice((3, 8, 16, 33, 64))
    kind = r.choice(("none", "causal", "float", "bool", "row"))
    make = r.choice((heads, lambda b, n, h, d: torch.randn(b, h, n, d)))
    args = [make(b, n, shared * group, d), make(b, keys, shared, d), make(b, keys, shared, d)]
    if kind in ("float", "bool", "row"):
        shape = (r.choice((1, b)), r.choice((1, shared * group)), 1 if kind == "row" else n, keys)
        args.append(torch.randn(shape) if kind == "float" else torch.randn(shape) > -0.5)
    options = {"is_causal": kind == "causal", "enable_gqa": True, "scale": r.choice((None, 0.2))}
    check(lambda q, k, v, m=None: sdpa(q, k, v, attn_mask=m, **options), *stored(args, dtype), kernels=None)


# ---------------------------------------------------------------- attention written out


def hub(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """As model hubs write it."""
    p = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.25 + m, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(torch.nn.functional.dropout(p, 0.1, training=False), v)


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    b, shared, n, d = k.shape
    k, v = (x[:, :, None].expand(b, shared, q.shape[1] // shared, n, d).reshape(b, q.shape[1], n, d) for x in (k, v))
    return torch.softmax(q @ k.transpose(2, 3) / 4.0, -1) @ v


def einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhij,bhjd->bihd", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)


def triangular(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    above = torch.triu(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool), 1)
    return (q @ k.transpose(2, 3) * 0.25).masked_fill(above, float("-inf")).softmax(-1) @ v


def exponentials(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = q @ k.transpose(2, 3) * 0.25
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(q @ k.transpose(2, 3) * 0.25 / 30) * 30).softmax(-1) @ v


@pytest.mark.parametrize("fn", [hub, repeated, einsum, triangular, exponentials, capped], ids=lambda f: f.__name__)
def test_written_out(fn: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    shared = 2 if fn is repeated else 4
    args = [heads(2, 33, 4, 16), heads(2, 70, shared, 16), heads(2, 70, shared, 16)]
    check(fn, *args, *([torch.randn(2, 1, 33, 70)] if fn is hub else []))


def test_weights_that_are_returned_are_computed_once() -> None:
    q = heads(1, 20, 2, 16)
    facts = SizeFacts()

    def both(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = (q @ q.transpose(2, 3)).softmax(-1)
        return p @ q, p

    gm = captured(both, (q,), facts)
    done = compile_graph(gm, facts.freeze(), (q,), options=Options())
    assert done.report.kernels > 2  # the parts, not attention
    for got, want in zip(done.call(q), both(q), strict=True):
        torch.testing.assert_close(got, want)


def test_a_mask_that_is_looked_up() -> None:
    """Relative positions: the mask is a gather from a table; q, k and v are pieces of one convolution's result."""
    torch.manual_seed(0)
    weight, table, places = torch.randn(48, 16, 1, 1), torch.randn(81, 2), torch.randint(0, 81, (25, 25))

    def fn(x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        bias = table[places.view(-1)].view(25, 25, -1).permute(2, 0, 1).unsqueeze(0).contiguous()
        parts = torch.conv2d(x, weight).view(1, 2, 24, -1).chunk(3, dim=2)
        q, k, v = (t.transpose(-1, -2).contiguous() for t in parts)
        return sdpa(q, k, v, attn_mask=bias)

    check(fn, torch.randn(1, 16, 5, 5), weight, table, places, kernels=None)


def test_a_mask_made_of_integers() -> None:
    """64-bit values stay out of a kernel whose vectors hold 32-bit ones: the mask is made before."""
    torch.manual_seed(0)
    words = torch.ones(2, 33, dtype=torch.long)
    words[1, 20:] = 0

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, attn_mask=words[:, None, None, :] * torch.arange(1, 34)[None, None, :, None] > 0)

    check(fn, heads(2, 33, 3, 16), heads(2, 33, 3, 16), heads(2, 33, 3, 16), words, kernels=None)


def test_gradients_of_a_librarys_attention() -> None:
    """The operators that training on a GPU calls (graph/attention.py) as kernels of our own, and differentiated again."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = sdpa(q, k, v, mask), sdpa(q, k, v, is_causal=True, scale=0.3)
        return *torch.autograd.grad(found[0].sin().sum() + found[1].square().sum(), (q, k, v)), *found

    def curve(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(sdpa(q, k, k).square().sum(), q, create_graph=True)
        return torch.autograd.grad(g.square().sum(), k)[0]

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (11, 13, 13))
    mask = torch.rand(2, 1, 1, 13) < 0.7
    mask[0] = False
    with patch.object(attention, "LIBRARIES", {"cpu"}), patch.object(attention, "TYPES", {torch.float32}):
        with recording() as events:
            got = torchsmith.compile(attend, options={"force_disable_caches": True, "libtorch": "forbid"})(q, k, v, mask)
        twice = torchsmith.compile(curve, options={"force_disable_caches": True})(q, k)
    assert not [e for e in events if e.kind in ("fallback", "extern")]
    for a, b in zip(got, attend(q, k, v, mask), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(twice, curve(q, k), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_mask_whose_rows_are_found_to_be_one_serves_all_sizes(backend: str) -> None:
    """view(batch, heads, -1, keys) leaves a quotient of two sizes: that it is 1 is a guard, and one compilation serves all batches."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, attn_mask=m.repeat_interleave(2, dim=0).view(q.shape[0], 2, -1, m.shape[-1]))

    compiled = torchsmith.compile(fn, backend=backend, dynamic=True)
    with recording() as seen:
        for b in (2, 3, 5):
            args = torch.randn(b, 2, 5, 8), torch.randn(b, 2, 6, 8), torch.randn(b, 2, 6, 8), torch.randn(b, 1, 6)
            torch.testing.assert_close(compiled(*args), fn(*args))
    assert [e.kind for e in seen if e.kind in ("graph", "fallback", "graph_break")] == ["graph"]
