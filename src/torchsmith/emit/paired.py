"""A Paired statement -> C text: bfloat16 products on AMX tiles, on AVX-512-BF16 dot products, or widened to float32.

In: a Paired (ir/kernel.py) inside a kernel being printed. Out: lines in the emitter's open scope and the functions they call. The text is the
same for every processor: what it has is asked by the C preprocessor. AMX needs the kernel's leave once per process, a configuration when the
function starts and a release when it ends; k in whole tiles of 32.
"""

from __future__ import annotations

from ..ir import dtype as dt
from ..ir.expr import Expr, const, substitute
from ..ir.kernel import Paired
from ..ir.linear import const_of
from .c import STATEMENTS, Emitter
from .values import Val

LANES = 16
CHUNK = 512  # elements of k of rows that are gathered on the stack
BLOCK = 4  # rows that share a load of `b` without AMX

BEGIN = """#ifdef __AMX_BF16__
static int amx_allowed;
static inline int amx_begin(const void *shape) {
  if (!amx_allowed) { /* arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) */
    long r; __asm__ volatile("syscall" : "=a"(r) : "0"(158L), "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory"); amx_allowed = r == 0 ? 1 : -1;
  }
  if (amx_allowed > 0) __asm__ volatile("ldtilecfg (%0)" : : "r"(shape) : "memory");
  return amx_allowed > 0;
}
static inline void amx_end(int *on) { if (*on) __asm__ volatile("tilerelease" : : : "memory"); }
#endif
"""

DOT = """typedef u16 xpairs __attribute__((vector_size(64)));
typedef xpairs xpairsu __attribute__((aligned(2), may_alias));
typedef u32 xpair_bits __attribute__((vector_size(64)));
typedef u32 u32u __attribute__((aligned(2), may_alias));
static inline __attribute__((always_inline)) xf32 dot_pairs(xf32 c, u32 a, xpairs b) {
#ifdef __AVX512BF16__ /* as text: compilers disagree on the type of the builtin's operands */
  xpair_bits x = a + (xpair_bits){0};
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(x), "v"(b));
  return c;
#else
  union { u32 i; f32 f; } lo = {a << 16}, hi = {a & 0xffff0000u};
  c = fma_xf32(lo.f - (xf32){0}, (xf32)((xpair_bits)b << 16), c);
  return fma_xf32(hi.f - (xf32){0}, (xf32)((xpair_bits)b & 0xffff0000u), c);
#endif
}
"""


def pairs_function(vectors: int) -> tuple[str, str]:
    """acc[m][v] += a row m times b, for `live` rows, `n` pairs of k."""
    name = f"pairs_{vectors}"
    acc = [(m, v) for m in range(BLOCK) for v in range(vectors)]
    lines = [
        f"static __attribute__((noinline)) void {name}(f32a *acc, const u16a *a, i64 step, const u16a *b, i64 kb, i64 n, i64 live) {{",
        f"  for (i64 m = 0; m < live; m += {BLOCK}) {{",
        *(f"    const u16a *p{i} = a + (m + {i} < live ? m + {i} : live - 1) * step;" for i in range(BLOCK)),
        *(f"    xf32 c{i}_{v} = {{0}};" for i, v in acc),
        "    for (i64 k = 0; k < n; k++) {",
        *(f"      xpairs w{v} = *(const xpairsu *)(b + k * kb + {2 * LANES * v});" for v in range(vectors)),
        *(f"      u32 x{i} = *(const u32u *)(p{i} + 2 * k);" for i in range(BLOCK)),
        *(f"      c{i}_{v} = dot_pairs(c{i}_{v}, x{i}, w{v});" for i, v in acc),
        "    }",
        *(f"    if (m + {i} < live) *(xf32u *)(acc + ((m + {i}) * {vectors} + {v}) * {LANES}) += c{i}_{v};" for i, v in acc),
        "  }\n}",
    ]
    return name, "\n".join(lines) + "\n"


def amx_function(halves: int, vectors: int, first: int) -> tuple[str, str]:
    """Tiles 0-3 += a (`halves` tiles of rows, `first` rows in the first one) times b (`vectors` tiles of columns), n tiles of k."""
    name = f"amx_{halves}x{vectors}_{first}"
    lines = [
        f"static __attribute__((noinline)) void {name}(const u16a *a, i64 step, const u16a *b, i64 kb, i64 n) {{",
        "  step *= 2; kb *= 2;",
        "  for (i64 k = 0; k < n; k++, a += 32, b += 8 * kb) {",
    ]
    for v in range(vectors):
        lines.append(f'    __asm__ volatile("tileloadd (%0,%1,1), %%tmm{6 + v}" : : "r"(b + {32 * v}), "r"(kb) : "memory");')
    for h in range(halves):
        start = "a" if h == 0 else f"(const char *)a + {first} * step"
        lines.append(f'    __asm__ volatile("tileloadd (%0,%1,1), %%tmm{4 + h}" : : "r"({start}), "r"(step) : "memory");')
        lines += [f'    __asm__ volatile("tdpbf16ps %%tmm{6 + v}, %%tmm{4 + h}, %%tmm{2 * h + v}" : : : "memory");' for v in range(vectors)]
    lines.append("  }\n}")
    return name, "#ifdef __AMX_BF16__\n" + "\n".join(lines) + "\n#endif\n"


def do_paired(self: Emitter, s: Paired) -> None:
    """Zero the sums; for every tap add the product of rows and packed pairs."""
    acc, _ = self.base(s.acc)
    self.use("fma_xf32(")
    self.functions.setdefault("dot_pairs", DOT)
    plain, text = pairs_function(s.vectors)
    self.functions.setdefault(plain, text)
    size = s.rows * s.vectors * LANES
    tiled = s.pairs % 16 == 0
    on = self.fresh("amx")
    self.line(f"for (int q = 0; q < {size}; q += {LANES}) *(xf32u *)({acc} + q) = (xf32){{0}};")
    if tiled:
        _configure(self, s, on)
        for t in _tiles(s):
            _amx_line(self, on, f'__asm__ volatile("tilezero %%tmm{t}" : : : "memory")')
    for axis, extent in s.taps:
        self.extents[axis] = extent
        name = self.fresh("i")
        self.open(f"for (i64 {name} = 0; {name} < {self.emit(extent).text}; {name}++) {{", [axis])
        self.scopes[-1].memo[axis] = Val(name, dt.index, False)
    _tap(self, s, acc, plain, on if tiled else "")
    for _ in s.taps:
        self.close()
    if tiled:
        first = _first(s)
        for t in _tiles(s):
            place = f"{acc} + {t // 2} * {first * s.vectors * LANES} + {t % 2 * LANES}"
            _amx_line(self, on, f'__asm__ volatile("tilestored %%tmm{t}, (%0,%1,1)" : : "r"({place}), "r"((i64){s.vectors * LANES * 4}) : "memory")')
    self.forget(s.acc)


def _first(s: Paired) -> int:
    """Rows of the first hardware tile."""
    return s.rows if s.rows <= LANES else (s.rows + 1) // 2


def _tiles(s: Paired) -> list[int]:
    return [2 * h + v for h in range(1 if s.rows <= LANES else 2) for v in range(s.vectors)]


def _amx_line(self: Emitter, on: str, text: str) -> None:
    self.line("#ifdef __AMX_BF16__")
    self.line(f"if ({on}) {text};")
    self.line("#endif")


def _configure(self: Emitter, s: Paired, on: str) -> None:
    """Shapes of the eight tiles: sums 0-3, rows of `a` 4 and 5, pairs of `b` 6 and 7."""
    first = _first(s)
    rows = [first, first, s.rows - first, s.rows - first, first, s.rows - first, 16, 16]
    rows = [max(r, 1) for r in rows]
    self.functions.setdefault("amx_begin", BEGIN)
    name = f"shape_{first}_{s.rows}"
    shape = [1, 0, *[0] * 14, *(x for _ in range(8) for x in (64, 0)), *[0] * 16, *rows, *[0] * 8]
    text = f"static const unsigned char {name}[64] __attribute__((aligned(64))) = {{{', '.join(map(str, shape))}}};\n"
    self.functions.setdefault(name, text)
    self.line("#ifdef __AMX_BF16__", 0)
    self.line(f"int {on} __attribute__((cleanup(amx_end))) = amx_begin({name});", 0)
    self.line("#endif", 0)


def _tap(self: Emitter, s: Paired, acc: str, plain: str, on: str) -> None:
    a, b = self.address(s.a.buf, s.a.index), self.address(s.b.buf, s.b.index)
    zero = const(0)
    start: dict[Expr, Expr] = {s.m: zero, s.pair: zero, s.part: zero, s.n: zero}
    a_text = f"{self.base(s.a.buf)[0]} + {self.emit(substitute(a.expr(), start)).text}"
    b_text = f"{self.base(s.b.buf)[0]} + {self.emit(substitute(b.expr(), start)).text}"
    step, kb = self.emit(a.terms.get(s.m, zero)).text, self.emit(b.terms.get(s.pair, zero)).text
    live = self.emit(s.live).text
    usual = f"{plain}({acc}, {a_text}, {step}, {b_text}, {kb}, {s.pairs}, {live});"
    if not on:
        self.line(usual)
        return
    halves = 1 if s.rows <= LANES else 2
    name, text = amx_function(halves, s.vectors, _first(s))
    self.functions.setdefault(name, text)
    self.line("#ifdef __AMX_BF16__")
    whole = f"{name}({a_text}, {step}, {b_text}, {kb}, {s.pairs // 16});"
    if const_of(s.live) == s.rows:
        self.line(f"if ({on}) {whole} else")
    else:
        k = self.fresh("i")
        chunk = min(CHUNK, 2 * s.pairs)
        copy = f"__builtin_memcpy(g + q * {chunk}, {a_text} + (q < {live} ? q : {live} - 1) * {step} + {k}, c * 2)"
        self.line(f"if ({on} && {live} >= {s.rows}) {whole} else if ({on}) {{ u16 g[{s.rows * chunk}] __attribute__((aligned(64)));")
        self.line(f"  for (i64 {k} = 0; {k} < {2 * s.pairs}; {k} += {chunk}) {{ i64 c = {2 * s.pairs} - {k} < {chunk} ? {2 * s.pairs} - {k} : {chunk};")
        self.line(f"    for (i64 q = 0; q < {s.rows}; q++) {copy};")
        self.line(f"    {name}((const u16a *)g, {chunk}, {b_text} + {k} / 2 * {kb}, {kb}, c / 32); }} }} else")
    self.line("#endif")
    self.line(usual)


STATEMENTS[Paired] = do_paired  # type: ignore[assignment]
