"""Small models of every family as packages that run in fresh processes, at both ends of each range; tests/models has the large ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from package_harness import check_package
from torch import nn
from torch.nn import functional as F

from torchsmith.export import Dim

WIDTH, HEADS, WORDS, LONGEST = 16, 2, 40, 32


class Residual(nn.Module):
    """Convolutions with norms and a way around them, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.out = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.first(x)))
        x = F.relu(x + self.norm2(self.second(x)))
        return self.out(x.mean((2, 3)))


class Tagger(nn.Module):
    """A deep recurrent network in both directions over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.run = nn.LSTM(8, 12, 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(24, 3)

    def forward(self, ids: torch.Tensor) -> Any:
        y, (h, c) = self.run(self.words(ids))
        return self.out(y), h, c


class Step(nn.Module):
    """One layer of a decoder that makes one token a call."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def parts(self, ids: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.words(ids) + self.places(place)
        q, k, v = self.qkv(x).view(ids.shape[0], 1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return x, q, k, v

    def rest(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.out(attended.transpose(1, 2).flatten(2)))


class Growing(Step):
    """The cache comes in and goes out one longer."""

    def forward(self, ids: torch.Tensor, past: list[torch.Tensor]) -> Any:
        place = torch.full((1,), past[0].shape[2], dtype=torch.int64)
        x, q, k, v = self.parts(ids, place)
        keys, values = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        return self.rest(x, F.scaled_dot_product_attention(q, keys, values)), [keys, values]


class Written(Step):
    """The cache is written in place at one position."""

    def forward(self, ids: torch.Tensor, place: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x, q, k, v = self.parts(ids, place)
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, v)
        seen = (torch.arange(keys.shape[2]) <= place)[None]
        return self.rest(x, F.scaled_dot_product_attention(q, keys, values, attn_mask=seen))


def cache(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, HEADS, length, WIDTH // HEADS)


def ids(batch: int, length: int = 1) -> torch.Tensor:
    return torch.randint(0, WORDS, (batch, length))


ENDS = ((1, 1), (4, 30), (2, 7), (4, 1), (1, 30))  # batch, length
BATCH, LENGTH = Dim("batch", min=1, max=4), Dim("length", min=1, max=30)


def test_convolutions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    side = Dim("half", min=4, max=20)
    sizes = ({0: BATCH, 2: 2 * side, 3: 2 * side},)
    check_package(Residual().eval(), [(torch.randn(b, 3, n, n),) for b, n in ((1, 8), (4, 40), (2, 14), (4, 8), (1, 40))], sizes, tmp_path)


def test_recurrent(tmp_path: Path) -> None:
    torch.manual_seed(0)
    check_package(Tagger().eval(), [(ids(b, n),) for b, n in ENDS], ({0: BATCH, 1: LENGTH},), tmp_path)


def test_cache_that_grows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    calls = [(ids(b), [cache(b, n), cache(b, n)]) for b, n in ENDS]
    check_package(Growing().eval(), calls, ({0: BATCH}, [{0: BATCH, 2: LENGTH}] * 2), tmp_path)


def test_cache_that_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    calls = [(ids(b), torch.tensor([n - 1]), cache(b, n), cache(b, n)) for b, n in ENDS]
    check_package(Written().eval(), calls, ({0: BATCH}, None, {0: BATCH, 2: LENGTH}, {0: BATCH, 2: LENGTH}), tmp_path)
