"""Candidates of a top-K in shared memory: what of a stream of scores may be among the K highest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import lanes
from pallas_kernels.mosaic.search import TILE, Tiles
from pallas_kernels.ordering import NEVER

Load = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""A tile's keys and positions, by its number."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Candidates in shared memory, in order of position."""

    keys: Any
    positions: Any
    warps: Any
    k: int
    capacity: int

    def load(self, ref: Any, tile: jax.Array) -> jax.Array:
        return plgpu.load(ref.at[pl.ds(tile * TILE, TILE)], layout=lanes.blocked(TILE))

    def copy_to(self, other: Buffer, used: jax.Array, offset: jax.Array) -> None:
        layout = lanes.blocked(TILE)

        @pl.loop(0, (used + TILE - 1) // TILE)
        def _(tile):
            at = tile * TILE + lanes.iota(TILE, layout)
            mine = [self.load(self.keys, tile), self.load(self.positions, tile)]
            copied = list(zip([other.keys, other.positions], mine, strict=True))
            lanes.scatter(copied, offset + at, at < used, layout, fence="after")

    def prune(self, used: jax.Array, threshold: jax.Array, lowest: jax.Array):
        """Keeps the K highest of keys that are at least ``lowest``.

        Returns how many are left, and the threshold that a later candidate must reach.
        """
        keep = lambda used, _: self._keep_highest(used, lowest)  # noqa: E731
        return jax.lax.cond(used > self.k, keep, lambda *state: state, used, threshold)

    def _keep_highest(self, used, lowest):
        tiles = (used + TILE - 1) // TILE
        layout = lanes.blocked(TILE)
        here = Tiles(self.keys, 0, tiles, self.warps)
        # From here on there is nothing beyond the end.
        end = tiles - 1
        known = end * TILE + lanes.iota(TILE, layout) < used
        self.keys[pl.ds(end * TILE, TILE)] = jnp.where(known, here.load(end), NEVER)
        kth, reaching = here.find_kth(self.k, lowest)
        # Where exactly K reach it, nothing ties with what is below it.
        exact = reaching == self.k
        kth = jnp.where(exact, kth - 1, kth)
        above = lambda: self.k - here.number_above(kth)  # noqa: E731
        ties = jax.lax.cond(exact, lambda: jnp.int32(0), above)

        number = lambda tie: lanes.prefix_sum(tie, self.warps.at[2])  # noqa: E731

        def compact(tile, carry):
            kept, ties = carry
            keys, positions = here.load(tile), self.load(self.positions, tile)
            tie = (keys == kth).astype(jnp.int32)
            rank, tied = jax.lax.cond(ties > 0, number, lambda tie: (tie, jnp.int32(0)), tie)
            wanted = (keys > kth) | ((tie > 0) & (rank < ties))
            places, count = lanes.prefix_sum(wanted.astype(jnp.int32), self.warps.at[2])
            # In place: a tile is read before it is written, and only moves down.
            found = [(self.keys, keys), (self.positions, positions)]
            lanes.scatter(found, kept + places, wanted, layout)
            return kept + count, ties - jnp.minimum(tied, ties)

        kept, _ = jax.lax.fori_loop(0, tiles, compact, (jnp.int32(0), ties))
        return kept, kth + 1


def stream(
    buffer: Buffer, bound: jax.Array, first: jax.Array, end: jax.Array, load: Load
) -> jax.Array:
    """Leaves the K highest of some tiles, all at least ``bound``, in the buffer, in order.

    Returns how many there are.
    """
    layout = lanes.blocked(TILE)
    final = jnp.maximum(end - 1, 0)  # a tile that can be loaded even where there is none to handle

    def step(tile, carry):
        keys, positions, used, threshold = carry
        following = load(jnp.minimum(tile + 1, final))  # in flight while this one is sorted out
        last = tile == end
        full = last | (used + TILE > buffer.capacity)
        prune = lambda *state: buffer.prune(*state, bound)  # noqa: E731
        used, threshold = jax.lax.cond(full, prune, lambda *state: state, used, threshold)
        wanted = (keys >= threshold) & ~last
        places, count = lanes.prefix_sum(wanted.astype(jnp.int32), buffer.warps.at[2])
        found = [(buffer.keys, keys), (buffer.positions, positions)]
        lanes.scatter(found, used + places, wanted, layout, fence="after")
        return *following, used + count, threshold

    state = (*load(jnp.minimum(first, final)), jnp.int32(0), bound)
    return jax.lax.fori_loop(first, end + 1, step, state)[2]
