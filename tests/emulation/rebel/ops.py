"""The operators that optimum-rbln's graphs are made of, written plainly for the CPU. Shapes as the vendor passes them:

q `[rows, kv_heads, group, tokens, head_dim]`; k, v `[rows, kv_heads, 1, tokens, head_dim]`; caches `[blocks, kv_heads, 1,
block, head_dim]`. Every position of a sequence's blocks takes part in the sums, masked or not, as in a kernel of fixed shape.
"""

from collections.abc import Callable

import torch

import rebel

Tensor = torch.Tensor

_operators = torch.library.Library("rbln_custom_ops", "DEF")


def _define(schema: str, function: Callable[..., Tensor]) -> None:
    _operators.define(schema)
    _operators.impl(schema.split("(")[0], function, "CPU")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = x @ weight.t()
    return product if bias is None else product + bias


def _cache_update(cache: Tensor, state: Tensor, position: Tensor, axis: Tensor) -> Tensor:
    at = int(position)
    if "off_by_one" in rebel.FAULTS:
        at = (at + 1) % (cache.shape[int(axis)] - state.shape[int(axis)] + 1)
    cache.narrow(int(axis), at, state.shape[int(axis)]).copy_(state)
    return torch.zeros(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, visible: Tensor) -> Tensor:
    """q `[kv_heads, group, tokens, head_dim]`, k and v `[kv_heads, keys, head_dim]`, visible `[tokens, keys]`."""
    scores = torch.einsum("hgsd,hnd->hgsn", q.float(), k.float()) * float(scale)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hgsn,hnd->hgsd", weights, v.float())


def _paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    seq: Tensor,
    scale: Tensor,
    block_table: Tensor,
    block_size: int,
    mask: Tensor | None,
    bidirectional: bool = False,
) -> Tensor:
    answer = torch.empty_like(q)
    rows, tokens = q.shape[0], q.shape[3]
    for row, table in enumerate(block_table.reshape(rows, -1).long()):
        start = int(seq.reshape(rows, -1)[row, 0])
        at = torch.arange(start, start + tokens)
        assert start + tokens <= len(table) * block_size, "a chunk reaches beyond its sequence's blocks"
        blocks, offsets = table[at // block_size], at % block_size
        for cache, fresh in ((kcache, k), (vcache, v)):
            cache[blocks, :, 0, offsets] = fresh[row, :, 0].transpose(0, 1)
        keys, values = (cache[table, :, 0].transpose(0, 1).flatten(1, 2) for cache in (kcache, vcache))
        there = torch.arange(keys.shape[1])[None]
        visible = there <= (at[-1:, None] if bidirectional else at[:, None])
        if mask is not None:
            visible = visible & (mask.reshape(mask.shape[0], -1)[row if mask.shape[0] > 1 else 0] > 0)[None]
        answer[row] = _attend(q[row], keys, values, scale, visible.expand(tokens, -1))
    return answer


def _windowed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    cache_seq_len: Tensor,
    cache_offset: Tensor,
    scale: Tensor,
    block_table: Tensor,
    bidirectional: bool = False,
) -> Tensor:
    """The newest tokens stand at the end of what is kept; attention sees them before older ones are shifted out."""
    answer = torch.empty_like(q)
    rows, tokens, window = q.shape[0], q.shape[3], kcache.shape[3]
    for row in range(rows):
        block = int(block_table.reshape(rows, -1)[row, 0])
        kept, end = int(cache_seq_len.reshape(rows, -1)[row, 0]), int(cache_offset.reshape(rows, -1)[row, 0])
        keys, values = (
            torch.cat([cache[block, :, 0, :kept], fresh[row, :, 0]], 1) for cache, fresh in ((kcache, k), (vcache, v))
        )
        query, there = kept + torch.arange(tokens)[:, None], torch.arange(kept + tokens)[None]
        visible = (there > query - window) & ((there < end) if bidirectional else (there <= query))
        answer[row] = _attend(q[row], keys, values, scale, visible | (there == query))
        for cache, all_of_it in ((kcache, keys), (vcache, values)):
            newest = all_of_it[:, max(0, end - window) : end]
            cache[block, :, 0, : newest.shape[1]] = newest
    return answer


_define("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", _linear)
_define("rbln_cache_update(Tensor(a!) cache, Tensor state, Tensor position, Tensor axis) -> Tensor", _cache_update)

_PAGED = (
    "Tensor q, Tensor k, Tensor v, Tensor(a!) kcache, Tensor(b!) vcache, Tensor seq, Tensor scale, Tensor block_table"
)
_PAGED += ", int block_size"
_END = "Tensor? mask=None, Tensor? s_aux=None) -> Tensor"
for _flash, _partition in (("", ""), ("flash_", ", int partition")):
    # flash attention is another order of the same sums
    _define(
        f"paged_{_flash}causal_attn_decode({_PAGED}{_partition}, {_END}",
        lambda q, k, v, kc, vc, seq, scale, table, size, *rest: _paged(
            q, k, v, kc, vc, seq, scale, table, size, next((x for x in rest if isinstance(x, Tensor)), None)
        ),
    )
    _define(
        f"paged_{_flash}causal_attn_prefill({_PAGED}{_partition}, bool is_bidirectional, {_END}",
        lambda q, k, v, kc, vc, seq, scale, table, size, *rest: _paged(
            *(q, k, v, kc, vc, seq, scale, table, size),
            next((x for x in rest if isinstance(x, Tensor)), None),
            next(x for x in rest if isinstance(x, bool)),
        ),
    )
_WINDOWED = (
    "Tensor q, Tensor k, Tensor v, Tensor(a!) kcache, Tensor(b!) vcache, Tensor cache_seq_len, Tensor cache_offset"
)
_MASKED = "Tensor? attn_mask=None, Tensor? s_aux=None) -> Tensor"
_WINDOWED += ", Tensor scale, Tensor block_table, int block_size"
_define(
    f"paged_sliding_window_attn_decode({_WINDOWED}, {_MASKED}",
    lambda q, k, v, kc, vc, seen, offset, scale, table, size, *_: _windowed(
        q, k, v, kc, vc, seen, offset, scale, table
    ),
)
_define(
    f"paged_sliding_window_attn_prefill({_WINDOWED}, bool is_bidirectional, {_MASKED}",
    lambda q, k, v, kc, vc, seen, offset, scale, table, size, bidirectional, *_: _windowed(
        q, k, v, kc, vc, seen, offset, scale, table, bidirectional
    ),
)
