"""Which machine a graph is compiled for: the devices of what goes in and comes out."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from graph_harness import captured, graph_of
from lower_harness import call_eager, to_array
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import torchsmith
from torchsmith.autograd.joint import Joint
from torchsmith.codes import Unsupported
from torchsmith.events import recording
from torchsmith.graph import tracing
from torchsmith.graph.eager import eager_callable
from torchsmith.graph.host_part import take_out
from torchsmith.graph.rules import functions
from torchsmith.graph.sizes import SizeFacts
from torchsmith.graph.spec import FreshOutput, TensorSpec
from torchsmith.graph.tracing import remember_device
from torchsmith.ir.expr import Sym, walk
from torchsmith.ir.interpret import run_program
from torchsmith.ir.nested import leaves
from torchsmith.ir.number import number_of
from torchsmith.ir.parse import parse_program
from torchsmith.ir.print import print_program
from torchsmith.ir.program import Stage
from torchsmith.ir.verify import verify_program
from torchsmith.lower import lower
from torchsmith.options import Options


def placed(*sizes: int, on: str = "cuda:0", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Stands for a tensor on a device that this machine need not have."""
    return remember_device(torch.empty(sizes, dtype=dtype, device="meta"), torch.device(on))


def test_a_graph_on_one_device_has_its_target():
    program = lower(graph_of(lambda x: torch.sin(x) + torch.ones(5, device="cuda:0"), placed(5)), Options(cuda_arch=80))
    assert (program.target.name, program.device) == ("cuda:sm_80", "cuda:0")
    assert {b.device for b in program.buffers.values()} == {"cuda"}
    verify_program(program)
    assert parse_program(print_program(program)) == program
    assert lower(graph_of(lambda x: x + 1, torch.ones(3)), Options()).target.name == "cpu"


def test_numbers_in_the_hosts_memory_are_symbols_beside_a_gpu():
    program = lower(graph_of(lambda x, y: x * y, placed(5), torch.tensor(2.0)), Options())
    assert program.inputs == ("x0", "")
    assert ("element", 1) in {s.origin for s in program.symbols}
    assert any(isinstance(e, Sym) for s in program.body if isinstance(s, Stage) for t in s.stores for e in walk(t.value))


@pytest.mark.parametrize("args", [
    (placed(5), placed(5, on="cpu")), (placed(5, on="cuda:0"), placed(5, on="cuda:1")), (placed(5, on="xpu:0"),)
], ids=["cpu", "two", "xpu"])  # fmt: skip
def test_other_devices_are_refused(args):
    with pytest.raises(Unsupported) as why:
        lower(graph_of(lambda *a: [x * 2 for x in a], *args), Options())
    assert why.value.code == "LOW005"


def test_what_is_made_on_the_host_meanwhile_is_no_matter():
    lower(graph_of(lambda x: x + torch.arange(5).to("cuda:0"), placed(5)), Options())
    with pytest.raises(Unsupported):
        lower(graph_of(lambda x: x.cpu(), placed(5)), Options())


def of_tensors(entry):
    """The tensors of an entry's first sample, and the operator as a function of them alone."""
    sample = next(iter(entry.sample_inputs("cpu", torch.float32)), None)
    given, form = tree_flatten(None if sample is None else (sample.input, sample.args, sample.kwargs))

    def call(*args: torch.Tensor):
        rest = iter(args)
        first, more, options = tree_unflatten([next(rest) if isinstance(v, torch.Tensor) else v for v in given], form)
        return entry.op(first, *more, **options)

    return [v for v in given if isinstance(v, torch.Tensor)], call


FAMILIES = ("fft", "linalg", "svd", "norm", "bag", "pool", "embedding", "attention", "dropout", "rank", "fill", "zero")


def test_results_on_cuda_are_as_torchs_fake_tensors_say():
    """Kernels of a GPU leave other dtypes, sizes and strides than the processor's; torch knows them without a GPU. (No tensor runs.)"""
    checked = 0
    for entry in op_db:
        if torch.float32 not in entry.dtypes or not any(f in entry.name for f in FAMILIES) or "sparse" in entry.name:
            continue
        tensors, call = of_tensors(entry)
        if not tensors:
            continue
        try:
            with FakeTensorMode():
                there = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda:0") for t in tensors]
                wanted = [t for t in tree_flatten(call(*there))[0] if isinstance(t, torch.Tensor)]
            metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
            graph = graph_of(call, *(remember_device(t, torch.device("cuda:0")) for t in metas))
        except Exception:  # it needs values, or one of the two refuses it
            continue
        specs = {n.name: n.meta.get("spec") for n in graph.graph.nodes}
        made = [specs[out.node] for out in graph.outputs if isinstance(out, FreshOutput)]
        for got, want in zip(made, wanted, strict=False) if len(made) == len(wanted) else ():
            shape, strides = ([e.value for e in of] for of in (got.shape, got.strides))
            assert (got.dtype, tuple(shape), got.device) == (want.dtype, tuple(want.shape), "cuda:0"), entry.name
            steps = [(a, b) for n, a, b in zip(shape, strides, want.stride(), strict=True) if n > 1]
            assert 0 in shape or all(a == b for a, b in steps), entry.name
        checked += bool(made)
    assert checked > 60


def away(fg):
    """Nodes whose values lie elsewhere than on the GPU."""
    specs = ((n, s) for n in fg.graph.nodes if n.op == "call_function" for s in leaves(n.meta.get("spec")) if isinstance(s, TensorSpec))
    return [f"{n.name} = {n.target}" for n, s in specs if s.device != "cuda:0"]


def cut_of(fn, *args):
    """The forward and the backward graph of a function whose float arguments want gradients."""
    facts = SizeFacts()
    gm = captured(fn, tuple(t.requires_grad_(t.is_floating_point()) for t in args), facts)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"].requires_grad_(node.meta["val"].is_floating_point())
    return Joint(gm, facts).cut()


def test_what_operators_and_their_derivatives_are_made_of_lies_beside_their_operands():
    """Zeros that a gradient is added to, masks, counters: torch makes them on the operands' device. Run eagerly they have to lie there, and
    what is in the host's memory would be taken for a part that comes before (graph/host_part.py)."""
    checked = 0
    for entry in op_db[::3]:
        if torch.float32 not in entry.dtypes or not entry.supports_autograd or "sparse" in entry.name or entry.name == "to":
            continue
        tensors, call = of_tensors(entry)
        if not tensors:
            continue
        metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        try:
            cut = cut_of(call, *(remember_device(t, torch.device("cuda:0")) for t in metas))
        except Exception:  # it needs values, or has no derivative
            continue
        assert not away(cut.forward) and not away(cut.backward.graph), entry.name
        checked += 1
    assert checked > 100, checked


def test_rows_that_the_host_chose_are_no_obstacle_to_gradients():
    """Backward reads what forward kept in the host's memory: it moves, and what is left is on the GPU alone."""
    def table(x, w):
        at = torch.arange(4)
        rows = w[(at[:, None] - at[None]) + 3]
        return x[:, 1:] @ rows.sum(0)[1:]

    cut = cut_of(table, placed(5, 4), placed(7, 3))
    for fg in (cut.forward, cut.backward.graph):
        parts = take_out(fg)
        assert parts is not None and not away(parts.rest)
        assert lower(parts.rest, Options(cuda_arch=80)).device == "cuda:0"


@pytest.mark.parametrize("call", [
    lambda t, dims: torch.fft.fftn(t.to(torch.complex64), dim=dims), lambda t, dims: torch.fft.rfftn(t, dim=dims),
    lambda t, dims: torch.fft.irfftn(t.to(torch.complex64), dim=dims), lambda t, dims: torch.fft.fft(t, dim=dims[-1]),
    lambda t, dims: torch.ops.aten._fft_r2c.default(t, list(dims), 0, False),
], ids=["c2c", "r2c", "c2r", "fft", "both sides"])  # fmt: skip
@pytest.mark.parametrize("varies", [False, True])
def test_transforms_lie_as_cufft_leaves_them(call, varies):
    for order in itertools.permutations(range(4)):
        for dims in ((0,), (1, 2), (0, 1), (3, 0, 2), (0, 1, 3), (1, 3, 0, 2)):
            with FakeTensorMode():
                want = call(torch.empty([2, 4, 5, 3], device="cuda:0").permute(order), dims)
            given = remember_device(torch.empty([2, 4, 5, 3], device="meta").permute(order), torch.device("cuda:0"))
            with recording() as events:
                graph = graph_of(lambda t, dims=dims: call(t, dims), given, dynamic=(0,) if varies else ())
            (out,) = graph.outputs
            spec = next(n.meta["spec"] for n in graph.graph.nodes if n.name == out.node)
            assert [number_of(e, dict(graph.hints)) for e in spec.strides] == list(want.stride()), (order, dims)
            assert not [e for e in events if e.fields.get("code") in ("GRA001", "GRA005")]


def test_layouts_that_eagers_kernels_choose_on_cuda():
    """Convolutions of float64 are contiguous there; attention of 16-bit numbers pads rows to a multiple of 8 and cuts them off again."""

    def strides(fn, *args):
        graph = graph_of(fn, *args)
        (out,) = graph.outputs
        spec = next(n.meta["spec"] for n in graph.graph.nodes if n.name == out.node)
        return tuple(e.value for e in spec.strides)

    def images(dtype, on):
        x = torch.empty(2, 3, 6, 5, dtype=dtype, device="meta").contiguous(memory_format=torch.channels_last)
        return remember_device(x, torch.device(on)), placed(4, 3, 3, 3, on=on, dtype=dtype)

    assert strides(torch.conv2d, *images(torch.float64, "cuda:0")) == (48, 12, 3, 1)
    assert strides(torch.conv2d, *images(torch.float32, "cuda:0")) == (48, 1, 12, 4)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert strides(attend, *[placed(1, 4, 12, 5, dtype=torch.bfloat16)] * 3) == (384, 96, 8, 1)
    assert strides(attend, *[placed(1, 4, 12, 8, dtype=torch.bfloat16)] * 3) == (384, 96, 8, 1)
    # cuDNN's batch norm takes contiguous memory, eager's own keeps the order; the gradient of dropout keeps a format
    turned = remember_device(torch.empty(5, 3, 4, device="meta").mT, torch.device("cuda:0"))
    channels = [placed(4) for _ in range(4)]
    assert strides(torch.nn.functional.batch_norm, turned, channels[0], channels[1], channels[2], channels[3]) == (12, 3, 1)
    assert strides(torch.nn.functional.batch_norm, turned, channels[0], channels[1]) == (12, 1, 4)
    assert strides(lambda x: x.nonzero_static(size=5), placed(4, 3, 2)) == (1, 5)
    drop = torch.ops.aten.native_dropout_backward.default
    assert strides(lambda g, m: drop(g, m, 2.0), turned, remember_device(turned.bool(), torch.device("cuda:0"))) == (12, 3, 1)
    assert strides(lambda g, m: drop(g, m, 2.0), placed(5, 1, 3), placed(4, 3, dtype=torch.bool)) == (12, 3, 1)


def found(fn, *args):
    """What the program for a GPU computes."""
    metas = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") for a in args]
    there = [remember_device(a, torch.device("cuda:0")) for a in metas]
    program = lower(graph_of(fn, *there), Options())
    verify_program(program)
    return [torch.from_numpy(g) for g in run_program(program, [to_array(a) for a in args], call_eager)]


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grids_on_cuda_fold_and_skip_as_eagers_kernel(align, dtype):
    """Exact remainders, the number of folds as an integer of 32 bits at most; what lies outside is not added, NaN times 0 neither."""
    n, most = 5, 2**31 - 1
    at = torch.tensor([0.3, -1.7, 2.9, 1e5, -3.3e7, 1e10, -1.234567e15, 1e30, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    image = torch.arange(1.0, n + 1, dtype=dtype).view(1, 1, 1, n)
    grid = torch.stack([at, torch.zeros_like(at)], -1)[None, None]
    (got,) = found(lambda x, g: torch.nn.functional.grid_sample(x, g, "nearest", "reflection", align), image, grid)
    for a, g in zip(at, got.flatten(), strict=True):
        x = (a + 1) / 2 * (n - 1) if align else ((a + 1) * n - 1) / 2
        low, span = (0.0, n - 1.0) if align else (-0.5, float(n))
        away = (x - low).abs()
        rest, times = torch.fmod(away, span), (away / span).floor().double().clamp(max=most)
        folded = (rest if int(times.nan_to_num(0)) % 2 == 0 else span - rest) + low
        assert g == image.flatten()[int(folded.nan_to_num(0).clamp(0, n - 1).round())], a
    odd = torch.tensor([[[[torch.nan, 0.0], [torch.inf, 0.0], [0.0, 0.0]]]], dtype=dtype)
    (got,) = found(lambda x, g: torch.nn.functional.grid_sample(x, g, "bilinear", "zeros", align), image, odd)
    assert got.flatten()[:2].tolist() == [0.0, 0.0] and got.flatten()[2] == 3.0


def test_what_eagers_kernels_compute_on_cuda():
    """Batch norm says what it normalises with in evaluation, log_sigmoid keeps nothing for its gradient, that of softmax rounds twice."""
    torch.manual_seed(0)
    x, mean, var = torch.randn(2, 3, 4, dtype=torch.float16), torch.randn(3), torch.rand(3)
    for norm in (torch.native_batch_norm, torch.ops.aten._native_batch_norm_legit.default):
        y, *stats = found(lambda x, mean, var, norm=norm: norm(x, None, None, mean, var, False, 0.1, 1e-5), x, mean, var)
        torch.testing.assert_close(y, torch.nn.functional.batch_norm(x, mean, var))
        torch.testing.assert_close(stats, [mean, (var + 1e-5).rsqrt()])
    y, buffer = found(torch.ops.aten.log_sigmoid_forward.default, x.mT)
    torch.testing.assert_close(y, torch.nn.functional.logsigmoid(x.mT))
    assert buffer.shape == (0,)
    g, p = torch.randn(6, 64, dtype=torch.float16), torch.randn(6, 64).softmax(1).half()
    (dx,) = found(lambda g, p: torch.ops.aten._softmax_backward_data.default(g, p, 1, torch.float16), g, p)
    product = (g * p).float()
    torch.testing.assert_close(dx, (product - p.float() * product.sum(1, keepdim=True)).half(), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("call", [
    lambda x: torch.scalar_tensor(7e4, dtype=torch.float16, device="cuda:0") + x, lambda x: x @ x, lambda x: x[None] @ x,
    lambda x: torch.ops.aten._trilinear.default(x, x, x, [], [], [], [0], 0),
], ids=["scalar_tensor", "dot", "mv", "trilinear"])  # fmt: skip
def test_what_eagers_kernels_refuse_on_cuda(call):
    with pytest.raises(Unsupported, match=r"overflow|not implemented"):
        graph_of(call, placed(3, dtype=torch.int64))


@pytest.mark.parametrize(("call", "shapes"), [
    (lambda x: torch.nn.functional.channel_shuffle(x.mT, 2), [(2, 4, 5, 6)]),
    (lambda g, y: torch.ops.aten._softmax_backward_data.default(g, y.half(), 1, torch.float16), [(3, 4), (3, 4)]),
    (lambda g, y: torch.ops.aten._softmax_backward_data.default(g.half(), y.half(), 1, torch.float32), [(3, 4), (3, 4)]),
    (lambda g, y: torch.ops.aten._log_softmax_backward_data.default(g, y, 1, torch.bfloat16), [(3, 4), (3, 4)]),
    (lambda g, m: torch.ops.aten.native_dropout_backward.default(g, m, 2.0), [(3, 4), (3, 4)]),
    (lambda g, m: torch.ops.aten.native_dropout_backward.default(g.int(), m > 0, 2.0), [(3, 4), (3, 4)]),
    (lambda x, w: torch.ops.aten._batch_norm_with_update.default(x, w[0], w[1], w[:, 0], w[:, 1], 0.1, 1e-5), [(3, 4, 5), (4, 4)]),
    (lambda x, w: torch.nn.functional.batch_norm(x, w[:, 0], w[:, 1], w[0], w[1], True), [(3, 4, 5), (4, 4)]),
], ids=[
    "a view that there is not", "dtypes", "widened", "narrowed", "a mask of floats", "integers", "cuDNN's contiguous arguments",
    "statistics that eager would lose",
])  # fmt: skip
def test_what_eager_refuses_on_cuda_for_how_it_lies(call, shapes):
    with pytest.raises(Unsupported):
        graph_of(call, *(placed(*s) for s in shapes))


def test_dropout_on_cuda_is_eagers_one_kernel():
    """Its draws are not those of bernoulli, which torch takes where it does not see the GPU."""
    graph = graph_of(lambda x: torch.nn.functional.dropout(x, 0.5, True), placed(5)).graph
    assert torch.ops.aten.native_dropout.default in [n.target for n in graph.nodes]
    graph = graph_of(lambda x: torch.nn.functional.dropout(x, 0.5, True), torch.ones(5)).graph
    assert torch.ops.aten.native_dropout.default not in [n.target for n in graph.nodes]


def test_data_of_the_program_goes_to_where_the_graph_runs():
    program = lower(graph_of(lambda x: x[:, torch.tensor([0, 1])] + torch.tensor([1.0, 2.0], device="cuda:0"), placed(3, 5)), Options())
    assert program.device == "cuda:0" and {b.device for b in program.buffers.values()} == {"cuda"}
    with pytest.raises(Unsupported):
        lower(graph_of(lambda x: (torch.tensor([0, 1]), x + 1), placed(5)), Options())


@pytest.mark.parametrize("made", [
    lambda on: torch.ops.prims.iota.default(5, start=0, step=1, dtype=torch.int64, device=on, requires_grad=False),
    lambda on: torch.ops.prims.iota(5, start=0, step=1, dtype=torch.int64, device=on, requires_grad=False),
])  # fmt: skip
def test_factories_that_have_no_default_device(made):
    program = lower(graph_of(lambda x: x + made(x.device), placed(5)), Options())
    assert program.device == "cuda:0"
    assert graph_of(lambda: made(torch.device("cuda:0"))).outputs[0].node


@pytest.mark.filterwarnings("default:torchsmith. internal error")  # where torch has no CUDA
def test_parts_of_attention_are_not_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast of a GPU casts what attention is given, and nothing inside of it: softmax would become float32, which the product after it
    would cast where autograd does not see it."""
    def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q = (x @ w).view(2, 5, 2, 6).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).transpose(1, 2).reshape(2, 5, 12)

    args = torch.randn(2, 5, 12), torch.randn(12, 12, requires_grad=True)
    torchsmith.compile(attend)(*args)  # what is imported late would keep the name below
    for room in (tracing, functions):
        monkeypatch.setattr(room, "device_of", lambda t: torch.device("cuda:0"))
    compiled = torchsmith.compile(attend, options={"force_disable_caches": True})
    try:
        torch.set_autocast_enabled("cuda", True)
        with recording() as events:
            compiled(*args)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert "AUT004" not in [e.fields["code"] for e in events if e.kind == "fallback"]


def on_the_processor(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph, in which what goes to a GPU stays."""
    here = torch.device("cpu")
    for node in graph.nodes:
        node.args = tuple(here if isinstance(a, torch.device) else a for a in node.args)
        node.kwargs = {k: here if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
    return graph


def take_rows_of_a_moved_batch(x, w, rows, step):
    batch = (x + 1).to("cuda:0")
    return batch @ w + w[rows], x.t(), x * 2, w.sum(), x


def write_beside_the_host(x, w, rows, step):
    w.mul_(x[0].to("cuda:0"))
    return torch.ones(3), w[rows[:2]] * x[0, 0]


def rows_that_the_device_tells(x, w, rows, step):
    batch = x.to("cuda:0")
    return w[batch[:, 0] > 0], batch.nonzero(), rows * 2


def count_anew(x, w, rows, step):
    """As an optimizer's first step does, whose counters are made in the host's memory and read as numbers."""
    step = torch.zeros(()) + x.shape[0]
    step += 1
    w.mul_(1 - 0.9 ** step.item())
    return step * step.item(), w + x.sum().item(), rows * 2


def count_beside_a_moved_batch(x, w, rows, step):
    """As the later steps do: the counter is an input that is written."""
    batch = x.to("cuda:0")
    step.add_(1)
    w.sub_(batch * (0.1 / (1 - 0.9 ** step.item())))
    return step * 2, w.sum()


@pytest.mark.parametrize("fn", [
    take_rows_of_a_moved_batch, write_beside_the_host, rows_that_the_device_tells, count_anew, count_beside_a_moved_batch,
])  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_hosts_part_is_taken_out(fn, dynamic):
    """What is left is on the device alone; both together give what eager gives."""
    example = torch.ones(4, 4), placed(4, 4), torch.ones(4, dtype=torch.int64), torch.ones(())
    fg = graph_of(fn, *example, dynamic=(0, 1, 2) if dynamic else (), reads=True)
    with pytest.raises(Unsupported, match="LOW005"):
        lower(fg, Options(cuda_arch=80))
    parts = take_out(fg)
    assert parts is not None
    program = lower(parts.rest, Options(cuda_arch=80))
    verify_program(program)
    assert program.device == "cuda:0" and {b.device for b in program.buffers.values()} == {"cuda"}
    assert len([n for n in parts.part.graph.nodes if n.op == "call_function"]) < len(list(fg.graph.nodes)) - 4

    on_the_processor(parts.part.graph), on_the_processor(parts.rest.graph)
    here = dataclasses.replace(parts, device="cpu")
    for n in (4, 6) if dynamic else (4,):
        given = torch.randn(n, n), torch.randn(n, n), torch.randint(0, n, (n,)), torch.ones(())
        mine = [t.clone() for t in given]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "to", lambda t, *a, **k: t)  # torch without CUDA cannot run it
            wanted = fn(*given)
            values, crossing = here.begin(mine)
        found = here.end(mine, values, eager_callable(here.rest)(*mine, *crossing))
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(mine, list(given))
        assert [r is mine[0] for r in found] == [r is given[0] for r in wanted]


@pytest.mark.parametrize("rows", [
    torch.tensor([3, 9, 0, 9, 2, 9])[::2], torch.tensor([[3, 0], [9, 9], [2, 1]])[::2].T, torch.tensor([2, 3]).expand(3, 2),
    torch.tensor([True, True, False, True, False, False, True, True])[::2],
], ids=["gaps", "turned, gaps", "expanded", "mask"])  # fmt: skip
def test_what_the_host_gives_lies_on_the_device_as_the_graph_reads_it(rows):
    """torch's copy to a device keeps strides where no memory lies between the elements, and only there."""
    fg = graph_of(lambda w, rows: torch.index_put(w, (rows,), w.new_zeros(())), placed(4, 4), rows)
    parts = take_out(fg)
    assert parts is not None and parts.moved == (True,)
    _, (there,) = dataclasses.replace(parts, device="cpu").begin((torch.ones(4, 4), rows))
    assert torch.equal(there, rows)
    (spec,) = (s for s in parts.rest.inputs[1:] if s is not None)
    assert there.to(torch.device("cpu"), copy=True).stride() == tuple(number_of(s, {}) for s in spec.strides)


@pytest.mark.parametrize("fn", [
    lambda x, w: x + w,  # eager refuses it
    lambda x, w: (x.mul_(2), w + 1)[1],
    lambda x, w: (w.cpu() + x, w + 1),
    lambda x, w: w.sum() + torch.ones(x.sum().long().item()).to("cuda:0"),
], ids=["mixed", "written", "back", "told"])  # fmt: skip
def test_what_is_no_part_before_stays_whole(fn):
    try:
        fg = graph_of(fn, torch.ones(4), placed(4), reads=True)
    except (RuntimeError, Unsupported):
        return
    assert take_out(fg) is None
