"""GPU kernels without a GPU: Triton's interpreter on the texts equals eager, and the texts become machine code without spills."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from graph_harness import graph_of
from lower_harness import to_array
from machine_code import spilled
from triton_harness import CUDA, check_triton, run_triton, scheduled_of, texts_of

import torchsmith
from torchsmith.codes import Unsupported
from torchsmith.emit import triton_math
from torchsmith.emit.math import MATH
from torchsmith.graph.tracing import remember_device
from torchsmith.ir.expr import const
from torchsmith.ir.interpret import CheckFailed, run_scheduled
from torchsmith.ir.kernel import Kernel, Require, Scheduled
from torchsmith.ir.program import Check, Extern, root_of
from torchsmith.lower import contraction, lower
from torchsmith.options import Options
from torchsmith.runtime import cubins
from torchsmith.runtime.cubins import compile_images
from torchsmith.schedule import blocks, formers
from torchsmith.schedule.fusion import near_sums, rematerialize
from torchsmith.schedule.fusion.drop_masks import drop_masks
from torchsmith.schedule.fusion.fuse import fuse
from torchsmith.schedule.memory.plan import plan
from torchsmith.schedule.memory.write_back import end_with_write_backs


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype)


def numbers(below: int, *shape: int) -> torch.Tensor:
    torch.manual_seed(below)
    return torch.randint(0, below, shape)


def pooled_back(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Windows that overlap, reach over the border, and have equal elements; and whole ones."""
    x = x.round()
    overlapping, apart = (x, [3, 3], [2, 2], [1, 1]), (x, [2, 2], [2, 2], [0, 0])
    out = []
    for args, g in ((overlapping, grad), (apart, grad[:, :, :4, :5])):
        indices = torch.ops.aten.max_pool2d_with_indices(*args)[1]
        out.append(torch.ops.aten.max_pool2d_with_indices_backward(g, *args, [1, 1], False, indices))
    return tuple(out)


CASES = {
    "sin(cos)": (lambda x: torch.sin(torch.cos(x)), rows(7, 300)),
    "sums": (lambda x: (x.sum(), x.sum(0), x.sum(1)), rows(7, 300)),
    "sum in parts": (lambda x: x.sum(), rows(300, 700)),
    "long rows": (lambda x: x.sum(1), rows(2, 40000)),
    "moments": (lambda x: (x.var(1), x.std(), x.mean((0, 1))), rows(5, 70)),
    "argmax": (lambda x: (x.argmax(1), x.max(1)), rows(5, 20)),
    "any": (lambda x: (x > 2).any(1), rows(9, 20)),
    "softmax": (lambda x: F.softmax(x, -1), rows(5, 70)),
    "softmax of columns": (lambda x: F.softmax(x, 0), rows(5, 40)),
    "layer norm": (lambda x, y, w, b: (x + y, F.layer_norm(x + y, (700,), w, b)), rows(50, 700), rows(50, 700), rows(700), rows(700)),
    "group norm": (lambda x: F.group_norm(x, 2), rows(3, 4, 5, 6)),
    "rms norm": (lambda x: F.rms_norm(x, (70,)), rows(5, 70)),
    "gelu": (lambda x, w: F.gelu(x + w) + x, rows(5, 70), rows(70)),
    "transposed": (lambda x: x + x.t(), rows(40, 40)),
    "channels last": (lambda x: x.permute(0, 2, 3, 1).contiguous(), rows(2, 30, 20, 20)),
    "scans": (lambda x: (x.cumsum(1), x.cummax(0)), rows(5, 30)),
    "gather": (lambda x, i: (x.gather(1, i), F.embedding(i, x)), rows(9, 70), numbers(9, 9, 5)),
    "scatter": (lambda x, i, y: (x.scatter_add(1, i, y), x.scatter_reduce(1, i, y, "amax")), rows(5, 70), numbers(70, 5, 40), rows(5, 40)),
    "index_put": (lambda x, i, y: x.index_put((i,), y, accumulate=True), rows(50, 7), numbers(50, 9), rows(9, 7)),
    "pools": (lambda x: (F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 1)), rows(2, 3, 16, 16)),
    "max pool": (lambda x: F.max_pool2d(x, 2), rows(1, 2, 8, 8)),
    "max pool backward": (pooled_back, rows(2, 3, 9, 11), rows(2, 3, 5, 6)),
    "pads": (lambda x: (F.pad(x, (1, 2, 3, 4)), F.pad(x, (1, 2, 3, 4), mode="reflect")), rows(2, 3, 5, 6)),
    "cat": (lambda x, y: torch.cat([x, y], 1), rows(5, 7), rows(5, 9)),
    "resized": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), rows(2, 3, 5, 6)),
    "cross entropy": (F.cross_entropy, rows(9, 30), numbers(30, 9)),
    "empty": (lambda x: (x + 1, x.sum(0), x.sum(1)), rows(0, 5)),
    "one": (lambda x: x * 2 + 1, torch.tensor(3.0)),
    "a place that is a number": (lambda x: (torch.quantile(x, 0.5), torch.quantile(x, 0.25, 0)), torch.tensor(2.0)),
    "any strides": (lambda x, y: x[:, ::2].flip(0) * y, rows(9, 70), rows(1, 35).expand(9, 35)),
    "integers": (lambda i: (i // 3, i % 5, i << 2, -i, i.to(torch.uint8) * 200), numbers(1000, 9, 30) - 500),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values(case):
    fn, *args = case
    check_triton(fn, *args, rtol=1e-4, atol=1e-4)


ALONE = Options(libtorch="forbid")  # products are kernels of our own
PRODUCTS = {
    "mm": (torch.mm, rows(40, 70), rows(70, 50)),
    "half": (lambda x, y: torch.relu(x @ y.t() + 1), rows(40, 70, dtype=torch.float16), rows(50, 70, dtype=torch.float16)),
    "linear": (lambda x, w, b: F.gelu(F.linear(torch.exp(x), w, b)), rows(2, 20, 41), rows(33, 41), rows(33)),
    "batches": (torch.matmul, rows(3, 20, 48), rows(3, 48, 40)),
    "float64": (torch.mm, rows(20, 30, dtype=torch.float64), rows(30, 20, dtype=torch.float64)),
    "integers": (torch.mm, numbers(99, 20, 30), numbers(99, 30, 20)),
    "one row": (F.linear, rows(1, 1100), rows(40, 1100)),
    "few results of much": (F.linear, rows(16, 1500), rows(20, 1500)),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1, stride=2), rows(2, 5, 9, 9), rows(18, 5, 3, 3), rows(18)),
    "grouped": (lambda x, w: F.conv2d(x, w, groups=4), rows(1, 8, 6, 6), rows(8, 2, 3, 3)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *(rows(2, 3, 20, 16) for _ in range(3))),
    "masked attention": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m > 0),
        rows(1, 2, 20, 16), *(rows(1, 2, 24, 16) for _ in range(2)), rows(20, 24),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_products(case):
    fn, *args = case
    check_triton(fn, *args, rtol=2e-3, atol=2e-3, options=ALONE)


def test_long_sums_of_products_are_tiles_in_even_parts():
    """Parts that need no mask, their channels beside each other in memory, and lie as the result does."""
    x, w = (rows(*shape, dtype=torch.float16).contiguous(memory_format=torch.channels_last) for shape in ((1, 64, 4, 5), (16, 64, 3, 3)))
    made = check_triton(lambda x, w: torch.relu(F.conv2d(x, w / 24, padding=1)), x, w, rtol=1e-2, atol=1e-2, options=ALONE)
    *_, parts, whole = texts_of(made)
    assert "tl.dot(" in parts and "range(0, 192, 64)" in parts and "// 9)" not in parts
    assert "[:, None]" not in whole


def test_gradients_by_a_small_batch_are_part_of_what_an_optimizer_does(monkeypatch):
    monkeypatch.setattr(contraction, "MANY_RESULTS", 256)

    def step(g, x, p, m):
        m = m * 0.9 + (x.t() @ g).t()
        return m, p - 0.1 * m

    for terms, calls in ((16, 0), (40, 1)):
        scheduled = check_triton(step, rows(terms, 24), rows(terms, 40), rows(24, 40), rows(24, 40), rtol=1e-5, atol=1e-5)
        assert (len(texts_of(scheduled)), len(scheduled.body)) == (1, 1 + calls)
    (text,) = texts_of(check_triton(step, rows(20, 64), rows(20, 64), rows(64, 64), rows(64, 64), rtol=1e-5, atol=1e-5))
    assert "tl.dot(" in text and text.count("tl.store(") == 2


def test_infinities_beside_a_product():
    """Nothing that lies beyond an edge is multiplied: exp(0) times what is not there would be a result."""
    x, w = rows(20, 41), rows(33, 41)
    x[3, 5], w[7, 9] = torch.inf, torch.nan
    check_triton(lambda x, w: torch.exp(x) @ torch.cos(w).t(), x, w, rtol=1e-3, atol=1e-3, options=ALONE)


def test_sizes_of_products_that_vary():
    check_triton(torch.mm, rows(20, 30), rows(30, 40), dynamic=True, rtol=1e-4, atol=1e-4, options=ALONE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype):
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {}
    x, y = rows(5, 70, dtype=dtype), rows(5, 71, dtype=dtype)[:, 1:]
    check_triton(lambda x, y: (F.gelu(x) * y, F.layer_norm(x, (70,)), x.sum(0)), x, y, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_powers_of_two_of_any_number_are_exact(dtype):
    most = 300 if dtype is torch.float32 else 2200
    wide = torch.ldexp(rows(200, dtype=torch.float64), numbers(most - 40, 200) - most // 2 + 20).to(dtype)
    x = torch.cat([rows(200, dtype=dtype), wide, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)])
    check_triton(torch.ldexp, x, numbers(2 * most, 405) - most, rtol=0, atol=0)
    check_triton(torch.ldexp, numbers(9, 5), numbers(9, 5), rtol=0, atol=0)


def test_sizes_that_vary(monkeypatch):
    monkeypatch.setattr(blocks, "STEP", 16)  # lanes that idle cost time here
    check_triton(lambda x, y: (torch.softmax(x + y, 1), (x * y).sum(0)), rows(5, 40), rows(5, 40), dynamic=True, rtol=1e-4, atol=1e-5)


def test_kernels_are_joined_only_where_names_of_axes_allow():
    """The loop over the other dimension of one scatter has the name of the grid of the one before."""
    i, x = numbers(5, 5, 5), rows(5, 5)

    def scatters(x, y, i):
        by_rows = [torch.scatter_reduce(x, -1, i, y, how, include_self=False) for how in ("sum", "prod")]
        return *by_rows, *(torch.scatter_reduce(y, 0, i, x, how, include_self=False) for how in ("mean", "amin"))

    check_triton(scatters, x, x + 1, i)


def test_rows_of_unknown_length_share_what_a_program_holds():
    """Several rows at a time, each in steps: as many elements as one long row has, or a kernel wants more memory than a device has."""
    scheduled = check_triton(lambda x: F.max_pool1d(x, 3, 2, ceil_mode=True, return_indices=True), rows(3, 7, 9), dynamic=True)
    held = [math.prod(int(n) for n in re.findall(r"tl.arange\(0, (\d+)\)", t)) for t in texts_of(scheduled)]
    assert max(held) <= 4 * blocks.STEP


def test_few_results_of_much(monkeypatch):
    """Sums with few results run in two steps, also where parts do not divide the whole."""
    large = torch.empty(8191, 8193, device="meta")
    for fn in (torch.sum, torch.amax, lambda x: x.sum(0)):
        kernels = [k for k in scheduled_of(fn, (large,))[0].body if isinstance(k, Kernel)]
        assert len(kernels) == 2 and int(kernels[0].programs.value) > 4 * 100
    monkeypatch.setattr(blocks, "STEP", 8)
    check_triton(lambda x: (x.sum(), x.amax()), rows(21, 53), rtol=1e-4, atol=1e-4)
    check_triton(lambda x: x.sum(0), rows(300, 70), rtol=1e-4, atol=1e-4)


def test_short_sums_of_many_elements_are_no_loop_of_few_programs():
    """The gradients of a ViT's positions and of its first token share what they read, but 48 programs would write out 16 loads for each of
    2048 elements: Triton took 3.2 CPU s for that kernel, and takes 0.1 for most."""

    def fn(x: torch.Tensor, positions: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return positions * 0.9 + x.sum(0), token * 0.9 + x[:, 0].sum(0)

    kernels = scheduled_of(fn, (rows(16, 197, 384), rows(197, 384), rows(384)))[0].body
    assert [len(k.tiles) for k in kernels if isinstance(k, Kernel)] == [1, 1]
    check_triton(fn, rows(4, 5, 24), rows(5, 24), rows(24))


def test_what_a_row_needs_is_not_computed_for_each_element():
    """A norm of columns behind a norm of rows: nothing is summed inside of a sum."""

    def chain(x, y):
        for _ in range(2):
            x = torch.softmax(x + y, 1)
            x = x - x.mean(0)
        return x

    scheduled = check_triton(chain, rows(20, 30), rows(20, 30), rtol=1e-4, atol=1e-5)
    assert not any("for r" in t for t in texts_of(scheduled))


def test_odd_totals_keep_wide_loads():
    """Programs that are full have a text without masks: 16 bytes a load, though the last one ends in the middle."""
    fn, large = CASES["sin(cos)"][0], torch.empty(8191, 8193, dtype=torch.float16, device="meta")
    (image,) = compile_images(texts_of(scheduled_of(fn, (large,))[0]), 90, Options())
    assert b"ld.global.v4.b32" in image.ptx and b"st.global.v4.b32" in image.ptx
    check_triton(fn, rows(7, 1300), rtol=1e-4, atol=1e-4)
    check_triton(lambda x, y: x[:, ::2] * y + 1, rows(70, 600), rows(300), dynamic=True, rtol=1e-4, atol=1e-4)


SMALL = torch.cat([torch.linspace(-8, 8, 301), torch.tensor([torch.inf, torch.nan, 1e4, -1e4, 0.0, -0.0, 65504.0, -65504.0])]).half()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_statistics_of_batches_are_taken_in_one_pass(dtype, monkeypatch):
    """Channels-last in parts, and in a kernel of its own what is small; means far from 0 cost no digits."""
    monkeypatch.setattr(blocks, "STEP", 64)

    def norm(x, w, b, m, v):
        return torch.ops.aten._native_batch_norm_legit_functional.default(x, w, b, m, v, True, 0.1, 1e-5)

    for shape, form, most in (((2, 8, 12, 12), torch.channels_last, 2), ((3, 4, 5, 6), torch.contiguous_format, 1)):
        per_channel = [torch.rand(shape[1]) + 0.5 for _ in range(4)]
        x = (torch.randn(shape) + torch.linspace(-100, 100, shape[1]).view(1, -1, 1, 1)).to(dtype).contiguous(memory_format=form)
        scheduled = check_triton(norm, x, *per_channel, rtol=2e-3 if dtype is torch.float16 else 1e-4, atol=2e-3)
        assert len(texts_of(scheduled)) == most


@pytest.mark.parametrize("function", [F.gelu, torch.tanh, torch.sin, torch.cos])
def test_functions_of_small_floats(function):
    """To 2^-10 of the value, where float16 has 2^-11."""
    scheduled, _ = scheduled_of(function, (SMALL,))
    assert "_fast" in texts_of(scheduled)[0]
    got, want = torch.from_numpy(run_triton(scheduled, [to_array(SMALL)])[0]).double(), function(SMALL.double()).half().double()
    torch.testing.assert_close(got, want, rtol=2**-10, atol=1e-5, equal_nan=True)


def test_residual_and_norm_share_a_kernel():
    fn, *args = CASES["layer norm"]
    scheduled, _ = scheduled_of(fn, args)
    assert sum(isinstance(k, Kernel) for k in scheduled.body) == 1
    (text,) = texts_of(scheduled)
    assert text.count("tl.load(") == 4  # both operands once, weight and bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_norm_and_two_halves_are_part_of_a_row_times_a_matrix(monkeypatch, dtype):
    """The gate of a decoder for one token: a sum more over the row, and both halves in one program; the row times the next matrix."""
    monkeypatch.setattr(near_sums, "LEAST", 8)

    def gate(x, g, b, w, v):
        one, two = (F.layer_norm(x, (70,), g, b) @ w.t()).chunk(2, -1)
        return x + (F.silu(one) * two) @ v.t()

    args = [t.to(dtype) for t in (rows(1, 70), rows(70), rows(70), rows(48, 70) * 0.1, rows(70, 24) * 0.1)]
    scheduled = check_triton(gate, *args, rtol=1e-2, atol=1e-2)
    assert sum(isinstance(k, Kernel) for k in scheduled.body) == 2


def test_attention_of_one_query_is_two_kernels(monkeypatch):
    """Scores; their softmax with the sum over values, in which values are asked for before the scores are compared."""
    monkeypatch.setattr(near_sums, "LEAST", 8)
    q, k, v = (rows(2 * n * 16).view(1, 2, n, 16).half() for n in (1, 40, 40))
    mask = torch.arange(40)[None, None, None] < 7
    scheduled = check_triton(F.scaled_dot_product_attention, q, k, v, mask, rtol=1e-2, atol=1e-2)
    assert sum(isinstance(k, Kernel) for k in scheduled.body) == len(scheduled.body) == 2
    text = texts_of(scheduled)[1]
    assert text.rindex("tl.load(") < text.index("tl.reduce(")


def test_every_function_has_a_text():
    for name, t in MATH:
        for called, text in triton_math.functions(name, t):
            compile(text, called, "exec")


MACHINE = ("sin(cos)", "sums", "softmax", "layer norm", "transposed", "scans", "scatter", "max pool")


def test_names():
    """Profilers tell kernels apart by what they compute; equal kernels have equal texts, whatever their graphs."""
    x, large = rows(9, 70), torch.empty((512, 512), dtype=torch.float16, device="meta")

    def names(fn, *args):
        return [json.loads(text.partition("\n")[0][1:])["name"] for text in texts_of(scheduled_of(fn, args, options=ALONE)[0])]

    assert names(lambda x: x.softmax(-1), x) == ["tsk_max_sum_exp_div_sub"]
    assert names(lambda x: F.gelu(x).tanh(), x) == ["tsk_gelu_tanh"]
    assert names(lambda x: x.t().contiguous(), x) == ["tsk_copy"]
    assert names(lambda x: (x @ x).relu(), large)[-1].startswith("tsk_dot")
    (one,), (same,) = (texts_of(scheduled_of(fn, (x,))[0]) for fn in (lambda x: x.tanh() * 2, lambda a: torch.tanh_(a.clone()).mul(2)))
    assert one == same


@pytest.mark.parametrize("arch", [80, 90])
def test_machine_code(arch, tmp_path):
    """No kernel of these spills, or takes more shared memory than a block may have; where architectures have a wait for the kernels before,
    no memory is touched before it."""
    texts = [t for name in MACHINE for t in texts_of(scheduled_of(CASES[name][0], CASES[name][1:])[0])]
    large = [torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((2048, 768), (3072, 768), (3072,))]
    products = texts_of(scheduled_of(lambda x, w, b: F.gelu(F.linear(x, w, b)), large, options=ALONE)[0])
    (image,) = compile_images(products, arch, Options())
    assert {80: b"mma.sync", 90: b"wgmma.mma_async"}[arch] in image.ptx and b"cp.async" in image.ptx
    texts += products
    for text, image in zip(texts, compile_images(texts, arch, Options()), strict=True):
        assert image.symbol.startswith("tsk_") and f"def {image.symbol}(" in text
        assert image.data[:4] == b"\x7fELF" and image.shared < 227 * 1024
        assert not spilled(image.ptx, tmp_path), text
        touched = re.search(rb"(ld|st)\.global|cp\.async|atom\.|red\.|griddepcontrol", image.ptx)
        assert image.waits == (arch >= 90) == (touched is not None and touched[0] == b"griddepcontrol"), text


def test_processes_that_wait_for_texts(monkeypatch):
    """They are started once, before there is a text; a forked process starts its own; one that died is not asked."""

    class Waiting:
        def __init__(self):
            self.process, self.status, self.ended = self, None, False
            made.append(self)

        def poll(self):
            return self.status

        def end(self):
            self.ended = True

    made: list[Waiting] = []
    monkeypatch.setattr(cubins, "_Worker", Waiting)
    workers = cubins._Workers()
    assert [workers.count_for(n) for n in (0, 3, 40, 200)] == [1, 3, 8, 17]
    for _ in range(2):
        workers.prepare(3)
    assert [workers.count_for(n) for n in (2, 30, 60)] == [3, 3, 5]  # one more is started only where it takes less time than it saves
    assert len(made) == 3 and workers.take() is made[2]
    made[1].status = 1
    assert workers.take() is made[0] and made[1].ended and workers.take() is made[3]
    workers.pid = 0
    workers.prepare(2)
    workers.wait()
    assert len(made) == 6


class Answering:
    """Stands for a worker; says of a text that holds "wrong" that it is, and takes its time over one that holds "slow"."""

    asked: ClassVar[list[str]] = []
    go_on: ClassVar[threading.Event]

    def __init__(self):
        self.process = self

    def poll(self):
        return None

    def ask(self, text, arch):
        self.asked.append(text)
        if "slow" in text:
            self.go_on.wait(30)
        made = {"cubin": "", "ptx": "", "symbol": text, "warps": arch, "shared": 0, "scratch": 0, "waits": False}
        return {"error": "it is wrong"} if "wrong" in text else made

    def end(self):
        pass


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """The texts that workers are asked, and how the names of texts end that no test had before."""
    monkeypatch.setattr(cubins, "_Worker", Answering)
    monkeypatch.setattr(cubins, "_WORKERS", cubins._Workers())
    monkeypatch.setattr(cubins, "_QUEUE", cubins._Queue())
    Answering.asked, Answering.go_on = [], threading.Event()
    return Answering.asked, f" {tmp_path}"


def test_texts_are_begun_before_all_are_known(answers):
    """Each is compiled once, the long ones first; nothing is left of them in the process."""
    asked, end = answers
    slow, *others = (f"{name}{end}" for name in ("slow", "a", "bcd", "ef"))
    one = Options(compile_threads=1)
    cubins.begin_text(slow, 90, one)
    while not asked:
        time.sleep(0.001)
    for text in (slow, *others[:2]):
        cubins.begin_text(text, 90, one)
    threading.Timer(0.05, Answering.go_on.set).start()
    images = compile_images([*others, slow], 90, one)
    assert [i.symbol for i in images] == [*others, slow] and asked == [slow, *sorted(others, key=len, reverse=True)]
    assert compile_images(others[:2], 90, one) == images[:2] and len(asked) == 4 and not cubins._UNDER_WAY
    cubins.begin_text(slow, 90, one)
    assert compile_images([slow], 80, one)[0].warps == 80 and len(asked) == 5  # another architecture's is another one


def test_texts_that_are_refused(answers):
    """Whoever begins one hears nothing of it, whoever asks does; what waits behind it then is given up, and can be asked for again."""
    asked, end = answers
    wrong, *others = (f"{name}{end}" for name in ("the wrong one", "a", "b"))
    cubins.begin_text(wrong, 90, Options())
    with pytest.raises(Unsupported, match=r"RUN006.*it is wrong"):
        compile_images([wrong], 90, Options())
    with pytest.raises(Unsupported, match=r"RUN006.*it is wrong"):
        compile_images([wrong, *others], 90, Options(compile_threads=1))
    assert [i.symbol for i in compile_images(others, 90, Options())] == others
    assert not cubins._UNDER_WAY and set(asked) == {wrong, *others}


def test_kernels_are_ready_before_all_are_formed():
    """What `form` tells of stays as it is: it is not joined with others, and a plan does not have it write in place."""

    def step(x, w, v, m):
        grad = (x @ w).tanh().sum(0)
        v.mul_(0.9).add_(grad)
        w.sub_(v * 0.1)
        m.add_(x.mean(0))
        return F.softmax(x, 1), x.sin().sum(), w.sum(1)

    args = (rows(64, 96), rows(96, 96), rows(96), rows(96))
    told: list[Kernel] = []
    fg = graph_of(step, *(remember_device(torch.empty_like(a, device="meta"), CUDA) for a in args))
    program = fuse(lower(fg, Options()), Options())
    scheduled = formers.form(program, Options(), ready=told.append)
    kernels = plan(scheduled, Options()).kernels
    assert program.write_backs and 2 <= len(told) < len(kernels) and all(any(k is t for k in kernels) for t in told)


def test_indices_are_asked_on_the_device(tmp_path):
    """A row that is not there stops the device; no Check is left that the host would wait for."""
    args = (rows(9, 70), numbers(9, 9, 5))
    scheduled, _ = scheduled_of(lambda x, i: F.embedding(i, x), args)
    asked = [k for k in scheduled.body if any(isinstance(s, Require) for s in k.body)]
    assert asked and not any(isinstance(e, Check) for e in scheduled.body)
    (image,) = compile_images(texts_of(Scheduled(scheduled.program, (asked[0],))), 90, Options())
    assert b"__assertfail" in image.ptx
    losses = {F.binary_cross_entropy: (rows(9, 5).sigmoid(), rows(9, 5).sigmoid()), F.multi_margin_loss: (rows(9, 5), numbers(5, 9))}
    for fn, given in losses.items():  # eager's kernels ask too
        assert not any(isinstance(e, Check) for e in scheduled_of(fn, given)[0].body)
    args[1][3, 2] = 9
    with pytest.raises(CheckFailed, match="index out of range in self"):
        run_scheduled(scheduled, [to_array(a) for a in args])


class Largest(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x)[0]


def test_export_without_a_gpu(tmp_path):
    """A module on the processor becomes a library for GPUs: machine code for two architectures, and text."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(40), torch.nn.Linear(40, 20)).eval()
    path = tmp_path / "model.so"
    torchsmith.aot.aot_compile(model, (torch.randn(6, 40),), options={"device": "cuda", "aot_inductor.output_path": str(path)})
    content = path.read_bytes()
    assert content.count(b"\x7fELF\x02\x01\x01\x41") + content.count(b"\x7fELF\x02\x01\x01\x33") >= 2 and b".target sm_80" in content
    assert b'"cuda_archs": [80, 90]' in content and len(content) < 1 << 20
    program = f"import torchsmith.aot as a\ntry: a.load_package({str(path)!r})\nexcept a.PackageError as e: print(e.status, e)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.startswith("7 ") and "libcuda" in said
    with pytest.raises(Unsupported, match=r"AOT020.*svd"):
        torchsmith.aot.aot_compile(Largest(), (torch.randn(4, 4),), options={"device": "cuda"})


def test_functions_of_single_values():
    """Loops that ask all lanes, and constants of 64 bits, are machine code also where there is one value."""
    one, some = torch.tensor(5.5), torch.rand(20)
    cases = (
        (torch.fmod, one, one), (torch.remainder, one, one), (torch.floor_divide, one, one), (torch.digamma, some),
        (torch.lgamma, some),
    )  # fmt: skip
    texts = [t for fn, *args in cases for t in texts_of(scheduled_of(fn, args)[0])]
    assert len(compile_images(texts, 90, Options())) == len(texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_negative_zero_is_no_literal(dtype, monkeypatch):
    """Triton 3.6 takes the literal -0.0 for 0.0."""
    from triton.language.semantic import TritonSemantic

    real = TritonSemantic.scalar_constant
    monkeypatch.setattr(TritonSemantic, "scalar_constant", lambda self, value, dtype: real(self, value if value else abs(value), dtype))

    def fn(x):
        zeros = torch.where(x > 0, -0.0, x), F.pad(x, (0, 1), value=-0.0), x.clamp(0, 0) * -0.0, torch.full_like(x, -0.0)
        return x / -0.0, *(1 / z for z in zeros)

    scheduled = check_triton(fn, rows(5, 20, dtype=dtype))
    texts = texts_of(scheduled)
    assert len(compile_images(texts, 90, Options())) == len(texts)


def attend(q, rows):
    """Attention with a mask that models make where they cannot look at values: rows below 0 are left out, and there are none."""
    at = torch.arange(8, device=q.device)[None, None, :, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=(at >= rows).expand(1, 1, 8, 8))


@pytest.mark.parametrize(("rows", "is_masked"), [(0, False), (3, True)])
def test_masks_that_are_true(rows, is_masked):
    q = remember_device(torch.randn(1, 2, 8, 16, device="meta"), CUDA)
    program = fuse(lower(graph_of(lambda x: attend(x, rows) + 1, q), Options()), Options())
    (call,) = (e for e in drop_masks(program, Options()).body if isinstance(e, Extern))
    assert (call.args[3] is not None) == is_masked
    if is_masked:  # the library takes no expanded mask into its fast kernels
        assert program.buffers[call.args[3].buf].layout is None or program.buffers[call.args[3].buf].layout.strides[-1] == const(1)


def test_an_attention_with_dropout_keeps_its_mask():
    """Which kernel draws depends on whether there is one, and how it lies."""
    q = remember_device(torch.randn(1, 2, 8, 16, device="meta"), CUDA)

    def drop(q):
        mask = (torch.arange(8, device=q.device)[None, None, :, None] >= 0).expand(1, 1, 8, 8)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.5) + 1

    program = drop_masks(fuse(lower(graph_of(drop, q), Options()), Options()), Options())
    (call,) = (e for e in program.body if isinstance(e, Extern))
    mask = program.buffers[call.args[3].buf]
    assert call.op == "aten.scaled_dot_product_attention.default" and mask.dtype.name == "bool"
    assert mask.layout is not None and mask.layout.strides[-1] == const(0), mask.layout


@pytest.mark.parametrize("fn", [lambda x: torch.roll(x, (1, 2), (0, 1)), lambda x: torch.flip(x, (0,))])
def test_nothing_is_divided_by_an_empty_dimension(fn):
    """Triton 3.6's passes fail on such a text, though it would never run."""
    texts = texts_of(scheduled_of(fn, (torch.empty(5, 0, 3),))[0])
    assert texts and not any(re.search(r"(%|//) 0\b", t) for t in texts)


def test_nothing_is_touched_of_an_empty_tensor():
    """Nor where an index needs no axis: the address of its first element belongs to nobody."""

    def both(x, w):
        p = torch.softmax(F.linear(x, w), -1)
        return p, F.linear(p, w)

    check_triton(both, torch.empty(2, 0, 16), torch.randn(16, 16))
    check_triton(lambda x, w: (x * w).sum(1), torch.empty(4, 0), torch.empty(0))


def test_kernels_of_training_steps():
    """Windows that two results look through are read in one flat loop; gradients that lie channels-last beside weights that do not are
    read in tiles of both; what lists of tensors update in two goes is one kernel."""
    image = rows(2, 8, 9, 9).contiguous(memory_format=torch.channels_last)
    pool = lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)
    check_triton(pool, image)
    (made,) = kernels_of(pool, (image,))
    assert [t.how for t in made.tiles] == ["lanes"]

    weight, gradient = rows(20, 32, 3, 3), rows(20, 32, 3, 3).contiguous(memory_format=torch.channels_last)
    turned = lambda p, g: p * 0.9 + g
    check_triton(turned, weight, gradient)
    (made,) = kernels_of(turned, (weight, gradient))
    assert [t.size for t in made.tiles] == [32, 16]

    def lists(*tensors):
        half = [t * 0.9 for t in tensors]
        return [(a.sin(), a + t) for a, t in zip(half, tensors, strict=True)]

    assert len(kernels_of(lists, [rows(40, 50 + k) for k in range(50)])) == 50


def test_indices_are_asked_once():
    def fn(x, i):
        return x.index_select(0, i) + (x * 2).index_select(0, i) + x.index_select(1, i).sum()

    program = lower(graph_of(fn, torch.empty(5, 5), torch.tensor([0, 3])), Options())
    assert sum(isinstance(e, Check) for e in program.body) == 1  # both dimensions have the same size


def kernels_of(fn, args):
    return [k for k in scheduled_of(fn, args)[0].body if isinstance(k, Kernel)]


def test_small_kernels_with_one_grid_are_one_launch():
    def beside(x, y, i, z):
        held = x.index_copy(1, i, y.sin())
        return held, z.index_copy(1, i, y.exp()), y.cos(), z.sum() + 1, x.amax()

    args = (rows(3, 7), rows(3, 1), torch.tensor([4]), rows(3, 7))
    check_triton(beside, *args)
    apart = ((lambda x, y: (x.t().contiguous().flatten().sin(), y.flip(0).exp()), 1), (lambda x, y: (x.sin(), y.flip(0).exp()), 1))
    for fn, count in apart:
        check_triton(fn, rows(4, 5), rows(20))
        assert len(kernels_of(fn, (rows(4, 5), rows(20)))) == count
    large = (rows(300, 200), rows(60000))
    assert len(kernels_of(apart[0][0], large)) == 2  # each keeps a device busy


def test_kernels_that_depend_on_each_other_stay_in_order():
    def steps(x, i):
        a = x.index_copy(0, i, x[:1] * 2)
        b = a.cumsum(0)
        c = b.index_copy(0, i, a[1:2])
        return a, b, c, c.flip(0) + a

    check_triton(steps, rows(6), torch.tensor([2]))
    found = kernels_of(steps, (rows(6), torch.tensor([2])))
    done: set[str] = set()
    made = {p.buf for k in found for p in k.params if p.written}
    for k in found:
        assert all(p.buf in done or p.written for p in k.params if p.buf in made)
        done |= {p.buf for p in k.params if p.written}


def test_sums_of_one_kernel_run_in_one_loop(monkeypatch):
    """What a store stands between reads its rows once; parts that divide the whole need no mask."""
    monkeypatch.setattr(blocks, "STEP", 64)
    fn = lambda g, x, m: (g.sum((0, 2, 3)), (g * (x - m.view(1, -1, 1, 1))).sum((0, 2, 3)))
    grad, x = (rows(2, 8, 16, 16).contiguous(memory_format=torch.channels_last) for _ in range(2))
    scheduled = check_triton(fn, grad, x, rows(8), rtol=1e-4, atol=1e-4)
    assert len(texts_of(scheduled)) == 2
    large = [torch.empty(16, 64, 56, 56, device="meta").to(memory_format=torch.channels_last)] * 2
    first = texts_of(scheduled_of(fn, (*large, torch.empty(64, device="meta")))[0])[0]
    assert first.count("for r") == 1 and "tl.where" not in first


def test_stores_come_last():
    """What one store waits for does not keep the next loads back; loads beside a sum do not wait for it."""

    def update(a, b, c, x):
        return a * 0.5, b * 0.5, c * 0.5, (x.sum(1) + a) * b

    (text,) = texts_of(check_triton(update, *(rows(5) for _ in range(3)), rows(5, 9)))
    assert all("tl.load(" not in text[text.index(end) :] for end in ("tl.store(", "tl.sum("))


def test_columns_fill_their_lanes():
    """Columns are taken by lines of memory; one long sum of two is divided too."""
    assert [blocks.columns(*n) for n in ((144, 4), (144, 2), (24, 2), (144, 8))] == [32, 64, 32, 16]
    large = torch.empty(16 * 56 * 56, 144, device="meta")
    first, _ = texts_of(scheduled_of(lambda x: x.sum(0), (large,))[0])
    assert "arange(0, 32)[:, None]" in first
    loss = lambda x, y: x.square().mean() + y.square().mean()
    assert len(kernels_of(loss, (large, torch.empty(16, 768, device="meta")))) == 2
    check_triton(loss, rows(300, 300), rows(5))


def test_what_neighbours_read_is_made_once():
    """A convolution that reads nine elements of a norm is a kernel behind it, but where all of it is small."""

    def fn(x, w):
        return F.conv2d(torch.relu(x - x.mean((0, 2, 3), keepdim=True)), w, padding=1, groups=w.shape[0])

    def args(n, channels, device="cpu"):
        x = torch.ones(n, channels, 7, 7, device=device).to(memory_format=torch.channels_last)
        return x.cumsum(3), torch.ones(channels, 1, 3, 3, device=device)

    (text,) = texts_of(check_triton(fn, *args(2, 8), rtol=1e-4, atol=1e-4))
    assert "tl.load(tl.broadcast_to(" not in text  # what belongs to a channel is read once for it
    assert len(kernels_of(fn, args(16, 960, "meta"))) == 3


def test_small_kernels_join_past_calls():
    """The earlier one goes down to the later one, unless what the call reads or writes depends on it."""

    def apart(x, count, other):
        first = count + 1
        return x @ x, first, other + 1

    def between(x, count, other):
        first = count + 1
        return x @ first, first, other + 1

    args = (rows(40, 40), rows(40), rows(40))
    assert [len(kernels_of(fn, args)) for fn in (apart, between)] == [1, 2]
    for fn in (apart, between):
        check_triton(fn, *args, rtol=1e-4, atol=1e-4)


def test_values_are_made_again_where_their_operands_are_read(monkeypatch):
    """The backward pass of a norm and an activation does not read the activation's result; a value under a mask is read."""
    monkeypatch.setattr(rematerialize, "LEAST", 1)
    args = (rows(70, 40), rows(1, 40), rows(70, 40))

    def back(x, w, grad):
        y = torch.relu(x * w + 1)
        g = torch.where(y <= 0, 0.0, grad)
        return y, g.sum(0), (g * x).sum(0)

    def dear(x, w, grad):
        y = torch.exp(x * w)
        return y, (y * grad * x).sum(0)

    def padded(x, w, grad):
        y = x * w + 1
        return y, F.pad(y, (1, 1)).sum(0), (x * grad).sum(0)

    def operands(fn):
        return [{p.buf for p in k.params if not p.written} for k in kernels_of(fn, args)]

    for fn in (back, dear, padded):
        check_triton(fn, *args, rtol=1e-4, atol=1e-4)
    inputs = {"x0", "x1", "x2"}
    assert operands(back) == [{"x0", "x1"}, inputs]
    assert not operands(padded)[1] & inputs


WINDOWS = [((3, 3), 1, 1, 1, torch.float16), ((2, 3), 2, (1, 2), 1, torch.float32), ((3, 2), (1, 2), 2, 2, torch.float32)]


@pytest.mark.parametrize(("taps", "stride", "padding", "dilation", "dtype"), WINDOWS)
def test_convolutions_with_a_filter_for_each_channel(taps, stride, padding, dilation, dtype):
    """Taps are written out, and all of a weight's gradient is one loop over the images."""
    x = rows(2, 8, 5, 6, dtype=dtype).contiguous(memory_format=torch.channels_last)
    w, b = rows(8, 1, *taps, dtype=dtype), rows(8, dtype=dtype)
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 8}
    y = F.conv2d(x, w, b, **how)
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    scheduled = check_triton(lambda x, w, b: F.relu6(F.conv2d(x, w, b, **how)), x, w, b, **near)
    assert not any(isinstance(e, Extern) for e in scheduled.body) and "tl.fma(" in "".join(texts_of(scheduled))
    pair = [[n, n] if isinstance(n, int) else list(n) for n in (stride, padding, dilation)]

    def gradients(g, x, w):
        back = torch.ops.aten.convolution_backward
        image, weight = ((True, False, False), (False, True, False))
        return tuple(back(g, x, w, None, *pair, False, [0, 0], 8, mask)[k] for k, mask in enumerate((image, weight)))

    scheduled = check_triton(gradients, rows(*y.shape, dtype=dtype).contiguous(memory_format=torch.channels_last), x, w, **near)
    assert not any(isinstance(e, Extern) for e in scheduled.body)


@pytest.mark.parametrize("how", ["sum", "prod", "amax", "amin"])
def test_booleans_are_accumulated(how):
    """No device has atomics of them: `or` and `and`, in order."""
    at, values = torch.tensor([0, 1, 1, 2]), torch.tensor([True, False, True, True])
    check_triton(lambda at, v: torch.zeros(4, dtype=torch.bool).scatter_reduce(0, at, v, how), at, values)
    check_triton(lambda at, v: torch.ones(4, dtype=torch.bool).scatter_reduce(0, at, v, how), at, ~values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_that_meet_in_one_element_are_summed_in_float32(dtype):
    """A sum in their own dtype stops at 256 or 2048, as the processor's does; eager's kernels of a GPU round once."""
    at, ones = torch.zeros(2560, dtype=torch.int64), torch.ones(2560, dtype=dtype)
    scheduled, _ = scheduled_of(lambda x, at, v: x.index_put((at,), v, accumulate=True), (torch.zeros(2, dtype=dtype), at, ones))
    (got,) = run_triton(scheduled, [to_array(a) for a in (torch.zeros(2, dtype=dtype), at, ones)])
    assert torch.equal(torch.from_numpy(got), torch.tensor([2560.0, 0], dtype=torch.from_numpy(got).dtype))


def test_no_constants_are_reduced():
    """Triton 3.6 fails on them: a Fold that takes nothing in (is any index of 0 or 1 out of range?) is what it began with."""

    def fn(x):
        return torch.zeros(x.shape[0], 8).scatter_add(-1, (x > 0).to(torch.int64), x)

    texts = texts_of(scheduled_of(fn, (rows(8, 8),), dynamic=True)[0])
    assert texts and not any("tl.reduce" in t for t in texts)


@pytest.mark.parametrize(("stride", "form"), [(1, torch.channels_last), (2, torch.channels_last), (1, torch.contiguous_format)])
def test_neighbours_share_their_windows(stride, form, monkeypatch):
    """All six pixels of a row (of a column, where rows lie beside each other) load what three rows hold once, and each filter once."""
    monkeypatch.setattr(blocks, "LANES", 0)
    x, w = rows(2, 8, 6 * stride, 6 * stride, dtype=torch.float16).contiguous(memory_format=form), rows(8, 1, 3, 3, dtype=torch.float16)
    fn = lambda x, w, b: F.relu6(F.conv2d(x, w, b, padding=1, stride=stride, groups=8))
    *_, text = texts_of(check_triton(fn, x, w, rows(8, dtype=torch.float16), rtol=1e-2, atol=1e-2))
    assert text.count("tl.store(") == 6 and text.count("tl.load(") == 3 * 6 * stride + 10


def test_neighbours_that_share_nothing_are_not_drafted(monkeypatch):
    """Sums over images that are written out: trying each number of neighbours took a fifth of the time in which kernels are formed."""

    def drafted(*args):
        raise AssertionError

    monkeypatch.setattr(blocks, "LANES", 0)
    monkeypatch.setattr(blocks, "neighbours_of", drafted)
    scheduled_of(lambda x, y: sum(x[i] * y for i in range(8)), (rows(8, 12, 16), rows(12, 1)))


def test_values_read_at_places_that_they_tell_themselves() -> None:
    def spread_of_a_row_that_spreads_tell(x: torch.Tensor) -> torch.Tensor:
        spread = (x - x.mean(1, keepdim=True)).square().mean(1)
        return spread[spread.long() % 3]

    check_triton(spread_of_a_row_that_spreads_tell, rows(3, 4))


def test_copies_into_complex_inputs_are_planned_and_printed() -> None:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[..., :1].copy_(y[0].clone())
        y.mul_(2j)
        return x == y

    scheduled, _ = scheduled_of(write, (rows(5, 1).to(torch.complex64), rows(5, 1).to(torch.complex64)))
    program, body = end_with_write_backs(scheduled)
    assert not program.write_backs
    written = {p.buf for k in body if isinstance(k, Kernel) for p in k.params if p.written}
    assert {root_of(program.buffers, name) for name in written} >= {"x0", "x1"}
    assert texts_of(replace(scheduled, program=program, body=body))


def test_powers_of_two_that_tensors_tell() -> None:
    exponents = numbers(40, 33) - 20
    check_triton(torch.ldexp, numbers(9, 33), exponents)
    check_triton(torch.ldexp, rows(33), exponents)
    check_triton(torch.ldexp, rows(33, dtype=torch.float64), exponents)
