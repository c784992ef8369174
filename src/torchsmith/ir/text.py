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
    {@1 = e; @2 = e} e                    long parts that occur more than once are printed once and named
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from . import dtype as dt
from .expr import FIRST_GIVES, PREDICATES, Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, walk

INFIX = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}
SHARED = 40  # a part that occurs twice and is longer than this gets a name
Text = Callable[[Expr], str]


def print_expr(e: Expr) -> str:
    """One line that ir/parse.py reads back."""
    uses: Counter[Expr] = Counter()
    order = list(walk(e))
    for node in order:
        uses.update(node.args)
    memo: dict[Expr, str] = {}
    named: list[str] = []
    for node in order:
        text = _FORMS[type(node)](node, memo.__getitem__)
        if uses[node] > 1 and len(text) > SHARED:
            named.append(f"@{len(named)} = {text}")
            text = f"@{len(named) - 1}"
        memo[node] = text
    return f"{{{'; '.join(named)}}} {memo[e]}" if named else memo[e]


def default_dtype(name: str, args: tuple[Expr, ...]) -> dt.DType:
    """The dtype that expr.op gives when none is named."""
    return dt.bool_ if name in PREDICATES else dt.i32 if name == "frexp_e" else args[0 if name in FIRST_GIVES else -1].dtype


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
        left, right = text(e.args[0]), text(e.args[1])
        if e.name == "add" and isinstance(e.args[0], Op) and e.args[0].name == "add" and left[0] == "(":
            left = left[1:-1]  # ((a + b) + c): sums lean left
        return f"({left} {INFIX[e.name]} {right})"
    mark = "" if e.dtype is default_dtype(e.name, e.args) else f":{e.dtype}"
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
}
