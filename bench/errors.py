"""What ends a measurement before it has begun."""

from pipeline.errors import KVRelayError


class Unfit(KVRelayError):
    """An option that cannot work: names it, its value and what would do."""

    def __init__(self, option: str, value: object, remedy: str) -> None:
        super().__init__(f"{option} {value!s}: {remedy}")


class Away(KVRelayError):
    """Nobody answers at the URL, or nobody who speaks as OpenAI does."""
