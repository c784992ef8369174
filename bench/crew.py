"""Environments of processes that work side by side.

In: the device of their tensors, how many they are. Out: one environment each: one thread, and the GPUs in turn.
"""

from __future__ import annotations

import os


def environments(device: str, count: int, threads: int = 1) -> list[dict[str, str]]:
    import torch

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    few = dict.fromkeys(("OMP_NUM_THREADS", "TORCHSMITH_COMPILE_THREADS"), str(threads))
    return [{**os.environ, **few, **({"CUDA_VISIBLE_DEVICES": str(k % gpus)} if gpus > 1 else {})} for k in range(count)]
