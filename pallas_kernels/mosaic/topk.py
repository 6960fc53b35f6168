"""Exact top-K in one pass over the scores: one warpgroup a row.

A group of scores whose maximum is below the K-th largest maximum cannot hold one of the K highest,
so those groups are not read. The others stream, in order, through a buffer in shared memory that
keeps what reaches a threshold. When the buffer is full it is pruned to its K highest (ties to the
earliest) and the threshold rises above the lowest of them: what comes later and ties with it has
lost. So any input is exact, and only adversarial ones prune more than once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import mosaic_kernel
from pallas_kernels.mosaic import lanes
from pallas_kernels.ordering import NEVER, ordered_keys
from pallas_kernels.topk import BUFFER, group_size

Load = Callable[[jax.Array], tuple[jax.Array, jax.Array]]

TILE = 2048
"""Scores a step of the stream."""
CHUNK = 1024
"""Buffered scores a step of a pruning."""


def top_k_slots_mosaic(
    scores: jax.Array,
    k: int,
    block_ids: jax.Array | None,
    block_size: int,
    block_max: jax.Array | None,
) -> jax.Array:
    """See ``pallas_kernels.topk``."""
    *leading, length = scores.shape
    k = min(k, length)
    group = group_size(length, k, block_size)
    assert group is not None
    rows = scores.reshape(-1, length)
    num_rows = rows.shape[0]
    operands = [rows]
    if group:
        if block_max is None or group != block_size:
            groups_of = jnp.where(rows > -jnp.inf, rows, -jnp.inf).reshape(num_rows, -1, group)
            block_max = jnp.max(groups_of, axis=-1)
        operands.append(block_max.reshape(num_rows, -1))
    if block_ids is not None:
        operands.append(block_ids)
    scratch = {
        "keys": plgpu.SMEM((BUFFER,), jnp.int32),
        "positions": plgpu.SMEM((BUFFER,), jnp.int32),
        "warps": plgpu.SMEM((lanes.WARPS,), jnp.int32),
    }
    if group:
        scratch["groups"] = plgpu.SMEM((lanes.padded(length // group),), jnp.int32)

    def body(scores_ref, *refs, keys, positions, warps, groups=None):
        *others, out_ref = refs
        row = jax.lax.axis_index("row")
        buffer = _Buffer(keys, positions, warps, k)
        source = scores_ref.at[row]
        if group:
            maxima = others.pop(0).at[row]
            bound, count = _list_groups(maxima, length // group, k, groups, warps)
            kept = _stream(buffer, bound, count * group, _grouped(source, groups, group, count))
        else:
            bound = jnp.int32(NEVER + 1)
            kept = _stream(buffer, bound, jnp.int32(length), _direct(source, length))
        padded = lanes.padded(k)
        layout = lanes.blocked(padded)
        place = lanes.iota(padded, layout)
        slots = plgpu.load(positions.at[pl.ds(0, padded)], layout=layout)
        if block_ids is not None:
            slots = jnp.where(place < kept, slots, 0)
            ids_ref = others.pop(0).at[row // (num_rows // block_ids.shape[0])]
            block = lanes.gather(ids_ref, slots // block_size, layout)
            slots = block * block_size + slots % block_size
        slots = jnp.where(place < kept, slots, -1)
        lanes.scatter(out_ref.at[row], place, slots, place < k, layout)

    kernel = mosaic_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, k), jnp.int32),
        scratch_types=scratch,
        grid=(num_rows,),
        grid_names=("row",),
    )
    return kernel(*operands).reshape(*leading, k)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask.astype(jnp.int32))


def _list_groups(maxima: Any, num_groups: int, k: int, groups: Any, warps: Any):
    """Writes which groups can hold one of the K highest; returns their bound and their number."""
    padded = lanes.padded(num_groups)
    layout = lanes.blocked(padded)
    index = lanes.iota(padded, layout)
    values = lanes.gather(maxima, jnp.minimum(index, num_groups - 1), layout)
    keys = jnp.where(index < num_groups, ordered_keys(values), NEVER)
    lowest = jnp.int32(NEVER + 1)
    highest = jnp.maximum(jnp.max(keys), lowest)
    bound = lanes.find_kth(lambda t: _count(keys >= t), k, lowest, highest)
    wanted = keys >= bound
    places, count = lanes.prefix_sum(wanted.astype(jnp.int32), warps)
    lanes.scatter(groups, places, index, wanted, layout)
    return bound, count


def _direct(source: Any, length: int) -> Load:
    """A tile of the row itself: keys, NEVER beyond its end, and positions."""
    layout = lanes.blocked(TILE)

    def load(tile):
        position = tile * TILE + lanes.iota(TILE, layout)
        at = jnp.minimum(position, length - 4 + position % 4)
        values = lanes.gather(source, at, layout, consecutive=4)
        return jnp.where(position < length, ordered_keys(values), NEVER), position

    return load


def _grouped(source: Any, groups: Any, size: int, count: jax.Array) -> Load:
    """A tile of the listed groups of scores."""
    layout = lanes.blocked(TILE)

    def load(tile):
        index = tile * TILE + lanes.iota(TILE, layout)
        listed = jnp.minimum(index // size, jnp.maximum(count - 1, 0))
        repeated = min(size, TILE // lanes.THREADS)
        group = lanes.gather(groups, listed, layout, repeated=repeated)
        # Where none is listed there is still a tile to load, and it must lie inside the row.
        position = group * jnp.where(count > 0, size, 0) + index % size
        values = lanes.gather(source, position, layout, consecutive=4)
        return jnp.where(index < count * size, ordered_keys(values), NEVER), position

    return load


def _stream(buffer: _Buffer, bound: jax.Array, length: jax.Array, load: Load) -> jax.Array:
    """Leaves the K highest of ``length`` scores, all at least ``bound``, in the buffer, in order.

    Returns how many there are.
    """
    tiles = (length + TILE - 1) // TILE
    layout = lanes.blocked(TILE)

    def step(tile, carry):
        keys, positions, used, threshold = carry
        following = load(jnp.minimum(tile + 1, tiles - 1))  # in flight while this one is sorted out
        last = tile == tiles
        full = last | (used + TILE > BUFFER)
        prune = lambda *state: buffer.prune(*state, bound)  # noqa: E731
        used, threshold = jax.lax.cond(full, prune, lambda *state: state, used, threshold)
        wanted = (keys >= threshold) & ~last
        places, count = lanes.prefix_sum(wanted.astype(jnp.int32), buffer.warps)
        lanes.scatter(buffer.keys, used + places, keys, wanted, layout)
        lanes.scatter(buffer.positions, used + places, positions, wanted, layout)
        return *following, used + count, threshold

    state = (*load(jnp.int32(0)), jnp.int32(0), bound)
    return jax.lax.fori_loop(0, tiles + 1, step, state)[2]


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """Candidates in shared memory, in order of position."""

    keys: Any
    positions: Any
    warps: Any
    k: int

    def prune(self, used: jax.Array, threshold: jax.Array, lowest: jax.Array):
        """Keeps the K highest of keys that are at least ``lowest``.

        Returns how many are left, and the threshold that a later candidate must reach.
        """
        keep = lambda used, _: self._keep_highest(used, lowest)  # noqa: E731
        return jax.lax.cond(used > self.k, keep, lambda *state: state, used, threshold)

    def _keep_highest(self, used, lowest):
        chunks = (used + CHUNK - 1) // CHUNK
        layout = lanes.blocked(CHUNK)
        within = lanes.iota(CHUNK, layout)

        def load(ref, chunk):
            return plgpu.load(ref.at[pl.ds(chunk * CHUNK, CHUNK)], layout=layout)

        def chunk_keys(chunk):
            return jnp.where(chunk * CHUNK + within < used, load(self.keys, chunk), NEVER)

        def count_at_least(t):
            zero = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.int32), layout)
            add = lambda c, sums: sums + (chunk_keys(c) >= t).astype(jnp.int32)  # noqa: E731
            return jnp.sum(jax.lax.fori_loop(0, chunks, add, zero))

        best = plgpu.layout_cast(jnp.full((CHUNK,), NEVER, jnp.int32), layout)
        best = jax.lax.fori_loop(0, chunks, lambda c, x: jnp.maximum(x, chunk_keys(c)), best)
        kth = lanes.find_kth(count_at_least, self.k, lowest, jnp.max(best))
        ties = self.k - count_at_least(kth + 1)

        def compact(chunk, carry):
            kept, ties = carry
            keys, positions = chunk_keys(chunk), load(self.positions, chunk)
            tie = keys == kth
            rank, tied = lanes.prefix_sum(tie.astype(jnp.int32), self.warps)
            wanted = (keys > kth) | (tie & (rank < ties))
            places, count = lanes.prefix_sum(wanted.astype(jnp.int32), self.warps)
            # In place: a chunk is read before it is written, and only moves down.
            lanes.scatter(self.keys, kept + places, keys, wanted, layout)
            lanes.scatter(self.positions, kept + places, positions, wanted, layout)
            return kept + count, ties - jnp.minimum(tied, ties)

        kept, _ = jax.lax.fori_loop(0, chunks, compact, (jnp.int32(0), ties))
        return kept, kth + 1
