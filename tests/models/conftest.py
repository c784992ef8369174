"""Model tests share bench/models.py, one private build cache for the session, and start each from a reset compiler."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

# programs that tests start find the package too, installed or not
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])

from models import torchvision_models  # noqa: E402  (the folder above comes first)


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("TORCHSMITH_CACHE_DIR")
    os.environ["TORCHSMITH_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["TORCHSMITH_CACHE_DIR"]
    else:
        os.environ["TORCHSMITH_CACHE_DIR"] = before


@pytest.fixture(scope="session", autouse=True)
def importable_torchvision() -> None:
    torchvision_models()


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    import torchsmith

    torchsmith.compiler.reset()


@pytest.fixture(autouse=True)
def native_road(request: pytest.FixtureRequest) -> Iterator[None]:
    """A model that runs eagerly is a failure, whatever its results are; `roads` names the codes that a test expects all the same."""
    from torchsmith.events import recording

    with recording() as got:
        yield
    expected = {code for mark in request.node.iter_markers("roads") for code in mark.args}
    other = [e.fields["report"] for e in got if e.kind == "graph" and e.fields["report"].road == "captured"]
    assert not [r for r in other if r.code not in expected], other
