"""Product and Transpose statements -> C text: small products between operands that need no packing, and blocks turned in registers.

In: statements (ir/kernel.py) inside a kernel being printed. Out: lines in the emitter's open scope, and one static function per shape:

    product_RxV(c, a, sm, ka, b, rows, n)     c[m][v] (+)= sum over k < n of splat(a[m * sm + k * ka]) * b[k * kb + 16 v ...]
    turn_T(to, pitch, from, sm, rows, n)      to[n][m] = from[m][n], a square of registers at a time

R x V accumulators stay in registers while k runs; rows past the end repeat the last one and are not stored.
"""

from __future__ import annotations

from ..codes import Unsupported
from ..ir.blocks import Product, Transpose
from ..ir.dtype import DType
from ..ir.expr import Expr, const, substitute
from ..ir.linear import const_of
from ..ir.target import Target
from .c import STATEMENTS, Emitter
from .values import STORED

LANES = 16  # columns that a Product takes at a time
WIDEST = 4  # times as many are the columns of the widest register tile
TALLEST, SHORTEST = 8, 6  # rows of a register tile: most, and fewest of one that is widened
# storage type -> C text of a vector, as f32 (f64 as it is): whole, and the first n elements
_WHOLE = {"f32": "*(const turned_f32u *)({0})", "f64": "*(const turned_f64u *)({0})", "bf16": "f_xbf16(*(const xu16u *)({0}))", "f16": "f_xf16(*(const xu16u *)({0}))",
          "bool": "CV(up_xu8(*(const xu8u *)({0})), xf32)"}  # fmt: skip
_PART = {"f32": "(turned_f32)__builtin_ia32_loadups512_mask((const float *)({0}), (turned_f32){{0}}, (unsigned short)((1u << {1}) - 1u))",
         "f64": "(turned_f64)__builtin_ia32_loadupd512_mask((const double *)({0}), (turned_f64){{0}}, (unsigned char)((1u << {1}) - 1u))",
         "bf16": "f_xbf16(ldn_xu16({0}, {1}))", "f16": "f_xf16(ldn_xu16({0}, {1}))",
         "bool": "CV(up_xu8(ldn_xu8({0}, {1})), xf32)"}  # fmt: skip
_PIECE = "({{ turned_$ q = {{0}}; __builtin_memcpy(&q, {0}, (unsigned)({1}) * sizeof q[0]); q; }})"
TRANSPOSED = frozenset(_WHOLE)


def product_function(rows: int, vectors: int, pitch: int, kb: str, sm: str, ka: str, add: bool, lanes: int) -> tuple[str, str]:
    """(name, C text) of one column of register tiles. Strides are C literals, or "" where they are only known in the call. `lanes`: of
    the kernel's vectors; beside 8-byte elements two of them are a column of 16."""
    known = "_".join(x or "n" for x in (str(pitch), kb, sm, ka))
    name = f"product_{rows}x{vectors}_{known}{'_add' if add else ''}"
    rest = "".join(f", i64 {p}" for p, value in (("kb", kb), ("sm", sm), ("ka", ka)) if not value)
    kb, sm, ka = kb or "kb", sm or "sm", ka or "ka"
    vectors *= LANES // lanes
    acc = [[f"c{m}_{v}" for v in range(vectors)] for m in range(rows)]
    lines = [
        f"static __attribute__((noinline)) void {name}(f32a *c, const f32a *a, const f32a *b, i64 rows, i64 n{rest}) {{",
        f"  for (i64 m = 0; m < rows; m += {rows}, c += {rows * pitch}) {{",
        "    i64 last = rows - m - 1;",
        *(f"    const f32a *p{m} = a + (m + ({m} < last ? {m} : last)) * {sm};" for m in range(rows)),
        *(f"    xf32 {', '.join(f'{c} = {{0}}' for c in row)};" for row in acc),
        "    const f32a *w = b;",
        f"    for (i64 k = 0; k < n; k++, w += {kb}) {{",
        *(f"      xf32 w{v} = *(const xf32u *)(w + {lanes * v});" for v in range(vectors)),
    ]
    for m, row in enumerate(acc):
        fma = " ".join(f"{c} = fma_xf32(x, w{v}, {c});" for v, c in enumerate(row))
        lines.append(f"      {{ xf32 x = p{m}[k * {ka}] - (xf32){{0}}; {fma} }}")
    lines.append("    }")
    for m, row in enumerate(acc):
        places = [f"*(xf32u *)(c + {m * pitch + lanes * v})" for v in range(vectors)]
        body = " ".join(f"{p} {'+=' if add else '='} {c};" for p, c in zip(places, row, strict=True))
        lines.append(f"    {f'if ({m} <= last) ' if m else ''}{{ {body} }}")
    return name, "\n".join([*lines, "  }", "}"]) + "\n"


def tile_rows(self: Emitter, columns: int) -> int:
    """Rows of a register tile of columns * LANES columns: beside the accumulators a register per vector of b and one for a."""
    registers, vectors = self.kernel.target.vectors.registers, columns * LANES // self.kernel.target.vectors.lanes()
    return max(1, min(TALLEST, (registers - 1 - vectors) // vectors))


def _text(self: Emitter, e: Expr) -> str:
    return self.emit(e).text


def do_product(self: Emitter, s: Product) -> None:
    """Cut the columns into register tiles."""
    a, b = self.address(s.a.buf, s.a.index), self.address(s.b.buf, s.b.index)
    if s.a.mask is not None or s.b.mask is not None or const_of(b.terms.get(s.n, const(0))) != 1:
        raise Unsupported("EMI001", detail="product of masked or strided operands")
    zero = const(0)
    sm, ka, kb = (lin.terms.get(x, zero) for lin, x in ((a, s.m), (a, s.k), (b, s.k)))
    start: dict[Expr, Expr] = {s.m: zero, s.k: zero, s.n: zero}
    a_text = f"{self.base(s.a.buf)[0]} + {_text(self, substitute(a.expr(), start))}"
    b_text = f"{self.base(s.b.buf)[0]} + {_text(self, substitute(b.expr(), start))}"
    fixed = [str(const_of(e)) if const_of(e) is not None else "" for e in (kb, sm, ka)]
    rest = "".join(f", {_text(self, e)}" for e, value in zip((kb, sm, ka), fixed, strict=True) if not value)
    rows, extent = _text(self, s.rows), _text(self, s.extent)
    out, _ = self.base(s.out)
    self.use("fma_xf32(")

    def tile(vectors: int, at: str) -> str:
        tallest = tile_rows(self, vectors)
        height = min(tallest, const_of(s.rows) or tallest)
        name, text = product_function(height, vectors, s.pitch, fixed[0], fixed[1], fixed[2], s.add, self.lanes)
        self.functions.setdefault(name, text)
        return f"{name}({out} + {at}, {a_text}, {b_text} + {at}, {rows}, {extent}{rest});"

    columns = const_of(s.columns)
    most = max((n for n in range(2, WIDEST + 1) if tile_rows(self, n) >= SHORTEST), default=1)
    if columns is not None:
        at = 0
        for vectors in even_parts(-(-columns // LANES), most):
            self.line(tile(vectors, str(at)))
            at += LANES * vectors
    else:
        left, at_name = self.fresh("n"), self.fresh("q")
        widest = min(most, s.pitch // LANES)
        self.line(f"for (i64 {left} = ({_text(self, s.columns)} + {LANES - 1}) / {LANES}, {at_name} = 0; {left} > 0; ) {{")
        for vectors in range(widest, 0, -1):
            head = "" if vectors == widest else "else "
            test = f"if ({left} >= {vectors}) " if vectors > 1 else ""
            self.line(f"  {head}{test}{{ {tile(vectors, at_name)} {left} -= {vectors}; {at_name} += {LANES * vectors}; }}")
        self.line("}")
    self.forget(s.out)


def even_parts(vectors: int, widest: int) -> list[int]:
    """5 -> [3, 2]: tiles of nearly the same width."""
    count = -(-vectors // widest)
    return [vectors // count + (i < vectors % count) for i in range(count)]


def turn_function(d: DType, target: Target, room: int, in_vectors: bool) -> tuple[str, str]:
    """(name, C text): L rows of a vector are loaded, exchanged at distances 1, 2, 4, .., and stored as L columns; or element by element."""
    name, kind = f"turn_{d}{'' if room == target.vectors.bytes else f'_{room}'}", STORED[d.name]
    made, bits = ("f64", 8) if d.name == "f64" else ("f32", 4)
    lanes, least = target.vectors.lanes(bits), room // bits
    # the kernel's vectors may be others than these
    part = _PART[d.name] if target.vectors.masks or d.name not in ("f32", "f64") else _PIECE.replace("$", made)
    has = {64: "defined(__AVX512F__)", 32: "defined(__AVX__)"}.get(target.vectors.bytes, "defined(__SSE2__)")
    rounded = "rows" if least == lanes else f"(rows + {least - 1}) / {least} * {least}"
    unroll = f'      _Pragma("GCC unroll {lanes}")\n'
    steps = ""
    for s in (1, 2, 4, 8)[: lanes.bit_length() - 1]:
        low = ", ".join(str(q if not q & s else q - s + lanes) for q in range(lanes))
        high = ", ".join(str(q + s if not q & s else q + lanes) for q in range(lanes))
        steps += (
            f"{unroll}      for (int i = 0; i < {lanes}; i++) if (!(i & {s})) {{ turned_{made} a = r[i], b = r[i + {s}]; "
            f"r[i] = __builtin_shufflevector(a, b, {low}); r[i + {s}] = __builtin_shufflevector(a, b, {high}); }}\n"
        )
    whole, part = _WHOLE[d.name].format("p"), part.format("p", "(int)(n - j)")
    return name, (
        f"#ifndef TURNED_{made}\n#define TURNED_{made}\ntypedef {made} turned_{made} __attribute__((vector_size({target.vectors.bytes})));\n"
        f"typedef turned_{made} turned_{made}u __attribute__((aligned(4), may_alias));\n#endif\n"
        f"static __attribute__((noinline)) void {name}({made}a *to, i64 pitch, const {kind}a *from, i64 sm, i64 rows, i64 n) {{\n"
        f"  for (i64 m = 0; m < {rounded}; m += {lanes}) for (i64 j = 0; j < n; j += {lanes}) {{\n"
        f"#if {has if in_vectors else 0}\n    turned_{made} r[{lanes}]; int live = rows - m < {lanes} ? (int)(rows - m) : {lanes}, cut = n - j < {lanes};\n"
        f"{unroll}      for (int i = 0; i < {lanes}; i++) {{ const {kind}a *p = from + (m + i) * sm + j; "
        f"if (i >= live) r[i] = (turned_{made}){{0}}; else if (cut) r[i] = {part}; else r[i] = {whole}; }}\n{steps}"
        f"{unroll}      for (int i = 0; i < {lanes}; i++) if (j + i < n) *(turned_{made}u *)(to + (j + i) * pitch + m) = r[i];\n"
        f"#else\n    for (i64 k = j; k < n && k < j + {lanes}; k++) for (i64 i = m; i < m + {lanes}; i++) {{\n"
        f"      {made} x = 0; if (i < rows) {{ const {kind}a *p = from + i * sm + k; x = {_ONE[d.name].format('*p')}; }}\n"
        "      to[k * pitch + i] = x;\n    }\n#endif\n  }\n}\n"
    )


_ONE = {"f32": "{}", "f64": "{}", "bf16": "f_bf16({})", "f16": "f_f16({})", "bool": "(f32)({} != 0)"}


def do_transpose(self: Emitter, s: Transpose) -> None:
    """One call."""
    source = self.address(s.source.buf, s.source.index)
    d = s.source.dtype
    if d.name not in TRANSPOSED or s.source.mask is not None or const_of(source.terms.get(s.n, const(0))) != 1:
        raise Unsupported("EMI001", detail=f"turning a masked or strided block of {d}")
    zero = const(0)
    at = _text(self, substitute(source.expr(), {s.m: zero, s.n: zero}))
    target = self.kernel.target
    whole = self.lanes == target.vectors.lanes() or d.name in ("f32", "f64")  # conversions take the kernel's vectors
    name, text = turn_function(d, target, s.room, whole)
    self.use(text)
    self.functions.setdefault(name, text)
    step = _text(self, source.terms.get(s.m, zero))
    out, base = self.base(s.out)[0], self.base(s.source.buf)[0]
    self.line(f"{name}({out}, {s.pitch}, {base} + {at}, {step}, {_text(self, s.rows)}, {_text(self, s.columns)});")
    self.forget(s.out)


STATEMENTS[Product] = do_product  # type: ignore[assignment]
STATEMENTS[Transpose] = do_transpose  # type: ignore[assignment]
