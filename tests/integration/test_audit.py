"""`kvrelay check`: each invariant, broken by hand on a real Redis, is named and can be mended; what works is left alone."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hands import Hands

from brokers.audit import Audit
from brokers.keys import GROUP
from brokers.token_log import Append

Break = Callable[[Hands], Awaitable[object]]


@pytest.fixture
def audit(hands: Hands) -> Audit:
    return Audit(hands.store, lease_seconds=0.02, tick_seconds=0.01)


async def found(audit: Audit) -> list[str]:
    return [str(problem) for problem in await audit.problems()]


async def one_of_each(hands: Hands) -> None:
    """A job in every state, with tokens where it has some, and a worker of each role."""
    for name in ("finished", "decoding", "prefilling"):
        await hands.leased(name)
    for name in ("finished", "decoding"):
        lease = await hands.field(name, "lease")
        await hands.log.append([Append(job_id=name, lease_id=lease, start=0, tokens=[(5, "a", "")])])
        await hands.queue.handover(name, lease, f"d1#{name}")
    ended = Append(
        job_id="finished", lease_id="d1#finished", start=1, tokens=[(6, "b", "")], end="finished", reason="stop"
    )
    await hands.log.append([ended])
    await hands.submit("waits")
    await hands.submit("cancelled")
    await hands.cancel("cancelled")
    for worker, role in (("p1", "prefill"), ("d1", "decode")):
        await hands.registry.announce(worker, {"role": role, "state": "alive", "busy": 1})


async def test_a_system_at_work_has_no_problems(hands: Hands, audit: Audit) -> None:
    await one_of_each(hands)
    assert await found(audit) == []


async def lose_entry(hands: Hands) -> object:
    return await hands.redis.xdel(hands.keys.queues[2], await hands.field("waits", "entry"))


async def double_entry(hands: Hands) -> object:
    return await hands.redis.xadd(hands.keys.queues[3], {"job": "waits"})


async def lose_lease(hands: Hands) -> object:
    return await hands.redis.hset(hands.keys.job("decoding"), "lease", "")


async def lose_clock(hands: Hands) -> object:
    return await hands.redis.xack(hands.keys.queues[2], GROUP, await hands.field("decoding", "entry"))


async def give_twice(hands: Hands) -> object:
    return await hands.redis.hset(hands.keys.job("waits"), "lease", "p1#x")


async def lose_token(hands: Hands) -> object:
    return await hands.redis.xdel(hands.keys.tokens("finished"), "1-0")


async def lose_open_token(hands: Hands) -> object:
    await hands.log.append([Append(job_id="decoding", lease_id="d1#decoding", start=1, tokens=[(7, "c", "")])])
    return await hands.redis.xdel(hands.keys.tokens("decoding"), "1-0")


async def lose_end(hands: Hands) -> object:
    return await hands.redis.xdel(hands.keys.tokens("finished"), "3-0")


async def keep_for_ever(hands: Hands) -> object:
    return await hands.redis.persist(hands.keys.job("finished"))


async def keep_log_for_ever(hands: Hands) -> object:
    return await hands.redis.persist(hands.keys.tokens("finished"))


async def forget(hands: Hands) -> object:
    return await hands.redis.expire(hands.keys.job("waits"), 100)


async def hold_what_is_over(hands: Hands) -> object:
    return await hands.redis.hset(hands.keys.job("finished"), "lease", "d1#finished")


async def queue_what_is_over(hands: Hands) -> object:
    entry = await hands.redis.xadd(hands.keys.queues[2], {"job": "finished"})
    return await hands.redis.hset(hands.keys.job("finished"), mapping={"queue": 2, "entry": entry})


async def lose_record(hands: Hands) -> object:
    return await hands.redis.delete(hands.keys.job("finished"))


async def orphan_credit(hands: Hands) -> object:
    return await hands.redis.zadd(hands.keys.credits, {"d9/n1": 0})


async def orphan_consumer(hands: Hands) -> object:
    return await hands.redis.xgroup_createconsumer(hands.keys.queues[2], GROUP, "p9")


async def immortal_worker(hands: Hands) -> object:
    await hands.registry.announce("p9", {"role": "prefill"})
    return await hands.redis.persist(hands.keys.worker("p9"))


async def immortal_tombstone(hands: Hands) -> object:
    return await hands.redis.persist(hands.keys.tombstone("cancelled"))


async def late(hands: Hands) -> object:
    return await hands.redis.hset(hands.keys.job("waits"), "deadline", 1)


async def end_what_goes_on(hands: Hands) -> object:
    return await hands.redis.xadd(hands.keys.tokens("decoding"), {"end": "finished", "reason": "stop"}, id="2-0")


async def lose_place(hands: Hands) -> object:
    return await hands.redis.hdel(hands.keys.job("waits"), "entry")


async def nonsense_queue(hands: Hands) -> object:
    return await hands.redis.hset(hands.keys.job("waits"), "queue", 7)


async def lose_place_in_line(hands: Hands) -> object:
    return await hands.redis.zrem(hands.keys.line, "waits")


async def lose_line(hands: Hands) -> object:
    return await hands.redis.delete(hands.keys.line)


async def stay_in_line(hands: Hands) -> object:
    return await hands.redis.zadd(hands.keys.line, {"decoding": 1})


async def stand_in_line_when_over(hands: Hands) -> object:
    return await hands.redis.zadd(hands.keys.line, {"finished": 1})


async def stand_in_line_as_nobody(hands: Hands) -> object:
    return await hands.redis.zadd(hands.keys.line, {"ghost": 1})


async def lose_record_in_line(hands: Hands) -> object:
    return await hands.redis.delete(hands.keys.job("waits"))


async def note_too_many(hands: Hands) -> object:
    return await hands.redis.hincrby(hands.keys.tenants, "waiting:-", 2)


async def note_another_s(hands: Hands) -> object:
    await hands.redis.hset(hands.keys.tenants, "waiting:-", 0)
    return await hands.redis.hset(hands.keys.tenants, "waiting:other", 1)


async def forget_tenants(hands: Hands) -> object:
    return await hands.redis.delete(hands.keys.tenants)


async def other_type(hands: Hands) -> object:
    return await hands.redis.set(hands.keys.job("strange"), "text")


BROKEN: list[tuple[Break, str]] = [
    (lose_entry, "job waits is queued, and in no queue"),
    (double_entry, "job waits has an entry "),
    (lose_lease, "job decoding is decoding, and nobody holds it"),
    (lose_clock, "job decoding is decoding, and no lease runs for it"),
    (give_twice, "job waits waits, and somebody holds it"),
    (lose_token, "job finished its token log has a gap"),
    (lose_open_token, "job decoding its token log has a gap"),
    (lose_end, "job finished is over, and its log goes on"),
    (keep_for_ever, "job finished is over, and would be kept for ever"),
    (keep_log_for_ever, "job finished is over, and would be kept for ever"),
    (forget, "job waits is queued, and will be forgotten"),
    (hold_what_is_over, "job finished is over, and somebody holds it"),
    (queue_what_is_over, "job finished is over, and still in a queue"),
    (lose_record, "job finished has a token log and no record"),
    (orphan_credit, "worker d9 is gone, and still offers places"),
    (orphan_consumer, "worker p9 is gone, and still a consumer of the queues"),
    (immortal_worker, "would be kept for ever"),
    (immortal_tombstone, "would be kept for ever"),
    (late, "job waits is past its deadline"),
    (lose_place, "job waits is queued, and in no queue"),
    (nonsense_queue, "job waits is queued, and in no queue"),
    (other_type, "job strange has a record or a log of another type"),
    (end_what_goes_on, "job decoding is decoding, and its log has ended"),
    (lose_place_in_line, "job waits waits, and is not in line"),
    (lose_line, "job waits waits, and is not in line"),
    (stay_in_line, "job decoding is decoding, and still in line"),
    (stand_in_line_when_over, "job finished is over, and still in line"),
    (stand_in_line_as_nobody, "job ghost is in line, and has no record"),
    (lose_record_in_line, "job waits is in line, and has no record"),
    (note_too_many, "tenant - has other jobs in line than are noted: 1, and 3 noted"),
    (note_another_s, "tenant other has other jobs in line than are noted: 0, and 1 noted"),
    (forget_tenants, "tenant - has other jobs in line than are noted: 1, and 0 noted"),
]


@pytest.mark.parametrize(("breaks", "said"), BROKEN, ids=[breaks.__name__ for breaks, _ in BROKEN])
async def test_what_is_broken_is_named_and_mended(hands: Hands, audit: Audit, breaks: Break, said: str) -> None:
    await one_of_each(hands)
    await breaks(hands)
    problems = await found(audit)
    assert any(said in problem for problem in problems), problems
    assert await audit.repair() == []
    assert await found(audit) == []


async def test_a_job_in_the_hands_of_a_worker_that_is_gone_is_named_after_two_leases(
    hands: Hands, audit: Audit
) -> None:
    await one_of_each(hands)
    await hands.registry.leave("p1")
    await asyncio.sleep(0.1)  # of which two leases are 0.04
    assert "job prefilling is held by p1, which is gone" in await found(audit)
    assert await audit.repair() == []
    assert await hands.status("prefilling") == "queued"


async def test_places_that_are_neither_in_use_nor_on_offer_are_named(hands: Hands, audit: Audit) -> None:
    await one_of_each(hands)
    await hands.credit("d1")
    await hands.registry.announce("d1", {"role": "decode", "state": "alive", "busy": 1, "capacity": 3})
    assert await found(audit) == ["worker d1 has places that do not add up: 3, 1 in use and 1 on offer"]


async def test_a_key_that_is_none_of_ours_is_named_and_left_alone(hands: Hands, audit: Audit) -> None:
    key = f"{hands.keys.prefix}jbo:1"
    await hands.redis.set(key, "x")
    assert await found(audit) == [f"key {key} is none of kvrelay's"]
    assert await audit.repair() != []
    assert await hands.redis.exists(key)


async def test_what_is_not_confirmed_is_not_mended(hands: Hands, audit: Audit) -> None:
    await one_of_each(hands)
    await lose_entry(hands)
    await hands.redis.persist(hands.keys.job("finished"))
    await audit._mend([problem for problem in await audit.problems() if "waits" in problem.subject])
    assert await found(audit) == ["job finished is over, and would be kept for ever"]


async def test_a_job_whose_log_has_a_hole_can_be_cancelled(hands: Hands, audit: Audit) -> None:
    await one_of_each(hands)
    await lose_open_token(hands)
    assert (await hands.cancel("decoding")).outcome == "ok"
    assert await found(audit) == []


async def test_a_worker_that_cannot_speak_for_its_figures_is_not_judged_by_them(hands: Hands, audit: Audit) -> None:
    facts = {"role": "decode", "state": "alive", "busy": 1, "capacity": 3, "told": 1000, "seen": 1030}
    await hands.registry.announce("d1", facts)
    assert [problem.subject for problem in await audit.problems()] == ["worker d1"]
    await hands.registry.announce("d1", {**facts, "seen": 9000})
    assert await found(audit) == []


async def test_a_credit_without_a_worker_s_name_stops_no_sweep_and_no_lease(hands: Hands) -> None:
    await hands.redis.zadd(hands.keys.credits, {"odd": -1})
    await hands.no_lease()
    await hands.redis.zadd(hands.keys.credits, {"odd": -1})
    assert await hands.queue.sweep(60.0) == []
    assert await hands.redis.zcard(hands.keys.credits) == 0


async def test_the_sweep_forgets_places_that_workers_who_are_gone_still_offer(hands: Hands) -> None:
    await hands.credit("d1", "mine", busy=0)
    await hands.redis.zadd(hands.keys.credits, {"d9/n1": 5})  # a lease looks at the first one only
    await hands.queue.sweep(60.0)
    assert await hands.redis.zrange(hands.keys.credits, 0, -1) == ["d1/mine"]


async def test_the_sweep_forgets_consumers_of_workers_that_are_gone(hands: Hands, audit: Audit) -> None:
    await one_of_each(hands)
    await orphan_consumer(hands)
    await hands.queue.sweep(60.0)
    assert await found(audit) == []
    consumers = await hands.redis.xinfo_consumers(hands.keys.queues[2], GROUP)
    assert {consumer["name"] for consumer in consumers} == {"p1", "d1"}, "who lives, or owns something, stays"
