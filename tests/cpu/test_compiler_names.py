"""torchsmith.compiler's names: errors at breaks, artifacts of the cache; PyTorch's exceptions by their names."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import json
import pickle
import sys
from typing import NamedTuple

import pytest
import torch

import fresh
import torchsmith
from torchsmith import compiled_module, compiler, events, options
from torchsmith.debug import traces
from torchsmith.runtime import build as building

X = torch.ones(3)
GLOBAL = 1


def breaks(x):
    return x * 2 if x.sum() > 100 else x + 2


def eager(fn):
    return torchsmith.compile(fn, backend="eager")


def test_breaks_are_errors_where_the_program_says_so():
    def lenient(x):
        y = breaks(x)
        with compiler.error_on_graph_break(False):
            return breaks(y) * 2

    def strict(x):
        y = breaks(x)
        with compiler.error_on_graph_break(True):
            z = y * 2
            with compiler.error_on_graph_break(False):
                z = breaks(z)
            return breaks(z) if x.shape[0] == 3 else z

    decorated = compiler.error_on_graph_break(True)(breaks)
    torch.testing.assert_close(eager(lenient)(X), lenient(X))
    torch.testing.assert_close(eager(strict)(torch.ones(2)), strict(torch.ones(2)))
    for fn in (strict, decorated, lambda x: decorated(x * 2) + 1):
        with pytest.raises(torchsmith.Unsupported, match="CAP020"):
            eager(fn)(X)
    torch.testing.assert_close(eager(breaks)(X), breaks(X))


def test_pytorchs_names_catch_ours():
    """In a process of its own: the class is PyTorch's only where its module is loaded."""
    program = """
import torch, torchsmith, sys
def breaks(x):
    return x * 2 if x.sum() > 100 else x + 2
def kind():
    torchsmith.compiler.reset()
    try:
        torchsmith.compile(breaks, fullgraph=True, backend="eager")(torch.ones(3))
    except torchsmith.Unsupported as e:
        return e
assert "torch._dynamo.exc" not in sys.modules and type(kind()) is torchsmith.Unsupported
import torch._dynamo.exc
e = kind()
assert isinstance(e, torch._dynamo.exc.Unsupported) and "CAP020" in str(e) and e.code == "CAP020"
assert isinstance(e, torch._dynamo.exc.UserError)
for base in (torch._dynamo.exc.Unsupported, Exception):  # torch 2.11's is derived from the other one
    torch._dynamo.exc.UserError = type("UserError", (base,), {})
    e = kind()
    assert isinstance(e, torch._dynamo.exc.UserError) and isinstance(e, torch._dynamo.exc.Unsupported)
try:
    torchsmith.compile(lambda x: x + 1, fullgraph=True, backend=lambda gm, inputs: 1 / 0)(torch.ones(3))
except torch._dynamo.exc.BackendCompilerFailed as e:
    print("right", type(e.__cause__).__name__)
import torch._dynamo
parts = []
torch._dynamo.disallow_in_graph(torch.sub)
torchsmith.compile(lambda x: torch.sub(x + 1, 1) + 2, backend=lambda gm, inputs: parts.append(gm) or gm)(torch.ones(3))
print(len(parts))
"""
    done = fresh.run(program)
    assert done.stdout.split() == ["right", "ZeroDivisionError", "2"], done.stderr


def test_artifacts_go_to_another_machine(tmp_path, monkeypatch):
    """There, nothing is compiled."""

    def fn(x):
        return torch.sin(x) * 2 + x.sum() - 0.12345

    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "a"))
    assert compiler.save_cache_artifacts() is None
    want = torchsmith.compile(fn)(X)
    data, info = compiler.save_cache_artifacts()
    assert set(info.artifacts) >= {"graph", "lib"}
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "b"))
    assert compiler.load_cache_artifacts(data).artifacts == info.artifacts
    monkeypatch.setattr(building, "build", None)
    compiler.reset()
    told = torchsmith.explain(torchsmith.compile(fn))(X)
    assert told.graphs[0].road == "native" and torch.equal(told.result, want)
    for bad in (b"", data[:-1], data[:40] + bytes([data[40] ^ 1]) + data[41:], b"PK" + data):
        with pytest.raises(ValueError, match="save_cache_artifacts"):
            compiler.load_cache_artifacts(bad)


def test_config_is_the_default_of_later_calls():
    config = compiler.config
    assert config.recompile_limit == config.cache_size_limit == 8 and config.warn_eager and "warn_eager" in dir(config)
    backend = Graphs()
    with config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        fn = torchsmith.compile(lambda x: x + 1, backend=backend)
        own = torchsmith.compile(lambda x: x + 1, backend="eager", recompile_limit=5)
    assert config.recompile_limit == 8 and config.automatic_dynamic_shapes
    for n in (2, 3, 4):
        assert torch.equal(fn(torch.ones(n)), torch.full((n,), 2.0))
        own(torch.ones(n))
    assert len(backend.seen) == 1 and len(own.entries) > 1

    @config.patch(assume_static_by_default=False)
    def dynamic():
        return torchsmith.compile(lambda x: x * 2, backend="eager")

    fn = dynamic()
    for n in (2, 3, 4):
        fn(torch.ones(n))
    assert len(fn.entries) == 1
    with config.patch(max_autotune=False, suppress_errors=True):
        assert config.suppress_errors and torchsmith.options.from_user(None, {"suppress_errors": False}).suppress_errors is False
        assert torchsmith.options.from_user().suppress_errors
    assert not torchsmith.options.from_user().suppress_errors
    for name, value, error, text in (
        ("recompile_limt", 3, AttributeError, "recompile_limit"), ("job_id", "a", AttributeError, "job_id"),
        ("warn_eager", 3, TypeError, "bool"), ("recompile_limit", 0, ValueError, "positive"), ("thread_pool", "mine", ValueError, "own"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            setattr(config, name, value)
    assert config.thread_pool == "torch"


class Graphs:
    def __init__(self):
        self.seen = []

    def __call__(self, gm, inputs):
        self.seen.append(gm)
        return gm


def test_pytorchs_switches_reach_what_is_compiled():
    program = """
import torch, torchsmith
from torchsmith import compiled_module, compiler, events, options
from torchsmith.debug import traces
seen = []
fn = torchsmith.compile(lambda x: x + 2, backend=lambda gm, inputs: seen.append(gm) or gm)
x = torch.ones(2)
with torch.compiler.set_stance("force_eager"):
    assert torch.equal(fn(x), x + 2) and not seen
assert torch.equal(fn(x), x + 2) and len(seen) == 1

which = torchsmith.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
assert which(x)
for _ in range(2):  # with and without another default object
    with torch.compiler.set_stance("force_eager"):
        assert not which(x)
    assert which(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert which(x)
        try:
            which(x.int())
        except RuntimeError as error:
            assert "fail_on_recompile" in str(error) and "dtype" in str(error)
        else:
            raise SystemExit("compiled")
    with torch.compiler.set_stance("eager_on_recompile"):
        assert which(x) and not which(x.int())
    graphs = []
    with torch.compiler.set_stance(force_backend=lambda gm, inputs: graphs.append(gm) or gm):
        assert which(x) and torch.equal(fn(x), x + 2) and len(graphs) == 1 and len(seen) == 1  # an empty graph is no backend's
    torch.compiler.set_stance("default")
later = torchsmith.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
with torch.compiler.set_stance("eager_then_compile"):
    assert [later(x) for _ in range(3)] == [False, True, True]
for n in (2, 3):
    torch.compiler.reset()
    assert torch.equal(fn(x), x + 2) and torch.equal(fn(x), x + 2) and len(seen) == n

@torch.compiler.disable
def apart(x):
    return x * 3, torch.compiler.is_compiling()

@torch.compiler.assume_constant_result
def constant():
    return 5

told = torchsmith.explain(lambda x: apart(x + 1)[0] + constant())(x)
assert torch.equal(told.result, (x + 1) * 3 + 5) and "CAP018" in str(told)
print("right")
"""
    done = fresh.run(program)
    assert done.stdout.split() == ["right"], done.stderr


@pytest.mark.parametrize("own", ["inductor", "eager", Graphs()])
def test_a_backend_that_a_stance_forces(own):
    """Functions, what follows their breaks, and modules run by it; what was compiled before is there again afterwards."""
    def f(x):
        y = x.sin() * 7
        compiler.graph_break()
        return y + 1

    forced, net, x = Graphs(), torch.nn.Linear(3, 2), torch.ones(2, 3)
    c, n = torchsmith.compile(f, backend=own), torchsmith.compile(net, backend=own)
    assert torch.allclose(c(x), f(x)) and torch.allclose(n(x), net(x))
    before = len(own.seen) if isinstance(own, Graphs) else 0
    for _ in range(2):
        with compiler.set_stance(force_backend=forced):
            assert torch.allclose(c(x), f(x)) and torch.allclose(n(x), net(x))
        assert len(forced.seen) == 3
    n(x).sum().backward()
    with events.recording() as got:
        assert torch.allclose(c(x), f(x)) and torch.equal(net.weight.grad, x.sum(0).expand(2, 3))
    assert not [e for e in got if e.kind == "graph"] and (not isinstance(own, Graphs) or len(own.seen) == before)
    with pytest.raises(RuntimeError, match="goes with the stance 'default', not with 'force_eager'"):
        compiler.set_stance("force_eager", force_backend="eager")
    with pytest.raises(RuntimeError, match="did you mean 'eager'"):
        compiler.set_stance(force_backend="eagr")


@pytest.mark.parametrize(
    ("changes", "sizes", "compilations"),
    [
        ({}, [(3, 4), (5, 4)], 2),
        ({"dynamic_sources": "L['x']"}, [(3, 4), (5, 6)], 1),
        ({"dynamic_sources": r"L\['y.*'\], L\['.'\]:0"}, [(3, 4), (5, 4), (5, 6)], 2),
        ({"unbacked_sources": "L['x']:0"}, [(3, 4), (1, 4), (0, 4)], 1),
        ({"dynamic_values": "7, 1111"}, [(1111, 4), (5, 4)], 1),
    ],
)
def test_sizes_that_config_names_are_symbols(changes, sizes, compilations):
    with compiler.config.patch(changes):
        fn = eager(lambda x: x * 2)
        for size in sizes:
            assert torch.equal(fn(torch.ones(size)), torch.full(size, 2.0))
        assert len(fn.entries) == compilations


def test_config_says_what_does_it_here(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DYNAMIC_SOURCES", "L['x']:0")
    assert compiler.config.dynamic_sources == "L['x']:0" and compiler.config.unbacked_sources == ""
    with pytest.raises(AttributeError, match=r"error_on_recompile.*fail_on_recompile"):
        compiler.config.error_on_recompile = True
    with pytest.raises(ValueError, match="always True"):
        compiler.config.nested_graph_breaks = False


def test_nonstrict_trace_takes_and_gives_containers():
    ran = []

    @compiler.nonstrict_trace
    def apart(d, k=2.0, *, m=None):
        ran.append(len(d))
        return {"y": d["a"] * k, "l": [m.sum(), d["a"].shape[0], None]}

    def f(x):
        found = apart({"a": x, "b": x + 1}, 3.0, m=x)
        return found["y"] + found["l"][0], found["l"][1:]

    x = torch.arange(3.0, requires_grad=True)
    mine, said = torchsmith.compile(f, fullgraph=True)(x)
    assert torch.allclose(mine, f(x)[0]) and said == [3, None] and ran
    mine.sum().backward()
    assert torch.allclose(x.grad, torch.full((3,), 6.0))
    with pytest.raises(TypeError, match="takes a callable, not int"):
        compiler.nonstrict_trace(3)


class Pair(NamedTuple):
    a: object
    b: object


def test_a_node_of_the_programs_own_code_is_given_what_it_would_see():
    """A graph has neither torch.Size nor named tuples, and its lists refuse to be written."""
    @compiler.allow_in_graph
    def node(x, shape, pair, rest):
        rest.append(len(rest))
        return x * shape.numel() + pair.a * pair.b.sum() + rest[-1] + rest[0]["k"], rest

    def f(x, n):
        y, rest = node(x, x.shape, Pair(n, x), [{"k": n}])
        return y, rest[1:]

    compiled = torchsmith.compile(f, fullgraph=True)
    for n in (2, 3, 4):
        x = torch.ones(n, 2)
        for mine, theirs in zip(compiled(x, n), f(x, n), strict=True):
            assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


def test_names_of_the_namespace():
    """Those that no other test is about."""
    kept = []

    @compiler.assume_constant_result
    def looks(n):
        kept.append(n)
        return len(kept)

    @compiler.allow_in_graph
    def node(a):
        return a.sin() if a.sum() > 0 else a

    @compiler.nested_compile_region
    def block(a):
        return a * 2

    fn = torchsmith.compile(lambda a: block(a) + looks(3), backend="eager", fullgraph=True)
    assert torch.equal(fn(X), X * 2 + 1) and torch.equal(fn(X), X * 2 + 1) and kept == [3]
    assert torch.equal(torchsmith.compile(lambda a: node(a) + 1, backend="eager")(X), X.sin() + 1)
    assert compiler.cudagraph_mark_step_begin() is None and not compiler.is_exporting() and not compiler.is_dynamo_compiling()
    inside = torchsmith.compile(lambda a: (a, compiler.is_compiling(), compiler.is_dynamo_compiling()), backend="eager")
    assert inside(X)[1:] == (True, True)
    assert "inductor" in compiler.list_backends()
    with pytest.raises(Exception, match="did you mean 'eager'"):
        compiler.lookup_backend("eagre")
    for keep in ("skip_all_guards_unsafe", "skip_guard_on_globals_unsafe", "keep_tensor_guards_unsafe", "keep_portable_guards_unsafe",
                 "skip_guard_on_all_nn_modules_unsafe", "skip_guard_on_inbuilt_nn_modules_unsafe"):  # fmt: skip
        for home in (compiler, torch.compiler):  # filters written for torch.compile's guards are right for ours
            filtered = torchsmith.compile(lambda a: a + GLOBAL, backend="eager", options={"guard_filter_fn": getattr(home, keep)})
            assert torch.equal(filtered(X), X + 1) and len(filtered.entries) == 1
    missing = {"compile", "set_enable_guard_collectives"}
    assert set(torch.compiler.__all__) - set(compiler.__all__) <= missing
    for name, told in (("explain", "torchsmith.explain"), ("precompile", "torchsmith.aot"), ("optimise", "did you mean 'optimize'")):
        with pytest.raises(AttributeError, match=told):
            getattr(compiler, name)
    with pytest.raises(AttributeError, match=r"torchsmith\.compiler\.reset"):
        torchsmith.reset  # noqa: B018


@pytest.mark.parametrize("home", [compiler, torch.compiler], ids=["ours", "theirs"])
def test_what_is_disabled_runs_as_it_is(home):
    """Functions, modules, classes; recursive=False leaves out the function alone."""
    seen = []

    def inner(a):
        seen.append(compiler.is_compiling())
        return a * 3

    @home.disable(recursive=False)
    def alone(a):
        seen.append(torch.compiler.is_compiling())
        return inner(a)

    @home.disable
    class Callable:
        def __call__(self, a):
            seen.append(compiler.is_compiling())
            return a + 1

    @home.disable
    class Part(torch.nn.Module):
        def forward(self, a):
            seen.append(compiler.is_compiling())
            return a + 1

    linear, part, called = home.disable(torch.nn.Linear(3, 3)), Part(), Callable()
    linear.register_forward_hook(lambda *_: seen.append(compiler.is_compiling()))
    for fn, expected in ((alone, [False, True]), (called, [False]), (part, [False]), (torch.nn.Sequential(linear, part), [False, False])):
        seen.clear()
        result = eager(lambda a, fn=fn: fn(a) * 2)(X)
        assert seen == expected
        torch.testing.assert_close(result, fn(X) * 2)
        with pytest.raises(torchsmith.Unsupported, match="CAP018"):
            torchsmith.compile(lambda a, fn=fn: fn(a) * 2, backend="eager", fullgraph=True)(X)


@pytest.mark.parametrize("home", [compiler, torch.compiler], ids=["ours", "theirs"])
def test_marks_of_a_class_hold_where_its_object_is_compiled(home):
    """Those that compile was given itself do not: what was asked for last holds."""

    class Method:
        @home.disable
        def call(self, a):
            return probed(a)

    class Forward(torch.nn.Module):
        @home.disable
        def forward(self, a):
            return probed(a)

    @home.disable
    class Part(torch.nn.Module):
        def forward(self, a):
            return probed(a)

    @home.disable
    class Callable:
        def __call__(self, a):
            return probed(a)

    class Plain(torch.nn.Module):
        def forward(self, a):
            return probed(a)

    quiet = {"backend": "eager", "options": {"warn_eager": False}}
    for made in (Method().call, Forward(), Part(), Callable()):
        assert torch.equal(torchsmith.compile(made, **quiet)(X), X - 1)
        with pytest.raises(torchsmith.Unsupported, match="CAP018"):
            torchsmith.compile(made, **quiet, fullgraph=True)(X)
    for made in (home.disable(probed), compiler.disable(Plain())):
        assert torch.equal(torchsmith.compile(made, **quiet)(X), X + 1)


def probed(a):
    return a + 1 if compiler.is_compiling() else a - 1


def parted(a):
    b = a * 2
    compiler.graph_break()
    return probed(b)


def looks_at_its_frame(a):
    return probed(a) * len(sys._getframe().f_code.co_name)


@pytest.mark.parametrize("home", [compiler, torch.compiler], ids=["ours", "theirs"])
@pytest.mark.parametrize("fn", [parted, looks_at_its_frame])
def test_stances_hold_where_a_frame_goes_on_and_for_what_it_calls(home, fn):
    """The rest of a frame behind a break; what a function calls that cannot be captured itself."""
    quiet = {"backend": "eager", "options": {"warn_eager": False}}
    compiled, cold = torchsmith.compile(fn, **quiet), torchsmith.compile(fn, **quiet)
    run, plain = compiled(X), fn(X)
    assert not torch.equal(run, plain) and torch.equal(compiled(X), run)
    for stance in ("eager_on_recompile", "fail_on_recompile"):
        with home.set_stance(stance):
            assert torch.equal(compiled(X), run)
    with home.set_stance("eager_on_recompile"):
        assert torch.equal(compiled(X.double()), plain) and torch.equal(cold(X), plain)
    with home.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        compiled(X.double())
    with home.set_stance("force_eager"):
        assert torch.equal(compiled(X), plain)
    with home.set_stance("eager_then_compile"):
        assert [torch.equal(cold(X), run) for _ in range(4)] in ([False, False, True, True], [False, True, True, True])
    with home.set_stance(force_backend=lambda gm, inputs: gm.forward):
        assert torch.equal(compiled(X), run)
    never = torchsmith.compile(lambda a: a * len(sys._getframe().f_code.co_name), **quiet)
    never(X)
    with home.set_stance("fail_on_recompile"):
        assert torch.equal(never(X), X * len("<lambda>"))  # it cannot be compiled, so it is not compiled again


def test_a_disabled_module_is_one_of_its_class():
    linear = torch.nn.Linear(3, 3)
    disabled = compiler.disable(linear, reason="a reason")
    assert isinstance(disabled, torch.nn.Linear) and disabled.weight is linear.weight and disabled._orig_mod is linear
    for other in (copy.deepcopy(disabled), copy.copy(disabled), pickle.loads(pickle.dumps(disabled))):
        assert torch.equal(other(X), linear(X)) and isinstance(other, compiled_module.DisabledModule)
    with pytest.raises(torchsmith.Unsupported, match=r"Linear is marked with compiler\.disable: a reason"):
        torchsmith.compile(lambda a: disabled(a) + 1, backend="eager", fullgraph=True)(X)
    told = torchsmith.explain(disabled, backend="eager")(X)  # what was asked for last holds
    assert told.graph_count == 1 and told.out_guards == told.guards and "capture" in told.compile_times
    (why,) = torchsmith.explain(parted, backend="eager")(X).break_reasons
    assert why.reason == str(why) and "CAP018" in why.reason


def test_exporting_is_told():
    def forward(a):
        return a + (compiler.is_exporting() + 2 * torch.compiler.is_exporting() + 4 * torch.compiler.is_compiling())

    assert torch.equal(torchsmith.export.export(forward, (X,)).module()(X), X + 7)
    assert torch.equal(eager(forward)(X), X + 4) and torch.equal(forward(X), X)


def test_ranges_of_pytorchs_marks():
    def fn(a):
        return a * 2

    compiled = torchsmith.compile(fn, backend="eager")
    for n, fits in ((3, True), (8, False)):
        a = torch.ones(n, 2)
        # what torch._dynamo.mark_dynamic(a, 0, min=2, max=5) leaves
        a._dynamo_dynamic_indices, a._dynamo_dynamic_range = {0}, {Range(0, 2, 5)}
        with contextlib.nullcontext() if fits else pytest.raises(torchsmith.ConstraintViolation, match="between 2 and 5"):
            assert torch.equal(compiled(a), fn(a))


def test_a_mark_without_a_size_at_hand_is_one_tensors():
    compiled = torchsmith.compile(lambda a, b: (a.expand(b.shape), a * 10)[1], backend="eager", fullgraph=True, dynamic=True)
    marked = torch.rand(1, 1), torch.rand(1, 1)
    for t in marked:
        torchsmith.mark_unbacked(t, [0, 1])
    for a, b in (marked, (torch.rand(4, 5), torch.rand(4, 5)), (torch.rand(1, 1), torch.rand(2, 1))):
        assert torch.equal(compiled(a, b), a * 10)


class Range(NamedTuple):
    dim: int
    min: int
    max: int


def test_guards_have_the_names_that_filters_ask_for():
    seen = []

    def keep(guards):
        assert all(g.has_value and g.derived_guard_types == () for g in guards)
        seen.extend((g.name, g.guard_type, g.is_global) for g in guards)
        return [g.guard_type != "CONSTANT_MATCH" for g in guards]

    fn = torchsmith.compile(lambda a: a + GLOBAL, backend="eager", options={"guard_filter_fn": keep})
    fn(X)
    assert ("a", "TENSOR_MATCH", False) in seen and ("G['GLOBAL']", "CONSTANT_MATCH", True) in seen


def test_what_torch_compile_and_torch_wrap_is_compiled_itself():
    """A function that a row answers, one that torch.compile or nested_compile_region wrapped: one graph, and no frame of torch's."""
    from torch._higher_order_ops.invoke_subgraph import mark_compile_region
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 16, 8)
    region = mark_compile_region(lambda x: x.sin() + 1)
    for fn, args in ((flex_attention, (q, q, q)), (torch.nn.functional.softmax, (q, -1)), (lambda x: region(region(x)), (X,))):
        made = torchsmith.explain(torchsmith.compile(fn, backend="eager"))(*args)
        assert len(made.graphs) == 1 and not made.breaks, made
    assert torchsmith.compile(torch.nn.functional.softmax, shapes_spec={"input": 0})(q, -1).shape == q.shape


def test_switches_of_what_is_settled_have_one_value():
    compiler.config.capture_scalar_outputs = True
    with compiler.config.patch(capture_dynamic_output_shape_ops=True, recompile_limit=3):
        assert compiler.config.capture_scalar_outputs and compiler.config.recompile_limit == 3
    with pytest.raises(ValueError, match="capture_scalar_outputs is always True here"):
        compiler.config.capture_scalar_outputs = False
    with compiler.config.patch(activation_memory_budget=0.5):
        with pytest.raises(ValueError, match="from 0 to 1"):
            compiler.config.activation_memory_budget = 2
        assert compiler.config.activation_memory_budget == 0.5  # a refused value changes nothing


def test_torch_jit_trace_sees_what_a_compiled_function_does():
    """A native call left nothing in the trace but a constant: another input gave the first one's result."""
    fn = torchsmith.compile(lambda x: x.sin() * 2)
    fn(X)
    traced = torch.jit.trace(lambda x: fn(x) + x, (X,), check_trace=False)
    assert torch.equal(traced(X * 2), (X * 2).sin() * 2 + X * 2)


def test_a_compiled_module_is_exported_and_has_its_signature():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    compiled = torchsmith.compile(model, backend="eager")
    assert str(inspect.signature(compiled.forward)) == "(input)"
    program = torchsmith.export.export(compiled, (X[None],))
    assert list(program.state_dict) == ["0.weight", "0.bias"] and torch.equal(program.module()(X[None]), model(X[None]))


def test_torch_compiles_debug_backends():
    names = ("eager", "eager_debug", "eager_noexcept", "pre_dispatch_eager")
    assert set(names) <= set(compiler.list_backends(None)) and not set(names) & set(compiler.list_backends())
    for name in names:
        assert torch.equal(torchsmith.compile(lambda x: x.sin() + 1, backend=name)(X), X.sin() + 1)


def test_a_compiled_function_is_saved_as_a_package(tmp_path):
    def fn(x, y, k=2.0):
        return {"product": (x @ y) * k, "sum": x.sum(0)}

    x, y, path = torch.randn(3, 4), torch.randn(4, 5), tmp_path / "function"
    torchsmith.mark_dynamic(x, 0)
    compiled = torchsmith.compile(fn, fullgraph=True).aot_compile(((x, y), {"k": 3.0}))
    compiled.save_compiled_function(path)
    with open(path, "rb") as file:
        others = compiler.load_compiled_function(file), torchsmith.aot.load_package(path)
    for one in (compiled, *others):
        for n in (3, 7):
            x = torch.randn(n, 4)
            torch.testing.assert_close(one(x, y, k=3.0), fn(x, y, k=3.0))
    for wrong in ((x, y[:, :4]), (x[0], y)):
        with pytest.raises(torchsmith.aot.PackageError):
            compiled(*wrong, k=3.0)
    with pytest.raises(TypeError, match="a pair of arguments"):
        torchsmith.compile(fn).aot_compile((x, y))
    with pytest.raises(torchsmith.Unsupported, match="AOT090"):
        torchsmith.compile(torch.nn.Linear(4, 4).forward).aot_compile(((x,), {}))
    with pytest.raises(RuntimeError, match="inductor"):
        eager(fn).aot_compile(((x, y), {}))


def test_a_compiled_function_takes_its_folder_along(recwarn):
    compiled = torchsmith.compile(lambda x: x + 1).aot_compile(((X,), {}))
    folder = compiled._package.parent
    assert folder.is_dir()
    del compiled
    gc.collect()
    assert not folder.exists()
    assert not [w for w in recwarn if issubclass(w.category, ResourceWarning) and str(folder) in str(w.message)]


def test_a_trace_is_lines_that_programs_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path))
    assert options.trace_folder() == tmp_path and options.from_environment().trace_enabled
    writer = traces.TraceWriter(tmp_path / "made")
    events.listen(writer)
    try:
        fn = torchsmith.compile(lambda a: breaks(a) * float("inf"))
        fn(X), fn(torch.ones(4))
    finally:
        events.unlisten(writer)
    (file,) = (tmp_path / "made").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    by_kind = {kind: [f for f in lines if f["kind"] == kind] for kind in ("graph_break", "recompile", "graph", "artifact", "guards")}
    assert by_kind["graph_break"][0]["code"] == "CAP020" and by_kind["graph_break"][0]["why"]
    assert "size of dimension 0 was 3, is 4" in by_kind["recompile"][0]["guard"]
    assert by_kind["graph"][0]["report"]["road"] == "native" and by_kind["guards"][0]["list"]
    assert {f["name"] for f in by_kind["artifact"]} == {"captured_graph.py", "functional_graph.txt", "output_code.c"}
    broken = traces.TraceWriter(file / "below a file")
    broken(events.Event("cut", {})), broken(events.Event("cut", {}))
    assert capsys.readouterr().err.count("cannot write the trace") == 1
