"""What schemathesis sends, bounded, and with what no schema can say put right.

Every request is bounded, whether it is to be accepted or refused: otherwise a run would be spent on waiting for tokens. What is
to be accepted must also be right in itself, and about what a system of the sim device serves: there the schema's word is not
enough. After a change schemathesis looks again whether a request is valid; what is not remains as it is drawn.
"""

import secrets
from typing import Any

import schemathesis
from schemathesis import Case, HookContext

TOKENS = 4  # of an answer; the context has 512
VOCABULARY = 200  # printable tokens of the sim model
LENGTH = 30  # of a prompt or a message, in characters of at most 4 tokens, or in tokens
SECONDS = 60.0  # a deadline that passes is a 504, and rightly so
CHOICES = 16

Body = dict[str, Any]


@schemathesis.hook
def before_call(_context: HookContext, case: Case, _kwargs: Body) -> None:
    for name in [name for name in case.headers or {} if name.lower() == "idempotency-key"]:
        case.headers[name] = f"{secrets.token_hex(8)}"  # nobody comes twice with another body
    if case.path == "/v1/models/{name}" and len(case.path_parameters.get("name", "")) % 2:
        case.path_parameters["name"] = "sim"
    if not isinstance(case.body, dict):
        return
    case.body = _whole(case.body)
    if case.path in ("/v1/completions", "/v1/chat/completions", "/v1/jobs"):
        _bound(case.body)
    if case.meta is not None and case.meta.generation.mode.is_positive:
        _right(case.path, case.body)


def _whole(value: Any) -> Any:
    """For JSON Schema 1.0 is an integer. Here it is none, as in `seed: 1.0`."""
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 64 else value


def _bound(body: Body) -> None:
    limits = ("max_tokens", "max_completion_tokens")
    if not any(body.get(name) for name in limits):
        body[limits["messages" in body]] = TOKENS
    for name in limits:
        if isinstance(body.get(name), int) and body[name] > TOKENS:
            body[name] = TOKENS
    if not isinstance(body.get("timeout"), str | list | dict | bool):
        body["timeout"] = SECONDS


def _right(path: str, body: Body) -> None:
    if body.get("model"):
        body["model"] = "sim"
    if path == "/v1/tokenize":
        body.pop("tools", None)  # the sim model's template knows none
        if body.get("messages") and body.get("prompt") is not None:
            del body["messages"]
        elif not body.get("messages") and body.get("prompt") is None:
            body["prompt"] = "as good as any"
    elif path == "/v1/files":
        for name in [name for name in body if name.startswith("expires_after")]:  # both or none
            del body[name]
    elif path == "/v1/batches":
        body.update(completion_window="24h", metadata=None)
    elif path == "/v1/detokenize":
        body["tokens"] = _tokens(body["tokens"])
    else:
        _right_for_all(path, body)
        _right_text(body) if "prompt" in body else _right_chat(body)


def _right_for_all(path: str, body: Body) -> None:
    if path == "/v1/jobs":
        body.update(stream=None, n=None)
        body.pop("webhook", None)  # there are none without a secret
    if not body.get("stream"):
        body.pop("stream_options", None)
    if body.get("min_tokens"):
        body["min_tokens"] = 1
    if body.get("stop_token_ids"):
        body["stop_token_ids"] = _tokens(body["stop_token_ids"])
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(name) % VOCABULARY): bias for name, bias in body["logit_bias"].items()}
    if (body.get("response_format") or {}).get("type") == "json_schema":
        body["response_format"]["json_schema"]["schema"] = {"type": "object"}
    if wanted := body.get("structured_outputs"):
        examples = {"json": {"type": "object"}, "regex": "[a-z]+", "choice": ["a", "b"], "grammar": 'start: "a"'}
        given = [name for name, value in wanted.items() if name in examples and value is not None]
        body["structured_outputs"] = {name: examples[name] for name in given[:1]}
        body.pop("response_format", None)


def _right_text(body: Body) -> None:
    prompts = body["prompt"] if isinstance(body["prompt"], list) and isinstance(body["prompt"][0], list | str) else None
    if prompts is None:
        body["prompt"] = _short(body["prompt"])
    else:
        body["prompt"] = [_short(prompt) for prompt in prompts]
    if "stream" in body and body["stream"] is None and prompts is not None:  # a job
        body["prompt"] = body["prompt"][:1]
    if body.get("n"):
        body["n"] = max(1, min(body["n"], CHOICES // len(prompts or [0])))
    if body.get("logprobs") is not None:
        body.pop("echo", None)


def _right_chat(body: Body) -> None:
    for name in ("tools", "tool_choice"):
        body.pop(name, None)
    body["messages"] = body["messages"][:3]
    for message in body["messages"]:
        if isinstance(message.get("content"), list):
            message["content"] = message["content"][:1]
            for part in message["content"]:
                part["text"] = _short(part["text"])
        elif message.get("content"):
            message["content"] = _short(message["content"])
    if body.get("top_logprobs"):
        body["logprobs"] = True


def _short(prompt: Any) -> Any:
    return _tokens(prompt[:LENGTH]) if isinstance(prompt, list) else prompt[:LENGTH]


def _tokens(given: list[int]) -> list[int]:
    return [token % VOCABULARY for token in given]
