"""What streams say is what answers say: text, usage and ends; over HTTP, with a device that answers its prompt."""

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.acceptance.system import System

ECHO = "tests.acceptance.echo_device"

FAMILY, SCIENTIST, FLAG, HANGUL, JAMO = "👨‍👩‍👧‍👦", "👩🏽‍🔬", "🇰🇷", "한글", "\u1112\u1161\u11ab"
TEXT = f"a{FAMILY} {HANGUL}é{SCIENTIST}{JAMO}\u200d{FLAG}€ z"

#: Stop strings of 2 to 5 tokens (bytes), and strings that the text only begins to say.
STOPS = {
    "none": [],
    "é, 2": ["é"],
    "글, 3": ["글"],
    "a joiner, 3": ["\u200d"],
    "half a flag, 4": ["🇰"],
    "with a blank, 5": [" 한a", "€ z"],
    "half a character more, 5": ["z€", "é€"],
    "other people": ["👨‍👩‍👦", "👨‍👩‍👧‍👧", "👩🏾", "\u1112\u1161\u11ac", "🇰🇵"],
    "other, and at the end the right one": ["🇰🇵", "글e", "€ z"],
}


@pytest.fixture(scope="module")
def system(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    settings = {"model": "sim", "prefill_device": "sim", "decode_device": "sim", "sim_step_ms": 1}
    system = System(redis_url, tmp_path_factory.mktemp("echo"), served_name=f"echo-{secrets.token_hex(4)}", **settings)
    for role in ("prefill", "decode"):
        system.arguments[role] = ["--factory", f"{ECHO}:open_{role}"]
    yield system.start_all()
    system.close()


def cut(text: str, stops: Sequence[str]) -> str:
    """The plain thing."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def chunks(system: System, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a stream that must come to its [DONE]."""
    *events, last = [event["data"] for event in system.events(path, {**body, "stream": True})]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
def test_a_stream_says_the_text_of_the_answer_and_never_half_a_character(system: System, stops: list[str]) -> None:
    """H4. Without the detokenizer's wait for whole characters U+FFFD would be shown, without the matcher's, the beginning
    of a stop string; without its flush, the end of a near miss would be lost."""
    body = {"prompt": TEXT, "max_tokens": 500, "stop": stops}
    whole = system.complete(**body)["choices"][0]
    parts = [chunk["choices"][0] for chunk in chunks(system, "/v1/completions", body)]
    assert "".join(part["text"] for part in parts) == whole["text"] == cut(TEXT, stops)
    assert "\ufffd" not in "".join(part["text"] for part in parts)
    assert parts[-1]["finish_reason"] == whole["finish_reason"] == "stop"
    *tokens, _end = system.events(f"/v1/jobs/{system.submit(**body)}/events")
    texts = [json.loads(event["data"])["text"] for event in tokens]  # of every token for itself
    assert "".join(texts) == whole["text"]
    assert not any("\ufffd" in text for text in texts)


def test_a_chat_s_stream_says_its_message(system: System) -> None:
    """H4. As above, through the template and the other shape."""
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 500, "stop": ["€ z", "🇰🇵"]}
    status, answer = system.call("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(system, "/v1/chat/completions", body)]
    assert "".join(parts) == answer["choices"][0]["message"]["content"]
    assert "".join(parts).endswith(FLAG)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_counts_what_an_answer_counts_if_it_is_asked_to(system: System, n: int) -> None:
    """H5. Without the last chunk a stream has no usage; a chunk that nobody asked for breaks clients that read choices[0]."""
    body = {"prompt": TEXT, "max_tokens": 20, "n": n}
    usage = system.complete(**body)["usage"]
    assert usage == {
        "prompt_tokens": len(TEXT.encode()),
        "completion_tokens": 20 * n,
        "total_tokens": len(TEXT.encode()) + 20 * n,
    }
    asked = chunks(system, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in asked if chunk.get("usage")] == [usage]
    assert asked[-1]["usage"] == usage
    assert asked[-1]["choices"] == []
    for options in ({"stream_options": {"include_usage": False}}, {}):
        others = chunks(system, "/v1/completions", {**body, **options})
        assert not any(chunk.get("usage") for chunk in others)
        assert all(chunk["choices"] for chunk in others)


def test_a_stop_may_be_a_string_or_a_list(system: System) -> None:
    """H9. Without the string's own case it would be taken for a list of its characters."""
    texts = [system.complete(TEXT, max_tokens=500, stop=stop)["choices"][0]["text"] for stop in (" z", [" z"])]
    assert texts == [cut(TEXT, [" z"])] * 2
