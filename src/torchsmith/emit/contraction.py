"""A Contract statement -> C text: the register-tiled multiply-add at the heart of every matmul and convolution.

In: a Contract (ir/kernel.py) inside a kernel being printed. Out: lines in the emitter's open scope, and one static function per tile shape:

    tile(acc, a, step, ka, b, kb, n):   acc[m][v] += sum over k < n of splat(a[m * step + k * ka]) * b[k * kb + 16 v ...]

rows x vectors accumulators stay in registers while k runs; between chunks of k and between taps their sums rest in the kernel's scratch.
A tile whose rows all exist, and whose taps all fall inside the input, reads rows at a fixed step; any other reads them through a table of
pointers, where a tap in the padding points at zeros and a row past the end at the last real one (computed, then dropped).
"""

from __future__ import annotations

from ..codes import Unsupported
from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Expr, Load, const, substitute, walk
from ..ir.kernel import Contract
from ..ir.linear import Linear, const_of
from .c import STATEMENTS, Emitter
from .values import STORED, Val

LANES = 16
CHUNK = 256  # partial sums of this many products are added up, so that the error grows with the chunks, not with k
AHEAD = 16  # steps of k that the packed operand is prefetched ahead: what comes from the second-level cache is late otherwise
MAX_ZEROS = 1 << 16  # elements; longer zero rows would be a page fault each, and no real padding needs them
# storage type -> C text of one f32 from memory: scalar of `a`, 16 lanes of `b`
_SCALAR = {"f32": "{}", "bf16": "up_bf16({})", "f16": "up_f16({})"}
_VECTOR = {"f32": "*(const xf32u *)({})", "bf16": "upv_bf16(*(const xu16u *)({}))", "f16": "upv_f16(*(const xu16u *)({}))"}
_UP = {
    "bf16": "static inline f32 up_bf16(u16 x) { u32 i = (u32)x << 16; f32 r; __builtin_memcpy(&r, &i, 4); return r; }\n"
    "static inline xf32 upv_bf16(xu16 x) { return (xf32)(CV(x, xu32) << 16); }\n",
    "f16": "static inline f32 up_f16(u16 x) { _Float16 h; __builtin_memcpy(&h, &x, 2); return (f32)h; }\n"
    "typedef _Float16 xf16h __attribute__((vector_size(32)));\n"
    "static inline xf32 upv_f16(xu16 x) { return CV((xf16h)x, xf32); }\n",
}


def tile_function(rows: int, vectors: int, a: DType, b: DType, way: str) -> tuple[str, str]:
    """(name, C text) of the multiply-add tile. `way` says how it finds row m of `a`: "step" from row to row, a table of "pointers",
    or pointers with a k stride each ("scattered": 0 for a row of zeros)."""
    name = f"tile_{rows}x{vectors}_{a}_{b}_{way}"
    element = f"const {STORED[a.name]}a"
    source = {"step": f"{element} *a, i64 step, i64 ka", "pointers": f"{element} *const *a, i64 ka", "scattered": f"{element} *const *a, const i64 *ka"}[way]
    places = {"step": "a[{m} * step + k * ka]", "pointers": "a[{m}][k * ka]", "scattered": "a[{m}][k * ka[{m}]]"}
    acc = [(f"c{m}_{v}", f"acc + {LANES * (m * vectors + v)}") for m in range(rows) for v in range(vectors)]
    lines = [
        f"static __attribute__((noinline)) void {name}(f32a *acc, {source}, const {STORED[b.name]}a *b, i64 kb, i64 n) {{",
        f"  for (i64 k0 = 0; k0 < n; k0 += {CHUNK}) {{",
        f"    i64 k1 = k0 + {CHUNK} < n ? k0 + {CHUNK} : n;",
        *(f"    xf32 {c} = {{0}};" for c, _ in acc),
        '    _Pragma("GCC unroll 4") for (i64 k = k0; k < k1; k++) {',
        *(f"      __builtin_prefetch(b + (k + {AHEAD}) * kb + {LANES * v});" for v in range(vectors)),
        *(f"      xf32 w{v} = {_VECTOR[b.name].format(f'b + k * kb + {LANES * v}')};" for v in range(vectors)),
    ]
    for m in range(rows):
        lines.append(f"      {{ xf32 x = {_SCALAR[a.name].format(places[way].format(m=m))} - (xf32){{0}};")
        lines += [f"        c{m}_{v} = fma_xf32(x, w{v}, c{m}_{v});" for v in range(vectors)]
        lines.append("      }")
    lines.append("    }")
    lines += [f"    *(xf32u *)({place}) += {c};" for c, place in acc]
    lines.append("  }\n}")
    return name, "\n".join(lines) + "\n"


def _need_tile(self: Emitter, s: Contract, way: str) -> str:
    """Make sure the tile's function (and its conversions) stand before the kernel; its name."""
    for d in (s.a.dtype, s.b.dtype):
        if d.name in _UP:
            self.functions.setdefault(d.name, _UP[d.name])
    name, text = tile_function(s.rows, s.vectors, s.a.dtype, s.b.dtype, way)
    self.use("fma_xf32(")
    self.functions.setdefault(name, text)
    return name


def _linear_address(self: Emitter, load: Load) -> Linear:
    return self.address(load.buf, load.index)


def _text(self: Emitter, e: Expr) -> str:
    return self.emit(e).text


def do_contract(self: Emitter, s: Contract) -> None:
    """Zero the accumulators; for every tap run the tile over k."""
    if s.a.dtype.name not in _SCALAR or s.b.dtype.name not in _VECTOR:
        raise Unsupported("EMI001", detail=f"contraction of {s.a.dtype} and {s.b.dtype}")
    acc, _ = self.base(s.acc)
    size = s.rows * s.vectors * LANES
    self.line(f"for (int q = 0; q < {size}; q += {LANES}) *(xf32u *)({acc} + q) = (xf32){{0}};")
    for axis, extent in s.taps:
        self.extents[axis] = extent
        name = self.fresh("i")
        self.open(f"for (i64 {name} = 0; {name} < {_text(self, extent)}; {name}++) {{", [axis])
        self.scopes[-1].memo[axis] = Val(name, dt.index, False)
    _one_tap(self, s, acc)
    for _ in s.taps:
        self.close()
    self.forget(s.acc)


def _one_tap(self: Emitter, s: Contract, acc: str) -> None:
    a, b = _linear_address(self, s.a), _linear_address(self, s.b)
    zero = const(0)
    step, ka, kb = (lin.terms.get(x, zero) for lin, x in ((a, s.m), (a, s.k), (b, s.k)))
    start: dict[Expr, Expr] = {s.m: zero, s.k: zero, s.n: zero}
    a_start = substitute(a.expr(), start)
    b_text = f"{self.base(s.b.buf)[0]} + {_text(self, substitute(b.expr(), start))}"
    a_name, _ = self.base(s.a.buf)
    ka_text = _text(self, ka)
    rest = f"{b_text}, {_text(self, kb)}, {_text(self, s.extent)}"
    # A mask is a conjunction of linear bounds, so it holds on a range of rows if it holds at both ends.
    live = const_of(s.live)
    inside = [f"{_text(self, s.live)} >= {s.rows}"] if live is None else []
    cut = s.a.mask is not None and s.k in set(walk(s.a.mask))  # the padding may cut the inner loop too
    if s.a.mask is not None:
        last = s.extent - 1 if cut else const(0)
        ends = dict.fromkeys((const(m), k) for m in (0, s.rows - 1) for k in (const(0), last))
        inside += dict.fromkeys(_text(self, substitute(s.a.mask, {s.m: m, s.k: k})) for m, k in ends)
    if live is None or live >= s.rows:
        tile = _need_tile(self, s, "step")
        fast = f"{tile}({acc}, {a_name} + {_text(self, a_start)}, {_text(self, step)}, {ka_text}, {rest});"
        self.line(f"if ({' && '.join(inside)}) {fast} else {{" if inside else fast)
        if not inside:
            return
    else:
        self.line("{")
    if cut:
        name = self.fresh("i")
        self.extents[s.k] = s.extent
        self.open(f"for (i64 {name} = 0; {name} < {_text(self, s.extent)}; {name}++) {{", [s.k])
        self.scopes[-1].memo[s.k] = Val(name, dt.index, False)
        _by_pointers(self, s, acc, a, const(1), f"{b_text} + {name} * {_text(self, kb)}, 0, 1")
        self.close()
    else:
        _by_pointers(self, s, acc, a, ka, rest)
    self.line("}")


def _by_pointers(self: Emitter, s: Contract, acc: str, a: Linear, ka: Expr, rest: str) -> None:
    """One tap of a tile with rows that do not exist or that fall into the padding."""
    name, dtype = self.base(s.a.buf)
    scattered = s.a.mask is not None and const_of(ka) != 1
    self.line(f"const {STORED[dtype.name]}a *p[{s.rows}];{f' i64 ks[{s.rows}];' if scattered else ''}")
    row = self.fresh("i")
    live = _text(self, s.live)
    self.open(f"for (i64 q = 0; q < {s.rows}; q++) {{ i64 {row} = q < {live} ? q : {live} - 1;", [s.m])
    self.scopes[-1].memo[s.m] = Val(row, dt.index, False)
    at: dict[Expr, Expr] = {s.n: const(0)} if s.k in self.level else {s.k: const(0), s.n: const(0)}
    place = f"{name} + {_text(self, substitute(a.expr(), at))}"
    if s.a.mask is None:
        self.line(f"p[q] = {place};")
    elif scattered:
        self.line(f"if ({_text(self, s.a.mask)}) p[q] = {place}, ks[q] = {_text(self, ka)}; else p[q] = {_zeros(self, dtype, 1)}, ks[q] = 0;")
    else:
        self.line(f"if ({_text(self, s.a.mask)}) p[q] = {place}; else p[q] = {_zeros(self, dtype, 1 if s.k in self.level else const_of(s.extent))};")
    self.close()
    tile = _need_tile(self, s, "scattered" if scattered else "pointers")
    self.line(f"{tile}({acc}, p, {'ks' if scattered else _text(self, ka)}, {rest});")


def _zeros(self: Emitter, dtype: DType, count: int | None) -> str:
    """The address of a row of `count` zeros."""
    if count is None or count > MAX_ZEROS:
        raise Unsupported("EMI001", detail="padded contraction over an unknown inner extent")
    name = f"zeros_{dtype}"
    have = int(self.functions[name].split("[")[1].split("]")[0]) if name in self.functions else 0
    self.functions[name] = f"static const {STORED[dtype.name]} {name}[{max(have, count)}] = {{0}};\n"
    return f"(const {STORED[dtype.name]}a *){name}"


STATEMENTS[Contract] = do_contract  # type: ignore[assignment]
