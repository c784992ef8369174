"""Backends that fail: the message names backend and reason, torch runs the program, and under fullgraph it is an error."""

from __future__ import annotations

import copy
import functools
import sys
import types
import warnings

import pytest
import torch
from torch import nn

import torchsmith
from torchsmith import compiler, events
from torchsmith.backends import registry

BAKED = {  # right for the sizes that it is compiled for, or for 5 rows
    "wrong shape": (lambda gm, i: lambda *a: (torch.zeros(5, 2),), r"result 0 has shape \(5, 2\) instead of \(6, 2\)"),
    "wrong count": (lambda gm, i: lambda *a: gm.forward(*a) * (1 if a[-1].shape[0] == 5 else 2), "returned 2 results instead of 1"),
    "None": (lambda gm, i: lambda *a: gm.forward(*a) if a[-1].shape[0] == 5 else None, "returned NoneType"),
    "raises": (lambda gm, i: lambda *a: gm.forward(*a) if a[-1].shape[0] == 5 else 1 / 0, "raised ZeroDivisionError: division by zero"),
}

KEPT = []  # libraries of operators live as long as they do


def _forward(gm, inputs):
    return gm.forward


def captured(make):
    def bad(gm, inputs):
        return make(gm, inputs)

    return bad


def functional(make):
    """The same fault in a compiler of ATen graphs, which is asked once for each set of sizes."""
    return compiler.aot_autograd(fw_compiler=make)


@pytest.mark.parametrize("fault", BAKED)
@pytest.mark.parametrize("kind", [captured, functional])
def test_what_is_wrong_at_later_sizes_is_named(kind, fault):
    """The first sizes are right; the next are not. Said once per set of sizes, counted, and eager's results."""
    make, said = BAKED[fault]
    x = torch.randn(5, 2)

    def f(x):
        return x.sin() * 0

    for fullgraph in (False, True):
        fn = torchsmith.compile(f, backend=kind(make), dynamic=True, fullgraph=fullgraph)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(fn(x), f(x))
        y = torch.randn(6, 2)
        if fullgraph:
            with pytest.raises(torchsmith.BackendFailed, match=f"backend '(bad|AtenBackend)'.*{said}"):
                fn(y)
            continue
        with pytest.warns(UserWarning, match=f"backend '(bad|AtenBackend)'.*{said}.*eagerly for these sizes"), events.recording() as got:
            torch.testing.assert_close(fn(y), f(y))
        assert [e.fields["code"] for e in got if e.kind == "fallback"] == ["BCK003"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(fn(y), f(y))
            torch.testing.assert_close(fn(x), f(x))


WRITES = {
    "an input": lambda x, w: x.add_(1) * w[0], "through a view": lambda x, w: x.view(-1)[1:].mul_(2).sum() * w,
    "uncounted": lambda x, w: (x.data.mul_(2), x * w[0])[1], "a draw": lambda x, w: x.add_(torch.rand(2, 3)) * w[0],
    "statistics": lambda x, w: torch.batch_norm(w, None, None, x[0], x[1], True, 0.1, 1e-5, False),
    "recorded": lambda x, w: x.add_(w[0]) * 2,
    "nothing": lambda x, w: x * w[0] + torch.rand(3),
}  # fmt: skip


def raises(gm):
    def run(*a):
        gm.forward(*a)
        raise ValueError("too late")

    return run


def gives_none(gm):
    return lambda *a: gm.forward(*a) and None


@pytest.mark.parametrize("fails", [raises, gives_none])
@pytest.mark.parametrize("what", WRITES)
def test_what_a_failing_call_did_is_taken_back(what, fails):
    """Eager then does it once: values, counters of writes, recorded history, draws. An error under fullgraph leaves no trace."""
    f, w = WRITES[what], torch.randn(4, 3, requires_grad=what == "recorded")
    start = torch.randn(2, 3)
    for fullgraph in (False, True):
        eager, mine = start.clone(), start.clone()
        torch.manual_seed(1)
        want = f(eager, w)
        drawn = torch.rand(1)
        torch.manual_seed(1)
        fn = torchsmith.compile(f, backend=lambda gm, i: fails(gm), fullgraph=fullgraph)
        if fullgraph:
            with pytest.raises(torchsmith.BackendFailed, match=r"backend '<lambda>'.*(too late|NoneType)"):
                fn(mine, w)
            torch.manual_seed(1)
            eager, drawn = start.clone(), torch.rand(1)
            torch.manual_seed(1)
        else:
            with pytest.warns(UserWarning, match=r"backend '<lambda>'.*(too late|NoneType)"), events.recording() as got:
                torch.testing.assert_close(fn(mine, w), want)
            assert [e.fields["code"] for e in got if e.kind == "fallback"] == ["BCK003"]
        torch.testing.assert_close(mine, eager)
        assert torch.equal(torch.rand(1), drawn)
        assert (mine._version, mine.requires_grad, mine.stride()) == (eager._version, eager.requires_grad, eager.stride())


def test_what_cannot_be_taken_back_is_the_callers():
    """History that autograd has recorded on an input with a history, and an input that the program does not write."""
    def spoils(gm):
        def run(x, y):
            y.add_(1)
            raise ValueError("too late")

        return run

    for fails, said in ((raises, "autograd has recorded"), (spoils, "it has written to its inputs")):
        x, y = torch.ones(3, requires_grad=True) * 1, torch.ones(3)
        with pytest.raises(ValueError, match="too late") as caught:
            torchsmith.compile(lambda x, y: x.add_(1) * y, backend=lambda gm, i, fails=fails: fails(gm))(x, y)
        assert "backend '<lambda>'" in caught.value.__notes__[0] and said in caught.value.__notes__[0]


@functools.cache
def refusing():
    """An operator whose error has a note."""
    library = torch.library.Library("tests_notes", "FRAGMENT")
    library.define("refuse(Tensor x) -> Tensor")

    def refuse(x):
        if x.sum() > 5:
            error = ValueError("too much")
            error.add_note("said by the operator")
            raise error
        return x.clone()

    library.impl("refuse", refuse, "CPU")
    torch.library.register_fake("tests_notes::refuse", torch.empty_like, lib=library)
    KEPT.append(library)
    return torch.ops.tests_notes.refuse


@pytest.mark.parametrize("backend", ["eager", "aot_eager", _forward])
def test_an_operators_error_with_a_note_is_the_programs(backend):
    """The call is made again as it is, so that what stands in front of the operator has happened."""
    refuse = refusing()
    met = []

    def fn(x):
        met.append("before")
        x = refuse(x)
        met.append("behind")
        return x + 1

    compiled = torchsmith.compile(fn, backend=backend)
    compiled(torch.ones(3))
    with pytest.raises(ValueError, match="too much") as caught:
        compiled(torch.full((3,), 4.0))
    assert met == ["before", "behind", "before"]
    assert caught.value.__notes__ == ["said by the operator"]


@pytest.mark.parametrize("what", ["an input", "a draw", "nothing", "no draw"])
def test_a_later_call_that_fails(what):
    """It is repeated by torch where it can have done nothing yet."""
    f = WRITES.get(what, lambda x, w: x * w[0])

    def backend(gm, i, calls=[]):  # noqa: B006
        def run(*a):
            calls.append(0)
            return gm.forward(*a) if len(calls) < 3 else 1 / 0

        return run

    fn, x, w = torchsmith.compile(f, backend=backend), torch.randn(2, 3), torch.randn(4, 3)
    fn(x, w), fn(x, w)
    if what == "no draw":
        with pytest.warns(UserWarning, match="backend 'backend' raised ZeroDivisionError"):
            torch.testing.assert_close(fn(x, w), f(x, w))
        torch.testing.assert_close(fn(x, w), f(x, w))
    else:
        with pytest.raises(ZeroDivisionError) as caught:
            fn(x, w)
        assert "may have written to its inputs or drawn" in caught.value.__notes__[0]


def test_what_fails_before_anything_is_written_is_repeated():
    def early(gm, inputs):
        def run(*a):
            torch.rand(7)
            raise ValueError("at once")

        return run

    def f(x, y):
        x.add_(1)
        return x * y + torch.rand(3)

    x, y = torch.zeros(3), torch.ones(3)
    torch.manual_seed(1)
    want = y * y + torch.rand(3)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="at once"):
        torch.testing.assert_close(torchsmith.compile(f, backend=compiler.aot_autograd(fw_compiler=early))(x, y), want)
    assert torch.equal(x, torch.ones(3))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", _forward, compiler.aot_autograd(fw_compiler=_forward)])
def test_what_the_program_raises_is_its_own(backend):
    def f(x, i):
        x.add_(1)
        return x[i]

    x, seen = torch.zeros(3), torch.zeros(3)
    fn = torchsmith.compile(f, backend=backend)
    for i in (torch.tensor([1]), torch.tensor([7])):
        for call, t in ((f, x), (fn, seen)):
            try:
                call(t, i)
            except IndexError:
                assert int(i) == 7
        assert torch.equal(x, seen)


class Refusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        z = self.inner(x)
        if torch.isnan(z).any():
            raise ValueError("not a number")
        self.calls.add_(1)
        return torch.dropout(z.relu(), 0.5, True)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["inductor", "eager", "aot_eager", "aot_eager_decomp_partition", "openxla"])
def test_a_way_that_only_raises_is_given_up_for(backend, grad):
    """The graph checks that it is not taken. Where it is, the function itself runs, as if the graph had not: nothing written, no draw."""
    row = registry.ROWS[backend]
    if not registry.is_installed(row):
        pytest.skip("not installed")
    net = Refusing()
    other = copy.deepcopy(net)
    fn = torchsmith.compile(other, backend=backend)
    with torch.set_grad_enabled(grad), events.recording() as got:
        for x in (torch.ones(2, 3), torch.full((2, 3), torch.nan), torch.ones(2, 3)):
            ends = []
            for call in (net, fn):
                torch.manual_seed(0)
                try:
                    ends.append(call(x))
                except ValueError as error:
                    ends.append(torch.zeros(()))
                    assert str(error) == "not a number"
                if ends[-1].requires_grad:
                    ends[-1].sum().backward()
                ends.append(torch.rand(1))
            for mine, eager in ((ends[2], ends[0]), (ends[3], ends[1]), (other.calls, net.calls)):
                torch.testing.assert_close(mine, eager)
    if grad:
        torch.testing.assert_close(other.inner.weight.grad, net.inner.weight.grad)
    assert [e.fields["code"] for e in got if e.kind in ("fallback", "graph_break")] == ["RUN004"]


def test_a_package_that_lacks_what_we_use_is_named_with_its_version(monkeypatch):
    """As a version does that is too old."""
    if not registry.is_installed(registry.ROWS["openvino"]):
        pytest.skip("not installed")
    from torchsmith.backends import openvino

    monkeypatch.setitem(sys.modules, "openvino", types.ModuleType("openvino"))
    monkeypatch.setattr(openvino, "operators", lambda: frozenset(["torch.ops.aten.sin.default"]))
    x = torch.randn(3)
    said = r"backend 'openvino'.*with openvino [\d.]+; other versions may be needed: pip install -U openvino"
    with pytest.warns(UserWarning, match=said):
        torch.testing.assert_close(torchsmith.compile(lambda x: x.sin(), backend="openvino")(x), x.sin())
    with pytest.raises(torchsmith.BackendFailed, match=said):
        torchsmith.compile(lambda x: x.sin(), backend="openvino", fullgraph=True)(x)


PICKS = {
    "embedding": lambda i, w: torch.nn.functional.embedding(i, w) * 2, "index": lambda i, w: w[i[:, None].squeeze(1)] + 1,
    "gather": lambda i, w: w.gather(0, i[:, None].expand(2, 3)) + 1, "index_put": lambda i, w: (w * 2).index_put((i,), w[:2]),
    "classes": lambda i, w: torch.nn.functional.cross_entropy(w.t()[:2], i), "division": lambda i, w: (7 // (i - 2)) + 1,
    "take": lambda i, w: torch.take(w, i * 3) + 1,
}  # fmt: skip


@pytest.mark.parametrize("name", ["openxla", "onnxrt", "openvino", "tvm"])
def test_indices_out_of_range_are_eagers_errors(name):
    """Runtimes clamp them, read zeros, or read past the end."""
    if not registry.is_installed(registry.ROWS[name]):
        pytest.skip("not installed")
    w = torch.randn(5, 3)
    with torch.no_grad():
        for what, f in PICKS.items():
            fn = torchsmith.compile(f, backend=name)
            for i in (torch.tensor([1, 3]), torch.tensor([2, 9]), torch.tensor([2, -9]), torch.tensor([0, 4])):
                try:
                    want = f(i, w)
                except (IndexError, RuntimeError) as error:
                    with pytest.raises(type(error)):
                        fn(i, w)
                else:
                    torch.testing.assert_close(fn(i, w), want, msg=what)


FAULTS = {  # what stands for a row's function -> what is said
    "raises": (lambda *a, **k: 1 / 0, "raised ZeroDivisionError: division by zero"),
    "None": (lambda *a, **k: None, "returned NoneType, not a callable"),
    "gives None": (lambda *a, **k: lambda *x: None, "returned NoneType, not a tuple of 2 results"),
    "wrong count": (lambda *a, **k: lambda *x: (torch.zeros(3),), "returned 1 results instead of 2"),
    "wrong shape": (lambda *a, **k: lambda *x: (torch.zeros(3), torch.zeros(7, 7)), r"result 1 has shape \(7, 7\) instead of \(3,\)"),
    "wrong dtype": (lambda *a, **k: lambda *x: (torch.zeros(3), torch.zeros(3, dtype=torch.int32)), "result 1 is torch.int32"),
    "old package": (lambda *a, **k: registry.no_such_name, "raised AttributeError"),
}  # fmt: skip
FOREIGN = [n for n, row in registry.ROWS.items() if row.at]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FOREIGN)
def test_each_name_that_fails_is_named(name, fault, grad, monkeypatch):
    """Whatever a row's function does wrong: backend and reason are said and counted, eager's results; an error under fullgraph."""
    made, said = FAULTS[fault]
    monkeypatch.setattr(registry, "_from_row", lambda _: made)
    row = registry.ROWS[name]
    if fault == "old package" and row.needs:
        said += rf".*\(with {row.needs[0]} .*other versions may be needed: pip install -U"
    x = torch.randn(3, requires_grad=grad)

    def f(x):
        return x.sin(), x + 1

    with pytest.warns(UserWarning, match=f"backend '{name}'.*{said}.*The program runs eagerly"), events.recording() as got:
        torch.testing.assert_close(torchsmith.compile(f, backend=name)(x), f(x))
    assert {e.fields["code"] for e in got if e.kind == "fallback"} == {"BCK003"}
    with pytest.raises(torchsmith.BackendFailed, match=f"backend '{name}'.*{said}"):
        torchsmith.compile(f, backend=name, fullgraph=True)(x)


@pytest.mark.parametrize("name", [n for n, row in registry.ROWS.items() if row.needs])
def test_each_package_that_is_missing_is_named(name, monkeypatch):
    row = registry.ROWS[name]
    monkeypatch.setattr(registry, "_missing", lambda _: list(row.needs))
    registry._from_row.cache_clear()
    for call in (lambda: torchsmith.compile(lambda x: x, backend=name), lambda: compiler.lookup_backend(name)):
        with pytest.raises(registry.InvalidBackend, match=f"backend '{name}' needs the packages? {' and '.join(row.needs)}: {row.install}"):
            call()
    assert name in compiler.list_backends(exclude_tags=None)


@pytest.mark.parametrize("name", list(registry.ROWS))
def test_each_name_written_wrong_is_told_the_right_one(name):
    for wrong in (name.upper(), name + "s", name[:-1]):
        if wrong not in registry.ROWS:
            with pytest.raises(registry.InvalidBackend, match=r"did you mean '[a-z_]+'\?"):
                torchsmith.compile(lambda x: x, backend=wrong)


@pytest.mark.parametrize("name, options, said", [
    ("onnxrt", {"providers": ["NoSuchProvider"]}, "no provider 'NoSuchProvider'; this onnxruntime has .*CPUExecutionProvider"),
    ("onnxrt", {"providers": "CPUExecutionProvider"}, "'providers' is a list of names"),
    ("openvino", {"config": 3}, "'config' is a dict, not 3"),
    ("openvino", {"device": "NPU9"}, "NPU9"),
])  # fmt: skip
def test_an_options_value_that_the_runtime_does_not_know(name, options, said):
    if not registry.is_installed(registry.ROWS[name]):
        pytest.skip("not installed")
    with torch.no_grad(), pytest.raises(torchsmith.BackendFailed, match=said):
        torchsmith.compile(lambda x: x.sin() + 1, backend=name, options=options, fullgraph=True)(torch.randn(3))


def test_an_options_name_that_is_none():
    with pytest.raises(TypeError, match="names of options are strings, not 1"):
        torchsmith.compile(torch.sin, backend="aot_eager", options={1: 2})


def test_names_that_are_none():
    for bad in (5, ""):
        with pytest.raises(TypeError, match="name is a string"):
            compiler.register_backend(_forward, name=bad)
    with pytest.raises(TypeError, match="not int"):
        compiler.lookup_backend(3)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package toy-backends whose entry points are these lines."""

    def install(*lines):
        (tmp_path / "toy_backends.py").write_text("NUMBER = 5\ndef fn(gm, example_inputs):\n    fn.asked = True\n    return gm.forward\n")
        info = tmp_path / "toy_backends-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backends\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        registry._from_packages.cache_clear()

    yield install
    registry._from_packages.cache_clear()
    sys.modules.pop("toy_backends", None)


def test_an_entry_point_is_a_backend(package):
    """Of either group; a name of ours stays ours."""
    lines = "toy = toy_backends:fn", "eager = toy_backends:NUMBER", "[torchsmith_backends]", "other = toy_backends:fn"
    package("[torch_dynamo_backends]", *lines)
    assert {"toy", "other"} <= set(compiler.list_backends())
    x = torch.randn(3)
    for name in ("toy", "other", "eager"):
        torch.testing.assert_close(torchsmith.compile(lambda x: x + 1, backend=name)(x), x + 1)
    assert sys.modules["toy_backends"].fn.asked


@pytest.mark.parametrize("value, said", [
    ("toy_backends:absent", "of the package toy-backends, which raised AttributeError: module 'toy_backends' has no attribute 'absent'"),
    ("toy_absent:fn", "which raised ModuleNotFoundError: No module named 'toy_absent'"),
    ("toy_backends:NUMBER", "which is of type int and cannot be called"),
])  # fmt: skip
def test_an_entry_point_that_cannot_be_used_names_its_package(value, said, package):
    package("[torch_dynamo_backends]", f"toy = {value}")
    with pytest.raises(registry.InvalidBackend, match=f"backend 'toy' is the entry point {value} .*{said}"):
        torchsmith.compile(lambda x: x, backend="toy")
