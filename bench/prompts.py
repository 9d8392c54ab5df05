"""Prompts of an exact number of tokens, of random words: each is another one, so no prefix cache knows it."""

from collections.abc import Sequence
from itertools import islice
from random import Random

from tokenizers import Tokenizer

from bench.errors import Unfit

WORDS = 4096  # the commonest; as many make two prompts that begin alike unlikely
LEAST_WORDS = 16
TRIES = 100


class Prompts:
    """special: the tokens that the tokenizer adds to a text (Gemma's <bos>) count, as they do in /v1/completions.

    shared: so many tokens at the beginning are the same in all of them."""

    def __init__(self, tokenizer: Tokenizer, random: Random, *, special: bool, shared: int = 0) -> None:
        self._tokenizer = tokenizer
        self._random = random
        self._special = special
        self._shared = shared
        self._words = words(tokenizer)
        self._head = self._exactly(shared, []) if shared else []

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=self._special).ids)

    def of(self, tokens: int) -> str:
        """Raises Unfit for a number that is no prompt's."""
        if tokens <= self._shared:
            raise Unfit("--shared-prefix", self._shared, f"a prompt of {tokens} tokens has no room for it")
        return "".join(self._head + self._exactly(tokens, self._head))

    def _exactly(self, tokens: int, head: Sequence[str]) -> list[str]:
        """Words after the head, so that all together are so many tokens. Mostly at the first try, for each word is one."""
        tail: list[str] = []
        for _ in range(TRIES):
            missing = tokens - self.count("".join([*head, *tail]))
            if not missing and (head or tail):
                return tail
            if missing > 0:
                tail += self._random.choices(self._words, k=missing)
            else:
                del tail[missing:]
        raise Unfit("--prompt", tokens, "no text has just so many tokens with this tokenizer; more would do")


def words(tokenizer: Tokenizer) -> list[str]:
    """What is one token, with a space before it; of a tokenizer without such words, single letters."""
    texts = (tokenizer.decode([token]).strip() for token in range(tokenizer.get_vocab_size()))
    plain = list(islice(dict.fromkeys(text for text in texts if text.isascii() and text.isalpha()), 8 * WORDS))
    for before in (" ", ""):
        spelled = [before + word for word in plain]
        encoded = tokenizer.encode_batch(spelled, add_special_tokens=False)
        found = [word for word, tokens in zip(spelled, encoded, strict=True) if len(tokens.ids) == 1]
        if len(found) >= LEAST_WORDS:
            return found[:WORDS]
    raise Unfit("--tokenizer", f"of {tokenizer.get_vocab_size()} tokens", "has no words to make prompts of")
