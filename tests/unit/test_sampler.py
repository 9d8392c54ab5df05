"""What is drawn, against transformers' own processors and torch: another program's reading of the same parameters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.constraint import Constraint, Matcher
from pipeline.errors import DeviceError
from pipeline.job import Job
from pipeline.model import SIM
from pipeline.sampling import SamplingParams, uniform
from pipeline.vocabulary import Vocabulary
from workers.devices import Logits
from workers.sampler import LEAST_LOGPROB, Sampler

VOCAB, EOS, STOP = 257, 256, 35
VOCABULARY = Vocabulary(Tokenizer.from_file(str(SIM / "tokenizer.json")), {EOS})
JOB = Job(prompt=(5, 6, 7, 5), max_tokens=100, sampling=SamplingParams(seed=11))
SAID = [9, 6, 9, 9, 40]

PARAMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "min_p": {"min_p": 0.08},
    "min_p and temperature": {"min_p": 0.2, "temperature": 1.7},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.7},
    "presence": {"presence_penalty": 1.3},
    "frequency": {"frequency_penalty": -0.9},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": ((3, 4.5), (9, -100.0), (256, 2.0))},
    "greedy with all": {
        "temperature": 0.0,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 0.8,
        "logit_bias": ((100, 3.0),),
    },
    "all": {
        "temperature": 1.4,
        "min_p": 0.02,
        "top_k": 40,
        "top_p": 0.9,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": ((3, 2.5), (9, 1.0)),
    },
}


def logits_of(seed: int, vocabulary: int = VOCAB) -> Logits:
    """Read only: nobody may change what belongs to the device."""
    logits = np.random.default_rng(seed).normal(0, 2, vocabulary).astype(np.float32)
    logits.flags.writeable = False
    return logits


def asking(**params: Any) -> Job:
    return replace(JOB, sampling=SamplingParams(**{"seed": 11, **params}))


def reference(logits: Logits, job: Job, said: Sequence[int]) -> int:
    params, scores = job.sampling, torch.tensor(np.array(logits), dtype=torch.float64)[None]
    for token, bias in params.logit_bias:
        scores[0, token] += bias
    seen = torch.tensor([[*job.prompt, *said]])
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, scores)
    times = torch.bincount(torch.tensor(said, dtype=torch.long), minlength=len(logits))
    scores = scores - params.frequency_penalty * times - params.presence_penalty * (times > 0)
    if params.temperature == 0:
        return int(scores.argmax())
    warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)] if params.temperature != 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    for warper in warpers:
        scores = warper(seen, scores)
    cumulative = scores.softmax(-1)[0].cumsum(0).numpy()
    return int(np.searchsorted(cumulative, uniform(params.seed, len(said)) * cumulative[-1], side="right"))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_what_is_drawn_is_what_transformers_processors_leave(params: dict[str, Any]) -> None:
    drawn, expected = [], []
    for seed in range(200):
        job, logits = asking(**params, seed=seed), logits_of(seed)
        drawn.append(Sampler(job, eos={EOS}, tokens=SAID).draw(logits).token)
        expected.append(reference(logits, job, SAID))
    assert drawn == expected


@pytest.mark.parametrize("name", ["presence", "frequency", "repetition", "bias"])
def test_each_of_these_changes_what_is_drawn(name: str) -> None:
    """Or the comparison above would compare nothing."""
    plain = [Sampler(asking(seed=n), eos={EOS}, tokens=SAID).draw(logits_of(n)).token for n in range(200)]
    other = [
        Sampler(asking(seed=n, **PARAMS[name]), eos={EOS}, tokens=SAID).draw(logits_of(n)).token for n in range(200)
    ]
    assert plain != other


def test_only_repetition_counts_the_prompt() -> None:
    flat = np.zeros(VOCAB, dtype=np.float32)
    flat[[5, 200]] = [2.0, 1.9]  # 5 stands in the prompt, twice
    greedy = {"temperature": 0.0}
    assert Sampler(asking(**greedy, presence_penalty=2, frequency_penalty=2), eos={EOS}).draw(flat).token == 5
    assert Sampler(asking(**greedy, repetition_penalty=1.2), eos={EOS}).draw(flat).token == 200
    sampler = Sampler(asking(**greedy, presence_penalty=0.05, frequency_penalty=0.02), eos={EOS})
    # 5 at 2.0 wins, then at 1.93 … then at 1.91, and then at 1.89
    assert [sampler.draw(flat).token for _ in range(5)] == [5, 5, 5, 200, 5]


def test_before_min_tokens_neither_eos_nor_stop_tokens_are_drawn() -> None:
    ends = [EOS, STOP]
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[ends] = 20.0
    job = replace(JOB, min_tokens=3, stop_tokens=(STOP,))
    ban = MinNewTokensLengthLogitsProcessor(len(JOB.prompt), job.min_tokens, ends)
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_p=0.1)):
        sampler = Sampler(replace(job, sampling=params), eos={EOS})
        said: list[int] = []
        for _ in range(5):
            scores = ban(torch.tensor([[*JOB.prompt, *said]]), torch.tensor(logits)[None])
            allowed = {int(token) for token in torch.isfinite(scores[0]).nonzero()}
            said.append(sampler.draw(logits).token)
            assert said[-1] in allowed
        assert set(said[:3]).isdisjoint(ends)
        assert set(said[3:]) <= set(ends)


@pytest.mark.parametrize("top", [0, 1, 5, VOCAB, 1000])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_logprobs_are_those_of_the_model_whatever_else_is_asked_for(top: int, params: dict[str, Any]) -> None:
    for seed in range(5):
        logits = logits_of(seed)
        drawn = Sampler(replace(asking(**params), logprobs=top), eos={EOS}, tokens=SAID).draw(logits)
        expected = torch.log_softmax(torch.tensor(np.array(logits), dtype=torch.float64), 0)
        assert drawn.logprobs is not None
        assert drawn.logprobs.logprob == pytest.approx(float(expected[drawn.token]), abs=2e-6)
        values, tokens = expected.topk(min(top, VOCAB))
        assert [token for token, _ in drawn.logprobs.top] == tokens.tolist()
        assert [logprob for _, logprob in drawn.logprobs.top] == pytest.approx(values.tolist(), abs=2e-6)


def test_without_being_asked_for_there_are_no_logprobs() -> None:
    assert Sampler(JOB, eos={EOS}).draw(logits_of(1)).logprobs is None


def test_what_is_impossible_has_a_logprob_that_json_can_say() -> None:
    logits = np.full(VOCAB, -np.inf, dtype=np.float32)
    logits[7] = 1.0
    logprobs = Sampler(replace(JOB, logprobs=2), eos={EOS}).draw(logits).logprobs
    assert logprobs is not None
    assert logprobs.top[0] == (7, 0.0)
    assert logprobs.top[1][1] == LEAST_LOGPROB
    assert "Inf" not in logprobs.encode()


EVERYTHING = replace(
    asking(**PARAMS["all"]),
    min_tokens=4,
    stop_tokens=(STOP,),
    logprobs=3,
    constraint=Constraint(
        "json_schema", '{"type":"array","items":{"type":"string","maxLength":6},"minItems":3,"maxItems":4}'
    ),
)


def test_a_job_that_is_replayed_from_any_index_draws_the_same_with_every_parameter() -> None:
    """Without the tokens so far in penalties, counts and matcher, a job that changes worker would say something else."""

    def sampler(tokens: Sequence[int]) -> Sampler:
        matcher = Matcher(EVERYTHING.constraint, VOCABULARY, tokens) if EVERYTHING.constraint else None
        return Sampler(EVERYTHING, eos={EOS}, tokens=tokens, matcher=matcher)

    whole, tokens, drawn = sampler(()), [], []
    while EOS not in tokens:
        drawn.append(whole.draw(logits_of(len(tokens))))
        tokens.append(drawn[-1].token)
    assert len(tokens) > 10
    for done in range(len(tokens)):
        again = sampler(tokens[:done])
        assert [again.draw(logits_of(index)) for index in range(done, len(tokens))] == drawn[done:]


def test_a_token_that_the_constraint_leaves_alone_comes_before_min_tokens_too() -> None:
    """There must be a token. Without the exception no logits would be left to draw from."""
    constraint = Constraint("choice", '["ab"]')
    job = replace(JOB, min_tokens=10, constraint=constraint)
    sampler = Sampler(job, eos={EOS}, matcher=Matcher(constraint, VOCABULARY))
    assert [sampler.draw(logits_of(index)).token for index in range(3)] == [97, 98, EOS]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("job", [JOB, asking(temperature=0.0), asking(**PARAMS["all"]), replace(JOB, min_tokens=3)])
def test_logits_that_are_no_numbers_are_an_error(value: float, job: Job) -> None:
    logits = np.array(logits_of(1))
    logits[EOS] = value  # which min_tokens leaves out
    with pytest.raises(DeviceError, match="not finite"):
        Sampler(job, eos={EOS}).draw(logits)
