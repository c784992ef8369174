"""Where a real driver is, the one of these tests cannot take its place: torch has loaded the other."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "/gpu/" in str(item.path)]
    ours = [item for item in here if item.path.name != "test_real.py"]
    reason = ""
    if torch.cuda.is_available():
        reason = "a real driver is there: bench/gpu.py tests what it does"
    elif len(here) < len(items):
        reason = "they bring a driver of their own: pytest tests/gpu"
    for item in ours if reason else []:
        item.add_marker(pytest.mark.skip(reason=reason))
