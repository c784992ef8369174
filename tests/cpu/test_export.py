"""torchsmith.export: dimensions, signatures, mutation, results, files, programs of torch.export; refusals name dimension, line and cure."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import zipfile

import pytest
import torch
from torch import nn

import torchsmith
from torchsmith.aot.saved import ArchiveError
from torchsmith.codes import Unsupported
from torchsmith.export import Dim, dims, export, from_torch, load, save


class Net(nn.Module):
    """A buffer that is assigned, one that is written, nested arguments, a number and a size among the results."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 4)
        self.tied = nn.Linear(10, 4)
        self.tied.weight = self.fc.weight
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(4), persistent=False)
        self.scale = torch.full((4,), 3.0)

    def forward(self, x, pair, *, flag=True, extra=None):
        self.count = self.count + 1
        y = torch.sigmoid(self.fc(x)) * self.scale if flag else x
        self.seen.add_(y.sum(0))
        return {"y": y + self.tied(pair[0]), "n": x.shape[0], "extra": [extra["a"] * 2, None]}


def arguments(n: int) -> tuple[tuple, dict]:
    generator = torch.Generator().manual_seed(n)
    x, y = torch.randn(n, 10, generator=generator), torch.randn(n, 10, generator=generator)
    return (x, (y, torch.zeros(2))), {"extra": {"a": torch.ones(n)}}


def exported(net: nn.Module, dim: Dim) -> torchsmith.ExportedProgram:
    args, kwargs = arguments(5)
    return torchsmith.export(net, args, kwargs, dynamic_shapes={"x": {0: dim}, "pair": ({0: dim}, None), "extra": {"a": {0: dim}}})


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def program(net) -> torchsmith.ExportedProgram:
    return exported(net, Dim("batch", min=1, max=64))


@torch.no_grad()
def test_module_equals_the_original_at_every_size(net, program):
    reference = Net().eval()
    reference.load_state_dict(net.state_dict())
    module = program.module()
    for n in (1, 2, 5, 64):
        args, kwargs = arguments(n)
        assert equal(module(*args, **kwargs), reference(*args, **kwargs))
        assert torch.equal(module.count, reference.count) and torch.equal(module.seen, reference.seen)


def test_signature(program):
    s = program.graph_signature
    assert set(s.parameters) == {"fc.weight", "fc.bias", "tied.bias"} and set(s.buffers) == {"count", "seen"}
    assert s.non_persistent_buffers == ("seen",) and set(s.buffers_to_mutate.values()) == {"count", "seen"}
    assert s.user_inputs == ("x", "pair[0]", "pair[1]", "extra['a']") and len(s.constants) == 1
    assert repr(program.range_constraints) == "{'batch': [1, 64]}"
    assert set(program.state_dict) == {"fc.weight", "fc.bias", "tied.weight", "tied.bias", "count"}
    assert "test_export.py:" in str(program) and "batch, 10" in str(program)


def test_signature_in_torch_exports_terms(program):
    from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, SymIntArgument

    signature = program.graph_signature
    specs = {s.target or s.arg.name: s for s in signature.input_specs}
    assert [s.arg.name for s in signature.input_specs] == [n.name for n in program.graph.nodes if n.op == "placeholder"]
    assert specs["fc.weight"].kind is InputKind.PARAMETER and specs["scale"].kind is InputKind.CONSTANT_TENSOR
    assert (specs["count"].persistent, specs["seen"].persistent) == (True, False)
    outs = signature.output_specs
    assert {s.target for s in outs if s.kind is OutputKind.BUFFER_MUTATION} == {"count", "seen"}
    given = [s.arg for s in outs if s.kind is OutputKind.USER_OUTPUT]
    assert isinstance(given[1], SymIntArgument) and given[3] == ConstantArgument("", None)
    assert program.module_call_graph[0].signature.forward_arg_names == ["x", "pair", "extra"]
    program.validate()


def test_gradients_flow_through_the_module(net, program):
    args, kwargs = arguments(3)
    program.module()(*args, **kwargs)["y"].sum().backward()
    assert net.fc.weight.grad is not None and net.fc.weight.grad.abs().sum() > 0


class Written(nn.Module):
    def __init__(self, factor=2):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.norm, self.factor = nn.BatchNorm1d(3), factor

    def forward(self, x):
        self.total.add_(x.sum(0))
        found = x.nonzero()
        return {"norm": self.norm(x).view(-1) * self.factor, "total": self.total, "turned": x.transpose(0, 1), "n": x.shape[0] + 1,
                "found": (found + 1, found.new_zeros(found.shape[0] * 2)), "flat": x.flip(0).t().reshape(-1)}  # fmt: skip


def test_a_module_of_a_program_is_compiled():
    """In one graph; another program of the same signature has a graph of its own."""
    module = Written()
    program = export(module, (torch.randn(4, 3),), dynamic_shapes={"x": {0: Dim("n", min=2)}})
    own, other = program.module(), export(Written(5), (torch.randn(4, 3),), dynamic_shapes={"x": {0: Dim("n", min=2)}}).module()
    compiled = torchsmith.compile(lambda m, x: m(x), backend="eager", fullgraph=True, dynamic=True)
    for n, mine in ((4, own), (6, own), (5, other)):
        copied, x = copy.deepcopy(mine), torch.randn(n, 3).relu()
        got, want = compiled(mine, x), copied(x)
        for (path, a), (_, b) in zip(*(torch.utils._pytree.tree_flatten_with_path(r)[0] for r in (got, want)), strict=True):
            assert a == b if type(b) is int else (torch.equal(a, b) and a.stride() == b.stride()), path
        assert all(torch.equal(a, copied.state_dict()[k]) for k, a in mine.state_dict().items())
        assert got["turned"]._base is x and got["total"] is mine.total


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a, k: (a[0][:, :9], a[1]), "argument x has size 9 in dimension 1; it must be 10"),
        (lambda a, k: (a[0].double(), a[1]), "argument x has dtype torch.float64"),
        (lambda a, k: (a[0][0], a[1]), "argument x has 1 dimensions"),
        (lambda a, k: (a[0][:2], a[1]), "dimension 0; it must be batch = "),
        (lambda a, k: (torch.randn(65, 10), (torch.randn(65, 10), a[1][1])), "batch is 65; it was exported for sizes in [1, 64]"),
    ],
)
def test_calls_are_checked(program, change, words):
    args, kwargs = arguments(5)
    with pytest.raises(ValueError) as error:
        program.module()(*change(args, kwargs), **kwargs)
    assert words in str(error.value)


def test_a_copy_into_an_argument_comes_first():
    class Net(nn.Module):
        def forward(self, x, y):
            y.copy_(x)
            x.add_(1)
            return x - y

    module = export(Net(), (torch.randn(4, 3), torch.randn(4, 3)), dynamic_shapes=({0: Dim("n")}, {0: Dim("n")})).module()
    given = torch.randn(2, 3), torch.randn(2, 3)
    wanted = [t.clone() for t in given]
    assert torch.equal(module(*given), Net()(*wanted))
    assert all(map(torch.equal, given, wanted))


def test_dictionaries_in_any_order():
    class Net(nn.Module):
        def forward(self, d, *, k):
            return d["a"] - 2 * d["l"][0]["b"] + k["x"] - k["y"]

    def call(names, parts, keys):
        made = {n: {"a": torch.tensor(1.0), "l": [{p: torch.tensor(2.0 + "bc".index(p)) for p in parts}]}[n] for n in names}
        return (made,), {"k": {n: torch.tensor(5.0 + "xy".index(n)) for n in keys}}

    module = torchsmith.export.export(Net(), *call("al", "bc", "xy")).module()
    args, kwargs = call("la", "cb", "yx")
    assert torch.equal(module(*args, **kwargs), Net()(*args, **kwargs))
    for wrong in (call("la", "c", "yx"), ((args[0] | {"a": [torch.tensor(1.0)]},), kwargs), ((args[0] | {"l": ()},), kwargs)):
        with pytest.raises(TypeError, match="a call takes what it was exported with, "):
            module(*wrong[0], **wrong[1])


def test_another_structure_is_refused(program):
    args, kwargs = arguments(5)
    with pytest.raises(TypeError, match=r"a call takes what it was exported with, \("):
        program.module()(args[0], [*args[1]], **kwargs)
    with pytest.raises(RuntimeError, match="module"):
        program(*args, **kwargs)


# ---------------------------------------------------------------- dimensions


class Branch(nn.Module):
    def forward(self, x, y):
        if x.shape[0] > 5:
            x = x * 2
        return x + y


class Twice(nn.Module):
    def forward(self, x, y):
        return torch.cat([x, x]) + y


class Halves(nn.Module):
    def forward(self, x):
        return x.view(x.shape[0] // 2, 2, -1).sum(1)


class Fixed(nn.Module):
    def forward(self, x):
        return x.reshape(8, 3)


A, B = torch.randn(8, 3), torch.randn(16, 3)
b, c = Dim("b"), Dim("c")


@pytest.mark.parametrize(
    ("module", "args", "shapes", "ranges"),
    [
        (Branch(), (A, A), ({0: b}, {0: b}), "{'b': [6, inf]}"),
        (Branch(), (A, A), ({0: Dim.AUTO}, {0: b}), "{'b': [6, inf]}"),
        (Branch(), (A, A), ({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO, 1: 3}), "{'d0': [6, inf]}"),
        (Branch(), (A, A), ((Dim("k", min=6), None), [Dim("k", min=6), Dim.STATIC]), "{'k': [6, inf]}"),
        (Twice(), (A, B), ({0: b}, {0: 2 * b}), "{'b': [1, inf]}"),
        (Twice(), (A, B), {"y": {0: 2 * b}, "x": {0: b}}, "{'b': [1, inf]}"),
        (Halves(), (A,), ({0: 2 * b},), "{'b': [1, inf]}"),
        (Fixed(), (A,), ({0: Dim.AUTO},), "{}"),
        (Fixed(), (A,), None, "{}"),
    ],
)
def test_ranges(module, args, shapes, ranges):
    program = export(module, args, dynamic_shapes=shapes)
    assert repr(program.range_constraints) == ranges
    assert torch.equal(program.module()(*args), module(*args))


def test_a_derived_size_runs_at_other_sizes():
    program = export(Halves(), (A,), dynamic_shapes=({0: 2 * b},))
    for n in (2, 4, 30):
        x = torch.randn(n, 3)
        assert torch.equal(program.module()(x), Halves()(x))
    with pytest.raises(ValueError, match=r"2\*b|b \* 2"):
        program.module()(torch.randn(5, 3))


class Sized(nn.Module):
    def forward(self, x, m):
        n = m.sum().item()
        torch._check(n >= 0)
        torch._check(n <= 9)
        scaled = x.reshape(-1, x.shape[2]) * x.shape[1] / math.sqrt(x.shape[0]) + math.floor(x.shape[1] / 2.5)
        return scaled, torch.zeros(n), x[x[..., 0] > 0], torch.cat([x, x])[: x.shape[0] // 2 + 1]


def test_sizes_are_nodes_of_the_graph_module():
    m, b = torch.tensor([1, 1]), Dim("b")
    program = export(Sized(), (torch.randn(4, 3, 6), m), dynamic_shapes=({0: 2 * b, 1: Dim.AUTO}, None))
    module = program.graph_module
    assert "sym_size.int" in module.code
    for shape in ((4, 3, 6), (6, 5, 6)):
        x = torch.randn(*shape)
        assert all(map(torch.equal, module(x, m), Sized()(x, m)))


@pytest.mark.parametrize(
    ("module", "args", "shapes", "words"),
    [
        (Branch(), (A, A), ({0: Dim("b", min=2)}, {0: Dim("b", min=2)}), ("x.shape[0]", "b > 5", "Dim('b', min=6)", "test_export.py:")),
        (Branch(), (A, A), ({0: b}, {0: c}), ("b == c", "one Dim for both")),
        (Branch(), (A, A), ({0: b, 1: Dim.DYNAMIC}, {0: b}), ("x.shape[1]", "Dim.STATIC")),
        (Fixed(), (A,), ({0: b},), ("b == 8", "Dim.STATIC (the size is always 8)")),
        (Halves(), (A,), ({0: b},), ("Dim.AUTO", "derived Dim")),
    ],
)
def test_refusals_say_what_to_declare(module, args, shapes, words):
    with pytest.raises(Unsupported) as error:
        export(module, args, dynamic_shapes=shapes)
    assert error.value.code == "AOT061" and all(w in str(error.value) for w in words), str(error.value)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (({0: b}, {0: 2 * b}), "no 2*b"),
        (({0: b}, {0: b + 1}), "b is 8 in x.shape[0] and 7 in y.shape[0]"),
        (({5: b}, None), "no dimension 5"),
        ({"z": {0: b}}, "'z'"),
        (({0: b},), "one entry for each"),
        (({0: "n"}, None), "neither a Dim nor an int"),
        (({0: 9}, None), "is always 9"),
        (({0: Dim("b", max=4)}, None), "outside of its range"),
        (({0: Dim("b", max=40)}, {0: b}), "different ranges"),
    ],
)
def test_wrong_declarations(shapes, words):
    with pytest.raises(ValueError) as error:
        export(Branch(), (A, A if words != "no 2*b" else B[:15]), dynamic_shapes=shapes)
    assert words in str(error.value)


def test_dims():
    h, w = dims("h", "w", min=2)
    assert (h.min, w.__name__, repr(2 * h + 1)) == (2, "w", "2*h + 1")
    for bad in (lambda: Dim("no name"), lambda: Dim("a", min=3, max=2), lambda: Dim("a", min=-1)):
        with pytest.raises(ValueError):
            bad()


# ---------------------------------------------------------------- what leaves the module


class Keeps(nn.Module):
    def forward(self, x):
        self.last = x * 2
        return x


class Counts(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x + 1, x


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(3.0)

    def forward(self, x):
        self.table = self.table.to(x.device)
        return x + self.table


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(3)

    def forward(self, x):
        self.last = self.last + x
        return self.last


class OldValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(3))

    def forward(self, x):
        old = self.h
        self.h = old + x
        return old, old[1:]


def test_effects():
    for kept in (Keeps(), Running()):
        with pytest.raises(Unsupported, match="CAP030"):
            export(kept, (torch.ones(3),))
    normed = torch.nn.utils.weight_norm(nn.Linear(3, 2)).eval()  # assigns its weight in every call, before it is read
    x = torch.ones(3)
    torch.testing.assert_close(export(normed, (x,)).module()(x), normed(x))
    program = export(Counts(), (A,))
    assert program.module()(A)[1] is A
    program = export(Same(), (torch.ones(3),))  # an attribute that keeps its tensor is no effect
    assert equal(program.module()(torch.ones(3)), torch.tensor([1.0, 2, 3]))
    module, eager = export(OldValue(), (torch.ones(3),)).module(), OldValue()
    for _ in range(2):
        assert equal(module(torch.ones(3)), eager(torch.ones(3)))


class Chunks(nn.Module):
    def forward(self, x, y):
        halves = x.view(x.shape[0], -1, 4, 2)
        return halves if x.shape[1] // 2 == y.shape[0] // 3 else halves * 2


def test_sizes_that_are_computed_from_two():
    """One condition of the chunks, for every batch; sizes whose quotients are equal are not one size."""
    program = export(Chunks(), (torch.ones(3, 8, 2), torch.ones(12)), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO}))
    assert str(program.range_constraints["d0"]) == "[1, inf]"
    for sizes in (((3, 8, 2), (12,)), ((1, 12, 2), (20,))):
        args = [torch.ones(*s) for s in sizes]
        assert equal(program.module()(*args), Chunks()(*args))
    with pytest.raises(ValueError, match=r"// 4"):
        program.module()(torch.ones(3, 6, 2), torch.ones(9))


def test_not_a_module():
    with pytest.raises(TypeError, match=r"nn\.Module"):
        export(3, (A,))


# ---------------------------------------------------------------- files


@torch.no_grad()
def test_file(net, program, tmp_path):
    path = tmp_path / "net.tsep"
    save(program, path)
    again = load(path)
    assert str(again) == str(program) and again.functional.key_text == program.functional.key_text
    assert again.state_dict["fc.weight"] is again.state_dict["tied.weight"]
    for n in (1, 7):
        args, kwargs = arguments(n)
        assert equal(again.module()(*args, **kwargs), program.module()(*args, **kwargs))
    assert list(tmp_path.iterdir()) == [path]


def rewritten(blob: bytes, name: str, change) -> io.BytesIO:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(out, "w") as new:
        for n in old.namelist():
            data = old.read(n)
            if n != name or change is not None:
                new.writestr(n, change(data) if n == name else data)
    out.seek(0)
    return out


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: io.BytesIO(d[: len(d) // 2]), "damaged"),
        (lambda d: io.BytesIO(b"no zip"), "damaged"),
        (lambda d: rewritten(d, "tensors.safetensors", None), "not a program"),
        (lambda d: rewritten(d, "tensors.safetensors", lambda t: t[:-1] + bytes([t[-1] ^ 1])), "digest"),
        (lambda d: rewritten(d, "program.json", lambda t: t.replace(b'"version": 2', b'"version": 99')), "version 99"),
        (lambda d: rewritten(d, "program.json", lambda t: t.replace(b"addmm", b"no_such_op")), "cannot be read|not registered"),
        (lambda d: rewritten(d, "program.json", lambda t: t[:-20]), "damaged"),
    ],
)
def test_bad_files(program, spoil, words):
    out = io.BytesIO()
    save(program, out)
    with pytest.raises(ArchiveError, match=words):
        load(spoil(out.getvalue()))


# ---------------------------------------------------------------- programs of torch.export


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("h", torch.zeros(4))

    def forward(self, x, k=2):
        self.h.add_(x.sum(0))
        return {"y": self.fc(x) * k + self.h, "n": x.shape[0]}


@torch.no_grad()
def test_torch_export(tmp_path):
    torch.manual_seed(0)
    net, eager = Holds(), Holds()
    eager.load_state_dict(net.state_dict())
    n = torch.export.Dim("n", min=1, max=9)
    made = torch.export.export(net, (torch.randn(3, 4),), {"k": 3}, dynamic_shapes={"x": {0: n}, "k": None})
    torch.export.save(made, tmp_path / "theirs.pt2")
    for program in (from_torch(made), from_torch(tmp_path / "theirs.pt2")):
        eager.h.zero_()
        module = program.module()
        (bounds,) = program.range_constraints.values()
        assert repr(bounds) == "[1, 9]"
        for n in (1, 2, 9):
            x = torch.randn(n, 4)
            assert equal(module(x, k=3), eager(x, k=3)) and torch.equal(module.h, eager.h)
        with pytest.raises(ValueError, match=r"\[1, 9\]"):
            module(torch.randn(10, 4), k=3)
        program.module().h.zero_()


def test_dims_of_torch_export_are_taken():
    """Named, bounded, derived and hinted: as ours."""
    theirs = torch.export.Dim
    b, c = theirs("b"), theirs("c", min=2, max=9)

    class Three(nn.Module):
        def forward(self, x, y, z):
            return x * 2, y + 1, z - 1

    args = (torch.randn(3, 4), torch.randn(4, 9), torch.randn(5, 2))
    shapes = {"x": {0: b, 1: c}, "y": {0: c, 1: 2 * c + 1}, "z": {0: theirs.AUTO(min=2), 1: theirs.STATIC}}
    program = export(Three(), args, dynamic_shapes=shapes)
    assert {k: str(v) for k, v in program.range_constraints.items() if k in "bc"} == {"b": "[1, inf]", "c": "[2, 9]"}
    assert [tuple(t.shape) for t in program.module()(torch.randn(1, 2), torch.randn(2, 5), torch.randn(7, 2))] == [(1, 2), (2, 5), (7, 2)]
    wrong = (torch.randn(1, 2), torch.randn(2, 6)), (torch.randn(1, 10), torch.randn(10, 21)), (*args[:2], torch.randn(1, 2))
    for bad in ((*some, args[2])[:3] for some in wrong):
        with pytest.raises((ValueError, RuntimeError)):
            program.module()(*bad)


class Sum(nn.Module):
    def forward(self, x, pair, *, k=2):
        return x @ pair[0] * k + pair[1].sum()


@pytest.mark.parametrize("names", [torchsmith.export, torch.export])
def test_shapes_by_tensor_and_by_more_inputs(names):
    """ShapesCollection and AdditionalInputs, ours and torch's."""
    x, a, b = torch.randn(3, 4), torch.randn(4, 5), torch.randn(6)
    shapes = (names if names is torchsmith.export else names.dynamic_shapes).ShapesCollection()
    n = names.Dim("n", max=64)
    shapes[x] = {0: n}
    shapes[b] = (n + 3,)
    program = export(Sum(), (x, (a, b)), dynamic_shapes=shapes)
    assert program.module()(torch.randn(9, 4), (a, torch.randn(12))).shape == (9, 5)
    with pytest.raises(ValueError):
        program.module()(torch.randn(9, 4), (a, torch.randn(11)))
    more = (names if names is torchsmith.export else names.dynamic_shapes).AdditionalInputs()
    more.add((torch.randn(7, 4), (a, torch.randn(2))))
    more.add((torch.randn(1, 4), (a, b)))
    program = export(Sum(), (x, (a, b)), dynamic_shapes=more)
    assert program.module()(torch.randn(20, 4), (a, torch.randn(11))).shape == (20, 5)
    with pytest.raises(ValueError):
        program.module()(torch.randn(20, 3), (torch.randn(3, 5), b))


def test_shapes_that_fit_nothing():
    x, a, b = torch.randn(3, 4), torch.randn(4, 5), torch.randn(6)
    shapes = torchsmith.export.ShapesCollection()
    shapes[torch.randn(3, 4)][0] = Dim("n")
    with pytest.raises(ValueError, match="no argument"):
        export(Sum(), (x, (a, b)), dynamic_shapes=shapes)
    for args, kwargs in (((x, (a, b, b)), {}), ((x, (a, b)), {"k": 3})):
        more = torchsmith.export.AdditionalInputs()
        more.add(args, kwargs)
        with pytest.raises(ValueError, match="AdditionalInputs"):
            export(Sum(), (x, (a, b)), {"k": 2} if kwargs else None, dynamic_shapes=more)


@dataclasses.dataclass
class Pair:
    one: torch.Tensor
    two: torch.Tensor


class OfPairs(nn.Module):
    def forward(self, p):
        return Pair(p.one + p.two, p.one * 2)


def test_registered_dataclasses(tmp_path):
    torchsmith.export.register_dataclass(Pair)
    p = Pair(torch.randn(3), torch.randn(3))
    program = export(OfPairs(), (p,))
    path = torchsmith.aot.compile_and_package(program, package_path=tmp_path / "m.pt2")
    for run in (program.module(), torchsmith.aot.load_package(path), torch._inductor.aoti_load_package(str(path))):
        out = run(p)
        assert type(out) is Pair
        torch.testing.assert_close((out.one, out.two), (p.one + p.two, p.one * 2))


@dataclasses.dataclass
class Nested:
    one: torch.Tensor
    more: list
    named: dict


class OfNested(nn.Module):
    def forward(self, n):
        return n.one + n.more[0] * n.more[1] + n.named["k"]


def test_a_registered_dataclass_that_holds_containers():
    torchsmith.export.register_dataclass(Nested)

    def nested(size):
        a, b, c, d = torch.randn(4, size)
        return Nested(a, [b, c], {"k": d})

    other = torchsmith.export.AdditionalInputs()
    other.add((nested(5),))
    program, n = export(OfNested(), (nested(4),), dynamic_shapes=other), nested(7)
    assert torch.equal(program.module()(n), OfNested()(n))
    vary = {0: Dim.DYNAMIC}
    assert other.dynamic_shapes(OfNested(), (nested(4),)) == {"n": Nested(vary, [vary, vary], {"k": vary})}


def test_another_module_as_argument_is_refused(tmp_path):
    class Calls(nn.Module):
        def forward(self, x, part, dtype=torch.float64):
            return part(x).to(dtype)

    one, two, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(3)  # they print the same
    program = export(Calls(), (x, one, torch.float64))
    assert torch.equal(program.module()(x, one, torch.float64), one(x).double())
    for args in ((x, two, torch.float64), (x, one, torch.float32)):
        with pytest.raises(ValueError, match="an export of its own"):
            program.module()(*args)
    with pytest.raises(TypeError, match="argument part is a module"):
        torchsmith.aot.compile_and_package(program, package_path=tmp_path / "m.pt2")


def test_the_signature_names_parameters_that_are_written():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            with torch.no_grad():
                self.w.div_(2)
            return x + self.w

    signature = export(Halves(), (torch.ones(3),)).graph_signature
    assert list(signature.parameters_to_mutate.values()) == ["w"] and not signature.user_inputs_to_mutate
    assert signature.output_specs[0].kind.name == "PARAMETER_MUTATION"


def test_what_ties_named_dimensions_may_be_left_to_the_call():
    class Flat(nn.Module):
        def forward(self, x, y):
            return x.reshape(-1) + y

    example, shapes = (torch.randn(6, 8), torch.randn(48)), {"x": dims("a", "b"), "y": dims("c")}
    with pytest.raises(ValueError, match="a declared dimension") as error:
        export(Flat(), example, dynamic_shapes=shapes)
    assert isinstance(error.value, Unsupported)
    program = export(Flat(), example, dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=True).module()
    assert program(torch.ones(2, 3), torch.ones(6)).tolist() == [2.0] * 6
    for kind in (ValueError, AssertionError):  # torch.export's modules raise the second one
        with pytest.raises(kind, match="must satisfy"):
            program(torch.ones(2, 3), torch.ones(7))


def test_the_program_runs_where_a_result_tells_its_own_size():
    class Chosen(nn.Module):
        def forward(self, x):
            return torch.argwhere(x), x[x > 0] * 2

    program = export(Chosen(), (torch.randn(5, 3),), dynamic_shapes=({0: Dim.AUTO},))
    for n in (5, 1, 9):
        x = torch.randn(n, 3)
        for got, want in zip(program.module()(x), Chosen()(x), strict=True):
            assert torch.equal(got, want)


# ---------------------------------------------------------------- the names of torch.export


def test_a_draft_tells_all_that_does_not_hold():
    class Three(nn.Module):
        def forward(self, x, y, z):
            return x.view(-1, 6), y.reshape(2, 8) + (1 if z.shape[0] > 3 else 0), z * 2

    args = torch.randn(4, 6), torch.randn(16), torch.randn(5)
    shapes = {"x": {1: Dim("k")}, "y": {0: Dim("n", max=64)}, "z": {0: Dim("m", min=1)}}
    with pytest.raises(Unsupported, match="AOT061"):
        export(Three(), args, dynamic_shapes=shapes)
    program = torchsmith.export.draft_export(Three(), args, dynamic_shapes=shapes)
    said = str(program.report)
    assert not program.report.successful() and len(program.report.problems) >= 2
    assert "y.shape[0]" in said and "z.shape[0]" in said and "test_export.py:" in said
    assert equal(program.module()(*args), Three()(*args))
    fine = torchsmith.export.draft_export(Fixed(), (A,))
    assert fine.report.successful() and torch.equal(fine.module()(A), Fixed()(A))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out, self.unused = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False), nn.Linear(2, 2)
        self.out.weight = self.words.weight

    def forward(self, i):
        return self.out(self.words(i))


def test_module_holds_every_name_of_the_state():
    net, i = Tied(), torch.tensor([1, 2])
    program = export(net, (i,))
    module = torchsmith.export.unflatten(program)
    assert list(module.state_dict()) and set(module.state_dict()) == set(program.state_dict) == set(net.state_dict())
    assert module.out.weight is module.words.weight is net.words.weight and torch.equal(module(i), net(i))
    signature = program.graph_signature
    assert set(signature.inputs_to_parameters.values()) == set(signature.parameters) and signature.user_inputs == ("i",)
    other = copy.deepcopy(program)
    with torch.no_grad():
        other.state_dict["words.weight"].zero_()
    assert not other.module()(i).any() and torch.equal(module(i), net(i))


class Keywords(nn.Module):
    def forward(self, p, *rest, n=3, **named):
        return p.one * n + sum(rest) + named["bias"]


def test_declarations_follow_any_structure():
    torchsmith.export.register_dataclass(Pair)
    n, p = Dim("n"), Pair(A, A)
    for shapes in (
        {"p": Pair({0: n}, {0: n}), "rest": ({0: n},), "named": {"bias": {0: n}}},
        {"p": [{0: n}, {0: n}], "rest": ({0: n},), "bias": {0: n}},
        {"p": [{0: n}, {0: n}], "rest": ({0: n},), "bias": {0: n}, "n": 4},
    ):
        program = export(Keywords(), (p, A), {"bias": A, "n": 4}, dynamic_shapes=shapes)
        x = torch.randn(3, 3)
        assert torch.equal(program.module()(Pair(x, x), x, bias=x, n=4), x * 4 + x + x)
    with pytest.raises(ValueError, match="pass it in a tensor"):
        export(Keywords(), (p, A), {"bias": A, "n": 4}, dynamic_shapes={"p": None, "rest": None, "bias": None, "n": Dim.DYNAMIC})
    found = torchsmith.export.ShapesCollection()
    found[A] = {0: Dim.AUTO}
    assert found.dynamic_shapes(Fixed(), (A,)) == {"x": {0: Dim.AUTO}}


# ---------------------------------------------------------------- control flow of the data


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        sign = torch.cond(x.shape[0] > 1, lambda: 1.0, lambda: -1.0, ())
        both = torch.cond(x.sum() > 0, lambda x: {"y": self.inner(x), "z": x * 2}, lambda x: {"y": x.cos(), "z": x + 1}, (x,))
        return both["y"] * sign, both["z"]

    def expected(self, x):
        return (self.inner(x), x * 2) if x.sum() > 0 else (x.cos(), x + 1)


class Steps(nn.Module):
    def forward(self, x):
        from torch._higher_order_ops.map import map as map_over
        from torch._higher_order_ops.scan import scan

        last, sums = scan(lambda c, row: (c + row, (c * row).clone()), torch.zeros(3), x)
        _, back = scan(lambda c, row: (c + row, c.clone()), torch.zeros(8), x, dim=1, reverse=True)
        return map_over(lambda row, y: row.cumsum(0) + y, x, x[0]), last, sums, back


class Writes(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.mul_(2) + 0, lambda x: x + 1, (x,))


class Differs(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x[1:], lambda x: x, (x,))


class Loops(nn.Module):
    def forward(self, x):
        from torch._higher_order_ops.while_loop import while_loop

        return while_loop(lambda i, x: x.sum() < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))


class CountsSteps(nn.Module):
    def forward(self, x):
        return torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))


def test_branches_become_a_choice(tmp_path):
    net = Chooses()
    program = export(net, (A,), dynamic_shapes=({0: Dim("n", min=2)},))
    path = torchsmith.aot.compile_and_package(program, package_path=tmp_path / "m.pt2")
    for run in (program.module(), torchsmith.aot.load_package(path)):
        for x in (torch.rand(5, 3), -torch.rand(2, 3)):
            torch.testing.assert_close(run(x), net.expected(x))


def test_loops_over_known_sizes_are_written_out():
    sums = A.cumsum(0)
    before = torch.cat([torch.zeros(1, 3), sums[:-1]])
    back = torch.stack([A[:, 1] + A[:, 2], A[:, 2], torch.zeros(8)], 1)  # as torch's own scan has it
    torch.testing.assert_close(export(CountsSteps(), (A,)).module()(A), (torch.tensor(3), A * 8))
    torch.testing.assert_close(export(Steps(), (A,)).module()(A), (A.cumsum(1) + A[0], sums[-1], before * A, back))


@pytest.mark.parametrize(
    ("net", "shapes", "words"),
    [(Writes(), None, "mul_ writes"), (Differs(), None, "different tensors"), (Loops(), None, "while_loop"),
     (Steps(), ({0: b},), "scan over a dimension that varies")],
)  # fmt: skip
def test_control_flow_that_has_no_such_form(net, shapes, words):
    with pytest.raises(Unsupported, match="CAP033") as error:
        export(net, (A,), dynamic_shapes=shapes)
    assert words in str(error.value) and "test_export.py:" in str(error.value)


def test_what_torch_export_takes_besides():
    """Texts beside a saved program; calls that are verified; tables of torch's decompositions."""
    program, file = export(nn.Linear(5, 3), (torch.randn(4, 5),), dynamic_shapes=({0: Dim("b", max=9)},)), io.BytesIO()
    save(program, file, extra_files={"card.txt": "trained", "more": b"x"})
    found = {"card.txt": "", "absent": "kept"}
    load(file, extra_files=found)
    assert found == {"card.txt": "trained", "absent": "kept"}
    calls = torchsmith.export.AdditionalInputs()
    calls.add((torch.randn(7, 5),))
    calls.verify(program)
    calls.add((torch.randn(10, 5),))
    with pytest.raises(ValueError, match="b is 10; it was exported for sizes in"):
        calls.verify(program)
    with pytest.raises(TypeError, match="not int"):
        save(3, io.BytesIO())
    assert program.run_decompositions(torch.export.default_decompositions()) is program.run_decompositions({}) is program
    table = torchsmith.export.default_decompositions()
    del table[torch.ops.aten.conv2d.default]  # programs that keep an operator whole do this
    assert table.pop(torch.ops.aten.linear.default) is None and program.run_decompositions(table) is program
    with pytest.raises(ValueError, match=r"aten\.linear\.default"):
        program.run_decompositions({torch.ops.aten.linear.default: lambda *args: args[0]})
