"""The definition of a Program and of a Scheduled: run them on NumPy arrays, slowly and plainly (no torch).

In: the value, its inputs as arrays (numbers for scalars, float32 arrays for bf16), a function for extern calls.
Out: the results, arrays or numbers, in order; inputs that write_backs name are changed in place.

Every buffer is an array over logical indices. A new one starts full of junk, and an index out of range is an error even where its
value is not used: what the interpreter accepts, generated code may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import dtype as dt
from .arrays import CARRIERS, Array, apply, convert, literal, round_bf16
from .dtype import DType
from .expr import Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, walk
from .kernel import Block, Kernel, Let, Loop, Require, Scheduled, StoreStmt
from .program import (
    Bind,
    BufArg,
    Buffer,
    Check,
    Cond,
    Extern,
    Fresh,
    InputResult,
    Layout,
    Program,
    Repeat,
    SizeResult,
    Stage,
    Store,
    ViewResult,
)
from .verify import free_leaves

LANES = 1 << 22  # a Fold of order "any" runs all its iterations at once while they hold fewer elements than this


class InterpretError(Exception):
    """The value asks for something that has no meaning: an index out of range, an unbound name."""


class CheckFailed(Exception):
    """A Check did not hold."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


@dataclass(slots=True)
class Tensor:
    """An extern's tensor argument or result: `data` is changed in place where the call mutates it."""

    dtype: DType
    data: Array


ExternCall = Callable[[Extern, tuple[Any, ...], dict[str, Any]], Sequence[Array]]


def run_program(program: Program, inputs: Sequence[Any], extern: ExternCall | None = None) -> list[Any]:
    """The results of one call."""
    return _Machine(program, inputs, extern).run(program.body)


def run_scheduled(scheduled: Scheduled, inputs: Sequence[Any], extern: ExternCall | None = None) -> list[Any]:
    """The same through kernels."""
    return _Machine(scheduled.program, inputs, extern).run(scheduled.body)


class _Machine:
    """Buffers and symbols while a body runs."""

    def __init__(self, program: Program, inputs: Sequence[Any], extern: ExternCall | None) -> None:
        self.program, self.inputs, self.extern = program, list(inputs), extern
        self.arrays: dict[str, Array] = {}
        self.syms: dict[Sym, Any] = {}
        for s in program.symbols:
            self._symbol(s.sym, s.origin)
        for number, name in enumerate(program.inputs):
            if name:
                b = program.buffers[name]
                data = np.asarray(inputs[number])
                if data.shape != self.shape(b.shape) or data.dtype != CARRIERS[b.dtype]:
                    raise InterpretError(f"input {name} is {data.dtype}{data.shape}, not {b.dtype}{self.shape(b.shape)}")
                self.arrays[name] = data

    def _symbol(self, sym: Sym, origin: tuple[Any, ...]) -> None:
        if origin[0] == "size":
            scale, shift = origin[3:] or (1, 0)
            self.syms[sym] = (self.inputs[origin[1]].shape[origin[2]] - shift) // scale
        elif origin[0] == "stride":
            x = self.inputs[origin[1]]
            self.syms[sym] = x.strides[origin[2]] // x.itemsize
        elif origin[0] == "scalar":
            self.syms[sym] = self.inputs[origin[1]]

    def shape(self, sizes: Iterable[Expr]) -> tuple[int, ...]:
        return tuple(int(self.value(e)) for e in sizes)

    def value(self, e: Expr) -> Any:
        """A host expression."""
        return _Frame(self).ev(e)[()]

    def run(self, body: Iterable[Any]) -> list[Any]:
        self.block(body)
        p = self.program
        values = [self._result(r) for r in p.results]
        for target, source in p.write_backs:
            self.arrays[target][...] = self.read(source)
        return values

    def _result(self, r: Any) -> Any:
        if isinstance(r, Fresh):
            return np.array(self.read(r.buf))
        if isinstance(r, InputResult):
            return self.inputs[r.index]
        if isinstance(r, SizeResult):
            return self.value(r.value)
        assert isinstance(r, ViewResult)
        of = self.program.inputs[r.of] if isinstance(r.of, int) else r.of
        return self._view(of, r.shape, r.strides, r.offset, r.dtype)

    # ------------------------------------------------------------ memory
    def read(self, name: str) -> Array:
        """The array of a buffer; of a view, what its root's memory holds there."""
        b = self.program.buffers[name]
        if b.storage_of is not None and name not in self.arrays:
            assert b.layout is not None
            return self._view(b.storage_of, b.shape, b.layout.strides, b.layout.offset, b.dtype)
        if name not in self.arrays:
            for part, p in self.program.buffers.items():
                if p.storage_of == name and part in self.arrays:  # complex memory, written as its real and imaginary parts
                    return np.ascontiguousarray(self.arrays[part]).view(CARRIERS[b.dtype])[..., 0]
            raise InterpretError(f"{name} is read before it is written")
        return self.arrays[name]

    def _places(self, shape: tuple[int, ...], strides: Iterable[Expr], offset: Expr) -> Array:
        at = np.full(shape, int(self.value(offset)), np.int64)
        for k, (n, s) in enumerate(zip(shape, strides, strict=True)):
            at += (np.arange(n, dtype=np.int64) * int(self.value(s))).reshape([-1 if d == k else 1 for d in range(len(shape))])
        return at

    def _view(self, root: str, shape: Iterable[Expr], strides: Iterable[Expr], offset: Expr, dtype: DType) -> Array:
        b, data = self.program.buffers[root], self.read(root)
        layout = b.layout
        if layout is None:
            running, found = 1, []
            for n in reversed(data.shape):
                found.append(Const(dt.index, running))
                running *= max(n, 1)
            layout = Layout(tuple(reversed(found)), Const(dt.index, 0))
        wanted = self._places(self.shape(shape), strides, offset)
        held = self._places(data.shape, layout.strides, Const(dt.index, 0))
        per = b.dtype.itemsize // dtype.itemsize if dtype.kind != b.dtype.kind else 1  # real parts in complex memory
        low = min([0, *(a.min() // n for a, n in ((wanted, per), (held, 1)) if a.size)])
        high = max([0, *(a.max() // n for a, n in ((wanted, per), (held, 1)) if a.size)])
        memory = np.zeros(high - low + 1, data.dtype)
        memory[held - low] = data
        return (memory.view(CARRIERS[dtype]) if per > 1 else memory)[wanted - low * per]

    def junk(self, b: Buffer) -> Array:
        """Memory nobody has written."""
        carrier = CARRIERS[b.dtype]
        fill: Any = np.nan if b.dtype.is_float else True if b.dtype is dt.bool_ else 85
        return np.full(self.shape(b.shape), fill, carrier)

    def writable(self, name: str) -> Array:
        if name not in self.arrays:
            self.arrays[name] = self.junk(self.program.buffers[name])
        return self.arrays[name]

    # ------------------------------------------------------------ elements
    def block(self, body: Iterable[Any]) -> None:
        for e in body:
            self._HANDLERS[type(e)](self, e)

    def stage(self, s: Stage) -> None:
        extents = [int(self.value(n)) for _, n in s.axes]
        axes = [a for a, _ in s.axes]
        for store in s.stores:
            self.writable(store.buf)
        if not s.scan:
            frame = _Frame(self).over(axes, extents)
            for var, e in s.lets:
                frame.env[var] = frame.ev(e)
            frame.store_all(s.stores)
            return
        frame = _Frame(self).over(axes[:-1], extents[:-1])
        state = {var: frame.ev(init) for var, init in s.carry}
        for t in range(extents[-1]):
            step = frame.child({axes[-1]: np.asarray(t, np.int64), **state})
            for var, e in s.lets:
                step.env[var] = step.ev(e)
            step.store_all(s.stores)
            state = {var: step.ev(after) for (var, _), after in zip(s.carry, s.carry_next, strict=True)}

    def check(self, c: Check) -> None:
        if not self.value(c.cond):
            raise CheckFailed(c.kind, c.message)

    def call(self, x: Extern) -> None:
        if self.extern is None:
            raise InterpretError(f"no function for extern calls: {x.op}")
        held: dict[str, Tensor] = {}

        def resolve(a: Any) -> Any:
            if isinstance(a, BufArg):
                b = self.program.buffers[a.buf]
                if a.buf in x.outs and a.buf not in self.arrays:
                    self.writable(a.buf)
                return held.setdefault(a.buf, Tensor(b.dtype, self.read(a.buf)))
            if isinstance(a, Expr):
                return self.value(a)
            return tuple(resolve(v) for v in a) if isinstance(a, tuple) else a

        results = self.extern(x, resolve(x.args), {k: resolve(v) for k, v in x.kwargs})
        for name, data in zip(x.outs, results, strict=True):
            if name:
                b = self.program.buffers[name]
                self.arrays[name] = np.array(data, CARRIERS[b.dtype])
        for sym, out, dim in x.binds:
            self.syms[sym] = self.arrays[x.outs[out]].shape[dim]

    def bind(self, b: Bind) -> None:
        self.syms[b.sym] = self.value(b.value)

    def cond(self, c: Cond) -> None:
        self.block(c.then if self.value(c.pred) else c.orelse)

    def repeat(self, r: Repeat) -> None:
        for t in range(int(self.value(r.count))):
            self.syms[r.sym] = t
            self.block(r.body)

    def kernel(self, k: Kernel) -> None:
        for p in k.params:
            if p.written:
                self.writable(p.buf)
        axes, extents = [a for a, _ in k.grid], [int(self.value(n)) for _, n in k.grid]
        if 0 in extents:
            return
        frame = _Frame(self)
        if not k.scratch and not _ragged(k.body):
            self.statements(k.body, frame.over(axes, extents))
            return
        for point in np.ndindex(*extents):  # a grid item has its scratch to itself
            frame.scratch = {s.name: np.zeros(s.size, CARRIERS[s.dtype]) for s in k.scratch}
            self.statements(k.body, frame.child({a: np.asarray(i, np.int64) for a, i in zip(axes, point, strict=True)}))

    def statements(self, body: Iterable[Any], frame: _Frame) -> None:
        for s in body:
            if isinstance(s, Let):
                frame.env[s.var] = frame.ev(s.value)
                frame.forget()
            elif isinstance(s, StoreStmt):
                frame.store_all((s,))
                frame.forget()  # a later Load sees what was stored
            elif isinstance(s, Require):
                if not frame.ev(s.cond).all():
                    raise CheckFailed("device assertion", s.message)
            else:
                self._loop(s.meaning() if isinstance(s, Block) else s, frame)
                frame.forget()

    def _loop(self, loop: Loop, frame: _Frame) -> None:
        extent = int(frame.ev(loop.extent).ravel()[0]) if frame.ev(loop.extent).size else 0
        if extent <= 0:
            return
        if loop.kind in ("vector", "thread", "block", "grid"):
            self.statements(loop.body, frame.over([loop.axis], [extent]))
            return
        state = {var: frame.ev(init) for var, init, _ in loop.carry}
        for t in range(extent):
            step = frame.child({loop.axis: np.asarray(t, np.int64), **state})
            self.statements(loop.body, step)
            state = {var: step.ev(after) for var, _, after in loop.carry}

    _HANDLERS: dict[type, Callable[..., None]] = {
        Stage: stage, Check: check, Extern: call, Bind: bind, Cond: cond, Repeat: repeat, Kernel: kernel,
    }  # fmt: skip


def _ragged(body: Iterable[Any]) -> bool:
    """Does a loop or Fold run a different number of times for different grid items?"""
    for s in body:
        if isinstance(s, Loop):
            if any(isinstance(e, Axis) for e in walk(s.extent)) or _ragged(s.body):
                return True
        elif isinstance(s, Let | StoreStmt):
            for e in walk(s.value):
                if isinstance(e, Fold) and any(isinstance(x, Axis) for x in walk(*e.extents)):
                    return True
    return False


class _Frame:
    """Values of axes and vars at one place. `dims`: sizes of the iteration space so far; new axes come in front, so that outer values
    broadcast by themselves."""

    def __init__(self, machine: _Machine, parent: _Frame | None = None, dims: tuple[int, ...] = ()) -> None:
        self.machine, self.parent, self.dims = machine, parent, dims
        self.env: dict[Expr, Array] = {}
        self.memo: dict[Expr, Array] = {}
        self.folds: dict[Fold, tuple[Array, ...]] = {}
        self.free: dict[Expr, frozenset[Expr]] = parent.free if parent is not None else {}
        self.scratch: dict[str, Array] = parent.scratch if parent is not None else {}

    def over(self, axes: Sequence[Axis], extents: Sequence[int]) -> _Frame:
        """A frame in which all iterations of `axes` run at once, in row-major order."""
        inner = _Frame(self.machine, self, (*extents, *self.dims))
        for k, (axis, n) in enumerate(zip(axes, extents, strict=True)):
            sizes = [1] * len(inner.dims)
            sizes[k] = n
            inner.env[axis] = np.arange(n, dtype=np.int64).reshape(sizes)
        return inner

    def forget(self) -> None:
        """Memory has changed."""
        frame: _Frame | None = self
        while frame is not None:
            frame.memo.clear()
            frame.folds.clear()
            frame = frame.parent

    def child(self, env: dict[Any, Array]) -> _Frame:
        """One iteration of a sequential loop."""
        inner = _Frame(self.machine, self, self.dims)
        inner.env = dict(env)
        return inner

    def look(self, e: Expr) -> Array:
        frame: _Frame | None = self
        while frame is not None:
            found = frame.env.get(e)
            if found is not None:
                return found
            frame = frame.parent
        raise InterpretError(f"{e!r} is not bound")

    def home(self, e: Expr) -> _Frame:
        """The outermost frame in which `e` has its value: there it is computed once."""
        free_leaves(e, self.free)
        frame = self
        while frame.parent is not None and not any(x in frame.env for x in self.free[e]):
            frame = frame.parent
        return frame

    def ev(self, e: Expr) -> Array:
        if e in self.memo:
            return self.memo[e]
        for node in walk_once(e, self.memo):
            home = self.home(node)
            if node not in home.memo:
                home.memo[node] = _EVALUATE[type(node)](home, node)
            self.memo[node] = home.memo[node]
        return self.memo[e]

    # ------------------------------------------------------------ nodes
    def sym(self, e: Sym) -> Array:
        if e not in self.machine.syms:
            raise InterpretError(f"symbol {e!r} has no value")
        return np.asarray(self.machine.syms[e], CARRIERS[e.dtype])

    def op(self, e: Op) -> Array:
        return apply(e.name, e.dtype, tuple(self.ev(a) for a in e.args), tuple(a.dtype for a in e.args))

    def cast(self, e: Cast) -> Array:
        return convert(self.ev(e.arg), e.arg.dtype, e.dtype)

    def load(self, e: Load) -> Array:
        data = self.scratch.get(e.buf)
        if data is None:
            data = self.machine.read(e.buf)
        index = [self.ev(i) for i in e.index]
        if e.mask is not None and e.other is not None:
            mask = self.ev(e.mask)
            if data.size == 0:
                return np.broadcast_to(self.ev(e.other), np.broadcast_shapes(mask.shape, *(i.shape for i in index)))
            got = self._gather(e, data, [np.where(mask, i, 0) for i in index])
            return np.where(mask, got, self.ev(e.other))
        return self._gather(e, data, index)

    def _gather(self, e: Load, data: Array, index: list[Array]) -> Array:
        shape = np.broadcast_shapes(*(i.shape for i in index)) if index else ()
        if 0 in shape:
            return np.zeros(shape, data.dtype)
        for k, i in enumerate(index):
            if i.size and (i.min() < 0 or i.max() >= data.shape[k]):
                raise InterpretError(f"{e!r}: index {int(i.min())}..{int(i.max())} leaves 0..{data.shape[k]} in dimension {k}")
        return np.array(data[tuple(index)])

    def fold(self, e: Fold) -> Array:
        whole = e.picking(0)
        states = self.folds.get(whole)
        if states is None:
            states = self.folds[whole] = self._fold(whole)
        return states[e.pick]

    def _fold(self, e: Fold) -> tuple[Array, ...]:
        extents = [int(np.max(self.ev(n))) if self.ev(n).size else 0 for n in e.extents]
        state = tuple(self.ev(i) for i in e.init)
        count = int(np.prod(extents)) if extents else 1
        if count == 0:
            return state
        if e.order == "any" and e.combine and count * max(1, int(np.prod(self.dims))) <= LANES:
            return self._fold_lanes(e, extents, state)
        for point in np.ndindex(*extents):
            step = self.child({a: np.asarray(i, np.int64) for a, i in zip(e.axes, point, strict=True)})
            step.env.update({e.state(k): s for k, s in enumerate(state)})
            state = tuple(step.ev(u) for u in e.update)
        return state

    def _fold_lanes(self, e: Fold, extents: list[int], init: tuple[Array, ...]) -> tuple[Array, ...]:
        """Every iteration starts from init; neighbours are combined until one is left."""
        lanes = self.over(e.axes, extents)
        lanes.env.update({e.state(k): s for k, s in enumerate(init)})
        n = int(np.prod(extents))
        found = [np.broadcast_to(lanes.ev(u), lanes.dims).reshape(n, *self.dims) for u in e.update]
        while n > 1:
            half = n // 2
            pair = _Frame(self.machine, self, (half, *self.dims))
            for k, s in enumerate(found):
                pair.env[e.state(k)] = s[0 : 2 * half : 2]
                pair.env[e.state(k, "b")] = s[1 : 2 * half : 2]
            merged = [np.broadcast_to(pair.ev(c), pair.dims) for c in e.combine]
            found = [np.concatenate([m, s[2 * half :]]) for m, s in zip(merged, found, strict=True)]
            n -= half
        return tuple(s[0] for s in found)

    # ------------------------------------------------------------ stores
    def store_all(self, stores: Iterable[Store | StoreStmt]) -> None:
        """All values first, then all stores: an iteration does not see its own."""
        ready = []
        for s in stores:
            parts = [*(self.ev(i) for i in s.index), self.ev(s.value)]
            if s.mask is not None:
                parts.append(self.ev(s.mask))
            ready.append((s, [np.broadcast_to(p, self.dims) for p in parts]))
        for s, parts in ready:
            mask = parts.pop().ravel() if s.mask is not None else None
            flat = [p.ravel() if mask is None else p.ravel()[mask] for p in parts]
            data = self.scratch.get(s.buf)
            self._put(s, self.machine.writable(s.buf) if data is None else data, tuple(flat[:-1]), flat[-1])

    def _put(self, s: Store | StoreStmt, data: Array, index: tuple[Array, ...], value: Array) -> None:
        for k, i in enumerate(index):
            if i.size and (i.min() < 0 or i.max() >= data.shape[k]):
                raise InterpretError(f"store to {s.buf}: index {int(i.min())}..{int(i.max())} leaves 0..{data.shape[k]} in dimension {k}")
        if s.mode == "set":
            if index:
                data[index] = value  # later iterations win
            elif value.size:
                data[()] = value[-1]
            return
        if s.value.dtype is dt.bf16:  # every step rounds
            for t in range(value.size):
                at = tuple(i[t] for i in index)
                data[at] = round_bf16(MODES[s.mode](data[at], value[t]))
            return
        with np.errstate(all="ignore"):
            MODES[s.mode].at(data, index if index else (...,), value if index else MODES[s.mode].reduce(value))


MODES: dict[str, Any] = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}


def walk_once(e: Expr, done: dict[Expr, Any]) -> Iterable[Expr]:
    """Children first, but into no Fold (it evaluates its own body) and nothing already known."""
    stack: list[tuple[Expr, bool]] = [(e, False)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready or isinstance(node, Fold) or not node.args:
            yield node
        else:
            stack.append((node, True))
            stack.extend((a, False) for a in node.args)


_EVALUATE: dict[type, Callable[..., Array]] = {
    Const: lambda frame, e: literal(e),
    Sym: _Frame.sym,
    Axis: _Frame.look,
    Var: _Frame.look,
    Op: _Frame.op,
    Cast: _Frame.cast,
    Load: _Frame.load,
    Fold: _Frame.fold,
}
