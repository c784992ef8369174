"""The house's order, read from the source with ast: who imports whom, where torch is allowed, what files may be called."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "torchsmith"

# A room may import itself and what is listed. `schedule` and `emit` need runtime for nothing; `runtime` imports no compiler.
BASE = frozenset({"codes", "events", "options"})
MIDDLE = BASE | {"ir", "runtime"}
ROOMS: dict[str, frozenset[str]] = {
    "codes": frozenset(),
    "events": frozenset(),
    "options": frozenset({"events"}),  # a word about an option that is ignored
    "ir": BASE,
    "runtime": BASE | {"ir"},
    "schedule": BASE | {"ir"},
    "emit": BASE | {"ir"},
    "graph": MIDDLE,
    "lower": MIDDLE | {"graph"},
    "autograd": MIDDLE | {"graph"},
    "capture": MIDDLE | {"graph"},
}
ROOMS["tuning"] = MIDDLE  # max-autotune: what to measure; the pipeline builds, runtime runs
ROOMS["pipeline"] = frozenset(ROOMS)
ROOMS["backends"] = frozenset(ROOMS)
ROOMS["aot"] = frozenset(ROOMS) - {"backends"}
ROOMS["debug"] = frozenset(ROOMS)
ROOMS["api"] = frozenset({*ROOMS, "compiled_module", "compiler"})
ROOMS["compiled_module"] = frozenset(ROOMS)  # what compile returns for an nn.Module: part of the front door
ROOMS["compiler"] = frozenset(ROOMS)  # the namespace torchsmith.compiler: a front door like api
ROOMS["export"] = frozenset(ROOMS)  # the namespace torchsmith.export: a front door like api
ROOMS["__init__"] = frozenset(ROOMS)
ROOMS["__main__"] = frozenset(ROOMS)

# pipeline looks a backend up by name, and only then: the one step against the order, and a late one.
ALLOWED_BACK = {("pipeline", "backends")}

TORCH_FREE = ("codes", "events", "options", "ir", "schedule", "emit")
# Loading a package needs no torch; the rest of aot compiles.
TORCH_FREE_AOT = {"aot/__init__.py", "aot/archive.py", "aot/cli.py", "aot/inspect.py", "aot/load.py", "aot/tree.py", "aot/weights.py"}
TORCH_IN_RUNTIME = {f"runtime/{name}.py" for name in ("host_torch", "externs_torch", "discarded", "draws", "values_only")}
FORBIDDEN = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.jit", "torch.export")
FORBIDDEN_NAMES = ("utils", "common", "misc", "helpers")

# Imports inside functions: optional or heavy packages, and the few places that say why.
LATE_PACKAGES = ("platformdirs", "filelock", "rich", "numpy", "importlib", "sympy")
LATE_FILES: dict[str, tuple[str, ...]] = {
    "ir/expr.py": ("text",),  # str(expr) is the printer's text, and the printer reads expressions
    "runtime/package.py": ("host_torch",),  # the same
    "runtime/load.py": ("host_torch",),  # torchsmith.runtime works where torch is absent
    "capture/attempts.py": ("start",),  # the machine's tables take a while to build: not before the first miss
    "api.py": ("pipeline", "debug", "capture", "calls", "functions"),  # `import torchsmith` stays cheap; the first compile loads the road
    "compiler.py": ("functions",),  # the same
    "graph/tracing.py": ("rules",),  # the rows register themselves, and need Tracing to do so
    "backends/road.py": ("partners",),  # sympy comes with it: only who hands a graph to a captured backend loads it
    "pipeline.py": ("graph", "backends"),  # adapters: only when such a backend is asked for
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> list[tuple[str, int, bool]]:
    """(absolute module, line, is it inside a function) of every import; typing-only imports are left out."""
    tree = tree_of(path)
    parts = ("torchsmith", *path.relative_to(PACKAGE).with_suffix("").parts)
    package = parts if path.name == "__init__.py" else parts[:-1]
    package = tuple(p for p in package if p != "__init__")
    found: list[tuple[str, int, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((a.name, node.lineno, inside) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            found.extend((f"{module}.{a.name}", node.lineno, inside) for a in node.names)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):  # statements hold statements nowhere else
            for child in getattr(node, part, ()):
                visit(child, inside)

    visit(tree, False)
    return found


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_rooms_are_known() -> None:
    assert {room_of(p) for p in files()} <= ROOMS.keys()


def test_imports_go_one_way() -> None:
    wrong = []
    for path in files():
        room = room_of(path)
        for module, line, _ in imports(path):
            if not is_within(module, "torchsmith"):
                continue
            parts = module.split(".")
            target = parts[1] if len(parts) > 1 else "__init__"
            if target not in ROOMS:  # a name defined in torchsmith/__init__.py, such as __version__
                target = "__init__"
            if target in ("__init__", room) or (room, target) in ALLOWED_BACK:
                continue
            if target not in ROOMS[room]:
                wrong.append(f"{name_of(path)}:{line}: {room} may not import {target}")
    assert not wrong, "\n".join(wrong)


def test_torch_stays_out_of_the_pure_rooms() -> None:
    wrong = []
    for path in files():
        in_runtime = room_of(path) == "runtime" and name_of(path) not in TORCH_IN_RUNTIME
        if room_of(path) in TORCH_FREE or in_runtime or name_of(path) in TORCH_FREE_AOT:
            wrong += [f"{name_of(path)}:{line}: {module}" for module, line, _ in imports(path) if is_within(module, "torch")]
    assert not wrong, "\n".join(wrong)


def test_the_incumbents_compilers_are_never_imported() -> None:
    wrong = []
    for path in files():
        if room_of(path) == "backends":
            continue  # adapters may import what their peer needs
        for module, line, _ in imports(path):
            wrong += [f"{name_of(path)}:{line}: {module}" for f in FORBIDDEN if is_within(module, f)]
    assert not wrong, "\n".join(wrong)


def test_imports_sit_at_the_top() -> None:
    wrong = []
    for path in files():
        for module, line, inside in imports(path):
            package = module.split(".")[0]
            late = LATE_FILES.get(name_of(path), ())
            is_listed = package in LATE_PACKAGES or any(f".{room}." in f"{module}." for room in late)
            if inside and not is_listed:
                wrong.append(f"{name_of(path)}:{line}: import of {module} inside a function")
    assert not wrong, "\n".join(wrong)


def test_what_is_imported_at_the_top_is_declared() -> None:
    """Installing torchsmith beside torch is enough to import every module but those of Triton's worker."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    known = {"torch", "torchsmith", *declared, *sys.stdlib_module_names}
    for path in sorted({*PACKAGE.rglob("*.py")} - {PACKAGE / "runtime" / "triton_worker.py"}):
        for node in tree_of(path).body:
            if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                for name in names:
                    assert name.split(".")[0] in known, f"{path}:{node.lineno} imports {name}, which pyproject.toml does not declare"


def test_no_room_imports_in_circles() -> None:
    """Files of a room import each other in one direction; what is imported inside a function does not count."""
    known = {name_of(p).removesuffix(".py").removesuffix("/__init__").replace("/", "."): p for p in files()}
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        found = {m.removeprefix("torchsmith.") for m, _, inside in imports(path) if m.startswith("torchsmith.") and not inside}
        edges[name] = {m for m in found if m in known and room_of(known[m]) == room_of(path) and m != name}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name):], name))
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*above, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_machines_have_a_type() -> None:
    """What interprets frames is a Machine (capture/protocol.py) to whoever is given it."""
    wrong = [f"{name_of(p)}: {a.arg}" for p in files() if room_of(p) == "capture" for f in ast.walk(tree_of(p))
             if isinstance(f, ast.FunctionDef) for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)
             if a.arg in ("m", "machine") and (a.annotation is None or ast.unparse(a.annotation) in ("Any", "object"))]  # fmt: skip
    assert not wrong


def names_read(tree: ast.Module) -> set[str]:
    """Names that a file reads, or writes as strings (tables of names, `__all__`, "package.file:name")."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found |= {node.id} if isinstance(node.ctx, ast.Load) else set()
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found.update(re.split("[.:]", node.value))
    return found


def test_no_name_is_dead() -> None:
    """What a file defines at its top is read: a private name in the package, another one there, in tests, benchmarks or the build.
    A decorator may have filed the function in a table."""
    trees = {path: tree_of(path) for path in files()}
    inside = set().union(*map(names_read, trees.values()))
    others = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py"), ROOT / "setup.py", ROOT / "pyproject.toml"]
    outside = inside.union(*(re.findall(r"\w+", path.read_text(encoding="utf-8")) for path in others))
    dead = []
    for path, tree in trees.items():
        for node in tree.body:
            made: list[str] = []
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list:
                made = [node.name]
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                made = [t.id for t in (node.targets if isinstance(node, ast.Assign) else [node.target]) if isinstance(t, ast.Name)]
            read = {name: inside if name.startswith("_") else outside for name in made if not name.startswith("__")}
            dead += [f"{name_of(path)}:{node.lineno}: {name}" for name, where in read.items() if name not in where]
    assert not dead, "\n".join(dead)


def test_every_code_is_said() -> None:
    """A reason code that nothing raises or counts is a promise in a table."""
    sources = [*files(), *(ROOT / "csrc").rglob("*.[ch]")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    defined = re.findall(r'define\(\s*"([A-Z]{3}\d{3})"', text)
    assert len(defined) > 100 and not [code for code in defined if text.count(code) < 2]


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_files_say_what_they_are(path: Path) -> None:
    assert not any(part.removesuffix(".py") in FORBIDDEN_NAMES for part in path.relative_to(PACKAGE).parts)
    tree = tree_of(path)
    assert not tree.body or ast.get_docstring(tree), "a module starts with one sentence: job, input, output"


def test_texts_name_their_encoding() -> None:
    """The locale decides what a file or a pipe of text holds unless it is said: sources of C and names of users are UTF-8 everywhere."""
    bad = []
    for path in files():
        for call in (n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
            said = {k.arg: k.value for k in call.keywords}
            mode = call.args[1] if len(call.args) > 1 else said.get("mode")
            is_text = name in ("write_text", "read_text") or ("text" in said and name in ("run", "Popen", "check_output"))
            is_text |= name == "fdopen" and not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
            is_text |= isinstance(call.func, ast.Name) and name == "open" and "b" not in str(getattr(mode, "value", ""))
            if is_text and "encoding" not in said:
                bad.append(f"{name_of(path)}:{call.lineno}")
    assert not bad, bad
