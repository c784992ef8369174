"""Python floats from outside that vary from call to call: what Python computes of them, exactly as Python does.

In: an operator or pure function and its numbers, some of them symbols (a torch.SymFloat over a float of the call). Out: a plain number or a
symbol. Sums, differences, products, quotients and signs are expressions that generated code computes in float64; any other pure function
(math.cos, `%`, `**`, round, int) is called by Python before the graph runs, and its result is an input of its own (source.Computed).
Comparisons become guards. What neither can be (text, an exception) makes constants of the numbers.
"""

from __future__ import annotations

import math
import operator
import struct
import types
from collections.abc import Callable
from typing import Any

import torch

from ..codes import Unsupported
from ..graph.sizes import SizeNode, SymTypes
from ..ir import dtype as dt
from ..ir.expr import Const, Sym, walk
from .protocol import Machine
from .source import Computed
from .world import container_base, is_constant

NUMBERS = frozenset({int, float, bool, *SymTypes})
_EXACT: dict[Any, str] = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.truediv: "truediv",
    operator.iadd: "add", operator.isub: "sub", operator.imul: "mul", operator.itruediv: "truediv",
}  # fmt: skip


def total(start: Any, *items: Any) -> Any:
    """sum(items, start)."""
    return sum(items, start)


def add_float32(a: float, b: float) -> float:
    """a + b as float32 tensors add."""
    return struct.unpack("f", struct.pack("f", a + b))[0]  # type: ignore[no-any-return]


def add_float64(a: float, b: float) -> float:
    return a + b


_PURE: frozenset[Any] = frozenset({
    *(f for f in vars(math).values() if callable(f) and f not in (math.prod, math.fsum, math.sumprod if hasattr(math, "sumprod") else None)),
    total, add_float32, add_float64, round, divmod, pow, abs, int, float, operator.floordiv, operator.mod, operator.pow, operator.ifloordiv, operator.imod, operator.ipow,
})  # fmt: skip
# Functions that expressions on sizes lack: their values are computed anew in each call, where the number comes from outside (a counter)
BY_PYTHON = frozenset({
    math.cos, math.sin, math.tan, math.acos, math.asin, math.atan, math.atan2, math.exp, math.expm1, math.log, math.log2, math.log10,
    math.log1p, math.cosh, math.sinh, math.tanh, math.erf, math.erfc, math.gamma, math.lgamma, math.hypot,
})  # fmt: skip
_ARITHMETIC = frozenset({*_EXACT, operator.pow, operator.neg, pow, math.sqrt})
_KEEPING = frozenset({operator.neg, operator.pos, operator.setitem, bool, tuple, list, types.MethodType, object, slice, operator.truth, operator.not_})
_WHOLE = 2**53  # integers below it are exact as float64


def varies(value: Any) -> bool:
    """Is this a number with a float in it that changes from call to call?"""
    if type(value) not in SymTypes or value.node.hint is None:
        return False
    return any(isinstance(x, Sym) and x.dtype is dt.f64 for x in walk(value.node.expr))


def hint(value: Any) -> Any:
    """The number at hand."""
    return value.node.hint if type(value) in SymTypes else value


def is_of_data(m: Machine, value: Any) -> bool:
    """Is this computed of numbers that Python computed behind a break?"""
    data = m.recorder.data
    if not data:
        return False
    sources = [m.recorder.facts.sources.get(x.name) for x in walk(value.node.expr) if isinstance(x, Sym)]
    return any(str(s) in data or (type(s) is Computed and any(str(of) in data for _, of in s.symbols)) for s in sources)


def pinned(m: Machine, value: Any) -> Any:
    """The number at hand, assumed from now on."""
    if type(value) not in SymTypes:
        return value
    m.recorder.facts.loc = m.loc()
    if is_of_data(m, value):
        raise Unsupported("CAP023", at=m.loc(), detail="a number that Python computed")
    return {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)](value)


def apply(m: Machine, fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """fn(*args), some argument of which varies."""
    if not kwargs and all(type(a) in NUMBERS and hint(a) is not None for a in args):
        try:
            value = fn(*map(hint, args))
        except Exception:  # the program's own exception, of the numbers at hand: below
            value = NotImplemented
        if fn in _EXACT and type(value) is float:
            return _expression(m, fn, *args)
        if fn in _PURE and (type(value) in (int, float, bool) or (type(value) is tuple and is_constant(value))):
            found = _computed(m, fn, args, value)
            if found is not NotImplemented:
                return found
    if not kwargs and fn in _ARITHMETIC and any(type(a) in SymTypes and a.node.hint is None for a in args):
        m.recorder.facts.loc = m.loc()
        return fn(*args)  # with a number that only running tells: an expression of both
    return m.native(fn, [pinned(m, a) for a in args], {k: pinned(m, v) for k, v in (kwargs or {}).items()}, plain=True)


def _expression(m: Machine, fn: Any, a: Any, b: Any) -> Any:
    """a + b ... as an expression that the graph computes; a quotient is one where the divisor is not zero."""
    facts = m.recorder.facts
    facts.loc = m.loc()
    x, y = _node(a, facts), _node(b, facts)
    if _EXACT[fn] == "truediv":
        y.ne(y.wrap_float(0.0)).bool_()
        return torch.SymFloat(x.truediv(y))
    return torch.SymFloat(getattr(x, _EXACT[fn])(y))


def extreme(m: Machine, fn: Any, items: list[Any]) -> Any:
    """min or max of floats, one of which only running tells: the graph chooses as Python does, also among NaNs."""
    facts = m.recorder.facts
    facts.loc = m.loc()
    best, *others = (_node(x, facts) for x in items)
    for x in others:
        best = (x.lt(best) if fn is min else x.gt(best)).sym_ite(x, best)
    return torch.SymFloat(best)


def is_told_by_running(value: Any) -> bool:
    return type(value) is torch.SymFloat and value.node.hint is None


def _node(value: Any, facts: Any) -> Any:
    if type(value) in (torch.SymInt, torch.SymFloat):
        return value.node.sym_float()
    number = float(value)
    return SizeNode(Const(dt.f64, number), number, facts, "float")


def for_native(m: Machine, fn: Callable[..., Any], args: list[Any]) -> list[Any]:
    """Arguments for a C function that is no row here: containers keep a symbol as what it is, everybody else gets the number at hand."""
    if fn in _KEEPING or container_base(type(getattr(fn, "__self__", None))) is not None:
        return args
    return [pinned(m, a) if varies(a) else a for a in args]


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.nan


def compare(m: Machine, fn: Any, a: Any, b: Any) -> Any:
    """a < b ...: a truth that becomes a guard where the program asks for it."""
    facts = m.recorder.facts
    facts.loc = m.loc()
    x, y = (pinned(m, v) if type(v) is torch.SymBool else v for v in (a, b))
    for v in (x, y):
        if (type(v) is torch.SymInt and abs(hint(v)) >= _WHOLE) or (type(v) is int and _as_float(v) != v):  # Python compares these exactly
            return fn(pinned(m, x), pinned(m, y))
    return torch.SymBool(getattr(_node(x, facts), fn.__name__)(_node(y, facts)))


def _computed(m: Machine, fn: Any, args: list[Any], value: Any) -> Any:
    sources = m.recorder.facts.sources
    symbols = sorted({x.name for a in args if type(a) in SymTypes for x in walk(a.node.expr) if isinstance(x, Sym)})
    if any(name not in sources for name in symbols):
        return NotImplemented
    source = Computed(fn, tuple(a.node.expr if type(a) in SymTypes else a for a in args), tuple((n, sources[n]) for n in symbols))
    if type(value) is float:
        return m.recorder.float_input(value, source)
    return m.world.wrap(value, source)
