"""Jobs that were given up: the reason of every attempt, another round, and the way out."""

import pytest
from hands import Hands

from brokers.audit import Audit
from brokers.dead_letters import DeadLetter, DeadLetters
from brokers.token_log import Append
from pipeline.config import Config
from pipeline.logprobs import TokenLogprobs


async def given_up(hands: Hands, job_id: str, tokens: int = 0, **how: float) -> DeadLetter:
    """After its attempts; with so many tokens in its log."""
    assert await hands.submit(job_id, **how) == "ok"
    for attempt in range(1, 4):
        await hands.credit()
        lease = await hands.lease()
        if attempt == 1 and tokens:
            fresh = [(number, "x", f"[-{number},[]]") for number in range(tokens)]
            await hands.log.append([Append(job_id=job_id, lease_id=lease.lease_id, start=0, tokens=fresh)])
        outcome = await hands.queue.release(job_id, lease.lease_id, f"reason {attempt}")
    assert outcome == "dead"
    return (await DeadLetters(hands.store).all())[-1]


async def test_a_dead_letter_has_the_reason_of_every_attempt(hands: Hands) -> None:
    letter = await given_up(hands, "a")
    assert (letter.job_id, letter.attempts, letter.reason) == ("a", 3, "reason 3")
    assert letter.reasons == {1: "reason 1", 2: "reason 2", 3: "reason 3"}
    assert letter.at > 1_700_000_000_000


async def test_it_is_kept_longer_than_what_went_well(hands: Hands, config: Config) -> None:
    await given_up(hands, "a")
    for key in (hands.keys.job("a"), hands.keys.tokens("a")):
        assert await hands.redis.ttl(key) > config.dead_seconds - 100 > config.keep_seconds


@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_requeued_job_has_all_its_attempts_and_goes_on_after_its_tokens(hands: Hands, tokens: int) -> None:
    letter = await given_up(hands, "a", tokens, lifetime=60.0)
    dead = DeadLetters(hands.store)
    assert await dead.requeue(letter) == "ok"
    assert await dead.all() == []
    assert await dead.requeue(letter) == "over:queued", "a second time it is dead no more"
    assert await hands.redis.ttl(hands.keys.job("a")) == -1
    await hands.registry.announce("p1", {"role": "prefill"})
    audit = Audit(hands.store, lease_seconds=60, tick_seconds=0.01)
    assert await audit.problems() == []
    await hands.credit()
    lease = await hands.lease()
    assert (lease.job_id, lease.log_length) == ("a", tokens)
    assert await hands.field("a", "attempt") == "1"
    fresh = Append(
        job_id="a", lease_id=lease.lease_id, start=tokens, tokens=[(7, "y", "")], end="finished", reason="stop"
    )
    assert await hands.log.append([fresh]) == [str(tokens + 1)]
    assert [entry.token for entry in await hands.log.read("a")] == [*range(tokens), 7, None]
    logprobs = [TokenLogprobs(-number) for number in range(tokens)]
    assert [entry.logprobs for entry in await hands.log.read("a")] == [*logprobs, None, None]
    assert await audit.problems() == []


async def test_a_requeued_job_has_its_whole_time_again(hands: Hands) -> None:
    letter = await given_up(hands, "a", lifetime=60.0)
    await hands.redis.hincrby(hands.keys.job("a"), "deadline", -50_000)
    await hands.redis.hincrby(hands.keys.job("a"), "submitted", -50_000)
    await DeadLetters(hands.store).requeue(letter)
    standing = await hands.queue.record("a")
    assert int(standing["deadline"]) - int(standing["submitted"]) == 60_000
    assert int(standing["submitted"]) >= letter.at


async def test_a_letter_whose_record_has_gone_can_only_be_purged(hands: Hands) -> None:
    letter = await given_up(hands, "a")
    await hands.redis.delete(hands.keys.job("a"), hands.keys.tokens("a"))
    dead = DeadLetters(hands.store)
    assert await dead.requeue(letter) == "gone"
    (left,) = await dead.all()
    assert (left.job_id, left.reason, left.reasons) == ("a", "reason 3", {})


async def test_purging_forgets_prompts_and_tokens_of_those_alone(hands: Hands) -> None:
    first, second = await given_up(hands, "a", 2), await given_up(hands, "b", 2)
    dead = DeadLetters(hands.store)
    await dead.purge([first])
    assert await dead.all() == [second]
    assert await hands.redis.exists(hands.keys.job("a"), hands.keys.tokens("a")) == 0
    assert await hands.redis.exists(hands.keys.job("b"), hands.keys.tokens("b")) == 2


async def test_a_job_that_was_queued_again_meanwhile_is_not_purged(hands: Hands) -> None:
    letter = await given_up(hands, "a", 2)
    dead = DeadLetters(hands.store)
    await dead.requeue(letter)
    assert await dead.purge([letter]) == 0
    assert await hands.status("a") == "queued"


async def test_a_requeue_of_a_log_with_a_hole_takes_nothing_more_from_it(hands: Hands) -> None:
    letter = await given_up(hands, "a", 3)
    await hands.redis.xdel(hands.keys.tokens("a"), "2-0")
    for _ in range(2):
        assert await DeadLetters(hands.store).requeue(letter) == "gone"
    assert await hands.redis.xlen(hands.keys.tokens("a")) == 3
