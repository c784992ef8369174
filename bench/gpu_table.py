"""bench/results/gpu.md from the rows that bench/gpu.py wrote.

In: files gpu_SECTION.json. Out: one file of all rows, and its tables with geomeans.

    python bench/gpu_table.py OUT/gpu_*.json --about "date: ..." --about "hardware: ..." [--write bench/results/gpu]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def number(value: Any, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def models(rows: list[Row]) -> str:
    found = {r["what"]: r for r in rows if r["section"] == "models" and "failed" not in r}
    lines, ratios = [], []
    for what, ours in found.items():
        peer = found.get(f"{what} peer")
        if peer is None:
            continue
        ratios.append(peer["ratio"])
        name, batch = what.rsplit(" ", 1)
        lines.append([
            name, batch, number(peer["ms"], 3), number(ours["eager_ms"]), number(peer["reduce_overhead_ms"], 3), number(peer["ratio"]),
            number(ours["host_us"], 0), number(ours["launches"]), number(ours["segments"]),
            f"{ours['error64'] / ours['eager_error64']:.2f}",
        ])  # fmt: skip
    heads = ["model", "batch", "ours ms", "eager ms", "reduce-overhead ms", "reduce-overhead / ours", "host us", "launches", "segments",
             "error / eager's error"]  # fmt: skip
    if not lines:
        return ""
    mean = statistics.geometric_mean(ratios)
    return (
        "## Models, float16, default mode\n\n"
        "Times of ours and of `reduce-overhead` in one process, in turn; errors are against float64.\n\n"
        f"{table(heads, lines)}\n\ngeomean of reduce-overhead / ours: {mean:.2f} over {len(ratios)} rows, least {min(ratios):.2f}\n"
    )


def bandwidth(rows: list[Row]) -> str:
    found = [r for r in rows if r["section"] == "bandwidth" and "share" in r]
    heads = ["kernel and shape", "us", "eager us", "torch.compile us", "share of copy", "torch.compile / ours"]
    lines = [
        [r["what"], *(number(r.get(k), 1) for k in ("us", "eager_us", "compile_us")), number(r["share"]), number(r.get("ahead"))]
        for r in found
    ]
    met = sum(r["share"] >= 0.9 or r.get("ahead", 0) >= 1.05 for r in found)
    return (
        "## Eight bandwidth kernels, float16: share of a copy's bandwidth, call included\n\n"
        f"{table(heads, lines)}\n\nat least 90 % of a copy's bandwidth, or 5 % ahead of torch.compile: {met} of {len(found)}\n"
    ) if found else ""  # fmt: skip


def training(rows: list[Row]) -> str:
    found = [r for r in rows if r["section"] == "training" and "failed" not in r]
    keys = {
        "ms": "ours ms", "our_model_ms": "backward outside ms", "eager_ms": "eager ms", "peer_ms": "torch.compile's best ms",
        "ratio": "eager / ours",
        "peer_ratio": "torch.compile / ours", "graphs": "graphs", "segments": "segments",
    }  # fmt: skip
    heads = ["model", *keys.values(), "loss's distance"]
    lines = [[r["what"], *(number(r.get(k)) for k in keys), f"{r['error']:.1e}"] for r in found]
    ratios = [r["peer_ratio"] for r in found if r.get("peer_ratio")]
    end = f"\ngeomean of torch.compile / ours: {statistics.geometric_mean(ratios):.2f} over {len(ratios)} rows\n" if ratios else ""
    return f"## Training: whole steps, batch 16, TF32, SGD with momentum\n\n{table(heads, lines)}\n{end}" if found else ""


def rest(rows: list[Row]) -> str:
    """What has no table of its own, a line each."""
    lines = []
    for r in rows:
        if r["section"] in ("models", "bandwidth", "training") and "failed" not in r:
            continue
        own = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in r.items() if k not in ("section", "what") and v != []}
        lines.append(f"- {r['section']}, {r['what']}: {', '.join(f'{k} {v}' for k, v in own.items())}")
    return "## More\n\n" + "\n".join(lines) + "\n" if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--about", action="append", default=[])
    parser.add_argument("--write", type=Path, help="the path without its ending; else the tables are printed")
    args = parser.parse_args()
    rows = [row for file in args.files for row in json.loads(file.read_text())]
    about = "".join(f"- {line}\n" for line in args.about)
    parts = [f"# bench/gpu.py\n\n{about}", models(rows), bandwidth(rows), training(rows), rest(rows)]
    text = "\n".join(p for p in parts if p)
    if args.write is None:
        print(text)
        return
    args.write.with_suffix(".md").write_text(text)
    args.write.with_suffix(".json").write_text(json.dumps({"about": args.about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
