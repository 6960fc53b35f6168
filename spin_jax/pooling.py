"""From slots to blocks: pooled scores, and the blocks that A0's top slots fall in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.ranking import top_mask
from spin_jax.config import SpinConfig, slot_budget


def pool(
    scores: Float[Array, "*B N b"], valid: Bool[Array, "*B N b"], pooling: str
) -> Float[Array, "*B N"]:
    """Max, mean of up to four largest, or mean, of each block's valid entries; else -inf.

    Source: the spec's "Block reduction", A1 and A2.
    """
    scores = jnp.where(valid, scores.astype(jnp.float32), -jnp.inf)
    if pooling == "max":
        return jnp.max(scores, axis=-1)
    size = jnp.sum(valid, axis=-1, dtype=jnp.int32)
    if pooling == "mean":
        total = jnp.sum(jnp.where(valid, scores, 0.0), axis=-1)
    else:
        # Four passes over the block in place of a sort of it.
        left = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
        slot = jax.lax.broadcasted_iota(jnp.int32, left.shape, left.ndim - 1)
        total = jnp.zeros(size.shape, jnp.float32)
        for place in range(min(4, left.shape[-1])):
            total += jnp.where(place < size, jnp.max(left, axis=-1), 0.0)
            left = jnp.where(slot == jnp.argmax(left, axis=-1)[..., None], -jnp.inf, left)
        size = jnp.minimum(size, 4)
    return jnp.where(size > 0, total / jnp.maximum(size, 1), -jnp.inf)


def by_block(x: Array, block_size: int, fill: float | bool) -> Array:
    """[..., S] as [..., N, b], the last block filled up."""
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block_size)]
    return jnp.pad(x, pad, constant_values=fill).reshape(*x.shape[:-1], -1, block_size)


def blocks_of_top_slots(
    predicted: Float[Array, "B S"], num_slots: Int32[Array, " B"], cfg: SpinConfig, top_k: int
) -> Int32[Array, " B"]:
    """A0: how many blocks are forced or hold one of the ``max(K, ceil((1 - rho) N))`` top slots.

    The blocks themselves are the forced ones and the highest block maxima: a block left out has
    no slot above the last top slot, and of those equal to it the lowest are taken, as everywhere.
    """
    visible = jnp.arange(predicted.shape[-1])[None] < num_slots[:, None]
    top = top_mask(predicted, visible, slot_budget(num_slots, cfg, top_k))
    holds = jnp.any(by_block(top, cfg.block_size, False), axis=-1)
    block = jnp.arange(holds.shape[-1])[None]
    newest = (num_slots[:, None] - 1) // cfg.block_size
    forced = (num_slots[:, None] > 0) & ((block == 0) | (block == newest))
    return jnp.sum(holds | forced, axis=-1, dtype=jnp.int32)
