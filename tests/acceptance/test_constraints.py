"""Answers that are held to something, over SmolLM2's vocabulary, by a model whose logits are chance.

Tokens are longer than the pieces of a grammar here, and begin and end anywhere in them.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.constraint import Constraint, Matcher
from pipeline.job import Job
from pipeline.model import Model
from pipeline.sampling import SamplingParams
from pipeline.vocabulary import Vocabulary
from tests.unit.test_constraint import CALCULATION, CHOICES, SCHEMA
from workers.devices import Logits
from workers.sampler import Sampler

VOCAB = 49_152
JOB = Job(prompt=(1,), max_tokens=300, sampling=SamplingParams(seed=3))


@dataclass
class Chance:
    tokenizer: Tokenizer
    vocabulary: Vocabulary

    def logits(self, seed: int) -> Iterator[Logits]:
        """Another draw for each token."""
        numbers = np.random.default_rng(seed)
        while True:
            yield numbers.standard_normal(VOCAB, dtype=np.float32) * 2

    def tokens(self, constraint: Constraint, seed: int) -> list[int]:
        sampler = Sampler(JOB, eos=self.vocabulary.eos, matcher=Matcher(constraint, self.vocabulary))
        said: list[int] = []
        for logits in self.logits(seed):
            said.append(sampler.draw(logits).token)
            if said[-1] in self.vocabulary.eos or len(said) == JOB.max_tokens:
                return said
        raise AssertionError

    def text(self, constraint: Constraint, seed: int) -> str | None:
        """None if it does not end in time."""
        *tokens, last = self.tokens(constraint, seed)
        return str(self.tokenizer.decode(tokens)) if last in self.vocabulary.eos else None


@pytest.fixture(scope="module")
def chance(smollm2: Path) -> Chance:
    model = Model(smollm2)
    tokenizer = Tokenizer.from_file(str(model.tokenizer_file))
    return Chance(tokenizer, Vocabulary(tokenizer, model.eos))


def test_json_of_a_schema_is_valid_in_a_hundred_of_a_hundred_tries(chance: Chance) -> None:
    validator = jsonschema_rs.validator_for(SCHEMA)
    for seed in range(100):
        text = chance.text(Constraint("json_schema", SCHEMA), seed)
        assert text is not None
        validator.validate(json.loads(text))


def test_json_objects_choices_expressions_and_grammars_are_kept_to(chance: Chance) -> None:
    pattern = r"[A-Z][a-z]{2,9} (costs|weighs) \d{1,4}(\.\d\d)? (EUR|kg)"
    said = set()
    for seed in range(40):
        said.add(chance.text(Constraint("choice", json.dumps(CHOICES)), seed))
        assert re.fullmatch(pattern, chance.text(Constraint("regex", pattern), seed) or "")
        if text := chance.text(Constraint("grammar", CALCULATION), seed):
            ast.parse(text, mode="eval")
        if text := chance.text(Constraint("json_object"), seed):
            assert isinstance(json.loads(text), dict)
    assert said <= set(CHOICES)
    assert len(said) > 5


@pytest.mark.parametrize("constraint", [Constraint("json_schema", SCHEMA), Constraint("grammar", CALCULATION)])
def test_a_worker_that_takes_over_in_the_middle_draws_what_the_first_one_would(
    chance: Chance, constraint: Constraint
) -> None:
    whole = max((chance.tokens(constraint, seed) for seed in range(5)), key=len)
    seed = next(seed for seed in range(5) if chance.tokens(constraint, seed) == whole)
    logits = [row for row, _ in zip(chance.logits(seed), whole, strict=False)]
    for done in range(len(whole)):
        matcher = Matcher(constraint, chance.vocabulary, whole[:done])
        sampler = Sampler(JOB, eos=chance.vocabulary.eos, tokens=whole[:done], matcher=matcher)
        assert sampler.draw(logits[done]).token == whole[done]
