"""The HTTP API as a program on another machine sees it, with the standard library alone."""

import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import KVRelayError

ANSWER_SECONDS = 60.0  # for what is answered at once


class Refused(KVRelayError):
    """The API answered with an error."""


class Away(KVRelayError):
    """Nobody answers, or nobody who speaks as kvrelay does."""


class Client:
    """Every method raises Refused for an answer that is an error, Away if nobody answers."""

    def __init__(self, url: str, patience: float, api_key: str = "") -> None:
        """patience: seconds for an answer that has to be waited for, that of a completion."""
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Away(f"{url} is no address of an API, as in http://127.0.0.1:8000")
        self._patience = patience
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path

    def system(self) -> Any:
        """Of /v1/system."""
        return self._call("GET", "/v1/system")

    def job(self, job_id: str) -> Any:
        """Its record."""
        return self._call("GET", f"/v1/jobs/{job_id}")

    def submit(self, body: Any) -> str:
        """The job's id."""
        return str(self._call("POST", "/v1/jobs", body)["id"])

    def cancel(self, job_id: str) -> Any:
        """Its record; a job that is over already stays as it is."""
        return self._call("DELETE", f"/v1/jobs/{job_id}", accept=(200, 409))

    def events(self, job_id: str) -> Iterator[tuple[str, Any]]:
        """(name of the event, data) of a job, to its end; a token's is called message."""
        connection, response = self._send("GET", f"/v1/jobs/{job_id}/events", None, ANSWER_SECONDS)
        try:
            if response.status != 200:
                raise Refused(_refusal(response.status, response.read()))
            event = "message"
            for raw in response:
                line = raw.decode().rstrip("\n")
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield event, json.loads(line.removeprefix("data: "))
                    event = "message"
        except (OSError, http.client.HTTPException) as error:
            raise Away(f"{self.url} broke off: {type(error).__name__}: {error}") from None
        finally:
            connection.close()

    def complete(self, body: Any) -> tuple[str, Any]:
        """(job id, answer of /v1/completions)"""
        answer = self._call("POST", "/v1/completions", body, seconds=self._patience)
        return str(answer["id"]).removeprefix("cmpl-"), answer

    def stream(self, body: Any) -> tuple[str, Callable[[], None]]:
        """(job id, what leaves without a word). The answer has begun and is not read."""
        connection, response = self._send("POST", "/v1/completions", {**body, "stream": True}, ANSWER_SECONDS)
        job_id = response.getheader("X-Job-Id")
        if response.status != 200 or job_id is None:
            raise Refused(_refusal(response.status, response.read()))

        def leave() -> None:
            response.close()
            connection.close()

        return job_id, leave

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        accept: Sequence[int] = (200, 202),
        seconds: float = ANSWER_SECONDS,
    ) -> Any:
        connection, response = self._send(method, path, body, seconds)
        try:
            raw = response.read()
            if response.status not in accept:
                raise Refused(_refusal(response.status, raw))
            return json.loads(raw)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Away(f"{self.url} does not answer as kvrelay does: {type(error).__name__}: {error}") from None
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: Any, seconds: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._make(self._host, self._port, timeout=seconds)
        data = None if body is None else json.dumps(body)
        try:
            connection.request(method, self._path + path, data, self._headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Away(f"no API at {self.url} ({error}): is it running?") from None


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"the API answered {status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the API answered {status}"
