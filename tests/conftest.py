"""Options of the whole test run, and the numbers that each test draws."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected files under tests/*/golden")


def pytest_configure(config: pytest.Config) -> None:
    """A run starts with an empty cache of its own, or with the one that the environment names: nothing was compiled before."""
    if "TORCHSMITH_CACHE_DIR" not in os.environ:
        folder = os.environ["TORCHSMITH_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchsmith_tests_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws does not depend on the tests before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:  # tests/pure does without it
        sys.modules["torch"].default_generator.manual_seed(0)
