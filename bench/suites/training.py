"""Training steps at batch 8: eager, torch.compile's best, ours around the model only and around the whole step; ms and peak bytes.

All columns of a row share one model and one optimizer, so each continues where the last one stopped. A step is forward, loss, backward(),
optimizer.step(), zero_grad(). Peak: the most resident memory during one step above that before it, after all idle memory was given back.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paired import Protocol, burst, calls_per_burst, geomean, is_noisy, pairing

from models import MODELS

from .harness import Row, child, load_rows, protocol_of, save

BATCH = 8
SMALL = ("mlp3", "transformer", "lstm")
BARS = {"mlp3": 3.0, "transformer": 3.0, "lstm": 1.0}  # whole step over eager; the ten: 0.95 each, 1.2 in geomean
ONE, MEAN, PEER = 0.95, 1.2, 1.15
EAGER, THEIRS, THEIR_STEP, OURS, STEP = "eager", "torch.compile", "torch.compile + step", "ours", "ours, whole step"
COLUMNS = (EAGER, THEIRS, THEIR_STEP, OURS, STEP)
NOTE = (
    "Milliseconds of one training step (median of interleaved bursts) and its peak memory above what was resident before it, in MB. "
    "`torch.compile`: the model compiled; `+ step`: also optimizer.step. Ratios: eager's (the better torch.compile's) time over our "
    "whole step, bootstrap 95 % interval; above 1 ours is faster. first s: wall seconds of the first call. "
    "The ten: SGD with momentum, batch 8; mlp3, transformer (width 128, batch 32) and lstm: AdamW."
)


def make_case(name: str) -> tuple[Any, Any, tuple[Any, ...], Any]:
    """(model in train mode, optimizer, batch, loss of a batch): all seeded."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from models import inputs_of, make_model

    torch.manual_seed(0)
    if name in MODELS:
        model, (x,) = make_model(name).train(), inputs_of(name, BATCH)
        target = torch.randint(0, 700, (BATCH,))

        def loss_of(m: Any, x: Any, y: Any) -> Any:
            out = m(x)
            if isinstance(out, torch.Tensor):
                return F.cross_entropy(out, y)
            return F.cross_entropy(out.pooler_output, y) + out.last_hidden_state.square().mean()

        return model, torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9), (x, target), loss_of
    if name == "mlp3":
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
        model, x, target = nn.Sequential(*layers), torch.randn(32, 64), torch.randint(0, 10, (32,))
    elif name == "transformer":
        model, x, target = _transformer(), torch.randint(0, 64, (32, 32)), torch.randint(0, 64, (32 * 32,))
    else:
        model, x, target = _lstm(), torch.randint(0, 500, (32, 50)), torch.randint(0, 4, (32,))

    def loss(m: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(m(x), y)

    return model, torch.optim.AdamW(model.parameters(), lr=1e-5), (x, target), loss


def _transformer() -> Any:
    """Two blocks of width 128 over characters; logits (batch * length, 64)."""
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.LayerNorm(128), nn.LayerNorm(128)
            self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)
            self.feed = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

        def forward(self, x: Any) -> Any:
            b, t, w = x.shape
            q, k, v = (y.view(b, t, 4, w // 4).transpose(1, 2) for y in self.qkv(self.one(x)).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w))
            return x + self.feed(self.two(x))

    return nn.Sequential(nn.Embedding(64, 128), Block(), Block(), nn.LayerNorm(128), nn.Linear(128, 64), nn.Flatten(0, 1))


def _lstm() -> Any:
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Embedding(500, 64), nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 4)

        def forward(self, x: Any) -> Any:
            return self.head(self.lstm(self.embed(x))[0][:, -1])

    return Classifier()


def runners(name: str, columns: list[str]) -> tuple[Any, dict[str, Callable[[], Any]]]:
    """The model that all share, and per column a call that takes one step and returns its loss."""
    import torch

    import torchsmith

    model, optimizer, batch, loss_of = make_case(name)

    def step(m: Any, o: Any, x: Any, y: Any) -> Any:
        loss = loss_of(m, x, y)
        loss.backward()
        o.step()
        o.zero_grad()
        return loss.detach()

    def around(m: Any, update: Any) -> Callable[[], Any]:
        def run() -> Any:
            loss = loss_of(m, *batch)
            loss.backward()
            update()
            optimizer.zero_grad()
            return loss.detach()

        return run

    made: dict[str, Callable[[], Any]] = {EAGER: lambda: step(model, optimizer, *batch)}
    if OURS in columns:
        made[OURS] = around(torchsmith.compile(model), optimizer.step)
    if STEP in columns:
        whole = torchsmith.compile(step)
        made[STEP] = lambda: whole(model, optimizer, *batch)
    if THEIRS in columns or THEIR_STEP in columns:
        compiled = torch.compile(model)
        made[THEIRS] = around(compiled, optimizer.step)
        made[THEIR_STEP] = around(compiled, torch.compile(optimizer.step))
    return model, {c: made[c] for c in COLUMNS if c in columns}


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes that one call adds to what is resident, at the most."""
    from torchsmith.runtime import _native

    gc.collect()
    _native.workspace_trim()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    run()
    return max(0, resident("VmHWM") - before)


def run_case(case: dict[str, Any]) -> Row:
    import torch

    protocol = Protocol(**case["protocol"])
    row: Row = {"model": case["model"], "first_s": {}, "loss": {}, "failed": {}, "peak": {}, "ms": {}}
    model, found = runners(case["model"], case["columns"])
    start = {k: v.clone() for k, v in model.state_dict().items()}
    for name, run in list(found.items()):
        model.load_state_dict(start)  # every column's first loss is of the same weights and draws
        torch.manual_seed(1)
        began = time.perf_counter()
        try:
            row["loss"][name] = float(run())
            row["first_s"][name] = round(time.perf_counter() - began, 2)
            run()  # the second call of a lazy optimizer may compile once more
            run()
        except Exception as e:  # a column that cannot take a model is a cell of the table
            row["failed"][name] = f"{type(e).__name__}: {str(e)[:200]}"
            del found[name]
    counts = {name: calls_per_burst(run, protocol) for name, run in found.items()}
    times: dict[str, list[float]] = {name: [] for name in found}
    again: list[float] = []
    last = list(found)[-1]
    for _ in range(protocol.pairs):
        for name in (*found, *reversed(found)):
            times[name].append(burst(found[name], counts[name], protocol))
        again.append(burst(found[last], counts[last], protocol))
    row["ms"] = {name: sorted(t)[len(t) // 2] * 1e3 for name, t in times.items()}
    control = pairing(times[last][1::2], again)
    row["control"], row["noisy"] = control.as_dict(), is_noisy(control)
    row["ratio"] = {name: pairing(times[last], t).as_dict() for name, t in times.items() if name != last}
    row["peak"] = {name: peak_of(run) for name, run in found.items()}
    return row


def suite(args: argparse.Namespace) -> list[Row]:
    rows = load_rows(args.out, "training") if args.resume else []
    columns = [c for c in COLUMNS if not c.startswith("torch.compile") or "torch.compile" in args.peers]
    for model in (*args.models, *(m for m in SMALL if args.models == list(MODELS))):
        if any(r["model"] == model for r in rows):
            continue
        protocol = protocol_of(args)
        if not args.quick and model not in SMALL:
            protocol["pairs"] = min(protocol["pairs"], 12)  # a step lasts seconds
        row = {"model": model} | child({"suite": "training", "model": model, "columns": columns, "protocol": protocol})
        rows.append(row)
        print(table([row]).split("\n")[2], flush=True)
        save(args.out, "training", rows, table(rows), NOTE)
    return rows


def _best(r: Row) -> dict[str, Any] | None:
    """The faster torch.compile."""
    found = [r["ratio"][c] for c in (THEIRS, THEIR_STEP) if c in r.get("ratio", {})]
    return min(found, key=lambda m: float(m["ratio"])) if found else None


def _interval(m: dict[str, Any] | None) -> str:
    return f"{m['ratio']:.2f} [{m['low']:.2f}, {m['high']:.2f}]" if m else "-"


def _cell(r: Row, column: str) -> str:
    if column in r.get("failed", {}):
        return "failed"
    if column not in r["ms"]:
        return "-"
    return f"{r['ms'][column]:.3g} / {r['peak'][column] / 1e6:.0f} / {r['first_s'][column]:.1f}"


def table(rows: list[Row]) -> str:
    titles = ["model", *(f"{c}: ms / MB / first s" for c in COLUMNS), "over eager [95 %]", "over torch.compile [95 %]", "loss moved", "A/A"]
    out = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for r in rows:
        if "ms" not in r or STEP not in r["ms"] or EAGER not in r["ms"]:
            out.append(f"| {r['model']} | failed: {(r.get('error') or str(r.get('failed', '')))[-300:]} |")
            continue
        moved = max(abs(v - r["loss"][EAGER]) / abs(r["loss"][EAGER]) for v in r["loss"].values())
        control = f"{r['control']['ratio']:.3f}{' too noisy' if r['noisy'] else ''}"
        ratios = [_interval(r["ratio"].get(EAGER)), _interval(_best(r))]
        out.append("| " + " | ".join([r["model"], *(_cell(r, c) for c in COLUMNS), *ratios, f"{moved:.1e}", control]) + " |")
    return "\n".join([*out, "", *verdict(rows)])


def verdict(rows: list[Row]) -> list[str]:
    """The bars: speed of the whole step in geomean and in each row, and memory in each row."""
    out = []
    ten = [r for r in rows if r["model"] in MODELS and EAGER in r.get("ratio", {})]
    if ten:
        mean = geomean([r["ratio"][EAGER]["ratio"] for r in ten])
        out.append(f"- whole step over eager, geomean of {len(ten)}: {mean:.2f} (bar {MEAN})")
        out += [f"  - below {ONE}: {r['model']} {r['ratio'][EAGER]['ratio']:.2f}" for r in ten if r["ratio"][EAGER]["ratio"] < ONE]
        alone = [r["ms"][EAGER] / r["ms"][OURS] for r in ten if OURS in r["ms"]]
        out.append(f"- model only over eager, geomean of {len(alone)}: {geomean(alone):.2f}")
        best = [m["ratio"] for r in ten if (m := _best(r))]
        if best:
            out.append(f"- whole step over the better torch.compile, geomean of {len(best)}: {geomean(best):.2f} (bar {PEER})")
    for r in rows:
        if r["model"] in BARS and EAGER in r.get("ratio", {}):
            out.append(f"- {r['model']}: {r['ratio'][EAGER]['ratio']:.2f} x eager (bar {BARS[r['model']]})")
    fat = [(r["model"], r["peak"][STEP] / max(1, r["peak"][EAGER])) for r in rows if STEP in r.get("peak", {}) and EAGER in r["peak"]]
    out += [f"- peak memory above eager's: {name} {ratio:.2f}" for name, ratio in fat if ratio > 1]
    return out
