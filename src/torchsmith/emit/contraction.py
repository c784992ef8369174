"""A Contract statement -> C text: the register-tiled multiply-add at the heart of every matmul and convolution.

In: a Contract (ir/kernel.py) inside a kernel being printed, and the statements that read its sums. Out: lines in the emitter's open scope.

    xf32 c0_0 = {0}, ...;                                  rows x vectors accumulators, in registers from here to the epilogue
    for taps:                                              (long sums: partial ones rest in the kernel's scratch, see CHUNK)
      if (every row exists and lies inside) for k: c[m][v] += splat(a[m * step + k * ka]) * b[k * kb + 16 v ..]
      else rows through a table of pointers, where a tap in the padding points at zeros and a row past the end at the last real one
    y[m, 16 v ..] = f(c[m][v])                             a whole tile stores from registers, a partial one from the scratch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..codes import Unsupported
from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Axis, Expr, Load, Op, const, op, substitute, walk
from ..ir.kernel import Contract, Loop, Stmt, StoreStmt
from ..ir.linear import Linear, conjuncts, const_of, linear, range_of
from .c import WITH_REST, Emitter
from .math import MATH
from .values import STORED, TooWide, Val

CHUNK = 192  # most products in one partial sum: the error grows with the chunks, not with their number (BLAS libraries sum as many)
GROUPED_CHUNK = 64  # the same for convolutions whose groups are batches: eager's have shorter sums
AHEAD = 16  # steps of k that the packed operand is prefetched ahead: what comes from the second-level cache is late otherwise
SHORT = 16  # the checks around an inner loop of so few steps would cost as much as the loop
EDGE = 2  # rows at either end of a tile that padding usually reaches
WINDOW = 128  # elements of a row of memory that a tile at the edge copies
MAX_ZEROS = 1 << 16  # elements; longer zero rows would be a page fault each, and no real padding needs them
# storage type -> C text of one summand from memory: scalar of `a`, a vector of `b`
_SCALAR = {"f32": "{}", "f64": "{}", "bf16": "f_bf16({})", "f16": "f_f16({})"}
_VECTOR = {
    "f32": "*(const xf32u *)({})", "f64": "*(const xf64u *)({})", "bf16": "f_xbf16(*(const xu16u *)({}))", "f16": "f_xf16(*(const xu16u *)({}))",
}  # fmt: skip
_PART = {
    "f32": "ldn_xf32({}, {})", "f64": "ldn_xf64({}, {})", "bf16": "f_xbf16(ldn_xu16({}, {}))", "f16": "f_xf16(ldn_xu16({}, {}))",
}  # fmt: skip


Loops = tuple[tuple[Axis, Expr], ...]
Bounds = tuple[str, str]  # C text of the first step and of the end


def _text(self: Emitter, e: Expr) -> str:
    return self.emit(e).text


def _columns(self: Emitter, s: Contract) -> int:
    """Vectors of one row of the tile: twice as many where the kernel runs 8 lanes."""
    return s.width // self.lanes


def _names(self: Emitter, s: Contract) -> list[tuple[str, str]]:
    """Each accumulator and its place in the scratch."""
    acc, columns = _acc(self, s), _columns(self, s)
    return [(f"c{m}_{v}", f"*(x{s.dtype}u *)({acc} + {self.lanes * (m * columns + v)})") for m in range(s.rows) for v in range(columns)]


def _acc(self: Emitter, s: Contract) -> str:
    """Where the tile's first sum lies in the scratch."""
    return _sum(self.base(s.acc)[0], _times(_text(self, s.first), str(s.width)))


def do_contract(self: Emitter, s: Contract, rest: tuple[Stmt, ...]) -> None:
    """The sums, and the statements that read them."""
    if s.a.dtype.name not in _SCALAR or s.b.dtype.name not in _VECTOR:
        raise Unsupported("EMI001", detail=f"contraction of {s.a.dtype} and {s.b.dtype}")
    if s.lanes < self.lanes:
        raise TooWide
    if s.tails:
        _by_rows(self, s, rest)
    else:
        _tile(self, s, rest, False)
    self.forget(s.acc)


def _by_rows(self: Emitter, s: Contract, rest: tuple[Stmt, ...]) -> None:
    """A tile that is whole or partial, each with text of its own: a whole one asks nothing, a partial one has as few rows as serve it."""
    live = _text(self, s.live)
    tests = [_test(self, [f"{live} >= {s.rows}"])]
    sizes = [s.rows, *(n for n in s.tails if n < s.rows)]
    for n, fewer in zip(sizes, [*sizes[1:], 0], strict=True):
        tests.append(_test(self, [f"{live} > {fewer}", f"{live} {'<' if n == s.rows else '<='} {n}"]) if n < s.rows or fewer < n - 1 else "")
    whole = const(s.rows)
    loop = tuple(replace(x, extent=whole) if isinstance(x, Loop) and x.extent is s.live else x for x in rest)
    self.open(f"if ({tests[0]}) {{", [])
    _tile(self, replace(s, live=whole), loop, False)
    self.close()
    for n, test in zip(sizes, tests[1:], strict=True):
        if test:
            self.open(f"if ({test}) {{", [])
            _tile(self, replace(s, rows=n), rest, True)
            self.close()


def _tile(self: Emitter, s: Contract, rest: tuple[Stmt, ...], partial: bool) -> None:
    """`partial`: rows are missing for certain, or too few to ask."""
    names = _names(self, s)
    loops = (*s.taps, (s.k, s.extent))
    is_grouped = len(s.taps) > 0 and len(s.b.index) > len(s.taps) + 3  # (groups, tile, taps, k, n)
    cut = cut_sum([range_of(e, self.extents)[1] for _, e in loops], GROUPED_CHUNK if is_grouped else CHUNK)
    self.open("{", [])
    if not partial:
        _fetch_results(self, s, rest)
    if cut is None and not s.add:
        self.line(f"x{s.dtype} {', '.join(f'{c} = {{0}}' for c, _ in names)};")
        _taps(self, s, loops, {}, partial)
    else:
        _chunks(self, s, loops, cut, names, GROUPED_CHUNK if is_grouped else CHUNK, partial)
    if rest or not s.add:
        _epilogue(self, s, rest, names, partial)
    self.close()


def _fetch_results(self: Emitter, s: Contract, rest: tuple[Stmt, ...]) -> None:
    """Ask for the lines that the epilogue will write, and read elsewhere, while the sums are taken."""
    inner = _register_loop(s, rest)
    if inner is None:
        return
    wanted: dict[tuple[str, str], int] = {}
    for x in inner.body:
        assert isinstance(x, StoreStmt)
        loads = [(e.buf, e.index, 0) for e in walk(x.value) if isinstance(e, Load) and e.buf != s.acc]
        for buf, index, write in ((x.buf, x.index, 1), *loads):
            at = self.address(buf, index)
            if const_of(at.terms.get(s.n, const(0))) != 1 or s.m not in at.terms or any(s.m in set(walk(t)) for t in at.terms if t is not s.m):
                continue
            start = _text(self, substitute(at.expr(), {s.m: const(0), s.n: const(0)}))
            name, dtype = self.base(buf)
            size = s.width * dtype.itemsize
            for m in range(s.rows):
                row = _sum(start, _times(str(m), _text(self, at.terms[s.m])))
                for line in range(0, size, 64):
                    wanted.setdefault((f"{name} + {_sum(row, str(line // dtype.itemsize))}", buf), write)
    for (place, _), write in wanted.items():
        self.line(f"__builtin_prefetch({place}, {write});")


def cut_sum(extents: list[int | None], chunk: int, inside: int = 1) -> tuple[int, int] | None:
    """Which of the nested loops around a sum is cut, and into pieces of how many steps, so that a piece with the loops inside of it adds at
    most `chunk` products, `inside` of them in one innermost step. None: the whole sum is as short. Pieces are as equal as can be."""
    for at in range(len(extents) - 1, -1, -1):
        n = extents[at]
        if n is None or n * inside > chunk:
            piece = max(1, chunk // inside)
            return at, piece if n is None else -(-n // -(-n // piece))
        inside *= n
    return None


def _chunks(
    self: Emitter, s: Contract, loops: Loops, cut: tuple[int, int] | None, names: list[tuple[str, str]], chunk: int, partial: bool
) -> None:
    """Sums of pieces of loop `cut`: before a piece that would make one longer than `chunk` it goes to the scratch. That is decided as the
    tile runs, so that a kernel whose sizes are arguments sums short ones in registers alone."""
    kind, (at, piece) = f"x{s.dtype}", cut or (0, 0)
    self.line(f"{kind} {', '.join(f'{c} = {{0}}' for c, _ in names)};")
    if cut is None:
        _taps(self, s, loops, {}, partial)
    else:
        self.line(f"i64 left = {chunk};{'' if s.add else ' int parts = 0;'}")
        for axis, extent in loops[:at]:
            _open_loop(self, axis, extent, None)
        axis, extent = loops[at]
        lo, hi = part = _open_pieces(self, extent, piece)
        steps = " * ".join([f"({hi} - {lo})", *(_text(self, e) for _, e in loops[at + 1 :])])
        self.open(f"if (left < {steps}) {{", [])
        if not s.add:
            self.line(f"if (!parts) for (int q = 0; q < {s.rows * s.width}; q += {self.lanes}) *({kind}u *)({_acc(self, s)} + q) = ({kind}){{0}};")
            self.line("parts = 1;")
        for c, place in names:
            self.line(f"{place} += {c}; {c} = ({kind}){{0}};")
        self.line(f"left = {chunk};")
        self.close()
        self.line(f"left -= {steps};")
        _taps(self, s, loops[at:], {axis: part}, partial)
        for _ in range(at + 1):
            self.close()
    if s.add:
        for c, place in names:
            self.line(f"{place} += {c}; {c} = {place};")
        return
    self.open("if (parts) {", [])
    for c, place in names:
        self.line(f"{c} += {place};")
    self.close()


def _open_loop(self: Emitter, axis: Axis, extent: Expr, bounds: Bounds | None) -> None:
    self.extents[axis] = extent
    name, (lo, hi) = self.fresh("i"), bounds or ("0", _text(self, extent))
    self.open(f"for (i64 {name} = {lo}; {name} < {hi}; {name}++) {{", [axis])
    self.scopes[-1].memo[axis] = Val(name, dt.index, False)


def _open_pieces(self: Emitter, extent: Expr, piece: int) -> Bounds:
    """A loop over pieces of `piece` steps; what it returns bounds one."""
    lo, hi, n = self.fresh("lo"), self.fresh("hi"), _text(self, extent)
    self.open(f"for (i64 {lo} = 0; {lo} < {n}; {lo} += {piece}) {{ i64 {hi} = {lo} + {piece} < {n} ? {lo} + {piece} : {n};", [])
    return lo, hi


def _taps(self: Emitter, s: Contract, loops: Loops, cut: dict[Axis, Bounds], partial: bool) -> None:
    """The products of `loops` (taps, then k), of a cut loop those within its bounds, added to the accumulators."""
    n = const_of(s.extent)
    sure = _sure(self, s) if n is not None and n <= SHORT and s.a.mask is not None else []
    if sure:  # the checks of a short loop would cost as much as the loop: one for all taps
        test = _test(self, sure)
        self.open(f"if ({test}) {{", [])
        _tap_loops(self, replace(s, a=Load(s.a.buf, s.a.dtype, s.a.index), live=const(s.rows)), loops, cut, partial)
        self.close()
        self.open(f"if (!{test}) {{", [])
    _tap_loops(self, s, loops, cut, partial)
    if sure:
        self.close()


def _test(self: Emitter, conditions: list[str]) -> str:
    """A name for their conjunction. "else" would not do: what its block hoists would stand between the two."""
    name = self.fresh("q")
    self.line(f"int {name} = {' && '.join(conditions)};")
    return name


def _tap_loops(self: Emitter, s: Contract, loops: Loops, cut: dict[Axis, Bounds], partial: bool) -> None:
    *taps, (k, extent) = loops
    for axis, n in taps:
        _open_loop(self, axis, n, cut.get(axis))
    _one_tap(self, s, cut.get(k) or ("0", _text(self, extent)), partial)
    for _ in taps:
        self.close()


def _sure(self: Emitter, s: Contract) -> list[str]:
    """Conditions under which every row exists and no tap falls into the padding: the mask's bounds hold at the ends of all axes."""
    assert s.a.mask is not None
    ends = {s.m: const(s.rows - 1), s.k: s.extent - 1, **{axis: extent - 1 for axis, extent in s.taps}}
    out = [] if const_of(s.live) == s.rows else [f"{_text(self, s.live)} >= {s.rows}"]
    for bound in conjuncts(s.a.mask):
        tables: list[dict[Expr, Expr]] = [{}]
        for axis in dict.fromkeys(x for x in walk(bound) if x in ends):
            tables = [{**t, axis: end} for t in tables for end in (const(0), ends[axis])]  # type: ignore[index]
        out += [_text(self, substitute(bound, t)) for t in tables]
    return list(dict.fromkeys(out))


def _one_tap(self: Emitter, s: Contract, bounds: Bounds, partial: bool) -> None:
    a, b = (self.address(x.buf, x.index) for x in (s.a, s.b))
    zero = const(0)
    ka = a.terms.get(s.k, zero)
    step, ka_text, kb = (_text(self, e) for e in (a.terms.get(s.m, zero), ka, b.terms.get(s.k, zero)))
    start: dict[Expr, Expr] = {s.m: zero, s.k: zero, s.n: zero}
    a_start, b_start = (f"{self.base(x.buf)[0]} + {_text(self, substitute(lin.expr(), start))}" for x, lin in ((s.a, a), (s.b, b)))
    live, cut = const_of(s.live), s.a.mask is not None and s.k in set(walk(s.a.mask))  # the padding may cut the inner loop too
    self.line(f"const {STORED[s.b.dtype.name]}a *w = {b_start};")
    if s.soon is not None:
        self.line(f"const {STORED[s.b.dtype.name]}a *f = {self.base(s.b.buf)[0]} + {_text(self, s.soon)};")
    stored = STORED[s.a.dtype.name]
    if partial or (live is not None and live < s.rows):
        self.open("{", [])
    else:
        inside = _inside(self, s, 0)
        test = _test(self, inside) if inside else ""
        self.open(f"if ({test}) {{" if inside else "{", [])
        self.line(f"const {stored}a *p = {a_start};")
        soon = f"p + {s.rows} * {step} + k * {64 // s.a.dtype.itemsize}" if s.far else ""
        _steps(self, s, bounds, kb, lambda m, k: f"p[{_sum(_times(str(m), step), _times(k, ka_text))}]", soon)
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
        self.extents[s.k] = s.extent
        name = self.fresh("i")
        self.open(f"for (i64 {name} = {bounds[0]}; {name} < {bounds[1]}; {name}++) {{", [s.k])
        self.scopes[-1].memo[s.k] = Val(name, dt.index, False)
        _by_pointers(self, s, a, const(1), (name, f"{name} + 1"), kb)
        self.close()
    self.close()


def _inside(self: Emitter, s: Contract, margin: int) -> list[str]:
    """Conditions under which rows [margin, rows - margin) exist and lie inside. A mask is a conjunction of linear bounds, so it holds on
    a range of rows if it holds at both ends."""
    out = [f"{_text(self, s.live)} >= {s.rows - margin}"] if const_of(s.live) is None else []
    if s.a.mask is not None:
        last = s.extent - 1 if s.k in set(walk(s.a.mask)) else const(0)
        ends = dict.fromkeys((const(m), k) for m in (margin, s.rows - 1 - margin) for k in (const(0), last))
        out += dict.fromkeys(_text(self, substitute(s.a.mask, {s.m: m, s.k: k})) for m, k in ends)
    return out


def _at_the_edge(self: Emitter, s: Contract, a: Linear, bounds: Bounds, kb: str, a_start: str, step: str) -> None:
    """A tap that some rows lack: mostly the first ones or the last, so only these go through pointers."""
    ka = a.terms.get(s.k, const(0))
    if const_of(ka) != 1 or s.rows < 3 * EDGE or (const_of(s.live) or s.rows) < s.rows:
        _by_pointers(self, s, a, ka, bounds, kb)
        return
    test = _test(self, _inside(self, s, EDGE))
    self.open(f"if ({test}) {{", [])
    name, dtype = self.base(s.a.buf)
    edge = [*range(EDGE), *range(s.rows - EDGE, s.rows)]
    self.line(f"const {STORED[dtype.name]}a *p = {a_start};")
    for m in edge:
        at = const(m) if const_of(s.live) is not None else op("min", const(m), s.live - 1)
        place = f"{name} + {_text(self, substitute(a.expr(), {s.m: at, s.k: const(0), s.n: const(0)}))}"
        if s.a.mask is not None:
            place = f"{_text(self, substitute(s.a.mask, {s.m: at}))} ? {place} : {_zeros(self, dtype, range_of(s.extent, self.extents)[1])}"
        self.line(f"const {STORED[dtype.name]}a *p{m} = {place};")
    _steps(self, s, bounds, kb, lambda m, k: f"p{m}[{k}]" if m in edge else f"p[{_sum(_times(str(m), step), k)}]")
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
    self.extents[s.k] = const(window)
    at = self.fresh("i")
    self.line(f"{STORED[dtype.name]}a row[{window}]; int any = 0;")
    self.open(f"for (int {at} = 0; {at} < {window}; {at}++) {{", [s.k])
    self.scopes[-1].memo[s.k] = Val(at, dt.index, False)
    live = "" if const_of(s.live) is not None else f" && {at} < {_text(self, (s.live - 1) * step + n)}"
    test = f"({_text(self, substitute(s.a.mask, {s.m: const(0)}))}){live}"
    self.line(f"row[{at}] = {test} ? ({a_start})[{at}] : ({STORED[dtype.name]})0; any |= {test};")
    self.close()
    self.open("if (any) {", [])
    _steps(self, s, bounds, kb, lambda m, k: f"row[{_sum(str(m * step), k)}]")
    self.close()
    _all_padding(self, s, bounds, kb)


def _times(a: str, b: str) -> str:
    return "0" if "0" in (a, b) else a if b == "1" else b if a == "1" else f"{a} * {b}"


def _sum(a: str, b: str) -> str:
    return b if a == "0" else a if b == "0" else f"{a} + {b}"


def _steps(self: Emitter, s: Contract, bounds: Bounds, kb: str, place: Callable[[int, str], str], soon: str = "") -> None:
    """for k in bounds: every accumulator takes its product; place(m, k) is row m of `a`. soon: an address that step k asks for."""
    _open_steps(self, s, bounds, kb)
    by = s.soon_vectors
    for v in range(by):
        self.line(f"__builtin_prefetch(f + {_sum(_times('k', str(s.lanes * by)), str(s.lanes * v))}, 0, 2);")
    if soon:
        self.line(f"__builtin_prefetch({soon}, 0, 2);")
    for m in range(s.rows):
        self.line(f"{{ x{s.dtype} x = {_SCALAR[s.a.dtype.name].format(place(m, 'k'))} - (x{s.dtype}){{0}};")
        for v in range(_columns(self, s)):
            self.line(f"  c{m}_{v} = fma_x{s.dtype}(x, w{v}, c{m}_{v});")
        self.line("}")
    self.close()


def _open_steps(self: Emitter, s: Contract, bounds: Bounds, kb: str) -> None:
    """for k in bounds: a row of `b` in w0, w1, ..."""
    live = _live_lanes(self, s)
    self.line('_Pragma("GCC unroll 1")')  # unrolled, gcc hoists loads and spills accumulators
    self.open(f"for (i64 k = {bounds[0]}; k < {bounds[1]}; k++) {{", [])
    for v in range(_columns(self, s)):
        at = f"{self.lanes * v}"
        if v % (s.lanes // self.lanes) == 0:
            self.line(f"__builtin_prefetch(w + {_sum(_times(f'(k + {AHEAD})', kb), at)});")
        place_b = _sum(_times("k", kb), at)
        whole, part = _VECTOR[s.b.dtype.name], _PART[s.b.dtype.name]
        self.line(f"x{s.dtype} w{v} = {part.format(f'w + {place_b}', live[v]) if live[v] else whole.format(f'w + {place_b}')};")


def _all_padding(self: Emitter, s: Contract, bounds: Bounds, kb: str) -> None:
    """A tap that lies wholly in the padding adds zero, or NaN where its weights are infinite or NaN: the same for every row."""
    kind, columns = f"x{s.dtype}", range(_columns(self, s))
    self.open("if (!any) {", [])
    self.line(f"{kind} {', '.join(f'z{v} = {{0}}' for v in columns)};")
    _open_steps(self, s, bounds, kb)
    for v in columns:
        self.line(f"z{v} = fma_{kind}(({kind}){{0}}, w{v}, z{v});")
    self.close()
    for m in range(s.rows):
        self.line(" ".join(f"c{m}_{v} += z{v};" for v in columns))
    self.close()


def _live_lanes(self: Emitter, s: Contract) -> list[str]:
    """Per vector of `b`, how many of its elements may be read, as C text; "" where all of them may."""
    count, lanes = _columns(self, s), self.lanes
    if s.wide is None:
        return [""] * count
    known = const_of(s.wide)
    if known is not None:
        return ["" if known >= lanes * (v + 1) else str(max(0, known - lanes * v)) for v in range(count)]
    wide, names = _text(self, s.wide), [self.fresh("n") for _ in range(count)]
    for v, name in enumerate(names):
        self.line(f"int {name} = {wide} > {lanes * (v + 1)} ? {lanes} : {wide} > {lanes * v} ? (int)({wide} - {lanes * v}) : 0;")
    return names


def _by_pointers(self: Emitter, s: Contract, a: Linear, ka: Expr, bounds: Bounds, kb: str) -> None:
    """One tap of a tile with rows that do not exist or that fall into the padding. `ka` is 0 where a row is a zero: it has a stride each."""
    name, dtype = self.base(s.a.buf)
    alone = s.k in self.level  # one step of k
    scattered = s.a.mask is not None and const_of(ka) != 1
    self.line(f"const {STORED[dtype.name]}a *p[{s.rows}];{f' i64 ks[{s.rows}];' if scattered else ''}{' int any = 0;' if s.a.mask is not None else ''}")
    row, live = self.fresh("i"), _text(self, s.live)
    self.open(f"for (i64 q = 0; q < {s.rows}; q++) {{ i64 {row} = q < {live} ? q : {live} - 1;", [s.m])
    self.scopes[-1].memo[s.m] = Val(row, dt.index, False)
    at: dict[Expr, Expr] = {s.n: const(0)} if alone else {s.k: const(0), s.n: const(0)}
    place = f"{name} + {_text(self, substitute(a.expr(), at))}"
    if s.a.mask is None:
        self.line(f"p[q] = {place};")
    else:
        zeros = _zeros(self, dtype, 1 if alone or scattered else range_of(s.extent, self.extents)[1])
        strides = (f", ks[q] = {_text(self, ka)}", ", ks[q] = 0") if scattered else ("", "")
        self.line(f"if ({_text(self, s.a.mask)}) p[q] = {place}{strides[0]}, any = 1; else p[q] = {zeros}{strides[1]};")
    self.close()
    if s.a.mask is not None:
        self.open("if (any) {", [])
    stride = "{0}" if scattered else _text(self, ka)
    _steps(self, s, bounds, kb, lambda m, k: f"p[{m}][{'0' if alone else _times(k, f'ks[{m}]' if scattered else stride)}]")
    if s.a.mask is not None:
        self.close()
        _all_padding(self, s, bounds, kb)


def _zeros(self: Emitter, dtype: DType, count: int | None) -> str:
    """The address of a row of `count` zeros."""
    if count is None or count > MAX_ZEROS:
        raise Unsupported("EMI001", detail="padded contraction over an unknown inner extent")
    name = f"zeros_{dtype}"
    have = int(self.functions[name].split("[")[1].split("]")[0]) if name in self.functions else 0
    self.functions[name] = f"static const {STORED[dtype.name]} {name}[{max(have, count)}] = {{0}};\n"
    return f"(const {STORED[dtype.name]}a *){name}"


# ---------------------------------------------------------------- what reads the sums


def _epilogue(self: Emitter, s: Contract, rest: tuple[Stmt, ...], names: list[tuple[str, str]], partial: bool) -> None:
    """`rest`, from registers where the tile is whole and the statements are short; else from the scratch."""
    inner = None if partial else _register_loop(s, rest)
    if inner is not None:
        whole = [f"{_text(self, e)} == {n}" for e, n in ((s.live, s.rows), (inner.extent, s.width)) if const_of(e) is None]
        test = _test(self, whole) if whole else ""
        if whole:
            self.open(f"if ({test}) {{", [])
        _from_registers(self, s, inner)
        if not whole:
            return
        self.close()
        self.open(f"if (!{test}) {{", [])
    for c, place in names:
        self.line(f"{place} = {c};")
    self.block(rest)
    if inner is not None:
        self.close()


def _register_loop(s: Contract, rest: tuple[Stmt, ...]) -> Loop | None:
    """The loop over columns, if `rest` is one nest over the tile with short values, stored along the columns."""
    if len(rest) != 1 or not isinstance(rest[0], Loop) or rest[0].axis is not s.m or rest[0].extent is not s.live:
        return None
    inner = rest[0].body[0]
    if len(rest[0].body) != 1 or not isinstance(inner, Loop) or inner.axis is not s.n or inner.kind != "vector":
        return None
    if not all(isinstance(x, StoreStmt) and x.mode == "set" and _is_short(x.value) for x in inner.body):
        return None
    if const_of(s.live) not in (None, s.rows):
        return None
    return inner


def _is_short(value: Expr) -> bool:
    """Few operators, and none that is a function of its own: the text stands there once for every accumulator."""
    ops = [e for e in walk(value) if isinstance(e, Op) and e.dtype is not dt.index]
    return len(ops) <= 16 and not any((e.name, t) in MATH for e in ops for t in ("f32", "f64"))


def _from_registers(self: Emitter, s: Contract, inner: Loop) -> None:
    """Store the whole tile, one column of vectors after the other: what belongs to a column is loaded once."""
    wide = const_of(inner.extent) or s.width
    before = self.vector_axis, self.vector_level, self.axis_text
    self.extents[s.m], self.extents[s.n] = const(s.rows), inner.extent
    for v in range(_columns(self, s)):
        alive = min(self.lanes, wide - self.lanes * v)
        if alive <= 0:
            break
        self.open("{", [s.n])
        self.vector_axis, self.vector_level, self.axis_text = s.n, len(self.scopes) - 1, str(self.lanes * v)
        self.tail = "" if alive == self.lanes else str(alive)
        for m in range(s.rows):
            self.open("{", [s.m])
            self.scopes[-1].memo[s.m] = Val(str(m), dt.index, False)
            for x in inner.body:
                for e in walk(x.value):  # type: ignore[union-attr]
                    if isinstance(e, Load) and e.buf == s.acc:
                        self.scopes[-1].memo[e] = Val(f"c{m}_{v}", s.dtype, True)
            self.block(inner.body)
            self.close()
        self.close()
        self.tail = ""
    self.vector_axis, self.vector_level, self.axis_text = before


WITH_REST[Contract] = do_contract
