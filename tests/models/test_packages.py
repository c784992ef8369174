"""Whole models as packages: results of fresh processes without model code equal eager's over the declared ranges, both ends included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

from decoder import HEADS, WIDTH, CachedDecoder
from package_harness import check_package

from models import inputs_of, make_model
from torchsmith.export import Dim

LIMIT = 1e-4  # of the largest result
BATCH = Dim("batch", min=1, max=4)
ENDS = ((1, 1), (4, 512), (2, 33), (4, 1), (1, 512))  # batch, length

pytestmark = pytest.mark.models


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "timm_vision_transformer"])
def test_images(name: str, tmp_path: Path) -> None:
    calls = [inputs_of(name, batch, seed=batch) for batch in (1, 2, 3, 5, 8)]
    check_package(make_model(name), calls, ({0: Dim("batch", min=1, max=8)},), tmp_path, LIMIT)


class Words(nn.Module):
    """BERT's last hidden state and pooled one, as a tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> Any:
        out = self.model(ids)
        return out.last_hidden_state, out.pooler_output


def test_words(tmp_path: Path) -> None:
    """The model asks whether there is more than one token."""
    calls = [(torch.randint(0, 30522, (b, max(n, 2))),) for b, n in ENDS]
    check_package(Words(make_model("BERT_pytorch")).eval(), calls, ({0: BATCH, 1: Dim("length", min=2, max=512)},), tmp_path, LIMIT)


def test_recurrent(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(64, 256, 2, bidirectional=True, batch_first=True).eval()
    calls = [(torch.randn(b, n, 64),) for b, n in ENDS]
    check_package(model, calls, ({0: BATCH, 1: Dim("length", min=1, max=512)},), tmp_path, LIMIT)


def test_decoder_with_a_cache(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = CachedDecoder().eval()
    layers = len(model.blocks)
    calls = []
    for batch, past in ((1, 1), (4, 1023), (2, 33), (4, 1), (1, 1023)):
        kept = [torch.randn(batch, HEADS, past, WIDTH // HEADS) for _ in range(2 * layers)]
        calls.append((torch.randint(0, 8192, (batch, 1)), kept))
    sizes = ({0: BATCH}, [{0: BATCH, 2: Dim("past", min=1, max=1023)}] * (2 * layers))
    check_package(model, calls, sizes, tmp_path, LIMIT)
