"""NumPy in compiled functions, three ways: NumPy itself, the captured graph, generated code. Types, dtypes, shapes, values and errors."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import torchsmith
from torchsmith import Unsupported

DTYPES = ("bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64")
rng = np.random.default_rng(0)


def array(dtype: str, *shape: int) -> Any:
    """Small numbers; among floats of all signs NaN, infinities and both zeros."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0 if dtype == "uint8" else -5, 6, shape).astype(dtype)
    out = (rng.random(shape) * 4 - 2).astype(dtype)
    flat = out.reshape(-1)
    if flat.size > 8:
        flat[:5] = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    return out


UFUNCS = sorted({f for f in vars(np).values() if isinstance(f, np.ufunc) and f.nout == 1}, key=lambda f: f.__name__)
# a, b: 3 x 4; v: 4 numbers; i: integers; s: one of NumPy's scalars
EXPRESSIONS = """
a + b; a - 1; 2 * a; a / b; a // 2; a % 3; a ** 2; -a; a < b; a == 1; a != b; a >= 0.5; a @ b.T; a + 1.5; a * np.float32(2)
a + np.int8(1); a * s; 1 - s; s + s
np.sum(a); a.sum(axis=0); a.sum(axis=(0, 1)); a.sum(axis=-1, keepdims=True); np.sum(a, dtype=np.float64); np.prod(b, axis=1); np.mean(a)
a.mean(axis=1); np.var(b); b.std(axis=0, ddof=1)
a.max(); np.min(a, axis=1); a.argmax(); np.argmin(a, axis=0); np.all(a); a.any(axis=0); np.cumsum(b); b.cumsum(axis=1)
np.cumprod(b, axis=0); np.ptp(b); np.nansum(a); np.average(b, axis=1)
np.median(b); np.median(b, axis=0); np.diff(b); np.trace(b); np.count_nonzero(a, axis=0); np.average(b, weights=b)
a.reshape(2, 6); a.reshape(-1); np.reshape(a, (4, 3)); a.ravel(); a.T; a.T.ravel(); a.flatten(); np.transpose(a); a.transpose(1, 0)
a.swapaxes(0, 1); np.moveaxis(a, 0, 1); a[None].squeeze(); np.expand_dims(a, 1)
np.atleast_2d(v); np.diag(v); np.diag(a); np.tril(a); np.triu(a, 1); np.roll(a, 1); np.roll(a, 2, axis=1); np.tile(v, 2)
np.repeat(v, 2); a.repeat(2, axis=0); np.take(v, i); a.take(i, axis=1); np.flip(a)
np.concatenate([a, b]); np.concatenate((a, b), axis=1); np.stack([a, b]); np.vstack([a, v]); np.hstack([v, v]); np.column_stack([v, v])
np.split(a, 2, axis=1); np.array_split(a, 2); np.meshgrid(v, v)
np.array([s, s]); np.array([1, 2, 3]) + v[0]; np.zeros(3) + v[:3]; np.ones((3, 4), dtype=np.float32) * a; np.full((3, 4), 2) + a
np.arange(4) * v; np.eye(4) @ v; np.zeros_like(a); np.ones_like(a, dtype=np.int8); np.full_like(a, 1)
np.where(a > 0, a, b); np.where(a > 0, a, 0); np.where(a > 0, 1.5, b); np.clip(a, 0, 1); a.clip(0, 1); np.clip(a, 0, None); np.sort(v)
np.sort(a, axis=0); np.argsort(v, kind="stable"); np.round(a); np.round(a, 1); np.nan_to_num(a); np.isclose(a, b)
np.searchsorted(np.sort(v), b); np.linspace(0, 1, 4) * v; np.asarray(a); np.array(a); a.copy(); a.astype(np.float32); a.astype("int64")
np.asarray(a, dtype=np.float64); np.float32(s); np.int64(i[0]); a.astype(np.float16)
np.dot(a, v); a.dot(b.T); np.inner(v, v); np.outer(v, v); np.vdot(v, v); np.tensordot(a, b, axes=([1], [1]))
np.einsum("ij,kj->ik", a, b); np.kron(v, v); np.cross(a[:, :3], b[:, :3]); np.matmul(a, v)
np.fft.fft(v); np.fft.ifft(v); np.abs(np.fft.rfft(v, n=6)); np.fft.irfft(v, norm="ortho"); np.fft.fft2(v.reshape(2, 2)); np.fft.ifftn(v)
np.fft.fft(v.reshape(2, 2), axis=0); np.fft.rfft2(v.reshape(2, 2), s=(3, 2)); np.fft.fftshift(a); np.fft.ifftshift(a, axes=1)
np.linalg.norm(v); np.linalg.norm(a, axis=1); np.linalg.norm(v, ord=1); np.linalg.inv(a[:3, :3] + 5 * np.eye(3))
np.linalg.slogdet(b[:3, :3] + 9 * np.eye(3)).logabsdet; np.linalg.cholesky(4 * np.eye(3) + v[:3] * 0)
np.linalg.matrix_power(b[:3, :3], 3); np.pad(a, 1); np.pad(v, (2, 1), constant_values=1.5); np.pad(a, ((0, 2), (1, 0)), mode="edge")
np.pad(a, 2, mode="reflect"); np.pad(v, 3, "symmetric"); np.pad(v, (5, 0), mode="wrap"); np.asanyarray(a); np.array(v, ndmin=2)
np.polyval([1, 2, 3], v); np.gradient(v); np.gradient(a, axis=1); np.trapezoid(a, axis=1); np.append(a, b, axis=0); np.append(v, 1)
np.linalg.outer(v, v); np.matrix_transpose(a); np.sinc(v)
np.linalg.det(b[:3, :3] + np.eye(3)); np.linalg.solve(a[:3, :3] + 7 * np.eye(3), v[:3])
a[0]; a[0, 1]; a[:, 1]; a[..., None]; a[1:, ::2]; a[-1]; a[i[:2] % 3]; a[[0, 2]]; a[:, i]; a[[0, 1], [1, 2]]; a[0][1]; a[a > 0]; a[()]
v[0]; a[np.int64(1)]; [r for r in a]; len(a); a[i[0]]
a.shape; a.dtype; a.ndim; a.size; np.shape(a); np.ndim(v); a.itemsize; a.nbytes; isinstance(a, np.ndarray); isinstance(s, np.floating)
type(a); type(s); a.dtype == np.float32; np.result_type(a, 1.5); a.strides
[x := a.copy(), x.__setitem__(0, 3), x][2]; [x := a.copy(), x.__setitem__((slice(None), 1), v[:3]), x][2]
[x := b.copy(), x.__setitem__(a > 0, 0), x][2]; [x := a.copy(), x.fill(1), x][2]; [x := v.copy(), x.sort(), x][2]
np.add(a, b, out=np.zeros((3, 4))); np.add(a, b, dtype=np.float64); np.maximum(a, 0); np.minimum(s, v); np.logical_and(a, b > 0)
max(3, s); abs(a); np.hypot(a, 2); np.arctan2(a, b); sum([a, b]); a.real
a + [1, 2, 3, 4]; np.sqrt(a[0]) if len(a) == 3 else a; a + b[:2]; np.concatenate([a, v]); a.reshape(5, 5); a[7]; np.linalg.inv(a[:2])
a.sum(axis=5); a << 1; a & b; ~a; np.unique(i); a.nonzero(); np.isin(i, [1]); a[::-1]; np.broadcast_to(v, (2, 4))
"""  # fmt: skip
ROWS = [e.strip() for line in EXPRESSIONS.strip().split("\n") for e in line.split(";") if e.strip()]


def outcome(fn: Any, given: Any) -> Any:
    given = {k: x.copy() for k, x in given.items()}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return fn(**given)
        except Unsupported:
            raise
        except Exception as e:
            return e


ANY_ZERO = ("cumsum", "maximum", "minimum", "clip", "fmax", "fmin", "logaddexp", "generated code")  # the sign of a zero is nobody's promise


def compare(got: Any, want: Any, where: str) -> None:
    assert type(got) is type(want), f"{where}: {type(got).__name__} {got!r}, NumPy {type(want).__name__} {want!r}"
    if isinstance(want, BaseException):
        assert str(got) == str(want), where
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for g, w in zip(got, want, strict=True):
            compare(g, w, where)
    elif isinstance(want, (np.ndarray, np.generic)):
        kinds = f"{where}: {got.dtype} {got.shape}, NumPy {want.dtype} {want.shape}"
        assert got.dtype == want.dtype and got.shape == want.shape, kinds
        rough = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-12, "complex64": 1e-5, "complex128": 1e-12}.get(str(want.dtype), 0)
        np.testing.assert_allclose(got, want, rtol=rough, atol=rough, err_msg=where)
        if want.dtype.kind == "f" and not any(w in where for w in ANY_ZERO):
            zero = np.asarray(want == 0)
            assert np.array_equal(np.signbit(got)[zero], np.signbit(want)[zero]), f"{where}: sign of zero"
    else:
        assert got == want, where


def program(expressions: list[str], names: str) -> Any:
    space: dict[str, Any] = {"np": np}
    exec(f"def fn({names}):\n    return [{', '.join(expressions)}]", space)
    return space["fn"]


NAMES = "a, b, v, i, s"


def inputs(dtype: str) -> dict[str, Any]:
    one, whole = array(dtype, 1)[0], rng.integers(0, 4, 4)
    return {"a": array(dtype, 3, 4), "b": array(dtype, 3, 4)[:, ::1], "v": array(dtype, 4), "i": whole, "s": one}


NOT_EXACT = ("[::-1]", "ldexp", "spacing", "matvec", "vecdot", "vecmat", "cbrt", "bitwise_count", "lcm", "unique", "nonzero",
             "isin", "flip")  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_table(dtype: str) -> None:
    """Each expression alone, captured: NumPy's result or NumPy's exception; and few that break."""
    given, rows = inputs(dtype), list(ROWS)
    for f in UFUNCS:
        rows.append(f"np.{f.__name__}({', '.join('ab'[: f.nin])})")
        if f.nin == 2:
            rows += [f"np.{f.__name__}(a, {other})" for other in ("2", "0.5", "np.int8(2)", "s")]
    whole, broken = [], []
    for e in rows:
        fn = program([e], NAMES)
        want = outcome(fn, given)
        if isinstance(want, Exception):
            continue
        try:
            got = outcome(torchsmith.compile(fn, backend="eager", fullgraph=True), given)
        except Unsupported as why:
            assert why.code in ("CAP060", "CAP025", "CAP020"), f"{e}: {why}"
            broken.append(e)
            continue
        compare(got, want, f"{dtype}: {e}")
        whole.append(e)
    assert len(broken) <= 60 and len(whole) > 5 * len(broken), broken
    if dtype in ("float32", "float64"):
        assert all(any(w in e for w in NOT_EXACT) or "i[0]" in e for e in broken), broken
    if dtype in ("int8", "float32"):  # generated code, all in one
        fn = program([e for e in whole if "np.empty" not in e], NAMES)
        told = torchsmith.explain(torchsmith.compile(fn, fullgraph=True))(**{k: x.copy() for k, x in given.items()})
        with np.errstate(all="ignore"):
            compare(told.result, fn(**given), f"generated code, {dtype}")


def same(fn: Any, *args: Any, breaks: int = 0, **options: Any) -> None:
    """Compiled and not: results, and what becomes of the arguments; twice."""
    compiled = torchsmith.compile(fn, backend="eager", fullgraph=not breaks, **options)
    for _ in range(2):
        ours, theirs = [[copy.deepcopy(a) for a in args] for _ in "ab"]
        try:
            want = fn(*theirs)
        except Exception as e:
            want = e
        try:
            got = compiled(*ours)
        except Unsupported:
            raise
        except Exception as e:
            got = e
        assert [type(x) for x in as_arrays(got)] == [type(x) for x in as_arrays(want)]
        compare(as_arrays(got), as_arrays(want), fn.__name__)
        compare(as_arrays(ours), as_arrays(theirs), f"arguments of {fn.__name__}")


def as_arrays(value: Any) -> list[Any]:
    return [x.numpy() if isinstance(x, torch.Tensor) else x for x in (value if isinstance(value, (list, tuple)) else [value])]


A = np.arange(12.0, dtype=np.float32).reshape(3, 4)
X = torch.arange(6.0).reshape(2, 3)


def test_memory_and_identity() -> None:
    def writes(a):
        a[0] = 5
        a += 1
        return a

    def view(a):
        b = a[1:]
        b *= 2
        return a, b

    def is_itself(a):
        return a is a, np.asarray(a) is a, a[:] is a

    def over_a_tensor(x):
        y = x.numpy()
        y[0] = 3
        return x, torch.from_numpy(y) is x

    def read_only(a):
        b = np.broadcast_to(a[0], (2, 4))
        return b, b + 1

    def overlapping(a):
        a[1:] = a[:-1]
        return a

    for fn in (writes, view, is_itself, read_only, overlapping):
        same(fn, A)
    same(over_a_tensor, X)
    a = A.copy()
    b, c = torchsmith.compile(lambda a: (a, a[1:]), backend="eager")(a)
    assert b is a and np.shares_memory(c, a) and not c.flags.owndata
    assert not torchsmith.compile(lambda a: np.broadcast_to(a, (2, 3, 4)), backend="eager")(a).flags.writeable
    first, second = (torchsmith.compile(lambda: np.zeros(3), backend="eager")() for _ in range(2))
    assert not np.shares_memory(first, second)


def test_errors_are_numpys() -> None:
    def handled(a):
        try:
            return a + np.ones(7)
        except ValueError as e:
            return str(e)

    same(lambda a: np.linalg.inv(a[:2, :2] * 0), A, breaks=1)
    for fn in (lambda a: a[9], lambda a: a + np.ones(7), handled, lambda a: a.nothing, lambda a: a.reshape(5)):
        same(fn, A, breaks=1)
    same(lambda x: x.clone().requires_grad_().numpy(), X, breaks=1)
    with np.errstate(all="raise"):
        same(lambda a: 1 / a, A, breaks=1)
    compiled = torchsmith.compile(lambda a: 1 / a, backend="eager")
    assert np.isinf(compiled(A)[0, 0])
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        compiled(A)

    def quiet(a):
        with np.errstate(divide="ignore"):
            return 1 / a

    same(quiet, A)


def test_numbers_that_vary() -> None:
    """Scalars of NumPy that come out of a break, sizes and numbers: no compilation for each value."""

    def fn(a, n):
        total = a.sum()
        if total > 1e9:
            n = 1
        return a * total + n, np.zeros(a.shape[0]) + n

    compiled = torchsmith.compile(fn, backend="eager", dynamic=True)
    told = torchsmith.explain(compiled)
    for k in range(4):
        a = np.arange(4.0 + k) + k
        told(a, 3 + k)
        compare(list(compiled(a, 3 + k)), list(fn(a, 3 + k)), str(k))
    assert len(compiled.entries) <= 2


def test_between_torch_and_numpy() -> None:
    def both(x):
        a = np.tanh(x.detach().numpy())
        kinds = isinstance(a, np.ndarray), a.dtype == np.float32
        return torch.tensor(a, dtype=torch.float64), torch.as_tensor(a) * x, torch.asarray(a), *kinds

    def layer(x):
        w = np.ones((3, 3), dtype=np.float32) / 3
        return torch.from_numpy(x.numpy() @ w).relu()

    same(both, X)
    same(layer, X)
    same(lambda x: np.asarray(x) + 1, X)
    w = torch.ones(3, requires_grad=True)
    out = torchsmith.compile(lambda x, w: x * torch.from_numpy(np.sqrt(x.numpy())) * w, fullgraph=True)(X, w)
    out.sum().backward()
    torch.testing.assert_close(w.grad, (X * X.sqrt()).sum(0))


@pytest.mark.filterwarnings("ignore:Casting complex")
def test_torch_takes_numbers_of_numpy_as_in_eager() -> None:
    """As operands flags and complex64 count as floats; a tensor made of them has their dtype."""
    numbers = np.bool_(True), np.int8(2), np.float16(2), np.float64(2), np.complex64(2), np.complex128(2)

    def fn(x, n):
        made = [torch.full((2,), v) for v in numbers], [torch.where(x > 0, v, 1) for v in numbers], [x.int() * v for v in numbers]
        rows = [torch.tensor([[v, 1], [2, v]]) for v in numbers[1:4]], [torch.tensor([n, v]) for v in numbers[1:4]]
        return *made, *rows, [torch.tensor(v) for v in numbers], [torch.as_tensor(v) for v in numbers], torch.tensor(data=np.int8(3))

    compiled = torchsmith.compile(fn, backend="eager")
    for n in (2, 3, 4):
        got, want = compiled(X, n), fn(X, n)
        assert [t.dtype for t in tree_leaves(got)] == [t.dtype for t in tree_leaves(want)]
        assert all(torch.equal(g, w) for g, w in zip(tree_leaves(got), tree_leaves(want), strict=True))


def test_numbers_of_numpy_beside_numbers_that_vary():
    """Their type, and float32's rounding, tell of the value: no symbol stands for it."""
    step, count = np.float32(0.1), np.int64(3)

    def f(x, n):
        return x + float(step * n), step * n, n - step, count + n, count < n, n == count, -count // n

    compiled = torchsmith.compile(f, backend="eager")
    for n in (1, 2, 3, 4, 2.5, 3.5, 7.5):
        got, want = compiled(torch.ones(2), n), f(torch.ones(2), n)
        assert torch.equal(got[0], want[0])
        assert [(type(v), v) for v in got[1:]] == [(type(v), v) for v in want[1:]]


def test_a_scalar_that_varies_is_an_input() -> None:
    graphs = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    compiled = torchsmith.compile(lambda x, n: (x * n, x.sum() / n), backend=backend)
    for kind in (np.int64, np.float32):
        graphs.clear()
        for n in range(2, 8):
            got = compiled(torch.ones(2), kind(n))
            assert got[0].tolist() == [n, n] and got[1].item() == pytest.approx(2 / n)
        assert len(graphs) <= 2
    whole = torchsmith.compile(lambda x, n: x * 2 if n > 3 else x + 1, backend="eager", fullgraph=True)
    assert [whole(torch.ones(1), np.int64(n)).item() for n in (2, 3, 4, 5)] == [2, 2, 2, 2]
    assert [whole(torch.ones(1) * 3, np.int64(n)).item() for n in (2, 5)] == [4, 6]
