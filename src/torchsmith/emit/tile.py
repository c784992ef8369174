"""What the parts of a register tile's text share: its accumulators, its loops, and C text of operands in storage.

In: a Contract being printed. Out: names and fragments of C.
"""

from __future__ import annotations

from ..ir import dtype as dt
from ..ir.blocks import Contract
from ..ir.expr import Axis, Expr
from .c import Emitter
from .values import Val

# storage type -> C text of one summand from memory: scalar of `a`, a vector of `b`
SCALAR = {"f32": "{}", "f64": "{}", "bf16": "f_bf16({})", "f16": "f_f16({})"}
# the same of a scalar of `a` in every lane
SPLAT = {"f32": "{} - (xf32){{0}}", "f64": "{} - (xf64){{0}}", "bf16": "f_bf16({}) - (xf32){{0}}", "f16": "f_xf16({} - (xu16){{0}})"}
VECTOR = {
    "f32": "*(const xf32u *)({})", "f64": "*(const xf64u *)({})", "bf16": "f_xbf16(*(const xu16u *)({}))", "f16": "f_xf16(*(const xu16u *)({}))",
}  # fmt: skip
PART = {
    "f32": "ldn_xf32({}, {})", "f64": "ldn_xf64({}, {})", "bf16": "f_xbf16(ldn_xu16({}, {}))", "f16": "f_xf16(ldn_xu16({}, {}))",
}  # fmt: skip

# Between a loop over accumulators and what reads their copies no vector stays in a register: else gcc keeps the constants of a function of
# the sums there through the loop, and spills accumulators in every step of it (twice the time).
_EMPTY_REGISTERS = """#if defined(__AVX512F__)
#define EMPTY_REGISTERS __asm__ volatile("" ::: {all})
#elif defined(__x86_64__)
#define EMPTY_REGISTERS __asm__ volatile("" ::: {half})
#else
#define EMPTY_REGISTERS
#endif
""".format(all=", ".join(f'"xmm{i}"' for i in range(32)), half=", ".join(f'"xmm{i}"' for i in range(16)))

Loops = tuple[tuple[Axis, Expr], ...]
Bounds = tuple[str, str]  # C text of the first step and of the end


def empty_registers(self: Emitter) -> None:
    self.functions.setdefault("EMPTY_REGISTERS", _EMPTY_REGISTERS)
    self.line("EMPTY_REGISTERS;")


def text_of(self: Emitter, e: Expr) -> str:
    return self.emit(e).text


def vectors_of(self: Emitter, s: Contract) -> int:
    """Vectors of one row of the tile: twice as many where the kernel runs half the lanes."""
    return s.width // self.lanes


def accumulators(self: Emitter, s: Contract) -> list[tuple[str, str]]:
    """Each accumulator and its place in the scratch."""
    acc, columns = place_of(self, s), vectors_of(self, s)
    return [(f"c{m}_{v}", f"*(x{s.dtype}u *)({acc} + {self.lanes * (m * columns + v)})") for m in range(s.rows) for v in range(columns)]


def place_of(self: Emitter, s: Contract) -> str:
    """Where the tile's first sum lies in the scratch."""
    return plus(self.base(s.acc)[0], times(text_of(self, s.first), str(s.width)))


def times(a: str, b: str) -> str:
    return "0" if "0" in (a, b) else a if b == "1" else b if a == "1" else f"{a} * {b}"


def plus(a: str, b: str) -> str:
    return b if a == "0" else a if b == "0" else f"{a} + {b}"


def named_test(self: Emitter, conditions: list[str]) -> str:
    """A name for their conjunction. "else" would not do: what its block hoists would stand between the two."""
    name = self.fresh("q")
    self.line(f"int {name} = {' && '.join(conditions)};")
    return name


def open_loop(self: Emitter, axis: Axis, extent: Expr, bounds: Bounds | None) -> None:
    self.ranges.bind(axis, extent)
    name, (lo, hi) = self.fresh("i"), bounds or ("0", text_of(self, extent))
    self.open(f"for (i64 {name} = {lo}; {name} < {hi}; {name}++) {{", [axis])
    self.scopes[-1].memo[axis] = Val(name, dt.index, False)


def open_pieces(self: Emitter, extent: Expr, piece: int) -> Bounds:
    """A loop over pieces of `piece` steps; what it returns bounds one."""
    lo, hi, n = self.fresh("lo"), self.fresh("hi"), text_of(self, extent)
    self.open(f"for (i64 {lo} = 0; {lo} < {n}; {lo} += {piece}) {{ i64 {hi} = {lo} + {piece} < {n} ? {lo} + {piece} : {n};", [])
    return lo, hi
