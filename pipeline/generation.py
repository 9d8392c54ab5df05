"""What a job has produced so far, and when it is over. The same for the first token and for all others."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from pipeline.job import Job
from pipeline.text import Decode, TextStream


@dataclass(frozen=True, slots=True)
class Emission:
    """One token as it goes to the log. end: "stop", "length", or None while the job goes on."""

    token: int
    text: str
    end: str | None


class Generation:
    """Decides the end: end-of-text token, stop string (also across tokens), length. Later workers replay `tokens`."""

    def __init__(self, job: Job, *, eos: Set[int], decode: Decode, tokens: Sequence[int] = ()) -> None:
        self.job = job
        self.tokens = list(tokens)
        self._eos = frozenset() if job.ignore_eos else eos
        self._text = TextStream(decode, prompt=job.prompt, stops=job.stop, tokens=tokens)

    @property
    def index(self) -> int:
        """Of the next token; what its random number is drawn by."""
        return len(self.tokens)

    def accept(self, token: int) -> Emission:
        """The next token was drawn. An end-of-text token counts, but has no text."""
        self.tokens.append(token)
        if token in self._eos:
            return Emission(token, self._text.flush(), "stop")
        text, stopped = self._text.push(token)
        if stopped:
            return Emission(token, text, "stop")
        if len(self.tokens) >= self.job.max_tokens:
            return Emission(token, text + self._text.flush(), "length")
        return Emission(token, text, None)
