"""What is asked: requests one after the other, the same ones for the same seed."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from bench.errors import Unfit
from bench.lengths import Draw
from bench.prompts import Prompts

TRIES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    prompt: str
    prompt_tokens: int  # as our tokenizer counts them
    output_tokens: int


def random_words(prompts: Prompts, prompt: Draw, output: Draw, random: Random, longest: int) -> Iterator[Request]:
    """Without end. Lengths that are more than `longest` together are drawn anew. Raises Unfit."""
    while True:
        tokens, answer = _fitting(prompt, output, random, longest)
        yield Request(prompt=prompts.of(tokens), prompt_tokens=tokens, output_tokens=answer)


def _fitting(prompt: Draw, output: Draw, random: Random, longest: int) -> tuple[int, int]:
    for _ in range(TRIES):
        drawn = prompt(random), output(random)
        if sum(drawn) <= longest:
            return drawn
    raise Unfit("--longest", longest, f"prompt and answer are longer, as in {drawn[0]} + {drawn[1]} tokens")


def conversations(
    path: Path, tokenizer: Tokenizer, random: Random, longest: int, *, special: bool
) -> Iterator[Request]:
    """Of a file in ShareGPT's form, in random order: the first question, and an answer as long as the first one there.

    Each comes once, and those that are too long do not come. Raises Unfit for a file in another form."""
    pairs = _pairs(path)
    random.shuffle(pairs)
    for question, answer in pairs:
        prompt_tokens = len(tokenizer.encode(question, add_special_tokens=special).ids)
        output_tokens = len(tokenizer.encode(answer, add_special_tokens=False).ids)
        if prompt_tokens and output_tokens and prompt_tokens + output_tokens <= longest:
            yield Request(prompt=question, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def _pairs(path: Path) -> list[tuple[str, str]]:
    try:
        items = json.loads(path.read_bytes())
        if not isinstance(items, list):
            raise TypeError
        return [pair for item in items if (pair := _pair(item["conversations"]))]
    except OSError as error:
        raise Unfit("--sharegpt", path, f"cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        form = '[{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}]'
        raise Unfit("--sharegpt", path, f"must be JSON in the form {form}") from None


def _pair(turns: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
    """None, if it does not begin with a question and its answer."""
    if [turn["from"] for turn in turns[:2]] not in (["human", "gpt"], ["user", "assistant"]):
        return None
    return str(turns[0]["value"]), str(turns[1]["value"])


def take(workload: Iterable[Request], count: int) -> list[Request]:
    """Raises Unfit if there are not so many."""
    taken = list(islice(workload, count))
    if len(taken) < count:
        raise Unfit(
            "--sharegpt", f"has only {len(taken)}", f"{count} requests more were needed: all differ; ask for fewer"
        )
    return taken
