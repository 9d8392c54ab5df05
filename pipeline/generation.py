"""What a job has produced so far, and when it is over. The same for the first token and for all others."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from pipeline.job import Job
from pipeline.logprobs import TokenLogprobs
from pipeline.text import Decode, TextStream


@dataclass(frozen=True, slots=True)
class Emission:
    """One token as it goes to the log. end: "stop", "length", or None while the job goes on."""

    token: int
    text: str
    end: str | None
    logprobs: TokenLogprobs | None = None

    @property
    def entry(self) -> tuple[int, str, str]:
        """Token, text, and logprobs as text, '' if none were asked for."""
        return self.token, self.text, self.logprobs.encode() if self.logprobs else ""


class Generation:
    """Decides the end: end-of-text or stop token, stop string (also across tokens), length. Later workers replay `tokens`.

    The sampler draws no end-of-text or stop token among the first `min_tokens`. If one comes there, then because the job's
    constraint allows nothing else; and the end of what a constraint asks for is the end, also where EOS is ignored.
    """

    def __init__(self, job: Job, *, eos: Set[int], decode: Decode, tokens: Sequence[int] = ()) -> None:
        self.job = job
        self.tokens = list(tokens)
        ignored = job.ignore_eos and job.constraint is None
        self._ends = {*job.stop_tokens, *(() if ignored else eos)}
        self._text = TextStream(
            decode,
            prompt=job.prompt,
            stops=job.stop,
            include_stop=job.include_stop,
            min_tokens=job.min_tokens,
            tokens=tokens,
        )

    @property
    def index(self) -> int:
        """Of the next token; what its random number is drawn by."""
        return len(self.tokens)

    def accept(self, token: int, logprobs: TokenLogprobs | None = None) -> Emission:
        """The next token was drawn. One that ends the text counts, but has no text itself."""
        self.tokens.append(token)
        if token in self._ends:
            return Emission(token, self._text.flush(), "stop", logprobs)
        text, stopped = self._text.push(token)
        if stopped:
            return Emission(token, text, "stop", logprobs)
        if len(self.tokens) >= self.job.max_tokens:
            return Emission(token, text + self._text.flush(), "length", logprobs)
        return Emission(token, text, None, logprobs)
