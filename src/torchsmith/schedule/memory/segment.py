"""Which steps go to a device together, to be recorded there (no torch).

In: Plan. Out: the same for the processor; for a device, maximal runs of launches and of library calls joined to Segments.

What the host does between two launches and that can as well happen before or after both does not end a Segment: results and workspaces
are asked for in front of it, memory is released behind it. A host read, a branch or a loop ends it.

A recorded library call is replayed with the addresses it was recorded with, so it joins only where all that it touches stays where it is:
the workspace, prepared constants, inputs that are expected to be the same in the next call, and what other calls of the Segment return and
the Segment uses up. A call that reads another input or writes a result ends the Segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...ir.expr import Const, Expr, Load, walk
from ...ir.nested import leaves
from ...ir.plan import Alloc, Arena, Call, Free, Given, Input, Launch, Plan, PlanCond, PlanRepeat, Segment, State, Step
from ...ir.program import BufArg, Extern, Fresh
from ...options import Options

# Operators without a C function of libtorch that queue the same work whenever they are called: no host reads, no random numbers.
QUEUED = frozenset({
    "aten.cudnn_convolution_relu.default", "aten.cudnn_convolution_add_relu.default", "aten.scaled_dot_product_attention.default",
    "aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
})  # fmt: skip
DROPOUT = "scaled_dot_product"  # these take a probability


def segment(plan: Plan, options: Options) -> Plan:
    """Join steps. Numbers count through nested blocks, in order."""
    if plan.target.device == "cpu":
        return plan
    return replace(plan, run=_Joiner(plan).block(plan.run))


@dataclass(slots=True)
class _Joiner:
    plan: Plan
    count: int = 0
    inner: set[str] = field(default_factory=set)  # what calls of the Segment at hand return

    def block(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        out: list[Step] = []
        run: list[Launch | Call | Free] = []
        later: list[Step] = []

        def close() -> None:
            if any(isinstance(s, Launch) for s in run):
                out.append(Segment(self.count, tuple(run)))
                self.count += 1
            else:
                out.extend(run)
            out.extend(later)
            run.clear()
            later.clear()
            self.inner = set()

        for at, s in enumerate(steps):
            if isinstance(s, Launch) or (isinstance(s, Free) and self.root(s.buf) in self.inner):
                run.append(s)
            elif isinstance(s, Call) and self.stays(s.extern, steps[at:]):
                run.append(s)
                self.inner |= {self.root(b) for b in s.extern.outs if b and isinstance(self.plan.places[b], Given)}
            elif isinstance(s, Alloc):
                out.append(s)
            elif isinstance(s, Free) and run:
                later.append(s)
            else:
                close()
                out.append(self.nested(s))
        close()
        return tuple(out)

    def nested(self, s: Step) -> Step:
        if isinstance(s, PlanCond):
            return replace(s, then=self.block(s.then), orelse=self.block(s.orelse))
        return replace(s, body=self.block(s.body)) if isinstance(s, PlanRepeat) else s

    def root(self, buf: str) -> str:
        while (base := self.plan.buffers[buf].storage_of) is not None:
            buf = base
        return buf

    def stays(self, extern: Extern, rest: Sequence[Step]) -> bool:
        """Can this call be replayed with the addresses it has now?"""
        if extern.binds or extern.mutates or not (extern.via == "shim" or (extern.op in QUEUED and not _drops(extern))):
            return False
        for leaf in leaves(extern.args, [v for _, v in extern.kwargs]):
            if isinstance(leaf, BufArg) and not self.is_fixed(leaf.buf):
                return False
            if isinstance(leaf, Expr) and any(isinstance(e, Load) for e in walk(leaf)):
                return False
        return all(self.is_fixed(b) or self.is_used_up(b, rest) for b in extern.outs if b)

    def is_fixed(self, buf: str) -> bool:
        place = self.plan.places[buf]
        steady = isinstance(place, Input) and place.index in self.plan.steady
        return isinstance(place, Arena | State) or steady or self.root(buf) in self.inner

    def is_used_up(self, buf: str, rest: Sequence[Step]) -> bool:
        """Is a returned tensor released before something ends the Segment? It is, where only launches and such calls stand between."""
        if not isinstance(self.plan.places[buf], Given) or any(isinstance(r, Fresh) and r.buf == buf for r in self.plan.results):
            return False
        root = self.root(buf)
        for s in rest[1:]:
            if isinstance(s, Free) and self.root(s.buf) == root:
                return True
            if isinstance(s, Call):
                inner = self.inner
                self.inner = inner | {root}
                joins = self.stays(s.extern, rest[rest.index(s) :])
                self.inner = inner
                if not joins:
                    return False
            elif not isinstance(s, Launch | Alloc | Free):
                return False
        return False


def _drops(extern: Extern) -> bool:
    """Does an attention draw random numbers? Its dropout is a positional or named argument that must be the number 0."""
    if DROPOUT not in extern.op:
        return False
    at = {"aten.scaled_dot_product_attention.default": 4, "aten._scaled_dot_product_flash_attention.default": 3}.get(extern.op, 5)
    given = dict(extern.kwargs).get("dropout_p", extern.args[at] if at < len(extern.args) else 0.0)
    value = given.value if isinstance(given, Const) else given
    return not (isinstance(value, int | float) and value == 0)
