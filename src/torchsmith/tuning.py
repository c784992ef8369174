"""max-autotune: measure the candidates of every tiling decision in place, and decide.

In: `make`, which builds the whole graph for given decisions, and the inputs of the call that is being compiled. Out: decisions for
form_kernels, key -> candidate, and how much each gained.

Every candidate is timed inside the whole running graph, launch by launch: weights come from memory in the order of the model, as they will.
One build serves a candidate of every decision at once; it runs in turns with the default, and what counts is the median ratio of the two,
since a machine's speed drifts. Winners are measured once more, together, before they are believed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import events
from .codes import Unsupported
from .ir.kernel import Choice
from .ir.linear import const_of
from .ir.plan import Launch, Plan, PlanCond, PlanRepeat
from .runtime import tuned
from .runtime.draws import generator_states, put_back
from .runtime.manifest import Manifest
from .runtime.tuned import Tuned

SECONDS = 30.0  # for all measuring of one graph; building comes on top
MOST_PAIRS = 12
FEWEST_PAIRS = 3
WORTH = 1.02  # a candidate must be that many times as fast as the default, twice

Decisions = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Made:
    """One build of the graph."""

    plan: Plan
    manifest: Manifest
    load: Callable[[], Any]  # the native graph


Make = Callable[[Decisions], Made]


@dataclass(frozen=True, slots=True)
class Running:
    """A build, loaded and warm: the decision behind each of its timed launches."""

    native: Any
    keys: tuple[str | None, ...]


def choices_of(plan: Plan) -> tuple[Choice | None, ...] | None:
    """The open decision of each launch that `profile` times, in order; None where that is not the same in every call."""
    launches = [step for step in plan.run if isinstance(step, Launch)]
    sizes = [(const_of(step.grid), const_of(step.grain)) for step in launches]
    if any(isinstance(step, PlanCond | PlanRepeat) for step in plan.run) or any(None in pair for pair in sizes):
        return None
    # A launch that is not worth a second thread does not pass through the host.
    return tuple(plan.kernels[step.kernel].choice for step, (n, grain) in zip(launches, sizes, strict=True) if (n or 0) > (grain or 0))


def tune(make: Make, inputs: Sequence[Any], threads: int, name: str) -> tuple[Decisions, tuple[str, ...]]:
    """(decisions, lines for explain). What the processor's file remembers is not measured again."""
    first = make({})
    launches = choices_of(first.plan)
    if launches is None:
        return {}, ("not tuned: its launches or their sizes are known at run time only",)
    choices = {c.key: c for c in launches if c is not None and len(c.options) > 1}
    known = {k: t for k, t in tuned.recall().items() if k.startswith(f"{threads} threads ")}
    found = {k: known[at] for k, c in choices.items() if (at := _at(threads, k)) in known and known[at].chosen in c.options}
    unknown = {k: c for k, c in choices.items() if k not in found}
    if unknown:
        refused = _refuses(first, inputs)
        if refused:
            return {k: t.chosen for k, t in found.items()}, (f"not tuned: {refused}",)
        new = _Tuner(make, unknown, {k: t.chosen for k, t in found.items()}, _own(first, inputs), name).decide()
        tuned.remember({_at(threads, k): t for k, t in new.items()})
        found |= new
    return {k: t.chosen for k, t in found.items()}, _lines(choices, found, len(unknown))


def _at(threads: int, key: str) -> str:
    return f"{threads} threads {key}"


def _lines(choices: Mapping[str, Choice], found: Mapping[str, Tuned], measured: int) -> tuple[str, ...]:
    changed = [f"{choices[k].what}: {t.chosen} instead of {choices[k].options[0]}, {t.gain:.2f} times as fast"
               for k, t in found.items() if t.chosen != choices[k].options[0]]  # fmt: skip
    return (f"{len(found)} tilings, {measured} of them measured now, {len(changed)} changed", *changed)


def _refuses(made: Made, inputs: Sequence[Any]) -> str:
    """Why the graph must not be run just for its times; "" if it may."""
    foreign = [e.op for e in made.manifest.externs if not e.op.startswith("aten.")]
    if foreign:
        return f"it calls {foreign[0]}, which may do more than compute"
    if any(isinstance(t, torch.Tensor) and t.device.type != "cpu" for t in inputs):
        return "its inputs are not here"
    return ""


def _own(made: Made, inputs: Sequence[Any]) -> list[Any]:
    """The inputs, with copies of those that the graph writes."""
    rows = made.manifest.inputs
    return [t.detach().clone() if isinstance(t, torch.Tensor) and row.get("written") else t for t, row in zip(inputs, rows, strict=False)]


class _Tuner:
    """One graph's measurements."""

    def __init__(self, make: Make, choices: Mapping[str, Choice], known: Decisions, inputs: list[Any], name: str) -> None:
        self.make, self.choices, self.known, self.inputs, self.name = make, choices, known, inputs, name
        self.default = self._start(known)
        self.deadline = time.monotonic() + SECONDS
        self.rounds = max(len(c.options) for c in choices.values())

    def decide(self) -> dict[str, Tuned]:
        best = {k: Tuned(c.options[0], 1.0) for k, c in self.choices.items()}
        generator = generator_states()  # random operators of the graph draw while it is measured
        try:
            for number in range(1, self.rounds):
                self._say(number - 1)
                tried = {k: c.options[number] for k, c in self.choices.items() if number < len(c.options)}
                for k, ratio in self._gains({**self.known, **tried}, tried).items():
                    if ratio > best[k].gain:
                        best[k] = Tuned(tried[k], ratio)
                if time.monotonic() > self.deadline:
                    break
            self._say(self.rounds - 1)
            winners = {k: t.chosen for k, t in best.items() if t.gain >= WORTH}
            again = self._gains({**self.known, **winners}, winners) if winners else {}
        finally:
            put_back(generator)
            self._say(self.rounds)
        sure = {k: min(best[k].gain, again.get(k, 1.0)) for k in best}
        return {k: Tuned(t.chosen, sure[k]) if sure[k] >= WORTH else Tuned(self.choices[k].options[0], 1.0) for k, t in best.items()}

    def _say(self, done: int) -> None:
        events.emit("tuning", graph=self.name, done=done, total=self.rounds, decisions=len(self.choices))

    def _gains(self, decided: Decisions, tried: Decisions) -> dict[str, float]:
        """key -> how many times as fast as the default the tried candidate runs."""
        try:
            other = self._start(decided)
        except Unsupported as why:  # a candidate that cannot be built is no candidate
            events.emit("fallback", code=why.code, graph=self.name, detail=f"a candidate of max-autotune: {why.detail}")
            return {}
        began = time.monotonic()
        ratios: dict[str, list[float]] = {k: [] for k in tried}
        pairs = 0
        while pairs < MOST_PAIRS and (pairs < FEWEST_PAIRS or time.monotonic() < self._share(began)):
            order = (self.default, other) if pairs % 2 == 0 else (other, self.default)
            times = {graph: self._times(graph) for graph in order}
            usual, new = times[self.default], times[other]
            for k, values in ratios.items():
                values.append(usual.get(k, 0.0) / max(new.get(k, 0.0), 1e-9))
            pairs += 1
        return {k: statistics.median(values) for k, values in ratios.items()}

    def _share(self, began: float) -> float:
        """When a candidate's measuring must end: an equal part of the whole time."""
        return began + SECONDS / (self.rounds + 1)

    def _start(self, decided: Decisions) -> Running:
        """Built, loaded, and warm: constants are prepared in the first call."""
        made = self.make(decided)
        native = made.load()
        native(*self.inputs)
        return Running(native, tuple(None if c is None else c.key for c in choices_of(made.plan) or ()))

    def _times(self, graph: Running) -> dict[str, float]:
        """Seconds that the launches of each decision took in one run."""
        total: dict[str, float] = {}
        for key, seconds in zip(graph.keys, graph.native.profile(*self.inputs), strict=True):
            if key is not None:
                total[key] = total.get(key, 0.0) + seconds
        return total
