"""Layers of recurrent networks as operators on values, where gradients are wanted: what each step leaves, and the gradients of the gates.

T steps, B sequences, H hidden numbers. x: what the inputs give the gates, biases too. Sizes: x [T, B, gates * H], h and c [B, H],
w [gates * H, H]; hs and cs [T + 1, B, H], the initial states first; grads [T + 1, B, 4 * H], zeros last. Here they are written with torch's
operators, for graphs that run eagerly; lower/recurrent.py has them as one loop each.

    lstm          gates [T, B, 4 * H]: input, forget, cell and output gate
    lstm_backward grads: of these gates before their activation; and of c
    gru           gates [T, B, 4 * H]: reset, update and new gate, and what the hidden state gives the new gate
    gru_backward  grads: of what the inputs give the new gate, then of what the hidden state gives the reset, update and new gate; and of h,
                  as far as it goes past the gates
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
NAMESPACE = "torchsmith_steps"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def _lstm(x: Tensor, h: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hs, cs, gates = [h], [c], []
    for given in x:
        i, f, g, o = (given + hs[-1] @ w.t()).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        gates.append(torch.cat([i, f, g, o], 1))
        cs.append(f * cs[-1] + i * g)
        hs.append(o * cs[-1].tanh())
    return torch.stack(hs), torch.stack(cs), torch.stack(gates) if gates else torch.empty_like(x)


def _lstm_backward(ghs: Tensor, gcs: Tensor, cs: Tensor, gates: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    dc, found = gcs[-1], [gates.new_zeros(w.shape[0]).expand(gcs.shape[1], -1)]
    for t in reversed(range(gates.shape[0])):
        dh = ghs[t + 1] + found[-1] @ w
        i, f, g, o = gates[t].chunk(4, 1)
        tanh = cs[t + 1].tanh()
        dc = dc + dh * o * (1 - tanh * tanh)
        parts = dc * g * i * (1 - i), dc * cs[t] * f * (1 - f), dc * i * (1 - g * g), dh * tanh * o * (1 - o)
        found.append(torch.cat(parts, 1))
        dc = dc * f
    return torch.stack(found[::-1]), dc.clone()


def _gru(x: Tensor, h: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    hs, gates = [h], []
    for given in x:
        (xr, xz, xn), (hr, hz, hn) = given.chunk(3, 1), torch.nn.functional.linear(hs[-1], w, b).chunk(3, 1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        new = (xn + r * hn).tanh()
        gates.append(torch.cat([r, z, new, hn], 1))
        hs.append((hs[-1] - new) * z + new)
    return torch.stack(hs), torch.stack(gates) if gates else x.new_empty(0, x.shape[1], 4 * h.shape[1])


def _gru_backward(ghs: Tensor, hs: Tensor, gates: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    size = hs.shape[2]
    kept, found = torch.zeros_like(hs[0]), [gates.new_zeros(4 * size).expand(hs.shape[1], -1)]
    for t in reversed(range(gates.shape[0])):
        dh = ghs[t + 1] + kept + found[-1][:, size:] @ w
        r, z, new, hn = gates[t].chunk(4, 1)
        dn = dh * (1 - z) * (1 - new * new)
        found.append(torch.cat([dn, dn * hn * r * (1 - r), dh * (hs[t] - new) * z * (1 - z), dn * r], 1))
        kept = dh * z
    return torch.stack(found[::-1]), kept


for _name, _fn, _schema in (
    ("lstm", _lstm, "(Tensor x, Tensor h, Tensor c, Tensor w) -> (Tensor, Tensor, Tensor)"),
    ("lstm_backward", _lstm_backward, "(Tensor ghs, Tensor gcs, Tensor cs, Tensor gates, Tensor w) -> (Tensor, Tensor)"),
    ("gru", _gru, "(Tensor x, Tensor h, Tensor w, Tensor? b) -> (Tensor, Tensor)"),
    ("gru_backward", _gru_backward, "(Tensor ghs, Tensor hs, Tensor gates, Tensor w) -> (Tensor, Tensor)"),
):
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _fn, "CompositeExplicitAutograd")
