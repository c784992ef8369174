"""Eight Python threads compile and call at once: first calls, guards that fail meanwhile, weights that change, a fork."""

from __future__ import annotations

import os
import signal
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
            gate.wait(1200)
            with torch.no_grad():
                work(i)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(1200)
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


def test_a_child_of_fork_while_others_compile() -> None:
    """The child has one thread and holds none of the others' locks: it calls what is compiled, and compiles. Nets are made before: torch's
    generator has a lock of its own, which a fork may catch."""
    model, other, nets = net(16), net(24), [net(30 + i) for i in range(THREADS)]
    compiled, x = torchsmith.compile(model), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        want, wanted = model(x), other(x)
        compiled(x)
    codes: list[int] = []

    def child() -> None:
        code = 1
        try:
            torch.set_num_threads(1)  # the parent's OpenMP pool is not the child's
            signal.alarm(1200)  # a child that hangs is killed, and its code is the signal
            torch.testing.assert_close(compiled(x), want)
            torch.testing.assert_close(torchsmith.compile(other)(x), wanted)
            code = 0
        finally:
            os._exit(code)

    def work(i: int) -> None:
        if i == 0:
            for _ in range(3):
                pid = os.fork()
                if pid == 0:
                    child()
                codes.append(os.waitpid(pid, 0)[1])
            return
        check(torchsmith.compile(nets[i]), nets[i], x)  # holds the locks of compiling while the first thread forks
        for _ in range(100):
            check(compiled, model, x)

    together(work)
    assert codes == [0, 0, 0]
