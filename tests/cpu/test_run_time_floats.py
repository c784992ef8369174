"""Python floats that vary from call to call: one more compilation, then none; every result is Python's own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchsmith

VALUES = (0.25, 0.7, 1e-3, 0.1, 3.5, 0.3)  # 0.7 to 3.5 are not exact in float32
X = torch.linspace(-2.0, 3.0, 12)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-7, equal_nan=True)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return type(b) is float and (a.hex() == b.hex() or (math.isnan(a) and math.isnan(b)))
    return type(a) is type(b) and a == b


def run(fn: Callable[..., Any], values: Any = VALUES, most: int = 2, **options: Any) -> Any:
    compiled = torchsmith.compile(fn, **options)
    for v in values:
        want: Any
        try:
            want = fn(X, v)
        except Exception as e:
            with pytest.raises(type(e), match=str(e)[:20].replace("(", ".").replace(")", ".")):
                compiled(X, v)
            continue
        assert same(compiled(X, v), want), (v, compiled(X, v), want)
    assert len(compiled.entries) <= most, [e.source.guards for e in compiled.entries]
    return compiled


def numbers(x: Tensor, t: float) -> Any:
    """All that Python does with floats; each result is an output of its own."""
    n = 3
    out = [t + 1, 1 - t, t * t, t / 3, n / t, t // 0.07, 5 % t, t % 0.3, t**2, 2**t, t**0.5, -t, +t, abs(-t), round(t, 2), pow(t, 3)]
    out += [*divmod(t, 0.11), float(t), sum([t, t, 0.1]), math.sqrt(t), math.exp(-t), math.log(t), math.cos(t), math.pow(t, 1.5)]
    out += [math.hypot(t, 2), math.atan2(t, n), math.fabs(t), math.copysign(t, -1), math.tanh(t), math.degrees(t)]
    out += [t * x.shape[0], x.shape[0] / t, 1e300 * t * 1e10]
    return x * t, tuple(out)


def test_arithmetic_is_pythons() -> None:
    run(numbers, (0.25, 0.7, 1e-3, 0.1, 3.5, 7.0, 0.3))


def test_signs_of_zero_and_infinities() -> None:
    def fn(x: Tensor, t: float) -> Any:
        return x * t, -t, t * 0.0, abs(t), t + 0.0, 0.0 - t, math.copysign(1.0, t), t - t

    run(fn, (0.5, 1.5, 0.0, -0.0, math.inf, -math.inf, -2.0), most=3)


def test_comparisons_are_guards() -> None:
    def fn(x: Tensor, t: float) -> Any:
        if t > 1:
            x = x + 1
        if t:
            x = x * 2
        large = 1 if t < 2**60 else 0
        return x * t, min(t, 1), max(0.2, t), sorted([t, 0.3, 0.1]), t in (0.1, 0.3), [t] == [0.1], t == 0.7, not t, large

    compiled = run(fn, (0.25, 0.7, 0.1, 3.5, 0.3, 1e-3, 0.0, -0.0), most=14, recompile_limit=20)
    for v in (0.26, 0.71, 3.25, 0.27):
        compiled(X, v)
    before = len(compiled.entries)
    for v in (0.261, 0.711, 3.3, 0.271):
        assert same(compiled(X, v), fn(X, v))
    assert len(compiled.entries) == before


def test_exceptions_are_eagers() -> None:
    def fn(x: Tensor, t: float) -> Any:
        return x * 2, 1 / t, math.log(t), math.exp(t)

    run(fn, (0.5, 0.25, 0.0, -1.0, 1000.0, 0.125), most=4)


def test_integers_and_texts_made_of_floats() -> None:
    def fn(x: Tensor, t: float) -> Any:
        texts = f"{t:.2f}", str(t), "%g" % t, "{:.1e}".format(t), t.hex()  # noqa: UP031, UP032
        return x[: int(t * 2) + 1] * t, int(t), round(t), math.floor(t), math.ceil(-t), texts, hash(t), {t: 1}[t], t.is_integer()

    run(fn, (0.25, 0.7, 3.5, 2.0), most=4)


def test_texts_do_not_hide_the_rest() -> None:
    def fn(x: Tensor, t: float) -> Any:
        return x[: int(t * 2) + 1] + t

    run(fn, (0.25, 0.7, 0.3, 0.1, 3.5, 3.6, 2.0, 2.1), most=4)


def test_integers_made_of_floats_vary_with_them() -> None:
    run(lambda x, t: x * int(t * 10), (0.25, 0.7, 3.5, 0.3, 0.9, -1.0, 0.8, -2.5), most=3)
    run(lambda x, t: (x.sum(0, keepdim=True).expand(round(t)), math.floor(-t)), (2.0, 5.1, 3.9, 7.0), most=2)
    run(lambda x, t: [x + i for i in range(int(t))], (2.0, 3.1, 3.9, 3.2), most=3)  # a number for each


def test_negative_integers() -> None:
    def fn(x: Tensor, n: int) -> Any:
        return x * n, n // 2, n % 3, -n, divmod(n, 4), x.roll(n), x.clamp(min=n), x[n:] + 1, x + n if n < 3 else x

    run(fn, (-3, -4, -7, 5, -2, -1, 0, -9, 4, 7), most=6)
    run(lambda x, n: F.pad(x, (n, 1)), (-3, -4, -13, -12, -7, -14), most=3)  # what is cut away has to be there


def test_numbers_that_say_how_many() -> None:
    """The end of a range is rounded first where the range is of integers; infinities are no size."""
    run(lambda x, t: x[:1] + torch.ops.aten.arange.start(0, t, dtype=torch.int64), (1.0, 1.25, 2.5, 3.75, math.nan, 1e30), most=2)
    run(lambda x, t: x[:1] + torch.arange(-t, 9.5), (1.0, 2.0, math.inf, 3.5, math.nan), most=3)


def test_no_dropout_of_less_than_nothing() -> None:
    run(lambda x, t: F.scaled_dot_product_attention(*(x.view(1, 1, 3, 4),) * 3, dropout_p=t), (0.0, -1.0), most=2)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_take_them(dtype: torch.dtype) -> None:
    x = (X * 2).to(dtype)

    def fn(x: Tensor, t: float) -> Any:
        out = [x * t, x + t, torch.add(x * t, x, alpha=2), torch.full((3,), t), torch.where(x != 0, t, 0.0), x / t, (x * t) ** 2]
        out += [torch.tensor(t), torch.tensor([t, 1.0]), torch.full_like(x * 1.0, t), torch.mul(x, t)]
        if x.is_floating_point():
            out += [x.clamp(min=-t, max=t), F.leaky_relu(x, t), x.pow(2).lerp(x, t), torch.addcmul(x, x, x, value=t)]
            out += [torch.addcdiv(x, x, x.abs() + 1, value=t)]
            out += [x.fmod(t), x.remainder(t), x.masked_fill(x > 0, t), x.clone().mul_(t).add_(x, alpha=t), x > t, F.threshold(x, t, 1.0)]
            out += [torch.softmax(x / t, 0), F.hardtanh(x, -t, t), x.clone().fill_(t), F.softplus(x, t), x ** t]
        return out

    compiled = torchsmith.compile(fn, fullgraph=True)
    for v in VALUES:
        for i, (a, b) in enumerate(zip(compiled(x, v), fn(x, v), strict=True)):
            assert a.dtype == b.dtype, i
            torch.testing.assert_close(a, b, equal_nan=True)
    assert len(compiled.entries) == 2
    assert compiled.entries[-1].source.report.code is None


def test_places() -> None:
    """Attributes of modules and objects, globals, closures, dictionaries, counters."""

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.step, self.options = 1.0, 0, {"lr": 0.1}

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            self.scale *= 0.9
            return x * self.scale + self.step * self.options["lr"]

    ours, theirs = Holder(), Holder()
    compiled = torchsmith.compile(ours)
    for i in range(9):
        ours.options["lr"] = theirs.options["lr"] = 0.1 / (i + 1)
        torch.testing.assert_close(compiled(X), theirs(X))
        assert (ours.step, ours.scale) == (theirs.step, theirs.scale)
    made = [e for d in type(compiled)._torchsmith_calls.values() for e in d.entries]
    assert len(made) <= 4  # a counter is 0, then 1, then it varies


GAIN = 1.5


def test_globals_and_closures() -> None:
    decay = 0.5

    def fn(x: Tensor) -> Tensor:
        return x * GAIN - decay

    compiled = torchsmith.compile(fn)
    for i in range(6):
        globals()["GAIN"], decay = 1.5 + i / 3, 0.5 * i
        torch.testing.assert_close(compiled(X), fn(X))
    assert len(compiled.entries) == 2


def test_under_gradients() -> None:
    def fn(w: Tensor, lr: float) -> Tensor:
        return ((w * lr).sin() / math.sqrt(lr)).sum()

    compiled = torchsmith.compile(fn)
    for lr in VALUES:
        a, b = X.clone().requires_grad_(), X.clone().requires_grad_()
        compiled(a, lr).backward()
        fn(b, lr).backward()
        torch.testing.assert_close(a.grad, b.grad)
    assert len(compiled.entries) == 2


def test_numbers_in_tuples_and_lists() -> None:
    """Only those of a tuple that vary (an optimizer's betas) are symbols; of a list all floats, once one does (rewards)."""
    run(lambda x, t: x.lerp(x * 2, 1 - t[0]) * t[1], ((0.9, 0.99), (0.8, 0.99), (0.85, 0.99), (0.7, 0.9), (0.3, 0.4)), most=3)
    run(lambda x, t: F.interpolate(x.view(1, 1, 3, 4), size=t), ((3, 4), (5, 6), (7, 9), (4, 4)), most=2)
    lists = ([0.1, 0.2, 0.3], [0.1, 0.5, 0.3], [0.7, 0.6, 0.2])
    run(lambda x, t: x * torch.tensor(deque([a + 1 for a in t])).sum(), lists, most=2)
    run(lambda x, t: x * (1 if t == (1.0, 2.0) else 2) * t[0], ((1.0, 2.0), (2.0, 2.0), (3.0, 2.0)), most=2)


def test_other_modules_stay_constants() -> None:
    """The attribute of another module is another constant: it decides nothing at run time."""

    class Scale(torch.nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    apply = torchsmith.compile(lambda m, x: m(x))
    for by in (1.0, 2.0, 3.0):
        torch.testing.assert_close(apply(Scale(by), X), X * by)
    assert len(apply.entries) == 3


def losses_and_draws(x: Tensor, v: float) -> Any:
    """Numbers that torch's argument parser, or a derivative, would make constants of."""
    h, kept = x.view(3, 4).sin(), torch.zeros(3, 4)
    out = [(h.abs() + 0.1) ** (1 + v), (h * h).pow(v + 2.5), h.lerp(x.view(3, 4), v), F.elu(h, v), F.celu(h, v)]
    out += [F.dropout(h, v, training=True), h * kept.normal_(0, v), h * kept.clone().bernoulli_(v), h * kept.clone().uniform_(-v, v)]
    out += [F.huber_loss(h, -h, delta=v + 0.1), F.smooth_l1_loss(h, -h, beta=v + 0.1, reduction="sum")]
    labels = torch.tensor([3, -100, 0])
    out += [F.cross_entropy(h, labels, label_smoothing=v, reduction=r) for r in ("mean", "sum", "none")]
    out += [F.cross_entropy(h[:, :, None], labels[:, None], label_smoothing=v)]
    return out


def test_losses_draws_and_their_gradients() -> None:
    compiled = torchsmith.compile(losses_and_draws)
    for v in VALUES:
        v = min(v, 0.9)
        torch.manual_seed(1)
        (a := X.clone()).requires_grad_()
        (b := X.clone()).requires_grad_()
        want = losses_and_draws(a, v)
        torch.manual_seed(1)
        got = compiled(b, v)
        torch.testing.assert_close(got, want)
        found = (torch.autograd.grad(sum((t * t).sum() for t in outs), x) for outs, x in ((got, b), (want, a)))
        torch.testing.assert_close(next(found), next(found))
    assert len(compiled.entries) == 2 and compiled.entries[-1].source.report.code is None


CONSTANTS: dict[str, Callable[[Tensor, float], Any]] = {
    "multi_margin": lambda x, v: F.multi_margin_loss(x.view(3, 4), torch.tensor([0, 1, 2]), margin=v) * v,
    "eps": lambda x, v: F.layer_norm(x * 2, (12,), eps=v) * v,
    "quantile": lambda x, v: torch.quantile(x + v, v),
    "computed": lambda x, v: F.layer_norm(x, (12,), eps=abs(v) + 0.1),
    "order": lambda x, v: torch.relu(x).norm(v),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_that_vary_are_compiled_once_and_then_left_out(name: str) -> None:
    """An operator that takes no symbol there: one value is compiled, then the call is eager between two graphs that take every value."""
    from torchsmith.events import recording

    fn, compiled = CONSTANTS[name], torchsmith.compile(CONSTANTS[name])
    graphs, codes = [], set()
    for v in (0.1, 0.25, 0.3, 0.45, 0.6, 0.7, 0.8):
        torch.manual_seed(1)
        want = fn(X, v)
        torch.manual_seed(1)
        with recording() as got:
            assert same(compiled(X, v), want), v
        graphs.append(sum(e.kind == "graph" for e in got))
        codes |= {e.fields.get("code") for e in got}
    assert "GRA015" in codes and not any(graphs[2:]) and len(compiled.entries) == 2, graphs
    for v in (0.1, 0.25, 0.31):
        assert same(compiled(X, v), fn(X, v))


def test_constants_of_one_graph_are_compiled_for_each_value() -> None:
    run(CONSTANTS["eps"], (0.1, 0.2, 0.3, 0.4), most=4, fullgraph=True)
