"""SPIN's state update from the scored slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.compat import Implementation, choose
from pallas_kernels.ordering import LOWEST
from pallas_kernels.scoring import slots_of, take_blocks


def ema_scatter(
    V: Float[Array, "B S"],
    D_rev: Float[Array, "B S"],
    scores: Float[Array, "B C*block_size"],
    block_ids: Int32[Array, "B C"],
    num_slots: Int32[Array, " B"],
    *,
    block_size: int,
    decay: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """``V_i <- a V_i + (1 - a) z_i`` and ``D[q - i]`` likewise, for every scored visible slot i.

    Args:
        V: Decayed scores by slot, float32 or bf16; minus infinity marks a slot not observed yet
            and counts as 0 here.
        D_rev: Decayed scores by distance, farthest first: slot i at ``q = num_slots - 1`` is
            ``D_rev[S - num_slots + i]``.
        scores: Float32 scores z in the order of ``block_ids``; an observation is finite and above
            the lowest float32.
        block_ids: Distinct blocks, padded with -1.
        num_slots: Visible slots N.
        block_size: Slots a block.
        decay: a.
        implementation: "mosaic" (in place where V and D_rev are donated or dead), "xla", or None
            to choose by platform, version and shape.

    Returns:
        V and D_rev after the update. Nothing but the observed entries changes.

    Raises:
        ValueError: a named implementation cannot run.

    Source: paper, Algorithm 1 step 8.
    """
    arguments = (V, D_rev, scores, block_ids, num_slots, block_size, decay)
    if choose("ema_scatter", implementation, None) == "mosaic":
        from pallas_kernels.mosaic.ema import ema_scatter_mosaic

        return ema_scatter_mosaic(*arguments)
    return ema_scatter_reference(*arguments)


def ema_scatter_reference(
    V: jax.Array,
    D_rev: jax.Array,
    scores: jax.Array,
    block_ids: jax.Array,
    num_slots: jax.Array,
    block_size: int,
    decay: float,
) -> tuple[jax.Array, jax.Array]:
    """The same in plain ``jnp``, for any shape."""
    batch, slots = V.shape
    slot = slots_of(block_ids, block_size)
    observed = (slot >= 0) & (slot < num_slots[:, None]) & jnp.isfinite(scores) & (scores > LOWEST)
    distance = jnp.where(observed, slots - num_slots[:, None] + slot, slots)
    row = jnp.arange(batch)[:, None]
    old_V = take_blocks(V, block_ids, block_size)
    new_V = _ema(old_V, scores, decay)
    if slots % block_size:
        new_V = jnp.asarray(V).at[row, jnp.where(observed, slot, slots)].set(new_V, mode="drop")
    else:
        # Whole blocks: an eighth of the time that a CPU takes to write slot by slot.
        shape = (batch, slots // block_size, block_size)
        at = jnp.where(block_ids < 0, shape[1], block_ids)
        new_V = jnp.where(observed, new_V, old_V).reshape(*at.shape, block_size)
        new_V = jnp.asarray(V).reshape(shape).at[row, at].set(new_V, mode="drop").reshape(V.shape)
    # Not so for D: its windows stand across blocks, and the newest may reach beyond the end.
    old_D = jnp.take_along_axis(D_rev, jnp.minimum(distance, slots - 1), axis=1)
    new_D = jnp.asarray(D_rev).at[row, distance].set(_ema(old_D, scores, decay), mode="drop")
    return new_V, new_D


def _ema(old: jax.Array, observation: jax.Array, decay: float) -> jax.Array:
    old32 = old.astype(jnp.float32)
    old32 = jnp.where(old32 == -jnp.inf, 0.0, old32)
    return (decay * old32 + (1 - decay) * observation).astype(old.dtype)
