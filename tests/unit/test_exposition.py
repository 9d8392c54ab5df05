"""What Prometheus gets to read, from numbers that were made up."""

import re
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import FAMILIES, Scrape, table
from brokers.metrics import Reading, Waits
from pipeline.job import QUEUES
from pipeline.metrics import BOUNDS, BUCKETS, bucket, histogram

ROOT = Path(__file__).resolve().parents[2]
MODEL = 'a "quoted" \\ name'
TIMES = ("ttft", "itl", "e2e", "queue", "transfer")


def reading(counts: dict[str, int] | None = None, workers: list[dict[str, str]] | None = None) -> Reading:
    waits = [Waits(waiting=index, held=10 + index, oldest_seconds=index / 4) for index in range(QUEUES)]
    return Reading(counts=counts or {}, queues=waits, credits=7, dead=3, workers=workers or [])


def text(shown: Reading) -> str:
    registry = CollectorRegistry()
    registry.register(Scrape(shown, MODEL))
    return generate_latest(registry).decode()


def parsed(shown: Reading) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text(shown))}


def values(shown: Reading, name: str, label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in parsed(shown)[name].samples}


def busy() -> Reading:
    """Something in every bucket of every histogram."""
    counts = {f"{name}:{limit}": place + 1 for name in TIMES for place, limit in enumerate(BUCKETS)}
    return reading(counts | {f"{name}:us": 2_500_000 for name in TIMES})


def test_the_table_of_the_document_is_what_is_served() -> None:
    assert table() in (ROOT / "docs/metrics.md").read_text()


def test_every_name_is_written_as_prometheus_wants_it_and_explained() -> None:
    """What promtool would say: names, the suffix of counters, units at the end, help and type in front of the samples."""
    lines = text(busy()).splitlines()
    for family in FAMILIES:
        assert re.fullmatch(r"(vllm|kvrelay):[a-z0-9_]+", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert not re.search("_(milliseconds|ms|count|sum|bucket)$", family.name)
        start = lines.index(f"# HELP {family.name} {family.text}")
        assert lines[start + 1] == f"# TYPE {family.name} {family.kind}"
        assert lines[start + 2].startswith(family.name)
        assert family.text.endswith(".")
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_no_series_comes_twice_and_each_names_the_model() -> None:
    series = Counter()
    for family in parsed(busy()).values():
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            series[sample.name, *sorted(sample.labels.items())] += 1
    assert max(series.values()) == 1


def test_everything_is_there_from_the_start_with_zeros() -> None:
    """Without, the first failure of its kind would be no increase, and no alert."""
    empty = Reading(
        counts={}, queues=[Waits(waiting=0, held=0, oldest_seconds=0)] * QUEUES, credits=0, dead=0, workers=[]
    )
    for name, family in parsed(empty).items():
        assert family.samples, name
        assert {sample.value for sample in family.samples} == {0}, name


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.kind == "histogram"], ids=lambda f: f.name)
def test_buckets_only_grow_and_the_last_one_is_the_count(family: object) -> None:
    name = family.name  # type: ignore[attr-defined]
    samples = parsed(busy())[name].samples
    buckets = [(float(sample.labels["le"]), sample.value) for sample in samples if sample.name == f"{name}_bucket"]
    assert [limit for limit, _ in buckets] == [*BOUNDS, float("inf")]
    assert [value for _, value in buckets] == [sum(range(1, place + 2)) for place in range(len(BUCKETS))]
    (count,) = (sample.value for sample in samples if sample.name == f"{name}_count")
    (total,) = (sample.value for sample in samples if sample.name == f"{name}_sum")
    assert (count, total) == (buckets[-1][1], 2.5)


def test_a_bound_belongs_to_its_bucket_and_what_is_above_all_to_the_last() -> None:
    assert [bucket(bound) for bound in BOUNDS] == list(BUCKETS[:-1])
    assert [bucket(bound * 1.001) for bound in BOUNDS] == list(BUCKETS[1:])
    assert bucket(0) == BUCKETS[0]


def test_counts_of_bounds_that_an_earlier_version_had_are_not_lost() -> None:
    below, _ = histogram({"ttft:0.3": 5, "ttft:0.5": 1, "ttfts:0.1": 9}, "ttft")
    assert dict(zip(BUCKETS, below, strict=True)) | {"0.25": 0, "0.5": 6, "inf": 6} == dict(
        zip(BUCKETS, below, strict=True)
    )


def test_ends_are_told_in_vllm_s_words_and_in_ours() -> None:
    ended = {"finished:stop": 5, "finished:length": 4, "cancelled": 3, "expired": 2, "failed": 1}
    shown = reading({f"ended:{end}": count for end, count in ended.items()})
    assert values(shown, "vllm:request_success", "finished_reason") == {"stop": 5, "length": 4, "abort": 5, "error": 1}
    assert values(shown, "kvrelay:jobs_ended", "status") == {"finished": 9, "cancelled": 3, "expired": 2, "failed": 1}


def test_queues_are_told_by_priority() -> None:
    assert values(reading(), "kvrelay:queue_depth", "priority") == {"handed_back": 0, "high": 1, "normal": 2, "low": 3}
    assert values(reading(), "kvrelay:queue_oldest_age_seconds", "priority")["low"] == 0.75
    assert parsed(reading())["vllm:num_requests_waiting"].samples[0].value == 6
    assert parsed(reading())["vllm:num_requests_running"].samples[0].value == 46


def test_what_workers_have_is_added_up_for_those_that_live() -> None:
    decode = {"role": "decode", "state": "alive", "slots": "8", "capacity": "10", "busy": "3"}
    workers = [decode, decode, {**decode, "state": "wedged"}, {"role": "prefill", "state": "alive", "slots": "1"}, {}]
    shown = reading(workers=workers)
    assert values(shown, "kvrelay:slots", "role") == {"prefill": 1, "decode": 16}
    assert values(shown, "kvrelay:jobs_in_hand", "role") == {"prefill": 0, "decode": 6}
    assert parsed(shown)["kvrelay:places"].samples[0].value == 20
    found = {
        (sample.labels["role"], sample.labels["state"]): sample.value
        for sample in parsed(shown)["kvrelay:workers"].samples
    }
    assert {key: value for key, value in found.items() if value} == {
        ("decode", "alive"): 2,
        ("decode", "wedged"): 1,
        ("prefill", "alive"): 1,
    }
