"""Chains of torch's public operators: samples of its operator database and whatever else torch, torch.Tensor, torch.linalg, torch.fft,
torch.special and torch.nn.functional call by name, on values of earlier steps, with views, writes in place, out=, numbers and other dtypes
in between.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz_chains.py FIRST LAST [--batch 20] [--print] [--breaks] [--direction edges]

A seed is a program (a text), its inputs, and how it is compiled: sizes fixed, as symbols, or as symbols after a change. Compiled is held
against eager: results (type, dtype, sizes, strides, bits), inputs afterwards, who shares memory with whom, exceptions; called twice, and
with sizes changed. Values that eager itself does not settle (its roundings moved by a digit give others) are not compared. Programs run in
children: a crash or a hang is a finding.
"""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import math
import mmap
import os
import resource
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_harness import DEVICE, Draw, placed, shaken, shared
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import torchsmith
from torchsmith import events

BIG = 3000  # elements of a value
SECONDS = 120  # of a program
DTYPES = ["float32"] * 6 + ["float64", "bfloat16", "float16", "int64", "int64", "int32", "uint8", "bool", "complex64"]
NUMBERS: list[Any] = [0, 1, 2, 3, -1, -2, 5, 0.5, 2.5, -1.0, 1e-3, True, 7]

# ---------------------------------------------------------------- what is called

# Not values, not tensors of this library's, no end, or files, devices and other processes.
_UNFIT = """apply_ backward bernoulli_ cauchy_ cuda data_ptr dim_order exponential_ from_file geometric_ get_device hpu ipu is_shared
    log_normal_ map2_ map_ module_load mtia normal_ numpy pin_memory random_ record_stream register_hook register_post_accumulate_grad_hook
    reinforce requires_grad_ rename rename_ retain_grad set_ share_memory_ storage storage_type to_mkldnn to_sparse to_sparse_bsc
    to_sparse_bsr to_sparse_coo to_sparse_csc to_sparse_csr tolist type type_as uniform_ untyped_storage xpu save load compile
    manual_seed seed set_rng_state get_rng_state initial_seed set_num_threads set_num_interop_threads set_default_dtype
    set_default_device set_default_tensor_type set_printoptions set_flush_denormal set_warn_always set_deterministic_debug_mode
    use_deterministic_algorithms set_float32_matmul_precision set_grad_enabled inference_mode empty empty_like empty_strided
    empty_permuted new_empty new_empty_strided resize_ resize_as_ resize resize_as unsafe_chunk quantize_per_tensor quantize_per_channel
    from_numpy frombuffer from_dlpack to_dlpack asarray fork wait import_ir_module parse_ir parse_schema vmap autocast is_grad_enabled
    get_num_threads sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor sparse_compressed_tensor
    handle_torch_function has_torch_function cudnn_convolution cudnn_batch_norm align_to align_as refine_names
    typename thread_safe_generator classproperty get_default_device get_file_path init_num_threads cond while_loop
    sym_constrain_range sym_constrain_range_for_size sparse_resize_ sparse_resize_and_clear_ copysign__ new new_tensor
    native_batch_norm batch_norm_update_stats quantized_batch_norm batch_norm_elemt batch_norm_stats batch_norm_gather_stats
    batch_norm_gather_stats_with_counts batch_norm_backward_elemt batch_norm_backward_reduce quantized_max_pool1d quantized_max_pool2d
    quantized_max_pool3d quantized_lstm_cell quantized_gru_cell quantized_rnn_relu_cell quantized_rnn_tanh_cell q_scale q_zero_point
    q_per_channel_axis q_per_channel_scales q_per_channel_zero_points dequantize int_repr miopen_batch_norm miopen_convolution
    fbgemm_linear_int8_weight multi_head_attention_forward _batch_norm_with_update"""
UNFIT = frozenset(_UNFIT.split())
HOMES = {"torch": torch, "torch.Tensor": torch.Tensor, "F": F, "torch.linalg": torch.linalg, "torch.fft": torch.fft,
         "torch.special": torch.special}  # fmt: skip


def public_names() -> list[str]:
    """Callables of the public interface, as texts."""
    found = []
    for home, owner in HOMES.items():
        for name in dir(owner):
            value = getattr(owner, name, None)
            unfit = name in UNFIT or name.startswith(("_", "cudnn", "miopen", "mkldnn", "fbgemm", "fused_", "sym_", "is_"))
            if unfit or inspect.isclass(value) or inspect.ismodule(value) or not callable(value) or name[0].isupper():
                continue
            if inspect.isbuiltin(value) or inspect.ismethoddescriptor(value) or "torch" in str(getattr(value, "__module__", "torch")):
                found.append(f"{home}.{name}")
    return found


class Corpus:
    """The database's entries and their samples, made when they are drawn."""

    def __init__(self) -> None:
        from torch.testing._internal import common_methods_invocations as database

        database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
        self.ops = [op for op in database.op_db if op.name.split(".")[-1].rstrip("_") not in UNFIT and "sparse" not in op.name]
        self.names = public_names()
        self.samples: dict[tuple[int, torch.dtype], list[Any]] = {}

    def draw(self, r: Draw, dtype: torch.dtype) -> tuple[Any, Any] | None:
        number = r.randrange(len(self.ops))
        op = self.ops[number]
        if dtype not in op.supported_dtypes("cpu"):
            return None
        key = number, dtype
        if key not in self.samples:
            torch.manual_seed(number)
            self.samples[key] = list(islice(op.sample_inputs("cpu", dtype, requires_grad=False), 8))
        found = self.samples[key]
        return (op, r.choice(found)) if found else None


# ---------------------------------------------------------------- programs


@dataclass
class Program:
    """`lines` are statements on v0, v1, ...; the first `inputs` of these are arguments. Other objects are globals."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=lambda: {"torch": torch, "F": F})
    results: list[str] = field(default_factory=list)
    is_whole: bool = True  # all values are results: nothing that raises is left out
    fills: list[list[torch.Tensor]] = field(default_factory=list)  # other values of the inputs, for more calls
    is_exact: bool = False  # each element is compared by itself, zeros with their sign
    owners: dict[str, str] = field(default_factory=dict)  # of a name the operator that makes it, or that it is given to
    is_traced: bool = False  # offsets of views and versions of inputs are compared too
    has_gradients: bool = False
    raises: bool = False

    def text(self) -> str:
        args = ", ".join(f"v{k}" for k in range(len(self.inputs)))
        returned = ", ".join(self.results)
        return "\n    ".join([f"def program({args}):", *self.lines, f"return ({returned},)"]) + "\n"

    def function(self) -> Callable[..., Any]:
        space = dict(self.known)
        exec(compile(self.text(), "<program>", "exec"), space)
        return space["program"]

    def moved(self) -> Program:
        """The program with its tensors on DEVICE: it is drawn on the processor, which says what it refuses."""
        if DEVICE == "cpu":
            return self
        inputs = copies(self.inputs, DEVICE)
        known = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in self.known.items()}
        fills = [copies(fill, DEVICE) for fill in self.fills]
        return replace(self, inputs=inputs, lines=[placed(line) for line in self.lines], known=known, fills=fills)

    def described(self) -> str:
        said = [f"# v{k}: {about(t)}" for k, t in enumerate(self.inputs)]
        globals_ = [f"# {k} = {v!r}"[:300] for k, v in self.known.items() if k not in ("torch", "F")]
        return "\n".join([*said, *globals_, self.text()])


def about(v: Any) -> str:
    if isinstance(v, torch.Tensor):
        return f"{str(v.dtype)[6:]}{list(v.shape)}" + ("" if v.is_contiguous() else f" strides {list(v.stride())}")
    return repr(v)[:80]


def plain(v: Any) -> bool:
    """Can it be written in the text?"""
    if isinstance(v, (tuple, list)):
        return type(v) in (tuple, list) and all(map(plain, v))
    return type(v) in (int, bool, str, torch.dtype, type(None)) or (type(v) is float and math.isfinite(v))


def fits(v: Any) -> bool:
    """No tensor, or a small one that is dense, on the CPU."""
    return not isinstance(v, torch.Tensor) or (
        v.numel() <= BIG and v.layout is torch.strided and v.device.type == "cpu" and not v.is_quantized
    )


def touched(t: torch.Tensor) -> set[int]:
    """Addresses of the elements."""
    steps = [(n, s * t.element_size()) for n, s in zip(t.shape, t.stride(), strict=True)]
    found = {t.data_ptr()} if t.numel() else set()
    for n, s in steps:
        found = {a + k * s for a in found for k in range(n)}
    return found


def is_same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


class Writer:
    """Draws a program, running each line in eager as it is drawn: what eager refuses is not kept."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus, self.r, self.program = corpus, Draw(seed), Program()
        self.values: dict[str, Any] = {}
        self.made: list[str] = []
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def add_input(self, t: torch.Tensor) -> str:
        name = self.fresh()
        self.program.inputs.append(t)
        self.values[name] = t
        self.made.append(name)
        return name

    def constant(self, v: Any) -> str:
        if plain(v):
            return repr(v)
        name = f"c{len(self.program.known)}"
        self.program.known[name] = v
        return name

    def tensors(self) -> list[str]:
        return [n for n in self.made if isinstance(self.values[n], torch.Tensor)]

    def pick(self) -> str:
        have = self.tensors()
        return self.r.choice(have[-3:] if self.r.random() < 0.7 else have)

    def argument(self, v: Any, replace: bool) -> str:
        if isinstance(v, torch.Tensor):
            if replace and self.r.random() < 0.6 and self.tensors():
                return self.pick()
            name = f"c{len(self.program.known)}"
            self.program.known[name] = v.detach()
            return name
        if isinstance(v, (tuple, list)) and any(isinstance(e, torch.Tensor) for e in v):
            inner = ", ".join(self.argument(e, replace) for e in v)
            return f"[{inner}]" if isinstance(v, list) else f"({inner},)"
        return self.constant(v)

    def run(self, line: str, makes: str | None) -> bool:
        """Does eager take the line, and is the result fit for a program?"""
        space = {**self.program.known, **self.values}
        try:
            exec(line, space)
        except Exception:
            return False
        self.program.lines.append(line)
        if makes is None:
            return True
        value = space[makes]
        for t in pytree.tree_leaves(value):
            if not fits(t) or not isinstance(t, (torch.Tensor, int, float, bool, complex, str, torch.dtype, type(None))):
                self.program.lines.pop()
                return False
        self.values[makes] = value
        self.made.append(makes)
        if isinstance(value, (tuple, list)) and len(value) <= 6:
            for k, part in enumerate(value):
                if isinstance(part, torch.Tensor) and self.r.random() < 0.6:
                    name = self.fresh()
                    self.program.lines.append(f"{name} = {makes}[{k}]")
                    self.values[name] = part
                    self.made.append(name)
        return True

    # ------------------------------------------------------------ steps

    def entry(self, first: bool) -> bool:
        """An operator with a sample of its own, or with values of the program in the sample's place."""
        r = self.r
        got = self.corpus.draw(r, getattr(torch, r.choice(DTYPES)))
        if got is None:
            return False
        op, sample = got
        parts = (sample.input, tuple(sample.args), dict(sample.kwargs))
        if not all(map(fits, pytree.tree_leaves(parts))):
            return False
        if first:  # the sample's tensors become inputs
            def text(v: Any) -> str:
                if isinstance(v, torch.Tensor):
                    return self.add_input(v.detach())
                if isinstance(v, (tuple, list)) and any(isinstance(e, torch.Tensor) for e in v):
                    inner = ", ".join(map(text, v))
                    return f"[{inner}]" if isinstance(v, list) else f"({inner},)"
                return self.constant(v)

            args = [text(v) for v in (sample.input, *sample.args)] + [f"{k}={text(v)}" for k, v in sample.kwargs.items()]
        else:
            lead = self.pick() if isinstance(sample.input, torch.Tensor) else self.argument(sample.input, True)
            named = [f"{k}={self.argument(v, True)}" for k, v in sample.kwargs.items()]
            args = [lead, *(self.argument(v, True) for v in sample.args), *named]
        fn = op.op
        chance = r.random()
        if chance < 0.2 and op.inplace_variant is not None:
            fn = op.inplace_variant
        elif chance < 0.4 and op.method_variant is not None:
            fn = op.method_variant
        name = f"f{len(self.program.known)}_{''.join(c if c.isalnum() else '_' for c in op.name)}"
        self.program.known[name] = fn
        if op.supports_out and fn is op.op and r.random() < 0.25:
            try:
                probe = eval(f"{name}({', '.join(args)})", {**self.program.known, **self.values})
            except Exception:
                return False
            if isinstance(probe, torch.Tensor):
                o = self.fresh()
                shape = repr(tuple(probe.shape)) if r.random() < 0.6 else "0"
                dtype = probe.dtype if r.random() < 0.8 else getattr(torch, r.choice(DTYPES))
                self.run(f"{o} = torch.zeros({shape}, dtype={dtype})", o)
                args.append(f"out={o}")
        made = self.fresh()
        if not self.run(f"{made} = {name}({', '.join(args)})", made):
            self.program.known.pop(name)
            return False
        return True

    def any_argument(self) -> str:
        r = self.r
        value = self.values[self.pick()]
        rank = value.dim()
        kinds: list[Callable[[], str]] = [
            self.pick, self.pick, lambda: repr(r.choice(NUMBERS)), lambda: repr(r.randrange(-1, max(rank, 1))),
            lambda: repr([r.randrange(-2, 4) for _ in range(r.randrange(1, 4))]),
            lambda: repr(tuple(r.randrange(0, 3) for _ in range(r.randrange(1, 3)))),
            lambda: f"torch.{r.choice(DTYPES)}", lambda: f"{self.pick()}.shape", lambda: f"{self.pick()}.long().abs()",
            lambda: f"{self.pick()} > 0", lambda: f"torch.tensor({r.choice(NUMBERS)})", lambda: f"[{self.pick()}, {self.pick()}]",
            lambda: f"{self.pick()}.numel()", lambda: f"{self.pick()}.float()",
        ]  # fmt: skip
        return r.choice(kinds)()

    def anything(self) -> bool:
        """Any public name with arguments that eager takes."""
        r = self.r
        name = r.choice(self.corpus.names)
        lead = self.pick()
        for _ in range(12):
            count = r.choice([0, 0, 1, 1, 1, 2, 2, 3])
            args = [lead if r.random() < 0.8 else f"{lead}.float()", *(self.any_argument() for _ in range(count))]
            made = self.fresh()
            if self.run(f"{made} = {name}({', '.join(args)})", made):
                return True
        return False

    def view(self) -> bool:
        r, x = self.r, self.pick()
        rank = self.values[x].dim()
        d = r.randrange(-rank, rank) if rank else 0
        e = r.randrange(-rank, rank) if rank else 0
        forms = [
            f"{x}.transpose({d}, {e})", f"{x}.unsqueeze({d})", f"{x}[..., None]", f"{x}[None]", f"{x}[1:]", f"{x}[::2]", f"{x}[..., :-1]",
            f"{x}.flatten()", f"{x}.reshape(-1)", f"{x}.reshape({x}.shape[0], -1)", f"{x}.expand(2, *{x}.shape)", f"{x}.squeeze()",
            f"{x}.narrow({d}, 0, 1)", f"{x}.select({d}, -1)", f"{x}.diagonal()", f"{x}.unfold({d}, 2, 1)", f"{x}.movedim({d}, {e})",
            f"{x}.mT",
            f"{x}.T", f"{x}[0]", f"{x}[-1:]", f"{x}.contiguous()", f"{x}.clone()", f"{x}[:0]",
            f"{x}.flip({d})", f"{x}.permute(*range({x}.dim())[::-1])",
            f"{x}.as_strided((2,), (1,))", f"{x}.view(-1)", f"{x}.real", f"{x}.conj()", f"{x}.detach()", f"{x}.repeat(2, *[1] * {x}.dim())",
            f"{x}.swapaxes({d}, {e}).contiguous()", f"{x}.unbind({d})", f"{x}.split(2, {d})", f"{x}.chunk(2, {d})",
            f"torch.stack([{x}, {x}], {d})",
            f"torch.cat([{x}, {self.pick()}], {d})", f"{x}.view(torch.{r.choice(DTYPES)})", f"{x}.to(torch.{r.choice(DTYPES)})",
            f"torch.broadcast_to({x}, (2, *{x}.shape))", f"{x}.imag", f"{x}[{self.pick()} > 0]",
            f"{x}[{x}.long() % {x}.shape[0]]",
            f"{x}.masked_fill({x} > 0, {r.choice(NUMBERS)!r})", f"torch.where({x} > 0, {x}, {self.pick()})",
            f"{x}.unflatten(0, (1, -1))",
        ]  # fmt: skip
        made = self.fresh()
        return self.run(f"{made} = {r.choice(forms)}", made)

    def arithmetic(self) -> bool:
        r, x, y = self.r, self.pick(), self.pick()
        number = r.choice(NUMBERS)
        other = r.choice([y, y, repr(number), f"torch.tensor({number!r})", f"{x}.shape[0]", f"{x}.size(-1)", f"{y}.numel()", f"{y}.mean()",
                          f"{y}[:1]", f"{y}.sum(-1, keepdim=True)",
                          f"torch.tensor({number!r}, dtype=torch.{r.choice(DTYPES)})"])  # fmt: skip
        op = r.choice(["+", "-", "*", "/", "//", "%", "**", "==", "<", ">=", "!=", "&", "|", "^", "<<", ">>", "@"])
        made = self.fresh()
        return self.run(f"{made} = " + (f"{x} {op} {other}" if r.random() < 0.7 else f"{other} {op} {x}"), made)

    def reads_what_it_writes(self, *texts: str) -> bool:
        """Does the last one share elements with another in another order? What eager reads then depends on its order of writing."""
        found = [outcome(lambda e=e: eval(e, {**self.program.known, **self.values})) for e in texts]
        *written, read = [v if isinstance(v, torch.Tensor) else torch.empty(0) for v in found]
        return any(touched(t) & touched(read) and not is_same_view(t, read) for t in written)

    def write(self) -> bool:
        r, x, y = self.r, self.pick(), self.pick()
        place = r.choice([x, x, f"{x}[0]", f"{x}[..., :1]", f"{x}[::2]", f"{x}.view(-1)", f"{x}.transpose(0, -1)", f"{x}[1:]",
                          f"{x}.diagonal()", f"{x}.select(-1, 0)"])  # fmt: skip
        number = r.choice(NUMBERS)
        value = r.choice([y, repr(number), f"{y}[0]", f"{y}.sum()", f"{y} * 2", f"torch.tensor({number!r})", f"{x}"])
        if self.reads_what_it_writes(x, place, value):
            value = f"{value}.clone()"
        how = r.choice([
            f"{place}.add_({value})", f"{place}.mul_({value})", f"{place}.copy_({value})", f"{place}.fill_({number!r})", f"{place}.zero_()",
            f"{x}[0] = {value}", f"{x}[..., -1] = {value}", f"{x}[{x} > 0] = {number!r}", f"{x}[{x}.long() % 2] = {value}",
            f"{x} += {value}", f"{x} *= {value}", f"{place}.clamp_(0, 1)", f"{place}.sub_({value})", f"{place}.div_({value})",
            f"{place}.neg_()", f"{place}.masked_fill_({x} > 0, {number!r})", f"{place}.abs_()", f"{place}.pow_({number!r})",
            f"{x}.index_add_(0, torch.zeros(1, dtype=torch.long), {x}[:1])", f"torch.add({x}, {value}, out={place})",
            f"{place}.sigmoid_()",
        ])  # fmt: skip
        return self.run(how, None)

    def draw(self) -> Program | None:
        r = self.r
        for _ in range(30):
            if self.entry(first=True):
                break
            self.__init__(self.corpus, r.randrange(1, 1 << 30))  # type: ignore[misc]
            self.r = r
        else:
            return None
        if not self.tensors():
            return None
        wanted, tries = r.randrange(1, 5), 0
        while wanted and tries < 40:
            tries += 1
            step = r.choice([self.entry, self.entry, self.anything, self.anything, self.view, self.view, self.arithmetic, self.write])
            if step(False) if step == self.entry else step():
                wanted -= 1
        inputs = [f"v{k}" for k in range(len(self.program.inputs))]
        made = [n for n in self.made if n not in inputs]
        some = [n for n in made if r.random() < 0.6]
        self.program.results = (made if r.random() < 0.7 else some) or made[-1:] or inputs[:1]
        self.program.is_whole = self.program.results == made
        return self.program


def writer(direction: str) -> type[Writer]:
    if not direction:
        return Writer
    import fuzz_directions

    return fuzz_directions.DIRECTIONS[direction]


# ---------------------------------------------------------------- comparison


def copies(tensors: list[torch.Tensor], device: str | None = None) -> list[torch.Tensor]:
    """The same memory anew, perhaps on another device: layouts and what lies in one storage stay."""
    storages: dict[int, torch.Tensor] = {}
    out = []
    for x in tensors:
        if x.is_conj() or x.is_neg() or x._is_zerotensor():
            out.append(x.clone().to(device or x.device))
            continue
        key = x.untyped_storage()._cdata
        if key not in storages:
            bytes_ = torch.empty(0, dtype=torch.uint8, device=x.device)
            storages[key] = bytes_.set_(x.untyped_storage(), 0, (x.untyped_storage().nbytes(),), (1,)).clone().to(device or x.device)
        new = torch.empty(0, dtype=x.dtype, device=storages[key].device)
        out.append(new.set_(storages[key].untyped_storage(), x.storage_offset(), x.shape, x.stride()))
    return out


class Moved(TorchDispatchMode):
    """Every float result is moved by about its last digit."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.g = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or any(r.alias_info for r in func._schema.returns):
            return out

        def move(t: torch.Tensor) -> torch.Tensor:
            if not (t.dtype.is_floating_point or t.dtype.is_complex) or t.layout is not torch.strided:
                return t
            step = 4 * torch.finfo(t.dtype).eps if torch.finfo(t.dtype).bits > 16 else torch.finfo(t.dtype).eps
            noise = torch.randn(t.shape, generator=self.g, dtype=torch.float64).to(t.device) * step + 1
            return (t.double() * noise).to(t.dtype) if t.dtype.is_floating_point else t * noise.to(t.dtype)

        return pytree.tree_map_only(torch.Tensor, move, out)


def outcome(fn: Callable[[], Any]) -> Any:
    try:
        return fn()
    except Exception as e:  # the exception is what is compared
        return e


def numbers(v: torch.Tensor) -> torch.Tensor:
    v = v.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(v.to(torch.complex128)) if v.dtype.is_complex else v.double()


# Operators that add products. Where one of these overflows or is infinite, whether another takes it back (NaN) or is lost in it is a
# matter of the order of additions, and of whether eager's compiler fused them (docs/notes/limits.md).
_SUMS = """*mm *mv *dot *bmm* *conv* *norm* *linear *matmul* *einsum *tensordot *inner addr addcmul addcdiv lerp cross linalg.cross cov
    corrcoef mean nanmean var* std* masked.mean masked.var masked.std masked.norm *cdist *pdist *interpolate *upsample* *grid_sample*
    *avg_pool* *attention* *bilinear *similarity *softmax* logsumexp trapezoid cumulative_trapezoid *loss* dist linalg.vecdot"""
SUMS = tuple(_SUMS.split())
# Of an element by itself, whatever the largest one is.
CLOSE = {torch.float64: 1e-11, torch.complex128: 1e-11, torch.float16: 3e-3, torch.bfloat16: 1.6e-2}


def differ(
    got: Any, want: Any, others: Callable[[], list[list[Any]]], place: int,
    is_exact: bool = False, has_signs: bool = False, best_of: Callable[[], Any] = lambda: None, overflow: str = "", apart: float = 0.0,
) -> str:  # fmt: skip
    """ "" or how one leaf of the results differs. `is_exact`: elements are held against themselves alone, and with `has_signs` zeros have a
    sign; `best_of()` are eager's results in float64: what is as these is right. `overflow`: "" or, of sums, "input"
    or "way" (see `overflows`). `apart`: by so much an element may differ where eager's cancels."""
    if isinstance(want, torch.Tensor) != isinstance(got, torch.Tensor) or type(got) is not type(want):
        return f"{type(got).__name__} instead of {type(want).__name__}"
    if not isinstance(want, torch.Tensor):
        same = got == want or (got != got and want != want) or (isinstance(want, float) and abs(got - want) <= 1e-4 * abs(want))
        if same:
            return ""
        return "" if any(o[place] != want for o in others()) else f"{got!r} instead of {want!r}"
    for what in ("dtype", "shape", "requires_grad"):
        if getattr(got, what) != getattr(want, what):
            return f"{what} {getattr(got, what)} instead of {getattr(want, what)}"
    if want.numel():
        wide = [d for d, n in enumerate(want.shape) if n > 1]
        if [got.stride(d) for d in wide] != [want.stride(d) for d in wide]:
            return f"strides {got.stride()} instead of {want.stride()} for {tuple(want.shape)}"
    a, b = numbers(got), numbers(want)
    half = want.dtype in (torch.float16, torch.bfloat16)
    near = 2e-2 if half else 1e-4 if want.dtype.is_floating_point or want.dtype.is_complex else 0.0
    least = near * 0.01
    if is_exact and near:
        f = torch.finfo(want.dtype)
        near, least = CLOSE.get(want.dtype, 2e-5), 8 * f.smallest_normal * (1e6 if has_signs else f.eps)
        a = torch.where((a != 0) & (b == 0) & (a.abs() < f.smallest_normal), b, a)  # oneDNN's and MKL's are 0 then
    signs = (a == 0) & (b == 0) & (a.signbit() != b.signbit()) if has_signs else torch.zeros_like(a, dtype=torch.bool)
    if torch.allclose(a, b, rtol=near, atol=least, equal_nan=True) and not bool(signs.any()):
        return ""
    moved = [numbers(o[place]) for o in others() if isinstance(o[place], torch.Tensor) and o[place].shape == want.shape]
    if not moved:
        return ""
    spread = torch.stack([(m - b).abs() for m in moved]).amax(0).nan_to_num(0.0)
    largest = torch.where(b.isfinite(), b.abs(), 0).max()
    bound = near * b.abs().nan_to_num(0.0, 0.0) + least if is_exact else near * largest
    close = ((a - b).abs() <= bound + 20 * spread) | (a == b) | (a.isnan() & b.isnan())
    alike = [(m.isfinite() == b.isfinite()) & (m.isnan() == b.isnan()) & ((m.signbit() == b.signbit()) | ~signs) for m in moved]
    steady = torch.stack(alike).all(0)
    wrong = ~(close & ~signs | ~steady)
    if apart:
        wrong &= ~((a - b).abs() <= apart)
    if overflow:
        wrong &= a.isfinite() & b.isfinite() if overflow == "way" else a.isfinite() | b.isfinite()
    if is_exact and bool(wrong.any()) and (best := best_of()) is not None and isinstance(best[place], torch.Tensor):
        e = numbers(best[place].detach().to(want.dtype))
        if e.shape == a.shape:
            wrong &= ~(((a - e).abs() <= near * e.abs() + least) | (a == e) & (a.signbit() == e.signbit()) | (a.isnan() & e.isnan()))
    if not want.dtype.is_floating_point and bool(spread.any()):  # what is rounded to whole numbers, or an index of one of near equals
        return ""
    if not bool(wrong.any()):
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {wrong.numel()} elements of {about(want)} differ, at {at} {float(a[at])!r}, not {float(b[at])!r}"


def overflows(owner: str, given: list[torch.Tensor]) -> str:
    """Of an operator that adds products: "way" where those of finite operands may overflow, so that the order says whether the result does;
    else "input": of what is infinite anyway the order says whether it is NaN. "" for other operators."""
    if not any(fnmatch.fnmatch(owner, p) for p in SUMS):
        return ""
    floats = [t.detach() for t in given if t.is_floating_point() and t.numel()]
    large = any(bool((t.abs().where(t.isfinite(), 0).double() > 0.1 * torch.finfo(t.dtype).max ** 0.5).any()) for t in floats)
    return "way" if large else "input"


def cancels(owner: str, result: Any) -> float:
    """Eager's tail of GELU is 1 + erf(x), 0 from about -8 on; ours is erfc's."""
    if owner != "nn.functional.gelu" or not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return 0.0
    return 64 * torch.finfo(result.dtype if result.dtype is torch.float64 else torch.float32).eps


def has_subnormals(t: torch.Tensor) -> bool:
    """Products of these are zeros whose sign follows from the order of roundings."""
    if not t.dtype.is_floating_point:
        return False
    x = t.detach().double().abs()
    return bool(((x > 0) & (x < torch.finfo(t.dtype).smallest_normal)).any())


def derivatives(results: list[Any], wanted: list[torch.Tensor]) -> list[Any]:
    """Of all results that have one, for gradients that differ from element to element."""
    outs = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outs or not wanted:
        return []
    come = [torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).view(t.shape).to(t) for t in outs]
    return list(torch.autograd.grad(outs, wanted, come, allow_unused=True))


def resized(tensors: list[torch.Tensor], r: Draw) -> list[torch.Tensor]:
    """Each size above 1 becomes another one, equal ones alike; one storage each, in memory order as before."""
    new = {n: n if n <= 1 or r.random() < 0.3 else r.choice([1, n + 1, n + 2, n - 1, 2 * n]) for t in tensors for n in t.shape}
    out = []
    for t in tensors:
        for d, n in enumerate(t.shape):
            if new[n] != n:
                t = torch.cat([t] * -(-new[n] // n), d).narrow(d, 0, new[n]).clone()  # eager indexes fewer dtypes
        out.append(t if t.is_contiguous() or 0 in t.shape else t.clone())
    return out


def compare(program: Program, seed: int, doing: Callable[[str], None] = lambda s: None) -> tuple[str, list[str]]:
    """What differs, and the codes of what did not run natively."""
    r = Draw(seed + 77)
    dynamic = r.choice([False, None, True, True])
    drawn, program = program, program.moved()
    fn = program.function()
    constants = {k: v for k, v in program.known.items() if isinstance(v, torch.Tensor)}
    torchsmith.compiler.reset()
    compiled = torchsmith.compile(fn, dynamic=dynamic)
    seen: list[str] = []
    names: list[str] = []  # of the values that a call gives
    turns = [program.inputs, program.inputs, *program.fills]
    if dynamic is not False and not program.fills:
        turns += [resized(program.inputs, r) for _ in range(2)]

    def call(f: Callable[..., Any], given: list[torch.Tensor]) -> Any:
        saved = {k: v.clone() for k, v in constants.items()}
        torch.manual_seed(5)
        try:
            with torch.set_grad_enabled(program.has_gradients):
                wanted = [t.requires_grad_() for t in given if program.has_gradients and t.is_floating_point()]
                made = f(*given)
                result = pytree.tree_leaves(made)
                names[:] = [n for n, v in zip(program.results, made, strict=True) for _ in pytree.tree_leaves(v)]
                names.extend(f"v{k}" for k, t in enumerate(given) if t.requires_grad)
                result += derivatives(result, wanted)
            return [*result, *given, *(v.clone() for v in constants.values())]
        finally:
            for k, v in constants.items():
                if v.numel():
                    outcome(lambda v=v, k=k: v.copy_(saved[k]))

    with events.recording() as recorded:
        for number, given in enumerate(turns):
            doing(f"eager call {number}")
            if DEVICE != "cpu" and isinstance(outcome(lambda given=given: drawn.function()(*copies(given, "cpu"))), Exception):
                continue  # a wrong index would stop the device
            theirs, mine = copies(given), copies(given)
            before = [t._version for t in (*theirs, *mine)]
            want = outcome(lambda theirs=theirs: call(fn, theirs))
            if isinstance(want, Exception) and number < 2 and not program.raises:
                return "", []
            if not isinstance(want, Exception) and any(isinstance(t, torch.Tensor) and t.numel() > 40 * BIG for t in want):
                continue
            doing(f"compiled call {number}, dynamic={dynamic}")
            got = outcome(lambda mine=mine: call(compiled, mine))
            where = f"dynamic={dynamic} call {number} {[tuple(t.shape) for t in given]}"
            if isinstance(want, Exception) or isinstance(got, Exception):
                if type(want) is not type(got) and (program.is_whole or isinstance(got, Exception)):
                    frames = traceback.extract_tb(got.__traceback__) if isinstance(got, Exception) else []
                    at = next((f"{f.filename.split('/')[-1]}:{f.lineno}" for f in reversed(frames) if "torchsmith" in f.filename), "")
                    said = [f"{type(v).__name__} {str(v)[:150]!r}" for v in (got, want)]
                    return f"{where}: {said[0]} ({at}) instead of {said[1]}", []
                continue
            if len(got) != len(want):
                return f"{where}: {len(got)} values instead of {len(want)}", []
            kept: list[list[Any]] = []
            doing(f"eager once more after call {number}")

            def others(given: list[torch.Tensor] = given, kept: list[list[Any]] = kept, count: int = len(want)) -> list[list[Any]]:
                for k in range(0 if kept else 8):
                    with Moved(k):
                        other = copies(given)
                        if program.is_exact:  # moved; or read one by one, where eager's kernels of vectors differ from the plain ones
                            other = [shaken(t, k) for t in other] if k % 2 else [torch.stack([t, t], -1)[..., 0] for t in other]
                        moved = outcome(lambda other=other: call(fn, other))
                    if not isinstance(moved, Exception) and len(moved) == count:
                        kept.append(moved)
                return kept

            def wide(given: list[torch.Tensor] = given) -> Any:
                made = outcome(lambda: call(fn, [t.double() if t.is_floating_point() else t for t in copies(given)]))
                return None if isinstance(made, Exception) else made

            for k, (g, w) in enumerate(zip(got, want, strict=True)):
                signs = program.is_exact and not any(map(has_subnormals, given))
                owner = program.owners.get(names[k] if k < len(names) else "", "")
                why = differ(g, w, others, k, program.is_exact, signs, wide, overflows(owner, given), cancels(owner, w))
                if why:
                    return f"{where} value {k} of {len(want)}: {why}", []
            a, b = ([t for t in ts if isinstance(t, torch.Tensor) and t.layout is torch.strided] for ts in (got, want))
            if shared(a) != shared(b):
                return f"{where}: memory is shared as {shared(a)} instead of {shared(b)}", []
            if program.is_traced:
                after = [t._version - v for t, v in zip((*theirs, *mine), before, strict=True)]
                if after[: len(theirs)] != after[len(theirs) :]:
                    return f"{where}: versions moved by {after[len(theirs) :]} instead of {after[: len(theirs)]}", []
                homes = {t.untyped_storage()._cdata for t in theirs if t.numel()}
                placed = [k for k, t in enumerate(b) if t.numel() and t.untyped_storage()._cdata in homes]
                if [a[k].storage_offset() for k in placed] != [b[k].storage_offset() for k in placed]:
                    said = [[ts[k].storage_offset() for k in placed] for ts in (a, b)]
                    return f"{where}: offsets {said[0]} instead of {said[1]}", []
    for e in recorded:
        if e.kind in ("graph_break", "fallback"):
            seen.append(f"{e.kind} {e.fields.get('code')} {str(e.fields.get('detail'))[:140]}")
    return "", seen


def findings(
    corpus: Corpus, seeds: range, doing: Callable[[str], None], limit: int = 0, direction: str = ""
) -> Iterator[tuple[int, str, str]]:
    """(seed, what differs, the program, or what did not run natively). A program that runs for `limit` seconds ends the process."""
    for seed in seeds:
        doing(f"eager drawing {seed}")
        signal.alarm(limit)
        torch.manual_seed(seed)
        program = outcome(writer(direction)(corpus, seed).draw)
        if program is None or isinstance(program, Exception):
            yield seed, "not drawn", repr(program)
            continue
        described = program.described()
        try:
            why, seen = compare(program, seed, lambda s, about=f"{seed}\n{described}": doing(f"{s} of {about}"))  # type: ignore[misc]
        except Exception as e:
            why, seen = f"HARNESS {type(e).__name__} {e} {traceback.extract_tb(e.__traceback__)[-1]}", []
        yield seed, why, described if why else "\n".join(seen)
    signal.alarm(0)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("first", type=int)
    p.add_argument("last", type=int)
    p.add_argument("--batch", type=int, default=20)
    p.add_argument("--print", action="store_true", help="print the programs and what eager makes of their inputs, compile nothing")
    p.add_argument("--direction", default="", help="one of fuzz_directions.py")
    p.add_argument("--breaks", action="store_true", help="also say what did not run natively")
    o = p.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    corpus = Corpus()
    print(f"{len(corpus.ops)} entries, {len(corpus.names)} names", flush=True)
    for seed in range(o.first, o.last) if o.print else ():
        torch.manual_seed(seed)
        program = writer(o.direction)(corpus, seed).draw()
        if program is not None:
            print(program.described(), outcome(lambda p=program: p.function()(*copies(p.inputs))))
    if o.print:
        return 0
    tally: Counter[str] = Counter()
    note, done = mmap.mmap(-1, 16384), mmap.mmap(-1, 8)

    def doing(what: str) -> None:
        note[:] = what.encode()[:16384].ljust(16384, b" ")

    first = o.first
    while first < o.last:
        last = min(first + o.batch, o.last)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 2)
            for seed, why, more in findings(corpus, range(first, last), doing, SECONDS, o.direction):
                done[:] = seed.to_bytes(8, "little")
                if why and why != "not drawn":
                    print(f"=== {seed}: {why}\n{more}", flush=True)
                elif o.breaks and more and not why:
                    print(f"--- {seed}: {more}", flush=True)
            sys.stdout.flush()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            said = note[:].decode(errors="replace").strip()
            by = "eager " if said.startswith("eager") else ""
            print(f"=== {'HANG' if status == signal.SIGALRM else 'CRASH'} {by}status {status}: {said}", flush=True)
            tally[f"{by}crash"] += 1
            seed = max(first, int.from_bytes(done[:], "little") + 1)  # the one that died
            first = seed + 1 if seed < last else last
        else:
            first = last
        tally["batches"] += 1
    print(dict(tally))
    return 0


if __name__ == "__main__":
    sys.exit(main())
