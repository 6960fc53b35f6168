"""Top-K and the EMA update in one launch.

Top-K keeps one multiprocessor a row busy, and waits more than it reads; the update wants all the
memory's bandwidth for a few microseconds. Neither needs the other, so the update runs on what top-K
leaves idle.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.compat import mosaic_kernel
from pallas_kernels.mosaic.ema import Update
from pallas_kernels.mosaic.topk import WARPGROUPS, Ranking, rank_row

TILE = 512
"""Slots a warpgroup updates at a time."""
MULTIPROCESSORS = 132
"""Of an H100 or H200. A thread block each: an update beside top-K slows it. Two only where top-K
would leave fewer than half of them to the update, and both have room."""
ROOM = 110 * 1024
"""Bytes of shared memory, of the 227 KB of a multiprocessor, that two thread blocks can have."""


def top_k_and_observe_mosaic(
    scores: jax.Array,
    k: int,
    V: jax.Array,
    D_rev: jax.Array,
    block_ids: jax.Array,
    num_slots: jax.Array,
    block_size: int,
    decay: float,
    group_max: jax.Array | None,
    num_blocks: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.observe``."""
    batch, length = scores.shape
    ranking = Ranking.of(length, k, block_size)
    update = Update(V.shape[1], length, block_size, decay, TILE)
    tiles = batch * update.tiles
    two = batch > MULTIPROCESSORS // 2 and ranking.scratch_bytes <= ROOM
    thread_blocks = MULTIPROCESSORS * (2 if two else 1)
    updaters = max(thread_blocks - batch, MULTIPROCESSORS // 2)
    updaters = min(-(-tiles // WARPGROUPS), updaters)
    strides = updaters * WARPGROUPS
    counts = [] if num_blocks is None else [num_blocks]
    maxima = ranking.maxima(scores, group_max, num_blocks, block_size)

    def top_k_and_observe(V_ref, D_ref, scores_ref, ids_ref, num_ref, *refs, **scratch):
        *others, out_ref = refs
        counts_ref = others.pop(0) if counts else None
        worker = jax.lax.axis_index("worker")

        @pl.when(worker < batch)
        def _():
            maxima_row = others[0].at[worker] if others else None
            source, ids = scores_ref.at[worker], ids_ref.at[worker]
            count = None if counts_ref is None else counts_ref[worker] * block_size
            rank_row(ranking, source, maxima_row, ids, out_ref.at[worker], count, **scratch)

        @pl.when(worker >= batch)
        def _():
            first = (worker - batch) * WARPGROUPS + jax.lax.axis_index("warpgroup")

            @pl.loop(0, (tiles - first + strides - 1) // strides)
            def _(turn):
                row, tile = jnp.divmod(first + turn * strides, update.tiles)
                tables = [ref.at[row] for ref in (V_ref, D_ref, scores_ref, ids_ref)]
                update.run(*tables, num_ref[row], tile)

    new_V, new_D = jax.new_ref(V), jax.new_ref(D_rev)
    kernel = mosaic_kernel(
        top_k_and_observe,
        out_type=jax.ShapeDtypeStruct((batch, ranking.k), jnp.int32),
        scratch_types=ranking.scratch(),
        grid=(batch + updaters,),
        grid_names=("worker",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
    )
    chosen = kernel(new_V, new_D, scores, block_ids, num_slots, *counts, *maxima)
    return chosen, new_V[...], new_D[...]
