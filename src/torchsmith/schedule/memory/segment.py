"""Which steps go to a device together, to be recorded there (no torch).

In: Plan. Out: the same for the processor; for a device, maximal runs of launches and of library calls joined to Segments.

What the host does between two launches and that can as well happen before or after both does not end a Segment: results and workspaces
are asked for in front of it, and numbers that no buffer tells are computed and checked there; memory is released behind it. A host read, a
branch or a loop ends it.

A recorded library call is replayed with the addresses it was recorded with, so it joins only where all that it touches stays where it is:
the workspace, prepared constants, inputs and results that are expected at the same address in the next call, and what other calls of the
Segment return and the Segment uses up. A call that reads another input or writes another result ends the Segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...ir.expr import Const, Expr, Load, walk
from ...ir.plan import Alloc, Arena, Call, Free, Given, Launch, Plan, PlanCond, PlanRepeat, Segment, State, Step
from ...ir.program import Bind, BufArg, Check, Extern, Fresh, root_of
from ...options import Options

# Operators without a C function of libtorch that queue the same work whenever they are called: no host reads, no random numbers.
QUEUED = frozenset({
    "aten.cudnn_convolution_relu.default", "aten.cudnn_convolution_add_relu.default", "aten.convolution_backward.default",
    "torchsmith_attention.forward.default", "torchsmith_attention.backward.default",
})  # fmt: skip
# Attention does, where it drops nothing: which argument says so.
DROPPING = {
    "aten.scaled_dot_product_attention.default": 4, "aten._scaled_dot_product_flash_attention.default": 3,
    "aten._scaled_dot_product_efficient_attention.default": 5, "aten._scaled_dot_product_cudnn_attention.default": 5,
    "aten._scaled_dot_product_flash_attention_backward.default": 10, "aten._scaled_dot_product_efficient_attention_backward.default": 9,
    "aten._scaled_dot_product_cudnn_attention_backward.default": 13,
}  # fmt: skip


def segment(plan: Plan, options: Options) -> Plan:
    """Join steps. Numbers count through nested blocks, in order."""
    if plan.target.device == "cpu":
        return plan
    return replace(plan, run=_Joiner(plan, frozenset(plan.steady)).block(plan.run))


@dataclass(slots=True)
class _Joiner:
    plan: Plan
    steady: frozenset[str]
    count: int = 0
    inner: set[str] = field(default_factory=set)  # what calls of the Segment at hand return

    def block(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        out: list[Step] = []
        at = 0
        while at < len(steps):
            end = self.reach(steps, at)
            part = steps[at:end]
            if end == at:
                out.append(self.nested(steps[at]))
                end += 1
            elif not any(isinstance(s, Launch) for s in part):
                out.extend(part)
            else:
                runs = [s for s in part if isinstance(s, Launch | Call) or (isinstance(s, Free) and self.root(s.buf) in self.inner)]
                out.extend(s for s in part if isinstance(s, Alloc | Bind | Check))
                out.append(Segment(self.count, tuple(runs)))
                out.extend(s for s in part if isinstance(s, Free) and self.root(s.buf) not in self.inner)
                self.count += 1
            at = end
        return tuple(out)

    def reach(self, steps: Sequence[Step], at: int) -> int:
        """Where the Segment that begins at `at` ends. What its calls return is released inside of it: a call of which that is not true
        ends it, and with it perhaps an earlier one."""
        made: dict[str, int] = {}
        self.inner = set()
        end = at
        while end < len(steps):
            s = steps[end]
            if isinstance(s, Call) and self.stays(s.extern):
                made |= {self.root(b): end for b in s.extern.outs if b and isinstance(self.plan.places[b], Given)}
                self.inner = set(made)
            elif not isinstance(s, Launch | Alloc | Free) and not _is_of_sizes(s):
                break
            end += 1
        while True:
            released = {self.root(s.buf) for s in steps[at:end] if isinstance(s, Free)}
            late = [k for root, k in made.items() if k < end and root not in released]
            if not late:
                self.inner = {root for root, k in made.items() if k < end}
                return end
            end = min(late)

    def nested(self, s: Step) -> Step:
        if isinstance(s, PlanCond):
            return replace(s, then=self.block(s.then), orelse=self.block(s.orelse))
        return replace(s, body=self.block(s.body)) if isinstance(s, PlanRepeat) else s

    def root(self, buf: str) -> str:
        return root_of(self.plan.buffers, buf)

    def stays(self, extern: Extern) -> bool:
        """Can this call be replayed with the addresses it has now, if what it returns is released in time?"""
        if extern.binds or extern.mutates or not (extern.via == "shim" or extern.op in QUEUED or drops_nothing(extern)):
            return False
        for leaf in extern.leaves:
            if isinstance(leaf, BufArg) and not self.is_fixed(leaf.buf):
                return False
            if isinstance(leaf, Expr) and any(isinstance(e, Load) for e in walk(leaf)):
                return False
        return all(self.is_fixed(b) or self.is_own(b) for b in extern.outs if b)

    def is_fixed(self, buf: str) -> bool:
        root = self.root(buf)
        return isinstance(self.plan.places[buf], Arena | State) or root in self.steady or root in self.inner

    def is_own(self, buf: str) -> bool:
        """Is it a tensor that the call returns, and no result of the program?"""
        shown = any(isinstance(r, Fresh) and r.buf == buf for r in self.plan.results)
        return isinstance(self.plan.places[buf], Given) and not shown


def _is_of_sizes(s: Step) -> bool:
    """A number or a condition that the host computes from what it knows before anything runs."""
    if not isinstance(s, Bind | Check):
        return False
    return not any(isinstance(e, Load) for e in walk(s.value if isinstance(s, Bind) else s.cond))


def drops_nothing(extern: Extern) -> bool:
    """An attention whose dropout, a positional or named argument, is the number 0."""
    at = DROPPING.get(extern.op)
    if at is None:
        return False
    given = dict(extern.kwargs).get("dropout_p", extern.args[at] if at < len(extern.args) else 0.0)
    value = given.value if isinstance(given, Const) else given
    return isinstance(value, int | float) and value == 0
