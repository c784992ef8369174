"""A processor is a row: code for AVX2 and for any x86-64, chosen by option, computes what eager does, with registers of its own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchsmith import compile, events
from torchsmith.ir.target import AVX2, CPU, PLAIN, cpu_with, target_named
from torchsmith.options import Options, from_user
from torchsmith.runtime import toolchain

LEVELS = {"x86-64": PLAIN, "x86-64-v3": AVX2}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Everything(nn.Module):
    """One of each template and loop order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dense = nn.Conv2d(3, 24, 3, 2, 1), nn.Conv2d(24, 40, 3, padding=1)
        self.grouped, self.depthwise = nn.Conv2d(40, 40, 3, padding=1, groups=10), nn.Conv2d(40, 40, 5, padding=2, groups=40)
        self.transposed, self.norm, self.few = nn.ConvTranspose2d(40, 16, 4, 2, 1), nn.LayerNorm(22), nn.Linear(300, 3)

    def forward(self, x: torch.Tensor, q: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.depthwise(F.gelu(self.grouped(F.relu(self.dense(self.first(x))))))
        z = F.max_pool2d(self.norm(self.transposed(y)[..., :22]), 3, 2, 1)
        a = F.scaled_dot_product_attention(q, q.flip(1), q, is_causal=True)
        b = F.scaled_dot_product_attention(q[:, :, :1], q, q)
        return z, a, b, torch.softmax(q @ w, -1), q @ q.mT, self.few(w.repeat(1, 30)[:, :300]), torch.sin(q).cumsum(1), q.amax(2)


def close(want: Any, got: Any) -> None:
    for a, b in zip(want, got, strict=True):
        assert a.shape == b.shape and a.dtype is b.dtype
        error = (a.double() - b.double()).abs().max() / a.double().abs().max()
        assert error <= TOLERANCE[a.dtype], (a.shape, float(error))


@pytest.mark.parametrize(
    ("level", "dtype"), [*(("x86-64-v3", d) for d in TOLERANCE), ("x86-64", torch.float32), ("x86-64", torch.float64)], ids=str
)
def test_every_template_is_right(level: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Everything().to(dtype).eval()
    args = torch.randn(2, 3, 23, 21).to(dtype), torch.randn(2, 3, 37, 20).to(dtype), torch.randn(20, 50).to(dtype)
    with torch.no_grad(), events.recording() as found:
        got = compile(model, options={"cpu": level, "freezing": True, "check": 2})(*args)
        close(model(*args), got)
    assert not [e for e in found if e.kind == "fallback"]


@pytest.mark.parametrize("level", LEVELS)
def test_cells_and_sizes_that_vary(level: str) -> None:
    torch.manual_seed(0)
    cell, layer = nn.LSTM(12, 20, batch_first=True), nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 7))
    compiled, varying = compile(cell, options={"cpu": level, "check": 2}), compile(layer, dynamic=True, options={"cpu": level})
    with torch.no_grad():
        close(cell(torch.ones(2, 5, 12))[:1], compiled(torch.ones(2, 5, 12))[:1])
        for rows in (1, 3, 14, 40):
            x = torch.randn(rows, 30)
            close([layer(x)], [varying(x)])


def texts(options: Options, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels of one linear layer."""
    from torchsmith import pipeline

    kept: list[str] = []
    emit = pipeline.emit
    monkeypatch.setattr(pipeline, "emit", lambda plan, o: (source := emit(plan, o), kept.extend(source.kernels))[0])
    layer = nn.Linear(64, 96)
    with torch.no_grad():
        chosen = {"cpu": options.cpu, "cpp_simdlen": options.cpp_simdlen, "freezing": True, "force_disable_caches": True}
        compile(layer, options=chosen)(torch.ones(12, 64))
    return kept


@pytest.mark.parametrize(("cpu", "bits", "lanes", "most"), [("x86-64-v3", 0, 8, 15), ("x86-64", 0, 4, 15), ("native", 256, 8, 15)])
def test_tiles_fit_the_registers(cpu: str, bits: int, lanes: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulators, a row of the operand and one splat are no more than the registers there are."""
    if bits and "avx2" not in toolchain.cpu_features():
        pytest.skip("no AVX2 here")
    (product,) = [t for t in texts(Options(cpu=cpu, cpp_simdlen=bits), monkeypatch) if "c0_0" in t]
    assert f"typedef f32 xf32 __attribute__((vector_size({4 * lanes})));" in product
    sums, columns = set(re.findall(r"\bc\d+_\d+\b", product)), set(re.findall(r"\bw\d+\b", product))
    assert len(sums) >= 8 and len(sums) + len(columns) + 1 <= most + 1


def test_rows_follow_features() -> None:
    assert cpu_with(frozenset(toolchain.LEVELS["x86-64-v4"])) is CPU and cpu_with(frozenset(toolchain.LEVELS["x86-64-v3"])) is AVX2
    assert cpu_with(frozenset()) is PLAIN and cpu_with(frozenset({"avx", "sse4_2"})) is PLAIN
    assert all(target_named(t.name) is t for t in (CPU, AVX2, PLAIN))
    narrow = toolchain.features_of(Options(cpu="x86-64-v4", cpp_simdlen=256))
    assert set(narrow) == set(toolchain.LEVELS["x86-64-v3"])
    assert toolchain.target_of(Options(cpu="x86-64-v4", cpp_simdlen=128)) is PLAIN
    with pytest.raises(RuntimeError, match=r"cpp\.simdlen"):
        from_user(None, {"cpp.simdlen": 200})


def test_a_processor_that_this_one_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "cpu_features", lambda: ("sse4_2", "popcnt"))
    fn = compile(lambda x: x + 1, options={"cpu": "x86-64-v4"})
    with pytest.warns(UserWarning, match="RUN012"):
        assert torch.equal(fn(torch.ones(3)), torch.full((3,), 2.0))
