"""Text of expressions, for people and for ir/parse.py: every form reads back to the same node (no torch).

    3  -1.5:f32  nan:f32  true            Const (a bare integer is an index)
    $s0  $k:f32                           Sym
    i                                     Axis
    %a0:f32                               Var
    (i * 4 + j)  (i // 3)  (i % 3)        Op on index
    add(x, y)  where:bf16(c, x, y)        Op on values; the dtype is written where it is not the default one
    f32(e)                                Cast
    x:f32[i, j]  x:f32[i if m else o]     Load, masked Load
    fold.any{k < 10}(init; update; combine).0   Fold, its prefix after "#": fold.any#p{...}
    rand.uniform:f32(seed, counter)       Rand
"""

from __future__ import annotations

import math
from collections.abc import Callable

from . import dtype as dt
from .expr import FIRST_GIVES, PREDICATES, Axis, Cast, Const, Expr, Fold, Load, Op, Rand, Sym, Var

INFIX = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}
Text = Callable[[Expr], str]


def print_expr(e: Expr) -> str:
    """One line that ir/parse.py reads back. Shared parts are printed once each time they occur."""
    memo: dict[Expr, str] = {}

    def text(node: Expr) -> str:
        found = memo.get(node)
        if found is None:
            found = memo[node] = _FORMS[type(node)](node, text)
        return found

    return text(e)


def _const(e: Const, _: Text) -> str:
    if e.dtype is dt.index:
        return str(e.value)
    if e.dtype is dt.bool_:
        return "true" if e.value else "false"
    if e.dtype.is_float and not math.isfinite(e.value):
        return f"{'nan' if e.value != e.value else 'inf' if e.value > 0 else '-inf'}:{e.dtype}"
    return f"{e.value!r}:{e.dtype}"


def _op(e: Op, text: Text) -> str:
    if e.dtype is dt.index and e.name in INFIX and len(e.args) == 2:
        return f"({text(e.args[0])} {INFIX[e.name]} {text(e.args[1])})"
    usual = dt.bool_ if e.name in PREDICATES else dt.i32 if e.name == "frexp_e" else e.args[0 if e.name in FIRST_GIVES else -1].dtype
    mark = "" if e.dtype is usual else f":{e.dtype}"
    return f"{e.name}{mark}({', '.join(map(text, e.args))})"


def _load(e: Load, text: Text) -> str:
    index = ", ".join(map(text, e.index))
    if e.mask is not None and e.other is not None:
        return f"{e.buf}:{e.dtype}[{index} if {text(e.mask)} else {text(e.other)}]"
    return f"{e.buf}:{e.dtype}[{index}]"


def _fold(e: Fold, text: Text) -> str:
    axes = ", ".join(f"{a.name} < {text(n)}" for a, n in zip(e.axes, e.extents, strict=True))
    parts = "; ".join(", ".join(map(text, part)) for part in (e.init, e.update, e.combine))
    return f"fold.{e.order}{'#' + e.prefix if e.prefix else ''}{{{axes}}}({parts}).{e.pick}"


_FORMS: dict[type, Callable[..., str]] = {
    Const: _const,
    Sym: lambda e, _: f"${e.name}" if e.dtype is dt.index else f"${e.name}:{e.dtype}",
    Axis: lambda e, _: e.name,
    Var: lambda e, _: f"%{e.name}:{e.dtype}",
    Op: _op,
    Cast: lambda e, text: f"{e.dtype}({text(e.arg)})",
    Load: _load,
    Fold: _fold,
    Rand: lambda e, text: f"rand.{e.kind}:{e.dtype}({text(e.args[0])}, {text(e.args[1])})",
}
