"""A KV cache on its way in: whole, in order, of this model, unchanged; or refused with a sentence."""

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import FrameError
from pipeline.frames import Commit, Open, Part
from pipeline.geometry import Geometry, Layer
from pipeline.transfer import Transfer

CONTEXT = 64
GEOMETRY = Geometry(
    model="digest", kv_heads=2, head_dim=3, dtype="bfloat16", layers=(Layer(rope="full"), Layer(window=4, rope="local"))
)
TOKENS = 10
WINDOW_START = 7  # TOKENS − 4 + 1: the next token sees itself and three more


def digest(data: bytes) -> bytes:
    """Any one does here: the transfer only compares."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def opening(**changes: Any) -> Open:
    opened = Open(nonce="n", job="j", lease="p#1", tokens=TOKENS, fingerprint=GEOMETRY.fingerprint())
    return replace(opened, **changes)


def transfer(**changes: Any) -> Transfer:
    return Transfer(opening(**changes), GEOMETRY, CONTEXT)


def payload(layer: int, tensor: str, start: int, tokens: int) -> bytes:
    """Other bytes for every token of every tensor."""
    size = GEOMETRY.token_bytes
    return b"".join(bytes([(layer * 2 + (tensor == "v")) * 64 + at] * size) for at in range(start, start + tokens))


def part(layer: int, tensor: str, start: int, tokens: int, **changes: Any) -> Part:
    made = Part(
        nonce="n",
        layer=layer,
        tensor=tensor,
        start=start,
        tokens=tokens,
        dtype=GEOMETRY.dtype,
        shape=(GEOMETRY.kv_heads, tokens, GEOMETRY.head_dim),
        digest=digest(payload(layer, tensor, start, tokens)),
    )
    return replace(made, **changes)


def send(to: Transfer, layer: int, tensor: str, start: int, tokens: int, **changes: Any) -> None:
    data = payload(layer, tensor, start, tokens)
    to.accept(part(layer, tensor, start, tokens, **changes), memoryview(data), digest(data))


def send_both(to: Transfer, layer: int, *pieces: tuple[int, int]) -> None:
    for start, tokens in pieces:
        for tensor in "kv":
            send(to, layer, tensor, start, tokens)


def refused(act: Callable[[], object], *, says: str) -> None:
    with pytest.raises(FrameError, match=says):
        act()


COMMIT = Commit(nonce="n", lease="p#1", tokens=(1,))


def test_a_cache_that_came_whole_is_complete_and_comes_out_in_its_pieces() -> None:
    cache = transfer()
    send_both(cache, 0, (0, 4), (4, 6))
    send_both(cache, 1, (WINDOW_START, 3))
    cache.check_complete(COMMIT)
    blocks = list(cache.blocks())
    assert [(block.layer, block.start, block.tokens) for block in blocks] == [(0, 0, 4), (0, 4, 6), (1, 7, 3)]
    for block in blocks:
        assert bytes(block.k) == payload(block.layer, "k", block.start, block.tokens)
        assert bytes(block.v) == payload(block.layer, "v", block.start, block.tokens)


@given(st.lists(st.integers(1, TOKENS - 1), unique=True).map(sorted), st.randoms(use_true_random=False))
def test_layers_and_tensors_may_come_in_any_order_as_long_as_each_is_in_order(cuts: list[int], shuffle: Any) -> None:
    edges = [0, *cuts, TOKENS]
    pieces = [(start, end - start) for start, end in itertools.pairwise(edges)]
    todo = [[(0, tensor, *piece) for piece in pieces] for tensor in "kv"] + [[(1, tensor, 7, 3)] for tensor in "kv"]
    cache = transfer()
    while any(todo):
        queue = shuffle.choice([queue for queue in todo if queue])
        send(cache, *queue.pop(0))
    cache.check_complete(COMMIT)
    assert [(block.start, block.tokens) for block in cache.blocks()] == [*pieces, (7, 3)]


def test_a_prompt_shorter_than_the_window_is_sent_from_its_first_token() -> None:
    cache = transfer(tokens=3)
    for layer in (0, 1):
        send_both(cache, layer, (0, 3))
    cache.check_complete(COMMIT)


@pytest.mark.parametrize(("length", "first"), [(1, 0), (3, 0), (4, 1), (5, 2), (10, 7)])
def test_a_window_of_four_needs_three_cached_tokens(length: int, first: int) -> None:
    assert GEOMETRY.layers[1].first_token(length) == first
    assert GEOMETRY.layers[0].first_token(length) == 0


@pytest.mark.parametrize("start", [1, 5, 9])
def test_a_gap_is_refused(start: int) -> None:
    refused(lambda: send(transfer(), 0, "k", start, 1), says="expected token 0")


def test_a_gap_after_a_part_is_refused() -> None:
    cache = transfer()
    send(cache, 0, "k", 0, 4)
    refused(lambda: send(cache, 0, "k", 5, 1), says="layer 0 k from token 5: expected token 4")


def test_a_repeat_is_refused() -> None:
    cache = transfer()
    send(cache, 0, "k", 0, 4)
    refused(lambda: send(cache, 0, "k", 0, 4), says="expected token 4")


def test_an_overlap_is_refused() -> None:
    cache = transfer()
    send(cache, 0, "k", 0, 4)
    refused(lambda: send(cache, 0, "k", 3, 4), says="expected token 4")


@pytest.mark.parametrize("start", [0, 6, 8])
def test_a_layer_with_a_window_must_begin_at_its_window(start: int) -> None:
    refused(lambda: send(transfer(), 1, "v", start, 1), says="expected token 7")


def test_more_tokens_than_announced_are_refused() -> None:
    cache = transfer()
    send(cache, 0, "k", 0, 9)
    refused(lambda: send(cache, 0, "k", 9, 2), says="beyond the 10 tokens")


def test_a_part_of_another_type_is_refused() -> None:
    refused(lambda: send(transfer(), 0, "k", 0, 4, dtype="float16"), says="not this model's layout")


@pytest.mark.parametrize("shape", [(3, 4, 2), (2, 4, 4), (1, 4, 3), (4, 4, 3), (0, 4, 3)])
def test_a_part_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    refused(lambda: send(transfer(), 0, "k", 0, 4, shape=shape), says="not this model's layout")


@pytest.mark.parametrize("layer", [2, 1 << 40])
def test_a_layer_that_the_model_does_not_have_is_refused(layer: int) -> None:
    made = replace(part(0, "k", 0, 4), layer=layer)
    data = payload(0, "k", 0, 4)
    refused(lambda: transfer().accept(made, memoryview(data), digest(data)), says="the model has 2 layers")


@given(st.integers(0, 4 * GEOMETRY.token_bytes * 8 - 1))
def test_one_flipped_bit_is_refused(bit: int) -> None:
    data = bytearray(payload(0, "k", 0, 4))
    data[bit // 8] ^= 1 << bit % 8
    made = part(0, "k", 0, 4)
    refused(lambda: transfer().accept(made, memoryview(data), digest(bytes(data))), says="digest does not match")


@pytest.mark.parametrize("change", [-1, 1, -GEOMETRY.token_bytes, -(4 * GEOMETRY.token_bytes)])
def test_a_frame_of_another_length_is_refused_even_with_a_right_digest(change: int) -> None:
    data = (payload(0, "k", 0, 4) + b"\0" * 8)[: 4 * GEOMETRY.token_bytes + change]
    made = part(0, "k", 0, 4, digest=digest(data))
    refused(lambda: transfer().accept(made, memoryview(data), digest(data)), says=f"{len(data)} bytes came")


def test_a_refused_part_leaves_nothing_behind() -> None:
    cache = transfer()
    refused(lambda: send(cache, 0, "k", 0, 4, digest=b"other"), says="digest")
    assert all(block.layer != 0 for block in cache.blocks())
    send(cache, 0, "k", 0, 4)


@pytest.mark.parametrize("missing", [(0, "k"), (0, "v"), (1, "k"), (1, "v")])
def test_a_commit_with_a_tensor_missing_is_refused(missing: tuple[int, str]) -> None:
    cache = transfer()
    for layer, start in ((0, 0), (1, WINDOW_START)):
        for tensor in "kv":
            if (layer, tensor) != missing:
                send(cache, layer, tensor, start, TOKENS - start)
    refused(lambda: cache.check_complete(COMMIT), says=f"layer {missing[0]} {missing[1]}: . of 10 tokens came")


def test_a_commit_with_the_last_token_missing_is_refused() -> None:
    cache = transfer()
    send_both(cache, 0, (0, 9))
    send_both(cache, 1, (WINDOW_START, 3))
    refused(lambda: cache.check_complete(COMMIT), says="layer 0 k: 9 of 10 tokens came")


def test_a_commit_of_nothing_is_refused() -> None:
    refused(lambda: transfer().check_complete(COMMIT), says="layer 0 k: 0 of 10 tokens came")


def test_a_commit_under_another_lease_is_refused() -> None:
    cache = transfer()
    send_both(cache, 0, (0, TOKENS))
    send_both(cache, 1, (WINDOW_START, 3))
    refused(lambda: cache.check_complete(replace(COMMIT, lease="p#2")), says="another lease")


def test_k_and_v_that_are_cut_differently_are_refused_before_the_job_is_taken() -> None:
    cache = transfer()
    for tensor, cut in (("k", 4), ("v", 6)):
        send(cache, 0, tensor, 0, cut)
        send(cache, 0, tensor, cut, TOKENS - cut)
    send_both(cache, 1, (WINDOW_START, 3))
    refused(lambda: cache.check_complete(COMMIT), says="layer 0")


def test_k_and_v_in_different_numbers_of_parts_are_refused_before_the_job_is_taken() -> None:
    cache = transfer()
    send(cache, 0, "k", 0, TOKENS)
    send(cache, 0, "v", 0, 4)
    send(cache, 0, "v", 4, 6)
    send_both(cache, 1, (WINDOW_START, 3))
    refused(lambda: cache.check_complete(COMMIT), says="layer 0")


@pytest.mark.parametrize("tokens", [0, CONTEXT, CONTEXT + 1, 1 << 62])
def test_a_cache_that_does_not_fit_the_context_is_refused_at_once(tokens: int) -> None:
    refused(lambda: transfer(tokens=tokens), says=f"{tokens} tokens do not fit a context of {CONTEXT}")


@pytest.mark.parametrize(("field", "value"), [("version", 2), ("digest", "md5"), ("digest", "")])
def test_another_protocol_is_refused(field: str, value: Any) -> None:
    refused(lambda: transfer(**{field: value}), says="this worker")


OTHERS = {
    "model": ("other", "model differs: prefill has 'other', decode has 'digest'"),
    "kv_heads": (4, "kv_heads differs: prefill has 4, decode has 2"),
    "head_dim": (64, "head_dim differs"),
    "dtype": ("float32", "dtype differs"),
    "layers": (GEOMETRY.layers[:1], "layers differ: prefill has 1, decode has 2"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_geometry_is_refused_by_what_differs(name: str) -> None:
    value, sentence = OTHERS[name]
    other = replace(GEOMETRY, **{name: value})
    refused(lambda: transfer(fingerprint=other.fingerprint()), says=sentence)


@pytest.mark.parametrize("layer", [Layer(window=8, rope="local"), Layer(rope="local"), Layer(window=4, rope="full")])
def test_another_window_or_rotation_of_one_layer_is_refused(layer: Layer) -> None:
    other = replace(GEOMETRY, layers=(GEOMETRY.layers[0], layer))
    refused(lambda: transfer(fingerprint=other.fingerprint()), says="layer 1 differs")


@pytest.mark.parametrize(
    "layers", [None, 5, True, "ab", [1, 2], [None, None], {"a": 1, "b": 2}, [[], []], b"ab"], ids=repr
)
def test_a_fingerprint_whose_layers_are_something_else_is_refused(layers: Any) -> None:
    refused(lambda: transfer(fingerprint={**GEOMETRY.fingerprint(), "layers": layers}), says="layer")


def test_an_empty_fingerprint_is_refused() -> None:
    refused(lambda: transfer(fingerprint={}), says="model differs")


@given(
    st.dictionaries(
        st.sampled_from(["model", "kv_heads", "head_dim", "dtype", "layers"]),
        st.recursive(st.none() | st.integers() | st.text() | st.floats(), lambda inner: st.lists(inner, max_size=3)),
    )
)
def test_no_fingerprint_does_more_than_be_refused(changes: dict[str, Any]) -> None:
    hostile = {**GEOMETRY.fingerprint(), **changes}
    if any(GEOMETRY.fingerprint()[name] != hostile[name] for name in changes):
        refused(lambda: transfer(fingerprint=hostile), says="differ")


def test_the_sentence_about_a_fingerprint_is_short_whatever_was_sent() -> None:
    for name in ("model", "kv_heads", "dtype"):
        with pytest.raises(FrameError) as caught:
            transfer(fingerprint={**GEOMETRY.fingerprint(), name: "x" * 100_000})
        assert len(str(caught.value)) < 1000


def test_a_geometry_knows_its_bytes() -> None:
    assert GEOMETRY.token_bytes == 2 * 3 * 2
    assert GEOMETRY.bytes_per_token == 2 * 2 * 12
