"""How good a selection or a prediction was: pure functions of recorded scores."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.ranking import top_mask
from spin_jax.pooling import by_block
from spin_jax.selection import BlockSelection


class MissSummary(NamedTuple):
    """Misses of many rows, as shares in [0, 1]; NaN where no row is eligible."""

    mean: Float[Array, ""]
    p99: Float[Array, ""]
    """Over all eligible rows at once."""
    mean_of_p99: Float[Array, ""]
    """The mean over layers and traces of each one's own p99."""
    rows: Int32[Array, ""]
    """How many were eligible."""


def visible_slots(num_slots: Int32[Array, " *B"], max_slots: int) -> Bool[Array, "*B S"]:
    """``i < N``."""
    return jnp.arange(max_slots).reshape((1,) * num_slots.ndim + (-1,)) < num_slots[..., None]


def kept_slots(
    selection: BlockSelection, num_slots: Int32[Array, " B"], block_size: int, max_slots: int
) -> Bool[Array, "B S"]:
    """The visible slots of the selected blocks."""
    visible = visible_slots(num_slots, max_slots)
    blocks = by_block(visible, block_size, False)
    batch, num_blocks, _ = blocks.shape
    at = jnp.where(selection.block_ids < 0, num_blocks, selection.block_ids)
    row = jnp.arange(batch)[:, None]
    selected = jnp.zeros((batch, num_blocks), bool).at[row, at].set(True, mode="drop")
    return (blocks & selected[..., None]).reshape(batch, -1)[:, :max_slots]


def miss(
    scores: Float[Array, "*B S"],
    kept: Bool[Array, "*B S"],
    num_slots: Int32[Array, " *B"],
    top_k: int,
) -> Float[Array, " *B"]:
    """``|T* \\ kept| / |T*|`` with ``T*`` the top ``min(K, N)`` of the dense scores; 0 if N is 0.

    Ties go to the lowest slot. Source: the spec's "Metrics".
    """
    return _share_missing(_top(scores, num_slots, top_k), kept)


def eligible_rows(
    selection: BlockSelection,
    num_slots: Int32[Array, " B"],
    warm: Bool[Array, " B"],
    block_size: int,
) -> Bool[Array, " B"]:
    """Rows that count in a summary: after warm-up, and not all their blocks selected."""
    return warm & (selection.count < -(-num_slots // block_size))


def summarize_miss(misses: Float[Array, "L B T"], eligible: Bool[Array, "L B T"]) -> MissSummary:
    """Mean and p99 over the eligible rows of layers L, traces B and steps T.

    Percentiles interpolate linearly. Traces with no eligible step have no p99 of their own.
    """
    values = jnp.where(eligible, misses, jnp.nan)
    return MissSummary(
        mean=jnp.nanmean(values),
        p99=jnp.nanquantile(values, 0.99),
        mean_of_p99=jnp.nanmean(jnp.nanquantile(values, 0.99, axis=-1)),
        rows=jnp.sum(eligible, dtype=jnp.int32),
    )


def realized_sparsity(
    count: Int32[Array, " ..."], num_slots: Int32[Array, " ..."], block_size: int
) -> Float[Array, ""]:
    """``1 - selected / visible`` blocks, over all rows given; 0 if nothing is visible.

    For the union of a draft's rows pass the last row's N. Source: the spec's "Metrics".
    """
    # In float32: the counts of a long run overflow int32, and a share needs no more digits.
    selected = jnp.sum(count.astype(jnp.float32))
    visible = jnp.sum((-(-num_slots // block_size)).astype(jnp.float32))
    return jnp.where(visible > 0, 1 - selected / jnp.maximum(visible, 1), 0.0)


def pearson(
    predicted: Float[Array, "*B S"], actual: Float[Array, "*B S"], num_slots: Int32[Array, " *B"]
) -> Float[Array, " *B"]:
    """``cov(x, y) / (sd x sd y)`` over the visible slots; 0 where either is constant."""
    visible = visible_slots(num_slots, actual.shape[-1])
    size = jnp.maximum(num_slots, 1)[..., None]

    def centred(x: Array) -> Array:
        x = jnp.where(visible, x.astype(jnp.float32), 0.0)
        return jnp.where(visible, x - jnp.sum(x, axis=-1, keepdims=True) / size, 0.0)

    x, y = centred(predicted), centred(actual)
    scale = jnp.sqrt(jnp.sum(x * x, axis=-1)) * jnp.sqrt(jnp.sum(y * y, axis=-1))
    return jnp.where(scale > 0, jnp.sum(x * y, axis=-1) / jnp.where(scale > 0, scale, 1.0), 0.0)


def top_k_recall(
    predicted: Float[Array, "*B S"],
    actual: Float[Array, "*B S"],
    num_slots: Int32[Array, " *B"],
    top_k: int,
) -> Float[Array, " *B"]:
    """``|TopK(x) & TopK(y)| / |TopK(y)|`` over the visible slots; 1 if N is 0."""
    kept = _top(predicted, num_slots, top_k)
    return 1 - _share_missing(_top(actual, num_slots, top_k), kept)


def _top(scores: Array, num_slots: Array, top_k: int) -> Array:
    visible = visible_slots(num_slots, scores.shape[-1])
    return top_mask(scores, visible, jnp.minimum(num_slots, top_k))


def _share_missing(wanted: Array, kept: Array) -> Array:
    size = jnp.sum(wanted, axis=-1)
    return jnp.sum(wanted & ~kept, axis=-1) / jnp.maximum(size, 1)
