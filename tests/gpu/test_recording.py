"""Segments: launched one by one, recorded at the second sighting, replayed with the addresses and sizes of each call."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pretend import calls, compile_images, pretending

import torchsmith
from torchsmith.compiler import reset
from torchsmith.runtime import _native
from torchsmith.runtime.images import IMAGE_COMPILERS


@pytest.fixture
def fake() -> Iterator[ctypes.CDLL]:
    reset()
    with pretending() as driver:
        yield driver
    reset()


def compiled(fn: Any, **more: Any) -> Any:
    return torchsmith.compile(fn, options={"force_disable_caches": True}, **more)


def three(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Three kernels: sums of rows between loops."""
    a = torch.softmax(x + y, 1)
    b = (a * y).sum(0)
    return a - b.cumsum(0), b.sin()


def test_one_kernel_is_a_record_for_all_sizes(fake: ctypes.CDLL) -> None:
    """A graph of one kernel is launched in less time than a kernel. Two streams have one each; a third one does not wait for them."""
    f, kept = compiled(lambda x: torch.sin(torch.cos(x)), dynamic=True), []
    streams = [None, fake.fake_stream(0), fake.fake_stream(0)]
    try:
        for i in range(6):
            for n in (3, 5, 2, 5):
                fake.fake_set_stream(streams[i // 2])
                x = torch.randn(n, 7)
                kept.append((f(x), torch.sin(torch.cos(x))))
    finally:
        fake.fake_set_stream(None)
    for got, expected in kept:
        torch.testing.assert_close(got, expected)
    assert calls("cuGraphInstantiate") == 2
    assert (calls("cuGraphLaunch"), calls("cuLaunchKernel")) == (4 * 2 - 1 + 4 * 2, 1 + 4 * 2)


def test_a_kernel_of_a_hundred_tensors(fake: ctypes.CDLL) -> None:
    """As gradients have them that meet in one kernel; on a device 4 KB of parameters are allowed."""
    tensors = [torch.randn(3) for _ in range(99)]
    f = compiled(lambda *xs: [x.sin() for x in xs])
    for _ in range(3):
        torch.testing.assert_close(f(*tensors), [x.sin() for x in tensors])
    assert 0 < fake.fake_calls(b"cuLibraryLoadData") < 4


def test_recorded_at_second_sighting(fake: ctypes.CDLL) -> None:
    f = compiled(three)
    kept = []
    for i in range(6):
        x, y = torch.randn(6, 8), torch.randn(6, 8)
        kept.append((f(x, y), three(x, y)))
        assert calls("cuGraphLaunch") == i
    assert calls("cuGraphInstantiate") == 1
    for got, expected in kept:  # results belong to the caller for ever
        torch.testing.assert_close(got, expected)


def test_sizes_that_vary_share_records(fake: ctypes.CDLL) -> None:
    """Every call after the first is one launch, whatever its sizes; at most eight records are kept."""
    f = compiled(three, dynamic=True)
    sizes = [2, 3, 5, 2, 3, 5, 2, 9, 10, 11, 12, 13, 14, 15, 9, 10, 11, 12, 13, 14, 15, 4, 4]
    for n in sizes:
        x, y = torch.randn(n, 8), torch.randn(n, 8)
        for got, expected in zip(f(x, y), three(x, y), strict=True):
            torch.testing.assert_close(got, expected)
    assert calls("cuGraphLaunch") == len(sizes) - 1
    assert calls("cuGraphInstantiate") <= 8


def test_kernels_begin_before_the_end_of_the_one_before(fake: ctypes.CDLL) -> None:
    """Those that wait first: all but the first of a run of launches, in records, between library calls and one by one."""
    f, x, y = compiled(three), torch.randn(6, 8), torch.randn(6, 8)
    for _ in range(3):
        torch.testing.assert_close(f(x, y), three(x, y))
    assert calls("cuLaunchKernelEx") == 2 and calls("cuGraphAddDependencies") == 2
    model = torch.nn.Sequential(*(m for _ in range(3) for m in (torch.nn.Linear(8, 8), torch.nn.Softmax(1)))).eval()
    with torch.no_grad():
        g = compiled(model)
        for k in range(3):
            torch.testing.assert_close(g(x), model(x))
            assert calls("cuLaunchKernelEx") == 2 + 3 * (k > 0)  # after a library's call in what is captured
    assert calls("refused") == 0


def test_kernels_that_do_not_wait(fake: ctypes.CDLL) -> None:
    """Those of older architectures, and all where the driver refuses: launched behind each other, and recorded all the same."""
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    old = patch.dict(IMAGE_COMPILERS, {"triton": lambda texts, arch, options: compile_images(texts, 80, options)})
    for fails in ("", "cuLaunchKernelEx", "cuGraphAddDependencies"):
        fake.fake_reset()
        with ExitStack() as stack:
            if fails:
                fake.fake_fail(fails.encode(), 1, 801)
            else:
                stack.enter_context(old)
            f = compiled(three)
            for _ in range(4):
                torch.testing.assert_close(f(x, y), three(x, y))
        assert calls("refused") == 0 and calls("cuLaunchKernelEx") == {"": 0, "cuLaunchKernelEx": 1}.get(fails, 2)
        assert calls("cuGraphAddDependencies") == (fails == "cuGraphAddDependencies") and calls("cuGraphLaunch") == 3


def test_a_kernel_that_is_left_out_is_no_early_one(fake: ctypes.CDLL) -> None:
    """Behind what has no elements a kernel waits for the end of all before: that node does not wait for anything itself."""

    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *three(x, y), torch.softmax(y[:0], 1)

    f = compiled(both, dynamic=True)
    for n in (6, 6, 0, 6, 0, 0, 5, 0, 5):
        x, y = torch.randn(n, 8), torch.randn(n, 8)
        torch.testing.assert_close(f(x, y), both(x, y))
    assert calls("refused") == 0 and calls("cuGraphAddDependencies") > 0


def test_inputs_that_are_written(fake: ctypes.CDLL) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one, two = three(x, y)
        y.add_(two.cumsum(0))
        return one * 2

    f = compiled(step)
    for _ in range(4):
        x, y = torch.randn(6, 8), torch.randn(6, 8)
        y2 = y.clone()
        version = y._version
        got, expected = f(x, y), step(x, y2)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(y, y2)
        assert y._version == version + 1
    assert calls("cuGraphLaunch") >= 2


def test_streams_have_records_and_workspaces_of_their_own(fake: ctypes.CDLL) -> None:
    f = compiled(three)
    streams = [fake.fake_stream(0), fake.fake_stream(0)]
    try:
        for _ in range(3):
            for s in streams:
                fake.fake_set_stream(s)
                x, y = torch.randn(6, 8), torch.randn(6, 8)
                for got, expected in zip(f(x, y), three(x, y), strict=True):
                    torch.testing.assert_close(got, expected)
    finally:
        fake.fake_set_stream(None)
    assert calls("cuGraphInstantiate") == 2


def test_a_stream_that_the_caller_captures(fake: ctypes.CDLL) -> None:
    """Launches go into the caller's graph one by one, and what they use stays theirs."""
    f = compiled(three)
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    for _ in range(3):
        f(x, y)
    stream = fake.fake_stream(0)
    before, plain = calls("cuGraphLaunch"), calls("cuLaunchKernel")
    fake.fake_set_stream(stream)
    try:
        fake.fake_begin_capture(stream)
        f(x, y)
        fake.fake_end_capture(stream)
    finally:
        fake.fake_set_stream(None)
    assert calls("cuGraphLaunch") == before and calls("cuLaunchKernel") == plain + 3


@pytest.mark.parametrize("warm", [0, 3])
def test_the_callers_capture_is_not_disturbed(fake: ctypes.CDLL, warm: int) -> None:
    """As under torch.cuda.graph: nothing that waits, loads or allocates by itself, also in the first call of a graph."""
    model = torch.nn.Sequential(*(m for _ in range(3) for m in (torch.nn.Linear(8, 8), torch.nn.Softmax(1)))).eval()
    f, g = compiled(three), compiled(model)
    a, b = torch.randn(6, 8), torch.randn(6, 8)
    stream = fake.fake_stream(0)
    with torch.no_grad():
        for _ in range(warm):
            f(a, b), g(a)
        before = calls("cuLaunchKernel"), calls("addmm"), calls("cuGraphLaunch")
        fake.fake_set_stream(stream)
        fake.fake_begin_global_capture(stream)
        try:
            f(a, b), g(a)
        finally:
            fake.fake_end_global_capture(stream)
            fake.fake_set_stream(None)
        after = calls("cuLaunchKernel"), calls("addmm"), calls("cuGraphLaunch")
        assert [y - x for x, y in zip(before, after, strict=True)] == [3 + 3, 3, 0]  # a call that had failed would have run eagerly
        torch.testing.assert_close(f(a, b), three(a, b))
    assert fake.fake_depth() == 0


def test_a_driver_that_fails(fake: ctypes.CDLL) -> None:
    """A graph that cannot be made or changed is launched plainly; a launch that fails is repeated eagerly, and the next call is right."""
    f = compiled(three)
    for name, code in (("cuGraphInstantiate", 2), ("cuGraphExecKernelNodeSetParams", 1), ("cuLaunchKernel", 719), ("cuGraphLaunch", 2)):
        fake.fake_fail(name.encode(), 1, code)
        for _ in range(4):
            x, y = torch.randn(6, 8), torch.randn(6, 8)
            for got, expected in zip(f(x, y), three(x, y), strict=True):
                torch.testing.assert_close(got, expected)
    assert fake.fake_depth() == 0


def test_inputs_at_odd_addresses(fake: ctypes.CDLL) -> None:
    def scale(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.mul_(2)
        return x + y

    f = compiled(scale)
    room, other = torch.randn(41), torch.randn(41)
    for _ in range(3):
        x, y = room[1:].view(5, 8), other[3:35].view(8, 4).t()
        x = x[:, 1:5]
        x, y = x[:4], y[:, :4]
        want = y.clone()
        expected = scale(x, want)
        torch.testing.assert_close(f(x, y), expected)
        torch.testing.assert_close(y, want)
    assert calls("cuMemcpyDtoDAsync") > 0


def test_prepared_constants(fake: ctypes.CDLL) -> None:
    """Weights that prepare packs lie in device memory; a new value of a parameter prepares again."""
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.softmax(self.weight, 0)

    model = Model()
    f = compiled(model)
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(f(x), model(x))
        torch.testing.assert_close(f(x), model(x))
        early = model.weight.data
        f(x)
        for change in (lambda w: w.mul_(2), lambda w: w.data[3].add_(1), lambda _: early[5].sub_(1)):
            change(model.weight)
            torch.testing.assert_close(f(x), model(x))
    assert calls("cuEventRecord") == 4


def test_constants_at_odd_addresses(fake: ctypes.CDLL) -> None:
    """What prepare reads lies at multiples of 16 for its kernels; calls after that copy nothing."""
    model = torch.nn.Linear(8, 4, bias=False)
    model.weight = torch.nn.Parameter(torch.randn(33)[1:].view(4, 8))
    f, x = compiled(lambda x: x @ torch.softmax(model.weight, 0).t()), torch.randn(3, 8)
    with torch.no_grad():
        for k in range(4):
            torch.testing.assert_close(f(x), x @ torch.softmax(model.weight, 0).t())
            if k == 2:
                model.weight.mul_(2)
            assert calls("cuMemcpyDtoDAsync") == 1 + (k > 2)


def test_calls_that_cannot_begin(fake: ctypes.CDLL) -> None:
    """Constants that cannot be prepared, or inputs that cannot be copied, leave the call to eager: what was given is as it was."""
    weight, room = torch.nn.Parameter(torch.randn(33)[1:].view(4, 8)), torch.randn(41)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.mul_(2)
        return (x + y.sum()) @ torch.softmax(weight, 0).t()

    with torch.no_grad():
        for name, n, code in [("cuMemcpyDtoDAsync", 1, 2), ("cuMemcpyDtoDAsync", 2, 2), ("cuLaunchKernel", 1, 2), ("cuEventRecord", 1, 2)]:
            f, x, y = compiled(step), torch.randn(3, 8), room[1:33].view(8, 4)
            want = y.clone()
            fake.fake_fail(name.encode(), n, code)
            for _ in range(3):
                torch.testing.assert_close(f(x, y), step(x, want))
                torch.testing.assert_close(y, want)
            y.copy_(torch.randn(8, 4))
    assert fake.fake_depth() == 0


def test_values_that_the_host_needs(fake: ctypes.CDLL) -> None:
    def pick(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, i) * 2

    f = compiled(pick)
    x = torch.randn(5, 3)
    for i in ([0, 4], [2, 2]):
        torch.testing.assert_close(f(x, torch.tensor(i)), pick(x, torch.tensor(i)))
    with pytest.raises(IndexError):
        f(x, torch.tensor([0, 5]))
    torch.testing.assert_close(f(x, torch.tensor([1, 3])), pick(x, torch.tensor([1, 3])))


def test_library_calls_are_recorded(fake: ctypes.CDLL) -> None:
    """Products with weights in the middle of a graph; the first reads an input and the last writes a result, so they stay outside."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    model = torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.Softmax(1)))).eval()
    f = compiled(model)
    with torch.no_grad():
        for i in range(5):
            x = torch.randn(6, 8)
            torch.testing.assert_close(f(x), model(x))
            assert calls("cuGraphLaunch") == max(0, i - 0) if i else True
        assert calls("addmm") == 4 + 4 + 1 * 3  # recorded once, then only the one that reads the input is called
        model[2].weight = torch.nn.Parameter(torch.randn(8, 8))  # another address: another record
        for _ in range(3):
            x = torch.randn(6, 8)
            torch.testing.assert_close(f(x), model(x))
        layers[3].weight.mul_(2)  # in place: the same record
        before = calls("cuGraphInstantiate")
        torch.testing.assert_close(f(x), model(x))
        assert calls("cuGraphInstantiate") == before


def test_launches_of_nothing_beside_library_calls(fake: ctypes.CDLL) -> None:
    """A kernel without elements has no node in what was captured; its addresses change all the same."""
    model = torch.nn.Sequential(*(m for _ in range(3) for m in (torch.nn.Linear(8, 8), torch.nn.Softmax(1)))).eval()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(x), torch.softmax(x[:0].exp(), 1)

    f, kept = compiled(both), []
    with torch.no_grad():
        for i in range(5):
            kept.append(torch.randn(6, 8))
            torch.testing.assert_close(f(kept[-1]), both(kept[-1]))
            assert calls("cuGraphLaunch") == i


def test_modes_of_libraries(fake: ctypes.CDLL) -> None:
    """A recorded product is for the modes it was recorded under: another one of TF32 is another record."""
    model = torch.nn.Sequential(*(m for _ in range(3) for m in (torch.nn.Linear(8, 8), torch.nn.Softmax(1)))).eval()
    f, before, x = compiled(model), torch.backends.cuda.matmul.allow_tf32, torch.randn(6, 8)
    try:
        with torch.no_grad():
            for k, allowed in enumerate((False, True, False)):
                torch.backends.cuda.matmul.allow_tf32 = allowed
                for _ in range(4):
                    torch.testing.assert_close(f(x), model(x))
                made = calls("cuGraphInstantiate")
                assert made == min(k + 1, 2) and calls("addmm") >= 3  # the first one is used again
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_what_library_calls_return(fake: ctypes.CDLL) -> None:
    """Results of recorded convolutions lie in the record's memory; kernels between them read and free them."""
    model = torch.nn.Sequential(*(m for _ in range(4) for m in (torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.Softmax(1)))).eval()
    f = compiled(model)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 4, 5, 5)
            torch.testing.assert_close(f(x), model(x))
    assert calls("cuGraphLaunch") > 0


def test_a_library_call_that_cannot_be_recorded(fake: ctypes.CDLL) -> None:
    """The call is repeated eagerly, and that segment is launched one by one from then on."""
    model = torch.nn.Sequential(*(m for _ in range(3) for m in (torch.nn.Linear(8, 8), torch.nn.Softmax(1)))).eval()
    f = compiled(model)
    with torch.no_grad():
        for i in range(5):
            x = torch.randn(6, 8)
            if i == 1:
                fake.fake_fail(b"addmm", 2, 1)
            torch.testing.assert_close(f(x), model(x))
    assert calls("cuGraphLaunch") == 0 and fake.fake_depth() == 0


@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_has_counted_is_not_repeated(fake: ctypes.CDLL, at: int) -> None:
    """A library call that fails once an input was added to: no call counts twice, and one that was only recorded is repeated eagerly."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8).eval() for _ in range(3)]

    def counted(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        x = x * count
        for layer in layers:
            x = torch.softmax(layer(x), 1)
        return x

    f, count, eager = compiled(counted), torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for i in range(5):
            x = torch.randn(6, 8)
            expected = counted(x, eager)
            if i == at:
                fake.fake_fail(b"addmm", 2, 1)
            try:
                torch.testing.assert_close(f(x, count), expected)
            except RuntimeError:
                assert i == at != 1
            assert count == eager == i + 1


def test_launches_that_have_counted_are_not_repeated(fake: ctypes.CDLL) -> None:
    """The second of three launches fails, and the first one has added to an input: the call raises, the next one is right."""

    def counted(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return torch.softmax(torch.softmax(x * count, 1).cumsum(1), 1)

    f, count, x = compiled(counted), torch.zeros(()), torch.randn(6, 8)
    fake.fake_fail(b"cuLaunchKernel", 2, 2)
    with pytest.raises(RuntimeError, match="launching"):
        f(x, count)
    assert count == 1
    torch.testing.assert_close(f(x, count), counted(x, torch.ones(())))
    assert count == 2


def test_what_calls_return_is_used_by_calls(fake: ctypes.CDLL) -> None:
    """A residual net's convolutions read each other's results: all of it, and a whole training step of it, is one record."""
    class Residual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = (torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.a(torch.sin(x)))
            x = torch.relu(x + self.b(x))
            return torch.relu(x + self.c(x)).mean((2, 3))

    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        assert "1 segments" in str(torchsmith.explain(model)(x))
    assert "1 segments" in str(torchsmith.explain(step)(x))


def test_explain_and_switches(fake: ctypes.CDLL) -> None:
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    assert "1 segments: 3 launches recorded" in str(torchsmith.explain(three)(x, y))
    plain = torchsmith.compile(three, mode="max-autotune-no-cudagraphs")
    for _ in range(3):
        plain(x, y)
    assert calls("cuGraphLaunch") == 0
    for f in (torchsmith.compile(three, mode="reduce-overhead"), torchsmith.compile(three, backend="cudagraphs")):
        before = calls("cuGraphLaunch")
        for _ in range(3):
            f(x, y)
        assert calls("cuGraphLaunch") == before + 2


def test_threads_share_a_graph(fake: ctypes.CDLL) -> None:
    """One of them uses the record, the others launch one by one; workspaces are not shared by calls that overlap."""
    f = compiled(three)
    inputs = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(8)]
    expected = [three(*i) for i in inputs]
    f(*inputs[0])
    wrong: list[int] = []

    def work(first: int) -> None:
        for k in range(100):
            i = (first + k) % 8
            got = f(*inputs[i])
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected[i], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_device_memory_is_kept_for_streams(fake: ctypes.CDLL) -> None:
    """The workspace stays between calls, and goes when it is trimmed."""
    f = compiled(three)
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    f(x, y)
    held = _native.device_stats()
    for _ in range(5):
        f(x, y)
    assert held["blocks"] >= 1 and _native.device_stats() == held
    _native.workspace_trim()
    assert _native.device_stats()["blocks"] == 0
    torch.testing.assert_close(f(x, y)[0], three(x, y)[0])


def test_what_is_dropped_waits_for_the_device(fake: ctypes.CDLL) -> None:
    """Nothing waits for the device while the caller records; old weights and kernels of graphs that died go with a later call."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.softmax(self.weight, 0)

    model, x = Model(), torch.randn(3, 8)
    f = compiled(model)
    with torch.no_grad():
        f(x)
        before = calls("cuCtxSynchronize")  # for what died earlier in this process
        stream = fake.fake_stream(0)
        fake.fake_set_stream(stream)
        try:
            fake.fake_begin_capture(stream)
            model.weight.mul_(2)
            f(x)
            fake.fake_end_capture(stream)
        finally:
            fake.fake_set_stream(None)
        assert calls("cuCtxSynchronize") == before
        torch.testing.assert_close(f(x), model(x))
        assert calls("cuCtxSynchronize") == before + 1
