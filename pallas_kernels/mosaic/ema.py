"""The EMA update, in place: each thread block updates the slots of a few selected blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

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
    batch = V.shape[0]
    update = Update(V.shape[1], scores.shape[1], block_size, decay, TILE)

    def ema_scatter(V_ref, D_ref, scores_ref, ids_ref, num_ref):
        row, tile = jax.lax.axis_index("row"), jax.lax.axis_index("tile")
        update.run(
            V_ref.at[row], D_ref.at[row], scores_ref.at[row], ids_ref.at[row], num_ref[row], tile
        )

    new_V, new_D = jax.new_ref(V), jax.new_ref(D_rev)
    kernel = mosaic_kernel(ema_scatter, grid=(batch, update.tiles), grid_names=("row", "tile"))
    kernel(new_V, new_D, scores, block_ids, num_slots)
    return new_V[...], new_D[...]


@dataclasses.dataclass(frozen=True)
class Update:
    """The EMA update of one request, in tiles of its scores."""

    slots: int
    scored: int
    block_size: int
    decay: float
    tile_size: int

    @property
    def tiles(self) -> int:
        return -(-self.scored // self.tile_size)

    def run(
        self, V: Any, D_rev: Any, scores: Any, ids: Any, visible: jax.Array, tile: jax.Array
    ) -> None:
        """Updates the slots of one tile."""
        first = tile * self.tile_size
        layout = lanes.coalesced(self.tile_size)

        def update():
            at = first + lanes.iota(self.tile_size, layout)
            inside = at < self.scored
            at = jnp.where(inside, at, 0)
            block = lanes.gather(ids, at // self.block_size, layout)
            score = lanes.gather(scores, at, layout)
            slot = block * self.block_size + at % self.block_size
            observed = inside & (block >= 0) & (slot < visible) & (score > LOWEST)
            observed &= score < jnp.inf
            slot = jnp.where(observed, slot, 0)
            distance = jnp.where(observed, self.slots - visible + slot, 0)
            tables = ((V, slot), (D_rev, distance))
            olds = [lanes.gather(table, at, layout) for table, at in tables]
            for (table, at), old in zip(tables, olds, strict=True):
                seen = old.astype(jnp.float32)
                seen = jnp.where(seen == -jnp.inf, 0.0, seen)
                new = self.decay * seen + (1 - self.decay) * score
                values = [(table, new.astype(old.dtype))]
                lanes.scatter(values, at, observed, layout, fence="none")

        # The padding of a selection is at its end: nothing to do from a first block of -1.
        pl.when(ids[first // self.block_size] >= 0)(update)
