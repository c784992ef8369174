"""Entries of a compiled function: guards and a call made of what was captured; why none of them fits a call, and what varies then."""

from __future__ import annotations

import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import events
from ..codes import Forbidden, is_of_backend
from ..graph.sizes import expr_of
from ..graph.spec import ASSUMED, note_unexpected
from ..ir.expr import Const, Expr, Sym, const, op
from ..options import CONFIG, asked_dims, asked_values
from ..runtime.draws import generator_states, put_back
from . import _frame, guards, overrides, resume
from .guards import Call
from .source import ITSELF, Attr, FixedObject, Guard, Item, Local, Source, TensorGuard, TensorProperty
from .state import ConstraintViolation, Installed, RecompileLimitHit, State, family_of, location
from .world import is_constant


def install(d: Any, state: State, fn: types.FunctionType, captured: Any, compiled: Any, name: str, call: Call, point: Callable[..., Any]) -> Any:
    """The entry of a compilation. point(family, place): the Dispatcher of a place where a split frame goes on."""
    symbols: dict[str, Source] = dict(captured.facts.sources)
    sizes = [Guard(FixedObject(None), "shape", e) for e in (*compiled.guards, *_layout_conditions(captured, symbols))]
    known = {g.value for g in captured.guards if g.kind == "shape"}
    all_guards = [*captured.guards, *(g for g in sizes if g.value not in known)]
    keep = state.settings.options.guard_filter_fn
    if keep is not None:
        all_guards = _filter(keep, all_guards)
    all_guards = [guards.weaken(g) for g in all_guards]
    finish = captured.finish
    run, anew = or_elsewhere(captured.graph, compiled.call, getattr(compiled.report, "road", ""))
    if overrides.users(overrides.caller_modes()) or any(g.kind == "tensor" and overrides.is_subclass(g.value.type) for g in captured.guards):
        run = overrides.without_handlers(run)
    entry = guards.make_entry(
        all_guards,
        captured.inputs,
        finish.recipe if finish.text is None else None,
        _make_finish(finish, name) if finish.text is not None else None,
        run,
        names=d.names,
        free_names=d.free_names,
        globals=fn.__globals__,
        symbols=symbols,
        name=name,
        source=Installed(tuple(all_guards), symbols, compiled.report, captured.graph, name, _holders(all_guards, call)),
        anew=anew,
        resume=None if captured.stop is None else resume.make_site(family_of(d, state), captured.stop, fn.__globals__, point),
    )
    events.emit("guards", name=name, list=[guards.print_guard(g) for g in all_guards])
    return entry


def _holders(rows: Sequence[Guard], call: Call) -> dict[str, weakref.ref[torch.nn.Module]]:
    numbers = [g.source for g in rows if g.kind == "equals" and issubclass(type(g.value), _NUMBERS)]
    found = {str(s): _holder(s, call) for s in numbers}
    return {place: weakref.ref(module) for place, module in found.items() if module is not None}


Anew = bool | Callable[[Exception], bool]


def or_elsewhere(graph: torch.fx.GraphModule, call: Callable[..., Any], road: str) -> tuple[Callable[..., Any], Anew]:
    """`call`; where it fails although the program would see that, as if it had not been called: the dispatcher runs the function itself.
    After an exception modes that the graph had entered by then are left. Also: which exceptions of the call mean that."""
    written, anew = graph.meta["written"], graph.meta["anew"]
    if road == "native":  # it gives itself up before anything is written
        return call, (anew or graph.meta["draws"]) and not written
    if any(n.op == "call_function" and n.target in _MODES for n in graph.graph.nodes):
        call = _leaving_modes(call)
    if not anew:
        return call, False
    if any(n.meta.get("late") for n in graph.graph.nodes):  # such a road writes before it checks
        return _elsewhere, False
    kept = written if graph.meta["seen"] else ()
    is_late = len(kept) < len(written)

    def may_go_on(error: Exception) -> bool:
        if str(error).startswith(ASSUMED):  # nothing is written by then
            note_unexpected(graph)
            events.emit("fallback", code="RUN004", at="", detail=str(error))
            return True
        return not (is_of_backend(error) or is_late)

    if not kept and not graph.meta["draws"]:
        return call, may_go_on
    return _taking_back(call, kept, may_go_on), False


def _taking_back(call: Callable[..., Any], kept: Sequence[int], may_go_on: Callable[[Exception], bool]) -> Callable[..., Any]:
    """`call`; where it raises, these inputs and the generators become what they were, and the function itself is run. What it wrote cannot
    be taken back of inference tensors, and where autograd has heard of it: it raises then."""

    def run(*args: Any) -> Any:
        tensors, random = [args[i] for i in kept], generator_states()
        before = [(None if t.is_inference() else t._version, t.grad_fn, t.detach().clone()) for t in tensors]
        try:
            return call(*args)
        except Exception as error:
            if not may_go_on(error):
                raise
            known = [(t, *row) for t, row in zip(tensors, before, strict=True)]
            moved = [row for row in known if (row[1] is not None and row[0]._version != row[1]) or not torch.equal(row[0], row[3])]
            if any(version is None or t.grad_fn is not made_by for t, version, made_by, _ in moved):
                raise
            with torch.no_grad():
                for t, _, _, value in moved:
                    t.copy_(value)
        put_back(random)
        raise _frame.Elsewhere

    return run


def _elsewhere(*args: Any) -> Any:
    raise _frame.Elsewhere


_MODES = (torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast)


def _leaving_modes(call: Callable[..., Any]) -> Callable[..., Any]:
    def left(*args: Any) -> Any:
        before = modes()
        try:
            return call(*args)
        except BaseException:
            set_modes(before)
            raise

    return left


def modes() -> tuple[Any, ...]:
    """What a graph may leave otherwise than it found it: gradients, autocast per device, how deep in autocast."""
    deep = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return torch.is_grad_enabled(), {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}, deep


def set_modes(known: tuple[Any, ...]) -> None:
    """As `modes` found them."""
    grad, autocast, deep = known
    overrides.set_grad(grad)
    for device, (on, dtype) in autocast.items():
        torch.set_autocast_enabled(device, on)
        torch.set_autocast_dtype(device, dtype)
    for _ in range(modes()[2] - deep):
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _layout_conditions(captured: Any, symbols: dict[str, Source]) -> list[Expr]:
    """What the graph takes for granted of dynamic inputs: each symbol's range, and strides that follow from the sizes."""
    conditions: list[Expr] = []
    for name, row in getattr(captured.facts, "symbols", {}).items():
        if name in symbols and not row.sym.dtype.is_float:
            conditions.append(op("ge", row.sym, const(row.lo)))
            if row.hi is not None:
                conditions.append(op("le", row.sym, const(row.hi)))
    rows = {g.source: g.value for g in captured.guards if g.kind == "tensor"}
    placeholders = [n for n in captured.graph.graph.nodes if n.op == "placeholder"]
    for node, source in zip(placeholders, captured.inputs, strict=True):
        guard: TensorGuard | None = rows.get(source)
        val = node.meta.get("val")
        if guard is None or None not in guard.strides or not isinstance(val, torch.Tensor):
            continue
        for d, (known, stride) in enumerate(zip(guard.strides, val.stride(), strict=True)):
            if known is None:
                symbol = f"{source}.stride({d})"
                symbols[symbol] = TensorProperty(source, "stride", d)
                condition = op("eq", Sym(symbol), expr_of(stride))
                size = expr_of(val.shape[d])  # the stride of a dimension of size 1 means nothing
                conditions.append(condition if isinstance(size, Const) and size.value != 1 else op("or", condition, op("eq", size, const(1))))
    return [c for c in conditions if not isinstance(c, Const)]


def _filter(keep: Callable[..., Any], rows: Sequence[Guard]) -> list[Guard]:
    """options["guard_filter_fn"]: a list of truths, one for each guard."""
    try:
        wanted = list(keep(rows))
    except Exception as error:  # the user's function may raise anything
        raise Forbidden("API011", detail=f"{type(error).__name__}: {error}") from error
    if len(wanted) != len(rows):
        raise Forbidden("API011", detail=f"it returned {len(wanted)} answers for {len(rows)} guards")
    return [g for g, w in zip(rows, wanted, strict=True) if w]


def _make_finish(finish: Any, name: str) -> Callable[..., Any]:
    namespace = dict(finish.namespace)
    exec(compile(finish.text, f"<torchsmith finish of {name}>", "exec"), namespace)
    return namespace["finish"]  # type: ignore[no-any-return]

_GRAPHS: Counter[str] = Counter()


def graph_name(label: str) -> str:
    """A name that no other graph of this process has."""
    safe = _safe(label)
    _GRAPHS[safe] += 1
    return f"{safe}_{_GRAPHS[safe] - 1}"


def _safe(label: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in label.replace("<locals>.", "").replace("<lambda>", "lambda"))


# ---------------------------------------------------------------- recompiles


_WALKS = 3  # compilations for places of an iterator, or values of a number; then Python moves the one and does what needs the other


def is_dead(entry: Any) -> bool:
    """An entry whose guarded object is gone can never be right again."""
    known: Installed = entry.source
    return bool(entry.dead) or any(isinstance(g.value, weakref.ref) and g.value() is None for g in known.guards if g.kind == "identity")


def note_recompile(d: Any, state: State, fn: types.FunctionType, call: Call, key: Any) -> Any:
    """Say why; at the limit warn once and run as it is. Learns which dimensions vary."""
    latest: Installed = d.entries[-1].source
    failed = _failed_guard(d.entries[-1], call)
    why = guards.explain(failed, call, latest.symbols) if failed is not None else "its guards hold now, but did not when they were checked"
    loc = (failed.loc if failed is not None else "") or location(fn)
    settings = state.settings
    state.may_pin = len(d.entries) < _WALKS
    if state.point is not None and state.family is not None and not state.may_pin:
        state.family.by_turns.add(state.point.loop)
    if len(d.entries) >= settings.recompile_limit:
        times = f"{len(d.entries)} times (recompile_limit={settings.recompile_limit})"
        message = f"torchsmith: {state.label} was compiled {times}; last reason: {why} ({loc}){_cure(failed)}"
        if settings.fullgraph:
            raise RecompileLimitHit(message)
        if not state.warned:
            state.warned = True
            events.warn(message + ". It runs as it is from now on where no compilation fits.")
        events.emit("graph_break", code="API003", loc=loc, detail=why, name=state.label)
        state.broken[key] = 1
        return _frame.RUN_HOOKED
    events.emit("recompile", name=state.label, guard=why, loc=loc)
    if failed is not None and not settings.fullgraph:
        _learn_growth(d, state, failed, call, len(d.entries) + 1 == settings.recompile_limit)
    if settings.dynamic is not False:
        for e in d.entries:
            _learn_dynamic(state, e.source, call)
    return None


_GROWN = 3  # compilations, each for one call, between which a count went up by 1 or a dictionary grew: they would never end


def _learn_growth(d: Any, state: State, failed: Guard, call: Call, last: bool) -> None:
    """What every call finds changed is left to Python from now on: nothing is assumed of its value. last: no compilation is left for other
    values of anything, so that whatever changed counts as such."""
    latest: Installed = d.entries[-1].source
    recent = d.entries[-_GROWN:]
    if last:
        changed = [g for g in latest.guards if g.kind in _ASSUMED and not guards.holds(g, call, latest.symbols)]
    else:
        changed = [failed] if len(recent) == _GROWN and all(e.hits <= 1 for e in recent) else []
    for g in changed:
        now = guards.evaluate(g.source, call)
        seen = [next((r.value for r in e.source.guards if (r.source, r.kind) == (g.source, g.kind)), None) for e in recent]
        if g.kind == "equals" and type(g.value) is type(now) is int:
            if last or (_counts(seen, now, g.source) and not _is_another_module(g.source, latest, call)):
                state.counted.add(str(g.source))
        elif g.kind in ("length", "dict_keys") and isinstance(now, (dict, list)) and None not in seen:
            if last or _grows(seen, now, g.source):
                state.growing.add(str(g.source))


def _counts(seen: list[Any], now: int, source: Source) -> bool:
    """Does a number go up by one with every compilation? An argument may come back (the number of a layer), what counts calls does not."""
    return not isinstance(source, Local) and seen == [now - n for n in range(_GROWN, 0, -1)]


def _grows(seen: list[Any], now: dict[Any, Any] | list[Any], source: Source) -> bool:
    """Does a container hold more with every compilation? seen: lengths or keys. A list that is an argument may be a shorter one again."""
    sizes = [*(r if isinstance(r, int) else len(r) for r in seen), len(now)]
    return sizes == sorted({*sizes}) and (isinstance(now, dict) or not isinstance(source, Local))


_ASSUMED = frozenset({"equals", "length", "dict_keys"})


def _cure(failed: Guard | None) -> str:
    """What a user can do about a number that changes and cannot be a symbol."""
    if failed is None or failed.kind not in ("equals", "shape"):
        return ""
    if failed.kind == "equals" and type(failed.value) in (int, float):
        return f". {failed.source} is a{'n int' if type(failed.value) is int else ' float'} that changes; pass it as a tensor: torch.tensor(...)"
    return ". Pass dynamic=True if sizes change on every call" if failed.kind == "shape" else ""


def missed(d: Any, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why no entry fits this call, in words."""
    values = d.bind(args, kwargs, fn)
    if not d.entries or values is None:
        return f"nothing was compiled yet ({location(fn)})"
    closure = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    call = Call(dict(zip(d.names, values, strict=True)), fn.__globals__, closure)
    failed = _failed_guard(d.entries[-1], call)
    return f"{guards.explain(failed, call, d.entries[-1].source.symbols)} ({failed.loc or location(fn)})" if failed is not None else location(fn)


def _failed_guard(entry: Any, call: Call) -> Guard | None:
    """The guard that C found false, or, where the world changed since, the first that is false now."""
    known: Installed = entry.source
    if 0 <= entry.failed < len(known.guards) and not guards.holds(known.guards[entry.failed], call, known.symbols):
        return known.guards[entry.failed]
    return guards.first_failure(known.guards, call, known.symbols)


def _learn_dynamic(state: State, known: Installed, call: Call) -> None:
    """Dimensions in which this call differs from an entry become dynamic in the next capture."""
    lists: dict[Source, None] = {}  # with a float that varies: the others in it will
    for g in known.guards:
        if g.kind == "equals" and issubclass(type(g.value), _NUMBERS) and not _is_another_module(g.source, known, call):
            kind = _learn_number(state, g.source, g.value, guards.evaluate(g.source, call))
            if kind is float and isinstance(g.source, Item) and type(guards.evaluate(g.source.base, call)) is list:
                lists[g.source.base] = None
        if g.kind != "tensor":
            continue
        want: TensorGuard = g.value
        v = guards.evaluate(g.source, call)
        if not issubclass(type(v), torch.Tensor) or isinstance(v, torch.nn.Parameter) or v.dim() != len(want.sizes) or v.dtype != want.dtype:
            continue
        varying = {i for i, (was, now) in enumerate(zip(want.sizes, v.shape, strict=True)) if was is not None and was != now}
        if varying:
            state.dynamic_dims.setdefault(str(g.source), set()).update(varying)
    for g in known.guards if lists else ():
        if g.kind == "equals" and type(g.value) is float and isinstance(g.source, Item) and g.source.base in lists:
            _note_number(state, g.source, float)


def _note_number(state: State, source: Source, kind: type) -> None:
    state.dynamic_dims.setdefault(str(source), set()).add(ITSELF)
    state.numbers[str(source)] = kind
    state.counted.update(() if state.point is None else {str(source)})


_NUMBERS = (int, float, tuple, np.number)


def _learn_number(state: State, source: Source, was: Any, now: Any) -> type | None:
    """A number in whose place there is another one, and those in a tuple (an optimizer's betas, sizes). Out: its kind, if it varies."""
    if type(now) is not type(was) or now == was:
        return None
    own: type = np.number if issubclass(type(now), np.number) else type(now)
    kind: type | None = own
    if type(now) in (tuple, torch.Size):
        pairs = zip(was, now, strict=True) if len(was) == len(now) else ()
        kinds = [_learn_number(state, Item(source, i), a, b) for i, (a, b) in enumerate(pairs) if issubclass(type(a), _NUMBERS)]
        kind = next((k for k in kinds if k is not None), None)
    elif not state.may_have.get(own) or (type(now) is int and abs(now) < state.least_number):
        return None
    if kind is not None:
        _note_number(state, source, kind)
    return kind


def _holder(source: Source, call: Call) -> torch.nn.Module | None:
    """The module that a number, or the list or tuple that it is in, is an attribute of."""
    holder = getattr(source, "base", None)
    if isinstance(holder, Attr) and holder.name == "__dict__":
        holder = holder.base
    found = None if holder is None else guards.evaluate(holder, call)
    if issubclass(type(found), (list, tuple)) and holder is not None:
        return _holder(holder, call)
    return found if issubclass(type(found), torch.nn.Module) else None


def _is_another_module(source: Source, known: Installed, call: Call) -> bool:
    """An attribute of a module is part of what the module is: it varies only where it differs in one and the same module."""
    module = _holder(source, call)
    if module is None:
        return False
    was = known.holders.get(str(source))
    return was is None or was() is not module


class Marks(NamedTuple):
    """What the user said of a tensor's dimensions, by our functions or by torch.compile's."""

    ranges: dict[int, tuple[int, int | None]]  # dynamic: dimension -> least and largest size
    hints: set[int]  # dynamic if that does no harm
    static: set[int]


def marks_of(t: torch.Tensor) -> Marks:
    ranges: dict[int, tuple[int, int | None]] = dict.fromkeys(getattr(t, "_dynamo_dynamic_indices", ()), (1, None))
    ranges |= {r.dim: (max(r.min or 1, 1), r.max) for r in getattr(t, "_dynamo_dynamic_range", ()) if r.dim in ranges}
    ranges |= getattr(t, "_torchsmith_dynamic", {})
    hints = {*getattr(t, "_torchsmith_maybe_dynamic", ()), *getattr(t, "_dynamo_weak_dynamic_indices", ())}
    return Marks(ranges, hints, {*getattr(t, "_torchsmith_static", ()), *getattr(t, "_dynamo_static_indices", ())})


def read_marks(state: State, call: Call) -> None:
    """mark_dynamic / mark_static on the call's tensors. Raises IndexError for a dimension of shapes_spec that a tensor does not have."""
    for place, dims in (state.settings.shapes or {}).items():
        t = call.locals.get(place[3:-2])  # L['x']
        if t is not None and issubclass(type(t), torch.Tensor) and dims and max(dims) >= t.dim():
            raise IndexError(f"shapes_spec[{place[3:-2]!r}] names dimension {max(dims)} of a tensor with {t.dim()} dimensions")
    values = asked_values()
    for name, value in call.locals.items():
        for source, t in _sources(Local(name), value):
            marked, hints, static = marks_of(t)
            bounds = getattr(t, "_dynamo_unbacked_bounds", {})
            theirs = {d: (bounds.get(d, (None, None))[0] or 0, bounds.get(d, (None, None))[1]) for d in getattr(t, "_dynamo_unbacked_indices", ())}
            marked |= theirs
            unbacked = asked_dims(CONFIG.unbacked_sources, str(source), t.dim())
            marked |= dict.fromkeys(unbacked - marked.keys(), (0, None))
            for d, (low, high) in marked.items():
                if (low > 1 and t.shape[d] < low) or (high is not None and t.shape[d] > high):
                    raise ConstraintViolation(
                        f"torchsmith: dimension {d} of {source} is marked to lie between {low} and {'infinity' if high is None else high},"
                        f" but it is {t.shape[d]}. Give it such a size, or mark it with another range."
                    )
            for d in range(t.dim()):  # a mark is this tensor's
                state.unbacked.discard((str(source), d))
                state.marked.pop((str(source), d), None)
            state.unbacked.update((str(source), d) for d in {*getattr(t, "_torchsmith_unbacked", ()), *theirs, *unbacked})
            state.marked.update({(str(source), d): span for d, span in marked.items()})
            dynamic = marked.keys() | hints | asked_dims(CONFIG.dynamic_sources, str(source), t.dim())
            if values and not t.is_nested:
                dynamic |= {d for d, size in enumerate(t.shape) if size in values}
            if dynamic:
                state.dynamic_dims.setdefault(str(source), set()).update(dynamic)
            if static and str(source) in state.dynamic_dims:
                state.dynamic_dims[str(source)] -= static


def _sources(source: Source, value: Any, depth: int = 3) -> Iterator[tuple[Source, torch.Tensor]]:
    t = type(value)  # isinstance would ask a proxy for its `__class__`
    if issubclass(t, torch.Tensor):
        yield source, value
    elif depth and issubclass(t, (list, tuple)):
        for i, x in enumerate(items(value)):
            yield from _sources(Item(source, i), x, depth - 1)
    elif depth and issubclass(t, dict):
        for k, x in dict.items(value):
            if is_constant(k):  # the hash of another key may be the program's own
                yield from _sources(Item(source, k), x, depth - 1)


def items(value: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    return list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
