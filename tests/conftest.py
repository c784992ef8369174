"""Options of the whole test run, and the numbers that each test draws."""

from __future__ import annotations

import random
import sys

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected files under tests/*/golden")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws does not depend on the tests before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:  # tests/pure does without it
        sys.modules["torch"].default_generator.manual_seed(0)
