"""Shrink a program that fails ahead of time to a script of few operators that fails alike.

In: an exported program whose compilation raises an error, or whose package computes something else than torch. Out: a script that needs
nothing but torch and torchsmith (and, where only the recorded values show the failure, a file of tensors beside it).

Every candidate is such a script: some of the program's operators, in their order, with what they read from elsewhere as inputs. It is run
as it stands. Sizes are numbers: a failure that only sizes that vary show is not found again, and that is said.
"""

from __future__ import annotations

import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import fx

from ..codes import Unsupported, define
from ..graph.eager import fitted, origin_value
from ..ir.expr import Expr
from ..ir.number import number_of
from ..runtime.files import all_or_none, place_of
from .entry import Entry

define("AOT080", "the program does not fail, so there is nothing to shrink", "give the options with which it failed")

SCRIPT = '''\
"""{why}

{count} of {total} operators of {name}. Fails: python {file}
"""

import torch
import torchsmith

OPTIONS = {options!r}


class Repro(torch.nn.Module):
    def forward(self, {parameters}):
{body}


def made(seed, shape, strides, dtype, low, high):
    g = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=g) if dtype.is_floating_point or dtype.is_complex else torch.randint(low, high + 1, shape, generator=g)
    return torch.empty_strided(shape, strides, dtype=dtype).copy_(t)


def inputs():
{inputs}


def main():
    module, args = Repro().eval(), inputs()
    with torch.no_grad():
        want = module(*(a.clone() for a in args))
        program = torchsmith.export.export(module, args)
        path = torchsmith.aot.compile_and_package(program, inductor_configs=OPTIONS)
        got = torchsmith.aot.load_package(path)(*args)
    for w, g in zip(want, got, strict=True):
        loose = {tolerance}
        torch.testing.assert_close(g, w, rtol=loose.get(w.dtype), atol=loose.get(w.dtype), equal_nan=True)


if __name__ == "__main__":
    main()
'''
TOLERANCE = "{torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The program's operators in order and what each gave in one run; `values` holds placeholders too, `numbers` the sizes."""

    name: str
    nodes: tuple[fx.Node, ...]
    values: Mapping[fx.Node, Any]
    numbers: Mapping[str, Any]


def record(entry: Entry, inputs: Sequence[Any] | None = None) -> Recorded:
    """Run the program once with torch's operators; `inputs`: its flat arguments (default: made up, at sizes near the least)."""
    fg = entry.functional
    leaves = list(inputs) if inputs is not None else _example(entry)
    given: list[Any] = [None] * (len(fg.inputs) - len(fg.consts))
    for argument, value in zip((a for a in entry.arguments if a.placeholder is not None), leaves, strict=True):
        given[argument.placeholder] = value  # type: ignore[index]
    for c in entry.constants:
        if c.placeholder < len(given):
            given[c.placeholder] = c.value
    values: dict[fx.Node, Any] = {}
    numbers = {s.sym.name: origin_value(s.origin, given) for s in fg.symbols if s.origin[0] != "bound"}
    everything = iter([*given, *fg.consts])
    with torch.no_grad():
        for node in fg.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(everything)
            elif node.op == "call_function":
                args = fx.node.map_aggregate((node.args, node.kwargs), lambda a: _real(a, values, numbers))
                values[node] = fitted(node, args[0], args[1], numbers)
    return Recorded(entry.name, tuple(n for n in fg.graph.nodes if n.op == "call_function"), values, numbers)


def _real(a: Any, values: Mapping[fx.Node, Any], numbers: Mapping[str, Any]) -> Any:
    if isinstance(a, fx.Node):
        return values[a]
    return number_of(a, dict(numbers)) if isinstance(a, Expr) else a


def _example(entry: Entry) -> list[torch.Tensor]:
    sizes = {s.sym.name: max(s.lo, min(4, s.hi if s.hi is not None else 4)) for s in entry.functional.symbols}
    out = []
    for k, a in enumerate(a for a in entry.arguments if a.placeholder is not None):
        if a.spec is None:
            raise Unsupported("AOT080", detail=f"the argument {a.name} is no tensor: give example inputs")
        shape, strides = ([int(number_of(e, sizes)) for e in part] for part in (a.spec.shape, a.spec.strides))
        g = torch.Generator().manual_seed(k)
        t = torch.randn(shape, generator=g) if a.spec.dtype.is_floating_point else torch.randint(0, 2, shape, generator=g)
        out.append(torch.empty_strided(shape, strides, dtype=a.spec.dtype).copy_(t))
    return out


# ---------------------------------------------------------------- scripts


def script(r: Recorded, chosen: Sequence[fx.Node], options: Mapping[str, Any], why: str, file: Path, is_made: bool) -> str:
    """The text; with `is_made` inputs are random numbers of the recorded shapes, else they stand in a file beside it."""
    inside: dict[fx.Node, str] = {}
    outside: dict[fx.Node, str] = {}
    lines: list[str] = []

    def text(a: Any) -> str:
        if isinstance(a, fx.Node):
            if a in inside:
                return inside[a]
            if isinstance(r.values[a], torch.Tensor):
                return outside.setdefault(a, f"x{len(outside)}")
            return text(r.values[a])
        if isinstance(a, Expr):
            return text(number_of(a, dict(r.numbers)))
        if isinstance(a, (list, tuple)):
            return "[" + ", ".join(map(text, a)) + "]"
        if isinstance(a, torch.device):
            return f"torch.device({str(a)!r})"
        if isinstance(a, float) and a - a != 0:
            return f"float('{a}')"
        return repr(a)

    used: set[fx.Node] = set()
    for node in chosen:
        if node.target is operator.getitem:
            if node.args[0] not in inside:
                continue  # its value is an input
            call = f"{text(node.args[0])}[{node.args[1]}]"
        else:
            parts = [*map(text, node.args), *(f"{k}={text(v)}" for k, v in node.kwargs.items())]
            call = f"torch.ops.{node.target}({', '.join(parts)})"
        used |= set(node.all_input_nodes) & set(inside)
        inside[node] = f"v{len(inside)}"
        loc = node.meta.get("loc", "")
        lines.append(f"        {inside[node]} = {call}" + (f"  # {loc}" if loc else ""))
    results = []
    for node, name in inside.items():
        if node not in used:
            value = r.values[node]
            several = value if isinstance(value, (list, tuple)) else ()
            results += [name] if isinstance(value, torch.Tensor) else [f"{name}[{k}]" for k in range(len(several))]
    results = results or [f"{x} + 0" for x in outside.values()]  # operators that only check give nothing
    lines.append(f"        return ({', '.join(results)},)")
    if is_made:
        rows = [f"        {_making(k, r.values[n])}," for k, n in enumerate(outside)]
        made = "\n".join(["    return (", *rows, "    )"])
    else:
        save_file({name: r.values[n].detach().contiguous().clone() for n, name in outside.items()}, str(file.with_suffix(".safetensors")))
        rows = [f"        {_held(x, r.values[n])}," for n, x in outside.items()]
        head = ["    from pathlib import Path", "    from safetensors.torch import load_file", "",
                '    held = load_file(Path(__file__).with_suffix(".safetensors"))']  # fmt: skip
        made = "\n".join([*head, "    return (", *rows, "    )"])
    return SCRIPT.format(
        why=why.replace("\\", "/").replace('"""', "'''"), count=len(inside), total=len(r.nodes), name=r.name, file=file.name,
        options=dict(options), parameters=", ".join(outside.values()), body="\n".join(lines), inputs=made, tolerance=TOLERANCE,
    )  # fmt: skip


def _held(name: str, t: torch.Tensor) -> str:
    return f"torch.empty_strided({tuple(t.shape)}, {t.stride()}, dtype={t.dtype}).copy_(held[{name!r}])"


def _making(seed: int, t: torch.Tensor) -> str:
    whole = not (t.dtype.is_floating_point or t.dtype.is_complex)
    low, high = (int(t.min()), int(t.max())) if whole and t.numel() else (0, 0)
    return f"made({seed}, {tuple(t.shape)}, {tuple(t.stride())}, {t.dtype}, {low}, {high})"


def failure_of(text: str, file: Path, isolate: bool) -> str | None:
    """Run a script. What it fails with, in words that do not depend on sizes and names; None: it does not fail.

    With `isolate` it runs in a process of its own, so that a crash of that one is a failure like others.
    """
    if isolate:
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
        done = subprocess.run(
            [sys.executable, str(file)], capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=600
        )
        if done.returncode < 0:
            return f"signal {-done.returncode}"
        if not done.returncode:
            return None
        lines = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
        error = next((line for line in lines[::-1] if re.match(r"^[\w.]+(Error|Exception|Unsupported)\b", line)), lines[-1])
        return _plain(error)
    scope = {"__name__": "repro", "__file__": str(file)}
    try:
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
        exec(compile(text, str(file), "exec"), scope)
        scope["main"]()  # type: ignore[operator]
    except Unsupported as e:
        return f"Unsupported: {e.code}"
    except Exception as e:
        return _plain(f"{type(e).__module__}.{type(e).__name__}: {e}")
    return None


def _plain(error: str) -> str:
    """The kind of an error: its type, and the words of its first line without numbers; wrong values are all one kind."""
    kind, _, rest = error.partition(":")
    kind = kind.rpartition(".")[2]
    if kind == "AssertionError":
        return "wrong values"
    code = re.search(r"\b[A-Z]{3}\d{3}\b", rest)
    if kind == "Unsupported" and code:
        return f"{kind}: {code[0]}"
    first = (rest.strip().splitlines() or [""])[0]
    return f"{kind}: {re.sub(r'[0-9]+', '', first)[:60]}"


# ---------------------------------------------------------------- shrinking


def shrink(nodes: Sequence[fx.Node], fails: Callable[[Sequence[fx.Node]], bool]) -> list[fx.Node]:
    """A part of `nodes`, in order, that still fails, and of which no single one can go."""
    kept = list(nodes)
    size = max(1, len(kept) // 2)
    while True:
        at = len(kept)
        progress = False
        while at > 0:  # from the end: what comes late is needed by nobody
            start = max(0, at - size)
            rest = kept[:start] + kept[at:]
            if rest and fails(rest):
                kept, progress = rest, True
            at = start
        if size == 1 and not progress:
            return kept
        size = size if progress and size == 1 else max(1, size // 2)


def minify(
    entry: Entry, path: str | os.PathLike[str] | None = None, *, options: Mapping[str, Any] | None = None,
    inputs: Sequence[Any] | None = None, isolate: bool = False, is_shrunk: bool = True,
) -> str:  # fmt: skip
    """Write the script; its path. Raises Unsupported("AOT080") where the program, with numbers for sizes, does not fail."""
    with place_of(path, "repro.py") as file, all_or_none((file, file.with_suffix(".safetensors"))):
        return _minify(entry, file, dict(options or {}), inputs, isolate, is_shrunk)


def _minify(entry: Entry, file: Path, options: dict[str, Any], inputs: Sequence[Any] | None, isolate: bool, is_shrunk: bool) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    r = record(entry, inputs)

    def run(nodes: Sequence[fx.Node], is_made: bool) -> str | None:
        return failure_of(script(r, nodes, options, "", file, is_made), file, isolate)

    if not is_shrunk:
        file.write_text(script(r, r.nodes, options, "Not shrunk.", file, False), encoding="utf-8", errors="surrogateescape")
        return str(file)
    is_made, failure = True, run(r.nodes, True)
    if failure is None:
        is_made, failure = False, run(r.nodes, False)
    if failure is None:
        file.unlink(missing_ok=True)
        file.with_suffix(".safetensors").unlink(missing_ok=True)
        raise Unsupported("AOT080", detail=f"{entry.name} at fixed sizes compiles, and computes what torch does")
    kept = shrink(r.nodes, lambda nodes: run(nodes, is_made) == failure)
    file.write_text(script(r, kept, options, failure, file, is_made), encoding="utf-8", errors="surrogateescape")
    return str(file)

