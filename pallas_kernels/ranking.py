"""The k highest of many scores, without a sort, and the numbers of what was chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.ordering import ordered_keys


def top_mask(
    scores: Float[Array, "*B S"], valid: Bool[Array, "*#B S"], k: Int32[Array, " *B"] | int
) -> Bool[Array, "*B S"]:
    """Whether an entry is among the ``k`` highest valid ones, ties to the lowest index.

    All valid entries if there are fewer than k; NaN and minus infinity come last. The k-th
    highest is found bit by bit, counting in 32 passes: ``k`` may be traced, and a sort of S
    entries costs more on every backend.
    """
    k = jnp.broadcast_to(jnp.asarray(k, jnp.int32), scores.shape[:-1])
    keys = jax.lax.bitcast_convert_type(ordered_keys(scores), jnp.uint32) ^ jnp.uint32(1 << 31)
    keys = jnp.where(valid, keys, 0)

    def set_bit(i: Int32[Array, ""], threshold: jax.Array) -> jax.Array:
        trial = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        enough = jnp.sum(keys >= trial[..., None], axis=-1, dtype=jnp.int32) >= k
        return jnp.where(enough, trial, threshold)

    # Derived from k so that it varies over the same axes under shard_map.
    threshold = jax.lax.fori_loop(0, 32, set_bit, jnp.zeros_like(k, jnp.uint32))[..., None]
    return break_ties(valid & (keys > threshold), valid & (keys == threshold), k[..., None])


def break_ties(
    above: Bool[Array, "*B S"], tied: Bool[Array, "*B S"], k: Int32[Array, "*B 1"]
) -> Bool[Array, "*B S"]:
    """Those above, and the first of those tied that make them k."""
    places = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= places))


def ascending_ids(chosen: Bool[Array, "B N"], capacity: int) -> Int32[Array, "B C"]:
    """The numbers of the chosen entries, the first C of them, padded with -1."""
    batch, entries = chosen.shape
    place = jnp.where(chosen, jnp.cumsum(chosen, axis=-1, dtype=jnp.int32) - 1, capacity)
    number = jnp.broadcast_to(jnp.arange(entries, dtype=jnp.int32)[None], place.shape)
    ids = jnp.full((batch, capacity), -1, jnp.int32)
    return ids.at[jnp.arange(batch)[:, None], place].set(number, mode="drop")
