"""Errors as clients see them, next to the document that says so."""

import json
import re
from pathlib import Path

import pytest

from api.error_tables import ends, refusals
from api.errors import ENDS, HTTP, JobFailed, TooManyConnections, describe, failure, response
from pipeline.states import TERMINAL, Status

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", [ends(), refusals()], ids=["ends", "refusals"])
def test_the_document_is_what_the_code_says(table: str) -> None:
    """`python -m api.error_tables` draws it anew."""
    assert table in DOCUMENT


def test_every_code_in_the_sources_is_in_the_document() -> None:
    """Without it, a code that somebody writes beside the classes of errors would be known to nobody."""
    codes = {code for code, _ in HTTP.values()}
    for source in [*(ROOT / "api").glob("*.py"), *(ROOT / "pipeline").glob("*.py")]:
        codes |= set(re.findall(r'\bcode(?:: str)? ?=(?: \d+,)? ?"(\w+)"', source.read_text(encoding="utf-8")))
        codes |= set(
            re.findall(r'^    status, code.* = \d+, "(\w+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
        )
    assert len(codes) > 15
    assert sorted(code for code in codes if f"`{code}`" not in DOCUMENT) == []


def test_every_end_of_a_job_has_its_line() -> None:
    assert set(ENDS) == TERMINAL


@pytest.mark.parametrize("status", sorted(TERMINAL - {Status.FINISHED}))
def test_who_fetches_is_shown_the_error_that_who_waits_is_answered(status: Status) -> None:
    """Without the one table they would drift apart."""
    assert describe(JobFailed(status, "why"))[1]["error"] == failure(status, "why")


@pytest.mark.parametrize("status", sorted(set(Status) - (TERMINAL - {Status.FINISHED})))
def test_a_job_that_finished_or_goes_on_has_no_error(status: Status) -> None:
    assert failure(status, "") is None


def test_an_answer_to_no_request_is_whole() -> None:
    """Without its length a client would wait for more."""
    head, _, body = response(TooManyConnections("too many")).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 503 Service Unavailable"
    assert f"Content-Length: {len(body)}" in lines
    assert {"Connection: close", "Retry-After: 1"} <= set(lines)
    assert json.loads(body)["error"]["code"] == "too_many_connections"
