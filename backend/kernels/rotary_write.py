"""Per-head norm, rotation and the write into the paged KV memory, between fused QKV projection and attention.

A program takes one row and a few heads of [query heads | key heads | value heads]. Queries are rotated in place, keys
and values go to the row's slot.
"""

import torch
import triton
import triton.language as tl

_HEADS = 8
"""Heads of one program: enough bytes in flight, and still several programs for a single row."""


@triton.jit
def _rotary_write(
    qkv: tl.tensor,
    rope: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    eps: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = HEAD_DIM // 2
    columns = tl.arange(0, HALF_COLUMNS)
    in_half = columns < half
    inside = (heads[:, None] < QUERY_HEADS + 2 * KV_HEADS) & in_half[None, :]
    source = qkv + row * ((QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM) + heads[:, None] * HEAD_DIM + columns[None, :]
    raw_low = tl.load(source, mask=inside, other=0.0)
    raw_high = tl.load(source + half, mask=inside, other=0.0)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    is_query = heads < QUERY_HEADS
    is_value = heads >= QUERY_HEADS + KV_HEADS

    if NORMED:
        square = tl.sum(low * low + high * high, 1) / HEAD_DIM
        factor = 1.0 / tl.sqrt(square + eps)
        q_low = tl.load(query_norm + columns, mask=in_half, other=0.0).to(tl.float32)
        q_high = tl.load(query_norm + half + columns, mask=in_half, other=0.0).to(tl.float32)
        k_low = tl.load(key_norm + columns, mask=in_half, other=0.0).to(tl.float32)
        k_high = tl.load(key_norm + half + columns, mask=in_half, other=0.0).to(tl.float32)
        low = low * factor[:, None] * tl.where(is_query[:, None], q_low[None, :], k_low[None, :])
        high = high * factor[:, None] * tl.where(is_query[:, None], q_high[None, :], k_high[None, :])

    angles = rope + tl.load(positions + row).to(tl.int64) * HEAD_DIM + columns
    cosines = tl.load(angles, mask=in_half, other=0.0)
    sines = tl.load(angles + half, mask=in_half, other=0.0)
    kind = qkv.dtype.element_ty
    turned_low = (low * cosines[None, :] - high * sines[None, :]).to(kind)
    turned_high = (high * cosines[None, :] + low * sines[None, :]).to(kind)

    to_query = inside & is_query[:, None]
    tl.store(source, turned_low, mask=to_query)
    tl.store(source + half, turned_high, mask=to_query)

    slot = tl.load(slots + row).to(tl.int64)
    kv_head = tl.where(is_value, heads - QUERY_HEADS - KV_HEADS, heads - QUERY_HEADS)
    at = ((slot // BLOCK * KV_HEADS + kv_head) * BLOCK + slot % BLOCK)[:, None] * HEAD_DIM + columns[None, :]
    to_keys = inside & (~is_query & ~is_value)[:, None]
    tl.store(keys + at, turned_low, mask=to_keys)
    tl.store(keys + at + half, turned_high, mask=to_keys)
    to_values = inside & is_value[:, None]
    tl.store(values + at, raw_low, mask=to_values)
    tl.store(values + at + half, raw_high, mask=to_values)


def rotary_write(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Rotates the queries of ``qkv`` in place and writes rotated keys, and values, to their slots.

    Args:
        qkv: [T, (heads + 2 * kv heads) * head_dim], contiguous.
        rope: float32 [positions, head_dim], see ``rope_table``.
        positions: int32 [T].
        slots: int64 [T], block * block_size + offset.
        norms: weights [head_dim] of the per-head norms of queries and keys, applied before the rotation.
        keys, values: [blocks, kv heads, block_size, head_dim], contiguous, in the dtype of ``qkv``.
    """
    rows, width = qkv.shape
    kv_heads, dim = keys.shape[1], keys.shape[3]
    heads = width // dim
    query_norm, key_norm = norms if norms is not None else (rope, rope)
    _rotary_write[(rows, triton.cdiv(heads, _HEADS))](
        qkv,
        rope,
        positions,
        slots,
        query_norm,
        key_norm,
        keys,
        values,
        eps,
        QUERY_HEADS=heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        HALF_COLUMNS=triton.next_power_of_2(dim // 2),
        BLOCK=keys.shape[2],
        NORMED=norms is not None,
        HEADS=_HEADS,
        num_warps=2,
    )
