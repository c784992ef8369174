"""The build cache: keys, atomic and private files, damage, concurrent processes, compilers that are missing or fail."""

from __future__ import annotations

import concurrent.futures.thread
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interrupts import steps
from native_tools import map_text

import torchsmith
from torchsmith import events, options
from torchsmith.aot import front
from torchsmith.aot.archive import Part, write_package
from torchsmith.aot.weights import Weights
from torchsmith.codes import Unsupported
from torchsmith.debug.folders import FolderWriter
from torchsmith.options import Options
from torchsmith.runtime import build, cache, model_library, store, toolchain
from torchsmith.runtime.files import workers
from torchsmith.runtime.manifest import Manifest

MANIFEST = Manifest("torchsmith_graph", "g", [], [], [], 0, [])
HOST = "int torchsmith_graph;"
KERNEL = map_text("x[i] + 1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    toolchain._identify.cache_clear()
    return tmp_path / "cache" / "v1"


def counts(got: list[events.Event]) -> list[str]:
    return [e.fields.get("name") or e.fields.get("code") for e in got if e.kind == "cache"]


def test_every_field_changes_the_key() -> None:
    tools = toolchain.toolchain()
    base = cache.key_fields("graph", Options(), tools)
    assert set(base) == {"graph", "options", "torchsmith", "torch", "python", "cpu", "compiler"}
    keys = {cache.key_of(base)}
    for name, value in base.items():
        assert value
        keys.add(cache.key_of(base | {name: value + "x"}))
    assert len(keys) == len(base) + 1
    for change in ({"command": ("other",)}, {"version": "other"}, {"target": "other"}, {"flags": ("-O0",)}):
        assert replace(tools, **change).identity != tools.identity
    for f in fields(Options):
        value = getattr(Options(), f.name)
        changed_value = (not value) if isinstance(value, bool) else f"{value}x" if isinstance(value, str) else (value or 0) + 1
        other = replace(Options(), **{f.name: changed_value})
        changed = cache.key_fields("graph", other, tools) != base
        assert changed == (f.name in dict(Options().codegen_key())), f.name
    # fields cannot run into each other
    assert cache.key_of({"a": "bc", "d": ""}) != cache.key_of({"a": "b", "cd": ""})


def test_second_build_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.build(HOST, [KERNEL, KERNEL], Options())
    monkeypatch.setattr(build, "run_compiler", None)
    assert build.build(HOST, [KERNEL], Options()) == path
    with events.recording() as got:
        assert cache.find("k") is None
        assert cache.keep("k", MANIFEST, path) == str(path)
        found = cache.find("k")
    assert found is not None and found.library == str(path) and found.manifest == MANIFEST
    assert counts(got) == ["graph miss", "graph hit"]


def test_objects_are_shared_between_graphs() -> None:
    build.build(HOST, [KERNEL], Options())
    with events.recording() as got:
        build.build(HOST + "int more;", [KERNEL, map_text("x[i] + 2")], Options())
    assert sorted(counts(got)) == ["object hit", "object miss"]


def calling(*kernels: str) -> str:
    """A host program that needs these kernels."""
    names = [build.kernel_name(k) for k in kernels]
    return "".join(f"void {n}(void);" for n in names) + "void (*torchsmith_graph[])(void) = {" + ", ".join(names) + "};"


def entry_of(folder: Path, kernel: str) -> Path:
    """Its place in the cache."""
    return folder / "obj" / f"{build.digest(toolchain.toolchain(Options()).identity, build.kernel_name(kernel), kernel)}.o"


def runs_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the compiler is run for from now on."""
    runs: list[str] = []
    real = build.run_compiler
    monkeypatch.setattr(build, "run_compiler", lambda tools, args, cwd, what: (runs.append(what), real(tools, args, cwd, what)))
    return runs


def test_short_kernels_are_compiled_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one run of the compiler, each found again by itself, whatever other ones its unit holds."""
    runs, (a, b, c, d) = runs_of(monkeypatch), (map_text(f"x[i] + {n}") for n in range(4))
    build.build(calling(a, b), [a, b], Options())
    assert len(runs) == 3 and sum(w.endswith(" and 1 more") for w in runs) == 1  # host program, kernels, library
    runs.clear()
    with events.recording() as got:
        build.build(calling(b, c, d), [b, c, d], Options())
    assert sorted(counts(got)) == ["object hit", "object miss", "object miss"] and len(runs) == 3
    runs.clear()
    build.build(calling(a, d), [a, d], Options())  # two units, each with a kernel that nobody needs
    assert sorted(runs) == ["host program", "linking"]
    unit = entry_of(folder, c).read_bytes()[len(build.UNIT) :][:40].decode()
    (folder / "obj" / f"{unit}.o").unlink()  # its kernels are compiled again, with one that another unit holds too
    runs.clear()
    build.build(calling(a, b, c), [a, b, c], Options())
    assert len(runs) == 3


def test_two_units_may_hold_one_kernel(folder: Path) -> None:
    a, b, c = (map_text(f"x[i] + {n}") for n in range(3))
    build.build(calling(a, b), [a, b], Options())
    entry_of(folder, b).unlink()  # as if another process had compiled it meanwhile
    build.build(calling(b, c), [b, c], Options())
    assert build.build(calling(a, b, c), [a, b, c], Options()).exists()


def test_objects_of_packages_hold_one_kernel_each(tmp_path: Path) -> None:
    """Somebody else links them."""
    texts = [map_text(f"x[i] + {n}") for n in range(3)]
    build.build(HOST, texts, Options())
    for _ in range(2):
        work = Path(tempfile.mkdtemp(dir=tmp_path))
        found = build.kernel_objects(toolchain.toolchain(Options()), HOST, texts, work, Options())
        assert {f.stem for f in found} == {"host", *map(build.kernel_name, texts)}
    with events.recording() as got:
        build.build(HOST + "int more;", texts, Options())
    assert set(counts(got)) == {"object hit"}


def test_what_is_not_one_function_is_compiled_alone() -> None:
    """Long kernels, and texts of another shape than ours."""
    a, b = map_text("x[i] + 1"), map_text("x[i] + 2")
    for other in (b + "/*" + "-" * build.SHORT + "*/", b + "\n#define MORE", b.replace(build.OPENING, "\nstatic int q;\nvoid  TS_KERNEL(")):
        assert build._units({"a": a, "b": other}, together=True) in ([("a",), ("b",)], [("b",), ("a",)])
    assert sorted(build._units({"a": a, "b": b}, together=True)[0]) == ["a", "b"]
    assert len(build._units({"a": a, "b": b}, together=False)) == 2
    assert len(build._units({str(n): a for n in range(2 * build.MOST + 1)}, together=True)) == 3


def test_disabled_cache_reads_and_keeps_nothing(folder: Path) -> None:
    off = Options(force_disable_caches=True)
    a = build.build(HOST, [KERNEL], off)
    assert a != build.build(HOST, [KERNEL], off) and list((folder / "obj").iterdir()) == []


def test_files_are_private_and_whole(folder: Path) -> None:
    os.umask(0o022)
    path = build.build(HOST, [KERNEL], Options())
    for part in (folder, folder / "lib", folder / "obj", folder / "graph"):
        assert stat.S_IMODE(part.stat().st_mode) == 0o700
    assert not stat.S_IMODE(path.stat().st_mode) & 0o077
    assert [p.name for p in folder.rglob(".*")] == []


DAMAGE = {
    "truncated": lambda b: b[: len(b) // 2],
    "empty": lambda b: b"",
    "one bit": lambda b: b[:100] + bytes([b[100] ^ 1]) + b[101:],
    "appended": lambda b: b + b"x",
    "other digest": lambda b: b[:-1] + bytes([b[-1] ^ 1]),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("kind", ["lib", "obj", "graph"])
def test_damaged_files_are_rebuilt(folder: Path, kind: str, how: str) -> None:
    path = build.build(HOST, [KERNEL], Options())
    cache.keep("k", MANIFEST, path)
    (victim,) = (p for p in (folder / kind).iterdir() if not p.name.startswith("toolchain-"))
    whole = victim.read_bytes()
    victim.write_bytes(DAMAGE[how](whole))
    if kind == "obj":
        path.unlink()
    with events.recording() as got:
        found = cache.find("k")
        if found is None:
            assert cache.keep("k", MANIFEST, build.build(HOST, [KERNEL], Options())) == str(path)
            found = cache.find("k")
    assert found is not None and found.library == str(path)
    assert "damaged" in counts(got) and victim.exists()
    assert kind != "graph" or victim.read_bytes() == whole


@pytest.mark.parametrize("kind", ["lib", "obj", "graph", "toolchain"])
def test_wrong_files_that_are_whole_are_rebuilt(folder: Path, kind: str) -> None:
    """Their digests are right: whoever wrote them was wrong."""
    path = build.build(HOST, [KERNEL], Options())
    cache.keep("k", MANIFEST, path)
    is_tool = kind == "toolchain"
    (victim,) = (p for p in (folder / ("graph" if is_tool else kind)).iterdir() if p.name.startswith("toolchain-") == is_tool)
    content = store.get(victim)
    for wrong in (content[: len(content) // 2], b"", b"[]", b"wrong" * 20):
        store.put(victim, wrong)
        if kind == "obj":
            path.unlink()
        toolchain._identify.cache_clear()
        with events.recording() as got:
            if cache.find("k") is None or is_tool:
                assert build.build(HOST, [KERNEL], Options()) == path
                cache.keep("k", MANIFEST, path)
        assert "damaged" in counts(got) and cache.find("k").library == str(path)
        assert len(store.get(victim)) == len(content)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_library_that_cannot_be_loaded_is_compiled_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backwards: bool
) -> None:
    """As one from another machine, whose libc is newer."""
    x = torch.arange(4.0, requires_grad=backwards)
    torchsmith.compile(lambda x: x.sin() + 3)(x)
    shutil.copytree(folder, tmp_path / "copy" / "v1")  # nothing of which is loaded
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "copy"))
    (library,) = (tmp_path / "copy" / "v1" / "lib").iterdir()
    (tmp_path / "a.c").write_text("int nobody_has_this(void); int torchsmith_graph(void) { return nobody_has_this(); }")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-z,now", tmp_path / "a.c", "-o", tmp_path / "a.so"], check=True)
    store.put(library, (tmp_path / "a.so").read_bytes())
    for cached in (False, True):
        with events.recording() as got:
            torch.testing.assert_close(torchsmith.compile(lambda x: x.sin() + 3)(x), x.sin() + 3)
        assert [(e.fields["report"].road, e.fields["report"].cached) for e in got if e.kind == "graph"] == [("native", cached)]
        assert ("damaged" in counts(got)) != cached


def test_interrupts_leave_nothing(folder: Path) -> None:
    """An interrupt in any line: a file is whole, with its old content or the new one, and no part of one stays."""
    target = store.folder("graph") / "k.json"
    store.put(target, b"0")
    for n in count(1):
        took = steps(lambda: store.put(target, b"1" * 100), n)
        assert store.get(target) in (b"0", b"1" * 100) and not [p for p in folder.rglob("*") if p.name.startswith(".new")]
        if took < n:
            break
    assert n > 5 and store.get(target) == b"1" * 100


def fast_compiler(tools: Any, args: list[str], cwd: Path, what: str) -> None:
    Path(args[args.index("-o") + 1]).write_bytes(b"object")


def debug_folder(out: Path) -> None:
    report = SimpleNamespace(name="g", road="native", code="", operators=1, kernels=1, externs=(), library=None)
    FolderWriter(out).write(0, report, {"artifact": [{"name": "plan.txt", "text": lambda: "plan"}]})


def linkable(form: str, out: Path) -> None:
    weights = SimpleNamespace(size=4, chunks=lambda: [b"1234"])
    model = SimpleNamespace(texts=model_library.Texts("host", ("kernel",), "model"), weights=weights)
    front.write_linkable(out / "net", model, SimpleNamespace(format=form, options=Options(), cpu=("native",)))


def package(out: Path) -> None:
    write_package(out / "m.pt2", {"model": Part((("native", b"library"),), Weights(b"", 0, 0, 0, b"", ()))})


WRITERS: dict[str, Callable[[Path], object]] = {
    "library": lambda out: build.build(HOST, [KERNEL], Options(force_disable_caches=True)),
    "log": lambda out: toolchain._keep_log(["cc"], "text", out),
    "debug folder": debug_folder, "static library": lambda out: linkable("a", out), "sources": lambda out: linkable("c", out),
    "package": package,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of archives that are not closed
@pytest.mark.parametrize("name", WRITERS)
def test_writers_leave_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """An exception in any line of this thread: the files are those of a whole run, or none."""
    monkeypatch.setattr(build, "run_compiler", fast_compiler)
    monkeypatch.setattr(model_library, "_build", lambda *_: b"")
    out, work = tmp_path / "out", WRITERS[name]
    monkeypatch.setattr("tempfile.tempdir", str(out))

    def files_of(run: Callable[[], object]) -> tuple[list[str], object]:
        shutil.rmtree(store.folder("lib"), ignore_errors=True)
        store.folder("lib").mkdir(mode=0o700)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        took = run()
        found = [p for top in (out, store.folder("lib")) for p in top.rglob("*")]
        return sorted(re.sub("[0-9a-f]{8,}", "#", p.name) for p in found), took

    whole, _ = files_of(lambda: work(out))  # the compiler is asked who it is now
    assert whole
    none = files_of(lambda: None)[0]
    _, took = files_of(lambda: steps(lambda: work(out)))
    for n in range(1, took + 1, 1 + took // 80):
        found, _ = files_of(lambda n=n: steps(lambda: work(out), n, error=(KeyboardInterrupt, MemoryError)[n // 2 % 2]))
        assert found in (whole, none), (n, found)


def test_a_file_under_anothers_name_is_not_believed(folder: Path) -> None:
    one, two = folder / "graph" / "one", folder / "graph" / "two"
    store.folder("graph")
    store.put(one, b"1")
    store.put(two, b"2")
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    (folder / "obj" / "one").write_bytes(content)
    (folder / "obj" / "one").chmod(0o600)
    with events.recording() as got:
        assert store.get(one) is store.get(two) is store.get(folder / "obj" / "one") is None
    assert counts(got).count("damaged") == 3


def test_swapped_entries_of_two_functions_are_compiled_again(folder: Path) -> None:
    """f never gives g's values, whatever stands in the folder."""
    x = torch.arange(4.0)
    f, g = (lambda x: x + 1), (lambda x: x * 3)
    before: set[Path] = set()
    entries = []
    for fn in (f, g):
        torchsmith.compile(fn)(x)
        now = {p for p in (folder / "graph").iterdir() if not p.name.startswith("toolchain")}
        entries.append((now - before).pop())
        before = now
    content = [p.read_bytes() for p in entries]
    for p, other in zip(entries, reversed(content), strict=True):
        p.write_bytes(other)
    for fn in (f, g):
        torch.testing.assert_close(torchsmith.compile(fn)(x), fn(x))


def test_a_relative_folder_stays_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", "relative-cache")
    first = store.folder("lib")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.folder("lib") == first == tmp_path / "relative-cache" / "v1" / "lib"
    store.put(first / "x", b"x")


def test_the_folder_may_be_deleted_at_any_time(folder: Path) -> None:
    build.build(HOST, [KERNEL], Options())
    shutil.rmtree(folder.parent)
    assert build.build(HOST + "int more;", [KERNEL], Options()).exists()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_whose_parent_others_may_write_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "open" / "mine").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "open" / "mine"))
    assert tmp_path not in store.folder("lib").parents


def test_writable_by_others_is_not_trusted(folder: Path) -> None:
    path = build.build(HOST, [KERNEL], Options())
    cache.keep("k", MANIFEST, path)
    path.chmod(0o666)
    assert cache.find("k") is None and not path.exists()


def test_a_manifest_of_another_shape_is_a_miss(folder: Path) -> None:
    for text in (b"[]", b"{}", b'{"manifest": {"abi": 99}, "library": "x"}', b'{"manifest": 3, "library": "../../x"}', b"not json"):
        store.put(store.folder("graph") / "k.json", text)
        assert cache.find("k") is None
        assert not (folder / "graph" / "k.json").exists()
    text = f'{{"manifest": {MANIFEST.to_json()}, "library": "../graph/k.json"}}'
    store.put(store.folder("graph") / "k.json", text.encode())
    assert cache.find("k") is None


def test_a_folder_that_others_may_write_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "open"))
    with events.recording() as got:
        path = build.build(HOST, [KERNEL], Options())
    assert tmp_path not in path.parents and "RUN003" in counts(got)
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "sticky"))
    assert tmp_path in build.build(HOST, [KERNEL], Options()).parents


def test_unwritable_folder_falls_back_to_a_temporary_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with events.recording() as got:
        path = build.build(HOST, [KERNEL], Options())
    assert path.exists() and "RUN003" in counts(got)
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "file" / "cache2"))
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    with pytest.raises(Unsupported, match="RUN003"):
        build.build(HOST, [KERNEL], Options())


@pytest.mark.parametrize(
    ("command", "said"),
    [("/nonexistent/cc -x", "cc does not exist"), ("nosuchcc -x", "nosuchcc is not in PATH"), (f"{__file__} -x", "cannot be executed")],
)
def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, command: str, said: str) -> None:
    monkeypatch.setenv("TORCHSMITH_CC", command)
    assert options.compiler_command() == tuple(command.split())
    with pytest.raises(Unsupported, match="RUN001") as e:
        build.build(HOST, [KERNEL], Options())
    assert "TORCHSMITH_CC" in str(e.value) and said in e.value.detail


def test_flags_that_a_compiler_lacks_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = '#!/bin/sh\ncase "$*" in *-fno-gnu-unique*|*-mavx2*) exit 1;; esac\nexec cc "$@"\n'
    (tmp_path / "cc2").write_text(script)
    (tmp_path / "cc2").chmod(0o755)
    monkeypatch.setenv("TORCHSMITH_CC", str(tmp_path / "cc2"))
    flags = toolchain.toolchain().flags
    assert not {"-fno-gnu-unique", "-mavx2"} & set(flags) and "-fwrapv" in flags
    assert build.build(HOST, [KERNEL], Options()).exists()


def test_failing_compiler_keeps_a_log(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="RUN002") as e:
        build.build(HOST, ["this is no C"], Options())
    assert re.search(r": exit status 1: \S+\.c:\d+:\d+: error: .*this", e.value.detail), e.value.detail
    log = Path(e.value.detail.split("see ")[1])
    assert "error" in log.read_text() and "this is no C" in next(p for p in log.parent.glob("tsk_*.c")).read_text()


def test_a_limit_on_the_size_of_files_is_no_fault_of_generated_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSMITH_CC", fake_compiler(tmp_path, 'ulimit -f 1; exec cc "$@"'))
    with pytest.raises(Unsupported, match="RUN003") as e:
        build.build(HOST, [KERNEL + "".join(f"\nint filler{i} = {i};" for i in range(20_000))], Options())
    assert re.search("File size limit exceeded|File too large|file size limit", e.value.detail), e.value.detail


def fake_compiler(tmp_path: Path, script: str) -> str:
    path = tmp_path / "fakecc"
    path.write_text(f'#!/bin/sh\ncase "$*" in *--version*|*-dumpmachine*|*-fsyntax-only*) exec cc "$@";; esac\n{script}\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("kill -SEGV $$", "RUN002"),
        ("echo 'internal compiler error: in foo' >&2; exit 4", "RUN002"),
        ("echo 'cannot write: No space left on device' >&2; exit 1", "RUN003"),
        ("sleep 60", "RUN002"),
    ],
)
def test_compiler_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, code: str) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TORCHSMITH_CC", fake_compiler(tmp_path, script))
        if "sleep" in script:
            patch.setattr(toolchain, "COMPILE_SECONDS", 1)
        with pytest.raises(Unsupported, match=code):
            build.build(HOST, [KERNEL], Options())
    assert build.build(HOST, [KERNEL], Options()).exists()


def test_libraries_are_built_after_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's pools take no tasks then: a thread that lives on, or compiles in the background, does them itself."""
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
    assert build.build(HOST, [KERNEL], Options()).exists()
    with workers(1) as pool, pytest.raises(ValueError, match="'x'"):
        pool.submit(int, "x").result()


WORKER = """
import sys, pathlib
sys.path.insert(0, {tests!r})
from native_tools import map_text
from torchsmith.options import Options
from torchsmith.runtime import build, cache
from torchsmith.runtime.manifest import Manifest
for i in range(6):
    path = build.build("int torchsmith_graph;", [map_text(f"x[i] + {{i}}"), map_text(f"x[i] * {{i}}")], Options())
    key = f"k{{i}}"
    cache.keep(key, Manifest("torchsmith_graph", "g", [], [], [], 0, []), path)
    found = cache.find(key)
    assert found is not None and pathlib.Path(found.library).exists()
"""


def test_concurrent_processes(folder: Path) -> None:
    text = textwrap.dedent(WORKER).format(tests=str(Path(__file__).parent))
    workers = [subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for w in workers:
        _, err = w.communicate(timeout=1200)
        assert w.returncode == 0, err
    assert list(folder.rglob(".*")) == []
    assert len([p for p in (folder / "graph").iterdir() if not p.name.startswith("toolchain-")]) == 6


def test_the_compiler_is_asked_once_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSMITH_CC", fake_compiler(tmp_path, 'exec cc "$@"'))
    first = toolchain.toolchain()
    toolchain._identify.cache_clear()
    monkeypatch.setattr(toolchain, "_ask", None)
    assert toolchain.toolchain() == first
    toolchain._identify.cache_clear()
    with open(tmp_path / "fakecc", "a") as f:
        f.write("# another compiler now\n")
    with pytest.raises(TypeError):
        toolchain.toolchain()
    toolchain._identify.cache_clear()


def test_tidy_bounds_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = store.folder("lib").parent
    for i in range(6):
        store.put(root / "obj" / f"{i}.o", bytes(1000))
        os.utime(root / "obj" / f"{i}.o", (i, i))
    (root / "lib" / ".newdead").write_bytes(b"half")
    os.utime(root / "lib" / ".newdead", (0, 0))
    (root / "lib" / ".newlive").write_bytes(b"half")
    assert store.get(root / "obj" / "0.o") is not None  # used: now the newest
    monkeypatch.setattr(store, "MOST_BYTES", 3500)
    store.tidy(root, -1)
    assert sorted(p.name for p in (root / "obj").iterdir()) == ["0.o", "4.o", "5.o"]
    assert [p.name for p in (root / "lib").iterdir()] == [".newlive"]


def test_a_killed_writer_leaves_nothing_that_counts(folder: Path) -> None:
    store.folder("lib")
    (folder / "lib" / ".newabc").write_bytes(b"half")
    path = build.build(HOST, [KERNEL], Options())
    assert store.get(path) is not None


def test_the_digest_of_sources_is_of_what_they_hold(monkeypatch, tmp_path):
    def digest_of(text):
        home = tmp_path / "torchsmith" / "runtime"
        home.mkdir(parents=True, exist_ok=True)
        (home / "cache.py").write_text(text)
        os.utime(home / "cache.py", (1, 1))
        monkeypatch.setattr(cache, "__file__", str(home / "cache.py"))
        return cache.source_digest.__wrapped__()

    monkeypatch.setattr(cache, "IMPORTED", float("inf"))
    assert digest_of("a = 1") != digest_of("a = 2")
    assert digest_of("a = 1") == digest_of("a = 1")


def test_an_upgrade_under_a_running_program_shares_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is the old one, whatever the files say now: what it keeps, nobody else finds."""
    words = {}
    for when in (float("inf"), 0.0):
        monkeypatch.setattr(cache, "IMPORTED", when)
        words[when] = [cache.source_digest.__wrapped__() for _ in range(2)]
    assert len({*words[float("inf")]}) == 1 and len({*words[0.0], *words[float("inf")]}) == 3
