"""What an answer must be: JSON, a match of a regular expression, one of several texts, or a text of a grammar.

llguidance reads the grammar and says, token by token, which ones may come next; docs/architecture.md says why this library.
Whoever takes a job over gives the tokens so far to a new matcher and is where the other one was.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, regex_to_lark
from tokenizers import Tokenizer

from pipeline.errors import ConstraintError, InvalidRequest
from pipeline.model import SIM, Model
from pipeline.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

SOURCE_LENGTH = 100_000  # characters: what takes a second to read at worst
MESSAGE_LENGTH = 300  # characters of what the library says of a grammar

#: Between the parts of a JSON text stands nothing, or one space: a model in doubt writes spaces for ever.
#: And nothing that a schema asks for is passed over in silence, whatever the schema itself says about that.
JSON: "JsonCompileOptions" = {
    "whitespace_pattern": " ",
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
LIMITS = LLParserLimits(verbose_errors=False)  # they would hold what the model has said


@dataclass(frozen=True, slots=True)
class Constraint:
    """kind: json_object, json_schema (source: the schema), regex, choice (source: a JSON list of strings) or grammar (Lark)."""

    kind: str
    source: str = ""


class Matcher:
    """Where one job's text stands in its constraint. Every method raises ConstraintError if it can be kept to no more."""

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary, tokens: Sequence[int] = ()) -> None:
        """tokens: what the job has produced already. A large constraint takes a while, but not the interpreter lock."""
        try:
            self._library = LLMatcher(vocabulary.library(), _grammar(constraint), log_level=0, limits=LIMITS)
        except ValueError as error:
            raise ConstraintError(_sentence(str(error))) from error
        self._check()
        for token in tokens:
            self.accept(token)

    def mask(self) -> bytes:
        """A bit for each token, in each byte the lowest first: it may come next. EOS may, when the text may end here."""
        mask = self._library.compute_bitmask()
        self._check()  # after an error it would be EOS alone, and the text cut short in silence
        return mask

    def accept(self, token: int) -> None:
        self._library.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._library.is_error():
            raise ConstraintError(_sentence(self._library.get_error()))


def check(constraint: Constraint, field: str = "response_format") -> None:
    """Before a job is queued. Raises InvalidRequest, naming the field, for what is wrong, not supported, or matched by nothing.

    The vocabulary is that of single bytes: which tokens a model has changes nothing, except that a grammar cannot name any.
    A long source takes up to a second, so not in an event loop.
    """
    try:
        Matcher(constraint, _bytes()).mask()
    except ConstraintError as error:
        raise InvalidRequest(field, str(error)) from error


@functools.cache
def _bytes() -> Vocabulary:
    model = Model(SIM)
    return Vocabulary(Tokenizer.from_file(str(model.tokenizer_file)), model.eos)


def _grammar(constraint: Constraint) -> str:
    """As llguidance takes it. Raises ValueError for the wrong form; what else is wrong in it shows when it is used."""
    kind, source = constraint.kind, constraint.source
    if len(source) > SOURCE_LENGTH:
        raise ConstraintError(f"{len(source)} characters; at most {SOURCE_LENGTH} are allowed")
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=JSON)
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(source, overrides=JSON)
    if kind == "regex":  # \d and \w are ASCII, as JavaScript has it and therefore the patterns in a schema
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(source, 'dw')}/")
    if kind == "choice":
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {_alternatives(source)}")
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(source)
    raise ConstraintError(f"{kind!r} is no kind of constraint")


def _alternatives(source: str) -> str:
    choices = json.loads(source)
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ConstraintError("choices are one or more texts, none of them empty")
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _sentence(message: str) -> str:
    """In one line."""
    if message.startswith("NoExtension"):
        return "no text meets it"
    return " ".join(message.removesuffix("<non-verbose/>").split())[:MESSAGE_LENGTH]
