"""Algorithm 1, steps 1 to 5: the blocks to score in this step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key, UInt32

from pallas_kernels import select_blocks as choose_by_maxima
from pallas_kernels import select_blocks_of_layers
from pallas_kernels.selection import block_predictions, choose_blocks
from spin_jax.config import SpinConfig, block_budget, check_count, exploration_share
from spin_jax.pooling import blocks_of_top_slots, by_block, pool
from spin_jax.state import SpinState, needs_ages


class BlockSelection(flax.struct.PyTreeNode):
    """The blocks that a step scores."""

    block_ids: Int32[Array, "B C"]
    """Ascending; -1 after the last."""
    count: Int32[Array, " B"]
    """How many; 0 where no slot is visible yet."""
    truncated: Bool[Array, " B"]
    """Whether C, or the state, was too small for what the row needed."""
    rows: Bool[Array, "B R C"] | None = None
    """Of a draft's verifier rows (``select_rows``): which of the blocks are row r's own."""


def select_blocks(
    state: SpinState,
    num_slots: Int32[Array, " B"],
    cfg: SpinConfig,
    *,
    top_k: int,
    capacity: int | None = None,
) -> tuple[BlockSelection, SpinState]:
    """``m = max(ceil(K/b), ceil((1 - rho) B))`` blocks: forced, highest predicted, e explored.

    Slot i is predicted as ``max(V[i], D[q - i])`` with ``q = num_slots - 1``, a block by pooling
    its visible slots (``cfg.reduction``). The sink block 0 and the newest block are always among
    the ``m - e`` highest; ``e = min(round(gamma m), m - forced)`` more are drawn from the blocks
    not selected. Ties go to the lowest index. A request on its first step takes all its blocks.

    A0 has no block budget of its own: the forced blocks and those that hold a top slot are u, and
    exploration adds ``min(round(gamma u), B - u)`` to them, so m is their sum; policy "none" adds
    nothing. [choice]

    Args:
        state: From ``init_spin``, ``reset`` or the last step.
        num_slots: Visible slots N of each request. 0 is allowed: such a row selects nothing, and
            neither draws nor spends its first step.
        cfg: The configuration the state was made with.
        top_k: K, the slots that attention keeps.
        capacity: C, the length of ``block_ids``; all allocated blocks by default.
            ``steady_capacity`` gives the least that suffices after the first step.

    Returns:
        The selection, and the state with keys advanced and ``first`` cleared for the rows that
        were served in full. A row that needs more than C blocks is marked ``truncated``, keeps
        its first flag, and gets what its pruned selection (forced, highest, explored) has room
        for; so does a row whose N exceeds the state, which sees only the slots there are.

    Raises:
        ValueError: arguments of the wrong shape; or, outside jit, a row that is truncated.

    Source: the paper's Algorithm 1, steps 1 to 5; the spec's "One decode step".
    """
    num_slots = as_num_slots(state, num_slots, cfg, ndim=1)
    capacity = as_capacity(state, cfg, top_k, capacity)
    selection, after, needed = _select(state, num_slots, cfg, top_k, capacity)
    raise_if_truncated(selection, needed, capacity, num_slots, allocated_slots(state, cfg))
    return selection, after


@functools.partial(jax.jit, static_argnames=("cfg", "top_k", "capacity"))
def _select(
    state: SpinState, num_slots: jax.Array, cfg: SpinConfig, top_k: int, capacity: int
) -> tuple[BlockSelection, SpinState, Int32[Array, " B"]]:
    key, draw = advance_keys(state.key, num_slots > 0)
    block_ids, count, needed = choose(state, num_slots, draw, cfg, top_k, capacity)
    truncated = (needed > capacity) | (num_slots > allocated_slots(state, cfg))
    first = state.first & (truncated | (num_slots <= 0))
    selection = BlockSelection(block_ids=block_ids, count=count, truncated=truncated)
    return selection, state.replace(key=key, first=first), needed


def select_layers(
    states: Sequence[SpinState],
    num_slots: Int32[Array, " B"],
    cfg: SpinConfig,
    *,
    top_k: int,
    capacity: int | None = None,
) -> list[tuple[BlockSelection, SpinState]]:
    """``select_blocks`` of each of a model's layers, which need nothing of a step but N.

    All states have room for the same slots, as ``init_spin`` made them for one model.

    Where the configuration is of the paper (A1, max pooling, an exploration that needs no
    ages), the layers share their launches on a GPU: a layer alone costs mostly the launches.
    """
    if len({state.V.shape for state in states}) != 1:
        raise ValueError(
            f"V of the states has shapes {[list(state.V.shape) for state in states]}; allowed: one "
            "shape, and at least one layer"
        )
    for state in states:
        num_slots = as_num_slots(state, num_slots, cfg, ndim=1)
    capacity = as_capacity(states[0], cfg, top_k, capacity)
    shared = cfg.reduction == "A1" and cfg.pooling == "max" and not needs_ages(cfg)
    if not shared:
        return [
            select_blocks(state, num_slots, cfg, top_k=top_k, capacity=capacity) for state in states
        ]
    selections, after, needed = _select_layers(tuple(states), num_slots, cfg, top_k, capacity)
    for selection, least in zip(selections, needed, strict=True):
        allocated = allocated_slots(states[0], cfg)
        raise_if_truncated(selection, least, capacity, num_slots, allocated)
    return list(zip(selections, after, strict=True))


@functools.partial(jax.jit, static_argnames=("cfg", "top_k", "capacity"))
def _select_layers(
    states: tuple[SpinState, ...], num_slots: jax.Array, cfg: SpinConfig, top_k: int, capacity: int
) -> tuple[list[BlockSelection], list[SpinState], Int32[Array, "L B"]]:
    allocated, served = allocated_slots(states[0], cfg), num_slots > 0
    keys, first = (jnp.stack(x) for x in zip(*((s.key, s.first) for s in states), strict=True))
    keys, draw = jax.vmap(advance_keys, (0, None))(keys, served)
    visible = jnp.broadcast_to(jnp.clip(num_slots, 0, allocated), first.shape)
    blocks = -(-visible // cfg.block_size)
    budget = block_budget(blocks, cfg, top_k)
    explore = _explored(budget, blocks, cfg)
    budget, explore, needed = _fit(first, blocks, budget, explore, capacity)
    priority = jax.vmap(lambda draw: _priority(states[0], draw, cfg))(draw)
    ids, count = select_blocks_of_layers(
        [s.V for s in states], [s.D_rev for s in states], visible, budget, explore, priority,
        block_size=cfg.block_size, capacity=capacity,
    )  # fmt: skip
    truncated = (needed > capacity) | (num_slots > allocated)[None]
    first = first & (truncated | ~served[None])
    layers = range(len(states))
    return (
        [BlockSelection(ids[i], count[i], truncated[i]) for i in layers],
        [states[i].replace(key=keys[i], first=first[i]) for i in layers],
        needed,
    )


def choose(
    state: SpinState,
    num_slots: Int32[Array, " B"],
    draw: Key[Array, " B"],
    cfg: SpinConfig,
    top_k: int,
    capacity: int,
) -> tuple[Int32[Array, "B C"], Int32[Array, " B"], Int32[Array, " B"]]:
    """Block ids, how many, and how many it takes to serve the row in full."""
    num_slots = jnp.clip(num_slots, 0, allocated_slots(state, cfg))
    blocks = -(-num_slots // cfg.block_size)
    budget, explore = _plan(state, num_slots, blocks, cfg, top_k)
    budget, explore, needed = _fit(state.first, blocks, budget, explore, capacity)

    # A2 remembers a value a block: it is A1 with blocks for slots.
    size, visible = (1, blocks) if cfg.reduction == "A2" else (cfg.block_size, num_slots)
    pools = cfg.reduction == "A1" and cfg.pooling != "max"
    if not pools and cfg.policy != "staleness":
        priority = _priority(state, draw, cfg)
        arguments = (state.V, state.D_rev, visible, budget, explore, priority)
        return *choose_by_maxima(*arguments, block_size=size, capacity=capacity), needed

    if pools:
        predicted = by_block(_predicted_slots(state, num_slots), size, -jnp.inf)
        visible_slots = jnp.arange(state.V.shape[1])[None] < num_slots[:, None]
        pooled = pool(predicted, by_block(visible_slots, size, False), cfg.pooling)
    else:
        pooled = block_predictions(state.V, state.D_rev, visible, size)
    if cfg.policy == "staleness":
        priority = _staleness(state, pooled, blocks, budget - explore, cfg)
    else:
        priority = _priority(state, draw, cfg)
    return *choose_blocks(pooled, visible, budget, explore, priority, size, capacity), needed


def _plan(
    state: SpinState, num_slots: jax.Array, blocks: jax.Array, cfg: SpinConfig, top_k: int
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """Budget m and explored blocks e of a steady step."""
    if cfg.reduction == "A0":
        kept = blocks_of_top_slots(_predicted_slots(state, num_slots), num_slots, cfg, top_k)
        explore = jnp.minimum(_wanted(kept, cfg), blocks - kept)
        return kept + explore, explore
    budget = block_budget(blocks, cfg, top_k)
    return budget, _explored(budget, blocks, cfg)


def _fit(
    first: jax.Array, blocks: jax.Array, budget: jax.Array, explore: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Budget and exploration within the capacity, and how many blocks serve the row in full."""
    needed = jnp.where(first, blocks, budget)
    whole = first & (blocks <= capacity)
    # Where not all fit, the highest come before the explored.
    explore = jnp.where(whole, 0, jnp.clip(capacity - (budget - explore), 0, explore))
    return jnp.where(whole, blocks, jnp.minimum(budget, capacity)), explore, needed


def _explored(budget: jax.Array, blocks: jax.Array, cfg: SpinConfig) -> jax.Array:
    # Whatever is not selected can be explored, and that is at least e, as m <= B.
    return jnp.minimum(_wanted(budget, cfg), budget - jnp.minimum(blocks, 2))


def _wanted(budget: jax.Array, cfg: SpinConfig) -> jax.Array:
    return jnp.zeros_like(budget) if cfg.policy == "none" else exploration_share(budget, cfg)


def _predicted_slots(state: SpinState, num_slots: jax.Array) -> Float[Array, "B S"]:
    """``max(V[i], D[q - i])``, minus infinity where slot i is not visible."""
    return block_predictions(state.V, state.D_rev, num_slots, 1)


def _priority(state: SpinState, draw: Key[Array, " B"], cfg: SpinConfig) -> UInt32[Array, "B N"]:
    """Which unselected blocks to explore first, for the policies that need no prediction."""
    if cfg.policy == "age":
        assert state.ages is not None
        return state.ages.astype(jnp.uint32)
    batch, entries = state.V.shape
    blocks = entries if cfg.reduction == "A2" else -(-entries // cfg.block_size)
    if cfg.policy == "none":
        return jnp.zeros((batch, blocks), jnp.uint32)
    # One hash a block of (key, block): unlike one array of random bits a request, a block's draw
    # cannot depend on how many blocks are allocated. fold_in is that hash; its words serve.
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    words = jax.random.key_data(fold(draw, jnp.arange(blocks)))
    return words[..., 0] ^ words[..., 1]


def _staleness(
    state: SpinState, pooled: jax.Array, blocks: jax.Array, highest: jax.Array, cfg: SpinConfig
) -> UInt32[Array, "B N"]:
    """``age (S - min S + eps)``, the minimum over the blocks that are not selected. [choice]

    A block predicted at minus infinity or NaN has importance eps.
    """
    assert state.ages is not None
    num_blocks = pooled.shape[-1]
    none = jnp.zeros_like(pooled, jnp.uint32)
    # pooled is -inf from ``blocks`` on, and one block is one entry to choose_blocks here.
    ids, _ = choose_blocks(pooled, blocks, highest, jnp.zeros_like(highest), none, 1, num_blocks)
    block = jnp.arange(num_blocks)[None]
    row = jnp.arange(ids.shape[0])[:, None]
    chosen = (
        jnp.zeros(pooled.shape, bool)
        .at[row, jnp.where(ids < 0, num_blocks, ids)]
        .set(True, mode="drop")
    )
    open_ = ~chosen & (block < blocks[:, None]) & jnp.isfinite(pooled)
    least = jnp.min(jnp.where(open_, pooled, jnp.inf), axis=-1, keepdims=True)
    importance = jnp.where(open_, pooled - least, 0.0) + cfg.staleness_epsilon
    # The bits of floats that are not negative are in the order of the floats.
    return jax.lax.bitcast_convert_type(state.ages * importance, jnp.uint32)


def advance_keys(
    key: Key[Array, " B"], served: Bool[Array, " B"]
) -> tuple[Key[Array, " B"], Key[Array, " B"]]:
    """The keys after a step and the keys to draw with; idle rows stay where they are."""
    pair = jax.vmap(jax.random.split)(key)
    return jnp.where(served, pair[:, 0], key), pair[:, 1]


def allocated_slots(state: SpinState, cfg: SpinConfig) -> int:
    """How many slots the state has room for (under A2, whole blocks)."""
    return state.V.shape[1] * (cfg.block_size if cfg.reduction == "A2" else 1)


def as_num_slots(state: SpinState, num_slots: Any, cfg: SpinConfig, ndim: int) -> jax.Array:
    """``num_slots`` as int32, checked against the state and the configuration."""
    batch = state.first.shape[0]
    if jnp.dtype(cfg.state_dtype) != state.V.dtype or cfg.empty != state.empty:
        raise ValueError(
            f"the state holds {state.V.dtype} and starts at {state.empty}, the configuration says "
            f"{cfg.state_dtype} and {cfg.empty}; pass the configuration given to init_spin"
        )
    if (state.ages is None) == (cfg.policy in ("staleness", "age")):
        raise ValueError(
            f"policy is {cfg.policy!r} and the state has {'no ' if state.ages is None else ''}"
            "ages; pass the configuration given to init_spin"
        )
    num_slots = jnp.asarray(num_slots)
    if not jnp.issubdtype(num_slots.dtype, jnp.integer):
        raise ValueError(f"num_slots is {num_slots.dtype}; allowed: int32, slots a request sees")
    if num_slots.ndim != ndim or num_slots.shape[0] != batch:
        shape = f"[{batch}]" if ndim == 1 else f"[{batch}, rows]"
        raise ValueError(f"num_slots has shape {list(num_slots.shape)}; allowed: {shape}")
    return num_slots.astype(jnp.int32)


def as_capacity(state: SpinState, cfg: SpinConfig, top_k: int, capacity: int | None) -> int:
    """``capacity``, by default every allocated block, checked like ``top_k``."""
    check_count("top_k", top_k)
    blocks = -(-allocated_slots(state, cfg) // cfg.block_size)
    if capacity is None:
        return blocks
    check_count("capacity", capacity, blocks, "steady_capacity gives what steady steps need")
    return capacity


def raise_if_truncated(
    selection: BlockSelection,
    needed: jax.Array,
    capacity: int,
    num_slots: jax.Array,
    max_slots: int,
) -> None:
    """Outside jit and its like, a row that cannot be served is the caller's to know at once."""
    if isinstance(selection.truncated, jax.core.Tracer) or not bool(selection.truncated.any()):
        return
    row = int(jnp.argmax(selection.truncated))
    seen = int(jnp.max(num_slots[row]))
    if seen > max_slots:
        raise ValueError(
            f"num_slots of request {row} is {seen}; allowed: 0 to {max_slots}; "
            "call init_spin with a larger max_slots"
        )
    raise ValueError(
        f"capacity is {capacity}, but request {row} with {seen} slots needs {int(needed[row])} "
        f"blocks; pass capacity={int(jnp.max(needed))} or more, or leave it out"
    )
