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


def overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is a beginning of `stop`, and not all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class StopMatcher:
    """Holds back the end of the text while it could still become a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """include: a stop string is shown, too."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, early: bool = False) -> tuple[str, bool]:
        """(text that may be shown, a stop string is complete). The earliest match ends the text, before itself.

        early: a stop string that becomes complete in `text` does not count.
        """
        before = len(self._held)
        self._held += text
        found = [] if early else [match for stop in self._stops if (match := self._find(stop, before))]
        if found:
            start, end = min(found)
            shown, self._held = self._held[: end if self._include else start], ""
            return shown, True
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """The text came to an end: what was held back was no stop string after all."""
        shown, self._held = self._held, ""
        return shown

    def _find(self, stop: str, before: int) -> tuple[int, int] | None:
        """Where it stands, if it ends beyond the first `before` characters: one that ended there came too early."""
        start = self._held.find(stop, max(0, before + 1 - len(stop)))
        return (start, start + len(stop)) if start >= 0 else None


class TextStream:
    """Detokenizer and stop matcher of one job."""

    def __init__(
        self,
        decode: Decode,
        *,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        tokens: Sequence[int] = (),
    ) -> None:
        """`tokens`: what the job has produced already; their text is out. Within the first `min_tokens` nothing stops it."""
        self._detokenizer = Detokenizer(decode, prompt)
        self._matcher = StopMatcher(stops, include=include_stop)
        self._early = min_tokens  # so many more
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> tuple[str, bool]:
        """(text that may be shown, a stop string is complete)."""
        early, self._early = self._early > 0, self._early - 1
        return self._matcher.push(self._detokenizer.push(token), early=early)

    def flush(self) -> str:
        return self._matcher.flush()
