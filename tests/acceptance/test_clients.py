"""Programs that know OpenAI's API and nothing of kvrelay, against a running system with SmolLM2: one session each."""

import concurrent.futures
import gc
import io
import json
import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.acceptance.system import System, wait_for

pytestmark = pytest.mark.timeout(300)

QUESTION = [{"role": "user", "content": "Name a colour and a number."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "number"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
BATCH_SECONDS = 120


@pytest.fixture(scope="module")
def system(redis_url: str, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("system")
    names = {"served_name": f"smollm2-{secrets.token_hex(4)}", "aliases": "gpt-4o"}
    system = System(redis_url, folder, model=smollm2, prefill_threads=1, decode_threads=1, files=folder, **names)
    yield system.start_all()
    system.close()


def check_thing(text: str | None) -> None:
    thing = json.loads(text or "")
    assert thing["colour"] in ("red", "green", "blue")
    assert 0 <= thing["number"] <= 99
    assert set(thing) == {"colour", "number"}


def batch_lines(count: int) -> bytes:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "gpt-4o", "messages": QUESTION, "max_tokens": 5},
        }
        for number in range(count)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def test_openai_s_own_client(system: System) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{system.port}/v1", api_key="none", max_retries=0)
    assert "gpt-4o" in [model.id for model in client.models.list()]

    answer = client.chat.completions.create(
        model="gpt-4o", messages=QUESTION, max_tokens=8, logprobs=True, top_logprobs=3, n=2, seed=5
    )
    assert len(answer.choices) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(c.logprobs.content) for c in answer.choices)  # type: ignore[union-attr,arg-type]
    for token in answer.choices[0].logprobs.content:  # type: ignore[union-attr]
        assert len(token.top_logprobs) == 3
        assert token.logprob <= max(top.logprob for top in token.top_logprobs) + 1e-3

    same = {"model": "gpt-4o", "messages": QUESTION, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**same)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**same, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].usage == whole.usage

    parsed = client.chat.completions.create(model="gpt-4o", messages=QUESTION, response_format=FORMAT)  # type: ignore[call-overload]
    check_thing(parsed.choices[0].message.content)

    text = client.completions.create(model="gpt-4o", prompt=["One", "Two"], max_tokens=3, logprobs=2, echo=False)
    assert [choice.index for choice in text.choices] == [0, 1]
    assert len(text.choices[0].logprobs.token_logprobs) == 3  # type: ignore[union-attr,arg-type]

    tool: Any = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model="gpt-4o", messages=QUESTION, tools=[tool])  # type: ignore[call-overload]

    file = client.files.create(file=("lines.jsonl", io.BytesIO(batch_lines(3))), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    done = wait_for(
        lambda: (b := client.batches.retrieve(batch.id)).status == "completed" and b, "the batch is done", BATCH_SECONDS
    )
    lines = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert [line["custom_id"] for line in lines] == ["line-0", "line-1", "line-2"]
    assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in lines)
    assert done.request_counts.completed == 3

    stream = client.chat.completions.create(model="gpt-4o", messages=QUESTION, max_tokens=2000, stream=True)  # type: ignore[call-overload]
    next(stream)
    stream.close()
    del stream
    gc.collect()  # what is left of it ends in a finalizer that looks at httpx, which the next client may just be importing
    system.wait_idle()


def test_json_of_a_schema_is_valid_in_a_hundred_of_a_hundred_tries(system: System) -> None:
    """Without the constraint a model of this size writes JSON by accident only. Temperature 1, a seed for each try."""

    def ask(seed: int) -> str:
        body = {"messages": QUESTION, "response_format": FORMAT, "seed": seed, "max_tokens": 100}
        status, answer = system.call("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["finish_reason"] == "stop"
        return str(answer["choices"][0]["message"]["content"])

    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        texts = list(clients.map(ask, range(100)))
    for text in texts:
        check_thing(text)
    assert len(set(texts)) > 10, "and they are not all alike"


def test_litellm(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the internet for prices
        import litellm

        litellm.telemetry = False
        where = {
            "api_base": f"http://127.0.0.1:{system.port}/v1",
            "api_key": "none",  # pragma: allowlist secret
            "num_retries": 0,
        }
        ask = {"model": "openai/gpt-4o", "messages": QUESTION, **where}

        answer = litellm.completion(**ask, max_tokens=8, logprobs=True, top_logprobs=2, temperature=0)
        assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
        chunks = list(litellm.completion(**ask, max_tokens=8, temperature=0, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content
        check_thing(litellm.completion(**ask, response_format=FORMAT).choices[0].message.content)

        file = litellm.create_file(
            file=("lines.jsonl", batch_lines(2)), purpose="batch", custom_llm_provider="openai", **where
        )
        batch = litellm.create_batch(
            completion_window="24h",
            endpoint="/v1/chat/completions",
            input_file_id=file.id,
            custom_llm_provider="openai",
            **where,
        )
        done = wait_for(
            lambda: (
                (b := litellm.retrieve_batch(batch_id=batch.id, custom_llm_provider="openai", **where)).status
                == "completed"
                and b
            ),
            "the batch is done",
            BATCH_SECONDS,
        )
        assert done.request_counts.completed == 2

        stream = litellm.completion(**ask, max_tokens=2000, stream=True)
        next(iter(stream))
        stream.completion_stream.close()
    system.wait_idle()


def test_langchain_openai(system: System) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(
            model="gpt-4o",
            base_url=f"http://127.0.0.1:{system.port}/v1",
            api_key="none",  # type: ignore[arg-type]
            max_retries=0,
            temperature=0,
            max_completion_tokens=20,
        )
        answer = model.invoke("Name a colour.")
        assert answer.content
        assert answer.usage_metadata
        assert "".join(str(chunk.content) for chunk in model.stream("Name a colour.")) == answer.content

        logged = model.bind(logprobs=True, top_logprobs=2).invoke("Name a colour.")
        assert len(logged.response_metadata["logprobs"]["content"]) == answer.usage_metadata["output_tokens"]

        thing = model.with_structured_output(SCHEMA | {"title": "thing"}, method="json_schema").invoke("A thing.")
        check_thing(json.dumps(thing))
        assert len(model.batch(["Name a colour.", "Name a number."])) == 2

        stream = model.stream("Count for as long as you can.", max_completion_tokens=2000)
        next(stream)
        stream.close()
    system.wait_idle()
