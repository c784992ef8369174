"""What a user reads when something is misspelt, refused or noticed: the words name the thing, the place and the cure."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fresh
import torchsmith
from torchsmith import aot, events, options
from torchsmith.codes import Unsupported

X = torch.ones(3)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"options": {"max_autotun": True}}, RuntimeError, "unknown option 'max_autotun'; did you mean 'max_autotune'"),
        ({"options": {"triton.cudagraph": True}}, RuntimeError, "did you mean 'triton.cudagraphs'"),
        ({"options": {"triton": {"cudagraphs": True}}}, RuntimeError, "did you mean 'triton.cudagraphs'"),
        ({"options": {"use_aoti": True}}, RuntimeError, "'use_aoti' is not offered; torchsmith.export"),
        ({"mode": "lite"}, RuntimeError, "unknown mode 'lite'; backend='aot_eager'"),
        ({"options": {"quite_new": True}}, RuntimeError, "unknown option 'quite_new'; options are activation_memory_budget, "),
        ({"options": {"post_grad_custom_post_pass": print}}, RuntimeError, "is an inductor option torchsmith does not have"),
        ({"options": {"guard_filter_fn": 3}}, TypeError, "guard_filter_fn is a function from guards to truths, not int"),
        ({"options": {"compile_threads": -1}}, RuntimeError, "option 'compile_threads' is a number from 0 to "),
        ({"shapes_spec": {"x": "a"}}, TypeError, r"shapes_spec\['x'\] is a dimension"),
        ({"options": ["max_autotune"]}, TypeError, "options must be a dict, not list"),
        ({"options": {1: True}}, TypeError, "options are named by strings, not by int 1"),
        ({"options": {"max_autotune": "yes"}}, RuntimeError, "option 'max_autotune' takes bool, not str 'yes'"),
        ({"options": {"libtorch": True}}, RuntimeError, "option 'libtorch' is one of 'allow', 'forbid', not True"),
        ({"mode": "max-autotun"}, RuntimeError, "unknown mode 'max-autotun'; did you mean 'max-autotune'"),
        ({"backend": "inducter"}, RuntimeError, "inductor"),
        ({"dynamic": "yes"}, TypeError, "dynamic is True, False or None, not 'yes'"),
        ({"fullgraph": "no"}, TypeError, "fullgraph is True or False, not 'no'"),
        ({"shapes_spec": {"zzz": 0}}, ValueError, "shapes_spec names 'zzz'; the parameters are x"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        torchsmith.compile(lambda x: x, **given)


def test_wrong_arguments_of_other_doors() -> None:
    for wrong in (lambda: torchsmith.mark_static(3), lambda: torchsmith.mark_static_address(3)):
        with pytest.raises(TypeError, match="a tensor's dimensions are marked"):
            wrong()
    with pytest.raises(IndexError, match=r"a tensor of 1 dimensions \(\(3,\)\) has no dimension 5"):
        torchsmith.mark_dynamic(X, 5)
    with pytest.raises(TypeError, match="not int"), torchsmith.compiler.config.patch(3):
        pass
    for name in ("wrap_numpy", "nested_compile_region"):
        with pytest.raises(TypeError, match=f"{name} takes a callable, not int"):
            getattr(torchsmith.compiler, name)(3)
    with pytest.raises(RuntimeError, match="did you mean 'force_eager'"):
        torchsmith.compiler.set_stance("force_eage")
    with pytest.raises(IndexError, match=r"shapes_spec\['x'\] names dimension 4 of a tensor with 1 dimensions"):
        torchsmith.compile(lambda x: x + 1, shapes_spec={"x": 4})(X)
    with pytest.raises(TypeError, match="are a dict, not int"):
        aot.compile_and_package(torch.nn.ReLU(), inductor_configs=3)
    with pytest.raises(TypeError, match="models is a dict"):
        aot.package("a.pt2", 3)
    with pytest.raises(TypeError, match="example_inputs is a list or tuple"):
        torchsmith.standalone_compile(torch.fx.symbolic_trace(torch.nn.ReLU()), X)
    with torchsmith.compiler.config.patch({"recompile_limit": 3}), torchsmith.compiler.config.patch("warn_eager", False):
        assert torchsmith.compiler.config.recompile_limit == 3
        assert not torchsmith.compiler.config.warn_eager


@pytest.mark.parametrize(("keep", "words"), [(lambda g: 3, "TypeError"), (lambda g: [True] * 99, "99 answers"), (lambda g: 1 / 0, "Zero")])
def test_a_wrong_filter_of_guards_is_the_users_error(keep: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=f"API011.*{words}"):
        torchsmith.compile(lambda x: x + 1, options={"guard_filter_fn": keep})(X)


def test_options_of_the_incumbent() -> None:
    options._IGNORED.clear()
    for key in ("fx_graph_cache", "deterministic", "permute_fusion"):  # what we always do or never need
        assert torchsmith.compile(lambda x: x + 1, options={key: True}) is not None
    with pytest.warns(UserWarning, match="'use_fast_math' is an inductor option without a counterpart here; it is ignored") as seen:
        torchsmith.compile(lambda x: x + 1, options={"use_fast_math": True})
        torchsmith.compile(lambda x: x + 1, options={"use_fast_math": True})
    assert len(seen) == 1
    assert seen[0].filename == __file__
    defaults = {"cpp.simdlen": None, "cuda.arch": None, "cuda.use_fast_math": False, "use_joint_graph_passes": True, "_profile_var": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torchsmith.compile(lambda x: x + 1, options=defaults) is not None
    assert not set(options.public_options()) & options.INTERNAL


@pytest.mark.parametrize(("name", "value"), [("TORCHSMITH_CHECK", "yes"), ("TORCHSMITH_COMPILE_THREADS", "1.5"), ("TORCHSMITH_FUEL", "-7")])
def test_the_environment(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} takes .*, not '{value}'"):
        torchsmith.compile(lambda x: x)
    monkeypatch.setenv(name, "")
    assert torchsmith.compile(lambda x: x) is not None


def test_a_blank_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSMITH_CC", " ")
    monkeypatch.delenv("CC", raising=False)
    assert options.compiler_command() == ("cc",)


def test_under_fullgraph_the_users_error_is_raised() -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    def torchs(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(7, 2)

    with pytest.raises(KeyError, match="mine"):
        torchsmith.compile(own, fullgraph=True)(X)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torchsmith.compile(torchs, fullgraph=True)(X)


def test_functions_are_named() -> None:
    with pytest.raises(torchsmith.Unsupported, match=r"CAP034.*torch.cond.*torchsmith.export"):
        torchsmith.compile(lambda x: torch.cond(x.sum() > 0, torch.rand_like, torch.cos, (x,)), fullgraph=True)(X)
    with pytest.raises(torchsmith.Unsupported, match=r"GRA004.*\(int\(\[item\(\) at .*test_messages.py:\d+\]\)\)"):
        torchsmith.compile(lambda x: [x] * int(x.sum()), fullgraph=True)(X)
    with pytest.raises(torchsmith.Unsupported, match=r"CAP016.*random numbers of Python.*Random.random of random"):
        torchsmith.compile(lambda x: x + random.random(), fullgraph=True)(X)
    with pytest.raises(torchsmith.Unsupported, match="set_num_threads, which changes state"):
        torchsmith.compile(lambda x: (torch.set_num_threads(1), x)[1], fullgraph=True)(X)


def test_tracebacks_are_the_users() -> None:
    with pytest.raises(torchsmith.Unsupported) as caught:
        torchsmith.compile(lambda x: (print("x"), input())[1], fullgraph=True)(X)
    ours = [t for t in caught.traceback if "torchsmith" in str(t.path) and "tests" not in str(t.path)]
    assert len(ours) <= 2


def test_numbers_that_change() -> None:
    fn = torchsmith.compile(lambda x, s: torch.quantile(x, s) + 0, recompile_limit=2, fullgraph=True)
    fn(X, 0.1), fn(X, 0.2)
    with pytest.raises(RuntimeError, match=r"compiled 2 times .*L\['s'\] is a float that changes; pass it as a tensor"):
        fn(X, 0.3)


def test_the_limit_of_compilations_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    fn = torchsmith.compile(lambda x, s: x + len(s), recompile_limit=2)
    for s in "abcd":
        fn(X, s)
    said = [w for w in recwarn if "was compiled 2 times" in str(w.message)]
    assert [w.filename for w in said] == [__file__]
    assert "L['s'] was 'b', is 'c'" in str(said[0].message)


def test_a_stance_names_function_and_guard() -> None:
    fn = torchsmith.compile(lambda x: x + 1, name="doubled")
    fn(X)
    with torchsmith.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match=r"doubled needs a recompilation.*dtype"):
        fn(X.double())


def test_explanations() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x.reshape(1, 3)) * 2

    def same(x: torch.Tensor) -> torch.Tensor:  # comes from the cache, with lines of its own
        return torch.linalg.svdvals(x.reshape(1, 3)) * 2

    for f, x in ((fn, X), (same, X), (fn, X.clone().requires_grad_())):
        e = torchsmith.explain(f)(x)
        assert len(repr(e)) < 120
        assert f"at {__file__}:{f.__code__.co_firstlineno + 1}" in str(e).partition("extern calls (")[2]
    e = torchsmith.explain(lambda x: (x * 2).sum())(torch.ones(3, requires_grad=True))
    assert "unknown place" not in str(e)
    assert all(g.reason is None or __file__ in g.reason.loc for g in e.graphs)


def test_public_names() -> None:
    assert {n for n in dir(torchsmith) if not n.startswith("__")} == set(torchsmith._PUBLIC)


def test_an_unusable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchsmith.runtime import store

    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(file))
    with pytest.warns(UserWarning, match="every start will be cold"):
        store.folder("lib")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.folder("lib")


def test_logs_without_stderr() -> None:
    code = "import os, sys; os.close(2); import torch, torchsmith; print(torchsmith.compile(lambda x: x + 1)(torch.ones(2)).tolist())"
    done = fresh.run(code, TORCHSMITH_LOGS="graphs,times")
    assert done.stdout == "[2.0, 2.0]\n"


def test_trace_enabled_writes_a_debug_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchsmith.debug import folders

    monkeypatch.setenv("TORCHSMITH_DEBUG_DIR", str(tmp_path))
    monkeypatch.setattr(folders, "_started", [])
    try:
        torchsmith.compile(lambda x: x.sin() * 3, options={"trace.enabled": True})(X)
        torchsmith.compile(lambda x: x.sin() * 5)(X)
    finally:
        events.unlisten(folders._started[0])
    ((folder,),) = (list(run.iterdir()) for run in tmp_path.iterdir())
    assert "sin" in (folder / "functional_graph.txt").read_text() and (folder / "output_code.c").exists()


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    from torchsmith.aot.cli import main

    with pytest.raises(SystemExit):
        main(["doctor"])
    assert "unknown command 'doctor'; commands are aot" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"torchsmith {torchsmith.__version__}\n"


def test_explain_tells_what_it_compiled_or_why_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 11

    later = torchsmith.compile(f, options={"background": True})
    for e in (torchsmith.explain(later)(X), torchsmith.explain(f, options={"background": True})(X)):
        assert e.graph_count == 1 and e.kernel_count == 1
    monkeypatch.setenv("TORCHSMITH_DISABLE", "1")
    assert "nothing was compiled: TORCHSMITH_DISABLE" in str(torchsmith.explain(f)(X))
    monkeypatch.setenv("TORCHSMITH_CHECK", "7")
    with pytest.raises(ValueError, match="TORCHSMITH_CHECK takes 0, 1 or 2, not '7'"):
        options.from_environment()


def test_warnings_stand_at_the_users_line() -> None:
    with pytest.warns(UserWarning) as seen:
        events.warn("here")
    assert seen[0].filename == __file__


def test_decoded_bytecode_goes_with_its_function() -> None:
    import gc

    from torchsmith.capture import bytecode

    def run(n: int) -> None:
        space: dict[str, Any] = {}
        exec(f"def fn(x):\n    return x + {n}", space)
        torchsmith.compile(space["fn"])(X)

    run(0)
    gc.collect()
    before = len(bytecode._BY_ID)
    for n in range(1, 6):
        run(n)
    gc.collect()
    assert len(bytecode._BY_ID) <= before


def test_a_processor_that_nobody_knows_is_refused_by_compile() -> None:
    for fullgraph in (False, True):
        with pytest.raises(torchsmith.Unsupported, match="AOT070"):
            torchsmith.compile(lambda x: x + 1, options={"cpu": "nonsense"}, fullgraph=fullgraph)


def test_the_hint_of_a_misspelt_backend_is_one_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"unknown backend 'inductr'") as error:
        torchsmith.compile(lambda x: x, backend="inductr")
    assert "?." not in str(error.value)


def test_explain_takes_the_settings_of_what_is_compiled() -> None:
    met: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        met.append(1)
        return gm.forward

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    for compiled in (torchsmith.compile(fn, backend=backend, fullgraph=True), torchsmith.compile(torch.nn.ReLU(), backend=backend)):
        met.clear()
        torchsmith.explain(compiled)(X)
        assert met
    met.clear()
    torchsmith.explain(torchsmith.compile(fn, backend=backend), backend="eager")(X)
    assert not met


def test_refusals_of_export_name_the_users_line() -> None:
    class Keeps(torch.nn.Module):
        def forward(self, x):
            self.last = x * 2
            return x + 1

    class Gives(torch.nn.Module):
        def forward(self, x):
            return object()

    class Bits(torch.nn.Module):
        def forward(self, x):
            return x.view(torch.int32)

    line = Keeps.forward.__code__.co_firstlineno + 1
    with pytest.raises(Unsupported, match=rf"test_messages.py:{line}: \[CAP030\].*\(self.last\)"):
        torchsmith.export(Keeps(), (torch.ones(3),))
    with pytest.raises(Unsupported, match=rf"test_messages.py:{line + 4}: \[CAP031\].*\(object\)"):
        torchsmith.export(Gives(), (torch.ones(3),))
    with pytest.raises(Unsupported, match=r"AOT024.*x: float32 as int32"):
        aot.aot_compile(torchsmith.export(Bits(), (torch.ones(3),)))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_torchscript_runs_as_it_is_and_says_so(kind: str) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval(), torch.randn(2, 4)
    made = torch.jit.script(model) if kind == "script" else torch.jit.trace(model, x)
    compiled = torchsmith.compile(made)
    with pytest.warns(UserWarning, match="API010"):
        assert torch.equal(compiled(x), made(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(x), made(x))
    with pytest.raises(torchsmith.Unsupported, match="API010"):
        torchsmith.compile(made, fullgraph=True)(x)
