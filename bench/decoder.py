"""A small decoder-only transformer: six layers, rotary positions, causal attention, gated feed-forward, logits for every token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, HIDDEN, LAYERS, VOCABULARY, LENGTH = 512, 8, 1408, 6, 8192, 128


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH).uniform_(0.7, 1.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = Norm(), Norm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.parts(x, cos, sin)
        return self.rest(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One more token each, all that came before in `keys` and `values`."""
        q, k, v = self.parts(x, cos, sin)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        return self.rest(x, F.scaled_dot_product_attention(q, keys, values)), keys, values

    def parts(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, length: int = LENGTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        half = WIDTH // HEADS // 2
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class CachedDecoder(Decoder):
    """The same, a token at a time: tokens[batch, 1] and a cache of [batch, heads, past, width] for the keys and values of each layer."""

    def __init__(self) -> None:
        super().__init__(1024)

    def forward(self, tokens: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
        x = self.embed(tokens)
        start = past[0].shape[2]
        cos, sin = self.cos[start : start + 1], self.sin[start : start + 1]
        kept: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x, keys, values = block.step(x, cos, sin, past[2 * i], past[2 * i + 1])
            kept += [keys, values]
        return self.head(self.norm(x)), kept
