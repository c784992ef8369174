"""Random programs with NumPy's arrays and numbers, objects with `__torch_function__`, subclasses of Tensor and modes of torch
functions, as arguments, globals and inside. Each is run as it is and compiled, in worlds of their own, with dtypes, sizes and memory orders
that change; after every call results (types and dtypes, read-only or not), exceptions, arguments and what handlers noted must be the same.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz_foreign.py FIRST LAST STEPS [BACKEND]
"""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import fuzz_harness
import numpy as np
import torch
from fuzz_harness import Draw

import torchsmith
from torchsmith import events

HEAD = """
import numpy as np, torch, torch.nn.functional as F
from torch.overrides import TorchFunctionMode, BaseTorchFunctionMode, handle_torch_function, has_torch_function
noted = []
class Mark:
    def __init__(self, v=2.0): self.v = v; self.hits = 0
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.hits += 1; noted.append(func.__name__)
        return func(*[a.v if isinstance(a, Mark) else a for a in args], **(kwargs or {}))
class Wrapped:
    def __init__(self, t): self.t = t
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = {k: v.t if isinstance(v, Wrapped) else v for k, v in (kwargs or {}).items()}
        if func is torch.mul: return NotImplemented
        out = func(*[a.t if isinstance(a, Wrapped) else [q.t if isinstance(q, Wrapped) else q for q in a] if isinstance(a, list) else a
                     for a in args], **kwargs)
        return Wrapped(out) if isinstance(out, torch.Tensor) else out
class Plain(torch.Tensor): pass
class Noting(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        noted.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs)
class Tagged(torch.Tensor):
    tag = "none"
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        if type(out) is Tagged: out.tag = "made"
        return out
    def more(self): return self + 1
class Off(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
class Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.sin, torch.ones, torch.Tensor.add, torch.add, F.relu) else out
class Notes(TorchFunctionMode):
    def __init__(self): self.n = 0; super().__init__()
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.data_ptr:  # Tensor.numpy calls it on some calls and not on others
            self.n += 1; noted.append(getattr(func, "__name__", "?"))
        return func(*args, **(kwargs or {}))
class Types(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor): kwargs.setdefault("dtype", torch.float64)
        return func(*args, **kwargs)
def own(x, scale=1.0):
    if has_torch_function((x,)): return handle_torch_function(own, (x,), x, scale=scale)
    return x * scale
mark, wrapped = Mark(), Wrapped(torch.tensor([1.0, -2.0, 3.0]))
table, count = np.arange(6, dtype="float32").reshape(2, 3), np.float64(1.5)
notes = Notes()
"""

# y: a tensor; a: an array; n: a number of Python's or NumPy's; s: of a subclass; b: an array that the program made. r: results.
NUMPY = """
b = a * 2
b = a + table[0, 0]
b = np.sin(a.astype("float32"))
b = np.where(a > 0, a, -a)
b = a.reshape(-1)[::2]
b = a.T
b = a[..., None] + 1
b = np.concatenate([a.ravel(), b.ravel()])
b = np.stack([a, a * 1])
b = a.sum(axis=0)
b = a.mean(axis=-1, keepdims=True)
b = np.clip(a, -1, 1)
b = np.maximum(a, n)
b = a / 2
b = a // 2 if a.dtype.kind != "b" else a
b = a ** 2 if a.dtype.kind != "b" else a
b = a.astype(np.int32)
b = a.astype(np.float16)
b = np.zeros_like(a)
b = np.ones(a.shape[-1:], dtype=np.float32)
b = np.arange(a.shape[-1])
b = np.full((2, 3), n)
b = np.asarray(y.detach())
b = y.detach().numpy()
b = y.numpy(force=True) + 1
b = np.array([1, 2, 3])
b = np.exp(-np.abs(a.astype("float64")))
b = np.cumsum(a.ravel())
b = np.argsort(a.ravel()) if a.size else a
b = np.dot(a.reshape(-1), a.reshape(-1)) + np.zeros(3)
b = a @ a.T if a.dtype.kind == "f" else a
b = np.broadcast_to(a[..., :1], a.shape)
b = np.transpose(a)
b = np.squeeze(a[None])
b = np.tile(a.ravel(), 2)
b = a.copy(); b[..., 0] = 7
b = a.copy(); b += 1
b = np.float32(n) * a
b = np.linspace(0, 1, 3)
b = np.prod(a.astype("float32"), axis=0)
b = np.isnan(a.astype("float32"))
b = a[a > 0]
b = np.sqrt(np.abs(a)) if a.dtype.kind == "f" else a
b = np.einsum("...i->...", a) if a.dtype.kind == "f" else a
b = np.round(a.astype("float32"), 1)
b = np.flip(a, 0)
b = np.expand_dims(a, 0)
b = np.diff(a.ravel()) if a.dtype.kind != "b" else a
b = np.repeat(a, 2, axis=0)
b = np.where(a)[0]
b = np.roll(a, 1)
b = np.triu(np.atleast_2d(a))
a[...] = a + a.dtype.type(1)
a[0] = 0
table[0, 0] += 1
table[:, 1] = len(r)
a.fill(1)
y = y + torch.from_numpy(table)[0, 0]
y = y + torch.tensor(b.sum())
y = y + torch.as_tensor(np.asarray(b, dtype="float32")).sum()
y = y * torch.from_numpy(np.ascontiguousarray(b).astype("float32")).mean()
y = y + n
y = y * count
y = y + np.float32(0.5)
y = y[: int(np.int64(2))]
y = y + float(n)
y = torch.add(y, n)
y = y + torch.full((1,), n)
y = y + torch.as_tensor(n)
y.numpy()[...] = 3
r.append(b.shape)
r.append(b.dtype)
r.append(b.dtype == np.float32)
r.append(b.sum())
r.append(b.max() if b.size else None)
r.append(type(b.sum()).__name__)
r.append(b.ndim + b.size)
r.append(b)
r.append(b[0] if b.ndim else b)
r.append(n * 2)
r.append(count + n)
r.append(np.sqrt(np.abs(n)))
r.append(isinstance(n, np.generic))
r.append(isinstance(b, np.ndarray))
r.append(np.float32(n))
r.append(int(n))
r.append(b.tolist() if b.size < 4 else 0)
r.append(b.flags.writeable)
r.append(len(b) if b.ndim else 0)
r.append(np.allclose(a, a))
r.append((a == b).all() if a.shape == b.shape else None)
r.append(a.any())
r.append(np.pi * n)
r.append(np.shape(y))
r.append(np.finfo(np.float32).eps)
r.append(np.result_type(a, b))
r.append(b.item() if b.size == 1 else None)
if a.size > 4: r.append("large")
for v in b.ravel()[:2]: r.append(v)
a, b = b, a
""".strip().split("\n")

OVERRIDES = """
y = torch.add(y, mark)
y = torch.mul(mark, y)
y = F.relu(y) + torch.add(y, mark)
r.append(torch.sum(wrapped).t)
r.append(torch.cat([wrapped, wrapped]).t)
r.append(torch.mul(wrapped, 2))
y = y + torch.sin(wrapped).t[0]
y = own(y, 0.5)
r.append(own(wrapped, scale=3))
r.append(own(s).sum())
r.append(mark.hits)
y = y + torch.add(s, 1).sum()
s = s * 2
s = torch.sin(s)
s = s[:1]
s = s.as_subclass(torch.Tensor)
s = y.as_subclass(Plain)
s = y.as_subclass(Noting) + 1
s = y.as_subclass(Tagged) * 2
s = y.detach().as_subclass(Off)
s = torch.cat([s, s])
s = s.clone()
s.add_(1)
s.mul_(0.5)
y = y + s.sum()
y = s + y.sum()
r.append(type(s).__name__)
r.append(type(s + y.sum()).__name__)
r.append(isinstance(s, torch.Tensor))
r.append(isinstance(s, Plain))
r.append(s)
r.append(getattr(s, "tag", 0))
r.append(s.shape)
r.append(type(s.data).__name__)
if isinstance(s, Tagged): s = s.more()
s.note = len(r); r.append(s.note)
s = Plain([1.0, 2.0])
s = torch.ones(2).as_subclass(Noting)
s = torch.nn.Parameter(torch.ones(2)); s.requires_grad_(False)
a, b = y.detach(), s.detach(); r.append(type(torch.maximum(a.sum(), b.sum())).__name__); a = b = np.ones(2)
with torch.device("cpu"): y = y + torch.ones(1)
with torch.device("meta"): q = torch.ones(3)
with torch.device("meta"): r.append(torch.zeros(2).device.type)
with torch.device("meta"): r.append((torch.empty(2, 3) @ torch.rand(3, 4)).shape)
with torch.device("meta"): y = y * 2
with torch.device("meta"): r.append(torch.as_tensor(y).device.type)
with torch.device("meta"): r.append(torch.nn.Linear(2, 3).weight.device.type)
with torch.device("meta"): r.append(torch.tensor([1.0]).is_meta)
with torch.device("meta"), torch.device("cpu"): y = y + torch.arange(2.0).sum()
with torch.device("meta"): r.append(torch.zeros(2, device="cpu").device.type)
with torch.device("meta"): r.append(torch.ones_like(y).device.type); r.append(y.new_zeros(2).device.type)
with Doubles(): y = torch.sin(y)
with Doubles(): y = y + torch.ones(1)
with Doubles(): y = torch.add(y, mark)
with Doubles(), Notes(): y = F.relu(y)
with Notes() as m: y = y * 2; r.append(m.n)
with notes: y = y.cos() + 1
with notes, Doubles(): y = y.cos() + torch.ones(1)
with Types(): y = y + torch.ones(1)
with Types(): r.append(torch.arange(3).dtype)
with Types(), torch.device("meta"): r.append(torch.zeros(2).dtype); r.append(torch.full((2,), 1).device.type)
with torch.device("meta"), Types(): r.append(torch.ones(2)); r.append(torch.tensor(1))
with Types(): y = y.to(torch.float32)
with BaseTorchFunctionMode(): y = y.exp().clamp(max=3)
with Doubles(): y = own(y)
with Doubles(): y = torch.sin(s).sum() + y
with torch._C.DisableTorchFunctionSubclass(): r.append(type(torch.add(s, 1)).__name__)
with torch._C.DisableTorchFunctionSubclass(): y = y + s.sum()
with torch._C.DisableTorchFunction(): r.append(type(s * 2).__name__)
r.append(notes.n)
r.append(len(torch.overrides._get_current_function_mode_stack()))
torch.add(y, wrapped, out=y)
print(end="")
print(end=""); y = y + 1
""".strip().split("\n")

BLOCKS = """
if n > 0:
if y.dim() == 1:
for i in range(2):
with Doubles():
with notes:
with Types():
with torch.device("meta"):
with torch.device("cpu"):
with torch.no_grad():
with np.errstate(all="ignore"):
try:
""".strip().split("\n")


def program(seed: int, steps: int) -> str:
    d = Draw(seed)
    lines = d.choice((NUMPY, OVERRIDES, NUMPY + OVERRIDES))
    out: list[str] = []

    def block(depth: int, room: int, indent: str) -> None:
        for _ in range(room):
            if depth < 2 and d.random() < 0.15:
                head = d.choice(BLOCKS)
                out.append(indent + head)
                block(depth + 1, 1 + d.randrange(3), indent + "    ")
                if head == "try:":
                    out.append(indent + "except Exception as e: r.append(type(e).__name__)")
            else:
                out.append(indent + d.choice(lines))

    block(0, steps, "    ")
    return "\n".join(["def fn(x, a, n, s):", "    y, r, b = x * 1, [], a", *out, "    return y, r, b, s"]) + "\n"


class World:
    number = 0

    def __init__(self, text: str) -> None:
        World.number += 1
        module = types.ModuleType("fuzz_foreign_world")
        sys.modules[module.__name__] = module
        self.module, self.space = module, module.__dict__
        exec(compile(HEAD, "<head>", "exec"), self.space)
        exec(compile(text, f"<program {World.number}>", "exec"), self.space)

    def given(self, d: Draw) -> tuple[Any, ...]:
        """Arguments of a call: the same ones for the same state of `d`."""
        size = d.choice((3, 3, 3, 4, 1))
        x = torch.linspace(-1, 2, size)
        kinds = ("float32", "float32", "float32", "float64", "int64", "int32", "bool", "uint8")
        made = np.linspace(-2, 3, 2 * size).reshape(2, size).astype(d.choice(kinds))
        a = d.choice([made, made, made[:, ::-1], made.T, made[0], np.asfortranarray(made)])
        if d.random() < 0.1:
            a.flags.writeable = False
        n = d.choice((1.5, 1.5, 2, -1.0, np.float32(0.5), np.float64(2.5), np.int64(3)))
        kind = d.choice(("Plain", "Plain", "Noting", "Tagged", "Off", ""))
        s = torch.linspace(0, 1, size)
        return x, a, n, s.as_subclass(self.space[kind]) if kind else s

    def snapshot(self) -> Any:
        s = self.space
        return [list(s["noted"]), s["mark"].hits, s["notes"].n, s["wrapped"].t, s["table"], s["count"]]


def plain(v: Any) -> Any:
    """A value as something that can be compared across worlds."""
    if isinstance(v, torch.Tensor):
        own = {k: plain(q) for k, q in sorted(vars(v).items())}
        with torch._C.DisableTorchFunctionSubclass():
            values = None if v.is_meta else v.detach().double()
            return ["tensor", type(v).__name__, str(v.dtype), tuple(v.shape), v.device.type, own, values]
    if isinstance(v, np.ndarray):
        return ["array", v.dtype.str, v.shape, v.flags.writeable, torch.from_numpy(np.array(v, dtype="float64"))]
    if isinstance(v, np.generic):
        return [type(v).__name__, plain(v.item())]
    if isinstance(v, dict):
        return {k: plain(q) for k, q in v.items()}
    if isinstance(v, (list, tuple)):
        return [type(v).__name__, *map(plain, v)]
    if type(v).__name__ == "Wrapped":
        return ["Wrapped", plain(v.t)]
    if isinstance(v, (int, float)):
        return [type(v).__name__, torch.tensor(float(v), dtype=torch.float64)]
    return v if isinstance(v, (str, type(None))) else str(v)


def difference(a: Any, b: Any, at: str = "") -> str:
    """Where two such values differ; empty: they do not."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.shape == b.shape and torch.allclose(a, b, 2e-3, 2e-3, equal_nan=True)
        return "" if same else f"{at}: {a.flatten()[:6].tolist()}, eager {b.flatten()[:6].tolist()}"
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next((found for i, (p, q) in enumerate(zip(a, b, strict=True)) if (found := difference(p, q, f"{at}[{i}]"))), "")
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((found for k in a if (found := difference(a[k], b[k], f"{at}.{k}"))), "")
    return "" if type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b else f"{at}: {str(a)[:120]}, eager {str(b)[:120]}"


def run(text: str, seed: int, backend: str | None, calls: int = 4) -> list[Any]:
    """What each call gave, and the world after it."""
    world = World(text)
    fn = world.space["fn"]
    call = fn if backend is None else torchsmith.compile(fn, backend=backend)
    d, out = Draw(seed * 31 + 7), []
    for _ in range(calls):
        given = world.given(d)
        stack = torch.overrides._get_current_function_mode_stack()
        try:
            got = plain(call(*given))
        except Exception as e:
            got = ["raised", type(e).__name__, str(e).replace(f"<program {World.number}>", "")[:60]]
        assert torch.overrides._get_current_function_mode_stack() == stack
        out.append([got, plain(given), plain(world.snapshot())])
    return out


def compare(seed: int, steps: int = 8, backend: str = "inductor") -> list[str]:
    """Raises where compiled and eager differ; says what of ours failed on the way."""
    torchsmith.compiler.reset()
    text = program(seed, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = run(text, seed, None)
        with events.recording() as got:
            have = run(text, seed, backend)
    for k, (a, b) in enumerate(zip(have, want, strict=True)):
        found = difference(a, b)
        assert not found, f"call {k}: {found}"
    bad = [e.fields for e in got if e.fields.get("code") in ("API004", "API005", "CAP099")]
    return [f"{f.get('code')} {str(f.get('detail'))[:160]}" for f in bad[:1]]


def main() -> int:
    first, last, steps = (int(v) for v in (*sys.argv[1:4], *("0", "100", "8")[len(sys.argv[1:4]) :]))
    return fuzz_harness.run(lambda seed: compare(seed, steps, *sys.argv[4:5]), first, last)


if __name__ == "__main__":
    sys.exit(main())
