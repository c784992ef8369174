"""Kernel -> C text: one function named TS_KERNEL, include-free, vectorised by gcc vector types, the same text for the same kernel.

In: a Kernel (ir/kernel.py). Out: C text in the common subset of C11 and C++17. Names in the text are canonical (b0, s0, i0, v0), so that
equal kernels give equal text whatever their buffers are called.

How: expressions are printed once each, at the outermost open loop where all their operands are known (a loop's text is collected apart and
appended when it closes, so that an outer loop still takes lines before it). That is at once common-subexpression elimination and hoisting.
Loads of buffers that the kernel writes stay where they stand. A value that depends on the vector axis is a vector of `lanes` elements, any
other a scalar. A vector is a register of the target, of 4-byte elements or, in kernels that compute on 8-byte ones, of those; a kernel with
a statement that is laid out for the lanes of 4-byte elements keeps these, and its 8-byte vectors take two registers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..codes import Unsupported
from ..ir import dtype as dt
from ..ir.bounds import Ranges
from ..ir.dtype import DType
from ..ir.expr import Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, const
from ..ir.kernel import Kernel, Let, Loop, Param, Stmt, StoreStmt
from ..ir.linear import Linear, const_of, linear
from . import vector
from .casts import convert_text
from .clang import clang_names
from .fold import print_fold
from .math import VIA_F64
from .optable import ROWS
from .values import REG, STORED, TooNarrow, TooWide, Val, lane_iota, power

FLOATS = ("f32", "f64")


@dataclass
class Scope:
    """An open block: its lines so far and what it has printed. `n` is the number of live lanes in a partial vector iteration, else ""."""

    lines: list[str] = field(default_factory=list)
    memo: dict[Expr, Val] = field(default_factory=dict)
    folds: dict[Expr, list[Val]] = field(default_factory=dict)
    bound: list[Expr] = field(default_factory=list)


class Emitter:
    """State of printing one kernel with one lane count."""

    def __init__(self, kernel: Kernel, lanes: int, wide: bool = False) -> None:
        self.kernel, self.lanes = kernel, lanes
        self.most = 8 if wide or lanes < kernel.target.vectors.lanes() else 4  # bytes of an element of a vector
        self.used: set[str] = set()
        self.functions: dict[str, str] = {}  # texts that stand before the kernel, by name
        self.scopes: list[Scope] = [Scope()]
        self.level: dict[Expr, int] = {}  # Axis, Var -> index of the scope that binds it
        self.ranges = Ranges({s: (min(lo, 0), hi) for s, lo, hi in kernel.ranges}, sizes=True)
        self.counter: dict[str, int] = {}
        self.vector_axis: Axis | None = None
        self.vector_level = 1 << 30
        self.tail: str = ""  # lanes alive, as C text, while printing a partial iteration
        self.params: dict[str, tuple[str, Param]] = {p.buf: (f"b{i}", p) for i, p in enumerate(kernel.params)}
        self.scratch = {s.name: (f"t{i}", s) for i, s in enumerate(kernel.scratch)}
        self.written = {p.buf for p in kernel.params if p.written} | set(self.scratch)
        self.free_memo: dict[Expr, frozenset[Expr]] = {}
        self.last = "1"  # C text: is this the last iteration of the loop around the open block?

    # ------------------------------------------------------------ text
    def fresh(self, kind: str) -> str:
        n = self.counter.get(kind, 0)
        while f"{kind}{n}" in vector.SCALARS:  # i32 is a type
            n += 1
        self.counter[kind] = n + 1
        return f"{kind}{n}"

    def use(self, text: str) -> str:
        """Note the snippets that `text` calls."""
        for m in vector._NAME.finditer(text):
            self.used.add(m.group(0))
        return text

    def line(self, text: str, at: int | None = None) -> None:
        self.scopes[len(self.scopes) - 1 if at is None else at].lines.append(self.use(text))

    def ctype(self, v: Val) -> str:
        return ("x" if v.vec else "") + v.reg

    def define(self, text: str, v: Val, at: int) -> Val:
        """Bind `text` to a new name in scope `at`."""
        if v.vec and not v.narrow and v.dtype.itemsize > self.most:
            raise TooWide
        out = Val(self.fresh("v"), v.dtype, v.vec, v.narrow)
        self.line(f"{self.ctype(out)} {out.text} = {text};", at)
        return out

    def open(self, head: str, bound: list[Expr]) -> None:
        self.scopes.append(Scope(lines=[head], bound=bound))
        for b in bound:
            self.level[b] = len(self.scopes) - 1

    def close(self, *last: str) -> None:
        scope = self.scopes.pop()
        for b in scope.bound:
            self.level.pop(b, None)
        outer = self.scopes[-1].lines
        outer.append(scope.lines[0])
        outer.extend("  " + text for text in (*scope.lines[1:], *last))
        outer.append("}")

    # ------------------------------------------------------------ where an expression belongs
    def free(self, e: Expr) -> frozenset[Expr]:
        """Axes, Vars and kernel-written Loads below `e` that are bound outside it."""
        done = self.free_memo.get(e)
        if done is not None:
            return done
        out: frozenset[Expr]
        if isinstance(e, Axis | Var):
            out = frozenset((e,))
        elif not e.args:
            out = frozenset()
        else:
            out = frozenset().union(*(self.free(a) for a in e.args))
            if isinstance(e, Load) and e.buf in self.written:
                out |= {e}
            if isinstance(e, Fold):
                own = set(e.axes) | {e.state(i, s) for i in range(len(e.init)) for s in "ab"}
                out = frozenset(x for x in out if x not in own)
        self.free_memo[e] = out
        return out

    def home(self, e: Expr) -> int:
        """The outermost open scope where `e` can be printed."""
        here = 0
        for leaf in self.free(e):
            if isinstance(leaf, Load):
                return len(self.scopes) - 1
            here = max(here, self.level.get(leaf, 0))
        return here

    # ------------------------------------------------------------ expressions
    def emit(self, e: Expr) -> Val:
        if isinstance(e, Const):
            return Val(literal(e), e.dtype, False)
        at = self.home(e)
        scope = self.scopes[at]
        found = scope.memo.get(e)
        if found is None:
            found = scope.memo[e] = PRINTERS[type(e)](self, e, at)
        return found

    def forget(self, buf: str) -> None:
        """A store to `buf`: what was read from it before is stale."""
        for scope in self.scopes:
            stale = [e for e in scope.memo if any(isinstance(x, Load) and x.buf == buf for x in self.free(e))]
            for e in stale:
                del scope.memo[e]
            for f in [f for f in scope.folds if any(isinstance(x, Load) and x.buf == buf for x in self.free(f))]:
                del scope.folds[f]

    def as_vector(self, v: Val, reg: str | None = None) -> str:
        """The text of `v` as a vector, splatting scalars once in the scope that is open for them."""
        reg = reg or v.reg
        if v.vec:
            return v.text
        if v.dtype is dt.bool_:
            return self.splat(f"-({v.text})", "i32")
        return self.splat(v.text, reg)

    def splat(self, text: str, reg: str) -> str:
        return f"(({reg})({text}) - (x{reg}){{0}})" if reg in FLOATS else f"(({reg})({text}) + (x{reg}){{0}})"

    def operands(self, args: tuple[Expr, ...]) -> tuple[list[Val], bool]:
        vals = [self.emit(a) for a in args]
        return vals, any(v.vec for v in vals)

    def align(self, vals: list[Val], vec: bool, narrow: bool = False) -> list[str]:
        """Operand texts of one register kind: scalars splatted, index vectors all narrow or all wide."""
        if not vec:
            return [v.text for v in vals]
        if narrow:
            return [self.as_vector(v, "i32" if v.dtype is dt.index else None) for v in vals]
        return [self.widen(v) if v.dtype is dt.index else self.as_vector(v) for v in vals]

    def widen(self, v: Val) -> str:
        return f"CV({v.text}, xi64)" if v.narrow else self.as_vector(v)

    def fits(self, e: Expr) -> bool:
        """True when an index expression and all index expressions under it lie within 32 bits."""
        lo, hi = self.ranges.interval(e)
        if lo is None or hi is None or lo < -(2**31) or hi >= 2**31:
            return False
        return all(self.fits(a) for a in e.args if a.dtype is dt.index and not isinstance(a, Load))

    # ------------------------------------------------------------ addresses
    def address(self, buf: str, index: tuple[Expr, ...]) -> Linear:
        if buf in self.scratch:
            return linear(index[0])
        layout = self.params[buf][1].layout
        total = Linear(None, layout.offset)
        for i, stride in zip(index, layout.strides, strict=True):
            if const_of(i) == 0:
                continue
            total = total.plus(linear(i), stride)
        return linear(total.expr())

    def base(self, buf: str) -> tuple[str, DType]:
        if buf in self.scratch:
            name, s = self.scratch[buf]
            return name, s.dtype
        name, p = self.params[buf]
        return name, p.dtype

    def split(self, lin: Linear) -> tuple[Expr, Expr | None, Expr | None]:
        """(scalar part, coefficient of the vector axis, the rest that varies over lanes)."""
        scalar: list[tuple[int, Expr]] = [(0, lin.const)] if const_of(lin.const) != 0 else []
        coef: Expr | None = None
        varying: Expr | None = None
        for atom, c in lin.terms.items():
            if atom is self.vector_axis:
                coef = c
            elif self.varies(atom):
                term = atom if const_of(c) == 1 else Op("mul", dt.index, (atom, c))
                varying = term if varying is None else Op("add", dt.index, (varying, term))
            else:
                term = atom if const_of(c) == 1 else Op("mul", dt.index, (atom, c))
                scalar.append((self.home(term), term))
        total: Expr | None = None
        for _, term in sorted(scalar, key=lambda t: t[0]):
            total = term if total is None else Op("add", dt.index, (total, term))
        return total if total is not None else const(0), coef, varying

    def varies(self, e: Expr) -> bool:
        """Does `e` differ between lanes?"""
        if self.vector_axis is None:
            return False
        return self.emit(e).vec

    def pointer(self, buf: str, scalar: Expr, coef: Expr | None) -> str:
        """The address of lane 0."""
        name, _ = self.base(buf)
        parts = [name]
        if const_of(scalar) != 0:
            parts.append(self.emit(scalar).text)
        if coef is not None:
            assert self.vector_axis is not None
            axis = self.emit_axis_scalar()
            parts.append(axis if const_of(coef) == 1 else f"{axis} * {self.emit(coef).text}")
        return " + ".join(parts)

    def emit_axis_scalar(self) -> str:
        return self.axis_text

    axis_text = ""

    def lane_address(self, scalar: Expr, coef: Expr | None, varying: Expr | None) -> str:
        """Element number of lane `l`, as C text."""
        parts = [] if const_of(scalar) == 0 else [self.emit(scalar).text]
        if coef is not None:
            parts.append(f"({self.axis_text} + l) * {self.emit(coef).text}")
        if varying is not None:
            parts.append(f"{self.emit(varying).text}[l]")
        return " + ".join(parts) or "0"

    def load_bool(self, raw: Val, at: int) -> Val:
        """A stored bool byte becomes a mask (vectors) or 0/1 (scalars)."""
        if raw.dtype is not dt.bool_:
            return raw
        text = f"(up_xu8({raw.text}) != 0)" if raw.vec else f"({raw.text} != 0)"
        return self.define(text, Val("", dt.bool_, raw.vec), at)

    # ------------------------------------------------------------ statements
    def block(self, body: tuple[Stmt, ...]) -> None:
        for k, stmt in enumerate(body):
            whole = WITH_REST.get(type(stmt))
            if whole is not None:
                whole(self, stmt, body[k + 1 :])
                return
            STATEMENTS[type(stmt)](self, stmt)

    def open_buffers(self) -> None:
        """Names for the symbols and the buffers that a kernel was given."""
        k = self.kernel
        for i, s in enumerate(k.syms):
            if s.dtype is dt.f64:
                self.line(f"f64 s{i} = asf_f64(syms[{i}]);", 0)
            else:
                self.line(f"{REG[s.dtype.name]} s{i} = ({REG[s.dtype.name]})syms[{i}];", 0)
            self.scopes[0].memo[s] = Val(f"s{i}", s.dtype, False)
        for name, p in self.params.values():
            qualifier = "" if p.written else "const "
            kind = STORED[p.dtype.name]
            self.line(f"{qualifier}{kind}a *{name} = ({qualifier}{kind}a *)bufs[{name[1:]}];", 0)

    def emit_kernel(self) -> str:
        self.open_buffers()
        for name, row in self.scratch.values():
            self.line(f"{STORED[row.dtype.name]}a {name}[{row.size}] __attribute__((aligned(64)));", 0)
        self.grid()
        k, lines = self.kernel, self.scopes[0].lines
        body = "\n".join("  " + text for text in lines)
        head = "void TS_KERNEL(void *const *bufs, const i64 *syms, i64 lo, i64 hi) {\n  (void)syms;\n"
        snippets = vector.prelude(self.lanes) + vector.close(self.used, self.lanes, k.target.vectors.masks) + "".join(self.functions.values())
        text = snippets + head + body + "\n}\n"
        return clang_names(text) + text

    def grid(self) -> None:
        """for g in [lo, hi): the grid axes count along, like an odometer."""
        axes = self.kernel.grid
        for a, extent in axes:
            self.ranges.bind(a, extent)
        if len(axes) == 0:
            self.open("for (i64 g = lo; g < hi; g++) {", [])
            self.last = "g + 1 == hi"
            self.block(self.kernel.body)
            self.close()
            return
        names = [self.fresh("i") for _ in axes]
        extents = [self.emit(e).text for _, e in axes]
        if len(axes) == 1:
            self.open(f"for (i64 {names[0]} = lo; {names[0]} < hi; {names[0]}++) {{", [axes[0][0]])
            self.scopes[-1].memo[axes[0][0]] = Val(names[0], dt.index, False)
            self.last = f"{names[0]} + 1 == hi"
            self.block(self.kernel.body)
            self.close()
            return
        for k, name in enumerate(names):
            inner = " * ".join(f"(i64){e}" for e in extents[k + 1 :])
            text = f"lo / ({inner})" if inner else "lo"
            self.line(f"i64 {name} = {text if k == 0 else f'({text}) % {extents[k]}'};")
        self.open("for (i64 g = lo; g < hi; g++) {", [a for a, _ in axes])
        for (a, _), name in zip(axes, names, strict=True):
            self.scopes[-1].memo[a] = Val(name, dt.index, False)
        self.last = "g + 1 == hi"
        self.block(self.kernel.body)
        step = f"++{names[0]};"
        for name, e in zip(names[1:], extents[1:], strict=True):
            step = f"if (++{name} == {e}) {{ {name} = 0; {step} }}"
        self.close(step)

    # ------------------------------------------------------------ vector loops
    def vector_loop(self, axis: Axis, extent: Expr, body: Callable[[], None]) -> None:
        """for axis in steps of `lanes`, then one partial iteration with `tail` lanes."""
        self.ranges.bind(axis, extent)
        n, lanes = const_of(extent), self.lanes
        name = self.fresh("i")
        end = str(n - n % lanes) if n is not None else None
        whole = False
        if n is None:
            total = self.emit(extent).text
            end = self.fresh("e")
            whole = is_multiple(extent, lanes)
            self.line(f"i64 {end} = {total};" if whole else f"i64 {end} = {total} & -{lanes};")
        if n is None or n >= lanes:
            self.vector_body(f"for (i64 {name} = 0; {name} < {end}; {name} += {lanes}) {{", axis, name, body)
        if (n is None and not whole) or (n is not None and n % lanes):
            live = str(n % lanes) if n is not None else self.fresh("n")
            if n is None:
                self.line(f"int {live} = (int)({total} - {end});")
            head = f"if ({live}) {{" if n is None else "{"
            self.tail = live
            self.vector_body(head + f" i64 {name} = {end};", axis, name, body)
            self.tail = ""

    def vector_body(self, head: str, axis: Axis, name: str, body: Callable[[], None]) -> None:
        before = self.vector_axis, self.vector_level, self.axis_text
        self.open(head, [axis])
        self.vector_axis, self.vector_level, self.axis_text = axis, len(self.scopes) - 1, name
        body()
        self.close()
        self.vector_axis, self.vector_level, self.axis_text = before


def is_multiple(e: Expr, n: int) -> bool:
    """Is every term of the index `e` written with a factor that `n` divides?"""
    lin = linear(e)
    factors = [const_of(c) for c in (lin.const, *lin.terms.values())]
    return all(c is not None and c % n == 0 for c in factors)


# ---------------------------------------------------------------- printers of expressions


def literal(e: Const) -> str:
    v, d = e.value, e.dtype
    if d is dt.bool_:
        return "1" if v else "0"
    if d in dt.HALF:
        if d is dt.f16:
            return str(struct.unpack("<H", struct.pack("<e", v))[0]) if math.isfinite(v) and abs(v) < 65520 else (
                "32256" if v != v else "31744" if v > 0 else "64512"
            )
        bits = struct.unpack("<I", struct.pack("<f", v))[0] if abs(v) < 3.4e38 or not math.isfinite(v) else 0
        return "32704" if v != v else str((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    if d.is_float:
        f = "f" if d is dt.f32 else ""
        if math.isnan(v):
            return f'__builtin_nan{f}("")'
        if math.isinf(v) or (d is dt.f32 and abs(v) > 3.4028235677973366e38):
            return f"__builtin_inf{f}()" if v > 0 else f"(-__builtin_inf{f}())"
        text = float(v).hex() + f
        return f"({text})" if text[0] == "-" else text
    v = int(v)
    if d in (dt.i64, dt.index):
        if v == -(2**63):
            return "((i64)-9223372036854775807 - 1)"
        return f"({v})" if v < 0 else f"(i64){v}" if d is dt.i64 else str(v)
    if d is dt.i32 and v == -(2**31):
        return "(-2147483647 - 1)"
    return f"({v})" if v < 0 else str(v)


def _print_sym(self: Emitter, e: Expr, at: int) -> Val:
    raise KeyError(f"kernel does not list the symbol {e}")


def _print_axis(self: Emitter, e: Expr, at: int) -> Val:
    if e is not self.vector_axis:
        raise KeyError(f"axis {e} is not bound")
    hi = self.ranges.interval(e).hi
    narrow = hi is not None and hi + self.lanes < 2**31
    reg = "i32" if narrow else "i64"
    iota = ", ".join(str(k) for k in range(self.lanes))
    return self.define(f"({reg}){self.axis_text} + (x{reg}){{{iota}}}", Val("", dt.index, True, narrow), at)


def _print_var(self: Emitter, e: Expr, at: int) -> Val:
    raise KeyError(f"variable {e} is not bound")


def _print_cast(self: Emitter, e: Expr, at: int) -> Val:
    v = self.emit(e.args[0])
    narrow = v.narrow if v.dtype is dt.index else False
    if e.dtype is dt.index and v.vec:
        narrow = v.dtype.itemsize < 8
    source = "i32" if v.narrow else v.dtype.name
    target = "i32" if narrow and e.dtype is dt.index else e.dtype.name
    text = convert_text(source if source != "index" else "i64", target if target != "index" else "i64", v.vec, v.text)
    return self.define(text, Val("", e.dtype, v.vec, narrow and e.dtype is dt.index), at)


def _print_op(self: Emitter, e: Expr, at: int) -> Val:
    assert isinstance(e, Op)
    special = SPECIAL.get(e.name)
    if special is not None:
        return special(self, e, at)
    if e.name == "add" and e.dtype is dt.f32:  # 1 + erf(x) = erfc(-x): nothing cancels
        for one, other in (e.args, e.args[::-1]):
            if isinstance(one, Const) and one.value == 1.0 and isinstance(other, Op) and other.name == "erf":
                v = self.emit(other.args[0])
                return self.define(f"erfc_{'x' if v.vec else ''}f32(-({v.text}))", Val("", e.dtype, v.vec), at)
    vals, vec = self.operands(e.args)
    kind = e.args[-1].dtype  # what is computed on
    if vec and self.most < 8 and e.name in VIA_F64 and kind.is_float:
        raise TooWide
    if kind in dt.HALF and e.name != "where":
        return _half_op(self, e, vals, vec, at)
    reg, narrow = kind.name, False
    if kind is dt.index:
        narrow = vec and all(v.narrow or (not v.vec and self.fits(a)) for v, a in zip(vals, e.args, strict=True) if v.dtype is dt.index)
        narrow = narrow and (e.dtype is not dt.index or self.fits(e))
        reg = "i32" if narrow else "i64"
    texts = self.align(vals, vec, narrow)
    if kind is dt.index and e.name in ("floordiv", "mod"):
        text = _index_division(self, e, reg, vec, texts)
        return self.define(text, Val("", e.dtype, vec, narrow), at)
    if e.name in ("max", "min") and kind in (dt.f32, dt.f64):  # with a number that is not NaN the bare instruction does, number first
        for k in (0, 1):
            c = e.args[k]
            if isinstance(c, Const) and c.value == c.value:
                return self.define(f"{e.name}i_{'x' if vec else ''}{reg}({texts[k]}, {texts[1 - k]})", Val("", e.dtype, vec), at)
    fn = ROWS.get(e.name)
    if fn is None:
        raise Unsupported("EMI001", detail=f"operator {e.name}")
    return self.define(fn(reg, vec, tuple(texts)), Val("", e.dtype, vec, narrow and e.dtype is dt.index), at)


def _index_division(self: Emitter, e: Op, reg: str, vec: bool, texts: list[str]) -> str:
    # C division rounds to zero: the same where the dividend is not negative and the divisor is positive
    lo = self.ranges.interval(e.args[0]).lo
    d = self.ranges.interval(e.args[1]).lo
    if lo is not None and lo >= 0 and d is not None and d > 0 and (not vec or const_of(e.args[1]) is not None):
        divisor = f"({reg}){const_of(e.args[1])}" if const_of(e.args[1]) is not None else texts[1]
        return f"({texts[0]} {'/' if e.name == 'floordiv' else '%'} {divisor})"
    return f"{'fdiv' if e.name == 'floordiv' else 'fmod'}_{'x' if vec else ''}{reg}({texts[0]}, {texts[1]})"


def _half_op(self: Emitter, e: Op, vals: list[Val], vec: bool, at: int) -> Val:
    """bfloat16 and float16: computed in f32, rounded once."""
    texts = []
    for v in vals:
        t = self.as_vector(v) if vec else v.text
        texts.append(convert_text(v.dtype.name, "f32", vec, t) if v.dtype in dt.HALF else t)
    fn = ROWS.get(e.name)
    if fn is None:
        raise Unsupported("EMI001", detail=f"operator {e.name}")
    text = fn("f32", vec, tuple(texts))
    if e.dtype in dt.HALF:
        text = convert_text("f32", e.dtype.name, vec, text)
    return self.define(text, Val("", e.dtype, vec), at)


def _print_powi(self: Emitter, e: Op, at: int) -> Val:
    v, n, result = power(self, e, at)
    one = self.splat("1", v.reg) if v.vec else "1"
    result = result or one
    if n < 0:
        result = f"({one} / {result})" if v.dtype.is_float else self.use(f"tdiv_{'x' if v.vec else ''}{v.reg}({one}, {result})")
    return self.define(result, v, at)


def _print_bitcast(self: Emitter, e: Op, at: int) -> Val:
    v = self.emit(e.args[0])
    if e.dtype.itemsize != v.dtype.itemsize or dt.bool_ in (e.dtype, v.dtype):
        raise Unsupported("EMI001", detail="bitcast between sizes")
    target = REG[e.dtype.name]
    if v.vec:
        return self.define(f"(x{target})({v.text})", Val("", e.dtype, True), at)
    out = Val(self.fresh("v"), e.dtype, False)
    self.line(f"{target} {out.text}; {{ {v.reg} q = {v.text}; __builtin_memcpy(&{out.text}, &q, sizeof q); }}", at)
    return out


def _print_ldexp(self: Emitter, e: Op, at: int) -> Val:
    vals, vec = self.operands(e.args)
    reg = vals[0].reg
    if reg not in FLOATS:
        raise Unsupported("EMI001", detail="ldexp on half floats")
    a, b = self.align(vals, vec)
    power = f"CV({b}, x{reg})" if vec else f"({reg}){b}"
    return self.define(f"scalef_{'x' if vec else ''}{reg}({a}, {power})", Val("", e.dtype, vec), at)


SPECIAL: dict[str, Callable[[Emitter, Op, int], Val]] = {"powi": _print_powi, "bitcast": _print_bitcast, "ldexp": _print_ldexp}


def _print_load(self: Emitter, e: Expr, at: int) -> Val:
    assert isinstance(e, Load)
    mask = self.emit(e.mask) if e.mask is not None else None
    other = self.emit(e.other) if e.other is not None else None
    scalar, coef, varying = self.split(self.address(e.buf, e.index))
    lanes_differ = coef is not None or varying is not None
    vec = lanes_differ or (mask is not None and mask.vec) or (other is not None and other.vec)
    reg = REG[e.dtype.name]
    stored = STORED[e.dtype.name]
    if vec and e.dtype.itemsize > self.most:
        raise TooWide
    kind = stored if e.dtype is dt.bool_ else reg
    other_text = None
    if other is not None:
        other_text = self.as_vector(other) if vec else other.text
        if e.dtype is dt.bool_ and vec:
            other_text = f"down_xu8({other_text})"
    guard = f"if ({mask.text}) " if mask is not None and not mask.vec else ""
    out = self.fresh("v")
    raw = Val(out, e.dtype, vec)
    p = self.pointer(e.buf, scalar, coef if varying is None else None)
    ctype = ("x" if vec else "") + kind
    if not vec:
        if mask is None:
            self.line(f"{ctype} {out} = *({p});", at)
        else:
            self.line(f"{ctype} {out} = {other_text}; {guard}{out} = *({p});", at)
        return self.load_bool(raw, at)
    unit = varying is None and coef is not None and const_of(coef) == 1
    n = self.tail or str(self.lanes)
    if mask is not None and mask.vec:
        m = f"({mask.text} & (({lane_iota(self.lanes)}) < {self.tail}))" if self.tail else mask.text
        if unit:
            self.line(f"{ctype} {out} = ldm_x{kind}({p}, {m}, {other_text});", at)
        elif varying is None and kind in ("f32", "i32") and coef is not None and 0 < abs(const_of(coef) or 0) < 1 << 24:
            steps = ", ".join(str(k * (const_of(coef) or 0)) for k in range(self.lanes))
            self.line(f"{ctype} {out} = gam_x{kind}({p}, (xi32){{{steps}}}, {m}, {other_text});", at)
        else:
            at_lane = self.lane_address(scalar, coef, varying)
            self.line(f"{ctype} {out} = {other_text}; {{ xi32 m = {m}; for (int l = 0; l < {self.lanes}; l++) "
                      f"if (m[l]) {out}[l] = {self.base(e.buf)[0]}[{at_lane}]; }}", at)
        return self.load_bool(raw, at)
    if not lanes_differ:  # only `other` is a vector
        self.line(f"{ctype} {out} = {other_text}; {guard}{out} = {self.splat(f'*({p})', kind)};", at)
        return self.load_bool(raw, at)
    if unit:
        full = f"*(const x{kind}u *)({p})" if not self.tail else f"ldn_x{kind}({p}, {self.tail})"
        if guard:
            self.line(f"{ctype} {out} = {other_text}; {guard}{out} = {full};", at)
        else:
            self.line(f"{ctype} {out} = {full};", at)
        return self.load_bool(raw, at)
    if varying is not None and coef is None and not self.tail and not guard and kind in ("f32", "i32"):
        index = self.emit(varying)
        if index.narrow:
            name = self.base(e.buf)[0]
            offset = "" if const_of(scalar) == 0 else f" + {self.emit(scalar).text}"
            self.line(f"{ctype} {out} = gat_x{kind}({name}{offset}, {index.text});", at)
            return self.load_bool(raw, at)
    at_lane = self.lane_address(scalar, coef, varying)
    start = other_text if guard else f"(x{kind}){{0}}" if self.tail else None
    source = f"{self.base(e.buf)[0]}[{at_lane}]"
    put = f"put_x{kind}({out}, l, {source})" if self.tail and kind in vector.PUT else f"{out}[l] = {source}"
    loop = f"{guard}for (int l = 0; l < {n}; l++) {put};"
    self.line(f"{ctype} {out}{f' = {start}' if start else ''}; {loop}", at)
    return self.load_bool(raw, at)


def _print_fold(self: Emitter, e: Expr, at: int) -> Val:
    assert isinstance(e, Fold)
    return print_fold(self, e, at)


PRINTERS: dict[type, Callable[[Emitter, Expr, int], Val]] = {
    Sym: _print_sym, Axis: _print_axis, Var: _print_var, Op: _print_op, Cast: _print_cast, Load: _print_load, Fold: _print_fold,
}  # fmt: skip


# ---------------------------------------------------------------- statements


def _do_let(self: Emitter, s: Let) -> None:
    v = self.emit(s.value)
    self.level[s.var] = len(self.scopes) - 1
    self.scopes[-1].bound.append(s.var)
    self.scopes[-1].memo[s.var] = v


def _do_loop(self: Emitter, s: Loop) -> None:
    if const_of(s.extent) == 0:  # no load of its body stands in front of it, then
        return
    if s.kind == "vector":
        self.vector_loop(s.axis, s.extent, lambda: self.block(s.body))
        return
    self.ranges.bind(s.axis, s.extent)
    carry: list[Val] = []
    for _var, init, _next in s.carry:
        v = self.emit(init)
        out = Val(self.fresh("c"), v.dtype, self.vector_axis is not None)
        text = self.as_vector(v) if out.vec else v.text
        self.line(f"{self.ctype(out)} {out.text} = {text};")
        carry.append(out)
    name = self.fresh("i")
    extent = self.emit(s.extent).text
    self.open(f"for (i64 {name} = 0; {name} < {extent}; {name}++) {{", [s.axis, *(v for v, _, _ in s.carry)])
    self.scopes[-1].memo[s.axis] = Val(name, dt.index, False)
    for (var, _, _), v in zip(s.carry, carry, strict=True):
        self.scopes[-1].memo[var] = v
    before, self.last = self.last, f"{name} + 1 == {extent}"
    self.block(s.body)
    self.last = before
    new = []
    for (_, _, nxt), v in zip(s.carry, carry, strict=True):
        got = self.emit(nxt)
        name = self.fresh("v")
        self.line(f"{self.ctype(v)} {name} = {self.as_vector(got) if v.vec else got.text};")
        new.append(f"{v.text} = {name};")
    self.close(*new)


def _do_store(self: Emitter, s: StoreStmt) -> None:
    value = self.emit(s.value)
    mask = self.emit(s.mask) if s.mask is not None else None
    name, dtype = self.base(s.buf)
    scalar, coef, varying = self.split(self.address(s.buf, s.index))
    stored = STORED[dtype.name]
    if s.mode != "set":
        _accumulate(self, s, value, mask, dtype)
    elif self.vector_axis is None:
        guard = f"if ({mask.text}) " if mask is not None else ""
        self.line(f"{guard}*({self.pointer(s.buf, scalar, coef)}) = ({stored}){value.text};")
    else:
        text = self.widen(value) if dtype is dt.i64 and value.dtype is dt.index else self.as_vector(value)
        if dtype is dt.bool_:
            text = f"down_xu8({text} & 1)"
        guard = f"if ({mask.text}) " if mask is not None and not mask.vec else ""
        m = mask.text if mask is not None and mask.vec else ""
        n = self.tail or str(self.lanes)
        if varying is None and coef is not None and const_of(coef) == 1:
            p = self.pointer(s.buf, scalar, coef)
            if m:
                m = f"({m} & ({lane_iota(self.lanes)} < {self.tail}))" if self.tail else m
                self.line(f"stm_x{stored}({p}, {text}, {m});")
            elif self.tail:
                self.line(f"{guard}stn_x{stored}({p}, {text}, {self.tail});")
            else:
                self.line(f"{guard}*(x{stored}u *)({p}) = {text};")
        else:
            at_lane = self.lane_address(scalar, coef, varying)
            test = f"if ({m}[l]) " if m else ""
            self.line(f"{guard}{{ x{stored} q = {text}; for (int l = 0; l < {n}; l++) {test}{name}[{at_lane}] = q[l]; }}")
    self.forget(s.buf)


_MERGE = {"add": "add", "mul": "mul", "min": "min", "max": "max"}


def _accumulate(self: Emitter, s: StoreStmt, value: Val, mask: Val | None, dtype: DType) -> None:
    """buf[index] mode= value, one lane after the other: lanes may hit the same element."""
    name, _ = self.base(s.buf)
    scalar, coef, varying = self.split(self.address(s.buf, s.index))
    vec = self.vector_axis is not None
    stored = STORED[dtype.name]
    at_lane = self.lane_address(scalar, coef, varying) if vec else self.pointer(s.buf, scalar, coef)
    place = f"{name}[{at_lane}]" if vec else f"*({at_lane})"
    one = "q[l]" if vec else "q"
    reg = "f32" if dtype in dt.HALF else "bool" if dtype is dt.bool_ else dtype.name
    old, new = place, one
    if dtype in dt.HALF:
        old, new = (convert_text(dtype.name, "f32", False, t) for t in (old, new))
    merged = ROWS["or" if s.mode in ("add", "max") and dtype is dt.bool_ else "and" if dtype is dt.bool_ else _MERGE[s.mode]](reg, False, (old, new))
    if dtype in dt.HALF:
        merged = convert_text("f32", dtype.name, False, merged)
    if vec:
        text = self.as_vector(value)
        if dtype is dt.bool_:
            text = f"down_xu8({text} & 1)"
        test = "" if mask is None else f"if ({mask.text}{'[l]' if mask.vec else ''}) "
        self.line(f"{{ x{stored} q = {text}; for (int l = 0; l < {self.tail or self.lanes}; l++) {test}{place} = ({stored})({merged}); }}")
    else:
        test = "" if mask is None else f"if ({mask.text}) "
        self.line(f"{{ {stored} q = ({stored}){value.text}; {test}{place} = ({stored})({merged}); }}")


# Statements that print what follows them too, because it reads what they keep in registers.
WITH_REST: dict[type, Callable[[Emitter, Any, tuple[Stmt, ...]], None]] = {}
STATEMENTS: dict[type, Callable[[Emitter, Stmt], None]] = {Let: _do_let, Loop: _do_loop, StoreStmt: _do_store}  # type: ignore[dict-item]


def emit_kernel(kernel: Kernel) -> str:
    """The C text of `kernel`."""
    lanes = kernel.target.vectors.lanes()
    try:
        return Emitter(kernel, lanes).emit_kernel()
    except TooWide:
        pass
    try:
        return Emitter(kernel, lanes // 2).emit_kernel()
    except TooNarrow:
        return Emitter(kernel, lanes, wide=True).emit_kernel()
