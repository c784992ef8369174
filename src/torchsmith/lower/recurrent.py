"""Recurrent networks, whole: one Repeat over time for each layer and direction, and one for its gradients. In: Refs; out: a row's results.

    inputs[t, b, g * H + j] = bias + sum over k of x[t, b, k] * w_ih[g * H + j, k]             all steps at once
    repeat step < T:   hidden[step + 1, b, j] = cell(inputs[time(step), b, ...], hidden[step, b, :] @ w_hh, memory[b, j])

`hidden` holds every step's result in the order in which they are computed, after the initial one at 0, so the results over time are a view
of it. A row declines for dropout between layers in training, which is random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..graph import steps as _steps  # noqa: F401  (enters its operators)
from ..ir import dtype as dt
from ..ir.expr import Const, Expr, Sym, const, op, select
from ..ir.program import Repeat, Stage, Store
from .activation import relu
from .cat import masked
from .contraction import SUMS, dot
from .core import Builder
from .numerics import cast
from .ref import ZERO, Index, Ref, Strided, contiguous_strides
from .table import lowers

# what the inputs and the hidden state give each gate, and the old values -> the new hidden state, and the new memory if there is one
Step = Callable[[Sequence[Expr], Sequence[Expr], Expr, "Expr | None"], tuple[Expr, "Expr | None"]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of network. `apart`: its cell sees what comes of the inputs and what comes of the hidden state as two numbers."""

    gates: int
    step: Step
    apart: bool = False


def _lstm(x: Sequence[Expr], h: Sequence[Expr], _: Expr, memory: Expr | None) -> tuple[Expr, Expr | None]:
    i, f, g, o = (op("add", a, b) for a, b in zip(x, h, strict=True))
    assert memory is not None
    kept = op("mul", op("sigmoid", f), memory)
    new = op("add", kept, op("mul", op("sigmoid", i), op("tanh", g)))
    return op("mul", op("sigmoid", o), op("tanh", new)), new


def _gru(x: Sequence[Expr], h: Sequence[Expr], old: Expr, _: Expr | None) -> tuple[Expr, Expr | None]:
    reset, update = (op("sigmoid", op("add", x[k], h[k])) for k in (0, 1))
    new = op("tanh", op("add", x[2], op("mul", reset, h[2])))
    return op("add", op("mul", op("sub", old, new), update), new), None


def _plain(activation: Callable[[Expr], Expr]) -> Step:
    return lambda x, h, old, _: (activation(op("add", x[0], h[0])), None)


LSTM, GRU = Cell(4, _lstm), Cell(3, _gru, apart=True)
TANH = Cell(1, _plain(lambda e: op("tanh", e)))
RELU = Cell(1, _plain(relu))


@dataclass(frozen=True, slots=True)
class Run:
    """What one layer computes in one direction: results [time, batch, width], last hidden state [batch, width], memory [batch, hidden]."""

    results: Ref
    last: Ref
    memory: Ref | None


def _time_first(x: Ref) -> Ref:
    """[batch, time, ...] as [time, batch, ...], or back."""
    b, t, *rest = x.shape
    s = x.strided
    turned = Strided(s.root, (s.strides[1], s.strides[0], *s.strides[2:]), s.offset) if s is not None else None
    return x.remap((t, b, *rest), lambda i: (i[1], i[0], *i[2:]), turned)


def _project(cx: Builder, x: Ref, weight: Ref, biases: Sequence[Ref]) -> Ref:
    """What the inputs of all steps give the gates, in the dtype of sums."""
    acc = SUMS[cx.dtype]

    def at(i: Index) -> Expr:
        total = dot(cx, [x.shape[2]], lambda k: x.load((i[0], i[1], k[0])), lambda k: weight.load((i[2], k[0])))
        for bias in biases:
            total = op("add", total, cast(bias.load((i[2],)), acc))
        return total

    return cx.stage(at, (*x.shape[:2], weight.shape[0]), acc)


def _state(cx: Builder, d: dt.DType, shape: Sequence[Expr], first: Ref, lead: Index) -> str:
    """A buffer that is carried from step to step; its part `lead` starts as `first`."""
    name = cx.buffer(d, shape, required=True, role="state")
    axes = cx.axes(first.shape)
    store = Store(name, (*lead, *axes), cast(first.load(axes), d))
    cx.body.append(Stage(tuple(zip(axes, first.shape, strict=True)), (store,), loc=cx.loc, origin=cx.origin))
    return name


def _run(
    cx: Builder, cell: Cell, x: Ref, batch_first: bool, hidden: Ref, memory: Ref | None, params: Sequence[Ref], biased: bool, backward: bool
) -> Run:
    """One layer in one direction. params: w_ih, w_hh, then b_ih, b_hh if `biased`, then the projection if the cell has one."""
    d, acc = cx.dtype, SUMS[cx.dtype]
    w_ih, w_hh = params[:2]
    b_ih, b_hh = params[2:4] if biased else (None, None)
    projection = params[-1] if len(params) % 2 else None
    before = [b for b in ((b_ih,) if cell.apart else (b_ih, b_hh)) if b is not None]
    inputs = _project(cx, x, w_ih, before)
    if batch_first:
        inputs = _time_first(inputs)
    steps, batch = inputs.shape[:2]
    width, size = hidden.shape[1], op("floordiv", w_hh.shape[0], const(cell.gates))

    results = _state(cx, d, (steps + 1, batch, width), hidden, (ZERO,))
    carried = None if memory is None else _state(cx, acc, (batch, size), memory, ())
    outer, cx.body = cx.body, []
    step = Sym(cx.fresh("step"), dt.index)
    at = steps - step - 1 if backward else step
    old = cx.ref(results)

    axes = cx.axes((batch, size))
    b, j = axes

    def gate(k: int) -> Expr:
        n = j + size * k
        total = dot(cx, [width], lambda r: old.load((step, b, r[0])), lambda r: w_hh.load((n, r[0])))
        return op("add", total, cast(b_hh.load((n,)), acc)) if cell.apart and b_hh is not None else total

    sums = [gate(k) for k in range(cell.gates)]
    given = [inputs.load((at, b, j + size * k)) for k in range(cell.gates)]
    held = cast(old.load((step, b, j)), acc) if projection is None else Const(acc, 0)
    kept = None if carried is None else cx.ref(carried).load(axes)
    new, remembered = cell.step(given, sums, held, kept)
    place: tuple[str, Index] = (results, (step + 1, b, j)) if projection is None else (cx.buffer(d, (batch, size)), axes)
    stores = [Store(*place, cast(new, d))]
    if carried is not None and remembered is not None:
        stores.append(Store(carried, axes, remembered))
    cx.body.append(Stage(tuple(zip(axes, (batch, size), strict=True)), tuple(stores), loc=cx.loc, origin=cx.origin))
    if projection is not None:
        whole, p = cx.ref(place[0]), cx.axes((batch, width))
        total = dot(cx, [size], lambda r: whole.load((p[0], r[0])), lambda r: projection.load((p[1], r[0])))
        store = Store(results, (step + 1, *p), cast(total, d))
        cx.body.append(Stage(tuple(zip(p, (batch, width), strict=True)), (store,), loc=cx.loc, origin=cx.origin))
    outer.append(Repeat(step, steps, tuple(cx.body)))
    cx.body = outer

    shape, strides = (steps, batch, width), contiguous_strides((steps, batch, width))
    if backward:
        over = old.remap(shape, lambda i: (steps - i[0], *i[1:]))
    else:
        over = old.remap(shape, lambda i: (i[0] + 1, *i[1:]), Strided(results, strides, batch * width))
    last = old.remap(shape[1:], lambda i: (steps, *i))
    return Run(over, last, None if carried is None else cx.ref(carried))


def _recurrent(
    cx: Builder, cell: Cell, x: Ref, hidden: Ref, memory: Ref | None, params: Sequence[Ref], biased: bool, layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """All layers. hidden: [layers * directions, batch, width], memory: [.., .., hidden size]; out: results and the last states."""
    if cx.dtype not in SUMS or not cx.dtype.is_float or not cx.options.native_contractions or (train and dropout and layers > 1):
        return NotImplemented
    directions = 2 if bidirectional else 1
    own = len(params) // (layers * directions)
    runs: list[Run] = []
    for layer in range(layers):
        mine: list[Run] = []
        for k in range(directions):
            n = layer * directions + k
            first = hidden.remap(hidden.shape[1:], lambda i, n=n: (const(n), *i))  # type: ignore[misc]
            cells = None if memory is None else memory.remap(memory.shape[1:], lambda i, n=n: (const(n), *i))  # type: ignore[misc]
            mine.append(_run(cx, cell, x, batch_first and layer == 0, first, cells, params[n * own : (n + 1) * own], biased, k == 1))
        runs += mine
        x = mine[0].results if directions == 1 else _side_by_side(cx, mine[0].results, mine[1].results)
    x = _time_first(x) if batch_first else x
    return (x, *_last(cx, runs, hidden.shape))


def _side_by_side(cx: Builder, a: Ref, b: Ref) -> Ref:
    """out[t, b, :] = a[t, b, :] then b[t, b, :]."""
    width = a.shape[2]

    def at(i: Index) -> Expr:
        left, zero = op("lt", i[2], width), Const(cx.dtype, 0)
        return select(left, masked(a, i, left, zero), masked(b, (*i[:2], i[2] - width), op("ge", i[2], width), zero))

    return cx.stage(at, (*a.shape[:2], width * 2), cx.dtype)


def _last(cx: Builder, runs: Sequence[Run], shape: tuple[Expr, ...]) -> list[Ref]:
    """The last states of all layers and directions, stacked."""
    out = []
    for parts in ([r.last for r in runs], [r.memory for r in runs if r.memory is not None]):
        if parts:

            def at(i: Index, parts: Sequence[Ref] = parts) -> Expr:
                value = cast(parts[-1].load(i[1:]), cx.dtype)
                for k in reversed(range(len(parts) - 1)):
                    value = select(op("eq", i[0], const(k)), cast(parts[k].load(i[1:]), cx.dtype), value)
                return value

            out.append(cx.stage(at, (shape[0], *parts[0].shape), cx.dtype))
    return out


@lowers("aten.lstm.input")
def lower_lstm(cx: Builder, x: Ref, states: Sequence[Ref], params: Sequence[Ref], *how: Any) -> Any:
    return _recurrent(cx, LSTM, x, states[0], states[1], params, *how)


@lowers("aten.gru.input")
def lower_gru(cx: Builder, x: Ref, hidden: Ref, params: Sequence[Ref], *how: Any) -> Any:
    return _recurrent(cx, GRU, x, hidden, None, params, *how)


@lowers("aten.rnn_tanh.input")
def lower_rnn_tanh(cx: Builder, x: Ref, hidden: Ref, params: Sequence[Ref], *how: Any) -> Any:
    return _recurrent(cx, TANH, x, hidden, None, params, *how)


@lowers("aten.rnn_relu.input")
def lower_rnn_relu(cx: Builder, x: Ref, hidden: Ref, params: Sequence[Ref], *how: Any) -> Any:
    return _recurrent(cx, RELU, x, hidden, None, params, *how)


# ---------------------------------------------------------------- layers with gradients (graph/steps.py)


def _can_step(cx: Builder) -> bool:
    return cx.dtype in (dt.f32, dt.f64) and bool(cx.options.native_contractions)


def _loop(cx: Builder, count: Expr, shape: tuple[Expr, Expr], stores: Callable[[Sym, Index], Sequence[Store]]) -> None:
    """For each step and every [batch, hidden]: these stores, after what they ask for."""
    step, axes = Sym(cx.fresh("step"), dt.index), cx.axes(shape)
    outer, cx.body = cx.body, []
    written = tuple(stores(step, axes))
    cx.body.append(Stage(tuple(zip(axes, shape, strict=True)), written, loc=cx.loc, origin=cx.origin))
    outer.append(Repeat(step, count, tuple(cx.body)))
    cx.body = outer


def _from_later(cx: Builder, shape: tuple[Expr, Expr], width: Expr, later: Callable[[Expr, Expr], Expr], w: Ref) -> Ref:
    """What the gates of the step behind give the hidden state: a stage of its own, as a product is fastest."""

    def at(i: Index) -> Expr:
        return cast(dot(cx, [width], lambda r: later(i[0], r[0]), lambda r: w.load((r[0], i[1]))), cx.dtype)

    return cx.stage(at, shape, cx.dtype)


def _gates(cx: Builder, steps: Expr, batch: Expr, width: Expr) -> str:
    return cx.buffer(cx.dtype, (steps, batch, width), required=True, role="state")


def _of_hidden(cx: Builder, hidden: Callable[[Expr], Expr], w: Ref, size: Expr, j: Expr, count: int) -> list[Expr]:
    """What the hidden state gives `count` gates."""

    def total(k: int) -> Expr:
        return cast(dot(cx, [size], lambda r: hidden(r[0]), lambda r: w.load((j + size * k, r[0]))), cx.dtype)

    return [total(k) for k in range(count)]


def _derivative_of_sigmoid(e: Expr) -> Expr:
    return op("mul", e, op("sub", Const(e.dtype, 1.0), e))


def _derivative_of_tanh(e: Expr) -> Expr:
    return op("sub", Const(e.dtype, 1.0), op("mul", e, e))


@lowers("torchsmith_steps.lstm.default")
def lower_lstm_steps(cx: Builder, x: Ref, h: Ref, c: Ref, w: Ref) -> Any:
    if not _can_step(cx):
        return NotImplemented
    (steps, batch), size = x.shape[:2], h.shape[1]
    hs, cs = (_state(cx, cx.dtype, (steps + 1, batch, size), t, (ZERO,)) for t in (h, c))
    gates = _gates(cx, steps, batch, size * 4)
    old, kept = cx.ref(hs), cx.ref(cs)

    def stores(step: Sym, axes: Index) -> list[Store]:
        b, j = axes
        sums = _of_hidden(cx, lambda r: old.load((step, b, r)), w, size, j, 4)
        i, f, g, o = (op("add", x.load((step, b, j + size * k)), e) for k, e in enumerate(sums))
        i, f, g, o = op("sigmoid", i), op("sigmoid", f), op("tanh", g), op("sigmoid", o)
        new = op("add", op("mul", f, kept.load((step, b, j))), op("mul", i, g))
        written = [Store(gates, (step, b, j + size * k), e) for k, e in enumerate((i, f, g, o))]
        return [Store(hs, (step + 1, b, j), op("mul", o, op("tanh", new))), Store(cs, (step + 1, b, j), new), *written]

    _loop(cx, steps, (batch, size), stores)
    return cx.ref(hs), cx.ref(cs), cx.ref(gates)


def _gradients_of_gates(cx: Builder, rows: Expr, batch: Expr, size: Expr) -> str:
    """The buffer of them; its last row is zero."""
    zero = Ref(cx.dtype, (batch, size * 4), lambda i: Const(cx.dtype, 0.0))
    return _state(cx, cx.dtype, (rows, batch, size * 4), zero, (rows - 1,))


@lowers("torchsmith_steps.lstm_backward.default")
def lower_lstm_steps_backward(cx: Builder, ghs: Ref, gcs: Ref, cs: Ref, gates: Ref, w: Ref) -> Any:
    if not _can_step(cx):
        return NotImplemented
    rows, batch, size = cs.shape
    steps = rows - 1
    found = _gradients_of_gates(cx, rows, batch, size)
    carried = _state(cx, cx.dtype, (batch, size), gcs.remap((batch, size), lambda i: (steps, *i)), ())
    later, memory = cx.ref(found), cx.ref(carried)

    def stores(step: Sym, axes: Index) -> list[Store]:
        b, j = axes
        t = steps - step - 1
        total = _from_later(cx, (batch, size), size * 4, lambda n, r: later.load((t + 1, n, r)), w)
        dh = op("add", ghs.load((t + 1, b, j)), total.load(axes))
        i, f, g, o = (gates.load((t, b, j + size * k)) for k in range(4))
        tanh = op("tanh", cs.load((t + 1, b, j)))
        dc = op("add", memory.load((b, j)), op("mul", op("mul", dh, o), _derivative_of_tanh(tanh)))
        parts = (
            op("mul", op("mul", dc, g), _derivative_of_sigmoid(i)), op("mul", op("mul", dc, cs.load((t, b, j))), _derivative_of_sigmoid(f)),
            op("mul", op("mul", dc, i), _derivative_of_tanh(g)), op("mul", op("mul", dh, tanh), _derivative_of_sigmoid(o)),
        )  # fmt: skip
        return [*(Store(found, (t, b, j + size * k), e) for k, e in enumerate(parts)), Store(carried, axes, op("mul", dc, f))]

    _loop(cx, steps, (batch, size), stores)
    return cx.ref(found), cx.ref(carried)


@lowers("torchsmith_steps.gru.default")
def lower_gru_steps(cx: Builder, x: Ref, h: Ref, w: Ref, b: Ref | None) -> Any:
    if not _can_step(cx):
        return NotImplemented
    (steps, batch), size = x.shape[:2], h.shape[1]
    hs, gates = _state(cx, cx.dtype, (steps + 1, batch, size), h, (ZERO,)), _gates(cx, steps, batch, size * 4)
    old = cx.ref(hs)

    def stores(step: Sym, axes: Index) -> list[Store]:
        n, j = axes
        sums = _of_hidden(cx, lambda r: old.load((step, n, r)), w, size, j, 3)
        hidden = [e if b is None else op("add", e, b.load((j + size * k,))) for k, e in enumerate(sums)]
        given = [x.load((step, n, j + size * k)) for k in range(3)]
        reset, update = (op("sigmoid", op("add", given[k], hidden[k])) for k in (0, 1))
        new = op("tanh", op("add", given[2], op("mul", reset, hidden[2])))
        after = op("add", op("mul", op("sub", old.load((step, n, j)), new), update), new)
        written = (Store(gates, (step, n, j + size * k), e) for k, e in enumerate((reset, update, new, hidden[2])))
        return [Store(hs, (step + 1, n, j), after), *written]

    _loop(cx, steps, (batch, size), stores)
    return cx.ref(hs), cx.ref(gates)


@lowers("torchsmith_steps.gru_backward.default")
def lower_gru_steps_backward(cx: Builder, ghs: Ref, hs: Ref, gates: Ref, w: Ref) -> Any:
    if not _can_step(cx):
        return NotImplemented
    rows, batch, size = hs.shape
    steps = rows - 1
    found = _gradients_of_gates(cx, rows, batch, size)
    carried = _state(cx, cx.dtype, (batch, size), Ref(cx.dtype, (batch, size), lambda i: Const(cx.dtype, 0.0)), ())
    later, kept = cx.ref(found), cx.ref(carried)

    def stores(step: Sym, axes: Index) -> list[Store]:
        b, j = axes
        t = steps - step - 1
        total = _from_later(cx, (batch, size), size * 3, lambda n, r: later.load((t + 1, n, r + size)), w)
        dh = op("add", op("add", ghs.load((t + 1, b, j)), kept.load((b, j))), total.load(axes))
        reset, z, new, hn = (gates.load((t, b, j + size * k)) for k in range(4))
        dn = op("mul", op("mul", dh, op("sub", Const(cx.dtype, 1.0), z)), _derivative_of_tanh(new))
        parts = (
            dn, op("mul", op("mul", dn, hn), _derivative_of_sigmoid(reset)),
            op("mul", op("mul", dh, op("sub", hs.load((t, b, j)), new)), _derivative_of_sigmoid(z)), op("mul", dn, reset),
        )  # fmt: skip
        return [*(Store(found, (t, b, j + size * k), e) for k, e in enumerate(parts)), Store(carried, axes, op("mul", dh, z))]

    _loop(cx, steps, (batch, size), stores)
    return cx.ref(found), cx.ref(carried)
