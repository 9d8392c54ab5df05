"""Answers that are held to something, by a model whose logits are chance. The vocabulary is that of `sim`: a token is a byte,
256 the end. SmolLM2's is in tests/acceptance."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.constraint import MESSAGE_LENGTH, SOURCE_LENGTH, Constraint, Matcher, check
from pipeline.errors import ConstraintError, InvalidRequest
from pipeline.job import Job
from pipeline.model import SIM
from pipeline.sampling import SamplingParams
from pipeline.vocabulary import Vocabulary
from workers.devices import Logits
from workers.sampler import Sampler

VOCAB, EOS = 257, 256
VOCABULARY = Vocabulary(Tokenizer.from_file(str(SIM / "tokenizer.json")), {EOS})
JOB = Job(prompt=(1,), max_tokens=2000, sampling=SamplingParams(seed=3))

SCHEMA = """{"type": "object", "properties": {
    "name": {"type": "string", "minLength": 1, "maxLength": 8},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"enum": ["red", "blue", 7, null]}, "maxItems": 4},
    "inner": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/point"}]}
  }, "required": ["name", "tags", "inner"], "additionalProperties": false,
  "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number", "minimum": -9, "maximum": 9}}, "required": ["x"],
                      "additionalProperties": false}}}"""
CALCULATION = """start: sum
sum: sum "+" product | product
product: product "*" atom | atom
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""


def chance(seed: int) -> Iterator[Logits]:
    """Another draw for each token."""
    numbers = np.random.default_rng(seed)
    while True:
        yield numbers.normal(0, 2, VOCAB).astype(np.float32)


def answer(constraint: Constraint, logits: Iterator[Logits], job: Job = JOB) -> bytes | None:
    """What is drawn, up to the end; None if there is none within max_tokens."""
    sampler = Sampler(job, eos={EOS}, matcher=Matcher(constraint, VOCABULARY))
    said = []
    for _ in range(job.max_tokens):
        said.append(sampler.draw(next(logits)).token)
        if said[-1] == EOS:
            return bytes(said[:-1])
    return None


def next_ones(constraint: Constraint, text: bytes) -> set[int]:
    """Which tokens may come after it."""
    mask = np.frombuffer(Matcher(constraint, VOCABULARY, list(text)).mask(), dtype=np.uint8)
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def test_json_of_a_schema_is_valid_in_a_hundred_of_a_hundred_tries() -> None:
    constraint = Constraint("json_schema", SCHEMA)
    validator = jsonschema_rs.validator_for(SCHEMA)
    for seed in range(100):
        text = answer(constraint, chance(seed))
        assert text is not None
        validator.validate(json.loads(text))


def test_a_json_object_is_one_whenever_it_ends() -> None:
    ended = [text for seed in range(60) if (text := answer(Constraint("json_object"), chance(seed))) is not None]
    assert len(ended) > 10
    assert all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize("schema", ['{"type":"array","items":{"type":"boolean"},"minItems":3,"maxItems":3}', SCHEMA])
@pytest.mark.parametrize("said", ["", ',"x-guidance":{"whitespace_pattern":"\\\\s*","lenient":true}}'])
def test_a_model_that_loves_white_space_gets_one_space_at_a_time(schema: str, said: str) -> None:
    """Without the pattern it would write spaces until max_tokens; and a schema cannot ask for more."""
    space = np.zeros(VOCAB, dtype=np.float32)
    space[[*b" \n\t\r"]] = 30
    logits = (logits + space for logits in chance(1))
    text = answer(Constraint("json_schema", schema[:-1] + said if said else schema), logits)
    assert text is not None
    outside = re.sub(rb'"(\\.|[^"\\])*"', b'""', text)
    assert b" " in outside
    assert not re.search(rb"\s\s|[\n\t\r]", outside)


def test_the_text_may_end_exactly_where_the_constraint_is_met() -> None:
    constraint = Constraint("regex", "ab{2,3}")
    assert next_ones(constraint, b"ab") == {ord("b")}
    assert next_ones(constraint, b"abb") == {ord("b"), EOS}
    assert next_ones(constraint, b"abbb") == {EOS}
    assert next_ones(Constraint("json_object"), b'{"a": 1}') == {EOS}


CHOICES = [
    "yes",
    "yes, but",
    "no",
    'quo"te',
    "back\\slash",
    "two\nlines\t",
    "tab\x01",
    "é한👍🏽",
    " a/b ",
    "{}[]()|.*+?^$",
]


def test_of_choices_each_is_said_as_it_stands_and_nothing_else() -> None:
    constraint = Constraint("choice", json.dumps(CHOICES))
    said = {answer(constraint, chance(seed)) for seed in range(300)}
    assert said == {choice.encode() for choice in CHOICES}


def test_of_thousands_of_choices_one_is_said() -> None:
    """As alternatives of a rule, and not of a regular expression, they would be too many for the library."""
    choices = [f"number {number}" for number in range(5000)]
    said = answer(Constraint("choice", json.dumps(choices)), chance(1))
    assert said is not None
    assert said.decode() in choices


@pytest.mark.parametrize(
    "pattern", [r"\d{3}-[a-f]{2,4}", r"(yes|no)( \w{1,5}){0,2}", r"[^a]{0,9}é", r"a?b/c\n", r"^a.c$"]
)
def test_an_answer_matches_its_regular_expression_as_a_whole(pattern: str) -> None:
    for seed in range(50):
        text = answer(Constraint("regex", pattern), chance(seed))
        assert text is not None
        assert re.fullmatch(pattern, text.decode())


def test_an_answer_is_a_text_of_its_grammar() -> None:
    ended = [text for seed in range(50) if (text := answer(Constraint("grammar", CALCULATION), chance(seed)))]
    assert len(ended) > 10
    for text in ended:
        assert set(text) <= set(b"0123456789+*()")
        ast.parse(text.decode(), mode="eval")


@pytest.mark.parametrize("constraint", [Constraint("json_schema", SCHEMA), Constraint("grammar", CALCULATION)])
def test_a_matcher_that_starts_in_the_middle_allows_what_the_first_one_did(constraint: Constraint) -> None:
    text = next(text for seed in range(99) if len(text := answer(constraint, chance(seed)) or b"") > 30)
    whole = Matcher(constraint, VOCABULARY)
    for index, token in enumerate([*text, EOS]):
        mask = whole.mask()
        assert Matcher(constraint, VOCABULARY, list(text[:index])).mask() == mask
        whole.accept(token)


def test_constraints_go_with_every_other_parameter() -> None:
    most = SamplingParams(temperature=1.5, top_p=0.8, top_k=20, min_p=0.01, presence_penalty=1, repetition_penalty=1.3)
    loves_the_end = SamplingParams(logit_bias=((EOS, 100.0), (65, 100.0)))
    validator = jsonschema_rs.validator_for(SCHEMA)
    for sampling in (most, replace(most, temperature=0), loves_the_end):
        job = replace(JOB, sampling=sampling, min_tokens=60, logprobs=2)
        text = answer(Constraint("json_schema", SCHEMA), chance(5), job)
        assert text is not None
        validator.validate(json.loads(text))


def test_a_constraint_that_becomes_too_hard_on_the_way_is_an_error() -> None:
    """Without a look at its state the library would allow the end alone, and half an answer look like a whole one."""
    grammar = "start: " + " | ".join(f'"x{number}"' for number in range(5000))
    with pytest.raises(ConstraintError, match="items"):
        answer(Constraint("grammar", grammar), chance(1))


def test_a_token_that_may_not_come_is_an_error() -> None:
    with pytest.raises(ConstraintError):
        Matcher(Constraint("regex", "ab"), VOCABULARY, [98])


GOOD = [
    Constraint("json_object"),
    Constraint("json_schema", SCHEMA),
    Constraint("json_schema", '{"oneOf": [{"type": "string"}, {"type": "integer"}]}'),
    Constraint("json_schema", "{}"),
    Constraint("regex", r"\w+@\w+\.com"),
    Constraint("choice", json.dumps(CHOICES)),
    Constraint("grammar", CALCULATION),
]
BAD = {
    "a schema that is no JSON": Constraint("json_schema", '{"type":'),
    "a schema that is no object": Constraint("json_schema", "[]"),
    "a keyword that is not supported": Constraint("json_schema", '{"not": {"type": "string"}}'),
    "one that is to be passed over": Constraint("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}'),
    "a type that there is not": Constraint("json_schema", '{"type": "text"}'),
    "a format that there is not": Constraint("json_schema", '{"type": "string", "format": "poem"}'),
    "a schema from elsewhere": Constraint("json_schema", '{"$ref": "http://localhost/schema"}'),
    "a schema that nothing meets": Constraint("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}'),
    "a schema that means itself": Constraint("json_schema", '{"$ref": "#"}'),
    "oneOf of two that overlap": Constraint("json_schema", '{"oneOf": [{"type": "number"}, {"type": "integer"}]}'),
    "nested without end": Constraint("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "half a surrogate pair": Constraint("json_schema", '{"const": "\ud800"}'),
    "a parenthesis too many": Constraint("regex", "a)"),
    "a look ahead": Constraint("regex", "a(?=b)"),
    "a backward reference": Constraint("regex", r"(a)\1"),
    "an expression that nothing meets": Constraint("regex", r"[^\s\S]"),
    "no choices": Constraint("choice", "[]"),
    "an empty choice": Constraint("choice", '["a", ""]'),
    "a choice that is no text": Constraint("choice", '["a", 1]'),
    "an empty grammar": Constraint("grammar", ""),
    "a grammar without a start": Constraint("grammar", 'begin: "a"'),
    "a rule that there is not": Constraint("grammar", "start: what"),
    "a grammar that is none": Constraint("grammar", "start: (("),
    "a token by its name": Constraint("grammar", "start: <|im_start|>"),
    "a grammar that is too long": Constraint("grammar", "//" + SOURCE_LENGTH * "x"),
    "another kind": Constraint("poem", "rhyming"),
}


@pytest.mark.parametrize("constraint", GOOD)
def test_what_can_be_met_is_accepted(constraint: Constraint) -> None:
    check(constraint)


@pytest.mark.parametrize("constraint", BAD.values(), ids=BAD.keys())
def test_what_cannot_be_met_is_the_client_s_fault_and_names_the_field(constraint: Constraint) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(constraint, "structured_outputs.any")
    assert caught.value.field == "structured_outputs.any"
    sentence = str(caught.value).removeprefix("structured_outputs.any: ")
    assert 0 < len(sentence) <= MESSAGE_LENGTH
    assert "\n" not in sentence
