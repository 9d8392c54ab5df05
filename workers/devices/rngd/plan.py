"""How a prompt is cut into chunks, and which shapes of graphs that takes."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + tokens), padded on the right to `width`."""

    start: int
    tokens: int
    width: int


class Plan:
    def __init__(self, widths: Sequence[int], context: int) -> None:
        """widths: that are compiled. context: tokens of the longest prompt."""
        self.widths = sorted(width for width in widths if width < context) or [min(widths)]
        if self.widths[-1] < context and (larger := [width for width in widths if width >= context]):
            self.widths.append(min(larger))
        self._context = context

    def chunks(self, tokens: int) -> list[Chunk]:
        """Full chunks and a padded last one, with the least width to compute in all.

        Each further chunk counts as the least width, for what its launches cost; that is a guess, not a measurement.
        """
        cut, start = [], 0
        for width in self._best(tokens)[1]:
            cut.append(Chunk(start, min(width, tokens - start), width))
            start += width
        return cut

    @property
    def past_lengths(self) -> list[int]:
        """What the past of a full layer may be padded to: each width, then doubled until the context is held."""
        least = self.widths[0]
        longest = -(-self._context // least) * least
        lengths = list(self.widths)
        while lengths[-1] < longest:
            lengths.append(min(2 * lengths[-1], longest))
        return lengths

    def starts(self) -> Iterator[tuple[int, int]]:
        """Every (start, width) that some prompt needs."""
        yield from sorted({(chunk.start, chunk.width) for n in range(1, self._context + 1) for chunk in self.chunks(n)})

    @functools.cache  # noqa: B019 - one plan a process
    def _best(self, tokens: int) -> tuple[int, tuple[int, ...]]:
        """(cost, widths, the widest first)."""
        least = self.widths[0]
        options = []
        for width in self.widths:
            if width >= tokens:
                options.append((width, (width,)))
                break  # a wider one is only more padding
            whole = tokens // width if width == self.widths[-1] else 1
            rest_cost, rest = self._best(tokens - whole * width) if tokens > whole * width else (-least, ())
            if not rest or rest[0] <= width:
                options.append((whole * width + whole * least + rest_cost, (width,) * whole + rest))
        return min(options)
