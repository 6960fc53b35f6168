"""Indexer scores at the speed of reading the keys: a persistent grid of single warpgroups.

The live blocks of all requests are laid end to end and every thread block takes an equal run of
them, so the cost follows the blocks that are scored, however ragged the batch. A ring of bulk
copies keeps key blocks in flight; a block is multiplied with the queries of each verifier row
(wgmma, keys as rows), then ReLU, weights and sum stay in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import mosaic_kernel
from pallas_kernels.mosaic import lanes
from pallas_kernels.ordering import LOWEST

BLOCK = 64
"""Slots a key block of the kernel: the rows of one wgmma."""
MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024
RING_BYTES = 48 * 1024
"""Key blocks in flight in each thread block."""


def index_scores_mosaic(
    q: jax.Array,
    w: jax.Array,
    keys: jax.Array,
    num_slots: jax.Array,
    block_ids: jax.Array | None,
    block_size: int,
    key_scales: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.scoring``."""
    batch, slots, _ = keys.shape
    visible = jnp.minimum(num_slots, slots)
    if block_ids is not None and block_size != BLOCK:
        parts = jnp.arange(block_size // BLOCK)[None, None]
        parts = block_ids[..., None] * (block_size // BLOCK) + parts
        ids = jnp.where(block_ids[..., None] < 0, -1, parts).reshape(batch, -1)
    else:
        ids = block_ids
    end = jnp.max(visible, axis=1)
    if ids is None:
        live = (end + BLOCK - 1) // BLOCK
    else:
        live = jnp.sum((ids >= 0) & (ids * BLOCK < end[:, None]), axis=1, dtype=jnp.int32)
    scores, block_max = _score(q, w, keys, visible, ids, live, key_scales)
    if block_size != BLOCK:
        shape = (*block_max.shape[:2], -1, block_size // BLOCK)
        block_max = jnp.max(block_max.reshape(shape), axis=-1)
    return scores, block_max


def _score(
    q: jax.Array,
    w: jax.Array,
    keys: jax.Array,
    visible: jax.Array,
    ids: jax.Array | None,
    live: jax.Array,
    key_scales: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    batch, rows, heads, width = q.shape
    slots = keys.shape[1]
    capacity = slots // BLOCK if ids is None else ids.shape[1]
    item = jnp.dtype(keys.dtype).itemsize
    stages = RING_BYTES // (BLOCK * width * item)
    shared = RING_BYTES + rows * heads * width * item + 4096
    resident = max(1, min(4, SHARED_BYTES // shared))
    workers = min(MULTIPROCESSORS * resident, batch * capacity)
    swizzled = (plgpu.TilingTransform((8, 128 // item)), plgpu.SwizzleTransform(128))
    scaled = key_scales is not None
    row_layout, column_layout = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def body(q_ref, w_ref, k_ref, visible_ref, live_ref, *refs, queries, ring, filled, ready, warps,
             scale_ring=None):  # fmt: skip
        refs = list(refs)
        ids_ref = None if ids is None else refs.pop(0)
        scales_ref = refs.pop(0) if scaled else None
        scores_ref, max_ref = refs
        worker = jax.lax.axis_index("worker")

        def block_at(request, place):
            return place if ids_ref is None else ids_ref[request, place]

        def store(request, place, row, values):
            scores_ref[request, row, pl.ds(place * BLOCK, BLOCK)] = values
            max_ref[request, row, place] = jnp.max(values)

        def score_run(request, first, count):
            def fetch(step, block):
                stage = step % stages
                slot = pl.ds(block * BLOCK, BLOCK)
                plgpu.copy_gmem_to_smem(k_ref.at[request, slot], ring.at[stage], filled.at[stage])
                if scaled:
                    plgpu.copy_gmem_to_smem(
                        scales_ref.at[request, slot], scale_ring.at[stage], filled.at[stage]
                    )

            @pl.loop(0, jnp.minimum(stages, count))
            def _(step):
                fetch(step, block_at(request, first + step))

            for row in range(rows):
                plgpu.copy_gmem_to_smem(q_ref.at[request, row], queries.at[row], ready)
            weights = [
                plgpu.load(w_ref.at[request, row], layout=column_layout, optimized=False)
                for row in range(rows)
            ]
            limits = [visible_ref[request, row] for row in range(rows)]
            plgpu.barrier_wait(ready)

            def step(at, following):
                stage = at % stages
                block = block_at(request, first + at)
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
                pl.when(at + stages < count)(lambda: fetch(at + stages, following))
                slot = block * BLOCK + plgpu.layout_cast(
                    jax.lax.broadcasted_iota(jnp.int32, (BLOCK,), 0), row_layout
                )
                for row, total in enumerate(sums):
                    total = jnp.where(total > LOWEST, total, LOWEST)
                    total = jnp.where(slot < limits[row], total, -jnp.inf)
                    store(request, first + at, row, total)
                return block_at(request, first + jnp.minimum(at + stages + 1, count - 1))

            following = block_at(request, first + jnp.minimum(stages, count - 1))
            jax.lax.fori_loop(0, count, step, following)

        def fill_run(request, first, count):
            nothing = plgpu.layout_cast(jnp.full((BLOCK,), -jnp.inf), row_layout)

            @pl.loop(0, count)
            def _(at):
                for row in range(rows):
                    store(request, first + at, row, nothing)

        padded = lanes.padded(batch)
        index = lanes.iota(padded, lanes.blocked(padded))
        layout = lanes.blocked(padded)
        live_counts = lanes.gather(live_ref, jnp.minimum(index, batch - 1), layout)
        dead_counts = jnp.where(index < batch, capacity - live_counts, 0)
        live_counts = jnp.where(index < batch, live_counts, 0)
        nowhere = jnp.zeros_like(live_counts)
        _for_each_run(live_counts, nowhere, worker, workers, warps, score_run)
        _for_each_run(dead_counts, live_counts, worker, workers, warps, fill_run)

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
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, rows, capacity * BLOCK), jnp.float32),
            jax.ShapeDtypeStruct((batch, rows, capacity), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(workers,),
        grid_names=("worker",),
    )
    operands = [q, w, keys, visible, live, ids, key_scales]
    return kernel(*(x for x in operands if x is not None))


def _for_each_run(
    counts: jax.Array,
    starts: jax.Array,
    worker: jax.Array,
    workers: int,
    warps: Any,
    run: Callable[[jax.Array, jax.Array, jax.Array], None],
) -> None:
    """Calls ``run(request, first, count)`` for this worker's share of the requests' blocks.

    ``counts`` blocks a request, from ``starts``, are laid end to end and shared out equally.
    """
    before, total = lanes.prefix_sum(counts, warps)
    after = before + counts
    # Not worker * total // workers, which overflows.
    share, left = total // workers, total % workers
    at = worker * share + jnp.minimum(worker, left)
    end = at + share + jnp.where(worker < left, 1, 0)

    def one(at):
        request = jnp.sum((after <= at).astype(jnp.int32))
        here = (before <= at) & (at < after)
        first = jnp.sum(jnp.where(here, at - before + starts, 0))
        rest = jnp.sum(jnp.where(here, after - at, 0))
        count = jnp.minimum(rest, end - at)
        run(request, first, count)
        return at + count

    jax.lax.while_loop(lambda at: at < end, one, at)
