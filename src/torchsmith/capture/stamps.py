"""Equal sub-modules are captured once: the nodes and guards of the first call are stamped out for the others.

In: calls of modules from outside. Out: the value of each. While a call is interpreted, World.log keeps what it read of the outside world.
A second module, called in the same way, for which all of that holds too, with the second module in the place of the first, would give the
same nodes over its own parameters: that is what guards mean, and why a compilation may be used again after a module was exchanged. So
nothing is interpreted again: the conditions are checked, and nodes and guards are copied. Whatever guards do not say (writes, values
that only running tells, what the program made itself and passed on, objects known by another name) is interpreted, as ever.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx

from ..graph import tracing
from ..graph.sizes import expr_of
from ..graph.spec import add_node
from . import guards as gd
from . import iterators, policy
from .protocol import Machine
from .source import Attr, Computed, Guard, Item, Source, TypeOf
from .tensors import placeholder_name, word
from .world import PINNED_TYPES, SCALARS, Track

_TRIES = 3  # compared with the latest transcripts of a kind of call
_FAILURES = 6  # a kind of call none of whose transcripts ever fits
_VIAS = frozenset({"instance", "param", "buffer", "module", "own"})
_READ = frozenset({torch.nn.Module, dict, list, OrderedDict, set, defaultdict})


class Again(BaseException):
    """The program asks for what stamped tensors do not know (their graph of autograd): it is captured once more, without."""


class _No(Exception):
    """This call, or this module, is none that can be stamped out."""


class Transcript:
    """What one call of a module did."""

    __slots__ = ("args", "begin", "draws", "end", "first", "harms", "kwargs", "last", "result", "shown", "source", "symbols", "template", "writes")

    def __init__(self, source: Source, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.source, self.args, self.kwargs = source, args, kwargs
        self.begin = self.end = self.draws = self.harms = self.symbols = self.writes = 0
        self.first: torch.fx.Node | None = None
        self.last: torch.fx.Node | None = None
        self.result: Any = None
        self.shown: Any = None  # what its tensors were then
        self.template: Template | None = None


class Stamps:
    """The transcripts of one capture."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.kinds: dict[Any, list[Transcript]] = {}
        self.failures: dict[Any, int] = {}
        self.is_on = True
        self.opaque = False  # some stamped tensor hides its graph of autograd
        self.count = 0
        machine.world.log = []

    def stop(self) -> None:
        """Interpret everything from here on."""
        self.is_on = False
        self.kinds.clear()
        self.m.world.log = None

    def need_autograd(self) -> None:
        """Autograd's graph is about to be walked."""
        if self.opaque:
            raise Again
        self.is_on = False

    def forget(self) -> None:
        """Nodes were taken back: no transcript is good any more."""
        self.kinds.clear()

    def call(self, track: Track, module: Any, args: list[Any], kwargs: dict[str, Any], plainly: Callable[[], Any]) -> Any:
        """The value of module(*args, **kwargs); `plainly` interprets the call."""
        if not self.is_on:
            return plainly()
        try:
            kind = self._kind(module, args, kwargs)
        except _No:
            return plainly()
        if self.failures.get(kind, 0) > _FAILURES:
            return plainly()
        known = self.kinds.setdefault(kind, [])
        for transcript in reversed(known):
            try:
                if transcript.template is None:
                    transcript.template = Template(self.m, transcript)
                result = transcript.template.stamp(module, track.source, args, kwargs)
            except _No:
                self.failures[kind] = self.failures.get(kind, 0) + 1
                continue
            self.count += 1
            return result
        return self._transcribe(known, track, args, kwargs, plainly)

    def _transcribe(self, known: list[Transcript], track: Track, args: list[Any], kwargs: dict[str, Any], plainly: Callable[[], Any]) -> Any:
        m, trace = self.m, tracing.current()
        t = Transcript(track.source, list(args), dict(kwargs))
        state = self._state()
        graph, t.first, t.begin = m.recorder.graph, m.recorder.last_node(), len(m.world.log or ())
        t.draws, t.harms, t.writes, t.symbols = trace.draws, trace.harms, len(trace.writes), len(m.recorder.facts.symbols)
        t.result = plainly()
        if not self.is_on or state != self._state() or graph is not m.recorder.graph or t.symbols != len(m.recorder.facts.symbols):
            return t.result
        t.last, t.end, t.shown = m.recorder.last_node(), len(m.world.log or ()), _shown(t.result)
        t.draws, t.harms = trace.draws - t.draws, trace.harms - t.harms
        known.append(t)
        del known[:-_TRIES]
        return t.result

    def _state(self) -> Any:
        """What a call has to leave as it was."""
        m = self.m
        written = len(m.class_writes), len(m.effects), len(m.tensor_attrs), len(m.gradients.written), len(m.context_writes)
        modes = len(m.contexts), m.exc, m.grad, m.error_mode, m.handlers_off, len(m.modes), m.subclasses, len(m.recorder.bodies)
        return m.world.writes, m.world.reads[0], m.changes(), written, modes, len(m.recorder.numbers), iterators.places(m)

    # ------------------------------------------------------------ kinds of calls

    def _kind(self, module: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What has to be equal of two calls besides the modules. Raises _No."""
        m, trace = self.m, tracing.current()
        if m.global_writes or m.cell_writes or m.class_writes or m.tensor_attrs or m.gradients.written or m.gradients.spent or m.gradients.moves:
            raise _No
        if m.recorder.bodies or m.contexts or m.recorder.has_regions:
            raise _No
        if m.modes or m.subclasses:  # handlers of torch functions see every call
            raise _No
        if trace.autocast or torch._C._is_any_autocast_enabled() or m.asked.declared or trace.counted or trace.numbers:
            raise _No
        seen: dict[int, int] = {}
        with torch._C.DisableTorchFunction():  # nothing of the program runs
            values = tuple([self._kind_of(a, seen) for a in args]), tuple([(k, self._kind_of(v, seen)) for k, v in kwargs.items()])
        return type(module), m.loc(), m.grad, m.error_mode, m.exc, m.handlers_off, m.world.writes, values

    def _kind_of(self, value: Any, seen: dict[int, int]) -> Any:
        t = type(value)
        if t in (float, complex):
            return t, repr(value)
        if t in SCALARS:
            return t, value
        first = seen.setdefault(id(value), len(seen))  # which of them are the same object
        if issubclass(t, torch.Tensor):
            return first, self._kind_of_tensor(value, seen)
        if t in (tuple, torch.Size) and id(value) not in self.m.world.tracks:
            return t, first, tuple(self._kind_of(v, seen) for v in value)
        if t is torch.SymInt:
            return t, id(value.node.expr)
        if id(value) in self.m.world.tracks or (issubclass(t, PINNED_TYPES) and id(value) not in self.m.world.fresh_pinned):
            if t is slice or policy.is_of_machine(value):
                raise _No
            return t, id(value)
        raise _No

    def _kind_of_tensor(self, t: torch.Tensor, seen: dict[int, int]) -> Any:
        r = self.m.recorder
        info, memory = r.info(t), tracing.storage(t)
        if info.real is not None or memory in r.by_memory or set(t.__dict__) - {"_ts_device"}:  # an input, or what is known of by data
            return "same", id(t)
        place = tracing.spec_of(t), expr_of(t.storage_offset()), seen.setdefault(memory, len(seen))
        return place, t.requires_grad, t.is_leaf, t._is_view(), r.inference[memory], type(t), memory in tracing.current().written


class Template:
    """A transcript made ready: conditions by place below the module, nodes by what they take from outside."""

    def __init__(self, m: Machine, t: Transcript) -> None:
        """Raises _No, then and whenever it is asked again."""
        self.m, self.t = m, t
        self.failed = True
        self.slots: list[tuple[int, Source]] = [(-1, t.source)]
        self.index: dict[Source, int | None] = {t.source: 0}
        self.guards: list[tuple[int, Guard]] = []
        self.tracks: dict[int, bool] = {}  # slot of an object -> does something rely on its kind?
        self.tensors: dict[int, Any] = {}  # slot -> Info
        self._read_log()
        self._read_nodes()
        self.result = self._recipe(t.result)
        self._prepare()
        self.failed = False

    def _slot(self, source: Source) -> int | None:
        """The place of a source below the module; None: it is the same for all modules."""
        if source in self.index:
            return self.index[source]
        found: int | None = None
        if isinstance(source, Computed):
            if any(self._slot(s) is not None for _, s in source.symbols):
                raise _No
        elif hasattr(source, "base"):
            base = self._slot(source.base)
            if base is not None:
                if not (isinstance(source, (Item, TypeOf)) or (isinstance(source, Attr) and source.via in _VIAS)):
                    raise _No
                found = len(self.slots)
                self.slots.append((base, source))
        self.index[source] = found
        return found

    def _is_below(self, source: Any) -> bool:
        top = self.t.source
        while source is not top:
            source = getattr(source, "base", None)
            if source is None:
                return False
        return True

    def _read_log(self) -> None:
        log, world = self.m.world.log or [], self.m.world
        met: set[int] = set()
        rows = ((n, row) for n, first in enumerate(log[: self.t.end]) for row in (first[1]() if first[0] == "stamp" else (first,)))
        for n, (what, value, source, kind) in rows:
            if n < self.t.begin and not self._is_below(source):  # what was known of it before is taken to be relied on
                continue
            slot = self._slot(source)
            if what == "guard":
                if slot is not None:
                    key = source, kind, value if kind == "missing" else None
                    if kind == "alias":
                        self._slot(value)
                    guard = world.guards[key]
                    if id(guard) not in met:
                        met.add(id(guard))
                        self.guards.append((slot, guard))
            elif slot is None:
                continue
            elif what == "track":
                if world.tracks[id(value)].source != source:
                    continue  # a guard says what it is another name of
                if not (issubclass(type(value), torch.nn.Module) or type(value) in _READ or _is_plain(type(value))):
                    raise _No
                self.tracks[slot] = False
            elif what == "tensor":
                info = self.m.recorder.real.get(id(value))
                if info is None or info.node.meta["role"] not in ("param", "buffer", "const"):
                    raise _No
                if info.source == source:
                    self.tensors[slot] = info
            elif what != "use":
                raise _No
        self.metadata = {slot: g.value for slot, g in self.guards if g.kind == "tensor"}
        for slot in self.tracks:
            self.tracks[slot] = (self.slots[slot][1], "type", None) in world.guards

    def _read_nodes(self) -> None:
        m, t = self.m, self.t
        r = m.recorder
        sizes = set(r.exprs.values())
        self.nodes: list[torch.fx.Node] = []
        node = next((n for n in r.graph.nodes if n.op != "placeholder"), None) if t.first is None else t.first.next
        if t.last is not None and t.last is not t.first:
            while node is not None:
                if node.op not in ("call_function", "call_method"):
                    raise _No
                if node not in sizes:
                    self.nodes.append(node)
                if node is t.last:
                    break
                node = node.next
        own = set(self.nodes)
        self.args: dict[torch.fx.Node, tuple[Any, ...]] = {}
        for path, value in _places(t.args, t.kwargs):
            if issubclass(type(value), torch.Tensor):
                self.args.setdefault(r.info(value).node, path)
        inputs = {i.node: i for i in r.real.values()}
        self.inputs: dict[torch.fx.Node, int] = {}
        for node in self.nodes:
            for n in node.all_input_nodes:
                if n in own or n in self.args or n in self.inputs or n in sizes:
                    continue
                info = inputs.get(n)
                if info is None:
                    raise _No
                assert info.source is not None  # an input
                slot = self._slot(info.source)
                if slot is not None:
                    self.inputs[n] = slot
                    self.tensors.setdefault(slot, info)
        self.memory = memory = set(r.by_memory)
        memory.update(tracing.storage(v) for _, v in _places(t.args, t.kwargs) if issubclass(type(v), torch.Tensor))
        if any(tracing.storage(written) in memory for written in tracing.current().writes[t.writes :]):
            raise _No
        self.made: list[tuple[torch.Tensor, torch.fx.Node]] = []
        self.own = own

    def _recipe(self, value: Any) -> Any:
        """How the call's result is made of nodes and arguments."""
        t = type(value)
        if t in SCALARS or t is torch.SymInt:
            return "const", value
        if issubclass(t, torch.Tensor):
            info = self.m.recorder.info(value)
            if info.node in self.args and any(v is value for _, v in _places(self.t.args, self.t.kwargs)):
                return "arg", self.args[info.node]
            fresh = info.node in self.own and not value._is_view() and tracing.storage(value) not in self.memory
            if not fresh or set(value.__dict__) - {"_ts_device"} or any(tracing.storage(v) == tracing.storage(value) and v is not value for v, _ in self.made):
                raise _No
            if all(v is not value for v, _ in self.made):
                self.made.append((value, info.node))
            return "made", id(value)
        if t is tuple and id(value) not in self.m.world.tracks:
            return t, [self._recipe(v) for v in value]
        raise _No

    def _prepare(self) -> None:
        """What is done for each module, as rows: what its slots hold, the conditions, the texts of its tensors."""
        tables: dict[tuple[int, str], int] = {}  # dictionaries in which attributes are looked up: each is asked for once
        self.reads: list[tuple[Any, int, Any]] = []
        for base, s in self.slots[1:]:
            if isinstance(s, Attr) and s.via != "own":
                if (base, s.via) not in tables:
                    tables[base, s.via] = len(tables)
                    self.reads.append(("names", base, s.via))
                self.reads.append(("get", tables[base, s.via], s.name))
            else:
                self.reads.append(("own", base, s.name) if isinstance(s, Attr) else ("item", base, s.key) if isinstance(s, Item) else ("type", base, None))
        plain = [(slot, g) for slot, g in self.guards if g.kind not in ("alias", "tensor")]
        if any(g.kind not in _PLAIN_GUARDS for _, g in plain):
            raise _No
        self.types = [(slot, g.value) for slot, g in plain if g.kind == "type"]
        self.others = [(slot, g, gd.KINDS[g.kind].holds) for slot, g in plain if g.kind != "type"]
        self.aliases = [(slot, g) for slot, g in self.guards if g.kind == "alias"]
        self.conditions = [(slot, g.kind, g.value, g.loc, g.value if g.kind == "missing" else None) for slot, g in plain]
        top = str(self.t.source)
        self.texts: dict[int, tuple[str, str]] = {}  # slot of a tensor -> the end of its source's text, and of its name
        for slot in self.tensors:
            text = str(self.slots[slot][1])
            if not text.startswith(top):
                raise _No
            self.texts[slot] = text[len(top) :], word(text[len(top) :])

    # ------------------------------------------------------------ the next module

    def stamp(self, module: Any, source: Source, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The call's value for another module. Raises _No, with nothing changed."""
        with torch._C.DisableTorchFunction():  # nothing of the program runs
            if self.failed or _shown(self.t.result) != self.t.shown:
                raise _No
            values = self._values(module)
            sources = self._sources(source)
            self._check(values, sources)
            return self._write(values, sources, args, kwargs)

    def _values(self, module: Any) -> list[Any]:
        """What the slots hold of this module."""
        values: list[Any] = [module]
        tables: list[Any] = []
        for how, at, key in self.reads:
            if how == "get":
                value = tables[at].get(key, gd.MISSING)
            elif how == "names":
                tables.append(gd.names_of(values[at], key))
                continue
            elif how == "own":
                value = gd._attribute(values[at], key, "own")
            else:
                value = gd._item(values[at], key) if how == "item" else type(values[at])
            if value is gd.MISSING:
                raise _No
            values.append(value)
        return values

    def _sources(self, source: Source) -> list[Source]:
        """Where they come from."""
        sources = [source]
        for base, s in self.slots[1:]:
            held = sources[base]
            sources.append(Attr(held, s.name, s.via) if type(s) is Attr else Item(held, s.key) if type(s) is Item else TypeOf(held))
        return sources

    def _check(self, values: list[Any], sources: list[Source]) -> None:
        known_tracks, real = self.m.world.tracks, self.m.recorder.real
        for slot, t in self.types:
            if type(values[slot]) is not t:
                raise _No
        for slot, g, holds in self.others:
            if not holds(g, values[slot], _NO_CALL):
                raise _No
        for slot, want in self.metadata.items():
            if not gd.is_like(values[slot], want):
                raise _No
        for slot, g in self.aliases:
            other, value = self.index[g.value], values[slot]
            known = known_tracks.get(id(value)) or real.get(id(value))
            if (known is None or known.source != g.value) if other is None else value is not values[other]:
                raise _No
        met: set[int] = set()
        for slot in self.tracks:
            value = values[slot]
            track = known_tracks.get(id(value))
            if id(value) in met or (track is not None and (track.source != sources[slot] or track.reads is not None or track._image is not None)):
                raise _No
            met.add(id(value))
        for slot in self.tensors:
            value = values[slot]
            info = real.get(id(value))
            if id(value) in met or (info is not None and info.source != sources[slot]) or hasattr(value, "_torchsmith_static"):
                raise _No
            met.add(id(value))
        a = self.m.asked
        named = [place for marks in (a.dynamic_dims, a.static_dims) for place in marks] + [place for place, _ in (*a.unbacked, *a.marked)]
        if named:
            top = str(sources[0])
            if any(place.startswith(top) for place in named):
                raise _No

    def _rows(self, values: list[Any], sources: list[Source]) -> Iterator[tuple[str, Any, Source, Any]]:
        """What interpreting would have put into the log, but for the tensors."""
        for slot, g in self.guards:
            if g.kind != "tensor":
                yield "guard", self._wanted(g, sources), sources[slot], g.kind
        for slot in self.tracks:
            yield "track", values[slot], sources[slot], None

    def _wanted(self, g: Guard, sources: list[Source]) -> Any:
        """What a guard compares with: where it is one thing under two names, both are this module's."""
        other = self.index[g.value] if g.kind == "alias" else None
        return g.value if other is None else sources[other]

    def _write(self, values: list[Any], sources: list[Source], args: list[Any], kwargs: dict[str, Any]) -> Any:
        m, t = self.m, self.t
        world, r, trace = m.world, m.recorder, tracing.current()
        guards, tracks, keep = world.guards, world.tracks, world.keep
        for slot, kind, value, loc, third in self.conditions:
            s = sources[slot]
            key = (s, kind, third)
            if key not in guards:
                guards[key] = Guard(s, kind, value, loc)
        for slot, g in self.aliases:
            s = sources[slot]
            guards.setdefault((s, "alias", None), Guard(s, "alias", self._wanted(g, sources), g.loc))
        for slot, used in self.tracks.items():
            value = values[slot]
            track = tracks.get(id(value))
            if track is None:
                track = tracks[id(value)] = Track(value, sources[slot])
                keep.append(value)
            if used:
                track.used = True
        if world.log is not None:
            world.log.append(("stamp", lambda: self._rows(values, sources), sources[0], None))
        env: dict[torch.fx.Node, torch.fx.Node] = {}
        place = str(sources[0])
        name = placeholder_name(place)
        for slot, info in self.tensors.items():
            end, of_name = self.texts[slot]
            env[info.node] = r.input_like(info, values[slot], sources[slot], place + end, f"{name}_{of_name}", self.metadata.get(slot))
        for node, path in self.args.items():
            env[node] = r.info(_at(args, kwargs, path)).node
        r.look_for_handlers()

        def stamped(n: torch.fx.Node) -> torch.fx.Node:
            return env.get(n, n)

        for node in self.nodes:
            args_there, kwargs_there = torch.fx.map_arg((node.args, node.kwargs), stamped)
            env[node] = new = add_node(r.graph, node.op, node.target, args_there, kwargs_there, node.name)
            new.meta.update(node.meta)
        trace.draws += t.draws
        trace.harms += t.harms
        made: dict[int, torch.Tensor] = {}
        for value, node in self.made:
            made[id(value)] = self._fresh(value, env[node])
        return self._result(self.result, args, kwargs, made)

    def _fresh(self, like: torch.Tensor, node: torch.fx.Node) -> torch.Tensor:
        """A tensor like the one of the transcript, known as the result of `node`."""
        r, trace = self.m.recorder, tracing.current()
        new = tracing.at_offset(tracing.make_unseen(tuple(like.shape), tuple(like.stride()), like.dtype), like.storage_offset())
        if like.requires_grad:
            new = tracing.hidden(new)
            self.m.stamps.opaque = True
        tracing.remember_device(new, tracing.device_of(like))
        r.own_stamped(new, node, r.inference[tracing.storage(like)])
        if tracing.storage(like) in trace.written:
            trace.written.add(tracing.storage(new))
        return new

    def _result(self, recipe: Any, args: list[Any], kwargs: dict[str, Any], made: dict[int, torch.Tensor]) -> Any:
        how, what = recipe
        if how == "const":
            return what
        if how == "arg":
            return _at(args, kwargs, what)
        if how == "made":
            return made[what]
        return tuple([self._result(v, args, kwargs, made) for v in what])


_NO_CALL: Any = None
_PLAIN_GUARDS = frozenset({"identity", "type", "equals", "length", "dict_keys", "missing", "function"})


def _is_plain(t: type) -> bool:
    """An instance of a class written in Python that keeps all it has in its attributes (a configuration)."""
    base = next(b for b in t.__mro__ if not b.__flags__ & 0x200)
    return base is object


def _shown(value: Any) -> Any:
    """What can be seen of the tensors of a result from outside."""
    if type(value) is tuple:
        return tuple(map(_shown, value))
    if issubclass(type(value), torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype, value.requires_grad, len(value.__dict__)
    return None


def _places(args: list[Any], kwargs: dict[str, Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """Values in arguments, tuples opened, with the way to each."""
    found: list[tuple[tuple[Any, ...], Any]] = []

    def walk(path: tuple[Any, ...], value: Any) -> None:
        if type(value) is tuple:
            for i, v in enumerate(value):
                walk((*path, i), v)
        else:
            found.append((path, value))

    for i, v in enumerate(args):
        walk((i,), v)
    for k, v in kwargs.items():
        walk((k,), v)
    return found


def _at(args: list[Any], kwargs: dict[str, Any], path: tuple[Any, ...]) -> Any:
    first, *rest = path
    value = args[first] if type(first) is int else kwargs[first]
    for i in rest:
        value = value[i]
    return value


__all__ = ["Again", "Stamps"]
