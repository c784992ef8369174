"""Which machine a graph is compiled for: the devices of what goes in and comes out."""

from __future__ import annotations

import pytest
import torch
from graph_harness import graph_of

from torchsmith.codes import Unsupported
from torchsmith.graph.tracing import remember_device
from torchsmith.ir.expr import Sym, walk
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
