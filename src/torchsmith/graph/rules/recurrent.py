"""Recurrent networks and their cells, above the dispatcher: whole where only values are wanted, layer by layer where gradients are.

A layer of an LSTM or a GRU is one operator with a derivative of its own (graph/steps.py); others are unrolled over time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...codes import Unsupported
from ..steps import NAMESPACE
from ..tracing import Tracing, current, device_of, fresh, function_rule, rule, tensors_in
from .functions import is_watched

aten = torch.ops.aten
steps = getattr(torch.ops, NAMESPACE)
Tensor = torch.Tensor
State = tuple[Tensor, ...]  # the hidden state, and an LSTM's memory


def _lstm(x: Tensor, y: Tensor, state: State) -> State:
    i, f, g, o = (x + y).chunk(4, 1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, y: Tensor, state: State) -> State:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), y.chunk(3, 1)
    new = (xn + (xr + hr).sigmoid() * hn).tanh()
    return ((state[0] - new) * (xz + hz).sigmoid() + new,)


# What the input and the hidden state give the gates, and the state -> the new state, in eager's parts.
CELLS: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "lstm": _lstm, "gru": _gru, "rnn_tanh": lambda x, y, _: ((x + y).tanh(),), "rnn_relu": lambda x, y, _: ((x + y).relu(),),
}  # fmt: skip


def _cell(name: str) -> None:
    """One step of a recurrent network; torch's composite asks for plain sizes."""

    def cell(trace: Tracing, call: Any, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
        if not input._has_symbolic_sizes_strides:
            return call(input, hx, w_ih, w_hh, b_ih, b_hh)
        state = tuple(hx) if name == "lstm" else (hx,)
        made = CELLS[name](F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
        return made if name == "lstm" else made[0]

    function_rule(getattr(torch, f"{name}_cell"))(cell)


class _Opaque(torch.autograd.Function):
    """A call of which only the shapes are wanted, of its results and of its gradients: autograd knows what it depends on."""

    @staticmethod
    def forward(ctx: Any, run: Any, *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.tensors = tensors
        return run()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        def run() -> tuple[Tensor, ...]:
            return tuple(torch.empty_like(t) for t in ctx.tensors if t.requires_grad)

        made = iter(_Opaque.apply(run, *ctx.tensors, *(g for g in grads if g is not None)) if torch.is_grad_enabled() else run())
        return None, *(next(made) if t.requires_grad else None for t in ctx.tensors)


def is_fixed(args: Any) -> bool:
    return not any(t._has_symbolic_sizes_strides for t in tensors_in(args))


@rule(steps.lstm.default)
def lstm_steps(x: Tensor, h: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    states = (x.shape[0] + 1, *h.shape)
    return fresh(states, x.dtype), fresh(states, x.dtype), fresh(x.shape, x.dtype)


@rule(steps.lstm_backward.default)
def lstm_steps_backward(ghs: Tensor, gcs: Tensor, cs: Tensor, gates: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return fresh((cs.shape[0], *gates.shape[1:]), gates.dtype), fresh(cs.shape[1:], gates.dtype)


@rule(steps.gru.default)
def gru_steps(x: Tensor, h: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    return fresh((x.shape[0] + 1, *h.shape), x.dtype), fresh((*x.shape[:2], h.shape[1] * 4), x.dtype)


@rule(steps.gru_backward.default)
def gru_steps_backward(ghs: Tensor, hs: Tensor, gates: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return fresh((hs.shape[0], *gates.shape[1:]), gates.dtype), fresh(hs.shape[1:], gates.dtype)


class _Steps(torch.autograd.Function):
    """One layer in one direction. In: the operator's name and arguments; out: the states of all steps, the initial ones first."""

    @staticmethod
    def forward(ctx: Any, name: str, *given: Any) -> Any:  # type: ignore[override]
        *states, gates = current().dispatch(getattr(steps, name).default, given, {})
        ctx.name, ctx.given = name, len(given)
        ctx.save_for_backward(*given, *states, gates)
        return tuple(states)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given, rest = ctx.saved_tensors[: ctx.given], ctx.saved_tensors[ctx.given :]
        if torch.is_grad_enabled():  # a derivative that is differentiated again: step by step
            wanted = [t for t in given if t is not None and t.requires_grad]
            found = iter(torch.autograd.grad(_step_by_step(ctx.name, *given), wanted, grads, create_graph=True, allow_unused=True))
            return None, *(next(found) if t is not None and t.requires_grad else None for t in given)
        return None, *(_lstm_gradients if ctx.name == "lstm" else _gru_gradients)(*given, *rest, *grads)


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[2])


def _lstm_gradients(x: Tensor, h: Tensor, c: Tensor, w: Tensor, hs: Tensor, cs: Tensor, gates: Tensor, ghs: Tensor, gcs: Tensor) -> Any:
    d, dc = steps.lstm_backward.default(ghs, gcs, cs, gates, w)
    return d[:-1], d[0] @ w + ghs[0], dc + gcs[0], _rows(d[:-1]).t() @ _rows(hs[:-1])


def _gru_gradients(x: Tensor, h: Tensor, w: Tensor, b: Tensor | None, hs: Tensor, gates: Tensor, ghs: Tensor) -> Any:
    d, kept = steps.gru_backward.default(ghs, hs, gates, w)
    size = h.shape[1]
    given, hidden = torch.cat([d[:-1, :, size : 3 * size], d[:-1, :, :size]], 2), d[:-1, :, size:]
    return given, d[0, :, size:] @ w + kept + ghs[0], _rows(hidden).t() @ _rows(hs[:-1]), None if b is None else hidden.sum((0, 1))


def _step_by_step(name: str, x: Tensor, *given: Any) -> State:
    """The same states by other operators."""
    states, (w, b) = (given[:2], (given[2], None)) if name == "lstm" else (given[:1], given[1:])
    found = [states]
    for row in x.unbind(0):
        found.append(CELLS[name](row, F.linear(found[-1][0], w, b), found[-1]))
    return tuple(map(torch.stack, zip(*found, strict=True)))


def _has_steps(name: str, tensors: Sequence[Tensor]) -> bool:
    """Is a layer of these tensors one operator?"""
    if name not in ("lstm", "gru") or "cpu" in current().autocast:
        return False
    return {t.dtype for t in tensors} in ({torch.float32}, {torch.float64}) and all(device_of(t).type == "cpu" for t in tensors)


def _layer(
    name: str, x: Tensor, state: State, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, narrow: Sequence[Tensor]
) -> tuple[Tensor, State]:  # fmt: skip
    """(what each step gives, the last state)"""
    if narrow or not _has_steps(name, (x, *state, w_hh)):
        found = []
        for given in F.linear(x, w_ih, b_ih).unbind(0):
            state = CELLS[name](given, F.linear(state[0], w_hh, b_hh), state)
            state = (F.linear(state[0], narrow[0]), *state[1:]) if narrow else state
            found.append(state[0])
        return torch.stack(found), state
    given = F.linear(x, w_ih, b_ih)
    if name == "lstm":  # the sum of the biases would give both of them one tensor as their gradient
        states = _Steps.apply(name, given if b_hh is None else given + b_hh, *state, w_hh)
    else:
        states = _Steps.apply(name, given, *state, w_hh, b_hh)
    return states[0][1:], tuple(t[-1] for t in states)


def _layers(
    name: str, input: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> State:  # fmt: skip
    """Layer by layer, for a batch of any size; what the inputs give the gates is one product for all steps."""
    x = input.transpose(0, 1) if batch_first else input
    states = hx if name == "lstm" else [hx]
    if any(bool(h.shape[1] != x.shape[1]) for h in states):
        raise RuntimeError(f"hidden states of {states[0].shape[1]} sequences for a batch of {x.shape[1]}")
    directions = 2 if bidirectional else 1
    each, last = len(params) // (layers * directions), []
    for layer in range(layers):
        sides = []
        for n in range(layer * directions, (layer + 1) * directions):
            w_ih, w_hh, *rest = params[n * each : (n + 1) * each]
            b_ih, b_hh = rest[:2] if has_biases else (None, None)
            narrow = rest[2:] if has_biases else rest
            back = bool(n % directions)
            made, state = _layer(name, x.flip(0) if back else x, tuple(h[n] for h in states), w_ih, w_hh, b_ih, b_hh, narrow)
            sides.append(made.flip(0) if back else made)
            last.append(state)
        x = torch.cat(sides, -1) if bidirectional else sides[0]
        if dropout and train and layer < layers - 1:
            x = F.dropout(x, dropout)
    return x.transpose(0, 1) if batch_first else x, *map(torch.stack, zip(*last, strict=True))


def _whole(name: str) -> Any:
    """Recurrent networks stay one operator; torch would unroll them over time, as it does where gradients are wanted."""
    op = getattr(aten, name).input

    def recurrent(trace: Tracing, call: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_watched(*args, *kwargs.values()):
            return trace.dispatch(op, args, kwargs)
        if trace.records:
            is_unrolled = is_fixed(args) and not _has_steps(name, tensors_in(args))
            return call(*args, **kwargs) if is_unrolled else _layers(name, *args, **kwargs)
        return _Opaque.apply(lambda: trace.dispatch(op, args, kwargs), *tensors_in((args, kwargs)))

    def choose(trace: Tracing, call: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 3 and isinstance(args[3], bool):  # (input, hx, params, has_biases, ...)
            return recurrent(trace, call, *args, **kwargs)
        # Torch walks over a packed sequence by the numbers in its memory, of which a tensor that stands for another has none.
        raise Unsupported("GRA009", at=trace.facts.loc, detail="a recurrent network over a packed sequence")

    return choose


for _name in CELLS:
    function_rule(getattr(torch, _name))(_whole(_name))
    _cell(_name)
