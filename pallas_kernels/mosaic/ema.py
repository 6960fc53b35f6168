"""The EMA update, in place: each thread block updates the slots of a few selected blocks."""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.compat import mosaic_kernel
from pallas_kernels.mosaic import lanes
from pallas_kernels.ordering import LOWEST

TILE = 512
"""Slots updated by one thread block: few registers, so many thread blocks hide the latency."""


def ema_scatter_mosaic(
    V: jax.Array,
    D_rev: jax.Array,
    scores: jax.Array,
    block_ids: jax.Array,
    num_slots: jax.Array,
    block_size: int,
    decay: float,
) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.ema``."""
    batch, slots = V.shape
    scored = scores.shape[1]
    layout = lanes.coalesced(TILE)

    def body(V_ref, D_ref, scores_ref, ids_ref, num_ref):
        row, tile = jax.lax.axis_index("row"), jax.lax.axis_index("tile")
        ids_row = ids_ref.at[row]

        def update():
            at = tile * TILE + lanes.iota(TILE, layout)
            inside = at < scored
            at = jnp.where(inside, at, 0)
            block = lanes.gather(ids_row, at // block_size, layout)
            score = lanes.gather(scores_ref.at[row], at, layout)
            slot = block * block_size + at % block_size
            visible = num_ref[row]
            observed = inside & (block >= 0) & (slot < visible) & (score > LOWEST)
            observed &= score < jnp.inf
            slot = jnp.where(observed, slot, 0)
            distance = jnp.where(observed, slots - visible + slot, 0)
            tables = ((V_ref.at[row], slot), (D_ref.at[row], distance))
            olds = [lanes.gather(table, at, layout) for table, at in tables]
            for (table, at), old in zip(tables, olds, strict=True):
                seen = old.astype(jnp.float32)
                seen = jnp.where(seen == -jnp.inf, 0.0, seen)
                new = decay * seen + (1 - decay) * score
                values = [(table, new.astype(old.dtype))]
                lanes.scatter(values, at, observed, layout, fence="none")

        # The padding of a selection is at its end: nothing to do from a first block of -1.
        pl.when(ids_ref[row, tile * TILE // block_size] >= 0)(update)

    new_V, new_D = jax.new_ref(V), jax.new_ref(D_rev)
    kernel = mosaic_kernel(
        body,
        grid=(batch, -(-scored // TILE)),
        grid_names=("row", "tile"),
    )
    kernel(new_V, new_D, scores, block_ids, num_slots)
    return new_V[...], new_D[...]
