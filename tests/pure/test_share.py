"""Kernels that differ in numbers only become one, and still compute what each of them computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from emit_harness import launch, value
from program_kit import Kit, f, random

from torchsmith.emit.c import emit_kernel
from torchsmith.emit.host import packing_key
from torchsmith.ir import dtype as dt
from torchsmith.ir.blocks import Contract
from torchsmith.ir.expr import Const, Expr, Load, Op, const, op, walk
from torchsmith.ir.kernel import expressions
from torchsmith.ir.plan import Launch, Plan
from torchsmith.ir.verify import verify_plan
from torchsmith.options import Options
from torchsmith.schedule.fusion.fuse import fuse
from torchsmith.schedule.kernels import form_kernels
from torchsmith.schedule.memory.plan import plan
from torchsmith.schedule.share import share_kernels


def planned(kit: Kit, *results: str, consts: tuple[str, ...] = ()) -> Plan:
    program = replace(kit.program(*results), consts=consts)
    got = plan(form_kernels(fuse(program, Options()), Options()), Options())
    verify_plan(got)
    return got


def launches(p: Plan) -> list[Launch]:
    return [s for s in (*p.prepare, *p.run) if isinstance(s, Launch)]


def products(*sizes: tuple[int | str, int, int], relu: tuple[bool, ...] = (), constant: bool = True) -> Plan:
    """y_i[m, n] = x_i[m, k] @ w_i[k, n], with a relu after some; w_i constant or changing."""
    kit = Kit()
    for i, (m, n, k) in enumerate(sizes):
        x, w = kit.input(f"x{i}", (m, k)), kit.input(f"w{i}", (k, n))
        fold = lambda a, b, x=x, w=w, k=k: kit.fold((k,), 0.0, lambda r: op("mul", x(a, r), w(r, b)))
        kit.stage(f"y{i}", (m, n), (lambda a, b, g=fold: op("max", g(a, b), f(0.0))) if i in range(len(relu)) and relu[i] else fold, out=True)
    consts = tuple(f"w{i}" for i in range(len(sizes))) if constant else ()
    return planned(kit, *(f"y{i}" for i in range(len(sizes))), consts=consts)


def contractions(p: Plan) -> list[int]:
    return [s.kernel for s in launches(p) if p.kernels[s.kernel].name == "contraction"]


def agree(p: Plan, wants: dict[str, Callable[[dict[str, np.ndarray]], np.ndarray]], seed: int) -> None:
    """Run every launch of `p` on random inputs and compare."""
    arrays: dict[str, np.ndarray] = {}
    for name, b in p.buffers.items():
        shape = tuple(int(e.value) for e in b.shape if isinstance(e, Const))
        arrays[name] = random(shape, seed) if b.role == "input" else np.full(shape, np.nan, np.float32)
    for s in launches(p):
        kernel = p.kernels[s.kernel]
        renamed = {q.buf: arrays[actual].reshape(-1) for q, actual in zip(kernel.params, s.bufs, strict=True)}
        values: dict[str, Expr | int] = {sym.name: int(v.value) for sym, v in zip(kernel.syms, s.syms, strict=True) if isinstance(v, Const)}
        launch(kernel, renamed, values, chunks=2)
    for name, want in wants.items():
        np.testing.assert_allclose(arrays[name], want(arrays), rtol=1e-4, atol=1e-3)


def convolution(x: str, w: str, stride: int) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """3x3, padded by 1, of an image [h, w, channels]."""

    def run(arrays: dict[str, np.ndarray]) -> np.ndarray:
        image = np.pad(arrays[x].astype(np.float64), ((1, 1), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(image, (3, 3), (0, 1))[::stride, ::stride]
        return np.asarray(np.einsum("hwcpq,pqcn->hwn", windows, arrays[w]))

    return run


def test_sizes_do_not_make_kernels() -> None:
    before = products((28, 64, 20), (56, 128, 33), (14, 64, 7))
    after = share_kernels(before, Options())
    verify_plan(after)
    assert len(set(contractions(before))) == 3 and len(set(contractions(after))) == 1
    assert len({emit_kernel(k) for k in after.kernels}) == len(after.kernels) < len(before.kernels)
    one = after.kernels[contractions(after)[0]]
    assert one.syms and all(len(s.syms) == len(after.kernels[s.kernel].syms) for s in launches(after))
    assert all(lo >= 1 and hi is not None for _, lo, hi in one.ranges)


def test_hints_do_not_make_kernels() -> None:
    """Rows that the cache keeps, and rows that the next tile should be asked for."""
    before = products((112, 512, 256), (8064, 512, 256))
    after = share_kernels(before, Options())
    verify_plan(after)
    hints = {s.prefetch_rows for k in before.kernels for s in k.body if isinstance(s, Contract)}
    assert len(hints) == 2 and len(set(contractions(after))) == 1


def test_structure_does() -> None:
    after = share_kernels(products((28, 64, 20), (28, 64, 21), (28, 64, 22), relu=(True, False, True)), Options())
    assert len(set(contractions(after))) == 2


def test_strides_padding_and_rows_do_not_make_kernels() -> None:
    """Convolutions over channels-last images: stride 1 and 2, few and many channels (long sums), each operand swept, windows that reach
    into the padding behind the image and that do not."""
    kit = Kit()
    sizes = ((28, 1, 28, 24, 64), (28, 2, 55, 24, 64), (14, 1, 14, 96, 512), (14, 2, 27, 208, 64), (14, 2, 28, 32, 96))
    for j, (m, stride, side, k, n) in enumerate(sizes):  # outputs, stride, inputs, channels
        _, w = kit.input(f"x{j}", (side, side, k)), kit.input(f"w{j}", (3, 3, k, n))

        def value(a: Expr, b: Expr, c: Expr, j=j, w=w, side=side, stride=stride, k=k) -> Expr:  # type: ignore[no-untyped-def]
            def update(p: Expr, q: Expr, r: Expr) -> Expr:
                h, v = a * stride + p - 1, b * stride + q - 1
                inside = op("and", op("and", op("ge", h, const(0)), op("lt", h, const(side))), op("and", op("ge", v, const(0)), op("lt", v, const(side))))
                return op("mul", Load(f"x{j}", dt.f32, (h, v, r), inside, f(0.0)), w(p, q, r, c))

            return kit.fold((3, 3, k), 0.0, update)

        kit.stage(f"y{j}", (m, m, n), value, out=True)
    before = planned(kit, *(f"y{j}" for j in range(len(sizes))))
    after = share_kernels(before, Options())
    verify_plan(after)
    assert len(set(contractions(after))) == 1
    agree(after, {f"y{j}": convolution(f"x{j}", f"w{j}", stride) for j, (_, stride, *_) in enumerate(sizes)}, seed=3)


def test_what_is_common_stays_a_number() -> None:
    same = share_kernels(products((28, 64, 20), (28, 64, 20)), Options())
    assert not same.kernels[contractions(same)[0]].syms


def test_symbolic_sizes_are_computed_by_the_host() -> None:
    after = share_kernels(products(("s0", 64, 20), ("s0", 64, 40)), Options())
    kernels = {after.kernels[i].name: after.kernels[i] for i in contractions(after)}
    assert len(set(contractions(after))) == 1
    assert all(s.name.startswith("n") for k in kernels.values() for s in k.syms)


@pytest.mark.parametrize("width", [256, 100, 7])
@pytest.mark.parametrize("outer", [0, 1])
def test_divisions_cancel_before_sizes_are_arguments(outer: int, width: int) -> None:
    """y[i, j, k] = max(x[i + 1, j, k], 0), or x[i, j + 1, k] where j is outermost in memory, over sizes that are not known: one loop."""
    kit, order = Kit(), (outer, 1 - outer, 2)
    shift = (1 - outer, outer)
    x = kit.input("x", ("c", "b", width) if outer == 0 else ("a", "c", width), order=order)
    kit.input("z", ("a", "b"))
    kit.stage("y", ("a", "b", width), lambda i, j, k: op("max", x(i + shift[0], j + shift[1], k), f(0.0)), order=order, out=True)
    before = planned(kit, "y")
    after = share_kernels(before, Options())
    verify_plan(after)
    (step,) = launches(after)
    kernel = after.kernels[step.kernel]
    divisions = [e for s in kernel.body for e in walk(*expressions(s)) if isinstance(e, Op) and e.name in ("floordiv", "mod")]
    assert not divisions and kernel.params[0].shape == (const(1),)
    for a, b in ((1, 1), (3, 5), (40, 30)):
        env = {"a": a, "b": b, "c": (b if outer else a) + 1}
        data = random((env["c"], a if outer else b, width), 0)
        got = np.full(a * b * width, np.nan, np.float32)
        given = dict(zip((s.name for s in kernel.syms), (value(e, env) for e in step.syms), strict=True))
        launch(kernel, {p.buf: {"x": data, "y": got}[n] for p, n in zip(kernel.params, step.bufs, strict=True)}, given, chunks=2)
        np.testing.assert_array_equal(got, np.maximum(data[1:], 0).reshape(-1))


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_shared_kernel_computes_what_each_did(seed: int, constant: bool) -> None:
    rng = np.random.default_rng(seed)
    sizes = [tuple(int(v) for v in rng.integers(1, 70, 3)) for _ in range(3)]
    p = share_kernels(products(*sizes, constant=constant), Options())
    wants = {f"y{i}": lambda a, i=i: a[f"x{i}"].astype(np.float64) @ a[f"w{i}"] for i in range(3)}  # type: ignore[misc]
    agree(p, wants, seed)


def test_operands_whose_k_is_divided_are_told_apart_by_arguments() -> None:
    """y[m, n] = sum over k of x[m, k] * w[k // 4, k % 4, n], w read where it lies: k's step is a sum only while w's strides are known."""
    kit = Kit()
    for j, n in enumerate((64, 128)):
        x, w = kit.input(f"x{j}", (16, 16)), kit.input(f"w{j}", (4, 4, n))

        def value(a: Expr, b: Expr, x=x, w=w) -> Expr:  # type: ignore[no-untyped-def]
            return kit.fold((16,), 0.0, lambda k: op("mul", x(a, k), w(op("floordiv", k, const(4)), op("mod", k, const(4)), b)))

        kit.stage(f"y{j}", (16, n), value, out=True)
    after = share_kernels(planned(kit, "y0", "y1"), Options())
    verify_plan(after)
    assert len(set(contractions(after))) == 1
    agree(after, {f"y{j}": lambda a, j=j: a[f"x{j}"].astype(np.float64) @ a[f"w{j}"].reshape(16, -1) for j in range(2)}, seed=1)  # type: ignore[misc]


def test_packing_with_other_arguments_is_other_packing() -> None:
    """Two graphs share what they prepared where their keys are equal."""

    def key(*sizes: tuple[int, int, int]) -> str:
        p = share_kernels(products(*sizes), Options())
        return packing_key(p, [f"k{i}" for i in range(len(p.kernels))])

    first, second = (28, 33, 20), (28, 40, 20)
    assert key(first, second) == key(first, second)
    assert key(first, second) != key(second, first)
