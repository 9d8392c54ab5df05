"""What the model thought of a token that was drawn."""

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities. logprob: of the token itself. top: the likeliest tokens, the best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def encode(self) -> str:
        """JSON `[logprob, [[token, logprob], …]]`, as it stands in the token log."""
        top = [[token, round(logprob, 4)] for token, logprob in self.top]
        return json.dumps([round(self.logprob, 4), top], separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "TokenLogprobs":
        logprob, top = json.loads(text)
        return cls(logprob, tuple((token, value) for token, value in top))
