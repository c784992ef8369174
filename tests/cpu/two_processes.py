"""What one of two gloo processes does for test_distributed.py: training of wrapped compiled modules beside eager, and a collective.

    python two_processes.py RANK FILE        # FILE: where the two meet; prints one JSON object, case -> its codes of breaks
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchsmith
from torchsmith.events import recording


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def sharded(model: nn.Module) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (2,))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def with_compiled_body(model: Any) -> nn.Module:
    model.body = torchsmith.compile(model.body)
    return model


CASES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {  # (eager's, ours)
    "compiled inside of DDP": (DistributedDataParallel, lambda m: DistributedDataParallel(torchsmith.compile(m))),
    "DDP compiled": (DistributedDataParallel, lambda m: torchsmith.compile(DistributedDataParallel(m))),
    "compiled, then sharded": (sharded, lambda m: sharded(with_compiled_body(m))),
    "sharded, then compiled": (sharded, lambda m: torchsmith.compile(sharded(m))),
}


def whole(t: Tensor | None) -> Tensor | None:
    return t.full_tensor() if isinstance(t, DTensor) else t


def train(name: str, rank: int) -> list[str]:
    torch.manual_seed(0)
    base, data = Net(), torch.randn(3, 2, 5, 4)
    models = [make(copy.deepcopy(base)) for make in CASES[name]]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in models]
    codes: list[str] = []
    for step, batch in enumerate(data):
        seen = []
        for model, optimizer in zip(models, optimizers, strict=True):
            with recording() as got:
                optimizer.zero_grad()
                model(batch[rank]).square().mean().backward()
            optimizer.step()
            seen.append([whole(p.grad) for p in model.parameters()] + [whole(p.detach()) for p in model.parameters()])
            codes += [str(e.fields["code"]) for e in got if e.kind in ("graph_break", "fallback")]
            if model is models[1] and step == 0:
                assert any(e.kind == "graph" and e.fields["report"].road == "native" for e in got), "nothing was compiled"
        torch.testing.assert_close(seen[1], seen[0])
    return codes


def collective(rank: int) -> list[str]:
    def mean(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y.sin() + 1

    compiled = torchsmith.compile(mean)
    with recording() as got:
        for k in range(3):  # a collective that ran while capturing only would leave the later calls without it
            x = torch.arange(4.0) + rank + k
            torch.testing.assert_close(compiled(x), mean(x))
    return [str(e.fields["code"]) for e in got if e.kind in ("graph_break", "fallback")]


if __name__ == "__main__":
    rank, place = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    print(json.dumps({**{name: train(name, rank) for name in CASES}, "collective": collective(rank)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
