"""The functional graph, run with torch's operators, does what eager does: values, layouts, mutations, aliases."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graph_harness import check, graph_of
from torch import Tensor

import fresh
from torchsmith.codes import Unsupported
from torchsmith.graph import rules, tracing


def x(*sizes: int) -> Tensor:
    return torch.randn(*sizes)


def add_in_place(a: Tensor, b: Tensor) -> Tensor:
    a.add_(b)
    return a * 2


def write_through_view(a: Tensor) -> tuple[Tensor, Tensor]:
    v = a[1:, ::2]
    w = a.t()
    v.mul_(3)
    return w + 1, v


def write_through_deep_view(a: Tensor) -> Tensor:
    a.view(2, 2, 6).permute(2, 0, 1)[1].unsqueeze(0).squeeze(0).select(0, 1).fill_(7)
    return a.sum(0)


def fresh_with_views(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b = a + 1
    return b, b.t(), b[1]


def views_of_input(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a.t(), a[1:].unsqueeze(0), a


def swap(a: Tensor, b: Tensor) -> Tensor:
    t = a.clone()
    a.copy_(b)
    b.copy_(t)
    return t


def write_then_view(a: Tensor) -> tuple[Tensor, Tensor]:
    v = a[0]
    a.zero_()
    v.add_(2)
    return v, a.diagonal()


def both_halves(a: Tensor) -> tuple[Tensor, ...]:
    return (a * 2).chunk(2, 1)


def out_variant(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty_like(a)
    torch.add(a, b, out=out)
    torch.mul(out, 2, out=out)
    return out


def equal_results(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.sin(), a.sin()


def same_twice(a: Tensor) -> tuple[Tensor, Tensor]:
    b = a.sin()
    return b, b


def cast_in_place(a: Tensor) -> Tensor:
    b = a.to(torch.float64)
    a.add_(b)
    return a


def unbind_write(a: Tensor) -> Tensor:
    for i, row in enumerate(a.unbind(0)):
        row.add_(i)
    return a + 0


def split_write(a: Tensor) -> tuple[Tensor, Tensor]:
    p, q = a.split([1, 3], 0)
    p.copy_(q[0])
    return p, q


def index_put(a: Tensor) -> Tensor:
    a[torch.tensor([0, 2])] = 5.0
    a[:, 1] += 1
    a[a > 2] = 0
    return a


def transposed_in_place(a: Tensor) -> Tensor:
    b = a * 1
    b.t_()
    b.add_(1)
    return b


def strided_write(a: Tensor) -> Tensor:
    a.as_strided((2, 2), (1, 2)).add_(1)
    return a


def copy_of_input(a: Tensor) -> Tensor:
    b = torch.empty(6, 4)
    b.copy_(a.t())
    return b


def batch_norm(a: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(a, mean, var, training=True)


def group_and_layer_norm(a: Tensor) -> Tensor:
    return F.layer_norm(F.group_norm(a, 2), (6,))


def dropout(a: Tensor) -> Tensor:
    return F.dropout(a, 0.5, True) + torch.rand_like(a) + torch.randn(4, 6)


def constants(a: Tensor) -> Tensor:
    return a + torch.tensor([1.0, 2, 3, 4, 5, 6]) * torch.tensor(2.0) + torch.arange(6)


def expand_and_write(a: Tensor) -> Tensor:
    b = a.new_zeros(3, *a.shape)
    b[1:] = a
    return b


def detach_write(a: Tensor) -> Tensor:
    a.detach().add_(1)
    return a * 1


def dtype_view(a: Tensor) -> tuple[Tensor, Tensor]:
    b = a + 1
    v = b.view(torch.int32)
    v.bitwise_and_(-2)
    return b, v


def attention(a: Tensor) -> Tensor:
    q = a.view(1, 4, 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(1, 4, 6)


CASES = [
    (add_in_place, (x(4, 6), x(6))), (write_through_view, (x(4, 6),)), (write_through_deep_view, (x(4, 6),)),
    (fresh_with_views, (x(4, 6),)), (views_of_input, (x(4, 6),)), (swap, (x(4, 6), x(4, 6))), (write_then_view, (x(4, 6),)),
    (both_halves, (x(4, 6),)), (out_variant, (x(4, 6), x(4, 6))), (equal_results, (x(4, 6),)), (same_twice, (x(4, 6),)),
    (cast_in_place, (x(4, 6),)), (unbind_write, (x(4, 6),)), (split_write, (x(4, 6),)), (index_put, (x(4, 6),)),
    (transposed_in_place, (x(4, 6),)), (strided_write, (x(4, 6),)), (copy_of_input, (x(4, 6),)), (group_and_layer_norm, (x(4, 6, 6),)),
    (batch_norm, (x(4, 6, 2, 2), torch.zeros(6), torch.ones(6))), (dropout, (x(4, 6),)), (constants, (x(4, 6),)),
    (expand_and_write, (x(4, 6),)), (detach_write, (x(4, 6),)), (dtype_view, (x(4, 6),)), (attention, (x(4, 6),)),
    (add_in_place, (x(6, 4).t(), x(6))), (write_through_view, (x(6, 4).t(),)),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "args"), CASES, ids=[f"{fn.__name__}-{i}" for i, (fn, _) in enumerate(CASES)])
def test_agrees_with_eager(fn, args) -> None:
    check(fn, *args)


STATIC_ONLY = (
    strided_write, dtype_view, index_put, constants, attention, write_through_deep_view, dropout, copy_of_input, group_and_layer_norm,
    batch_norm, split_write,
)  # fmt: skip
DYNAMIC = [c for c in CASES if c[0] not in STATIC_ONLY]


@pytest.mark.parametrize(("fn", "args"), DYNAMIC, ids=[f"{fn.__name__}-{i}" for i, (fn, _) in enumerate(DYNAMIC)])
def test_agrees_with_eager_when_sizes_vary(fn, args) -> None:
    check(fn, *args, dynamic=(0,))


def test_key_text_does_not_depend_on_the_process() -> None:
    program = "import sys; sys.path.insert(0, 'tests/cpu'); import test_functionalise as t\n"
    program += "for fn, args in t.CASES: print(t.graph_of(fn, *args).key_text)"
    one = fresh.run(program).stdout
    two = "".join(graph_of(fn, *args).key_text + "\n" for fn, args in CASES)
    assert one == two


def test_equal_pure_nodes_are_one() -> None:
    fg = graph_of(lambda a: a.sin() + a.sin(), x(3))
    assert sum(n.op == "call_function" for n in fg.graph.nodes) == 2


def test_unused_nodes_are_dropped_and_random_ones_kept() -> None:
    fg = graph_of(lambda a: (a.sin(), torch.rand(3), a * 2)[2], x(3))
    assert [str(n.target) for n in fg.graph.nodes if n.op == "call_function"] == ["aten.rand.default", "aten.mul.Tensor"]


def test_item_is_unsupported() -> None:
    with pytest.raises(Unsupported) as e:
        graph_of(lambda a: a * a.sum().item(), x(3))
    assert e.value.code == "GRA003"


@pytest.mark.parametrize("kind", ["input", "view of it", "windows", "part of windows"])
def test_writes_to_elements_that_share_memory_are_refused(kind: str) -> None:
    """Other elements change with them, which a functional value does not show."""
    a = x(20).as_strided((3, 4), (1, 1)) if "input" in kind or "it" in kind else x(3, 4)

    def fn(a: Tensor) -> Tensor:
        part = {"input": a, "view of it": a[0], "windows": a.unfold(1, 2, 1), "part of windows": a.unfold(1, 2, 1)[..., 0]}[kind]
        part.zero_()
        return a + 1

    with pytest.raises(Unsupported) as e:
        graph_of(fn, a)
    assert e.value.code == "GRA006"


def test_data_dependent_sizes_are_bound_at_run_time() -> None:
    check(lambda a: a[a > 0] * 2, x(10))
    check(lambda a: torch.nonzero(a > 0).t() + 1, x(10, 2))


def test_autocast_region() -> None:
    def fn(a: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(a, w)
            return F.softmax(y, -1) + y

    check(fn, x(4, 6), x(5, 6))


def test_autocast_casts_products_by_the_function_that_is_called() -> None:
    """matmul of a vector is cast, mv, dot and addmv are not."""

    def fn(a: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return a @ v, v @ v, F.linear(v, a), F.linear(v, a, a[:, 0]), torch.mv(a, v), torch.dot(v, v), torch.addmv(a[:, 0], a, v)

    check(fn, x(4, 6), x(6))


def test_what_is_only_read_has_no_rule() -> None:
    """Reads of attributes pass every function rule by: one about them would never be asked."""
    assert rules and torch.Tensor.device.__get__ in tracing.FUNCTION_RULES  # type: ignore[attr-defined]
    assert not tracing.READS & set(tracing.FUNCTION_RULES)
    assert {torch.Tensor.dim, torch.Tensor.shape.__get__} <= tracing.READS  # type: ignore[attr-defined]
