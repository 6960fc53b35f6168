"""SPIN's choice of the blocks to score: predicted scores, forced blocks, exploration."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped, UInt32

from pallas_kernels.compat import Implementation, choose
from pallas_kernels.ordering import ordered_keys
from pallas_kernels.ranking import ascending_ids, break_ties

MAX_BLOCKS = 4096
"""The most blocks that the kernel ranks."""


def select_blocks(
    V: Float[Array, "B S"],
    D_rev: Float[Array, "B S"],
    num_slots: Int32[Array, " B"],
    budget: Int32[Array, " B"],
    explore: Int32[Array, " B"],
    priority: UInt32[Array, "B N"],
    *,
    block_size: int,
    capacity: int,
    implementation: Implementation | None = None,
) -> tuple[Int32[Array, "B C"], Int32[Array, " B"]]:
    """``S_j = max_{i in block j} max(V_i, D[q - i])``; the forced and highest blocks, plus e drawn.

    Args:
        V: Decayed scores by slot.
        D_rev: Decayed scores by distance from the query, farthest first: ``D_rev[S-1-o] = D[o]``,
            so slot i at ``q = num_slots - 1`` reads ``D_rev[S - num_slots + i]``.
        num_slots: Visible slots N.
        budget: Blocks to select, m: at least the forced ones, at most ceil(N / block_size).
        explore: How many of them, e, are drawn rather than chosen.
        priority: Random bits: the e unselected blocks of highest priority are drawn. N is
            ceil(S / block_size).
        block_size: Slots a block; the kernel takes 32, 64 and 128.
        capacity: Length C of the result.
        implementation: "mosaic", "xla", or None to choose by platform, version and shape.

    Returns:
        The m selected blocks, ascending, padded with -1 (the first C if there are more), and m.
        Blocks 0 and (N - 1) // block_size are always among the m - e chosen; ties go to the
        lowest index, for scores and for priorities. m is 0 where N is.

    Raises:
        ValueError: a named implementation cannot run.

    Source: paper, Algorithm 1 steps 1 to 5 with the A1 reduction and Max pooling.
    """
    numbers = (x[None] for x in (num_slots, budget, explore, priority))
    [ids], count = select_blocks_of_layers(
        [V], [D_rev], *numbers, block_size=block_size, capacity=capacity,
        implementation=implementation,
    )  # fmt: skip
    return ids, count[0]


def select_blocks_of_layers(
    V: Sequence[Float[Array, "B S"]],
    D_rev: Sequence[Float[Array, "B S"]],
    num_slots: Int32[Array, "L B"],
    budget: Int32[Array, "L B"],
    explore: Int32[Array, "L B"],
    priority: UInt32[Array, "L B N"],
    *,
    block_size: int,
    capacity: int,
    implementation: Implementation | None = None,
) -> tuple[list[Int32[Array, "B C"]], list[Int32[Array, " B"]]]:
    """``select_blocks`` of L layers, whose arrays lie apart, in as many launches as one layer's.

    Raises:
        ValueError: layers that differ in number, shape or type, or a named implementation cannot
            run.
    """
    kinds = {(x.shape, str(x.dtype)) for x in V}, {(x.shape, str(x.dtype)) for x in D_rev}
    shapes = {shape for kind in kinds for shape, _ in kind}
    if (
        not len(V) == len(D_rev) == num_slots.shape[0]
        or [len(x) for x in kinds] != [1, 1]
        or (len(shapes) != 1)
    ):
        raise ValueError(
            f"V has {len(V)} layers of {sorted(map(str, kinds[0]))}, D_rev {len(D_rev)} of "
            f"{sorted(map(str, kinds[1]))}, num_slots {list(num_slots.shape)}; allowed: as many "
            "layers in all, and one shape"
        )
    arguments = (V, D_rev, num_slots, budget, explore, priority, block_size, capacity)
    if choose("select_blocks", implementation, _unsupported(V[0], block_size)) == "mosaic":
        from pallas_kernels.mosaic.selection import select_blocks_mosaic

        return select_blocks_mosaic(*arguments)
    chosen = [
        select_blocks_reference(
            V[i], D_rev[i], num_slots[i], budget[i], explore[i], priority[i], block_size, capacity
        )
        for i in range(len(V))
    ]
    return [ids for ids, _ in chosen], [count for _, count in chosen]


def _unsupported(V: jax.Array, block_size: int) -> str | None:
    slots = V.shape[1]
    if block_size not in (32, 64, 128):
        return f"block_size={block_size} is not 32, 64 or 128"
    if -(-slots // block_size) > MAX_BLOCKS:
        return f"{slots} slots are more than {MAX_BLOCKS} blocks of {block_size}"
    return None


def select_blocks_reference(
    V: jax.Array,
    D_rev: jax.Array,
    num_slots: jax.Array,
    budget: jax.Array,
    explore: jax.Array,
    priority: jax.Array,
    block_size: int,
    capacity: int,
) -> tuple[jax.Array, jax.Array]:
    """The same in plain ``jnp``, for any shape."""
    pooled = block_predictions(V, D_rev, num_slots, block_size)
    return choose_blocks(pooled, num_slots, budget, explore, priority, block_size, capacity)


def block_predictions(
    V: jax.Array, D_rev: jax.Array, num_slots: jax.Array, block_size: int
) -> Float[Array, "B N"]:
    """``S_j``, minus infinity where block j has no visible slot."""
    batch, slots = V.shape
    shifted = jax.vmap(lambda d, start: jax.lax.dynamic_slice(d, (start,), (slots,)))(
        jnp.pad(D_rev, ((0, 0), (0, slots))), slots - num_slots
    )
    predicted = jnp.maximum(V, shifted).astype(jnp.float32)
    visible = jnp.arange(slots)[None] < num_slots[:, None]
    predicted = jnp.where(visible, predicted, -jnp.inf)
    predicted = jnp.pad(predicted, ((0, 0), (0, -slots % block_size)), constant_values=-jnp.inf)
    return jnp.max(predicted.reshape(batch, -1, block_size), axis=-1)


def choose_blocks(
    pooled: jax.Array,
    num_slots: jax.Array,
    budget: jax.Array,
    explore: jax.Array,
    priority: jax.Array,
    block_size: int,
    capacity: int,
) -> tuple[jax.Array, jax.Array]:
    """Forced blocks, the highest S_j, then the highest priorities, from the block predictions."""
    num_blocks = pooled.shape[-1]
    block = jnp.arange(num_blocks)[None]
    active = -(-num_slots // block_size)[:, None]
    count = jnp.minimum(budget[:, None], active)
    drawn = jnp.minimum(explore[:, None], count)
    forced = (block == 0) | (block == active - 1)
    keys = jnp.where(forced, jnp.iinfo(jnp.int32).max, ordered_keys(pooled))
    visible = block < active
    chosen = _highest(keys, visible, count - drawn)
    selected = chosen | _highest(priority, visible & ~chosen, drawn)
    return ascending_ids(selected, capacity), count[:, 0]


def _highest(
    keys: Shaped[Array, "B N"], valid: Bool[Array, "B N"], count: Int32[Array, "B 1"]
) -> Bool[Array, "B N"]:
    """Whether an entry is among the ``count`` highest valid ones, ties to the lowest index."""
    keys = jnp.where(valid, keys, jnp.iinfo(keys.dtype).min)
    last = keys.shape[-1] - 1
    edge = jnp.take_along_axis(jnp.sort(keys, axis=-1), jnp.clip(last + 1 - count, 0, last), axis=1)
    return break_ties(valid & (keys > edge), valid & (keys == edge), count)
