"""What ends a text, and what it leaves of it. The tokenizer is that of `sim`: a token is a byte, 256 the end."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from pipeline.constraint import Constraint
from pipeline.generation import Emission, Generation
from pipeline.job import Job
from pipeline.logprobs import TokenLogprobs
from pipeline.model import SIM
from pipeline.sampling import SamplingParams

TOKENIZER = Tokenizer.from_file(str(SIM / "tokenizer.json"))
EOS, STOP = 256, ord("#")
JOB = Job(prompt=(65,), max_tokens=100, sampling=SamplingParams())


def decode(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True))


def run(text: str | bytes | list[int], **fields: Any) -> tuple[str, str | None, int]:
    """(text shown, finish reason, tokens taken) of a job that says this."""
    tokens = list(text.encode() if isinstance(text, str) else text)
    generation, shown = Generation(replace(JOB, **fields), eos={EOS}, decode=decode), ""
    for count, token in enumerate(tokens, 1):
        emission = generation.accept(token)
        shown += emission.text
        if emission.end:
            return shown, emission.end, count
    return shown, None, len(tokens)


def test_a_stop_token_ends_the_text_and_is_not_in_it() -> None:
    assert run("ab#c", stop_tokens=(STOP, 999)) == ("ab", "stop", 3)


def test_a_stop_token_ends_the_text_also_where_eos_is_ignored() -> None:
    tokens = [97, EOS, 98, STOP, 99]
    assert run(tokens, stop_tokens=(STOP,), ignore_eos=True) == ("ab", "stop", 4)


@pytest.mark.parametrize("end", [EOS, STOP])
def test_what_was_held_back_is_shown_when_a_token_ends_the_text(end: int) -> None:
    """Without the flush the beginning of a stop string that did not come would be lost."""
    assert run([*b"abEN", end], stop=("END",), stop_tokens=(STOP,)) == ("abEN", "stop", 5)


@pytest.mark.parametrize("stop", ["xy", "y", "€", "xyzxy", "한글"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_some_tokens_stays_in_the_text_if_it_is_to_be_included(stop: str, include: bool) -> None:
    text = f"abxéb{stop}cd"
    assert run(text, stop=(stop,), include_stop=include) == (
        f"abxéb{stop if include else ''}",
        "stop",
        len(f"abxéb{stop}".encode()),
    )


def test_of_two_stop_strings_that_begin_together_the_shorter_one_is_included() -> None:
    """It is what would have come first, had each letter been a token."""
    for stops in (("ab", "abc"), ("abc", "ab")):
        assert run("xabc", stop=stops, include_stop=True) == ("xab", "stop", 3)


@pytest.mark.parametrize("min_tokens", range(9))
def test_a_stop_string_ends_the_text_when_it_is_complete_after_min_tokens(min_tokens: int) -> None:
    """Complete with the third and with the seventh token. Without the guard in the matcher the first would always end it."""
    shown, end, count = run("a..b1..c", stop=("..",), min_tokens=min_tokens)
    if min_tokens < 3:
        assert (shown, end, count) == ("a", "stop", 3)
    elif min_tokens < 7:
        assert (shown, end, count) == ("a..b1", "stop", 7)
    else:
        assert (shown, end, count) == ("a..b1..c", None, 8)


def test_a_stop_string_that_was_complete_too_early_is_not_found_later_in_what_is_held_back() -> None:
    """ "cd" is held as the middle of "bcde". Without the look at where it ends it would be found with the next token."""
    assert run("abcdx", stop=("bcde", "cd"), min_tokens=4) == ("abcdx", None, 5)
    assert run("abcde", stop=("bcde", "cd"), min_tokens=4) == ("a", "stop", 5)


def test_a_worker_that_takes_over_counts_min_tokens_from_the_beginning() -> None:
    job = replace(JOB, stop=("..",), min_tokens=4)
    tokens = list(b"a..b..c")
    for done in range(6):
        generation = Generation(job, eos={EOS}, decode=decode, tokens=tokens[:done])
        ends = [generation.accept(token).end for token in tokens[done:6]]
        assert ends == [*[None] * (5 - done), "stop"]


def test_the_end_of_what_a_constraint_asks_for_is_the_end_also_where_eos_is_ignored() -> None:
    """Nothing else may come. Without the exception the job would say EOS until max_tokens."""
    constraint = Constraint("regex", "ab")
    assert run([97, 98, EOS, EOS], ignore_eos=True, constraint=constraint) == ("ab", "stop", 3)


@pytest.mark.parametrize(("token", "end"), [(97, None), (EOS, "stop"), (STOP, "stop"), (ord("."), "stop")])
def test_logprobs_go_with_their_token_however_it_ends(token: int, end: str | None) -> None:
    generation = Generation(replace(JOB, stop=(".",), stop_tokens=(STOP,)), eos={EOS}, decode=decode)
    logprobs = TokenLogprobs(-0.25, ((3, -0.25),))
    emission = generation.accept(token, logprobs)
    assert (emission.end, emission.logprobs) == (end, logprobs)
    assert emission.entry == (token, emission.text, "[-0.25,[[3,-0.25]]]")
    assert Emission(1, "x", None).entry == (1, "x", "")


def test_logprobs_are_read_as_they_were_written_to_four_decimals() -> None:
    logprobs = TokenLogprobs(-1.23456789, ((7, -0.00004), (9, -9999.0)))
    assert TokenLogprobs.decode(logprobs.encode()) == TokenLogprobs(-1.2346, ((7, -0.0), (9, -9999.0)))
    assert TokenLogprobs.decode(TokenLogprobs(-1.0).encode()) == TokenLogprobs(-1.0)
