"""The measuring protocol: paired bursts A B B A, median ratio with a bootstrap interval, and an A/A control.

In: two callables of no argument. Out: a Pairing. One burst is at least 50 ms of calls, after 100 ms of idling (threads of other runtimes
spin); at least 30 pairs; the figure is the median of B's time over A's with a bootstrap 95 % interval.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Call = Callable[[], Any]

BURST_S = 0.050
IDLE_S = 0.100
PAIRS = 30
NOISE = 0.03


@dataclass(frozen=True, slots=True)
class Protocol:
    pairs: int = PAIRS
    burst_s: float = BURST_S
    idle_s: float = IDLE_S


QUICK = Protocol(pairs=4, burst_s=0.01, idle_s=0.01)  # for smoke runs: its figures mean nothing


@dataclass(frozen=True, slots=True)
class Pairing:
    """ms per call of both (medians), and B over A: above 1 says A is faster."""

    a_ms: float
    b_ms: float
    ratio: float
    low: float
    high: float
    pairs: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def calls_per_burst(call: Call, protocol: Protocol) -> int:
    """How many calls last at least one burst; also warms up."""
    call()
    count = 1
    while True:
        began = time.perf_counter()
        for _ in range(count):
            call()
        took = time.perf_counter() - began
        if took >= protocol.burst_s:
            return count
        count = max(count + 1, int(count * min(8.0, 1.25 * protocol.burst_s / max(took, 1e-9))))


def burst(call: Call, count: int, protocol: Protocol) -> float:
    """Seconds per call of one burst, after the idle time."""
    time.sleep(protocol.idle_s)
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def compare(a: Call, b: Call, protocol: Protocol) -> Pairing:
    """B's time over A's, from A B B A bursts."""
    counts = {a: calls_per_burst(a, protocol), b: calls_per_burst(b, protocol)}
    times: dict[str, list[float]] = {"a": [], "b": []}
    while len(times["a"]) < protocol.pairs:
        for who in "abba":
            call = a if who == "a" else b
            times[who].append(burst(call, counts[call], protocol))
    return pairing(times["a"], times["b"])


def pairing(a: list[float], b: list[float]) -> Pairing:
    """Times of pairs -> median ratio with its bootstrap 95 % interval."""
    ratios = np.asarray(b) / np.asarray(a)
    low, high = bootstrap(ratios)
    return Pairing(statistics.median(a) * 1e3, statistics.median(b) * 1e3, float(np.median(ratios)), low, high, len(ratios))


def bootstrap(ratios: Any, draws: int = 10_000) -> tuple[float, float]:
    """95 % interval of the median; the draws are seeded, so a table can be made again from its raw figures."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, size=(draws, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def is_noisy(control: Pairing) -> bool:
    return abs(control.ratio - 1) > NOISE


def geomean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")
