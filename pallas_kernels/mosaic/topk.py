"""Exact top-K in one pass over the scores: four warpgroups a row.

A group of scores whose maximum is below the K-th largest maximum cannot hold one of the K highest,
so those groups are not read: of random scores, a few more than K groups of 16 are. Each warpgroup
streams a quarter of them, in order, through a buffer in shared memory that keeps what reaches a
threshold. When the buffer is full it is pruned to its K highest (ties to the earliest) and the
threshold rises above the lowest of them: what comes later and ties with it has lost. The first
warpgroup prunes what all have kept. So any input is exact, and only adversarial ones prune more
than once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import mosaic_kernel
from pallas_kernels.mosaic import lanes
from pallas_kernels.mosaic.candidates import Buffer, Load, stream
from pallas_kernels.mosaic.search import TILE, Tiles
from pallas_kernels.ordering import HIGHEST, NEVER, ordered_keys
from pallas_kernels.scoring import GROUP, group_maxima
from pallas_kernels.topk import few_groups, first_scores, group_size

WARPGROUPS = 4


@dataclasses.dataclass(frozen=True)
class Ranking:
    """What a kernel must know to rank rows of scores; ``group`` scores share a maximum, if any."""

    length: int
    k: int
    group: int
    block_size: int

    @classmethod
    def of(cls, length: int, k: int, block_size: int) -> Ranking:
        group = group_size(length)
        assert group is not None
        return cls(length, min(k, length), group, block_size)

    @property
    def capacity(self) -> int:
        """Of a warpgroup's buffer: full, it holds K after a pruning, and one tile more."""
        return lanes.padded(self.k) + TILE

    @property
    def groups(self) -> int:
        return self.length // self.group if self.group else 0

    @property
    def share(self) -> int:
        """Of a warpgroup's maxima."""
        return lanes.padded(-(-self.groups // WARPGROUPS))

    @property
    def joined(self) -> int:
        """How many groups are searched as one, while they are many enough to bound well."""
        maxima, enough = WARPGROUPS * self.share, 3 * self.k
        fits = (n for n in (8, 4, 2) if 2 * self.groups // n >= enough and not maxima % (n * TILE))
        return next(fits, 1)

    def maxima(
        self, rows: jax.Array, group_max: jax.Array | None, counts: jax.Array | None, unit: int
    ) -> list[jax.Array]:
        """The maximum of each group, if they are needed."""
        if not self.group:
            return []
        if group_max is None:
            if counts is not None:
                counts = jnp.repeat(counts * unit, rows.shape[0] // counts.shape[0])
            rows = first_scores(rows, counts)
            return [group_maxima(jnp.where(rows > -jnp.inf, rows, -jnp.inf), self.group)]
        return [group_maxima(group_max.reshape(rows.shape[0], -1), self.group // GROUP)]

    @property
    def whole(self) -> int:
        """Of the space for the maxima, then the groups to read, then what all have kept of them."""
        maxima = WARPGROUPS * self.share if self.group else 0
        maxima += maxima // self.joined if self.joined > 1 else 0
        return max(2 * WARPGROUPS * lanes.padded(self.k), maxima)

    @property
    def scratch_bytes(self) -> int:
        """Of shared memory, nearly."""
        return 4 * (2 * WARPGROUPS * self.capacity + self.whole)

    def scratch(self) -> dict[str, Any]:
        barrier = plgpu.Barrier(num_arrivals=WARPGROUPS)
        ints = lambda *shape: plgpu.SMEM(shape, jnp.int32)  # noqa: E731
        return {
            "parts": [ints(WARPGROUPS, self.capacity)] * 2,
            "whole": ints(self.whole),
            "shared": ints(1 + 2 * WARPGROUPS),
            "warps": ints(WARPGROUPS, 3, lanes.WARPS),
            "listed": barrier,
            "streamed": barrier,
            "merged": barrier,
        }


def top_k_slots_mosaic(
    scores: jax.Array,
    k: int,
    block_ids: jax.Array | None,
    block_size: int,
    group_max: jax.Array | None,
    counts: jax.Array | None,
) -> jax.Array:
    """See ``pallas_kernels.topk``."""
    *leading, length = scores.shape
    ranking = Ranking.of(length, k, block_size)
    rows = scores.reshape(-1, length)
    num_rows = rows.shape[0]
    unit = 1 if block_ids is None else block_size
    if counts is not None:
        counts = counts.reshape(-1)
    operands = [rows, *ranking.maxima(rows, group_max, counts, unit)]
    operands += [x for x in (counts, block_ids) if x is not None]

    def top_k_slots(scores_ref, *refs, **scratch):
        *others, out_ref = refs
        row = jax.lax.axis_index("row")
        maxima = others.pop(0).at[row] if ranking.group else None
        count = None
        if counts is not None:
            count = others.pop(0)[row // (num_rows // counts.shape[0])] * unit
        ids = others.pop(0).at[row // (num_rows // block_ids.shape[0])] if others else None
        rank_row(ranking, scores_ref.at[row], maxima, ids, out_ref.at[row], count, **scratch)

    kernel = mosaic_kernel(
        top_k_slots,
        out_type=jax.ShapeDtypeStruct((num_rows, ranking.k), jnp.int32),
        scratch_types=ranking.scratch(),
        grid=(num_rows,),
        grid_names=("row",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
    )
    return kernel(*operands).reshape(*leading, ranking.k)


def rank_row(
    ranking: Ranking,
    source: Any,
    maxima: Any,
    ids: Any,
    out: Any,
    count: jax.Array | None,
    *,
    parts: Any,
    whole: Any,
    shared: Any,
    warps: Any,
    listed: Any,
    streamed: Any,
    merged: Any,
) -> None:
    """One thread block's work: the slots of the K highest scores of ``source`` into ``out``.

    ``count`` is how many scores there are; all of the row if None.
    """
    length, k, group = ranking.length, ranking.k, ranking.group
    me = jax.lax.axis_index("warpgroup")
    scratch = warps.at[me]

    def add_up(barrier, first, count):
        """What the warpgroups before this one have, and all of them."""
        shared[first + me] = count
        _meet(barrier)
        counts = [shared[first + other] for other in range(WARPGROUPS)]
        before = [jnp.where(me > other, count, 0) for other, count in enumerate(counts)]
        return functools.reduce(jnp.add, before), functools.reduce(jnp.add, counts)

    scored = length if count is None else jnp.clip(count, 0, length)
    if group:
        layout = lanes.blocked(ranking.share)
        index = me * ranking.share + lanes.iota(ranking.share, layout)
        # The maximum of a group that ends beyond the scores says nothing: it is always read.
        whole_groups = ranking.groups if count is None else scored // group
        held = ranking.groups if count is None else (scored + group - 1) // group
        groups = whole.at[pl.ds(0, ranking.groups)]

        def list_all():
            lanes.scatter([(groups, index)], index, index < held, layout, fence="none")
            return jnp.int32(NEVER + 1), held

        def list_highest():
            keys = ordered_keys(lanes.gather_row(maxima, index, layout))
            keys = jnp.where(index < whole_groups, keys, NEVER)
            bound = _lower_bound(ranking, keys, whole, shared, scratch)
            wanted = keys >= bound
            if count is not None:
                wanted |= (index >= whole_groups) & (index < held)
            places, listed_here = lanes.prefix_sum(wanted.astype(jnp.int32), scratch.at[2])
            before, listed_by_all = add_up(listed, 1, listed_here)
            lanes.scatter([(groups, index)], before + places, wanted, layout, fence="none")
            return bound, listed_by_all

        if count is None:
            bound, number = list_highest()
        else:
            bound, number = jax.lax.cond(held <= few_groups(group), list_all, list_highest)
        lanes.meet(everyone=True)
        to_read = number * group
        load = _grouped(source, groups, group, to_read, scored)
    else:
        bound, to_read = jnp.int32(NEVER + 1), jnp.int32(scored)
        load = _direct(source, length, scored)

    tiles = (to_read + TILE - 1) // TILE
    first, end = tiles * me // WARPGROUPS, tiles * (me + 1) // WARPGROUPS
    part = Buffer(parts[0].at[me], parts[1].at[me], scratch, k, ranking.capacity)
    kept = stream(part, bound, first, end, load)
    before, kept_by_all = add_up(streamed, 1 + WARPGROUPS, kept)
    padded = lanes.padded(k)
    room = WARPGROUPS * padded
    halves = whole.at[pl.ds(0, room)], whole.at[pl.ds(room, room)]
    result = Buffer(*halves, scratch, k, room)
    part.copy_to(result, kept, before)
    _meet(merged)

    @pl.when(me == 0)
    def _():
        kept, _ = result.prune(kept_by_all, bound, bound)
        layout = lanes.blocked(padded)
        place = lanes.iota(padded, layout)
        slots = plgpu.load(result.positions.at[pl.ds(0, padded)], layout=layout)
        if ids is not None:
            slots = jnp.where(place < kept, slots, 0)
            block = lanes.gather(ids, slots // ranking.block_size, layout)
            slots = block * ranking.block_size + slots % ranking.block_size
        slots = jnp.where(place < kept, slots, -1)
        lanes.scatter([(out, slots)], place, place < k, layout, fence="none")


def _meet(barrier: Any) -> None:
    """Waits until every warpgroup is here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _lower_bound(
    ranking: Ranking, keys: jax.Array, buffer: Any, shared: Any, warps: Any
) -> jax.Array:
    """A lower bound of the K-th highest score, from each warpgroup's share of the maxima.

    The first warpgroup searches alone: more would wait for each other at every step. It searches
    maxima of several groups, which are fewer and, while 3/2 K of them hold a score, bound nearly as
    well; otherwise the maxima themselves.
    """
    me, share, joined = jax.lax.axis_index("warpgroup"), ranking.share, ranking.joined
    few = WARPGROUPS * share // joined
    mine = buffer.at[pl.ds(me * (share // joined), share // joined)]
    mine[...] = lanes.pool_neighbours(keys, joined)
    if joined > 1:
        buffer[pl.ds(few + me * share, share)] = keys
    lanes.meet(everyone=True)

    turns = 2 if joined > 1 else 1

    def search(state):
        turn, *nothing = state
        tiles = jnp.where(turn == 0, few // TILE, WARPGROUPS * share // TILE)
        here = Tiles(buffer, turn * few, tiles, warps)
        # NEVER - 1 is the highest integer, so that NEVER is not the minimum.
        lowest = here.reduce("min", lambda x, keys: jnp.minimum(x, keys - 1), HIGHEST)
        lowest = jnp.maximum(lowest + 1, NEVER + 1)
        # Of fewer than K there is nothing to find.
        least = jnp.where(turn == turns - 1, 2 * ranking.k, 3 * ranking.k)
        enough = 2 * here.number_above(NEVER) >= least
        find = lambda *_: here.find_kth(ranking.k, lowest)  # noqa: E731
        return turn + 1, *jax.lax.cond(enough, find, lambda *nothing: nothing, *nothing)

    @pl.when(me == 0)
    def _():
        start = (jnp.int32(0), jnp.int32(NEVER + 1), jnp.int32(-1))
        unsettled = lambda state: (state[0] < turns) & (state[2] < 0)  # noqa: E731
        _, bound, reaching = jax.lax.while_loop(unsettled, search, start)
        # Where nothing was counted, fewer than K may reach the lowest: all groups with a score are
        # read.
        shared[0] = jnp.where(reaching < 0, NEVER + 1, bound)

    lanes.meet(everyone=True)
    return shared[0]


def _direct(source: Any, length: int, end: Any) -> Load:
    """A tile of the row itself: keys, NEVER from ``end`` on, and positions."""
    layout = lanes.blocked(TILE)

    def load(tile):
        position = tile * TILE + lanes.iota(TILE, layout)
        at = jnp.minimum(position, length - 4 + position % 4)
        values = lanes.gather(source, at, layout, consecutive=4)
        return jnp.where(position < end, ordered_keys(values), NEVER), position

    return load


def _grouped(source: Any, groups: Any, size: int, count: jax.Array, end: Any) -> Load:
    """A tile of the listed groups of scores, ``count`` in all: keys, NEVER from ``end`` on."""
    layout = lanes.blocked(TILE)

    def load(tile):
        index = tile * TILE + lanes.iota(TILE, layout)
        listed = jnp.minimum(index // size, jnp.maximum(count // size - 1, 0))
        repeated = min(size, TILE // lanes.THREADS)
        group = lanes.gather(groups, listed, layout, repeated=repeated)
        # Where none is listed there is still a tile to load, and it must lie inside the row.
        position = group * jnp.where(count > 0, size, 0) + index % size
        values = lanes.gather(source, position, layout, consecutive=4)
        known = (index < count) & (position < end)
        return jnp.where(known, ordered_keys(values), NEVER), position

    return load
