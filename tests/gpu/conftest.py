"""Where a real driver is, the one of these tests cannot take its place: torch has loaded the other."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if "/gpu/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="a real driver is there: bench/gpu.py tests what it does"))
