"""Checkpointed parts of a program (torch.utils.checkpoint): what their operators say about being computed again.

In: a region's policy. Out: for each operator whether the backward pass computes it again instead of keeping its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..codes import Unsupported


class Region:
    """One call of a checkpointed function.

    policy: of a selective checkpoint, `policy(operator, *args, **kwargs)`, which gives a torch.utils.checkpoint.CheckpointPolicy or whether
    to save; None computes everything again.
    """

    def __init__(self, policy: Callable[..., Any] | None = None) -> None:
        self.policy = policy

    def is_again(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loc: str) -> bool:
        if self.policy is None:
            return True
        try:
            said = self.policy(operator, *args, **kwargs)
        except Exception as e:
            raise Unsupported("CAP014", at=loc, detail=f"a checkpoint's policy raised {type(e).__name__}: {e}") from e
        return not said if type(said) is bool else str(getattr(said, "name", said)).endswith("RECOMPUTE")
