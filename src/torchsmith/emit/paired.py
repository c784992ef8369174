"""A Paired statement -> C text: bfloat16 products on AMX tiles, on AVX-512-BF16 dot products, or widened to float32.

In: a Paired (ir/kernel.py) inside a kernel being printed. Out: lines in the emitter's open scope and the functions they call. The text is the
same for every processor: what it has is asked by the C preprocessor. AMX needs the kernel's leave once per process, a configuration when the
function starts and a release when it ends; k in whole tiles of 32.
"""

from __future__ import annotations

import math

from ..ir import dtype as dt
from ..ir.expr import Expr, const, substitute
from ..ir.kernel import Paired
from ..ir.linear import const_of, range_of
from .c import STATEMENTS, Emitter
from .values import Val

LANES = 16
CHUNK = 512  # elements of k of rows that are gathered on the stack
MOST = 30  # accumulators, and a vector of `b` each: a few of the 32 registers are for rows
CHAINS = 8  # dot products under way at least: they take several cycles

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


def block_of(rows: int, vectors: int) -> int:
    """Rows that share their loads of `b`: as few wasted and as many together as the registers hold."""
    most = min(rows, MOST // (vectors + 1))
    return min(range(1, most + 1), key=lambda n: (-(-rows // n) * (n * vectors + 2), -n))


def pairs_function(block: int, vectors: int, odd: bool) -> tuple[str, str]:
    """acc[m][v] = row m of a times b, for `live` rows, `block` at a time: `taps` places in a and b, n pairs of k at each, and a last
    element where k is odd. Fewer rows than `block` go one by one."""
    name = f"pairs_{block}x{vectors}{'_odd' if odd else ''}"
    chains = max(1, min(4, CHAINS // (block * vectors)))
    sums = [(m, v, u) for m in range(block) for v in range(vectors) for u in range(chains)]
    rows = [f"*(const u32u *)((const char *)p{m // 3} + {m % 3} * step)" for m in range(block)]
    ends = [f"*(const u16a *)((const char *)p{m // 3} + {m % 3} * step)" for m in range(block)]
    bases = range((block + 2) // 3)

    def pair(u: int, read: list[str], c: int) -> str:
        weights = [f"w{v} = *(const xpairsu *)(q + {u} * kb + {2 * LANES * v})" for v in range(vectors)]
        if u:
            read = [r.replace("*(const u32u *)(", f"*(const u32u *)({4 * u} + ") for r in read]
        dots = [f"{{ u32 x = {read[m]}; {' '.join(f'c{m}_{v}_{c} = dot_pairs(c{m}_{v}_{c}, x, w{v});' for v in range(vectors))} }}" for m in range(block)]
        return f"{{ xpairs {', '.join(weights)}; {' '.join(dots)} }}"

    ahead = "".join(f" p{i} = (const u16a *)((const char *)p{i} + {{0}});" for i in bases)
    lines = [
        f"static __attribute__((noinline)) void {name}(f32a *acc, const u16a *a, i64 step, const u16a *b, i64 kb, i64 n, const i64 *at, i64 taps, i64 live) {{",
        "  step *= 2;",
        f"  for (i64 m = 0, rest = live; rest > 0; m += {block}, rest -= {block}) {{",
        f"    if (rest < {block}) m -= {block} - rest;" if block > 1 else "",
        f"    xf32 {', '.join(f'c{m}_{v}_{u} = {{0}}' for m, v, u in sums)};",
        "    for (i64 t = 0; t < taps; t++) {",
        "      const u16a *q = b + at[2 * t + 1];",
        *(f"      const u16a *p{i} = (const u16a *)((const char *)(a + at[2 * t]) + (m + {3 * i}) * step);" for i in bases),
        "      i64 k = 0;",
    ]
    if chains > 1:
        lines.append(f"      for (; k + {chains} <= n; k += {chains}, q += {chains} * kb) {{ {' '.join(pair(u, rows, u) for u in range(chains))}{ahead.format(4 * chains)} }}")
    lines.append(f"      for (; k < n; k++, q += kb) {{ {pair(0, rows, 0)}{ahead.format(4)} }}")
    if odd:
        lines.append(f"      {pair(0, ends, 0)}")
    lines.append("    }")
    for m in range(block):
        for v in range(vectors):
            total = " + ".join(f"c{m}_{v}_{u}" for u in range(chains))
            lines.append(f"    *(xf32u *)(acc + ((m + {m}) * {vectors} + {v}) * {LANES}) = {total};")
    lines.append("  }\n}")
    return name, "\n".join(x for x in lines if x) + "\n"


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
    """The sums of the tile, in its scratch: by AMX tiles where k comes in whole ones, else by dot products."""
    acc, _ = self.base(s.acc)
    self.use("fma_xf32(")
    self.functions.setdefault("dot_pairs", DOT)
    if s.depth % (2 * LANES) == 0:
        on = self.fresh("amx")
        _configure(self, s, on)
        self.open(f"if ({on}) {{", [])
        _by_tiles(self, s, acc)
        self.close()
        self.open(f"if (!{on}) {{", [])
        _by_pairs(self, s, acc)
        self.close()
    else:
        _by_pairs(self, s, acc)
    self.forget(s.acc)


def _tap_loops(self: Emitter, s: Paired) -> int:
    """Open the loops over taps that exist; how many blocks that are."""
    for axis, extent in s.taps:
        self.extents[axis] = extent
        name = self.fresh("i")
        self.open(f"for (i64 {name} = 0; {name} < {self.emit(extent).text}; {name}++) {{", [axis])
        self.scopes[-1].memo[axis] = Val(name, dt.index, False)
    if s.a.mask is None:
        return len(s.taps)
    self.open(f"if ({self.emit(s.a.mask).text}) {{", [])
    return len(s.taps) + 1


def _places(self: Emitter, s: Paired) -> tuple[str, str]:
    """Where row 0 and pair 0 of a tap lie in the two buffers, as C text."""
    start: dict[Expr, Expr] = dict.fromkeys((s.m, s.pair, s.part, s.n), const(0))
    a, b = (self.emit(substitute(self.address(x.buf, x.index).expr(), start)).text for x in (s.a, s.b))
    return a, b


def _steps(self: Emitter, s: Paired) -> tuple[str, str]:
    """The distance of rows and of pairs, as C text."""
    a, b = (self.address(x.buf, x.index).terms.get(axis, const(0)) for x, axis in ((s.a, s.m), (s.b, s.pair)))
    return self.emit(a).text, self.emit(b).text


def _by_pairs(self: Emitter, s: Paired, acc: str) -> None:
    """A table of the taps' places, then all of them for a few rows at a time."""
    odd, live = s.depth % 2 == 1, self.emit(s.live).text
    block = block_of(s.rows, s.vectors)
    name, text = pairs_function(block, s.vectors, odd)
    self.functions.setdefault(name, text)
    taps = math.prod(const_of(e) or 1 for _, e in s.taps)
    at, count = self.fresh("at"), self.fresh("n")
    self.line(f"i64 {at}[{2 * taps}], {count} = 0;")
    blocks = _tap_loops(self, s)
    a_at, b_at = _places(self, s)
    self.line(f"{at}[2 * {count}] = {a_at}; {at}[2 * {count} + 1] = {b_at}; {count}++;")
    for _ in range(blocks):
        self.close()
    step, kb = _steps(self, s)
    given = f"({acc}, {self.base(s.a.buf)[0]}, {step}, {self.base(s.b.buf)[0]}, {kb}, {s.depth // 2}, {at}, {count}, {live});"
    if (range_of(s.live, self.extents)[0] or 0) < block:
        single, text = pairs_function(1, s.vectors, odd)
        self.functions.setdefault(single, text)
        name = f"({live} < {block} ? {single} : {name})"
    self.line(name + given)


def _by_tiles(self: Emitter, s: Paired, acc: str) -> None:
    """Sums in tile registers over all taps."""
    first = _first(s)
    for t in _tiles(s):
        _amx_line(self, f'__asm__ volatile("tilezero %%tmm{t}" : : : "memory");')
    blocks = _tap_loops(self, s)
    (a_at, b_at), (step, kb) = _places(self, s), _steps(self, s)
    name, text = amx_function(1 if s.rows <= LANES else 2, s.vectors, first)
    self.functions.setdefault(name, text)
    live, a_text, b_text = self.emit(s.live).text, f"{self.base(s.a.buf)[0]} + {a_at}", f"{self.base(s.b.buf)[0]} + {b_at}"
    whole = f"{name}({a_text}, {step}, {b_text}, {kb}, {s.depth // 32});"
    if const_of(s.live) == s.rows:
        _amx_line(self, whole)
    else:  # rows that do not exist repeat the last one
        k = self.fresh("i")
        chunk = min(CHUNK, s.depth)
        copy = f"__builtin_memcpy(g + q * {chunk}, {a_text} + (q < {live} ? q : {live} - 1) * {step} + {k}, c * 2)"
        self.line("#ifdef __AMX_BF16__")
        self.line(f"if ({live} >= {s.rows}) {whole} else {{ u16 g[{s.rows * chunk}] __attribute__((aligned(64)));")
        self.line(f"  for (i64 {k} = 0; {k} < {s.depth}; {k} += {chunk}) {{ i64 c = {s.depth} - {k} < {chunk} ? {s.depth} - {k} : {chunk};")
        self.line(f"    for (i64 q = 0; q < {s.rows}; q++) {copy};")
        self.line(f"    {name}((const u16a *)g, {chunk}, {b_text} + {k} / 2 * {kb}, {kb}, c / 32); }} }}")
        self.line("#endif")
    for _ in range(blocks):
        self.close()
    for t in _tiles(s):
        place = f"{acc} + {t // 2} * {first * s.vectors * LANES} + {t % 2 * LANES}"
        _amx_line(self, f'__asm__ volatile("tilestored %%tmm{t}, (%0,%1,1)" : : "r"({place}), "r"((i64){s.vectors * LANES * 4}) : "memory");')


def _first(s: Paired) -> int:
    """Rows of the first hardware tile."""
    return s.rows if s.rows <= LANES else (s.rows + 1) // 2


def _tiles(s: Paired) -> list[int]:
    return [2 * h + v for h in range(1 if s.rows <= LANES else 2) for v in range(s.vectors)]


def _amx_line(self: Emitter, text: str) -> None:
    self.line("#ifdef __AMX_BF16__")
    self.line(text)
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
    self.line("#else", 0)
    self.line(f"enum {{ {on} = 0 }};", 0)
    self.line("#endif", 0)


STATEMENTS[Paired] = do_paired  # type: ignore[assignment]
