"""The captured graph as Python a person can read, each statement with the user's line it came from.

In: a captured GraphModule whose nodes carry meta["loc"]. Out: text; the module is not changed.
"""

from __future__ import annotations

import linecache

from torch import fx


def readable(gm: fx.GraphModule) -> str:
    """`sin = torch.sin(cos)` under a comment `# File: user.py:5 in forward, code: b = torch.sin(a)`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copy = graph.node_copy(node, copies.__getitem__)
        copies[node] = copy
        note_stack(copy)
    return str(fx.GraphModule(gm, graph).print_readable(print_output=False))


def note_stack(node: fx.Node) -> None:
    """The user's line as torch's tools look for it, in meta["stack_trace"]."""
    file, _, line = str(node.meta.get("loc") or "").rpartition(":")
    if file and line.isdigit():
        code = linecache.getline(file, int(line)).strip()
        node.meta["stack_trace"] = f'  File "{file}", line {line}, in forward\n    {code}'
