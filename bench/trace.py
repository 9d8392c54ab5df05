"""What one request took, as its client saw it."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Trace:
    """All times in seconds, of time.perf_counter.

    due: when it was to be sent. What it waits beyond that counts: a client that falls behind hides nothing of a slow
    server (no coordinated omission). chunks: when each piece of text came; it may be several tokens."""

    due: float
    sent: float
    asked: int  # tokens of the answer
    prompt_tokens: int
    chunks: list[float] = field(default_factory=list)
    end: float = 0.0
    tokens: int = 0
    failure: str = ""  # its kind; '' for an answer that came whole
    said: str = ""  # the server's or the system's words about it

    @property
    def ttft(self) -> float:
        return self.first - self.due

    @property
    def first(self) -> float:
        """An answer without text has its first token when it is over."""
        return self.chunks[0] if self.chunks else self.end

    @property
    def gaps(self) -> list[float]:
        """Between one piece of text and the next."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Of each token after the first."""
        return (self.end - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def e2e(self) -> float:
        return self.end - self.due
