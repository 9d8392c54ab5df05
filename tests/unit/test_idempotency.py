"""What names a job that may be asked for again, and what tells a repeat from another request."""

import json

from api.idempotency import digest_of, job_id_of, seed_of
from pipeline.sampling import MAX_SEED


def test_each_owner_key_and_number_has_an_id_of_its_own_and_always_the_same() -> None:
    """Joined without care, ("a", "b1") and ("ab", "1") would be one job."""
    named = [("a", "b1", 0), ("ab", "1", 0), ("a", "b", 10), ("a", "b", 1), ("a", 'b", 1', 0), ("a", "b1", 1)]
    ids = [job_id_of(*name) for name in named]
    assert len(set(ids)) == len(named)
    assert ids == [job_id_of(*name) for name in named]
    assert all(len(job_id) == 32 for job_id in ids)


def test_a_body_is_the_same_in_any_order_and_spacing_and_another_with_any_other_value() -> None:
    body = {"prompt": "hé", "metadata": {"b": 1, "a": [1, {"d": 2, "c": 3}]}, "temperature": 0.7}
    same = [
        json.dumps(body),
        json.dumps(body, indent=3, sort_keys=True),
        json.dumps(dict(reversed(body.items())), ensure_ascii=False),
    ]
    assert len({digest_of(text.encode()) for text in same}) == 1
    others = [{**body, "temperature": 0.8}, {**body, "stream": True}, {**body, "metadata": {"b": 1, "a": [{}, 1]}}]
    assert len({digest_of(json.dumps(other).encode()) for other in [body, *others]}) == 4


def test_a_seed_follows_from_the_job_and_is_one_that_a_client_could_have_sent() -> None:
    seeds = {seed_of(job_id_of("a", "b", number)) for number in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert seed_of("x") == seed_of("x")
