"""The fuzzers of tests/cpu with tensors on any device: many processes, a time limit, one summary.

In: names of fuzzers (none: all), --device (cpu, cuda, or fake: processor tensors through the driver of tests/gpu, and what a GPU would
compute is planned and verified), --seconds, --jobs, --first (seed). Out: a summary in one file (--out, or fuzz_DEVICE.md in $OUT or here),
written again after each finding and every few seconds. A finding is a program whose compiled calls differ from eager's, an internal error
or exception of ours, a crash, a hang, or a device that no longer answers. A process that dies while eager runs is no finding where a new
one, asked the same program, dies so too.

    python bench/fuzz.py --device cuda --seconds 240
    python bench/fuzz.py --device cuda --show chains 17       # one program in this process

Processes are asked one program at a time. Each has its share of the fuzzers, so that all get about the same time, and a cache directory
of its own. One that died or found something is replaced. Most of them compile C without optimizations (unoptimized.py), which is many times
cheaper (--optimized).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from crew import environments

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
EACH = 150  # processor's seconds of one program
PATIENCE = 4  # of a process that shares the machine, or waits for ever: EACH times this passes before it is ended
LIFE = 600  # programs of one process

# Each gives what was not compiled, and raises what is wrong.
Fuzzer = Callable[[int], Sequence[str]]
FUZZERS: dict[str, Callable[[Callable[[str], None]], Fuzzer]] = {}


def fuzzer(make: Callable[[Callable[[str], None]], Fuzzer]) -> Callable[[Callable[[str], None]], Fuzzer]:
    FUZZERS[make.__name__] = make
    return make


@fuzzer
def calls(doing: Callable[[str], None]) -> Fuzzer:
    import fuzz_calls

    return lambda seed: fuzz_calls.compare(seed, 8)


@fuzzer
def sizes(doing: Callable[[str], None]) -> Fuzzer:
    import fuzz_sizes
    import torch

    def one(seed: int) -> Sequence[str]:
        with torch.inference_mode():
            return fuzz_sizes.compare(seed, 5)

    return one


@fuzzer
def modules(doing: Callable[[str], None]) -> Fuzzer:
    import fuzz_modules

    return lambda seed: fuzz_modules.compare(seed, 5)


@fuzzer
def layers(doing: Callable[[str], None]) -> Fuzzer:
    import fuzz_layers

    return lambda seed: fuzz_layers.compare(seed, 3, doing)


@fuzzer
def chains(doing: Callable[[str], None]) -> Fuzzer:
    import fuzz_chains

    corpus = fuzz_chains.Corpus()

    def one(seed: int) -> Sequence[str]:
        ((_, why, more),) = fuzz_chains.findings(corpus, range(seed, seed + 1), doing)
        if why and why != "not drawn":
            raise AssertionError(f"{why}\n{more}")
        return more.splitlines() if not why else []

    return one


@fuzzer
def directions(doing: Callable[[str], None]) -> Fuzzer:
    import fuzz_chains
    import fuzz_directions

    corpus, names = fuzz_chains.Corpus(), tuple(fuzz_directions.DIRECTIONS)

    def one(seed: int) -> Sequence[str]:
        number, which = divmod(seed, len(names))
        ((_, why, more),) = fuzz_chains.findings(corpus, range(number, number + 1), doing, direction=names[which])
        if why and why != "not drawn":
            raise AssertionError(f"{names[which]} {number}: {why}\n{more}")
        return more.splitlines() if not why else []

    return one


@fuzzer
def rules(doing: Callable[[str], None]) -> Fuzzer:
    import fuzz_rules
    import torch
    from fuzz_harness import Draw

    def one(seed: int) -> Sequence[str]:
        dtype = fuzz_rules.DTYPES[seed % len(fuzz_rules.DTYPES)]
        torch.manual_seed(seed)
        drawn = fuzz_rules.corpus(dtype, "*", Draw(seed), entries=8)
        wrong = [f"{fuzz_rules.text(c)}: {why}" for c, why in fuzz_rules.findings(drawn, seed, 30, 0.2, doing=doing)] if drawn else []
        if wrong:
            raise AssertionError("\n".join(wrong))
        return []

    return one


@fuzzer
def numbers(doing: Callable[[str], None]) -> Fuzzer:
    import fuzz_numbers
    import fuzz_rules

    ops, known = fuzz_numbers.operators(), dict[Any, dict[Any, Any]]()

    def one(seed: int) -> Sequence[str]:
        turn, number = divmod(seed, len(ops))
        op, dtype = ops[number], fuzz_rules.DTYPES[turn % len(fuzz_rules.DTYPES)]
        if dtype not in known:
            known[dtype] = fuzz_numbers.database_calls(dtype)
        doing(f"eager drawing {op}")
        found = fuzz_numbers.findings(op, fuzz_numbers.calls_of(op, known[dtype], dtype), doing=doing)
        wrong = [f"{fuzz_rules.text(call)} {place}: {why}" for call, place, why in found if why]
        if wrong:
            raise AssertionError("\n".join(wrong))
        return []

    return one


@fuzzer
def python(doing: Callable[[str], None]) -> Fuzzer:
    import fuzz_python

    import torchsmith

    def one(seed: int) -> Sequence[str]:
        dynamic = True if seed % 3 == 0 else None
        torchsmith.compiler.reset()
        if why := fuzz_python.check(seed, dynamic, "inductor"):
            torchsmith.compiler.reset()
            exact = fuzz_python.check(seed, dynamic, "eager")
            if not exact and fuzz_python.enlarges_rounding(seed):
                return ["rounding that the program enlarges: eager differs as much where its inputs' last digits do"]
            raise AssertionError(exact or f"in kernels alone, capture is exact: {why}")
        return []

    return one


@fuzzer
def state(doing: Callable[[str], None]) -> Fuzzer:
    import fuzz_state

    return lambda seed: fuzz_state.compare(seed, 8)


@fuzzer
def foreign(doing: Callable[[str], None]) -> Fuzzer:
    import fuzz_foreign

    return lambda seed: fuzz_foreign.compare(seed, 6)


def prepared(device: str, stack: ExitStack, former: Callable[..., Any] | None = None) -> None:
    """This process, ready to import the fuzzers. `former`: of the kernels that the fake device runs."""
    os.environ["TORCHSMITH_FUZZ_DEVICE"] = "cpu" if device == "fake" else device
    sys.path[:0] = [str(HERE.parent / "src"), str(TESTS / "cpu"), str(TESTS / "gpu")]
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    if device == "fake":
        import pretend

        from torchsmith.ir.verify import verify_plan, verify_scheduled
        from torchsmith.runtime import externs_torch, host_torch
        from torchsmith.schedule.blocks import form_blocks
        from torchsmith.schedule.memory.plan import plan

        def formed(program: Any, options: Any, decided: Any, ready: Any) -> Any:
            """The processor's kernels; what a GPU would get is only verified."""
            made = form_blocks(program, options, decided)
            verify_scheduled(made)
            verify_plan(plan(made, options))
            return pretend.form(program, options, decided)

        def refused(*_: Any) -> None:
            raise RuntimeError("the driver of the tests cannot record torch's own kernels")

        stack.enter_context(pretend.pretending(former or formed))
        stack.enter_context(patch.object(host_torch, "bind", externs_torch.bind))  # the processor's operators, of any dtype
        stack.enter_context(patch.dict(host_torch.RECORDERS, {"cuda": (refused, refused)}))


def own_errors(recorded: Sequence[Any]) -> str:
    """What a program's compilation said of an internal error, after which it ran eagerly and right; "" where there was none."""
    told = [e.fields for e in recorded if e.fields.get("code") == "API005"]
    return f"INTERNAL {told[0].get('detail')}\n{told[0].get('traceback', '')[-2500:]}" if told else ""


def work(device: str, is_optimized: bool) -> None:
    """Answers lines "fuzzer seed" with lines of JSON, until the device no longer answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # programs print
    with ExitStack() as stack:
        prepared(device, stack)
        import torch

        from torchsmith import events

        if not is_optimized:
            import unoptimized

            unoptimized.use(stack)

        def say(**fields: Any) -> None:
            answers.write(json.dumps(fields) + "\n")

        made: dict[str, Fuzzer] = {}
        for line in sys.stdin:
            name, seed = line.split()
            why, native = "", Counter[str]()
            try:
                if name not in made:
                    made[name] = FUZZERS[name](lambda what: say(doing=what[:6000]))
                with events.recording() as recorded:
                    native.update(" ".join(x.split())[:90] for x in made[name](int(seed)))
                why = own_errors(recorded)
            except Exception as e:
                why = f"{type(e).__name__} {e}"
            try:
                if device.startswith("cuda"):
                    torch.cuda.synchronize()
            except Exception as e:
                say(lost=f"{type(e).__name__} {str(e).splitlines()[0]}; {why}"[:6000])
                return
            say(done=why[:6000], native=native)


class Summary:
    """What was found, written to a file as it comes."""

    def __init__(self, path: Path, head: str) -> None:
        self.path, self.head, self.lock = path, head, threading.Lock()
        self.start = time.monotonic()
        self.programs: Counter[str] = Counter()
        self.own: Counter[str] = Counter()  # programs of which eager itself dies
        self.seconds: dict[str, float] = {}
        self.last: dict[str, int] = {}
        self.native: Counter[str] = Counter()
        self.found: dict[tuple[str, str], list[tuple[int, str]]] = {}

    def add(self, name: str, seed: int, why: str, native: dict[str, int], seconds: float) -> None:
        with self.lock:
            self.programs[name] += 1
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.last[name] = max(seed, self.last.get(name, seed))
            self.native.update({f"{name}: {k}": n for k, n in native.items()})
            if why:
                alike = name, re.sub(r"\d+", "N", why.splitlines()[0])[:100]
                self.found.setdefault(alike, []).append((seed, why))
                print(f"{name} {seed} {why.splitlines()[0][:300]}", flush=True)
        if why:
            self.write()

    def add_own(self, name: str) -> None:
        with self.lock:
            self.own[name] += 1

    def write(self) -> None:
        with self.lock:
            wrong = {n: sum(len(v) for (m, _), v in self.found.items() if m == n) for n in self.programs}
            lines = [self.head, "", f"{time.monotonic() - self.start:.0f} s, {sum(self.programs.values())} programs", ""]
            lines += ["| fuzzer | programs | last seed | seconds each | findings | eager died |", "|---|---|---|---|---|---|"]
            lines += [
                f"| {n} | {count} | {self.last[n]} | {self.seconds[n] / count:.2f} | {wrong[n]} | {self.own[n]} |"
                for n, count in sorted(self.programs.items())
            ]
            for (name, _), rows in sorted(self.found.items(), key=lambda x: -len(x[1])):
                seeds = ", ".join(str(s) for s, _ in rows[:12])
                lines += ["", f"## {name}: {len(rows)} (seeds {seeds})", "```", min((w for _, w in rows), key=len)[:3000], "```"]
            lines += ["", "## Not compiled, or no fault", "", *(f"- {n} x {k}" for k, n in self.native.most_common(60))]
            self.path.write_text("\n".join(lines) + "\n")


class Hand:
    """A process that runs programs."""

    def __init__(self, device: str, env: dict[str, str], is_optimized: bool) -> None:
        command = [sys.executable, str(HERE / "fuzz.py"), "--device", device, "--work", *(["--as-users"] if is_optimized else [])]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by end)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=env)
        self.lines = queue.Queue[str]()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, name: str, seed: int, end: float) -> dict[str, Any] | None:
        """What became of a program; None where the time ended before."""
        begun, worked, doing = time.monotonic(), self.seconds(), ""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(f"{name} {seed}\n")
            self.process.stdin.flush()
            while True:
                try:
                    line = self.lines.get(timeout=max(0.01, min(EACH, end - time.monotonic())))
                except queue.Empty:
                    if time.monotonic() >= end:
                        return None
                    if self.seconds() - worked > EACH or time.monotonic() - begun > PATIENCE * EACH:
                        return {"lost": "HANG", "doing": doing}
                    continue
                if not line:
                    break
                answer = json.loads(line)
                if "doing" not in answer:
                    return answer | {"doing": doing}
                doing = answer["doing"]
        except BrokenPipeError:
            pass
        status = self.process.wait()
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 2000))
        return {"lost": f"CRASH {status}", "doing": f"{doing}\n{self.errors.read()}"}

    def seconds(self) -> float:
        """Of the processor, that it and the compilers that it waited for have used."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()


class Tasks:
    """Seeds of each fuzzer, from `first` on, `most` of each."""

    def __init__(self, names: Sequence[str], first: int, most: int) -> None:
        self.lock, self.first, self.left = threading.Lock(), first, dict.fromkeys(names, most)
        self.given: Counter[str] = Counter()

    def take(self, spent: dict[str, float]) -> tuple[str, int] | None:
        """The next seed of the fuzzer that had the least of these seconds; of one of the others where these are through."""
        with self.lock:
            open_ = [n for n in self.left if self.left[n] > 0]
            name = min([n for n in open_ if n in spent] or open_, key=lambda n: spent.get(n, 0.0), default=None)
            if name is None:
                return None
            self.left[name] -= 1
            self.given[name] += 1
            return name, self.first + self.given[name] - 1


def died_in_eager(answer: dict[str, Any] | None) -> bool:
    return answer is not None and "lost" in answer and answer["doing"].startswith("eager")


def employ(number: int, names: Sequence[str], new: Callable[[Path], Hand], end: float, tasks: Tasks, summary: Summary) -> None:
    """One process after the other, asked until the time or the programs are over."""
    spent = dict.fromkeys(names, 0.0)
    task = tasks.take(spent)
    while task is not None and time.monotonic() < end - 5:
        with tempfile.TemporaryDirectory(prefix=f"torchsmith-fuzz-{number}-", ignore_cleanup_errors=True) as cache:
            hand = new(Path(cache))
            for _ in range(LIFE):
                (name, seed), before = task, time.monotonic()
                answer = hand.ask(name, seed, end)
                seconds = time.monotonic() - before
                spent[name] = spent.get(name, 0.0) + seconds
                task = tasks.take(spent)
                if answer is None:
                    break
                if died_in_eager(answer):
                    other = new(Path(cache))
                    if died_in_eager(other.ask(name, seed, end)):
                        summary.add_own(name)
                        answer = {"lost": "", "doing": ""}
                    else:
                        answer["lost"] += " in eager, but not in a process of its own"
                    other.end()
                summary.add(name, seed, answer.get("done", "") or (f"{answer['lost']}\n{answer['doing']}" if answer.get("lost") else ""),
                            answer.get("native", {}), seconds)  # fmt: skip
                if "lost" in answer or answer.get("done") or task is None:  # what was wrong may have left something behind
                    break
            hand.end()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("fuzzers", nargs="*", help=f"of {', '.join(FUZZERS)}")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seconds", type=float, default=240)
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    p.add_argument("--first", type=int, default=0)
    p.add_argument("--programs", type=int, default=1 << 30, help="so many of each fuzzer, if time allows")
    p.add_argument("--optimized", type=int, default=8, metavar="N", help="of N processes one compiles C as users do, the others at -O0")
    p.add_argument("--out", type=Path)
    p.add_argument("--show", nargs=2, metavar=("FUZZER", "SEED"), help="run one program here")
    p.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--as-users", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.work:
        work(args.device, args.as_users)
        return 0
    if args.show:
        with ExitStack() as stack:
            prepared(args.device, stack)
            from torchsmith import events

            with events.recording() as recorded:
                print(FUZZERS[args.show[0]](lambda what: print(what, flush=True))(int(args.show[1])))
            if why := own_errors(recorded):
                print(why)
        return bool(why)
    names = args.fuzzers or list(FUZZERS)
    if unknown := [n for n in names if n not in FUZZERS]:
        p.error(f"no fuzzer {', '.join(unknown)}")
    out = args.out or Path(os.environ.get("OUT", ".")) / f"fuzz_{args.device.replace(':', '')}.md"
    command = " ".join(["python bench/fuzz.py", *sys.argv[1:]])
    summary, end = Summary(out, f"# Fuzzers\n\n{command}, {args.jobs} processes"), time.monotonic() + args.seconds
    tasks, numbers = Tasks(names, args.first, args.programs), itertools.count(1)

    def new(env: dict[str, str], cache: Path) -> Hand:
        return Hand(args.device, {**env, "TORCHSMITH_CACHE_DIR": str(cache)}, next(numbers) % args.optimized == 0)

    crew = []
    for k, env in enumerate(environments(args.device, args.jobs)):
        mine = names[k :: args.jobs] or [names[k % len(names)]]
        crew.append(threading.Thread(target=employ, args=(k, mine, functools.partial(new, env), end, tasks, summary)))
    for t in crew:
        t.start()
    for t in crew:
        while t.is_alive():
            t.join(10)
            summary.write()
    summary.write()
    print(out.read_text())
    return int(bool(summary.found))


if __name__ == "__main__":
    sys.exit(main())
