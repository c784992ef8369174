"""Frozen weights: shared, repacked when something changes, discarded when asked; what the user is told."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

import fresh
import torchsmith
from torchsmith import events
from torchsmith.runtime.discarded import DiscardedParameter


def model(n: int = 256) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(n, n), nn.GELU(), nn.Linear(n, n)).eval()


def prepared(call, *args) -> int:
    with events.recording() as got, torch.no_grad():
        call(*args)
    return sum(e.kind == "prepare" for e in got)


def test_refreeze_of_one_model() -> None:
    a, b, x = model(), model(), torch.randn(4, 256)
    fa, fb = torchsmith.compile(a), torchsmith.compile(b)
    assert [prepared(fa, x), prepared(fb, x), prepared(fa, x)] == [1, 1, 0]
    torchsmith.refreeze(a)
    assert [prepared(fa, x), prepared(fb, x)] == [1, 0]
    torchsmith.refreeze()
    assert [prepared(fa, x), prepared(fb, x)] == [1, 1]
    with torch.no_grad():
        from_dlpack(a[0].weight.detach()).view(-1)[77777 % a[0].weight.numel()] = 40.0  # one number in the middle, seen by no counter
        torchsmith.refreeze(fa)
        torch.testing.assert_close(fa(x), a(x))


def written(t: torch.Tensor, at: int = 30005) -> None:
    """One element in the middle, which no sample has."""
    t.reshape(-1)[at] += 50


def test_writes_through_aliases_are_seen() -> None:
    """`data` has a version counter of its own, what `numpy` returns has none; each alias is watched, and views of it."""
    m, x = model(), torch.randn(4, 256)
    f = torchsmith.compile(m)
    weight = m[0].weight
    assert [prepared(f, x), prepared(f, x)] == [1, 0]
    early, view, array = weight.data, weight.data.view(-1), weight.detach().numpy()
    prepared(f, x)  # two aliases have died, and may have been written
    steps = (
        lambda: written(weight.data), lambda: written(weight.detach().data), lambda: written(weight.data.data),
        lambda: written(weight[1:].data), lambda: written(early), lambda: written(early, 3), lambda: written(view),
        lambda: written(array), lambda: written(array, 31), lambda: written(weight.detach().numpy()),
        lambda: weight.data.copy_(weight.data * 0.99),
        lambda: torch._foreach_mul_([early], 0.5),
    )  # fmt: skip
    for k, step in enumerate(steps):
        step()
        assert prepared(f, x) == 1 and prepared(f, x) == 0, k
        with torch.no_grad():
            torch.testing.assert_close(f(x), m(x))
    for _ in range(3):  # of other memory
        m[1](x).data.add_(1)
        x.numpy()[:] += 1
    assert prepared(f, x) == 0


def test_tensors_of_a_compiled_model_can_be_swapped() -> None:
    """Torch refuses to swap a tensor that somebody holds weakly."""
    m, x = model(), torch.randn(4, 256)
    f = torchsmith.compile(m)
    assert prepared(f, x) == 1
    torch.utils.swap_tensors(m[0].weight, nn.Parameter(torch.randn(256, 256)))
    assert prepared(f, x) == 1 and prepared(f, x) == 0
    with torch.no_grad():
        torch.testing.assert_close(f(x), m(x))


def test_aliases_are_torchs_own_to_the_program() -> None:
    """What is remembered keeps nothing alive, and dead aliases make room."""
    prepared(torchsmith.compile(model()), torch.randn(4, 256))
    assert torch.Tensor.data is torch._C.TensorBase.data
    assert repr(torch.Tensor.data) == "<attribute 'data' of 'torch._C.TensorBase' objects>"
    assert repr(torch.Tensor.numpy) == "<method 'numpy' of 'torch._C.TensorBase' objects>" and "force" in torch.Tensor.numpy.__doc__
    t = torch.ones(3)
    t.numpy(force=True)[0] = 2
    with pytest.raises(TypeError):
        t.numpy(1, 2)
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.ones(3, requires_grad=True).numpy()
    other = t.data
    assert other._version == 0 and other.add_(1)._version == 1 and t._version == 0 and t.tolist() == [3, 2, 2]
    gone = weakref.ref(other)
    del other
    assert gone() is None
    kept = [torch.ones(1).data for _ in range(1000)]
    assert all(weakref.getweakrefcount(k) == 1 for k in kept)
    with pytest.raises(RuntimeError, match="under vmap"):
        torch.func.vmap(lambda v: v.data * 2)(torch.ones(3, 2))


def test_explain_names_original_and_packed_bytes() -> None:
    with torch.no_grad():
        report = torchsmith.explain(model())(torch.randn(4, 256))
    original, packed = report.graphs[0].constants
    assert original >= 2 * 256 * 256 * 4 and packed >= 2 * 256 * 256 * 4
    assert "constants: " in str(report) and "packed" in str(report)


def discarding(m: nn.Module):
    return torchsmith.compile(m, options={"freezing": True, "freezing_discard_parameters": True})


def test_discarded_parameters() -> None:
    m, x = model(), torch.randn(4, 256)
    with torch.no_grad():
        want = m(x)
        f = discarding(m)
        for _ in range(3):
            torch.testing.assert_close(f(x), want)
        assert isinstance(m[0].weight, DiscardedParameter) and m[0].weight.untyped_storage().nbytes() == 0
        assert m[0].weight.shape == (256, 256) and "Discarded" in repr(m[0].weight)
        with pytest.raises(RuntimeError, match="discarded"):
            m(x)
        for use in (lambda w: w + 1, lambda w: w.data, lambda w: w.clone(), lambda w: w.numpy(), lambda w: w[0], lambda w: w.sum().item()):
            with pytest.raises(RuntimeError, match="discarded"):
                use(m[0].weight)
        with pytest.raises(RuntimeError, match="discarded"):
            torchsmith.refreeze(m)
        torch.testing.assert_close(f(x), want)
        fresh = model()
        m.load_state_dict(fresh.state_dict(), assign=True)
        torch.testing.assert_close(f(x), want)


def test_memory_that_others_see_is_not_discarded() -> None:
    m, x = model(), torch.randn(4, 256)
    kept = m.state_dict()
    with torch.no_grad():
        want = m(x)
        f = discarding(m)
        torch.testing.assert_close(f(x), want)
        assert type(m[0].weight) is nn.Parameter and torch.equal(kept["0.weight"], model()[0].weight)
        torch.testing.assert_close(m(x), want)


def test_discarding_needs_freezing() -> None:
    m, x = model(), torch.randn(4, 256)
    with torch.no_grad():
        torchsmith.compile(m, options={"freezing_discard_parameters": True})(x)
    assert type(m[0].weight) is nn.Parameter
    gc.collect()


FRESH = """
import torch, torchsmith
from torch.utils._python_dispatch import TorchDispatchMode
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))
seen, x = [], torch.randn(4, 256)
m = torch.nn.Linear(256, 256).eval()
with torch.no_grad():
    want = m(x)
    f = torchsmith.compile(m, options={"freezing": True, "freezing_discard_parameters": True})
    for _ in range(3):
        torch.testing.assert_close(f(x), want)
    g = torchsmith.compile(lambda x: x.sin())
    g(x)
    with Mode():
        g(x)
assert seen, "a dispatch mode saw nothing"
"""


def test_compile_alone_sets_everything_up() -> None:
    """Discarded parameters and other tracers are known without torchsmith.compiler having been touched."""
    done = fresh.run(FRESH)
    assert done.returncode == 0, done.stderr
