"""save and load an ExportedProgram: a zip of one JSON text (graph, signature, sizes) and the tensors as safetensors; no pickle.

Format, version 1: `program.json` {"format", "version", "sha256" of the tensors' file, ...}, `tensors.safetensors`. Values in arguments
are JSON, or {"kind": ...} for what JSON has not: nodes, floats (hex), dtypes, devices, sizes.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..graph.sizes import SizeFacts
from ..graph.spec import FreshOutput, FunctionalGraph, InputOutput, Output, SizeOutput, TensorSpec, ViewOutput
from ..ir import dtype as dt
from ..ir.expr import Cast, Const, Expr, Op, Sym, const
from ..ir.program import Symbol
from ..runtime.files import replace_file
from .entry import spec_text
from .program import ExportedProgram, InputRow, OutputRow

FORMAT, VERSION = "torchsmith.exported_program", 2  # version 1 had no conditions
PROGRAM, TENSORS, EXTRA = "program.json", "tensors.safetensors", "extra/"


# What Python's zip reader raises for a file whose bytes were changed; a flipped bit may ask for encryption or an unknown compression.
DAMAGED = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, UnicodeDecodeError, json.JSONDecodeError, LookupError,
    struct.error,
)  # fmt: skip


class ArchiveError(RuntimeError):
    """A file that is no exported program, is damaged, or is of a version that this torchsmith does not read."""


def save(program: ExportedProgram, f: str | os.PathLike[str] | Any, *, extra_files: Mapping[str, str | bytes] | None = None) -> None:
    """Write `program` to a path (replaced whole, or not at all) or to a binary file object.

    extra_files: name -> text that lies beside it.
    """
    if not isinstance(program, ExportedProgram):
        raise TypeError(f"save takes a program of torchsmith.export.export, not {type(program).__name__}")
    for name, text in (extra_files or {}).items():
        if not isinstance(text, str | bytes):
            raise TypeError(f"extra_files[{name!r}] is a text or bytes, not {type(text).__name__}")
    extra = {f"{EXTRA}{name}": text.encode() if isinstance(text, str) else text for name, text in (extra_files or {}).items()}
    tensors, names = _tensors(program)
    blob = safetensors.torch.save(tensors)
    head = {"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(blob).hexdigest()}
    text = json.dumps({**head, **_record(program), "tensors": names}, indent=1)
    if hasattr(f, "write"):
        _write(f, text, blob, extra)
        return
    replace_file(Path(f), lambda out: _write(out, text, blob, extra), 0o666)


def _write(out: Any, text: str, blob: bytes, extra: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in ((PROGRAM, text.encode()), (TENSORS, blob), *extra.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)


def load(f: str | os.PathLike[str] | Any, *, extra_files: dict[str, Any] | None = None) -> ExportedProgram:
    """Read what `save` wrote. Raises ArchiveError (damaged, foreign or newer file), FileNotFoundError.

    extra_files: the texts that were saved under these names become its values; a name that the file lacks keeps its own.
    """
    if not isinstance(f, str | os.PathLike) and not hasattr(f, "read"):
        raise TypeError(f"load takes a path or a binary file object, not {type(f).__name__}")
    try:
        with zipfile.ZipFile(f) as archive:
            if any(i.compress_type or i.flag_bits & 1 for i in archive.infolist()):
                raise ArchiveError(f"{f} is damaged: its members are stored as they are, and it says otherwise")
            if not {PROGRAM, TENSORS} <= set(archive.namelist()):
                raise ArchiveError(f"{f} is not a program saved by torchsmith.export.save (for a file of torch.export.save use from_torch)")
            record, blob = json.loads(archive.read(PROGRAM)), archive.read(TENSORS)
            members = set(archive.namelist())
            extra = {name: archive.read(EXTRA + name).decode() for name in extra_files or () if EXTRA + name in members}
    except FileNotFoundError:
        raise
    except DAMAGED as error:
        raise ArchiveError(f"{f} is damaged: {error}") from error
    if record.get("format") != FORMAT:
        raise ArchiveError(f"{f} is not an exported program of torchsmith")
    if record["version"] > VERSION:
        raise ArchiveError(f"{f} has format version {record['version']}; this torchsmith reads versions up to {VERSION}. Update torchsmith")
    if hashlib.sha256(blob).hexdigest() != record["sha256"]:
        raise ArchiveError(f"{f} is damaged: its tensors do not have the recorded digest")
    try:
        program = _program(record, safetensors.torch.load(blob))
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, safetensors.SafetensorError) as error:
        raise ArchiveError(f"{f} cannot be read: {type(error).__name__}: {error}") from error
    if extra_files is not None:
        extra_files.update(extra)
    return program


# ---------------------------------------------------------------- tensors


def _tensors(program: ExportedProgram) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What is stored (each tensor once), and for every name {"is": stored name, "strides", "grad", "param"}."""
    stored: dict[str, Tensor] = {}
    names: dict[str, Any] = {}
    seen: dict[Any, str] = {}
    groups = {
        "state": program.state_dict,
        "constant": program.constants,
        "made": {str(i): t for i, t in enumerate(program.functional.consts)},
    }
    for group, members in groups.items():
        for name, t in members.items():
            key = (t.data_ptr(), t.dtype, tuple(t.shape), tuple(t.stride())) if t.numel() else (group, name)
            at = seen.setdefault(key, f"{group}.{name}")
            if at == f"{group}.{name}":
                stored[at] = t.detach().cpu().contiguous().clone()
            names[f"{group}.{name}"] = {
                "is": at, "strides": list(t.stride()), "grad": t.requires_grad, "param": isinstance(t, torch.nn.Parameter),
                "device": str(t.device),
            }  # fmt: skip
    return stored, names


def _restored(names: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made: dict[Any, Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, row in names.items():
        key = (row["is"], row["param"])
        if key not in made:
            t = stored[row["is"]]
            if list(t.stride()) != row["strides"]:
                t = torch.empty_strided(t.shape, row["strides"], dtype=t.dtype).copy_(t)
            t = t.to(row["device"])
            made[key] = torch.nn.Parameter(t, requires_grad=row["grad"]) if row["param"] else t.requires_grad_(row["grad"])
        found[name] = made[key]
    return found


# ---------------------------------------------------------------- the program as JSON


def _record(p: ExportedProgram) -> dict[str, Any]:
    fg = p.functional
    return {
        "name": p.name,
        "torch": torch.__version__,
        "inputs": [[r.kind, r.name, _spec(r.spec), r.leaf, r.persistent] for r in p.inputs],
        "outputs": [[r.kind, _scalar(r.value)] for r in p.outputs],
        "in_spec": spec_text(p.in_spec),
        "out_spec": spec_text(p.out_spec),
        "leaves": [_scalar(x) for x in p.leaves],
        "leaf_names": list(p.leaf_names),
        "symbols": [
            [s.sym.name if s.sym.dtype is dt.index else _expr(s.sym), list(s.origin), s.lo, s.hi, p.symbol_names.get(s.sym.name)]
            for s in fg.symbols
        ],
        "conditions": [[_expr(c), loc] for c, loc in p.conditions],
        "placeholders": [[n.name, _spec(n.meta["spec"])] for n in fg.graph.nodes if n.op == "placeholder"],
        "specs": [_spec(s) for s in fg.inputs],
        "roles": list(fg.roles),
        "nodes": [_node(n) for n in fg.graph.nodes if n.op == "call_function"],
        "results": [_output(o) for o in fg.outputs],
        "returned": [n.name for n in next(n for n in fg.graph.nodes if n.op == "output").args[0]],  # type: ignore[union-attr]
        "write_backs": [list(w) for w in fg.write_backs],
        "key_text": fg.key_text,
    }


def _program(r: Mapping[str, Any], stored: Mapping[str, Tensor]) -> ExportedProgram:
    tensors = _restored(r["tensors"], stored)
    graph = fx.Graph()
    by_name: dict[str, fx.Node] = {}
    for name, spec in r["placeholders"]:
        by_name[name] = graph.placeholder(name)
        by_name[name].meta["spec"] = _read_spec(spec)
    for name, target, args, kwargs, spec, loc in r["nodes"]:
        read = {k: _read(v, by_name) for k, v in kwargs.items()}
        node = graph.create_node("call_function", _operator(target), tuple(_read(a, by_name) for a in args), read, name=name)
        node.meta.update(spec=_read_spec(spec), loc=loc)
        by_name[name] = node
    graph.output(tuple(by_name[n] for n in r["returned"]))
    symbols = tuple(Symbol(_read_symbol(name), tuple(origin), lo, hi) for name, origin, lo, hi, _ in r["symbols"])
    facts = SizeFacts()
    for s in symbols:
        facts.symbols[s.sym.name], facts.hints[s.sym.name] = s, None
    for cond, loc in r.get("conditions", ()):
        facts.assume(_read_expr(cond), loc)
    groups: dict[str, dict[str, Tensor]] = {"state": {}, "constant": {}, "made": {}}
    for name, t in tensors.items():
        group, _, rest = name.partition(".")
        groups[group][rest] = t
    fg = FunctionalGraph(
        graph, tuple(_read_spec(s) for s in r["specs"]), tuple(_read_output(o) for o in r["results"]), tuple((i, n) for i,
        n in r["write_backs"]),
        symbols, r["key_text"], tuple(groups["made"].values()), tuple(r["roles"]),
    )  # fmt: skip
    return ExportedProgram(
        fg, facts.freeze(), tuple(InputRow(k, n, _read_spec(s), *rest) for k, n, s, *rest in r["inputs"]),
        tuple(OutputRow(k, _read(v, {})) for k, v in r["outputs"]),
        pytree.treespec_loads(r["in_spec"]), pytree.treespec_loads(r["out_spec"]), tuple(_read(v, {}) for v in r["leaves"]),
        tuple(r["leaf_names"]),
        groups["state"], groups["constant"], {name: dim for name, *_, dim in r["symbols"] if dim}, r["name"],
    )  # fmt: skip


def _operator(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    space, op, overload = name.split(".")
    packet = getattr(getattr(torch.ops, space), op, None)
    if packet is None:
        raise ArchiveError(f"the program calls {space}::{op}, which is not registered here: import the library that defines it first")
    return getattr(packet, overload)


def _node(n: fx.Node) -> list[Any]:
    target = "getitem" if n.target is operator.getitem else str(n.target)
    return [
        n.name,
        target,
        [_value(a) for a in n.args],
        {k: _value(v) for k, v in n.kwargs.items()},
        _spec(n.meta["spec"]),
        n.meta.get("loc", ""),
    ]


def _scalar(v: Any) -> Any:
    if v is None or isinstance(v, (bool, int, str, float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return _value(v)
    raise ArchiveError(f"an argument or result of type {type(v).__name__} cannot be saved")


def _value(v: Any) -> Any:
    if v is None or isinstance(v, (bool, int, str)):
        return v
    if isinstance(v, (list, tuple)):
        return [_value(x) for x in v]
    for kind, (t, text, _) in _KINDS.items():
        if isinstance(v, t):
            return {kind: text(v)}
    raise ArchiveError(f"an argument of type {type(v).__name__} cannot be saved")


def _read(v: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(v, list):
        return [_read(x, nodes) for x in v]
    if isinstance(v, dict):
        ((kind, text),) = v.items()
        return nodes[text] if kind == "node" else _KINDS[kind][2](text)
    return v


def _torch_name(v: Any) -> str:
    return str(v).removeprefix("torch.")


def _expr(e: Expr) -> Any:
    if isinstance(e, Const):
        return int(e.value) if e.dtype is dt.index else {"dtype": e.dtype.name, "value": _value(e.value)}
    if isinstance(e, Sym):
        return {"symbol": e.name} if e.dtype is dt.index else {"symbol": e.name, "of": e.dtype.name}
    if isinstance(e, Cast):
        return {"cast": e.dtype.name, "of": _expr(e.args[0])}
    assert isinstance(e, Op)
    return [e.name, e.dtype.name, *(_expr(a) for a in e.args)]


def _read_symbol(v: Any) -> Sym:
    return Sym(v) if isinstance(v, str) else Sym(v["symbol"], dt.DTYPES[v["of"]] if "of" in v else dt.index)


def _read_expr(v: Any) -> Expr:
    if isinstance(v, int):
        return const(v)
    if isinstance(v, list):
        return Op(v[0], dt.DTYPES[v[1]], tuple(_read_expr(a) for a in v[2:]))
    if "symbol" in v:
        return _read_symbol(v)
    return Cast(dt.DTYPES[v["cast"]], _read_expr(v["of"])) if "cast" in v else Const(dt.DTYPES[v["dtype"]], _read(v["value"], {}))


_KINDS: dict[str, tuple[Any, Any, Any]] = {
    "node": (fx.Node, lambda n: n.name, None),
    "float": (float, float.hex, float.fromhex),
    "complex": (complex, lambda c: [c.real.hex(), c.imag.hex()], lambda t: complex(*map(float.fromhex, t))),
    "dtype": (torch.dtype, _torch_name, lambda t: getattr(torch, t)),
    "device": (torch.device, str, torch.device),
    "layout": (torch.layout, _torch_name, lambda t: getattr(torch, t)),
    "memory_format": (torch.memory_format, _torch_name, lambda t: getattr(torch, t)),
    "size": (Expr, _expr, _read_expr),
}


def _spec(s: Any) -> Any:
    if isinstance(s, TensorSpec):
        offset = None if s.offset is None else _expr(s.offset)
        return {"tensor": [_torch_name(s.dtype), [_expr(e) for e in s.shape], [_expr(e) for e in s.strides], s.device, offset]}
    if isinstance(s, tuple):
        return {"tuple": [_spec(x) for x in s]}
    return None if s is None else {"size": _expr(s)}


def _read_spec(v: Any) -> Any:
    if v is None:
        return None
    ((kind, body),) = v.items()
    if kind == "tensor":
        dtype, shape, strides, device, offset = body
        return TensorSpec(
            getattr(torch, dtype),
            tuple(map(_read_expr, shape)),
            tuple(map(_read_expr, strides)),
            device,
            None if offset is None else _read_expr(offset),
        )
    return tuple(_read_spec(x) for x in body) if kind == "tuple" else _read_expr(body)


def _output(o: Output) -> list[Any]:
    if isinstance(o, FreshOutput):
        return ["fresh", o.node]
    if isinstance(o, InputOutput):
        return ["input", o.index]
    if isinstance(o, ViewOutput):
        return ["view", o.of if isinstance(o.of, int) else list(o.of), _spec(o.spec)]
    return ["number", _expr(o.value)]


def _read_output(v: list[Any]) -> Output:
    kind, of, *spec = v
    if kind == "fresh":
        return FreshOutput(of)
    if kind == "input":
        return InputOutput(of)
    return ViewOutput(of if isinstance(of, int) else (of[0], of[1]), _read_spec(spec[0])) if kind == "view" else SizeOutput(_read_expr(of))
