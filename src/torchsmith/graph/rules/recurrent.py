"""Recurrent networks and their cells, above the dispatcher: whole where only values are wanted, unrolled where gradients are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...codes import Unsupported
from ..tracing import Tracing, function_rule, tensors_in
from .functions import is_watched

aten = torch.ops.aten
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


def _unrolled(
    name: str, input: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> State:  # fmt: skip
    """Step by step, for a batch of any size; what the inputs give the gates is one product for all steps."""
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
            state, found = tuple(h[n] for h in states), []
            for given in F.linear(x, w_ih, b_ih).unbind(0)[:: 1 if not n % directions else -1]:
                state = CELLS[name](given, F.linear(state[0], w_hh, b_hh), state)
                state = (F.linear(state[0], narrow[0]), *state[1:]) if narrow else state
                found.append(state[0])
            sides.append(torch.stack(found[:: 1 if not n % directions else -1]))
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
            return call(*args, **kwargs) if is_fixed(args) else _unrolled(name, *args, **kwargs)
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
