"""Server-sent events, as far as OpenAI's streams use them: the data of each event."""

from collections.abc import Iterator


class Events:
    """Takes bytes as they come. Comments, names and ids of events are nobody's token and passed over."""

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._data: list[bytes] = []  # of an event that has not

    def feed(self, raw: bytes) -> Iterator[bytes]:
        """The data of the events that are now whole."""
        *lines, self._rest = (self._rest + raw).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
