"""Attention of one token a row, on the CPU: rows of neighbouring slots together, each to its own tokens.

Row by row, a step makes a call for each row and layer, and in each two threads share 3 KV heads. So neighbours of similar
length are one batch, a run, and what the shorter ones would see too much is masked. A mask hides numbers but no NaN (0 × NaN
is NaN): there `LayerSlots` holds zeros.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.devices.slots import Batch, LayerSlots

CALL_TOKENS = 128  # a call takes as long as so many: 13 µs, with 3 KV heads of 64 on two cores


@dataclass(slots=True)
class Run:
    """Rows [row, row + count) of a step, which stand in neighbouring slots from `slot` on, and see `seen` tokens each."""

    slot: int
    row: int
    seen: list[int]

    @property
    def tokens(self) -> int:
        return max(self.seen)

    def takes(self, slot: int, seen: int) -> bool:
        """Whether one more row costs less here than by itself."""
        if slot != self.slot + len(self.seen):
            return False
        together = max(self.tokens, seen) * (len(self.seen) + 1)
        return together <= self.tokens * len(self.seen) + seen + CALL_TOKENS


def runs(slots: list[int], seen: list[int]) -> list[Run]:
    found: list[Run] = []
    for row, (slot, tokens) in enumerate(zip(slots, seen, strict=True)):
        if found and found[-1].takes(slot, tokens):
            found[-1].seen.append(tokens)
        else:
            found.append(Run(slot, row, [tokens]))
    return found


class Attention:
    """Of one step, in all layers that hold `width` tokens a slot."""

    def __init__(self, batch: Batch, width: int, dtype: torch.dtype) -> None:
        _, seen = batch.places(width)
        self._runs = [(run, _mask(run.seen, dtype)) for run in runs(batch.slots, seen)]

    def __call__(self, layer: LayerSlots, query: torch.Tensor, scale: float) -> torch.Tensor:
        """query: `[rows, kv_heads, group, head_dim]`; a group is the query heads that share a KV head. Answers the same.

        The group stands in for tokens, so that K and V need not be repeated for it.
        """
        answers = []
        for run, mask in self._runs:
            rows, slots = (slice(first, first + len(run.seen)) for first in (run.row, run.slot))
            k, v = (store[slots, :, : run.tokens] for store in (layer.k, layer.v))
            answers.append(scaled_dot_product_attention(query[rows], k, v, attn_mask=mask, scale=scale))
        return answers[0] if len(answers) == 1 else torch.cat(answers)


def _mask(seen: list[int], dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to the scores, `[rows, 1, 1, tokens]`; None if nothing is to be hidden."""
    if min(seen) == max(seen):
        return None
    hidden = torch.arange(max(seen)) >= torch.tensor(seen)[:, None, None, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
