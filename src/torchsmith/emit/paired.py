"""Paired and Interleave statements -> C text: bfloat16 products on AMX tiles, on AVX-512-BF16 dot products, or widened to float32.

In: statements (ir/kernel.py) inside a kernel being printed. Out: lines in the emitter's open scope and the functions they call. The text is the
same for every processor: what it has is asked by the C preprocessor. AMX needs the kernel's leave once per process, a configuration when the
function starts, another one where a tile has fewer rows, and a release when it ends. It takes 32 of k at a time, or all of fewer: what else
is no multiple of 32 is copied with zeros behind it, and the copy is kept while the tiles of columns pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..ir import dtype as dt
from ..ir.blocks import Interleave, Paired
from ..ir.expr import Axis, Expr, Load, const, substitute
from ..ir.kernel import Loop, Stmt, expressions, rewrite, statements
from ..ir.linear import const_of
from .c import STATEMENTS, WITH_REST, Emitter
from .values import TooNarrow, Val

LANES = 16
DEEP = 32  # of k in a hardware tile
MOST = 30  # accumulators, and a vector of `b` each: a few of the 32 registers are for rows
CHAINS = 8  # dot products under way at least: they take several cycles

BEGIN = """#ifdef __AMX_BF16__
static int amx_allowed;
/* Tiles of `rows` rows, 16 in the first hardware tile, and `deep` of k: sums 0-3, rows of a 4 and 5, pairs of b 6 and 7. */
static inline void amx_shape(i64 rows, int deep) {
  unsigned char s[64] __attribute__((aligned(64))) = {1};
  int lo = rows < 16 ? (int)rows : 16, hi = rows > 16 ? (int)rows - 16 : 1;
  for (int t = 0; t < 8; t++) { s[16 + 2 * t] = (unsigned char)(t == 4 || t == 5 ? 2 * deep : 64); s[48 + t] = (unsigned char)(t > 5 ? deep / 2 : t == 2 || t == 3 || t == 5 ? hi : lo); }
  __asm__ volatile("ldtilecfg (%0)" : : "r"(s) : "memory");
}
static inline int amx_begin(i64 rows, int deep) {
  if (!amx_allowed) { /* arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) */
    long r; __asm__ volatile("syscall" : "=a"(r) : "0"(158L), "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory"); amx_allowed = r == 0 ? 1 : -1;
  }
  if (amx_allowed > 0) amx_shape(rows, deep);
  return amx_allowed > 0;
}
static inline void amx_end(int *on) { if (*on) __asm__ volatile("tilerelease" : : : "memory"); }
#endif
"""

def copy_function(n: int) -> tuple[str, str]:
    """g[m][0, pitch) = n elements from each of the `taps` places of row m of a, then zeros; g has room for 32 elements more. A rest of n is
    moved in the narrowest vector that holds it, under a mask, so that what is written behind it is zeros until the next piece comes."""
    rest = n % DEEP
    width, register = next((w, r) for w, r in ((8, "xmm"), (16, "ymm"), (32, "zmm")) if rest <= w)
    name = f"side_by_side_{width if rest else 0}{'_long' if n >= DEEP else ''}"
    whole = "      for (i64 k = 0; k < n / 32; k++, p += 32, q += 32) __builtin_memcpy(q, p, 64);\n" if n >= DEEP else ""
    move = (
        f'      __asm__("kmovd %2, %%k1; vmovdqu16 (%1), %%{register}31%{{%%k1%}}%{{z%}}; vmovdqu16 %%{register}31, (%0)"\n'
        '              : : "r"(q), "r"(p), "r"(mask) : "memory", "xmm31", "k1");\n'
    )
    return name, (
        f"static __attribute__((noinline)) void {name}(u16 *g, i64 pitch, const u16a *a, i64 step, i64 rows, const i64 *at, i64 taps, i64 n) {{\n"
        "  u32 mask = (u32)((1u << n % 32) - 1); (void)mask;\n"
        "  for (i64 m = 0; m < rows; m++, g += pitch, a += step) {\n"
        "    u16 *q = g;\n    __builtin_memset(g + pitch - 32, 0, 64);\n"
        "    for (i64 t = 0; t < taps; t++, q += n % 32) {\n      const u16a *p = a + at[t];\n"
        f"#if defined(__AVX512BW__) && defined(__AVX512VL__)\n{whole}{move if rest else ''}"
        "#else\n      __builtin_memcpy(q, p, (unsigned long)n * 2); q += n / 32 * 32;\n#endif\n    }\n  }\n}\n"
    )


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


def amx_function(halves: int, vectors: int, soon: int) -> tuple[str, str]:
    """Tiles 0-3 += a (`halves` tiles of rows, 16 rows in the first one) times b (`vectors` tiles of columns), n tiles of k; `soon` lines of
    f are asked for with each of those."""
    name, kb = f"amx_{halves}x{vectors}{f'_{soon}' if soon else ''}", 4 * LANES * vectors
    lines = [
        f"static __attribute__((noinline)) void {name}(const u16a *a, i64 step, const u16a *b, i64 n{', const u16a *f' if soon else ''}) {{",
        f"  step *= 2; const i64 kb = {kb};",
        "  for (i64 k = 0; k < n; k++, a += 32, b += 8 * kb) {",
    ]
    if soon:
        lines.append(f"    for (int i = 0; i < {soon}; i++, f += 32) __builtin_prefetch(f, 0, 2);")
    for v in range(vectors):
        lines.append(f'    __asm__ volatile("tileloadd (%0,%1,1), %%tmm{6 + v}" : : "r"(b + {32 * v}), "r"(kb) : "memory");')
    for h in range(halves):
        start = "a" if h == 0 else "(const char *)a + 16 * step"
        lines.append(f'    __asm__ volatile("tileloadd (%0,%1,1), %%tmm{4 + h}" : : "r"({start}), "r"(step) : "memory");')
        lines += [f'    __asm__ volatile("tdpbf16ps %%tmm{6 + v}, %%tmm{4 + h}, %%tmm{2 * h + v}" : : : "memory");' for v in range(vectors)]
    lines.append("  }\n}")
    return name, "#ifdef __AMX_BF16__\n" + "\n".join(lines) + "\n#endif\n"


@dataclass(frozen=True, slots=True)
class Late:
    """How the rows of the tile before become results while this one's products run, as C text. `sums`: where this tile's go, `before` that
    tile's; `keep`: note that this tile is the one before now; with every `piece` tiles of k `rows` rows are finished."""

    sums: str
    before: str
    keep: str
    some: str
    rest: str
    piece: int


def do_paired(self: Emitter, s: Paired, rest: tuple[Stmt, ...]) -> None:
    """The sums of the tile: by AMX tiles where there are some, else by dot products; then what becomes of them. Where that is a loop over
    the tile's rows, AMX tiles leave it to the next tile, whose products leave the vector unit idle."""
    if self.lanes != LANES:
        raise TooNarrow
    acc, _ = self.base(s.acc)
    acc = acc if s.first is const(0) else f"({acc} + {self.emit(s.first).text} * {LANES * s.vectors})"
    self.use("fma_xf32(")
    self.functions.setdefault("dot_pairs", DOT)
    on, rows = _configure(self, s)
    copy = _copy_all(self, s) if s.joined else None
    late = None if _several(self) else _late(self, s, rest, acc)
    self.open(f"if ({on}) {{", [])
    self.line("#ifdef __AMX_BF16__")
    _by_tiles(self, s, acc, rows, copy, late)
    self.line("#endif")
    self.close()
    self.open(f"if (!{on}) {{", [])
    _by_pairs(self, s, acc, copy)
    if late is not None:
        self.line(f"{late.before} = {acc}; {late.keep} {late.rest}")
    self.close()
    self.forget(s.acc)
    if late is None:
        self.block(rest)


def _late(self: Emitter, s: Paired, rest: tuple[Stmt, ...], acc: str) -> Late | None:
    """Print `rest` as a function of a tile's axes and of some of its rows; None where it is no loop over many rows."""
    if len(rest) != 1 or not isinstance(rest[0], Loop) or rest[0].axis is not s.m or rest[0].carry or s.rows < LANES:
        return None
    inner = {x.axis for x in _loops(rest[0])}
    free = {x for e in expressions(rest[0]) for x in self.free(e) if not isinstance(x, Load)} - inner
    axes = sorted((x for x in free if isinstance(x, Axis)), key=lambda x: x.name)
    if len(axes) < len(free):
        return None
    first, m, n = Axis("late_first"), Axis("late_row"), Axis("late_rows")
    other = Emitter(self.kernel, self.lanes, self.most == 8)
    given = [(first, "first"), (n, "n"), *((x, f"x{i}") for i, x in enumerate(axes))]
    for x, name in given:
        other.scopes[0].memo[x] = Val(name, dt.index, False)
    other.ranges = self.ranges.inside(((first, const(s.rows)), (n, const(s.rows + 1))))
    other.open_buffers()
    other.block((Loop(m, n, "serial", tuple(rewrite(x, {s.m: first + m}, {}) for x in rest[0].body)),))
    self.used |= other.used
    self.functions = {**other.functions, **self.functions}
    name = f"finish_{acc}"
    text = "\n".join("  " + line for line in other.scopes[0].lines)
    self.functions[name] = (
        f"static __attribute__((noinline)) void {name}(void *const *bufs, const i64 *syms, const f32a *{acc}, "
        f"{', '.join(f'i64 {x}' for _, x in given)}) {{\n  (void)bufs; (void)syms;\n{text}\n}}\n"
    )
    live, done, sums, before = (self.fresh(x) for x in ("live", "done", "sums", "before"))
    kept = [self.fresh("kept") for _ in axes]
    size = s.rows * s.vectors * LANES
    self.line(f"i64 {live} = 0, {done} = 0{''.join(f', {k} = 0' for k in kept)}; (void){done};", 0)
    self.line(f"f32a {before}_room[{size}] __attribute__((aligned(64))), *{sums} = {acc}, *{before} = {before}_room; (void){sums};", 0)
    values = "".join(f" {k} = {self.emit(x).text};" for k, x in zip(kept, axes, strict=True))
    last = "".join(f", {k}" for k in kept)
    steps = max(1, _count(s) * -(-s.depth // DEEP))
    rows = max(2, -(-s.rows // steps))
    some = (
        f"if ({done} < {live}) {{ {name}(bufs, syms, {before}, {done}, {live} - {done} < {rows} ? {live} - {done} : {rows}{last}); {done} += {rows}; }}"
    )
    return Late(
        sums, before, f"{live} = {self.emit(s.live).text}; {done} = 0;{values}", some,
        f"if ({done} < {live}) {{ {name}(bufs, syms, {before}, {done}, {live} - {done}{last}); }} {done} = {live};", max(1, steps * rows // s.rows),
    )  # fmt: skip


def _loops(s: Loop) -> Iterator[Loop]:
    """`s` and the loops in it."""
    yield s
    for x in s.body:
        if isinstance(x, Loop):
            yield from _loops(x)


def _tap_loops(self: Emitter, s: Paired) -> int:
    """Open the loops over taps that exist; how many blocks that are."""
    for axis, extent in s.taps:
        self.ranges.bind(axis, extent)
        name = self.fresh("i")
        self.open(f"for (i64 {name} = 0; {name} < {self.emit(extent).text}; {name}++) {{", [axis])
        self.scopes[-1].memo[axis] = Val(name, dt.index, False)
    if s.a.mask is None:
        return len(s.taps)
    self.open(f"if ({self.emit(s.a.mask).text}) {{", [])
    return len(s.taps) + 1


def _count(s: Paired) -> int:
    """How many taps there are."""
    return math.prod(const_of(e) or 1 for _, e in s.taps)


def _pitch(s: Paired) -> int:
    """Elements of k of all taps, or of one, with the zeros behind them."""
    return -(-s.depth * (_count(s) if s.joined else 1) // DEEP) * DEEP


def _deep(s: Paired) -> int:
    """Of k in a hardware tile: a tap of fewer than 32 has tiles of its own size, so that its rows are read where they lie."""
    return s.depth if s.depth < DEEP and s.depth % 2 == 0 and not s.joined else DEEP


def _place(self: Emitter, x: Load, start: list[Axis]) -> str:
    """Where the tile begins in the buffer of `x`, as C text; `start`: axes that are 0 there."""
    zeros: dict[Expr, Expr] = dict.fromkeys(start, const(0))
    return self.emit(self.address(x.buf, tuple(substitute(i, zeros) for i in x.index)).expr()).text


def _of_a(self: Emitter, s: Paired) -> str:
    return _place(self, s.a, [s.m, s.k])


def _of_b(self: Emitter, s: Paired) -> str:
    taps = [x for x, _ in s.taps] if s.joined else []
    return _place(self, s.b, [s.n, s.k, *taps])


def _step(self: Emitter, s: Paired) -> str:
    """The distance of rows, as C text."""
    return self.emit(self.address(s.a.buf, s.a.index).terms.get(s.m, const(0))).text


def _kept(self: Emitter, s: Paired, size: int, key: str, fill: Callable[[str], None]) -> str:
    """A copy on the stack that is made where `key`, or the number of rows, is another than before; its name."""
    g, live = self.fresh("g"), self.emit(s.live).text
    fixed = const_of(s.live) is not None
    self.line(f"u16 {g}[{size + DEEP}] __attribute__((aligned(64))); const u16a *of_{g} = 0;{'' if fixed else f' i64 rows_{g} = 0;'}", 0)
    self.open(f"if (of_{g} != {key}{'' if fixed else f' || rows_{g} != {live}'}) {{", [])
    fill(g)
    self.line(f"of_{g} = {key};{'' if fixed else f' rows_{g} = {live};'}")
    self.close()
    return g


def _copy_all(self: Emitter, s: Paired) -> str:
    """The rows of all taps side by side; the name of the copy."""
    copying, text = copy_function(s.depth)
    self.functions.setdefault(copying, text)
    base, pitch = self.base(s.a.buf)[0], _pitch(s)
    zeros: dict[Expr, Expr] = {x: const(0) for x, _ in s.taps}
    first = substitute(s.a, zeros)
    assert isinstance(first, Load)

    def fill(g: str) -> None:
        at, count = self.fresh("at"), self.fresh("n")
        self.line(f"i64 {at}[{_count(s)}], {count} = 0;")
        blocks = _tap_loops(self, s)
        self.line(f"{at}[{count}++] = {_of_a(self, s)};")
        for _ in range(blocks):
            self.close()
        self.line(f"{copying}({g}, {pitch}, {base}, {_step(self, s)}, {self.emit(s.live).text}, {at}, {count}, {s.depth});")

    return _kept(self, s, s.rows * pitch, f"{base} + {_place(self, first, [s.m, s.k])}", fill)


def _by_pairs(self: Emitter, s: Paired, acc: str, copy: str | None) -> None:
    """A table of the taps' places, then all of them for a few rows at a time."""
    depth, taps = (s.depth, _count(s)) if copy is None else (-(-s.depth * _count(s) // 2) * 2, 1)
    odd, live, kb = depth % 2 == 1, self.emit(s.live).text, 2 * LANES * s.vectors
    block = block_of(s.rows, s.vectors)
    name, text = pairs_function(block, s.vectors, odd)
    self.functions.setdefault(name, text)
    at, count = self.fresh("at"), self.fresh("n")
    self.line(f"i64 {at}[{2 * taps}], {count} = 0;")
    blocks = _tap_loops(self, s) if copy is None else 0
    a_at = _of_a(self, s) if copy is None else "0"
    self.line(f"{at}[2 * {count}] = {a_at}; {at}[2 * {count} + 1] = {_of_b(self, s)}; {count}++;")
    for _ in range(blocks):
        self.close()
    a, step = (self.base(s.a.buf)[0], _step(self, s)) if copy is None else (f"(const u16a *){copy}", str(_pitch(s)))
    given = f"({acc}, {a}, {step}, {self.base(s.b.buf)[0]}, {kb}, {depth // 2}, {at}, {count}, {live});"
    if (self.ranges.interval(s.live).lo or 0) < block:
        single, text = pairs_function(1, s.vectors, odd)
        self.functions.setdefault(single, text)
        name = f"({live} < {block} ? {single} : {name})"
    self.line(name + given)


def _by_tiles(self: Emitter, s: Paired, acc: str, rows: str, copy: str | None, late: Late | None) -> None:
    """Sums in tile registers over all taps. Rows of a copy that do not exist may hold anything."""
    tall, live = s.rows > LANES, self.emit(s.live).text
    name, text = amx_function(2 if tall else 1, s.vectors, s.prefetch_lines)
    self.functions.setdefault(name, text)
    several = _several(self)
    if several:
        shape = f"{live if copy is None else s.rows} * 64 + {_deep(s)}"
        self.line(f"if ({rows} != {shape}) {{ {rows} = {shape}; amx_shape({rows} / 64, {_deep(s)}); }}")
    if const_of(s.live) != s.rows and copy is None:
        if not several:
            self.line(f"if ({rows} != {live}) {{ {rows} = {live}; amx_shape({rows}, {_deep(s)}); }}")
        if tall:
            single, text = amx_function(1, s.vectors, s.prefetch_lines)
            self.functions.setdefault(single, text)
            name = f"({live} > {LANES} ? {name} : {single})"
    tiles = [2 * h + v for h in range(2 if tall else 1) for v in range(s.vectors)]
    for t in tiles:
        self.line(f'__asm__ volatile("tilezero %%tmm{t}" : : : "memory");')
    base = self.base(s.b.buf)[0]
    if copy is not None:
        _pass(self, s, name, f"(const u16a *){copy}", str(_pitch(s)), f"{base} + {_of_b(self, s)}", _pitch(s) // DEEP, 0, late)
    else:
        _taps_by_tiles(self, s, name, base, late)
    if late is not None:
        self.line(late.rest)
    for t in tiles:
        place = f"{acc if late is None else late.sums} + {t // 2} * {LANES * s.vectors * LANES} + {t % 2 * LANES}"
        guard = "" if t < 2 or const_of(s.live) == s.rows or copy is not None else f"if ({live} > {LANES}) "
        self.line(f'{guard}__asm__ volatile("tilestored %%tmm{t}, (%0,%1,1)" : : "r"({place}), "r"((i64){s.vectors * LANES * 4}) : "memory");')
    if late is not None:
        self.line(f"{{ f32a *p = {late.before}; {late.before} = {late.sums}; {late.sums} = p; }} {late.keep}")
        self.line(f"if ({self.last}) {{ {late.rest} }}")


def _pass(self: Emitter, s: Paired, name: str, a: str, step: str, b: str, tiles: int, after: int, late: Late | None) -> None:
    """Add the products of `tiles` tiles of k; `after`: those of the same tap that came before."""
    if late is None or tiles <= late.piece:
        self.line(f"{name}({a}, {step}, {b}, {tiles}{_soon(self, s, after)});")
    else:
        p, q, k = (self.fresh(x) for x in ("p", "q", "k"))
        n = str(late.piece) if tiles % late.piece == 0 else f"({tiles} - {k} < {late.piece} ? {tiles} - {k} : {late.piece})"
        soon = "" if s.prefetch is None else f"{_soon(self, s, after)} + {k} * {s.prefetch_lines * DEEP}"
        self.line(f"const u16a *{p} = {a}, *{q} = {b};")
        self.open(f"for (i64 {k} = 0; {k} < {tiles}; {k} += {late.piece}, {p} += {late.piece * DEEP}, {q} += {late.piece * DEEP * LANES * s.vectors}) {{", [])
        self.line(f"{name}({p}, {step}, {q}, {n}{soon});")
        self.line(late.some)
        self.close()
        return
    if late is not None:
        self.line(late.some)


def _taps_by_tiles(self: Emitter, s: Paired, name: str, base: str, late: Late | None) -> None:
    """Whole tiles of k where they lie, the rest of each tap from a copy."""
    whole, rest, live, step = s.depth // _deep(s), s.depth % _deep(s), self.emit(s.live).text, _step(self, s)
    blocks = _tap_loops(self, s)
    a, b = f"{self.base(s.a.buf)[0]} + {_of_a(self, s)}", f"{base} + {_of_b(self, s)}"
    if rest:
        copying, text = copy_function(rest)
        self.functions.setdefault(copying, text)

        def fill(g: str) -> None:
            self.line(f"const i64 end_{g}[1] = {{{DEEP * whole}}};")
            self.line(f"{copying}({g}, {DEEP}, {a}, {step}, {live}, end_{g}, 1, {rest});")

        if blocks:
            g = self.fresh("g")
            self.line(f"u16 {g}[{(s.rows + 1) * DEEP}] __attribute__((aligned(64)));")
            fill(g)
        else:
            g = _kept(self, s, s.rows * DEEP, a, fill)
    if whole:
        _pass(self, s, name, a, step, b, whole, 0, late)
    if rest:
        _pass(self, s, name, f"(const u16a *){g}", str(DEEP), f"{b} + {whole * DEEP * LANES * s.vectors}", 1, whole, late)
    for _ in range(blocks):
        self.close()


def _soon(self: Emitter, s: Paired, after: int) -> str:
    """The argument of a function that prefetches, as C text; `after`: tiles of k that came before."""
    return "" if s.prefetch is None else f", {self.base(s.b.buf)[0]} + {self.emit(s.prefetch).text} + {after * s.prefetch_lines * DEEP}"


def _several(self: Emitter) -> bool:
    """Has the kernel more than one such statement, whose tiles may differ? They share one configuration."""
    return sum(isinstance(x, Paired) for x in statements(self.kernel.body)) > 1


def _configure(self: Emitter, s: Paired) -> tuple[str, str]:
    """Names of what says whether there are tiles, and of how many rows they are configured for (of several: 64 times that, and their k)."""
    several = _several(self)
    on, rows = ("amx_on", "amx_rows") if several else (self.fresh("amx"), self.fresh("rows"))
    if several and "amx_begin" in self.functions:
        return on, rows
    self.functions.setdefault("amx_begin", BEGIN)
    self.line("#ifdef __AMX_BF16__", 0)
    self.line(f"int {on} __attribute__((cleanup(amx_end))) = amx_begin({s.rows}, {_deep(s)}); i64 {rows} = {f'{s.rows} * 64 + {_deep(s)}' if several else s.rows}; (void){rows};", 0)
    self.line("#else", 0)
    self.line(f"enum {{ {on} = 0 }};", 0)
    self.line("#endif", 0)
    return on, rows


INTERLEAVE = {
    "rows": """static __attribute__((noinline)) void weave_rows(u16a *to, const u16a *from, i64 sk, i64 columns, i64 depth, i64 width, i64 room) {
  for (i64 k = 0; k < room; k += 2, from += 2 * sk, to += 2 * width)
    for (i64 n = 0; n < width; n += 16) {
      xu16 lo = {0}, hi = {0};
      int left = columns - n < 16 ? (int)(columns - n) : 16;
      if (left == 16) { if (k < depth) lo = *(const xu16u *)(from + n); if (k + 1 < depth) hi = *(const xu16u *)(from + sk + n); }
      else if (left > 0) { if (k < depth) lo = ldn_xu16(from + n, left); if (k + 1 < depth) hi = ldn_xu16(from + sk + n, left); }
      xu32 both = CV(lo, xu32) | CV(hi, xu32) << 16;
      __builtin_memcpy(to + 2 * n, &both, 64);
    }
}
""",
    "columns": """static __attribute__((noinline)) void weave_columns(u16a *to, const u16a *from, i64 sn, i64 columns, i64 depth, i64 width, i64 room) {
#ifdef __AVX512F__
  typedef u32 woven __attribute__((vector_size(64)));
  for (i64 n = 0; n < width; n += 16) for (i64 k = 0; k < room; k += 32) {
    woven r[16];
_Pragma("GCC unroll 16")
    for (int i = 0; i < 16; i++) {
      r[i] = (woven){0};
      if (n + i < columns && k < depth) {
        const u16a *p = from + (n + i) * sn + k;
        if (k + 32 <= depth) __builtin_memcpy(&r[i], p, 64); else { u16 t[32] = {0}; __builtin_memcpy(t, p, (unsigned long)(depth - k) * 2); __builtin_memcpy(&r[i], t, 64); }
      }
    }
EXCHANGE_Pragma("GCC unroll 16")
    for (int i = 0; i < 16; i++) __builtin_memcpy(to + (k / 2 + i) * 2 * width + 2 * n, &r[i], 64);
  }
#else
  for (i64 k = 0; k < room; k++) for (i64 n = 0; n < width; n++)
    to[k / 2 * 2 * width + 2 * n + k % 2] = k < depth && n < columns ? from[n * sn + k] : 0;
#endif
}
""".replace("EXCHANGE", "".join(
        '_Pragma("GCC unroll 16")\n'
        f"    for (int i = 0; i < 16; i++) if (!(i & {s})) {{ woven a = r[i], b = r[i + {s}];\n"
        f"      r[i] = __builtin_shufflevector(a, b, {', '.join(str(q if not q & s else q - s + 16) for q in range(16))});\n"
        f"      r[i + {s}] = __builtin_shufflevector(a, b, {', '.join(str(q + s if not q & s else q + 16) for q in range(16))}); }}\n"
        for s in (1, 2, 4, 8)
    )),
}  # fmt: skip


def do_interleave(self: Emitter, s: Interleave) -> None:
    """One call."""
    if self.lanes != LANES:
        raise TooNarrow
    at = self.address(s.source.buf, s.source.index)
    way, other = ("rows", s.k) if const_of(at.terms.get(s.n, const(0))) == 1 else ("columns", s.n)
    self.functions.setdefault(f"weave_{way}", self.use(INTERLEAVE[way]))
    step, place = self.emit(at.terms.get(other, const(0))).text, _place(self, s.source, [s.n, s.k])
    out, base = self.base(s.out)[0], self.base(s.source.buf)[0]
    self.line(f"weave_{way}({out}, {base} + {place}, {step}, {self.emit(s.columns).text}, {self.emit(s.depth).text}, {s.pitch // 2}, {s.room});")
    self.forget(s.out)


STATEMENTS[Interleave] = do_interleave  # type: ignore[assignment]
WITH_REST[Paired] = do_paired
