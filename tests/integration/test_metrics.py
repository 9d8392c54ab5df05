"""What is counted, script by script, on a real Redis: each event once, whatever is repeated, and no job suffers for it."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import redis
from hands import JOB, Hands, until
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import Scrape
from brokers.audit import Audit
from brokers.dead_letters import DeadLetters
from brokers.metrics import Counters, Reading, Tally, Waits
from brokers.store import Store
from brokers.token_log import Append
from pipeline.config import Config
from pipeline.errors import RedisAway
from pipeline.job import Priority
from pipeline.metrics import BOUNDS, BUCKETS, histogram
from pipeline.states import Status


async def read(hands: Hands) -> Reading:
    return await Counters(hands.store).read()


async def counts(hands: Hands) -> dict[str, int]:
    """Without the histograms' fields; of those the number of observations."""
    found = dict((await read(hands)).counts)
    times = {name: histogram(found, name)[0][-1] for name in ("ttft", "queue", "e2e", "itl", "transfer")}
    fields = {field: count for field, count in found.items() if field.split(":")[0] not in times}
    return fields | {name: count for name, count in times.items() if count}


async def late(hands: Hands, job_id: str) -> bool:
    standing = await hands.queue.standing(job_id)
    return standing is not None and standing.late


async def now(hands: Hands) -> int:
    """Milliseconds, by Redis."""
    seconds, microseconds = await hands.redis.time()
    return int(seconds * 1000 + microseconds // 1000)


async def test_a_job_s_life_is_counted_once_though_every_call_is_repeated(hands: Hands) -> None:
    """Without the count in the script's own step, or behind its guard, a reply that was lost would count twice."""
    for _ in range(2):
        await hands.submit("a")
    await hands.credit()
    lease = await hands.lease()
    for _ in range(2):
        await hands.append("a", lease.lease_id, 0, 10)
    for _ in range(2):
        await hands.queue.handover("a", lease.lease_id, "d1#x")
    for _ in range(2):
        await hands.append("a", "d1#x", 1, 11)
    for _ in range(2):
        await hands.append("a", "d1#x", 1, 11, 12, 13, end="finished", reason="length")
    assert await counts(hands) == {
        "attempts": 1,
        "prompt_tokens": len(JOB.prompt),
        "generation_tokens": 4,
        "ended:finished:length": 1,
        "ttft": 1,
        "queue": 1,
        "e2e": 1,
    }


async def test_tokens_of_a_batch_are_counted_and_those_that_were_refused_are_not(hands: Hands) -> None:
    leases = {job: (await hands.leased(job)).lease_id for job in ("a", "b", "c", "d")}
    await hands.cancel("c")
    tokens = [(7, "x", ""), (8, "y", "")]
    batch = [Append(job_id=job, lease_id=lease, start=0, tokens=tokens) for job, lease in leases.items()]
    batch[3].start = 5
    assert await hands.log.append(batch) == ["2", "2", "lost:cancelled", "gap:0"]
    found = await counts(hands)
    assert (found["generation_tokens"], found["prompt_tokens"], found["ttft"]) == (4, 2 * len(JOB.prompt), 2)


async def test_a_prompt_is_counted_once_though_a_second_attempt_computes_it_again(hands: Hands) -> None:
    await hands.decoding("a")
    await hands.sweep(["a:queued"])
    await hands.credit()
    lease = await hands.lease("p2")
    await hands.append("a", lease.lease_id, 1, 101)
    found = await counts(hands)
    assert (found["prompt_tokens"], found["ttft"]) == (len(JOB.prompt), 1)
    assert (found["attempts"], found["queue"], found["generation_tokens"]) == (2, 2, 2)


async def test_every_way_back_into_the_line_has_its_cause(hands: Hands, config: Config) -> None:
    lease = await hands.leased("released")
    for _ in range(2):
        await hands.queue.release("released", lease.lease_id, "x")
    await hands.cancel("released")
    lease = await hands.leased("refunded")
    for _ in range(2):
        await hands.queue.release("refunded", lease.lease_id, "x", refund=True)
    await hands.cancel("refunded")
    await hands.leased("swept")
    await hands.sweep(["swept:queued"])
    await hands.cancel("swept")
    store = Store(replace(config, attempts=1))
    lease = await hands.leased("dead")
    for _ in range(2):
        await Hands(store).queue.release("dead", lease.lease_id, "x")
    await store.close()
    letters = DeadLetters(hands.store)
    (letter,) = await letters.all()
    for _ in range(2):
        await letters.requeue(letter)
    found = await counts(hands)
    assert {field: count for field, count in found.items() if field.startswith("requeues")} == {
        "requeues:released": 1,
        "requeues:refunded": 1,
        "requeues:lease_ran_out": 1,
        "requeues:by_hand": 1,
    }
    assert found["ended:failed"] == 1


async def test_a_cancel_is_counted_by_phase_when_it_has_taken_effect_and_once(hands: Hands) -> None:
    await hands.submit("waits")
    leases = {phase: await hands.leased(phase, priority=Priority.HIGH) for phase in ("prefill", "transfer")}
    await hands.decoding("decode", priority=Priority.HIGH)
    for job in ("waits", *leases, "decode"):
        for _ in range(2):
            await hands.cancel(job)
    assert {field for field in await counts(hands) if field.startswith("cancels")} == {"cancels:queued"}
    for phase in (*leases, "decode"):
        for _ in range(2):
            await hands.queue.settle(phase, phase)
    await hands.queue.settle("waits", "prefill")
    found = await counts(hands)
    assert {field: count for field, count in found.items() if field.startswith("cancels")} == {
        f"cancels:{phase}": 1 for phase in ("queued", *leases, "decode")
    }
    assert found["ended:cancelled"] == 4


async def test_a_deadline_is_no_cancel_whoever_finds_that_it_passed(hands: Hands) -> None:
    held = {job: await hands.leased(job, lifetime=0.5) for job in ("renewed", "appended", "given_back", "held")}
    waiting = ("leased", "swept", "looked_at")
    for job in waiting:
        await hands.submit(job, lifetime=0.5, priority=Priority.HIGH if job == "leased" else Priority.LOW)
    for job in (*held, *waiting):
        await until(lambda job=job: late(hands, job))
    for _ in range(2):
        for job in ("looked_at", "held"):
            await hands.queue.stop(job, Status.EXPIRED, "deadline")
            await hands.queue.settle(job, "prefill")
        await hands.queue.renew({"renewed": held["renewed"].lease_id})
        await hands.append("appended", held["appended"].lease_id, 0, 1)
        await hands.queue.release("given_back", held["given_back"].lease_id, "x")
    await hands.credit()
    await hands.no_lease()
    for _ in range(2):
        await hands.queue.sweep(60.0)
    assert await counts(hands) == {"attempts": 4, "ended:expired": 7, "queue": 7}


async def test_a_job_that_ends_while_it_waits_has_waited_too(hands: Hands) -> None:
    """Without, a queue whose jobs all expire would look like one without any waiting."""
    await hands.submit("a")
    await hands.redis.hset(hands.keys.job("a"), "entry", f"{await now(hands) - 3000}-0")
    await hands.cancel("a")
    below, seconds = histogram((await read(hands)).counts, "queue")
    assert below[BUCKETS.index("2.5")] == 0
    assert below[BUCKETS.index("5")] == 1
    assert seconds >= 3


async def test_lua_and_python_name_the_same_buckets(hands: Hands) -> None:
    """Without the one tuple, a count would lie under a field that nobody shows."""
    limits = [*BOUNDS, 2 * BOUNDS[-1]]
    for place, (low, high) in enumerate(itertools.pairwise(limits)):
        if low < 1:
            continue  # Redis' clock goes on
        job = f"j{place}"
        lease = await hands.leased(job)
        await hands.redis.hset(hands.keys.job(job), "submitted", int(await now(hands) - 500 * (low + high)))
        await hands.append(job, lease.lease_id, 0, 1)
    found = (await read(hands)).counts
    shown = {field.removeprefix("ttft:") for field in found if field.startswith("ttft:")} - {"us"}
    assert shown == set(BUCKETS[BUCKETS.index("2.5") :])


async def test_a_clock_that_was_set_back_makes_no_sum_fall(hands: Hands) -> None:
    """Without, Prometheus would take the system for one that has started anew."""
    lease = await hands.leased("a")
    await hands.redis.hset(hands.keys.job("a"), "submitted", await now(hands) + 60_000)
    await hands.append("a", lease.lease_id, 0, 1, end="finished", reason="stop")
    found = (await read(hands)).counts
    assert (found["ttft:us"], found["e2e:us"]) == (0, 0)


@pytest.mark.parametrize("spoilt", ["a string", "a word for a number"])
async def test_no_job_suffers_from_a_hash_that_somebody_has_spoilt(hands: Hands, spoilt: str) -> None:
    """Without pcall, a script would stop halfway: after its writes, before its answer."""
    if spoilt == "a string":
        await hands.redis.set(hands.keys.metrics, "x")
    else:
        fields = ("attempts", "generation_tokens", "prompt_tokens", "ttft:us", "ended:finished:stop", "queue:us")
        await hands.redis.hset(hands.keys.metrics, mapping=dict.fromkeys(fields, "x"))
    lease_id = await hands.decoding("a")
    assert await hands.append("a", lease_id, 1, 11, end="finished", reason="stop") == "2"
    assert await hands.idle()
    await hands.submit("b")
    await hands.cancel("b")
    assert await hands.idle()


async def test_counters_begin_anew_when_the_hash_is_deleted(hands: Hands) -> None:
    await hands.leased("a")
    await hands.redis.delete(hands.keys.metrics)
    assert await counts(hands) == {}
    await hands.leased("b")
    assert await counts(hands) == {"attempts": 1, "queue": 1}


async def test_the_audit_knows_the_hash_and_an_end_that_it_mends_is_no_second_end(hands: Hands) -> None:
    await hands.decoding("a")
    await hands.append("a", "d1#x", 1, 11, end="finished", reason="stop")
    audit = Audit(hands.store, lease_seconds=0.02, tick_seconds=0.01)
    before = await counts(hands)
    await hands.redis.xdel(hands.keys.tokens("a"), "3-0")
    assert await audit.repair() == []
    assert (await hands.log.read("a"))[-1].end == "finished"
    assert await counts(hands) == before


async def test_a_job_that_the_audit_puts_back_says_so(hands: Hands) -> None:
    await hands.leased("a")
    await hands.redis.hset(hands.keys.job("a"), "lease", "")
    await Audit(hands.store, lease_seconds=0.02, tick_seconds=0.01).repair()
    assert (await counts(hands))["requeues:mended"] == 1


# What workers report


async def test_a_report_whose_answer_was_lost_counts_once_and_what_came_meanwhile_too(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its number, or with another one for the repeat, it would count twice."""
    await hands.registry.announce("d1", {"role": "decode"})
    tally = Tally(hands.store, "d1")
    tally.add("transfer_bytes", 100)
    tally.observe("itl", 0.03)
    run = hands.store.run

    async def run_and_lose_the_answer(*args: Any, **kwargs: Any) -> Any:
        await run(*args, **kwargs)
        raise redis.ConnectionError("lost")

    monkeypatch.setattr(hands.store, "run", run_and_lose_the_answer)
    for _ in range(2):
        with pytest.raises(RedisAway):
            await tally.report()
    monkeypatch.setattr(hands.store, "run", run)
    tally.add("transfer_bytes", 11)
    await tally.report()
    await tally.report()
    assert await hands.redis.hgetall(hands.keys.metrics) == {
        "transfer_bytes": "111",
        "itl:0.04": "1",
        "itl:us": "30000",
    }


async def test_a_report_wakes_no_worker_that_is_gone(hands: Hands) -> None:
    tally = Tally(hands.store, "d1")
    tally.add("local_fallbacks")
    for _ in range(2):
        await tally.report()
    assert await counts(hands) == {"local_fallbacks": 1}
    assert await hands.redis.exists(hands.keys.worker("d1")) == 0


# What is there now


async def test_a_queue_s_depth_and_its_oldest_are_those_that_wait_not_those_that_are_held(hands: Hands) -> None:
    """Without the look into the line, the age would be that of a job in decode."""
    await hands.decoding("held", priority=Priority.LOW)
    await hands.submit("old", priority=Priority.LOW)
    await hands.submit("high", priority=Priority.HIGH)
    await hands.cancel("high")

    async def some_time_later() -> bool:
        return (await read(hands)).queues[Priority.LOW].oldest_seconds > 0.02

    await until(some_time_later)
    await hands.submit("young", priority=Priority.LOW)
    began = int((await hands.field("old", "entry") or "").partition("-")[0])
    before = await now(hands)
    found = (await read(hands)).queues
    after = await now(hands)
    assert found[:3] == [Waits(waiting=0, held=0, oldest_seconds=0.0)] * 3
    assert (found[3].waiting, found[3].held) == (2, 1)
    assert before - began <= found[3].oldest_seconds * 1000 <= after - began
    await hands.cancel("old")
    assert (await read(hands)).queues[3].oldest_seconds * 1000 < after - began


async def test_of_jobs_that_wait_out_of_turn_the_oldest_is_found(hands: Hands) -> None:
    """Without: the line's first is the next one to be served, and that is not the oldest."""
    await hands.submit("long", replace(JOB, prompt=(1,) * 4096))
    await hands.submit("short")
    for _ in range(2):
        await hands.submit("other", owner="other")
    began = int((await hands.field("long", "entry") or "").partition("-")[0])
    before = await now(hands)
    assert (await read(hands)).queues[Priority.NORMAL].oldest_seconds * 1000 >= before - began
    await hands.credit()
    assert (await hands.lease()).job_id != "long"
    before = await now(hands)
    assert (await read(hands)).queues[Priority.NORMAL].oldest_seconds * 1000 >= before - began


async def test_a_job_that_is_handed_back_waits_in_the_first_queue(hands: Hands) -> None:
    lease = await hands.leased("a")
    await hands.queue.release("a", lease.lease_id, "x")
    waits = [(queue.waiting, queue.held) for queue in (await read(hands)).queues]
    assert waits == [(1, 0), (0, 0), (0, 0), (0, 0)]


async def test_credits_dead_letters_and_workers_are_told_as_they_are(hands: Hands, config: Config) -> None:
    store = Store(replace(config, attempts=1))
    lease = await hands.leased("a")
    await Hands(store).queue.release("a", lease.lease_id, "x")
    await store.close()
    await hands.credit()
    facts = {"role": "decode", "state": "alive", "slots": 4, "capacity": 6, "busy": 1, "device": "sim"}
    await hands.registry.announce("d1", facts)
    await hands.redis.sadd(hands.keys.workers, "gone")
    found = await read(hands)
    assert (found.credits, found.dead) == (1, 1)
    assert sorted(found.workers, key=len) == [
        {},
        {"role": "decode", "state": "alive", "slots": "4", "capacity": "6", "busy": "1"},
    ]


async def test_whatever_is_counted_is_shown(hands: Hands) -> None:
    """Without, a word that is spelt in one way in a script and in another in the table would never be missed."""
    lease_id = await hands.decoding("a")
    await hands.append("a", lease_id, 1, 11, end="finished", reason="stop")
    for phase in ("queued", "prefill"):
        await (hands.submit if phase == "queued" else hands.leased)(phase)
        await hands.cancel(phase)
        await hands.queue.settle(phase, phase)
    lease = await hands.leased("b")
    await hands.queue.release("b", lease.lease_id, "x")
    tally = Tally(hands.store, "d1")
    for field in ("transfer_bytes", "transfer_failures:void", "transfer_failures:failed", "local_fallbacks"):
        tally.add(field)
    for name in ("itl", "transfer"):
        tally.observe(name, 0.01)
    await tally.report()
    empty = Reading(counts={}, queues=[Waits(waiting=0, held=0, oldest_seconds=0)] * 4, credits=0, dead=0, workers=[])
    for field in (await read(hands)).counts:
        registry = CollectorRegistry()
        registry.register(Scrape(replace(empty, counts={field: 1}), "m"))
        families = text_string_to_metric_families(generate_latest(registry).decode())
        assert any(sample.value for family in families for sample in family.samples), field
