"""Packages: one with sizes declared to vary against AOTInductor, ONNX Runtime, and against packages made for each size alone.

Every peer's file is made once for all sizes of a model; AOTInductor's and ONNX Runtime's are slow to make and kept in the user's
cache folder. `--prepare` fills that; `--resume` goes on behind the last size that was written. Runs pinned to cores (taskset) take as
many threads.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from paired import Protocol, geomean

from .harness import Row, child, keep_memory, load_rows, protocol_of, ratio_text, save

Size = tuple[int, ...]
PEERS = ("AOTInductor", "onnxruntime", "static")
LOADERS = ("torchsmith", "AOTInductor")
LOADS = 7  # fresh processes whose median is the load time
BAR, DYNAMIC, DYNAMIC_WORST, MAPPED = 0.9, 1.05, 1.10, 3
NOTE = (
    "One package for all sizes, loaded with torchsmith.aot.load_package. `vs`: the peer's time over ours (above 1: ours is faster), median "
    "of paired bursts with a bootstrap 95 % interval; static: our own package made for that size alone, so its ratio is 1 over (dynamic "
    "over static); alone: AOTInductor's package is one made for that size alone as well, because torch.export cannot leave the size open. "
    "malloc keeps what is freed. `error`: max|ours - eager| / max|eager|. Load: from a path to the loaded model, and to the first result "
    "at the smallest size, in a fresh process that has imported torch and the classes of the model's results, the file in the page "
    "cache; code: the package less its weights. "
    "Map: mmap of as many bytes of the package as the weights have; with MAP_POPULATE; with one byte of each page read."
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the sizes it is measured at, and where they stand in its inputs: `shapes` as dynamic_shapes, with names for the Dims."""

    make: Callable[[], Any]
    inputs: Callable[..., tuple[Any, ...]]
    sizes: tuple[Size, ...]
    shapes: Any
    ranges: dict[str, tuple[int, int]]
    example: Size
    timed: bool = True  # False: loading only


def _image(name: str, timed: bool = True) -> Case:
    def inputs(batch: int) -> tuple[Any, ...]:
        from models import inputs_of

        return inputs_of(name, batch)

    return Case(_model(name), inputs, ((1,), (5,), (16,)), ({0: "batch"},), {"batch": (1, 16)}, (2,), timed)


def _model(name: str) -> Callable[[], Any]:
    def make() -> Any:
        from models import make_model

        return make_model(name)

    return make


def _words(name: str) -> Case:
    def inputs(batch: int, length: int) -> tuple[Any, ...]:
        from models import TOKENS

        return (_tokens(TOKENS[name][0], batch, length),)

    sizes = ((1, 2), (1, 128), (3, 77), (8, 256))
    return Case(_model(name), inputs, sizes, ({0: "batch", 1: "length"},), {"batch": (1, 8), "length": (2, 256)}, (2, 96))


def _tokens(vocabulary: int, *shape: int) -> Any:
    import torch

    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(1000))


def _cached_decoder() -> Case:
    from decoder import HEADS, LAYERS, VOCABULARY, WIDTH

    def make() -> Any:
        import torch
        from decoder import CachedDecoder

        torch.manual_seed(2026)
        model = CachedDecoder().eval()
        model.bench_key = "cached_decoder-seed2026"  # type: ignore[assignment]
        return model

    def inputs(batch: int, past: int) -> tuple[Any, ...]:
        import torch

        generator = torch.Generator().manual_seed(1)
        cache = [torch.randn(batch, HEADS, past, WIDTH // HEADS, generator=generator) for _ in range(2 * LAYERS)]
        return _tokens(VOCABULARY, batch, 1), cache

    shapes = ({0: "batch"}, [{0: "batch", 2: "past"}] * (2 * LAYERS))
    return Case(make, inputs, ((1, 1), (1, 500), (3, 128), (4, 1000)), shapes, {"batch": (1, 4), "past": (1, 1000)}, (2, 40))


def _lstm() -> Case:
    def make() -> Any:
        import torch

        torch.manual_seed(2026)
        model = torch.nn.LSTM(128, 256, 2, batch_first=True).eval()
        model.bench_key = "lstm-seed2026"  # type: ignore[assignment]
        return model

    def inputs(batch: int, length: int) -> tuple[Any, ...]:
        import torch

        return (torch.randn(batch, length, 128, generator=torch.Generator().manual_seed(1)),)

    ranges = {"batch": (1, 16), "length": (2, 512)}
    return Case(make, inputs, ((1, 2), (1, 100), (8, 50), (16, 512)), ({0: "batch", 1: "length"},), ranges, (2, 30))


CASES: dict[str, Callable[[], Case]] = {
    "resnet50": lambda: _image("resnet50"), "BERT_pytorch": lambda: _words("BERT_pytorch"), "mobilenet_v2": lambda: _image("mobilenet_v2"),
    "timm_vision_transformer": lambda: _image("timm_vision_transformer"), "lstm": _lstm, "cached_decoder": _cached_decoder,
    "resnet18": lambda: _image("resnet18", timed=False),
}  # fmt: skip


def dims(shapes: Any, ranges: dict[str, tuple[int, int]], make: Callable[..., Any]) -> Any:
    """`shapes` with Dims in place of names."""
    table = {n: make(n, min=lo, max=hi) for n, (lo, hi) in ranges.items()}

    def go(x: Any) -> Any:
        if isinstance(x, str):
            return table[x]
        if isinstance(x, dict):
            return {k: go(v) for k, v in x.items()}
        return type(x)(map(go, x)) if isinstance(x, list | tuple) else x

    return go(shapes)


# ---------------------------------------------------------------- files
def our_package(case: Case, model: Any, folder: str, size: Size | None = None) -> str:
    """Path of our package, for all sizes or for one."""
    import torchsmith

    shapes = None if size else dims(case.shapes, case.ranges, torchsmith.export.Dim)
    program = torchsmith.export.export(model, case.inputs(*(size or case.example)), dynamic_shapes=shapes)
    path = str(Path(folder) / f"ours{'-'.join(map(str, size or ()))}.pt2")
    return torchsmith.aot.compile_and_package(program, package_path=path)


def inductor_package(case: Case, model: Any, size: Size | None = None) -> str:
    """Path of AOTInductor's package, for all sizes or for one; kept. The process must have set TORCHINDUCTOR_FREEZING=1 at its start."""
    import torch
    from peers import cache_folder
    from torch._inductor import config

    if not config.freezing:
        raise RuntimeError("run this in a process that sets TORCHINDUCTOR_FREEZING=1 at its start")
    sizes = "-".join(map(str, size)) if size else "-".join(f"{lo}to{hi}" for lo, hi in case.ranges.values())
    path = cache_folder(model, "torch") / f"{model.bench_key}-aotinductor-freezing-{sizes}.pt2"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shapes = None if size else dims(case.shapes, case.ranges, torch.export.Dim)
        with torch.no_grad(), warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
            warnings.simplefilter("ignore")
            program = torch.export.export(model, case.inputs(*(size or case.example)), dynamic_shapes=shapes)
            made = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "model.pt2"))
            Path(made).replace(path)
    return str(path)


def onnx_file(case: Case, model: Any) -> str:
    """Path of the model as ONNX, for all sizes. What torch.export cannot take with varying sizes (it unrolls an LSTM over time) goes
    through the older exporter, which has ONNX's own LSTM."""
    import torch
    from peers import exported

    ranges = {n: (lo, hi) for n, (lo, hi) in case.ranges.items()}
    inputs = case.inputs(*case.example)
    try:
        return exported(model, inputs, dims(case.shapes, ranges, torch.export.Dim))
    except torch.onnx.errors.OnnxExporterError:
        return exported(model, inputs, case.shapes, dynamo=False)


# ---------------------------------------------------------------- one process each
def run_case(case: dict[str, Any]) -> Row:
    return {"time": _time, "load": _load, "make": _make, "map": _map}[case["what"]](case)


def _map(case: dict[str, Any]) -> Row:
    """Seconds to map as many bytes of a file as the model's weights have: the mapping alone; with all pages; with a byte of each read."""
    out, plain = {}, mmap.MAP_PRIVATE
    with Path(case["path"]).open("rb") as file:
        for how, flags in (("map_s", plain), ("populate_s", plain | mmap.MAP_POPULATE), ("touch_s", plain)):
            began = time.perf_counter()
            with mmap.mmap(file.fileno(), case["bytes"], flags, mmap.PROT_READ) as memory:
                if how == "touch_s":
                    memory[:: mmap.PAGESIZE]
                out[how] = time.perf_counter() - began
    return out


def _make(case: dict[str, Any]) -> Row:
    """A peer's file, and what of it is code: bytes of the package less its weights."""
    known = CASES[case["model"]]()
    model = known.make()
    began, grown = time.process_time(), _children()
    size = tuple(case["size"]) if case.get("size") else None
    if case["who"] == "AOTInductor":
        path = inductor_package(known, model, size)
    elif case["who"] == "onnxruntime":
        path = onnx_file(known, model)
    else:
        path = our_package(known, model, case["folder"])
    kept = [t.untyped_storage() for t in itertools.chain(model.parameters(), model.buffers())]
    weights = {s.data_ptr(): s.nbytes() for s in kept}
    took = _first(Path(path), round(time.process_time() - began + _children() - grown, 2))
    found = {"path": path, "cpu_s": took, "bytes": Path(path).stat().st_size, "weights": sum(weights.values())}
    return found | ({"classes": _classes(path)} if case["who"] == "torchsmith" else {})


def _classes(path: str) -> list[str]:
    """Modules that whoever loads the package must have imported, because the model returns objects of their classes."""
    from torchsmith.runtime.package import Loaded

    def kinds(spec: Any) -> Iterator[str]:
        if isinstance(spec, dict):
            yield from [spec["type"]] if isinstance(spec.get("type"), str) else []
            spec = spec.get("children_spec")
        for part in spec if isinstance(spec, list) else ():
            yield from kinds(part)

    info = Loaded(path).info
    found = {k.rpartition(".")[0] for k in kinds([info["in_spec"], info["out_spec"]])}
    return sorted(m for m in found if m and m.partition(".")[0] not in ("builtins", "collections", "torch"))


def _children() -> float:
    """CPU seconds of the processes that this one started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _first(path: Path, took: float) -> float:
    """What making `path` took when it was made: a file that was kept costs nothing the next time."""
    note = path.with_suffix(".cpu_s")
    if not note.exists() or note.stat().st_mtime < path.stat().st_mtime:
        note.write_text(str(took))
    return float(note.read_text())


def _load(case: dict[str, Any]) -> Row:
    """Seconds until the loaded model has answered once, and by how much the process has grown."""
    import torch

    for module in case["classes"]:
        import_module(module)
    inputs = CASES[case["model"]]().inputs(*case["size"])
    if case["who"] == "torchsmith":
        import torchsmith.aot

        load = torchsmith.aot.load_package
    else:
        import torch._inductor

        load = torch._inductor.aoti_load_package
    with torch.no_grad():
        before, began = _resident(), time.perf_counter()
        model = load(case["path"])
        loaded = time.perf_counter() - began
        model(*inputs)
        return {"load_s": loaded, "first_s": time.perf_counter() - began, "rss": _resident() - before}


def _resident() -> int:
    """Bytes of memory of this process."""
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().split("\n") if line.startswith("VmRSS"))


def _time(case: dict[str, Any]) -> Row:
    """One model at one size: ours with varying sizes against the others."""
    import peers
    import torch
    from paired import compare, is_noisy

    import torchsmith
    from models import tensors_of, worst_error

    keep_memory()  # else results of some megabytes are fresh pages for whoever called malloc in the worse order
    known, protocol, size = CASES[case["model"]](), Protocol(**case["protocol"]), tuple(case["size"])
    model, inputs = known.make(), known.inputs(*size)
    flat = list(tensors_of(inputs))
    row: Row = {"peers": {}, "failed": {}, "error": {}}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        want = model(*inputs)

        def loaded(path: str) -> Callable[[], Any]:
            run = torchsmith.aot.load_package(path)
            return lambda: run(*inputs)

        def inductor() -> Callable[[], Any]:
            run = torch._inductor.aoti_load_package(case["paths"]["AOTInductor"])
            return lambda: run(*inputs)

        def onnx() -> Callable[[], Any]:
            import onnxruntime as ort

            settings = ort.SessionOptions()
            settings.intra_op_num_threads = peers.THREADS
            session = ort.InferenceSession(case["paths"]["onnxruntime"], settings, providers=["CPUExecutionProvider"])
            feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), flat, strict=True)}
            return lambda: [torch.from_numpy(a) for a in session.run(None, feed)]

        makers: dict[str, Callable[[], Callable[[], Any]]] = {
            "torchsmith": lambda: loaded(case["paths"]["torchsmith"]), "AOTInductor": inductor, "onnxruntime": onnx,
            "static": lambda: loaded(our_package(known, model, folder, size)),
        }  # fmt: skip
        runners = {}
        for who in ("torchsmith", *case["peers"]):
            try:
                run = makers[who]()
                row["error"][who] = worst_error(want, list(tensors_of(run()))[: len(list(tensors_of(want)))])
                runners[who] = run
            except Exception as e:  # a peer that cannot take a model or a size is a line in the table
                row["failed"][who] = f"{type(e).__name__}: {str(e)[:200]}"
        ours = runners.pop("torchsmith", None)
        for _ in range(2):
            if ours is None:
                break
            control = compare(ours, ours, protocol)
            row["control"], row["noisy"] = control.as_dict(), is_noisy(control)
            row["peers"] = {who: compare(ours, run, protocol).as_dict() for who, run in runners.items()}
            if not row["noisy"]:
                break
    return row


# ---------------------------------------------------------------- the suite
def suite(args: argparse.Namespace) -> list[Row]:
    rows = load_rows(args.out, "aot") if args.resume else []
    peers = [p for p in PEERS if p in (*args.peers, "AOTInductor", "static")]

    def keep() -> None:
        if not args.prepare:
            save(args.out, "aot", rows, table(rows), NOTE)

    for name in [m for m in args.models if m in CASES] or list(CASES):
        row = next((r for r in rows if r["model"] == name), None)
        if row is None:
            row = {"model": name, "sizes": [], "load": {}, "made": {}}
            rows.append(row)
        if "map" in row["load"]:  # what a row gets last
            continue
        with tempfile.TemporaryDirectory() as folder:
            _fill_row(args, row, peers, folder, keep)
        keep()
        if args.prepare:
            print(name, {who: made.get("error", made.get("cpu_s")) for who, made in row["made"].items()}, flush=True)
    if args.prepare:
        save(args.out, "aot", [], "nothing timed", NOTE)
    return rows


def _fill_row(args: argparse.Namespace, row: Row, peers: list[str], folder: str, keep: Callable[[], None]) -> None:
    """Everything about one model that `row` lacks: files, latency per size (kept after each), loading."""
    name = row["model"]
    case = CASES[name]()

    def make(who: str, size: Size | None = None) -> Row:
        one = {"suite": "aot", "what": "make", "model": name, "who": who, "folder": folder, "size": size}
        return child(one, {"TORCHINDUCTOR_FREEZING": "1"})

    makers = [p for p in ("torchsmith", *peers) if p != "static" and (case.timed or p in LOADERS)]
    row["made"] = {who: make(who) for who in makers}
    alone = "path" not in row["made"].get("AOTInductor", {"path": ""})  # it cannot take the model with varying sizes: a package for each
    each = [make("AOTInductor", size) for size in case.sizes if case.timed] if alone else []
    paths = {who: made.pop("path") for who, made in row["made"].items() if "path" in made}
    if args.prepare:
        return
    for n, size in enumerate(case.sizes if case.timed else ()):
        if n < len(row["sizes"]):
            continue
        here = paths | ({"AOTInductor": each[n]["path"]} if alone and "path" in each[n] else {})
        who = [p for p in peers if p == "static" or p in here]
        one = {"suite": "aot", "what": "time", "model": name, "size": size, "paths": here, "peers": who, "protocol": protocol_of(args)}
        row["sizes"].append({"size": size, "alone": alone} | child(one))
        print(table([row]).split("\n")[2 + n], flush=True)
        keep()
    if alone and each and "path" in each[0]:
        row["made"]["AOTInductor"], paths["AOTInductor"] = each[0], each[0].pop("path")
    for loader in LOADERS:
        if loader in paths:
            one = {"suite": "aot", "what": "load", "model": name, "who": loader, "path": paths[loader], "size": case.sizes[0],
                   "classes": row["made"]["torchsmith"].get("classes", ())}  # fmt: skip
            row["load"][loader] = _medians([child(one) for _ in range(2 if args.quick else LOADS)])
    if "torchsmith" in paths:
        one = {"suite": "aot", "what": "map", "path": paths["torchsmith"], "bytes": row["made"]["torchsmith"]["weights"]}
        row["load"]["map"] = _medians([child(one) for _ in range(2 if args.quick else LOADS)])


def _medians(found: list[Row]) -> Row:
    good = [r for r in found if "error" not in r]
    return {k: statistics.median(r[k] for r in good) for k in good[0]} if good else found[0]


def table(rows: list[Row]) -> str:
    """A line per model and size; then loading and sizes of files; then the bars."""
    titles = ["model", "size", "ours ms", "static ms", *(f"vs {p} [95 %]" for p in PEERS), "A/A", "error"]
    out = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for r in rows:
        for s in r["sizes"]:
            where = f"| {r['model']} | {'x'.join(map(str, s['size']))} |"
            if "control" not in s:
                why = s["failed"].get("torchsmith", "-") if "failed" in s else s.get("error", "-")
                out.append(f"{where} failed: {why[-160:]} |")
                continue
            cells = [ratio_text(s, p) + (" alone" if p == "AOTInductor" and s.get("alone") and p in s["peers"] else "") for p in PEERS]
            control = f"{s['control']['ratio']:.3f}{' too noisy' if s['noisy'] else ''}"
            static = f"{s['peers']['static']['b_ms']:.3g}" if "static" in s["peers"] else "-"
            ms = [f"{s['control']['a_ms']:.3g}", static]
            out.append(f"{where} " + " | ".join([*ms, *cells, control, f"{s['error']['torchsmith']:.1e}"]) + " |")
    titles = ["model", *(f"{w}: load ms, first result ms, grown MB, code KB, CPU s to make" for w in LOADERS),
              "weights MB, ms to map, populate, touch"]  # fmt: skip
    out += ["", "| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for r in rows:
        cells = []
        for w in LOADERS:
            load, made = r["load"].get(w, {}), r["made"].get(w, {})
            if "load_s" not in load or "bytes" not in made:
                cells.append(f"failed: {str(load.get('error', made.get('error', '-')))[-120:]}")
                continue
            code = (made["bytes"] - made["weights"]) / 1e3
            times = f"{load['load_s'] * 1e3:.1f}, {load['first_s'] * 1e3:.1f}"
            cells.append(f"{times}, {load['rss'] / 1e6:.0f}, {code:.0f}, {made['cpu_s']:.1f}")
        mapped = r["load"].get("map", {})
        if "map_s" in mapped:
            ms = ", ".join(f"{mapped[k] * 1e3:.2f}" for k in ("map_s", "populate_s", "touch_s"))
            cells.append(f"{r['made']['torchsmith']['weights'] / 1e6:.0f}, {ms}")
        else:
            cells.append("-")
        out.append(f"| {r['model']} | " + " | ".join(cells) + " |")
    return "\n".join([*out, "", *_bars(rows)])


def _bars(rows: list[Row]) -> list[str]:
    cells = [(f"{r['model']} {'x'.join(map(str, s['size']))}", s.get("peers", {})) for r in rows for s in r["sizes"]]
    out = []
    for p in PEERS:
        found = {name: m[p]["ratio"] for name, m in cells if p in m}
        if not found:
            continue
        if p == "static":
            over = {name: 1 / v for name, v in found.items()}
            worst = max(over, key=lambda n: over[n])
            text = f"geomean {geomean(list(over.values())):.3f} (bar {DYNAMIC}), worst {worst} {over[worst]:.2f} (bar {DYNAMIC_WORST})"
            out.append(f"- dynamic over static: {text}")
        else:
            worst = min(found, key=lambda n: found[n])
            missing = [name for name, m in cells if p not in m]
            text = f"geomean {geomean(list(found.values())):.2f} (bar 1), least {worst} {found[worst]:.2f} (bar {BAR}), of {len(found)}"
            out.append(f"- against {p}: {text}" + (f"; without {', '.join(missing)}" if missing else ""))
    loads = [(r["model"], r["load"]["AOTInductor"]["load_s"] / r["load"]["torchsmith"]["load_s"]) for r in rows
             if all("load_s" in r["load"].get(w, {}) for w in LOADERS)]  # fmt: skip
    if loads:
        least = min(loads, key=lambda x: x[1])
        out.append(f"- load time of AOTInductor over ours: geomean {geomean([v for _, v in loads]):.2f}, least {least[0]} {least[1]:.2f}")
    for r in rows:
        load, mapped = r["load"].get("torchsmith", {}), r["load"].get("map", {})
        if r["model"] == "resnet18" and "load_s" in load and "map_s" in mapped:
            times = ", ".join(f"{load['load_s'] / mapped[k]:.2f} x to {k[:-2]}" for k in ("map_s", "populate_s", "touch_s"))
            out.append(f"- resnet18: loading takes {times} its weights (bar {MAPPED} x)")
    return out
