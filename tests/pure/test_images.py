"""Tables of machine code in a library: their structures are the header's."""

from __future__ import annotations

import re
from pathlib import Path

from torchsmith.runtime.images import STRUCTURES


def test_structures_are_those_of_the_header() -> None:
    header = (Path(__file__).parents[2] / "csrc" / "torchsmith.h").read_text()

    def tokens(text: str) -> list[str]:
        return re.findall(r"\w+|[^\s\w]", re.sub(r"/\*.*?\*/", " ", text, flags=re.S))

    start, end = header.index("typedef struct ts_image {"), header.index("typedef struct ts_images")
    assert tokens(STRUCTURES[STRUCTURES.index("typedef struct ts_image") :]) == tokens(header[start:end])
