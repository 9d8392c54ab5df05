"""What `kvrelay bench` asks: of an exact length under any tokenizer, and the same again for the same seed."""

import json
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bench.errors import Unfit
from bench.lengths import lengths
from bench.prompts import Prompts
from bench.workload import Request, conversations, random_words, take
from pipeline.model import SIM

TEXT = (Path(__file__).parents[2] / "README.md").read_text()


def bytes_alone() -> Tokenizer:
    return Tokenizer.from_file(str(SIM / "tokenizer.json"))


def with_words() -> Tokenizer:
    """As most models have it; each text begins with a token of its own."""
    tokenizer = across_words(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def across_words(splitter: pre_tokenizers.PreTokenizer | None = None) -> Tokenizer:
    """Its tokens may be two words together, so two words may be one token."""
    tokenizer = Tokenizer(models.BPE())
    if splitter:
        tokenizer.pre_tokenizer = splitter
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=["<s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return tokenizer


def prompts(tokenizer: Tokenizer, seed: int = 1, **options: int) -> Prompts:
    return Prompts(tokenizer, Random(seed), special=True, **options)


def requests(seed: int, longest: int = 100) -> list[Request]:
    drawn = lengths("--prompt", "uniform:5-60"), lengths("--output", "lognormal:8,1")
    return take(random_words(prompts(bytes_alone(), seed), *drawn, Random(seed), longest), 40)


@pytest.mark.parametrize("make", [bytes_alone, with_words, across_words])
def test_prompts_have_just_the_length_that_was_asked_for(make: "type[Tokenizer]") -> None:
    """Without another look at the text, words that become other tokens when they meet would make it longer or shorter."""
    tokenizer = make()
    made = prompts(tokenizer)
    for length in (2, 3, 17, 128, 1500):
        assert len(tokenizer.encode(made.of(length)).ids) == length


def test_a_tokenizer_that_joins_words_needs_the_second_look() -> None:
    """That the test above can fail."""
    tokenizer = across_words()
    made = prompts(tokenizer)
    joined = "".join(Random(1).choices(made._words, k=300))
    assert len(tokenizer.encode(joined).ids) != 300


def test_a_seed_says_everything_and_another_one_says_something_else() -> None:
    assert requests(1) == requests(1)
    assert {request.prompt for request in requests(1)}.isdisjoint(request.prompt for request in requests(2))


def test_no_two_prompts_begin_alike_unless_they_are_to() -> None:
    made = prompts(with_words())
    assert len({made.of(60)[:40] for _ in range(50)}) == 50
    tokenizer = with_words()
    made = prompts(tokenizer, shared=20)
    texts = [made.of(60) for _ in range(50)]
    assert len({tuple(tokenizer.encode(text).ids[:20]) for text in texts}) == 1
    assert len({tuple(tokenizer.encode(text).ids[20:40]) for text in texts}) == 50
    assert {len(tokenizer.encode(text).ids) for text in texts} == {60}
    with pytest.raises(Unfit, match="--shared-prefix 20: a prompt of 20 tokens has no room for it"):
        made.of(20)


def test_lengths_are_of_their_distribution() -> None:
    random = Random(1)
    assert [lengths("--prompt", "7")(random) for _ in range(3)] == [7, 7, 7]
    uniform = [lengths("--prompt", "uniform:3-6")(random) for _ in range(400)]
    assert set(uniform) == {3, 4, 5, 6}
    lognormal = [lengths("--prompt", "lognormal:100,0.5")(random) for _ in range(4000)]
    assert 95 < median(lognormal) < 105
    assert 0.45 < sum(abs(n - 100) < 35 for n in lognormal) / 4000 < 0.55  # ±0.67 σ holds the half


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "uniform:9-3", "uniform:0-3", "lognormal:100", "lognormal:5,9", "many"]
)
def test_a_length_that_is_none_is_refused_with_what_would_do(text: str) -> None:
    with pytest.raises(Unfit, match=r"^--output .*: must be a number as in 128, or uniform:64-256"):
        lengths("--output", text)


def test_what_is_longer_than_the_longest_is_not_asked() -> None:
    assert max(request.prompt_tokens + request.output_tokens for request in requests(1, longest=50)) <= 50
    with pytest.raises(Unfit, match=r"--longest 4: prompt and answer are longer"):
        requests(1, longest=4)


def sharegpt(folder: Path, *conversations: list[tuple[str, str]]) -> Path:
    items = [{"id": "x", "conversations": [{"from": who, "value": said} for who, said in it]} for it in conversations]
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(items))
    return path


def test_conversations_are_first_questions_with_the_length_of_their_answers(tmp_path: Path) -> None:
    path = sharegpt(
        tmp_path,
        [("human", "abc"), ("gpt", "defgh"), ("human", "no")],
        [("user", "ab"), ("assistant", "x")],
        [("gpt", "nobody asked"), ("human", "?")],
        [("human", "never answered")],
        [("human", "a" * 90), ("gpt", "b" * 11)],
        [("human", ""), ("gpt", "b")],
    )

    def read(seed: int) -> list[Request]:
        return list(conversations(path, bytes_alone(), Random(seed), 100, special=True))

    assert sorted((it.prompt, it.prompt_tokens, it.output_tokens) for it in read(1)) == [("ab", 2, 1), ("abc", 3, 5)]
    assert {it.prompt for it in islice(read(1), 1)} == {it.prompt for it in islice(read(1), 1)}
    assert len({read(seed)[0].prompt for seed in range(20)}) == 2
    with pytest.raises(Unfit, match="has only 2: 3 requests more were needed"):
        take(read(1), 3)


@pytest.mark.parametrize("content", ["no JSON", "{}", "7", '[{"text": "x"}]', '[{"conversations": [1, 2]}]', None])
def test_a_file_of_another_form_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(Unfit, match=f"^--sharegpt {path}: (must be JSON in the form|cannot be read)"):
        list(conversations(path, bytes_alone(), Random(1), 100, special=True))
