"""A Contract statement -> C text: the register-tiled multiply-add at the heart of every matmul and convolution.

In: a Contract (ir/kernel.py) inside a kernel being printed, and the statements that read its sums. Out: lines in the emitter's open scope.

    xf32 c0_0 = {0}, ...;                                  rows x vectors accumulators, in registers from here to the epilogue
    for taps:                                              (long sums: partial ones rest in the kernel's scratch, see CHUNK)
      if (every row exists and lies inside) for k: c[m][v] += splat(a[m * step + k * ka]) * b[k * kb + 16 v ..]
      else rows through a table of pointers, where a tap in the padding points at zeros and a row past the end at the last real one
    y[m, 16 v ..] = f(c[m][v])                             a whole tile stores from registers, a partial one from the scratch
"""

from __future__ import annotations

from dataclasses import replace

from ..codes import Unsupported
from ..ir.blocks import Contract
from ..ir.expr import Axis, Expr, Load, const, substitute, walk
from ..ir.kernel import Loop, Stmt
from ..ir.linear import conjuncts, const_of
from .c import WITH_REST, Emitter
from .epilogue import epilogue, fetch_results
from .taps import one_tap
from .tile import SCALAR, VECTOR, Bounds, Loops, accumulators, named_test, open_loop, open_pieces, place_of, text_of
from .values import TooNarrow, TooWide

CHUNK = 192  # most products in one partial sum: the error grows with the chunks, not with their number (BLAS libraries sum as many)
GROUPED_CHUNK = 64  # the same for convolutions whose groups are batches: eager's have shorter sums
SHORT = 16  # the checks around an inner loop of so few steps would cost as much as the loop


def do_contract(self: Emitter, s: Contract, rest: tuple[Stmt, ...]) -> None:
    """The sums, and the statements that read them."""
    if s.a.dtype.name not in SCALAR or s.b.dtype.name not in VECTOR:
        raise Unsupported("EMI001", detail=f"contraction of {s.a.dtype} and {s.b.dtype}")
    if s.lanes < self.lanes:
        raise TooWide
    if s.parts > self.lanes:
        raise TooNarrow
    if s.tails:
        _by_rows(self, s, rest)
    else:
        _tile(self, s, rest, False)
    self.forget(s.acc)


def _by_rows(self: Emitter, s: Contract, rest: tuple[Stmt, ...]) -> None:
    """A tile that is whole or partial, each with text of its own: a whole one asks nothing, a partial one has as few rows as serve it."""
    live = text_of(self, s.live)
    tests = [named_test(self, [f"{live} >= {s.rows}"])]
    sizes = [s.rows, *(n for n in s.tails if n < s.rows)]
    for n, fewer in zip(sizes, [*sizes[1:], 0], strict=True):
        tests.append(named_test(self, [f"{live} > {fewer}", f"{live} {'<' if n == s.rows else '<='} {n}"]) if n < s.rows or fewer < n - 1 else "")
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
    names = accumulators(self, s)
    loops = (*s.taps, (s.k, s.steps))
    is_grouped = len(s.taps) > 0 and len(s.b.index) > len(s.taps) + 3  # (groups, tile, taps, k, n)
    cut = cut_sum([self.ranges.interval(e).hi for _, e in loops], GROUPED_CHUNK if is_grouped else CHUNK)
    self.open("{", [])
    fetch_results(self, s, rest, partial)
    if cut is None and not s.add:
        self.line(f"x{s.dtype} {', '.join(f'{c} = {{0}}' for c, _ in names)};")
        _taps(self, s, loops, {}, partial)
    else:
        _chunks(self, s, loops, cut, names, GROUPED_CHUNK if is_grouped else CHUNK, partial)
    if _may_meet_padding(s):
        _leave_out(self, s, names)
    if rest or not s.add:
        epilogue(self, s, rest, names, partial)
    self.close()


def _may_meet_padding(s: Contract) -> bool:
    """Do the rows that a tap adds together differ in whether its products count?"""
    here = conjuncts(s.a.mask)
    return any(t not in here or {s.m, s.k} & set(walk(t)) for t in conjuncts(s.where))


def _leave_out(self: Emitter, s: Contract, names: list[tuple[str, str]]) -> None:
    """Padding is multiplied as zeros. A tile in which that may have met an infinite `b` is summed again, as its meaning says."""
    total = self.fresh("nan")
    self.line(f"x{s.dtype} {total} = {' + '.join(c for c, _ in names)}; int bad = 0;")
    self.line(f"for (int l = 0; l < {self.lanes}; l++) bad |= {total}[l] != {total}[l];")
    self.open("if (bad) {", [])
    self.block((s.meaning(),))
    for c, place in names:
        self.line(f"{c} = {place};")
    self.close()


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
            open_loop(self, axis, extent, None)
        axis, extent = loops[at]
        lo, hi = part = open_pieces(self, extent, piece)
        steps = " * ".join([f"({hi} - {lo})", *(text_of(self, e) for _, e in loops[at + 1 :])])
        self.open(f"if (left < {steps}) {{", [])
        if not s.add:
            self.line(f"if (!parts) for (int q = 0; q < {s.rows * s.width}; q += {self.lanes}) *({kind}u *)({place_of(self, s)} + q) = ({kind}){{0}};")
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


def _taps(self: Emitter, s: Contract, loops: Loops, cut: dict[Axis, Bounds], partial: bool) -> None:
    """The products of `loops` (taps, then k), of a cut loop those within its bounds, added to the accumulators."""
    n = const_of(s.extent)
    sure = _sure(self, s) if n is not None and n <= SHORT and s.a.mask is not None else []
    if sure:  # the checks of a short loop would cost as much as the loop: one for all taps
        test = named_test(self, sure)
        self.open(f"if ({test}) {{", [])
        _tap_loops(self, replace(s, a=Load(s.a.buf, s.a.dtype, s.a.index), live=const(s.rows)), loops, cut, partial)
        self.close()
        self.open(f"if (!{test}) {{", [])
    _tap_loops(self, s, loops, cut, partial)
    if sure:
        self.close()


def _tap_loops(self: Emitter, s: Contract, loops: Loops, cut: dict[Axis, Bounds], partial: bool) -> None:
    *taps, (k, extent) = loops
    for axis, n in taps:
        open_loop(self, axis, n, cut.get(axis))
    one_tap(self, s, cut.get(k) or ("0", text_of(self, extent)), partial)
    for _ in taps:
        self.close()


def _sure(self: Emitter, s: Contract) -> list[str]:
    """Conditions under which every row exists and no tap falls into the padding: the mask's bounds hold at the ends of all axes."""
    assert s.a.mask is not None
    ends = {s.m: const(s.rows - 1), s.k: s.extent - 1, **{axis: extent - 1 for axis, extent in s.taps}}
    out = [] if const_of(s.live) == s.rows else [f"{text_of(self, s.live)} >= {s.rows}"]
    for bound in conjuncts(s.a.mask):
        tables: list[dict[Expr, Expr]] = [{}]
        for axis in dict.fromkeys(x for x in walk(bound) if x in ends):
            tables = [{**t, axis: end} for t in tables for end in (const(0), ends[axis])]  # type: ignore[index]
        out += [text_of(self, substitute(bound, t)) for t in tables]
    return list(dict.fromkeys(out))


WITH_REST[Contract] = do_contract
