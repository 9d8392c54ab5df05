"""The points of load that kvrelay's speed is judged by, each with what it has to reach.

For SmolLM2 in bfloat16 on two cores: the targets are what vLLM's CPU build and llama.cpp reach there, whichever is more, and
for the longest pause of a stream while a long prompt is computed 150 ms. docs/bench.md has them all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

INTRUDER = (1500, 8)  # tokens of prompt and answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """prompt, output: tokens of each request. every: seconds between long prompts that come among the streams, 0: back to
    back. tokens_per_second: at least; longest_gap_ms: at most."""

    prompt: int
    output: int
    streams: int
    requests: int
    every: float | None = None
    tokens_per_second: float | None = None
    longest_gap_ms: float | None = None

    @property
    def interfere(self) -> str:
        """As the option says it."""
        prompt, output = INTRUDER
        return "" if self.every is None else f"prompt={prompt},output={output},every={self.every:g}"

    @property
    def title(self) -> str:
        title = f"{self.prompt} tokens of prompt, {self.output} of answer, {self.streams} at once"
        if self.every is None:
            return title
        return (
            f"{title}; {INTRUDER[0]} of prompt among them {f'every {self.every:g} s' if self.every else 'back to back'}"
        )


POINTS = (
    Point(prompt=128, output=64, streams=1, requests=6, tokens_per_second=60),
    Point(prompt=128, output=64, streams=4, requests=16, tokens_per_second=117),
    Point(prompt=128, output=64, streams=8, requests=32, tokens_per_second=157),
    Point(prompt=128, output=64, streams=16, requests=64, tokens_per_second=195),
    Point(prompt=1500, output=32, streams=1, requests=4),
    Point(prompt=1500, output=32, streams=4, requests=8),
    Point(prompt=128, output=256, streams=4, requests=8, every=4, longest_gap_ms=150),
    Point(prompt=128, output=256, streams=4, requests=8, every=0),
)


def row(name: str, figures: Mapping[str, float], point: Point) -> str:
    """A server's figures at a point, with the targets beside them."""
    rate = f"{figures['output tokens/s']:7.1f} tokens/s{_target('≥', point.tokens_per_second):9}"
    gap = f"longest {figures['ITL max ms']:7.1f} ms{_target('≤', point.longest_gap_ms)}"
    spreads = "   ".join(
        f"{which} {figures[f'{which} p50 ms']:7.1f} {figures[f'{which} p99 ms']:7.1f}" for which in ("TTFT", "ITL")
    )
    return f"  {name:14} {rate}   {spreads}   {gap}"


def _target(sign: str, value: float | None) -> str:
    return "" if value is None else f" ({sign} {value:g})"
