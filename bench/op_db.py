"""Every float32 entry of torch's own operator database, compiled by torchsmith and compared with eager.

In: the entries of torch.testing._internal.common_methods_invocations.op_db, the first three samples of each. Out: one JSON line per entry
while it runs, then bench/results/op_db.json and op_db.md. Entries run in worker processes, so a crash or a hang is a result and not an end.

    python bench/op_db.py                      # everything, two workers
    python bench/op_db.py --only add --only "nn.functional.*"
    python bench/op_db.py --sample 40          # a random sample of entries (seeded by the day; --seed fixes it)
    python bench/op_db.py --backend eager      # capture and guards alone
    python bench/op_db.py --compiler direct    # without capture (bench/direct.py)
    python bench/op_db.py --resume             # go on where the last run stopped
    python bench/op_db.py --dtype int64 --dynamic --inplace --layout ones       # other dtypes, sizes as symbols, in place, sizes of 1
    python bench/op_db.py --device cuda --dtype float16 bfloat16 --procs 32 --timeout 40 --seconds 270   # on a GPU: a table for each dtype
    python bench/op_db.py --errors             # the arguments that the database knows eager to refuse
    python bench/op_db.py --gradients outside --dtype float64   # derivatives under eager's autograd; inside: in the compiled function

What is compared, per sample, on the compiling call and again on the next one: the structure and type of the result, dtype, shape, strides
of dimensions larger than 1, device, whether a result is a view of (or is) an input, the values, and the inputs afterwards. Values:
torch.testing.assert_close with its defaults for the dtype (float32: rtol 1.3e-6, atol 1e-5; NaNs equal); a value outside of them that is
not more than twice as far from a float64 run as eager's own is called "rounding" and listed. Random operators draw under the same seed.
Where values differ eager is asked once more, from other memory: what it does not say twice it has not defined, and is not compared.
Where eager raises, the compiled function has to raise the same type of exception; else the verdict is "raises". With --gradients the
results and their derivatives (of the entry's own choice of what can be differentiated, for random gradients) are compared.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if importlib.util.find_spec("torchsmith") is None:  # not installed: the checkout beside this folder
    sys.path.insert(0, str(HERE.parent / "src"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path.insert(0, str(HERE))
DEFAULT_OUT = HERE / "results" / "op_db"

from crew import environments  # noqa: E402  (the script's own folder comes first)

# Their values are whatever was in memory: only metadata can be compared.
_UNINITIALISED = """resize_ resize_as_ empty empty_like empty_strided empty_permuted new_empty new_empty_strided"""
UNINITIALISED = frozenset(_UNINITIALISED.split())


# ---------------------------------------------------------------- worker: one entry after the other
@dataclass(frozen=True)
class Way:
    """How the entries are called: dtype; dynamic: sizes are symbols; inplace: the in-place variants; layout: a key of LAYOUTS; errors: the
    database's error inputs; gradients: "outside" (eager's autograd goes back), "inside" (the compiled function does) or ""."""

    dtype: str = "float32"
    dynamic: bool = False
    inplace: bool = False
    layout: str = "given"
    errors: bool = False
    gradients: str = ""
    device: str = "cpu"


def transposed(t: Any, sample: int) -> Any:
    """Other strides: the last two dimensions exchanged in memory, or every other element."""
    import torch

    if t.dim() >= 2:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    return torch.stack([t, t], -1)[..., 0] if t.dim() else t


def of_size(n: int) -> Callable[[Any, int], Any]:
    """Dimensions cut to n elements: all of them, the last or the first one, by the sample's number."""

    def cut(t: Any, sample: int) -> Any:
        if not t.dim():
            return t
        for d in {0: range(t.dim()), 1: (t.dim() - 1,), 2: (0,)}[sample % 3]:
            t = t.narrow(d, 0, min(n, t.shape[d]))
        return t.contiguous()

    return cut


LAYOUTS: dict[str, Callable[[Any, int], Any]] = {
    "given": lambda t, sample: t, "strided": transposed, "ones": of_size(1), "zeros": of_size(0),
}  # fmt: skip


def entry_names(way: Way) -> list[str]:
    return [name for name, _ in entries(way)]


def entries(way: Way) -> list[tuple[str, Any]]:
    import torch
    from torch.testing._internal import common_methods_invocations as database

    # Random entries seed themselves inside of the operator; here the harness seeds, and the operator alone is compiled.
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    found = []
    for op in database.op_db:
        suits = op.error_inputs_func is not None if way.errors else getattr(torch, way.dtype) in op.supported_dtypes(way.device)
        if way.gradients:
            suits = suits and op.supports_autograd and getattr(torch, way.dtype) in op.supported_backward_dtypes(way.device)
        if suits and (not way.inplace or op.inplace_variant is not None):
            found.append((f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name, op))
    return found


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from leaves(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from leaves(v)
    else:
        yield value


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy that keeps strides and dtypes of tensors, and that an object met twice is one object."""
    import torch

    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.numel() and not value.is_conj() and not value.is_neg():
            size = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
            flat = torch.as_strided(value.detach(), (size,), (1,), value.storage_offset()).clone()
            new = torch.as_strided(flat, value.shape, value.stride()).requires_grad_(value.requires_grad)
        else:
            new = value.detach().clone().requires_grad_(value.requires_grad)
    elif isinstance(value, (tuple, list)):
        parts = [copied(v, memo) for v in value]
        new = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif isinstance(value, dict):
        new = {k: copied(v, memo) for k, v in value.items()}
    else:
        new = value
    memo[id(value)] = new
    return new


def to_double(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        if value.dtype in (torch.float32, torch.float16, torch.bfloat16):
            return value.detach().to(torch.float64).requires_grad_(value.requires_grad)
        if value.dtype == torch.complex64:
            return value.detach().to(torch.complex128).requires_grad_(value.requires_grad)
        return value
    if value is torch.float32:
        return torch.float64
    if isinstance(value, (tuple, list)):
        return type(value)(to_double(v) for v in value)
    if isinstance(value, dict):
        return {k: to_double(v) for k, v in value.items()}
    return value


def aliasing(result: Any, inputs: list[Any]) -> list[Any]:
    """For each tensor of the result: ("is", i), ("view", i) or None: what it shares with input i."""
    import torch

    def storage(t: Any) -> int:
        kept = t.layout is torch.strided and not t._is_zerotensor() and t.untyped_storage().nbytes()
        return t.untyped_storage().data_ptr() if kept else 0

    homes = {storage(t): i for i, t in reversed(list(enumerate(inputs))) if storage(t)}
    said = []
    for r in leaves(result):
        if isinstance(r, torch.Tensor):
            same = next((i for i, t in enumerate(inputs) if t is r), None)
            said.append(("is", same) if same is not None else ("view", homes[storage(r)]) if storage(r) in homes else None)
    return said


def difference(want: Any, got: Any, values: bool, undefined: frozenset[int] = frozenset()) -> tuple[str, str]:
    """("", "") when equal, else (kind, sentence); kinds: type, meta, strides, value. undefined: ids of tensors of `want` that may hold
    anything."""
    import torch

    if isinstance(want, torch.Tensor):
        if type(got) is not type(want):
            return "type", f"{type(got).__name__} instead of {type(want).__name__}"
        for what in ("dtype", "shape", "device", "layout", "requires_grad"):
            if getattr(want, what) != getattr(got, what):
                return "meta", f"{what} {getattr(got, what)} instead of {getattr(want, what)}"
        if want.layout is torch.strided and want.numel():
            wide = [d for d, n in enumerate(want.shape) if n > 1]
            if [want.stride(d) for d in wide] != [got.stride(d) for d in wide]:
                return "strides", f"strides {got.stride()} instead of {want.stride()} for shape {tuple(want.shape)}"
        if values and id(want) not in undefined:
            try:
                torch.testing.assert_close(got, want, equal_nan=True)
            except AssertionError as e:
                return "value", " ".join(str(e).split())
        return "", ""
    if type(got) is not type(want):
        return "type", f"{type(got).__name__} instead of {type(want).__name__}"
    if isinstance(want, (tuple, list)):
        if len(want) != len(got):
            return "type", f"{len(got)} results instead of {len(want)}"
        for w, g in zip(want, got, strict=True):
            kind, why = difference(w, g, values, undefined)
            if kind:
                return kind, why
        return "", ""
    if isinstance(want, dict):
        return difference(list(want.items()), list(got.items()), values, undefined)
    if isinstance(want, float):
        same = math.isclose(want, got, rel_tol=1.3e-6, abs_tol=1e-5) or (math.isnan(want) and math.isnan(got))
    else:
        same = bool(want == got)
    return ("", "") if same or not values else ("value", f"{got!r} instead of {want!r}")


def strew(device: str, value: int) -> None:
    """Memory that is handed out next holds this number."""
    import torch

    kept = [torch.full((n,), value, dtype=torch.int64, device=device) for n in (1, 8, 64, 512, 4096) for _ in range(8)]
    kept.clear()


def unlike(first: Any, second: Any) -> frozenset[int]:
    """Ids of the tensors of `first` that another run has given other values."""
    import torch

    pairs = zip(leaves(first), leaves(second), strict=True)
    return frozenset(id(a) for a, b in pairs if isinstance(a, torch.Tensor) and difference(a, b, True)[0] == "value")


def is_bit_equal(want: Any, got: Any) -> bool:
    import torch

    pairs = zip(leaves(want), leaves(got), strict=True)
    return all(torch.equal(torch.nan_to_num(w), torch.nan_to_num(g)) for w, g in pairs
               if isinstance(w, torch.Tensor) and w.layout is torch.strided and not w.dtype.is_complex)  # fmt: skip


def is_rounding(exact: Any, want: Any, got: Any, undefined: frozenset[int] = frozenset()) -> bool:
    """Is `got` no farther from a float64 run than twice eager's distance?"""
    import torch

    for e, w, g in zip(leaves(exact), leaves(want), leaves(got), strict=True):
        if id(w) in undefined:
            continue
        if not isinstance(w, torch.Tensor) or not (w.dtype.is_floating_point or w.dtype.is_complex):
            if isinstance(w, torch.Tensor) and not torch.equal(w, g):
                return False
            continue
        if w.dtype.is_complex:
            e, w, g = torch.view_as_real(e), torch.view_as_real(w.resolve_conj()), torch.view_as_real(g.resolve_conj())
        if e.shape != w.shape or not torch.equal(torch.isnan(w), torch.isnan(g)):
            return False
        ours, eagers = (g.double() - e).abs().nan_to_num(0.0), (w.double() - e).abs().nan_to_num(0.0)
        if not bool((ours.max() <= 2 * eagers.max() + 1e-12) if ours.numel() else True):
            return False
    return True


Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class Peer:
    """The compiler under test and what it reports of one compilation."""

    def __init__(self, name: str, backend: str, way: Way) -> None:
        self.name, self.backend, self.way = name, backend, way
        home = {"torchsmith": "torchsmith", "direct": "direct", "torch": "torch"}[name]
        self.module: Any = importlib.import_module(home)

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return self.module.compile(fn, backend=self.backend, **({"dynamic": True} if self.way.dynamic else {}))

    def reset(self) -> None:
        if self.name != "direct":
            self.module.compiler.reset()

    def observe(self, call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        """Run a compiling call; its result and {graphs, breaks, fallbacks, externs, kernels}."""
        if self.name != "torch":
            from torchsmith import events
            from torchsmith.debug.explain import NOTES

            with events.recording() as got:
                result = call()
            return result, summary(got, NOTES)
        from torch._dynamo.utils import counters

        counters.clear()
        result = call()
        breaks = [f"TORCH {' '.join(k.split())[:80]}" for k in counters["graph_break"]]
        graphs = counters["stats"]["unique_graphs"]
        return result, {"graphs": graphs, "breaks": breaks, "fallbacks": [], "externs": [], "kernels": 0, "notes": []}


def summary(events: list[Any], notes: frozenset[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {"graphs": 0, "breaks": [], "fallbacks": [], "externs": [], "kernels": 0, "notes": []}
    for event in events:
        f = event.fields
        code = str(f.get("code", ""))
        at = str(f.get("loc") or f.get("at") or "").removeprefix(f"{HERE.parent}{os.sep}")
        text = " ".join(str(x) for x in (code, at, f.get("detail") or f.get("op")) if x)
        if event.kind == "graph":
            seen["graphs"] += 1
            seen["kernels"] += f["report"].kernels
            seen["externs"] += f["report"].externs
        elif event.kind == "graph_break":
            seen["breaks"].append(text)
        elif event.kind == "fallback":
            seen["notes" if code in notes else "fallbacks"].append(text)
    return seen


def check_sample(peer: Peer, op: Any, sample: Any, number: int, values: bool) -> dict[str, Any]:
    import torch

    target = op.inplace_variant if peer.way.inplace else op.op
    inside, outside = peer.way.gradients == "inside", peer.way.gradients == "outside"
    if peer.way.gradients:
        called, process = target, sample.output_process_fn_grad

        def target(*args: Any, **kwargs: Any) -> Any:
            return process(called(*args, **kwargs))

    lay = LAYOUTS[peer.way.layout]
    given = mapped((sample.input, tuple(sample.args), dict(sample.kwargs)), lambda t: lay(t, number))

    def run(fn: Callable[..., Any]) -> tuple[Any, list[Any], Any]:
        first, args, kwargs = copied(given)
        torch.manual_seed(1000 + number)
        tensors = [t for t in leaves((first, args, kwargs)) if isinstance(t, torch.Tensor)]
        if outside:
            result = fn(first, *args, **kwargs)
            return (result, derivatives(result, list(leaves(tensors)))), tensors, aliasing(result, tensors)
        result = fn(first, *args, **kwargs)
        return result, tensors, aliasing(result, tensors)

    def entry(*args: Any, **kwargs: Any) -> Any:
        if inside:
            result = target(*args, **kwargs)
            return result, derivatives(result, listed([args, kwargs]))
        return target(*args, **kwargs)

    refused: Exception | None = None
    try:
        want, want_inputs, want_alias = run(entry)
    except Exception as e:  # what eager refuses is refused alike
        want, refused = None, e
    peer.reset()
    compiled = peer.compile(entry)
    if refused is not None:
        try:
            run(compiled)
        except Exception as e:
            if type(e) is type(refused):
                return {"verdict": "equal", "bits": True}
            instead = f"{type(e).__name__}: {str(e)[:150]}"
        else:
            instead = "nothing"
        return {"verdict": "raises", "why": f"{instead} instead of {type(refused).__name__}: {str(refused)[:200]}"}
    began = time.perf_counter()
    row: dict[str, Any] = {}
    for call in ("first", "second"):
        try:
            if call == "first":
                (got, got_inputs, got_alias), row = peer.observe(lambda: run(compiled))
                row["seconds"] = round(time.perf_counter() - began, 3)
            else:
                got, got_inputs, got_alias = run(compiled)
        except Exception as e:  # an error where eager has none is a result
            last = traceback.extract_tb(e.__traceback__)[-1]
            why = f"{type(e).__name__}: {str(e)[:300]} [{Path(last.filename).name}:{last.lineno}]"
            return {**row, "verdict": "error", "why": f"{call} call: {why}"}
        kind, why = compared((want, want_inputs, want_alias), (got, got_inputs, got_alias), values)
        if kind == "value":
            undefined: frozenset[int] = frozenset()
            for number_in_memory in (-1, 0x4D4D4D4D4D4D4D4D):
                strew(peer.way.device, number_in_memory)
                again, again_inputs, _ = run(entry)
                undefined |= unlike(want, again) | unlike(want_inputs, again_inputs)
            kind, why = compared((want, want_inputs, want_alias), (got, got_inputs, got_alias), values, undefined)
        if kind:
            if kind == "value":
                exact = in_double(entry, given, outside)
                kind = "rounding" if exact and is_rounding(exact, (want, want_inputs), (got, got_inputs), undefined) else "value"
            return {**row, "verdict": kind, "why": f"{call} call: {why}"[:400]}
    own = next((t for t in row.get("fallbacks", ()) if t.startswith("API005")), "")  # right, as eager was called
    return {**row, "verdict": "error", "why": own} if own else {**row, "verdict": "equal", "bits": is_bit_equal(want, got)}


def in_double(entry: Callable[..., Any], given: Any, outside: bool) -> Any:
    """A float64 run's result and inputs afterwards; of contiguous operands where eager refuses others. None: there is no such run."""
    for lay in (lambda t: t, lambda t: t.contiguous()):
        first, args, kwargs = to_double(mapped(copied(given), lay))
        try:
            result = entry(first, *args, **kwargs)
            if outside:
                result = result, derivatives(result, listed([first, args, kwargs]))
        except Exception:  # the next way, if any
            continue
        return result, [t for t in leaves((first, args, kwargs)) if is_tensor(t)]
    return None


def is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


Ran = tuple[Any, list[Any], list[Any]]  # result, inputs afterwards, what shares memory


def compared(want: Ran, got: Ran, values: bool, undefined: frozenset[int] = frozenset()) -> tuple[str, str]:
    """`difference` of all that a call does."""
    kind, why = difference(want[0], got[0], values, undefined)
    if not kind and got[2] != want[2]:
        kind, why = "alias", f"result shares memory as {got[2]} instead of {want[2]}"
    if not kind:
        kind, why = difference(want[1], got[1], True, undefined)
        why = why and f"input afterwards: {why}"
    return kind, why


def listed(value: Any) -> list[Any]:
    """`leaves` for compiled functions."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [x for v in value for x in listed(v)]
    return [value]


def derivatives(result: Any, inputs: list[Any]) -> Any:
    """Of every result that has one, by every input that wants one; the gradients that come in differ from element to element."""
    import torch

    outs = [t for t in listed(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outs or not wanted:
        return ()
    given = [torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).view(t.shape).to(t.dtype) for t in outs]
    return torch.autograd.grad(outs, wanted, given, allow_unused=True)


def mapped(value: Any, fn: Callable[[Any], Any]) -> Any:
    """The same nest with fn of every dense tensor."""
    import torch

    if isinstance(value, torch.Tensor):
        return fn(value) if value.layout is torch.strided else value
    if isinstance(value, (tuple, list)):
        parts = [mapped(v, fn) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return {k: mapped(v, fn) for k, v in value.items()} if isinstance(value, dict) else value


def samples_of(way: Way, op: Any) -> Iterator[Any]:
    import torch

    if way.errors:
        return (e.sample_input for e in op.error_inputs(way.device))
    return iter(op.sample_inputs(way.device, getattr(torch, way.dtype), requires_grad=bool(way.gradients)))


def check_entry(peer: Peer, name: str, op: Any, samples: range) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(samples_of(peer.way, op)):
            if number == samples.stop:
                break
            if number not in samples or (peer.way.inplace and getattr(sample, "broadcasts_input", False)):
                continue
            state = torch.get_rng_state()
            rows.append(check_sample(peer, op, sample, number, op.name not in UNINITIALISED))
            torch.set_rng_state(state)
    return {"name": name, **verdict_of(rows), "samples": rows}


WORST = ("crash", "timeout", "error", "value", "raises", "type", "meta", "alias", "strides", "rounding", "equal", "skipped")
WRONG = frozenset({"value", "raises", "type", "meta", "alias", "strides"})


def verdict_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry's line from its samples'."""
    ran = [r for r in rows if r["verdict"] != "skipped"]
    if not ran:
        return {"verdict": "skipped", "one_graph": False, "native": False, "codes": [], "externs": []}
    verdict = min((r["verdict"] for r in ran), key=WORST.index)
    whole = all(r.get("graphs", 0) <= 1 and not r.get("breaks") and not r.get("fallbacks") for r in ran)
    externs = sorted({e for r in ran for e in r.get("externs", ())})
    codes = sorted({t.split(" ")[0] for r in ran for t in (*r.get("breaks", ()), *r.get("fallbacks", ()))})
    fine = verdict in ("equal", "rounding")
    return {"verdict": verdict, "one_graph": fine and whole, "native": fine and whole and not externs, "codes": codes, "externs": externs}


def work(todo: Path, out: Path, args: argparse.Namespace, samples: range, way: Way) -> None:
    import torch

    torch.set_num_threads(1)
    with ExitStack() as stack:
        if args.unoptimized:
            import unoptimized

            unoptimized.use(stack)
        check_entries(todo.read_text().split("\n"), out, Peer(args.compiler, args.backend, way), samples)


def check_entries(names: list[str], out: Path, peer: Peer, samples: range) -> None:
    table = dict(entries(peer.way))
    with out.open("a") as f:
        for name in names:
            print(json.dumps({"start": name}), file=f, flush=True)
            try:
                row = check_entry(peer, name, table[name], samples)
            except Exception as e:  # making the samples failed, or the harness did: listed as an error of this entry
                row = {"name": name, **verdict_of([{"verdict": "error"}]), "samples": [{"verdict": "error", "why": repr(e)[:400]}]}
            print(json.dumps(row), file=f, flush=True)
            if peer.way.device == "cuda" and is_lost():
                os._exit(LOST)  # what follows would fail for nothing


LOST = 3  # exit code of a worker


def is_lost() -> bool:
    """Did a kernel's own check end this process's use of the GPU?"""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


# ---------------------------------------------------------------- parent: workers, timeouts, tables
class Worker:
    """A process over a list of names; `step` looks at it and returns finished rows."""

    def __init__(self, names: list[str], args: argparse.Namespace, folder: Path, env: dict[str, str]) -> None:
        self.names, self.args, self.folder, self.env = names, args, folder, env
        self.done = False
        self.launch()

    def launch(self) -> None:
        handle, path = tempfile.mkstemp(dir=self.folder, suffix=".todo")
        os.close(handle)
        todo = Path(path)
        todo.write_text("\n".join(self.names))
        self.out, self.log = todo.with_suffix(".jsonl"), todo.with_suffix(".log")
        self.out.touch()
        command = [sys.executable, str(HERE / "op_db.py"), "--worker", str(todo), "--worker-out", str(self.out),
                   "--compiler", self.args.compiler, "--backend", self.args.backend, "--samples", str(self.args.samples),
                   "--first", str(self.args.first), "--way", json.dumps(asdict(way_of(self.args)))]  # fmt: skip
        command += ["--unoptimized"] if self.args.unoptimized else []
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.env)
        self.read, self.current, self.since = 0, "", time.time()

    def step(self) -> list[dict[str, Any]]:
        rows = self.collect()
        code = self.process.poll()
        if code is None:
            limit = self.args.timeout if self.current else 180  # the first one also pays for the imports
            if time.time() - self.since > limit:
                self.process.kill()
                self.process.wait()
                rows += self.collect() + self.fail("timeout", f"no answer in {limit} s")
            return rows
        rows += self.collect()
        if not self.names:
            self.done = True
        elif code == LOST and not self.current:
            self.launch()
        else:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            tail = " | ".join(self.log.read_text(errors="replace").strip().split("\n")[-3:])[-300:]
            rows += self.fail("crash", f"{name}: {tail}")
        return rows

    def collect(self) -> list[dict[str, Any]]:
        rows = []
        text = self.out.read_text()
        lines = text[self.read :].split("\n")
        for line in lines[:-1]:
            self.read += len(line) + 1
            value = json.loads(line)
            self.since = time.time()
            if "start" in value:
                self.current = value["start"]
            else:
                self.current = ""
                self.names = [n for n in self.names if n != value["name"]]
                rows.append(value)
        return rows

    def fail(self, verdict: str, why: str) -> list[dict[str, Any]]:
        """The worker is gone: that is the result of the entry it was at; go on with the next."""
        if not self.read:
            raise SystemExit(f"a worker ended before its first entry: {why}")
        name = self.current or (self.names[0] if self.names else "")
        self.names = [n for n in self.names if n != name]
        row = {"name": name, **verdict_of([{"verdict": verdict}]), "samples": [{"verdict": verdict, "why": why}]}
        if self.names:
            self.launch()
        else:
            self.done = True
        return [row] if name else []


def run_all(names: list[str], args: argparse.Namespace, journal: Path) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    end = time.time() + args.seconds
    if args.resume and journal.exists():
        results = {r["name"]: r for r in map(json.loads, journal.read_text().split("\n")[:-1]) if r["name"] in names}
    left = [n for n in names if n not in results]
    with tempfile.TemporaryDirectory() as folder, journal.open("a" if args.resume else "w") as f:
        envs = environments(args.device, args.procs)
        if args.unoptimized:  # other objects than those in the user's cache
            envs = [{**env, "TORCHSMITH_CACHE_DIR": str(Path(folder) / "cache")} for env in envs]
        workers = [Worker(part, args, Path(folder), env) for i, env in enumerate(envs) if (part := left[i :: args.procs])]
        try:
            while not all(w.done for w in workers) and time.time() < end:
                time.sleep(0.1)
                for w in workers:
                    for row in w.step() if not w.done else ():
                        results[row["name"]] = row
                        print(json.dumps(row), file=f, flush=True)
                        if args.verbose or not row["one_graph"]:
                            print(f"[{len(results)}/{len(names)}] {line_of(row)}", flush=True)
        finally:
            for w in workers:
                w.process.kill()
    return results


def line_of(row: dict[str, Any]) -> str:
    why = next((s["why"] for s in row["samples"] if s["verdict"] == row["verdict"] and "why" in s), "")
    notes = [why, *[t for s in row["samples"] for t in (*s.get("breaks", ()), *s.get("fallbacks", ()))][:1]]
    return f"{row['name']}: {row['verdict']} {' '.join(row['codes'])} {'; '.join(n for n in notes if n)}".rstrip()


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ran = [r for r in rows if r["verdict"] != "skipped"]
    n = len(ran) or 1
    return {
        "entries": len(ran),
        "skipped": len(rows) - len(ran),
        "wrong": sum(r["verdict"] in WRONG for r in ran),
        "crashes, hangs, errors": sum(r["verdict"] in ("crash", "timeout", "error") for r in ran),
        "rounding": sum(r["verdict"] == "rounding" for r in ran),
        "equal": sum(r["verdict"] in ("equal", "rounding") for r in ran),
        "one graph": sum(r["one_graph"] for r in ran),
        "one graph %": round(100 * sum(r["one_graph"] for r in ran) / n, 1),
        "native": sum(r["native"] for r in ran),
        "native %": round(100 * sum(r["native"] for r in ran) / n, 1),
    }


def markdown(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    f = figures(rows)
    out = ["# op_db against eager", "", *(f"- {k}: {v}" for k, v in about.items()), "", "| figure | value |", "|---|---|"]
    out += [f"| {k} | {v} |" for k, v in f.items()]
    out += ["", "`one graph`: equal to eager with one graph, no break, nothing outside of it. `native`: that, and no extern call.", ""]
    codes = Counter(c for r in rows for c in r["codes"])
    externs = Counter(e for r in rows for e in r["externs"])
    out += ["Codes: " + (", ".join(f"{c} ({k})" for c, k in codes.most_common()) or "none"), ""]
    out += ["Extern calls: " + (", ".join(f"{c} ({k})" for c, k in externs.most_common()) or "none"), ""]
    for title, keep in (
        ("Wrong, crashed, hung, failed", lambda r: r["verdict"] in WRONG or r["verdict"] in ("crash", "timeout", "error")),
        ("Rounding: outside the tolerance, not farther from float64 than twice eager's error", lambda r: r["verdict"] == "rounding"),
        ("Equal, but not one graph", lambda r: r["verdict"] in ("equal", "rounding") and not r["one_graph"]),
    ):
        out += [f"## {title}", ""] + [f"- {line_of(r)}".replace("|", "/") for r in rows if keep(r)] + [""]
    out += ["## Every entry", "", "| entry | verdict | one graph | native | codes | extern calls |", "|---|---|---|---|---|---|"]
    for r in rows:
        yes = {True: "yes", False: "no"}
        cells = (r["name"], r["verdict"], yes[r["one_graph"]], yes[r["native"]], " ".join(r["codes"]), " ".join(r["externs"]))
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def ways_table(files: list[Path]) -> tuple[str, list[dict[str, Any]]]:
    """One line for each of the results in `files` (JSON that a run wrote), and the same as data."""
    rows = []
    for file in files:
        found = json.loads(file.read_text())
        f, about = found["figures"], found["about"]
        codes = Counter(c for e in found["entries"] for c in e["codes"])
        wrong = [line_of(e) for e in found["entries"] if e["verdict"] in WRONG or e["verdict"] in ("crash", "timeout", "error")]
        rows.append({
            "way": ", ".join(w for w in about["way"].split(", ") if not w.endswith((" False", " given", " "))),
            "entries": f["entries"], "of": about.get("of", ""), "samples": about.get("samples", ""), "right": f["equal"] - f["rounding"],
            "rounding": f["rounding"], "eager with code": f["equal"] - f["one graph"], "native": f["native"], "wrong": f["wrong"],
            "crashed": f["crashes, hangs, errors"], "codes": dict(codes.most_common()), "found": wrong, "date": about["date"],
            "commit": about.get("commit", ""), "torch": about["torch"], "python": about["python"],
        })  # fmt: skip
    columns = tuple(c for c in rows[0] if c not in ("found", "torch", "python")) if rows else ()
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        codes = ", ".join(f"{c} ({k})" for c, k in row["codes"].items())
        lines.append("| " + " | ".join(codes if c == "codes" else str(row[c]) for c in columns) + " |")
    versions = sorted({f"torch {r['torch']}, Python {r['python']}" for r in rows})
    head = f"""# op_db in other ways

{"; ".join(versions)}. entries, of: those that ran, of as many. samples: of each entry, at most. right: as eager in every
respect. rounding: outside of the tolerance, and not farther from float64 than twice eager's error. eager with code: right, but some of it
ran outside of the graph, counted with the codes. What is wrong or crashed is listed below the table.
"""
    tail = ["", *(f"- {w}".replace("|", "/") for r in rows for w in r["found"])]
    return "\n".join([head, *lines, *tail]).rstrip() + "\n", rows


def commit() -> str:
    """Of the checkout that this file lies in, "" where it lies in none."""
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return told.stdout.strip()


def way_of(args: argparse.Namespace) -> Way:
    if args.way:
        return Way(**json.loads(args.way))
    return Way(args.dtype, args.dynamic, args.inplace, args.layout, args.errors, args.gradients, args.device)


def chosen(names: list[str], args: argparse.Namespace) -> list[str]:
    if args.only:
        names = [n for n in names if any(fnmatch.fnmatch(n, p) or n.split(".")[-1] == p for p in args.only)]
    if args.sample:
        names = sorted(random.Random(args.seed).sample(names, min(args.sample, len(names))))
    return names


def side_by_side(args: argparse.Namespace) -> int:
    """A run for each dtype, all at once; tables OUT_DEVICE_DTYPE for --out OUT, else op_db_DEVICE_DTYPE in $OUT."""
    given, runs = sys.argv[1:], []
    at = given.index("--dtype")
    rest = given[:at] + given[at + 1 + len(args.dtype) :]
    out = args.out or Path(os.environ.get("OUT", tempfile.gettempdir())) / "op_db"
    for dtype in args.dtype:
        more = ["--dtype", dtype, "--procs", str(max(1, args.procs // len(args.dtype)))]
        command = [sys.executable, str(HERE / "op_db.py"), *rest, *more, "--out", f"{out}_{args.device}_{dtype}"]
        runs.append(subprocess.Popen(command))
    return max(run.wait() for run in runs)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", action="append", metavar="NAME", help="entry name or glob; may be repeated")
    p.add_argument("--sample", type=int, default=0, metavar="N", help="a random sample of N entries")
    p.add_argument("--seed", type=int, default=date.today().toordinal(), help="of the sample; default: the day")
    p.add_argument("--samples", type=int, default=3, help="samples per entry")
    p.add_argument("--first", type=int, default=0, metavar="N", help="begin at the entry's sample N")
    p.add_argument("--backend", default="inductor")
    p.add_argument("--compiler", choices=("torchsmith", "direct", "torch"), default="torchsmith")
    p.add_argument("--procs", type=int, default=2)
    p.add_argument("--timeout", type=float, default=90, help="seconds per entry")
    p.add_argument("--dtype", nargs="+", default=["float32"], help="several: a run of each at once, with its share of the processes")
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--seconds", type=float, default=math.inf, help="of the whole run; entries that were not reached are left out")
    p.add_argument("--dynamic", action="store_true", help="sizes are symbols")
    p.add_argument("--inplace", action="store_true", help="the in-place variants")
    p.add_argument("--layout", default="given", choices=LAYOUTS)
    p.add_argument("--errors", action="store_true", help="the database's error inputs")
    p.add_argument("--gradients", nargs="?", const="outside", default="", choices=("", "outside", "inside"), help="derivatives too")
    p.add_argument("--unoptimized", action="store_true", help="C without optimizations (unoptimized.py)")
    p.add_argument("--way", default="", help=argparse.SUPPRESS)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--verbose", action="store_true", help="print every entry, not only those that are not one graph")
    p.add_argument("--inline", action="store_true", help="no worker processes (for a debugger)")
    p.add_argument("--out", type=Path, default=None, help="default: bench/results/op_db (whole runs), else a temporary folder")
    p.add_argument("--ways", type=Path, nargs="+", help="results of runs (JSON): one table of them, no run")
    p.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--worker-out", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    samples = range(args.first, args.first + args.samples)
    if args.worker:
        work(args.worker, args.worker_out, args, samples, way_of(args))
        return 0
    if len(args.dtype) > 1:
        return side_by_side(args)
    args.dtype = args.dtype[0]
    if args.ways:
        text, data = ways_table(args.ways)
        out = args.out or DEFAULT_OUT.with_name("op_db_ways")
        out.with_suffix(".md").write_text(text)
        out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
        return 0
    way = way_of(args)
    names = chosen(entry_names(way), args)
    partial = bool(args.only or args.sample) or args.first or way != Way()
    out = args.out or (Path(tempfile.gettempdir()) / "torchsmith_op_db" if partial else DEFAULT_OUT)
    out.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    if args.inline:
        peer, table = Peer(args.compiler, args.backend, way), dict(entries(way))
        results = {}
        for n in names:
            results[n] = check_entry(peer, n, table[n], samples)
            print(line_of(results[n]), results[n]["externs"], flush=True)
    else:
        results = run_all(names, args, out.with_suffix(".partial.jsonl"))
    rows = [results[n] for n in names if n in results]
    import torch

    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "compiler": f"{args.compiler}, backend {args.backend}",
        "way": ", ".join(f"{k} {v}" for k, v in asdict(way).items()),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "commit": commit(),
        "of": str(len(entry_names(way))),
        "samples": str(args.samples),
        "minutes": f"{(time.time() - began) / 60:.1f}",
        "command": "python bench/op_db.py " + " ".join(sys.argv[1:]),
    }
    out.with_suffix(".md").write_text(markdown(rows, about))
    out.with_suffix(".json").write_text(json.dumps({"about": about, "figures": figures(rows), "entries": rows}, indent=1) + "\n")
    print(json.dumps(figures(rows), indent=1))
    print(f"table: {out.with_suffix('.md')}")
    return 1 if figures(rows)["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
