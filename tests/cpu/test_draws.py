"""Random operators of a GPU in kernels: their numbers are those of a model of eager's kernels, thread by thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lower_harness import call_eager, to_array
from triton_harness import TritonMachine, scheduled_of, texts_of

from torchsmith.ir import dtype as dt
from torchsmith.ir.arrays import apply
from torchsmith.ir.interpret import _Machine
from torchsmith.ir.kernel import Kernel
from torchsmith.ir.ops import OPS
from torchsmith.ir.program import Enum, Extern
from torchsmith.lower import draws
from torchsmith.options import Options
from torchsmith.runtime.cubins import compile_images
from torchsmith.runtime.draws import ON_HOST, TAKE, draw_on_host, generator_states, put_back, take_draws

BLOCKS = 2
OURS = Options(cuda_blocks=BLOCKS)
SEED, OFFSET = (1 << 63) + 12345, 40

# counter, key and words of Random123's own table of known answers
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)  # fmt: skip


def signed(x: int) -> np.int64:
    return np.int64(x - (1 << 64) if x >> 63 else x)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox(counter: Any, key: Any, words: Any) -> None:
    seed, low, high = key[0] | key[1] << 32, counter[0] | counter[1] << 32, counter[2] | counter[3] << 32
    assert tuple(OPS["philox"].scalar(seed, low, high, k) for k in range(4)) == words
    got = apply("philox", dt.i64, (signed(seed), signed(low), signed(high), np.arange(4)), (dt.i64,) * 4)
    assert tuple(got) == words


class Generator:
    """A CUDA generator as far as compiled graphs know it."""

    def __init__(self) -> None:
        self.offset = OFFSET

    def initial_seed(self) -> int:
        return SEED

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset


class Thread:
    """A thread of eager's: its state of curand's generator."""

    def __init__(self, number: int, offset: int) -> None:
        self.number, self.counter = number, offset // 4

    def four(self) -> list[int]:
        self.counter += 1
        return [OPS["philox"].scalar(SEED, self.counter - 1, self.number, k) for k in range(4)]

    def floats(self) -> list[Any]:
        return [np.float32(x) * np.float32(2.0**-32) + np.float32(2.0**-33) for x in self.four()]

    def doubles(self) -> list[Any]:
        a, b, c, d = self.four()
        return [float(x ^ y << 21) * 2.0**-53 + 2.0**-54 for x, y in ((a, b), (c, d))]

    def pairs(self) -> list[int]:
        a, b, c, d = self.four()
        return [a << 32 | b, c << 32 | d]


def launched(n: int) -> int:
    return min(BLOCKS, -(-n // 256))


def moved(n: int, each: int) -> int:
    return ((n - 1) // (256 * launched(n) * each) + 1) * 4


def strided(n: int, offset: int, how: str = "floats") -> list[Any]:
    """A thread takes elements at a distance of all threads."""
    out: list[Any] = [None] * n
    count = 256 * launched(n)
    for t in range(count):
        thread = Thread(t, offset)
        at = t
        while at < n:
            made = getattr(thread, how)()
            for k, x in enumerate(made):
                if at + k * count < n:
                    out[at + k * count] = x
            at += count * len(made)
    return out


def vectors(n: int, offset: int, size: int) -> list[Any]:
    """A thread takes vectors of `size` elements, and four numbers for each four of them."""
    out: list[Any] = [None] * n
    count = 256 * launched(n)
    for t in range(count):
        thread = Thread(t, offset)
        for at in range(t * size, n, count * size):
            made = [x for _ in range(max(size // 4, 1)) for x in thread.floats()]
            out[at : at + size] = made[:size]
    return out


def run(fn: Any, *args: torch.Tensor, dynamic: bool = False) -> tuple[list[torch.Tensor], Generator, Any]:
    """The kernels in the reference interpreter, and their Triton texts in Triton's, agree."""
    scheduled, consts = scheduled_of(fn, args, dynamic, OURS)
    results = []
    for machine in (_Machine, TritonMachine):
        generator = Generator()

        def extern(x: Extern, given: Any, more: Any, generator: Generator = generator) -> Any:
            if x.op != TAKE:
                return call_eager(x, given, more)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("torchsmith.runtime.draws.generator_of", lambda device: generator)
                return [t.numpy() for t in take_draws(int(given[0]), torch.device("cuda:0"), ())]

        inputs = [to_array(a) for a in (*args, *consts)]
        results.append(machine(scheduled.program, inputs, extern).run(scheduled.body))
    near = {torch.bfloat16: 1 / 128, torch.float64: 1e-11}.get(args[0].dtype, 0)  # Triton's interpreter truncates, and rounds fma twice
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=near, atol=0)
    return [torch.from_numpy(np.array(r)) for r in results[0]], generator, scheduled


def laid_out(x: torch.Tensor, numbers: list[Any]) -> torch.Tensor:
    """One number for each element, dealt out in the order of memory."""
    out = torch.empty_strided(x.shape, x.stride(), dtype=torch.float64)
    out.as_strided((x.numel(),), (1,)).copy_(torch.tensor([float(v) for v in numbers], dtype=torch.float64))
    return out


def drop(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.native_dropout(x * 2, 0.375, True)


DROPPED = {  # operand, elements of a vector
    "vectors of 4": (torch.randn(3, 1000), 4),
    "vectors of 2": (torch.randn(3, 702), 2),
    "single": (torch.randn(3, 701), 1),
    "16 bits": (torch.randn(9, 808).half(), 8),
    "16 bits, some": (torch.randn(9, 404).bfloat16(), 4),
    "float64": (torch.randn(3, 500, dtype=torch.float64), 2),
    "one thread each": (torch.randn(7, 4), 4),
    "turned": (torch.randn(4, 30, 12).transpose(1, 2), 4),
    "turned, single": (torch.randn(5, 31, 7).transpose(1, 2), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPPED)
def test_dropout(name: str) -> None:
    x, size = DROPPED[name]
    (y, mask), generator, scheduled = run(drop, x)
    n = x.numel()
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    if size == 1:
        wanted = torch.tensor([float(v) for v in strided(n, OFFSET)], dtype=torch.float64).view(x.shape) < 0.625
    else:
        wanted = laid_out(x, vectors(n, OFFSET, size)) < 0.625
    assert torch.equal(mask, wanted)
    twice = (x * 2).to(wide)
    expected = (twice * wanted.to(wide) * (1 / torch.tensor(0.625, dtype=torch.float64).item())).to(x.dtype)
    assert torch.equal(y.to(x.dtype), expected)
    assert generator.offset == OFFSET + moved(n, 4)
    assert sum(isinstance(e, Kernel) for e in scheduled.body) == 1, "product, mask and result are one kernel"


def test_what_dropout_drops_is_multiplied_by_zero() -> None:
    x = torch.full((64, 4), float("inf"))
    (y, mask), _, _ = run(lambda x: torch.native_dropout(x + 1, 0.5, True), x)
    assert y[~mask].isnan().all() and y[mask].isinf().all() and 0 < mask.sum() < 256


def test_dropout_of_sizes_that_vary() -> None:
    """Whole vectors are proved from the last size."""
    x = torch.randn(7, 60)
    (y, mask), generator, _ = run(lambda x: drop(torch.cat((x, x, x, x), 1)), x, dynamic=True)
    n = mask.numel()
    assert torch.equal(mask, laid_out(y, vectors(n, OFFSET, 4)) < 0.625) and generator.offset == OFFSET + moved(n, 4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_uniform(dtype: torch.dtype, dynamic: bool) -> None:
    x = torch.empty(37, 41, dtype=dtype)
    n, each, how = x.numel(), 2 if dtype is torch.float64 else 4, "doubles" if dtype is torch.float64 else "floats"
    (a, b), generator, _ = run(lambda x: (torch.rand_like(x), torch.empty_like(x).uniform_(-2, 5)), x, dynamic=dynamic)
    assert generator.offset == OFFSET + 2 * moved(n, each)
    first = torch.tensor([float(v) for v in strided(n, OFFSET, how)], dtype=torch.float64).to(dtype).view(x.shape)
    assert torch.equal(a.to(dtype), torch.where(first == 1, 0, first))
    second = torch.tensor([float(v) for v in strided(n, OFFSET + moved(n, each), how)], dtype=torch.float64) * 7 - 2
    second = second.to(torch.float64 if dtype is torch.float64 else torch.float32).to(dtype).view(x.shape)
    assert torch.equal(b.to(dtype), torch.where(second == 5, -2, second))


def test_bernoulli_and_integers() -> None:
    x = torch.empty(33, 50)

    def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = torch.empty_like(x).bernoulli_(0.3)
        return drawn, torch.randint(-7, 1000, (33, 50), device=x.device), torch.randint(-(1 << 62), 1 << 62, (33, 50), device=x.device)

    (a, b, c), generator, scheduled = run(several, x)
    n = x.numel()
    at = OFFSET
    assert torch.equal(a, (torch.tensor([float(v) for v in strided(n, at)], dtype=torch.float64) < 0.3).float().view(x.shape))
    at += moved(n, 4)
    assert torch.equal(b, torch.tensor([v % 1007 - 7 for v in strided(n, at, "four")]).view(x.shape))
    at += moved(n, 4)
    assert torch.equal(c, torch.tensor([v % (1 << 63) - (1 << 62) for v in strided(n, at, "pairs")]).view(x.shape))
    assert generator.offset == at + moved(n, 2)
    calls = [e for e in scheduled.body if isinstance(e, Extern)]
    assert [e.op for e in calls] == [TAKE] and scheduled.body[0] is calls[0], "the host is asked once, first of all"


def test_the_order_of_draws_is_eagers() -> None:
    """What torch draws in between comes in its turn."""

    def mixed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(x), torch.rand_like(x), torch.randn_like(x), torch.rand_like(x)

    scheduled, _ = scheduled_of(mixed, (torch.empty(5, 5),), options=OURS)
    calls = [(e.op, [getattr(a, "value", None) for a in e.args[:1]]) for e in scheduled.body if isinstance(e, Extern)]
    assert [op for op, _ in calls] == [TAKE, "aten.randn_like.default", TAKE]
    assert calls[0][1] == [2] and calls[2][1] == [1]


def test_alike_layers_are_one_text() -> None:
    """Where an operator's numbers begin is an argument of its kernel."""

    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.native_dropout(torch.softmax(x, 1), 0.1, True)[0].cumsum(0)
        return x

    texts = texts_of(scheduled_of(layers, (torch.empty(64, 64),), options=OURS)[0])
    assert len(texts) > 4 and len([t for t in set(texts) if "philox" in t]) == 1


def test_inputs_are_asked_for_their_address() -> None:
    """Eager's vectors are shorter at an odd address: then the call is repeated eagerly."""
    x = torch.empty(64, 64)
    cases = (lambda x: torch.native_dropout(x, 0.1, True), 1), (lambda x: torch.native_dropout(x + 1, 0.1, True), 0)
    for fn, wanted in cases:
        scheduled, _ = scheduled_of(fn, (x,), options=OURS)
        (call,) = (e for e in scheduled.body if isinstance(e, Extern))
        assert len(call.args[2]) == wanted
    generator = Generator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchsmith.runtime.draws.generator_of", lambda device: generator)
        assert [int(t) for t in take_draws(3, torch.device("cuda:0"), [torch.empty(9)])] == [SEED - (1 << 64), OFFSET // 4]
        assert generator.offset == OFFSET + 12


def test_what_is_drawn_on_the_host_uses_its_generator() -> None:
    """A graph on a GPU that draws a tensor of the host (a layer that is dropped, say): its generator moves, and not the GPU's."""

    def draw(x: torch.Tensor) -> torch.Tensor:
        torch.rand([])  # nobody reads it
        return x * torch.randn(3, dtype=torch.float64).to(x.device)

    scheduled, _ = scheduled_of(draw, (torch.empty(5, 3),), options=OURS)
    calls = [e for e in scheduled.body if isinstance(e, Extern)]
    drawn = [Enum("operator", "aten.rand.default"), Enum("operator", "aten.randn.default")]
    assert [(c.op, c.args[0]) for c in calls if c.op == ON_HOST] == [(ON_HOST, op) for op in drawn]
    given = (torch.float64, None, torch.device("cpu"), False)
    torch.manual_seed(7)
    found = draw_on_host(torch.ops.aten.randn.default, torch.device("cpu"), "dtype,layout,device,pin_memory", [3], *given)
    torch.manual_seed(7)
    assert torch.equal(found, torch.randn(3, dtype=torch.float64))


def test_generators_of_gpus_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something is repeated, or only tried, all generators of the process stand as before."""

    class Gpu:
        state = torch.tensor([1, 2])

        def get_state(self) -> torch.Tensor:
            return self.state.clone()

        def set_state(self, state: torch.Tensor) -> None:
            self.state = state

    gpu, is_captured = Gpu(), False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    states = generator_states()
    first = torch.rand(3)
    gpu.state += 5
    put_back(states)
    assert torch.equal(torch.rand(3), first) and gpu.state.tolist() == [1, 2]
    is_captured = True
    assert [g for g, _ in generator_states()] == [torch.default_generator]


def test_torchs_calls_stay_where_nothing_is_known() -> None:
    scheduled, _ = scheduled_of(drop, (torch.empty(8, 8),))
    assert [e.op for e in scheduled.body if isinstance(e, Extern)] == ["aten.native_dropout.default"]
    there = Options(cuda_blocks=BLOCKS, cuda_draws="rand")
    scheduled, _ = scheduled_of(lambda x: (drop(x), torch.rand_like(x)), (torch.empty(8, 8),), options=there)
    assert [e.op for e in scheduled.body if isinstance(e, Extern)] == ["aten.native_dropout.default", TAKE]
    scheduled, _ = scheduled_of(lambda x: x + torch.rand(8, 8, device="cpu").to(x.device), (torch.empty(8, 8),), options=OURS)
    assert [e.op for e in scheduled.body if isinstance(e, Extern)] == [ON_HOST]
    scheduled, _ = scheduled_of(drop, (torch.empty(7, 9),), dynamic=True, options=OURS)  # are there whole vectors?
    assert [e.op for e in scheduled.body if isinstance(e, Extern)] == ["aten.native_dropout.default"]


def test_this_torch_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees another order of threads, and another step of the generator."""

    class Seeded(Generator):
        def manual_seed(self, seed: int) -> None:
            assert seed == draws.SEED

    made = {
        kind: (lambda n, d, device, how=how: how(n, d)) for kind, how in {
            "dropout": lambda n, d: dropped(n, d) < 0.625, "rand": lambda n, d: whole(n, d, "doubles" if d is torch.float64 else "floats"),
            "randint": lambda n, d: torch.tensor([v % 1007 - 7 for v in numbers(n, 4, "four")]),
            "randint32": lambda n, d: torch.tensor([v % (1 << 28) for v in numbers(n, 2, "pairs")]),
            "randint64": lambda n, d: torch.tensor([v % (1 << 63) - (1 << 62) for v in numbers(n, 2, "pairs")]),
            "bernoulli": lambda n, d: torch.tensor([float(v) for v in numbers(n, 4, "floats")], dtype=torch.float64) < 0.3,
        }.items()
    }  # fmt: skip
    generator = Seeded()

    def numbers(n: int, each: int, how: str) -> list[Any]:
        generator.offset += moved(n, each)
        return strided(n, draws.START, how)

    def whole(n: int, d: torch.dtype, how: str) -> torch.Tensor:
        got = torch.tensor([float(v) for v in numbers(n, 2 if how == "doubles" else 4, how)], dtype=torch.float64)
        return torch.where(got == 1, 0, got)

    def dropped(n: int, d: torch.dtype) -> torch.Tensor:
        generator.offset += moved(n, 4)
        size = next(v for v in (8, 4, 2, 1) if v <= 16 // d.itemsize and n % v == 0)
        made = strided(n, draws.START) if size == 1 else vectors(n, draws.START, size)
        return torch.tensor([float(v) for v in made], dtype=torch.float64)

    monkeypatch.setattr("test_draws.SEED", draws.SEED)
    monkeypatch.setattr(draws, "generator_of", lambda device: generator)
    monkeypatch.setattr(draws, "_EAGER", made)
    assert list(draws.compare(torch.device("cpu"), BLOCKS)) == []
    assert {kind for kind, _ in draws.compare(torch.device("cpu"), BLOCKS + 1)} == set(draws.KINDS)


def test_machine_code() -> None:
    """Words are converted as what they are: 32 bits without a sign."""
    scheduled, _ = scheduled_of(drop, (torch.empty(256, 768),), options=Options(cuda_blocks=1056))
    for image in compile_images(texts_of(scheduled), 90, Options()):
        assert b"cvt.rn.f32.u32" in image.ptx and b"cvt.rn.f32.s64" not in image.ptx


