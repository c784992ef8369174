"""Random programs with state that others share: globals of two modules, attributes of objects and classes, containers, locks, thread-local
storage, foreign context managers, exceptions on their way through them, and patches between calls. Each is run as it is and compiled, in
worlds of their own; after every call results, exceptions and the whole world must be the same.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz_state.py FIRST LAST STEPS
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from typing import Any

import fuzz_harness
import torch
from fuzz_harness import DEVICE, Draw

import torchsmith
from torchsmith import events

HEAD = """
import abc, contextlib, contextvars, decimal, io, math, operator, threading, warnings, weakref, collections
import torch, torch.nn.functional as F
import numpy as np

class Err(Exception):
    def __init__(self, n=0): super().__init__(n); self.n = n
class Other(Err): pass
class Plain:
    count = 0
    name = "plain"
    def __init__(self, **k): self.__dict__.update(k)
    def bump(self, by=1): self.n = getattr(self, "n", 0) + by; return self.n
    @property
    def double(self): return self.n * 2
    @classmethod
    def total(cls): cls.count += 1; return cls.count
class Child(Plain):
    extra = (1, 2)
    def __getattr__(self, name):
        if name.startswith("get_"): return name[4:]
        raise AttributeError(name)
class Slots:
    __slots__ = ("a", "b")
class Manager:
    def __init__(self, log, swallow=False, fail=False): self.log, self.swallow, self.fail = log, swallow, fail
    def __enter__(self): self.log.append("in"); return self
    def __exit__(self, kind, value, trace):
        self.log.append(kind.__name__ if kind else "out")
        if self.fail: raise Other(9)
        return self.swallow
@contextlib.contextmanager
def managed(log):
    log.append("enter")
    try: yield 3
    except KeyError as e: log.append(("caught", str(e)))
    finally: log.append("leave")
class Kind(abc.ABC): pass
def gen(n):
    try:
        for i in range(n): yield i * 2
    finally: pass
log, items, table = [], [1, 2], {"k": 1, "f": 0.5}
o, c, s = Plain(n=1), Child(n=2, t=0.25), Slots()
s.a = 1
lock, rlock, local = threading.Lock(), threading.RLock(), threading.local()
local.v = 2
var = contextvars.ContextVar("var", default=3)
held = Plain(n=7)
ref = weakref.ref(held)
flag, step, rate = True, 0, 0.5
dq = collections.deque([1, 2], 4)
dd = collections.defaultdict(list)
"""
OTHER = """
n, rate, seen = 0, 0.1, []
def helper(x): return x + n
def bump(by=1):
    global n
    n += by
    return n
def drop():
    global extra
    extra = 1
    del extra
def fail(k):
    if k: raise KeyError(k)
    return "fine"
class Conf: depth, width = 1, 2.0
"""

# One line each, of values: `r` are results so far that are no tensors, `y` a tensor.
LINES = """
y = y * 2 + 1
y = y + A.helper(y)
y = B.helper(y).sin()
y = y * t
y = y + step
y = F.relu(y) + len(items)
y = torch.cat([y, y])[: x.shape[0]]
y = y * rate + A.rate
x.add_(1)
y.mul_(t + 1)
r.append(A.bump())
r.append(B.bump(2))
r.append(A.n)
r.append((A.n, B.n, A.__dict__["n"], vars(B)["n"]))
A.n = A.n + 3
B.__dict__["n"] = 5
A.fresh = len(r)
r.append(hasattr(A, "fresh"))
if hasattr(A, "fresh"): del A.fresh
A.drop()
A.seen.append(len(x))
r.append(list(A.seen[-2:]))
global step; step += 1
global rate; rate *= 0.5
globals()["step"] = globals()["step"] + 1
r.append(globals().get("step"))
r.append("nothing" in globals())
r.append(o.bump())
r.append(c.bump(2))
o.fresh = A.n
o.__dict__["n"] = 10
o.__dict__.update(z=1)
r.append(sorted(vars(o)))
r.append(o.double)
if "z" in o.__dict__: del o.z
r.append(getattr(o, "z", None))
r.append(c.get_name)
r.append(hasattr(c, "zzz"))
r.append(Plain.total())
r.append(Child.total())
Child.count = 5
Plain.name = Plain.name + "!"
r.append((o.name, c.name, Plain.count, Child.count, o.count, c.count))
r.append(Child.__dict__.get("count"))
A.Conf.depth += 1; r.append(A.Conf.depth)
s.a += 1; r.append(s.a)
s.b = t; r.append(hasattr(s, "b"))
c.t *= 2; y = y * c.t
items.append(len(r)); r.append(items[-1])
items.append(("t", len(x))); items.append(("t", len(x)))
r.append(items[0] is items[-1])
if len(items) > 6: del items[2:]
r.append(items.pop() if items else None)
table["n"] = table.get("n", 0) + 1; r.append(table["n"])
table["f"] *= 0.5; y = y * table["f"]
r.append(sorted(table))
r.append(table.pop("k", "gone"))
table.setdefault("k", 4)
dq.append(len(r)); r.append(list(dq))
dd["a"].append(step); r.append(len(dd["a"]))
r.append(lock.acquire(blocking=False)); r.append(lock.locked()); lock.release()
r.append(local.v)
local.v += 1
r.append(var.get())
q = ref(); r.append(None if q is None else q.n)
r.append(isinstance(o, Kind)); r.append(isinstance(o, (int, Plain)))
r.append(issubclass(Child, Plain) and not issubclass(Plain, Kind))
r.append(int(t * 10)); r.append(round(t, 3))
r.append(f"{t:.2f}|{step}")
r.append(math.exp(-t)); y = y + math.sqrt(abs(t) + 1)
r.append(t > 0.5); r.append(max(t, 0.5))
r.append(A.fail(0))
r.append(sum(gen(3)) + step)
r.append([v for v in gen(2)])
r.append(operator.itemgetter(0)((step, 2)))
r.append(abs(-3) + len(items))
r.append(min(2, int(np.int64(3))))
r.append(sorted([t, 0.3, step]))
r.append(torch.is_grad_enabled()); r.append(torch.get_default_dtype() is torch.float32)
log.append(step)
r.append(log[-1] if log else None)
r.append({"a": t, "b": (step, [len(x)])})
r.append(types_of(y, t, step))
r.append(next(iter(items), None))
r.append(next((v for v in items if v == 99), "none"))
r.append(str(o.n) + repr(step))
r.append(zip_(items, [1, 2]))
""".strip().split("\n")  # fmt: skip

RAISE = """
raise Err(step)
raise Other(len(x))
raise KeyError("k")
A.fail("deep")
r.append({}["no"])
r.append([][1])
int("x")
o.zzz
assert step > 50, "low"
1 / 0
raise ValueError("v") from Err(1)
next(iter([]))
B.missing
undefined_name
""".strip().split("\n")

# Lines that open a block.
BLOCKS = """
with Manager(log):
with Manager(log, True):
with Manager(log, fail=True):
with Manager(log) as a, Manager(A.seen, True):
with managed(log) as got:
with contextlib.suppress(KeyError, Err):
with contextlib.suppress(ZeroDivisionError):
with contextlib.nullcontext():
with contextlib.ExitStack() as stack:
with contextlib.closing(io.StringIO()):
with rlock:
with torch.no_grad():
with torch.inference_mode():
with warnings.catch_warnings():
with decimal.localcontext():
with np.errstate(all="ignore"):
if t > 0.5:
if flag:
if step % 2:
if o.n > 3:
for i in range(2):
for v in list(items)[:2]:
while len(r) < 3 and tick(r):
""".strip().split("\n")

HANDLERS = """
except Err as e: r.append(e.n)
except (KeyError, IndexError) as e: r.append(type(e).__name__)
except Exception as e: r.append(str(e))
except TypeError: r.append('type')
except AttributeError as e: r.append(e.name)
""".strip().split("\n")

# What happens between calls, in both worlds.
BETWEEN = """
A.n = 20
B.n += 1
A.helper = lambda x: x * 3
B.helper = A.helper
space["step"] = 7
space["rate"] = space["rate"] + 0.25
space["flag"] = not space["flag"]
space["len"] = lambda v: 4
space.pop("len", None)
o.n = 4
o.extra = "new"
o.__dict__.pop("extra", None)
Plain.name = "changed"
Plain.bump = lambda self, by=1: 100
Child.count = 50
items.clear(); items.extend([5, 6, 7])
items.append(0.5)
table.clear(); table.update(k=3, f=0.25)
Kind.register(Plain)
local.v = 40
space.pop("held", None)
A.Conf.depth = 9
A.seen.clear()
A.rate = 0.7
c.t = 0.125
c.__class__ = Plain
space["F"] = space["torch"].nn.functional
space["abs"] = lambda v: 1
A.fail = lambda k: "patched"
log.clear()
nothing = 0
nothing = 0
nothing = 0
""".strip().split("\n")


def program(seed: int, steps: int) -> str:
    """The text of `fn(x, t)`."""
    d = Draw(seed)
    out: list[str] = []

    def block(depth: int, room: int, indent: str) -> int:
        used = 0
        while used < room:
            k = d.random()
            if depth < 3 and k < 0.22:
                out.append(indent + d.choice(BLOCKS))
                used += 1 + block(depth + 1, 1 + d.randrange(3), indent + "    ")
            elif depth < 3 and k < 0.34:
                out.append(indent + "try:")
                used += 1 + block(depth + 1, 1 + d.randrange(2), indent + "    ")
                if d.random() < 0.6:
                    out.append(indent + "    " + d.choice(RAISE))
                if d.random() < 0.8:
                    out.append(indent + d.choice(HANDLERS))
                else:
                    out.extend((indent + "finally:", indent + "    " + line(d)))
            elif depth and k < 0.38:
                out.append(indent + d.choice(RAISE))
                return used + 1
            else:
                out.append(indent + line(d))
                used += 1
        return used

    block(0, steps, "    ")
    names = ["    global step, rate"]
    body = [text.replace("global step; ", "").replace("global rate; ", "") for text in out]
    return "def fn(x, t):\n" + "\n".join([*names, "    y, r = x * 1, []", *body, "    return y, r"]) + "\n"


def line(d: Draw) -> str:
    return str(d.choice(LINES))


HELPERS = """
def tick(r): r.append("tick"); return True
def types_of(*v): return [type(q).__name__ for q in v[1:]] + [isinstance(v[0], torch.Tensor)]
def zip_(a, b): return [p + q for p, q in zip(a, b) if isinstance(p, int)]
"""


class World:
    """One run's modules, objects and function."""

    number = 0

    def __init__(self, text: str) -> None:
        World.number += 1
        name = "fuzz_state_world"
        self.others = [types.ModuleType(f"{name}_{k}") for k in "ab"]
        for m in self.others:
            sys.modules[m.__name__] = m
            exec(compile(OTHER, m.__name__, "exec"), m.__dict__)
        module = types.ModuleType(name)
        sys.modules[name] = module
        self.space: dict[str, Any] = module.__dict__
        self.keep = module
        exec(compile(HEAD + HELPERS, name, "exec"), self.space)
        self.space.update(A=self.others[0], B=self.others[1])
        exec(compile(text, f"<program {World.number}>", "exec"), self.space)

    def act(self, text: str) -> None:
        exec(text, dict(self.space, space=self.space))
        if "held" in text:
            gc.collect()

    def snapshot(self) -> Any:
        s = self.space
        spaces = [{k: v for k, v in vars(m).items() if not k.startswith("__")} for m in self.others]
        things = [s[k] for k in ("log", "items", "table", "o", "c", "dq", "dd", "flag", "step", "rate")]
        kinds = [vars(s[k]).items() for k in ("Plain", "Child")]
        classes = [{k: v for k, v in kind if type(v) in (int, str, float, tuple) and k != "__module__"} for kind in kinds]
        slots = [getattr(s["s"], k, None) for k in ("a", "b")]
        state = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), s["lock"].locked(), s["var"].get(), s["local"].v]
        return plain((spaces, things, classes, slots, state, s["ref"]() is None))


def plain(v: Any) -> Any:
    """A value as something that can be compared across worlds."""
    if isinstance(v, torch.Tensor):
        near = [float(f"{q:.3g}") if abs(q) > 1e-6 else 0.0 for q in v.double().flatten().tolist()]
        return "tensor", str(v.dtype), tuple(v.shape), v.requires_grad, v.is_inference(), near
    if isinstance(v, dict):
        return {str(k): plain(x) for k, x in v.items()}
    if hasattr(v, "__dict__") and type(v).__name__ in ("Plain", "Child"):
        return type(v).__name__, plain(vars(v))
    if isinstance(v, type) and v.__name__ == "Conf":
        return {k: q for k, q in vars(v).items() if type(q) in (int, float)}
    if isinstance(v, (list, tuple)) or type(v).__name__ == "deque":
        return [type(v).__name__, *map(plain, v)]
    return v if isinstance(v, (int, float, str, bool, type(None))) else type(v).__name__


def run(text: str, seed: int, compiled: bool, calls: int = 6) -> list[Any]:
    """What each call gave, and the world after it."""
    world = World(text)
    fn = world.space["fn"]
    call = torchsmith.compile(fn) if compiled else fn
    d, out = Draw(seed * 31 + 7), []
    for _ in range(calls):
        size, t = d.choice((4, 4, 4, 5)), d.choice((0.25, 0.25, 0.7, 0.9, 0.1))
        x = torch.linspace(-1, 2, size, device=DEVICE)
        try:
            got = plain(call(x, t))
        except Exception as e:
            chain = type(e.__cause__).__name__ if e.__cause__ is not None else None
            got = type(e).__name__, str(e).replace(f"<program {World.number}>", ""), chain
        out.append((got, plain(x), world.snapshot()))
        with contextlib.suppress(Exception):
            world.act(d.choice(BETWEEN))
    while world.space["lock"].locked():
        world.space["lock"].release()
    return out


def compare(seed: int, steps: int = 8) -> list[str]:
    """Raises where compiled and eager differ; says what of ours failed on the way."""
    text = program(seed, steps)
    want = run(text, seed, False)
    with events.recording() as got:
        have = run(text, seed, True)
    for k, (a, b) in enumerate(zip(have, want, strict=True)):
        assert a == b, f"call {k}: {difference(a, b)}"
    bad = [e.fields for e in got if e.fields.get("code") in ("API004", "API005", "CAP099")]
    return [f"{f.get('code')} {str(f.get('detail'))[:160]}" for f in bad[:1]]


def difference(a: Any, b: Any, at: str = "") -> str:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return next((difference(x, y, f"{at}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), "")
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((difference(a[k], b[k], f"{at}.{k}") for k in a if a[k] != b[k]), "")
    return f"{at}: {str(a)[:200]}, eager {str(b)[:200]}"


def main() -> int:
    first, last, steps = (int(v) for v in (*sys.argv[1:], *("0", "100", "8")[len(sys.argv) - 1 :]))
    return fuzz_harness.run(lambda seed: compare(seed, steps), first, last)


if __name__ == "__main__":
    sys.exit(main())
