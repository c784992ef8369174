"""Generated C and the fixed C of packages compile without a warning with every compiler that this machine has."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import torchsmith
from torchsmith import pipeline
from torchsmith.codes import Unsupported
from torchsmith.emit.clang import CLANG
from torchsmith.runtime.build import MACRO
from torchsmith.runtime.model_library import ENGINE, sources
from torchsmith.runtime.toolchain import FEATURES, toolchain

COMPILERS = [c for c in ("gcc", "gcc-12", "gcc-13", "gcc-14", "gcc-15", *(f"clang-{n}" for n in range(14, 22)), "clang") if shutil.which(c)]
STRICT = ["-fsyntax-only", "-Werror", "-Wall", "-Wextra", "-Wno-unused", "-fwrapv", "-fno-strict-aliasing"]
R = torch.randn


def programs():
    """Several kinds of kernels in each of a few dtypes."""
    for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x, y, w, q = R(40, 65).to(d), R(2, 32, 9, 9).to(d), R(32, 32, 3, 3).to(d), R(1, 2, 50, 32).to(d)
        yield lambda x: (x.softmax(-1), x.max(1), x.t().contiguous(), F.gelu(x) + x.erf()), (x,)
        yield lambda x: x @ x.t(), (x,)
        yield lambda y, w: F.conv2d(y, w, padding=1).relu(), (y, w)
        yield lambda y, w: F.conv2d(y, w[:, :4], padding=1, groups=8), (y, w)
        yield lambda y: (F.max_pool2d(y, 2), F.interpolate(y, scale_factor=2.0, mode="bilinear")), (y,)
        yield lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (q,)
        yield torch.nn.Linear(64, 48).to(d), (R(7, 64).to(d),)
    for d in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
        x = (R(40, 65) * 3).to(d)
        yield lambda x: (x.sum(1), x.max(1), x.float() * 2, torch.where(x > 0, x, x.flip(0)), x.cumsum(0), x.sort(1)), (x,)
    yield lambda x: x.sum(), (torch.zeros(1, dtype=torch.int8).expand(2**31 + 100),)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder, made = tmp_path_factory.mktemp("texts"), []
    real = pipeline.compile_source

    def collect(fg, options, name, inputs=()):
        source = real(fg, options, name, inputs)
        made.append(source)
        raise Unsupported("LOW001")

    pipeline.compile_source = collect
    try:
        with torch.no_grad():
            for f, args in programs():
                torchsmith.compile(f, options={"force_disable_caches": True})(*args) if args[0].numel() < 1 << 20 else None
                if args[0].numel() >= 1 << 20:  # only its text is wanted
                    with pytest.raises(Unsupported):
                        torchsmith.compile(f, fullgraph=True, options={"force_disable_caches": True, "libtorch": "forbid"})(*args)
    finally:
        pipeline.compile_source = real
    assert len(made) > 30
    for i, s in enumerate(made):
        (folder / f"host{i}.c").write_text(s.host)
        for k in s.kernels:
            (folder / f"kernel{abs(hash(k))}.c").write_text(k)
    return folder


@pytest.mark.skipif(platform.machine() != "x86_64", reason="vector code of x86-64")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_generated_code(texts: Path, compiler: str) -> None:
    flags = [f for f in toolchain().flags if f in FEATURES.values()]
    files = sorted(map(str, texts.glob("*.c")))
    done = subprocess.run([compiler, *STRICT, *flags, f"-D{MACRO}=tsk_x", *files], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_fixed_code(compiler: str) -> None:
    root = sources()
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wno-unused-parameter", f"-I{root}", f"-I{root / 'include'}", f"-I{root / 'native'}"]
    done = subprocess.run([compiler, *STRICT, *flags, *(str(root / f) for f in ENGINE)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


@pytest.mark.skipif("avx512f" not in toolchain().features, reason="64-byte vectors")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_what_clang_calls_gccs_builtins(compiler: str, tmp_path: Path) -> None:
    """Each definition compiles, whether or not a kernel of today uses it."""
    from torchsmith.emit.clang import clang_names

    text = clang_names("".join(f"{name}(" for name in CLANG))
    (tmp_path / "all.c").write_text(text + "int ts_nothing;\n")
    flags = [f for f in toolchain().flags if f in FEATURES.values()]
    done = subprocess.run([compiler, *STRICT, *flags, str(tmp_path / "all.c")], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
