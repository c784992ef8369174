"""Capture of Python frames. Needs the C extension, which is built for the CPython versions it knows."""

import sys

try:
    from . import _frame as _frame  # type: ignore[attr-defined]  # built from csrc/frame
except ImportError as error:
    version = ".".join(map(str, sys.version_info[:2]))
    known = "CPython 3.11, 3.12 and 3.13 (with the GIL)"
    if sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise ImportError(f"torchsmith captures Python frames on {known}; this is {sys.implementation.name} {version}") from error
    raise ImportError(f"torchsmith's C extension is not built for this Python ({version}): pip install . (or setup.py build_ext)") from error
