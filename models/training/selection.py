"""The top K of long rows as a mask, by bisection instead of by sorting.

Training needs no slot numbers, only which slots count. Sorting [B, T, S] scores is the slowest
operation of a step on a GPU; counting how many exceed a threshold is a reduction at memory speed,
and some forty of them find the K-th largest value exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32


def top_mask(
    scores: Float[Array, "B T S"], visible: Bool[Array, "#B T S"], k: int
) -> Bool[Array, "B T S"]:
    """The ``min(K, visible)`` largest visible scores of each row; ties go to the lowest slot.

    No gradient passes. Scores are finite.
    """
    order = jnp.where(visible, _ordered(jax.lax.stop_gradient(scores)), 0)

    def raise_threshold(i: Array, threshold: UInt32[Array, "B T 1"]) -> UInt32[Array, "B T 1"]:
        higher = threshold | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        return jnp.where(_count(order >= higher) >= k, higher, threshold)

    # The largest threshold that K scores reach is the K-th largest score, 0 if there are fewer.
    threshold = jax.lax.fori_loop(
        0, 32, raise_threshold, jnp.zeros((*scores.shape[:2], 1), jnp.uint32)
    )
    above = order > threshold
    level = (order == threshold) & visible
    missing = k - _count(above)
    slot = jnp.arange(scores.shape[2], dtype=jnp.int32)[None, None]
    bits = scores.shape[2].bit_length()

    def raise_limit(i: Array, limit: Array) -> Array:
        higher = limit | (jnp.int32(1) << (bits - 1 - i))
        return jnp.where(_count(level & (slot < higher)) <= missing, higher, limit)

    limit = jax.lax.fori_loop(0, bits, raise_limit, jnp.zeros_like(missing))
    return above | (level & (slot < limit))


def _ordered(x: Float[Array, "B T S"]) -> UInt32[Array, "B T S"]:
    """Positive unsigned integers in the order of the values; -0 equals 0."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _count(where: Bool[Array, "B T S"]) -> Array:
    return jnp.sum(where, axis=-1, keepdims=True, dtype=jnp.int32)
