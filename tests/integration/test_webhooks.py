"""Webhooks in Redis: who owes one, who is next, and that none is lost or stays."""

import asyncio
from typing import Any

import pytest
from hands import JOB, Hands

from brokers.audit import Audit
from brokers.dead_letters import DeadLetters
from brokers.webhooks import FIRST_SECONDS, JITTER, TRIES, Webhook, Webhooks
from pipeline.states import Status

URL = "https://Example.com:8443/hook?x=1"
TARGET = "example.com:8443"
OTHER_URL = "http://other.test/"


@pytest.fixture
def webhooks(hands: Hands) -> Webhooks:
    return Webhooks(hands.store)


async def ended(hands: Hands, job_id: str, url: str = URL) -> None:
    assert await hands.submit(job_id, webhook=url) == "ok"
    await hands.cancel(job_id)


async def taken(webhooks: Webhooks, *busy: str) -> Webhook:
    webhook = await webhooks.take(busy)
    assert webhook is not None
    return webhook


async def make_due(hands: Hands, job_id: str, target: str = TARGET) -> None:
    await hands.redis.zadd(hands.keys.owed(target), {job_id: 0})
    await hands.redis.zadd(hands.keys.webhooks, {target: 0})


async def seconds_to_next(hands: Hands, job_id: str, target: str = TARGET) -> float:
    seconds, microseconds = await hands.redis.time()
    due: float = await hands.redis.zscore(hands.keys.owed(target), job_id)
    return due / 1000 - seconds - microseconds / 1e6


async def timeline(hands: Hands, job_id: str) -> list[str]:
    """What it says of webhooks."""
    lines = (await hands.field(job_id, "timeline") or "").splitlines()
    return [line.partition(" webhook ")[2] for line in lines if " webhook " in line]


async def nothing_left(hands: Hands) -> bool:
    """Neither in a target's set, nor as a debt in a record."""
    keys = [key async for key in hands.redis.scan_iter(match=f"{hands.keys.owed('')}*")]
    debts = [
        key
        async for key in hands.redis.scan_iter(match=f"{hands.keys.prefix}job:*")
        if await hands.redis.hexists(key, "webhook_tries")
    ]
    return not keys and not debts


async def test_a_job_owes_its_webhook_from_its_end_on_and_not_before(hands: Hands, webhooks: Webhooks) -> None:
    lease = await hands.decoding("j", webhook=URL)
    assert await webhooks.take(()) is None
    await hands.append("j", lease, 1, 101, 102, end="finished", reason="length")
    webhook = await taken(webhooks)
    assert (webhook.job_id, webhook.target, webhook.url, webhook.tries) == ("j", TARGET, URL, 1)
    assert (webhook.status, webhook.reason) == ("finished", "length")
    assert (webhook.prompt_tokens, webhook.completion_tokens) == (len(JOB.prompt), 3)
    assert webhook.ended == int(await hands.field("j", "ended") or 0)


@pytest.mark.parametrize("how", ["cancelled", "expired", "failed"])
async def test_every_end_is_told(hands: Hands, webhooks: Webhooks, how: str) -> None:
    if how == "failed":
        for _ in range(3):
            lease = await (hands.lease() if await hands.status("j") else hands.leased("j", webhook=URL))
            await hands.queue.release("j", lease.lease_id, "no luck")
            await hands.credit()
    else:
        await hands.submit("j", webhook=URL)
        await hands.queue.stop("j", Status(how), "because")
    webhook = await taken(webhooks)
    assert (webhook.status, webhook.completion_tokens) == (how, 0)


async def test_a_job_without_a_webhook_owes_none(hands: Hands, webhooks: Webhooks) -> None:
    await hands.submit("j")
    await hands.cancel("j")
    assert await webhooks.take(()) is None
    assert await nothing_left(hands)


async def test_a_webhook_that_was_taken_comes_again_later_and_later_until_it_is_closed(
    hands: Hands, webhooks: Webhooks
) -> None:
    """Whoever takes it may die. Without the next try on the calendar at once it would be lost then."""
    await ended(hands, "j")
    for number in range(1, TRIES + 1):
        assert (await taken(webhooks)).tries == number
        pause = FIRST_SECONDS * 3 ** (number - 1)
        assert pause - 1 < await seconds_to_next(hands, "j") < pause * (1 + JITTER) + 1
        assert await webhooks.take(()) is None
        await make_due(hands, "j")
    assert await webhooks.take(()) is None
    assert await timeline(hands, "j") == ["given up: nobody knows how the last try went"]
    assert await nothing_left(hands)


async def test_the_pauses_lie_within_the_time_that_a_job_is_kept() -> None:
    """Later there is nothing more to tell."""
    assert sum(FIRST_SECONDS * (1 + JITTER) * 3**number for number in range(TRIES - 1)) < 3600


async def test_one_that_was_closed_is_done_with_also_when_the_reply_was_lost(hands: Hands, webhooks: Webhooks) -> None:
    await ended(hands, "j")
    webhook = await taken(webhooks)
    for _ in range(2):
        await webhooks.close(webhook, "arrived: answered 200 at try 1")
    assert await timeline(hands, "j") == ["arrived: answered 200 at try 1"]
    assert await webhooks.take(()) is None
    assert await nothing_left(hands)


async def test_a_record_that_has_expired_is_not_made_anew_by_its_webhook(hands: Hands, webhooks: Webhooks) -> None:
    """Without the look at it first, a hash with nothing but a timeline would stay for ever."""
    await ended(hands, "j")
    webhook = await taken(webhooks)
    await hands.redis.delete(hands.keys.job("j"))
    await webhooks.close(webhook, "arrived")
    assert not await hands.redis.exists(hands.keys.job("j"))


async def test_of_a_job_that_is_gone_nothing_is_told_and_nothing_stays(hands: Hands, webhooks: Webhooks) -> None:
    for number in range(100):  # more than one call of the script looks at
        await ended(hands, f"gone-{number:02}")
        await hands.redis.delete(hands.keys.job(f"gone-{number:02}"), hands.keys.tokens(f"gone-{number:02}"))
    await ended(hands, "j")
    assert (await taken(webhooks)).job_id == "j"


async def test_the_set_goes_by_itself_when_nobody_delivers_any_more(hands: Hands) -> None:
    await ended(hands, "j")
    assert await hands.redis.pttl(hands.keys.owed(TARGET)) >= await hands.redis.pttl(hands.keys.job("j"))


async def test_a_target_that_has_enough_to_do_waits_and_holds_up_no_other(hands: Hands, webhooks: Webhooks) -> None:
    """Without the way past it, its two hundred jobs, all of them older, would be first."""
    for number in range(200):
        await ended(hands, f"slow-{number}")
    await ended(hands, "j", OTHER_URL)
    webhook = await taken(webhooks, TARGET)
    assert (webhook.job_id, webhook.target) == ("j", "other.test")
    assert await webhooks.take([TARGET]) is None
    await make_due(hands, "slow-0")
    assert (await taken(webhooks)).job_id == "slow-0"


async def test_what_a_target_owes_is_seen_in_turn(hands: Hands, webhooks: Webhooks) -> None:
    """One after the other, although `webhooks` has a target only once."""
    for number in range(5):
        await ended(hands, f"j{number}")
    seen = {(await taken(webhooks)).job_id for _ in range(5)}
    assert seen == {f"j{number}" for number in range(5)}
    assert await webhooks.take(()) is None


async def test_two_who_ask_at_once_get_different_ones(hands: Hands, webhooks: Webhooks) -> None:
    for number in range(20):
        await ended(hands, f"j{number}")
    webhooks_taken = await asyncio.gather(*(webhooks.take(()) for _ in range(30)))
    assert sorted(webhook.job_id for webhook in webhooks_taken if webhook) == sorted(f"j{n}" for n in range(20))


async def dead(hands: Hands, **how: Any) -> None:
    lease = await hands.leased("j", **how)
    for _ in range(2):
        await hands.queue.release("j", lease.lease_id, "no luck")
        await hands.credit()
        lease = await hands.lease()
    await hands.queue.release("j", lease.lease_id, "no luck")
    assert await hands.status("j") == "failed"


async def test_a_dead_job_that_is_requeued_takes_back_its_webhook_and_owes_another_at_its_next_end(
    hands: Hands, webhooks: Webhooks
) -> None:
    """Without the end's time, which fences it, the first one's delivery would strike out the second."""
    await dead(hands, webhook=URL)
    first = await taken(webhooks)
    letters = DeadLetters(hands.store)
    assert await letters.requeue((await letters.all())[0]) == "ok"
    assert await nothing_left(hands)
    await asyncio.sleep(0.002)  # another millisecond
    await hands.cancel("j")
    await webhooks.close(first, "arrived")
    second = await taken(webhooks)
    assert (second.status, second.tries) == ("cancelled", 1)
    assert second.ended > first.ended


@pytest.fixture
def audit(hands: Hands) -> Audit:
    return Audit(hands.store, lease_seconds=0.02, tick_seconds=0.01)


async def found(audit: Audit) -> list[str]:
    return [str(problem) for problem in await audit.problems()]


async def test_webhooks_on_their_way_are_no_problem(hands: Hands, webhooks: Webhooks, audit: Audit) -> None:
    await hands.submit("waits", webhook=URL)
    for name in ("due", "tried", "done", "gone"):
        await ended(hands, name, f"http://{name}.test/")
    while webhook := await webhooks.take(["due.test"]):
        if webhook.job_id == "done":
            await webhooks.close(webhook, "arrived")
    await hands.redis.delete(hands.keys.job("gone"), hands.keys.tokens("gone"))
    assert await found(audit) == []


async def lose_owed(hands: Hands) -> None:
    await hands.redis.delete(hands.keys.owed(TARGET))


async def lose_target(hands: Hands) -> None:
    await hands.redis.zrem(hands.keys.webhooks, TARGET)


async def owe_too_early(hands: Hands) -> None:
    await hands.redis.zadd(hands.keys.owed(TARGET), {"waits": 0})


async def keep_for_ever(hands: Hands) -> None:
    await hands.redis.persist(hands.keys.owed(TARGET))


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (lose_owed, "job j owes a webhook, and nobody would see it"),
        (lose_target, "job j owes a webhook, and nobody would see it"),
        (owe_too_early, "job waits is among the webhooks, and owes none"),
        (keep_for_ever, "would be kept for ever"),
    ],
)
async def test_what_is_broken_is_named_and_mended(
    hands: Hands, webhooks: Webhooks, audit: Audit, breaks: Any, said: str
) -> None:
    await ended(hands, "j")
    await hands.submit("waits", webhook=URL)
    await breaks(hands)
    problems = await found(audit)
    assert any(said in problem for problem in problems), problems
    assert await audit.repair() == []
    assert breaks is keep_for_ever or (await taken(webhooks)).job_id == "j"


async def test_the_audit_that_mends_an_end_tells_it_no_second_time(
    hands: Hands, webhooks: Webhooks, audit: Audit
) -> None:
    lease = await hands.decoding("j", webhook=URL)
    await hands.append("j", lease, 1, 101, end="finished", reason="length")
    await webhooks.close(await taken(webhooks), "arrived")
    await hands.redis.xdel(hands.keys.tokens("j"), "3-0")
    assert "job j is over, and its log goes on" in await found(audit)
    assert await audit.repair() == []
    assert await nothing_left(hands)
