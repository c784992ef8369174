"""Every example of README.md, docs and examples runs as typed: Python blocks as programs of their own, shell lines one after another.

The blocks of a page share a folder, in which the checkout's `examples` stand. Commands that take minutes or change the checkout (make, pip,
cmake, bench) are looked at instead: targets, scripts and suites exist. `pytest -o pythonpath=` takes the installed torchsmith.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchsmith
from torchsmith import compiler, options
from torchsmith.aot import front

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LOOKED_AT = re.compile(r"\bbench/|\b(make|pip|cmake|mkdir)\b|\./|--build\b")


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """(line above its text, language, text) of each block of code."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in FENCE.finditer(text)]


def command(line: str) -> str:
    return line.split(" #", maxsplit=1)[0].strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_say_their_language(page: Path) -> None:
    """A block is python, sh, or text, and none is indented, so that no example is passed over."""
    found = blocks(page)
    assert {language for _, language, _ in found} <= {"python", "sh", "text"}
    rest = FENCE.sub("", page.read_text())
    assert not re.search(r"(?:^|\n\n)    \S", re.sub(r"\n(?:- |\d+\. ).*(?:\n+[ ]+.*)*", "", rest)), "an indented block"


@pytest.mark.parametrize("page", [p for p in PAGES if any(b[1] != "text" for b in blocks(p))], ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    installed = f"{Path(torchsmith.__file__).parents[1]}"
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": installed}
    for at, language, text in blocks(page):
        if language == "python":
            before = torch.random.get_rng_state()
            exec(compile("\n" * at + text, str(page), "exec"), {"__name__": "__main__"})
            torch.random.set_rng_state(before)
        lines = [command(line) for line in text.split("\n") if language == "sh" and command(line)]
        here = "\n".join(line for line in lines if not LOOKED_AT.search(line))
        done = subprocess.run(["bash", "-ec", here], env=env, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, f"{page}:{at}\n{here}\n{done.stdout}{done.stderr}"
        for line in lines:
            look_at(line)


def look_at(line: str) -> None:
    """What a command that is not run names exists."""
    words = line.split()
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), line
    for word in words:
        if word.startswith("bench/"):
            assert (ROOT / word).is_file(), line
    if "--suite" in words:
        assert words[words.index("--suite") + 1] in re.findall(r"[\w-]+", help_of_bench().split("--suite {")[1].split("}")[0]), line
        assert all(w in help_of_bench() for w in words if w.startswith("--")), line


@functools.cache
def help_of_bench() -> str:
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "run.py"), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_documents_name_files_that_exist() -> None:
    """`room/file.py` in a page is a file of the sources, tests or benches; a link leads somewhere."""
    folders = ("src", "csrc", "tests", "bench", "docs", "examples")
    known = {str(p.relative_to(ROOT)) for folder in folders for p in (ROOT / folder).rglob("*.*")}
    wrong = []
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(r"(?:`|^)((?:\w+/)+\w+\.(?:py|c|h|hpp|md))\b", text, re.M):
            if not any(k == name or k.endswith(f"/{name}") for k in known):
                wrong.append(f"{page.name}: {name}")
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            if not (page.parent / link).exists():
                wrong.append(f"{page.name}: {link}")
    assert not wrong


def test_figures_of_the_readme_are_those_of_the_page_of_figures() -> None:
    """Each number of "times as fast", as it stands there or rounded."""
    there = {float(n) for n in re.findall(r"\d+\.\d+", (ROOT / "docs" / "figures.md").read_text())}
    there |= {round(n, 1) for n in there}
    said = [m for m in re.split(r"\n\n|\n[|-] ", (ROOT / "README.md").read_text()) if "times as fast" in " ".join(m.split())]
    assert len(said) >= 3
    assert {float(n) for m in said for n in re.findall(r"(?<![\w.\"=])\d\.\d+(?![\w.])", m)} <= there


def test_names_of_torch_compile_have_the_counterparts_that_are_said() -> None:
    """docs/names.md: whatever of torchsmith a row names exists; the names of exceptions on the left are PyTorch's."""
    text = (ROOT / "docs" / "names.md").read_text()
    names = set(re.findall(r"`torchsmith((?:\.\w+)+)", text))
    assert len(names) > 20
    for name in names - {".compiler.X", ".export.X"}:
        found = torchsmith
        for part in name[1:].split("."):
            found = getattr(found, part)


def test_the_options_of_packages_are_on_the_page_of_export() -> None:
    table = (ROOT / "docs" / "export.md").read_text().partition("## Options and environment")[2].partition("\n\n`inductor_configs`")[0]
    rows = re.findall(r"^\| `(?:aot_inductor\.)?(\w+)` \|", table, re.M)
    assert sorted(rows) == sorted({*front.KNOWN, "libtorch"})


def test_the_page_of_options_is_whole() -> None:
    text = (ROOT / "docs" / "options.md").read_text()
    rows = dict(re.findall(r"^\| `([^`\"]+)` \| (\S+) \|", text, re.M))
    defaults = {n: getattr(options.Options(), n.replace(".", "_")) for n in options.public_options()}
    assert rows == {n: f'"{v}"' if isinstance(v, str) else str(v) for n, v in defaults.items()}
    assert re.findall(r"^\| `\"(.*?)\"` \|", text, re.M) == list(options.MODES)
    assert set(re.findall(r"`\"(\w+)\"`", text.partition("Stances")[2])) == set(compiler.STANCES)
