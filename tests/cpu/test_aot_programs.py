"""What programs do in packages: buffers that calls change, outputs that alias, sizes that vary, processors, threads."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from test_aot import Perceptron, exported

import torchsmith
from torchsmith import aot
from torchsmith.aot.inspect import verify
from torchsmith.codes import Unsupported
from torchsmith.export import export
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


class Cached(torch.nn.Module):
    """Attention steps whose keys and values lie in buffers of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)
        self.register_buffer("keys", torch.zeros(2, 2, 16, 4))
        self.register_buffer("values", torch.zeros(2, 2, 16, 4))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(2, -1, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        mask = torch.arange(16)[None, :] <= at[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)


CACHE_LOADERS = {"ours": aot.load_package, "arrays": aot.load_package, "torch": torch._inductor.aoti_load_package}


@pytest.mark.parametrize("road", CACHE_LOADERS)
def test_key_value_cache_in_buffers(tmp_path: Path, road: str) -> None:
    """A call sees what earlier ones wrote; two models of one file do not share; new weights keep the cache, load_constants resets it."""
    model = Cached().eval().requires_grad_(False)
    t = torchsmith.export.Dim("t", min=1, max=16)
    program = export(copy.deepcopy(model), (torch.randn(2, 3, 8), torch.arange(3)), dynamic_shapes={"x": {1: t}, "at": {0: t}})
    path = aot.compile_and_package(program, package_path=tmp_path / "model.pt2")
    inputs = [torch.randn(2, n, 8) for n in (3, 1, 1, 2)]

    def steps(run: Any, start: int = 0) -> list[torch.Tensor]:
        out = []
        for x in inputs:
            out.append(run(x, torch.arange(start, start + x.shape[1])))
            start += x.shape[1]
        return out

    def runner(loaded: Any) -> Any:
        if road != "arrays":
            return loaded
        return lambda *args: torch.from_numpy(numpy.asarray(loaded.run_flat([a.numpy() for a in args])[0]))

    one, two = (CACHE_LOADERS[road](path) for _ in range(2))
    eager = copy.deepcopy(model)
    for run, module in ((one, eager), (two, copy.deepcopy(model))):  # the second model's cache is empty
        for got, want in zip(steps(runner(run)), steps(module), strict=True):
            torch.testing.assert_close(got, want)
    new = {"qkv.weight": torch.randn(24, 8), "qkv.bias": torch.randn(24)}
    eager.load_state_dict(new, strict=False)
    one.load_constants(new, check_full_update=False)
    for got, want in zip(steps(runner(one), 7), steps(eager, 7), strict=True):  # positions 0 to 6 hold what was written before
        torch.testing.assert_close(got, want)
    one.load_constants({"keys": torch.zeros(2, 2, 16, 4), "values": torch.zeros(2, 2, 16, 4)}, check_full_update=False)
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(new, strict=False)
    for got, want in zip(steps(runner(one)), steps(fresh), strict=True):
        torch.testing.assert_close(got, want)
    one.load_constants(dict(model.state_dict()), check_full_update=True)
    for got, want in zip(steps(runner(one)), steps(copy.deepcopy(model)), strict=True):
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
    with pytest.raises(PackageError, match=r"input 1 \(y\): size at dimension 0 must be n \+ 1: got 7 where 6 was expected"):
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


def test_processors_share_weights_that_are_packed_alike(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.GELU(), torch.nn.Linear(400, 50)).eval()
    x = torch.randn(4, 300)
    program, once = exported(model, x), 4 * (300 * 400 + 400 * 64)
    for levels, times in ((["x86-64-v3", "avx2 fma"], 1), (["x86-64-v3", "x86-64-v4"], 2)):  # vectors of 32 and 64 bytes
        loaded = packaged(tmp_path, program, cpu=levels)
        size = (tmp_path / "model.pt2").stat().st_size
        assert (times - 0.5) * once < size < times * once + 250_000
        assert verify(tmp_path / "model.pt2")["problems"] == []
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


class Reads(torch.nn.Module):
    """Numbers read from tensors: as values, sizes, positions and bounds."""

    def forward(self, x: torch.Tensor, n: torch.Tensor, m: torch.Tensor, f: torch.Tensor) -> tuple[Any, ...]:
        k, at = n.item(), int(m)
        made = x * (k + 1) + f.item() / 2, torch.arange(k) * 2.5, torch.zeros(k, x.shape[1]) + x[0], torch.full((k,), float(f))
        shown = x[:k].sum(0), x[at] + 1, x[:, at:], x.narrow(0, 0, k) @ x.t()
        written = x.clone()
        written[at, :k] = 7.0
        rows = torch.cat([x[:k], x]).mean(0), torch.arange(int(torch.stack([n, m[0]]).max()))
        return *made, *shown, written, *rows, (n * 2).item()


NUMBERS = [(3, -1, 1.5), (0, 1, -1e20), (4, -4, 0.25)]


@pytest.mark.parametrize("road", ["ours", "torch.export"])
def test_numbers_of_tensors(tmp_path: Path, road: str) -> None:
    x = torch.randn(5, 4)
    calls = [(x, torch.tensor(n), torch.tensor([m]), torch.tensor(f)) for n, m, f in NUMBERS]
    if road == "ours":
        program: Any = export(Reads(), calls[0], dynamic_shapes={"x": {0: Dim("rows", min=4)}, "n": None, "m": None, "f": None})
        torchsmith.export.save(program, tmp_path / "saved.tsep")
        runs = [program.module(), torchsmith.export.load(tmp_path / "saved.tsep").module()]
        loaded = packaged(tmp_path, str(tmp_path / "saved.tsep"))
        calls.append((torch.randn(9, 4), *calls[0][1:]))
    else:

        class Checked(torch.nn.Module):
            def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
                k = n.item()
                torch._check(k >= 0)
                torch._check(k <= x.shape[0])
                return x[:k].sum(0), torch.zeros(k) + k

        program = torch.export.export(Checked(), (x, torch.tensor(3)))
        loaded, runs = packaged(tmp_path, program), []
        calls = [c[:2] for c in calls]
    runs += [loaded, torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))]
    for args in calls:
        want = (Reads() if road == "ours" else program.module())(*args)
        for run in runs:
            for got, value in zip(run(*args), want, strict=True):
                torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(value))
    said = r"item\(\) at .*test_aot_programs.py:\d+\] >= 0|Runtime assertion failed for expression u0 >= 0"
    if torch.__version__ < "2.13":
        said += "|API call failed"  # torch's loader prints what the library says
    wrong = (x, torch.tensor(-1), *calls[0][2:])
    for run in runs:
        with pytest.raises(RuntimeError, match=said):
            run(*wrong)


class Positions(torch.nn.Module):
    """A cache that is filled from a position which the module keeps as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 16, 4))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shown", torch.tensor(2))

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        p, n = self.position.item(), x.shape[1]
        torch._check(p >= 0)
        self.cache[:, p : p + n] = x
        self.position += n
        return self.cache[:, : p + n].mean(1), x[:, : self.shown.item()], self.position.item()


def test_a_position_kept_in_a_buffer(tmp_path: Path) -> None:
    """Read before and after it is written; a dimension that varies beside it; new constants; what does not fit names the dimension."""
    model = Positions()
    loaded = packaged(tmp_path, export(model, (torch.randn(2, 3, 4),), dynamic_shapes={"x": {1: Dim("n", min=1, max=8)}}))
    for run in (loaded, torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))):
        reference = copy.deepcopy(model)
        if run is loaded:
            reference.shown.fill_(1)
            run.load_constants({"shown": torch.tensor(1)})
        for n in (3, 1, 8, 2):
            x = torch.randn(2, n, 4)
            for got, want in zip(run(x), reference(x), strict=True):
                torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want))
        with pytest.raises(RuntimeError, match=r"\(n \+ \[item\(\) at .*test_aot_programs.py:\d+\]\).* does not hold"):
            run(torch.randn(2, 3, 4))


@pytest.mark.parametrize(
    ("fn", "bad", "words"),
    [
        (lambda x, n: torch.zeros(n.item()), 1 << 40, "<= 1073741824 does not hold"),
        (lambda x, n: (torch._check(n.item() < 3, lambda: "too many"), x + 1)[1], 3, r"too many \(\[item\(\) at .* < 3 does not hold"),
        (lambda x, n: (torch._check_is_size(n.item()), x * n.item())[1], -1, ">= 0 does not hold"),
        (lambda x, n: x[n.item()], 4, "< 4 does not hold"),
        (lambda x, n: x.view(n.item(), 2), 3, "== 2 does not hold"),
        (lambda x, n: x + torch.ones(n.item()), 3, "== 4 does not hold"),
        (lambda x, n: x if n.item() > 3 else x + 1, None, r"GRA004.*\[item\(\) at .*test_aot_programs.py:\d+\] > 3"),
        (lambda x, n: [x] * n.item(), None, r"test_aot_programs.py:\d+: \[GRA004\]"),
    ],
)
def test_numbers_of_tensors_are_checked(tmp_path: Path, fn: Any, bad: int | None, words: str) -> None:
    """A number that does not fit is an error of that call only; what tracing cannot decide is refused with the line that reads it."""

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> Any:
            return fn(x, n)

    x, n = torch.randn(4), torch.tensor(4 if "== 4" in words else 2)
    if bad is None:
        with pytest.raises(Unsupported, match=words):
            export(Net(), (x, n))
        return
    loaded = packaged(tmp_path, export(Net(), (x, n)))
    for _ in range(2):
        with pytest.raises(PackageError, match=words):
            loaded(x, torch.tensor(bad))
        assert torch.equal(loaded(x, n), fn(x, n))


class Regions(torch.nn.Module):
    """What torch.export keeps as graphs within the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from torch._higher_order_ops.map import map as map_over
        from torch._higher_order_ops.scan import scan

        inner = torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: self.inner(x) - 1, (x,))
        last, sums = scan(lambda c, row: (c + row, c * row), torch.zeros(4), steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = self.inner(x)
        return inner, map_over(lambda row, y: row.cumsum(0) + y, steps, x[0]), last, sums, half.float()


def test_regions_of_torch_export(tmp_path: Path) -> None:
    model, steps = Regions(), torch.randn(3, 4)
    program = exported(model, torch.randn(5, 4), steps, dynamic=({0: Dim("n", min=1, max=64)}, None))
    torch.export.save(program, tmp_path / "saved.pt2")
    loaded = packaged(tmp_path, str(tmp_path / "saved.pt2"))
    for x in (torch.rand(3, 4), -torch.rand(7, 4), torch.ones(1, 4)):
        for got, want in zip(loaded(x, steps), model(x, steps), strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-2)


class Loop(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.while_loop(lambda i, x: i < x.sum(), lambda i, x: (i + 1, x * 0.5), (torch.tensor(0), x))


def test_refused_regions_name_the_line(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"test_aot_programs.py:\d+: \[AOT002\].*while_loop"):
        packaged(tmp_path, torch.export.export(Loop(), (torch.ones(3),)))


def test_composite_operators_of_torch_export_vary(tmp_path: Path) -> None:
    """Their overloads would ask for plain sizes: the LSTM's batch, the resampled image."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(4, 5, batch_first=True)

        def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.lstm(x)[0], torch.nn.functional.interpolate(image, scale_factor=2, mode="bilinear")

    n, h = Dim("n", min=1, max=32), Dim("h", min=2, max=16)
    model = Net().eval()
    loaded = packaged(tmp_path, exported(model, torch.randn(2, 6, 4), torch.randn(2, 3, 8, 5), dynamic=({0: n}, {0: n, 2: h})))
    for batch, height in ((2, 8), (1, 2), (9, 5)):
        args = torch.randn(batch, 6, 4), torch.randn(batch, 3, height, 5)
        for got, want in zip(loaded(*args), model(*args), strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


class Bits(torch.nn.Module):
    def forward(self, x: torch.Tensor, h: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.view(torch.int64) + 1, h.view(torch.float32) * 2, b.view(torch.float16) + 1, b.view(torch.int64) ^ 5
        return *wide, x.view(torch.int16) * 2, x.view(torch.uint8).sum(1), (x + 1).view(torch.bfloat16)


@pytest.mark.parametrize("dynamic", [False, True])
def test_bits_as_another_dtype(tmp_path: Path, dynamic: bool) -> None:
    args = torch.randn(4, 4), torch.randn(3, 8).half(), torch.randint(-128, 127, (5, 16), dtype=torch.int8)
    program = export(Bits(), args, dynamic_shapes={"x": {0: Dim("n", min=2)}, "h": None, "b": {0: Dim("m", min=1)}} if dynamic else None)
    loaded = packaged(tmp_path, program)
    for a in (args, (torch.randn(6, 4), args[1], args[2][:2].contiguous())) if dynamic else (args,):
        for got, want in zip(loaded(*a), Bits()(*a), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True, atol=0, rtol=0)


def test_a_view_of_an_input_as_another_dtype_is_refused(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(torch.int32)

    with pytest.raises(Unsupported, match=r"AOT024.*float32 as int32.*return a clone"):
        packaged(tmp_path, export(Net(), (torch.randn(3),)))


class Fixed(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: Any, f: Any, dtype: Any, z: Any, flag: Any, s: Any, none: Any) -> Any:
        return (x * n).to(dtype) + (0 if f == f else 1), z, f, n, flag, s, none


def test_fixed_arguments_are_the_same_only_with_their_type(tmp_path: Path) -> None:
    """Numbers, dtypes and the like among the arguments: nan is taken, 2.0 is not 2; complex numbers come back as such."""
    x, nan = torch.arange(3), float("nan")
    args = (2, nan, torch.float64, 2 + 1j, True, "text", None)
    program = export(Fixed(), (x, *args))
    torchsmith.export.save(program, tmp_path / "program.tsep")
    others = (2.0, 0.0, torch.float32, 2 - 1j, 1, "Text", 0)
    for run in (program.module(), torchsmith.export.load(tmp_path / "program.tsep").module(), packaged(tmp_path, program)):
        assert repr(run(x, *args)) == repr(Fixed()(x, *args))
        for i, other in enumerate([*others, torch.tensor(2)]):
            changed = [*args]
            changed[i % len(args)] = other
            with pytest.raises(ValueError, match=r"was exported|when it was exported"):
                run(x, *changed)
    with pytest.raises(Unsupported, match="CAP031"):
        export(Fixed(), (x, 2, 0.0, torch.float64, b"bytes", True, "text", None))


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x * self.w + z.real


def test_negated_and_conjugated_memory_is_refused(tmp_path: Path) -> None:
    """Views that imag and conj make hold other values in memory than they have: every road says so, and new weights are resolved."""
    model = Doubled()
    x, z = torch.randn(3), torch.randn(3, dtype=torch.complex64)
    run = packaged(tmp_path, export(model, (x, z)))
    roads = {"ours": run, "torch": torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))}
    for given in ((torch._neg_view(x), z), (x, z.conj())):
        for name, road in roads.items():
            with pytest.raises(RuntimeError, match=r"input \d \([xz]\): its memory holds negated" if name == "ours" else None):
                road(*given)
    with pytest.raises(PackageError, match="negated"):
        run(x.numpy(), z.conj())
    with pytest.raises(PackageError, match=r"input 0 \(x\): a tensor without memory"):
        run(x.to_sparse(), z)
    run.load_constants({"w": torch._neg_view(x)})
    assert torch.allclose(run(x, z).detach(), -x * x + z.real)


def test_artifacts_refuse_negated_memory() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(4)
    artifact = torchsmith.standalone_compile(make_fx(torch.relu)(x), (x,), dynamic_shapes="from_graph")
    artifact(x)
    with pytest.raises(ValueError, match="negated"):
        artifact(torch._neg_view(x))
