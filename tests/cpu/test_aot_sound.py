"""Packages and libraries refuse what they cannot take: structures, sizes, names, memory, damaged files; updates lose nothing."""

from __future__ import annotations

import ctypes
import io
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

import torchsmith
from torchsmith import aot
from torchsmith.aot import load
from torchsmith.aot.inspect import verify
from torchsmith.emit.model import unique_names


def packaged(folder: Path, model: nn.Module, *args, kwargs=None, name: str = "model.pt2", dynamic=None, **options) -> Path:
    with torch.no_grad():
        program = torchsmith.export(model.eval(), args, kwargs, dynamic_shapes=dynamic)
        if name.endswith(".pt2"):
            return Path(aot.compile_and_package(program, package_path=str(folder / name), inductor_configs=options))
        return Path(aot.aot_compile(program, options={"aot_inductor.output_path": str(folder / name), **options}))


class CountsWithSizes(nn.Module):
    def forward(self, x):
        n = x.shape[0]
        z = torch.view_as_complex(x.view(-1, 2, 2)) / n
        return torch.view_as_real(z), torch.linspace(0, n, 5) + x.sum(), torch.logspace(0, 1, n), torch.full((2,), n * 1.5) * x.mean()


@pytest.mark.parametrize("libtorch", ["forbid", "allow"])
def test_numbers_that_are_sizes(tmp_path: Path, libtorch: str) -> None:
    """For all sizes that were declared: libtorch's operators have no numbers that vary among their arguments, but tensors of one."""
    n = torchsmith.export.Dim("n", min=2, max=64)
    run = aot.load_package(packaged(tmp_path, CountsWithSizes(), torch.randn(6, 4), dynamic=({0: n},), libtorch=libtorch))
    for size in (6, 2, 17):
        x = torch.randn(size, 4)
        torch.testing.assert_close(tuple(run(x)), CountsWithSizes()(x))


# ---------------------------------------------------------------- structures


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Other:
    left: torch.Tensor
    right: torch.Tensor


for _cls in (Pair, Other):
    torchsmith.export.register_dataclass(_cls)


class TakesPair(nn.Module):
    def forward(self, d, more, *, a, b):
        return d.left - 2 * d.right + 3 * a - 5 * b + more["x"][0] * 7


def test_structures_with_a_dataclass(tmp_path: Path) -> None:
    t = [torch.randn(3) for _ in range(6)]
    model, more = TakesPair(), {"x": [t[4]]}
    run = aot.load_package(packaged(tmp_path, model, Pair(t[0], t[1]), more, kwargs={"a": t[2], "b": t[3]}))
    want = model(Pair(t[0], t[1]), more, a=t[2], b=t[3])
    torch.testing.assert_close(run(Pair(t[0], t[1]), more, b=t[3], a=t[2]), want)
    wrong = [
        lambda: run(Other(t[0], t[1]), more, a=t[2], b=t[3]), lambda: run((t[0], t[1]), more, a=t[2], b=t[3]),
        lambda: run(Pair(t[0], t[1]), more, a=t[2], c=t[3]), lambda: run(Pair(t[0], t[1]), more, t[5], a=t[2], b=t[3]),
        lambda: run(Pair(t[0], t[1]), {"y": [t[4]]}, a=t[2], b=t[3]), lambda: run(Pair(t[0], t[1]), {"x": [t[4], t[5]]}, a=t[2], b=t[3]),
        lambda: run(Pair(t[0], t[1]), {"x": (t[4],)}, a=t[2], b=t[3]), lambda: run(Pair(t[0], [t[1]]), more, a=t[2], b=t[3]),
    ]  # fmt: skip
    for call in wrong:
        with pytest.raises(TypeError, match="differ from those it was exported with"):
            call()


@pytest.mark.parametrize("absent", [{}, {"torch.utils._pytree": None}])
def test_a_type_that_nothing_registered_here_is_named(absent: dict[str, Any]) -> None:
    """As in a process that has not imported the library whose result was exported, or has no torch."""
    with patch.dict(sys.modules, absent), pytest.raises(aot.PackageError, match=r"library\.Result, which torch.s pytree does not know"):
        load._spec([1, {"type": "library.Result", "context": "null", "children_spec": []}])


# ---------------------------------------------------------------- constants


class Inner(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value))

    def forward(self, x):
        return x * self.w


class Alike(nn.Module):
    """Names that differ in punctuation only, and a constant of 18 dimensions in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.a_b = nn.Module(), Inner(3.0)
        self.a.b = Inner(2.0)
        self.register_buffer("deep", torch.randn([1] * 15 + [2, 2, 3]).transpose(-1, -3))

    def forward(self, x):
        return self.a.b(x) - 10 * self.a_b(x) + self.deep.sum((-1, -2)).flatten()


def test_unique_names() -> None:
    assert unique_names(["a.b", "a_b", "a/b", "c"]) == ["a_b_1", "a_b", "a_b_2", "c"]


@pytest.mark.parametrize("road", ["ours", "torch"])
def test_names_that_differ_in_punctuation_only(tmp_path: Path, road: str) -> None:
    model, x = Alike().eval(), torch.randn(3)
    with torch.no_grad():
        torch.testing.assert_close(torchsmith.compile(model)(x), model(x))
        program = torchsmith.export(model, (x,)) if road == "ours" else torch.export.export(model, (x,))
        run = aot.load_package(aot.compile_and_package(program, package_path=str(tmp_path / "m.pt2")))
        torch.testing.assert_close(run(x), model(x))
        state = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
        run.load_constants(state)
        model.load_state_dict(state)
        torch.testing.assert_close(run(x), model(x))
        with pytest.raises(aot.PackageError, match="given twice"):
            run.load_constants({"deep": state["deep"], "a.b.w": state["a.b.w"], "a_b_w": state["a.b.w"]})
        with pytest.raises(aot.PackageError):
            run.load_constants({"deep": np.zeros((3, 2, 2), np.float32)})
        torch.testing.assert_close(run(x), model(x))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(1))
        self.w, self.v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.n.add_(1)
        return x * self.w * self.v + self.n


def test_updates_keep_what_calls_wrote(tmp_path: Path) -> None:
    run, x, calls = aot.load_package(packaged(tmp_path, Counts(), torch.zeros(3))), torch.zeros(3), 500
    threads = [threading.Thread(target=lambda: [run(x) for _ in range(calls)]) for _ in range(2)]
    for t in threads:
        t.start()
    updates = 0
    while not updates or any(t.is_alive() for t in threads):  # fast threads may be done before the first
        run.load_constants({"w": torch.ones(3)})
        updates += 1
    assert run(x)[0].item() == 2 * calls + 1


def test_inactive_updates_add_up(tmp_path: Path) -> None:
    """PyTorch's container interface: two updates of the inactive constants, then the swap; user-managed constants are refused."""
    lib = ctypes.CDLL(str(packaged(tmp_path, Counts(), torch.zeros(3), name="m.so")))
    prefix, model = "AOTInductorModelContainer", ctypes.c_void_p()

    def call(name, *args):
        return getattr(lib, prefix + name)(*args)

    pointer, capsule = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    capsule.argtypes, capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object

    def handles(*tensors):
        return [pointer(c, None) for c in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))]

    class Entry(ctypes.Structure):
        _fields_ = [("name", ctypes.c_char_p), ("handle", ctypes.c_void_p)]

    def run():
        inputs, outputs = (ctypes.c_void_p * 1)(*handles(torch.ones(3))), (ctypes.c_void_p * 1)()
        assert call("Run", model, inputs, ctypes.c_size_t(1), outputs, ctypes.c_size_t(1), None, None) == 0
        return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([capsule(outputs[0], None, None)])[0].tolist()

    def one(name, tensor):
        return (Entry * 1)(Entry(name, handles(tensor)[0] if tensor is not None else None)), ctypes.c_size_t(1)

    assert call("CreateWithDevice", ctypes.byref(model), ctypes.c_size_t(1), b"cpu", None) == 0
    assert run() == [2.0] * 3
    keep = torch.full((3,), 2.0), torch.full((3,), 5.0)
    for name, t in zip((b"w", b"v"), keep, strict=True):
        assert call("UpdateInactiveConstantBufferPairs", model, *one(name, t)) == 0
    assert run() == [3.0] * 3
    assert call("SwapConstantBuffer", model) == 0
    assert run() == [13.0] * 3  # 2 * 5, and the buffer went on counting
    assert call("SwapConstantBuffer", model) == 0
    assert run() == [5.0] * 3
    assert call("UpdateUserManagedConstantBufferPairs", model, *one(b"w", keep[0]), False, False) != 0
    assert call("UpdateInactiveConstantBufferPairs", model, *one(b"w", None)) != 0
    assert call("Delete", model) == 0


# ---------------------------------------------------------------- memory and sizes


class Writes(nn.Module):
    def forward(self, x, y):
        x.add_(y)
        return y.t() * 2


def test_read_only_memory_is_refused(tmp_path: Path) -> None:
    run = aot.load_package(packaged(tmp_path, Writes(), torch.zeros(2, 3), torch.zeros(2, 3)))
    x, y = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    y.setflags(write=False)  # only read: no matter
    run(x, y)
    assert (x == 1).all()
    x.setflags(write=False)
    frozen = memoryview(bytes(24)).cast("f", (2, 3))
    for given in (x, frozen):
        with pytest.raises(ValueError, match="read-only"):
            run(given, y)
    assert (x == 1).all() and bytes(frozen) == bytes(24)


def test_bytes_of_an_output_are_in_its_order(tmp_path: Path) -> None:
    """A transposed output: writing it to a file must not write memory order."""
    run = aot.load_package(packaged(tmp_path, Writes(), torch.zeros(2, 3), torch.zeros(2, 3)))
    native = run._loaded.native
    y = np.arange(6, dtype=np.float32).reshape(2, 3)
    (got,) = native.run([np.zeros((2, 3), np.float32), y])
    assert memoryview(got).tobytes() == (y.T * 2).tobytes() and np.array_equal(np.asarray(got), y.T * 2)
    if not memoryview(got).c_contiguous:
        with pytest.raises(BufferError):
            io.BytesIO().write(got)


class Broadcasts(nn.Module):
    def forward(self, a, b, c):
        return a + b + c


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("sizes", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("ndim", ctypes.c_int32), ("dtype", ctypes.c_int32), ("device", ctypes.c_int32), ("kind", ctypes.c_int32),
        ("block", ctypes.c_void_p),
    ]  # fmt: skip


def tensor(array: np.ndarray | None, sizes, strides=None, data=None) -> Tensor:
    numbers = ctypes.c_int64 * max(1, len(sizes))
    address = data if data is not None else array.ctypes.data if array is not None else None
    return Tensor(address, numbers(*sizes), None if strides is None else numbers(*strides), len(sizes), 1, 0, 0, None)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The C interface of a model of three inputs with sizes that vary, and `run(inputs, output) -> (status, text)`."""
    dims = [torch.export.Dim(n, min=1, max=2**40) for n in "abc"]
    args = torch.ones(2, 1, 1), torch.ones(1, 3, 1), torch.ones(1, 1, 4)
    path = packaged(tmp_path_factory.mktemp("plain"), Broadcasts(), *args, name="m.so", dynamic=({0: dims[0]}, {1: dims[1]}, {2: dims[2]}))
    lib = ctypes.CDLL(str(path))
    lib.tsm_last_error.restype = ctypes.c_char_p
    model = ctypes.c_void_p()
    assert lib.tsm_create(None, ctypes.byref(model)) == 0

    def run(inputs, output=None):
        out = (Tensor * 1)(output or Tensor())
        rc = lib.tsm_run(model, (Tensor * 3)(*inputs), ctypes.c_size_t(3), out, ctypes.c_size_t(1))
        text = lib.tsm_last_error().decode()
        lib.tsm_release(ctypes.byref(out[0]))
        return rc, text

    return lib, model, run


def test_sizes_beyond_64_bits(plain) -> None:
    run = plain[2]
    one = np.ones(1, np.float32)
    small = [tensor(one, s, (0, 0, 0)) for s in ((2, 1, 1), (1, 3, 1), (1, 1, 4))]
    assert run(small)[0] == 0 or "stride" in run(small)[1]
    big = [tensor(one, s, st) for s, st in (((2**21, 1, 1), (1, 1, 1)), ((1, 2**21, 1), (2**21, 1, 1)), ((1, 1, 2**20), (2**20, 2**20, 1)))]
    rc, text = run(big)
    assert rc and ("64 bits" in text or "memory" in text), text


def test_nulls_and_alignment(plain) -> None:
    lib, model, run = plain
    arrays = [np.ones(n, np.float32) for n in (2, 3, 4)]
    good = [tensor(a, s) for a, s in zip(arrays, ((2, 1, 1), (1, 3, 1), (1, 1, 4)), strict=True)]
    assert run(good) == (0, "")
    out = np.zeros(24, np.float32)
    assert run(good, tensor(out, (2, 3, 4)))[0] == 0 and (out == 3).all()
    without = tensor(out, (2, 3, 4))
    without.sizes = None
    assert "NULL" in run(good, without)[1]
    room = np.zeros(128, np.uint8)
    assert "multiple of the element size" in run(good, tensor(None, (2, 3, 4), data=room.ctypes.data + 1))[1]
    for k in range(3):
        bad = list(good)
        bad[k] = tensor(arrays[k], (2, 1, 1))
        bad[k].sizes = None
        assert "NULL" in run(bad)[1]
    names, values = (ctypes.c_char_p * 1)(None), (Tensor * 1)()
    assert lib.tsm_load_constants(model, names, values, ctypes.c_size_t(1)) != 0
    assert lib.tsm_load_constants(model, None, None, ctypes.c_size_t(1)) != 0
    assert lib.tsm_input(model, ctypes.c_size_t(9), None) != 0 and lib.tsm_create(None, None) != 0


# ---------------------------------------------------------------- files


def test_damaged_weights_are_found_in_every_form(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    files = {
        "package": packaged(tmp_path, model, torch.randn(2, 64)), "library": packaged(tmp_path, model, torch.randn(2, 64), name="m.so"),
        "archive": packaged(tmp_path, model, torch.randn(2, 64), name="net.a", format="a").with_suffix(".weights"),
    }  # fmt: skip
    for kind, file in files.items():
        assert verify(file)["verified"], kind
        content = bytearray(file.read_bytes())
        at = len(content) // 2 if kind != "library" else len(content) - 2000
        content[content.index(b"TSWEIGHT") + 5000 if kind == "package" else at] ^= 4
        file.write_bytes(content)
        assert not verify(file)["verified"], kind
        if kind != "archive":
            with pytest.raises(aot.PackageError, match="checksum"):
                aot.load_package(file, verify=True)


def test_damaged_programs(tmp_path: Path) -> None:
    """Any bit of a saved program's directory: an ArchiveError or the right program, never another exception."""
    with torch.no_grad():
        torchsmith.export.save(torchsmith.export(nn.Linear(3, 2), (torch.randn(1, 3),)), tmp_path / "p.tsep")
    content = (tmp_path / "p.tsep").read_bytes()
    for at in range(content.index(b"PK\x01\x02"), len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        (tmp_path / "q.tsep").write_bytes(changed)
        try:
            torchsmith.export.load(tmp_path / "q.tsep")
        except RuntimeError as e:
            assert type(e).__name__ == "ArchiveError", (at, e)


def test_unwritable_paths_and_names_of_symbols(tmp_path: Path) -> None:
    with torch.no_grad():
        program = torchsmith.export(nn.Linear(3, 2), (torch.randn(1, 3),))
        for form in ("a", "c", "so"):
            with pytest.raises(torchsmith.Unsupported, match="AOT030"):
                aot.aot_compile(program, options={"format": form, "aot_inductor.output_path": f"/proc/none/net.{form}"})
        path = aot.aot_compile(program, options={"format": "a", "aot_inductor.output_path": str(tmp_path / "net.a")})
    said = subprocess.run(["nm", "-g", "--defined-only", "--format=posix", path], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0] for line in said.splitlines() if line and not line.endswith(":")}
    assert names and all(n.startswith("net_") for n in names), names


DAEMON = r"""
import os, sys
import numpy as np
from torchsmith import aot
x = np.ones(3, np.float32)
first = aot.load_package(sys.argv[1])
assert (first(x) == 2).all()
os.closerange(3, 256)  # as a process does that becomes a daemon
second = aot.load_package(sys.argv[2])
assert (second(x) == 3).all() and (first(x) == 2).all()
"""


def test_closed_descriptors(tmp_path: Path) -> None:
    class Times(nn.Module):
        def __init__(self, n: float) -> None:
            super().__init__()
            self.n = n

        def forward(self, x):
            return x * self.n

    files = [str(packaged(tmp_path, Times(n), torch.ones(3), name=f"{n}.pt2")) for n in (2, 3)]
    done = subprocess.run([sys.executable, "-c", DAEMON, *files], check=False, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]


def test_views_of_inputs_that_start_inside_of_their_storage(tmp_path: Path) -> None:
    class Columns(nn.Module):
        def forward(self, x):
            return x + 1, x[:, 1:3]

    run = aot.load_package(packaged(tmp_path, Columns(), torch.randn(6, 8)))
    x = torch.randn(49)[1:].view(6, 8)
    assert (run(x)[1] == x[:, 1:3]).all() and run(x)[1].data_ptr() == x[:, 1:3].data_ptr()
