"""Block selection in two kernels: pool on the whole GPU, choose with one warpgroup a row.

Both take all layers at once: they lie apart in memory, and one launch costs what the choice does.
The first reads V and D once. The second works on a block score in a register or two: two searches
for a threshold, and a prefix sum that numbers the selected blocks in ascending order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import mosaic_kernel
from pallas_kernels.mosaic import lanes
from pallas_kernels.mosaic.search import find_kth_in_registers
from pallas_kernels.ordering import HIGHEST, NEVER, ordered_keys

POOLED = 4096
"""Slots pooled by one thread block."""


def select_blocks_mosaic(
    V: Sequence[jax.Array],
    D_rev: Sequence[jax.Array],
    num_slots: jax.Array,
    budget: jax.Array,
    explore: jax.Array,
    priority: jax.Array,
    block_size: int,
    capacity: int,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """See ``pallas_kernels.selection``."""
    pooled = pool_blocks_mosaic(V, D_rev, num_slots, block_size)
    return choose_blocks_mosaic(pooled, num_slots, budget, explore, priority, block_size, capacity)


def pool_blocks_mosaic(
    V: Sequence[jax.Array], D_rev: Sequence[jax.Array], num_slots: jax.Array, block_size: int
) -> jax.Array:
    """``S_j`` [L, B, N] of the blocks that hold a visible slot; the others are not written."""
    layers, (batch, slots) = len(V), V[0].shape
    tiles = -(-slots // POOLED)
    chunks, blocks = block_size // 32, POOLED // block_size
    layout = lanes.coalesced(POOLED)
    few = lanes.coalesced(lanes.THREADS)

    def pool_blocks(num_ref, *refs):
        *tables, out_ref, maxima = refs
        layer, row = jax.lax.axis_index("layer"), jax.lax.axis_index("row")
        tile, visible = jax.lax.axis_index("tile"), num_ref[layer, row]
        rows = tuple(table.at[row] for table in tables)
        V_row, D_row = (lanes.OneOf(x, layer) for x in (rows[:layers], rows[layers:]))
        out_row = out_ref.at[layer, row]

        def pool():
            slot = tile * POOLED + lanes.iota(POOLED, layout)
            seen = slot < visible
            at = jnp.where(seen, slot, 0)
            by_slot = lanes.gather(V_row, at, layout)
            at = jnp.where(seen, slots - visible + slot, 0)
            by_distance = lanes.gather(D_row, at, layout)
            best = jnp.maximum(by_slot.astype(jnp.float32), by_distance.astype(jnp.float32))
            lanes.store_chunk_maxima(jnp.where(seen, best, -jnp.inf), maxima)
            lanes.meet()
            block = lanes.iota(lanes.THREADS, few)
            first = jnp.minimum(block, blocks - 1) * chunks
            parts = [lanes.gather(maxima, first + i, few) for i in range(chunks)]
            pooled = functools.reduce(jnp.maximum, parts)
            target = [(out_row, pooled)]
            lanes.scatter(target, tile * blocks + block, block < blocks, few, fence="none")

        pl.when(tile * POOLED < visible)(pool)

    kernel = mosaic_kernel(
        pool_blocks,
        out_type=jax.ShapeDtypeStruct((layers, batch, tiles * blocks), jnp.float32),
        scratch_types=[plgpu.SMEM((POOLED // 32,), jnp.float32)],
        grid=(layers, batch, tiles),
        grid_names=("layer", "row", "tile"),
    )
    return kernel(num_slots, *V, *D_rev)


def choose_blocks_mosaic(
    pooled: jax.Array,
    num_slots: jax.Array,
    budget: jax.Array,
    explore: jax.Array,
    priority: jax.Array,
    block_size: int,
    capacity: int,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The forced blocks, the highest of ``pooled``, then the highest priorities."""
    layers, batch, num_blocks = priority.shape
    padded = lanes.padded(max(num_blocks, capacity))
    layout = lanes.blocked(padded)

    def choose_blocks(pooled_ref, num_ref, budget_ref, explore_ref, priority_ref, *refs):
        *refs, warps = refs
        ids_refs, count_refs = refs[:layers], refs[layers:]
        layer, row = jax.lax.axis_index("layer"), jax.lax.axis_index("row")
        block = lanes.iota(padded, layout)
        # Early, as it is used late.
        priorities = lanes.gather_row(priority_ref.at[layer, row], block, layout)
        active = (num_ref[layer, row] + block_size - 1) // block_size
        count = jnp.minimum(budget_ref[layer, row], active)
        drawn = jnp.minimum(explore_ref[layer, row], count)
        visible = block < active
        forced = visible & ((block == 0) | (block == active - 1))

        keys = ordered_keys(lanes.gather_row(pooled_ref.at[layer, row], block, layout))
        free = visible & ~forced
        keys = jnp.where(free, jnp.maximum(keys, NEVER + 1), NEVER)
        wanted = jnp.maximum(count - drawn - jnp.minimum(active, 2), 0)
        highest = lanes.reduce("max", keys, layout, warps.at[0])
        lowest = jnp.where(free, keys, HIGHEST)
        lowest = jnp.minimum(lanes.reduce("min", lowest, layout, warps.at[1]), highest)
        chosen = forced | _highest(keys, free, wanted, lowest, highest, layout, warps)

        free = visible & ~chosen
        keys = jax.lax.bitcast_convert_type(priorities, jnp.int32) ^ NEVER
        keys = jnp.where(free, keys, NEVER)
        lowest = jnp.where(drawn > 0, NEVER, HIGHEST)  # nothing to draw: nothing to search
        drawn_ones = _highest(keys, free, drawn, lowest, jnp.int32(HIGHEST), layout, warps)
        selected = chosen | drawn_ones

        places, _ = lanes.prefix_sum(selected.astype(jnp.int32), warps.at[2])
        ids_row = lanes.OneOf(tuple(ids.at[row] for ids in ids_refs), layer)
        fits = selected & (places < capacity)
        lanes.scatter([(ids_row, block)], places, fits, layout, fence="none")
        nothing = plgpu.layout_cast(jnp.full((padded,), -1, jnp.int32), layout)
        rest = (block >= count) & (block < capacity)
        lanes.scatter([(ids_row, nothing)], block, rest, layout, fence="none")
        few = lanes.coalesced(lanes.THREADS)
        every = plgpu.layout_cast(jnp.full((lanes.THREADS,), count), few)
        own = lanes.OneOf(tuple(count_refs), layer)
        lane = lanes.iota(lanes.THREADS, few)
        lanes.scatter([(own, every)], jnp.where(lane == 0, row, 0), lane == 0, few, fence="none")

    kernel = mosaic_kernel(
        choose_blocks,
        out_type=(
            *[jax.ShapeDtypeStruct((batch, capacity), jnp.int32)] * layers,
            *[jax.ShapeDtypeStruct((batch,), jnp.int32)] * layers,
        ),
        scratch_types=[plgpu.SMEM((3, lanes.WARPS), jnp.int32)],
        grid=(layers, batch),
        grid_names=("layer", "row"),
    )
    chosen = kernel(pooled, num_slots, budget, explore, priority)
    return list(chosen[:layers]), list(chosen[layers:])


def _highest(
    keys: jax.Array,
    among: jax.Array,
    k: jax.Array,
    low: jax.Array,
    high: jax.Array,
    layout: Any,
    warps: Any,
) -> jax.Array:
    """The k highest keys, as a mask; ties go to the lowest index. Keys not ``among`` are NEVER."""
    kth, reaching = find_kth_in_registers(keys, layout, k, low, high, warps)

    def break_ties():
        above, tie = among & (keys > kth), among & (keys == kth)
        ties = k - lanes.reduce("add", above.astype(jnp.int32), layout, warps.at[0])
        rank, _ = lanes.prefix_sum(tie.astype(jnp.int32), warps.at[2])
        return (above | (tie & (rank < ties))).astype(jnp.int32)

    return jax.lax.cond(reaching == k, lambda: (keys >= kth).astype(jnp.int32), break_ties) > 0
