"""What ties the graphs of one model together: weights and caches are theirs in common."""

import uuid
from typing import Any

import torch


class CompileContext:
    def __init__(self, use_weight_sharing: bool = False, **_: Any) -> None:
        self.identity = uuid.uuid4().hex

    def mark_static_address(self, tensor: torch.Tensor, name: str) -> None:
        """The emulation finds caches by their names."""
