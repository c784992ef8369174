"""Every kernel text that models and small programs compile to: did a restructuring change generated code?

    python bench/texts.py write FILE [--cpu NAME] [--only NAME ...]      keep the texts (a JSON file)
    python bench/texts.py compare FILE [--cpu NAME] [--only NAME ...]    names the texts that differ; exit status 1 if any does

In: programs, none of which runs. Out: texts by program, in the order in which they are launched. Nothing is built.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchsmith
from torchsmith import pipeline
from torchsmith.codes import Unsupported
from torchsmith.runtime import cache

if not __package__:
    sys.path.insert(0, str(Path(__file__).parent))
import models

Program = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
BATCHES = (1, 8)


class Enough(Exception):
    """The texts are there."""


def _seen(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _attention(causal: bool) -> Callable[..., Any]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def small_programs() -> dict[str, Callable[[], Program]]:
    """One program for each template and loop order, in the dtypes and sizes that change its text."""
    out: dict[str, Callable[[], Program]] = {}
    layers, convs = (lambda: nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 10))), (
        lambda: nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 48, 3, padding=1)))  # fmt: skip

    def add(name: str, make: Callable[[], Callable[..., Any]], *args: Any, **compiled: Any) -> None:
        out[name] = lambda: (make(), args, compiled)

    for d in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        n = str(d)[6:]
        add(f"linear-{n}", lambda d=d: layers().to(d), _seen(37, 96, dtype=d))
        add(f"matmul-{n}", lambda: lambda a, b: a @ b, _seen(3, 40, 64, dtype=d), _seen(3, 64, 50, dtype=d))
        add(f"one-row-{n}", lambda d=d: nn.Linear(256, 300).to(d), _seen(1, 256, dtype=d))
        add(f"conv-{n}", lambda d=d: convs().to(d), _seen(2, 3, 45, 45, dtype=d))
        add(f"grouped-{n}", lambda d=d: nn.Conv2d(64, 64, 3, padding=1, groups=8).to(d), _seen(2, 64, 20, 20, dtype=d))
        add(f"depthwise-{n}", lambda d=d: nn.Conv2d(48, 48, 5, padding=2, groups=48).to(d), _seen(2, 48, 20, 20, dtype=d))
        add(f"transposed-{n}", lambda d=d: nn.ConvTranspose2d(24, 16, 4, 2, 1).to(d), _seen(2, 24, 11, 11, dtype=d))
        add(f"attention-{n}", lambda: _attention(True), *(_seen(2, 4, 70, 32, dtype=d) for _ in range(3)))
        add(f"attention-few-{n}", lambda: _attention(False), _seen(2, 4, 1, 32, dtype=d), *(_seen(2, 4, 90, 32, dtype=d) for _ in range(2)))
        add(f"softmax-{n}", lambda: lambda x: F.softmax(x.exp() + 1, -1).sum(1), _seen(6, 40, 130, dtype=d))
        add(f"norm-{n}", lambda d=d: nn.LayerNorm(100).to(d), _seen(50, 100, dtype=d))
    add("linear-dynamic", layers, _seen(37, 96), dynamic=True)
    add("conv-dynamic", convs, _seen(2, 3, 45, 45), dynamic=True)
    add("attention-dynamic", lambda: _attention(True), *(_seen(2, 4, 70, 32) for _ in range(3)), dynamic=True)
    add("few-columns", lambda: nn.Linear(700, 3), _seen(64, 700))
    add("conv3d", lambda: nn.Conv3d(8, 16, 3, padding=1), _seen(1, 8, 6, 7, 8))
    add("lstm", lambda: nn.LSTM(20, 32, batch_first=True), _seen(2, 7, 20))
    add("gru", lambda: nn.GRU(20, 32, bidirectional=True), _seen(7, 2, 20))
    add("group-norm", lambda: nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU()), _seen(4, 32, 14, 14))
    add("pool", lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)), _seen(2, 16, 40, 40))
    few, many = torch.zeros(20, 5, dtype=torch.int64), (_seen(70, 90), _seen(70, 90))
    add("scan-sort", lambda: lambda x, i: (x.cumsum(1), x.sort(-1)[0], x.gather(1, i), x.argmax(0)), _seen(20, 30), few)
    add("pointwise", lambda: lambda x, y: (torch.sin(x) * y + x.tanh(), (x > y).sum(), x.t().contiguous() / 3), *many)
    whole = (few.new_zeros(24, 24, dtype=torch.int32), few.new_zeros(24, 24, dtype=torch.int32))
    add("integers", lambda: lambda x, y: ((x @ y) // 3, x.cumsum(0), (x << 2) ^ 5), *whole)
    add("scatter", lambda: lambda x, i, v: x.index_add(0, i, v), _seen(30, 8), torch.zeros(9, dtype=torch.int64), _seen(9, 8))
    return out


def model_program(name: str, batch: int, dtype: torch.dtype) -> Program:
    """A model with the weights it was born with: texts do not depend on values."""
    torch.manual_seed(models.SEED)
    model = (models.FACTORIES[name]() if name in models.FACTORIES else models._vision(name)).eval().to(dtype)
    return model, tuple(x.to(dtype) if x.is_floating_point() else x for x in models.inputs_of(name, batch)), {}


def every_program() -> dict[str, Callable[[], Program]]:
    """Small programs, the ten models and five others at two batch sizes, and some in bfloat16."""
    out = small_programs()
    for name in (*models.MODELS, *models.OUTSIDE):
        for batch in BATCHES if name in ("resnet18", "mobilenet_v2", "timm_vision_transformer") else BATCHES[:1]:
            out[f"{name}-{batch}"] = lambda name=name, batch=batch: model_program(name, batch, torch.float32)
    for name in ("resnet18", "BERT_pytorch", "resnext50_32x4d"):
        out[f"{name}-bfloat16"] = lambda name=name: model_program(name, 1, torch.bfloat16)
    return out


@contextmanager
def texts_only(into: list[str]) -> Any:
    """Every graph compiled inside gives its texts, and stops."""
    graphs: set[tuple[str, ...]] = set()
    emit, find, run = pipeline.emit, cache.find, pipeline.run_captured

    def kept(plan: Any, options: Any) -> Any:
        source = emit(plan, options)
        if source.kernels not in graphs:  # a frame that stopped is tried again from inside
            graphs.add(source.kernels)
            into.extend(source.kernels)
        raise Unsupported("EMI001", detail="only its text is wanted")

    def captured(gm: Any, *rest: Any) -> Any:
        made = run(gm, *rest)
        return replace(made, call=stop)

    def stop(*inputs: Any) -> Any:
        raise Enough

    pipeline.emit, cache.find, pipeline.run_captured = kept, lambda *_: None, captured
    try:
        yield
    finally:
        pipeline.emit, cache.find, pipeline.run_captured = emit, find, run


def texts_of(make: Callable[[], Program], cpu: str | None) -> list[str]:
    fn, args, compiled = make()
    out: list[str] = []
    options = {"freezing": True, **({"cpu": cpu} if cpu else {})}
    if isinstance(fn, nn.Module):
        fn = fn.eval()
    with texts_only(out), torch.no_grad(), suppress(Enough):
        torchsmith.compile(fn, options=options, **compiled)(*args)
    torchsmith.compiler.reset()
    if not out:
        raise RuntimeError("a program has no text: did it fail?")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--cpu", help="processor target, such as x86-64-v3")
    parser.add_argument("--only", nargs="*", default=[], help="programs whose names begin so")
    parser.add_argument("--show", type=int, default=12, help="lines of a difference that are printed")
    chosen = parser.parse_args()
    before = json.loads(chosen.file.read_text()) if chosen.what == "compare" else {}
    made: dict[str, list[str]] = {}
    different, started = 0, time.perf_counter()
    for name, make in every_program().items():
        if chosen.only and not name.startswith(tuple(chosen.only)):
            continue
        made[name] = texts_of(make, chosen.cpu)
        if chosen.what == "compare" and name in before and made[name] != before[name]:
            different += 1
            print(f"{name}: {len(before[name])} kernels, now {len(made[name])}", flush=True)
            pairs = [(a, b) for a, b in zip(before[name], made[name], strict=False) if a != b]
            for a, b in pairs[:1]:
                print("\n".join(list(difflib.unified_diff(a.splitlines(), b.splitlines(), lineterm="", n=0))[: chosen.show]), flush=True)
    texts = [t for group in made.values() for t in group]
    print(f"{len(made)} programs, {len(texts)} texts, {hashlib.sha256(repr(texts).encode()).hexdigest()[:16]}, "
          f"{different} differ, {time.perf_counter() - started:.0f} s")  # fmt: skip
    if chosen.what == "write":
        chosen.file.write_text(json.dumps(made))
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
