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
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import mosaic_kernel
from pallas_kernels.mosaic import lanes
from pallas_kernels.mosaic.search import TILE, Tiles
from pallas_kernels.ordering import HIGHEST, NEVER, ordered_keys
from pallas_kernels.scoring import GROUP, group_maxima
from pallas_kernels.topk import few_groups, first_scores, group_size

Load = Callable[[jax.Array], tuple[jax.Array, jax.Array]]

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
    part = _Buffer(parts[0].at[me], parts[1].at[me], scratch, k, ranking.capacity)
    kept = _stream(part, bound, first, end, load)
    before, kept_by_all = add_up(streamed, 1 + WARPGROUPS, kept)
    padded = lanes.padded(k)
    room = WARPGROUPS * padded
    halves = whole.at[pl.ds(0, room)], whole.at[pl.ds(room, room)]
    result = _Buffer(*halves, scratch, k, room)
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


def _stream(
    buffer: _Buffer, bound: jax.Array, first: jax.Array, end: jax.Array, load: Load
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


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """Candidates in shared memory, in order of position."""

    keys: Any
    positions: Any
    warps: Any
    k: int
    capacity: int

    def load(self, ref: Any, tile: jax.Array) -> jax.Array:
        return plgpu.load(ref.at[pl.ds(tile * TILE, TILE)], layout=lanes.blocked(TILE))

    def copy_to(self, other: _Buffer, used: jax.Array, offset: jax.Array) -> None:
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
