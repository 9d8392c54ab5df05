"""From token ids to text that may be shown: whole characters, and never a stop string or a part of one.

`decode(ids) -> str` is injected, so nothing here knows a tokenizer. Its state is a function of the tokens alone: a
worker that takes over a job feeds it the tokens so far and is where the other one was.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

#: What a decoder shows for bytes that are not (yet) a character.
HALF = "\ufffd"
#: An unfinished UTF-8 character has at most 3 bytes, and some decoders show one HALF for each.
HALVES = 3
PROMPT_TAIL = 32  # tokens of a prompt among which the end of its text is looked for


class Detokenizer:
    """Turns ids into text one at a time.

    Decoding only the newest ids would lose what depends on their neighbours (a leading space, bytes of one character),
    so each step decodes a short window twice, without and with the new id, and takes the difference.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        """`prompt`: its end is the first neighbour, or a tokenizer that strips a leading space would join two words."""
        self._decode = decode
        self._window = _text_end(decode, prompt)  # ids whose text is out, then ids whose text may not be
        self._settled = len(self._window)  # how many of the window are of the first kind
        self._shown = 0  # how many characters of the second kind are out already

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        self._window.append(token)
        before = self._decode(self._window[: self._settled])
        text = self._decode(self._window)[len(before) :]
        halves = len(text) - len(text.rstrip(HALF))
        if halves:
            if len(self._window) - self._settled <= HALVES:
                return ""  # it may be one character, and a decoder may show all its neighbours as halves meanwhile
            new = text[self._shown : len(text) - min(HALVES, halves)]
            self._shown += len(new)
        else:
            new = text[self._shown :]
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._shown = 0
        return new


def _text_end(decode: Decode, prompt: Sequence[int]) -> list[int]:
    """The last ids that are whole characters; [] if the prompt ends within one, or in no text at all."""
    for count in range(1, min(PROMPT_TAIL, len(prompt)) + 1):
        tail = list(prompt[-count:])
        text = decode(tail)
        if text and HALF not in text:
            return tail
    return []


class StopMatcher:
    """Holds back the end of the text while it could still become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, a stop string is complete). The earliest match ends the text, before itself."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """The text came to an end: what was held back was no stop string after all."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """The longest end of the held text that is a beginning of `stop`."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0


class TextStream:
    """Detokenizer and stop matcher of one job."""

    def __init__(
        self,
        decode: Decode,
        *,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        tokens: Sequence[int] = (),
    ) -> None:
        """`tokens`: what the job has produced already; their text is out."""
        self._detokenizer = Detokenizer(decode, prompt)
        self._matcher = StopMatcher(stops)
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> tuple[str, bool]:
        """(text that may be shown, a stop string is complete)."""
        return self._matcher.push(self._detokenizer.push(token))

    def flush(self) -> str:
        return self._matcher.flush()
