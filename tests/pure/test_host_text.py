"""Host programs as C: compiled with the system's compiler and run under a host made of ctypes callbacks."""

from __future__ import annotations

import ctypes as C
import re
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from torchsmith.codes import Unsupported
from torchsmith.emit.host import SYMBOL, describe, emit_host
from torchsmith.emit.host_abi import ABI_TEXT
from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Axis, Cast, Const, Expr, Load, Op, Sym, const, op
from torchsmith.ir.kernel import Kernel, Param, Scheduled
from torchsmith.ir.program import (
    Bind,
    BufArg,
    Buffer,
    Check,
    Cond,
    Extern,
    Fresh,
    InputResult,
    Layout,
    Program,
    Repeat,
    SizeResult,
    Symbol,
    ViewResult,
)  # fmt: skip
from torchsmith.options import Options
from torchsmith.schedule.memory.plan import plan

I64 = C.c_int64
PI64 = C.POINTER(I64)


class Tensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("sizes", PI64), ("strides", PI64), ("handle", C.c_void_p)]


class Launch(C.Structure):
    _fields_ = [("fn", C.CFUNCTYPE(None, C.POINTER(C.c_void_p), PI64, I64, I64)), ("bufs", C.POINTER(C.c_void_p)), ("syms", PI64)]


PT = C.POINTER(Tensor)
SERVICES = {
    "alloc_result": C.CFUNCTYPE(C.c_int32, C.c_void_p, C.c_int32, C.c_int32, C.c_int32, PI64, PI64, PT),
    "take_workspace": C.CFUNCTYPE(C.c_void_p, C.c_void_p, I64),
    "give_workspace": C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, I64),
    "parallel_for": C.CFUNCTYPE(None, C.c_void_p, C.POINTER(Launch), I64, I64),
    "extern_call": C.CFUNCTYPE(C.c_int32, C.c_void_p, C.c_int32, PT, PI64, PT),
    "conform": C.CFUNCTYPE(C.c_int32, C.c_void_p, PT, C.c_int32, PI64, PI64),
    "release": C.CFUNCTYPE(None, C.c_void_p, PT),
    "error": C.CFUNCTYPE(None, C.c_void_p, C.c_int32, C.c_char_p),
}


class HostTable(C.Structure):
    _fields_ = [("abi", C.c_uint32), ("self", C.c_void_p), *((n, t) for n, t in SERVICES.items())]


class Entry(C.Structure):
    _fields_ = [
        ("abi", C.c_uint32), ("n_inputs", C.c_int32), ("n_scalars", C.c_int32), ("n_results", C.c_int32), ("n_result_syms", C.c_int32), ("state_bytes", I64),
        ("workspace", C.CFUNCTYPE(I64, PT, PI64)), ("prepare", C.c_void_p),
        ("run", C.CFUNCTYPE(C.c_int32, C.POINTER(HostTable), PT, PI64, C.c_void_p, PT, PI64)),
    ]  # fmt: skip


class Array:
    """Floats (or other items) in memory, with sizes and strides."""

    def __init__(self, values: Sequence[Any], shape: Sequence[int] | None = None, ctype: Any = C.c_float) -> None:
        self.data = (ctype * max(1, len(values)))(*values)
        self.shape = tuple(shape if shape is not None else (len(values),))
        steps, step = [], 1
        for n in reversed(self.shape):
            steps.insert(0, step)
            step *= n
        self.sizes, self.strides = (I64 * (len(self.shape) + 1))(*self.shape), (I64 * (len(self.shape) + 1))(*steps)

    def tensor(self, handle: int = 0) -> Tensor:
        return Tensor(C.cast(self.data, C.c_void_p), self.sizes, self.strides, handle)


class Host:
    """Records what native code asks for. externs: number -> function(args tensors, numbers, outs)."""

    def __init__(self, externs: Any = None, no_memory: bool = False) -> None:
        self.log: list[Any] = []
        self.results: dict[int, Any] = {}
        self.live: dict[int, Any] = {}
        self.errors: list[bytes] = []
        self.externs, self.no_memory = externs, no_memory
        self.table = HostTable(abi=1, self=None)
        for name, kind in SERVICES.items():
            setattr(self.table, name, kind(getattr(self, name)))

    def alloc_result(self, _: Any, index: int, dtype: int, ndim: int, sizes: Any, strides: Any, out: Any) -> int:
        shape, steps = sizes[:ndim], strides[:ndim]
        self.log.append(("alloc", index, dtype, shape, steps))
        room = C.create_string_buffer(8 * (1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True) if n)) + 64)
        self.results[index] = room
        out[0].data, out[0].handle = C.addressof(room), 1000 + index
        return 0

    def take_workspace(self, _: Any, n: int) -> int | None:
        if self.no_memory:
            return None
        room = C.create_string_buffer(n + 64)
        at = (C.addressof(room) + 63) // 64 * 64
        self.live[at] = room
        return at

    def give_workspace(self, _: Any, at: int, n: int) -> None:
        del self.live[at]

    def parallel_for(self, _: Any, launch: Any, n: int, grain: int) -> None:
        self.log.append(("parallel", n, grain))
        fn = launch[0].fn
        for lo in range(0, n, grain):
            fn(launch[0].bufs, launch[0].syms, lo, min(n, lo + grain))

    def extern_call(self, _: Any, call: int, args: Any, numbers: Any, outs: Any) -> int:
        self.log.append(("extern", call))
        return self.externs(self, call, args, numbers, outs) or 0

    def conform(self, _: Any, given: Any, ndim: int, sizes: Any, strides: Any) -> int:
        self.log.append(("conform", sizes[:ndim], strides[:ndim]))
        return 0

    def release(self, _: Any, given: Any) -> None:
        self.log.append(("release", given[0].handle))

    def error(self, _: Any, kind: int, text: bytes) -> None:
        self.errors.append(text)


def buffer(name: str, *shape: Expr | int, role: str = "temp", d: dt.DType = dt.f32, storage_of: str | None = None) -> Buffer:
    sizes = tuple(const(s) if isinstance(s, int) else s for s in shape)
    strides: list[Expr] = []
    step: Expr = const(1)
    for e in reversed(sizes):
        strides.insert(0, step)
        step = step * e
    return Buffer(name, d, sizes, Layout(tuple(strides), const(0)), role, storage_of)  # type: ignore[arg-type]


def unit(name: str, src: Sequence[Buffer], dst: Buffer, n: Expr | int, grain: int = 1 << 40, syms: Sequence[Sym] = ()) -> Kernel:
    params = tuple(Param(b.name, b.dtype, b.shape, b.layout, b is dst) for b in (*src, dst))  # type: ignore[arg-type]
    return Kernel(name, params, tuple(syms), ((Axis("g"), const(n) if isinstance(n, int) else n),), const(grain), (), ())


def compiled(tmp_path: Path, buffers: Sequence[Buffer], body: Sequence[Any], results: Sequence[Any], kernels: dict[str, str],
             symbols: Sequence[Symbol] = (), inputs: Sequence[str] | None = None, **kw: Any) -> tuple[Entry, dict[str, Any]]:  # fmt: skip
    """kernels: C expression over i, x (first buffer), z (second) by kernel name."""
    names = tuple(b.name for b in buffers if b.role == "input") if inputs is None else tuple(inputs)
    program = Program("g", tuple(symbols), names, {b.name: b for b in buffers}, (), tuple(results), **kw)
    made = plan(Scheduled(program, tuple(body)), Options())
    text = emit_host(made, [f"k_{k.name}" for k in made.kernels])
    assert "#include" not in text
    for k in {k.name: k for k in made.kernels}.values():
        last = len(k.params) - 1
        lines = "const float *x = b[0]; const float *z = b[1]; (void)x; (void)z; (void)y;"
        text += (
            f"TS_HIDDEN void k_{k.name}(void *const *b, const int64_t *y, int64_t lo, int64_t hi) {{ {lines} float *o = b[{last}];"
            f" for (int64_t i = lo; i < hi; i++) o[i] = {kernels[k.name]}; }}\n"
        )
    (tmp_path / "h.c").write_text(text)
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-Wno-parentheses", "-fPIC", "-shared", "-fvisibility=hidden", "-std=c11"]
    subprocess.run(["cc", *flags, "h.c", "-o", "h.so", "-lm"], cwd=tmp_path, check=True)
    library = C.CDLL(str(tmp_path / "h.so"))
    KEEP.append(library)
    return Entry.in_dll(library, SYMBOL), describe(made)


KEEP: list[Any] = []


def run(entry: Entry, host: Host, tensors: Sequence[Tensor], scalars: Sequence[int] = ()) -> tuple[int, Any, list[int]]:
    results = (Tensor * (entry.n_results + 1))()
    out = (I64 * (entry.n_result_syms + 1))()
    rc = entry.run(C.byref(host.table), (Tensor * (len(tensors) + 1))(*tensors), (I64 * (len(scalars) + 1))(*scalars), None, results, out)
    assert not host.live, "a workspace was not given back"
    return rc, results, list(out)[: entry.n_result_syms]


def floats(room: Any, n: int) -> list[float]:
    return list((C.c_float * n).from_buffer(room))


def test_abi_text_is_the_header() -> None:
    header = (Path(__file__).parents[2] / "csrc" / "torchsmith.h").read_text()
    start, end = header.index("#define TS_ABI"), header.rindex("#endif")

    def tokens(text: str) -> list[str]:
        return re.findall(r"\w+|[^\s\w]", re.sub(r"/\*.*?\*/", " ", text, flags=re.S))

    assert tokens(ABI_TEXT[ABI_TEXT.index("#define TS_ABI") :]) == tokens(header[start:end])


def test_chain_through_the_arena(tmp_path: Path) -> None:
    x, t, u, y = buffer("x", 5, role="input"), buffer("t", 5), buffer("u", 5), buffer("y", 5, role="output")
    body = [unit("a", [x], t, 5), unit("b", [t], u, 5, grain=2), unit("c", [u], y, 5)]
    entry, _ = compiled(tmp_path, [x, t, u, y], body, [Fresh("y")], {"a": "x[i] + 1", "b": "x[i] * 2", "c": "-x[i]"})
    host = Host()
    rc, results, _ = run(entry, host, [Array([1, 2, 3, 4, 5]).tensor()])
    assert rc == 0 and floats(host.results[0], 5) == [-4, -6, -8, -10, -12]
    assert host.log == [("parallel", 5, 2), ("alloc", 0, 1, [5], [1])] and results[0].handle == 1000
    assert entry.workspace((Tensor * 1)(), (I64 * 1)()) == 128


def test_no_memory_is_an_error(tmp_path: Path) -> None:
    x, t, y = buffer("x", 5, role="input"), buffer("t", 5), buffer("y", 5, role="output")
    entry, _ = compiled(tmp_path, [x, t, y], [unit("a", [x], t, 5), unit("b", [t], y, 5)], [Fresh("y")], {"a": "x[i]", "b": "x[i]"})
    assert run(entry, Host(no_memory=True), [Array([1] * 5).tensor()])[0] == 3


S, N, F = Sym("s0"), Sym("n-1"), Sym("f", dt.f64)


def test_symbols_sizes_and_scalars(tmp_path: Path) -> None:
    x, t, y = buffer("x", S, role="input"), buffer("t", S), buffer("y", S, 2, role="output")
    symbols = [Symbol(S, ("size", 0, 0)), Symbol(N, ("scalar", 1)), Symbol(F, ("scalar", 2))]
    results = [
        Fresh("y"), SizeResult(S * 3 + N), SizeResult(F), InputResult(0), ViewResult(0, (S // 2,), (const(2),), const(1), dt.f32),
        ViewResult("y", (S,), (const(2),), const(1), dt.f32), Fresh("y"), SizeResult(op("lt", S, const(6))),
    ]  # fmt: skip
    body = [unit("a", [x], t, S, syms=(N, F)), unit("b", [t], y, S * 2)]
    entry, manifest = compiled(
        tmp_path, [x, t, y], body, results, {"a": "x[i] + y[0] + ((const double *)y)[1]", "b": "x[i / 2]"}, symbols, ["x", "", ""]
    )
    bits = struct.unpack("q", struct.pack("d", 0.5))[0]
    for n in (6, 0, 3):
        host = Host()
        rc, _, out = run(entry, host, [Array(range(n)).tensor(), Tensor(), Tensor()], [7, bits])
        assert rc == 0 and host.log[0][:4] == ("alloc", 0, 1, [n, 2])
        assert floats(host.results[0], 2 * n) == [i // 2 + 7.5 for i in range(2 * n)]
        assert out == [3 * n + 7, bits, n // 2, 2, 1, n, 2, 1, n < 6]
    kinds = [r["kind"] for r in manifest["results"]]
    assert kinds == ["fresh", "number", "number", "input", "view", "view", "same", "number"]
    assert [i["kind"] for i in manifest["inputs"]] == ["tensor", "number", "number"] and manifest["inputs"][0]["measured"]


def test_sizes_that_grow_out_of_each_other_are_computed_once(tmp_path: Path) -> None:
    x, y = buffer("x", S, role="input"), buffer("y", S, role="output")
    size: Expr = S
    for _ in range(40):
        size = (size + 1) // 2 + size
    entry, _ = compiled(tmp_path, [x, y], [unit("a", [x], y, S)], [Fresh("y"), SizeResult(size)], {"a": "x[i]"}, [Symbol(S, ("size", 0, 0))])
    want = 3
    for _ in range(40):
        want = (want + 1) // 2 + want
    assert run(entry, Host(), [Array([1, 2, 3]).tensor()])[2] == [want]
    assert len((tmp_path / "h.c").read_text()) < 40000


def test_index_arithmetic_is_pythons(tmp_path: Path) -> None:
    a, b = Sym("a"), Sym("b")
    forms: list[tuple[Expr, Any]] = [
        (Op("floordiv", dt.index, (a, b)), lambda a, b: a // b),
        (Op("mod", dt.index, (a, b)), lambda a, b: a % b),
        (Op("truncdiv", dt.index, (a, b)), lambda a, b: int(a / b)),
        (Op("min", dt.index, (a, b)), min),
        (Op("max", dt.index, (a, b)), max),
        (Op("abs", dt.index, (a,)), lambda a, b: abs(a)),
        (Op("where", dt.index, (op("le", a, b), a, b)), lambda a, b: a if a <= b else b),
        (Cast(dt.i8, a * 100), lambda a, b: (a * 100 + 128) % 256 - 128),
        (Op("add", dt.i32, (Cast(dt.i32, a), Const(dt.i32, 2**31 - 1))), lambda a, b: (a + 2**31 - 1 + 2**31) % 2**32 - 2**31),
        (Cast(dt.index, Op("floor", dt.f64, (Cast(dt.f64, a) * Const(dt.f64, 0.3),))), lambda a, b: int(a * 0.3 // 1)),
        (const(-(2**63)), lambda a, b: -(2**63)),
    ]  # fmt: skip
    symbols = [Symbol(a, ("scalar", 0)), Symbol(b, ("scalar", 1))]
    entry, _ = compiled(tmp_path, [], [], [SizeResult(e) for e, _ in forms], {}, symbols, ["", ""])
    for p in (-7, -6, -1, 0, 1, 6, 7):
        for q in (-3, -2, 2, 3):
            assert run(entry, Host(), [Tensor(), Tensor()], [p, q])[2] == [f(p, q) for _, f in forms]


def test_checks_stop_before_write_backs(tmp_path: Path) -> None:
    x, ok, t = buffer("x", 3, role="input"), buffer("ok", role="input", d=dt.bool_), buffer("t", 3)
    body = [unit("a", [x], t, 3), Check(Load("ok", dt.bool_, ()), "index", 'out of "range"? \\ é')]
    entry, manifest = compiled(tmp_path, [x, ok, t], body, [], {"a": "x[i] + 1", "write_back_x": "x[i]"}, write_backs=(("x", "t"),))
    data = Array([1, 2, 3])
    assert manifest["inputs"][0]["written"] and not manifest["inputs"][1]["written"]
    for good in (0, 1):
        host = Host()
        rc, _, _ = run(entry, host, [data.tensor(), Array([good], (), C.c_uint8).tensor()])
        assert rc == 1 - good and host.errors == ([] if good else ['index: out of "range"? \\ é'.encode()])
        assert data.data[0] == (2 if good else 1)


def give(host: Host, outs: Any, i: int, array: Array, handle: int) -> None:
    KEEP.append(array)
    outs[i] = array.tensor(handle)


def test_externs_given_planned_and_failing(tmp_path: Path) -> None:
    u = Sym("u0")
    x, g, t, y = buffer("x", 4, role="input"), buffer("g", u), buffer("t", 4), buffer("y", u, role="output")
    body = [
        unit("a", [x], t, 4),
        Extern("aten.one.default", (BufArg("x"), BufArg("t"), (2, S), 1.5), (("alpha", F),), ("g", ""), (), ((u, 0, 0),), "as_given", "python"),
        unit("b", [g], y, u),
        Extern("aten.two.default", (BufArg("g"),), (), ("t",), returned="planned"),
    ]
    symbols = [Symbol(S, ("size", 0, 0)), Symbol(u, ("bound",)), Symbol(F, ("scalar", 1))]
    entry, manifest = compiled(
        tmp_path, [x, g, t, y], body, [Fresh("y"), Fresh("g"), SizeResult(u)], {"a": "x[i]", "b": "x[i] * 2"}, symbols, ["x", ""]
    )
    row = manifest["externs"][0]
    assert row["args"] == [["tensor", 0], ["tensor", 1], ["list", 2, ["number", 0, "index"]], 1.5]
    assert row["kwargs"] == {"alpha": ["number", 1, "f64"]} and row["outs"] == [["f32", 1], None]

    def externs(host: Host, call: int, args: Any, numbers: Any, outs: Any) -> int:
        if call == 0:
            assert args[0].handle == 77 and not args[1].handle and args[1].sizes[0] == 4 and numbers[0] == 4
            assert struct.unpack("d", struct.pack("q", numbers[1]))[0] == 0.25
            give(host, outs, 0, Array([5, 6, 7]), 501)
            give(host, outs, 1, Array([1]), 502)
            return 0
        return fail

    bits = struct.unpack("q", struct.pack("d", 0.25))[0]
    for fail in (0, 2):
        host = Host(externs)
        rc, results, out = run(entry, host, [Array([1, 2, 3, 4]).tensor(77), Tensor()], [bits])
        assert rc == fail
        released = [h for k, *h in host.log if k == "release"]
        if fail:
            assert released == [[502], [501]] and not results[1].handle
        else:
            assert floats(host.results[0], 3) == [10, 12, 14] and results[1].handle == 501 and out == [3] and released == [[502]]


def test_strides_that_differ_are_conformed(tmp_path: Path) -> None:
    x, g = buffer("x", 2, 3, role="input"), buffer("g", 2, 3)
    entry, _ = compiled(tmp_path, [x, g], [Extern("aten.one.default", (BufArg("x"),), (), ("g",))], [Fresh("g")], {})

    def externs(host: Host, call: int, args: Any, numbers: Any, outs: Any) -> None:
        array = Array(range(6), (2, 3))
        if transposed:
            array.strides[0], array.strides[1] = 1, 2
        give(host, outs, 0, array, 9)

    for transposed in (False, True):
        host = Host(externs)
        run(entry, host, [Array(range(6), (2, 3)).tensor()])
        assert (("conform", [2, 3], [3, 1]) in host.log) == transposed


def test_branches_loops_and_sizes_bound_inside(tmp_path: Path) -> None:
    i, n = Sym("i"), Sym("n")
    x, p, t, y = buffer("x", 3, role="input"), buffer("p", role="input", d=dt.bool_), buffer("t", 3), buffer("y", 3, role="output")
    k = buffer("k", role="input", d=dt.i32)
    q = buffer("q", n)
    pred = Load("p", dt.bool_, ())
    body = [
        Cond(pred, (unit("a", [x], t, 3),), (unit("b", [x], t, 3),)),  # type: ignore[arg-type]
        unit("c", [t], y, 3),
        Repeat(i, Cast(dt.index, Load("k", dt.i32, ())), (unit("d", [t, y], y, 3, syms=(i,)),)),  # type: ignore[arg-type]
        Bind(n, Cast(dt.index, Load("k", dt.i32, ())) + 1),
        unit("e", [t], q, n),
    ]
    texts = {"a": "x[i] + 1", "b": "x[i] - 1", "c": "x[i]", "d": "z[i] + y[0]", "e": "0"}
    entry, _ = compiled(tmp_path, [x, p, k, t, y, q], body, [Fresh("y"), SizeResult(n)], texts)
    for truth in (0, 1):
        host = Host()
        inputs = [Array([1, 2, 3]).tensor(), Array([truth], (), C.c_uint8).tensor(), Array([4], (), C.c_int32).tensor()]
        rc, _, out = run(entry, host, inputs)
        shift = 1 if truth else -1
        assert rc == 0 and out == [5] and floats(host.results[0], 3) == [v + shift + 6 for v in (1, 2, 3)]


def test_what_c_cannot_say_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="EMI101"):
        compiled(tmp_path, [], [], [SizeResult(Op("lgamma", dt.f64, (F,)))], {}, [Symbol(F, ("scalar", 0))], [""])
