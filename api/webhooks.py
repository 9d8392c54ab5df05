"""Webhooks: a signed POST to who wants to hear of a job's end, as Standard Webhooks has it (https://www.standardwebhooks.com).

At least once: whoever dies between a delivery and its note in Redis leaves it to be sent again, under the same id. It says
how the job ended, and nothing of what was asked or answered. What is owed lies in Redis (`brokers/webhooks.py`), and any API
process delivers it.
"""

import asyncio
import base64
import hmac
import json
import logging
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

import httpcore2

from api.answer import usage
from api.outside import AddressRefused, Outside, parse
from brokers.store import Store, heed_cancel
from brokers.webhooks import Webhook, Webhooks
from pipeline.config import Config
from pipeline.errors import RedisAway, RedisRefused

log = logging.getLogger(__name__)

AT_ONCE = 128  # tries of one process
AT_ONCE_PER_TARGET = 8  # so that many targets must hang before another one waits
TRY_SECONDS = 10.0  # well below brokers.webhooks.FIRST_SECONDS: a try is over when the next one begins
CONNECT_SECONDS = 3.0
POLL_SECONDS = 0.2

#: No answer, whoever's fault it is. UnicodeError: of a name that cannot be looked up.
NO_ANSWER = (
    *(httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError),
    *(TimeoutError, OSError, UnicodeError),
)
GONE = 410  # the one refusal that is meant for good: the receiver wants no more


def message(webhook: Webhook) -> bytes:
    ended = datetime.fromtimestamp(webhook.ended / 1000, UTC).isoformat(timespec="milliseconds")
    content = {
        "type": f"job.{webhook.status}",
        "timestamp": ended.replace("+00:00", "Z"),
        "data": {
            "id": webhook.job_id,
            "status": webhook.status,
            "reason": webhook.reason,
            "usage": usage(webhook.prompt_tokens, webhook.completion_tokens),
        },
    }
    return json.dumps(content).encode()


def signed(key: bytes, webhook: Webhook, body: bytes, now: int) -> dict[str | bytes, str | bytes]:
    """The headers of Standard Webhooks. now: Unix time in seconds, of this try.

    The id is the same at each try, and another one if a dead job is requeued and ends anew."""
    message_id = f"{webhook.job_id}-{webhook.ended}"
    digest = hmac.digest(key, f"{message_id}.{now}.".encode() + body, "sha256")
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(now),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a try. what: for the job's timeline, which its client sees: nothing of networks that are not his."""

    what: str
    arrived: bool = False
    final: bool = False


class Deliverer:
    """One per API process."""

    def __init__(self, store: Store, config: Config) -> None:
        self._webhooks = Webhooks(store)
        self._key = config.webhook_key
        self._agent = f"kvrelay/{version('kvrelay')}"
        self._places = asyncio.Semaphore(AT_ONCE)
        self._going: Counter[str] = Counter()  # tries per target
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=httpcore2.default_ssl_context(),
            max_connections=None,  # AT_ONCE bounds them
            max_keepalive_connections=0,
            network_backend=Outside(config.allowed_networks, AT_ONCE),
        )

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as tries:
            while True:
                heed_cancel()
                await self._places.acquire()
                webhook = await self._next()
                if webhook is None:
                    self._places.release()
                    await asyncio.sleep(POLL_SECONDS)
                    continue
                self._going[webhook.target] += 1
                tries.create_task(self._deliver(webhook))

    async def _next(self) -> Webhook | None:
        busy = [target for target, count in self._going.items() if count >= AT_ONCE_PER_TARGET]
        try:
            return await self._webhooks.take(busy)
        except (RedisAway, RedisRefused) as error:
            log.warning("cannot look for webhooks: %s", error, extra={"action": "webhooks_lost"})
            return None

    async def _deliver(self, webhook: Webhook) -> None:
        try:
            await self._settle(webhook, await self._try(webhook))
        except (RedisAway, RedisRefused) as error:  # it will come again
            log.warning("cannot note a webhook: %s", error, extra={"action": "webhook_lost", "job": webhook.job_id})
        except Exception:  # a bug: it must not end all the others, and the calendar bounds how often it comes again
            log.exception("unexpected", extra={"action": "webhook_bug", "job": webhook.job_id})
        finally:
            self._going -= Counter([webhook.target])  # which drops those at 0
            self._places.release()

    async def _try(self, webhook: Webhook) -> Outcome:
        extra = {"action": "webhook_failed", "job": webhook.job_id}
        try:
            async with asyncio.timeout(TRY_SECONDS):
                status = await self._post(webhook)
        except AddressRefused as error:
            log.warning("webhook of job %s: %s", webhook.job_id, error, extra=extra)
            return Outcome("its address is private", final=True)
        except NO_ANSWER as error:
            log.info("webhook of job %s: no answer from %s: %r", webhook.job_id, webhook.target, error, extra=extra)
            return Outcome(f"no answer ({type(error).__name__})")
        return Outcome(f"answered {status}", arrived=200 <= status < 300, final=status == GONE)

    async def _post(self, webhook: Webhook) -> int:
        """The status of the answer. Redirects are answers like any other: httpcore follows none, and asks no proxy."""
        url, body = parse(webhook.url), message(webhook)
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        target = httpcore2.URL(scheme=url.scheme, host=url.hostname or "", port=url.port, target=path)
        headers = signed(self._key, webhook, body, int(time.time())) | {
            "Host": url.netloc,
            "Content-Type": "application/json",
            "Connection": "close",
            "User-Agent": self._agent,
        }
        limits = {"timeout": {"connect": CONNECT_SECONDS}}
        async with self._pool.stream("POST", target, headers=headers, content=body, extensions=limits) as answer:
            return answer.status  # whatever else it says is left unread

    async def _settle(self, webhook: Webhook, outcome: Outcome) -> None:
        """A try that failed needs no note: the next one is on the calendar."""
        if outcome.arrived:
            became = "arrived"
        elif outcome.final or webhook.is_last_try:
            became = "given up"
        else:
            became = "to be tried again"
        said = f"{became}: {outcome.what} at try {webhook.tries}"
        log.log(
            logging.WARNING if became == "given up" else logging.INFO,
            *("webhook of job %s for %s %s", webhook.job_id, webhook.target, said),
            extra={"action": "webhook", "job": webhook.job_id},
        )
        if became != "to be tried again":
            await self._webhooks.close(webhook, said)
