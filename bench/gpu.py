"""Everything that only a GPU can show, in one script: correctness, records, bandwidth, host time, models.

In: names of sections (none: all), --seconds for the whole. Out: one line per figure, a short table last; all figures in $OUT/gpu.json.

    python bench/gpu.py                        # everything
    python bench/gpu.py host records --seconds 100

Times are medians of CUDA events around single calls after warm-up; host time is a loop of calls without waiting, divided.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import torchsmith  # noqa: E402
from torchsmith import events  # noqa: E402

ROWS: list[dict[str, Any]] = []
SECTIONS: dict[str, Callable[[], None]] = {}
FALLBACKS: list[str] = []
DEVICE = "cuda"
END = [float("inf")]


class OutOfTime(Exception):
    """The seconds of this run are spent."""


def section(fn: Callable[[], None]) -> Callable[[], None]:
    SECTIONS[fn.__name__] = fn
    return fn


def say(section: str, what: str, **figures: Any) -> None:
    ROWS.append({"section": section, "what": what, **figures})
    text = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    print(f"{section:10s} {what:34s} {text}", flush=True)
    if time.monotonic() > END[0]:
        raise OutOfTime


def milliseconds(fn: Callable[..., Any], *args: Any, n: int = 30, warm: int = 5) -> float:
    """Median time of one call on the device, by events."""
    for _ in range(warm):
        fn(*args)
    torch.cuda.synchronize()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for start, end in pairs:
        start.record()
        fn(*args)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(s.elapsed_time(e) for s, e in pairs)


def host_microseconds(fn: Callable[..., Any], *args: Any, n: int = 400) -> float:
    """What one call costs the calling thread, the device keeping up."""
    for _ in range(20):
        fn(*args)
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n // 5):
            fn(*args)
        best = min(best, time.perf_counter() - start)
        torch.cuda.synchronize()
    return best / (n // 5) * 1e6


def error(got: Any, expected: Any) -> float:
    """Largest relative error in norm over the results."""
    flat_got, flat_expected = tensors(got), tensors(expected)
    assert len(flat_got) == len(flat_expected)
    worst = 0.0
    for a, b in zip(flat_got, flat_expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device, (a.shape, b.shape, a.dtype, b.dtype, a.device, b.device)
        a64, b64 = a.double(), b.double()
        scale = b64.norm().item() or 1.0
        found = (a64 - b64).norm().item() / scale
        worst = max(worst, found) if found == found else float("inf")
    return worst


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors(v)]
    return []


def compiled(fn: Any, **more: Any) -> Any:
    return torchsmith.compile(fn, **more)


def segments(explained: Any) -> list[dict[str, Any]]:
    """What became of each segment of a compiled function's graphs."""
    return [row for call in graphs() for row in call.segments()]


def graphs() -> list[Any]:
    """The native graphs that are alive."""
    import gc

    from torchsmith.runtime import _native

    return [o for o in gc.get_objects() if type(o) is _native.Graph]


def chain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Several dependent kernels."""
    for _ in range(3):
        x = torch.softmax(x + y, 1)
        x = x - x.mean(0)
    return x, (x * x).sum()


# ---------------------------------------------------------------- sections
@section
def host() -> None:
    """Host time a call, and that results are right."""
    for name, fn in {"sin(cos(x))": lambda x: torch.sin(torch.cos(x)), "chain": lambda x: chain(x, x)}.items():
        torchsmith.compiler.reset()
        x = torch.randn(64, 64, device=DEVICE)
        f = compiled(fn)
        start = time.perf_counter()
        f(x)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        for _ in range(3):
            x = torch.randn(64, 64, device=DEVICE)
            wrong = error(f(x), fn(x))
        say("host", name, first_s=first, error=wrong, us=host_microseconds(f, x), eager_us=host_microseconds(fn, x),
            segments=[(s["launches"], s["replayed"], s["plain"], s["patched"]) for s in segments(f)])  # fmt: skip


@section
def records() -> None:
    """Kept results, sizes that vary, streams, captures by the caller, threads, memory that runs out."""
    torchsmith.compiler.reset()
    f = compiled(chain)
    inputs = [(torch.randn(33, 65, device=DEVICE), torch.randn(33, 65, device=DEVICE)) for _ in range(50)]
    kept = [(f(*inputs[i % 50]), i % 50) for i in range(1000)]
    expected = [chain(*i) for i in inputs]
    worst = max(error(got, expected[i]) for got, i in kept)
    say("records", "1000 kept results", error=worst, segments=segments(f))

    torchsmith.compiler.reset()
    g = compiled(chain, dynamic=True)
    sizes = torch.randint(1, 400, (200,)).tolist()
    worst = 0.0
    for n in sizes:
        x, y = torch.randn(n, 65, device=DEVICE), torch.randn(n, 65, device=DEVICE)
        worst = max(worst, error(g(x, y), chain(x, y)))
    say("records", "200 sizes", error=worst, segments=segments(g))
    one = {n: (torch.randn(n, 65, device=DEVICE), torch.randn(n, 65, device=DEVICE)) for n in set(sizes)}
    queue = iter(sizes * 10)
    say("records", "200 sizes, host", us=host_microseconds(lambda: g(*one[next(queue)]), n=1000))

    torchsmith.compiler.reset()
    f = compiled(chain)
    x, y = inputs[0]
    for _ in range(3):
        f(x, y)
    side = [torch.cuda.Stream() for _ in range(3)]
    got = []
    for s in side * 5:
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            got.append(f(x, y))
    torch.cuda.synchronize()
    say("records", "streams", error=max(error(r, expected[0]) for r in got), segments=segments(f))

    graph = torch.cuda.CUDAGraph()
    a, b = x.clone(), y.clone()
    with torch.cuda.graph(graph):
        inside = f(a, b)
    worst = 0.0
    for i in range(5):
        a.copy_(inputs[i][0])
        b.copy_(inputs[i][1])
        graph.replay()
        worst = max(worst, error(inside, expected[i]))
        f(*inputs[7])
    say("records", "the caller's capture", error=worst)

    wrongs: list[float] = []

    def work(seed: int) -> None:
        for i in range(seed, seed + 200):
            wrongs.append(error(f(*inputs[i % 50]), expected[i % 50]))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    say("records", "4 threads", error=max(wrongs), calls=len(wrongs), segments=segments(f))

    torchsmith.compiler.reset()
    big = compiled(lambda x: torch.softmax(x, 1).cumsum(0) + torch.softmax(x, 0))
    x = torch.randn(1 << 14, 1 << 14, device=DEVICE)
    before = big(x)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(max(0, free - (1 << 29)), dtype=torch.uint8, device=DEVICE)
    del before
    torch.cuda.empty_cache()
    small = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE) if torch.cuda.mem_get_info()[0] > (1 << 30) else None
    hogs = [t for t in (hog, small) if t is not None]
    try:
        keep = [big(x) for _ in range(4)]
        outcome = "no error"
        del keep
    except torch.OutOfMemoryError:
        outcome = "OutOfMemoryError"
    del hog, small
    hogs.clear()
    again = big(x)
    say("records", "out of memory", outcome=outcome, error=error(again, torch.softmax(x, 1).cumsum(0) + torch.softmax(x, 0)))


@section
def bad() -> None:
    """What is refused, and what stands beside a GPU's tensors."""
    torchsmith.compiler.reset()
    f = compiled(lambda x, s: x * s + 1)
    x = torch.randn(10, device=DEVICE)
    for value in (2.0, 3.0):
        s = torch.tensor(value)
        say("bad", "0-d tensor on the processor", error=error(f(x, s), x * s + 1))
    for name, args in {"cpu beside cuda": (x, torch.randn(10)), "all on cpu": (x.cpu(), torch.tensor(1.0))}.items():
        try:
            got = str(tensors(f(*args))[0].device)
        except Exception as e:
            got = type(e).__name__
        try:
            want = str((args[0] * args[1] + 1).device)
        except Exception as e:
            want = type(e).__name__
        say("bad", name, ours=got, eager=want)
    pick = compiled(lambda x, i: x[i] * 2)
    i = torch.tensor([0, 3, 9], device=DEVICE)
    say("bad", "index", error=error(pick(x, i), x[i] * 2))
    odd = torch.randn(1001, device=DEVICE)[1:].view(10, 100)
    soft = compiled(lambda x: torch.softmax(x, 1).sum(0))
    say("bad", "odd address", error=error(soft(odd), torch.softmax(odd, 1).sum(0)))
    empty = torch.randn(0, 5, device=DEVICE)
    say("bad", "no rows", error=error(soft(empty), torch.softmax(empty, 1).sum(0)))
    if torch.cuda.device_count() > 1:
        far = torch.randn(50, 60, device="cuda:1")
        say("bad", "cuda:1 while cuda:0 is current", error=error(soft(far), torch.softmax(far, 1).sum(0)))


BANDWIDTH: dict[str, tuple[Callable[..., Any], int, float]] = {  # function, tensors of the full size, passes over one of them
    "sincos": (lambda x: torch.sin(torch.cos(x)), 1, 2),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]), 1, 2),
    "softmax": (lambda x: torch.softmax(x, 1), 1, 2),
    "gelu+bias+residual": (lambda x, y: torch.nn.functional.gelu(x + x[0]) + y, 2, 3),
    "rms norm": (lambda x: x * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + 1e-6).to(x.dtype), 1, 2),
    "transpose+add": (lambda x, y: x.t().contiguous() + y.t(), 2, 3),
    "full sum": (lambda x: x.sum(), 1, 1),
    "column sum": (lambda x: x.sum(0), 1, 1),
}


@section
def bandwidth() -> None:
    """The eight kernels beside a copy: the share of the copy's bandwidth, call included."""
    for shape in ((8192, 8192), (8191, 8193), (64, 50257)):
        x, y = (torch.randn(shape, device=DEVICE, dtype=torch.float16) for _ in range(2))
        one = x.numel() * x.element_size()
        copy = 2 * one / milliseconds(x.clone) / 1e9
        say("bandwidth", f"copy {shape}", TBs=copy)
        for name, (fn, n, passes) in BANDWIDTH.items():
            args = (x, y)[:n]
            torchsmith.compiler.reset()
            try:
                f = compiled(fn)
                wrong = error(f(*args), fn(*args))
                took = milliseconds(f, *args)
                say("bandwidth", f"{name} {shape}", share=passes * one / took / 1e9 / copy, us=took * 1e3, error=wrong,
                    eager_us=milliseconds(fn, *args, n=10) * 1e3)  # fmt: skip
            except OutOfTime:
                raise
            except Exception as e:
                say("bandwidth", f"{name} {shape}", failed=f"{type(e).__name__}: {str(e)[:200]}")


PEERS = {  # milliseconds of torch.compile(mode="reduce-overhead") on this chip, batch 1 and 16 (measured before, torch 2.11)
}


@section
def models() -> None:
    """The ten models in float16: ours and eager; errors against float64 where eager's is known."""
    from models import MODELS, inputs_of, make_model

    for batch in (1, 16):
        for name in MODELS:
            torchsmith.compiler.reset()
            events_before = len(FALLBACKS)
            try:
                model, inputs = make_model(name), inputs_of(name, batch)
                model = model.to(DEVICE, torch.float16).eval()
                inputs = move(inputs)
                with torch.no_grad():
                    start = time.perf_counter()
                    f = compiled(model)
                    call(f, inputs)
                    torch.cuda.synchronize()
                    first = time.perf_counter() - start
                    for _ in range(3):
                        got = call(f, inputs)
                    wrong = error(got, call(model, inputs))
                    ours = milliseconds(call, f, inputs)
                    eager = milliseconds(call, model, inputs, n=10)
                    say("models", f"{name} {batch}", ms=ours, eager_ms=eager, ratio=eager / ours, first_s=first, error=wrong,
                        host_us=host_microseconds(call, f, inputs, n=50), launches=sum(s["launches"] for s in segments(f)),
                        segments=len(segments(f)), fallbacks=FALLBACKS[events_before:][:3])  # fmt: skip
            except OutOfTime:
                raise
            except Exception as e:
                say("models", f"{name} {batch}", failed=f"{type(e).__name__}: {str(e)[:300]}")


def call(model: Any, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def move(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(DEVICE, torch.float16 if value.is_floating_point() else value.dtype)
    if isinstance(value, dict):
        return {k: move(v) for k, v in value.items()}
    return tuple(move(v) for v in value) if isinstance(value, list | tuple) else value


@section
def sanitizer() -> None:
    """The other sections' small cases under compute-sanitizer."""
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "7", sys.executable, str(HERE / "gpu.py"), "sample"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
            say("sanitizer", tool, exit=done.returncode, tail=(done.stdout + done.stderr).strip().splitlines()[-1:])
        except (OSError, subprocess.TimeoutExpired) as e:
            say("sanitizer", tool, failed=type(e).__name__)


SAMPLE: dict[str, Callable[..., Any]] = {
    "chain": chain,
    "layer norm": lambda x, y: torch.nn.functional.layer_norm(x, (x.shape[1],)) * y,
    "gather": lambda x, y: x[torch.arange(5, device=x.device) * 3] + y[:5],
    "scatter": lambda x, y: torch.zeros_like(x).index_add_(0, torch.arange(33, device=x.device) % 5, y),
    "cumsum": lambda x, y: (x * y).cumsum(1),
    "argmax": lambda x, y: (x.argmax(1), y.max(0).values),
    "var": lambda x, y: torch.var_mean(x + y, 1),
    "transpose": lambda x, y: x.t().contiguous() + y.t(),
    "mm": lambda x, y: torch.relu(x @ y.t() + 1),
    "where": lambda x, y: torch.where(x > 0, x.half().float(), y.exp()),
    "cat": lambda x, y: torch.cat((x, y[:, :3]), 1).clamp(-1, 1),
    "pool": lambda x, y: torch.nn.functional.max_pool2d(x[None, None], 3, 2) + 1,
}


@section
def sample() -> None:
    """Small cases of many kinds of kernel."""
    for name, fn in SAMPLE.items():
        torchsmith.compiler.reset()
        before = len(FALLBACKS)
        x, y = torch.randn(33, 65, device=DEVICE), torch.randn(33, 65, device=DEVICE)
        try:
            f = compiled(fn)
            for _ in range(3):
                wrong = error(f(x, y), fn(x, y))
            say("sample", name, error=wrong, fallbacks=FALLBACKS[before:][:2])
        except OutOfTime:
            raise
        except Exception as e:
            say("sample", name, failed=f"{type(e).__name__}: {str(e)[:200]}")


def listen() -> None:
    """Remember what fell back, with its code."""

    def hear(event: Any) -> None:
        if getattr(event, "kind", "") in ("fallback", "graph_break"):
            fields = event.fields
            FALLBACKS.append(f"{fields.get('code')} {str(fields.get('detail', ''))[:160]}")

    events.listen(hear)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, default=330)
    args = parser.parse_args()
    END[0] = time.monotonic() + args.seconds
    listen()
    print(torch.__version__, torch.cuda.get_device_name(), torch.cuda.device_count(), flush=True)
    for name in args.sections or [n for n in SECTIONS if n != "sample"] + ["sample"]:
        try:
            SECTIONS[name]()
        except OutOfTime:
            print("out of time")
            break
        except Exception:
            print(f"{name} stopped:", flush=True)
            traceback.print_exc()
            sys.stdout.flush()
    out = os.environ.get("OUT")
    if out:
        Path(out, f"gpu_{'_'.join(args.sections) or 'all'}.json").write_text(json.dumps(ROWS, indent=1))
    failed = [r for r in ROWS if "failed" in r or r.get("error", 0) > 1e-2]
    print(f"{len(ROWS)} figures, {len(failed)} wrong or failed: {', '.join(r['section'] + ' ' + r['what'] for r in failed)}")


if __name__ == "__main__":
    main()
