"""A Banded statement -> C text: tiles of grouped and depthwise convolutions.

In: a Banded (ir/kernel.py) inside a kernel being printed. Out: lines in the emitter's open scope. Accumulators are variables of the kernel:
rows x vectors of them. For every tap row and channel each column of the input is loaded once, spread over the lanes of its groups (one
permutation; a splat where a tile holds one group; nothing where a group is one channel), and multiplied into every row whose window it
is in. Columns in the padding are left out, so that padding contributes nothing, not even 0 * inf.
"""

from __future__ import annotations

from ..codes import Unsupported
from ..ir.blocks import Banded
from ..ir.expr import Expr, const, op, substitute
from ..ir.linear import const_of
from . import vector
from .c import STATEMENTS, Emitter
from .contraction import cut_sum
from .tile import SCALAR, SPLAT, VECTOR, Bounds, open_loop, open_pieces
from .values import STORED, TooNarrow

CHUNK = 96  # most products in one partial sum: eager's grouped convolutions add few in a row

vector.vector("spread_xf32", """static inline __attribute__((always_inline)) xf32 spread_xf32(xf32 x, xi32 at) {
#if defined(__AVX512F__) && $L == 16
  return (xf32)__builtin_ia32_permvarsf512_mask(x, at, x, (unsigned short)-1);
#else
  xf32 r; for (int l = 0; l < $L; l++) r[l] = x[at[l]]; return r;
#endif
}""")
vector.vector("spread2_xf32", """static inline __attribute__((always_inline)) xf32 spread2_xf32(xf32 x, xf32 y, xi32 at) {
#if defined(__AVX512F__) && $L == 16
  return (xf32)__builtin_ia32_vpermt2varps512_mask(at, x, y, (unsigned short)-1);
#else
  xf32 r; for (int l = 0; l < $L; l++) r[l] = at[l] < $L ? x[at[l]] : y[at[l] - $L]; return r;
#endif
}""")

vector.vector("spread_xf32", """static inline __attribute__((always_inline)) xf32 spread_xf32(xf32 x, xi32 at) {
#ifdef __AVX2__
  return (xf32)__builtin_ia32_permvarsf256(x, at);
#else
  xf32 r; for (int l = 0; l < 8; l++) r[l] = x[at[l]]; return r;
#endif
}""", 8)
vector.vector("spread2_xf32", """static inline __attribute__((always_inline)) xf32 spread2_xf32(xf32 x, xf32 y, xi32 at) {
#ifdef __AVX2__
  return sel_xf32(at < 8, (xf32)__builtin_ia32_permvarsf256(x, at), (xf32)__builtin_ia32_permvarsf256(y, at));
#else
  xf32 r; for (int l = 0; l < 8; l++) r[l] = at[l] < 8 ? x[at[l]] : y[at[l] - 8]; return r;
#endif
}""", 8)


# the bfloat16 elements at `at`, widened: one instruction in place of three
vector.vector("spread_xbf16", """static inline __attribute__((always_inline)) xf32 spread_xbf16(xu16 x, xi32 at) {
#if defined(__AVX512BW__) && $L == 16
  xf32 r; __asm__("vpermw %g1, %2, %0%{%3%}%{z%}" : "=v"(r) : "v"(x), "v"(at << 16), "Yk"(0xaaaaaaaau)); return r;
#else
  return spread_xf32(f_xbf16(x), at);
#endif
}""")


def do_banded(self: Emitter, s: Banded) -> None:
    """Zero the accumulators; for every tap row run over channels and columns; leave the sums in scratch."""
    if self.lanes != s.lanes:
        raise TooNarrow
    bounds = s.column_bounds()
    if bounds is None or s.a.dtype.name not in SCALAR or s.b.dtype.name not in VECTOR:
        raise Unsupported("EMI001", detail=f"grouped convolution of {s.a.dtype} and {s.b.dtype}")
    acc, _ = self.base(s.acc)
    names = [[self.fresh("q") for _ in range(s.vectors)] for _ in range(s.rows)]
    places = [(q, f"*(xf32u *)({acc} + {s.lanes * (m * s.vectors + v)})") for m, row in enumerate(names) for v, q in enumerate(row)]
    self.line(f"xf32 {', '.join(f'{q} = {{0}}' for q, _ in places)};")
    cut = cut_sum([*(self.ranges.interval(e).hi for _, e in s.taps), s.channels], CHUNK, s.width)
    at, piece = cut or (-1, 0)
    part = None
    if cut:
        self.line(f"for (int q = 0; q < {s.lanes * len(places)}; q += {s.lanes}) *(xf32u *)({acc} + q) = (xf32){{0}};")
    for j, (axis, extent) in enumerate((*s.taps, (s.c, const(s.channels)))):
        part = open_pieces(self, extent, piece) if j == at else None
        if axis is not s.c:
            open_loop(self, axis, extent, part)
    _tap_row(self, s, names, part or ("0", str(s.channels)), *bounds)
    for _ in s.taps[max(at, 0) :]:
        self.close()
    for q, place in places:
        self.line(f"{place} += {q}; {q} = (xf32){{0}};" if cut else f"{place} = {q};")
    for _ in range(at + 1):
        self.close()
    self.forget(s.acc)


def _tap_row(
    self: Emitter, s: Banded, names: list[list[str]], channels: Bounds, fixed: list[Expr], least: list[Expr], ends: list[Expr]
) -> None:
    """All columns of some channels of one tap row, where it lies inside."""
    stride, dilation = s.steps
    a, b = self.address(s.a.buf, s.a.index), self.address(s.b.buf, s.b.index)
    zero = const(0)
    start: dict[Expr, Expr] = {s.m: zero, s.w: zero, s.c: zero, s.g: zero, s.lane: zero}
    a_text = f"{self.base(s.a.buf)[0]} + {self.emit(substitute(a.expr(), start)).text}"
    b_text = f"{self.base(s.b.buf)[0]} + {self.emit(substitute(b.expr(), start)).text}"
    column = self.emit(op("floordiv", a.terms.get(s.m, zero), const(stride))).text
    kc, kg = (_known(a.terms.get(x, zero)) for x in (s.c, s.g))
    kw, bc = (self.emit(b.terms.get(x, zero)).text for x in (s.w, s.c))
    tests = _column_tests(self, s, least, ends)
    guard = " && ".join(self.emit(t).text for t in fixed)
    p, q, i = self.fresh("p"), self.fresh("p"), self.fresh("i")
    self.open(f"{f'if ({guard}) ' if guard else ''}{{ const {STORED[s.a.dtype.name]}a *{p} = {a_text}; const {STORED[s.b.dtype.name]}a *{q} = {b_text};", [])
    span = 0 if s.per >= s.lanes * s.vectors else kg * (s.lanes // s.per - 1) + kc * (s.channels - 1) + 1
    load = _loader(self, s, span, kc, kg, i)
    self.open(f'_Pragma("GCC unroll 1") for (i64 {i} = {channels[0]}; {i} < {channels[1]}; {i}++) {{ __asm__ volatile("" ::: "memory");  /* no columns kept over channels */', [])
    weights = [[self.fresh("w") for _ in range(s.vectors)] for _ in range(s.width)]
    for w, row in enumerate(weights):
        for v, name in enumerate(row):
            self.line(f"  xf32 {name} = {VECTOR[s.b.dtype.name].format(f'{q} + {i} * {bc} + {w} * {kw} + {s.lanes * v}')};")
    columns: dict[int, list[tuple[int, int]]] = {}
    for m in range(s.rows):
        for w in range(s.width):
            columns.setdefault(m * stride + w * dilation, []).append((m, w))
    for j in sorted(columns):
        test = tests(j)
        if test is None:
            continue
        adds = " ".join(f"{names[m][v]} = fma_xf32(x, {weights[w][v]}, {names[m][v]});" for m, w in columns[j] for v in range(s.vectors))
        self.line(f"  {f'if ({test}) ' if test else ''}{{ xf32 x = {load(f'{p} + {j} * {column}')}; {adds} }}")
    self.close()
    self.close()


def _known(step: Expr) -> int:
    n = const_of(step)
    if n is None:
        raise Unsupported("EMI001", detail="grouped convolution over channels at an unknown distance")
    return n


def _column_tests(self: Emitter, s: Banded, least: list[Expr], ends: list[Expr]):  # type: ignore[no-untyped-def]
    """column -> the condition under which it may be read: "" for always, None for never."""
    stride, dilation = s.steps
    last = (s.width - 1) * dilation + 1
    live = const_of(s.live)
    if live is None or live < s.rows:
        ends = [*ends, (s.live - 1) * stride + last]
    lower = [(self.ranges.interval(e), e) for e in least]
    upper = [(self.ranges.interval(e), e) for e in ends]

    def test(j: int) -> str | None:
        parts = []
        for (lo, hi), e in lower:
            if lo is not None and j < lo:
                return None
            if hi is None or j < hi:
                parts.append(f"{j} >= {self.emit(e).text}")
        for (lo, hi), e in upper:
            if hi is not None and j >= hi:
                return None
            if lo is None or j >= lo:
                parts.append(f"{j} < {self.emit(e).text}")
        return " && ".join(dict.fromkeys(parts))

    return test


def _loader(self: Emitter, s: Banded, span: int, kc: int, kg: int, channel: str):  # type: ignore[no-untyped-def]
    """address of a column -> C text of its value of the current channel in every lane."""
    splat, whole = SPLAT[s.a.dtype.name], VECTOR[s.a.dtype.name]
    stored = STORED[s.a.dtype.name]
    if span == 0:
        return lambda p: splat.format(f"({p})[{channel} * {kc}]")
    exact = const_of(s.groups) == s.lanes // s.per
    live = self.fresh("n")
    if not exact:
        self.line(f"int {live} = (int)({self.emit(s.groups).text} - 1) * {kg} + {kc * (s.channels - 1) + 1};")

    def part(p: str, first: int, whole: str = whole) -> str:
        """A vector of elements from `first` on, as many as there are."""
        have = min(s.lanes, span - first)
        if exact and have == s.lanes:
            return whole.format(f"{p} + {first}")
        count = str(have) if exact else f"({live} > {first + s.lanes - 1} ? {s.lanes} : {live} > {first} ? {live} - {first} : 0)"
        text = f"ldn_x{stored}({p} + {first}, {count})"
        return text if stored == "f32" else whole.replace(f"*(const x{stored}u *)({{}})", text)

    if span == s.lanes and s.channels == 1 and kg == 1:
        return lambda p: part(p, 0)
    at = self.fresh("lane")
    places = ", ".join(str(min(lane // s.per, s.lanes // s.per - 1) * kg) for lane in range(s.lanes))
    self.line(f"const xi32 {at} = (xi32){{{places}}};")
    where = f"{at} + (int){channel} * {kc}" if s.channels > 1 else at
    if span <= s.lanes and s.a.dtype.name == "bf16":
        return lambda p: f"spread_xbf16({part(p, 0, '*(const xu16u *)({})')}, {where})"
    if span <= s.lanes:
        return lambda p: f"spread_xf32({part(p, 0)}, {where})"
    return lambda p: f"spread2_xf32({part(p, 0)}, {part(p, s.lanes)}, {where})"


STATEMENTS[Banded] = do_banded  # type: ignore[assignment]
