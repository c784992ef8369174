"""torch's own transformer modules in eval mode, with every kind of mask: natively, and as packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchsmith
from torchsmith import aot, events
from torchsmith.export import Dim

B, N, E = 3, 10, 32
PAD = torch.arange(N) >= torch.tensor([[10], [7], [4]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(N)
HEADS = torch.arange(B * 4 * N * N).reshape(B * 4, N, N) % 7 == 3


def attention(**how: Any) -> nn.Module:
    return nn.MultiheadAttention(E, 4, batch_first=True, **how)


def layer(**how: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(E, 4, 48, batch_first=True, **how)


def encoder(**how: Any) -> nn.Module:
    return nn.TransformerEncoder(layer(**how), 2, enable_nested_tensor=False)


CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {  # module, tensors that it takes, keywords
    "attention": (attention, 3, {}),
    "attention, padding": (attention, 3, {"key_padding_mask": PAD}),
    "attention, each head's weights": (attention, 3, {"key_padding_mask": PAD, "average_attn_weights": False}),
    "attention, a mask for each head": (attention, 3, {"attn_mask": HEADS, "key_padding_mask": PAD, "need_weights": False}),
    "attention without bias": (lambda: attention(bias=False), 3, {"attn_mask": CAUSAL < 0}),
    "layer, padding": (layer, 1, {"src_key_padding_mask": PAD}),
    "layer, both": (lambda: layer(norm_first=True, activation="gelu"), 1, {"src_mask": CAUSAL < 0, "src_key_padding_mask": PAD}),
    "layer, numbers": (layer, 1, {"src_mask": CAUSAL}),
    "encoder, a mask that could be causal": (encoder, 1, {"mask": CAUSAL}),
    "encoder, padding": (encoder, 1, {"src_key_padding_mask": PAD}),
}


@pytest.mark.parametrize("name", CASES)
def test_masks(name: str) -> None:
    torch.manual_seed(0)
    make, count, keywords = CASES[name]
    model = make().eval()
    x = torch.randn(B, N, E)
    compiled = torchsmith.compile(model, fullgraph=True)
    with torch.no_grad(), events.recording() as got:
        torch.testing.assert_close(compiled(*[x] * count, **keywords), model(*[x] * count, **keywords), rtol=1e-5, atol=2e-6)
    (report,) = [e.fields["report"] for e in got if e.kind == "graph"]
    assert report.road == "native" and not report.externs


def test_no_key_left_is_nan_as_in_eager() -> None:
    model = attention().eval()
    x, mask = torch.randn(2, 3, E), torch.tensor([[False, True, False], [True, True, True]])
    with torch.no_grad():
        (got, weights), (want, same) = (m(x, x, x, key_padding_mask=mask) for m in (torchsmith.compile(model), model))
    assert bool(want[1].isnan().all()) and bool(same[1].isnan().all())
    torch.testing.assert_close(got, want, equal_nan=True)
    torch.testing.assert_close(weights, same, equal_nan=True)


def test_package_with_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = encoder().eval()
    batch, length = Dim("batch", min=1, max=8), Dim("length", min=1, max=40)
    sizes = {0: batch, 1: length}
    with torch.no_grad():
        given = (torch.randn(B, N, E),), {"src_key_padding_mask": PAD}
        program = torchsmith.export.export(model, *given, dynamic_shapes={"src": sizes, "src_key_padding_mask": sizes})
        path = str(tmp_path / "encoder.pt2")
        aot.compile_and_package(program, package_path=path)
        run = aot.load_package(path)
        for b, n in ((1, 1), (8, 40), (2, 9), (1, 40), (8, 1)):
            x = torch.randn(b, n, E)
            pad = torch.arange(n) >= torch.randint(1, n + 1, (b, 1))
            want = model(x, src_key_padding_mask=pad)
            torch.testing.assert_close(run(x, src_key_padding_mask=pad), want, rtol=1e-5, atol=2e-6)
