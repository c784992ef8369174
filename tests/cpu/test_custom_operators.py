"""Operators of torch.library under autocast: the dtypes that they register are eager's."""

from __future__ import annotations

import pytest
import torch

import torchsmith
from torchsmith import events

LIBRARY = torch.library.Library("torchsmith_autocast", "DEF")


@torch.library.custom_op("torchsmith_autocast::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


square.register_fake(torch.empty_like)
square.register_autograd(
    lambda ctx, g: g * 2 * ctx.saved_tensors[0], setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)
square.register_autocast("cpu", torch.float16)

LIBRARY.define("defined(Tensor x) -> Tensor")
torch.library.impl("torchsmith_autocast::defined", "cpu", lambda x: x * 3, lib=LIBRARY)
torch.library.register_fake("torchsmith_autocast::defined", torch.empty_like, lib=LIBRARY)
torch.library.register_autocast("torchsmith_autocast::defined", "cpu", torch.bfloat16, lib=LIBRARY)


def test_a_registered_dtype_is_cast_to_and_differentiated() -> None:
    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            return square(x * 1.5) * 1.25

    a, b = torch.linspace(-2, 2, 7).requires_grad_(), torch.linspace(-2, 2, 7).requires_grad_()
    want, got = f(a), torchsmith.compile(f, fullgraph=True)(b)
    want.sum().backward()
    got.sum().backward()
    assert got.dtype is want.dtype is torch.float16 and torch.equal(got, want) and torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("call", [torch.ops.torchsmith_autocast.defined, torch.ops.torchsmith_autocast.defined.default])
def test_a_kernel_that_alone_knows_the_dtype_is_asked(call) -> None:
    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            return call(x + 1)

    x = torch.linspace(-2, 2, 7)
    with events.recording() as seen:
        got = torchsmith.compile(f, options={"warn_eager": False})(x)
    assert got.dtype is torch.bfloat16 and torch.equal(got, f(x))
    assert "CAP017" in [e.fields.get("code") for e in seen]


LIBRARY.define("written(Tensor(a!) x) -> Tensor(a!)")
torch.library.impl("torchsmith_autocast::written", "CPU", lambda x: x.add_(1), lib=LIBRARY)


def test_what_a_custom_operator_writes_counts_as_written() -> None:
    def f(x):
        y = x * 2
        z = torch.ops.torchsmith_autocast.written(y)
        return z.mul_(3), y, torch.ops.torchsmith_autocast.written(x)

    a, b = torch.ones(3), torch.ones(3)
    want, got = f(a), torchsmith.compile(f, fullgraph=True)(b)
    assert got[0] is got[1] and got[2] is b and b._version == a._version == 1
    for p, q in zip(got, want, strict=True):
        assert torch.equal(p, q)


def _size() -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


@torch.library.custom_op("torchsmith_autocast::above", mutates_args=())
def above(x: torch.Tensor, times: int) -> torch.Tensor:
    return x[x > 3].repeat(times)


@above.register_fake
def _(x, times):
    n = _size()
    torch._check(n <= x.numel())
    return x.new_empty((n * times,))


@torch.library.custom_op("torchsmith_autocast::total", mutates_args=())
def total(x: torch.Tensor) -> int:
    return int(x.sum())


total.register_fake(lambda x: _size())


@pytest.mark.parametrize(
    ("fn", "code"),
    [(lambda x: above(x, 1) * 2, None), (lambda x: above(x, 2) * 2, "GRA009"), (lambda x: x * total(x) + 1, "GRA009")],
)
def test_sizes_that_a_custom_operator_tells(fn, code) -> None:
    compiled = torchsmith.compile(fn, options={"warn_eager": False})
    with events.recording() as seen:
        for n in (8, 5, 2):
            x = torch.arange(float(n))
            assert torch.equal(compiled(x), fn(x))
    codes = {e.fields.get("code") for e in seen if e.kind in ("graph_break", "fallback")} - {None}
    assert codes == ({code} if code else set())


def _register(lib: torch.library.Library, k: int) -> None:
    def mixed(x, many, maybe):
        for t in (*many, *(() if maybe is None else (maybe,))):
            t.add_(x * k)
        return x + k

    lib.define("mixed(Tensor x, Tensor(a!)[] many, Tensor(b!)? maybe) -> Tensor")
    lib.define("second(Tensor(a!) x, Tensor(b!) y) -> Tensor(b!)")
    lib.define("take(Tensor(a!) x, Tensor y) -> ()")
    lib.impl("mixed", mixed, "CPU")
    lib.impl("mixed", lambda x, many, maybe: torch.empty_like(x), "Meta")
    lib.impl("second", lambda x, y: y.add_(x.mul_(k)), "CPU")
    lib.impl("take", lambda x, y: (x.copy_(y + k), None)[1], "CompositeExplicitAutograd")


def test_what_is_written_is_not_what_is_returned_and_names_may_come_again() -> None:
    """Operators with a fresh result beside written lists and optional tensors; the same names are registered twice."""

    def f(x):
        a, b, c = x * 2, x * 3, torch.zeros(3)
        fresh = torch.ops.torchsmith_again.mixed(x, [a, b], None)
        other = torch.ops.torchsmith_again.mixed(fresh, [a], b)
        same = torch.ops.torchsmith_again.second(a, b)
        torch.ops.torchsmith_again.take(c, x)
        return fresh, other, a, b, c, same

    for k in (2, 5):
        with torch.library._scoped_library("torchsmith_again", "DEF") as lib:
            _register(lib, k)
            x = torch.arange(3.0)
            want, got = f(x), torchsmith.compile(f, fullgraph=True, options={"warn_eager": False})(x)
            assert got[5] is got[3] and all(map(torch.equal, got, want))
