"""From an Entry to the parts of a package: the model library, its weights, and what is known of them.

In: Entry, options. Out: Model(library, weights, info). The road is the one of `compile`: functionalise, lower, fuse, plan, emit; what
differs is what is linked around the result and where constants come from.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import __version__
from ..codes import Unsupported, define
from ..emit.model import PREPARED, READ, WRITTEN, ConstantRow, Description, InputRow, emit_model, output_rows
from ..graph.sizes import LARGEST, print_condition
from ..graph.spec import FreshOutput, InputOutput, TensorSpec, ViewOutput
from ..graph.tracing import spec_of
from ..ir.dtype import DTYPE_ROWS
from ..ir.expr import Const, Expr
from ..ir.target import CPU, LEAST_ARCH
from ..options import Options
from ..pipeline import Source, at_hand, compile_source, refuse_externs
from ..runtime.externs_torch import DTYPES, operator_row
from ..runtime.files import work_folder
from ..runtime.manifest import Manifest
from ..runtime.model_library import Texts, build_model
from ..runtime.toolchain import features_of
from .entry import Constant, Entry
from .placing import on_host
from .tree import plain
from .weights import PAGE, Block, Weights, align

define("AOT045", "this cannot be packaged for a GPU", "see the detail")
define("AOT022", "the program writes inputs or returns views of them, so they must not be copied", "compile it without copy_inputs")
define("AOT024", "a result views an input as another dtype", "return a clone of it: a package cannot make such a view")
define("AOT021", "the compiled library refused the constants", "please report it")

SERVICES = {"cuda": "TS_CUDA_SERVICES"}  # csrc/aot/device.h, by device

NAMES = {theirs: ours for ours, theirs in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Model:
    """One compiled model: library bytes, weights (content to be written once), the info text that is also inside the library."""

    name: str
    library: bytes
    weights: Weights
    info: dict[str, Any]
    cpu: tuple[str, ...]
    texts: Texts
    device: str = "cpu"
    archs: tuple[int, ...] = ()  # of a GPU: what there is code for


def compile_entry(
    entry: Entry, options: Options, *, keep_constants: bool = False, copy_inputs: bool = False, metadata: Mapping[str, str] | None = None,
    archs: tuple[int, ...] = (),
) -> Model:  # fmt: skip
    """The whole road. Raises Unsupported with the user's line. `archs`: compute capabilities that a package for a GPU has code for."""
    entry = replace(entry, constants=on_host(entry.constants))
    if archs:
        options = replace(options, cuda_arch=max(archs))
    with suppress(Unsupported):  # no device here: code for a common one
        options = replace(at_hand(entry.functional, options), cuda_blocks=0)  # a package asks no generator of torch's
    source = compile_source(entry.functional, options, entry.name)
    is_far = source.target.device != CPU.device
    if is_far and any(i["kind"] not in ("tensor", "unused") for i in source.manifest.inputs):
        raise Unsupported("AOT045", detail="an input of no dimension in the host's memory: give it on the GPU")
    archs = tuple(sorted({*(archs or (LEAST_ARCH,)), source.target.arch})) if is_far else ()
    if options.libtorch == "forbid":
        refuse_externs(source.manifest)
    operators = tuple(operator_row(e) for e in source.manifest.externs)
    features = features_of(options)
    written = [a.name for a in entry.arguments if a.placeholder is not None and source.manifest.inputs[a.placeholder].get("written")]
    if copy_inputs and (written or any(r["kind"] == "view" and r["of"][0] == "input" for r in source.manifest.results)):
        raise Unsupported("AOT022", detail=", ".join(written))
    rows, weights = place_constants(entry.constants, source.manifest, keep_constants, is_far)
    info = describe(entry, source, rows, features) | {"cuda_archs": archs} | ({"metadata": dict(metadata)} if metadata else {})
    description = Description(
        entry.name, input_rows(entry, written), outputs_of(entry, source.manifest), tuple(rows), symbols_of(entry),
        conditions_of(entry), entry.in_spec, entry.out_spec, json.dumps(info, sort_keys=True), features,
        weights.id, weights.size, weights.state_offset, entry.labels, copy_inputs, operators,
        source.manifest.device.partition(":")[0], SERVICES.get(source.target.device, ""),
    )  # fmt: skip
    texts = Texts(source.host, source.kernels, emit_model(description), source.target, archs)
    library = build_model(texts, options)
    if weights.state_bytes:
        weights = replace(weights, state=pack(library, rows, entry.constants, weights.state_bytes))
    return Model(entry.name, library, weights, info, features, texts, source.target.device, archs)


# ---------------------------------------------------------------- inputs and outputs


def input_rows(entry: Entry, written: Collection[str] = ()) -> tuple[InputRow, ...]:
    return tuple(
        InputRow(a.name, "", (), (), a.placeholder) if a.spec is None
        else InputRow(a.name, NAMES[a.spec.dtype], a.spec.shape, a.spec.strides, a.placeholder, a.name in written)
        for a in entry.arguments if a.placeholder is not None
    )  # fmt: skip


def outputs_of(entry: Entry, manifest: Manifest) -> Any:
    """One row per returned leaf; ranks of fresh results come from the functional graph."""
    fg = entry.functional
    nodes = {n.name: n for n in fg.graph.nodes}
    specs = {a.placeholder: a.spec for a in entry.arguments} | {c.placeholder: spec_of(c.value) for c in entry.constants}
    dtypes: list[tuple[str, int]] = []
    for out in fg.outputs:
        spec = getattr(out, "spec", None)
        if hasattr(out, "node"):
            spec = nodes[out.node].meta["spec"]
        elif hasattr(out, "index"):
            spec = specs[out.index]
        viewed = out.of if isinstance(out, ViewOutput) and isinstance(out.of, int) else -1
        base = specs[viewed] if viewed >= 0 else None
        if isinstance(base, TensorSpec) and isinstance(spec, TensorSpec) and base.dtype != spec.dtype:
            of = next((a.name for a in entry.arguments if a.placeholder == viewed), "a constant")
            raise Unsupported("AOT024", detail=f"{of}: {str(base.dtype)[6:]} as {str(spec.dtype)[6:]}")
        dtypes.append((NAMES[spec.dtype], len(spec.shape)) if isinstance(spec, TensorSpec) else ("i64", 0))
    return output_rows(manifest.results, entry.returned, dtypes)


def symbols_of(entry: Entry) -> tuple[Any, ...]:
    """Every symbol with an origin in an input: the checks need also those that the body does not."""
    return tuple(s for s in entry.facts.symbols.values() if s.origin[0] in ("size", "stride"))


def conditions_of(entry: Entry) -> tuple[tuple[Expr, str], ...]:
    """What tracing and compiling assumed of sizes, as checks of each call."""
    return tuple((c, _said(c, entry)) for c in (*entry.facts.guards, *entry.facts.late) if not isinstance(c, Const))


def _said(cond: Expr, entry: Entry) -> str:
    loc = entry.facts.locs.get(cond, "")
    return f"the sizes of the inputs must satisfy {print_condition(cond, entry.labels)}" + (f", because of {loc}" if loc else "")


# ---------------------------------------------------------------- constants


def place_constants(constants: Sequence[Constant], manifest: Manifest, keep: bool, is_far: bool) -> tuple[list[ConstantRow], Weights]:
    """Where each constant lies in the weights: those the run reads, and what prepare computes from the others.

    `is_far`: prepare runs on a GPU when the package is loaded, so what it reads is stored, too.
    """
    state, keep = 0 if is_far else manifest.state, keep or is_far
    offset = align(64, 64 if state < PAGE else PAGE)
    state_offset = -1
    if state:
        state_offset, offset = offset, align(offset + state, 64)
    rows: list[ConstantRow] = []
    blocks: list[Block] = []
    for c in constants:
        number = c.placeholder
        row = manifest.inputs[number]
        flags = PREPARED * (number in manifest.consts) | READ * bool(row.get("read")) | WRITTEN * bool(row.get("written"))
        if _is_result(manifest, number):
            flags |= READ
        nbytes = storage_bytes(c.value)
        where = -1
        if (flags & (READ | WRITTEN) or keep) and flags and nbytes:
            where, offset = offset, align(offset + nbytes, 64)
            blocks.append(Block(where, c.value))
        dtype, sizes, strides = NAMES[c.value.dtype], tuple(c.value.shape), tuple(c.value.stride())
        rows += [ConstantRow(n, dtype, sizes, strides, nbytes, number, flags, c.type, where) for n in c.names]
    if not blocks and not state:
        return rows, Weights(bytes(16), 0, -1, 0, b"", ())
    return rows, Weights(identity(constants, rows, manifest), offset, state_offset, state, b"", tuple(blocks))


def _is_result(manifest: Manifest, number: int) -> bool:
    """Is this input returned, or viewed by a result?"""
    return any(
        (r["kind"] == "input" and r["of"] == number) or (r["kind"] == "view" and r["of"] == ["input", number]) for r in manifest.results
    )


def storage_bytes(t: torch.Tensor) -> int:
    """From the first to the last element."""
    if t.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def identity(constants: Sequence[Constant], rows: Sequence[ConstantRow], manifest: Manifest) -> bytes:
    """What ties a library to its weights: their content and their places."""
    h = hashlib.sha256(repr((rows, manifest.state)).encode())
    for c in constants:
        h.update(Block(0, c.value).content())
    return h.digest()[:16]


class _Tensor(ctypes.Structure):
    """tsm_tensor"""

    _fields_ = [
        ("data", ctypes.c_void_p), ("sizes", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("ndim", ctypes.c_int32), ("dtype", ctypes.c_int32), ("device", ctypes.c_int32), ("kind", ctypes.c_int32),
        ("block", ctypes.c_void_p),
    ]  # fmt: skip


def pack(library: bytes, rows: Sequence[ConstantRow], constants: Sequence[Constant], size: int) -> bytes:
    """Run prepare, once, here: the package stores what it computes."""
    by_name = {n: c.value for c in constants for n in c.names}
    wanted = {r.graph_input: r.fqn for r in rows if r.flags & (PREPARED | READ)}
    values = (_Tensor * (len(wanted) + 1))()
    names = (ctypes.c_char_p * (len(wanted) + 1))()
    for k, fqn in enumerate(wanted.values()):
        t = by_name[fqn]
        numbers = ctypes.c_int64 * max(1, t.dim())
        values[k] = _Tensor(t.data_ptr(), numbers(*t.shape), numbers(*t.stride()), t.dim(), DTYPE_ROWS[NAMES[t.dtype]], 0, 0, None)
        names[k] = fqn.encode()
    state = ctypes.create_string_buffer(size)
    with work_folder("torchsmith-pack-") as folder:
        path = folder / "model.so"
        path.write_bytes(library)
        lib = ctypes.CDLL(str(path))
        lib.tsm_last_error.restype = ctypes.c_char_p
        rc = lib.tsm_pack(names, values, ctypes.c_size_t(len(wanted)), state)
        if rc:
            raise Unsupported("AOT021", detail=lib.tsm_last_error().decode())
    return state.raw


# ---------------------------------------------------------------- info


def describe(entry: Entry, source: Source, rows: Sequence[ConstantRow], features: Sequence[str]) -> dict[str, Any]:
    """What `inspect` prints, and what loaders in Python read: plain JSON values."""
    inputs = [
        {"name": r.name, "dtype": r.dtype, "shape": [_size(e, entry.labels) for e in r.shape], "input": r.graph_input,
         "written": bool(source.manifest.inputs[r.graph_input].get("written"))}
        for r in input_rows(entry)
    ]
    ranges = {
        entry.labels.get(s.sym.name, s.sym.name): [s.lo, None if s.hi == LARGEST else s.hi]
        for s in entry.facts.symbols.values() if s.origin[0] in ("size", "stride")
    }  # fmt: skip
    return {
        "format": 1, "torchsmith": __version__, "name": entry.name, "inputs": inputs, "ranges": ranges,
        "conditions": [_said(cond, entry) for cond in entry.facts.beyond_ranges()],
        "arguments": [[a.name, None if a.placeholder is None else "tensor", plain(a.value)] for a in entry.arguments],
        "outputs": [None if leaf is not None else plain(v) for leaf, v in zip(entry.returned, entry.values, strict=True)],
        "returned": list(entry.returned), "described_outputs": described_outputs(entry),
        "results": source.manifest.results,
        "constants": [{"name": r.fqn, "dtype": r.dtype, "shape": list(r.sizes), "bytes": r.nbytes, "stored": r.offset >= 0} for r in rows],
        "kernels": list(source.origins),
        "operators": [f"{e.op} at {e.loc or 'an unknown line'}" for e in source.manifest.externs],
        "cpu": list(features), "device": source.target.device,
        "in_spec": json.loads(entry.in_spec), "out_spec": json.loads(entry.out_spec),
    }  # fmt: skip


def described_outputs(entry: Entry) -> list[str]:
    """Each returned leaf in words: "f32 [batch, 1]"."""
    fg = entry.functional
    nodes = {n.name: n for n in fg.graph.nodes}
    out = []
    for leaf, value in zip(entry.returned, entry.values, strict=True):
        if leaf is None:
            out.append(repr(value))
            continue
        o = fg.outputs[leaf]
        spec = nodes[o.node].meta["spec"] if isinstance(o, FreshOutput) else getattr(o, "spec", None)
        if isinstance(o, InputOutput):
            out.append("an input")
        elif isinstance(spec, TensorSpec):
            shape = ", ".join(str(_size(e, entry.labels)) for e in spec.shape)
            out.append(f"{NAMES[spec.dtype]} [{shape}]" + ("" if isinstance(o, FreshOutput) else ", a view"))
        else:
            out.append("a number")
    return out


def _size(e: Expr, labels: dict[str, str]) -> int | str:
    return int(e.value) if isinstance(e, Const) else print_condition(e, labels)
