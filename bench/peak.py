"""The processor's multiply-add peak, measured: independent multiply-adds on registers, nothing else.

In: a dtype's name ("float32", "float64", "bfloat16") and a number of threads. Out: GFLOP/s now (a virtual machine's clock changes, so
measure beside the figure that is compared). float32 and float64: the widest fma; bfloat16: AMX tiles where the CPU has them, else dot
products of pairs, else fma.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

from torchsmith.runtime.toolchain import cpu_features, toolchain

PROBE_S = 0.004
_FMA = """
double %(name)s(long n) {
  %(declare)s
  for (long i = 0; i < n; i++) { %(body)s }
  double s = 0; %(sum)s return s;
}
"""
_AMX = """
double peak_bf16(long n) {
  struct { unsigned char palette, row, pad[14]; unsigned short bytes[16]; unsigned char rows[16]; } __attribute__((aligned(64))) c = {1};
  for (int i = 0; i < 8; i++) c.bytes[i] = 64, c.rows[i] = 16;
  __asm__ volatile("ldtilecfg %%0" :: "m"(c));
  __asm__ volatile("%(zero)s");
  for (long i = 0; i < n; i++) __asm__ volatile("%(body)s");
  __asm__ volatile("tilerelease");
  return 0;
}
"""
_ALLOW = "int peak_allow(void) { return (int)syscall(158, 0x1023, 18); }\n"  # arch_prctl(ARCH_REQ_XCOMP_PERM, tile data)


def _vector_text(name: str, instruction: str, width: int, chains: int = 20, element: str = "float") -> str:
    kind = f"typedef {element} {name}_v __attribute__((vector_size({width // 8})));"
    declare = " ".join(f"{name}_v a{i} = {{{i}}};" for i in range(chains)) + f" {name}_v x = {{0.5f}}, y = {{0.1f}};"
    body = " ".join(f'__asm__ volatile("{instruction} %2, %1, %0" : "+v"(a{i}) : "v"(x), "v"(y));' for i in range(chains))
    return kind + _FMA % {"name": name, "declare": declare, "body": body, "sum": " ".join(f"s += a{i}[0];" for i in range(chains))}


@cache
def _amx_is_there() -> bool:
    return " amx_bf16 " in Path("/proc/cpuinfo").read_text().replace("\n", " ")


@cache
def _kernels() -> tuple[ctypes.CDLL, dict[str, tuple[str, int]]]:
    """The library, and dtype -> (function, flops of one iteration)."""
    features = cpu_features()
    width = 512 if "avx512f" in features else 256
    chains = 20 if width == 512 else 12
    text = _vector_text("peak_f32", "vfmadd213ps", width, chains)
    text += _vector_text("peak_f64", "vfmadd213pd", width, chains, "double")
    rows = {"float32": ("peak_f32", chains * width // 32 * 2), "float64": ("peak_f64", chains * width // 64 * 2)}
    if _amx_is_there():
        zero = "".join(f"tilezero %tmm{i}\\n" for i in range(8))
        text += "#include <unistd.h>\n#include <sys/syscall.h>\n" + _ALLOW
        text += _AMX % {"zero": zero, "body": "".join(f"tdpbf16ps %tmm7, %tmm6, %tmm{i}\\n" for i in range(6))}

        rows["bfloat16"] = ("peak_bf16", 6 * 16 * 16 * 32 * 2)
    elif "avx512_bf16" in features:
        text += _vector_text("peak_bf16", "vdpbf16ps", width, chains)
        rows["bfloat16"] = ("peak_bf16", chains * width // 32 * 4)
    else:
        rows["bfloat16"] = rows["float32"]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "peak.c", Path(folder) / "peak.so"
        source.write_text(text)
        flags = [f for f in toolchain().flags if f.startswith("-m")]
        command = [*toolchain().command, "-O1", *flags, "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library)), rows


def peak(dtype: str = "float32", threads: int = 1, probes: int = 3) -> float:
    """GFLOP/s of all threads together, the best of a few short probes."""
    library, rows = _kernels()
    name, flops = rows[dtype]
    call = getattr(library, name)
    call.argtypes, call.restype = (ctypes.c_long,), ctypes.c_double
    if hasattr(library, "peak_allow") and library.peak_allow() != 0 and dtype == "bfloat16":
        raise RuntimeError("the system does not grant AMX tiles")
    count = 2000
    best = 0.0
    while True:
        took = _together(call, count, threads)
        if took >= PROBE_S:
            best = max(best, flops * count * threads / took)
            probes -= 1
            if probes <= 0:
                return best / 1e9
        else:
            count = max(count + 1, int(count * min(10, 1.3 * PROBE_S / took)))


def _together(call: ctypes._CFuncPtr, count: int, threads: int) -> float:
    """Seconds until all threads have run `count` iterations each."""
    others = [threading.Thread(target=call, args=(count,)) for _ in range(threads - 1)]
    began = time.perf_counter()
    for t in others:
        t.start()
    call(count)
    for t in others:
        t.join()
    return time.perf_counter() - began


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for dtype in ("float32", "float64", "bfloat16"):
        print(dtype, *(f"{n} threads: {peak(dtype, n):.0f} GFLOP/s" for n in (1, 2)))
