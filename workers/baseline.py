"""``python -m workers baseline``: what transformers' plain `generate` answers, for `kvrelay validate` to compare with.

Greedy, in float32, on the CPU, one prompt after the other, until the model ends the text or `--tokens` are there. Nothing
of kvrelay's own caches, batches or samplers takes part.
"""

import json
import random
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.errors import ConfigError, DeviceError
from pipeline.model import Model
from workers.digest import model_digest
from workers.versions import versions

try:
    import torch
    from transformers import AutoTokenizer, GenerationConfig

    from workers.devices.family import load_weights, text_config
except ImportError as error:
    raise DeviceError(f"a baseline needs torch and transformers ({error}): pip install 'kvrelay[cpu]'") from None

#: Prompt tokens, four prompts of each length.
LENGTHS = {
    "short": (23, 63, 103, 143),
    "medium": (1526, 1565, 1604, 1643),
    "long": (6026, 6160, 6294, 6428),
}
ENDING = 2  # of each four, the last ones: prompts whose answers the model should end itself
RANDOM_TRIES = 64  # of random prompts, until one ends by EOS

#: Drawn in a random order, each under a running number, so that no prompt repeats itself.
SENTENCES = (
    "A ferry leaves the harbour before sunrise, and the gulls follow it as far as the lighthouse.",
    "The baker weighs the flour twice, because the old scale has been wrong since the spring.",
    "비가 그친 뒤에 아이들은 골목으로 나와 종이배를 띄웠다.",
    "Whoever mends clocks for a living learns that most of them are only dusty.",
    "Between the two villages runs a road that nobody has measured, although everybody knows how long it takes.",
    "할머니는 감나무 아래에서 편지를 읽고 다시 접어 주머니에 넣었다.",
    "The library keeps a list of the books that came back wet, with the name of each river.",
    "In the upper field they grow barley, in the lower one nothing at all, and both are called the garden.",
    "기차가 늦게 왔지만 역무원은 시계를 보지 않고 호루라기를 불었다.",
    "She sold the blue boat in March and bought it back in October from the same man.",
    "A surveyor wrote 417 paces in his notebook and then crossed out the seven.",
    "산 너머 마을에서는 눈이 오면 먼저 우물까지 길을 낸다.",
    "When the bridge was closed, the postman learned to row, and the letters smelled of tar.",
    "The orchestra rehearses on Tuesdays in the fire station, between the hoses and the bell.",
)

#: Put after such a text, as a user's message; the first whose answer the model ends within the tokens allowed is taken.
QUESTIONS = (
    "What is the capital of France? Answer with one word.",
    "Is ice colder than steam? Answer only yes or no.",
    "Forget the text above. What is the capital of France?",
    "What is 2 + 2?",
)
_MARK = "<<<text>>>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One prompt and what was generated, as token ids. finish_reason: stop (the last token is EOS) or length. margin: the
    least lead of a step's best logit over its second; about 1e-4 and below, another order of additions may turn it."""

    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    margin: float


def write_baseline(
    config: Config, model: Model, out: Path, *, lengths: Sequence[str], tokens: int, random_ids: bool
) -> None:
    """Writes a baseline of the model, as JSON, to `out`.

    lengths: names of LENGTHS. tokens: new ones for each prompt, at most. random_ids: prompts of random token ids, for a
    model with random weights, rather than of text. Raises ConfigError for lengths that KVR_CONTEXT cannot hold, DeviceError
    for a model that cannot be loaded or a file that cannot be written.
    """
    if unknown := set(lengths) - LENGTHS.keys():
        raise ConfigError("--lengths", ",".join(lengths), f"has {min(unknown)!r}; there are {', '.join(LENGTHS)}")
    longest = max(length for name in lengths for length in LENGTHS[name])
    if longest + tokens > config.context:
        raise ConfigError("KVR_CONTEXT", config.context, f"{longest} prompt tokens with {tokens} more do not fit")
    hf = text_config(model, config)
    generator = Generator(model, tokens)
    prompts = RandomPrompts(hf.vocab_size, generator.eos) if random_ids else TextPrompts(model)
    answers: dict[str, list[Answer]] = {}
    for name in lengths:
        answers[name] = []
        for number, length in enumerate(LENGTHS[name]):
            ending = number >= len(LENGTHS[name]) - ENDING
            answer = generator.ending(prompts.ending(length)) if ending else generator.answer(prompts.plain(length))
            answers[name].append(answer)
            print(
                f"{name:7}{length:5} tokens: {len(answer.tokens)} more, {answer.finish_reason}, margin {answer.margin}",
                flush=True,
            )
    baseline = {
        "model": config.name,
        "digest": model_digest(model.directory, config),
        "dtype": "float32",
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "workers", *sys.argv[1:]]),
        "max_tokens": tokens,
        "eos": sorted(generator.eos),
        "prompts": "random token ids" if random_ids else "text",
        "ended_by_eos": {
            name: [len(answer.prompt) for answer in of if answer.finish_reason == "stop"]
            for name, of in answers.items()
        },
        "lengths": {name: [asdict(answer) for answer in of] for name, of in answers.items()},
    }
    try:
        out.write_text(json.dumps(baseline) + "\n", encoding="utf-8")
    except OSError as error:
        raise DeviceError(f"the baseline cannot be written: {error}") from None


class Generator:
    """transformers' `generate`, greedy."""

    def __init__(self, model: Model, tokens: int) -> None:
        self._network = load_weights(model, torch.float32, "sdpa")
        own = self._network.generation_config.eos_token_id
        self.eos = frozenset([] if own is None else own if isinstance(own, list) else [own])
        # a new one, not the model's with changes: penalties in there would change the answer, and no job has them
        self._network.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=sorted(self.eos) or None,
            pad_token_id=min(self.eos, default=0),  # of a batch of one it fills nothing
            output_logits=True,
            return_dict_in_generate=True,
        )

    def answer(self, prompt: list[int]) -> Answer:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = torch.tensor([prompt])
            out = self._network.generate(ids, attention_mask=torch.ones_like(ids))  # all of it, whatever fills a batch
        tokens = out.sequences[0, len(prompt) :].tolist()
        best = torch.cat(out.logits).topk(2).values
        return Answer(
            prompt=prompt,
            tokens=tokens,
            finish_reason="stop" if tokens[-1] in self.eos else "length",
            margin=float(f"{float((best[:, 0] - best[:, 1]).min()):.3g}"),
        )

    def ending(self, prompts: Iterator[list[int]]) -> Answer:
        """The first that the model ends itself, and not with its first token; the last of all if it ends none."""
        for prompt in prompts:
            answer = self.answer(prompt)
            if answer.finish_reason == "stop" and len(answer.tokens) > 1:
                break
        return answer


class TextPrompts:
    """Text, as the model's tokenizer and chat template write it; each prompt begins elsewhere."""

    def __init__(self, model: Model) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model.directory, local_files_only=True)
        self._chat = model.chat_template is not None

    def plain(self, length: int) -> list[int]:
        """With the special tokens that the tokenizer itself adds in front."""
        return self._encode(_text(length), special=True)[:length]

    def ending(self, length: int) -> Iterator[list[int]]:
        """A text of the right length and a question after it, in the chat template; just text where that has no room."""
        if self._chat:
            for question in QUESTIONS:
                message = {"role": "user", "content": f"{_MARK}\n\n{question}"}
                written = self._tokenizer.apply_chat_template(
                    [message],
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=False,  # a thought is longer than the tokens allowed; other templates ignore it
                )
                before, _, after = written.partition(_MARK)
                head, tail = self._encode(before), self._encode(after)
                if (room := length - len(head) - len(tail)) > 0:
                    yield [*head, *self._encode(_text(length))[:room], *tail]
        yield self.plain(length)

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))


class RandomPrompts:
    """Token ids from a fixed seed, the same on every machine."""

    def __init__(self, vocabulary: int, eos: frozenset[int]) -> None:
        self._ids = [token for token in range(vocabulary) if token not in eos]

    def plain(self, length: int) -> list[int]:
        return random.Random(length).choices(self._ids, k=length)

    def ending(self, length: int) -> Iterator[list[int]]:
        for number in range(RANDOM_TRIES):
            yield random.Random(f"{length} {number}").choices(self._ids, k=length)


def _text(tokens: int) -> str:
    """More than so many tokens of text, for each number another one."""
    order = random.Random(tokens)
    return " ".join(f"{tokens + number}. {order.choice(SENTENCES)}" for number in range(tokens // 10 + 10))
