"""The tables of docs/errors.md, drawn from `api.errors`: ``python -m api.error_tables``."""

from collections.abc import Iterator

from api.errors import ENDS, ApiError, JobFailed, error_type

#: What `describe` makes of errors that are not the API's own: (status, code, when, headers).
OTHERS = [
    (400, "invalid_value", "A field is wrong; `param` names it.", ""),
    (400, "invalid_json", "The body is no JSON, or what parsers differ about.", ""),
    (400, "unsupported_value", "A field asks for something that is not done here.", ""),
    (400, "no_chat_template", "A chat, and the model is a base model.", ""),
    (400, "context_length_exceeded", "Prompt and answer together do not fit `KVR_CONTEXT`.", ""),
    (400, "batch_over", "The batch cannot be cancelled: it is over.", ""),
    (400, "bad_request", "There is no such HTTP method.", ""),
    (404, "model_not_found", "The model's name is none of those served.", ""),
    (404, "unknown_url", "There is no such route.", ""),
    (405, "method_not_allowed", "The route has other methods.", "Allow"),
    (500, "server_error", "A bug. The log has it, the answer has not.", ""),
    (503, "queue_away", "Redis does not answer.", "Retry-After"),
]


def ends() -> str:
    """How a job ended, and what its clients see."""
    lines = ["| job | | waiting | streaming | record, and last event | `type`, `code` |", "|---|---|---|---|---|---|"]
    for status, end in ENDS.items():
        waiting, streaming, shown, names = "answer", "`finish_reason`, then `[DONE]`", "`error` null", ""
        if end.code:
            waiting, streaming, shown = "`error`", "an event with `error`, no `[DONE]`", "`error`"
            names = f"`{error_type(end.status)}`, `{end.code}`"
        lines.append(f"| {status} | {end.what} | {end.status}, {waiting} | {streaming} | {shown} | {names} |")
    return "\n".join(lines)


def refusals() -> str:
    """What is answered instead of doing what was asked."""
    rows = [(kind.status, kind.code, kind.__doc__ or "", ", ".join(kind.headers)) for kind in _leaves(ApiError)]
    lines = ["| status | `code` | when | headers |", "|---|---|---|---|"]
    lines += [f"| {status} | `{code}` | {when} | {headers} |" for status, code, when, headers in sorted(rows + OTHERS)]
    return "\n".join(lines)


def _leaves(kind: type[ApiError]) -> Iterator[type[ApiError]]:
    for child in kind.__subclasses__():
        if child.__subclasses__():
            yield from _leaves(child)
        elif child is not JobFailed:
            yield child


if __name__ == "__main__":
    print(f"{ends()}\n\n{refusals()}")
