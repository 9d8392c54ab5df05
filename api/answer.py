"""Answers in OpenAI's shapes, whole or in pieces: from the entries of token logs to choices."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from api.errors import JobFailed
from api.requests import ChatRequest, Request
from api.text import PromptCodec
from api.tools import CallPart, Piece, reader
from brokers.token_log import Entry
from pipeline.job import Job
from pipeline.states import Status


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclass
class Logprobs:
    """What a model thought of the tokens that it could have chosen, in the two shapes that OpenAI has for it."""

    codec: PromptCodec
    entries: list[tuple[Entry, int]] = field(default_factory=list)  # and where in the text each begins

    def chat(self) -> dict[str, Any]:
        return {"content": [self._chat(entry) for entry, _ in self.entries], "refusal": None}

    def text(self) -> dict[str, Any]:
        thoughts = [(entry, entry.logprobs) for entry, _ in self.entries if entry.logprobs is not None]
        return {
            "tokens": [self._name(entry.token) for entry, _ in thoughts],
            "token_logprobs": [thought.logprob for _, thought in thoughts],
            "top_logprobs": [{self._name(token): value for token, value in thought.top} for _, thought in thoughts],
            "text_offset": [offset for _, offset in self.entries],
        }

    def _chat(self, entry: Entry) -> dict[str, Any]:
        assert entry.logprobs is not None
        top = [self._token(token, value) for token, value in entry.logprobs.top]
        return {**self._token(entry.token, entry.logprobs.logprob), "top_logprobs": top}

    def _token(self, token: int | None, logprob: float) -> dict[str, Any]:
        raw = self.codec.token_bytes(token or 0)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    def _name(self, token: int | None) -> str:
        """As a key: two tokens that are halves of characters must not look alike."""
        raw = self.codec.token_bytes(token or 0)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Choice:
    """What one job adds to the answer."""

    def __init__(self, index: int, job_id: str, job: Job, request: Request, codec: PromptCodec) -> None:
        self._chat = isinstance(request, ChatRequest)
        self._index = index
        self._job_id = job_id
        self._job = job
        self._codec = codec
        tools = (request.tool_choice, request.tools) if isinstance(request, ChatRequest) else (None, None)
        self._reader = reader(*tools)
        self._content = "" if self._chat or not request.echo else codec.decode(job.prompt)
        self._calls: list[CallPart] = []
        self._all = Logprobs(codec)
        self._length = len(self._content)  # of the text, where the next token's begins
        self.tokens = 0
        self.finish_reason: str | None = None

    def take(self, entries: Sequence[Entry]) -> "Delta":
        """What they add. Raises JobFailed if the job did not finish."""
        delta = Delta(logprobs=Logprobs(self._codec))
        for entry in entries:
            if entry.end is None:
                self.tokens += 1
                if entry.logprobs is not None:
                    delta.logprobs.entries.append((entry, self._length))
                self._length += len(entry.text)
                delta.pieces += self._reader.push(entry.text)
            elif entry.end == Status.FINISHED:
                delta.pieces += self._reader.finish()
                self.finish_reason = entry.reason
            else:
                raise JobFailed(entry.end, entry.reason)
        self._add(delta)
        if self._calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        return delta

    def whole(self) -> dict[str, Any]:
        shown: dict[str, Any]
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
            if self._calls:
                message["content"] = self._content or None
                message["tool_calls"] = [self._shown(call) for call in self._calls]
            shown = {"message": message}
        else:
            shown = {"text": self._content}
        return shown | self._rest(self._all)

    def opening(self) -> dict[str, Any] | None:
        """Before the first token: of a chat, who speaks; of a text, what it repeats of the prompt."""
        if not (self._chat or self._content):
            return None
        shown = {"delta": {"role": "assistant", "content": ""}} if self._chat else {"text": self._content}
        return {**shown, "index": self._index, "logprobs": None, "finish_reason": None}

    def piece(self, delta: "Delta") -> dict[str, Any]:
        if self._chat:
            changes: dict[str, Any] = {"content": delta.text} if delta.text else {}
            if delta.calls:
                changes["tool_calls"] = [{"index": call.index, **self._shown(call)} for call in delta.calls]
            return {"delta": changes} | self._rest(delta.logprobs)
        return {"text": delta.text} | self._rest(delta.logprobs)

    def _add(self, delta: "Delta") -> None:
        self._content += delta.text
        self._all.entries += delta.logprobs.entries
        for call in delta.calls:
            if call.name:
                self._calls.append(call)
            else:
                last = self._calls[-1]
                self._calls[-1] = CallPart(index=last.index, name=last.name, arguments=last.arguments + call.arguments)

    def _rest(self, logprobs: Logprobs) -> dict[str, Any]:
        shown = None
        if self._job.logprobs >= 0 and (logprobs.entries or self.finish_reason is None):
            shown = logprobs.chat() if self._chat else logprobs.text()
        return {"index": self._index, "logprobs": shown, "finish_reason": self.finish_reason}

    def _shown(self, call: CallPart) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments} if call.name else {"arguments": call.arguments}
        if not call.name:
            return {"function": function}
        return {"id": f"call_{self._job_id[:24]}{call.index}", "type": "function", "function": function}


@dataclass
class Delta:
    """What some entries added to a choice."""

    logprobs: Logprobs
    pieces: list[Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def calls(self) -> list[CallPart]:
        return [piece for piece in self.pieces if isinstance(piece, CallPart)]

    @property
    def empty(self) -> bool:
        return not (self.pieces or self.logprobs.entries)


class Answer:
    """All choices of one request, whose jobs are numbered alike."""

    def __init__(
        self, request: Request, jobs: Sequence[Job], job_ids: Sequence[str], codec: PromptCodec, model: str
    ) -> None:
        self._chat = isinstance(request, ChatRequest)
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + job_ids[0],
            "created": int(time.time()),
            "model": request.model or model,
        }
        # a prompt counts once, however many choices there are
        self._prompt_tokens = sum(len(job.prompt) for job in jobs[:: request.n or 1])
        self.choices = [
            Choice(index, job_id, job, request, codec)
            for index, (job_id, job) in enumerate(zip(job_ids, jobs, strict=True))
        ]

    def whole(self) -> dict[str, Any]:
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [choice.whole() for choice in self.choices]
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage()}

    def openings(self) -> list[dict[str, Any]]:
        return [self.chunk(opening) for choice in self.choices if (opening := choice.opening())]

    def chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": list(choices)}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self.chunk(), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        return usage(self._prompt_tokens, sum(choice.tokens for choice in self.choices))
