"""Doors between torchsmith and other tools: compiled callables given to exporters, functions exported, logs switched at run time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchsmith
from torchsmith import aot

SCALE = torch.tensor([1.0, 2.0, 3.0])


def scaled(x: torch.Tensor, *, by: int = 2) -> torch.Tensor:
    return (x * SCALE).relu() * by


def test_a_function_ahead_of_time(tmp_path):
    x = torch.randn(4, 3)
    program = torchsmith.export.export(scaled, (x,), {"by": 3}, dynamic_shapes={"x": {0: torchsmith.Dim("n")}, "by": None})
    run = aot.load_package(aot.compile_and_package(program, package_path=tmp_path / "scaled.pt2"))
    for n in (4, 7):
        x = torch.randn(n, 3)
        torch.testing.assert_close(run(x, by=3), scaled(x, by=3))
    compiled = torchsmith.compile(scaled, fullgraph=True)
    torch.testing.assert_close(torchsmith.export.export(compiled, (x,)).module()(x), scaled(x))
    inner = nn.Linear(3, 3)
    torch.testing.assert_close(torchsmith.export.export(inner.forward, (x,)).module()(x), inner(x))
    with pytest.raises(TypeError, match="or a Python function, not int"):
        torchsmith.export.export(3, (x,))


def test_pytorch_exports_what_is_compiled():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), torch.randn(2, 3)
    compiled = torchsmith.compile(model)
    torch.testing.assert_close(torch.export.export(compiled, (x,)).module()(x), model(x))


def test_logs_at_run_time(capfd):
    try:
        torchsmith.compiler.set_logs(recompiles=True, graphs=True, output_code=True)
        fn = torchsmith.compile(lambda x: x.sin() + 1)
        fn(torch.ones(3))
        fn(torch.ones(4))
        said = capfd.readouterr().err
        assert "[torchsmith recompiles]" in said
        assert "[torchsmith graphs]" in said
        assert "[torchsmith output_code]" in said
        torchsmith.compiler.set_logs(recompiles=False)
        torchsmith.compile(lambda x: x.cos() + 1)(torch.ones(3))
        assert not capfd.readouterr().err
        with pytest.raises(ValueError, match="no artifact 'recompile'; did you mean 'recompiles'"):
            torchsmith.compiler.set_logs(recompile=True)
    finally:
        torchsmith.compiler.set_logs()
        torchsmith.compiler.config._changed.pop("trace_enabled", None)


def other_call(x):
    calls = torchsmith.export.AdditionalInputs()
    calls.add((x,))
    torchsmith.export.export(scaled, (torch.ones(3),), dynamic_shapes=calls)


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda p: torchsmith.mark_dynamic(torch.ones(2), None), TypeError, "dimensions are integers, not None"),
    (lambda p: torchsmith.Dim("a", min=2.0), TypeError, "min and max are integers, not 2.0"),
    (lambda p: torchsmith.Dim.AUTO(min=5, max=2), ValueError, "Dim.AUTO: max 2 is below min 5"),
    (lambda p: torchsmith.Dim("a") - torchsmith.Dim("b"), TypeError, "a positive integer times a Dim, plus an integer"),
    (lambda p: 2 * torchsmith.Dim("a") - torchsmith.Dim("b"), TypeError, "a positive integer times a Dim, plus an integer"),
    (lambda p: torchsmith.export.ShapesCollection().__setitem__(3, {}), TypeError, "indexed by the tensors .*, not by int"),
    (lambda p: torchsmith.export.AdditionalInputs().add(torch.ones(3)), TypeError, "arguments as a tuple, .*, not Tensor"),
    (lambda p: other_call(torch.ones(3, 3)), ValueError, r"a tensor of sizes \(3, 3\) instead of a tensor of sizes \(3,\) is no"),
    (lambda p: torchsmith.export.unflatten(3), TypeError, "unflatten takes a program of .*, not int"),
    (lambda p: torchsmith.export.register_dataclass(int), TypeError, "takes a dataclass, not <class 'int'>"),
    (lambda p: torchsmith.compiler.nonstrict_trace(3), TypeError, "nonstrict_trace takes a callable, not int"),
    (lambda p: torchsmith.compiler.wait_for_background("x"), TypeError, "timeout is a number of seconds, not 'x'"),
    (lambda p: torchsmith.export.export(scaled, (torch.ones(3),), [1]), TypeError, "as a dict, not list"),
    (lambda p: torchsmith.export.export(torch.jit.trace(nn.ReLU(), torch.ones(3)), (torch.ones(3),)), TypeError, "TorchScript"),
    (lambda p: torchsmith.export.export(scaled, (), {"by": 3}), TypeError, r"do not fit scaled\(x: .*missing a required argument"),
    (lambda p: torchsmith.export.save(p, "/nowhere/a.tsep"), FileNotFoundError, "'/nowhere/a.tsep'$"),
    (lambda p: torchsmith.export.save(p, "never", extra_files={"a": 3}), TypeError, r"extra_files\['a'\] is a text or bytes, not int"),
    (lambda p: p.module()(torch.ones(3), 3), TypeError, r"what it was exported with, \(input\); it was given \(Tensor, int\)"),
    (lambda p: torchsmith.compiler.load_compiled_function(__file__), aot.PackageError, f"^{__file__} is truncated, or neither"),
    (lambda p: torchsmith.compiler.load_compiled_function(3), TypeError, "a path or a binary file object, not int"),
    (torchsmith.export.from_torch, TypeError, "a program of torch.export or the path"),
    (lambda p: torchsmith.export.load(None), TypeError, "a path or a binary file object, not NoneType"),
    (lambda p: aot.package("never.pt2", {3: p}), TypeError, "named by strings, not by 3"),
    (lambda p: aot.load_package("/"), aot.PackageError, "/ cannot be read: Is a directory"),
    *((lambda p, o=o: aot.compile_and_package(p, inductor_configs=o), torchsmith.Unsupported, words) for o, words in (
        ({"cpu": 3}, "cpu=3 is neither the name"), ({"cpu": [1]}, r"cpu=\[1\] is neither"),
        ({"keep_constants": "yes"}, "neither True nor False"), ({"aot_inductor.output_path": 3}, "output_path=3 is no path"))),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrong_arguments_are_named(call, kind, words):
    program = torchsmith.export.export(nn.ReLU(), (torch.ones(3),))
    with pytest.raises(kind, match=words):
        call(program)


def test_errors_of_a_package_name_the_argument(tmp_path):
    x = torch.ones(2, 3)
    program = torchsmith.export.export(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), (x,))
    run = aot.load_package(aot.compile_and_package(program, package_path=tmp_path / "two.pt2"))
    for given in (None, 3, [1.0]):
        with pytest.raises(TypeError, match=rf"input 0 \(input\): {type(given).__name__} is no array"):
            run(given)
    for values, kind, words in (
        ([x], TypeError, "a dict from names to tensors or arrays, not list"), ({3: x}, TypeError, "named by strings, not by 3"),
        ({"1.bias": None}, TypeError, "constant 1.bias: NoneType is no array"),
        ({"1.bias": torch.ones(3, device="meta")}, BufferError, "constant 1.bias: "),
        ({"1.bais": torch.ones(3)}, aot.PackageError, "no constant named 1.bais; did you mean 1.bias?"),
        ({"zz": torch.ones(3)}, aot.PackageError, "no constant named zz$"),
    ):  # fmt: skip
        with pytest.raises(kind, match=words):
            run.load_constants(values)
    run.load_constants({"1.bias": torch.ones(3)})
