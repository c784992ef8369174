"""What a program leaves behind beside its results is eager's: gradients of its leaves, version counters, exceptions, what it refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchsmith
from torchsmith.events import recording


def both(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """What the function and its compiled form give, each of fresh arguments (made by callables)."""
    found = []
    for f in (fn, torchsmith.compile(fn)):
        found.append(f(*[a() for a in args]))
    return found[0], found[1]


# ---------------------------------------------------------------- gradients


def own_leaf(x: Tensor) -> Tensor:
    y = x.clone().requires_grad_()
    (y * y).sum().backward()
    return y


def own_leaf_in_a_list(x: Tensor) -> tuple[list[Tensor], Tensor]:
    y, w = torch.ones(3, requires_grad=True), x.clone().requires_grad_()
    (y * w).sum().backward()
    (y * 2).sum().backward()
    return [w], y + 0


def own_leaf_left_alone(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone().requires_grad_()
    return y, (y * y).sum()


class Keeper:
    kept: Any = None


def own_leaf_kept(x: Tensor, keeper: Keeper) -> Tensor:
    keeper.kept = x.clone().requires_grad_()
    (keeper.kept * 3).sum().backward()
    return x + 1


def test_leaves_made_inside_keep_their_gradient() -> None:
    for y in both(own_leaf, lambda: torch.arange(3.0)):
        assert y.is_leaf and y.requires_grad
        torch.testing.assert_close(y.grad, torch.tensor([0.0, 2.0, 4.0]))
    for (w,), _ in both(own_leaf_in_a_list, lambda: torch.arange(3.0)):
        torch.testing.assert_close(w.grad, torch.ones(3))
    for y, loss in both(own_leaf_left_alone, lambda: torch.arange(3.0)):
        loss.backward()
        torch.testing.assert_close(y.grad, torch.tensor([0.0, 2.0, 4.0]))
    for f in (own_leaf_kept, torchsmith.compile(own_leaf_kept)):
        keeper = Keeper()
        f(torch.ones(2), keeper)
        torch.testing.assert_close(keeper.kept.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize("decorated", [False, True])
def test_grad_mode_turned_on_under_no_grad(decorated: bool) -> None:
    w = torch.ones(3, requires_grad=True)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            y = x * w
        return y, y + 1

    used = torch.enable_grad()(fn) if decorated else fn
    for f in (used, torchsmith.compile(used, fullgraph=True)):
        w.grad = None
        with torch.no_grad():
            y, z = f(torch.arange(3.0))
            assert not torch.is_grad_enabled()
        assert y.requires_grad and z.requires_grad is decorated
        y.sum().backward()
        torch.testing.assert_close(w.grad, torch.arange(3.0))


def test_errors_of_autograd_name_the_operation() -> None:
    said = []
    for f in (torch.exp, torchsmith.compile(lambda x: x.exp())):
        y = f(torch.ones(3, requires_grad=True))
        y.add_(1)
        with pytest.raises(RuntimeError) as error:
            y.sum().backward()
        said.append(re.sub(r"Backward\d*", "", str(error.value)))
    assert said[0] == said[1] and "Exp" in said[1]


# ---------------------------------------------------------------- version counters


def add_twice(x: Tensor) -> Tensor:
    return x.add_(1).mul_(2) + 1


def through_data(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x + 1


def items(x: Tensor) -> Tensor:
    x[0] = 1
    x[1:].zero_()
    return x.sum()


def through_detach(x: Tensor) -> Tensor:
    x.detach().add_(1)
    return x * 1


def view_and_data(x: Tensor) -> Tensor:
    x.view(-1).add_(1)
    x.data.add_(1)
    return x * 1


def what_it_holds(x: Tensor) -> Tensor:
    x.copy_(x)
    x[...] = x
    x[1:] = x[1:]
    return x * 1


def only_what_it_holds(x: Tensor) -> Tensor:
    return torch._foreach_copy_([x], [x.clone()]) and x.copy_(x.to(x.dtype)).squeeze_()


def test_version_counters_of_inputs_are_eagers() -> None:
    for fn in (add_twice, through_data, items, through_detach, view_and_data, what_it_holds, only_what_it_holds):
        compiled = torchsmith.compile(fn, fullgraph=True)
        for _ in range(2):
            a, b = torch.ones(3), torch.ones(3)
            torch.testing.assert_close(compiled(b), fn(a))
            torch.testing.assert_close(b, a)
            assert b._version == a._version, fn.__name__


def test_a_write_through_data_leaves_backward_alone() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        w.data.add_(x)
        return w * 2

    for f in (step, torchsmith.compile(step, fullgraph=True)):
        w = torch.ones(3, requires_grad=True)
        loss = (w * w).sum()
        f(w, torch.ones(3))
        loss.backward()
        torch.testing.assert_close(w.grad, torch.full((3,), 4.0))


def test_a_compiled_write_through_data_is_seen_by_packed_weights() -> None:
    model = torch.nn.Linear(96, 96, bias=False)
    run = torchsmith.compile(model, fullgraph=True)

    def poke(x: Tensor) -> None:
        model.weight.data[50, 51:53].add_(x)

    write = torchsmith.compile(poke, fullgraph=True)
    x = torch.ones(2, 96)
    with torch.no_grad():
        run(x)
        version = model.weight._version
        write(torch.full((2,), 100.0))
        assert model.weight._version == version
        torch.testing.assert_close(run(x), torch.nn.functional.linear(x, model.weight))


def test_inputs_that_overlap_what_data_writes() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        before = y * 1
        x.data.add_(1)
        return before + y

    compiled, base = torchsmith.compile(fn), torch.arange(6.0)
    torch.testing.assert_close(compiled(torch.ones(4), torch.ones(4)), torch.full((4,), 2.0))
    expected = fn(base.clone()[:4], torch.ones(4))
    torch.testing.assert_close(compiled(base.clone()[:4], torch.ones(4)), expected)
    a, b = base.clone(), base.clone()
    torch.testing.assert_close(compiled(b[:4], b[2:]), fn(a[:4], a[2:]))


# ---------------------------------------------------------------- exceptions and objects from outside


def after_a_break(x: Tensor, i: int) -> Any:
    try:
        try:
            raise (ValueError if i % 2 else KeyError)(i)
        finally:
            torchsmith.compiler.graph_break()
    except ValueError as e:
        return repr(e), str(e), f"{e}", "%s" % e, str([e]), e.args, x + 1  # noqa: UP031
    except KeyError as e:
        return str(e), e.args, x + 2


class Thing:
    pass


def texts(x: Tensor, thing: Any) -> Any:
    return x + 1, repr(thing), str([thing]), f"{thing}", "%s" % (thing,), f"{thing}", str({"a": (thing,)})  # noqa: UP031


def test_texts_of_objects_are_those_of_the_call() -> None:
    compiled = torchsmith.compile(after_a_break)
    for i in range(1, 7):
        assert str(compiled(torch.ones(2), i)) == str(after_a_break(torch.ones(2), i))
    compiled = torchsmith.compile(texts)
    things = [Thing(), Thing(), re.match("(.*)", "ab"), re.match("(.*)", "cd"), ValueError(1), ValueError(2)]
    for thing in things:
        assert compiled(torch.ones(2), thing)[1:] == texts(torch.ones(2), thing)[1:]


def test_numpy_arrays_without_axes() -> None:
    arrays = [np.array(1.0), np.array([1.0, 2.0]), np.array(2.0), np.array([[1.0]]), np.array(3)]
    values = [*arrays, np.float64(3), np.float32(2), np.int64(3), 2.5]

    def write(x: Tensor, a: Any) -> Any:
        if isinstance(a, np.ndarray):
            a[...] = 5
        return x + 1, a

    raised = lambda x, a: x + torch.from_numpy(np.atleast_1d(np.asarray(a)))
    for fn in (raised, lambda x, a: x * torch.as_tensor(a), lambda x, a: (x, a), write):
        compiled = torchsmith.compile(fn)
        for v in values:
            a, b = (v.copy() if isinstance(v, np.ndarray) else v for _ in range(2))
            assert str(compiled(torch.ones(2), a)) == str(fn(torch.ones(2), b))
            assert repr(a) == repr(b)


# ---------------------------------------------------------------- what raises on values, raises where nobody reads the result

REFUSED: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    lambda x, k: x[k], lambda x, k: x[:, k], lambda x, k: x[k - 14], lambda x, k: x[k[0].item()], lambda x, k: x.gather(0, k.view(1, 1)),
    lambda x, k: x.take(k * 9), lambda x, k: x.index_select(0, k), lambda x, k: F.embedding(k, x),
    lambda x, k: F.embedding_bag(k, x, k * 0), lambda x, k: torch.histc(x / 0, 5),
    lambda x, k: x.scatter(0, k.view(1, 1), x), lambda x, k: x.scatter_add(0, k.view(1, 1), x), lambda x, k: x.index_add(0, k, x[:1]),
    lambda x, k: x.scatter_reduce(0, k.view(1, 1), x, "amax"), lambda x, k: x.index_copy(0, k, x[:1]), lambda x, k: x.index_fill(0, k, 1.0),
    lambda x, k: x.put(k * 9, x[0, :1]), lambda x, k: x.clone().__setitem__(k, 1.0), lambda x, k: F.cross_entropy(x[:1], k),
    lambda x, k: F.one_hot(k, 3), lambda x, k: torch.bincount(k - 10), lambda x, k: x[0].repeat_interleave(k - 10, output_size=1),
    lambda x, k: k // (k - 7), lambda x, k: k % (k - 7), lambda x, k: torch.fmod(k, k - 7), lambda x, k: torch.linalg.svdvals(x / 0 * 0),
    lambda x, k: torch.linalg.cholesky(-torch.eye(3) - x[:3] * 0), lambda x, k: torch.linalg.inv(x[:3] * 0),
    lambda x, k: x.masked_scatter(x < 9, x[0, :2]), lambda x, k: F.binary_cross_entropy(x - 9, x), lambda x, k: torch.bernoulli(x - 9),
    lambda x, k: F.multi_margin_loss(x[:1], k), lambda x, k: torch.searchsorted(x[0], x, sorter=k.expand(3) * 1),
    lambda x, k: torch.quantile(x, k.float()), lambda x, k: torch.linalg.lu_solve(x[:3], k.int().expand(3) * 9, x[:3]),
)  # fmt: skip


@pytest.mark.parametrize("grads", [False, True])
def test_unread_results_of_operators_that_raise_on_values(grads: bool) -> None:
    for n, fn in enumerate(REFUSED if not grads else REFUSED[:9]):
        said, unread = [], lambda x, k, fn=fn: (fn(x, k), x * 2)[1]
        for f in (unread, torchsmith.compile(unread)):
            x = torch.arange(1.0, 13).view(4, 3).requires_grad_(grads)
            with pytest.raises((RuntimeError, IndexError)) as error:
                f(x, torch.tensor([7]))
            said.append((type(error.value), str(error.value)))
        assert said[0] == said[1], n


def test_results_that_cannot_raise_go_unread() -> None:
    """Divisors that are no 0, floats and masks need no check."""
    for fn in (lambda x, k: k // 2, lambda x, k: x // k, lambda x, k: x[x > 0], lambda x, k: torch.searchsorted(x[0], x)):
        with recording() as got:
            torchsmith.compile(lambda x, k, fn=fn: (fn(x, k), x * 2)[1], fullgraph=True)(torch.ones(4, 3), torch.tensor([7]))
        assert [e.fields["report"].operators for e in got if e.kind == "graph"] == [1]


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_errors_of_indices_are_eagers(grads: bool, dynamic: bool | None) -> None:
    """A call that the native graph gives back is eager's altogether: the error, and what was written before it."""

    def at(x: Tensor, y: Tensor, k: Tensor) -> Tensor:
        y.add_(1)
        return x[k] * x[1:, k.item() - 1 : k.item()].sum() + y

    compiled = torchsmith.compile(at, dynamic=dynamic)
    for k in (1, 2, -2, 7, -9, 3):
        told = []
        for f in (at, compiled):
            x, y = torch.arange(12.0).view(4, 3).requires_grad_(grads), torch.zeros(3)
            try:
                out = f(x, y, torch.tensor(k))
                out.sum().backward() if grads else None
                told.append((out.tolist(), y.tolist(), x.grad.tolist() if grads else None))
            except IndexError as error:
                told.append((str(error), y.tolist()))
        assert told[0] == told[1]


# ---------------------------------------------------------------- numbers that a dtype cannot hold

NUMBERS: list[Callable[[Tensor, Any], Tensor]] = [
    lambda x, s: torch.full((2,), s, dtype=x.dtype),
    lambda x, s: torch.add(x, x, alpha=s),
    lambda x, s: x.fill_(s),
    lambda x, s: x * s,
    lambda x, s: x.clamp(min=s),
    lambda x, s: torch.addcmul(x, x, x, value=s),
    lambda x, s: x.masked_fill(x > 0, s),
    lambda x, s: torch.where(x > 0, x, s),
    lambda x, s: torch.nn.functional.pad(x, (1, 1), value=s),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("fn", NUMBERS)
def test_numbers_beyond_a_dtype(fn: Callable[[Tensor, Any], Tensor], dtype: torch.dtype) -> None:
    compiled, constant = torchsmith.compile(fn), torchsmith.compile(fn, dynamic=False)
    for s in (1.5, 2.5, 7e4, -1e300, 3e38, float("inf"), float("nan"), 1e300):
        wanted: Any = None
        try:
            wanted = fn(torch.ones(2, dtype=dtype), s)
        except RuntimeError as error:
            for f in (compiled, constant):
                with pytest.raises(RuntimeError, match=re.escape(str(error))):
                    f(torch.ones(2, dtype=dtype), s)
            continue
        for f in (compiled, constant):
            torch.testing.assert_close(f(torch.ones(2, dtype=dtype), s), wanted, equal_nan=True)


def test_gradients_of_pooling_that_no_pooling_makes() -> None:
    x, grad, at = torch.randn(1, 2, 3, 6), torch.randn(1, 2, 1, 2), torch.zeros(1, 2, 1, 2, dtype=torch.int64)
    for numbers in ((3, 3, [2, 2, 0], 1), (3, 3, 0, -1), (3, 1, 0, 1)):
        kernel, stride, padding, dilation = ([n] if isinstance(n, int) else n for n in numbers)

        def fn(grad, x, at, k=kernel, s=stride, p=padding, d=dilation):
            return torch.ops.aten.max_pool2d_with_indices_backward(grad, x, k, s, p, d, False, at)

        with pytest.raises(RuntimeError):
            fn(grad, x, at)
        with pytest.raises(RuntimeError):
            torchsmith.compile(fn)(grad, x, at)


def test_gradients_of_windows_that_no_unfold_makes() -> None:
    """Eager's kernel reads beside such a gradient; compiled code leaves the call to it."""
    with torchsmith.events.recording() as got:
        torchsmith.compile(lambda g: torch.ops.aten.unfold_backward(g, [1, 16], 1, 10, 2))(torch.ones(1, 10))
    found = [e.kind for e in got]
    assert "kernel" not in found


# ---------------------------------------------------------------- the memory of results


def parts_with_a_write(x: Tensor) -> tuple[Tensor, ...]:
    b = x * 2
    return b[0].add_(1), b[3:], b[2]


def overlapping(x: Tensor) -> tuple[Tensor, ...]:
    b = x * 2
    return b[:3], b[1:4]


def bytes_of_a_part(x: Tensor) -> tuple[Tensor, ...]:
    part = (x * 2).view(-1)[8:20]
    return part, part.view(torch.int8)[4:12]


def more_bytes_than_elements(x: Tensor) -> tuple[Tensor, ...]:
    b = (x * 2).view(-1)
    return b.view(torch.int8)[:48], b


PARTS = (
    parts_with_a_write, overlapping, bytes_of_a_part, more_bytes_than_elements,
    lambda x: (x * 2).chunk(3, -1), lambda x: (x + 1).unbind(0), lambda x: (x * 2)[::2, 1:].split(1),
    lambda x: (x * 2).t()[1:].split((2, 3)), lambda x: (x.t() * 2).unfold(0, 2, 2).unbind(-1),
)  # fmt: skip


@pytest.mark.parametrize("fn", PARTS)
@pytest.mark.parametrize("grads", [False, True])
def test_parts_of_one_result_share_its_memory(fn: Callable[..., Any], grads: bool) -> None:
    told = []
    for f in (fn, torchsmith.compile(fn)):
        x = torch.arange(24.0).reshape(4, 6).requires_grad_(grads)
        outs = f(x)
        memory = [t.untyped_storage().data_ptr() for t in outs]
        shape = [(t.storage_offset(), t.stride(), t.untyped_storage().nbytes(), memory.index(m)) for t, m in zip(outs, memory, strict=True)]
        with torch.no_grad():
            outs[0].detach().mul_(3)
        told.append((shape, [t.detach().clone() for t in outs]))
    shape, values = told[0]
    if not (grads and fn is bytes_of_a_part):  # where autograd knows the larger part, that is the whole memory
        assert told[1][0] == shape
    for got, want in zip(told[1][1], values, strict=True):
        assert torch.equal(got, want)


def test_writes_to_parts_are_writes_to_what_the_backward_pass_reads() -> None:
    x = torch.rand(4, 3, requires_grad=True)
    a, b = torchsmith.compile(lambda x: x.exp()[:2].unbind(0))(x)
    a.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        (a + b).sum().backward()


COPIES: tuple[tuple[Callable[[Tensor], Any], tuple[tuple[int, ...], ...]], ...] = (
    (lambda x: x.t().contiguous(), ((3, 4), (1, 4), (4, 1), (5, 4))),
    (lambda x: (x.t().reshape(-1).add_(1), x * 1), ((3, 4), (1, 4), (4, 1), (5, 2))),
    (lambda x: x[:, :2].contiguous(), ((3, 4), (1, 4), (3, 2), (5, 6))),
    (lambda x: x[..., 1:].contiguous(), ((3, 4), (6, 1), (0, 3))),
    (lambda x: x * (2 if x.t().is_contiguous() else 3), ((3, 4), (1, 4), (4, 1), (0, 3))),
    (lambda x: x.transpose(1, 2).reshape(x.shape[0], -1), ((2, 3, 4), (2, 1, 4), (2, 3, 1), (3, 4, 5))),
    (lambda x: x.contiguous(memory_format=torch.channels_last), ((2, 3, 4, 5), (2, 1, 4, 5), (3, 2, 1, 1))),
    (lambda x: (x.t().contiguous().flatten().view(-1, 1), x.add_(1)), ((3, 4), (1, 4), (4, 1))),
)


@pytest.mark.parametrize("n", range(len(COPIES)))
@pytest.mark.parametrize("dynamic", [None, True])
def test_copies_that_for_some_sizes_are_none(n: int, dynamic: bool | None) -> None:
    fn, shapes = COPIES[n]
    compiled = torchsmith.compile(fn, dynamic=dynamic)
    for shape in shapes:
        told = []
        for f in (fn, compiled):
            x = torch.arange(float(np.prod(shape))).view(shape)
            outs = f(x)
            outs = outs if isinstance(outs, tuple) else (outs,)
            shares = [t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for t in outs]
            told.append((x.tolist(), [(t.tolist(), t.stride()) for t in outs], shares))
        assert told[0] == told[1]


def test_copies_that_nobody_sees_ask_nothing_of_sizes() -> None:
    compiled = torchsmith.compile(lambda x, w: (x * 2).transpose(1, 2).reshape(x.shape[0], -1, 6).contiguous() @ w, dynamic=True)
    with recording() as got:
        for shape in ((2, 3, 4), (2, 6, 1), (1, 6, 2)):
            compiled(torch.ones(shape), torch.ones(6, 2))
    assert sum(e.kind == "graph" for e in got) == 1


def up_to_both(x: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    b = x * 2
    return b[: p.shape[0]], b[: q.shape[0]]


def before_and_behind(x: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    b = x * 2
    return b[: p.shape[0]], b[q.shape[0] :]


@pytest.mark.parametrize("fn", [up_to_both, before_and_behind])
@pytest.mark.parametrize("grads", [False, True])
def test_which_results_overlap_depends_on_sizes(fn: Callable[..., Any], grads: bool) -> None:
    compiled = torchsmith.compile(fn, dynamic=True)
    for n, m in ((5, 8), (8, 5), (5, 4), (20, 20)):
        found = []
        for f in (fn, compiled):
            outs = f(torch.arange(24.0).requires_grad_(grads), torch.ones(n), torch.ones(m))
            outs[0].detach().add_(1)
            found.append([t.detach().clone() for t in outs])
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


def test_bytes_of_an_input_that_begins_late() -> None:
    got, want = both(lambda x: x.view(torch.int8)[4:], lambda: torch.arange(30.0)[6:])
    assert torch.equal(got, want) and got.storage_offset() == want.storage_offset()


def empty_flags(x: Tensor) -> tuple[Tensor, ...]:
    flags = x.any().repeat_interleave(0)
    return flags, flags.view(torch.complex64)


def no_flag_of_two(x: Tensor) -> tuple[Tensor, ...]:
    flags = (x > 0)[:0]
    return flags, flags.view(torch.complex64)


@pytest.mark.parametrize("fn", [empty_flags, no_flag_of_two])
def test_wider_elements_of_an_empty_part(fn: Callable[..., Any]) -> None:
    for a, b in zip(*both(fn, lambda: torch.ones(2)), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_detach_makes_no_view() -> None:
    for x in (torch.ones(3), torch.ones(3, requires_grad=True)):
        got = torchsmith.compile(lambda x: x.detach())(x)
        assert not got._is_view() and got.data_ptr() == x.data_ptr()
        got.add_(1)
        assert x._version == 1


# ---------------------------------------------------------------- checkpoints


def _selective() -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)


REENTRANT: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plain": (lambda x: x.square() * 2, {}), "context": (torch.square, {"context_fn": _selective}),
    "debug": (torch.square, {"debug": True}), "named": (lambda x, y=1: x.square() * y, {"y": 2}), "no new tensor": (lambda x: x, {}),
    "detached": (lambda x: (x.square(), x.detach()), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", REENTRANT)
@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints(name: str, grads: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    part, options = REENTRANT[name]
    weight = torch.ones(3, requires_grad=True)

    def fn(x: Tensor) -> Any:
        return checkpoint(lambda x, **k: part(x * weight, **k) if name != "no new tensor" else x, x, use_reentrant=True, **options)

    said = []
    for f in (fn, torchsmith.compile(fn, options={"warn_eager": False})):
        x = torch.ones(3, requires_grad=grads)
        try:
            found = f(x)
            said.append([(t.requires_grad, t.tolist(), t is x) for t in (found if isinstance(found, tuple) else (found,))])
        except ValueError as e:
            said.append([str(e)])
    assert said[1] == said[0]


def write_to_a_split(x: Tensor) -> Tensor:
    a, b = (x * 2).split(2)
    a.add_(b)
    return a


def write_to_an_unbound(x: Tensor) -> Tensor:
    first, *_ = (x * 2).unbind(0)
    first.view(-1).mul_(2)
    return first


@pytest.mark.parametrize("fn", [write_to_a_split, write_to_an_unbound])
def test_autograd_refuses_writes_to_one_of_many_views(fn: Callable[..., Any]) -> None:

    said = []
    for f in (fn, torchsmith.compile(fn, options={"warn_eager": False})):
        with pytest.raises(RuntimeError, match="being modified inplace") as error:
            f(torch.ones(4, 3, requires_grad=True))
        said.append(str(error.value))
    assert said[1] == said[0]
    compiled = torchsmith.compile(fn, options={"warn_eager": False})
    assert torch.equal(compiled(torch.ones(4, 3)), fn(torch.ones(4, 3)))


@pytest.mark.parametrize("dynamic", [None, True])
def test_products_written_into_inputs_of_three_dimensions(dynamic: bool | None) -> None:
    """A product takes leading dimensions as one; what it computes may be the input's own memory, which has three."""
    torch.manual_seed(0)
    first, last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32, bias=False)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(first(y))
        return last(torch.relu(x)) + x

    compiled = torchsmith.compile(fn, dynamic=dynamic)
    for turned in (False, True):
        for _ in range(2):
            x, y = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
            x = x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x
            other = x.clone()
            with torch.no_grad(), torchsmith.events.recording() as seen:
                torch.testing.assert_close(compiled(x, y), fn(other, y))
            torch.testing.assert_close(x, other)
            assert not [e.fields for e in seen if e.kind == "fallback"]


def test_shuffled_channels_are_a_copy() -> None:
    x = torch.arange(8.0).reshape(2, 2, 2)  # as many groups as channels: the order stays
    found = torchsmith.compile(lambda x: torch.native_channel_shuffle(x, 2))(x)
    assert torch.equal(found, x) and found.data_ptr() != x.data_ptr()


def test_transposed_convolutions_refuse_to_give_nothing() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.conv_transpose2d(x, torch.ones(1, 1, 3, 3), stride=2, padding=2, output_padding=1)

    compiled = torchsmith.compile(fn, dynamic=True)
    for size in (4, 3):
        torch.testing.assert_close(compiled(torch.ones(1, size, size)), fn(torch.ones(1, size, size)))
    with pytest.raises(RuntimeError, match="Output size is too small"):
        compiled(torch.ones(1, 1, 1))


def test_samples_at_no_place_in_three_dimensions() -> None:
    x, at = torch.ones(1, 1, 2, 2, 2), torch.tensor([float("nan"), float("inf"), 0.25, -3.0]).repeat(3, 1).T.reshape(1, 4, 1, 1, 3)
    fn = lambda: torch.nn.functional.grid_sample(x, at, align_corners=False)
    torch.testing.assert_close(torchsmith.compile(fn)(), fn(), equal_nan=True)


def test_what_vjp_refuses_reaches_the_handler() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        try:
            return torch.func.vjp(torch.sin, x)[1](y)
        except RuntimeError as e:
            return str(e)

    assert torchsmith.compile(fn, backend="eager")(torch.ones(3), torch.ones(2)) == fn(torch.ones(3), torch.ones(2))


ORDERS: list[Callable[[Tensor, float], Tensor]] = [
    lambda x, p: torch.linalg.vector_norm(x, p, dim=1),
    lambda x, p: torch.cdist(x, 2 * x, abs(p)),
    lambda x, p: torch.autograd.grad(torch.linalg.vector_norm(x, p), x)[0],
]


def test_orders_of_norms_beyond_float32() -> None:
    x = torch.tensor([[0.5, -2.0, 3.0], [0.0, 0.25, -0.5]], requires_grad=True)
    for fn in ORDERS:
        for p in (1e39, -1e39, 1e-46):
            for y in (x, x.detach().double().requires_grad_()):
                torch.testing.assert_close(torchsmith.compile(fn, dynamic=False)(y, p), fn(y, p), equal_nan=True)


def test_gradients_of_softmax_at_infinities() -> None:
    fn = torch.ops.aten._softmax_backward_data
    inf = math.inf
    grad = torch.tensor([[1.0, inf, -inf], [inf, 0.0, 2.0], [1.0, 3e38, -3e38], [-inf, 1.0, 1.0]])
    out = torch.tensor([[0.5, 0.0, 0.5], [0.25, 0.75, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    compiled = torchsmith.compile(lambda g, y: (fn(g, y, 1, torch.float32), fn(g, y, 0, torch.float32)))
    torch.testing.assert_close(compiled(grad, out), (fn(grad, out, 1, torch.float32), fn(grad, out, 0, torch.float32)), equal_nan=True)


def test_numbers_of_tensors_whose_size_the_data_tell() -> None:
    fn = lambda x: float(x[x > 0]) + 1
    compiled = torchsmith.compile(fn)
    for values in ([1.0, -1.0], [1.0, 2.0], [-1.0, -2.0], [-1.0, 3.0]):
        told = []
        for f in (fn, compiled):
            try:
                told.append(f(torch.tensor(values)))
            except Exception as error:
                told.append((type(error), str(error)))
        assert told[0] == told[1]


def test_ravel_of_what_is_contiguous_for_some_sizes() -> None:
    compiled = torchsmith.compile(lambda x: x.t().ravel(), dynamic=True)
    for shape, is_view in (((3, 4), False), ((1, 4), True), ((3, 1), True)):
        x = torch.randn(shape)
        found = compiled(x)
        assert torch.equal(found, x.t().ravel()) and (found.data_ptr() == x.data_ptr()) == is_view


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_a_truth_in_place_of_a_probability(backend: str) -> None:
    compiled = torchsmith.compile(lambda x: torch.nn.functional.dropout(x.float(), x > 0), backend=backend)
    assert [compiled(torch.tensor(n)).item() for n in (1, -2, 3)] == [0.0, -2.0, 0.0]


def test_softmax_of_no_integers() -> None:
    compiled = torchsmith.compile(lambda x: (x.log_softmax(0, dtype=torch.int64), x.softmax(1, dtype=torch.int64)))
    with recording() as seen:
        assert [(t.shape, t.dtype) for t in compiled(torch.ones(0, 3))] == [((0, 3), torch.int64)] * 2
    assert not [e.fields for e in seen if e.kind in ("fallback", "graph_break")]


# ---------------------------------------------------------------- torch.tensor and its like

MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda x: torch.tensor([1.0, 2.0], requires_grad=True),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0], requires_grad=True),
    "asarray of a list": lambda x: torch.asarray([1.0, 2.0], requires_grad=True),
    "asarray, a copy": lambda x: torch.asarray(x, copy=True),
    "asarray, a leaf": lambda x: torch.asarray(x, copy=True, requires_grad=True),
    "asarray, itself": lambda x: torch.asarray(x, copy=False),
    "asarray, detached": lambda x: torch.asarray(torch.ones(2, requires_grad=True) * x, requires_grad=False),
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_are_made_as_asked(name: str) -> None:
    x = torch.ones(2)
    expected, got = MADE[name](x), torchsmith.compile(MADE[name], backend="aot_eager", fullgraph=True)(x)
    for of in (lambda y: y.requires_grad, lambda y: y.is_leaf, lambda y: y is x, lambda y: y.data_ptr() == x.data_ptr()):
        assert of(got) == of(expected)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_which_tensor_it_is(backend: str) -> None:
    def asked(x: Tensor, y: Tensor) -> tuple[bool, ...]:
        return hash(x) == id(x), hash(x) == hash(y), x.is_set_to(x.view_as(x)), x.is_set_to(x.t()), (x + 1).is_set_to(x), y.is_set_to(y)

    compiled = torchsmith.compile(asked, backend=backend, fullgraph=True)
    x, y = torch.ones(2, 2), torch.ones(2, 2)
    for pair in ((x, y), (x, x), (y, x)):
        assert compiled(*pair) == asked(*pair)


# ---------------------------------------------------------------- conjugate and negative views


def _lazy(z: Tensor) -> Any:
    made = z * 2j
    bits = z.is_conj(), z.conj().is_conj()
    parts = z[1:].conj(), z.imag, z.conj().imag
    return z.conj(), z.mH, *parts, made.conj(), made, torch.fft.ihfft(z.real), z.mH @ z, z.conj().detach(), *bits


def _lazy_negative(x: Tensor) -> Any:
    return x[1:], x * 2, torch._neg_view(x), x.is_neg()


def _same(mine: Any, other: Any) -> None:
    for a, b in zip(mine, other, strict=True):
        if not isinstance(a, Tensor):
            assert a == b
            continue
        for t in (torch.Tensor.is_conj, torch.Tensor.is_neg, torch.Tensor._is_view, torch.Tensor.stride, torch.Tensor.storage_offset):
            assert t(a) == t(b)
        torch.testing.assert_close(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg())


@pytest.mark.parametrize("dynamic", [None, True])
def test_conjugate_and_negative_views_are_inputs_and_results(dynamic: bool | None) -> None:
    z = torch.randn(4, 3, dtype=torch.complex64)
    others = torch.randn(5, 3, dtype=torch.complex64), torch.ones(3, 5, dtype=torch.complex64).mH
    for fn, calls in ((_lazy, (z, z.conj(), *others, z[:3].mH)), (_lazy_negative, (z.conj().imag, z.real))):
        compiled = torchsmith.compile(fn, dynamic=dynamic, fullgraph=True)
        with recording() as got:
            for x in (*calls, *calls):
                _same(compiled(x), fn(x))
        assert not [e for e in got if e.kind == "fallback"]


def test_memory_of_conjugate_views_is_shared_and_written_as_in_eager() -> None:
    def fn(z: Tensor) -> Any:
        turned = z.conj()
        z.mul_(2j)
        turned[0] = 1
        return turned, z

    compiled = torchsmith.compile(fn, fullgraph=True)
    for x in (torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.complex64).conj()) * 2:
        mine, other = x.clone().conj() if x.is_conj() else x.clone(), x.clone().conj() if x.is_conj() else x.clone()
        (turned, same), (want, _) = compiled(mine), fn(other)
        assert same is mine and turned.data_ptr() == mine.data_ptr() and mine._version == other._version
        _same((turned, mine), (want, other))
        turned.zero_()
        assert not mine.any()


def test_gradients_through_conjugate_views() -> None:
    """The gradient that comes from outside is such a view, too."""

    def fn(z: Tensor) -> Any:
        return z * z, z.conj(), (z * 2j).conj(), z.imag, (z[1:] * 3).conj().imag

    compiled = torchsmith.compile(fn, fullgraph=True)
    for lazy in (False, True):
        grads = []
        for graph in (fn, compiled):
            z = (torch.arange(3.0) * (1 - 2j)).requires_grad_()
            with recording() as got:
                outs = graph(z.conj() if lazy else z)
                sum((t.conj() * (t.new_ones(()) * 3)).abs().square().sum() + t.sum().abs() for t in outs).backward()
            assert z.grad is not None and not [e for e in got if e.kind == "fallback"]
            grads.append(z.grad.resolve_conj())
        torch.testing.assert_close(*grads)
