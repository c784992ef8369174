"""The products of one tap of a register tile -> C text: where its rows lie plain, through pointers, or in a copy of a window.

In: a Contract being printed, a tap's axes in scope. Out: the loop over k, in one text for each way to reach the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir import dtype as dt
from ..ir.blocks import Contract
from ..ir.dtype import DType
from ..ir.expr import Expr, Load, const, op, substitute, walk
from ..ir.linear import Linear, conjuncts, const_of, linear
from .c import Emitter
from .tile import PART, SPLAT, VECTOR, Bounds, named_test, plus, text_of, times, vectors_of
from .values import STORED, Val

AHEAD = 16  # steps of k that the packed operand is prefetched ahead: what comes from the second-level cache is late otherwise
STREAM = 16  # lines ahead where the operand is read once, from memory: asking farther than that was slower
LONG = 64  # fewer steps of k are one stream
STREAMS = 2  # places of the operand that a tile of one row reads in turns: two keep more of memory's latency busy than one
EDGE = 2  # rows at either end of a tile that padding usually reaches
WINDOW = 128  # elements of a row of memory that a tile at the edge copies
MAX_ZEROS = 1 << 16  # elements; longer zero rows would be a page fault each, and no real padding needs them

# C text of the vector that repeats 2, 4 or 8 neighbours in memory: one load (gcc makes none of a shuffle of 4 or 8)
_BY_2 = """typedef u64 two __attribute__((aligned(4), may_alias));
typedef u64 twos __attribute__((vector_size({size})));
static inline xf32 by_2(const f32a *p) {{ return (xf32)(*(const two *)p - (twos){{0}}); }}
"""
_BY_FEW = """typedef f32 few_{parts} __attribute__((vector_size({few}), aligned(4), may_alias));
static inline xf32 by_{parts}(const f32a *p) {{
  few_{parts} q = *(const few_{parts} *)p;
#if defined(__AVX512F__) && !defined(__clang__) && {size} == 64
  {broadcast}
#else
  return __builtin_shufflevector(q, q, {order});
#endif
}}
"""
_BROADCAST = {
    4: "return (xf32)__builtin_ia32_broadcastf32x4_512(q, (xf32){0}, (u16)-1);",
    8: "typedef f64 x4 __attribute__((vector_size(32))); typedef f64 x8 __attribute__((vector_size(64)));\n"
    "  return (xf32)__builtin_ia32_broadcastf64x4_512((x4)q, (x8){0}, (u8)-1);",
}


def one_tap(self: Emitter, s: Contract, bounds: Bounds, partial: bool) -> None:
    """All of it, unless `b` has none there."""
    if s.b.mask is None:
        _one_tap(self, s, bounds, partial)
        return
    there = text_of(self, s.b.mask)
    self.open(f"if ({there}) {{", [])
    known = set(conjuncts(s.b.mask))
    left: Expr | None = None
    for test in conjuncts(s.a.mask):
        if test not in known:
            left = test if left is None else op("and", left, test)
    a = Load(s.a.buf, s.a.dtype, s.a.index, left, None if left is None else s.a.other)
    _one_tap(self, replace(s, a=a), bounds, partial)
    self.close()


def _one_tap(self: Emitter, s: Contract, bounds: Bounds, partial: bool) -> None:
    a, b = (self.address(x.buf, x.index) for x in (s.a, s.b))
    zero = const(0)
    ka = a.terms.get(s.k, zero)
    step, ka_text, kb = (text_of(self, e) for e in (a.terms.get(s.m, zero), ka, b.terms.get(s.k, zero)))
    start: dict[Expr, Expr] = {s.m: zero, s.k: zero, s.n: zero}
    a_start, b_start = (f"{self.base(x.buf)[0]} + {text_of(self, substitute(lin.expr(), start))}" for x, lin in ((s.a, a), (s.b, b)))
    live, cut = const_of(s.live), s.a.mask is not None and s.k in set(walk(s.a.mask))  # the padding may cut the inner loop too
    self.line(f"const {STORED[s.b.dtype.name]}a *w = {b_start};")
    if s.prefetch is not None:
        self.line(f"const {STORED[s.b.dtype.name]}a *f = {self.base(s.b.buf)[0]} + {text_of(self, s.prefetch)};")
        if s.prefetch_vectors == 0:
            _ask(self, s, "f", s.prefetch_share, s.b.dtype, bounds, 2)
    stored = STORED[s.a.dtype.name]
    if s.taps and not partial and const_of(s.prefetch_rows) != 0:
        _ask_for_rows(self, s, a, bounds)
    if partial or (live is not None and live < s.rows):
        self.open("{", [])
    else:
        inside = _inside(self, s, 0)
        test = named_test(self, inside) if inside else ""
        self.open(f"if ({test}) {{" if inside else "{", [])
        self.line(f"const {stored}a *p = {a_start};")
        ahead, far = f"{s.rows} * {step} + k * {64 // s.a.dtype.itemsize}", 0 if s.taps else const_of(s.prefetch_rows)
        ask = "" if far == 0 else f"p + {ahead}" if far == 1 else f"p + {text_of(self, s.prefetch_rows)} * ({ahead})"  # of both kinds: asks in vain
        _steps(self, s, bounds, kb, lambda m, k: f"p[{plus(times(str(m), step), times(k, ka_text))}]", ask)
        self.close()
        if not inside:
            return
        self.open(f"if (!{test}) {{", [])
    if partial and not cut:
        _by_pointers(self, s, a, a.terms.get(s.k, zero), bounds, kb)
    elif not cut:
        _at_the_edge(self, s, a, bounds, kb, a_start, step)
    elif const_of(ka) == 1 and _slides(s, a):
        _by_window(self, s, bounds, kb, a, a_start)
    else:
        self.ranges.bind(s.k, s.extent)
        name = self.fresh("i")
        self.open(f"for (i64 {name} = {bounds[0]}; {name} < {bounds[1]}; {name}++) {{", [s.k])
        self.scopes[-1].memo[s.k] = Val(name, dt.index, False)
        _by_pointers(self, s, a, const(1), (name, f"{name} + 1"), kb)
        self.close()
    self.close()


def _ask_for_rows(self: Emitter, s: Contract, a: Linear, bounds: Bounds) -> None:
    """A share of the next tile's rows with every piece of a window's sum: hardware follows no rows that are read tap by tap."""
    *outer, (x, across) = s.taps
    behind: dict[Expr, Expr] = {s.m: const(s.rows), s.k: const(0), s.n: const(0), x: op("floordiv", across, const(2)), **{t: n - 1 for t, n in outer}}
    name, dtype = self.base(s.a.buf)
    self.open("{", [])
    self.line(f"const {STORED[dtype.name]}a *g = {name} + {text_of(self, substitute(a.expr(), behind))};")
    _ask(self, s, "g", s.prefetch_rows, dtype, bounds, 3)
    self.close()


def _ask(self: Emitter, s: Contract, place: str, share: Expr, dtype: DType, bounds: Bounds, level: int) -> None:
    """The lines of a piece of a window's sum: of `share` elements with 16 steps, counted from `place` through all taps."""
    tap: Expr = const(0)
    for t, n in s.taps:
        tap = tap * n + t
    lo, hi = (f"({text_of(self, tap)} * {text_of(self, s.extent)} + {e}) * {text_of(self, share)} / 16" for e in bounds)
    self.line(f"for (i64 q = {lo}, end = {hi}; q < end; q += {64 // dtype.itemsize}) __builtin_prefetch({place} + q, 0, {level});")


def _inside(self: Emitter, s: Contract, margin: int) -> list[str]:
    """Conditions under which rows [margin, rows - margin) exist and lie inside. A mask is a conjunction of linear bounds, so it holds on
    a range of rows if it holds at both ends."""
    out = [f"{text_of(self, s.live)} >= {s.rows - margin}"] if const_of(s.live) is None else []
    if s.a.mask is not None:
        last = s.extent - 1 if s.k in set(walk(s.a.mask)) else const(0)
        ends = dict.fromkeys((const(m), k) for m in (margin, s.rows - 1 - margin) for k in (const(0), last))
        out += dict.fromkeys(text_of(self, substitute(s.a.mask, {s.m: m, s.k: k})) for m, k in ends)
    return out


def _at_the_edge(self: Emitter, s: Contract, a: Linear, bounds: Bounds, kb: str, a_start: str, step: str) -> None:
    """A tap that some rows lack: mostly the first ones or the last, so only these go through pointers."""
    ka = a.terms.get(s.k, const(0))
    if const_of(ka) != 1 or s.rows < 3 * EDGE or (const_of(s.live) or s.rows) < s.rows or (s.a.mask is not None and not _zero_row(self, s)):
        _by_pointers(self, s, a, ka, bounds, kb)
        return
    test = named_test(self, _inside(self, s, EDGE))
    self.open(f"if ({test}) {{", [])
    name, dtype = self.base(s.a.buf)
    edge = [*range(EDGE), *range(s.rows - EDGE, s.rows)]
    self.line(f"const {STORED[dtype.name]}a *p = {a_start};")
    for m in edge:
        at = const(m) if const_of(s.live) is not None else op("min", const(m), s.live - 1)
        place = f"{name} + {text_of(self, substitute(a.expr(), {s.m: at, s.k: const(0), s.n: const(0)}))}"
        if s.a.mask is not None:
            place = f"{text_of(self, substitute(s.a.mask, {s.m: at}))} ? {place} : {_zeros(self, dtype, _zero_row(self, s))}"
        self.line(f"const {STORED[dtype.name]}a *p{m} = {place};")
    _steps(self, s, bounds, kb, lambda m, k: f"p{m}[{k}]" if m in edge else f"p[{plus(times(str(m), step), k)}]")
    self.close()
    self.open(f"if (!{test}) {{", [])
    _by_pointers(self, s, a, ka, bounds, kb)
    self.close()


def _slides(s: Contract, a: Linear) -> bool:
    """Is one tap of the tile a window of few elements: does `a` (k with stride 1), and its mask, depend on m * step + k alone?"""
    step = const_of(a.terms.get(s.m, const(0)))
    n = const_of(s.extent)
    if step is None or n is None or step <= 0 or (s.rows - 1) * step + n > WINDOW:
        return False
    assert s.a.mask is not None
    for bound in conjuncts(s.a.mask):
        sides = [linear(x) for x in bound.args]
        if any(x.terms.get(s.m, const(0)) is not const(step * (const_of(x.terms.get(s.k, const(0))) or 0)) for x in sides):
            return False
    return True


def _by_window(self: Emitter, s: Contract, bounds: Bounds, kb: str, a: Linear, a_start: str) -> None:
    """One tap of a tile at the edge, whose rows are overlapping pieces of one row of memory: a copy with its padding."""
    assert s.a.mask is not None
    _, dtype = self.base(s.a.buf)
    step, n = const_of(a.terms[s.m]) or 0, const_of(s.extent) or 0
    window = (s.rows - 1) * step + n
    self.ranges.bind(s.k, const(window))
    at = self.fresh("i")
    self.line(f"{STORED[dtype.name]}a row[{window}]; int any = 0;")
    self.open(f"for (int {at} = 0; {at} < {window}; {at}++) {{", [s.k])
    self.scopes[-1].memo[s.k] = Val(at, dt.index, False)
    live = "" if const_of(s.live) is not None else f" && {at} < {text_of(self, (s.live - 1) * step + n)}"
    test = f"({text_of(self, substitute(s.a.mask, {s.m: const(0)}))}){live}"
    self.line(f"row[{at}] = {test} ? ({a_start})[{at}] : ({STORED[dtype.name]})0; any |= {test};")
    self.close()
    self.open("if (any) {", [])
    _steps(self, s, bounds, kb, lambda m, k: f"row[{plus(str(m * step), k)}]")
    self.close()
    _all_padding(self, s, bounds, kb)


def _steps(self: Emitter, s: Contract, bounds: Bounds, kb: str, place: Callable[[int, str], str], ask: str = "") -> None:
    """for k in bounds: every accumulator takes its product; place(m, k) is row m of `a`. ask: an address that step k asks for."""
    if not s.rest:
        _run_steps(self, s, bounds, kb, place, ask)
        return
    (lo, hi), whole = bounds, f"{text_of(self, s.extent)} / {s.parts}"
    _run_steps(self, replace(s, rest=0), (lo, f"({hi} < {whole} ? {hi} : {whole})"), kb, place, ask)
    _run_steps(self, s, (f"({lo} > {whole} ? {lo} : {whole})", hi), kb, place, "")


def _run_steps(self: Emitter, s: Contract, bounds: Bounds, kb: str, place: Callable[[int, str], str], ask: str) -> None:
    """Steps with as many elements each: all of s.parts, or s.rest of them. A tile of one row waits for memory: it reads several streams,
    and has registers for sums of each, which are shorter and so more exact."""
    live, (lo, hi) = _live_lanes(self, s), bounds
    if _is_streamed(s):
        i, n = self.fresh("i"), self.fresh("n")
        sums = ["c", *(self.fresh("d") for _ in range(1, STREAMS))] if _has_room(self, s) else ["c"] * STREAMS
        more, columns = [d for d in sums if d != "c"], range(vectors_of(self, s))
        for d in more:
            self.line(f"x{s.dtype} {', '.join(f'{d}0_{v} = {{0}}' for v in columns)};")
        self.line(f"const i64 {n} = ({hi} - {lo}) / {STREAMS};")
        self.line('_Pragma("GCC unroll 1")')
        self.open(f"for (i64 {i} = {lo}; {i} < {lo} + {n}; {i}++) {{", [])
        for stream in range(STREAMS):
            self.line(f"{{ const i64 k = {plus(i, times(str(stream), n))};")
            _step(self, s, live, kb, place, ask, sums[stream])
            self.line("}")
        self.close()
        for d in more:
            self.line(" ".join(f"c0_{v} += {d}0_{v};" for v in columns))
        lo = f"{lo} + {STREAMS} * {n}"
    _open_steps(self, (lo, hi))
    _step(self, s, live, kb, place, ask)
    self.close()


def _is_streamed(s: Contract) -> bool:
    return s.rows == 1 and s.parts == 1 and (const_of(s.extent) or LONG) >= LONG


def _has_room(self: Emitter, s: Contract) -> bool:
    """Are there registers for the sums of each stream?"""
    return 2 * STREAMS * vectors_of(self, s) <= self.kernel.target.vectors.registers and self.lanes == s.lanes


def _step(self: Emitter, s: Contract, live: list[str], kb: str, place: Callable[[int, str], str], ask: str, sums: str = "c") -> None:
    """Step k of every accumulator, their names beginning with `sums`."""
    _row_of_b(self, s, live, kb)
    by = s.prefetch_vectors
    for v in range(by):
        self.line(f"__builtin_prefetch(f + {plus(times('k', str(s.lanes * by)), str(s.lanes * v))}, 0, 2);")
    if ask:
        self.line(f"__builtin_prefetch({ask}, 0, 2);")
    for m in range(s.rows):
        self.line(f"{{ x{s.dtype} x = {_splat(self, s, place(m, times('k', str(s.parts))))};")
        for v in range(vectors_of(self, s)):
            self.line(f"  {sums}{m}_{v} = fma_x{s.dtype}(x, w{v}, {sums}{m}_{v});")
        self.line("}")


def _splat(self: Emitter, s: Contract, element: str) -> str:
    """A vector of the elements from `element` on: s.parts of them (s.rest, if that is not 0, then zeros), over and over."""
    if s.parts == 1:
        return SPLAT[s.a.dtype.name].format(element)
    order = ", ".join(str(lane % s.parts) for lane in range(self.lanes))
    if s.rest:
        return f"__builtin_shufflevector(ldn_x{s.dtype}(&{element}, {s.rest}), (x{s.dtype}){{0}}, {order})"
    if s.parts == self.lanes:
        return VECTOR[s.a.dtype.name].format(f"&{element}")
    text = _BY_2 if s.parts == 2 else _BY_FEW
    told = {"size": 4 * self.lanes, "parts": s.parts, "few": 4 * s.parts, "broadcast": _BROADCAST.get(s.parts, ""), "order": order}
    self.functions.setdefault(f"by_{s.parts}", text.format(**told))
    return f"by_{s.parts}(&{element})"


def _open_steps(self: Emitter, bounds: Bounds) -> None:
    self.line('_Pragma("GCC unroll 1")')  # unrolled, gcc hoists loads and spills accumulators
    self.open(f"for (i64 k = {bounds[0]}; k < {bounds[1]}; k++) {{", [])


def _row_of_b(self: Emitter, s: Contract, live: list[str], kb: str) -> None:
    """Row k of `b` in w0, w1, ..."""
    ahead = max(1, STREAM * s.lanes // s.width) if _is_streamed(s) else AHEAD
    for v in range(vectors_of(self, s)):
        at = f"{self.lanes * v}"
        if self.lanes * v % (64 // s.dtype.itemsize) == 0:
            self.line(f"__builtin_prefetch(w + {plus(times(f'(k + {ahead})', kb), at)});")
        place_b = plus(times("k", kb), at)
        whole, part = VECTOR[s.b.dtype.name], PART[s.b.dtype.name]
        self.line(f"x{s.dtype} w{v} = {part.format(f'w + {place_b}', live[v]) if live[v] else whole.format(f'w + {place_b}')};")


def _all_padding(self: Emitter, s: Contract, bounds: Bounds, kb: str) -> None:
    """A tap that lies wholly in the padding adds zero, or NaN where its weights are infinite or NaN: the same for every row."""
    if s.where is not None:
        return
    kind, columns = f"x{s.dtype}", range(vectors_of(self, s))
    self.open("if (!any) {", [])
    self.line(f"{kind} {', '.join(f'z{v} = {{0}}' for v in columns)};")
    live = _live_lanes(self, s)
    _open_steps(self, bounds)
    _row_of_b(self, s, live, kb)
    for v in columns:
        self.line(f"z{v} = fma_{kind}(({kind}){{0}}, w{v}, z{v});")
    self.close()
    for m in range(s.rows):
        self.line(" ".join(f"c{m}_{v} += z{v};" for v in columns))
    self.close()


def _live_lanes(self: Emitter, s: Contract) -> list[str]:
    """Per vector of `b`, how many of its elements may be read, as C text; "" where all of them may."""
    count, lanes = vectors_of(self, s), self.lanes
    if s.wide is None:
        return [""] * count
    known = const_of(s.wide)
    if known is not None:
        return ["" if known >= lanes * (v + 1) else str(max(0, known - lanes * v)) for v in range(count)]
    wide, names = text_of(self, s.wide), [self.fresh("n") for _ in range(count)]
    for v, name in enumerate(names):
        self.line(f"int {name} = {wide} > {lanes * (v + 1)} ? {lanes} : {wide} > {lanes * v} ? (int)({wide} - {lanes * v}) : 0;")
    return names


def _by_pointers(self: Emitter, s: Contract, a: Linear, ka: Expr, bounds: Bounds, kb: str) -> None:
    """One tap of a tile with rows that do not exist or that fall into the padding. `ka` is 0 where a row is a zero: it has a stride each."""
    name, dtype = self.base(s.a.buf)
    alone = s.k in self.level  # one step of k
    zeros_read = 1 if alone else _zero_row(self, s)
    scattered = s.a.mask is not None and (const_of(ka) != 1 or not zeros_read)  # else a row of zeros is read
    self.line(f"const {STORED[dtype.name]}a *p[{s.rows}];{f' i64 ks[{s.rows}];' if scattered else ''}{' int any = 0;' if s.a.mask is not None else ''}")
    row, live = self.fresh("i"), text_of(self, s.live)
    self.open(f"for (i64 q = 0; q < {s.rows}; q++) {{ i64 {row} = q < {live} ? q : {live} - 1;", [s.m])
    self.scopes[-1].memo[s.m] = Val(row, dt.index, False)
    at: dict[Expr, Expr] = {s.n: const(0)} if alone else {s.k: const(0), s.n: const(0)}
    place = f"{name} + {text_of(self, substitute(a.expr(), at))}"
    if s.a.mask is None:
        self.line(f"p[q] = {place};")
    else:
        zeros = _zeros(self, dtype, 1 if scattered else zeros_read)
        strides = (f", ks[q] = {text_of(self, ka)}", ", ks[q] = 0") if scattered else ("", "")
        self.line(f"if ({text_of(self, s.a.mask)}) p[q] = {place}{strides[0]}, any = 1; else p[q] = {zeros}{strides[1]};")
    self.close()
    if s.a.mask is not None:
        self.open("if (any) {", [])
    stride = "{0}" if scattered else text_of(self, ka)
    _steps(self, s, bounds, kb, lambda m, k: f"p[{m}][{'0' if alone else times(k, f'ks[{m}]' if scattered else stride)}]")
    if s.a.mask is not None:
        self.close()
        _all_padding(self, s, bounds, kb)


def _zero_row(self: Emitter, s: Contract) -> int:
    """How many zeros a row in the padding reads, 0 where they are too many or nobody knows."""
    most = self.ranges.interval(s.extent).hi
    return 0 if most is None or most > MAX_ZEROS else most


def _zeros(self: Emitter, dtype: DType, count: int) -> str:
    """The address of a row of `count` zeros."""
    name = f"zeros_{dtype}"
    have = int(self.functions[name].split("[")[1].split("]")[0]) if name in self.functions else 0
    self.functions[name] = f"static const {STORED[dtype.name]} {name}[{max(have, count)}] = {{0}};\n"
    return f"(const {STORED[dtype.name]}a *){name}"
