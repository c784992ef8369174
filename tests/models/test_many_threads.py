"""Eight Python threads compile and call at once: first calls, guards that fail meanwhile, weights that change."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

import torchsmith

THREADS = 8


def net(width: int) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Flatten(2), nn.Linear(64, 8), nn.LayerNorm(8)).eval()


def together(work: Callable[[int], None]) -> None:
    """work(0) .. work(7) in threads that start at once; what one raises is raised here."""
    gate, failures = threading.Barrier(THREADS), []

    def run(i: int) -> None:
        try:
            gate.wait(60)
            with torch.no_grad():
                work(i)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(240)
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    if failures:
        raise failures[0]


def check(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(call(x), model(x))


def test_first_calls_of_one_and_of_several_models() -> None:
    shared, own = net(16), [net(8 + i) for i in range(THREADS)]
    compiled, each = torchsmith.compile(shared), [torchsmith.compile(m) for m in own]

    def work(i: int) -> None:
        for turn in range(6):
            batch = 1 + (i + turn) % 3  # guards fail in one thread while others run
            x = torch.randn(batch, 3, 8, 8)
            check(compiled, shared, x)
            check(each[i], own[i], x)
            check(each[(i + turn) % THREADS], own[(i + turn) % THREADS], x)

    together(work)


def test_weights_that_change_while_others_call() -> None:
    """Each thread's own model shares the graph with all others; packing anew in one leaves the others' results alone."""
    models = [net(16) for _ in range(THREADS)]
    calls = [torchsmith.compile(m) for m in models]

    def work(i: int) -> None:
        for turn in range(10):
            models[i][0].weight.mul_(0.5 + 0.1 * ((i + turn) % 9))
            check(calls[i], models[i], torch.randn(2, 3, 8, 8))

    together(work)
