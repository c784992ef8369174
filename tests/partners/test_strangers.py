"""Programs that nobody had in mind: what eager's results are beside their values, under backends that know values only."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchsmith
from torchsmith import compiler, events
from torchsmith.backends import onnxrt

HAS_XLA = all(importlib.util.find_spec(m) for m in ("jax", "torchax"))
FUNCTIONAL = ["aot_eager", pytest.param("openxla", marks=pytest.mark.skipif(not HAS_XLA, reason="not installed"))]


def compiled(fn, backend):
    return torchsmith.compile(fn, backend=compiler.aot_autograd(fw_compiler=_forward) if backend == "user's" else backend)


def _forward(gm, example_inputs):
    return gm.forward


@pytest.mark.parametrize("backend", ["user's", *FUNCTIONAL])
def test_equal_results_are_two_tensors(backend):
    def equal(x):
        return x.sort(0).values, x.sort(0).values, x.exp(), x.exp()

    a, b, c, d = compiled(equal, backend)(torch.randn(3, 4))
    assert len({t.data_ptr() for t in (a, b, c, d)}) == 4 and torch.equal(a, b) and torch.equal(c, d)


@pytest.mark.parametrize("backend", ["user's", *FUNCTIONAL])
def test_a_steps_loss_requires_grad_and_its_graph_is_spent(backend):
    model = nn.Linear(4, 2)
    step_of = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        step_of.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        step_of.step()
        return loss

    loss = compiled(step, backend)(torch.randn(3, 4))
    assert loss.requires_grad and not loss.is_leaf
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("backend", ["user's", *FUNCTIONAL])
def test_results_made_under_inference_mode(backend):
    model = nn.Linear(4, 2)

    def inside(x):
        with torch.inference_mode():
            return model(x)

    found = compiled(inside, backend)(torch.randn(3, 4))
    assert found.is_inference() and not found.requires_grad


@pytest.mark.parametrize("backend", ["eager", "user's", *FUNCTIONAL])
def test_gradients_that_the_program_turns_on(backend):
    weight = nn.Parameter(torch.randn(4))

    def turned_on(x):
        with torch.enable_grad():
            return x * weight

    with torch.no_grad():
        found = compiled(turned_on, backend)(torch.ones(4))
    found.sum().backward()
    assert torch.equal(weight.grad, torch.ones(4))


def test_indices_that_the_graph_computes_are_eagers_errors():
    """XLA clamps them."""
    if not HAS_XLA:
        pytest.skip("not installed")

    def picks(x, i):
        x.add_(1)
        return x[i * 2] + 1

    fn, x = torchsmith.compile(picks, backend="openxla"), torch.zeros(5)
    torch.testing.assert_close(fn(x, torch.tensor([0, 2])), torch.full((2,), 2.0))
    with pytest.raises(IndexError, match="out of bounds"):
        fn(x, torch.tensor([1, 9]))
    assert torch.equal(x, torch.full((5,), 2.0))  # eager too writes before it picks
    torch.testing.assert_close(fn(x, torch.tensor([1, 0])), torch.full((2,), 4.0))


@pytest.mark.skipif(not HAS_XLA, reason="not installed")
def test_values_that_the_first_call_did_not_have():
    """The first results of a program are held against torch's; these come later."""
    nan, inf = float("nan"), float("inf")
    hidden = torch.tensor([[True] * 4, [False] * 4, [True, False, True, True], [True] * 4])

    def values(x, y, q, mask):
        return x.sign(), torch.fmod(x, y), x % 3, x // y, F.scaled_dot_product_attention(q, q, q, mask)

    fn, q = torchsmith.compile(values, backend="openxla"), torch.randn(1, 2, 4, 8)
    for x, mask in ((torch.tensor([1.0, -2.0, 0.5]), torch.ones(4, 4).bool()), (torch.tensor([nan, 1e10, -inf]), hidden)):
        given = x, torch.tensor([2.0, 0.7, inf]), q, mask
        torch.testing.assert_close(fn(*given), values(*given), equal_nan=True)


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="not installed")
def test_openvino_leaves_storages_as_they_are():
    """As sharded training does between calls: memory given back, taken again."""
    model = nn.Linear(4, 2).requires_grad_(False)
    fn, x = torchsmith.compile(model, backend="openvino"), torch.randn(3, 4)
    before, storage = fn(x), model.weight.untyped_storage()
    kept, size = model.weight.clone(), storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    model.weight.copy_(kept)
    torch.testing.assert_close(fn(x), before)


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="not installed")
def test_masked_lines_of_attention_through_onnxrt(monkeypatch):
    def attend(q, mask):
        return F.scaled_dot_product_attention(q * 2, q, q, mask) + 1

    programs, session = [], onnxrt.session
    monkeypatch.setattr(onnxrt, "session", lambda plain, providers: programs.append(plain) or session(plain, providers))
    fn, q, mask = torchsmith.compile(attend, backend="onnxrt"), torch.randn(1, 2, 4, 8), torch.ones(4, 4).bool()
    for _ in range(2):
        torch.testing.assert_close(fn(q, mask), attend(q, mask))
        mask[1] = False
    assert len(programs) == 1


def test_numbers_that_tensors_told_before_a_break_in_a_graph_that_is_refused():
    """The number after the break has a symbol that nothing takes away."""
    def told(x):
        return x[x > 0], (x > 0).sum().item(), torch.masked_select(x, x < 0)

    fn = torchsmith.compile(told, backend="aot_eager_decomp_partition" if not HAS_XLA else "openxla")
    x = torch.tensor([1.0, 2.0, 3.0, -1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in (x, x * 2, -x):
            found, want = fn(t), told(t)
            assert torch.equal(found[0], want[0]) and found[1] == want[1] and torch.equal(found[2], want[2])


def test_a_damaged_folder_of_an_artifact_is_named(tmp_path):
    x = torch.randn(2, 3)
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    torchsmith.standalone_compile(gm, (x,), dynamic_shapes="from_example_inputs").save(path=str(tmp_path / "a"), format="unpacked")
    digests = tmp_path / "a" / "digests.json"
    digests.write_text(digests.read_text()[:20])
    with pytest.raises(ValueError, match="is not a compiled artifact"):
        torchsmith.CompiledArtifact.load(path=str(tmp_path / "a"), format="unpacked")


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="not installed")
def test_openvino_writes_to_no_input():
    def swap(a):
        b = a.clone()
        a.copy_(b.flip(0))
        return a, b, b.view(2, 3)

    def copies(a):
        b = a.exp()
        return b, b.clone(), a.clone(), a.view(6).relu(), a.clone()

    for program in (swap, copies):
        fn = torchsmith.compile(program, backend="openvino")
        for _ in range(2):
            x = torch.randn(6)
            mine, theirs = x.clone(), x.clone()
            torch.testing.assert_close(fn(mine), program(theirs))
            assert torch.equal(mine, theirs)
            results = fn(mine.clone())
            assert program is swap or len({t.data_ptr() for t in results}) == len(results)


@pytest.mark.parametrize(("backend", "needs"), [("openxla", "torchax"), ("onnxrt", "onnxruntime")])
def test_roots_and_bounds_at_infinities(backend, needs):
    if importlib.util.find_spec(needs) is None:
        pytest.skip("not installed")

    def edges(x):
        y = x.view(2, 3)
        return x**0.5, x**-0.5, x.clamp_min(0.5), x.clamp(max=0.5), y.amax(1), y.max(1).values, y.argmin(1), x.sort().values

    fn = torchsmith.compile(edges, backend=backend)
    fn(torch.ones(6))
    x = torch.tensor([float("-inf"), float("inf"), 0.0, 4.0, float("nan"), 2.0])
    torch.testing.assert_close(fn(x), edges(x), equal_nan=True)


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="not installed")
def test_onnx_forms_that_are_wrong_for_some_values_are_not_used():
    def forms(x, y):
        return torch.logaddexp(x, y) + 1, x.sign() * 2, torch.atan2(x, y)

    fn = torchsmith.compile(forms, backend="onnxrt")
    for scale in (1.0, 200.0):
        x, y = torch.tensor([1.0, float("nan"), -2.0]) * scale, torch.tensor([1.0, -0.0, 3.0]) * scale
        torch.testing.assert_close(fn(x, y), forms(x, y), equal_nan=True)


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="not installed")
def test_a_graph_that_is_not_the_runtimes_is_refused_alike_for_sizes_that_vary():
    """With the code of the graph, without a warning: the backend did not fail."""
    def counts(x):
        return x + torch.arange(x.shape[1])

    with warnings.catch_warnings(), events.recording() as got:
        warnings.simplefilter("error")
        fn = torchsmith.compile(counts, backend="openvino", dynamic=True)
        for n in (3, 5):
            torch.testing.assert_close(fn(torch.ones(2, n)), counts(torch.ones(2, n)))
    assert [e.fields["code"] for e in got if e.kind == "fallback"] == ["BCK002"] * 2
    for dynamic in (True, False):
        with pytest.raises(torchsmith.Unsupported, match="BCK002"):
            torchsmith.compile(counts, backend="openvino", dynamic=dynamic, fullgraph=True)(torch.ones(2, 3))


@pytest.mark.skipif(not HAS_XLA, reason="torchax is not installed")
def test_arguments_that_torchaxs_rows_do_not_have():
    def some(x):
        return torch.add(x, 2, alpha=3), x.mean(dtype=torch.float64), x.mean((0, 1), keepdim=True), x.mean(())

    fn, x = torchsmith.compile(some, backend="openxla", fullgraph=True), torch.randn(3, 4)
    with events.recording() as got:
        torch.testing.assert_close(fn(x), some(x))
    assert not [e for e in got if e.kind == "fallback"]


def test_a_float_that_varies_is_no_constant():
    """Of a number a tracer makes a constant: it gets a tensor, and reads the number of it."""
    from torch._dynamo.backends.registry import lookup_backend

    for program in ((lambda u, rate: u.mul(rate * 0.5) + 1), (lambda u, rate: u.sqrt() / rate**0.5)):
        for name in ("eager", "aot_eager"):
            calls = []

            def backend(gm, inputs, name=name, calls=calls):
                calls.append(gm)
                return lookup_backend(name)(gm, inputs)

            compiled = torchsmith.compile(program, backend=backend, fullgraph=True)
            u = torch.tensor([2.0, 3.0])
            for k in range(1, 5):
                torch.testing.assert_close(compiled(u, k * 0.37), program(u, k * 0.37))
            assert len(calls) == 2
