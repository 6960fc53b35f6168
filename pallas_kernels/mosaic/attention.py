"""Attention over listed rows: rows come one by one, scores and weights stay on the chip.

A thread block takes 64 heads of a token and a share of the rows that it sees, in tiles of 64. While
one tile is multiplied, the next one's rows are copied to where the matrix units want them, 16 bytes
a thread. Each of two warpgroups computes the scores of half a tile's rows; they exchange maxima and
weights, and each adds up the outputs of half the channels, which are all that its registers hold.
The shares of a token are added afterwards.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.attention import TILE
from pallas_kernels.compat import interpreted, mosaic_kernel
from pallas_kernels.mosaic import lanes
from pallas_kernels.mosaic import rows as rows_to_shared

MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM); a thread block each, as two do not fit."""
WARPGROUPS = 2
PART = TILE // WARPGROUPS
"""Rows of a tile whose scores a warpgroup computes."""
STAGES = 2
START = 1.5
"""What a thread block costs beyond its tiles, in tiles."""
NOTHING = -1e30
"""A maximum of no scores: finite, so that a difference of two is a number."""


def tiles_each(blocks: int, tiles: int) -> int:
    """Tiles a thread block, so that all ``blocks`` lists of ``tiles`` are done soonest."""

    def cost(each: int) -> float:
        waves = -(-blocks * -(-tiles // each) // MULTIPROCESSORS)
        return waves * (each + START)

    return min(range(1, tiles + 1), key=cost)


def sparse_attention_mosaic(
    q: jax.Array,
    window: jax.Array,
    window_ids: jax.Array,
    sink: jax.Array,
    slots: jax.Array | None,
    slot_ids: jax.Array | None,
    num_slots: jax.Array | None,
    scale: float,
) -> jax.Array:
    """See ``pallas_kernels.attention``."""
    batch, rows, heads, width = q.shape
    half = width // WARPGROUPS
    window_ids = _whole_tiles(window_ids)
    slot_ids = None if slot_ids is None else _whole_tiles(slot_ids)
    window_tiles, slot_tiles = window_ids.shape[2] // TILE, 0
    if slots is not None:
        slot_tiles = -(-slots.shape[1] // TILE) if slot_ids is None else slot_ids.shape[2] // TILE
    tiles = window_tiles + slot_tiles
    share = tiles_each(batch * rows * heads // TILE, tiles)
    split = -(-tiles // share)
    row_layout, column_layout = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    thread_layout = lanes.coalesced(lanes.THREADS)
    log2_scale = scale * math.log2(math.e)

    def sparse_attention(
        q_ref, window_ref, window_ids_ref, *refs, queries, ring, tops, weights, ready, met, warps
    ):
        *refs, out_ref, top_ref, total_ref = refs
        slots_ref = refs[0] if refs else window_ref
        request, row = jax.lax.axis_index("request"), jax.lax.axis_index("row")
        number, head = jax.lax.axis_index("share"), jax.lax.axis_index("heads") * TILE
        ours, warpgroup = pl.ds(head, TILE), jax.lax.axis_index("warpgroup")
        window_list, slot_list = window_ids_ref.at[request, row], None
        if slot_ids is not None:
            slot_list = refs[1].at[request, row]

        def count(ids):
            """How many rows a list has, kept in the bits that the other list's count leaves."""
            layout, total = thread_layout, jnp.zeros((lanes.THREADS,), jnp.int32)
            index = lanes.iota(lanes.THREADS, layout)
            for begin in range(0, ids.shape[0], lanes.THREADS):
                at = jnp.minimum(begin + index, ids.shape[0] - 1)
                listed = (begin + index < ids.shape[0]) & (lanes.gather(ids, at, layout) >= 0)
                total = total + listed.astype(jnp.int32)
            return total

        counts = count(window_list)
        if slot_list is not None:
            counts = counts + (count(slot_list) << 16)
        counts = lanes.reduce("add", counts, thread_layout, warps.at[warpgroup])
        window_rows, slot_rows = counts & 0xFFFF, counts >> 16
        if refs and slot_list is None:
            slot_rows = jnp.clip(refs[1][request, row], 0, slots_ref.shape[1])
        in_window = (window_rows + TILE - 1) // TILE
        live = in_window + (slot_rows + TILE - 1) // TILE
        first = number * share
        mine = jnp.clip(live - first, 0, share)

        def start_of(tile):
            """Where in its list a tile starts, and how many of the rows from there are seen."""
            place = jnp.where(tile < in_window, tile, tile - in_window) * TILE
            return place, jnp.where(tile < in_window, window_rows, slot_rows) - place

        def fetch(tile):
            # Four threads a row, half a tile a warpgroup.
            place, seen = start_of(tile)
            index = warpgroup * PART + lanes.iota(lanes.THREADS, thread_layout) // 4
            at = place + index
            ids = lanes.gather(window_list, jnp.minimum(at, window_tiles * TILE - 1), thread_layout)
            if refs:
                of_slots = at
                if slot_list is not None:
                    last = slot_tiles * TILE - 1
                    of_slots = lanes.gather(slot_list, jnp.minimum(at, last), thread_layout)
                this = plgpu.layout_cast(jnp.full(at.shape, tile), thread_layout)
                ids = jnp.where(this < in_window, ids, of_slots)
            ids = jnp.where(index < seen, ids, -1)
            rows_to_shared.copy_rows(
                window_ref.at[request], slots_ref.at[request], tile < in_window, ids,
                ring.at[(tile - first) % STAGES, warpgroup],
            )  # fmt: skip

        def meet():
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def step(at, carry):
            out, top, total = carry
            tile, stage = first + at, at % STAGES
            rows_to_shared.wait_copies()
            meet()  # the tile is there, and both have read the one before it

            def multiply(acc):
                for part in range(WARPGROUPS):
                    keys = ring.at[stage, warpgroup, part].transpose((1, 0))
                    plgpu.wgmma(acc, queries.at[part], keys)
                # While the matrix units work:
                pl.when(at + 1 < mine)(lambda: fetch(tile + 1))
                index = warpgroup * PART + lanes.iota(PART, column_layout)
                hidden = jnp.where(index < start_of(tile)[1], 0.0, -jnp.inf)
                return acc[...], plgpu.layout_cast(hidden, column_layout)

            dots, hidden = pl.run_scoped(multiply, plgpu.ACC((TILE, PART), jnp.float32))
            scores = dots * log2_scale + jax.lax.broadcast_in_dim(hidden, (TILE, PART), (1,))
            tops[warpgroup] = jnp.max(scores, axis=1)
            meet()
            new_top = top
            for part in range(WARPGROUPS):
                of_part = plgpu.load(tops.at[part], layout=row_layout, optimized=False)
                new_top = jnp.maximum(new_top, of_part)
            exponent = scores - jax.lax.broadcast_in_dim(new_top, (TILE, PART), (0,))
            weight = jnp.exp2(exponent)
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + jnp.sum(weight, axis=1)
            weights[warpgroup] = weight.astype(q.dtype)
            out = out * jax.lax.broadcast_in_dim(shrink, (TILE, half), (0,))
            plgpu.commit_smem()
            meet()
            return _add_products(out, weights, ring.at[stage], warpgroup), new_top, total

        def attend():
            fetch(first)

            @pl.when(warpgroup == 0)
            def _():
                for part in range(WARPGROUPS):
                    source = q_ref.at[request, row, pl.ds(head, TILE), pl.ds(part * half, half)]
                    plgpu.copy_gmem_to_smem(source, queries.at[part], ready)

            def filled(value, shape, layout):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            plgpu.barrier_wait(ready)
            start = (
                filled(0.0, (TILE, half), plgpu.Layout.WGMMA),
                filled(NOTHING, (TILE,), row_layout),
                filled(0.0, (TILE,), row_layout),
            )
            out, top, total = jax.lax.fori_loop(0, mine, step, start)
            out_ref[number, request, row, ours, pl.ds(warpgroup * half, half)] = out
            total_ref[number, warpgroup, request, row, ours] = total
            pl.when(warpgroup == 0)(lambda: store_top(top))

        def store_top(top):
            top_ref[number, request, row, ours] = top

        pl.when(mine > 0)(attend)

        @pl.when(mine == 0)
        def _():
            nothing = plgpu.layout_cast(jnp.full((TILE,), 0.0, jnp.float32), row_layout)
            total_ref[number, warpgroup, request, row, ours] = nothing
            pl.when(warpgroup == 0)(lambda: store_top(nothing + NOTHING))

    grid = (split, batch, rows, heads // TILE)
    shape = (split, batch, rows, heads)
    kernel = mosaic_kernel(
        sparse_attention,
        out_type=(
            jax.ShapeDtypeStruct((*shape, width), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct((split, WARPGROUPS, *shape[1:]), jnp.float32),
        ),
        scratch_types={
            "queries": plgpu.SMEM(
                (WARPGROUPS, TILE, half), q.dtype, transforms=rows_to_shared.ROWS
            ),
            "ring": plgpu.SMEM(
                (STAGES, WARPGROUPS, WARPGROUPS, PART, half),
                q.dtype,
                transforms=rows_to_shared.ROWS,
            ),
            "tops": plgpu.SMEM((WARPGROUPS, TILE), jnp.float32),
            "weights": plgpu.SMEM(
                (WARPGROUPS, TILE, PART), q.dtype, transforms=rows_to_shared.ROWS
            ),
            "ready": plgpu.Barrier(num_arrivals=WARPGROUPS),  # a copy each
            "met": plgpu.Barrier(num_arrivals=WARPGROUPS),
            "warps": plgpu.SMEM((WARPGROUPS, lanes.WARPS), jnp.int32),
        },
        # Shared memory that is written twice is guarded by hand.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        grid=grid,
        grid_names=("share", "request", "row", "heads"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
    )
    operands = [q, window, window_ids, slots, num_slots if slot_ids is None else slot_ids]
    out, top, total = kernel(*(x for x in operands if x is not None))
    # The sum of the shares, each brought to the highest of their maxima, and the sink.
    sink = sink[None, None] * math.log2(math.e)
    highest = jnp.maximum(jnp.max(top, axis=0), sink)
    weights = jnp.exp2(top - highest[None])
    total = jnp.sum(jnp.sum(total, axis=1) * weights, axis=0) + jnp.exp2(sink - highest)
    weights = weights / total[None]
    # A share without rows has written nothing.
    out = jnp.where((top != NOTHING)[..., None], out * weights[..., None], 0.0)
    return jnp.sum(out, axis=0)


def _add_products(out: jax.Array, weights: Any, tile: Any, warpgroup: jax.Array) -> jax.Array:
    """``out`` and the tile's weighted rows, of a half of their channels, in the same registers."""
    if interpreted():  # which has no accumulators that begin with a value
        rows = tile[:, warpgroup]
        return out + jnp.einsum("phr,prd->hd", weights[...], rows, preferred_element_type=out.dtype)

    def add(acc):
        for part in range(WARPGROUPS):
            plgpu.wgmma(acc, weights.at[part], tile.at[part, warpgroup])

    return pl.run_state(add)(plgpu.ACC.init(out))


def _whole_tiles(ids: jax.Array) -> jax.Array:
    padding = ((0, 0), (0, 0), (0, -ids.shape[2] % TILE))
    return jnp.pad(ids, padding, constant_values=-1)
