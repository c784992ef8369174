"""explain: run a compiled callable once and say what was captured, compiled and left outside.

In: a callable freshly made by `torchsmith.compile` (api.explain makes it). Out: an Explanation, an object with a readable text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..codes import CODES
from ..events import Event, recording

NOTES = frozenset({"GRA001", "GRA010"})  # fallbacks inside the compiler: counted, but everything still runs in the graph


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something ran outside of compiled code: `code` is a key of codes.CODES, `loc` the user's file:line."""

    code: str
    loc: str = ""
    detail: str = ""

    def __str__(self) -> str:
        row = CODES.get(self.code)
        text = " ".join(x for x in (f"{self.loc}:" if self.loc else "", f"[{self.code}]", row.explanation if row else "") if x)
        return text + (f" ({self.detail})" if self.detail else "") + (f". {row.hint}" if row else "")

    @property
    def reason(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class BackwardSummary:
    """The backward graph of a graph under eager's autograd; its fields are those of GraphSummary, `operators` is a number."""

    operators: int
    kernels: int
    externs: tuple[str, ...]
    extern_at: tuple[str, ...]
    peak: int


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A training step: `operators` as captured before, between and after its backward passes; of `gradients` parameters a gradient was
    computed, and those of `never_written` are in no `.grad` afterwards, so that no memory is written for them."""

    operators: tuple[int, ...]
    gradients: int
    never_written: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """One captured graph: `road` says who runs it ("native", "captured" or a backend's name), `reason` why it is not native."""

    name: str
    road: str
    reason: Reason | None
    operators: tuple[str, ...]
    kernels: int
    externs: tuple[str, ...]
    guards: tuple[str, ...]
    cached: bool
    library: str
    kinds: tuple[str, ...] = ()  # what each kernel is (contraction, reduction, ...), where it was made by this call
    constants: tuple[int, int] = (0, 0)  # bytes of the constants that were prepared (packed, folded), and of what they became
    module: Any = None  # the captured torch.fx.GraphModule
    extern_at: tuple[str, ...] = ()  # the user's line of each extern call
    segments: tuple[tuple[int, int], ...] = ()  # on a GPU: (launches, library calls) of each run that goes to the device together
    saved: tuple[int, int] = (0, 0)  # bytes kept for the backward pass, and those if only views were computed again
    recomputed: tuple[str, ...] = ()  # operators that the backward pass computes again
    peak: int = -1  # bytes of temporaries at the most, but what extern calls allocate; -1: not known before the call
    backward: BackwardSummary | None = None  # where the backward pass is a graph of its own
    step: StepSummary | None = None  # where the graph goes backwards itself


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one call did. `result` is what the call returned; `times` are (wall, CPU) seconds by stage."""

    graphs: tuple[GraphSummary, ...]
    breaks: tuple[Reason, ...]
    fallbacks: tuple[Reason, ...]
    notes: tuple[Reason, ...]
    kernels: tuple[str, ...]
    times: dict[str, tuple[float, float]]
    result: Any
    tuned: tuple[str, ...] = ()  # what max-autotune chose, and its gain

    @property
    def graph_count(self) -> int:
        return len(self.graphs)

    @property
    def graph_break_count(self) -> int:
        return len(self.breaks)

    @property
    def kernel_count(self) -> int:
        return sum(g.kernels for g in self.graphs)

    @property
    def op_count(self) -> int:
        return sum(len(g.operators) for g in self.graphs)

    @property
    def ops_per_graph(self) -> tuple[tuple[str, ...], ...]:
        return tuple(g.operators for g in self.graphs)

    @property
    def extern_calls(self) -> tuple[str, ...]:
        return tuple(e for g in self.graphs for e in g.externs)

    @property
    def guards(self) -> tuple[str, ...]:
        return tuple(text for g in self.graphs for text in g.guards)

    @property
    def out_guards(self) -> tuple[str, ...]:
        return self.guards

    @property
    def compile_times(self) -> dict[str, tuple[float, float]]:
        return self.times

    @property
    def break_reasons(self) -> tuple[Reason, ...]:
        return self.breaks

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return f"<Explanation: {_head(self)}; print it>"


def explained(compiled: Callable[..., Any]) -> Callable[..., Explanation]:
    """compiled -> a function of the same arguments that calls it and returns the Explanation."""

    def run(*args: Any, **kwargs: Any) -> Explanation:
        with recording() as got:
            result = compiled(*args, **kwargs)
            for event in [e for e in got if e.kind == "attached"]:
                event.fields["prepare"]()  # the backward graph is made when it is first needed
        return explanation(got, result)

    return run


def explanation(got: Sequence[Event], result: Any = None) -> Explanation:
    """The recorded events of one call, read together."""
    by_kind: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in got:
        by_kind[event.kind].append(event.fields)
    fallbacks = [_reason(f) for f in by_kind["fallback"]]
    times: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for f in by_kind["time"]:
        wall, cpu = times[f["name"]]
        times[f["name"]] = (wall + f["wall"], cpu + f["cpu"])
    return Explanation(
        graphs=_graphs(by_kind),
        breaks=tuple(_reason(f) for f in by_kind["graph_break"]),
        fallbacks=tuple(r for r in fallbacks if r.code not in NOTES),
        notes=tuple(r for r in fallbacks if r.code in NOTES),
        kernels=tuple(str(f["name"]) for f in by_kind["kernel"]),
        times=dict(times),
        result=result,
        tuned=tuple(line for f in by_kind["tuned"] for line in f["lines"]),
    )


def _reason(f: dict[str, Any]) -> Reason:
    return Reason(str(f.get("code", "")), str(f.get("loc") or f.get("at") or ""), str(f.get("detail") or ""))


def _graphs(by_kind: dict[str, list[dict[str, Any]]]) -> tuple[GraphSummary, ...]:
    found = []
    guard_lists = [tuple(str(g) for g in f.get("list", ())) for f in by_kind["guards"]]
    for number, f in enumerate(by_kind["graph"]):
        report, module = f["report"], f.get("module")
        guards = guard_lists[number] if number < len(guard_lists) else ()
        reason = next((_reason(b) for b in by_kind["fallback"] if b.get("graph") == f["name"] and b.get("code") == report.code), None)
        if reason is None and report.code:
            reason = Reason(report.code)
        operators = _operators(module) if module is not None else ("?",) * report.operators
        ours = (report.kernels, tuple(report.externs), guards, report.cached, report.library)
        prepared = [p for p in by_kind["prepare"] if p["graph"] == f["name"]]
        kinds = tuple(str(k["what"]) for k in by_kind["kernel"] if k["graph"] == f["name"])
        constants = (sum(p["original"] for p in prepared), sum(p["bytes"] for p in prepared))
        cut: dict[str, Any] = next((c for c in by_kind["cut"] if c["graph"] == f["name"]), {"kept": 0, "plain": 0, "again": ()})
        saved = (int(cut["kept"]), int(cut["plain"]))
        found.append(
            GraphSummary(
                str(f["name"]), report.road, reason, operators, *ours, kinds, constants, module, report.extern_at, report.segments, saved,
                tuple(cut["again"]), report.peak, _backward(by_kind, f["name"]), None if module is None else _step(module),
            )
        )
    return tuple(found)


def _backward(by_kind: dict[str, list[dict[str, Any]]], name: Any) -> BackwardSummary | None:
    f = next((b for b in by_kind["backward"] if b["graph"] == name), None)
    return None if f is None else BackwardSummary(**{k: v for k, v in f.items() if k != "graph"})


def _step(module: Any) -> StepSummary | None:
    found = module.meta.get("training")
    return None if found is None else StepSummary(**found)


def _operators(module: Any) -> tuple[str, ...]:
    nodes = (n for n in module.graph.nodes if n.op in ("call_function", "call_method", "call_module"))
    return tuple(n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target)) for n in nodes)


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{name} x{n}" if n > 1 else name for name, n in Counter(names).most_common())


def _recorded(segments: Sequence[tuple[int, int]], externs: int) -> str:
    """What is recorded as one CUDA graph each (at the second call), and what is launched one by one and why."""
    parts = []
    for launches, calls in segments:
        what = f"{launches} launches" + (f" and {calls} library calls" if calls else "")
        parts.append(f"{what} recorded")
    outside = externs - sum(calls for _, calls in segments)
    rest = f"; {outside} calls between them read an input, write a result or cannot be recorded" if outside else ""
    return f"{len(segments)} segments: {_counted(parts)}{rest}"


def _head(e: Explanation) -> str:
    return f"graphs: {len(e.graphs)}   breaks: {len(e.breaks)}   kernels: {e.kernel_count}   extern calls: {len(e.extern_calls)}"


def _extern_line(g: GraphSummary | BackwardSummary) -> str:
    places = [f"{name} at {at}" if at else name for name, at in zip(g.externs, g.extern_at or ("",) * len(g.externs), strict=True)]
    return f"  extern calls ({len(g.externs)}): {_counted(places) or 'none'}"


def _peak_lines(g: GraphSummary | BackwardSummary) -> list[str]:
    return [f"  temporaries: {g.peak / 1e6:.2f} MB{' plus what extern calls allocate' if g.externs else ''}"] if g.peak >= 0 else []


def _step_lines(step: StepSummary) -> list[str]:
    before, *between, after = step.operators
    passes = f"{len(between) + 1} backward passes with {sum(between)} operators between them" if between else "a backward pass"
    rest = f" ({', '.join(step.never_written[:4])}{', ...' if len(step.never_written) > 4 else ''})" if step.never_written else ""
    return [
        f"  step: {before} operators forward, {passes}, {after} operators after it",
        f"  gradients: {step.gradients}, never written: {len(step.never_written)}{rest}",
    ]


def _lines(e: Explanation) -> list[str]:
    out = [_head(e)]
    if not (e.graphs or e.breaks or e.fallbacks):
        out.append("nothing was compiled: TORCHSMITH_DISABLE, TORCH_COMPILE_DISABLE or disable=True switches compilation off")
    out += [f"break: {r}{f' x{n}' if n > 1 else ''}" for r, n in Counter(e.breaks).items()]
    attached = {g.reason for g in e.graphs}
    out += [f"fallback: {r}" for r in e.fallbacks if r not in attached]
    for number, g in enumerate(e.graphs):
        out.append(f"graph {number} {g.name}: {g.road}{', from the cache' if g.cached else ''}")
        if g.reason is not None:
            out.append(f"  not native: {g.reason}")
        out.append(f"  operators ({len(g.operators)}): {_counted(g.operators)}")
        out.append(f"  kernels: {g.kernels}{f' ({_counted(g.kinds)})' if g.kinds else ''}")
        out.append(_extern_line(g))
        if g.segments:
            out.append(f"  on the device: {_recorded(g.segments, len(g.externs))}")
        out += _peak_lines(g)
        if g.step is not None:
            out += _step_lines(g.step)
        if g.saved[1]:
            kept, plain = (f"{b / 1e6:.2f} MB" for b in g.saved)
            again = _counted(g.recomputed) or "only views"
            out.append(f"  kept for backward: {kept} ({plain} if only views were computed again); computed again: {again}")
        if g.backward is not None:
            b = g.backward
            lines = [_extern_line(b), *_peak_lines(b)]
            out += [f"  backward: operators: {b.operators}, kernels: {b.kernels}", *(f"  {line}" for line in lines)]
        if g.constants[1]:
            before, after = (f"{b / 1e6:.1f} MB" for b in g.constants)
            out.append(f"  constants: {before} original, {after} packed")
        out.append(f"  guards ({len(g.guards)}):")
        out += [f"    {text}" for text in g.guards[:20]]
        out += [f"    ... and {len(g.guards) - 20} more"] if len(g.guards) > 20 else []
    out += [f"max-autotune: {line}" for line in e.tuned]
    out += [f"note: {text} x{n}" for text, n in Counter(map(str, e.notes)).items()]
    out.append("times (wall s, CPU s): " + ", ".join(f"{k} {w:.3f} {c:.3f}" for k, (w, c) in e.times.items()))
    return out
