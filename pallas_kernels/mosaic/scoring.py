"""Indexer scores at the speed of reading the keys: one warpgroup for each few blocks.

A ring of bulk copies keeps key blocks in flight; a block is multiplied with the queries of each
verifier row (wgmma, keys as rows), then ReLU, weights and sum stay in registers. A thread block
takes a run of places in one request's list of blocks and stops at the first that is not live, so
the cost follows the live blocks and the hardware's scheduler balances ragged batches.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import mosaic_kernel
from pallas_kernels.mosaic import lanes
from pallas_kernels.ordering import LOWEST

BLOCK = 64
"""Slots a key block of the kernel: the rows of one wgmma."""
RING_BYTES = 32 * 1024
"""Key blocks in flight in each thread block; four or five of those fit a multiprocessor."""
THREAD_BLOCKS = 4 * 132
"""As many are resident at once on an H100 or H200."""
SHORTEST_RUN = 4
"""At least so many places a thread block, which fetches the queries once."""
LONGEST_RUN = 8
"""At most so many, while ``MOST_THREAD_BLOCKS`` suffice."""
MOST_THREAD_BLOCKS = 8 * THREAD_BLOCKS
"""More would take longer to start than to find that there is nothing to do."""


def index_scores_mosaic(
    q: jax.Array,
    w: jax.Array,
    keys: jax.Array,
    num_slots: jax.Array,
    block_ids: jax.Array | None,
    block_size: int,
    key_scales: jax.Array | None,
    fill: bool,
) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.scoring``."""
    batch = keys.shape[0]
    if block_ids is not None and block_size != BLOCK:
        parts = jnp.arange(block_size // BLOCK)[None, None]
        parts = block_ids[..., None] * (block_size // BLOCK) + parts
        ids = jnp.where(block_ids[..., None] < 0, -1, parts).reshape(batch, -1)
    else:
        ids = block_ids
    return _score(q, w, keys, num_slots, ids, key_scales, fill)


def _score(
    q: jax.Array,
    w: jax.Array,
    keys: jax.Array,
    num_slots: jax.Array,
    ids: jax.Array | None,
    key_scales: jax.Array | None,
    fill: bool,
) -> tuple[jax.Array, jax.Array]:
    batch, rows, heads, width = q.shape
    slots = keys.shape[1]
    capacity = slots // BLOCK if ids is None else ids.shape[1]
    item = jnp.dtype(keys.dtype).itemsize
    stages = RING_BYTES // (BLOCK * width * item)
    # One wave where that keeps runs short; otherwise several, which evens out unequal progress.
    run = min(LONGEST_RUN, max(SHORTEST_RUN, -(-batch * capacity // THREAD_BLOCKS)))
    # A thread a place counts what is to do.
    run = min(lanes.THREADS, max(run, -(-batch * capacity // MOST_THREAD_BLOCKS)))
    runs = -(-capacity // run)
    swizzled = (plgpu.TilingTransform((8, 128 // item)), plgpu.SwizzleTransform(128))
    scaled = key_scales is not None
    row_layout, column_layout = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def index_scores(
        q_ref, w_ref, k_ref, num_ref, *refs,
        queries, ring, filled, ready, warps, scale_ring=None,
    ):  # fmt: skip
        refs = list(refs)
        ids_ref = None if ids is None else refs.pop(0)
        scales_ref = refs.pop(0) if scaled else None
        scores_ref, max_ref = refs
        request, mine = jax.lax.axis_index("request"), jax.lax.axis_index("run")
        limits = [jnp.minimum(num_ref[request, row], slots) for row in range(rows)]
        end = functools.reduce(jnp.maximum, limits)

        def block_at(place):
            return place if ids_ref is None else ids_ref[request, place]

        def beyond(place):
            block = block_at(jnp.int32(min(place, capacity - 1)))
            return block * BLOCK >= end if ids_ref is None else block < 0

        # What is listed comes first. A short list is shared by all thread blocks, in shorter runs.
        length = jnp.int32(run)
        if not fill:
            for shorter in reversed([2**i for i in range(run.bit_length()) if 2**i < run]):
                length = jnp.where(beyond(shorter * runs), shorter, length)
        first = mine * length
        places = jnp.clip(capacity - first, 0, length)

        def fetch(at, block):
            stage, slot = at % stages, pl.ds(block * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(k_ref.at[request, slot], ring.at[stage], filled.at[stage])
            if scaled:
                plgpu.copy_gmem_to_smem(
                    scales_ref.at[request, slot], scale_ring.at[stage], filled.at[stage]
                )

        def store(place, row, values):
            scores_ref[request, row, pl.ds(place * BLOCK, BLOCK)] = values
            groups = max_ref.at[request, row, pl.ds(place * lanes.WARPS, lanes.WARPS)]
            lanes.store_warp_maxima(values, row_layout, groups)

        def count_places(end):
            """How many places are to score, and to write."""
            if ids_ref is None:
                blocks = (end + BLOCK - 1) // BLOCK
                live = jnp.clip(blocks - first, 0, places)
                return live, live
            layout = lanes.coalesced(lanes.THREADS)
            index = lanes.iota(lanes.THREADS, layout)
            at = first + jnp.minimum(index, places - 1)
            block = lanes.gather(ids_ref.at[request], at, layout)
            listed = (index < places) & (block >= 0)
            live = listed & (block * BLOCK < end)
            # One sum for the two: each is at most 128.
            packed = live.astype(jnp.int32) + (listed.astype(jnp.int32) << 16)
            packed = lanes.reduce("add", packed, layout, warps)
            return packed & 0xFFFF, packed >> 16

        def score(live):
            @pl.loop(0, jnp.minimum(stages, live))
            def _(at):
                fetch(at, block_at(first + at))

            weights = [
                plgpu.load(w_ref.at[request, row], layout=column_layout, optimized=False)
                for row in range(rows)
            ]
            plgpu.barrier_wait(ready)

            def step(at, following):
                place, stage = first + at, at % stages
                block = block_at(place)
                plgpu.barrier_wait(filled.at[stage])
                sums = []
                for row in range(rows):

                    def multiply(acc, row=row):
                        plgpu.wgmma(acc, ring.at[stage], queries.at[row].transpose((1, 0)))
                        return acc[...]

                    dots = pl.run_scoped(multiply, plgpu.ACC((BLOCK, heads), jnp.float32))
                    weight = jax.lax.broadcast_in_dim(weights[row], (BLOCK, heads), (1,))
                    sums.append(jnp.sum(jnp.maximum(dots, 0.0) * weight, axis=1))
                if scaled:
                    scale = plgpu.load(scale_ring.at[stage], layout=row_layout, optimized=False)
                    sums = [total * scale for total in sums]
                lanes.meet()  # by now all have read this stage
                pl.when(at + stages < live)(lambda: fetch(at + stages, following))
                slot = block * BLOCK + lanes.iota(BLOCK, row_layout)
                for row, total in enumerate(sums):
                    total = jnp.where(total > LOWEST, total, LOWEST)
                    total = jnp.where(slot < limits[row], total, -jnp.inf)
                    store(place, row, total)
                # The number of the block to fetch next time: its load has a step to arrive.
                return block_at(first + jnp.minimum(at + stages + 1, live - 1))

            following = block_at(first + jnp.minimum(stages, live - 1))
            jax.lax.fori_loop(0, live, step, following)

        def fetch_queries():
            for row in range(rows):
                plgpu.copy_gmem_to_smem(q_ref.at[request, row], queries.at[row], ready)

        # A window far larger than its contents is mostly runs of none.
        start = jnp.where(places > 0, block_at(jnp.minimum(first, capacity - 1)), -1)
        alive = (start >= 0) & (start * BLOCK < end)
        pl.when(alive)(fetch_queries)
        none = jnp.int32(0), jnp.int32(0)
        live, written = jax.lax.cond(start >= 0, lambda: count_places(end), lambda: none)
        pl.when(live > 0)(lambda: score(live))

        @pl.loop(live, places if fill else written)
        def _(at):
            hidden = plgpu.layout_cast(jnp.full((BLOCK,), -jnp.inf), row_layout)
            for row in range(rows):
                store(first + at, row, hidden)

    scratch = {
        "queries": plgpu.SMEM((rows, heads, width), q.dtype, transforms=swizzled),
        "ring": plgpu.SMEM((stages, BLOCK, width), keys.dtype, transforms=swizzled),
        "filled": plgpu.Barrier(num_arrivals=1 + scaled, num_barriers=stages),
        "ready": plgpu.Barrier(num_arrivals=rows),
        "warps": plgpu.SMEM((lanes.WARPS,), jnp.int32),
    }
    if scaled:
        scratch["scale_ring"] = plgpu.SMEM((stages, BLOCK), jnp.float32)
    kernel = mosaic_kernel(
        index_scores,
        out_type=(
            jax.ShapeDtypeStruct((batch, rows, capacity * BLOCK), jnp.float32),
            jax.ShapeDtypeStruct((batch, rows, capacity * lanes.WARPS), jnp.float32),
        ),
        scratch_types=scratch,
        # The only shared memory that is written twice is guarded by hand.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        grid=(batch, runs),
        grid_names=("request", "run"),
    )
    operands = [q, w, keys, num_slots, ids, key_scales]
    return kernel(*(x for x in operands if x is not None))
