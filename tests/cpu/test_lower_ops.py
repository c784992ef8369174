"""Lowered operators, run by the reference interpreter, equal eager: rows of operator x dtype x shape x strides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lower_harness import check, interpret, program_of

from torchsmith.codes import Unsupported
from torchsmith.ir.expr import Op, walk
from torchsmith.ir.interpret import CheckFailed
from torchsmith.ir.program import Extern, Stage
from torchsmith.schedule.deps import depth

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def make(shape, dtype=torch.float32, low=-3.0, high=3.0, layout="rows"):
    """A tensor with interesting strides."""
    torch.manual_seed(0)
    if layout == "strided":
        wide = make((*shape[:-1], shape[-1] * 2), dtype, low, high)
        return wide[..., ::2]
    if layout == "transposed":
        return make(tuple(reversed(shape)), dtype, low, high).permute(*reversed(range(len(shape))))
    if layout == "expanded":
        return make((1, *shape[1:]), dtype, low, high).expand(shape)
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    if dtype.is_floating_point:
        return (torch.rand(shape, dtype=torch.float64) * (high - low) + low).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else int(low * 4), int(high * 4), shape, dtype=dtype)


TOLERANCE = {torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3}, torch.float16: {"rtol": 1e-3, "atol": 1e-4}}

UNARY = [
    torch.sin,
    torch.exp,
    torch.tanh,
    torch.sigmoid,
    torch.erf,
    torch.abs,
    torch.neg,
    torch.relu,
    torch.floor,
    torch.ceil,
    torch.round,
    torch.trunc,
    torch.frac,
    torch.sign,
    torch.square,
    torch.reciprocal,
    torch.isnan,
    torch.isfinite,
    torch.logical_not,
    torch.signbit,
    torch.nan_to_num,
    torch.sinc,
    torch.expm1,
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.silu,
    F.mish,
    F.softplus,
    F.elu,
    F.celu,
    F.selu,
    F.hardtanh,
    F.hardswish,
    F.hardsigmoid,
    F.relu6,
    F.leaky_relu,
    F.logsigmoid,
    F.hardshrink,
    F.softshrink,
    F.tanhshrink,
    F.glu,
    lambda x: F.threshold(x, 0.5, -1.0),
    lambda x: x.clamp(-1, 1),
    lambda x: x.clamp(min=0.3),
    lambda x: x**2,
    lambda x: x**3,
    lambda x: x**-1,
    lambda x: x**0,
    lambda x: x + 0.1,
    lambda x: 2 - x,
    lambda x: x * 0.3,
    lambda x: x / 3,
    lambda x: x % 0.7,
    lambda x: x > 0.1,
    lambda x: x == 0,
    lambda x: x.to(torch.float32),
    lambda x: x.to(torch.int64),
    lambda x: x.to(torch.bool),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("number", range(len(UNARY)))
def test_unary(number, dtype):
    check(UNARY[number], make((3, 4), dtype), **TOLERANCE.get(dtype, {}))


INT_UNARY = [
    torch.sin,
    torch.abs,
    torch.neg,
    torch.sign,
    torch.square,
    torch.relu,
    torch.bitwise_not,
    torch.logical_not,
    torch.isnan,
    lambda x: x + 3,
    lambda x: x * 2.5,
    lambda x: x / 2,
    lambda x: x // 3,
    lambda x: x % 3,
    lambda x: torch.fmod(x, 3),
    lambda x: x**2,
    lambda x: x.clamp(1, 5),
    lambda x: x << 2,
    lambda x: x >> 1,
    lambda x: x & 3,
    lambda x: x | 1,
    lambda x: x ^ 5,
    lambda x: x > 2,
    lambda x: x.float(),
    lambda x: x.to(torch.int8),
    lambda x: x.to(torch.bool),
    lambda x: torch.div(x, 3, rounding_mode="trunc"),
]


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("number", range(len(INT_UNARY)))
def test_int_unary(number, dtype):
    check(INT_UNARY[number], make((3, 4), dtype))


BINARY = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.maximum,
    torch.minimum,
    torch.fmod,
    torch.remainder,
    torch.eq,
    torch.lt,
    torch.ge,
    torch.logical_and,
    torch.logical_xor,
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.add(x, y, alpha=2),
    lambda x, y: torch.div(x, y, rounding_mode="floor"),
    lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    torch.fmax,
    torch.fmin,
]
FLOAT_BINARY = [
    torch.atan2,
    torch.hypot,
    torch.copysign,
    torch.logaddexp,
    torch.xlogy,
    torch.lerp,
    torch.heaviside,
    torch.nextafter,
    torch.logaddexp2,
]
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.int64, torch.float32),
    (torch.int32, torch.int64),
    (torch.uint8, torch.int8),
    (torch.bool, torch.int32),
    (torch.int16, torch.bfloat16),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("number", range(len(BINARY)))
def test_binary(number, pair):
    x, y = make((3, 4), pair[0]), make((4,), pair[1], 1.0, 4.0)
    if BINARY[number] in (torch.sub, torch.fmax, torch.fmin) and torch.bool in pair:
        pytest.skip("eager refuses bool")
    check(BINARY[number], x, y, **TOLERANCE.get(torch.promote_types(*pair), {}))


@pytest.mark.parametrize("number", range(len(FLOAT_BINARY)))
def test_float_binary(number):
    fn = FLOAT_BINARY[number]
    x, y = make((3, 4)), make((3, 4), low=0.1, high=2.0)
    check(fn, x, y, y) if fn is torch.lerp else check(fn, x, y)


def test_zero_dim_operands_do_not_promote():
    check(lambda x, y: (x + y, y * x, x > y), make((3,), torch.bfloat16), torch.tensor(0.1, dtype=torch.float64))
    check(lambda x, y: x + y, make((3,), torch.int32), torch.tensor(3))
    check(lambda x, y: x + y, make((), torch.int32), torch.tensor(3.5))


REDUCTIONS = [
    lambda x: x.sum(),
    lambda x: x.sum(0),
    lambda x: x.sum((0, 2), keepdim=True),
    lambda x: x.mean(),
    lambda x: x.mean(-1),
    lambda x: x.prod(1),
    lambda x: x.amax(1),
    lambda x: x.amin((0, 1)),
    lambda x: x.max(),
    lambda x: x.max(1),
    lambda x: x.min(0, keepdim=True),
    lambda x: x.argmax(),
    lambda x: x.argmin(1),
    lambda x: x.argmax(2, keepdim=True),
    lambda x: x.any(),
    lambda x: x.all(1),
    lambda x: x.var(1),
    lambda x: x.std(),
    lambda x: torch.var_mean(x, (0, 2)),
    lambda x: torch.std_mean(x, 1, correction=0),
    lambda x: x.softmax(-1),
    lambda x: x.log_softmax(0),
    lambda x: x.logsumexp((0, 1)),
    lambda x: x.norm(),
    lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    lambda x: torch.linalg.vector_norm(x, 1),
    lambda x: torch.linalg.vector_norm(x, float("inf"), dim=0),
    lambda x: torch.count_nonzero(x, 1),
    lambda x: torch.nansum(x, 1),
    lambda x: torch.aminmax(x, dim=1),
    lambda x: F.layer_norm(x, (5,)),
    lambda x: F.layer_norm(x, (4, 5)),
    lambda x: F.softmin(x, 1),
    lambda x: F.group_norm(x, 2),
    lambda x: F.normalize(x, dim=1),
]


@pytest.mark.parametrize("layout", ["rows", "strided", "transposed", "expanded"])
@pytest.mark.parametrize("number", range(len(REDUCTIONS)))
def test_reduction(number, layout):
    if number == 33 and layout == "transposed":
        pytest.skip("eager's group_norm makes a view of a copy")
    check(REDUCTIONS[number], make((3, 4, 5), layout=layout))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("number", range(len(REDUCTIONS)))
def test_reduction_dtype(number, dtype):
    check(REDUCTIONS[number], make((3, 4, 5), dtype), **({"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim, dtype):
    shape = [5 if k == dim else 1 for k in range(3)]
    check(lambda v, g: torch._weight_norm(v, g, dim), make((5, 4, 5), dtype), make(shape, dtype, 0.5, 2.0), **TOLERANCE.get(dtype, {}))


def test_integer_reductions():
    x = make((3, 4), torch.int32)
    check(lambda x: (x.sum(), x.sum(1), x.prod(1), x.amax(1), x.argmax(), x.max(0), x.any(1)), x)
    check(lambda x: (x.sum(), x.sum(1), x.amax(1), x.all(), x.max(1)), make((3, 4), torch.bool))


def test_nan_and_ties():
    x = torch.tensor([[1.0, float("nan"), 3.0], [2.0, 2.0, 2.0], [-float("inf")] * 3])
    check(lambda x: (x.argmax(1), x.argmin(1), x.max(1), x.min(1), x.amax(1), x.argmax(), x.clamp(0, 1), x.relu()), x)
    check(lambda x: (x.logsumexp(1), x.softmax(1), x.nansum(1), torch.maximum(x, x.flip(1)), torch.fmax(x, x.flip(1))), x)


def test_empty_and_zero_dim():
    check(lambda x: (x.sum(), x.sum(1), x.prod(0), x.any(), x + 1, x.softmax(1)), torch.empty(3, 0))
    check(
        lambda x: (x.sum(), x.sum(0), x.max(), x.argmax(), x + 1, x.softmax(0), x.var(correction=0), x.unsqueeze(0).expand(3)[1:] + 0),
        torch.tensor(2.0),
    )


VIEWS = [
    lambda x: x.view(12, 5) + 0,
    lambda x: x.view(3, 2, 2, 5) + 0,
    lambda x: x.permute(2, 0, 1).reshape(5, 12) + 0,
    lambda x: x.transpose(0, 2) + 0,
    lambda x: x[1:, ::2, -1] + 0,
    lambda x: x.select(1, -2) + 0,
    lambda x: x.unsqueeze(1).expand(3, 2, 4, 5) + 0,
    lambda x: x.flip(0, 2) + 0,
    lambda x: x.roll(2, 1) + 0,
    lambda x: x.roll(7) + 0,
    lambda x: x.repeat(2, 1, 3) + 0,
    lambda x: torch.diagonal(x, 1, 1, 2) + 0,
    lambda x: x.unfold(2, 3, 1) + 0,
    lambda x: [p + 0 for p in x.split(3, 2)],
    lambda x: [p + 0 for p in x.chunk(2, 1)],
    lambda x: x.unbind(1)[2] + 0,
    lambda x: x.squeeze().unsqueeze(-1) + 0,
    torch.tril,
    lambda x: torch.triu(x, 1),
    lambda x: x.permute(1, 2, 0).contiguous(),
    lambda x: x.movedim(0, 2) + 0,
    lambda x: x.as_strided((2, 3), (7, 2), 4) + 0,
    lambda x: x.reshape(-1)[3:9].view(2, 3) + 0,
    lambda x: x.permute(2, 1, 0).reshape(20, 3).view(4, 5, 3).transpose(1, 2) + 0,
    lambda x: x.repeat_interleave(2, 1) + 0,
    lambda x: torch.cat([x, x[:, :1], x * 2], 1),
    lambda x: torch.stack([x, x + 1], 2),
    lambda x: torch.cat([x.to(torch.float64), x]),
    lambda x: torch.stack([x[k % 3] * k for k in range(20)], 1),
    lambda x: torch.cat([x[:, : 1 + k % 4].to((torch.float32, torch.float64)[k % 2]) for k in range(18)], 1).cumsum(1),
    lambda x: torch.slice_scatter(x, x[:, 1:3] * 2, 1, 0, 2),
    lambda x: torch.select_scatter(x, x[0] + 1, 0, 2),
    lambda x: torch.diagonal_scatter(x, torch.diagonal(x, -1, 0, 1) + 1, -1, 0, 1),
    lambda x: x.masked_fill(x > 0, -9.0),
    lambda x: torch.slice_scatter(x, x[:, 1:3] * 2, 1, 0, 4, 2),
]


@pytest.mark.parametrize("number", range(len(VIEWS)))
def test_view(number):
    check(VIEWS[number], make((3, 4, 5)))


@pytest.mark.parametrize("dynamic", [(), (0,)])
@pytest.mark.parametrize("dim", [0, 1])
def test_many_parts_are_flat_expressions(dim, dynamic):
    """Joining what a loop made: no element chooses among all parts, and no pass walks an expression as deep as they are many."""

    def many(x):
        return torch.cat([x * k for k in range(300)], dim)

    program, _ = program_of(many, (make((3, 5)),), dynamic)
    joins = [s for s in program.body if isinstance(s, Stage) and "cat" in s.origin]
    assert max(depth(t.value) for s in joins for t in s.stores) < 50
    if not dynamic:
        assert not any(isinstance(e, Op) and e.name == "where" for s in joins for t in s.stores for e in walk(t.value))
    check(lambda x: torch.cat([x * k for k in range(21)], dim), make((3, 5)), dynamic=bool(dynamic))


CREATION = [
    lambda x: torch.full((2, 3), 1.5),
    lambda x: torch.zeros(3) + x[0, :3],
    lambda x: torch.arange(5),
    lambda x: torch.arange(1, 8, 2),
    lambda x: torch.arange(0.0, 1.0, 0.1),
    lambda x: torch.eye(3, 4),
    lambda x: torch.linspace(0, 1, 7),
    torch.ones_like,
    lambda x: torch.full_like(x, 2, dtype=torch.int64),
    lambda x: x.new_zeros(2),
    lambda x: torch.scalar_tensor(2.0),
]


@pytest.mark.parametrize("number", range(len(CREATION)))
def test_creation(number):
    check(CREATION[number], make((3, 4)))


POOLS = [
    lambda x: F.max_pool2d(x, 3, 2, 1),
    lambda x: F.max_pool2d(x, 2, return_indices=True),
    lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True, return_indices=True),
    lambda x: F.max_pool2d(x, 2, 1, 1, 2),
    lambda x: F.avg_pool2d(x, 3, 2, 1),
    lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
    lambda x: F.adaptive_avg_pool2d(x, 1),
    lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    lambda x: F.adaptive_avg_pool2d(x, 2),
    lambda x: F.adaptive_avg_pool2d(x, x.shape[2:]),
    lambda x: F.avg_pool2d(x, 2, divisor_override=3),
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("number", range(len(POOLS)))
def test_pool(number, channels_last):
    x = make((2, 3, 8, 7))
    check(POOLS[number], x.contiguous(memory_format=torch.channels_last) if channels_last else x)


def test_batch_norm():
    x, w, b, m, v = make((4, 3, 5, 5)), make((3,)), make((3,)), make((3,)), make((3,), low=0.5)
    check(lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), x, w, b, m, v)
    check(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), x, w, b)
    check(
        lambda x, w, b, m, v: torch.ops.aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.1, 1e-5),
        x,
        w,
        b,
        m,
        v,
        rtol=1e-5,
        atol=1e-6,
    )


def test_layer_and_group_norm_affine():
    x, w, b = make((2, 6, 10)), make((10,)), make((10,))
    check(lambda x, w, b: F.layer_norm(x, (10,), w, b), x, w, b)
    check(lambda x, w, b: F.group_norm(x, 3, w[:6], b[:6]), x, w, b)


LOSSES = [
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    lambda x, y: F.mse_loss(x, y, reduction="none"),
    lambda x, y: F.mse_loss(x, y, reduction="sum"),
    lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    F.soft_margin_loss,
]


@pytest.mark.parametrize("number", range(len(LOSSES)))
def test_loss(number):
    check(LOSSES[number], make((3, 4)), make((3, 4)).flip(0) * 0.7)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy(reduction):
    x, y, w = make((6, 5)), torch.tensor([0, 4, -100, 2, 2, 1]), make((5,), low=0.1)
    check(lambda x, y, w: (F.cross_entropy(x, y, reduction=reduction), F.cross_entropy(x, y, w, reduction=reduction)), x, y, w)
    check(lambda x, y: F.cross_entropy(x, y, reduction=reduction), make((2, 5, 3)), torch.tensor([[0, 1, 4], [3, -100, 2]]))


def test_embedding_and_gathers():
    w, i = make((10, 4)), torch.tensor([[1, 9, 0], [3, 3, 5]])
    check(lambda w, i: (F.embedding(i, w), w.index_select(0, i[0]), w.gather(0, i % 4)), w, i)


def test_index_out_of_range_is_reported():
    w = make((4, 3))
    with pytest.raises(CheckFailed, match="index out of range"):
        interpret(lambda w, i: F.embedding(i, w), (w, torch.tensor([1, 4])))


def test_integer_division_by_zero_is_reported():
    with pytest.raises(CheckFailed, match="ZeroDivisionError"):
        interpret(lambda x, y: x // y, (torch.tensor([4, 5]), torch.tensor([1, 0])))


def test_extern_takes_views_without_copying():
    p = check(lambda x: torch.sort(x.t(), 0)[1] + 1, make((3, 4)), native=False)
    kinds = [type(e).__name__ for e in p.body]
    assert kinds == ["Extern", "Stage"], kinds


def test_extern_chain_matches_eager():
    check(lambda x: torch.sort(x * 2, 1)[1] + torch.cumsum(x, 0), make((3, 4)), native=False)
    check(lambda x: torch.conv2d(x, x[:2, :, :3, :3]).relu().mean((2, 3)), make((4, 3, 8, 8)), native=False)


def test_results_do_not_share_storage():
    p = check(lambda x: (x.clone(), x.view(12) + 0, x.clone()), make((3, 4)))
    names = [r.buf for r in p.results]
    assert len(set(names)) == 3 and not any(isinstance(e, Extern) for e in p.body)


@pytest.mark.parametrize("shape", [(100_000,), (3, 40_001), (20_011, 3)])
def test_long_sums_are_as_accurate_as_eager(shape):
    x = make(shape, low=0.0, high=1.0)
    for got, eager, exact in zip(
        interpret(lambda x: (x.sum(0), x.mean(), x.var()), (x,)),
        (x.sum(0), x.mean(), x.var()),
        (x.double().sum(0), x.double().mean(), x.double().var()),
        strict=True,
    ):
        mine, theirs = (torch.as_tensor(got).double() - exact).abs().max(), (eager.double() - exact).abs().max()
        assert mine <= 2 * theirs + 1e-7 * exact.abs().max()


MORE = [
    lambda x: x.rot90(1, (0, 2)),
    lambda x: x.rot90(3, (1, 2)),
    lambda x: torch.linalg.cross(x[:, :3], x[:, 1:], dim=1),
    lambda x: torch.diag_embed(x, 1, 0, 2),
    lambda x: torch.block_diag(x[0], x[1, :, :2]),
    lambda x: torch.as_strided_scatter(x, x[0, :2, :3] * 2, (2, 3), (13, 2), 3),
    lambda x: torch.dist(x, x * 2, 2),
    lambda x: x[0].mv(x[1, 0]),
    lambda x: x[0, 0].dot(x[1, 1]),
    lambda x: torch.addmv(x[0, :, 0], x[0], x[1, 0], beta=0.5, alpha=2),
    lambda x: torch.addr(x[0], x[0, :, 0], x[0, 0], beta=0, alpha=2),
    lambda x: x[0].trace(),
    torch.angle,
    lambda x: torch.renorm(x, 2, 1, 2.0),
    lambda x: F.pixel_shuffle(
        x.permute(1, 2, 0)[:, :, None, :].transpose(0, 1)[:, :, 0].repeat(1, 4, 1)[:, :, None, :].permute(0, 1, 2, 3), 2
    ),
    lambda x: F.channel_shuffle(x, 2),
    lambda x: torch.ops.aten._safe_softmax(x.masked_fill(x < 5, -float("inf")), 2),
]


@pytest.mark.parametrize("number", range(len(MORE)))
def test_more(number):
    check(MORE[number], make((3, 4, 5)))


DYNAMIC = [*REDUCTIONS, *VIEWS, *MORE, *(f for f in UNARY if f is not F.glu)]


@pytest.mark.parametrize("number", range(len(DYNAMIC)))
def test_symbolic_sizes(number):
    if number == len(REDUCTIONS) + 2:
        pytest.skip("the shape rule of reshape refuses this copy")  # TODO(graph): it should copy
    """Sizes as symbols; where the program compares them with numbers they specialise."""
    try:
        check(DYNAMIC[number], make((3, 4, 5)), dynamic=True)
    except Unsupported as why:
        if why.code != "GRA005":
            raise
        pytest.skip(why.detail)


@pytest.mark.parametrize("shape", [(3, 1, 256), (768, 1), (3, 1, 16, 16), (1, 768, 1, 1)])
def test_dimensions_of_size_1_change_no_sum(shape: tuple[int, ...]) -> None:
    """They are no loops: the sum runs over lanes, in the same order as without them, and is as exact."""
    import torchsmith

    x = torch.randn(768, generator=torch.Generator().manual_seed(1))
    for fn in (lambda t: (t * t).sum(), torch.var, lambda t: t.amax(), lambda t: t.argmin()):
        compiled = torchsmith.compile(fn)
        assert torch.equal(compiled(x.view(shape)), compiled(x))


def test_variance_of_no_values() -> None:
    """It is NaN, also where the correction would leave something to divide by."""
    x = torch.empty(0, 3)
    check(lambda t: [*torch.var_mean(t, 0, correction=-1), *torch.std_mean(t), torch.var(t, correction=-2.5)], x)
