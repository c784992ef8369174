"""Tensors on devices that nothing is compiled for: every public door refuses them, or runs what eager runs, with eager's errors."""

import contextlib

import pytest
import torch
from torch import nn

import fresh
import torchsmith
from torchsmith import aot, events
from torchsmith.codes import Unsupported
from torchsmith.events import recording
from torchsmith.graph.tracing import device_of

X = torch.randn(3, 4)
META = torch.randn(3, 4, device="meta")

PROGRAMS = {
    "to": (lambda x: x.to("meta") + 1, X),
    "to keyword": (lambda x: x.to(device="meta", dtype=torch.float64), X),
    "cuda": (lambda x: x.cuda(), X),
    "cuda unused": (lambda x: (x.cuda(), x + 1)[1], X),
    "xla": (lambda x: x.to("xla"), X),
    "mixed": (lambda x: torch.cat([x, x.to("meta")]), X),
    "mixed with cuda": (lambda x: x + torch.zeros(4, device="cuda"), X),
    "zeros": (lambda x: torch.zeros(3, device="meta"), X),
    "like": (lambda x: torch.zeros_like(x, device="meta"), X),
    "new": (lambda x: x.new_zeros(3, device="meta"), X),
    "tensor": (lambda x: torch.tensor([1.0, 2], device="meta"), X),
    "number": (lambda x: torch.tensor(1.0, device="meta"), X),
    "its value": (lambda x: torch.tensor(1.0, device="meta").item(), X),
    "as_tensor": (lambda x: torch.as_tensor([1, 2], device="meta"), X),
    "rand": (lambda x: torch.rand(3, device=torch.device("meta")), X),
    "arange": (lambda x: torch.arange(x.shape[0], device="meta"), X),
    "input": (lambda x: x + 1, META),
    "view": (lambda x: x.view(-1), META),
    "in place": (lambda x: x.add_(1), META),
    "follows": (lambda x: (x.device, x.is_meta, x.new_zeros(2), torch.empty_like(x), x.to(x.device) + 1), META),
    "cpu": (lambda x: x.cpu(), META),
}


def with_device(x):
    with torch.device("meta"):
        y = torch.ones(3)
        with torch.device("cpu"):
            z = torch.ones(3)
        return y, z, torch.ones(2, device="cpu"), torch.tensor([1, 2]), torch.zeros_like(x), torch.arange(3)


PROGRAMS["with torch.device"] = (with_device, X)


def outcome(f, x):
    def seen(v):
        if isinstance(v, torch.Tensor):
            return v.device, v.dtype, tuple(v.shape), tuple(v.stride())
        return tuple(map(seen, v)) if isinstance(v, tuple) else v

    try:
        with torch.no_grad():
            return seen(f(x))
    except Exception as e:
        return type(e), str(e)


@pytest.mark.parametrize("name", PROGRAMS)
def test_runs_as_eager(name: str) -> None:
    f, x = PROGRAMS[name]
    compiled = torchsmith.compile(f)
    assert outcome(compiled, x) == outcome(f, x)
    assert outcome(compiled, x) == outcome(f, x)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in ("its value",)])
def test_fullgraph_names_the_line(name: str) -> None:
    f, x = PROGRAMS[name]
    kind, text = outcome(torchsmith.compile(f, fullgraph=True), x)
    assert issubclass(kind, Unsupported) and "LOW005" in text, text
    assert name == "follows" or text.startswith(f"{__file__}:"), text


def test_fallback_is_counted() -> None:
    with events.recording() as seen:
        outcome(torchsmith.compile(lambda x: x + 1), META)
    assert [e.fields["code"] for e in seen if e.kind == "fallback"] == ["LOW005"]


def test_entries_are_not_shared_between_devices() -> None:
    compiled = torchsmith.compile(lambda x: x * 2)
    with torch.no_grad():
        assert compiled(X).device.type == "cpu" and compiled(META).device.type == "meta"
        assert torch.equal(compiled(X), X * 2) and compiled(META).is_meta


def test_sizes_of_a_tensor_elsewhere() -> None:
    compiled = torchsmith.compile(lambda x, m: x * m.shape[0], dynamic=True)
    with torch.no_grad():
        for n in (3, 5, 7):
            assert torch.equal(compiled(X, torch.empty(n, 2, device="meta")), X * n)


def test_default_device() -> None:
    compiled = torchsmith.compile(lambda: torch.ones(3) + 1)
    assert compiled().device.type == "cpu"
    with torch.device("meta"):
        assert compiled().device.type == "meta"
    assert compiled().device.type == "cpu"


class Sum(nn.Module):
    def forward(self, x):
        return x + 1


def test_modules_and_packages(tmp_path) -> None:
    model = nn.Linear(4, 2, device="meta")
    assert outcome(torchsmith.compile(model), META)[0].type == "meta"
    with torch.no_grad():
        with pytest.raises(Unsupported, match="LOW005"):
            aot.aot_compile(torchsmith.export(Sum(), (META,)))
        package = torchsmith.aot.compile_and_package(torchsmith.export(Sum(), (X,)), package_path=str(tmp_path / "m.pt2"))
        run = aot.load_package(package)
        assert torch.equal(run(X), X + 1)
        with pytest.raises(Exception, match="CPU"):
            run(META)
        with pytest.raises(Exception, match="CPU"):
            run.load_constants({"w": META}) if run.get_constant_fqns() else run(META)


FAKE = r"""
import torch, torchsmith
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("fake")
calls = []
def made(size, dtype): return torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.float32)
library = torch.library.Library("aten", "IMPL")
library.impl("empty.memory_format", lambda size, dtype=None, **k: made(size, dtype), "PrivateUse1")
library.impl("empty_strided", lambda size, stride, dtype=None, **k: made(size, dtype), "PrivateUse1")
library.impl("add.Tensor", lambda a, b, alpha=1: (calls.append("add"), made(a.shape, a.dtype))[1], "PrivateUse1")
library.impl("_copy_from", lambda a, b, non_blocking=False: (calls.append("copy"), b)[1], "PrivateUse1")
x = torch.empty(3, device="fake")
double = torchsmith.compile(lambda x: x + 1)
whole = torchsmith.compile(lambda x: x + 1, fullgraph=True)
with torch.no_grad():
    for n in range(1, 4):
        assert double(x).device.type == "fake" and calls == ["add"] * n, calls
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert torchsmith.compile(lambda x: x.to("fake"))(torch.ones(3)).device.type == "fake" and calls[-1] == "copy"
    assert torchsmith.compile(lambda: torch.empty(2, device="fake"))().device.type == "fake"
    try: whole(x)
    except torchsmith.Unsupported as e: assert "LOW005" in str(e)
    else: raise AssertionError("not refused")
    from torchsmith.runtime import _native
    import gc
    graphs = [o for o in gc.get_objects() if type(o).__name__ == "Graph" and "native" in type(o).__module__]
    before = len(calls)
    assert [r.device.type for r in graphs[0](x)] == ["fake"] and calls[before:] == ["add"], "device memory was read"
"""


def test_a_second_device() -> None:
    done = fresh.run(FAKE)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_computed_lies_where_its_operands_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are made in another trace than what is computed of them; both know of devices. (No GPU is needed to capture.)"""
    monkeypatch.setattr("torchsmith.graph.tracing.real_device", lambda t: torch.device("cuda:0"))
    seen = []

    def backend(gm, inputs):
        seen.extend((n.args, str(n.kwargs["device"])) for n in gm.graph.nodes if "device" in n.kwargs)
        return lambda *args: args

    def f(x):
        y = x + 1
        return y, torch.zeros(3 if y.mT.is_cuda else 4, device=(y @ y.mT).device)

    with contextlib.suppress(AssertionError):  # torch without CUDA cannot run it
        torchsmith.compile(f, backend=backend)(X)
    assert seen == [((3,), "cuda:0")]


def test_cuda_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without an index is the current one, and the graph holds only while it is."""
    monkeypatch.setattr("torchsmith.graph.tracing.real_device", lambda t: torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torchsmith.backends.watch.difference", lambda results, expected: "")  # the backend has no such device
    now = [1]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    seen = []

    def backend(gm, inputs):
        seen.append([str(device_of(n.meta["val"])) for n in gm.graph.nodes if n.op in ("call_function", "call_method")])
        return lambda *args: (torch.zeros(3), torch.zeros(3))

    def f(x):
        same = x.cuda() is x and x.to("cuda") is x
        return torch.arange(3, device="cuda") + x[:, 0], torch.zeros(3, device="cuda:0"), same

    compiled = torchsmith.compile(f, backend=backend)
    compiled(X)
    compiled(X)
    assert seen == [["cuda:1"] * 5 + ["cuda:0"]] and compiled(X)[2]
    now[0] = 0
    with contextlib.suppress(AssertionError):  # x moves now: torch without CUDA cannot run it
        compiled(X)
    assert len(seen) == 1


def test_a_move_between_devices_is_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from an input elsewhere, or goes there, is moved by Python; what is made on the host is made where it goes."""
    hosts: set[int] = set()
    monkeypatch.setattr("torchsmith.graph.tracing.real_device", lambda t: torch.device("cpu" if id(t) in hosts else "cuda:0"))
    graphs = []

    def backend(gm, inputs):
        graphs.append([n.name for n in gm.graph.nodes if n.op == "call_function"])
        return gm

    def f(x, y):
        y = y * torch.arange(3).to("cuda:0")
        z = x.cpu()
        return z + 1, y

    x, y = torch.ones(3), torch.ones(3)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *a, **k: t)  # torch without CUDA cannot run it
    with recording() as got:
        result = torchsmith.compile(f, backend=backend)(x * 2, y)
    assert [e.fields["code"] for e in got if e.kind == "graph_break"] == ["CAP037"]
    assert len(graphs) == 2
    torch.testing.assert_close(result, (x * 2 + 1, torch.arange(3.0)))
