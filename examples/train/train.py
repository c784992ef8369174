"""A character transformer learns the text of this repository's documentation, eagerly and with its whole training step compiled.

    python examples/train/train.py [--steps 300] [--width 96] [--layers 2] [--context 48] [--batch 16] [--picture curves.svg]

Both runs start from the same weights and see the same batches. The compiled step is one graph: forward, loss, backward and AdamW, called
as one native function. At the end: both losses, milliseconds a step, and a picture of both curves.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchsmith

TEXT = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, w // self.heads).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.feed(self.after(x))


class Characters(nn.Module):
    """Logits of the next character: (batch, context) int64 -> (batch, context, characters)."""

    def __init__(self, characters: int, context: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.place.weight[: x.shape[1]])))


def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """One step of training: what is compiled."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def batches(codes: Tensor, steps: int, batch: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    choose = torch.Generator().manual_seed(1)
    for _ in range(steps):
        at = torch.randint(len(codes) - context - 1, (batch, 1), generator=choose) + torch.arange(context)
        yield codes[at], codes[at + 1]


def run(name: str, step: Callable[..., Tensor], model: nn.Module, codes: Tensor, args: argparse.Namespace) -> tuple[list[float], float]:
    """Losses of every step, and seconds a step (the median)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses, seconds = [], []
    for number, (x, y) in enumerate(batches(codes, args.steps, args.batch, args.context), 1):
        start = time.perf_counter()
        losses.append(float(step(model, optimizer, x, y)))
        seconds.append(time.perf_counter() - start)
        done = 30 * number // args.steps
        print(f"\r{name:9} [{'#' * done}{'.' * (30 - done)}] step {number}  loss {losses[-1]:.3f}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return losses, sorted(seconds)[len(seconds) // 2]


def picture(curves: dict[str, Sequence[float]], path: Path) -> None:
    """Losses over steps, as SVG."""
    width, height, most = 640, 320, max(max(c) for c in curves.values())
    rows = []
    for (name, losses), colour in zip(curves.items(), ("#888888", "#d94801"), strict=True):
        across, up = (width - 60) / max(1, len(losses) - 1), (height - 50) / most
        points = " ".join(f"{40 + i * across:.1f},{height - 30 - v * up:.1f}" for i, v in enumerate(losses))
        rows.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
        rows.append(f'<text x="{width - 150}" y="{30 + 18 * (len(rows) // 2)}" fill="{colour}">{name}: {losses[-1]:.3f}</text>')
    rows.append(f'<text x="40" y="{height - 10}">steps 1 to {len(losses)}, loss 0 to {most:.2f}</text>')
    body = "\n".join(rows)
    size = f'width="{width}" height="{height}" font-family="sans-serif" font-size="13"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n')


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, value in (("steps", 300), ("width", 96), ("layers", 2), ("context", 48), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--picture", type=Path, default=None, help="where to draw both curves, as SVG")
    args = parser.parse_args(arguments)
    text = TEXT.read_text()
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(c) for c in text])
    torch.manual_seed(0)
    first = Characters(len(letters), args.context, args.width, args.layers)
    found: dict[str, Any] = {}
    for name, step in (("eager", train_step), ("compiled", torchsmith.compile(train_step, fullgraph=True))):
        found[name] = run(name, step, copy.deepcopy(first), codes, args)
    for name, (losses, seconds) in found.items():
        print(f"{name:9} loss {losses[0]:.3f} -> {losses[-1]:.3f}   {seconds * 1e3:.2f} ms a step")
    if args.picture is not None:
        picture({name: losses for name, (losses, _) in found.items()}, args.picture)
        print(f"picture   {args.picture}")
    return found


if __name__ == "__main__":
    main()
