"""Algorithm 1, step 8: what was scored is remembered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

import pallas_kernels
from pallas_kernels import ema_scatter, top_k_slots
from pallas_kernels.ordering import LOWEST
from spin_jax.config import SpinConfig
from spin_jax.pooling import pool
from spin_jax.selection import BlockSelection, allocated_slots, as_num_slots
from spin_jax.state import SpinState


def observe(
    state: SpinState,
    selection: BlockSelection,
    scores: Float[Array, "B C*b"],
    num_slots: Int32[Array, " B"],
    cfg: SpinConfig,
) -> SpinState:
    """``V[i] <- a V[i] + (1 - a) z[i]`` and ``D[q - i]`` likewise, for the scored visible slots.

    Nothing else changes or decays. Under A2 the scores of a block are pooled first, and its one
    value updates ``V[j]`` and ``D[floor(q / b) - j]``. Selected blocks get age 0, the other
    visible ones age by one.

    Args:
        state: The state that ``select_blocks`` returned.
        selection: The blocks that were scored.
        scores: z, float32, ``block_size`` a block in the order of ``block_ids``; whatever stands
            at slots that are not visible, or at padding, is ignored.
        num_slots: Visible slots N, as at the selection.
        cfg: The configuration the state was made with.

    A score that is NaN, infinite, the lowest float32 (how the indexer marks those two) or beyond
    what the state's type holds is no observation: its entry stays as it is, or it would poison
    its average for good. [choice] With ``unobserved="-inf"`` an entry counts as 0 in its first
    update.

    Raises:
        ValueError: arguments of the wrong shape.

    Source: the paper's Algorithm 1, step 8; the spec's "Block reduction" for A2.
    """
    num_slots = as_num_slots(state, num_slots, cfg, ndim=1)
    check_scores(scores, selection, cfg, ())
    return observe_own(state, selection, scores, num_slots, cfg, None)


@functools.partial(jax.jit, static_argnames=("cfg",))
def observe_own(
    state: SpinState,
    selection: BlockSelection,
    scores: Float[Array, "B C*b"],
    num_slots: Int32[Array, " B"],
    cfg: SpinConfig,
    own: Bool[Array, "B C"] | None,
) -> SpinState:
    """``observe`` of checked arguments, as if only the blocks in ``own`` had been selected."""
    num_slots = jnp.clip(num_slots, 0, allocated_slots(state, cfg))
    blocks = -(-num_slots // cfg.block_size)
    ids, size, visible = selection.block_ids, cfg.block_size, num_slots
    scores = scores.astype(jnp.float32)
    if own is not None:
        # The ids stay as they are: to the kernel, padding is at the end.
        scores = jnp.where(jnp.repeat(own, cfg.block_size, axis=1), scores, -jnp.inf)
        own_ids = jnp.where(own, ids, -1)
    else:
        own_ids = ids
    if cfg.reduction == "A2" or state.V.dtype != jnp.float32:
        # The update itself passes over what float32 cannot hold: one pass over the scores less.
        largest = float(jnp.finfo(state.V.dtype).max)
        scores = jnp.where((scores > LOWEST) & (jnp.abs(scores) <= largest), scores, -jnp.inf)
    if cfg.reduction == "A2":
        slot = (ids * size)[..., None] + jnp.arange(size)[None, None]
        scored = scores.reshape(*ids.shape, size)
        valid = (slot < num_slots[:, None, None]) & (scored > -jnp.inf)
        scores, size, visible = pool(scored, valid, cfg.pooling), 1, blocks
    V, D_rev = ema_scatter(
        state.V, state.D_rev, scores, ids, visible, block_size=size, decay=cfg.decay
    )
    return state.replace(V=V, D_rev=D_rev, ages=_aged(state.ages, own_ids, blocks))


def top_k_and_observe(
    state: SpinState,
    selection: BlockSelection,
    scores: Float[Array, "B C*b"],
    group_max: Float[Array, "B G"],
    num_slots: Int32[Array, " B"],
    top_k: int,
    cfg: SpinConfig,
) -> tuple[Int32[Array, "B K"], SpinState]:
    """The slots of the highest scores, and ``observe``: in one kernel where the state allows it."""
    size = cfg.block_size
    num_slots = jnp.clip(num_slots, 0, allocated_slots(state, cfg))
    if cfg.reduction == "A2" or state.V.dtype != jnp.float32:
        slots = top_k_slots(
            scores, top_k, block_ids=selection.block_ids, block_size=size, group_max=group_max,
            num_blocks=selection.count,
        )  # fmt: skip
        return slots, observe(state, selection, scores, num_slots, cfg)
    slots, V, D_rev = pallas_kernels.top_k_and_observe(
        scores, top_k, state.V, state.D_rev, selection.block_ids, num_slots,
        block_size=size, decay=cfg.decay, group_max=group_max, num_blocks=selection.count,
    )  # fmt: skip
    ages = _aged(state.ages, selection.block_ids, -(-num_slots // size))
    return slots, state.replace(V=V, D_rev=D_rev, ages=ages)


def _aged(
    ages: Int32[Array, "B N"] | None, block_ids: Int32[Array, "B C"], blocks: Int32[Array, " B"]
) -> Int32[Array, "B N"] | None:
    if ages is None:
        return None
    batch, num_blocks = ages.shape
    older = ages + (jnp.arange(num_blocks)[None] < blocks[:, None])
    scored = jnp.where((block_ids >= 0) & (block_ids < blocks[:, None]), block_ids, num_blocks)
    return older.at[jnp.arange(batch)[:, None], scored].set(0, mode="drop")


def check_scores(
    scores: jax.Array, selection: BlockSelection, cfg: SpinConfig, rows: tuple[int, ...]
) -> None:
    """Raises ``ValueError`` unless there are ``block_size`` scores a selected block."""
    batch, capacity = selection.block_ids.shape
    wanted = (batch, *rows, capacity * cfg.block_size)
    if scores.shape != wanted:
        raise ValueError(
            f"scores has shape {list(scores.shape)}; allowed: {list(wanted)}, {cfg.block_size} "
            f"scores for each of the {capacity} places of block_ids"
        )
