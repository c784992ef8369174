"""Small Programs for tests of scheduling and printing: stages written in one line each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchsmith.ir import dtype as dt
from torchsmith.ir.dtype import DType
from torchsmith.ir.expr import Axis, Const, Expr, Fold, Load, Sym, Var, const, op
from torchsmith.ir.program import Buffer, Element, Fresh, Layout, Program, Stage, Store, Symbol
from torchsmith.schedule.memory.layouts import dense

F32 = dt.f32
Value = Callable[..., Expr]


def size(n: int | str) -> Expr:
    return Sym(n) if isinstance(n, str) else const(n)


class Kit:
    """Collects buffers and stages; `program()` closes it."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.body: list[Element] = []
        self.inputs: list[str] = []
        self.folds = 0

    def input(self, name: str, shape: tuple[int | str, ...], dtype: DType = F32, order: tuple[int, ...] | None = None) -> Callable[..., Expr]:
        extents = tuple(size(n) for n in shape)
        self.buffers[name] = Buffer(name, dtype, extents, dense(extents, order), "input")
        self.inputs.append(name)
        return self.load(name)

    def load(self, name: str) -> Callable[..., Expr]:
        b = self.buffers[name]
        return lambda *index: Load(name, b.dtype, tuple(const(i) if isinstance(i, int) else i for i in index))

    def stage(self, name: str, shape: tuple[int | str, ...], value: Value, *, out: bool = False, order: tuple[int, ...] | None = None) -> Callable[..., Expr]:
        """name[i...] = value(i...)"""
        extents = tuple(size(n) for n in shape)
        axes = tuple(Axis(f"i{k}") for k in range(len(shape)))
        v = value(*axes)
        layout = dense(extents, order) if out else None
        self.buffers[name] = Buffer(name, v.dtype, extents, layout, "output" if out else "temp")
        self.body.append(Stage(tuple(zip(axes, extents, strict=True)), (Store(name, axes, v),), origin=name))
        return self.load(name)

    def fold(self, extents: tuple[int | str, ...], init: float, step: Callable[..., Expr], kind: str = "add", dtype: DType = F32) -> Expr:
        """Reduce step(axes...) with `kind` (add, max, min, mul)."""
        n = self.folds
        self.folds += 1
        axes = tuple((Axis(f"r{n}_{k}"), size(e)) for k, e in enumerate(extents))
        a, b = Var(f"f{n}_a0", dtype), Var(f"f{n}_b0", dtype)
        return Fold(axes, (Const(dtype, init),), (op(kind, a, step(*(x for x, _ in axes))),), (op(kind, a, b),), prefix=f"f{n}_")

    def program(self, *results: str) -> Program:
        symbols, seen = [], set()
        for n, name in enumerate(self.inputs):
            for d, e in enumerate(self.buffers[name].shape):
                if isinstance(e, Sym) and e not in seen:
                    seen.add(e)
                    symbols.append(Symbol(e, ("size", n, d)))
        return Program("p", tuple(symbols), tuple(self.inputs), self.buffers, tuple(self.body), tuple(Fresh(r) for r in results))


def f(value: float) -> Expr:
    return Const(F32, value)


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    del shape
    return Layout(tuple(const(s) for s in strides), const(0))


def random(shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> np.ndarray:
    r = np.random.default_rng(seed)
    if dtype == "bool":
        return r.random(shape) < 0.5
    return (r.standard_normal(shape) * 3).astype(dtype) if dtype.startswith("float") else r.integers(-50, 50, shape).astype(dtype)
