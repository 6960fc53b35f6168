"""The K-th highest of int32 keys, in registers or in shared memory, by counting.

Signs of differences are counted rather than comparisons, which share a few predicate registers and
wait for each other; so that differences do not overflow, keys are compared without their lowest
bit, and that one is looked at last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import lanes
from pallas_kernels.ordering import NEVER

TILE = 1024
"""Keys that a warpgroup handles at a time."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Keys in shared memory, whole tiles of them, NEVER where there is none."""

    ref: Any
    first: Any
    tiles: Any
    warps: Any

    def load(self, tile: jax.Array) -> jax.Array:
        at = pl.ds(self.first + tile * TILE, TILE)
        return plgpu.load(self.ref.at[at], layout=lanes.blocked(TILE))

    def fold(self, each: Callable[..., Any], *starts: int) -> Any:
        """The tiles, joined element by element: ``x = each(x, keys)`` from each of the starts."""
        fill = lambda x: jnp.full((TILE,), x, jnp.int32)  # noqa: E731
        carry = tuple(plgpu.layout_cast(fill(x), lanes.blocked(TILE)) for x in starts)
        return jax.lax.fori_loop(0, self.tiles, lambda t, x: each(*x, self.load(t)), carry)

    def reduce(self, kind: Literal["add", "max", "min"], each: Any, start: int) -> jax.Array:
        """``kind`` of all elements of a fold."""
        [x] = self.fold(lambda x, keys: (each(x, keys),), start)
        return lanes.reduce(kind, x, lanes.blocked(TILE), self.warps.at[2])

    def number_above(self, low: Any) -> jax.Array:
        return self.reduce("add", lambda x, keys: x + exceeds(keys, low), 0)

    def find_kth(self, k: int, lowest: Any) -> tuple[jax.Array, jax.Array]:
        """``find_kth`` from ``lowest`` up."""

        def count(low, high, turn):
            def add(at_low, at_high, keys):
                halves = halved(keys)
                return at_low + reaches(halves, low), at_high + reaches(halves, high)

            at_low, at_high = self.fold(add, 0, 0)
            both, scratch = at_low + (at_high << 16), self.warps.at[turn]
            return lanes.reduce("add", both, lanes.blocked(TILE), scratch, fresh=True)

        highest = jnp.maximum(self.reduce("max", jnp.maximum, NEVER), lowest)
        return find_kth(count, self.number_above, k, lowest, highest)


def halved(keys: jax.Array) -> jax.Array:
    """Keys without their lowest bit: the difference of two has a sign."""
    return keys >> 1


def reaches(halves: jax.Array, low: Any) -> jax.Array:
    """1 where a halved key is at least ``low``, else 0, without a predicate."""
    return -((low - 1 - halves) >> 31)


def exceeds(keys: jax.Array, low: Any) -> jax.Array:
    """1 where a key is more than ``low``, else 0, without a predicate."""
    return jnp.minimum(jnp.maximum(keys, low), low + 1) - low


def find_kth_in_registers(
    keys: jax.Array, layout: Any, k: Any, low: Any, high: Any, scratch: Any
) -> tuple[jax.Array, jax.Array]:
    """``find_kth`` of a warpgroup's keys; ``scratch`` is an int32 [3, 4] that is ``fresh``."""
    halves = halved(keys)

    def count(low, high, turn):
        return lanes.count(halves, layout, low, high, scratch.at[turn])

    def count_odd(even):
        return lanes.reduce("add", exceeds(keys, even), layout, scratch.at[2])

    return find_kth(count, count_odd, k, low, high)


def find_kth(
    count: Callable[[jax.Array, jax.Array, int], jax.Array],
    count_odd: Callable[[jax.Array], jax.Array],
    k: Any,
    low: Any,
    high: Any,
) -> tuple[jax.Array, jax.Array]:
    """A t in [low, high] that exactly k >= 1 keys reach, else the largest that more do, else low.

    Also returns how many reach it, or -1 if no threshold that k reach was counted; instead of an
    odd low that fewer than k reach, the integer below it. A search over the integers, by two
    thresholds at a time: ``count(lower, upper, turn)`` is ``lanes.count`` of the halved keys, two
    steps an iteration, in turns of scratch: by the barrier of one, all have read the other. The
    lowest bit is last, if it matters: ``count_odd(t)`` is how many keys reach t + 1.
    """

    def narrow(state, turn):
        low, high, reaching = state
        # About a third of the range.
        third = ((high - low) >> 2) + ((high - low) >> 4)
        lower, upper = low + 1 + third, high - third
        total = count(lower, upper, turn)
        at_lower, at_upper = total & 0xFFFF, total >> 16
        met_lower, met_upper = at_lower >= k, at_upper >= k
        found = jnp.where(met_upper, upper, lower)
        reaching = jnp.where(met_upper, at_upper, jnp.where(met_lower, at_lower, reaching))
        bound = jnp.where(met_upper, high, jnp.where(met_lower, upper, lower) - 1)
        low = jnp.where(met_lower, found, low)
        return low, jnp.where(reaching == k, low, bound), reaching

    half, _, reaching = jax.lax.while_loop(
        lambda state: state[0] < state[1],
        lambda state: narrow(narrow(state, 0), 1),
        (low >> 1, high >> 1, jnp.int32(-1)),
    )

    def lowest_bit(even, reaching):
        odd = count_odd(even)
        return jnp.where(odd >= k, even + 1, even), jnp.where(odd >= k, odd, reaching)

    return jax.lax.cond(reaching == k, lambda *found: found, lowest_bit, half << 1, reaching)
