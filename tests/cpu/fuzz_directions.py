"""Directions of fuzz_chains.py: programs of single calls, of a kind that chains seldom reach. `--direction`:

edges       the database's operators on values at the ends of what a dtype holds (NaN, infinities, zeros of both signs, subnormal, largest),
            sizes of 1, 7, 16, 17, 33; forward, or with derivatives. Each element is compared by itself, with its sign.
out         out= of every operator that has it: of the right shape, another one, empty, not contiguous, another dtype, an operand
reductions  dimensions alone, several, negative, none; keepdim, dtype, correction; permuted, expanded and empty operands
names       every public callable, its arguments drawn by the schema or the signature, by place or by name
views       several views of an argument, an operator, a write through a view; offsets and versions are compared too

A seed has its own entries, names or reductions in turn, so that as many seeds as there are of these reach all. What eager refuses is a
program of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from fuzz_chains import BIG, DTYPES, HOMES, Corpus, Program, Writer, copies, derivatives, fits, outcome
from torch.utils import _pytree as pytree

EACH = 6  # calls of a program
SIZES = (1, 7, 16, 17, 33)


class Calls(Writer):
    """A program of EACH calls on arguments of their own."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        super().__init__(corpus, seed)
        self.seed = seed

    def fresh(self) -> str:
        self.count += 1
        return f"r{self.count - 1}"

    def add_input(self, t: torch.Tensor) -> str:
        name = f"v{len(self.program.inputs)}"
        self.program.inputs.extend(copies([t]))  # as it is before the call
        self.values[name] = t
        self.made.append(name)
        return name

    def call(self, number: int) -> None:
        """Writes the line of this direction's call `number`."""
        raise NotImplementedError

    def draw(self) -> Program | None:
        for k in range(EACH):
            self.call(self.seed * EACH + k)
            if self.program.raises:
                break
        self.program.results = [n for n in self.made if n[0] != "v"]
        return self.program if self.program.lines else None

    def operands(self, v: Any) -> str:
        """The text of an argument; its tensors become arguments of the program."""
        if isinstance(v, torch.Tensor):
            return self.add_input(v.detach())
        if isinstance(v, (tuple, list)) and any(isinstance(e, torch.Tensor) for e in v):
            inner = ", ".join(map(self.operands, v))
            return f"[{inner}]" if isinstance(v, list) else f"({inner},)"
        return self.constant(v)

    def named(self, name: str, fn: Any) -> str:
        said = f"f{len(self.program.known)}_{''.join(c if c.isalnum() else '_' for c in name)}"
        self.program.known[said] = fn
        return said

    def refused(self, line: str) -> None:
        """A program of this line alone, which eager refuses."""
        self.program.lines, self.program.raises, self.program.is_whole = [line, "made = 0"], True, True
        self.made = ["made"]

    def withdrawn(self, first: int) -> None:
        """Arguments from `first` on belong to a line that eager refuses."""
        if not self.program.raises:
            del self.program.inputs[first:]
            self.made = [n for n in self.made if n[0] != "v" or int(n[1:]) < first]

    def attempt(self, line: str, makes: str, chance: float = 0.05) -> bool:
        if self.run(line, makes):
            return True
        if self.r.random() < chance and not self.program.lines:
            space = {**self.program.known, **self.values}
            if isinstance(e := outcome(lambda: exec(line, space)), Exception) and not isinstance(e, NotImplementedError):
                self.refused(line)
        return False

    def entry_of(self, number: int, dtype: torch.dtype | None, wanted: Callable[[Any], bool]) -> tuple[Any, Any] | None:
        """An entry of the database that is wanted, and a sample whose tensors are small."""
        ops = [op for op in self.corpus.ops if wanted(op)]
        op = ops[number % len(ops)]
        dtypes = sorted(op.supported_dtypes("cpu"), key=str)
        dtype = dtype or dtypes[(number // len(ops) + self.seed) % len(dtypes)]
        if dtype not in dtypes:
            return None
        key = self.corpus.ops.index(op), dtype
        if key not in self.corpus.samples:
            torch.manual_seed(key[0])
            self.corpus.samples[key] = list(islice(op.sample_inputs("cpu", dtype, requires_grad=False), 12))
        found = [s for s in self.corpus.samples[key] if all(map(fits, pytree.tree_leaves((s.input, s.args, s.kwargs))))]
        return (op, self.r.choice(found)) if found else None


# ---------------------------------------------------------------- values at the ends


def ends(dtype: torch.dtype) -> list[list[Any]]:
    """Lists of values for one filling each."""
    if dtype is torch.bool:
        return [[True, False]] * 6
    if dtype.is_complex:
        parts = [0.0, -0.0, 1.0, -2.5, float("inf"), float("nan"), float("-inf")]
        return [[complex(a, b) for a in parts[:k] for b in parts[:k]] for k in (4, 4, 5, 6, 7, 7)]
    if not dtype.is_floating_point:
        i = torch.iinfo(dtype)
        return [[i.min, i.max, 0, 1], [i.min, i.min + 1, i.max, i.max - 1], [0, 1, 2, 7, 31, 32, 63, 64], [i.max, i.max // 2, 3],
                [i.min, i.min // 2, 0, 5], [0]]  # fmt: skip
    f = torch.finfo(dtype)
    inf, nan, least = float("inf"), float("nan"), f.smallest_normal * f.eps
    return [
        [nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.5],
        [0.0, -0.0, least, -least, f.tiny, -f.tiny, f.tiny * 0.5, -f.tiny * 0.75],
        [f.max, f.max * 0.5, f.max * 0.75, f.max**0.5, 1.0],
        [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1.0 - f.eps / 2, 1.0 + f.eps, -1.0 + f.eps / 2, 3.0, -3.0],
        [10.0, -10.0, 20.0, -20.0, 88.0, -88.0, 104.0, -104.0, 710.0, -745.0, 2.0**31, -(2.0**31), 2.0**15, 2.0**63, 1e10],
        [inf, -inf, f.max, -0.0, 1.0],
    ]


class Edges(Calls):
    """All operators, forward and with derivatives."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        super().__init__(corpus, seed)
        self.program.is_exact = True
        self.program.has_gradients = seed % 3 == 2
        self.program.fills = [[] for _ in range(6)]

    def sized(self, parts: Any) -> Any:
        """The largest size, or every size above 1, becomes one of SIZES."""
        sizes = sorted({n for t in pytree.tree_leaves(parts) if isinstance(t, torch.Tensor) for n in t.shape if n > 1})
        new = {n: self.r.choice(SIZES) for n in (sizes[-1:] if self.r.random() < 0.6 else sizes)}

        def cut(t: torch.Tensor) -> torch.Tensor:
            for d, n in enumerate(t.shape):
                if n in new:
                    t = t.index_select(d, torch.arange(new[n]) % n)
            return t

        return pytree.tree_map_only(torch.Tensor, cut, parts)

    def filled(self, t: torch.Tensor, number: int) -> torch.Tensor:
        values = ends(t.dtype)[number]
        drawn = [self.r.choice(values) for _ in range(t.numel())]
        new = torch.tensor(drawn, dtype=t.dtype if not t.is_floating_point() else torch.float64).to(t.dtype).reshape(t.shape)
        kept = torch.tensor([self.r.random() < 0.5 for _ in drawn], dtype=torch.bool).reshape(t.shape)
        return torch.empty_like(t).copy_(new if self.r.random() < 0.4 else torch.where(kept, t, new))

    def call(self, number: int) -> None:
        program, grad = self.program, self.program.has_gradients
        dtype = getattr(torch, self.r.choice(["float32", "float32", "float64", "bfloat16", "float16"])) if grad else None
        got = self.entry_of(number, dtype, lambda op: op.supports_autograd or not grad)
        if got is None:
            return
        op, sample = got
        given = (sample.input, tuple(sample.args), dict(sample.kwargs))

        def works(parts: Any) -> bool:
            torch.manual_seed(5)
            with torch.set_grad_enabled(grad):
                if grad:
                    parts = pytree.tree_map_only(torch.Tensor, lambda t: t.clone().requires_grad_(t.is_floating_point()), parts)
                wanted = [t for t in pytree.tree_leaves(parts) if isinstance(t, torch.Tensor) and t.requires_grad]
                made = outcome(lambda: derivatives(pytree.tree_leaves(op.op(parts[0], *parts[1], **parts[2])), wanted))
            return not isinstance(made, Exception)

        parts = outcome(lambda: self.sized(given))
        if isinstance(parts, Exception) or not all(map(fits, pytree.tree_leaves(parts))) or not works(parts):
            parts = given
        if not works(parts):
            return
        first, known = len(program.inputs), len(self.made)
        args = [self.operands(v) for v in (parts[0], *parts[1])] + [f"{k}={self.operands(v)}" for k, v in parts[2].items()]
        made = self.fresh()
        if not self.run(f"{made} = {self.named(op.name, op.op)}({', '.join(args)})", made):
            self.withdrawn(first)
            return
        program.owners.update(dict.fromkeys(self.made[known:], op.name))
        leaves, tree = pytree.tree_flatten(parts)
        at = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]
        kind = leaves[at[0]].dtype if at else None
        for k, fill in enumerate(program.fills):
            drawn = [self.filled(leaves[i], k) if leaves[i].dtype == kind or leaves[i].is_floating_point() else leaves[i] for i in at]
            new = list(leaves)
            for i, t in zip(at, drawn, strict=True):
                new[i] = t.clone()
            fill.extend(drawn if works(pytree.tree_unflatten(new, tree)) else copies([leaves[i] for i in at]))


# ---------------------------------------------------------------- out=


class Outs(Calls):
    """out= in every form."""

    def form(self, t: torch.Tensor, operands: list[str]) -> str:
        """The text of a tensor to write into, where `t` is the result."""
        r, shape = self.r, tuple(t.shape)
        how = r.randrange(10)
        dtype = t.dtype if how != 5 else getattr(torch, r.choice(DTYPES))
        if how == 1:
            shape = (0,)
        elif how == 2:
            shape = (*shape, 2)
        elif how == 3:
            shape = tuple(n + 1 for n in shape)
        x = torch.full(shape, 3).to(dtype)
        if how == 4 and x.dim() >= 2:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        elif how == 6 and x.dim():
            x = torch.stack([x, x], -1)[..., 0]
        elif how == 7 and operands:
            return r.choice(operands)
        elif how == 8 and operands:
            o = r.choice(operands)
            return f"{o}{r.choice(['.view(-1)[1:]', '.flip(0)', '.mT', '[None]', '[:1]', '.reshape(-1)', '[0]', '.detach()'])}"
        elif how == 9 and x.dim():
            return f"{self.add_input(torch.cat([x, x], 0))}[{shape[0]}:]"
        return self.add_input(x) if r.random() < 0.7 else f"torch.full({tuple(x.shape)}, 3).to({x.dtype})"

    def call(self, number: int) -> None:
        got = self.entry_of(number, None, lambda op: op.supports_out)
        if got is None:
            return
        op, sample = got
        probe = outcome(lambda: op.op(sample.input, *sample.args, **sample.kwargs))
        leaves = pytree.tree_leaves(probe)
        if isinstance(probe, Exception) or not leaves or not all(isinstance(t, torch.Tensor) and fits(t) for t in leaves):
            return
        first = len(self.program.inputs)
        parts = [sample.input, *sample.args]
        args = [self.operands(v.clone() if isinstance(v, torch.Tensor) else v) for v in parts]
        args += [f"{k}={self.operands(v)}" for k, v in sample.kwargs.items()]
        operands = [f"v{k}" for k in range(first, len(self.program.inputs))]
        outs = [self.form(t, operands) for t in leaves]
        made = self.fresh()
        said = outs[0] if isinstance(probe, torch.Tensor) else f"({', '.join(outs)},)"
        line = f"{made} = {self.named(op.name, op.op)}({', '.join(args)}, out={said})"
        if not self.attempt(line, made, 0.15):
            self.withdrawn(first)


# ---------------------------------------------------------------- reductions

_REDUCTIONS = """sum mean prod nansum nanmean amax amin aminmax all any std var std_mean var_mean logsumexp norm count_nonzero argmax argmin
    max min median nanmedian mode cumsum cumprod cummax cummin logcumsumexp softmax log_softmax quantile nanquantile sort argsort topk
    kthvalue linalg.vector_norm linalg.norm linalg.matrix_norm special.logsumexp special.softmax special.log_softmax nn.functional.softmin
    nn.functional.normalize msort unique unique_consecutive diff trapezoid cumulative_trapezoid dist renorm histc bincount trace
    linalg.vecdot cov corrcoef flip roll rot90 nn.functional.layer_norm nn.functional.cosine_similarity nn.functional.glu"""
REDUCTIONS = tuple(_REDUCTIONS.split())
NUMBERS: tuple[Any, ...] = (0, 1, 2, -1, 0.5, 3, float("inf"), -float("inf"))


FLAGS = ("unbiased", "descending", "stable", "largest", "sorted")


class Reductions(Calls):
    """Dimensions, keepdim, dtype, correction."""

    def operand(self) -> torch.Tensor:
        r = self.r
        shape = tuple(r.choice((0, 1, 1, 2, 3, 5, 17)) for _ in range(r.choice((0, 1, 1, 2, 2, 3, 3, 4))))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(r.randrange(1 << 20))) * 3
        x = x.to(getattr(torch, r.choice(DTYPES)))
        how = r.randrange(5)
        if how == 1 and x.dim():
            x = x.permute(*range(x.dim())[::-1])
        elif how == 2 and x.dim() >= 2:
            x = x.transpose(0, r.randrange(x.dim()))
        elif how == 3 and x.dim():
            d = r.randrange(x.dim())
            x = x.narrow(d, 0, min(1, x.shape[d])).expand(*[n if k != d or x.shape[k] == 0 else 4 for k, n in enumerate(x.shape)])
        elif how == 4 and x.dim():
            x = torch.stack([x, x], -1)[..., 0]
        return x

    def call(self, number: int) -> None:
        r, name = self.r, REDUCTIONS[number % len(REDUCTIONS)]
        first = len(self.program.inputs)
        for _ in range(8):
            x = self.operand()
            if x.numel() > BIG:
                continue
            n = max(x.dim(), 1)
            one: Callable[[], int] = lambda n=n: r.randrange(-n, n) if r.random() < 0.95 else n  # type: ignore[misc]
            several = [one() for _ in range(r.randrange(0, 4))]
            dim = r.choice([one(), one(), one(), several, tuple(several), None, [], list(range(x.dim()))])
            forms: list[tuple[str, Any]] = [("dim", dim), ("dim", dim), ("dim", one())]
            if r.random() < 0.4:
                forms.append(("keepdim", r.random() < 0.7))
            if r.random() < 0.25:
                forms.append(("dtype", getattr(torch, r.choice(DTYPES))))
            if r.random() < 0.3:
                key = r.choice([*FLAGS, "correction", "ord", "p", "q", "k", "interpolation"])
                numbers = (True, False) if key in FLAGS else ("linear", "lower", "nearest") if key == "interpolation" else NUMBERS
                forms.append((key, r.choice(numbers)))
            kwargs = dict(forms if r.random() < 0.85 else forms[3:])
            lead: list[Any] = []
            if name in ("quantile", "nanquantile"):
                lead = [r.choice([0.5, 0.0, 1.0, 0.3])]
            elif name in ("topk", "kthvalue"):
                lead = [r.choice([1, 1, 2, 0])]
            elif name in ("norm", "renorm"):
                lead = [r.choice(NUMBERS)]
            elif r.random() < 0.3 and "dim" in kwargs:  # by place
                lead = [kwargs.pop("dim")]
            v = self.add_input(x)
            made = self.fresh()
            said = [v, *map(self.constant, lead), *(f"{k}={self.constant(e)}" for k, e in kwargs.items())]
            call = f"torch.{name}({', '.join(said)})" if r.random() < 0.7 or "." in name else f"{v}.{name}({', '.join(said[1:])})"
            if self.attempt(f"{made} = {call}", made, 0.05):
                return
            self.withdrawn(first)


# ---------------------------------------------------------------- names


def schemas(name: str) -> list[Any]:
    """The schemas of the ATen operator that the public name means."""
    home, _, base = name.rpartition(".")
    front = {"torch.linalg": "linalg_", "torch.fft": "fft_", "torch.special": "special_"}.get(home, "")
    return [s for s in torch._C._jit_get_schemas_for_operator(f"aten::{front}{base}") if not any(a.is_out for a in s.arguments)]


_WORDS = """mean sum none linear reflect constant replicate fro nuc bilinear nearest ij xy floor trunc left right full valid same lower
    tanh max min mul prod reduced complete reduce amax ortho forward backward L U circular"""
WORDS = tuple(_WORDS.split())
TENSORS = ("tensor", "input", "self", "other", "weight", "target", "mask", "x", "y", "a", "b", "bias", "index", "src", "values")


class Names(Calls):
    """Every public callable."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        super().__init__(corpus, seed)
        r = self.r
        g = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, r.choice(DTYPES))
        n, m = r.choice((1, 2, 3, 4)), r.choice((2, 3, 5))
        shapes: list[tuple[int, ...]] = [(n, m), (m,), (m, m), (n, m), (2, 4, 4, 4), (), (2, m, m)]
        for k, shape in enumerate(shapes):
            kind = dtype if k < 3 else getattr(torch, r.choice(DTYPES))
            self.add_input((torch.randn(shape, generator=g) * 2).to(kind))
        self.add_input(torch.randint(0, min(n, m), (m,), generator=g))

    def typed(self, a: Any, kind: str) -> str | None:
        """The text of an argument of a schema's type; None: leave it out."""
        r, name = self.r, a.name
        if kind.startswith("Optional["):
            return "None" if r.random() < 0.3 else self.typed(a, kind[9:-1])
        if name in ("generator", "pin_memory", "out", "names", "dimnames") or kind in ("Generator", "Storage", "Stream"):
            return None
        if "dtype" in name:
            return f"torch.{r.choice(DTYPES)}"
        if name == "memory_format":
            return r.choice(["torch.contiguous_format", "torch.preserve_format", "torch.channels_last"])
        if name == "layout":
            return "torch.strided"
        if kind == "Device" or name == "device":
            return repr(r.choice(["cpu", "cpu", "meta"])) if r.random() < 0.9 else "torch.device('cpu')"
        if kind == "Tensor":
            if name in ("index", "indices", "target", "offsets"):
                return r.choice(["v7", "v7", f"{self.pick()}.long().abs()"])
            if name == "mask":
                return f"({self.pick()} != 0)"
            number = f"torch.tensor({r.choice([0, 1, 2.5, True, -1])!r})"
            return self.pick() if r.random() < 0.85 else r.choice([number, "2", "1.5", "True"])
        if kind in ("number", "Scalar", "Union[int, float, complex, bool]"):
            return repr(r.choice([0, 1, 2, -1, 0.5, 2.5, True, -1.5, 1j]) if r.random() < 0.97 else float("nan"))
        if kind == "bool":
            return repr(r.random() < 0.5)
        if kind == "float":
            return repr(r.choice([0.0, 0.5, 1.0, 2.0, 1e-3, -1.0]))
        if kind in ("int", "SymInt"):
            return repr(r.choice([0, 0, 1, 1, 2, -1, -2, 3, 4]))
        if kind.startswith(("List[int]", "List[SymInt]")):
            if r.random() < 0.3:
                return f"{self.pick()}.shape"
            return repr(r.choice([list, tuple])(r.choice([0, 1, 1, 2, 3, 4, -1]) for _ in range(r.choice([0, 1, 1, 2, 2, 3, 4]))))
        if kind.startswith("List[bool]"):
            return repr([r.random() < 0.5 for _ in range(r.choice([1, 2, 3]))])
        if kind.startswith("List[float]"):
            return repr([r.choice([0.5, 1.0, 2.0]) for _ in range(r.choice([1, 2, 3]))])
        if kind.startswith("List["):
            x = self.pick()
            return r.choice([f"[{x}, {x}]", f"({x}, {self.pick()})", f"[{self.pick()}]"])
        if kind == "str":
            return repr(r.choice(WORDS))
        return None

    def by_schema(self, name: str) -> str | None:
        r = self.r
        found = schemas(name)
        if not found:
            return None
        schema = r.choice(found)
        given: list[str] = []
        placed = True
        for k, a in enumerate(schema.arguments):
            optional = a.has_default_value()
            if optional and r.random() < 0.55:
                placed = False
                continue
            said = self.typed(a, str(a.type))
            if said is None:
                if not optional:
                    return None
                placed = False
                continue
            placed = placed and not a.kwarg_only and (k < 2 or r.random() < 0.7)
            key = "input" if a.name == "self" else a.name
            given.append(said if placed or (k == 0 and not a.kwarg_only) else f"{key}={said}")
        return f"{name}({', '.join(given)})"

    def by_signature(self, name: str) -> str | None:
        home, _, base = name.rpartition(".")
        signature = outcome(lambda: inspect.signature(getattr(HOMES[home], base)))
        if isinstance(signature, Exception):
            return None
        r, given = self.r, []
        placed = True
        for p in signature.parameters.values():
            optional = p.default is not p.empty
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                if p.kind is p.VAR_POSITIONAL:
                    given += [self.pick() for _ in range(r.choice([1, 2, 2]))]
                continue
            if optional and r.random() < 0.6:
                placed = False
                continue
            kind = str(p.annotation)
            if p.default in (True, False) and optional:
                said: str | None = repr(r.random() < 0.5)
            elif isinstance(p.default, (int, float)):
                said = repr(r.choice([p.default, 0, 1, 2, 0.5, -1]))
            elif isinstance(p.default, str):
                said = repr(r.choice((p.default, *WORDS)))
            elif "Tensor" in kind or p.name in TENSORS:
                said = self.pick()
            elif "dtype" in p.name:
                said = f"torch.{r.choice(DTYPES)}"
            else:
                said = self.any_argument()
            placed = placed and p.kind is not p.KEYWORD_ONLY and r.random() < 0.85
            given.append(str(said) if placed else f"{p.name}={said}")
        return f"{name}({', '.join(given)})"

    def call(self, number: int) -> None:
        r, name = self.r, self.corpus.names[number % len(self.corpus.names)]
        for k in range(25):
            said = (self.by_schema(name) or self.by_signature(name)) if k % 5 < 4 else None
            said = said or f"{name}({', '.join([self.pick(), *(self.any_argument() for _ in range(r.randrange(0, 3)))])})"
            made = self.fresh()
            if self.attempt(f"{made} = {said}", made, 0.01):
                return


# ---------------------------------------------------------------- views


class Views(Calls):
    """Views of views, an operator, writes through them."""

    def view_of(self, x: str) -> str:
        r, t = self.r, self.values[x]
        rank = t.dim()
        d, e = (r.randrange(-rank, rank), r.randrange(-rank, rank)) if rank else (0, 0)
        n = t.shape[d] if rank else 1
        k = r.randrange(max(n, 1))
        return r.choice([
            f"{x}.transpose({d}, {e})", f"{x}.movedim({d}, {e})", f"{x}.permute({', '.join(map(str, range(rank)[::-1]))})", f"{x}.mT",
            f"{x}.T", f"{x}.swapaxes({d}, {e})", f"{x}.adjoint()",
            f"{x}.unsqueeze({d})", f"{x}.squeeze({d})", f"{x}.squeeze()", f"{x}[None]", f"{x}[..., None]",
            f"{x}.narrow({d}, {k}, {max(n - k, 0)})", f"{x}.narrow({d}, {k}, 1)", f"{x}.select({d}, {k})", f"{x}.select({d}, -1)",
            f"{x}[{k}:]", f"{x}[::2]", f"{x}[..., ::2]", f"{x}[..., 1:]", f"{x}[0]", f"{x}[-1]", f"{x}[..., :-1]",
            f"{x}.unfold({d}, {min(2, n)}, {r.choice([1, 2])})", f"{x}.expand(2, {', '.join(map(str, t.shape))})",
            f"{x}.expand_as(torch.zeros(3, {', '.join(map(str, t.shape))}))", f"torch.broadcast_to({x}, (2, *{x}.shape))",
            f"{x}.diagonal()", f"{x}.diagonal({r.choice([0, 1, -1])}, {d}, {e})", f"{x}.unflatten({d}, (-1, {r.choice([1, 2, 3])}))",
            f"{x}.unflatten({d}, ({r.choice([1, 2])}, -1))", f"{x}.view(-1)", f"{x}.view(*{x}.shape, 1)", f"{x}.view_as({x})",
            f"{x}.flatten({d})", f"{x}.reshape(-1)", f"{x}.reshape({x}.shape[::-1])", f"{x}.ravel()",
            f"{x}.as_strided((2,), (1,))", f"{x}.as_strided((2, 2), ({r.choice([1, 2])}, {r.choice([1, 0, 3])}), {x}.storage_offset())",
            f"{x}.as_strided({x}.shape, {x}.stride())", f"{x}.chunk(2, {d})[{r.choice([0, -1])}]", f"{x}.split(2, {d})[0]",
            f"{x}.tensor_split(2, {d})[-1]", f"{x}.unbind({d})[0]", f"torch.split({x}, [1, {max(n - 1, 0)}], {d})[1]",
            f"torch.view_as_real({x})", f"torch.view_as_complex({x})", f"{x}.real", f"{x}.imag", f"{x}.conj()", f"{x}.resolve_conj()",
            f"{x}.view(torch.{r.choice(DTYPES)})", f"{x}.flip({d})", f"{x}.detach()", f"{x}.contiguous()", f"{x}.roll(1, {d})",
            f"{x}.hsplit(1)[0]", f"torch.atleast_2d({x})", f"torch.atleast_3d({x})", f"{x}[:]",
            f"{x}[:, None]", f"{x}.positive()", f"{x}.to({t.dtype})", f"{x}.type_as({x})", f"{x}.expand(-1, -1)", f"{x}.t()",
            f"{x}.mH", f"{x}.H", f"torch.narrow({x}, {d}, 0, 1)", f"{x}.squeeze((0, -1))",
        ])  # fmt: skip

    def draw(self) -> Program | None:
        r, program = self.r, self.program
        dtype = getattr(torch, r.choice(["float32", "float32", "float64", "complex64", "int64", "bfloat16", "uint8", "bool"]))
        shape = r.choice([(4, 6), (2, 3, 4), (6,), (4, 4), (2, 2, 3, 4), (8, 2), (1, 6), (5, 1, 4), (3, 3, 2)])
        base = (torch.randn(shape, generator=torch.Generator().manual_seed(self.seed)) * 3).to(dtype)
        how = r.randrange(5)
        if how == 1:
            base = base.transpose(0, -1)
        elif how == 2:
            base = torch.stack([base, base], 0)[1]
        elif how == 3 and len(shape) > 1:
            base = base[:, ::2] if dtype is not torch.complex64 else base[1:]
        names = [self.add_input(base)]
        for _ in range(r.choice([1, 1, 2])):
            for _ in range(r.randrange(2, 6)):
                for _ in range(6):
                    made = self.fresh()
                    if self.run(f"{made} = {self.view_of(r.choice(names[-3:]))}", made) and isinstance(self.values[made], torch.Tensor):
                        names.append(made)
                        break
            x = r.choice(names[-3:])
            made = self.fresh()
            said = r.choice([
                f"{x} + 1", f"{x} * {x}", f"{x}.sum(-1)", f"{x}.abs()", f"torch.cat([{x}, {x}])", f"{x}.clone()", f"{x}.cumsum(0)",
                f"{x}.float().softmax(-1)", f"{x}.amax()", f"{x} @ {x}.mT", f"{x}.sort(-1)[0]", f"torch.where({x} == 0, {x}, 1)",
                f"{x}.reshape(-1)[:3] * 2", f"{x}.contiguous()", f"torch.empty_like({x}).fill_(2)", f"{x}.square()",
            ])  # fmt: skip
            if self.run(f"{made} = {said}", made):
                names.append(made)
            for _ in range(r.choice([1, 1, 2, 3])):
                place = r.choice(names[-3:]) if r.random() < 0.7 else r.choice(names)
                y, number = r.choice(names[-3:]), r.choice([0, 1, 2, 3, -1])
                self.run(r.choice([
                    f"{place}.add_({number})", f"{place}.mul_({number})", f"{place}.fill_({number})", f"{place}.zero_()", f"{place}.neg_()",
                    f"{place}[...] = {number}", f"{place}[0] = {number}", f"{place}[..., -1] = {number}", f"{place} += {number}",
                    f"{place}.copy_({y} * 1)", f"{place}.add_({y})", f"{place}[0] = {y}[0] * 1", f"{place}.masked_fill_({place} == 0, 5)",
                    f"{place}.index_fill_(0, torch.tensor([0]), {number})", f"torch.neg({place}, out={place})", f"{place}.t_()",
                    f"{place}.transpose_(0, -1)", f"{place}.unsqueeze_(0)", f"{place}.squeeze_()", f"{place}.clamp_(0, 2)",
                    f"{place}.scatter_(0, torch.zeros_like({place}, dtype=torch.long), {number})", f"{place}.diagonal().fill_({number})",
                    f"{place}.select(0, 0).add_({number})", f"{place}.swapdims_(0, -1)", f"{place}.detach().add_({number})",
                ]), None)  # fmt: skip
        program.is_traced = True
        program.results = [n for n in self.made if n[0] != "v" and r.random() < 0.8] or names[-1:]
        return program


DIRECTIONS: dict[str, type[Calls]] = {"edges": Edges, "out": Outs, "reductions": Reductions, "names": Names, "views": Views}
