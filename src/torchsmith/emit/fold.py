"""Folds -> C loops: accumulators, several at a time to hide latency, lanes and copies merged at the end.

In: a Fold expression and the emitter that met it. Out: the value of the picked component, printed in the scope where it belongs.
Inside a vector loop a Fold is a serial loop over vector states. Elsewhere its innermost axis runs over lanes, if the order allows.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from ..ir import dtype as dt
from ..ir.expr import Expr, Fold, Op, const, substitute, walk
from ..ir.linear import const_of
from .optable import ROWS
from .values import TooWide, Val, lane_iota

if TYPE_CHECKING:
    from .c import Emitter


def print_fold(self: Emitter, e: Fold, at: int) -> Val:
    """Print the loop of `e` once for all its components."""
    key = e.picking(0)
    states = self.scopes[at].folds.get(key)
    if states is None:
        # the loop must stand in the scope `at`: close over what is open inside it
        states = in_scope(self, e, at)
        self.scopes[at].folds[key] = states
    return states[e.pick]


def in_scope(self: Emitter, e: Fold, at: int) -> list[Val]:
    """Print in scope `at`, setting the deeper scopes aside meanwhile (their lines come after)."""
    deeper = self.scopes[at + 1 :]
    del self.scopes[at + 1 :]
    saved = self.vector_axis, self.vector_level, self.axis_text, self.tail
    if at < self.vector_level:
        self.vector_axis, self.vector_level, self.axis_text, self.tail = None, 1 << 30, "", ""
    hidden = {b: self.level.pop(b) for scope in deeper for b in scope.bound if b in self.level}
    try:
        if self.vector_axis is not None and is_short(e):
            return written_out(self, e)
        vectorise = self.vector_axis is None and e.order == "any" and len(e.combine) > 0 and worth_lanes(e, self.lanes)
        return lane_fold(self, e) if vectorise else serial_fold(self, e)
    finally:
        self.level.update(hidden)
        self.vector_axis, self.vector_level, self.axis_text, self.tail = saved
        self.scopes.extend(deeper)


SHORT = 16  # trips of a Fold that is written out inside a vector loop: a pooling window, the taps of a depthwise convolution


def is_short(e: Fold) -> bool:
    trips, nodes = 1, sum(1 for u in e.update for x in walk(u) if x.dtype is not dt.index)
    for n in e.extents:
        trips *= const_of(n) or 1 << 20
    return 0 < trips <= SHORT and len(e.init) == 1 and nodes <= 24 and not any(isinstance(x, Fold) for x in walk(*e.update))


def written_out(self: Emitter, e: Fold) -> list[Val]:
    """Every trip as text: masks and addresses of a trip do not change along the vector loop, so they are computed outside of it."""
    state = e.init[0]
    for point in itertools.product(*(range(const_of(n) or 0) for n in e.extents)):
        table: dict[Expr, Expr] = {a: const(i) for a, i in zip(e.axes, point, strict=True)}
        table[e.state(0)] = state
        state = substitute(e.update[0], table)
    return [self.emit(state)]


def worth_lanes(e: Fold, lanes: int) -> bool:
    """Are there lanes' worth of iterations, and none in a Fold inside?"""
    n = const_of(e.extents[-1])
    return (n is None or n >= lanes // 2) and not any(isinstance(x, Fold) and worth_lanes(x, lanes) for u in e.update for x in walk(u))


def state_reg(self: Emitter, e: Fold, vec: bool) -> list[Val]:
    out = []
    for init in e.init:
        if vec and init.dtype.itemsize > self.most:
            raise TooWide
        out.append(Val("", init.dtype, vec))
    return out


def as_state(self: Emitter, v: Val, like: Val) -> str:
    if not like.vec:
        return v.text
    if v.vec and v.narrow and not like.narrow:
        return self.widen(v)
    return self.as_vector(v)


def declare(self: Emitter, e: Fold, vec: bool, copies: int = 1) -> list[Val]:
    """Accumulators holding `init`."""
    states = []
    for like, init in zip(state_reg(self, e, vec), e.init, strict=True):
        text = as_state(self, self.emit(init), like)
        name = self.fresh("a")
        if copies == 1:
            self.line(f"{self.ctype(like)} {name} = {text};")
        else:
            self.line(f"{self.ctype(like)} {name}[{copies}] = {{{', '.join([text] * copies)}}};")
        states.append(Val(name, init.dtype, vec))
    return states


def bind_states(self: Emitter, e: Fold, states: list[Val], side: str = "a", index: str = "") -> None:
    for i, s in enumerate(states):
        var = e.state(i, side)
        self.level[var] = len(self.scopes) - 1
        self.scopes[-1].bound.append(var)
        self.scopes[-1].memo[var] = Val(s.text + index, s.dtype, s.vec)


def assign(self: Emitter, values: tuple[Expr, ...], states: list[Val], index: str = "", live: str = "") -> None:
    """All states take their new values at once; with `live`, only in the first `live` lanes."""
    news = [as_state(self, self.emit(v), s) for v, s in zip(values, states, strict=True)]
    if len(states) > 1:
        names = []
        for text, s in zip(news, states, strict=True):
            name = self.fresh("v")
            self.line(f"{self.ctype(s)} {name} = {text};")
            names.append(name)
        news = names
    for text, s in zip(news, states, strict=True):
        if live:
            kind = "bool" if s.dtype is dt.bool_ else s.dtype.name if s.dtype is not dt.index else "i64"
            text = ROWS["where"](kind, True, (f"({lane_iota(self.lanes)} < {live})", text, s.text + index))
        self.line(f"{s.text}{index} = {text};")


def serial_fold(self: Emitter, e: Fold) -> list[Val]:
    """Nested loops over single states (or vectors of them inside a vector loop)."""
    if self.vector_axis is not None and is_long(e):
        return interleaved(self, e)
    at = cascade(e) if self.vector_axis is not None else 0
    if at:
        return in_two(self, e, at)
    states = declare(self, e, self.vector_axis is not None)
    depth = open_loops(self, e, len(e.axes))
    bind_states(self, e, states)
    assign(self, e.update, states)
    for _ in range(depth):
        self.close()
    return states


def cascade(e: Fold) -> int:
    """Before which axis a long sum of floats is cut, so that inner loops make partial sums of about as many summands as there are partial
    sums: the error of a chain grows with its length. 0: nowhere."""
    if not is_sum(e):
        return 0
    sizes = [const_of(n) or 64 for n in e.extents]
    if math.prod(sizes) < 64 or any(isinstance(x, Fold) for x in walk(*e.update)):
        return 0
    return min(range(len(sizes)), key=lambda at: math.prod(sizes[:at]) + math.prod(sizes[at:]))


def is_sum(e: Fold) -> bool:
    """Are floats added up, in any order?"""
    update = e.update[0]
    return len(e.init) == 1 and bool(e.combine) and e.order == "any" and isinstance(update, Op) and update.name == "add" and update.dtype.is_float


def in_two(self: Emitter, e: Fold, at: int) -> list[Val]:
    """The loops from axis `at` on have a state of their own, which joins the one outside when they end."""
    states = declare(self, e, True)
    open_loops(self, e, at)
    parts = declare(self, e, True)
    depth = open_loops(self, e, len(e.axes), at)
    bind_states(self, e, parts)
    assign(self, e.update, parts)
    for _ in range(depth):
        self.close()
    combine_step(self, e, states, parts)
    for _ in range(at):
        self.close()
    return states


CHAINS = 4  # independent sums of a long Fold inside a vector loop


def is_long(e: Fold) -> bool:
    """Would a single chain of updates wait for itself?"""
    n = const_of(e.extents[-1])
    if n is None or n < 64 or n % CHAINS or e.order != "any" or not e.combine or len(e.init) > 2:
        return False
    return not any(isinstance(x, Fold) for x in walk(*e.update))


def interleaved(self: Emitter, e: Fold) -> list[Val]:
    """Every CHAINS-th iteration of the innermost loop goes to a state of its own; of a sum, those are added up for each innermost loop."""
    outside = declare(self, e, True) if is_sum(e) and len(e.axes) > 1 else []
    depth = open_loops(self, e, len(e.axes) - 1) if outside else 0
    states = declare(self, e, True, CHAINS)
    depth += open_loops(self, e, len(e.axes) - 1, depth)
    axis, extent = e.axes[-1], e.extents[-1]
    self.ranges.bind(axis, extent)
    step, name, u = self.fresh("i"), self.fresh("i"), self.fresh("u")
    self.open(f"for (i64 {step} = 0; {step} < {const_of(extent)}; {step} += {CHAINS}) {{", [])
    self.line(f'_Pragma("GCC unroll {CHAINS}")')
    self.open(f"for (int {u} = 0; {u} < {CHAINS}; {u}++) {{ i64 {name} = {step} + {u};", [axis])
    self.scopes[-1].memo[axis] = Val(name, dt.index, False)
    bind_states(self, e, states, "a", f"[{u}]")
    assign(self, e.update, states, f"[{u}]")
    for _ in range(2):
        self.close()
    if outside:
        combine_step(self, e, outside, merge_copies(self, e, states, CHAINS))
    for _ in range(depth):
        self.close()
    return outside or merge_copies(self, e, states, CHAINS)


def open_loops(self: Emitter, e: Fold, count: int, first: int = 0) -> int:
    loops = list(zip(e.axes, e.extents, strict=True))[first:count]
    for axis, extent in loops:
        self.ranges.bind(axis, extent)
        text = self.emit(extent).text
        name = self.fresh("i")
        self.open(f"for (i64 {name} = 0; {name} < {text}; {name}++) {{", [axis])
        self.scopes[-1].memo[axis] = Val(name, dt.index, False)
    return len(loops)


def copies_for(e: Fold, lanes: int) -> int:
    """How many independent accumulators: only where the trips divide evenly, so that the loop is printed once."""
    n = const_of(e.extents[-1])
    if n is None:
        return 1
    trips = n // lanes
    for u in (4, 3, 2):
        if trips % u == 0 and trips >= u and len(e.init) <= 2:
            return u
    return 1


def lane_fold(self: Emitter, e: Fold) -> list[Val]:
    """The innermost axis over lanes."""
    copies = copies_for(e, self.lanes)
    states = declare(self, e, True, copies)
    depth = open_loops(self, e, len(e.axes) - 1)
    axis, extent = e.axes[-1], e.extents[-1]
    if copies > 1:
        unrolled(self, e, states, copies)
    else:
        def body() -> None:
            live = self.tail
            bind_states(self, e, states)
            assign(self, e.update, states, live=live)

        self.vector_loop(axis, extent, body)
    for _ in range(depth):
        self.close()
    return merge(self, e, states, copies)


def unrolled(self: Emitter, e: Fold, states: list[Val], copies: int) -> None:
    """Steps of copies x lanes, then the tail into copy 0."""
    axis, extent = e.axes[-1], e.extents[-1]
    n = const_of(extent)
    assert n is not None
    self.ranges.bind(axis, extent)
    whole, name, u = n - n % self.lanes, self.fresh("i"), self.fresh("u")
    step = self.fresh("i")
    self.open(f"for (i64 {step} = 0; {step} < {whole}; {step} += {self.lanes * copies}) {{", [])
    self.line("_Pragma(\"GCC unroll 4\")")
    head = f"for (int {u} = 0; {u} < {copies}; {u}++) {{ i64 {name} = {step} + {u} * {self.lanes};"

    def body() -> None:
        live = self.tail
        index = "[0]" if live else f"[{u}]"
        bind_states(self, e, states, "a", index)
        assign(self, e.update, states, index, live)

    self.vector_body(head, axis, name, body)
    self.close()
    if n % self.lanes:
        self.tail = str(n % self.lanes)
        self.vector_body(f"{{ i64 {name} = {whole};", axis, name, body)
        self.tail = ""


def merge_copies(self: Emitter, e: Fold, states: list[Val], copies: int) -> list[Val]:
    """One state of `copies`, lane by lane."""
    singles = []
    for s in states:
        name = self.fresh("a")
        self.line(f"{self.ctype(s)} {name} = {s.text}{'[0]' if copies > 1 else ''};")
        singles.append(Val(name, s.dtype, True))
    for c in range(1, copies):
        combine_step(self, e, singles, [Val(f"{s.text}[{c}]", s.dtype, True) for s in states])
    return singles


def merge(self: Emitter, e: Fold, states: list[Val], copies: int) -> list[Val]:
    """Copies into one, then lanes by halves; lane 0 is the result."""
    singles = merge_copies(self, e, states, copies)
    half = self.lanes // 2
    while half:
        order = ", ".join(str((k + half) % self.lanes) for k in range(self.lanes))
        others = [Val(f"__builtin_shufflevector({s.text}, {s.text}, {order})", s.dtype, True) for s in singles]
        combine_step(self, e, singles, others)
        half //= 2
    out = []
    for s in singles:
        text = f"{s.text}[0]" if s.dtype is not dt.bool_ else f"({s.text}[0] & 1)"
        one = Val(self.fresh("a"), s.dtype, False)
        self.line(f"{self.ctype(one)} {one.text} = {text};")
        out.append(one)
    return out


def combine_step(self: Emitter, e: Fold, mine: list[Val], others: list[Val]) -> None:
    """mine = combine(mine, others), in a block of its own."""
    self.open("{", [])
    named = []
    for o in others:
        v = Val(self.fresh("v"), o.dtype, True)
        self.line(f"{self.ctype(v)} {v.text} = {o.text};")
        named.append(v)
    bind_states(self, e, mine, "a")
    bind_states(self, e, named, "b")
    assign(self, e.combine, mine)
    self.close()
