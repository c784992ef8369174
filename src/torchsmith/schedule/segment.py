"""Which launches go to a device together, to be recorded there (no torch).

In: Plan. Out: the same for the processor; for a device, maximal runs of launches joined to Segments.

What the host does between two launches and that can as well happen before or after both does not end a Segment: results and workspaces
are asked for in front of it, memory is released behind it. A host read, a library call, a branch or a loop ends it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir.plan import Alloc, Free, Launch, Plan, PlanCond, PlanRepeat, Segment, Step
from ..options import Options


def segment(plan: Plan, options: Options) -> Plan:
    """Join launches. Numbers count through nested blocks, in order."""
    if plan.target.device == "cpu":
        return plan
    return replace(plan, run=_Joiner().block(plan.run))


@dataclass(slots=True)
class _Joiner:
    count: int = 0

    def block(self, steps: Iterable[Step]) -> tuple[Step, ...]:
        out: list[Step] = []
        run: list[Launch] = []
        later: list[Step] = []

        def close() -> None:
            if run:
                out.append(Segment(self.count, tuple(run)))
                self.count += 1
            out.extend(later)
            run.clear()
            later.clear()

        for s in steps:
            if isinstance(s, Launch):
                run.append(s)
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
