"""Packages for a GPU, without one: exported and loaded on the fake driver, through torch's door and through the plain one."""

from __future__ import annotations

import ctypes
import json
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretend import calls, pretending

import torchsmith
from torchsmith.aot import PackageError, load_package
from torchsmith.aot.compile import _Tensor


class Model(torch.nn.Module):
    """Three kernels, a weight that is prepared, one that is read, a view of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = torch.nn.Parameter(torch.randn(8, 8))
        self.scale = torch.nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> Any:
        a = torch.softmax(x * torch.softmax(self.packed, 0)[0], 1)
        b = (a * self.scale).sum(0)
        return a - b.cumsum(0), b.sin(), x[:, 1:3]


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.sum(0))
        return x + self.seen


class CDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ctypes.CDLL, Path, Model]]:
    torch.manual_seed(0)
    model = Model().eval()
    path = tmp_path_factory.mktemp("gpu") / "model.pt2"
    with pretending() as fake:
        batch = torchsmith.export.Dim("batch", min=1, max=64)
        program = torchsmith.export.export(model, (torch.randn(6, 8),), dynamic_shapes=({0: batch},))
        torchsmith.aot.compile_and_package(program, package_path=path)
        yield fake, path, model


def check(got: Any, expected: Any) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_in_it(made: Any) -> None:
    _, path, _ = made
    with zipfile.ZipFile(path) as z:
        (name,) = [n for n in z.namelist() if n.endswith("wrapper_metadata.json")]
        said = json.loads(z.read(name))
    assert said["AOTI_DEVICE_KEY"] == "cuda" and said["AOTI_COMPUTE_CAPABILITY"] == "90"


def test_through_torch(made: Any) -> None:
    """Two sizes, recorded from the second call on; results belong to the caller."""
    fake, path, model = made
    fake.fake_reset()
    run = load_package(path)
    assert run.info["device"] == "cuda" and run.info["cuda_archs"] == [80, 90]
    kept = []
    with torch.no_grad():
        for n in (6, 6, 5, 6, 5):
            x = torch.randn(n, 8)
            kept.append((run(x), model(x)))
        for got, expected in kept:
            check(got, expected)
        assert kept[0][0][2].data_ptr() != 0 and calls("cuGraphLaunch") >= 3
        x = torch.randn(49)[1:].view(6, 8)  # an odd address
        check(run(x), model(x))
    del run, kept


def test_the_documents_loader(made: Any) -> None:
    """AOTInductor's interface: device strings, streams, two runners, new weights, errors that own what they were given."""
    model = made[2]
    library = torchsmith.aot.aot_compile(model, (torch.randn(6, 8),))
    lib = ctypes.CDLL(library)
    handle = ctypes.c_void_p()
    create = lib.AOTInductorModelContainerCreateWithDevice
    assert create(ctypes.byref(handle), ctypes.c_size_t(2), b"cuda:0", None) == 1  # tensors of this test lie on the cpu, and say so
    assert create(ctypes.byref(handle), ctypes.c_size_t(2), b"cpu:1", None) == 0
    lib.AOTInductorModelContainerDelete(handle)
    assert create(ctypes.byref(handle), ctypes.c_size_t(2), b"cpu:7", None) == 1
    text = ctypes.c_char_p()
    lib.AOTInductorGetLastError(ctypes.byref(text))
    assert text.value is not None and b"there are 2 devices" in text.value
    run = load_package(library)
    with torch.no_grad():
        x = torch.randn(6, 8)
        check(run(x), model(x))
    with pytest.raises(PackageError, match="size 6 expected"):
        run(torch.randn(5, 8))


def test_new_weights(made: Any) -> None:
    """From the host or the device, with any strides; what is prepared of them is prepared anew; the caller's memory is free at once."""
    run = load_package(made[1])
    other = Model().eval()
    with torch.no_grad():
        x = torch.randn(6, 8)
        run.load_constants({"packed": other.packed.detach().numpy(), "scale": other.scale.detach()})
        check(run(x), other(x))
        turned = other.packed.detach().t().contiguous().t() * 1
        turned = torch.empty_strided((8, 8), (1, 8)).copy_(turned * 2)
        run.load_constants({"packed": turned})
        other.packed.mul_(2)
        check(run(x), other(x))


def test_buffers_that_calls_write(made: Any, tmp_path: Path) -> None:
    fake = made[0]
    module = Counting()
    path = torchsmith.aot.aot_compile(module, (torch.ones(2, 8),), options={"aot_inductor.output_path": str(tmp_path / "m.so")})
    run, again = load_package(path), Counting()
    for _ in range(3):
        torch.testing.assert_close(run(torch.ones(2, 8)), again(torch.ones(2, 8)))
    assert calls("cuEventRecord") > 0
    assert fake.fake_depth() == 0


def device_tensor(fake: Any, array: np.ndarray, place: int) -> tuple[_Tensor, Any]:
    numbers = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
    return _Tensor(array.ctypes.data, numbers, None, array.ndim, 1, place, 0, None), numbers


def test_the_plain_interface(made: Any) -> None:
    """Device pointers and a stream, without torch: outputs in device memory, given back and used again; the wrong device is refused."""
    fake, model = made[0], made[2]
    library = torchsmith.aot.aot_compile(model, (torch.randn(6, 8),))
    lib = ctypes.CDLL(library)
    lib.tsm_last_error.restype = ctypes.c_char_p
    handle = ctypes.c_void_p()
    assert lib.tsm_create(None, ctypes.byref(handle)) == 0, lib.tsm_last_error()
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    given, keep = device_tensor(fake, x, 1)
    stream = ctypes.c_void_p(fake.fake_stream(0))
    with torch.no_grad():
        expected = model(torch.from_numpy(x))
    places = []
    for k in range(4):
        outs = (_Tensor * 3)()
        on = stream if k % 2 else None
        assert lib.tsm_run_on(handle, ctypes.byref(given), ctypes.c_size_t(1), outs, ctypes.c_size_t(3), on) == 0, lib.tsm_last_error()
        for out, want in zip(outs, expected, strict=True):
            assert out.device == 1
            got = np.ctypeslib.as_array(ctypes.cast(out.data, ctypes.POINTER(ctypes.c_float)), tuple(want.shape))
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-6)
        places.append({o.data for o in outs})
        for o in outs:
            lib.tsm_release(ctypes.byref(o))
    assert places[0] & places[2] and not places[0] & places[1]  # each stream's memory is used again
    given.device = 0
    outs = (_Tensor * 3)()
    assert lib.tsm_run(handle, ctypes.byref(given), ctypes.c_size_t(1), outs, ctypes.c_size_t(3)) == 7
    assert b"cuda:0 expected" in lib.tsm_last_error() or b"cpu:0 expected" in lib.tsm_last_error()
    lib.tsm_delete(handle)
    assert fake.fake_depth() == 0 and keep is not None


class Config(ctypes.Structure):
    """tsm_config"""

    _fields_ = [
        ("size", ctypes.c_uint32), ("threads", ctypes.c_int32), ("weights_path", ctypes.c_char_p), ("weights_offset", ctypes.c_uint64),
        ("weights_size", ctypes.c_uint64), ("allocate", ctypes.c_void_p), ("release", ctypes.c_void_p), ("context", ctypes.c_void_p),
        ("weights_data", ctypes.c_void_p), ("device", ctypes.c_int32),
    ]  # fmt: skip


def test_two_devices(made: Any) -> None:
    """A model on each of two devices, called by two threads that have neither context, with streams of each: the driver refuses a launch on
    another device's stream. Tensors of the other device are refused, and every thread's context is what it was."""
    fake, model = made[0], made[2]
    library = torchsmith.aot.aot_compile(model, (torch.randn(6, 8),))
    lib = ctypes.CDLL(library)
    lib.tsm_last_error.restype = ctypes.c_char_p
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(x))
    handles, wrong = [], list[str]()
    for device in (0, 1):
        handle, config = ctypes.c_void_p(), Config(size=ctypes.sizeof(Config), device=device + 1)
        assert lib.tsm_create(ctypes.byref(config), ctypes.byref(handle)) == 0, lib.tsm_last_error()
        handles.append(handle)

    def run(device: int, place: int, stream: Any) -> int:
        given, keep = device_tensor(fake, x, place + 1)
        outs = (_Tensor * 3)()
        code = int(lib.tsm_run_on(handles[device], ctypes.byref(given), ctypes.c_size_t(1), outs, ctypes.c_size_t(3), stream))
        for out, want in zip(outs, expected if code == 0 else (), strict=False):
            got = np.ctypeslib.as_array(ctypes.cast(out.data, ctypes.POINTER(ctypes.c_float)), tuple(want.shape))
            if out.device != device + 1 or not np.allclose(got, want.numpy(), 1e-5, 1e-6):
                wrong.append(f"device {device}: a result on device {out.device - 1}")
            lib.tsm_release(ctypes.byref(out))
        return code if keep is not None else -1

    def calls_of(device: int) -> None:
        stream = ctypes.c_void_p(fake.fake_stream(device))
        for k in range(20):
            code = run(device, device, stream if k % 2 else None)
            if code:
                wrong.append(f"device {device}: {code} {lib.tsm_last_error()!r}")
        if run(device, 1 - device, None) != 7 or f":{device} expected".encode() not in lib.tsm_last_error():
            wrong.append(f"device {device} took another device's tensor")
        if fake.fake_depth() != 0:
            wrong.append("a context is left behind")

    threads = [threading.Thread(target=calls_of, args=(d,)) for d in (0, 1, 0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    for handle in handles:
        lib.tsm_delete(handle)


def test_errors_of_the_driver(made: Any) -> None:
    """A launch that fails is an error of that call; the next one is right. No memory at load: nothing is left behind."""
    fake, path, model = made
    for name, before in ((b"cuLaunchKernel", 0), (b"cuGraphLaunch", 2)):
        run, x = load_package(path), torch.randn(6, 8)
        with torch.no_grad():
            for _ in range(before):
                check(run(x), model(x))
            fake.fake_fail(name, 1, 719)
            with pytest.raises(PackageError, match="CUDA error 719"):
                run(x)
            check(run(x), model(x))
    fake.fake_fail(b"cuMemAlloc", 1, 2)
    with pytest.raises(PackageError, match="memory"):
        load_package(path)
    assert fake.fake_depth() == 0


def test_the_device_that_is_asked_for(made: Any) -> None:
    _, path, _ = made
    with pytest.raises(PackageError, match="cuda:5"):
        load_package(path, device_index=5)
    run = load_package(path, device_index=1)
    with pytest.raises(PackageError, match="1 expected"):  # torch says that these tensors lie on device 0
        run(torch.randn(6, 8))
    with pytest.raises(ValueError, match="device_index"):
        load_package(path, device_index=-3)


def test_settings() -> None:
    from torchsmith.aot.front import read_archs, read_settings
    from torchsmith.codes import Unsupported

    assert read_archs(("sm_90", 80, "9.0")) == (80, 90) and read_archs(100) == (100,)
    for bad in ({"cuda_archs": (70,)}, {"cuda_archs": "x"}, {"device": "tpu"}):
        with pytest.raises(Unsupported, match="AOT051"):
            read_settings(bad)
