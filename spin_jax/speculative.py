"""Speculative decoding: a draft's verifier rows share one set of blocks and one state."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.ranking import ascending_ids, break_ties
from spin_jax.config import SpinConfig
from spin_jax.observation import check_scores, observe_own
from spin_jax.selection import (
    BlockSelection,
    advance_keys,
    allocated_slots,
    as_capacity,
    as_num_slots,
    choose,
    raise_if_truncated,
)
from spin_jax.state import SpinState

Mask = Literal["union", "row0"]
Update = Literal["prefix", "row0"]


def select_rows(
    state: SpinState,
    num_slots: Int32[Array, "B R"],
    cfg: SpinConfig,
    *,
    top_k: int,
    capacity: int | None = None,
    mode: Mask = "union",
) -> tuple[BlockSelection, SpinState]:
    """The union over rows r of ``select_blocks(state, num_slots[:, r])``: what is scored.

    Every row selects from the same V and D, with its own N and q, and with the same exploration
    draw, or the union would grow with every row's own. [choice] The union is read once for all
    rows, but row r keeps to its own blocks, ``selection.rows[:, r]``, in its top-K and in what is
    remembered of it: what other rows want, rejected ones above all, leaves no trace. [choice]
    ``mode="row0"`` gives all rows the first row's blocks; the newest block of a later row is then
    not forced. On a first step all rows run unpruned in both modes.

    ``capacity`` and the result are as in ``select_blocks``; a union that does not fit keeps the
    forced blocks, then those of earlier rows. ``steady_capacity(..., rows=R)`` fits
    every step but a first one.

    Raises:
        ValueError: an unknown mode, arguments of the wrong shape, or, outside jit, a truncated
            row.

    Source: the paper, 3.2.2 and 4.5; the spec's "Speculative decoding".
    """
    check_mode("mode", mode, "union")
    num_slots = as_num_slots(state, num_slots, cfg, ndim=2)
    capacity = as_capacity(state, cfg, top_k, capacity)
    selection, after, needed = _select_rows(state, num_slots, cfg, top_k, capacity, mode)
    raise_if_truncated(selection, needed, capacity, num_slots, allocated_slots(state, cfg))
    return selection, after


@functools.partial(jax.jit, static_argnames=("cfg", "top_k", "capacity", "mode"))
def _select_rows(
    state: SpinState,
    num_slots: jax.Array,
    cfg: SpinConfig,
    top_k: int,
    capacity: int,
    mode: Mask,
) -> tuple[BlockSelection, SpinState, Int32[Array, " B"]]:
    most, num_rows = jnp.max(num_slots, axis=1), num_slots.shape[1]
    if mode == "row0":
        num_slots = jnp.where(state.first, most, num_slots[:, 0])[:, None]
    key, draw = advance_keys(state.key, most > 0)
    row_choice = functools.partial(choose, cfg=cfg, top_k=top_k, capacity=capacity)
    ids, _, needed = jax.vmap(row_choice, (None, 1, None), 1)(state, num_slots, draw)

    batch, rows, _ = ids.shape
    blocks = -(-allocated_slots(state, cfg) // cfg.block_size)
    at = jnp.where(ids < 0, blocks, ids)
    wanted = jax.vmap(
        jax.vmap(lambda row: jnp.zeros((blocks,), bool).at[row].set(True, mode="drop"))
    )(at)
    kept = jnp.any(wanted, axis=1)
    union = jnp.sum(kept, axis=1, dtype=jnp.int32)
    count = jnp.minimum(union, capacity)
    if capacity < blocks:
        seen = jnp.clip(jnp.max(num_slots, axis=1), 0, allocated_slots(state, cfg))
        kept = _earliest(wanted, -(-seen // cfg.block_size) - 1, count)
    block_ids = ascending_ids(kept, capacity)

    needed = jnp.maximum(union, jnp.max(needed, axis=1))
    truncated = (needed > capacity) | (most > allocated_slots(state, cfg))
    first = state.first & (truncated | (most <= 0))
    place = jnp.broadcast_to(jnp.maximum(block_ids, 0)[:, None], (batch, rows, capacity))
    own = jnp.take_along_axis(wanted, place, axis=2) & (block_ids >= 0)[:, None]
    own = jnp.broadcast_to(own, (batch, num_rows, capacity))
    selection = BlockSelection(block_ids, count, truncated, own)
    return selection, state.replace(key=key, first=first), needed


def _earliest(
    wanted: Bool[Array, "B R N"], newest: Int32[Array, " B"], count: Int32[Array, " B"]
) -> Bool[Array, "B N"]:
    """``count`` of the wanted blocks: the forced ones, then those that earlier rows want."""
    rows, block = wanted.shape[1], jnp.arange(wanted.shape[2])[None]
    forced = (block == 0) | (block == newest[:, None])
    by = jnp.min(jnp.where(wanted, jnp.arange(1, rows + 1)[None, :, None], rows + 1), axis=1)
    by = jnp.where(forced & (by <= rows), 0, by)
    # How many are wanted by each row or before it: the row at which they are enough.
    so_far = jnp.sum(by[:, None] <= jnp.arange(rows + 1)[None, :, None], axis=2, dtype=jnp.int32)
    last = jnp.sum(so_far < count[:, None], axis=1, keepdims=True)
    return break_ties(by < last, by == last, count[:, None])


def observe_rows(
    state: SpinState,
    selection: BlockSelection,
    scores: Float[Array, "B R C*b"],
    num_slots: Int32[Array, "B R"],
    num_accepted: Int32[Array, " B"],
    cfg: SpinConfig,
    *,
    mode: Update = "prefix",
) -> SpinState:
    """``observe`` of rows 0 to a in order, each with its own N, q and blocks; of no other row.

    ``num_accepted`` a is how many drafts were accepted, 0 to R - 1; -1 where no row stands. The key
    and the first step that ``select_rows`` spent stay spent: where no row that stands sees a slot,
    take them from the state before it, as the selector does.
    ``mode="row0"`` replays row 0 alone. Ages advance with every row that is replayed. [choice]

    Raises:
        ValueError: an unknown mode or arguments of the wrong shape.

    Source: the paper, 3.2.2; the spec's "Speculative decoding", update.
    """
    check_mode("mode", mode, "prefix")
    num_slots = as_num_slots(state, num_slots, cfg, ndim=2)
    rows = num_slots.shape[1]
    check_scores(scores, selection, cfg, (rows,))
    if selection.rows is None or selection.rows.shape[1] != rows:
        raise ValueError(
            f"the selection is not one of {rows} rows; pass what select_rows gave for num_slots"
        )
    num_accepted = jnp.asarray(num_accepted)
    if num_accepted.shape != (num_slots.shape[0],):
        raise ValueError(
            f"num_accepted has shape {list(num_accepted.shape)}; "
            f"allowed: [{num_slots.shape[0]}], one a request"
        )
    for row in range(rows if mode == "prefix" else 1):
        # A row that sees no slots changes nothing.
        seen = jnp.where(row <= num_accepted, num_slots[:, row], 0)
        state = observe_own(state, selection, scores[:, row], seen, cfg, selection.rows[:, row])
    return state


def check_mode(name: str, mode: str, default: str) -> None:
    """Raises ``ValueError`` unless the mode is its default or "row0"."""
    if mode not in (default, "row0"):
        raise ValueError(f"{name} is {mode!r}; allowed: {default!r}, 'row0'")
