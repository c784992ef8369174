"""What programs do in packages: buffers that calls change, outputs that alias, sizes that vary, processors, threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_aot import Perceptron, exported

from torchsmith import aot
from torchsmith.codes import Unsupported
from torchsmith.runtime.package import PackageError

Dim = torch.export.Dim


def packaged(tmp_path: Path, program: Any, **options: Any) -> aot.PackagedModel:
    path = tmp_path / "model.pt2"
    aot.compile_and_package(program, package_path=path, inductor_configs=options)
    return aot.load_package(path)


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        self.cache.index_copy_(0, at, x)
        return self.cache.sum(1) + self.calls[0], self.calls * 2


@pytest.mark.parametrize("decomposed", [False, True])
def test_buffers_change(tmp_path: Path, decomposed: bool) -> None:
    model = Counter()
    args = (torch.randn(2, 4), torch.tensor([1, 3]))
    program = exported(model, *args)
    loaded = packaged(tmp_path, program.run_decompositions() if decomposed else program)
    other = aot.load_package(tmp_path / "model.pt2")
    for k in range(4):
        x, at = torch.randn(2, 4), torch.tensor([k, 7 - k])
        for got, want in zip(loaded(x, at), model(x, at), strict=True):
            torch.testing.assert_close(got, want)
    torch.testing.assert_close(other(*args)[1], torch.full((3,), 2.0))  # a model of its own
    reference = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))
    fresh = Counter()
    for _ in range(3):
        for got, want in zip(reference(*args), fresh(*args), strict=True):
            torch.testing.assert_close(got, want)


def test_inputs_are_written(tmp_path: Path) -> None:
    class Decode(torch.nn.Module):
        """One step with a key cache that the caller owns."""

        def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            cache.index_copy_(1, at, x)
            return torch.softmax(x @ cache.transpose(1, 2), -1) @ cache

    args = (torch.randn(1, 1, 8), torch.randn(1, 16, 8), torch.tensor([3]))
    program = exported(Decode(), *args)
    loaded = packaged(tmp_path, program)
    x, at = torch.randn(1, 1, 8), torch.tensor([5])
    ours, theirs = torch.ones(1, 16, 8), torch.ones(1, 16, 8)
    torch.testing.assert_close(loaded(x, ours, at), Decode()(x, theirs, at))
    torch.testing.assert_close(ours, theirs)


def test_results_of_every_kind(tmp_path: Path) -> None:
    class Kinds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor, flag: bool, *, scale: float = 2.0) -> dict[str, Any]:
            y = x * scale + self.w
            return {"y": y, "again": y, "view": y[:, 1:], "input": x, "transposed": x.t(), "n": x.shape[0], "none": None, "text": "a",
                    "weight": self.w, "empty": x[:, :0]}  # fmt: skip

    model = Kinds()
    x = torch.randn(4, 3)
    program = exported(model, x, True, scale=3.0, dynamic={"x": {0: Dim("rows", min=1, max=64)}, "flag": None, "scale": None})
    loaded = packaged(tmp_path, program)
    for n in (1, 4, 64):
        x = torch.randn(n, 3)
        got, want = loaded(x, True, scale=3.0), model(x, True, scale=3.0)
        assert list(got) == list(want)
        for key, value in want.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(got[key], value.detach())
            else:
                assert got[key] == value and type(got[key]) is type(value)
        assert got["input"].data_ptr() == x.data_ptr() and got["transposed"].data_ptr() == x.data_ptr()
        assert got["view"].untyped_storage().data_ptr() == got["y"].untyped_storage().data_ptr()
    with pytest.raises(ValueError, match=r"exported with flag=True; it cannot be called with False"):
        loaded(x, False, scale=3.0)
    flat = loaded.run_flat([x.numpy()])  # without torch's door: copies
    torch.testing.assert_close(torch.from_numpy(flat[4].copy()), x.t())


def test_derived_sizes(tmp_path: Path) -> None:
    class Pairs(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, y], 0).sum(1) * 2 + z.sum()

    n = Dim("n", min=2, max=50)
    program = exported(Pairs(), torch.randn(8, 3), torch.randn(9, 3), torch.randn(8), dynamic={"x": {0: n}, "y": {0: n + 1}, "z": {0: n}})
    loaded = packaged(tmp_path, program)
    for size in (2, 5, 50):
        args = (torch.randn(size, 3), torch.randn(size + 1, 3), torch.randn(size))
        torch.testing.assert_close(loaded(*args), Pairs()(*args))
    with pytest.raises(PackageError, match=r"input 1 \(y\): size at dimension 0 must be \(n \+ 1\): got 7 where 6 was expected"):
        loaded(torch.randn(5, 3), torch.randn(7, 3), torch.randn(5))
    with pytest.raises(PackageError, match=r"input 2 \(z\): size at dimension 0 must be n: got 4 where 5 was expected"):
        loaded(torch.randn(5, 3), torch.randn(6, 3), torch.randn(4))


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(500, 64)
            self.other = torch.nn.Embedding(500, 64)
            self.other.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids) + self.other(ids + 1)

    ids = torch.arange(10)
    loaded = packaged(tmp_path, exported(Tied().eval(), ids))
    assert (tmp_path / "model.pt2").stat().st_size < 500 * 64 * 4 + 120_000
    names = loaded.get_constant_fqns()
    assert {"embedding.weight"} <= set(names) <= {"embedding.weight", "other.weight"}


def test_processors_share_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.GELU(), torch.nn.Linear(400, 50)).eval()
    x = torch.randn(4, 300)
    program = exported(model, x)
    loaded = packaged(tmp_path, program, cpu=["x86-64-v3", "native"])
    size = (tmp_path / "model.pt2").stat().st_size
    assert size < 4 * (300 * 400 + 400 * 64) + 250_000
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))
        torch.testing.assert_close(torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))(x), model(x))
    with pytest.raises(Unsupported, match="AOT070"):
        packaged(tmp_path, program, cpu="x86-64-v9")


def test_other_strides_are_copied_when_asked(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.exp() + y[0]

    program = exported(Two(), torch.randn(6, 10), torch.randn(2, 10), dynamic={"x": {0: Dim("rows", min=1, max=64)}, "y": None})
    loaded = packaged(tmp_path, program, copy_inputs=True)
    for n in (1, 6, 20):
        for x in (torch.randn(n, 10), torch.randn(10, n).t(), torch.randn(n, 20)[:, ::2], torch.randn(1, 10).expand(n, 10)):
            y = torch.randn(10, 2).t()
            torch.testing.assert_close(loaded(x, y), Two()(x, y))
            torch.testing.assert_close(torch.from_numpy(loaded.run_flat([x.numpy(), y.numpy()])[0]), Two()(x, y))
    with pytest.raises(PackageError, match="size 10 expected"):
        loaded(torch.randn(4, 11), torch.randn(2, 10))
    with pytest.raises(Unsupported, match="AOT022"):
        packaged(tmp_path, exported(Counted(), torch.zeros(3)), copy_inputs=True)


class Counted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2


def test_missing_processor_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that claims to need a feature nobody has says so instead of faulting."""
    from torchsmith.aot import compile as compiling

    real = compiling.emit_model
    monkeypatch.setattr(compiling, "emit_model", lambda d: real(compiling.replace(d, cpu=(*d.cpu, "avx1024"))))
    program = exported(torch.nn.ReLU(), torch.randn(4))
    aot.aot_compile(program, options={"aot_inductor.output_path": str(tmp_path / "model.so")})
    with pytest.raises(PackageError, match="this processor lacks avx1024") as caught:
        aot.load_package(tmp_path / "model.so")
    assert caught.value.status == 10


def test_many_threads_and_new_weights(tmp_path: Path) -> None:
    """Every call sees one whole set of weights, whatever batch sizes run at the time."""
    model = Perceptron().eval()
    loaded = packaged(tmp_path, exported(model, torch.randn(8, 10), dynamic={"x": {0: Dim("batch", min=1, max=64)}}))
    states = []
    for value in (0.1, -0.2):
        states.append({k: torch.full_like(v, value) for k, v in model.state_dict().items()})
    x = torch.randn(64, 10)
    wants = []
    for state in states:
        model.load_state_dict(state)
        wants.append(model(x).detach())
    loaded.load_constants(states[0])
    wrong: list[int] = []

    def call(number: int) -> None:
        for k in range(200):
            n = 1 + (number * 7 + k) % 64
            got = loaded(x[:n])
            if not any(torch.allclose(got, w[:n], atol=1e-6) for w in wants):
                wrong.append(n)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for k in range(60):
        loaded.load_constants(states[k % 2], check_full_update=True)
    for t in threads:
        t.join()
    assert not wrong
