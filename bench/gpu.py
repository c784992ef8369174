"""Everything that only a GPU can show, in one script: correctness, records, bandwidth, host time, models, training, packages.

In: names of sections (none: all), --seconds for the whole, --each for one section. Out: one line per figure, a short table last; the
figures of a section in $OUT/gpu_NAME.json, written after each of them. Several sections run in a process each, so that one that fails,
hangs or loses the device takes no other with it.

    python bench/gpu.py                        # everything
    python bench/gpu.py host records --seconds 100
    python bench/gpu.py models --only resnet18 --peer      # torch.compile(mode="reduce-overhead") in the same process, in turn

Times are medians of CUDA events around single calls after warm-up; host time is a loop of calls without waiting, divided.
"""

from __future__ import annotations

import argparse
import compileall
import copy
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
ARGS = argparse.Namespace(peer=False, only=[], beside=[], name="", longest=60)


class OutOfTime(Exception):
    """The seconds of this run are spent."""


def section(fn: Callable[[], None]) -> Callable[[], None]:
    SECTIONS[fn.__name__] = fn
    return fn


def say(section: str, what: str, **figures: Any) -> None:
    ROWS.append({"section": section, "what": what, **figures})
    text = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    print(f"{section:10s} {what:34s} {text}", flush=True)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"gpu_{ARGS.name or section}.json").write_text(json.dumps(ROWS, indent=1))
    if time.monotonic() > END[0]:
        raise OutOfTime


@contextmanager
def case(section: str, what: str) -> Iterator[None]:
    """One case: what it raises is a row, and it ends after --longest seconds."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"no end after {ARGS.longest} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(ARGS.longest)
    try:
        yield
    except (OutOfTime, KeyboardInterrupt):
        raise
    except BaseException as e:
        signal.alarm(0)
        at = "; ".join(f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(e.__traceback__)[-4:])
        say(section, what, failed=f"{type(e).__name__}: {str(e)[:300]} at {at}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


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
    torchsmith.compiler.reset()
    x, f = torch.randn(64, 64, device=DEVICE), compiled(lambda x: x.sin_())
    say("host", "x.sin_(): a launch, no memory", us=host_microseconds(f, x), eager_us=host_microseconds(torch.sin_, x))
    say("host", "torch.empty_like(x)", us=host_microseconds(torch.empty_like, x))


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
    layers = torch.nn.Sequential(*[torch.nn.Linear(5, 5, device=DEVICE), torch.nn.GELU()] * 3)
    say("bad", "no rows, products", error=error(compiled(layers)(empty), layers(empty)))
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
        copied = 2 * one / milliseconds(x.clone) / 1e9
        say("bandwidth", f"copy {shape}", TBs=copied)
        for name, (fn, n, passes) in BANDWIDTH.items():
            args = (x, y)[:n]
            torchsmith.compiler.reset()
            with case("bandwidth", f"{name} {shape}"):
                f = compiled(fn)
                wrong = error(f(*args), fn(*args))
                took = milliseconds(f, *args)
                more: dict[str, float] = {}
                if ARGS.peer:
                    other = peer_of(fn, None)
                    other(*args)
                    took, theirs = in_turn(lambda: f(*args), lambda: other(*args))  # noqa: B023
                    more = {"compile_us": theirs * 1e3, "ahead": theirs / took}
                say("bandwidth", f"{name} {shape}", share=passes * one / took / 1e9 / copied, us=took * 1e3, error=wrong,
                    eager_us=milliseconds(fn, *args, n=10) * 1e3, **more)  # fmt: skip


def wanted() -> list[str]:
    """The ten models, or those of --only."""
    from models import MODELS

    return [n for n in MODELS if not ARGS.only or n in ARGS.only]


def in_turn(*fns: Callable[[], Any], rounds: int = 5) -> list[float]:
    """Medians of milliseconds, measured in turn."""
    took: list[list[float]] = [[] for _ in fns]
    for _ in range(rounds):
        for t, fn in zip(took, fns, strict=True):
            t.append(milliseconds(fn, n=10, warm=2))
    return [statistics.median(t) for t in took]


def peer_of(fn: Any, mode: str | None = "reduce-overhead", beside: bool = False) -> Any:
    """torch.compile, by default in its best mode for small batches. beside: another peer lives on."""
    import torch._dynamo

    if not beside:
        torch._dynamo.reset()
    return torch.compile(fn, mode=mode)


@section
def models() -> None:
    """The ten models in float16: ours and eager; errors against float64 where eager's is known."""
    from models import inputs_of, make_model

    for batch in (1, 16):
        for name in wanted():
            torchsmith.compiler.reset()
            events_before = len(FALLBACKS)
            with case("models", f"{name} {batch}"):
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
                    expected = call(model, inputs)
                    wrong = error(got, expected)
                    exact = move(call(copy.deepcopy(model).double(), move(inputs, torch.float64)), torch.float64)
                    off, eager_off = error(move(got, torch.float64), exact), error(move(expected, torch.float64), exact)
                    del exact
                    ours = milliseconds(call, f, inputs)
                    eager = milliseconds(call, model, inputs, n=10)
                    found = segments(f)
                    more = {"error64": off, "eager_error64": eager_off}
                    plain = [f"{s['launches']} {s['why']}" for s in found if s["plain"] > 3 and s["launches"] > 2]
                    say("models", f"{name} {batch}", ms=ours, eager_ms=eager, ratio=eager / ours, first_s=first, error=wrong, **more,
                        host_us=host_microseconds(call, f, inputs, n=50), launches=sum(s["launches"] for s in found),
                        segments=len(found), not_recorded=plain[:3], fallbacks=FALLBACKS[events_before:][:3])  # fmt: skip
                    if ARGS.peer:
                        start = time.perf_counter()
                        other = peer_of(model)
                        call(other, inputs)
                        torch.cuda.synchronize()
                        peer_first = time.perf_counter() - start
                        for _ in range(3):
                            call(other, inputs)
                        mine, theirs = in_turn(lambda: call(f, inputs), lambda: call(other, inputs))  # noqa: B023
                        say("models", f"{name} {batch} peer", ms=mine, reduce_overhead_ms=theirs, ratio=theirs / mine, first_s=first,
                            peer_first_s=peer_first, first_ratio=peer_first / first)  # fmt: skip


class Decoder(torch.nn.Module):
    """A decoder of Llama's shape for one token, float16, with caches of a fixed length that it writes in place."""

    def __init__(self, layers: int = 12, width: int = 2048, heads: int = 16, inner: int = 5632, length: int = 512) -> None:
        super().__init__()
        nn, self.heads, self.layers, words = torch.nn, heads, torch.nn.ModuleList(), 32000
        self.words = nn.Embedding(words, width)
        for _ in range(layers):
            layer = nn.Module()
            layer.before, layer.after = nn.RMSNorm(width), nn.RMSNorm(width)
            layer.qkv, layer.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            layer.up, layer.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
            for name in ("keys", "values"):
                layer.register_buffer(name, torch.zeros(1, heads, length, width // heads))
            self.layers.append(layer)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        rates = 10000.0 ** -(torch.arange(0, width // heads, 2).float() / (width // heads))
        self.register_buffer("angles", torch.outer(torch.arange(length).float(), torch.cat([rates, rates])))

    def turned(self, x: Tensor, at: Tensor) -> Tensor:
        angles = self.angles[at].float()
        low, high = x.chunk(2, -1)
        return (x * angles.cos() + torch.cat([-high, low], -1) * angles.sin()).to(x.dtype)

    def forward(self, token: Tensor, at: Tensor) -> Tensor:
        x = self.words(token)
        mask = (torch.arange(self.layers[0].keys.shape[2], device=x.device) <= at)[None, None, None]
        for layer in self.layers:
            q, k, v = layer.qkv(layer.before(x)).view(1, 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            layer.keys.index_copy_(2, at, self.turned(k, at))
            layer.values.index_copy_(2, at, v)
            seen = torch.nn.functional.scaled_dot_product_attention(self.turned(q, at), layer.keys, layer.values, attn_mask=mask)
            x = x + layer.out(seen.transpose(1, 2).reshape(1, 1, -1))
            gate, up = layer.up(layer.after(x)).chunk(2, -1)
            x = x + layer.down(torch.nn.functional.silu(gate) * up)
        return self.head(self.norm(x))


@section
def decode() -> None:
    """One token of a 12-layer decoder with static caches, float16."""
    torch.manual_seed(0)
    torchsmith.compiler.reset()
    with case("decode", "12 layers"), torch.no_grad():
        model = Decoder().to(DEVICE, torch.float16).eval()
        twin = copy.deepcopy(model)
        f, worst = compiled(model), 0.0
        tokens = torch.randint(0, 32000, (20, 1, 1), device=DEVICE)
        places = torch.arange(20, device=DEVICE).view(20, 1)
        for token, at in zip(tokens, places, strict=True):
            worst = max(worst, error(f(token, at), twin(token, at)))
        args = tokens[0], places[10]
        more: dict[str, float] = {}
        took = milliseconds(f, *args)
        if ARGS.peer:
            other = peer_of(twin)
            for _ in range(4):
                other(*args)
            took, theirs = in_turn(lambda: f(*args), lambda: other(*args))
            more = {"reduce_overhead_ms": theirs, "ratio": theirs / took}
        found = segments(f)
        say("decode", "12 layers", ms=took, eager_ms=milliseconds(model, *args, n=10), error=worst, segments=len(found),
            launches=sum(s["launches"] for s in found), **more)  # fmt: skip


def device_kernels(fn: Callable[[], Any], n: int = 5) -> dict[str, tuple[int, float]]:
    """What one call runs on the device: name -> (how often, microseconds together), the longest first."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(n):
            fn()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for e in p.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            count, us = found.get(e.name, (0, 0.0))
            found[e.name] = (count + 1, us + e.device_time)
    return {k: (c // n, us / n) for k, (c, us) in sorted(found.items(), key=lambda x: -x[1][1])}


@section
def kernels() -> None:
    """What runs on the device in one call of ViT, BERT and the decoder, ours and the peer's: kernels, their time, the gaps between them."""
    from models import inputs_of, make_model

    for name in ARGS.only or ("timm_vision_transformer", "BERT_pytorch", "decode"):
        torchsmith.compiler.reset()
        with case("kernels", name), torch.no_grad():
            if name == "decode":
                torch.manual_seed(0)
                one = torch.ones(1, 1, device=DEVICE, dtype=torch.int64)
                model, inputs = Decoder().to(DEVICE, torch.float16).eval(), (one, one[0])
            else:
                model, inputs = make_model(name).to(DEVICE, torch.float16).eval(), move(inputs_of(name, 1))
            for who, f in {"ours": compiled(model), **({"peer": peer_of(copy.deepcopy(model))} if ARGS.peer else {})}.items():
                for _ in range(4):
                    call(f, inputs)
                took = milliseconds(call, f, inputs) * 1e3
                found = device_kernels(lambda: call(f, inputs))  # noqa: B023
                count, busy = sum(c for c, _ in found.values()), sum(us for _, us in found.values())
                longest = [(k[:60], c, round(us, 1)) for k, (c, us) in found.items()][:14]
                say("kernels", f"{name} {who}", us=took, kernels=count, busy_us=busy, longest=longest)


@section
def index() -> None:
    """An index out of range stops the device, as eager's does: in a process of its own."""
    code = """if True:
        import torch, torchsmith
        x, i = torch.randn(10, device="cuda"), torch.tensor([0, 3, 10], device="cuda")
        f = torchsmith.compile(lambda x, i: x[i] * 2)
        f(x, i - 1)
        try:
            f(x, i); torch.cuda.synchronize(); print("no error")
        except Exception as e:
            print(type(e).__name__, str(e).splitlines()[0])"""
    path = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **path}, check=False)
    say("index", "out of range", outcome=(done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1])


def stepper(name: str, kind: str) -> Callable[[], Tensor]:
    """A training step of a model at batch 16: "ours", "our model" alone, "eager", torch.compile's "peer model" alone or "peer step"."""
    from models import inputs_of, make_model

    torch.manual_seed(0)
    inputs, model = move(inputs_of(name, 16), torch.float32), make_model(name).to(DEVICE).train()
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step(run: Any = model) -> Tensor:
        loss = sum(t.float().pow(2).mean() for t in tensors(call(run, inputs)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if kind == "peer model":
        return functools.partial(step, peer_of(model, beside=True))
    if kind == "our model":
        return functools.partial(step, compiled(model))
    if kind == "ours" and ARGS.name == "steps":
        return compiled(step, options={"force_disable_caches": True})
    return compiled(step) if kind == "ours" else peer_of(step, None) if kind == "peer step" else step


def first_call(who: str, kind: str, name: str) -> dict[str, float]:
    """Seconds of the first compiled call and of four, after eager has run; our stages. With empty caches, a cold compile."""
    from models import inputs_of, make_model

    spent, loaded, ends = Counter[str](), [0.0], list[float]()

    def hear(e: Any) -> None:
        if e.kind == "time":
            spent.update({e.fields["name"]: e.fields["wall"]})
            loaded[0] = time.perf_counter() if e.fields["name"] == "load" and not ends else loaded[0]

    events.listen(hear)
    if kind == "training":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        stepper(name, "eager")()
        f: Callable[[], Any] = stepper(name, "ours" if who == "ours" else "peer model")
    else:
        model, inputs = make_model(name).to(DEVICE, torch.float16).eval(), move(inputs_of(name, 16))
        call(model, inputs)
        f = functools.partial(call, compiled(model) if who == "ours" else peer_of(model), inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(4):
        with torch.set_grad_enabled(kind == "training"):
            f()
        torch.cuda.synchronize()
        ends.append(time.perf_counter() - start)
    if loaded[0]:  # what the library's first run takes, weights and all
        spent["run"] = start + ends[0] - loaded[0]
    return {"first": ends[0], "steady": ends[-1], **{k: v for k, v in spent.items() if v > 0.1}}


@section
def cold() -> None:
    """Cold compiles of the ten models, each in a process of its own with empty caches: ours and with --peer torch.compile's.

    Python's own bytecode is there, as it is of an installed package. A first training step makes the optimizer's state and runs eagerly:
    of steps the seconds of four calls count."""
    compileall.compile_dir(HERE.parent / "src", quiet=2)
    for name in wanted():
        for kind in ("inference", "training"):
            with case("cold", f"{name} {kind}"), tempfile.TemporaryDirectory() as folder:
                took = {}
                for who in ("ours", *(("peer",) if ARGS.peer else ())):
                    names = ("TORCHSMITH_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
                    caches = dict.fromkeys(names, f"{folder}/{who}")
                    command = [sys.executable, __file__, "--only", name, "--first", f"{who} {kind}"]
                    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=150, check=False)
                    if done.returncode:
                        raise RuntimeError(f"{who}: {done.stderr[-300:]}")
                    took[who] = json.loads(done.stdout.splitlines()[-1])
                ours, stages = took["ours"], " ".join(f"{k} {v:.1f}" for k, v in took["ours"].items() if k not in ("first", "steady"))
                more = {}
                if ARGS.peer:
                    more = {f"peer_{k}_s": took["peer"][k] for k in ("first", "steady")}
                    counts = ("first", "steady") if kind == "inference" else ("steady",)
                    more |= {f"{k}_ratio": took["peer"][k] / ours[k] for k in counts}
                say("cold", f"{name} {kind}", first_s=ours["first"], steady_s=ours["steady"], **more, stages=stages)


@contextmanager
def plans() -> Iterator[list[Any]]:
    """The host programs that are made inside; nothing comes from the cache of graphs."""
    from torchsmith import pipeline

    made: list[Any] = []
    join = pipeline.segment
    pipeline.segment = lambda plan, options: made.append(join(plan, options)) or made[-1]
    try:
        yield made
    finally:
        pipeline.segment = join


def launches_of(plan: Any) -> list[str]:
    """Our launches in order: the kernel's kind, the sizes of what it writes, its operators."""
    from torchsmith.ir.nested import every
    from torchsmith.ir.plan import Launch

    out = []
    for s in every(plan.run):
        if isinstance(s, Launch):
            k = plan.kernels[s.kernel]
            shapes = {tuple(map(str, plan.buffers[b].shape)) for b, p in zip(s.bufs, k.params, strict=True) if p.written}
            operators = ",".join(dict.fromkeys(o.split()[0].removesuffix(".default").removeprefix("aten.") for o in k.origins))
            out.append(f"{k.kind or 'loop'} {' '.join('x'.join(x) for x in sorted(shapes)[:3])} {operators[:150]}")
    return out


def timeline(fn: Callable[[], Any]) -> list[tuple[str, float]]:
    """Kernels of one call in order, and their microseconds."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        fn()
        torch.cuda.synchronize()
    found = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, e.device_time) for e in sorted(found, key=lambda e: e.time_range.start)]


def our_kernels(fn: Callable[[], Any], made: list[Any]) -> list[tuple[str, float]]:
    """The longest launches of one call, ours by their operators."""
    events, names = timeline(fn), launches_of(made[-1])  # the first step's graph, which makes an optimizer's state, is no longer called
    ours = [us for name, us in events if name.startswith("tsk_")]
    rows = [(n, us) for n, us in events if not n.startswith("tsk_")]
    rows += list(zip(names, ours, strict=True)) if len(names) == len(ours) else [(f"{len(ours)} of {len(names)} launches", sum(ours))]
    return sorted(rows, key=lambda r: -r[1])


@section
def steps() -> None:
    """What runs on the device in one training step of some models, ours and that of the peer's model."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in ARGS.only or ("resnet50", "squeezenet1_1", "vgg16"):
        torchsmith.compiler.reset()
        with case("steps", name):
            for who in ("ours", *(["peer model"] if ARGS.peer else [])):
                f = stepper(name, who)
                with plans() as made:
                    for _ in range(4):
                        f()
                took = milliseconds(f) * 1e3
                found = device_kernels(f)
                if who == "ours":
                    (Path(os.environ.get("OUT", ".")) / f"launches_{name}.txt").write_text(
                        "".join(f"{us:9.1f} {n}\n" for n, us in our_kernels(f, made))
                    )
                count, busy = sum(c for c, _ in found.values()), sum(us for _, us in found.values())
                longest = [(k[:90], c, round(us, 1)) for k, (c, us) in found.items()][:40]
                say("steps", f"{name} {who}", us=took, kernels=count, busy_us=busy, host_us=host_microseconds(f, n=10),
                    segments=segments(f) if who == "ours" else [], longest=longest)  # fmt: skip


@section
def training() -> None:
    """Whole steps of the ten models, batch 16, TF32: forward, loss, backward, SGD with momentum; losses beside eager's.

    Peers: the model alone, recorded; with --beside, our model alone, and the step under torch.compile, whose recorded form overwrites the
    momentum that it returns.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in wanted():
        torchsmith.compiler.reset()
        before = len(FALLBACKS)
        with case("training", name):
            steps, losses, firsts, kinds = [], [], [], ["ours", "eager"]
            kinds += [*(["peer model"] if ARGS.peer else []), *ARGS.beside]
            for kind in tuple(kinds):
                f = stepper(name, kind)
                start = time.perf_counter()
                try:
                    losses.append([float(f()) for _ in range(4)])
                except Exception as e:
                    if not kind.startswith("peer"):
                        raise
                    print(f"training   {name}: {kind}: {type(e).__name__}: {str(e)[:200]}", flush=True)
                    kinds.remove(kind)
                    continue
                steps.append(f)
                firsts.append(time.perf_counter() - start)
                if kind == "ours":
                    found, made = segments(f), len(graphs())
            took = in_turn(*steps, rounds=3)
            peers = {k.replace(" ", "_") + "_ms": t for k, t in zip(kinds[2:], took[2:], strict=True)}
            if best := min((t for k, t in peers.items() if k.startswith("peer")), default=None):
                peers |= {"peer_ms": best, "peer_ratio": best / took[0], "peer_first_s": firsts[2]}
            our = [row for k, row in zip(kinds, losses, strict=True) if k.startswith("our")]
            drift = max(abs(a - b) / (abs(b) + 1e-9) for row in our for a, b in zip(row, losses[1], strict=True))
            say("training", name, ms=took[0], eager_ms=took[1], ratio=took[1] / took[0], first_s=firsts[0], error=drift,
                graphs=made, segments=len(found), launches=sum(s["launches"] for s in found),
                **peers, fallbacks=FALLBACKS[before:][:3])  # fmt: skip


@section
def own() -> None:
    """Products and convolutions as kernels of our own beside the libraries': float16 and float32, and what a library's call takes."""
    functional = torch.nn.functional
    for dtype in (torch.float16, torch.float32):
        for m, n, k in ((1, 4096, 4096), (128, 768, 768), (128, 3072, 768), (128, 768, 3072), (2048, 3072, 768), (4096, 4096, 4096)):
            x, w, b = (torch.randn(s, device=DEVICE, dtype=dtype) * 0.1 for s in ((m, k), (n, k), (n,)))
            name = f"linear+gelu {str(dtype)[6:]} {m} {n} {k}"
            compare("own", name, lambda x, w, b: functional.gelu(functional.linear(x, w, b)), x, w, b)
    for n, c, h, o, r in ((1, 64, 56, 64, 3), (1, 512, 7, 512, 3), (16, 64, 56, 256, 1), (16, 256, 14, 256, 3), (16, 3, 224, 64, 7)):
        x = torch.randn(n, c, h, h, device=DEVICE, dtype=torch.float16).to(memory_format=torch.channels_last)
        w = (torch.randn(o, c, r, r, device=DEVICE, dtype=torch.float16) * 0.1).to(memory_format=torch.channels_last)
        b = torch.randn(o, device=DEVICE, dtype=torch.float16)
        name = f"conv+relu {n} {c} {h} {o} {r}"
        compare("own", name, lambda x, w, b: torch.relu(functional.conv2d(x, w, b, padding=w.shape[2] // 2)), x, w, b)
    q, k, v = (torch.randn(16, 12, 128, 64, device=DEVICE, dtype=torch.float16) for _ in range(3))
    compare("own", "attention 16 12 128 64", functional.scaled_dot_product_attention, q, k, v)


def compare(section: str, what: str, fn: Callable[..., Any], *args: Tensor) -> None:
    """Our kernels and the libraries' in one row; errors of both to float64."""
    with case(section, what):
        torchsmith.compiler.reset()
        with torch.no_grad():
            mine, library = compiled(fn, options={"libtorch": "forbid"}), compiled(fn)
            exact = fn(*(a.double() for a in args))
            wrong = [error([t.double() for t in tensors(f(*args))], exact) for f in (mine, library)]
            for f in (mine, library):
                f(*args), f(*args)
            a, b = in_turn(lambda: mine(*args), lambda: library(*args))
            say(section, what, us=a * 1e3, library_us=b * 1e3, ratio=b / a, error=wrong[0], library_error=wrong[1])


@section
def packages() -> None:
    """A package made here, without libtorch: results, time from load to the first result, time and host time of a call, other devices."""
    from models import inputs_of, make_model
    from torchsmith.aot import aot_compile, load_package

    for name in ARGS.only or ("resnet18", "BERT_pytorch"):
        with case("packages", name):
            torchsmith.compiler.reset()
            model, inputs = make_model(name).to(DEVICE, torch.float16).eval(), move(inputs_of(name, 1))
            args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
            with torch.no_grad():
                start = time.perf_counter()
                path = aot_compile(model, args, kwargs)
                made = time.perf_counter() - start
                start = time.perf_counter()
                run = load_package(path)
                got = run(*args, **kwargs)
                torch.cuda.synchronize()
                first = time.perf_counter() - start
                wrong = error(got, call(model, inputs))
                say("packages", name, made_s=made, first_s=first, error=wrong, ms=milliseconds(call, run, inputs),
                    host_us=host_microseconds(call, run, inputs, n=50), eager_ms=milliseconds(call, model, inputs, n=10))  # fmt: skip
    with case("packages", "stream, strides, new weights"):
        layer = torch.nn.Linear(64, 32).to(DEVICE).eval()
        path = aot_compile(layer, (torch.randn(8, 64, device=DEVICE),), options={"copy_inputs": True})
        run, x = load_package(path), torch.randn(64, 8, device=DEVICE).t()
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            wrong = error(run(x), layer(x))
            run.load_constants({"weight": layer.weight * 2, "bias": layer.bias.cpu()})
            wrong = max(wrong, error(run(x), x @ layer.weight.t() * 2 + layer.bias))
        torch.cuda.synchronize()
        say("packages", "stream, strides, new weights", error=wrong)
    with case("packages", "torch's loader"):
        package = str(Path(path).with_suffix(".pt2"))
        program = torchsmith.export.export(layer, (torch.randn(8, 64, device=DEVICE),))
        torchsmith.aot.compile_and_package(program, package_path=package)
        theirs, x = torch._inductor.aoti_load_package(package), torch.randn(8, 64, device=DEVICE)
        with torch.no_grad():
            say("packages", "torch's loader", error=error(theirs(x), layer(x)))


# The documents' C++ programs as they are for a GPU: what differs from those in examples/aoti.
FOR_CUDA = {
    'device = "cpu"': 'device = "cuda"', "at::kCPU": "at::kCUDA", "runner_cpu.h": "runner_cuda.h", "RunnerCpu": "RunnerCuda",
    "COMMAND python ": f"COMMAND {sys.executable} ",
}  # fmt: skip


@section
def programs() -> None:
    """The documents' C++ programs (examples/aoti) on a GPU: a package and a library, two batch sizes, PyTorch's loaders."""
    for kind in ("package", "library"):
        with case("programs", kind), tempfile.TemporaryDirectory() as work:
            for file in (HERE.parent / "examples" / "aoti" / kind).iterdir():
                text = file.read_text()
                for old, new in FOR_CUDA.items():
                    text = text.replace(old, new)
                (Path(work) / file.name).write_text(text)
            env = os.environ | {
                "PYTHONPATH": str(HERE.parent / "src"), "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path, "LD_LIBRARY_PATH": ".",
            }  # fmt: skip
            out = ""
            for command in (["cmake", "-S", ".", "-B", "build"], ["cmake", "--build", "build"], ["./aoti_example"]):
                where = Path(work) / "build" if command[0].startswith("./") else work
                done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, check=False)
                out = done.stdout[-600:] + done.stderr[-600:]
                if done.returncode:
                    raise RuntimeError(f"{' '.join(command)}: {out}")
            say("programs", kind, values=out.count("0."), output=out[:400])


DEVICES = ("cuda:0", "cuda:1")


def alike(fn: Callable[..., Any], *args: Any, f: Any = None) -> dict[str, Any]:
    """Figures of a program that may be refused: the error, or what was raised (`f`, where given, may raise another kind); the current
    device stays."""
    other, got, before = f is not None, list[Any](), torch.cuda.current_device()
    f = f or compiled(fn)
    for who in (fn, f, f, f):
        try:
            got.append(who(*args))
        except (RuntimeError, ValueError, TypeError, AssertionError) as e:
            got.append(f"{type(e).__name__} {str(e)[:60]}")
    moved = {"failed": "the current device changed"} if torch.cuda.current_device() != before else {}
    if isinstance(got[0], str) or any(isinstance(g, str) for g in got):
        same = all(isinstance(g, str) and (other or g.split()[0] == str(got[0]).split()[0]) for g in got)
        return {"raised": str(got[1])[:60], **({} if same else {"failed": f"{got[1]} instead of {got[0]}"}), **moved}
    return {"error": max(error(g, got[0]) for g in got[1:]), **moved}


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Softmax(1), torch.nn.Linear(64, 64), torch.nn.Softmax(1))


PLACES: dict[str, Callable[..., Any]] = {  # x lies on the second device, y on the first, which is current
    "one of each": lambda x, y: x + y,
    "products of each": lambda x, y: x @ y,
    "scalar of the other device": lambda x, y: x + y.sum(),
    "copied inside": lambda x, y: torch.softmax(x + y.to(x.device), 1),
    "copied to the current one": lambda x, y: torch.softmax(x.cuda() + y, 1),
    "copied and back": lambda x, y: (x.to("cuda:0").exp() + y).to(x.device) * x,
    "both apart": lambda x, y: (torch.softmax(x, 1), torch.softmax(y, 1)),
    "made on cuda": lambda x, y: torch.zeros(64, device="cuda") + y[0],
    "made beside x": lambda x, y: torch.arange(64, device=x.device) + x,
    "made on cuda beside x": lambda x, y: torch.arange(64, device="cuda") + x,
    "the index of a device": lambda x, y: x * x.device.index + x.get_device(),
    "current device": lambda x, y: x * (torch.cuda.current_device() + 1),
    "a device inside": lambda x, y: within(x),
    "written": lambda x, y: x.clone().copy_(y),
    "index of the other device": lambda x, y: x[(y[0] > 0).nonzero()[:, 0]],
}


def within(x: Tensor) -> Tensor:
    with torch.cuda.device(1):
        return torch.ones(64, device="cuda") * x


@section
def two() -> None:
    """Two GPUs: the second one while the first is current, threads, streams, refusals, records, packages, training, random numbers."""
    if torch.cuda.device_count() < 2:
        say("two", "skipped", devices=torch.cuda.device_count())
        return
    first, second = DEVICES
    wrongs: list[float] = []

    def work(device: str, f: Any = None, calls: int = 50) -> None:
        model = layers().to(device).eval()
        f = f or compiled(model)
        with torch.no_grad():
            for _ in range(calls):
                x = torch.randn(32, 64, device=device)
                wrongs.append(error(f(x), model(x)))

    def in_threads(*works: Callable[[], None]) -> None:
        failed: list[str] = []

        def guarded(fn: Callable[[], None]) -> None:
            try:
                fn()
            except Exception as e:
                failed.append(f"{type(e).__name__} {e}")

        threads = [threading.Thread(target=guarded, args=(w,)) for w in works]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if failed:
            raise RuntimeError(failed[0])

    with case("two", "cuda:1 while cuda:0 is current"):
        torchsmith.compiler.reset()
        work(second)
        say("two", "cuda:1 while cuda:0 is current", error=max(wrongs), current=torch.cuda.current_device(), segments=segments(None))
    with case("two", "a thread each"):
        wrongs.clear()
        in_threads(*(functools.partial(work, d) for d in DEVICES * 2))
        say("two", "a thread each", error=max(wrongs), calls=len(wrongs))
    with case("two", "one function, a thread each"):
        torchsmith.compiler.reset()
        f, data = compiled(chain), [[torch.randn(33, 65, device=d) for _ in range(2)] for d in DEVICES]

        def chains(args: list[Tensor]) -> None:
            for _ in range(100):
                wrongs.append(error(f(*args), chain(*args)))

        wrongs.clear()
        in_threads(*(functools.partial(chains, args) for args in data * 2))
        say("two", "one function, a thread each", error=max(wrongs), calls=len(wrongs), segments=segments(f))
    with case("two", "records of both"):
        torchsmith.compiler.reset()
        f, wrong = compiled(chain), 0.0
        for k in range(40):
            wrong = max(wrong, error(f(*data[k % 2]), chain(*data[k % 2])))
        say("two", "records of both", error=wrong, segments=segments(f))
    with case("two", "streams of both"):
        wrong, side = 0.0, [torch.cuda.Stream(device=d) for d in DEVICES]
        for k in range(12):
            (x, y), stream = data[k % 2], side[k % 2]
            with torch.cuda.stream(stream):  # makes the stream's device current
                stream.wait_stream(torch.cuda.default_stream(x.device))
                here, other = f(x, y), f(*data[1 - k % 2])
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            wrong = max(wrong, error(here, chain(x, y)), error(other, chain(*data[1 - k % 2])))
        say("two", "streams of both", error=wrong, segments=segments(f))
    with case("two", "the second one is current"), torch.cuda.device(1):
        wrong = max(error(f(*args), chain(*args)) for args in data * 3)
        say("two", "the second one is current", error=wrong, current=torch.cuda.current_device())
    x, y = torch.randn(64, 64, device=second), torch.randn(64, 64, device=first)
    for name, fn in PLACES.items():
        torchsmith.compiler.reset()
        with case("two", name):
            say("two", name, **alike(fn, x, y))
    with case("two", "a model that moves"):
        torchsmith.compiler.reset()
        model, wrong = layers().to(first).eval(), 0.0
        f = compiled(model)
        with torch.no_grad():
            for k in range(6):
                model.to(DEVICES[k % 2])
                x = torch.randn(8, 64, device=DEVICES[k % 2])
                wrong = max(wrong, *(error(f(x), model(x)) for _ in range(3)))
        say("two", "a model that moves", error=wrong)
    with case("two", "layers on both"):
        torchsmith.compiler.reset()
        low, high = layers().to(first), layers().to(second)
        with torch.no_grad():
            say("two", "layers on both", **alike(lambda x: high(low(x).to(second)), y))
    with case("two", "random numbers"):
        torchsmith.compiler.reset()
        drop, x = compiled(torch.nn.functional.dropout), torch.ones(1000, device=second)
        rows = []
        for fn in (torch.nn.functional.dropout, drop):
            torch.cuda.manual_seed_all(3)
            rows.append([fn(x) for _ in range(4)])
            rows[-1].append(torch.cuda.get_rng_state(1).to(torch.float32))
        say("two", "random numbers", error=error(*rows))
    for optimizer in ("SGD", "Adam"):
        with case("two", f"a training step, {optimizer}"):
            torchsmith.compiler.reset()
            losses = []
            for wrap in (lambda fn: fn, compiled):
                model = layers().to(second)
                update = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)

                def step(x: Tensor, model: Any = model, update: Any = update) -> Tensor:
                    loss = (model(x) - x).pow(2).mean()
                    loss.backward()
                    update.step()
                    update.zero_grad()
                    return loss.detach()

                f, inputs = wrap(step), torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(second)
                losses.append([f(inputs) for _ in range(8)])
            say("two", f"a training step, {optimizer}", error=error(*losses), current=torch.cuda.current_device())
    with case("two", "packages"):
        from torchsmith.aot import aot_compile, load_package

        model = layers().to(first).eval()
        with torch.no_grad():
            path = aot_compile(model, (y,))
            for index, device in enumerate(DEVICES):
                run, x = load_package(path, device_index=index), y.to(device)
                wrong = max(error(run(x), copy.deepcopy(model).to(device)(x)) for _ in range(4))
                say("two", f"packages, device_index={index}", error=wrong, current=torch.cuda.current_device())
            say("two", "a package's input of the other device", **alike(copy.deepcopy(model).to(second), y, f=run))
    say("two", "fallbacks", seen=[f"{n} x {k}" for k, n in Counter(FALLBACKS).most_common(12)])


def call(model: Any, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def move(value: Any, dtype: torch.dtype = torch.float16) -> Any:
    if isinstance(value, Tensor):
        return value.to(DEVICE, dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, dict):
        return {k: move(v, dtype) for k, v in value.items()}
    return tuple(move(v, dtype) for v in value) if isinstance(value, list | tuple) else value


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
    "made beside what is computed": lambda x, y: torch.arange(65, device=(x + 1).device) + x + (x @ y.mT).new_ones(33, 1),
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
        with case("sample", name):
            f = compiled(fn)
            for _ in range(3):
                wrong = error(f(x, y), fn(x, y))
            say("sample", name, error=wrong, fallbacks=FALLBACKS[before:][:2])


def listen() -> None:
    """Remember what fell back, with its code."""

    def hear(event: Any) -> None:
        if getattr(event, "kind", "") in ("fallback", "graph_break"):
            fields = event.fields
            FALLBACKS.append(f"{fields.get('code')} {str(fields.get('detail', ''))[:160]}")

    events.listen(hear)


def apart(names: list[str], args: argparse.Namespace) -> None:
    """Each section in a process of its own, in this order."""
    end = time.monotonic() + args.seconds
    for name in names:
        left = min(args.each, end - time.monotonic())
        if left < 10:
            print(f"{name}: no time left", flush=True)
            continue
        more = [*(["--peer"] if args.peer else []), *(f"--only={n}" for n in args.only), *(f"--beside={n}" for n in args.beside)]
        command = [sys.executable, str(HERE / "gpu.py"), name, "--seconds", str(left), *more]
        try:
            code = subprocess.run(command, timeout=left + 30, check=False).returncode
            print(f"{name}: exit {code}" if code else "", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{name}: ended after {left + 30:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--each", type=float, default=150, help="seconds of one section")
    parser.add_argument("--longest", type=int, default=60, help="seconds of one case")
    parser.add_argument("--only", action="append", default=[], help="of the models: this one; may be repeated")
    parser.add_argument("--beside", action="append", default=[], choices=("our model", "peer step"), help="training: this too")
    parser.add_argument("--peer", action="store_true", help="torch.compile(mode='reduce-overhead') beside ours")
    parser.add_argument("--first", default="", help=argparse.SUPPRESS)  # of section cold: whose first call of what in this process
    args = parser.parse_args(namespace=ARGS)
    if args.first:
        print(json.dumps(first_call(*args.first.split(), args.only[0])))
        return
    names = args.sections or [n for n in SECTIONS if n != "two"]
    unknown = [n for n in names if n not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}")
    if len(names) > 1:
        apart(names, args)
        return
    END[0] = time.monotonic() + args.seconds
    args.name = names[0]
    listen()
    print(torch.__version__, torch.cuda.get_device_name(), torch.cuda.device_count(), flush=True)
    try:
        SECTIONS[names[0]]()
    except OutOfTime:
        print("out of time", flush=True)
    except Exception as e:
        print(f"{names[0]} stopped: {type(e).__name__}: {str(e)[:600]}", flush=True)
        print("".join(traceback.format_tb(e.__traceback__)[-6:]), flush=True)
    failed = [r for r in ROWS if "failed" in r or r.get("error", 0) > 1e-2]
    print(f"{len(ROWS)} figures, {len(failed)} wrong or failed: {', '.join(r['what'] for r in failed)}", flush=True)


if __name__ == "__main__":
    main()
