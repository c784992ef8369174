"""Python programs that must capture in one graph and give eager's result, and whose side effects happen once."""

from __future__ import annotations

import collections
import copy
import functools

import pytest
import torch
from capture_programs import PROGRAMS
from capturing import Run, same

import torchsmith
from torchsmith.events import recording


@pytest.mark.parametrize(("fn", "args", "kwargs"), PROGRAMS)
def test_program(fn, args, kwargs):
    want_args, want_kwargs = copy.deepcopy((args, kwargs))
    got_args, got_kwargs = copy.deepcopy((args, kwargs))
    want = fn(*want_args, **want_kwargs)
    run = Run(fn, *got_args, **got_kwargs)
    same(run(*got_args, **got_kwargs), want)
    same(got_args, want_args, "arguments")
    same(got_kwargs, want_kwargs, "keywords")


class Noted:
    """An object from outside."""


NOTED = Noted()


def test_an_attribute_that_is_made_and_deleted():
    def fn(x):
        NOTED.once = 5
        NOTED.kept = x * NOTED.once
        del NOTED.once
        return NOTED.kept, hasattr(NOTED, "once")

    x = torch.ones(2)
    run = Run(fn, x)
    for _ in range(2):
        kept, found = run(x)
        assert torch.equal(kept, x * 5) and not found and vars(NOTED).keys() == {"kept"} and NOTED.kept is kept


def counted(x):
    counted.calls = getattr(counted, "calls", 0) + 1
    return x * counted.calls


def test_attributes_of_functions_are_read_anew():
    x = torch.ones(2)
    compiled = torchsmith.compile(counted, backend="eager")
    assert [compiled(x)[0].item() for _ in range(4)] == [1, 2, 3, 4]


NUMBERS: list[int] = []


@functools.lru_cache(None)
def doubled(n):
    NUMBERS.append(n)
    return 2 * n


def test_a_cached_function_with_effects_runs_once():
    compiled = torchsmith.compile(lambda x: x * doubled(3) + doubled(4), backend="eager")
    NUMBERS.clear()
    doubled.cache_clear()
    x = torch.ones(2)
    assert [compiled(x)[0].item() for _ in range(3)] == [14, 14, 14] and NUMBERS == [3, 4]


def misfit(a, /, b, c=0, *, d, e=1):
    return a


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1,), {"d": 1}), ((1, 2), {}), ((1, 2, 3, 4), {"d": 1}), ((), {"a": 1, "b": 2, "d": 3}), ((1, 2), {"b": 3, "d": 1}),
     ((1, 2), {"d": 1, "f": 2})],
)  # fmt: skip
def test_arguments_that_do_not_fit(args, kwargs):
    def fn(x):
        try:
            return misfit(*args, **kwargs)
        except TypeError as e:
            return x + 1, str(e)

    x = torch.ones(2)
    same(Run(fn, x)(x), fn(x))


def test_a_torch_function_of_numbers_raises_into_the_program():
    def fn(x, y):
        try:
            return x.expand(torch.broadcast_shapes(x.shape, y.shape)) + y
        except RuntimeError as e:
            return x.sum() + y.sum(), str(e)

    for x, y in ((torch.ones(3), torch.ones(2, 3)), (torch.ones(3), torch.ones(2))):
        same(Run(fn, x, y)(x, y), fn(x, y))


def test_what_a_torch_function_asks_of_values_is_checked():
    def fn(x, y, var):
        return torch.nn.functional.gaussian_nll_loss(x, y, var)

    compiled = torchsmith.compile(fn, fullgraph=True)
    x, y, var = torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, y, var), fn(x, y, var))
        with pytest.raises(ValueError, match="negative"):
            compiled(x, y, -var)


@pytest.mark.parametrize("norm", [False, True])
def test_padding_of_a_transformer_encoder(norm):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    last = torch.nn.LayerNorm(8) if norm else None
    if last is not None:
        torch.nn.init.normal_(last.bias)
    net = torch.nn.TransformerEncoder(layer, 2, last).eval()
    compiled = torchsmith.compile(net)
    x = torch.randn(2, 4, 8)
    for padding in ([[0, 0, 1, 1], [0, 0, 0, 0]], [[0, 1, 0, 1], [0, 0, 0, 0]]):  # at the end; in between, where eager computes it
        mask = torch.tensor(padding, dtype=torch.bool)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, src_key_padding_mask=mask), net(x, src_key_padding_mask=mask), rtol=1e-4, atol=1e-5)


def test_versions_and_tables_of_characters():
    def fn(x):
        new = torch.__version__ > "1.9", torch.__version__ < "1.9", tuple(int(v) for v in torch.__version__.split(".")[:2]) >= (2, 0)
        return x + 1, new, "wave".translate(str.maketrans("a", "o"))

    x = torch.ones(2)
    same(Run(fn, x)(x), fn(x))


def test_divmod_of_tensors_is_refused_as_eager_does():
    def fn(x):
        try:
            return divmod(x, 2)
        except TypeError as e:
            return x, str(e)

    x = torch.ones(2)
    same(Run(fn, x)(x), fn(x))


TEXTS = [
    lambda x, n: f"{x.shape}", lambda x, n: f"{tuple(x.shape)!s:>10}", lambda x, n: f"{x.shape} {[n]!r}",
    lambda x, n: str(n).zfill(3),
    lambda x, n: "x".join(map(str, x.shape)), lambda x, n: f"{n * 2 + 1}|{min(n, 3)}|{float(n)}|{n > 5}",
    lambda x, n: repr({"k": (n, x.size())}),
    lambda x, n: ValueError("a", n).args, lambda x, n: repr(KeyError((n,))), lambda x, n: (type(n) is int, n.__class__, isinstance(n, int)),
]  # fmt: skip


@pytest.mark.parametrize("k", range(len(TEXTS)))
def test_text_of_sizes_that_vary(k):
    compiled = torchsmith.compile(lambda x: (x + 1, TEXTS[k](x, x.shape[0])), backend="eager")
    for n in (2, 5, 7, 9):
        x = torch.ones(n, 3)
        assert compiled(x)[1] == TEXTS[k](x, n)


def test_a_container_that_is_extended_by_itself():
    def fn(x, outside):
        inside, ends = [1, 2], collections.deque([1])
        outside.extend(outside)
        inside.extend(inside)
        inside += inside
        ends.extend(ends)
        return x + 1, inside, list(ends)

    got, want = [1, 2], [1, 2]
    x = torch.ones(2)
    same(torchsmith.compile(fn, backend="eager")(x, got), fn(x, want))
    assert got == want == [1, 2, 1, 2]


CONSUMED = """a[1:] = b; a[:] = b; a[0:0] = b; a[::2] = b[:1]; a.__setitem__(slice(1), b); a += b; a *= len(b); a.extend(b); a = a + b
a = [*a, *b]; a = list(zip(a, b)); a = sorted(b); a = sum(b); a = max(b); a = b[0] in a; a = a == b; a = b.index(b[1]); a = set(b)
a = dict.fromkeys(b); a = str(b); a = b * 2; x, *a = b; a = (lambda *q: q)(*b); a = divmod(*b[:2]); a = list(map(str, b)); a = {*b}
a = bytes(b); a = b[::-1]; a = '%s' % b; a = [v for v in b if v > 3]; a = next(iter(b)); a = torch.tensor(b)
a = slice(*b); a = range(*b)"""


@pytest.mark.parametrize("statement", CONSUMED.replace("\n", "; ").split("; "))
def test_what_a_list_from_outside_holds_is_looked_at(statement):
    """A container that goes into another one may hold something else in the next call."""
    space = {"torch": torch}
    exec(f"def f(a, b):\n  {statement}\n  return a", space)
    compiled = torchsmith.compile(space["f"], backend="eager")
    for b in ([3, 4], [5, 6], [7, 8], [3, 9, 2]):
        ours, twin = [1, 2], [1, 2]
        got, want = compiled(ours, list(b)), space["f"](twin, list(b))
        assert (type(got), str(got), ours) == (type(want), str(want), twin)


class Tail(BaseException):
    """No Exception: packages of generators pass calls along so."""

    def __init__(self, value):
        self.value = value

    def __str__(self):
        raise AssertionError("a text that the program did not ask for")


def down(x, n):
    if n % 2:
        raise Tail(down(x.sin(), n - 1))
    if n:
        try:
            y = yield down(x.cos(), n - 1)
        except Tail as t:
            y = t.value * 2
        if n == 4:
            raise Tail(y)
        return y + 1
    return x


def bounced(x):
    stack, result, thrown = [down(x, 6)], None, None
    while stack:
        try:
            if thrown is not None:
                stack.append(stack[-1].throw(thrown))
            else:
                stack.append(next(stack[-1]) if result is None else stack[-1].send(result))
            result = thrown = None
        except StopIteration as end:
            stack.pop()
            result, thrown = end.value, None
        except Tail as t:
            if isinstance(t.value, torch.Tensor):
                stack.pop()
                result, thrown = None, t
            else:
                stack[-1], result, thrown = t.value, None, None
    return result


def test_exceptions_that_are_no_exception_go_through_generators():
    x = torch.randn(3)
    same(Run(bounced, x)(x), bounced(x))

    def thrown_before_it_begins(x):
        for what in (Tail(x + 1), KeyboardInterrupt):
            try:
                down(x, 2).throw(what)
            except (Tail, KeyboardInterrupt) as e:
                x = x * 2 + getattr(e, "value", 5)
        return x

    same(Run(thrown_before_it_begins, x)(x), thrown_before_it_begins(x))


def test_an_exception_that_leaves_and_holds_a_tensor_is_not_made_a_text():
    def fn(x):
        raise Tail(x + 1)

    with recording() as seen, pytest.raises(Tail) as got:
        torchsmith.compile(fn, backend="eager")(torch.ones(2))
    assert torch.equal(got.value.value, torch.full((2,), 2.0))
    assert "API005" not in [e.fields.get("code") for e in seen if e.kind == "fallback"]
