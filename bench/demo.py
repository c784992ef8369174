"""What `make demo` shows: real models, compiled; how right, how soon, how fast.

In: nothing. Out: a table on stdout: error against eager, seconds of the first call, ms per call eager and compiled. These are quick
figures of one run on this machine; `python bench/run.py --suite seeds` is the careful measurement.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from paired import Protocol, compare

import torchsmith
from models import inputs_of, make_model, worst_error

SHOWN = ("resnet18", "resnet50", "mobilenet_v2", "squeezenet1_1", "BERT_pytorch", "timm_vision_transformer")
PROTOCOL = Protocol(pairs=6, burst_s=0.05, idle_s=0.05)
LIMIT = 1e-4


def show(name: str) -> bool:
    """One line of the table; is the result right?"""
    model, inputs = make_model(name), inputs_of(name)
    compiled: Any = torchsmith.compile(model)
    with torch.inference_mode():
        want = model(*inputs)
        began = time.perf_counter()
        got = compiled(*inputs)
        seconds = time.perf_counter() - began
        error = worst_error(want, got)
        e = torchsmith.explain(model)(*inputs)
        speed = compare(lambda: compiled(*inputs), lambda: model(*inputs), PROTOCOL)
    fine = error <= LIMIT
    cells = [f"{name:24}", f"{error:9.1e}", "yes" if fine else "NO ", f"{seconds:9.2f}", f"{speed.b_ms:9.2f}", f"{speed.a_ms:11.2f}"]
    cells += [f"{speed.ratio:7.2f}x", f"{e.graph_count:6}", f"{e.graph_break_count:6}", f"{e.kernel_count:7}", f"{len(e.extern_calls):12}"]
    print("  ".join(cells), flush=True)
    return fine


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, batch 1, inference mode")
    print(f"{'model':24}      error  ok   compile s  eager ms  compiled ms  speed-up  graphs  breaks  kernels  extern calls")
    fine = [show(name) for name in SHOWN]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
